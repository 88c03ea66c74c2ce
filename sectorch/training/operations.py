"""The table of aten's operators on shares, and one operator computed by its row, on cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from ..errors import ShapeError
from ..ops.infinity import held_to_numbers
from ..tensor import SharedTensor
from ..tensor.infinity import infinite_of
from ..tensor.table import Context, OpTable, Row
from .cells import MANY, Cell, Lazy, Made, Pool
from .targets import taken

GRADIENTS = OpTable(
    "tensors that are trained on",
    "docs/training.md lists what has a gradient; x.detach().as_shared() takes what needs none",
)
"""The operators of aten that training computes. Handlers are f(context, *args, **kwargs) on SharedTensors."""

CHANGED: list[Callable] = []
"""What a parameter is held to after an operation in place: f(context, content)."""

STATE: list[Callable] = []
"""What any other tensor is held to after one: f(context, content), which gives a content of a bound that stays."""

WRITES: dict[Any, tuple[int, ...]] = {}
"""Operators that change arguments although their name does not say so, and which."""


@dataclass(frozen=True)
class Operation:
    """An operator of aten on cells.

    Attributes:
        key, row: in the table.
        args, kwargs: with cells in the places of tensors.
        meta: torch's own result on shapes.
        target: the cell that it is written into; None unless it is in place.
        parameter: whether that one is a parameter.
        backward: whether its results are gradients.
        line: of the user's code.
    """

    key: Any
    row: Row
    args: tuple
    kwargs: dict[str, Any]
    meta: Any
    target: Cell | None
    parameter: bool
    backward: bool
    line: str

    @property
    def given(self) -> list[Cell]:
        """The cells that it takes."""
        return [leaf for leaf in pytree.arg_tree_leaves(*self.args, **self.kwargs) if isinstance(leaf, Cell)]


WITH_STAND_INS = frozenset((
    "add", "clamp", "clone", "cat", "copy", "div", "eq", "exp", "ge", "gt", "index_fill", "le", "log_softmax",
    "logical_and", "lt", "masked_fill", "mul", "ne", "neg", "nll_loss", "rsub", "softmax", "stack", "sub", "where",
))  # fmt: skip
"""Rows that are functions of the table, which knows what stands for infinity (`ops/infinity.py`)."""


def _numbers(op: Operation, x: Any) -> Any:
    """A cell for another row: held to hold numbers."""
    if not isinstance(x, Cell) or x.lazy is not None or infinite_of(x.content) is None:
        return x
    made = held_to_numbers(x.context, x.content, str(op.row.name))
    return Cell(made, x.gradient, pool=x.pool)


def computed(context: Context, op: Operation) -> Any:
    """The results as cells, in the form of torch's; of an operation in place, its target.

    Raises:
        ShapeError: a row gave another shape than torch.
    """
    handler = GRADIENTS.handler[op.key]
    if op.row.view:
        return handler(context, *op.args, **op.kwargs)
    with context.session.operation(context.party) as net:
        before = len(net.raised)
        args = op.args if op.row.name in WITH_STAND_INS else pytree.tree_map(partial(_numbers, op), op.args)
        result = handler(context, *taken(context, op.key, args), **op.kwargs)
        if op.target is not None and isinstance(result, Lazy):
            result = result.content()
        if op.target is not None and isinstance(result, (SharedTensor, Made)):
            hold = CHANGED if op.parameter else [] if op.target.gradient else STATE
            for held in hold:
                result = held(context, result.content if isinstance(result, Made) else result)
        pool = Pool.of([x.pool for x in op.given])
        pool.add(tuple(net.raised[before:]))
        if len(pool.flags) > MANY:
            pool.joined(context)
    if isinstance(result, tuple):
        return tuple(_cell(op, y, m, pool) for y, m in zip(result, op.meta, strict=True))
    made = _cell(op, result, op.meta, pool)
    if op.target is None:
        return made
    if made.content.shares.shape != op.target.content.shares.shape:
        raise ShapeError(f"{op.key} in place: the result has another shape than its target (at {op.line})")
    op.target.write(made.content, made.pool)
    return op.target


def _cell(op: Operation, y: Any, meta: Any, pool: Pool) -> Any:
    """A row's result, of the shape and dtype that torch gives."""
    if meta is None:  # a gradient that torch does not ask for
        return None
    if isinstance(y, Lazy):
        made = Cell(None, op.backward, pool=pool, pending=None)
        y.meta, made.lazy, made.kept = meta, y, y.kept
        return made
    if isinstance(y, Made):
        made = _cell(op, y.content, meta, pool)
        made.kept.update(y.kept)
        return made
    if not isinstance(y, SharedTensor):
        return y
    if y.shares.shape != meta.shape:
        raise ShapeError(f"internal error: {op.key} gave shape {tuple(y.shares.shape)}, torch {tuple(meta.shape)}")
    made = y.like(y.shares, bound=y.bound, dtype=meta.dtype)
    made.whole_bits, made.infinite = y.whole_bits, y.infinite
    return Cell(made, op.backward, pool=pool)
