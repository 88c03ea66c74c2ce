"""Exact matrix products modulo small primes in float64, which holds every integer below 2^53.

Residues are centred (|r| <= q/2). A product whose sums could pass 2^53 is done in digits of one factor. The machine's
double-precision matrix product is the fastest exact one for primes of 22 to 30 bits.
"""

from __future__ import annotations

import math

import torch

from ...randomness import PairKey, random_secret

_EXACT = 52.9
_HALF = (1 << 62) - 1


def centred_(x: torch.Tensor, q: int) -> torch.Tensor:
    """x mod q in about [-q/2, q/2], in place on integers below 2^52 held as float64."""
    return x.sub_(torch.round(x * (1.0 / q)).mul_(q))


def residues(x: torch.Tensor, q: int) -> torch.Tensor:
    """Centred float64 -> int64 in [0, q)."""
    return x.to(torch.int64).remainder_(q)


def centred(x: torch.Tensor, q: int) -> torch.Tensor:
    """int64 in [0, q) -> float64 in [-q/2, q/2]."""
    return torch.where(x > q // 2, x - q, x).double()


def product(left: torch.Tensor, right: torch.Tensor, q: int, largest: float) -> torch.Tensor:
    """left @ right mod q, centred float64; batched as torch's matmul.

    Args:
        left: centred residues [..., n, K].
        right: integers [..., K, m] of magnitude at most `largest`.

    `left` is cut into digits of b bits with largest * 2^b * K below 2^53.
    """
    room = _EXACT - math.log2(max(2, left.shape[-1])) - math.log2(largest)
    if math.log2(q) - 1 <= room:
        return centred_(left @ right, q)
    width = min(22, math.floor(room))
    digits, rest = [], left
    for _ in range(-(-q.bit_length() // width) - 1):
        high = torch.floor(rest * 2.0**-width)
        digits.append(rest - high * 2.0**width)
        rest = high
    total = centred_(rest @ right, q)
    for digit in reversed(digits):  # Horner: |total| 2^width stays below 2^(29 + 24)
        total = centred_(total.mul_(2.0**width).add_(digit @ right), q)
    return total


def uniform(shape: tuple[int, ...], primes: tuple[int, ...]) -> torch.Tensor:
    """Uniform residues int64 [primes, *shape], from the operating system's randomness; within 2^-90 of uniform."""
    count = math.prod(shape)
    words = PairKey(random_secret(), random_secret()).words("secsv share", 0, 0, 2 * len(primes) * count)
    words = words.view(len(primes), 2, count) & _HALF
    out = torch.empty(len(primes), count, dtype=torch.int64)
    for j, q in enumerate(primes):
        high, low = words[j]
        out[j] = (high.remainder(q) * ((1 << 62) % q) + low).remainder_(q)
    return out.view(len(primes), *shape)
