"""Fitted models of tables as secret models: predictions are the library's, and what is refused is refused by type."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cases import long
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
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
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge, SGDClassifier, SGDOneClassSVM
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, OrdinalEncoder, RobustScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import sectorch
from sectorch import Scheme
from sectorch.choreography.ledger import Transcript
from sectorch.errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    NonFiniteError,
    PrecisionWarning,
    SectorchError,
    ShapeError,
    UnsupportedOpError,
)
from sectorch.fitted_models import Schema, Tree, Trees, module

UNIT = 2.0**-20
DATA = {"cancer": load_breast_cancer, "wine": load_wine, "diabetes": load_diabetes}
FEW: dict[str, Any] = {"n_estimators": 6, "random_state": 0}
KINDS = {
    "tree": ("cancer", lambda: DecisionTreeClassifier(max_depth=5, random_state=0)),
    "tree regressor": ("diabetes", lambda: DecisionTreeRegressor(max_leaf_nodes=9, random_state=0)),
    "stump": ("cancer", lambda: DecisionTreeClassifier(max_depth=1)),
    "forest": ("wine", lambda: RandomForestClassifier(max_depth=5, **FEW)),
    "forest of two classes": ("cancer", lambda: RandomForestClassifier(max_depth=5, **FEW)),
    "forest regressor": ("diabetes", lambda: RandomForestRegressor(max_depth=4, **FEW)),
    "extra trees": ("wine", lambda: ExtraTreesClassifier(max_depth=5, **FEW)),
    "boosting": ("cancer", lambda: GradientBoostingClassifier(**FEW)),
    "boosting of classes": ("wine", lambda: GradientBoostingClassifier(**FEW)),
    "boosting regressor": ("diabetes", lambda: GradientBoostingRegressor(**FEW)),
    "histograms": ("cancer", lambda: HistGradientBoostingClassifier(max_iter=6)),
    "histograms of classes": ("wine", lambda: HistGradientBoostingClassifier(max_iter=4)),
    "histograms regressor": ("diabetes", lambda: HistGradientBoostingRegressor(max_iter=6, loss="poisson")),
    "isolation": ("cancer", lambda: IsolationForest(max_features=0.5, **FEW)),
    "logistic": ("wine", lambda: make_pipeline(StandardScaler(), LogisticRegression())),
    "ridge": ("diabetes", lambda: Ridge()),
    "lasso": ("diabetes", lambda: make_pipeline(RobustScaler(), Lasso(0.01))),
    "sgd": ("cancer", lambda: make_pipeline(StandardScaler(), SGDClassifier(random_state=0))),
    "linear svc": ("wine", lambda: make_pipeline(MinMaxScaler(), LinearSVC())),
    "mlp": ("wine", lambda: make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=80, random_state=0))),
    "mlp regressor": ("diabetes", lambda: MLPRegressor("squared_error", (8,), activation="tanh", max_iter=50)),
    "svc": ("wine", lambda: make_pipeline(StandardScaler(), SVC())),
    "svr": ("diabetes", lambda: SVR(kernel="poly", degree=2)),
    "one class": ("wine", lambda: make_pipeline(StandardScaler(), OneClassSVM())),
    "scaled forest": ("cancer", lambda: make_pipeline(StandardScaler(), RandomForestClassifier(max_depth=4, **FEW))),
}  # fmt: skip


def boosters() -> dict[str, tuple[str, Any]]:
    """Models of the libraries that are installed."""
    found = {}
    try:
        import xgboost

        found["xgboost"] = ("cancer", lambda: xgboost.XGBClassifier(n_estimators=6, max_depth=3))
        found["xgboost of classes"] = ("wine", lambda: xgboost.XGBClassifier(n_estimators=4, max_depth=3))
        found["xgboost regressor"] = ("diabetes", lambda: xgboost.XGBRegressor(n_estimators=6, max_depth=3))
        found["xgboost dart"] = (
            "diabetes",
            lambda: xgboost.XGBRegressor(n_estimators=6, booster="dart", rate_drop=0.5),
        )
    except ImportError:
        pass
    try:
        import lightgbm

        found["lightgbm"] = ("cancer", lambda: lightgbm.LGBMClassifier(n_estimators=6, verbose=-1))
        found["lightgbm of classes"] = ("wine", lambda: lightgbm.LGBMClassifier(n_estimators=4, verbose=-1))
        found["lightgbm regressor"] = ("diabetes", lambda: lightgbm.LGBMRegressor(n_estimators=6, verbose=-1))
    except ImportError:
        pass
    return found


ALL = KINDS | boosters()


def near(trees: Trees, x: np.ndarray) -> np.ndarray:
    """Which rows have a number within 2^-20 of a threshold of their column."""
    column, threshold = trees.column.numpy().astype(int), trees.threshold.numpy()
    found = np.zeros(len(x), bool)
    for feature in range(trees.features):
        known = threshold[column % trees.features == feature]
        distance = np.abs(x[:, feature, None] - known[None])
        found |= ((distance > 0) & (distance <= UNIT)).any(1)
    return found


def fit(data: str, make: Any) -> tuple[Any, np.ndarray]:
    x, y = DATA[data](return_X_y=True)
    y = y / 100 if data == "diabetes" else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make().fit(x[::2], y[::2]), x[1::2][:24]


@pytest.mark.parametrize("name", list(ALL))
def test_predictions_are_the_librarys(name):
    data, make = ALL[name]
    fitted, x = fit(data, make)
    model = module(fitted)
    rows, want = model.schema.rows(x), fitted.predict(x)
    want = want if model.classes is None else np.searchsorted(model.classes, want)
    plain, secure = model(**rows).numpy(), sectorch.secure(fitted)(**rows).numpy()
    if data != "diabetes":  # smooth functions may differ in a last digit
        assert np.array_equal(secure, sectorch.reference(fitted)(**rows).numpy())
    if hasattr(fitted, "predict_proba"):  # of equal scores floating point prefers either
        best = np.sort(fitted.predict_proba(x), 1)
        clear = best[:, -1] - best[:, -2] > 1e-4
        assert clear.sum() > len(x) / 2
        plain, want = np.where(clear, plain, 0), np.where(clear, want, 0)
        secure = np.where(clear, secure, 0)
    assert np.abs(plain - want).max() <= (0 if want.dtype.kind in "iu" else 2e-6 * (1 + np.abs(want).max()))
    apart = near(model.scores.trees, rows["x"].numpy()) if hasattr(model.scores, "trees") else np.zeros(len(x), bool)
    assert apart.sum() < len(x) / 2 and secure.shape == want.shape
    error = np.abs(secure - want)[~apart]
    assert error.max() <= (0 if want.dtype.kind in "iu" else 3e-4 * (1 + np.abs(want).max()))


OUTPUTS = ("predict_proba", "decision_function")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "name",
    long(["forest", "forest of two classes", "boosting", "boosting of classes", "histograms", "logistic", "mlp"], 4),
)
def test_probabilities_and_scores_are_the_librarys(name, output):
    fitted, x = fit(*ALL[name])
    if not hasattr(fitted, output):
        with (
            pytest.raises(ArgumentError, match="no predict_proba")
            if output == "predict_proba"
            else pytest.raises(Exception)
        ):
            module(fitted, "predict_proba"), 1 / 0
        return
    model = module(fitted, output)
    rows, want = model.schema.rows(x), getattr(fitted, output)(x)
    assert np.abs(model(**rows).numpy() - want).max() < 1e-9
    assert np.abs(sectorch.secure(model)(**rows).numpy() - want).max() < 1e-4


def test_isolation_forests_give_their_scores_and_boosters_their_probabilities():
    fitted, x = fit(*ALL["isolation"])
    model = module(fitted, "decision_function")
    assert np.abs(model(**model.schema.rows(x)).numpy() - fitted.score_samples(x)).max() < 1e-6
    for name in ("xgboost", "xgboost of classes", "lightgbm", "lightgbm of classes"):
        if name in ALL:
            fitted, x = fit(*ALL[name])
            model = module(fitted, "predict_proba")
            assert np.abs(model(**model.schema.rows(x)).numpy() - fitted.predict_proba(x)).max() < 2e-6


# Trees that are drawn: both public shapes, thresholds that are hit exactly, missing numbers, categories.


def draw_tree(rng: np.random.Generator, features: int, depth: int, outputs: int, missing: bool, sizes: dict[int, int]):
    """A tree in which a branch ends by chance. Thresholds are quarters, as the numbers of the rows are."""
    feature, threshold, left, right, value, where, categories, other = [], [], [], [], [], [], {}, {}

    def grow(level: int) -> int:
        node = len(left)
        feature.append(int(rng.integers(features))), threshold.append(float(rng.integers(-8, 9)) / 4)
        left.append(-1), right.append(-1), value.append(rng.normal(size=outputs))
        where.append(str(rng.choice(["left", "right", "zero"])))
        if level < depth and (level == 0 or rng.random() < 0.7):
            if feature[node] in sizes:
                size = sizes[feature[node]]
                categories[node] = set(np.flatnonzero(rng.random(size) < 0.5).tolist())
                other[node] = bool(rng.random() < 0.5)
            left[node] = grow(level + 1)
            right[node] = grow(level + 1)
        return node

    grow(0)
    arrays = np.array(feature), np.array(threshold), np.array(left), np.array(right), np.array(value)
    return Tree(*arrays, where if missing else None, categories, other)


def walk(tree: Tree, x: np.ndarray, missing: np.ndarray, codes: dict[int, int], strict: bool) -> np.ndarray:
    """What a row's leaf is worth, by going down the tree."""
    node = 0
    while tree.left[node] >= 0:
        f = int(tree.feature[node])
        if node in tree.categories:
            known = codes[f] < tree.sizes[f]
            goes_right = codes[f] in tree.categories[node] if known else tree.other_right[node]
        elif missing[f] and tree.missing is not None and tree.missing[node] != "zero":
            goes_right = tree.missing[node] == "right"
        else:
            number = 0.0 if missing[f] else x[f]
            goes_right = number >= tree.threshold[node] if strict else number > tree.threshold[node]
        node = int(tree.right[node] if goes_right else tree.left[node])
    return tree.value[node]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6), depth=st.integers(1, 6), outputs=st.integers(1, 3), strict=st.booleans(),
    missing=st.booleans(), categorical=st.booleans(), complete=st.booleans(),
)  # fmt: skip
def test_drawn_trees_are_walked(seed, depth, outputs, strict, missing, categorical, complete):
    rng = np.random.default_rng(seed)
    features, sizes = 4, {1: 3, 3: 5} if categorical else {}
    trees = [draw_tree(rng, features, depth, outputs, missing, sizes) for _ in range(3)]
    for tree in trees:
        tree.sizes = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sectorch.fitted_models.trees._cost_of_paths", lambda _: 1e18 if complete else 0)
        model = Trees(trees, features, strict, base=rng.normal(size=outputs), sizes=sizes).eval()
    assert model.complete == complete
    count = 5
    x = rng.integers(-8, 9, (count, features)) / 4
    lost = (rng.random((count, features)) < 0.3) & missing
    x[lost] = 0
    codes = [torch.tensor(rng.integers(0, size + 1, count)) for _, size in sorted(sizes.items())]
    places = dict(zip(sorted(sizes), codes, strict=True))
    want = model.base.numpy() + np.array(
        [
            sum(walk(t, x[i], lost[i], {f: int(c[i]) for f, c in places.items()}, strict) for t in trees)
            for i in range(count)
        ]
    )

    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trees = model

        def forward(self, x, missing, codes=None):
            return self.trees(x, missing, [] if codes is None else [codes[:, i] for i in range(codes.shape[1])])

    given_rows = [torch.tensor(x), torch.tensor(lost.astype(float)), *([torch.stack(codes, 1)] if codes else [])]
    call = Call().eval()
    assert np.abs(call(*given_rows).numpy() - want).max() < 1e-12
    secure = sectorch.secure(call)(*given_rows)
    assert np.abs(secure.numpy() - want).max() < 1e-5
    assert torch.equal(secure, sectorch.reference(call)(*given_rows))


