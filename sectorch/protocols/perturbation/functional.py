"""In-place operations of a traced graph made out of place, so that every node has one value for good."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...nn.symbolic import where
from .errors import NotPerturbableError

_FLAG_POSITION = {F.relu: 1, F.leaky_relu: 2, **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), 3)}
_FUNCTIONS = {operator.iadd: operator.add, operator.imul: operator.mul, torch.relu_: torch.relu}
_METHODS = {"relu_": "relu", "add_": "add"}
_VIEWS = {torch.flatten, torch.reshape, *(f for f in _FLAG_POSITION if "dropout" in f.__name__)}
_VIEW_METHODS = {"view", "reshape", "flatten", "contiguous"}


def functional(graph: fx.GraphModule) -> None:
    """Rewrite `graph`, a copy that nobody else holds: what reads a tensor after it was changed in place reads the new
    value by name.

    Raises:
        NotPerturbableError: a view is changed in place while the tensor behind it is still needed.
    """
    nodes = list(graph.graph.nodes)
    for place, node in enumerate(nodes):
        if not _make_plain(graph, node):
            continue
        later = set(nodes[place + 1 :])
        changed = node.args[0]
        changed.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
        while _is_view(graph, changed):
            changed = changed.args[0]
            if later.intersection(changed.users):
                raise NotPerturbableError(
                    f"{where(node, graph)} cannot be perturbed: it changes a view in place while the tensor behind it "
                    f"is still needed; use inplace=False"
                )
    graph.recompile()


def _make_plain(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` acted in place; it does not any more."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        if not getattr(module, "inplace", False):
            return False
        vars(module)["inplace"] = False
        return True
    if node.op == "call_method" and str(node.target) in _METHODS:
        node.target = _METHODS[str(node.target)]
        return True
    if node.op != "call_function":
        return False
    if node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]
        return True
    position = _FLAG_POSITION.get(node.target, len(node.args))
    flag = node.kwargs.get("inplace", node.args[position] if len(node.args) > position else False)
    if flag:
        node.args = node.args[:position]
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    return bool(flag)


def _is_view(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        kinds = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        return isinstance(graph.get_submodule(str(node.target)), kinds)
    return node.target in (_VIEW_METHODS if node.op == "call_method" else _VIEWS)
