"""A model's architecture as data: what S and Q receive instead of A's code.

`describe` exports a module with torch.export and writes its graph as JSON: nodes from a closed list of ATen operations
with their public arguments, and the names, shapes and dtypes of the weights. `load_program` reads it back, checks
every part, and makes a graph of ordinary torch functions, which reach the dispatch table. Nothing in a description
is executed but the operations of that list; weights never enter it.
"""

from __future__ import annotations

import copy
import json
import keyword
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..errors import ProgramError, SectorchError, TrainingModeError
from ..tensor.table import row_of
from . import bounds
from .accept import refuse_training
from .check import alike, original, sample
from .exported import given_program, module_of

MAX_NODES = 20_000
MAX_CONSTANT = 100_000
MAX_WEIGHT = 1 << 32
MAX_JSON = 4 << 20
"""Bytes of a description as it travels."""
VERSION = 1
MAX_LEAVES = 500_000
"""Arguments of all nodes together."""
_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {str(d): d for d in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)}
_WHOLE = {name: getattr(bounds, name) for name in ("add", "sub", "mul", "floordiv", "getitem")}
_EXPORTED = {getattr(operator, name): name for name in _WHOLE}


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
    if base == "size" and overload in _WHOLE:
        return _WHOLE[overload]
    if base in _SPECIAL:
        return _SPECIAL[base]
    for place in (torch, F, torch.Tensor):
        found = getattr(place, base, None)
        if found is not None and row_of(found) is not None:
            return found
    raise ProgramError(f"'{name}' is not in the list of operations; sectorch.supported_ops() lists them")


def describe(model: nn.Module, x: torch.Tensor) -> tuple[dict, dict[str, torch.Tensor]]:
    """The public description of a module, and its weights by name.

    Args:
        model: in evaluation mode; graph passes are applied to what torch.export records of it.
        x: an example batch of at least two rows; the description holds for any number of rows where torch.export finds
            that it does, and else for this shape.

    What the description reveals: operations, their order and public arguments, and every weight's shape.

    Raises:
        ProgramError: torch.export cannot export the module, or it uses an operation outside the list.
    """
    exported = optimised_export(model, x)
    module = exported.module()
    return describe_exported(module.graph, module, x)


def optimised_export(model: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    """`torch.export.export` of the module after the graph passes, with any number of rows where that is possible.

    An export keeps the inputs that it was made with, and they go where its file goes: of `x` only the shape and the
    dtype enter, and zeros are kept.

    Raises:
        ProgramError: torch.export cannot export the module, or the export does not compute what the module computes.
        TrainingModeError: it is in training mode.
    """
    refuse_training(model)
    x = torch.zeros_like(x)
    plain = copy.deepcopy(model).requires_grad_(False)
    dtypes = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    exported = _exported(plain, x)
    if dtype is None:
        return exported
    module = exported.module()
    program = given_program(module.double())  # folded as `secure` folds, and rounded once
    optimised = module_of(program, dtype)
    _check_values(model, optimised, x)
    return _exported(optimised, x)


def _exported(module: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    try:
        try:
            return torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
        except Exception:
            return torch.export.export(module, (x,), strict=False)
    except Exception as error:
        raise ProgramError(f"torch.export cannot export this module: {str(error).splitlines()[0]}") from None


def _check_values(model: nn.Module, exported: nn.Module, x: torch.Tensor) -> None:
    """Raise unless an export computes on random numbers what its module computes.

    Raises:
        ProgramError: it does not.
    """
    given = sample(x)
    try:
        expected = original(copy.deepcopy(model).double(), given)
    except Exception:
        return  # it cannot be run in float64
    if not alike(original(copy.deepcopy(exported).double(), given), expected):
        raise ProgramError(
            "what torch.export made of this module does not compute what the module computes, so it cannot be served; "
            "please report this"
        )


def describe_exported(graph: fx.Graph, module: nn.Module, x: torch.Tensor) -> tuple[dict, dict[str, torch.Tensor]]:
    """The description of an exported graph with its parameters as attributes of `module`.

    Raises:
        ProgramError: an operation outside the list. TrainingModeError: it was exported in training mode.
    """
    nodes: list[dict] = []
    number: dict[fx.Node, int] = {}
    weights: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        made: dict[str, Any]
        if node.op == "placeholder":
            made = {"op": "input"}
        elif node.op == "get_attr":
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            made = _attribute(str(node.target), value, weights)
        elif node.op == "call_function":
            name = _aten_name(node.target)
            operation(name)
            _refuse_trained(name, node.args)
            made = {
                "op": "call",
                "name": name,
                "args": [_written(a, number) for a in node.args],
                "kwargs": {k: _written(v, number) for k, v in node.kwargs.items() if k not in ("device", "layout")},
            }
        elif node.op == "output":
            result = node.args[0]
            result = result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
            made = {"op": "output", "value": _written(result, number)}
        else:
            continue  # the export's own guards; the shapes are checked by a dry run
        number[node] = len(nodes)
        nodes.append(made)
    row = list(x.shape[1:])
    return {"version": VERSION, "row": row, "dtype": str(x.dtype), "nodes": nodes}, weights


_TRAINS = {"dropout.default": 2, "feature_dropout.default": 2, "alpha_dropout.default": 2, "batch_norm.default": 5}
"""Where these operations say that they are in training mode."""


def _refuse_trained(name: str, args: tuple) -> None:
    place = _TRAINS.get(name)
    if place is not None and place < len(args) and args[place] is True:
        raise TrainingModeError(
            f"the model was exported in training mode ({name}); call model.eval() and export it anew"
        )


def _attribute(name: str, value: torch.Tensor, weights: dict[str, torch.Tensor]) -> dict:
    if value.is_floating_point():
        weights[name] = value.detach()
        return {"op": "weight", "name": name, "shape": list(value.shape), "dtype": str(value.dtype)}
    return {"op": "constant", "shape": list(value.shape), "dtype": str(value.dtype), "data": value.flatten().tolist()}


def _aten_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return f"{target._schema.name.split('::')[1]}.{target._overloadname}"
    if target in _EXPORTED:
        return f"size.{_EXPORTED[target]}"
    raise ProgramError(f"{target} is not in the list of operations")


def _written(value: Any, number: dict[fx.Node, int]) -> Any:
    """An argument as JSON: a reference, a list, or a scalar."""
    if isinstance(value, fx.Node):
        return {"ref": number[value]}
    if isinstance(value, (list, tuple)):
        return [_written(v, number) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    raise ProgramError(f"an argument of type {type(value).__name__} cannot be described")


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


def to_json(description: dict) -> bytes:
    """A description as it travels."""
    return json.dumps(description, separators=(",", ":")).encode()


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
