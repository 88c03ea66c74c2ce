"""Compiled loops over residues: transforms, products, weighted sums and rescaling of ciphertexts.

torch's own kernels make a pass over memory for every step of a modular product; these make one in all. They are
vectorised by LLVM (numba), release the interpreter's lock, and are spread over torch's threads
(`ring.jit.run_in_threads`).

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

from ...ring.jit import compiled, inlined, intrinsic


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
def centre_residue(a, inverse, q):
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
                upper[i] = centre_residue(u + v, inverse, q)
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
                upper[i] = centre_residue(u + v, inverse, q)
                lower[i] = times(u - v, w, ratio, q)
        gap <<= 1
        groups >>= 1
    ratio = scale / q
    for i in range(degree):
        x[i] = centre_residue(times(x[i], scale, ratio, q), inverse, q)


@compiled
def _turned(source, target, rows, columns, inverse, q):
    """target [columns, rows] = source [rows, columns] transposed, centred."""
    for r in range(0, rows, 8):
        for c in range(0, columns, 8):
            for i in range(8):
                for j in range(8):
                    target[(c + j) * rows + r + i] = centre_residue(source[(r + i) * columns + c + j], inverse, q)


@inlined
def _lowered(row, tail, table, q, factor, x, turned, out):
    """out = (row - transform(tail)) * factor mod q: what is left when a prime is divided away."""
    inverse, ratio = 1.0 / q, factor / q
    for t in range(tail.size):
        x[t] = centre_residue(tail[t], inverse, q)
    _forward(x, table, q, turned)
    for t in range(tail.size):
        out[t] = word(times(row[t] - x[t], factor, ratio, q), q)


@compiled
def rescale_loop(source, out, tables, scales, primes, factors, low, high):
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
def switch_key_loop(source, key, out, tables, scales, primes, factors, low, high):
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
                # A piece in its own prime is the source, which is in the transformed domain already.
                if j == m:
                    row = source[i, 2, j]
                    for t in range(degree):
                        x[t] = row[t]
                else:
                    piece = pieces[j]
                    for t in range(degree):
                        x[t] = centre_residue(piece[t], inverse, q)
                    _forward(x, tables[at], q, turned)
                left, right = key[j, 0, at], key[j, 1, at]
                for t in range(degree):
                    first[t] = centre_residue(first[t] + product(x[t], np.float64(left[t]), inverse, q), inverse, q)
                    second[t] = centre_residue(second[t] + product(x[t], np.float64(right[t]), inverse, q), inverse, q)
        for k in range(2):
            tail = sums[k, count]
            _inverse(tail, tables[special], scales[special], primes[special], turned)
            for j in range(count):
                q = primes[j]
                inverse, factor = 1.0 / q, factors[j]
                ratio = factor / q
                total, row, target = sums[k, j], source[i, k, j], out[i, k, j]
                for t in range(degree):
                    x[t] = centre_residue(tail[t], inverse, q)
                _forward(x, tables[j], q, turned)
                for t in range(degree):
                    r = times(total[t] - x[t], factor, ratio, q) + row[t]
                    target[t] = word(centre_residue(r, inverse, q), q)


@compiled
def transform_loop(x, table, scale, q, backwards, low, high):
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


# Encryption under a public key, and SEAL's distributions from uniform bits.
#
# u is ternary, each of -1, 0 and 1 equally likely, exactly: five digits a byte, a byte of 243 and more being refused.
# e is centred binomial with 21 pairs of bits, of variance 10.5, which is what SEAL takes for a rounded normal of 3.2.

PAIRS = 21
"""Pairs of bits of a centred binomial: it lies in -21 .. 21."""
EXACT = 2.0**52
"""Integers below it are reduced by a product with an inverse; above, by fmod, which takes long."""


@compiled
def ternary(bits, out):
    """Digits -1, 0, 1 from uniform bytes into out [n, N]; whether the bytes of every row were enough."""
    degree, enough = out.shape[1], True
    for i in range(len(out)):
        place = 0
        for byte in bits[i]:
            rest = np.int64(byte)
            if rest < 243:
                for _ in range(5):
                    if place < degree:
                        out[i, place] = rest % 3 - 1
                        place += 1
                    rest //= 3
        enough = enough and place == degree
    return enough


@inlined
def ones(x):
    """How many of the lowest 32 bits are set."""
    # Counts of pairs, of fours and of bytes; the product adds the four bytes up in the highest one.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) & 0xFFFFFFFF) >> 24


@compiled
def binomial(words, out):
    """Centred binomials from uniform words, 42 bits of each."""
    mask = (np.int64(1) << PAIRS) - 1
    for i in range(len(out)):
        out[i] = ones(words[i] & mask) - ones((words[i] >> PAIRS) & mask)


@compiled
def encrypt_loop(message, u, errors, key, out, tables, scales, primes, factors, low, high):
    """out[low:high] = round((key u + errors) / special prime) + message, modulo each prime: SEAL's encryption.

    The division takes the special prime's residue, a polynomial, off the others. It, the errors and the message go
    through one transform together.

    Args:
        message: float64 [n, N] integers, or [0, 0] for zero.
        u, errors: int8 [n, N] and [n, 2, N].
        key: float64 [2, P + 1, N], the special prime's residues last, the others' times its inverse; centred.
        factors: the special prime's inverses, centred.
    """
    count, degree = out.shape[2], out.shape[3]
    special, x, turned = np.empty(degree), np.empty(degree), np.empty(degree)
    values = np.empty((count + 1, degree))
    for i in range(low, high):
        for m in range(count + 1):
            row = values[m]
            for t in range(degree):
                row[t] = u[i, t]
            _forward(row, tables[m], primes[m], turned)
        for k in range(2):
            q, row, other = primes[count], values[count], key[k, count]
            inverse = 1.0 / q
            for t in range(degree):
                special[t] = centre_residue(product(row[t], other[t], inverse, q), inverse, q)
            _inverse(special, tables[count], scales[count], q, turned)
            for t in range(degree):
                # (key u + e) less its residue mod the special prime is a multiple of that prime. `key` has key u
                # divided by it already, so what remains to divide is e less the residue.
                special[t] = errors[i, k, t] - centre_residue(special[t] + errors[i, k, t], inverse, q)
            for j in range(count):
                q, row, other, target = primes[j], values[j], key[k, j], out[i, k, j]
                inverse, factor = 1.0 / q, factors[j]
                ratio = factor / q
                for t in range(degree):
                    x[t] = centre_residue(times(centre_residue(special[t], inverse, q), factor, ratio, q), inverse, q)
                if k == 0 and len(message):
                    for t in range(degree):
                        value = message[i, t]
                        if abs(value) >= EXACT:
                            value = np.fmod(value, q)
                        x[t] = centre_residue(x[t] + centre_residue(value, inverse, q), inverse, q)
                _forward(x, tables[j], q, turned)
                for t in range(degree):
                    target[t] = word(centre_residue(product(row[t], other[t], inverse, q) + x[t], inverse, q), q)


# Products and sums of ciphertexts; exact for the reason that stands at the top of the file.


@compiled
def multiply_loop(x, y, out, primes, low, high):
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
                c1[t] = word(centre_residue(cross, inverse, q), q)
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
def weighted_sum_loop(source, k, j, gather, weights, carry, q, offsets, out, span, low, high):
    """out[o * positions + p, k, j] = offsets[o] + sum_i weights[:, o, i] source[gather[p, i], k, j] mod q.

    Blocks low .. high of `span` coefficients. A place n in gather holds zeros; rows of weights and terms come in fours,
    filled up with zeros. The weights come in digits, the highest first; a step to the next multiplies by `carry`.

    The sum of the terms of one digit has to stay below 2^62 (`tensor.layers.weighted_sums`).
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
                    s0[t] = centre_residue(s0[t] + product(c0, d0, inverse, q), inverse, q)
                    s1[t] = centre_residue(s1[t] + cross, inverse, q)
                    s2[t] = centre_residue(s2[t] + product(c1, d1, inverse, q), inverse, q)
            else:
                for t in range(span):
                    d0 = np.float64(b0[t])
                    s0[t] = centre_residue(s0[t] + product(np.float64(a0[t]), d0, inverse, q), inverse, q)
                    s1[t] = centre_residue(s1[t] + product(np.float64(a1[t]), d0, inverse, q), inverse, q)
        for t in range(span):
            out[0, 0, j, start + t] = word(s0[t], q)
            out[0, 1, j, start + t] = word(s1[t], q)
        if encrypted:
            for t in range(span):
                out[0, 2, j, start + t] = word(s2[t], q)
