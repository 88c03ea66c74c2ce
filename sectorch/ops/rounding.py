"""Whole numbers: floor, ceil, trunc, round, and quotients that are rounded with what they leave.

A floor is exact: half a place less, rounded half up. A quotient that is rounded is found from the plain one, whose
error is below 1/2, and set right by the sign of what it leaves, which is exact.
"""

from __future__ import annotations

from typing import Any

import torch

from ..backend import MAX_SHIFT
from ..errors import ArgumentError
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .bilinear import bilinear
from .common import is_secret, local, refuse, require, summand, total, typed
from .compare import complement, not_negative
from .ranges import CAPACITY, fitted

T = torch.Tensor
LARGEST = 2.0**17
"""Below this in magnitude a plain quotient errs by less than 1/4: 2^-19 of it, and the last place of the dividend."""


def floored(context: Context, x: SharedTensor) -> SharedTensor:
    """The whole number below, without fraction bits."""
    while x.scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits)
        half = 1 << (shift - 1)
        x = fitted(context, x, CAPACITY - half)
        bound = None if x.bound is None else (x.bound + half) / 2.0**shift + 1
        x = x.like(context.backend.truncate(x.shares - half, shift), x.scale_bits - shift, bound)
    return x


def sign_of(context: Context, x: SharedTensor) -> SharedTensor:
    """1 or -1 as a whole number; 1 of zero."""
    bit = not_negative(context, x)
    return x.like(bit.shares * 2 - 1, 0, 1.0)


def signed(context: Context, x: SharedTensor, sign: Any) -> SharedTensor:
    """x times signs."""
    made = bilinear(context, torch.mul, x, sign)
    return made.bounded(x.bound)


@implements("floor", torch.floor, T.floor, in_place=(T.floor_, torch.floor_), note="exact")
def floor(context: Context, x: SharedTensor) -> SharedTensor:
    return floored(context, x)


@implements("ceil", torch.ceil, T.ceil, in_place=(T.ceil_, torch.ceil_), note="exact")
def ceil(context: Context, x: SharedTensor) -> SharedTensor:
    return local(context, torch.neg, floored(context, local(context, torch.neg, x)))


@implements("trunc", torch.trunc, T.trunc, torch.fix, T.fix, in_place=(T.trunc_, T.fix_, torch.trunc_, torch.fix_),
            note="exact")  # fmt: skip
def trunc(context: Context, x: SharedTensor) -> SharedTensor:
    if not x.scale_bits:
        return x
    sign = sign_of(context, x)
    return signed(context, floored(context, signed(context, x, sign)), sign)


@implements("frac", torch.frac, T.frac, in_place=(T.frac_, torch.frac_), note="exact")
def frac(context: Context, x: SharedTensor) -> SharedTensor:
    return total(context, x, trunc(context, x), -1)


MOST_DECIMALS = 18


@implements("round", torch.round, T.round, torch.special.round, in_place=(T.round_, torch.round_),
            note="exact, half to even; decimals >= 0")  # fmt: skip
def round_(context: Context, x: SharedTensor, *, decimals: int = 0) -> torch.Tensor:
    if decimals < 0:
        refuse("rounding to tens or hundreds", "divide, round and multiply")
    if decimals > MOST_DECIMALS:
        refuse(f"rounding to {decimals} decimals", f"take at most {MOST_DECIMALS}, the ring has no more")
    if decimals:
        return torch.round(x * 10**decimals) / 10**decimals
    if not x.scale_bits:
        return x
    x = fitted(context, x, CAPACITY / 2)
    half = 1 << (x.scale_bits - 1)
    up = floored(context, x.like(x.shares + half, bound=None if x.bound is None else x.bound + half))
    down = floored(context, x.like(-x.shares + half, bound=None if x.bound is None else x.bound + half))
    tie = up.like(up.shares + down.shares, 0, 1.0)  # 1 where both halves are as near
    halved = floored(context, up.like(up.shares, 1, up.bound))
    odd = up.like(up.shares - halved.shares * 2, 0, 1.0)
    return total(context, up, bilinear(context, torch.mul, tie, odd), -1)


