"""A governed release, attacked by whoever learns its results: differencing, repeats, restarts, bad policies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sectorch
from sectorch.choreography.ledger import Transcript
from sectorch.dp import BudgetExhaustedError, BudgetFile, BudgetFileError, epsilon_of
from sectorch.errors import ArgumentError, RangeExceededError
from sectorch.tables import Axis, PolicyError, Statistic
from sectorch.tables.release import PolicyLedger, _division, _granted, policy_of_message

NOISY = {"epsilon": 1.0, "delta": 1e-5, "budget": 1.3}


def shared(session, x, **options):
    return sectorch.share(torch.as_tensor(x), session=session, **options)


def released(counts, policy, session=None, values=None, **options):
    session = session or REFERENCE
    counts = shared(session, torch.as_tensor(counts))
    values = counts if values is None else shared(session, values, limit=4096.0)
    return sectorch.release(values, policy, counts=counts, **options)


# What a policy withholds.


def allowed(counts: np.ndarray, minimum: int) -> np.ndarray:
    """The cells that are released, computed in the clear: an independent statement of the rule."""
    bits = np.asarray(counts >= minimum)
    for dim in range(counts.ndim):
        if counts.shape[dim] == 1:
            continue
        lines = np.moveaxis(bits, dim, -1), np.moveaxis(counts, dim, -1)
        for at in np.ndindex(lines[0].shape[:-1]):
            line, sizes = lines[0][at], lines[1][at]
            hidden = sizes[~line].sum()
            if not line.all() and hidden < minimum and line.any():
                line[np.flatnonzero(line)[np.argmin(sizes[line])]] = False
    return bits


REFERENCE = sectorch.Session(reference=True)


def people(n: int = 60) -> sectorch.Table:
    """Ages, times and deaths of n people, in shares of the reference."""
    random = np.random.default_rng(0)
    frame = {"age": random.integers(20, 90, n).astype(float), "time": random.integers(1, 24, n)}
    columns = {"age": None, "time": sectorch.tables.Column("integer", limit=24), "died": None}
    owned = sectorch.owned(frame | {"died": random.random(n) < 0.5}, owner="Q", session=REFERENCE, columns=columns)
    return owned.share()


UNPROTECTED = {
    "life table": (lambda t: sectorch.tables.life_table(t, "time", "died", times=[6, 12, 18]), "part of another's"),
    "Kaplan-Meier": (lambda t: sectorch.tables.kaplan_meier(t, "time", "died", times=[6, 12, 18]), "part of another's"),
    "minimum": (lambda t: sectorch.tables.minimum(t, "age"), "one row's own value, whatever"),
    "maximum": (lambda t: sectorch.tables.maximum(t, "age"), "one row's own value, whatever"),
    "median": (lambda t: sectorch.tables.median(t, "age"), "name a step"),
    "quantile": (lambda t: sectorch.tables.quantile(t, "age", [0.0, 1.0]), "name a step"),
}


@pytest.mark.parametrize("kind", UNPROTECTED)
def test_what_a_minimum_does_not_protect_is_refused_without_noise(kind, monkeypatch):
    """Counts of which one is part of another differ by one person; a smallest value is one person's."""
    made, why = UNPROTECTED[kind]
    statistic = made(people())
    monkeypatch.setattr(sectorch.SharedTensor, "reveal", lambda *_: pytest.fail("something was revealed"))
    with pytest.raises(PolicyError, match=why):
        sectorch.release(statistic, sectorch.Policy(minimum=10, releases=0))
    if statistic.cells == "nested":
        with pytest.raises(PolicyError, match="leave cells_per_row out"):
            sectorch.release(statistic, sectorch.Policy(**NOISY, releases=0), cells_per_row=1)


def test_a_median_is_released_in_steps():
    table = people()
    found = sectorch.release(sectorch.tables.median(table, "age"), sectorch.Policy(minimum=10, step=5.0, releases=0))
    exact = float(sectorch.tables.median(table, "age").reveal().values)
    assert abs(float(found.values) - exact) <= 2.5 + 5 / 8 and float(found.values) % 5 == 0


def test_the_number_of_all_rows_is_of_one_dimension():
    with pytest.raises(PolicyError, match="one dimension"):
        released([[40, 30], [30, 20]], sectorch.Policy(minimum=10, releases=0), rows=120)


def wards(session=REFERENCE, few: int = 3, **more) -> sectorch.Table:
    """100 people: 50 of each sex, `few` of them ill (all f), one much older, one without an income."""
    sex, income = np.array(["f"] * 50 + ["m"] * 50), np.arange(100.0)
    income[4] = math.nan
    frame = {"sex": sex, "ill": np.arange(100) < few, "age": np.where(np.arange(100) == 5, 97.0, 40.0)}
    columns = {"sex": sectorch.tables.Column("category", categories=("f", "m")), "ill": None, "age": None}
    frame, columns = frame | {"income": income} | more, columns | dict.fromkeys(["income", *more])
    return sectorch.owned(frame, owner="Q", session=session, columns=columns, missing=["income"]).share()


EXACTLY = sectorch.Policy(minimum=10, releases=0)


def governed(policy, folder):
    from sectorch.tables.release import ReleaseGovernor, govern

    session = sectorch.Session(reference=True)
    govern(session, ReleaseGovernor(policy, folder))
    return session


def test_a_governed_party_releases_no_counts_of_the_programs_own(tmp_path, monkeypatch):
    policy = sectorch.Policy(minimum=10, releases=0)
    session = governed(policy, tmp_path / "ledger")
    table = wards(session)
    made = lambda number: shared(session, torch.full((2,), number))
    tables, mean = sectorch.tables, sectorch.tables.mean(table, "age", by="sex")
    maximum = tables.maximum(table, "age")
    moved = tables.mean(table, "age", by="sex")
    moved.counts.shares = made(1000).shares
    wanted = {
        "tensor": lambda: sectorch.release(made(3), policy, counts=made(1000), name="a"),
        "its own counts": lambda: sectorch.release(made(30), policy, counts=made(30), name="a"),
        "values": lambda: sectorch.release(maximum.values, policy, counts=maximum.counts, name="a"),
        "hand-made": lambda: sectorch.release(Statistic(made(3), made(1000), mean.axes), policy, name="a"),
        "replaced": lambda: sectorch.release(dataclasses.replace(maximum, cells="partition"), policy, name="a"),
        "moved": lambda: sectorch.release(moved, policy, name="a"),
        "rows": lambda: sectorch.release(tables.count(table), policy, rows=10**6, name="a"),
    }
    with monkeypatch.context() as context:
        context.setattr(sectorch.SharedTensor, "reveal", lambda *_: pytest.fail("something was revealed"))
        for what, ask in wanted.items():
            with pytest.raises(PolicyError, match="program's word"):
                ask()
                pytest.fail(what)
    assert not (tmp_path / "ledger").exists()
    assert not sectorch.release(mean, policy, name="a").withheld.any()
    spoken = sectorch.Policy(minimum=10, releases=0, plain=True)
    session = governed(spoken, tmp_path / "other")
    assert sectorch.release(made(3), spoken, counts=made(1000), name="a").values.tolist() == [3, 3]


