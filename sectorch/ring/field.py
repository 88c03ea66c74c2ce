"""The field GF(2^64): a word's bits are the coefficients of a polynomial, the lowest is that of x^0; addition is xor.

Products are taken modulo x^64 + x^4 + x^3 + x + 1. Compiled loops (`fieldloops.py`) compute them in one pass over
memory; torch's functions give the same bits where tensors are on another device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import bitplanes
from .bitplanes import xor_along
from .fixed_point import logical_shift

if TYPE_CHECKING:
    from .fieldloops import FieldLoops

TILE = (64, 8)
"""Rows, and words of a row, that a loop takes at a time; they follow each other in memory."""
_PIECE = 1 << 17
"""Products at a time without compiled loops: 64 words each, 64 MiB."""


@functools.cache
def _compiled() -> FieldLoops:
    from . import fieldloops, jit  # numba takes half a second to load

    return fieldloops.IN_VECTORS if jit.has_bit_vectors() else fieldloops.PORTABLE


def loops_for(*values: torch.Tensor) -> FieldLoops | None:
    """The compiled loops, where these values are in this machine's own memory."""
    return _compiled() if bitplanes.COMPILED and all(v.is_cpu for v in values) else None


def _arrays(*values: torch.Tensor) -> list[np.ndarray]:
    """Contiguous arrays of tensors in any layout, since the loops compute addresses of words."""
    return [v.contiguous().numpy() for v in values]


