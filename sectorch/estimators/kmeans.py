"""k-means on shares: which row is nearest to which centre is as secret as the rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ArgumentError
from ..ops.common import round_scale
from ..ring import HEADROOM_BITS
from ..session import Session
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.fixed_point import (
    at_scale_bits,
    check_below,
    matmul,
    minus,
    product,
    square_shares,
    whole_bits,
    with_known_range,
)
from ..training.operations import F, torch
from .base import (
    FLOOR,
    ClusterMixin,
    SharedEstimator,
    as_float32,
    as_public_value,
    center_columns,
    check_is_fitted,
    check_random_state,
    count,
    halves_of,
    is_shared,
    one_fit,
    plain_shared,
    rows_of,
    unwrap_shared,
    validate_data,
)

ROOT_BITS = 20
"""Square roots are taken of numbers below 2^this."""


class KMeans(ClusterMixin, SharedEstimator):
    """k-means by Lloyd's iteration, begun as k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Args:
        n_clusters: how many. max_iter: how many iterations; public, and none is left out.
        random_state: of the numbers, known to all, by which the first centres are drawn. Which rows they hit is secret.

    Attributes:
        cluster_centers_: [k, d], a SharedTensor after a fit on shares. A cluster without rows keeps its centre.
        labels_: [n]; in shares after a fit on shares, also those of `revealed()`: reveal them by themselves if need be.

    Nobody learns anything in a fit. Each iteration: n k distances (one round), k - 1 comparisons and k d quotients
    (error 4e-6 + 2e-6 of the result). Distances are those of rows that were centred and brought to mean square 1 in
    secret, rounded to 20 bits (fewer of more than 2^15 numbers). Of two centres that are equally far, the first takes
    the row.
    """

    _fitted = ("cluster_centers_",)

    def __init__(self, n_clusters: int = 8, *, max_iter: int = 10, random_state: Any = None):
        self.n_clusters, self.max_iter, self.random_state = n_clusters, max_iter, random_state

    def fit(self, X: Any, y: Any = None) -> Any:
        """X [n, d], in shares or plain; y is not looked at.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data that left the range; on shares `revealed` raises it.
        """
        if is_shared(X):
            self._fit_shared(X)
            return self
        X = validate_data(self, X, dtype=np.float64)
        session = Session(reference=True)
        self._fit_shared(plain_shared(session, X, "X"))
        self._learn()
        self.labels_ = self._nearest(X)
        return self

    def predict(self, X: Any) -> Any:
        """The nearest centre's number [n]: in shares if X or the fit is."""
        check_is_fitted(self)
        if not is_shared(X):
            X = validate_data(self, X, reset=False, dtype=np.float64)
            if not isinstance(self.cluster_centers_, SharedTensor):
                return self._nearest(X)
        elif unwrap_shared(X).dim() != 2 or unwrap_shared(X).shape[1] != self.n_features_in_:
            raise ArgumentError(f"X has {tuple(X.shape)}, and the fit was of {self.n_features_in_} features")
        given = as_float32(unwrap_shared(X)) if is_shared(X) else X
        one = given if isinstance(given, SharedTensor) else self.cluster_centers_
        x, centres = as_public_value(one, given, "X"), as_public_value(one, self.cluster_centers_, "cluster_centers_")
        with one_fit(x, centres) as (context, made):
            most = max(whole_bits(v) for v in (x, centres))
            x, centres = (
                at_scale_bits(context, check_below(context, v, most), context.frac_bits) for v in (x, centres)
            )
            bits = (HEADROOM_BITS - 3 - (x.shape[1] - 1).bit_length()) // 2 - most
            labels: Any = _far(context, *(round_scale(context, v, bits) for v in (x, centres))).argmin(1)
            made.append(labels)
        return labels

    def _nearest(self, x: np.ndarray) -> np.ndarray:
        return ((x[:, None] - self.cluster_centers_) ** 2).sum(-1).argmin(1)

    def _fit_shared(self, x: Any) -> None:
        x, _ = rows_of(x)
        k, steps = count("n_clusters", self.n_clusters), count("max_iter", self.max_iter)
        if not 1 <= k <= x.shape[0] or not steps >= 1:
            raise ArgumentError(
                f"n_clusters is from 1 to the number of rows, {x.shape[0]}, and max_iter from 1, got {k} and "
                f"{self.max_iter}"
            )
        numbers = check_random_state(self.random_state).uniform(size=k)
        with one_fit(x) as (context, made):
            unit = _Unit(context, x)
            x = at_scale_bits(context, check_below(context, x, whole_bits(x)), context.frac_bits)
            centres = _begun(unit, x, numbers)
            for _ in range(steps):
                centres = _moved(context, x, centres, F.one_hot(unit.nearest(centres), k))
            made += [centres, labels := unit.nearest(centres)]
        self.cluster_centers_, self.labels_ = centres, labels
        self.n_features_in_, self.n_iter_ = x.shape[1], self.max_iter


