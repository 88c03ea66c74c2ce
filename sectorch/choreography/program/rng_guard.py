"""Random numbers that a function draws while it is traced would be public constants of its program: refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ...errors import ArgumentError


def _generators() -> tuple:
    """Where the generators stand that nobody has to ask for."""
    state: Any = numpy.random.get_state()
    _, words, *rest = state  # with the normal number that numpy keeps for the next time
    return torch.get_rng_state().numpy().tobytes(), words.tobytes(), rest, random.getstate()


@contextmanager
def check_no_random_draws() -> Iterator[None]:
    """What is inside draws nothing from the generators of torch, numpy and Python.

    Raises:
        ArgumentError: it did. What is drawn so is the same in every call, and everybody has it: it masks nothing.
    """
    before = _generators()
    yield
    if _generators() != before:
        raise ArgumentError(
            "the function drew random numbers as it was traced: they would be public, and the same in every call; "
            "two parties draw a mask by net.common(p, q, shape, label), one party by net.fresh, and data is an input"
        )
