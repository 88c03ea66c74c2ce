"""The accounting against dp-accounting, against a second implementation from the theorems, and against itself."""

from __future__ import annotations

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from sectorch.dp import (
    ORDERS,
    ConfidentGNMax,
    GNMax,
    LNMax,
    epsilon_for,
    epsilon_of,
)
from sectorch.dp.noise import dependent_gaussian, dependent_pure, response_curve

scales = st.floats(0.5, 200)
deltas = st.floats(1e-9, 1e-2)
votes_of = st.lists(st.integers(0, 60), min_size=2, max_size=12)
CLOSE = dict(rtol=1e-9, atol=1e-12)
"""Sums of logarithms of a few hundred terms in double precision, each within 1e-14."""


@given(scales, st.integers(1, 2000), deltas, st.integers(1, 4))
def test_gnmax_is_gaussian_composition(sigma, queries, delta, moved):
    accountant = RdpAccountant(list(ORDERS))
    accountant.compose(dp_accounting.GaussianDpEvent(sigma / (math.sqrt(2) * moved)), queries)
    assert epsilon_for(GNMax(sigma, moved), queries, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)


def test_epsilon_is_not_far_above_the_exact_one():
    """RDP on a grid against the analytic Gaussian: within 12 % from epsilon 1 to 20, and never below."""
    for sigma, queries in ((3.35, 20), (7.49, 100), (40, 550), (2, 30)):
        exact = dp_accounting.get_epsilon_gaussian(sigma / math.sqrt(2 * queries), 1e-5)
        assert exact <= epsilon_for(GNMax(sigma), queries, 1e-5) <= 1.12 * exact


