"""Columns with missing values against pandas' nullable types, under random expressions and in all statistics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import sectorch
from sectorch import tables
from sectorch.errors import NonFiniteError, SecretAccessError, ShapeError
from sectorch.tables import Column, Table
from sectorch.tables.nullable import _ELEMENTWISE, _WITH_POLES, NullableColumn
from sectorch.tensor.table import HANDLER, ROW_OF, TABLE

COLUMNS = {
    "x": Column("integer", limit=16),
    "y": Column("integer", limit=16),
    "b": None,
    "k": Column("integer", limit=16),
}
TYPES = {"x": "Int64", "y": "Int64", "b": "boolean", "k": "int64", "present": "bool"}
numbers = st.one_of(st.none(), st.integers(-3, 3))
rows = st.tuples(numbers, numbers, st.one_of(st.none(), st.booleans()), st.integers(-3, 3), st.booleans())
frames = st.lists(rows, min_size=1, max_size=8)

COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
LOGIC = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Expression = Callable[[Any], Any]
"""Of a table, or of a frame: both have columns by name, and operators."""


def named(name: str) -> Expression:
    return lambda t: t[name]


def applied(of: dict[str, Callable]) -> Callable:
    return lambda name, left, right: lambda t: of[name](left(t), right(t))


values = st.recursive(
    st.sampled_from(["x", "y", "k"]).map(named),
    lambda parts: st.one_of(
        st.builds(applied(ARITHMETIC), st.sampled_from(list(ARITHMETIC)), parts, parts),
        st.builds(lambda part, n: lambda t: n - abs(part(t)), parts, st.integers(-2, 2)),
    ),
    max_leaves=3,
)
public = st.integers(-3, 3).map(lambda n: lambda t: n)


def in_list(part: Expression, options: list[int]) -> Expression:
    def run(t: Any) -> Any:
        return part(t).isin(options) if isinstance(t, pandas.DataFrame) else torch.isin(part(t), torch.tensor(options))

    return run


conditions = st.recursive(
    st.one_of(
        st.just(named("b")),
        st.builds(applied(COMPARE), st.sampled_from(list(COMPARE)), values, st.one_of(values, public)),
        st.builds(in_list, values, st.lists(st.integers(-3, 3), min_size=1, max_size=3)),
    ),
    lambda parts: st.one_of(
        parts.map(lambda part: lambda t: ~part(t)),
        st.builds(applied(LOGIC), st.sampled_from(list(LOGIC)), parts, parts),
    ),
    max_leaves=4,
)


def shared(content: list[tuple], session: Any, filtered: bool) -> tuple[Table, pandas.DataFrame]:
    frame = pandas.DataFrame(content, columns=list(TYPES)).astype(TYPES)
    own = sectorch.owned(
        frame, owner="H1", session=session, columns={**COLUMNS, "present": None}, missing=["x", "y", "b"]
    )
    table = own.share()
    return (table.where(table["present"]), frame[frame["present"]]) if filtered else (table, frame)


def check(content: list[tuple], condition: Expression, value: Expression, filtered: bool, session: Any) -> None:
    table, frame = shared(content, session, filtered)
    kept = table.where(condition(table)).with_columns(value=value(table))
    wanted = frame.assign(value=value(frame))[condition(frame).fillna(False).astype(bool)]
    assert kept.present is not None
    ones = pandas.Series(1, range(len(content)))[wanted.index]
    assert np.flatnonzero(kept.present.reveal().numpy()).tolist() == ones.index.tolist()
    found = kept["value"].reveal().double().numpy()[wanted.index]
    assert np.array_equal(found, wanted["value"].astype("Float64").to_numpy(float, na_value=np.nan), equal_nan=True)
    assert float(tables.sum(kept, "value").reveal()) == float(wanted["value"].sum())
    assert float(tables.count(kept, "value").reveal()) == wanted["value"].count()


MISSING = [(None, 1, None, 0, True), (1, None, True, 1, True), (0, 0, False, -1, False)]


@given(frames, conditions, values, st.booleans())
@example(MISSING, lambda t: t["x"] <= 0, named("x"), False)
@example(MISSING, lambda t: t["x"] != 0, named("x"), True)
@example(MISSING, lambda t: ~(t["x"] <= 0), lambda t: t["x"] + 3, False)
@example(MISSING, lambda t: ~t["b"], lambda t: t["x"] * t["y"], False)
@example(MISSING, lambda t: t["b"] | (t["k"] == 0), named("y"), False)
@example(MISSING, lambda t: ~(t["b"] & (t["k"] == 5)), named("y"), False)
@example(MISSING, lambda t: ~in_list(named("x"), [0])(t), named("y"), False)
@example(MISSING, lambda t: t["x"] + 1 > 0, lambda t: t["k"] - t["x"], True)
def test_conditions_and_computed_columns_are_as_in_pandas(content, condition, value, filtered):
    check(content, condition, value, filtered, sectorch.Session(reference=True, owners=("H1",)))


def test_a_condition_is_the_same_over_the_protocols():
    check(
        MISSING * 3,
        lambda t: ~(t["x"] <= 0) | t["b"],
        lambda t: t["x"] * t["y"] + 1,
        True,
        sectorch.Session(owners=("H1",)),
    )


@given(frames, st.booleans())
def test_keys_and_values_that_are_missing_in_statistics(content, filtered):
    """Each statistic leaves missing values out, and rows without a key are in no group, as pandas has it."""
    table, frame = shared(content, sectorch.Session(reference=True, owners=("H1",)), filtered)
    groups = frame.assign(b=pandas.Categorical(frame["b"], categories=[False, True])).groupby("b", observed=False)
    names = ["x", "y"]
    for how, allowed in (("count", 0), ("sum", 0), ("min", 0), ("max", 0), ("mean", 2.0**-20), ("var", 2.0**-19)):
        ours = {"min": "minimum", "max": "maximum", "var": "variance"}.get(how, how)
        found = getattr(tables, ours)(table, *names, by="b").reveal().to_numpy()
        wanted = getattr(groups[names], how)().astype("Float64").to_numpy(float, na_value=np.nan)
        assert np.allclose(found, wanted, rtol=0, atol=allowed, equal_nan=True), how
    complete = frame.dropna(subset=["x", "b"])
    edges = [-3.5, -0.5, 0.5, 3.5]
    found = tables.histogram(table, "x", edges, by="b").reveal().to_numpy()
    for i, side in enumerate((False, True)):
        own = complete[complete["b"] == side]["x"].to_numpy(float)
        assert found[i].tolist() == np.histogram(own, edges)[0].tolist()
    quantiles = tables.quantile(table, "x", [0.0, 0.3, 1.0]).reveal().to_numpy()
    wanted = frame["x"].astype(float).quantile([0.0, 0.3, 1.0]).to_numpy()
    assert np.allclose(quantiles, wanted, rtol=0, atol=2.0**-18, equal_nan=True)
    both = table.with_columns(c=table["x"] > 0)
    found = tables.cross_table(both, "b", "c").reveal().to_numpy()
    for i, j in np.ndindex(2, 2):
        assert found[i, j] == len(complete[(complete["b"] == bool(i)) & ((complete["x"] > 0) == bool(j))])


def open_table(x: Any, session: Any = None) -> Table:
    session = session or sectorch.Session(owners=("H1",))
    frame = pandas.DataFrame({"x": x, "k": 2.0, "b": pandas.array([True] + [None] * (len(x) - 1), "boolean")})
    return sectorch.owned(frame, owner="H1", session=session, missing=["x", "b"]).share()


def test_quotients_and_choices_of_missing_values():
    """No division by the 0 that stands where a value is missing: it would leave the range, and end the call."""
    table = open_table([4.0, np.nan, -0.5])
    for function in (
        lambda x: table["k"] / x,
        lambda x: torch.log(abs(x)),
        lambda x: (x + 0.0) ** -1,
        torch.reciprocal,
    ):
        found = function(table["x"]).reveal()
        assert found.isnan().tolist() == [False, True, False]
    assert torch.where(table["x"] > 0, 1, 0).reveal().tolist() == [1, 0, 0]
    chosen = torch.where(table["k"] > 0, table["x"], 7.0).reveal()
    assert chosen.isnan().tolist() == [False, True, False]
    assert table["x"].filled(9.0).reveal().tolist() == [4, 9, -0.5] == table.filled("x", 9).reveal().tolist()
    assert float(table["x"].sum().reveal()) == float((table["x"] * 1 + 0).sum().reveal()) == 3.5
    assert (np.array([1.0, 2, 3]) * table["x"]).reveal()[0] == 4 and (table["k"] - table["x"]).reveal()[2] == 2.5


def test_where_a_computed_value_is_missing_nothing_of_the_others_is_revealed():
    """x + k is missing where x is: what is opened there is 0, and not k."""
    table = open_table([4.0, np.nan])
    total = table["x"] + table["k"]
    assert total.filled().reveal().tolist() == [6, 0]
    assert table.with_columns(t=total).filled("t").reveal().tolist() == [6, 0]
    by_hand = Table({"t": total.values}, missing={"t": total.absent})
    assert by_hand.filled("t").reveal().tolist() == [6, 0]


def test_a_filled_column_is_not_as_its_owner_shared_it():
    """A policy counts on the missing values of columns that are: see docs/governance.md."""
    table = open_table([4.0, np.nan])
    again = table.with_columns(same=table["x"], filled=table.filled("x"), computed=table["x"] * 1)
    assert again.owned == {"x", "k", "b", "same"} and set(again.missing) == {"x", "b", "same", "computed"}


REFUSED = {
    "a mean": lambda t: t["x"].mean(),
    "the largest": lambda t: torch.amax(t["x"]),
    "a sort": lambda t: t["x"].sort(),
    "a stack": lambda t: torch.stack([t["x"], t["k"]]),
    "a layer": lambda t: torch.nn.functional.linear(t["x"], torch.ones(1, 2)),
    "a row": lambda t: t["x"][0],
    "an array": lambda t: np.asarray(t["x"]),
    "a list": lambda t: list(t["x"]),
    "in place": lambda t: torch.Tensor.add_(t.filled("k"), t["x"]),
    "a tensor of columns": lambda t: t.tensor("x", "k"),
    "a sum along rows of another shape": lambda t: torch.sum(torch.ones(2, 2) * t["x"]),
    "an option of isin": lambda t: torch.isin(t.filled("k"), t["x"]),
    "labels of an evaluation": lambda t: sectorch.evaluate(None, t.filled("k"), t["b"], ["auroc"]),
    "labels of a regression": lambda t: tables.BoostedTreesRegressor(1, edges={"x0": [0]}).fit(t.tensor("k"), t["x"]),
    "rows that count in a fit": lambda t: tables.BoostedTreesRegressor(1, edges={"x0": [0]}).fit(
        t.tensor("k"), t.filled("k"), present=t["b"]
    ),
    "a truth": lambda t: bool(t["b"]),
    "no method": lambda t: t["x"].median_of_all(),
    "a model": lambda t: sectorch.secure(torch.nn.Linear(2, 1).eval(), session=t.session)(t["x"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_count_missing_values_is_refused_before_anything_is_sent(case):
    table = open_table([4.0, np.nan])
    with sectorch.profile() as seen, pytest.raises((sectorch.errors.SectorchError, AttributeError)) as refused:
        REFUSED[case](table)
    assert not seen.ledger and str(refused.value)
    if case in ("a mean", "a stack", "a tensor of columns"):
        assert isinstance(refused.value, NonFiniteError)
    if case == "a truth":
        assert isinstance(refused.value, SecretAccessError)
    if case.startswith("a sum along"):
        assert isinstance(refused.value, ShapeError)


def test_every_named_function_is_elementwise():
    """Each has a row, and keeps the shape of one column: a reduction among them would count missing values."""
    assert set(TABLE) >= _ELEMENTWISE > _WITH_POLES
    table = open_table([1.0, np.nan, 2.0], sectorch.Session(reference=True, owners=("H1",)))
    one, flag = table["x"], table["x"] > 1
    for name in sorted(_ELEMENTWISE - {"to"}):
        func = next(key for key in TABLE[name].keys if getattr(torch, getattr(key, "__name__", ""), None) is key)
        column = flag if name.startswith("logical") else one
        for args in ((column,), (column, column), (column, 1.0, 2.0)):
            try:
                found = func(*args)
            except (sectorch.errors.SectorchError, TypeError):
                continue
            assert isinstance(found, NullableColumn) and found.shape == (3,), name
            assert found.reveal().isnan().tolist() == [False, True, False], name
            break
        else:
            raise AssertionError(name)
    assert one.to(torch.float32).reveal().isnan().tolist() == [False, True, False]
    assert not {key for key in HANDLER if ROW_OF[key].name in _ELEMENTWISE and ROW_OF[key].view}
