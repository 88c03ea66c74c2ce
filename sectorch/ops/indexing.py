"""Entries by position: look-ups by a secret index, and moves and writes by public positions.

A secret index costs a comparison with every position and a product with all entries, so that no party learns which one
was read. For Q's own index the comparison is local at Q. Negative secret indices are refused, like those that are too
large. By public positions entries are moved and written without a message (`rearrange`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DimensionError, DtypeError, ShapeError
from ..ring import products
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import BEFORE, ON_META, SHARES, Context, implements, stepwise
from .common import (
    align_scales,
    as_factor,
    end_to_end,
    forbid,
    is_secret,
    local_map,
    refuse,
    require,
    signed_sum,
    summand,
)
from .linear import bilinear
from .reduction import summable

T = torch.Tensor


def _require_num_classes(x: Any, num_classes: int = -1) -> None:
    if num_classes < 0:
        refuse("one_hot without num_classes", "the number of classes would reveal the largest index: name it")


BEFORE[F.one_hot] = _require_num_classes


def _check_index(context: Context, index: SharedTensor, count: int) -> None:
    """Check that 0 <= index < count everywhere. If not, raise at Q, or withhold the call's result.

    An index that is Q's own input, moved at most, is checked by Q, which knows it: the other parties only see the call
    end. A computed index is compared in secret (`require`), and so is Q's own if Q has to prove what it deals. Without
    range checks an index out of range gives a row of zeros. No message of its own.

    Raises:
        DimensionError: at Q, before anything of the look-up is sent.
    """
    if context.scheme.verified or not context.backend.check_index(index.shares, count):
        require(context, index, 0, count)


@implements("one_hot", F.one_hot, note="of a secret index; name num_classes")
def one_hot(context: Context, x: SharedTensor, num_classes: int = -1) -> SharedTensor:
    """For its own indices Q shares the codes, 8 bytes per position. Others are compared with every position in secret.

    If Q has to prove what it deals, its own indices are compared in secret, too: it could share any code.
    """
    _check_index(context, x, num_classes)
    own = None if context.scheme.verified else context.backend.own_code(x.shares, num_classes)
    if own is not None:
        return x.like(own, 0, 1.0)
    positions = torch.arange(num_classes, device=context.session.device)
    differences = context.backend.each(torch.unsqueeze, x.shares, -1) - positions
    return x.like(context.backend.is_zero(differences), 0, 1.0)


IGNORED = -100
"""torch's default for `ignore_index`. Of secret labels none is ignored then: their number is public."""


def check_own_labels(context: Context, x: SharedTensor, classes: int, ignored: int = IGNORED) -> None:
    """Check that Q's own labels are classes, or `ignored`, before anything of the loss is computed. No message.

    Labels of others, and all where Q has to prove what it deals, are compared in secret later (`code_of_labels`).

    Raises:
        DimensionError: at Q.
    """
    if not context.scheme.verified:
        beside = None if ignored == IGNORED or 0 <= ignored < classes else ignored
        context.backend.check_index(x.shares, classes, beside)


def code_of_labels(context: Context, x: SharedTensor, classes: int, ignored: int = IGNORED) -> SharedTensor:
    """One-hot codes [..., classes] of secret labels, zero for labels that are `ignored`.

    Costs those of `one_hot`, and for an `ignored` that is no class one more comparison a label of other parties'. Any
    other label that is no class is refused by Q, or withholds the results.
    """
    if ignored == IGNORED:
        return one_hot(context, x, classes)
    if 0 <= ignored < classes:
        kept = torch.ones(classes, dtype=torch.int64, device=context.session.device)
        kept[ignored] = 0
        code = one_hot(context, x, classes)
        return code.like(context.backend.each(torch.mul, code.shares, kept), 0, 1.0)
    own = None
    if not context.scheme.verified and context.backend.check_index(x.shares, classes, ignored):
        own = context.backend.own_code(x.shares, classes, ignored)
    if own is not None:
        return x.like(own, 0, 1.0)
    positions = torch.tensor([*range(classes), ignored], device=context.session.device)
    bits = context.backend.is_zero(context.backend.each(torch.unsqueeze, x.shares, -1) - positions)
    forbid(context, -context.backend.each(torch.sum, bits, -1) + 1)
    return x.like(context.backend.each(_all_but_last, bits), 0, 1.0)


def _all_but_last(x: torch.Tensor) -> torch.Tensor:
    return x[..., :-1]


