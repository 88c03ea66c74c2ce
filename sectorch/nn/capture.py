"""Records the graph of a module by running its `forward` once on tensors that have a shape only.

The module runs by its own `__call__`, with hooks, overridden forwards, optional arguments, and branches on shapes and
public values. Every torch function that takes a secret becomes a node of an `fx.Graph`. Everything else is public, runs
as usual, and its result enters the graph as a constant. So a graph holds for the shape and dtype of the input that it
was recorded on, and for no other (`nn/graph_cache.py` keeps one for each).

A graph has values and no memory: an operation in place becomes one out of place, and later readers of the tensor read
its result. A write to memory that another tensor in use shares is refused. `CaptureFailure` is raised for a module that
changes from call to call, such as one that changes its own attributes or draws random numbers: it runs operation by
operation, each time by its own forward (`run_eagerly`).
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..choreography.located import spare
from ..errors import ArgumentError, NonFiniteError, SectorchError
from ..ops.infinity import CARRIES
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, dispatch
from ..tensor.compile_mode import as_if_compiling
from ..tensor.dispatch import METADATA, rewrite_views, strided_places, strided_view
from ..tensor.shared import Infinite, infinite_of, mask_beyond_range
from ..tensor.table import BEFORE, IN_PLACE, refuse_dropped, result_on_meta, row_of, spell
from . import bounds
from .graph import CONSTANT, OutOfPlace, SourceLocation, Trace, functional_form, layers_refusals, name_of, raise_located
from .inputs import Inputs, flatten_tree, refuse_results


class RandomnessWatch(TorchDispatchMode):
    """Notices whether this thread draws torch's random numbers."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = True
        return func(*args, **(kwargs or {}))


spare(RandomnessWatch.__torch_dispatch__)


# Adjustments for models of transformers.


def adapt_model(model: nn.Module) -> None:
    """Change a copy of a model so that it computes the same on secrets at less cost.

    Its configuration is set to keep no cache of keys and values, and to compute experts as products of matrices.
    """
    take_torchs_gelu(model)
    for layer in list(model.modules()):
        config: Any = getattr(layer, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"


def take_torchs_gelu(model: nn.Module) -> None:
    """Let GELUs that are spelled out by tanh be torch's `gelu(approximate="tanh")`, the same function with half the
    bytes and a sixth of the rounds."""
    spelled_out = tuple(getattr(sys.modules.get("transformers.activations"), name, ()) for name in _GELUS)
    for layer in list(model.modules()):
        for name, part in layer.named_children():
            if isinstance(part, spelled_out) and not part._forward_hooks and not part._forward_pre_hooks:
                setattr(layer, name, nn.GELU("tanh").eval())


_GELUS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


def without_caches(result: Any) -> Any:
    """A model's result with None in the place of each cache of keys and values.

    A cache holds intermediate values, which nobody may learn, for the next call. `transformers` is not imported for
    this: there is no cache where the model has not imported it.
    """
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if cache is None:
        return result
    leaves, spec = flatten_tree(result)
    return pytree.tree_unflatten([None if isinstance(leaf, cache) else leaf for leaf in leaves], spec)


# The state of a module: its attributes, compared before and after a call.


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_OPAQUE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module)
MAX_ITEMS = 200_000


class State:
    """A snapshot of attributes, equal to another one if nothing changed in between.

    It keeps the objects alive, so that an id is not given to another object.
    """

    def __init__(self, found: list, kept: dict[int, Any]):
        self._found, self._kept = found, kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._found == other._found

    __hash__ = None  # pyright: ignore[reportAssignmentType]  how Python says "not hashable"; object's stub has a method


def state_of(module: nn.Module) -> State:
    """The state of a module: everything that a call could change in it.

    Tensors count by identity and version, so that a write into a buffer shows. Containers and objects are searched. A
    module that holds more than `MAX_ITEMS` of them always counts as changed.
    """
    return state_of_layers(dict(module.named_modules()))


def state_of_layers(layers: Mapping[Any, nn.Module]) -> State:
    """The state of some layers, by name, without their sublayers."""
    found: list = []
    seen: dict[int, Any] = {}
    for name, layer in layers.items():
        found.append((name, id(layer)))
        _look(vars(layer), found, seen)
    return State(found, seen)


def attributes_of(layers: Mapping[Any, nn.Module]) -> list[tuple[dict, dict]]:
    """The dicts of some layers' attributes, parameters and buffers, each with a copy of what it holds."""
    dicts = [d for layer in layers.values() for d in (vars(layer), *vars(layer).values()) if type(d) is dict]
    return [(d, dict(d)) for d in dicts]


