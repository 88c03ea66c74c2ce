"""One table: a torch function -> the handler that computes it on secret tensors.

Every spelling of an operation (`torch.relu`, `F.relu`, `Tensor.relu`, `relu_`) is a key of the same row. A call goes

1. to the table; what it lacks raises `UnsupportedOpError` with the nearest row,
2. through torch itself on meta tensors: shapes, dtypes, broadcasting and error texts are torch's own,
3. to the handler, whose result must have exactly the shapes that torch gave.

Nothing is computed or sent before steps 1 and 2 have passed, so a refused call changes no state.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.overrides import get_testing_overrides
from torch.utils import _pytree as pytree

from ..backend import Value
from ..errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    SecretAccessError,
    SectorchError,
    SessionMismatchError,
    ShapeError,
    UnsupportedOpError,
)
from . import private
from .magnitudes import bound_of, check_bound, plain_dtype
from .private import to_meta
from .shared import PrivateTensor, SecretTensor, SharedTensor, set_dispatch
from .table import (
    BEFORE,
    HANDLER,
    IN_PLACE,
    ROW_OF,
    Context,
    Row,
    spell,
    typed,
    unsupported,
)

_T = torch.Tensor
_DEPTH: ContextVar[int] = ContextVar("handlers that are running", default=0)
METADATA = {
    getattr(_T, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_meta",
                 "is_sparse", "is_quantized", "is_nested", "grad", "grad_fn", "is_mps", "is_xpu", "is_mkldnn",
                 "itemsize", "names")
    if hasattr(getattr(_T, name, None), "__get__")
} | {
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex,
    _T.is_contiguous, _T.get_device, _T.element_size, _T.is_signed, _T.__hash__, _T.stride, torch.is_floating_point,
    torch.is_complex, torch.numel, torch.is_tensor, _T.is_same_size,
}  # fmt: skip
SECRETS = {
    _T.numpy, _T.item, _T.tolist, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__, _T.__array__,
    _T.data_ptr, _T.storage, _T.untyped_storage, _T.__contains__, _T.__format__, _T.is_nonzero, _T.equal, _T.allclose,
    torch.equal, torch.allclose, torch.is_nonzero, _T.nonzero, torch.nonzero, _T.share_memory_,
    _T.data.__get__, _T.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]  a descriptor; torch's stubs hide it
    _T.__dlpack__, _T.__deepcopy__, _T.__reduce_ex__, _T.__repr__,
}  # fmt: skip


def call(func: Callable, types: tuple, args: tuple, kwargs: dict) -> Any:
    """What `__torch_function__` of every secret tensor does. Whatever it raises is a `SectorchError` with a text."""
    try:
        return _called(func, args, dict(kwargs))
    except SectorchError as error:
        if isinstance(error, DtypeError) and is_operator(func, args):
            raise UnsupportedOpError(str(error)) from error
        raise
    except Exception as error:
        raise typed(func, error) from None


_OPERATORS = frozenset((
    "add", "sub", "mul", "div", "matmul", "pow", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
    "bitwise_or", "bitwise_xor",
))  # fmt: skip
"""Methods of tensors that Python's operators reach, beside those with underscores."""


def is_operator(func: Callable, args: tuple) -> bool:
    """Whether this is `x + y` or the like of tensors and numbers, where Python takes a TypeError for "not by me".

    It would ask the other operand, and then raise an error of its own, or say that `x == y` is False.
    """
    name = getattr(func, "__name__", "")
    reached = name.startswith("__") or (name.strip("_") in _OPERATORS and func is not getattr(torch, name, None))
    return reached and all(isinstance(a, (torch.Tensor, numbers.Number, np.ndarray)) for a in args)


