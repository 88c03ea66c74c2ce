"""Sums, means, maxima and minima along dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ArgumentError
from ..mpc.pool import max_tree
from ..mpc.relu import maximum as maximum_protocol
from ..mpc.shares import Shares, each
from ..table import Context, Fixed, implements
from ..tensor import SharedTensor
from .common import aligned, fixed, local, scaled, summand
from .order import with_indices

T = torch.Tensor


@implements("sum", torch.sum, T.sum, note="local")
def sum_(context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Fixed:
    return local(context, lambda v: v.sum(_dims(v, dim), keepdim), x)


def _dims(v: torch.Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim in ((), []):
        return tuple(range(v.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


@implements("mean", torch.mean, T.mean, note="local; a count that is a power of two costs nothing")
def mean(context: Context, x: SharedTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Fixed:
    shape = x.shares.shape
    count = math.prod(shape[d] for d in (range(len(shape)) if dim is None or dim in ((), []) else _listed(dim)))
    if count == 0:
        raise ArgumentError("the mean of no elements is not a number")
    return scaled(context, sum_(context, x, dim, keepdim), 1.0 / count)


def _listed(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)


@implements("cumsum", torch.cumsum, T.cumsum, note="local")
def cumsum(context: Context, x: SharedTensor, dim: int, *, dtype: Any = None) -> Fixed:
    return local(context, lambda v: v.cumsum(dim), x)


def _extreme(context: Context, x: SharedTensor, dim: Any, keepdim: bool, sign: int) -> Fixed:
    """The maximum (sign 1) or minimum (sign -1) over some dimensions, by a tree."""
    shape = x.shares.shape
    dims = (
        sorted(d % len(shape) for d in (range(len(shape)) if dim is None or dim in ((), []) else _listed(dim)))
        if shape
        else []
    )
    rest = [d for d in range(len(shape)) if d not in dims]
    if not dims:
        return fixed(x)

    def flat(v: torch.Tensor) -> torch.Tensor:
        v = v.permute(*dims, *rest).reshape(-1, *(v.shape[d] for d in rest))
        return v if sign > 0 else -v

    best = max_tree(context.net, each(context.net, flat, x.shares), fss=context.scheme.fss)
    kept = [1 if d in dims else shape[d] for d in range(len(shape))] if keepdim else [shape[d] for d in rest]
    return Fixed(each(context.net, lambda v: (v if sign > 0 else -v).reshape(kept), best), x.scale_bits)


@implements("amax", torch.amax, T.amax, note="a tree of comparisons")
def amax(context: Context, x: SharedTensor, dim: Any = (), keepdim: bool = False) -> Fixed:
    return _extreme(context, x, dim, keepdim, 1)


@implements("amin", torch.amin, T.amin, note="a tree of comparisons")
def amin(context: Context, x: SharedTensor, dim: Any = (), keepdim: bool = False) -> Fixed:
    return _extreme(context, x, dim, keepdim, -1)


@implements("maximum", torch.maximum, T.maximum, torch.fmax, T.fmax, note="one comparison")
def maximum(context: Context, x: Any, y: Any) -> Fixed:
    return _pairwise(context, x, y, 1)


@implements("minimum", torch.minimum, T.minimum, torch.fmin, T.fmin, note="one comparison")
def minimum(context: Context, x: Any, y: Any) -> Fixed:
    return _pairwise(context, x, y, -1)


def _pairwise(context: Context, x: Any, y: Any, sign: int) -> Fixed:
    net = context.net
    operands = aligned(context, *(summand(context, v) for v in (x, y)))
    (left, scale), (right, _) = operands
    shape = torch.broadcast_shapes(left.shape, right.shape)
    left, right = (each(net, lambda v: (v if sign > 0 else -v).expand(shape), v) for v in (left, right))
    best: Shares = maximum_protocol(net, left, right, fss=context.scheme.fss)
    return Fixed(best if sign > 0 else each(net, torch.neg, best), scale)


def _max_or_min(sign: int):
    def handler(context: Context, x: SharedTensor, *args: Any, **kwargs: Any) -> Fixed:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            return _pairwise(context, x, other, sign)
        if args or "dim" in kwargs:
            dim, keepdim = (*args, *([False] if len(args) == 1 else [])) if args else (kwargs["dim"], False)
            return with_indices(context, x, dim, kwargs.get("keepdim", keepdim), sign)
        return _extreme(context, x, None, False, sign)

    return handler


implements("max", torch.max, T.max, note="positions stay secret")(_max_or_min(1))
implements("min", torch.min, T.min, note="positions stay secret")(_max_or_min(-1))
