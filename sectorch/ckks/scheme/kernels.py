"""Compiled loops over residues: transforms, products, weighted sums and rescaling of ciphertexts.

torch's own kernels make a pass over memory for every step of a modular product; these make one in all. They are
vectorised by LLVM (numba), release the interpreter's lock, and are spread over torch's threads (`loops.py`).

Modular products are done in float64 with fused multiply-add. For integers |a| < 2^53 and |w| <= q/2, q < 2^50,

    h = fl(a w), l = fma(a, w, -h), c = rint(a w'), w' = fl(w / q), r = fma(-c, q, h) + l  =  a w - c q  exactly:

l is the rounding error of h, an integer below 2^50, and h - c q = r - l is one below 2^53. The estimate a w' is off by
at most |a w / q| 2^-52, so |r| <= q (1/2 + k / 8) for |a| <= k q. A transform adds one such r at each of its steps:
after 8 of them, from q/2, a value is below 7.5 q < 2^53; it is reduced half way. All results are the exact residues,
and tests compare them with SEAL's bit for bit.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from ...ring.loops import compiled, inlined, intrinsic


@intrinsic
def _fma(context, a, b, c):
    def generate(_, builder, signature, values):
        return builder.fma(*values)

    return types.float64(types.float64, types.float64, types.float64), generate


@intrinsic
def rint(context, a):
    def generate(_, builder, signature, values):
        kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType()])
        name = "llvm.rint.f64"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, values)

    return types.float64(types.float64), generate


COLUMNS = 64
"""A transform works on rows of so many neighbours last."""


@inlined
def times(a, w, ratio, q):
    h = a * w
    low = _fma(a, w, -h)
    c = rint(a * ratio)
    return _fma(-c, q, h) + low


@inlined
def product(a, b, inverse, q):
    """a b mod q for two residues: as `times`, |r| < 7/8 q."""
    h = a * b
    low = _fma(a, b, -h)
    return _fma(-rint(h * inverse), q, h) + low


@inlined
def centred(a, inverse, q):
    return a - q * rint(a * inverse)


@inlined
def word(r, q):
    """From (-q, q) to an integer in [0, q)."""
    return np.int64(r + q if r < 0.0 else r)


@compiled
def _steps(turned, rows, gap, groups, w, ratio, q):
    """One butterfly step within all rows at once; w, ratio: [groups, rows]."""
    for g in range(groups):
        for k in range(gap):
            first = (2 * g * gap + k) * rows
            second = first + gap * rows
            roots, ratios = w[g * rows : (g + 1) * rows], ratio[g * rows : (g + 1) * rows]
            upper, lower = turned[first : first + rows], turned[second : second + rows]
            for i in range(rows):
                r = times(lower[i], roots[i], ratios[i], q)
                u = upper[i]
                upper[i] = u + r
                lower[i] = u - r


@compiled
def _steps_back(turned, rows, gap, groups, w, ratio, q):
    inverse = 1.0 / q
    for g in range(groups):
        for k in range(gap):
            first = (2 * g * gap + k) * rows
            second = first + gap * rows
            roots, ratios = w[g * rows : (g + 1) * rows], ratio[g * rows : (g + 1) * rows]
            upper, lower = turned[first : first + rows], turned[second : second + rows]
            for i in range(rows):
                u, v = upper[i], lower[i]
                upper[i] = centred(u + v, inverse, q)
                lower[i] = times(u - v, roots[i], ratios[i], q)


@compiled
def _forward(x, table, q, turned):
    """Coefficients -> values in SEAL's order, in place on doubles x[N] of at most q in magnitude; centred.

    The first steps join places that lie at least COLUMNS apart. The others lie within rows of COLUMNS neighbours:
    turned round, all rows take them side by side, each with roots of its own.
    """
    degree = x.size
    rows = degree // COLUMNS
    inverse = 1.0 / q
    roots, ratios = table[0], table[1]
    gap, groups = degree >> 1, 1
    while gap >= COLUMNS:
        for g in range(groups):
            w, ratio = roots[groups + g], ratios[groups + g]
            upper, lower = x[2 * g * gap : (2 * g + 1) * gap], x[(2 * g + 1) * gap : (2 * g + 2) * gap]
            for i in range(gap):
                r = times(lower[i], w, ratio, q)
                u = upper[i]
                upper[i] = u + r
                lower[i] = u - r
        gap >>= 1
        groups <<= 1
    _turned(x, turned, rows, COLUMNS, inverse, q)
    groups, at = 1, rows
    while gap >= 1:
        _steps(turned, rows, gap, groups, roots[at : at + groups * rows], ratios[at : at + groups * rows], q)
        at += groups * rows
        gap >>= 1
        groups <<= 1
    _turned(turned, x, COLUMNS, rows, inverse, q)


@compiled
def _inverse(x, table, scale, q, turned):
    """Values in SEAL's order -> coefficients, in place on doubles of at most q in magnitude; centred. scale: 1/N."""
    degree = x.size
    rows = degree // COLUMNS
    inverse = 1.0 / q
    roots, ratios = table[2], table[3]
    _turned(x, turned, rows, COLUMNS, inverse, q)
    gap, groups, at = 1, COLUMNS >> 1, degree
    while groups >= 1:
        at -= groups * rows
        _steps_back(turned, rows, gap, groups, roots[at : at + groups * rows], ratios[at : at + groups * rows], q)
        gap <<= 1
        groups >>= 1
    _turned(turned, x, COLUMNS, rows, inverse, q)
    groups = rows >> 1
    while groups >= 1:
        for g in range(groups):
            w, ratio = roots[groups + g], ratios[groups + g]
            upper, lower = x[2 * g * gap : (2 * g + 1) * gap], x[(2 * g + 1) * gap : (2 * g + 2) * gap]
            for i in range(gap):
                u, v = upper[i], lower[i]
                upper[i] = centred(u + v, inverse, q)
                lower[i] = times(u - v, w, ratio, q)
        gap <<= 1
        groups >>= 1
    ratio = scale / q
    for i in range(degree):
        x[i] = centred(times(x[i], scale, ratio, q), inverse, q)


