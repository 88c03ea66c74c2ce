"""What a program is made of: steps, the places of their values, and what parties bring."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..parties import Party, Phase
from ..steps import Step

Slot = tuple[int, int, int]
"""A value's place: the number of the call, the step that made it (-1 of an input), and which of its results it is."""


@dataclass(frozen=True)
class Taken:
    """An operand that a step made, or that a party brought."""

    slot: Slot


@dataclass(frozen=True)
class Input:
    """A value that a party brings: the query, or a weight."""

    slot: Slot
    name: str
    party: Party
    shape: torch.Size
    dtype: torch.dtype
    phase: Phase


@dataclass(frozen=True, eq=False)
class Node:
    """One step. `operands` are `Taken` from other steps, or public; `results` are meta tensors.

    Attributes:
        many: whether the step gives a tuple.
        place: the layer that it belongs to.
    """

    step: Step
    operands: tuple[Any, ...]
    slots: tuple[Slot, ...]
    results: tuple[Any, ...]
    many: bool
    place: str

    @property
    def taken(self) -> list[Slot]:
        return [operand.slot for operand in self.operands if isinstance(operand, Taken)]

    @property
    def needs(self) -> set[Slot]:
        return set(self.taken)

    @property
    def parties(self) -> frozenset[Party]:
        """Who holds its results."""
        return self.step.owners


class _Uncollected:
    """How many want no collection now, over all threads, and whether there were any before."""

    def __init__(self):
        self.lock, self.count, self.was = threading.Lock(), 0, True


_UNCOLLECTED = _Uncollected()


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no cycle of objects is collected, in no thread, but for who asks for it.

    A program is tens of thousands of objects that stay: collections that pass over them take half of its time. And what
    is there when a step is over must not hang on when one happens to run (`training/programs.py`).
    """
    state = _UNCOLLECTED
    with state.lock:
        state.was = gc.isenabled() if state.count == 0 else state.was
        state.count += 1
        gc.disable()
    try:
        yield
    finally:
        with state.lock:
            state.count -= 1
            if state.count == 0 and state.was:
                gc.enable()
