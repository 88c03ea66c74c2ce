"""Refuses random draws while a program is traced. Its own file, which alone may look at global random generators.

Numbers that a function draws from a global generator while it is traced would be public constants of its program.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ...errors import ArgumentError


def _generators() -> tuple:
    """The states of the global generators."""
    state: Any = numpy.random.get_state()
    _, words, *rest = state  # includes the normal number that numpy keeps for the next draw
    return torch.get_rng_state().numpy().tobytes(), words.tobytes(), rest, random.getstate()


@contextmanager
def check_no_random_draws() -> Iterator[None]:
    """Check that the `with` block draws nothing from the generators of torch, numpy and Python.

    Raises:
        ArgumentError: it did. Such numbers are public and the same in every call, so they mask nothing.
    """
    before = _generators()
    yield
    if _generators() != before:
        raise ArgumentError(
            "the function drew random numbers as it was traced: they would be public, and the same in every call; "
            "two parties draw a mask by net.common(p, q, shape, label), one party by net.fresh, and data is an input"
        )
