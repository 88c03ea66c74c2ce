"""A bound on a process's memory, for servers and answering parties alike: work is refused before it is reached."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

from ..errors import BusyError

SHARE = 0.9
"""Of the memory that a control group leaves this process, where no other bound is named."""
VALUES = 16
"""Values of a call that are in memory at the same time, each as large as the largest one: shares, masks, limbs of
products, and messages on their way."""
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

    Args:
        limit: bytes; by default `SHARE` of the control group's, and no bound without one.
    """

    def __init__(self, limit: int | None = None):
        group = group_limit() if limit is None else None
        self.limit = int(SHARE * group) if group is not None else limit
        self._lock = threading.Lock()
        self._reserved = 0

    def check(self, size: int) -> None:
        """Raise BusyError unless there is room for so many bytes, beside what is reserved."""
        if self.limit is None or self._fits(size):
            return
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what is free and not given back to the system
        if not self._fits(size):
            raise BusyError(
                f"this takes about {size / 1e6:.0f} MB, and of {(self.limit or 0) / 1e6:.0f} MB (--memory) "
                f"{resident() / 1e6:.0f} are held and {self._reserved / 1e6:.0f} reserved; ask again later, or with "
                f"fewer rows"
            )

    def reserve(self, size: int) -> None:
        """Reserve room until `release`. Raises BusyError."""
        with self._lock:
            self.check(size)
            self._reserved += size

    def release(self, size: int) -> None:
        """Give reserved room back."""
        with self._lock:
            self._reserved -= size

    def _fits(self, size: int) -> bool:
        return self.limit is None or resident() + self._reserved + size <= self.limit
