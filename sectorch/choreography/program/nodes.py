"""What a program is made of: steps, the places of their values, and what parties bring."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..parties import Party, Phase
from ..steps import Step

Slot = tuple[int, int, int]
"""A value's place: the number of the call, the step that made it (-1 of an input), and which of its results it is."""


@dataclass(unsafe_hash=True, slots=True)  # not frozen, which takes three times as long to make
class Taken:
    """An operand that a step made, or that a party brought. It does not change."""

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


@dataclass(eq=False, slots=True)
class Node:
    """One step. `operands` are `Taken` from other steps, or public; `results` are meta tensors. It does not change.

    Attributes:
        many: whether the step gives a tuple.
        place: the layer that it belongs to.
        taken: the places of what its operands were made by.
    """

    step: Step
    operands: tuple[Any, ...]
    slots: tuple[Slot, ...]
    results: tuple[Any, ...]
    many: bool
    place: str
    taken: tuple[Slot, ...] = field(init=False)

    def __post_init__(self):
        self.taken = tuple([operand.slot for operand in self.operands if type(operand) is Taken])

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

MANY = 100_000
"""Objects made since the last collection that are a program rather than what a call leaves."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no cycle of objects is collected, in no thread, but for who asks for it.

    A program is tens of thousands of objects that stay: collections that pass over them take half of its time. Many
    objects are counted as old afterwards, which spares three passes over them, unless the application has frozen
    objects of its own. And what is there when a step is over must not hang on when a collection happens to run
    (`training/programs.py`).
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
                if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()  # which puts them into the oldest generation
                gc.enable()