def test_a_governed_party_believes_no_object_of_the_programs(tmp_path):
    """Subclasses, lists that compute, attributes of the session: each once let rows of one person out."""
    policy = sectorch.Policy(minimum=10, releases=0)

    class Loose(sectorch.Policy, frozen=True, kw_only=True):
        @property
        def digest(self):
            return policy.digest

    class Forged(Statistic):
        pass

    class Texts(str):
        pass

    class Later(list):
        """Names whose second reading would be within the release."""

        readings = 0

        def __iter__(self):
            self.readings += 1
            assert self.readings == 1, "read in the release"
            return super().__iter__()

    session = governed(policy, tmp_path / "ledger")
    table, tables = wards(session), sectorch.tables
    ages = table["age"]
    counts = (ages * 0 + 1000).to(torch.int64)
    for ask in (
        lambda: sectorch.release(tables.count(table), Loose(minimum=2, releases=0, plain=True), name="a"),
        lambda: sectorch.release(Forged(ages, counts, (Axis("row", range(100)),)), policy, name="a"),
        lambda: sectorch.release(tables.count(table), policy, name=Texts("a")),
    ):
        with pytest.raises(PolicyError):
            ask()
    made = Statistic(ages, counts, (Axis("row", range(100)),))
    with pytest.raises(ArgumentError, match="only sectorch's own functions"):
        tables.statistics.with_origin(made, ("age",), [])
    mean = tables.mean(table, "age", by="sex")
    object.__setattr__(mean, "cells", "ranked")
    mean.values.scale_bits, mean.counts.flags = 0, (ages.shares,)
    session.governor = None
    assert not sectorch.release(mean, policy, name="a", to=Later(["Q"])).withheld.any()
    with pytest.raises(PolicyError, match="under its own policy"):
        sectorch.release(tables.count(table), sectorch.Policy(minimum=3, releases=0), name="b")
    from sectorch.tables.release import ReleaseGovernor, govern

    with pytest.raises(PolicyError, match="held to a policy already"):
        govern(session, ReleaseGovernor(policy, tmp_path / "other"))
    with pytest.raises(ArgumentError, match="only sectorch's own code broadcasts"):
        session.agreement.broadcast(table.session.answering_party(), "announce", session.Q, torch.ones(3))


def test_a_column_of_any_name_is_a_group():
    """A label decides nothing: 12, 41, 3 and 30 of 86 people, grouped by a column that has the name "column"."""
    ward = np.repeat(["a", "b", "c", "d"], [12, 41, 3, 30])
    for name in ("ward", "column", "with"):
        frame = {name: ward, "age": np.full(86, 40.0)}
        columns = {name: ("a", "b", "c", "d"), "age": None}
        table = sectorch.owned(frame, owner="Q", session=REFERENCE, columns=columns).share()
        result = sectorch.release(sectorch.tables.mean(table, "age", by=name), EXACTLY)
        assert result.withheld.tolist() == [True, False, True, False], name


def test_columns_side_by_side_are_not_subtracted():
    """Columns that lack other rows, of which one lacks one row more; flags of which one is a part of another's."""
    table, tables = wards(), sectorch.tables
    for made in (tables.count, tables.mean, tables.sum, tables.variance):
        with pytest.raises(PolicyError, match="values of other rows"):
            sectorch.release(made(table, "age", "income", by="sex"), EXACTLY)
    again = table.with_columns(i=table["income"], a=table["age"])  # another name takes no flag away
    with pytest.raises(PolicyError, match="values of other rows"):
        sectorch.release(tables.sum(again, "a", "i"), EXACTLY)
    computed = table.with_columns(i=table["income"] + 0, w=table["age"].clamp(0.0, 90.0))
    for columns in (("age", "i"), ("age", "w")):
        with pytest.raises(PolicyError, match="computed of each other"):
            sectorch.release(tables.sum(computed, *columns), EXACTLY)
    assert not sectorch.release(tables.sum(computed, "w"), EXACTLY).withheld
    for made in (tables.covariance, tables.correlation):  # the variance of what was cut off, less that of the rest
        with pytest.raises(PolicyError, match="computed of each other"):
            sectorch.release(made(computed, "age", "w"), EXACTLY)
        assert not sectorch.release(made(wards(bmi=np.arange(100.0)), "age", "bmi"), EXACTLY).withheld.any()
    part = table.with_columns(old=table["age"] > 90)
    for made in (tables.sum, tables.mean):
        with pytest.raises(PolicyError, match="several flags"):
            sectorch.release(made(part, "ill", "old"), EXACTLY)
        assert sectorch.release(made(part, "ill", "age"), EXACTLY).withheld.tolist() == [True, False]


def test_metrics_and_tests_leave_no_rest_of_a_few():
    """Three of 100 public rows are filtered out, or survive: accuracy, calibration and log-rank show neither."""
    table = wards(few=50)
    rows = table.where(table["age"] < 90).where(table["income"] < 98)
    scores = shared(REFERENCE, torch.linspace(-1, 1, 100), limit=4.0)
    metrics = ["accuracy", "ece", "calibration", "brier", "auroc", "auprc"]
    for of, withheld in ((rows, True), (table, False)):
        found = sectorch.evaluate(None, scores, of[["ill"]], metrics, bins=2)
        for name, made in found.items():
            hidden = sectorch.release(made, EXACTLY).withheld  # of the bins one goes, and the few with it
            assert (hidden.any() if name == "calibration" else hidden.all()) == withheld, name
    labels = shared(REFERENCE, torch.arange(100) % 3)
    three = sectorch.evaluate(
        None, scores.unsqueeze(1) * torch.ones(3), labels, ["calibration", "ece"], classes=[0, 1, 2]
    )
    assert not sectorch.release(three["ece"], EXACTLY).withheld.any()
    with pytest.raises(PolicyError, match="part of another"):
        sectorch.release(three["calibration"], EXACTLY)
    sex = np.repeat(["f", "m"], 50)
    frame = {"sex": sex, "months": np.full(100, 5.0), "died": np.r_[np.arange(50) < 47, np.arange(50) < 40]}
    columns = {"sex": ("f", "m"), "months": None, "died": None}
    made = sectorch.owned(frame, owner="Q", session=REFERENCE, columns=columns).share()
    test = sectorch.tables.log_rank(made, "months", "died", times=[5.0], by="sex")
    assert sectorch.release(test, EXACTLY).withheld.all()


def test_k_looks_at_every_number_of_rows():
    """Eight are ill, and eight are filtered out: fewer than k = 20, though not than the minimum."""
    table, policy = wards(few=8), sectorch.Policy(minimum=5, k=20, releases=0)
    assert sectorch.release(sectorch.tables.sum(table, "ill"), policy).withheld
    well = table.where(table["ill"] < 1)
    assert sectorch.release(sectorch.tables.count(well), policy).withheld
    assert sectorch.release(sectorch.tables.mean(well, "age"), policy).withheld
    few = wards(few=8, bmi=np.arange(100.0))
    few = few.where(few["ill"] < 1)
    for made in (sectorch.tables.mean, sectorch.tables.covariance):
        assert sectorch.release(made(few, "age", "bmi"), policy).withheld.all()
    assert not sectorch.release(sectorch.tables.count(table), policy).withheld


def test_a_flag_of_fractions_is_a_flag():
    table = wards()
    for bits in (table["ill"].to(torch.int64), table["ill"].to(torch.float32)):
        made = table.with_columns(x=bits)
        assert sectorch.release(sectorch.tables.sum(made, "x"), EXACTLY).withheld
        with pytest.raises(PolicyError, match="of a flag"):
            sectorch.release(sectorch.tables.variance(made, "x"), EXACTLY)


@pytest.mark.parametrize("step", [0.001, 0.1, 1 / 3, 0.5, 7.0])
def test_steps_are_multiplied_out_as_they_were_divided(step):
    values = torch.tensor([54.885, -1000.0, 4000.7, 0.0])
    policy = sectorch.Policy(minimum=10, releases=0, step=step)
    found = released([40, 40, 40, 40], policy, values=values).values
    assert (found - values.double()).abs().max() <= step * 1.01
    assert torch.allclose(found / step, torch.round(found / step), atol=1e-6, rtol=0)


