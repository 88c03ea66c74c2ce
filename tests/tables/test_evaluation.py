"""`sectorch.evaluate` against scikit-learn: ties, one positive row, equal scores, groups, classes; what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st
from session_in_protocol import Within
from sklearn import metrics as known
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn

import sectorch
from sectorch.errors import (
    ArgumentError,
    DtypeError,
    NonFiniteError,
    RangeExceededError,
    SessionMismatchError,
    ShapeError,
)
from sectorch.tables import Column, Statistic, Table, evaluate, owned
from sectorch.tables.evaluation import METRICS
from sectorch.testing import CheckOptions, Given, check_protocol

UNIT = 2.0**-20
ALL = [name for name in METRICS if name != "gaps"]


@pytest.fixture(scope="module")
def plain() -> sectorch.Session:
    return sectorch.Session(reference=True)


def shared(session: sectorch.Session, *values: Any) -> list[sectorch.SharedTensor]:
    return [sectorch.share(torch.as_tensor(v), session=session, owner="S") for v in values]


def values(found: dict[str, Statistic]) -> dict[str, np.ndarray]:
    return {name: one.reveal().to_numpy() for name, one in found.items()}


def table_of(labels: np.ndarray, predicted: np.ndarray, classes: int = 2) -> np.ndarray:
    """Rows by actual and predicted class; of no row, too."""
    return np.bincount(classes * labels + predicted, minlength=classes**2).reshape(classes, classes)


def area_error(rows: int) -> float:
    """Of an average precision of one group: a rounded factor for each row, and the roundings of sum and quotient."""
    return rows * 2.0**-41 + UNIT


@st.composite
def cases(draw) -> tuple[np.ndarray, np.ndarray]:
    """Scores with many ties, and labels of both kinds."""
    n = draw(st.integers(2, 40))
    scores = np.array(draw(st.lists(st.integers(-8, 8), min_size=n, max_size=n))) / draw(st.sampled_from([1, 4, 64]))
    labels = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    labels[draw(st.integers(0, n - 1))] = 1
    if labels.all():
        labels[draw(st.integers(0, n - 1))] = 0
    return scores, labels


@given(cases())
def test_areas_of_two_classes_are_those_of_scikit_learn(plain, case):
    scores, labels = case
    found = values(evaluate(None, *shared(plain, scores, labels), ["auroc", "auprc"]))
    assert abs(found["auroc"] - known.roc_auc_score(labels, scores)) <= UNIT / 2
    assert abs(found["auprc"] - known.average_precision_score(labels, scores)) <= area_error(len(labels))


@given(cases())
def test_counts_losses_and_calibration_are_those_of_scikit_learn(plain, case):
    scores, labels = case
    found = values(evaluate(None, *shared(plain, scores, labels), ALL, bins=5))
    p = 1 / (1 + np.exp(-scores))
    assert (found["confusion"] == table_of(labels, scores > 0)).all()
    assert abs(found["accuracy"] - known.accuracy_score(labels, scores > 0)) <= UNIT / 2
    assert abs(found["log_loss"] - known.log_loss(labels, p)) <= 8 * UNIT
    assert abs(found["brier"] - known.brier_score_loss(labels, p)) <= 4 * UNIT
    bins = np.digitize(p, np.linspace(0, 1, 6)[1:-1], right=True)
    sums = [(p[bins == b].sum(), labels[bins == b].sum()) for b in range(5)]
    assert abs(found["ece"] - sum(abs(a - b) for a, b in sums) / len(labels)) <= 4 * UNIT
    empty = [not (bins == b).any() for b in range(5)]
    assert (np.isnan(found["calibration"]).any(1) == empty).all()
    right, mean = calibration_curve(labels, p, n_bins=5)
    curve = found["calibration"][~np.array(empty)]
    assert np.abs(curve - np.stack((mean, right), 1)).max() <= 4 * UNIT


@pytest.mark.parametrize(
    ("scores", "labels", "auroc", "auprc"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0, 1, 0, 0], 0.5, 0.25),
        ([3.0, 2.0, 1.0, 0.0], [1, 0, 0, 0], 1.0, 1.0),
        ([3.0, 2.0, 1.0, 0.0], [0, 0, 0, 1], 0.0, 0.25),
        ([1.0, 1.0, 0.0], [1, 0, 0], 0.75, 0.5),
        ([1.0, 0.0], [1, 0], 1.0, 1.0),
    ],
)
def test_equal_scores_and_one_positive_row(plain, scores, labels, auroc, auprc):
    found = values(evaluate(None, *shared(plain, scores, labels), ["auroc", "auprc"]))
    assert (float(found["auroc"]), float(found["auprc"])) == (auroc, auprc)


@given(cases(), st.data())
def test_groups_are_evaluated_as_if_they_were_alone(plain, case, data):
    scores, labels = case
    n = len(labels)
    wards = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    flags = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    x, y, g, h = shared(plain, scores, labels, wards, flags)
    found = evaluate(None, x, y, ["auroc", "auprc", "accuracy", "confusion", "gaps"],
                     {"ward": (g, ("a", "b", "c")), "old": (h, (False, True))})  # fmt: skip
    assert list(found) == [
        *(f"{name}{of}" for name in ("auroc", "auprc", "accuracy", "confusion") for of in ("", " by ward", " by old")),
        "gaps",
    ]
    assert [axis.name for axis in found["confusion by ward"].axes] == ["ward", "actual", "predicted"]
    counts, seen = {name: one.counts.reveal().numpy() for name, one in found.items()}, values(found)
    for of in (counts, seen):  # all rows, and both columns' groups
        of |= {n: np.stack((of[n], *of[f"{n} by ward"], *of[f"{n} by old"])) for n in of if f"{n} by old" in of}
    groups = [np.ones(n, bool), *(wards == i for i in range(3)), ~flags, flags]
    for i, rows in enumerate(groups):
        kinds = np.bincount(labels[rows], minlength=2)
        assert counts["auroc"][i] == counts["auprc"][i] == kinds.min() and counts["accuracy"][i] == rows.sum()
        assert (seen["confusion"][i] == table_of(labels[rows], scores[rows] > 0)).all()
        assert math.isnan(seen["auroc"][i]) == math.isnan(seen["auprc"][i]) == (kinds.min() == 0)
        assert math.isnan(seen["accuracy"][i]) == (not rows.any())
        if kinds.min():
            assert abs(seen["auroc"][i] - known.roc_auc_score(labels[rows], scores[rows])) <= UNIT / 2
            assert abs(seen["auprc"][i] - known.average_precision_score(labels[rows], scores[rows])) <= 8 * UNIT
    for j, name in enumerate(("auroc", "auprc", "accuracy")):
        for k, places in enumerate(([1, 2, 3], [4, 5])):
            own = seen[name][places]
            assert counts["gaps"][j, k] == counts[name][places].min()
            expected = np.nan if np.isnan(own).any() else own.max() - own.min()
            assert np.array_equal(seen["gaps"][j, k], expected, equal_nan=True)


@given(cases(), st.data())
def test_rows_that_do_not_count_count_nowhere(plain, case, data):
    scores, labels = case
    n = len(labels)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    x, y, flags = shared(plain, scores, labels, kept)
    table = Table({"score": x.to(torch.float32), "died": y.to(torch.bool)}).where(flags)
    found = evaluate(None, table[["score"]], table[["died"]], ALL)
    whole = evaluate(None, x, y, ALL)
    assert {name: one.axes for name, one in found.items()} == {
        name: tuple(a._replace(labels=(False, True)) if a.name in ("actual", "predicted") else a for a in one.axes)
        for name, one in whole.items()
    }
    seen = values(found)
    assert (seen["confusion"] == table_of(labels[kept], scores[kept] > 0)).all()
    if len(set(labels[kept])) == 2:
        alone = values(evaluate(None, *shared(plain, scores[kept], labels[kept]), ALL))
        alone["auprc"] = alone["auprc"] if abs(alone["auprc"] - seen["auprc"]) > 8 * UNIT else seen["auprc"]
        assert all(np.array_equal(seen[name], alone[name], equal_nan=True) for name in ALL)


@given(st.data())
def test_several_classes_are_each_against_the_rest(plain, data):
    n = data.draw(st.integers(6, 30))
    logits = np.array(data.draw(st.lists(st.integers(-12, 12), min_size=3 * n, max_size=3 * n))).reshape(n, 3) / 4
    labels = np.array([0, 1, 2, *data.draw(st.lists(st.integers(0, 2), min_size=n - 3, max_size=n - 3))])
    x, y = shared(plain, logits, labels)
    seen = values(evaluate(None, x, y, ALL, classes=["a", "b", "c"]))
    p = torch.softmax(x.to(torch.float32), 1).reveal().double().numpy()  # what it ranks
    exact = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert (seen["confusion"] == table_of(labels, logits.argmax(1), 3)).all()
    assert abs(seen["accuracy"] - (logits.argmax(1) == labels).mean()) <= UNIT / 2
    assert abs(seen["log_loss"] - known.log_loss(labels, exact, labels=range(3))) <= 8 * UNIT
    assert abs(seen["brier"] - ((exact - np.eye(3)[labels]) ** 2).sum(1).mean()) <= 8 * UNIT
    for k in range(3):
        assert abs(seen["auroc"][k] - known.roc_auc_score(labels == k, p[:, k])) <= UNIT / 2
        assert abs(seen["auprc"][k] - known.average_precision_score(labels == k, p[:, k])) <= area_error(n)
    assert seen["ece"].shape == (3,) and seen["calibration"].shape == (3, 10, 2)


@pytest.mark.parametrize("frac_bits", [20, 16])
def test_results_in_shares_are_those_of_the_reference_and_nothing_is_shown_before_they_are_revealed(frac_bits):
    scheme = sectorch.Scheme(frac_bits=frac_bits)
    draws = torch.Generator().manual_seed(0)
    scores = torch.randn(33, generator=draws).mul(4).round() / 4
    labels, wards = torch.arange(33) % 2, torch.arange(33) % 3
    results = []
    for session in (sectorch.Session(), sectorch.Session(reference=True)):
        x, y, g = (sectorch.share(v, session=session, scheme=scheme, owner="S") for v in (scores, labels, wards))
        with sectorch.profile() as seen:
            found = evaluate(None, x, y, METRICS, {"ward": (g, (1, 2, 3))})
        assert not [line for line in seen.ledger if line.learner is not None]
        results.append({name: one.reveal().values for name, one in found.items()})
    assert len(results[0]) == 2 * len(METRICS) - 1
    assert all(torch.equal(v.nan_to_num(9), results[1][name].nan_to_num(9)) for name, v in results[0].items())


@pytest.mark.parametrize(
    ("kind", "threshold", "shape"),
    [("logits", None, (9,)), ("logits", 0.3, (9, 1)), ("logits", None, (9, 2)), ("logits", 0.8, (9, 2)),
     ("probabilities", None, (9,)), ("probabilities", 0.25, (9, 2)), ("probabilities", None, (9, 2))],
)  # fmt: skip
def test_logits_and_probabilities_of_two_classes_in_every_form(plain, kind, threshold, shape):
    p = np.array([0.125, 0.25, 0.5, 0.5, 0.75, 0.875, 0.25, 0.375, 0.625])
    labels = np.array([0, 0, 1, 0, 1, 1, 1, 0, 1])
    scores = p if kind == "probabilities" else np.log(p / (1 - p))
    if shape == (9, 2):
        scores = np.stack((1 - p, p) if kind == "probabilities" else (scores * 0 + 1, scores + 1), 1)
    given = shared(plain, scores.reshape(shape), labels)
    found = values(evaluate(None, *given, ALL, output=kind, threshold=threshold))
    predicted = p >= threshold if threshold else p > 0.5
    assert (found["confusion"] == known.confusion_matrix(labels, predicted)).all()
    assert abs(found["log_loss"] - known.log_loss(labels, p)) <= 8 * UNIT
    assert abs(found["brier"] - known.brier_score_loss(labels, p)) <= 4 * UNIT
    assert abs(found["auroc"] - known.roc_auc_score(labels, p)) <= UNIT / 2


def test_a_small_group_is_not_what_a_policy_releases_less_what_it_releases(plain):
    """Three men among forty patients: neither their accuracy nor the women's is released beside that of all."""
    sexes, labels = (np.arange(40) < 3).astype(int), np.arange(40) % 2
    x, y, g = shared(plain, np.where(sexes, -1.0, labels - 0.5), labels, sexes)
    found = evaluate(None, x, y, ["accuracy", "confusion"], {"sex": (g, ("f", "m"))}, version="3")
    policy = sectorch.Policy(minimum=5, releases=0)
    shown = {name: sectorch.release(one, policy) for name, one in found.items()}
    assert abs(float(shown["accuracy"]) - 39 / 40) <= UNIT
    assert shown["accuracy by sex"].withheld.all() and shown["confusion by sex"].withheld.all()


