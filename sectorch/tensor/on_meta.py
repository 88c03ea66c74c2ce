"""torch's own result on shapes: shapes, type promotion, broadcasting and error texts are torch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import DtypeError, SectorchError, ShapeError, UnsupportedOpError
from .arguments import CONVERSIONS
from .private import PrivateTensor
from .secret import SecretTensor
from .table import ON_META, spell, typed

_T = torch.Tensor
LARGEST = 1 << 40
"""Entries of a tensor, of which no machine holds the shares."""

READS_CONTENT = {_T.__getitem__, torch.masked_select, _T.masked_select, torch.repeat_interleave, _T.repeat_interleave,
                 torch.istft, _T.istft}  # fmt: skip
"""Operations whose result shape depends on what a public index holds."""

MASKED_SELECT = {torch.masked_select, _T.masked_select}
MASKED_FILL = {torch.masked_fill, _T.masked_fill, _T.masked_fill_}


def to_meta(leaf: Any, public_too: bool) -> Any:
    """The shape of a secret tensor, and of a public one if asked for; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(leaf, SecretTensor) or public_too:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return leaf


def first_positions(args: tuple) -> tuple:
    """The arguments of x[index] with zeros for secret whole numbers: the shape is that of any other positions.

    torch asks a single index for its content even where x has none.
    """

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, SecretTensor):
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            whole = leaf.dtype not in (torch.bool, torch.uint8) and not leaf.is_floating_point()
            return torch.zeros((), dtype=torch.int64).expand(leaf.shape) if whole else leaf

    return (args[0], *pytree.tree_map(first, args[1:]))


def is_number(value: Any) -> bool:
    """Whether a public tensor is one number, and not a mask of one bit."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, SecretTensor)
    return plain and value.dim() == 0 and value.dtype != torch.bool


def selected_on_meta(input: SecretTensor, mask: torch.Tensor) -> torch.Tensor:
    """The shape of a masked_select, which torch does not tell on meta tensors."""
    if isinstance(mask, SecretTensor) or isinstance(input, PrivateTensor):
        raise UnsupportedOpError("masked_select with a secret mask, or of a private tensor, is not supported")
    if mask.dtype != torch.bool:
        raise DtypeError(f"masked_select: expected a mask of torch.bool, got {mask.dtype}")
    with torch._C.DisableTorchFunctionSubclass():
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return torch.empty(int(mask.expand(shape).sum()), dtype=input.dtype, device="meta")


def written_on_meta(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """The shape of x after x[index] = value, of which torch gives none."""
    result = to_meta(x, True)
    torch_on_meta(
        _T.__setitem__, (result, pytree.tree_map(lambda v: to_meta(v, False), index), to_meta(value, True)), {}
    )
    return result


def result_on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on shapes; its errors become ours, in its words."""
    func = _T.to if func in CONVERSIONS else func
    if func is _T.__setitem__:
        return written_on_meta(*args)
    if func in MASKED_SELECT:
        return selected_on_meta(*args, **kwargs)
    if func in MASKED_FILL:
        args = (*args[:2], *(a.item() if is_number(a) else a for a in args[2:]))
        kwargs = {k: v.item() if k == "value" and is_number(v) else v for k, v in kwargs.items()}
    public_too = func not in READS_CONTENT
    args = first_positions(args) if func is _T.__getitem__ else args
    if not public_too:  # only an index is read
        args = (to_meta(args[0], True), *args[1:]) if args else args
    if not any(isinstance(a, (list, tuple, dict)) for a in args) and not kwargs:
        args = tuple(to_meta(a, public_too) for a in args)
    else:
        args, kwargs = pytree.tree_map(lambda leaf: to_meta(leaf, public_too), (args, kwargs))
    result = torch_on_meta(func, args, kwargs)
    for leaf in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(leaf, torch.Tensor) and leaf.numel() >= LARGEST:
            raise ShapeError(f"{spell(func)} would give {leaf.numel()} entries, more than the {LARGEST} there can be")
    return result


def _istft_on_meta(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch looks at the window's content, which stands for ones where there is none."""
    ones = lambda x: torch.ones(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x.cpu()
    args, kwargs = pytree.tree_map_only(torch.Tensor, ones, (args, kwargs))
    found = torch.istft(torch.zeros(input.shape, dtype=input.dtype, device="cpu"), *args, **kwargs)
    return torch.empty(found.shape, dtype=found.dtype, device="meta")


ON_META[torch.istft] = ON_META[_T.istft] = _istft_on_meta


def torch_on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on meta tensors; what it refuses is a typed error in its words."""
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return ON_META.get(func, func)(*args, **kwargs)
    except Exception as error:
        raise _refused(func, args, kwargs, error) from None


def _refused(func: Callable, args: tuple, kwargs: dict, error: Exception) -> SectorchError:
    """torch's words, and what they leave out: the shapes, or what there is in place of a result without one."""
    if isinstance(error, NotImplementedError) and "Meta" in str(error):
        return UnsupportedOpError(
            f"{spell(func)} is not supported on secret tensors: how large its result is depends on their values. "
            f"sectorch.supported_ops() lists all"
        )
    refused = typed(func, error)
    leaves = pytree.tree_leaves((args, kwargs))
    shapes = [str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if isinstance(refused, ShapeError) and shapes and not re.search(r"\b\d+\b", str(error)):
        return ShapeError(f"{refused}, for tensors of {', '.join(shapes)}")
    return refused


def _combinations_on_meta(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Of some of the versions of torch that there are, the meta kernel has none of the masks that it takes."""
    found = torch.combinations(torch.zeros(input.shape, device="cpu"), r, with_replacement)
    return torch.empty(found.shape, dtype=input.dtype, device="meta")


ON_META[torch.combinations] = _combinations_on_meta
