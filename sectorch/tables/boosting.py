"""Gradient-boosted trees trained on shares: nobody learns a split, a leaf or whose feature it is.

The columns of rows of several owners are side by side (vertical), below each other (horizontal), or both. Each owner
puts its own numbers into bins; histograms are products of its 0/1 matrix of bins with gradients in shares
(`mpc/star/bins.py`). Gains, the best split of each node and its rows are computed in shares, level by level.

How a tree is computed:

1. Of each row the gradient g and the curvature h of the loss, both whole numbers of q fraction bits, are one ring
   element, g + 2^32 h. So one product makes both histograms.
2. A level's left children have their histograms computed; those of the right ones are the differences from the parents.
3. For each node and each candidate (a feature and a bin) G^2 / (H + l2) of both sides; a candidate with too little
   curvature on a side counts as none, and to leave the node as it is is a candidate, too.
4. The best candidate as a one-hot code, the first of equal ones. Rows whose bin is at most the chosen one go left.

Of K > 2 classes a round has K trees, one for each class, which are grown side by side in the rounds of one. A column
that may have missing values is a feature twice: with these above its last edge, so that they go right, and below all
edges. So each node learns a side for them, at twice the column's cost.

Every step is an exact function of whole numbers but the series of a sigmoid and an inverse, whose last bits are rounded
away. So results are those of the reference, and vertical and horizontal ones are equal, bit for bit.

Source: Chen and Guestrin, "XGBoost" (KDD 2016), sections 2.2 and 3.3, for gains and histograms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch

from ..backend import Value
from ..choreography import Party
from ..config import Scheme
from ..errors import ArgumentError, NonFiniteError, SessionMismatchError, ShapeError
from ..estimators.base import (
    ClassifierMixin,
    RegressorMixin,
    SharedEstimator,
    as_float32,
    check_classification_targets,
    check_is_fitted,
    count,
    is_shared,
    plain_shared,
    unwrap_shared,
    validate_data,
)
from ..mpc.star.bins import BinChoices, BinSums
from ..ops import series as series_of
from ..ops.common import exponent_map
from ..ops.indexing import leaf_of_tree
from ..ops.smooth import series
from ..ring import encode
from ..session import Session
from ..tensor import SharedTensor, share_tensor
from ..tensor.table import Context, one_call
from ..training.fixed_point import at_scale_bits, check_below, matmul
from .table import Column, OwnedTable, Table, embed_public

MOST_BINS = 256
MOST_DEPTH = 8
MOST_ROWS = 1 << 20
MOST_CLASSES = 100

HIGH = 32
"""A ring element holds a sum of gradients, and 2^32 times a sum of curvatures."""
SUM_BITS = 30
"""Sums of gradients are below 2^30 as whole numbers."""
ABOVE = 1 << 62
BELOW = -ABOVE
"""A missing value, in the first and in the second column of its feature: ring elements are below 2^62."""
WEIGHT_BITS = 10
"""A leaf is below 2^10 before it is multiplied by the learning rate, which is checked in secret."""
RATE_BITS = 16
"""Fraction bits of the learning rate."""


# Bins. An owner's numbers are ring elements of f fraction bits, as they would be shared. The k-th edge of a column is
# its least number t with at least k n / bins of all n rows at most t; a row's bin is the number of edges below its own.


@dataclass(frozen=True)
class _Part:
    """Some columns of some rows, which one party has in the clear.

    Attributes:
        columns: their places among all features. values: int64 [rows, columns]; `ABOVE` where a value is missing, and
            `BELOW` in the feature's second column; None in processes without the owner.
    """

    owner: Party
    rows: int
    columns: tuple[int, ...]
    values: torch.Tensor | None


@dataclass(frozen=True)
class _Feature:
    """Public facts of a feature: its name, its number of categories if it has some, the bits of its magnitudes, and
    whether values may be missing."""

    name: str
    categories: int | None = None
    bits: int = 0
    missing: bool = False


def _code_edges(categories: int, bins: int, unit: int) -> torch.Tensor:
    """The edges between codes 0 .. categories - 1; the last is repeated."""
    return torch.arange(bins - 1).clamp(max=max(0, categories - 2)) * unit


def _own_edges(values: torch.Tensor, bins: int) -> torch.Tensor:
    """The edges of columns of all rows, [columns, bins - 1], of the values that are not missing."""
    known = (values < ABOVE).sum(0)[:, None]
    ranks = -(-torch.arange(1, bins) * known // bins) - 1
    edges = values.T.contiguous().sort(1).values.gather(1, ranks.clamp(min=0))
    return torch.where(edges < ABOVE, edges, 0)


def _twice(features: Sequence[_Feature]) -> list[int]:
    """The columns of a fit: each feature, and those that may be missing once more."""
    return [*range(len(features)), *(i for i, feature in enumerate(features) if feature.missing)]


def _common_edges(
    parts: Sequence[tuple[_Part, list[int]]], bins: int, bits: int, missing: bool, like: SharedTensor
) -> torch.Tensor:
    """The edges of columns whose rows are of several owners, [columns, bins - 1], which these owners learn.

    They are found bit by bit. Each owner counts its rows below a candidate, the counts are added in shares, and whether
    they are enough is shown to the owners. All answers follow from the edges themselves: the owners learn these and
    nothing else, and nobody else learns anything.

    Args:
        parts: each owner's part, and the columns' places there.
        bits: all magnitudes are below 2^bits.
        missing: whether values may be missing, which are not counted.

    Rounds some 9 for each bit.
    """
    owners = list(dict.fromkeys(part.owner.name for part, _ in parts))
    rows, width = sum(part.rows for part, _ in parts), len(parts[0][1])
    target: Any = torch.tensor([-(-k * rows // bins) for k in range(1, bins)])

    def counted(part: _Part, own: torch.Tensor | None, shape: tuple[int, ...]) -> Any:
        return share_tensor(
            own, session=like.session, party=like.party, scheme=like.scheme, owner=part.owner, shape=shape,
            dtype=torch.int64, limit=rows + 1,
        )  # fmt: skip

    if missing:  # the number of rows that have a value is secret
        known = [
            counted(p, None if p.values is None else (p.values[:, at] < ABOVE).sum(0), (width,)) for p, at in parts
        ]
        target = reduce(operator.add, known).unsqueeze(1) * torch.arange(1, bins)
    ordered = [None if p.values is None else p.values[:, at].T.contiguous().sort(1).values for p, at in parts]
    edges = torch.full((width, bins - 1), -(1 << bits))
    for k in range(bits, -1, -1):
        candidate = edges + (1 << k)
        total: Any = None
        for (part, _), values in zip(parts, ordered, strict=True):
            below = None if values is None else torch.searchsorted(values, candidate)
            shared = counted(part, below, tuple(edges.shape))
            total = shared if total is None else total + shared
        few = (total * (bins if missing else 1) < target).reveal(to=owners)
        edges = edges if few.is_meta else torch.where(few, candidate, edges)
    return edges


def _codes_of(values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """The bins of values [rows, columns] as uint8: the number of edges [columns, bins - 1] below each."""
    return torch.searchsorted(edges.contiguous(), values.T.contiguous()).T.to(torch.uint8).contiguous()


# Functions that A and S apply to their halves.


def _with_first(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return torch.cat((first.unsqueeze(1), rest), 1)


def _both_sides(x: torch.Tensor) -> torch.Tensor:
    """[total, left sides] -> [total, left sides, right sides]."""
    return torch.cat((x, x[:, :1] - x[:, 1:]), 1)


def _valid_sides(left: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    return torch.cat((left, both, both), 1)


def _sum_of_sides(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    return torch.cat((x[:, :1], x[:, 1 : half + 1] + x[:, half + 1 :]), 1)


def _children(left: torch.Tensor, right: torch.Tensor, dim: int) -> torch.Tensor:
    """The children of nodes along a dimension, from left to right."""
    return torch.stack((left, right), dim + 1).flatten(dim, dim + 1)


def _by_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [rows, trees] times each column of y [rows, trees x nodes]."""
    return (x.unsqueeze(2) * y.unflatten(1, (x.shape[1], -1))).flatten(1)


