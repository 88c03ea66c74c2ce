"""`mutate_protocol`: plants faults in a protocol, one at a time, and reports which of them its check finds."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..choreography import Party, Phase
from ..choreography.net import Compute, Draw, Header, Move
from ..choreography.program.trace import Node, OperandRef, Program, Slot
from ..display import Display
from ..errors import ArgumentError
from .clock import Clock, TimeOver
from .joint_knowledge import Views
from .outcomes import Outcomes
from .protocol_runs import (
    TESTS,
    Case,
    CheckOptions,
    Draws,
    Given,
    Protocol,
    ProtocolRun,
    Reference,
    is_tests,
    observable_values,
    runs_agree,
    with_options,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Faults in a traced program. Each is a program of its own in which one step is replaced, or one is inserted. The
# protocol's source is not changed. All parties of a step have the same fault, as with a fault in the code.

KINDS = {
    "no mask": "a draw is zero",
    "mask twice": "a draw is an earlier one of the same two parties",
    "short mask": "of a draw the upper half is zero",
    "low bit unmasked": "the lowest bit of a draw is never set",
    "mask told": "a draw is sent to a party that is not to know it",
    "term": "an operand of a step is zero: a correction, a term or a mask is missing",
    "sign": "a result of a step is negated",
    "modulus": "of a result of a step the upper half is lost",
    "low bit": "the lowest bit of a result of a step is lost",
    "one": "a result of a step is one more",
    "number": "a public number of a step is one more, or a yes a no: a shift, a width, who adds the public term",
}
"""The kinds of faults, with a description of each."""


@dataclass(frozen=True)
class Mutant:
    """A program with one fault.

    Attributes:
        kind: a key of `KINDS`.
        where: the protocol, and its changed step.
        program: the program with the fault.
    """

    kind: str
    where: str
    program: Program

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


def mutants_of(program: Program, kinds: set[str] | None = None) -> Iterator[Mutant]:
    """All mutants of a program, in the order of its steps, except of the test's own steps."""
    for at, node in enumerate(program.nodes):
        path = node.step.header.path if isinstance(node.step, Move) else getattr(node.step, "path", TESTS)
        if is_tests(path):
            continue
        if isinstance(node.step, Draw):
            found = _of_draw(program, at, node, node.step)
        elif isinstance(node.step, Compute):
            found = _of_compute(program, at, node, node.step)
        else:
            continue
        yield from (mutant for mutant in found if kinds is None or mutant.kind in kinds)


# Faults of draws.


def _of_draw(program: Program, at: int, node: Node, step: Draw) -> Iterator[Mutant]:
    owners = " and ".join(sorted(p.name for p in step.owners))
    where = f"{step.name} (draw {step.number}) of {owners}"
    for kind, change in (("no mask", torch.zeros_like), ("short mask", _lower_half), ("low bit unmasked", _even)):
        yield Mutant(kind, where, _with_changed_draw(program, at, step, change, OperandRef(node.slots[0])))
    for earlier in reversed(program.nodes[:at]):
        other = earlier.step
        if not isinstance(other, Draw):
            continue
        if (other.owners, other.size, other.dtype) == (step.owners, step.size, step.dtype):
            said = f"{where} is {other.name} (draw {other.number})"
            yield Mutant(
                "mask twice",
                said,
                _with_changed_draw(program, at, step, _second, OperandRef(node.slots[0]), OperandRef(earlier.slots[0])),
            )
            break
    edges = {frozenset((m.src, m.dst)) for m in program.messages}
    for party in program.parties:
        if party not in step.owners:
            for sender in sorted(step.owners, key=lambda p: p.name):
                if frozenset((sender, party)) in edges:
                    yield Mutant(
                        "mask told",
                        f"{where} is sent to {party}",
                        _with_disclosed_draw(program, at, node, step, sender, party),
                    )
                    break


