"""How long a party waits for another one, in one place: for each step, and at the server for each call.

A step's time begins anew with what the peer says. Clients wait for a server that waits for others, so that its beats
are words to them. The server waits for the client alone: a beat brings it nothing, and all its waits of one call have a
limit together, which grows with what has come and gone, as a large call over a slow line takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import PeerLostError

SILENCE = 60.0
"""Seconds without a word after which a party counts as hanging."""
CALL = 600.0
"""Seconds that the server waits for one party in one call, beside those of `PACE`."""
PACE = 1 << 20
"""Bytes a second that a party may at least be expected to send and take."""


class Deadline:
    """For the waits of one end of a session's channel.

    Args:
        peer: whom this end waits for.
        silence: seconds of a step; `SILENCE` if None.
        call: seconds of all waits of a call together, for a peer whose beats are no words; None for the others.
    """

    def __init__(self, peer: str, silence: float | None = None, call: float | None = None):
        self.silence = SILENCE if silence is None else silence
        self._peer, self._call = peer, call
        self._heard = time.monotonic()
        # Each counter has one writer: the link's pump that of bytes, the session's thread the others.
        self._moved = self._moved_before = 0
        self._spent: float | None = None

    def heard(self, beat: bool) -> None:
        """The peer said something."""
        if not beat or self._call is None:
            self._heard = time.monotonic()

    def moved(self, count: int) -> None:
        """So many bytes came from the peer, or were taken by it."""
        self._moved += count

    def begin(self) -> None:
        """A call begins."""
        self._spent = None if self._call is None else 0.0
        self._moved_before = self._moved

    def rest(self) -> None:
        """The call is over."""
        self._spent = None

    @contextmanager
    def waiting(self, silence: float | None) -> Iterator[Wait]:
        """A wait of a step; without `silence` it may be long, but for the call's limit."""
        wait = Wait(self, silence)
        try:
            yield wait
        finally:
            if self._spent is not None:
                self._spent += time.monotonic() - wait.since

    def left(self, since: float, silence: float | None) -> float | None:
        """Seconds that a wait may still take; None where it may take any time.

        Raises:
            PeerLostError: none.
        """
        now, ends = time.monotonic(), []
        if silence is not None:
            ends.append((max(since, self._heard) + silence, f"has said nothing for {silence:.0f} s; it may hang"))
        if self._spent is not None and self._call is not None:
            allowed = self._call + (self._moved - self._moved_before) / PACE
            ends.append(
                (since + allowed - self._spent, f"keeps a call waiting for more than {self._call:.0f} s in all")
            )
        for end, said in ends:
            if now >= end:
                raise PeerLostError(f"{self._peer} {said}")
        return min(end for end, _ in ends) - now if ends else None


class Wait:
    """One wait; see `Deadline.waiting`."""

    def __init__(self, deadline: Deadline, silence: float | None):
        self.since = time.monotonic()
        self._deadline, self._silence = deadline, silence

    def left(self) -> float | None:
        """As of `Deadline.left`."""
        return self._deadline.left(self.since, self._silence)
