"""The layers of a module as torch.fx finds them without an input, for rewriting an architecture (`nn/fhe.py`).

torch.fx may miss branches on optional arguments, hooks and changes in place (its limitations of symbolic tracing), so
`secure` does not use it: `nn/capture.py` records what a module computes by running it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", __file__)
_TRACING = threading.Lock()
"""fx replaces methods of nn.Module while it traces: one at a time."""


class Tracer(fx.Tracer):
    """fx's tracer with the line of the model in each node. Modules of other threads run as usual meanwhile."""

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


def symbolic_trace(model: nn.Module, tracer: type[Tracer] = Tracer) -> fx.GraphModule | None:
    """The graph of `model`, or None where its forward has control flow that fx cannot see through."""
    if isinstance(model, fx.GraphModule):
        return model
    try:
        with _TRACING:
            graph = tracer().trace(model)
    except Exception:
        return None
    return fx.GraphModule(model, graph)


def computation(graph: fx.GraphModule, node: fx.Node) -> Callable:
    """The function or module that a node calls."""
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))
    if node.op == "call_function":
        function: Any = node.target
        return function
    return lambda x, *args, **kwargs: getattr(x, str(node.target))(*args, **kwargs)


def layer_location(node: fx.Node, graph: fx.GraphModule) -> str:
    """The layer's name and type and the line of the model, for people."""
    name = node.name
    if node.op == "call_module":
        name = f"'{node.target}' ({type(graph.get_submodule(str(node.target))).__name__})"
    source = node.meta.get("source")
    return f"layer {name}" + (f" at {source}" if source else "")


@contextmanager
def calls_of(layer: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collect (first input, output) of each call of `layer` in this thread, while the context lasts.

    Calls in other threads are ignored, including those that a module starts itself.
    """
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    thread = threading.get_ident()

    def remember(_layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if threading.get_ident() == thread:
            seen.append((inputs[0], output))

    hook = layer.register_forward_hook(remember)
    try:
        yield seen
    finally:
        hook.remove()
