"""What a run tells while it runs. The base class is silent; `cli.py` shows bars and a table."""

from __future__ import annotations

from collections.abc import Callable


class Watch:
    """Override what you want to see."""

    def step(self, what: str, parts: int | None) -> Callable[[], None]:
        """A step of so many parts begins; the function that is returned is called after each."""
        return lambda: None

    def encrypted(self, seconds: float) -> None:
        """One party has asked one peer under encryption, which takes so many seconds on average."""

    def finished(self, round_: int, records: dict[str, list[dict]]) -> None:
        """A round is kept (0 is local training); the records of each party so far."""
