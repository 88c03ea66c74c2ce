"""Each client's value per round and in all. Needs matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path

from ...cli.command import require
from .report import Result


def plot(result: Result, folder: str | Path) -> Path:
    """values.png: on the left a line for each client over the rounds, on the right the sums.

    Raises:
        PlotError: matplotlib is not installed.
    """
    figure_of, canvas = require()
    figure = figure_of(figsize=(9, 4), layout="constrained")
    canvas(figure)
    left, right = figure.subplots(1, 2)
    for i, name in enumerate(result.names):
        there = [t for t, r in enumerate(result.rounds) if i in r.values]
        left.plot([t + 1 for t in there], [result.rounds[t].values[i] for t in there], marker="o", label=name)
    left.set_xlabel("round")
    left.set_ylabel("single-round Shapley value")
    left.legend()
    left.grid(alpha=0.3)
    places = range(len(result.names))
    right.bar(places, list(result.values.values()), 0.5, label=result.settings.protocol)
    if result.exact is not None:
        right.plot(places, list(result.exact.values()), "k_", markersize=16, label="plain")
    right.set_xticks(list(places), result.names)
    right.set_ylabel("federated Shapley value")
    right.legend()
    path = Path(folder) / "values.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
