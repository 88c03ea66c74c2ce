"""A program's steps as this process takes part in them, on values of its own.

Whoever runs a choreography verb by verb works out who holds what, checks every message against its declaration, and
follows every shape. None of this depends on the call: a `Part` takes the steps of a traced program in their order, with
the same draws and messages. (Choreographic programming calls one party's part the endpoint projection.) Messages
between others stay in it, for observers are told of them too.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, DtypeError, MaterialError, SectorchError, ShapeError
from ..net import Party, Phase
from ..shapes import shape_of
from ..steps import Compute, Draw, Move, Runtime, Step
from .material import Material
from .nodes import Input, Node, Slot, Taken, uncollected
from .trace import Program


@final
@dataclass(slots=True)
class Fixed:
    """A value that is the same in every call: public, or a shape where its content is not here. It does not change."""

    value: Any


@dataclass(slots=True)
class Line:
    """A step with the places of its values here.

    Attributes:
        outputs: which of the results are used later, and where they go; None stands for a single result.
        place: where in the model it belongs, for errors.
        held: whether what it is taken on is here.
        needed: the values that it takes.
        drops: the values that nothing after it needs.
    """

    step: Step
    sources: tuple[Slot | Fixed, ...]
    outputs: list[tuple[int | None, Slot]]
    place: str
    fits: bool
    held: bool
    needed: frozenset[Slot]
    drops: tuple[Slot, ...] = ()

    def take(self, runtime: Runtime, call: int, values: dict[Slot, Any]) -> None:
        """Take the step on the values at its places, and put its results there."""
        take([self], runtime, call, values)


def lines_of(nodes: list[Node], shapes: Mapping[Slot, Any], here: frozenset[Party]) -> list[Line]:
    """The steps that somebody who is here takes part in, and all messages.

    Args:
        shapes: what the program's values look like where they are absent.
    """
    found = []
    for node in nodes:
        if not node.step.owners & here and not isinstance(node.step, Move):
            continue
        held = bool(node.step.holders & here)
        sources = tuple([
            (o.slot if held else Fixed(shapes[o.slot])) if type(o) is Taken else Fixed(o if held else shape_of(o))
            for o in node.operands
        ])  # fmt: skip
        outputs: list[tuple[int | None, Slot]] = list(enumerate(node.slots)) if node.many else [(None, node.slots[0])]
        first = shapes[node.operands[0].slot] if node.operands and type(node.operands[0]) is Taken else None
        fits = not node.many and _alike(first, node.results[0])
        needed = frozenset(node.taken if held else ())
        found.append(Line(node.step, sources, outputs, node.place, fits, held, needed))
    return found


def _alike(x: Any, y: Any) -> bool:
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return tensors and (x.shape, x.dtype) == (y.shape, y.dtype)


def _shapes_of(program: Program) -> dict[Slot, Any]:
    """What every value of a program looks like, as meta tensors."""
    found = {slot: value for node in program.nodes for slot, value in zip(node.slots, node.results, strict=True)}
    return found | {i.slot: torch.empty(i.shape, dtype=i.dtype, device="meta") for i in program.inputs}


class Part:
    """The part of a program that a process takes which is the parties `here`. It holds no secret.

    Attributes:
        shapes: what all values of the program look like.
        settled, settled_online: the values of the setup that a call needs, and those that its online steps need.
        kept: the places of what the online steps use of those ahead of the query.
    """

    def __init__(self, program: Program, here: frozenset[Party]):
        self.program, self.here = program, here
        self.splits: dict[Any, Any] = {}  # `split.split_of`
        self.shapes = _shapes_of(program)
        lines = lines_of(program.call, self.shapes, here)
        made = {slot for line in lines for _, slot in line.outputs}
        self._results = [_result(y, made, program.call) for y in program.leaves]
        learned = {slot for slot in self._results if type(slot) is not Fixed}
        lines = _sends_first(_in_place(_needed(lines, learned), learned), here)
        offline = [line for line in lines if line.step.phase != Phase.ONLINE]
        online = [line for line in lines if line.step.phase == Phase.ONLINE]
        first = {slot for line in offline for _, slot in line.outputs}
        after = {slot for line in online for slot in line.needed}
        needed = learned.union(*(line.needed for line in lines))
        for line in lines:
            line.outputs = [(i, slot) for i, slot in line.outputs if slot in needed]
        self.kept = sorted(first & (after | learned))
        self._all, self._learned, self._phases = with_drops(lines, learned), learned, (offline, online)
        brought: dict[Slot, Input] = {i.slot: i for i in program.inputs}
        self.settled_online = after - made - set(brought)
        self.settled = needed - made - set(brought)
        self._inputs = [[brought[slot] for slot in sorted(set(brought) & some)] for some in (needed, after)]
        self._inputs.insert(1, [brought[slot] for line in offline for slot in sorted(line.needed & set(brought))])

    def __repr__(self) -> str:
        return f"Part({len(self._phases[0])} offline steps, {len(self._phases[1])} online)"

    @cached_property
    def offline(self) -> list[Line]:
        """The steps ahead of the query, in their order."""
        return with_drops(self._phases[0], set(self.kept))

    @cached_property
    def online(self) -> list[Line]:
        """The steps that need it, in their order."""
        return with_drops(self._phases[1], self._learned)

    @property
    def lines(self) -> list[Line]:
        """All steps of a call, in their order."""
        return self._all

    @property
    def brought(self) -> list[Input]:
        """What the parties bring into a call."""
        return self._inputs[0]

    def call(self, runtime: Runtime, call: int, settled: Mapping[Slot, Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        """The whole call.

        Args:
            call: its number, which addresses its randomness.
            settled: the values of the setup. inputs: by name.
        """
        return self.learned(self._taken(self._all, runtime, call, settled, given(self._inputs[0], inputs)))

    def prepare(
        self, runtime: Runtime, call: int, settled: Mapping[Slot, Any], inputs: Mapping[str, torch.Tensor]
    ) -> list[Any]:
        """The offline steps; what the online ones use of them, in the order of their places."""
        values = self._taken(self.offline, runtime, call, settled, given(self._inputs[1], inputs))
        return [values[slot] for slot in self.kept]

    def resume(
        self,
        runtime: Runtime,
        material: Material,
        setup: int | None,
        settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        """The online steps on what was prepared, which is used up.

        Raises:
            MaterialError: it was used, or is of another session, program or model.
        """
        same(material.inputs, inputs, "the material was prepared")
        brought = given(self._inputs[2], inputs)
        kept = material.take(runtime.session, self.program.digest, setup)
        if len(kept) != len(self.kept):
            raise MaterialError("the material was prepared by another party")
        brought |= zip(self.kept, kept, strict=True)
        return self.learned(self._taken(self.online, runtime, material.call, settled, brought))

    def _taken(self, lines: list[Line], runtime: Runtime, call: int, *known: Mapping[Slot, Any]) -> dict[Slot, Any]:
        if runtime.graphs is not None:
            return runtime.graphs.take(self, lines, runtime, call, *known)
        return take(lines, runtime, call, {**known[0], **known[1]})

    def known(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the inputs that offline steps take."""
        return {one.name: inputs[one.name] for one in self._inputs[1]}

    def learned(self, values: dict[Slot, Any]) -> Any:
        """The results: copies, which autograd may use and their reader may change."""
        leaves = [slot.value if type(slot) is Fixed else values[slot] for slot in self._results]
        leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, self.program.tree)


