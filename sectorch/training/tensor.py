"""DifferentiableTensor: a tensor in shares that torch's autograd follows.

torch records the graph and walks it back. What it wants computed arrives below autograd, as operators of the aten
library, forward and backward alike, and `__torch_dispatch__` looks each up in one table, `GRADIENTS`. A row computes
with SharedTensors, by the functions of the other table: no arithmetic of its own, so a row is right in a session as in
its reference. An operator without a row raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, SecretAccessError, SectorchError, ShapeError, UnsupportedOpError
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from ..tensor.dispatch import METADATA, SECRETS
from ..tensor.on_meta import result_on_meta
from ..tensor.table import Context, OpTable, spell, typed

GRADIENTS = OpTable("tensors that are trained on", "docs/training.md lists what has a gradient")
"""The operators of aten that training computes. Handlers are f(context, *args, **kwargs) on SharedTensors."""

CHANGED: list[Callable] = []
"""What a parameter is held to after an operation in place: f(context, content)."""

FUNCTIONS: dict[Any, Callable] = {}
"""Functions that are computed whole, above autograd, of functions that have rows: where torch would draw a secret."""

WITHOUT_ROW: list[Callable] = []
"""What is asked about an operator without a row: it gives it one, or what composes it of others, or None."""

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


class Pool:
    """The flags of a computation, which nothing that it gives is revealed without: of one graph, and of what it reads.

    Each tensor would otherwise hand on the flags of all steps before it. What an operation in place wrote, and what was
    shared, has a pool that is settled: who reads it takes its flags, and what becomes of those results is no matter
    of it. So a loss that leaves the range leaves the model as it was.
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

    def joined(self, context: Context, most: int = 1) -> tuple:
        """The flags, as one where they are more than so many. In a call."""
        pool = self.root()
        if len(pool._flags) > most:
            pool._flags = {context.backend.joined(tuple(pool._flags)): None}
        return tuple(pool._flags)

    @staticmethod
    def of(pools: list[Pool]) -> Pool:
        """The pool of what is computed from tensors of these: one of graphs, which from then on are one."""
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
"""Flags that a pool holds before they are joined."""


class Cell:
    """The content of a tensor and of all that share its memory, which an operation in place changes for all of them.

    Attributes:
        gradient: whether a backward pass made it.
        kept: what rows have worked out of the content and may use again.
        pool: the flags that nothing made of it is revealed without.
        base: of a view, the cell that it is a view of, and that one's version then.
    """

    def __init__(
        self, content: SharedTensor, gradient: bool = False, base: Cell | None = None, pool: Pool | None = None
    ):
        self._content, self.gradient, self.version = content, gradient, 0
        self.pool = pool or (Pool(content.flags, settled=True) if base is None else base.pool)
        self.kept: dict[str, Any] = {}
        self.base = None if base is None else (base, base.version)

    @property
    def content(self) -> SharedTensor:
        """Raises UnsupportedOpError where memory that this one is a view of has changed since."""
        if self.base is not None and self.base[0].version != self.base[1]:
            raise UnsupportedOpError(
                "a view of a shared tensor was used after the tensor was changed in place; take the view again"
            )
        return self._content

    def write(self, content: SharedTensor, pool: Pool) -> None:
        """Change it in place, to what depends on these flags."""
        if self.base is not None:
            raise UnsupportedOpError("a view of a shared tensor cannot be changed in place; write it out of place")
        self._content, self.kept, self.pool = content, {}, Pool(pool.flags, settled=True)
        self.version += 1


class DifferentiableTensor(SecretTensor):
    """A tensor in additive shares that autograd follows: a parameter of a shared model, and what is made of it.

    SharedTensors that meet one become such tensors, without a gradient. `grad`, hooks, `detach`, `no_grad` and the
    optimisers are torch's own. Its values are as secret as those of a SharedTensor.
    """

    cell: Cell
    differentiable = True

    if TYPE_CHECKING:  # torch's stubs say that these give a Tensor; of a shared one they give a shared one
        detach: Callable[..., DifferentiableTensor]
        sum: Callable[..., DifferentiableTensor]
        grad: Any
        __add__: Callable[..., DifferentiableTensor]
        __sub__: Callable[..., DifferentiableTensor]
        __mul__: Callable[..., DifferentiableTensor]
        __matmul__: Callable[..., DifferentiableTensor]

    @staticmethod
    def __new__(cls, content: SharedTensor | Cell, requires_grad: bool = False):
        cell = content if isinstance(content, Cell) else Cell(content)
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = cell.content.shape, cell.content.dtype, cell.content.device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self.cell = cell
        return self

    def __init__(self, *_args: Any, **_kwargs: Any):
        super().__init__()

    @property
    def session(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.content.session

    @property
    def party(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.content.party

    @property
    def scheme(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.content.scheme

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"DifferentiableTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def as_shared(self) -> SharedTensor:
        """The same secret as a SharedTensor, which autograd does not follow."""
        x = self.cell.content
        context = Context(x.session, x.party, x.scheme)
        with x.session.operation(x.party):
            flags = self.cell.pool.joined(context)
        with torch._C.DisableTorchFunctionSubclass():
            made = x.like(x.shares, bound=x.bound, dtype=x.dtype)
        made.whole_bits, made.flags = x.whole_bits, flags
        return made

    def reveal(self, to: Any = None) -> torch.Tensor:
        """The plain tensor, learned by Q, or by the parties named, and by nobody else: `SharedTensor.reveal`."""
        return self.as_shared().reveal(to)

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in SECRETS:
            raise SecretAccessError(
                f"{spell(func)} would take the content out of a DifferentiableTensor; use .reveal(), which gives its "
                f"value to the querying party, and .detach() for a tensor that autograd does not follow"
            )
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_lifted, args), {name: pytree.tree_map(_lifted, v) for name, v in kwargs.items()}
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **kwargs)
        _refuse_plain_parameters(func, (args, kwargs))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except SectorchError:
            raise
        except Exception as error:
            raise typed(func, error) from None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C._EnableTorchFunction():
            return dispatch(func, args, kwargs or {})


def _lifted(leaf: Any) -> Any:
    if isinstance(leaf, PrivateTensor):
        raise ArgumentError("a model of A's own and a shared one cannot be trained together; share its tensors")
    return DifferentiableTensor(leaf) if isinstance(leaf, SharedTensor) else leaf


def _refuse_plain_parameters(func: Callable, tree: Any) -> None:
    """A gradient of a plain parameter would be known to everybody."""
    if not torch.is_grad_enabled():
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, SecretTensor) and leaf.requires_grad:
            raise ArgumentError(
                f"{spell(func)}: a plain tensor of shape {tuple(leaf.shape)} that requires a gradient meets shared "
                f"ones, and its gradient would be known to all; make it shared (sectorch.shared(model)), or detach it"
            )


