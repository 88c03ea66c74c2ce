"""Compiled loops for products and sums of ciphertexts; see `kernels.py` for how and why they are exact."""

from __future__ import annotations

import numpy as np

from ...ring.loops import compiled, inlined
from .kernels import centred, product, rint, times, word


@compiled
def multiplied(x, y, out, primes, low, high):
    """Ciphertexts of two polynomials [n, 2, P, N] times others: [n, 3, P, N]."""
    count, degree = x.shape[2], x.shape[3]
    for i in range(low, high):
        for j in range(count):
            q = primes[j]
            inverse = 1.0 / q
            a0, a1, b0, b1 = x[i, 0, j], x[i, 1, j], y[i, 0, j], y[i, 1, j]
            c0, c1, c2 = out[i, 0, j], out[i, 1, j], out[i, 2, j]
            for t in range(degree):
                c0[t] = word(product(np.float64(a0[t]), np.float64(b0[t]), inverse, q), q)
                cross = product(np.float64(a0[t]), np.float64(b1[t]), inverse, q)
                cross += product(np.float64(a1[t]), np.float64(b0[t]), inverse, q)
                c1[t] = word(centred(cross, inverse, q), q)
                c2[t] = word(product(np.float64(a1[t]), np.float64(b1[t]), inverse, q), q)


@inlined
def _reduced(s, inverse, q):
    """s mod q in [0, q) for |s| <= 2^62: the estimate of s / q errs by at most 2^62 / q * 2^-51 < 1/4."""
    r = s - np.int64(rint(np.float64(s) * inverse)) * q
    return r + q if r < 0 else r


@inlined
def _carried(s, carry, ratio, inverse, q):
    return word(times(np.float64(_reduced(s, inverse, np.int64(q))), carry, ratio, q), q)


@compiled
def _added(tile, index, weights, s0, s1, s2, s3):
    """Four sums plus four terms each: what is loaded is used four times."""
    x0, x1, x2, x3 = tile[index[0]], tile[index[1]], tile[index[2]], tile[index[3]]
    a0, a1, a2, a3 = weights[0, 0], weights[0, 1], weights[0, 2], weights[0, 3]
    b0, b1, b2, b3 = weights[1, 0], weights[1, 1], weights[1, 2], weights[1, 3]
    c0, c1, c2, c3 = weights[2, 0], weights[2, 1], weights[2, 2], weights[2, 3]
    d0, d1, d2, d3 = weights[3, 0], weights[3, 1], weights[3, 2], weights[3, 3]
    for t in range(s0.size):
        x, y, z, w = x0[t], x1[t], x2[t], x3[t]
        s0[t] += a0 * x + a1 * y + a2 * z + a3 * w
        s1[t] += b0 * x + b1 * y + b2 * z + b3 * w
        s2[t] += c0 * x + c1 * y + c2 * z + c3 * w
        s3[t] += d0 * x + d1 * y + d2 * z + d3 * w


@compiled
def summed(source, k, j, gather, weights, carry, q, offsets, out, span, low, high):
    """out[o * positions + p, k, j] = offsets[o] + sum_i weights[:, o, i] source[gather[p, i], k, j] mod q.

    Blocks low .. high of `span` coefficients. A place n in gather holds zeros; rows of weights and terms come in fours,
    filled up with zeros. The weights come in digits, the highest first; a step to the next multiplies by `carry`.

    What is summed of one digit has to stay below 2^62 (`weighted.py`).
    """
    n = source.shape[0]
    digits, width = weights.shape[0], weights.shape[2]
    positions, rows = gather.shape[0], offsets.size
    tile = np.empty((n + 1, span), np.int64)
    tile[n] = 0
    sums = np.empty((4, span), np.int64)
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    inverse, ratio = 1.0 / q, carry / q
    for block in range(low, high):
        start = block * span
        for i in range(n):
            tile[i] = source[i, k, j, start : start + span]
        for p in range(positions):
            for o in range(0, rows, 4):
                for t in range(span):
                    s0[t] = 0
                    s1[t] = 0
                    s2[t] = 0
                    s3[t] = 0
                for d in range(digits):
                    if d:
                        for t in range(span):
                            s0[t] = _carried(s0[t], carry, ratio, inverse, q)
                            s1[t] = _carried(s1[t], carry, ratio, inverse, q)
                            s2[t] = _carried(s2[t], carry, ratio, inverse, q)
                            s3[t] = _carried(s3[t], carry, ratio, inverse, q)
                    for i in range(0, width, 4):
                        _added(tile, gather[p, i : i + 4], weights[d, o : o + 4, i : i + 4], s0, s1, s2, s3)
                for s in range(min(4, rows - o)):
                    total, target = sums[s], out[(o + s) * positions + p, k, j, start : start + span]
                    for t in range(span):
                        target[t] = _reduced(total[t] + offsets[o + s], inverse, np.int64(q))


@compiled
def inner(x, y, out, primes, span, low, high):
    """out[0] = sum_i x[i] y[i] for ciphertexts [n, 2, P, N] and others, or plaintexts [n, 1, P, N]; steps low .. high.

    One step is `span` coefficients of one prime. out: [1, 3, P, N], or [1, 2, P, N] with plaintexts.
    """
    n, blocks = x.shape[0], x.shape[3] // span
    encrypted = y.shape[1] == 2
    s0, s1, s2 = np.empty(span), np.empty(span), np.empty(span)
    for step in range(low, high):
        j, start = step // blocks, step % blocks * span
        end = start + span
        q = primes[j]
        inverse = 1.0 / q
        s0[:] = 0.0
        s1[:] = 0.0
        s2[:] = 0.0
        for i in range(n):
            a0, a1, b0 = x[i, 0, j, start:end], x[i, 1, j, start:end], y[i, 0, j, start:end]
            if encrypted:
                b1 = y[i, 1, j, start:end]
                for t in range(span):
                    c0, c1, d0, d1 = np.float64(a0[t]), np.float64(a1[t]), np.float64(b0[t]), np.float64(b1[t])
                    cross = product(c0, d1, inverse, q) + product(c1, d0, inverse, q)
                    s0[t] = centred(s0[t] + product(c0, d0, inverse, q), inverse, q)
                    s1[t] = centred(s1[t] + cross, inverse, q)
                    s2[t] = centred(s2[t] + product(c1, d1, inverse, q), inverse, q)
            else:
                for t in range(span):
                    d0 = np.float64(b0[t])
                    s0[t] = centred(s0[t] + product(np.float64(a0[t]), d0, inverse, q), inverse, q)
                    s1[t] = centred(s1[t] + product(np.float64(a1[t]), d0, inverse, q), inverse, q)
        for t in range(span):
            out[0, 0, j, start + t] = word(s0[t], q)
            out[0, 1, j, start + t] = word(s1[t], q)
        if encrypted:
            for t in range(span):
                out[0, 2, j, start + t] = word(s2[t], q)
