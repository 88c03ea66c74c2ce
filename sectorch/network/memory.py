"""A bound on a process's memory, for servers and answering parties alike: work is refused before it is reached."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..errors import BusyError

SHARE = 0.9
"""Of the memory that a control group leaves this process, where no other bound is named."""
WAIT = 10.0
"""Seconds that a call waits for the memory of calls that run."""
SHORTAGE = 30.0
"""Seconds after a refusal in which memory is short, so that a server ends idle sessions sooner."""
_GROUPS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def group_limit() -> int | None:
    """The memory of this process's control group (a container's limit); None without one."""
    for path in _GROUPS:
        with suppress(OSError, ValueError):
            limit = int(Path(path).read_text())
            return limit if limit < 1 << 50 else None
    return None


class MemoryBound:
    """Refuses work that would take more memory than a process may hold.

    What is held is the larger one of two numbers: the resident memory now, and that of the process when nothing was
    reserved together with what is reserved now. So memory that a running call has taken does not count twice.

    Args:
        limit: bytes; by default `SHARE` of the control group's, and no bound without one.
    """

    def __init__(self, limit: int | None = None):
        group = group_limit() if limit is None else None
        self.limit = int(SHARE * group) if group is not None else limit
        self._released = threading.Condition()
        self._sessions = self._calls = 0
        self._alone = resident()
        """The resident memory when nothing was reserved."""
        self._refused = -SHORTAGE

    def note_refusal(self) -> None:
        """Work was refused for want of memory, here or at another party of a session."""
        self._refused = time.monotonic()

    @property
    def short(self) -> bool:
        """Whether work was refused a short time ago."""
        return time.monotonic() - self._refused < SHORTAGE

    def check(self, size: int) -> None:
        """Raise BusyError unless there is room for so many bytes."""
        with self._released:
            self._check(size)

    def reserve(self, call: int, session: int = 0) -> None:
        """Reserve bytes for a call and, beside it, for what its session keeps, each until `release`.

        Where calls that run have reserved what is missing, this waits for them, `WAIT` seconds at most.

        Raises:
            BusyError: there is no room.
        """
        size, end = call + session, time.monotonic() + WAIT
        with self._released:
            if not self._sessions + self._calls:
                self._alone = resident()
            while self._calls and not self._fits(size) and self._fits(size, without_calls=True):
                if not self._released.wait(max(0.0, end - time.monotonic())):
                    break
            self._check(size)
            self._calls, self._sessions = self._calls + call, self._sessions + session

    def take_over(self, size: int) -> None:
        """Reserve bytes that a running call has reserved and is about to release; `release` gives them back."""
        with self._released:
            self._calls += size

    def release(self, call: int, session: int = 0) -> None:
        """Give reserved room back."""
        with self._released:
            self._calls, self._sessions = self._calls - call, self._sessions - session
            self._released.notify_all()

    def _check(self, size: int) -> None:
        if self._fits(size):
            return
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what is free and not given back to the system
        self._alone = min(self._alone, resident())
        if not self._fits(size):
            self.note_refusal()
            raise BusyError(
                f"this takes about {size / 1e6:.0f} MB, and of {(self.limit or 0) / 1e6:.0f} MB (--memory) "
                f"{self._held() / 1e6:.0f} are held, {self._sessions / 1e6:.0f} of them for open sessions and "
                f"{self._calls / 1e6:.0f} for calls that run; ask again later, or with fewer rows"
            )

    def _held(self) -> int:
        return max(resident(), self._alone + self._sessions + self._calls)

    def _fits(self, size: int, without_calls: bool = False) -> bool:
        if self.limit is None:
            return True
        held = self._alone + self._sessions if without_calls else self._held()
        return held + size <= self.limit
