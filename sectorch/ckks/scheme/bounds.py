"""What a ciphertext is known to hold: a bound on its values and one on their error, and what a level has room for.

A `Cipher` decrypts to m / scale times its public factor. With every slot of m / scale below `largest` in magnitude and
within `error` of what it should be, each coefficient of m is below (largest + error) scale: it is an average of slots
times roots of unity. So a ciphertext with t multiplications left decrypts to m itself, and not to m mod Q_t, where

    largest + error < Q_t / (2 D_t),    Q_t = q_0 .. q_t, D_t the scale of level t.

A rescale that is pending multiplies modulus and scale alike and changes nothing in this. `held` refuses what does not
fit, with nothing computed.

Errors are slots' errors of 8 standard deviations, added up: that of a slot is a sum of N coefficients' errors of
variance v, and has the variance N v. A bound fails in a slot with a probability below 2^-49 (of normal errors).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

from ..errors import ScaleError

SIGMAS = 8.0
KEY_VARIANCE = 3.2**2
"""Of the error in a key, and in an encryption under the secret key."""


def capacity(parameters: Any, left: int) -> float:
    """Q_t / (2 D_t): values of a ciphertext with t multiplications left are below it."""
    return _capacities(tuple(parameters.primes), tuple(parameters.scales))[left]


@functools.lru_cache(64)
def _capacities(primes: tuple[int, ...], scales: tuple[float, ...]) -> tuple[float, ...]:
    modulus, found = 1, []
    for q, scale in zip(primes, scales, strict=True):
        modulus *= q
        found.append(math.exp(min(700.0, math.log(modulus) - math.log(2 * scale))))
    return tuple(found)


def _slot(degree: int, variance: float, scale: float) -> float:
    return SIGMAS * math.sqrt(degree * variance) / scale


def _rounding(degree: int) -> float:
    """Variance of two polynomials rounded, one of which meets a ternary key."""
    return (1 + 2 * degree / 3) / 12


def rescaling_error(degree: int, scale: float) -> float:
    """Of a rescale to this scale."""
    return _slot(degree, _rounding(degree), scale)


def fresh_error(degree: int, scale: float) -> float:
    """Of an encryption: SEAL's last step rounds, the key has an error, and so has the encoding."""
    return _slot(degree, _rounding(degree) + 16.0, scale)


def encoding_error(degree: int, scale: float) -> float:
    """Of a plain vector: its coefficients are rounded."""
    return _slot(degree, 1 / 12, scale)


def switching_error(parameters: Any, level: int, scale: float) -> float:
    """Of a key switch at this level, in the slot where it is largest.

    The digit of q_j is a polynomial of coefficients in 0 .. q_j - 1; slot by slot it meets a key's error, of the
    deviation 3.2 sqrt(N), and the special prime P is divided out. As SEAL does not centre the digits, their mean
    q_j / 2 adds up in the slots next to the root 1: |sum_k zeta^k| is 2 N / pi there. The rest varies by
    q_j sqrt(N / 12).
    """
    n = parameters.degree
    digits = math.sqrt(sum((q / parameters.special) ** 2 for q in parameters.primes[: level + 1]))
    size = n / math.pi + SIGMAS * math.sqrt(n / 12)
    return SIGMAS * math.sqrt(KEY_VARIANCE * n) * digits * size / scale + rescaling_error(n, scale)


def most(values: Iterable[float]) -> float:
    """The largest; unknown if one of them is."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def held(c: Any, what: str) -> Any:
    """`c`, if its level has room for what it may hold.

    Raises:
        ScaleError: it has not, and the result would wrap.
    """
    if math.isnan(c.largest):  # left to whoever encrypted
        return c
    room, wanted = capacity(c.keys.parameters, c.left), c.largest + c.error
    if not wanted < room:
        spelled = f"2^{math.log2(wanted):.1f}" if 0 < wanted < math.inf else "any size"
        raise ScaleError(
            f"{what} may give values up to {spelled} where its level, with {c.left} multiplications left, holds those "
            f"below 2^{math.log2(room):.1f}: they would wrap. Declare a smaller bound (encrypt(x, keys, bound=...), or "
            f"e.bounded(...)), make keys with integer_bits= or one level more, or scale the layer down"
        )
    return c
