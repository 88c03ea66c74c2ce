"""The signature of a call, as torch has it: arguments under their names, and the result on meta tensors.

A call on secret tensors first runs in torch itself, on tensors without content (`result_on_meta`): shapes, type
promotion, broadcasting and the texts of errors are torch's own. Before that, arguments are brought to one form
(`positional`, `rename_keywords`, `plain_arguments`, `as_sizes`), and what torch would pass over in silence is refused.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides
from torch.utils import _pytree as pytree

from ..choreography.declaration import plain
from ..errors import ArgumentError, DtypeError, SectorchError, ShapeError, UnsupportedOpError
from .private import PrivateTensor
from .secret import SecretTensor
from .table import ON_META, as_sectorch_error, spell

# A call's arguments as its handler takes them: in torch's order, under the handler's names.


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def torch_names(kwargs: dict) -> dict:
    """Keyword arguments with numpy's names, which torch takes too, under torch's."""
    return {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()} if kwargs else kwargs


def positional(func: Callable, handler: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Turn keyword arguments into positional ones, as long as each is the next in torch's order."""
    names, known, kwargs = _torch_parameters(func) if kwargs else (), parameters(handler), dict(kwargs)
    while len(args) < len(names) and (name := names[len(args)]) in kwargs:
        if (known is None and args) or (known is not None and name in known):
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs


def rename_keywords(func: Callable, handler: Callable, given: int, kwargs: dict) -> dict:
    """Keyword arguments under the handler's names; handlers have torch's order of arguments, not always its names."""
    known = parameters(handler)
    if not kwargs or known is None or all(name in known for name in kwargs):
        return kwargs
    torch_names = _torch_parameters(func)
    under = {}
    for name, value in kwargs.items():
        if name in known:
            under[name] = value
            continue
        name = {**_NUMPY_NAMES, "self": "input"}.get(name, name)
        at = torch_names.index(name) if name in torch_names else -1
        new = name if name in known else known[at] if given <= at < len(known) else None
        if new is None:
            raise UnsupportedOpError(f"{spell(func)} with the argument '{name}' is not supported on secret tensors")
        under[new] = value
    return under


@functools.cache
def parameters(handler: Callable) -> tuple[str, ...] | None:
    """The names of a handler's parameters after its context; None if it takes any keyword."""
    parameters = inspect.signature(handler).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters)[1:]


@functools.cache
def _torch_parameters(func: Callable) -> tuple[str, ...]:
    stand_in = get_testing_overrides().get(func)
    return tuple(inspect.signature(stand_in).parameters) if stand_in is not None else ()


_T = torch.Tensor
SIZED = {
    _T.view, _T.reshape, torch.reshape, _T.expand, _T.repeat, torch.tile, _T.tile, _T.narrow, torch.narrow,
    torch.split, _T.split, torch.chunk, _T.chunk, torch.unflatten, _T.unflatten, torch.roll, _T.roll, F.interpolate,
    F.pad, F.adaptive_avg_pool2d, _T.new_zeros, _T.new_ones, _T.new_empty,
}  # fmt: skip
"""Operations that take sizes. torch takes a tensor of one whole number for a size, too."""


DROPPED: dict[Callable, tuple[str, str]] = {F.l1_loss: ("weight", "weight the losses with reduction='none'")}
"""Arguments that torch's own function does not pass on to subclasses of tensors, and the way out."""


def refuse_dropped(func: Callable) -> None:
    """Refuse an argument that torch drops before any tensor sees it. It is read from the frame of the running call.

    Raises:
        UnsupportedOpError: the argument was given.
    """
    if func not in DROPPED:
        return
    name, way = DROPPED[func]
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get(name) is not None:
        raise UnsupportedOpError(f"{spell(func)} with {name}= is not supported on secret tensors; {way}")


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def plain_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as torch's and Python's own types: numpy's scalars, and subclasses of tensors and numbers.

    A subclass of the program's could override an operation, and so decide what is sent. Numpy's complex scalars stay:
    torch takes these itself.
    """
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    if not any(_is_foreign(leaf) for leaf in leaves):
        return args, kwargs
    return pytree.tree_map(_as_python, (args, kwargs))


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, complex, str, type(None)))


def _is_foreign(leaf: Any) -> bool:
    """Whether an argument's class may override operations, or is numpy's."""
    return type(leaf) not in _PLAIN and (
        (isinstance(leaf, (int, float, complex, np.generic)) and not isinstance(leaf, np.complexfloating))
        or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, SecretTensor))
    )


def _as_python(leaf: Any) -> Any:
    if not _is_foreign(leaf):
        return leaf
    if isinstance(leaf, torch.Tensor):
        return plain(leaf)
    if isinstance(leaf, np.generic):
        return leaf.item()
    kind: Any = next(kind for kind in (int, float, complex) if isinstance(leaf, kind))
    return kind.__pos__(leaf)


def as_sizes(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace public tensors of one whole number by the number, where they stand for a size."""
    named = {F.adaptive_avg_pool2d: "output_size", F.interpolate: "scale_factor"}.get(func, "")
    given = kwargs.get(named, args[1] if len(args) > 1 and func is F.adaptive_avg_pool2d else None)
    alone = isinstance(given, torch.Tensor)
    if func not in SIZED or alone:  # which take such tensors in a pair only
        return args, kwargs

    def number(leaf: Any) -> Any:
        public = isinstance(leaf, torch.Tensor) and not isinstance(leaf, SecretTensor) and not leaf.is_meta
        whole = public and leaf.dim() == 0 and leaf.dtype in WHOLE
        return int(leaf) if whole else leaf

    return pytree.tree_map(number, (args, kwargs))


