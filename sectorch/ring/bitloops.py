"""Compiled loops of the hot kernels: one pass over memory where torch's functions make many.

Each has its reference in plain torch beside its `leaf`, which runs on other devices, and gives the same bits. All loop
over the words low .. high of their packed bits; element t W + w belongs to bit t of word w (`bitplanes.py`).
"""

from __future__ import annotations

import numpy as np

from .andloops import layer as layer
from .andloops import masked as masked
from .andloops import products as products
from .loops import array as array
from .loops import compiled
from .loops import on_words as on_words
from .transposed import SIDE as _SIDE
from .transposed import planes_at as _planes_at
from .wideloops import wide_codes as wide_codes
from .wideloops import wide_leaves as wide_leaves
from .wideloops import winners as winners

_SPAN = 512
"""Words combined at a time: all their rows stay in the first-level cache."""


@compiled
def planes(v, out, column, low, high):
    """Elements [N] -> their bit planes [64, W], at a column of `out`."""
    width = -(-len(v) // 64)
    a = np.empty((64, _SIDE), np.uint64)
    for word in range(low, high, _SIDE):
        count = min(_planes_at(v, width, word, a), high - word)
        for t in range(64):
            for c in range(count):
                out[t, column + word + c] = np.int64(a[t, c])


@compiled
def codes(r, mask, spans, tops, out, low, high):
    """Thermometer codes of the blocks of r in all spans [7 blocks, W], r's planes `tops`, and a mask on all of them."""
    width = -(-len(r) // 64)
    total = 0
    for s in range(len(spans)):
        total += -(-(spans[s, 1] - spans[s, 0]) // 3)
    a = np.empty((64, _SIDE), np.uint64)
    zero = np.zeros(_SIDE, np.uint64)
    for word in range(low, high, _SIDE):
        count = min(_planes_at(r, width, word, a), high - word)
        row = 0
        for s in range(len(spans)):
            blocks = -(-(spans[s, 1] - spans[s, 0]) // 3)
            start = spans[s, 1] - 3 * blocks
            for b in range(blocks):
                p = start + 3 * b
                x0, x1, x2 = a[p] if p >= 0 else zero, a[p + 1] if p >= -1 else zero, a[p + 2]
                for c in range(count):
                    r0, r1, r2 = np.int64(x0[c]), np.int64(x1[c]), np.int64(x2[c])
                    some, both, at = r1 | r0, r1 & r0, word + c
                    out[row, at] = mask[row, at] ^ (r2 | some)
                    out[total + row, at] = mask[total + row, at] ^ (r2 | r1)
                    out[2 * total + row, at] = mask[2 * total + row, at] ^ (r2 | both)
                    out[3 * total + row, at] = mask[3 * total + row, at] ^ r2
                    out[4 * total + row, at] = mask[4 * total + row, at] ^ (some & r2)
                    out[5 * total + row, at] = mask[5 * total + row, at] ^ (r2 & r1)
                    out[6 * total + row, at] = mask[6 * total + row, at] ^ (both & r2)
                row += 1
        for i in range(len(tops)):
            for c in range(count):
                out[7 * total + i, word + c] = mask[7 * total + i, word + c] ^ np.int64(a[tops[i], c])


@compiled
def signs(v, out, low, high):
    """The sign bits of elements as words."""
    width = len(out)
    out[low:high] = 0
    for t in range(64):
        row = v[t * width + low : min(t * width + high, len(v))]
        for w in range(len(row)):
            out[low + w] |= np.int64((np.uint64(row[w]) >> np.uint64(63)) << np.uint64(t))


@compiled
def leaves(bits, words, total, block, start, blocks, first, out, row, low, high):
    """One party's half of lt and eq of the blocks from plane `start` on, in rows row and row + blocks of `out`.

    `words` are its halves of the codes of `total` blocks, of which those from `block` on are taken, for the columns
    modulo their width.
    """
    around, zero = words.shape[1], np.zeros(_SPAN, np.int64)
    left = low
    while left < high:
        at = left % around
        size = min(_SPAN, high - left, around - at)
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
    for t in range(low, k):
        for w in range(at, end):
            out[t, w] = bits[t, w]
    for start in range(at, end, _SPAN):
        stop = min(end, start + _SPAN)
        carry = np.full(_SPAN, -1, np.int64)
        for t in range(k, 64):
            for w in range(start, stop):
                out[t, w] = bits[t, w] ^ carry[w - start]
                carry[w - start] &= bits[t, w] ^ down


@compiled
def bits_less(b, other, mask, out, low, high):
    """The bits of b ^ other [K, W] as 0 and 1, less a mask: [K, N]."""
    width, count = b.shape[1], mask.shape[1]
    for k in range(len(b)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                bit = ((b[k, w] ^ other[k, w]) >> t) & 1
                out[k, t * width + w] = bit - mask[k, t * width + w]


@compiled
def masks(words, out, low, high):
    """All ones where the bits of words [K, W] are set, and 0 elsewhere: [K, N]."""
    width, count = words.shape[1], out.shape[1]
    for k in range(len(words)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                out[k, t * width + w] = -((words[k, w] >> t) & 1)


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


@compiled
def chosen_less(b, other, v, shift, mask, out, low, high):
    """v >> shift (logical) where the bits of b ^ other [K, W] are set and 0 elsewhere, less a mask: [K, N]."""
    width, count = b.shape[1], mask.shape[1]
    kept = np.int64(-1) if shift == 0 else np.int64((1 << (64 - shift)) - 1)
    for k in range(len(b)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                all_of_it = -(((b[k, w] ^ other[k, w]) >> t) & 1)
                out[k, t * width + w] = ((v[t * width + w] >> shift) & kept & all_of_it) - mask[k, t * width + w]


@compiled
def ring_bits(e, other, b, first, out, low, high):
    """One party's half of the opened bits xor b, from its half of b: [K, N]; first = 1 for the party that adds them."""
    width, count = e.shape[1], b.shape[1]
    for k in range(len(e)):
        for t in range(64):
            for w in range(low, min(high, count - t * width)):
                opened = ((e[k, w] ^ other[k, w]) >> t) & 1
                half = b[k, t * width + w]
                out[k, t * width + w] = half + opened * (first - 2 * half)


@compiled
def selected(e, other, c, b, r, chosen, first, out, low, high):
    """One party's half of s (c - r) for s = e xor b."""
    width, count = len(e), len(c)
    for t in range(64):
        for w in range(low, min(high, count - t * width)):
            at = t * width + w
            opened = -(((e[w] ^ other[w]) >> t) & 1)
            s = b[at] ^ (opened & ((first - b[at]) ^ b[at]))
            v = chosen[at] ^ (opened & ((r[at] - chosen[at]) ^ chosen[at]))
            out[at] = s * c[at] - v


@compiled
def floored(e, other, c, quotient, bits, chosen, wraps, number, copies, first, shift, out, low, high):
    """One party's half of s (C - R) - s u + 2^(64-f) s msb(r) for threshold `number`; see `relu.py`."""
    width, count, kept = e.shape[1], len(c), np.int64((1 << (64 - shift)) - 1)
    for t in range(64):
        for w in range(low, min(high, count - t * width)):
            at = t * width + w
            e0 = -(((e[number, w] ^ other[number, w]) >> t) & 1)
            e1 = -(((e[copies + number, w] ^ other[copies + number, w]) >> t) & 1)
            e2 = -(((e[2 * copies + number, w] ^ other[2 * copies + number, w]) >> t) & 1)
            s0, s1 = bits[number, at], bits[copies + number, at]
            p, q = chosen[number, at], np.int64(wraps[number, at])
            s = s0 ^ (e0 & ((first - s0) ^ s0))
            half = p ^ (e0 & ((quotient[at] - p) ^ p))
            borrow = s1 ^ (e1 & ((first - s1) ^ s1))
            wrap = (q ^ (e2 & ((first - q) ^ q))) << (64 - shift)
            out[at] = s * ((c[at] >> shift) & kept) - half - borrow + wrap


@compiled
def floors(c, quotient, wraps, borrow, shift, first, out, low, high):
    """One party's half of a truncation; see `truncate.py`. `first` is the party that adds what is public."""
    base, by = np.int64(1) << (62 - shift), np.uint64(shift)
    for at in range(low, high):
        lifted = np.uint64(c[at]) + np.uint64(1 << 62)  # unsigned: of a signed sum the compiler takes that it fits
        unwrapped = np.int64((lifted >> np.uint64(63)) ^ np.uint64(1))
        wrap = (np.int64(wraps[at]) << (64 - shift)) * unwrapped
        out[at] = wrap - quotient[at] - borrow[at] + first * (np.int64(lifted >> by) - base)


@compiled
def shifted_less(v, shift, less, out, low, high):
    """v >> shift (logical), less another."""
    kept = np.int64((1 << (64 - shift)) - 1)
    for at in range(low, high):
        out[at] = ((v[at] >> shift) & kept) - less[at]


@compiled
def negative_less(v, less, out, low, high):
    """1 where v is negative and else 0, less another, mod 2^32."""
    for at in range(low, high):
        out[at] = np.int32(np.int64(v[at] < 0) - np.int64(less[at]))
