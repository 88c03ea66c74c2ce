"""Every estimator, step and form of a table that is converted gives what its library gives, or is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import ensemble, linear_model, neural_network, svm, tree
from sklearn.base import BaseEstimator, clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.utils import all_estimators

import sectorch
from sectorch import fitted_models
from sectorch.errors import DtypeError, NonFiniteError, SectorchError

TOLERANCE = 1e-6
"""The module is compared in float64, where it has its library's operations in another order; trees of boosters and nets
sum some hundred terms, and thresholds are off by a unit of float32 in places that these rows do not meet."""

DRAW = np.random.default_rng(0)
X = np.round(DRAW.normal(size=(36, 4)) * 64) / 64
S = X @ np.array([1.0, -2.0, 0.5, 0.3])
THREE = np.digitize(S, [-1, 1])
TARGETS: dict[str, np.ndarray] = {
    "two": (S > 0).astype(int),
    "three": THREE,
    "text": np.where(S > 0, "yes", "no"),
    "bool": S > 0,
    "gaps": np.array([7, -3, 100])[THREE],
    "float classes": np.where(S > 0, 2.0, -1.0),
    "one class": np.zeros(36, int),
    "labels": np.stack([S > 0, X[:, 0] > 0], 1).astype(int),
    "three labels": np.stack([S > 0, X[:, 0] > 0, X[:, 1] > 0], 1).astype(int),
    "several classes": np.stack([THREE, np.digitize(X[:, 0], [-1, 1])], 1),
    "value": S,
    "values": np.stack([S, X[:, 1]], 1),
    "column": S[:, None],
    "above zero": np.exp(S / 4),
    "whole": np.round(S * 3),
    "constant": np.ones(36),
}
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "LogisticRegression": ({}, {"solver": "liblinear"}, {"fit_intercept": False}, {"class_weight": "balanced"}),
    "SGDClassifier": ({}, {"loss": "log_loss"}, {"loss": "modified_huber"}),
    "LinearSVC": ({}, {"multi_class": "crammer_singer"}),
    "SVC": ({}, {"kernel": "linear"}, {"kernel": "poly", "degree": 2, "coef0": 1.0}, {"kernel": "sigmoid"},
            {"break_ties": True}, {"decision_function_shape": "ovo"}, {"gamma": 0.5, "class_weight": "balanced"}),
    "SVR": ({}, {"kernel": "linear"}, {"kernel": "poly"}),
    "TweedieRegressor": ({}, {"power": 1.5}, {"power": 0, "link": "log"}, {"power": 2, "link": "identity", "alpha": 9}),
    "GradientBoostingClassifier": ({}, {"loss": "exponential"}, {"init": "zero"}),
    "GradientBoostingRegressor": ({}, {"loss": "huber"}, {"loss": "quantile"}, {"init": "zero"}),
    "HistGradientBoostingRegressor": ({}, {"loss": "poisson"}, {"loss": "gamma"}, {"loss": "absolute_error"}),
    "MLPClassifier": ({}, {"activation": "tanh"}, {"activation": "logistic"}, {"activation": "identity"}),
    "MLPRegressor": ({}, {"loss": "poisson"}),
    "IsolationForest": ({}, {"contamination": 0.3}, {"max_features": 0.5}),
    "LinearRegression": ({}, {"positive": True}, {"fit_intercept": False}),
    "RidgeClassifier": ({}, {"class_weight": "balanced"}),
}  # fmt: skip
SMALL = {"n_estimators": 3, "max_depth": 3, "hidden_layer_sizes": (4,), "cv": 2, "random_state": 0, "n_jobs": None}
MODULES = ("linear_model", "svm", "tree", "ensemble", "neural_network")


def estimators() -> Iterator[tuple[str, BaseEstimator]]:
    """Every estimator of the packages that are converted, small, in its forms."""
    for name, kind in all_estimators():
        if kind.__module__.split(".")[1] not in MODULES or not hasattr(kind, "predict"):
            continue
        for form in FORMS.get(name, ({},)):
            try:
                made = kind(**form)
            except TypeError:  # those that are made of another one
                continue
            known = made.get_params(deep=False)
            few = {"max_iter": 3} if "HistGradient" in name else {"max_iter": 40} if "MLP" in name else {}
            yield f"{name}{form or ''}", made.set_params(**{k: v for k, v in {**SMALL, **few}.items() if k in known})


def fitted(model: Any, x: Any, y: np.ndarray) -> Any:
    """A fitted copy, or None where the library refuses the target."""
    try:
        copied: Any = clone(model)
        return copied.fit(x, y)
    except Exception:
        return None


def plain(model: Any, rows: Any, output: str) -> np.ndarray | None:
    """The library's own result, or None where it has none."""
    last = model.steps[-1][1] if hasattr(model, "steps") else model
    if output == "decision_function" and isinstance(last, ensemble.IsolationForest):
        return model.score_samples(rows)  # what `module` says that it gives
    try:
        return np.asarray(getattr(model, output)(rows))
    except (AttributeError, ValueError):
        return None


