"""The messages of a run: costs, transcripts and profiles.

Every message of every protocol passes `Runtime.transfer`, and from there every observer. Nothing crosses an edge
without a ledger line.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from rich.table import Table

from ..display import Display
from .net import Party, Phase, Sent

if TYPE_CHECKING:
    from ..config import Link

_ACTIVE: ContextVar[tuple[Observer, ...]] = ContextVar("sectorch_observers", default=())


class Observer:
    """Sees every message and every local computation of the runs inside its `with` block."""

    def message(self, line: Sent, value: torch.Tensor) -> None:
        """A message crossed an edge; `value` is what went over the wire (a meta tensor in a dry run)."""

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        """Some parties computed locally."""

    def __enter__(self):
        self._token = _ACTIVE.set((*_ACTIVE.get(), self))
        return self

    def __exit__(self, *_) -> None:
        _ACTIVE.reset(self._token)


@contextmanager
def sole_observer(observer: Observer) -> Iterator[None]:
    """Inside, only `observer` sees messages: a dry run within a user's profile is not counted there."""
    token = _ACTIVE.set((observer,))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


observers = _ACTIVE.get
"""The observers of the current context: a function, called in every step."""


@dataclass
class Transcript(Observer):
    """Keeps every message with its content, for leak tests. `received(party)` is that party's view."""

    lines: list[tuple[Sent, torch.Tensor]] = field(default_factory=list)

    def message(self, line: Sent, value: torch.Tensor) -> None:
        self.lines.append((line, value.clone()))

    def received(self, role: str) -> list[tuple[Sent, torch.Tensor]]:
        return [(line, value) for line, value in self.lines if line.dst.role == role]


CALLS = 1024
"""The number of latest calls and phases whose rounds may still grow; earlier ones count as finished."""


@dataclass(repr=False)
class Cost(Observer):
    """Seconds, rounds and bytes of the runs inside the block, in memory that does not grow with them.

    `rounds` is the number of rounds in which a call sends messages, summed over the calls; offline and online are
    counted separately, by data dependence. In a call of fresh inputs it is the length of the longest chain of dependent
    messages. A call that goes on with results of earlier calls counts its own rounds only. `offline_bytes` includes the
    bytes sent once a session (`setup_bytes`). A call that sends a message after `CALLS` later calls did counts as a new
    call.
    """

    seconds: float = 0.0
    _sent: Counter[Phase] = field(default_factory=Counter, repr=False)
    _rounds: Counter[Phase] = field(default_factory=Counter, repr=False)
    _latest: OrderedDict[tuple[Phase, bytes, int], set[int]] = field(default_factory=OrderedDict, repr=False)
    _received: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter, repr=False)
    _compute: dict[tuple[str, frozenset[Party], Phase], float] = field(
        default_factory=lambda: defaultdict(float), repr=False
    )
    _start: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rounds={self.rounds}, online_bytes={self.online_bytes}, "
            f"offline_bytes={self.offline_bytes}, seconds={self.seconds:.3f})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: without the lock and the context token, which belong to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_token")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __enter__(self):
        self._start = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.seconds += time.perf_counter() - self._start

    def message(self, line: Sent, value: torch.Tensor) -> None:
        call = line.phase, line.session, line.call
        with self._lock:  # calls of several threads may be counted here
            self._sent[line.phase] += line.bytes
            self._received[line.dst.name, line.protocol, line.label, line.mask, line.shows] += line.bytes
            self._latest.setdefault(call, set()).add(line.round)
            self._latest.move_to_end(call)
            if len(self._latest) > CALLS:
                (phase, *_), rounds = self._latest.popitem(last=False)
                self._rounds[phase] += len(rounds)

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        with self._lock:
            self._compute[path, owners, phase] += seconds

    def compute_seconds(self, phase: Phase) -> float:
        """Seconds of local computation of one phase, all parties together."""
        return sum(s for (_, _, p), s in self._compute.items() if p == phase)

    @property
    def online_seconds(self) -> float:
        return self.compute_seconds(Phase.ONLINE)

    @property
    def offline_seconds(self) -> float:
        return self.compute_seconds(Phase.OFFLINE) + self.compute_seconds(Phase.SETUP)

    @property
    def bytes(self) -> int:
        return self._sent.total()

    @property
    def setup_bytes(self) -> int:
        return self._sent[Phase.SETUP]

    @property
    def offline_bytes(self) -> int:
        return self._sent[Phase.SETUP] + self._sent[Phase.OFFLINE]

    @property
    def online_bytes(self) -> int:
        return self._sent[Phase.ONLINE]

    def rounds_of(self, phase: Phase) -> int:
        return self._rounds[phase] + sum(len(rounds) for (p, *_), rounds in self._latest.items() if p == phase)

    @property
    def rounds(self) -> int:
        """Online rounds."""
        return self.rounds_of(Phase.ONLINE)

    def as_dict(self) -> dict[str, float]:
        """The figures, for JSON."""
        return dict(
            seconds=self.seconds, online_seconds=self.online_seconds, offline_seconds=self.offline_seconds,
            rounds=self.rounds, offline_rounds=self.rounds_of(Phase.OFFLINE), bytes=self.bytes,
            setup_bytes=self.setup_bytes, offline_bytes=self.offline_bytes, online_bytes=self.online_bytes,
        )  # fmt: skip

    def learned(self) -> Table:
        """A table of what each party received: by protocol, how it is masked, and what it shows."""
        table = Table(title="What each party received")
        for column in ("party", "protocol", "message", "hidden by", "MB", "learns"):
            table.add_column(column, justify="right" if column == "MB" else "left")
        for (party, name, label, mask, shows), size in sorted(self._received.items()):
            table.add_row(party, name, label, mask, f"{size / 1e6:.3f}", shows or "nothing (uniform bits)")
        return table


