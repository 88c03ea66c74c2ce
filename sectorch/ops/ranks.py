"""What stands at a place of an order: medians, quantiles, running maxima, places in a sorted list."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, ShapeError
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import is_secret, refuse
from .order import sort

T = torch.Tensor


def _at_place(context: Context, x: SharedTensor, k: int, dim: int, keepdim: bool) -> tuple[SharedTensor, SharedTensor]:
    """The k-th smallest along a dimension, counted from 0, and where it stood."""
    if x.dtype == torch.bool:
        refuse("where the k-th of yes and no stands", "sort x.long()")
    if not x.dim():
        return x, x.like(context.backend.each(torch.zeros_like, x.shares), 0, dtype=torch.int64)
    found = sort(context, x, dim)
    values, places = (context.backend.each(torch.narrow, v.shares, dim, k, 1) for v in found)
    if not keepdim:
        values, places = (context.backend.each(torch.squeeze, v, dim) for v in (values, places))
    return x.like(values, x.scale_bits, x.bound), x.like(places, 0, dtype=torch.int64)


@implements("median", torch.median, T.median, torch.nanmedian, T.nanmedian,
            note="bitonic; of an even count the lower; positions stay secret")  # fmt: skip
def median(context: Context, x: SharedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.shares.shape.numel():
        raise ArgumentError("the median of no elements is not a number")
    if dim is None:
        return _at_place(context, x.reshape(-1), (x.numel() - 1) // 2, 0, False)[0]
    return _at_place(context, x, ((x.shape[dim] if x.dim() else 1) - 1) // 2, dim, keepdim)


@implements("kthvalue", torch.kthvalue, T.kthvalue, note="bitonic; positions stay secret")
def kthvalue(context: Context, x: SharedTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not 1 <= k <= (x.shape[dim] if x.dim() else 1):
        raise ArgumentError(f"kthvalue: selected number k out of range for dimension {dim}, got {k}")
    return _at_place(context, x, k - 1, dim, keepdim)


@implements("quantile", torch.quantile, T.quantile, torch.nanquantile, T.nanquantile,
            note="bitonic; public q; error 2^-20 of the neighbours' distance")  # fmt: skip
def quantile(
    context: Context, x: SharedTensor, q: Any, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear",
) -> torch.Tensor:  # fmt: skip
    if is_secret(q):
        refuse("a secret q", "the share of a quantile is public")
    given = torch.as_tensor(q, dtype=x.dtype)
    if given.numel() and not bool(((given >= 0) & (given <= 1)).all()):
        raise ArgumentError(f"quantile: q must be between 0 and 1, got {q}")
    line = x.reshape(-1) if dim is None or not x.dim() else x.movedim(dim, 0)
    if not line.shape[0]:
        raise ArgumentError("the quantile of no elements is not a number")
    values = torch.sort(line, 0)[0]
    ranks = given.double() * (line.shape[0] - 1)  # as torch has it: 0.7 of float32 is below 0.7
    if interpolation in ("lower", "higher", "nearest"):
        ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
    below, above = ranks.floor().long(), ranks.ceil().long()
    low = values[below]
    if not bool((below == above).all()):
        part = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
        part = torch.where(below == above, 0.0, part).to(given.dtype)
        low = low + (values[above] - low) * part.reshape(part.shape + (1,) * (line.dim() - 1))
    if keepdim and x.dim():
        kept = [1 if dim is None or d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        low = low.reshape((*given.shape, *kept))
    return low


def _running(sign: int):
    def handler(context: Context, x: SharedTensor, dim: int) -> Any:
        """By doubling: log2 n rounds of comparisons. Of equals the last wins, as with torch."""
        if not x.dim():
            torch.zeros(()).cummax(dim)  # raises what torch does for such a dimension, which shapes alone do not
            return x, x.like(context.backend.each(torch.zeros_like, x.shares), 0, dtype=torch.int64)
        backend = context.backend
        values = backend.each(torch.movedim, x.shares, dim, 0) * sign
        places = backend.affine(_line, values, 1)
        step = 1
        while step < values.shape[0]:
            pair = values, places
            gains = [v[step:] - v[:-step] for v in pair]
            gains = backend.where_positive(gains[0], gains)
            values, places = (
                backend.each(_joined, v[:step], v[:-step] + gain) for v, gain in zip(pair, gains, strict=True)
            )
            step *= 2
        values, places = (backend.each(torch.movedim, v, 0, dim) for v in (values * sign, places))
        return x.like(values, x.scale_bits, x.bound), x.like(places, 0, dtype=torch.int64)

    return handler


def _line(v: torch.Tensor, step: int) -> torch.Tensor:
    return (torch.arange(v.shape[0], device=v.device) * step).view(-1, *[1] * (v.dim() - 1)).expand(v.shape)


def _joined(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return torch.cat((first, rest))


implements("cummax", torch.cummax, T.cummax, note="positions stay secret")(_running(1))
implements("cummin", torch.cummin, T.cummin, note="positions stay secret")(_running(-1))


def _passed(x: Any, bounds: Any, right: bool) -> torch.Tensor:
    """How many of the bounds, along their last dimension, are below each x, or not above it."""
    passed = bounds <= x.unsqueeze(-1) if right else bounds < x.unsqueeze(-1)
    return passed.sum(-1)


@implements("bucketize", torch.bucketize, note="exact; a comparison with each boundary")
def bucketize(
    context: Context, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise ShapeError(f"bucketize: boundaries have one dimension, got shape {list(boundaries.shape)}")
    return _passed(x if isinstance(x, torch.Tensor) else torch.tensor(x), boundaries, right)


@implements("searchsorted", torch.searchsorted, note="exact; a comparison with each entry")
def searchsorted(
    context: Context, sorted_sequence: Any, x: Any, *, out_int32: bool = False, right: bool = False,
    side: Any = None, sorter: Any = None,
) -> torch.Tensor:  # fmt: skip
    if sorter is not None:
        refuse("searchsorted with a sorter", "sort the sequence first")
    if side not in (None, "left", "right"):
        raise ArgumentError(f"searchsorted: side can only be 'left' or 'right', got {side!r}")
    if side == "left" and right:
        raise ArgumentError("searchsorted: side and right are opposites")
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x)
    bounds = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    return _passed(x, bounds, right or side == "right")
