"""Statistics of tables in shares: each gives labelled values in shares, with the number of rows behind each value.

Columns have public limits, so every sum and product here has a known range, and none is checked. Sums of squares are
taken of two halves of the digits, so that they are exact; a quotient is corrected by its remainder, so that it is the
nearest multiple of its last place. Only square roots and what is made of them have an error beyond that.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table as TextTable

from ..backend import Normal, Value
from ..choreography.declaration import in_package
from ..display import Display, Plot
from ..errors import ArgumentError, DtypeError, FixedPointRangeError
from ..ops.common import check_fits, exponent_map, round_scale
from ..ops.order import sort_rows
from ..ops.series import RECIPROCAL, RSQRT_OF_QUARTER
from ..optional_deps import required_imports
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context, one_call
from .table import Column, Table, embed_public


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


_CELLS = ("partition", "nested", "ranked", "extreme")


class Origin(NamedTuple):
    """What sectorch's own functions say of a statistic that they made, for a release. Hand-made ones have none.

    Attributes:
        statistic: as it was made; one with other shares in their place is not of this origin.
        of: public facts that tell it from others of its kind, such as the names of columns.
        rows: the public number of all rows; None where it is not public, or cells are not of rows.
        many: how many rows one person may have.
        columns: how many of the last dimensions are of columns, each with a value of the same rows.
        ranks: of quantiles: which ones.
        uneven: whether columns side by side may have values of other rows, or be computed of each other.
        ones: of sums and means of flags: how many rows have 1, for each value. flags: which columns are flags.
        behind: for each value a further number of rows that has to reach a policy's minimum.
        cells: further numbers of rows behind all values: each is 0, or reaches a policy's minimum.
        crossed: further numbers of rows by two categories: where both occur, the number reaches the minimum.
        shows_counts: whether the values contain numbers of rows with all their digits.
        disguised: why no minimum protects it: it is made of flags, and tells how many have them.
    """

    statistic: Statistic
    of: tuple[str, ...]
    rows: int | None = None
    many: int = 1
    columns: int = 0
    ranks: tuple[float, ...] = ()
    uneven: bool = False
    ones: SharedTensor | None = None
    flags: tuple[bool, ...] = ()
    behind: SharedTensor | None = None
    cells: SharedTensor | None = None
    crossed: SharedTensor | None = None
    shows_counts: bool = False
    disguised: bool = False


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
        cells: how the rows of different values are related, by which a policy decides: "partition" (no two values of a
            dimension have rows in common, or all have the same), "nested" (the rows of one value are part of another's,
            so that the difference of two counts may be one row), "ranked" (a value is some row's own, or between two
            rows' own), "extreme" (the smallest or the largest row's own).
    """

    values: SharedTensor
    counts: SharedTensor
    axes: tuple[Axis, ...] = ()
    kind: str = "statistic"
    defined: SharedTensor | None = None
    row_bound: float | None = None
    source: str = ""
    cells: Literal["partition", "nested", "ranked", "extreme"] = "partition"

    def __post_init__(self):
        if self.cells not in _CELLS:
            raise ArgumentError(f"cells is one of {', '.join(_CELLS)}, got {self.cells!r:.40}")
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


_Made = TypeVar("_Made", bound=Statistic)


_origins: weakref.WeakKeyDictionary[Statistic, Origin] = weakref.WeakKeyDictionary()
"""Beside the statistics, since an attribute of an object is the word of whoever has it."""


def origin_of(statistic: Statistic) -> Origin | None:
    """What made it, where that is a function of sectorch; None of one that is made by hand or `replace`d.

    Its `statistic` is what was made, whatever has become of the object's attributes.
    """
    made = _origins.get(statistic) if isinstance(statistic, Statistic) else None
    if made is None or not in_package(sys._getframe(1).f_code):
        return None
    own = made.statistic
    same = statistic.values.shares is own.values.shares and statistic.counts.shares is own.counts.shares
    return made if same else None


def with_origin(statistic: _Made, of: Iterable[Any], results: list[SharedTensor], **facts: Any) -> _Made:
    """The statistic, with what its maker says of it (`Origin`).

    Args:
        results: those of the call that it is computed in (`one_call`), so that its range checks count here as well.
    """
    if not in_package(sys._getframe(1).f_code):
        raise ArgumentError("only sectorch's own functions say what a statistic is made of")
    kept = copy.copy(statistic)
    for name in ("values", "counts", "defined"):
        if (x := getattr(kept, name)) is not None:
            object.__setattr__(kept, name, _another(x))
            results.append(getattr(kept, name))
    _origins[statistic] = Origin(kept, tuple(map(str, of)), **facts)
    return statistic


def _another(x: SharedTensor) -> SharedTensor:
    """The same shares in another tensor, whose attributes nobody else can set."""
    found = x.like(x.shares, bound=x.bound)
    found.whole_bits, found.flags = x.whole_bits, x.flags
    return found


def with_source(statistic: Statistic, source: str) -> Statistic:
    """The statistic with another `source`, of the same origin."""
    found = replace(statistic, source=source)
    if (made := _origins.get(statistic)) is not None:
        _origins[found] = made._replace(statistic=replace(made.statistic, source=source))
    return found


def flags_of(table: Table, names: Sequence[str]) -> tuple[bool, ...]:
    """For each column whether it is of 0 and 1, so that its sum is a number of rows."""
    found = []
    for name in names:
        column, x = table.schema[name], table.filled(name)
        # Whatever a program calls a column of bits.
        bounds = [b for b in (column.bound, None if x.bound is None else x.bound * 2.0**-x.scale_bits) if b is not None]
        whole = not x.scale_bits or x.is_integral
        found.append(column.kind == "flag" or (whole and bool(bounds) and min(bounds) <= 1))
    return tuple(found)


# Whole numbers of the ring: exact quotients and roots of a few cells. Every range is known to the caller.

MOST_ROWS = 1 << 24
"""A table of more rows leaves sums no room."""

ROOT_BITS = 30
"""Fraction bits of the inverse mantissas by which quotients and roots are approximated."""

INVERSE_BITS = 25
"""A quotient's first approximation is right to so many bits: the series' 2^-26 and its rounding."""


def one_statistic(table: Table) -> AbstractContextManager[tuple[Context, list[SharedTensor]]]:
    """`one_call` for a statistic of a table."""
    present = [table.present] if table.present is not None else []
    return one_call(*(table.filled(name) for name in table.columns), *table.missing.values(), *present)


def scale_shares(context: Context, x: Value, bits: int) -> Value:
    """x 2^bits, rounded half up where bits is negative."""
    while bits < 0:
        step = min(32, -bits)
        x, bits = context.backend.truncate(x, step), bits + step
    return x << bits if bits else x


def floor_shift(context: Context, x: Value, bits: int) -> Value:
    """The floor of x / 2^bits. In steps: the floor of a floor is the floor."""
    while bits > 0:
        step = min(32, bits)
        x, bits = context.backend.truncate(x - (1 << (step - 1)), step), bits - step
    return x


