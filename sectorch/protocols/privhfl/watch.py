"""What a run tells while it runs. The base class is silent; `cli.py` shows a bar and a table."""

from __future__ import annotations

from collections.abc import Callable

from .settings import Client


class Watch:
    """Override what you want to see."""

    def step(self, what: str, parts: int | None) -> Callable[[], None]:
        """A step of so many parts begins (None: not known); the function that is returned is called after each."""
        return lambda: None

    def finished(self, client: Client, records: list[dict]) -> None:
        """A client has finished local training (one record) or a round (one more)."""
