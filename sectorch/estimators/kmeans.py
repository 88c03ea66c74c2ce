"""k-means on shares: the nearest centre of each row is as secret as the rows."""

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
from ..tensor.table import Context, one_call
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
    as_public_value,
    center_columns,
    check_random_state,
    count,
    halves_of,
    is_shared,
    plain_shared,
    rows_of,
    validate_data,
)

ROOT_BITS = 20
"""Square roots are taken of numbers below 2^20."""


class KMeans(ClusterMixin, SharedEstimator):
    """k-means by Lloyd's iteration from k-means++ centres (Arthur and Vassilvitskii, SODA 2007).

    Args:
        n_clusters: the number of clusters.
        max_iter: the number of iterations; it is public, and there is no early stop.
        random_state: the seed of the public numbers by which the first centres are drawn; the chosen rows are secret.

    Attributes:
        cluster_centers_: [k, d], a SharedTensor after a fit on shares. A cluster without rows keeps its centre.
        labels_: [n], in shares after a fit on shares. `revealed()` does not reveal them.

    Nobody learns anything in a fit. Each iteration: n k distances (one round), k - 1 comparisons and k d quotients
    (error 4e-6 + 2e-6 of the result). Distances are those of rows that were centred and scaled to mean square 1 in
    secret, rounded to 20 bits (fewer for more than 2^15 numbers). If two centres are equally near, the row belongs to
    the first.
    """

    _fitted = ("cluster_centers_",)

    def __init__(self, n_clusters: int = 8, *, max_iter: int = 10, random_state: Any = None):
        self.n_clusters, self.max_iter, self.random_state = n_clusters, max_iter, random_state

    def fit(self, X: Any, y: Any = None) -> Any:
        """Fit X [n, d], in shares or plain; y is ignored.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FitError: plain data left the range; on shares `revealed` raises it.
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
        """The number of the nearest centre [n]; in shares if X or the fit is."""
        x, shared = self._rows_to_predict(X)
        if shared is None:
            return self._nearest(x)
        centres = as_public_value(shared, self.cluster_centers_, "cluster_centers_")
        with one_call(x, centres) as (context, results):
            most = max(whole_bits(v) for v in (x, centres))
            x, centres = (
                at_scale_bits(context, check_below(context, v, most), context.frac_bits) for v in (x, centres)
            )
            bits = (HEADROOM_BITS - 3 - (x.shape[1] - 1).bit_length()) // 2 - most
            labels: Any = _distances(context, *(round_scale(context, v, bits) for v in (x, centres))).argmin(1)
            results.append(labels)
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
        with one_call(x) as (context, results):
            unit = _UnitRows(context, x)
            x = at_scale_bits(context, check_below(context, x, whole_bits(x)), context.frac_bits)
            centres = _draw_centres(unit, x, numbers)
            for _ in range(steps):
                centres = _cluster_means(context, x, centres, F.one_hot(unit.nearest(centres), k))
            results += [centres, labels := unit.nearest(centres)]
        self.cluster_centers_, self.labels_ = centres, labels
        self.n_features_in_, self.n_iter_ = x.shape[1], self.max_iter


class _UnitRows:
    """Rows that are centred and scaled by one secret number to mean square 1, whatever their unit was.

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
        shift = max(0, most - ROOT_BITS // 2)  # so that the operand of the root is below 2^ROOT_BITS
        square = square.like(square.shares, square.scale_bits + 2 * shift, 2.0 ** (2 * most + 1 + context.frac_bits))
        scale = with_known_range(context, torch.rsqrt(square + FLOOR), context.frac_bits)
        self._scale = scale.like(scale.shares, scale.scale_bits + shift)
        self.xs = self._scaled(x)

    def _scaled(self, x: SharedTensor) -> SharedTensor:
        """Centred rows in this unit."""
        return product(self.context, _times, x.bounded(None), self._scale, self.bits)

    def nearest(self, centres: SharedTensor) -> Any:
        """The number of the nearest centre [n]."""
        return _distances(self.context, self.xs, self._scaled(centres - self._means)).argmin(1)


def _sum(x: Tensor) -> Tensor:
    return x.sum()


def _times(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _row_products(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x, y.mT.contiguous())


def _less_products(squares: Tensor, products: Tensor) -> Tensor:
    return squares.sum(1) - 2 * products


def _distances(context: Context, x: SharedTensor, centres: SharedTensor) -> SharedTensor:
    """The squared distance of each row to each centre, less the row's own square [n, k]; the caller knows its range."""
    squares, products = square_shares(context, centres), product(context, _row_products, x, centres)
    return products.like(context.backend.each(_less_products, squares.shares, products.shares), products.scale_bits)


def _cluster_means(context: Context, x: SharedTensor, centres: SharedTensor, codes: SharedTensor) -> SharedTensor:
    """The mean of each cluster's rows. Sums and counts are divided by one power of two, so that sums are in range."""
    counts, sums = codes.sum(0), torch.matmul(codes.T.to(torch.float32), x)
    unit = max(0, math.ceil(math.log2(x.shape[0])) + whole_bits(x) - context.scheme.activation_bits)
    empty = counts < 1
    filled: Any = (counts + empty).to(torch.float32)
    above, below = (v.like(v.shares, v.scale_bits + unit, v.bound) for v in (sums, filled))
    means = torch.where(empty.unsqueeze(1), centres, above / below.unsqueeze(1))
    return at_scale_bits(context, means, context.frac_bits)


def _draw_centres(unit: _UnitRows, x: SharedTensor, numbers: np.ndarray) -> SharedTensor:
    """k-means++: each next centre is a row, drawn with its squared distance to the nearest centre so far as weight."""
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
