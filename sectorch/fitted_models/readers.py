"""Fitted trees of scikit-learn, xgboost and lightgbm as `trees.Tree`s.

xgboost's models are read from their JSON, lightgbm's from their text: nothing is unpickled, and neither library needs
to be installed to read a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnsupportedOpError
from .trees import Tree


@dataclass
class Ensemble:
    """Trees whose outputs are summed, and what follows the sum.

    Attributes:
        classes: of a classifier; the number of its classes, where the library names none.
        link: what makes a prediction of the sum: "identity", "exp", "sigmoid", "softmax" or "mean" of probabilities.
        categories: by column the raw categories in the order of their codes.
        zero_missing: whether 0 counts as missing.
        names: of the columns, where they have names.
        inclusive: whether a binary score of exactly 0 is the second class.
    """

    trees: list[Tree]
    features: int
    base: np.ndarray
    link: str = "identity"
    strict: bool = False
    divisor: float = 1.0
    classes: np.ndarray | None = None
    categories: dict[int, list[Any]] = field(default_factory=dict)
    zero_missing: bool = False
    names: list[str] | None = None
    inclusive: bool = False


def stack_outputs(tree: Tree, output: int, outputs: int) -> Tree:
    """A tree with one output as one of several, the others 0."""
    value = np.zeros((len(tree.left), outputs))
    value[:, output] = tree.value[:, 0]
    tree.value = value
    return tree


def sklearn_tree(fitted: Any, value: np.ndarray, features: np.ndarray | None = None, missing: bool = True) -> Tree:
    """A fitted `sklearn.tree` estimator's tree.

    Args:
        value: [nodes, outputs], what its leaves are worth.
        features: the numbers of its columns among those of the ensemble.
        missing: whether it takes missing numbers.
    """
    state = fitted.tree_
    left, right = np.array(state.children_left), np.array(state.children_right)
    feature = np.where(left >= 0, state.feature, 0)
    feature = feature if features is None else np.asarray(features)[feature]
    to_left = getattr(state, "missing_go_to_left", None)
    where = None
    if missing and to_left is not None:
        where = np.where(np.asarray(to_left, bool), "left", "right").tolist()
    return Tree(feature, np.array(state.threshold, np.float64), left, right, value, where)


def hist_tree(predictor: Any, sizes: dict[int, int], order: np.ndarray, known: dict[int, set[int]]) -> Tree:
    """A `TreePredictor` of scikit-learn's histogram gradient boosting.

    Args:
        sizes: by column the number of categories. order: the original column of each column that the trees see.
        known: by column the codes that occurred in fitting: others are missing.
    """
    nodes = predictor.nodes
    leaf = nodes["is_leaf"].astype(bool)
    left = np.where(leaf, -1, nodes["left"].astype(np.int64))
    right = np.where(leaf, -1, nodes["right"].astype(np.int64))
    where = np.where(nodes["missing_go_to_left"].astype(bool), "left", "right").tolist()
    feature = np.where(leaf, 0, order[np.where(leaf, 0, nodes["feature_idx"])])
    tree = Tree(feature, nodes["num_threshold"].astype(np.float64), left, right, nodes["value"][:, None].copy(), where)
    for node in np.flatnonzero(nodes["is_categorical"].astype(bool) & ~leaf):
        column = int(feature[node])
        if column not in sizes:
            raise ArgumentError(f"a node splits column {column} by categories that are not known")
        bits = predictor.raw_left_cat_bitsets[nodes["bitset_idx"][node]]
        goes_left = {c for c in range(sizes[column]) if bits[c // 32] >> (c % 32) & 1}
        other = not nodes["missing_go_to_left"][node]
        lost = set(range(sizes[column])) - known.get(column, set(range(sizes[column])))
        tree.categories[int(node)] = (set(range(sizes[column])) - goes_left - lost) | (lost if other else set())
        tree.other_right[int(node)] = bool(other)
    return tree


# xgboost


def read_xgboost(text: str | bytes, rounds: int | None = None) -> Ensemble:
    """A model of xgboost from its JSON, as `Booster.save_model("model.json")` writes it.

    Args:
        rounds: read so many boosting rounds; all, or those to the best iteration that the model names.

    Raises:
        ArgumentError: no such JSON. UnsupportedOpError: trees with several outputs, or an objective without a link.
    """
    try:
        learner = json.loads(text)["learner"]
        booster, settings = learner["gradient_booster"], learner["learner_model_param"]
        objective, names = learner["objective"]["name"], learner.get("feature_names") or None
        features, count = int(settings["num_feature"]), max(1, int(settings.get("num_class", 0)))
        weights = None
        if booster["name"] == "dart":
            weights, booster = [float(w) for w in booster["weight_drop"]], booster["gbtree"]
        if booster["name"] == "gblinear":
            raise UnsupportedOpError("booster='gblinear' is a linear model: fit scikit-learn's on the same data")
        return _xgboost(booster, settings, objective, count, features, names, weights, rounds)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"this is not the JSON of an xgboost model ({type(error).__name__}); write it by "
            f"booster.save_model('model.json')"
        ) from None


def _xgboost(
    booster: dict[str, Any], settings: dict[str, Any], objective: str, count: int, features: int,
    names: list[str] | None, weights: list[float] | None, rounds: int | None,
) -> Ensemble:  # fmt: skip
    model = booster["model"]
    link, classes = _xgboost_link(objective, count)
    base = np.array(json.loads(f"[{str(settings['base_score']).strip('[]')}]"), np.float64)
    base = np.broadcast_to(base, (count,)).copy()
    if link == "sigmoid":
        base = np.log(base) - np.log1p(-base)
    elif link == "exp":
        base = np.log(base)
    parallel = int(model["gbtree_model_param"].get("num_parallel_tree", 1) or 1)
    read, groups = model["trees"], model["tree_info"]
    if rounds is not None:
        kept = rounds * parallel * count
        read, groups = read[:kept], groups[:kept]
    trees, sizes = [], {}
    for i, (given, group) in enumerate(zip(read, groups, strict=True)):
        tree = _xgboost_tree(given, sizes)
        tree.value = tree.value * (1.0 if weights is None else weights[i])
        trees.append(stack_outputs(tree, int(group), count))
    found = Ensemble(trees, features, base, link, strict=True, classes=classes, names=names)
    found.categories = {column: list(range(size)) for column, size in sizes.items()}
    return found


def _xgboost_link(objective: str, count: int) -> tuple[str, np.ndarray | None]:
    binary, several = np.arange(2), np.arange(count)
    known = {
        "binary:logistic": ("sigmoid", binary), "binary:logitraw": ("identity", binary),
        "reg:logistic": ("sigmoid", None),
        "multi:softprob": ("softmax", several), "multi:softmax": ("softmax", several),
        "count:poisson": ("exp", None), "reg:gamma": ("exp", None), "reg:tweedie": ("exp", None),
        "survival:cox": ("exp", None),
    }  # fmt: skip
    sums = (
        "reg:squarederror", "reg:linear", "reg:squaredlogerror", "reg:pseudohubererror", "reg:absoluteerror",
        "reg:quantileerror", "rank:pairwise", "rank:ndcg", "rank:map",
    )  # fmt: skip
    if objective in known:
        return known[objective]
    if objective in sums:
        return "identity", None
    raise UnsupportedOpError(
        f"xgboost's objective '{objective}' is not supported; its scores are a sum of trees all the same"
    )


def _xgboost_tree(given: dict[str, Any], sizes: dict[int, int]) -> Tree:
    if int(given["tree_param"].get("size_leaf_vector", 0) or 0) > 1:
        raise UnsupportedOpError(
            "trees with vector leaves are not supported: fit with multi_strategy='one_output_per_tree'"
        )
    left, right = np.array(given["left_children"], np.int64), np.array(given["right_children"], np.int64)
    condition = np.array(given["split_conditions"], np.float32).astype(np.float64)
    where = np.where(np.array(given["default_left"], np.int64) > 0, "left", "right").tolist()
    tree = Tree(np.array(given["split_indices"], np.int64), condition, left, right, condition[:, None].copy(), where)
    for node, first, size in zip(
        given.get("categories_nodes", ()), given.get("categories_segments", ()), given.get("categories_sizes", ()),
        strict=True,
    ):  # fmt: skip
        members = set(map(int, given["categories"][first : first + size]))
        tree.categories[int(node)], tree.other_right[int(node)] = members, False
        column = int(tree.feature[node])
        sizes[column] = max(sizes.get(column, 0), max(members) + 1)
    return tree


# lightgbm


def read_lightgbm(text: str) -> Ensemble:
    """A model of lightgbm from its text, as `Booster.save_model("model.txt")` writes it.

    Raises:
        ArgumentError: no such text. UnsupportedOpError: linear trees, or an objective without a link.
    """
    body, ends, _ = text.partition("\nend of trees")
    head, *blocks = body.split("\nTree=")
    if not head.startswith("tree") or not ends:
        raise ArgumentError("this is not the text of a lightgbm model; write it by booster.save_model('model.txt')")
    try:
        return _lightgbm(text, head, blocks)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(f"the text of a lightgbm model is damaged ({type(error).__name__})") from None


def _lightgbm(text: str, head: str, blocks: list[str]) -> Ensemble:
    settings = _fields(head)
    features, count = int(settings["max_feature_idx"]) + 1, int(settings.get("num_tree_per_iteration", "1"))
    words = settings.get("objective", "regression").split()
    link, classes = _lightgbm_link(words, count)
    divisor = max(1.0, len(blocks) / count) if "average_output" in head.splitlines() else 1.0
    trees, sizes, kinds = [], {}, set()
    for i, block in enumerate(blocks):
        trees.append(stack_outputs(_lightgbm_tree(_fields(block), sizes, kinds), i % count, count))
    if not trees:
        raise ArgumentError("a lightgbm model without trees predicts nothing")
    if "zero" in kinds and kinds != {"zero"}:
        raise UnsupportedOpError("0 is missing in some columns and not in others: fit with one zero_as_missing")
    found = Ensemble(trees, features, np.zeros(count), link, divisor=divisor, classes=classes)
    found.categories = {column: list(range(size)) for column, size in sizes.items()}
    found.zero_missing, found.names = "zero" in kinds, settings.get("feature_names", "").split() or None
    last = text.rstrip().rsplit("\n", 1)[-1]
    if last.startswith("pandas_categorical:"):
        named = json.loads(last.partition(":")[2]) or []
        infos = [
            i
            for i, info in enumerate(settings.get("feature_infos", "").split())
            if info[:1].isdigit() or info[:1] == "-"
        ]
        for column, values in zip(infos, named, strict=False):
            found.categories[column] = values
    for tree in trees:  # its sets name the categories that go to the left
        for node, members in tree.categories.items():
            tree.categories[node] = set(range(len(found.categories[int(tree.feature[node])]))) - members
    return found


def _fields(block: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def _lightgbm_link(words: list[str], count: int) -> tuple[str, np.ndarray | None]:
    name = words[0]
    if name in ("binary", "cross_entropy") and all(w in ("sigmoid:1", name) for w in words):
        return "sigmoid", np.arange(2) if name == "binary" else None
    if name == "multiclass":
        return "softmax", np.arange(count)
    if name in ("poisson", "gamma", "tweedie"):
        return "exp", None
    plain = ("regression", "regression_l1", "huber", "fair", "quantile", "mape", "lambdarank", "rank_xendcg")
    if name in plain and "sqrt" not in words:
        return "identity", None
    raise UnsupportedOpError(f"lightgbm's objective '{' '.join(words)}' is not supported; take one of its defaults")


def _lightgbm_tree(given: dict[str, str], sizes: dict[int, int], kinds: set[str]) -> Tree:
    if given.get("is_linear", "0") != "0":
        raise UnsupportedOpError("linear trees are not supported: fit with linear_tree=False")

    def numbers(name: str, kind: Any = np.float64) -> np.ndarray:
        return np.array(given.get(name, "").split(), kind)

    leaves = numbers("leaf_value")
    inner = len(leaves) - 1
    child = lambda name: np.array([c if c >= 0 else inner + ~c for c in numbers(name, np.int64)], np.int64)
    ends = np.full(len(leaves), -1)
    left, right = (np.concatenate([child(name), ends]) if inner else ends for name in ("left_child", "right_child"))
    value = np.concatenate([np.zeros(inner), leaves])[:, None]
    if not inner:
        return Tree(np.zeros(1, np.int64), np.zeros(1), left, right, value, ["zero"])
    feature, threshold = numbers("split_feature", np.int64), numbers("threshold")
    how = numbers("decision_type", np.int64)
    where = []
    for kind in how:
        missing = (int(kind) >> 2) & 3
        if not kind & 1:
            kinds.add(("none", "zero", "nan")[missing])
        where.append("zero" if missing == 0 else "left" if kind & 2 else "right")
    pad = lambda v: np.concatenate([v, np.zeros(len(leaves), v.dtype)])
    tree = Tree(pad(feature), pad(threshold), left, right, value, where + ["zero"] * len(leaves))
    bounds, words = numbers("cat_boundaries", np.int64), numbers("cat_threshold", np.int64)
    for node in np.flatnonzero(how & 1):
        which = int(threshold[node])
        span = words[bounds[which] : bounds[which + 1]]
        members = {32 * i + b for i, word in enumerate(span) for b in range(32) if int(word) >> b & 1}
        column = int(feature[node])
        sizes[column] = max(sizes.get(column, 0), max(members, default=0) + 1)
        tree.categories[int(node)], tree.other_right[int(node)] = members, True  # of the left, turned round at the end
    return tree
