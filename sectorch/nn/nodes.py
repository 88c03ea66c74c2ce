"""What a node of a graph computes: the table's name for it, and its arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..tensor.table import row_of

_ATEN_NORM = ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps")
ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "conv1d": ("input", "weight", "bias"),
    "conv2d": ("input", "weight", "bias"),
    "batch_norm": ("input", "mean", "var", "weight", "bias", "training", "momentum", "eps"),
    "avg_pool2d": (
        "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override",
    ),
    "dropout": ("input", "p", "training"),
}  # fmt: skip
_RENAMED = {"running_mean": "mean", "running_var": "var", "train": "training"}


def op_name(node: fx.Node) -> str | None:
    """The table's name for what a node computes, or None."""
    if node.op != "call_function":
        return None
    row = row_of(function_of(node.target))
    return row.name if row else None


def function_of(target: Any) -> Any:
    """The torch function of an exported graph's operation; anything else as it is."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    base = target._schema.name.rpartition("::")[2]
    found = (getattr(place, base, None) for place in (torch, F, torch.Tensor))
    return next((f for f in found if f is not None and row_of(f) is not None), target)


def arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, for the operations of `ARGUMENTS`."""
    name = op_name(node)
    names = ARGUMENTS[name or ""]
    if name == "batch_norm" and node.target is not F.batch_norm:
        names = _ATEN_NORM
    given = dict(zip(names, node.args, strict=False))
    return given | {_RENAMED.get(k, k): v for k, v in node.kwargs.items()}


def name_of(func: Callable) -> str:
    """A torch function's name for a node."""
    name = getattr(func, "__name__", "call")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "property")
    return name.strip("_") or "call"