def judge(model: Any, rows: Any, output: str, missing: bool = False) -> str:
    """ "right", "refused", "no result" where the library has none, or what is wrong."""
    want = plain(model, rows, output)
    try:
        module = fitted_models.module(model, output, missing=missing)
        got = module(**module.schema.rows(rows)).numpy()
    except SectorchError:
        return "refused"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    if want is None or (want.dtype.kind == "f" and not np.isfinite(want).all()):
        return "no result"  # secure() refuses weights that are not finite
    if output == "predict" and module.classes is not None:
        got = np.asarray(module.classes)[got]
    if got.shape != want.shape:
        return f"{got.shape} for {want.shape}"
    if want.dtype.kind != "f":
        return "right" if (got == want).all() else f"{(got != want).sum()} of {want.size} classes differ"
    off = np.abs(got - want) / (1 + np.abs(want))
    return "right" if off.max(initial=0.0) <= TOLERANCE else f"off by {off.max():.2g}"


def sweep(cases: Iterator[tuple[str, Callable[[], str]]]) -> dict[str, int]:
    """How often each verdict came; a test fails with every case that is neither right nor refused."""
    count: dict[str, int] = {}
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that are cut short, and of names that an array lacks
        for name, run in cases:
            verdict = run()
            kind = verdict if verdict in ("right", "refused", "no result") else "wrong"
            count[kind] = count.get(kind, 0) + 1
            if kind == "wrong":
                wrong.append(f"{name}: {verdict}")
    assert not wrong, "\n".join(wrong)
    return count


def every_estimator(targets: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    for (name, model), target in itertools.product(list(estimators()), list[str](targets)):
        found = fitted(model, X, TARGETS[target])
        outputs = ("predict", "predict_proba", "decision_function")
        for output in outputs if found is not None else ():
            yield f"{name} {target} {output}", lambda m=found, o=output: judge(m, X[:20], o)


ALIKE = ("three", "column", "labels", "above zero")


def test_every_estimator_gives_what_its_library_gives():
    count = sweep(every_estimator(ALIKE))
    assert count["right"] > 140, count


@pytest.mark.sectorch_long
def test_every_estimator_and_every_kind_of_target():
    count = sweep(every_estimator([name for name in TARGETS if name not in ALIKE]))
    assert count["right"] > 250, count


STEPS: dict[str, list[Any]] = {
    "std": [StandardScaler()], "no mean": [StandardScaler(with_mean=False)], "no std": [StandardScaler(with_std=False)],
    "min max": [MinMaxScaler((-1, 2))], "clip": [MinMaxScaler(clip=True)], "max": [MaxAbsScaler()],
    "robust": [RobustScaler(unit_variance=True)], "robust alone": [RobustScaler(with_centering=False)],
    "rows": [Normalizer()], "powers": [PolynomialFeatures(2)], "same": [FunctionTransformer()],
    "tanh": [FunctionTransformer(np.tanh)], "pca": [PCA(2)], "white": [StandardScaler(), PCA(3, whiten=True)],
    "best": [StandardScaler(), SelectKBest(k=2), MinMaxScaler()], "imputed": [SimpleImputer()],
    "median": [StandardScaler(), SimpleImputer(strategy="median"), RobustScaler()],
    "union": [FeatureUnion([("a", StandardScaler()), ("b", PCA(2))])], "nested": [make_pipeline(StandardScaler())],
    "columns": [ColumnTransformer([("a", StandardScaler(), [0, -1]), ("b", "passthrough", [2])])],
    "remainder": [ColumnTransformer([("a", StandardScaler(), [2])], remainder="passthrough")],
    "weights": [
        ColumnTransformer([("a", StandardScaler(), [2]), ("b", "passthrough", [0])], transformer_weights={"a": 3.0})
    ],
    "mask": [ColumnTransformer([("a", StandardScaler(), [True, False, True, False])])],
    "slice": [ColumnTransformer([("a", StandardScaler(), slice(1, 3)), ("b", "drop", [0])])],
    "twice": [ColumnTransformer([("a", StandardScaler(), [0]), ("b", MinMaxScaler(), [0, 1])])],
    "parts": [
        ColumnTransformer([("a", make_pipeline(SimpleImputer(), PCA(1)), [0, 1]), ("b", SimpleImputer(), [3, 2])])
    ],
    "after": [StandardScaler(), ColumnTransformer([("a", MinMaxScaler(), [1]), ("b", "passthrough", [0, 2])])],
}  # fmt: skip
LAST = {
    "logistic": linear_model.LogisticRegression(), "ridge": linear_model.Ridge(), "svc": svm.SVC(),
    "linear svc": svm.SVC(kernel="linear"), "tree": tree.DecisionTreeClassifier(max_depth=3),
    "net": neural_network.MLPClassifier((4,), max_iter=30, random_state=0),
    "histograms": ensemble.HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=2),
}  # fmt: skip
HOLES = np.where(DRAW.uniform(size=X.shape) < 0.2, np.nan, X)
ROWS: dict[str, np.ndarray] = {
    "float64": X, "float32": X.astype(np.float32), "whole": np.round(X * 3).astype(int), "bool": X > 0,
    "objects": X.astype(object), "constant": np.where(np.arange(4) == 2, 5.0, X), "holes": HOLES,
    "one hole": np.where(np.arange(144).reshape(36, 4) == 0, np.nan, X), "large": X * [900.0, 1, 1, 1],
}  # fmt: skip


