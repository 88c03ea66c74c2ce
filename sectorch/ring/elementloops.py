"""Compiled loops from packed bits to ring elements, and on elements: for `mpc/star/select.py`, `truncate.py`, `relu.py`
and `largest.py`.

They loop as those of `bitloops.py`. The elements of one bit of some words stand side by side, so that a loop over them
is one over slices: of indices from `low` on the compiler cannot tell that none is negative, which would count from the
end, and takes one element after the other where it could take eight. What a bit chooses is computed before it is looked
at, or some processors guess the bit.
"""

from __future__ import annotations

import numpy as np

from .loops import compiled

SPAN = 2048
"""Words whose 64 bits are taken in turns. They stay in the cache, and the elements of each bit are read in one run: the
longer the runs, the more of memory comes before it is asked for."""


@compiled
def here(t, width, low, high):
    """Where the elements of bit t of the words low .. high are; a slice ends where there are no more."""
    return slice(t * width + low, t * width + high)


@compiled
def _xor(x, y, out):
    for w in range(len(x)):
        out[w] = x[w] ^ y[w]
    return out


@compiled
def _picked(opened, unset, whole):
    """`unset` where a bit is zero, and whole - unset where it is set."""
    return whole - unset if opened else unset


@compiled
def shifted(v, by):
    """v >> by (logical)."""
    return np.int64(np.uint64(v) >> np.uint64(by))


