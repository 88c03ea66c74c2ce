"""The dispatch table: for each torch function the handler that computes it on secret tensors.

An operation is added in one place, the handler's decorator in `sectorch/ops/`:

    @implements("erf", torch.erf, Tensor.erf, note="everywhere; error 4e-6", exact=False, at_most=4.0)
    def erf(context, x): ...

All spellings of an operation (function, method, in-place form) are keys of one row. `dispatch.py` looks a call up here,
and says what it does before and after the handler.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils import _pytree as pytree

from ..backend import Backend, RaisedFlags, Value
from ..choreography import Net, Party
from ..choreography.declaration import plain
from ..errors import ArgumentError, DimensionError, DtypeError, SectorchError, ShapeError, UnsupportedOpError
from ..session import Session
from .secret import PrivateTensor, SecretTensor
from .shared import Scheme, SharedTensor


@dataclass(frozen=True)
class Context:
    """The context of a handler: the session, the answering party and the scheme of its operands."""

    session: Session
    party: Party
    scheme: Scheme

    @property
    def net(self) -> Net:
        return self.session.net(self.party)

    @property
    def backend(self) -> Backend:
        """The protocols of the running call."""
        return self.session.backend(self.net, self.scheme)

    def tensor(
        self, shares: Value, scale_bits: int, bound: float | None = None, dtype: torch.dtype = torch.float32
    ) -> SharedTensor:
        """Shares as a tensor, where no operand is at hand for `x.like(shares)`."""
        return SharedTensor(shares, scale_bits, self.session, self.party, self.scheme, dtype, bound)

    @property
    def setup(self) -> Net:
        return self.session.setup(self.party)

    @property
    def frac_bits(self) -> int:
        return self.scheme.frac_bits


@contextmanager
def one_call(*given: SharedTensor) -> Iterator[tuple[Context, list[SharedTensor]]]:
    """One call for a whole computation. The tensors put into the list depend on every range check made inside."""
    first, results = given[0], []
    context = Context(first.session, first.party, first.scheme)
    with first.session.operation(first.party) as net:
        before = len(net.state(RaisedFlags))
        yield context, results
        flags = [*dict.fromkeys(flag for x in given for flag in x.flags), *net.state(RaisedFlags)[before:]]
        joined = (context.backend.join_flags(flags),) if len(flags) > 1 else tuple(flags)
        for x in results:
            x.flags = joined


@dataclass
class OpRow:
    """One operation of the table; the attributes are those of `OpTable.implements`."""

    name: str
    handler: Callable
    keys: list[Any] = field(default_factory=list)
    in_place: list[Any] = field(default_factory=list)
    note: str = ""
    view: bool = False
    exact: bool = True
    at_most: float | None = None
    excess: float | None = None

    @property
    def module(self) -> str:
        return self.handler.__module__.rsplit(".", 1)[-1]


def spell(func: Callable) -> str:
    """The name under which a user knows a torch function."""
    if isinstance(func, torch._ops.OpOverload):  # of an exported graph, or of torch's own code
        return f"torch.{func._schema.name.rpartition('::')[2]}"
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
    if module.startswith("sectorch."):
        return name
    return f"F.{name}" if module.endswith("nn.functional") else f"torch.{name}"


_KINDS: tuple[tuple[type[Exception], type[SectorchError]], ...] = (
    (NotImplementedError, UnsupportedOpError),
    (IndexError, DimensionError),
    (TypeError, DtypeError),
    (AttributeError, DtypeError),
    (ValueError, ArgumentError),
    (OverflowError, ArgumentError),
    (AssertionError, ArgumentError),
    (MemoryError, ShapeError),
    (RuntimeError, ShapeError),
)
"""torch's kinds of exceptions and sectorch's in their place. The first that fits counts."""

_DTYPES = re.compile(
    r"^Input type .* should be the same|to have the same dtype|must have the same dtype|^expected scalar type"
    r"|same data type"
)
"""torch's texts, in a RuntimeError, for dtypes that do not match."""


