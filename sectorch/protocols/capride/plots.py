"""Plots like the paper's Figures 2 to 5. They need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...cli.command import require
from .report import Result


def plot(results: Sequence[Result], folder: str | Path) -> list[Path]:
    """Of one or several methods on the same parties: accuracy by round (Figure 2), by class (4) and by party (5).

    Raises:
        PlotError: matplotlib is missing.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("accuracy_by_round.png", "accuracy_by_class.png", "accuracy_by_party.png")]
    curves = {r.label: r.as_dict()["curve"] for r in results}
    by_round(paths[0], curves)
    last = results[-1]
    by_class(paths[1], {"before": last.per_class(0), f"after {last.label}": last.per_class(-1)})
    names = [p.name for p in last.parties]
    bars = {"before": [last.records[n][0]["accuracy"] for n in names]}
    by_party(paths[2], names, bars | {r.label: [r.records[n][-1]["accuracy"] for n in names] for r in results})
    return paths


def by_round(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Figure 2: the mean accuracy over parties after each round; round 0 is local training."""
    figure, axes = _figure()
    for label, values in curves.items():
        axes.plot(range(len(values)), [100 * v for v in values], marker=".", label=label)
    axes.set_xlabel("round (0 is local training)")
    _save(figure, axes, path)


def by_parties(path: Path, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Figure 3: accuracy for different numbers of parties."""
    figure, axes = _figure()
    for label, values in curves.items():
        axes.plot(list(values), [100 * v for v in values.values()], marker="o", label=label)
    axes.set_xlabel("parties")
    axes.set_xticks(sorted({k for values in curves.values() for k in values}))
    _save(figure, axes, path)


def by_class(path: Path, stages: Mapping[str, Sequence[Sequence[float | None]]]) -> None:
    """Figure 4: accuracy of each class, mean and standard deviation over parties; dashed is the mean of all."""
    figure, axes = _figure()
    width, means = 0.8 / len(stages), []
    for i, (label, classes) in enumerate(stages.items()):
        values = [[100 * v for v in parties if v is not None] for parties in classes]
        means = [sum(v) / len(v) if v else 0.0 for v in values]
        spread = [
            (sum((x - m) ** 2 for x in v) / len(v)) ** 0.5 if v else 0.0 for v, m in zip(values, means, strict=True)
        ]
        places = [c + (i - (len(stages) - 1) / 2) * width for c in range(len(means))]
        drawn = axes.bar(places, means, width, yerr=spread, capsize=2, label=label)
        axes.axhline(sum(means) / len(means), linestyle="--", color=drawn.patches[0].get_facecolor())
    axes.set_xticks(range(len(means)))
    axes.set_xlabel("class")
    _save(figure, axes, path)


def by_party(path: Path, names: Sequence[str], stages: Mapping[str, Sequence[float]]) -> None:
    """Figure 5: accuracy of each party."""
    figure, axes = _figure()
    width = 0.8 / len(stages)
    for i, (label, values) in enumerate(stages.items()):
        places = [k + (i - (len(stages) - 1) / 2) * width for k in range(len(names))]
        axes.bar(places, [100 * v for v in values], width, label=label)
    axes.set_xticks(range(len(names)), names)
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
