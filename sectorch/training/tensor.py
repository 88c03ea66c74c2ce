"""DifferentiableTensor: a tensor in shares that torch's autograd follows.

torch records the graph and walks it back. What it wants computed arrives below autograd, as operators of the aten
library, forward and backward alike, and `__torch_dispatch__` looks each up in one table, `GRADIENTS`. A row computes
with SharedTensors, by the functions of the other table: no arithmetic of its own, so a row is right in a session as in
its reference. An operator without a row raises.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError, SecretAccessError, SectorchError, UnsupportedOpError
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from ..tensor.dispatch import METADATA, SECRETS
from ..tensor.signatures import CONVERSIONS, check_same_device, refuse_dropped, result_on_meta
from ..tensor.table import Context, OpRow, as_sectorch_error, spell
from .autograd_values import VARYING, Cell, Pool, PublicForm
from .operations import GRADIENTS, WRITES, Operation, compute_operation

# A step as it is recorded: the operators that torch asked for, on cells whose contents come when it is run.
#
# The user's Python, torch's autograd and its optimisers run in every step, on shapes, so that whatever they count or
# change they do as always; what they do to tensors in shares is written down, with the numbers of this step. Two steps
# of one form are one program (`programs.py`).


CURRENT: ContextVar[Recording | None] = ContextVar("the step that is recorded", default=None)


class Ref(NamedTuple):
    """A cell, by its number."""

    number: int


class Slot(NamedTuple):
    """Something public that may vary, by its number."""

    number: int
    form: PublicForm


class Constant:
    """A public tensor that is a part of the program."""

    def __init__(self, value: torch.Tensor):
        self.value = value.detach().clone()

    def __repr__(self) -> str:
        content = self.value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{self.value.dtype} {tuple(self.value.shape)} {hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class RecordedOperation:
    """An operation with numbers in the places of cells, and which cells its results are."""

    key: Any
    row: OpRow
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


class CellSnapshot(NamedTuple):
    """The state of a cell before the step."""

    content: Any
    pool: Pool
    gradient: bool
    version: int


class Recording:
    """The operations of one step so far. `run` computes them and gives the cells their contents."""

    def __init__(self, run: Callable[[Recording], None]):
        self._context: Context | None = None
        self._run = run
        self._begin()

    @property
    def context(self) -> Context:
        """The session, party and scheme of the first operation."""
        if self._context is None:
            raise ArgumentError("nothing was recorded")
        return self._context

    def takes(self, context: Context) -> bool:
        """Whether operations of this session, party and number format are recorded here."""
        self._context = self._context or context
        return self._context == context

    def _begin(self) -> None:
        self.lines: list[RecordedOperation] = []
        self.publics: list[Any] = []
        self.forms: list[PublicForm] = []
        """The forms of `publics`."""
        self.found: dict[int, tuple[Cell, CellSnapshot]] = {}
        """The cells that existed before the step, by number."""
        self._made: dict[int, weakref.ref[Cell]] = {}
        self._count = 0

    @property
    def alive(self) -> dict[int, Cell]:
        """The cells in use that the step is to compute, by number."""
        found = {n: cell for n, ref in self._made.items() if (cell := ref()) is not None}
        found = {n: cell for n, cell in found.items() if cell.base is None or cell.base[0].version == cell.base[1]}
        return found | {n: cell for n, (cell, _) in self.found.items() if cell.pending is not None}

    def add(self, op: Operation) -> Any:
        """Record an operation and return its results as cells without content, or the target if it is in place."""
        if op.row.name == "detach":
            return op.args[0]
        if op.target is not None and op.target.base is not None:
            self.flush()
            return compute_operation(self.context, op)
        varying = VARYING.get(op.key, {})
        args = tuple(self._operand(v, varying.get(i)) for i, v in enumerate(op.args))
        kwargs = {name: self._operand(v, varying.get(name)) for name, v in op.kwargs.items()}
        target = None if op.target is None else self._number(op.target)
        base = op.given[0] if op.row.view and not op.given[0].gradient else None
        base = base if base is None or base.base is None else base.base[0]
        made = op.target if op.target is not None else pytree.tree_map(lambda m: self._cell(op, m, base), op.meta)
        places = () if op.target is not None else tuple(
            c.place[1] if isinstance(c, Cell) and c.place else None for c in pytree.tree_leaves(made)
        )  # fmt: skip
        for cell in [op.target, *(op.args[i] for i in WRITES.get(op.key, ()))]:
            if isinstance(cell, Cell):
                self._mark_written(cell)
        said = op.parameter, op.backward, op.line
        self.lines.append(RecordedOperation(op.key, op.row, args, kwargs, op.meta, target, places, *said))
        return made

    def _number(self, cell: Cell) -> int:
        if cell.place is None or cell.place[0] is not self or not self._has(cell):
            before = CellSnapshot(cell.content, cell.pool, cell.gradient, cell.version)
            cell.place = self, self._count
            self.found[self._count] = cell, before
            self._count += 1
        return cell.place[1]

    def _has(self, cell: Cell) -> bool:
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

    def _mark_written(self, cell: Cell) -> None:
        """Note that the step writes the cell's content."""
        self._number(cell)
        if cell.pending is None:
            cell.pending = cell.shape
        cell.version += 1

    def _operand(self, value: Any, form: Callable[[Any], PublicForm | None] | None) -> Any:
        """An argument in the form that a recorded operation holds."""
        if isinstance(value, Cell):
            return Ref(self._number(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(v, None) for v in value)
        plain = type(value) is torch.Tensor and not value.is_meta
        if form is not None and (plain or type(value) in (int, float)):
            known = form(value)
            if known is not None:
                self.publics.append(value.detach().clone() if plain else value)
                self.forms.append(known)
                return Slot(len(self.publics) - 1, known)
        return Constant(value) if plain else value

    def flush(self) -> None:
        """Compute the recorded operations. A failure leaves all cells from before the step unchanged."""
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
        """Forget the recording; cells from before the step that got no new content get their old one back."""
        for cell, before in self.found.values():
            cell.place = None
            if cell.pending is not None:
                cell.set_content(before.content, before.pool)
        self._begin()


def current_recording(context: Context) -> Recording | None:
    """The step that is recorded, if it is one of this session, party and number format."""
    recording = CURRENT.get()
    return recording if recording is not None and recording.takes(context) else None


def fill_cells(value: Any, cells: dict[int, Cell], publics: list[Any]) -> Any:
    """An argument of a recorded operation with the cells and public values that it refers to."""
    if isinstance(value, Ref):
        return cells[value.number]
    if isinstance(value, Slot):
        return publics[value.number]
    if isinstance(value, Constant):
        return value.value
    return type(value)(fill_cells(v, cells, publics) for v in value) if type(value) in (list, tuple) else value


def play(context: Context, lines: list[RecordedOperation], cells: dict[int, Cell], publics: list[Any]) -> None:
    """Compute the recorded operations in order; their results are added to `cells`."""
    for line in lines:
        args, kwargs = (
            fill_cells(line.args, cells, publics),
            {k: fill_cells(v, cells, publics) for k, v in line.kwargs.items()},
        )
        target = None if line.target is None else cells[line.target]
        said = line.parameter, line.backward, line.line
        made = compute_operation(context, Operation(line.key, line.row, args, kwargs, line.meta, target, *said))
        for number, cell in zip(line.made, pytree.tree_leaves(made) if target is None else (), strict=True):
            if number is not None:
                cells[number] = cell


FUNCTIONS: dict[Any, Callable] = {}
"""Functions that are computed whole, above autograd, of functions that have rows: where torch would draw a secret."""

REVEALED: Any = WeakTensorKeyDictionary()
"""Plain values of parameters, which no gradient of a shared model reaches."""

REFUSED: dict[Any, str] = {}
"""Functions without a gradient on shares, and the way out."""

WITHOUT_ROW: list[Callable] = []
"""What is asked about an operator without a row: it gives it one, or what composes it of others, or None."""

_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]  a descriptor

