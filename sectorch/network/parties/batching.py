"""Calls of several sessions of one model that are taken together: who gathers them, at S and at A.

At S a call joins others once all that its client has to send in it is there, and the client gets its result when the
others have theirs: a client that stalls, or does not read, keeps nobody waiting. While calls run, those that become
ready gather; whoever gets the next turn takes along all that wait for the same program. S tells A which they are, and A
takes them together as well, as far as their requests have come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...choreography import Party
from ...choreography.net import Move
from ...choreography.program.lockstep import BatchedCall, run_in_lockstep
from ...choreography.program.projection import Projection, part_of
from ...choreography.program.trace import Program
from ...errors import SectorchError
from ...session import Session
from ..messages import JOINED
from ..wire.fair_queue import TICK, FairQueue

LARGEST = 4 << 20
"""Bytes that a client may send in a call which is taken with others: in larger ones arithmetic is what takes time."""
AHEAD = 128 << 20
"""Bytes that may be kept of what clients have sent in calls which wait for others."""
TOGETHER = 0.2
"""Seconds that A waits for the requests of calls which S takes together."""


@dataclass(eq=False)
class BatchCandidate:
    """A call of a session that may be taken with others'.

    Attributes:
        begin: called when it is, with the name of the group and how many calls it has, which the answering party hears.
    """

    taking: BatchedCall
    begin: Callable[[str, int], None] = lambda joint, calls: None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.taking.failed = self.done.set

    @property
    def part(self) -> Projection:
        return self.taking.part

    def end(self) -> None:
        """Send what is left for the client; raises what ended the call."""
        self.taking.finish()


class _Taken(Exception):
    """Another session's thread takes this call along."""


def sent_by(part: Projection, party: Party) -> tuple[int, int]:
    """How many messages a party sends in a call, and their bytes."""
    sent = [m for m in part.program.messages if m.src == party and m.phase.name != "SETUP"]
    return len(sent), sum(m.bytes for m in sent)


def waits_before_sending(program: Program, party: Party) -> bool:
    """Whether a party waits for something before it has sent all of a call, as a client does that learns several
    results: who waits for all that it sends would then wait in a circle."""
    moves = [line.step.header for line in part_of(program, frozenset((party,))).lines if isinstance(line.step, Move)]
    sends = [i for i, header in enumerate(moves) if header.src == party]
    return any(header.dst == party for header in moves[: sends[-1]]) if sends else False


class ServerBatcher:
    """At S: the calls that are ready, until one of them gets a turn."""

    def __init__(self, turns: FairQueue):
        self._turns = turns
        self._lock = threading.Lock()
        self._waiting: dict[Projection, list[BatchCandidate]] = {}
        self._kept = 0

    def room(self, part: Projection, party: Party) -> int | None:
        """How many bytes a client's messages take until the call is over; None where it is not to be taken with others.

        Whoever is given room gives it back by `leave`.
        """
        count, size = sent_by(part, party)
        size += count * (2 << 10)
        if size <= LARGEST and waits_before_sending(part.program, party):
            return None
        with self._lock:
            if size > LARGEST or self._kept + size > AHEAD:
                return None
            self._kept += size
        return size

    def leave(self, size: int) -> None:
        with self._lock:
            self._kept -= size

    def take(self, joining: BatchCandidate, client: str, tick: Callable[[], None]) -> None:
        """Take a call, with all others that are ready for the same program, in a turn of one of their clients.

        Args:
            tick: called now and then while it waits; may raise to give up.

        Raises:
            BusyError: too many calls wait, or no more are taken. SectorchError: what ended the call.
        """
        with self._lock:
            self._waiting.setdefault(joining.part, []).append(joining)

        def waiting() -> None:
            if not self._waits(joining):
                raise _Taken
            tick()

        try:
            with self._turns.turn(client, waiting):
                group = self._group(joining)
                if group:
                    self._run(group)
        except _Taken:
            pass
        except BaseException:
            if self._withdraw(joining):
                raise
        while not joining.done.wait(TICK):
            with suppress(SectorchError):  # whoever takes the call hears of it
                tick()
        joining.end()

    def _waits(self, joining: BatchCandidate) -> bool:
        with self._lock:
            return joining in self._waiting.get(joining.part, ())

    def _withdraw(self, joining: BatchCandidate) -> bool:
        """Whether it still waited, and does not any more."""
        with self._lock:
            waiting = self._waiting.get(joining.part, [])
            found = joining in waiting
            if found:
                waiting.remove(joining)
                if not waiting:
                    del self._waiting[joining.part]
        return found

    def _group(self, joining: BatchCandidate) -> list[BatchCandidate]:
        """The calls to take now, this one and those that wait with it; none if another thread has taken it along."""
        with self._lock:
            waiting = self._waiting.get(joining.part, [])
            if joining not in waiting:
                return []
            waiting.remove(joining)
            group = [joining, *waiting[: JOINED - 1]]
            del waiting[: JOINED - 1]
            if not waiting:
                del self._waiting[joining.part]
        self._turns.wake()
        return group

    def _run(self, group: list[BatchCandidate]) -> None:
        joint = os.urandom(8).hex()
        for one in group:
            try:
                one.begin(joint, len(group))
            except SectorchError as error:
                one.taking.error = error
                one.done.set()
        run(group)


def run(group: list[BatchCandidate]) -> None:
    """Take these calls together, and tell whoever waits for one of them."""
    try:
        ready = [one.taking for one in group if one.taking.error is None]
        if ready:
            run_in_lockstep(ready)
    except BaseException as error:
        for one in group:
            one.taking.error = one.taking.error or error
        raise
    finally:
        for one in group:
            one.done.set()


class AnsweringBatcher:
    """At A: the calls that S takes together."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, Projection], list[BatchCandidate]] = {}

    def take(self, joining: BatchCandidate, name: str, count: int) -> None:
        """Take a call with those that S names in the same way, `count` with this one, as far as they are here in time.

        Raises:
            SectorchError: what ended the call.
        """
        key = name, joining.part
        with self._changed:
            group = self._waiting.setdefault(key, [])
            group.append(joining)
            if len(group) < count:
                self._changed.wait_for(lambda: self._waiting.get(key) is not group, TOGETHER)
            leads = self._waiting.get(key) is group
            if leads:
                del self._waiting[key]
                self._changed.notify_all()
        if leads:
            run(group)
        joining.done.wait()
        joining.end()


def setup_is_complete(session: Session, program: Program) -> bool:
    """Whether the setup lacks nothing for a call of this program: there was one before."""
    return session._setup_of(program).made(session._part(program, {}))


def take_in_batch(
    session: Session, program: Program, inputs: Mapping[str, torch.Tensor], own: frozenset[Party]
) -> BatchedCall:
    """A call that is to be taken with those of other sessions; `runtime.forget` its number when it is over."""
    runtime: Any = session.runtime
    part = session._part(program, inputs)
    values = session._setup_of(program).values(part, runtime, inputs)
    return BatchedCall(part, runtime, session._number(session.answering[0]), values, inputs, own)
