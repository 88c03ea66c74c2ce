"""The table of aten's operators on shares, and one operator computed by its row, on cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch as _torch
import torch.nn.functional as _F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..backend import RaisedFlags
from ..errors import ShapeError
from ..ops.common import shared_operand
from ..ops.infinity import hold_to_numbers
from ..ring import encode
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.shared import infinite_of
from ..tensor.table import Context, OpRow, OpTable
from .autograd_values import MANY, VARYING, Cell, DeferredResult, Pool, PublicInput, ReusableResult, floats_form

# torch's functions as rows use them: on SharedTensors they give SharedTensors, which torch's stubs do not say.
torch: Any = _torch
F: Any = _F
aten: Any = _torch.ops.aten


# Public floats as operands beside shared ones: targets of losses, summands and weights, which may differ in each step.
#
# They become shares of which A has the value and S zero, without a message. Their bound is one of few sizes, so that
# steps with other numbers run the same program. A row sees a cell, as of a secret tensor. Numbers beyond
# `autograd_values.SIZES` stay part of the program.


TARGET, BESIDE = "with the fraction bits of an activation", "with those of the shared operand beside it"

PUBLIC_OPERANDS: dict[Any, dict[Any, str]] = {
    **{key: {0: BESIDE, 1: BESIDE} for key in (aten.add.Tensor, aten.sub.Tensor)},
    aten.mse_loss.default: {0: TARGET, 1: TARGET},
    aten.mse_loss_backward.default: {1: TARGET, 2: TARGET},
    **{
        key: {1: TARGET}
        for key in (
            aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
            aten.huber_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
        )
    },
    **{
        key: {2: TARGET}
        for key in (
            aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
            aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default,
        )
    },
}  # fmt: skip
"""For each operator, and each position of an argument: the fraction bits that it gets."""

for _key, _places in PUBLIC_OPERANDS.items():
    VARYING.setdefault(_key, {}).update(dict.fromkeys(_places, floats_form))


def is_public_floats(value: Any) -> bool:
    """Whether a value is a public tensor of floats that becomes shares."""
    if isinstance(value, PublicInput):
        return value.form.kind == "floats"
    return type(value) is Tensor and floats_form(value) is not None


def as_ring_numbers(context: Context, value: Any, scale_bits: int) -> Any:
    """Public floats as integers of the ring that A and S know."""
    f = partial(encode, scale_bits=scale_bits)
    return (
        value.apply(context, f, value.size) if isinstance(value, PublicInput) else f(value).to(context.session.device)
    )


def largest_target(value: Any, scale_bits: int) -> float:
    """The bound of these integers, which follows from the tensor's form and not from its content."""
    form: Any = value.form if isinstance(value, PublicInput) else floats_form(value)
    return 2.0 ** (form.details[-1] + scale_bits) + 1


def as_target_shares(context: Context, value: Any, scale_bits: int) -> SharedTensor:
    """Public floats as shares. No message."""
    dtype = value.form.details[1] if isinstance(value, PublicInput) else value.dtype
    f = partial(encode, scale_bits=scale_bits)
    shares = (
        value.as_shares(context, f)
        if isinstance(value, PublicInput)
        else context.backend.embedded(f(value).to(context.session.device))
    )
    return context.tensor(shares, scale_bits, largest_target(value, scale_bits), dtype)


def take_targets(context: Context, key: Any, args: tuple) -> tuple:
    """An operator's arguments, with shares in place of public floats."""
    ways = PUBLIC_OPERANDS.get(key)
    if ways is None:
        return args
    shared = [x.content for x in args if isinstance(x, Cell) and not x.own]
    beside = max([context.frac_bits, *(x.scale_bits for x in shared)])
    bits = {TARGET: context.frac_bits, BESIDE: beside}
    return tuple(
        Cell(as_target_shares(context, v, bits[ways[i]])) if i in ways and is_public_floats(v) else v
        for i, v in enumerate(args)
    )


# Frozen weights: operands that one party owns (`sectorch.shared(frozen=)`).


OWN_OPERANDS: dict[Any, frozenset[int]] = {
    key: frozenset(places)
    for key, places in (
        (aten.mm.default, (0, 1)), (aten.bmm.default, (0, 1)), (aten.addmm.default, (0, 1, 2)),
        (aten.add.Tensor, (0, 1)), (aten.sub.Tensor, (0, 1)), (aten.mul.Tensor, (0, 1)),
        (aten.convolution.default, (1, 2)), (aten.convolution_backward.default, (2,)),
        (aten.native_batch_norm.default, (1, 2, 3, 4)), (aten.native_batch_norm_backward.default, (2, 3, 4)),
        (aten.native_layer_norm.default, (2, 3)), (aten.native_layer_norm_backward.default, (5, 6)),
        (aten.native_group_norm.default, (1, 2)), (aten.native_group_norm_backward.default, (5,)),
        (aten.embedding.default, (0,)), (aten.clone.default, (0,)), (aten._to_copy.default, (0,)),
    )
}  # fmt: skip
"""For each operator, the positions at which its row takes a PrivateTensor: a product with it costs one message from S
to its owner, and a sum none. At any other place it becomes shares, its owner's half the whole, without a message."""