def _with_changed_draw(program: Program, at: int, step: Draw, change: Callable, *operands: OperandRef) -> Program:
    """The program in which the users of a draw take a changed value."""
    nodes, drawn = program.nodes, program.nodes[at]
    slot = _new_slot(program, drawn)
    taken = Compute(change, step.owners, step.phase, step.path, pure=True)
    changed = Node(taken, operands, (slot,), drawn.results, False, drawn.place)
    renamed = {drawn.slots[0]: slot}
    later = [replace(node, operands=tuple(_with_slots(o, renamed) for o in node.operands)) for node in nodes[at + 1 :]]
    return _of_nodes(program, [*nodes[: at + 1], changed, *later], at, renamed)


def _with_disclosed_draw(program: Program, at: int, node: Node, step: Draw, sender: Party, party: Party) -> Program:
    header = Header(
        step.path, "told", sender, party, Phase.OFFLINE, 1, step.size, step.dtype, "nothing", "", None, True
    )  # fmt: skip
    moved = Node(
        Move(header, step.owners), (OperandRef(node.slots[0]),), (_new_slot(program, node),), node.results, False, ""
    )
    return _of_nodes(program, [*program.nodes[: at + 1], moved, *program.nodes[at + 1 :]], at, {})


def _new_slot(program: Program, node: Node) -> Slot:
    return node.slots[0][0], -2, len(program.nodes)


def _with_slots(operand: Any, renamed: dict[Slot, Slot]) -> Any:
    return OperandRef(renamed.get(operand.slot, operand.slot)) if type(operand) is OperandRef else operand


def _of_nodes(program: Program, nodes: list[Node], at: int, renamed: dict[Slot, Slot]) -> Program:
    """A program of these steps; one, after the step `at`, may be new."""
    setup = len(program.setup) + (at < len(program.setup)) * (len(nodes) - len(program.nodes))
    leaves = [_with_slots(leaf, renamed) for leaf in program.leaves]
    return Program(nodes[:setup], nodes[setup:], program.inputs, leaves, program.tree, program.before)


# Faults of computed steps.


def _of_compute(program: Program, at: int, node: Node, step: Compute) -> Iterator[Mutant]:
    name = _name(step.f)
    owners = " and ".join(sorted(p.name for p in step.owners))
    where = f"{step.path or 'the program'}: {name} at {owners} (step {at})"

    def mutant(kind: str, said: str, f: Callable) -> Mutant:
        nodes = program.nodes
        nodes[at] = replace(node, step=replace(step, f=f))
        return Mutant(kind, f"{where}{said}", _of_nodes(program, nodes, at, {}))

    for i, operand in enumerate(node.operands):
        if type(operand) is OperandRef:
            yield mutant("term", f", operand {i}", _Operand(step.f, i, _zeros))
        elif isinstance(operand, int):
            yield mutant("number", f", operand {i}", _Operand(step.f, i, _increment))
    for i, result in enumerate(node.results):
        if isinstance(result, torch.Tensor):
            for kind, change in _CHANGES.items():
                if result.dtype != torch.bool or kind == "sign":
                    said = f", result {i}" if node.many else ""
                    yield mutant(kind, said, _Result(step.f, i if node.many else None, change))


@dataclass(frozen=True)
class _Operand:
    """A function with one operand changed."""

    f: Callable
    place: int
    change: Callable

    def __call__(self, *operands: Any) -> Any:
        return self.f(*(self.change(o) if i == self.place else o for i, o in enumerate(operands)))


@dataclass(frozen=True)
class _Result:
    """A function with its result changed, or one result of a tuple."""

    f: Callable
    place: int | None
    change: Callable

    def __call__(self, *operands: Any) -> Any:
        found = self.f(*operands)
        if self.place is None:
            return self.change(found)
        return tuple(self.change(y) if i == self.place else y for i, y in enumerate(found))


def _name(f: Any) -> str:
    while not hasattr(f, "__name__") and hasattr(f, "func" if hasattr(f, "func") else "f"):
        f = getattr(f, "func", None) or f.f
    return getattr(f, "__name__", type(f).__name__).strip("_")


