"""The dispatch of torch functions on secret tensors: what `torch.relu(shared)` goes through.

`SecretTensor.__torch_function__` hands every call to `call`, which takes these steps:

1. `normal_form` answers what computes nothing on secrets (shapes, dtypes, public tensors), and refuses what would take
   a content out. Functions in `table.COMPOSED` are computed by other torch functions. A recording (`nn/capture.py`)
   takes this step and step 4 too, and makes a node in place of the others.
2. The table gives the row. Without one the call ends in `UnsupportedOpError`, which names the nearest rows.
3. `ops/infinity.py` takes over a call whose operands may stand for infinity.
4. torch itself runs on meta tensors (`result_on_meta`): shapes, dtypes, broadcasting and error texts are torch's own.
   Until here nothing is computed or sent, so a refused call changes no state.
5. `_compute` runs the handler (`ops/activation.py: relu`). Operations of private tensors alone run at their owner
   (`call_at_owner`).
6. `_wrap` holds the result to the shapes of step 4, and gives it torch's dtype, a bound, and the flags of its operands.
   What was written in place is written to the views of the same memory.

A new operation is a handler with a decorator: see `table.py`.
"""

from __future__ import annotations

import itertools
import math
import numbers
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..backend import RaisedFlags, Value
from ..choreography.located import Located, compute, run_in
from ..errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    FixedPointRangeError,
    SecretAccessError,
    SectorchError,
    SessionMismatchError,
    ShapeError,
    UnsupportedOpError,
)
from ..ring import HEADROOM_BITS, encode
from .secret import PrivateTensor, Scheme, SecretTensor, bypassed_dispatch, dtype_of, set_dispatch
from .shared import ComplexShared, SharedTensor, apply_rule, largest_of, mask_beyond_range
from .table import (
    BEFORE,
    COMPLEX,
    COMPOSED,
    CONVERSIONS,
    DEPTH,
    HANDLER,
    IN_PLACE,
    LIKE,
    ROW_OF,
    SIZED,
    Context,
    OpRow,
    as_sectorch_error,
    as_sizes,
    conversion_arguments,
    parameters,
    plain_arguments,
    positional,
    refuse_dropped,
    rename_keywords,
    require_dense,
    result_on_meta,
    spell,
    to_meta,
    torch_names,
    torch_on_meta,
    unsupported,
    without_like_tensor,
)

_T = torch.Tensor

# Bounds: what every element of a result is below in magnitude, where the handler does not say.


def bound_of(
    context: Context, row: OpRow, scale_bits: int, dtype: torch.dtype, given: list[SecretTensor], outermost: bool
) -> float | None:
    """The bound of a result whose handler gave none.

    Returns:
        None only inside another handler, which vouches for its parts. A tensor that a user holds has a bound.
    """
    one = 2.0**scale_bits
    if not context.scheme.range_check:
        return None
    if dtype == torch.bool or row.at_most is not None:
        return (row.at_most or 4.0) * one
    bounds = [
        2.0 ** (scale_bits - x.scale_bits) * x.bound
        for x in given
        if isinstance(x, SharedTensor) and x.bound is not None
    ]
    known = len(bounds) == sum(isinstance(x, SharedTensor) for x in given)
    if known and not dtype.is_floating_point and any(dtype_of(x).is_floating_point for x in given):
        return 2.0**32  # positions of entries, or counts
    if known and row.excess is not None:
        return max(bounds) + row.excess * one
    return 2.0**HEADROOM_BITS if outermost else None


# Views. Shares have no memory in common, so a view of a shared tensor is a tensor of its own. Its `Layout` says how
# torch would lay it in memory. After a write into one tensor, every living tensor of that memory gets a new value, too.


_COPY_OR_VIEW = {
    torch.reshape, _T.reshape, _T.reshape_as, torch.flatten, _T.flatten, torch.ravel, _T.ravel, _T.contiguous,
}  # fmt: skip
"""Functions that give a view or a copy, by the strides of their argument. Shares have no strides."""


class Layout:
    """The positions of a tensor's entries in memory that other tensors share, computed when a write needs them.

    Attributes:
        members: the tensors of this memory that are alive, in one list for all of them.
    """

    def __init__(self, twin: Callable[[], torch.Tensor | None], members: list[weakref.ref]):
        self._find, self._twin, self._known = twin, None, False
        self.members = members

    @property
    def twin(self) -> torch.Tensor | None:
        """A meta tensor with this shape, strides and storage; None where torch gives none."""
        if not self._known:
            self._twin, self._known = self._find(), True
        return self._twin

    def viewed(self, func: Callable, args: tuple, kwargs: dict, at: int | None) -> Layout:
        """The layout of func(x, *args, **kwargs), or of one of its results, where x has this one."""

        def find() -> torch.Tensor | None:
            if self.twin is None or func in _COPY_OR_VIEW:
                return None
            try:
                found = torch_on_meta(func, (self.twin, *args), kwargs)
                return found if at is None else found[at]
            except Exception:
                return None

        return Layout(find, self.members)


def layout_of(x: Any) -> Layout:
    """The layout of a tensor. One without a layout gets one, as the only tensor of its memory."""
    if x.layout_in_memory is None:
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = x.shape, x.dtype
        members = [weakref.ref(x)]
        x.layout_in_memory = Layout(lambda: torch.empty(shape, dtype=dtype, device="meta"), members)
    return x.layout_in_memory


