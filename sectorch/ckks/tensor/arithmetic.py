"""Handlers: sums, products, powers, reductions."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import ArgumentError, SectorchError, UnsupportedOpError
from ..scheme.arithmetic import add as add_ciphers
from ..scheme.arithmetic import negate
from ..scheme.multiply import multiply as multiply_ciphers
from ..scheme.polynomial import evaluate, powers_depth
from .encrypted import CKKSTensor
from .packing import broadcast, index_of, plain, plus_plain, spread_to, times_number, times_plain
from .table import implements, located, wrap
from .weighted import summed

_T = torch.Tensor


@implements("add", torch.add, _T.add, _T.__add__, _T.__radd__, operator.add)
def add(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    """No level. Error: the sum of the operands' errors."""
    if not isinstance(x, CKKSTensor):
        return add(mul(y, alpha) if alpha != 1 else y, x)
    rows = broadcast(x, y)
    if not isinstance(y, CKKSTensor):
        return wrap(x, plus_plain(spread_to(x, rows), plain(y) * alpha, rows), rows)
    other = spread_to(y, rows)
    return wrap(x, add_ciphers(spread_to(x, rows), replace(other, factor=other.factor * alpha)), rows)


@implements("sub", torch.sub, _T.sub, _T.__sub__, torch.subtract, _T.subtract, operator.sub)
def sub(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    if not isinstance(x, CKKSTensor):
        return add(neg(mul(y, alpha) if alpha != 1 else y), x)
    if not isinstance(y, CKKSTensor):
        return add(x, y, alpha=-alpha)
    rows = broadcast(x, y)
    other = spread_to(y, rows)
    if alpha == 1 and (other.factor, other.withheld) == (x.cipher.factor, x.cipher.withheld):
        return wrap(x, add_ciphers(spread_to(x, rows), other, -1), rows)
    return add(x, y, alpha=-alpha)


@implements("rsub", torch.rsub, _T.__rsub__)
def rsub(x: Any, y: Any, *, alpha: float = 1) -> CKKSTensor:
    return sub(y, x, alpha=alpha)


@implements("neg", torch.neg, _T.neg, _T.__neg__, torch.negative, _T.negative, operator.neg)
def neg(x: CKKSTensor) -> CKKSTensor:
    return wrap(x, negate(x.cipher), x.row_shape)


@implements("mul", torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.multiply, _T.multiply, operator.mul)
def mul(x: Any, y: Any) -> CKKSTensor:
    """One level with a tensor of either kind; none with a number, which is public, and with a tensor of a single one
    only if no weights follow. Error of x y: |x| e_y + |y| e_x + e_x e_y.
    """
    if not isinstance(x, CKKSTensor):
        return mul(y, x)
    if not isinstance(y, torch.Tensor):
        return wrap(x, times_number(x.cipher, float(plain(y))), x.row_shape)
    rows = broadcast(x, y)
    if not isinstance(y, CKKSTensor):
        return wrap(x, times_plain(spread_to(x, rows), plain(y), rows), rows)
    left = spread_to(x, rows)
    return wrap(x, multiply_ciphers(left, left if y is x else spread_to(y, rows)), rows)


@implements("div", torch.div, _T.div, _T.__truediv__, torch.true_divide, _T.true_divide, operator.truediv)
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> CKKSTensor:
    if isinstance(y, CKKSTensor) or rounding_mode is not None:
        raise UnsupportedOpError(
            "division by an encrypted tensor, or with rounding, is no polynomial; use shares for it"
        )
    inverse = 1.0 / plain(y)
    return mul(x, inverse if isinstance(y, torch.Tensor) else float(inverse))


@implements("square", torch.square, _T.square)
def square(x: CKKSTensor) -> CKKSTensor:
    """One level."""
    return wrap(x, multiply_ciphers(x.cipher, x.cipher, "a square"), x.row_shape)


@implements("pow", torch.pow, _T.pow, _T.__pow__, torch.float_power, operator.pow)
def power(x: CKKSTensor, exponent: Any) -> CKKSTensor:
    """ceil(log2 n) levels for the n-th power."""
    if (
        not isinstance(x, CKKSTensor)
        or not isinstance(exponent, (int, float))
        or exponent != int(exponent)
        or exponent < 1
    ):
        raise UnsupportedOpError("only powers of an encrypted tensor with a positive whole number are polynomials")
    return wrap(x, evaluate(x.cipher, [0.0] * int(exponent) + [1.0]), x.row_shape)


def polynomial(x: CKKSTensor, coefficients: list[float]) -> CKKSTensor:
    """sum_k coefficients[k] x^k by Paterson and Stockmeyer, in the smallest depth (`polynomial.depth`).

    The coefficients are public numbers: whoever decrypts is told the product of some of them.

    Raises:
        ArgumentError: coefficients that are tensors, as weights are.
    """
    if not isinstance(x, CKKSTensor):
        raise UnsupportedOpError(f"ckks.polynomial takes a CKKSTensor, got {type(x).__name__}")
    if any(isinstance(c, torch.Tensor) for c in coefficients):
        raise ArgumentError(
            "the coefficients of ckks.polynomial are public numbers, got tensors; weights stay with the evaluator in "
            "products: a * x.square() + b * x + c"
        )
    try:
        return wrap(x, evaluate(x.cipher, [float(c) for c in coefficients]), x.row_shape)
    except SectorchError as error:
        raise located(error) from None


def _groups(x: CKKSTensor, dim: Any, keepdim: bool) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Which ciphertexts are summed into each output, and the outputs' row shape."""
    rank = len(x.full_shape)
    given = range(rank) if dim is None else ([dim] if isinstance(dim, int) else list(dim)) or range(rank)
    dims = sorted({d % rank for d in given})
    if 0 in dims:
        raise UnsupportedOpError(
            "a sum over the batch (dimension 0) would need rotations; decrypt and sum, or name dims"
        )
    index = index_of(x)
    kept = [d for d in range(1, rank) if d not in dims]
    grouped = index.permute(*(d - 1 for d in kept), *(d - 1 for d in dims))
    shape = tuple(x.full_shape[d] for d in kept)
    groups = grouped.reshape(torch.Size(shape).numel(), -1)
    if keepdim:
        shape = tuple(1 if d in dims else x.full_shape[d] for d in range(1, rank))
    return groups, shape


@implements("sum", torch.sum, _T.sum)
def sum_(x: CKKSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> CKKSTensor:
    """No level; the errors add up."""
    groups, shape = _groups(x, dim, keepdim)
    return wrap(x, summed(x.cipher, groups), shape)


@implements("mean", torch.mean, _T.mean)
def mean(x: CKKSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> CKKSTensor:
    """No level: the divisor waits for the next weights or for decryption."""
    groups, shape = _groups(x, dim, keepdim)
    c = summed(x.cipher, groups)
    return wrap(x, replace(c, factor=c.factor / groups.shape[1]), shape)


@implements("dropout", F.dropout, torch.dropout, F.dropout2d, F.dropout1d)
def dropout(x: CKKSTensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> CKKSTensor:
    if training:
        raise UnsupportedOpError("dropout in training mode: call model.eval() first")
    return x


def inner(x: CKKSTensor, y: CKKSTensor, dim: int = -1) -> CKKSTensor:
    """The inner products of two encrypted tensors along a dimension: one level, one rescale for each output."""
    product = mul(x, y)
    return sum_(product, dim)


__all__ = ["inner", "polynomial", "powers_depth"]
