"""Sums and products of tensors, element by element."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import torch

from ..errors import ArgumentError, DtypeError
from ..ring import HEADROOM_BITS, check_encodable, encode, range_limit
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from ..tensor.table import Context, implements, stepwise
from .common import (  # fmt: skip
    SLACK_BITS,
    add_values,
    as_factor,
    as_floating,
    encoded_public,
    is_secret,
    local_map,
    refuse,
    require,
    round_scale,
    signed_sum,
    small_public_number,
    summand,
    within_domain,
)
from .linear import bilinear, times_encoded, times_number
from .reduction import mean_of_sum
from .rounding import rounded_quotient
from .smooth import fractional_power, quotient, small_over

T = torch.Tensor
SIZE_BITS = 8


@implements("add", torch.add, T.add, T.__add__, T.__radd__, in_place=(T.add_, T.__iadd__), note="local")
def add(context: Context, x: Any, y: Any, *, alpha: float = 1) -> torch.Tensor:
    if getattr(x, "dtype", None) == getattr(y, "dtype", None) == torch.bool:
        return torch.logical_or(x, y)
    return signed_sum(context, x, _times(y, alpha))


@implements(
    "sub",
    torch.sub,
    torch.subtract,
    T.sub,
    T.subtract,
    T.__sub__,
    in_place=(T.sub_, T.subtract_, T.__isub__),
    note="local",
)
def sub(context: Context, x: Any, y: Any, *, alpha: float = 1) -> SharedTensor:
    _check_not_logical(x, y)
    return signed_sum(context, x, _times(y, alpha), -1)


@implements("rsub", torch.rsub, T.__rsub__, note="local")
def rsub(context: Context, x: Any, y: Any, *, alpha: float = 1) -> SharedTensor:
    _check_not_logical(x, y)
    return signed_sum(context, y, _times(x, alpha), -1)


def _check_not_logical(*operands: Any) -> None:
    if all(isinstance(v, bool) or (isinstance(v, torch.Tensor) and v.dtype == torch.bool) for v in operands):
        raise DtypeError("a difference of two bool values is not supported; use ^ or logical_xor")


def _times(value: Any, alpha: float) -> Any:
    if alpha != 1 and isinstance(value, torch.Tensor) and not value.is_floating_point():
        value = value.to(torch.int64)  # torch multiplies in the dtype of the sum, where a byte does not overflow
    return value if alpha == 1 else value * alpha


@implements("neg", torch.neg, torch.negative, T.neg, T.negative, T.__neg__, in_place=(T.neg_, T.negative_),
            note="local", excess=0.0)  # fmt: skip
def neg(context: Context, x: SharedTensor) -> SharedTensor:
    return local_map(context, torch.neg, x)


@implements("positive", torch.positive, T.positive, T.__pos__, note="local", excess=0.0)
def positive(context: Context, x: SharedTensor) -> SharedTensor:
    return x


@implements("mul", torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__,
            in_place=(T.mul_, T.multiply_, T.__imul__), note="1 round for two secrets")  # fmt: skip
def mul(context: Context, x: Any, y: Any) -> SharedTensor:
    if x is y:
        return square(context, x)
    for value, factor in ((x, y), (y, x)):
        if isinstance(value, SharedTensor) and value.given and _small(factor):
            return _by_magnitude(context, value, factor)
    return bilinear(context, torch.mul, x, y, fine=_is_fine(x, y) or _is_fine(y, x))


def _small(factor: Any) -> bool:
    """Whether a public tensor has entries so small that f fraction bits lose a part of their digits."""
    if not isinstance(factor, torch.Tensor) or isinstance(factor, SecretTensor) or factor.is_meta:
        return False
    sizes = factor.abs() if factor.is_floating_point() else factor.new_ones(0)
    return bool(((sizes != 0) & (sizes < 2.0**-SIZE_BITS)).any()) and bool((sizes < 2.0**SIZE_BITS).all())


def _is_fine(weight: Any, x: Any) -> bool:
    """Whether a private factor of x gets 2 f fraction bits.

    An inverse does, which may be small beside a large x, and so does a factor of an input as it was given. Neither
    depends on the factor's content.
    """
    return isinstance(weight, PrivateTensor) and isinstance(x, SharedTensor) and (weight.is_inverse or x.given)


@implements("div", torch.div, torch.divide, torch.true_divide, T.div, T.divide, T.true_divide, T.__truediv__,
            in_place=(T.div_, T.divide_, T.true_divide_, T.__itruediv__),
            note="any divisor; result < 2^16; error 2e-6 + 1e-6 / |y|, by shares 4e-6 + 2e-6 |result|",
            exact=False)  # fmt: skip
def div(context: Context, x: Any, y: Any, *, rounding_mode: str | None = None) -> SharedTensor:
    if rounding_mode is not None:
        return rounded_quotient(context, x, y, rounding_mode)
    if isinstance(y, SharedTensor):
        numerator = small_public_number(context, x)
        if numerator is None:
            return quotient(context, summand(context, x), y)
        return small_over(context, numerator, y.expand(torch.broadcast_shapes(x.shape, y.shape)))
    if isinstance(y, numbers.Complex) and not isinstance(y, numbers.Real):
        raise DtypeError("division by a complex number is not supported on secret tensors")
    if isinstance(y, (int, float)):
        if y == 0:
            raise ArgumentError("division by zero")
        counted = 1 < y < 2**20 and y == int(y) and x.scale_bits > context.frac_bits
        return mean_of_sum(context, x, int(y)) if counted else times_number(context, x, 1.0 / y)
    if not isinstance(y, PrivateTensor):
        y = torch.as_tensor(y).to(torch.float64)
        if isinstance(x, SharedTensor):
            inverse = 1.0 / y
            check_encodable(inverse, context.frac_bits, "a public operand")
            return _by_magnitude(context, x, inverse)
    return bilinear(context, torch.mul, x, 1.0 / y, fine=True)


def _by_magnitude(context: Context, x: SharedTensor, factors: torch.Tensor) -> SharedTensor:
    """x times a public tensor of factors that keep their significant bits: one product for each order of magnitude.

    An order spans eight powers of two. If the range leaves room for eight more bits, each factor has at least f
    significant bits.
    """
    if factors.is_meta or not factors.numel():
        return bilinear(context, torch.mul, x, factors)
    sizes = torch.frexp(factors.to(torch.float64))[1]
    value = as_factor(context, as_floating(x))
    room = HEADROOM_BITS - 1 - context.scheme.activation_bits - value.scale_bits
    bits = max(context.frac_bits, min(context.frac_bits + SIZE_BITS, room))
    top, parts = int(sizes.max()), []
    for high in range(top, int(sizes.min()) - 1, -SIZE_BITS):
        here = (sizes <= high) & (sizes > high - SIZE_BITS)
        if bool(here.any()):
            part = encode(torch.where(here, factors, 0.0) * 2.0**-high, bits)
            parts.append(
                times_number(context, times_encoded(context, torch.mul, value, part, bits, torch.abs), 2.0**high)
            )
    if len(parts) == 1:
        return parts[0]
    parts = [round_scale(context, part, context.frac_bits + SLACK_BITS) for part in parts]
    return functools.reduce(lambda a, b: add_values(context, a, b), parts)


@implements("div", T.__rdiv__, T.__rtruediv__)
def rdiv(context: Context, x: Any, y: Any) -> torch.Tensor:
    if isinstance(y, torch.Tensor):
        return torch.div(y, x)
    numerator = small_public_number(context, y)
    return small_over(context, numerator, x) if numerator else quotient(context, _constant(context, x, y), x)


def _constant(context: Context, x: SharedTensor, value: float) -> SharedTensor:
    """A public number in the shape of x."""
    number = int(encoded_public(context, float(value), context.frac_bits))
    return x.like(context.backend.each(torch.zeros_like, x.shares) + number, context.frac_bits)


@implements("pow", T.__rpow__,
            note="result < 2^16; whole exponents exact; others for x >= 0, error 2e-6 + 1e-5 |result|",
            exact=False)  # fmt: skip
def rpow(context: Context, x: Any, base: Any) -> torch.Tensor:
    return power(context, base, x)


@implements("square", torch.square, T.square, in_place=(T.square_,),
            note="|x| < 2^11; exact after rounding to f bits; 1 round")  # fmt: skip
def square(context: Context, x: SharedTensor) -> SharedTensor:
    value = as_factor(context, x, 0)
    require(context, value, *_roots(context, 2))
    most = None if value.bound is None else min(value.bound**2, 4.0 ** (value.scale_bits) * _roots(context, 2)[1] ** 2)
    return value.like(context.backend.square(value.shares), 2 * value.scale_bits, most)


def _roots(context: Context, n: int) -> tuple[float, float]:
    """The interval in which the n-th power stays in the ring, with 2 f fraction bits."""
    root = 2.0 ** ((HEADROOM_BITS - 2 * context.frac_bits) / n)
    return -root, root


@implements("pow", torch.pow, T.pow, T.__pow__, torch.float_power, T.float_power)
def power(context: Context, x: Any, exponent: Any) -> torch.Tensor:
    if not isinstance(x, SharedTensor):
        x = x.item() if not is_secret(x) and isinstance(x, torch.Tensor) and not x.dim() else x
        if isinstance(x, int) and isinstance(exponent, SharedTensor) and not exponent.dtype.is_floating_point:
            return _powers_of(context, x, exponent)
        if not isinstance(x, (int, float)) or x <= 0:
            refuse("pow with a base that is neither secret nor a positive number", "use exp and log")
        return torch.exp(_exponent(context, exponent, math.log(x)))
    public = isinstance(exponent, torch.Tensor) and not isinstance(exponent, SecretTensor)
    if public and exponent.numel() and bool((exponent == exponent.flatten()[0]).all()):
        return torch.pow(x.expand(torch.broadcast_shapes(x.shape, exponent.shape)), exponent.flatten()[0].item())
    if public and bool((exponent == exponent.to(torch.float64).round()).any()):
        refuse("whole exponents beside others in a tensor", "use x ** n with a number, which takes negative bases too")
    if not isinstance(exponent, (int, float)):
        return fractional_power(context, x, exponent)
    if exponent == -1:
        return torch.reciprocal(x)
    if exponent == 0.5:
        return torch.sqrt(x)
    if exponent == -0.5:
        return torch.rsqrt(x)
    if exponent != int(exponent):
        return fractional_power(context, x, exponent)
    n = int(exponent)
    if n < 0:
        return torch.reciprocal(x) ** -n
    if n == 0:
        return _constant(context, x, 1.0)
    return _whole_power(context, x, n)


def _powers_of(context: Context, base: int, exponent: Any) -> torch.Tensor:
    """A public whole number to secret whole powers, by a comparison with each exponent that the range has.

    A negative power is zero, as in torch.
    """
    exponent = exponent.to(torch.int64) if exponent.dtype == torch.bool else exponent
    if abs(base) < 2:
        return {0: exponent == 0, 1: exponent * 0 + 1, -1: 1 - 2 * (exponent % 2)}[base].to(exponent.dtype)
    powers = [1]
    while abs(powers[-1] * base) < range_limit(context.frac_bits):
        powers.append(powers[-1] * base)
    require(context, exponent, high=len(powers))
    found = exponent.unsqueeze(-1) == torch.arange(len(powers))
    return (found * torch.tensor(powers)).sum(-1).to(exponent.dtype)


def _shifted(context: Context, x: Any, bits: Any, left: bool) -> torch.Tensor:
    if is_secret(bits) or not is_secret(x):
        refuse("a shift by a secret number of places", "x * 2 ** n, or a look-up in a table of powers")
    places = torch.as_tensor(bits)
    if not bool(((places >= 0) & (places < HEADROOM_BITS)).all()):
        raise ArgumentError(f"a shift is by 0 to {HEADROOM_BITS - 1} places")
    factor = 1 << bits if isinstance(bits, int) else 2 ** places.to(torch.int64)
    if left:
        return (x * factor).to(torch.int64 if x.dtype == torch.bool else x.dtype)
    return x / factor if x.is_floating_point() else torch.div(x, factor, rounding_mode="floor")


@implements("bitwise_left_shift", torch.bitwise_left_shift, T.bitwise_left_shift, T.__lshift__,
            note="public places; as mul")  # fmt: skip
@stepwise
def left_shift(context: Context, x: Any, bits: Any) -> torch.Tensor:
    return _shifted(context, x, bits, True)


@implements("bitwise_right_shift", torch.bitwise_right_shift, T.bitwise_right_shift, T.__rshift__,
            note="public places; as floor_divide")  # fmt: skip
@stepwise
def right_shift(context: Context, x: Any, bits: Any) -> torch.Tensor:
    return _shifted(context, x, bits, False)


def _exponent(context: Context, x: SharedTensor, factor: float) -> SharedTensor:
    """x times a public factor, for exp. Values far below zero may be beyond the activation limit."""
    value = within_domain(context, as_factor(context, x))
    return as_floating(times_number(context, value.bounded(None) if abs(factor) < 32 else value, factor))


def _whole_power(context: Context, x: SharedTensor, n: int) -> SharedTensor:
    """x^n by squaring. Every intermediate power stays in the ring if x^n does."""
    if n > 1:
        x = as_factor(context, x, 0)
        require(context, x, *_roots(context, n))
    result, factor = None, x
    while True:
        if n & 1:
            result = factor if result is None else bilinear(context, torch.mul, result, factor)
        n >>= 1
        if not n and result is not None:
            most = None if x.bound is None else 2.0 ** (HEADROOM_BITS - 2 * context.frac_bits + result.scale_bits)
            return result if result is x else result.bounded(most)
        value = as_factor(context, factor, 0)
        factor = value.like(context.backend.square(value.shares), 2 * value.scale_bits)


@implements("addcmul", torch.addcmul, T.addcmul, note="1 round for two secrets")
def addcmul(context: Context, x: Any, a: Any, b: Any, *, value: float = 1) -> SharedTensor:
    return x + (a * b) * value


@implements("lerp", torch.lerp, T.lerp, note="1 round for secret weights")
def lerp(context: Context, start: Any, end: Any, weight: Any) -> SharedTensor:
    return start + (end - start) * weight