def test_rows_in_pieces_and_wan_give_the_same():
    fitted, x = fit(*ALL["forest"])
    model = module(fitted, "predict_proba")
    rows = model.schema.rows(x)
    want = sectorch.reference(model)(**rows)
    assert torch.equal(sectorch.secure(model, chunk=5)(**rows), want)
    assert torch.equal(sectorch.secure(model, Scheme(network="wan"))(**rows), want)


# Missing numbers and categories, as the libraries treat them


def table_with_holes() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(0)
    x = x[:, :8].copy()
    x[rng.random(x.shape) < 0.2] = np.nan
    return x, y


def models_with_holes() -> list[Any]:
    made = [HistGradientBoostingClassifier(max_iter=5), RandomForestClassifier(max_depth=4, **FEW)]
    made.append(make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression()))
    try:
        import lightgbm
        import xgboost

        made += [
            xgboost.XGBClassifier(n_estimators=5, max_depth=3),
            lightgbm.LGBMClassifier(n_estimators=5, verbose=-1),
        ]
        made += [lightgbm.LGBMClassifier(n_estimators=5, verbose=-1, zero_as_missing=True)]
    except ImportError:
        pass
    return made


@pytest.mark.parametrize("fitted", models_with_holes(), ids=lambda m: type(m).__name__)
def test_missing_numbers_go_where_the_library_sends_them(fitted):
    x, y = table_with_holes()
    fitted.fit(x[::2], y[::2])
    asked = x[1:60:2].copy()
    asked[::3, 2] = 0.0
    model = module(fitted, missing=True)
    rows = model.schema.rows(asked)
    assert np.array_equal(model(**rows).numpy(), fitted.predict(asked))
    assert np.array_equal(sectorch.secure(model)(**rows).numpy(), fitted.predict(asked))


