"""Batches of calls of several sessions of one model, at S (`ServerBatcher`) and at A (`AnsweringBatcher`).

At S, a call can join a batch once all messages that its client sends in it have arrived; so a client that stalls, or
does not read, keeps no other client waiting. While calls run, calls that are ready wait; the one that gets the next
turn takes along all that wait for the same program. S tells A which calls form the batch, and A batches those whose
requests have arrived as well.
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
from ..messages import MAX_BATCH
from ..wire.fair_queue import TICK, FairQueue

MAX_SENT = 4 << 20
"""Bytes that a client may send in a batched call. Larger calls do not profit: their time is arithmetic."""
MAX_RESERVED = 128 << 20
"""Bytes of clients' messages that may be buffered for calls that wait for a batch."""
GATHER_TIME = 0.2
"""Seconds that A waits for the requests of a batch."""


@dataclass(eq=False)
class BatchCandidate:
    """A call of a session that may run in a batch.

    Attributes:
        begin: called when it does, with the batch's name and number of calls, to tell the answering party.
        done: set when the call has run or failed.
    """

    call: BatchedCall
    begin: Callable[[str, int], None] = lambda joint, calls: None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.call.failed = self.done.set

    @property
    def part(self) -> Projection:
        return self.call.part

    def end(self) -> None:
        """Send the remaining messages to the client; raises the call's error."""
        self.call.finish()


class _TakenByOther(Exception):
    """Another session's thread runs this call in its batch."""


def sent_messages(part: Projection, party: Party) -> tuple[int, int]:
    """The number of messages that a party sends in a call, and their bytes."""
    sent = [m for m in part.program.messages if m.src == party and m.phase.name != "SETUP"]
    return len(sent), sum(m.bytes for m in sent)


def waits_before_sending(program: Program, party: Party) -> bool:
    """Whether a party receives a message before it has sent all of its own, as a client with several results does.

    Waiting for all of its messages before the call runs would then be a deadlock.
    """
    moves = [line.step.header for line in part_of(program, frozenset((party,))).lines if isinstance(line.step, Move)]
    sends = [i for i, header in enumerate(moves) if header.src == party]
    return any(header.dst == party for header in moves[: sends[-1]]) if sends else False


class ServerBatcher:
    """Batches calls at S: holds those that are ready until one of them gets a turn."""

    def __init__(self, turns: FairQueue):
        self._turns = turns
        self._lock = threading.Lock()
        self._waiting: dict[Projection, list[BatchCandidate]] = {}
        self._reserved = 0

    def reserve(self, part: Projection, party: Party) -> int | None:
        """Reserve buffer space for a client's messages in a call.

        Returns:
            The bytes, to be given back by `release`; None where the call cannot run in a batch.
        """
        count, size = sent_messages(part, party)
        # What a message takes in a buffer beside its content: labels and the frames of its parts.
        size += count * (2 << 10)
        if size <= MAX_SENT and waits_before_sending(part.program, party):
            return None
        with self._lock:
            if size > MAX_SENT or self._reserved + size > MAX_RESERVED:
                return None
            self._reserved += size
        return size

    def release(self, size: int) -> None:
        with self._lock:
            self._reserved -= size

    def take(self, candidate: BatchCandidate, client: str, tick: Callable[[], None]) -> None:
        """Run a call in a batch with all others that are ready for the same program, in one client's turn.

        Args:
            tick: called periodically while the call waits; may raise to give up.

        Raises:
            BusyError: too many calls wait, or the server is stopping.
            SectorchError: the error that ended the call.
        """
        with self._lock:
            self._waiting.setdefault(candidate.part, []).append(candidate)

        def waiting() -> None:
            if not self._is_waiting(candidate):
                raise _TakenByOther
            tick()

        try:
            with self._turns.turn(client, waiting):
                group = self._group(candidate)
                if group:
                    self._run(group)
        except _TakenByOther:
            pass
        except BaseException:
            # Where it waits no more, another thread has taken it, runs it, and says how it ends.
            if self._withdraw(candidate):
                raise
        while not candidate.done.wait(TICK):
            with suppress(SectorchError):  # the thread that runs the batch raises it
                tick()
        candidate.end()

    def _is_waiting(self, candidate: BatchCandidate) -> bool:
        with self._lock:
            return candidate in self._waiting.get(candidate.part, ())

    def _withdraw(self, candidate: BatchCandidate) -> bool:
        """Remove a call that still waits; returns whether it did."""
        with self._lock:
            waiting = self._waiting.get(candidate.part, [])
            found = candidate in waiting
            if found:
                waiting.remove(candidate)
                if not waiting:
                    del self._waiting[candidate.part]
        return found

    def _group(self, candidate: BatchCandidate) -> list[BatchCandidate]:
        """Take this call and those that wait for the same program; empty if another thread has taken it."""
        with self._lock:
            waiting = self._waiting.get(candidate.part, [])
            if candidate not in waiting:
                return []
            waiting.remove(candidate)
            group = [candidate, *waiting[: MAX_BATCH - 1]]
            del waiting[: MAX_BATCH - 1]
            if not waiting:
                del self._waiting[candidate.part]
        # Those of the group that queue for a turn need none now: they look again, and leave the queue.
        self._turns.wake()
        return group

    def _run(self, group: list[BatchCandidate]) -> None:
        joint = os.urandom(8).hex()
        for one in group:
            try:
                one.begin(joint, len(group))
            except SectorchError as error:
                one.call.error = error
                one.done.set()
        run_group(group)


def run_group(group: list[BatchCandidate]) -> None:
    """Run the calls of a batch in lockstep, and wake the threads that wait for them."""
    try:
        ready = [one.call for one in group if one.call.error is None]
        if ready:
            run_in_lockstep(ready)
    except BaseException as error:
        for one in group:
            one.call.error = one.call.error or error
        raise
    finally:
        for one in group:
            one.done.set()


class AnsweringBatcher:
    """Batches calls at A, as S names them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, Projection], list[BatchCandidate]] = {}

    def take(self, candidate: BatchCandidate, name: str, count: int) -> None:
        """Run a call in a batch with those of the same name that arrive within `GATHER_TIME`.

        Args:
            name: the batch's name, which S chose.
            count: number of calls in it.

        Raises:
            SectorchError: the error that ended the call.
        """
        key = name, candidate.part
        with self._changed:
            group = self._waiting.setdefault(key, [])
            group.append(candidate)
            if len(group) < count:
                self._changed.wait_for(lambda: self._waiting.get(key) is not group, GATHER_TIME)
            # One thread finds the group still there, and runs it: the last to come, or the first whose time is up.
            leads = self._waiting.get(key) is group
            if leads:
                del self._waiting[key]
                self._changed.notify_all()
        if leads:
            run_group(group)
        candidate.done.wait()
        candidate.end()


def setup_is_complete(session: Session, program: Program) -> bool:
    """Whether a call of this program needs no setup messages, because one has run before."""
    return session.setup_of(program).is_complete(session._part(program, {}))


def take_in_batch(
    session: Session, program: Program, inputs: Mapping[str, torch.Tensor], own: frozenset[Party]
) -> BatchedCall:
    """A call that is to run in a batch; its number is released by `runtime.forget` afterwards."""
    runtime: Any = session.runtime
    part = session._part(program, inputs)
    values = session.setup_of(program).values(part, runtime, inputs)
    return BatchedCall(part, runtime, session._number(session.answering[0]), values, inputs, own)
