"""A model's architecture as data: what S and Q receive instead of A's code.

`describe` records what a module does with the inputs that it is shown, as `secure` does, and writes the program as
JSON: operations by the names of the dispatch table's functions with their public arguments, the form of the call and of
the result, and the names, shapes and dtypes of the weights. `load_program` reads it back and checks every part.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..choreography.run.frames import raw
from ..errors import ArgumentError, DtypeError, ProgramError, SectorchError, ShapeError
from ..nn import bounds
from ..nn.graph import CONSTANT, FOLDED, OutOfPlace, Trace, name_of, row_growth, same_program
from ..nn.graph_cache import FEW, Float64Mode
from ..nn.inputs import Inputs, Public, Secret, SharedInputSpec
from ..nn.module import SecureModule, module_or_exported
from ..nn.remote_program import RemoteCall, RemoteProgram, RowCount, TextSettings, WeightSpec
from ..nn.weights import device_of, dtype_of, is_normalising, refuse_training
from ..session import Session
from ..tensor import Scheme, SecretTensor
from ..tensor.table import IN_PLACE, ROW_OF, spell

# Values of a model description as JSON: the arguments of operations, the form of a call, the form of a result.
#
# One closed grammar for all three. A value is a number, a text, None or a list as JSON has them, or an object with one
# entry: {"tuple": [...]}, {"dict": [[key, value], ...]}, {"slice": [start, stop, step]}, {"float": "inf"},
# {"dtype": "torch.int64"}, ..., or a reference such as {"node": 3}, which whoever reads or writes gives its meaning.


DTYPES = {
    str(d): d
    for d in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
PUBLIC_DTYPES = DTYPES | {str(d): d for d in (torch.complex64, torch.complex128)}
"""Of public tensors; no weight and no input is complex."""
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": PUBLIC_DTYPES,
    "float": {name: float(name) for name in ("inf", "-inf", "nan")},
    "device": {"cpu": torch.device("cpu")},
    "layout": {str(torch.strided): torch.strided},
    "memory_format": {
        str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
    },
    "ellipsis": {"...": ...},
}
_KINDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_SCALARS = (bool, int, float, str, type(None))
PLAIN = object()
"""What stands for a value that is no reference."""


def write_value(value: Any, other: Any, ref: Callable[[Any, Any], Any]) -> Any:
    """A value as JSON.

    Args:
        other: the same place of the same program for another number of rows.
        ref: gives what stands for a value that is a reference, or for two numbers that differ; `PLAIN` for others.

    Raises:
        ProgramError: a value of a kind that the grammar lacks.
    """
    found = ref(value, other)
    if found is not PLAIN:
        return found
    within = lambda values, others: [write_value(v, o, ref) for v, o in zip(values, others, strict=True)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ProgramError("a dictionary whose keys are no texts cannot be described")
        return {"dict": [[key, write_value(v, other[key], ref)] for key, v in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"dict": [[name, write_value(getattr(value, name), getattr(other, name), ref)] for name in names]}
    if isinstance(value, tuple):
        return {"tuple": within(value, other)}
    if isinstance(value, list):
        return within(value, other)
    if isinstance(value, slice):
        parts = lambda s: (s.start, s.stop, s.step)
        return {"slice": within(parts(value), parts(other))}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is ...:
        return {"ellipsis": "..."}
    if isinstance(value, torch.device):  # a description says nothing of the machines that the parties compute on
        return {"device": "cpu"}
    kind = _KINDS.get(type(value))
    if kind is not None and str(value) in _NAMED[kind]:
        return {kind: str(value)}
    if type(value) in _SCALARS:
        return value
    raise ProgramError(f"a value of type {type(value).__name__} cannot be described")


class Reader:
    """Reads values, and counts what it reads.

    Args:
        most: values of all that it reads together.
    """

    def __init__(self, most: int):
        self._most, self._read = most, 0

    def read(self, value: Any, ref: Callable[[str, int], Any], depth: int = 0) -> Any:
        """A written value.

        Args:
            ref: what a reference stands for, of its kind and its number.

        Raises:
            ProgramError: it is none, or too deep, too long or too much.
        """
        self._read += 1
        if depth > bounds.MAX_DEPTH or self._read > self._most:
            raise ProgramError("a model description holds too many arguments, or lists in lists in lists")
        if isinstance(value, list):
            return self._list(value, ref, depth)
        if not isinstance(value, dict):
            return bounds.scalar(value)
        if len(value) != 1:
            raise ProgramError("a model description holds a value of no kind")
        ((kind, content),) = value.items()
        if kind == "tuple":
            return tuple(self._list(content, ref, depth))
        if kind == "dict":
            return self._dict(content, ref, depth)
        if kind == "slice":
            parts = self._list(content, ref, depth)
            if len(parts) != 3:
                raise ProgramError("a slice has a start, a stop and a step")
            return slice(*parts)
        if kind in _NAMED:
            if not isinstance(content, str) or content not in _NAMED[kind]:
                raise ProgramError(f"a model description holds a {kind} that is not in its list")
            return _NAMED[kind][content]
        if type(content) is not int or content < 0:
            raise ProgramError("a model description refers to what is not there")
        return ref(kind, content)

    def _list(self, values: Any, ref: Callable, depth: int) -> list:
        if not isinstance(values, list) or len(values) > bounds.MAX_ITEMS:
            raise ProgramError(f"a model description holds what is no list of at most {bounds.MAX_ITEMS}")
        return [self.read(v, ref, depth + 1) for v in values]

    def _dict(self, pairs: Any, ref: Callable, depth: int) -> dict[str, Any]:
        if not isinstance(pairs, list) or len(pairs) > bounds.MAX_ITEMS:
            raise ProgramError(f"a model description holds what is no dictionary of at most {bounds.MAX_ITEMS}")
        made: dict[str, Any] = {}
        for key, value in pairs:
            if not isinstance(key, str) or len(key) > bounds.MAX_TEXT or key in made:
                raise ProgramError("a dictionary in a model description has keys that are no texts, or has one twice")
            made[key] = self.read(value, ref, depth + 1)
        return made


# Reading the description of another party's model.
#
# It makes the same programs that `secure` makes of a module in one process: graphs of functions that are keys of the
# dispatch table, on values. Nothing in a description is executed but these; weights never enter it.


VERSION = 2
FORMAT_VERSION = 3
"""Of a description with a number format, which earlier releases would pass over."""
MAX_NODES = 20_000
"""Operations of all programs together, and weights, and constants."""
MAX_PROGRAMS, MAX_INPUTS = 64, 256
MAX_CONSTANT = 1 << 20
MORE_ROWS = (4, 7, 65, 840)
"""Rows for which a forward is recorded, beside few, before its program is taken for any number: odd and even, and
multiples of small numbers and others. A forward that decides by a number of rows above the last is not seen to."""
MAX_RECORDED = 1 << 24
"""Elements of a public constant in such a recording."""
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


def load_program(description: dict, weights: dict[str, torch.Tensor] | None = None) -> RemoteProgram:
    """Check a description and build its programs, node by node; no code is run or traced.

    Args:
        description: from another party; checked here.
        weights: by name, where this process owns them; shapes without content otherwise.

    Raises:
        ProgramError: anything outside the closed lists, a reference to a later node, or sizes beyond the limits.
    """
    try:
        return _Loader(_parsed(description), weights).served
    except ProgramError:
        raise
    except SectorchError as error:
        raise ProgramError(f"the model description is malformed: {error}") from None
    except msgspec.ValidationError as error:
        raise ProgramError(f"the model description is malformed: {ascii(str(error))[1:161]}") from None
    except Exception as error:
        raise ProgramError(f"the model description is malformed ({type(error).__name__})") from None


# A description as declared types. References and arguments in it are values of the grammar above.


class WeightEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight: `dtype` is that in which it is kept, and `passes` the one that it has for torch, where it differs from
    the model's. `statistic`: whether it belongs to a layer that normalises."""

    name: Annotated[str, Meta(min_length=1, max_length=bounds.MAX_TEXT, pattern=rf"\A(?!{re.escape(CONSTANT)})")]
    shape: list[int]
    dtype: str
    statistic: bool
    passes: str | None = None


class ConstantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public tensor of the program; its entries in base64."""

    shape: list[int]
    dtype: str
    data: str


class InputEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret tensor of a call; `held` is what is known of one in shares (`SharedInputSpec`)."""

    name: str
    shape: list[int]
    dtype: str
    held: tuple[int, float | None, int] | None


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation by its name in `operations`, and its arguments."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


class ProgramEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program: the call that it is for, and the least number of rows for which it holds; 0 if it holds for these
    shapes only. `learned`: how many results Q learns of a call on shares."""

    inputs: Annotated[list[InputEntry], Meta(max_length=MAX_INPUTS)]
    call: Any
    learned: Annotated[int, Meta(ge=0, le=bounds.MAX_ITEMS)] | None
    rows: Annotated[int, Meta(ge=0, le=bounds.MAX_ELEMENTS)]
    nodes: list[NodeEntry]
    result: Any


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's description; `format` has the fraction bits and the bits of the activation limit, where the weights do
    not allow the default ones."""

    version: int
    dtype: str
    weights: Annotated[list[WeightEntry], Meta(max_length=MAX_NODES)]
    constants: Annotated[list[ConstantEntry], Meta(max_length=MAX_NODES)]
    programs: Annotated[list[ProgramEntry], Meta(min_length=1, max_length=MAX_PROGRAMS)]
    texts: Any
    format: tuple[int, int] | None = None