class _Unit:
    """Rows that are centred and scaled by one secret number, so that their mean square is 1 in whatever unit they were.

    Attributes:
        xs: [n, d] at `bits` fraction bits. Squared distances of its rows are below 2^room.
    """

    def __init__(self, context: Context, x: SharedTensor):
        self.context, halves, width = context, halves_of(x), (x.shape[1] - 1).bit_length()
        self.room = halves + width + 2
        self.bits = min(context.frac_bits, (HEADROOM_BITS - 1 - self.room) // 2)
        x, self._means, most = center_columns(context, x)
        coarse = round_scale(context, x, min(context.frac_bits, (HEADROOM_BITS - 1 - halves - width) // 2 - most))
        square = square_shares(context, coarse)
        square = square.like(context.backend.each(_sum, square.shares), square.scale_bits + halves + width)
        square = at_scale_bits(context, square, context.frac_bits)
        shift = max(0, most - ROOT_BITS // 2)  # of what a root is taken is below 2^ROOT_BITS
        square = square.like(square.shares, square.scale_bits + 2 * shift, 2.0 ** (2 * most + 1 + context.frac_bits))
        scale = with_known_range(context, torch.rsqrt(square + FLOOR), context.frac_bits)
        self._scale = scale.like(scale.shares, scale.scale_bits + shift)
        self.xs = self.of(x)

    def of(self, x: SharedTensor) -> SharedTensor:
        """x, which is centred, in this unit."""
        return product(self.context, _times, x.bounded(None), self._scale, self.bits)

    def nearest(self, centres: SharedTensor) -> Any:
        """[n]: the number of the nearest centre."""
        return _far(self.context, self.xs, self.of(centres - self._means)).argmin(1)


def _sum(x: Tensor) -> Tensor:
    return x.sum()


def _times(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _crossed(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x, y.mT.contiguous())


def _apart(squares: Tensor, products: Tensor) -> Tensor:
    return squares.sum(1) - 2 * products


def _far(context: Context, x: SharedTensor, centres: SharedTensor) -> SharedTensor:
    """[n, k]: the squared distance of a row to a centre, less the row's own square; the caller vouches for it."""
    squares, products = square_shares(context, centres), product(context, _crossed, x, centres)
    return products.like(context.backend.each(_apart, squares.shares, products.shares), products.scale_bits)


def _moved(context: Context, x: SharedTensor, centres: SharedTensor, codes: SharedTensor) -> SharedTensor:
    """The mean of each cluster's rows. Sums and counts are both taken in units of a power of two that fits sums."""
    counts, sums = codes.sum(0), torch.matmul(codes.T.to(torch.float32), x)
    unit = max(0, math.ceil(math.log2(x.shape[0])) + whole_bits(x) - context.scheme.activation_bits)
    empty = counts < 1
    filled: Any = (counts + empty).to(torch.float32)
    above, below = (v.like(v.shares, v.scale_bits + unit, v.bound) for v in (sums, filled))
    return at_scale_bits(
        context, torch.where(empty.unsqueeze(1), centres, above / below.unsqueeze(1)), context.frac_bits
    )


def _begun(unit: _Unit, x: SharedTensor, numbers: np.ndarray) -> SharedTensor:
    """k-means++: each next centre is a row, drawn by its squared distance to the nearest so far."""
    context, xs = unit.context, unit.xs
    n, halves = x.shape[0], (x.shape[0] - 1).bit_length()
    last = int(numbers[0] * n)
    found, own, distance = [x[last]], xs[last], None
    for number in numbers[1:]:
        square = square_shares(context, minus(context, xs, own))
        more = max(0, unit.room - context.scheme.activation_bits)
        new = square.like(context.backend.each(partial(torch.sum, dim=1), square.shares), square.scale_bits + more,
                          2.0 ** (unit.room + square.scale_bits))  # fmt: skip
        distance = new if distance is None else torch.minimum(distance, new)
        part = at_scale_bits(context, distance, context.frac_bits)
        total = torch.cumsum(part.like(part.shares, part.scale_bits + halves, part.bound), 0)
        reached = (total >= total[-1] * float(number)).to(torch.float32)
        code = reached - F.pad(reached, (1, 0))[:-1]
        found.append(torch.matmul(code, x))
        own = product(context, matmul, at_scale_bits(context, code, 0).bounded(None), xs)
    return at_scale_bits(context, torch.stack(found), context.frac_bits)
