"""Seconds by kind of work, as Table 2 of SecSV divides them; and messages as bytes for a link's speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = ("arithmetic", "encryption", "decryption", "sharing")


class Clock:
    """Adds up the seconds of all parties, who in a simulation work one after another."""

    def __init__(self):
        self.seconds: Counter = Counter()

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count the block's seconds as work of a kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start


def communication(size: int, gigabits: float = 1.0) -> float:
    """Seconds that so many bytes take on a link of so many Gbit/s."""
    return 8 * size / (gigabits * 1e9)
