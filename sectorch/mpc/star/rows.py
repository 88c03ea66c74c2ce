"""Which rows of dealt bits are claimed to be products of which, and which to be zero (`proved.py`).

Each row of a claim is a sum (xor) of rows of two tensors of packed bits, of which A and S have halves. So both work out
all rows of all claims in one step, straight into their places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...choreography import leaf
from ...choreography.located import compute
from ...ring.bitplanes import Rows, RowSums
from ...ring.field import TILE
from .halves import Halves


@dataclass(frozen=True)
class Sets:
    """Rows that are summed: for each claim x y = z those of x, of y and of z, and those of each sum that is zero."""

    x: Sequence[Rows]
    y: Sequence[Rows]
    z: Sequence[Rows]
    zeros: Sequence[Rows] = ()


class Sums(Protocol):
    """Claims on two tensors [m, W] and [n, W]; hashable, and the same in every call."""

    def sets(self, count: int, at_A: bool) -> Sets:
        """Which rows A or S sums; `count` is m, and rows of the second tensor go on after those of the first."""
        ...


@dataclass(frozen=True)
class Products:
    """Claims on rows of two dealt tensors, for each bit of them."""

    first: Halves
    second: Halves
    sums: Sums

    @property
    def words(self) -> tuple[int, int]:
        """Of the products, and of what is zero."""
        (count, width), sums = self.first.shape, self.sums
        sets = _sets(sums, count, True)
        return len(sets.z) * width, len(sets.zeros) * width


@functools.lru_cache(maxsize=1024)
def _sets(sums: Sums, count: int, at_A: bool) -> Sets:
    return sums.sets(count, at_A)


@dataclass(frozen=True)
class Carries:
    """Of the bits [65, W] of a mask and of its last carry, and the planes [64, W] of one's own half of the mask."""

    def sets(self, count: int, at_A: bool) -> Sets:
        """c_{k+1} xor c_k = (r_A,k xor c_k) (r_S,k xor c_k), and c_0 = 0: halves of c are r xor one's own."""
        bits = [(k,) for k in range(64)]
        carries = [*((k, count + k) for k in range(64)), (64,)]
        x, y = (bits, carries[:64]) if at_A else (carries[:64], bits)
        return Sets(x, y, [carries[k + 1] + carries[k] for k in range(64)], carries[:1])


@dataclass(frozen=True)
class Codes:
    """Of thermometer codes [7 blocks + tops, W] of the blocks of three planes in these spans, and the bits."""

    spans: tuple[tuple[int, int], ...]
    tops: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> Sets:
        """A block's codes are sums of r_1 r_0, r_2 r_1, r_2 r_0, r_2 r_1 r_0 and of r_0, r_1, r_2."""
        starts = [plane for low, high in self.spans for plane in range(low, high, 3)]
        blocks = (count - len(self.tops)) // 7
        u = [[(k * blocks + block,) for block in range(blocks)] for k in range(7)]
        r = [[(count + low + i,) if low + i >= 0 else () for low in starts] for i in range(3)]
        high, both, middle, zeros = _all(u[4], u[5], u[6]), _all(u[2], u[3], u[6]), _all(u[1], u[3], u[5]), []
        low = _all(middle, u[0], u[2], u[4], u[6])
        for found, plane in ((low, r[0]), (middle, r[1]), (u[3], r[2])):
            zeros += _all(found, plane)
        zeros += [(7 * blocks + i, count + top) for i, top in enumerate(self.tops)]
        return Sets([*r[1], *r[2], *r[2], *r[2]], [*r[0], *r[1], *r[0], *both], [*both, *u[5], *high, *u[6]], zeros)


def _all(*sets: list[Rows]) -> list[Rows]:
    """The sums of all sets of each block."""
    return [sum(rows, ()) for rows in zip(*sets, strict=True)]


@dataclass(frozen=True)
class Dealt:
    """Each dealt row is the product of two rows, of the dealt ones themselves or of the second tensor."""

    x: tuple[int, ...]
    y: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> Sets:
        return Sets([(row,) for row in self.x], [(row,) for row in self.y], [(row,) for row in range(count)])


def factors(nothing: Halves, found: Sequence[Products]) -> list[Halves]:
    """All claims after each other: x, y and z in tiles [T, 64, 8] of words, with zeros at the end, and what is zero, in
    one."""
    sums = tuple(p.sums for p in found)
    at_A = compute(_factors, sums, True, nothing.A, *(v.A for p in found for v in (p.first, p.second)))
    at_S = compute(_factors, sums, False, nothing.S, *(v.S for p in found for v in (p.first, p.second)))
    return [Halves(*halves) for halves in zip(at_A, at_S, strict=True)]


def _shapes_of_factors(sums: tuple[Sums, ...], at_A: bool, nothing: torch.Tensor, *values: torch.Tensor):
    size, zeros, _ = _placed(sums, tuple(v.shape for v in values), at_A)
    return *(nothing.new_empty(size).view(-1, *TILE) for _ in "xyz"), nothing.new_empty(zeros)


@leaf(shapes=_shapes_of_factors)
def _factors(sums: tuple[Sums, ...], at_A: bool, nothing: torch.Tensor, *values: torch.Tensor):
    size, zeros, placed = _placed(sums, tuple(v.shape for v in values), at_A)
    out = nothing.new_empty(3 * size + zeros)
    rows = out[: 3 * size].view(3, size)
    rows[:, -math.prod(TILE) :] = 0  # fewer words than a tile has are at the end
    for claim, first, second in zip(placed, values[::2], values[1::2], strict=True):
        claim.into(first, second, out)
    return *rows.view(3, -1, *TILE), out[3 * size :]


@functools.lru_cache(maxsize=256)
def _placed(sums: tuple[Sums, ...], shapes: tuple[torch.Size, ...], at_A: bool) -> tuple[int, int, list[RowSums]]:
    """Words of each factor and of what is zero, and the sums with their places: x, y, z and then the zeros."""
    found = [(_sets(s, m, at_A), width) for s, (m, width) in zip(sums, shapes[::2], strict=True)]
    total = sum(len(sets.z) * width for sets, width in found)
    size = -(-total // math.prod(TILE)) * math.prod(TILE)
    at, zero, placed = 0, 3 * size, []
    for sets, width in found:
        count, lost = len(sets.z), len(sets.zeros)
        starts = [part + at + i * width for part in (0, size, 2 * size) for i in range(count)]
        starts += [zero + i * width for i in range(lost)]
        placed.append(RowSums([*sets.x, *sets.y, *sets.z, *sets.zeros], starts))
        at, zero = at + count * width, zero + lost * width
    return size, zero - 3 * size, placed