def _run(loop: Callable[..., None], out: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """A loop's result for these values, in `out`."""
    loop(*_arrays(*values), out.numpy())
    return out


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y, element by element, with broadcasting."""
    if loops := loops_for(x, y):
        a, b = _arrays(x, y)
        if a.shape != b.shape:
            shape = np.broadcast_shapes(a.shape, b.shape)
            a, b = (np.broadcast_to(v, shape).copy() for v in (a, b))
        out = np.empty(a.shape, np.int64)
        loops.times(a.reshape(-1), b.reshape(-1), out.reshape(-1))
        return torch.from_numpy(out)
    x, y = torch.broadcast_tensors(x, y)
    if x.is_meta or not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = zip(x.reshape(-1).split(_PIECE), y.reshape(-1).split(_PIECE), strict=True)
    return torch.cat([_times(a, b) for a, b in parts]).view(x.shape)


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y for [n]: the sum of x shifted by each set bit of y, in two words, reduced."""
    at = torch.arange(64, device=x.device).view(-1, 1)
    chosen = -((y >> at) & 1)
    low = xor_along((x << at) & chosen)
    # x >> (64 - at), logical: no shift by 64 exists, and the bits that the sign filled in are cleared
    high = xor_along(((x >> (63 - at)) >> 1) & ((1 << at) - 1) & chosen)
    over = logical_shift(high, 63) ^ logical_shift(high, 61) ^ logical_shift(high, 60)
    for part in (high, over):
        low = low ^ part ^ (part << 1) ^ (part << 3) ^ (part << 4)
    return low


def xor_of(values: torch.Tensor) -> torch.Tensor:
    """The xor along the last dimension: [..., n] -> [...]."""
    return xor_along(values.movedim(-1, 0)) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def inner_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """sum_j x_j y_j: [..., n] and [n] -> [..., 1]."""
    if loops := loops_for(x, y):
        out = x.new_empty(*x.shape[:-1], 1)
        loops.inner_products(*_arrays(x.reshape(out.numel(), -1 if len(y) else 0), y), out.view(-1).numpy())
        return out
    return xor_of(times(x, y)).unsqueeze(-1)


def powers_of_x(count: int, device: torch.device) -> torch.Tensor:
    """x^0, x^1, ...: the weights of a word's bits when the word is read as a number of the field."""
    return torch.bitwise_left_shift(torch.ones(count, dtype=torch.int64, device=device), torch.arange(count).to(device))


def spread_points(values: torch.Tensor, variables: int) -> torch.Tensor:
    """[2^variables, m] -> [3^variables, m]: a multilinear function's values at {0, 1}^v, and at {0, 1, infinity}^v.

    The first variable is the highest bit of the row; at infinity stands the coefficient, the sum of both values.
    """
    for done in range(variables):
        parts = values.view(3**done, 2, 1 << (variables - done - 1), values.shape[-1])
        values = torch.cat((parts, parts[:, :1] ^ parts[:, 1:]), 1).flatten(0, 2)
    return values


def points(x: torch.Tensor, y: torch.Tensor, variables: int) -> torch.Tensor:
    """The inner products of x and y at all of {0, 1, infinity}^variables: [2^v, m] twice -> [3^v]."""
    if loops := loops_for(x, y):
        return _run(loops.points, torch.empty(3**variables, dtype=torch.int64), x, y)
    return xor_of(times(spread_points(x, variables), spread_points(y, variables)))


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """Tiles [T, 64, 8] as 64 rows: [64, 8 T]."""
    return x.transpose(0, 1).reshape(TILE[0], -1)


def inner_product_of_tiles(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """sum_{i,j} rows_i columns_j x_{i,j} of words in tiles [T, 64, 8], with weights [64] and [8 T]: [1]."""
    if loops := loops_for(x, rows, columns):
        return _run(loops.tiles_weighed, x.new_empty(1), x, rows, columns)
    return inner_product(inner_product(_rows_of(x), columns)[:, 0], rows)


def points_of_bits(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `points`, v = 6, of packed bits in tiles [T, 64, 8], with a weight for each word of a row [8 T] times x^t for
    its bit t: [729]."""
    if loops := loops_for(x, y, weights):
        return _run(loops.bit_points, torch.empty(729, dtype=torch.int64), x, y, weights)
    x, y = _rows_of(x), _rows_of(y)
    return inner_product(spread_points(x, 6) & spread_points(y, 6), weights)[:, 0]


def points_of_chosen(x: torch.Tensor, y: torch.Tensor, inner: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As `points` of words x [8, 8, C] and bits y of packed words [C], of which x[i, t] takes the bit 8 i + t.

    Args:
        inner: [8], weights of t. scales: [C], those of words. The points are of i: [27].
    """
    if loops := loops_for(x, y, inner, scales):
        return _run(loops.chosen_points, torch.empty(27, dtype=torch.int64), x, y, inner, scales)
    bits = -bits_of(y, 64).view(8, -1)
    sums = spread_points(times(x, scales).flatten(1), 3) & spread_points(bits, 3)
    return inner_product(xor_of(sums.view(27, 8, -1)), inner)[:, 0]


def bits_of(words: torch.Tensor, count: int) -> torch.Tensor:
    """The lowest bits of packed words [C], as 0 and 1: [count, C]."""
    return (words >> torch.arange(count, device=words.device).view(-1, 1)).bitwise_and(1)


def weights_at(point: torch.Tensor, infinity: bool = False) -> torch.Tensor:
    """The weights of a function's values at {0, 1}^v, in the order of `points`, for its value at a point [v].

    Args:
        infinity: of a function of degree two, at {0, 1, infinity}^v: of each variable t of 1 + t, t and t + t^2.
    """
    if loops := loops_for(point):
        out = torch.empty((3 if infinity else 2) ** point.shape[0], dtype=torch.int64)
        loops.weights_at(*_arrays(point), infinity, out.numpy())
        return out
    found = powers_of_x(1, point.device)
    for t in point.split(1):
        one, squared = times(found, t), times(found, times(t, t))
        found = torch.stack((found ^ one, one, one ^ squared) if infinity else (found ^ one, one), 1).view(-1)
    return found


def weighted_rows_sum(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_i weights_i x_i: [n, m] and [n] -> [m]."""
    if loops := loops_for(x, weights):
        return _run(loops.combine_rows, torch.empty(x.shape[1], dtype=torch.int64), x, weights)
    return inner_product(x.t(), weights)[:, 0]


def fold_rows(x: torch.Tensor, weights: torch.Tensor, width: int) -> torch.Tensor:
    """As `weighted_rows_sum` for each of x [k, n, m], with zeros at the end: [k, width]."""
    out = x.new_zeros(len(x), width)
    if loops := loops_for(x, weights):
        to, (parts, by) = out.numpy(), _arrays(x, weights)
        for i, rows in enumerate(parts):
            loops.combine_rows(rows, by, to[i, : x.shape[2]])
    else:
        for i, rows in enumerate(x):
            out[i, : x.shape[2]] = weighted_rows_sum(rows, weights)
    return out


def _rows_of_bits(x: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """sum_i weights_i x_i of rows i of tiles [T, 64, 8]: [16, 4 W] for W = 8 T, of bit t of word w in row t mod 16 at
    (t div 16) W + w.

    Args:
        scales: [W], with which bit t of word w is multiplied by x^t scales_w.
    """
    x = _rows_of(x)
    found = xor_of((bitplanes.spread(x) & weights.view(-1, 1, 1)).permute(1, 2, 0))
    if scales is not None:
        found = times(found, times(powers_of_x(64, x.device).view(64, 1), scales))
    return found.view(4, 16, x.shape[1]).transpose(0, 1).reshape(16, 4 * x.shape[1])


def points_of_folded_bits(
    x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """As `points`, v = 4, of packed bits in tiles [T, 64, 8] whose rows are combined by weights [64]; x with scales
    [8 T]: [81].

    sum_i weights_i x_i of bit t of a word is in row t mod 16, and that of x is multiplied by x^t and the word's scale.
    """
    if loops := loops_for(x, y, weights, scales):
        return _run(loops.folded_points, torch.empty(81, dtype=torch.int64), x, y, weights, scales)
    return points(_rows_of_bits(x, weights, scales), _rows_of_bits(y, weights, None), 4)


def twice_folded_bits(
    x: torch.Tensor, weights: torch.Tensor, second: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows of `points_of_folded_bits` combined by `second` [16]: [32 T]."""
    if loops := loops_for(x, weights, second):
        out, scales = torch.empty(x.numel() // 16, dtype=torch.int64), weights[:0] if scales is None else scales
        return _run(loops.twice_folded, out, x, weights, second, scales)
    return weighted_rows_sum(_rows_of_bits(x, weights, scales), second)


def combined_words(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_i weights_i of the bits 8 i + t that are set, of each word: [C] and [8] -> [8, C]."""
    if loops := loops_for(words, weights):
        return _run(loops.combined_words, words.new_empty(8, words.shape[0]), words, weights)
    return xor_of((-bits_of(words, 64).view(8, 8, -1) & weights.view(8, 1, 1)).permute(1, 2, 0))
