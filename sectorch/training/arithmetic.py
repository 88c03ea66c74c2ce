"""Products and sums of shares whose ranges the caller knows: no range check, and no fraction bit more than it takes.

A product is right if its result is below 2^62 as a whole number of the ring, whatever its terms are: they are added
mod 2^64. So sums of many products that are known to be small (of a column with residuals, of a matrix with what is
nearly its inverse) take no room for the largest terms. What is not known is checked by `held`, or certified at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ops.ranges import fitted
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .scale import at

matmul = products.matmul


def crossed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x^T y."""
    return products.matmul(x.mT.contiguous(), y)


def context_of(x: SharedTensor) -> Context:
    return Context(x.session, x.party, x.scheme)


def product(
    context: Context, f: Callable, x: SharedTensor, y: SharedTensor, bits: int | None = None, halved: int = 0
) -> SharedTensor:
    """f(x, y) / 2^halved, for a map that is linear in both; rounded to so many fraction bits if they are named.

    Rounds 1, and 5 for each rounding; the caller vouches for the range of the result.
    """
    shares = context.backend.multiply(f, x.shares, y.shares)
    made = x.like(shares, x.scale_bits + y.scale_bits + halved, dtype=torch.float32)
    return made if bits is None else at(context, made, bits)


def squared(context: Context, x: SharedTensor, bits: int | None = None) -> SharedTensor:
    """x^2, as `product`."""
    made = x.like(context.backend.square(x.shares), 2 * x.scale_bits)
    return made if bits is None else at(context, made, bits)


def summed(context: Context, x: SharedTensor, halved: int = 0) -> SharedTensor:
    """The sum of the rows over 2^halved. No message."""
    return x.like(context.backend.each(partial(torch.sum, dim=0), x.shares), x.scale_bits + halved)


def vouched(context: Context, x: SharedTensor, bits: int) -> SharedTensor:
    """x at so many fraction bits, of a range that is known."""
    return at(context, x.bounded(None), bits)


def held(context: Context, x: SharedTensor, below_bits: int) -> SharedTensor:
    """x, checked to be below 2^below_bits in magnitude, unless its bound says so; with that bound.

    Nothing that the fit gives is revealed if it is not.
    """
    if x.bound is None:
        x = x.bounded(2.0**63)
    return fitted(context, x, 2.0 ** (below_bits + x.scale_bits))


def whole_bits(x: SharedTensor) -> int:
    """Bits in front of the point, by the bound: at most those of the activation limit."""
    most = x.scheme.activation_bits
    if x.bound is None:
        return most
    return next((b for b in range(most) if x.bound <= 2.0 ** (b + x.scale_bits)), most)


def padded(context: Context, x: SharedTensor, number: float) -> SharedTensor:
    """x with one entry more at the end of its last dimension: a public number. No message."""
    whole = round(number * 2**x.scale_bits)
    return x.like(context.backend.affine(_pad, x.shares, whole))


def _pad(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((x, torch.full_like(x[..., :1], number)), -1)


def diagonal(context: Context, x: SharedTensor) -> SharedTensor:
    """The matrix with this column as its diagonal. No message."""
    return x.like(context.backend.each(_diagonal, x.shares))


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diag(x[:, 0])


def plus(context: Context, x: SharedTensor, y: Any) -> SharedTensor:
    """x + y for a vouched y of the same fraction bits, or for a public whole number of the ring."""
    if not isinstance(y, SharedTensor):
        return x.like(x.shares + y)
    return x.like(context.backend.each(torch.add, x.shares, y.shares))


def minus(context: Context, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    return x.like(context.backend.each(torch.sub, x.shares, y.shares))
