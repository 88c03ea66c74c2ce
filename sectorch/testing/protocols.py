"""`check_protocol`: holds a protocol to what it says of itself, as an adversary who is each of its parties would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..choreography import Phase
from ..errors import ArgumentError
from ..shown import Shown
from .apart import check_apart
from .case import Case, Options, Reference, with_options
from .clock import Clock, TimeOver
from .exhaustive import Exhaustive, in_elements
from .outcomes import Outcomes
from .played import Given, Protocol, messages_of
from .uniform import FOUND, P_VALUE
from .views import Views

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Finding:
    """What does not hold: of which check, and in words."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass
class ProtocolReport(Shown):
    """What was looked at, and what was found.

    Attributes:
        looked: for each check what it did, in words.
        elements, tests: in one message of a run; how many p-values were computed, each compared with 10^-12.
    """

    findings: list[Finding] = field(default_factory=list)
    looked: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    tests: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def false_alarms(self) -> float:
        """A bound on the probability that a sound protocol is refused: of all p-values together, twice over."""
        return 2 * self.tests * P_VALUE

    @property
    def bias_found(self) -> float:
        """A bit of a message that is 1 with probability 1/2 + e/2 is found with probability 0.9999 from this e on."""
        return FOUND / max(1, self.elements) ** 0.5

    def shown(self) -> Iterator[RenderableType]:
        """A row for each check, and what the whole of them can find."""
        table = Table(title="What a protocol was held to")
        for column in ("check", "what was done", "found"):
            table.add_column(column)
        for check, said in self.looked.items():
            found = [f.text for f in self.findings if f.check == check]
            table.add_row(check, Text(said), Text("\n".join(found) or "nothing"))
        yield table
        yield (
            f"{self.tests} p-values, each against {P_VALUE:g}: a sound protocol is refused with probability below "
            f"{self.false_alarms:.1g}; a biased bit is found from {self.bias_found:.1%} on; seed {self.seed}, "
            f"{self.seconds:.1f} s"
        )

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "findings": [{"check": f.check, "text": f.text} for f in self.findings], "looked": self.looked,
            "elements": self.elements, "tests": self.tests, "false_alarms": self.false_alarms,
            "bias_found": self.bias_found, "seconds": self.seconds, "seed": self.seed,
        }  # fmt: skip


class ProtocolFault(AssertionError):
    """A protocol does not hold what it says; `report` has all that was found.

    What to do:
        Each line of the text names what was checked and what was found; docs/testing.md says what each means, and what
        the usual mistakes are.
    """

    def __init__(self, report: ProtocolReport):
        super().__init__("\n".join(map(str, report.findings)))
        self.report = report


