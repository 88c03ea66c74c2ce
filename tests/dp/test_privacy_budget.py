"""Budgets stop before they are overrun and never report less than was spent; calibration is the inverse of the cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.dp import (
    MECHANISMS,
    ORDERS,
    Budget,
    BudgetExhaustedError,
    ConfidentGNMax,
    GNMax,
    LNMax,
    PrivacyError,
    epsilon_for,
    epsilon_of,
    queries_for,
    reachable_epsilon,
    scale_for,
)

epsilons = st.floats(0.05, 30)
deltas = st.floats(1e-9, 1e-2)
kinds = st.sampled_from(sorted(MECHANISMS))


@given(epsilons, deltas, st.lists(st.tuples(kinds, st.floats(1, 60), st.integers(1, 3)), max_size=25))
def test_never_overrun_and_never_less_than_spent(epsilon, delta, steps):
    budget, total, last = Budget(epsilon, delta), np.zeros_like(ORDERS), 0.0
    for noise, scale, moved in steps:
        curve = MECHANISMS[noise](scale, moved).curve
        try:
            budget.charge(curve)
            total = total + curve
        except BudgetExhaustedError:
            assert epsilon_of(total + curve, delta) > epsilon
        assert last <= budget.spent <= epsilon
        assert budget.spent == epsilon_of(total, delta)
        assert budget.spent + budget.remaining == pytest.approx(epsilon)
        last = budget.spent


def test_a_refused_charge_changes_nothing():
    budget = Budget(1.0, 1e-5)
    budget.charge(GNMax(20.0).curve)
    before = budget.curve
    with pytest.raises(BudgetExhaustedError, match=r"epsilon 0\.\d+ of 1 is spent .* would bring it to"):
        budget.charge(GNMax(0.5).curve)
    assert (budget.curve == before).all()
    budget.curve[:] = 0  # a copy
    assert (budget.curve == before).all()


def test_restore():
    budget = Budget(5.0, 1e-5)
    budget.restore(GNMax(3.0).curve)
    assert budget.spent == epsilon_for(GNMax(3.0), 1, 1e-5)
    with pytest.raises(PrivacyError, match="before anything is charged"):
        budget.restore(GNMax(3.0).curve)
    for bad in (np.zeros(3), -GNMax(3.0).curve, np.full_like(ORDERS, np.nan)):
        with pytest.raises(PrivacyError, match="one for each order"):
            Budget(5.0, 1e-5).charge(bad)


@given(kinds, st.floats(0.2, 20), deltas, st.integers(1, 300), st.integers(1, 3))
def test_scale_for_is_the_least(noise, epsilon, delta, queries, moved):
    scale = scale_for(noise, epsilon, delta, queries, moved)
    make = MECHANISMS[noise]
    assert epsilon_for(make(scale, moved), queries, delta) <= epsilon
    if scale > 2**-10:
        assert epsilon_for(make(scale - 2**-10, moved), queries, delta) > epsilon
    assert queries_for(make(scale, moved), epsilon, delta) >= queries
    assert scale == int(scale * 1024) / 1024


@given(kinds, st.floats(1, 60), st.floats(0.2, 20), deltas)
def test_queries_for_is_the_most(noise, scale, epsilon, delta):
    mechanism = MECHANISMS[noise](scale)
    queries = queries_for(mechanism, epsilon, delta)
    assert epsilon_for(mechanism, queries, delta) <= epsilon < epsilon_for(mechanism, queries + 1, delta)


@pytest.mark.parametrize("noise", sorted(MECHANISMS))
def test_reachable_epsilon(noise):
    voters, queries = 12, 50
    epsilon = reachable_epsilon(noise, voters, 10, 1e-5, queries)
    mechanism = MECHANISMS[noise](scale_for(noise, epsilon * 1.001, 1e-5, queries))
    assert mechanism.unanimous(voters, 10) >= 0.5
    tighter = MECHANISMS[noise](scale_for(noise, epsilon * 0.98, 1e-5, queries))
    assert tighter.unanimous(voters, 10) < 0.5
    assert reachable_epsilon(noise, 50, 10, 1e-5, queries) < epsilon


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf")])
def test_epsilon_out_of_range(epsilon):
    for call in (
        lambda: Budget(epsilon, 1e-5),
        lambda: scale_for("gaussian", epsilon, 1e-5, 10),
        lambda: queries_for(GNMax(1.0), epsilon, 1e-5),
    ):
        with pytest.raises(PrivacyError, match="epsilon must be above 0 and finite"):
            call()


@pytest.mark.parametrize("delta", [0, 1, -0.1, float("nan")])
def test_delta_out_of_range(delta):
    for call in (
        lambda: Budget(1.0, delta),
        lambda: scale_for("laplace", 1.0, delta, 10),
        lambda: epsilon_for(LNMax(1.0), 3, delta),
    ):
        with pytest.raises(PrivacyError, match="delta must be above 0 and below 1"):
            call()


def test_other_errors():
    with pytest.raises(PrivacyError, match="no noise 'cauchy'; there are gaussian, laplace"):
        scale_for("cauchy", 1.0, 1e-5, 10)
    with pytest.raises(PrivacyError, match="whole number from 1, got 0"):
        scale_for("gaussian", 1.0, 1e-5, 0)
    with pytest.raises(PrivacyError, match="keeps 1000000000 queries within"):
        scale_for("gaussian", 1e-9, 1e-9, 1_000_000_000)
    assert "spent 0.0000 of 2" in repr(Budget(2, 1e-6))


@given(st.integers(1, 40), st.integers(0, 40), st.floats(2, 50), st.floats(2, 50))
def test_what_a_check_spared_is_given_back_and_no_more(asked, answered, scale, check):
    mechanism, answered = ConfidentGNMax(10, check, GNMax(scale)), min(asked, answered)
    budget = Budget(1000.0, 1e-5)
    budget.charge(asked * mechanism.curve)
    budget.credit((asked - answered) * mechanism.answer.curve)
    np.testing.assert_allclose(budget.curve, mechanism.cost(asked, answered))
    with pytest.raises(PrivacyError, match="more would be given back"):
        budget.credit(2 * budget.curve)


def test_confident_in_the_clear():
    mechanism = ConfidentGNMax(8, 0.3, GNMax(0.3))
    labels = mechanism.labels(torch.tensor([[10, 0, 0], [5, 3, 2], [0, 0, 12]]))
    assert labels.tolist() == [0, -1, 2] and mechanism.unanimous(3, 3) < 1e-6 < 0.99 < mechanism.unanimous(12, 3)
