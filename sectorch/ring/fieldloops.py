"""Compiled loops over GF(2^64) (`field.py`), of proofs and hashes; see `mpc/star/dealing_proofs.py`.

Sums of products are kept as polynomials of twice the length, two words each, and reduced once.
"""

from __future__ import annotations

import functools

import numpy as np

from .jit import compiled
from .simd import LINE_WORDS, carryless, dot, masked_dot, transpose_bits, weighed, xor_line

_REDUCED = np.uint64(0b11011)


@compiled
def reduce_product(low, high):
    """low + x^64 high in the field."""
    first, above = carryless(high, _REDUCED)
    second, _ = carryless(above, _REDUCED)
    return low ^ first ^ second


@compiled
def times(x, y, out):
    """x y of [n], element by element."""
    for i in range(len(x)):
        low, high = carryless(np.uint64(x[i]), np.uint64(y[i]))
        out[i] = np.int64(reduce_product(low, high))


@compiled
def inner_products(x, y, out):
    """The inner product of each row of x [n, m] with y [m]."""
    for i in range(len(x)):
        low, high = np.uint64(0), np.uint64(0)
        for j in range(len(y)):
            a, b = carryless(np.uint64(x[i, j]), np.uint64(y[j]))
            low ^= a
            high ^= b
        out[i] = np.int64(reduce_product(low, high))


@functools.cache
def spread_plan(variables: int) -> tuple[np.ndarray, np.ndarray]:
    """How values at {0, 1}^v, in rows, become those at {0, 1, infinity}^v: which rows are xor-ed into which further
    one, [3^v - 2^v, 3], and in which row each point's value then is."""
    blocks, xors, rows = [0], [], 1 << variables
    for variable in range(variables):
        half, parts = 1 << (variables - variable - 1), []
        for first in blocks:
            xors += [(first + i, first + half + i, rows + i) for i in range(half)]
            parts += [first, first + half, rows]
            rows += half
        blocks = parts
    return np.array(xors, np.int64).reshape(-1, 3), np.array(blocks, np.int64)


@compiled
def _spread(values, xors):
    """By a plan, for eight words in each row."""
    at = values.ctypes.data
    for i in range(len(xors)):
        xor_line(at + 64 * xors[i, 0], at + 64 * xors[i, 1], at + 64 * xors[i, 2])


@compiled
def load_columns(x, start, out):
    """Eight columns of x, with zeros beyond its end."""
    size = min(LINE_WORDS, x.shape[1] - start)
    if size == LINE_WORDS:
        for i in range(len(x)):
            for c in range(LINE_WORDS):
                out[i, c] = np.uint64(x[i, start + c])
    else:
        out[: len(x)] = 0
        for i in range(len(x)):
            for c in range(size):
                out[i, c] = np.uint64(x[i, start + c])


@compiled
def _sums(totals, out):
    for p in range(len(out)):
        out[p] = np.int64(reduce_product(totals[p, 0], totals[p, 1]))


def bit_points(x, y, weights, out) -> None:
    """sum_w weights_w (x y)_w at all points {0, 1, infinity}^6; x, y: packed bits in tiles [T, 64, 8]; see
    `spread_plan`."""
    _bit_points(x, y, weights, *spread_plan(6), out)


@compiled
def _bit_points(x, y, weights, xors, places, out):
    xs, ys = np.empty((len(places), LINE_WORDS), np.uint64), np.empty((len(places), LINE_WORDS), np.uint64)
    scale, totals = np.zeros((1, LINE_WORDS), np.uint64), np.zeros((len(places), 2), np.uint64)
    for tile in range(len(x)):
        load_columns(x[tile], 0, xs)
        load_columns(y[tile], 0, ys)
        load_columns(weights[LINE_WORDS * tile :].reshape(1, -1), 0, scale)
        _spread(xs, xors)
        _spread(ys, xors)
        for p in range(len(places)):
            masked_dot(xs, p, ys, p, scale, totals, p)
    _sums(totals[places], out)


@compiled
def tiles_weighed(x, rows, columns, out):
    """The sum of words in tiles [T, 64, 8], by the weights of their rows and of their columns."""
    totals, last = np.empty((LINE_WORDS, 2), np.uint64), np.zeros(2, np.uint64)
    for tile in range(len(x)):
        totals[:] = 0
        for i in range(len(rows)):
            weighed(x[tile], i, 0, rows, totals)
        for c in range(LINE_WORDS):
            word = reduce_product(totals[c, 0], totals[c, 1])
            low, high = carryless(word, np.uint64(columns[LINE_WORDS * tile + c]))
            last[0] ^= low
            last[1] ^= high
    out[0] = np.int64(reduce_product(last[0], last[1]))


