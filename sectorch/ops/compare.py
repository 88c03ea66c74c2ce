"""Comparisons, logic, and choices by a secret condition. Comparisons are exact on the encoded values."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from ..errors import DtypeError
from ..ring import range_limit
from ..tensor import SharedTensor
from ..tensor.table import BEFORE, COMPOSED, Context, implements
from .common import (
    as_factor,
    as_floating,
    is_secret,
    note_vanished,
    planes,
    refuse,
    signed_sum,
    small_public_number,
    standing_for,
    summand,
    with_dtype,
    with_fine_scale,
)
from .reduction import sum_

T = torch.Tensor


def not_negative(context: Context, x: SharedTensor) -> SharedTensor:
    """[x >= 0] as shares of 0 and 1."""
    return x.like(context.backend.at_least(x.shares, high=planes(x))[0], 0)


def complement(context: Context, x: SharedTensor) -> SharedTensor:
    """1 - x for shares of 0 and 1."""
    return x.like(-x.shares + 1, 0)


@implements("ge", torch.ge, torch.greater_equal, T.ge, T.greater_equal, T.__ge__, note="exact")
def ge(context: Context, x: Any, y: Any) -> SharedTensor:
    return not_negative(context, signed_sum(context, x, y, -1))


@implements("le", torch.le, torch.less_equal, T.le, T.less_equal, T.__le__, note="exact")
def le(context: Context, x: Any, y: Any) -> SharedTensor:
    return not_negative(context, signed_sum(context, y, x, -1))


@implements("gt", torch.gt, torch.greater, T.gt, T.greater, T.__gt__, note="exact")
def gt(context: Context, x: Any, y: Any) -> SharedTensor:
    return complement(context, le(context, x, y))


@implements("lt", torch.lt, torch.less, T.lt, T.less, T.__lt__, note="exact")
def lt(context: Context, x: Any, y: Any) -> SharedTensor:
    return complement(context, ge(context, x, y))


@implements("eq", torch.eq, T.eq, T.__eq__, note="exact")
def eq(context: Context, x: Any, y: Any) -> SharedTensor:
    difference = signed_sum(context, x, y, -1)
    return difference.like(context.backend.is_zero(difference.shares), 0)


@implements("ne", torch.ne, torch.not_equal, T.ne, T.not_equal, T.__ne__, note="exact")
def ne(context: Context, x: Any, y: Any) -> SharedTensor:
    return complement(context, eq(context, x, y))


def _require_bool(x: Any) -> Any:
    if (type(x) is not bool) if not isinstance(x, torch.Tensor) else x.dtype != torch.bool:
        refuse("logic on numbers", "compare them first, e.g. x > 0")
    return torch.tensor(x) if isinstance(x, bool) else x


@implements("logical_not", torch.logical_not, T.logical_not, note="of numbers: whether they are zero")
def logical_not_of_any(context: Context, x: SharedTensor) -> torch.Tensor:
    return ~x if x.dtype == torch.bool else x == 0


@implements("logical_and", torch.logical_and, T.logical_and, note="of numbers: whether they are not zero")
def logical_and_of_any(context: Context, x: Any, y: Any) -> torch.Tensor:
    return _truth(x) & _truth(y)


@implements("logical_or", torch.logical_or, T.logical_or, note="of numbers: whether they are not zero")
def logical_or_of_any(context: Context, x: Any, y: Any) -> torch.Tensor:
    return _truth(x) | _truth(y)


def _truth(x: Any) -> Any:
    return x if x.dtype == torch.bool else x != 0


@implements("logical_not", torch.bitwise_not, T.bitwise_not, T.__invert__, note="of a comparison")
def logical_not(context: Context, x: SharedTensor) -> SharedTensor:
    _require_bool(x)
    return complement(context, x)


@implements("logical_and", torch.bitwise_and, T.bitwise_and, T.__and__, T.__rand__, note="of comparisons")
def logical_and(context: Context, x: Any, y: Any) -> SharedTensor:
    x, y = _require_bool(x), _require_bool(y)
    return x * y


@implements("logical_or", torch.bitwise_or, T.bitwise_or, T.__or__, T.__ror__, note="of comparisons")
def logical_or(context: Context, x: Any, y: Any) -> SharedTensor:
    x, y = _require_bool(x), _require_bool(y)
    return signed_sum(context, _count_true(context, x, y), x * y, -1)


def _count_true(context: Context, x: Any, y: Any) -> SharedTensor:
    """x + y of comparisons as whole numbers."""
    return with_dtype(signed_sum(context, x, y), torch.int64)


@implements("sign", torch.sign, T.sign, torch.sgn, T.sgn, note="exact", at_most=4.0)
def sign(context: Context, x: SharedTensor) -> SharedTensor:
    bits = context.backend.at_least(x.shares, (0, 1), planes(x, more=1))
    return x.like(bits[0] + bits[1] - 1, 0)


def _refuse_other_types(x: Any, y: Any) -> Any:
    """Refuse `==` with anything but tensors and numbers; Python then finds them unequal, as in `x == None`."""
    if not isinstance(y, (torch.Tensor, numbers.Number, np.generic, np.ndarray)):
        raise DtypeError(f"a tensor is not compared with a {type(y).__name__}")
    return NotImplemented


for _function in (T.__eq__, T.__ne__):
    COMPOSED[_function] = _refuse_other_types


def _require_two_choices(condition: Any, *choices: Any, **named: Any) -> None:
    if len(choices) + len(named) < 2:
        refuse("where without two choices", "it would reveal positions; give both tensors")


BEFORE[torch.where] = _require_two_choices


@implements("where", torch.where, note="1 round for a secret condition")
def where(context: Context, condition: Any, x: Any = None, y: Any = None) -> SharedTensor:
    if isinstance(condition, SharedTensor):
        _require_bool(condition)
    if not (is_secret(x) and is_secret(y)):
        if small_public_number(context, y) is not None and small_public_number(context, x) is None:
            return _choose_or_small(context, condition, x, y)
        if small_public_number(context, x) is not None and small_public_number(context, y) is None:
            return _choose_or_small(context, ~condition, y, x)
    if isinstance(condition, SharedTensor):
        if is_secret(x) and is_secret(y):
            if not (isinstance(x, SharedTensor) or isinstance(y, SharedTensor)):
                return y + condition * (x - y)
            return _choose(context, condition, x, y)
        return _masked(context, condition, x) + _masked(context, complement(context, condition), y)
    dtype = next(v.dtype for v in (x, y) if isinstance(v, SharedTensor))
    difference = signed_sum(context, x, y, -1)
    return y + with_dtype(difference, dtype) * condition.to(torch.int64)


def _masked(context: Context, condition: SharedTensor, x: Any) -> SharedTensor:
    """x where the condition is 1, and 0 elsewhere. The result is no larger than x, which so may exceed activations."""
    if not isinstance(x, SharedTensor):
        note_vanished(x, context.frac_bits)
        return condition * x
    x = as_factor(context, x, most=range_limit(context.frac_bits))
    return x.like(context.backend.multiply(torch.mul, condition.shares, x.shares), bound=x.bound)


def _choose(context: Context, condition: SharedTensor, x: Any, y: Any) -> SharedTensor:
    """y + condition * (x - y): one of both, and so no larger than they are."""
    made = signed_sum(context, y, _masked(context, condition, signed_sum(context, x, y, -1)))
    bounds = [v.bound * 2.0 ** (made.scale_bits - v.scale_bits) + 1 for v in (x, y) if getattr(v, "bound", None)]
    most = max(bounds) if len(bounds) == 2 else made.bound
    return made.bounded(most if made.bound is None or most is None else min(most, made.bound))


def _choose_or_small(context: Context, condition: Any, x: Any, number: Any) -> SharedTensor:
    """x where the condition holds, and a small public number elsewhere, which keeps its digits."""
    value = small_public_number(context, number) or 0.0
    if isinstance(number, torch.Tensor):
        condition = condition.expand(torch.broadcast_shapes(condition.shape, number.shape))
    chosen = condition if isinstance(condition, SharedTensor) else condition.to(torch.int64)
    kept = _masked(context, condition, x) if isinstance(condition, SharedTensor) else x * chosen
    kept = with_fine_scale(context, summand(context, as_floating(kept)))
    rest = complement(context, condition).shares if isinstance(condition, SharedTensor) else 1 - chosen
    made = kept.bounded(None if kept.bound is None else kept.bound + abs(value) * 2.0**kept.scale_bits + 1)
    element = standing_for(made, value, least=1) if value > 0 else round(value * 2.0**kept.scale_bits)
    made.shares = kept.shares + rest * element
    return made


@implements("where", T.where)
def where_method(context: Context, x: Any, condition: Any, y: Any = None) -> SharedTensor:
    """x.where(condition, y)."""
    return where(context, condition, x, y)


def _at_least_one(context: Context, x: SharedTensor, dim: Any, keepdim: bool) -> SharedTensor:
    counts = sum_(context, with_dtype(x, torch.int64), dim, keepdim)
    return x.like(context.backend.at_least(counts.shares, (1,))[0], 0)


@implements("any", torch.any, T.any, note="exact; one comparison of the count")
def any_(context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False) -> SharedTensor:
    if isinstance(dim, (tuple, list)) and not dim:  # each by itself, where a sum would be over all
        return _truth(x)
    return _at_least_one(context, _truth(x), dim, keepdim)


@implements("all", torch.all, T.all, note="exact; one comparison of the count")
def all_(context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False) -> SharedTensor:
    if isinstance(dim, (tuple, list)) and not dim:
        return _truth(x)
    return complement(context, _at_least_one(context, complement(context, _truth(x)), dim, keepdim))


@implements("count_nonzero", torch.count_nonzero, T.count_nonzero, note="exact")
def count_nonzero(context: Context, x: SharedTensor, dim: Any = None) -> SharedTensor:
    return sum_(context, with_dtype(_truth(x), torch.int64), dim)


@implements("isin", torch.isin, note="exact; a comparison of each with each")
def isin(
    context: Context, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    elements, tests = (v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in (elements, test_elements))
    found = (elements.unsqueeze(-1) == tests.reshape(-1)).any(-1)
    return ~found if invert else found


def _xor(context: Context, x: Any, y: Any) -> SharedTensor:
    both = with_dtype(x * y, torch.int64)
    return signed_sum(context, _count_true(context, x, y), both * 2, -1)


@implements("logical_xor", torch.logical_xor, T.logical_xor, note="of numbers: whether one alone is zero")
def logical_xor(context: Context, x: Any, y: Any) -> SharedTensor:
    return _xor(context, _truth(x), _truth(y))


@implements("logical_xor", torch.bitwise_xor, T.bitwise_xor, T.__xor__, T.__rxor__)
def bitwise_xor(context: Context, x: Any, y: Any) -> SharedTensor:
    x, y = _require_bool(x), _require_bool(y)
    return _xor(context, x, y)


@implements("signbit", torch.signbit, T.signbit, note="exact; no negative zero")
def signbit(context: Context, x: SharedTensor) -> torch.Tensor:
    return x < 0


@implements("heaviside", torch.heaviside, T.heaviside, in_place=(T.heaviside_,), note="exact")
def heaviside(context: Context, x: Any, values: Any) -> torch.Tensor:
    return torch.where(x == 0, values, (x > 0).to(values.dtype))


@implements("isclose", torch.isclose, T.isclose, note="of the encoded values; the tolerance to 2^-20 of itself")
def isclose(
    context: Context, x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> torch.Tensor:
    return (x - y).abs() <= y.abs() * rtol + atol


@implements("copysign", torch.copysign, T.copysign, in_place=(T.copysign_,), note="exact; no negative secret zero")
def copysign(context: Context, x: Any, y: Any) -> torch.Tensor:
    if is_secret(y):
        return x.abs() * ((y >= 0) * 2 - 1)
    negative = torch.signbit(torch.as_tensor(y))
    return x.abs() * torch.where(negative, -1, 1)
