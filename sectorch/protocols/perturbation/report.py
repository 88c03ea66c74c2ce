"""What a run shows: the training loss of each round, the test score, seconds, bytes, and who learned what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import nn

from ...display import Plot
from ...federated import outcome
from ...federated.outcome import Outcome, where_it_ran
from .settings import Settings


@dataclass
class History(Outcome):
    """A finished run.

    Attributes:
        losses: of each round, before its step; not a number where parties are apart, whose joint loss nobody knows.
        score: the test accuracy in percent, or the mean squared error of a regression; of the server.
        received: the ledger's rows: what each role received.
        epsilon: of a record, at the settings' delta, where the sums are private.
    """

    settings: Settings
    losses: list[float]
    score: float
    client_seconds: float
    server_seconds: float
    received: list[dict]
    regression: bool
    apart: bool
    model: nn.Module = field(repr=False)
    epsilon: float | None = None

    @property
    def down_bytes(self) -> int:
        return self._bytes(lambda role: role != "Server")

    @property
    def up_bytes(self) -> int:
        return self._bytes(lambda role: role == "Server")

    def _bytes(self, to: Any) -> int:
        if self.settings.method == "fedavg":
            return sum(p.nbytes for p in self.model.parameters()) * self.settings.clients * len(self.losses)
        return sum(row["bytes"] for row in self.received if to(row["role"]))

    def headline(self) -> dict[str, float]:
        name = "test MSE" if self.regression else "test accuracy"
        return {"last loss": self.losses[-1], name: self.score}

    @property
    def unit(self) -> str:
        return "loss, and MSE" if self.regression else "loss, and %"

    def tables(self) -> list[Table]:
        heads = ("test MSE" if self.regression else "test accuracy, %", "last loss", "client s", "server s", "MB down")
        title = f"{self.settings.clients} clients, {len(self.losses)} rounds, {self.settings.method}"
        shown = outcome.titled(title, (*heads, "MB up"))
        seconds = (f"{self.client_seconds:.2f}", f"{self.server_seconds:.2f}")
        size = (f"{self.down_bytes / 1e6:.2f}", f"{self.up_bytes / 1e6:.2f}")
        shown.add_row(f"{self.score:.4f}", f"{self.losses[-1]:.5f}", *seconds, *size)
        clients = [row | {"role": re.sub(r"^C\d+$", "each client", row["role"])} for row in self.received]
        return [shown, *([outcome.table(clients)] if clients else [])]

    def sentences(self) -> list[str]:
        how = self.settings
        if how.method == "fedavg":
            return ["FedAvg: every client sees the model, and the server every client's gradient. Protects nothing."]
        masked = how.masked and how.clients > 1
        seen = "the sum of the clients' masked updates" if masked else "each client's update (no masks)"
        bias = how.noise_on == "bias"
        exchange = {
            "paper": "By the paper's exchange the server can compute the true prediction of every sample of every "
            "client (of two classes, its odds within a factor of 20), and a client that of its own samples and with it "
            "the noise on the last layer, against Lemma 7.",
            "shift": "By the shift exchange a client's softmax is the true one: it knows the prediction of its own "
            "samples, against Lemma 7, and from two rounds the noise on the last layer. The server learns nothing of "
            "them.",
            None: "A client knows the true outputs of its own samples but for one direction a partition, and from two "
            "rounds these as well, up to what a step changes, against Lemma 7"
            + (", if fewer than half as many partitions as outputs have noise of their own." if bias else "."),
        }
        private = [] if self.epsilon is None else [
            f"Each sum had the noise of {how.clients} clients, of which {how.clients - how.colluding} carry the "
            f"promise. What the run shows of one record, replaced by another, is within epsilon {self.epsilon:.4g} at "
            f"delta {how.delta:g}: to the server, and to it with {how.colluding} other clients at most."
        ]  # fmt: skip
        return [
            f"Clients saw a noised model, the server {seen}; the site's page on it says what the noise hides.",
            *private, exchange[how.exchange_used], where_it_ran(self.apart),
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        kept = ("score", "client_seconds", "server_seconds", "down_bytes", "up_bytes", "received")
        losses = [None if loss != loss else loss for loss in self.losses]
        private = {} if self.epsilon is None else {"epsilon": self.epsilon}
        return {
            "settings": self.settings.as_dict(), "losses": losses, **{name: getattr(self, name) for name in kept},
            **private,
        }  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        return {"losses": [dict(round=t, loss=loss) for t, loss in enumerate(self.losses) if loss == loss]}

    def plots(self) -> list[Plot]:
        if self.apart:
            return []
        return [Plot("curve", "round", "training loss", {self.settings.method: dict(enumerate(self.losses))})]
