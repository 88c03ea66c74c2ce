"""Linear models on shares: least squares with and without a penalty, and logistic regression."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError
from ..session import Session
from ..tensor import SharedTensor
from .base import SharedEstimator, beside, count, fitting, plain_shared, real, rows_of, secret, shared, wide
from .descent import INNER, minimised
from .losses import Logistic, Squares
from .optional import ClassifierMixin, RegressorMixin, check_classification_targets, check_is_fitted, validate_data
from .standard import coefficients, columns, inner


def _torch_dtype(dtype: np.dtype) -> torch.dtype | None:
    """torch's dtype of that name; None where it has none."""
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
        """alpha, of alpha |w|^2 / 2 beside the sum of the losses."""
        return 0.0

    def _checked(self) -> tuple[float, int]:
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
        alpha, rounds = self._checked()
        x, y = rows_of(x, y)
        with fitting(x, y) as (_, made):
            standard = columns(x, alpha, 2.0**-self._loss.halvings, bool(self.fit_intercept))
            loss = self._loss(standard, y)
            v = minimised(standard, loss, rounds, self.tol)
            w, b = coefficients(standard, v, getattr(loss, "unit_bits", 0))
            made += [w] if b is None else [w, b]
        self.coef_, self.intercept_ = w, np.zeros(1) if b is None else b
        self.n_features_in_, self.n_iter_ = x.shape[1], rounds * INNER

    def _fit_plain(self, x: np.ndarray, y: np.ndarray) -> None:
        session = Session(reference=True)
        self._fit_shared(plain_shared(session, x, "X"), plain_shared(session, y, "y"))
        self._learn()

    def _scores(self, x: Any) -> Any:
        """x w + b [n]; in shares if x or the fit is."""
        check_is_fitted(self)
        if not secret(x):
            x = validate_data(self, x, reset=False, dtype=np.float64)
            if not isinstance(self.coef_, SharedTensor):
                return x @ np.ravel(self.coef_) + self.intercept_
        elif shared(x).dim() != 2 or shared(x).shape[1] != self.n_features_in_:
            raise ArgumentError(f"X has {tuple(x.shape)}, and the fit was of {self.n_features_in_} features")
        given = real(shared(x)) if secret(x) else x
        one = given if isinstance(given, SharedTensor) else self.coef_
        x, w = beside(one, given, "X"), beside(one, self.coef_, "coef_").reshape(-1)
        b = beside(one, self.intercept_, "intercept_")
        with fitting(x, w, b) as (context, made):
            scores = inner(context, x, w) + b
            made.append(scores := wide(scores))
        return scores

    def _plain(self, x: Any, y: Any, way: str) -> None:
        check_is_fitted(self)
        if secret(x) or secret(y) or secret(self.coef_):
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
        alpha: of the penalty. fit_intercept: whether b is fitted too; it is not penalised.
        max_iter: steps of descent, rounded up to a multiple of three; public, and none is left out.
        tol: what each coordinate of the gradient of half the mean loss is certified to be below, for columns of unit
            curvature and y in units of its limit.

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
        """X [n, d] and y [n] or [n, 1]: both in shares, or both plain.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data without a fit; on shares `revealed` raises it.
        """
        if secret(X) or secret(y):
            self._fit_shared(X, y)
            return self
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit_plain(X, y.astype(np.float64))
        return self

    def predict(self, X: Any) -> Any:
        """X w + b [n], float64: in shares if X or the fit is."""
        return self._scores(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, of plain data and a fit that is revealed."""
        self._plain(X, y, "((model.predict(X) - y) ** 2).mean()")
        return super().score(X, y, sample_weight)


class LinearRegression(Ridge):
    """Linear regression: the least sum of squares of y - X w - b. Arguments as of `Ridge`.

    Of collinear columns, and where there are fewer rows than columns, many coefficients have the least sum: these are
    one of them, and not scikit-learn's, which are the shortest. Predictions are the same on what the columns span.
    """

    def __init__(self, *, fit_intercept: bool = True, max_iter: int = 24, tol: float = 1e-5):
        self.fit_intercept, self.max_iter, self.tol = fit_intercept, max_iter, tol

    def _penalty(self) -> float:
        return 0.0


class LogisticRegression(ClassifierMixin, _Linear):
    """Logistic regression of two classes, as scikit-learn's: the least C sum log(1 + e^(-s (x w + b))) + |w|^2 / 2.

    Args:
        C, fit_intercept: as scikit-learn's; the intercept is not penalised.
        max_iter: steps of descent, rounded up to a multiple of three; public, and none is left out.
        tol: what each coordinate of the gradient of the mean loss is certified to be below, for columns of unit
            curvature.

    Attributes:
        classes_: the two labels; 0 and 1 of y's dtype after a fit on shares.
        coef_, intercept_: [1, d] and [1]; SharedTensors after a fit on shares.

    Nobody learns anything in a fit. Labels in shares are 0 and 1, and both have to occur: that is checked in secret.
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
        """X [n, d] and y [n] or [n, 1]: both in shares, or both plain.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data without a fit; on shares `revealed` raises it.
        """
        if secret(X) or secret(y):
            self._fit_shared(X, y)
            labels = np.array([0, 1], dtype=torch.empty(0, dtype=shared(y).dtype).numpy().dtype)
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
        """[n, 2], float64, of the classes; in shares if X or the fit is."""
        scores = self._scores(X)
        if isinstance(scores, SharedTensor):
            positive = torch.sigmoid(scores)
            return torch.stack((1 - positive, positive), 1)
        positive = np.exp(-np.logaddexp(0, -scores))
        return np.stack((1 - positive, positive), 1)

    def predict(self, X: Any) -> Any:
        """The classes [n], in the dtype of `classes_`; in shares if X or the fit is.

        Raises:
            ArgumentError: in shares, of classes that are no numbers.
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
        """The part of labels that are right, of plain data and a fit that is revealed."""
        self._plain(X, y, "(model.predict(X) == y).to(torch.float32).mean()")
        return super().score(X, y, sample_weight)
