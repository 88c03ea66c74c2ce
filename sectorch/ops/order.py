"""Orders and positions: argmax, sort, topk, medians and quantiles, running maxima, searches in a sorted list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backend import Backend, Value
from ..errors import ArgumentError, ShapeError
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import CAPACITY, check_fits, end_to_end, is_secret, planes, refuse

T = torch.Tensor
Pair = tuple[Value, Value]
"""Values and their positions."""


def _exchange(backend: Backend, x: Pair, y: Pair) -> tuple[Value, Value, Value, Value]:
    """x and y, ordered: the larger value first. One comparison, both differences selected."""
    (a, b), (c, d) = _exchange_rows(backend, x, y)
    return a, b, c, d


def _exchange_rows(backend: Backend, x: Sequence[Value], y: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Rows in order of their first columns: the larger key first. One comparison, and a selection for each column."""
    differences = [a - b for a, b in zip(x, y, strict=True)]
    chosen = backend.where_positive(differences[0], differences)
    first = [b + d for b, d in zip(y, chosen, strict=True)]
    second = [a - d for a, d in zip(x, chosen, strict=True)]
    return first, second


def _positions(v: torch.Tensor, step: int) -> torch.Tensor:
    """0, 1, 2, ... times the step along the first dimension."""
    return (torch.arange(v.shape[0], device=v.device) * step).view(-1, *[1] * (v.dim() - 1)).expand(v.shape)


def _pad_to(v: torch.Tensor, value: int, size: int) -> torch.Tensor:
    """v, padded with one value behind to `size` entries along the first dimension."""
    return torch.cat((v, v.new_full((size - v.shape[0], *v.shape[1:]), value)))


