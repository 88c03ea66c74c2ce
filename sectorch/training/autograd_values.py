"""Values of training: cells, which hold the content of tensors that autograd follows, and public inputs of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..backend import RaisedFlags
from ..errors import ArgumentError, UnsupportedOpError
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import Context


class Pool:
    """The range flags of a graph and of the tensors that it reads; none of its results is revealed without them.

    The tensors of a graph share one pool. A tensor that was shared, or written in place, has a one-way pool: a reader
    copies its flags, and the flags of the reader's results do not come back to it. So a loss that leaves the range does
    not affect the model, and a step does not inherit the flags of all earlier steps.
    """

    def __init__(self, flags: Any = (), one_way: bool = False):
        self._flags: dict[Any, None] = dict.fromkeys(flags)
        self._into: Pool | None = None
        self.one_way = one_way

    def root(self) -> Pool:
        return self if self._into is None else self._into.root()

    @property
    def flags(self) -> tuple:
        return tuple(self.root()._flags)

    def add(self, flags: Any) -> None:
        self.root()._flags.update(dict.fromkeys(flags))

    def joint_flags(self, context: Context, most: int = 1) -> tuple:
        """The flags, joined to one where there are more than `most`. In a call."""
        pool = self.root()
        if len(pool._flags) > most:
            pool._flags = {context.backend.join_flags(tuple(pool._flags)): None}
        return tuple(pool._flags)

    @staticmethod
    def of(pools: list[Pool]) -> Pool:
        """The pool of a result of tensors with these pools; their graphs become one graph."""
        roots = list(dict.fromkeys(pool.root() for pool in pools))
        graphs = [pool for pool in roots if not pool.one_way]
        joint = graphs[0] if graphs else Pool()
        for pool in roots:
            if pool is not joint:
                joint.add(pool._flags)
            if not pool.one_way and pool is not joint:
                pool._into, pool._flags = joint, {}
        return joint


MANY = 64
"""The most flags of a pool before they are joined."""


class Cell:
    """The content of a tensor and of all tensors that share its memory; an operation in place changes it for all.

    The content of a frozen weight is a PrivateTensor, which one party has; rows that take one are in `OWN_OPERANDS`
    (`operations.py`), and any other row gets it in shares.

    Attributes:
        gradient: whether a backward pass computed it.
        reusable: values that rows computed from the content, for other rows.
        pool: the range flags on which the content depends.
        base: of a view, the cell that it views and that cell's version at the time.
        place: in a recorded step, its `Recording` (`programs.py`) and the cell's number there.
        deferred: how the content is computed when it is first read; None afterwards.
        pending: in a recorded step, a meta tensor of the content's shape; None once the content is computed.
    """

    def __init__(
        self, content: SharedTensor | PrivateTensor | None, gradient: bool = False, base: Cell | None = None,
        pool: Pool | None = None, pending: torch.Tensor | None = None,
    ):  # fmt: skip
        self._content: Any = content
        self.gradient, self.version, self.pending = gradient, 0, pending
        self.place: tuple[Any, int] | None = None
        flags = content.flags if isinstance(content, SharedTensor) else ()
        self.pool = pool or (Pool(flags, one_way=True) if base is None else base.pool)
        self.reusable: dict[str, Any] = {}
        self.base = None if base is None else (base, base.version)
        self.deferred: DeferredResult | None = None

    @property
    def own(self) -> bool:
        """Whether one party has the content, and nobody shares of it: a frozen weight, or what its owner made of it."""
        return isinstance(self._content, PrivateTensor)

    @property
    def content(self) -> Any:
        """The content, which a recorded step computes first.

        Raises:
            UnsupportedOpError: the cell is a view, and the memory that it views has changed since.
            ArgumentError: the step that was to compute it failed.
        """
        if self.base is not None and self.base[0].version != self.base[1]:
            raise UnsupportedOpError(
                "a view of a shared tensor was used after the tensor was changed in place; take the view again"
            )
        if self.pending is not None and self.place is not None:
            self.place[0].flush()
        if self.deferred is not None:
            context, deferred, self.deferred = self.deferred.context, self.deferred, None
            with context.session.operation(context.party) as net:
                before = len(net.state(RaisedFlags))
                value = deferred.content()
                self._content = value.like(value.shares, bound=value.bound, dtype=deferred.meta.dtype)
                self.pool.add(tuple(net.state(RaisedFlags)[before:]))
        if self._content is None or self.pending is not None:
            raise ArgumentError("the step that this tensor was to come from failed, and gave nothing")
        return self._content

    @property
    def shape(self) -> torch.Tensor:
        """A meta tensor of its shape and dtype."""
        if self.pending is not None:
            return self.pending
        if self.deferred is not None:
            return self.deferred.meta
        return self.content.on_meta()

    @property
    def context(self) -> Context:
        """The session, party and scheme of the content."""
        if self.pending is not None and self.place is not None:
            return self.place[0].context
        if self.deferred is not None:
            return self.deferred.context
        x = self.content
        return Context(x.session, x.party, x.scheme)

    def write(self, content: SharedTensor, pool: Pool) -> None:
        """Change the content in place; the new content depends on the flags of this pool."""
        if self.base is not None:
            raise UnsupportedOpError("a view of a shared tensor cannot be changed in place; write it out of place")
        if self.own:
            raise UnsupportedOpError(FROZEN)
        self.set_content(content, pool)
        self.version += 1

    def set_content(self, content: SharedTensor | PrivateTensor, pool: Pool) -> None:
        """Set the content, which depends on the flags of this pool."""
        self._content, self.pending, self.reusable, self.deferred = content, None, {}, None
        self.pool = Pool(pool.flags, one_way=True)


FROZEN = (
    "a frozen weight is its owner's alone and does not change; to train it or to write into it, share the model with "
    "requires_grad=True for it, and leave it out of frozen="
)


class ReusableResult:
    """A row's result with values that the backward pass may reuse."""

    def __init__(self, content: SharedTensor, **reusable: Any):
        self.content, self.reusable = content, reusable