_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


class DifferentiableTensor(SecretTensor):
    """A tensor in additive shares that autograd follows: a parameter of a shared model, or a result of parameters.

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
        if requires_grad and torch.is_inference_mode_enabled():
            raise ArgumentError(
                "no gradient comes to a tensor that is made under torch.inference_mode(); make it, or share the model, "
                "outside of it"
            )
        cell = content if isinstance(content, Cell) else Cell(content)
        meta, device = cell.shape, cell.context.session.device
        shape, dtype = meta.shape, meta.dtype
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self.cell = cell
        return self

    def __init__(self, *_args: Any, **_kwargs: Any):
        super().__init__()

    @property
    def session(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.context.session

    @property
    def party(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.context.party

    @property
    def scheme(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]  the content's
        return self.cell.context.scheme

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"DifferentiableTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def as_shared(self) -> SharedTensor:
        """The same secret as a SharedTensor, which autograd does not follow."""
        x = self.cell.content
        context = Context(x.session, x.party, x.scheme)
        with x.session.operation(x.party):
            flags = self.cell.pool.joint_flags(context)
        with torch._C.DisableTorchFunctionSubclass():
            made = x.like(x.shares, bound=x.bound, dtype=x.dtype)
        made.whole_bits, made.infinite, made.flags = x.whole_bits, x.infinite, flags
        return made

    def reveal(self, to: Any = None) -> torch.Tensor:
        """The plain tensor, learned by Q, or by the parties named, and by nobody else: `SharedTensor.reveal`."""
        plain = self.as_shared().reveal(to)
        if self.requires_grad and self.is_leaf:
            REVEALED[plain] = True
        return plain

    @classmethod
    def _handle_call(cls, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        _refuse_transforms()
        if func == _SET_DATA and args[0] is args[1]:  # as a module's .to(device) does where the device is its own
            return None
        if func in SECRETS:
            raise SecretAccessError(
                f"{spell(func)} would take the content out of a DifferentiableTensor; use .reveal(), which gives its "
                f"value to the querying party, and .detach() for a tensor that autograd does not follow"
            )
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = (
            pytree.tree_map(_as_differentiable, args),
            {name: pytree.tree_map(_as_differentiable, v) for name, v in kwargs.items()},
        )
        if func in CONVERSIONS:
            check_same_device(args[0], args[1:], kwargs)
        refuse_dropped(func)
        if func in FUNCTIONS and (made := FUNCTIONS[func](*args, **kwargs)) is not NotImplemented:
            return made
        _refuse_without_gradient(func, (args, kwargs))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except SectorchError:
            raise
        except Exception as error:
            if type(error).__module__ == "torch.utils.checkpoint":  # which ends what it computes again so
                raise
            raise as_sectorch_error(func, error) from None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C._EnableTorchFunction():
            _refuse_transforms()
            return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> DifferentiableTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shares of the same secret in memory of their own, in this process: as averages of a model's weights keep.

        Raises:
            SecretAccessError: it is no leaf of a graph.
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise SecretAccessError("only leaves of a graph can be copied; take x.detach()")
        with torch.no_grad():
            clone: Any = self.detach().clone()
        made: Any = DifferentiableTensor(clone.cell, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made


def _refuse_transforms() -> None:
    """torch.func maps over a dimension, and takes gradients, by tensors of its own that hold no shares."""
    transforms: Any = torch._C
    if transforms._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedOpError(
            f"torch.func (vmap, grad, jacrev, functional transforms) does not take tensors that are trained on; call "
            f"the model on the whole batch, and loss.backward() or torch.autograd.grad for gradients (at {line()})"
        )


def _as_differentiable(leaf: Any) -> Any:
    if isinstance(leaf, PrivateTensor):
        raise ArgumentError("a model of A's own and a shared one cannot be trained together; share its tensors")
    return DifferentiableTensor(leaf) if isinstance(leaf, SharedTensor) else leaf


def _refuse_without_gradient(func: Callable, tree: Any) -> None:
    """Refuse functions without a gradient, and plain parameters, whose gradient everybody would learn."""
    if not torch.is_grad_enabled():
        return
    for leaf in pytree.tree_leaves(tree):
        if func in REFUSED and isinstance(leaf, DifferentiableTensor) and leaf.requires_grad:
            raise UnsupportedOpError(f"{spell(func)} has no gradient on shares: {REFUSED[func]} (at {line()})")
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


def _draw_public(func: Any, args: tuple, kwargs: dict) -> Any:
    """Numbers of torch's generator, which everybody knows: written into a tensor, or of its shape.

    So a module initialises its parameters anew (`reset_parameters`, `nn.init`), or draws a mask.
    """
    name, first = func._schema.name.split("::")[1], args[0]
    if not isinstance(first, DifferentiableTensor) or any(isinstance(v, DifferentiableTensor) for v in args[1:]):
        return NotImplemented
    if not name.endswith(("_like", "_")):
        return NotImplemented
    numbers = func(torch.empty(first.shape, dtype=first.dtype), *args[1:], **kwargs)
    return dispatch(torch.ops.aten.copy_.default, (first, numbers), {}) if name.endswith("_") else numbers


def _overload(packet: Any, func: Any, names: tuple[str, ...]) -> Any:
    """The overload with these arguments, in their types."""
    types = {a.name: str(a.type) for a in func._schema.arguments}
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        arguments = found._schema.arguments
        if tuple(a.name for a in arguments) == names and all(str(a.type) == types[a.name] for a in arguments):
            return found
    return None


def _write_out(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute a function with `out` and copy the result there."""
    outs = [a.name for a in func._schema.arguments if a.is_out]
    names = tuple(a.name for a in func._schema.arguments if not a.is_out)
    plain = _overload(getattr(torch.ops.aten, func._schema.name.split("::")[1], None), func, names)
    target = kwargs.get(outs[0])
    if plain is None or len(outs) > 1 or not isinstance(target, DifferentiableTensor):
        raise UnsupportedOpError(f"writing a secret by out= is not supported here; assign the result (at {line()})")
    made = dispatch(plain, args, {k: v for k, v in kwargs.items() if k not in outs})
    if made.shape != target.shape:
        raise UnsupportedOpError(
            f"out= has shape {tuple(target.shape)}, the result {tuple(made.shape)}; assign the result (at {line()})"
        )
    return dispatch(torch.ops.aten.copy_.default, (target, made), {})


