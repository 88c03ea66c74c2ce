"""A description of another party's model, read: `load_program` checks every part of what `describe.py` wrote.

It makes a graph of ordinary torch functions, which reach the dispatch table. Nothing in a description is executed but
the operations of a closed list; weights never enter it.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..errors import ProgramError, SectorchError
from ..tensor.table import row_of
from . import bounds

MAX_NODES = 20_000
MAX_CONSTANT = 100_000
MAX_WEIGHT = 1 << 32
MAX_JSON = 4 << 20
"""Bytes of a description as it travels."""
VERSION = 1
MAX_LEAVES = 500_000
"""Arguments of all nodes together."""
_DTYPES = {str(d): d for d in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)}
WHOLE = {name: getattr(bounds, name) for name in ("add", "sub", "mul", "floordiv", "getitem")}


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    end = None if end is None or end >= 1 << 62 else end
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _size(x: torch.Tensor, dim: int) -> int:
    return x.size(dim)


def _to(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _index(x: torch.Tensor, indices: list) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


_SPECIAL: dict[str, Callable] = {
    "index": _index,
    "slice": _slice, "sym_size": _size, "_to_copy": _to, "alias": _to, "lift_fresh_copy": _to,
    "dropout_": torch.dropout,
    "hardswish_": F.hardswish, "hardsigmoid_": F.hardsigmoid, "silu_": F.silu, "mish_": F.mish, "relu6_": F.relu6,
    "upsample_nearest2d": lambda x, size=None, scale=None: F.interpolate(x, size, scale),
    "upsample_bilinear2d": lambda x, size=None, corners=False, scale=None: F.interpolate(
        x, size, scale, "bilinear", corners
    ),
    "max_pool2d": F.max_pool2d, "max_pool1d": F.max_pool1d, "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "embedding": torch.embedding,
}  # fmt: skip


def operation(name: str) -> Callable:
    """The torch function of an ATen name (`conv2d.default`) or of an operation on sizes (`size.mul`).

    Raises:
        ProgramError: outside the closed list.
    """
    base, _, overload = name.partition(".")
    if base == "size" and overload in WHOLE:
        return WHOLE[overload]
    if base in _SPECIAL:
        return _SPECIAL[base]
    for place in (torch, F, torch.Tensor):
        found = getattr(place, base, None)
        if found is not None and row_of(found) is not None:
            return found
    raise ProgramError(f"'{name}' is not in the list of operations; sectorch.supported_ops() lists them")


@dataclass(frozen=True)
class Program:
    """A description read back: its graph as a module, the shape of an input row, and the input's dtype."""

    module: fx.GraphModule
    row: tuple[int, ...]
    dtype: torch.dtype


def load_program(description: dict, weights: dict[str, torch.Tensor] | None = None) -> Program:
    """Check a description and build its graph, node by node; no code is run or traced.

    Args:
        description: from another party; checked here.
        weights: by name, where this process owns them; shapes without content otherwise.

    Raises:
        ProgramError: anything outside the closed lists, a reference to a later node, or sizes beyond the limits.
    """
    try:
        return _Reader(description, weights).program
    except SectorchError:
        raise
    except Exception as error:
        raise ProgramError(f"the model description is malformed ({type(error).__name__})") from None


