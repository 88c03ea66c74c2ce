"""Sums, products, roots and comparisons: rows with the same form forward and backward, and those of optimisers."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import CAPACITY, SLACK_BITS, check_fits, planes
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.shared import infinite_of, mask_beyond_range
from ..tensor.table import Context
from . import operations
from .autograd_values import (
    VARYING,
    Cell,
    DeferredResult,
    PublicInput,
    ReusableResult,
    factor_form,
    inverse_form,
    places,
    root_places,
    scale_form,
    weight_form,
)
from .fixed_point import (
    as_gradient,
    at_scale_bits,
    at_state_bits,
    finer_sum,
    gradient_bits,
    operand,
    plain_number,
    square_gradient,
    state_bits,
    times,
)
from .operations import GRADIENTS, aten, torch

row = GRADIENTS.implements

NOTHING: Any = None
"""The `meta` of a deferred result, which `compute_operation` sets."""


def content(value: Any) -> Any:
    return value.content if isinstance(value, Cell) else value


def kept_bits(context: Context, x: SharedTensor) -> int:
    """The fraction bits of a result of x: those of x, but at least f + 6 and at most 2 f + 6."""
    return max(context.frac_bits + SLACK_BITS, min(x.scale_bits, state_bits(context)))


def scale_by_number(context: Context, value: Any, number: Any) -> Any:
    """A cell, a SharedTensor or something public, times a public number."""
    if number == 1 or not isinstance(value, (Cell, SharedTensor)):
        return content(value) if number == 1 else value * number
    x = content(value)
    if isinstance(x, PrivateTensor):
        return x * number
    return times(context, x, number, kept_bits(context, x), wide=True)


@row("add", aten.add.Tensor, aten.add.Scalar)
def add(context: Context, x: Any, y: Any, alpha: float = 1) -> Any:
    made = finer_sum(context, content(x), scale_by_number(context, y, alpha))
    number = plain_number(y) if isinstance(x, Cell) and x.reusable.get("root") else None
    return made if number is None or number < 0 or alpha < 0 else ReusableResult(made, root=True)


@row("sub", aten.sub.Tensor, aten.sub.Scalar)
def sub(context: Context, x: Any, y: Any, alpha: float = 1) -> SharedTensor:
    return finer_sum(context, content(x), scale_by_number(context, y, alpha), -1)


@row("rsub", aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(context: Context, x: Any, y: Any, alpha: float = 1) -> SharedTensor:
    return finer_sum(context, content(y), scale_by_number(context, x, alpha), -1)


@row("neg", aten.neg.default)
def neg(context: Context, x: Cell) -> SharedTensor:
    return -x.content


@row("mul", aten.mul.Tensor, aten.mul.Scalar)
def mul(context: Context, x: Any, y: Any) -> Any:
    x, y = (x, y) if isinstance(x, Cell) else (y, x)
    if any(isinstance(v, Cell) and v.own for v in (x, y)):
        return torch.mul(operand(context, x), operand(context, y))
    number = plain_number(y)
    masks = number is not None and mask_beyond_range(context.scheme, number) is not None
    if masks or any(isinstance(v, Cell) and v.deferred is None and infinite_of(v.content) for v in (x, y)):
        return torch.mul(content(x), content(y) if number is None else number)
    form = y.form if isinstance(y, PublicInput) else weight_form(y) if type(y) is Tensor else None
    if form is not None and form.kind == "mask":
        return times_code(context, operand(context, x), y)
    if form is not None and form.kind == "floats":
        return _times_floats(context, operand(context, x), y)
    # A factor that all know costs nothing, and is taken first; a quotient that waits for its factor is looked for after
    # it.
    pairs: list[Any] = [(x, y), (y, x)]
    for value, other in pairs:
        number = other if isinstance(other, PublicInput) else plain_number(other)
        if number is not None:
            return _times_number(context, value, number)
    if isinstance(x, Cell) and isinstance(y, Cell):
        over, whole = (x, y) if x.deferred is not None else (y, x)
        if over.deferred is not None and whole.deferred is None:
            below, above = FactoredResult.of(over), FactoredResult.of(whole)
            if below.above is None and above.below is None:
                return FactoredResult(above.above, below.below, (*above.numbers, *below.numbers)).product(context)
    made = _fine(context, content(x), content(y))
    made = torch.mul(operand(context, x), operand(context, y)) if made is None else made
    if not isinstance(x, Cell) or not isinstance(y, Cell):
        return made
    fine = max(x.content.scale_bits, y.content.scale_bits) > context.frac_bits
    return ReusableResult(made, factors=(x.content, y.content)) if fine else made


def _fine(context: Context, x: Any, y: Any) -> SharedTensor | None:
    """x y with all bits for which there is room, for an optimiser's state and a tensor of small factors, such as step
    sizes; None for anything else."""
    if not all(isinstance(v, SharedTensor) and v.bound is not None for v in (x, y)):
        return None
    x, y = (x, y) if x.scale_bits >= y.scale_bits else (y, x)
    least = context.frac_bits + SLACK_BITS
    if x.scale_bits <= least or y.scale_bits > context.frac_bits or not 0 < y.bound <= 4 * 2.0**y.scale_bits:
        return None
    bits = min(x.scale_bits, math.floor(math.log2(CAPACITY / max(x.bound * 2.0**-x.scale_bits * y.bound, 1))))
    if bits <= least:
        return None
    x = at_scale_bits(context, x, bits)
    bound = None if x.bound is None else x.bound * y.bound
    made = x.like(context.backend.multiply(torch.mul, x.shares, y.shares), bits + y.scale_bits, bound)
    return at_scale_bits(context, made, min(made.scale_bits, state_bits(context)))


@dataclass(frozen=True)
class FactoredResult:
    """The parts of a result: above / below, times public numbers.

    An optimiser divides a mean of squares by a bias correction before it takes the root, or takes the reciprocal of a
    root before it multiplies by it. Rounding in between would lose the bits that it needs, so the root of the parts, or
    their quotient, is computed instead.

    Attributes:
        above, below: None stands for one.
        numbers: public factors, in the order in which they multiply.
        root: whether `below` is a root, or the sum of a root and a number, and so not negative; nor are the numbers.
    """

    above: SharedTensor | None
    below: SharedTensor | None = None
    numbers: tuple = ()
    root: bool = False

    @staticmethod
    def of(x: Cell) -> FactoredResult:
        return x.reusable["parts"] if "parts" in x.reusable else FactoredResult(x.content)

    def product(self, context: Context) -> SharedTensor:
        """The quotient, times the numbers, with 2 f + 6 fraction bits."""
        if self.above is None or self.below is None:
            raise ArgumentError("a quotient has both its parts")
        result = _quotient(self.above, self.below)
        for number in self.numbers:
            result = times(context, result, number, state_bits(context), wide=True)
        return result


def _times_number(context: Context, x: Cell, number: Any, wide: bool = False) -> Any:
    """x times a public number, with its parts."""
    parts = FactoredResult.of(x)
    root = parts.root and not parts.numbers and _positive(number)
    parts = replace(parts, numbers=(*parts.numbers, number), root=root)

    def run(value: SharedTensor) -> SharedTensor:
        bits = kept_bits(context, value)
        return times(context, value, number, bits, wide=True) if wide else _times(context, value, number)

    if x.deferred is None:
        return ReusableResult(run(x.content), parts=parts)
    content = x.deferred.content
    return DeferredResult(context, lambda: run(content()), {"parts": parts}, NOTHING)


def _times_floats(context: Context, x: SharedTensor, y: Any) -> SharedTensor:
    """x times public floats of f fraction bits, which may differ in the next step. No message."""
    most = operations.largest_target(y, context.frac_bits)
    x = check_fits(context, x, CAPACITY / most)
    shares = context.backend.each(operator.mul, x.shares, operations.as_ring_numbers(context, y, context.frac_bits))
    return x.like(shares, x.scale_bits + context.frac_bits, None if x.bound is None else x.bound * most)


def _times(context: Context, x: SharedTensor, number: Any) -> SharedTensor:
    """x times a public number. For a number between 1/2 and 1, as of a decay, it is x - (1 - number) x, which is more
    exact."""
    bits = kept_bits(context, x)
    small = x.bound is not None and x.bound <= 2.0 ** (gradient_bits(context) + 1 + x.scale_bits)
    varies = isinstance(number, PublicInput)
    if number.rest if varies else 0.5 < number < 1:
        rest = number if varies else 1 - number
        least = 2.0 ** ((number.exponent if isinstance(number, PublicInput) else places(1 - number, False)) - 1)
        bits = state_bits(context) if small else bits  # with fewer, a decay below one unit would change nothing
        x = at_scale_bits(context, x, bits)
        made = finer_sum(context, x, times(context, x, rest, bits), -1)
        return made.bounded(None if x.bound is None else x.bound * (1 - least * (1 - 2.0**-13)) + 2)
    return times(context, x, number, bits)


def times_code(context: Context, x: SharedTensor, code: Any) -> SharedTensor:
    """x times zeros and ones: secret ones, or public ones that may differ in the next step."""
    if isinstance(code, SharedTensor):
        return torch.mul(x, code.float())
    if isinstance(code, PublicInput):
        code = code.apply(context, Tensor.long, code.size)
    code = code.long() if isinstance(code, Tensor) else code
    return x.like(context.backend.each(operator.mul, x.shares, code), bound=x.bound)


@row("div", aten.div.Tensor, aten.div.Scalar)
def div(context: Context, x: Any, y: Any) -> SharedTensor:
    number = plain_number(y)
    if number == 0:
        raise ArgumentError("division by zero")
    if isinstance(x, Cell) and x.deferred is None and x.content.infinite:
        return torch.div(x.content, content(y) if number is None else number)
    if isinstance(y, PublicInput) or number is not None:
        inverse = y if number is None else 1 / number
        return _times_number(context, x, inverse, wide=True)
    if isinstance(x, Cell) and x.gradient:  # the quotient of a small number keeps its bits
        return finer_quotient(as_gradient(context, x.content), content(y))
    return torch.div(content(x), content(y))


def _quotient(x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """x / y as (2^6 x) / (2^6 y), since both are small."""
    above, below = (v.like(v.shares, v.scale_bits - ROOT_BITS, v.bound) for v in (x, y))
    return torch.div(above, below)


def finer_quotient(x: SharedTensor, y: Any) -> SharedTensor:
    """x / y, as 2^-6 (2^6 x / y)."""
    quotient = torch.div(x.like(x.shares, x.scale_bits - ROOT_BITS, x.bound), y)
    return quotient.like(quotient.shares, quotient.scale_bits + ROOT_BITS, quotient.bound)


@row("abs", aten.abs.default)
def absolute(context: Context, x: Cell) -> SharedTensor:
    """With the fraction bits of x."""
    value = x.content
    if not context.frac_bits < value.scale_bits <= state_bits(context):
        return torch.abs(value)
    sign = torch.ge(value, 0) * 2 - 1
    return value.like(context.backend.multiply(torch.mul, value.shares, sign.shares), bound=value.bound)


@row("sign", aten.sign.default, aten.sgn.default, note="no gradient")
def sign(context: Context, x: Cell) -> SharedTensor:
    """The sign of a product is computed from its factors, since the product may be below the last place."""
    factors = x.reusable.get("factors")
    if factors is None:
        return torch.sign(x.content)
    first, second = (context.backend.at_least(v.shares, (0, 1), planes(v, more=1)) for v in factors)
    signs = context.backend.multiply(torch.mul, first[0] + first[1] - 1, second[0] + second[1] - 1)
    return x.content.like(signs, 0, 1.0)


@row("reciprocal", aten.reciprocal.default)
def reciprocal(context: Context, x: Cell) -> DeferredResult:
    """Computed when it is read. Times a tensor it becomes a quotient, which may be in range where 1 / x is not."""
    below = x.content
    parts = FactoredResult(None, below, root=bool(x.reusable.get("root")))
    return DeferredResult(context, lambda: torch.reciprocal(below), {"parts": parts}, NOTHING)


@row("reciprocal", torch.ops.prims.reciprocal.default)
def reciprocal_now(context: Context, x: Cell) -> SharedTensor:
    """The reciprocal of a tensor that autograd follows: its backward pass reads it, so it is not deferred."""
    return torch.reciprocal(x.content)


@row("sqrt", aten.sqrt.default, note="Adam's, of a mean of squares: bits down to 2^-(f+3)")
def sqrt(context: Context, x: Cell) -> ReusableResult:
    """The root of a product with positive numbers is the product of the roots."""
    parts = x.reusable.get("parts")
    if parts is None or parts.above is None or parts.below is not None or not all(map(_has_root, parts.numbers)):
        return ReusableResult(_root(x.content), root=True)
    made = _root(parts.above)
    for number in parts.numbers:
        varies = isinstance(number, PublicInput)
        exponent = root_places(number.exponent if varies else places(number, False))
        root = number.root() if varies else math.sqrt(number)
        made = times(context, made, root, kept_bits(context, made), wide=True, exponent=exponent)
    return ReusableResult(made, root=True)


def _positive(number: Any) -> bool:
    return number.rest or number.form.details[1:] == (True,) if isinstance(number, PublicInput) else number > 0


def _has_root(number: Any) -> bool:
    """Whether a number is positive, and not between 1/2 and 1 (see `_times`)."""
    return _positive(number) and not (number.rest if isinstance(number, PublicInput) else 0.5 < number < 1)


ROOT_BITS = 6
"""The additional fraction bits of roots and quotients of small numbers."""


def _root(x: SharedTensor) -> SharedTensor:
    """sqrt(x), as 2^-6 sqrt(2^12 x)."""
    root = torch.sqrt(x.like(x.shares, x.scale_bits - 2 * ROOT_BITS, x.bound))
    bits = root.scale_bits + ROOT_BITS
    most = None if x.bound is None else 1.01 * math.sqrt(x.bound * 2.0**-x.scale_bits) * 2.0**bits + 2.0**ROOT_BITS
    return root.like(root.shares, bits, most)


@row("lerp", aten.lerp.Scalar)
def lerp(context: Context, x: Cell, y: Any, weight: float) -> SharedTensor:
    """x + weight (y - x), with 2 f + 6 fraction bits; for a weight from 0 to 1 no larger than the larger of the two."""
    start, end = at_state_bits(context, x.content), content(y)
    end = at_state_bits(context, as_gradient(context, end) if isinstance(end, SharedTensor) else end)
    made = start + times(context, end - start, weight, state_bits(context))
    return made.bounded(towards(start.bound, end.bound, weight)) if 0 < weight <= 1 else made


def towards(start: float | None, end: float | None, weight: float) -> float | None:
    """A bound of x + w (y - x) with rounding errors of a unit: an x at the bound stays there."""
    return None if start is None or end is None else max(start, end + 2 / weight)


@row("addcmul", aten.addcmul.default, note="a square is rounded up, so that no step of Adam's is too long")
def addcmul(context: Context, x: Any, a: Any, b: Any, value: float = 1) -> SharedTensor:
    if not isinstance(x, Cell) or (not isinstance(a, Cell) and not isinstance(b, Cell)):
        return finer_sum(context, content(x), scale_by_number(context, torch.mul(content(a), content(b)), value))
    start = at_state_bits(context, x.content)
    if a is b:
        square = square_gradient(context, as_gradient(context, a.content))
        more = times(context, square, value, state_bits(context))
        return finer_sum(
            context, start, more.like(more.shares + 1, bound=None if more.bound is None else more.bound + 1)
        )
    product = _fine(context, a.content, b.content) if isinstance(a, Cell) and isinstance(b, Cell) else None
    product = torch.mul(operand(context, a), operand(context, b)) if product is None else product
    return finer_sum(context, start, times(context, product, value, state_bits(context)))


@row("addcdiv", aten.addcdiv.default)
def addcdiv(context: Context, x: Any, a: Any, b: Any, value: float = 1) -> SharedTensor:
    """The quotient of small numbers keeps its bits."""
    if not all(isinstance(v, Cell) for v in (x, a, b)):
        return finer_sum(context, content(x), scale_by_number(context, torch.div(content(a), content(b)), value))
    quotient = _quotient(a.content, b.content)
    return finer_sum(context, x.content, times(context, quotient, value, state_bits(context), wide=True))


for _key in (aten.add.Tensor, aten.sub.Tensor):
    VARYING.setdefault(_key, {})["alpha"] = scale_form
VARYING |= {
    aten.mul.Tensor: {0: weight_form, 1: factor_form},
    aten.mul.Scalar: {1: factor_form},
    **{key: {1: inverse_form} for key in (aten.div.Tensor, aten.div.Scalar)},
    aten.addcdiv.default: {"value": scale_form},
}


def constant(context: Context, x: SharedTensor, value: float) -> SharedTensor:
    """A public number in the shape of x, with the bits of a parameter if it is small and f bits do not hold it."""
    bits = context.frac_bits
    if isinstance(value, float) and abs(value) < 1 and not (value * 2**bits).is_integer():
        bits = state_bits(context)
    whole = round(value * 2**bits)
    return x.like(context.backend.each(torch.zeros_like, x.shares) + whole, bits, float(abs(whole)))


def _full(value: float) -> Callable:
    """A row of a constructor: a public number in the requested shape, into which secrets may be written."""

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
@row("fill", aten.fill.Scalar)
def full_like(context: Context, x: Cell, value: float, **_: Any) -> SharedTensor:
    return constant(context, x.content, value)


@row("zeros_like", aten.zeros_like.default, aten.empty_like.default)
@row("zero", aten.zero.default)
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


@row("sum", aten.sum.default, aten.sum.dim_IntList)
def sum_(context: Context, x: Cell, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> SharedTensor:
    """The terms of a gradient are checked against the limit of gradients if their sum might leave the ring."""
    value = x.content
    if x.gradient and value.bound is not None:
        count = math.prod(value.shares.shape[d] for d in dim or range(value.dim()))
        if value.bound * count > 2.0**61:
            value = as_gradient(context, value)
    dim = list(range(value.dim())) if keepdim and not dim else dim
    return torch.sum(value) if not dim else torch.sum(value, dim, keepdim)


@row("mean", aten.mean.default, aten.mean.dim)
def mean(context: Context, x: Cell, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> SharedTensor:
    dim = list(range(x.content.dim())) if keepdim and not dim else dim
    return torch.mean(x.content) if not dim else torch.mean(x.content, dim, keepdim)


@row("clamp", aten.clamp.default)
def clamp(context: Context, x: Cell, min: Any = None, max: Any = None) -> SharedTensor:
    """A value that is finer than an activation keeps its fraction bits."""
    numbers = [v for v in (min, max) if v is not None]
    if max == 1 and min is None and x.deferred is not None and x.reusable["parts"].root:
        return _below_one(context, x.reusable["parts"])
    value = x.content
    fine = value.scale_bits > context.frac_bits + (0 if x.gradient else SLACK_BITS)
    if value.infinite or not fine or not all(isinstance(v, (int, float)) and abs(v) < limit(context) for v in numbers):
        return torch.clamp(value, min, max)
    for number, function in ((min, maximum), (max, minimum)):
        if number is not None:
            whole = round(number * 2**value.scale_bits)
            beside = value.like(context.backend.each(torch.zeros_like, value.shares) + whole, bound=float(abs(whole)))
            value = function(context, value, beside)
    most = builtins.max(abs(v) for v in numbers) * 2.0**value.scale_bits + 1
    return value if len(numbers) < 2 or value.bound is None else value.bounded(builtins.min(most, value.bound))


def limit(context: Context) -> float:
    """The activation limit."""
    return 2.0**context.scheme.activation_bits


def _below_one(context: Context, parts: FactoredResult) -> SharedTensor:
    """min(number / root, 1) as number / max(root, number), which is in range if the root is zero: the factor of a
    gradient whose norm is clipped."""
    root, number = parts.below, parts.numbers[0] if parts.numbers else 1.0
    if root is None:
        raise ArgumentError("a quotient has both its parts")
    root, bits = at_scale_bits(context, root, state_bits(context)), state_bits(context)
    if isinstance(number, PublicInput):
        whole = number.as_integer(context, bits)
        whole = -whole + 2**bits if number.rest else whole
        bound = 2.0**bits if number.rest else 2.0 ** (bits + number.exponent)
    else:
        whole = round(number * 2.0**bits)
        bound = float(whole)
    above = root.like(context.backend.each(operator.mul, root.shares, 0) + whole, bound=bound)
    return _quotient(above, maximum(context, root, above))


@row("norm", aten.linalg_vector_norm.default)
def vector_norm(
    context: Context, x: Cell, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> ReusableResult:
    """For a gradient as a whole, as in clip_grad_norm_: the root of the sum of squares, at 2 f fraction bits or
    more."""
    if ord != 2 or dim is not None or not x.gradient:
        return ReusableResult(torch.linalg.vector_norm(x.content, ord, dim, keepdim), root=True)
    value = as_gradient(context, x.content, None if x.content.numel() < 2 else context.frac_bits + 4)
    return ReusableResult(_root(torch.sum(square_gradient(context, value))), root=True)


def _larger(sign: int, function: Callable) -> Callable:
    """A row of the larger (sign 1) or the smaller (-1) of two; of optimiser state it has all bits of the finer one."""

    def compared(context: Context, x: Any, y: Any) -> SharedTensor:
        x, y = content(x), content(y)
        scale = max(v.scale_bits if isinstance(v, SharedTensor) else 0 for v in (x, y))
        if not isinstance(x, SharedTensor) or not isinstance(y, SharedTensor) or scale <= context.frac_bits:
            return function(x, y)
        x, y = (at_scale_bits(context, v, scale) for v in (x, y))
        bound = None if x.bound is None or y.bound is None else max(x.bound, y.bound)
        shape = torch.broadcast_shapes(x.shares.shape, y.shares.shape)
        left, right = (context.backend.each(Tensor.expand, v.shares * sign, shape) for v in (x, y))
        best = context.backend.maximum(left, right, planes(x.bounded(bound), 2))
        return x.like(best * sign, bound=bound)

    return compared


maximum, minimum = _larger(1, torch.maximum), _larger(-1, torch.minimum)
row("maximum", aten.maximum.default, aten.fmax.default)(maximum)
row("minimum", aten.minimum.default, aten.fmin.default)(minimum)


@row("where", aten.where.self)
def where(context: Context, condition: Any, x: Any, y: Any) -> SharedTensor:
    return torch.where(content(condition), content(x), content(y))


def _of_contents(func: Callable) -> Callable:
    """A row that is a function of the contents of its two operands."""
    return lambda context, x, y: func(content(x), content(y))


for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    _packet = getattr(aten, _name)
    row(_name, _packet.Tensor, _packet.Scalar, note="no gradient")(_of_contents(getattr(torch, _name)))
row("logical_and", aten.logical_and.default, note="no gradient")(_of_contents(torch.logical_and))


@row("exp", aten.exp.default, note="e^x < 2^16; error 6e-6 e^x + 2e-6")
def exp(context: Context, x: Cell) -> SharedTensor:
    return torch.exp(x.content)
