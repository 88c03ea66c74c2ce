"""What torch.export recorded, as a module of torch functions: what `sectorch convert` describes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..errors import TrainingModeError
from .nodes import function_of

_TRAINS = {"dropout.default": 2, "feature_dropout.default": 2, "alpha_dropout.default": 2, "batch_norm.default": 5}
"""Where these operations say that they are in training mode."""


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    end = None if end is None or end >= 1 << 62 else end
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _size(x: torch.Tensor, dim: int) -> int:
    return x.size(dim)


def _same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _to(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return x if dtype is None else x.to(dtype)


def _index(x: torch.Tensor, indices: list) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


_SPECIAL: dict[str, Callable] = {
    "index": _index, "slice": _slice, "sym_size": _size, "_to_copy": _to, "alias": _same, "lift_fresh_copy": _same,
    "_assert_tensor_metadata": lambda *_, **__: None,
    "dropout_": torch.dropout,
    "hardswish_": F.hardswish, "hardsigmoid_": F.hardsigmoid, "silu_": F.silu, "mish_": F.mish, "relu6_": F.relu6,
    "upsample_nearest2d": lambda x, size=None, scale=None: F.interpolate(x, size, scale),
    "upsample_bilinear2d": lambda x, size=None, corners=False, scale=None: F.interpolate(
        x, size, scale, "bilinear", corners
    ),
    "max_pool2d": F.max_pool2d, "max_pool1d": F.max_pool1d, "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "embedding": torch.embedding,
}  # fmt: skip
"""ATen operations of which torch has no function of the same name and arguments."""


def taken(model: nn.Module | torch.export.ExportedProgram) -> nn.Module:
    """The module itself; of what torch.export made, one of torch functions. Raises TrainingModeError.

    What `ExportedProgram.module()` gives has no evaluation mode to be put into, by which it is known.
    """
    exported = isinstance(model, torch.export.ExportedProgram)
    return module_of(model) if exported or (isinstance(model, fx.GraphModule) and "eval" in vars(model)) else model


def module_of(exported: torch.export.ExportedProgram | nn.Module) -> fx.GraphModule:
    """An exported program, or what its `module()` gives, as a module of torch functions, which takes what that takes.

    The guards of an export, which check what torch assumed of its inputs, are left out: shapes are checked anew.

    Raises:
        TrainingModeError: it was exported in training mode.
    """
    made: Any = exported.module() if isinstance(exported, torch.export.ExportedProgram) else exported
    graph = copy.deepcopy(made.graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_module" and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _refuse_trained(node)
            base = node.target._schema.name.rpartition("::")[2]
            node.target = _SPECIAL.get(base) or function_of(node.target)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "layout", "pin_memory")}
    return fx.GraphModule(made, graph).eval()


def _refuse_trained(node: fx.Node) -> None:
    target: Any = node.target
    name = f"{target._schema.name.rpartition('::')[2]}.{target._overloadname}"
    place = _TRAINS.get(name)
    if place is not None and place < len(node.args) and node.args[place] is True:
        raise TrainingModeError(
            f"the model was exported in training mode ({name}); call model.eval() and export it anew"
        )
