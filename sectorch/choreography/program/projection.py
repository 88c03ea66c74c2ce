"""The projection of a program to the parties of one process, and how it runs.

A choreography that runs verb by verb works out who holds each value, checks each message against its declaration, and
computes each shape. None of this depends on the call. A `Projection` is therefore worked out once from a traced program
(`trace.py`) and takes the steps that concern its parties, in the program's order and with the same draws and messages.
(Choreographic programming calls this the endpoint projection.) Messages between other parties stay in it, since
observers are told of them.

How a call runs (`Session.run`):

1. `Setup.values` takes the missing steps of the setup, which are taken once a session, and returns their values.
2. `Projection.call` takes the steps of the call. Or `Projection.prepare` takes the offline steps ahead of the query,
   which gives `Material`, and `Projection.resume` takes the online steps on it later.
3. `take` runs the steps one by one. On a CUDA device `run/cuda_graphs.py` replays them.

A dealer's offline steps can be taken apart from the rest (`DealerSplit`), for audited dealing.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import BuiltinFunctionType
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, DtypeError, MaterialError, SectorchError, ShapeError
from ..located import shape_of
from ..net import Compute, Draw, Header, Move, Party, Phase, Runtime, Step
from ..pages import give_back
from .trace import Input, Node, OperandRef, Program, Slot, garbage_collection_paused

# Offline material: the values of a call that do not depend on the query, computed ahead of it.


@dataclass
class Material:
    """The results of the offline steps of one call that the online steps use. Its repr shows no content.

    Attributes:
        call: the number of the call.
        session: the name of the session.
        program: the digest of the program.
        setup: the number of the setup that it was made with, which belongs to one model.
        values: the results, in the order of the program.
    """

    call: int
    session: bytes
    program: str
    setup: int | None
    values: list[Any] | None = field(repr=False)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """The inputs that it was made with. They are not kept on disk, where a party has one model."""
    digests: bytes = field(default=b"", repr=False)
    """Of what was sent for it, where S signs what it sends (`sectorch/decoys.py`)."""
    _claimed: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def take(self, session: bytes, program: str, setup: int | None) -> list[Any]:
        """Return the values, once only, since their masks hide one query. A refusal changes nothing.

        Args:
            setup: None in a session that has one model only and was resumed.

        Raises:
            MaterialError: the material is of another session, program or model, or was used already.
        """
        if self.session != session:
            raise MaterialError("the prepared material belongs to another session")
        if self.program != program:
            raise MaterialError("the material was prepared for another program, other shapes or other arguments")
        if setup is not None and self.setup != setup:
            raise MaterialError("the material was prepared for another model, or for other weights")
        if not self._claimed.acquire(blocking=False):
            raise MaterialError(f"the material of call {self.call} was used already; prepare it again")
        values, self.values = self.values or [], None
        return values

    @property
    def bytes(self) -> int:
        """The memory that it occupies."""
        held = {v.untyped_storage().data_ptr(): v for v in self.values or () if isinstance(v, torch.Tensor)}
        return sum(v.untyped_storage().nbytes() for v in held.values())


# The projection.


@final
@dataclass(slots=True)
class ConstantValue:
    """A value that is the same in every call: public, or a shape where its content is elsewhere. It does not change."""

    value: Any


@dataclass(slots=True)
class ProjectedStep:
    """A step as this process takes it.

    Attributes:
        sources: the slot of each operand, or a constant.
        outputs: the results that are used later: the number of each (None of a single result) and its slot.
        place: the layer that it belongs to; errors name it.
        fits: the result has the shape and type of the first operand.
        held: the operands are in this process.
        needed: the slots of the operands.
        drops: the slots of operands that no later step needs.
    """

    step: Step
    sources: tuple[Slot | ConstantValue, ...]
    outputs: list[tuple[int | None, Slot]]
    place: str
    fits: bool
    held: bool
    needed: frozenset[Slot]
    drops: tuple[Slot, ...] = ()

    def take(self, runtime: Runtime, call: int, values: dict[Slot, Any]) -> None:
        """Take the step on these values, and add its results to them."""
        take([self], runtime, call, values)


def lines_of(nodes: list[Node], shapes: Mapping[Slot, Any], here: frozenset[Party]) -> list[ProjectedStep]:
    """The steps whose results the parties `here` hold, and all messages.

    Args:
        shapes: of the program's values, as meta tensors.
    """
    found = []
    for node in nodes:
        if not node.step.owners & here and not isinstance(node.step, Move):
            continue
        held = bool(node.step.holders & here)
        sources = tuple([
            (o.slot if held else ConstantValue(shapes[o.slot]))
            if type(o) is OperandRef
            else ConstantValue(o if held else shape_of(o))
            for o in node.operands
        ])  # fmt: skip
        outputs: list[tuple[int | None, Slot]] = list(enumerate(node.slots)) if node.many else [(None, node.slots[0])]
        first = shapes[node.operands[0].slot] if node.operands and type(node.operands[0]) is OperandRef else None
        fits = not node.many and _alike(first, node.results[0])
        needed = frozenset(node.operand_slots if held else ())
        found.append(ProjectedStep(node.step, sources, outputs, node.place, fits, held, needed))
    return found


def _alike(x: Any, y: Any) -> bool:
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return tensors and (x.shape, x.dtype) == (y.shape, y.dtype)


class Projection:
    """The steps of a program for the process that holds the values of the parties `here`. It holds no secret.

    Attributes:
        shapes: of all values of the program, as meta tensors.
        settled, settled_online: the slots of the setup that a call needs, and those that its online steps need.
        kept: the slots of the offline results that the online steps use.
    """

    def __init__(self, program: Program, here: frozenset[Party]):
        self.program, self.here = program, here
        self.splits: dict[Any, DealerSplit] = {}  # by dealer, see `split_of`
        results = ((node.slots, node.results) for node in program.nodes)
        self.shapes = {slot: value for slots, values in results for slot, value in zip(slots, values, strict=True)}
        self.shapes |= {i.slot: torch.empty(i.shape, dtype=i.dtype, device="meta") for i in program.inputs}
        lines = lines_of(program.call, self.shapes, here)
        made = {slot for line in lines for _, slot in line.outputs}
        self._results = [_result(y, made, program.call) for y in program.leaves]
        learned = {slot for slot in self._results if type(slot) is not ConstantValue}
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
        return f"Projection({len(self._phases[0])} offline steps, {len(self._phases[1])} online)"

    @cached_property
    def offline(self) -> list[ProjectedStep]:
        """The steps ahead of the query, in their order."""
        return with_drops(self._phases[0], set(self.kept))

    @cached_property
    def online(self) -> list[ProjectedStep]:
        """The steps that need it, in their order."""
        return with_drops(self._phases[1], self._learned)

    @property
    def lines(self) -> list[ProjectedStep]:
        """All steps of a call, in their order."""
        return self._all

    @property
    def required_inputs(self) -> list[Input]:
        """The inputs of a call."""
        return self._inputs[0]

    @cached_property
    def material(self) -> int:
        """Bytes of the offline results that the online steps use."""
        return sum(_bytes(self.shapes[slot]) for slot in self.kept)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes that this process needs for one call beside its setup: of "call", "prepare" and "resume".

        An estimate from the shapes: the most values that exist at the same time, once more the operands and results of
        the largest step (limbs of a product), and the messages on their way, up to `IN_FLIGHT`. Material counts twice
        in "prepare" and "resume", since it is sealed and read as a whole.
        """
        here, kept = self.here, self.material
        moved = [m for m in self.program.messages if m.phase != Phase.SETUP and (m.src in here or m.dst in here)]

        def needed(lines: list[ProjectedStep], first: Iterable[Slot], done: Callable[[Phase], bool]) -> int:
            live = most = sum(_bytes(self.shapes[slot]) for slot in first)
            largest = 0
            for line in lines:
                made = sum(_bytes(self.shapes[slot]) for _, slot in line.outputs)
                largest = max(largest, made + sum(_bytes(self.shapes[slot]) for slot in line.needed - self.settled))
                live += made
                most = max(most, live)
                live -= sum(_bytes(self.shapes[slot]) for slot in line.drops if slot not in self.settled)
            return most + largest + min(IN_FLIGHT, sum(m.bytes for m in moved if done(m.phase)))

        slots = [[one.slot for one in some] for some in self._inputs]
        return {
            "call": needed(self._all, slots[0], lambda _: True),
            "prepare": kept + needed(self.offline, slots[1], lambda phase: phase != Phase.ONLINE),
            "resume": kept + needed(self.online, [*slots[2], *self.kept], lambda phase: phase == Phase.ONLINE),
        }

    def call(self, runtime: Runtime, call: int, settled: Mapping[Slot, Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        """Take all steps of a call, and return its results.

        Args:
            call: its number, which addresses its randomness.
            settled: the values of the setup.
            inputs: by name.
        """
        return self.copy_results(self._take(self._all, runtime, call, settled, bring_inputs(self._inputs[0], inputs)))

    def prepare(
        self, runtime: Runtime, call: int, settled: Mapping[Slot, Any], inputs: Mapping[str, torch.Tensor]
    ) -> list[Any]:
        """Take the offline steps, and return the results that the online steps use, in the order of their slots."""
        values = self._take(self.offline, runtime, call, settled, bring_inputs(self._inputs[1], inputs))
        return [values[slot] for slot in self.kept]

    def resume(
        self,
        runtime: Runtime,
        material: Material,
        setup: int | None,
        settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        """Take the online steps on prepared material, which is used up, and return the results.

        Raises:
            MaterialError: the material was used, or is of another session, program or model.
        """
        check_fixed_inputs(material.inputs, inputs, "the material was prepared")
        brought = bring_inputs(self._inputs[2], inputs)
        kept = material.take(runtime.session, self.program.digest, setup)
        if len(kept) != len(self.kept):
            raise MaterialError("the material was prepared by another party")
        brought |= zip(self.kept, kept, strict=True)
        return self.copy_results(self._take(self.online, runtime, material.call, settled, brought))

    def _take(
        self, lines: list[ProjectedStep], runtime: Runtime, call: int, *known: Mapping[Slot, Any]
    ) -> dict[Slot, Any]:
        if runtime.graphs is not None:
            return runtime.graphs.take(self, lines, runtime, call, *known)
        return take(lines, runtime, call, {**known[0], **known[1]})

    def offline_inputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs that offline steps take."""
        return {one.name: inputs[one.name] for one in self._inputs[1]}

    def copy_results(self, values: dict[Slot, Any]) -> Any:
        """The results as copies, which autograd may use and the caller may change."""
        leaves = [slot.value if type(slot) is ConstantValue else values[slot] for slot in self._results]
        leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, self.program.tree)


IN_FLIGHT = 32 << 20
"""Bytes of messages that are on their way at the same time: what one session's channels hold in both directions."""


def part_of(program: Program, here: frozenset[Party]) -> Projection:
    """The projection of a program to these parties, worked out once."""
    if here not in program.parts:
        with garbage_collection_paused():
            program.parts[here] = Projection(program, here)
    return program.parts[here]


def _result(leaf: Any, made: set[Slot], nodes: list[Node]) -> Slot | ConstantValue:
    """The slot of a result, or its shape where the party that reads it is elsewhere."""
    if type(leaf) is not OperandRef:
        return ConstantValue(leaf)
    if leaf.slot in made:
        return leaf.slot
    (node,) = (node for node in nodes if node.slots == (leaf.slot,))
    return ConstantValue(node.results[0])


def check_fixed_inputs(before: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise ArgumentError where an input has another value than the setup or the material was made with."""
    for name, value in before.items():
        x = inputs.get(name, value)
        if x is not value and not (isinstance(x, torch.Tensor) and torch.equal(x, value)):
            raise ArgumentError(f"{what} with another '{name}' than this; a program has it once, trace it anew")


def _kind_of(x: Any) -> str:
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return "a tensor without a content" if x.is_meta else f"one of layout {x.layout}"
    return f"a {type(x).__name__}"


def bring_inputs(brought: list[Input], inputs: Mapping[str, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """The inputs by their slots.

    Raises:
        ArgumentError: an input is missing.
        DtypeError: an input is no plain tensor with a content.
        ShapeError: an input has another shape or type than in the program.
    """
    found = {}
    for one in brought:
        if one.name not in inputs:
            raise ArgumentError(f"the program takes '{one.name}' of {one.party}, and it is not among the inputs")
        x = inputs[one.name]
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or x.layout != torch.strided:
            raise DtypeError(f"the program takes a plain tensor for '{one.name}', got {_kind_of(x)}")
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
def take(lines: list[ProjectedStep], runtime: Runtime, call: int, values: dict[Slot, Any]) -> dict[Slot, Any]:
    """Take these steps one by one, and return the values that are not dropped."""
    line = None
    try:
        for line in lines:
            contents = [source.value if type(source) is ConstantValue else values[source] for source in line.sources]
            result = line.step.run(runtime, call, contents)
            for output, slot in line.outputs:
                values[slot] = result if output is None else result[output]
            for slot in line.drops:
                del values[slot]
    except SectorchError as error:
        error.place = line.place if line else ""
        raise
    return values


def _needed(lines: list[ProjectedStep], learned: set[Slot]) -> list[ProjectedStep]:
    """The steps without the draws and computations whose results no step needs."""
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


def _in_place(lines: list[ProjectedStep], kept: set[Slot]) -> list[ProjectedStep]:
    """The steps, in which arithmetic overwrites a first operand that is fresh memory and that no other step needs."""
    uses = Counter(slot for line in lines for slot in line.sources if type(slot) is not ConstantValue)
    fresh: dict[Slot, Phase] = {}  # not across phases: prepared material may be memory of another kind
    for line in lines:
        if not isinstance(line.step, Compute):
            continue
        f, phase, first = line.step.f, line.step.phase, line.sources[0] if line.sources else None
        instead = _IN_PLACE.get(f) if isinstance(f, BuiltinFunctionType) else None
        if instead is not None or getattr(f, "fresh", False):
            fresh[line.outputs[0][1]] = phase
        if instead is None or first is None or type(first) is ConstantValue or not line.fits:
            continue
        # Nobody else may read the memory: it was made in this phase, this step alone uses it, and it is no result.
        if fresh.get(first) == phase and uses[first] == 1 and first not in kept:
            line.step = replace(line.step, f=instead)
    return lines


PASSED = 4 << 20
"""The most bytes that are sent past an unread message; a quarter of a channel's window."""
BESIDE = 2 << 10
"""An upper bound of a message's bytes on the wire beside its content."""


def _sends_first(lines: list[ProjectedStep], here: frozenset[Party]) -> list[ProjectedStep]:
    """The steps, in which a message from elsewhere is received where it is first needed, after what does not need it.

    Two parties that open a value to each other therefore send at the same time. Messages are received in the program's
    order, and sent in it. This makes no deadlock: of the unread messages take the first in the program's order. Its
    sender waits for no message before it. Its reader has read all messages before it, and sends past it at most what a
    channel buffers.
    """
    found: list[ProjectedStep] = []
    waiting: deque[tuple[ProjectedStep, int]] = deque()
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


def _makes(waiting: Iterable[tuple[ProjectedStep, int]], needed: frozenset[Slot]) -> bool:
    return any(slot in needed for line, _ in waiting for _, slot in line.outputs)


def with_drops(lines: list[ProjectedStep], kept: set[Slot]) -> list[ProjectedStep]:
    """The steps, each with the slots that no later step needs."""
    last = {slot: at for at, line in enumerate(lines) for slot in line.needed}
    return [
        ProjectedStep(
            line.step, line.sources, line.outputs, line.place, line.fits, line.held, line.needed,
            tuple([slot for slot in line.needed if last[slot] == at and slot not in kept]),
        )
        for at, line in enumerate(lines)
    ]  # fmt: skip


# The setup: steps that the programs of one model have in common, and that are taken once a session.
#
# Draws, messages and steps with a party's own randomness are taken once, in the order of the programs that first need
# them. Every party counts all of them, so that all agree on their numbers. Computed values are worked out when they are
# needed, and kept. A mask that programs use in a prepared form only is kept in that form only, and restored from it for
# a program that needs the mask itself.


class Setup:
    """The setup of one model's programs in a session, at the parties of this process. Its repr shows no content.

    Args:
        call: the number that addresses its randomness, or None in a resumed session, where no step is drawn or sent a
            second time.
        of: a setup whose numbers of draws this one shares.
    """

    def __init__(self, call: int | None, of: Setup | None = None):
        self.call = call
        self._lock = threading.Lock()
        self._values: dict[Slot, Any] = {}
        self._taken: set[Slot] = set()
        """The first slot of each draw, message, check and random step that was taken."""
        self._numbers: dict[Slot, int] = {} if of is None else of._numbers
        """The numbers of the draws, in the order in which they were first taken."""
        self._brought: dict[str, torch.Tensor] = {}
        """The inputs that it was made with."""
        self._of: WeakKeyDictionary[Projection, dict[Slot, Any]] = WeakKeyDictionary()
        self._forms: dict[Slot, tuple[Slot, Callable[[Any], torch.Tensor]]] = {}
        """For each value that is kept in a prepared form only: the form's slot, and the function that restores it."""
        self.note: Callable[[Slot, Header, Any], None] | None = None
        """Is told of each message of the setup that a party of this process sends or receives, with its content."""

    def __repr__(self) -> str:
        return f"Setup({len(self._values)} values)"

    def for_replay(self) -> Setup:
        """An empty setup with the same numbers of draws, to replay another party's steps of this setup."""
        return Setup(self.call, self)

    def draw_numbers(self, program: Program) -> list[int]:
        """The number of each draw in the setup of a program, in its order; -1 for those that were not taken."""
        return [self._numbers.get(slot, -1) for slot in _drawn(program)]

    @classmethod
    def of_numbers(cls, call: int, program: Program, numbers: Sequence[int]) -> Setup:
        """An empty setup to replay steps of one that has these `draw_numbers`."""
        setup = cls(call)
        setup._numbers |= {slot: n for slot, n in zip(_drawn(program), numbers, strict=True) if n >= 0}
        return setup

    def values(self, part: Projection, runtime: Runtime, inputs: Mapping[str, torch.Tensor]) -> dict[Slot, Any]:
        """The values of the setup that a projection needs. Missing steps are taken now.

        Raises:
            SectorchError: a weight does not fit, at its owner, before anything is drawn or sent.
            ArgumentError: an input has another value than the setup was made with.
            MaterialError: the session was resumed, and a step would have to be drawn or sent.
        """
        with self._lock, torch.inference_mode():
            check_fixed_inputs(self._brought, inputs, "the setup was made")
            if part not in self._of:
                self._of[part] = self._settled(part, runtime, inputs)
            return self._of[part]

    def missing_bytes(self, part: Projection) -> int:
        """Bytes that the session will hold besides, once the setup that a projection needs is taken."""
        wanted = part.settled_online if self.call is None else set(part.settled)
        if self.call is not None:
            wanted |= {slot for node in part.program.setup if _kept_here(node, part.here) for slot in node.slots}
        return sum(_bytes(part.shapes[slot]) for slot in wanted.difference(self._values, self._forms))

    def is_complete(self, part: Projection) -> bool:
        """Whether all steps are taken that a projection needs."""
        return part in self._of

    def check(self, part: Projection, runtime: Runtime, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the steps that depend on this process's own inputs alone. Nothing is drawn or sent.

        Raises:
            SectorchError: a weight does not fit, at its owner.
        """
        with self._lock, torch.inference_mode():
            if part not in self._of:
                self._settled(part, runtime, inputs, own=True)

    def repeat_check(self, part: Projection, runtime: Runtime, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the steps of `check` on a setup without values, and keep none: each goes after its last use."""
        plan, count = self._plan(part, part.settled_online)
        last = {slot: at for at, (_, line) in enumerate(plan[:count]) if line for slot in line.needed}
        with torch.inference_mode():
            values = bring_inputs([i for i in part.program.inputs if i.slot in last], inputs)
            for at, (node, line) in enumerate(plan[:count]):
                if line is not None:
                    line.take(runtime, self.call or 0, values)
                for slot in (*node.needs, *node.slots):
                    if last.get(slot, at) <= at:
                        values.pop(slot, None)

    def _settled(
        self, part: Projection, runtime: Runtime, inputs: Mapping[str, torch.Tensor], own: bool = False
    ) -> dict[Slot, Any]:
        wanted = part.settled_online if self.call is None else part.settled
        plan, count = self._plan(part, wanted)
        needed = {slot for _, line in plan if line for slot in line.needed}
        self._restore(needed | wanted)
        brought = [i for i in part.program.inputs if i.slot in needed]
        values = self._values | bring_inputs(brought, inputs)
        last = {slot: at for at, (_, line) in enumerate(plan) if line for slot in line.needed}
        # A value may be forgotten only where no projection that was settled before reads it.
        used, forms, size = wanted.union(*self._of.values()), dict[Slot, Node](), 0
        for at, (node, line) in enumerate(plan[:count] if own else plan):
            if at == count:  # from here on, steps draw and send: the inputs are fixed
                self._brought |= {i.name: inputs[i.name] for i in brought}
            if self._take(node, line, part, runtime, values):
                self._values |= {slot: values[slot] for slot in node.slots if slot in values}
            forms |= {slot: node for slot in node.needs if node.slots[0] in wanted}
            for slot in node.needs - used:
                if last.get(slot) == at and slot in forms:
                    self._drop(slot, forms[slot], part, values)
            size += sum(getattr(part.shapes[slot], "nbytes", 0) for slot in node.slots)
            if size > UNTRIMMED:
                size = 0
                give_back()
        self._values |= {slot: values[slot] for slot in wanted if slot in values}
        self._brought |= {i.name: inputs[i.name] for i in brought}
        if not own and not wanted <= set(self._values):
            raise MaterialError("the session was taken up again, and its setup lacks what this program needs")
        return {} if own else {slot: self._values[slot] for slot in wanted}

    def _drop(self, slot: Slot, node: Node, part: Projection, values: dict[Slot, Any]) -> None:
        """Forget a value that a step prepared as another form, if it can be restored from it (`ring.Linear`)."""
        step, form = node.step, values.get(node.slots[0])
        product: Any = getattr(step.f, "__self__", None) if isinstance(step, Compute) else None
        if slot in self._values and hasattr(product, "restorable") and product.restorable(form):
            self._forms[slot] = node.slots[0], partial(product.restored, weight=part.shapes[slot].shape)
            self._values.pop(slot)
            values.pop(slot, None)

    def _restore(self, needed: set[Slot]) -> None:
        for slot in needed & set(self._forms):
            form, back = self._forms.pop(slot)
            self._values[slot] = back(self._values[form])

    def _take(
        self, node: Node, line: ProjectedStep | None, part: Projection, runtime: Runtime, values: dict[Slot, Any]
    ) -> bool:
        """Take a step, and return whether its results are kept because it is taken once a session."""
        step, first = node.step, node.slots[0]
        once = _once(node)
        if once and (first in self._taken or self.call is None):
            if isinstance(step, Move) and step.holders & part.here:
                values[first] = values[node.operands[0].slot]  # what was sent
            elif step.owners & part.here:
                raise MaterialError("a step of the setup needs what was made before and not kept, or never made here")
            return False
        if isinstance(step, Draw):
            number = self._numbers.setdefault(first, len(self._numbers))
            line = line and replace(line, step=replace(step, number=number))
        if line is not None:
            line.take(runtime, self.call or 0, values)
            if self.note is not None and isinstance(step, Move) and step.owners & part.here:
                self.note(first, step.header, values[first])
        if not _pure(node):
            self._taken.add(first)
        return _kept_here(node, part.here)

    def _plan(self, part: Projection, wanted: set[Slot]) -> tuple[list[tuple[Node, ProjectedStep | None]], int]:
        """The missing steps, each with its projection, and how many of them, which come first, use own values only."""
        kept = set(self._values) | set(self._forms)
        nodes, needed = [], wanted - kept
        for node in reversed(part.program.setup):
            again = self.call is None and _once(node)
            missing = not _pure(node) and node.slots[0] not in self._taken and not again
            if missing or needed.intersection(node.slots):
                nodes.append(node)
                needed |= node.needs - kept
        nodes.reverse()
        brought = {i.slot for i in part.program.inputs if i.party in part.here} | kept
        own: dict[Node, None] = {}
        for node in nodes:
            if isinstance(node.step, Compute) and node.step.owners & part.here and node.needs <= brought:
                own[node] = None
                brought |= set(node.slots)
        # Own steps first: a weight that does not fit is refused before the others see any draw or message.
        nodes = [*own, *(node for node in nodes if node not in own)]
        lines = [next(iter(lines_of([node], part.shapes, part.here)), None) for node in nodes]
        kept = wanted | {slot for node in nodes if _once(node) for slot in node.slots}
        dropping = iter(with_drops([line for line in lines if line], kept))
        return [(node, line and next(dropping)) for node, line in zip(nodes, lines, strict=True)], len(own)


UNTRIMMED = 1 << 27
"""Bytes of results after which freed memory is returned to the operating system."""


def _pure(node: Node) -> bool:
    return isinstance(node.step, Compute) and node.step.pure


def _once(node: Node) -> bool:
    """Whether the step must not be repeated: a draw, a message, or a step with a party's own randomness."""
    return not isinstance(node.step, Compute) or node.step.random


def _kept_here(node: Node, here: frozenset[Party]) -> bool:
    """Whether the parties `here` keep the results of a step for the session: it is taken once, and they have them."""
    step = node.step
    return _once(node) and (step.header.dst in here if isinstance(step, Move) else bool(step.owners & here))


# The offline steps in two halves: those of the dealer, which waits for nobody, and the rest.
#
# A dealer can take its half of a call, keep the results, and send them later without computing them again.


class DealerSplit:
    """The offline steps of a projection in two halves, for a program whose dealer is here and receives nothing in them.

    Args:
        most: the most bytes that are kept of a call between the halves. Where they are more, nothing is kept and
            `finish` cannot be called; the dealer's half then only shows what the dealer sends.

    Attributes:
        part: the projection.
        keeps: whether the results between the halves are kept.
    """

    def __init__(self, part: Projection, dealer: Party, most: int):
        self.part = part
        # A message of the dealer is in both halves: the first notes its content, the second sends it.
        mine = [line for line in part.offline if _is_of(line, dealer)]
        rest = [line for line in part.offline if isinstance(line.step, Move) or not _is_of(line, dealer)]
        made = {slot for line in rest for _, slot in line.outputs}
        needed = {slot for line in rest for slot in line.needed}
        between = (needed.union(part.kept) - made) & {slot for line in mine for _, slot in line.outputs}
        self.keeps = sum(_bytes(part.shapes[slot]) for slot in between) <= most
        self._between, self._kept = sorted(between) if self.keeps else [], part.kept
        draws = [(line, line.step) for line in mine if self.keeps and isinstance(line.step, Draw)]
        self._draws, self._drawn = [step for _, step in draws], [line.outputs[0][1] for line, _ in draws]
        mine = [line for line in mine if not (self.keeps and isinstance(line.step, Draw))]
        self._mine = with_drops(mine, set(self._between))
        self._rest = with_drops(rest, set(part.kept))
        self._brought = [one for one in part.required_inputs if one.slot in needed]

    def begin(self, runtime: Any, call: int, settled: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Take the dealer's half, and return the values to keep.

        Args:
            runtime: a `DealerReplay` (`run/replay.py`), which makes all draws at once: they are kept anyway.
        """
        drawn = runtime.draw_all(self._draws, call)
        values = take(self._mine, runtime, call, {**settled, **dict(zip(self._drawn, drawn, strict=True))})
        return {slot: values[slot] for slot in self._between}

    def finish(
        self,
        runtime: Runtime,
        call: int,
        settled: Mapping[Slot, Any],
        inputs: Mapping[str, torch.Tensor],
        begun: dict[Slot, Any],
    ) -> list[Any]:
        """Take the other half: the messages, and the steps of others who are here. Returns the same as
        `Projection.prepare`.

        Args:
            begun: what `begin` returned; it is used up.
        """
        values = {**settled, **bring_inputs(self._brought, inputs), **begun}
        begun.clear()
        take(self._rest, runtime, call, values)
        return [_in_own_memory(values[slot]) for slot in self._kept]


def split_of(program: Program, runtime: Runtime, dealer: Party, most: int) -> DealerSplit:
    """The two halves of a process's projection of a program, worked out once."""
    part = part_of(program, runtime.here)
    if (dealer, most) not in part.splits:
        part.splits[dealer, most] = DealerSplit(part, dealer, most)
    return part.splits[dealer, most]


def _is_of(line: ProjectedStep, dealer: Party) -> bool:
    return line.step.header.src == dealer if isinstance(line.step, Move) else dealer in line.step.owners


@torch.inference_mode()
def _in_own_memory(value: Any) -> Any:
    """The value, copied where it is a part of larger memory, as draws that were made at once are."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > _bytes(value):
        return value.clone()
    return value


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _drawn(program: Program) -> list[Slot]:
    """The first slot of each draw in the setup of a program."""
    return [node.slots[0] for node in program.setup if isinstance(node.step, Draw)]
