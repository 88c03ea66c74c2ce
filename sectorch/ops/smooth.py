"""Exponentials, logarithms, roots, quotients and the activations made of them.

Every function states its domain; outside it saturates as said, and never wraps. Errors are for 20 fraction bits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..backend import SERIES_BITS, Series, Value
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from . import series as series_of
from .bilinear import scaled
from .codes import unary_map
from .common import encoded_public, end_to_end, excess, plus, refuse, settled, summand
from .ranges import above, domain_bits, dropped, forbid, limit_bits

T = torch.Tensor
PIECE = 1 << 14
"""Elements of a series at a time: what their terms take stays in the last-level cache."""


def series(context: Context, x: SharedTensor, which: Series) -> SharedTensor:
    """A trigonometric series of x, which must lie in the interval of the series, rounded to f fraction bits.

    Nobody gets it before it is rounded: its last bits depend on Q's draws, and a comparison would show them, a factor
    or a sum bring them up. In pieces, since each term takes 8 bytes an element eight times over. They do not wait for
    each other: rounds as one.
    """
    backend, shape = context.backend, x.shares.shape

    def run(part: Value) -> Value:
        return backend.series(part, x.scale_bits, which)

    if shape.numel() <= PIECE:
        shares = run(x.shares)
    else:
        flat = backend.each(torch.flatten, x.shares)
        starts = range(0, shape.numel(), PIECE)
        parts = [run(flat[k : k + PIECE]) for k in starts]
        shares = backend.each(torch.reshape, backend.each(end_to_end, *parts), shape)
    return settled(context, x.like(shares, SERIES_BITS), 0)


def clamped(
    context: Context, x: SharedTensor, low: float, high: float, checked: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    """x clamped to [low, high], and ReLU(x - high), both at f fraction bits, from one opening.

    Args:
        checked: whether the second is used, and x must be below the activation limit.
    """
    shift = excess(context, x.scale_bits)
    scale = x.scale_bits - shift
    bounds = tuple(int(encoded_public(context, bound, scale)) for bound in (low, high))
    limit = limit_bits(context, x, scale) if checked else None
    limit = None if limit is None else above(limit, bounds[0])
    above_low, above_high = context.backend.ramps(x.shares, bounds, shift, limit_bits=limit)
    inside = above_low - above_high
    bound = dropped(context, x, shift) if limit is None else 2.0**limit
    return lifted(context, x.like(inside, scale), low), x.like(above_high, scale, bound)


def lifted(context: Context, x: SharedTensor, constant: float) -> SharedTensor:
    """x plus a public number."""
    return x.like(x.shares + round(constant * 2**x.scale_bits), x.scale_bits)


def saturated(context: Context, x: SharedTensor, which: Series, right_slope: float = 0.0) -> SharedTensor:
    """The series on its interval; constant to the left of it, and with a slope to the right."""
    inside, beyond = clamped(context, x, which.low, which.high, right_slope != 0)
    y = series(context, inside, which)
    return _no_larger(plus(context, y, scaled(context, beyond, right_slope)), beyond) if right_slope else y


def _no_larger(y: SharedTensor, beyond: SharedTensor) -> SharedTensor:
    """A function that exceeds its argument by two at most, with the bound of the argument's part that may be large."""
    if beyond.bound is None:
        return y
    return y.bounded(beyond.bound * 2.0 ** (y.scale_bits - beyond.scale_bits) + 2.0 ** (y.scale_bits + 1))


EXP_LOW = -14


def result_bits(context: Context) -> int:
    """Results of functions that grow are held below 2^this: the limit of activations, or 2^16 where that is less."""
    return max(16, domain_bits(context))


@implements(
    "exp", torch.exp, T.exp, in_place=(T.exp_, torch.exp_), note="e^x < 2^16; 0 below -14; error 6e-6 e^x + 2e-6"
)
def exp(context: Context, x: SharedTensor) -> SharedTensor:
    """x = n + u with whole n from comparisons with all whole numbers at once; e^u is a series, e^n a public map."""
    return exponential(context, x, result_bits(context) * math.log(2))


