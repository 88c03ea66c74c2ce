"""Compiled loops of layers of ANDs on packed bits (`mpc/star/layers.py`); see `bitloops.py`."""

from __future__ import annotations

import numpy as np

from .loops import borrowed, compiled, inlined

_SPAN = 512
"""Words combined at a time: their rows stay in the cache."""
_FEW = 32
"""The same of an AND of more than four operands, whose sets of operands have a row each."""


@inlined
def xor(x, y, out):
    """Words xor others. Rows are sliced, here and below, since of indices that might be negative the compiler makes no
    vectors."""
    for w in range(len(out)):
        out[w] = x[w] ^ y[w]


@compiled
def masked(state, alpha, opened, at, out, low, high):
    """The opened rows of a layer under their masks."""
    for i in range(len(opened)):
        xor(state[opened[i], low:high], alpha[at + i, low:high], out[i, low:high])


@compiled
def layer(
    mine, theirs, state, alpha, dealt, count, into, onto, kept, ands, shares, at, made, first, opened, beyond, new, out,
    low, high,
):  # fmt: skip
    """One party's half of the state after a layer of ANDs, and the rows that the next layer opens, under their masks.

    Args:
        mine, theirs: the opened rows as both sent them. count: new rows that are not kept.
        ands, into, shares: as in `layers.py`. first: all ones for the party that adds the public term.
        opened, beyond: the rows of the new state that the next layer opens, and where their masks begin.
    """
    mine, theirs, state, alpha = borrowed(mine), borrowed(theirs), borrowed(state), borrowed(alpha)
    dealt, ands, shares, new, out = borrowed(dealt), borrowed(ands), borrowed(shares), borrowed(new), borrowed(out)
    public = np.empty((len(mine), _SPAN), np.int64)
    sets = np.empty((shares.shape[1] // 2 if ands.shape[1] > 4 else 0, _FEW), np.int64)
    for start in range(low, high, _SPAN):
        end = min(high, start + _SPAN)
        for i in range(len(mine)):
            xor(mine[i, start:end], theirs[i, start:end], public[i, : end - start])
        for i in range(count):
            if i < len(onto):
                new[i, start:end] = state[onto[i], start:end]
            else:
                new[i, start:end] = 0
        for i in range(len(ands)):
            if ands.shape[1] > 4 and ands[i, 4] >= 0:
                _add_wide(public, alpha, dealt, ands[i], shares[i], at, made, first, start, end, new[into[i]], sets)
            else:
                _add_and(public, alpha, dealt, ands[i], shares[i], at, made, first, start, end, new[into[i]])
        for i in range(len(kept)):
            new[count + i, start:end] = state[kept[i], start:end]
        for i in range(len(opened)):
            xor(new[opened[i], start:end], alpha[beyond + i, start:end], out[i, start:end])


@inlined
def _add_and(public, alpha, dealt, rows, shares, at, made, first, start, end, new):
    """One party's half of an AND, xor-ed into a row: the sum, over the sets of operands, of its half of the product of
    their masks times what is public of the others, one operand after the other taken out."""
    d0, d1 = public[rows[0], : end - start], public[rows[1], : end - start]
    a0, a1 = alpha[at + rows[0], start:end], alpha[at + rows[1], start:end]
    s01, row = dealt[made + shares[3], start:end], new[start:end]
    if rows[2] < 0:
        for w in range(end - start):
            row[w] ^= s01[w] ^ (d0[w] & a1[w]) ^ (d1[w] & (a0[w] ^ (d0[w] & first)))
        return
    d2, a2 = public[rows[2], : end - start], alpha[at + rows[2], start:end]
    s02, s12 = dealt[made + shares[5], start:end], dealt[made + shares[6], start:end]
    s012 = dealt[made + shares[7], start:end]
    if rows[3] < 0:
        for w in range(end - start):
            x, y = d0[w], d1[w]
            without = s01[w] ^ (x & a1[w]) ^ (y & (a0[w] ^ (x & first)))
            row[w] ^= s012[w] ^ (x & s12[w]) ^ (y & (s02[w] ^ (x & a2[w]))) ^ (d2[w] & without)
        return
    d3, a3 = public[rows[3], : end - start], alpha[at + rows[3], start:end]
    s03, s13 = dealt[made + shares[9], start:end], dealt[made + shares[10], start:end]
    s23, s013 = dealt[made + shares[12], start:end], dealt[made + shares[11], start:end]
    s023, s123 = dealt[made + shares[13], start:end], dealt[made + shares[14], start:end]
    s0123 = dealt[made + shares[15], start:end]
    for w in range(end - start):
        x, y = d0[w], d1[w]
        without = s01[w] ^ (x & a1[w]) ^ (y & (a0[w] ^ (x & first)))
        without = s012[w] ^ (x & s12[w]) ^ (y & (s02[w] ^ (x & a2[w]))) ^ (d2[w] & without)
        row[w] ^= d3[w] & without
    for w in range(end - start):
        x, y = d0[w], d1[w]
        masked = s013[w] ^ (x & s13[w]) ^ (y & (s03[w] ^ (x & a3[w])))
        row[w] ^= s0123[w] ^ (x & s123[w]) ^ (y & (s023[w] ^ (x & s23[w]))) ^ (d2[w] & masked)


@compiled
def _add_wide(public, alpha, dealt, rows, shares, at, made, first, start, end, new, sets):
    """`_add_and` of any number of operands; `sets` is room for half of their sets."""
    count = 0
    while count < len(rows) and rows[count] >= 0:
        count += 1
    half = 1 << (count - 1)
    for low in range(start, end, _FEW):
        size = min(_FEW, end - low)
        last = public[rows[count - 1], low - start : low - start + size]
        for s in range(half):
            found, with_last = sets[s], dealt[made + shares[s | half], low : low + size]
            if s == 0:
                with_last = alpha[at + rows[count - 1], low : low + size]
                for w in range(size):
                    found[w] = with_last[w] ^ (last[w] & first)
                continue
            own = dealt[made + shares[s], low : low + size]
            if s & (s - 1) == 0:
                own = alpha[at + shares[s], low : low + size]
            for w in range(size):
                found[w] = with_last[w] ^ (last[w] & own[w])
        for operand in range(count - 2, -1, -1):
            taken = public[rows[operand], low - start : low - start + size]
            for s in range(1 << operand):
                found, with_it = sets[s], sets[s | (1 << operand)]
                for w in range(size):
                    found[w] = with_it[w] ^ (taken[w] & found[w])
        for w in range(size):
            new[low + w] ^= sets[0, w]


@compiled
def products(alpha, other, mask, sets, out, low, high):
    """The products of two and more rows of alpha ^ other, under a mask."""
    alpha, other, mask, out = borrowed(alpha), borrowed(other), borrowed(mask), borrowed(out)
    both, several = np.empty((len(alpha), _SPAN), np.int64), np.empty(_SPAN, np.int64)
    for start in range(low, high, _SPAN):
        end = min(start + _SPAN, high)
        for i in range(len(alpha)):
            xor(alpha[i, start:end], other[i, start:end], both[i, : end - start])
        for i in range(len(sets)):
            p, q, third, fourth = sets[i, 0], sets[i, 1], sets[i, 2], sets[i, 3]
            under, row = mask[i, start:end], out[i, start:end]
            if third < 0:
                for w in range(end - start):
                    row[w] = under[w] ^ (both[p, w] & both[q, w])
            elif fourth < 0:
                for w in range(end - start):
                    row[w] = under[w] ^ (both[p, w] & both[q, w] & both[third, w])
            else:
                for w in range(end - start):
                    several[w] = both[p, w] & both[q, w] & both[third, w] & both[fourth, w]
                for k in range(4, sets.shape[1]):
                    if sets[i, k] >= 0:
                        for w in range(end - start):
                            several[w] &= both[sets[i, k], w]
                xor(several, under, row)


@compiled
def _three(rows, low, high):
    return rows[0, low:high], rows[1, low:high], rows[2, low:high]


@compiled
def floor_products(alpha, other, wraps, mask, out, low, high):
    """The products of masks for the last layer of a ReLU (`relu.py`), and of bits that D knows, under a mask."""
    (p0, p1, p2), (q0, q1, q2) = _three(alpha, low, high), _three(other, low, high)
    (m0, m1, m2), (m3, m4, m5) = _three(mask, low, high), _three(mask[3:], low, high)
    (y0, y1, y2), (y3, y4, y5) = _three(out, low, high), _three(out[3:], low, high)
    w = wraps[low:high]
    for i in range(len(w)):
        eq, k, u = p0[i] ^ q0[i], p1[i] ^ q1[i], p2[i] ^ q2[i]
        y0[i], y1[i], y2[i] = m0[i] ^ (eq & u), m1[i] ^ (k & u), m2[i] ^ (k & w[i])
        y3[i], y4[i], y5[i] = m3[i] ^ (u & w[i]), m4[i] ^ (eq & w[i]), m5[i] ^ (eq & u & w[i])


@compiled
def floor_taken(equal, less, borrow, wraps, top, alpha, first, out, low, high):
    """One party's half of eq, k and u of a ReLU (`relu.py`), under alpha; `first` is all ones for A."""
    (a0, a1, a2), (y0, y1, y2) = _three(alpha, low, high), _three(out, low, high)
    eq, lt, u, w, bits = equal[low:high], less[low:high], borrow[low:high], wraps[low:high], top[low:high]
    for i in range(len(eq)):
        k = lt[i] ^ w[i] ^ (~bits[i] & first)
        y0[i], y1[i], y2[i] = a0[i] ^ eq[i], a1[i] ^ k, a2[i] ^ u[i]


@compiled
def floor_joined(of_A, of_S, alpha, dealt, wraps, top, mask, out, first, low, high):
    """One party's half of what that layer gives, under a mask; `first` is all ones for A, which adds public terms."""
    (x0, x1, x2), (z0, z1, z2) = _three(of_A, low, high), _three(of_S, low, high)
    (a0, a1, a2), (y0, y1, y2) = _three(alpha, low, high), _three(out, low, high)
    (d0, d1, d2), (d3, d4, d5) = _three(dealt, low, high), _three(dealt[3:], low, high)
    (m0, m1, m2), w, above = _three(mask, low, high), wraps[low:high], top[low:high]
    own = x1 if first else z1
    for i in range(len(w)):
        eq, k, u = x0[i] ^ z0[i], x1[i] ^ z1[i], x2[i] ^ z2[i]
        eq_u = d0[i] ^ (eq & a2[i]) ^ (u & (a0[i] ^ (eq & first)))
        k_u = d1[i] ^ (k & a2[i]) ^ (u & (a1[i] ^ (k & first)))
        wrapped = d2[i] ^ (k & w[i]) ^ (eq & u & w[i]) ^ (eq & d3[i]) ^ (u & d4[i]) ^ d5[i]
        half = own[i] ^ a1[i]
        y0[i], y1[i], y2[i] = m0[i] ^ half ^ eq_u, m1[i] ^ eq_u ^ k_u, m2[i] ^ (wrapped & ~above[i])
