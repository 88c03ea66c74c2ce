"""What waits to go over a connection: bounded, and written by whoever adds to it while the connection takes it.

A thread that sends finds nothing waiting most of the time, and then writes itself: no other thread has to wake up. A
write never waits. What the connection does not take at once, and what others have added meanwhile, is left to a thread
that does nothing else (`Stream`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ...errors import PeerLostError, SectorchError
from .channel import again

OUTBOX_BYTES = 16 << 20
TOGETHER_BYTES = 256 << 10
"""Small frames that wait for the connection go as one message of up to this size."""
URGENT_BYTES = 4 << 20
"""Refusals and credits that may wait beyond the outbox for a peer that takes nothing."""
STUCK = 20.0
"""Seconds after which a connection that takes nothing more counts as lost."""
IN_TURN = 8
"""Messages that a sender writes of others' before it leaves the rest to the connection's own thread."""


class Outbox:
    """What waits for `peer`, from all threads."""

    def __init__(self, peer: str):
        self._peer = peer
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting: deque[bytes] = deque()
        self._write: Callable[[bytes], bool] | None = None
        self._writing = self._handed_over = False
        self._changed = threading.Semaphore(0)
        self._closed: SectorchError | None = None
        self.queued = self.taken = 0

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self.queued - self.taken

    def put(self, data: bytes, urgent: bool = False) -> None:
        """Add a packed frame, and write what waits; waits itself while too much does, unless it is `urgent`.

        Raises:
            PeerLostError: the connection has taken nothing for `STUCK` seconds. Or what it was closed with.
        """
        with self._lock:
            while not urgent and self.size > OUTBOX_BYTES and self._closed is None:
                if not self._room.wait(STUCK):
                    raise PeerLostError(f"{self._peer} has taken nothing for {STUCK:.0f} s; it may hang")
            if self._closed is not None:
                raise again(self._closed)
            self.queued += len(data)
            self._waiting.append(data)
            if self._writing or self._write is None:
                return
            self._writing = True
        self.go_on()

    def go_on(self) -> None:
        """Write what waits, as the one who may. `left` tells when that has to be gone on with."""
        for _ in range(IN_TURN):
            if (data := self.take(last=True)) is None:
                return
            if self._write is None or not self._write(data):
                break
        with self._lock:
            self._handed_over = True
        self._changed.release()

    def take(self, last: bool = False) -> bytes | None:
        """What goes next, small frames together; None if nothing waits, and then whoever writes is done (`last`)."""
        with self._lock:
            if not self._waiting:
                self._writing = self._writing and not last
                if self._closed is not None:
                    self._changed.release()
                return None
            data = self._waiting.popleft()
            size = len(data)
            if self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                together = [data]
                while self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                    together.append(self._waiting.popleft())
                    size += len(together[-1])
                data = b"".join(together)
            self.taken += size
            self._room.notify_all()
        return data

    def left(self, seconds: float) -> bool:
        """Whether, within that time, a sender left the writing to whoever calls this; see `go_on`."""
        self._changed.acquire(timeout=seconds)
        with self._lock:
            handed_over, self._handed_over = self._handed_over, False
        return handed_over

    def begin(self, write: Callable[[bytes], bool]) -> None:
        """What waits and what comes is given to `write`, which says whether the connection can take more now."""
        with self._lock:
            self._write, self._writing = write, True
        self.go_on()

    def close(self, reason: SectorchError) -> None:
        """Take nothing more; what waits still goes."""
        with self._lock:
            self._closed = reason
            self._room.notify_all()
        self._changed.release()

    @property
    def over(self) -> bool:
        """Whether it is closed and everything is out."""
        with self._lock:
            return self._closed is not None and not self._waiting and not self._writing

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting
