"""Bounds on a process's memory, for servers and answering parties alike: work is refused before one is reached."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import ArgumentError, BusyError

T = TypeVar("T")
SHARE = 0.9
"""Of the limit of a control group, whose count has more than this process: the rest is for what no estimate has."""
SPARE = 64 << 20
"""Bytes below `ulimit` for what no estimate has: queues of connections, stacks, small blocks; a tenth at most."""
WAIT = 10.0
"""Seconds that a call waits for the memory of calls that run."""
SHORTAGE = 30.0
"""Seconds after a refusal in which memory is short, so that a server ends idle sessions sooner."""
LARGE_BLOCK = 1 << 20
"""Bytes from which a block goes back to the system when it is freed, where `ulimit` bounds the address space."""
STACK = 2 << 20
"""Bytes of addresses of a thread's stack then, for the system's 8 MiB."""
NO_MEMORY = "the memory that the system allows is used up; ask again later, or with fewer rows"
_TEXTS = "allocate memory", "to allocate", "not enough memory", "bad_alloc", "Allocation failed", "start new thread"
"""Of errors that torch, numba and Python raise where the system gives no memory; their types say nothing."""
_ATTEMPT = 0.05
_M_MMAP_THRESHOLD = -3


def _pages(which: int) -> int:
    """A number of /proc/self/statm in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[which]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def address_space() -> int:
    """Bytes of addresses, which `ulimit -v` bounds."""
    return _pages(0)


def resident() -> int:
    """Bytes of memory that this process holds."""
    return _pages(1)


def data() -> int:
    """Bytes of data and stacks, touched or not, which `ulimit -d` bounds."""
    return _pages(5)


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a limit, of version 1 or 2: what it holds is of all its processes.

    Attributes:
        folder: of the group's files.
        limit_file, usage_file: their names.
        prefix: of the numbers in `memory.stat` that count the groups below.
    """

    folder: Path
    limit_file: str
    usage_file: str
    prefix: str = ""

    def limit(self) -> int | None:
        """Bytes; None if there is none."""
        with suppress(OSError, ValueError):
            limit = int((self.folder / self.limit_file).read_text())
            return limit if limit < 1 << 50 else None
        return None

    def usage(self) -> int:
        """Bytes, without the cached files that no process has mapped: the system drops those when it needs room."""
        with suppress(OSError, ValueError):
            lines = (self.folder / "memory.stat").read_text().splitlines()
            stat = {name: int(size) for name, size in (line.split() for line in lines)}
            cached = sum(stat.get(f"{self.prefix}{name}", 0) for name in ("active_file", "inactive_file"))
            mapped = stat.get(f"{self.prefix}{'mapped_file' if self.prefix else 'file_mapped'}", 0)
            return int((self.folder / self.usage_file).read_text()) - max(0, cached - mapped)
        return 0


def control_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """This process's control group and those around it. In a container they begin at the mount."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                kind = "sys/fs/cgroup", "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                kind = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            else:
                continue
            mount, *files = kind
            at = Path(path.lstrip("/"))
            for part in (at, *at.parents):
                if ".." not in part.parts and (root / mount / part / files[0]).exists():
                    found.append(ControlGroup(root / mount / part, *files))
    return list(dict.fromkeys(found))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that the system has given no memory or no thread."""
    for _ in range(8):
        if error is None:
            return False
        if isinstance(error, MemoryError) or (
            isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _TEXTS)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def busy_without_memory() -> Iterator[None]:
    """Raise a BusyError in the place of an error that says that the system has given no memory."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        give_back()
        raise BusyError(NO_MEMORY) from error


def with_memory(work: Callable[[], T]) -> T:
    """What a function returns that allocates; where there is no memory, it is tried again for `WAIT` seconds.

    Raises:
        BusyError: there is none for so long.
    """
    end = time.monotonic() + WAIT
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if time.monotonic() > end:
                raise BusyError(NO_MEMORY) from None
        give_back()
        time.sleep(_ATTEMPT)


