"""Estimators on shares: scikit-learn's contract, its coefficients within derived bounds, and unkind data."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.cluster
import sklearn.linear_model
import torch
from cases import long
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import check_estimator

import sectorch
from sectorch import Session
from sectorch.errors import ArgumentError, FixedPointRangeError, ShapeError
from sectorch.estimators import FitError, KMeans, LinearRegression, LogisticRegression, Ridge

UNIT = 2.0**-20
NOT_RUN = {"check_array_api_input": "asks for SCIPY_ARRAY_API, which is of the process"}


LONG = [pytest.param(kind, marks=pytest.mark.sectorch_long) for kind in (LinearRegression, KMeans)]


@pytest.mark.parametrize("kind", [Ridge, LogisticRegression, *LONG])
def test_scikit_learn_takes_them_for_its_own(kind: type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's own checks
        results = check_estimator(kind(), on_fail=None)
    assert {r["check_name"] for r in results if r["status"] != "passed"} <= set(NOT_RUN)
    assert len(results) > 40


def coded(x: np.ndarray) -> np.ndarray:
    """What the fixed point has of x."""
    return np.round(x / UNIT) * UNIT


def shares(session: Session, x: np.ndarray, limit: float | None = 8.0, owner: str = "Q") -> Any:
    return sectorch.share(torch.from_numpy(x), session=session, limit=limit, owner=owner)


def scales(x: np.ndarray, kappa: float, alpha: float) -> tuple[np.ndarray, int]:
    """What a coefficient is multiplied by for unit curvature, with that of the intercept; and the power of two N."""
    N = 1 << (len(x) - 1).bit_length()
    curvature = kappa * ((x - x.mean(0)) ** 2).sum(0) / N + alpha / N + 2.0**-14
    return np.append(curvature**-0.5, kappa**-0.5), N


def gradient(x: np.ndarray, y: np.ndarray, w: np.ndarray, b: float, alpha: float, logistic: bool, N: int):
    """Of the mean loss, over N, and of each row's curvature; by centred columns."""
    z = x @ w + b
    p = 1 / (1 + np.exp(-z)) if logistic else z
    columns = np.c_[x - x.mean(0), np.ones(len(x))]
    return columns.T @ (p - y) / N + np.append(alpha * w, 0) / N, p * (1 - p) if logistic else np.ones(len(x))


def noise(x: np.ndarray, w: np.ndarray, scale: np.ndarray, kappa: float, sigmoid: float, unit: float) -> float:
    """By how much the fixed-point gradient of unit curvature may differ from the exact one at the revealed w, in units.

    A residual errs by that of the sigmoid, and kappa times that of z: half a unit for each standardised entry times
    its coefficient, half a unit for the rounding of z, and half a unit for each revealed coefficient times its entry,
    which for the intercept are the products of means and coefficients. Columns of unit curvature have mean squares of
    1 / kappa, and so mean magnitudes of 1 / sqrt(kappa) at most; the gradient itself is rounded at 2^-30.
    """
    standard = np.abs(np.append(w / scale[:-1], 1 / scale[-1])).sum() / unit
    revealed = (np.abs(x).max(0).sum() + np.abs(x.mean(0)).sum() + 2) / unit
    residual = sigmoid + kappa * UNIT * (standard + revealed + 1) / 2
    return residual / kappa**0.5 + 2.0**-29


@st.composite
def data(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Columns of several sizes and means, some of them nearly or wholly collinear or constant; a linear signal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(3, 60)), draw(st.integers(1, 5))
    x = rng.normal(size=(n, d)) * draw(st.sampled_from([0.25, 1.0, 1.5])) + draw(st.sampled_from([0.0, 1.0, -2.0]))
    kind = draw(st.sampled_from(["plain", "collinear", "nearly", "constant", "outlier"]))
    if kind in ("collinear", "nearly"):
        x[:, -1] = x[:, 0] + (0 if kind == "collinear" else 1e-2) * rng.normal(size=n)
    if kind == "constant":
        x[:, 0] = 1.7
    if kind == "outlier":
        x[0] = 7.5
    x = coded(x.clip(-7.9, 7.9))
    return x, x @ rng.normal(size=d) + draw(st.sampled_from([0.0, 0.3])) * rng.normal(size=n)


