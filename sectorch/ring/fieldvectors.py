"""The loops of `fieldloops.py` on lines of eight words (`simd.py`), on processors that have such vectors."""

from __future__ import annotations

import numpy as np

from . import fieldloops
from .fieldloops import combined_words, inner_products, load_columns, reduce_product, spread_plan, weights_at
from .jit import aligned_zeros, compiled
from .simd import (
    LINE_WORDS,
    available,
    bits_of_rows,
    carryless,
    chosen_dots,
    combined_rows,
    copy_tile,
    masked_dots,
    plain_dots,
    times_line,
    times_powers,
    weighed_sum,
    xor_line,
)

__all__ = [
    "available", "bit_points", "chosen_points", "combine_rows", "combined_words", "folded_points", "inner_products",
    "points", "tiles_weighed", "times", "twice_folded", "weights_at",
]  # fmt: skip
_CUBE = 27
"""Points of three variables, whose values are eight lines."""


@compiled
def _spread(values, xors):
    """By a plan, of which each row is eight lines."""
    at = values.ctypes.data
    for i in range(len(xors)):
        x, y, out = at + 512 * xors[i, 0], at + 512 * xors[i, 1], at + 512 * xors[i, 2]
        for j in range(0, 512, 64):
            xor_line(x + j, y + j, out + j)


@compiled
def _sums(totals, places, out):
    for q in range(len(places)):
        for p in range(_CUBE):
            low, high = np.uint64(0), np.uint64(0)
            for i in range(0, LINE_WORDS, 2):
                low ^= totals[_CUBE * places[q] + p, i]
                high ^= totals[_CUBE * places[q] + p, i + 1]
            out[_CUBE * q + p] = np.int64(reduce_product(low, high))


@compiled
def _scale_of(weights, start, scale):
    for c in range(LINE_WORDS):
        scale[0, c] = np.uint64(weights[start + c]) if start + c < len(weights) else np.uint64(0)


@compiled
def _bit_points(x, y, weights, xors, places, out):
    count = len(places)
    xs, ys, totals = aligned_zeros(8 * count), aligned_zeros(8 * count), aligned_zeros(_CUBE * count)
    at_x, at_y, to, scale = xs.ctypes.data, ys.ctypes.data, totals.ctypes.data, weights.ctypes.data
    for tile in range(len(x)):
        copy_tile(x.ctypes.data + 4096 * tile, at_x)
        copy_tile(y.ctypes.data + 4096 * tile, at_y)
        _spread(xs, xors)
        _spread(ys, xors)
        for q in range(count):
            masked_dots(at_x + 512 * q, at_y + 512 * q, scale + 64 * tile, to + 64 * _CUBE * q)
    _sums(totals, places, out)


@compiled
def tiles_weighed(x, rows, columns, out):
    """As `fieldloops.tiles_weighed`."""
    line, by, found = aligned_zeros(1), aligned_zeros(1), np.uint64(0)
    for tile in range(len(x)):
        weighed_sum(x.ctypes.data + 4096 * tile, 64, rows.ctypes.data, len(rows), line.ctypes.data)
        times_line(line.ctypes.data, columns.ctypes.data + 64 * tile, line.ctypes.data)
        xor_line(by.ctypes.data, line.ctypes.data, by.ctypes.data)
    for c in range(LINE_WORDS):
        found ^= by[0, c]
    out[0] = np.int64(found)


@compiled
def _points(x, y, xors, places, out):
    count = len(places)
    xs, ys, totals = aligned_zeros(8 * count), aligned_zeros(8 * count), aligned_zeros(_CUBE * count)
    at_x, at_y, to = xs.ctypes.data, ys.ctypes.data, totals.ctypes.data
    for start in range(0, x.shape[1], LINE_WORDS):
        load_columns(x, start, xs)
        load_columns(y, start, ys)
        _spread(xs, xors)
        _spread(ys, xors)
        for q in range(count):
            plain_dots(at_x + 512 * q, at_y + 512 * q, at_x, to + 64 * _CUBE * q)
    _sums(totals, places, out)


def bit_points(x, y, weights, out) -> None:
    """As `fieldloops.bit_points`."""
    _bit_points(x, y, weights, *spread_plan(3), out)


def points(x, y, out) -> None:
    """As `fieldloops.points`."""
    variables = len(x).bit_length() - 1
    if variables < 3:
        fieldloops.points(x, y, out)
    else:
        _points(x, y, *spread_plan(variables - 3), out)


@compiled
def chosen_points(x, y, inner, scales, out):
    """As `fieldloops.chosen_points`."""
    width = x.shape[2]
    rest, bits, scale, totals = aligned_zeros(8), aligned_zeros(1), aligned_zeros(1), aligned_zeros(8 * _CUBE)
    for start in range(0, width, LINE_WORDS):
        size = min(LINE_WORDS, width - start)
        _scale_of(y, start, bits)
        _scale_of(scales, start, scale)
        for t in range(8):
            at, apart = x.ctypes.data + 8 * (t * width + start), 64 * width
            if size < LINE_WORDS:
                load_columns(x[:, t], start, rest)
                at, apart = rest.ctypes.data, 64
            to = totals.ctypes.data + 64 * _CUBE * t
            chosen_dots(at, apart, bits.ctypes.data, t, scale.ctypes.data, to)
    for p in range(_CUBE):
        low, high = np.uint64(0), np.uint64(0)
        for t in range(8):
            first, second = np.uint64(0), np.uint64(0)
            for i in range(0, LINE_WORDS, 2):
                first ^= totals[_CUBE * t + p, i]
                second ^= totals[_CUBE * t + p, i + 1]
            a, b = carryless(reduce_product(first, second), np.uint64(inner[t]))
            low ^= a
            high ^= b
        out[p] = np.int64(reduce_product(low, high))


