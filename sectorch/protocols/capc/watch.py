"""What a run tells while it runs. The base class is silent; `cli.py` shows a bar and a table."""

from __future__ import annotations

from collections.abc import Callable

from .report import Record


class Watch:
    """Override what you want to see."""

    def step(self, what: str, parts: int) -> Callable[[int], None]:
        """A step of so many parts begins; the function that is returned is called with each few that are done."""
        return lambda count: None

    def asked(self, record: Record) -> None:
        """Some more queries of this party were answered."""

    def finished(self, record: Record) -> None:
        """A querying party has its answers and its new model."""
