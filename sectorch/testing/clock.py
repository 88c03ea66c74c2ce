"""The time limit and the progress bar of a long check."""

from __future__ import annotations

import contextvars
import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..errors import ArgumentError


class TimeOver(BaseException):
    """The time limit of a check is over. The check catches it; an `except Exception` in the tested code does not."""


class Clock:
    """The time limit and the progress of one check, as a context.

    Args:
        name: the name of the check, for the bar.
        seconds: the time limit.
        progress: whether to show a progress bar on standard error; by default if that is a terminal.

    Raises:
        ArgumentError: seconds that are no number above 0.
    """

    def __init__(self, name: str, seconds: float | None, progress: bool | None):
        seconds = math.inf if seconds is None else seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ArgumentError(f"seconds is how long {name} may take, above 0; got {seconds!r}")
        self.name, self.seconds, self.at = name, float(seconds), "the start"
        self._start = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shows = console.is_terminal if progress is None else progress
        self._bars = Progress(*columns, console=console, transient=console.is_terminal, disable=not shows)
        self._bar: TaskID | None = None

    def __enter__(self) -> Clock:
        self._token = _RUNNING.set(self)
        self._bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()
        _RUNNING.reset(self._token)

    @property
    def elapsed(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self._start

    def part(self, what: str, count: int | None = None) -> None:
        """Begin a part of the check, with `count` steps.

        Raises:
            TimeOver: the seconds are over.
        """
        self.at = what
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(f"{self.name}: {what}", total=count)
        self.look()

    def step(self) -> None:
        """Count a step as done."""
        if self._bar is not None:
            self._bars.advance(self._bar)

    def look(self) -> None:
        """Check the time limit.

        Raises:
            TimeOver: the seconds are over.
        """
        if self.elapsed > self.seconds:
            raise TimeOver


_RUNNING: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("check", default=None)


def look_at_clock() -> None:
    """Check the time limit of the running check, if any; called before each run of a protocol under test.

    Raises:
        TimeOver: its seconds are over.
    """
    clock = _RUNNING.get()
    if clock is not None:
        clock.look()