def test_a_person_of_many_rows_counts_once():
    """12 visits of one patient are no 10 patients; 40 visits of at most 20 a patient are at least two."""
    wards_of = np.repeat(["w1", "w2", "w3"], [12, 30, 30])
    visits = {"id": np.r_[np.zeros(12), np.arange(1, 61)].astype(int), "ward": wards_of}
    patients = {"id": np.arange(61), "age": np.full(61, 50.0), "died": np.arange(61) % 2 > 0}
    columns = {"ward": ("w1", "w2", "w3")}
    left = sectorch.owned(visits, owner="Q", session=REFERENCE, columns=columns)
    right = sectorch.owned(patients, owner="A", session=REFERENCE, columns=["age", "died"])
    table = sectorch.join(left, right, on="id", many=12)
    assert table.many == 12 and table.where(table["age"] > 0).many == 12
    assert sectorch.Table.concat([table, table]).many == 24  # two years of visits
    # Columns that are taken out of the table, for a table of their own or an evaluation, are of the same rows.
    alone = sectorch.Table({"ward": table["ward"]}, {"ward": table.schema["ward"]})
    assert alone.many == alone.where(table["age"] > 0).many == 12
    scores = shared(REFERENCE, torch.linspace(-1, 1, 72), limit=4.0)
    measured = sectorch.evaluate(None, scores, table["died"], ["accuracy"])
    assert sectorch.release(measured["accuracy"], EXACTLY).withheld
    made = sectorch.tables.count(table, by="ward")
    assert sectorch.release(made, EXACTLY).withheld.all()
    found = sectorch.release(made, sectorch.Policy(minimum=2, releases=0))  # w1's 12 rows are below 2 x 12
    assert found.withheld[0] and found.withheld.sum() == 2
    noisy = sectorch.Policy(epsilon=1.0, delta=1e-5, budget=10.0)
    once = sectorch.owned(visits, owner="Q", session=REFERENCE, columns=columns).share()
    own, other = (_sigma(x, noisy) for x in (made, sectorch.tables.count(once, by="ward")))
    assert own == pytest.approx(12 * other)


def _sigma(statistic, policy):
    return sys.modules["sectorch.tables.release"]._Asked.of(statistic, None, None, None, policy).sigma


def test_metrics_of_a_constant_model_do_not_count_rare_labels():
    """3 of 100 are ill: by the Brier score of one score for all a reader would count them in each group."""
    table, scores = wards(), shared(REFERENCE, torch.zeros(100), limit=4.0)
    found = sectorch.evaluate(
        None, scores, table[["ill"]], ["accuracy", "log_loss", "brier", "ece", "gaps", "auroc", "calibration"],
        groups=table[["sex"]],
    )  # fmt: skip
    for name, made in found.items():
        assert sectorch.release(made, EXACTLY).withheld.all(), name
    table = wards(few=60)
    found = sectorch.evaluate(None, scores, table[["ill"]], ["brier", "gaps"], groups=table[["sex"]])
    assert not sectorch.release(found["brier"], EXACTLY).withheld.any()
    assert sectorch.release(found["brier by sex"], EXACTLY).withheld.tolist() == [True, True]


@pytest.mark.parametrize("policy", [EXACTLY, sectorch.Policy(minimum=2, epsilon=8.0, delta=1e-3, budget=100.0)])
def test_a_statistic_without_a_dimension_is_released(policy, tmp_path):
    found = sectorch.release(sectorch.tables.count(wards()), policy, name="all", ledger=tmp_path)
    assert found.values.shape == () and abs(float(found.values) - 100) < (1 if policy is EXACTLY else 60)


def test_a_quantile_near_an_end_is_some_rows_own():
    table = wards()
    policy = sectorch.Policy(minimum=10, releases=0, step=1.0)
    result = sectorch.release(sectorch.tables.quantile(table, "age", [0.0, 0.05, 0.1, 0.5, 0.9, 1.0]), policy)
    assert result.withheld.tolist() == [True, True, False, False, False, True]
    few = table.where(table["sex"] < 1)
    assert not sectorch.release(sectorch.tables.median(few, "age"), policy).withheld
    assert sectorch.release(sectorch.tables.quantile(few, "age", 0.1), policy).withheld


@given(st.data())
def test_quantiles_that_are_shown_count_no_small_group(data):
    """By quantiles of all ranks a reader has the number of rows in each bin of a step, be it one row."""
    n, minimum = data.draw(st.integers(20, 90)), data.draw(st.integers(2, 12))
    ranks = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).map(lambda v: [k / 40 for k in v]))
    table = sectorch.owned({"x": np.arange(n) * 1.0}, owner="Q", session=REFERENCE).share()
    policy = sectorch.Policy(minimum=minimum, releases=0, step=1.0)
    shown = ~sectorch.release(sectorch.tables.quantile(table, "x", ranks), policy).withheld
    inner = [q for q in ranks if 0 < q < 1 and min(q, 1 - q) * (n - 1) >= minimum - 1]
    near = lambda q: any(p != q and abs(p - q) * (n - 1) < minimum - 1e-9 for p in inner)
    assert shown.tolist() == [q in inner and not near(q) for q in ranks]


def test_what_a_program_says_of_a_column_is_checked(tmp_path):
    """A limit that does not hold would hide too little; codes of 12 would count one row as twelve."""
    table, tables = wards(), sectorch.tables
    false = table.with_columns(age=(table["age"], tables.Column("number", limit=2.0**-10)))
    noisy = sectorch.Policy(epsilon=1.0, delta=1e-5, budget=10.0)
    with pytest.raises(PolicyError, match="whose range is checked"):
        sectorch.release(tables.sum(false, "age"), noisy, name="a", ledger=tmp_path)
    with pytest.raises(RangeExceededError):
        tables.sum(false, "age").reveal()
    true = table.with_columns(age=table["age"].clamp(0.0, 64.0))
    assert math.isfinite(sectorch.release(tables.sum(true, "age"), noisy, name="b", ledger=tmp_path).values)
    codes = (table["age"] * 0 + 12).to(torch.int64)
    for facts in (tables.Column("category", categories=("a", "b")), tables.Column("flag")):
        for made in (table.with_columns(g=(codes, facts)), sectorch.Table({"g": codes}, {"g": facts})):
            with pytest.raises(RangeExceededError):
                tables.count(made, by="g").reveal()
    bits = table.with_columns(x=(table["ill"].to(torch.int64), tables.Column("integer", limit=3.0)))
    assert sectorch.release(tables.sum(bits, "x"), EXACTLY).withheld  # three are ill, whatever the column is called


def test_a_charge_that_another_party_cannot_make_is_taken_back(tmp_path, monkeypatch):
    release = sys.modules["sectorch.tables.release"]
    noisy = sectorch.Policy(minimum=2, epsilon=1.0, delta=1e-5, budget=1.2)
    table = wards()
    monkeypatch.setattr(release, "_least", lambda *_: torch.tensor([0]))
    with pytest.raises(PolicyError, match="another party's ledger"):
        sectorch.release(sectorch.tables.count(table), noisy, name="a", ledger=tmp_path)
    monkeypatch.undo()
    for party in ("Q", "A", "S"):
        assert json.loads((tmp_path / party / "releases.json").read_text())["releases"] == {}
        assert json.loads((tmp_path / party / "budget.json").read_text())["charges"] == {}
    sectorch.release(sectorch.tables.count(table), noisy, name="b", ledger=tmp_path)
    with pytest.raises(BudgetExhaustedError):
        sectorch.release(sectorch.tables.count(table), noisy, name="a", ledger=tmp_path)
    sectorch.release(sectorch.tables.count(table), noisy, name="b", ledger=tmp_path)