def _parsed(description: dict) -> Description:
    version, expected = description["version"], FORMAT_VERSION if "format" in description else VERSION
    if version == 1 and type(version) is int:
        raise ProgramError("a model description of version 1, which this release does not read; save the model again")
    if version != expected or type(version) is not int:
        raise ProgramError(f"a model description of version {str(version)[:40]}, expected {expected}")
    return msgspec.convert(description, Description)


class _Loader:
    def __init__(self, description: Description, weights: dict[str, torch.Tensor] | None):
        self._listed, self._reader = operations(), Reader(MAX_LEAVES)
        self._left = MAX_NODES
        self._weights = [_weight(entry) for entry in description.weights]
        if len({weight.name for weight in self._weights}) < len(self._weights):
            raise ProgramError("a model description has two weights of one name")
        values = {weight.name: _value(weight, weights) for weight in self._weights}
        self._constants = [_constant(entry) for entry in description.constants]
        calls = [self._call(entry, values) for entry in description.programs]
        if len({call.inputs.key for call in calls}) < len(calls):
            raise ProgramError("a model description has two programs for one call")
        texts, form = description.texts, description.format
        texts = None if texts is None else TextSettings.from_description(texts)
        if form is not None:
            Scheme(form[0], limit_bits=form[1])
        self.served = RemoteProgram(_FLOATING[description.dtype], self._weights, values, calls, texts, form)

    def _call(self, entry: ProgramEntry, values: dict[str, torch.Tensor]) -> RemoteCall:
        inputs, least = self._inputs(entry), entry.rows
        if least and (inputs.rows is None or inputs.in_shares):
            raise ProgramError("a program for any number of rows has inputs that have their rows in common")
        self._left -= len(entry.nodes)
        if self._left < 0:
            raise ProgramError(f"a model description has programs of at most {MAX_NODES} nodes together")
        graph = fx.Graph()
        places = _Places(graph, inputs.names, self._weights, self._constants, bool(least))
        for node in entry.nodes:
            args = self._reader.read(node.args, places.of)
            named = {_keyword(key): self._reader.read(value, places.of) for key, value in node.kwargs.items()}
            function = operation(node.name, self._listed)
            made = graph.create_node("call_function", function, tuple(args), named, name=name_of(function))
            if all(n.op == "get_attr" and str(n.target).startswith(CONSTANT) for n in made.all_input_nodes):
                raise ProgramError(f"a model description has '{node.name}' computed of public values alone")
            places.made.append(made)
        result = self._reader.read(entry.result, places.of)
        leaves, spec = pytree.tree_flatten(result)
        if any(isinstance(leaf, (RowCount, slice)) for leaf in leaves):
            raise ProgramError("a model description has a result of no kind")
        graph.output(leaves)
        held = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        known = values | places.constants
        trace = Trace(graph, {name: known[name] for name in held}, spec, inputs.rows)
        return RemoteCall(inputs, least, trace, places.grown)

    def _inputs(self, entry: ProgramEntry) -> Inputs:
        """The call that a program is for, with tensors that have a shape only."""
        shapes = [(bounds.shape(x.shape, bounds.MAX_ELEMENTS), DTYPES[x.dtype]) for x in entry.inputs]
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        marks = [Public(value) for value in self._constants]

        def ref(kind: str, number: int) -> Any:
            known = tensors if kind == "input" else marks if kind == "constant" else ()
            if number >= len(known):
                raise ProgramError("the call of a model description refers to what is not there")
            return known[number]

        args, kwargs = self._reader.read(entry.call, ref)
        held = {x.name: SharedInputSpec.from_description(*x.held) for x in entry.inputs if x.held is not None}
        if held and entry.learned is None:
            raise ProgramError("a model description has a call on shares that does not say what is learned")
        inputs = Inputs(*args, **kwargs).with_shared_inputs(held, entry.learned)
        if inputs.names != [x.name for x in entry.inputs] or any(
            a is not b for a, b in zip(inputs.tensors, tensors, strict=True)
        ):
            raise ProgramError("the inputs of a model description are not those of its call")
        return inputs


