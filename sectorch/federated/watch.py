"""What a run tells while it goes on: `Watch` is silent, `Screen` shows bars and a table that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType

from ..cli.command import bars
from .errors import TooLongError

Tick = Callable[..., None]
"""Called after each part of a step, or with the number of parts that are done."""


def silent(count: int = 1) -> None:
    """The tick of a step that nobody watches."""


class Watch:
    """Override what you want to see."""

    def begins(self, units: int) -> None:
        """The run has so many units of work (participants times rounds, coalitions, ...)."""

    def step(self, what: str, parts: int | None) -> Tick:
        """A step of so many parts begins (None: not known); the function that is returned is called as they end."""
        return silent

    def finished(self, name: str, record: Any) -> None:
        """A unit of this name is done and, where the run has a folder, on disk."""

    def note(self, text: str) -> None:
        """Something worth a line, until the next one."""

    def warn(self, text: str) -> None:
        """Something that people are to read, now and later."""


class Shown(Protocol):
    """A run that can show how far it has come."""

    def so_far(self) -> RenderableType: ...


class Screen(Watch):
    """A bar for the run, one for its present step, the last note, and the run's own table.

    Args:
        run: whose `so_far` is drawn.
        console: where warnings are printed, to stay.
        what: what the units are, for the bar.
    """

    def __init__(self, run: Shown, console: Console, what: str = "run"):
        self.run, self.console, self.said = run, console, ""
        self.progress = bars()
        self.whole = self.progress.add_task(what, total=None)
        self.part = self.progress.add_task("", total=None, visible=False)

    def __rich__(self) -> Group:
        return Group(self.run.so_far(), self.progress, self.said)

    def begins(self, units: int) -> None:
        self.progress.update(self.whole, total=units, completed=0)

    def step(self, what: str, parts: int | None) -> Tick:
        self.progress.remove_task(self.part)
        self.part = self.progress.add_task(what, total=parts)
        return lambda count=1: self.progress.advance(self.part, count)

    def finished(self, name: str, record: Any) -> None:
        self.progress.advance(self.whole)

    def note(self, text: str) -> None:
        self.said = text

    def warn(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


# What a run will take, told before it begins, and a question where it is a day or more.


MINUTE, DAY = 60.0, 86_400.0
TERABYTE = 1e12


@dataclass(frozen=True)
class Estimate:
    """Seconds of this machine, one party after another, and bytes of messages between the parties."""

    seconds: float
    bytes: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.seconds + other.seconds, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Estimate:
        return Estimate(self.seconds * times, self.bytes * times)

    def __str__(self) -> str:
        size = f" and {in_bytes(self.bytes)} of messages" if self.bytes else ""
        return f"about {in_time(self.seconds)}{size}"

    @property
    def long(self) -> bool:
        """A day, or a terabyte."""
        return self.seconds >= DAY or self.bytes >= TERABYTE


def agree(estimate: Estimate, console: Console, yes: bool) -> None:
    """Say what a run takes that is over a minute; where it is much, ask.

    Args:
        yes: it was agreed to beforehand.

    Raises:
        TooLongError: nobody agreed, or nobody is there to be asked.
    """
    if estimate.seconds < MINUTE and not estimate.long:
        return
    console.print(f"estimate: {estimate}, measured on a small part", markup=False, highlight=False)
    if not estimate.long or yes:
        return
    if console.is_terminal and console.input("Go on? [y/N] ").strip().lower() in ("y", "yes"):
        return
    raise TooLongError(f"this run takes {estimate}; ask for less, or agree to it with --yes")


def in_time(seconds: float) -> str:
    """Two digits in the unit that fits."""
    for unit, size in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} seconds"


def in_bytes(size: float) -> str:
    """Three digits in the unit that fits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
