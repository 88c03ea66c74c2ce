"""The seconds of a long check: what it is at is shown while it runs, and it stops when they are over."""

from __future__ import annotations

import contextvars
import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..errors import ArgumentError


class TimeOver(BaseException):
    """The seconds of a check are over. The check itself catches it; `except Exception` of what it runs does not."""


class Clock:
    """The seconds and the progress of one check, as a context.

    Args:
        name: of the check, for people.
        seconds: it may take.
        progress: whether a bar on standard error shows what it is at; None for where that is a terminal.

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
    def took(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self._start

    def part(self, what: str, count: int | None = None) -> None:
        """Begin a part of the check, of so many steps.

        Raises:
            TimeOver: the seconds are over.
        """
        self.at = what
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(f"{self.name}: {what}", total=count)
        self.look()

    def step(self) -> None:
        """One step more is done."""
        if self._bar is not None:
            self._bars.advance(self._bar)

    def look(self) -> None:
        """
        Raises:
            TimeOver: the seconds are over.
        """
        if self.took > self.seconds:
            raise TimeOver


_RUNNING: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("check", default=None)


def look_at_clock() -> None:
    """Called before each run of a protocol under test.

    Raises:
        TimeOver: the seconds of the check that it is a part of are over.
    """
    clock = _RUNNING.get()
    if clock is not None:
        clock.look()