def overlap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The entries that two tensors of one storage share, as flat indices into x and into y; None if there are none.

    Raises:
        ValueError: two entries of y lie at one offset, as after `expand`; or x and y are of two dtypes, or complex, so
            that an entry of one is not an entry of the other.
    """
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return None
    of_x, of_y = _entry_offsets(x), _entry_offsets(y)
    ordered, order = of_y.sort()
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("entries that share one offset")
    if not len(ordered) or not len(of_x):
        return None
    at = torch.searchsorted(ordered, of_x).clamp(max=len(ordered) - 1)
    found = (ordered[at] == of_x).nonzero().squeeze(1)
    if len(found) and (x.dtype != y.dtype or x.is_complex()):
        raise ValueError("entries of two dtypes, or complex ones")
    return (found, order[at[found]]) if len(found) else None


def _entry_offsets(x: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.reshape(-1)


def rewrite_views(
    x: Any, y: Any, shape: tuple[int, ...], of_x: torch.Tensor, of_y: torch.Tensor, call: Callable
) -> Any:
    """x with its flat entries `of_x` replaced by the entries `of_y` of y; call(func, *args) runs a torch function."""
    line = call(torch.reshape, y, (-1,))
    if not torch.equal(of_y, torch.arange(of_y.numel())) or len(of_y) != y.numel():
        line = call(torch.index_select, line, 0, of_y)
    if len(of_x) < x.numel():
        line = call(torch.index_copy, call(torch.reshape, x, (-1,)), 0, of_x, line)
    return call(torch.reshape, line, shape)


def strided_view(line: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    """torch.as_strided of a shared tensor of one dimension: another tensor of the same memory."""
    view: Any = torch.index_select(line, 0, strided_places(line, shape, stride, offset)).reshape(shape)
    layout = layout_of(line)
    view.layout_in_memory = layout.viewed(torch.as_strided, (shape, stride, offset), {}, None)
    layout.members.append(weakref.ref(view))
    return view


def strided_places(line: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """The flat indices of the entries that torch.as_strided takes from a tensor of one dimension."""
    return torch.as_strided(torch.arange(line.numel()), shape, stride, offset).reshape(-1)


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
    torch._has_compatible_shallow_copy_type,  # pyright: ignore[reportPrivateImportUsage]
}  # fmt: skip
IN_MEMORY = {_T.stride, _T.is_contiguous}
"""Questions about strides. Shares have none: the answer is that of torch's own tensor, from the layout."""
_SET_DATA = _T.data.__set__  # pyright: ignore[reportAttributeAccessIssue]  a descriptor
SECRETS = {
    _T.numpy, _T.item, _T.tolist, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__, _T.__array__,
    _T.data_ptr, _T.storage, _T.untyped_storage, _T.__contains__, _T.__format__, _T.is_nonzero, _T.equal, _T.allclose,
    torch.equal, torch.allclose, torch.is_nonzero, _T.nonzero, torch.nonzero, _T.share_memory_,
    _T.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]  a descriptor; torch's stubs hide it
    _T.__dlpack__, _T.__deepcopy__, _T.__reduce_ex__, _T.__repr__,
}  # fmt: skip


def call(func: Callable, types: tuple, args: tuple, kwargs: dict) -> Any:
    """`__torch_function__` of all secret tensors. Every exception becomes a `SectorchError` with a text."""
    try:
        return normal_form(func, args, dict(kwargs), _operate)
    except SectorchError as error:
        if isinstance(error, DtypeError) and is_operator(func, args):
            raise UnsupportedOpError(str(error)) from error
        raise
    except Exception as error:
        raise as_sectorch_error(func, error) from None


_OPERATORS = frozenset((
    "add", "sub", "mul", "div", "matmul", "pow", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
    "bitwise_or", "bitwise_xor",
))  # fmt: skip
"""Methods that Python's operators may call, beside those with underscores."""


def is_operator(func: Callable, args: tuple) -> bool:
    """Whether this is an operator, such as `x + y`, on tensors and numbers.

    Python takes a TypeError of an operator for "not implemented": it would try the other operand, and then raise an
    error of its own, or answer that `x == y` is False. So a `DtypeError` becomes an `UnsupportedOpError` there.
    """
    name = getattr(func, "__name__", "")
    by_operator = name.startswith("__") or (name.strip("_") in _OPERATORS and func is not getattr(torch, name, None))
    return by_operator and all(isinstance(a, (torch.Tensor, numbers.Number, np.ndarray)) for a in args)


def normal_form(
    func: Callable, args: tuple, kwargs: dict, then: Callable, composing: AbstractContextManager | None = None
) -> Any:
    """Step 1 of a call: answer what computes nothing on secrets; otherwise `then(func, args, kwargs, leaves)`.

    Args:
        then: takes the call in its normal form: torch's and Python's own types, sizes as numbers, and a shape or a
            dtype in the place of a tensor of which only these are read. `leaves` are its arguments, flat.
        composing: entered while another function of torch's is computed for this one.
    """
    if func in METADATA:
        return _metadata(func, args, kwargs)
    args, kwargs = plain_arguments(args, kwargs)
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    secrets = [leaf for leaf in leaves if isinstance(leaf, SecretTensor)]
    if func == _SET_DATA and isinstance(args[0], PrivateTensor):  # as layer.to(x.device) does
        if args[0] is args[1]:
            return None
        raise UnsupportedOpError(
            "the forward converts the weights of a layer, as layer.half() does; convert the model before secure()"
        )
    if func in SECRETS:
        kind = "PrivateTensor" if isinstance(secrets[0], PrivateTensor) else "SharedTensor"
        raise SecretAccessError(
            f"{spell(func)} would take the content out of a {kind}; use .reveal(), which gives a SharedTensor's value "
            f"to the querying party, and torch.where to choose by a secret"
        )
    if not secrets:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    require_dense(leaves)
    if func in LIKE and not isinstance(args[0], SharedTensor):
        func, args, kwargs = without_like_tensor(func, args, kwargs)
        if not isinstance(args[0], SecretTensor):
            return func(*args, **kwargs)
        leaves = [args[0]]
    if func in COMPOSED:
        with composing or nullcontext():
            result = COMPOSED[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in SIZED:
        args, kwargs = as_sizes(func, args, kwargs)
    return then(func, args, kwargs, leaves)


def _operate(func: Callable, args: tuple, kwargs: dict, leaves: list) -> Any:
    """Steps 2 to 4 of a call; `_compute` does the others."""
    secrets = [leaf for leaf in leaves if isinstance(leaf, SecretTensor)]
    context = _common_context(secrets)
    complex_operand = any(isinstance(leaf, ComplexShared) for leaf in secrets)
    secrets = [part for leaf in secrets for part in (leaf.parts if isinstance(leaf, ComplexShared) else (leaf,))]
    shared = any(isinstance(leaf, SharedTensor) for leaf in secrets)
    if kwargs.pop("out", None) is not None:
        raise UnsupportedOpError(f"{spell(func)} with out= would write a secret into given memory; leave it out")
    if not shared and meets_infinity(context.scheme, func, args, kwargs):
        swap = lambda leaf: share_private(context, leaf) if isinstance(leaf, PrivateTensor) else leaf
        args, kwargs = pytree.tree_map(swap, (args, kwargs))
        secrets, shared = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SecretTensor)], True
    if isinstance(func, torch._ops.OpOverload) and getattr(torch, spell(func)[6:], None) in ROW_OF:
        raise UnsupportedOpError(bypassed_dispatch(func))
    if shared and func not in ROW_OF:
        raise UnsupportedOpError(unsupported(func, args, kwargs))
    if shared and func not in COMPLEX and (complex_operand or any(map(_is_complex, leaves))):
        if func in IN_PLACE:
            _in_place_target(func, args)
        which = "a complex secret tensor" if complex_operand else "a secret and something complex"
        raise UnsupportedOpError(
            f"{spell(func)} of {which} is not supported; compute with x.real and x.imag, or x.abs()"
        )
    refuse_dropped(func)
    if func in BEFORE:
        BEFORE[func](*args, **kwargs)
    if shared and DEPTH.get() == 0:
        _refuse_wrapped_numbers(func, args, kwargs)
        result = apply_rule(context, func, ROW_OF[func].name, args, kwargs)
        if result is not NotImplemented:
            return result
    if func in CONVERSIONS:
        func, (args, kwargs) = _T.to, conversion_arguments(args, kwargs)
    meta = result_on_meta(func, args, kwargs)
    # The parties compare a user's calls alone: those that handlers make follow from them.
    if DEPTH.get() == 0:
        context.session.agreement.note(context.party, spell(func), args, kwargs)
    if not shared:
        return call_at_owner(context, func, args, kwargs, meta)
    counting = _rows_that_count(func, args, kwargs, secrets, meta) if DEPTH.get() == 0 else None
    result = _compute(context, func, args, kwargs, meta, secrets, complex_operand)
    for leaf in [] if counting is None else _shared_leaves(result):
        leaf.counting = counting
    return result


