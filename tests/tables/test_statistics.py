"""Statistics of tables in shares against pandas, numpy and scipy, within the errors that their docstrings derive."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from cases import long, some
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

import sectorch
from sectorch import tables
from sectorch.errors import ArgumentError, DtypeError, FixedPointRangeError
from sectorch.tables import Column, LabelledResult, Statistic, Table
from sectorch.tables.statistics import exact_quotient, floor_shift, over_root
from sectorch.tensor.table import Context

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # pandas' and scipy's own, of too few rows

UNIT = 2.0**-20

GROUPS = ("a", "b", "c")
COLUMNS = {"x": Column("number", limit=512.0), "k": Column("integer", limit=50), "g": GROUPS, "b": None}


def frame_of(rows: list[tuple]) -> pandas.DataFrame:
    """x in units of 2^-20, so that pandas sees the numbers that are shared; NaN where it is missing."""
    frame = pandas.DataFrame(rows, columns=["x", "k", "g", "b", "present"])
    frame["x"] = frame["x"].astype(float) * UNIT
    return frame.astype({"k": "int64", "b": bool, "present": bool})


values = st.one_of(st.integers(-(2**28), 2**28), st.sampled_from([0, 1, -1, 2**20, 2**28]), st.none())
row = st.tuples(values, st.integers(-49, 49), st.sampled_from(GROUPS[:2]), st.booleans(), st.booleans())
frames = st.lists(row, min_size=0, max_size=12).map(frame_of)

TIES = frame_of([(2**20, 7, "a", True, True)] * 5 + [(None, 7, "b", False, True)] * 3)
ALL_MISSING = frame_of([(None, 1, "a", True, True), (None, 2, "b", False, True)])
ONE_ROW = frame_of([(123456789, 3, "b", True, True)])
NONE_PRESENT = frame_of([(2**20, 3, "b", True, False), (5, 3, "a", True, False)])


def shared(
    frame: pandas.DataFrame, session: sectorch.Session, filtered: bool = True, scheme: Any = None
) -> tuple[Table, pandas.DataFrame]:
    """The table in shares, its last rows of another owner, and the rows that count."""
    cut = len(frame) // 2
    parts = []
    for owner, part in (("H1", frame[:cut]), ("A", frame[cut:])):
        columns = {**COLUMNS, "present": None}
        own = sectorch.owned(part, owner=owner, session=session, columns=columns, missing=["x"], scheme=scheme)
        parts.append(own.share())
    table = Table.concat(parts)
    if not filtered:
        return table, frame
    return table.where(table["present"]), frame[frame["present"]]


def open_session(reference: bool = True) -> sectorch.Session:
    return sectorch.Session(reference=reference, owners=("H1",))


def close(found: Any, wanted: Any, error: float) -> None:
    found, wanted = np.asarray(found, dtype=float), np.asarray(wanted, dtype=float)
    assert found.shape == wanted.shape
    assert (np.isnan(found) == np.isnan(wanted)).all(), (found, wanted)
    assert np.nan_to_num(np.abs(found - wanted)).max(initial=0.0) <= error, (found, wanted)


def by_group(frame: pandas.DataFrame, how: str, names: list[str], **more: Any) -> np.ndarray:
    groups = frame.assign(g=pandas.Categorical(frame["g"], categories=GROUPS)).groupby("g", observed=False)
    return getattr(groups[names], how)(**more).to_numpy()


def variance_error(frame: pandas.DataFrame, limit_bits: int, ddof: int = 1) -> float:
    """As the docstring of `variance` has it, for the smallest group."""
    place = 2.0 ** max(-40, 2 * (limit_bits + 1) + len(frame).bit_length() + 2 - 60)
    return place + 2.0**-40 + UNIT


@settings(max_examples=15, deadline=None)
@given(frames, st.booleans())
@example(TIES, True)
@example(ALL_MISSING, False)
@example(ONE_ROW, False)
@example(NONE_PRESENT, True)
@example(frame_of([]), False)
def test_sums_and_moments(frame, filtered):
    table, kept = shared(frame, open_session(), filtered)
    names = ["x", "k"]
    close(tables.count(table, "x", "k", "g").reveal().to_numpy(), kept[["x", "k", "g"]].count(), 0)
    assert float(tables.count(table).reveal()) == len(kept)
    close(tables.sum(table, *names).reveal().to_numpy(), kept[names].sum(), 0)
    close(tables.mean(table, *names).reveal().to_numpy(), kept[names].mean(), UNIT / 2 * (1 + 2.0**-9))
    close(tables.minimum(table, *names).reveal().to_numpy(), kept[names].min(), 0)
    close(tables.maximum(table, *names).reveal().to_numpy(), kept[names].max(), 0)
    for ddof in (0, 1):
        wanted, error = kept[names].var(ddof=ddof), variance_error(frame, 9, ddof)
        close(tables.variance(table, *names, ddof=ddof).reveal().to_numpy(), wanted, error)
        deviation = np.sqrt(wanted)
        # |sqrt(v + e) - sqrt(v)| is at most e / sqrt(v), and sqrt(e).
        allowed = np.minimum(error / np.maximum(deviation, 1e-300), math.sqrt(error)) + UNIT + deviation * 2.0**-23
        found = tables.std(table, *names, ddof=ddof).reveal().to_numpy()
        close(found, deviation, np.nan_to_num(allowed).max(initial=0.0))


@settings(max_examples=15, deadline=None)
@given(frames, st.booleans())
@example(TIES, True)
@example(ALL_MISSING, False)
@example(ONE_ROW, True)
@example(NONE_PRESENT, True)
@example(frame_of([]), False)
def test_groups(frame, filtered):
    table, kept = shared(frame, open_session(), filtered)
    names = ["x", "k"]
    for how, function, error in (
        ("sum", tables.sum, 0), ("count", tables.count, 0), ("mean", tables.mean, UNIT / 2 * (1 + 2.0**-9)),
        ("min", tables.minimum, 0), ("max", tables.maximum, 0), ("var", tables.variance, variance_error(frame, 9)),
    ):  # fmt: skip
        found = function(table, *names, by="g")
        assert [axis.labels for axis in found.axes] == [GROUPS, ("x", "k")]
        close(found.reveal().to_numpy(), by_group(kept, how, names), error)
        counts = found.counts.expand(found.values.shape).reveal().numpy()
        close(counts, by_group(kept, "count", names), 0)
    both = tables.sum(table, "k", by=["g", "b"])
    wanted = [[kept["k"][(kept["g"] == g) & (kept["b"] == b)].sum() for b in (False, True)] for g in GROUPS]
    close(both.reveal().to_numpy(), wanted, 0)
    assert [axis.name for axis in both.axes] == ["g", "b"]
    crossed = [[((kept["g"] == g) & (kept["b"] == b)).sum() for b in (False, True)] for g in GROUPS]
    close(tables.cross_table(table, "g", "b").reveal().to_numpy(), crossed, 0)


@settings(max_examples=15, deadline=None)
@given(frames, st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=3))
@example(TIES, True, [0.0, 0.5, 1.0])
@example(ALL_MISSING, False, [0.5])
@example(ONE_ROW, True, [0.0, 0.3, 1.0])
@example(NONE_PRESENT, True, [0.5])
@example(frame_of([]), False, [0.5])
def test_order_statistics(frame, filtered, q):
    table, kept = shared(frame, open_session(), filtered)
    for name, limit in (("x", 512.0), ("k", 50.0)):
        error = UNIT + 2.0**-24 * 2 * limit
        close(tables.quantile(table, name, q).reveal().to_numpy(), kept[name].quantile(q), error)
        close(tables.median(table, name).reveal().to_numpy(), kept[name].median(), error)
    edges = [-256.0, -1.0, 0.0, 2.0**-20, 256.0]
    close(tables.histogram(table, "x", edges).reveal().to_numpy(), np.histogram(kept["x"].dropna(), edges)[0], 0)
    grouped = [np.histogram(kept["k"][kept["g"] == g], [-49, 0, 7, 49])[0] for g in GROUPS]
    close(tables.histogram(table, "k", [-49, 0, 7, 49], by="g").reveal().to_numpy(), grouped, 0)


@settings(max_examples=15, deadline=None)
@given(frames)
@example(TIES)
@example(ONE_ROW)
@example(frame_of([]))
def test_covariance_and_correlation(frame):
    table, kept = shared(frame, open_session())
    complete = kept[["x", "k", "b"]].dropna().astype(float)
    error = variance_error(frame, 9)
    close(tables.covariance(table, "x", "k", "b").reveal().to_numpy(), complete.cov(), error)
    found = tables.correlation(table, "x", "k", "b").reveal().to_numpy()
    # A column of tiny deviations has a coarse variance: compare where both have digits.
    fine = complete.var().to_numpy() > 2.0**-12 if len(complete) > 1 else np.zeros(3, bool)
    both = fine[:, None] & fine[None]
    close(found[both], complete.corr().to_numpy()[both], 2.0**-19 + 2.0**-24)
    constant = complete.nunique().to_numpy() <= 1
    assert np.isnan(found[constant]).all()


@settings(max_examples=15, deadline=None)
@given(frames, st.booleans())
@example(TIES, True)
@example(ONE_ROW, False)
@example(frame_of([]), False)
def test_tests(frame, filtered):
    table, kept = shared(frame, open_session(), filtered)
    first, second = (kept["k"][kept["b"] == b].to_numpy(dtype=float) for b in (False, True))
    found = tables.t_test(table, "k", by="b").reveal()
    if min(len(first), len(second)) >= 2 and first.var() + second.var() > 0:
        wanted: Any = stats.ttest_ind(first, second, equal_var=False)
        assert found.statistic == pytest.approx(wanted.statistic, rel=1e-4, abs=1e-4)
        assert found.p_value == pytest.approx(wanted.pvalue, rel=1e-3, abs=1e-4)
        assert found.degrees_of_freedom == pytest.approx(wanted.df, rel=1e-4)
    else:
        assert math.isnan(found.p_value)
    table_of = pandas.crosstab(kept["g"], kept["b"]).to_numpy()
    found = tables.chi_square(table, "g", "b").reveal()
    if table_of.size and min(table_of.shape) > 1:
        wanted = stats.chi2_contingency(table_of, correction=False)
        assert abs(found.statistic - wanted.statistic) <= len(frame) * 6 * 2.0**-30 + UNIT
        assert found.degrees_of_freedom == wanted.dof
        assert found.p_value == pytest.approx(wanted.pvalue, abs=1e-5)
    else:
        assert math.isnan(found.p_value)


FUNCTIONS = {
    "count": lambda t: tables.count(t, "x", by="g"),
    "sum": lambda t: tables.sum(t, "x", "k", by=["g", "b"]),
    "mean": lambda t: tables.mean(t, "x", "k", by="g"),
    "variance": lambda t: tables.variance(t, "x", "k", by="g"),
    "std": lambda t: tables.std(t, "x"),
    "minimum": lambda t: tables.minimum(t, "x", by="b"),
    "maximum": lambda t: tables.maximum(t, "k"),
    "quantile": lambda t: tables.quantile(t, "k", [0.1, 0.5]),
    "median": lambda t: tables.median(t, "x"),
    "histogram": lambda t: tables.histogram(t, "x", [-256, 0, 256]),
    "cross_table": lambda t: tables.cross_table(t, "g", "b"),
    "covariance": lambda t: tables.covariance(t, "x", "k"),
    "correlation": lambda t: tables.correlation(t, "x", "k"),
    "t_test": lambda t: tables.t_test(t, "x", by="b"),
    "chi_square": lambda t: tables.chi_square(t, "g", "b"),
    "kaplan_meier": lambda t: tables.kaplan_meier(t, "k", "b", times=[-10, 0, 5, 20], by="g"),
    "life_table": lambda t: tables.life_table(t, "k", "b", times=[0, 20]),
    "log_rank": lambda t: tables.log_rank(t, "k", "b", times=[0, 10, 30], by="half"),
}
"""One call of each statistic."""


def random_frame(n: int, seed: int) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    numbers = [
        None if v < 0.2 else int(w) for v, w in zip(rng.random(n), rng.integers(-(2**28), 2**28, n), strict=True)
    ]
    return frame_of(list(zip(numbers, rng.integers(-49, 49, n), rng.choice(GROUPS[:2], n), rng.random(n) < 0.4,
                             rng.random(n) < 0.8, strict=True)))  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", [0, *long(1, 2, 3, 4)])
def test_shares_give_the_reference_and_show_results_alone(name, seed):
    """Bit for bit, of the same tables; and no message shows anybody anything before `reveal`."""
    found = []
    for reference in (True, False):
        table, _ = shared(random_frame(15, seed), open_session(reference))
        table = table.with_columns(half=table["k"] > 0)
        with sectorch.profile() as seen:
            statistic = FUNCTIONS[name](table)
        assert isinstance(statistic, Statistic)
        assert {line.shows for line in seen.ledger if line.shows} <= {""}, "a statistic shows something by itself"
        found.append((statistic.reveal().to_numpy(), statistic.counts.reveal().numpy()))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other, equal_nan=True)


SCHEMES = ["wan", sectorch.Scheme(frac_bits=16), sectorch.Scheme(frac_bits=24), sectorch.Scheme(range_check=False)]


@pytest.mark.parametrize("name", some(FUNCTIONS, ["variance", "log_rank"]))
@pytest.mark.parametrize("scheme", ["wan", *long(*SCHEMES[1:])], ids=str)
def test_every_number_format_gives_the_reference(name, scheme):
    found = []
    for reference in (True, False):
        table, _ = shared(random_frame(15, 1), open_session(reference), scheme=scheme)
        found.append(FUNCTIONS[name](table.with_columns(half=table["k"] > 0)).reveal().to_numpy())
    assert np.array_equal(*found, equal_nan=True)


def test_who_learns_a_statistic():
    """Only the named party's process gets the values; the ledger has what is shown."""
    table, kept = shared(random_frame(15, 3), open_session(False))
    with sectorch.profile() as seen:
        found = tables.sum(table, "k").reveal(to=["H1", "S"])
    assert float(found) == kept["k"].sum()
    assert {line.protocol for line in seen.ledger if line.shows} >= {"reveal"}