def require_dense(leaves: list) -> None:
    """Refuse sparse, nested and quantised public tensors.

    Raises:
        DtypeError: naming the conversion to a dense tensor.
    """
    for x in leaves:
        if not isinstance(x, torch.Tensor) or isinstance(x, SecretTensor):
            continue
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            way = "dequantize()" if x.is_quantized else "to_padded_tensor(0.0)" if x.is_nested else "to_dense()"
            raise DtypeError(
                f"a public tensor of layout {x.layout} and dtype {x.dtype} meets a secret one; sectorch takes dense "
                f"tensors of plain numbers: use .{way}"
            )


LIKE = {_T.expand_as: _T.expand, _T.view_as: _T.view, _T.reshape_as: _T.reshape, _T.to: _T.to, _T.type_as: _T.to}
"""Operations that read only the shape or the dtype of a second tensor, and those that take these themselves."""


def without_like_tensor(func: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """A call of one of `LIKE` with the second tensor's shape or dtype in its place."""
    x, *rest = args
    other = next((v for v in (*rest, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
    if other is None:
        return func, args, kwargs
    if LIKE[func] is not _T.to:
        return LIKE[func], (x, *other.shape), {}
    check_same_device(x, (other.device,), {})
    rest = [v for v in rest if v is not other]
    return _T.to, (x, other.dtype, *rest), {k: v for k, v in kwargs.items() if v is not other}


CONVERSIONS = {torch.Tensor.to, torch.Tensor.cpu}


def check_same_device(x: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a move to another device, by `.to` and its like.

    Raises:
        UnsupportedOpError: a device other than that of x.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, (str, torch.device)) and torch.device(value).type != x.device.type:
            raise UnsupportedOpError(
                f"moving a secret tensor to {value} is not supported; it stays where its session is, on "
                f"{x.device}: leave the call out, or use x.device"
            )


def refuse_move(fn: Callable, device: torch.device) -> None:
    """Refuse .to(), .cuda(), .half() and their like on a secure module, which has no tensors of its own to convert.

    Args:
        fn: the conversion, as `nn.Module._apply` takes it.
        device: the module's.

    Raises:
        ArgumentError: a conversion to another device or dtype.
    """
    here = torch.zeros((), device=device)
    try:
        there = fn(here)
    except (RuntimeError, AssertionError) as error:  # torch has no such device
        raise ArgumentError(
            f"a secure module computes on {device}, and the device asked for is not to be had here "
            f"({str(error).split('.')[0]}): leave the move out"
        ) from None
    if (there.device, there.dtype) != (here.device, here.dtype):
        raise ArgumentError(
            f"a secure module stays what it is: its results have the model's dtype, and it computes on {device}; move "
            f"or convert the plain model and call secure() again"
        )


def conversion_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `.to` without a device: x, the dtype, and whether to copy.

    Raises:
        UnsupportedOpError: a device other than that of x.
    """
    check_same_device(args[0], args[1:], kwargs)
    given = (*args[1:], *kwargs.values())
    dtypes = [v if isinstance(v, torch.dtype) else v.dtype for v in given if isinstance(v, (torch.dtype, torch.Tensor))]
    flags = [v for v in args[1:] if isinstance(v, bool)]  # non_blocking, copy
    copy = {"copy": True} if kwargs.get("copy", flags[1:] == [True]) else {}
    return (args[0], dtypes[0] if dtypes else args[0].dtype), copy


LARGEST = 1 << 40
"""The number of entries from which on a tensor is refused: no machine holds its shares."""

READS_CONTENT = {_T.__getitem__, torch.masked_select, _T.masked_select, torch.repeat_interleave, _T.repeat_interleave,
                 torch.istft, _T.istft}  # fmt: skip
"""Operations whose result's shape depends on the content of a public index."""

MASKED_SELECT = {torch.masked_select, _T.masked_select}
MASKED_FILL = {torch.masked_fill, _T.masked_fill, _T.masked_fill_}


def to_meta(leaf: Any, public_too: bool) -> Any:
    """A secret tensor as a meta tensor, and with `public_too` a public one; anything else unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, SecretTensor):
        return leaf.on_meta()
    if not public_too:
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def first_positions(args: tuple) -> tuple:
    """The arguments of x[index] with zeros for secret whole numbers. Any positions give the same shape.

    torch reads the content of a single index even if x is a meta tensor.
    """

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, SecretTensor):
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            whole = leaf.dtype not in (torch.bool, torch.uint8) and not leaf.is_floating_point()
            return torch.zeros((), dtype=torch.int64).expand(leaf.shape) if whole else leaf

    return (args[0], *pytree.tree_map(first, args[1:]))


def is_number(value: Any) -> bool:
    """Whether a value is a public tensor of one number, and no mask."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, SecretTensor)
    return plain and value.dim() == 0 and value.dtype != torch.bool


def selected_on_meta(input: SecretTensor, mask: torch.Tensor) -> torch.Tensor:
    """The shape of a masked_select, which does not run on meta tensors."""
    if isinstance(mask, SecretTensor) or isinstance(input, PrivateTensor):
        raise UnsupportedOpError("masked_select with a secret mask, or of a private tensor, is not supported")
    if mask.dtype != torch.bool:
        raise DtypeError(f"masked_select: expected a mask of torch.bool, got {mask.dtype}")
    with torch._C.DisableTorchFunctionSubclass():
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return torch.empty(int(mask.expand(shape).sum()), dtype=input.dtype, device="meta")


def written_on_meta(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """The shape of x after x[index] = value, which returns nothing in torch."""
    result = to_meta(x, True)
    torch_on_meta(
        _T.__setitem__, (result, pytree.tree_map(lambda v: to_meta(v, False), index), to_meta(value, True)), {}
    )
    return result


def result_on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on the operands' meta tensors (`SecretTensor.on_meta`).

    Raises:
        SectorchError: torch refuses the call; with torch's text.
        ShapeError: a result of `LARGEST` entries or more.
    """
    if func in CONVERSIONS:
        func, (args, kwargs) = _T.to, conversion_arguments(args, kwargs)
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
    """torch reads the window's content; ones stand for one without content."""
    ones = lambda x: torch.ones(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x.cpu()
    args, kwargs = pytree.tree_map_only(torch.Tensor, ones, (args, kwargs))
    found = torch.istft(torch.zeros(input.shape, dtype=input.dtype, device="cpu"), *args, **kwargs)
    return torch.empty(found.shape, dtype=found.dtype, device="meta")


ON_META[torch.istft] = ON_META[_T.istft] = _istft_on_meta


def torch_on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """func(*args, **kwargs) on meta tensors; an exception of torch's becomes a `SectorchError` with its text."""
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return ON_META.get(func, func)(*args, **kwargs)
    except Exception as error:
        raise _refused(func, args, kwargs, error) from None


def _refused(func: Callable, args: tuple, kwargs: dict, error: Exception) -> SectorchError:
    """The error for a call that torch refuses: its text, and the shapes if the text names none."""
    if isinstance(error, NotImplementedError) and "Meta" in str(error):
        return UnsupportedOpError(
            f"{spell(func)} is not supported on secret tensors: how large its result is depends on their values. "
            f"sectorch.supported_ops() lists all"
        )
    refused = as_sectorch_error(func, error)
    leaves = pytree.tree_leaves((args, kwargs))
    shapes = [str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if isinstance(refused, ShapeError) and shapes and not re.search(r"\b\d+\b", str(error)):
        return ShapeError(f"{refused}, for tensors of {', '.join(shapes)}")
    return refused


def _combinations_on_meta(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """In some versions of torch the meta kernel of `combinations` fails."""
    found = torch.combinations(torch.zeros(input.shape, device="cpu"), r, with_replacement)
    return torch.empty(found.shape, dtype=input.dtype, device="meta")


ON_META[torch.combinations] = _combinations_on_meta
