"""What every run ends with: tables, sentences, results.json, CSV files, and plots as data."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..plots import Plot


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
