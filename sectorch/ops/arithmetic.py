"""Sums and products of tensors, element by element."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from ..errors import ArgumentError, DtypeError
from ..mpc.multiply import square as square_protocol
from ..mpc.shares import each
from ..table import Context, Fixed, implements
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from .common import bilinear, fixed, local, refuse, scaled, settled, total

T = torch.Tensor


@implements("add", torch.add, T.add, T.__add__, T.__radd__, in_place=(T.add_, T.__iadd__), note="local")
def add(context: Context, x: Any, y: Any, *, alpha: float = 1) -> Fixed:
    if getattr(x, "dtype", None) == getattr(y, "dtype", None) == torch.bool:
        return fixed(torch.logical_or(x, y))
    return total(context, x, _times(y, alpha))


@implements("sub", torch.sub, torch.subtract, T.sub, T.subtract, T.__sub__, in_place=(T.sub_, T.__isub__), note="local")
def sub(context: Context, x: Any, y: Any, *, alpha: float = 1) -> Fixed:
    return total(context, x, _times(y, alpha), -1)


@implements("rsub", torch.rsub, T.__rsub__, note="local")
def rsub(context: Context, x: Any, y: Any, *, alpha: float = 1) -> Fixed:
    return total(context, y, _times(x, alpha), -1)


def _times(value: Any, alpha: float) -> Any:
    if alpha != 1 and isinstance(value, torch.Tensor) and not value.is_floating_point():
        value = value.to(torch.int64)  # torch multiplies in the dtype of the sum, where a byte does not overflow
    return value if alpha == 1 else value * alpha


@implements("neg", torch.neg, torch.negative, T.neg, T.negative, T.__neg__, in_place=(T.neg_,), note="local")
def neg(context: Context, x: SharedTensor) -> Fixed:
    return local(context, torch.neg, x)


@implements("positive", torch.positive, T.positive, T.__pos__, note="local")
def positive(context: Context, x: SharedTensor) -> Fixed:
    return fixed(x)


@implements("mul", torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__,
            in_place=(T.mul_, T.__imul__), note="1 round for two secrets")  # fmt: skip
def mul(context: Context, x: Any, y: Any) -> Fixed:
    if x is y:
        return square(context, x)
    return bilinear(context, torch.mul, x, y)


@implements("div", torch.div, torch.divide, torch.true_divide, T.div, T.divide, T.true_divide, T.__truediv__,
            in_place=(T.div_, T.__itruediv__), note="any divisor; a shared one with 2^-12 <= |y| < 2^20")  # fmt: skip
def div(context: Context, x: Any, y: Any, *, rounding_mode: str | None = None) -> Fixed:
    if rounding_mode is not None:
        refuse("division that rounds", "use plain division")
    if isinstance(y, SharedTensor):
        return fixed(x * torch.reciprocal(y))
    if isinstance(y, numbers.Complex) and not isinstance(y, numbers.Real):
        raise DtypeError("division by a complex number is not supported on secret tensors")
    if isinstance(y, (int, float)):
        if y == 0:
            raise ArgumentError("division by zero")
        return scaled(context, fixed(x), 1.0 / y)
    if not isinstance(y, PrivateTensor):
        y = torch.as_tensor(y).to(torch.float64)
    return bilinear(context, torch.mul, x, 1.0 / y)


@implements("div", T.__rdiv__, T.__rtruediv__)
def rdiv(context: Context, x: Any, y: Any) -> Fixed:
    return fixed(torch.div(y, x) if isinstance(y, torch.Tensor) else torch.reciprocal(x) * y)


@implements("pow", T.__rpow__)
def rpow(context: Context, x: Any, base: Any) -> Fixed:
    return power(context, base, x)


@implements("square", torch.square, T.square, in_place=(T.square_,), note="exact after rounding to f bits; 1 round")
def square(context: Context, x: SharedTensor) -> Fixed:
    value = settled(context, fixed(x), 0)
    return Fixed(square_protocol(context.net, value.shares), 2 * value.scale_bits)


@implements(
    "pow",
    torch.pow,
    T.pow,
    T.__pow__,
    torch.float_power,
    T.float_power,
    note="whole exponents anywhere; others as exp(y log x) for x > 0",
)
def power(context: Context, x: Any, exponent: Any) -> Fixed:
    if not isinstance(x, SharedTensor):
        if not isinstance(x, (int, float)) or x <= 0:
            refuse("pow with a base that is neither secret nor a positive number", "use exp and log")
        return fixed(torch.exp(exponent * math.log(x)))
    public = isinstance(exponent, torch.Tensor) and not isinstance(exponent, SecretTensor)
    if public and bool((exponent == exponent.to(torch.float64).round()).any()):
        refuse("whole exponents in a tensor", "they are exact for negative bases too: use x ** n with a number")
    if not isinstance(exponent, (int, float)):
        return fixed(torch.exp(torch.log(x) * exponent))
    if exponent == -1:
        return fixed(torch.reciprocal(x))
    if exponent == 0.5:
        return fixed(torch.sqrt(x))
    if exponent == -0.5:
        return fixed(torch.rsqrt(x))
    if exponent != int(exponent):
        return fixed(torch.exp(torch.log(x) * exponent))
    n = int(exponent)
    if n < 0:
        return fixed(torch.reciprocal(x) ** -n)
    if n == 0:
        ones = 1 << x.scale_bits
        zeros = each(context.net, torch.zeros_like, x.shares)
        net = context.net
        return Fixed(type(zeros)(net.locally(net.A, lambda v: v + ones, zeros.A), zeros.S), x.scale_bits)
    result, factor = None, x
    while True:
        if n & 1:
            result = factor if result is None else result * factor
        n >>= 1
        if not n:
            return fixed(result)
        factor = factor.square()


@implements("addcmul", torch.addcmul, T.addcmul, note="1 round for two secrets")
def addcmul(context: Context, x: Any, a: Any, b: Any, *, value: float = 1) -> Fixed:
    return fixed(x + (a * b) * value)


@implements("lerp", torch.lerp, T.lerp, note="1 round for secret weights")
def lerp(context: Context, start: Any, end: Any, weight: Any) -> Fixed:
    return fixed(start + (end - start) * weight)
