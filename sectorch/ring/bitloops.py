"""Compiled loops of the hot kernels: one pass over memory where torch's functions make many.

Each has its reference in plain torch beside its `leaf`, which runs on other devices, and gives the same bits. All loop
over the words low .. high of their packed bits; element t W + w belongs to bit t of word w (`bitplanes.py`).
"""

from __future__ import annotations

import numpy as np

from .andloops import floor_joined as floor_joined
from .andloops import floor_products as floor_products
from .andloops import floor_taken as floor_taken
from .andloops import layer as layer
from .andloops import masked as masked
from .andloops import products as products
from .andloops import xor as _xor
from .elementloops import SPAN as _RUN
from .elementloops import bits_less as bits_less
from .elementloops import chosen_less as chosen_less
from .elementloops import floored as floored
from .elementloops import floors as floors
from .elementloops import floors_by_bit as floors_by_bit
from .elementloops import masks as masks
from .elementloops import negative_less as negative_less
from .elementloops import operands as operands
from .elementloops import ring_bits as ring_bits
from .elementloops import selected as selected
from .elementloops import shifted_less as shifted_less
from .elementloops import winners as winners
from .loops import array as array
from .loops import borrowed as _borrowed
from .loops import compiled
from .loops import lines as _lines
from .loops import on_words as on_words
from .transposed import planes_at as _planes_at
from .wideloops import wide_codes as wide_codes
from .wideloops import wide_leaves as wide_leaves

_SPAN = 512
"""Words combined at a time: all their rows stay in the first-level cache."""
_CODED = 256
"""Words of which codes are made at a time: the more, the fewer places are written to by turns."""