def _called(func: Callable, args: tuple, kwargs: dict) -> Any:
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    flat = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
    secrets = [leaf for leaf in flat if isinstance(leaf, SecretTensor)]
    if func in SECRETS:
        raise SecretAccessError(
            f"{spell(func)} would take the content out of a {type(secrets[0]).__name__}; "
            f"use .reveal(), which gives a SharedTensor's value to the querying party"
        )
    if not secrets:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    context = _context(secrets)
    shared = any(isinstance(leaf, SharedTensor) for leaf in secrets)
    if kwargs.pop("out", None) is not None:
        raise UnsupportedOpError(f"{spell(func)} with out= would write a secret into given memory; leave it out")
    if shared and func not in ROW_OF:
        raise UnsupportedOpError(unsupported(func, args, kwargs))
    if func in BEFORE:
        BEFORE[func](*args, **kwargs)
    if func in _CONVERSIONS:
        args, kwargs = _on_cpu(args, kwargs)
    meta = _on_meta(func, args, kwargs)
    if not shared:
        return private.call(context, func, args, kwargs, meta)
    target = _in_place_target(func, args)
    before = [(x, x.shares, x.scale_bits, x.bound) for x in secrets if isinstance(x, SharedTensor)]
    depth = _DEPTH.set(_DEPTH.get() + 1)
    try:
        result, raised = _handled(context, func, args, kwargs)
        written = [x for x, shares, _, _ in before if x.shares is not shares]
        returned = secrets if ROW_OF[func].view or ROW_OF[func].name in _RETURNS_ARGUMENT else written
        wrapped = _flagged(_wrap(context, ROW_OF[func], result, meta, secrets, returned), secrets, raised)
    except BaseException:
        for x, shares, scale_bits, bound in before:  # of an `inplace=True` that was refused afterwards
            x.shares, x.scale_bits, x.bound = shares, scale_bits, bound
        raise
    finally:
        _DEPTH.reset(depth)
    if ROW_OF[func].view:
        _mark_aliased(args, wrapped)
    return wrapped if target is None else _replace(target, wrapped)


def _handled(context: Context, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, tuple[Value, ...]]:
    """Run the handler as one call: its result, and the flags that it raised. What it does not expect is a refusal."""
    handler = HANDLER[func]
    args, kwargs = _positional(func, args, kwargs)
    known = _parameters(handler) or ()
    at = known.index("inplace") if "inplace" in known else len(args)
    if at < len(args) and not isinstance(args[at], bool):  # torch.elu_ has a number there
        raise UnsupportedOpError(f"{spell(func)} with {len(args)} arguments is not supported on secret tensors")
    try:
        with context.session.operation(context.party) as net:
            before = len(net.raised)
            result = handler(context, *args, **_renamed(func, handler, len(args), kwargs))
            return result, tuple(net.raised[before:])
    except RuntimeError as error:
        if "bounds" in str(error) and not isinstance(error, SectorchError):
            raise DimensionError(f"{spell(func)}: index out of range: {error}") from None
        raise
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SectorchError):
            raise
        raise UnsupportedOpError(
            f"this form of {spell(func)} is not supported on secret tensors ({type(error).__name__}: {error})"
        ) from None


