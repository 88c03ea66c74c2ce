"""What a run tells while it runs. The base class is silent; `cli.py` shows a bar with an estimate."""

from __future__ import annotations


class Watch:
    """Override what you want to see."""

    def started(self, coalitions: int) -> None:
        """So many coalitions are to be tested at most; those that are on disk already are reported at once."""

    def tested(self, round_number: int, coalition: int) -> None:
        """A coalition's utility is known."""

    def note(self, text: str) -> None:
        """Something worth a line."""
