"""Draws that can be repeated: what is found in a run is found again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from ..choreography import Party
from ..choreography.steps import Draw


class Draws:
    """What pairs draw in one run, and the halves of inputs: uniform words from a seed, the same for the same place.

    Args:
        extreme: whether half of them are near a power of two or its negative.
    """

    def __init__(self, seed: int | tuple, extreme: bool = False):
        self._seed, self._extreme = repr(seed), extreme

    def words(self, place: Any, count: int) -> torch.Tensor:
        """int64 [count]."""
        digest = hashlib.sha256(f"{self._seed} {place}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
        found = np.frombuffer(bytearray(generator.bytes(8 * count)), np.int64)
        if self._extreme:
            power = np.left_shift(1, generator.integers(0, 64, count)) - generator.integers(0, 2, count)
            some = generator.integers(0, 4, count)
            found = np.where(some < 2, found, np.where(some == 2, power, -power))
        return torch.from_numpy(found)

    def of(self, pair: frozenset[Party], name: str, number: int, setup: bool, count: int) -> torch.Tensor:
        """What a pair draws at a place of its stream."""
        return self.words(_place(pair, name, number, setup), count)


def half_of(i: int) -> tuple:
    """Where A's half of an input is drawn."""
    return "half", i


def place_of(step: Draw, setup: bool) -> tuple:
    """Where a step draws."""
    return _place(step.owners, step.name, step.number, setup)


def _place(pair: frozenset[Party], name: str, number: int, setup: bool) -> tuple:
    return sorted(p.name for p in pair), name, number, setup


class Flipped(Draws):
    """The same draws, but that of one place has bits flipped: of each word those of one mask."""

    def __init__(self, draws: Draws, place: tuple, mask: int):
        self._draws, self._place, self._mask = draws, place, mask

    def words(self, place: Any, count: int) -> torch.Tensor:
        found = self._draws.words(place, count)
        return found ^ self._mask if place == self._place else found


class ManyDraws:
    """The draws of so many runs: those of a place are made at once."""

    def __init__(self, seed: int | tuple, runs: int):
        self._draws, self._runs = Draws(seed), runs
        self._places: dict[Any, torch.Tensor] = {}

    def run(self, i: int) -> Draws:
        """Those of one run."""
        return _OneOf(self, i)

    def words(self, place: Any, count: int, i: int) -> torch.Tensor:
        """int64 [count], of run i."""
        if place not in self._places:
            self._places[place] = self._draws.words(place, self._runs * count).view(self._runs, count)
        return self._places[place][i]


class _OneOf(Draws):
    def __init__(self, many: ManyDraws, i: int):
        self._many, self._i = many, i

    def words(self, place: Any, count: int) -> torch.Tensor:
        return self._many.words(place, count, self._i)

    def of(self, pair: frozenset[Party], name: str, number: int, setup: bool, count: int) -> torch.Tensor:
        return self.words((pair, name, number, setup), count)
