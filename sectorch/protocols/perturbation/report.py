"""What a run shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import nn

from ...federated.outcome import Outcome
from ...plots import Plot
from .settings import Settings


@dataclass
class History(Outcome):
    """What a run shows: per round the training loss before the step; at the end the test score, seconds and bytes.

    `score` is the test accuracy in percent, or the mean squared error of a regression.
    """

    losses: list[float] = field(default_factory=list)
    score: float = float("nan")
    client_seconds: float = 0.0
    server_seconds: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    model: nn.Module | None = field(default=None, repr=False)
    settings: Settings = field(default_factory=Settings)
    regression: bool = False
    apart: bool = False
    """Whether other parties were elsewhere; the training loss is nobody's to know then."""

    def headline(self) -> dict[str, float]:
        name = "test MSE" if self.regression else "test accuracy"
        return {"last loss": self.losses[-1], name: self.score}

    @property
    def unit(self) -> str:
        return "loss, and MSE" if self.regression else "loss, and %"

    def tables(self) -> list[Table]:
        shown = Table(title=f"{self.settings.clients} clients, {len(self.losses)} rounds, {self.settings.method}")
        heads = ("test MSE" if self.regression else "test accuracy, %", "last loss", "client s", "server s", "MB down")
        for head in (*heads, "MB up"):
            shown.add_column(head, justify="right")
        seconds = (f"{self.client_seconds:.2f}", f"{self.server_seconds:.2f}")
        size = (f"{self.down_bytes / 1e6:.2f}", f"{self.up_bytes / 1e6:.2f}")
        shown.add_row(f"{self.score:.4f}", f"{self.losses[-1]:.5f}", *seconds, *size)
        return [shown]

    def sentences(self) -> list[str]:
        if self.settings.method == "fedavg":
            return ["FedAvg: every client sees the model, and the server every client's gradient. Protects nothing."]
        seen = "the sum of the clients' masked updates" if self.settings.masked else "each client's update (no masks)"
        return [
            f"Clients saw a noised model, the server {seen}; the site's page on it says what the noise hides.",
            "All parties ran in one process, which therefore protected nothing: this is a simulation."
            if not self.apart
            else "This process was one party; what the others have never left them.",
        ]

    def as_dict(self) -> dict[str, Any]:
        kept = ("losses", "score", "client_seconds", "server_seconds", "down_bytes", "up_bytes")
        found = {"settings": self.settings.as_dict(), **{name: getattr(self, name) for name in kept}}
        return found | {"losses": [None if loss != loss else loss for loss in self.losses]} if self.apart else found

    def rows(self) -> dict[str, list[dict]]:
        return {"losses": [dict(round=t, loss=loss) for t, loss in enumerate(self.losses) if loss == loss]}

    def plots(self) -> list[Plot]:
        if self.apart:
            return []
        return [Plot("curve", "round", "training loss", {self.settings.method: dict(enumerate(self.losses))})]