@compiled
def _matrices(weights):
    """For each byte i of 64 bits, and byte j of a weight, the matrix that takes the bits to the sum's byte, as the
    processor wants it: row r in byte 7 - r, and the bits as `bits_of_rows` gives them."""
    found = np.zeros((8, 8), np.uint64)
    for i in range(8):
        for k in range(8):
            weight = np.uint64(weights[8 * i + k])
            for j in range(8):
                for r in range(8):
                    bit = (weight >> np.uint64(8 * j + r)) & np.uint64(1)
                    found[i, j] |= bit << np.uint64(8 * (7 - r) + 7 - k)
    return found


@compiled
def _tile(x, matrices, bits, found, group):
    """sum_i weights_i x_i of a tile [64, 8] of packed bits at an address: the bit t in line t, in groups of 16 that are
    `group` times eight lines apart."""
    for i in range(8):
        bits_of_rows(x + 512 * i, 64, bits.ctypes.data + 512 * i, 64, 0)
    for i in range(8):
        to = found.ctypes.data + 512 * (i // 2 * group + i % 2)
        combined_rows(bits.ctypes.data + 64 * i, matrices.ctypes.data, to, 64)


def folded_points(x, y, weights, scales, out) -> None:
    """As `fieldloops.folded_points`."""
    _folded_points(x, y, weights, scales, *spread_plan(1), out)


@compiled
def _folded_points(x, y, weights, scales, xors, places, out):
    count = len(places)
    xs, ys, totals, scale = (
        aligned_zeros(32 * count),
        aligned_zeros(32 * count),
        aligned_zeros(_CUBE * count),
        aligned_zeros(1),
    )
    matrices, bits, by = _matrices(weights), aligned_zeros(64), aligned_zeros(1)
    by[:] = np.uint64(1 << 16)
    for tile in range(len(x)):
        _tile(x.ctypes.data + 4096 * tile, matrices, bits, xs, count)
        _tile(y.ctypes.data + 4096 * tile, matrices, bits, ys, count)
        for c in range(LINE_WORDS):
            scale[0, c] = np.uint64(scales[LINE_WORDS * tile + c])
        for s in range(4):
            at_x, at_y = xs.ctypes.data + 512 * count * s, ys.ctypes.data + 512 * count * s
            times_powers(at_x, 16, scale.ctypes.data)
            times_line(scale.ctypes.data, by.ctypes.data, scale.ctypes.data)
            _spread(xs[8 * count * s :], xors)
            _spread(ys[8 * count * s :], xors)
            for q in range(count):
                plain_dots(at_x + 512 * q, at_y + 512 * q, at_x, totals.ctypes.data + 64 * _CUBE * q)
    _sums(totals, places, out)


@compiled
def twice_folded(x, weights, second, scales, out):
    """As `fieldloops.twice_folded`."""
    matrices, bits, found = _matrices(weights), aligned_zeros(64), aligned_zeros(64)
    by, factors = np.empty(64, np.int64), np.empty(64, np.int64)
    for t in range(64):
        by[t], factors[t] = second[t % 16], np.int64(1) << t if len(scales) else np.int64(1)
    times(by, factors, by)
    for tile in range(len(x)):
        _tile(x.ctypes.data + 4096 * tile, matrices, bits, found, 2)
        for s in range(4):
            to = out.ctypes.data + 64 * (s * len(x) + tile)
            weighed_sum(found.ctypes.data + 1024 * s, 64, by.ctypes.data + 128 * s, 16, to)
            if len(scales):
                times_line(to, scales.ctypes.data + 64 * tile, to)


@compiled
def combine_rows(x, weights, out):
    """As `fieldloops.combine_rows`."""
    count, width = x.shape
    rest, found = aligned_zeros(count), aligned_zeros(1)
    if not count:
        out[:] = 0
        return
    for start in range(0, width, LINE_WORDS):
        at, apart, to = x.ctypes.data + 8 * start, 8 * width, out.ctypes.data + 8 * start
        if width - start < LINE_WORDS:
            load_columns(x, start, rest)
            at, apart, to = rest.ctypes.data, 64, found.ctypes.data
        weighed_sum(at, apart, weights.ctypes.data, count, to)
        for c in range(width - start if width - start < LINE_WORDS else 0):
            out[start + c] = np.int64(found[0, c])


@compiled
def times(x, y, out):
    """As `fieldloops.times`."""
    whole = len(x) // LINE_WORDS * LINE_WORDS
    for i in range(0, whole, LINE_WORDS):
        times_line(x.ctypes.data + 8 * i, y.ctypes.data + 8 * i, out.ctypes.data + 8 * i)
    for i in range(whole, len(x)):
        low, high = carryless(np.uint64(x[i]), np.uint64(y[i]))
        out[i] = np.int64(reduce_product(low, high))