def _leaves_of_rows(member: torch.Tensor, leaves: torch.Tensor, trees: int) -> torch.Tensor:
    """sum_j member[:, t, j] leaves[t, j], [rows, trees]."""
    return (member * leaves).unflatten(1, (trees, -1)).sum(2)


def _trees_end_to_end(*levels: torch.Tensor, trees: int) -> torch.Tensor:
    """Nodes of levels [trees x nodes, ...] as those of each tree, [trees, nodes, ...]."""
    return torch.cat([level.unflatten(0, (trees, -1)) for level in levels], 1)


def _for_each_class(target: torch.Tensor, classes: int) -> torch.Tensor:
    return target.unsqueeze(1).expand(-1, classes)


def _code_sums(code: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (code * values).sum(1)


def _columns_in_order(*parts: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Histograms [nodes, columns, bins - 1] of parts as one of all features, [nodes, features x (bins - 1)]."""
    return torch.cat(parts, 1)[:, order].flatten(1)


def _columns_of(x: torch.Tensor, columns: list[int], bins: int) -> torch.Tensor:
    """The candidates of some features."""
    return x.unflatten(1, (-1, bins - 1))[:, columns].flatten(1)


def _sum_all(*parts: torch.Tensor) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _features_of(code: torch.Tensor, bins: int) -> torch.Tensor:
    return code[:, 1:].unflatten(1, (-1, bins - 1)).sum(-1)


def _end_to_end(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


# A fit


@dataclass
class _Rows:
    """Rows of which each feature is one party's, or all are in shares: the operands of `Backend.by_bins`.

    Attributes:
        matrices: with the places of their columns among the features.
    """

    start: int
    end: int
    matrices: list[tuple[Any, list[int]]]

    @property
    def order(self) -> list[int]:
        """Where each feature is among the columns of all matrices."""
        places = [column for _, columns in self.matrices for column in columns]
        return sorted(range(len(places)), key=places.__getitem__)


class _Boosting:
    """The arithmetic of a fit, on ring elements. With q fraction bits, all sums of gradients are below 2^`SUM_BITS`.

    Args:
        settings: the estimator.
        blocks: the rows. edges: of all features, [features x (bins - 1)].
        unit_bits: gradients are below 2^unit_bits, and computed in this unit.
    """

    def __init__(self, context: Context, settings: Any, blocks: list[_Rows], edges: Value, unit_bits: int):
        self.context, self.settings, self.blocks, self.edges = context, settings, blocks, edges
        self.backend, self.f = context.backend, context.frac_bits
        self.rows, self.unit_bits, self.bins = blocks[-1].end, unit_bits, settings.max_bins
        self.trees = settings.n_trees_per_iteration_
        spare = (self.rows - 1).bit_length() + (0 if settings._binary else 1)
        self.q = min(self.f, SUM_BITS - spare)
        self.least = max(1, round(settings.min_child_weight * 2**self.q))
        self.l2 = round(settings.reg_lambda * 2**self.q)
        self.low = (self.least + self.l2).bit_length() - 1
        self.high = max((1 << SUM_BITS) - 1 + self.l2, 2).bit_length()
        self.coarse = min(24, 61 - self.f - SUM_BITS + self.low, self.high - 1)
        if self.coarse < 8:
            raise ArgumentError(
                f"min_child_weight + reg_lambda has to be larger for {self.rows} rows: leaves of so little curvature "
                f"leave the range of the ring; take reg_lambda=1, say"
            )

    # Gradients and curvatures

    def words(self, margin: Value | None, y: Value) -> Value:
        """g + 2^32 h of each row and tree [rows, trees], at the margins of the trees so far; None for 0."""
        q, f, backend = self.q, self.f, self.backend
        if not self.settings._binary:
            error = -y if margin is None else margin - y
            return backend.truncate(error, f + self.unit_bits - q, q) + (1 << q + HIGH)
        twice = 1 if self.trees > 1 else 0  # xgboost's curvature of a softmax is 2 p (1 - p)
        if margin is None:
            p = round(2.0**q / max(2, self.trees))
            return -(y << q) + (p + (round(p * (2**q - p) / 2**q) << twice + HIGH))
        margins = self.context.tensor(margin, f, 2.0 ** (self.context.scheme.activation_bits + f))
        found: Any = torch.softmax(margins, 1) if self.trees > 1 else torch.sigmoid(margins)
        p = at_scale_bits(self.context, found, q).shares
        curvature = backend.truncate((p << q) - backend.square(p), q)
        return p - (y << q) + (curvature << twice + HIGH)

    # Histograms and rows

    def histograms(self, words: Value) -> Value:
        """Words [rows, nodes] added up to each bin: [nodes, candidates]."""
        parts = []
        for block in self.blocks:
            own = words if len(self.blocks) == 1 else words[block.start : block.end]
            found = [
                self.backend.each(
                    torch.unflatten, self.backend.by_bins(BinSums(self.bins), own, matrix),
                    dim=1, sizes=(len(columns), self.bins - 1),
                )
                for matrix, columns in block.matrices
            ]  # fmt: skip
            parts.append(self.backend.each(_columns_in_order, *found, order=block.order))
        return parts[0] if len(parts) == 1 else self.backend.each(_sum_all, *parts)

    def rows_to_the_left(self, code: Value) -> Value:
        """Whether a row would go to the left at each node, [rows, nodes], for the codes of its splits."""
        candidates, parts = code[:, 1:], []
        for block in self.blocks:
            found = [
                self.backend.by_bins(
                    BinChoices(self.bins),
                    self.backend.each(_columns_of, candidates, columns=columns, bins=self.bins),
                    matrix,
                )
                for matrix, columns in block.matrices
            ]
            parts.append(found[0] if len(found) == 1 else self.backend.each(_sum_all, *found))
        whole = parts[0] if len(parts) == 1 else self.backend.each(_end_to_end, *parts)
        return self.backend.each(torch.add, whole, code[:, 0])

    # Splits and leaves

    def sums_of(self, words: Value) -> tuple[Value, Value]:
        """G and H of sums of words."""
        curvature = self.backend.truncate(words, HIGH)
        return words - (curvature << HIGH), curvature

    def ratio(self, gradient: Value, curvature: Value) -> Value:
        """G / (H + l2) at f fraction bits, for curvatures from the least one on and for G = 0. Checked to be below
        2^`WEIGHT_BITS`.

        With H + l2 = m 2^e it is the product of G 2^-e, at `coarse` bits, and the series of 1 / m.
        """
        context, backend, f = self.context, self.backend, self.f
        normal = backend.normalise(curvature + self.l2, self.low, self.high)
        power = exponent_map(context, normal, lambda e: 1 << self.high - e)
        scaled = backend.truncate(backend.multiply(torch.mul, gradient, power), self.high - self.coarse)
        inverse = series(context, context.tensor(normal.mantissa, normal.high), series_of.RECIPROCAL)
        found = backend.multiply(torch.mul, scaled, at_scale_bits(context, inverse, f).shares)
        return backend.truncate(found, self.coarse, f + WEIGHT_BITS)

    def enough(self, curvature: Value) -> Value:
        """Whether there is the least curvature of a child, 0 or 1."""
        return self.backend.at_least(curvature, (self.least,), HIGH)[0]

    def best_splits(self, totals: Value, histograms: Value) -> tuple[Value, Value]:
        """The best candidate of each node as a one-hot code [nodes, 1 + candidates], and the words of its left child.

        The first candidate is to leave the node as it is: all its rows go to the left.
        """
        backend = self.backend
        words = backend.each(_with_first, totals, histograms)
        gradient, curvature = (backend.each(_both_sides, v) for v in self.sums_of(words))
        count = words.shape[1]
        enough = self.enough(curvature)
        both = backend.multiply(torch.mul, enough[:, 1:count], enough[:, count:])
        enough = backend.each(_valid_sides, enough[:, :1], both)
        gradient = backend.multiply(torch.mul, gradient, enough)
        score = backend.multiply(torch.mul, gradient, self.ratio(gradient, curvature))
        least_gain = torch.zeros(1, count, dtype=torch.int64)
        least_gain[0, 0] = round(2 * self.settings.min_split_gain * 2 ** (self.q + self.f - 2 * self.unit_bits))
        score = backend.each(_sum_of_sides, score) + least_gain
        places = (count - 1).bit_length()
        order = torch.arange(count - 1, -1, -1).unsqueeze(0)  # of equal ones the first is the largest
        keys = (backend.truncate(score, places) << places) + order
        keys = backend.each(torch.t, keys)
        largest = backend.largest(keys)
        code = backend.each(torch.t, backend.is_zero(backend.each(torch.sub, keys, largest)))
        return code, backend.multiply(_code_sums, code, words)

    def leaves(self, totals: Value) -> Value:
        """The values of leaves at f fraction bits, from their words."""
        gradient, curvature = self.sums_of(totals)
        gradient = self.backend.multiply(torch.mul, gradient, self.enough(curvature))
        return -(self.ratio(gradient, curvature) << self.unit_bits)

    def tree(self, words: Value) -> tuple[Value, Value, Value, Value]:
        """Trees of the rows' words [rows, trees], side by side: the feature and the threshold of each node, the leaves,
        and each row's leaves."""
        backend, depth, trees = self.backend, self.settings.max_depth, self.trees
        histograms = self.histograms(words)
        totals = backend.each(torch.sum, words, dim=0)
        member: Any = None
        left: Any = None
        features, thresholds = [], []
        for level in range(depth):
            code, first = self.best_splits(totals, histograms)
            features.append(backend.each(_features_of, code, bins=self.bins))
            thresholds.append(backend.multiply(_code_sums, code[:, 1:], self.edges))
            totals = backend.each(_children, first, totals - first, dim=0)
            left = self.rows_to_the_left(code)
            left = left if member is None else backend.multiply(torch.mul, member, left)
            if level + 1 == depth:
                break
            own = self.histograms(backend.multiply(_by_rows, words, left))
            histograms = backend.each(_children, own, backend.each(torch.sub, histograms, own), dim=0)
            right = -left + 1 if member is None else backend.each(torch.sub, member, left)
            member = backend.each(_children, left, right, dim=1)
        rate = round(self.settings.learning_rate * 2**RATE_BITS)
        leaves = backend.truncate(self.leaves(totals) * rate, RATE_BITS)
        even, odd = leaves[::2], leaves[1::2]
        of_rows = partial(_leaves_of_rows, trees=trees)
        moved = backend.multiply(of_rows, left, even - odd)
        moved = moved + odd if member is None else moved + backend.multiply(of_rows, member, odd)
        features, thresholds, leaves = (
            backend.each(_trees_end_to_end, *parts, trees=trees) for parts in (features, thresholds, [leaves])
        )
        return features, thresholds, leaves, moved


# Estimators


class _BoostedTrees(SharedEstimator):
    """What classifiers and regressors have in common: see `BoostedTreesClassifier`."""

    _fitted = ("features_", "thresholds_", "leaves_", "base_")
    _binary = True

    def __init__(
        self,
        n_estimators: int = 50,
        *,
        max_depth: int = 4,
        learning_rate: float = 0.3,
        max_bins: int = 32,
        reg_lambda: float = 1.0,
        min_child_weight: float = 1.0,
        min_split_gain: float = 0.0,
        subsample: float = 1.0,
        random_state: int = 0,
        edges: Mapping[str, Any] | None = None,
    ):
        self.n_estimators, self.max_depth, self.learning_rate, self.max_bins = (
            n_estimators, max_depth, learning_rate, max_bins,
        )  # fmt: skip
        self.reg_lambda, self.min_child_weight, self.min_split_gain = reg_lambda, min_child_weight, min_split_gain
        self.subsample, self.random_state, self.edges = subsample, random_state, edges

    # A fit

    def fit(self, X: Any, y: Any, present: SharedTensor | None = None, classes: int = 2) -> Any:
        """Fit to X and y.

        Args:
            X: an `OwnedTable`; a list of them, side by side where their columns have different names and below each
                other where they have the same; a list of lists: rows below each other, each of tables side by side; a
                `Table` or a SharedTensor [rows, features], whose numbers need `edges`; or a plain array.
            y: [rows] in shares, in the order of X's rows; a plain array for a plain X.
            present: 0 or 1 for each row, in shares: the rows that count. A `Table` brings its own.
            classes: of a classifier and y in shares: how many there are; y is 0 .. classes - 1. Plain y has its own.

        Raises:
            ArgumentError, ShapeError, NonFiniteError, SessionMismatchError: before anything is shared or sent.
            FitError: plain data left the range; on shares `revealed` raises it.
        """
        self._check_settings()
        if not 2 <= count("classes", classes) <= MOST_CLASSES:
            raise ArgumentError(f"classes is from 2 to {MOST_CLASSES}, got {classes}")
        if _is_secret(X) or is_shared(y):
            self._number_of_classes(classes)
            self._fit_shared(X, y, present)
            return self
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite="allow-nan")
        y = self._plain_target(y)
        session = Session(reference=True)
        like = plain_shared(session, y.astype(np.float64), "y")
        names = tuple(f"x{i}" for i in range(X.shape[1]))
        absent = np.isnan(X)
        bits = like.scheme.activation_bits + like.scheme.frac_bits
        features = [_Feature(name, None, bits, bool(lost)) for name, lost in zip(names, absent.any(0), strict=True)]
        own, _ = _encoded(X, like.scheme, "X")
        part = _part(session.Q, own, torch.from_numpy(absent), list(range(len(names))), features)
        self._fit_parts([[part]], features, like, None)
        self._learn()
        return self

    def _check_settings(self) -> None:
        for name, low, high in (
            ("n_estimators", 1, 10_000), ("max_depth", 1, MOST_DEPTH), ("max_bins", 2, MOST_BINS),
        ):  # fmt: skip
            if not low <= count(name, getattr(self, name)) <= high:
                raise ArgumentError(f"{name} is from {low} to {high}, got {getattr(self, name)}")
        for name, low, high in (
            ("learning_rate", 2.0**-RATE_BITS, 1.0), ("reg_lambda", 0.0, 1024.0), ("min_child_weight", 0.0, 2.0**20),
            ("min_split_gain", 0.0, 2.0**20), ("subsample", 2.0**-20, 1.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ArgumentError(f"{name} is a number from {low:g} to {high:g}, got {value!r:.40}")
        count("random_state", self.random_state)

    def _fit_shared(self, X: Any, y: Any, present: Any) -> None:
        groups, table = _groups_of(X)
        tables = [t for group in groups for t in group]
        if not is_shared(y):
            raise ArgumentError(
                f"X has secret rows and y is a {type(y).__name__}; its owner shares it: sectorch.share(y, session=..., "
                f"owner=...)"
            )
        target = unwrap_shared(y)
        if table is not None and table.present is not None:
            if present is not None:
                raise ArgumentError("the table says which rows count; filter it by t.where in place of present=")
            present = table.present
        if target.counting is not None and target.counting is not present:
            present = target.counting if present is None else present & target.counting
        like = tables[0] if table is None else table[table.columns[0]]
        for name, x in (("y", target), ("present", present)):
            if x is None:
                continue
            if not isinstance(x, SharedTensor):
                raise ArgumentError(f"{name} is a {type(x).__name__}; share it")
            if x.session is not like.session or x.party != like.party or x.scheme != like.scheme:
                raise SessionMismatchError(f"{name} and X are of two sessions or number formats; share them in one")
        rows = sum(len(group[0]) for group in groups) if table is None else len(table)
        for name, x in (("y", target), ("present", present)):
            if x is not None and tuple(x.shape) != (rows,):
                raise ShapeError(f"{name} is [{rows}], a value for each row of X, got {list(x.shape)}")
        if table is None:
            self._fit_parts(*_parts_of(groups), target, present)
        else:
            features = [_feature_of(name, table.schema[name], table[name].scheme) for name in table.columns]
            self._fit_parts(None, features, target, present, table)

    def _fit_parts(
        self,
        groups: list[list[_Part]] | None,
        features: list[_Feature],
        y: SharedTensor,
        present: Any,
        table: Any = None,
    ) -> None:
        rows = y.shape[0]
        if not 2 <= rows <= MOST_ROWS:
            raise ArgumentError(f"a fit takes from 2 to {MOST_ROWS} rows, got n_samples = {rows}")
        if y.scheme.verified or y.scheme.audited != 1:
            raise ArgumentError("a fit is not proved: use a scheme without verified=True and audited")
        given = _given_edges(self.edges, features, self.max_bins, y.scheme)
        unit_bits = self._unit_bits(y)
        facts = rows, features, self._facts(), self.n_trees_per_iteration_, unit_bits
        y.session.agreement.note(y.party, "boosted trees", repr(facts))
        found = self._edges(groups, features, given, y)
        self.n_features_in_, self.feature_names_ = len(features), tuple(f.name for f in features)
        self._bits, self._frac_bits = max(feature.bits for feature in features), y.scheme.frac_bits
        self._missing = _twice(features)[len(features) :]
        sources = [y] + [present] * (present is not None)
        x, absent = (None, None) if table is None else self._rows_of([table])
        with one_call(*sources, *(v for v in (x, absent) if v is not None)) as (context, results):
            edges, blocks = self._blocks(context, groups, features, found, x, absent)
            boosting = _Boosting(context, self, blocks, edges, unit_bits)
            results += self._trees(boosting, y, present)
        self.features_, self.thresholds_, self.leaves_, self.base_ = results

    def _facts(self) -> tuple:
        facts = {name: value for name, value in self.get_params().items() if name != "edges"}
        return tuple(sorted(facts.items()))

    def _number_of_classes(self, classes: int) -> None:
        """Take the number of classes: a tree of each round for each, or one where two share it."""
        self.n_trees_per_iteration_ = 1

    def _edges(
        self,
        groups: list[list[_Part]] | None,
        features: list[_Feature],
        given: dict[int, torch.Tensor],
        like: SharedTensor,
    ) -> list[tuple[Any, torch.Tensor | None]]:
        """Of each feature who has its edges, and the edges, None where they are elsewhere; the owner is None of public
        ones. Where values may be missing, the last edge is above all values, so that a node may part known and missing
        ones."""
        unit = 1 << like.scheme.frac_bits
        found: list[Any] = [None] * len(features)
        for i, feature in enumerate(features):
            bins = self.max_bins - feature.missing
            if i in given:
                found[i] = None, given[i]
            elif feature.categories is not None and feature.categories <= bins:
                found[i] = None, _code_edges(feature.categories, bins, unit)
            elif groups is None:
                raise ArgumentError(
                    f"column {feature.name!r} is in shares, so that nobody can choose its bins: name public edges, "
                    f"edges={{{feature.name!r}: [...]}}, or fit on the owners' tables (sectorch.owned)"
                )
        shared: dict[tuple, list[int]] = {}
        for i in (i for i in range(len(features)) if found[i] is None and groups is not None):
            places = tuple(
                (g, p) for g, group in enumerate(groups or ()) for p, part in enumerate(group) if i in part.columns
            )
            shared.setdefault((features[i].missing, places), []).append(i)
        for (missing, places), columns in shared.items():
            bins = self.max_bins - missing
            parts = [(groups or [])[g][p] for g, p in places]
            at = [(part, [part.columns.index(i) for i in columns]) for part in parts]
            owner, values = parts[0].owner, parts[0].values
            if len(parts) == 1:
                edges = None if values is None else _own_edges(values[:, at[0][1]], bins)
            elif all(part.owner == owner for part in parts):
                whole = None if values is None else torch.cat([part.values[:, c] for part, c in at])  # pyright: ignore
                edges = None if whole is None else _own_edges(whole, bins)
            else:
                edges = _common_edges(at, bins, max(features[i].bits for i in columns), missing, like)
            for row, i in enumerate(columns):
                found[i] = owner, None if edges is None else edges[row]
        for i, feature in enumerate(features):
            if feature.missing and found[i][1] is not None:
                found[i] = found[i][0], torch.cat((found[i][1], torch.tensor([(1 << feature.bits) - 1])))
        return [found[i] for i in _twice(features)]

    def _blocks(
        self, context: Context, groups: list[list[_Part]] | None, features: list[_Feature], found: list, x: Any,
        absent: Any,
    ) -> tuple[Value, list[_Rows]]:  # fmt: skip
        """The edges in shares, and every matrix of bins."""
        net, backend, bins = context.net, context.backend, self.max_bins
        shares = []
        for owner, edges in found:
            if owner is None:
                shares.append(backend.embedded(edges.unsqueeze(0).to(context.session.device)))
                continue
            here = context.session.present(owner)
            content = edges.unsqueeze(0) if here else torch.empty(1, bins - 1, dtype=torch.int64, device="meta")
            own = net.own(owner, content, name="edges")
            shares.append(backend.share(own, False) if owner == net.Q else backend.owned(own, owner))
        edges = backend.each(torch.flatten, backend.each(_end_to_end, *shares))
        if groups is None:
            values = self._doubled(context, x, absent, self._bits - context.frac_bits)
            below = backend.each(_beyond_edges, values, edges, bins=bins)
            bits = backend.at_least(below, (0,), self._bits + 2)[0]
            whole = (backend.each(torch.flatten, bits, start_dim=1), list(range(len(found))))
            return edges, [_Rows(0, x.shape[0], [whole])]
        blocks, start = [], 0
        for group in groups:
            matrices = []
            for part in group:
                codes = torch.empty(part.rows, len(part.columns), dtype=torch.uint8, device="meta")
                if part.values is not None:
                    codes = _codes_of(part.values, torch.stack([found[i][1] for i in part.columns]))
                own = net.own(part.owner, codes, name="bins")
                matrices.append((backend.bin_matrix(own, part.owner, bins), list(part.columns)))
            blocks.append(_Rows(start, start + group[0].rows, matrices))
            start += group[0].rows
        return edges, blocks

    def _trees(self, boosting: _Boosting, y: SharedTensor, present: Any) -> list[SharedTensor]:
        context, backend, f = boosting.context, boosting.backend, boosting.f
        target = self._target(context, y)
        if y.dim() == len(target.shape):
            target = backend.each(torch.unsqueeze, target, dim=1)
        counted = None if present is None else backend.each(torch.unsqueeze, present.shares, dim=1)
        words = boosting.words(None, target)
        words = words if counted is None else backend.multiply(torch.mul, words, counted)
        base = boosting.leaves(backend.each(torch.sum, words, dim=0))
        margin = backend.each(torch.Tensor.expand, base, size=(boosting.rows, boosting.trees))
        found = []
        for number in range(self.n_estimators):
            words = boosting.words(margin, target)
            words = words if counted is None else backend.multiply(torch.mul, words, counted)
            if self.subsample < 1:
                words = words * self._sample(number, boosting.rows).unsqueeze(1)
            *parts, moved = boosting.tree(words)
            margin = margin + moved
            found.append(parts)
        features, thresholds, leaves = (
            backend.each(_end_to_end, *parts) for parts in zip(*found, strict=True)
        )  # fmt: skip
        widest = 2.0 ** (y.scheme.activation_bits + f)
        return [
            context.tensor(features, 0, 1.0, dtype=torch.int64),
            context.tensor(thresholds, f, widest),
            context.tensor(leaves, f, 2.0 ** (f + WEIGHT_BITS + boosting.unit_bits)),
            context.tensor(base, f, 2.0 ** (f + WEIGHT_BITS + boosting.unit_bits)),
        ]

    def _sample(self, number: int, rows: int) -> torch.Tensor:
        """The rows of a tree, 0 or 1, by public random numbers."""
        generator = np.random.default_rng([abs(int(self.random_state)), number])
        return torch.from_numpy((generator.random(rows) < self.subsample).astype(np.int64))

    # Parts of the kinds

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _plain_target(self, y: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _unit_bits(self, y: SharedTensor) -> int:
        raise NotImplementedError

    def _target(self, context: Context, y: SharedTensor) -> Value:
        raise NotImplementedError

    # Predictions

    def _margin(self, X: Any) -> Any:
        """The sum of the leaves [rows], or [rows, classes]: in shares where X or the fit is, and else an array."""
        check_is_fitted(self)
        if not _is_secret(X) and not isinstance(self.features_, SharedTensor):
            return self._plain_margin(self._plain_rows(X))
        x, absent = self._shared_rows(X)
        own: Any = (v for v in (absent, *(getattr(self, name) for name in self._fitted)) if is_shared(v))
        with one_call(x, *own) as (context, results):
            f, backend = context.frac_bits, context.backend
            most = context.scheme.activation_bits if x.bound is None else math.frexp(x.bound)[1] - x.scale_bits
            rows = self._doubled(context, x, absent, most)
            features, thresholds, leaves, base = (_as_shares(context, self, name) for name in self._fitted)
            trees, nodes, _ = features.shape
            codes = backend.each(_as_columns, features)
            seen = backend.multiply(matmul, rows, codes) - backend.each(torch.flatten, thresholds)
            right = backend.at_least(seen - 1, (0,), min(63, max(most + f, self._bits) + 2))[0]
            right = backend.each(torch.unflatten, right, dim=1, sizes=(trees, nodes))
            values = context.tensor(backend.each(torch.unsqueeze, leaves, dim=-1), f)
            found: Any = leaf_of_tree(context.tensor(right, 0, 1.0, dtype=torch.bool), values)
            total = backend.each(_sum_of_trees, found.shares, each=self.n_trees_per_iteration_) + base
            if self.n_trees_per_iteration_ == 1:
                total = total[:, 0]
            results.append(context.tensor(total, f, 2.0 ** (x.scheme.activation_bits + f)))
        return results[0]

    def _doubled(self, context: Context, x: SharedTensor, absent: SharedTensor | None, most: int) -> Value:
        """The columns of a fit, as ring elements: those that may be missing once above and once below all edges."""
        f, backend = context.frac_bits, context.backend
        x = at_scale_bits(context, check_below(context, x, most), f).bounded(None)
        marks = backend.embedded(torch.zeros(1, dtype=torch.int64)) if absent is None else absent.shares
        if not self._missing:
            return x.shares
        return backend.each(_with_missing, x.shares, marks, places=self._missing, size=1 << self._bits)

    def _plain_rows(self, X: Any) -> np.ndarray:
        X = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        others = [i for i in range(X.shape[1]) if i not in self._missing]
        if np.isnan(X[:, others]).any():
            raise NonFiniteError("Input X contains NaN in a column that had none in the fit; fill these first")
        return X

    def _rows_of(self, tables: list[Table]) -> tuple[SharedTensor, SharedTensor | None]:
        """The numbers of the model's columns, and 1 where one is missing that may be."""
        names, found, marks = self.feature_names_, [], []
        places = [names[i] for i in self._missing]
        for t in tables:
            lost = sorted((set(t.missing) & set(names)) - set(places))
            if unknown := sorted(set(names) - set(t.columns)):
                raise ArgumentError(f"X has no column {', '.join(unknown)}, which the model was fitted on")
            if lost:
                raise NonFiniteError(f"{', '.join(lost)} may have missing values, and had none in the fit")
            found.append(as_float32(t.tensor(*names, fill=0)))
            none = torch.zeros(len(t), dtype=torch.bool)
            own: list[Any] = [t.missing.get(n) for n in places]
            own = [embed_public(t.filled(names[0]), none) if flag is None else flag for flag in own]
            marks += [torch.stack(own, 1)] if own else []
        x: Any = torch.cat(found)
        absent: Any = torch.cat(marks) if marks else None
        return x, absent

    def _shared_rows(self, X: Any) -> tuple[SharedTensor, SharedTensor | None]:
        fit = getattr(self, self._fitted[0])
        if not _is_secret(X):
            X = self._plain_rows(X)
            context = Context(fit.session, fit.party, fit.scheme)
            own, lost = _encoded(X, fit.scheme, "X")
            with fit.session.operation(fit.party):
                x = context.tensor(context.backend.embedded(own), context.frac_bits, float(own.abs().max()))
                absent = context.tensor(context.backend.embedded(lost[:, self._missing]), 0, 1.0)
            return x, absent if self._missing else None
        if not is_shared(X):
            groups, table = _groups_of(X)
            return self._rows_of([table] if table is not None else [_beside([p.share() for p in g]) for g in groups])
        x: Any = as_float32(unwrap_shared(X))
        if x.dim() != 2 or x.shape[1] != self.n_features_in_:
            raise ShapeError(f"X is [rows, {self.n_features_in_}], as in the fit, got {list(x.shape)}")
        return x, None

    def _plain_margin(self, X: np.ndarray) -> np.ndarray:
        """The trees on plain numbers, which are rounded as they would be when they are shared."""
        scale = 2.0**self._frac_bits
        rows = np.rint(X * scale) / scale
        lost = np.isnan(rows)
        rows = np.concatenate((np.where(lost, np.inf, rows), np.where(lost, -np.inf, rows)[:, self._missing]), 1)
        each_tree = np.zeros((len(X), len(self.features_)))
        column, decides = self.features_.argmax(-1), self.features_.any(-1)
        each = np.arange(len(X))
        for t in range(len(column)):
            node = np.zeros(len(X), np.int64)
            for _ in range(self.max_depth):
                seen = np.where(decides[t, node], rows[each, column[t, node]], 0)
                node = 2 * node + 1 + (seen > self.thresholds_[t, node])
            each_tree[:, t] = self.leaves_[t, node - (2**self.max_depth - 1)]
        total = each_tree.reshape(len(X), -1, self.n_trees_per_iteration_).sum(1) + self.base_
        return total[:, 0] if self.n_trees_per_iteration_ == 1 else total

    def splits(self) -> list[dict[str, Any]]:
        """Every node of a revealed model, tree by tree: splits with their feature and threshold, in X's own units, and
        leaves with their values. A row goes to the left where its feature is at most the threshold, and where the value
        is missing to the side that `missing` names; a threshold above all values parts known and missing ones. Of
        several classes `class` says which one's scores a tree adds to.

        Nodes that split nothing are left out; `depth` is that of the node, and `path` the turns to it from the root.

        Raises:
            ArgumentError: the model is in shares; `revealed(to=...)` shows it to a party.
        """
        check_is_fitted(self)
        if isinstance(self.features_, SharedTensor):
            raise ArgumentError("the splits are in shares, and nobody knows them: model.revealed(to=...) shows them")
        found, names = [], (*self.feature_names_, *(self.feature_names_[i] for i in self._missing))
        for t in range(len(self.features_)):
            own = (
                {"tree": t}
                if self.n_trees_per_iteration_ == 1
                else {"tree": t, "class": t % self.n_trees_per_iteration_}
            )
            open_nodes = [(0, "")]
            while open_nodes:
                node, path = open_nodes.pop()
                if node >= len(self.features_[t]):
                    value = float(self.leaves_[t, node - len(self.features_[t])])
                    found.append(own | {"path": path, "value": value})
                elif not self.features_[t, node].any():
                    open_nodes.append((2 * node + 1, path))
                else:
                    place = int(self.features_[t, node].argmax())
                    side = "left" if place >= len(self.feature_names_) else "right" if place in self._missing else None
                    split = {"path": path, "feature": names[place], "threshold": float(self.thresholds_[t, node])}
                    found.append(own | split | ({} if side is None else {"missing": side}))
                    open_nodes += [(2 * node + 2, path + "R"), (2 * node + 1, path + "L")]
        return found

    def _reason(self) -> str:
        return (
            f"there is no {type(self).__name__} of this data: labels are not 0 and 1 (of several classes 0, 1, ..), "
            f"targets are beyond their limit, or a leaf would be 2^{WEIGHT_BITS} or more; look at y, or take a larger "
            f"reg_lambda"
        )


class BoostedTreesClassifier(ClassifierMixin, _BoostedTrees):
    """Gradient-boosted trees for two classes, by the logistic loss, and for more by the softmax's: a tree for each.

        model = BoostedTreesClassifier(20).fit([table_of_A, table_of_S], ill)
        risk = model.predict_proba([new_rows_of_A, new_rows_of_S])[:, 1]    # in shares
        plain = model.revealed(to="A")                                      # A learns the trees: plain.splits()

    The settings, all of them public:

    - `n_estimators`: the number of trees, which are complete to `max_depth` (1 to 8).
    - `learning_rate`: a factor of every leaf.
    - `max_bins`: bins of each feature, 2 to 256. Costs are in proportion to it.
    - `reg_lambda`: the L2 penalty of leaves.
    - `min_child_weight`: the least sum of curvatures p (1 - p) of a child.
    - `min_split_gain`: a split gains more than this. A node without such a split stays a leaf, and nobody learns that.
    - `subsample`: the part of rows that a tree is fitted to, by public random numbers of `random_state`.
    - `edges`: by column public edges of its bins, at most max_bins - 1, in place of quantiles.

    Attributes:
        features_: [trees, nodes, columns], the one-hot code of each node's feature, all 0 where it does not split.
            After all features stand those that may be missing once more: by this code missing values go to the left.
        thresholds_: [trees, nodes]. leaves_: [trees, leaves]. base_: [1], the log odds that trees are added to.
            All are SharedTensors after a fit on shares.

    A fit reveals nothing, except where rows of one column are of several owners: these learn the common edges of its
    bins, which are quantiles of all rows. Public are the numbers of rows, columns and bins, names, and all settings.

    Missing values go to the side that each node learns (xgboost's default direction), at twice the cost of columns that
    say that they may have some.

    Rounds some 80 a level of a tree, or of the trees of all classes, which are grown side by side; bytes some 45 a row
    for each node, and once 8 (bins - 1) for each number of A's and S's columns. Exact: the fit is that of the reference
    bit for bit, but for rounded series
    (docs/tables.md). Between processes the parties compare all public facts before anything is revealed.
    """

    def _plain_target(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if not 2 <= len(self.classes_) <= MOST_CLASSES:
            raise ValueError(f"This solver needs samples of at least 2 classes in the data and of {MOST_CLASSES} at "
                             f"most, got {len(self.classes_)} class(es)")  # fmt: skip
        self.n_trees_per_iteration_ = 1 if len(self.classes_) == 2 else len(self.classes_)
        return codes

    def _number_of_classes(self, classes: int) -> None:
        self.classes_ = np.arange(classes)
        self.n_trees_per_iteration_ = 1 if classes == 2 else classes

    def _unit_bits(self, y: SharedTensor) -> int:
        return 0

    def _target(self, context: Context, y: SharedTensor) -> Value:
        target = at_scale_bits(context, y, 0).shares
        backend, classes = context.backend, self.n_trees_per_iteration_
        if classes > 1:
            own = backend.is_zero(backend.each(_for_each_class, target, classes=classes) + -torch.arange(classes))
            backend.flag(-backend.each(torch.sum, own, dim=1) + 1)
            return own
        labels = backend.is_zero(backend.each(torch.sub, backend.square(target), target))
        backend.flag(-labels + 1)
        return target

    def decision_function(self, X: Any) -> Any:
        """The log odds [rows], or [rows, classes] of several classes before the softmax; in shares where X or the model
        is."""
        return self._margin(X)

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of the classes [rows, classes]; in shares where X or the model is."""
        margin = self._margin(X)
        if isinstance(margin, SharedTensor):
            if margin.dim() == 2:
                return torch.softmax(margin, 1)
            p: Any = torch.sigmoid(margin)
            return torch.stack([1 - p, p], 1)
        if margin.ndim == 2:
            p = np.exp(margin - margin.max(1, keepdims=True))
            return p / p.sum(1, keepdims=True)
        p = 1 / (1 + np.exp(-margin))
        return np.stack([1 - p, p], 1)

    def predict(self, X: Any) -> Any:
        """The classes [rows]: 0, 1, .. in shares where X or the model is."""
        margin = self._margin(X)
        if isinstance(margin, SharedTensor):
            return torch.argmax(margin, 1) if margin.dim() == 2 else (margin > 0).to(torch.int64)
        return self.classes_[margin.argmax(1) if margin.ndim == 2 else (margin > 0).astype(int)]


class BoostedTreesRegressor(RegressorMixin, _BoostedTrees):
    """Gradient-boosted trees for numbers, by the squared error; otherwise as `BoostedTreesClassifier`.

    `min_child_weight` is the least number of rows of a child, and `base_` the mean of y. y's `limit=`, under which it
    is shared, should be near its largest magnitude: gradients keep 13 bits of it for 2^16 rows, and up to 20 for fewer.
    """

    _binary = False

    def _plain_target(self, y: np.ndarray) -> np.ndarray:
        self._number_of_classes(2)
        return np.asarray(y, dtype=np.float64)

    def _unit_bits(self, y: SharedTensor) -> int:
        most = y.scheme.activation_limit if y.bound is None else y.bound * 2.0**-y.scale_bits
        if most > y.scheme.activation_limit:
            raise ArgumentError(
                f"y may reach {most:g}, and a fit takes numbers below {y.scheme.activation_limit:g}: share it with the "
                f"limit that it has, sectorch.share(y, limit=...), in a unit in which it is below"
            )
        part, power = math.frexp(most)
        return max(1, power + (part > 0.5))  # below twice the least power of two that y is below

    def _target(self, context: Context, y: SharedTensor) -> Value:
        return at_scale_bits(context, y, context.frac_bits).shares

    def predict(self, X: Any) -> Any:
        """The predicted numbers [rows]; in shares where X or the model is."""
        return self._margin(X)


# Arguments


def _is_secret(X: Any) -> bool:
    return is_shared(X) or isinstance(X, (OwnedTable, Table)) or (
        isinstance(X, (list, tuple)) and bool(X) and _is_secret(X[0])
    )  # fmt: skip


def _groups_of(X: Any) -> tuple[list[list[OwnedTable]], Any]:
    """The rows of X below each other, each as the tables of its columns; or no rows and a table in shares."""
    if is_shared(X):
        given = unwrap_shared(X)
        x = as_float32(given)
        x.counting = given.counting
        if x.dim() != 2 or not min(x.shape):
            raise ShapeError(f"X in shares is [rows, features], got {list(x.shape)}")
        return [], Table({f"x{i}": x[:, i] for i in range(x.shape[1])})
    if isinstance(X, Table):
        return [], X
    listed = [X] if isinstance(X, OwnedTable) else list(X)
    if all(isinstance(t, OwnedTable) for t in listed):
        alike = all(set(t.columns) == set(listed[0].columns) for t in listed)
        listed = [[t] for t in listed] if alike else [listed]
    groups = [list(group) if isinstance(group, (list, tuple)) else [group] for group in listed]
    for t in (t for group in groups for t in group):
        if not isinstance(t, OwnedTable):
            raise ArgumentError(f"X is a list of tables of owners (sectorch.owned), got a {type(t).__name__} in it")
    first = groups[0][0]
    names = {name: column for t in groups[0] for name, column in t.schema.items()}
    for group in groups:
        found = [name for t in group for name in t.columns]
        if len(set(found)) < len(found) or set(found) != set(names):
            raise ArgumentError(
                "tables side by side have columns of different names, and rows below each other the same columns; got "
                + "; ".join(", ".join(found[:8]) for found in ([n for t in g for n in t.columns] for g in groups))
            )
        if len({len(t) for t in group}) > 1:
            raise ShapeError(f"tables side by side have as many rows, got {', '.join(str(len(t)) for t in group)}")
        for t in group:
            if t.session is not first.session or t.party != first.party or t.scheme != first.scheme:
                raise SessionMismatchError("the tables are of several sessions or number formats")
            for name, column in t.schema.items():
                if (column.kind, column.categories) != (names[name].kind, names[name].categories):
                    raise ArgumentError(f"column {name!r} is of two kinds or has two lists of categories")
    return groups, None


def _beside(tables: list[Table]) -> Table:
    missing = {name: flags for t in tables for name, flags in t.missing.items()}
    return Table({n: t.filled(n) for t in tables for n in t.columns}, missing=missing, checked=True)


def _feature_of(name: str, column: Column, scheme: Scheme) -> _Feature:
    most = scheme.activation_limit if column.bound is None else max(1.0, column.bound)
    categories = 2 if column.kind == "flag" else None if column.categories is None else len(column.categories)
    return _Feature(name, categories, math.frexp(most)[1] + scheme.frac_bits, column.missing)


def _part(
    owner: Party, values: torch.Tensor | None, absent: torch.Tensor, columns: list[int], features: list[_Feature]
) -> _Part:
    """An owner's columns; those of features that may be missing a second time after all features."""
    places = [*columns, *(p for p, i in enumerate(_twice(features)) if p >= len(features) and i in columns)]
    if values is not None:
        again = [columns.index(_twice(features)[p]) for p in places[len(columns) :]]
        first, second = (values.masked_fill(absent, v) for v in (ABOVE, BELOW))
        values = torch.cat((first, second[:, again]), 1)
    return _Part(owner, len(absent), tuple(places), values)


def _parts_of(groups: list[list[OwnedTable]]) -> tuple[list[list[_Part]], list[_Feature]]:
    names = [name for t in groups[0] for name in t.columns]
    facts: dict[str, list[_Feature]] = {name: [] for name in names}
    for t in (t for group in groups for t in group):
        for name, column in t.schema.items():
            facts[name].append(_feature_of(name, column, t.scheme))
    features = [
        _Feature(name, own[0].categories, max(x.bits for x in own), any(x.missing for x in own))
        for name, own in facts.items()
    ]
    found = []
    for group in groups:
        parts = []
        for t in group:
            (owner,) = t.session.parties_named(t.owner, t.party)
            values, absent = None, torch.zeros(len(t), len(t.columns), dtype=torch.bool)
            if t.session.present(owner):
                content = [_ring_elements(t.content(n), t.scheme) for n in t.columns]  # pyright: ignore[reportArgumentType]
                values = torch.stack(content, 1)
                for k, name in enumerate(t.columns):
                    if (lost := t.absent(name)) is not None:
                        absent[:, k] = torch.from_numpy(lost)
            parts.append(_part(owner, values, absent, [names.index(name) for name in t.columns], features))
        found.append(parts)
    return found, features


def _ring_elements(values: np.ndarray, scheme: Scheme) -> torch.Tensor:
    own = torch.from_numpy(np.ascontiguousarray(values))
    return encode(own, scheme.frac_bits) if own.is_floating_point() else own.to(torch.int64) << scheme.frac_bits


def _encoded(X: np.ndarray, scheme: Scheme, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain numbers as ring elements, 0 where one is missing, and 1 where that is."""
    limit, absent = scheme.activation_limit, np.isnan(X)
    X = np.where(absent, 0.0, X)
    if X.size and not np.abs(X).max() < limit:
        raise ArgumentError(f"{name} has to be below {limit:g} in magnitude; divide columns by a number")
    return encode(torch.from_numpy(X), scheme.frac_bits), torch.from_numpy(absent.astype(np.int64))


def _given_edges(
    given: Mapping[str, Any] | None, features: list[_Feature], bins: int, scheme: Scheme
) -> dict[int, torch.Tensor]:
    """The edges that the user names, by the place of their feature."""
    names, found = [feature.name for feature in features], {}
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"edges is a mapping from columns to numbers, got a {type(given).__name__}")
    for name, values in (given or {}).items():
        if name not in names:
            raise ArgumentError(f"edges names {name!r:.60}, which is no column; there are {', '.join(names)}")
        numbers = np.asarray(values, dtype=np.float64).reshape(-1)
        place = names.index(name)
        most = bins - 1 - features[place].missing
        if not 1 <= len(numbers) <= most or not np.isfinite(numbers).all() or (np.diff(numbers) < 0).any():
            raise ArgumentError(
                f"edges of {name!r:.60} are 1 to {most} numbers in ascending order (max_bins - 1, and one fewer where "
                f"values may be missing)"
            )
        padded = np.concatenate([numbers, np.full(most - len(numbers), numbers[-1])])
        found[place] = encode(torch.from_numpy(padded), scheme.frac_bits)
    return found


def _beyond_edges(x: torch.Tensor, edges: torch.Tensor, bins: int) -> torch.Tensor:
    return edges.view(-1, bins - 1) - x.unsqueeze(-1)


def _as_columns(features: torch.Tensor) -> torch.Tensor:
    return features.flatten(0, 1).T.contiguous()


def _sum_of_trees(found: torch.Tensor, each: int) -> torch.Tensor:
    return found[..., 0].unflatten(1, (-1, each)).sum(1)


def _with_missing(x: torch.Tensor, absent: torch.Tensor, places: list[int], size: int) -> torch.Tensor:
    """Columns with missing values far above, and once more far below all others."""
    above, moved = x.clone(), absent * size
    above[:, places] += moved
    return torch.cat((above, x[:, places] - moved), 1)


def _as_shares(context: Context, model: Any, name: str) -> Value:
    value = getattr(model, name)
    if isinstance(value, SharedTensor):
        return value.shares
    bits = 0 if name == "features_" else context.frac_bits
    return context.backend.embedded(torch.from_numpy(np.rint(value * 2.0**bits).astype(np.int64)))
