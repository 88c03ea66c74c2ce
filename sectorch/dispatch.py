"""One table: a torch function -> the handler that computes it on secret tensors.

Every spelling of an operation (`torch.relu`, `F.relu`, `Tensor.relu`, `relu_`) is a key of the same row. A call goes

1. to the table; what it lacks raises `UnsupportedOpError` with the nearest row,
2. through torch itself on meta tensors: shapes, dtypes, broadcasting and error texts are torch's own,
3. to the handler, whose result must have exactly the shapes that torch gave.

Nothing is computed or sent before steps 1 and 2 have passed, so a refused call changes no state.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from .choreography import Net, Party
from .errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    SecretAccessError,
    SectorchError,
    SessionMismatchError,
    ShapeError,
    UnsupportedOpError,
)
from .mpc.shares import Shares
from .session import Session
from .tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, set_dispatch


class Fixed(NamedTuple):
    """A handler's result: shares and the fraction bits that they carry. The dispatcher wraps it."""

    shares: Shares
    scale_bits: int


@dataclass(frozen=True)
class Context:
    """Where a handler computes: the session, the answering party and the scheme of its operands."""

    session: Session
    party: Party
    scheme: Scheme

    @property
    def net(self) -> Net:
        return self.session.net(self.party)

    @property
    def setup(self) -> Net:
        return self.session.setup(self.party)

    @property
    def frac_bits(self) -> int:
        return self.scheme.frac_bits


@dataclass
class Row:
    """One operation of the table."""

    name: str
    handler: Callable
    keys: list[Any] = field(default_factory=list)
    in_place: list[Any] = field(default_factory=list)
    note: str = ""
    view: bool = False

    @property
    def module(self) -> str:
        return self.handler.__module__.rsplit(".", 1)[-1]


TABLE: dict[str, Row] = {}
_ROW_OF: dict[Any, Row] = {}
_HANDLER: dict[Any, Callable] = {}
_IN_PLACE: set[Any] = set()


def implements(name: str, *keys, in_place: Iterable = (), note: str = "", view: bool = False) -> Callable:
    """Register a handler `f(context, *args, **kwargs) -> Fixed` (or a list or tuple of them).

    Args:
        keys: the torch functions that it computes.
        in_place: their in-place forms; the result replaces the content of the first argument.
        view: whether torch's result shares memory with its argument.
    """

    def register(handler):
        row = TABLE.setdefault(name, Row(name, handler, note=note, view=view))
        for key in (*keys, *in_place):
            _ROW_OF[key] = row
            _HANDLER[key] = handler
        row.keys.extend(keys)
        for key in in_place:
            _IN_PLACE.add(key)
            row.in_place.append(key)
        return handler

    return register


def row_of(func: Any) -> Row | None:
    """The row of a torch function, or None."""
    try:
        return _ROW_OF.get(func)
    except TypeError:
        return None


