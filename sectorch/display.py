"""Plots as data, and their drawing, which needs matplotlib: every picture that the package makes, in one style."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .deprecation import renamed_attribute
from .errors import PlotError
from .optional_deps import required_imports


def require() -> Any:
    """matplotlib, drawing to files.

    Raises:
        PlotError: it is not installed.
    """
    with required_imports("a plot", "matplotlib", PlotError, "or leave plots out (--no-plots)"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    return Figure, FigureCanvasAgg


SIZE = (6, 4)
"""Of a figure, in inches."""
Series = Mapping[Any, float | Sequence[float]]
"""Place on the axis -> a value, or several, which are drawn as their mean and their range."""


@dataclass(frozen=True)
class Plot:
    """What a figure shows.

    Args:
        name: of the file, without its ending.
        across, up: what the axes are, with units.
        series: the lines or groups of bars, by label.
        kind: "lines", "bars" or "points".
        levels: dashed horizontal lines, by label.
        log: the horizontal axis is logarithmic.
        ends: of bars, by label and place, from where to where an interval reaches.
    """

    name: str
    across: str
    up: str
    series: Mapping[str, Series]
    kind: str = "lines"
    levels: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    ends: Mapping[str, Mapping[Any, tuple[float, float]]] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def plot(self, ax: Any = None) -> Any:
        """Draw into matplotlib's Axes, and give them.

        Args:
            ax: where; those of a new figure of `matplotlib.pyplot` unless given, which a notebook shows.

        Raises:
            PlotError: matplotlib is not installed.
        """
        if ax is None:
            with required_imports("a plot", "matplotlib", PlotError):
                from matplotlib import pyplot
            _, ax = pyplot.subplots(figsize=SIZE, layout="constrained")
        (self._bars if self.kind == "bars" else self._lines)(ax)
        for label, height in self.levels.items():
            ax.axhline(height, linestyle="--", color="grey", label=label)
        if self.log:
            ax.set_xscale("log")
        ax.set_xlabel(self.across)
        ax.set_ylabel(self.up)
        ax.grid(alpha=0.3)
        if ax.get_legend_handles_labels()[1]:
            ax.legend()
        return ax

    def draw(self, folder: str | Path) -> Path:
        """NAME.png in a folder.

        Raises:
            PlotError: matplotlib is not installed.
        """
        path = Path(folder) / f"{self.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._figure().savefig(path, dpi=120)
        return path

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self._figure().savefig(written, dpi=96, format="png")
        return written.getvalue()

    def _figure(self) -> Any:
        figure_of, canvas = require()
        figure = figure_of(figsize=SIZE, layout="constrained")
        canvas(figure)
        self.plot(figure.add_subplot())
        return figure

    def _lines(self, axes: Any) -> None:
        for label, series in self.series.items():
            found = {x: _several(v) for x, v in series.items()}
            means = [statistics.fmean(v) for v in found.values()]
            style = dict(marker="o", linestyle="" if self.kind == "points" else "-")
            axes.plot(list(found), means, label=label, **style)
            if any(len(v) > 1 for v in found.values()):
                axes.fill_between(
                    list(found), [min(v) for v in found.values()], [max(v) for v in found.values()], alpha=0.15
                )

    def _bars(self, axes: Any) -> None:
        places = list(dict.fromkeys(x for series in self.series.values() for x in series))
        width = 0.8 / max(1, len(self.series))
        for i, (label, series) in enumerate(self.series.items()):
            found = [_several(series[x]) if x in series else [0.0] for x in places]
            shifted = [k + (i - (len(self.series) - 1) / 2) * width for k in range(len(places))]
            spread = [statistics.pstdev(v) for v in found] if any(len(v) > 1 for v in found) else None
            axes.bar(shifted, [statistics.fmean(v) for v in found], width, yerr=spread, capsize=2, label=label)
            for k, place in enumerate(places):
                if place in self.ends.get(label, {}):
                    low, high = self.ends[label][place]
                    axes.errorbar([shifted[k]], [low], [[0.0], [high - low]], fmt="none", ecolor="black", capsize=3)
        crowded = sum(len(str(place)) for place in places) > 70
        axes.set_xticks(range(len(places)), [str(place) for place in places], rotation=90 if crowded else 0)


def _several(value: float | Sequence[float]) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value]


# What a result shows of itself: tables and lines, as text and, where a notebook asks, as HTML.


_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;'
    'font-family:ui-monospace,Menlo,Consolas,monospace">{code}</pre>'
)


class Display:
    """A result that can be looked at: `print(result.table())`, or by its name alone in a notebook."""

    def sections(self) -> Iterable[RenderableType]:
        """What there is to see, from top to bottom; a plain string is a line, with rich's markup."""
        raise NotImplementedError

    shown = renamed_attribute("shown", "sections")

    def table(self, width: int = 118) -> str:
        """As text, so many characters wide."""
        return self._written(width).export_text()

    def _repr_html_(self) -> str:
        return self._written(118).export_html(code_format=_HTML, inline_styles=True)

    def _written(self, width: int) -> Console:
        console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
        for part in self.sections():
            console.print(part)
        return console


class Facts(Display):
    """A few named facts of one thing."""

    def __init__(self, title: str, facts: Mapping[str, object]):
        self._title, self._facts = title, facts

    def sections(self) -> Iterator[RenderableType]:
        """A row for each."""
        table = Table(title=self._title, title_justify="left", show_header=False)
        for name, value in self._facts.items():
            table.add_row(Text(name), Text(str(value)))
        yield table