def at_least(context: Context, x: Value, threshold: int, bits: int) -> Value:
    """[x >= threshold], 0 or 1, for |x - threshold| < 2^bits."""
    return context.backend.at_least(x, (threshold,), min(63, bits))[0]


def exact_quotient(
    context: Context, top: Value, bottom: Value, scale: int, most: int, divisor_bits: int, bits: int
) -> Value:
    """top / bottom, the nearest multiple of 2^-bits, of two the larger. Exact.

    Args:
        top: at `scale` fraction bits, below 2^62; |top / bottom| < 2^most.
        bottom: whole numbers from 1 to 2^divisor_bits - 1, of top's shape.
        bits: fraction bits of the result, with most + bits <= 60.

    Each step is right to 25 bits (a series for 1 / mantissa), and the next takes the remainder; the last remainder is
    compared with half a divisor. Rounds some 6 for each step, and 4.
    """
    backend, multiply = context.backend, context.backend.multiply
    normal = backend.normalise(bottom, 0, divisor_bits)
    power = exponent_map(context, normal, lambda e: 1 << (divisor_bits - e))
    inverse = scale_shares(context, backend.series(normal.mantissa, divisor_bits, RECIPROCAL), ROOT_BITS - 52)

    def approximate(rest: Value, own: int, below: int) -> Value:
        """rest / bottom at `bits`, for a rest at `own` fraction bits with |rest / bottom| < 2^below."""
        fits = min(own, 60 - below - divisor_bits)
        coarse = multiply(torch.mul, scale_shares(context, rest, fits - own), power)
        kept = min(fits + divisor_bits, ROOT_BITS - below)
        coarse = scale_shares(context, coarse, kept - fits - divisor_bits)
        return scale_shares(context, multiply(torch.mul, coarse, inverse), bits - kept - ROOT_BITS)

    found = approximate(top, scale, most)
    fine = max(scale, bits)
    top = top << (fine - scale)  # from here on mod 2^64: only remainders are used
    below = most - INVERSE_BITS
    while True:
        rest = top - (multiply(torch.mul, found, bottom) << (fine - bits))
        if below <= -bits - 3:
            break
        below = max(below, -bits) + 1
        found = found + approximate(rest, fine, below)
        below -= INVERSE_BITS
    unit, size = bottom << (fine - bits), divisor_bits + fine - bits + 2
    return found + at_least(context, rest * 2 - unit, 0, size) - 1 + at_least(context, rest * 2 + unit, 0, size)