class _Places:
    """What the references in a program's nodes stand for."""

    def __init__(
        self, graph: fx.Graph, names: list[str], weights: list[WeightSpec], constants: list[torch.Tensor], rows: bool
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
            return RowCount(number)
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


def _weight(entry: WeightEntry) -> WeightSpec:
    passes = None if entry.passes is None else _FLOATING[entry.passes]
    return WeightSpec(
        entry.name, tuple(bounds.shape(entry.shape, MAX_WEIGHT)), _KEPT[entry.dtype], entry.statistic, passes
    )


def _value(weight: WeightSpec, weights: dict[str, torch.Tensor] | None) -> torch.Tensor:
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


def _constant(entry: ConstantEntry) -> torch.Tensor:
    shape, dtype = bounds.shape(entry.shape, MAX_CONSTANT), PUBLIC_DTYPES[entry.dtype]
    try:
        held = bytearray(base64.b64decode(entry.data, validate=True))
    except (ValueError, binascii.Error):
        raise ProgramError("a public constant is not written in base64") from None
    if len(held) != math.prod(shape) * dtype.itemsize:
        raise ProgramError(f"a public constant of shape {shape} does not have its entries")
    if dtype == torch.bool and held.strip(b"\0\1"):
        raise ProgramError("a public constant holds what is neither true nor false")
    return torch.frombuffer(held, dtype=dtype).reshape(shape) if held else torch.empty(shape, dtype=dtype)


def _keyword(name: str) -> str:
    """An argument's name."""
    if not re.fullmatch("_?[a-z][a-z0-9_]{0,40}", name) or keyword.iskeyword(name):
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


Example = torch.Tensor | Inputs
DERIVED = "derived "
"""Prefix of the names of weights that A computes from others by functions outside the list of operations."""


def describe(
    model: nn.Module | ExportedProgram, inputs: Example | Sequence[Example]
) -> tuple[dict, dict[str, torch.Tensor]]:
    """The public description of a module, and its weights by name.

    Args:
        model: in evaluation mode, on the CPU; or exported so.
        inputs: what it is called with: a tensor, or `Inputs(input_ids=ids, attention_mask=mask)`; or several of these
            in a list, and it is served for each. Of secret tensors only shapes and dtypes enter; a tensor that is
            marked by `sectorch.public` is a part of the program with its content. Where the module does the same with
            other numbers of rows, the description holds for any number of them, and else for these shapes. This is
            tried with up to 840 rows: serve a module that decides by a larger number for each shape that it meets.

    What the description reveals: operations, their order and public arguments, what of the forward depends on no
    secret, and every weight's shape.

    Raises:
        TrainingModeError: the module is in training mode.
        SectorchError: what `secure` raises for such a call, with layer and line.
        ProgramError: its calls differ from one to the next, or it has what a description does not hold.
    """
    module = module_or_exported(model)
    refuse_training(module)
    given = [Inputs.of(x).meta() for x in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
    if not given:
        raise ArgumentError("name inputs that the model is called with")
    if device_of(module).type != "cpu":
        raise ArgumentError("a description is made of a model on the CPU: model.to('cpu')")
    return _Writer(module).described(given)


class _Writer:
    def __init__(self, model: nn.Module):
        self._dtype = dtype_of(model)
        self._kept = {name: torch.promote_types(t.dtype, torch.float32) for name, t in _floating(model)}
        normalising = [layer for layer in model.modules() if is_normalising(layer)]
        held = {id(t) for layer in normalising for t in (*layer.parameters(False), *layer.buffers(False))}
        self._statistics = {name for name, t in _floating(model) if id(t) in held}
        session = Session()
        self._secure = SecureModule(model, session, session.answering[0], Scheme(), None)
        self._names = {function: name for name, function in operations().items()}
        self._weights: dict[str, torch.Tensor] = {}
        self._entries: list[dict] = []
        self._numbers: dict[str, int] = {}
        self._constants: dict[str, int] = {}

    def described(self, given: list[Inputs]) -> tuple[dict, dict[str, torch.Tensor]]:
        found = [(inputs, self._program(inputs)) for inputs in given]
        programs, general = [], []
        for inputs, program in found:
            if any(inputs.row == row and inputs.rows is not None and inputs.rows >= least for row, least in general):
                continue
            least, other = self._general(inputs, program)
            if least:
                general.append((inputs.row, least))
            self._secure.choose_format(inputs)
            programs.append(self._written(inputs, program, other, least))
        once = {json.dumps([p["inputs"], p["call"], p["learned"]]): p for p in programs}
        description = {
            "version": VERSION, "dtype": str(self._dtype), "weights": self._entries,
            "constants": [json.loads(text) for text in self._constants], "programs": list(once.values()),
            "texts": None,
        }  # fmt: skip
        scheme = self._secure.scheme
        if not scheme.chooses:
            description["version"] = FORMAT_VERSION
            description["format"] = [scheme.frac_bits, scheme.activation_bits]
        return description, self._weights

    def _program(self, inputs: Inputs) -> Trace:
        program = self._secure.program(inputs)
        if program is None:
            alone = self._secure.graphs.eager_reason
            raise ProgramError(f"the module cannot be described: it has no one program, since {alone}")
        self._secure._check(inputs)  # what is refused for such inputs is refused here, with layer and line
        return program

    def _general(self, inputs: Inputs, program: Trace) -> tuple[int, Trace]:
        """The fewest rows for which the program holds, and the same for another number; 0 where it holds for one."""
        if inputs.rows is None or inputs.in_shares:
            return 0, program
        others = {n: self._with(inputs, n) for n in (1, FEW, FEW + 1) if n != inputs.rows}
        same = {n: p for n, p in others.items() if p is not None and same_program(program, p, grown=True)}
        if not {FEW, FEW + 1} - {inputs.rows} <= same.keys() or not self._holds_for_more(inputs):
            return 0, program
        return 1 if inputs.rows == 1 or 1 in same else FEW, same[max(same)]

    def _holds_for_more(self, inputs: Inputs) -> bool:
        """Whether the forward does the same with more rows: it may cut them into groups, or count them and decide."""
        recorded = self._secure.recording(inputs)
        if recorded is None:
            return False
        constants = (v.numel() for name, v in recorded.values.items() if name.startswith(CONSTANT))
        largest = max(constants, default=0) // (inputs.rows or 1)
        for rows in MORE_ROWS:
            if rows * largest > MAX_RECORDED:
                break
            try:
                other = self._secure.recording(inputs.meta(rows))
            except Exception:  # a forward that takes no such batch
                return False
            if other is None or not same_program(recorded, other, grown=True):
                return False
        return True

    def _with(self, inputs: Inputs, rows: int) -> Trace | None:
        try:
            return self._secure.program(inputs.meta(rows))
        except Exception:  # a forward that takes no such batch
            return None

    def _written(self, inputs: Inputs, program: Trace, other: Trace, least: int) -> dict:
        program, other = (self._listed(p) for p in (program, other))
        places = {node: {"input": i} for i, node in enumerate(n for n in program.graph.nodes if n.op == "placeholder")}
        nodes: list[dict] = []

        def ref(value: Any, beside: Any) -> Any:
            if isinstance(value, fx.Node):
                return places[value]
            if type(value) is int and type(beside) is int and value != beside:
                return {"rows": value // (inputs.rows or 1)}
            return PLAIN

        for node, twin in zip(program.graph.nodes, other.graph.nodes, strict=True):
            if node.op == "get_attr":
                grown = self._grown(node, twin, program, other) if least else None
                places[node] = grown or self._attribute(str(node.target), program)
            elif node.op == "call_function":
                args = [write_value(a, b, ref) for a, b in zip(node.args, twin.args, strict=True)]
                kwargs = {name: write_value(value, twin.kwargs[name], ref) for name, value in node.kwargs.items()}
                places[node] = {"node": len(nodes)}
                nodes.append({"name": self._name(node.target), "args": args, "kwargs": kwargs})
        entries = []
        for (name, (shape, dtype)), held in zip(inputs.described.items(), inputs.held, strict=True):
            known = None if held is None else list(held.to_description())
            entries.append({"name": name, "shape": list(shape), "dtype": str(dtype), "held": known})
        return {
            "inputs": entries, "call": self._call(inputs), "learned": inputs.learned, "rows": least, "nodes": nodes,
            "result": self._result(program, ref),
        }  # fmt: skip

    def _grown(self, node: fx.Node, twin: fx.Node, program: Trace, other: Trace) -> dict | None:
        how, value = row_growth(node, twin, program, other), program.values[str(node.target)]
        if isinstance(how, int):
            return {f"each {how}": self._constant(value.narrow(how, 0, 1))["constant"]}
        return {"count": value.dim()} if how == "count" else None

    def _result(self, program: Trace, ref: Callable) -> Any:
        leaves: Any = next(n for n in program.graph.nodes if n.op == "output").args[0]
        marks = [_Leaf(leaf) for leaf in leaves]  # a container's own code may look at what it is given
        result = pytree.tree_unflatten(marks, program.spec) if program.spec is not None else marks

        def leaf(value: Any, _: Any) -> Any:
            return write_value(value.held, value.held, ref) if isinstance(value, _Leaf) else PLAIN

        return write_value(result, result, leaf)

    def _call(self, inputs: Inputs) -> Any:
        numbers = {name: i for i, name in enumerate(inputs.names)}

        def ref(value: Any, _: Any) -> Any:
            if isinstance(value, Secret):
                return {"input": numbers[value.name]}
            return self._constant(value.value) if isinstance(value, Public) else PLAIN

        call = pytree.tree_unflatten(list(inputs.form.leaves), inputs.form.spec)
        return write_value(call, call, ref)

    def _listed(self, program: Trace) -> Trace:
        """The program with what A computes of weights by functions outside the list as weights of its own."""
        owned = _owned(program.graph)
        if not any(_outside(node, self._names, set()) for node in owned):
            return program
        program = program.copy()
        values: dict[fx.Node, Any] = {}
        given = {name: v.double() if v.is_floating_point() else v for name, v in program.values.items()}
        with torch.no_grad(), Float64Mode():
            for node in _owned(program.graph):
                args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
                target: Any = node.target
                values[node] = given[target] if node.op == "get_attr" else target(*args, **kwargs)
        outside: set[fx.Node] = set()
        for node, value in values.items():
            outside |= {node} if _outside(node, self._names, outside) else set()
            if node in outside and isinstance(value, torch.Tensor):
                name, whole = f"{DERIVED}{node.name}", value.is_complex()
                program.values[name] = torch.view_as_real(value) if whole else value
                program.dtypes[name] = node.meta.get("dtype", self._dtype).to_real()
                with program.graph.inserting_before(node):
                    made = program.graph.create_node("get_attr", name, (), {})
                    if whole:
                        made = program.graph.call_function(torch.view_as_complex, (made,))
                    node.replace_all_uses_with(made)
        for node in reversed(list(program.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                program.graph.erase_node(node)
        return program

    def _name(self, target: Any) -> str:
        name = self._names.get(target)
        if name is None:
            known = spell(target.func if isinstance(target, OutOfPlace) else target)
            written_in = OUT_OF_PLACE if isinstance(target, OutOfPlace) else ""
            raise ProgramError(f"'{written_in}{known}' is not in the list of operations; sectorch.supported_ops()")
        return name

    def _attribute(self, name: str, program: Trace) -> dict:
        value = program.values[name]
        if name.startswith(CONSTANT):
            return self._constant(value)
        if not value.is_floating_point():
            raise ProgramError("the module computes whole numbers of its weights alone, which cannot be described")
        if name not in self._numbers:
            self._numbers[name] = len(self._entries)
            passes = program.dtypes.get(name, self._dtype)
            label, dtype = self._label(name), self._kept.get(name, self._derived(name, passes))
            self._weights[label] = value.detach().to(dtype).contiguous()
            self._entries.append(
                {
                    "name": label, "shape": list(value.shape), "dtype": str(dtype),
                    "statistic": name in self._statistics, **({} if passes == self._dtype else {"passes": str(passes)}),
                }
            )  # fmt: skip
        return {"weight": self._numbers[name]}

    def _derived(self, name: str, passes: torch.dtype) -> torch.dtype:
        """In which a weight that is not the module's own is kept: as `weights.Weights` rounds the weights of passes."""
        return torch.float64 if name.startswith(DERIVED) else torch.promote_types(passes, torch.float32)

    def _label(self, name: str) -> str:
        if name.startswith(FOLDED):  # what it was made of is long
            name = name.partition(" with ")[0].partition(" times ")[0]
        name = name[: bounds.MAX_TEXT - 8]
        numbered = (name if i == 1 else f"{name} {i}" for i in range(1, len(self._weights) + 2))
        return next(n for n in numbered if n not in self._weights)

    def _constant(self, value: torch.Tensor) -> dict:
        if value.numel() > MAX_CONSTANT:
            raise ProgramError(
                f"the forward makes a public tensor of shape {list(value.shape)}; a description holds constants of at "
                f"most {MAX_CONSTANT} elements"
            )
        data = base64.b64encode(raw(value.detach().cpu().contiguous())).decode()
        text = json.dumps({"shape": list(value.shape), "dtype": str(value.dtype), "data": data})
        return {"constant": self._constants.setdefault(text, len(self._constants))}


class _Leaf:
    """A leaf of a result, which containers treat as opaque."""

    def __init__(self, held: Any):
        self.held = held


def _floating(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The floating-point parameters and buffers by their first names (`weights.plain_weights`)."""
    named = {id(t): (name, t) for name, t in reversed([*model.named_parameters(), *model.named_buffers()])}
    return [(name, t) for name, t in named.values() if t.is_floating_point()]


def _owned(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that depend on no input, in order."""
    owned: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(n in owned for n in node.all_input_nodes)):
            owned[node] = None
    return owned


def _outside(node: fx.Node, names: dict, outside: set) -> bool:
    """Whether a node is computed by a function outside the list, or of a complex number, or takes an item of such."""
    if node.op != "call_function":
        return False
    if any(isinstance(leaf, complex) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
        return True
    return node.target not in names or (node.target is bounds.item and node.args[0] in outside)


def to_json(description: dict) -> bytes:
    """A description as bytes."""
    return json.dumps(description, separators=(",", ":")).encode()


def match_call(served: RemoteProgram, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    """The inputs of a call, in the form of the program that it asks for.

    Arguments without a secret tensor in them (a public mask, a flag) are part of a program: who leaves one out gets
    the program's own, and who passes one has to pass an equal one.

    Raises:
        ArgumentError: a missing or unexpected argument, or a public one that is another than the program's.
        DtypeError: no tensor, or one of another dtype. ShapeError: of another shape.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Inputs):
        args, kwargs = _arguments(args[0])
    errors: list[SectorchError] = []
    for call in _plain(served):
        try:
            return _inputs(call, args, kwargs)
        except (ArgumentError, DtypeError, ShapeError) as error:
            errors.append(error)
    # The program whose form the call has says most: its shapes were looked at.
    ranks = lambda e: (ShapeError, DtypeError, ArgumentError).index(type(e)) + str(e).startswith(("missing", "unexp"))
    said = min(errors, key=ranks)
    raise type(said)(f"{said}; {served.summary}") from None


def _plain(served: RemoteProgram) -> list[RemoteCall]:
    """The calls whose results Q learns.

    Raises:
        ArgumentError: there are none.
    """
    calls = [call for call in served.calls if not call.inputs.in_shares]
    if not calls:
        raise ArgumentError("the model is served for generation: ask it by generate(input_ids)")
    return calls


Like = int | tuple[int, ...] | torch.Tensor | Inputs


def like_inputs(served: RemoteProgram, inputs: Like) -> Inputs:
    """Inputs without content, of a later call.

    Args:
        inputs: like the later ones; or their number of rows, where the model takes any number of them in one form
            only; or the shape of its only tensor.

    Raises:
        ArgumentError, DtypeError, ShapeError: the model does not take such.
    """
    if isinstance(inputs, Inputs) and inputs.in_shares:
        return served.inputs(served.find(inputs))
    first = _plain(served)[0]
    if isinstance(inputs, int):
        if inputs < 1 or len(served.calls) > 1 or not first.least:
            raise ArgumentError(f"{inputs} rows say nothing of a call here: pass Inputs(...); {served.summary}")
        return match_call(served, (first.inputs.meta(inputs),), {})
    if isinstance(inputs, (tuple, list)):
        if len(first.inputs.tensors) > 1:
            raise ArgumentError(f"a shape says nothing of a call with several tensors; {served.summary}")
        try:
            x = torch.empty(tuple(inputs), dtype=first.inputs.dtypes[0], device="meta")
        except (TypeError, RuntimeError):
            raise ArgumentError(f"{inputs} is no shape; {served.summary}") from None
        inputs = first.inputs.with_tensors([x])
    return match_call(served, (inputs,), {}).meta()


def match_named(served: RemoteProgram, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs of a call whose tensors are given by the names that the description has for them.

    Raises:
        ArgumentError: other names. DtypeError, ShapeError: as of `called`.
    """
    errors: list[SectorchError] = []
    for call in _plain(served):
        if set(call.inputs.names) != set(tensors):
            continue
        try:
            return _fitting(call, [tensors[name] for name in call.inputs.names])
        except (DtypeError, ShapeError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])(f"{errors[0]}; {served.summary}") from None
    raise ArgumentError(f"got inputs named {', '.join(sorted(tensors)) or 'nothing'}; {served.summary}")


def _arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    given = dict(zip(inputs.names, inputs.tensors, strict=True))
    leaves = [given[leaf.name] if isinstance(leaf, Secret) else leaf for leaf in inputs.form.leaves]
    return pytree.tree_unflatten(leaves, inputs.form.spec)


def _inputs(call: RemoteCall, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    form, found = call.inputs.form, {}
    wanted_args, wanted = pytree.tree_unflatten(list(form.leaves), form.spec)
    if len(args) > len(wanted_args):
        raise ArgumentError(f"takes {len(wanted_args)} arguments by place and {len(args)} were given")
    for place, value in enumerate(wanted_args):
        if place < len(args):
            _match(value, args[place], f"argument {place + 1}", found)
        elif _secret(value):
            raise ArgumentError(f"missing argument {place + 1}")
    _match_named(wanted, kwargs, "", found)
    return _fitting(call, [found[name] for name in call.inputs.names])


def _match(wanted: Any, given: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    """Take the secret tensors out of an argument; raise where it is not of the form that is wanted."""
    if isinstance(wanted, Secret):
        if isinstance(given, Public):
            raise ArgumentError(f"{path} is secret in this model, and was marked public; pass the tensor itself")
        if isinstance(given, SecretTensor) or not isinstance(given, torch.Tensor):
            raise DtypeError(f"{path}: expected a torch tensor, got {type(given).__name__}")
        if found.setdefault(wanted.name, given) is not given:
            raise ArgumentError(f"{path} is the same tensor as another argument in this model; pass that one")
    elif isinstance(wanted, Public):
        if not isinstance(given, Public) or given != wanted:
            raise ArgumentError(
                f"{path} is public in this model and part of its program; leave it out, or pass sectorch.public() of "
                f"an equal tensor"
            )
    elif isinstance(wanted, dict):
        _match_named(wanted, given, path, found)
    elif isinstance(wanted, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            came = f"{len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__
            raise ArgumentError(f"{path}: expected a {type(wanted).__name__} of {len(wanted)}, got {came}")
        for place, (value, other) in enumerate(zip(wanted, given, strict=True)):
            _match(value, other, f"{path}[{place}]", found)
    elif isinstance(given, (torch.Tensor, Public)) or type(given) is not type(wanted) or given != wanted:
        shown = type(given).__name__ if isinstance(given, (torch.Tensor, Public)) else f"{given!r:.40}"
        raise ArgumentError(f"{path} is {wanted!r:.40} in this model, got {shown}; leave it out")


def _match_named(wanted: dict[str, Any], given: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if dataclasses.is_dataclass(given) and not isinstance(given, (type, Mapping)):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{path}: expected a dictionary, got {type(given).__name__}")
    said = lambda name: f"{path}['{name}']" if path else f"argument '{name}'"
    for name in given:
        if name not in wanted:
            raise ArgumentError(f"unexpected {said(name)}")
    for name, value in wanted.items():
        if name in given:
            _match(value, given[name], said(name), found)
        elif _secret(value):
            raise ArgumentError(f"missing {said(name)}")


def _secret(wanted: Any) -> bool:
    return any(isinstance(leaf, Secret) for leaf in pytree.tree_leaves(wanted))


def _fitting(call: RemoteCall, tensors: list[torch.Tensor]) -> Inputs:
    for (name, (shape, dtype)), x in zip(call.inputs.described.items(), tensors, strict=True):
        if x.dtype != dtype:
            raise DtypeError(f"'{name}' is of {dtype} in this model, got {x.dtype}; use x.to({dtype})")
        if not call.least and tuple(x.shape) != shape:
            raise ShapeError(f"'{name}' is of shape {list(shape)} in this model, got {list(x.shape)}")
        if call.least and (x.dim() != len(shape) or tuple(x.shape[1:]) != shape[1:]):
            sizes = ", ".join(["rows", *map(str, shape[1:])])
            raise ShapeError(f"'{name}' is of shape [{sizes}] in this model, got {list(x.shape)}")
    inputs = call.inputs.with_tensors([x.detach().as_subclass(torch.Tensor) for x in tensors])
    if call.least and (inputs.rows is None or inputs.rows < call.least):
        rows = ", ".join(f"{name}: {len(x)}" for name, x in zip(inputs.names, tensors, strict=True))
        raise ShapeError(f"the inputs have one number of rows, {call.least} or more; got {rows}")
    return inputs
