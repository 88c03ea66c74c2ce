"""The graph of a module: what its own `forward` did, recorded by running it once on tensors that have a shape only.

The module runs as it is, by its own `__call__`: hooks, overridden forwards, optional arguments, branches on shapes and
on public values. Every torch function that touches a secret becomes a node of an `fx.Graph`; everything else is public,
runs as ever, and enters the graph as the constant that it gave. So a graph holds for the shape and the dtype of the
input that it was recorded on, and for no other (`nn/shapes.py` keeps one of each).

What is recorded has values and no memory: an operation in place becomes one out of place whose result is what every
later reader of that tensor reads. A write to memory that another living tensor shares is refused, as it is operation by
operation. What a recording cannot stand for, since it changes from call to call, raises `NotCaptured`: a module that
changes its own attributes or draws random numbers runs operation by operation, each time by its own forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, SectorchError, UnsupportedOpError
from ..ops.infinity import CARRIES
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, dispatch, owner
from ..tensor.arguments import (
    CONVERSIONS,
    LIKE,
    alone,
    as_sizes,
    dense,
    of_python,
    on_cpu,
    refuse_dropped,
)
from ..tensor.compiling import compiling
from ..tensor.infinity import Infinite, beyond, infinite_of
from ..tensor.on_meta import (
    MASKED_FILL,
    MASKED_SELECT,
    READS_CONTENT,
    first_positions,
    is_number,
    selected_on_meta,
    to_meta,
    torch_on_meta,
)
from ..tensor.table import BEFORE, COMPOSED, row_of, spell
from ..tensor.views import overlap, rewritten, strided_places
from . import bounds
from .drawing import Drawing
from .huggingface import without_caches
from .inputs import Inputs, flattened, refuse_results
from .nodes import name_of
from .state import state_of, version
from .trace import CONSTANT, OutOfPlace, Trace, functional_form
from .where import Place, layers_refusals, raise_located
from .written import Written, defined

_T = torch.Tensor


class NotCaptured(Exception):
    """A recording would not be what the next call does; the text says why."""


class StandIn(SharedTensor):
    """A secret that has a shape: `twin` is torch's own meta tensor, `node` what gives its value now."""

    SPOKEN = "SharedTensor"  # what errors call it
    twin: torch.Tensor
    recorder: Recorder
    node: fx.Node

    @staticmethod
    def __new__(cls, twin: torch.Tensor, recorder: Recorder, node: fx.Node):
        session = recorder.session
        shape: Any = SimpleNamespace(shape=twin.shape)
        self = SharedTensor.__new__(
            cls, shape, recorder.scheme.frac_bits, session, session.answering[0], recorder.scheme, twin.dtype
        )
        self.twin, self.recorder, self.node = twin, recorder, node
        return self

    def reveal(self, to: Any = None) -> torch.Tensor:
        raise NotCaptured("the module reveals a value on its way")


class Recorder(TorchFunctionMode):
    """Records what is done with secrets inside it."""

    def __init__(self, session: Session, scheme: Scheme, weights: dict[str, PrivateTensor], layers: dict[int, str]):
        super().__init__()
        self.session, self.scheme, self.layers = session, scheme, layers
        self.graph = fx.Graph()
        self.values: dict[str, torch.Tensor] = {}
        self._weights = {id(t): name for name, t in weights.items()}
        self._private: dict[int, fx.Node] = {}
        self._constants: dict[tuple[int, int], fx.Node] = {}
        self._kept: list[Any] = []  # whose ids are theirs as long as the recording lasts
        self._living: list[ref] = []
        self.written = Written(self._strided, weights.values())

    def inputs(self, given: Inputs) -> list[StandIn]:
        """The program's inputs, of the shapes and dtypes of meta tensors."""
        with torch._C.DisableTorchFunction():
            twins = [torch.empty_like(x, device="meta") for x in given.tensors]
            return [self._stand_in(x, self.graph.placeholder(n)) for n, x in zip(given.names, twins, strict=True)]

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = self.written.swapped((args, kwargs or {}), func)
        with self:
            args = self.written.taken(func, args)
        return self.written.made(func, self._called(func, types, args, dict(kwargs or {})))

    def _called(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        secrets = [leaf for leaf in leaves if isinstance(leaf, SecretTensor)]
        if not secrets:
            return defined(func, args, kwargs)
        args, kwargs = of_python(args, kwargs)
        if func in LIKE and not isinstance(args[0], StandIn):
            func, args, kwargs = alone(func, args, kwargs)
            if not isinstance(args[0], SecretTensor):
                return func(*args, **kwargs)
            secrets = [args[0]]
        if func in dispatch.METADATA:
            if func in dispatch.IN_MEMORY and isinstance(args[0], StandIn):
                args = (args[0].twin, *args[1:])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for secret in secrets:
            if isinstance(secret, SharedTensor) and getattr(secret, "recorder", None) is not self:
                raise NotCaptured("the module reads a tensor that an earlier call made")
        try:
            dense(leaves)
            if func in COMPOSED:
                with self:
                    made = COMPOSED[func](*args, **kwargs)
                if made is not NotImplemented:
                    return made
            return self._secret(func, types, args, kwargs, secrets)
        except SectorchError as error:
            raise_located(error, Place.now(self.layers).text(name_of(func)))

    def _secret(self, func: Callable, types: Any, args: tuple, kwargs: dict, secrets: list[SecretTensor]) -> Any:
        args, kwargs = as_sizes(func, args, kwargs)
        shared = [s for s in secrets if isinstance(s, StandIn)]
        row = row_of(func)
        if not shared and not owner.endless(self.scheme, func, args, kwargs):
            return self._own(func, types, args, kwargs)
        writes = (row is not None and func in row.in_place) or getattr(func, "__name__", "") == "__setitem__"
        elsewhere = writes and not isinstance(args[0], StandIn)
        if func in dispatch.SECRETS or kwargs.get("out") is not None or elsewhere:
            return dispatch.call(func, types, args, kwargs)
        if row is not None and (row.name == "constant_like" or _publicly_finite(func, row.name, shared)):
            return dispatch.call(func, types, args, kwargs)
        refuse_dropped(func)
        if func in BEFORE:
            BEFORE[func](*args, **kwargs)
        versions = [s.twin._version for s in shared]
        meta = _on_twins(func, args, kwargs, row is None)
        changed = [s for s, version in zip(shared, versions, strict=True) if s.twin._version != version]
        mark = self._mark(row, args, kwargs)
        if changed:
            return self._written(func, args, kwargs, {id(s): s for s in changed}, mark)
        known = {id(s.twin): s for s in shared}
        leaves, spec = pytree.tree_flatten(meta)
        if not leaves and isinstance(meta, (list, tuple)):  # the rows of an empty batch
            return meta
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return dispatch.call(func, types, args, kwargs)
        if all(id(leaf) in known for leaf in leaves):  # torch gave its argument back: dropout in evaluation mode
            return pytree.tree_unflatten([known[id(leaf)] for leaf in leaves], spec)
        node = self._node(func, args, kwargs)
        result = self._results(node, meta, known)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, StandIn) and id(leaf.twin) not in known and leaf.dtype != torch.bool:
                leaf.infinite = mark
        return result

    def _mark(self, row: Any, args: tuple, kwargs: dict) -> Infinite | None:
        """What everybody knows of results that may hold what stands for infinity: that they may."""
        if row is None or row.name not in CARRIES:
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        met = any(infinite_of(x) is not None or beyond(self.scheme, x) is not None for x in leaves)
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

    def _written(self, func: Callable, args: tuple, kwargs: dict, changed: dict[int, StandIn], mark: Any) -> StandIn:
        """An operation in place: what later readers of the tensor read is a new value."""
        target: Any = args[0] if args else None
        storage = lambda s: s.twin.untyped_storage()._cdata
        if id(target) not in changed or any(storage(s) != storage(target) for s in changed.values()):
            raise NotCaptured(f"{spell(func)} changes a tensor that is not its first argument")
        others = self._of_its_memory(func, target)
        dtypes = {a.dtype for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        plain = functional_form(func) if len(dtypes) == 1 else None
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
            plain = func
        node = self._node(plain or OutOfPlace(func), args, kwargs)
        node.meta.update(shape=tuple(target.twin.shape), dtype=target.twin.dtype)
        target.node = node
        for other, theirs, mine in others:
            other.node = rewritten(other, target, tuple(other.twin.shape), theirs, mine, self._local)
            other.node.meta.update(shape=tuple(other.twin.shape), dtype=other.twin.dtype)
            other.infinite = other.infinite or mark
        target.infinite = mark
        return target

    def _of_its_memory(self, func: Callable, target: StandIn) -> list[tuple[StandIn, torch.Tensor, torch.Tensor]]:
        """The living tensors that a write into the target writes into as well, and which of its entries are which of
        theirs."""
        found = []
        for other in (r() for r in self._living):
            if other is None or other is target:
                continue
            try:
                both = overlap(other.twin, target.twin)
            except ValueError:
                both = ()
            if both == () or (both and (other.twin.dtype != target.twin.dtype or target.twin.is_complex())):
                raise UnsupportedOpError(
                    f"{spell(func)} would change a tensor that others are views of (or that is a view); "
                    f"write it out of place"
                )
            if both:
                found.append((other, *both))
        return found

    def _strided(self, line: StandIn, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> StandIn:
        """As `views.strided`."""
        node = self._node(torch.index_select, (line, 0, strided_places(line, shape, stride, offset)), {})
        with torch._C.DisableTorchFunction():
            twin = line.twin.as_strided(shape, stride, offset)
        return self._stand_in(twin, self._node(torch.reshape, (node, shape), {}))

    def _local(self, func: Callable, *args: Any) -> fx.Node:
        """A step that moves entries, of tensors and of nodes."""
        return self._node(func, args, {})

    def _own(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """An operation among A's own tensors."""
        target = args[0] if args else None
        if owner.in_place(func) and isinstance(target, PrivateTensor):
            if target.origin is not None:
                raise NotCaptured(f"{spell(func)} changes a weight's copy through a view")
            node = self._node(OutOfPlace(func), args, kwargs)
            result = dispatch.call(func, types, args, kwargs)
            self._private[id(target)] = node
            return result
        result = dispatch.call(func, types, args, kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, PrivateTensor)]
        if all(id(leaf) in self._private or id(leaf) in self._weights for leaf in leaves):
            return result  # what it derived before, or its argument
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
        self._living = [r for r in self._living if r() is not None]
        self._living.append(ref(made))
        return made

    def _node(self, func: Callable, args: tuple, kwargs: dict) -> fx.Node:
        swap = lambda leaf: self.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        args, kwargs = map_aggregate(args, swap), map_aggregate(kwargs, swap)
        node = self.graph.create_node("call_function", func, args, kwargs, name=name_of(func))
        node.meta = {"value": node.name, "where": Place.now(self.layers)}
        return node

    def node_of(self, x: torch.Tensor) -> fx.Node:
        """What gives a tensor's value: for a public one, the constant that it is now."""
        if isinstance(x, StandIn):
            return x.node
        if isinstance(x, PrivateTensor):
            node = self._private.get(id(x))
            if node is None:
                name = self._weights.get(id(x))
                if name is None:
                    raise NotCaptured("the module reads a tensor that an earlier call derived from its weights")
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
    """Whether everybody knows what `isnan` and its kin give: no secret is NaN, and few may stand for infinity."""
    if name != "isfinite":
        return False
    return getattr(func, "__name__", "") in ("isnan", "isreal") or all(x.infinite is None for x in shared)


def _paths(value: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    if isinstance(value, (list, tuple)):
        return [found for i, v in enumerate(value) for found in _paths(v, (*path, i))]
    return [(path, value)]


def _on_twins(func: Callable, args: tuple, kwargs: dict, unsupported: bool) -> Any:
    """torch's own result on the twins, whose memory is shared as torch shares it; errors as of the dispatch table."""
    called = func
    if func in CONVERSIONS:
        args, kwargs = on_cpu(args, kwargs)
        called = _T.to
    if func in MASKED_SELECT:
        return selected_on_meta(*args, **kwargs)
    number = lambda v: v.item() if func in MASKED_FILL and is_number(v) else v
    public_too = func not in READS_CONTENT
    args = first_positions(args) if func is _T.__getitem__ else args

    def swap(leaf: Any) -> Any:
        return leaf.twin if isinstance(leaf, StandIn) else to_meta(number(leaf), public_too)

    try:
        with torch.inference_mode(False):
            if not public_too and args and not isinstance(args[0], StandIn):  # only an index is read
                args = (to_meta(args[0], True), *args[1:])
            swapped, named = map_aggregate((args, kwargs), swap)
            return torch_on_meta(called, tuple(swapped), dict(named))
    except SectorchError:
        if unsupported:
            return dispatch.call(func, (), args, kwargs)  # raises, in the words of the table
        raise


@torch.inference_mode(False)
def capture(
    module: nn.Module, weights: dict[str, PrivateTensor], values: dict[str, torch.Tensor], inputs: Inputs
) -> tuple[Trace, bool]:
    """What a call of the module does with its weights and its inputs, and whether it left the module changed.

    Args:
        module: bound to a session in which nobody is present; it may be left changed where this raises.
        weights: its private tensors by name.
        values: what they stand for, in float64.
        inputs: of meta tensors: only their shapes and dtypes, and what is public, are used.

    Raises:
        NotCaptured: the recording would not be what another call does.
        SectorchError: what the forward asks for cannot be computed on secrets, with layer and line.
    """
    first = next(iter(weights.values()), None)
    session, scheme = (first.session, first.scheme) if first is not None else (Session(dry=True), Scheme())
    layers = {id(layer): name for name, layer in module.named_modules()}
    recorder, draws, before = Recorder(session, scheme, weights, layers), Drawing(), state_of(module)
    generator = torch.get_rng_state()
    given = recorder.inputs(inputs)
    with torch.no_grad(), compiling(module), layers_refusals(layers), draws, recorder:
        result = recorder.written.swapped(without_caches(inputs.called(module, given)))
    if draws.drawn:
        torch.set_rng_state(generator)
        raise NotCaptured("the module draws random numbers")
    refuse_results(result)
    changed = state_of(module) != before
    leaves, spec = flattened(result)
    recorder.graph.output([recorder.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    used = {n.target for n in recorder.graph.nodes if n.op == "get_attr"}
    kept = {name: value for name, value in {**values, **recorder.values}.items() if name in used}
    _drop_unread(recorder.graph)
    with torch._C.DisableTorchFunctionSubclass():
        dtypes = {name: weight.dtype for name, weight in weights.items()}
    return Trace(recorder.graph, kept, spec, inputs.rows, dtypes), changed


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
