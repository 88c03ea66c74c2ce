"""What a module's forward did: a graph of functions on values, and the loop that runs it, with the lines in errors.

`nn/capture.py` records one by running the module, `nn/exported.py` takes one from torch.export, `nn/passes.py` changes
the work in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..errors import SectorchError
from ..ops.pooling import joins, relu_of_max_pool2d
from ..tensor.table import HANDLER, row_of
from .nodes import op_name
from .where import place_of, raise_located

CONSTANT, FOLDED = "constant ", "folded "
"""How the names of public constants and of weights that a pass made begin."""


@dataclass
class Trace:
    """A graph of torch functions on values, and the tensors that its `get_attr` nodes name.

    Attributes:
        graph: a placeholder for each secret input; call_function nodes; the output is the list of the result's leaves.
        values: plain weights in float64 (or without content where their owner is absent), and public constants.
        spec: how the result's leaves make the result; None where the output is the result itself.
        rows: the first dimension of the inputs, or None where they have none in common or the program holds for any.
        dtypes: what weights pass for, by name.

    A node's meta["value"] names the node of the program before its passes whose value it computes, or is None; its
    meta["where"] is the layer and the line.
    """

    graph: fx.Graph
    values: dict[str, torch.Tensor]
    spec: pytree.TreeSpec | None = None
    rows: int | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def copy(self) -> Trace:
        """Another program of the same nodes, which a pass may change."""
        graph, copies = fx.Graph(), {}
        out = graph.graph_copy(self.graph, copies)
        graph.output(out)
        for old, new in copies.items():
            new.name, new.meta = old.name, dict(old.meta)
        return Trace(graph, dict(self.values), self.spec, self.rows, dict(self.dtypes))

    @property
    def secrets(self) -> list[str]:
        """Names of the weights that the graph reads."""
        names = dict.fromkeys(n.target for n in self.graph.nodes if n.op == "get_attr")
        return [name for name in names if not name.startswith(CONSTANT) and self.values[name].is_floating_point()]


def run(program: Trace, values: Mapping[str, Any], inputs: Sequence[Any], step: Callable | None = None) -> Any:
    """Run a program; a value is dropped after its last use, and an error names the layer and the model's line.

    Args:
        values: what the program's names stand for here.
        inputs: the secret ones, in the order of the placeholders.
        step: called as step(node, compute, args, kwargs) in place of compute(*args, **kwargs), for whoever watches.
    """
    made: dict[fx.Node, Any] = {}
    nodes, pooled = list(program.graph.nodes), _pooled_before_relu(program)
    uses = {node: len(node.users) for node in nodes}
    given = iter(inputs)
    for node in nodes:
        args = map_arg(node.args, made.__getitem__)
        kwargs = map_arg(node.kwargs, made.__getitem__)
        try:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "get_attr":
                made[node] = values[node.target]
            elif node.op == "output":
                return args[0] if program.spec is None else pytree.tree_unflatten(list(args[0]), program.spec)
            elif node in pooled and joins(*args):
                made[node] = _Waiting(args, kwargs)
            else:
                compute = node.target
                if args and type(args[0]) is _Waiting:
                    compute, args, kwargs = relu_of_max_pool2d, args[0].args, args[0].kwargs
                made[node] = compute(*args, **kwargs) if step is None else step(node, compute, args, kwargs)
        except SectorchError as error:
            raise_located(error, place_of(node))
        for used in node.all_input_nodes:
            uses[used] -= 1
            if not uses[used]:
                del made[used]
    return None


@dataclass(frozen=True)
class _Waiting:
    """A max-pooling that is computed together with its ReLU."""

    args: tuple
    kwargs: dict


def _pooled_before_relu(program: Trace) -> set[fx.Node]:
    """The max-poolings that a ReLU reads, and nobody else."""
    found = set()
    for node in program.graph.nodes:
        pool = node.args[0] if op_name(node) == "relu" and node.args else None
        if isinstance(pool, fx.Node) and op_name(pool) == "max_pool2d" and len(pool.users) == 1:
            found.add(pool)
    return found


class OutOfPlace:
    """A torch function that writes into its first argument, as a function that gives what it would have written."""

    def __init__(self, func: Callable):
        self.func = func
        self.__name__ = getattr(func, "__name__", "in_place")

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = x.clone()
        self.func(x, *args, **kwargs)
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutOfPlace) and other.func == self.func

    def __hash__(self) -> int:
        return hash(("out of place", self.func))


@functools.cache
def functional_form(func: Callable) -> Callable | None:
    """The function of the same row and the same arguments that gives a new tensor, or None."""
    row, name = row_of(func), getattr(func, "__name__", "")
    plain = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    keys = [k for k in (row.keys if row else ()) if HANDLER[k] is HANDLER[func] and getattr(k, "__name__", "") == plain]
    return keys[0] if keys else None