HEADER = 128
"""Bytes of a frame and of its TLS record beside the payload, about."""


@dataclass(repr=False)
class Profile(Display, Cost):
    """A `Cost` that keeps the line of every message, for tables by edge and by protocol."""

    ledger: list[Sent] = field(default_factory=list, repr=False)

    def message(self, line: Sent, value: torch.Tensor) -> None:
        super().message(line, value)
        self.ledger.append(line)

    def seconds_over(self, link: Link) -> dict[str, float]:
        """Seconds of these calls over a link, by phase: "offline" and "online".

        A request goes before each. Every message leaves as soon as its sender has what came in earlier rounds, after
        the messages before it on the same way, and arrives half a round trip after its last byte has left. To this are
        added the seconds of computation that this profile saw, of all parties together: none where the program ran on
        shapes (`sectorch.explain`). A call without prepared material takes at least the longer of the two, and about
        their sum at most, since it may compute while material arrives.
        """
        calls: defaultdict[tuple[bool, bytes, int], list[Sent]] = defaultdict(list)
        for line in self.ledger:
            calls[line.phase == Phase.ONLINE, line.session, line.call].append(line)
        seconds = {"offline": self.offline_seconds, "online": self.online_seconds}
        for (online, *_), lines in calls.items():
            seconds["online" if online else "offline"] += link.seconds(1, 0) + _travel(lines, link)
        return seconds

    def bytes_between(self, p: str, q: str, phase: Phase | None = None) -> int:
        """Bytes on the edge p-q, both directions; roles or party names."""
        return sum(
            line.bytes
            for line in self.ledger
            if phase in (None, line.phase)
            and any(_is(a, p) and _is(b, q) for a, b in ((line.src, line.dst), (line.dst, line.src)))
        )

    def by_protocol(self) -> dict[str, dict[str, float]]:
        """Per protocol: messages, bytes of both phases and seconds of local computation, largest first."""
        rows: dict[str, dict[str, float]] = {}
        for line in self.ledger:
            row = rows.setdefault(line.path, dict(messages=0, offline_bytes=0, online_bytes=0, seconds=0.0))
            row["messages"] += 1
            row["online_bytes" if line.phase == Phase.ONLINE else "offline_bytes"] += line.bytes
        for (path, _, _), seconds in self._compute.items():
            rows.setdefault(path, dict(messages=0, offline_bytes=0, online_bytes=0, seconds=0.0))["seconds"] += seconds
        return dict(sorted(rows.items(), key=lambda item: -item[1]["seconds"]))

    def edges(self) -> Table:
        """Bytes and rounds per edge and phase."""
        table = Table(title="What crossed the edges")
        table.add_column("edge")
        for column in ("phase", "messages", "MB", "rounds"):
            table.add_column(column, justify="right" if column != "phase" else "left")
        clients = sorted({p.name for line in self.ledger for p in (line.src, line.dst) if p.role != "S"})
        for client in clients:
            for phase in Phase:
                lines = [m for m in self.ledger if m.phase == phase and client in (m.src.name, m.dst.name)]
                if lines:
                    size = sum(m.bytes for m in lines) / 1e6
                    rounds = len({(m.session, m.call, m.round) for m in lines})
                    table.add_row(f"{client}-S", phase.name.lower(), str(len(lines)), f"{size:.3f}", str(rounds))
        return table

    def protocols(self) -> Table:
        """Messages, bytes, seconds by the outermost protocol, the slowest first; `by_protocol` has the inner ones."""
        whole: dict[str, dict[str, float]] = {}
        for path, row in self.by_protocol().items():
            total = whole.setdefault(path.partition("/")[0], dict.fromkeys(row, 0.0))
            for key, value in row.items():
                total[key] += value
        table = Table(title="Where time and bytes went")
        table.add_column("protocol")
        for column in ("messages", "offline MB", "online MB", "ms"):
            table.add_column(column, justify="right")
        for name, row in sorted(whole.items(), key=lambda item: -item[1]["seconds"]):
            table.add_row(
                name or "(between protocols)", f"{row['messages']:.0f}", f"{row['offline_bytes'] / 1e6:.3f}",
                f"{row['online_bytes'] / 1e6:.3f}", f"{1e3 * row['seconds']:.1f}",
            )  # fmt: skip
        return table

    def results(self) -> Table:
        """What was shown to each party, and how much it received beside that; `learned` has every message."""
        table = Table(title="What each party learned")
        for column in ("party", "learned", "by", "received MB"):
            table.add_column(column, justify="right" if column == "received MB" else "left")
        for party in sorted({key[0] for key in self._received}):
            own = {key: size for key, size in self._received.items() if key[0] == party}
            shown = [(shows, f"{name}: {label}") for _, name, label, _, shows in sorted(own) if shows]
            more = f"{sum(own.values()) / 1e6:.3f}"
            for i, (shows, by) in enumerate(shown or [("nothing: uniform bits", "")]):
                table.add_row("" if i else party, shows, by, "" if i else more)
        return table

    def sections(self) -> Iterator[RenderableType]:
        """The totals, and three tables that fit a screen."""
        yield (
            f"{self.seconds:.3f} s (online {self.online_seconds:.3f}, offline {self.offline_seconds:.3f}), "
            f"{self.rounds} online rounds, {self.bytes / 1e6:.2f} MB "
            f"(online {self.online_bytes / 1e6:.2f}, offline {self.offline_bytes / 1e6:.2f}, "
            f"of it once a session {self.setup_bytes / 1e6:.2f})"
        )
        yield from (self.edges(), self.protocols(), self.results())


def _travel(lines: list[Sent], link: Link) -> float:
    """Seconds until the messages of a call have come to their receivers."""
    now: defaultdict[Party, float] = defaultdict(float)
    free: defaultdict[tuple[Party, Party], float] = defaultdict(float)
    due: defaultdict[Party, list[tuple[tuple[Phase, int], float]]] = defaultdict(list)
    last = 0.0
    for line in lines:
        at = line.phase, line.round  # rounds are counted in each phase
        awaited = [there for when, there in due[line.src] if when < at]
        if awaited:
            now[line.src] = max(now[line.src], *awaited)
            due[line.src] = [entry for entry in due[line.src] if entry[0] >= at]
        way = line.src, line.dst
        free[way] = max(free[way], now[line.src]) + link.seconds(0, line.bytes + HEADER)
        due[line.dst].append((at, free[way] + link.seconds(1, 0)))
        last = max(last, due[line.dst][-1][1])
    return last


def _is(party: Party, wanted: str) -> bool:
    return wanted in (party.name, party.role)