def part_of(program: Program, here: frozenset[Party]) -> Part:
    """What a process takes of a program that holds these parties' values; worked out once."""
    if here not in program.parts:
        with uncollected():
            program.parts[here] = Part(program, here)
    return program.parts[here]


def _result(leaf: Any, made: set[Slot], nodes: list[Node]) -> Slot | Fixed:
    """Where a result is found; its shape where whoever reads it is not here."""
    if type(leaf) is not Taken:
        return Fixed(leaf)
    if leaf.slot in made:
        return leaf.slot
    (node,) = (node for node in nodes if node.slots == (leaf.slot,))
    return Fixed(node.results[0])


def same(before: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise ArgumentError where an input has another value than the one that something was made with."""
    for name, value in before.items():
        x = inputs.get(name, value)
        if x is not value and not (isinstance(x, torch.Tensor) and torch.equal(x, value)):
            raise ArgumentError(f"{what} with another '{name}' than this; a program has it once, trace it anew")


def _said(x: Any) -> str:
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return "a tensor without a content" if x.is_meta else f"one of layout {x.layout}"
    return f"a {type(x).__name__}"


def given(brought: list[Input], inputs: Mapping[str, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """The inputs at their places.

    Raises:
        ArgumentError: one is missing. DtypeError: it is no plain tensor with a content. ShapeError: it has another
            shape or type than in the program.
    """
    found = {}
    for one in brought:
        if one.name not in inputs:
            raise ArgumentError(f"the program takes '{one.name}' of {one.party}, and it is not among the inputs")
        x = inputs[one.name]
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or x.layout != torch.strided:
            raise DtypeError(f"the program takes a plain tensor for '{one.name}', got {_said(x)}")
        if (x.shape, x.dtype) != (one.shape, one.dtype):
            way = "trace the program for these"
            if x.is_floating_point() and not one.dtype.is_floating_point:
                way = "encode fractions as ring elements (sectorch.ring.encode)"
            raise ShapeError(
                f"'{one.name}' is {tuple(one.shape)} of {one.dtype} in the program, and {tuple(x.shape)} of {x.dtype} "
                f"came; {way}"
            )
        found[one.slot] = x
    return found


@torch.inference_mode()
def take(lines: list[Line], runtime: Runtime, call: int, values: dict[Slot, Any]) -> dict[Slot, Any]:
    """Take these steps; what is left of the values."""
    line = None
    try:
        for line in lines:
            contents = [source.value if type(source) is Fixed else values[source] for source in line.sources]
            result = line.step.run(runtime, call, contents)
            for output, slot in line.outputs:
                values[slot] = result if output is None else result[output]
            for slot in line.drops:
                del values[slot]
    except SectorchError as error:
        error.place = line.place if line else ""
        raise
    return values


def _needed(lines: list[Line], learned: set[Slot]) -> list[Line]:
    """The steps without draws and computations whose results nothing needs."""
    found, needed = [], set(learned)
    for line in reversed(lines):
        lost = isinstance(line.step, Draw) or (isinstance(line.step, Compute) and line.step.pure)
        if not lost or any(slot in needed for _, slot in line.outputs):
            found.append(line)
            needed |= line.needed
    return found[::-1]


_IN_PLACE = {
    operator.add: operator.iadd, operator.sub: operator.isub, operator.mul: operator.imul,
    operator.xor: operator.ixor, operator.and_: operator.iand, operator.or_: operator.ior,
}  # fmt: skip


def _in_place(lines: list[Line], kept: set[Slot]) -> list[Line]:
    """The steps; arithmetic writes its result over a first operand that nobody else has and nothing else needs."""
    uses = Counter(slot for line in lines for slot in line.sources if type(slot) is not Fixed)
    fresh: dict[Slot, Phase] = {}  # not across phases: prepared material may be memory of another kind
    for line in lines:
        if not isinstance(line.step, Compute):
            continue
        f, phase, first = line.step.f, line.step.phase, line.sources[0] if line.sources else None
        instead = _IN_PLACE.get(f) if isinstance(f, BuiltinFunctionType) else None
        if instead is not None or getattr(f, "fresh", False):
            fresh[line.outputs[0][1]] = phase
        if instead is None or first is None or type(first) is Fixed or not line.fits:
            continue
        if fresh.get(first) == phase and uses[first] == 1 and first not in kept:
            line.step = replace(line.step, f=instead)
    return lines


PASSED = 4 << 20
"""Bytes sent past a message that is waited for, beyond which nothing more is begun; a quarter of a channel's window."""
BESIDE = 2 << 10
"""More than what a message takes beside its bytes."""


def _sends_first(lines: list[Line], here: frozenset[Party]) -> list[Line]:
    """The steps; a message from elsewhere is waited for where it is needed, and what does not need it comes before.

    Two parties that open a value to each other so send at the same time, where one would answer the other. What is
    waited for keeps its order, and so does what is sent. Nobody waits in a circle: take, of the messages that somebody
    has not read, the first in the program's order. Its sender waits for none before it. Its reader has read all before
    it, and sends past it only what a channel takes although nobody reads.
    """
    found: list[Line] = []
    waiting: deque[tuple[Line, int]] = deque()
    sent = 0
    for line in lines:
        header = line.step.header if isinstance(line.step, Move) else None
        if header is not None and header.dst in here and header.src not in here:
            waiting.append((line, sent))
            continue
        sends = header is not None and header.src in here
        while waiting and (_makes(waiting, line.needed) or (sends and sent - waiting[0][1] > PASSED)):
            found.append(waiting.popleft()[0])
        found.append(line)
        sent += header.bytes + BESIDE if header is not None and sends else 0
    return found + [line for line, _ in waiting]


def _makes(waiting: Iterable[tuple[Line, int]], needed: frozenset[Slot]) -> bool:
    return any(slot in needed for line, _ in waiting for _, slot in line.outputs)


def with_drops(lines: list[Line], kept: set[Slot]) -> list[Line]:
    """Each step with the values that nothing after it needs."""
    last = {slot: at for at, line in enumerate(lines) for slot in line.needed}
    return [
        Line(
            line.step, line.sources, line.outputs, line.place, line.fits, line.held, line.needed,
            tuple([slot for slot in line.needed if last[slot] == at and slot not in kept]),
        )
        for at, line in enumerate(lines)
    ]  # fmt: skip
