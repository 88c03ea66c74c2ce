"""Several runs side by side: values of one setting, controls and seeds; means, their spread, and honest differences."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ..plots import Plot
from .outcome import Outcome, write_csv


@dataclass
class Study:
    """Headlines of runs, by condition and seed. The first condition is what the others are compared with.

    Args:
        across: what differs between conditions, for titles and plots.
    """

    across: str
    unit: str = "%"
    found: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)

    def add(self, condition: str, seed: int, outcome: Outcome) -> None:
        """One run more."""
        self.unit = outcome.unit
        self.found.setdefault(condition, {})[seed] = outcome.headline()

    @property
    def factor(self) -> float:
        """Of what is shown: fractions are shown in percent."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def names(self) -> list[str]:
        """What the headlines hold."""
        return list(dict.fromkeys(n for seeds in self.found.values() for h in seeds.values() for n in h))

    def values(self, condition: str, name: str) -> list[float]:
        """Of each seed that has it."""
        return [h[name] for h in self.found[condition].values() if name in h]

    def difference(self, condition: str, name: str, other: str) -> list[float]:
        """Of the same seeds: this condition's less the other's."""
        mine, theirs = self.found[condition], self.found[other]
        return [mine[s][name] - theirs[s][name] for s in mine if s in theirs and name in mine[s] and name in theirs[s]]

    def table(self) -> Table:
        """Means and standard deviations over seeds; the last columns compare with the first condition."""
        seeds, last = max(len(found) for found in self.found.values()), self.names[-1]
        count = f"{len(self.found)} conditions, {seeds} seed{'s' if seeds > 1 else ''}"
        shown = Table(title=f"{count}: mean and spread, {self.unit}")
        for column in (self.across, *self.names, f"{last} against the first"):
            shown.add_column(column, justify="left" if column == self.across else "right")
        scaled = lambda values: [self.factor * value for value in values]
        first = next(iter(self.found))
        for condition in self.found:
            cells = [shown_with_spread(scaled(self.values(condition, name))) for name in self.names]
            against = "" if condition == first else verdict(scaled(self.difference(condition, last, first)))
            shown.add_row(condition, *cells, against)
        return shown

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "across": self.across,
            "runs": {c: {str(s): h for s, h in found.items()} for c, found in self.found.items()},
        }

    def plot(self, ax: Any = None) -> Any:
        """Draw the last number of the headlines in each condition, with its range over seeds, and give the Axes.

        Args:
            ax: matplotlib's Axes to draw into; those of a new figure unless given.

        Raises:
            PlotError: matplotlib is not installed.
        """
        return self.as_plot().plot(ax)

    def as_plot(self) -> Plot:
        """What `plot` draws, as data."""
        name = self.names[-1]
        points = {c: [self.factor * v for v in self.values(c, name)] for c in self.found}
        try:
            places: Mapping = {float(c.split()[-1]): v for c, v in points.items()}
        except ValueError:
            return Plot("study", self.across, f"{name}, {self.unit}", {name: points}, kind="bars")
        return Plot("study", self.across, f"{name}, {self.unit}", {name: places})

    def write(self, folder: Path, drawn: bool) -> list[Path]:
        """study.json, study.csv (a row for each run) and, where wanted, study.png."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "study.json", folder / "study.csv"]
        paths[0].write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        rows = [{"condition": c, "seed": s, **h} for c, found in self.found.items() for s, h in found.items()]
        write_csv(paths[1], rows)
        return [*paths, *([self.as_plot().draw(folder)] if drawn else [])]


def verdict(differences: Sequence[float]) -> str:
    """A difference with its spread over seeds, and whether the seeds tell it from none.

    One seed shows no spread, and is said to be one. Otherwise a difference counts where Student's t test of the paired
    differences has p < 0.05; else it is "within the spread".
    """
    if not differences:
        return ""
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return f"{mean:+.4g} (one seed)"
    spread = statistics.stdev(differences)
    return f"{mean:+.4g} +- {spread:.2g}{'' if differs(differences) else ', within the spread'}"


def differs(differences: Sequence[float]) -> bool:
    """Whether paired differences are told from none: two-sided t test, p < 0.05; equal ones are, unless they are 0."""
    from scipy.stats import ttest_1samp

    if len(differences) < 2:
        return False
    if statistics.stdev(differences) == 0:
        return differences[0] != 0
    return float(np.asarray(ttest_1samp(differences, 0.0))[1]) < 0.05


def shown_with_spread(values: Sequence[float]) -> str:
    """The mean and the standard deviation of values; nothing of nothing."""
    if not values:
        return ""
    spread = f" +- {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"