def line() -> str:
    """The line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_SKIPPED):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _base_of(func: Any) -> Any:
    """add_.Tensor -> add.Tensor: an operator in place is its other form, written into its first argument."""
    name, overload = func._schema.name.split("::")[1], func._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    return getattr(packet, overload, None) if packet is not None else None


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator of aten, computed by its row.

    Raises:
        UnsupportedOpError: it has none; names the operator and the user's line.
        SecretAccessError: it would give a plain number.
    """
    key = _base_of(func) or func
    target = None if key is func else args[0]
    composed = None if key in GRADIENTS.row_of else WITHOUT_ROW[0](key)
    if composed is None and key not in GRADIENTS.row_of:
        if "_local_scalar_dense" in str(func) or "is_nonzero" in str(func):
            raise SecretAccessError(
                f"a number was asked of a DifferentiableTensor at {line()}; use .reveal(), and torch.where to choose"
            )
        raise UnsupportedOpError(f"{GRADIENTS.unsupported(func, args, kwargs)} (at {line()})")
    if target is not None and not isinstance(target, DifferentiableTensor):
        raise UnsupportedOpError(f"{func} would write a secret into a plain tensor at {line()}")
    given = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, DifferentiableTensor)]
    first = given[0].cell.content
    for other in given[1:]:
        content = other.cell.content
        if content.session is not first.session or content.scheme != first.scheme or content.party != first.party:
            raise ArgumentError(f"{func}: tensors of two sessions, or two number formats, meet at {line()}")
    if composed is not None:
        made = composed(*args, **kwargs)
        if made is NotImplemented:
            raise UnsupportedOpError(f"{GRADIENTS.unsupported(func, args, kwargs)} (at {line()})")
        return made if target is None else _written(func, target, made)
    row, context = GRADIENTS.row_of[key], Context(first.session, first.party, first.scheme)
    backward = torch._C._current_graph_task_id() != -1
    backward = (backward and any(x.cell.gradient for x in given)) or key is torch.ops.aten.ones_like.default
    if row.view and target is not None:
        return target
    meta = result_on_meta(key, args, kwargs)
    if row.view:
        made = GRADIENTS.handler[key](context, given[0].cell, *args[1:], **kwargs)
        return pytree.tree_map(lambda c: DifferentiableTensor(c) if isinstance(c, Cell) else c, made)
    args, kwargs = pytree.tree_map(lambda v: v.cell if isinstance(v, DifferentiableTensor) else v, (args, kwargs))
    with context.session.operation(context.party) as net:
        before = len(net.raised)
        result = GRADIENTS.handler[key](context, *args, **kwargs)
        if target is not None and target.requires_grad and target.is_leaf:
            result = CHANGED[0](context, result)
        raised = tuple(net.raised[before:])
        pool = Pool.of([x.cell.pool for x in given])
        pool.add(raised)
        if len(pool.flags) > MANY:
            pool.joined(context)
    if isinstance(result, tuple):
        return tuple(_wrapped(func, y, m, pool, backward) for y, m in zip(result, meta, strict=True))
    made = _wrapped(func, result, meta, pool, backward)
    return made if target is None else _written(func, target, made)


def _written(func: Any, target: Any, made: Any) -> Any:
    """The target of an operation in place, with its result."""
    if made.cell.content.shares.shape != target.cell.content.shares.shape:
        raise ShapeError(f"{func} in place: the result has another shape than its target (at {line()})")
    target.cell.write(made.cell.content, made.cell.pool)
    return target


def _wrapped(func: Any, y: Any, meta: Any, pool: Pool, backward: bool) -> Any:
    """A row's result, of the shape and dtype that torch gives."""
    if isinstance(y, Made):
        made = _wrapped(func, y.content, meta, pool, backward)
        made.cell.kept.update(y.kept)
        return made
    if not isinstance(y, SharedTensor):
        return y
    if y.shares.shape != meta.shape:
        raise ShapeError(f"internal error: {func} gave shape {tuple(y.shares.shape)}, torch {tuple(meta.shape)}")
    made = y.like(y.shares, bound=y.bound, dtype=meta.dtype)
    made.whole_bits = y.whole_bits
    return DifferentiableTensor(Cell(made, backward, pool=pool))


class Made:
    """A row's result with what the backward pass may use again."""

    def __init__(self, content: SharedTensor, **kept: Any):
        self.content, self.kept = content, kept
