"""Rounding: floor, ceil, trunc, round, and quotients with remainder.

A floor is exact: half a unit less, rounded half up. A rounded quotient is computed from the plain one, whose error is
below 1/2, and corrected by the sign of the remainder, which is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..backend import MAX_SHIFT
from ..errors import ArgumentError, FixedPointRangeError
from ..ring import encode
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import (
    CAPACITY,
    check_fits,
    is_secret,
    local_map,
    refuse,
    require,
    round_scale,
    signed_sum,
    summand,
    with_dtype,
)
from .compare import complement, not_negative
from .linear import bilinear

T = torch.Tensor
LARGEST = 2.0**17
"""The error of plain quotients below this is less than 1/4: 2^-19 of the quotient, and the dividend's last place."""


def floor_value(context: Context, x: SharedTensor) -> SharedTensor:
    """The whole number below, without fraction bits."""
    while x.scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits)
        half = 1 << (shift - 1)
        x = check_fits(context, x, CAPACITY - half)
        bound = None if x.bound is None else (x.bound + half) / 2.0**shift + 1
        x = x.like(context.backend.truncate(x.shares - half, shift), x.scale_bits - shift, bound)
    return x


def sign_of(context: Context, x: SharedTensor) -> SharedTensor:
    """1 or -1 as a whole number; 1 of zero."""
    bit = not_negative(context, x)
    return x.like(bit.shares * 2 - 1, 0, 1.0)


def apply_sign(context: Context, x: SharedTensor, sign: Any) -> SharedTensor:
    """x times signs."""
    made = bilinear(context, torch.mul, x, sign)
    return made.bounded(x.bound)


@implements("floor", torch.floor, T.floor, in_place=(T.floor_, torch.floor_), note="exact")
def floor(context: Context, x: SharedTensor) -> SharedTensor:
    return floor_value(context, x)


@implements("ceil", torch.ceil, T.ceil, in_place=(T.ceil_, torch.ceil_), note="exact")
def ceil(context: Context, x: SharedTensor) -> SharedTensor:
    return local_map(context, torch.neg, floor_value(context, local_map(context, torch.neg, x)))


@implements("trunc", torch.trunc, T.trunc, torch.fix, T.fix, in_place=(T.trunc_, T.fix_, torch.trunc_, torch.fix_),
            note="exact")  # fmt: skip
def trunc(context: Context, x: SharedTensor) -> SharedTensor:
    if not x.scale_bits:
        return x
    sign = sign_of(context, x)
    return apply_sign(context, floor_value(context, apply_sign(context, x, sign)), sign)


def convert(context: Context, x: SharedTensor, dtype: torch.dtype) -> Any:
    """x in another dtype. Fractions become whole numbers by trunc.

    A number that the dtype does not hold ends in a range error, where torch would wrap it.
    """
    if dtype.is_floating_point or dtype.is_complex or dtype == x.dtype:
        return x
    if dtype == torch.bool:
        return x != 0
    most, known = torch.iinfo(dtype), x.bound
    if x.scale_bits:
        x = round_scale(context, x, 0) if x.is_integral else trunc(context, x)
    elif x.dtype == torch.bool or (torch.can_cast(x.dtype, dtype) and torch.iinfo(x.dtype).bits <= most.bits):
        return x
    whole = with_dtype(x, torch.int64)
    if most.bits < 63 and (known is None or x.bound is None or x.bound > most.max or not most.min):
        require(context, whole, most.min, most.max + 1)
        if whole.bound is not None:
            whole.bound = min(whole.bound, most.max + 1.0)
    return with_dtype(whole, dtype)


@implements("frac", torch.frac, T.frac, in_place=(T.frac_, torch.frac_), note="exact")
def frac(context: Context, x: SharedTensor) -> SharedTensor:
    return signed_sum(context, x, trunc(context, x), -1)


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
    x = check_fits(context, x, CAPACITY / 2)
    half = 1 << (x.scale_bits - 1)
    up = floor_value(context, x.like(x.shares + half, bound=None if x.bound is None else x.bound + half))
    down = floor_value(context, x.like(-x.shares + half, bound=None if x.bound is None else x.bound + half))
    tie = up.like(up.shares + down.shares, 0, 1.0)  # 1 at half a unit
    halved = floor_value(context, up.like(up.shares, 1, up.bound))
    odd = up.like(up.shares - halved.shares * 2, 0, 1.0)
    return signed_sum(context, up, bilinear(context, torch.mul, tie, odd), -1)