# Columns of filtered tables, which hold all rows. What goes row by row keeps the filter; what mixes or moves rows, or
# takes some of them, is refused, since some do not count.


def _rows_that_count(func: Callable, args: tuple, kwargs: dict, secrets: list, meta: Any) -> SharedTensor | None:
    """`SharedTensor.counting` of the results of a call.

    Raises:
        ArgumentError: the call does not go row by row, or takes columns of two filters.
    """
    marked = [x for x in secrets if isinstance(x, SharedTensor) and x.counting is not None]
    if not marked:
        return None
    first = marked[0]
    if any(x.counting is not first.counting for x in marked):
        raise ArgumentError(
            f"{spell(func)} of columns of tables of several filters: take both of the table that was filtered last"
        )
    rows, results = first.shape[0], [leaf for leaf in pytree.tree_leaves(meta) if isinstance(leaf, torch.Tensor)]
    if not all(leaf.dim() and leaf.shape[0] == rows for leaf in results) or not _is_rowwise(func, args, kwargs, rows):
        raise ArgumentError(
            f"{spell(func)} does not take row by row a column of a filtered table, and some rows do not count: "
            f"sectorch.tables has sums, means and others of those that do; table.filled(name) is the column with all "
            f"its rows, and table.known(name) says which count"
        )
    return first.counting


_PROBES = 3