@with_options
def check_protocol(
    protocol: Callable,
    given: Sequence[Given],
    reference: Reference,
    *,
    cost: Mapping[str, float] | None = None,
    seconds: float = 60.0,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> ProtocolReport:
    """Hold a protocol to its word, from nothing but the protocol itself.

    What is looked at:
        result: it is the reference's, on small inputs all of them, on the edges and all over the stated range.
        draws: it is the same whatever anybody draws or deals: one result for one input, in thousands of runs. No draw
            has bits that change nothing.
        exhaustive: it is right on small domains of inputs and of each draw, in all combinations.
        messages: each is uniform, and the same for any two secrets that its receiver may not tell apart.
        view: so is all that a party knows together. Sums mod 2 of bits that it drew, received and sent, products of
            lowest bits among them, and correlations of two bits, do not depend on a secret. It knows what it makes of
            several values, too, and what another's step makes of what it has.
        apart: each party alone, in a thread of its own, does what the whole does, and needs nothing that it lacks.
        frames: a message that is lost, doubled or cut ends with an error at whoever misses it, and with no result.
        cost: what is stated is what is sent.

    What two secrets a party may not tell apart is for the reference to say: those for which its own inputs and what it
    learns are the same. Nothing here is a proof: a leak that needs more than two values' products, or that shows in no
    single message and no sum of bits, is not found.

    Args:
        protocol: f(net, *values), see `sectorch.testing.Given`; whatever else it does, it sends what it declares.
        given: its inputs.
        reference: what it computes, in plain torch on int64 tensors of those shapes: the result, or a tuple of them.
        cost: "rounds" online, and bytes an element "online" and "offline", of the protocol itself.
        seconds: it may take. A check that is not done by then raises, by what it has found, or for the time.
        progress: whether a bar on standard error shows what it is at; None for where that is a terminal.
        options: of `sectorch.testing.Options`: roles, dealer, answering, elementwise, error, varies,
            uniform, sorts, exhaustive, elements, pairs, runs, seed.

    Returns:
        what was done, if nothing was found.

    Raises:
        ProtocolFault: what was found. An AssertionError.
        ArgumentError: no reference; an option that there is not; a step that is random without `net.fresh`; it would
            take too long.
        SectorchError: what the choreography refuses: an undeclared message, a value that its user lacks.
    """
    case = Case.of(protocol, given, reference, options)
    report = ProtocolReport(seed=case.seed)
    with Clock("check_protocol", seconds, progress) as clock:
        try:
            _look(case, cost, report, clock)
        except TimeOver:
            if not report.findings:
                raise ArgumentError(
                    f"the check was not done after {seconds:g} s, at '{clock.at}': pass fewer elements=, or more "
                    f"seconds="
                ) from None
        report.seconds = clock.took
    if report.findings:
        raise ProtocolFault(report)
    return report


def _look(case: Case, cost: Mapping[str, float] | None, report: ProtocolReport, clock: Clock) -> None:
    """All checks of a case, the cheaper ones first; each writes into the report what it did and found.

    Raises:
        TimeOver: the clock's seconds are over; findings so far are in the report.
    """

    def note(found: Iterable[tuple[str, str]]) -> None:
        for check, text in found:
            report.findings.append(Finding(check, text))

    clock.part("result and draws")
    traced = case.traced()
    outcomes = Outcomes(traced, case)
    note(outcomes.check())
    report.looked["result"] = outcomes.looked
    report.looked["draws"] = outcomes.looked_draws
    if case.exhaustive and case.elementwise and in_elements(traced):
        clock.part("exhaustive")
        small = Exhaustive(outcomes, case.exhaustive, case.seed)
        note(small.check())
        report.looked["exhaustive"] = small.looked
    views = Views(traced, outcomes)
    report.elements = views.elements
    needed, left = views.seconds_needed, clock.seconds - clock.took
    if needed > left:
        raise ArgumentError(
            f"this would take about {needed:.0f} s more, and {max(0.0, left):.0f} of {clock.seconds:.0f} s are left: "
            f"pass fewer elements=, or seconds="
        )
    clock.part("messages and view")
    note(views.check())
    report.looked["messages"], report.looked["view"] = views.looked
    report.tests = views.tests + outcomes.tests
    clock.part("apart and frames")
    done, said = check_apart(traced, outcomes, case.seed)
    note(said)
    report.looked |= done
    if cost is not None:
        note(("cost", text) for text in _costs(traced, cost))
        report.looked["cost"] = ", ".join(f"{name} {value:g}" for name, value in cost.items())


def _costs(traced: Protocol, cost: Mapping[str, float]) -> list[str]:
    own = messages_of(traced.program)
    online = [m for m in own if m.phase == Phase.ONLINE]
    measured = {
        "rounds": max((m.round for m in online), default=0) - min((m.round for m in online), default=1) + 1,
        "online": sum(m.bytes for m in online) / traced.n,
        "offline": sum(m.bytes for m in own if m.phase == Phase.OFFLINE) / traced.n,
    }
    strange = sorted(set(cost) - set(measured))
    if strange:
        raise ArgumentError(f"a cost has {', '.join(measured)}, and no '{strange[0]}'")
    return [
        f"{name} are stated as {stated:g}, and are {measured[name]:g}"
        for name, stated in cost.items()
        if abs(measured[name] - stated) > 0.01 * max(1.0, stated)
    ]