class _Reader:
    def __init__(self, description: dict, weights: dict[str, torch.Tensor] | None):
        if description["version"] != VERSION:
            came = str(description["version"])[:40]
            raise ProgramError(f"a model description of version {came}, expected {VERSION}")
        nodes = description["nodes"]
        if not isinstance(nodes, list) or not 0 < len(nodes) <= MAX_NODES:
            raise ProgramError(f"a model description has 1 to {MAX_NODES} nodes")
        kinds = [node["op"] for node in nodes]
        if kinds.count("output") != 1 or kinds[-1] != "output" or kinds.count("input") != 1:
            raise ProgramError("a model description has one input, and ends with its one output")
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._weights = weights
        self._names: dict[str, str] = {}
        self._nodes: list[fx.Node] = []
        self._leaves = 0
        row, dtype = tuple(bounds.shape(description["row"], bounds.MAX_ELEMENTS)), _DTYPES[description["dtype"]]
        for node in nodes:
            self._nodes.append(self._node(node))
        module = fx.GraphModule(self._root, self._graph).eval()
        self.program = Program(module, row, dtype)

    def _node(self, node: dict) -> fx.Node:
        kind, graph = node["op"], self._graph
        if kind == "input":
            return graph.placeholder("x")
        if kind == "weight":
            return graph.get_attr(self._weight(node))
        if kind == "constant":
            shape, data = bounds.shape(node["shape"], MAX_CONSTANT), node["data"]
            if type(data) is not list or len(data) != math.prod(shape):
                raise ProgramError(f"a public constant of shape {shape} does not have its entries")
            if not all(type(v) in (bool, int, float) for v in data):
                raise ProgramError("a public constant holds what is no number")
            name = f"constant_{len(self._nodes)}"
            constant = torch.tensor(data, dtype=_DTYPES[node["dtype"]]).reshape(shape)
            self._root.register_buffer(name, constant)
            return graph.get_attr(name)
        if kind == "call":
            args = tuple(self._argument(node["args"]))
            kwargs = {_keyword(k): self._argument(v) for k, v in node["kwargs"].items()}
            return graph.call_function(operation(bounds.scalar(node["name"])), args, kwargs)
        if kind == "output":
            return graph.output(self._argument(node["value"]))
        raise ProgramError(f"a model description holds a node of kind {str(kind)[:40]!r}")

    def _weight(self, node: dict) -> str:
        name, shape, dtype = str(node["name"]), bounds.shape(node["shape"], MAX_WEIGHT), _DTYPES[node["dtype"]]
        attribute = self._names.setdefault(name, f"weight_{len(self._names)}")
        value = torch.empty(shape, dtype=dtype, device="meta") if self._weights is None else self._weights[name]
        if list(value.shape) != shape:
            raise ProgramError(
                f"weight '{name[:80]}' has shape {tuple(value.shape)}, the description says {tuple(shape)}"
            )
        if value.dtype != dtype or not dtype.is_floating_point:
            raise ProgramError(f"weight '{name[:80]}' is of {value.dtype}, the description says {dtype}")
        if not hasattr(self._root, attribute):
            self._root.register_parameter(attribute, nn.Parameter(value, requires_grad=False))
        return attribute

    def _argument(self, value: Any, depth: int = 0) -> Any:
        """A written argument, with references to nodes that stand before."""
        self._leaves += 1
        if depth > bounds.MAX_DEPTH or self._leaves > MAX_LEAVES:
            raise ProgramError("a model description holds too many arguments, or lists in lists in lists")
        if isinstance(value, list):
            if len(value) > bounds.MAX_ITEMS:
                raise ProgramError(f"a model description holds a list of {len(value)}; at most {bounds.MAX_ITEMS}")
            return [self._argument(v, depth + 1) for v in value]
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            if kind == "ref" and type(content) is int and 0 <= content < len(self._nodes):
                return self._nodes[content]
            if kind == "float" and content in ("inf", "-inf", "nan"):
                return float(content)
            if kind == "dtype":
                return _DTYPES[content]
            raise ProgramError("a model description refers to what is not there")
        return bounds.scalar(value)


def _keyword(name: Any) -> str:
    """An argument's name. torch.fx writes it into generated Python source, so nothing else may pass."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]{0,40}", name) or keyword.iskeyword(name):
        raise ProgramError("a model description holds an argument of an impossible name")
    return name


def from_json(data: bytes) -> dict:
    """Bytes as a description; `load_program` checks the content.

    Raises:
        ProgramError: not JSON, not an object, or more than `MAX_JSON` bytes.
    """
    if len(data) > MAX_JSON:
        raise ProgramError(f"a model description of {len(data)} bytes; at most {MAX_JSON} are read")
    try:
        description = json.loads(data)
    except (ValueError, RecursionError):
        raise ProgramError("the model description is not JSON") from None
    if not isinstance(description, dict):
        raise ProgramError("the model description is not an object")
    return description
