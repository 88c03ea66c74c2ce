"""Every value of a small domain with every number of a small set for each draw: what random draws hardly ever meet.

A protocol is written for 64 bits, but what it meets can be chosen: its inputs are those near zero, near the ends of
their range and near its own numbers, and one draw at a time goes through the numbers between which carries start and
end. Among them are the multiples of 2^(64 - w), which are a ring of w bits of their own for whatever adds and compares.
The steps are the protocol's; only the draws are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..choreography.steps import Draw
from ..errors import ArgumentError
from .constants import constants_of
from .draws import Draws, half_of, place_of
from .outcomes import Outcomes
from .played import SHARED, Given, Protocol

FILLINGS = (0, -1, None)
"""What all other draws are; None for uniform."""
ELEMENTS = 1 << 15
"""Of one run, at most."""
CASES = 1 << 21
"""In all, at most: more take minutes."""
OWN = 2
"""The protocol's own numbers near which inputs and draws are tried."""
WHOLE = 8
"""A range of so many bits is tried as a whole; of several inputs, all their combinations."""
NAMED = 12
"""Draws that go through their numbers: of more the first ones, and the others are filled."""


@dataclass(frozen=True)
class _Mask:
    """One number of each element that somebody draws: a draw, or a row of one."""

    place: Any
    row: int
    width: int
    name: str


