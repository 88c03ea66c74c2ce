"""Sessions that come about: what a party waits for, and its ends of one that the server has named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from ...errors import ArgumentError, PeerLostError, SectorchError
from ..messages import Done
from ..parties.client import Connection
from ..parties.said import reason
from ..wire.background import begin
from ..wire.channel import Channel, again
from .circles import Key
from .meetings import wire_of
from .secured import Relayed, Secured

BEAT = 2.0
"""Seconds between words to the others, so that a long computation is no silence."""


class Called:
    """What the server says of the sessions that come about."""

    def __init__(self):
        self._changed = threading.Condition()
        self._expected: dict[Key, Meeting | SectorchError | None] = {}

    def expect(self, key: Key) -> None:
        with self._changed:
            if key in self._expected:
                raise ArgumentError(f"this party waits for '{key[0]}' with the same parties already")
            self._expected[key] = None

    def forget(self, key: Key) -> None:
        with self._changed:
            meeting = self._expected.pop(key, None)
        if isinstance(meeting, Meeting):  # it began as this party stopped waiting: the others need not wait for it
            meeting.give_up(PeerLostError("it does not wait any more"))

    def refuse(self, key: Key, error: SectorchError) -> None:
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = error
                self._changed.notify_all()

    def give_up(self, keys: Iterable[Key], error: BaseException) -> None:
        """This party does not wait any more for what it waits for under these; see `wait`."""
        with self._changed:
            for key in keys:
                if key in self._expected and self._expected[key] is None:
                    self._expected[key] = PeerLostError(str(error))
            self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again at the sessions that this party is in: one has failed."""
        with self._changed:
            self._changed.notify_all()

    def came(self, key: Key, open_: Callable[[], Meeting]) -> bool:
        """Whether this party waited for it, and takes part."""
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = open_()
                self._changed.notify_all()
                return True
        return False

    def wait(self, key: Key, connection: Connection, seconds: float | None, others: list[Meeting]) -> Meeting:
        """The session, when all have come; that one of the `others`, which this party is in, fails ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while (meeting := self._expected.get(key)) is None:
                left = 1.0 if end is None else min(1.0, end - time.monotonic())
                if connection.link.closed is not None:
                    raise again(connection.link.closed)
                for other in others:
                    other.alive()
                if left <= 0:
                    raise PeerLostError(f"not all of {', '.join(key[1])} came for '{key[0]}' in {seconds:.0f} s")
                self._changed.wait(left)
            del self._expected[key]
        if isinstance(meeting, SectorchError):
            raise meeting
        return meeting


class Meeting:
    """This party's ends of a session that the server has named: one channel to the server, one to each other party.

    `failed` is called when it has.
    """

    def __init__(self, connection: Connection, run: bytes, names: tuple[str, ...], failed: Callable[[], None]):
        link = connection.link
        self.run, self._connection, self._heard = run, connection, failed
        self._control = link.open(run)
        self.channels: dict[str, Channel] = {
            name: link.open(wire_of(run, connection.name, name), Relayed, name)
            for name in names
            if name != connection.name
        }
        self._control.on_failure(self._failed)

    def _failed(self, failure: SectorchError) -> None:
        for channel in self.channels.values():
            channel.fail(failure)
        self._heard()

    def alive(self) -> None:
        """Raises what the session failed with."""
        self._control.beat()

    def give_up(self, error: BaseException) -> None:
        """The others' session ends with the reason, which holds no secret."""
        self._control.abort(reason(error, f"'{self._connection.name}'"))
        if isinstance(error, SectorchError):  # another thread of this party, which is in it, ends with the same
            self._failed(error)
        self.close()

    def done(self) -> None:
        """This party has done its part."""
        try:
            self._connection.ask(Done(meeting=self.run.hex()))
        finally:
            self.close()

    def close(self) -> None:
        for channel in (*self.channels.values(), self._control):
            channel.close()


@contextmanager
def beating(edges: list[Secured]) -> Iterator[None]:
    """Beside the block, the others hear now and then that this party is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            for edge in edges:
                with suppress(SectorchError):  # the session's own thread meets it too
                    edge.beat()

    thread = begin(beat, "beats")
    try:
        yield
    finally:
        over.set()
        thread.join()
