"""Survival in shares against lifelines' figures of a published trial, and against fractions on random tables."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pandas
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_statistics import UNIT, close, open_session

import sectorch
from sectorch import tables
from sectorch.tables import Column, Table

MONTHS = [
    35, 34, 32, 32, 25, 23, 22, 20, 19, 17, 16, 13, 11, 10, 10, 9, 7, 6, 6, 6, 6,
    23, 22, 17, 15, 12, 12, 11, 11, 8, 8, 8, 8, 5, 5, 4, 4, 3, 2, 2, 1, 1,
]  # fmt: skip
RELAPSED = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1] + [1] * 21
"""Remission of leukaemia under 6-mercaptopurine (the first 21) and placebo: Freireich et al., Blood 21, 1963."""

CURVES = {
    "drug": {1: 1.0, 6: 0.857142857142857, 7: 0.8067226890756299, 10: 0.7529411764705878, 13: 0.6901960784313722,
             16: 0.6274509803921566, 22: 0.5378151260504199, 23: 0.44817927170868327, 35: 0.44817927170868327},
    "placebo": {1: 0.9047619047619045, 2: 0.8095238095238095, 3: 0.7619047619047619, 4: 0.6666666666666665,
                5: 0.5714285714285714, 8: 0.3809523809523809, 11: 0.2857142857142857, 12: 0.19047619047619047,
                15: 0.14285714285714288, 17: 0.09523809523809525, 22: 0.047619047619047616, 23: 0.0},
}  # fmt: skip
LOG_RANK = 16.792940989216547, 4.168809109334511e-05
"""Of lifelines 0.30.3: KaplanMeierFitter().fit(...).survival_function_ and logrank_test(...) of load_leukemia()."""

ARMS = ("drug", "placebo")
COLUMNS = {"months": Column("integer", limit=64), "event": None, "arm": ARMS, "kept": None}


def shared(frame: pandas.DataFrame, session: sectorch.Session) -> Table:
    cut = len(frame) // 3
    parts = (("H1", frame[:cut]), ("S", frame[cut:]))
    return Table.concat(
        [sectorch.owned(part, owner=owner, session=session, columns=COLUMNS).share() for owner, part in parts]
    )


def trial() -> pandas.DataFrame:
    return pandas.DataFrame(
        {"months": MONTHS, "event": np.array(RELAPSED, bool), "arm": ["drug"] * 21 + ["placebo"] * 21, "kept": True}
    )


@pytest.mark.parametrize("reference", [True, False])
def test_a_published_trial(reference):
    table, times = shared(trial(), open_session(reference)), range(1, 36)
    curve = tables.kaplan_meier(table, "months", "event", times=times, by="arm").reveal()
    for arm, wanted in CURVES.items():
        for time, value in wanted.items():
            assert abs(curve[arm, time] - value) <= UNIT + 35 * 2.0**-30
    found = tables.log_rank(table, "months", "event", times=times, by="arm").reveal()
    assert found.statistic == pytest.approx(LOG_RANK[0], rel=2.0**-16)
    assert found.p_value == pytest.approx(LOG_RANK[1], rel=2.0**-12) and found.degrees_of_freedom == 1
    counts = tables.life_table(table, "months", "event", times=times, by="arm").reveal().to_numpy()
    assert counts[:, [5, 7, 21]].tolist() == [[[21, 3], [16, 0], [7, 1]], [[12, 0], [12, 4], [2, 1]]]


def counts_of(frame: pandas.DataFrame, time: float) -> tuple[int, int]:
    """Who is at risk at a time, and who has the event then."""
    return int((frame["months"] >= time).sum()), int(((frame["months"] == time) & frame["event"]).sum())


def curve_of(frame: pandas.DataFrame, times: list[int]) -> list[float]:
    value, found = Fraction(1), []
    for time in times:
        n, d = counts_of(frame, time)
        value *= Fraction(n - d, n) if n else 1
        found.append(float(value) if len(frame) else math.nan)
    return found


def z_of(frame: pandas.DataFrame, times: list[int]) -> tuple[float, float]:
    """Observed less expected events of the first arm over their deviation, and their variance."""
    excess, variance = Fraction(0), Fraction(0)
    for time in times:
        n, d = counts_of(frame, time)
        first, own = counts_of(frame[frame["arm"] == ARMS[0]], time)
        if n:
            excess += own - Fraction(first * d, n)
        if n > 1:
            variance += Fraction(first * (n - first) * d * (n - d), n * n * (n - 1))
    return (float(excess) / math.sqrt(variance), float(variance)) if variance else (math.nan, 0.0)


row = st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from(ARMS), st.sampled_from([True, True, False]))


@settings(max_examples=8, deadline=None)
@given(st.lists(row, max_size=14))
@example([])
@example([(3, True, "drug", True)])
@example([(3, True, "drug", True)] * 4 + [(3, True, "placebo", True)] * 3)
@example([(0, False, "drug", True), (12, False, "placebo", True)])
@example([(5, True, "drug", False)])
def test_random_tables(rows):
    frame = pandas.DataFrame(rows, columns=["months", "event", "arm", "kept"])
    frame = frame.astype({"months": "int64", "event": bool, "kept": bool})
    table, times = shared(frame, open_session()), list(range(13))
    table, kept = table.where(table["kept"]), frame[frame["kept"]]
    error = UNIT + len(times) * 2.0**-30
    close(tables.kaplan_meier(table, "months", "event", times=times).reveal().to_numpy(), curve_of(kept, times), error)
    by_arm = [curve_of(kept[kept["arm"] == arm], times) for arm in ARMS]
    found = tables.kaplan_meier(table, "months", "event", times=times, by="arm")
    close(found.reveal().to_numpy(), by_arm, error)
    at_risk = [[counts_of(kept[kept["arm"] == arm], time)[0] for time in times] for arm in ARMS]
    assert found.counts.reveal().tolist() == at_risk
    z, variance = z_of(kept, times)
    found = tables.log_rank(table, "months", "event", times=times, by="arm").reveal()
    if variance:
        events = int(kept["event"].sum())
        allowed = 2.0**-19 + (13 * 2.0**-25 + 2.0**-21) / math.sqrt(variance)
        allowed += abs(z) * (events + 13) * 2.0**-20 / variance
        assert abs(float(found) - z) <= allowed
    else:
        assert math.isnan(found.p_value)


def test_durations_between_times_count_as_the_later_one():
    frame = trial()
    table = shared(frame, open_session())
    times = [4, 10, 20]
    rounded = frame.assign(months=[next((t for t in times if t >= m), 99) for m in frame["months"]])
    found = tables.kaplan_meier(table, "months", "event", times=times).reveal().to_numpy()
    close(found, curve_of(rounded, times), UNIT + 2.0**-28)
