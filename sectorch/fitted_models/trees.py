"""Decision trees as tensor code: one selection of features, one comparison of all nodes, and the leaves that are left.

`Trees` is an ordinary module. In shares its thresholds, its leaves, and which node looks at which feature are the
model's secret; the number of trees, their common shape and the number of outputs are public.

A tree has one of two public shapes, whichever costs fewer bytes:

- complete: all trees have the greatest depth D among them, and 2^D leaves. A leaf that stands higher is repeated below
  nodes that compare nothing. Leaves are chosen in some log2 D rounds (`ops.indexing.leaf_of_tree`).
- paths: all trees have the greatest number of nodes N among them, in a secret order. A matrix of the owner, [N, L],
  counts for each leaf the nodes on its path that decide otherwise: the leaf with none is the one. It takes one
  comparison more, of small numbers, whatever the depth is.

Source: paths are those of Tai et al., "Privacy-Preserving Decision Trees Evaluation via Linear Functions" (ESORICS
2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError, FixedPointRangeError, ShapeError
from ..ops.indexing import leaf_of_tree, split_of_tree

LEAF_LIMIT = 256.0
"""Leaves are divided by a public power of two until they are below this; with paths, the sum of a tree's."""

MOST_LEVELS = 12
"""Most levels of a complete tree."""

MOST_PATHS = 1 << 13
"""Most leaves of a tree whose paths are a matrix."""