def exponential(context: Context, x: SharedTensor, high: float) -> SharedTensor:
    """e^x for x < high; 0 below -14, of what stands for -infinity too; from `high` on a range error."""
    low = EXP_LOW
    steps = range(low, math.ceil(high) + 1)
    x = settled(context, x, most=8 * context.scheme.activation_limit)
    thresholds = (*(k << x.scale_bits for k in steps[:-1]), round(high * 2**x.scale_bits))
    codes = context.backend.at_least(x.shares, thresholds)
    forbid(context, codes[-1])
    whole = unary_map(context, codes, 0, [low + 1 << x.scale_bits] + [1 << x.scale_bits] * (len(steps) - 1))
    part = x.like(x.shares - whole, x.scale_bits)  # in [-1, 0)
    f = fitting(context, math.exp(high))
    powers = [round(math.exp(n + 1) * 2**f) for n in steps[:-1]]
    factor = unary_map(context, codes, 0, [b - a for a, b in zip([0, *powers], [*powers, 0], strict=True)])
    y = series(context, part, series_of.EXP)
    most = 1.01 * math.exp(math.ceil(high)) * 2.0 ** (y.scale_bits + f)
    return y.like(context.backend.multiply(torch.mul, y.shares, factor), y.scale_bits + f, most)


def fitting(context: Context, largest: float) -> int:
    """Fraction bits, f at most, of a public factor below `largest` that multiplies a number below two of f bits."""
    return min(context.frac_bits, HEADROOM_BITS - 2 - context.frac_bits - math.ceil(math.log2(max(1.0, largest))))


@implements("sigmoid", torch.sigmoid, T.sigmoid, F.sigmoid, torch.special.expit, in_place=(T.sigmoid_, torch.sigmoid_),
       note="everywhere; error 4e-6")  # fmt: skip
def sigmoid(context: Context, x: SharedTensor) -> SharedTensor:
    return saturated(context, x, series_of.SIGMOID)


@implements("tanh", torch.tanh, T.tanh, F.tanh, in_place=(T.tanh_, torch.tanh_), note="everywhere; error 8e-6")
def tanh(context: Context, x: SharedTensor) -> SharedTensor:
    y = saturated(context, x.like(x.shares, x.scale_bits - 1), series_of.SIGMOID)
    return lifted(context, y.like(y.shares, y.scale_bits - 1), -1.0)


@implements("erf", torch.erf, T.erf, torch.special.erf, in_place=(T.erf_, torch.erf_), note="everywhere; error 4e-6")
def erf(context: Context, x: SharedTensor) -> SharedTensor:
    return saturated(context, x, series_of.ERF)


@implements("erfc", torch.erfc, T.erfc, torch.special.erfc, note="everywhere; error 4e-6")
def erfc(context: Context, x: SharedTensor) -> torch.Tensor:
    return 1 - torch.erf(x)


@implements("gelu", F.gelu, note="everywhere; error 4e-6")
def gelu(context: Context, x: SharedTensor, approximate: str = "none") -> SharedTensor:
    which = series_of.GELU if approximate == "none" else series_of.GELU_TANH
    return saturated(context, x, which, 1.0)


@implements("softplus", F.softplus, note="everywhere; error 5e-6 / beta")
def softplus(context: Context, x: SharedTensor, beta: float = 1.0, threshold: float = 20.0) -> SharedTensor:
    if threshold < series_of.SOFTPLUS.high:
        refuse(f"softplus with threshold={threshold}", f"use {series_of.SOFTPLUS.high} or more")
    if beta == 0:
        refuse("softplus with beta=0", "name another")
    y = saturated(context, x if beta == 1 else x * beta, series_of.SOFTPLUS, 1.0)
    return y if beta == 1 else scaled(context, y, 1.0 / beta)


@implements("logsigmoid", F.logsigmoid, note="everywhere; error 5e-6")
def logsigmoid(context: Context, x: SharedTensor) -> torch.Tensor:
    return -F.softplus(-x)


def _gated(context: Context, x: SharedTensor, gate: Series) -> SharedTensor:
    """x gate(x) for a gate that is 0 far to the left and 1 far to the right: beyond the series, a constant and x."""
    inside, beyond = clamped(context, x, gate.low, gate.high, True)
    return _no_larger(inside * series(context, inside, gate) + beyond, beyond)


@implements("silu", F.silu, note="everywhere; error 3e-5")
def silu(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, _gated(context, x, series_of.SIGMOID), inplace)


