"""Polynomials of a ciphertext by Paterson and Stockmeyer, in the smallest depth.

p = q x^(2^k) + r with deg q < 2^k, again and again until the degree is below 4; what is left is c3 x^3 + c2 x^2 + c1 x
+ c0. Its powers have depths 2, 1 and 0, all different, so the constant of the deepest one waits as the ciphertext's
public factor and those of the others use levels that they have to spare: no constant costs depth. A polynomial of
degree d takes ceil(log2(d + 1)) levels, and one fewer if d = 2^k and what follows x^d is at most k - 1 deep (as in
CaPriDe's GELU).
Source: Paterson and Stockmeyer (1973); the depth-minimal variant as in Bossuat et al. (2021).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ...errors import ArgumentError
from .arithmetic import add, add_numbers
from .cipher import Cipher
from .multiply import multiply

_LEAF = 4


def depth(coefficients: Sequence[float]) -> int:
    """Levels that `evaluate` takes."""
    degree = _degree(coefficients)
    if degree <= 1:
        return 0
    if degree < _LEAF:
        return 2 if degree == 3 else 1
    k = degree.bit_length() - 1
    if degree == 1 << k:
        # Two terms of one depth have different public factors: taking one in costs a level.
        return k + (depth(coefficients[:degree]) == k)
    top = max(k, depth(coefficients[1 << k :])) + 1
    return max(top, depth(coefficients[: 1 << k]))


def powers_depth(exponent: int) -> int:
    """Levels of the exponent-th power."""
    return depth([0.0] * exponent + [1.0])


def _degree(coefficients: Sequence[float]) -> int:
    return max((k for k, c in enumerate(coefficients) if c != 0), default=0)


def evaluate(c: Cipher, coefficients: Sequence[float]) -> Cipher:
    """sum_k coefficients[k] x^k.

    Error: sum_k |c_k| k |x|^(k-1) e_x, and for each product what `multiply` and a rescale add.

    Raises:
        LevelError: the chain is too short; nothing is left half done.
        ArgumentError: no coefficients.
    """
    degree = _degree(coefficients)
    if not len(coefficients) or degree < 1:
        raise ArgumentError("a polynomial needs at least a linear term")
    # The public factor f of x goes into the coefficients: c_k f^k of the bare x.
    scaled = [float(a) * c.factor**k for k, a in enumerate(coefficients[: degree + 1])]
    powers = {1: replace(c, factor=1.0)}
    return _evaluate(scaled, powers)


def _power(powers: dict[int, Cipher], k: int) -> Cipher:
    """x^k from powers of two below it, in ceil(log2 k) levels."""
    if k not in powers:
        half = k // 2 if k & (k - 1) == 0 else 1 << (k.bit_length() - 1)
        powers[k] = multiply(_power(powers, half), _power(powers, k - half), f"the power x^{k}")
    return powers[k]


def _evaluate(coefficients: list[float], powers: dict[int, Cipher]) -> Cipher:
    degree = _degree(coefficients)
    if degree < _LEAF:
        return _combined(coefficients, powers)
    k = 1 << (degree.bit_length() - 1)
    if degree == k:
        top = replace(_power(powers, k), factor=coefficients[k])
    else:
        top = multiply(_evaluate(coefficients[k:], powers), _power(powers, k), "a polynomial")
    rest = coefficients[:k]
    if _degree(rest) >= 1:
        return add(top, _evaluate(rest, powers))
    return add_numbers(top, [rest[0]] * top.count) if rest[0] else top


def _combined(coefficients: list[float], powers: dict[int, Cipher]) -> Cipher:
    """A polynomial of degree 1 to 3, the deepest power first."""
    degrees = (k for k in range(_degree(coefficients), 0, -1) if coefficients[k] != 0)
    total = functools.reduce(add, (replace(_power(powers, k), factor=coefficients[k]) for k in degrees))
    constant = coefficients[0]
    return add_numbers(total, [constant] * total.count) if constant else total