@compiled
def planes(v, threshold, out, column, low, high):
    """Elements [N], less a threshold -> their bit planes [64, W], at a column of `out`."""
    _planes_at(v, -(-len(v) // 64), low, out[:, column + low : column + high], threshold)


@compiled
def codes(r, mask, spans, tops, out, low, high):
    """Thermometer codes of the blocks of r in all spans [7 blocks, W], r's planes `tops`, and a mask on all of them."""
    width = -(-len(r) // 64)
    total = 0
    for s in range(len(spans)):
        total += -(-(spans[s, 1] - spans[s, 0]) // 3)
    mask, out = _borrowed(mask), _borrowed(out)
    size = min(_CODED, high - low)
    a = _lines(8 * size).view(np.int64).reshape(64, size)
    lower = np.empty((3, size), np.int64)
    for start in range(low, high, _CODED):
        end = min(start + _CODED, high)
        _planes_at(r, width, start, a[:, : end - start], 0)
        row = 0
        for s in range(len(spans)):
            blocks = -(-(spans[s, 1] - spans[s, 0]) // 3)
            for p in range(spans[s, 1] - 3 * blocks, spans[s, 1], 3):
                for w in range(end - start):
                    x0, x1 = a[p, w] if p >= 0 else 0, a[p + 1, w] if p >= -1 else 0
                    lower[0, w], lower[1, w], lower[2, w] = x1 | x0, x1, x1 & x0
                for i in range(3):
                    k = i * total + row
                    found, under = out[k, start:end], mask[k, start:end]
                    for w in range(end - start):
                        found[w] = under[w] ^ (a[p + 2, w] | lower[i, w])
                    k = (4 + i) * total + row
                    found, under = out[k, start:end], mask[k, start:end]
                    for w in range(end - start):
                        found[w] = under[w] ^ (a[p + 2, w] & lower[i, w])
                k = 3 * total + row
                _xor(mask[k, start:end], a[p + 2], out[k, start:end])
                row += 1
        for i in range(len(tops)):
            k = 7 * total + i
            _xor(mask[k, start:end], a[tops[i]], out[k, start:end])


@compiled
def signs(v, out, low, high):
    """The sign bits of elements as words."""
    width = len(out)
    for start in range(low, high, _RUN):
        found = out[start : min(start + _RUN, high)]
        found[:] = 0
        for t in range(63, -1, -1):
            row = v[t * width + start : t * width + start + len(found)]
            for w in range(len(row)):
                found[w] = (found[w] << 1) | np.int64(np.uint64(row[w]) >> np.uint64(63))
            for w in range(len(row), len(found)):
                found[w] <<= 1


@compiled
def leaves(bits, words, total, block, start, blocks, first, out, row, low, high):
    """One party's half of lt and eq of the blocks from plane `start` on, in rows row and row + blocks of `out`.

    `words` are its halves of the codes of `total` blocks, of which those from `block` on are taken, for the columns
    modulo their width.
    """
    around, zero = words.shape[1], np.zeros(_RUN, np.int64)
    left = low
    while left < high:
        at = left % around
        size = min(_RUN, high - left, around - at)
        for b in range(blocks):
            p = start + 3 * b
            x0 = bits[p, left : left + size] if p >= 0 else zero
            x1 = bits[p + 1, left : left + size] if p >= -1 else zero
            x2 = bits[p + 2, left : left + size]
            u0, u1 = words[block + b, at : at + size], words[total + block + b, at : at + size]
            u2, u3 = words[2 * total + block + b, at : at + size], words[3 * total + block + b, at : at + size]
            u4, u5 = words[4 * total + block + b, at : at + size], words[5 * total + block + b, at : at + size]
            u6 = words[6 * total + block + b, at : at + size]
            less, equal = out[row + b, left : left + size], out[row + blocks + b, left : left + size]
            for w in range(size):
                c0, c1, c2 = x0[w], x1[w], x2[w]
                h3 = c1 & c0
                h1, h2, h0 = c0 ^ h3, c1 ^ h3, ~(c0 | c1)
                h4, h5, h6, h7 = h0 & c2, h1 & c2, h2 & c2, h3 & c2
                h0, h1, h2, h3 = h0 ^ h4, h1 ^ h5, h2 ^ h6, h3 ^ h7
                lt = (h0 & u0[w]) ^ (h1 & u1[w]) ^ (h2 & u2[w]) ^ (h3 & u3[w])
                lt ^= (h4 & u4[w]) ^ (h5 & u5[w]) ^ (h6 & u6[w])
                above = (h1 & u0[w]) ^ (h2 & u1[w]) ^ (h3 & u2[w]) ^ (h4 & u3[w])
                above ^= (h5 & u4[w]) ^ (h6 & u5[w]) ^ (h7 & u6[w])
                less[w] = lt
                equal[w] = (lt ^ above) ^ (h0 & first)
        left += size


@compiled
def moved(bits, low, k, down, out, at, end):
    """The bit planes of c - 2^k (down is -1) or c + 2^k (down is 0) from plane `low` on, from those of c."""
    carry = np.empty(_SPAN, np.int64)
    for start in range(at, end, _SPAN):
        stop = min(end, start + _SPAN)
        for t in range(low, k):
            before, found = bits[t, start:stop], out[t, start:stop]
            for w in range(len(found)):
                found[w] = before[w]
        carry[:] = -1
        for t in range(k, 64):
            before, found = bits[t, start:stop], out[t, start:stop]
            for w in range(len(found)):
                bit = before[w]
                found[w] = bit ^ carry[w]
                carry[w] &= bit ^ down


@compiled
def _part(x, y, row, left, size):
    """Words of a row of x or, numbered after them, of y."""
    return x[row, left : left + size] if row < len(x) else y[row - len(x), left : left + size]


@compiled
def sums_of_rows(x, y, ends, rows, starts, out, low, high):
    """The xor of some rows of x and, numbered after them, of y: of `rows` up to ends[i] at starts[i] of `out`."""
    none = np.zeros(_SPAN, np.int64)
    for left in range(low, high, _SPAN):
        size, start = min(_SPAN, high - left), 0
        for i in range(len(ends)):
            found = out[starts[i] + left : starts[i] + left + size]
            first, second = none[:size], none[:size]
            if start < ends[i]:
                first = _part(x, y, rows[start], left, size)
            if start + 1 < ends[i]:
                second = _part(x, y, rows[start + 1], left, size)
            for w in range(size):
                found[w] = first[w] ^ second[w]
            for k in range(start + 2, ends[i]):
                taken = _part(x, y, rows[k], left, size)
                for w in range(size):
                    found[w] ^= taken[w]
            start = ends[i]
