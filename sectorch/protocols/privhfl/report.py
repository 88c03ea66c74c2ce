"""The outcome of a run: tables, results.json and a CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from .settings import Client, Settings
from .statement import merged, sentences


@dataclass
class Result:
    """A finished run. `records` holds for each client the record of local training and one for each round."""

    clients: Sequence[Client]
    classes: int
    settings: Settings
    records: dict[str, list[dict]]
    models: dict[str, nn.Module] = field(repr=False)

    @property
    def architectures(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(client.architecture for client in self.clients))

    def accuracies(self, stage: int, architecture: str | None = None) -> list[float]:
        """Of each client (of one architecture), after local training (0) or after a round; -1 is the last."""
        names = [c.name for c in self.clients if architecture in (None, c.architecture)]
        return [self.records[name][stage]["accuracy"] for name in names]

    def mean(self, stage: int, architecture: str | None = None) -> float:
        """The mean accuracy over clients."""
        values = self.accuracies(stage, architecture)
        return sum(values) / len(values)

    @property
    def received(self) -> list[dict]:
        """The ledger's rows over all queries."""
        return merged(record.get("received", []) for records in self.records.values() for record in records)

    @property
    def statement(self) -> list[str]:
        """The privacy statement, from the ledger."""
        how = self.settings
        if how.control:
            return ["Nobody was asked: each client retrained on its own data alone. A control."]
        answering = how.answering(len(self.clients))
        return sentences(self.received, secure=how.secure, answering=answering, normalise=how.normalise)

    def seconds(self) -> dict[str, float]:
        """Of all clients together: the steps of Algorithm 1."""
        flat = [record for records in self.records.values() for record in records]
        steps = ("share", "predict", "aggregate", "retraining")
        return {"local": sum(r.get("seconds", 0) for r in flat), **{s: sum(r.get(s, 0) for r in flat) for s in steps}}

    def table(self) -> Table:
        """Each client's accuracy before and after."""
        shown = accuracy_table(self.settings.iterations)
        for client in self.clients:
            add_client(shown, client, self.records[client.name])
        shown.add_section()
        rounds = range(self.settings.iterations + 1)
        for name in (*self.architectures, None):
            count = len(self.accuracies(0, name))
            means = [self.mean(stage, name) for stage in rounds]
            shown.add_row("mean", name or "all", str(count), *_percents(means))
        return shown

    def as_dict(self) -> dict:
        """For JSON. Seconds differ from run to run; the rest, for one seed, does not."""
        rounds = range(self.settings.iterations + 1)
        clients = [
            dict(
                name=c.name,
                architecture=c.architecture,
                samples=len(c.images),
                per_class=c.labels.bincount(minlength=self.classes).tolist(),
                accuracy=[record["accuracy"] for record in self.records[c.name]],
                queries=[record["queries"] for record in self.records[c.name][1:]],
                answering=[record["answering"] for record in self.records[c.name][1:]],
            )
            for c in self.clients
        ]
        return dict(
            settings=json.loads(json.dumps(asdict(self.settings))),
            clients=clients,
            mean=[self.mean(stage) for stage in rounds],
            by_architecture={a: [self.mean(stage, a) for stage in rounds] for a in self.architectures},
            seconds=self.seconds(),
            threads=torch.get_num_threads(),
            bytes=sum(row["bytes"] for row in self.received),
            received=self.received,
            statement=self.statement,
        )

    def write(self, folder: str | Path) -> list[Path]:
        """results.json and accuracy.csv (one row for each client and round)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "results.json", folder / "accuracy.csv"]
        paths[0].write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        with paths[1].open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("client", "architecture", "samples", "round", "accuracy"))
            for client in self.clients:
                for stage, record in enumerate(self.records[client.name]):
                    rows.writerow((client.name, client.architecture, len(client.images), stage, record["accuracy"]))
        return paths


def accuracy_table(iterations: int) -> Table:
    """An empty table of clients; round 0 is local training."""
    shown = Table(title="Test accuracy, %")
    for column in (
        "client",
        "architecture",
        "samples",
        "alone",
        *(f"round {t + 1}" for t in range(iterations)),
        "gain",
    ):
        shown.add_column(column, justify="left" if column in ("client", "architecture") else "right")
    return shown


def add_client(shown: Table, client: Client, records: list[dict]) -> None:
    """A client's row, as far as it has come."""
    values = _percents([record["accuracy"] for record in records])
    missing = [""] * (len(shown.columns) - 4 - len(records))
    values, gain = (values[:-1], values[-1]) if values else ([], "")
    shown.add_row(client.name, client.architecture, str(len(client.images)), *values, *missing, gain)


def _percents(values: list[float]) -> list[str]:
    """Percentages and, last, the gain from the first to the last."""
    if not values:
        return []
    gain = f"{100 * (values[-1] - values[0]):+.2f}" if len(values) > 1 else ""
    return [*(f"{100 * v:.2f}" for v in values), gain]