def give_back() -> None:
    """Give the system what is free."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class _Account:
    """One kind of memory with its bound.

    Attributes:
        of: what sets the bound, in words, and the control group.
        limit: bytes that are allowed.
        held: bytes that are held now.
        alone: what was held when nothing was reserved.
    """

    of: tuple[str, object]
    limit: int
    held: int
    alone: int


class MemoryBound:
    """Refuses work that would take more memory than a process may hold.

    Several bounds apply, each to what the system counts for it: `limit` to resident memory, `ulimit -d` less a reserve
    to data, `ulimit -v` to addresses, and `SHARE` of the limit of a control group (a container's) to what that group
    holds. Data has libraries' tables and stacks of threads that are in no resident memory: with CUDA's libraries some
    500 MB. The limits are read anew for each call.

    Of each kind, what is held is the larger one of two numbers: what is held now, and what the process held when
    nothing was reserved together with what is reserved now. So memory that a running call has taken does not count
    twice.

    Args:
        limit: bytes of resident memory; None for no such bound.

    Raises:
        ArgumentError: the process holds as much already, so that every call would be refused.
    """

    def __init__(self, limit: int | None = None):
        if limit is not None and (held := resident()) >= limit:
            raise ArgumentError(
                f"--memory {limit / 1e9:g} is too little: this process holds {held / 1e9:.2f} GB before any call: "
                f"name {held / 1e9 + 1:.1f} or more"
            )
        self.limit = limit
        self._groups = control_groups()
        self._released = threading.Condition()
        self._sessions = self._calls = 0
        self._alone: dict[tuple[str, object], int] = {}
        self._spared = False
        self._refused = -SHORTAGE
        self._note_alone()

    def note_refusal(self) -> None:
        """Work was refused for want of memory, here or at another party of a session."""
        self._refused = time.monotonic()

    @property
    def short(self) -> bool:
        """Whether work was refused a short time ago."""
        return time.monotonic() - self._refused < SHORTAGE

    @property
    def bounded(self) -> bool:
        """Whether there is any bound."""
        return any(True for _ in self._accounts())

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
                self._note_alone()
            while self._calls and self._lacking(size) and not self._lacking(size, without_calls=True):
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
        if self._lacking(size) is None:
            return
        give_back()
        for account in self._accounts():
            self._alone[account.of] = min(account.alone, account.held)
        if (account := self._lacking(size)) is not None:
            self.note_refusal()
            raise BusyError(
                f"this takes about {size / 1e6:.0f} MB, and of {account.limit / 1e6:.0f} MB ({account.of[0]}) "
                f"{self._held(account) / 1e6:.0f} are held, {self._sessions / 1e6:.0f} of them for open sessions and "
                f"{self._calls / 1e6:.0f} for calls that run; ask again later, or with fewer rows"
            )

    def _note_alone(self) -> None:
        self._alone = {account.of: account.held for account in self._accounts()}

    def _held(self, account: _Account) -> int:
        return max(account.held, account.alone + self._sessions + self._calls)

    def _lacking(self, size: int, without_calls: bool = False) -> _Account | None:
        """The kind of memory that has no room for so many bytes; without the calls that run, for what they reserved."""
        for account in self._accounts():
            held = account.alone + self._sessions if without_calls else self._held(account)
            if held + size > account.limit:
                return account
        return None

    def _accounts(self) -> Iterator[_Account]:
        if self.limit is not None:
            yield self._account("--memory", self.limit, resident)
        for option, which, use in (
            ("ulimit -d, with a reserve", resource.RLIMIT_DATA, data),
            ("ulimit -v, with a reserve", resource.RLIMIT_AS, address_space),
        ):
            soft, _ = resource.getrlimit(which)
            if soft != resource.RLIM_INFINITY:
                self._spare_addresses()
                yield self._account(option, max(int(SHARE * soft), soft - SPARE), use)
        for group in self._groups:
            if (limit := group.limit()) is not None:
                yield self._account("0.9 of the container's", int(SHARE * limit), group.usage, group)

    def _account(self, option: str, limit: int, use: Callable[[], int], of: object = None) -> _Account:
        held = use()
        return _Account((option, of), limit, held, self._alone.setdefault((option, of), held))

    def _spare_addresses(self) -> None:
        """Take stacks of 2 MiB, and give freed large blocks back: in these accounts both count that no page is of."""
        if not self._spared:
            self._spared = True
            threading.stack_size(STACK)
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
