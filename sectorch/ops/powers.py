"""Logarithms, roots, reciprocals and quotients: x = m 2^e, a series of m and a public map of e.

An argument keeps all its fraction bits, so that a mean of squares of 40 bits has its root down to 2^-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import Normal, Series, Value
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from . import series as series_of
from .codes import exponent_map
from .common import SLACK_BITS, raised, require, settled, shortened
from .ranges import CAPACITY, domain_bits, fitted, forbid, planes
from .smooth import fitting, result_bits, series

T = torch.Tensor
SPARE_BITS = 4
"""Arguments may be 2^4 times the largest activation."""


def exponent(context: Context, x: SharedTensor, low: int, high: int) -> Normal:
    """Mantissa and exponent of x for 2^low <= x < 2^high, real exponents; above, a range error."""
    s = x.scale_bits
    high = min(HEADROOM_BITS, s + high)
    normal = context.backend.normalise(x.shares, max(0, s + low), high)
    forbid(context, normal.bits[-1])
    return normal


def high_bits(context: Context) -> int:
    return result_bits(context) + SPARE_BITS


def forbid_below(context: Context, normal: Normal) -> None:
    """What lies below the range of exponents, zero and negative numbers with it, ends in a range error."""
    forbid(context, -normal.bits[0] + 1)


def _times_power(context: Context, normal: Normal, mantissa: Series, power: Callable, bits: int) -> SharedTensor:
    """mantissa(m) power(e), power(e) with so many fraction bits; 0 below the range."""
    m = series(context, context.tensor(normal.mantissa, normal.high), mantissa)
    g = exponent_map(context, normal, lambda e: round(power(e) * 2**bits), 0)
    return m.like(context.backend.multiply(torch.mul, m.shares, g), m.scale_bits + bits)


def logarithm(context: Context, x: SharedTensor, zero: float | None = None) -> SharedTensor:
    """log x; what is below the last place of x ends in a range error, or gives `zero`."""
    element, constant = x.constant or (0, 0.0)
    normal = exponent(context, x, -x.scale_bits, high_bits(context))
    if zero is None and constant and not element:
        forbid(context, -context.backend.at_least(x.shares, high=planes(x))[0] + 1)
        zero = math.log(constant)
    elif zero is None:
        forbid_below(context, normal)
    m = series(context, x.like(normal.mantissa, normal.high), series_of.LOG)
    unit = 2**m.scale_bits
    below = None if zero is None else round((zero + math.log(2)) * unit)
    whole = exponent_map(context, normal, lambda e: round((e - x.scale_bits) * math.log(2) * unit), below)
    if element:
        whole = whole + _where_constant(context, x, lambda v: math.log(v) * unit)
    return m.like(m.shares + whole, m.scale_bits, logarithm_bound(m.scale_bits, zero or 0.0))


def _where_constant(context: Context, x: SharedTensor, function: Callable[[float], float]) -> Value:
    """Where x stands for a constant: what the function of that is more than the function of the ring's number."""
    element, constant = x.constant or (0, 0.0)
    bits = context.backend.at_least(x.shares, (element, element + 1))
    return (bits[0] - bits[1]) * round(function(constant) - function(element * 2.0**-x.scale_bits))


def logarithm_bound(scale_bits: int, zero: float = 0.0) -> float:
    """Of a logarithm of a number between the last place and the end of the ring."""
    return (HEADROOM_BITS + abs(zero)) * 2.0**scale_bits


@implements("log", torch.log, T.log, in_place=(T.log_, torch.log_), note="0 < x < 2^20; error 4e-6 + 1e-6 / x")
def log(context: Context, x: SharedTensor) -> SharedTensor:
    return logarithm(context, x)


