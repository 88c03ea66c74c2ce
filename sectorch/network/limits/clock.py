"""Time that only goes on, for limits of a day: no setting of the clock forgives what was used.

While the machine runs, time is what it counts since it was started, whatever its clock is set to. Over a restart of the
machine it is the clock, and no time has passed where that was set back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Reading:
    """What a machine's clocks say.

    Args:
        boot: a name for the time since its start; empty where there is none. since: seconds since then. wall: the
            clock, in seconds.
    """

    boot: str
    since: float
    wall: float


def read() -> Reading:
    """Of this machine, now."""
    try:
        boot = _BOOT.read_text().strip()
        return Reading(boot, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
    except (OSError, AttributeError):  # another system than Linux
        return Reading("", 0.0, time.time())


@dataclass
class Clock:
    """The time of one file of usage, as it was written last.

    Args:
        now: seconds that have passed for it. last: the reading then.
    """

    now: float
    last: Reading

    def advance(self, reading: Reading) -> None:
        """Go on to a reading; never back."""
        before = self.last
        if reading.boot and reading.boot == before.boot:
            self.now += max(0.0, reading.since - before.since)
            # Of several processes one may have read earlier than another: what was counted is not counted again.
            reading = Reading(reading.boot, max(reading.since, before.since), reading.wall)
        else:
            self.now += max(0.0, reading.wall - before.wall)
        self.last = reading


Read = Callable[[], Reading]