def check_public_index(index: torch.Tensor, rows: int) -> None:
    """Raise DimensionError, in torch's words, where a public index is no row of a table."""
    if not index.is_meta and index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise DimensionError(
            f"index out of range in self: a table of {rows} rows, indices from {int(index.min())} to {int(index.max())}"
        )


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
        DimensionError: an index out of range, also a negative one: at Q for its own input (see `_check_index`), at all
            parties for a public index.
    """
    if max_norm is not None:
        refuse("embedding with max_norm", "normalise the table first")
    if isinstance(weight, SharedTensor) and not is_secret(index):
        check_public_index(index, weight.shape[0])
        return weight[index]
    if not isinstance(index, SharedTensor) or not isinstance(weight, (PrivateTensor, SharedTensor, torch.Tensor)):
        refuse("this embedding", "share the index with sectorch.share(), or give plain weights")
    return _select_rows(context, one_hot(context, index, weight.shape[0]), weight)


def _select_rows(context: Context, code: SharedTensor, table: torch.Tensor) -> SharedTensor:
    """code @ table for one-hot codes [..., n]: no result is larger than an entry, however many rows there are."""
    return bilinear(context, products.matmul, code, table, 1, (torch.abs, torch.abs))


def select_by_secret_index(context: Context, x: torch.Tensor, dim: int, index: SharedTensor) -> torch.Tensor:
    """torch.index_select by a secret index, of one dimension or none."""
    dim %= max(1, x.dim())
    return index_by_secret(context, x, (*(slice(None),) * dim, index.reshape(-1)))


def select_by_own_index(context: Context, x: SharedTensor, dim: int, index: PrivateTensor) -> torch.Tensor:
    """torch.index_select by the answering party's own index, [n]: a product with its own one-hot matrix.

    Nobody else learns which entries are selected, and an entry may be selected several times. Exact; rounds 1, bytes 8
    for each element of x (from S to A), and for each element of the matrix once a session.

    Raises:
        ShapeError, ArgumentError: at the owner, for an index out of range.
    """
    dim %= max(1, x.dim())
    code: Any = F.one_hot(index, x.shape[dim]).t()  # of whole numbers, so the result keeps the fraction bits of x
    x = as_factor(context, x)
    entries: Any = torch.movedim(x, dim, -1)
    # Each result is an entry of x, and so no sum that could leave the ring.
    shares = context.backend.linear(one_hot_product, entries.shares, code.weight())
    found = x.like(shares, x.scale_bits, x.bound)
    return torch.movedim(found, -1, dim)


def one_hot_product(x: torch.Tensor, code: torch.Tensor, _form: None) -> torch.Tensor:
    """The product with an owner's matrix, as `Backend.linear` takes it."""
    return products.matmul(x, code)


def gather_by_secret_index(context: Context, x: torch.Tensor, dim: int, index: SharedTensor) -> torch.Tensor:
    """torch.gather by a secret index."""
    dim %= max(1, x.dim())
    for d, size in enumerate(index.shape):
        x = x if d == dim else x.narrow(d, 0, size)
    code = one_hot(context, index, x.shape[dim])
    return (code * x.movedim(dim, -1).unsqueeze(dim)).sum(-1)


def take_along_secret_index(
    context: Context, x: torch.Tensor, index: SharedTensor, dim: int | None = None
) -> torch.Tensor:
    """torch.take_along_dim by a secret index."""
    if dim is None:
        return gather_by_secret_index(context, x.reshape(-1), 0, index.reshape(-1))
    dim %= x.dim()
    shape = list(torch.broadcast_shapes(*([1 if d == dim else n for d, n in enumerate(v.shape)] for v in (x, index))))
    wide = lambda v: v.expand([v.shape[d] if d == dim else n for d, n in enumerate(shape)])
    return gather_by_secret_index(context, wide(x), dim, wide(index))


def index_by_secret(context: Context, x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], where one part of the index is a secret tensor of whole numbers.

    The public parts are applied first, for all values of the secret one; a one-hot code then selects among the results.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, bool) for part in parts):
        refuse("a new dimension beside a secret index", "index first, and use unsqueeze on the result")
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    for at in reversed(range(len(parts))):  # torch applies numbers first, in tensors too
        number = parts[at].item() if _is_public_number(parts[at]) else parts[at]
        if isinstance(number, int):
            x, parts = x.select(at, number), [*parts[:at], *parts[at + 1 :]]
    dim = next(i for i, part in enumerate(parts) if is_secret(part))
    secret, count = parts[dim], x.shape[dim]
    if secret.dim() == 0 and any(isinstance(part, torch.Tensor) for i, part in enumerate(parts) if i != dim):
        chosen = index_by_secret(context, x, (*(slice(None),) * dim, secret))
        return chosen[(*parts[:dim], *parts[dim + 1 :])]
    code = one_hot(context, secret, count)
    if all(part == slice(None) for i, part in enumerate(parts) if i != dim):
        rest = [n for d, n in enumerate(x.shape) if d != dim]
        found = _select_rows(context, code, x.movedim(dim, 0).reshape(count, math.prod(rest)))
        found = found.reshape((*secret.shape, *rest))
        return found.movedim(list(range(len(secret.shape))), list(range(dim, dim + len(secret.shape))))
    taken = [i for i, part in enumerate(parts) if isinstance(part, torch.Tensor)]
    public = [part.unsqueeze(-1) if isinstance(part, torch.Tensor) else part for part in parts]
    public[dim] = torch.arange(count).expand((*secret.shape, count))
    others = [parts[i].shape for i in taken if i != dim]
    block = torch.broadcast_shapes(tuple(secret.shape), *others)
    choices = x[tuple(public)]
    # Where indices are neighbours torch puts their dimensions in the place of the first, else before all others.
    before = taken[0] if taken[-1] - taken[0] == len(taken) - 1 else 0
    front = list(range(len(block) + 1))
    choices = choices.movedim([before + d for d in front], front)
    rest = list(choices.shape[len(front) :])
    code = code.expand((*block, count)).unsqueeze(-2)
    found = _select_rows(context, code, choices.reshape((*block, count, math.prod(rest)))).reshape((*block, *rest))
    return found.movedim(front[:-1], [before + d for d in front[:-1]])