def test_columns_that_cannot_be_missing_are_refused():
    x, y = table_with_holes()
    fitted = HistGradientBoostingClassifier(max_iter=3).fit(x, y)
    with pytest.raises(NonFiniteError, match=r"column 0 holds NaN in \d+ rows; .*missing=True"):
        module(fitted).schema.rows(x)
    with pytest.raises(NonFiniteError, match="holds NaN"):
        module(fitted)(torch.tensor(x))
    whole = GradientBoostingClassifier(n_estimators=2).fit(np.nan_to_num(x), y)
    with pytest.raises(ArgumentError, match="takes no missing numbers"):
        module(whole, missing=True)


def mixed_table() -> tuple[Any, np.ndarray]:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    color, size = rng.choice(["red", "green", "blue", "grey"], 300), rng.normal(size=300)
    kind = rng.choice([3, 5, 9], 300)
    y = ((color == "red") | (kind == 5)) ^ (size > 0.3)
    return pandas.DataFrame({"color": color, "size": size, "kind": kind}), y.astype(int)


def test_encoders_take_categories_and_refuse_unseen_ones():
    table, y = mixed_table()
    for encoder in (OneHotEncoder(drop="first"), OneHotEncoder(handle_unknown="ignore"), OrdinalEncoder()):
        parts = [("category", encoder, ["color", "kind"]), ("number", StandardScaler(), ["size"])]
        for last in (LogisticRegression(), RandomForestClassifier(max_depth=4, **FEW)):
            fitted = make_pipeline(ColumnTransformer(parts), last).fit(table, y)
            model = module(fitted)
            asked, other = table[:20].copy(), table[:20].copy()
            rows = model.schema.rows(asked)
            assert np.array_equal(sectorch.secure(model)(**rows).numpy(), fitted.predict(asked))
            other.loc[other.index[0], "color"] = "violet"
            if encoder.handle_unknown == "error":
                with pytest.raises(
                    ArgumentError, match="column 'color' has 1 rows of a category that the model does not"
                ):
                    model.schema.rows(other)
            else:
                assert np.array_equal(model(**model.schema.rows(other)).numpy(), fitted.predict(other))


