"""`sectorch.shared(module)`, and DifferentiableTensor: a tensor in shares that torch's autograd follows.

torch records the graph and computes gradients along it. Its computations arrive below autograd, as operators of the
aten library, forward and backward alike, and `__torch_dispatch__` looks each up in one table, `GRADIENTS`. A row
computes with SharedTensors, by the functions of the other table; it has no arithmetic of its own, so its results are
the same in a session and in the reference. An operator without a row is refused.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..choreography import Party
from ..config import scheme_of
from ..errors import ArgumentError, SecretAccessError, SectorchError, UnsupportedOpError
from ..nn.capture import take_torchs_gelu
from ..nn.weights import device_of, is_large, is_normalising, private_weight, refuse_scattered
from ..session import Session, default_session
from ..tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, share_tensor
from ..tensor.compile_mode import as_plain
from ..tensor.dispatch import METADATA, SECRETS
from ..tensor.table import (
    CONVERSIONS,
    Context,
    as_sectorch_error,
    check_same_device,
    refuse_dropped,
    result_on_meta,
    spell,
)
from .autograd_values import FROZEN, Cell
from .fixed_point import parameter_bits
from .operations import GRADIENTS, Operation, compute_operation, in_shares
from .programs import current_recording

FUNCTIONS: dict[Any, Callable] = {}
"""Functions that are computed above autograd, by functions that have rows: where torch's own way cannot take
secrets."""

REVEALED: Any = WeakTensorKeyDictionary()
"""Revealed values of parameters, as keys: no gradient of a shared model reaches them."""

REPLACED: Any = WeakTensorKeyDictionary()
"""Plain parameters in whose place a model has shared ones, as keys: no gradient reaches them either."""

REFUSED: dict[Any, str] = {}
"""Functions without a gradient on shares, and the way out."""

WITHOUT_ROW: list[Callable] = []
"""A function that registers a row for an operator without one, or gives its composition of other operators, or None."""

_FOLLOWS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]

_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]  a descriptor

_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


class DifferentiableTensor(SecretTensor):
    """A tensor in additive shares that autograd follows: a parameter of a shared model, or a result of parameters.

    A SharedTensor that is combined with one becomes such a tensor, without a gradient. `grad`, hooks, `detach`,
    `no_grad` and the optimisers are torch's own. Its values are as secret as those of a SharedTensor.
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
        if self.cell.own:
            with x.session.operation(x.party):
                return in_shares(context, self.cell).content
        with x.session.operation(x.party):
            flags = self.cell.pool.joint_flags(context)
        return x.with_flags(flags)

    def reveal(self, to: Any = None) -> torch.Tensor:
        """The plain tensor, which Q learns, or the parties named, and nobody else; see `SharedTensor.reveal`.

        Raises:
            ArgumentError: a frozen weight, to anybody but its owner, who has it.
        """
        if self.cell.own and self.session.parties_named(to, self.party) != [self.party]:
            raise ArgumentError(
                f"a frozen weight is {self.party.name}'s own and is revealed to nobody else; reveal the parameters "
                f"that are trained: those with p.requires_grad"
            )
        plain = self.as_shared().reveal(to)
        if self.requires_grad and self.is_leaf:
            REVEALED[plain] = True
        return plain

    @classmethod
    def _handle_call(cls, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        _refuse_transforms()
        if func == _SET_DATA:
            _refuse_other_memory(args[0], args[1])
            return None
        if func in SECRETS:
            raise SecretAccessError(
                f"{spell(func)} would take the content out of a DifferentiableTensor; use .reveal(), which gives its "
                f"value to the querying party, and .detach() for a tensor that autograd does not follow"
            )
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FOLLOWS and args[0].cell.own and (args[1:] or (True,))[0]:
            raise ArgumentError(FROZEN)
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
        """A copy of the shares in this process, as for averages of a model's weights.

        Raises:
            SecretAccessError: the tensor is no leaf of a graph.
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise SecretAccessError("only leaves of a graph can be copied; take x.detach()")
        with torch.no_grad():
            clone: Any = self if self.cell.own else self.detach().clone()
        made: Any = DifferentiableTensor(clone.cell, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made


def _refuse_transforms() -> None:
    """Refuse torch.func, which maps over dimensions and takes gradients with tensors of its own, without shares."""
    transforms: Any = torch._C
    if transforms._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedOpError(
            f"torch.func (vmap, grad, jacrev, functional transforms) does not take tensors that are trained on; call "
            f"the model on the whole batch, and loss.backward() or torch.autograd.grad for gradients (at {line()})"
        )


def _refuse_other_memory(x: Any, value: Any) -> None:
    """`x.data = value`, which changes nothing where both are one memory: a module's .to(device), x.data -= step."""
    if not (isinstance(x, DifferentiableTensor) and isinstance(value, DifferentiableTensor) and x.cell is value.cell):
        raise SecretAccessError(
            "Tensor.data.__set__ would take the content out of a DifferentiableTensor, or make two of one memory; "
            "write into it: with torch.no_grad(): p.copy_(x), or p.data.copy_(x)"
        )


def _as_differentiable(leaf: Any) -> Any:
    if isinstance(leaf, PrivateTensor):
        raise ArgumentError("a model of A's own and a shared one cannot be trained together; share its tensors")
    return DifferentiableTensor(leaf) if isinstance(leaf, SharedTensor) else leaf


def _refuse_without_gradient(func: Callable, tree: Any) -> None:
    """Refuse functions without a gradient on shares, and plain parameters, whose gradients everybody would learn."""
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
    """add_.Tensor -> add.Tensor: the operator whose result an operator in place writes into its first argument."""
    name, overload = func._schema.name.split("::")[1], func._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    return getattr(packet, overload, None) if packet is not None else None


def _draw_public(func: Any, args: tuple, kwargs: dict) -> Any:
    """Public numbers of torch's generator, written into a tensor or in its shape.

    So a module draws initial values for its parameters (`reset_parameters`, `nn.init`), or a mask.
    """
    name, first = func._schema.name.split("::")[1], args[0]
    if not isinstance(first, DifferentiableTensor) or any(isinstance(v, DifferentiableTensor) for v in args[1:]):
        return NotImplemented
    if not name.endswith(("_like", "_")):
        return NotImplemented
    numbers = func(torch.empty(first.shape, dtype=first.dtype), *args[1:], **kwargs)
    return dispatch(torch.ops.aten.copy_.default, (first, numbers), {}) if name.endswith("_") else numbers


def _overload(packet: Any, func: Any, names: tuple[str, ...]) -> Any:
    """The overload of an operator with arguments of these names, of the types that `func` has for them."""
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
    """Compute a function of lists of tensors, which optimisers with `foreach=True` call, tensor by tensor."""
    in_place = name.endswith("_")
    single = name.removeprefix("_foreach_").removesuffix("_")
    function = FOREACH[single] if single in FOREACH else getattr(torch.Tensor, single)
    lists = [isinstance(v, (list, tuple)) for v in args]
    results = []
    for i in range(len(args[0])):
        one = tuple(v[i] if of_lists else v for v, of_lists in zip(args, lists, strict=True))
        rest = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        if in_place and _is_average_of_itself(one):
            continue
        result = function(*one, **rest)
        results.append(one[0].copy_(result) if in_place else result)
    return None if in_place else results


def _is_average_of_itself(operands: Sequence[Any]) -> bool:
    """Whether all operands of an operation in place are one frozen weight, as where a model's copies are averaged."""
    cells = [v.cell for v in operands if isinstance(v, DifferentiableTensor)]
    return len(cells) > 1 and all(cell.own and cell.content is cells[0].content for cell in cells)


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
"""For functions of lists, the function of one tensor, where the method of that name has other arguments."""


WAYS_OUT = {
    "_amp_": "; GradScaler looks at gradients, and shares have no half precision: leave it out, or enabled=False",
    "_sparse_coo": "; leave sparse=True out: shares have no sparse gradients",
    "embedding_renorm": "; leave max_norm out, or scale the rows that are looked up by their norms",
}
"""What operators of these names are part of, and what to write instead."""


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operator of aten: computed by its row, or recorded inside a step.

    Raises:
        UnsupportedOpError: the operator has no row; the text names it and the user's line.
        SecretAccessError: the operator would give a plain number.
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
        way = next((way for start, way in WAYS_OUT.items() if name.startswith(start)), "")
        raise UnsupportedOpError(f"{GRADIENTS.unsupported(func, args, kwargs)}{way} (at {line()})")
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
    if target is not None and target.cell.own:
        if _is_average_of_itself(given):
            return target
        raise UnsupportedOpError(f"{FROZEN} (at {line()})")
    parameter = target is not None and target.requires_grad and target.is_leaf
    into = None if target is None else target.cell
    op = Operation(key, row, args, kwargs, meta, into, parameter, backward, line())
    asked = row.name == "isfinite"  # gives a plain tensor, whose content Python may look at
    recording = None if asked else current_recording(context)
    made = compute_operation(context, op) if recording is None else recording.add(op)
    if target is not None:
        return target
    return pytree.tree_map(lambda c: DifferentiableTensor(c) if isinstance(c, Cell) else c, made)


# Modules whose parameters are in shares.


def shared(
    module: nn.Module, *, owner: Any = "Q", frozen: Iterable[str] | bool | None = None,
    session: Session | None = None, party: Party | None = None, scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> nn.Module:  # fmt: skip
    """Put a module's parameters and buffers in shares, in place, so that it can be trained like any other module.

        base.requires_grad_(False)  # A's model, with a new last layer; only A's process has its weights
        base.classifier = nn.Linear(768, 2)
        model = sectorch.shared(base, owner="A", session=session)

    Frozen parameters of the answering party (`requires_grad=False` with `owner="A"`) are not shared: they stay its
    secret, masked once a session, as in inference. A product with one, forward or backward, costs one message of 8
    bytes an element of the other factor, and a sum none. Its owner learns nothing of the data by it, and the data's
    owners learn nothing of the weights. A gradient flows through them to what is trained. The buffers of such a model
    are frozen as well, but for the running statistics of a batch norm in training mode. Frozen parameters of another
    owner are shares that no optimiser changes.

    Args:
        module: the module. Its owner knows the initial values; after a step nobody knows the parameters. Its
            parameters are others than before, with the hooks of those and without their gradients: make optimisers,
            and lists for `clip_grad_norm_`, afterwards. A list of the plain ones has no gradients to clip.
        owner: the party that knows the initial values: "Q", "A" or "S".
        frozen: names of parameters, or of layers with all of theirs, that get `requires_grad=False`; True for all.
        session, party, scheme: as of `sectorch.share`.

    No message, but for 8 bytes a parameter of Q's to S, and of a frozen one from A to S when it is first used.

    Raises:
        ArgumentError: no module, a DataParallel, a scripted one, or one that is shared already; under
            `torch.inference_mode`; a name that the module does not have, or `frozen` for another owner than an
            answering party.
        UnsupportedOpError: a lazy module that has not been run.
        FixedPointRangeError, NonFiniteError, DtypeError: a parameter that cannot be shared; nothing was changed.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"shared() takes an nn.Module, got a {type(module).__name__}")
    if torch.is_inference_mode_enabled():
        raise ArgumentError("a model that is shared under torch.inference_mode() has no gradients; share it outside")
    refuse_scattered(module)
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise ArgumentError(
            "a scripted or traced module has no Python to follow; share the nn.Module that it was made of"
        )
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(p, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise UnsupportedOpError(f"'{name}' is uninitialised (a lazy module): run the module once in plain first")
    scheme = scheme_of("shared", scheme)
    limit = 2.0 ** parameter_bits(scheme)
    session = session or default_session(device_of(module))
    party = session.answering_party(party)
    (holder,) = session.parties_named(owner, party)
    named = _frozen_parameters(module, frozen, holder, party)
    own = _own_tensors(module, named) if holder == party else {}
    # By identity, so that a parameter that two layers have stays one tensor.
    made: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DifferentiableTensor):
            raise ArgumentError(f"{name} is in shares already")
        if id(tensor) in own:
            made[id(tensor)] = DifferentiableTensor(Cell(_own_weight(own, tensor, session, party, scheme, name)))
        elif tensor.is_floating_point():
            content = share_tensor(
                tensor.detach(), owner=owner, session=session, party=party, scheme=scheme, name=name, limit=limit
            )
            made[id(tensor)] = DifferentiableTensor(content, tensor.requires_grad and id(tensor) not in named)
    take_torchs_gelu(module)
    for child in module.modules():
        for name, tensor in list(child._parameters.items()):
            if tensor is not None and id(tensor) in made:
                if not isinstance(made[id(tensor)], nn.Parameter):
                    made[id(tensor)] = _in_place_of(tensor, made[id(tensor)])
                child._parameters[name] = made[id(tensor)]
        for name, tensor in list(child._buffers.items()):
            if tensor is not None and id(tensor) in made:
                child._buffers[name] = made[id(tensor)]
        if child is module or not type(child).__module__.startswith("torch."):
            child.register_forward_pre_hook(_before_forward)
            child.register_forward_hook(_after_forward, always_call=True)
    return module


def _in_place_of(plain: nn.Parameter, content: DifferentiableTensor) -> nn.Parameter:
    """A parameter with the hooks of the plain one."""
    made, REPLACED[plain] = nn.Parameter(content, content.requires_grad), True
    if made.requires_grad:
        for hook in (plain._backward_hooks or {}).values():
            made.register_hook(hook)
        for hook in (getattr(plain, "_post_accumulate_grad_hooks", None) or {}).values():
            made.register_post_accumulate_grad_hook(hook)
    return made


def _frozen_parameters(module: nn.Module, frozen: Any, holder: Party, party: Party) -> set[int]:
    """The parameters without a gradient, by id: those with `requires_grad=False`, and those that are named.

    Raises:
        ArgumentError: a name that the module does not have; names, for another owner than the answering party.
    """
    if frozen is not None and holder != party:
        raise ArgumentError(
            f"frozen weights stay the secret of the answering party, {party.name}, and the owner is {holder.name}: "
            f"give owner={party.name!r}, or leave frozen out and set requires_grad=False for parameters in shares"
        )
    names = [frozen] if isinstance(frozen, str) else [""] if frozen is True else list(frozen or ())
    inside = dict.fromkeys(names, 0)
    found = {id(p) for p in module.parameters() if not p.requires_grad}
    for path, p in module.named_parameters(remove_duplicate=False):
        for name in names:
            if not name or path == name or path.startswith(f"{name}."):
                inside[name] += 1
                found.add(id(p))
    missing = [name for name, count in inside.items() if not count]
    if missing:
        raise ArgumentError(f"frozen names {missing[0]!r}, and the module has no parameter or layer of this name")
    return found


def _own_tensors(module: nn.Module, frozen: set[int]) -> dict[int, torch.Tensor]:
    """The frozen parameters and buffers of floating-point numbers, by id; no buffers where no parameter is frozen."""
    own: dict[int, torch.Tensor] = {id(p): p for p in module.parameters() if id(p) in frozen and p.is_floating_point()}
    for layer in module.modules() if own else ():
        changing = is_normalising(layer) and layer.training
        own |= {id(b): b for b in layer.buffers(recurse=False) if b.is_floating_point() and not changing}
    return own


def _own_weight(
    own: dict[int, torch.Tensor], x: torch.Tensor, session: Session, party: Party, scheme: Scheme, name: str
) -> PrivateTensor:
    """A frozen weight, masked when a product first takes it.

    Raises:
        NonFiniteError, FixedPointRangeError: at its owner, naming it.
    """
    value = x.detach() if session.present(party) else x.detach().to("meta")
    session.agreement.note(party, "own", name, tuple(x.shape), x.dtype, str(scheme))
    return private_weight(
        value, session, party, scheme, f"weight '{name}'", x.dtype, statistic=False, large=is_large(own.values())
    )


_running = threading.local()
"""The forwards that run in this thread, each with its `as_plain` context."""


def _before_forward(module: nn.Module, _args: Any) -> None:
    inside = as_plain(module)
    inside.__enter__()
    _running.stack = [*getattr(_running, "stack", []), (module, inside)]


def _after_forward(module: nn.Module, _args: Any, _result: Any) -> None:
    stack = getattr(_running, "stack", [])
    if any(entered is module for entered, _ in stack):  # it is not there if an earlier hook raised
        while stack:
            entered, inside = stack.pop()
            inside.__exit__(None, None, None)
            if entered is module:
                break