def _is_public_number(part: Any) -> bool:
    """Whether a part of an index is a public tensor of one number, and no mask."""
    return isinstance(part, torch.Tensor) and not is_secret(part) and part.dim() == 0 and part.dtype != torch.bool


def _check_secret_index(x: Any, index: Any) -> None:
    """Refuse an index with secret parts, unless it has one, which is a tensor of whole numbers."""
    parts = [part for part in pytree.tree_leaves(index) if is_secret(part)]
    if not parts or (isinstance(x, PrivateTensor) and not any(isinstance(part, SharedTensor) for part in parts)):
        return  # public, or computed at the owner, which knows the index
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


BEFORE[T.__getitem__] = _check_secret_index


# The leaf of a decision tree. It costs a product for each node, so that no party learns the path.


def leaf_of_tree(right: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values [..., outputs] of the leaves that complete binary trees of k levels lead to.

    Args:
        right: [..., 2^k - 1] of torch.bool, level by level from the root: whether a node leads to the right.
        values: [..., 2^k, outputs], leaves from left to right, with broadcasting of the dimensions before.

    On shares: rounds log2 k + 2 at most; bytes some 20 for each node. Exact, and no larger than a value is.

    Source: Ma et al., "Let's Stride Blindfolded in a Forest" (NDSS 2021), with a stride that doubles in each round.

    Raises:
        DtypeError: `right` is not of torch.bool. ShapeError: other shapes.
    """
    if has_torch_function((right, values)):
        return handle_torch_function(leaf_of_tree, (right, values), right, values)
    _tree_levels(right, values)
    code = _leaf_code(right.to(torch.int64))
    return (code.unsqueeze(-1) * values).sum(-2)


def _tree_levels(right: torch.Tensor, values: torch.Tensor) -> int:
    if right.dtype != torch.bool:
        raise DtypeError(f"a tree's nodes decide by torch.bool, got {right.dtype}; compare: x > threshold")
    nodes = right.shape[-1] if right.dim() else 0
    if values.dim() < 2 or nodes < 1 or nodes & (nodes + 1) or values.shape[-2] != nodes + 1:
        raise ShapeError(
            f"a complete tree has 2^k - 1 nodes and 2^k leaves, got nodes {list(right.shape)} and values "
            f"{list(values.shape)}"
        )
    return nodes.bit_length()


def _leaf_code(right: torch.Tensor) -> torch.Tensor:
    """The one-hot code of the leaf, [..., 2^k], from the nodes' decisions, 0 or 1.

    The code of the upper half of the levels is multiplied by the codes of the trees below it: ceil(log2 k) rounds. The
    last entry of a code follows from the others, which sum to one.
    """
    levels = right.shape[-1].bit_length()
    if levels == 1:
        return torch.cat([1 - right, right], -1)
    if levels == 2:
        root, below = right[..., :1], right[..., 1:]
        both = root * below
        first = below[..., :1] - both[..., :1]
        return torch.cat([1 - root - first, first, root - both[..., 1:], both[..., 1:]], -1)
    top = levels // 2
    code = _leaf_code(right[..., : 2**top - 1]).unsqueeze(-1)
    most = code * _leaf_code(_trees_below(right, top))[..., :-1]
    return torch.cat([most, code - most.sum(-1, keepdim=True)], -1).flatten(-2)


def _trees_below(right: torch.Tensor, top: int) -> torch.Tensor:
    """The decisions of the trees below the first `top` levels, [..., 2^top, nodes]."""
    parts = [
        right[..., 2**level - 1 : 2 ** (level + 1) - 1].unflatten(-1, (2**top, 2 ** (level - top)))
        for level in range(top, right.shape[-1].bit_length())
    ]
    return torch.cat(parts, -1)


@SHARES.implements_unlisted("one_hot", leaf_of_tree)
def _leaf_of_tree(context: Context, right: SharedTensor, values: Any) -> SharedTensor:
    # Decisions are 0 or 1 by their type, so codes are one-hot, and what they select is no larger than a value is.
    above = _tree_levels(right, values)
    right = right.like(right.shares, 0, dtype=torch.int64)
    for levels in split_of_tree(above, values.shape[-1])[0]:
        above -= levels
        part: Any = right[..., : 2 ** (above + levels) - 1]
        part = _trees_below(part, above) if above else part.unsqueeze(-2)
        code: Any = _leaf_code(part.bounded(None))[..., :-1]
        code = code.bounded(1.0)
        values = _select_values(context, code, values.unflatten(-2, (2**above, 2**levels)))
    return values.like(values.shares[..., 0, :], values.scale_bits, values.bound)


def _select_values(context: Context, code: SharedTensor, values: Any) -> SharedTensor:
    """The values [..., outputs] of [..., n, outputs] that one-hot codes name, without their last entry [..., n - 1].

    As v_n + sum_i code_i (v_i - v_n): a product less, and exact, since an owner's values are rounded first.
    """
    if isinstance(values, PrivateTensor):
        unit = 2.0**values.weight_bits
        values = torch.round(values * unit) / unit
    last = values[..., -1:, :]
    parts = values[..., :-1, :] - last
    if isinstance(values, SharedTensor):
        shares = context.backend.multiply(contract_code, code.shares, parts.shares)
        found = values.like(shares, values.scale_bits)
    else:
        found = bilinear(context, contract_code, code, parts, 1, (torch.abs, torch.abs))
    made = signed_sum(context, found.bounded(None), last[..., 0, :])
    return made.bounded(values.bound if isinstance(values, SharedTensor) else found.bound)


def contract_code(code: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum_i code_i values_i, for codes [..., n] and values [..., n, outputs]."""
    return (code.unsqueeze(-1) * values).sum(-2)


def code_bytes(levels: int) -> int:
    """Bytes of a leaf's code: a product takes 16 for each element of its operands and 8 for each result."""
    if levels < 3:
        return (0, 0, 3 * 16 + 2 * 8)[levels]
    top = levels // 2
    products = 2**top * (2 ** (levels - top) - 1)
    return code_bytes(top) + 2**top * code_bytes(levels - top) + 16 * (2**top + products) + 8 * products


@functools.cache
def split_of_tree(levels: int, outputs: int) -> tuple[tuple[int, ...], int]:
    """In what steps the values of a tree's leaves are selected: the levels of each, from the leaves up; and the bytes.

    A step codes its levels and multiplies the codes by what the steps before left. Of all splits it is the one with the
    fewest rounds, and among those the fewest bytes.
    """

    def cost(steps: tuple[int, ...]) -> tuple[int, int]:
        above, rounds, total = levels, 0, 0
        for step in steps:
            above -= step
            products = (2**step - 1) * (16 * (1 + outputs) if rounds else 8) + (8 * outputs if rounds else 0)
            total += 2**above * (code_bytes(step) + products)
            rounds = max(rounds, (step - 1).bit_length()) + 1
        return rounds, total

    best = min(_compositions(levels), key=cost)
    return best, cost(best)[1]


def _compositions(total: int) -> list[tuple[int, ...]]:
    """All ordered sums of positive numbers."""
    return [()] if total == 0 else [(k, *rest) for k in range(1, total + 1) for rest in _compositions(total - k)]


# Entries of several tensors moved or written by public positions.
#
# Each entry of the operands gets a number, and torch's own function runs on these numbers. Its result tells where every
# entry goes, and the shares are reordered likewise: no message, exact. The number 0 stands for a zero, with which a
# function may pad.


def rearrange(context: Context, func: Callable, *tensors: Any) -> Any:
    """func(*tensors) for a func that moves entries, and pads with zeros at most."""
    parts = align_scales(context, *(summand(context, x) for x in tensors))
    first, numbers, count = parts[0], [], 1
    for x in parts:
        size = x.shares.shape.numel()
        numbers.append(torch.arange(count, count + size).reshape(x.shares.shape))
        count += size
    flat = [context.backend.each(torch.flatten, x.shares) for x in parts]
    everything = context.backend.each(_with_leading_zero, *flat)
    known = [x.bound for x in parts if x.bound is not None]
    bound = max(known) if len(known) == len(parts) else None

    def reordered(places: torch.Tensor) -> SharedTensor:
        return first.like(context.backend.each(partial(_entries_at, places=places), everything), bound=bound)

    return pytree.tree_map(reordered, func(*numbers))


def _with_leading_zero(*parts: torch.Tensor) -> torch.Tensor:
    return end_to_end(parts[0].new_zeros(1), *parts)


def _entries_at(v: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return v[places.to(v.device).reshape(-1)].reshape(places.shape)  # of one number torch would ask which it is


def _mover_of_all(func: Callable) -> Callable:
    """A function of tensors alone, or of one list of them."""

    def handler(context: Context, *tensors: Any, **how: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
            return rearrange(context, lambda *v: func(v, **how), *tensors[0])
        return rearrange(context, partial(func, **how), *tensors)

    return handler


def _mover_of_first(func: Callable) -> Callable:
    """A function of one tensor and public arguments."""

    def handler(context: Context, x: SharedTensor, *args: Any, **how: Any) -> Any:
        _public_positions(args, how)
        return rearrange(context, lambda v: func(v, *args, **how), x)

    return handler


def _public_positions(*given: Any) -> None:
    if any(is_secret(leaf) for leaf in pytree.tree_leaves(given)):
        refuse("moving or writing entries by secret positions", "only public positions can be taken; use torch.where")


ALL: dict[str, tuple] = {
    "atleast_1d": (torch.atleast_1d,),
    "atleast_2d": (torch.atleast_2d,),
    "atleast_3d": (torch.atleast_3d,),
    "meshgrid": (torch.meshgrid, torch._VF.meshgrid),  # pyright: ignore[reportAttributeAccessIssue]
    "cartesian_prod": (torch.cartesian_prod,),
    "block_diag": (torch.block_diag,),
    "column_stack": (torch.column_stack,),
    "dstack": (torch.dstack,),
}
FIRST: dict[str, tuple] = {
    "hsplit": (torch.hsplit, T.hsplit),
    "vsplit": (torch.vsplit, T.vsplit),
    "dsplit": (torch.dsplit, T.dsplit),
    "diagflat": (torch.diagflat, T.diagflat),
    "combinations": (torch.combinations,),
    "take": (torch.take, T.take),
    "fftshift": (torch.fft.fftshift,),
    "ifftshift": (torch.fft.ifftshift,),
}
SHARING = ("atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "hsplit", "vsplit", "dsplit")
"""Functions whose results are views of their operands."""
for _table, _made in ((ALL, _mover_of_all), (FIRST, _mover_of_first)):
    for _name, _functions in _table.items():
        for _function in _functions:
            implements(_name, _function, view=_name in SHARING, note="local")(_made(_function))


@implements("constant_pad_nd", torch.constant_pad_nd, note="local")
def constant_pad_nd(context: Context, x: SharedTensor, pad: Any, value: Any = 0) -> torch.Tensor:
    return F.pad(x, list(pad), value=value)


def write_entries(context: Context, func: Callable, x: Any, source: Any) -> SharedTensor:
    """func(x, source) for a func that writes entries of the source, which may be a number, over entries of x."""
    if not isinstance(source, torch.Tensor):
        source = _fill_value(x, source)
    if x.dtype != source.dtype and not x.dtype.is_floating_point and source.dtype != torch.bool:
        raise DtypeError(f"entries of {source.dtype} cannot be written into a tensor of {x.dtype}; use .to({x.dtype})")
    return rearrange(context, func, x, source)


def _fill_value(x: torch.Tensor, value: float) -> torch.Tensor:
    if x.dtype == torch.bool:
        return torch.tensor(bool(value))
    if x.dtype.is_floating_point:
        return torch.tensor(float(value))
    info = torch.iinfo(x.dtype)
    if value % 1 or not info.min <= value <= info.max:
        raise DtypeError(f"{value} cannot be written into a tensor of {x.dtype}")
    return torch.tensor(int(value), dtype=x.dtype)


@implements("index_copy", torch.index_copy, T.index_copy, in_place=(T.index_copy_,), note="local; public index")
def index_copy(context: Context, x: Any, dim: int, index: Any, source: Any) -> SharedTensor:
    _public_positions(index)
    return write_entries(context, lambda v, s: torch.index_copy(v, dim, index, s), x, source)


@implements("index_fill", torch.index_fill, T.index_fill, in_place=(T.index_fill_,), note="local; public index")
def index_fill(context: Context, x: Any, dim: int, index: Any, value: Any) -> SharedTensor:
    _public_positions(index)
    return write_entries(context, lambda v, s: torch.index_fill(v, dim, index, s), x, value)


def _scatter_by_secret_index(
    context: Context, x: Any, dim: int, index: Any, source: torch.Tensor, add: bool
) -> SharedTensor:
    """x with the source's entries written over it, or added to it, at secret positions along `dim`.

    Costs those of `one_hot`. Added entries take one product more; written ones a selection for each place of the index
    along `dim`, one after the other, since the last of several entries for one position stays, as torch's does.
    """
    if not x.dim():
        found: Any = _scatter_by_secret_index(context, x.reshape(1), 0, index.reshape(-1), source.reshape(-1), add)
        return found.reshape(())
    if not index.numel():
        return summand(context, x)
    dim %= x.dim()
    written = tuple(slice(None) if d == dim else slice(size) for d, size in enumerate(index.shape))
    source, part = source[tuple(slice(size) for size in index.shape)], x[written]
    code: Any = one_hot(context, index, x.shape[dim]).movedim(-1, dim)
    if add:
        part = part + (code * source.unsqueeze(dim)).sum(dim + 1)
    else:
        code = code.like(code.shares, 0, 1.0, dtype=torch.bool)
        for place in range(index.shape[dim]):
            part = torch.where(code.select(dim + 1, place), source.narrow(dim, place, 1), part)

    def put(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        v = v.clone()
        v[written] = s
        return v

    return write_entries(context, put, x, part)


@implements("scatter", torch.scatter, T.scatter, in_place=(T.scatter_,),
            note="local by a public index; by a secret one a selection for each; reduce as scatter_reduce")  # fmt: skip
@stepwise
def scatter(context: Context, x: Any, dim: int, index: Any, src: Any = None, value: Any = None, *,
            reduce: Any = None) -> SharedTensor:  # fmt: skip
    source = value if src is None else src
    if isinstance(index, SharedTensor) and reduce in (None, "add"):
        source = source if isinstance(source, torch.Tensor) else _fill_value(x, source).to(x.dtype).expand(index.shape)
        return _scatter_by_secret_index(context, x, dim, index, source, reduce == "add")
    _public_positions(index)
    if reduce is not None:
        source = source if isinstance(source, torch.Tensor) else _fill_value(x, source).expand(index.shape)
        return scatter_reduce(context, x, dim, index, source, {"add": "sum", "multiply": "prod"}.get(reduce, reduce))
    if isinstance(source, torch.Tensor):
        return write_entries(context, lambda v, s: torch.scatter(v, dim, index, s), x, source)
    return write_entries(context, lambda v, s: torch.scatter(v, dim, index, int(s)), x, source)


@implements("masked_scatter", torch.masked_scatter, T.masked_scatter, in_place=(T.masked_scatter_,),
            note="local; public mask")  # fmt: skip
def masked_scatter(context: Context, x: Any, mask: Any, source: Any) -> SharedTensor:
    _public_positions(mask)
    return write_entries(context, lambda v, s: torch.masked_scatter(v, mask, s), x, source)


@implements("slice_scatter", torch.slice_scatter, T.slice_scatter, note="local")
def slice_scatter(
    context: Context, x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> SharedTensor:
    return write_entries(context, lambda v, s: torch.slice_scatter(v, s, dim, start, end, step), x, src)


@implements("select_scatter", torch.select_scatter, T.select_scatter, note="local")
def select_scatter(context: Context, x: Any, src: Any, dim: int, index: int) -> SharedTensor:
    _public_positions(index)
    return write_entries(context, lambda v, s: torch.select_scatter(v, s, dim, index), x, src)


@implements("diagonal_scatter", torch.diagonal_scatter, T.diagonal_scatter, note="local")
def diagonal_scatter(context: Context, x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> SharedTensor:
    return write_entries(context, lambda v, s: torch.diagonal_scatter(v, s, offset, dim1, dim2), x, src)


@implements("fill", torch.fill, in_place=(T.fill_, torch.fill_), note="local")
def fill(context: Context, x: Any, value: Any) -> SharedTensor:
    return write_entries(context, torch.fill, x, value)


@implements("fill", in_place=(T.zero_, torch.zero_))
def zero(context: Context, x: SharedTensor) -> SharedTensor:
    return write_entries(context, torch.fill, x, 0)


@implements("copy", in_place=(T.copy_,), note="local")
def copy(context: Context, x: SharedTensor, src: Any, non_blocking: bool = False) -> SharedTensor:
    return write_entries(context, lambda v, s: v.copy_(s), x, src)


def _secret_mask(index: Any) -> tuple[SharedTensor, tuple, int] | None:
    """The secret mask of an index, the same index with slices in its place, and how many dimensions stand before it.

    None where there is none, or another tensor beside it.
    """
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [i for i, part in enumerate(parts) if isinstance(part, torch.Tensor)]
    if len(tensors) != 1 or not isinstance(parts[tensors[0]], SharedTensor) or parts[tensors[0]].dtype != torch.bool:
        return None
    before, mask, after = parts[: tensors[0]], parts[tensors[0]], parts[tensors[0] + 1 :]
    if not all(part is None or isinstance(part, slice) for part in before) or not all(
        isinstance(part, slice) for part in after
    ):
        return None
    return mask, (*before, *(slice(None),) * mask.dim(), *after), len(before)


def _check_number(*args: Any, value: Any = None, **named: Any) -> None:
    """Refuse a number to be written that a whole-number dtype does not hold, in torch's words."""
    x = args[0] if args else named["input"]
    value = args[-1] if value is None and args else value
    if x.dtype.is_floating_point or x.dtype.is_complex or type(value) not in (int, float):
        return
    holds = x.dtype == torch.bool or torch.iinfo(x.dtype).min <= value <= torch.iinfo(x.dtype).max
    if not math.isfinite(value) or not holds:
        raise DtypeError(f"{value} cannot be written: value cannot be converted to type {x.dtype} without overflow")


for _function in (T.masked_fill, T.masked_fill_, torch.masked_fill, T.index_fill, T.index_fill_, torch.index_fill,
                  T.scatter, T.scatter_, torch.scatter, T.fill_, torch.fill, torch.fill_):  # fmt: skip
    BEFORE[_function] = _check_number


def _before_setitem(x: Any, index: Any, value: Any) -> None:
    _check_number(x, value)
    if _secret_mask(index) is None:
        _public_positions(index)
    elif isinstance(value, torch.Tensor) and value.dim():
        refuse(
            "writing several entries by a secret mask", "their number would tell; write a number, or use torch.where"
        )


def _setitem_on_meta(x: torch.Tensor, index: Any, value: Any) -> None:
    """As torch's, and for a mask with slices in its place, since its content decides what torch looks at."""
    mask = next((part for part in index if isinstance(part, torch.Tensor)), None) if isinstance(index, tuple) else index
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.is_meta:
        parts, within = index if isinstance(index, tuple) else (index,), (slice(None),) * mask.dim()
        at = next(i for i, part in enumerate(parts) if part is mask)
        shape = x[(*parts[:at], *within, *parts[at + 1 :])].shape[at : at + mask.dim()]
        if shape != mask.shape:
            raise IndexError(f"a mask of shape {list(mask.shape)} for dimensions of {list(shape)}")
        index = (*parts[:at], *within, *parts[at + 1 :])
    x[index] = value


BEFORE[T.__setitem__] = _before_setitem
ON_META[T.__setitem__] = _setitem_on_meta


@implements("setitem", in_place=(T.__setitem__,),
            note="local by a public index; by a secret mask, of a number, as where")  # fmt: skip
@stepwise
def setitem(context: Context, x: SharedTensor, index: Any, value: Any) -> SharedTensor:
    found = _secret_mask(index)
    if found is None:
        _public_positions(index)
    else:
        mask, index, before = found
        part = x[index]
        value = value if isinstance(value, torch.Tensor) else _fill_value(x, value)
        value = torch.where(mask.reshape(*mask.shape, *(1,) * (part.dim() - before - mask.dim())), value, part)

    def put(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        v[index] = s
        return v

    return write_entries(context, put, x, value)


def _accumulate(context: Context, func: Callable, x: Any, source: Any) -> SharedTensor:
    """func(x, source) for a func that adds entries of the source to x at public positions."""
    if x.dtype == torch.bool:
        refuse("adding up truth values in their own type", "use .to(torch.int64) first")
    if x.dtype != source.dtype:
        raise DtypeError(f"entries of {source.dtype} cannot be added to a tensor of {x.dtype}; use .to({x.dtype})")
    shape = tuple(x.shape)
    added = lambda s: func(s.new_zeros(shape), s)
    if isinstance(source, PrivateTensor) or not is_secret(source):
        source = summand(context, source)
    terms = added(torch.ones(source.shares.shape, dtype=torch.int64))
    terms = max(1, int(terms.max())) if terms.numel() else 1
    y = local_map(context, added, summable(context, source, terms), terms=terms)
    return signed_sum(context, summand(context, x), y)


@implements("index_add", torch.index_add, T.index_add, in_place=(T.index_add_,), note="local; public index; as sum")
def index_add(context: Context, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> SharedTensor:
    _public_positions(index)
    source = source if alpha == 1 else source * alpha
    return _accumulate(context, lambda v, s: torch.index_add(v, dim, index.to(v.device), s), x, source)


@implements("scatter_add", torch.scatter_add, T.scatter_add, in_place=(T.scatter_add_,),
            note="local by a public index; by a secret one a product; as sum")  # fmt: skip
@stepwise
def scatter_add(context: Context, x: Any, dim: int, index: Any, src: Any) -> SharedTensor:
    if isinstance(index, SharedTensor):
        return _scatter_by_secret_index(context, x, dim, index, src, add=True)
    _public_positions(index)
    return _accumulate(context, lambda v, s: torch.scatter_add(v, dim, index.to(v.device), s), x, src)


PAIRS = {"sum": torch.add, "mean": torch.add, "amax": torch.maximum, "amin": torch.minimum, "prod": torch.mul}
"""The operation that combines two entries of one position, by torch's name for the reduction."""


def _combine_by_position(
    values: torch.Tensor, places: torch.Tensor, join: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the entries of each public position by a tree; also returns the positions, each once."""
    order = torch.argsort(places, stable=True)
    values, places = values[order], places[order]
    while True:
        first = torch.searchsorted(places, places)
        even = (torch.arange(len(places)) - first) % 2 == 0
        paired = torch.zeros_like(even)
        paired[:-1] = even[:-1] & (places[1:] == places[:-1])
        left, alone = paired.nonzero().squeeze(1), (even & ~paired).nonzero().squeeze(1)
        if not len(left):
            return values, places
        values = torch.cat((join(values[left], values[left + 1]), values[alone]))
        places = torch.cat((places[left], places[alone]))
        order = torch.argsort(places, stable=True)
        values, places = values[order], places[order]


def _scatter_reduce(x: Any, places: torch.Tensor, src: Any, reduce: str, include_self: bool) -> torch.Tensor:
    """x with the reduction of src's entries at each public position, including its own if `include_self`."""
    if reduce not in PAIRS:
        raise ArgumentError(f"reduce is one of {', '.join(PAIRS)}, got {reduce!r}")
    if x.dtype != src.dtype:
        raise DtypeError(f"entries of {src.dtype} cannot be joined with a tensor of {x.dtype}; use .to({x.dtype})")
    if x.dtype == torch.bool:
        refuse("joining truth values in their own type", "use .to(torch.int64) first")
    flat, values, places = x.reshape(-1), src.reshape(-1), places.reshape(-1)
    touched = places.unique()
    if include_self:
        values, places = torch.cat((flat[touched], values)), torch.cat((touched, places))
    if reduce in ("sum", "mean"):
        found = torch.index_add(torch.index_fill(flat, 0, touched, 0), 0, places, values)
        if reduce == "sum" or not len(touched):
            return found.reshape(x.shape)
        counts = torch.bincount(places, minlength=len(flat))[touched]
        found = found[touched]
        means = found / counts.to(x.dtype) if x.is_floating_point() else torch.div(found, counts, rounding_mode="floor")
        return torch.index_copy(flat, 0, touched, means).reshape(x.shape)
    if not len(touched):
        return x.clone()
    combined, _ = _combine_by_position(values, places, PAIRS[reduce])
    return torch.index_copy(flat, 0, touched, combined).reshape(x.shape)


@implements("scatter_reduce", torch.scatter_reduce, T.scatter_reduce, in_place=(T.scatter_reduce_,),
            note="public index; sums local; maxima, minima and products by a tree")  # fmt: skip
@stepwise
def scatter_reduce(
    context: Context, x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    _public_positions(index)
    if reduce == "sum" and include_self:
        return scatter_add(context, x, dim, index, src)
    numbers = torch.arange(x.numel()).reshape(x.shape)
    for d, size in enumerate(index.shape):
        src = src.narrow(d, 0, size)
        numbers = numbers if d == dim % x.dim() else numbers.narrow(d, 0, size)
    return _scatter_reduce(x, numbers.gather(dim, index), src, reduce, include_self)


@implements("index_reduce", torch.index_reduce, T.index_reduce, in_place=(T.index_reduce_,),
            note="as scatter_reduce")  # fmt: skip
@stepwise
def index_reduce(
    context: Context, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    _public_positions(index)
    places = torch.arange(x.numel()).reshape(x.shape).index_select(dim, index)
    return _scatter_reduce(x, places, source, reduce, include_self)


@implements("fill_diagonal", in_place=(T.fill_diagonal_,), note="local")
def fill_diagonal(context: Context, x: SharedTensor, fill_value: float, wrap: bool = False) -> SharedTensor:
    return write_entries(context, lambda v, s: v.fill_diagonal_(int(s), wrap), x, fill_value)


@implements("index_put", torch.index_put, T.index_put, in_place=(T.index_put_, torch.index_put_),
            note="local; public indices; added up as sum")  # fmt: skip
def index_put(context: Context, x: Any, indices: Any, values: Any, accumulate: bool = False) -> SharedTensor:
    _public_positions(indices)
    run = lambda v, s: torch.index_put(v, [i if i is None else i.to(v.device) for i in indices], s, accumulate)
    return _accumulate(context, run, x, values) if accumulate else write_entries(context, run, x, values)


@implements("put", torch.put, T.put, in_place=(T.put_,), note="local; public index; added up as sum")
def put(context: Context, x: Any, index: Any, source: Any, accumulate: bool = False) -> SharedTensor:
    _public_positions(index)
    run = lambda v, s: torch.put(v, index.to(v.device), s, accumulate)
    return _accumulate(context, run, x, source) if accumulate else write_entries(context, run, x, source)
