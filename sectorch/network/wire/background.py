"""Threads of this package's own, which carry a connection and give signs of life: none of them opens a session."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

_LOCK = threading.Lock()
_OURS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def begin(work: Callable[..., Any], name: str, *args: Any) -> threading.Thread:
    """A thread that does this and ends with the process."""
    thread = threading.Thread(target=work, args=args, daemon=True, name=name)
    with _LOCK:
        _OURS.add(thread)
    thread.start()
    return thread


def alone() -> bool:
    """Whether this process has no thread but the one that asks and those: while it waits, nobody else here begins
    anything."""
    with _LOCK:
        others = [thread for thread in threading.enumerate() if thread not in _OURS]
    return others == [threading.current_thread()]
