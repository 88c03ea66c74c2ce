"""Programs: the steps of one call, recorded in a dry run on shapes, as a value that can be compared, shown and run.

A call that runs from a program takes three stages, each a section or file of its own:

1. A `ProgramTracer` listens to a `Net` (`choreography/net.py`) in which no party is present, and records each step as a
   `Node`: the step with its owners and phase, and the slots of its operands and results.
2. `ProgramTracer.program` keeps the nodes that the results and messages need, those of the setup included. The
   `Program` holds shapes and public values only. Two programs are equal if their digests are.
3. Each process takes its part of the program: `projection.py`.

`Program.party` gives one party's part as readable Python code (`PartyProgram`). The digest is made of that code.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import operator
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ...display import Display
from ...errors import ArgumentError, MisplacedValueError
from ..located import Located, PartialCall, cell_content, fill_arguments
from ..net import Compute, Draw, Header, Move, Read, Step
from ..roles import Party, Phase

# The parts of a program: nodes, the slots of their values, and inputs.


Slot = tuple[int, int, int]
"""The address of a value: the number of the call, the number of its step (-1 for an input), and of the result."""


@dataclass(unsafe_hash=True, slots=True)  # not frozen, which takes three times as long to make
class OperandRef:
    """An operand that is a step's result or an input. It does not change."""

    slot: Slot


@dataclass(frozen=True)
class Input:
    """An input of a party: the query, or a weight."""

    slot: Slot
    name: str
    party: Party
    shape: torch.Size
    dtype: torch.dtype
    phase: Phase


@dataclass(eq=False, slots=True)
class Node:
    """A recorded step. It does not change.

    Attributes:
        operands: an `OperandRef` for each operand that a step or an input gives, and the others as public values.
        slots: of the results.
        results: as meta tensors.
        many: whether the step gives a tuple.
        place: the layer that it belongs to.
        operand_slots: the slots of the operands.
    """

    step: Step
    operands: tuple[Any, ...]
    slots: tuple[Slot, ...]
    results: tuple[Any, ...]
    many: bool
    place: str
    operand_slots: tuple[Slot, ...] = field(init=False)

    def __post_init__(self):
        self.operand_slots = tuple([operand.slot for operand in self.operands if type(operand) is OperandRef])

    @property
    def needs(self) -> set[Slot]:
        return set(self.operand_slots)

    @property
    def parties(self) -> frozenset[Party]:
        """The parties that hold its results."""
        return self.step.owners


PLACE: ContextVar[str] = ContextVar("the layer that is traced", default="")
"""The layer of the model whose steps are recorded now; errors name it."""


