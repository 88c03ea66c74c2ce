"""A program's steps as this process takes part in them, recorded in one call and taken again in others.

Whoever runs a program step by step works out who holds what, checks every message against its declaration, and follows
every shape. None of this depends on the call, so a `Recording` writes the steps down the first time, each with the
places of its values; a `Projection` then takes them on other values, in the same order and with the same draws and
messages. (Choreographic programming calls one party's part the endpoint projection.) Messages between others stay in
it, for observers are told of them too.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..choreography import Located, Phase
from ..errors import MaterialError, SectorchError
from ..steps import Compute, Draw, Move, Read, Runtime, Step, shape_of
from .closures import Closures
from .material import Tape

Slot = tuple[int, int]
"""A value's place: the number of the step that made it (-1 of an input), and which of its results (inputs) it is."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A value that is the same in every call: public, or of the setup; a shape where its content is not here."""

    value: Any


@dataclass(slots=True)
class _Taken:
    number: int
    step: Step
    sources: tuple[Slot | _Fixed, ...]
    outputs: list[tuple[int | None, Slot]]
    """Which of the results are used later, and where they go; None stands for the whole of a single result."""
    place: str = ""
    """Where in the model it belongs, for errors."""
    fits: bool = False
    """Whether the result has the shape and type of the first operand."""

    @property
    def needed(self) -> set[Slot]:
        return {source for source in self.sources if not isinstance(source, _Fixed)}


class Recording:
    """What `Net` writes its steps to, in one call of a program."""

    def __init__(self, runtime: Runtime, call: int):
        self._runtime, self._call = runtime, call
        self._taken: list[_Taken] = []
        self._template = Tape(call, runtime.session)
        self._places: dict[int, int] = {}
        self._read: list[tuple[Any, Slot]] = []
        self._inputs = 0
        self._repeatable = True
        self._closures = Closures()
        self.place = ""

    def brought(self, value: Located, name: str) -> None:
        """A party brings a value into the program: its input, or a constant."""
        if value.phase == Phase.ONLINE:
            value.slot = (self._call, -1, self._inputs)
            self._inputs += 1

    def step(self, number: int, step: Step, values: tuple, result: Any, fingerprint: int) -> None:
        here = self._runtime.here
        if step.phase == Phase.OFFLINE:
            self._places[number] = len(self._template.steps)
            self._template.add(result, fingerprint)
        ours = bool(step.owners & here)
        if not ours and not isinstance(step, Move):
            return
        if isinstance(step, Read):
            self._read.append((result, (number, 0)))
        for f in (step.f, *values) if isinstance(step, Compute) else ():
            self._closures.note(f)
        held = bool(step.holders & here)
        count = len(result) if isinstance(result, tuple) else None
        outputs = [(None, (number, 0))] if count is None else [(i, (number, i)) for i in range(count)]
        sources = tuple(self._source(v, held) for v in values)
        self._taken.append(_Taken(number, step, sources, outputs, self.place, _fits(result, values)))

    def _source(self, value: Any, held: bool) -> Slot | _Fixed:
        if type(value) is not Located:
            return _Fixed(value if held else shape_of(value))
        if held and value.slot is not None and value.slot[0] == self._call:
            return value.slot[1:]
        if held and value.phase != Phase.SETUP:
            self._repeatable = False  # of another call: it will not be the same next time
        return _Fixed(value._value if held else shape_of(value._value))

    def finish(self, results: Any) -> Projection | None:
        """The recorded program, or None if it cannot be taken again.

        Args:
            results: a tree of what was read, and of what is the same in every call.
        """
        if not self._repeatable or self._closures.located or self._closures.changed:
            return None
        leaves, tree = pytree.tree_flatten(results)
        places = [next((slot for read, slot in self._read if read is leaf), _Fixed(leaf)) for leaf in leaves]
        return Projection(self._inputs, self._taken, self._template, self._places, places, tree)


