"""Parts of every estimator: arguments in shares or as plain arrays, standardised columns, and the fit's certificate.

This is the only module that imports scikit-learn; the estimators take its base classes and checks from here.
"""

from __future__ import annotations

import copy
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..deprecation import deprecate
from ..errors import ArgumentError, FixedPointRangeError, RangeExceededError, SectorchError, ShapeError
from ..ops.common import require, round_scale
from ..optional_deps import required_imports
from ..ring import HEADROOM_BITS, encode
from ..session import Session
from ..tensor import SharedTensor, share_tensor
from ..tensor.shared import refuse_infinite
from ..tensor.table import Context
from ..training.fixed_point import (
    at_scale_bits,
    check_below,
    context_of,
    matmul,
    pad_with_number,
    product,
    square_shares,
    sum_rows,
    times,
    whole_bits,
    with_known_range,
)
from ..training.tensor import DifferentiableTensor


class FitError(RangeExceededError):
    """There is no fit: its gradient is not certified to be small, or one of its values left the range.

    The message carries no value of the data or of the fit.

    Example:
        there is no LogisticRegression of this data: a value left the range, the labels are not 0 and 1 of both kinds,
        or the gradient is not below tol = 0.0001 after max_iter = 24 steps; scale the columns, penalise more, or take
        more steps

    What to do:
        Divide columns so that they are below 4,096 and their deviations below 1,000; take a smaller C or a larger alpha
        where columns are collinear or classes separable; raise max_iter; look at labels.
    """


with required_imports("sectorch.estimators", "scikit-learn", ArgumentError, "for 1.6 or newer", extra="estimators"):
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "ClusterMixin",
    "RegressorMixin",
    "check_classification_targets",
    "check_is_fitted",
    "check_random_state",
    "validate_data",
]


class SharedEstimator(BaseEstimator):
    """A scikit-learn estimator of data in shares.

    After a fit on SharedTensors, its attributes and predictions are SharedTensors, which nobody knows; `revealed` gives
    an ordinary estimator to the named parties. On plain arrays it computes the same numbers, by the reference of the
    protocols (`Session(reference=True)`). Predictions have the same shape and dtype on arrays and on shares.
    """

    n_features_in_: int
    _fitted: tuple[str, ...] = ()
    """The attributes that are secret after a fit on shares."""

    def revealed(self, to: Any = None) -> Any:
        """An estimator with the same fit in plain, which Q learns, or the named parties (`SharedTensor.reveal`).

        This estimator is not changed. In a process of other parties the estimator stays in shares.

        Raises:
            FitError: there is no fit; nobody learned anything else.
        """
        estimator = copy.copy(self)
        estimator._learn(to)
        return estimator

    def reveal(self, to: Any = None) -> Any:
        """The deprecated form of `revealed`: changes this estimator, and returns it.

        Raises:
            FitError: as of `revealed`.

        Warns:
            DeprecationWarning: always.
        """
        deprecate("estimator.reveal(), which changes the estimator,", "estimator = estimator.revealed()")
        self._learn(to)
        return self

    def _learn(self, to: Any = None) -> None:
        """Replace the attributes in shares by their revealed values."""
        try:
            secrets = {name: getattr(self, name, None) for name in self._fitted}
            plain = {name: as_float64(v).reveal(to) for name, v in secrets.items() if isinstance(v, SharedTensor)}
        except RangeExceededError:
            raise FitError(self._reason()) from None
        learned = {
            name: value for name, value in plain.items() if not value.is_meta
        }  # others, elsewhere, learn nothing
        vars(self).update({name: value.numpy().astype(np.float64) for name, value in learned.items()})

    def _reason(self) -> str:
        return (
            f"there is no {type(self).__name__} of this data: a value of X is not below the activation limit (4,096 "
            f"with 20 fraction bits); divide all columns by one number that brings them below it"
        )

    def __sklearn_is_fitted__(self) -> bool:
        return all(hasattr(self, name) for name in self._fitted)

    def _rows_to_predict(self, X: Any) -> tuple[Any, SharedTensor | None]:
        """The rows of a prediction, and a tensor in shares in whose session it is computed.

        If neither X nor the fit is in shares, the rows are an array and the tensor is None.
        """
        check_is_fitted(self)
        fit = getattr(self, self._fitted[0])
        if not is_shared(X):
            X = validate_data(self, X, reset=False, dtype=np.float64)
            return (as_public_value(fit, X, "X"), fit) if isinstance(fit, SharedTensor) else (X, None)
        x = unwrap_shared(X)
        if x.dim() != 2 or x.shape[1] != self.n_features_in_:
            raise ArgumentError(f"X has {tuple(X.shape)}, and the fit was of {self.n_features_in_} features")
        return as_float32(x), as_float32(x)


def is_shared(x: Any) -> bool:
    return isinstance(x, (SharedTensor, DifferentiableTensor))


def unwrap_shared(x: Any) -> SharedTensor:
    """The SharedTensor of a value in shares."""
    return x.as_shared() if isinstance(x, DifferentiableTensor) else x