def test_categorical_splits_of_boosters():
    pandas = pytest.importorskip("pandas")
    table, y = mixed_table()
    table["color"], table["kind"] = table["color"].astype("category"), table["kind"].astype("category")
    made = [HistGradientBoostingClassifier(max_iter=6, categorical_features="from_dtype")]
    try:
        import lightgbm

        made.append(lightgbm.LGBMClassifier(n_estimators=6, verbose=-1, min_child_samples=5, min_data_per_group=5))
    except ImportError:
        pass
    for fitted in made:
        fitted.fit(table, y)
        model = module(fitted)
        asked = table[:40].copy()
        rows = model.schema.rows(asked)
        assert rows["codes"].shape == (40, 2)
        assert np.array_equal(sectorch.secure(model)(**rows).numpy(), fitted.predict(asked)), type(fitted)
        strange = asked.copy()
        strange["color"] = pandas.Categorical(["violet"] * 40, categories=[*table["color"].cat.categories, "violet"])
        if isinstance(fitted, HistGradientBoostingClassifier):  # unknown categories are missing ones
            assert np.array_equal(model(**model.schema.rows(strange)).numpy(), fitted.predict(strange))


def test_xgboosts_categories():
    xgboost = pytest.importorskip("xgboost")
    rng = np.random.default_rng(2)
    x = np.stack([rng.integers(0, 6, 400), rng.normal(size=400)], 1)
    y = np.isin(x[:, 0], [1, 4]) ^ (x[:, 1] > 0)
    matrix = xgboost.DMatrix(x, y, feature_types=["c", "float"], enable_categorical=True)
    settings_of = {"tree_method": "hist", "max_cat_to_onehot": 1, "objective": "binary:logistic", "max_depth": 3}
    booster = xgboost.train(settings_of, matrix, 5)
    model = module(booster)
    assert model.schema.categorical == [0]
    want = booster.predict(xgboost.DMatrix(x[:40], feature_types=["c", "float"], enable_categorical=True)) > 0.5
    assert np.array_equal(sectorch.secure(model)(**model.schema.rows(x[:40])).numpy(), want)