def every_step(rows: Any, lasts: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    for steps, last, row in itertools.product(STEPS, lasts, rows):
        x = ROWS[row]
        model = make_pipeline(*map(clone, STEPS[steps]), clone(LAST[last]))
        found = fitted(model, x, THREE)
        found = fitted(model, X, THREE) if found is None else found  # then the holes come later
        for missing in (False, True) if found is not None else ():
            yield f"{steps} {last} {row} {missing}", lambda m=found, x=x, gone=missing: judge(m, x, "predict", gone)


def test_every_step_before_a_model():
    count = sweep(every_step(("float64", "holes"), ("ridge", "histograms")))
    assert count["right"] > 50, count


@pytest.mark.sectorch_long
def test_every_step_and_every_kind_of_rows():
    count = sweep(every_step(ROWS, LAST))
    assert count["right"] > 500, count


def test_a_model_that_fills_no_holes_takes_none():
    some = ColumnTransformer([("a", SimpleImputer(), [0, 1]), ("b", "passthrough", [2])])
    for steps, taken in (([], []), ([StandardScaler()], []), ([some], [0, 1, 3]), ([SimpleImputer()], [0, 1, 2, 3])):
        model = make_pipeline(*steps, linear_model.Ridge()).fit(X, S)
        module = fitted_models.module(model, missing=True)
        kept = type(module.schema).from_json(module.schema.to_json())
        for column in range(4):
            rows = np.where(np.arange(4) == column, np.nan, X)
            if column in taken:
                assert np.allclose(module(**kept.rows(rows)), model.predict(rows))
            else:
                with pytest.raises(NonFiniteError, match="fills none there"):
                    kept.rows(rows)


@pytest.mark.parametrize("column", [X[:, 0] * 1j, X[:, 0].astype("datetime64[s]"), X[:, 0].astype("timedelta64[s]")])
def test_what_is_no_number_is_refused(column):
    schema = fitted_models.module(linear_model.Ridge().fit(X, S)).schema
    table = pd.DataFrame(X).assign(**{"0": column})[["0", 1, 2, 3]]
    with pytest.raises(DtypeError, match="no number"):
        schema.rows(table)


def test_categories_are_told_apart_beyond_the_digits_of_a_float():
    ids = np.array([2**53, 2**53 + 1, 2**53 + 2] * 4)[:, None]
    encoder = OneHotEncoder(sparse_output=False)
    model = make_pipeline(encoder, linear_model.Ridge(alpha=1e-3)).fit(ids, ids[:, 0] % 8)
    module = fitted_models.module(model)
    assert np.allclose(module(**module.schema.rows(ids)), model.predict(ids))


def test_small_probabilities_of_one_against_the_rest():
    """Where each class's own sigmoid is far below a unit of the last place, their quotients are as torch has them."""
    model = linear_model.SGDClassifier(loss="log_loss").fit(X, THREE)
    model.coef_, model.intercept_ = np.tile([-30.0, -29.0, -28.0], (4, 1)).T / 4, np.full(3, -1.0)
    rows = np.ones((2, 4))
    got = sectorch.reference(fitted_models.module(model, "predict_proba"))(torch.from_numpy(rows))
    assert np.abs(got.numpy() - model.predict_proba(rows)).max() < 1e-4