def floor_divmod(context: Context, x: Any, y: Any) -> tuple[SharedTensor, SharedTensor]:
    """floor(x / y) and x - floor(x / y) y, of the operands as they are encoded.

    The remainder is checked where no bound proves it: if its magnitude is not below that of y, there is no result.

    Raises:
        ArgumentError: division by a public zero.
        UnsupportedOpError: fractions, at so few fraction bits that no plain quotient is near.
    """
    whole = not any(v.dtype.is_floating_point if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (x, y))
    if isinstance(y, bool) or (type(y) is torch.Tensor and y.dtype == torch.bool):
        y = y * 1
    x = summand(context, x)
    y = summand(context, y) if is_secret(y) else y
    _no_public_zero(y)
    if whole and not isinstance(y, SharedTensor) and torch.as_tensor(y).numel() == 1:
        return _divmod_by_integer(context, x, y)
    quotient, rest = _quotient_step(context, x, y, whole)
    most = CAPACITY / (2.0 if whole else 2.0 ** (context.frac_bits + 1))
    quotient = quotient.bounded(most) if quotient.bound is None else check_fits(context, quotient, most)
    for _ in range(_further_steps(context, isinstance(y, SharedTensor))):
        more, rest = _quotient_step(context, rest, y, whole)
        quotient = signed_sum(context, quotient, more)
        require(context, more, -LARGEST, LARGEST)
    if isinstance(y, SharedTensor):
        sign = sign_of(context, y)
        size = apply_sign(context, y, sign)
    else:
        sign, size = _divisor_tensor(y).sign().to(torch.int64), _divisor_tensor(y).abs()
    left = apply_sign(context, rest, sign)
    require(context, signed_sum(context, left, size), 0.0)
    require(context, signed_sum(context, left, size, -1), None, 0.0)
    below = complement(context, not_negative(context, left)).bounded(1.0)
    quotient = signed_sum(context, quotient, below, -1)
    quotient = quotient.bounded(most) if quotient.bound is None else check_fits(context, quotient, most)
    return quotient, signed_sum(context, rest, _times_divisor(context, below, y))


def _further_steps(context: Context, secret: bool) -> int:
    """The number of further quotients, of remainders, after which the error is below 1/4.

    A plain quotient by a public divisor has a relative error of 2^(1 - f), for quotients below 2^34. One by a secret
    divisor has an error of about 2^-f of x: below 1/4 at 18 fraction bits, and with fewer mostly after one more step.
    """
    if secret:
        return int(context.frac_bits < 18)
    if context.frac_bits < 4:
        refuse(
            f"rounding the quotient of fractions, or of a tensor of divisors, at {context.frac_bits} fraction bits",
            "divide whole numbers by one whole number, or use 4 fraction bits or more",
        )
    return max(1, math.ceil(36 / (context.frac_bits - 1)) - 1)


def _divmod_by_integer(context: Context, x: SharedTensor, y: Any) -> tuple[SharedTensor, SharedTensor]:
    """`floor_divmod` of whole numbers by a public one: exact for all x of the ring, at any number of fraction bits.

    The upper 30 bits of x are multiplied by those of 1 / |y|, and those of the remainder likewise, until the error is
    below 1/4.
    """
    _largest_divisor(y)
    divisor = int(y)
    size, sign = abs(divisor), 1 if divisor > 0 else -1
    deep = 30 + size.bit_length()
    factor = (1 << deep) // size
    rest = x.like(x.shares * sign, 0, x.bound)
    quotient = x.like(x.shares * 0, 0, 0.0)
    last = size == 1
    if last:
        quotient, rest = rest, quotient
    while not last and (rest.bound is None or rest.bound >= size):
        bits = math.frexp(CAPACITY if rest.bound is None else rest.bound)[1]
        shift = max(0, bits - 30)
        # In units of the quotient: the dropped bits are below 2^shift, and 1 / |y| in `factor` is short of less than
        # 2^-deep, which for a rest below 2^bits is less than 2^(bits - 30) / |y|.
        error = ((1 << shift if shift else 0) + 2.0 ** (bits - 30)) / size
        last = error <= 1 / 4
        upper = floor_value(context, x.like(rest.shares, shift, rest.bound))
        half = 1 << (deep - shift - 1) if last else 0
        plain = x.like(upper.shares * factor + half, deep - shift, 2.0 ** min(bits, 30) * factor + half)
        found = floor_value(context, plain)
        quotient = x.like(quotient.shares + found.shares, 0, CAPACITY / size)
        rest = x.like(rest.shares - found.shares * size, 0, size * (error + (1 / 2 if last else 1)))
    # The last estimate was rounded to the nearest, so it is the quotient or one more, which leaves a negative rest.
    below = complement(context, not_negative(context, rest)).bounded(1.0)
    quotient, rest = (
        signed_sum(context, quotient, below, -1),
        signed_sum(context, rest, x.like(below.shares * size, 0, 1.0 * size)),
    )
    return quotient, x.like(rest.shares * sign, 0, float(size))


