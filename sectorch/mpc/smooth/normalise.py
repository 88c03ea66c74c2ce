"""The exponent of a shared positive number: x = m 2^e with m in [1/2, 1), and any function of e.

One opening of x is compared with all powers of two of its range at once. The bits [x >= 2^k] are a unary code of the
exponent, so every function of e is a public linear map of them, and so is the power that brings x into [1/2, 1).
"""

from __future__ import annotations

from typing import Any

import torch

from ...backend import Normal
from ...choreography import Net, protocol
from ...ring.words import weighted
from ..star.mask import open_masked
from ..star.multiply import multiply_masked
from ..star.shares import Shares, each
from ..star.sign import at_least


@protocol("normalise", "docs/protocols.md")
def normalise(net: Net, x: Shares, low: int, high: int, fss: bool = False) -> Normal:
    """The mantissa and the exponent of x, for ring values 2^low <= x < 2^high.

    Below the range the mantissa is 1/2 and the exponent low + 1; above it the mantissa is 1 - 2^-high and the exponent
    high. The first and the last of the bits say so: whoever promises more than a saturation checks them.
    0 <= low < high <= 62.

    Rounds: 1 + 3 (comparison) + 1 (bits) + 1 (product). Per element: 32 bytes online and 18.5 dealt, and 13.25
    and 14.875 for each of the high - low + 1 thresholds. With `fss` the comparison and its bits take no round.
    """
    masked = open_masked(net, x)
    bits = at_least(net, masked, powers(low, high), fss)
    factor = each(weighted, bits, factor_steps(low, high))
    product = multiply_masked(net, torch.mul, masked, open_masked(net, factor))
    return Normal(mantissa(product, bits, high), bits, low, high)


def powers(low: int, high: int) -> tuple[int, ...]:
    """The thresholds that tell exponents apart."""
    return tuple(1 << k for k in range(low, high + 1))


def factor_steps(low: int, high: int) -> list[int]:
    """How the factor 2^(high - e) changes at each threshold: it is 2^(high-low-1) from the first one on, is halved by
    each further one, and is 0 outside the range, where a constant mantissa takes its place."""
    return [1 << (high - low - 1)] + [-(1 << (high - k - 1)) for k in range(low + 1, high)] + [-1]


def mantissa(product: Any, bits: Any, high: int) -> Any:
    """The product of x with its factor, and outside the range 1/2 or almost 1; linear in both."""
    half, whole = 1 << (high - 1), (1 << high) - 1
    return product + half - bits[0] * half + bits[-1] * whole
