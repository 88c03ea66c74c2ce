"""Values of training: cells, which hold the content of tensors that autograd follows, and public inputs of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, UnsupportedOpError
from ..tensor import SharedTensor
from ..tensor.table import Context


class Pool:
    """The range flags of a graph and of the tensors that it reads; none of its results is revealed without them.

    The tensors of a graph share one pool. A tensor that was shared, or written in place, has a settled pool: a reader
    copies its flags, and flags of the reader's results do not come back to it. So a loss that leaves the range leaves
    the model as it was, and steps do not hand on the flags of all steps before them.
    """

    def __init__(self, flags: Any = (), settled: bool = False):
        self._flags: dict[Any, None] = dict.fromkeys(flags)
        self._into: Pool | None = None
        self.settled = settled

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
        graphs = [pool for pool in roots if not pool.settled]
        made = graphs[0] if graphs else Pool()
        for pool in roots:
            if pool is not made:
                made.add(pool._flags)
            if not pool.settled and pool is not made:
                pool._into, pool._flags = made, {}
        return made


MANY = 64
"""The most flags of a pool before they are joined."""


class Cell:
    """The content of a tensor and of all tensors that share its memory; an operation in place changes it for all.

    Attributes:
        gradient: whether a backward pass made it.
        reusable: what rows have worked out of the content and may use again.
        pool: the flags that nothing made of it is revealed without.
        base: of a view, the cell that it is a view of, and that one's version then.
        place: in a step that is recorded, its `Recording` (`tensor.py`), and the cell's number there.
        deferred: how the content is computed when it is first read; None once it is there.
        pending: of what such a step will have computed, its shape; None once the content is there.
    """

    def __init__(
        self, content: SharedTensor | None, gradient: bool = False, base: Cell | None = None, pool: Pool | None = None,
        pending: torch.Tensor | None = None,
    ):  # fmt: skip
        self._content, self.gradient, self.version, self.pending = content, gradient, 0, pending
        self.place: tuple[Any, int] | None = None
        flags = () if content is None else content.flags
        self.pool = pool or (Pool(flags, settled=True) if base is None else base.pool)
        self.reusable: dict[str, Any] = {}
        self.base = None if base is None else (base, base.version)
        self.deferred: DeferredResult | None = None

    @property
    def content(self) -> SharedTensor:
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
                before = len(net.raised)
                made = deferred.content()
                self._content = made.like(made.shares, bound=made.bound, dtype=deferred.meta.dtype)
                self.pool.add(tuple(net.raised[before:]))
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
        with torch._C.DisableTorchFunctionSubclass():
            x = self.content
            return torch.empty(x.shape, dtype=x.dtype, device="meta")

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
        self.set_content(content, pool)
        self.version += 1

    def set_content(self, content: SharedTensor, pool: Pool) -> None:
        """Set the content, which depends on the flags of this pool."""
        self._content, self.pending, self.reusable, self.deferred = content, None, {}, None
        self.pool = Pool(pool.flags, settled=True)


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


# Public numbers and tensors that may differ from step to step. They are inputs of the step's program, which depends on
# their form only.
#
# A row that can compute with any number of a form says so in `VARYING`. Any other public argument is a part of the
# program, and another value is another program. A row that reads the content of a varying argument fails, and the step
# is then computed operator by operator.


SPAN = 8
"""Numbers whose size changes from step to step are of one form within so many powers of two."""


def places(number: float, wide: bool) -> int:
    """The least e, or multiple of `SPAN` if `wide`, with |number| < 2^e."""
    exponent = math.frexp(abs(number))[1]
    return -(-exponent // SPAN) * SPAN if wide else exponent


def root_places(exponent: int) -> int:
    """The multiple of `SPAN` that the root of a number below 2^exponent is below."""
    return -(-exponent // (2 * SPAN)) * SPAN


def _ordinary(number: float) -> bool:
    """Neither zero nor a power of two, by which a product moves the point."""
    return math.isfinite(number) and number != 0 and math.frexp(abs(number))[0] != 0.5


@dataclass(frozen=True)
class PublicForm:
    """The form of a varying argument: its kind, and the details that a program of that kind depends on."""

    kind: str
    details: tuple


def scale_form(value: Any) -> PublicForm | None:
    """Of a number that something is multiplied by, whatever its size."""
    number = float(value)
    return PublicForm("scale", (places(number, True),)) if _ordinary(number) else None


def inverse_form(value: Any) -> PublicForm | None:
    """Of a divisor that is a number."""
    if isinstance(value, torch.Tensor) and value.dim():
        return None
    number = float(value)
    return PublicForm("inverse", (places(1 / number, True), number > 0)) if _ordinary(number) else None


SIZES = (0, 8, 11)
"""Tensors of floats are of one form whose entries are at most the same one of these powers of two."""


def floats_form(value: Any) -> PublicForm | None:
    """Of a tensor of floats that stands beside shared ones."""
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point():
        return None
    most = float(value.detach().abs().max()) if value.numel() else 0.0
    size = next((size for size in SIZES if most <= 2.0**size), None)
    return None if size is None else PublicForm("floats", (tuple(value.shape), value.dtype, size))


def weight_form(value: Any) -> PublicForm | None:
    """Of a tensor that a shared one is multiplied by: a mask of zeros and ones, or floats."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    mask = not value.is_complex() and bool(((value == 0) | (value == 1)).all())
    return PublicForm("mask", (tuple(value.shape),)) if mask else floats_form(value)