def test_ledgers_of_one_process_are_charged_together(tmp_path, monkeypatch):
    """The second cannot be written: the first is as before."""
    release = sys.modules["sectorch.tables.release"]
    charge = release.PolicyLedger.charge

    def full(self, policy, request):
        if self.folder.name == "S":
            raise PolicyError("no space left")
        charge(self, policy, request)

    with monkeypatch.context() as patch:
        patch.setattr(release.PolicyLedger, "charge", full)
        with pytest.raises(PolicyError, match="no space"):
            sectorch.release(sectorch.tables.count(wards()), sectorch.Policy(minimum=10), name="a", ledger=tmp_path)
    found = sectorch.release(sectorch.tables.count(wards()), sectorch.Policy(minimum=10), name="b", ledger=tmp_path)
    assert found.values == 100


def test_a_key_that_several_create_is_one(tmp_path):
    from sectorch.sealed import key_of

    found: list[bytes] = []
    for turn in range(5):
        start = threading.Barrier(4)
        run = lambda path=tmp_path / f"key{turn}", start=start: (start.wait(), found.append(key_of(path)))
        threads = [threading.Thread(target=run) for _ in range(4)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert len(found) == 4 * (turn + 1) and len(set(found[4 * turn :])) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"key{turn}" for turn in range(5)]


def test_a_ledger_that_another_process_holds_is_not_waited_for_without_end(tmp_path, monkeypatch):
    release = sys.modules["sectorch.tables.release"]
    monkeypatch.setattr(release, "_WAIT", 0.05)
    held = release.PolicyLedger(tmp_path / "Q", "Q")
    with held.locked(), pytest.raises(PolicyError, match="holds its lock"):
        sectorch.release(sectorch.tables.count(wards()), sectorch.Policy(minimum=10), name="a", ledger=tmp_path)


def test_what_is_plain_is_revealed_under_no_policy_unless_that_says_so(monkeypatch):
    """A dry run has no governor: a reveal that is under no policy is one that `accept` refuses."""
    seen, reveal = [], sectorch.SharedTensor.reveal
    record = lambda self, to=None: (
        seen.append(sys.modules["sectorch.tables.release"]._grants.current.policy),
        reveal(self, to),
    )[1]
    monkeypatch.setattr(sectorch.SharedTensor, "reveal", record)
    spoken = sectorch.Policy(minimum=10, releases=0, plain=True)
    released([30, 40], EXACTLY)
    released([30, 40], spoken)
    sectorch.release(sectorch.tables.count(wards(), by="sex"), EXACTLY)
    assert list(dict.fromkeys(seen)) == ["", spoken.digest, EXACTLY.digest] and spoken.digest != EXACTLY.digest
    assert "plain True" in spoken.text and "plain" not in EXACTLY.text


def test_a_table_whose_rows_are_public_has_their_complements_withheld():
    """One outlier, one missing value, three ill: each is the rest of the public number of rows."""
    table, t = wards(), sectorch.tables
    assert sectorch.release(t.histogram(table, "age", [0, 41, 90]), EXACTLY).withheld.all()
    assert not sectorch.release(t.count(table, "age"), EXACTLY).withheld
    assert sectorch.release(t.count(table, "income"), EXACTLY).withheld
    young = table.where(table["age"] < 90)
    for view in (young, young[["age", "sex"]], young.with_columns(one=young["age"] > 0), young.where(young["age"] > 0)):
        assert view.public_rows == 100
        assert sectorch.release(t.count(view), EXACTLY).withheld.all()
        assert sectorch.release(t.mean(view, "age"), EXACTLY).withheld.all()
    assert sectorch.Table.concat([table, young]).public_rows == 200
    assert not sectorch.release(t.count(table, by="sex"), EXACTLY).withheld.any()
    # Three of the f are in no cell: the smaller group goes as well, or the larger one tells them.
    grouped = sectorch.release(t.mean(table.where(~table["ill"]), "age", by="sex"), EXACTLY)
    assert grouped.withheld.tolist() == [True, False]
    table = wards(few=40, late=np.arange(100) % 2 > 0)
    assert not sectorch.release(t.count(table, by=["sex", "late"]), EXACTLY).withheld.any()
    part = table.where(table["age"] < 90)  # 24, 25, 25 and 25 rows of 99; the outlier is in no cell
    found = sectorch.release(t.count(part, by=["sex", "late"]), EXACTLY)
    assert int(found.withheld.sum()) == 1 and np.nansum(found.counts) <= 90
    padded = sectorch.Table({"age": table["age"]}, present=table["age"] < 90)
    assert padded.public_rows is None and not sectorch.release(t.count(padded), EXACTLY).withheld.any()


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize(("few", "shown"), [(0, False), (3, False), (10, True), (40, True), (41, False), (50, False)])
def test_a_sum_or_mean_of_flags_needs_enough_rows_of_each_kind(kind, few, shown):
    table = wards(few=few)
    made = getattr(sectorch.tables, kind)
    found = sectorch.release(made(table, "ill", by="sex"), EXACTLY)
    assert found.withheld.tolist() == [not shown, True]  # nobody of the m is ill
    assert not shown or abs(float(found["f"]) - (few if kind == "sum" else few / 50)) < 2**-20
    both = sectorch.release(made(table, "age", "ill", by="sex"), EXACTLY)
    assert both.withheld.tolist() == [[False, not shown], [False, True]]
    session = sectorch.Session()
    assert torch.equal(
        sectorch.release(made(wards(session, few), "age", "ill", by="sex"), EXACTLY).values.nan_to_num(-1),
        both.values.nan_to_num(-1),
    )


