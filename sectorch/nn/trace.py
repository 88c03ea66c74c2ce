"""Capture of a module's graph with torch.fx, and a plain loop that runs it with the model's line in every error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..errors import KeyAgreementError, MaterialError, NetworkError, SectorchError, TrainingModeError

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__)))


_TRACING = threading.Lock()
"""fx replaces methods of nn.Module while it traces: one at a time."""


class _Tracer(fx.Tracer):
    """fx's tracer; each node remembers the line of the model that made it. Other threads' modules run as ever."""

    def __init__(self):
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "forward":
            node.meta["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node


def refuse_training(model: nn.Module) -> None:
    """Raise `TrainingModeError`, naming layers, unless the module is in evaluation mode."""
    training = [name or type(model).__name__ for name, layer in model.named_modules() if layer.training]
    if training:
        shown = ", ".join(training[:3]) + (", ..." if len(training) > 3 else "")
        raise TrainingModeError(f"the model is in training mode ({shown}); call model.eval() first")


def trace(model: nn.Module) -> fx.GraphModule | None:
    """The graph of `model`, or None where its forward has control flow that fx cannot see through.

    Such a module still runs, operation by operation; only the graph passes are lost.
    """
    if isinstance(model, fx.GraphModule):
        return model
    try:
        with _TRACING:
            graph = _Tracer().trace(model)
    except Exception:
        return None
    return fx.GraphModule(model, graph)


def run(graph: fx.GraphModule, *inputs: Any, step: Callable | None = None) -> Any:
    """Run the graph; a value is dropped after its last use, and an error names the node and the model's line.

    Args:
        step: called as step(node, compute, args, kwargs) in place of compute(*args, **kwargs), for whoever watches.
    """
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    uses = {node: len(node.users) for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        try:
            if node.op == "placeholder":
                values[node] = next(given, *node.args)
            elif node.op == "get_attr":
                values[node] = attribute(graph, node.target)
            elif node.op == "output":
                return args[0]
            else:
                compute = computation(graph, node)
                values[node] = compute(*args, **kwargs) if step is None else step(node, compute, args, kwargs)
        except SectorchError as error:
            raise _located(error, node, graph) from error
        for used in node.all_input_nodes:
            uses[used] -= 1
            if not uses[used]:
                del values[used]
    return None


def computation(graph: fx.GraphModule, node: fx.Node) -> Callable:
    """What a call node calls."""
    if node.op == "call_module":
        return graph.get_submodule(node.target)
    if node.op == "call_function":
        return node.target
    return lambda x, *args, **kwargs: getattr(x, node.target)(*args, **kwargs)


def attribute(module: nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def where(node: fx.Node, graph: fx.GraphModule) -> str:
    """The layer's name and type and the line of the model, for people."""
    name = node.name
    if node.op == "call_module":
        name = f"'{node.target}' ({type(graph.get_submodule(node.target)).__name__})"
    source = node.meta.get("source")
    return f"layer {name}" + (f" at {source}" if source else "")


def _located(error: SectorchError, node: fx.Node, graph: fx.GraphModule) -> SectorchError:
    if getattr(error, "layer", None) or isinstance(error, (NetworkError, KeyAgreementError, MaterialError)):
        return error  # located already, or of no layer
    located = type(error)(f"{where(node, graph)}: {error}")
    located.layer = where(node, graph)
    return located
