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
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ..backend import Backend, Value
from ..choreography import Net, Party
from ..errors import ArgumentError, DimensionError, DtypeError, SectorchError, ShapeError, UnsupportedOpError
from ..session import Session
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
