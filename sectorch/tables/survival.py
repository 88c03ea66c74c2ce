"""Survival of tables in shares: Kaplan-Meier curves, life tables, the log-rank test. Its own file: a field of its own.

Durations are those of a public grid of times. One comparison of each row with each time gives who is at risk after it;
one product with groups and events counts them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..backend import Value
from ..errors import ArgumentError, DtypeError
from ..ring import products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .statistics import (
    Axis,
    HypothesisTest,
    Statistic,
    WeightedRows,
    as_names,
    at_least,
    check_table,
    exact_quotient,
    labels_of,
    one_statistic,
    over_root,
    scale_shares,
    with_origin,
)
from .table import Table

SHARE_BITS = 30
"""Fraction bits of survival shares, whose products are rounded to as many."""


class _Risk:
    """How many rows of each group are at risk at each time, and how many have the event then: both (K, T)."""

    def __init__(
        self, context: Context, table: Table, duration: str, event: str, times: Sequence[float], by: Sequence[str]
    ):
        self.rows = rows = WeightedRows(context, table, (duration,), (*by, event))
        backend, self.times, self.context = context.backend, times, context
        groups = math.prod(rows.shape[:-1])
        limits = [math.floor(t * 2.0**rows.scale) + 1 for t in times]
        limits = [max(-1 << rows.bits, min(1 << rows.bits, limit)) for limit in limits]
        line = backend.each(partial(torch.reshape, shape=(rows.rows,)), rows.values)
        later = backend.each(_transposed, backend.at_least(line, tuple(limits), min(63, rows.bits + 2)))  # (n, T)
        # The groups of `by`, each without and with the event.
        codes = rows.codes if rows.weights is None else backend.multiply(torch.mul, rows.codes, rows.weights)
        total = backend.each(partial(torch.sum, dim=0), codes)
        left = backend.multiply(_cross, codes, later)
        before = backend.each(_with_first, total, left)
        pairs = (groups, 2, len(times))
        left, before = (backend.each(partial(torch.reshape, shape=pairs), v) for v in (left, before))
        self.events = before[:, 1] - left[:, 1]
        self.at_risk = backend.each(partial(torch.sum, dim=1), before)
        self.later = backend.each(partial(torch.sum, dim=1), left)
        """How many rows of each group last longer than each time (K, T)."""

    @property
    def bits(self) -> int:
        return self.rows.count_bits

    def axes(self, *more: Axis) -> tuple[Axis, ...]:
        """Groups, then times."""
        found = [Axis(name, labels) for name, labels in zip(self.rows.by, self.rows.labels, strict=True)][:-1]
        return (*found, Axis("time", tuple(self.times)), *more)

    def tensor(
        self, cells: Value, scale: int, largest: float, dtype: torch.dtype, shape: Sequence[int]
    ) -> SharedTensor:
        """Cells as a tensor of a result's shape."""
        shaped = self.context.backend.each(partial(torch.reshape, shape=tuple(shape)), cells)
        made = self.context.tensor(shaped, scale, largest * 2.0**scale)
        return made.like(made.shares, bound=made.bound, dtype=dtype)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous()


def _cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return products.matmul(x.mT.contiguous(), y)


