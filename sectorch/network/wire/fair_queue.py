"""A bounded queue of calls that is fair among clients."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import BusyError

TICK = 5.0
"""Seconds between two calls of a waiting call's `tick`."""


class FairQueue:
    """Runs a bounded number of calls at the same time, and orders those that wait.

    The client with the fewest running calls goes first; of several, the one that was served longest ago. So a client
    with many calls does not keep out one with a single call. Where all of several running calls are one client's, one
    call of another client runs beside them.

    Args:
        running: calls that run at the same time.
        waiting: calls that may wait, all clients together.
        each: calls of one client that may wait.
    """

    def __init__(self, running: int, waiting: int = 64, each: int = 32):
        self._limit, self._most, self._each = running, waiting, each
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, str]] = []
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # for the last 1000 clients, the number of the turn that each had last
        self._count = 0
        self.closed = ""
        """Why no more calls are taken; empty while they are."""

    def drain(self, why: str, seconds: float) -> bool:
        """Begin no more calls, and refuse those that wait; returns whether the running ones ended within `seconds`."""
        with self._changed:
            self.closed = why
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._running, seconds)

    def figures(self) -> dict[str, float]:
        """The numbers of running and of waiting calls."""
        with self._changed:
            return {"calls_running": self._running.total(), "calls_waiting": len(self._waiting)}

    def wake(self, *_: object) -> None:
        """Have all waiting calls call their `tick` now."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def turn(self, client: str, tick: Callable[[], None]) -> Iterator[None]:
        """Wait for a turn, which lasts for the block.

        Args:
            tick: called every `TICK` seconds while waiting; may raise to give up.

        Raises:
            BusyError: too many calls wait already, or no more are begun.
        """
        with self._changed:
            self._check_open()
            mine = sum(name == client for _, name in self._waiting)
            if len(self._waiting) >= self._most or mine >= self._each:
                waiting = f"{len(self._waiting)} calls wait for the server, {mine} of them of '{client}'"
                raise BusyError(f"{waiting}; ask again in a moment")
            self._count += 1
            ticket = (self._count, client)
            self._waiting.append(ticket)
        try:
            self._wait(ticket, tick)
        except BaseException:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            raise
        try:
            yield
        finally:
            self._end(client)

    @contextmanager
    def turn_if_idle(self, client: str) -> Iterator[bool]:
        """Take a turn for the block if no call runs or waits and there is a place beside it; says whether it did.

        Raises:
            BusyError: no more calls are begun.
        """
        with self._changed:
            self._check_open()
            idle = self._limit > 1 and not self._running and not self._waiting
            if idle:
                self._begin(client)
        try:
            yield idle
        finally:
            if idle:
                self._end(client)

    def _check_open(self) -> None:
        if self.closed:
            raise BusyError(self.closed)

    def _wait(self, ticket: tuple[int, str], tick: Callable[[], None]) -> None:
        while True:
            with self._changed:
                self._check_open()
                if self._may_go(ticket) or (self._changed.wait(TICK) and self._may_go(ticket)):
                    self._waiting.remove(ticket)
                    self._begin(ticket[1])
                    self._changed.notify_all()
                    return
            tick()

    def _begin(self, client: str) -> None:
        """Begin a call of a client. Called with the lock held."""
        self._running[client] += 1
        self._count += 1
        self._served.pop(client, None)
        self._served[client] = self._count
        while len(self._served) > 1000:
            self._served.pop(next(iter(self._served)))

    def _end(self, client: str) -> None:
        with self._changed:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._changed.notify_all()

    def _may_go(self, ticket: tuple[int, str]) -> bool:
        """Whether this call is the next, and may run now. Called with the lock held."""
        # Fewest running calls first, then the client that was served the longest ago. Where one client has all the
        # running calls, there is a place more for another: so long calls of one do not block all others.
        first = min(self._waiting, key=lambda t: (self._running[t[1]], self._served.get(t[1], 0), t[0]))
        alone = self._limit > 1 and len(self._running) == 1 and first[1] not in self._running
        return first is ticket and self._running.total() < self._limit + alone
