"""Positions and orders: argmax, max with indices, topk, sort."""

from __future__ import annotations

import torch

from ..backend import Backend, Value
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import end_to_end
from .ranges import CAPACITY, fitted, planes

T = torch.Tensor


Pair = tuple[Value, Value]
"""Values and their positions."""


def _exchange(backend: Backend, x: Pair, y: Pair) -> tuple[Value, Value, Value, Value]:
    """x and y, ordered: the larger value first. One comparison, both differences selected."""
    values, places = (a - b for a, b in zip(x, y, strict=True))
    value, place = backend.where_positive(values, (values, places))
    first = y[0] + value, y[1] + place
    second = x[0] - value, x[1] - place
    return *first, *second


def _places(v: torch.Tensor, step: int) -> torch.Tensor:
    """0, 1, 2, ... times the step along the first dimension."""
    return (torch.arange(v.shape[0], device=v.device) * step).view(-1, *[1] * (v.dim() - 1)).expand(v.shape)


def _filled_up(v: torch.Tensor, value: int, size: int) -> torch.Tensor:
    """As many entries of one value behind as make it `size` along the first dimension."""
    return torch.cat((v, v.new_full((size - v.shape[0], *v.shape[1:]), value)))


def _reordered(x: torch.Tensor, y: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The entries of both along the first dimension, in this order."""
    return torch.cat((x, y))[order]


def _top(context: Context, x: SharedTensor, dim: int, sign: int) -> Pair:
    """The largest value along dim and its position: a tree; among equals the first wins."""
    backend = context.backend
    values = backend.each(torch.movedim, x.shares, dim, 0) * sign
    value, place = top_of(backend, values, backend.affine(_places, values, 1))
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


def _arg(sign: int):
    def handler(context: Context, x: SharedTensor, dim: int | None = None, keepdim: bool = False) -> SharedTensor:
        shape = x.shares.shape
        source = x.reshape(-1) if dim is None else x
        _, place = _top(context, source, 0 if dim is None else dim, sign)
        if keepdim:
            kept = [1] * len(shape) if dim is None else [1 if d == dim % len(shape) else n for d, n in enumerate(shape)]
            place = context.backend.each(torch.reshape, place, kept)
        return x.like(place, 0)

    return handler


implements("argmax", torch.argmax, T.argmax, note="the position stays secret")(_arg(1))
implements("argmin", torch.argmin, T.argmin, note="the position stays secret")(_arg(-1))


def with_indices(
    context: Context, x: SharedTensor, dim: int, keepdim: bool, sign: int
) -> tuple[SharedTensor, SharedTensor]:
    """max or min along a dimension, with secret positions."""
    value, place = _top(context, x, dim, sign)
    if keepdim:
        value, place = (context.backend.each(torch.unsqueeze, v, dim) for v in (value, place))
    return x.like(value, x.scale_bits), x.like(place, 0)


def _sorted(context: Context, x: SharedTensor, dim: int, descending: bool) -> Pair:
    """Values and positions in order along dim (moved first): a bitonic network, padded to a power of two."""
    backend = context.backend
    values = backend.each(torch.movedim, x.shares if descending else -x.shares, dim, 0)
    count = values.shape[0]
    size = 1 << max(0, count - 1).bit_length()
    places = backend.affine(_places, values, 1)
    if size > count:
        values = backend.affine(_filled_up, values, -(1 << 62), size)
        places = backend.affine(_filled_up, places, 0, size)
    block = 2
    while block <= size:
        step = block // 2
        while step:
            index = torch.arange(size)
            upper = index[(index & step) == 0]
            lower = upper + step
            falling = (upper & block) == 0
            first, second = torch.where(falling, upper, lower), torch.where(falling, lower, upper)
            x_pair = tuple(v[first] for v in (values, places))
            y_pair = tuple(v[second] for v in (values, places))
            big, big_at, small, small_at = _exchange(backend, x_pair, y_pair)
            order = torch.argsort(torch.cat((first, second)))
            values = backend.each(_reordered, big, small, order)
            places = backend.each(_reordered, big_at, small_at, order)
            step //= 2
        block *= 2
    values, places = (v[:count] for v in (values, places))
    return (values if descending else -values), places


def _stably(context: Context, x: SharedTensor, dim: int, descending: bool) -> Pair:
    """As `_sorted`, with equals in the order in which they stood: each entry is compared with every other."""
    backend = context.backend
    x = fitted(context, x, CAPACITY / 4)
    values = backend.each(torch.movedim, x.shares, dim, 0)
    keys, count = values if not descending else -values, values.shape[0]
    later = (torch.arange(count) > torch.arange(count).unsqueeze(-1)).to(torch.int64)
    shape = (count, count, *[1] * (x.dim() - 1))
    apart = backend.each(torch.unsqueeze, keys, 1) - backend.each(torch.unsqueeze, keys, 0)
    ranks = backend.each(torch.sum, backend.at_least(apart - later.view(shape), high=planes(x, 2, 1))[0], dim=1) - 1
    wanted = torch.arange(count).view(-1, 1, *[1] * (x.dim() - 1))
    code = backend.is_zero(backend.each(torch.unsqueeze, ranks, 0) - wanted)
    places = backend.each(torch.sum, code * torch.arange(count).view(1, -1, *[1] * (x.dim() - 1)), dim=1)
    chosen = backend.multiply(torch.mul, code, backend.each(torch.unsqueeze, values, 0))
    return backend.each(torch.sum, chosen, dim=1), places


@implements(
    "sort", torch.sort, T.sort, note="bitonic; positions stay secret; stable where it is asked for, by n^2 comparisons"
)
def sort(
    context: Context, x: SharedTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    if x.dim() == 0:
        return x, x * 0
    values, places = (_stably if stable else _sorted)(context, x, dim, descending)
    values, places = (context.backend.each(torch.movedim, v, 0, dim) for v in (values, places))
    return x.like(values, x.scale_bits), x.like(places, 0)


@implements(
    "argsort",
    torch.argsort,
    T.argsort,
    note="bitonic; positions stay secret; stable where it is asked for, by n^2 comparisons",
)
def argsort(
    context: Context, x: SharedTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> SharedTensor:
    return sort(context, x, dim, descending, stable)[1]


@implements("msort", torch.msort, T.msort, note="bitonic")
def msort(context: Context, x: SharedTensor) -> SharedTensor:
    return sort(context, x, 0)[0]


@implements("topk", torch.topk, T.topk, note="bitonic; positions stay secret")
def topk(
    context: Context, x: SharedTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[SharedTensor, SharedTensor]:
    values, places = sort(context, x, dim, largest)
    values, places = (context.backend.each(torch.narrow, v.shares, dim, 0, k) for v in (values, places))
    return x.like(values, x.scale_bits), x.like(places, 0)
