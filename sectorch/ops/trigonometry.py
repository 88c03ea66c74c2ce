"""Sine, cosine, and the inverse functions of both kinds."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..backend import Series
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements, stepwise
from . import series as series_of
from .common import real, require, settled, summand
from .powers import positive_reciprocal, quotient
from .ranges import domain_bits, within_domain
from .smooth import series

T = torch.Tensor
TURN = Series(-0.5, 0.5, 0, 0.0, 0.0, (1.0,), (0.0,))
"""cos(2 pi x), of any x: the period is exact."""

QUARTER = Series(-0.5, 0.5, 0, 0.0, 0.0, (0.0,), (1.0,))
"""sin(2 pi x)."""

FAR = 2.0**9
"""From here on sqrt(x^2 + 1) is x, to 2^-19 of it: squares beyond are not taken."""


@implements("cos", torch.cos, T.cos, in_place=(T.cos_,), note="everywhere; error 4e-6")
def cos(context: Context, x: SharedTensor) -> SharedTensor:
    return series(context, _turns(context, x), TURN)


@implements("sin", torch.sin, T.sin, in_place=(T.sin_,), note="everywhere; error 4e-6")
def sin(context: Context, x: SharedTensor) -> SharedTensor:
    return series(context, _turns(context, x), QUARTER)


def _turns(context: Context, x: SharedTensor) -> SharedTensor:
    """x / (2 pi) modulo 1, with all fraction bits that there are: the error of the constant grows with x."""
    x = within_domain(context, settled(context, x, 0))
    bits = HEADROOM_BITS - x.scale_bits
    factor = round(2**bits / (2 * math.pi))
    return x.like(x.shares * factor, HEADROOM_BITS)


@implements("tan", torch.tan, T.tan, in_place=(T.tan_,), note="error 1e-5 (1 + y^2); |y| < 2^12, else a range error")
@stepwise
def tan(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.sin(x) / torch.cos(x)


SINC = tuple((-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(1, 5))
"""sin(pi x) / (pi x) - 1 in powers of x^2: the next is below 2^-21 where |x| <= 1/4."""


@implements("sinc", torch.sinc, T.sinc, torch.special.sinc, in_place=(T.sinc_,), note="everywhere; error 1e-5")
@stepwise
def sinc(context: Context, x: SharedTensor) -> torch.Tensor:
    """Near zero a polynomial, elsewhere the quotient; the period of sin(pi x) is exact, whatever x is."""
    x = within_domain(context, settled(context, real(x), 0))
    half = x.like(x.shares * 2 ** (HEADROOM_BITS - 1 - x.scale_bits), HEADROOM_BITS)
    size, wave = x.abs(), series(context, half, QUARTER)
    sign = (x >= 0) * 2 - 1
    far = quotient(context, settled(context, wave * sign, 0), summand(context, size.clamp_min(0.25) * math.pi))
    square = size.clamp_max(0.25).square()
    near = square * SINC[3]
    for factor in (*SINC[2::-1],):
        near = (near + factor) * square
    return torch.where(size >= 0.25, far, near + 1)


@implements("atan", torch.atan, torch.arctan, T.atan, T.arctan, in_place=(T.atan_, T.arctan_, torch.atan_),
       note="everywhere; error 8e-6")  # fmt: skip
def atan(context: Context, x: SharedTensor) -> torch.Tensor:
    """atan |x| = A(min(|x|, 1)) - A(1 / max(|x|, 1)) + pi / 4, A on [0, 1] a series; then the sign."""
    sign = (x >= 0) * 2 - 1
    size = x * sign
    near = size.clamp_max(1.0)
    over = size - near + 1
    inverse = settled(context, positive_reciprocal(context, over, 0, domain_bits(context) + 1), 0)
    both = torch.stack((near.expand(inverse.shape), inverse))
    low, high = series(context, settled(context, summand(context, both), 0), series_of.ATAN).unbind(0)
    return (low - high + math.pi / 4) * sign


@implements("atan2", torch.atan2, torch.arctan2, T.atan2, T.arctan2, in_place=(T.atan2_, T.arctan2_),
            note="everywhere; error 1e-5 + 1e-6 / |(x, y)|")  # fmt: skip
def atan2(context: Context, y: Any, x: Any) -> torch.Tensor:
    """The angle of the smaller of both over the larger, turned into the octant."""
    y, x = (real(summand(context, v)) for v in (y, x))
    shape = torch.broadcast_shapes(y.shape, x.shape)
    y, x = y.expand(shape), x.expand(shape)
    left, down = x < 0, y < 0
    across, up = x.abs(), y.abs()
    steep = up > across
    large, small = torch.maximum(across, up), torch.minimum(across, up)
    least = 2.0**-context.frac_bits
    ratio = quotient(context, summand(context, small), summand(context, large.clamp_min(least)), positive=True)
    angle = series(context, settled(context, ratio, 0), series_of.ATAN)
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(left, math.pi - angle, angle)
    return torch.where(down, -angle, angle)


@implements("asin", torch.asin, torch.arcsin, T.asin, T.arcsin, in_place=(T.asin_, T.arcsin_, torch.asin_),
       note="|x| <= 1; error 2e-5")  # fmt: skip
def asin(context: Context, x: SharedTensor) -> torch.Tensor:
    last = 2.0**-context.frac_bits
    require(context, x, -1.0, 1.0 + last)
    return torch.atan2(x, torch.sqrt((1 - x) * (1 + x)))


@implements("acos", torch.acos, torch.arccos, T.acos, T.arccos, in_place=(T.acos_, T.arccos_, torch.acos_),
       note="|x| <= 1; error 2e-5")  # fmt: skip
def acos(context: Context, x: SharedTensor) -> torch.Tensor:
    return math.pi / 2 - torch.asin(x)


@implements("asinh", torch.asinh, torch.arcsinh, T.asinh, T.arcsinh, in_place=(T.asinh_, T.arcsinh_, torch.asinh_),
       note="everywhere; error 1e-5")  # fmt: skip
def asinh(context: Context, x: SharedTensor) -> torch.Tensor:
    sign = (x >= 0) * 2 - 1
    size = x * sign
    near = size.clamp_max(FAR)
    return torch.log(size + (torch.sqrt(near.square() + 1) + (size - near))) * sign


@implements("acosh", torch.acosh, torch.arccosh, T.acosh, T.arccosh, in_place=(T.acosh_, T.arccosh_, torch.acosh_),
       note="x >= 1; error 1e-5 + 1e-6 / y")  # fmt: skip
def acosh(context: Context, x: SharedTensor) -> torch.Tensor:
    near = x.clamp_max(FAR)
    return torch.log(x + (torch.sqrt((near - 1) * (near + 1)) + (x - near)))


@implements("atanh", torch.atanh, torch.arctanh, T.atanh, T.arctanh, in_place=(T.atanh_, T.arctanh_, torch.atanh_),
       note="|x| < 1; error 4e-6 + 1e-6 / (1 - |x|)")  # fmt: skip
def atanh(context: Context, x: SharedTensor) -> torch.Tensor:
    return (torch.log(1 + x) - torch.log(1 - x)) * 0.5
