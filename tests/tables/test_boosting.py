"""Boosted trees: the reference's bits however rows and columns are owned, the papers' trees, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cases import some
from sklearn.utils.estimator_checks import check_estimator

import sectorch
from sectorch.errors import (
    ArgumentError,
    NonFiniteError,
    SectorchError,
    SessionMismatchError,
    ShapeError,
    UnsupportedOpError,
)
from sectorch.estimators.base import FitError
from sectorch.mpc.star.bins import BinChoices, BinSums, indicators
from sectorch.ring import products
from sectorch.tables import Column, Table, owned
from sectorch.tables.boosting import BoostedTreesClassifier, BoostedTreesRegressor

NAMES = ("age", "dose", "flag", "grade", "weight")
GRADES = ("a", "b", "c")
SMALL = {"n_estimators": 2, "max_depth": 2, "max_bins": 8}


def data(rows: int = 120, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns of each kind, some with few distinct values, and a class that depends on them."""
    random = np.random.default_rng(seed)
    frame = {
        "age": random.integers(20, 90, rows),
        "dose": np.round(random.normal(size=rows), 2),
        "flag": random.random(rows) < 0.3,
        "grade": np.array(GRADES)[random.integers(0, 3, rows)],
        "weight": random.gamma(4.0, 20.0, rows),
    }
    score = (frame["age"] - 50) / 20 + frame["dose"] * np.where(frame["flag"], 2, -1) + (frame["grade"] == "b")
    return frame, (score + 0.5 * random.normal(size=rows) > 0.3).astype(np.int64)


def numbers(frame: dict[str, np.ndarray]) -> np.ndarray:
    """The same columns as numbers, with codes of categories."""
    own = frame | {"grade": np.array([GRADES.index(g) for g in frame["grade"]])}
    return np.stack([own[name].astype(np.float64) for name in NAMES], 1)


FACTS: dict[str, Any] = {
    "age": None,
    "dose": None,
    "flag": None,
    "grade": GRADES,
    "weight": Column("number", limit=512.0),
}


def table(session: Any, frame: dict, owner: str, columns: Any = NAMES, rows: slice = slice(None)) -> Any:
    part = {name: frame[name][rows] for name in columns}
    return owned(part, owner=owner, session=session, columns={name: FACTS[name] for name in columns})


def session_of() -> sectorch.Session:
    return sectorch.Session(owners=("H1", "H2"))


PARTITIONS = {
    "one": lambda s, x: table(s, x, "A"),
    "columns of the two holders": lambda s, x: [table(s, x, "A", NAMES[:2]), table(s, x, "S", NAMES[2:])],
    "columns of others": lambda s, x: [
        table(s, x, "H1", NAMES[:1]), table(s, x, "Q", NAMES[1:3]), table(s, x, "H2", NAMES[3:]),
    ],
    "rows": lambda s, x: [
        table(s, x, "A", rows=slice(0, 50)), table(s, x, "S", rows=slice(50, 60)),
        table(s, x, "Q", rows=slice(60, 61)), table(s, x, "H1", rows=slice(61, None)),
    ],
    "rows of one": lambda s, x: [table(s, x, "S", rows=slice(0, 50)), table(s, x, "S", rows=slice(50, None))],
    "rows and columns": lambda s, x: [
        [table(s, x, "S", NAMES, slice(0, 70))],
        [table(s, x, "H1", NAMES[:2:-1], slice(70, None)), table(s, x, "A", NAMES[:3], slice(70, None))],
    ],
}  # fmt: skip
KINDS = (BoostedTreesClassifier, BoostedTreesRegressor)


def target_of(kind: Any, frame: dict, classes: np.ndarray) -> np.ndarray:
    return classes if kind is BoostedTreesClassifier else frame["weight"] / 64 + frame["dose"]


def shared_target(kind: Any, y: np.ndarray, session: Any, owner: str = "H1") -> Any:
    limit = None if kind is BoostedTreesClassifier else 8.0
    return sectorch.share(torch.tensor(y), session=session, owner=owner, limit=limit)


def same(model: Any, other: Any) -> bool:
    return all(np.array_equal(getattr(model, name), getattr(other, name)) for name in model._fitted)