def _no_public_zero(y: Any) -> None:
    if not is_secret(y) and not bool((torch.as_tensor(y) != 0).all()):
        raise ArgumentError("division by zero")


def _quotient_step(context: Context, x: SharedTensor, y: Any, whole: bool) -> tuple[SharedTensor, SharedTensor]:
    """The plain quotient, rounded to a whole number, and its remainder."""
    plain = torch.div(with_dtype(x, torch.int64 if whole else torch.float32), y)
    found = floor_value(context, signed_sum(context, plain, 0.5))
    return found, signed_sum(context, x, _times_divisor(context, found, y), -1)


def _divisor_tensor(y: Any) -> torch.Tensor:
    """A public divisor as a tensor; torch itself would make float32 of a number."""
    return torch.tensor(y, dtype=torch.float64) if isinstance(y, float) else torch.as_tensor(y)


def _largest_divisor(y: Any) -> float:
    """The largest magnitude of a public divisor.

    Raises:
        FixedPointRangeError: it is beyond the ring.
    """
    y = torch.as_tensor(y) if not isinstance(y, int) else y
    largest = float(abs(y)) if isinstance(y, int) else float(y.double().abs().max()) if y.numel() else 1.0
    if not largest < CAPACITY:
        raise FixedPointRangeError(f"a divisor of {largest:.3g} is beyond the number range; scale both operands down")
    return largest


def _times_divisor(context: Context, x: SharedTensor, y: Any) -> SharedTensor:
    """A whole number times the encoded divisor, exactly."""
    if isinstance(y, SharedTensor):
        return bilinear(context, torch.mul, x, y)
    y = _divisor_tensor(y)
    scale = context.frac_bits if y.is_floating_point() else 0
    largest = _largest_divisor(y) * 2.0**scale
    factor = encode(y, scale)
    x = check_fits(context, x, CAPACITY / max(1.0, largest))
    bound = None if x.bound is None else x.bound * largest
    return x.like(context.backend.moved(torch.mul, x.shares, factor), scale, bound)


def _reflected(func: Any) -> Any:
    return lambda context, x, y: func(context, y, x)


@implements("floor_divide", torch.floor_divide, T.floor_divide, T.__floordiv__,
            in_place=(T.floor_divide_,),
            note="exact on encoded values; |quotient| < 2^16, by a public divisor < 2^34", exact=False)  # fmt: skip
def floor_divide(context: Context, x: Any, y: Any) -> SharedTensor:
    return floor_divmod(context, x, y)[0]


@implements("remainder", torch.remainder, T.remainder, T.__mod__, in_place=(T.remainder_, T.__imod__),
            note="as floor_divide", exact=False)  # fmt: skip
def remainder(context: Context, x: Any, y: Any) -> SharedTensor:
    return floor_divmod(context, x, y)[1]


implements("floor_divide", T.__rfloordiv__)(_reflected(floor_divide))
implements("remainder", T.__rmod__)(_reflected(remainder))


def _truncated_divmod(context: Context, x: Any, y: Any) -> tuple[SharedTensor, SharedTensor]:
    """The quotient rounded towards zero, and the remainder, which has the sign of x."""
    _no_public_zero(y)
    x = summand(context, x)
    sign = sign_of(context, x)
    if isinstance(y, (int, float)):
        of_divisor, size = (-1 if y < 0 else 1), abs(y)
    elif is_secret(y):
        y = summand(context, y)
        of_divisor = sign_of(context, y)
        size = apply_sign(context, y, of_divisor)
    else:
        of_divisor, size = torch.where(y < 0, -1, 1), y.abs()
    quotient, rest = floor_divmod(context, apply_sign(context, x, sign), size)
    return apply_sign(context, apply_sign(context, quotient, sign), of_divisor), apply_sign(context, rest, sign)


@implements("fmod", torch.fmod, T.fmod, in_place=(T.fmod_,), note="as remainder", exact=False)
def fmod(context: Context, x: Any, y: Any) -> SharedTensor:
    return _truncated_divmod(context, x, y)[1]


def rounded_quotient(context: Context, x: Any, y: Any, rounding_mode: str) -> SharedTensor:
    """torch.div with a rounding mode."""
    return floor_divmod(context, x, y)[0] if rounding_mode == "floor" else _truncated_divmod(context, x, y)[0]
