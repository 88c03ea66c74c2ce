"""A description of another party's model, read: `load_program` checks every part of what `describe.py` wrote.

It makes the same programs that `secure` makes of a module in one process: graphs of functions that are keys of the
dispatch table, on values. Nothing in a description is executed but these; weights never enter it.
"""

from __future__ import annotations

import base64
import binascii
import json
import keyword
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import ProgramError, SectorchError
from ..tensor import Scheme
from ..tensor.table import IN_PLACE, ROW_OF, spell
from . import bounds
from .choice import Texts
from .forms import DTYPES, PUBLIC_DTYPES, Reader
from .held import Held
from .inputs import Inputs, Public
from .nodes import name_of
from .served import Rows, Served, ServedCall, Weight
from .trace import CONSTANT, OutOfPlace, Trace

VERSION = 2
FORMAT_VERSION = 3
"""Of a description with a number format, which earlier releases would pass over."""
MAX_NODES = 20_000
"""Operations of all programs together, and weights, and constants."""
MAX_PROGRAMS, MAX_INPUTS = 64, 256
MAX_CONSTANT = 1 << 20
MAX_WEIGHT = 1 << 32
MAX_JSON = 4 << 20
"""Bytes of a description as it travels."""
MAX_LEAVES = 500_000
"""Values in all arguments together."""
ITEM, OUT_OF_PLACE = "item", "out of place "
"""How a description calls one of several results, and a function that writes into its argument as one that does not."""
_FLOATING = {str(d): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_KEPT = {str(d): d for d in (torch.float32, torch.float64)}


def operations() -> dict[str, Callable]:
    """The closed list by name: the functions of the dispatch table, and `item`.

    Those that write into an argument stand in it as functions that give what they would have written.
    """
    named: dict[str, Callable] = {ITEM: bounds.item}
    for key in ROW_OF:
        name = spell(key)
        if key in IN_PLACE or name == "Tensor.__setitem__":
            named[OUT_OF_PLACE + name] = OutOfPlace(key)
        else:
            named[name] = key
    return named


def operation(name: Any, listed: dict[str, Callable]) -> Callable:
    """The function of a name.

    Raises:
        ProgramError: outside the closed list.
    """
    if not isinstance(name, str) or name not in listed:
        raise ProgramError(f"'{str(name)[:80]}' is not in the list of operations; sectorch.supported_ops() lists them")
    return listed[name]


def load_program(description: dict, weights: dict[str, torch.Tensor] | None = None) -> Served:
    """Check a description and build its programs, node by node; no code is run or traced.

    Args:
        description: from another party; checked here.
        weights: by name, where this process owns them; shapes without content otherwise.

    Raises:
        ProgramError: anything outside the closed lists, a reference to a later node, or sizes beyond the limits.
    """
    try:
        return _Loader(description, weights).served
    except ProgramError:
        raise
    except SectorchError as error:
        raise ProgramError(f"the model description is malformed: {error}") from None
    except Exception as error:
        raise ProgramError(f"the model description is malformed ({type(error).__name__})") from None


class _Loader:
    def __init__(self, description: dict, weights: dict[str, torch.Tensor] | None):
        _check_version(description["version"], FORMAT_VERSION if "format" in description else VERSION)
        self._listed, self._reader = operations(), Reader(MAX_LEAVES)
        self._left = MAX_NODES
        self._weights = [_weight(entry) for entry in _list(description["weights"], "weights", MAX_NODES)]
        if len({weight.name for weight in self._weights}) < len(self._weights):
            raise ProgramError("a model description has two weights of one name")
        values = {weight.name: _value(weight, weights) for weight in self._weights}
        self._constants = [_constant(entry) for entry in _list(description["constants"], "constants", MAX_NODES)]
        programs = _list(description["programs"], "programs", MAX_PROGRAMS)
        calls = [self._call(entry, values) for entry in programs]
        if not calls or len({call.inputs.key for call in calls}) < len(calls):
            raise ProgramError("a model description has no program, or two for one call")
        texts = description["texts"]
        texts = None if texts is None else Texts.read(texts)
        form = _format(description.get("format"))
        self.served = Served(_FLOATING[description["dtype"]], self._weights, values, calls, texts, form)

    def _call(self, entry: dict, values: dict[str, torch.Tensor]) -> ServedCall:
        inputs = self._inputs(entry)
        least = entry["rows"]
        fixed = inputs.rows is None or inputs.in_shares
        if type(least) is not int or not 0 <= least <= bounds.MAX_ELEMENTS or (least and fixed):
            raise ProgramError("a program for any number of rows has inputs that have their rows in common")
        nodes = _list(entry["nodes"], "nodes", self._left)
        self._left -= len(nodes)
        graph = fx.Graph()
        places = _Places(graph, inputs.names, self._weights, self._constants, bool(least))
        for node in nodes:
            args, kwargs = self._reader.read(node["args"], places.of), node["kwargs"]
            if not isinstance(args, list) or not isinstance(kwargs, dict):
                raise ProgramError("an operation has a list of arguments, and others by name")
            named = {_keyword(key): self._reader.read(value, places.of) for key, value in kwargs.items()}
            function = operation(node["name"], self._listed)
            made = graph.create_node("call_function", function, tuple(args), named, name=name_of(function))
            if all(n.op == "get_attr" and str(n.target).startswith(CONSTANT) for n in made.all_input_nodes):
                raise ProgramError(f"a model description has '{node['name']}' computed of public values alone")
            places.made.append(made)
        result = self._reader.read(entry["result"], places.of)
        leaves, spec = pytree.tree_flatten(result)
        if any(isinstance(leaf, (Rows, slice)) for leaf in leaves):
            raise ProgramError("a model description has a result of no kind")
        graph.output(leaves)
        held = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        known = values | places.constants
        trace = Trace(graph, {name: known[name] for name in held}, spec, inputs.rows)
        return ServedCall(inputs, least, trace, places.grown)

    def _inputs(self, entry: dict) -> Inputs:
        """The call that a program is for, with tensors that have a shape only."""
        given = _list(entry["inputs"], "inputs", MAX_INPUTS)
        tensors = []
        for x in given:
            tensors.append(
                torch.empty(bounds.shape(x["shape"], bounds.MAX_ELEMENTS), dtype=DTYPES[x["dtype"]], device="meta")
            )

        marks = [Public(value) for value in self._constants]

        def ref(kind: str, number: int) -> Any:
            known = tensors if kind == "input" else marks if kind == "constant" else ()
            if number >= len(known):
                raise ProgramError("the call of a model description refers to what is not there")
            return known[number]

        args, kwargs = self._reader.read(entry["call"], ref)
        held, learned = {x["name"]: Held.read(x["held"]) for x in given if x["held"] is not None}, entry["learned"]
        if not (learned is None and not held) and (type(learned) is not int or not 0 <= learned <= bounds.MAX_ITEMS):
            raise ProgramError("a model description has a call on shares that does not say what is learned")
        inputs = Inputs(*args, **kwargs).holding(held, learned)
        if inputs.names != [x["name"] for x in given] or any(
            a is not b for a, b in zip(inputs.tensors, tensors, strict=True)
        ):
            raise ProgramError("the inputs of a model description are not those of its call")
        return inputs


def _format(entry: Any) -> tuple[int, int] | None:
    """Fraction bits and bits of the activation limit that the weights allow, where they are not the default ones."""
    if entry is None:
        return None
    if not isinstance(entry, list) or len(entry) != 2 or not all(type(bits) is int for bits in entry):
        raise ProgramError("a model description has a number format of no kind")
    Scheme(entry[0], limit_bits=entry[1])
    return entry[0], entry[1]


class _Places:
    """What the references in a program's nodes stand for."""

    def __init__(
        self, graph: fx.Graph, names: list[str], weights: list[Weight], constants: list[torch.Tensor], rows: bool
    ):
        self._graph, self._weights, self._constants, self._rows = graph, weights, constants, rows
        self._inputs = [graph.placeholder(name) for name in names]
        self._read: dict[tuple[str, int], fx.Node] = {}
        self.made: list[fx.Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.grown: dict[str, str] = {}

    def of(self, kind: str, number: int) -> Any:
        if kind == "node" and number < len(self.made):
            return self.made[number]
        if kind == "input" and number < len(self._inputs):
            return self._inputs[number]
        if kind == "rows" and self._rows and 0 < number < bounds.MAX_INTEGER:
            return Rows(number)
        if (kind, number) not in self._read:
            name = self._weight(number) if kind == "weight" else self._constant(kind, number)
            self._read[kind, number] = self._graph.create_node("get_attr", name, (), {})
        return self._read[kind, number]

    def _weight(self, number: int) -> str:
        if number >= len(self._weights):
            raise ProgramError("a model description refers to what is not there")
        return self._weights[number].name

    def _constant(self, kind: str, number: int) -> str:
        """A public constant; one that follows the number of rows is here as it is for a single row."""
        name = f"{CONSTANT}{kind} {number}"
        grown = self._rows and re.fullmatch(r"count|each \d", kind) is not None
        if grown and kind == "count" and 0 < number <= bounds.MAX_DIMS:
            self.constants[name] = torch.zeros([1] * number, dtype=torch.int64)
        elif (grown or kind == "constant") and kind != "count" and number < len(self._constants):
            self.constants[name] = self._constants[number]
        else:
            raise ProgramError("a model description refers to what is not there")
        if grown:
            dim = 0 if kind == "count" else int(kind[-1])
            if self.constants[name].shape[dim : dim + 1] != (1,):
                raise ProgramError("a public constant that is the same for each row is there for one row")
            self.grown[name] = kind
        return name


def _check_version(version: Any, expected: int) -> None:
    if version == 1 and type(version) is int:
        raise ProgramError("a model description of version 1, which this release does not read; save the model again")
    if version != expected or type(version) is not int:
        raise ProgramError(f"a model description of version {str(version)[:40]}, expected {expected}")


def _list(value: Any, what: str, most: int) -> list:
    if not isinstance(value, list) or len(value) > most:
        raise ProgramError(f"a model description has a list of at most {most} {what}")
    return value


def _weight(entry: dict) -> Weight:
    name, dtype, statistic = entry["name"], _KEPT[entry["dtype"]], entry["statistic"]
    if not isinstance(name, str) or not 0 < len(name) <= bounds.MAX_TEXT or name.startswith(CONSTANT):
        raise ProgramError(f"a weight has a name of up to {bounds.MAX_TEXT} letters, got {str(name)[:40]!r}")
    if type(statistic) is not bool:
        raise ProgramError("a model description does not say whether a weight is a statistic")
    passes = _FLOATING[entry["passes"]] if "passes" in entry else None
    return Weight(name, tuple(bounds.shape(entry["shape"], MAX_WEIGHT)), dtype, statistic, passes)


def _value(weight: Weight, weights: dict[str, torch.Tensor] | None) -> torch.Tensor:
    if weights is None:
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    value = weights[weight.name]
    if value.shape != weight.shape:
        raise ProgramError(
            f"weight '{weight.name[:80]}' has shape {tuple(value.shape)}, the description says {weight.shape}"
        )
    if value.dtype != weight.dtype:
        raise ProgramError(f"weight '{weight.name[:80]}' is of {value.dtype}, the description says {weight.dtype}")
    return value


def _constant(entry: dict) -> torch.Tensor:
    shape, dtype, data = bounds.shape(entry["shape"], MAX_CONSTANT), PUBLIC_DTYPES[entry["dtype"]], entry["data"]
    try:
        held = bytearray(base64.b64decode(data, validate=True))
    except (TypeError, ValueError, binascii.Error):
        raise ProgramError("a public constant is not written in base64") from None
    if len(held) != math.prod(shape) * dtype.itemsize:
        raise ProgramError(f"a public constant of shape {shape} does not have its entries")
    if dtype == torch.bool and held.strip(b"\0\1"):
        raise ProgramError("a public constant holds what is neither true nor false")
    return torch.frombuffer(held, dtype=dtype).reshape(shape) if held else torch.empty(shape, dtype=dtype)


def _keyword(name: Any) -> str:
    """An argument's name."""
    if not isinstance(name, str) or not re.fullmatch("_?[a-z][a-z0-9_]{0,40}", name) or keyword.iskeyword(name):
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
