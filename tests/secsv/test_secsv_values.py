"""Shapley's axioms, estimators, other measures: properties of the estimator code on arbitrary games."""

from __future__ import annotations

import sys
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sectorch.protocols.secsv.settings import ESTIMATORS, estimate
from sectorch.protocols.secsv.values import (
    EstimatorMissingError,
    FederationError,
    coalition,
    coalitions,
    contribution_index,
    error,
    group_values,
    gtg,
    members,
    shapley,
    total,
    truncated,
)

UTILITY = st.floats(0, 1, width=32)
# A value is a mean of 2^(n-1) differences of numbers up to 1: float64 leaves less than 2^n * 2^-52 of error.
CLOSE = 1e-12


@st.composite
def games(draw, most: int = 6):
    """Players (not numbered through) and a utility for each coalition, and for nobody."""
    players = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=most)))
    return players, {mask: draw(UTILITY) for mask in [0, *coalitions(players)]}


def asking(v):
    return lambda masks: {m: v[m] for m in masks}


@given(games())
def test_balance(game):
    players, v = game
    gain = v[coalition(players)] - v[0]
    assert sum(shapley(players, v.__getitem__).values()) == pytest.approx(gain, abs=CLOSE)


@given(games(5), st.data())
def test_symmetry(game, data):
    players, v = game
    i, j = (data.draw(st.sampled_from(players)) for _ in range(2))
    swap = {i: j, j: i}
    even = {m: v[m] + v[coalition(swap.get(p, p) for p in members(m))] for m in v}
    values = shapley(players, even.__getitem__)
    assert values[i] == pytest.approx(values[j], abs=CLOSE)


@given(games(5), st.data())
def test_additivity(game, data):
    players, v = game
    w = {mask: data.draw(UTILITY) for mask in v}
    both = shapley(players, lambda m: v[m] + w[m])
    first, second = shapley(players, v.__getitem__), shapley(players, w.__getitem__)
    assert both == pytest.approx({i: first[i] + second[i] for i in players}, abs=CLOSE)


@given(games(5), st.integers(10, 12))
def test_zero_element(game, stranger):
    """A player who changes no utility has no value, and takes none from the others."""
    players, v = game
    bit = 1 << stranger
    wide = {**v, **{m | bit: u for m, u in v.items()}}
    values = shapley([*players, stranger], wide.__getitem__)
    assert values.pop(stranger) == pytest.approx(0, abs=CLOSE)
    assert values == pytest.approx(shapley(players, v.__getitem__), abs=CLOSE)


@given(games(4))
def test_shapley_is_the_mean_marginal_gain_over_orders(game):
    players, v = game
    gains = dict.fromkeys(players, 0.0)
    orders = list(permutations(players))
    for order in orders:
        mask = 0
        for player in order:
            gains[player] += v[mask | 1 << player] - v[mask]
            mask |= 1 << player
    assert shapley(players, v.__getitem__) == pytest.approx({i: g / len(orders) for i, g in gains.items()}, abs=1e-9)


@given(st.lists(st.dictionaries(st.integers(0, 5), UTILITY), max_size=4))
def test_the_federated_value_is_the_sum_of_the_rounds_attended(rounds):
    values = total(rounds)
    assert set(values) == {i for one in rounds for i in one}
    for i in values:
        assert values[i] == pytest.approx(sum(one.get(i, 0.0) for one in rounds))


@settings(deadline=None, max_examples=10)
@given(games(4), st.integers(0, 5))
def test_group_testing_is_balanced(game, seed):
    players, v = game
    values = estimate("group-testing", players, asking(v), budget=50, seed=seed)
    assert sum(values.values()) == pytest.approx(v[coalition(players)] - v[0], abs=1e-9)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_estimators_come_near_an_additive_game(name):
    players, worth = [0, 2, 3, 5], {0: 0.1, 2: 0.2, 3: 0.3, 5: 0.4}
    v = {m: 0.3 + sum(worth[p] for p in members(m)) for m in [0, *coalitions(players)]}
    values = estimate(name, players, asking(v), budget=4000 if name == "group-testing" else 20, seed=1)
    # Marginal gains of an additive game are constant, so all but group testing are exact. Group testing's differences
    # are means of 4000 numbers below Z = 11/3: Hoeffding leaves 0.2 at 1 - 10^-4 for each, and the seed is fixed.
    assert error(values, worth) < (0.2 if name == "group-testing" else 1e-6)


@pytest.mark.parametrize("name", ["permutation", "kernel"])
def test_a_missing_library_is_a_typed_error(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "shapiq", None)
    with pytest.raises(EstimatorMissingError, match=r"pip install 'sectorch\[shapley\]', or"):
        estimate(name, [0, 1], lambda masks: dict.fromkeys(masks, 0.0))


def test_too_small_a_budget_is_refused():
    with pytest.raises(FederationError, match="budget of at least 5"):
        estimate("kernel", range(4), lambda masks: dict.fromkeys(masks, 0.0), budget=4)


@given(games(5))
def test_the_contribution_index_is_the_share_of_the_values(game):
    players, v = game
    index, values = contribution_index(players, v.__getitem__), shapley(players, v.__getitem__)
    whole = sum(map(abs, values.values()))
    if whole > 1e-9:
        assert index == pytest.approx({i: x / whole for i, x in values.items()})


@given(games(5))
def test_groups_of_one_have_the_clients_values_and_one_group_has_all(game):
    players, v = game
    values = shapley(players, v.__getitem__)
    alone = group_values([[p] for p in players], v.__getitem__)
    assert alone == pytest.approx([values[p] for p in players], abs=1e-9)
    assert group_values([players], v.__getitem__) == pytest.approx([v[coalition(players)] - v[0]])


def test_groups_do_not_overlap():
    with pytest.raises(FederationError, match="share a client"):
        group_values([[0, 1], [1]], lambda m: 0.0)


@given(games(4))
def test_truncation_by_nothing_and_over_all_orders_is_exact(game):
    players, v = game
    found = truncated(players, v.__getitem__, orders=24, tolerance=0.0)
    assert found == pytest.approx(shapley(players, v.__getitem__), abs=1e-9)


@given(games(5))
def test_truncated_and_guided_values_are_balanced(game):
    players, v = game
    gain = v[coalition(players)] - v[0]
    assert sum(truncated(players, v.__getitem__, orders=5, tolerance=0.0).values()) == pytest.approx(gain, abs=1e-9)
    found = gtg([(players, v.__getitem__)], between=-1.0, within=0.0)
    assert sum(found.values()) == pytest.approx(gain, abs=1e-9)


def test_gtg_leaves_out_a_round_that_gained_nothing():
    one = lambda m: 0.5 if m else 0.0
    asked = []
    found = gtg([([0, 1], one), ([0, 1], lambda m: asked.append(m) or 0.5)], within=0.0)
    assert found == pytest.approx({0: 0.25, 1: 0.25})
    assert asked == [0b11, 0], "only the global models of the second round were tested"