# Files, schemas, and what is refused


def test_boosters_are_read_from_their_files(tmp_path):
    for name, suffix in (("xgboost", "json"), ("lightgbm", "txt")):
        if name not in ALL:
            pytest.skip(f"{name} is not installed")
        fitted, x = fit(*ALL[name])
        path = tmp_path / f"model.{suffix}"
        (fitted.get_booster() if name == "xgboost" else fitted.booster_).save_model(path)
        model = module(path)
        assert np.array_equal(model(**model.schema.rows(x)).numpy(), fitted.predict(x))
        text = path.read_text()
        path.write_text(text[: len(text) // 2])
        with pytest.raises(SectorchError):
            module(path)
    path.write_text("{}")
    with pytest.raises(ArgumentError, match="not the JSON of an xgboost model"):
        module(path)
    with pytest.raises(ArgumentError, match="no model's text"):
        module(tmp_path / "nothing")


def test_schemas_are_text():
    table, y = mixed_table()
    encoder = ColumnTransformer([("c", OneHotEncoder(), ["color", "kind"])], remainder="passthrough")
    schema = module(make_pipeline(encoder, LogisticRegression()).fit(table, y)).schema
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert all(torch.equal(v, again.rows(table)[k]) for k, v in schema.rows(table).items())
    for text in ("", "[]", '{"columns": 0}', json.dumps({"columns": 2, "categories": {"7": []}, "unseen": {}})):
        with pytest.raises(ArgumentError, match="schema"):
            Schema.from_json(text)


def test_tables_that_do_not_fit_are_refused():
    table, y = mixed_table()
    fitted = DecisionTreeClassifier(max_depth=2).fit(table[["size", "kind"]], y)
    schema = module(fitted).schema
    with pytest.raises(ShapeError, match="2 columns, and the table has 3"):
        schema.rows(table)
    with pytest.raises(ShapeError, match=r"the table is \[3, 4\]"):
        schema.rows(np.zeros((3, 4)))
    with pytest.raises(ArgumentError, match="column 0 of the table is 'kind'"):
        schema.rows(table[["kind", "size"]])
    with pytest.raises(DtypeError, match="column 'size' holds what is no number"):
        schema.rows(table.assign(size="big")[["size", "kind"]])
    with pytest.raises(NonFiniteError, match="infinity"):
        schema.rows(table.assign(size=np.inf)[["size", "kind"]])
    with pytest.raises(ShapeError, match="fitted on 2 columns"):
        sectorch.secure(fitted)(torch.zeros(2, 3))


def named(kind: str) -> Any:
    """An estimator of another package that is called as one of scikit-learn's, and computes something else."""
    base = {"StandardScaler": StandardScaler, "LogisticRegression": LogisticRegression}[kind]
    return type(kind, (base,), {"transform": lambda self, x: 2 * x, "predict": lambda self, x: 0 * x[:, 0]})()


def changed(model: Any) -> Any:
    model.predict = lambda x: x
    return model


def test_an_option_that_switches_a_fitted_attribute_off_is_heeded():
    """`StandardScaler(with_mean=False)` keeps the mean that it does not use."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, size=(80, 3))
    fitted = make_pipeline(StandardScaler(with_mean=False), LogisticRegression()).fit(x, x[:, 0] > 3)
    model = module(fitted, "predict_proba")
    assert np.abs(sectorch.secure(model)(**model.schema.rows(x)).numpy() - fitted.predict_proba(x)).max() < 1e-4


def test_zeros_stay_on_their_side_of_lightgbms_thresholds():
    """lightgbm writes -1e-35 for "below zero", which fixed point rounds to zero."""
    lightgbm = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (160, 4)).astype(float)
    for scale, scheme in ((1.0, Scheme()), (10_000.0, Scheme(12, limit_bits=20))):
        fitted = lightgbm.LGBMClassifier(n_estimators=4, min_child_samples=5, verbose=-1).fit(scale * x, x[:, 0] >= 0)
        assert "-1.0000000180025095e-35" in fitted.booster_.model_to_string()
        model = module(fitted, "predict_proba")
        found = sectorch.secure(model, scheme)(**model.schema.rows(scale * x)).numpy()
        assert np.abs(found - fitted.predict_proba(scale * x)).max() < 1e-3


def test_columns_of_tiny_numbers_are_warned_of():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)) * [1, 1e-6]
    fitted = DecisionTreeRegressor(max_depth=3).fit(x, 1e6 * x[:, 1])
    with pytest.warns(PrecisionWarning, match="column 1 are below"):
        module(fitted)


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda x, y: RandomForestClassifier(), ArgumentError, "not fitted"),
        (lambda x, y: LogisticRegression(), ArgumentError, "not fitted"),
        (lambda x, y: make_pipeline(StandardScaler(), SVC()), ArgumentError, "not fitted"),
        (lambda x, y: KNeighborsClassifier().fit(x, y), UnsupportedOpError, "KNeighborsClassifier is not supported"),
        (lambda x, y: SVC(kernel="precomputed").fit(x @ x.T, y), UnsupportedOpError, "kernel of your own"),
        (lambda x, y: RandomForestClassifier(2).fit(x, np.stack([y, y], 1)), UnsupportedOpError, "several targets"),
        (
            lambda x, y: GradientBoostingClassifier(init=LogisticRegression(), n_estimators=2).fit(x, y),
            UnsupportedOpError, "an estimator of your own",
        ),
        (lambda x, y: DecisionTreeClassifier().fit(x, 0 * y), UnsupportedOpError, "fitted with one class"),
        (lambda x, y: SVC(break_ties=True).fit(x, y + (x[:, 1] > 1)), UnsupportedOpError, r"set_params\(break_ties="),
        (lambda x, y: SGDOneClassSVM().fit(x), UnsupportedOpError, "take OneClassSVM"),
        (lambda x, y: make_pipeline(named("StandardScaler"), SVC()).fit(x, y), UnsupportedOpError, "scikit-learn"),
        (lambda x, y: named("LogisticRegression").fit(x, y), UnsupportedOpError, "scikit-learn"),
        (lambda x, y: changed(LogisticRegression().fit(x, y)), UnsupportedOpError, "predict of its own"),
    ],
)  # fmt: skip
def test_models_that_are_not_supported_are_refused(make, error, match):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    with pytest.raises(error, match=match):
        sectorch.secure(make(x, (x[:, 0] > 0).astype(int)))


@pytest.mark.parametrize(
    "kind, options, match",
    [
        ("xgboost.XGBClassifier", {"missing": -1.0}, r"get_booster\(\)"),
        ("xgboost.XGBClassifier", {"missing": 0}, "NaN in place of 0"),
        ("xgboost.XGBClassifier", {"objective": "binary:logitraw"}, "for its scores"),
        ("xgboost.XGBRegressor", {"objective": "binary:logistic"}, "for its scores"),
        ("lightgbm.LGBMRegressor", {"objective": "binary", "verbose": -1}, r"model\.booster_"),
        ("lightgbm.LGBMClassifier", {"objective": "regression", "verbose": -1}, "for its scores"),
    ],
)
def test_wrappers_that_predict_what_their_booster_does_not_are_refused(kind, options, match):
    package, _, name = kind.partition(".")
    fitted = getattr(pytest.importorskip(package), name)(n_estimators=2, **options)
    x = np.random.default_rng(0).normal(size=(60, 3))
    fitted.fit(x, (x[:, 0] > 0).astype(int))
    with pytest.raises(UnsupportedOpError, match=match):
        module(fitted)
    if "missing" in options:  # the way out
        model = module(fitted.get_booster(), "predict_proba", missing=True)
        rows = np.where(x[:8] > 0.5, options["missing"], x[:8])
        found = sectorch.secure(model)(**model.schema.rows(np.where(x[:8] > 0.5, np.nan, x[:8]))).numpy()
        assert np.abs(found - fitted.predict_proba(rows)).max() < 1e-4


def test_numbers_that_fixed_point_does_not_hold_are_refused_with_a_way_out_that_works():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)) * 1e5
    y = (x[:, 0] > x[:, 1]).astype(int)
    fitted = DecisionTreeClassifier(max_depth=4).fit(x, y)
    model = module(fitted)
    with pytest.raises(FixedPointRangeError, match="Scheme"):
        sectorch.secure(model, Scheme(20, limit_bits=12))(**model.schema.rows(x))
    wide = sectorch.secure(model, Scheme(frac_bits=12, limit_bits=20))
    assert np.array_equal(wide(**model.schema.rows(x)).numpy(), fitted.predict(x))
    scaled = DecisionTreeClassifier(max_depth=4).fit(x / 2**10, y)
    assert np.array_equal(sectorch.secure(scaled)(torch.tensor(x / 2**10)).numpy(), scaled.predict(x / 2**10))


# What the parties see


def test_nobody_sees_the_model_or_the_rows():
    """Two models and two tables that are as far apart as can be: every message but the result is uniform at both."""
    x = np.random.default_rng(0).normal(size=(400, 4))
    shapes, programs, texts = [], [], []
    for flip in (1, -1):
        fitted = RandomForestClassifier(8, max_depth=3, random_state=0).fit(flip * x, (x[:, 0] > 0).astype(int))
        model = module(fitted)
        model.scores.trees.threshold.data.fill_(flip * 4000.0)  # all go to one side
        secure_model, transcript = sectorch.secure(model, session=sectorch.Session()), Transcript()
        rows = model.schema.rows(np.full((256, 4), flip * 4000.5 if flip < 0 else 3999.0))
        programs.append(secure_model.choreography(sectorch.Inputs(**rows)).digest)
        with transcript:
            secure_model(**rows)
        for line, value in transcript.lines:
            if line.shows or line.label in ("pk_Q", "pk_A", "pk_S") or value.numel() < 2048:
                continue
            words = value.contiguous().view(torch.uint8).numpy().ravel()
            counts = np.bincount(words, minlength=256)
            chi = ((counts - len(words) / 256) ** 2 / (len(words) / 256)).sum()
            texts.append((line.label, line.dst.role, chi))
        shapes.append([(line.label, line.dst.role, line.bytes) for line, _ in transcript.lines])
    assert programs[0] == programs[1] and shapes[0] == shapes[1]  # the program does not depend on the model
    assert len(texts) > 20 and max(chi for _, _, chi in texts) < 255 + 8 * (2 * 255) ** 0.5, texts


def test_what_is_padded_tells_nothing_of_a_trees_shape():
    """A chain and a bush of one depth, and trees of other sizes among as many: one program."""
    rng = np.random.default_rng(0)
    digests = set()
    for seed in range(3):
        trees = [draw_tree(np.random.default_rng([seed, i]), 3, 4, 1, False, {}) for i in range(5)]
        trees.append(draw_tree(_Full(), 3, 4, 1, False, {}))  # one is whole: the depth is public
        model = Trees(trees, 3).eval()
        digests.add(sectorch.secure(model, session=sectorch.Session()).choreography(torch.zeros(4, 3)).digest)
    assert len(digests) == 1 and rng is not None


class _Full(np.random.Generator):
    """Draws that let no branch end."""

    def __init__(self):
        super().__init__(np.random.PCG64(0))

    def random(self, *args: Any, **kwargs: Any) -> Any:
        return super().random(*args, **kwargs) * 0.5
