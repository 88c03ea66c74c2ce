"""Statistics of tables in shares: each gives labelled values in shares, with the number of rows behind each value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table as TextTable

from ..display import Display, Plot
from ..errors import ArgumentError
from ..optional_deps import required_imports
from ..tensor import SharedTensor


class Axis(NamedTuple):
    """A dimension of a statistic: its name, and the label of each place. Both are public."""

    name: str
    labels: tuple[Any, ...]


class LabelledResult(Display):
    """Values that were revealed, with the labels of their dimensions.

    Attributes:
        values: float64, shaped as the axes say; NaN where there is no value (the mean of no row). A tensor without
            content in the process of a party that does not learn them.
        axes: the dimensions.
        kind: the statistic's name.
        withheld: True where a policy withholds a value, which is NaN then; None where nothing was withheld by one.
    """

    def __init__(self, values: torch.Tensor, axes: Sequence[Axis], kind: str, withheld: torch.Tensor | None = None):
        self.values, self.axes, self.kind, self.withheld = values, tuple(axes), kind, withheld

    @property
    def is_known(self) -> bool:
        """Whether this process has the values."""
        return not self.values.is_meta

    def __repr__(self) -> str:
        shape = " x ".join(str(len(axis.labels)) for axis in self.axes) or "1"
        return self.table().rstrip() if self.is_known else f"LabelledResult({self.kind}, {shape}, at another party)"

    def __getitem__(self, labels: Any) -> Any:
        """The value at these labels, one for each dimension: `result["f", "smoker"]`; a float.

        Raises:
            ArgumentError: no such label, or another number of labels.
        """
        given = labels if isinstance(labels, tuple) else (labels,)
        if len(given) != len(self.axes):
            raise ArgumentError(f"a {self.kind} has {len(self.axes)} dimensions, got {len(given)} labels")
        for label, axis in zip(given, self.axes, strict=True):
            if label not in axis.labels:
                raise ArgumentError(f"{axis.name} has no {label!r:.40}; it has {', '.join(map(str, axis.labels[:20]))}")
        return float(self._content()[tuple(axis.labels.index(v) for v, axis in zip(given, self.axes, strict=True))])

    def __float__(self) -> float:
        if self.values.numel() != 1:
            raise ArgumentError(f"a {self.kind} of {self.values.numel()} values is no single number")
        return float(self._content().reshape(()))

    def _content(self) -> torch.Tensor:
        if not self.is_known:
            raise ArgumentError(f"the {self.kind} was revealed to another party; this process has no value of it")
        return self.values

    def to_numpy(self) -> np.ndarray:
        """The values as a float64 array."""
        return self._content().numpy()

    def to_pandas(self) -> Any:
        """A pandas Series by the labels of one dimension, or a DataFrame whose columns are those of the last.

        Raises:
            ArgumentError: pandas is not installed, or this process has no values.
        """
        with required_imports("to_pandas()", "pandas", ArgumentError, "or take to_numpy()"):
            import pandas
        values = self.to_numpy()
        if not self.axes:
            return pandas.Series([float(values)], name=self.kind)
        indices = [pandas.Index(axis.labels, name=axis.name) for axis in self.axes]
        if len(indices) == 1:
            return pandas.Series(values, index=indices[0], name=self.kind)
        rows = indices[0] if len(indices) == 2 else pandas.MultiIndex.from_product(indices[:-1])
        return pandas.DataFrame(values.reshape(len(rows), -1), index=rows, columns=indices[-1])

    def as_dict(self) -> dict[str, Any]:
        """For JSON: None where there is no value, and where one is withheld."""
        values = [None if math.isnan(v) else v for v in self._content().flatten().tolist()]
        found: dict[str, Any] = {
            "kind": self.kind,
            "axes": [[a.name, list(a.labels)] for a in self.axes],
            "values": values,
        }
        if self.withheld is not None:
            found["withheld"] = self.withheld.flatten().tolist()
        return found

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict())

    def plot_data(self) -> Plot:
        """A figure as data: bars by the first dimension, in groups by the others."""
        values, first = self._content(), self.axes[0] if self.axes else Axis(self.kind, (self.kind,))
        flat = values.reshape(len(first.labels), -1)
        others = _label_products(self.axes[1:])
        series = {
            " ".join(map(str, label)) or self.kind: {
                str(place): float(v) for place, v in zip(first.labels, flat[:, i].tolist(), strict=True) if v == v
            }
            for i, label in enumerate(others)
        }
        return Plot(self.kind.replace(" ", "_"), first.name, self.kind, series, kind="bars")

    def plot(self, ax: Any = None) -> Any:
        """Draw into matplotlib's Axes, and give them.

        Raises:
            PlotError: matplotlib is not installed.
        """
        return self.plot_data().plot(ax)

    def sections(self) -> Iterable[RenderableType]:
        """One table: rows by all dimensions but the last, columns by the last."""
        table = TextTable(title=self.kind, title_justify="left")
        axes = self.axes or (Axis("", ("",)),)
        leading = axes[:-1]
        for axis in leading:
            table.add_column(axis.name)
        if leading:
            for label in axes[-1].labels:
                table.add_column(f"{axes[-1].name} {label}" if axes[-1].name else str(label), justify="right")
        else:
            table.add_column(axes[-1].name)
            table.add_column(self.kind, justify="right")
        values = self._content().reshape(-1, len(axes[-1].labels))
        hidden = torch.zeros_like(values) if self.withheld is None else self.withheld.reshape(values.shape)
        cells = [[_written(v, h) for v, h in zip(*row, strict=True)]
                 for row in zip(values.tolist(), hidden.tolist(), strict=True)]  # fmt: skip
        if leading:
            for labels, row in zip(_label_products(leading), cells, strict=True):
                table.add_row(*map(str, labels), *row)
        else:
            for label, cell in zip(axes[-1].labels, cells[0], strict=True):
                table.add_row(str(label), cell)
        yield table


def _label_products(axes: Sequence[Axis]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for axis in axes:
        found = [(*labels, label) for labels in found for label in axis.labels]
    return found


def _written(value: float, withheld: Any) -> str:
    return "withheld" if withheld else "-" if math.isnan(value) else f"{value:.10g}"


@dataclass(frozen=True, eq=False)
class Statistic:
    """What a statistics function or an evaluation gives: values in shares, with the rows behind each of them.

    Attributes:
        values: in shares, one dimension for each axis; 0 where there is no value.
        counts: whole numbers in shares: the rows that went into each value; of the values' shape, or one that
            broadcasts to it.
        axes: names and labels of the dimensions; public.
        kind: the statistic's name, such as "mean".
        defined: 1 where there is a value, 0 where there is none (the mean of no row); None if there is one everywhere.
        row_bound: the most by which one row's content can change one value, where that is known: 1 for a count, the
            column's limit for a sum; the sensitivity of differential privacy.
        source: what it was computed of beside tables, such as a model's version; public, for a release's receipt.
    """

    values: SharedTensor
    counts: SharedTensor
    axes: tuple[Axis, ...] = ()
    kind: str = "statistic"
    defined: SharedTensor | None = None
    row_bound: float | None = None
    source: str = ""

    def __post_init__(self):
        wanted = tuple(len(axis.labels) for axis in self.axes)
        if tuple(self.values.shape) != wanted:
            raise ArgumentError(f"the axes of a {self.kind} are of {wanted}, and its values {tuple(self.values.shape)}")
        try:
            fits = tuple(torch.broadcast_shapes(self.counts.shape, wanted)) == wanted
        except RuntimeError:
            fits = False
        if not fits:
            raise ArgumentError(f"the counts of a {self.kind} do not broadcast to its values")

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}: {len(axis.labels)}" for axis in self.axes)
        return f"Statistic({self.kind}{', ' if axes else ''}{axes}; in shares)"

    def reveal(self, to: Any = None) -> LabelledResult:
        """The values, learned by the named parties (Q by default) and nobody else, under no policy; see `release`.

        Rounds and bytes as of `SharedTensor.reveal`, for the values and, where there may be none, for a flag each.
        Whoever learns them learns which have no value, and nothing of the counts.

        Raises:
            RangeExceededError, ArgumentError, DisagreementError: as of `SharedTensor.reveal`.
        """
        x = self.values
        plain = x.like(x.shares, bound=x.bound, dtype=torch.float64)
        plain.whole_bits = x.whole_bits
        values = plain.reveal(to)
        if self.defined is not None:
            defined = self.defined.expand(self.values.shape).reveal(to)
            values = torch.empty_like(values) if values.is_meta else torch.where(defined.bool(), values, math.nan)
        return LabelledResult(values, self.axes, self.kind)