def _is_rowwise(func: Callable, args: tuple, kwargs: dict, rows: int) -> bool:
    """Whether each row of the results depends on that row of the operands alone, as three trials have it.

    The function runs in plain torch on public numbers of the operands' shapes, and again where about half of the rows
    have others. What does not run on them counts as mixing rows.
    """
    steps = itertools.count(1)

    def scattered(shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers from -1 to 1 without a pattern, others in each call."""
        count = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64)
        return torch.sin(count * (5.83 + 2.39 * next(steps))).view(shape)

    def stand_in(x: Any, changed: torch.Tensor | None = None, before: Any = None) -> Any:
        if not isinstance(x, SecretTensor) and not (isinstance(x, torch.Tensor) and x.is_meta):
            return x
        shape, dtype = tuple(x.shape), dtype_of(x)
        fresh = scattered(shape)
        fresh = (fresh if dtype.is_floating_point else fresh > 0).to(dtype)
        if changed is None or not (isinstance(x, SharedTensor) and x.counting is not None):
            return fresh if changed is None else before
        return torch.where(changed.view(-1, *[1] * (len(shape) - 1)), fresh, before)

    def run(operands: list) -> list[torch.Tensor]:
        operands = [x.clone() if isinstance(x, torch.Tensor) else x for x in operands]  # a call may write into them
        given, named = pytree.tree_unflatten(operands, spec)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            found = func(*given, **named)
        return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]

    leaves, spec = pytree.tree_flatten((args, kwargs))
    try:
        for _ in range(_PROBES):
            changed = scattered((rows,)) < 0
            before = [stand_in(x) for x in leaves]
            after = [stand_in(x, changed, b) for x, b in zip(leaves, before, strict=True)]
            for one, other in zip(run(before), run(after), strict=True):
                if not torch.equal(one[~changed].nan_to_num(), other[~changed].nan_to_num()):
                    return False
    except Exception:  # of torch, or of an operand's own code
        return False
    return True


def _metadata(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A shape, a dtype, or strides as torch would give the tensor."""
    layout = getattr(args[0], "layout_in_memory", None) if func in IN_MEMORY else None
    with torch._C.DisableTorchFunctionSubclass():
        twin = None if layout is None else layout.twin
        return func(*(args if twin is None else (twin, *args[1:])), **kwargs)


def _compute(
    context: Context, func: Callable, args: tuple, kwargs: dict, meta: Any, secrets: list, complex_operand: bool
) -> Any:
    """Steps 5 and 6: the handler's result, wrapped, and written to all that share the memory of what it wrote into."""
    row, target = ROW_OF[func], _in_place_target(func, args) if func in IN_PLACE else None
    views_of_target = [] if target is None else overlapping(func, target)
    in_complex = complex_operand or any(
        isinstance(m, torch.Tensor) and m.is_complex() for m in pytree.tree_leaves(meta)
    )
    handler = COMPLEX.get(func, HANDLER[func]) if in_complex else HANDLER[func]
    if DEPTH.get() == 0:
        _fit_dtypes(context, row, args, secrets, meta)
    before = [(x, x.shares, x.scale_bits, x.bound) for x in secrets if isinstance(x, SharedTensor)]
    depth = DEPTH.set(DEPTH.get() + 1)
    try:
        public = None if in_complex or target is not None else _public_result(func, args, kwargs, meta, secrets)
        if public is None:
            result, raised = _run_handler(context, func, handler, args, kwargs)
        else:
            result, raised = _share_public(context, public), ()
        # Handlers with `inplace=True` replace the shares of an operand. That shows here, and the views of it are
        # checked before anything is assigned.
        written = [x for x, shares, _, _ in before if x.shares is not shares]  # by an `inplace=True`
        views_of_written = [(x, overlapping(func, x)) for x in written]
        may_copy = func is _T.contiguous and getattr(args[0], "layout_in_memory", None) is not None
        may_copy = may_copy or (func is _T.to and bool(kwargs.get("copy")))
        returned = secrets if (row.view or row.name in _RETURNS_ARGUMENT) and not may_copy else written
        result = _with_flags(_wrap(context, row, result, meta, secrets, returned), secrets, raised)
    except BaseException:
        for x, shares, scale_bits, bound in before:  # of an `inplace=True` that was refused afterwards
            x.shares, x.scale_bits, x.bound = shares, scale_bits, bound
        raise
    finally:
        DEPTH.reset(depth)
    if row.view:
        _mark_views(func, args, kwargs, result)
    for x, views in views_of_written:
        _write_through(x, views)
    if target is None:
        return result
    _assign(target, result)
    _write_through(target, views_of_target)
    return target


# Whole numbers of a dtype. A result that its dtype does not hold is kept as it is, with a bound above the dtype's: it
# equals torch's modulo 2^bits, which is all that sums and a revealed tensor need. Before another operation reads it, it
# is brought into the dtype's range.


_LINEAR = frozenset(("add", "sub", "rsub", "neg", "sum", "cumsum", "cat", "stack"))
"""Rows whose results modulo 2^bits follow from their operands modulo 2^bits, beside those that move elements."""
_MOVES = frozenset((
    "cat", "stack", "clone", "flip", "roll", "repeat", "tile", "repeat_interleave", "gather", "index_select", "take",
    "take_along_dim", "masked_select", "where", "tril", "triu", "diag", "diag_embed", "rot90", "hstack", "vstack",
    "dstack", "column_stack", "pad", "constant_pad_nd", "setitem", "copy", "index_put", "index_copy", "masked_fill",
    "index_fill", "fill", "masked_scatter", "max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "sort",
    "topk", "kthvalue", "median", "msort", "cummax", "cummin", "clamp", "clamp_min", "clamp_max", "relu", "sign", "to",
    "positive", "max_pool1d", "max_pool2d",
))  # fmt: skip
"""Rows whose results are elements of their operands, or lie between them, and so in their dtype if these are."""
_TAKES = frozenset(("clone", "flip", "roll", "repeat", "tile", "tril", "triu", "diag", "diag_embed", "rot90"))
"""Those of them that read one operand and compare nothing."""


_TAKES_NUMBERS = frozenset((
    "div", "floor_divide", "remainder", "fmod", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "isin",
    "eq", "ne", "lt", "le", "gt", "ge",
))  # fmt: skip
"""Rows for which torch takes a number modulo 2^bits of a tensor of whole numbers: 255 for -1 beside uint8."""


def _refuse_wrapped_numbers(func: Callable, args: tuple, kwargs: dict) -> None:
    """Refuse a number that the tensors' dtype does not hold, where torch's result would not be that of the number."""
    name = ROW_OF[func].name
    if name not in _TAKES_NUMBERS or (name == "div" and kwargs.get("rounding_mode") is None):
        return
    leaves = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if not isinstance(leaf, bool)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        dtype = reduce(torch.promote_types, [x.dtype for x in tensors if x.dim()] or [x.dtype for x in tensors])
        numbers_ = [x for x in leaves if isinstance(x, int)]
        numbers_ += [int(x) for x in tensors if not isinstance(x, SecretTensor) and not x.dim() and not _fractions(x)]
    if dtype.is_floating_point or dtype == torch.bool:
        return
    info = torch.iinfo(dtype)
    for number in numbers_:
        if not info.min <= number <= info.max:
            raise DtypeError(
                f"{spell(func)}: {dtype} does not hold {number}, and torch would take it modulo 2^{info.bits}; use "
                f"x.long() first"
            )
    for x in tensors:  # a secret number beside a tensor: torch takes it in the tensor's dtype, too
        if not isinstance(x, SharedTensor) or x.dim() or torch.promote_types(dtype_of(x), dtype) == dtype:
            continue
        if info.min == 0 or x.bound is None or x.bound > info.max * 2.0**x.scale_bits:
            raise DtypeError(
                f"{spell(func)}: {dtype} may not hold a secret number of {dtype_of(x)}, and torch would take it modulo "
                f"2^{info.bits}; use x.long() of the tensor first"
            )


def _fractions(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex() or x.is_meta


def _note_overflow(x: SharedTensor, dtype: torch.dtype) -> None:
    """Put the bound of a computed tensor above its dtype's range if elements may lie outside of it."""
    if x.bound is None or dtype.is_floating_point or dtype in (torch.bool, torch.int64):
        return
    most = torch.iinfo(dtype).max
    if x.bound > most or not dtype.is_signed:
        x.bound = max(x.bound, most + 2.0)


def _fit_dtypes(context: Context, row: OpRow, args: tuple, secrets: list, meta: Any) -> None:
    """Bring operands into the range of their dtypes, in place, where the operation's result depends on it."""
    for x in secrets:
        if not isinstance(x, SharedTensor) or x.bound is None:
            continue
        dtype = dtype_of(x)
        if dtype.is_floating_point or dtype in (torch.bool, torch.int64) or x.bound <= largest_of(dtype):
            continue
        keeps = row.name in _LINEAR or (row.view and x is args[0]) or row.name in _TAKES
        if not (keeps and all(m.dtype == dtype for m in pytree.tree_leaves(meta) if isinstance(m, torch.Tensor))):
            _fit_dtype(context, x, dtype)


def _fit_dtype(context: Context, x: SharedTensor, dtype: torch.dtype) -> None:
    """x modulo 2^bits, in its dtype's range, by one truncation: x - 2^bits floor((x - least) / 2^bits)."""
    info = torch.iinfo(dtype)
    with context.session.operation(context.party) as net, created_on(context.session.device):
        before = len(net.state(RaisedFlags))
        floored = HANDLER[torch.floor](context, x.like(x.shares - info.min, info.bits, cast(float, x.bound) - info.min))
        x.shares = x.shares - (floored.shares << info.bits)
        x.bound = largest_of(dtype)
        x.flags = (*x.flags, *net.state(RaisedFlags)[before:])


def _run_handler(
    context: Context, func: Callable, handler: Callable, args: tuple, kwargs: dict
) -> tuple[Any, tuple[Value, ...]]:
    """Run the handler as one call of the session: its result, and the range flags that it raised.

    Raises:
        UnsupportedOpError: the handler does not take these arguments.
    """
    if kwargs:
        args, kwargs = positional(func, handler, args, torch_names(kwargs))
    known = parameters(handler) or ()
    at = known.index("inplace") if "inplace" in known else len(args)
    if at < len(args) and not isinstance(args[at], bool):  # torch.elu_ has a number there
        raise UnsupportedOpError(f"{spell(func)} with {len(args)} arguments is not supported on secret tensors")
    try:
        with context.session.operation(context.party) as net, created_on(context.session.device):
            before = len(net.state(RaisedFlags))
            kwargs = rename_keywords(func, handler, len(args), kwargs) if kwargs else kwargs
            if ROW_OF[func].name in _ALONG_A_DIMENSION and _is_scalar_call((args, kwargs)):
                result = _as_line(context, handler, args, kwargs)
            else:
                result = handler(context, *args, **kwargs)
            return result, tuple(net.state(RaisedFlags)[before:])
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


_ALONG_A_DIMENSION = frozenset((
    "softmax", "softmin", "log_softmax", "logsumexp", "max", "min", "argmax", "argmin", "topk", "sort", "argsort",
    "norm", "std", "var", "std_mean", "var_mean", "cosine_similarity", "normalize", "pairwise_distance",
    "triplet_margin_loss", "kl_div",
))  # fmt: skip
"""Rows that reduce along a dimension. torch takes a scalar for a vector of one entry, and gives a scalar."""


def _is_scalar_call(tree: Any) -> bool:
    return not any(leaf.dim() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _as_line(context: Context, handler: Callable, args: tuple, kwargs: dict) -> Any:
    line = lambda leaf: leaf.reshape(1) if isinstance(leaf, torch.Tensor) else leaf
    args, kwargs = pytree.tree_map(line, (args, kwargs))
    found = handler(context, *args, **kwargs)
    number = lambda x: x.like(context.backend.each(torch.reshape, x.shares, ()), bound=x.bound)
    return pytree.tree_map(lambda x: number(x) if isinstance(x, SharedTensor) else x, found)


def _public_result(func: Callable, args: tuple, kwargs: dict, meta: Any, secrets: list) -> Any:
    """The result as plain tensors if it is public: it has no entries, or no operand has any. None otherwise.

    Raises:
        ArgumentError: the result is not finite.
    """
    outputs = [leaf for leaf in pytree.tree_leaves(meta) if isinstance(leaf, torch.Tensor)]
    if not outputs or ROW_OF[func].view or ROW_OF[func].name in _NEVER_PUBLIC or any(map(_is_complex, outputs)):
        return None
    if not any(leaf.numel() for leaf in outputs):
        return pytree.tree_map_only(torch.Tensor, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), meta)
    if any((x.value if isinstance(x, PrivateTensor) else x.shares).shape.numel() for x in secrets):
        return None

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, SecretTensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        args, kwargs = pytree.tree_map(empty, (args, kwargs))
        found = func(*args, **kwargs)
    for leaf in pytree.tree_leaves(found):
        if isinstance(leaf, torch.Tensor) and not bool(leaf.isfinite().all()):
            what = "not a number" if bool(leaf.isnan().any()) else "infinite"
            raise ArgumentError(f"{spell(func)} of no elements is {what}, which no secret tensor holds")
    return found


def _share_public(context: Context, plain: Any) -> Any:
    """Public results as shared tensors. No message."""

    def share(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        bits = context.frac_bits if x.is_floating_point() else 0
        content = encode(x, bits).to(context.session.device)
        most = float(x.double().abs().max()) if x.numel() else 0.0
        return context.tensor(context.backend.embedded(content), bits, most * 2.0**bits + 1, x.dtype)

    with context.session.operation(context.party):
        return pytree.tree_map(share, plain)


def created_on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a handler's indices, masks and constants are created on the session's device."""
    return nullcontext() if device.type in ("cpu", "meta") else device


def _common_context(secrets: list[SecretTensor]) -> Context:
    first = secrets[0]
    for other in secrets[1:]:
        if other.session is not first.session:
            raise SessionMismatchError("tensors of two sessions cannot meet: their shares have different keys")
        if other.party != first.party:
            raise SessionMismatchError(
                f"tensors of two holders ({first.party} and {other.party}) cannot meet in one operation; "
                f"sectorch.collect([...]) adds them up in halves of Q and S; sectorch.aggregate([...]) adds them up "
                f"and shows the sum to the querying party"
            )
        if other.scheme != first.scheme:
            raise ArgumentError(f"tensors of two number representations cannot meet: {first.scheme} and {other.scheme}")
    return Context(first.session, first.party, first.scheme)


_NEVER_PUBLIC = ("isfinite", "constant_like", "dropout", "multi_margin_loss", "conv_transpose1d")
"""Rows that `_public_result` leaves to their handlers, which give a plain tensor or the argument, or check more."""
_RETURNS_ARGUMENT = ("to", "contiguous", "dropout", "requires_grad_", "positive")
"""Rows of which torch returns the argument itself if nothing changes. `x * 1` is another tensor with its own memory."""

GIVEN = ("add", "clone", "neg", "sub", "to")
"""Rows beside views whose results count as a party's own input (`SharedTensor.given`) if all operands do."""


def _wrap(context: Context, row: OpRow, result: Any, meta: Any, given: list, returned: list) -> Any:
    """Give each result of a handler torch's dtype, after a check of its shape.

    A floating-point tensor carries at least f fraction bits, and one of whole numbers none.

    Args:
        meta: torch's own result, on meta tensors.
        given: the secret operands.
        returned: those of them that torch returns itself if nothing changed in them, or if they were written into.
    """
    if isinstance(result, SharedTensor):
        if not isinstance(meta, torch.Tensor) or result.shares.shape != meta.shape:
            shape = getattr(meta, "shape", None)
            raise ShapeError(f"internal error: '{row.name}' gave shape {tuple(result.shares.shape)}, torch {shape}")
        if meta.dtype.is_complex:
            raise UnsupportedOpError(
                f"'{row.name}' with a complex result is not supported on secret tensors; compute its parts"
            )
        if not meta.dtype.is_floating_point and result.scale_bits:
            raise UnsupportedOpError(
                f"'{row.name}': rounding a secret number to {meta.dtype} is not supported; compare it, or reveal it"
            )
        for x in returned:
            same = isinstance(x, SharedTensor) and x.shares is result.shares and x.scale_bits == result.scale_bits
            if same and dtype_of(x) == meta.dtype:
                if x.bound is None:  # written by a handler with `inplace=True` that did not say
                    x.bound = bound_of(context, row, x.scale_bits, meta.dtype, given, DEPTH.get() == 1)
                return x
        shares, scale_bits, bound = result.shares, result.scale_bits, result.bound
        bound = bound_of(context, row, scale_bits, meta.dtype, given, DEPTH.get() == 1) if bound is None else bound
        if meta.dtype.is_floating_point and scale_bits < context.frac_bits:
            bits = context.frac_bits - scale_bits
            with context.session.operation(context.party):
                shares, scale_bits = shares << bits, context.frac_bits
                bound = None if bound is None else bound * 2.0**bits
        if DEPTH.get() == 1 and bound is not None and bound > 2.0**HEADROOM_BITS and context.scheme.range_check:
            raise FixedPointRangeError(
                f"internal error: '{row.name}' may leave the range; please report it, and use range_check=False "
                f"meanwhile"
            )
        made = context.tensor(shares, scale_bits, bound, meta.dtype)
        made.whole_bits = result.whole_bits + scale_bits - result.scale_bits
        if DEPTH.get() == 1 and not (row.view or row.name in _MOVES):
            _note_overflow(made, meta.dtype)
        if row.view or row.name in GIVEN:
            made.given = all(x.given for x in given if isinstance(x, SharedTensor))
        if scale_bits == result.scale_bits:
            made.constant = getattr(given[0], "constant", None) if row.view and len(given) == 1 else result.constant
        return made
    if isinstance(result, ComplexShared):
        like = torch.empty(meta.shape, dtype=meta.dtype.to_real(), device="meta")
        return ComplexShared(*(_wrap(context, row, part, like, given, returned) for part in result.parts))
    if isinstance(result, SecretTensor):
        raise UnsupportedOpError(f"'{row.name}' of a private tensor is not supported on secret tensors")
    if isinstance(result, (list, tuple)):
        wrapped = [_wrap(context, row, r, m, given, returned) for r, m in zip(result, meta, strict=True)]
        if isinstance(meta, list):
            return wrapped
        return type(meta)(wrapped) if type(meta).__module__ == "torch.return_types" else tuple(wrapped)
    return result


def _with_flags(wrapped: Any, given: list[SecretTensor], raised: tuple[Value, ...]) -> Any:
    """The result with the range flags of its operands, and with those that the operation raised."""
    # Flags add up over a program, and most operands have the same ones: thousands of tensors share one tuple.
    distinct = {id(x.flags): x.flags for x in given if isinstance(x, SharedTensor) and x.flags}
    parts = [*distinct.values(), raised] if raised else [*distinct.values()]
    if parts:
        flags = parts[0] if len(parts) == 1 else tuple(dict.fromkeys(itertools.chain(*parts)))
        for leaf in _shared_leaves(wrapped):
            leaf.flags = flags
    return wrapped


def _shared_leaves(tree: Any) -> list[SharedTensor]:
    """The shared tensors of a tree, and both parts of its complex ones."""
    leaves = pytree.tree_leaves(tree)
    found = [part for leaf in leaves for part in (leaf.parts if isinstance(leaf, ComplexShared) else (leaf,))]
    return [leaf for leaf in found if isinstance(leaf, SharedTensor)]


def _is_complex(x: Any) -> bool:
    return dtype_of(x).is_complex if isinstance(x, torch.Tensor) else isinstance(x, complex)


_SOURCE: dict[Callable, int] = {
    _T.__setitem__: 2, _T.index_put_: 2, _T.put_: 2, _T.masked_fill_: 2, _T.masked_scatter_: 2, _T.scatter_: 3,
    _T.scatter_add_: 3, _T.scatter_reduce_: 3, _T.index_add_: 3, _T.index_copy_: 3, _T.index_fill_: 3,
    _T.index_reduce_: 3,
}  # fmt: skip
"""Of functions that take positions, the argument that is written: the others have no say in the dtype."""


def _in_place_target(func: Callable, args: tuple) -> Any:
    """The tensor that an in-place function writes into.

    Raises:
        UnsupportedOpError, DtypeError: it cannot hold the result.
    """
    target = args[0]
    if isinstance(target, ComplexShared) and func is _T.__setitem__ and not any(x.aliased for x in target.parts):
        return target
    if isinstance(target, ComplexShared):
        raise UnsupportedOpError(
            f"{spell(func)} would change a complex secret tensor in place, or one that others are views of; write it "
            f"out of place"
        )
    if not isinstance(target, SharedTensor):
        raise UnsupportedOpError(
            f"{spell(func)} would write a secret into a plain tensor, where it cannot stay secret; write it out of "
            f"place (out[i] = out[i] + x, torch.cat, torch.where), or into a tensor that a forward made"
        )
    like = to_meta(target, True)
    at = _SOURCE.get(func)
    for other in args[1:] if at is None else args[at : at + 1]:
        whole = at is not None and isinstance(other, float) and other.is_integer()  # as torch, which rounds others
        if isinstance(other, (torch.Tensor, numbers.Number)) and not whole:
            promoted = torch.result_type(like, to_meta(other, True))
            if not torch.can_cast(promoted, like.dtype):
                raise DtypeError(
                    f"{spell(func)}: result type {promoted} can't be cast to the desired output type {like.dtype}"
                )
    return target


def _assign(target: Any, result: Any) -> Any:
    if isinstance(target, ComplexShared):
        target.parts = result.parts
        return target
    if result.shares.shape != target.shares.shape:
        raise ShapeError(
            f"output with shape {list(target.shares.shape)} doesn't match the broadcast shape "
            f"{list(result.shares.shape)}"
        )
    for name in ("shares", "scale_bits", "bound", "whole_bits", "given", "constant", "flags"):
        setattr(target, name, getattr(result, name))
    return target


_OF_SHAPES = {_T.view_as, _T.expand_as, _T.reshape_as}
"""Views that take the shape of a second tensor."""


def _mark_views(func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    """Note that the results of a view share the memory of its argument.

    Views inside a handler are not noted: no caller has them.
    """
    if DEPTH.get():
        return
    source: Any = args[0] if args else None
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    if func in _OF_SHAPES:
        args, kwargs = (
            (source, *(to_meta(x, False) for x in args[1:])),
            {k: to_meta(x, False) for k, x in kwargs.items()},
        )
    given = pytree.tree_leaves((args[1:], kwargs))
    known = all(isinstance(x, SharedTensor) for x in (source, *results))
    # Where the entries of a view are not known, nobody may write into any tensor of that memory.
    if not known or any(isinstance(x, SecretTensor) for x in given):
        for leaf in _shared_leaves((args, result)):
            members = [] if leaf.layout_in_memory is None else leaf.layout_in_memory.members
            for member in (leaf, *(one() for one in members)):
                if member is not None:
                    member.aliased = True
        return
    layout = layout_of(source)
    for at, made in enumerate(results):
        if made is not source:
            several = isinstance(result, (list, tuple))
            made.layout_in_memory = layout.viewed(func, args[1:], kwargs, at if several else None)
            made.aliased = source.aliased
            layout.members.append(weakref.ref(made))


def overlapping(func: Callable, target: Any) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """The living tensors that a write into the target changes too: each with its flat indices, and the target's.

    Raises:
        UnsupportedOpError: torch does not write there, or the entries that overlap are not known.
    """
    if isinstance(target, ComplexShared):
        return []
    refusal = UnsupportedOpError(
        f"{spell(func)} would change a tensor that others are views of (or that is a view); write it out of place"
    )
    if target.aliased:
        raise refusal
    layout, found = target.layout_in_memory, []
    if layout is None:
        return []
    layout.members[:] = [member for member in layout.members if member() is not None]
    for other in (member() for member in layout.members):
        if other is None or other is target:
            continue
        mine, theirs = layout.twin, other.layout_in_memory.twin
        try:
            both = overlap(theirs, mine) if mine is not None and theirs is not None else ()
        except ValueError:
            both = ()
        if both == ():
            raise refusal
        if both is not None:
            found.append((other, *both))
    return found


def _write_through(target: SharedTensor, others: list[tuple[SharedTensor, torch.Tensor, torch.Tensor]]) -> None:
    depth = DEPTH.set(DEPTH.get() + 1)
    try:
        for other, theirs, mine in others:
            made = rewrite_views(other, target, tuple(other.shares.shape), theirs, mine, lambda f, *args: f(*args))
            _assign(other, made)
            if other.infinite is not None:  # an entry that stood for infinity may be a number now
                other.infinite = other.infinite.with_changes(certain=False)
    finally:
        DEPTH.reset(depth)


set_dispatch(call)


# Operations on private tensors of one party: computed there, in plain floating point, once a session.
#
# A result that is derived from a model's weights (a transpose, a product of two weights, a copy that was changed in
# place) is kept with them, together with its masked form, which is sent once.


_COPIES = {torch.clone, _T.clone}


def meets_infinity(scheme: Scheme, func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a private tensor meets a public number beyond the range in a sum or a choice, as in an attention mask.

    Private tensors have no stand-ins for such numbers, and shared ones have (`Infinite`): so the operand
    becomes a shared tensor.
    """
    row = ROW_OF.get(func)
    if row is None or row.name not in _SUMS:
        return False
    return any(mask_beyond_range(scheme, leaf) is not None for leaf in pytree.tree_leaves((args, kwargs)))


_SUMS = ("add", "sub", "rsub", "where", "masked_fill", "maximum", "minimum")


def share_private(context: Context, x: PrivateTensor) -> SharedTensor:
    """A private tensor as shares; those of S are zero. No message."""
    limit = context.scheme.activation_limit if context.scheme.range_check else None
    bits = x.weight_bits
    content = context.backend.embedded(context.backend.owner_summand(x.encoded(bits, limit)))
    return context.tensor(content, bits, context.scheme.activation_limit * 2.0**bits)


def call_at_owner(context: Context, func: Callable, args: tuple, kwargs: dict, meta: Any) -> Any:
    """func(*args, **kwargs) at the owner of the private tensors among the arguments; `meta` is torch's own result.

    Raises:
        SecretAccessError: the result is no tensor.
        UnsupportedOpError: see `_change_in_place`.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PrivateTensor)]
    outputs, out_spec = pytree.tree_flatten(meta)
    run = _runner(func, leaves, at, spec)
    if in_place(func):
        return _change_in_place(context, func, leaves, at, spec, run)
    if not outputs or not all(isinstance(leaf, torch.Tensor) for leaf in outputs):
        raise SecretAccessError(f"{spell(func)} would take a value out of a PrivateTensor")
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    if row is not None and row.name == "to" and outputs[0].dtype == parent.dtype:  # as torch does
        return call_at_owner(context, _T.clone, (parent,), {}, meta) if kwargs.get("copy") else parent
    key = _cache_key(func, leaves, at, spec)
    if func in _COPIES:  # values are never changed, so a copy has the same value, and all that was derived from it
        made, lasting = [(parent.value, parent.derived)], parent.lasting
    elif key is None:
        made, lasting = _at_owner(context, run, leaves, at), False
    else:
        with context.setup.lock:
            if key not in parent.derived:  # the operands' values are kept, so that their ids stay valid
                parent.derived[key] = _at_owner(context, run, leaves, at), [leaves[i].value for i in at]
            (made, _), lasting = parent.derived[key], True
    results = _wrap_private(context, func, leaves, at, run, outputs, made)
    for result in results:
        result.lasting, result.is_inverse = lasting, _is_inverse(func, leaves, at)
    return pytree.tree_unflatten(results, out_spec)


def _is_inverse(func: Callable, leaves: list, at: list[int]) -> bool:
    row = ROW_OF.get(func)
    return (row is not None and row.name in _INVERSES) or any(leaves[i].is_inverse for i in at)


_INVERSES = ("div", "exp", "pow", "reciprocal", "rsqrt")


def _at_owner(context: Context, run: Callable, leaves: list, at: list[int]) -> list[tuple[Located, dict]]:
    """The results' values, computed at the owner, each with an empty cache of what will be derived from it."""
    with run_in(context.setup):
        return [(value, {}) for value in compute(run, *(leaves[i].value for i in at))]


def _wrap_private(
    context: Context, func: Callable, leaves: list, at: list[int], run: Callable, outputs: list, made: list
) -> list[PrivateTensor]:
    """The results as private tensors. Each notes what it is a view of, and the family whose memory it shares."""
    parent = leaves[at[0]]
    row = ROW_OF.get(func)
    # The masked form of a view is a view of the masked form, but not between real and complex numbers.
    complex_too = any(x.dtype.is_complex for x in (parent, *outputs))
    viewed = row is not None and row.view and len(at) == 1 and not complex_too
    families = [None] if func in _COPIES else _families([leaves[i] for i in at], run, len(outputs), viewed)
    results = []
    for i, ((value, derived), out) in enumerate(zip(made, outputs, strict=True)):
        result = PrivateTensor(value, context.session, context.party, context.scheme, out.dtype, parent.label)
        result.derived = derived
        if func in _COPIES:
            result.copied, result.family = True, []
        elif (family := families[i]) is not None:
            result.family = family
            family.append(ref(result))
        if viewed:
            result.origin = (parent, lambda v, i=i: run(v)[i])
        results.append(result)
    return results


_ALWAYS_THE_SAME = "index out of range in self"
"""What torch says of a look-up in a table."""


def _runner(func: Callable, leaves: list, at: list[int], spec: Any) -> Callable:
    """func as a function of the private arguments' values, which are the leaves at these places.

    Returns:
        A function that computes on meta tensors at parties without the values. It computes in float64, unless `double`
        is False: then the dtypes are those that the tensors have for torch.
    """
    leaves = [None if i in at else leaf for i, leaf in enumerate(leaves)]  # a traced step outlives its operands

    def run(*values, double=True):
        absent = any(value.is_meta for value in values)
        filled = [to_meta(leaf, True) if absent else leaf for leaf in leaves]
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        filled = [_in_double(leaf) for leaf in filled] if double else filled
        a, k = pytree.tree_unflatten(filled, spec)
        try:
            with torch.no_grad():
                return tuple(pytree.tree_leaves(func(*a, **k)))
        except Exception as error:
            # torch's text may contain an entry of a weight. The error has its kind and the shapes alone, and words of
            # torch's that are always the same.
            given = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in filled if isinstance(leaf, torch.Tensor))
            kind = type(as_sectorch_error(func, error))
            said = _ALWAYS_THE_SAME if _ALWAYS_THE_SAME in str(error) else type(error).__name__
            raise kind(f"{spell(func)}: {said} at the owner of the operands, {given}") from None

    return run


def _families(given: list[PrivateTensor], run: Callable, count: int, viewed: bool) -> list[list[ref] | None]:
    """For each result the family of the argument whose memory it shares, as a view or as the argument itself."""
    if viewed or all(x.family is None for x in given):
        return [given[0].family] * count
    with torch.inference_mode(False):  # in inference mode torch does not record the base of a view
        stand_ins = [to_meta(x, True) for x in given]
        outs = run(*stand_ins, double=False)
    pairs = list(zip(given, stand_ins, strict=True))
    return [next((x.family for x, meta in pairs if out is meta or out._base is meta), None) for out in outs]


def _change_in_place(
    context: Context, func: Callable, leaves: list, at: list[int], spec: Any, run: Callable
) -> PrivateTensor:
    """An operation in place, on a copy that no other tensor shares memory with, or on the only view of one.

    Raises:
        UnsupportedOpError: it would change a model's own tensor, or memory that another tensor shares.
    """
    target = leaves[0]
    if at[0] != 0:
        raise UnsupportedOpError(f"{spell(func)} would write a weight into a plain tensor; write it out of place")
    base, views = _base_of(target)
    others = [x for x in base.family or () if x() is not None and x() is not target]
    if not base.copied or others or any(leaves[i] is base for i in at[1:]):
        raise UnsupportedOpError(f"{spell(func)} would change a weight in place; write it out of place")

    def viewed(value: torch.Tensor) -> torch.Tensor:
        return reduce(lambda v, view: view(v), views, value)

    # The value is replaced and never written: other tensors and caches may hold the old one.
    def written(value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        value = _in_double(value.clone())
        run(viewed(value), *rest)
        return value

    base.is_inverse = _is_inverse(func, leaves, at)
    target.is_inverse = base.is_inverse
    rest = [leaves[i].value for i in at[1:]]
    key = None if views else _cache_key(func, leaves, at, spec)
    with context.setup.lock, run_in(context.setup):
        if key is None:
            base.become(compute(written, base.value, *rest))
        else:
            if key not in base.derived:
                base.derived[key] = compute(written, base.value, *rest), {}, [base.value, *rest]
            base.become(*base.derived[key][:2])
        if target is not base:
            target.become(compute(viewed, base.value))
    return target


def _base_of(x: PrivateTensor) -> tuple[PrivateTensor, list[Callable]]:
    """The tensor that x is a view of, and the views that lead from it to x; x itself and no views otherwise."""
    views = []
    while x.origin is not None:
        x, view = x.origin
        views.append(view)
    return x, views[::-1]


def in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return func in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _in_double(leaf: Any) -> Any:
    """A public floating-point operand in float64, as the values of private tensors are, whatever their dtype."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, SecretTensor) or not leaf.is_floating_point():
        return leaf
    return leaf.double()


def _cache_key(func: Callable, leaves: list, at: list[int], spec: Any) -> Any:
    """The cache key of a derived weight, which is so derived and sent once; None for a result that is not cached.

    Only results of lasting private tensors are cached: a model's, or those that the cache holds. The id of another's
    value could be reused later. Every other argument must be hashable.
    """
    lasting = {i for i in at if isinstance(leaves[i], PrivateTensor) and leaves[i].lasting}
    if any(isinstance(leaf, torch.Tensor) and i not in lasting for i, leaf in enumerate(leaves)):
        return None
    parts = ((id(v.value), v.dtype) if i in at else (type(v), v) for i, v in enumerate(leaves))
    key = (func, repr(spec), tuple(parts))
    try:
        hash(key)
    except TypeError:
        return None
    return key