MOST_FACTOR = 2.0**16
"""A factor from here on is a mask's, and a part of the program."""


def factor_form(value: Any) -> PublicForm | None:
    """Of a factor; of one near one, the rest is what has a size."""
    if isinstance(value, torch.Tensor) and value.dim():
        return weight_form(value)
    number = float(value)
    if abs(number) >= MOST_FACTOR:
        return None
    if 0.5 < number < 1:
        return PublicForm("rest", (places(1 - number, False),)) if _ordinary(1 - number) else None
    return PublicForm("factor", (places(number, False), number > 0)) if _ordinary(number) else None


def labels_form(value: Any) -> PublicForm | None:
    """Of whole numbers that say which; those that are ignored, below zero, are a part of the program."""
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    whole = whole and not bool((value < 0).any())
    return PublicForm("labels", (tuple(value.shape), value.dtype)) if whole else None


VARYING: dict[Any, dict[Any, Callable[[Any], PublicForm | None]]] = {}
"""By operator, and by the place or name of an argument: how it may vary."""

_NUMBERS: dict[str, Callable[[float], float]] = {
    "scale": lambda v: v, "factor": lambda v: v, "rest": lambda v: 1 - v, "inverse": lambda v: 1 / v,
    "root of factor": lambda v: math.sqrt(v), "root of inverse": lambda v: math.sqrt(1 / v),
}  # fmt: skip


class PublicInput:
    """A public number or tensor in a traced step, without content.

    Attributes:
        size: of a tensor.
        exponent: of a number, what its row multiplies by is below 2^this in magnitude.
        rest: whether its row multiplies by what it is less than one.
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
        """The number as an integer of so many fraction bits, a value that A and S know."""
        number = _NUMBERS[self.form.kind]
        return self.publics.value(
            context, self.slot, lambda v: torch.tensor(round(number(float(v)) * 2.0**bits)), self.size
        )

    def apply(self, context: Context, f: Callable, shape: torch.Size, *given: Any) -> Any:
        """f(content, ...), whole numbers of a shape, as a value that A and S know."""
        return self.publics.value(context, self.slot, lambda v: f(v, *given), shape)

    def as_shares(self, context: Context, f: Callable) -> Any:
        """f(content), whole numbers of its shape, as shares that A has whole."""
        return self.publics.value(context, self.slot, f, self.size, shared=True)


class InputSource(NamedTuple):
    """How a public input of a program follows from a step's argument, and whether it is shares that A holds whole."""

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
