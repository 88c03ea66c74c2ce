"""What travelled in a run: the messages that the core tells its observers of, added up."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...choreography.ledger import Observer
from ...choreography.steps import Sent


class Traffic(Observer):
    """Messages and bytes of what is inside its `with` blocks, by protocol, message and ends.

    Args:
        rows: what was counted before.
    """

    def __init__(self, rows: Iterable[dict] = ()):
        self._rows = {(r["protocol"], r["message"], r["sender"], r["receiver"]): dict(r) for r in rows}

    def message(self, line: Sent, value: torch.Tensor) -> None:
        place = (line.protocol, line.label, line.src.name, line.dst.name)
        names = dict(zip(("protocol", "message", "sender", "receiver"), place, strict=True))
        row = self._rows.setdefault(
            place, {**names, "hidden_by": line.mask, "shows": line.shows, "messages": 0, "bytes": 0}
        )
        row["messages"] += 1
        row["bytes"] += line.bytes

    @property
    def rows(self) -> list[dict]:
        """For tables and JSON."""
        return [self._rows[place] for place in sorted(self._rows)]

    @property
    def bytes(self) -> int:
        return sum(row["bytes"] for row in self.rows)