@compiled
def bits_less(b, other, mask, out, low, high):
    """The bits of b ^ other [K, W] as 0 and 1, less a mask: [K, N]."""
    (copies, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = here(t, width, left, end), np.int64(1) << t
                less, found = mask[k, place], out[k, place]
                for i in range(len(found)):
                    found[i] = (1 if words[i] & bit else 0) - less[i]


@compiled
def masks(words, out, low, high):
    """All ones where the bits of words [K, W] are set, and 0 elsewhere: [K, N]."""
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            row = words[k, left:end]
            for t in range(64):
                found, bit = out[k, here(t, width, left, end)], np.int64(1) << t
                for i in range(len(found)):
                    found[i] = -1 if row[i] & bit else 0


@compiled
def chosen_less(b, other, v, shift, mask, out, low, high):
    """v >> shift (logical) where the bits of b ^ other [K, W] are set and 0 elsewhere, less a mask: [K, N]."""
    (copies, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = here(t, width, left, end), np.int64(1) << t
                x, less, found = v[place], mask[k, place], out[k, place]
                for i in range(len(found)):
                    value = shifted(x[i], shift)
                    found[i] = (value if words[i] & bit else 0) - less[i]


@compiled
def ring_bits(e, other, b, first, out, low, high):
    """One party's half of the opened bits xor b, from its half of b: [K, N]; first = 1 for the party that adds them."""
    (copies, width), words = e.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(e[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = here(t, width, left, end), np.int64(1) << t
                half, found = b[k, place], out[k, place]
                for i in range(len(found)):
                    found[i] = _picked(words[i] & bit, half[i], first)


@compiled
def selected(e, other, c, b, r, chosen, first, out, low, high):
    """One party's half of s (c - r) for s = e xor b."""
    width, words = len(e), np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        words = _xor(e[left:end], other[left:end], words)
        for t in range(64):
            place, bit = here(t, width, left, end), np.int64(1) << t
            x, half, whole, product, found = c[place], b[place], r[place], chosen[place], out[place]
            for i in range(len(found)):
                opened = words[i] & bit
                found[i] = _picked(opened, half[i], first) * x[i] - _picked(opened, product[i], whole[i])


@compiled
def operands(b, other, r, chosen, shift, mask, out, low, high):
    """r >> shift (logical), the bits of b ^ other [B, W], and r >> shift where those of the first are set, less a mask
    [1 + B + chosen, N]; see `truncate.py`."""
    (count, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(count):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = here(t, width, left, end), np.int64(1) << t
                x, less, found = r[place], mask[0, place], out[0, place]
                if k == 0:
                    for i in range(len(found)):
                        found[i] = shifted(x[i], shift) - less[i]
                less, found = mask[1 + k, place], out[1 + k, place]
                for i in range(len(found)):
                    found[i] = (1 if words[i] & bit else 0) - less[i]
                if k < chosen:
                    less, found = mask[1 + count + k, place], out[1 + count + k, place]
                    for i in range(len(found)):
                        value = shifted(x[i], shift)
                        found[i] = (value if words[i] & bit else 0) - less[i]


@compiled
def floored(e, other, c, dealt, wraps, number, copies, first, threshold, shift, out, low, high):
    """One party's half of s (C - R) - s u + 2^(64-f) s msb(r) for threshold `number`; see `relu.py`."""
    width, words, chosen = e.shape[1], np.empty((3, SPAN), np.int64), 1 + 2 * copies + number
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(3):
            row = k * copies + number
            _xor(e[row, left:end], other[row, left:end], words[k])
        e0, e1, e2 = words
        for t in range(64):
            place, bit = here(t, width, left, end), np.int64(1) << t
            x, R, s0, s1 = c[place], dealt[0, place], dealt[1 + number, place], dealt[1 + copies + number, place]
            p, q, found = dealt[chosen, place], wraps[number, place], out[place]
            for i in range(len(found)):
                opened = e0[i] & bit
                s, half = _picked(opened, s0[i], first), _picked(opened, p[i], R[i])
                borrow = _picked(e1[i] & bit, s1[i], first)
                wrap = _picked(e2[i] & bit, np.int64(q[i]), first) << (64 - shift)
                found[i] = s * shifted(np.uint64(x[i]) - np.uint64(threshold), shift) - half - borrow + wrap


@compiled
def winners(e, c, quotient, bits, chosen, wraps, wraps_chosen, first, shift, out, low, high):
    """One party's half of sum_i s_i (C_i - R_i + 2^(64-f) w_i) - u, for s and u = e xor b; see `largest.py`.

    Args:
        e: words [(m + 1) W], public. bits: b in the ring [64, m + 1, W]. All others [64, m, W].
    """
    _, m, width = c.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for t in range(64):
            found, u, last = out[t, left:end], bits[t, m, left:end], e[m * width + left : m * width + end]
            bit = np.int64(1) << t
            for w in range(len(found)):
                found[w] = -_picked(last[w] & bit, u[w], first)
            for i in range(m):
                words, x, R = e[i * width + left : i * width + end], c[t, i, left:end], quotient[t, i, left:end]
                b, p = bits[t, i, left:end], chosen[t, i, left:end]
                q, whole = wraps_chosen[t, i, left:end], wraps[t, i, left:end]
                for w in range(len(found)):
                    opened = words[w] & bit
                    s, rest = _picked(opened, b[w], first), _picked(opened, p[w], R[w])
                    wrap = _picked(opened, np.int64(q[w]), np.int64(whole[w])) << (64 - shift)
                    found[w] += s * shifted(x[w], shift) - rest + (wrap if x[w] >= 0 else 0)


@compiled
def floors(c, quotient, wraps, borrow, shift, first, out, low, high):
    """One party's half of a truncation; see `truncate.py`. `first` is the party that adds what is public."""
    base, place = np.int64(1) << (62 - shift), slice(low, high)
    x, R, w, u, found = c[place], quotient[place], wraps[place], borrow[place], out[place]
    for i in range(len(found)):
        lifted = np.uint64(x[i]) + np.uint64(1 << 62)  # unsigned: of a signed sum the compiler takes that it fits
        wrap = np.int64(w[i]) << (64 - shift)
        found[i] = (wrap if lifted < np.uint64(1 << 63) else 0) - R[i] - u[i] + first * (shifted(lifted, shift) - base)


@compiled
def floors_by_bit(e, other, c, dealt, wraps, half, shift, first, out, low, high):
    """As `floors`, of c + half, for a borrow e ^ other xor b: dealt are halves of the quotient and of b, [2, N]."""
    base, width, words = np.int64(1) << (62 - shift), len(e), np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        words = _xor(e[left:end], other[left:end], words)
        for t in range(64):
            place, bit = here(t, width, left, end), np.int64(1) << t
            x, R, b, w, found = c[place], dealt[0, place], dealt[1, place], wraps[place], out[place]
            for i in range(len(found)):
                u = _picked(words[i] & bit, b[i], first)
                lifted = np.uint64(x[i]) + np.uint64(half) + np.uint64(1 << 62)
                wrap = np.int64(w[i]) << (64 - shift)
                found[i] = (
                    (wrap if lifted < np.uint64(1 << 63) else 0) - R[i] - u + first * (shifted(lifted, shift) - base)
                )


@compiled
def shifted_less(v, shift, less, out, low, high):
    """v >> shift (logical), less another."""
    x, y, found = v[low:high], less[low:high], out[low:high]
    for i in range(len(found)):
        found[i] = shifted(x[i], shift) - y[i]


@compiled
def negative_less(v, less, out, low, high):
    """1 where v is negative and else 0, less another, mod 2^32."""
    x, y, found = v[low:high], less[low:high], out[low:high]
    for i in range(len(found)):
        found[i] = np.int32((1 if x[i] < 0 else 0) - np.int64(y[i]))
