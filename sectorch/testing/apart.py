"""Each party alone, in a thread of its own: the same as the whole, and an error where a message is not what it was."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.program.part import part_of
from ..choreography.program.setup import Setup
from ..choreography.run.frames import Frame, pack, unpack
from ..choreography.run.party import PartyRuntime
from ..choreography.steps import Compute, Header
from ..errors import PeerLostError, SectorchError
from .draws import Draws
from .outcomes import Outcomes
from .played import Protocol

SETUP, CALL = 0, 1
FAULTS = ("lost", "doubled", "cut")
PLACES = 8
"""Messages, at most, each of which is lost, doubled and cut in turn."""
ENDING = 120.0
"""Seconds after which a thread counts as hanging; only a step that never ends takes so long."""


class _Wires:
    """The edges of parties in threads. Where all that are left wait for each other, none of them will hear anything."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[tuple[str, str], deque[bytes]] = {}
        self.waiting: dict[str, str] = {}
        self.running: set[str] = set()

    def stuck(self) -> bool:
        """Whether nobody can go on. Called with the condition held."""
        return self.running == set(self.waiting) and not any(self.queues[src, me] for me, src in self.waiting.items())

    def done(self, party: str) -> None:
        """It sends no more."""
        with self.changed:
            self.running.discard(party)
            self.changed.notify_all()


class _End:
    """One end of an edge between two threads. A fault is of the message of a number that is sent over it."""

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
        """Nothing is held back."""

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


class _Alone(PartyRuntime):
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


def check_apart(protocol: Protocol, outcomes: Outcomes, seed: int) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """What was done, by check, and what does not hold."""
    inputs, draws = outcomes.spread(), Draws((seed, "apart"))
    whole = outcomes.protocol.play(inputs, draws)
    brought = protocol.brought(inputs, draws)
    found: list[tuple[str, str]] = []
    ended, sent = _in_threads(protocol, brought, draws)
    random = any(isinstance(n.step, Compute) and n.step.random for n in protocol.program.nodes)
    for party, result in ended.items():
        if isinstance(result, BaseException):
            found.append(("apart", f"{party} alone ends with {type(result).__name__}: {result}"))
    if not found:
        found += [("apart", text) for text in _different(protocol, whole, ended, sent, random)]
    looked = {
        "apart": f"{len(ended)} parties in threads, each with its own values" + (", results alone" if random else "")
    }
    if not found:
        edges = _edges_of(protocol)
        said = list(_faults(protocol, brought, draws, edges))
        found += [("frames", text) for text in said[:3]]
        looked["frames"] = f"{min(len(edges), PLACES)} messages, each {', '.join(FAULTS)}"
    return looked, found


def _different(protocol: Protocol, whole: Any, ended: Mapping[str, Any], sent: Mapping, random: bool) -> Iterable[str]:
    for i, (owners, wanted) in enumerate(whole.results):
        for party in sorted(owners & {min(owners)}):
            own = pytree.tree_leaves(ended[party])[i]
            if own.is_meta or (not random and not torch.equal(own, wanted)):
                yield f"result {i} at {party} alone is not that of the whole"
    if random:
        return
    for party, messages in sent.items():
        expected = [(h, v) for h, v in whole.messages if h.src.name == party]
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
    """Each message as sender, receiver, and its number among those that the one sends the other, setup's first."""
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
                continue  # nobody reads beyond the last message
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
    """What each party ends with alone, a result or an error, and what it sent."""
    program, wires = protocol.program, _Wires()
    ends = _ends(wires, protocol.parties)
    if fault is not None:
        ends[fault[0]][fault[1]].fault = fault[2], fault[3]
    found: dict[str, Any] = {}
    runtimes = {
        party: _Alone(
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