class ProgramTracer:
    """Records the steps of one net of a dry session.

    Args:
        call: the number of the net's call.
        setup: the tracer of the session's setup, where this one records a call.
        alone: this is the setup of one program, and not of all programs of a model. Then all its checks belong to the
            program.
    """

    def __init__(self, call: int, setup: ProgramTracer | None = None, *, alone: bool = False):
        self._call, self._setup, self._alone = call, setup, alone
        self._known = (call, setup._call if setup else call)
        self._lock: threading.RLock = setup._lock if setup else threading.RLock()
        """Several threads record into one setup."""
        self._nodes: list[Node] = []
        self._inputs: list[Input] = []
        self._read: list[tuple[Any, OperandRef]] = []
        self._relied: dict[Slot, None] = {}
        self._closures = Closures()
        self._strange = False
        """Whether a step took a value of another call."""

    def add_input(self, value: Located, name: str) -> None:
        """Record an input of the program."""
        (party,) = value.owners
        with self._lock:
            value.slot = (self._call, -1, len(self._inputs))
            self._inputs.append(Input(value.slot, name, party, value.shape, value.dtype, value.phase))

    def rely(self, checked: Located) -> None:
        self._relied[checked.slot] = None

    def step(self, number: int, step: Step, values: tuple, result: Any) -> None:
        with self._lock:
            self._step(number, step, values, result)

    def _step(self, number: int, step: Step, values: tuple, result: Any) -> None:
        operands = []
        if isinstance(step, Compute):
            self._closures.note(step.f)
        for v in values:
            if type(v) is Located:
                self._strange |= (v.slot or (None,))[0] not in self._known
                operands.append(OperandRef(v.slot))
            else:
                if isinstance(step, Compute):
                    self._closures.note(v)
                operands.append(self._public(v))
        many = isinstance(result, tuple)
        results = result if many else (result,)
        slots = tuple([(self._call, number, i) for i in range(len(results))]) if many else ((self._call, number, 0),)
        self._nodes.append(Node(step, tuple(operands), slots, results, many, PLACE.get()))
        if isinstance(step, Read):
            self._read.append((result, OperandRef(slots[0])))

    def _public(self, value: Any) -> Any:
        """A public operand as it is now, copied where the traced function is a user's and may change it afterwards."""
        alone = self._alone or (self._setup is not None and self._setup._alone)
        return value.clone() if alone and type(value) is torch.Tensor else value

    def program(self, results: Any) -> Program:
        """The program of the recorded steps, with the steps of the setup that it needs.

        Args:
            results: a tree of values that were read (`Net.read`) and of public values.

        Raises:
            ArgumentError: a step's function depends on its call by more than its arguments, a step takes a value of
                another call, two inputs have one name, an input of the setup is not of `Phase.SETUP`, or a result is
                neither read nor public.
        """
        with self._lock:
            return self._program(results)

    def _program(self, results: Any) -> Program:
        before = self._setup or ProgramTracer(-1)
        if any(tracing._closures.located or tracing._closures.changed for tracing in (self, before)):
            raise ArgumentError(
                "a handler's function closes over a variable that changed after its step, or over a located value; "
                "pass what it takes as arguments"
            )
        if self._strange or before._strange:
            raise ArgumentError("a step takes a value of another call; bring what a program needs into it")
        leaves, tree = pytree.tree_flatten(results)
        leaves = [next((slot for read, slot in self._read if read is leaf), leaf) for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, Located) or (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                raise ArgumentError(
                    "a result is neither what `net.read` of the call gave nor public; read it last, and compute with "
                    "it before, or after the run"
                )
        call = _needed(self._nodes, set(), (Move, Read))
        # A setup that is traced alone keeps all its checks, one that programs share those on which this call relied.
        relied = [node.slots[0] for node in before._nodes if _checks(node)] if before._alone else self._relied
        setup = _ordered(before._nodes, [*relied, *(slot for node in call for slot in node.operand_slots)])
        brought = {i.slot: i for i in (*before._inputs, *self._inputs)}
        # In the order of the steps that need them, which does not depend on the order in which they were brought.
        needed = dict.fromkeys(slot for node in (*setup, *call) for slot in node.operand_slots)
        inputs = [brought[slot] for slot in needed if slot in brought]
        for i in inputs:
            if i.slot[0] == before._call and i.phase != Phase.SETUP:
                raise ArgumentError(f"'{i.name}' is brought into the setup, which is done once: Phase.SETUP")
        twice = [name for name, count in Counter(i.name for i in inputs).items() if count > 1]
        if twice:
            raise ArgumentError(f"two inputs of one program are called '{twice[0]}'; give `net.own` another name")
        return Program(setup, call, inputs, leaves, tree, before)


def _checks(node: Node) -> bool:
    return isinstance(node.step, Compute) and not node.step.pure and not node.step.random


def _ordered(nodes: list[Node], wanted: list[Slot]) -> list[Node]:
    """The steps that the wanted values need, in the order in which they need them, with draws numbered anew.

    The order therefore does not depend on other programs whose setup was recorded before.
    """
    made = {slot: node for node in nodes for slot in node.slots}
    found: dict[Node, Node] = {}
    ahead, draws = list(reversed(wanted)), itertools.count()
    while ahead:
        node = made.get(ahead[-1])
        missing = [slot for slot in node.operand_slots if slot in made and made[slot] not in found] if node else []
        if node is None or node in found or not missing:
            ahead.pop()
            if node is not None and node not in found:
                draw = isinstance(node.step, Draw)
                found[node] = replace(node, step=replace(node.step, number=next(draws))) if draw else node
        else:
            ahead += reversed(missing)
    return list(found.values())


def _needed(nodes: Iterable[Node], wanted: set[Slot], kept: type | tuple[type, ...]) -> list[Node]:
    """The nodes of a kind to keep, the nodes that are not pure, and all nodes that these and the wanted slots need."""
    found, needed = [], set(wanted)
    for node in reversed(list(nodes)):
        asked = isinstance(node.step, kept) or (isinstance(node.step, Compute) and not node.step.pure)
        if asked or not needed.isdisjoint(node.slots):
            found.append(node)
            needed.update(node.operand_slots)
    return found[::-1]


class Program(Display):
    """One call of a choreography as a value. Two programs are equal if their digests are.

    Attributes:
        setup, call: the steps in order, those that are taken once a session and those of each call.
        inputs: the inputs of all parties.
        leaves, tree: the results as a tree: an `OperandRef` for what a party reads, and public values.
        before: the tracer of the setup. Programs with the same one share its steps.
    """

    def __init__(
        self,
        setup: list[Node],
        call: list[Node],
        inputs: list[Input],
        leaves: list[Any],
        tree: Any,
        before: ProgramTracer,
    ):
        self.setup, self.call, self.inputs, self.before = setup, call, inputs, before
        self.leaves, self.tree = leaves, tree
        self.parts: dict[frozenset[Party], Any] = {}
        """The projections of it (`projection.py`), by the parties that are present."""

    def __repr__(self) -> str:
        return f"Program({len(self.nodes)} steps, {len(self.messages)} messages, {self.digest[:16]})"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def nodes(self) -> list[Node]:
        """All steps, those of the setup first."""
        return [*self.setup, *self.call]

    @cached_property
    def parties(self) -> tuple[Party, ...]:
        """The parties that take part, by role and name."""
        return tuple(sorted({p for node in self.nodes for p in node.parties}, key=lambda p: (p.role, p.name)))

    @cached_property
    def messages(self) -> list[Header]:
        """Every message, in order: protocol, label, edge, phase, round, shape, and what hides it."""
        return [node.step.header for node in self.nodes if isinstance(node.step, Move)]

    @property
    def cost(self) -> dict[str, dict[str, int]]:
        """For each phase the messages, their bytes, and the rounds: the longest chain of messages that wait."""
        found = {}
        for phase in Phase:
            sent = [m for m in self.messages if m.phase == phase]
            rounds = max((m.round for m in sent), default=0)
            found[phase.name.lower()] = {"messages": len(sent), "bytes": sum(m.bytes for m in sent), "rounds": rounds}
        return found

    def party(self, name: str) -> PartyProgram:
        """One party's part of the program, by the party's name or role.

        Raises:
            MisplacedValueError: no such party takes part, or several parties have that role.
        """
        found = [p for p in self.parties if p.name == name] or [p for p in self.parties if p.role == name]
        if len(found) != 1:
            known = ", ".join(p.name for p in self.parties)
            raise MisplacedValueError(f"'{name}' names {len(found)} parties of this program; it has {known}")
        (me,) = found
        mine = [node for node in self.nodes if me in node.parties]
        learned = {slot for node in mine if isinstance(node.step, Read) for slot in node.needs}
        return PartyProgram(me, _needed(mine, learned, (Move, Read)), [i for i in self.inputs if i.party == me])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of every party's code (without comments) and constants, and of the form of the results."""
        parts = ["learned" if type(y) is OperandRef else spell_constant(y) for y in self.leaves]
        results = f"{self.tree} {parts}"
        found = hashlib.sha256(results.encode())
        for party in self.parties:
            theirs = self.party(party.name)
            code = "\n".join(line for line in theirs.code.splitlines() if not line.lstrip().startswith("# "))
            for part in (party.name, code, *(spell_constant(v) for v in theirs.constants.values()), results):
                found.update(len(part).to_bytes(8, "big") + part.encode())
        return found.hexdigest()

    def draw(self) -> str:
        """A picture of the messages, round after round."""
        return list_messages(self.messages, self.parties)

    def sections(self) -> Iterator[RenderableType]:
        """The cost by phase, and the picture of the messages."""
        table = Table(title=repr(self))
        for column in ("phase", "messages", "bytes", "rounds"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase, cost in self.cost.items():
            table.add_row(phase, *(f"{cost[name]:,}" for name in ("messages", "bytes", "rounds")))
        yield table
        yield Text(self.draw(), no_wrap=True)


# One party's part of a program, as Python code that says everything that the party does.
#
# The code is three functions: `setup` (once a session), `offline` (what does not depend on the query) and `online`.
# Each takes `io`, the party's inputs and outputs, and what the functions before it returned:
#
#     io.input(name)                                  an input of this party
#     io.draw(peer, name, number, shape, dtype)       the next words of the stream that it shares with a peer
#     io.send(peer, label, value)
#     io.receive(peer, label, shape, dtype)
#     io.result(value)                                a value that this party learns
#
# Everything else that a line calls is an operator, a function of torch, or a kernel that the code imports. Functions
# without a name (lambdas of a handler) and larger public tensors stand in `constants`.


_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.matmul: "@", operator.pow: "**",
    operator.xor: "^", operator.and_: "&", operator.or_: "|", operator.lshift: "<<", operator.rshift: ">>",
    operator.truediv: "/", operator.floordiv: "//", operator.mod: "%",
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.invert: "~"}
SPELLED = 64
"""Public tensors of at most this many entries are written into the code."""
_ABOUT = {
    Phase.SETUP: "Once a session.",
    Phase.OFFLINE: "Once a call, before the query is known.",
    Phase.ONLINE: "Once a call, on the query.",
}


class PartyProgram:
    """One party's part of a program, as Python code.

    Attributes:
        me: the party.
        code: the functions `setup`, `offline` and `online`, to read what it computes, sends, receives and learns.
        constants: public tensors and functions without a name, by the names that the code has for them.
    """

    def __init__(self, me: Party, nodes: list[Node], inputs: list[Input]):
        self.me = me
        self.constants: dict[str, Any] = {}
        self._imports: dict[str, tuple[str, str]] = {}
        """The module and the name in it, by the name that the code uses."""
        self._names: dict[Slot, str] = {}
        self._used: Counter[str] = Counter()
        # The result of a message that this party sends is the value that it has already.
        self._same = {
            node.slots[0]: node.operands[0].slot
            for node in nodes
            if isinstance(node.step, Move) and me in node.step.holders
        }
        self._needed = {slot for node in nodes for slot in self._needs(node)}
        made = {slot: node.step.phase for node in nodes for slot in node.slots}
        made |= {given.slot: given.phase for given in inputs}
        needs = {phase: {s for n in nodes if n.step.phase == phase for s in self._needs(n)} for phase in Phase}
        functions, before = [], []
        for phase in Phase:
            # A phase returns the values that a later phase needs, in the order in which they were made.
            later = set().union(*(needs[p] for p in Phase if p > phase))
            kept = [slot for slot in made if slot in later and made[slot] == phase]
            mine = [node for node in nodes if node.step.phase == phase]
            lines = self._body(mine, [given for given in inputs if given.phase == phase], set(kept))
            names = "".join(f"{self._names[slot]}, " for slot in kept).strip()
            name, taken = phase.name.lower(), [f"{all_} = {earlier}" for earlier, all_ in before if all_]
            lines = [f'"""{_ABOUT[phase]}"""', *taken, *lines, f"return ({names})"]
            head = f"def {name}({', '.join(['io', *(earlier for earlier, _ in before)])}):"
            functions.append("\n    ".join([head, *lines]))
            before.append((name, names))
        imports = ["import torch"]
        for name, (module, there) in sorted(self._imports.items(), key=lambda item: item[1]):
            imports.append(f"from {module} import {there}" + ("" if name == there else f" as {name}"))
        if self.constants:
            imports += ["", f"{', '.join(self.constants)}, = constants.values()"]
        self.code = "\n\n\n".join(["\n".join(imports), *functions]) + "\n"

    def __repr__(self) -> str:
        lines = self.code.count("\n")
        return f"PartyProgram({self.me}, {lines} lines of code)"

    def load(self) -> dict[str, Callable]:
        """The three functions of the code, by name."""
        scope: dict[str, Any] = {"constants": self.constants}
        exec(compile(self.code, f"<program of {self.me}>", "exec"), scope)
        return {phase.name.lower(): scope[phase.name.lower()] for phase in Phase}

    def _tells(self, node: Node) -> bool:
        """Whether a step is a message that this party sends or receives."""
        return isinstance(node.step, Move) and self.me in (node.step.header.src, node.step.header.dst)

    def _needs(self, node: Node) -> set[Slot]:
        """The slots of this party's values that a step takes."""
        if isinstance(node.step, Move) and node.step.header.src != self.me:
            return set()
        return {self._slot(slot) for slot in node.needs}

    def _slot(self, slot: Slot) -> Slot:
        while slot in self._same:
            slot = self._same[slot]
        return slot

    def _body(self, nodes: list[Node], inputs: list[Input], kept: set[Slot]) -> list[str]:
        """The lines of one phase; a value is dropped after its last use."""
        lines = [f"{self._name(given.slot, given.name)} = io.input({given.name!r})" for given in inputs]
        place, last = "", {slot: n for n, node in enumerate(nodes) for slot in self._needs(node)}
        dropped: dict[int, list[Slot]] = {}
        for slot, n in last.items():
            if slot not in kept:
                dropped.setdefault(n, []).append(slot)
        for n, node in enumerate(nodes):
            if node.place not in ("", place):
                lines.append(_comment(node.place))
                place = node.place
            if self._tells(node) or not isinstance(node.step, Move):
                lines.append(self._line(node))
            ended = sorted(self._names[slot] for slot in dropped.get(n, ()))
            if ended:
                lines.append(f"del {', '.join(ended)}")
        return lines

    def _line(self, node: Node) -> str:
        step = node.step
        if isinstance(step, Read):
            return f"io.result({self._spell(node.operands[0])})"
        if isinstance(step, Move):
            return self._message(node, step.header)
        if isinstance(step, Draw):
            (peer,) = step.owners - {self.me}
            name = self._name(node.slots[0], step.name.rsplit("/", 1)[-1])
            return f"{name} = io.draw({peer.name!r}, {step.name!r}, {step.number}, {tuple(step.size)}, {step.dtype})"
        named = [self._name(slot, _short(step.f)) if slot in self._needed else "_" for slot in node.slots]
        called = self._spell_call(step.f, node.operands)
        if not node.many:
            return called if named == ["_"] else f"{named[0]} = {called}"
        return f"{', '.join(named)}{',' if len(named) == 1 else ''} = {called}"

    def _message(self, node: Node, header: Header) -> str:
        label = f"{header.protocol}/{header.label}"
        if header.src == self.me:
            return f"io.send({header.dst.name!r}, {label!r}, {self._spell(node.operands[0])})"
        name = self._name(node.slots[0], header.label)
        return f"{name} = io.receive({header.src.name!r}, {label!r}, {tuple(header.shape)}, {header.dtype})"

    # Expressions.

    def _spell_call(self, f: Callable, operands: Sequence[Any]) -> str:
        named: dict[str, Any] = {}
        if isinstance(f, PartialCall):
            named = {name: fill_arguments(value, operands) for name, value in f.kwargs.items()}
            f, operands = f.f, fill_arguments(f.args, operands)
        parts = [self._spell(operand) for operand in operands]
        known = f if isinstance(f, BuiltinFunctionType) else None
        if known in _INFIX:
            return f"{parts[0]} {_INFIX[known]} {parts[1]}"
        if known in _PREFIX:
            return f"{_PREFIX[known]}{parts[0]}"
        if known is operator.getitem:
            return f"{parts[0]}[{_index(operands[1]) or parts[1]}]"
        parts += [f"{name}={self._spell(value)}" for name, value in named.items()]
        return f"{self._spell(f)}({', '.join(parts)})"

    def _spell(self, value: Any) -> str:
        """Python code for an operand: the name of a result, or a public value."""
        if isinstance(value, OperandRef):
            return self._names[self._slot(value.slot)]
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return repr(value)
        if type(value) is torch.Tensor and not value.numel():
            return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
        if type(value) is torch.Tensor and value.numel() <= SPELLED and bool(value.isfinite().all()):
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        if isinstance(value, torch.Size):
            return f"torch.Size({list(value)})"
        if isinstance(value, (tuple, list)):
            parts = ", ".join(self._spell(v) for v in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._spell(v)}' for key, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._spell(value.start)}, {self._spell(value.stop)}, {self._spell(value.step)})"
        if isinstance(value, MethodType):
            return f"{self._spell(value.__self__)}.{value.__name__}"
        if is_dataclass(value) and not isinstance(value, type) and _is_importable(type(value)):
            parts = ", ".join(f"{name}={self._spell(getattr(value, name))}" for name in value.__dataclass_fields__)
            return f"{self._imported(type(value))}({parts})"
        if isinstance(value, partial):
            self._imports["partial"] = "functools", "partial"
            parts = [self._spell(value.func), *map(self._spell, value.args)]
            parts += [f"{name}={self._spell(v)}" for name, v in value.keywords.items()]
            return f"partial({', '.join(parts)})"
        if value is Ellipsis:
            return "..."
        if callable(value):
            name = resolve_name(value)
            if name and name.startswith("torch."):
                return name
            if _is_importable(value):
                return self._imported(value)
        return self._constant(value)

    def _imported(self, value: Any) -> str:
        there = value.__module__, value.__name__
        name = value.__name__
        if self._imports.setdefault(name, there) != there:  # two modules use this name
            name = f"{value.__module__.replace('.', '_')}_{name}"
            self._imports[name] = there
        return name

    def _constant(self, value: Any) -> str:
        known = next((name for name, constant in self.constants.items() if constant is value), None)
        name = known or f"{'f' if callable(value) else 'public'}_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _name(self, slot: Slot, wish: str) -> str:
        """A new name for a value."""
        wish = re.sub(r"[^A-Za-z0-9_]+", "_", wish).strip("_")
        wish = wish if re.match("[A-Za-z]", wish) else f"v_{wish}".rstrip("_")
        self._used[wish] += 1
        name = self._names[slot] = f"{wish}_{self._used[wish]}"
        return name


def _comment(place: str) -> str:
    """A comment that names the layer, with other than printable ASCII characters removed: the model names layers."""
    layer = place.split(" at ")[0]
    return "# " + "".join(c if c.isascii() and c.isprintable() else "?" for c in layer[:100])


def _short(f: Callable) -> str:
    """A name for a result, after the function that computes it."""
    f = f.func if isinstance(f, partial) else f
    name = getattr(f, "__name__", type(f).__name__)
    return {"getitem": "part", "<lambda>": "v"}.get(name, name.strip("_").lower())


def _index(index: Any) -> str:
    """Python code for an index; empty where it needs a name."""
    if isinstance(index, tuple):
        parts = [_index(i) for i in index]
        return ", ".join(parts) if all(parts) else ""
    if isinstance(index, slice) and all(
        isinstance(v, (int, type(None))) for v in (index.start, index.stop, index.step)
    ):
        parts = ["" if v is None else str(v) for v in (index.start, index.stop)]
        return ":".join(parts + ([] if index.step is None else [str(index.step)]))
    return str(index) if isinstance(index, int) or index is None or index is Ellipsis else ""


def _is_importable(value: Any) -> bool:
    """Whether importing a function's, kernel's or class's name from its module gives it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    return found is not None and getattr(found, "kernel", found) is value


def spell_constant(value: Any) -> str:
    """A text that is the same for equal constants only, in every process.

    It contains a tensor's type, shape and content, and a function's code, defaults and the variables that it closes
    over.
    """
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {content.hex()}"
    if isinstance(value, FunctionType):
        code, held = value.__code__, [cell_content(cell) for cell in value.__closure__ or ()]
        held += [value.__defaults__, value.__kwdefaults__]
        parts = value.__module__, value.__qualname__, spell_constant(code), *map(spell_constant, held)
        return f"function({', '.join(parts)})"
    if isinstance(value, CodeType):
        consts = [const for const in value.co_consts if const is not None]
        return f"code({value.co_code.hex()}, {value.co_names}, {', '.join(map(spell_constant, consts))})"
    owner = getattr(value, "__self__", None)
    if (isinstance(value, MethodType) or isinstance(owner, torch.Tensor)) and callable(value):
        return f"method({spell_constant(owner)}, {value.__name__})"
    if isinstance(value, partial):
        return f"partial({spell_constant(value.func)}, {spell_constant(value.args)}, {spell_constant(value.keywords)})"
    if isinstance(value, slice):
        return f"slice({', '.join(map(spell_constant, (value.start, value.stop, value.step)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{spell_constant(key)}: {spell_constant(v)}' for key, v in value.items())})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(spell_constant, value)))})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(spell_constant, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return f"{type(value).__qualname__}({spell_constant(fields)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes


def list_messages(messages: list[Header], parties: tuple[Party, ...]) -> str:
    """The messages as text, one a line: phase and round, an arrow between the parties' columns, label and bytes."""
    width = 14
    head = "".join(p.name.center(width) for p in parties)
    text = [f"{'phase':9}{'round':>6}{head}  message"]
    for m in sorted(messages, key=lambda m: (m.phase, m.round)):
        at = {p: i * width + width // 2 for i, p in enumerate(parties)}
        first, last = sorted((at[m.src], at[m.dst]))
        line = "-" * (last - first - 1)
        arrow = line[:-1] + ">" if at[m.src] < at[m.dst] else "<" + line[1:]
        row = (" " * first + "|" + arrow + "|").ljust(width * len(parties))
        text.append(f"{m.phase.name.lower():9}{m.round:6}{row}  {m.protocol}/{m.label}, {m.bytes} bytes")
    return "\n".join(text)


# Closures. A step's function may depend on variables beside its arguments. They must be the same in every call.


_EMPTY = object()


class Closures:
    """The variables that the recorded functions close over, with their content at the time of recording."""

    def __init__(self):
        self._noted: dict[int, tuple[CellType, Any]] = {}
        self.located = False
        """Whether a variable holds a located value, which belongs to one call."""

    @property
    def changed(self) -> bool:
        """Whether a variable has another content now, for instance since a loop assigned it."""
        return any(cell_content(cell, _EMPTY) is not content for cell, content in self._noted.values())

    def note(self, f: Any) -> None:
        """Record what a function closes over, also through functions in there. Other values have no closure."""
        if isinstance(f, PartialCall):
            f = f.f
        elif isinstance(f, partial):
            f = f.func
        if not isinstance(f, FunctionType):
            return
        for cell in f.__closure__ or ():
            if id(cell) in self._noted:
                continue
            content = cell_content(cell, _EMPTY)
            self._noted[id(cell)] = cell, content
            fields = [getattr(content, name, None) for name in getattr(content, "__dataclass_fields__", ())]
            self.located |= any(type(value) is Located for value in (content, *fields))
            self.note(content)


class _Uncollected:
    """How many threads want the collector paused, and whether it ran before the first of them."""

    def __init__(self):
        self.lock, self.count, self.was = threading.Lock(), 0, True


_UNCOLLECTED = _Uncollected()

MANY = 100_000
"""More new objects than this since the last collection are a program, and not what a call leaves."""


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Inside, the garbage collector does not run on its own, in any thread.

    A program is tens of thousands of objects that stay, and collections that pass over them take half of the time of
    tracing. Afterwards, many new objects are moved to the oldest generation at once, which spares three passes over
    them, unless the application has frozen objects of its own. In training, which values are alive after a step must
    not depend on when a collection happens to run (`training/programs.py`).
    """
    state = _UNCOLLECTED
    with state.lock:
        state.was = gc.isenabled() if state.count == 0 else state.was
        state.count += 1
        gc.disable()
    try:
        yield
    finally:
        with state.lock:
            state.count -= 1
            if state.count == 0 and state.was:
                if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()  # moves all objects to the oldest generation
                gc.enable()
