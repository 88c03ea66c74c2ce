"""A step as it is recorded: the operators that torch asked for, on cells whose contents come when it is run.

The user's Python, torch's autograd and its optimisers run in every step, on shapes, so that whatever they count or
change they do as always; what they do to tensors in shares is written down, with the numbers of this step. Two steps of
one form are one program (`programs.py`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from ..tensor.table import Context, Row
from .cells import Cell, Pool
from .operations import WRITES, Operation, computed
from .public import VARYING, Form

CURRENT: ContextVar[Recording | None] = ContextVar("the step that is recorded", default=None)


class Ref(NamedTuple):
    """A cell, by its number."""

    number: int


class Slot(NamedTuple):
    """Something public that may vary, by its number."""

    number: int
    form: Form


class Constant:
    """A public tensor that is a part of the program."""

    def __init__(self, value: torch.Tensor):
        self.value = value.detach().clone()

    def __repr__(self) -> str:
        content = self.value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{self.value.dtype} {tuple(self.value.shape)} {hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class Line:
    """An operation with numbers in the places of cells, and which cells its results are."""

    key: Any
    row: Row
    args: tuple
    kwargs: dict[str, Any]
    meta: Any
    target: int | None
    made: tuple[int | None, ...]
    parameter: bool
    backward: bool
    line: str

    def __repr__(self) -> str:
        return f"{self.key} {self.args} {self.kwargs} {self.target} {self.parameter} {self.backward} {self.made}"


class Before(NamedTuple):
    """A cell as the step found it."""

    content: Any
    pool: Pool
    gradient: bool
    version: int


class Recording:
    """What happened in one step so far. `run` computes it, and gives the cells their contents."""

    def __init__(self, run: Callable[[Recording], None]):
        self._context: Context | None = None
        self._run = run
        self._begin()

    @property
    def context(self) -> Context:
        """Where it is computed: where its first operation is."""
        if self._context is None:
            raise ArgumentError("nothing was recorded")
        return self._context

    def takes(self, context: Context) -> bool:
        """Whether operations of this session, party and number format are recorded here."""
        self._context = self._context or context
        return self._context == context

    def _begin(self) -> None:
        self.lines: list[Line] = []
        self.publics: list[Any] = []
        self.forms: list[Form] = []
        """Those of what is public."""
        self.found: dict[int, tuple[Cell, Before]] = {}
        """What was there before, by number."""
        self._made: dict[int, weakref.ref[Cell]] = {}
        self._count = 0

    @property
    def alive(self) -> dict[int, Cell]:
        """The cells that somebody still has, of those that are to be computed."""
        found = {n: cell for n, ref in self._made.items() if (cell := ref()) is not None}
        found = {n: cell for n, cell in found.items() if cell.base is None or cell.base[0].version == cell.base[1]}
        return found | {n: cell for n, (cell, _) in self.found.items() if cell.pending is not None}

    def add(self, op: Operation) -> Any:
        """Its results, as cells to come; of an operation in place its target."""
        if op.row.name == "detach":
            return op.args[0]
        if op.target is not None and op.target.base is not None:
            self.flush()
            return computed(self.context, op)
        varying = VARYING.get(op.key, {})
        args = tuple(self._said(v, varying.get(i)) for i, v in enumerate(op.args))
        kwargs = {name: self._said(v, varying.get(name)) for name, v in op.kwargs.items()}
        target = None if op.target is None else self._number(op.target)
        base = op.given[0] if op.row.view and not op.given[0].gradient else None
        base = base if base is None or base.base is None else base.base[0]
        made = op.target if op.target is not None else pytree.tree_map(lambda m: self._cell(op, m, base), op.meta)
        places = () if op.target is not None else tuple(
            c.place[1] if isinstance(c, Cell) and c.place else None for c in pytree.tree_leaves(made)
        )  # fmt: skip
        for cell in [op.target, *(op.args[i] for i in WRITES.get(op.key, ()))]:
            if isinstance(cell, Cell):
                self._writes(cell)
        said = op.parameter, op.backward, op.line
        self.lines.append(Line(op.key, op.row, args, kwargs, op.meta, target, places, *said))
        return made

    def _number(self, cell: Cell) -> int:
        if cell.place is None or cell.place[0] is not self or not self._knows(cell):
            before = Before(cell.content, cell.pool, cell.gradient, cell.version)
            cell.place = self, self._count
            self.found[self._count] = cell, before
            self._count += 1
        return cell.place[1]

    def _knows(self, cell: Cell) -> bool:
        number = cell.place[1] if cell.place else -1
        known = (
            self.found[number][0] if number in self.found else self._made[number]() if number in self._made else None
        )
        return known is cell

    def _cell(self, op: Operation, meta: Any, base: Cell | None) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        gradient = op.given[0].gradient if op.row.view else op.backward
        cell = Cell(None, gradient, base, pool=Pool(), pending=meta)
        cell.place = self, self._count
        self._made[self._count] = weakref.ref(cell)
        self._count += 1
        return cell

    def _writes(self, cell: Cell) -> None:
        """From here on its content is to come."""
        self._number(cell)
        if cell.pending is None:
            cell.pending = cell.shape
        cell.version += 1

    def _said(self, value: Any, form: Callable[[Any], Form | None] | None) -> Any:
        """An argument as it stands in the line."""
        if isinstance(value, Cell):
            return Ref(self._number(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._said(v, None) for v in value)
        plain = type(value) is torch.Tensor and not value.is_meta
        if form is not None and (plain or type(value) in (int, float)):
            known = form(value)
            if known is not None:
                self.publics.append(value.detach().clone() if plain else value)
                self.forms.append(known)
                return Slot(len(self.publics) - 1, known)
        return Constant(value) if plain else value

    def flush(self) -> None:
        """Compute what was recorded. What fails changes nothing: what was there before is as it was."""
        if not self.lines:
            return
        token = CURRENT.set(None)
        try:
            with torch._C._EnableTorchFunction():
                self._run(self)
        finally:
            self.drop()
            CURRENT.reset(token)

    def drop(self) -> None:
        """Forget what was recorded; cells that were there before and got no content have their old one."""
        for cell, before in self.found.values():
            cell.place = None
            if cell.pending is not None:
                cell.settle(before.content, before.pool)
        self._begin()


def recorded(context: Context) -> Recording | None:
    """The step that is recorded, if it is one of this session, party and number format."""
    recording = CURRENT.get()
    return recording if recording is not None and recording.takes(context) else None


def filled(value: Any, cells: dict[int, Cell], publics: list[Any]) -> Any:
    """An argument of a line with its cells and what is public in their places."""
    if isinstance(value, Ref):
        return cells[value.number]
    if isinstance(value, Slot):
        return publics[value.number]
    if isinstance(value, Constant):
        return value.value
    return type(value)(filled(v, cells, publics) for v in value) if type(value) in (list, tuple) else value


def play(context: Context, lines: list[Line], cells: dict[int, Cell], publics: list[Any]) -> None:
    """Compute the lines, one after the other, on these cells; the results join them."""
    for line in lines:
        args, kwargs = filled(line.args, cells, publics), {k: filled(v, cells, publics) for k, v in line.kwargs.items()}
        target = None if line.target is None else cells[line.target]
        said = line.parameter, line.backward, line.line
        made = computed(context, Operation(line.key, line.row, args, kwargs, line.meta, target, *said))
        for number, cell in zip(line.made, pytree.tree_leaves(made) if target is None else (), strict=True):
            if number is not None:
                cells[number] = cell
