"""A model's architecture as data: what S and Q receive instead of A's code.

`describe` records what a module does with the inputs that it is shown, as `secure` does, and writes the program as
JSON: operations by the names of the dispatch table's functions with their public arguments, the form of the call and of
the result, and the names, shapes and dtypes of the weights. `program.py` reads it back.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..choreography.run.frames import raw
from ..errors import ArgumentError, ProgramError
from ..session import Session
from ..tensor import Scheme
from ..tensor.table import spell
from . import bounds
from .accept import device_of, dtype_of, refuse_training
from .bind import is_normalising
from .check import Widened
from .exported import taken
from .forms import PLAIN, written
from .inputs import Inputs, Public, Secret
from .module import SecureModule
from .program import FORMAT_VERSION, MAX_CONSTANT, OUT_OF_PLACE, VERSION, operations
from .samplewise import grows, same_program
from .shapes import FEW
from .trace import CONSTANT, FOLDED, OutOfPlace, Trace

Example = torch.Tensor | Inputs
DERIVED = "derived "
"""How the names begin of weights that A computes of others by functions that are not in the list."""


def describe(
    model: nn.Module | ExportedProgram, inputs: Example | Sequence[Example]
) -> tuple[dict, dict[str, torch.Tensor]]:
    """The public description of a module, and its weights by name.

    Args:
        model: in evaluation mode, on the CPU; or exported so.
        inputs: what it is called with: a tensor, or `Inputs(input_ids=ids, attention_mask=mask)`; or several of these
            in a list, and it is served for each. Of secret tensors only shapes and dtypes enter; a tensor that is
            marked by `sectorch.public` is a part of the program with its content. Where the module does the same with
            other numbers of rows, the description holds for any number of them, and else for these shapes.

    What the description reveals: operations, their order and public arguments, what of the forward depends on no
    secret, and every weight's shape.

    Raises:
        TrainingModeError: the module is in training mode.
        SectorchError: what `secure` raises for such a call, with layer and line.
        ProgramError: its calls differ from one to the next, or it has what a description does not hold.
    """
    module = taken(model)
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
            alone = self._secure.traces.alone
            raise ProgramError(f"the module cannot be described: it has no one program, since {alone}")
        self._secure._check(inputs)  # what is refused for such inputs is refused here, with layer and line
        return program

    def _general(self, inputs: Inputs, program: Trace) -> tuple[int, Trace]:
        """The fewest rows for which the program holds, and the same for another number; 0 where it holds for one."""
        if inputs.rows is None or inputs.in_shares:
            return 0, program
        others = {n: self._with(inputs, n) for n in (1, FEW, FEW + 1) if n != inputs.rows}
        same = {n: p for n, p in others.items() if p is not None and same_program(program, p, grown=True)}
        if not {FEW, FEW + 1} - {inputs.rows} <= same.keys():
            return 0, program
        return 1 if inputs.rows == 1 or 1 in same else FEW, same[max(same)]

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
                args = [written(a, b, ref) for a, b in zip(node.args, twin.args, strict=True)]
                kwargs = {name: written(value, twin.kwargs[name], ref) for name, value in node.kwargs.items()}
                places[node] = {"node": len(nodes)}
                nodes.append({"name": self._name(node.target), "args": args, "kwargs": kwargs})
        entries = []
        for (name, (shape, dtype)), held in zip(inputs.described.items(), inputs.held, strict=True):
            known = None if held is None else list(held.said)
            entries.append({"name": name, "shape": list(shape), "dtype": str(dtype), "held": known})
        return {
            "inputs": entries, "call": self._call(inputs), "learned": inputs.learned, "rows": least, "nodes": nodes,
            "result": self._result(program, ref),
        }  # fmt: skip

    def _grown(self, node: fx.Node, twin: fx.Node, program: Trace, other: Trace) -> dict | None:
        how, value = grows(node, twin, program, other), program.values[str(node.target)]
        if isinstance(how, int):
            return {f"each {how}": self._constant(value.narrow(how, 0, 1))["constant"]}
        return {"count": value.dim()} if how == "count" else None

    def _result(self, program: Trace, ref: Callable) -> Any:
        leaves: Any = next(n for n in program.graph.nodes if n.op == "output").args[0]
        marks = [_Leaf(leaf) for leaf in leaves]  # a container's own code may look at what it is given
        result = pytree.tree_unflatten(marks, program.spec) if program.spec is not None else marks

        def leaf(value: Any, _: Any) -> Any:
            return written(value.held, value.held, ref) if isinstance(value, _Leaf) else PLAIN

        return written(result, result, leaf)

    def _call(self, inputs: Inputs) -> Any:
        numbers = {name: i for i, name in enumerate(inputs.names)}

        def ref(value: Any, _: Any) -> Any:
            if isinstance(value, Secret):
                return {"input": numbers[value.name]}
            return self._constant(value.value) if isinstance(value, Public) else PLAIN

        call = pytree.tree_unflatten(list(inputs.form.leaves), inputs.form.spec)
        return written(call, call, ref)

    def _listed(self, program: Trace) -> Trace:
        """The program with what A computes of weights by functions outside the list as weights of its own."""
        owned = _owned(program.graph)
        if not any(_outside(node, self._names, set()) for node in owned):
            return program
        program = program.copy()
        values: dict[fx.Node, Any] = {}
        given = {name: v.double() if v.is_floating_point() else v for name, v in program.values.items()}
        with torch.no_grad(), Widened():
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
        """In which a weight that is not the module's own is kept: as `bind.Weights` rounds what a pass has made."""
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
    """A leaf of a result, which no container looks into."""

    def __init__(self, held: Any):
        self.held = held


def _floating(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The floating-point parameters and buffers by their first names (`bind.plain_weights`)."""
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
    """A description as it travels."""
    return json.dumps(description, separators=(",", ":")).encode()