def over_root(context: Context, top: Value, square: Value, most: int) -> Value:
    """top / sqrt(square) for whole numbers, |top| < sqrt(square) 2^most, at f fraction bits; 0 for a square of 0.

    Relative error 2^-24, and 2^(most - 30) beside it. The square is m 2^e for an even e: top 2^(-e/2) is divided by
    sqrt(m) by a series.
    """
    backend, kept = context.backend, ROOT_BITS - most
    normal, inverse = _inverse_root(context, square)
    power = exponent_map(context, normal, lambda e: 1 << ((62 - e) // 2), 0)
    coarse = scale_shares(context, backend.multiply(torch.mul, top, power), kept - 31)
    return scale_shares(context, backend.multiply(torch.mul, coarse, inverse), context.frac_bits - kept - ROOT_BITS)


def _inverse_root(context: Context, square: Value) -> tuple[Normal, Value]:
    """Mantissa m in [1/4, 1) and even exponent of a whole number below 2^62, and 1 / sqrt(m) at 30 bits."""
    normal = context.backend.normalise(square, 0, 62, 2)
    series = context.backend.series(normal.mantissa, 62, RSQRT_OF_QUARTER)
    return normal, scale_shares(context, series, ROOT_BITS - 52)


# WeightedRows: values, weights and groups of a table's columns.


def _stack_last(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values, -1)


def _side_by_side(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, -1)


def _with_row_before(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((torch.full_like(x[:1], number), x))


def _with_zeros_after(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, torch.zeros_like(x[:1])))


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return products.matmul(x.mT.contiguous(), y)


def _rows_of_codes(code: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    return products.matmul(code, cells)


def _outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.unsqueeze(2) * y.unsqueeze(1)).reshape(x.shape[0], -1)


def _each_code(code: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return code.unsqueeze(2) * values.unsqueeze(1)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous()


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.sum(dim)


def _cells(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.reshape(tuple(shape))


def codes_of_steps(context: Context, steps: Value) -> Value:
    """One-hot codes (n, T + 1) of [x >= t_1], ..., [x >= t_T] (T, n). Local."""
    first = context.backend.affine(_with_row_before, steps, 1)
    return context.backend.each(_rows_first, first - context.backend.each(_with_zeros_after, steps))


def labels_of(table: Table, name: str) -> tuple[Any, ...]:
    """The public labels of a column of groups.

    Raises:
        DtypeError: a column of numbers, which has no public list of values.
    """
    column = table.schema[table.checked(name)]
    if column.kind == "flag":
        return (False, True)
    if column.categories is None:
        raise DtypeError(
            f"column {name!r} is of kind {column.kind!r}: groups are of a category or a flag; name categories, or "
            f"compare (with_columns(old=t[{name!r}] >= 65))"
        )
    return column.categories


def group_codes(context: Context, table: Table, name: str) -> Value:
    """One-hot codes (n, K) of a category or a flag. Local for two groups; otherwise K - 1 comparisons of few bits."""
    count, x = len(labels_of(table, name)), table.filled(name)
    if count == 1:
        return context.backend.affine(_with_ones, context.backend.each(partial(torch.unsqueeze, dim=-1), x.shares), 1)
    if count == 2:
        steps = context.backend.each(partial(torch.unsqueeze, dim=0), x.shares)
    else:
        steps = context.backend.at_least(x.shares, tuple(range(1, count)), count.bit_length() + 1)
    return codes_of_steps(context, steps)


def _with_ones(x: torch.Tensor, number: int) -> torch.Tensor:
    return x * 0 + number


def as_names(by: Any, what: str = "by") -> tuple[str, ...]:
    """One name or several.

    Raises:
        ArgumentError: it is neither.
    """
    names = () if by is None else (by,) if isinstance(by, str) else by
    if (
        not isinstance(names, (list, tuple))
        or not all(isinstance(n, str) for n in names)
        or len(set(names)) < len(names)
    ):
        raise ArgumentError(f"{what} is a column's name or a list of names, got {by!r:.60}")
    return tuple(names)


class WeightedRows:
    """Values (n, d) of some columns, the rows that count for each, and the groups that rows are of.

    Attributes:
        values: at `scale` fraction bits, 0 in rows that do not count.
        bits: of the values' magnitude as ring elements; `unit_bits` of the magnitude itself.
        weights: 0 or 1 (n, d), or (n, 1) where all columns have the same; None where every row counts.
        codes: one-hot (n, K) of the groups; None without groups.
    """

    def __init__(self, context: Context, table: Table, names: Sequence[str], by: Sequence[str], together: bool = False):
        self.context, self.table, self.names, self.by = context, table, tuple(names), tuple(by)
        self.rows = len(table)
        self.count_bits = self.rows.bit_length() + 1
        self.labels = [labels_of(table, name) for name in by]
        self.shape = tuple(len(labels) for labels in self.labels)
        backend = context.backend
        parts = [group_codes(context, table, name) for name in by]
        self.codes = reduce(lambda a, b: backend.multiply(_outer, a, b), parts) if parts else None
        known = [table.known(*names, *by)] if together or not names else [table.known(name, *by) for name in names]
        if all(table.missing.get(n) is None for n in names):
            known = known[:1]
        ones = embed_public(table.filled(table.columns[0]), torch.ones(self.rows, dtype=torch.bool))
        self.weights = None
        if any(w is not None for w in known):
            self.weights = backend.each(_stack_last, *((ones if w is None else w).shares for w in known))
        self.scale = self.bits = self.unit_bits = 0
        if names:
            columns = [_number(context, table.filled(name), table.schema[name]) for name in names]
            self.scale = max(x.scale_bits for x in columns)
            self.unit_bits = max(_unit_bits(table.schema[name], x) for name, x in zip(names, columns, strict=True))
            self.bits = self.unit_bits + self.scale
            shares = [x.shares << (self.scale - x.scale_bits) for x in columns]
            self.values = backend.each(_stack_last, *shares)
            masked = table.present is not None or any(n in table.missing for n in by) or (together and len(names) > 1)
            if masked and self.weights is not None:
                self.values = backend.multiply(torch.mul, self.values, self.weights)

    def axes(self, columns: bool = True) -> tuple[Axis, ...]:
        """The dimensions of a result: groups, and columns where there are several."""
        found = [Axis(name, labels) for name, labels in zip(self.by, self.labels, strict=True)]
        return (*found, *([Axis("column", self.names)] if columns and len(self.names) > 1 else []))

    def sums(self, *values: Value) -> list[Value]:
        """The sum of each value (n, d) over the rows, or over those of each group: (K, d), or (1, d)."""
        backend = self.context.backend
        if self.codes is None:
            return [backend.each(partial(_sum_kept), v) for v in values]
        found = backend.multiply(_cross, self.codes, backend.each(_side_by_side, *values))
        ends = np.cumsum([v.shape[1] for v in values]).tolist()
        return [found[:, e - v.shape[1] : e] for e, v in zip(ends, values, strict=True)]

    def counts(self) -> Value:
        """The rows that count: (K, d) or (K, 1), with K = 1 without groups."""
        backend = self.context.backend
        if self.weights is not None:
            return self.sums(self.weights)[0]
        if self.codes is not None:
            return backend.each(partial(torch.unsqueeze, dim=-1), backend.each(partial(_sum, dim=0), self.codes))
        return backend.embedded(torch.full((1, 1), self.rows, dtype=torch.int64))

    def at_rows(self, cells: Value) -> Value:
        """The cell (K, d) of each row's group: (n, d); (1, d) without groups."""
        return cells if self.codes is None else self.context.backend.multiply(_rows_of_codes, self.codes, cells)

    def tensor(self, cells: Value, scale: int, largest: float, dtype: torch.dtype = torch.float64) -> SharedTensor:
        """Cells (K, d) as a tensor of the result's shape."""
        width = (cells.shape[-1],) if len(self.names) > 1 else ()
        made = self.context.tensor(
            self.context.backend.each(partial(_cells, shape=(*self.shape, *width)), cells), scale, largest * 2.0**scale
        )
        return made.like(made.shares, bound=made.bound, dtype=dtype)


def _sum_kept(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=True)


def _number(context: Context, x: SharedTensor, column: Column) -> SharedTensor:
    """A column that can be added up: at f fraction bits at most, and below its limit, which is checked in secret where
    a program names it of what it computed."""
    most = 2.0 ** (_unit_bits(column, x) + x.scale_bits)
    if x.bound is None or x.bound > most:
        x = check_fits(context, x.bounded(2.0**63), most)
    return round_scale(context, x, context.frac_bits)


def _unit_bits(column: Column, x: SharedTensor) -> int:
    """k: magnitudes of the column are below 2^k, by its limit, its tensor's bound, or the check of `_number`."""
    bounds = [b for b in (column.bound, None if x.bound is None else x.bound * 2.0**-x.scale_bits) if b is not None]
    if column.bound is None:
        bounds.append(x.scheme.activation_limit)
    return max(0, math.frexp(min(bounds))[1])


def check_table(table: Any, *names: str, by: Sequence[str] = (), numbers: bool = True, least: int = 1) -> Table:
    """The table, checked; one without rows has a row that does not count, so that every sum has a term.

    Args:
        names: columns, of numbers unless `numbers` is False.
        by: columns of groups.

    Raises:
        ArgumentError: no Table, too many rows, fewer columns than are needed, or a name that there is none of.
        DtypeError: a column of another kind.
        FixedPointRangeError: limits and rows that leave the sum of a column no room.
    """
    if not isinstance(table, Table):
        way = "; share it first: table.share()" if hasattr(table, "share") else ""
        raise ArgumentError(f"a statistic is of a sectorch.Table, got a {type(table).__name__}{way}")
    if len(names) < least:
        raise ArgumentError(f"this statistic takes {least} column{'s' * (least > 1)} or more, got {len(names)}")
    for name in (*names, *by):
        table.checked(name)
    if len(set(names)) < len(names):
        raise ArgumentError("a column is named twice")
    if len(table) >= MOST_ROWS:
        raise ArgumentError(f"a statistic is of fewer than {MOST_ROWS} rows, got {len(table)}")
    for name in by:
        labels_of(table, name)
    for name in names if numbers else ():
        x, column = table.filled(name), table.schema[name]
        if column.kind == "category":
            raise DtypeError(f"column {name!r} is a category and has no sums or order; it may be a group: by={name!r}")
        bits = _unit_bits(column, x) + min(x.scale_bits, x.scheme.frac_bits) + len(table).bit_length()
        if bits > 60:
            raise FixedPointRangeError(
                f"the sum of column {name!r} over {len(table)} rows may leave the ring by {bits - 60} bits: name a "
                f"narrower limit (Column(limit=...)), or use another unit"
            )
    return table if len(table) else table.with_absent_row()


def _defined(rows: WeightedRows, counts: Value, least: int = 1) -> Value:
    """[counts >= least]."""
    return at_least(rows.context, counts, least, rows.count_bits + 1)


def _made(
    rows: WeightedRows, results: list[SharedTensor], kind: str, cells: Value, scale: int, largest: float, counts: Value,
    defined: Value | None = None, row_bound: float | None = None, columns: bool = True, sums: Value | None = None,
    more: Sequence[Any] = (),
) -> Statistic:  # fmt: skip
    """A statistic of columns.

    Args:
        sums: of sums and means: the sums of the columns; of others flags are counts in disguise.
        more: what tells it from another of its kind, beside the columns.
    """
    values = rows.tensor(cells, scale, largest)
    shape = (*rows.shape, *([counts.shape[-1]] if len(rows.names) > 1 else []))
    own = rows.context.tensor(
        rows.context.backend.each(partial(_cells, shape=shape), counts), 0, float(max(1, rows.rows))
    )
    own = own.like(own.shares, bound=own.bound, dtype=torch.int64)
    flags = None
    if defined is not None:
        flags = rows.context.tensor(rows.context.backend.each(partial(_cells, shape=shape), defined), 0, 1.0)
        flags = flags.like(flags.shares, bound=1.0, dtype=torch.bool)
    results += [values, own, *([flags] if flags is not None else [])]
    binary = () if kind == "count" else flags_of(rows.table, rows.names)
    ones = None if sums is None or not any(binary) else rows.tensor(sums, rows.scale, 2.0**rows.unit_bits * rows.rows)
    results += [] if ones is None else [ones]
    statistic = Statistic(
        values, own, rows.axes(columns), kind, flags, row_bound,
        cells="extreme" if kind in ("minimum", "maximum") else "partition",
    )  # fmt: skip
    return with_origin(
        statistic, ("columns", *rows.names, "by", *rows.by, *more), results, rows=rows.table.public_rows,
        many=rows.table.many, columns=int(columns and len(rows.names) > 1), ones=ones, flags=binary,
        uneven=len(rows.names) > 1
        and any(name in rows.table.missing or name not in rows.table.owned for name in rows.names),
        disguised=ones is None and any(binary),
    )  # fmt: skip


def count(table: Table, *names: str, by: Any = None) -> Statistic:
    """The number of rows, or of those that have a value in each named column, for each group.

    Args:
        names: columns; the rows that count if there is none, and a number for each column if there are several.
        by: a category or a flag whose groups are counted, or several.

    Exact. Rounds 0 to 6. Nobody learns anything before `reveal`.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names(by)
    table = check_table(table, *names, by=keys, numbers=False, least=0)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, (), keys) if not names else _CountedRows(context, table, names, keys)
        counts = rows.counts()
        if len(names) > 1 and counts.shape[-1] == 1:
            counts = context.backend.each(partial(_repeated, times=len(names)), counts)
        return _made(rows, results, "count", counts, 0, float(len(table)), counts, row_bound=1.0)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.expand(-1, times)


class _CountedRows(WeightedRows):
    """Rows whose columns are only counted: of any kind."""

    def __init__(self, context: Context, table: Table, names: Sequence[str], by: Sequence[str]):
        super().__init__(context, table, (), by)
        self.names = tuple(names)
        known = [table.known(name, *by) for name in names]
        if any(w is not None for w in known):
            ones = embed_public(table.filled(table.columns[0]), torch.ones(self.rows, dtype=torch.bool))
            self.weights = context.backend.each(_stack_last, *((ones if w is None else w).shares for w in known))


def sum(table: Table, *names: str, by: Any = None) -> Statistic:
    """The sum of each column over the rows that count, for each group; 0 of no row, as pandas has it.

    Args:
        names: numbers, integers or flags; several give a dimension more. Missing values count as nothing.
        by: as of `count`.

    Exact: the sum of the fixed-point values. Rounds 0 to 8; bytes some 8 (groups + columns) a row.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
        FixedPointRangeError: limits and rows that leave the sum no room in the ring.
    """
    keys = as_names(by)
    table = check_table(table, *names, by=keys)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, names, keys)
        (cells,) = rows.sums(rows.values)
        bound = 2.0**rows.unit_bits
        return _made(
            rows, results, "sum", cells, rows.scale, bound * len(table), rows.counts(), row_bound=bound, sums=cells
        )


def _mean_cells(rows: WeightedRows) -> tuple[Value, Value, Value, int, Value]:
    """Means (K, d), 0 of no row, counts, whether there is a row, the means' fraction bits, and the sums."""
    context = rows.context
    counts = rows.counts()
    (sums,) = rows.sums(rows.values)
    defined = _defined(rows, counts)
    wide = partial(_repeated, times=len(rows.names))
    divisor = counts - defined + 1
    divisor = divisor if divisor.shape == sums.shape else context.backend.each(wide, divisor)
    bits = min(context.frac_bits, 59 - rows.unit_bits)
    means = exact_quotient(context, sums, divisor, rows.scale, rows.unit_bits + 1, rows.count_bits, bits)
    return means, counts, defined, bits, sums


def mean(table: Table, *names: str, by: Any = None) -> Statistic:
    """The mean of each column over the rows that count, for each group; no value for no row.

    Args:
        names, by: as of `sum`.

    Error 2^-21 with 20 fraction bits: the mean of the fixed-point values, rounded to the nearest multiple of 2^-20. So
    the whole error is at most 2^-20 where inputs are rounded too. Rounds some 20.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: as of `sum`.
    """
    keys = as_names(by)
    table = check_table(table, *names, by=keys)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, names, keys)
        means, counts, defined, bits, sums = _mean_cells(rows)
        return _made(rows, results, "mean", means, bits, 2.0**rows.unit_bits, counts, defined, sums=sums)


class _Deviations:
    """Values less the mean of their group, in two halves of digits: x = high 2^half + low."""

    def __init__(self, rows: WeightedRows):
        backend = rows.context.backend
        self.rows = rows
        self.means, self.counts, self.defined, mean_bits, _ = _mean_cells(rows)
        self.scale = max(rows.scale, mean_bits)
        x = (rows.values << (self.scale - rows.scale)) - (rows.at_rows(self.means) << (self.scale - mean_bits))
        if rows.weights is not None:
            x = backend.multiply(torch.mul, x, rows.weights)
        self.bits = rows.unit_bits + 1 + self.scale
        self.half = min(32, (self.bits + 1) // 2)
        self.high = backend.truncate(x, self.half)
        self.low = x - (self.high << self.half)
        self.drop = max(0, 2 * self.bits + rows.count_bits - 60)
        """Bits that a sum of products drops, to fit the ring."""
        self.fraction_bits = 2 * self.scale - self.drop

    def joined(self, high: Value, cross: Value, low: Value) -> Value:
        """A sum of products, at `fraction_bits`, from those of the halves; `cross` is that of both mixed products."""
        terms = ((high, 2 * self.half), (cross, self.half), (low, 0))
        a, b, c = (scale_shares(self.rows.context, value, power - self.drop) for value, power in terms)
        return a + b + c

    def squares(self) -> Value:
        """The sum of squares of each group and column (K, d)."""
        backend = self.rows.context.backend
        high, low = backend.square(self.high), backend.square(self.low)
        mixed = backend.multiply(torch.mul, self.high, self.low)
        high, low, mixed = self.rows.sums(high, low, mixed)
        return self.joined(high, mixed * 2, low)

    def over_freedom(self, sums: Value, ddof: int) -> tuple[Value, Value, int, int]:
        """sums / (counts - ddof), whether there is a value, its fraction bits and bits before the point."""
        rows, context, backend = self.rows, self.rows.context, self.rows.context.backend
        enough = _defined(rows, self.counts, ddof + 1)
        freedom = backend.multiply(torch.mul, self.counts - (ddof + 1), enough) + 1
        if freedom.shape != sums.shape:
            freedom = backend.each(partial(_spread, shape=sums.shape), freedom)
        most = 2 * (rows.unit_bits + 1) + 1
        bits = min(2 * self.scale, 60 - most)
        below = backend.multiply(torch.mul, sums, enough) if ddof > 1 else sums
        return (
            exact_quotient(context, below, freedom, self.fraction_bits, most, rows.count_bits, bits),
            enough,
            bits,
            most,
        )


def _spread(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.expand(shape)


def _checked_ddof(ddof: Any) -> int:
    if type(ddof) is not int or not 0 <= ddof <= 1:
        raise ArgumentError(f"ddof is 0 or 1, got {ddof!r:.40}")
    return ddof


def variance(table: Table, *names: str, by: Any = None, ddof: int = 1) -> Statistic:
    """The variance of each column, for each group; no value for fewer than ddof + 1 rows.

    Args:
        names, by: as of `sum`.
        ddof: what is taken off the number of rows: 1 for a sample, 0 for a population.

    Squares are those of deviations from the mean rounded to 2^-20, and their sum is exact but for its last place, which
    is 2^(2 b + v - 60) for values below 2^b and 2^v rows, and at least 2^-40. With n rows the error is at most that
    place over n - ddof, 2^-42 n / (n - ddof) for the mean's rounding, and 2^-20 for the result's (2^(2 b - 58) where
    2^(2 b) is beyond 2^37). Rounds some 50.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: as of `sum`.
    """
    return _variance(table, names, by, ddof, False)


def std(table: Table, *names: str, by: Any = None, ddof: int = 1) -> Statistic:
    """The standard deviation, as `variance`, with a relative error of 2^-23 and one of 2^-20 beside the variance's own.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: as of `sum`.
    """
    return _variance(table, names, by, ddof, True)


def _variance(table: Table, names: Sequence[str], by: Any, ddof: int, root: bool) -> Statistic:
    keys, ddof = as_names(by), _checked_ddof(ddof)
    table = check_table(table, *names, by=keys)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, names, keys)
        deviations = _Deviations(rows)
        found, enough, bits, most = deviations.over_freedom(deviations.squares(), ddof)
        if root:
            # sqrt(v) = v / sqrt(v): of v 2^bits that is sqrt(v) 2^(bits / 2).
            even = bits - bits % 2
            found = scale_shares(context, found, even - bits)
            found = _root(context, found, even, most)
            bits = context.frac_bits
        largest = 2.0 ** ((most + 1) // 2 if root else most)
        wanted = min(bits, context.frac_bits)
        found = scale_shares(context, found, wanted - bits)
        kind, counts = "std" if root else "variance", deviations.counts
        return _made(rows, results, kind, found, wanted, largest, counts, enough, more=("ddof", ddof))


def _root(context: Context, x: Value, scale: int, most: int) -> Value:
    """sqrt(x) at f fraction bits, for x < 2^most at an even number of fraction bits. Relative error 2^-24; 2^-20."""
    backend = context.backend
    normal, inverse = _inverse_root(context, x)
    positive = normal.bits[0]
    mantissa = scale_shares(context, normal.mantissa, ROOT_BITS - 62)
    root = scale_shares(context, backend.multiply(torch.mul, mantissa, inverse), -ROOT_BITS)  # of m, at 30 bits
    # sqrt(m 2^e) at `scale` / 2 fraction bits is root 2^(e / 2); 2^(e / 2) is below 2^((most + scale) / 2 + 1).
    high = min(31, (most + scale) // 2 + 1)
    power = exponent_map(context, normal, lambda e: 1 << min(e // 2, high))
    kept = min(ROOT_BITS, 60 - high)
    found = backend.multiply(torch.mul, scale_shares(context, root, kept - ROOT_BITS), power)
    found = backend.multiply(torch.mul, found, positive)
    return scale_shares(context, found, context.frac_bits - kept - scale // 2)


def minimum(table: Table, *names: str, by: Any = None) -> Statistic:
    """The least value of each column over the rows that count, for each group; no value for no row.

    Args:
        names, by: as of `sum`.

    Exact. Comparisons: one less than the rows for each column and group, in log2 of the rows rounds of comparisons.

    Raises:
        ArgumentError, DtypeError: as of `sum`.
    """
    return _extreme(table, names, by, -1)


def maximum(table: Table, *names: str, by: Any = None) -> Statistic:
    """The largest value of each column, as `minimum`.

    Raises:
        ArgumentError, DtypeError: as of `sum`.
    """
    return _extreme(table, names, by, 1)


def _extreme(table: Table, names: Sequence[str], by: Any, sign: int) -> Statistic:
    keys = as_names(by)
    table = check_table(table, *names, by=keys)
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, names, keys), context.backend
        counts = rows.counts()
        defined = _defined(rows, counts)
        raised = (rows.values if sign > 0 else -rows.values) + (1 << rows.bits)  # 0 or more, so that 0 is the least
        if rows.weights is not None:
            raised = backend.multiply(torch.mul, raised, rows.weights)
        if rows.codes is not None:
            raised = backend.multiply(_each_code, rows.codes, raised)
        else:
            raised = backend.each(partial(torch.unsqueeze, dim=1), raised)
        found = backend.largest(raised, rows.bits + 2) - (1 << rows.bits)
        shown = defined if defined.shape == found.shape else backend.each(partial(_spread, shape=found.shape), defined)
        found = backend.multiply(torch.mul, found if sign > 0 else -found, shown)
        kind = "maximum" if sign > 0 else "minimum"
        return _made(rows, results, kind, found, rows.scale, 2.0**rows.unit_bits, counts, defined)


def covariance(table: Table, *names: str, ddof: int = 1) -> Statistic:
    """The covariance matrix of columns, over the rows that have a value in each of them.

    Args:
        names: two or more numbers, integers or flags.
        ddof: as of `variance`.

    Error as of `variance`, for each entry. One product of the columns' halves with each other: rounds some 40.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: as of `sum`.
    """
    table, ddof = check_table(table, *names, least=2), _checked_ddof(ddof)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, names, (), together=True)
        deviations = _Deviations(rows)
        found, enough, bits, most = deviations.over_freedom(_gram(deviations), ddof)
        wanted = min(bits, context.frac_bits)
        return _matrix(rows, results, "covariance", scale_shares(context, found, wanted - bits), wanted, 2.0**most,
                       deviations.counts, enough, ("ddof", ddof))  # fmt: skip


def correlation(table: Table, *names: str) -> Statistic:
    """Pearson's correlation of columns, over the rows that have a value in each of them.

    Args:
        names: two or more numbers, integers or flags.

    A column that is constant has no correlation. Error 2^-19, and that of `variance` for each variance, relative to it:
    columns whose deviation is far below their limit have fewer digits. Rounds some 40.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: as of `sum`.
    """
    table = check_table(table, *names, least=2)
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, names, (), together=True), context.backend
        deviations = _Deviations(rows)
        gram = _gram(deviations)
        squares = backend.each(_diagonal, gram)
        varies = at_least(context, squares, 1, 62)
        normal, inverse = _inverse_root(context, squares)
        power = exponent_map(context, normal, lambda e: 1 << ((62 - e) // 2))
        # |gram_ij| <= sqrt(s_i s_j) < 2^((e_i + e_j) / 2), so that times both powers it stays below 2^62.
        scaled = backend.multiply(torch.mul, backend.multiply(torch.mul, gram, _column(backend, power)), power)
        found = scale_shares(context, scaled, 29 - 62)
        for factor in (_column(backend, inverse), inverse):
            found = scale_shares(context, backend.multiply(torch.mul, found, factor), -ROOT_BITS)
        both = backend.multiply(torch.mul, _column(backend, varies), varies)
        found = backend.multiply(torch.mul, scale_shares(context, found, context.frac_bits - 29), both)
        return _matrix(rows, results, "correlation", found, context.frac_bits, 2.0, deviations.counts, both)


def _column(backend: Any, x: Value) -> Value:
    return backend.each(partial(torch.unsqueeze, dim=-1), x)


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diagonal(x).clone()


def _with_transpose(x: torch.Tensor) -> torch.Tensor:
    return x + x.mT


def _gram(deviations: _Deviations) -> Value:
    """The sums of products of each column with each (d, d)."""
    backend, high, low = deviations.rows.context.backend, deviations.high, deviations.low
    mixed = backend.each(_with_transpose, backend.multiply(_cross, high, low))
    return deviations.joined(backend.multiply(_cross, high, high), mixed, backend.multiply(_cross, low, low))


def _matrix(
    rows: WeightedRows, results: list[SharedTensor], kind: str, cells: Value, scale: int, largest: float, counts: Value,
    defined: Value, more: Sequence[Any] = (),
) -> Statistic:  # fmt: skip
    context, width = rows.context, len(rows.names)
    values = context.tensor(cells, scale, largest * 2.0**scale)
    values = values.like(values.shares, bound=values.bound, dtype=torch.float64)
    own = context.tensor(context.backend.each(partial(_cells, shape=()), counts), 0, float(max(1, rows.rows)))
    own = own.like(own.shares, bound=own.bound, dtype=torch.int64)
    flags = context.tensor(context.backend.each(partial(_spread, shape=(width, width)), defined), 0, 1.0)
    flags = flags.like(flags.shares, bound=1.0, dtype=torch.bool)
    results += [values, own, flags]
    found = Statistic(values, own, (Axis("column", rows.names), Axis("with", rows.names)), kind, flags)
    binary = any(flags_of(rows.table, rows.names))
    return with_origin(
        found,
        more,
        results,
        rows=rows.table.public_rows,
        many=rows.table.many,
        columns=2,
        disguised=binary,
        uneven=not rows.table.owned.issuperset(rows.names),
    )


# Order statistics, distributions and tests.


def median(table: Table, name: str) -> Statistic:
    """The median of a column: `quantile` of one half, without a dimension.

    Raises:
        ArgumentError, DtypeError: as of `quantile`.
    """
    found = quantile(table, name, (0.5,))
    flags = found.defined
    median = Statistic(found.values[0], found.counts, (), "median", None if flags is None else flags[0], cells="ranked")
    return _of_one_column(median, (0.5,), table, name)


def quantile(table: Table, name: str, q: float | Sequence[float]) -> Statistic:
    """Quantiles of a column over the rows that count, with linear interpolation, as pandas and numpy have them.

    Args:
        name: a number, an integer or a flag.
        q: public shares from 0 to 1; several give a dimension.

    With h = q (n - 1) for n rows that count, the result is between the order statistics below and above h, which are
    exact. Error 2^-20 for the result's rounding, and 2^-24 of the distance of the two. Few rows, all of which count,
    are sorted by a network; otherwise the value is found bit by bit, by counting rows below a secret bound: a
    comparison of every row for each bit of the column's limit and each q. Rounds some 7 for each bit, or for each level
    of the network.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    single = not isinstance(q, (list, tuple))
    parts: list[Any] = [q] if single else list(q)
    if not parts or not all(isinstance(p, (int, float)) and 0 <= p <= 1 for p in parts):
        raise ArgumentError(f"q is one number from 0 to 1 or a list of such numbers, got {q!r:.60}")
    table = check_table(table, name)
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, (name,), ()), context.backend
        counts = rows.counts()
        defined = _defined(rows, counts)
        x = backend.each(partial(_cells, shape=(rows.rows,)), rows.values)
        n = backend.each(partial(_cells, shape=()), counts)
        if rows.weights is None and _sorts(rows.rows, rows.bits, len(parts)):
            low, high, share, share_bits = _sorted_ranks(rows, x, parts)
        else:
            low, high, share, share_bits = _counted_ranks(rows, x, n, parts)
        fine = context.frac_bits - rows.scale
        between = backend.multiply(torch.mul, high - low, share) if not isinstance(share, torch.Tensor) else (
            backend.each(partial(_times_public, factor=share), high - low))  # fmt: skip
        found = (low << fine) + scale_shares(context, between, fine - share_bits)
        found = backend.multiply(torch.mul, found, backend.each(partial(_spread, shape=(len(parts),)), backend.each(
            partial(_cells, shape=(1,)), defined)))  # fmt: skip
        values = context.tensor(found, context.frac_bits, 2.0 ** (rows.unit_bits + context.frac_bits))
        values = values.like(values.shares, bound=values.bound, dtype=torch.float64)
        own = context.tensor(n, 0, float(max(1, rows.rows)))
        own = own.like(own.shares, bound=own.bound, dtype=torch.int64)
        flags = context.tensor(backend.each(partial(_spread, shape=(len(parts),)), backend.each(
            partial(_cells, shape=(1,)), defined)), 0, 1.0)  # fmt: skip
        flags = flags.like(flags.shares, bound=1.0, dtype=torch.bool)
        results += [values, own, flags]
    if single:
        made = Statistic(values[0], own, (), "quantile", flags[0], cells="ranked")
    else:
        made = Statistic(values, own, (Axis("q", tuple(map(float, parts))),), "quantile", flags, cells="ranked")
    return _of_one_column(made, parts, table, name)


def _of_one_column(made: Statistic, ranks: Sequence[float], table: Table, name: str) -> Statistic:
    return with_origin(
        made, (name, *ranks), [], rows=table.public_rows, many=table.many, ranks=tuple(map(float, ranks)),
        disguised=any(flags_of(table, (name,))),
    )  # fmt: skip


def _times_public(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor.to(x.device)


def _sorts(rows: int, bits: int, parts: int) -> bool:
    """Whether a sorting network has fewer comparisons than counting has: an exchange takes about two of those."""
    levels = max(1, (rows - 1).bit_length())
    return levels * (levels + 1) // 2 <= (bits + 3) * parts


def _sorted_ranks(rows: WeightedRows, x: Value, parts: Sequence[float]) -> tuple[Value, Value, torch.Tensor, int]:
    """The order statistics around public ranks, and the public share of the upper one."""
    bits = min(30, 59 - rows.bits)
    (falling,) = sort_rows(rows.context.tensor(x, rows.scale, 2.0**rows.bits))
    ranks = [p * (rows.rows - 1) for p in parts]
    below = [min(int(rank), rows.rows - 1) for rank in ranks]
    above = [min(k + 1, rows.rows - 1) for k in below]
    share = torch.tensor([round((rank - k) * 2**bits) for rank, k in zip(ranks, below, strict=True)])
    low, high = (falling.shares[torch.tensor([rows.rows - 1 - k for k in at])] for at in (below, above))
    return low, high, share, bits


def _counted_ranks(rows: WeightedRows, x: Value, n: Value, parts: Sequence[float]) -> tuple[Value, Value, Value, int]:
    """The order statistics around secret ranks q (n - 1), and the upper one's secret share, by counting rows below."""
    context, backend, width = rows.context, rows.context.backend, rows.bits
    size, sentinel = (len(parts), 1), 1 << width
    # Rows that do not count come last: above every value.
    if rows.weights is not None:
        weights = backend.each(partial(_cells, shape=(rows.rows,)), rows.weights)
        x = x - weights * sentinel + sentinel
    line = backend.each(partial(torch.unsqueeze, dim=0), x)
    rank_bits = 60 - rows.count_bits
    exact = torch.tensor([round(p * 2**rank_bits) for p in parts])
    rank = backend.each(
        partial(_times_public, factor=exact), backend.each(partial(_spread, shape=(len(parts),)), n - 1)
    )
    below = floor_shift(context, rank, rank_bits)
    bits = min(30, rank_bits, 58 - width)
    share = floor_shift(context, rank, rank_bits - bits) - (below << bits)
    bound = backend.each(partial(_spread, shape=(len(parts),)), n - n) - sentinel

    def reached(candidate: Value) -> Value:
        """For each row and part, [x >= candidate]."""
        return at_least(context, line - backend.each(partial(_cells, shape=size), candidate), 0, width + 2)

    for bit in range(width, -1, -1):
        candidate = bound + (1 << bit)
        beneath = backend.each(partial(_sum, dim=1), -reached(candidate) + 1)  # rows below the candidate
        bound = bound + (at_least(context, below - beneath, 0, rows.count_bits + 1) << bit)
    past = reached(bound + 1)
    beneath = backend.each(partial(_sum, dim=1), -past + 1)
    repeated = at_least(context, beneath - below, 2, rows.count_bits + 1)
    wide = backend.each(partial(_spread, shape=(len(parts), rows.rows)), line)
    # The least value past the bound: as a maximum of what is 0 for all others.
    upward = backend.multiply(torch.mul, -wide + 2 * sentinel, past)
    following = -backend.largest(backend.each(_rows_first, upward), width + 3) + 2 * sentinel
    # Where nothing is past the bound, that is 2^(width + 1), and its share is 0.
    return bound, bound + backend.multiply(torch.mul, following - bound, -repeated + 1), share, bits


def histogram(table: Table, name: str, edges: Sequence[float], *, by: Any = None) -> Statistic:
    """The number of values in each bin, as numpy.histogram has it: [e_0, e_1), ..., the last bin with its right edge.

    Args:
        name: a number, an integer or a flag.
        edges: public and rising, of the same unit as the column.
        by: as of `count`.

    Exact, for values and edges as fixed-point numbers. One comparison of every row with each edge.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    places = [float(e) for e in edges]
    if len(places) < 2 or not all(map(math.isfinite, places)) or any(a >= b for a, b in itertools.pairwise(places)):
        raise ArgumentError("edges are two finite numbers or more, each above the one before")
    keys = as_names(by)
    table = check_table(table, name, by=keys)
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, (name,), keys), context.backend
        unit, most = 2.0**rows.scale, 1 << rows.bits
        limits = [math.ceil(e * unit) for e in places[:-1]] + [math.floor(places[-1] * unit) + 1]
        limits = [max(-most, min(most, e)) for e in limits]
        line = backend.each(partial(_cells, shape=(rows.rows,)), rows.values)
        steps = backend.at_least(line, tuple(limits), min(63, rows.bits + 2))
        bins = backend.each(_rows_first, backend.each(_differences, steps))
        if rows.weights is not None:
            bins = backend.multiply(torch.mul, bins, rows.weights)
        (cells,) = rows.sums(bins)
        labels = tuple(f"[{a:g}, {b:g}{')' if b < places[-1] else ']'}" for a, b in itertools.pairwise(places))
        return _cell_counts(rows, results, "histogram", cells, (*rows.axes(), Axis(name, labels)))


def _differences(x: torch.Tensor) -> torch.Tensor:
    return x[:-1] - x[1:]


def _cell_counts(
    rows: WeightedRows, results: list[SharedTensor], kind: str, cells: Value, axes: tuple[Axis, ...]
) -> Statistic:  # fmt: skip
    shape = tuple(len(axis.labels) for axis in axes)
    made = rows.context.tensor(
        rows.context.backend.each(partial(_cells, shape=shape), cells), 0, float(max(1, rows.rows))
    )
    values, counts = (made.like(made.shares, bound=made.bound, dtype=d) for d in (torch.float64, torch.int64))
    results += [values, counts]
    of = ("columns", *rows.names, "by", *rows.by)
    made = Statistic(values, counts, axes, kind, None, 1.0)
    return with_origin(made, of, results, rows=rows.table.public_rows, many=rows.table.many)


def cross_table(table: Table, row: str, column: str) -> Statistic:
    """How many rows have each pair of two columns' categories: `count` by both.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names([row, column])
    table = check_table(table, by=keys, least=0)
    with one_statistic(table) as (context, results):
        rows = WeightedRows(context, table, (), keys)
        return _cell_counts(rows, results, "cross table", rows.counts(), rows.axes())


class TestResult(LabelledResult):
    """A test's revealed quantities; what follows from them is computed here, in plain, by whoever learned them."""

    __test__ = False  # not a test of pytest's

    def __init__(
        self, values: torch.Tensor, axes: Sequence[Axis], kind: str, derive: Callable[[Any], dict[str, float]]
    ):
        super().__init__(values, axes, kind)
        self._derive = derive

    @property
    def statistic(self) -> float:
        """The test's statistic."""
        return self.derived()["statistic"]

    @property
    def degrees_of_freedom(self) -> float:
        """Of the statistic's distribution."""
        return self.derived()["degrees_of_freedom"]

    @property
    def p_value(self) -> float:
        """The two-sided p-value; NaN where the test has no value."""
        return self.derived()["p_value"]

    def derived(self) -> dict[str, float]:
        """statistic, degrees_of_freedom and p_value.

        Raises:
            ArgumentError: this process has no values, or scipy is not installed.
        """
        return self._derive(self.to_numpy())


@dataclass(frozen=True, eq=False)
class HypothesisTest(Statistic):
    """A test in shares. `reveal` gives a `TestResult`, with the p-value; `values` are all that is revealed."""

    derive: Callable[[Any], dict[str, float]] = dict

    def reveal(self, to: Any = None) -> TestResult:
        """The values, learned as by `Statistic.reveal`.

        Raises:
            RangeExceededError, ArgumentError, DisagreementError: as of `SharedTensor.reveal`.
        """
        found = super().reveal(to)
        return TestResult(found.values, found.axes, found.kind, self.derive)


def scipy_stats() -> Any:
    """scipy.stats, for p-values.

    Raises:
        ArgumentError: scipy is not installed.
    """
    with required_imports("a p-value", "scipy", ArgumentError):
        from scipy import stats
    return stats


def t_test(table: Table, name: str, *, by: str) -> HypothesisTest:
    """Welch's t test: whether the means of two groups differ.

    Args:
        name: a number, an integer or a flag.
        by: a flag, or a category of two.

    What is revealed are mean, variance and number of rows of both groups, and nothing else; t, its degrees of freedom
    and the p-value follow from them in plain. Errors of the means and variances as of `mean` and `variance`. There is
    no value with fewer than two rows in a group, or with no variance in both.

    Raises:
        ArgumentError, DtypeError, FixedPointRangeError: before anything is sent.
    """
    keys = as_names(by)
    table = check_table(table, name, by=keys)
    if len(keys) != 1 or len(labels_of(table, keys[0])) != 2:
        raise ArgumentError("a t test compares two groups: by names one flag, or one category of two")
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, (name,), keys), context.backend
        deviations = _Deviations(rows)
        found, enough, bits, _ = deviations.over_freedom(deviations.squares(), 1)
        f = context.frac_bits
        kept = min(f, bits)
        found = scale_shares(context, found, kept - bits) << (f - kept)
        mean_bits = min(f, 59 - rows.unit_bits)
        parts = [deviations.means << (f - mean_bits), found, deviations.counts << f]
        cells = backend.each(_side_by_side, *parts)
        values = context.tensor(cells, f, 2.0**61)
        values = values.like(values.shares, bound=values.bound, dtype=torch.float64)
        own = context.tensor(deviations.counts, 0, float(max(1, rows.rows)))
        own = own.like(own.shares, bound=own.bound, dtype=torch.int64)
        every = [backend.each(partial(_cells, shape=(2, 1)), v) for v in (deviations.defined, enough)]
        flags = context.tensor(backend.each(_side_by_side, *every, every[0] - every[0] + 1), 0, 1.0)
        flags = flags.like(flags.shares, bound=1.0, dtype=torch.bool)
        results += [values, own, flags]
        axes = (Axis(keys[0], rows.labels[0]), Axis("of the group", ("mean", "variance", "count")))
        found = HypothesisTest(values, own, axes, "Welch's t test", flags, derive=_welch)
        binary = any(flags_of(table, (name,)))
        return with_origin(
            found, (name, *keys), results, rows=table.public_rows, many=table.many, shows_counts=True, disguised=binary
        )  # fmt: skip


def _welch(values: np.ndarray) -> dict[str, float]:
    (mean_1, variance_1, n_1), (mean_2, variance_2, n_2) = values.tolist()
    nothing = {"statistic": math.nan, "degrees_of_freedom": math.nan, "p_value": math.nan}
    if not (n_1 >= 2 and n_2 >= 2 and variance_1 + variance_2 > 0):
        return nothing
    first, second = variance_1 / n_1, variance_2 / n_2
    t = (mean_1 - mean_2) / math.sqrt(first + second)
    freedom = (first + second) ** 2 / (first**2 / (n_1 - 1) + second**2 / (n_2 - 1))
    return {"statistic": t, "degrees_of_freedom": freedom, "p_value": float(2 * scipy_stats().t.sf(abs(t), freedom))}


def chi_square(table: Table, row: str, column: str) -> HypothesisTest:
    """Pearson's chi-square test: whether two categories are independent. Without a continuity correction.

    Args:
        row, column: categories or flags.

    What is revealed are the statistic and its degrees of freedom, which are those of the categories that occur, and
    nothing else; the p-value follows in plain. The statistic is n (sum o^2 / (r c) - 1) with shares o / r and o / c at
    30 bits: error n k 2^-30 for n rows and k cells, and 2^-20. There is no value where one category occurs alone.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names([row, column])
    table = check_table(table, by=keys, least=0)
    with one_statistic(table) as (context, results):
        rows, backend = WeightedRows(context, table, (), keys), context.backend
        shape, k = rows.shape, rows.shape[0] * rows.shape[1]
        cells = backend.each(partial(_cells, shape=shape), rows.counts())
        margins = [backend.each(partial(_sum_along, dim=dim), cells) for dim in (1, 0)]
        total = backend.each(partial(_cells, shape=()), backend.each(partial(_sum, dim=1), margins[1]))
        occur = [at_least(context, v, 1, rows.count_bits + 1) for v in margins]
        shares = [
            exact_quotient(context, cells, backend.each(partial(_spread, shape=shape), v - there + 1), 0, 1,
                           rows.count_bits, 30)
            for v, there in zip(margins, occur, strict=True)
        ]  # fmt: skip
        kept = 61 - rows.count_bits - k.bit_length()
        kept = min(40, kept)
        products_ = scale_shares(context, backend.multiply(torch.mul, *shares), kept - 60)
        some = at_least(context, total, 1, rows.count_bits + 1)
        excess = backend.each(partial(_sum_all), products_) - (some << kept)
        f = context.frac_bits
        chi = scale_shares(context, backend.multiply(torch.mul, excess, total), f - kept)
        numbers = [backend.each(partial(_sum_all), v) - some for v in occur]
        freedom = backend.multiply(torch.mul, *numbers)
        positive = at_least(context, freedom, 1, 31)
        chi = backend.multiply(torch.mul, chi, positive)
        both = backend.each(_stack_last, chi, freedom << f)
        values = context.tensor(both, f, 2.0**61)
        values = values.like(values.shares, bound=values.bound, dtype=torch.float64)
        own = context.tensor(total, 0, float(max(1, rows.rows)))
        own = own.like(own.shares, bound=own.bound, dtype=torch.int64)
        behind = context.tensor(cells, 0, float(max(1, rows.rows)))
        behind = behind.like(behind.shares, bound=behind.bound, dtype=torch.int64)
        results += [values, own, behind]
        axes = (Axis("of the test", ("statistic", "degrees of freedom")),)
        found = HypothesisTest(values, own, axes, "chi-square test", None, derive=chi_square_tail)
        return with_origin(found, keys, results, rows=table.public_rows, many=table.many, crossed=behind)


def _sum_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.sum(dim, keepdim=True)


def _sum_all(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def chi_square_tail(values: np.ndarray) -> dict[str, float]:
    """The p-value of a chi-square statistic and its degrees of freedom."""
    statistic, freedom = (float(v) for v in values)
    if not freedom >= 1 or math.isnan(statistic):
        return {"statistic": math.nan, "degrees_of_freedom": freedom, "p_value": math.nan}
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2.0).double(), torch.tensor(max(0.0, statistic) / 2.0).double()
    )
    return {"statistic": statistic, "degrees_of_freedom": freedom, "p_value": float(tail)}