@compiled
def _turned(source, target, rows, columns, inverse, q):
    """target [columns, rows] = source [rows, columns] transposed, centred."""
    for r in range(0, rows, 8):
        for c in range(0, columns, 8):
            for i in range(8):
                for j in range(8):
                    target[(c + j) * rows + r + i] = centred(source[(r + i) * columns + c + j], inverse, q)


@inlined
def _lowered(row, tail, table, q, factor, x, turned, out):
    """out = (row - transform(tail)) * factor mod q: what is left when a prime is divided away."""
    inverse, ratio = 1.0 / q, factor / q
    for t in range(tail.size):
        x[t] = centred(tail[t], inverse, q)
    _forward(x, table, q, turned)
    for t in range(tail.size):
        out[t] = word(times(row[t] - x[t], factor, ratio, q), q)


@compiled
def rescaled(source, out, tables, scales, primes, factors, low, high):
    """out[low:high] = round(source / last prime) of ciphertexts [n, size, P, N] -> [n, size, P - 1, N]."""
    size, count, degree = source.shape[1], source.shape[2], source.shape[3]
    tail, x, turned = np.empty(degree), np.empty(degree), np.empty(degree)
    for i in range(low, high):
        for k in range(size):
            row = source[i, k, count - 1]
            for t in range(degree):
                tail[t] = row[t]
            _inverse(tail, tables[count - 1], scales[count - 1], primes[count - 1], turned)
            for j in range(count - 1):
                _lowered(source[i, k, j], tail, tables[j], primes[j], factors[j], x, turned, out[i, k, j])


@compiled
def switched(source, key, out, tables, scales, primes, factors, low, high):
    """out[:, k] = source[:, k] + key switching of source[:, 2], for [n, 3, P, N] -> [n, 2, P, N].

    Args:
        key: [decomposition, 2, P_all + 1, N]; the special prime's residues are last, as in tables and primes.
        factors: the special prime's inverses.
    """
    count, degree, special = source.shape[2], source.shape[3], key.shape[2] - 1
    pieces, x, turned = np.empty((count, degree)), np.empty(degree), np.empty(degree)
    sums = np.empty((2, count + 1, degree))
    for i in range(low, high):
        for j in range(count):
            piece, row, q = pieces[j], source[i, 2, j], primes[j]
            for t in range(degree):
                piece[t] = row[t]
            _inverse(piece, tables[j], scales[j], q, turned)
            for t in range(degree):  # SEAL lifts the residue in [0, q)
                piece[t] = piece[t] + q if piece[t] < 0.0 else piece[t]
        for m in range(count + 1):
            at = m if m < count else special
            q = primes[at]
            inverse = 1.0 / q
            first, second = sums[0, m], sums[1, m]
            for t in range(degree):
                first[t] = 0.0
                second[t] = 0.0
            for j in range(count):
                if j == m:
                    row = source[i, 2, j]
                    for t in range(degree):
                        x[t] = row[t]
                else:
                    piece = pieces[j]
                    for t in range(degree):
                        x[t] = centred(piece[t], inverse, q)
                    _forward(x, tables[at], q, turned)
                left, right = key[j, 0, at], key[j, 1, at]
                for t in range(degree):
                    first[t] = centred(first[t] + product(x[t], np.float64(left[t]), inverse, q), inverse, q)
                    second[t] = centred(second[t] + product(x[t], np.float64(right[t]), inverse, q), inverse, q)
        for k in range(2):
            tail = sums[k, count]
            _inverse(tail, tables[special], scales[special], primes[special], turned)
            for j in range(count):
                q = primes[j]
                inverse, factor = 1.0 / q, factors[j]
                ratio = factor / q
                total, row, target = sums[k, j], source[i, k, j], out[i, k, j]
                for t in range(degree):
                    x[t] = centred(tail[t], inverse, q)
                _forward(x, tables[j], q, turned)
                for t in range(degree):
                    r = times(total[t] - x[t], factor, ratio, q) + row[t]
                    target[t] = word(centred(r, inverse, q), q)


@compiled
def transformed(x, table, scale, q, backwards, low, high):
    """The transform (or its inverse) of polynomials [n, N] of residues, in place."""
    degree = x.shape[1]
    values, turned = np.empty(degree), np.empty(degree)
    for i in range(low, high):
        row = x[i]
        for t in range(degree):
            values[t] = row[t]
        if backwards:
            _inverse(values, table, scale, q, turned)
        else:
            _forward(values, table, q, turned)
        for t in range(degree):
            row[t] = word(values[t], q)
