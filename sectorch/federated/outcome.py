"""The outcome of a run: tables, results.json, CSV files and plots; each role's received messages; scores."""

from __future__ import annotations

import csv
import json
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..choreography.ledger import Observer
from ..choreography.net import Sent
from ..display import Plot
from ..errors import FederationError
from .watch import Estimate


class Outcome(ABC):
    """A finished run."""

    unit = "%"
    """Of the headline: fractions are shown in %, all else as it is."""

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The few numbers that runs are compared by, by name; fractions where the unit is %."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """For people."""

    @abstractmethod
    def sentences(self) -> Sequence[str]:
        """Who learned what, in words, and what else should be known."""

    def rows(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """CSV files: name -> rows of the same columns."""
        return {}

    def plots(self) -> Sequence[Plot]:
        """What could be drawn."""
        return ()

    def write(self, folder: str | Path, drawn: bool = False) -> list[Path]:
        """results.json, the CSV files and, where they are wanted, the plots.

        Raises:
            PlotError: matplotlib is not installed, and plots are wanted.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "results.json"]
        paths[0].write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        for name, rows in self.rows().items():
            paths.append(folder / f"{name}.csv")
            write_csv(paths[-1], rows)
        return [*paths, *(plot.draw(folder) for plot in self.plots() if drawn)]

    def show(self, console: Console) -> None:
        """Tables and sentences."""
        for table in self.tables():
            console.print(table)
        for sentence in self.sentences():
            console.print(f"- {sentence}", markup=False, highlight=False)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows under the names of the first one's columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def percents(values: Sequence[float]) -> list[str]:
    """Percentages and, last, the gain from the first to the last; nothing of nothing."""
    if not values:
        return []
    gain = f"{100 * (values[-1] - values[0]):+.2f}" if len(values) > 1 else ""
    return [*(f"{100 * v:.2f}" for v in values), gain]


# The messages that each role received, counted from the ledger during a run.

Key = tuple[str, str, str, str, str]
"""The receiver's role, the protocol, the message, its mask, and what it shows (empty: uniform bits)."""


class Received(Observer):
    """Counts messages and bytes for each role, in memory that does not grow with the run."""

    def __init__(self):
        self.messages: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def message(self, line: Sent, value: torch.Tensor) -> None:
        key = (line.dst.role, line.protocol, line.label, line.mask, line.shows)
        self.messages[key] += 1
        self.bytes[key] += line.bytes

    def rows(self) -> list[dict]:
        """For JSON."""
        names = ("role", "protocol", "message", "hidden_by", "shows")
        return [
            {**dict(zip(names, key, strict=True)), "messages": count, "bytes": self.bytes[key]}
            for key, count in sorted(self.messages.items())
        ]


def first_and_later(call: Callable[[], Any]) -> tuple[Estimate, Estimate]:
    """What the first call in a session takes beyond a later one, and what a later one takes, from two calls."""
    found = []
    for _ in range(2):
        with Received() as received:
            start = time.perf_counter()
            call()
            found.append(Estimate(time.perf_counter() - start, sum(received.bytes.values())))
    first, later = found
    return first + later * -1.0, later


def merged(reports: Iterable[list[dict]]) -> list[dict]:
    """Rows of several ledgers added up."""
    total: dict[Key, dict] = {}
    for row in (row for report in reports for row in report):
        key = (row["role"], row["protocol"], row["message"], row["hidden_by"], row["shows"])
        if key in total:
            total[key] = {**row, "messages": total[key]["messages"] + row["messages"],
                          "bytes": total[key]["bytes"] + row["bytes"]}  # fmt: skip
        else:
            total[key] = dict(row)
    return [total[key] for key in sorted(total)]


def learned(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], nothing: str) -> list[str]:
    """A sentence for each role: how much it received and what that showed it, from the ledger's rows.

    Args:
        names: of the roles, in words.
        nothing: what stands for messages that show nothing.
    """
    found = []
    for role, name in names.items():
        mine = [row for row in rows if row["role"] == role]
        shown = sorted({f"{row['shows']} ({row['protocol']})" for row in mine if row["shows"]})
        size = sum(row["bytes"] for row in mine) / 1e6
        found.append(f"{name} received {size:.2f} MB and learned: {'; '.join(shown) or nothing}.")
    return found


