"""Sums, means, maxima and minima along dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ArgumentError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import (
    CAPACITY,
    SLACK_BITS,
    add_values,
    align_scales,
    check_fits,
    dims_of,
    domain_bits,
    limit_at,
    planes,
    raise_scale,
    round_scale,
    small_public_number,
    summand,
)
from .linear import times_number
from .order import with_indices

T = torch.Tensor


@implements("sum", torch.sum, T.sum, torch.nansum, T.nansum,
            note="local; what has more than f fraction bits is first rounded, by log2 n bits")  # fmt: skip
def sum_(
    context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> SharedTensor:
    dims = dims_of(x, dim)
    count = _count(x, dims)
    v = summable(context, x, count)
    bound = None if v.bound is None else v.bound * max(1, count)
    shares = context.backend.each(torch.sum, v.shares, dim=dims, keepdim=keepdim)
    return x.like(shares, v.scale_bits, bound)


def _count(x: SharedTensor, dims: tuple[int, ...]) -> int:
    shape = x.shares.shape
    return math.prod(shape[d] for d in dims) if shape else 1


def summable(context: Context, x: SharedTensor, count: int) -> SharedTensor:
    """x, rounded so that a sum of `count` entries stays in the ring. At f fraction bits x does not change."""
    f, terms = context.frac_bits, max(0, count - 1).bit_length()
    if x.bound is not None:
        over = math.ceil(math.log2(max(1.0, x.bound * count / CAPACITY)))
        x = round_scale(context, x, max(min(f, x.scale_bits), x.scale_bits - over))
        return check_fits(context, x, CAPACITY / max(1, count))
    if x.scale_bits > f:
        known = min(HEADROOM_BITS, x.scale_bits + HEADROOM_BITS - 2 * f)
        return round_scale(context, x, max(f, x.scale_bits - max(0, known + terms - HEADROOM_BITS)))
    return round_scale(context, x, x.scale_bits - max(0, x.scale_bits + domain_bits(context) + terms - HEADROOM_BITS))


@implements("mean", torch.mean, T.mean, torch.nanmean, T.nanmean,
            note="as sum; where the count is no power of two, error 1e-6 |result|", excess=0.0)  # fmt: skip
def mean(
    context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> SharedTensor:
    count = _count(x, dims_of(x, dim))
    if count == 0:
        raise ArgumentError("the mean of no elements is not a number")
    return mean_of_sum(context, sum_(context, x, dim, keepdim), count)


def mean_of_sum(context: Context, x: SharedTensor, count: int) -> SharedTensor:
    """A sum divided by its number of terms. A large sum first loses bits, which the quotient gains again.

    A sum of more than f fraction bits, of squares for example, needs them for small means: the remainder of the first
    quotient is divided, too.
    """
    f, terms = context.frac_bits, (count - 1).bit_length()
    if count == 1 << terms:
        return times_number(context, x, 1.0 / count)
    factor = round(2.0 ** (f + terms) / count)
    if x.scale_bits <= f:
        x = check_fits(context, x, limit_at(context, x.scale_bits) * count)
    most = x.bound
    if most is None:  # an activation, or anything that the ring holds
        most = count * 2.0 ** (x.scale_bits + domain_bits(context)) if x.scale_bits <= f else CAPACITY
    wide = max(0, math.ceil(math.log2(max(1.0, most * factor))) - HEADROOM_BITS)
    fitting = HEADROOM_BITS - math.ceil(math.log2(max(1.0, 1.01 * most / count)))
    bits = min(2 * f + SLACK_BITS, x.scale_bits + fitting)
    bound = None if x.bound is None else 1.01 * 2.0 ** (bits - x.scale_bits) * x.bound / count
    x = x.bounded(None)

    def times(v: SharedTensor) -> SharedTensor:
        return v.like(v.shares * factor, v.scale_bits + f + terms)

    near = times(round_scale(context, x, x.scale_bits - wide))
    if x.scale_bits <= f or not wide:
        return round_scale(context, near, bits).bounded(bound)
    near = round_scale(context, near, x.scale_bits)
    rest = x.shares - near.shares * count
    rest = round_scale(context, times(x.like(rest, x.scale_bits)), bits)
    return add_values(context, raise_scale(context, near, rest.scale_bits), rest).bounded(bound)


@implements("cumsum", torch.cumsum, T.cumsum, note="as sum")
def cumsum(context: Context, x: SharedTensor, dim: int, *, dtype: Any = None) -> SharedTensor:
    count = x.shares.shape[dim] if x.shares.shape else 1
    v = summable(context, x, count)
    bound = None if v.bound is None else v.bound * max(1, count)
    return v.like(context.backend.each(torch.cumsum, v.shares, dim), v.scale_bits, bound)


def _flatten_first(v: torch.Tensor, dims: list[int], rest: list[int]) -> torch.Tensor:
    """Flatten some dimensions into one, which becomes the first."""
    return v.permute(*dims, *rest).flatten(0, len(dims) - 1)


def _extreme(context: Context, x: SharedTensor, dim: Any, keepdim: bool, sign: int) -> SharedTensor:
    """The maximum (sign 1) or minimum (sign -1) over some dimensions, by a tree."""
    shape = x.shares.shape
    dims = sorted(dims_of(x, dim)) if shape else []
    rest = [d for d in range(len(shape)) if d not in dims]
    if not dims:
        return x
    backend = context.backend
    flat = backend.each(_flatten_first, x.shares, dims, rest)
    best = backend.largest(flat if sign > 0 else -flat, planes(x, 2))
    kept = [1 if d in dims else shape[d] for d in range(len(shape))] if keepdim else [shape[d] for d in rest]
    return x.like(backend.each(torch.reshape, best if sign > 0 else -best, kept), x.scale_bits)


@implements("amax", torch.amax, T.amax, note="a tree of comparisons", excess=0.0)
def amax(context: Context, x: SharedTensor, dim: Any = (), keepdim: bool = False) -> SharedTensor:
    return _extreme(context, x, dim, keepdim, 1)


@implements("amin", torch.amin, T.amin, note="a tree of comparisons", excess=0.0)
def amin(context: Context, x: SharedTensor, dim: Any = (), keepdim: bool = False) -> SharedTensor:
    return _extreme(context, x, dim, keepdim, -1)


@implements("maximum", torch.maximum, T.maximum, torch.fmax, T.fmax, note="one comparison", excess=0.0)
def maximum(context: Context, x: Any, y: Any) -> SharedTensor:
    return _larger_or_smaller(context, x, y, 1)


@implements("minimum", torch.minimum, T.minimum, torch.fmin, T.fmin, note="one comparison", excess=0.0)
def minimum(context: Context, x: Any, y: Any) -> SharedTensor:
    return _larger_or_smaller(context, x, y, -1)


def _larger_or_smaller(context: Context, x: Any, y: Any, sign: int) -> Any:
    backend = context.backend
    for a, b in ((x, y), (y, x)):
        if (bound := small_public_number(context, b)) is not None:
            spread = a.expand(torch.broadcast_shapes(a.shape, b.shape)) if isinstance(b, torch.Tensor) else a
            return torch.clamp(spread, min=bound) if sign > 0 else torch.clamp(spread, max=bound)
    operands = align_scales(context, *(summand(context, v) for v in (x, y)))
    bounds = [v.bound for v in operands if v.bound is not None]
    bound = max(bounds) if len(bounds) == len(operands) else None
    first, shape = operands[0], torch.broadcast_shapes(*(v.shares.shape for v in operands))
    left, right = (backend.each(torch.Tensor.expand, v.shares if sign > 0 else -v.shares, shape) for v in operands)
    best = backend.maximum(left, right, planes(first.bounded(bound), 2))
    return first.like(best if sign > 0 else -best, bound=bound)


def _max_or_min(sign: int):
    def handler(context: Context, x: SharedTensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            return _larger_or_smaller(context, x, other, sign)
        if args or "dim" in kwargs:
            dim, keepdim = (*args, *([False] if len(args) == 1 else [])) if args else (kwargs["dim"], False)
            return with_indices(context, x, dim, kwargs.get("keepdim", keepdim), sign)
        return _extreme(context, x, None, False, sign)

    return handler


implements("max", torch.max, T.max, note="positions stay secret", excess=0.0)(_max_or_min(1))
implements("min", torch.min, T.min, note="positions stay secret", excess=0.0)(_max_or_min(-1))


@implements("aminmax", torch.aminmax, T.aminmax, note="as amin and amax")
def aminmax(
    context: Context, x: SharedTensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    smallest, largest = (_extreme(context, x, dim, keepdim, sign) for sign in (-1, 1))
    return smallest, largest