def reference_of(kind: Any, frame: dict, y: np.ndarray, **settings: Any) -> Any:
    """The fit of one owner in the reference's session, which has the kinds of columns that plain arrays lack."""
    session = sectorch.Session(reference=True, owners=("H1", "H2"))
    model = kind(**SMALL | settings).fit(table(session, frame, "A"), shared_target(kind, y, session))
    return model.revealed()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partition", some(PARTITIONS, ["columns of the two holders", "rows", "rows and columns"]))
def test_any_partition_has_the_bits_of_the_reference(partition: str, kind: Any):
    frame, classes = data()
    y = target_of(kind, frame, classes)
    reference = reference_of(kind, frame, y, reg_lambda=0.5)
    session = session_of()
    x = PARTITIONS[partition](session, frame)
    model = kind(**SMALL | {"reg_lambda": 0.5}).fit(x, shared_target(kind, y, session))
    assert same(model.revealed(to="H1"), reference)
    assert (reference.features_.sum(-1) == 1).any()
    wanted = reference.predict(numbers(frame))
    assert np.array_equal(model.predict(x).reveal(to="A").numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("settings", [
    {"subsample": 0.6, "random_state": 3}, {"max_depth": 1}, {"min_split_gain": 1e3}, {"min_child_weight": 40.0},
    {"reg_lambda": 0.0}, {"max_bins": 2, "max_depth": 3}, {"edges": {"age": [40, 60], "weight": [80.25]}},
    {"learning_rate": 1.0},
], ids=str)  # fmt: skip
def test_settings_have_the_bits_of_the_reference(settings: dict):
    frame, y = data(80, 1)
    reference = reference_of(BoostedTreesClassifier, frame, y, **settings)
    session = session_of()
    x = PARTITIONS["columns of the two holders"](session, frame)
    model = BoostedTreesClassifier(**SMALL | settings).fit(x, shared_target(BoostedTreesClassifier, y, session))
    assert same(model.revealed(), reference)
    if {"min_split_gain", "min_child_weight"} & set(settings):
        assert not reference.features_.any() and len(reference.splits()) == 2
    if "edges" in settings:
        used = {s["threshold"] for s in reference.splits() if s.get("feature") in settings["edges"]}
        assert used <= {40.0, 60.0, 80.25}


def greedy(x: np.ndarray, y: np.ndarray, edges: list[np.ndarray], trees: int, depth: int, rate: float) -> np.ndarray:
    """Margins of boosted trees as the papers have them, in floating point: the reference of the reference."""
    base = -(0.5 - y).sum() / (0.25 * len(y) + 1)
    margin = np.full(len(y), base)
    for _ in range(trees):
        p = 1 / (1 + np.exp(-margin))
        g, h, node = p - y, p * (1 - p), np.zeros(len(y), int)
        for _ in range(depth):
            moved = 2 * node
            for k in np.unique(node):
                rows = node == k
                total = g[rows].sum() ** 2 / (h[rows].sum() + 1)
                best = (0.0, None)
                for f, thresholds in enumerate(edges):
                    for t in thresholds:
                        left, right = rows & (x[:, f] <= t), rows & (x[:, f] > t)
                        if min(h[left].sum(), h[right].sum()) < 1:
                            continue
                        gain = sum(g[s].sum() ** 2 / (h[s].sum() + 1) for s in (left, right)) - total
                        best = max(best, (gain, (f, t)), key=lambda b: b[0] + (b[1] is not None) * -1e-7)
                if best[1] is not None:
                    moved[rows] += x[rows, best[1][0]] > best[1][1]
            node = moved
        for k in np.unique(node):
            rows = node == k
            margin[rows] -= rate * g[rows].sum() / (h[rows].sum() + 1)
    return margin


def test_the_trees_are_those_of_the_papers():
    """Margins of a greedy fit in floating point are the same but for rounding, on data without nearly equal gains."""
    frame, y = data(300, 5)
    x = numbers(frame)[:, [0, 1, 4]]
    model = BoostedTreesClassifier(4, max_depth=3, max_bins=8).fit(x, y)
    edges = [np.sort(column)[[-(-k * len(x) // 8) - 1 for k in range(1, 8)]] for column in x.T]
    found = model.decision_function(x)
    wanted = greedy(x, y, edges, 4, 3, 0.3)
    assert np.abs(found - wanted).max() < 1e-3 and np.abs(wanted).max() > 0.5


def test_xgboost_finds_the_same_trees_where_bins_are_the_values():
    """Eight distinct values a column: both have all splits to choose from, and margins differ by rounding alone."""
    xgboost = pytest.importorskip("xgboost")
    random = np.random.default_rng(2)
    x = random.integers(0, 8, (2000, 6)).astype(float)
    y = (x[:, 0] * x[:, 1] + 4 * x[:, 2] + 6 * random.normal(size=2000) > 28).astype(int)
    model = BoostedTreesClassifier(5, max_depth=3, max_bins=64).fit(x, y)
    settings = {"tree_method": "hist", "base_score": float(1 / (1 + np.exp(-model.base_[0])))}
    other = xgboost.XGBClassifier(n_estimators=5, max_depth=3, learning_rate=0.3, **settings).fit(x, y)
    found, wanted = model.decision_function(x), other.predict(x, output_margin=True)
    assert np.abs(found - wanted).max() < 2e-3


def with_missing(frame: dict[str, np.ndarray], y: np.ndarray) -> dict[str, np.ndarray]:
    """Missing doses and weights, which tell something of y, a column of which none is there, and missing codes."""
    random = np.random.default_rng(9)
    lost = random.random((3, len(y))) < np.where(y == 1, 0.5, 0.1)
    own = frame | {name: np.where(at, np.nan, frame[name]) for name, at in zip(("dose", "weight"), lost, strict=False)}
    return own | {"grade": np.where(lost[2], None, frame["grade"]), "age": np.full(len(y), np.nan)}


def open_with(session: Any, frame: dict, owner: str, columns: Any = NAMES, rows: slice = slice(None)) -> Any:
    part, facts = {name: frame[name][rows] for name in columns}, {name: FACTS[name] for name in columns}
    if "age" in facts:
        facts["age"] = "number"
    lost = [name for name in columns if name != "flag"]
    return owned(part, owner=owner, session=session, columns=facts, missing=lost)


MISSING_PARTITIONS = {
    "columns": lambda s, x: [open_with(s, x, "A", NAMES[:2]), open_with(s, x, "H1", NAMES[2:4]),
                             open_with(s, x, "S", NAMES[4:])],
    "rows": lambda s, x: [open_with(s, x, "A", rows=slice(0, 50)), open_with(s, x, "H1", rows=slice(50, None))],
    "rows and columns": lambda s, x: [
        [open_with(s, x, "S", NAMES, slice(0, 70))],
        [open_with(s, x, "H1", NAMES[:2:-1], slice(70, None)), open_with(s, x, "A", NAMES[:3], slice(70, None))],
    ],
}  # fmt: skip


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("partition", MISSING_PARTITIONS)
def test_several_classes_and_missing_values_have_the_bits_of_the_reference(partition: str, classes: int):
    frame, y = data()
    lost = with_missing(frame, y)
    y = y + (classes - 2) * (frame["age"] > 60)
    session = sectorch.Session(reference=True, owners=("H1", "H2"))
    wanted = BoostedTreesClassifier(**SMALL).fit(
        open_with(session, lost, "A"), shared_target(BoostedTreesClassifier, y, session), classes=classes
    ).revealed()  # fmt: skip
    session = session_of()
    x = MISSING_PARTITIONS[partition](session, lost)
    target = shared_target(BoostedTreesClassifier, y, session)
    model = BoostedTreesClassifier(**SMALL).fit(x, target, classes=classes)
    plain = model.revealed(to="A")
    assert same(plain, wanted) and len(plain.features_) == (2 if classes == 2 else 6)
    sides = {s["missing"] for s in plain.splits() if "missing" in s}
    assert sides and {s.get("class", 0) for s in plain.splits()} == set(range(classes if classes > 2 else 1))
    own = numbers(lost | {"grade": frame["grade"]})
    own[lost["grade"] == None, 3] = np.nan  # noqa: E711
    assert np.array_equal(model.predict(x).reveal(to="A").numpy(), plain.predict(own))
    assert np.array_equal(model.predict(own).reveal().numpy(), plain.predict(own))
    proba = model.predict_proba(x).reveal().numpy()
    assert proba.shape == (120, classes) and np.abs(proba - plain.predict_proba(own)).max() < 1e-5
    beside = x if partition == "columns" else [t for t in x if not isinstance(t, list)]
    if partition == "rows":
        both = Table.concat([t.share() for t in beside])
        assert np.array_equal(model.predict(both).reveal().numpy(), plain.predict(own))


def test_columns_in_shares_that_may_be_missing():
    frame, y = data()
    lost = with_missing(frame, y)
    edges = {"age": [30.0], "dose": [-0.5, 0.5], "weight": [60.0, 90.0]}
    models = []
    for shares in (False, True):
        session = session_of()
        x = open_with(session, lost, "A")
        model = BoostedTreesClassifier(**SMALL, edges=edges)
        models.append(
            model.fit(x.share() if shares else x, shared_target(BoostedTreesClassifier, y, session)).revealed()
        )
    assert same(*models)


def test_missing_values_that_the_fit_had_none_of_are_refused():
    frame, y = data(40)
    session = session_of()
    model = BoostedTreesClassifier(**SMALL).fit(table(session, frame, "A"), shared(y, session))
    x = open_with(session, with_missing(frame, y), "A", NAMES)
    with pytest.raises(NonFiniteError, match="had none in the fit"):
        model.predict(x)
    own = numbers(frame)
    own[0, 1] = np.nan
    for kind in (model, model.revealed()):
        with pytest.raises(NonFiniteError, match="had none in the fit"):
            kind.predict(own)
    wrong = BoostedTreesClassifier(**SMALL).fit(table(session, frame, "A"), shared(y * 3, session), classes=3)
    with pytest.raises(FitError, match="labels"):
        wrong.revealed()
    with pytest.raises(ArgumentError, match="classes is"):
        BoostedTreesClassifier(**SMALL).fit(table(session, frame, "A"), shared(y, session), classes=1)


@pytest.mark.parametrize("classes", [2, 4])
def test_xgboost_sends_missing_values_to_the_same_side(classes: int):
    """As above, with a third of the values missing; xgboost starts at our margins, and margins differ by rounding."""
    xgboost = pytest.importorskip("xgboost")
    random = np.random.default_rng(4)
    x = random.integers(0, 8, (3000, 5)).astype(float)
    score = x[:, 0] * x[:, 1] + 4 * x[:, 2] + 6 * random.normal(size=3000)
    x[random.random(x.shape) < 0.3] = np.nan
    x[:, 0] = np.where((score > 30) & (random.random(3000) < 0.4), np.nan, x[:, 0])
    y = np.searchsorted(np.quantile(score, np.arange(1, classes) / classes), score)
    model = BoostedTreesClassifier(4, max_depth=3, max_bins=64).fit(x, y)
    start = np.tile(model.base_, (3000, 1)) if classes > 2 else np.full(3000, model.base_[0])
    other = xgboost.XGBClassifier(n_estimators=4, max_depth=3, learning_rate=0.3, tree_method="hist")
    other.fit(x, y, base_margin=start)
    found = model.decision_function(x)
    wanted = other.predict(x, output_margin=True, base_margin=start)
    assert np.abs(found - wanted).max() < 2e-3 and np.abs(found - start).max() > 0.3
    assert len({s["missing"] for s in model.splits() if "missing" in s}) == 2


def test_loops_multiply_by_bins_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    for rows, features, bins, width in ((1, 1, 2, 1), (70, 3, 5, 4), (33, 2, 256, 9)):
        codes = torch.randint(0, bins, (rows, features), generator=generator).to(torch.uint8)
        words = torch.randint(-(2**63), 2**63 - 1, (rows, features * (bins - 1)), generator=generator)
        x = torch.randint(-(2**63), 2**63 - 1, (rows, width), generator=generator)
        table_ = torch.randint(-(2**63), 2**63 - 1, (width, words.shape[1]), generator=generator)
        for given, matrix in ((codes, indicators(codes, bins)), (words, words)):
            assert torch.equal(BinSums(bins)(x, given), products.matmul(x.T.contiguous(), matrix))
            assert torch.equal(BinChoices(bins)(table_, given), products.matmul(matrix, table_.T.contiguous()))


def test_rows_that_do_not_count_change_nothing():
    frame, y = data(90, 2)
    keep = np.arange(90) % 3 != 0
    edges = {"age": [30, 45, 60], "dose": [-0.5, 0.5], "weight": [60.0, 90.0]}
    few = {name: values[keep] for name, values in frame.items()}
    wanted = reference_of(BoostedTreesClassifier, few, y[keep], edges=edges)
    session = session_of()
    target = shared_target(BoostedTreesClassifier, y, session)
    present = sectorch.share(torch.tensor(keep), session=session, owner="S")
    for x in (table(session, frame, "A"), table(session, frame, "A").share()):
        model = BoostedTreesClassifier(**SMALL, edges=edges)
        if isinstance(x, Table):
            model.fit(x.where(present), target)
        else:
            model.fit(x, target, present=present)
        # Sums have fewer fraction bits for more rows: the same trees where the number of bits is the same.
        assert same(model.revealed(), wanted)


def test_what_is_revealed_is_a_plain_estimator():
    frame, y = data(150, 3)
    session = session_of()
    x = PARTITIONS["columns of the two holders"](session, frame)
    model = BoostedTreesClassifier(**SMALL).fit(x, shared_target(BoostedTreesClassifier, y, session))
    with pytest.raises(ArgumentError, match="nobody knows them"):
        model.splits()
    plain = model.revealed(to="S")
    assert isinstance(plain.thresholds_, np.ndarray) and isinstance(model.thresholds_, sectorch.SharedTensor)
    own = numbers(frame)
    assert plain.score(own, y) > 0.65
    assert plain.predict_proba(own).shape == (150, 2)
    inside = {(s["feature"], s["threshold"]) for s in plain.splits() if "feature" in s}
    assert inside and {name for name, _ in inside} <= set(NAMES)
    for name, threshold in inside:
        column = own[:, NAMES.index(name)]
        assert column.min() <= threshold < column.max()
    assert sum("value" in s for s in plain.splits()) <= 8
    proba = model.predict_proba(x).reveal().numpy()
    assert np.abs(proba - plain.predict_proba(own)).max() < 1e-5
    # Plain rows by a model in shares, and rows in shares by a plain model.
    assert np.array_equal(model.predict(own).reveal().numpy(), plain.predict(own))
    rows = sectorch.share(torch.tensor(own), session=session, owner="A", limit=1024.0)
    assert np.array_equal(plain.predict(rows).reveal().numpy(), plain.predict(own))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("kind", KINDS)
def test_scikit_learn_takes_them_for_its_own(kind: type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's own checks
        results = check_estimator(kind(3, max_depth=2, max_bins=16), on_fail=None)
    failed = {r["check_name"] for r in results if r["status"] != "passed"}
    assert failed <= {"check_array_api_input"} and len(results) > 40  # that asks for SCIPY_ARRAY_API


def test_columns_beyond_the_activation_limit_are_fitted_and_predicted():
    """An owner's numbers are put into bins, and never multiplied, so their limit is that of their column."""
    session = session_of()
    income = np.linspace(1e3, 9e4, 60).round()
    facts = {"income": Column("number", limit=2.0**17)}
    x = owned({"income": income}, owner="A", session=session, columns=facts)
    y = (income > 5e4).astype(int)
    model = BoostedTreesClassifier(1, max_depth=1, max_bins=64).fit(x, shared(y, session))
    assert np.array_equal(model.predict(x).reveal().numpy(), y)
    assert np.array_equal(model.revealed().predict(income[:, None]), y)


# What is refused


def shared(values: Any, session: Any) -> Any:
    return sectorch.share(torch.tensor(values), session=session, owner="A")


BAD_FITS = {
    "y is plain": (ArgumentError, "its owner shares it", lambda s, x, y: ([table(s, x, "A")], y)),
    "y is short": (ShapeError, "a value for each row", lambda s, x, y: (table(s, x, "A"), shared(y[1:], s))),
    "another session": (
        SessionMismatchError, "two sessions", lambda s, x, y: (table(s, x, "A"), shared(y, session_of())),
    ),
    "columns twice": (
        ArgumentError, "columns of different names",
        lambda s, x, y: ([table(s, x, "A", NAMES[:2]), table(s, x, "S", NAMES[1:])], shared(y, s)),
    ),
    "rows of other columns": (
        ArgumentError, "rows below each other the same columns",
        lambda s, x, y: ([[table(s, x, "A", NAMES[:2])], [table(s, x, "S", NAMES[:3])]], shared(y, s)),
    ),
    "lengths": (
        ShapeError, "as many rows",
        lambda s, x, y: ([table(s, x, "A", NAMES[:2]), table(s, x, "S", NAMES[2:], slice(9))], shared(y, s)),
    ),
    "categories": (
        ArgumentError, "two lists of categories",
        lambda s, x, y: (
            [table(s, x, "A"), owned(x, owner="S", session=s, columns=FACTS | {"grade": (*GRADES, "d")})],
            shared(np.concatenate([y, y]), s),
        ),
    ),
    "arrays": (ArgumentError, "sectorch.owned", lambda s, x, y: ([table(s, x, "A"), numbers(x)], shared(y, s))),
    "numbers in shares": (ArgumentError, "name public edges", lambda s, x, y: (table(s, x, "A").share(), shared(y, s))),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FITS)
def test_bad_input_is_refused_before_anything_is_shared(case: str):
    kind, text, make = BAD_FITS[case]
    frame, y = data(40)
    x, target = make(session_of(), frame, y)
    with sectorch.profile() as profile, pytest.raises(kind, match=text) as error:
        BoostedTreesClassifier(**SMALL).fit(x, target)
    assert isinstance(error.value, SectorchError) and not profile.ledger


@pytest.mark.parametrize(("settings", "text"), [
    ({"n_estimators": 0}, "n_estimators"), ({"max_depth": 9}, "max_depth"), ({"max_bins": 257}, "max_bins"),
    ({"max_bins": 2.5}, "whole number"), ({"learning_rate": 0}, "learning_rate"), ({"reg_lambda": -1}, "reg_lambda"),
    ({"reg_lambda": float("nan")}, "reg_lambda"), ({"subsample": 1.5}, "subsample"),
    ({"min_child_weight": "1"}, "min_child_weight"), ({"edges": {"height": [1]}}, "no column"),
    ({"edges": {"age": [3, 1]}}, "ascending"), ({"edges": {"age": range(40)}}, "max_bins"), ({"edges": [1]}, "mapping"),
])  # fmt: skip
def test_settings_that_cannot_be(settings: dict, text: str):
    frame, y = data(40)
    session = session_of()
    x, target = table(session, frame, "A"), shared(y, session)
    with sectorch.profile() as profile, pytest.raises(ArgumentError, match=text):
        BoostedTreesClassifier(**SMALL | settings).fit(x, target)
    assert not profile.ledger


def test_labels_and_targets_out_of_range_give_no_fit():
    frame, y = data(40)
    session = session_of()
    x = table(session, frame, "A")
    model = BoostedTreesClassifier(**SMALL).fit(x, shared(y + 1, session))
    with pytest.raises(FitError, match="labels are not 0 and 1"):
        model.revealed()
    with pytest.raises(ArgumentError, match="share it with the limit"):
        BoostedTreesRegressor(**SMALL).fit(x, shared(y * 1.0, session))


def test_a_scheme_that_proves_is_refused():
    frame, y = data(40)
    session, scheme = sectorch.Session(), sectorch.Scheme(verified=True)
    x = owned({"age": frame["age"]}, owner="A", session=session, scheme=scheme)
    target = sectorch.share(torch.tensor(y), session=session, owner="A", scheme=scheme)
    with pytest.raises(ArgumentError, match="verified"):
        BoostedTreesClassifier(**SMALL).fit(x, target)
    with session.call() as net, pytest.raises(UnsupportedOpError):
        backend = session.backend(net, scheme)
        backend.bin_matrix(net.own(net.A, torch.zeros(2, 1, dtype=torch.uint8)), net.A, 2)