def _reorder(x: torch.Tensor, y: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x and y, one after the other along the first dimension, in a new order."""
    return torch.cat((x, y))[order]


def _top(context: Context, x: SharedTensor, dim: int, sign: int) -> Pair:
    """The largest value along dim and its position: a tree; among equals the first wins."""
    backend = context.backend
    values = backend.each(torch.movedim, x.shares, dim, 0) * sign
    value, place = top_of(backend, values, backend.affine(_positions, values, 1))
    return value * sign, place


def top_of(backend: Backend, values: Value, places: Value) -> Pair:
    """The largest value along the first dimension and its place."""
    pair = values, places
    while (count := pair[0].shape[0]) > 1:
        half = count // 2
        left, right = (tuple(v[first : 2 * half : 2] for v in pair) for first in (0, 1))
        best = _exchange(backend, left, right)[:2]
        if count % 2:
            best = tuple(backend.each(end_to_end, b, v[2 * half :]) for b, v in zip(best, pair, strict=True))
        pair = best
    return pair[0][0], pair[1][0]


def _arg_extreme(sign: int):
    def handler(context: Context, x: SharedTensor, dim: int | None = None, keepdim: bool = False) -> SharedTensor:
        shape = x.shares.shape
        source = x.reshape(-1) if dim is None else x
        _, place = _top(context, source, 0 if dim is None else dim, sign)
        if keepdim:
            kept = [1] * len(shape) if dim is None else [1 if d == dim % len(shape) else n for d, n in enumerate(shape)]
            place = context.backend.each(torch.reshape, place, kept)
        return x.like(place, 0)

    return handler


implements("argmax", torch.argmax, T.argmax, note="the position stays secret")(_arg_extreme(1))
implements("argmin", torch.argmin, T.argmin, note="the position stays secret")(_arg_extreme(-1))


def with_indices(
    context: Context, x: SharedTensor, dim: int, keepdim: bool, sign: int
) -> tuple[SharedTensor, SharedTensor]:
    """max or min along a dimension, with secret positions."""
    value, place = _top(context, x, dim, sign)
    if keepdim:
        value, place = (context.backend.each(torch.unsqueeze, v, dim) for v in (value, place))
    return x.like(value, x.scale_bits), x.like(place, 0)


def _sort(context: Context, x: SharedTensor, dim: int, descending: bool) -> Pair:
    """Values and positions in order along dim (moved first)."""
    backend = context.backend
    values = backend.each(torch.movedim, x.shares if descending else -x.shares, dim, 0)
    values, places = _falling(backend, values, [backend.affine(_positions, values, 1)])
    return (values if descending else -values), places


def _falling(backend: Backend, keys: Value, others: Sequence[Value]) -> list[Value]:
    """Keys in falling order along the first dimension, and other columns with them, all of one shape: a bitonic
    network, padded to a power of two."""
    count = keys.shape[0]
    size = 1 << max(0, count - 1).bit_length()
    columns = [keys, *others]
    if size > count:
        pads = (-(1 << 62), *[0] * len(others))
        columns = [backend.affine(_pad_to, v, pad, size) for v, pad in zip(columns, pads, strict=True)]
    block = 2
    # Blocks of twice the size are merged in each round, those with bit `block` of the position clear falling: in the
    # last round all of them. So the largest value comes first, and what pads, below every value in range, last.
    while block <= size:
        step = block // 2
        while step:
            index = torch.arange(size)
            upper = index[(index & step) == 0]
            lower = upper + step
            falling = (upper & block) == 0
            first, second = torch.where(falling, upper, lower), torch.where(falling, lower, upper)
            large, small = _exchange_rows(backend, [v[first] for v in columns], [v[second] for v in columns])
            order = torch.argsort(torch.cat((first, second)))
            columns = [backend.each(_reorder, x, y, order) for x, y in zip(large, small, strict=True)]
            step //= 2
        block *= 2
    return [v[:count] for v in columns]


def sort_rows(keys: SharedTensor, *others: SharedTensor) -> tuple[SharedTensor, ...]:
    """Keys in falling order along the first dimension, and other columns in the same order; nobody learns the order.

    Args:
        keys: [n, ...], below 2^61 as ring elements.
        others: of the keys' shape, session, party and scheme. Rows of equal keys may come in any order.

    Rounds and bytes as of `torch.sort`; each further column takes one selection more an exchange. Exact.
    """
    context = Context(keys.session, keys.party, keys.scheme)
    with keys.session.operation(keys.party):
        columns = _falling(context.backend, keys.shares, [x.shares for x in others])
    flags = tuple(dict.fromkeys(flag for x in (keys, *others) for flag in x.flags))
    made = []
    for x, shares in zip((keys, *others), columns, strict=True):
        made.append(x.like(shares, bound=x.bound).with_flags(flags))
        made[-1].whole_bits = x.whole_bits
    return tuple(made)


def _sort_stably(context: Context, x: SharedTensor, dim: int, descending: bool) -> Pair:
    """As `_sort`, but equal entries keep their order: each entry is compared with every other."""
    backend = context.backend
    x = check_fits(context, x, CAPACITY / 4)
    values = backend.each(torch.movedim, x.shares, dim, 0)
    keys, count = values if not descending else -values, values.shape[0]
    later = (torch.arange(count) > torch.arange(count).unsqueeze(-1)).to(torch.int64)
    shape = (count, count, *[1] * (x.dim() - 1))
    differences = backend.each(torch.unsqueeze, keys, 1) - backend.each(torch.unsqueeze, keys, 0)
    ranks = (
        backend.each(torch.sum, backend.at_least(differences - later.view(shape), high=planes(x, 2, 1))[0], dim=1) - 1
    )
    wanted = torch.arange(count).view(-1, 1, *[1] * (x.dim() - 1))
    code = backend.is_zero(backend.each(torch.unsqueeze, ranks, 0) - wanted)
    places = backend.each(torch.sum, code * torch.arange(count).view(1, -1, *[1] * (x.dim() - 1)), dim=1)
    chosen = backend.multiply(torch.mul, code, backend.each(torch.unsqueeze, values, 0))
    return backend.each(torch.sum, chosen, dim=1), places


@implements("sort", torch.sort, T.sort,
            note="bitonic; positions stay secret; stable where it is asked for, by n^2 comparisons",
            excess=0.0)  # fmt: skip
def sort(
    context: Context, x: SharedTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    if x.dim() == 0:
        return x, x * 0
    values, places = (_sort_stably if stable else _sort)(context, x, dim, descending)
    values, places = (context.backend.each(torch.movedim, v, 0, dim) for v in (values, places))
    return x.like(values, x.scale_bits), x.like(places, 0)


@implements("argsort", torch.argsort, T.argsort,
            note="bitonic; positions stay secret; stable where it is asked for, by n^2 comparisons")  # fmt: skip
def argsort(
    context: Context, x: SharedTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> SharedTensor:
    return sort(context, x, dim, descending, stable)[1]


@implements("msort", torch.msort, T.msort, note="bitonic", excess=0.0)
def msort(context: Context, x: SharedTensor) -> SharedTensor:
    return sort(context, x, 0)[0]


@implements("topk", torch.topk, T.topk, note="bitonic; positions stay secret", excess=0.0)
def topk(
    context: Context, x: SharedTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[SharedTensor, SharedTensor]:
    values, places = sort(context, x, dim, largest)
    values, places = (context.backend.each(torch.narrow, v.shares, dim, 0, k) for v in (values, places))
    return x.like(values, x.scale_bits), x.like(places, 0)


# Entries by rank: medians, quantiles; running maxima; positions in a sorted list.


def _at_rank(context: Context, x: SharedTensor, k: int, dim: int, keepdim: bool) -> tuple[SharedTensor, SharedTensor]:
    """The k-th smallest entry along a dimension, counted from 0, and its position."""
    if x.dtype == torch.bool:
        refuse("the position of the k-th of truth values", "sort x.long()")
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
        return _at_rank(context, x.reshape(-1), (x.numel() - 1) // 2, 0, False)[0]
    return _at_rank(context, x, ((x.shape[dim] if x.dim() else 1) - 1) // 2, dim, keepdim)


@implements("kthvalue", torch.kthvalue, T.kthvalue, note="bitonic; positions stay secret")
def kthvalue(context: Context, x: SharedTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not 1 <= k <= (x.shape[dim] if x.dim() else 1):
        raise ArgumentError(f"kthvalue: selected number k out of range for dimension {dim}, got {k}")
    return _at_rank(context, x, k - 1, dim, keepdim)


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


def _running_extreme(sign: int):
    def handler(context: Context, x: SharedTensor, dim: int) -> Any:
        """By doubling: log2 n rounds of comparisons. Of equals the last wins, as with torch."""
        if not x.dim():
            torch.zeros(()).cummax(dim)  # raises what torch does for such a dimension, which shapes alone do not
            return x, x.like(context.backend.each(torch.zeros_like, x.shares), 0, dtype=torch.int64)
        backend = context.backend
        values = backend.each(torch.movedim, x.shares, dim, 0) * sign
        places = backend.affine(_positions, values, 1)
        step = 1
        while step < values.shape[0]:
            pair = values, places
            gains = [v[step:] - v[:-step] for v in pair]
            gains = backend.where_positive(gains[0], gains)
            values, places = (
                backend.each(end_to_end, v[:step], v[:-step] + gain) for v, gain in zip(pair, gains, strict=True)
            )
            step *= 2
        values, places = (backend.each(torch.movedim, v, 0, dim) for v in (values * sign, places))
        return x.like(values, x.scale_bits, x.bound), x.like(places, 0, dtype=torch.int64)

    return handler


implements("cummax", torch.cummax, T.cummax, note="positions stay secret")(_running_extreme(1))
implements("cummin", torch.cummin, T.cummin, note="positions stay secret")(_running_extreme(-1))


def _count_passed(x: Any, bounds: Any, right: bool) -> torch.Tensor:
    """The number of bounds, along their last dimension, that are below each x, or with `right` not above it."""
    passed = bounds <= x.unsqueeze(-1) if right else bounds < x.unsqueeze(-1)
    return passed.sum(-1)


@implements("bucketize", torch.bucketize, note="exact; a comparison with each boundary")
def bucketize(
    context: Context, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise ShapeError(f"bucketize: boundaries have one dimension, got shape {list(boundaries.shape)}")
    return _count_passed(x if isinstance(x, torch.Tensor) else torch.tensor(x), boundaries, right)


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
    return _count_passed(x, bounds, right or side == "right")
