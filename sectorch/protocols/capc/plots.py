"""Plots of one run, or of several. They need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...cli.command import require
from .report import Result

SCALES = (0.5, 1.0, 2.0, 4.0, 7.0, 10.0, 15.0, 20.0, 40.0)
"""At which the accuracy of the answers is drawn; the paper's sigmas, 7 and 40, among them (Figure 11)."""


def _figure(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    figure_of, canvas = require()
    figure = figure_of(figsize=(6, 4), layout="constrained")
    canvas(figure)
    return figure, figure.add_subplot()


def _save(figure, axes, path: Path, across: str, up: str) -> Path:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    figure.savefig(path, dpi=120)
    return path


def plot(result: Result, folder: str | Path) -> list[Path]:
    """epsilon_per_query.png, class_balance.png and, of a simulation, scale_accuracy.png of one run.

    Raises:
        PlotError: matplotlib is missing.
    """
    folder = Path(folder)
    figure, axes = _figure(folder)
    for record in result.records.values():
        axes.plot(range(1, len(record.spent) + 1), record.spent, label=record.name)
    axes.axhline(result.settings.epsilon, linestyle="--", color="grey", label="budget")
    paths = [_save(figure, axes, folder / "epsilon_per_query.png", "queries", "epsilon spent")]
    figure, axes = _figure(folder)
    width = 0.8 / max(1, len(result.records))
    for i, r in enumerate(result.records.values()):
        places = [k + (i + 0.5) * width - 0.4 for k in range(result.classes)]
        bars = [100 * (a - b) for b, a in zip(r.before.per_class, r.retrained.per_class, strict=True)]
        axes.bar(places, bars, width, label=r.name)
    axes.set_xticks(range(result.classes))
    paths.append(_save(figure, axes, folder / "class_balance.png", "class", "gain in recall, points"))
    lines: dict[str, dict[float, list[float]]] = {}
    for r in result.records.values():
        at = {scale: r.right_at(scale) for scale in SCALES}
        known = {scale: [100 * right] for scale, right in at.items() if right is not None}
        if len(known) == len(at):
            lines[r.name] = known
    if lines:
        paths.append(curve(folder / "scale_accuracy.png", "scale of the noise", "right answers, %", lines, log=True))
    return paths


def curve(
    path: str | Path, across: str, up: str, lines: Mapping[str, Mapping[float, Sequence[float]]], log: bool = False
) -> Path:
    """Means with their range over seeds: name -> x -> values. For gains against parties and sigma against accuracy.

    Raises:
        PlotError: matplotlib is missing.
    """
    path = Path(path)
    figure, axes = _figure(path.parent)
    for name, points in lines.items():
        places = sorted(points)
        means = [sum(points[x]) / len(points[x]) for x in places]
        axes.plot(places, means, marker="o", label=name)
        axes.fill_between(places, [min(points[x]) for x in places], [max(points[x]) for x in places], alpha=0.15)
    if log:
        axes.set_xscale("log")
    return _save(figure, axes, path, across, up)
