"""Columns in shares, centred and brought to unit curvature, in secret; and the way back to coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import require, shortened
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import context_of, held, matmul, padded, product, squared, summed, vouched, whole_bits
from ..training.functions import torch
from ..training.scale import at, times

FLOOR = 2.0**-14
"""What is added to a column's curvature: no column is scaled up by more than 2^7."""

SCALED_BITS, COEFFICIENT_BITS = 7, 8
"""A column is scaled by less than 2^7; a coefficient of a scaled column is below 2^8, which is checked."""

MOST_HALVES = 19
"""Of more rows the products of columns would leave the ring."""


@dataclass
class Columns:
    """x = mean + xs / scale, with the curvature of the penalised loss near one along each column.

    Attributes:
        xs: [n, p] at f fraction bits, each element below 2^size in magnitude; with an intercept the last column is a
            public constant.
        penalty: [p, 1] at 30 fraction bits, the penalty's part of the curvature.
        means, scale: [d] at f fraction bits.
        halves: sums over rows are divided by 2^halves, the next power of two from n on.
    """

    context: Context
    xs: SharedTensor
    penalty: SharedTensor
    means: SharedTensor | None
    scale: SharedTensor
    unit: float
    size: int
    halves: int

    @property
    def count(self) -> int:
        """How many columns there are, with that of the intercept."""
        return self.xs.shares.shape[1]


def columns(x: SharedTensor, alpha: float, kappa: float, intercept: bool) -> Columns:
    """Standardised columns of x [n, d] for a loss of curvature at most kappa in each row, and penalty alpha |w|^2 / 2.

    Rounds some 50: means, roots, and one product of n d elements, which is rounded once.

    Raises:
        ArgumentError: more than 2^19 rows, whose sums would leave the ring.
    """
    context, f = context_of(x), x.scheme.frac_bits
    n, halves = x.shares.shape[0], halves_of(x)
    x, means, most = centred(context, x, intercept)
    coarse = shortened(context, x, min(f, (HEADROOM_BITS - 1 - halves) // 2 - most))
    curvature = at(context, summed(context, squared(context, coarse), halves), f)
    curvature = curvature.bounded(2.0 ** (2 * most + 1 + f)) * kappa + (alpha / 2**halves + FLOOR)
    scale = vouched(context, torch.rsqrt(curvature), f)
    scaled = product(context, torch.mul, x, _each_row(context, scale, n), f)
    part = squared(context, times(context, scale, math.sqrt(alpha / 2**halves), f + 6), 30)
    unit = 1 / math.sqrt(kappa)
    size = halves // 2 + 3
    if intercept:
        scaled, part = padded(context, scaled, unit), padded(context, part, 0.0)
    part = part.like(context.backend.moved(_upright, part.shares))
    return Columns(context, scaled, part, means, scale, unit, size, halves)


def halves_of(x: SharedTensor) -> int:
    """h, for the least 2^h from the number of rows on.

    Raises:
        ArgumentError: more than 2^19 rows, whose sums would leave the ring.
    """
    n = x.shares.shape[0]
    if (n - 1).bit_length() > MOST_HALVES:
        raise ArgumentError(f"a fit takes up to {1 << MOST_HALVES} rows, got {n}; fit on some of them")
    return (n - 1).bit_length()


def centred(context: Context, x: SharedTensor, intercept: bool = True) -> tuple[SharedTensor, SharedTensor | None, int]:
    """x less the means of its columns, the means, and how many bits are in front of the point; at f fraction bits."""
    most = whole_bits(x)
    x = at(context, held(context, x, most), context.frac_bits)
    if not intercept:
        return x.bounded(None), None, most
    means = _means(context, x, x.shares.shape[0])
    return (x - means).bounded(None), means, most + 1


def _means(context: Context, x: SharedTensor, n: int) -> SharedTensor:
    """The mean of each column, rounded to f bits. A column of equal entries has exactly their mean, so that what it
    becomes is zero. What the first division leaves, which is small, is divided once more."""
    f = x.scale_bits
    mean, total = at(context, torch.mean(x, 0), f), torch.sum(x, 0)
    rest = x.like(context.backend.each(torch.sub, total.shares, (mean.shares * n)), f)
    return at(context, mean + times(context, rest.bounded(n * 2.0**16), 1 / n, f), f)


def _upright(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def _each_row(context: Context, x: SharedTensor, n: int) -> SharedTensor:
    return x.like(context.backend.moved(lambda v: v.expand(n, -1), x.shares))


def coefficients(made: Columns, v: SharedTensor, unit_bits: int = 0) -> tuple:
    """The coefficients [d] and intercept [1] of the original columns, 2^unit_bits as large as v says; at f bits.

    Raises in secret where one is beyond the activation limit.
    """
    context, f = made.context, made.context.frac_bits
    most = context.scheme.activation_bits
    v = v[:, 0]
    own = v if made.means is None else v[:-1]
    w = product(context, torch.mul, made.scale, own.bounded(None))
    w = w.like(w.shares, w.scale_bits - unit_bits)
    w = held(context, shortened(context, w, f), most)
    if made.means is None:
        return w, None
    last = v[-1:].bounded(None)
    last = last.like(last.shares, last.scale_bits - unit_bits - round(math.log2(made.unit)))
    last = held(context, shortened(context, last, f), most)
    return w, at(context, last - inner(context, made.means.reshape(1, -1), w), f)


def inner(context: Context, x: SharedTensor, w: SharedTensor) -> SharedTensor:
    """x [n, d] times w [d], below twice the activation limit; that is checked in secret, and of both that they are
    below it. The terms of a product may be far beyond.

    The product with fewer bits of w cannot leave the ring, and differs from it by less than 2^18 for 2^12 columns.
    """
    f, most, d = context.frac_bits, context.scheme.activation_bits, x.shares.shape[1]
    x, w = (at(context, held(context, v, most), f).bounded(None) for v in (x, w))
    column = w.like(context.backend.moved(_upright, w.shares))
    few = min(f, HEADROOM_BITS - 1 - 2 * most - f - (d - 1).bit_length())
    held(context, product(context, matmul, x, at(context, column, few)), HEADROOM_BITS - 3 - 2 * f)
    found = at(context, product(context, matmul, x, column), f)
    return held(context, found.like(context.backend.moved(_row, found.shares)), most + 1)


def _row(x: Tensor) -> Tensor:
    return x[:, 0]


def certain(context: Context, gradient: SharedTensor, tol: float) -> None:
    """Nothing of the fit is revealed unless the gradient is below tol in each coordinate."""
    gradient = gradient.bounded(2.0**62)
    require(context, gradient, low=-tol, high=tol)