@settings(deadline=None)
@given(data(), st.sampled_from([0.1, 1.0, 100.0]))
def test_logistic_regression_is_scikit_learns_or_none(drawn: tuple, C: float):
    """Strong convexity: |v - v*| <= |gradient| / the least curvature between the two, in columns of unit curvature."""
    x, z = drawn
    y = (z > np.median(z)).astype(float)
    if len(set(y)) < 2:
        return
    session, tol = Session(reference=True), 1e-4
    fit = LogisticRegression(C=C, tol=tol).fit(shares(session, x), shares(session, y, None))
    try:
        fit = fit.revealed()
    except FitError:
        assert C == 100.0, "only where next to nothing is penalised is it hard to come near"
        return
    alpha, w, b = 1 / C, fit.coef_[0], float(fit.intercept_[0])
    scale, N = scales(x, 0.25, alpha)
    found, curved = gradient(x, y, w, b, alpha, True, N)
    allowed = 1.01 * (tol + noise(x, w, scale, 0.25, 4e-6, 1.0))
    assert np.abs(found * scale).max() <= allowed

    best = sklearn.linear_model.LogisticRegression(C=C, tol=1e-10, max_iter=10**4, solver="newton-cholesky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot always reach that: how far it is from the optimum is counted below
        best.fit(x, y)
    w_best, b_best = best.coef_[0], float(best.intercept_[0])
    left, curved_best = gradient(x, y, w_best, b_best, alpha, True, N)
    least = np.minimum(curved, curved_best)
    columns = np.c_[x - x.mean(0), np.ones(len(x))] * scale
    curvature = (columns.T * least) @ columns / N + np.diag(np.append(alpha / N * scale[:-1] ** 2, 0))
    distance = np.linalg.norm(np.append(w - w_best, b - b_best + x.mean(0) @ (w - w_best)) / scale)
    both = np.sqrt(len(scale)) * allowed + np.linalg.norm(left * scale)
    assert distance <= both / np.linalg.eigvalsh(curvature)[0] + 1e-9


@settings(deadline=None)
@given(data(), st.sampled_from([0.0, 1.0]), st.booleans())
def test_least_squares_are_scikit_learns(drawn: tuple, alpha: float, collected: bool):
    x, y = drawn
    y = coded(y.clip(-31, 31))
    session, tol, unit = Session(reference=True), 1e-5, 32.0
    estimator = Ridge(alpha, tol=tol) if alpha else LinearRegression(tol=tol)
    fit = estimator.fit(shares(session, x), shares(session, y, unit)).revealed()
    w, b = fit.coef_, float(fit.intercept_[0])
    scale, N = scales(x, 1.0, alpha)
    found, _ = gradient(x, y, w, b, alpha, False, N)
    allowed = 1.01 * (tol + noise(x, w, scale, 1.0, 2.0**-26, unit))
    assert np.abs(found * scale).max() / unit <= allowed

    best = sklearn.linear_model.Ridge(alpha, solver="svd").fit(x, y)
    columns = np.c_[x - x.mean(0), np.ones(len(x))] * scale
    curvature = columns.T @ columns / N + np.diag(np.append(alpha / N * scale[:-1] ** 2, 0))
    apart = w - best.coef_
    distance = np.append(apart, b - best.intercept_ + x.mean(0) @ apart) / scale
    # What is not determined by the data is measured by what it predicts.
    assert distance @ curvature @ distance <= np.linalg.norm(distance) * np.sqrt(len(scale)) * allowed * unit + 1e-9


def test_a_fit_shows_nothing_and_is_that_of_the_reference():
    """Rows of three hospitals, and columns of three: the same coefficients, learned by A alone."""
    rng = np.random.default_rng(0)
    x = coded(rng.normal(size=(40, 3)).clip(-7, 7))
    y = (x[:, 0] + rng.normal(size=40) > 0).astype(np.int64)
    fits = []
    for axis, reference in ((0, False), (1, False), (0, True)):
        session = Session(reference=reference)
        parts = np.array_split(x, 3, axis)
        with sectorch.profile() as seen:
            joined = torch.cat([shares(session, part, owner=o) for o, part in zip("QAS", parts, strict=True)], axis)
            fit = LogisticRegression(max_iter=3, tol=0.5).fit(joined, shares(session, y, None, "S"))
        assert not [line for line in seen.ledger if line.shows]
        assert "(1, 3)" in repr(fit.coef_) and "SharedTensor" in repr(fit.coef_)
        labels, probability = fit.predict(joined).reveal(), fit.predict_proba(joined).reveal()
        with sectorch.profile() as seen:
            fit = fit.revealed(to="A")
        shown = {line.dst.role for line in seen.ledger if line.shows and line.protocol != "guard"}
        assert reference or shown <= {"A", "Q"}
        assert np.array_equal(fit.predict(x), labels.numpy()) and labels.dtype == torch.int64
        assert np.abs(fit.predict_proba(x) - probability.numpy()).max() < 4e-6 + 8 * UNIT
        fits.append(np.append(fit.coef_, fit.intercept_))
    # Roots and sigmoids differ in the last place for one value in some 2^19.
    assert np.abs(fits[0] - fits[1]).max() <= 8 * UNIT and np.abs(fits[0] - fits[2]).max() <= 8 * UNIT


UNKIND = {
    "one class": lambda x, y: (x, y * 0),
    "other labels": lambda x, y: (x, y + 1),
    "no labels": lambda x, y: (x, y * 0.5),
    "large": lambda x, y: (x * 2000, y),
    "far from zero": lambda x, y: (x + 5000, y),
}


@pytest.mark.parametrize("name", UNKIND)
def test_there_is_no_fit_of_unkind_data_on_shares(name: str):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 2)), np.arange(30) % 2.0
    x, y = UNKIND[name](x, y)
    session = Session(reference=True)
    fit = LogisticRegression().fit(shares(session, x, 2.0**14), shares(session, y, None))
    with pytest.raises(FitError, match="there is no LogisticRegression of this data: a value left the range, the lab"):
        fit.revealed()


