"""`check_protocol`: tests a protocol's results, and attacks it with the view of each of its parties."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch.utils import _pytree as pytree

from ..choreography import Party, Phase
from ..choreography.net import Compute, Header
from ..choreography.program.projection import Setup, part_of
from ..choreography.run.frames import Frame, pack, unpack
from ..choreography.run.party import PartyRuntime
from ..display import Display
from ..errors import ArgumentError, PeerLostError, SectorchError
from .clock import Clock, TimeOver
from .joint_knowledge import Views
from .outcomes import FOUND, P_VALUE, Exhaustive, Outcomes, in_elements
from .protocol_runs import Case, CheckOptions, Draws, Given, Protocol, Reference, messages_of, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Each party alone in a thread: it computes the same as all together, and a changed message ends in an error.

SETUP, CALL = 0, 1
FAULTS = ("lost", "doubled", "cut")
PLACES = 8
"""The most messages that are lost, doubled and cut in turn."""
ENDING = 120.0
"""Seconds after which a thread counts as hanging."""


class _Wires:
    """The queues between parties in threads, which also detect that all remaining parties wait for each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[tuple[str, str], deque[bytes]] = {}
        self.waiting: dict[str, str] = {}
        self.running: set[str] = set()

    def stuck(self) -> bool:
        """Whether no party can go on. Called with the condition held."""
        return self.running == set(self.waiting) and not any(self.queues[src, me] for me, src in self.waiting.items())

    def done(self, party: str) -> None:
        """Mark a party as finished; it sends no more."""
        with self.changed:
            self.running.discard(party)
            self.changed.notify_all()


class _End:
    """One end of a queue between two threads; it may change the message of one number by a fault."""

    def __init__(self, wires: _Wires, me: str, other: str):
        self._wires, self._me, self._other = wires, me, other
        self._come = wires.queues.setdefault((other, me), deque())
        self._out = wires.queues.setdefault((me, other), deque())
        self._sent = itertools.count()
        self.fault: tuple[int, str] = (-1, "")

    def send(self, parts: Iterable[bytes], later: bool = False) -> None:
        at, parts = next(self._sent), list(parts)
        if at == self.fault[0]:
            parts = _faulty(parts, self.fault[1])
        with self._wires.changed:
            self._out.extend(parts)
            self._wires.changed.notify_all()

    def flush(self) -> None:
        """Do nothing: messages are not buffered."""

    def receive(self) -> Frame:
        wires = self._wires
        with wires.changed:
            wires.waiting[self._me] = self._other
            wires.changed.notify_all()
            while not self._come and self._other in wires.running and not wires.stuck():
                wires.changed.wait()
            del wires.waiting[self._me]
            if not self._come:
                raise PeerLostError("what this party waits for does not come")
            data = self._come.popleft()
        (frame,) = unpack(data)
        return frame


def _faulty(parts: list[bytes], fault: str) -> list[bytes]:
    if fault == "lost":
        return []
    if fault == "doubled":
        return parts + parts
    (frame,) = unpack(parts[-1])
    return [*parts[:-1], pack(replace(frame, payload=bytes(frame.payload)[:-1]))]


class _SeededParty(PartyRuntime):
    """A party whose draws come from the test's seed."""

    def __init__(self, me: Party, channels: Mapping[Party, _End], draws: Draws):
        super().__init__(me, bytes(16), channels)
        self._draws = draws
        self.sent: list[tuple[Header, torch.Tensor]] = []

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        return self._draws.of(pair, label, draw, call == SETUP, count)

    def transfer(self, line: Any, value: torch.Tensor) -> torch.Tensor:
        if line.src == self.me:
            self.sent.append((line, value.clone()))
        return super().transfer(line, value)