def as_float32(x: SharedTensor) -> SharedTensor:
    """The same secret as a float32 tensor."""
    refuse_infinite(x, "an estimator")
    return x.like(x.shares, bound=x.bound, dtype=torch.float32)


def as_float64(x: SharedTensor) -> SharedTensor:
    """The same secret as a float64 tensor, which holds every fixed-point number: the dtype of results on plain
    arrays."""
    return x.like(x.shares, bound=x.bound, dtype=torch.float64)


def rows_of(x: Any, y: Any = None) -> tuple[SharedTensor, SharedTensor | None]:
    """x [n, d] and y [n, 1] as float32 SharedTensors.

    Raises:
        ArgumentError: one of them is plain. Every party would know it, so its owner has to share it.
        ShapeError: other shapes.
    """
    for name, value in (("X", x), ("y", y)):
        if value is not None and not is_shared(value):
            raise ArgumentError(
                f"{name} is a {type(value).__name__} and the other of X and y is in shares; share it: "
                f"sectorch.share({name}, session=..., owner=...)"
            )
        if value is not None and unwrap_shared(value).counting is not None:
            raise ArgumentError(
                f"{name} is of a filtered table, and a fit takes all its rows: table.filled(name) gives them"
            )
    x = as_float32(unwrap_shared(x))
    if x.dim() != 2 or not min(x.shape):
        raise ShapeError(f"X in shares is [samples, features], got {tuple(x.shape)}")
    if y is None:
        return x, None
    y = as_float32(unwrap_shared(y))
    if y.numel() != x.shape[0] or y.dim() > 2 or (y.dim() == 2 and y.shape[1] != 1):
        raise ShapeError(f"y in shares is [samples] or [samples, 1] for X of {x.shape[0]} rows, got {tuple(y.shape)}")
    if x.session is not y.session or x.party != y.party or x.scheme != y.scheme:
        raise ArgumentError("X and y are of two sessions, or of two number formats; share them in one")
    return x, y.reshape(-1, 1)


def count(what: str, value: Any) -> int:
    """A public whole number.

    Raises:
        ArgumentError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{what} is a whole number, got {value!r}")
    return int(value)


def as_public_value(x: SharedTensor, value: Any, what: str) -> SharedTensor:
    """A plain array as a value of x's session, which every party knows. No message.

    Raises:
        FixedPointRangeError: an entry reaches the activation limit.
    """
    if isinstance(value, SharedTensor):
        return value
    context, plain = Context(x.session, x.party, x.scheme), torch.from_numpy(np.array(value, dtype=np.float64))
    limit = x.scheme.activation_limit
    if not bool((plain.abs() < limit).all()):
        raise FixedPointRangeError(f"{what} has to be below {limit:g} in magnitude; scale it and the data down")
    encoded = encode(plain, context.frac_bits)
    with x.session.operation(x.party):
        shares = context.backend.embedded(encoded.to(x.session.device))
    largest = float(encoded.abs().max()) if encoded.numel() else 0.0
    return x.like(shares, context.frac_bits, largest, dtype=torch.float32)


def plain_shared(session: Session, x: np.ndarray, what: str) -> SharedTensor:
    """A plain array as a tensor of the reference's session, with the next power of two as its limit."""
    largest = float(np.abs(x).max()) if x.size else 0.0
    limit = 2.0 ** (math.floor(math.log2(largest)) + 1) if largest > 0 else 1.0
    try:
        return share_tensor(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)), session=session, limit=limit)
    except SectorchError as error:
        raise type(error)(f"{what}: {error}") from None


# Columns in shares, centred and scaled to unit curvature in secret; and the coefficients of the original columns.


FLOOR = 2.0**-14
"""A summand of each column's curvature, so that no column is scaled up by more than 2^7."""

COEFFICIENT_BITS = 8
"""A coefficient of a scaled column is below 2^8, which is checked."""

MOST_HALVES = 19
"""With more than 2^19 rows the products of columns would leave the ring."""


@dataclass
class Columns:
    """x = mean + xs / scale, with the curvature of the penalised loss near one along each column.

    Attributes:
        xs: [n, p] at f fraction bits, each element below 2^size in magnitude; with an intercept the last column is a
            public constant.
        penalty: [p, 1] at 30 fraction bits, the penalty's part of the curvature.
        means, scale: [d] at f fraction bits.
        halves: sums over rows are divided by 2^halves, the next power of two from n on.
    """

    context: Context
    xs: SharedTensor
    penalty: SharedTensor
    means: SharedTensor | None
    scale: SharedTensor
    unit: float
    size: int
    halves: int

    @property
    def count(self) -> int:
        """The number of columns, with that of the intercept."""
        return self.xs.shares.shape[1]


