"""Ctrl-C while a command loads what it is made of (torch: a second): one line and exit code 130, no traceback.

Python raises KeyboardInterrupt wherever it is, and half of what is loaded there catches or reports it in its own way.
Nothing is open yet, so the process ends on the spot. In a process that is no command, or that has a handler of its own,
or ignores Ctrl-C, nothing changes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_command() -> bool:
    """Whether this process is the script `sectorch`, or `python -m sectorch`, whose package is loaded before it runs.

    Python says "-m" in place of the program's name until it has found the module.
    """
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":
        return os.path.basename(program) == "sectorch"
    modules = (word.removeprefix("-m") for word in sys.orig_argv[1:])
    return any(word.split(".")[0] == "sectorch" for word in modules)


@contextmanager
def interruptible(command: bool) -> Iterator[None]:
    """Inside, Ctrl-C ends the process, if it is a command; afterwards it is Python's own again."""
    mine = command and threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"stopped\n")
    os._exit(130)
