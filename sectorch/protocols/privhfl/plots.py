"""Plots of one run, or of several with different numbers of queries. They need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...cli.command import require
from .report import Result


def plot(results: Sequence[Result], folder: str | Path) -> list[Path]:
    """PNG files: accuracy per round, per architecture and, of several runs, per query count.

    Args:
        results: one for each number of queries; the rounds and architectures are those of the last.

    Raises:
        PlotError: matplotlib is missing.
    """
    folder, last = Path(folder), results[-1]
    folder.mkdir(parents=True, exist_ok=True)
    rounds = list(range(last.settings.iterations + 1))
    paths = [folder / "accuracy_per_round.png", folder / "accuracy_per_architecture.png"]
    lines = {name: [100 * last.mean(t, name) for t in rounds] for name in last.architectures}
    lines["all"] = [100 * last.mean(t) for t in rounds]
    _lines(paths[0], "round (0 is local training)", rounds, lines)
    _bars(paths[1], last)
    if len(results) > 1:
        counts = [result.records[result.clients[0].name][1]["queries"] for result in results]
        lines = {name: [100 * r.mean(-1, name) for r in results] for name in last.architectures}
        lines["all"] = [100 * r.mean(-1) for r in results]
        paths.append(folder / "accuracy_per_queries.png")
        _lines(paths[-1], "queries", counts, lines, baseline=100 * last.mean(0))
    return paths


def _lines(path: Path, label: str, places: list[int], lines: dict[str, list[float]], baseline: float | None = None):
    figure, axes = _figure()
    for name, values in lines.items():
        axes.plot(places, values, marker="o", label=name, linewidth=2.5 if name == "all" else 1.2)
    if baseline is not None:
        axes.axhline(baseline, linestyle="--", color="grey", label="alone")
    axes.set_xticks(places)
    axes.set_xlabel(label)
    _save(figure, axes, path)


def _bars(path: Path, result: Result) -> None:
    figure, axes = _figure()
    names = [*result.architectures, None]
    for shift, stage, label in ((-0.2, 0, "alone"), (0.2, -1, "after PrivHFL")):
        heights = [100 * result.mean(stage, name) for name in names]
        axes.bar([i + shift for i in range(len(names))], heights, 0.4, label=label)
    axes.set_xticks(range(len(names)), [name or "all" for name in names])
    _save(figure, axes, path)


def _figure():
    figure_of, canvas = require()
    figure = figure_of(figsize=(6, 4), layout="constrained")
    canvas(figure)
    return figure, figure.add_subplot()


def _save(figure, axes, path: Path) -> None:
    axes.set_ylabel("mean test accuracy, %")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