def chosen_points(x, y, inner, scales, out) -> None:
    """sum_c inner_t scales_c (x y)_{t,c} at all points {0, 1, infinity}^3, of words x [8, 8, C] and bits y of packed
    words [C].

    Of a word the bit 8 i + t is that of x[i, t]; the points are of i.
    """
    _chosen_points(x, y, inner, scales, *spread_plan(3), out)


@compiled
def _chosen_points(x, y, inner, scales, xors, places, out):
    count = len(places)
    xs, ys = np.empty((count, LINE_WORDS), np.uint64), np.empty((count, LINE_WORDS), np.uint64)
    totals, bits, scale = (
        np.zeros((8 * count, 2), np.uint64),
        np.zeros(LINE_WORDS, np.uint64),
        np.zeros((1, LINE_WORDS), np.uint64),
    )
    for start in range(0, x.shape[2], LINE_WORDS):
        for c in range(LINE_WORDS):
            bits[c] = np.uint64(y[start + c]) if start + c < len(y) else np.uint64(0)
            scale[0, c] = np.uint64(scales[start + c]) if start + c < len(y) else np.uint64(0)
        for t in range(8):
            load_columns(x[:, t], start, xs)
            for i in range(8):
                for c in range(LINE_WORDS):
                    ys[i, c] = np.uint64(0) - ((bits[c] >> np.uint64(8 * i + t)) & np.uint64(1))
            _spread(xs, xors)
            _spread(ys, xors)
            for p in range(count):
                masked_dot(xs, p, ys, p, scale, totals, count * t + p)
    for p in range(count):
        low, high = np.uint64(0), np.uint64(0)
        for t in range(8):
            total = totals[count * t + places[p]]
            a, b = carryless(reduce_product(total[0], total[1]), np.uint64(inner[t]))
            low ^= a
            high ^= b
        out[p] = np.int64(reduce_product(low, high))


def points(x, y, out) -> None:
    """sum_j (x y)_j at all points {0, 1, infinity}^v; x, y: [2^v, m]."""
    _points(x, y, *spread_plan(len(x).bit_length() - 1), out)


@compiled
def _points(x, y, xors, places, out):
    xs, ys = np.empty((len(places), LINE_WORDS), np.uint64), np.empty((len(places), LINE_WORDS), np.uint64)
    totals = np.zeros((len(places), 2), np.uint64)
    for start in range(0, x.shape[1], LINE_WORDS):
        load_columns(x, start, xs)
        load_columns(y, start, ys)
        _spread(xs, xors)
        _spread(ys, xors)
        for p in range(len(places)):
            dot(xs, p, ys, p, totals, p)
    _sums(totals[places], out)


@compiled
def weights_at(point, infinity, out):
    """The weights of a function's values at {0, 1}^v, or {0, 1, infinity}^v, for its value at a point of the field:
    of each variable t the products of 1 + t, t and t + t^2."""
    out[0], count = 1, 1
    for v in range(len(point)):
        t = np.uint64(point[v])
        low, high = carryless(t, t)
        squared = reduce_product(low, high)
        for i in range(count - 1, -1, -1):
            whole = np.uint64(out[i])
            low, high = carryless(whole, t)
            one = reduce_product(low, high)
            if infinity:
                low, high = carryless(whole, squared)
                out[3 * i + 2] = np.int64(one ^ reduce_product(low, high))
                out[3 * i + 1], out[3 * i] = np.int64(one), np.int64(whole ^ one)
            else:
                out[2 * i + 1], out[2 * i] = np.int64(one), np.int64(whole ^ one)
        count *= 3 if infinity else 2


@compiled
def combine_rows(x, weights, out):
    """sum_i weights_i x_i of rows x [n, m]."""
    totals, whole = np.empty((LINE_WORDS, 2), np.uint64), x.shape[1] // LINE_WORDS * LINE_WORDS
    for start in range(0, whole, LINE_WORDS):
        totals[:] = 0
        for i in range(len(x)):
            weighed(x, i, start, weights, totals)
        _sums(totals, out[start : start + LINE_WORDS])
    for j in range(whole, x.shape[1]):
        low, high = np.uint64(0), np.uint64(0)
        for i in range(len(x)):
            a, b = carryless(np.uint64(x[i, j]), np.uint64(weights[i]))
            low ^= a
            high ^= b
        out[j] = np.int64(reduce_product(low, high))


