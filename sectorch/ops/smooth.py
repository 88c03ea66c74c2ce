"""Smooth functions: exponentials, logarithms, roots, quotients, powers, trigonometry, and activations made of them.

Each function is a public trigonometric series (`series.py`) on an interval, after a reduction of the argument. The note
in its decorator states domain and error, for 20 fraction bits. Outside its domain a function saturates or ends in a
range error; it never wraps around.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import MAX_SHIFT, PIECE, SERIES_BITS, Normal, Series, Value
from ..ring import HEADROOM_BITS
from ..tensor import SecretTensor, SharedTensor
from ..tensor.table import Context, implements, stepwise
from . import series as series_of
from .common import (
    CAPACITY,
    SLACK_BITS,
    add_values,
    as_factor,
    as_floating,
    check_fits,
    domain_bits,
    dropped_bits_bound,
    encoded_public,
    end_to_end,
    excess_bits,
    exponent_map,
    fit_beside_bounds,
    forbid,
    limit_bits,
    limit_of_difference,
    planes,
    raise_scale,
    refuse,
    require,
    round_scale,
    summand,
    unary_map,
    within_domain,
    write_if_inplace,
)
from .linear import times_number

T = torch.Tensor


def series(context: Context, x: SharedTensor, which: Series, opened: bool = False) -> SharedTensor:
    """A trigonometric series of x, which must lie in the interval of the series, rounded to f fraction bits.

    The last bits before the rounding depend on Q's draws. No caller gets them: a comparison would show them, a product
    or a sum enlarge them.

    Args:
        opened: whether the caller compares x as well; x may be outside of the interval then, where it is periodic.
    """
    shift = min(MAX_SHIFT, SERIES_BITS - context.frac_bits)
    shares = context.backend.rounded_series(x.shares, x.scale_bits, which, shift, opened=opened)
    return as_factor(context, x.like(shares, SERIES_BITS - shift), 0)


def series_times(context: Context, x: SharedTensor, which: Series, factor: Value) -> Value:
    """`series` times a factor, mod 2^64: few elements are rounded and multiplied in one round."""
    backend, shift = context.backend, SERIES_BITS - context.frac_bits
    if shift <= MAX_SHIFT:
        return backend.rounded_series(x.shares, x.scale_bits, which, shift, factor)
    shares = backend.rounded_series(x.shares, x.scale_bits, which, MAX_SHIFT)
    return backend.truncate_and_multiply(shares, shift - MAX_SHIFT, factor)


def series_and_later(
    context: Context, x: SharedTensor, which: Series, later: Series
) -> tuple[SharedTensor, Callable[[Context], SharedTensor]]:
    """`series`, and a function that computes another one of the same period without opening x again: a slope, say."""

    def run(part: Value) -> tuple[Value, ...]:
        first, parts = context.backend.series_and_later(part, x.scale_bits, which, later)
        return first, *parts

    shares, *parts = _in_pieces(context, x.shares, run)

    def finish(context: Context) -> SharedTensor:
        return as_factor(context, x.like(context.backend.finish_series(parts, later), SERIES_BITS), 0)

    return as_factor(context, x.like(shares, SERIES_BITS), 0), finish


def _in_pieces(context: Context, x: Value, run: Callable[[Value], tuple[Value, ...]]) -> tuple[Value, ...]:
    """The results of an elementwise function, for so many elements at a time."""
    backend, shape = context.backend, x.shape
    if shape.numel() <= PIECE:
        return run(x)
    flat = backend.each(torch.flatten, x)
    parts = zip(*(run(flat[k : k + PIECE]) for k in range(0, shape.numel(), PIECE)), strict=True)
    return tuple(backend.each(torch.reshape, backend.each(end_to_end, *part), shape) for part in parts)


def multiple_of(which: Series, factor: float) -> Series:
    """A series times a public number."""
    cos, sin = (tuple(factor * c for c in part) for part in (which.cos, which.sin))
    return replace(which, error=factor * which.error, constant=factor * which.constant, cos=cos, sin=sin)


def clamp_with_excess(
    context: Context, x: SharedTensor, low: float, high: float, checked: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    """x clamped to [low, high], and ReLU(x - high), both at f fraction bits, from one opening.

    Args:
        checked: whether the second result is used, so that x must be below the activation limit.
    """
    shift = excess_bits(context, x.scale_bits)
    scale = x.scale_bits - shift
    bounds = tuple(int(encoded_public(context, bound, scale)) for bound in (low, high))
    limit = limit_bits(context, x, scale) if checked else None
    limit = None if limit is None else limit_of_difference(limit, bounds[0])
    above_low, above_high = context.backend.ramps(x.shares, bounds, shift, limit_bits=limit)
    inside = above_low - above_high
    bound = dropped_bits_bound(context, x, shift) if limit is None else 2.0**limit
    return add_constant(context, x.like(inside, scale), low), x.like(above_high, scale, bound)


def add_constant(context: Context, x: SharedTensor, constant: float) -> SharedTensor:
    """x plus a public number."""
    return x.like(x.shares + round(constant * 2**x.scale_bits), x.scale_bits)


def saturated_series(context: Context, x: SharedTensor, which: Series, right_slope: float = 0.0) -> SharedTensor:
    """The series on its interval; constant to the left of it, and with a slope to the right.

    The series is periodic. It is computed of every x, and taken where x is in the interval, so that it waits for no
    comparison.
    """
    x, backend = fit_beside_bounds(context, x, which.low, which.high), context.backend
    low, high = (int(encoded_public(context, bound, x.scale_bits)) for bound in (which.low, which.high))
    y = series(context, x, which, opened=True)
    left, right = (round(which(bound) * 2**y.scale_bits) for bound in (which.low, which.high))
    inside, above = backend.where_between(x.shares, low, high, y.shares - left, planes(x, more=max(-low, high)))
    y = y.like(inside + above * (right - left) + left, y.scale_bits)
    if not right_slope:
        return y
    beyond = _excess(context, x, which.high)
    return with_excess(context, y, beyond, right_slope)


def _excess(context: Context, x: SharedTensor, high: float) -> SharedTensor:
    """ReLU(x - high) at f fraction bits; x must be below the activation limit."""
    shift = excess_bits(context, x.scale_bits)
    scale = x.scale_bits - shift
    limit = limit_bits(context, x, scale)
    (above,) = context.backend.ramps(x.shares, (int(encoded_public(context, high, scale)),), shift, limit_bits=limit)
    return x.like(above, scale, dropped_bits_bound(context, x, shift) if limit is None else 2.0**limit)


def with_excess(context: Context, y: SharedTensor, beyond: SharedTensor, right_slope: float) -> SharedTensor:
    """A series that exceeds its argument by two at most, and a slope times what is beyond its interval."""
    return _no_larger(add_values(context, y, times_number(context, beyond, right_slope)), beyond)


def _no_larger(y: SharedTensor, beyond: SharedTensor) -> SharedTensor:
    """y with the bound of a function that exceeds its argument, of which `beyond` is the large part, by two at most."""
    if beyond.bound is None:
        return y
    return y.bounded(beyond.bound * 2.0 ** (y.scale_bits - beyond.scale_bits) + 2.0 ** (y.scale_bits + 1))


EXP_LOW = -14


def result_bits(context: Context) -> int:
    """k: results of growing functions are held below 2^k, the activation limit or 2^16, whichever is more."""
    return max(16, domain_bits(context))


@implements("exp", torch.exp, T.exp, in_place=(T.exp_, torch.exp_),
            note="e^x < 2^16; 0 below -14; error 6e-6 e^x + 2e-6", exact=False)  # fmt: skip
def exp(context: Context, x: SharedTensor) -> SharedTensor:
    """x = n + u, with n from one comparison with all whole numbers; e^u is a series, e^n a public map."""
    return exponential(context, x, result_bits(context) * math.log(2))


def exponential(context: Context, x: SharedTensor, high: float) -> SharedTensor:
    """e^x for x < high; 0 below -14, and for stand-ins for -infinity; from `high` on a range error."""
    low = EXP_LOW
    steps = range(low, math.ceil(high) + 1)
    x = as_factor(context, x, most=8 * context.scheme.activation_limit)
    thresholds = (*(k << x.scale_bits for k in steps[:-1]), round(high * 2**x.scale_bits))
    codes = context.backend.at_least(x.shares, thresholds)
    forbid(context, codes[-1])
    whole = unary_map(context, codes, 0, [low + 1 << x.scale_bits] + [1 << x.scale_bits] * (len(steps) - 1))
    part = x.like(x.shares - whole, x.scale_bits)  # in [-1, 0)
    f = fitting_bits(context, math.exp(high))
    powers = [round(math.exp(n + 1) * 2**f) for n in steps[:-1]]
    factor = unary_map(context, codes, 0, [b - a for a, b in zip([0, *powers], [*powers, 0], strict=True)])
    y = series(context, part, series_of.EXP)
    most = 1.01 * math.exp(math.ceil(high)) * 2.0 ** (y.scale_bits + f)
    return y.like(context.backend.multiply(torch.mul, y.shares, factor), y.scale_bits + f, most)


def fitting_bits(context: Context, largest: float) -> int:
    """Fraction bits, f at most, of a public factor below `largest` beside a number below two with f fraction bits."""
    return min(context.frac_bits, HEADROOM_BITS - 2 - context.frac_bits - math.ceil(math.log2(max(1.0, largest))))


@implements("sigmoid", torch.sigmoid, T.sigmoid, F.sigmoid, torch.special.expit, in_place=(T.sigmoid_, torch.sigmoid_),
       note="everywhere; error 4e-6", exact=False, at_most=4.0)  # fmt: skip
def sigmoid(context: Context, x: SharedTensor) -> SharedTensor:
    return saturated_series(context, x, series_of.SIGMOID)


@implements("tanh", torch.tanh, T.tanh, F.tanh, in_place=(T.tanh_, torch.tanh_),
            note="everywhere; error 8e-6", exact=False, at_most=4.0)  # fmt: skip
def tanh(context: Context, x: SharedTensor) -> SharedTensor:
    y = saturated_series(context, x.like(x.shares, x.scale_bits - 1), series_of.SIGMOID)
    return add_constant(context, y.like(y.shares, y.scale_bits - 1), -1.0)


@implements("erf", torch.erf, T.erf, torch.special.erf, in_place=(T.erf_, torch.erf_),
            note="everywhere; error 4e-6", exact=False, at_most=4.0)  # fmt: skip
def erf(context: Context, x: SharedTensor) -> SharedTensor:
    return saturated_series(context, x, series_of.ERF)


@implements("erfc", torch.erfc, T.erfc, torch.special.erfc, note="everywhere; error 4e-6", exact=False, at_most=4.0)
def erfc(context: Context, x: SharedTensor) -> torch.Tensor:
    return 1 - torch.erf(x)


@implements("gelu", F.gelu, note="everywhere; error 4e-6", exact=False, excess=2.0)
def gelu(context: Context, x: SharedTensor, approximate: str = "none") -> SharedTensor:
    which = series_of.GELU if approximate == "none" else series_of.GELU_TANH
    return saturated_series(context, x, which, 1.0)


@implements("softplus", F.softplus, note="everywhere; error 5e-6 / beta", exact=False, excess=2.0)
def softplus(context: Context, x: SharedTensor, beta: float = 1.0, threshold: float = 20.0) -> SharedTensor:
    if threshold < series_of.SOFTPLUS.high:
        refuse(f"softplus with threshold={threshold}", f"use {series_of.SOFTPLUS.high} or more")
    if beta == 0:
        refuse("softplus with beta=0", "name another")
    y = saturated_series(context, x if beta == 1 else x * beta, series_of.SOFTPLUS, 1.0)
    return y if beta == 1 else times_number(context, y, 1.0 / beta)


@implements("logsigmoid", F.logsigmoid, note="everywhere; error 5e-6", exact=False, excess=2.0)
def logsigmoid(context: Context, x: SharedTensor) -> torch.Tensor:
    return -F.softplus(-x)


def times_gate(context: Context, x: SharedTensor, gate: Series) -> tuple[SharedTensor, SharedTensor]:
    """x gate(x) and gate(x), for a gate that tends to 0 on the left and to 1 on the right: beyond the series a
    constant, and x."""
    inside, beyond = clamp_with_excess(context, x, gate.low, gate.high, True)
    value = series(context, inside, gate)
    return _no_larger(inside * value + beyond, beyond), value


@implements("silu", F.silu, note="everywhere; error 3e-5", exact=False, excess=0.0)
def silu(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, times_gate(context, x, series_of.SIGMOID)[0], inplace)


@implements("mish", F.mish, note="everywhere; error 3e-5", exact=False, excess=2.0)
def mish(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, times_gate(context, x, series_of.TANH_SOFTPLUS)[0], inplace)


def _exp_below_zero(context: Context, x: SharedTensor) -> tuple[SharedTensor, SharedTensor]:
    """exp(min(x, 0)) and ReLU(x)."""
    inside, beyond = clamp_with_excess(context, x, series_of.EXP.low, 0.0, True)
    return series(context, inside, series_of.EXP), beyond


@implements("elu", F.elu, in_place=(F.elu_,), note="everywhere; error 4e-6 alpha", exact=False)
def elu(context: Context, x: SharedTensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    below, positive = _exp_below_zero(context, x)
    return write_if_inplace(x, (below - 1) * alpha + positive, inplace)


@implements("celu", F.celu, torch.celu, note="everywhere; error 4e-6 alpha", exact=False)
def celu(context: Context, x: SharedTensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    if alpha <= 0:
        refuse(f"celu with alpha={alpha}", "use a positive one")
    positive = torch.relu(x)
    below = ((x - positive).clamp_min(series_of.EXP.low * alpha) / alpha).exp()
    return write_if_inplace(x, positive + (below - 1) * alpha, inplace)


SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


@implements("selu", F.selu, torch.selu, note="everywhere; error 8e-6", exact=False)
def selu(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, F.elu(x, SELU_ALPHA) * SELU_SCALE, inplace)


@implements("hardsigmoid", F.hardsigmoid, note="everywhere", at_most=4.0)
def hardsigmoid(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, torch.clamp(x + 3, 0, 6) / 6, inplace)


@implements("hardswish", F.hardswish, note="everywhere", excess=0.0)
def hardswish(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, x * (torch.clamp(x + 3, 0, 6) / 6), inplace)


@implements("tanhshrink", F.tanhshrink, note="everywhere; error 8e-6", exact=False, excess=0.0)
def tanhshrink(context: Context, x: SharedTensor) -> SharedTensor:
    return x - torch.tanh(x)


@implements("softshrink", F.softshrink, torch.nn.functional.softshrink, note="exact", excess=0.0)
def softshrink(context: Context, x: SharedTensor, lambd: float = 0.5) -> SharedTensor:
    return x - x.clamp(-lambd, lambd)


@implements("hardshrink", F.hardshrink, T.hardshrink, torch.hardshrink, note="exact", excess=0.0)
def hardshrink(context: Context, x: SharedTensor, lambd: float = 0.5) -> SharedTensor:
    return x * ((x > lambd) | (x < -lambd))


@implements("threshold", F.threshold, torch.threshold, note="exact")
def threshold(context: Context, x: SharedTensor, threshold: float, value: float, inplace: bool = False) -> torch.Tensor:
    return write_if_inplace(x, value + (x - value) * (x > threshold), inplace)


@implements("glu", F.glu, note="error 4e-6 |x|", exact=False)
def glu(context: Context, x: SharedTensor, dim: int = -1) -> torch.Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


@implements("expm1", torch.expm1, T.expm1, torch.special.expm1, note="as exp", exact=False)
def expm1(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.exp(x) - 1


@implements("exp2", torch.exp2, T.exp2, torch.special.exp2, note="2^x < 2^16; as exp of x ln 2", exact=False)
def exp2(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.exp(x * math.log(2))


def _half_exp(context: Context, x: SharedTensor) -> SharedTensor:
    """e^x / 2, for results below 2^`result_bits`."""
    y = exponential(context, x, (result_bits(context) + 1) * math.log(2))
    return y.like(y.shares, y.scale_bits + 1)


@implements("sinh", torch.sinh, T.sinh, note="result < 2^16; error as exp", exact=False)
def sinh(context: Context, x: SharedTensor) -> SharedTensor:
    return _half_exp(context, x) - _half_exp(context, -x)


@implements("cosh", torch.cosh, T.cosh, note="result < 2^16; error as exp", exact=False)
def cosh(context: Context, x: SharedTensor) -> SharedTensor:
    return _half_exp(context, x) + _half_exp(context, -x)


# Logarithms, roots, reciprocals and quotients: x = m 2^e; a series of m, and a public map of e.
#
# An argument keeps all its fraction bits, so that the root of a mean of squares with 40 bits is right down to 2^-20.


SPARE_BITS = 4
"""Arguments may be 2^4 times the largest activation."""


def exponent(context: Context, x: SharedTensor, low: int, high: int) -> Normal:
    """Mantissa and exponent of x for 2^low <= x < 2^high (exponents of the value); above, a range error."""
    s = x.scale_bits
    high = min(HEADROOM_BITS, s + high)
    normal = context.backend.normalise(x.shares, max(0, s + low), high)
    forbid(context, normal.bits[-1])
    return normal


def high_bits(context: Context) -> int:
    return result_bits(context) + SPARE_BITS


def forbid_below(context: Context, normal: Normal) -> None:
    """A range error for values below the range of exponents, zero and negative numbers included."""
    forbid(context, -normal.bits[0] + 1)


def _times_power(context: Context, normal: Normal, mantissa: Series, power: Callable, bits: int) -> SharedTensor:
    """mantissa(m) power(e), with so many fraction bits of power(e); 0 below the range."""
    m = context.tensor(normal.mantissa, normal.high)
    g = exponent_map(context, normal, lambda e: round(power(e) * 2**bits), 0)
    return m.like(series_times(context, m, mantissa, g), context.frac_bits + bits)


def logarithm(context: Context, x: SharedTensor, zero: float | None = None) -> SharedTensor:
    """log x. A value below the last place of x ends in a range error, or gives `zero`."""
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
        whole = whole + _constant_correction(context, x, lambda v: math.log(v) * unit)
    return m.like(m.shares + whole, m.scale_bits, logarithm_bound(m.scale_bits, zero or 0.0))


def _constant_correction(context: Context, x: SharedTensor, function: Callable[[float], float]) -> Value:
    """The correction of a function's result where x stands for a constant (`SharedTensor.constant`); 0 elsewhere."""
    element, constant = x.constant or (0, 0.0)
    bits = context.backend.at_least(x.shares, (element, element + 1))
    return (bits[0] - bits[1]) * round(function(constant) - function(element * 2.0**-x.scale_bits))