def test_steps_that_are_too_few_are_no_fit():
    x = np.linspace(-3, 3, 40)[:, None]
    y = (x[:, 0] > 0).astype(int)
    with pytest.raises(FitError, match="is not below tol = 1e-05 after max_iter = 3 steps"):
        LogisticRegression(C=1e3, max_iter=3, tol=1e-5).fit(x, y)
    assert LogisticRegression(C=1e3, max_iter=45, tol=1e-5).fit(x, y).score(x, y) == 1


def test_fewer_rows_than_columns_and_what_predicts_the_same():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(8, 12)), rng.normal(size=8)
    fit = LinearRegression().fit(x, y)
    assert np.abs(fit.predict(x) - y).max() < 1e-4
    doubled = np.c_[x[:, :2], x[:, 0]]
    both = [
        kind().fit(doubled, y).predict(doubled) for kind in (LinearRegression, sklearn.linear_model.LinearRegression)
    ]
    assert np.abs(both[0] - both[1]).max() < 1e-4


def test_columns_of_any_size_within_the_range():
    """Five powers of ten apart: the smallest has 2^-20 of absolute error, and so a part in 1000 of its own size."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(200, 3))
    y = (x.sum(1) + rng.normal(size=200) > 0).astype(int)
    x *= [1e-2, 1.0, 300.0]
    fit = LogisticRegression(C=10.0).fit(x, y)
    best = sklearn.linear_model.LogisticRegression(C=10.0, tol=1e-8, solver="newton-cholesky").fit(x, y)
    assert np.abs((fit.coef_ - best.coef_) * [1e-2, 1.0, 300.0]).max() < 1e-3


FAR = [(4000.0, 0.5), *long((1980.0, 25.0), (-4000.0, 20.0), (0.0, 900.0), (3000.0, 300.0), (0.0, 0.01))]


@pytest.mark.parametrize(("mean", "deviation"), FAR)
def test_columns_far_from_zero_are_as_those_around_zero(mean: float, deviation: float):
    """Coefficients, what is predicted while they are secret, and what is predicted once they are known."""
    rng = np.random.default_rng(5)
    around = rng.normal(size=(50, 3)).clip(-3, 3)
    x, z = coded(mean + deviation * around), around @ [1.0, -2.0, 0.5] + rng.normal(size=50)
    session = Session(reference=True)
    for kind in (LinearRegression, Ridge, LogisticRegression):
        y = (z > 0).astype(np.int64) if kind is LogisticRegression else z
        best: Any = {
            LinearRegression: sklearn.linear_model.LinearRegression(),
            Ridge: sklearn.linear_model.Ridge(),
            LogisticRegression: sklearn.linear_model.LogisticRegression(solver="newton-cholesky", tol=1e-8),
        }[kind]
        best.fit(x - mean, y)
        given = shares(session, x, None)
        fit = kind().fit(given, shares(session, y, None))
        ask = "predict_proba" if kind is LogisticRegression else "predict"
        found = getattr(fit, ask)(given).reveal().numpy()
        fit = fit.revealed()
        wanted = getattr(best, ask)(x - mean)
        again = getattr(fit, ask)(given).reveal().numpy()
        # A coefficient errs by half a unit at least, which a mean multiplies; and tol is of y's limit.
        allowed = 1e-3 + 3 * 4096 * UNIT
        assert np.abs((fit.coef_ - best.coef_) * deviation).max() < 5e-3, kind
        assert np.abs(found - wanted).max() < allowed and np.abs(again - wanted).max() < allowed, kind


@pytest.mark.parametrize(("mean", "deviation"), [*FAR, *long((0.0, 1300.0))])
def test_k_means_of_any_place_and_size_within_the_range(mean: float, deviation: float):
    """A public change of unit and origin changes nothing: the clusters are those of the rows around zero."""
    rng = np.random.default_rng(6)
    around = np.concatenate([rng.normal(m, 0.1, size=(12, 2)) for m in (-2, 0.5, 2)])
    x = coded(mean + deviation * around)
    session = Session(reference=True)
    wanted = KMeans(3, random_state=0).fit(shares(session, around))
    fit = KMeans(3, random_state=0).fit(given := shares(session, x, None))
    labels = fit.labels_.reveal()
    assert torch.equal(labels, wanted.labels_.reveal()) and torch.equal(labels, fit.predict(given).reveal())
    assert torch.equal(labels, fit.predict(x).reveal())
    fit = fit.revealed()
    means = np.stack([x[labels.numpy() == k].mean(0) for k in range(3)])
    assert np.abs(fit.cluster_centers_ - means).max() < 1e-5 + 4e-6 * np.abs(x).max()
    assert torch.equal(labels, fit.predict(given).reveal()) and np.array_equal(labels, fit.predict(x))


def test_where_there_are_no_clusters_the_way_out_is_one():
    x = np.random.default_rng(7).normal(size=(30, 2)) * 3000
    session = Session(reference=True)
    with pytest.raises(FitError, match=r"is not below the activation limit .* divide all columns"):
        KMeans(2, random_state=0).fit(shares(session, x, 2.0**14)).revealed()
    assert KMeans(2, random_state=0).fit(shares(session, x / 4, None)).revealed().cluster_centers_.shape == (2, 2)
    fit = KMeans(2, random_state=0).fit(shares(session, x / 4, None))
    with pytest.raises(FixedPointRangeError, match="X has to be below 4096 in magnitude"):
        fit.predict(x)


def test_classes_in_shares_are_those_of_the_fit():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(30, 2))
    rows, code = shares(Session(reference=True), x), (x[:, 0] > 0).astype(int)
    for classes in (np.array([3, 7]), np.array([False, True]), np.array([5.0, 2.0])):
        fit = LogisticRegression().fit(x, classes[code])
        assert np.array_equal(fit.predict(x), fit.predict(rows).reveal()) and fit.predict_proba(rows).shape == (30, 2)
    fit = LogisticRegression().fit(x, np.array(["ill", "well"])[code])
    with pytest.raises(ArgumentError, match=r"shares are of numbers, and the classes are of <U4; decision_function"):
        fit.predict(rows)
    assert np.array_equal((fit.decision_function(rows) > 0).reveal(), fit.predict(x) == "well")
    for secret in ((rows, code), (x, shares(rows.session, code))):
        with pytest.raises(ArgumentError, match=r"score\(\) takes plain data and a fit that is revealed"):
            fit.score(*secret)


KINDS = ("bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64")


def test_what_is_predicted_has_one_shape_and_dtype_on_arrays_and_on_shares():
    """Of a fit on arrays and of one on shares, before and after the fit is revealed."""
    rng = np.random.default_rng(9)
    x = coded(rng.normal(size=(20, 2)).clip(-3, 3))
    session = Session(reference=True)
    rows = shares(session, x)

    def same(one: Any, other: Any) -> None:
        other = other.reveal().numpy() if isinstance(other, sectorch.SharedTensor) else other
        assert (one.shape, one.dtype) == (other.shape, other.dtype)

    for kind in KINDS:
        y = (x[:, 0] > 0).astype(kind)
        for labels in (y, y[:, None]) if kind == "int32" else (y,):
            on_arrays = LogisticRegression(max_iter=3, tol=0.5).fit(x, y)
            on_shares = LogisticRegression(max_iter=3, tol=0.5).fit(rows, shares(session, labels, None))
            learned = on_shares.revealed()
            assert on_arrays.classes_.dtype == on_shares.classes_.dtype == np.dtype(kind)
            for ask in ("predict", "predict_proba", "decision_function"):
                wanted = getattr(on_arrays, ask)(x)
                for fit, where in ((on_arrays, rows), (on_shares, x), (on_shares, rows), (learned, x), (learned, rows)):
                    same(wanted, getattr(fit, ask)(where))
    for made, y in ((Ridge(tol=1e-2), x[:, 1]), (LinearRegression(tol=1e-2), x[:, 1]), (KMeans(2), None)):
        wanted = made.fit(x, y).predict(x)
        on_shares = made.fit(rows, None if y is None else shares(session, y, None))
        for fit, where in ((on_shares, x), (on_shares, rows), (on_shares.revealed(), rows)):
            same(wanted, fit.predict(where))


def test_a_fit_that_is_revealed_is_another_object():
    x = coded(np.random.default_rng(10).normal(size=(20, 2)).clip(-3, 3))
    session = Session(reference=True)
    fit = Ridge(tol=1e-2).fit(shares(session, x), shares(session, x[:, 1], None))
    learned = fit.revealed()
    assert isinstance(fit.coef_, sectorch.SharedTensor) and isinstance(learned.coef_, np.ndarray)
    assert learned is not fit and learned.get_params() == fit.get_params()
    assert np.array_equal(learned.coef_, fit.revealed(to="A").coef_)
    none = Ridge().fit(shares(session, x + 5000, 2.0**14), shares(session, x[:, 1], None))
    before = dict(vars(none))
    with pytest.raises(FitError):
        none.revealed()
    with pytest.raises(FitError), pytest.warns(DeprecationWarning, match=r"estimator = estimator.revealed\(\)"):
        none.reveal()
    assert vars(none) == before, "a failed call changes nothing"


def test_data_that_is_not_all_in_shares_of_one_session_is_refused():
    session, x, y = Session(reference=True), np.ones((4, 2)), np.array([0.0, 1, 0, 1])
    secret_x, secret_y = shares(session, x), shares(session, y)
    with pytest.raises(ArgumentError, match=r"y is a ndarray and the other of X and y is in shares; share it"):
        Ridge().fit(secret_x, y)
    with pytest.raises(ArgumentError, match=r"X is a ndarray"):
        LogisticRegression().fit(x, secret_y)
    with pytest.raises(ArgumentError, match="of two sessions"):
        Ridge().fit(secret_x, shares(Session(reference=True), y))
    with pytest.raises(ShapeError, match=r"X in shares is \[samples, features\], got \(4,\)"):
        Ridge().fit(secret_y, secret_y)
    with pytest.raises(ShapeError, match=r"y in shares is .* for X of 4 rows, got \(3,\)"):
        Ridge().fit(secret_x, secret_y[:3])
    for bad in (Ridge(-1.0), LogisticRegression(C=0.0), LogisticRegression(max_iter=0), Ridge(tol=0.0)):
        with pytest.raises(ArgumentError):
            bad.fit(secret_x, secret_y)
    for bad in (Ridge("a"), Ridge(max_iter=2.5), Ridge(tol="b"), LogisticRegression(C="c"), Ridge(float("nan"))):
        with pytest.raises(ArgumentError, match=r"number|penalty|C must"):
            bad.fit(secret_x, secret_y)
    for bad in (KMeans("a"), KMeans(2.5), KMeans(2, max_iter=1.5)):
        with pytest.raises(ArgumentError, match="is a whole number"):
            bad.fit(secret_x)
    with pytest.raises(ArgumentError, match="n_clusters is from 1 to the number of rows, 4"):
        KMeans(5).fit(secret_x)
    with pytest.raises(ArgumentError, match="up to 524288 rows"):
        Ridge().fit(shares(session, np.zeros((1 << 19 | 1, 1))), shares(session, np.zeros(1 << 19 | 1)))


def test_k_means_is_lloyds_iteration():
    """From its own centres scikit-learn moves no further, and on shares it goes as in the reference."""
    x = np.concatenate([np.random.default_rng(4).normal(m, 0.5, size=(15, 2)) for m in (-3, 0, 3)])
    found = []
    for reference in (False, True):
        session = Session(reference=reference)
        with sectorch.profile() as seen:
            fit = KMeans(3, max_iter=3, random_state=0).fit(shares(session, x))
        assert not [line for line in seen.ledger if line.shows]
        labels = fit.labels_.reveal().numpy()
        fit = fit.revealed(to="S")
        assert np.array_equal(labels, fit.predict(x)) and np.array_equal(
            fit.predict(shares(session, x)).reveal(), labels
        )
        found.append(fit.cluster_centers_)
    assert np.abs(found[0] - found[1]).max() <= 2 * UNIT
    best = sklearn.cluster.KMeans(3, init=found[0], n_init=1, tol=0).fit(x)
    assert np.abs(best.cluster_centers_ - found[0]).max() < 1e-5 + 2e-6 * 4
    same = KMeans(2, random_state=0).fit(np.ones((5, 2)))
    assert np.allclose(same.cluster_centers_, 1, atol=1e-5), "a cluster without rows keeps its centre"