def _with_first(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((total.unsqueeze(1), x[:, :-1]), 1)


def _check_survival(table: Any, duration: str, event: str, by: Sequence[str]) -> Table:
    table = check_table(table, duration, by=(*by, event))
    kind = table.schema[event].kind
    if kind != "flag":
        raise DtypeError(f"the event is a flag, whether it was observed; column {event!r} is a {kind}")
    return table


def _checked_times(times: Any) -> tuple[float, ...]:
    found = tuple(float(t) for t in times)
    rising = all(a < b for a, b in itertools.pairwise(found))
    if not found or not all(map(math.isfinite, found)) or not rising:
        raise ArgumentError("times are finite numbers, each above the one before, and there is at least one")
    return tuple(int(t) if t == int(t) else t for t in found)


def kaplan_meier(table: Table, duration: str, event: str, *, times: Sequence[float], by: Any = None) -> Statistic:
    """The Kaplan-Meier estimate of survival after each time, for each group.

        curve = sectorch.tables.kaplan_meier(table, "months", "died", times=range(1, 61), by="treated")

    Args:
        duration: how long a row was observed: a number or an integer.
        event: a flag: 1 where the observation ended with the event, 0 where it was censored.
        times: a public grid, rising. A duration between two times counts as the later one; one beyond the last is at
            risk at all of them. If all durations are on the grid, the estimate is that of the durations themselves.
        by: a category or a flag whose groups have a curve each, or several.

    The counts of the result are the rows at risk. Each factor 1 - d / n is exact to 2^-31 and each product of them to
    2^-31, so the error after T times is at most T 2^-30, and 2^-20. A group without rows has no curve. One comparison
    of each row with each time; rounds some 20 + 3 log2 T.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names(by)
    table = _check_survival(table, duration, event, keys)
    grid = _checked_times(times)
    with one_statistic(table) as (context, results):
        risk, backend = _Risk(context, table, duration, event, grid, keys), context.backend
        some = at_least(context, risk.at_risk, 1, risk.bits + 1)
        staying = risk.at_risk - risk.events - some + 1
        share = exact_quotient(context, staying, risk.at_risk - some + 1, 0, 1, risk.bits, SHARE_BITS)
        step = 1
        while step < len(grid):  # products of 1, 2, 4, ... factors that end at each time
            product = backend.multiply(torch.mul, share[:, step:], share[:, :-step])
            share = backend.each(_joined, share[:, :step], scale_shares(context, product, -SHARE_BITS))
            step *= 2
        axes = risk.axes()
        shape = tuple(len(axis.labels) for axis in axes)
        f = context.frac_bits
        started = backend.each(partial(_first_repeated, times=len(grid)), some)
        share = backend.multiply(torch.mul, scale_shares(context, share, f - SHARE_BITS), started)
        values = risk.tensor(share, f, 2.0, torch.float64, shape)
        counts = risk.tensor(risk.at_risk, 0, float(len(table)), torch.int64, shape)
        flags = risk.tensor(started, 0, 1.0, torch.bool, shape)
        results += [values, counts, flags]
        found = Statistic(values, counts, axes, "Kaplan-Meier estimate", flags, cells="nested")
        return with_origin(found, (duration, event, *keys), results, many=table.many)


def _joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, y), 1)


def _one_after_the_other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, y))


def _first_repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x[:, :1].expand(-1, times)


def _side_by_side(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values, -1)


def life_table(table: Table, duration: str, event: str, *, times: Sequence[float], by: Any = None) -> Statistic:
    """The rows at risk at each time, and those with the event then, for each group: what estimates are made of.

    Args:
        duration, event, times, by: as of `kaplan_meier`.

    Exact. One comparison of each row with each time, and one product.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names(by)
    table = _check_survival(table, duration, event, keys)
    grid = _checked_times(times)
    with one_statistic(table) as (context, results):
        risk = _Risk(context, table, duration, event, grid, keys)
        axes = risk.axes(Axis("rows", ("at risk", "events")))
        shape = tuple(len(axis.labels) for axis in axes)
        cells = context.backend.each(_side_by_side, risk.at_risk, risk.events)
        values, counts = (risk.tensor(cells, 0, float(len(table)), d, shape) for d in (torch.float64, torch.int64))
        results += [values, counts]
        found = Statistic(values, counts, axes, "life table", None, 1.0, cells="nested")
        return with_origin(found, (duration, event, *keys), results, many=table.many)


def log_rank(table: Table, duration: str, event: str, *, times: Sequence[float], by: str) -> HypothesisTest:
    """The log-rank test: whether two groups have the same survival.

    Args:
        duration, event, times: as of `kaplan_meier`.
        by: a flag, or a category of two.

    What is revealed is z, the observed less the expected events of the first group over their deviation, and nothing
    else; its square is the chi-square statistic of one degree of freedom, and the p-value follows in plain. There is no
    value where no event was at risk in both groups. With D events at T times and variance V the error of z is at most
    2^-19, (T 2^-25 + 2^-21) / sqrt(V), and (D + T) 2^-20 / V of z. Rounds some 35.

    Raises:
        ArgumentError, DtypeError: before anything is sent.
    """
    keys = as_names(by)
    table = _check_survival(table, duration, event, keys)
    if len(keys) != 1 or len(labels_of(table, keys[0])) != 2:
        raise ArgumentError("a log-rank test compares two groups: by names one flag, or one category of two")
    grid = _checked_times(times)
    with one_statistic(table) as (context, results):
        risk, backend = _Risk(context, table, duration, event, grid, keys), context.backend
        multiply, bits = partial(backend.multiply, torch.mul), risk.bits
        n, d = (backend.each(partial(torch.sum, dim=0), v) for v in (risk.at_risk, risk.events))
        first, second = risk.at_risk[0], risk.at_risk[1]
        two = at_least(context, n, 2, bits + 1)  # the variance at a time with one row is 0, and so is what it adds
        some = at_least(context, n, 1, bits + 1)
        whole, fewer = n - some + 1, multiply(n - 2, two) + 1
        expected = exact_quotient(context, multiply(first, d), whole, 0, bits, bits, 24)
        share = exact_quotient(context, second, whole, 0, 1, bits, 20)
        staying = exact_quotient(context, multiply(n - d, two), fewer, 0, 2, bits, 20)
        part = scale_shares(context, multiply(expected, share), -24)
        variance = backend.each(partial(torch.sum, dim=0), multiply(part, staying))  # at 40 bits
        observed = backend.each(partial(torch.sum, dim=0), risk.events[0])
        excess = (observed << 24) - backend.each(partial(torch.sum, dim=0), expected)
        z = over_root(context, scale_shares(context, excess, -4), variance, (bits + 1) // 2 + 1)
        values = risk.tensor(z, context.frac_bits, 2.0 ** (bits // 2 + 2), torch.float64, ())
        counts = risk.tensor(backend.each(partial(torch.sum, dim=0), d), 0, float(len(table)), torch.int64, ())
        varies = at_least(context, variance, 1, 62)
        flags = risk.tensor(varies, 0, 1.0, torch.bool, ())
        # Each row once: with the event at a time, censored until it, or beyond the last.
        behind = backend.each(_joined, risk.events, risk.at_risk - risk.events - risk.later)
        behind = backend.each(partial(torch.reshape, shape=(-1,)), backend.each(_joined, behind, risk.later[:, -1:]))
        started, ended = risk.at_risk[:, 0], backend.each(partial(torch.sum, dim=1), risk.events)
        number = table.public_rows
        if number is not None:  # z shows how many rows do not count
            rest = -backend.each(partial(torch.sum, dim=0, keepdim=True), started) + number
            behind = backend.each(_one_after_the_other, behind, rest)
        cells = risk.tensor(behind, 0, float(len(table)), torch.int64, behind.shape)
        both = backend.each(_side_by_side, ended, started - ended)
        crossed = risk.tensor(both, 0, float(len(table)), torch.int64, (2, 2))
        results += [values, counts, flags, cells, crossed]
        found = HypothesisTest(values, counts, (), "log-rank test", flags, derive=_of_z)
        names = duration, event, *keys, *grid
        return with_origin(found, names, results, rows=number, many=table.many, cells=cells, crossed=crossed)


def _of_z(values: np.ndarray) -> dict[str, float]:
    z = float(values)
    p = math.nan if math.isnan(z) else math.erfc(abs(z) / math.sqrt(2))
    return {"statistic": z * z, "degrees_of_freedom": 1.0, "p_value": p}