@dataclass
class DeferredResult:
    """A row's result that is computed when it is first read: a product may use its parts instead.

    Attributes:
        content: computes it.
        reusable: as of `ReusableResult`.
        meta: of its shape and dtype.
    """

    context: Context
    content: Callable[[], SharedTensor]
    reusable: dict[str, Any]
    meta: torch.Tensor


# Public numbers and tensors that may differ from step to step: inputs of the step's program, which depends on their
# form only.
#
# A row that computes with any number of a form is listed in `VARYING`. Any other public argument is part of the
# program, so another value means another program. If a row reads the content of a varying argument, tracing fails, and
# the step is computed operator by operator.


SPAN = 8
"""Numbers whose size changes from step to step have one form within this many powers of two."""


def places(number: float, wide: bool) -> int:
    """The least e, or multiple of `SPAN` if `wide`, with |number| < 2^e."""
    exponent = math.frexp(abs(number))[1]
    return -(-exponent // SPAN) * SPAN if wide else exponent


def root_places(exponent: int) -> int:
    """The multiple of `SPAN` that the root of a number below 2^exponent is below."""
    return -(-exponent // (2 * SPAN)) * SPAN


def _ordinary(number: float) -> bool:
    """Neither zero nor a power of two; a product with those moves the binary point or is zero."""
    return math.isfinite(number) and number != 0 and math.frexp(abs(number))[0] != 0.5


@dataclass(frozen=True)
class PublicForm:
    """The form of a varying argument: its kind, and the details on which a program depends."""

    kind: str
    details: tuple


def scale_form(value: Any) -> PublicForm | None:
    """The form of a number that is a factor, of any size."""
    number = float(value)
    return PublicForm("scale", (places(number, True),)) if _ordinary(number) else None


def inverse_form(value: Any) -> PublicForm | None:
    """The form of a divisor that is a number."""
    if isinstance(value, torch.Tensor) and value.dim():
        return None
    number = float(value)
    return PublicForm("inverse", (places(1 / number, True), number > 0)) if _ordinary(number) else None


SIZES = (0, 8, 11)
"""Tensors of floats have one form if the same of these powers of two bounds their entries."""


def floats_form(value: Any) -> PublicForm | None:
    """The form of a tensor of floats that is added to shared ones, or compared with them."""
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point():
        return None
    most = float(value.detach().abs().max()) if value.numel() else 0.0
    size = next((size for size in SIZES if most <= 2.0**size), None)
    return None if size is None else PublicForm("floats", (tuple(value.shape), value.dtype, size))


def weight_form(value: Any) -> PublicForm | None:
    """The form of a tensor that is a factor of a shared one: a mask of zeros and ones, or floats."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    mask = not value.is_complex() and bool(((value == 0) | (value == 1)).all())
    return PublicForm("mask", (tuple(value.shape),)) if mask else floats_form(value)


MOST_FACTOR = 2.0**16
"""A factor of at least this size is a mask's, and part of the program."""


def factor_form(value: Any) -> PublicForm | None:
    """The form of a factor; for one between 1/2 and 1, that of what is missing to 1."""
    if isinstance(value, torch.Tensor) and value.dim():
        return weight_form(value)
    number = float(value)
    if abs(number) >= MOST_FACTOR:
        return None
    if 0.5 < number < 1:
        return PublicForm("rest", (places(1 - number, False),)) if _ordinary(1 - number) else None
    return PublicForm("factor", (places(number, False), number > 0)) if _ordinary(number) else None


def labels_form(value: Any) -> PublicForm | None:
    """The form of labels; with labels below zero, which are ignored, they are part of the program."""
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    whole = whole and not bool((value < 0).any())
    return PublicForm("labels", (tuple(value.shape), value.dtype)) if whole else None


VARYING: dict[Any, dict[Any, Callable[[Any], PublicForm | None]]] = {}
"""For each operator, and each position or name of an argument: the form in which it may vary."""

_NUMBERS: dict[str, Callable[[float], float]] = {
    "scale": lambda v: v, "factor": lambda v: v, "rest": lambda v: 1 - v, "inverse": lambda v: 1 / v,
    "root of factor": lambda v: math.sqrt(v), "root of inverse": lambda v: math.sqrt(1 / v),
}  # fmt: skip


class PublicInput:
    """A public number or tensor in a traced step, without content.

    Attributes:
        size: the shape of a tensor.
        exponent: of a number, its row's factor is below 2^exponent in magnitude.
        rest: whether its row multiplies by 1 - number.
    """

    def __init__(self, publics: Publics, slot: int, form: PublicForm):
        self.publics, self.slot, self.form = publics, slot, form
        self.size = torch.Size(()) if form.kind in _NUMBERS else torch.Size(form.details[0])
        self.rest = form.kind == "rest"

    @property
    def exponent(self) -> int:
        return self.form.details[0]

    def root(self) -> PublicInput:
        """The square root of the number by which its row multiplies, which is positive."""
        return PublicInput(
            self.publics, self.slot, PublicForm(f"root of {self.form.kind}", (root_places(self.exponent),))
        )

    def as_integer(self, context: Context, bits: int) -> Any:
        """The number as an integer with `bits` fraction bits, a value that A and S know."""
        number = _NUMBERS[self.form.kind]
        return self.publics.value(
            context, self.slot, lambda v: torch.tensor(round(number(float(v)) * 2.0**bits)), self.size
        )

    def apply(self, context: Context, f: Callable, shape: torch.Size, *given: Any) -> Any:
        """f(content, ...), integers of a shape, as a value that A and S know."""
        return self.publics.value(context, self.slot, lambda v: f(v, *given), shape)

    def as_shares(self, context: Context, f: Callable) -> Any:
        """f(content), integers of its shape, as shares: A's half is the value, S's is zero."""
        return self.publics.value(context, self.slot, f, self.size, shared=True)


class InputSource(NamedTuple):
    """How a public input of a program is computed from a step's argument, and whether it is shares (A has the
    value)."""

    slot: int
    f: Callable[[Any], torch.Tensor]
    shared: bool

    def halves(self, publics: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The inputs of A and S."""
        value = self.f(publics[self.slot])
        return {"A": value, "S": torch.zeros_like(value) if self.shared else value}


@dataclass
class Publics:
    """The sources of the public inputs of a program while it is traced."""

    inputs: dict[str, InputSource] = field(default_factory=dict)

    def value(
        self, context: Context, slot: int, f: Callable[[Any], torch.Tensor], shape: torch.Size, shared: bool = False
    ) -> Any:
        name = f"public {len(self.inputs)}"
        self.inputs[name] = InputSource(slot, f, shared)
        meta = torch.empty(shape, dtype=torch.int64, device="meta")
        return context.backend.import_shares(name, (meta, meta))
