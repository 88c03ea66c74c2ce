"""Public functions of a unary code: of the bits [x >= t], one for each of some thresholds. No message."""

from __future__ import annotations

from collections.abc import Callable

from ..backend import Normal, Value
from ..ring.words import weighted
from ..tensor.table import Context


def exponent_map(context: Context, x: Normal, g: Callable[[int], int], below: int | None = None) -> Value:
    """g(e) for a public function g of the exponent e = low + 1 .. high, with ring values.

    Args:
        below: the value for x < 2^low; g(low + 1) unless named.
    """
    first = g(x.low + 1)
    start = first if below is None else below
    steps = [first - start] + [g(e) - g(e - 1) for e in range(x.low + 2, x.high + 1)] + [0]
    return unary_map(context, x.bits, start, steps)


def unary_map(context: Context, bits: Value, start: int, steps: list[int]) -> Value:
    """start + sum_k steps[k] bits[k]: a public step function of a value whose unary code is `bits`."""
    return context.backend.each(weighted, bits, steps) + start
