"""`mutate_protocol`: plants faults in a protocol, one at a time, and says which of them its check finds."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import ArgumentError
from ..shown import Shown
from .case import Case, Options, Reference, with_options
from .clock import Clock, TimeOver
from .draws import Draws
from .known import Played, alike, seen
from .mutants import KINDS, Mutant, mutants_of
from .outcomes import Outcomes
from .played import Given, Protocol
from .views import Views

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHECKS = ("result", "draws", "messages", "view")
"""By which of its parts a check finds a fault; the cheaper ones are asked first."""
ALIKE_RUNS = 3
"""Runs in which a fault that changes nothing has changed nothing."""


@dataclass(frozen=True)
class Planted:
    """A fault, and what became of it.

    Attributes:
        kind, where: as of `Mutant`.
        by: the check that found it; "" if it was found by none.
        same: whether nothing that anybody is sent, has or learns differs from the protocol without it, bit for bit.
        fails: whether the step itself fails, so that there is no such protocol.
        text: what was found.
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
class MutationReport(Shown):
    """Which faults were planted, and which were found.

    Attributes:
        planted: all of them.
        possible: how many there are of these kinds; of more than `most` some were chosen.
        left: how many of those that were chosen were not planted, since the seconds were over.
    """

    planted: list[Planted] = field(default_factory=list)
    possible: int = 0
    left: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def counted(self) -> list[Planted]:
        """Those that count: they run, and somebody sees something else."""
        return [p for p in self.planted if not p.same and not p.fails]

    @property
    def survivors(self) -> list[Planted]:
        """Those that count and were not found."""
        return [p for p in self.counted if not p.by]

    @property
    def score(self) -> float:
        """The share of those that count that was found; 1 where none counts."""
        return 1 - len(self.survivors) / len(self.counted) if self.counted else 1.0

    def by_kind(self) -> dict[str, dict[str, int]]:
        """For each kind of fault how many were found by each check, and how many not ("survivors"), how many change
        nothing ("same") and with how many a step fails ("fails")."""
        found: dict[str, dict[str, int]] = {}
        for p in self.planted:
            what = "fails" if p.fails else "same" if p.same else p.by or "survivors"
            of_kind = found.setdefault(p.kind, {})
            of_kind[what] = of_kind.get(what, 0) + 1
        return found

    def shown(self) -> Iterator[RenderableType]:
        """For each kind by which check its faults were found, and those that were not."""
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
    **options: Unpack[Options],
) -> MutationReport:
    """Plant faults in a protocol, and see which of them `check_protocol` with the same arguments finds.

    A fault is of one step of the traced program: a draw that is zero, an earlier one, too short, or told to somebody;
    an operand that is missing; a result that is negated, cut or one more; a public number that is one more. Those that
    are not found say what a protocol's check is blind to: inputs that are too narrow, an `error` that is too wide, or
    a leak of a kind that is not looked for.

    Args:
        kinds: of `sectorch.testing.KINDS`.
        most: so many faults at most, drawn by the seed.
        seconds: it may take; any number unless named. Faults that were not planted by then are `report.left`; those
            that were are drawn by the seed.
        progress: whether a bar on standard error shows what it is at; None for where that is a terminal.
        protocol, given, reference, options: as of `check_protocol`.

    Raises:
        ArgumentError: a kind that there is not, or the protocol without a fault is refused by its check; no fault was
            planted in so many seconds.
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
        report.seconds = clock.took
    return report


def _plant(case: Case, kinds: set[str], most: int | None, report: MutationReport, clock: Clock) -> None:
    """Fill the report, one fault after the other.

    Raises:
        TimeOver: the clock's seconds are over; the faults that were tried are in the report, in an order of the seed's.
    """
    clock.part("the protocol itself")
    traced, seed = case.traced(), case.seed
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
        report.planted.append(_tried(found[i], changed, outcomes, views, inputs, runs, seed))
        report.left -= 1
        clock.step()


def _tried(
    mutant: Mutant, changed: Protocol, outcomes: Outcomes, views: Views, inputs: Sequence[torch.Tensor],
    runs: Sequence[Played], seed: int,
) -> Planted:  # fmt: skip
    try:
        for check, text in outcomes.check():
            return Planted(mutant.kind, mutant.where, check, text=text)
        played = [changed.play(inputs, Draws((seed, "alike", i))) for i in range(len(runs))]
    except Exception as error:  # whatever a step makes of what it is not written for
        return Planted(mutant.kind, mutant.where, fails=True, text=f"{type(error).__name__}: {error}")
    seen = {party for a, b in zip(runs, played, strict=True) for party in _who_sees(a, b)}
    if not seen:
        return Planted(mutant.kind, mutant.where, same=True)
    for check, text in Views.like(views, outcomes).check(seen):
        return Planted(mutant.kind, mutant.where, check, text=text)
    return Planted(mutant.kind, mutant.where)


def _who_sees(one: Played, other: Played) -> set[str]:
    """Parties to whom two runs under the same draws differ, in what they bring, are sent, send or learn."""
    first, second = seen(one), seen(other)
    return {name for name in first if not alike({name: first[name]}, {name: second[name]})}
