"""Traces of graphs that torch.export recorded: what a model description holds."""

from __future__ import annotations

import re

import torch
from torch import fx

from ..tensor.table import IN_PLACE, row_of
from .nodes import function_of
from .passes import optimise
from .trace import Trace


def given_program(module: fx.GraphModule) -> Trace:
    """A graph of functions with its tensors as attributes as a program for any number of rows, after the passes.

    The guards of an export, which check what torch assumed of its inputs, are left out: shapes are checked by a dry
    run. Where the graph changes a tensor in place while a view of it is still read, it stays as it is: such a node is
    refused when it runs.
    """
    program = Trace(fx.Graph(), {})
    copies: dict[fx.Node, fx.Node] = {}
    program.graph.output(program.graph.graph_copy(module.graph, copies))
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_module" and not node.users:
            program.graph.erase_node(node)
    for old, new in copies.items():
        new.meta = {"value": new.name}
        made = old.meta.get("val")
        if isinstance(made, torch.Tensor):
            new.meta |= {"shape": tuple(made.shape), "dtype": made.dtype}
    for node in list(program.graph.nodes):
        if node.op == "get_attr" and isinstance(value := _attribute(module, node.target), torch.Tensor):
            program.values[node.target] = value.detach()
    return optimise(program) if _functional(program.graph) else program


def module_of(program: Trace, dtype: torch.dtype | None) -> fx.GraphModule:
    """A program as a module of torch's, its tensors as attributes, rounded to a dtype."""
    root, names = torch.nn.Module(), {}
    for name, value in program.values.items():
        names[name] = re.sub(r"\W+", "_", f"weight_{len(names)}_{name}")[:80]
        made = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        root.register_buffer(names[name], made)
    graph, copies = fx.Graph(), {}
    result = graph.graph_copy(program.graph, copies)
    graph.output(result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names[node.target]
    return fx.GraphModule(root, graph).eval()


def _attribute(module: torch.nn.Module, path: str) -> object:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _functional(graph: fx.Graph) -> bool:
    """Make what reads a tensor after a change in place read the changed one by name; False where a view is read too."""
    group: dict[fx.Node, int] = {}
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        row = row_of(function_of(node.target)) if node.op == "call_function" else None
        shares = row is None or row.view or row.name in ("dropout", "to", "contiguous")
        group[node] = group[source] if source is not None and shares and source in group else len(group)
        if node.op != "call_function" or not _writes(node.target) or source is None:
            continue
        later = set(nodes[place + 1 :])
        if any(
            n is not source and n.users.keys() & later for n in group if group[n] == group[source] and n is not node
        ):
            return False
        source.replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)
    return True


def _writes(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return target in IN_PLACE