def test_other_statistics_of_flags_are_refused():
    table, t = wards(), sectorch.tables
    one = sectorch.tables.Column("integer", limit=1)
    whole = table.with_columns(whole=(table["ill"].long(), one))
    for made in (
        t.variance(table, "ill"), t.std(table, "ill", by="sex"), t.covariance(table, "age", "ill"),
        t.correlation(table, "age", "ill"), t.t_test(table, "ill", by="sex"), t.variance(whole, "whole"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="how many rows have it"):
            sectorch.release(made, EXACTLY)
    assert sectorch.release(t.sum(whole, "whole"), EXACTLY).withheld.all()
    with pytest.raises(PolicyError, match="how many rows have it"):
        sectorch.release(t.median(table, "ill"), sectorch.Policy(minimum=10, step=0.5, releases=0))


def test_a_test_of_small_cells_is_withheld():
    t = sectorch.tables
    assert sectorch.release(t.chi_square(wards(), "sex", "ill"), EXACTLY).withheld.all()
    halves = {"late": np.arange(100) % 2 > 0}
    assert not sectorch.release(t.chi_square(wards(**halves), "sex", "late"), EXACTLY).withheld.any()
    # Nobody of the m is ill: then all of them are well. A category that nobody has is none of the test.
    assert sectorch.release(t.chi_square(wards(few=25), "sex", "ill"), EXACTLY).withheld.all()
    frame = {"ward": np.repeat(["a", "b"], 50), "late": np.arange(100) % 2 > 0}
    columns = {"ward": ("a", "b", "c"), "late": None}
    table = sectorch.owned(frame, owner="Q", session=REFERENCE, columns=columns).share()
    assert not sectorch.release(t.chi_square(table, "ward", "late"), EXACTLY).withheld.any()
    # 15, 15, 10 and 10 of either half leave until 9 and after, dead or not; a month has 3 or 2 of them.
    time = {"time": np.arange(100) % 20, "dead": np.arange(100) % 2 > 0}
    for few, times, rest in ((3, [9, 20], True), (50, [9, 20], False), (50, [20], False), (50, range(1, 21), True)):
        table = wards(few=few, **time)
        table = table.with_columns(time=(table["time"], t.Column("integer", limit=24)))
        test = t.log_rank(table, "time", "dead", times=times, by="ill")
        assert bool(sectorch.release(test, EXACTLY).withheld) is rest
    bits = np.arange(100) % 2 > 0
    for dead, part, rest in ((bits, None, False), (bits, "age", True), (bits & (np.arange(100) < 50), None, True)):
        # One row is filtered out; nobody of the second half dies.
        table = wards(few=50, time=np.full(100, 5.0), dead=dead)
        table = table if part is None else table.where(table["age"] < 90)
        test = t.log_rank(table, "time", "dead", times=[5.0], by="ill")
        assert bool(sectorch.release(test, EXACTLY).withheld) is rest


def test_a_t_test_is_not_released_where_counts_are_kept_or_rounded():
    test = sectorch.tables.t_test(wards(), "age", by="sex")
    for more in ({"rounding": 5, "step": 0.5}, {"counts": False}):
        with pytest.raises(PolicyError, match="exact numbers of rows"):
            sectorch.release(test, sectorch.Policy(minimum=10, releases=0, **more))
    assert not sectorch.release(test, EXACTLY).withheld.any()


def test_a_name_is_of_its_columns(tmp_path):
    table, t = wards(), sectorch.tables
    policy = sectorch.Policy(minimum=10, releases=5)
    ask = lambda made, name: sectorch.release(made, policy, name=name, ledger=tmp_path)
    ask(t.mean(table, "age", by="sex"), "a")
    for other in (t.mean(table, "income", by="sex"), t.sum(table, "age", by="sex")):
        with pytest.raises(PolicyError, match="another name"):
            ask(other, "a")
    ask(t.variance(table, "age"), "b")
    with pytest.raises(PolicyError, match="another name"):
        ask(t.variance(table, "age", ddof=0), "b")
    assert ask(t.mean(table, "age", by="sex"), "a")["m"] == 40.0


def test_noise_is_of_all_columns_of_a_row_and_of_nothing_beside_it():
    module = sys.modules["sectorch.tables.release"]
    table = wards(**{name: np.ones(100) for name in "bcdefghi"})
    policy = sectorch.Policy(epsilon=1.0, delta=1e-5, budget=1.0)
    noise = lambda *names: module._Asked.of(sectorch.tables.sum(table, *names, by="sex"), None, None, 1, policy).spread
    assert math.isclose(noise(*"bcdefghi", "age") / noise("age"), 3.0)
    session = REFERENCE
    flags = shared(session, torch.tensor([1, 0]))
    made = Statistic(shared(session, [1.0, 2.0]), flags, (Axis("g", ("a", "b")),), "sum", flags, 1.0)
    with pytest.raises(PolicyError, match="without noise"):
        sectorch.release(made, policy, name="a", ledger="nowhere", cells_per_row=1)


@given(st.data())
def test_the_released_cells_are_those_of_the_rule(data):
    shape = data.draw(st.sampled_from([(), (1,), (2,), (5,), (2, 3), (3, 1), (2, 2, 2)]))
    size = math.prod(shape)
    counts = np.array(data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))).reshape(shape)
    values = np.round(np.random.default_rng(size).normal(size=shape), 3)
    minimum = data.draw(st.integers(2, 12))
    policy = sectorch.Policy(minimum=minimum, releases=0)
    found = released(counts, policy, values=torch.tensor(values, dtype=torch.float32))
    keeps = np.asarray(allowed(counts.copy(), minimum))
    assert np.array_equal(~found.withheld.numpy(), keeps)
    assert np.array_equal(found.counts.numpy()[keeps], counts[keeps]) and np.isnan(found.counts.numpy()[~keeps]).all()
    assert (
        np.allclose(found.values.numpy()[keeps], values[keeps], atol=2e-6)
        and np.isnan(found.values.numpy()[~keeps]).all()
    )


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(2, 15))
def test_no_group_below_the_minimum_can_be_subtracted_from_the_number_of_rows(counts, minimum):
    """The withheld cells together are a group that a reader can compute, whose number of rows is known."""
    found = released(counts, sectorch.Policy(minimum=minimum, releases=0))
    hidden = sum(counts) - int(np.nansum(found.counts))
    assert (found.withheld.any() or not hidden) and (
        not found.withheld.any() or hidden >= minimum or found.withheld.all()
    )
    assert all(c >= minimum for c in found.counts[~found.withheld].tolist())


@pytest.mark.parametrize(
    ("count", "rows", "comes"), [(97, 100, False), (100, 100, True), (60, 100, True), (3, 100, False)]
)
def test_a_filtered_group_is_not_released_where_its_complement_is_too_small(count, rows, comes):
    assert bool(released(count, sectorch.Policy(minimum=10, releases=0), rows=rows).withheld) is not comes


def test_rows_in_no_cell_count_as_a_withheld_cell():
    policy = sectorch.Policy(minimum=10, releases=0)
    assert released([40, 30, 27], policy, rows=100).withheld.tolist() == [False, False, True]
    assert released([40, 30, 30], policy, rows=100).withheld.tolist() == [False] * 3
    assert released([40, 30, 4], policy, rows=100).withheld.tolist() == [False, False, True]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(2, 6))
def test_k_withholds_a_table_with_any_small_group(counts, k):
    found = released([c * 3 for c in counts], sectorch.Policy(minimum=2, k=k, releases=0))
    assert found.withheld.all() or not any(0 < c * 3 < k for c in counts)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(2, 1000))