@compiled
def _tables(weights):
    """The sums of up to 64 weights by the bits of a word, for each of its bytes."""
    tables = np.zeros((8, 256), np.uint64)
    for i in range(len(weights)):
        table, below = tables[i // 8], 1 << (i % 8)
        for v in range(below):
            table[below + v] = table[v] ^ np.uint64(weights[i])
    return tables


@compiled
def _sum_of(tables, bits):
    found = np.uint64(0)
    for k in range(8):
        found ^= tables[k, (bits >> np.uint64(8 * k)) & np.uint64(255)]
    return found


@compiled
def _tile(x, tables, a, out):
    """sum_i weights_i x_i of a tile [64, 8] of packed bits, by the tables of the weights: of bit t in row t."""
    load_columns(x, 0, a)
    transpose_bits(a)
    for t in range(64):
        for c in range(LINE_WORDS):
            out[t, c] = _sum_of(tables, a[t, c])


def folded_points(x, y, weights, scales, out) -> None:
    """As `points`, v = 4, of packed bits x and y in tiles [T, 64, 8], which are combined by weights: sum_i weights_i
    x_i of the bit t of a word belongs to row t mod 16. That of x is multiplied by x^t times the word's scale."""
    _folded_points(x, y, weights, scales, *spread_plan(4), out)


@compiled
def _folded_points(x, y, weights, scales, xors, places, out):
    tables, count = _tables(weights), len(places)
    a, left, right = (
        np.empty((64, LINE_WORDS), np.uint64),
        np.empty((64, LINE_WORDS), np.uint64),
        np.empty((64, LINE_WORDS), np.uint64),
    )
    xs, ys = np.empty((count, LINE_WORDS), np.uint64), np.empty((count, LINE_WORDS), np.uint64)
    totals = np.zeros((count, 2), np.uint64)
    for tile in range(len(x)):
        _tile(x[tile], tables, a, left)
        _tile(y[tile], tables, a, right)
        for c in range(LINE_WORDS):
            scale = np.uint64(scales[LINE_WORDS * tile + c])
            for t in range(64):
                low, high = carryless(left[t, c], scale)
                left[t, c] = reduce_product(low, high)
                scale = (scale << np.uint64(1)) ^ ((np.uint64(0) - (scale >> np.uint64(63))) & _REDUCED)
        for s in range(0, 64, 16):
            xs[:16], ys[:16] = left[s : s + 16], right[s : s + 16]
            _spread(xs, xors)
            _spread(ys, xors)
            for p in range(count):
                dot(xs, p, ys, p, totals, p)
    _sums(totals[places], out)


@compiled
def twice_folded(x, weights, second, scales, out):
    """The rows of `folded_points` combined by more weights: sum_p second_p x_{16 s + p} of word w at s W + w, W = 8 T.

    Args:
        scales: for each word, or none.
    """
    width, tables = LINE_WORDS * len(x), _tables(weights)
    a, found, by = np.empty((64, LINE_WORDS), np.uint64), np.empty((64, LINE_WORDS), np.uint64), np.empty(64, np.uint64)
    for t in range(64):
        low, high = carryless(np.uint64(second[t % 16]), np.uint64(1) << np.uint64(t if len(scales) else 0))
        by[t] = reduce_product(low, high)
    for tile in range(len(x)):
        _tile(x[tile], tables, a, found)
        for c in range(LINE_WORDS):
            w = LINE_WORDS * tile + c
            for s in range(4):
                low, high = np.uint64(0), np.uint64(0)
                for t in range(16 * s, 16 * s + 16):
                    first, last = carryless(found[t, c], by[t])
                    low ^= first
                    high ^= last
                total = reduce_product(low, high)
                if len(scales):
                    low, high = carryless(total, np.uint64(scales[w]))
                    total = reduce_product(low, high)
                out[s * width + w] = np.int64(total)


@compiled
def combined_words(words, weights, out):
    """sum_i weights_i of the bits 8 i + t that are set, of each word: [C] -> [8, C]."""
    for w in range(len(words)):
        bits = np.uint64(words[w])
        for t in range(8):
            found = np.uint64(0)
            for i in range(8):
                found ^= np.uint64(weights[i]) & (np.uint64(0) - ((bits >> np.uint64(8 * i + t)) & np.uint64(1)))
            out[t, w] = np.int64(found)