def _zeros(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else x


def _increment(x: Any) -> Any:
    return not x if isinstance(x, bool) else x + 1


def _second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.clone()


def _negate(x: torch.Tensor) -> torch.Tensor:
    return ~x if x.dtype == torch.bool else -x


def _lower_half(x: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_floating_point:
        return x.float().to(x.dtype)
    return x & ((1 << 4 * x.dtype.itemsize) - 1)


def _even(x: torch.Tensor) -> torch.Tensor:
    return x.floor() if x.dtype.is_floating_point else x >> 1 << 1


def _more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


_CHANGES = {"sign": _negate, "modulus": _lower_half, "low bit": _even, "one": _more}


CHECKS = ("result", "draws", "messages", "view")
"""The checks that may find a fault, the cheaper ones first."""
ALIKE_RUNS = 3
"""Runs in which a fault must change nothing to count as one without effect."""


@dataclass(frozen=True)
class PlantedFault:
    """A fault, and whether a check found it.

    Attributes:
        kind, where: as of `Mutant`.
        by: the check that found it; "" if none did.
        same: whether it has no effect: no party's values differ from those without the fault, bit for bit.
        fails: whether the changed step itself fails.
        text: the finding.
    """

    kind: str
    where: str
    by: str = ""
    same: bool = False
    fails: bool = False
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


@dataclass
class MutationReport(Display):
    """The planted faults, and which of them were found.

    Attributes:
        planted: all planted faults.
        possible: the number of faults of these kinds, of which `most` were chosen.
        left: the number of chosen faults that were not planted in time.
    """

    planted: list[PlantedFault] = field(default_factory=list)
    possible: int = 0
    left: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def counted(self) -> list[PlantedFault]:
        """The faults that run and have an effect."""
        return [p for p in self.planted if not p.same and not p.fails]

    @property
    def survivors(self) -> list[PlantedFault]:
        """The faults that count and were not found."""
        return [p for p in self.counted if not p.by]

    @property
    def score(self) -> float:
        """The share of the counted faults that was found; 1 if there are none."""
        return 1 - len(self.survivors) / len(self.counted) if self.counted else 1.0

    def by_kind(self) -> dict[str, dict[str, int]]:
        """For each kind of fault the number found by each check, not found ("survivors"), without effect ("same"), and
        whose step fails ("fails").
        """
        found: dict[str, dict[str, int]] = {}
        for p in self.planted:
            what = "fails" if p.fails else "same" if p.same else p.by or "survivors"
            of_kind = found.setdefault(p.kind, {})
            of_kind[what] = of_kind.get(what, 0) + 1
        return found

    def sections(self) -> Iterator[RenderableType]:
        """A table with a row for each kind, and the faults that were not found."""
        table = Table(title=f"{len(self.planted)} of {self.possible} faults, each planted alone; seed {self.seed}")
        for column in ("fault", *CHECKS, "not found", "changes nothing", "cannot run"):
            table.add_column(column, justify="left" if column == "fault" else "right")
        for kind, of_kind in sorted(self.by_kind().items(), key=lambda item: list(KINDS).index(item[0])):
            table.add_row(kind, *(str(of_kind.get(what, 0)) for what in (*CHECKS, "survivors", "same", "fails")))
        yield table
        yield f"{self.score:.1%} of {len(self.counted)} found, in {self.seconds:.1f} s"
        if self.left:
            yield f"the seconds were over: {self.left} faults were not planted"
        yield from (Text(f"not found: {planted}") for planted in self.survivors)

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "score": self.score, "possible": self.possible, "planted": len(self.planted), "left": self.left,
            "counted": len(self.counted), "kinds": self.by_kind(),
            "survivors": list(map(str, self.survivors)), "seconds": self.seconds, "seed": self.seed,
        }  # fmt: skip


@with_options
def mutate_protocol(
    protocol: Callable,
    given: Sequence[Given],
    reference: Reference,
    *,
    kinds: Collection[str] = tuple(KINDS),
    most: int | None = None,
    seconds: float | None = None,
    progress: bool | None = None,
    **options: Unpack[CheckOptions],
) -> MutationReport:
    """Plant faults in a protocol, and report which of them `check_protocol` with the same arguments finds.

    A fault changes one step of the traced program. A draw is zero, an earlier one, too short, or sent to another party;
    an operand is missing; a result is negated, cut or one more; a public number is one more. Faults that are not found
    show what the check of a protocol misses: inputs that are too narrow, an `error` that is too wide, or a leak of a
    kind without a test.

    Args:
        kinds: keys of `sectorch.testing.KINDS`.
        most: the largest number of faults, drawn by the seed.
        seconds: the time limit; none by default. `report.left` counts the faults that were not planted in time; the
            planted ones are drawn by the seed.
        progress: whether to show a progress bar on standard error; by default if that is a terminal.
        protocol, given, reference, options: as for `check_protocol`.

    Raises:
        ArgumentError: an unknown kind; the check refuses the protocol without a fault; no fault was planted in time.
        SectorchError: as of `check_protocol`.
    """
    strange = sorted(set(kinds) - set(KINDS))
    if strange:
        raise ArgumentError(f"faults are of the kinds {', '.join(KINDS)}, and not of the kind '{strange[0]}'")
    case = Case.of(protocol, given, reference, options)
    with Clock("mutate_protocol", seconds, progress) as clock:
        report = MutationReport(seed=case.seed)
        try:
            _plant(case, set(kinds), most, report, clock)
        except TimeOver:
            if not report.planted:
                raise ArgumentError(
                    f"no fault was planted in {seconds:g} s, which went into '{clock.at}': pass fewer elements=, or "
                    f"more seconds="
                ) from None
        report.seconds = clock.elapsed
    return report


def _plant(case: Case, kinds: set[str], most: int | None, report: MutationReport, clock: Clock) -> None:
    """Fill the report, one fault after the other.

    Raises:
        TimeOver: the clock's seconds are over; the faults that were tried are in the report, in an order of the seed's.
    """
    clock.part("the protocol itself")
    traced, seed = case.trace(), case.seed
    plain = Outcomes(traced, case)
    views = Views(traced, plain)
    for _, text in itertools.chain(plain.check(), views.check()):
        raise ArgumentError(f"the protocol itself is not right, so a fault in it cannot be told: {text}")
    found = list(mutants_of(traced.program, kinds))
    report.possible = len(found)
    order = np.random.default_rng((seed, 2)).permutation(len(found))
    if most is not None:
        order = order[:most]
    if clock.seconds == math.inf:
        order = sorted(order)
    report.left = len(order)
    inputs = plain.spread()
    runs = [traced.play(inputs, Draws((seed, "alike", i))) for i in range(ALIKE_RUNS)]
    clock.part("faults", len(order))
    for i in order:
        changed = copy.copy(traced)
        changed.program = found[i].program
        outcomes = Outcomes(changed, case)
        report.planted.append(_try_fault(found[i], changed, outcomes, views, inputs, runs, seed))
        report.left -= 1
        clock.step()


def _try_fault(
    mutant: Mutant, changed: Protocol, outcomes: Outcomes, views: Views, inputs: Sequence[torch.Tensor],
    runs: Sequence[ProtocolRun], seed: int,
) -> PlantedFault:  # fmt: skip
    try:
        for check, text in outcomes.check():
            return PlantedFault(mutant.kind, mutant.where, check, text=text)
        played = [changed.play(inputs, Draws((seed, "alike", i))) for i in range(len(runs))]
    except Exception as error:  # whatever a step makes of what it is not written for
        return PlantedFault(mutant.kind, mutant.where, fails=True, text=f"{type(error).__name__}: {error}")
    seen = {party for a, b in zip(runs, played, strict=True) for party in _who_sees(a, b)}
    if not seen:
        return PlantedFault(mutant.kind, mutant.where, same=True)
    for check, text in Views.with_outcomes(views, outcomes).check(seen):
        return PlantedFault(mutant.kind, mutant.where, check, text=text)
    return PlantedFault(mutant.kind, mutant.where)


def _who_sees(one: ProtocolRun, other: ProtocolRun) -> set[str]:
    """The parties whose observable values differ between two runs with the same draws."""
    first, second = observable_values(one), observable_values(other)
    return {name for name in first if not runs_agree({name: first[name]}, {name: second[name]})}