class Exhaustive:
    """A protocol of elements under test on small domains.

    Args:
        bits: numbers near a place are 2^bits.

    Raises:
        ArgumentError: so many cases cannot be run.
    """

    def __init__(self, outcomes: Outcomes, bits: int, seed: int):
        if not 1 <= bits <= 8:
            raise ArgumentError(f"exhaustive= takes the bits of small domains, 1 to 8, or 0 for none; got {bits}")
        traced = outcomes.protocol
        self._outcomes, self._seed = outcomes, seed
        own = constants_of(traced.program)[:OWN]
        self._values = list(itertools.product(*(_values(g, bits, len(traced.given), own) for g in traced.given)))
        self._numbers = {width: _numbers(width, bits, own) for width in (32, 64)}
        self._n = 64 * -(-min(ELEMENTS, len(self._values) * len(self._numbers[64]) * len(FILLINGS)) // 64)
        self._traced = traced.sized(self._n)
        every = list(_masks_of(self._traced))
        self._draws = [list(rows) for _, rows in itertools.groupby(every, lambda mask: mask.place)]
        self._masks = every[:NAMED]
        self._sizes = (len(FILLINGS), max(1, len(self._masks)), len(self._values), len(self._numbers[64]))
        self._cases = int(np.prod(self._sizes))
        if self._cases > CASES:
            raise ArgumentError(
                f"with exhaustive={bits} there are {self._cases} cases, of which {CASES} can be run: pass fewer bits"
            )
        most = f"{len(self._masks)} of {len(every)}" if len(every) > NAMED else f"{len(every)}"
        self.looked = (
            f"{len(self._values)} inputs with each of {most} draws at {len(self._numbers[64])} numbers, "
            f"the others zero, -1 and uniform: {self._cases} cases"
        )

    def check(self) -> Iterator[tuple[str, str]]:
        """What does not hold, as check and text: the first case."""
        for first in range(0, self._cases, self._n):
            case = np.arange(first, first + self._n) % self._cases
            filling, mask, value, number = (torch.from_numpy(at) for at in np.unravel_index(case, self._sizes))
            columns = torch.tensor(self._values).T
            sizes = [g.size(self._n) for g in self._traced.given]
            inputs = [column[value].view(size) for column, size in zip(columns, sizes, strict=True)]
            draws = _Steered((self._seed, "exhaustive", first))
            for rows in self._draws:
                draws.fixed[repr(rows[0].place)] = self._drawn(draws, rows, filling, mask, number)
            wrong = self._outcomes.first_wrong(inputs, self._traced.play(inputs, draws))
            if wrong is not None:
                at, text = wrong[0] % self._n, wrong[1]
                yield "exhaustive", text + self._draws_of(int(filling[at]), int(mask[at]), int(number[at]))
                return

    def _drawn(
        self, draws: Draws, rows: Sequence[_Mask], filling: torch.Tensor, mask: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        width = rows[0].width
        dtype = torch.int64 if width == 64 else torch.int32
        count = len(rows) * self._n
        uniform = draws.words(rows[0].place, count).to(dtype).view(len(rows), self._n)
        found = torch.where(filling == 0, torch.zeros_like(uniform), torch.where(filling == 1, -1, uniform))
        numbers = torch.tensor(self._numbers[width], dtype=dtype)[number]
        for i, row in enumerate(rows):
            if row in self._masks:
                found[i] = torch.where(mask == self._masks.index(row), numbers, found[i])
        return found.to(dtype).contiguous().view(-1).view(torch.int64)

    def _draws_of(self, filling: int, mask: int, number: int) -> str:
        if not self._masks:
            return ""
        chosen, filled = self._masks[mask], FILLINGS[filling]
        others = "uniform" if filled is None else str(filled)
        return f", where {chosen.name} is {self._numbers[chosen.width][number]} and all other draws are {others}"


def in_elements(traced: Protocol) -> bool:
    """Whether every input has as many elements as there are to be, so that each case can have its own."""
    return all(given.size(traced.n).numel() == traced.n and callable(given.shape) for given in traced.given)


class _Steered(Draws):
    """Draws of which some are given, by their places."""

    def __init__(self, seed: tuple):
        super().__init__(seed)
        self.fixed: dict[str, torch.Tensor] = {}

    def words(self, place: Any, count: int) -> torch.Tensor:
        given = self.fixed.get(repr(place))
        return super().words(place, count) if given is None else given


def _masks_of(traced: Protocol) -> Iterator[_Mask]:
    """What is drawn for each element: halves of inputs, and draws with the elements as their last dimension."""
    for i, given in enumerate(traced.given):
        if given.party == SHARED:
            yield _Mask(half_of(i), 0, 64, f"A's half of x{i}")
    for at, node in enumerate(traced.program.nodes):
        step = node.step
        if not isinstance(step, Draw) or step.dtype not in (torch.int64, torch.int32):
            continue
        if len(step.size) and step.size[-1] == traced.n:
            rows, name = step.size.numel() // traced.n, " of ".join(reversed(step.name.rsplit("/", 1)))
            for row in range(rows):
                which = f"{name} [{row}]" if rows > 1 else name
                yield _Mask(place_of(step, at < len(traced.program.setup)), row, 8 * step.dtype.itemsize, which)


def _near(centres: Sequence[int], half: int) -> list[int]:
    return list(dict.fromkeys(centre + d for centre in centres for d in range(-half, half)))


def _values(given: Given, bits: int, inputs: int, own: Sequence[int]) -> list[int]:
    """Of one input: the whole range, if it is small; or what is near zero, its ends and the protocol's own numbers."""
    if given.high - given.low < 1 << WHOLE // inputs:
        return list(range(given.low, given.high + 1))
    half = max(1, (1 << bits) // 2 // inputs**2)
    ends = [given.low + half, given.high + 1 - half]
    own = [sign * v for v in own for sign in (1, -1)] if inputs == 1 else []
    return [v for v in _near([0, *ends, *own], half) if given.low <= v <= given.high]


def _numbers(width: int, bits: int, own: Sequence[int]) -> list[int]:
    """Of a word: near zero, a change of sign and the protocol's own numbers, and the multiples of a high power."""
    near = _near([0, 1 << (width - 1), *own, *(-v for v in own)], 1 << (bits - 1))
    ring = [k << (width - bits) for k in range(1 << bits)]
    sign = 1 << (width - 1)
    return [((v + sign) & ((1 << width) - 1)) - sign for v in [*near, *ring]]
