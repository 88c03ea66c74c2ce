"""The exponent of a shared positive number: x = m 2^e with m in [1/2, 1), and any function of e.

One opening of x is compared with all powers of two of its range at once. The bits [x >= 2^k] are a unary code of the
exponent, so every function of e is a public linear map of them, and so is the power that brings x into [1/2, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..choreography import Net, protocol
from .mask import open_masked
from .multiply import multiply_masked
from .shares import Shares, each
from .sign import at_least


@dataclass(frozen=True)
class Normal:
    """`mantissa`: m in [1/2, 1) at `high` fraction bits. `bits`: [T, ...], [x >= 2^k] for k = low .. high."""

    mantissa: Shares
    bits: Shares
    low: int
    high: int


@protocol("normalise", "docs/protocols.md")
def normalise(net: Net, x: Shares, low: int, high: int, fss: bool = False) -> Normal:
    """The mantissa and the exponent of x, for ring values 2^low <= x < 2^high.

    Below the range the mantissa is 1/2 and the exponent low + 1; above it the mantissa is 1 - 2^-high and the exponent
    high. The first and the last of the bits say so: whoever promises more than a saturation checks them.
    0 <= low < high <= 62.

    Rounds: 1 + 5 (comparison) + 1 (bits) + 1 (product). Per element: 32 bytes online and 26.5 dealt, and 14
    and 12.375 for each of the high - low + 1 thresholds. With `fss` the comparison and its bits take no round.
    """
    thresholds = tuple(1 << k for k in range(low, high + 1))
    masked = open_masked(net, x)
    bits = at_least(net, masked, thresholds, fss)

    # The factor 2^(high - e) is 2^(high-low-1) from the first threshold on, is halved by each further one, and is 0
    # outside the range, where a constant mantissa takes its place.
    steps = [1 << (high - low - 1)] + [-(1 << (high - k - 1)) for k in range(low + 1, high)] + [-1]
    factor = each(_weighted, bits, steps)
    product = multiply_masked(net, torch.mul, masked, open_masked(net, factor))
    half, whole = 1 << (high - 1), (1 << high) - 1
    return Normal(product + half - bits[0] * half + bits[-1] * whole, bits, low, high)


def exponent_map(net: Net, x: Normal, g: Callable[[int], int], below: int | None = None) -> Shares:
    """g(e) for a public function g of the exponent e = low + 1 .. high, with ring values. No message.

    Args:
        below: the value for x < 2^low; g(low + 1) unless named.
    """
    first = g(x.low + 1)
    start = first if below is None else below
    steps = [first - start] + [g(e) - g(e - 1) for e in range(x.low + 2, x.high + 1)] + [0]
    return unary_map(net, x.bits, start, steps)


def unary_map(net: Net, bits: Shares, start: int, steps: list[int]) -> Shares:
    """start + sum_k steps[k] bits[k]: a public step function of a value whose unary code is `bits`. No message."""
    return each(_weighted, bits, steps) + start


def _weighted(bits: torch.Tensor, weights: list[int]) -> torch.Tensor:
    """sum_k weights[k] bits[k]."""
    out = torch.zeros_like(bits[0])
    for bit, weight in zip(bits, weights, strict=True):
        out.add_(bit * weight)
    return out
