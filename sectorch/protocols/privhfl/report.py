"""The outcome of a run of PrivHFL, and its privacy statement: what each role received, counted from the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ...display import Plot
from ...federated.outcome import Outcome, learned, merged, percents, table, titled, where_it_ran
from ...federated.participants import Participant
from . import settings
from .settings import Settings

STEPS = ("share", "predict", "aggregate", "retraining")


@dataclass
class Result(Outcome):
    """A finished run.

    Attributes:
        clients: those that were here, of `parties` in all; with some elsewhere it was `apart`.
        records: for each of them the record of local training and one for each round.
    """

    clients: Sequence[Participant]
    classes: int
    settings: Settings
    records: dict[str, list[dict]]
    models: dict[str, nn.Module] = field(repr=False)
    parties: int
    apart: bool = False

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
        return sum(values) / len(values) if values else math.nan

    def headline(self) -> dict[str, float]:
        return {"alone": self.mean(0), "after": self.mean(-1)}

    @property
    def received(self) -> list[dict]:
        """The ledger's rows over all queries."""
        return merged(record.get("received", []) for records in self.records.values() for record in records)

    def seconds(self) -> dict[str, float]:
        """Of all clients together: the steps of Algorithm 1."""
        flat = [record for records in self.records.values() for record in records]
        return {"local": sum(r.get("seconds", 0) for r in flat), **{s: sum(r.get(s, 0) for r in flat) for s in STEPS}}

    def tables(self) -> list[Table]:
        return [self.table(), table(self.received)]

    def table(self) -> Table:
        """Each client's accuracy before and after."""
        shown = accuracies(self.clients, self.records, self.settings.iterations)
        shown.add_section()
        rounds = range(self.settings.iterations + 1)
        for name in (*self.architectures, None):
            count = len(self.accuracies(0, name))
            shown.add_row("mean", name or "all", str(count), *percents([self.mean(stage, name) for stage in rounds]))
        return shown

    @property
    def statement(self) -> list[str]:
        """Who learned what; see `statement`."""
        return statement(self.received, self.settings, self.parties, self.epsilon, self.apart)

    @property
    def epsilon(self) -> dict[str, float]:
        """What the noise gives; empty without noise. See `privacy.spent`."""
        return settings.spent(self.records, self.settings, self.classes) if self.settings.noised else {}

    def sentences(self) -> list[str]:
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds().items())
        return [*self.statement, f"Seconds, all clients and parties one after another: {seconds}."]

    def as_dict(self) -> dict[str, Any]:
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
            settings=json.loads(json.dumps(self.settings.as_dict())), clients=clients,
            mean=[self.mean(stage) for stage in rounds],
            by_architecture={a: [self.mean(stage, a) for stage in rounds] for a in self.architectures},
            seconds=self.seconds(), threads=torch.get_num_threads(), bytes=sum(row["bytes"] for row in self.received),
            received=self.received, epsilon=self.epsilon, statement=self.statement,
        )  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        rows = [
            dict(client=c.name, architecture=c.architecture, samples=len(c.images), round=t, accuracy=r["accuracy"])
            for c in self.clients
            for t, r in enumerate(self.records[c.name])
        ]
        return {"accuracy": rows}

    def plots(self) -> list[Plot]:
        rounds, names = range(self.settings.iterations + 1), [*self.architectures, None]
        lines = {name or "all": {t: 100 * self.mean(t, name) for t in rounds} for name in names}
        stages = {"alone": 0, "after PrivHFL": -1}
        bars = {label: {n or "all": 100 * self.mean(t, n) for n in names} for label, t in stages.items()}
        up = "mean test accuracy, %"
        return [
            Plot("accuracy_per_round", "round (0 is local training)", up, lines),
            Plot("accuracy_per_architecture", "architecture", up, bars, kind="bars"),
        ]


def statement(
    rows: list[dict], how: Settings, clients: int, epsilon: dict[str, float], apart: bool = False
) -> list[str]:
    """The privacy statement in words. What a role learns comes from the ledger's rows; the rest no ledger can see.

    Args:
        epsilon: what noise gives; empty where there is none.
    """
    if not how.asks:
        return [f"Nobody was asked: a control ({how.control})."]
    if not how.secure:
        return ["This run was in the clear (secure=False): every query, model and prediction was open. An ablation."]
    if apart and not rows:
        return ["What each role received stands in the results of those that asked."]
    names = {"A": "Answering parties", "S": "The server", "Q": "Querying parties"}
    out = learned(rows, names, "nothing: uniform bits under masks that they do not know")
    noised = " and the server's noise" if how.noised else ""
    kind, answering = "normalised predictions" if how.normalise else "logits", how.answering(clients)
    if answering == 1 and not how.noised:
        out.append(f"One party answered each query, so the sum that Q learned IS that party's {kind}. Raise C.")
    else:
        leaks = how.relu == "privhfl"
        summand = "; what the paper's ReLU shows it gives each party's weights, and so every summand" if leaks else (
            ", and no summand"
        )  # fmt: skip
        out.append(f"Q learned the sum of the {kind} of {answering} parties{noised} for each of its queries{summand}.")
    return [
        *out,
        *(settings.sentences(epsilon, how) if how.noised else ()),
        "Public: architectures, shapes, who asks whom, how many queries, the number format.",
        f"Not covered: {'' if how.noised else 'what the sum itself says about the models (no noise was added), '}"
        "the server colluding with a client, parties that cheat.",
        where_it_ran(apart),
    ]


def accuracies(clients: Sequence[Participant], records: dict[str, list[dict]], iterations: int) -> Table:
    """A row for each client, as far as it has come; round 0 is local training."""
    columns = ("client", "architecture", "samples", "alone", *(f"round {t + 1}" for t in range(iterations)), "gain")
    shown = titled("Test accuracy, %", columns, 2)
    for client in clients:
        values = percents([record["accuracy"] for record in records.get(client.name, [])])
        values, gain = (values[:-1], values[-1]) if values else ([], "")
        missing = [""] * (iterations + 1 - len(values))
        shown.add_row(client.name, client.architecture, str(len(client.images)), *values, *missing, gain)
    return shown