def cancer() -> tuple[pandas.DataFrame, pandas.Series]:
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return x.iloc[:, :6], y


@pytest.mark.parametrize("name", ["net", *long("forest", "forest's classes", "estimator")])
def test_a_model_of_another_party_is_evaluated_without_its_scores(name):
    x, y = cancer()
    session = sectorch.Session(owners=("H1",))
    if name == "estimator":
        own = LogisticRegression(max_iter=5000).fit(x / 100, y)
    elif name != "net":
        own = RandomForestClassifier(8, max_depth=4, random_state=0).fit(x, y)
    test = pandas.concat((x, y.astype(bool)), axis=1).iloc[:120]
    table = owned(test, owner="H1", session=session).share()
    rows, labels = table[list(x.columns)], table[["target"]]
    if name == "net":
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
        with torch.no_grad():
            net[0].weight /= 50
        model = sectorch.secure(net.eval(), session=session)
        scores = net(torch.tensor(test.iloc[:, :6].to_numpy(), dtype=torch.float32)).detach().numpy()[:, 0]
    elif name == "forest":
        model = sectorch.secure(sectorch.fitted_models.module(own, "predict_proba"), session=session)
        scores = own.predict_proba(test[x.columns])[:, 1]
    elif name == "forest's classes":
        model, scores = sectorch.secure(own, session=session), own.predict(test[x.columns])
    else:
        fit = sectorch.estimators.LogisticRegression(max_iter=48)
        model = fit.fit(table.tensor(*x.columns)[:60] / 100, table["target"][:60].long())
        rows = table.tensor(*x.columns) / 100
        scores = fit.revealed().decision_function(test[x.columns].to_numpy() / 100)
    metrics = ["confusion", "accuracy"] if name == "forest's classes" else ["auroc", "confusion"]
    found = evaluate(model, rows, labels, metrics, batch_size=50, version="7")
    assert all(one.source == "7" for one in found.values())
    seen = values(found)
    cut = 0 if name in ("net", "estimator") else 0.5
    assert (seen["confusion"] == known.confusion_matrix(test["target"], scores > cut)).all()
    if "auroc" in seen:  # scores that differ by less than rounding in shares may be ties
        assert abs(seen["auroc"] - known.roc_auc_score(test["target"], scores)) < 1e-3