def where_it_ran(apart: bool) -> str:
    """The last sentence of a statement: whether the run protected anything."""
    if apart:
        return "Each party ran in a process of its own."
    return "All parties ran in one process, which therefore protected nothing: this is a simulation."


def titled(title: str, columns: Iterable[str], left: int = 0) -> Table:
    """A table without rows, of which the first so many columns are text and the others numbers."""
    shown = Table(title=title)
    for k, column in enumerate(columns):
        shown.add_column(column, justify="left" if k < left else "right")
    return shown


def table(rows: list[dict]) -> Table:
    """A table of the messages that each role received, by what they show; results.json has each message."""
    heads = ("role", "learns", "protocols", "messages", "MB")
    shown = titled("What each role received (from the ledger)", heads, 3)
    for key in sorted({(row["role"], row["shows"]) for row in rows}):
        mine = [row for row in rows if (row["role"], row["shows"]) == key]
        protocols = ", ".join(sorted({row["protocol"] for row in mine}))
        messages, size = (sum(row[name] for row in mine) for name in ("messages", "bytes"))
        learns = key[1] or "nothing (uniform bits)"
        shown.add_row(key[0], learns, protocols, str(messages), f"{size / 1e6:.3f}")
    return shown


# Accuracy, balanced accuracy, and fairness criteria, as defined in CaPC, appendix D.


@dataclass(frozen=True)
class Scores:
    """The share of right predictions, and the recall of each class (NaN for a class without samples).

    `balanced` is the mean of the recalls (definition 9).
    """

    accuracy: float
    per_class: list[float]

    @property
    def balanced(self) -> float:
        recalls = [value for value in self.per_class if value == value]
        return sum(recalls) / len(recalls)

    def as_dict(self) -> dict:
        """For JSON, which has no NaN."""
        per_class = [value if value == value else None for value in self.per_class]
        return dict(accuracy=self.accuracy, balanced=self.balanced, per_class=per_class)

    @classmethod
    def from_dict(cls, kept: dict) -> Scores:
        """What `as_dict` gave."""
        return cls(kept["accuracy"], [math.nan if value is None else value for value in kept["per_class"]])


def scores(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> Scores:
    """Of predicted classes [N] against true ones [N]."""
    _check(predicted, labels)
    right = predicted == labels
    recalls = [float(right[labels == k].double().mean()) for k in range(classes)]
    return Scores(float(right.double().mean()), recalls)


def equal_opportunity(predicted: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, favoured: int = 1) -> float:
    """The largest difference between groups of Pr[prediction = favoured | label = favoured] (definition 11); 0 is fair.

    Args:
        group: [N], the protected attribute A, with any number of values.
    """
    return _spread(predicted == favoured, labels == favoured, group)


def equalized_odds(predicted: torch.Tensor, labels: torch.Tensor, group: torch.Tensor) -> float:
    """The largest difference between groups of Pr[prediction = k | label = y] over all k and y (definition 10, for any
    number of classes); 0 is fair. Combinations that only one group has do not count.
    """
    _check(predicted, labels, group)
    kinds = torch.cat((predicted, labels)).unique()
    return max(_spread(predicted == k, labels == y, group) for k in kinds for y in labels.unique())


def _spread(hit: torch.Tensor, among: torch.Tensor, group: torch.Tensor) -> float:
    """Largest less smallest rate of `hit` among `among`, over the groups that have any."""
    _check(hit, among, group)
    rates = [hit[among & (group == a)].double().mean() for a in group.unique() if bool((among & (group == a)).any())]
    return float(max(rates) - min(rates)) if rates else 0.0


def _check(*vectors: torch.Tensor) -> None:
    shapes = {tuple(v.shape) for v in vectors}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1 or not len(vectors[0]):
        raise FederationError(f"predictions, labels and groups are vectors of one length from 1, got {sorted(shapes)}")