def check_distributed(
    protocol: Protocol, outcomes: Outcomes, seed: int
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Run each party alone in a thread. Returns the checks done, in words, and the failures."""
    inputs, draws = outcomes.spread(), Draws((seed, "apart"))
    together = outcomes.protocol.play(inputs, draws)
    brought = protocol.inputs_by_name(inputs, draws)
    found: list[tuple[str, str]] = []
    ended, sent = _in_threads(protocol, brought, draws)
    random = any(isinstance(n.step, Compute) and n.step.random for n in protocol.program.nodes)
    for party, result in ended.items():
        if isinstance(result, BaseException):
            found.append(("apart", f"{party} alone ends with {type(result).__name__}: {result}"))
    if not found:
        found += [("apart", text) for text in _differences(protocol, together, ended, sent, random)]
    summary = {
        "apart": f"{len(ended)} parties in threads, each with its own values" + (", results alone" if random else "")
    }
    if not found:
        edges = _edges_of(protocol)
        said = list(_faults(protocol, brought, draws, edges))
        found += [("frames", text) for text in said[:3]]
        summary["frames"] = f"{min(len(edges), PLACES)} messages, each {', '.join(FAULTS)}"
    return summary, found


def _differences(
    protocol: Protocol, together: Any, ended: Mapping[str, Any], sent: Mapping, random: bool
) -> Iterable[str]:
    for i, (owners, wanted) in enumerate(together.results):
        for party in sorted(owners & {min(owners)}):
            own = pytree.tree_leaves(ended[party])[i]
            if own.is_meta or (not random and not torch.equal(own, wanted)):
                yield f"result {i} at {party} alone is not that of the whole"
    if random:
        return
    for party, messages in sent.items():
        expected = [(h, v) for h, v in together.messages if h.src.name == party]
        if len(expected) != len(messages):
            yield f"{party} alone sends {len(messages)} messages, and {len(expected)} in the whole"
            continue
        values = {(h.path, h.label, h.dst.name, k): v for k, (h, v) in _numbered(expected)}
        for k, (header, value) in _numbered(messages):
            other = values.get((header.path, header.label, header.dst.name, k))
            if other is None or not torch.equal(value, other):
                yield f"{party} alone sends another {header.label} of {header.protocol} than in the whole"
                break


def _numbered(messages: Iterable[tuple[Header, Any]]) -> Iterable[tuple[int, tuple[Header, Any]]]:
    seen: dict[tuple, int] = {}
    for header, value in messages:
        key = header.path, header.label, header.dst.name
        seen[key] = seen.get(key, -1) + 1
        yield seen[key], (header, value)


def _edges_of(protocol: Protocol) -> list[tuple[str, str, int]]:
    """Each message as sender, receiver, and its number among the messages of this edge, those of the setup first."""
    counts: dict[tuple[str, str], itertools.count] = {}
    found = []
    for header in protocol.program.messages:
        edge = header.src.name, header.dst.name
        found.append((*edge, next(counts.setdefault(edge, itertools.count()))))
    return found


def _faults(
    protocol: Protocol, brought: Mapping[str, torch.Tensor], draws: Draws, edges: list[tuple[str, str, int]]
) -> Iterable[str]:
    step = max(1, -(-len(edges) // PLACES))
    for src, dst, number in edges[::step]:
        for fault in FAULTS:
            last = number == max(n for s, d, n in edges if (s, d) == (src, dst))
            if fault == "doubled" and last:
                continue  # no party reads beyond the last message
            ended, _ = _in_threads(protocol, brought, draws, (src, dst, number, fault))
            result = ended[dst]
            if not isinstance(result, SectorchError):
                said = f"{type(result).__name__}: {result}" if isinstance(result, BaseException) else "a result"
                yield f"where message {number} from {src} to {dst} is {fault}, {dst} ends with {said}"


def _in_threads(
    protocol: Protocol,
    brought: Mapping[str, torch.Tensor],
    draws: Draws,
    fault: tuple[str, str, int, str] | None = None,
) -> tuple[dict[str, Any], dict[str, list]]:
    """The result or the error of each party alone, and the messages that it sent."""
    program, wires = protocol.program, _Wires()
    ends = _ends(wires, protocol.parties)
    if fault is not None:
        ends[fault[0]][fault[1]].fault = fault[2], fault[3]
    found: dict[str, Any] = {}
    runtimes = {
        party: _SeededParty(
            party, {other: ends[party.name][other.name] for other in protocol.parties if other != party}, draws
        )
        for party in protocol.parties
    }

    def run(party: Party) -> None:
        try:
            part, runtime = part_of(program, frozenset((party,))), runtimes[party]
            inputs = {i.name: brought[i.name] for i in program.inputs if i.party == party}
            settled = Setup(SETUP).values(part, runtime, inputs)
            found[party.name] = part.call(runtime, CALL, settled, inputs)
        except BaseException as error:
            found[party.name] = error
        finally:
            wires.done(party.name)

    threads = [threading.Thread(target=run, args=(party,), daemon=True) for party in protocol.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDING)
    for party in protocol.parties:
        found.setdefault(party.name, TimeoutError("it waits for ever"))
    return found, {party.name: runtime.sent for party, runtime in runtimes.items()}


def _ends(wires: _Wires, parties: Iterable[Party]) -> dict[str, dict[str, _End]]:
    names = [party.name for party in parties]
    wires.running |= set(names)
    return {me: {other: _End(wires, me, other) for other in names if other != me} for me in names}


@dataclass(frozen=True)
class Finding:
    """A failure: its check, and a text."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass
class ProtocolReport(Display):
    """The report of a check.

    Attributes:
        looked: for each check a text about what it tested.
        elements: of one message in all runs of a secret.
        tests: the number of p-values, each compared with 10^-12.
    """

    findings: list[Finding] = field(default_factory=list)
    looked: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    tests: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def false_alarms(self) -> float:
        """A bound on the probability that a sound protocol is refused: twice the sum over all p-values."""
        return 2 * self.tests * P_VALUE

    @property
    def bias_found(self) -> float:
        """The least e at which a bit that is 1 with probability 1/2 + e/2 is found with probability 0.9999."""
        return FOUND / max(1, self.elements) ** 0.5

    def sections(self) -> Iterator[RenderableType]:
        """A table with a row for each check, and the power of the tests."""
        table = Table(title="What the check did")
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
    **options: Unpack[CheckOptions],
) -> ProtocolReport:
    """Check a protocol's results and attack it, with nothing given but the protocol and a reference.

    The checks:
        result: equals the reference on all small inputs, at the edges and all over the stated range.
        draws: the result does not depend on what any party draws or deals, in thousands of runs. Every draw has an
            effect with its highest byte and its lowest bit.
        exhaustive: the result is right on small domains of inputs and of each draw, in all combinations.
        messages: each is uniform, and has the same distribution for any two secrets that its receiver may not tell
            apart.
        view: the same for all that a party knows together. Sums mod 2 of bits that it drew, received and sent, products
            of lowest bits, and correlations of two bits do not depend on a secret. A party also knows what it can
            compute from its values by its own steps or another party's.
        apart: each party alone, in a thread of its own, computes the same, and needs no value that it lacks.
        frames: where a message is lost, doubled or cut, its receiver ends with an error and without a result.
        cost: the stated cost is the measured one.

    A party may not tell two secrets apart if its own inputs and, by the reference, its results are the same for both.
    None of this is a proof. A leak is not found if it needs products of more than two values, or appears in no single
    message and no sum of bits.

    Args:
        protocol: f(net, *values); see `sectorch.testing.Given`.
        given: its inputs.
        reference: the same function in plain torch, on int64 tensors of the inputs' shapes: a result or a tuple of
            them.
        cost: "rounds" online, and bytes an element "online" and "offline", of the protocol itself.
        seconds: the time limit. A check that takes longer raises, for its findings so far or for the time.
        progress: whether to show a progress bar on standard error; by default if that is a terminal.
        options: of `sectorch.testing.CheckOptions`: roles, dealer, answering, elementwise, error, varies,
            uniform, sorts, exhaustive, elements, pairs, runs, seed.

    Returns:
        A report of the checks, if none failed.

    Raises:
        ProtocolFault: a check failed. An AssertionError.
        ArgumentError: no reference; an unknown option; a step that is random without `net.fresh`; the check would take
            too long.
        SectorchError: the choreography refuses a step: an undeclared message, or a value that its user lacks.
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
        report.seconds = clock.elapsed
    if report.findings:
        raise ProtocolFault(report)
    return report


def _look(case: Case, cost: Mapping[str, float] | None, report: ProtocolReport, clock: Clock) -> None:
    """Run all checks of a case, the cheaper ones first, and fill the report.

    Raises:
        TimeOver: the clock's seconds are over; findings so far are in the report.
    """

    def note(found: Iterable[tuple[str, str]]) -> None:
        for check, text in found:
            report.findings.append(Finding(check, text))

    clock.part("result and draws")
    traced = case.trace()
    outcomes = Outcomes(traced, case)
    note(outcomes.check())
    report.looked["result"] = outcomes.summary
    report.looked["draws"] = outcomes.draws_summary
    if case.exhaustive and case.elementwise and in_elements(traced):
        clock.part("exhaustive")
        small = Exhaustive(outcomes, case.exhaustive, case.seed)
        note(small.check())
        report.looked["exhaustive"] = small.summary
    views = Views(traced, outcomes)
    report.elements = views.elements
    needed, left = views.seconds_needed, clock.seconds - clock.elapsed
    if needed > left:
        raise ArgumentError(
            f"this would take about {needed:.0f} s more, and {max(0.0, left):.0f} of {clock.seconds:.0f} s are left: "
            f"pass fewer elements=, or seconds="
        )
    clock.part("messages and view")
    note(views.check())
    report.looked["messages"], report.looked["view"] = views.summary
    report.tests = views.tests + outcomes.tests
    clock.part("apart and frames")
    done, said = check_distributed(traced, outcomes, case.seed)
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
        f"{name}{' bytes an element' * (name != 'rounds')} are stated as {stated:g}, and are {measured[name]:g}"
        for name, stated in cost.items()
        if abs(measured[name] - stated) > 0.01 * max(1.0, stated)
    ]