def _for_each_tensor(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Compute a function of lists, which optimisers with `foreach=True` call, tensor by tensor."""
    in_place = name.endswith("_")
    function = FOREACH.get(name.removeprefix("_foreach_").removesuffix("_"))
    if function is None:
        function = getattr(torch.Tensor, name.removeprefix("_foreach_").removesuffix("_"))
    lists = [isinstance(v, (list, tuple)) for v in args]
    made = []
    for i in range(len(args[0])):
        one = tuple(v[i] if of_lists else v for v, of_lists in zip(args, lists, strict=True))
        rest = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        result = function(*one, **rest)
        made.append(one[0].copy_(result) if in_place else result)
    return None if in_place else made


FOREACH: dict[str, Callable] = {
    "add": lambda x, y, alpha=1: torch.add(x, y, alpha=alpha),
    "sub": lambda x, y, alpha=1: torch.sub(x, y, alpha=alpha),
    "addcdiv": lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord),
    "zero": torch.zeros_like,
    "copy": lambda x, y, non_blocking=False: y,
    "clamp_min": lambda x, y: torch.clamp(x, min=y),
    "clamp_max": lambda x, y: torch.clamp(x, max=y),
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, min=y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, max=y),
}
"""Functions of one tensor of those of lists, where arguments stand in another way than in the method of that name."""


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator of aten: computed by its row, or recorded where a step is.

    Raises:
        UnsupportedOpError: it has none; names the operator and the user's line.
        SecretAccessError: it would give a plain number.
    """
    name = func._schema.name.split("::")[1]
    if name.startswith("_foreach_"):
        return _for_each_tensor(func, name, args, kwargs)
    if name.startswith("_fused_"):
        raise UnsupportedOpError(
            f"an optimiser with fused=True is not supported on shares; leave fused out (at {line()})"
        )
    if func._overloadname == "out" or func._overloadname.endswith("_out"):
        return _write_out(func, args, kwargs)
    if (
        torch.Tag.nondeterministic_seeded in func.tags
        and (made := _draw_public(func, args, kwargs)) is not NotImplemented
    ):
        return made
    key = _base_of(func) or func
    target = None if key is func else args[0]
    composed = None if key in GRADIENTS.row_of else WITHOUT_ROW[0](key)
    if composed is None and key not in GRADIENTS.row_of:
        if "_local_scalar_dense" in str(func) or "is_nonzero" in str(func):
            raise SecretAccessError(
                f"a number was asked of a DifferentiableTensor at {line()}; use .reveal(), and torch.where to choose; "
                f"torch.func takes no such tensors, .backward() does"
            )
        raise UnsupportedOpError(f"{GRADIENTS.unsupported(func, args, kwargs)} (at {line()})")
    if target is not None and not isinstance(target, DifferentiableTensor):
        raise UnsupportedOpError(f"{func} would write a secret into a plain tensor at {line()}")
    given = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, DifferentiableTensor)]
    if key is torch.ops.aten.reciprocal.default and given[0].requires_grad:
        key = torch.ops.prims.reciprocal.default
    context = given[0].cell.context
    if any(other.cell.context != context for other in given[1:]):
        raise ArgumentError(f"{func}: tensors of two sessions, or two number formats, meet at {line()}")
    context.session.agreement.note(context.party, str(func), args, kwargs)
    if composed is not None:
        made = composed(*args, **kwargs)
        if made is NotImplemented:
            raise UnsupportedOpError(f"{GRADIENTS.unsupported(func, args, kwargs)} (at {line()})")
        return made if target is None else dispatch(torch.ops.aten.copy_.default, (target, made), {})
    row = GRADIENTS.row_of[key]
    if row.view and target is not None:
        return target
    meta = result_on_meta(key, args, kwargs)
    backward = torch._C._current_graph_task_id() != -1 and any(x.cell.gradient for x in given)
    backward = backward or key is torch.ops.aten.ones_like.default
    args, kwargs = pytree.tree_map(lambda v: v.cell if isinstance(v, DifferentiableTensor) else v, (args, kwargs))
    parameter = target is not None and target.requires_grad and target.is_leaf
    into = None if target is None else target.cell
    op = Operation(key, row, args, kwargs, meta, into, parameter, backward, line())
    recording = current_recording(context)
    made = compute_operation(context, op) if recording is None else recording.add(op)
    if target is not None:
        return target
    return pytree.tree_map(lambda c: DifferentiableTensor(c) if isinstance(c, Cell) else c, made)