@settings(max_examples=60, deadline=None)
@given(st.integers(-(2**61), 2**61), st.integers(1, 2**17), st.sampled_from([0, 7, 20, 35]), st.integers(8, 40))
@example(2**60 - 1, 2**17 - 1, 35, 39)
@example(-(2**60), 2**17, 35, 39)
@example(2**33 - 1, 1, 20, 20)
@example(3, 2, 0, 0 + 8)
@example(-3, 2 << 8, 0, 8)
@example(0, 1, 0, 8)
def test_quotients_are_exact(top, bottom, scale, bits):
    most = max(0, (abs(top) // (bottom << scale)).bit_length() + 1)
    bits = min(bits, 60 - most)
    assume(bits >= 0)
    session = sectorch.Session(reference=True)
    x = sectorch.share(torch.zeros(1), session=session)
    context = Context(session, x.party, x.scheme)
    with session.operation(x.party):
        found = exact_quotient(context, torch.tensor([top]), torch.tensor([bottom]), scale, most, 18, bits)
    # floor(top 2^bits / (bottom 2^scale) + 1/2)
    divisor = bottom << scale
    assert int(found) == (2 * (top << bits) + divisor) // (2 * divisor)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2**61), st.floats(-500, 500))
def test_quotients_by_roots(square, ratio):
    top = round(math.sqrt(square) * ratio)
    session = sectorch.Session(reference=True)
    x = sectorch.share(torch.zeros(1), session=session)
    context = Context(session, x.party, x.scheme)
    with session.operation(x.party):
        found = over_root(context, torch.tensor([top]), torch.tensor([square]), 9)
        assert int(floor_shift(context, torch.tensor([top]), 37)) == top >> 37
    exact = top / math.sqrt(square)
    assert abs(int(found) * UNIT - exact) <= abs(exact) * 2.0**-23 + 2.0**-19


def test_large_limits_and_many_rows():
    """At the ends of the ring: numbers to 2^22, and 100,000 rows of the largest value."""
    session = open_session()
    limit = 2.0**22
    own = np.array([limit - 1, -limit + 1, 3.5, 0.0])
    table = sectorch.owned({"x": own}, owner="A", session=session, columns={"x": Column("number", limit=limit)}).share()
    assert float(tables.sum(table, "x").reveal()) == own.sum()
    assert float(tables.mean(table, "x").reveal()) == own.mean()
    wanted = own.var(ddof=1)
    assert abs(float(tables.variance(table, "x").reveal()) - wanted) <= 2.0 ** (2 * 23 - 57)
    assert abs(float(tables.std(table, "x").reveal()) - math.sqrt(wanted)) <= UNIT + math.sqrt(wanted) * 2.0**-22
    spread = np.round(np.random.default_rng(0).normal(3000, 900, 100_000).clip(0, 4095) * 2**20) / 2**20
    many = sectorch.owned({"x": spread}, owner="A", session=session).share()
    wanted = spread.var(ddof=1)
    assert abs(float(tables.variance(many, "x").reveal()) - wanted) <= UNIT + 2.0**-37
    assert abs(float(tables.std(many, "x").reveal()) - math.sqrt(wanted)) <= UNIT + math.sqrt(wanted) * 2.0**-23
    many = sectorch.owned({"x": np.full(100_000, 4095.75)}, owner="A", session=session).share()
    assert float(tables.sum(many, "x").reveal()) == 409_575_000
    assert float(tables.mean(many, "x").reveal()) == 4095.75
    assert float(tables.variance(many, "x").reveal()) == 0
    assert float(tables.median(many, "x").reveal()) == 4095.75


def test_what_is_refused_before_anything_is_sent():
    session = open_session(False)
    table, _ = shared(random_frame(8, 0), session)
    wide = sectorch.owned({"x": [1.0]}, owner="A", session=session).share()
    refused: list[tuple[Any, type[Exception]]] = [
        (lambda: tables.mean(table, "q"), ArgumentError),
        (lambda: tables.mean(table), ArgumentError),
        (lambda: tables.mean(table, "x", "x"), ArgumentError),
        (lambda: tables.mean(table, "g"), DtypeError),
        (lambda: tables.mean(table, "x", by="k"), DtypeError),
        (lambda: tables.mean(table, "x", by="q"), ArgumentError),
        (lambda: tables.mean(table, "x", by=3), ArgumentError),
        (lambda: tables.mean(table, "x", by=["g", "g"]), ArgumentError),
        (lambda: tables.variance(table, "x", ddof=2), ArgumentError),
        (lambda: tables.covariance(table, "x"), ArgumentError),
        (lambda: tables.correlation(table, "x"), ArgumentError),
        (lambda: tables.quantile(table, "x", 1.5), ArgumentError),
        (lambda: tables.quantile(table, "x", []), ArgumentError),
        (lambda: tables.quantile(table, "x", float("nan")), ArgumentError),
        (lambda: tables.histogram(table, "x", [1]), ArgumentError),
        (lambda: tables.histogram(table, "x", [1, 1]), ArgumentError),
        (lambda: tables.histogram(table, "x", [1, math.inf]), ArgumentError),
        (lambda: tables.t_test(table, "x", by="g"), ArgumentError),
        (lambda: tables.chi_square(table, "x", "g"), DtypeError),
        (lambda: tables.kaplan_meier(table, "k", "k", times=[1]), DtypeError),
        (lambda: tables.kaplan_meier(table, "k", "b", times=[]), ArgumentError),
        (lambda: tables.kaplan_meier(table, "k", "b", times=[2, 1]), ArgumentError),
        (lambda: tables.log_rank(table, "k", "b", times=[1], by="g"), ArgumentError),
        (lambda: tables.mean(random_frame(2, 0), "x"), ArgumentError),
        (lambda: tables.mean(sectorch.owned({"x": [1]}, owner="A", session=session), "x"), ArgumentError),
    ]
    assert wide.columns == ("x",)
    for call, error in refused:
        with sectorch.profile() as seen, pytest.raises(error):
            call()
        assert not seen.ledger
    most = {"x": Column("number", limit=2.0**22)}
    many = sectorch.owned({"x": torch.zeros(1 << 18)}, owner="A", session=open_session(), columns=most).share()
    with pytest.raises(FixedPointRangeError, match="narrower limit"):
        tables.mean(many, "x")


def test_results_have_labels(tmp_path):
    table, kept = shared(random_frame(15, 1), open_session())
    found = tables.mean(table, "x", "k", by=["g", "b"]).reveal()
    assert isinstance(found, LabelledResult)
    frame = found.to_pandas()
    assert frame.loc[("a", False), "k"] == found["a", False, "k"] and math.isnan(found["c", True, "x"])
    assert list(frame.index.names) == ["g", "b"] and frame.columns.name == "column"
    read = json.loads(found.to_json())
    assert read["kind"] == "mean" and read["axes"][0] == ["g", ["a", "b", "c"]] and None in read["values"]
    for wrong in ("a", ("a", False, "q"), ("z", False, "k")):
        with pytest.raises(ArgumentError):
            found[wrong]
    with pytest.raises(ArgumentError):
        float(found)
    assert "column x" in repr(found) and "c" in found._repr_html_()
    assert found.plot_data().draw(tmp_path).is_file()
    single = tables.median(table, "k").reveal()
    assert single.to_pandas().tolist() == [float(single)] and "median" in repr(single)
    line = tables.quantile(table, "k", [0.0, 1.0]).reveal()
    assert line.to_pandas()[1.0] == line[1.0] == kept["k"].max()
    away = LabelledResult(torch.empty(3, device="meta"), line.axes, "quantile")
    assert "at another party" in repr(away)
    with pytest.raises(ArgumentError, match="another party"):
        away.to_numpy()