@dataclass
class Tree:
    """One fitted tree, as arrays over its nodes. Node 0 is the root.

    Attributes:
        feature, threshold: a node sends a row to the left where its feature is <= (or <, see `Trees`) the threshold.
        left, right: the children; -1 at leaves.
        value: [nodes, outputs]; read at leaves.
        missing: where rows without the feature go: "left", "right", or "zero", as rows with 0.
        categories: of a node that splits a categorical feature, the categories that go to the right; None of others.
        other_right: where such a node sends every other category.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    missing: Sequence[str] | None = None
    categories: dict[int, set[int]] = field(default_factory=dict)
    other_right: dict[int, bool] = field(default_factory=dict)

    def walk(self) -> list[tuple[int, int, tuple[tuple[int, bool], ...]]]:
        """The nodes that the root reaches, from left to right: each with its depth and its path.

        A path is the nodes above, each with whether it is left by the right.

        Raises:
            ArgumentError: children that do not make a tree.
        """
        stack: list[tuple[int, int, tuple[tuple[int, bool], ...]]] = [(0, 0, ())]
        found, count = [], len(self.left)
        while stack:
            node, depth, path = stack.pop()
            if not 0 <= node < count or len(found) > count:
                raise ArgumentError("a tree's children are not nodes of it, or it has a cycle: the dump is damaged")
            found.append((node, depth, path))
            if self.left[node] >= 0:
                stack.append((int(self.right[node]), depth + 1, (*path, (node, True))))
                stack.append((int(self.left[node]), depth + 1, (*path, (node, False))))
        return found


class Trees(nn.Module):
    """The sum of the trees' outputs, [rows, outputs], for numbers [rows, features].

    Args:
        trees: at least one; all with as many outputs.
        features: the number of columns.
        strict: whether rows with the threshold itself go to the right, as in xgboost.
        base: added to the sum, [outputs].
        divisor: the sum is divided by it: the number of trees for a mean.
        sizes: by categorical column the number of its categories.

    Public, beside the number of trees, columns, outputs and categories: the depth, or the number of nodes, of the
    largest tree, and the powers of two that thresholds and leaves are below.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        features: int,
        strict: bool = False,
        base: Sequence[float] | np.ndarray | None = None,
        divisor: float = 1.0,
        sizes: dict[int, int] | None = None,
    ):
        super().__init__()
        if not trees:
            raise ArgumentError("an ensemble has at least one tree")
        self.features, self.strict, self.divisor, self.sizes = features, strict, float(divisor), dict(sizes or {})
        self.count, self.outputs = len(trees), trees[0].value.shape[1]
        self.takes_missing = any(tree.missing is not None for tree in trees)
        walks = [tree.walk() for tree in trees]
        self.depth = max(depth for walk in walks for _, depth, _ in walk)
        inner = [[node for node, _, _ in w if tree.left[node] >= 0] for tree, w in zip(trees, walks, strict=True)]
        self.nodes = max(1, *(len(nodes) for nodes in inner)) if len(inner) > 1 else max(1, len(inner[0]))
        self.depth = max(1, self.depth)  # of nothing but roots: a node that compares nothing
        cost = 45 * (2**self.depth - 1) + split_of_tree(self.depth, self.outputs)[1] if self.depth <= MOST_LEVELS else 0
        self.complete = self.depth <= MOST_LEVELS and cost <= _cost_of_paths(self.nodes)
        if not self.complete and self.nodes >= MOST_PATHS:
            raise ArgumentError(
                f"a tree of {self.nodes + 1} leaves, {self.depth} deep, is too large: up to {MOST_PATHS} leaves, or "
                f"{MOST_LEVELS} levels, are taken; fit with max_depth=8 or max_leaf_nodes=256, which cost far less"
            )
        known = [abs(float(t.threshold[i])) for t, nodes in zip(trees, inner, strict=True) for i in nodes
                 if math.isfinite(t.threshold[i]) and i not in t.categories]  # fmt: skip
        self.beyond = 2.0 ** max(14, math.frexp(max(known, default=0.0))[1] + 1)
        self._lay_out(trees, walks, inner)
        shift = np.zeros(self.outputs) if base is None else np.asarray(base, np.float64).reshape(-1)
        self.base = _secret(np.broadcast_to(shift, (self.outputs,)).copy())

    def _lay_out(self, trees: Sequence[Tree], walks: list, inner: list[list[int]]) -> None:
        """Make the parameters: which column each place's node looks at, thresholds, categories, leaves, paths."""
        places = 2**self.depth - 1 if self.complete else self.nodes
        leaves = 2**self.depth if self.complete else self.nodes + 1
        nothing = self._columns() - 1
        column = np.full((self.count, places), nothing, np.int64)
        threshold = np.ones((self.count, places))
        offsets, wide = self._offsets()
        right = np.zeros((wide, self.count, places)) if wide else None
        value = np.zeros((self.count, leaves, self.outputs))
        paths = None if self.complete else np.zeros((self.count, places + 1, leaves))
        for t, (tree, walk) in enumerate(zip(trees, walks, strict=True)):
            if tree.value.ndim != 2 or tree.value.shape[1] != self.outputs:
                raise ArgumentError(f"trees have one number of outputs, got {self.outputs} and {tree.value.shape[1:]}")
            at = {node: place for place, node in enumerate(inner[t])}
            leaf = 0
            for node, depth, path in walk:
                above = 0
                for _, goes_right in path:
                    above = 2 * above + goes_right
                if self.complete:
                    at[node] = 2**depth - 1 + above
                if tree.left[node] >= 0:
                    place = at[node]
                    column[t, place], threshold[t, place] = self._test(tree, node)
                    if node in tree.categories and right is not None:
                        first, size = offsets[int(tree.feature[node])]
                        goes = np.full(size + 1, float(tree.other_right.get(node, False)))
                        known = list(range(size))
                        goes[known] = [float(c in tree.categories[node]) for c in known]
                        right[first : first + size + 1, t, place] = goes
                elif paths is None:
                    span = 2 ** (self.depth - depth)
                    value[t, above * span : (above + 1) * span] = tree.value[node]
                else:
                    value[t, leaf] = tree.value[node]
                    for above_it, goes_right in path:
                        paths[t, at[above_it], leaf] = -1.0 if goes_right else 1.0
                        paths[t, places, leaf] += goes_right
                    leaf += 1
            if paths is not None:
                paths[t, places, leaf:] = 1.0  # no row reaches what is not there
        if not np.isfinite(value).all():
            raise FixedPointRangeError("a leaf is not a finite number: fit the model on finite targets")
        self.column, self.threshold = _secret(column.reshape(-1)), _secret(threshold.reshape(-1))
        self.right = None if right is None else _secret(right.reshape(wide, -1))
        self.paths = None if paths is None else _secret(paths)
        total = float(np.abs(value).max() if paths is None else np.abs(value).sum(1).max())
        self.scale = 2.0 ** max(0, math.frexp(total / LEAF_LIMIT)[1])
        self.leaves = _secret(value / self.scale)

    def _columns(self) -> int:
        """Columns to select from: numbers; with missing ones beyond all thresholds, below and above; marks; a zero."""
        return (4 if self.takes_missing else 1) * self.features + 1

    def _offsets(self) -> tuple[dict[int, tuple[int, int]], int]:
        """By categorical column where its code begins and its categories, and the length of all codes."""
        found, at = {}, 0
        for column, size in sorted(self.sizes.items()):
            found[column] = at, size
            at += size + 1
        return found, at

    def _test(self, tree: Tree, node: int) -> tuple[int, float]:
        """The column that a node selects, and its threshold."""
        feature, threshold = int(tree.feature[node]), float(tree.threshold[node])
        if not 0 <= feature < self.features:
            raise ArgumentError(f"a node looks at column {feature} of {self.features}: the dump is damaged")
        if node in tree.categories:
            return self._columns() - 1, 0.5
        if math.isnan(threshold):
            raise ArgumentError("a threshold is not a number: the dump is damaged")
        where = "zero" if tree.missing is None else tree.missing[node]
        if math.isinf(threshold) or abs(threshold) > 1e30:  # every number goes to one side
            if not self.takes_missing or where == "zero" or (where == "left") == (threshold > 0):
                return self._columns() - 1, 1.0 if threshold > 0 else -1.0
            if threshold < 0:
                raise ArgumentError("a node sends every number to the right and missing ones to the left")
            return 3 * self.features + feature, 0.5
        block = {"zero": 0, "left": 1, "right": 2}[where] if self.takes_missing else 0
        return block * self.features + feature, threshold

    def forward(self, x: Tensor, missing: Tensor | None = None, codes: Sequence[Tensor] = ()) -> Tensor:
        """Sums of leaves.

        Args:
            x: [rows, features]; missing numbers are NaN (in plain) or 0 where `missing` is 1.
            missing: [rows, features], 1 for a missing number.
            codes: of each categorical column [rows] whole numbers; the number of categories stands for any other.
        """
        check_rows(x, self.features)
        right = self._decisions(x.to(torch.float64), missing, codes)
        right = right.reshape(x.shape[0], self.count, -1)
        found = leaf_of_tree(right, self.leaves) if self.paths is None else self._leaf_of_paths(right, self.paths)
        found = found.sum(1)
        found = found if self.scale == 1 else found * self.scale
        return (found if self.divisor == 1 else found / self.divisor) + self.base

    def _decisions(self, x: Tensor, missing: Tensor | None, codes: Sequence[Tensor]) -> Tensor:
        """[rows, trees x places]: whether a row goes to the right."""
        columns, zeros = [x], 1
        if self.takes_missing and missing is None:
            columns, zeros = [x, x, x], self.features + 1
        elif self.takes_missing and missing is not None:
            far = missing.to(torch.float64) * self.beyond
            columns = [x, x - far, x + far, missing.to(torch.float64)]
        x = F.pad(torch.cat(columns, 1), (0, zeros))
        x = torch.index_select(x, 1, self.column.to(torch.int64))
        if self.right is not None:
            sizes = [size for _, size in sorted(self.sizes.items())]
            hot = torch.cat([F.one_hot(codes[i], size + 1) for i, size in enumerate(sizes)], 1)
            x = x + torch.matmul(hot, self.right.to(torch.int64)).to(torch.float64)
        return x >= self.threshold if self.strict else x > self.threshold

    def _leaf_of_paths(self, right: Tensor, paths: Tensor) -> Tensor:
        ends = F.pad(right.to(torch.int64), (0, 1), value=1)
        wrong = torch.einsum("ntp,tpl->ntl", ends, paths.to(torch.int64))
        return ((wrong < 1).unsqueeze(-1) * self.leaves).sum(2)

    def extra_repr(self) -> str:
        shape = f"depth {self.depth}" if self.complete else f"{self.nodes} nodes"
        return f"{self.count} trees of {shape}, {self.features} columns, {self.outputs} outputs"


def check_rows(x: Tensor, features: int) -> None:
    """Raise `ShapeError` unless x is [rows, features]."""
    if x.dim() != 2 or x.shape[1] != features:
        raise ShapeError(
            f"the model was fitted on {features} columns, and takes [rows, {features}], got {list(x.shape)}"
        )


def _secret(x: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(np.ascontiguousarray(x), dtype=torch.float64), requires_grad=False)


def _cost_of_paths(nodes: int) -> int:
    """Bytes of a row and a tree: a comparison takes some 45, of small numbers some 30, and a product with an owner's
    matrix 8 for each element. Its multiplications count, too: two take as long as a byte of 10 Gbit/s."""
    return (45 + 8) * nodes + (30 + 8) * (nodes + 1) + nodes * (nodes + 1) // 2