_T = torch.Tensor
_METADATA = {
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
_SECRETS = {
    _T.numpy, _T.item, _T.tolist, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__, _T.__array__,
    _T.data_ptr, _T.storage, _T.untyped_storage, _T.__contains__, _T.__format__, _T.is_nonzero, _T.equal, _T.allclose,
    torch.equal, torch.allclose, torch.is_nonzero, _T.nonzero, torch.nonzero, _T.share_memory_,
    _T.data.__get__, _T.data.__set__, _T.__dlpack__, _T.__deepcopy__, _T.__reduce_ex__, _T.__repr__,
}  # fmt: skip


def call(func: Callable, types: tuple, args: tuple, kwargs: dict) -> Any:
    """What `__torch_function__` of every secret tensor does."""
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    flat = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
    secrets = [leaf for leaf in flat if isinstance(leaf, SecretTensor)]
    if func in _SECRETS:
        raise SecretAccessError(
            f"{_spell(func)} would take the content out of a {type(secrets[0]).__name__}; "
            f"use .reveal(), which gives a SharedTensor's value to the querying party"
        )
    if not secrets:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    context = _context(secrets)
    shared = any(isinstance(leaf, SharedTensor) for leaf in secrets)
    row = _ROW_OF.get(func)
    if shared and row is None:
        raise UnsupportedOpError(_unsupported(func, args, kwargs))
    meta = _on_meta(func, args, kwargs)
    if not shared:
        return _private(context, func, args, kwargs, meta)
    target = _in_place_target(func, args)
    with context.session.operation(context.party):
        result = _HANDLER[func](context, *args, **kwargs)
    wrapped = _wrap(context, row, result, meta)
    if row.view:
        _mark_aliased(args, wrapped)
    return wrapped if target is None else _replace(target, wrapped)


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


_READS_CONTENT = {_T.__getitem__, torch.masked_select, _T.masked_select, torch.repeat_interleave, _T.repeat_interleave}
"""Operations whose result shape depends on what a public index holds."""


def _to_meta(leaf: Any, public_too: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(leaf, SecretTensor) or (public_too and leaf.dim() > 0):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return leaf


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on shapes; its errors become ours, in its words."""
    public_too = func not in _READS_CONTENT
    try:
        if not any(isinstance(a, (list, tuple, dict)) for a in args) and not kwargs:
            args = tuple(_to_meta(a, public_too) for a in args)
        else:
            args, kwargs = pytree.tree_map(lambda leaf: _to_meta(leaf, public_too), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*args, **kwargs)
    except SectorchError:
        raise
    except NotImplementedError as error:
        raise UnsupportedOpError(f"{_spell(func)}: {error}") from None
    except IndexError as error:
        raise DimensionError(str(error)) from None
    except TypeError as error:
        raise DtypeError(str(error)) from None
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    except RuntimeError as error:
        raise ShapeError(str(error)) from None


def _private(context: Context, func: Callable, args: tuple, kwargs: dict, meta: Any) -> Any:
    """An operation among one party's own tensors: run there, in plain floating point, once a session."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PrivateTensor)]
    outputs, out_spec = pytree.tree_flatten(meta)
    if not outputs or not all(isinstance(leaf, torch.Tensor) for leaf in outputs):
        raise SecretAccessError(f"{_spell(func)} would take a value out of a PrivateTensor")
    if _in_place_name(func):
        raise UnsupportedOpError(f"{_spell(func)} would change a weight in place; write it out of place")
    parent = leaves[at[0]]
    key = _cache_key(func, leaves, at)
    if key is not None and key in parent.derived:
        return pytree.tree_unflatten(parent.derived[key], out_spec)

    def run(*values):
        absent = any(value.is_meta for value in values)
        filled = [_to_meta(leaf, True) if absent else _in_double(leaf) for leaf in leaves]
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        a, k = pytree.tree_unflatten(filled, spec)
        with torch.no_grad():
            return tuple(pytree.tree_leaves(func(*a, **k)))

    located = context.setup.locally(context.party, run, *(leaves[i].value for i in at))
    row = _ROW_OF.get(func)
    results = []
    for i, (value, out) in enumerate(zip(located, outputs, strict=True)):
        result = PrivateTensor(value, context.session, context.party, context.scheme, out.dtype, parent.label)
        if row is not None and row.view and len(at) == 1:
            result.origin = (parent, lambda v, i=i: run(v)[i])
        results.append(result)
    if key is not None:
        parent.derived[key] = results
        for result in results:
            result.lasting = True
    return pytree.tree_unflatten(results, out_spec)


def _in_double(leaf: Any) -> Any:
    """Private tensors are computed on in float64, whatever dtype they pass for; a public operand joins them."""
    return leaf.double() if type(leaf) is torch.Tensor and leaf.is_floating_point() else leaf


def _cache_key(func: Callable, leaves: list, at: list[int]) -> Any:
    """Names a derived weight, so that it is derived and sent once.

    Only of lasting private tensors (a model's, or derived from those by the cache itself): an id of a passing one could
    be another's later. Every other argument must be hashable.
    """
    if any(isinstance(leaf, torch.Tensor) and (i not in at or not leaf.lasting) for i, leaf in enumerate(leaves)):
        return None
    key = (func, tuple(id(leaf) if i in at else (type(leaf), leaf) for i, leaf in enumerate(leaves)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _wrap(context: Context, row: Row, result: Any, meta: Any) -> Any:
    """Give each `Fixed` the dtype that torch gave, after checking that the shapes agree."""
    if isinstance(result, Fixed):
        if not isinstance(meta, torch.Tensor) or result.shares.shape != meta.shape:
            raise ShapeError(f"internal error: '{row.name}' gave shape {tuple(result.shares.shape)}, torch {meta}")
        return SharedTensor(
            result.shares, result.scale_bits, context.session, context.party, context.scheme, meta.dtype
        )
    if isinstance(result, (list, tuple)):
        wrapped = [_wrap(context, row, r, m) for r, m in zip(result, meta, strict=True)]
        return wrapped if isinstance(meta, list) else tuple(wrapped)
    return result


def _in_place_name(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return func in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__",)


def _in_place_target(func: Callable, args: tuple) -> SharedTensor | None:
    if func not in _IN_PLACE:
        return None
    target = args[0]
    if not isinstance(target, SharedTensor):
        raise UnsupportedOpError(f"{_spell(func)} would write a secret into a plain tensor; write it out of place")
    if target.aliased:
        raise UnsupportedOpError(
            f"{_spell(func)} would change a tensor that others are views of (or that is a view); write it out of place"
        )
    return target


def _replace(target: SharedTensor, result: SharedTensor) -> SharedTensor:
    if result.shares.shape != target.shares.shape:
        raise ShapeError(
            f"output with shape {list(target.shares.shape)} doesn't match the broadcast shape "
            f"{list(result.shares.shape)}"
        )
    target.shares, target.scale_bits = result.shares, result.scale_bits
    return target


def _mark_aliased(args: Any, result: Any) -> None:
    for leaf in pytree.tree_leaves((args, result)):
        if isinstance(leaf, SharedTensor):
            leaf.aliased = True


def _spell(func: Callable) -> str:
    """The name under which a user knows a torch function."""
    known = resolve_name(func)
    if known:
        return known.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__qualname__", name)
    if name == "__get__":
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', 'property')}"
    if "Tensor" in owner or "_TensorBase" in owner:
        return f"Tensor.{name}"
    module = getattr(func, "__module__", "") or ""
    return f"F.{name}" if module.endswith("nn.functional") else f"torch.{name}"


def nearest(func: Callable) -> list[str]:
    """Rows whose names come nearest to that of an unsupported function."""
    name = getattr(func, "__name__", str(func)).strip("_").split(".")[-1]
    return difflib.get_close_matches(name, TABLE, n=3, cutoff=0.5)


def supported_ops() -> list[dict[str, Any]]:
    """The table as data: for each operation its name, the torch functions that reach it, and a note on its cost."""
    return [
        dict(
            name=row.name,
            functions=sorted({_spell(key) for key in row.keys}),
            in_place=sorted({_spell(key) for key in row.in_place}),
            kind=row.module,
            note=row.note,
        )
        for row in sorted(TABLE.values(), key=lambda row: row.name)
    ]


def _unsupported(func: Callable, args: tuple, kwargs: dict) -> str:
    described = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                described.append(f"{type(leaf).__name__}{tuple(leaf.shape)}")
        else:
            described.append(
                repr(leaf) if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf).__name__
            )
    close = nearest(func)
    hint = f"nearest supported: {', '.join(close)}" if close else "no supported operation has a similar name"
    return (
        f"{_spell(func)}({', '.join(described)}) is not supported on secret tensors; {hint}. "
        f"sectorch.supported_ops() lists all"
    )


set_dispatch(call)