def as_sectorch_error(func: Callable, error: Exception) -> SectorchError:
    """An exception as a `SectorchError` that names the function and has a text."""
    if isinstance(error, SectorchError):
        return error
    text = str(error).strip() or f"{type(error).__name__} without a word"
    if isinstance(error, RuntimeError) and text.startswith("Could not infer dtype of"):
        return DtypeError(f"{spell(func)} takes no {text.removeprefix('Could not infer dtype of ')}")
    if isinstance(error, RuntimeError) and _DTYPES.search(text):
        return DtypeError(f"{spell(func)}: {text}; tensors that meet are of one dtype, as in plain: x.to(weight.dtype)")
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), None)
    if kind is None:
        return UnsupportedOpError(f"{spell(func)} does not take this call: {type(error).__name__}: {text}")
    return kind(f"{spell(func)}: {text}")


@dataclass(frozen=True)
class OpTable:
    """The operations of one kind of encrypted tensor: canonical names, and the torch functions that reach them.

    Attributes:
        tensors: what the errors call the tensors.
        remedy: the way out that they name for an operation that is missing.
    """

    tensors: str
    remedy: str
    rows: dict[str, OpRow] = field(default_factory=dict)
    row_of: dict[Any, OpRow] = field(default_factory=dict)
    handler: dict[Any, Callable] = field(default_factory=dict)
    in_place: set[Any] = field(default_factory=set)

    def implements(
        self, name: str, *keys, in_place: Iterable = (), note: str = "", view: bool = False, exact: bool = True,
        at_most: float | None = None, excess: float | None = None, override: bool = False,
    ) -> Callable:  # fmt: skip
        """Register a handler. What is said of the operation counts where its row is new.

        Args:
            name: of the row; handlers of several functions may share one.
            keys: the torch functions that the handler computes.
            in_place: their in-place forms; the result replaces the content of the first argument.
            note: domain, error and cost in a few words, for `supported_ops()` and docs/ops.md.
            view: whether torch's result shares memory with its argument.
            exact: whether the result is an exact function of the operands' ring elements. False if it goes through a
                series for some arguments at least, as `div` by a shared divisor (docs/protocols.md: Q's draws).
            at_most: what every result is below in magnitude, where the handler gives no bound.
            excess: by how much a result may exceed the largest shared operand in magnitude, likewise. 0 for views.
            override: take functions that have a handler away from it. Every model of this process then computes with
                the new one, and so do handlers that are made of these functions.

        Raises:
            ArgumentError: a function that has a handler already, without `override`; nothing was registered.
        """

        def register(handler):
            taken = [key for key in (*keys, *in_place) if key in self.handler]
            if taken and not override:
                raise ArgumentError(
                    f"{', '.join(map(spell, taken))} has a handler on {self.tensors} already (row "
                    f"'{self.row_of[taken[0]].name}'); pass override=True to replace it in every model of this process"
                )
            for key in (*keys, *in_place):
                self._release(key)
            new = OpRow(name, handler, [], [], note, view, exact, at_most, 0.0 if view else excess)
            row = self.rows.setdefault(name, new)
            for key in (*keys, *in_place):
                self.row_of[key] = row
                self.handler[key] = handler
            row.keys.extend(keys)
            for key in in_place:
                self.in_place.add(key)
                row.in_place.append(key)
            return handler

        return register

    def implements_unlisted(self, name: str, key: Callable) -> Callable:
        """Register the handler of a function of ours whose last step is this operation; `supported_ops()` omits it."""

        def register(handler):
            self.row_of[key], self.handler[key] = self.rows[name], handler
            return handler

        return register

    def _release(self, key: Any) -> None:
        """Remove a function from its row, and a row without functions from the table."""
        row = self.row_of.pop(key, None)
        if row is None:
            return
        del self.handler[key]
        self.in_place.discard(key)
        row.keys, row.in_place = ([k for k in keys if k is not key] for keys in (row.keys, row.in_place))
        if not row.keys and not row.in_place:
            del self.rows[row.name]

    def nearest(self, func: Callable) -> list[str]:
        """The rows whose names are closest to that of an unsupported function, three at most."""
        name = getattr(func, "__name__", str(func)).strip("_").split(".")[-1]
        for kind in ("linalg_", "special_", "fft_"):
            name = name.removeprefix(kind)

        def likeness(row: str) -> float:
            like = difflib.SequenceMatcher(None, name, row).ratio()
            within = f"_{row}_" in f"_{name}_" or f"_{name}_" in f"_{row}_" or name.startswith(row)
            return like if like > 0.8 or (within and min(len(row), len(name)) > 2) else 0

        return [row for row in sorted(self.rows, key=likeness, reverse=True)[:3] if likeness(row)]

    def unsupported(self, func: Callable, args: tuple, kwargs: dict) -> str:
        """The text of an error for an operation that is missing: function, arguments, and the nearest rows."""
        described = []
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    name = getattr(type(leaf), "SPOKEN", type(leaf).__name__)
                    described.append(f"{name}{tuple(leaf.shape)}")
            else:
                described.append(
                    repr(leaf) if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf).__name__
                )
        close = self.nearest(func)
        hint = f"nearest supported: {', '.join(close)}" if close else "no supported operation has a similar name"
        return f"{spell(func)}({', '.join(described)}) is not supported on {self.tensors}; {hint}. {self.remedy}"


