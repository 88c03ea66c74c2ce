"""The compiled loops of Matrix Reducing, in their own file: small exact matrix products modulo a prime, in float64.

BLAS takes several times as long for them (the matrices of one slot are a few rows by 8 to 64 columns, and each is read
once), and torch makes passes over memory for the digits and the reduction.
"""

from __future__ import annotations

import numpy as np

from ..ring.jit import compiled
from .scheme.loops import _forward, _inverse, centre_residue, product, rint, word


@compiled
def multiply_slots(right, left, q, bits, out, low, high):
    """out[s] = right[s] @ left[s] mod q, centred, for low <= s < high.

    Args:
        right: float64 [S, T, K], centred residues; cut at 2^bits into two digits, or whole where bits is 0.
        left: [S, K, M], integers.

    Exact while a digit times K times the largest of `left` is at most 2^53 (`modular.products` chooses `bits` so).
    """
    _, rows, inner = right.shape
    width = left.shape[2]
    inverse, base = 1.0 / q, 2.0**bits
    upper, lower = np.empty(width), np.empty(width)
    for s in range(low, high):
        for t in range(rows):
            upper[:], lower[:] = 0.0, 0.0
            for k in range(inner):
                rest = right[s, t, k]
                if bits:
                    digit = rint(rest / base)
                    rest -= digit * base
                    for m in range(width):
                        upper[m] += digit * left[s, k, m]
                for m in range(width):
                    lower[m] += rest * left[s, k, m]
            for m in range(width):
                value = lower[m]
                if bits:
                    above = upper[m]
                    above -= rint(above * inverse) * q
                    above *= base
                    value -= rint(value * inverse) * q
                    value += above - rint(above * inverse) * q
                out[s, t, m] = value - rint(value * inverse) * q


@compiled
def arrange_slots(first, second, weight, q, out, low, high):
    """out[s, k] = both polynomials of ciphertext k at the places of slot s, times the weight, centred mod q.

    Args:
        first, second: integers [K, N], one prime's residues.
        out: int32 [S, K, 2 N / S].
    """
    inverse = 1.0 / q
    wide = out.shape[2] // 2
    for s in range(low, high):
        for k in range(len(first)):
            row, other, target = first[k], second[k], out[s, k]
            for e in range(wide):
                target[e] = np.int32(centre_residue(np.float64(row[s * wide + e]) * weight, inverse, q))
            for e in range(wide):
                target[wide + e] = np.int32(centre_residue(np.float64(other[s * wide + e]) * weight, inverse, q))


@compiled
def transform_columns(coefficients, table, q, out, low, high):
    """out[:, k] = the transform of column k.

    Args:
        coefficients: float64 [N, K] integers below 2^52; out: the same, centred.
    """
    degree = len(coefficients)
    x, turned, inverse = np.empty(degree), np.empty(degree), 1.0 / q
    for k in range(low, high):
        for i in range(degree):
            x[i] = centre_residue(coefficients[i, k], inverse, q)
        _forward(x, table, q, turned)
        for i in range(degree):
            out[i, k] = x[i]


@compiled
def accept_uniform(words, q, limit, out):
    """Uniform residues mod q from uniform 32-bit words: those below a multiple of q. How many there were for out."""
    place, inverse = 0, 1.0 / q
    for drawn in words:
        if drawn < limit:
            if place == len(out):
                break
            rest = np.int64(drawn) - np.int64(drawn * inverse) * q  # the quotient is off by one at most
            rest += q if rest < 0 else 0
            out[place] = rest - (q if rest >= q else 0)
            place += 1
    return place


@compiled
def add_centred(first, second, q, out, low, high):
    """out = first + second mod q, centred, on centred int32 [pieces, span]; q below 2^30."""
    half = q // 2
    for i in range(low, high):
        one, other, target = first[i], second[i], out[i]
        for t in range(len(target)):
            value = np.int32(one[t] + other[t])
            value -= np.int32(q if value > half else 0)
            target[t] = value + np.int32(q if value < -half else 0)


@compiled
def reduce_residues(values, primes, low, high):
    """values[low:high] mod each prime, in [0, q), in place: int64 [n, 2, P, N], magnitudes below 2^52."""
    for i in range(low, high):
        for half in range(2):
            for j in range(len(primes)):
                row, q = values[i, half, j], primes[j]
                inverse = 1.0 / q
                for t in range(len(row)):
                    row[t] = word(centre_residue(np.float64(row[t]), inverse, q), q)


@compiled
def decrypt_many(ciphertexts, secret, tables, scales, primes, out, low, high):
    """out[j, i] = the coefficients of c0 + c1 s modulo prime j, centred: float64 [P, n, N].

    Args:
        ciphertexts: residues [n, 2, P, N].
        secret: s transformed, centred float64 [P, N].
    """
    degree = out.shape[2]
    turned = np.empty(degree)
    for i in range(low, high):
        for j in range(len(primes)):
            first, second, row, target = ciphertexts[i, 0, j], ciphertexts[i, 1, j], secret[j], out[j, i]
            q = primes[j]
            inverse = 1.0 / q
            for t in range(degree):
                value = product(centre_residue(np.float64(second[t]), inverse, q), row[t], inverse, q)
                target[t] = centre_residue(value + np.float64(first[t]), inverse, q)
            _inverse(target, tables[j], scales[j], q, turned)
            for t in range(degree):
                target[t] = centre_residue(target[t], inverse, q)


@compiled
def encrypt_symmetric(messages, errors, uniform, secret, tables, primes, out, low, high):
    """out[i] = m + e - a s modulo each prime, transformed, in [0, q): the first halves of encryptions under a secret.

    Args:
        messages: float64 [n, N], integers below 2^52.
        errors: int8 [n, N].
        uniform: a transformed, residues [P, n, N].
        secret: s transformed, centred float64 [P, N].
        out: int32 [n, P, N].
    """
    degree = messages.shape[1]
    x, turned = np.empty(degree), np.empty(degree)
    for i in range(low, high):
        for j in range(len(primes)):
            q, row, other, target = primes[j], secret[j], uniform[j, i], out[i, j]
            inverse = 1.0 / q
            for t in range(degree):
                x[t] = centre_residue(messages[i, t] + errors[i, t], inverse, q)
            _forward(x, tables[j], q, turned)
            for t in range(degree):
                value = product(centre_residue(np.float64(other[t]), inverse, q), row[t], inverse, q)
                target[t] = np.int32(word(centre_residue(x[t] - value, inverse, q), q))


__all__ = [
    "accept_uniform",
    "add_centred",
    "arrange_slots",
    "decrypt_many",
    "encrypt_symmetric",
    "multiply_slots",
    "reduce_residues",
    "transform_columns",
]