@implements("log2", torch.log2, T.log2, note="as log")
def log2(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(x) * (1 / math.log(2))


@implements("log10", torch.log10, T.log10, note="as log")
def log10(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(x) * (1 / math.log(10))


@implements("log1p", torch.log1p, T.log1p, note="as log of 1 + x")
def log1p(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(1 + x)


@implements("sqrt", torch.sqrt, T.sqrt, in_place=(T.sqrt_,), note="0 <= x < 2^20; error 2e-6 + 1e-6 / y + 4e-6 y")
def sqrt(context: Context, x: SharedTensor) -> SharedTensor:
    sign = context.backend.at_least(x.shares, high=planes(x))
    forbid(context, -sign + 1)
    s, high = x.scale_bits, high_bits(context)
    normal = exponent(context, x, -s, high)
    bits = fitting(context, 2.0 ** (high / 2))
    return _times_power(context, normal, series_of.SQRT, lambda e: 2.0 ** ((e - s) / 2), bits)


@implements("rsqrt", torch.rsqrt, T.rsqrt, in_place=(T.rsqrt_,),
       note="0 < x < 2^20, y < 2^16; error 2e-6 + 1e-6 y + 1e-6 y^3")  # fmt: skip
def rsqrt(context: Context, x: SharedTensor) -> SharedTensor:
    x, limit = x, result_bits(context)
    s = x.scale_bits
    normal = exponent(context, x, -min(s, 2 * limit), high_bits(context))
    forbid_below(context, normal)
    bits = _factor_bits(context, (s - normal.low) / 2)
    y = _times_power(context, normal, series_of.RSQRT, lambda e: 2.0 ** ((s - e) / 2), bits)
    y = shortened(context, y, context.frac_bits + SLACK_BITS)
    if x.constant and x.constant[0] >= 1 << normal.low:
        added = _where_constant(context, x, lambda v: v**-0.5 * 2.0**y.scale_bits)
        y = y.like(y.shares + added, y.scale_bits, y.bound)
    return y


def _factor_bits(context: Context, largest: float) -> int:
    """Fraction bits of a power of two below 2^largest that multiplies a number of f bits below two."""
    return min(context.frac_bits + 12, math.floor(HEADROOM_BITS - 2 - context.frac_bits - largest))


def positive_reciprocal(context: Context, x: SharedTensor, low: int, high: int, numerator: float = 1.0) -> SharedTensor:
    """numerator / x for 2^low <= x < 2^high, to f + 6 fraction bits."""
    s = x.scale_bits
    normal = exponent(context, x, low, high)
    forbid_below(context, normal)
    bits = _factor_bits(context, math.frexp(numerator)[1] - 1 - low)
    y = _times_power(context, normal, series_of.RECIPROCAL, lambda e: numerator * 2.0 ** (s - e), bits)
    return shortened(context, y, context.frac_bits + SLACK_BITS)


def _signed(context: Context, x: SharedTensor, sign: Value | None) -> SharedTensor:
    return x if sign is None else x.like(context.backend.multiply(torch.mul, x.shares, sign), x.scale_bits, x.bound)


def _sign(context: Context, x: SharedTensor) -> Value:
    """1 where x >= 0, and -1."""
    return context.backend.at_least(x.shares, high=planes(x))[0] * 2 - 1


@implements("reciprocal", torch.reciprocal, T.reciprocal, in_place=(T.reciprocal_,),
       note="2^-16 <= |x| < 2^20; error 2e-6 (1 + |y|) + 1e-6 y^2")  # fmt: skip
def reciprocal(context: Context, x: SharedTensor) -> SharedTensor:
    sign = _sign(context, x)
    y = positive_reciprocal(context, _signed(context, x, sign), -result_bits(context), high_bits(context))
    return _signed(context, y, sign)


def small_over(context: Context, numerator: float, x: SharedTensor) -> SharedTensor:
    """numerator / x for a small public numerator, of which f fraction bits would keep few digits."""
    sign = _sign(context, x)
    size = abs(numerator)
    low = math.frexp(size)[1] - quotient_bits(context)
    y = positive_reciprocal(context, _signed(context, x, sign), low, high_bits(context), size)
    y = _signed(context, y, sign)
    return y if numerator > 0 else y.like(-y.shares, y.scale_bits, y.bound)


def quotient_bits(context: Context) -> int:
    """Quotients are held below 2^this: `domain_bits`, or less: divisors up to the activation limit need the room."""
    room = HEADROOM_BITS - 2 - context.frac_bits
    return min(domain_bits(context), max(room - context.scheme.activation_bits - 1, room // 2))


def quotient(context: Context, x: SharedTensor, y: SharedTensor, positive: bool = False) -> SharedTensor:
    """x / y where the result is an activation: y = m 2^e, first x 2^-e, and then times 1 / m.

    So the result has its bits however small or large both are. A quotient from the limit of activations on, 0 / 0 with
    it, ends in a range error.

    Args:
        positive: whether y > 0 and |x / y| is below the limit, by what the caller knows.
    """
    f, limit = context.frac_bits, quotient_bits(context)
    if x.scale_bits < f:
        x = raised(context, fitted(context, x, CAPACITY / 2.0 ** (f - x.scale_bits)), f)
    x = shortened(context, x, f)
    if not positive:
        sign = _sign(context, y)
        x, y = _signed(context, x, sign), _signed(context, y, sign)
        _require_quotient(context, x, y, limit)
    high = min(high_bits(context), HEADROOM_BITS - 2 - f - limit)
    y = shortened(context, y, HEADROOM_BITS - high)  # below, powers of two up to 2^(high + s) are ring elements
    s = y.scale_bits
    normal = exponent(context, y, -s, high)
    forbid_below(context, normal)
    power = exponent_map(context, normal, lambda e: 1 << high + s - e, 0)
    coarse = x.like(context.backend.multiply(torch.mul, x.shares, power), f + high)
    inverse = series(context, x.like(normal.mantissa, normal.high), series_of.RECIPROCAL)
    coarse = shortened(context, coarse, f + SLACK_BITS - 1)
    return coarse.like(
        context.backend.multiply(torch.mul, coarse.shares, inverse.shares), coarse.scale_bits + inverse.scale_bits
    )


@implements("softsign", F.softsign, note="everywhere; error 1e-5")
def softsign(context: Context, x: SharedTensor) -> SharedTensor:
    return quotient(context, x, 1 + x.abs(), positive=True)


def _require_quotient(context: Context, x: SharedTensor, y: SharedTensor, limit: int) -> None:
    """-2^limit y < x < 2^limit y, for y >= 0."""
    most = y.like(y.shares, y.scale_bits - limit)
    scale = max(most.scale_bits, x.scale_bits)
    x = fitted(context, x, CAPACITY / 2.0 ** (scale - x.scale_bits))
    most, x = raised(context, most, scale), raised(context, x, scale)
    shape = torch.broadcast_shapes(most.shares.shape, x.shares.shape)
    require(context, x.like(context.backend.each(_both_sides, x.shares, most.shares, shape), scale), low=0.0)


def _both_sides(x: torch.Tensor, most: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.stack(((most - x).expand(shape), (most + x).expand(shape)))


def fractional_power(context: Context, x: SharedTensor, y: Any) -> torch.Tensor:
    """x^y = exp(y log x) for x > 0; 0^y = 0 for a public y > 0."""
    if not isinstance(y, (int, float)) or y <= 0:
        return torch.exp(torch.log(x) * y)
    if x.constant:
        return torch.exp(torch.log(x) * y)
    lowest = -(x.scale_bits + 1) * math.log(2)
    power = logarithm(context, x, lowest) * y
    positive = context.backend.at_least(x.shares, (0, 1), planes(x, more=1))
    forbid(context, -positive[0] + 1)
    return _signed(context, settled(context, power.exp()), positive[1])
