"""A choreography as a value: every step of one call, traced on shapes, and the readings of it.

`Tracing` writes down what a dry run does, whoever would do it: a step knows its owners, its phase and protocol, and the
places of its operands. A `Program` keeps the steps that its results and messages need, those of the setup included. It
holds shapes and public values only. What a process takes of it is in `part.py`, and `party` is one party's part as
Python code (`generated.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, MisplacedValueError
from ...shown import Shown
from ..net import Located, Party, Phase
from ..steps import Compute, Draw, Header, Move, Read, Step
from .closures import Closures
from .nodes import Input, Node, Slot, Taken
from .text import PartyProgram, listed, spelled


def _needed(nodes: Iterable[Node], wanted: set[Slot], kept: type | tuple[type, ...]) -> list[Node]:
    """The nodes of a kind that is kept, those that are not pure, and all that these and the wanted slots need."""
    found, needed = [], set(wanted)
    for node in reversed(list(nodes)):
        asked = isinstance(node.step, kept) or (isinstance(node.step, Compute) and not node.step.pure)
        if asked or not needed.isdisjoint(node.slots):
            found.append(node)
            needed.update(node.taken)
    return found[::-1]


PLACE: ContextVar[str] = ContextVar("the layer that is traced", default="")
"""Where in a model the steps that are traced belong, for errors."""


class Tracing:
    """What one net of a dry session writes its steps to. A call's tracing knows that of the setup.

    Args:
        alone: whether it is the setup of one program, and not of all of a model's: then its checks are the program's.
    """

    def __init__(self, call: int, setup: Tracing | None = None, *, alone: bool = False):
        self._call, self._setup, self._alone = call, setup, alone
        self._known = (call, setup._call if setup else call)
        self._lock: threading.RLock = setup._lock if setup else threading.RLock()
        """A setup is traced in several threads."""
        self._nodes: list[Node] = []
        self._inputs: list[Input] = []
        self._read: list[tuple[Any, Taken]] = []
        self._relied: dict[Slot, None] = {}
        self._closures = Closures()
        self._strange = False
        """Whether a step took a value of another call."""

    def brought(self, value: Located, name: str) -> None:
        """A party brings a value into the program."""
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
                operands.append(Taken(v.slot))
            else:
                if isinstance(step, Compute):
                    self._closures.note(v)
                operands.append(self._public(v))
        many = isinstance(result, tuple)
        results = result if many else (result,)
        slots = tuple([(self._call, number, i) for i in range(len(results))]) if many else ((self._call, number, 0),)
        self._nodes.append(Node(step, tuple(operands), slots, results, many, PLACE.get()))
        if isinstance(step, Read):
            self._read.append((result, Taken(slots[0])))

    def _public(self, value: Any) -> Any:
        """A public operand as it is now: whoever traces a function of their own may change it afterwards."""
        alone = self._alone or (self._setup is not None and self._setup._alone)
        return value.clone() if alone and type(value) is torch.Tensor else value

    def program(self, results: Any) -> Program:
        """What was traced, with the steps of the setup that it needs.

        Args:
            results: a tree of what was read, and of what is public.

        Raises:
            ArgumentError: a step's function takes something of its call past its arguments, a step takes a value of
                another call, two inputs have one name, what the setup needs is no input of the setup, or a result is
                neither read nor public.
        """
        with self._lock:
            return self._program(results)

    def _program(self, results: Any) -> Program:
        before = self._setup or Tracing(-1)
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
        relied = [node.slots[0] for node in before._nodes if _checks(node)] if before._alone else self._relied
        setup = _ordered(before._nodes, [*relied, *(slot for node in call for slot in node.taken)])
        brought = {i.slot: i for i in (*before._inputs, *self._inputs)}
        needed = dict.fromkeys(slot for node in (*setup, *call) for slot in node.taken)
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
    """The steps that the wanted values need, in the order in which these need them, whatever else was traced before.

    Draws have numbers of their own.
    """
    made = {slot: node for node in nodes for slot in node.slots}
    found: dict[Node, Node] = {}
    ahead, draws = list(reversed(wanted)), itertools.count()
    while ahead:
        node = made.get(ahead[-1])
        missing = [slot for slot in node.taken if slot in made and made[slot] not in found] if node else []
        if node is None or node in found or not missing:
            ahead.pop()
            if node is not None and node not in found:
                draw = isinstance(node.step, Draw)
                found[node] = replace(node, step=replace(node.step, number=next(draws))) if draw else node
        else:
            ahead += reversed(missing)
    return list(found.values())


class Program(Shown):
    """One call of a choreography. Two programs are equal if everybody does the same in them: if their digests are.

    Attributes:
        setup, call: its steps in order, those that are taken once a session, and those of each call.
        inputs: what the parties bring.
        leaves, tree: what the caller gets, as a tree: `Taken` where a party reads it, and what is public in it.
        before: that of which the setup is a part; programs that have it in common have steps of it in common.
    """

    def __init__(
        self, setup: list[Node], call: list[Node], inputs: list[Input], leaves: list[Any], tree: Any, before: Tracing
    ):
        self.setup, self.call, self.inputs, self.before = setup, call, inputs, before
        self.leaves, self.tree = leaves, tree
        self.parts: dict[frozenset[Party], Any] = {}
        """What a process takes of it, by who is there; see `part.py`."""

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
        """Who takes part, in the order of their names."""
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
        """What one party does, by its name or role.

        Raises:
            MisplacedValueError: no such party takes part, or several have that role.
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
        """SHA-256 of everybody's code (without its comments) and constants, and of the form of the results."""
        said = ["learned" if type(y) is Taken else spelled(y) for y in self.leaves]
        results = f"{self.tree} {said}"
        found = hashlib.sha256(results.encode())
        for party in self.parties:
            theirs = self.party(party.name)
            code = "\n".join(line for line in theirs.code.splitlines() if not line.lstrip().startswith("# "))
            for part in (party.name, code, *(spelled(v) for v in theirs.constants.values()), results):
                found.update(len(part).to_bytes(8, "big") + part.encode())
        return found.hexdigest()

    def draw(self) -> str:
        """A picture of who sends what to whom, round after round."""
        return listed(self.messages, self.parties)

    def shown(self) -> Iterator[RenderableType]:
        """What it costs by phase, and the picture."""
        table = Table(title=repr(self))
        for column in ("phase", "messages", "bytes", "rounds"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase, cost in self.cost.items():
            table.add_row(phase, *(f"{cost[name]:,}" for name in ("messages", "bytes", "rounds")))
        yield table
        yield Text(self.draw(), no_wrap=True)
