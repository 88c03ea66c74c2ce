"""Compiled loops of what is claimed of dealt values (`mpc/star/proved.py`); see `bitloops.py`."""

from __future__ import annotations

import numpy as np

from .carryless import SIDE
from .elementloops import SPAN, here, shifted
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
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            bits = words[k, left:end]
            for t in range(64):
                place = here(t, width, left, end)
                halves, unset, different = v[k, place], zero[k, place], difference[k, place]
                for i in range(len(unset)):
                    bit, half = (bits[i] >> t) & 1, np.int64(halves[i])
                    found = np.int64(v.dtype.type(bit - half))
                    unset[i] = found
                    different[i] = found ^ np.int64(v.dtype.type(1 - bit - half))


@compiled
def chosen(zero, one, words, base, difference, low, high):
    """The word that the bit of words [K, W] takes of two [K, N], and what is different in the other."""
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            bits = words[k, left:end]
            for t in range(64):
                place = here(t, width, left, end)
                x, y, taken, different = zero[k, place], one[k, place], base[k, place], difference[k, place]
                for i in range(len(taken)):
                    found = x[i] ^ y[i]
                    different[i] = found
                    taken[i] = x[i] ^ (found & -((bits[i] >> t) & 1))


@compiled
def quotients(v, r, low_bit, last_bit, shift, out, low, high):
    """The coefficients [4, N] of 1, c, c' and c c' in (r >> shift) - v + low - 2^(64 - shift) last, where c and c' are
    the other halves of these two bits."""
    width, top = len(low_bit), np.int64(64 - shift)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        lows, lasts = low_bit[left:end], last_bit[left:end]
        for t in range(64):
            place = here(t, width, left, end)
            x, y = r[place], v[place]
            base, first, second, both = out[0, place], out[1, place], out[2, place], out[3, place]
            for i in range(len(base)):
                rest = shifted(x[i], shift) - y[i]
                bit, last = (lows[i] >> t) & 1, (lasts[i] >> t) & 1
                zero, one = rest + bit, rest + 1 - bit
                last, without = last << top, (1 - last) << top
                base[i] = zero - last
                first[i] = (zero - last) ^ (one - last)
                second[i] = (zero - last) ^ (zero - without)
                both[i] = first[i] ^ (zero - without) ^ (one - without)


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
