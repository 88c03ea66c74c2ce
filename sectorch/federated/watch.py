"""Progress of a run (`Watch` is silent, `Screen` shows bars and a growing table), and estimates before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group

from ..cli.command import bars
from ..errors import TooLongError

Tick = Callable[..., None]
"""Called after each part of a step, or with the number of parts that are done."""


def silent(count: int = 1) -> None:
    """The tick of a step without a display."""


class Watch:
    """Callbacks of a run; override those that you need."""

    def begins(self, units: int) -> None:
        """The run has so many units of work (participants times rounds, coalitions, ...)."""

    def step(self, what: str, parts: int | None) -> Tick:
        """A step of so many parts begins (None: not known); the function that is returned is called as they end."""
        return silent

    def finished(self, name: str, record: Any) -> None:
        """A unit of this name is done and, where the run has a folder, on disk."""

    def note(self, text: str) -> None:
        """A line of text, shown until the next one."""

    def warn(self, text: str) -> None:
        """A warning, which stays visible."""


class Screen(Watch):
    """A bar for the run, one for its present step, the last note, and the run's own table.

    Args:
        run: its `so_far()` gives the table.
        console: prints the warnings.
        what: the name of the units, for the bar.
    """

    def __init__(self, run: Any, console: Console, what: str = "run"):
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


# Estimates before a run begins; a run of a day or more needs consent.

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
        """Whether the run takes a day or a terabyte."""
        return self.seconds >= DAY or self.bytes >= TERABYTE


def agree(estimate: Estimate, console: Console, yes: bool) -> None:
    """Print the estimate of a run of over a minute, and ask for consent to a long one.

    Args:
        yes: consent was given beforehand.

    Raises:
        TooLongError: consent was refused, or there is no terminal to ask.
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
