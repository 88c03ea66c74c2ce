"""What a layer was given and gave, as its module runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def calls_of(layer: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(first input, output) of each call of `layer` inside, in this thread: others may call its module meanwhile.

    A module that runs its layers in threads of its own is not heard.
    """
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    thread = threading.get_ident()

    def remember(_layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if threading.get_ident() == thread:
            seen.append((inputs[0], output))

    hook = layer.register_forward_hook(remember)
    try:
        yield seen
    finally:
        hook.remove()