def put_back(held: list[tuple[dict, dict]]) -> None:
    """Restore the dicts of `attributes_of`, so that a call that was refused leaves the user's model unchanged."""
    for attributes, before in held:
        attributes.clear()
        attributes.update(before)


def _look(value: Any, found: list, seen: dict[int, Any]) -> None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, _PLAIN):
            found.append((type(value), value if value == value else "nan"))
            continue
        found.append(id(value))
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        if len(found) > MAX_ITEMS:
            found.append(object())  # equal to nothing
            return
        if isinstance(value, torch.Tensor):
            found.append(version(value))
            continue
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(value, kind):  # by the kind's own methods: a class of a package's may have others
                found_in: Any = kind.__iter__
                pending += found_in(value)
                pending += dict.values(value) if isinstance(value, dict) else ()
        pending.append(getattr(value, "__dict__", None))


class OutsideState:
    """What a module's own code can change outside of the module, as it was when this was made.

    That is: global names, variables of enclosing functions, attributes of classes, functions and objects, default
    arguments, the lists, dicts and sets in these, and the generators of `random` and numpy. A recording and a dry run
    call the forward without a call of the user's; `put_back` undoes what they did. Code of installed packages is not
    looked at, and neither are other modules.

    Attributes:
        draws: whether the code refers to `random` or to numpy's generator.
    """

    def __init__(self, module: nn.Module):
        self.draws = False
        self._seen: dict[int, Any] = {}
        self._undo: list[tuple[Any, Any, Any]] = []
        """A holder, a name in it, and what it held; or a container, None, and a copy of it."""
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._torch = torch.get_rng_state()
        for layer in module.modules():
            self._code_of(type(layer))
            for value in vars(layer).values():
                self._follow(value, held=False)
        for kept in [vars(f) for f in self._seen.values() if isinstance(f, FunctionType)]:
            self._undo.append((kept, None, dict(kept)))

    def drew(self) -> bool:
        """Whether numbers of `random` or of numpy's generator were drawn by code that refers to them."""
        if not self.draws:
            return False
        name, keys, *place = self._numpy
        now_name, now_keys, *now_place = np.random.get_state()
        same = name == now_name and place == now_place and np.array_equal(np.asarray(keys), np.asarray(now_keys))
        return not same or random.getstate() != self._python

    def put_back(self) -> None:
        """Restore what it found."""
        torch.set_rng_state(self._torch)
        if self.drew():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        for holder, name, value in reversed(self._undo):
            if isinstance(holder, CellType):
                holder.cell_contents = value
            elif isinstance(holder, type) and name is None:
                for added in set(vars(holder)) - value:
                    delattr(holder, added)
            elif isinstance(holder, type):
                if vars(holder).get(name) is not value:
                    setattr(holder, name, value)
            elif isinstance(holder, torch.Tensor):
                if version(holder) != name:
                    holder.detach().copy_(value)
            elif name is not None and value is _ABSENT:
                holder.pop(name, None)
            elif name is not None:
                holder[name] = value
            elif isinstance(holder, list):
                holder[:] = value
            else:
                holder.clear()
                holder.update(value)

    def _new(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > MAX_OUTSIDE:
            return False
        self._seen[id(value)] = value
        return True

    def _code_of(self, kind: type) -> None:
        """A class of the user's own, and those that it is made from."""
        for one in kind.__mro__:
            if not _is_own(one) or not self._new(one):
                continue
            self._undo.append((one, None, set(vars(one))))
            for name, value in vars(one).items():
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if isinstance(value, property):
                    value = value.fget
                if isinstance(value, FunctionType):
                    self._function(value)
                elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                    self._undo.append((one, name, value))
                    self._follow(value)

    def _function(self, f: FunctionType) -> None:
        if f.__code__.co_filename.startswith(_INSTALLED) or not self._new(f):
            return
        for cell in f.__closure__ or ():
            if self._new(cell):
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue  # the variable has no value yet
                self._undo.append((cell, None, value))
                self._follow(value)
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self._follow(value)
        self._names(_names_in(f.__code__), f.__globals__)

    def _names(self, names: Iterable[str], held: dict[str, Any]) -> None:
        for name in names:
            if name not in held:
                self._undo.append((held, name, _ABSENT))
            else:
                value = held[name]
                if isinstance(value, ModuleType):
                    self.draws = self.draws or value is random or value.__name__.partition(".")[0] == "numpy"
                    if _is_own(value) and self._new(value):
                        self._names(names, vars(value))
                    continue
                self.draws = self.draws or getattr(value, "__self__", None) is getattr(random.random, "__self__", 0)
                if not isinstance(value, (FunctionType, type)):
                    self._undo.append((held, name, value))
                self._follow(value)

    def _follow(self, value: Any, held: bool = True) -> None:
        """What is found from a value; `held`: whether the value itself is outside of the module."""
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._follow(value.__func__)
            self._follow(value.__self__, held)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._follow(one)
        elif isinstance(value, type):
            self._code_of(value)
        elif isinstance(value, torch.Tensor):
            if held and type(value) is torch.Tensor and value.numel() <= MAX_OUTSIDE and self._new(value):
                self._undo.append((value, version(value), value.detach().clone()))
        elif isinstance(value, (list, dict, set, tuple)) and self._new(value):
            if held and type(value) in (list, dict, set):
                self._undo.append((value, None, type(value)(value)))
            kind: Any = next(kind for kind in (dict, list, set, tuple) if isinstance(value, kind))
            of: Any = dict.values if kind is dict else kind.__iter__  # a class of a package's may have others
            for one in [*of(value)]:
                self._follow(one, held)
        elif not isinstance(value, (nn.Module, ModuleType)) and _is_own(type(value)) and self._new(value):
            self._code_of(type(value))
            kept = getattr(value, "__dict__", None)
            if isinstance(kept, dict):
                if held:
                    self._undo.append((kept, None, dict(kept)))
                for one in list(kept.values()):
                    self._follow(one, held)


_ABSENT = object()
MAX_OUTSIDE = 20_000
"""Objects that `OutsideState` looks at, and entries of a tensor that it copies, at most."""
_INSTALLED = tuple(
    {*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
    | {f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<frozen"}
)


def _is_own(what: Any) -> bool:
    """Whether a class or module is of the user's own code, and not of an installed package."""
    module = sys.modules.get(what.__module__) if isinstance(what, type) else what
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else not file.startswith(_INSTALLED)


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The global names and attributes that a function's code, and the functions in it, refer to."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def version(x: torch.Tensor) -> int:
    """How often a tensor was written into, or -1 where torch does not count it."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return x._version
        except (RuntimeError, AttributeError):  # made in inference mode
            return -1


# Plain tensors that a forward makes and writes secrets into: `out = torch.zeros(n, d); out[i] = x`.
#
# A plain tensor cannot become a secret one. But every torch function of a forward passes through here, so that a secret
# tensor can replace it, and others its views, wherever they are used from then on. This requires that nothing else has
# its memory. The memory is filled with a value that no call accepts (NaN, or a whole number out of range), so that a
# later call, which knows nothing of the replacement, does not compute with a wrong number.


_T = torch.Tensor
MAKES = {
    torch.zeros, torch.ones, torch.full, torch.empty, torch.zeros_like, torch.ones_like, torch.full_like,
    torch.empty_like, torch.tensor, torch.eye, torch.arange, torch.clone, _T.clone, _T.new, _T.new_tensor, _T.new_zeros,
    _T.new_ones, _T.new_full, _T.new_empty,
}  # fmt: skip
"""Functions that make a tensor with memory of its own."""
_UNINITIALISED = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, _T.new_empty, _T.new_empty_strided,
    _T.new,
}  # fmt: skip
_RESIZES = {_T.resize_, _T.resize_as_}
"""With `_UNINITIALISED`, functions that do not initialise memory."""


def call_with_zeros(func: Callable, args: tuple, kwargs: dict) -> Any:
    """func(*args, **kwargs), with zeros where torch does not initialise memory, so that two calls do the same."""
    target: Any = args[0] if args else None
    before = target.untyped_storage().nbytes() if func in _RESIZES and type(target) is torch.Tensor else None
    result = func(*args, **kwargs)
    if type(result) is torch.Tensor and not result.is_meta and result.layout == torch.strided:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if func in _UNINITIALISED and not (func is _T.new and not all(isinstance(v, int) for v in args[1:])):
                result.zero_()
            elif before is not None:
                result.flatten()[max(0, before // result.element_size() - result.storage_offset()) :] = 0
    return result


_WHOLE_DTYPES = (torch.int32, torch.int64)


class InplaceWrites:
    """The plain tensors that one call made by `MAKES`, and the secret tensors that replace some of them."""

    def __init__(self, strided: Callable, weights: Iterable[Any] = ()):
        """
        Args:
            strided: `dispatch.strided_view`, or its counterpart in a recording.
            weights: private tensors. They replace the plain tensors that they were made of, which a forward may hold
                elsewhere, in a list or a closure.
        """
        self._strided = strided
        self._made: dict[int, list[ref]] = {}
        """By their memory, the tensors that were made, and their views."""
        self._secret: dict[int, tuple[torch.Tensor, Any]] = {}
        for weight in weights:
            plain = [one() for one in weight.stands_for] if isinstance(weight, PrivateTensor) else []
            self._secret |= {id(x): (x, weight) for x in plain if x is not None}
        self._unset: dict[int, torch.Tensor] = {}
        """Of tensors that were made of NaN, the places where nothing was written yet."""

    def note_result(self, func: Callable, result: Any) -> Any:
        for leaf in result if isinstance(result, (list, tuple)) else (result,):
            memory = _memory(leaf)
            if memory is None:
                continue
            if func in MAKES:
                self._made[memory] = [ref(leaf)]
            elif memory in self._made and any(one() is not None for one in self._made[memory]):
                self._made[memory].append(ref(leaf))
        return result

    def replace_plain(self, tree: Any, func: Callable | None = None) -> Any:
        """The tree, which holds the arguments of func, with secret tensors in place of those that they replace.

        Raises:
            NonFiniteError: func reads a place that holds NaN.
        """
        if not self._secret:
            return tree
        if self._unset:
            self._refuse_unset(tree, func)
        return self._replaced(tree)

    def _replaced(self, tree: Any) -> Any:
        size = lambda v: isinstance(v, torch.Size)  # which torch tells from other tuples
        return pytree.tree_map(lambda v: self._secret[id(v)][1] if id(v) in self._secret else v, tree, is_leaf=size)

    def _refuse_unset(self, tree: Any, func: Callable | None) -> None:
        for leaf in pytree.tree_leaves(tree):
            unset = self._unset.get(id(leaf))
            if unset is None or func in METADATA:
                continue
            args: tuple[Any, ...] = tree[0] if func is not None else ()
            target: Any = args[0] if args else None
            index: Any = args[1] if len(args) > 1 else ...
            # A write takes its places off; what is read has to be written before.
            known = not any(isinstance(v, SecretTensor) for v in pytree.tree_leaves(index))
            if target is leaf and func in (_T.__setitem__, _T.copy_, _T.fill_, _T.zero_):
                if func is not _T.__setitem__ or known:
                    unset[index if func is _T.__setitem__ else ...] = False
                continue
            read = unset[index] if target is leaf and func is _T.__getitem__ and known else unset
            if bool(read.any()):
                raise NonFiniteError(
                    f"{'a result' if func is None else spell(func)} holds {int(read.sum())} NaN of a tensor that "
                    f"the forward makes of NaN and has not written there; make it with torch.zeros, or write it first"
                )

    def before_write(self, func: Callable, args: Any) -> Any:
        """The arguments of a function that may write into the first of them.

        Where it writes a secret into a plain tensor, secret tensors replace that tensor and its views from now on. A
        weight replaces a plain tensor until something else is written there.
        """
        if func in IN_PLACE and args and isinstance(args[0], PrivateTensor):
            at = next((at for at, (_, secret) in self._secret.items() if secret is args[0] and secret.copied), None)
            secret = self._secret_among(args)
            if at is None or secret is None or isinstance(secret, PrivateTensor):
                return args
            made = args[0] + secret.flatten()[:0].sum().to(args[0].dtype)
            self._secret[at] = self._secret[at][0], made
            return (made, *args[1:])
        if func in IN_PLACE and args and type(args[0]) is torch.Tensor:
            sharing = self._sharing(args[0])
            if sharing and self._can_replace(args, sharing):
                self._replace(args, sharing)
                if self._unset:
                    self._refuse_unset((args, {}), func)
                return self._replaced(args)
        return args

    def _sharing(self, target: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in use that share the target's memory; empty unless all of them are known here."""
        memory = _memory(target)
        known = [] if memory is None else self._made.get(memory, [])
        living = list({id(x): x for x in (one() for one in known) if x is not None}.values())
        if not any(x is target for x in living):
            return []
        # torch counts one holder of the memory for each tensor: one more is a view that is not known here, which would
        # miss the write.
        return living if _holders(target) == _holders(torch.zeros(1)) + len(living) - 1 else []

    def _can_replace(self, args: tuple, sharing: list[torch.Tensor]) -> bool:
        target, secret = args[0], self._secret_among(args)
        fillable = not _is_whole(target) or target.dtype in _WHOLE_DTYPES
        alone = len(sharing) == 1 and not (isinstance(secret, PrivateTensor) and secret.is_complex())
        return fillable and secret is not None and (alone or not (target.is_complex() or secret.is_complex()))

    def _replace(self, args: tuple, sharing: list[torch.Tensor]) -> None:
        target, secret = args[0], self._secret_among(args)
        part = secret.real if secret.is_complex() else secret
        zero = part.flatten()[:0].sum()
        zero = zero if _is_whole(target) else zero.to(target.dtype.to_real())
        if len(sharing) == 1:
            start = target.detach().clone()
            if start.is_floating_point() and bool((unset := start.isnan()).any()):
                start, self._unset[id(target)] = torch.where(unset, 0.0, start), unset
            stands = start + zero
            self._secret[id(target)] = target, stands.clone() if isinstance(stands, PrivateTensor) else stands
        with torch._C.DisableTorchFunction(), torch.no_grad():
            size = target.untyped_storage().nbytes() // target.element_size()
            memory = torch.as_strided(target, (size,), (1,), 0)
            start = memory.clone()
            memory.fill_(torch.iinfo(target.dtype).max if _is_whole(target) else float("nan"))
        if len(sharing) > 1:
            line = start + zero
            for x in sharing:
                self._secret[id(x)] = x, self._strided(line, tuple(x.shape), x.stride(), x.storage_offset())

    def _secret_among(self, args: tuple) -> Any:
        """A secret tensor among the values written that the target's dtype can hold; a weight only if need be."""
        given = [v for v in pytree.tree_leaves(args[1:]) if isinstance(v, SecretTensor)]
        given.sort(key=lambda v: isinstance(v, PrivateTensor))
        fits = lambda v: torch.can_cast(v.dtype, args[0].dtype)
        return next((v for v in given if fits(v)), None)


def _memory(x: Any) -> int | None:
    """A number that identifies the memory of a plain tensor, if it has any."""
    try:
        return x.untyped_storage()._cdata if type(x) is torch.Tensor else None
    except (NotImplementedError, RuntimeError):  # of a sparse tensor, or of torch.func's own
        return None


def _holders(x: torch.Tensor) -> int:
    """How many objects share a tensor's memory. Views and arrays not known here would miss a write."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _is_whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


class CaptureFailure(Exception):
    """A recording would not stand for the next call; the text says why."""


class StandIn(SharedTensor):
    """A secret during a recording: `twin` is a meta tensor of its shape, `node` computes its current value."""

    SPOKEN = "SharedTensor"  # its name in errors
    twin: torch.Tensor
    recorder: GraphRecorder
    node: fx.Node

    @staticmethod
    def __new__(cls, twin: torch.Tensor, recorder: GraphRecorder, node: fx.Node):
        session = recorder.session
        shape: Any = SimpleNamespace(shape=twin.shape)
        self = SharedTensor.__new__(
            cls, shape, recorder.scheme.frac_bits, session, session.answering[0], recorder.scheme, twin.dtype
        )
        self.twin, self.recorder, self.node = twin, recorder, node
        self.layout_in_memory = dispatch.Layout(lambda: twin, recorder.stand_ins)
        return self

    def on_meta(self) -> torch.Tensor:
        """The twin itself, so that torch shares and changes its memory as it would that of a plain tensor."""
        return self.twin

    def reveal(self, to: Any = None) -> torch.Tensor:
        raise CaptureFailure("the module reveals a value on its way")


class GraphRecorder(TorchFunctionMode):
    """Records the torch functions that take secrets while it is active."""

    def __init__(self, session: Session, scheme: Scheme, weights: dict[str, PrivateTensor], layers: dict[int, str]):
        super().__init__()
        self.session, self.scheme, self.layers = session, scheme, layers
        self.graph = fx.Graph()
        self.values: dict[str, torch.Tensor] = {}
        self._weights = {id(t): name for name, t in weights.items()}
        self._private: dict[int, fx.Node] = {}
        self._constants: dict[tuple[int, int], fx.Node] = {}
        self._kept: list[Any] = []  # objects kept alive, so that their ids stay theirs while the recording lasts
        self.stand_ins: list[ref] = []
        self.writes = InplaceWrites(self._strided, weights.values())
        self._input_memory: set[int] = set()
        self.writes_inputs = False

    def inputs(self, given: Inputs) -> list[StandIn]:
        """The program's inputs, of the shapes and dtypes of meta tensors."""
        with torch._C.DisableTorchFunction():
            twins = [torch.empty_like(x, device="meta") for x in given.tensors]
            self._input_memory = {twin.untyped_storage()._cdata for twin in twins}
            return [self._stand_in(x, self.graph.placeholder(n)) for n, x in zip(given.names, twins, strict=True)]

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = self.writes.replace_plain((args, kwargs or {}), func)
        with self:
            args = self.writes.before_write(func, args)
        return self.writes.note_result(func, self._record(func, args, dict(kwargs or {})))

    def _record(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if not any(isinstance(leaf, SecretTensor) for leaf in pytree.arg_tree_leaves(*args, **kwargs)):
            return call_with_zeros(func, args, kwargs)
        try:
            return dispatch.normal_form(func, args, kwargs, self._record_secret, self)
        except SectorchError as error:
            raise_located(error, SourceLocation.now(self.layers).text(name_of(func)))

    def _record_secret(self, func: Callable, args: tuple, kwargs: dict, leaves: list) -> Any:
        if any(isinstance(s, SharedTensor) and getattr(s, "recorder", None) is not self for s in leaves):
            raise CaptureFailure("the module reads a tensor that an earlier call made")
        shared = [s for s in leaves if isinstance(s, StandIn)]
        row = row_of(func)
        if not shared and not dispatch.meets_infinity(self.scheme, func, args, kwargs):
            return self._record_private(func, args, kwargs)
        elsewhere = dispatch.in_place(func) and not isinstance(args[0], StandIn)
        public = row is not None and (row.name == "constant_like" or _publicly_finite(func, row.name, shared))
        if public or elsewhere or kwargs.get("out") is not None:
            return dispatch.call(func, (), args, kwargs)
        refuse_dropped(func)
        if func in BEFORE:
            BEFORE[func](*args, **kwargs)
        versions = [s.twin._version for s in shared]
        try:
            with torch.inference_mode(False):
                meta = result_on_meta(func, args, kwargs)
        except SectorchError:
            if row is None:
                return dispatch.call(func, (), args, kwargs)  # raises, in the words of the table
            raise
        changed = [s for s, version in zip(shared, versions, strict=True) if s.twin._version != version]
        mark = self._infinity_mark(row, args, kwargs)
        if changed:
            return self._record_write(func, args, kwargs, {id(s): s for s in changed}, mark)
        known = {id(s.twin): s for s in shared}
        leaves, spec = pytree.tree_flatten(meta)
        if not leaves and isinstance(meta, (list, tuple)):  # the rows of an empty batch
            return meta
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return dispatch.call(func, (), args, kwargs)
        if all(id(leaf) in known for leaf in leaves):  # torch gave its argument back: dropout in evaluation mode
            return pytree.tree_unflatten([known[id(leaf)] for leaf in leaves], spec)
        node = self._node(func, args, kwargs)
        result = self._results(node, meta, known)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, StandIn) and id(leaf.twin) not in known and leaf.dtype != torch.bool:
                leaf.infinite = mark
        return result

    def _infinity_mark(self, row: Any, args: tuple, kwargs: dict) -> Infinite | None:
        """The public mark of results that may hold what stands for infinity."""
        if row is None or row.name not in CARRIES:
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        met = any(infinite_of(x) is not None or mask_beyond_range(self.scheme, x) is not None for x in leaves)
        return Infinite(-math.inf, math.inf) if met else None

    def _results(self, node: fx.Node, meta: Any, known: dict[int, StandIn]) -> Any:
        if isinstance(meta, torch.Tensor):
            node.meta.update(shape=tuple(meta.shape), dtype=meta.dtype)
            return self._stand_in(meta, node)
        made = [
            m if not isinstance(m, (torch.Tensor, list, tuple))
            else known[id(m)] if id(m) in known
            else self._results(self._item(node, i), m, known)
            for i, m in enumerate(meta)
        ]  # fmt: skip
        if isinstance(meta, list):
            return made
        return type(meta)(made) if type(meta).__module__ == "torch.return_types" else tuple(made)

    def _item(self, node: fx.Node, at: int) -> fx.Node:
        item = self.graph.call_function(bounds.item, (node, at))
        item.meta = {**node.meta, "value": item.name}
        return item

    def _record_write(
        self, func: Callable, args: tuple, kwargs: dict, changed: dict[int, StandIn], mark: Any
    ) -> StandIn:
        """Record an operation in place as a new value, which later readers of the tensor read."""
        target: Any = args[0] if args else None
        storage = lambda s: s.twin.untyped_storage()._cdata
        if id(target) not in changed or any(storage(s) != storage(target) for s in changed.values()):
            raise CaptureFailure(f"{spell(func)} changes a tensor that is not its first argument")
        self.writes_inputs = self.writes_inputs or storage(target) in self._input_memory
        others = dispatch.overlapping(func, target)
        dtypes = {a.dtype for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        plain = functional_form(func) if len(dtypes) == 1 else None
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
            plain = func
        node = self._node(plain or OutOfPlace(func), args, kwargs)
        node.meta.update(shape=tuple(target.twin.shape), dtype=target.twin.dtype)
        target.node = node
        record = lambda f, *args: self._node(f, args, {})
        for other, theirs, mine in others:
            other.node = rewrite_views(other, target, tuple(other.twin.shape), theirs, mine, record)
            other.node.meta.update(shape=tuple(other.twin.shape), dtype=other.twin.dtype)
            other.infinite = other.infinite or mark
        target.infinite = mark
        return target

    def _strided(self, line: StandIn, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> StandIn:
        """As `dispatch.strided_view`, in the recording."""
        node = self._node(torch.index_select, (line, 0, strided_places(line, shape, stride, offset)), {})
        with torch._C.DisableTorchFunction():
            twin = line.twin.as_strided(shape, stride, offset)
        return self._stand_in(twin, self._node(torch.reshape, (node, shape), {}))

    def _record_private(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Record an operation among A's own tensors."""
        target = args[0] if args else None
        if dispatch.in_place(func) and isinstance(target, PrivateTensor):
            if target.origin is not None:
                raise CaptureFailure(f"{spell(func)} changes a weight's copy through a view")
            node = self._node(OutOfPlace(func), args, kwargs)
            result = dispatch.call(func, (), args, kwargs)
            self._private[id(target)] = node
            return result
        result = dispatch.call(func, (), args, kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, PrivateTensor)]
        if all(id(leaf) in self._private or id(leaf) in self._weights for leaf in leaves):
            return result  # a tensor that A derived before, or the argument itself
        node = self._node(func, args, kwargs)
        for path, leaf in _paths(result):
            if isinstance(leaf, PrivateTensor) and id(leaf) not in self._private and id(leaf) not in self._weights:
                self._kept.append(leaf)
                self._private[id(leaf)] = functools.reduce(self._item, path, node)
        if isinstance(result, torch.Tensor):
            node.meta.update(shape=tuple(result.shape), dtype=result.dtype)
        return result

    def _stand_in(self, twin: torch.Tensor, node: fx.Node) -> StandIn:
        node.meta.update(shape=tuple(twin.shape), dtype=twin.dtype)
        node.meta.setdefault("value", node.name)
        made = StandIn(twin, self, node)
        self.stand_ins.append(ref(made))
        return made

    def _node(self, func: Callable, args: tuple, kwargs: dict) -> fx.Node:
        swap = lambda leaf: self.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        args, kwargs = map_aggregate(args, swap), map_aggregate(kwargs, swap)
        node = self.graph.create_node("call_function", func, args, kwargs, name=name_of(func))
        node.meta = {"value": node.name, "where": SourceLocation.now(self.layers)}
        return node

    def node_of(self, x: torch.Tensor) -> fx.Node:
        """The node that gives a tensor's value; for a public tensor, a constant of its current content."""
        if isinstance(x, StandIn):
            return x.node
        if isinstance(x, PrivateTensor):
            node = self._private.get(id(x))
            if node is None:
                name = self._weights.get(id(x))
                if name is None:
                    raise CaptureFailure("the module reads a tensor that an earlier call derived from its weights")
                node = self._private[id(x)] = self._attribute(name)
            return node
        if isinstance(x, nn.Parameter) and x.is_floating_point():
            raise ArgumentError(
                "the forward reads a parameter that is not the module's own (a hook that refers to the original "
                "module, say): it would count as public; make it a parameter or a buffer of the module"
            )
        key = (id(x), version(x))
        if key not in self._constants:
            name = f"{CONSTANT}{len(self._constants)}"
            self.values[name] = x.detach().clone()
            self._kept.append(x)
            self._constants[key] = self._attribute(name)
        return self._constants[key]

    def _attribute(self, name: str) -> fx.Node:
        node = self.graph.create_node("get_attr", name, (), {})
        node.meta["value"] = node.name
        return node


def _publicly_finite(func: Callable, name: str, shared: list[StandIn]) -> bool:
    """Whether the result of `isnan` and its kin is public: no secret is NaN, and few may stand for infinity."""
    if name != "isfinite":
        return False
    return getattr(func, "__name__", "") in ("isnan", "isreal") or all(x.infinite is None for x in shared)


def _paths(value: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    if isinstance(value, (list, tuple)):
        return [found for i, v in enumerate(value) for found in _paths(v, (*path, i))]
    return [(path, value)]


@torch.inference_mode(False)
def capture(
    module: nn.Module, weights: dict[str, PrivateTensor], values: dict[str, torch.Tensor], inputs: Inputs
) -> tuple[Trace, bool]:
    """Record a call of the module, and say whether the call changed the module.

    Args:
        module: bound to a session in which nobody is present; it may be left changed where this raises.
        weights: its private tensors by name.
        values: their values, in float64.
        inputs: of meta tensors: only their shapes and dtypes, and public values, are used.

    Raises:
        CaptureFailure: the recording would not stand for another call.
        SectorchError: the forward asks for an operation that secrets do not have, with layer and line.
    """
    first = next(iter(weights.values()), None)
    session, scheme = (first.session, first.scheme) if first is not None else (Session(dry=True), Scheme())
    layers = {id(layer): name for name, layer in module.named_modules()}
    recorder, draws, before = GraphRecorder(session, scheme, weights, layers), RandomnessWatch(), state_of(module)
    generator = torch.get_rng_state()
    given = recorder.inputs(inputs)
    with torch.no_grad(), as_if_compiling(module), layers_refusals(layers), draws, recorder:
        result = recorder.writes.replace_plain(without_caches(inputs.called(module, given)))
    if draws.drawn:
        torch.set_rng_state(generator)
        raise CaptureFailure("the module draws random numbers")
    refuse_results(result)
    changed = state_of(module) != before
    leaves, spec = flatten_tree(result)
    recorder.graph.output([recorder.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    used = {n.target for n in recorder.graph.nodes if n.op == "get_attr"}
    kept = {name: value for name, value in {**values, **recorder.values}.items() if name in used}
    for node in reversed(list(recorder.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            recorder.graph.erase_node(node)
    with torch._C.DisableTorchFunctionSubclass():
        dtypes = {name: weight.dtype for name, weight in weights.items()}
    return Trace(recorder.graph, kept, spec, inputs.rows, dtypes, recorder.writes_inputs), changed


# A module that runs operation by operation, by its own forward.


class LocatedErrors(TorchFunctionMode):
    """Names layer and line in the errors of all operations while it is active."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.writes = InplaceWrites(strided_view, (*module.parameters(), *module.buffers()))
        self.layers = {id(layer): name for name, layer in module.named_modules()}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.writes.replace_plain((args, kwargs or {}), func)
        if func in METADATA:
            return func(*args, **kwargs)
        try:
            args = self.writes.before_write(func, args)
            return self.writes.note_result(func, call_with_zeros(func, args, kwargs))
        except SectorchError as error:
            raise_located(error, SourceLocation.now(self.layers).text(name_of(func)))


def run_eagerly(module: nn.Module, inputs: Inputs) -> Any:
    """Call the module itself, with its hooks and attributes."""
    watching = LocatedErrors(module)
    with as_if_compiling(module), layers_refusals(watching.layers), watching:
        return watching.writes.replace_plain(without_caches(inputs.called(module)))


# `nn.TransformerEncoder` at padded places.
#
# torch has two ways through an encoder with a padding mask. Without gradients it leaves padded places out (its fast
# path, in nested tensors) and fills them with zeros. With gradients it computes meaningless values there. A secure
# model gives the zeros of `with torch.no_grad()`.


def zeros_at_padded_places(model: nn.Module) -> None:
    """Change a copy of a model: its encoders give zeros where torch's fast path gives them."""
    for layer in model.modules():
        inherited = isinstance(layer, nn.TransformerEncoder) and type(layer).forward is nn.TransformerEncoder.forward
        if inherited and getattr(layer, "use_nested_tensor", False):
            layer.__dict__["forward"] = MethodType(_forward, layer)


def _forward(
    self: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """`nn.TransformerEncoder.forward`, with its conditions for the fast path."""
    given = src_key_padding_mask
    if given is None or mask is not None or src.dim() != 3 or not torch.backends.mha.get_fastpath_enabled():
        return nn.TransformerEncoder.forward(self, src, mask, given, is_causal)
    padded = given if given.dtype == torch.bool else given != 0
    if getattr(self, "mask_check", True) and padded.shape[1] > 1:  # the places before must be whole rows' beginnings
        padded = padded & (padded[:, :-1] & padded[:, 1:].logical_not()).any().logical_not()
    keys = F._canonical_mask(given, "src_key_padding_mask", None, "mask", src.dtype)
    for layer in self.layers:
        src = layer(src, src_mask=None, is_causal=bool(is_causal), src_key_padding_mask=keys)
    src = src.masked_fill(padded.unsqueeze(-1), 0.0)
    return src if self.norm is None else self.norm(src)
