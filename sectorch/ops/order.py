"""Positions and orders: argmax, max with indices, topk, sort, one-hot codes and look-ups by a secret index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..backend import Backend, Value
from ..errors import DimensionError
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import BEFORE, Context, implements
from .common import end_to_end, is_secret, refuse, require, typed

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
    pair = values, backend.affine(_places, values, 1)
    while (count := pair[0].shape[0]) > 1:
        half = count // 2
        left, right = (tuple(v[first : 2 * half : 2] for v in pair) for first in (0, 1))
        best = _exchange(backend, left, right)[:2]
        if count % 2:
            best = tuple(backend.each(end_to_end, b, v[2 * half :]) for b, v in zip(best, pair, strict=True))
        pair = best
    return pair[0][0] * sign, pair[1][0]


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


@implements("sort", torch.sort, T.sort, note="bitonic; positions stay secret; not stable")
def sort(
    context: Context, x: SharedTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[SharedTensor, SharedTensor]:
    if stable:
        refuse("a stable sort", "call it without stable=True")
    if x.dim() == 0:
        return x, x * 0
    values, places = _sorted(context, x, dim, descending)
    values, places = (context.backend.each(torch.movedim, v, 0, dim) for v in (values, places))
    return x.like(values, x.scale_bits), x.like(places, 0)


@implements("argsort", torch.argsort, T.argsort, note="bitonic; positions stay secret; not stable")
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


def _classes_named(x: Any, num_classes: int = -1) -> None:
    if num_classes < 0:
        refuse("one_hot without num_classes", "the number of classes would reveal the largest index: name it")


BEFORE[F.one_hot] = _classes_named


def _look_up(context: Context, index: SharedTensor, count: int) -> None:
    """Raise, or have the call's result withheld, unless 0 <= index < count everywhere. No message of its own.

    Where the index is Q's own input, moved at most, Q looks: it knows the numbers, and tells nobody what it found. The
    others see the call end. An index that was computed is compared in secret (`require`); whoever switches that check
    off gets a row of zeros for an index that is not there.

    Raises:
        DimensionError: at Q, before anything of the look-up is sent.
    """
    if not context.backend.check_index(index.shares, count):
        require(context, index, 0, count)


@implements("one_hot", F.one_hot, note="of a secret index; name num_classes")
def one_hot(context: Context, x: SharedTensor, num_classes: int = -1) -> SharedTensor:
    """Q's own indices are looked at by Q first, and others by a comparison: see `_look_up`."""
    _look_up(context, x, num_classes)
    positions = torch.arange(num_classes, device=context.session.device)
    differences = context.backend.each(torch.unsqueeze, x.shares, -1) - positions
    return x.like(context.backend.is_zero(differences), 0, 1.0)


@implements("embedding", torch.embedding)
def native_embedding(context: Context, weight: Any, index: Any, *_: Any) -> torch.Tensor:
    """torch.embedding has the weight first."""
    return embedding(context, index, weight)


@implements("embedding", F.embedding, note="by a public or a secret index")
def embedding(
    context: Context, index: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Rows of `weight`, whose number is public, by an index that stays secret.

    Raises:
        DimensionError: an index out of range, negative ones among them. Q raises it over its own input, as `_look_up`
            says; a public index is everybody's to see.
    """
    if max_norm is not None:
        refuse("embedding with max_norm", "normalise the table first")
    if isinstance(weight, SharedTensor) and not is_secret(index):
        if index.numel() and not index.is_meta and (int(index.min()) < 0 or int(index.max()) >= weight.shape[0]):
            raise DimensionError(
                f"index out of range: a table of {weight.shape[0]} rows, indices to {int(index.max())}"
            )
        return weight[index]
    if not isinstance(index, SharedTensor) or not isinstance(weight, (PrivateTensor, SharedTensor, torch.Tensor)):
        refuse("this embedding", "share the index with sectorch.share(), or give plain weights")
    code = typed(one_hot(context, index, weight.shape[0]), weight.dtype)
    return torch.matmul(code, weight)