def test_areas_of_a_model_are_exactly_those_of_the_scores_that_it_computes():
    x, y = load_iris(return_X_y=True)
    net = sectorch.fitted_models.module(LogisticRegression(max_iter=500).fit(x, y), "predict_proba")
    model, rows = sectorch.secure(net), net.schema.rows(x)
    seen = values(evaluate(model, {k: sectorch.share(v) for k, v in rows.items()}, y, ["auroc"], classes=[0, 1, 2]))
    p = sectorch.reference(net)(**rows).double().numpy()
    expected = [known.roc_auc_score(y == k, p[:, k]) for k in range(3)]
    assert np.abs(seen["auroc"] - expected).max() <= UNIT / 2


def test_plain_labels_and_groups_of_an_owner_are_shared_after_they_were_checked(plain):
    scores, labels = np.array([0.5, -1.0, 2.0, 0.0]), np.array(["ill", "well", "ill", "well"])
    found = evaluate(None, scores, labels, ["auroc"], {"sex": (np.array(["f", "m", "f", "f"]), ("f", "m"))}, owner="A",
                     classes=("well", "ill"))  # fmt: skip
    assert float(found["auroc"].reveal()) == 1.0 and found["auroc by sex"].reveal()["f"] == 1.0


SCORES, LABELS = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1, 0, 1, 0])

REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "a label that is no class": (ArgumentError, {"y": np.array([0, 1, 2, 0])}),
    "text that is no class": (ArgumentError, {"y": np.array(["a", "b", "a", "b"])}),
    "labels of one class": (ArgumentError, {"y": np.ones(4, int)}),
    "a label that is no number": (NonFiniteError, {"y": np.array([0.0, 1.0, np.nan, 1.0])}),
    "fewer labels": (ShapeError, {"y": LABELS[:3]}),
    "labels in two dimensions": (ShapeError, {"y": LABELS.reshape(2, 2)}),
    "one row": (ShapeError, {"x": SCORES[:1], "y": sectorch.share(LABELS[:1])}),
    "scores that are no number": (NonFiniteError, {"x": torch.tensor([0.0, math.inf, 1.0, 2.0])}),
    "scores of text": (DtypeError, {"x": ["a", "b", "c", "d"]}),
    "an unknown metric": (ArgumentError, {"metrics": ["auc"]}),
    "no metric": (ArgumentError, {"metrics": []}),
    "gaps between nothing": (ArgumentError, {"metrics": ["auroc", "gaps"]}),
    "a group without a row": (ArgumentError, {"groups": {"sex": (torch.tensor([0, 0, 1, 1]), ("f", "m", "x"))}}),
    "a group without a label": (ArgumentError, {"groups": {"sex": (torch.tensor([0, 0, 1, 2]), ("f", "m"))}}),
    "a group's codes alone": (ArgumentError, {"groups": {"sex": LABELS}}),
    "a label twice": (ArgumentError, {"groups": {"sex": (LABELS, ("f", "f"))}}),
    "groups of another length": (ShapeError, {"groups": {"sex": (torch.tensor([0, 1, 0]), ("f", "m"))}}),
    "a threshold of one": (ArgumentError, {"threshold": 1.0}),
    "no bin": (ArgumentError, {"bins": 0}),
    "one class": (ArgumentError, {"classes": [1]}),
    "a class twice": (ArgumentError, {"classes": [1, 1]}),
    "areas of classes": (ArgumentError, {"output": "classes"}),
    "an output that is none": (ArgumentError, {"output": "odds"}),
    "labels in shares that are fractions": (DtypeError, {"y": sectorch.share(LABELS.float())}),
    "tensors of two sessions": (SessionMismatchError, {"x": sectorch.share(SCORES, session=sectorch.Session())}),
    "no model": (ArgumentError, {"model": "forest"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_before_anything_is_shared(what):
    error, changed = REFUSED[what]
    given = {"model": None, "x": SCORES, "y": LABELS, "metrics": ["auroc"], "groups": None, **changed}
    if what == "tensors of two sessions":
        given["y"] = sectorch.share(LABELS)
    with sectorch.profile() as seen, pytest.raises(error):
        evaluate(**given)
    assert what == "no model" or not seen.ledger


@pytest.mark.parametrize(
    ("shape", "classes"), [((4, 3), None), ((4, 2), ["a", "b", "c"]), ((2, 2), None), ((4,), ["a", "b", "c"])]
)
def test_scores_of_another_number_of_classes_are_refused(plain, shape, classes):
    x, y = shared(plain, torch.zeros(shape), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ShapeError):
        evaluate(None, x, y, ["auroc"], classes=classes)


def test_a_table_that_does_not_fit_is_refused(plain):
    x, y, lost = shared(plain, [1.0, 2.0], [0, 1], [False, True])
    table = Table({"x": x.to(torch.float32), "y": y}, missing={"x": lost.to(torch.bool)})
    with pytest.raises(ArgumentError, match="missing"):
        evaluate(None, table[["x"]], table[["y"]], ["auroc"])
    with pytest.raises(ArgumentError, match="one column"):
        evaluate(None, x, table, ["auroc"])
    with pytest.raises(ArgumentError, match="labels are"):
        evaluate(None, x, table[["x"]], ["auroc"])
    with pytest.raises(ArgumentError, match="category or a flag"):
        evaluate(None, x, table[["y"]], ["auroc"], table[["y"]])
    labels = Table({"y": y}, {"y": Column("category", ("ill", "well"))})
    with pytest.raises(ArgumentError, match="y has the categories"):
        evaluate(None, x, labels, ["auroc"], classes=("well", "ill"))
    found = evaluate(None, table.where(table.known("x")).tensor("x", fill=0), labels, ["confusion"])
    assert found["confusion"].axes[0].labels == ("ill", "well")


def test_rows_whose_label_is_missing_do_not_count(plain):
    x, y, lost = shared(plain, [1.0, 2.0, 0.0, 5.0], [0, 1, 0, 0], [False, False, False, True])
    table = Table({"y": y.to(torch.bool)}, missing={"y": lost.to(torch.bool)})
    assert evaluate(None, x.to(torch.float32), table, ["auroc"])["auroc"].reveal().to_numpy() == 1.0


@pytest.mark.parametrize("what", ["label", "group"])
def test_a_code_in_shares_that_is_none_withholds_every_result(plain, what):
    x, y, g = shared(plain, [0.5, -1.0, 2.0, 0.0], [1, 0, 1 + (what == "label"), 0], [0, 1, 2 + (what == "group"), 0])
    found = evaluate(None, x, y, ["auroc", "confusion"], {"ward": (g, (1, 2, 3))})
    for one in found.values():
        with pytest.raises(RangeExceededError):
            one.reveal()


def areas(session: sectorch.Session, scores: Any, labels: Any) -> tuple[Any, ...]:
    party = session.answering_party()
    x = sectorch.SharedTensor(scores, 20, session, party, sectorch.Scheme(), torch.float32, 2.0**22)
    y = sectorch.SharedTensor(labels, 0, session, party, sectorch.Scheme(), torch.int64, 1.0)
    found = evaluate(None, x, y, ["auroc", "confusion"])
    return tuple(v.shares for one in found.values() for v in (one.values, one.counts))


def areas_in_plain(scores: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
    session = sectorch.Session(reference=True)
    with session.call():
        return areas(session, scores, labels)


GIVEN = [Given(shape=(2,), low=-(3 << 19), high=3 << 19), Given(shape=(2,), low=0, high=1)]


@pytest.mark.sectorch_long
def test_no_view_of_an_evaluation_tells_two_test_sets_apart():
    """A sort, a scan, products, comparisons and quotients: all messages, and each party's joint view."""
    options = CheckOptions(elementwise=False, exhaustive=0, pairs=2, runs=32)
    print(check_protocol(lambda net, x, y: areas(Within(net), x, y), GIVEN, areas_in_plain, seconds=1200, **options))
