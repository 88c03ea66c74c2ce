"""Look-ups by an index that stays secret: one-hot codes, embeddings, indexing, gather.

A secret index costs a comparison with every position, and a product with all that stands there: nobody learns which
was taken. Of Q's own index, which Q knows, the comparison is Q's alone. Indices count from the front; a negative one is
refused, as one that is too large.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ..errors import DimensionError
from ..ring import products
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import BEFORE, Context, implements
from .bilinear import bilinear
from .common import is_secret, refuse, require

T = torch.Tensor


def _classes_named(x: Any, num_classes: int = -1) -> None:
    if num_classes < 0:
        refuse("one_hot without num_classes", "the number of classes would reveal the largest index: name it")


BEFORE[F.one_hot] = _classes_named


def _look_up(context: Context, index: SharedTensor, count: int) -> None:
    """Raise, or have the call's result withheld, unless 0 <= index < count everywhere. No message of its own.

    Where the index is Q's own input, moved at most, Q looks: it knows the numbers, and tells nobody what it found. The
    others see the call end. An index that was computed, or that a Q sent who has to prove what it deals, is compared in
    secret (`require`); whoever switches that check
    off gets a row of zeros for an index that is not there.

    Raises:
        DimensionError: at Q, before anything of the look-up is sent.
    """
    if context.scheme.verified or not context.backend.check_index(index.shares, count):
        require(context, index, 0, count)


@implements("one_hot", F.one_hot, note="of a secret index; name num_classes")
def one_hot(context: Context, x: SharedTensor, num_classes: int = -1) -> SharedTensor:
    """Q's own indices are looked at by Q, who then shares their codes; of others every position is compared in secret,
    and so they are where Q has to prove what it deals: it could share any code.

    Bytes 8 per position for Q's own.
    """
    _look_up(context, x, num_classes)
    own = None if context.scheme.verified else context.backend.own_code(x.shares, num_classes)
    if own is not None:
        return x.like(own, 0, 1.0)
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
    return _chosen(context, one_hot(context, index, weight.shape[0]), weight)


def _chosen(context: Context, code: SharedTensor, table: torch.Tensor) -> SharedTensor:
    """code @ table for one-hot codes [..., n]: no result is larger than an entry, however many rows there are."""
    return bilinear(context, products.matmul, code, table, 1, (torch.abs, torch.abs))


def selected(context: Context, x: torch.Tensor, dim: int, index: SharedTensor) -> torch.Tensor:
    """torch.index_select by a secret index, of one dimension or none."""
    dim %= max(1, x.dim())
    return indexed(context, x, (*(slice(None),) * dim, index.reshape(-1)))


def gathered(context: Context, x: torch.Tensor, dim: int, index: SharedTensor) -> torch.Tensor:
    """torch.gather by a secret index."""
    dim %= max(1, x.dim())
    for d, size in enumerate(index.shape):
        x = x if d == dim else x.narrow(d, 0, size)
    code = one_hot(context, index, x.shape[dim])
    return (code * x.movedim(dim, -1).unsqueeze(dim)).sum(-1)


def taken_along(context: Context, x: torch.Tensor, index: SharedTensor, dim: int | None = None) -> torch.Tensor:
    """torch.take_along_dim by a secret index."""
    if dim is None:
        return gathered(context, x.reshape(-1), 0, index.reshape(-1))
    dim %= x.dim()
    shape = list(torch.broadcast_shapes(*([1 if d == dim else n for d, n in enumerate(v.shape)] for v in (x, index))))
    wide = lambda v: v.expand([v.shape[d] if d == dim else n for d, n in enumerate(shape)])
    return gathered(context, wide(x), dim, wide(index))


def indexed(context: Context, x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], where one part of the index is a secret tensor of whole numbers.

    The public parts are taken first, for all positions that the secret one may name, and one of them is chosen.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, bool) for part in parts):
        refuse("a new dimension beside a secret index", "index first, and use unsqueeze on the result")
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    for at in reversed(range(len(parts))):  # torch takes numbers first, in tensors too
        number = parts[at].item() if _number(parts[at]) else parts[at]
        if isinstance(number, int):
            x, parts = x.select(at, number), [*parts[:at], *parts[at + 1 :]]
    dim = next(i for i, part in enumerate(parts) if is_secret(part))
    secret, count = parts[dim], x.shape[dim]
    if secret.dim() == 0 and any(isinstance(part, torch.Tensor) for i, part in enumerate(parts) if i != dim):
        chosen = indexed(context, x, (*(slice(None),) * dim, secret))
        return chosen[(*parts[:dim], *parts[dim + 1 :])]
    code = one_hot(context, secret, count)
    if all(part == slice(None) for i, part in enumerate(parts) if i != dim):
        rest = [n for d, n in enumerate(x.shape) if d != dim]
        found = _chosen(context, code, x.movedim(dim, 0).reshape(count, math.prod(rest)))
        found = found.reshape((*secret.shape, *rest))
        return found.movedim(list(range(len(secret.shape))), list(range(dim, dim + len(secret.shape))))
    taken = [i for i, part in enumerate(parts) if isinstance(part, torch.Tensor)]
    public = [part.unsqueeze(-1) if isinstance(part, torch.Tensor) else part for part in parts]
    public[dim] = torch.arange(count).expand((*secret.shape, count))
    others = [parts[i].shape for i in taken if i != dim]
    block = torch.broadcast_shapes(tuple(secret.shape), *others)
    choices = x[tuple(public)]
    before = taken[0] if taken[-1] - taken[0] == len(taken) - 1 else 0
    front = list(range(len(block) + 1))
    choices = choices.movedim([before + d for d in front], front)
    rest = list(choices.shape[len(front) :])
    code = code.expand((*block, count)).unsqueeze(-2)
    found = _chosen(context, code, choices.reshape((*block, count, math.prod(rest)))).reshape((*block, *rest))
    return found.movedim(front[:-1], [before + d for d in front[:-1]])


def _number(part: Any) -> bool:
    """Whether a part of an index is a public tensor of one whole number, and no mask."""
    return isinstance(part, torch.Tensor) and not is_secret(part) and part.dim() == 0 and part.dtype != torch.bool


def _index_refused(x: Any, index: Any) -> None:
    """Raise, where an index has secret parts, unless one of them is a tensor of whole numbers and all others public."""
    parts = [part for part in pytree.tree_leaves(index) if is_secret(part)]
    if not parts or (isinstance(x, PrivateTensor) and not any(isinstance(part, SharedTensor) for part in parts)):
        return  # public, or at its owner, who may know the index
    if any(isinstance(part, PrivateTensor) for part in parts):
        refuse("indexing shares with a private index", "only its owner knows the positions")
    if len(parts) > 1:
        refuse("indexing with several secret indices", "flatten the dimensions and index by one")
    if parts[0].dtype == torch.bool:
        refuse(
            "indexing with a secret mask", "its result's shape would tell; multiply with the mask, or use torch.where"
        )
    if parts[0].dtype.is_floating_point:
        refuse("indexing with a secret number that is not whole", "compare it, or reveal it first")


BEFORE[T.__getitem__] = _index_refused
