"""Linear models on shares: least squares with and without a penalty, and logistic regression."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import forbid
from ..ring import HEADROOM_BITS
from ..session import Session
from ..tensor import SharedTensor
from ..tensor.table import Context, one_call
from ..training.fixed_point import (
    add_known,
    at_scale_bits,
    check_below,
    cross_product,
    diagonal,
    matmul,
    minus,
    product,
    whole_bits,
    with_known_range,
)
from .base import (
    COEFFICIENT_BITS,
    ClassifierMixin,
    Columns,
    RegressorMixin,
    SharedEstimator,
    as_float64,
    as_public_value,
    certain,
    check_classification_targets,
    check_is_fitted,
    coefficients,
    columns,
    count,
    inner,
    is_shared,
    plain_shared,
    rows_of,
    unwrap_shared,
    validate_data,
)

# Inverses of secret symmetric matrices by the iteration of Newton and Schulz: products alone, and no division.
#
# Z <- Z (2 I - H Z) doubles the correct bits of Z = H^-1 in each step. From Z = c I with c <= 1 / |H|, an eigenvalue l
# of H becomes (1 - (1 - c l)^(2^k)) / l after k steps. That is never more than 1 / l, so a step of descent by Z is
# never too long, and never more than 2^k c, so Z stays in the range of the ring whatever H is. Eigenvalues below 2^-k
# |H| are not inverted but damped: descent is slow there and not wrong. Source: Schulz, "Iterative Berechnung der
# reziproken Matrix", 1933; Ben-Israel and Cohen, "On iterative computation of generalized inverses", 1966.


H_BITS, Z_BITS = 26, 20
RESOLVED = 13
"""Eigenvalues down to 2^-13 of the largest possible are inverted: Z is below 2^13."""


def steps_for(size: int) -> int:
    """The number of steps from Z = I / size that invert eigenvalues from 2^-13 on, for a matrix of trace `size`."""
    return RESOLVED + (size - 1).bit_length()


def start_inverse(context: Context, h: SharedTensor) -> SharedTensor:
    """c I for a matrix of trace at most its size. No message."""
    size = h.shares.shape[-1]
    eye = torch.eye(size, dtype=torch.int64, device=context.session.device) << (Z_BITS - (size - 1).bit_length())
    return h.like(context.backend.embedded(eye), Z_BITS)


def invert_by_newton(context: Context, h: SharedTensor, z: SharedTensor, steps: int) -> SharedTensor:
    """Z after `steps` steps. Each: rounds 12, two products of size^3 and two roundings of size^2 elements.

    Args:
        h: [p, p] at 26 fraction bits, of entries below 1 in magnitude.
        z: [p, p] at 20.
    """
    twice = h.like(context.backend.embedded(torch.eye(h.shares.shape[-1], dtype=torch.int64) << (H_BITS + 1)), H_BITS)
    for _ in range(steps):
        z = product(context, matmul, z, minus(context, twice, product(context, matmul, h, z, H_BITS)), Z_BITS)
    return z


# Minima of penalised losses on shares: Newton's steps in secret, and a certificate that the gradient is small.
#
# Both losses have the gradient Xs^T r / N + q v in standardised columns (`base.columns`), r = prediction - y. A round
# is three steps of descent with momentum by Z, nearly the inverse of the curvature; logistic regression then updates Z
# to the curvature at its point. It begins with a bound of every curvature, Xs^T Xs / 4 N + q (Boehning and Lindsay,
# "Monotonicity of quadratic-approximation algorithms", 1988), and computes each inverse from the one before, which is
# near (`invert_by_newton`).
#
# The number of rounds is public and does not depend on the data, so nobody learns how fast the fit converged. At the
# end, the gradient at the final coefficients is computed once more with every range checked, and unless it is below
# `tol` in each coordinate, nothing is revealed. So no earlier step has to be exact, and none is checked.


INNER = 3
"""Steps of a round."""

REFRESHED = 3
"""Steps of the inverse from one curvature to the next."""

V_BITS, STATE_BITS, GRADIENT_BITS, PROBE_BITS = 26, 40, 30, 10
"""Fraction bits of coefficients as factors, of coefficients as a sum of steps, of the gradient, and of the coefficients
by which the range of predictions is checked."""


class Loss:
    """A loss of the descent.

    Attributes:
        halvings: no row's curvature is above 2^-halvings.
        bits: fraction bits of predictions z [n, 1].
    """

    halvings: int
    bits: int

    def residual(self, z: SharedTensor) -> SharedTensor:
        """prediction - y [n, 1]; every range is checked if z has a bound."""
        raise NotImplementedError

    def weights(self) -> SharedTensor | None:
        """The curvature of each row [n, 1] at the last residual, at 18 fraction bits; None if it is constant."""
        return None


def minimize(standard: Columns, loss: Loss, rounds: int, tol: float) -> SharedTensor:
    """v [p, 1] at 26 fraction bits, with a certified gradient.

    Rounds: 13 for each step of the inverse, some 28 for each step of descent with a sigmoid and 23 without.
    """
    context, p = standard.context, standard.count
    if p * 2.0 ** (standard.size + COEFFICIENT_BITS + context.frac_bits + PROBE_BITS) > 2.0 ** (HEADROOM_BITS - 1):
        raise ArgumentError(f"sums over {p} columns of so many rows leave the range; fit on fewer rows or columns")
    low = with_known_range(context, standard.xs, max(6, (39 - standard.halves) // 2))
    penalty = diagonal(context, at_scale_bits(context, standard.penalty, H_BITS))
    bound = product(context, cross_product, standard.xs, standard.xs, H_BITS, standard.halves + loss.halvings)
    h = add_known(context, bound, penalty)
    z = invert_by_newton(context, h, start_inverse(context, h), steps_for(p))
    v = standard.penalty.like(standard.penalty.shares * 0, STATE_BITS)
    for number in range(rounds):
        before = v
        for step in range(INNER):
            change, ahead = minus(context, v, before), v
            if step:  # momentum: half of the last change once more
                half = change.like(change.shares, STATE_BITS + 1)
                ahead = add_known(context, v, at_scale_bits(context, half, STATE_BITS))
            gradient = _gradient(standard, loss, at_scale_bits(context, ahead, V_BITS))
            before, v = v, minus(context, ahead, product(context, matmul, z, gradient, STATE_BITS))
        weights = loss.weights() if number + 1 < rounds else None
        if weights is not None:
            weighted = product(context, torch.mul, low, weights)
            curvature = product(context, cross_product, low, weighted, H_BITS, standard.halves)
            z = invert_by_newton(context, add_known(context, curvature, penalty), z, REFRESHED)
    v = check_below(context, at_scale_bits(context, v, V_BITS), COEFFICIENT_BITS)
    certain(context, _gradient(standard, loss, v, trusted=True), tol)
    return v


def _gradient(standard: Columns, loss: Loss, v: SharedTensor, trusted: bool = False) -> SharedTensor:
    """Xs^T r / N + q v [p, 1]. Sums over rows are in range by Cauchy's inequality: a column's squares sum up to N."""
    context = standard.context
    z = product(context, matmul, standard.xs, v)
    if trusted:
        # The sum with fewer bits cannot leave the ring, and differs from z by less than 2^12.
        most = HEADROOM_BITS - 2 - z.scale_bits
        probe = at_scale_bits(context, v.bounded(None), PROBE_BITS)
        check_below(context, product(context, matmul, standard.xs, probe), most)
        z = z.bounded(2.0 ** (z.scale_bits + most + 1))
    residual = loss.residual(at_scale_bits(context, z, loss.bits)).bounded(None)
    gradient = product(context, cross_product, standard.xs, residual, GRADIENT_BITS, standard.halves)
    return add_known(context, gradient, product(context, torch.mul, standard.penalty, v.bounded(None), GRADIENT_BITS))


# The losses of the estimators.


CURVED_BITS = 18


class Squares(Loss):
    """Half the mean of squares of X w - y. y is divided by a power of two, by its bound.

    Attributes:
        unit_bits: the binary logarithm of that power of two.
    """

    halvings = 0

    def __init__(self, standard: Columns, y: SharedTensor):
        context, self._context = standard.context, standard.context
        self.unit_bits = whole_bits(y)
        y = check_below(context, y, self.unit_bits)
        self.bits = min(context.frac_bits + 6, HEADROOM_BITS - 4 - context.frac_bits - standard.halves)
        self._room = HEADROOM_BITS - 1 - context.frac_bits - self.bits - standard.halves
        self._y = with_known_range(
            context, y.like(y.shares, y.scale_bits + self.unit_bits, dtype=torch.float32), self.bits
        )

    def residual(self, z: SharedTensor) -> SharedTensor:
        found = minus(self._context, z, self._y)
        return found if z.bound is None else check_below(self._context, found.bounded(None), self._room)


class Logistic(Loss):
    """The mean of log(1 + e^z) - y z. Labels are 0 or 1, and both occur, which is checked in secret."""

    halvings = 2

    def __init__(self, standard: Columns, y: SharedTensor):
        self._context, self.bits = standard.context, standard.context.frac_bits
        check_labels(standard.context, y)
        self._y = with_known_range(standard.context, y.like(y.shares, y.scale_bits, dtype=torch.float32), self.bits)
        self._probability: SharedTensor | None = None

    def residual(self, z: SharedTensor) -> SharedTensor:
        self._probability = at_scale_bits(self._context, z.sigmoid(), self.bits).bounded(None)
        return minus(self._context, self._probability, self._y)

    def weights(self) -> SharedTensor | None:
        p = self._probability
        if p is None:
            return None
        rest = add_known(self._context, p.like(-p.shares), 1 << p.scale_bits)
        return product(self._context, torch.mul, p, rest, CURVED_BITS)


def check_labels(context: Context, y: SharedTensor) -> None:
    """Check in secret that each label is 0 or 1 and both occur; else nothing is revealed."""
    y = check_below(context, y, 12)
    other = product(context, torch.mul, y, add_known(context, y.bounded(None), -(1 << y.scale_bits)))
    forbid(context, -context.backend.is_zero(other.shares) + 1)
    count, n = context.backend.each(_count, y.shares), y.shares.shape.numel()
    enough = context.backend.at_least(count, (1, ((n - 1) << y.scale_bits) + 1))
    forbid(context, -enough[0] + 1)
    forbid(context, enough[1])


def _count(x: Tensor) -> Tensor:
    return x.sum().reshape(1)


def _torch_dtype(dtype: np.dtype) -> torch.dtype | None:
    """torch's dtype of that name, or None."""
    try:
        return torch.from_numpy(np.zeros(1, dtype)).dtype
    except TypeError:
        return None