@given(st.floats(0.01, 20))
def test_response_is_dp_accountings_randomised_response(epsilon):
    accountant = RdpAccountant(list(ORDERS), dp_accounting.NeighboringRelation.REPLACE_ONE)
    # The event answers at random with probability p, else truly: odds (1 - p/2) / (p/2) = e^epsilon.
    accountant.compose(dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(epsilon)), 2))
    for delta in (1e-3, 1e-6):
        # Its formula loses digits at large orders: 1e-6 is what is left of them.
        assert epsilon_of(response_curve(epsilon), delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


@given(st.floats(0.05, 5), st.integers(0, len(ORDERS) - 1))
def test_laplace_curve_is_the_divergence_itself(scale, k):
    """The Renyi divergence of discrete Laplace noise under a change by one, summed up term by term."""
    noise, order = LNMax(scale).noise, ORDERS[k]
    x = np.arange(-noise.span, noise.span + 1)
    # Far out all terms of a tail have the same ratio, so that cutting them off loses only their mass, e^-48.
    p, q = noise.log_pmf(x), noise.log_pmf(x - 1)
    exact = np.logaddexp.reduce(order * p + (1 - order) * q) / (order - 1)
    assert response_curve(1 / scale)[k] == pytest.approx(exact, rel=1e-6, abs=1e-9)


@given(st.floats(0.01, 30), st.floats(0.01, 30))
def test_moving_one_count_by_both_is_worst(x, y):
    """LNMax takes all votes to move between two counts: the curve is superadditive in the change."""
    assert (response_curve(x + y) >= (response_curve(x) + response_curve(y)) * (1 - 1e-12) - 1e-12).all()


def second_gaussian(log_q: float, sigma: float, order: float) -> float:
    """Theorem 6 and proposition 10 of PATE 2018, at 60 digits, from the paper's text and from nothing of ours."""
    with mpmath.workdps(60):
        q, s, lam = mpmath.e ** mpmath.mpf(log_q), mpmath.mpf(sigma), mpmath.mpf(order)
        plain = lam / s**2
        mu2 = s * mpmath.sqrt(mpmath.log(1 / q))
        mu1 = mu2 + 1
        if mu2 <= 1 or mu1 < lam:
            return float(plain)
        eps1, eps2 = mu1 / s**2, mu2 / s**2
        if q > mpmath.e ** ((mu2 - 1) * eps2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2:
            return float(plain)
        base = 1 - (q * mpmath.e**eps2) ** ((mu2 - 1) / mu2)
        if base <= 0:
            return float(plain)
        a = (1 - q) / base
        b = mpmath.e**eps1 / q ** (1 / (mu1 - 1))
        bound = mpmath.log((1 - q) * a ** (lam - 1) + q * b ** (lam - 1)) / (lam - 1)
        return float(min(bound, plain))


@given(st.floats(-200, -0.01), st.floats(0.6, 100), st.integers(0, len(ORDERS) - 1))
def test_dependent_gaussian_by_a_second_implementation(log_q, sigma, k):
    ours = dependent_gaussian(log_q, sigma)[k]
    # ln(1 - q) / (order - 1) is added up in doubles: 1e-15 by at most 20.
    assert ours == pytest.approx(second_gaussian(log_q, sigma, ORDERS[k]), rel=1e-7, abs=1e-13)


@given(st.floats(-80, -0.01), st.floats(0.01, 5), st.integers(0, len(ORDERS) - 1))
def test_dependent_pure_by_a_second_implementation(log_q, epsilon, k):
    with mpmath.workdps(60):
        q, e, lam = mpmath.e ** mpmath.mpf(log_q), mpmath.mpf(epsilon), mpmath.mpf(ORDERS[k])
        wanted = mpmath.mpf(float(response_curve(epsilon)[k]))
        if q < 1 / (1 + mpmath.e**e):
            one = (1 - q) * ((1 - q) / (1 - mpmath.e**e * q)) ** (lam - 1)
            wanted = min(wanted, mpmath.log(one + q * mpmath.e ** (e * (lam - 1))) / (lam - 1))
    assert dependent_pure(log_q, epsilon)[k] == pytest.approx(float(wanted), rel=1e-7, abs=1e-13)


@given(st.lists(st.integers(0, 25), min_size=2, max_size=4), st.floats(0.7, 12), st.booleans())
def test_dependent_curve_bounds_the_mechanism(votes, scale, laplace):
    """Not only the formula: the divergence between the label's exact distributions here and at every neighbour."""
    mechanism = (LNMax if laplace else GNMax)(scale)
    here, bound = mechanism.distribution(votes), mechanism.curve_of(votes)
    for a in range(len(votes)):
        for b in range(len(votes)):
            if a != b and votes[a]:
                near = list(votes)
                near[a], near[b] = near[a] - 1, near[b] + 1
                there = mechanism.distribution(near)
                seen = (here > 1e-280) & (there > 1e-280)
                logs = ORDERS[:, None] * np.log(here[seen]) + (1 - ORDERS[:, None]) * np.log(there[seen])
                exact = np.logaddexp.reduce(logs, axis=1) / (ORDERS - 1)
                assert (exact <= bound * (1 + 1e-9) + 1e-9).all()


@given(votes_of, scales)
def test_error_is_an_upper_bound(votes, scale):
    for mechanism in (GNMax(scale), LNMax(scale)):
        exact = 1 - mechanism.distribution(votes)[int(np.argmax(votes))]
        assert math.exp(mechanism.log_error(votes)) >= exact - 1e-9


@given(votes_of, scales, st.integers(1, 3))
def test_dependent_never_exceeds_independent(votes, scale, moved):
    for mechanism in (GNMax(scale, moved), LNMax(scale, moved)):
        assert (mechanism.curve_of(votes) <= mechanism.curve * (1 + 1e-12)).all()
    confident = ConfidentGNMax(20, scale, GNMax(scale, moved))
    assert (confident.check_curve_of(votes) <= confident.check_curve * (1 + 1e-12)).all()


@given(scales, st.integers(1, 500), deltas, st.integers(1, 5), st.floats(1.01, 2), st.sampled_from([GNMax, LNMax]))
def test_monotone(scale, queries, delta, moved, factor, kind):
    epsilon = epsilon_for(kind(scale, moved), queries, delta)
    assert epsilon_for(kind(scale * factor, moved), queries, delta) <= epsilon
    assert epsilon_for(kind(scale, moved), queries + 1, delta) >= epsilon
    assert epsilon_for(kind(scale, moved), queries, delta / factor) >= epsilon
    assert epsilon_for(kind(scale, moved + 1), queries, delta) >= epsilon


@given(st.floats(-100, -0.02), st.floats(1.001, 3), st.floats(0.6, 100), st.floats(0.01, 5))
def test_dependent_is_monotone_in_the_error(log_q, factor, sigma, epsilon):
    # Less likely errors never cost more; 1e-9 of rounding.
    assert (dependent_gaussian(log_q * factor, sigma) <= dependent_gaussian(log_q, sigma) * (1 + 1e-9) + 1e-13).all()
    assert (dependent_pure(log_q * factor, epsilon) <= dependent_pure(log_q, epsilon) * (1 + 1e-9) + 1e-13).all()


def test_published_value():
    """CaPC's own code (cleverhans-lab/capc-iclr, learning/analysis/pate.py, the commented check at its end): 250
    teachers, sigma 40, unanimous. ln q = ln(9 Phi(-250 / 40 sqrt 2)) = -9.9786 with the continuous Gaussian."""
    wanted = math.log(9 * 0.5 * math.erfc(250 / (2 * 40)))
    # Ours counts ties against the mechanism: half a vote of 250, d/dgap of ln q is about gap / 2 sigma^2 = 0.08.
    assert GNMax(40.0).log_error([250] + [0] * 9) == pytest.approx(wanted, abs=0.05)


def test_a_grid_of_orders_that_reaches_both_ends():
    assert (np.diff(ORDERS) > 0).all() and ORDERS[0] < 1.06 and ORDERS[-1] > 1000