@implements("mish", F.mish, note="everywhere; error 3e-5")
def mish(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, _gated(context, x, series_of.TANH_SOFTPLUS), inplace)


def _in_place(context: Context, x: SharedTensor, y: torch.Tensor, inplace: bool) -> torch.Tensor:
    if inplace:
        if x.aliased:
            refuse("an in-place activation on a view", "pass inplace=False")
        made = summand(context, y)
        x.shares, x.scale_bits, x.bound, x.whole_bits = made.shares, made.scale_bits, made.bound, 0
    return y


def _exp_below_zero(context: Context, x: SharedTensor) -> tuple[SharedTensor, SharedTensor]:
    """exp(min(x, 0)) and ReLU(x)."""
    inside, beyond = clamped(context, x, series_of.EXP.low, 0.0, True)
    return series(context, inside, series_of.EXP), beyond


@implements("elu", F.elu, in_place=(F.elu_,), note="everywhere; error 4e-6 alpha")
def elu(context: Context, x: SharedTensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    below, positive = _exp_below_zero(context, x)
    return _in_place(context, x, (below - 1) * alpha + positive, inplace)


@implements("celu", F.celu, torch.celu, note="everywhere; error 4e-6 alpha")
def celu(context: Context, x: SharedTensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    if alpha <= 0:
        refuse(f"celu with alpha={alpha}", "use a positive one")
    positive = torch.relu(x)
    below = ((x - positive).clamp_min(series_of.EXP.low * alpha) / alpha).exp()
    return _in_place(context, x, positive + (below - 1) * alpha, inplace)


SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


@implements("selu", F.selu, torch.selu, note="everywhere; error 8e-6")
def selu(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, F.elu(x, SELU_ALPHA) * SELU_SCALE, inplace)


@implements("hardsigmoid", F.hardsigmoid, note="everywhere")
def hardsigmoid(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, torch.clamp(x + 3, 0, 6) / 6, inplace)


@implements("hardswish", F.hardswish, note="everywhere")
def hardswish(context: Context, x: SharedTensor, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, x * (torch.clamp(x + 3, 0, 6) / 6), inplace)


@implements("tanhshrink", F.tanhshrink, note="everywhere; error 8e-6")
def tanhshrink(context: Context, x: SharedTensor) -> SharedTensor:
    return x - torch.tanh(x)


@implements("softshrink", F.softshrink, torch.nn.functional.softshrink, note="exact")
def softshrink(context: Context, x: SharedTensor, lambd: float = 0.5) -> SharedTensor:
    return x - x.clamp(-lambd, lambd)


@implements("hardshrink", F.hardshrink, T.hardshrink, torch.hardshrink, note="exact")
def hardshrink(context: Context, x: SharedTensor, lambd: float = 0.5) -> SharedTensor:
    return x * ((x > lambd) | (x < -lambd))


@implements("threshold", F.threshold, torch.threshold, note="exact")
def threshold(context: Context, x: SharedTensor, threshold: float, value: float, inplace: bool = False) -> torch.Tensor:
    return _in_place(context, x, value + (x - value) * (x > threshold), inplace)


@implements("glu", F.glu, note="error 4e-6 |x|")
def glu(context: Context, x: SharedTensor, dim: int = -1) -> torch.Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


@implements("expm1", torch.expm1, T.expm1, note="as exp")
def expm1(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.exp(x) - 1


@implements("exp2", torch.exp2, T.exp2, torch.special.exp2, note="2^x < 2^16; as exp of x ln 2")
def exp2(context: Context, x: SharedTensor) -> torch.Tensor:
    return torch.exp(x * math.log(2))


def _half_exp(context: Context, x: SharedTensor) -> SharedTensor:
    """e^x / 2, up to where that is held."""
    y = exponential(context, x, (result_bits(context) + 1) * math.log(2))
    return y.like(y.shares, y.scale_bits + 1)


@implements("sinh", torch.sinh, T.sinh, note="result < 2^16; error as exp")
def sinh(context: Context, x: SharedTensor) -> SharedTensor:
    return _half_exp(context, x) - _half_exp(context, -x)


@implements("cosh", torch.cosh, T.cosh, note="result < 2^16; error as exp")
def cosh(context: Context, x: SharedTensor) -> SharedTensor:
    return _half_exp(context, x) + _half_exp(context, -x)