def divided(context: Context, x: Any, y: Any) -> tuple[SharedTensor, SharedTensor]:
    """floor(x / y) and x - floor(x / y) y, of the operands as they are encoded.

    Raises:
        ArgumentError: division by a public zero.
    """
    whole = not any(v.dtype.is_floating_point if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (x, y))
    x = summand(context, x)
    y = summand(context, y) if is_secret(y) else y
    _no_public_zero(y)
    quotient, rest = _step(context, x, y, whole)
    most = CAPACITY / (2.0 if whole else 2.0 ** (context.frac_bits + 1))
    quotient = quotient.bounded(most) if quotient.bound is None else fitted(context, quotient, most)
    if not isinstance(y, SharedTensor):  # of a secret divisor the plain quotient is below 2^16
        more, rest = _step(context, rest, y, whole)
        quotient = total(context, quotient, more)
        require(context, more, -LARGEST, LARGEST)
    sign = sign_of(context, y) if isinstance(y, SharedTensor) else torch.as_tensor(y).sign().to(torch.int64)
    below = complement(context, not_negative(context, signed(context, rest, sign))).bounded(1.0)
    back = bilinear(context, torch.mul, below, y)
    return total(context, quotient, below, -1), total(context, rest, back)


def _no_public_zero(y: Any) -> None:
    if not is_secret(y) and not bool((torch.as_tensor(y) != 0).all()):
        raise ArgumentError("division by zero")


def _step(context: Context, x: SharedTensor, y: Any, whole: bool) -> tuple[SharedTensor, SharedTensor]:
    """The plain quotient rounded to a whole number, and what it leaves."""
    plain = torch.div(typed(x, torch.int64 if whole else torch.float32), y)
    found = floored(context, total(context, plain, 0.5))
    product = bilinear(context, torch.mul, found, y)
    return found, total(context, x, product, -1)


def _reflected(func: Any) -> Any:
    return lambda context, x, y: func(context, y, x)


@implements("floor_divide", torch.floor_divide, T.floor_divide, T.__floordiv__,
            in_place=(T.floor_divide_,),
            note="exact on encoded values; |quotient| < 2^16, by a public divisor < 2^34")  # fmt: skip
def floor_divide(context: Context, x: Any, y: Any) -> SharedTensor:
    return divided(context, x, y)[0]


@implements("remainder", torch.remainder, T.remainder, T.__mod__, in_place=(T.remainder_, T.__imod__),
            note="as floor_divide; by a public fraction error 2^-21 |quotient|")  # fmt: skip
def remainder(context: Context, x: Any, y: Any) -> SharedTensor:
    return divided(context, x, y)[1]


implements("floor_divide", T.__rfloordiv__)(_reflected(floor_divide))
implements("remainder", T.__rmod__)(_reflected(remainder))


def _towards_zero(context: Context, x: Any, y: Any) -> tuple[SharedTensor, SharedTensor]:
    """The quotient without its fraction, and what it leaves, which has the sign of x."""
    _no_public_zero(y)
    x = summand(context, x)
    sign = sign_of(context, x)
    if isinstance(y, (int, float)):
        of_divisor, size = (-1 if y < 0 else 1), abs(y)
    elif is_secret(y):
        y = summand(context, y)
        of_divisor = sign_of(context, y)
        size = signed(context, y, of_divisor)
    else:
        of_divisor, size = torch.where(y < 0, -1, 1), y.abs()
    quotient, rest = divided(context, signed(context, x, sign), size)
    return signed(context, signed(context, quotient, sign), of_divisor), signed(context, rest, sign)


@implements("fmod", torch.fmod, T.fmod, in_place=(T.fmod_,), note="as remainder")
def fmod(context: Context, x: Any, y: Any) -> SharedTensor:
    return _towards_zero(context, x, y)[1]


def rounded_quotient(context: Context, x: Any, y: Any, rounding_mode: str) -> SharedTensor:
    """torch.div with a rounding mode."""
    return divided(context, x, y)[0] if rounding_mode == "floor" else _towards_zero(context, x, y)[0]
