"""k-means on shares: which row is nearest to which centre is as secret as the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..session import Session
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import whole_bits
from ..training.functions import F, torch
from ..training.scale import at
from .base import SharedEstimator, fitting, plain_shared, rows_of, secret
from .optional import ClusterMixin, check_is_fitted, check_random_state, validate_data


class KMeans(ClusterMixin, SharedEstimator):
    """k-means by Lloyd's iteration, begun as k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Args:
        n_clusters: how many. max_iter: how many iterations; public, and none is left out.
        random_state: of the numbers, known to all, by which the first centres are drawn. Which rows they hit is secret.

    Attributes:
        cluster_centers_: [k, d], a SharedTensor until `reveal`. A cluster without rows keeps its centre.
        labels_: [n]; in shares after a fit on shares, also after `reveal`: reveal them by themselves if need be.

    Nobody learns anything in a fit. Each iteration: n k distances (one round), k - 1 comparisons and k d quotients
    (error 4e-6 + 2e-6 of the result). Of two centres that are equally far, the first takes the row.
    """

    _fitted = ("cluster_centers_",)

    def __init__(self, n_clusters: int = 8, *, max_iter: int = 10, random_state: Any = None):
        self.n_clusters, self.max_iter, self.random_state = n_clusters, max_iter, random_state

    def fit(self, X: Any, y: Any = None) -> Any:
        """X [n, d], in shares or plain; y is not looked at.

        Raises:
            ArgumentError, ShapeError: before anything is sent.
            FixedPointRangeError: squared distances would leave the ring; name a smaller limit for X.
            FitError: plain data that left the range; on shares `reveal` raises it.
        """
        if secret(X):
            self._fit_shared(X)
            return self
        X = validate_data(self, X, dtype=np.float64)
        session = Session(reference=True)
        self._fit_shared(plain_shared(session, X, "X"))
        self.reveal()
        self.labels_ = self._nearest(X)
        return self

    def predict(self, X: Any) -> Any:
        """The nearest centre's number [n]: in shares if X or the fit is."""
        check_is_fitted(self)
        if not secret(X):
            X = validate_data(self, X, reset=False, dtype=np.float64)
            if not isinstance(self.cluster_centers_, SharedTensor):
                return self._nearest(X)
            return _far(torch.from_numpy(X).float(), self.cluster_centers_).argmin(1)
        x, _ = rows_of(X)
        if x.shape[1] != self.n_features_in_:
            raise ArgumentError(f"X has {x.shape[1]} features, and the fit was of {self.n_features_in_}")
        centres = self.cluster_centers_
        centres = centres if isinstance(centres, SharedTensor) else torch.from_numpy(centres).float()
        return _far(x, centres).argmin(1)

    def _nearest(self, x: np.ndarray) -> np.ndarray:
        return ((x[:, None] - self.cluster_centers_) ** 2).sum(-1).argmin(1)

    def _fit_shared(self, x: Any) -> None:
        x, _ = rows_of(x)
        k = self.n_clusters
        if not 1 <= k <= x.shape[0] or not self.max_iter >= 1:
            raise ArgumentError(
                f"n_clusters is from 1 to the number of rows, {x.shape[0]}, and max_iter from 1, got {k} and "
                f"{self.max_iter}"
            )
        numbers = check_random_state(self.random_state).uniform(size=k)
        with fitting(x) as (context, made):
            x = at(context, x, context.frac_bits)
            centres = _begun(context, x, numbers)
            for _ in range(self.max_iter):
                centres = _moved(context, x, centres, _codes(x, centres))
            made += [centres, labels := _far(x, centres).argmin(1)]
        self.cluster_centers_, self.labels_ = centres, labels
        self.n_features_in_, self.n_iter_ = x.shape[1], self.max_iter


def _far(x: Any, centres: Any) -> Any:
    """[n, k]: the squared distance of a row to a centre, less the row's own square."""
    return (centres * centres).sum(1) - 2 * torch.matmul(x, centres.T)


def _codes(x: SharedTensor, centres: SharedTensor) -> SharedTensor:
    """[n, k]: one at the nearest centre, zeros elsewhere."""
    return F.one_hot(_far(x, centres).argmin(1), centres.shape[0])


def _moved(context: Context, x: SharedTensor, centres: SharedTensor, codes: SharedTensor) -> SharedTensor:
    """The mean of each cluster's rows. Sums and counts are both taken in units of a power of two that fits sums."""
    counts, sums = codes.sum(0), torch.matmul(codes.T.to(torch.float32), x)
    unit = max(0, math.ceil(math.log2(x.shape[0])) + whole_bits(x) - context.scheme.activation_bits)
    empty = counts < 1
    filled: Any = (counts + empty).to(torch.float32)
    above, below = (v.like(v.shares, v.scale_bits + unit, v.bound) for v in (sums, filled))
    return at(context, torch.where(empty.unsqueeze(1), centres, above / below.unsqueeze(1)), context.frac_bits)


def _begun(context: Context, x: SharedTensor, numbers: np.ndarray) -> SharedTensor:
    """k-means++: each next centre is a row, drawn by its squared distance to the nearest so far."""
    n, halves = x.shape[0], (x.shape[0] - 1).bit_length()
    found, distance = [x[int(numbers[0] * n)]], None
    for number in numbers[1:]:
        gone = x - found[-1]
        new = (gone * gone).sum(1)
        distance = new if distance is None else torch.minimum(distance, new)
        part = at(context, distance, context.frac_bits)
        total = torch.cumsum(part.like(part.shares, part.scale_bits + halves, part.bound), 0)
        reached = (total >= total[-1] * float(number)).to(torch.float32)
        code = reached - F.pad(reached, (1, 0))[:-1]
        found.append(torch.matmul(code, x))
    return at(context, torch.stack(found), context.frac_bits)
