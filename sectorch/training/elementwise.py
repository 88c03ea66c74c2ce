"""Sums and products: rows that have the same form forward and backward, and those that optimisers use."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import SLACK_BITS
from ..ops.ranges import CAPACITY, fitted
from ..tensor import SharedTensor
from ..tensor.infinity import beyond
from ..tensor.table import Context
from . import targets
from .cells import Cell
from .functions import aten, torch
from .operations import GRADIENTS
from .public import VARYING, Varying, factor_form, inverse_form, places, scale_form, weight_form
from .scale import (
    as_gradient,
    at,
    doubled,
    operand,
    plain_number,
    state_bits,
    times,
    total,
    wide,
)

row = GRADIENTS.implements


def content(value: Any) -> Any:
    return value.content if isinstance(value, Cell) else value


def kept_bits(context: Context, x: SharedTensor) -> int:
    """The fraction bits that x goes on with: its own, from f + 6 to 2 f + 6."""
    return max(context.frac_bits + SLACK_BITS, min(x.scale_bits, state_bits(context)))


def scaled(context: Context, value: Any, number: Any) -> Any:
    """A number times anything."""
    if number == 1 or not isinstance(value, (Cell, SharedTensor)):
        return content(value) if number == 1 else value * number
    x = content(value)
    return times(context, x, number, kept_bits(context, x), wide=True)


@row("add", aten.add.Tensor, aten.add.Scalar)
def add(context: Context, x: Any, y: Any, alpha: float = 1) -> SharedTensor:
    return total(context, content(x), scaled(context, y, alpha))


@row("sub", aten.sub.Tensor, aten.sub.Scalar)
def sub(context: Context, x: Any, y: Any, alpha: float = 1) -> SharedTensor:
    return total(context, content(x), scaled(context, y, alpha), -1)


@row("rsub", aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(context: Context, x: Any, y: Any, alpha: float = 1) -> SharedTensor:
    return total(context, content(y), scaled(context, x, alpha), -1)


@row("neg", aten.neg.default)
def neg(context: Context, x: Cell) -> SharedTensor:
    return -x.content


@row("mul", aten.mul.Tensor, aten.mul.Scalar)
def mul(context: Context, x: Any, y: Any) -> SharedTensor:
    x, y = (x, y) if isinstance(x, Cell) else (y, x)
    number = plain_number(y)
    masks = number is not None and beyond(context.scheme, number) is not None
    if masks or content(x).infinite or (isinstance(y, Cell) and y.content.infinite):
        return torch.mul(content(x), content(y) if number is None else number)
    form = y.form if isinstance(y, Varying) else weight_form(y) if type(y) is Tensor else None
    if form is not None and form.kind == "mask":
        return coded(context, operand(context, x), y)
    if form is not None and form.kind == "floats":
        return _weighted(context, operand(context, x), y)
    if isinstance(y, Varying):
        return _times(context, content(x), y)
    for value, other in ((x, y), (y, x)):
        number = plain_number(other)
        if number is not None:
            return _times(context, content(value), number)
    return torch.mul(operand(context, x), operand(context, y))


def _weighted(context: Context, x: SharedTensor, y: Any) -> SharedTensor:
    """x times public floats of f fraction bits, which may be others in the next step. No message."""
    most = targets.largest(y, context.frac_bits)
    x = fitted(context, x, CAPACITY / most)
    shares = context.backend.each(operator.mul, x.shares, targets.whole(context, y, context.frac_bits))
    return x.like(shares, x.scale_bits + context.frac_bits, None if x.bound is None else x.bound * most)


def _times(context: Context, x: SharedTensor, number: Any) -> SharedTensor:
    """By a number near one, as a decay is, the rest is what is small: x - (1 - number) x."""
    bits = kept_bits(context, x)
    varies = isinstance(number, Varying)
    if number.rest if varies else 0.5 < number < 1:
        rest = number if varies else 1 - number
        least = 2.0 ** ((number.exponent if isinstance(number, Varying) else places(1 - number, False)) - 1)
        x = at(context, x, bits)
        made = total(context, x, times(context, x, rest, bits), -1)
        return made.bounded(None if x.bound is None else x.bound * (1 - least * (1 - 2.0**-13)) + 2)
    return times(context, x, number, bits)


def coded(context: Context, x: SharedTensor, code: Any) -> SharedTensor:
    """x times public zeros and ones, which may be others in the next step, or secret ones."""
    if isinstance(code, SharedTensor):
        return torch.mul(x, code.float())
    if isinstance(code, Varying):
        code = code.made(context, Tensor.long, code.size)
    code = code.long() if isinstance(code, Tensor) else code
    return x.like(context.backend.each(operator.mul, x.shares, code), bound=x.bound)


@row("div", aten.div.Tensor, aten.div.Scalar)
def div(context: Context, x: Any, y: Any) -> SharedTensor:
    number = plain_number(y)
    if number == 0:
        raise ArgumentError("division by zero")
    if isinstance(x, Cell) and x.content.infinite:
        return torch.div(x.content, content(y) if number is None else number)
    if isinstance(y, Varying) or number is not None:
        inverse = y if number is None else 1 / number
        return times(context, content(x), inverse, kept_bits(context, content(x)), wide=True)
    if isinstance(x, Cell) and x.gradient:  # a quotient of what is small keeps its bits
        return _finer(as_gradient(context, x.content), content(y))
    return torch.div(content(x), content(y))


def _finer(x: SharedTensor, y: Any) -> SharedTensor:
    """x / y, as 2^-6 (2^6 x / y)."""
    quotient = torch.div(x.like(x.shares, x.scale_bits - ROOT_BITS, x.bound), y)
    return quotient.like(quotient.shares, quotient.scale_bits + ROOT_BITS, quotient.bound)


@row("reciprocal", aten.reciprocal.default)
def reciprocal(context: Context, x: Cell) -> SharedTensor:
    return torch.reciprocal(x.content)


@row("sqrt", aten.sqrt.default, note="Adam's, of a mean of squares: bits down to 2^-(f+3)")
def sqrt(context: Context, x: Cell) -> SharedTensor:
    return _root(x.content)


ROOT_BITS = 6
"""Bits by which roots and quotients of what is small are finer."""


def _root(x: SharedTensor) -> SharedTensor:
    """sqrt(x), as 2^-6 sqrt(2^12 x)."""
    root = torch.sqrt(x.like(x.shares, x.scale_bits - 2 * ROOT_BITS, x.bound))
    bits = root.scale_bits + ROOT_BITS
    most = None if x.bound is None else 1.01 * math.sqrt(x.bound * 2.0**-x.scale_bits) * 2.0**bits + 2.0**ROOT_BITS
    return root.like(root.shares, bits, most)


@row("lerp", aten.lerp.Scalar)
def lerp(context: Context, x: Cell, y: Any, weight: float) -> SharedTensor:
    """x + weight (y - x), at 2 f + 6 fraction bits; no larger than the larger of both for a weight from 0 to 1."""
    start, end = wide(context, x.content), content(y)
    end = wide(context, as_gradient(context, end) if isinstance(end, SharedTensor) else end)
    made = start + times(context, end - start, weight, state_bits(context))
    return made.bounded(towards(start.bound, end.bound, weight)) if 0 < weight <= 1 else made


def towards(start: float | None, end: float | None, weight: float) -> float | None:
    """The bound of x + w (y - x), computed to a unit: where x is that large, it stays so."""
    return None if start is None or end is None else max(start, end + 2 / weight)


@row("addcmul", aten.addcmul.default, note="a square is rounded up, so that no step of Adam's is too long")
def addcmul(context: Context, x: Any, a: Any, b: Any, value: float = 1) -> SharedTensor:
    if not isinstance(x, Cell) or (not isinstance(a, Cell) and not isinstance(b, Cell)):
        return total(context, content(x), scaled(context, torch.mul(content(a), content(b)), value))
    start = wide(context, x.content)
    if a is b:
        square = doubled(context, as_gradient(context, a.content))
        more = times(context, square, value, state_bits(context))
        return total(context, start, more.like(more.shares + 1, bound=None if more.bound is None else more.bound + 1))
    product = torch.mul(operand(context, a), operand(context, b))
    return total(context, start, times(context, product, value, state_bits(context)))


@row("addcdiv", aten.addcdiv.default)
def addcdiv(context: Context, x: Any, a: Any, b: Any, value: float = 1) -> SharedTensor:
    """Numerator and divisor both 2^6 times as large: a quotient of what is small keeps its bits."""
    if not all(isinstance(v, Cell) for v in (x, a, b)):
        return total(context, content(x), scaled(context, torch.div(content(a), content(b)), value))
    above, below = (v.like(v.shares, v.scale_bits - ROOT_BITS, v.bound) for v in (a.content, b.content))
    quotient = torch.div(above, below)
    return total(context, x.content, times(context, quotient, value, state_bits(context), wide=True))


for _key in (aten.add.Tensor, aten.sub.Tensor):
    VARYING.setdefault(_key, {})["alpha"] = scale_form
VARYING |= {
    aten.mul.Tensor: {0: weight_form, 1: factor_form},
    aten.mul.Scalar: {1: factor_form},
    **{key: {1: inverse_form} for key in (aten.div.Tensor, aten.div.Scalar)},
    aten.addcdiv.default: {"value": scale_form},
}


def constant(context: Context, x: SharedTensor, value: float) -> SharedTensor:
    """A public number in the shape of x."""
    whole = round(value * 2**context.frac_bits)
    return x.like(context.backend.each(torch.zeros_like, x.shares) + whole, context.frac_bits, float(abs(whole)))


def _full(value: float) -> Callable:
    """Of the shape that is asked for: a public number, which a secret may be written over."""

    def made(context: Context, x: Cell, size: Any, *given: Any, **_: Any) -> SharedTensor:
        start = x.content.reshape(-1)[:0].sum().reshape([1] * len(size)).expand(size)
        return constant(context, start, given[0] if given else value)

    return made


for _name, _value in (("new_zeros", 0.0), ("new_ones", 1.0), ("new_full", 0.0), ("new_empty", 0.0)):
    row(_name, getattr(aten, _name).default)(_full(_value))


@row("new_empty", aten.new_empty_strided.default)
def new_empty_strided(context: Context, x: Cell, size: Any, stride: Any, **_: Any) -> SharedTensor:
    return _full(0.0)(context, x, size)


@row("full_like", aten.full_like.default)
def full_like(context: Context, x: Cell, value: float, **_: Any) -> SharedTensor:
    return constant(context, x.content, value)


@row("zeros_like", aten.zeros_like.default, aten.empty_like.default)
def zeros_like(context: Context, x: Cell, **_: Any) -> SharedTensor:
    return constant(context, x.content, 0)


@row("ones_like", aten.ones_like.default)
def ones_like(context: Context, x: Cell, **_: Any) -> SharedTensor:
    return constant(context, x.content, 1)


@row("clone", aten.clone.default)
def clone(context: Context, x: Cell, **_: Any) -> SharedTensor:
    return x.content


@row("copy", aten.copy.default)
def copy(context: Context, x: Cell, y: Any, non_blocking: bool = False) -> SharedTensor:
    source = content(y)
    shape = x.content.shares.shape
    return source.expand(shape) if isinstance(source, SharedTensor) else constant(context, x.content, 0) + source


@row("fill", aten.fill.Scalar)
def fill(context: Context, x: Cell, value: float) -> SharedTensor:
    return constant(context, x.content, value)


@row("zero", aten.zero.default)
def zero(context: Context, x: Cell) -> SharedTensor:
    return constant(context, x.content, 0)


@row("sum", aten.sum.default, aten.sum.dim_IntList)
def sum_(context: Context, x: Cell, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> SharedTensor:
    """A gradient's terms are held to the limit of gradients where their sum might leave the ring."""
    value = x.content
    if x.gradient and value.bound is not None:
        count = value.numel() if not dim else _count(value, dim)
        if value.bound * count > 2.0**61:
            value = as_gradient(context, value)
    dim = list(range(value.dim())) if keepdim and not dim else dim
    return torch.sum(value) if not dim else torch.sum(value, dim, keepdim)


