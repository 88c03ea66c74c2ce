"""Complex secret tensors: each function is computed on their real and imaginary parts."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ..errors import DtypeError
from ..tensor import ComplexShared, PrivateTensor, SharedTensor
from ..tensor.table import Context, implements, of_complex
from . import indexing, structure
from .common import as_floating, refuse, summand
from .structure import property_getter

T = torch.Tensor


def split(value: Any) -> tuple[Any, Any]:
    """Real and imaginary part of any operand; None in the place of an imaginary part that is zero."""
    if isinstance(value, ComplexShared):
        return value.parts
    if isinstance(value, torch.Tensor):
        if not value.is_complex():
            return value, None
        if isinstance(value, PrivateTensor):
            both = torch.view_as_real(value)
            return both[..., 0], both[..., 1]
        return value.real.contiguous(), value.imag.contiguous()
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return float(value.real), float(value.imag)
    return value, None


def join_parts(context: Context, re: Any, im: Any) -> ComplexShared:
    """The complex tensor of two parts. At least one is shared; one may be None."""
    types = [v.dtype for v in (re, im) if isinstance(v, torch.Tensor)]
    if torch.bfloat16 in types:
        raise DtypeError("complex numbers have parts of torch.float16, float32 or float64, not of bfloat16")
    dtype = types[0]
    shape = torch.broadcast_shapes(*(v.shape for v in (re, im) if isinstance(v, torch.Tensor)))
    parts = [torch.zeros((), dtype=dtype) if v is None else v for v in (re, im)]
    parts = [v if isinstance(v, torch.Tensor) else torch.tensor(float(v), dtype=dtype) for v in parts]
    return ComplexShared(*(as_floating(summand(context, v if v.shape == shape else v.expand(shape))) for v in parts))


def in_parts(context: Context, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """func on the real and on the imaginary parts of all operands, for a linear func without other summands."""

    def part(at: int) -> Any:
        take: Any = lambda leaf: leaf.parts[at] if isinstance(leaf, ComplexShared) else leaf
        return func(*pytree.tree_map(take, args), **pytree.tree_map(take, kwargs))

    re: Any = part(0)
    im: Any = part(1)
    if isinstance(re, (list, tuple)):
        return [ComplexShared(as_floating(a), as_floating(b)) for a, b in zip(re, im, strict=True)]
    return ComplexShared(as_floating(re), as_floating(im))


def _linear(func: Callable) -> Callable:
    def handler(context: Context, *args: Any, **kwargs: Any) -> Any:
        return in_parts(context, func, *args, **kwargs)

    return handler


LINEAR = (
    *(f for table in (structure.VIEWS, structure.COPIES, structure.MANY) for fs in table.values() for f in fs),
    T.__iter__, torch.reshape, T.reshape, T.view, torch.flatten, T.flatten, T.ravel, torch.ravel, torch.unflatten,
    T.unflatten, T.__getitem__, T.contiguous, torch.neg, T.neg, T.__neg__, torch.negative, T.negative, torch.sum,
    T.sum, torch.mean, T.mean, torch.cumsum, T.cumsum, torch.fft.fftshift, torch.fft.ifftshift, torch.trace, T.trace,
)  # fmt: skip
_CONJUGATING = (T.adjoint, torch.adjoint, property_getter("mH"), property_getter("H"))
for _function in LINEAR:
    if _function not in _CONJUGATING:
        of_complex(_function)(_linear(_function))
for _function in (torch.zeros_like, torch.ones_like, torch.full_like, T.new_zeros, T.new_ones, T.new_full):
    of_complex(_function)(structure.constant(_function))


@of_complex(*_CONJUGATING)
def adjoint(context: Context, x: ComplexShared) -> ComplexShared:
    return conj(context, in_parts(context, property_getter("mT"), x))


@of_complex(torch.conj, T.conj, torch.conj_physical, T.conj_physical)
def conj(context: Context, x: ComplexShared) -> ComplexShared:
    return ComplexShared(x.parts[0], -x.parts[1])


@of_complex(torch.resolve_conj, T.resolve_conj, torch.resolve_neg, T.resolve_neg)
def identity(context: Context, x: ComplexShared) -> ComplexShared:
    return x


@of_complex(torch.real, property_getter("real"))
def real_part(context: Context, x: ComplexShared) -> SharedTensor:
    return x.parts[0]


@implements("imag", torch.imag, property_getter("imag"), view=True, note="local; of a complex tensor")
@of_complex(torch.imag, property_getter("imag"))
def imag_part(context: Context, x: ComplexShared) -> SharedTensor:
    return x.parts[1]


@implements("view_as_real", torch.view_as_real, view=True, note="local; of a complex tensor")
@of_complex(torch.view_as_real)
def view_as_real(context: Context, x: ComplexShared) -> torch.Tensor:
    return torch.stack(x.parts, -1)


@implements("view_as_complex", torch.view_as_complex, view=True, note="local; gives a complex tensor")
@of_complex(torch.view_as_complex)
def view_as_complex(context: Context, x: SharedTensor) -> ComplexShared:
    return ComplexShared(x[..., 0], x[..., 1])


@implements("complex", torch.complex, note="local; gives a complex tensor")
@of_complex(torch.complex)
def complex_of(context: Context, real: Any, imag: Any) -> ComplexShared:
    return join_parts(context, real, imag)


@implements("polar", torch.polar, note="as cos, times the magnitude; gives a complex tensor", exact=False)
@of_complex(torch.polar)
def polar(context: Context, abs: Any, angle: Any) -> ComplexShared:
    return join_parts(context, abs * torch.cos(angle), abs * torch.sin(angle))


@implements("angle", torch.angle, T.angle,
            note="pi where a real number is below zero; of a complex one as atan2", exact=False)  # fmt: skip
def angle_of_real(context: Context, x: SharedTensor) -> torch.Tensor:
    return (x < 0).to(x.dtype if x.dtype.is_floating_point else torch.float32) * torch.pi


@of_complex(torch.angle, T.angle)
def angle(context: Context, x: ComplexShared) -> torch.Tensor:
    return torch.atan2(x.parts[1], x.parts[0])


@of_complex(torch.abs, T.abs, torch.absolute, T.absolute, T.__abs__)
def magnitude(context: Context, x: ComplexShared) -> torch.Tensor:
    return torch.hypot(*x.parts)


def _sum(context: Context, x: Any, y: Any, sign: int) -> ComplexShared:
    (a, b), (c, d) = split(x), split(y)
    parts = []
    for left, right in ((a, c), (b, d)):
        if right is None:
            parts.append(left)
        elif left is None:
            parts.append(right if sign > 0 else -right)
        else:
            parts.append(left + right if sign > 0 else left - right)
    return join_parts(context, *parts)


@of_complex(torch.add, T.add, T.__add__, T.__radd__)
def add(context: Context, x: Any, y: Any, *, alpha: Any = 1) -> ComplexShared:
    return _sum(context, x, y if alpha == 1 else y * alpha, 1)


@of_complex(torch.sub, torch.subtract, T.sub, T.subtract, T.__sub__)
def sub(context: Context, x: Any, y: Any, *, alpha: Any = 1) -> ComplexShared:
    return _sum(context, x, y if alpha == 1 else y * alpha, -1)


@of_complex(T.__rsub__, torch.rsub)
def rsub(context: Context, x: Any, y: Any, *, alpha: Any = 1) -> ComplexShared:
    return _sum(context, y, x if alpha == 1 else x * alpha, -1)


def product(context: Context, func: Callable, x: Any, y: Any) -> ComplexShared:
    """func(x, y) for a func that is linear in both."""
    (a, b), (c, d) = split(x), split(y)
    re, im = func(a, c), None
    if b is not None and d is not None:
        re = re - func(b, d)
    if d is not None:
        im = func(a, d)
    if b is not None:
        im = func(b, c) if im is None else im + func(b, c)
    return join_parts(context, re, im)


def _bilinear(func: Callable) -> Callable:
    def handler(context: Context, x: Any, y: Any) -> ComplexShared:
        return product(context, func, x, y)

    return handler


for _function in (torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__):
    of_complex(_function)(_bilinear(torch.mul))
for _function in (torch.matmul, torch.linalg.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm,
                  torch.mv, T.mv, torch.dot, T.dot):  # fmt: skip
    of_complex(_function)(_bilinear(torch.matmul))
of_complex(T.__rmatmul__)(_bilinear(lambda x, y: torch.matmul(y, x)))
of_complex(torch.outer, T.outer, torch.ger, T.ger)(_bilinear(torch.outer))


@of_complex(torch.einsum)
def einsum(context: Context, equation: str, *operands: Any) -> ComplexShared:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(operands) == 1:
        return in_parts(context, lambda v: torch.einsum(equation, v), operands[0])
    if len(operands) != 2:
        refuse(f"einsum of {len(operands)} operands", "contract two at a time")
    return product(context, lambda x, y: torch.einsum(equation, x, y), *operands)


SECRET_DIVISOR = "division by a secret complex tensor z"
CONJUGATE = "multiply by z.conj() / (z.real ** 2 + z.imag ** 2)"


@of_complex(torch.div, torch.divide, torch.true_divide, T.div, T.divide, T.true_divide, T.__truediv__)
def div(context: Context, x: Any, y: Any, *, rounding_mode: Any = None) -> ComplexShared:
    c, d = split(y)
    if d is None:
        return join_parts(context, *(None if v is None else v / c for v in split(x)))
    if not isinstance(y, (ComplexShared, PrivateTensor)):
        return product(context, torch.mul, x, 1 / y)
    refuse(SECRET_DIVISOR, CONJUGATE)


@of_complex(T.__rdiv__, T.__rtruediv__, torch.reciprocal, T.reciprocal)
def inverse(context: Context, x: Any, y: Any = 1) -> ComplexShared:
    if not isinstance(x, ComplexShared):
        return div(context, y, x)
    refuse(SECRET_DIVISOR, CONJUGATE)


@of_complex(torch.square, T.square)
def square(context: Context, x: ComplexShared) -> ComplexShared:
    return product(context, torch.mul, x, x)


@of_complex(torch.pow, T.pow, T.__pow__)
def power(context: Context, x: Any, exponent: Any) -> ComplexShared:
    if not isinstance(x, ComplexShared) or not isinstance(exponent, (int, float)) or exponent not in (1, 2, 3, 4):
        refuse("a power of a complex tensor other than 1 to 4", "multiply, or use torch.polar")
    result = x
    for _ in range(int(exponent) - 1):
        result = product(context, torch.mul, result, x)
    return result


def _several(func: Callable) -> Callable:
    def handler(context: Context, tensors: Any, *args: Any, **kwargs: Any) -> ComplexShared:
        zeros = lambda v: torch.zeros(v.shape, dtype=v.dtype)
        pairs = [(a, zeros(a) if b is None else b) for a, b in map(split, tensors)]
        return join_parts(context, *(func([pair[at] for pair in pairs], *args, **kwargs) for at in (0, 1)))

    return handler


for _function in (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.row_stack):
    of_complex(_function)(_several(_function))


@of_complex(torch.where, T.where)
def where(context: Context, condition: Any, x: Any, y: Any) -> ComplexShared:
    if not isinstance(condition, torch.Tensor) or condition.is_complex():
        refuse("where with a complex condition", "compare x.abs()")
    zero = lambda v: 0.0 if v is None else v
    (a, b), (c, d) = split(x), split(y)
    return join_parts(context, torch.where(condition, a, c), torch.where(condition, zero(b), zero(d)))


@of_complex(torch.masked_fill, T.masked_fill)
def masked_fill(context: Context, x: Any, mask: Any, value: Any) -> ComplexShared:
    return where(context, mask, value, x)


@of_complex(T.__setitem__)
def setitem(context: Context, x: ComplexShared, index: Any, value: Any) -> ComplexShared:
    re, im = split(value)
    return ComplexShared(
        indexing.setitem(context, x.parts[0], index, re),
        indexing.setitem(context, x.parts[1], index, 0 if im is None else im),
    )


@of_complex(F.pad)
def pad(context: Context, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> ComplexShared:
    re, im = split(0 if value is None else value)
    return ComplexShared(*(F.pad(v, pad, mode, w) for v, w in zip(x.parts, (re, im or 0), strict=True)))


@of_complex(T.to, T.type, T.cpu)
def to(context: Context, x: Any, *args: Any, **kwargs: Any) -> ComplexShared:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and not value.is_complex:
            raise DtypeError(f"a complex secret tensor has no {value}: it would lose its imaginary part; use x.real")
    return x if isinstance(x, ComplexShared) else join_parts(context, x, None)
