"""Compiled loops of what is claimed of dealt values (`mpc/star/proved.py`); see `bitloops.py`."""

from __future__ import annotations

import numpy as np

from .carryless import SIDE
from .loops import compiled
from .transposed import transposed


@compiled
def sum_bits(x, y, mask, out, low, high):
    """The bit planes of the sums of elements [N] and those of their last carries, xor a mask [65, W]."""
    width, count = mask.shape[1], len(x)
    a, carry = np.empty((64, SIDE), np.uint64), np.empty(SIDE, np.uint64)
    for word in range(low, high, SIDE):
        size = min(SIDE, high - word)
        a[:], carry[:] = 0, 0
        for t in range(64):
            for c in range(min(size, count - t * width - word)):
                at = t * width + word + c
                first, second = np.uint64(x[at]), np.uint64(y[at])
                found = first + second
                a[t, c] = found
                carry[c] |= (((first & second) | ((first | second) & ~found)) >> np.uint64(63)) << np.uint64(t)
        transposed(a)
        for t in range(64):
            for c in range(size):
                out[t, word + c] = np.int64(a[t, c]) ^ mask[t, word + c]
        for c in range(size):
            out[64, word + c] = np.int64(carry[c]) ^ mask[64, word + c]


@compiled
def complements(words, v, zero, difference, low, high):
    """What the other half of a bit as a number has to be, of one half v [K, N]: where the other half of the words
    [K, W] is 0, and what is different where it is 1."""
    width, count = words.shape[1], v.shape[1]
    for k in range(len(words)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                bit, half = (words[k, w] >> t) & 1, np.int64(v[k, t * width + w])
                found = np.int64(v.dtype.type(bit - half))
                zero[k, t * width + w] = found
                difference[k, t * width + w] = found ^ np.int64(v.dtype.type(1 - bit - half))


@compiled
def chosen(zero, one, words, base, difference, low, high):
    """The word that the bit of words [K, W] takes of two [K, N], and what is different in the other."""
    width, count = words.shape[1], zero.shape[1]
    for k in range(len(words)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                at = t * width + w
                found = zero[k, at] ^ one[k, at]
                difference[k, at] = found
                base[k, at] = zero[k, at] ^ (found & -((words[k, w] >> t) & 1))


@compiled
def quotients(v, r, low_bit, last_bit, shift, out, low, high):
    """The coefficients [4, N] of 1, c, c' and c c' in (r >> shift) - v + low - 2^(64 - shift) last, where c and c' are
    the other halves of these two bits."""
    width, count = len(low_bit), len(v)
    kept, top = np.int64((1 << (64 - shift)) - 1), np.int64(64 - shift)
    for t in range(64):
        for w in range(low, min(high, count - t * width)):
            at = t * width + w
            rest = ((r[at] >> shift) & kept) - v[at]
            first, last = (low_bit[w] >> t) & 1, (last_bit[w] >> t) & 1
            first, other = rest + first, rest + 1 - first
            last, without = last << top, (1 - last) << top
            out[0, at] = first - last
            out[1, at] = (first - last) ^ (other - last)
            out[2, at] = (first - last) ^ (first - without)
            out[3, at] = out[1, at] ^ (first - without) ^ (other - without)


@compiled
def placed(elements, out, column):
    """Copies [K, N] of elements beside each other, from a column of a matrix [64, W] on, as bits of packed words stand;
    with zeros at the end of each."""
    copies, count = elements.shape
    width = (count + 63) // 64
    for k in range(copies):
        for t in range(64):
            row = out[t, column + k * width : column + (k + 1) * width]
            whole = max(0, min(width, count - t * width))
            for w in range(whole):
                row[w] = elements[k, t * width + w]
            for w in range(whole, width):
                row[w] = 0
