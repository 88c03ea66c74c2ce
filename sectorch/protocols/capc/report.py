"""The outcome of a run: a table for each querying party, results.json and CSV files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ...dp import ORDERS, Budget, NoisyMax, epsilon_of
from .errors import CaPCError
from .fairness import Scores
from .settings import Party, Settings
from .statement import sentences

STEPS = ("infer", "onehot", "argmax")
"""Seconds of step 1a, of 1b and 1c, of 2 and 3."""


@dataclass
class Record:
    """What one querying party did and got.

    `asked` are indices of its pool, `labels` what it was answered. `votes` and the data-dependent curve `oracle` are
    known to a simulation in the clear alone (`SimulatedPanel`), and are not private. `truth` are the true labels of
    what was asked.
    """

    name: str
    architecture: str
    mechanism: NoisyMax
    budget: Budget = field(repr=False)
    before: Scores
    after: Scores | None = None
    asked: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False)
    labels: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    voters: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    oracle: np.ndarray | None = None
    votes: list[list[int]] = field(default_factory=list, repr=False)
    truth: torch.Tensor | None = field(default=None, repr=False)
    right: float | None = None
    stopped: str = ""
    model: Any = field(default=None, repr=False)

    def add(self, asked: torch.Tensor, labels: torch.Tensor, answer: dict) -> None:
        """A chunk of answers. `answer` is an `Answer` as a dict."""
        self.asked, self.labels = torch.cat((self.asked, asked)), torch.cat((self.labels, labels))
        for step in STEPS:
            self.seconds[step] += answer["seconds"][step]
        self.voters += [answer["voters"]] * len(asked)
        self.lost += [name for name in answer["lost"] if name not in self.lost]
        if answer.get("votes"):
            first, *others = (self.mechanism.curve_of(np.asarray(votes)) for votes in answer["votes"])
            curve = sum(others, first)
            self.oracle = curve if self.oracle is None else self.oracle + curve
            self.votes += answer["votes"]

    def judge(self, truth: torch.Tensor) -> None:
        """How many answers were right, where an experiment knows it."""
        self.truth = truth[self.asked]
        if len(self.asked):
            self.right = float((self.truth == self.labels).double().mean())

    def right_at(self, scale: float) -> float | None:
        """The expected fraction of right answers at another scale of the noise, exactly; where votes are known."""
        if self.truth is None or not self.votes or len(self.votes) != len(self.asked):
            return None
        mechanism = replace(self.mechanism, scale=scale)
        pairs = zip(self.votes, self.truth.tolist(), strict=True)
        return float(np.mean([mechanism.distribution(votes)[true] for votes, true in pairs]))

    @property
    def spent(self) -> list[float]:
        """Epsilon after each query. What was charged and never answered counts from the start."""
        unit = self.mechanism.curve
        extra = np.clip(self.budget.curve - len(self.asked) * unit, 0, None)
        return [epsilon_of(extra + (i + 1) * unit, self.budget.delta) for i in range(len(self.asked))]

    @property
    def retrained(self) -> Scores:
        """`after`, once there is one.

        Raises:
            CaPCError: the party was not retrained yet.
        """
        if self.after is None:
            raise CaPCError(f"{self.name} was not retrained yet")
        return self.after

    @property
    def gain(self) -> float:
        return self.retrained.accuracy - self.before.accuracy

    def as_dict(self, classes: int) -> dict:
        shown = lambda s: (
            None
            if s is None
            else dict(accuracy=s.accuracy, balanced=s.balanced, per_class=[v if v == v else None for v in s.per_class])
        )
        return dict(
            name=self.name,
            architecture=self.architecture,
            before=shown(self.before),
            after=shown(self.after),
            queries=len(self.asked),
            right=self.right,
            queries_per_class=self.labels.bincount(minlength=classes).tolist(),
            true_classes_asked=None if self.truth is None else self.truth.bincount(minlength=classes).tolist(),
            noise=dict(kind=type(self.mechanism).__name__, scale=self.mechanism.scale, moved=self.mechanism.moved),
            epsilon=dict(
                limit=self.budget.limit,
                delta=self.budget.delta,
                spent=self.budget.spent,
                remaining=self.budget.remaining,
                after_each_query=self.spent,
                data_dependent_not_private=None if self.oracle is None else epsilon_of(self.oracle, self.budget.delta),
            ),
            voters=self.voters,
            lost=self.lost,
            stopped=self.stopped,
            seconds=self.seconds,
        )


@dataclass
class Result:
    """A finished run."""

    parties: Sequence[Party]
    classes: int
    settings: Settings
    records: dict[str, Record]
    received: list[dict] = field(repr=False)

    def mean(self, what: str) -> float:
        """Over querying parties: "before", "after" or "gain" in accuracy; "balanced_gain"; "right"; "epsilon"."""
        of = {
            "before": lambda r: r.before.accuracy,
            "after": lambda r: r.after.accuracy,
            "gain": lambda r: r.gain,
            "balanced_gain": lambda r: r.after.balanced - r.before.balanced,
            "right": lambda r: r.right,
            "epsilon": lambda r: r.budget.spent,
        }[what]
        values = [of(record) for record in self.records.values()]
        return sum(values) / len(values)

    @property
    def epsilon_of_all(self) -> float:
        """What all querying parties together learn about an organisation, if they pool their labels."""
        return epsilon_of(
            sum((r.budget.curve for r in self.records.values()), np.zeros_like(ORDERS)), self.settings.delta
        )

    @property
    def statement(self) -> list[str]:
        return sentences(self)

    def table(self) -> Table:
        """Each querying party before and after."""
        shown = summary_table()
        for record in self.records.values():
            add_record(shown, record)
        return shown

    def class_table(self) -> Table:
        """Recall of each class before and after, and the answers of that class."""
        shown = Table(title="Recall of each class before -> after, % (answers of that class)")
        shown.add_column("class", justify="right")
        columns = []
        for r in self.records.values():
            shown.add_column(r.name, justify="right")
            counts = r.labels.bincount(minlength=self.classes).tolist()
            cells = zip(r.before.per_class, r.retrained.per_class, counts, strict=True)
            columns.append([f"{100 * before:.0f}->{100 * after:.0f} ({count})" for before, after, count in cells])
        for k, row in enumerate(zip(*columns, strict=True)):
            shown.add_row(str(k), *row)
        return shown

    def as_dict(self) -> dict:
        """For JSON. Labels carry noise from the operating system: two runs differ."""
        return dict(
            settings=json.loads(json.dumps(asdict(self.settings))),
            parties=len(self.parties),
            organisations=len({party.owner for party in self.parties}),
            samples=[len(party.images) for party in self.parties],
            querying=[record.as_dict(self.classes) for record in self.records.values()],
            mean={name: self.mean(name) for name in ("before", "after", "gain", "balanced_gain", "epsilon")},
            epsilon_if_all_querying_parties_collude=self.epsilon_of_all,
            received=self.received,
            bytes=sum(row["bytes"] for row in self.received),
            statement=self.statement,
        )

    def write(self, folder: str | Path) -> list[Path]:
        """results.json, parties.csv (a row for each querying party and class), queries.csv (a row for each query)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in ("results.json", "parties.csv", "queries.csv")]
        paths[0].write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        with paths[1].open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("party", "architecture", "class", "before", "after", "answers"))
            for r in self.records.values():
                overall = ("all", r.before.accuracy, r.retrained.accuracy, len(r.asked))
                balanced = ("balanced", r.before.balanced, r.retrained.balanced, len(r.asked))
                counts = r.labels.bincount(minlength=self.classes).tolist()
                per = zip(range(self.classes), r.before.per_class, r.retrained.per_class, counts, strict=True)
                rows.writerows((r.name, r.architecture, *row) for row in (overall, balanced, *per))
        with paths[2].open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("party", "query", "pool_index", "label", "voters", "epsilon_spent"))
            for r in self.records.values():
                columns = zip(r.asked.tolist(), r.labels.tolist(), r.voters, r.spent, strict=True)
                rows.writerows((r.name, i, *row) for i, row in enumerate(columns))
        return paths


def summary_table() -> Table:
    """An empty table of querying parties."""
    shown = Table(title="Querying parties: test accuracy and balanced accuracy in %, epsilon spent and left")
    for column in ("party", "model", "accuracy", "gain", "balanced", "queries", "epsilon", "left"):
        shown.add_column(column, justify="left" if column in ("party", "model") else "right")
    return shown


def add_record(shown: Table, r: Record) -> None:
    """A querying party's row, as far as it has come."""
    done = r.after is not None
    change = lambda before, after: f"{100 * before:.1f}->" + (f"{100 * after:.1f}" if done else "")
    shown.add_row(
        r.name,
        r.architecture,
        change(r.before.accuracy, r.retrained.accuracy if done else 0),
        f"{100 * r.gain:+.2f}" if done else "",
        change(r.before.balanced, r.retrained.balanced if done else 0),
        str(len(r.asked)),
        f"{r.budget.spent:.3f}",
        f"{r.budget.remaining:.3f}",
    )