def _count(x: SharedTensor, dim: Any) -> int:
    count = 1
    for d in [dim] if isinstance(dim, int) else dim:
        count *= x.shares.shape[d]
    return count


@row("mean", aten.mean.default, aten.mean.dim)
def mean(context: Context, x: Cell, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> SharedTensor:
    dim = list(range(x.content.dim())) if keepdim and not dim else dim
    return torch.mean(x.content) if not dim else torch.mean(x.content, dim, keepdim)


@row("clamp", aten.clamp.default)
def clamp(context: Context, x: Cell, min: Any = None, max: Any = None) -> SharedTensor:
    return torch.clamp(x.content, min, max)


@row("norm", aten.linalg_vector_norm.default)
def vector_norm(
    context: Context, x: Cell, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> SharedTensor:
    """Of a whole gradient, as clip_grad_norm_ has it, the root of the sum of squares at 2 f fraction bits or more."""
    if ord != 2 or dim is not None or not x.gradient:
        return torch.linalg.vector_norm(x.content, ord, dim, keepdim)
    value = as_gradient(context, x.content, None if x.content.numel() < 2 else context.frac_bits + 4)
    return _root(torch.sum(doubled(context, value)))


@row("where", aten.where.self)
def where(context: Context, condition: Any, x: Any, y: Any) -> SharedTensor:
    return torch.where(content(condition), content(x), content(y))


def _comparison(func: Callable) -> Callable:
    def compared(context: Context, x: Any, y: Any) -> SharedTensor:
        return func(content(x), content(y))

    return compared


for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    _packet = getattr(aten, _name)
    row(_name, _packet.Tensor, _packet.Scalar, note="no gradient")(_comparison(getattr(torch, _name)))


@row("logical_and", aten.logical_and.default, note="no gradient")
def logical_and(context: Context, x: Any, y: Any) -> SharedTensor:
    return torch.logical_and(content(x), content(y))


@row("exp", aten.exp.default, note="e^x < 2^16; error 6e-6 e^x + 2e-6")
def exp(context: Context, x: Cell) -> SharedTensor:
    return torch.exp(x.content)