class _Linear(SharedEstimator):
    _fitted = ("coef_", "intercept_")
    _loss: type[Squares | Logistic]
    fit_intercept: bool
    max_iter: int
    tol: float

    def _penalty(self) -> float:
        """alpha of the penalty alpha |w|^2 / 2, which is added to the sum of the losses."""
        return 0.0

    def _check_settings(self) -> tuple[float, int]:
        """The penalty and the number of rounds. Raises ArgumentError."""
        penalty, steps = self._penalty(), count("max_iter", self.max_iter)
        if not isinstance(penalty, numbers.Real) or not isinstance(self.tol, numbers.Real):
            raise ArgumentError(f"the penalty and tol are numbers, got {penalty!r} and {self.tol!r}")
        alpha = float(penalty)
        if not 0 <= alpha <= 2.0**30 or not steps >= 1 or not 2.0**-20 <= self.tol < 1:
            raise ArgumentError(
                f"the penalty is from 0 to 2^30, max_iter from 1 and tol from 2^-20 below 1, got {alpha:g}, "
                f"{self.max_iter} and {self.tol}"
            )
        return alpha, -(-steps // INNER)

    def _fit_shared(self, x: Any, y: Any) -> None:
        alpha, rounds = self._check_settings()
        x, y = rows_of(x, y)
        with one_call(x, y) as (_, results):
            standard = columns(x, alpha, 2.0**-self._loss.halvings, bool(self.fit_intercept))
            loss = self._loss(standard, y)
            v = minimize(standard, loss, rounds, self.tol)
            w, b = coefficients(standard, v, getattr(loss, "unit_bits", 0))
            results += [w] if b is None else [w, b]
        self.coef_, self.intercept_ = w, np.zeros(1) if b is None else b
        self.n_features_in_, self.n_iter_ = x.shape[1], rounds * INNER

    def _fit_plain(self, x: np.ndarray, y: np.ndarray) -> None:
        session = Session(reference=True)
        self._fit_shared(plain_shared(session, x, "X"), plain_shared(session, y, "y"))
        self._learn()

    def _scores(self, x: Any) -> Any:
        """x w + b [n]; in shares if x or the fit is."""
        x, shared = self._rows_to_predict(x)
        if shared is None:
            return x @ np.ravel(self.coef_) + self.intercept_
        w = as_public_value(shared, self.coef_, "coef_").reshape(-1)
        b = as_public_value(shared, self.intercept_, "intercept_")
        with one_call(x, w, b) as (context, results):
            results.append(scores := as_float64(inner(context, x, w) + b))
        return scores

    def _check_plain(self, x: Any, y: Any, way: str) -> None:
        check_is_fitted(self)
        if is_shared(x) or is_shared(y) or is_shared(self.coef_):
            raise ArgumentError(f"score() takes plain data and a fit that is revealed; in shares compute {way}")

    def _reason(self) -> str:
        labels = "the labels are not 0 and 1 of both kinds, " if self._loss is Logistic else ""
        return (
            f"there is no {type(self).__name__} of this data: a value left the range, {labels}or the gradient is not "
            f"below tol = {self.tol} after max_iter = {self.max_iter} steps; scale the columns, penalise more, or take "
            f"more steps"
        )


class Ridge(RegressorMixin, _Linear):
    """Linear regression with a penalty: the least sum of squares of y - X w - b, plus alpha |w|^2.

    Args:
        alpha: the factor of the penalty.
        fit_intercept: whether b is fitted too; it is not penalised.
        max_iter: the number of steps, rounded up to a multiple of three; it is public, and there is no early stop.
        tol: the certified bound of each coordinate of the gradient of half the mean loss, for columns of unit curvature
            and y in units of its limit.

    Attributes:
        coef_, intercept_: [d] and [1]; SharedTensors after a fit on shares.

    Nobody learns anything in a fit. Error: docs/estimators.md.
    """

    _loss = Squares

    def __init__(self, alpha: float = 1.0, *, fit_intercept: bool = True, max_iter: int = 24, tol: float = 1e-5):
        self.alpha, self.fit_intercept, self.max_iter, self.tol = alpha, fit_intercept, max_iter, tol

    def _penalty(self) -> float:
        return self.alpha

    def fit(self, X: Any, y: Any) -> Any:
        """Fit X [n, d] and y [n] or [n, 1]: both in shares, or both plain.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data has no fit; on shares `revealed` raises it.
        """
        if is_shared(X) or is_shared(y):
            self._fit_shared(X, y)
            return self
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit_plain(X, y.astype(np.float64))
        return self

    def predict(self, X: Any) -> Any:
        """X w + b [n], float64: in shares if X or the fit is."""
        return self._scores(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, for plain data and a revealed fit."""
        self._check_plain(X, y, "((model.predict(X) - y) ** 2).mean()")
        return super().score(X, y, sample_weight)


class LinearRegression(Ridge):
    """Linear regression: the least sum of squares of y - X w - b. Arguments as of `Ridge`.

    With collinear columns, or fewer rows than columns, many coefficients have the least sum. The result is one of them,
    and not the shortest, as in scikit-learn. Predictions are the same on the span of the columns.
    """

    def __init__(self, *, fit_intercept: bool = True, max_iter: int = 24, tol: float = 1e-5):
        self.fit_intercept, self.max_iter, self.tol = fit_intercept, max_iter, tol

    def _penalty(self) -> float:
        return 0.0


class LogisticRegression(ClassifierMixin, _Linear):
    """Logistic regression of two classes, as scikit-learn's: the least C sum log(1 + e^(-s (x w + b))) + |w|^2 / 2.

    Args:
        C, fit_intercept: as scikit-learn's; the intercept is not penalised.
        max_iter: the number of steps, rounded up to a multiple of three; it is public, and there is no early stop.
        tol: the certified bound of each coordinate of the gradient of the mean loss, for columns of unit curvature.

    Attributes:
        classes_: the two labels; 0 and 1 of y's dtype after a fit on shares.
        coef_, intercept_: [1, d] and [1]; SharedTensors after a fit on shares.

    Nobody learns anything in a fit. Labels in shares are 0 and 1, and both must occur, which is checked in secret.
    Error: docs/estimators.md.
    """

    _loss = Logistic

    def __init__(self, C: float = 1.0, *, fit_intercept: bool = True, max_iter: int = 24, tol: float = 1e-4):
        self.C, self.fit_intercept, self.max_iter, self.tol = C, fit_intercept, max_iter, tol

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _penalty(self) -> float:
        if not isinstance(self.C, numbers.Real) or not self.C > 0:
            raise ArgumentError(f"C must be above 0, got {self.C}")
        return 1 / self.C

    def fit(self, X: Any, y: Any) -> Any:
        """Fit X [n, d] and y [n] or [n, 1]: both in shares, or both plain.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data has no fit; on shares `revealed` raises it.
        """
        if is_shared(X) or is_shared(y):
            self._fit_shared(X, y)
            labels = np.array([0, 1], dtype=torch.empty(0, dtype=unwrap_shared(y).dtype).numpy().dtype)
            self.classes_, self.coef_ = labels, self.coef_.reshape(1, -1)
            return self
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        if len(classes) != 2:
            raise ArgumentError(
                f"Only binary classification is supported: there have to be 2 classes, and y has {len(classes)}"
                f"{' (one class)' if len(classes) == 1 else ''}. The type of the target is not binary"
            )
        self._fit_plain(X, codes.astype(np.float64))
        self.classes_, self.coef_ = classes, np.reshape(self.coef_, (1, -1))
        return self

    def decision_function(self, X: Any) -> Any:
        """X w + b [n], float64: in shares if X or the fit is."""
        return self._scores(X)

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of the classes [n, 2], float64; in shares if X or the fit is."""
        scores = self._scores(X)
        if isinstance(scores, SharedTensor):
            positive = torch.sigmoid(scores)
            return torch.stack((1 - positive, positive), 1)
        positive = np.exp(-np.logaddexp(0, -scores))
        return np.stack((1 - positive, positive), 1)

    def predict(self, X: Any) -> Any:
        """The classes [n], in the dtype of `classes_`; in shares if X or the fit is.

        Raises:
            ArgumentError: in shares, if the classes are no numbers.
        """
        scores = self._scores(X)
        if not isinstance(scores, SharedTensor):
            return self.classes_[(scores > 0).astype(int)]
        kind = _torch_dtype(self.classes_.dtype)
        if kind is None:
            raise ArgumentError(
                f"shares are of numbers, and the classes are of {self.classes_.dtype}; decision_function(X) > 0 tells "
                f"where the second class is"
            )
        first, second = (v.item() for v in self.classes_)
        code = scores > 0
        return code if (kind, first) == (torch.bool, False) else torch.where(code, second, first).to(kind)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The fraction of correct labels, for plain data and a revealed fit."""
        self._check_plain(X, y, "(model.predict(X) == y).to(torch.float32).mean()")
        return super().score(X, y, sample_weight)