def test_rounded_counts_are_the_nearest_multiples(counts, rounding):
    found = released(counts, sectorch.Policy(minimum=1000, rounding=rounding, releases=0))
    for wanted, count in zip(counts, found.counts.tolist(), strict=True):
        assert math.isnan(count) or count == (wanted + rounding // 2) // rounding * rounding


@given(st.lists(st.floats(-3000, 3000, width=32), min_size=1, max_size=6), st.floats(0.01, 50))
def test_values_are_rounded_to_steps(values, step):
    policy = sectorch.Policy(minimum=2, step=step, releases=0)
    found = released([5] * len(values), policy, values=torch.tensor(values))
    for wanted, value in zip(values, found.values.tolist(), strict=True):
        exact = round(value / step)
        assert abs(value - exact * step) < 1e-9 * max(1, abs(value))
        assert abs(value - wanted) <= step * (0.5 + 1 / 8) + 2**-19 * (1 + abs(wanted) / step)


@given(st.integers(10, 44), st.integers(1, 1 << 26), st.data())
def test_the_division_by_a_public_step_is_within_its_error(bits, r, data):
    try:
        drop, scale = _division(bits, r)
    except PolicyError:
        return
    factor = -(-(1 << (scale + drop)) // r)
    y = data.draw(st.integers(0, (1 << bits) - 1))
    found = ((y >> drop) * factor) >> scale
    assert (y >> drop) * factor < 1 << 62
    assert abs(found - y // r) <= 1
    if not drop:
        assert found == y // r
    elif found != y // r:
        edge = min(y % r, r - y % r)
        assert edge / r <= 1 / 8


def test_shares_release_what_the_reference_does_and_open_nothing_else():
    counts, values = [3, 15, 40, 22], torch.tensor([1.5, 2.25, 3.125, -4.0])
    policy = sectorch.Policy(minimum=10, rounding=5, step=0.25, releases=0)
    plain = released(counts, policy, values=values)
    with sectorch.profile() as seen:
        found = released(counts, policy, sectorch.Session(), values=values)
    assert torch.equal(found.values.nan_to_num(-1), plain.values.nan_to_num(-1))
    opened = [(line.protocol, line.shape.numel()) for line in seen.ledger if line.shows and line.protocol == "reveal"]
    assert sum(size for _, size in opened) == 4 + 4 + 4  # bits, counts and values, of which four entries are zero


# A withheld cell carries no information.


@pytest.mark.parametrize("policy", [{"minimum": 10}, {"minimum": 10, "rounding": 5, "step": 0.5}])
def test_whatis_opened_is_the_same_for_all_contents_of_withheld_cells(policy, monkeypatch):
    opened = []
    reveal = sectorch.SharedTensor.reveal

    def record(self, to=None):
        opened.append(reveal(self, to))
        return opened[-1]

    monkeypatch.setattr(sectorch.SharedTensor, "reveal", record)
    for small, value in itertools.product((0, 4, 9), (-7.5, 0.0, 900.0)):
        opened.append(None)
        released([small, 12, 30], sectorch.Policy(**policy, releases=0), values=torch.tensor([value, 3.25, 2.0]))
    runs = [[] for _ in opened if _ is None]
    at = -1
    for entry in opened:
        if entry is None:
            at += 1
        else:
            runs[at].append(entry)
    assert len(runs) == 9 and all(all(map(torch.equal, run, runs[0])) for run in runs)


@pytest.mark.parametrize("noisy", [True, False])
def test_messages_to_the_server_are_uniform_whatever_the_cells_hold(tmp_path, noisy):
    """S's view of a release: every message of ring elements has bits that are set in half of its words."""
    policy = sectorch.Policy(minimum=10, epsilon=1.0, delta=1e-5, budget=1.0) if noisy else sectorch.Policy(minimum=10)
    for number, counts in enumerate(([0] * 2000, [9] * 2000, list(range(2000)))):
        with Transcript() as transcript:
            released(counts, policy, sectorch.Session(), name="a", ledger=tmp_path / str(number), cells_per_row=1)
        large = [
            v for line, v in transcript.received("S") if v.dtype == torch.int64 and v.numel() >= 1000 and not line.shows
        ]
        assert len(large) > 1
        for value in large:
            ones = torch.stack([(value >> bit & 1).double().mean() for bit in range(64)])
            assert float((ones - 0.5).abs().max()) < 6 * 0.5 / math.sqrt(value.numel())


# Noise.


def test_noise_has_the_deviation_that_epsilon_needs_and_a_ledger_of_its_cost(tmp_path):
    policy = sectorch.Policy(**NOISY)
    found = released([1000] * 4000, policy, name="a", ledger=tmp_path, cells_per_row=1)
    with BudgetFile(tmp_path / "A" / "budget.json") as budget:
        assert 0.98 < budget.budget.spent <= 1.0
    sigma = math.sqrt(2) / math.sqrt(2) * _unit(policy)  # of one party's noise, for a change of sqrt(2)
    assert abs(float((found.counts - 1000).std()) / (math.sqrt(2) * sigma) - 1) < 0.05


def _unit(policy):
    from sectorch.dp import scale_for

    return scale_for("gaussian", policy.epsilon, policy.delta, 1)


def test_a_small_cell_is_released_with_a_probability_of_delta_at_most(tmp_path):
    policy = sectorch.Policy(minimum=10, epsilon=1.0, delta=1e-4, budget=1.0)
    found = released([9] * 3000 + [500], policy, name="a", ledger=tmp_path, cells_per_row=1)
    assert found.withheld[:-1].all() and not found.withheld[-1]


def test_noise_of_values_needs_to_know_how_far_a_row_moves_them(tmp_path):
    options = {"values": torch.tensor([1.0, 2.0]), "name": "a", "ledger": tmp_path, "cells_per_row": 1}
    with pytest.raises(PolicyError, match="how far one row can move"):
        released([50, 60], sectorch.Policy(**NOISY), **options)
    assert not (tmp_path / "A").exists()
    found = released([50, 60], sectorch.Policy(**NOISY), row_bound=1.0, **options)
    assert not torch.equal(found.values, torch.tensor([1.0, 2.0]).double())


# Repeats, restarts, several ledgers.


@pytest.mark.parametrize("reference", [True, False])
def test_a_repeat_is_bit_equal_is_not_charged_and_averages_nothing_out(tmp_path, reference):
    policy = sectorch.Policy(**NOISY)
    ask = lambda counts: released(
        counts, policy, sectorch.Session(reference=reference), name="a", ledger=tmp_path, cells_per_row=1
    )
    first = ask([100, 200, 300])
    again = [ask([100, 200, 300]) for _ in range(3)]
    assert all(torch.equal(x.counts, first.counts) for x in again)
    # Other rows under the same name: the difference of two releases under one noise would be exact.
    assert torch.equal(ask([101, 200, 300]).counts, first.counts)
    assert _spent(tmp_path) <= 1.0
    with pytest.raises(BudgetExhaustedError):
        released([100, 200, 300], policy, name="b", ledger=tmp_path, cells_per_row=1)
    assert _spent(tmp_path) <= 1.0


def _spent(folder, party="A"):
    with BudgetFile(folder / party / "budget.json") as budget:
        return epsilon_of(budget.budget.curve, budget.budget.delta)


def test_a_name_stands_for_one_release(tmp_path):
    policy = sectorch.Policy(minimum=10, releases=2)
    released([20, 30], policy, name="a", ledger=tmp_path)
    for changed in ([20, 30, 40], [[20, 30]]):
        with pytest.raises(PolicyError, match="another name"):
            released(changed, policy, name="a", ledger=tmp_path)
    with pytest.raises(PolicyError, match="another name"):
        released([20, 30], policy, name="a", ledger=tmp_path, to="S")


def test_differencing_by_another_release_is_what_the_limit_of_releases_stops(tmp_path):
    """49 patients and one more: the second release would be that patient's."""
    policy = sectorch.Policy(minimum=10)
    ages = torch.arange(50.0)
    session = sectorch.Session(reference=True)

    def total(rows, name):
        sums, counts = shared(session, ages[rows].sum().reshape(1)), shared(session, torch.tensor([len(ages[rows])]))
        return sectorch.release(sums, policy, counts=counts, name=name, ledger=tmp_path)

    assert total(slice(0, 50), "all").values.tolist() == [1225.0]
    with pytest.raises(PolicyError, match="as many as its policy allows"):
        total(slice(0, 49), "all but one")
    assert total(slice(0, 50), "all").values.tolist() == [1225.0]  # what is released stays available


def test_all_owners_are_charged_or_none(tmp_path):
    session = sectorch.Session(owners=("H1", "H2"), reference=True)
    policy = sectorch.Policy(**NOISY)
    with BudgetFile(tmp_path / "H2" / "budget.json", (1.3, 1e-5)) as other:
        other.charge(_curve_of(1.2), "elsewhere", "x", 1)
    with pytest.raises(BudgetExhaustedError):
        released([100, 200], policy, session, name="a", ledger=tmp_path, cells_per_row=1)
    assert not (tmp_path / "H1" / "releases.json").exists() and not (tmp_path / "A" / "releases.json").exists()


def _curve_of(epsilon):
    from sectorch.dp import GNMax, scale_for

    return GNMax(scale_for("gaussian", epsilon, 1e-5, 1)).curve


class Killed(BaseException):
    """Stands for kill -9 in the middle of a release: nothing after it runs."""


PLACES = ["charge before the entry", "before the halves", "between the halves", "after the halves"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("noisy", [True, False])
def test_a_crash_anywhere_is_charged_once_and_the_release_comes_later(tmp_path, monkeypatch, place, noisy):

    module = sys.modules["sectorch.tables.release"]
    policy = sectorch.Policy(**NOISY) if noisy else sectorch.Policy(minimum=10)
    ask = lambda: released([100, 200, 300], policy, sectorch.Session(), name="a", ledger=tmp_path, cells_per_row=1)
    store, write, number = module.PolicyLedger.store, module.files.write, itertools.count()

    def dies(*_):
        raise Killed

    def store_and_die(self, *arguments):
        if next(number) == {"between the halves": 1}.get(place, 0):
            dies()
        store(self, *arguments)

    def write_and_die(path, *arguments):
        if path.name == "releases.json":
            dies()
        write(path, *arguments)

    def reveal_and_die(self, *_):
        dies()

    with monkeypatch.context() as context:
        if place == "charge before the entry":
            context.setattr(module.files, "write", write_and_die)
        elif place == "after the halves":
            context.setattr(sectorch.SharedTensor, "reveal", reveal_and_die)
        else:
            context.setattr(module.PolicyLedger, "store", store_and_die)
        with pytest.raises(Killed):
            ask()
    halves = {p.parent.name: p.read_bytes() for p in tmp_path.glob("*/*.release")}
    first = ask()
    assert torch.equal(ask().counts, first.counts)
    if place == "after the halves":  # somebody may have learned the result: it is that one again
        assert halves == {p.parent.name: p.read_bytes() for p in tmp_path.glob("*/*.release")}
    entries = json.loads((tmp_path / "A" / "releases.json").read_text())["releases"]
    assert list(entries) == ["a"]
    if noisy:
        assert _spent(tmp_path) <= 1.0 < 1.0 + _spent(tmp_path)


# What is refused, before anything is shared, drawn or charged.


BAD = [
    ({}, "names neither"),
    ({"minimum": 1}, "whole number from 2"),
    ({"minimum": True}, "whole number from 2"),
    ({"minimum": 10.5}, "whole number from 2"),
    ({"minimum": "10"}, "whole number from 2"),
    ({"minimum": 10, "rounding": 20}, "at most the minimum"),
    ({"minimum": 10, "epsilon": 1.0}, "no delta and no budget"),
    ({"minimum": 10, "delta": 1e-5}, "no epsilon and no budget"),
    ({"epsilon": 1.0, "delta": 1e-5}, "no budget"),
    ({"epsilon": 1.0, "delta": 1e-5, "budget": 0.5}, "does not afford one"),
    ({"epsilon": -1.0, "delta": 1e-5, "budget": 1.0}, "a number above 0"),
    ({"epsilon": math.nan, "delta": 1e-5, "budget": 1.0}, "a number above 0"),
    ({"epsilon": math.inf, "delta": 1e-5, "budget": math.inf}, "a number above 0"),
    ({"epsilon": 1.0, "delta": 1.0, "budget": 1.0}, "between 0 and 1"),
    ({"epsilon": 1.0, "delta": 1e-5, "budget": 1.0, "k": 5}, "exact counts"),
    ({"minimum": 10, "releases": -1}, "0 for no limit"),
    ({"minimum": 10, "step": 0}, "a number above 0"),
    ({"minimum": 10, "counts": "yes"}, "true or false"),
    ({"minimum": 10, "plain": 1}, "true or false"),
]


@pytest.mark.parametrize(("entries", "text"), BAD, ids=lambda v: str(v)[:30])
def test_a_policy_that_contradicts_itself_is_refused_also_from_a_file(tmp_path, entries, text):
    with pytest.raises(PolicyError, match=text):
        sectorch.Policy(**entries)
    written = lambda v: str(v).lower() if isinstance(v, (bool, float)) else repr(v)
    path = tmp_path / "policy.toml"
    path.write_text("\n".join(f"{k} = {written(v)}" for k, v in entries.items()))
    with pytest.raises(PolicyError, match=text) as caught:
        sectorch.Policy.read(path)
    assert str(path) in str(caught.value)


def test_a_policy_is_read_from_toml(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("minimum = 10\nepsilon = 1\ndelta = 1e-5\nbudget = 3.0\n")
    assert sectorch.Policy.read(path) == sectorch.Policy(minimum=10, epsilon=1, delta=1e-5, budget=3.0)
    assert sectorch.Policy.read(path).digest == sectorch.Policy(minimum=10, epsilon=1.0, delta=1e-5, budget=3.0).digest
    for text in ("minimun = 10", "minimum = ", "minimum = 10\nminimum = 11", "[policy]\nminimum = 10"):
        path.write_text(text)
        with pytest.raises(PolicyError, match=r"policy\.toml"):
            sectorch.Policy.read(path)
    with pytest.raises(PolicyError, match="cannot read"):
        sectorch.Policy.read(tmp_path / "none.toml")


def test_a_release_that_cannot_be_evaluated_releases_nothing(tmp_path, monkeypatch):
    session = sectorch.Session(reference=True)
    policy = sectorch.Policy(minimum=10, releases=0)
    x, n = shared(session, [1.0, 2.0]), shared(session, torch.tensor([20, 30]))
    other = shared(sectorch.Session(reference=True), torch.tensor([20, 30]))
    monkeypatch.setattr(sectorch.SharedTensor, "reveal", lambda *_, **__: pytest.fail("something was revealed"))
    for statistic, options, text in [
        (x, {}, "number of rows behind each value"),
        (torch.ones(2), {"counts": n}, "a Statistic or a shared tensor"),
        (x, {"counts": torch.tensor([20, 30])}, "number of rows behind each value"),
        (x, {"counts": shared(session, [20.0, 30.0])}, "whole numbers"),
        (x, {"counts": other}, "one session"),
        (x, {"counts": shared(session, torch.tensor([20, 30, 40]))}, "do not belong"),
        (x[:0], {"counts": n[:0]}, "do not belong"),
        (x, {"counts": n, "rows": 0}, "public number of all rows"),
        (x, {"counts": n, "cells_per_row": 0}, "cells_per_row"),
    ]:
        with pytest.raises(PolicyError, match=text):
            sectorch.release(statistic, policy, **options)
    for wrong, text in [
        ("minimum 10", "a release is under a Policy"),
        (sectorch.Policy(minimum=10), "no ledger to count it"),
        (sectorch.Policy(minimum=10, rounding=5, releases=0), "name a step"),
    ]:
        with pytest.raises(PolicyError, match=text):
            sectorch.release(x, wrong, counts=n)
    for name in (None, "", "a\nb", "x" * 201, 3):
        with pytest.raises(PolicyError, match="has a name"):
            sectorch.release(x, sectorch.Policy(minimum=10), counts=n, ledger=tmp_path / "l", name=name)
    assert not (tmp_path / "l").exists()


def test_a_ledger_is_of_one_policy_and_is_not_started_again(tmp_path, monkeypatch):
    policy = sectorch.Policy(**NOISY)
    options = {"name": "a", "ledger": tmp_path, "cells_per_row": 1}
    released([100, 200], policy, **options)
    monkeypatch.setattr(sectorch.SharedTensor, "reveal", lambda *_, **__: pytest.fail("something was revealed"))
    for other in (sectorch.Policy(minimum=10), sectorch.Policy(**{**NOISY, "budget": 30.0})):
        with pytest.raises(PolicyError, match="of the policy"):
            released([100, 200], other, **options)
    ledger, budget = tmp_path / "A" / "releases.json", tmp_path / "A" / "budget.json"
    before = ledger.read_text()
    for text in ("", "{}", before.replace('"a"', '"b"'), before[:-10]):
        ledger.write_text(text)
        with pytest.raises(PolicyError, match="cannot be read"):
            released([100, 200], policy, **options)
    ledger.write_text(before)
    kept = budget.read_bytes()
    budget.unlink()
    with pytest.raises(BudgetFileError, match="put it back"):
        released([100, 200], policy, **{**options, "name": "b"})
    budget.write_bytes(kept)
    half = next((tmp_path / "S").glob("*.release"), None) or next((tmp_path / "A").glob("*.release"))
    half.write_bytes(half.read_bytes()[:-1] + b"x")
    with pytest.raises(PolicyError, match="cannot be drawn twice"):
        released([100, 200], policy, **options)


def test_a_statistic_keeps_its_labels_and_what_has_no_value():
    session = sectorch.Session(reference=True)
    statistic = Statistic(
        shared(session, [1.5, 2.5, 3.5]), shared(session, torch.tensor([12, 40, 20])),
        (Axis("sex", ("f", "m", "x")),), "mean", shared(session, torch.tensor([1, 1, 0])),
    )  # fmt: skip
    found = sectorch.release(statistic, sectorch.Policy(minimum=10, releases=0))
    assert found["m"] == 2.5 and math.isnan(found["x"]) and not found.withheld.any() and "mean" in repr(found)
    found = sectorch.release(statistic, sectorch.Policy(minimum=15, releases=0))
    assert found.withheld.tolist() == [True, False, True] and found.as_dict()["withheld"] == [True, False, True]
    with pytest.raises(PolicyError, match="a Statistic has its own"):
        sectorch.release(statistic, sectorch.Policy(minimum=10, releases=0), counts=statistic.counts)


def test_folders_of_a_ledger_are_for_their_owner_alone(tmp_path):
    released([20, 30], sectorch.Policy(minimum=10), name="a", ledger=tmp_path)
    for path in [*Path(tmp_path).glob("*/*")]:
        assert not path.stat().st_mode & 0o077, path


def test_a_holder_that_lost_its_half_of_a_complete_release_gets_no_new_draw(tmp_path):
    policy = sectorch.Policy(minimum=10)
    released([20, 30], policy, name="a", ledger=tmp_path)
    next((tmp_path / "A").glob("*.release")).unlink()
    with pytest.raises(PolicyError, match="not drawn twice"):
        released([21, 30], policy, name="a", ledger=tmp_path)


def test_what_public_facts_refuse_is_refused_before_the_charge(tmp_path):
    with pytest.raises(PolicyError, match="below 2"):
        released([20, 30], sectorch.Policy(minimum=10), name="a", ledger=tmp_path, rows=10**30)
    with pytest.raises(PolicyError, match="below the last place"):
        released(
            [20, 30], sectorch.Policy(minimum=10, step=1e-9), values=torch.tensor([1.5, 2.5]), name="a", ledger=tmp_path
        )
    assert not list(tmp_path.glob("*/releases.json"))


def test_a_ledger_that_cannot_be_locked_or_is_another_partys_is_refused(tmp_path):
    (tmp_path / "one" / "S").mkdir(parents=True)
    (tmp_path / "one" / "A").symlink_to("S")
    with pytest.raises(PolicyError, match="two parties have one ledger"):
        released([20, 30], sectorch.Policy(minimum=10), name="a", ledger=tmp_path / "one")
    (tmp_path / "two" / "A").mkdir(parents=True)
    (tmp_path / "two" / "A" / "lock").symlink_to("x")
    with pytest.raises(PolicyError, match="cannot lock"):
        released([20, 30], sectorch.Policy(minimum=10), name="a", ledger=tmp_path / "two")
    for wrong in ({"ledger": 3}, {"name": object()}):
        with pytest.raises(PolicyError):
            released([20, 30], sectorch.Policy(minimum=10, releases=0), **wrong)


@pytest.mark.parametrize("kind", ["t_test", "variance", "std", "mean", "sum"])
def test_what_a_withheld_group_holds_decides_nothing(kind):
    """Neither whether there is a result, nor what it shows: a number out of the range of products is not told."""
    found = []
    for one in (51.0, 199_000.0):
        x = np.array([50.0, 50.0, 50.0, 50.0, one, *np.arange(50) + 20.0])
        columns = {
            "sex": sectorch.tables.Column("category", categories=("f", "m")),
            "x": sectorch.tables.Column("number", limit=200_000.0),
        }
        frame = {"sex": np.array(["f"] * 5 + ["m"] * 50), "x": x}
        table = sectorch.owned(frame, owner="Q", session=REFERENCE, columns=columns).share()
        statistic = getattr(sectorch.tables, kind)(table, "x", by="sex")
        found.append(sectorch.release(statistic, sectorch.Policy(minimum=10, releases=0), rows=10_000))
    assert np.array_equal(found[0].withheld, found[1].withheld) and found[0].withheld.any()
    assert np.array_equal(found[0].values, found[1].values, equal_nan=True)


def test_a_grant_is_of_one_thread_one_session_and_so_many_elements(monkeypatch):
    """A program's own reveal, beside a release or after it, is not under the policy; nor is one that nothing opens."""
    session, other, elsewhere = sectorch.Session(), sectorch.Session(), []
    assert policy_of_message(session, "way", 1, None) == ""
    with _granted(session, "digest", [], 3, None):
        assert policy_of_message(session, "way", 1, None) == ""
        monkeypatch.setattr(sys.modules["sectorch.tables.release"]._Grant, "is_opened", lambda self: True)
        thread = threading.Thread(target=lambda: elsewhere.append(policy_of_message(session, "way", 1, None)))
        thread.start(), thread.join()
        assert elsewhere == [""] and policy_of_message(other, "way", 1, None) == ""
        assert (
            policy_of_message(session, "way", 3, None) == "digest" and policy_of_message(session, "way", 1, None) == ""
        )
    assert policy_of_message(session, "another way", 1, None) == ""


def test_a_release_that_is_complete_is_not_drawn_again_whatever_a_session_says(tmp_path):
    """A program in whose session all parties agree that nobody has a half: its noise would be averaged out."""
    policy, session = sectorch.Policy(**NOISY), sectorch.Session(reference=True)
    ask = lambda: sectorch.release(
        sectorch.tables.count(wards(session), by="sex"), policy, name="a", ledger=tmp_path, cells_per_row=1
    )
    first = ask().values
    assert torch.equal(ask().values, first)
    said = {"charged": [1], "release": [0, 7, 0], "stored": [1]}
    session.agreement.choose_and_broadcast = lambda party, name, *_: torch.tensor(said[name])
    with pytest.raises(PolicyError, match="not drawn twice"):
        ask()


@pytest.mark.parametrize("noise", [{}, NOISY])
def test_two_runs_of_one_name_at_once_show_one_result(noise, tmp_path, monkeypatch):
    """Of two data sets that differ in one person, under a ledger of one release. Where both could come to the place at
    which halves are stored, they wait for each other there, so that each would store its own."""
    policy = sectorch.Policy(releases=1, **(noise or {"minimum": 10}))
    gate, met, found = threading.Barrier(2), set(), {}
    bound = {"row_bound": 100.0} if noise else {}
    store, turn = PolicyLedger.store, threading.Lock()
    for party in "QAS":
        PolicyLedger(tmp_path / party, party)  # with its key

    def store_together(self: PolicyLedger, *given: Any) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            with suppress(threading.BrokenBarrierError):
                gate.wait(1)
        with turn:
            store(self, *given)

    monkeypatch.setattr(PolicyLedger, "store", store_together)

    def ask(n: int) -> None:
        try:
            values = released(
                [n], policy, sectorch.Session(), [2000.0 + n], name="all", ledger=tmp_path, **bound
            ).values
            found[n] = float(values)
        except (PolicyError, BudgetExhaustedError) as error:
            found[n] = error

    threads = [threading.Thread(target=ask, args=(n,)) for n in (50, 49)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = {value for value in found.values() if isinstance(value, float)}
    assert len(found) == 2 and len(shown) == 1, found
    assert list(json.loads((tmp_path / "A" / "releases.json").read_text())["releases"]) == ["all"]