def _positional(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Keyword arguments that stand where the next positional one would become positional."""
    names, known, kwargs = _torch_parameters(func) if kwargs else (), _parameters(HANDLER[func]), dict(kwargs)
    while len(args) < len(names) and (name := names[len(args)]) in kwargs:
        if (known is None and args) or (known is not None and name in known):
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs


def _renamed(func: Callable, handler: Callable, given: int, kwargs: dict) -> dict:
    """Keyword arguments under the names of the handler, which has torch's order but not always torch's names."""
    known = _parameters(handler)
    if not kwargs or known is None or all(name in known for name in kwargs):
        return kwargs
    torch_names = _torch_parameters(func)
    renamed = {}
    for name, value in kwargs.items():
        if name in known:
            renamed[name] = value
            continue
        name = {"axis": "dim", "self": "input"}.get(name, name)
        at = torch_names.index(name) if name in torch_names else -1
        new = name if name in known else known[at] if given <= at < len(known) else None
        if new is None:
            raise UnsupportedOpError(f"{spell(func)} with the argument '{name}' is not supported on secret tensors")
        renamed[new] = value
    return renamed


@functools.cache
def _parameters(handler: Callable) -> tuple[str, ...] | None:
    """Names that a handler takes after its context; None where it takes any."""
    parameters = inspect.signature(handler).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters)[1:]


@functools.cache
def _torch_parameters(func: Callable) -> tuple[str, ...]:
    stand_in = get_testing_overrides().get(func)
    return tuple(inspect.signature(stand_in).parameters) if stand_in is not None else ()


_CONVERSIONS = {_T.to, _T.cpu}


def _on_cpu(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """`.to` its own device changes nothing; another one is refused."""
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, (str, torch.device)) and torch.device(value).type != args[0].device.type:
            raise UnsupportedOpError(
                f"moving a secret tensor to {value} is not supported: it lives where its session does, on "
                f"{args[0].device}"
            )
    keep = lambda v: not isinstance(v, (str, torch.device))
    first, args = args[0], (args[0], *(v for v in args[1:] if keep(v)))
    kwargs = {k: v for k, v in kwargs.items() if keep(v)}
    return (args if len(args) > 1 or kwargs else (first, first.dtype)), kwargs


def _context(secrets: list[SecretTensor]) -> Context:
    first = secrets[0]
    for other in secrets[1:]:
        if other.session is not first.session:
            raise SessionMismatchError("tensors of two sessions cannot meet: their shares have different keys")
        if other.party != first.party:
            raise SessionMismatchError(
                f"tensors of two answering parties ({first.party} and {other.party}) cannot meet in one operation; "
                f"sectorch.aggregate([...]) adds them up and shows the sum to the querying party"
            )
        if other.scheme != first.scheme:
            raise ArgumentError(f"tensors of two number representations cannot meet: {first.scheme} and {other.scheme}")
    return Context(first.session, first.party, first.scheme)


LARGEST = 1 << 40
"""Entries of a tensor, of which no machine holds the shares."""

_READS_CONTENT = {_T.__getitem__, torch.masked_select, _T.masked_select, torch.repeat_interleave, _T.repeat_interleave}
"""Operations whose result shape depends on what a public index holds."""

_MASKED_SELECT = {torch.masked_select, _T.masked_select}
_MASKED_FILL = {torch.masked_fill, _T.masked_fill, _T.masked_fill_}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, SecretTensor) and value.dim() == 0


def _selected_on_meta(input: SecretTensor, mask: torch.Tensor) -> torch.Tensor:
    """The shape of a masked_select, which torch does not tell on meta tensors."""
    if isinstance(mask, SecretTensor) or isinstance(input, PrivateTensor):
        raise UnsupportedOpError("masked_select with a secret mask, or of a private tensor, is not supported")
    if mask.dtype != torch.bool:
        raise DtypeError(f"masked_select: expected a mask of torch.bool, got {mask.dtype}")
    with torch._C.DisableTorchFunctionSubclass():
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return torch.empty(int(mask.expand(shape).sum()), dtype=input.dtype, device="meta")


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on shapes; its errors become ours, in its words."""
    func = _T.to if func in _CONVERSIONS else func
    if func in _MASKED_SELECT:
        return _selected_on_meta(*args, **kwargs)
    if func in _MASKED_FILL:
        args = tuple(a.item() if _is_number(a) else a for a in args)
        kwargs = {k: v.item() if _is_number(v) else v for k, v in kwargs.items()}
    public_too = func not in _READS_CONTENT
    if not any(isinstance(a, (list, tuple, dict)) for a in args) and not kwargs:
        args = tuple(to_meta(a, public_too) for a in args)
    else:
        args, kwargs = pytree.tree_map(lambda leaf: to_meta(leaf, public_too), (args, kwargs))
    result = torch_on_meta(func, args, kwargs)
    for leaf in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(leaf, torch.Tensor) and leaf.numel() >= LARGEST:
            raise ShapeError(f"{spell(func)} would give {leaf.numel()} entries, more than the {LARGEST} there can be")
    return result


def torch_on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on meta tensors; what it refuses is a typed error in its words."""
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*args, **kwargs)
    except Exception as error:
        raise typed(func, error) from None


_RETURNS_ARGUMENT = ("to", "contiguous", "dropout", "requires_grad_", "positive")
"""Rows of which torch gives the argument itself where nothing changes; x * 1 is another tensor, with its own memory."""


def _wrap(context: Context, row: Row, result: Any, meta: Any, given: list, returned: list) -> Any:
    """Give each result of a handler the dtype that torch gave, after checking that the shapes agree.

    A floating-point tensor carries at least f fraction bits and a whole-number one none. `returned` are those of the
    arguments `given` that torch returns itself if nothing changed in them, or if they were written into.
    """
    if isinstance(result, SharedTensor):
        if not isinstance(meta, torch.Tensor) or result.shares.shape != meta.shape:
            shape = getattr(meta, "shape", None)
            raise ShapeError(f"internal error: '{row.name}' gave shape {tuple(result.shares.shape)}, torch {shape}")
        if meta.dtype.is_complex or (not meta.dtype.is_floating_point and result.scale_bits):
            raise UnsupportedOpError(
                f"'{row.name}': rounding a secret number to {meta.dtype} is not supported; compare it, or reveal it"
            )
        for x in returned:
            same = isinstance(x, SharedTensor) and x.shares is result.shares and x.scale_bits == result.scale_bits
            if same and plain_dtype(x) == meta.dtype:
                if x.bound is None:  # written by a handler with `inplace=True` that did not say
                    x.bound = bound_of(context, row, x.scale_bits, meta.dtype, given, _DEPTH.get() == 1)
                return x
        shares, scale_bits, bound = result.shares, result.scale_bits, result.bound
        bound = bound_of(context, row, scale_bits, meta.dtype, given, _DEPTH.get() == 1) if bound is None else bound
        if meta.dtype.is_floating_point and scale_bits < context.frac_bits:
            bits = context.frac_bits - scale_bits
            with context.session.operation(context.party):
                shares, scale_bits = shares << bits, context.frac_bits
                bound = None if bound is None else bound * 2.0**bits
        check_bound(context, row, bound, _DEPTH.get() == 1)
        return context.tensor(shares, scale_bits, bound, meta.dtype)
    if isinstance(result, SecretTensor):
        raise UnsupportedOpError(f"'{row.name}' of a private tensor is not supported on secret tensors")
    if isinstance(result, (list, tuple)):
        wrapped = [_wrap(context, row, r, m, given, returned) for r, m in zip(result, meta, strict=True)]
        if isinstance(meta, list):
            return wrapped
        return type(meta)(wrapped) if type(meta).__module__ == "torch.return_types" else tuple(wrapped)
    return result


def _flagged(wrapped: Any, given: list[SecretTensor], raised: tuple[Value, ...]) -> Any:
    """The result depends on the flags of its operands and on those that the operation raised."""
    flags = dict.fromkeys(f for x in given if isinstance(x, SharedTensor) for f in x.flags)
    flags.update(dict.fromkeys(raised))
    if flags:
        for leaf in pytree.tree_leaves(wrapped):
            if isinstance(leaf, SharedTensor):
                leaf.flags = tuple(flags)
    return wrapped


def _in_place_target(func: Callable, args: tuple) -> SharedTensor | None:
    if func not in IN_PLACE:
        return None
    target = args[0]
    if not isinstance(target, SharedTensor):
        raise UnsupportedOpError(f"{spell(func)} would write a secret into a plain tensor; write it out of place")
    if target.aliased:
        raise UnsupportedOpError(
            f"{spell(func)} would change a tensor that others are views of (or that is a view); write it out of place"
        )
    like = to_meta(target, True)
    for other in args[1:]:
        if isinstance(other, (torch.Tensor, numbers.Number)):
            promoted = torch.result_type(like, to_meta(other, True))
            if not torch.can_cast(promoted, like.dtype):
                raise DtypeError(
                    f"{spell(func)}: result type {promoted} can't be cast to the desired output type {like.dtype}"
                )
    return target


def _replace(target: SharedTensor, result: SharedTensor) -> SharedTensor:
    if result.shares.shape != target.shares.shape:
        raise ShapeError(
            f"output with shape {list(target.shares.shape)} doesn't match the broadcast shape "
            f"{list(result.shares.shape)}"
        )
    for name in ("shares", "scale_bits", "bound", "flags"):
        setattr(target, name, getattr(result, name))
    return target


def _mark_aliased(args: Any, result: Any) -> None:
    for leaf in pytree.tree_leaves((args, result)):
        if isinstance(leaf, SharedTensor):
            leaf.aliased = True


set_dispatch(call)