SHARES = OpTable("secret tensors", "sectorch.supported_ops() lists all")
"""The operations of SharedTensors. Handlers are f(context, *args, **kwargs) -> SharedTensor, or several in a tuple."""

TABLE, ROW_OF, HANDLER, IN_PLACE = SHARES.rows, SHARES.row_of, SHARES.handler, SHARES.in_place
implements, nearest, unsupported = SHARES.implements, SHARES.nearest, SHARES.unsupported
DEPTH: ContextVar[int] = ContextVar("handlers that are running", default=0)


def stepwise(handler: Callable) -> Callable:
    """Decorate a handler that is made of other operations, each of which is checked as a user's own call.

    In other handlers a part without a bound counts as vouched for, and what is computed from it is not checked: the
    handler itself knows how large its values are.
    """

    @functools.wraps(handler)
    def run(*args: Any, **kwargs: Any) -> Any:
        depth = DEPTH.set(0)
        try:
            return handler(*args, **kwargs)
        finally:
            DEPTH.reset(depth)

    return run


COMPLEX: dict[Any, Callable] = {}
"""Handlers of functions in the table for complex operands or results."""


def of_complex(*keys: Any) -> Callable:
    """Register a handler for complex operands or results of functions that have a row."""

    def register(handler: Callable) -> Callable:
        COMPLEX.update(dict.fromkeys(keys, stepwise(handler)))
        return handler

    return register


COMPOSED: dict[Any, Callable] = {}
"""Functions that are computed by other torch functions, in a recording too, so that their public results are seen to be
public. They return NotImplemented for a form that has a handler."""

ON_META: dict[Any, Callable] = {}
"""Shape functions, for functions of torch that look at contents and so do not run on meta tensors."""

BEFORE: dict[Any, Callable] = {}
"""Checks of a call's form that come before torch's own, whose error would not help."""


def row_of(func: Any) -> OpRow | None:
    """The row of a torch function, or None."""
    try:
        return ROW_OF.get(func)
    except TypeError:
        return None


def supported_ops() -> list[dict[str, Any]]:
    """The table as data: for each operation its name, the torch functions that reach it, a note, and `exact`.

    The result of an exact operation depends on its operands alone. That of another one, a smooth function, does so but
    for one value in 2^28, whose last digit Q's draws decide.
    """
    return [
        dict(
            name=row.name,
            functions=sorted({spell(key) for key in row.keys}),
            in_place=sorted({spell(key) for key in row.in_place}),
            kind=row.module,
            note=row.note,
            exact=row.exact,
        )
        for row in sorted(TABLE.values(), key=lambda row: row.name)
    ]


# The signature of a call, as torch has it: arguments under their names, and the result on meta tensors.
#
# A call on secret tensors first runs in torch itself, on tensors without content (`result_on_meta`): shapes, type
# promotion, broadcasting and the texts of errors are torch's own. Before that, arguments are brought to one form
# (`positional`, `rename_keywords`, `plain_arguments`, `as_sizes`), and what torch would pass over in silence is
# refused.


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
