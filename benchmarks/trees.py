"""Trees as secret models: seconds, bytes and rounds, and how often a prediction is the library's own.

    python benchmarks/trees.py forest [--trees 100] [--depth 8] [--rows 1000] [--columns 30] [--repeats 3] [--json FILE]
    python benchmarks/trees.py kinds [--rows 200] [--json FILE]

`forest`: one random forest of scikit-learn, in one process with all parties, on rows that it has not seen; the first
call, with tracing and compiled loops, is not counted. `kinds`: small models of every kind, against the library's
`predict`; rows with a number within 2^-20 of a threshold, and not equal to it, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_wine, make_classification, make_friedman1
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import sectorch
from sectorch.fitted_models import module

UNIT = 2.0**-20


def forest(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The seconds of a forest, in all and of the online phase."""
    x, y = make_classification(given.rows + 4000, given.columns, n_informative=given.columns // 2, random_state=0)
    fitted = RandomForestClassifier(given.trees, max_depth=given.depth, random_state=0).fit(
        x[given.rows :], y[given.rows :]
    )
    model = module(fitted)
    secure_model, rows, want = (
        sectorch.secure(model),
        model.schema.rows(x[: given.rows]),
        fitted.predict(x[: given.rows]),
    )
    secure_model(**rows)
    found = []
    for _ in range(given.repeats):
        began, processor = time.perf_counter(), time.process_time()
        with sectorch.profile() as seen:
            got = secure_model(**rows).numpy()
        found.append(
            {
                "trees": given.trees, "depth": given.depth, "rows": given.rows,
                "shape": model.scores.trees.extra_repr(),
                "seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - processor,
                "rounds": seen.rounds, "online_mb": seen.online_bytes / 1e6, "dealt_mb": seen.offline_bytes / 1e6,
                "other_predictions": int((got != want).sum()), "near_thresholds": int(near(model, rows).sum()),
            }
        )  # fmt: skip
        line = found[-1]
        print(
            f"{line['shape']}, {given.rows} rows: {line['seconds']:.2f} s ({line['processor_seconds']:.2f} s of the "
            f"processor), {line['rounds']} rounds, {line['online_mb']:.0f} MB online, {line['dealt_mb']:.0f} MB dealt; "
            f"{line['other_predictions']} predictions are not the library's, {line['near_thresholds']} rows are near a "
            f"threshold",
            flush=True,
        )
    return found


def near(model: Any, rows: dict[str, Any]) -> np.ndarray:
    """Which rows have a number within 2^-20 of a threshold that their column is compared with, [rows]."""
    trees = getattr(model.scores, "trees", None)
    x = rows["x"].numpy()
    found = np.zeros(len(x), bool)
    if trees is None:
        return found
    column, threshold = trees.column.numpy().astype(int), trees.threshold.numpy()
    for feature in range(trees.features):
        known = np.unique(threshold[column == feature])
        if len(known):
            distance = np.abs(x[:, feature, None] - known[None])
            found |= ((distance > 0) & (distance <= UNIT)).any(1)
    return found


def models() -> dict[str, tuple[str, Any]]:
    """By name the data and an estimator that is not fitted."""
    few: dict[str, Any] = {"n_estimators": 20, "random_state": 0}
    scaled = lambda model: make_pipeline(StandardScaler(), model)
    made = {
        "DecisionTreeClassifier": ("cancer", DecisionTreeClassifier(max_depth=6, random_state=0)),
        "DecisionTreeRegressor": ("friedman", DecisionTreeRegressor(max_depth=6, random_state=0)),
        "RandomForestClassifier": ("wine", RandomForestClassifier(max_depth=6, **few)),
        "RandomForestRegressor": ("friedman", RandomForestRegressor(max_depth=6, **few)),
        "ExtraTreesClassifier": ("wine", ExtraTreesClassifier(max_depth=6, **few)),
        "GradientBoostingClassifier": ("cancer", GradientBoostingClassifier(**few)),
        "GradientBoostingClassifier, 3 classes": ("wine", GradientBoostingClassifier(**few)),
        "GradientBoostingRegressor": ("friedman", GradientBoostingRegressor(**few)),
        "HistGradientBoostingClassifier": ("cancer", HistGradientBoostingClassifier(max_iter=20)),
        "HistGradientBoostingClassifier, 3 classes": ("wine", HistGradientBoostingClassifier(max_iter=20)),
        "HistGradientBoostingRegressor": ("friedman", HistGradientBoostingRegressor(max_iter=20)),
        "IsolationForest": ("cancer", IsolationForest(**few)),
        "LogisticRegression": ("wine", scaled(LogisticRegression())),
        "Ridge": ("friedman", Ridge()),
        "MLPClassifier": ("cancer", scaled(MLPClassifier((16,), max_iter=200, random_state=0))),
        "SVC": ("wine", scaled(SVC())),
        "SVR": ("friedman", SVR()),
    }
    try:
        import xgboost

        made |= {
            "XGBClassifier": ("cancer", xgboost.XGBClassifier(n_estimators=20, max_depth=4)),
            "XGBClassifier, 3 classes": ("wine", xgboost.XGBClassifier(n_estimators=20, max_depth=4)),
            "XGBRegressor": ("friedman", xgboost.XGBRegressor(n_estimators=20, max_depth=4)),
        }
    except ImportError:
        print("xgboost is not installed")
    try:
        import lightgbm

        made |= {
            "LGBMClassifier": ("cancer", lightgbm.LGBMClassifier(n_estimators=20, verbose=-1)),
            "LGBMClassifier, 3 classes": ("wine", lightgbm.LGBMClassifier(n_estimators=20, verbose=-1)),
            "LGBMRegressor": ("friedman", lightgbm.LGBMRegressor(n_estimators=20, verbose=-1)),
        }
    except ImportError:
        print("lightgbm is not installed")
    return made


def friedman(return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
    """A regression of numbers without a grid: on one, thresholds lie midway, and so on other numbers of it."""
    return make_friedman1(500, random_state=0)


DATA: dict[str, Callable[..., Any]] = {"cancer": load_breast_cancer, "wine": load_wine, "friedman": friedman}


def kinds(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind of model against its library."""
    found = []
    for name, (data, estimator) in models().items():
        x, y = DATA[data](return_X_y=True)
        estimator.fit(x[::2], y[::2])
        model, asked = module(estimator), x[1::2][: given.rows]
        rows, want = model.schema.rows(asked), estimator.predict(asked)
        want = want if model.classes is None else np.searchsorted(model.classes, want)
        secure_model = sectorch.secure(model)
        began = time.perf_counter()
        got = secure_model(**rows).numpy()
        first = time.perf_counter() - began
        with sectorch.profile() as seen:
            began = time.perf_counter()
            secure_model(**rows)
            seconds = time.perf_counter() - began
        close = near(model, rows)
        apart = np.abs(got - want) > (0 if want.dtype.kind in "iu" else 1e-4 * (1 + np.abs(want)))
        line = {
            "model": name, "rows": len(asked), "near": int(close.sum()), "other": int(apart[~close].sum()),
            "error": float(np.abs(got - want)[~close].max(initial=0.0)), "first_seconds": first, "seconds": seconds,
            "rounds": seen.rounds, "mb": (seen.online_bytes + seen.offline_bytes) / 1e6,
        }  # fmt: skip
        found.append(line)
        print(
            f"{name}: {line['other']} of {line['rows']} rows differ, {line['near']} near a threshold are left out; "
            f"largest error {line['error']:.1e}; {seconds:.2f} s (first {first:.1f} s), {line['rounds']} rounds, "
            f"{line['mb']:.1f} MB",
            flush=True,
        )
    return found


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forest", "kinds"))
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--columns", type=int, default=30)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.rows = given.rows or (1000 if given.what == "forest" else 200)
    warnings.filterwarnings("ignore", category=UserWarning)
    found = forest(given) if given.what == "forest" else kinds(given)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