def logarithm_bound(scale_bits: int, zero: float = 0.0) -> float:
    """The bound of a logarithm of any number of the ring."""
    return (HEADROOM_BITS + abs(zero)) * 2.0**scale_bits


@implements("log", torch.log, T.log, in_place=(T.log_, torch.log_),
            note="0 < x < 2^20; error 4e-6 + 1e-6 / x", exact=False)  # fmt: skip
def log(context: Context, x: SharedTensor) -> SharedTensor:
    return logarithm(context, x)


@implements("log2", torch.log2, T.log2, note="as log", exact=False)
def log2(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(x) * (1 / math.log(2))


@implements("log10", torch.log10, T.log10, note="as log", exact=False)
def log10(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(x) * (1 / math.log(10))


@implements("log1p", torch.log1p, T.log1p, torch.special.log1p, note="as log of 1 + x", exact=False)
def log1p(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.log(1 + x)


@implements("sqrt", torch.sqrt, T.sqrt, in_place=(T.sqrt_,),
            note="0 <= x < 2^20; error 2e-6 + 1e-6 / y + 4e-6 y", exact=False)  # fmt: skip
def sqrt(context: Context, x: SharedTensor) -> SharedTensor:
    sign = context.backend.at_least(x.shares, high=planes(x))
    forbid(context, -sign + 1)
    s, high = x.scale_bits, high_bits(context)
    normal = exponent(context, x, -s, high)
    bits = fitting_bits(context, 2.0 ** (high / 2))
    return _times_power(context, normal, series_of.SQRT, lambda e: 2.0 ** ((e - s) / 2), bits)


@implements("rsqrt", torch.rsqrt, T.rsqrt, in_place=(T.rsqrt_,),
       note="0 < x < 2^20, y < 2^16; error 2e-6 + 1e-6 y + 1e-6 y^3", exact=False)  # fmt: skip
def rsqrt(context: Context, x: SharedTensor) -> SharedTensor:
    s, limit = x.scale_bits, result_bits(context)
    normal = exponent(context, x, -min(s, 2 * limit), high_bits(context))
    forbid_below(context, normal)
    bits = _factor_bits(context, (s - normal.low) / 2)
    y = _times_power(context, normal, series_of.RSQRT, lambda e: 2.0 ** ((s - e) / 2), bits)
    y = round_scale(context, y, context.frac_bits + SLACK_BITS)
    if x.constant and x.constant[0] >= 1 << normal.low:
        added = _constant_correction(context, x, lambda v: v**-0.5 * 2.0**y.scale_bits)
        y = y.like(y.shares + added, y.scale_bits, y.bound)
    return y


def _factor_bits(context: Context, largest: float) -> int:
    """Fraction bits of a power of two below 2^largest beside a number below two with f fraction bits."""
    return min(context.frac_bits + 12, math.floor(HEADROOM_BITS - 2 - context.frac_bits - largest))


def positive_reciprocal(context: Context, x: SharedTensor, low: int, high: int, numerator: float = 1.0) -> SharedTensor:
    """numerator / x for 2^low <= x < 2^high, to f + 6 fraction bits."""
    s = x.scale_bits
    normal = exponent(context, x, low, high)
    forbid_below(context, normal)
    bits = _factor_bits(context, math.frexp(numerator)[1] - 1 - low)
    y = _times_power(context, normal, series_of.RECIPROCAL, lambda e: numerator * 2.0 ** (s - e), bits)
    return round_scale(context, y, context.frac_bits + SLACK_BITS)


def reciprocal_of_sum(context: Context, x: SharedTensor, high: int) -> SharedTensor:
    """1 / x for an x that is known to lie in 1/2 .. 2^high: to f + high fraction bits, or f + 6 where high is large.

    The power of two is a whole number at f + high bits, so that the product with it is not rounded. The result is for
    a factor below 1.01 of f + 2 bits: their product has no more bits than one truncation to f drops.
    """
    if context.frac_bits + high + 2 > MAX_SHIFT:
        return positive_reciprocal(context, x, -1, high)
    s = x.scale_bits
    normal = context.backend.normalise(x.shares, s - 1, s + high, planes=s + high)
    return _times_power(context, normal, series_of.RECIPROCAL, lambda e: 2.0 ** (s - e), high)


def _times_sign(context: Context, x: SharedTensor, sign: Value | None) -> SharedTensor:
    return x if sign is None else x.like(context.backend.multiply(torch.mul, x.shares, sign), x.scale_bits, x.bound)


def _sign(context: Context, x: SharedTensor) -> Value:
    """1 where x >= 0, and -1."""
    return context.backend.at_least(x.shares, high=planes(x))[0] * 2 - 1


@implements("reciprocal", torch.reciprocal, T.reciprocal, in_place=(T.reciprocal_,),
       note="2^-16 <= |x| < 2^20; error 2e-6 (1 + |y|) + 1e-6 y^2", exact=False)  # fmt: skip
def reciprocal(context: Context, x: SharedTensor) -> SharedTensor:
    sign = _sign(context, x)
    y = positive_reciprocal(context, _times_sign(context, x, sign), -result_bits(context), high_bits(context))
    return _times_sign(context, y, sign)


def small_over(context: Context, numerator: float, x: SharedTensor) -> SharedTensor:
    """numerator / x for a small public numerator, of which f fraction bits keep few digits."""
    sign = _sign(context, x)
    size = abs(numerator)
    low = math.frexp(size)[1] - quotient_bits(context)
    y = positive_reciprocal(context, _times_sign(context, x, sign), low, high_bits(context), size)
    y = _times_sign(context, y, sign)
    return y if numerator > 0 else y.like(-y.shares, y.scale_bits, y.bound)


def quotient_bits(context: Context) -> int:
    """k: quotients are held below 2^k: `domain_bits`, or less, since divisors up to the activation limit need room."""
    room = HEADROOM_BITS - 2 - context.frac_bits
    return min(domain_bits(context), max(room - context.scheme.activation_bits - 1, room // 2))


def quotient(context: Context, x: SharedTensor, y: SharedTensor, positive: bool = False) -> SharedTensor:
    """x / y for results below 2^`quotient_bits`: with y = m 2^e, the product of x 2^-e and 1 / m.

    So the result has its significant bits, however small or large both operands are. A larger quotient ends in a range
    error, and so does 0 / 0.

    Args:
        positive: whether the caller knows that y > 0 and that |x / y| is below the limit.
    """
    f, limit = context.frac_bits, quotient_bits(context)
    if x.scale_bits < f:
        x = raise_scale(context, check_fits(context, x, CAPACITY / 2.0 ** (f - x.scale_bits)), f)
    x = round_scale(context, x, f)
    if not positive:
        sign = _sign(context, y)
        x, y = _times_sign(context, x, sign), _times_sign(context, y, sign)
        _require_quotient(context, x, y, limit)
    high = min(high_bits(context), HEADROOM_BITS - 2 - f - limit)
    y = round_scale(context, y, HEADROOM_BITS - high)  # below, powers of two up to 2^(high + s) are ring elements
    s = y.scale_bits
    normal = exponent(context, y, -s, high)
    forbid_below(context, normal)
    power = exponent_map(context, normal, lambda e: 1 << high + s - e, 0)
    coarse = x.like(context.backend.multiply(torch.mul, x.shares, power), f + high)
    inverse = series(context, x.like(normal.mantissa, normal.high), series_of.RECIPROCAL)
    coarse = round_scale(context, coarse, f + SLACK_BITS - 1)
    return coarse.like(
        context.backend.multiply(torch.mul, coarse.shares, inverse.shares), coarse.scale_bits + inverse.scale_bits
    )


@implements("softsign", F.softsign, note="everywhere; error 1e-5", exact=False, at_most=4.0)
def softsign(context: Context, x: SharedTensor) -> SharedTensor:
    return quotient(context, x, 1 + x.abs(), positive=True)


def _require_quotient(context: Context, x: SharedTensor, y: SharedTensor, limit: int) -> None:
    """-2^limit y < x < 2^limit y, for y >= 0."""
    most = y.like(y.shares, y.scale_bits - limit)
    scale = max(most.scale_bits, x.scale_bits)
    x = check_fits(context, x, CAPACITY / 2.0 ** (scale - x.scale_bits))
    most, x = raise_scale(context, most, scale), raise_scale(context, x, scale)
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
    return _times_sign(context, as_factor(context, power.exp()), positive[1])


# Functions made of exponentials, logarithms and roots.


@implements("logit", torch.logit, T.logit, torch.special.logit, in_place=(T.logit_, torch.logit_),
            note="0 < x < 1; error 1e-5 + 1e-6 / x (1 - x)", exact=False)  # fmt: skip
def logit(context: Context, x: SharedTensor, eps: float | None = None) -> torch.Tensor:
    if eps is not None:
        if not 0 <= eps <= 0.5:
            refuse(f"logit with eps={eps}", "the bounds eps and 1 - eps would cross")
        x = x.clamp(eps, 1 - eps)
    return torch.log(x) - torch.log(1 - x)


@implements("logaddexp", torch.logaddexp, T.logaddexp, note="everywhere; error 5e-6", exact=False)
def logaddexp(context: Context, x: Any, y: Any) -> torch.Tensor:
    return torch.maximum(x, y) + F.softplus(-(x - y).abs())


@implements("logaddexp2", torch.logaddexp2, T.logaddexp2, note="everywhere; error 8e-6", exact=False)
def logaddexp2(context: Context, x: Any, y: Any) -> torch.Tensor:
    return torch.maximum(x, y) + F.softplus((x - y).abs() * -math.log(2)) * (1 / math.log(2))


@implements("logcumsumexp", torch.logcumsumexp, T.logcumsumexp, note="error 5e-6 log2 n", exact=False)
def logcumsumexp(context: Context, x: SharedTensor, dim: int) -> torch.Tensor:
    if not x.dim():
        return x
    line, step = x.movedim(dim, 0), 1
    while step < line.shape[0]:
        line = torch.cat((line[:step], torch.logaddexp(line[step:], line[:-step])))
        step *= 2
    return line.movedim(0, dim)


@implements("hypot", torch.hypot, T.hypot, in_place=(T.hypot_,), note="as norm", exact=False)
def hypot(context: Context, x: Any, y: Any) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return torch.linalg.vector_norm(torch.stack((x.expand(shape), y.expand(shape))), 2, 0)


def _log_where(x: Any, y: torch.Tensor) -> torch.Tensor:
    """log y, and 0 where x is zero, whatever y is there."""
    return torch.log(torch.where(torch.as_tensor(x == 0), 1.0, y))


@implements("xlog1py", torch.special.xlog1py, note="as log1p, times x; 0 where x is 0", exact=False)
def xlog1py(context: Context, x: Any, y: Any) -> torch.Tensor:
    y = y if isinstance(y, torch.Tensor) else torch.tensor(float(y))
    if isinstance(y, SecretTensor):
        return x * _log_where(x, y + 1)
    logs = torch.log1p(y)
    finite = logs.isfinite()
    result = x * logs.where(finite, 0)
    return result if finite.all() else result + x * _log_where(x, (y + 1).where(~finite, 1))


@implements("xlogy", torch.xlogy, T.xlogy, torch.special.xlogy, in_place=(T.xlogy_,),
            note="as log, times x; 0 where x is 0", exact=False)  # fmt: skip
def xlogy(context: Context, x: Any, y: Any) -> torch.Tensor:
    if isinstance(y, SecretTensor):
        return x * _log_where(x, y)
    logs = torch.log(y if isinstance(y, torch.Tensor) else torch.tensor(float(y)))
    finite = logs.isfinite()
    result = x * logs.where(finite, 0)
    return result if finite.all() else result + x * _log_where(x, torch.as_tensor(y).where(~finite, 1))


@implements("ndtr", torch.special.ndtr, note="everywhere; error 4e-6", exact=False)
def ndtr(context: Context, x: SharedTensor) -> torch.Tensor:
    return (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5


@implements("log_ndtr", torch.special.log_ndtr, note="error 1e-5; y > -2^12, else a range error", exact=False)
@stepwise
def log_ndtr(context: Context, x: SharedTensor) -> torch.Tensor:
    """Two parts, each constant on the other's side of zero, where log_ndtr is -log 2.

    Above zero a series. Below, with s = ReLU(-x), it is -s^2 / 2 - log(1 + s) and a series of 1 / (1 + s), which is
    smooth from s = 0 to infinity.
    """
    s: Any = torch.relu(-x)
    inverse: Any = torch.reciprocal(1 + s)
    above: Any = saturated_series(context, summand(context, x), series_of.LOG_NDTR_ABOVE)
    rest = series(context, inverse, series_of.LOG_NDTR_BELOW)
    return above + rest - torch.log(1 + s) - s.square() * 0.5 + math.log(2)


@implements("i0e", torch.special.i0e, note="everywhere; error 8e-6", exact=False, at_most=2.0)
def i0e(context: Context, x: SharedTensor) -> SharedTensor:
    """A series of 1 / sqrt(1 + |x|), of which i0e is smooth from x = 0, where it has slope 2, to infinity."""
    root: Any = torch.rsqrt(1 + x.abs())
    return series(context, root, series_of.I0E_OF_ROOT)


@implements("ldexp", torch.ldexp, T.ldexp, in_place=(T.ldexp_,), note="public whole exponents; local")
def ldexp(context: Context, x: SharedTensor, other: torch.Tensor) -> torch.Tensor:
    return x * torch.exp2(other.to(torch.float32))


# Trigonometric functions and their inverses.


COSINE = Series(-0.5, 0.5, 0, 0.0, 0.0, (1.0,), (0.0,))
"""cos(2 pi x) for any x: the period is exact."""

SINE = Series(-0.5, 0.5, 0, 0.0, 0.0, (0.0,), (1.0,))
"""sin(2 pi x)."""

LARGE = 2.0**9
"""From here on sqrt(x^2 + 1) is x, up to 2^-19 of it, and no square is computed."""


@implements("cos", torch.cos, T.cos, in_place=(T.cos_,), note="everywhere; error 4e-6", exact=False, at_most=4.0)
def cos(context: Context, x: SharedTensor) -> SharedTensor:
    return series(context, _in_turns(context, x), COSINE)


@implements("sin", torch.sin, T.sin, in_place=(T.sin_,), note="everywhere; error 4e-6", exact=False, at_most=4.0)
def sin(context: Context, x: SharedTensor) -> SharedTensor:
    return series(context, _in_turns(context, x), SINE)


def _in_turns(context: Context, x: SharedTensor) -> SharedTensor:
    """x / (2 pi) modulo 1, with all fraction bits of the ring: the error of the constant grows with x."""
    x = within_domain(context, as_factor(context, x, 0))
    bits = HEADROOM_BITS - x.scale_bits
    factor = round(2**bits / (2 * math.pi))
    return x.like(x.shares * factor, HEADROOM_BITS)


@implements("tan", torch.tan, T.tan, in_place=(T.tan_,),
            note="error 1e-5 (1 + y^2); |y| < 2^12, else a range error", exact=False)  # fmt: skip
@stepwise
def tan(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.sin(x) / torch.cos(x)


SINC = tuple((-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(1, 5))
"""sin(pi x) / (pi x) - 1 in powers of x^2: the next is below 2^-21 where |x| <= 1/4."""


@implements("sinc", torch.sinc, T.sinc, torch.special.sinc, in_place=(T.sinc_,),
            note="everywhere; error 1e-5", exact=False)  # fmt: skip
@stepwise
def sinc(context: Context, x: SharedTensor) -> torch.Tensor:
    """A polynomial near zero, and the quotient elsewhere; the period of sin(pi x) is exact for any x."""
    x = within_domain(context, as_factor(context, as_floating(x), 0))
    half = x.like(x.shares * 2 ** (HEADROOM_BITS - 1 - x.scale_bits), HEADROOM_BITS)
    size, wave = x.abs(), series(context, half, SINE)
    sign = (x >= 0) * 2 - 1
    far = quotient(context, as_factor(context, wave * sign, 0), summand(context, size.clamp_min(0.25) * math.pi))
    square = size.clamp_max(0.25).square()
    near = square * SINC[3]
    for factor in (*SINC[2::-1],):
        near = (near + factor) * square
    return torch.where(size >= 0.25, far, near + 1)


@implements("atan", torch.atan, torch.arctan, T.atan, T.arctan, in_place=(T.atan_, T.arctan_, torch.atan_),
       note="everywhere; error 8e-6", exact=False, at_most=4.0)  # fmt: skip
def atan(context: Context, x: SharedTensor) -> torch.Tensor:
    """atan |x| = A(min(|x|, 1)) - A(1 / max(|x|, 1)) + pi / 4, A on [0, 1] a series; then the sign."""
    sign = (x >= 0) * 2 - 1
    size = x * sign
    near = size.clamp_max(1.0)
    over = size - near + 1
    inverse = as_factor(context, positive_reciprocal(context, over, 0, domain_bits(context) + 1), 0)
    both = torch.stack((near.expand(inverse.shape), inverse))
    low, high = series(context, as_factor(context, summand(context, both), 0), series_of.ATAN).unbind(0)
    return (low - high + math.pi / 4) * sign


@implements("atan2", torch.atan2, torch.arctan2, T.atan2, T.arctan2, in_place=(T.atan2_, T.arctan2_),
            note="everywhere; error 1e-5 + 1e-6 / |(x, y)|", exact=False, at_most=4.0)  # fmt: skip
def atan2(context: Context, y: Any, x: Any) -> torch.Tensor:
    """The angle of the smaller over the larger operand, moved to its octant."""
    y, x = (as_floating(summand(context, v)) for v in (y, x))
    shape = torch.broadcast_shapes(y.shape, x.shape)
    y, x = y.expand(shape), x.expand(shape)
    left, down = x < 0, y < 0
    across, up = x.abs(), y.abs()
    steep = up > across
    large, small = torch.maximum(across, up), torch.minimum(across, up)
    least = 2.0**-context.frac_bits
    ratio = quotient(context, summand(context, small), summand(context, large.clamp_min(least)), positive=True)
    angle = series(context, as_factor(context, ratio, 0), series_of.ATAN)
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(left, math.pi - angle, angle)
    return torch.where(down, -angle, angle)


@implements("asin", torch.asin, torch.arcsin, T.asin, T.arcsin, in_place=(T.asin_, T.arcsin_, torch.asin_),
       note="|x| <= 1; error 2e-5", exact=False, at_most=4.0)  # fmt: skip
def asin(context: Context, x: SharedTensor) -> torch.Tensor:
    last = 2.0**-context.frac_bits
    require(context, x, -1.0, 1.0 + last)
    return torch.atan2(x, torch.sqrt((1 - x) * (1 + x)))


@implements("acos", torch.acos, torch.arccos, T.acos, T.arccos, in_place=(T.acos_, T.arccos_, torch.acos_),
       note="|x| <= 1; error 2e-5", exact=False, at_most=4.0)  # fmt: skip
def acos(context: Context, x: SharedTensor) -> torch.Tensor:
    return math.pi / 2 - torch.asin(x)


@implements("asinh", torch.asinh, torch.arcsinh, T.asinh, T.arcsinh, in_place=(T.asinh_, T.arcsinh_, torch.asinh_),
       note="everywhere; error 1e-5", exact=False)  # fmt: skip
def asinh(context: Context, x: SharedTensor) -> torch.Tensor:
    sign = (x >= 0) * 2 - 1
    size = x * sign
    near = size.clamp_max(LARGE)
    return torch.log(size + (torch.sqrt(near.square() + 1) + (size - near))) * sign


@implements("acosh", torch.acosh, torch.arccosh, T.acosh, T.arccosh, in_place=(T.acosh_, T.arccosh_, torch.acosh_),
       note="x >= 1; error 1e-5 + 1e-6 / y", exact=False)  # fmt: skip
def acosh(context: Context, x: SharedTensor) -> torch.Tensor:
    near = x.clamp_max(LARGE)
    return torch.log(x + (torch.sqrt((near - 1) * (near + 1)) + (x - near)))


@implements("atanh", torch.atanh, torch.arctanh, T.atanh, T.arctanh, in_place=(T.atanh_, T.arctanh_, torch.atanh_),
       note="|x| < 1; error 4e-6 + 1e-6 / (1 - |x|)", exact=False)  # fmt: skip
def atanh(context: Context, x: SharedTensor) -> torch.Tensor:
    return (torch.log(1 + x) - torch.log(1 - x)) * 0.5