def columns(x: SharedTensor, alpha: float, kappa: float, intercept: bool) -> Columns:
    """Standardised columns of x [n, d] for a loss of curvature at most kappa in each row, and penalty alpha |w|^2 / 2.

    Rounds some 50: means, roots, and one product of n d elements, which is rounded once.

    Raises:
        ArgumentError: more than 2^19 rows, whose sums would leave the ring.
    """
    context, f = context_of(x), x.scheme.frac_bits
    n, halves = x.shares.shape[0], halves_of(x)
    x, means, most = center_columns(context, x, intercept)
    coarse = round_scale(context, x, min(f, (HEADROOM_BITS - 1 - halves) // 2 - most))
    curvature = at_scale_bits(context, sum_rows(context, square_shares(context, coarse), halves), f)
    curvature = curvature.bounded(2.0 ** (2 * most + 1 + f)) * kappa + (alpha / 2**halves + FLOOR)
    scale = with_known_range(context, curvature.rsqrt(), f)
    scales = scale.like(context.backend.moved(lambda v: v.expand(n, -1), scale.shares))
    scaled = product(context, torch.mul, x, scales, f)
    part = at_scale_bits(
        context, square_shares(context, times(context, scale, math.sqrt(alpha / 2**halves), f + 6)), 30
    )
    unit = 1 / math.sqrt(kappa)
    size = halves // 2 + 3
    if intercept:
        scaled, part = pad_with_number(context, scaled, unit), pad_with_number(context, part, 0.0)
    part = part.like(context.backend.moved(_upright, part.shares))
    return Columns(context, scaled, part, means, scale, unit, size, halves)


def halves_of(x: SharedTensor) -> int:
    """h, for the least 2^h from the number of rows on.

    Raises:
        ArgumentError: more than 2^19 rows, whose sums would leave the ring.
    """
    n = x.shares.shape[0]
    if (n - 1).bit_length() > MOST_HALVES:
        raise ArgumentError(f"a fit takes up to {1 << MOST_HALVES} rows, got {n}; fit on some of them")
    return (n - 1).bit_length()


def center_columns(
    context: Context, x: SharedTensor, intercept: bool = True
) -> tuple[SharedTensor, SharedTensor | None, int]:
    """x less the means of its columns, the means, and the number of bits before the binary point; at f fraction
    bits."""
    most = whole_bits(x)
    x = at_scale_bits(context, check_below(context, x, most), context.frac_bits)
    if not intercept:
        return x.bounded(None), None, most
    means = _means(context, x, x.shares.shape[0])
    return (x - means).bounded(None), means, most + 1


def _means(context: Context, x: SharedTensor, n: int) -> SharedTensor:
    """The mean of each column, rounded to f bits.

    The remainder of the division is divided once more, so that the mean of equal entries is exactly their value, and a
    constant column becomes zero.
    """
    f = x.scale_bits
    mean, total = at_scale_bits(context, x.mean(0), f), x.sum(0)
    rest = x.like(context.backend.each(torch.sub, total.shares, (mean.shares * n)), f)
    return at_scale_bits(context, mean + times(context, rest.bounded(n * 2.0**16), 1 / n, f), f)


def _upright(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def coefficients(standard: Columns, v: SharedTensor, unit_bits: int = 0) -> tuple:
    """The coefficients [d] and intercept [1] of the original columns, at f fraction bits.

    A coefficient beyond the activation limit is a range error, in secret.

    Args:
        v: the coefficients of the standardised columns, in units of 2^unit_bits.
    """
    context, f = standard.context, standard.context.frac_bits
    most = context.scheme.activation_bits
    v = v[:, 0]
    own = v if standard.means is None else v[:-1]
    w = product(context, torch.mul, standard.scale, own.bounded(None))
    w = w.like(w.shares, w.scale_bits - unit_bits)
    w = check_below(context, round_scale(context, w, f), most)
    if standard.means is None:
        return w, None
    last = v[-1:].bounded(None)
    last = last.like(last.shares, last.scale_bits - unit_bits - round(math.log2(standard.unit)))
    last = check_below(context, round_scale(context, last, f), most)
    return w, at_scale_bits(context, last - inner(context, standard.means.reshape(1, -1), w), f)


def inner(context: Context, x: SharedTensor, w: SharedTensor) -> SharedTensor:
    """x [n, d] times w [d]: the operands below the activation limit and the result below twice that, checked in secret.

    The terms of a sum may be far larger. So the check first takes a product with fewer bits of w, which cannot leave
    the ring, and differs from the result by less than 2^18 for 2^12 columns.
    """
    f, most, d = context.frac_bits, context.scheme.activation_bits, x.shares.shape[1]
    x, w = (at_scale_bits(context, check_below(context, v, most), f).bounded(None) for v in (x, w))
    column = w.like(context.backend.moved(_upright, w.shares))
    few = min(f, HEADROOM_BITS - 1 - 2 * most - f - (d - 1).bit_length())
    check_below(context, product(context, matmul, x, at_scale_bits(context, column, few)), HEADROOM_BITS - 3 - 2 * f)
    found = at_scale_bits(context, product(context, matmul, x, column), f)
    return check_below(context, found.like(context.backend.moved(_row, found.shares)), most + 1)


def _row(x: Tensor) -> Tensor:
    return x[:, 0]


def certain(context: Context, gradient: SharedTensor, tol: float) -> None:
    """Check in secret that the gradient is below tol in each coordinate; else nothing of the fit is revealed."""
    gradient = gradient.bounded(2.0**62)
    require(context, gradient, low=-tol, high=tol)
