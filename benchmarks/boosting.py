"""Boosted trees on shares: seconds, rounds and bytes of a tree, and scores beside xgboost's histogram method.

    python benchmarks/boosting.py [--rows 50000] [--columns 20] [--depth 4] [--bins 32] [--trees 3]
    python benchmarks/boosting.py --scores --trees 30 [--seeds 5]

The first prints a line for each way in which the data is owned, all parties in this process; the cost of a tree is that
of all trees less one, so that what is done once (bins, masks) stands apart. The second fits by the reference, whose
bits a fit on shares has, and prints the test scores of each seed's split, with xgboost's for the same settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split

import sectorch
from sectorch.tables import BoostedTreesClassifier, BoostedTreesRegressor


def parts(way: str, x: np.ndarray, session: sectorch.Session) -> list[Any]:
    """The tables of their owners: columns of A and S, of a third hospital, or rows of three."""
    names = [f"x{i}" for i in range(x.shape[1])]

    def owned(owner: str, rows: slice, columns: list[int]) -> Any:
        return sectorch.owned({names[i]: x[rows, i] for i in columns}, owner=owner, session=session)

    every, half, third = list(range(x.shape[1])), x.shape[1] // 2, len(x) // 3
    return {
        "vertical": lambda: [owned("A", slice(None), every[:half]), owned("S", slice(None), every[half:])],
        "vertical of H1": lambda: [owned("A", slice(None), every[:half]), owned("H1", slice(None), every[half:])],
        "horizontal": lambda: [
            owned("A", slice(third), every), owned("S", slice(third, 2 * third), every),
            owned("H1", slice(2 * third, None), every),
        ],
    }[way]()  # fmt: skip


def fitted(way: str, x: np.ndarray, y: np.ndarray, trees: int, settings: dict[str, Any]) -> dict[str, float]:
    session = sectorch.Session(owners=("H1",))
    labels = sectorch.share(torch.from_numpy(y), session=session, owner="A")
    model = BoostedTreesClassifier(trees, **settings)
    began, busy = time.perf_counter(), time.process_time()
    with sectorch.profile() as seen:
        model.fit(parts(way, x, session), labels)
    return {
        "seconds": time.perf_counter() - began, "processor": time.process_time() - busy, "rounds": seen.rounds,
        "online_mb": seen.online_bytes / 1e6, "dealt_mb": seen.offline_bytes / 1e6,
    }  # fmt: skip


def costs(given: argparse.Namespace) -> list[dict[str, Any]]:
    random, lines = np.random.default_rng(0), []
    x = random.normal(size=(given.rows, given.columns)).clip(-8, 8)
    y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * random.normal(size=len(x)) > 0).astype(np.int64)
    settings = {"max_depth": given.depth, "max_bins": given.bins}
    for way in given.ways:
        fitted(way, x[:300], y[:300], 1, settings)  # compiles loops
        first, whole = (
            min((fitted(way, x, y, trees, settings) for _ in range(given.repeats)), key=lambda line: line["seconds"])
            for trees in (1, given.trees + 1)
        )
        tree = {name: (whole[name] - first[name]) / given.trees for name in whole}
        once = {name: first[name] - tree[name] for name in first}
        lines.append({"way": way, "rows": given.rows, "columns": given.columns, **settings, "tree": tree, "once": once})
        print(
            f"{way}, {given.rows} x {given.columns}, depth {given.depth}, {given.bins} bins, a tree: "
            f"{tree['seconds']:.2f} s ({tree['processor']:.2f} s of the processor), {tree['rounds']:.0f} rounds, "
            f"{tree['online_mb']:.0f} MB online, {tree['dealt_mb']:.0f} MB dealt; once {once['seconds']:.2f} s, "
            f"{once['rounds']:.0f} rounds, {once['online_mb'] + once['dealt_mb']:.0f} MB",
            flush=True,
        )
    return lines


def sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """Data that comes with scikit-learn, in units in which it is below 4,096; and whether y is a class."""
    x, y = datasets.load_breast_cancer(return_X_y=True)
    yield "breast cancer", x / x.max(0) * 8, y, True
    lost = np.random.default_rng(0).random(x.shape) < np.where(x > np.median(x, 0), 0.4, 0.1)
    yield "breast cancer, a quarter missing", np.where(lost, np.nan, x / x.max(0) * 8), y, True
    x, y = datasets.load_digits(return_X_y=True)
    yield "digits from 5 on", x, (y >= 5).astype(np.int64), True
    yield "digits, 10 classes", x, y.copy(), True
    x, y = datasets.load_wine(return_X_y=True)
    yield "wine, 3 classes", x / x.max(0) * 8, y, True
    x, y = datasets.make_classification(20_000, 20, n_informative=10, random_state=1)
    yield "make_classification", x, y, True
    x, y, *_ = datasets.make_friedman1(10_000, 10, noise=1.0, random_state=1)
    yield "make_friedman1", x, y / 10, False
    x, y = datasets.load_diabetes(return_X_y=True)
    yield "diabetes", x * 10, y / 100, False


def scores(given: argparse.Namespace) -> list[dict[str, Any]]:
    import xgboost

    lines = []
    for name, x, y, classes in sets():
        if given.data and name not in given.data:
            continue
        settings = {"n_estimators": given.trees, "max_depth": given.depth, "learning_rate": 0.3}
        own_kind = BoostedTreesClassifier if classes else BoostedTreesRegressor
        other_kind = xgboost.XGBClassifier if classes else xgboost.XGBRegressor
        found = []
        for seed in range(given.seeds):
            train, test, y_train, y_test = train_test_split(x, y, test_size=0.3, random_state=seed)
            own = own_kind(max_bins=given.bins, **settings).fit(train, y_train)
            other = other_kind(tree_method="hist", n_jobs=1, **settings).fit(train, y_train)
            found.append((100 * own.score(test, y_test), 100 * other.score(test, y_test)))
        own_scores, other_scores = np.array(found).T
        apart = own_scores - other_scores
        lines.append({"data": name, "own": own_scores.tolist(), "xgboost": other_scores.tolist()})
        print(
            f"{name}: {own_scores.mean():.2f} (from {own_scores.min():.2f} to {own_scores.max():.2f}), xgboost "
            f"{other_scores.mean():.2f} (from {other_scores.min():.2f} to {other_scores.max():.2f}); apart by "
            f"{apart.mean():+.2f} in the mean: {', '.join(f'{a:+.2f}' for a in apart)}",
            flush=True,
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--bins", type=int, default=32)
    parser.add_argument("--trees", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=["vertical", "vertical of H1", "horizontal"])
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--data", nargs="+", help="names of data sets, as they are printed; all by default")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines = scores(given) if given.scores else costs(given)
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