class Projection:
    """This process's part of a program with so many `inputs`. Its repr shows no content."""

    def __init__(
        self, inputs: int, taken: list[_Taken], template: Tape, places: dict[int, int], results: list, tree: Any
    ):
        self.inputs = inputs
        self._results, self._tree, self._template = results, tree, template
        learned = {slot for slot in results if not isinstance(slot, _Fixed)}
        # A tape serves those as well who take the program step by step: it holds what any online step takes.
        asked = {slot for one in taken if one.step.phase == Phase.ONLINE for slot in one.needed}
        kept = {slot for one in taken if one.step.phase == Phase.OFFLINE for _, slot in one.outputs} & asked
        taken = _in_place(_needed(taken, learned, kept), learned | kept)
        needed = learned | kept | {slot for one in taken for slot in one.needed}
        for one in taken:
            one.outputs = [(i, slot) for i, slot in one.outputs if slot in needed]
        offline = [one for one in taken if one.step.phase == Phase.OFFLINE]
        online = [one for one in taken if one.step.phase == Phase.ONLINE]
        self._kept = {slot: (places[slot[0]], slot[1]) for slot in kept}
        self._all, self._online = _with_drops(taken, learned), _with_drops(online, learned)
        self._offline = _with_drops(offline, kept)

    def __repr__(self) -> str:
        return f"Projection({len(self._offline)} offline steps, {len(self._online)} online)"

    def call(self, runtime: Runtime, call: int, *inputs: torch.Tensor) -> Any:
        """The whole program on inputs, which are shapes where their owners are not present."""
        return self._learned(_take(self._all, runtime, call, self._given(inputs)))

    def prepare(self, runtime: Runtime, tape: Tape) -> None:
        """The offline steps; what the online ones will use goes to an empty tape."""
        values = _take(self._offline, runtime, tape.call, {})
        tape.steps = [list(step) for step in self._template.steps]
        tape.plural, tape.fingerprints = list(self._template.plural), list(self._template.fingerprints)
        for slot, (step, output) in self._kept.items():
            tape.steps[step][output] = values[slot]

    def replay(self, runtime: Runtime, tape: Tape, *inputs: torch.Tensor) -> Any:
        """The online steps on a tape, which is used up.

        Raises:
            MaterialError: the tape was used, or is of another session or program.
        """
        tape.claim(runtime.session)
        try:
            values = self._kept_of(tape, inputs)
        finally:
            tape.release()
        return self._learned(_take(self._online, runtime, tape.call, values))

    def _kept_of(self, tape: Tape, inputs: tuple[torch.Tensor, ...]) -> dict[Slot, Any]:
        """The inputs and what the online steps need of a tape, which then holds nothing."""
        if (tape.fingerprints, tape.plural) != (self._template.fingerprints, self._template.plural):
            raise MaterialError("the material was prepared for another program, other shapes or other arguments")
        values = self._given(inputs)
        for slot, (step, output) in self._kept.items():
            value = values[slot] = tape.steps[step][output]
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise MaterialError("a step needs a value that was not prepared: the material is of another program")
        tape.position = len(tape.steps)
        tape.steps = [None] * tape.position
        return values

    def _given(self, inputs: tuple[torch.Tensor, ...]) -> dict[Slot, Any]:
        if len(inputs) != self.inputs:
            raise MaterialError(f"the program has {self.inputs} inputs, and {len(inputs)} came")
        return {(-1, i): x for i, x in enumerate(inputs)}

    def _learned(self, values: dict[Slot, Any]) -> Any:
        """The results; of those that were read, a copy that autograd may use."""
        leaves = [slot.value if isinstance(slot, _Fixed) else values[slot].clone() for slot in self._results]
        return pytree.tree_unflatten(leaves, self._tree)


@torch.inference_mode()
def _take(steps: list[tuple[_Taken, set[Slot]]], runtime: Runtime, call: int, values: dict[Slot, Any]) -> dict:
    """Take these steps on the values at their places; what is left of the values."""
    for one, dropped in steps:
        contents = [source.value if type(source) is _Fixed else values[source] for source in one.sources]
        try:
            result = one.step.run(runtime, call, contents)
        except SectorchError as error:
            error.place = one.place
            raise
        for output, slot in one.outputs:
            values[slot] = result if output is None else result[output]
        for slot in dropped:
            del values[slot]
    return values


def _needed(taken: list[_Taken], learned: set[Slot], kept: set[Slot]) -> list[_Taken]:
    """The steps without draws and computations whose results nothing needs."""
    found, needed = [], learned | kept
    for one in reversed(taken):
        lost = isinstance(one.step, Draw) or (isinstance(one.step, Compute) and one.step.pure)
        if not lost or any(slot in needed for _, slot in one.outputs):
            found.append(one)
            needed |= one.needed
    return found[::-1]


_IN_PLACE = {
    operator.add: operator.iadd, operator.sub: operator.isub, operator.mul: operator.imul,
    operator.xor: operator.ixor, operator.and_: operator.iand, operator.or_: operator.ior,
}  # fmt: skip


def _fits(result: Any, values: tuple) -> bool:
    first = values[0]._value if values and type(values[0]) is Located else None
    tensors = isinstance(result, torch.Tensor) and isinstance(first, torch.Tensor)
    return tensors and (result.shape, result.dtype) == (first.shape, first.dtype)


def _in_place(taken: list[_Taken], kept: set[Slot]) -> list[_Taken]:
    """The steps; arithmetic writes its result over a first operand that nobody else has and nothing else needs."""
    uses = Counter(slot for one in taken for slot in one.sources if not isinstance(slot, _Fixed))
    fresh: dict[Slot, Phase] = {}  # not across phases: prepared material may be memory of another kind
    for one in taken:
        if not isinstance(one.step, Compute):
            continue
        f, phase, first = one.step.f, one.step.phase, one.sources[0] if one.sources else None
        instead = _IN_PLACE.get(f) if isinstance(f, BuiltinFunctionType) else None
        if instead is not None or getattr(f, "fresh", False):
            fresh[one.number, 0] = phase
        if instead is None or isinstance(first, _Fixed) or not one.fits:
            continue
        if fresh.get(first) == phase and uses[first] == 1 and first not in kept:
            one.step = replace(one.step, f=instead)
    return taken


def _with_drops(taken: list[_Taken], kept: set[Slot]) -> list[tuple[_Taken, set[Slot]]]:
    """Each step with the values that nothing after it needs."""
    last = {slot: at for at, one in enumerate(taken) for slot in one.needed}
    return [(one, {s for s in one.needed if last[s] == at and s not in kept}) for at, one in enumerate(taken)]