def in_shares(context: Context, value: Any) -> Any:
    """An argument with shares in place of frozen weights. No message."""
    shares = lambda x: Cell(shared_operand(context, x.content, x.content.weight_bits))
    return pytree.tree_map(lambda x: shares(x) if isinstance(x, Cell) and x.own else x, value)


GRADIENTS = OpTable(
    "tensors that are trained on",
    "docs/ops.md lists what has no gradient; x.detach().as_shared() takes what needs none",
)
"""The operators of aten that training computes. Handlers are f(context, *args, **kwargs) on SharedTensors."""

CHANGED: list[Callable] = []
"""Functions f(context, content) that check and round a parameter after an operation in place."""

STATE: list[Callable] = []
"""Functions f(context, content) that do so for any other tensor, with a bound that is the same in each step."""

WRITES: dict[Any, tuple[int, ...]] = {}
"""Operators that change arguments without a name in `_`, and the positions of these arguments."""


@dataclass(frozen=True)
class Operation:
    """An operator of aten on cells.

    Attributes:
        key, row: the operator, and its row in the table.
        args, kwargs: its arguments, with cells in place of tensors.
        meta: torch's own result on shapes.
        target: the cell that an operation in place writes to, or None.
        parameter: whether the target is a parameter.
        backward: whether the results are gradients.
        line: the line of the user's code.
    """

    key: Any
    row: OpRow
    args: tuple
    kwargs: dict[str, Any]
    meta: Any
    target: Cell | None
    parameter: bool
    backward: bool
    line: str

    @property
    def given(self) -> list[Cell]:
        """The cells among the arguments."""
        return [leaf for leaf in pytree.arg_tree_leaves(*self.args, **self.kwargs) if isinstance(leaf, Cell)]


WITH_STAND_INS = frozenset((
    "add", "clamp", "clone", "cat", "copy", "div", "eq", "exp", "ge", "gt", "index_fill", "le", "log_softmax",
    "logical_and", "lt", "masked_fill", "mul", "ne", "neg", "nll_loss", "rsub", "softmax", "stack", "sub", "where",
))  # fmt: skip
"""Rows whose functions take stand-ins for infinity (`ops/infinity.py`)."""


def _numbers(op: Operation, x: Any) -> Any:
    """A cell for any other row: stand-ins in it are a range error."""
    if not isinstance(x, Cell) or x.deferred is not None or infinite_of(x.content) is None:
        return x
    made = hold_to_numbers(x.context, x.content, str(op.row.name))
    return Cell(made, x.gradient, pool=x.pool)


def compute_operation(context: Context, op: Operation) -> Any:
    """The results as cells, in the form of torch's result; for an operation in place, its target.

    Raises:
        ShapeError: a row gave another shape than torch.
    """
    handler = GRADIENTS.handler[op.key]
    if op.row.view:
        return handler(context, *op.args, **op.kwargs)
    with context.session.operation(context.party) as net:
        before = len(net.state(RaisedFlags))
        own = OWN_OPERANDS.get(op.key, ())
        args = tuple(v if i in own else in_shares(context, v) for i, v in enumerate(op.args))
        args = args if op.row.name in WITH_STAND_INS else pytree.tree_map(partial(_numbers, op), args)
        kwargs = in_shares(context, op.kwargs)
        result = handler(context, *take_targets(context, op.key, args), **kwargs)
        if op.target is not None and isinstance(result, DeferredResult):
            result = result.content()
        if op.target is not None and isinstance(result, (SharedTensor, ReusableResult)):
            for hold in CHANGED if op.parameter else [] if op.target.gradient else STATE:
                result = hold(context, result.content if isinstance(result, ReusableResult) else result)
        pool = Pool.of([x.pool for x in op.given])
        pool.add(tuple(net.state(RaisedFlags)[before:]))
        if len(pool.flags) > MANY:
            pool.joint_flags(context)
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
    """A row's result as a cell, with the shape and dtype of torch's result."""
    if meta is None:  # a gradient that torch does not need
        return None
    if isinstance(y, DeferredResult):
        made = Cell(None, op.backward, pool=pool, pending=None)
        y.meta, made.deferred, made.reusable = meta, y, y.reusable
        return made
    if isinstance(y, ReusableResult):
        made = _cell(op, y.content, meta, pool)
        made.reusable.update(y.reusable)
        return made
    if isinstance(y, PrivateTensor):
        return Cell(y)
    if not isinstance(y, SharedTensor):
        return y
    if y.shares.shape != meta.shape:
        raise ShapeError(f"internal error: {op.key} gave shape {tuple(y.shares.shape)}, torch {tuple(meta.shape)}")
    made = y.like(y.shares, bound=y.bound, dtype=meta.dtype)
    made.whole_bits, made.infinite = y.whole_bits, y.infinite
    return Cell(made, op.backward, pool=pool)
