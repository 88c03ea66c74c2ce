"""Columns that are taken out of filtered tables: what is computed of them is of the rows that count, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

import sectorch
from sectorch import tables
from sectorch.errors import ArgumentError, SectorchError
from sectorch.estimators import LinearRegression
from sectorch.tables import BoostedTreesClassifier, Table

FRAME = pandas.DataFrame(
    {
        "age": [34, 71, 67, 50, 20, 90],
        "died": [False, True, True, False, True, False],
        "sex": ["f", "m", "f", "m", "f", "m"],
        "score": [0.125, 0.875, 0.25, 0.75, 0.5, 0.375],
        "dose": [1.0, np.nan, 3.0, 4.0, 5.0, 6.0],
    }
)
KEPT = FRAME[FRAME["age"] >= 50]
AREA, ALL_AREA = (roc_auc_score(frame["died"], frame["score"]) for frame in (KEPT, FRAME))


@pytest.fixture(scope="module")
def both() -> tuple[Table, Table]:
    session = sectorch.Session(reference=True, owners=("H1",))
    columns = {"age": None, "died": None, "sex": ("f", "m"), "score": None, "dose": None}
    table = sectorch.owned(FRAME, owner="H1", session=session, columns=columns, missing=["dose"]).share()
    return table, table.where(table["age"] >= 50)


def area(x: Any, y: Any, **more: Any) -> float:
    return float(sectorch.evaluate(None, x, y, ["auroc"], **more)["auroc"].reveal())


FORMS: dict[str, Callable[[Table], Any]] = {
    "table": lambda t: t[["score"]],
    "column": lambda t: t["score"],
    "tensor": lambda t: t.tensor("score"),
    "computed": lambda t: t["score"] * 2 - 1,
    "rows of a tensor": lambda t: t.tensor("score").squeeze(1),
}


def test_areas_are_of_the_rows_that_count_in_every_form(both):
    table, kept = both
    assert AREA != ALL_AREA
    for name, scores in FORMS.items():
        for labels in (lambda t: t[["died"]], lambda t: t["died"].long()):
            for x, y in ((kept, kept), (table, kept), (kept, table)):
                assert abs(area(scores(x), labels(y)) - AREA) < 1e-5, name
            assert abs(area(scores(table), labels(table), groups=kept[["sex"]]) - AREA) < 1e-5, name
            assert abs(area(scores(table), labels(table)) - ALL_AREA) < 1e-5, name


COUNTS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "var": lambda x: torch.var(x),
    "dot": lambda x: x @ x,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: torch.sort(x).values,
    "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x.flip(0),
    "matrix": lambda x: torch.ones(len(x), len(x)) @ x.float(),
    "einsum": lambda x: torch.einsum("ij,j->i", torch.ones(len(x), len(x)), x.float()),
    "layer norm": lambda x: F.layer_norm(x.float(), (len(x),)),
    "outer": lambda x: torch.outer(x, x).sum(1),
    "moved": lambda x: x[torch.arange(len(x)).roll(1)],
    "some": lambda x: x[:2],
    "written": lambda x: x.index_add(0, torch.tensor([0]), x[1:2]),
    "as a row": lambda x: F.avg_pool1d(x.float().reshape(1, 1, -1), 3, 1, 1),
    "joined": lambda x: torch.cat((x, x)),
    "loss": lambda x: F.mse_loss(x, x * 0.5),
    "of flags": lambda x: (x > 40).sum(),
    "of a product": lambda x: (x * 2 + 1).relu().sum(),
    "of a layer": lambda x: F.linear(x.float().unsqueeze(1), torch.ones(3, 1)).mean(0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_would_count_all_rows_is_refused(both, name):
    table, kept = both
    compute = COUNTS[name]
    for t, column in ((table, "age"), (table, "score")):
        compute(t[column].float() * 0.01)
    for column in (kept["age"].float() * 0.01, kept["score"]):
        with pytest.raises(SectorchError, match="of a filtered table"):
            compute(column)
    plain = kept.filled("score")
    assert torch.isfinite(compute(plain).reveal()).all()


def test_sums_of_columns_that_may_be_missing_are_refused_too(both):
    table, kept = both
    assert float(table["dose"].sum().reveal()) == FRAME["dose"].sum()
    with pytest.raises(ArgumentError, match="of a filtered table"):
        kept["dose"].sum()


def test_fits_leave_out_rows_that_do_not_count_or_are_refused(both):
    table, kept = both
    for rows in (kept.tensor("age", "score") * 0.01, kept["age"][:, None] * 0.01):
        with pytest.raises(ArgumentError, match="of a filtered table"):
            LinearRegression().fit(rows, kept.filled("score"))
    with pytest.raises(ArgumentError, match="of a filtered table"):
        LinearRegression().fit(table.tensor("age") * 0.01, kept["score"])
    edges = {"age": [30, 60], "score": [0.3, 0.6]}
    fits = [
        BoostedTreesClassifier(2, max_depth=1, edges=edges).fit(x, y).revealed(to="Q").splits()
        for x, y in (
            (kept[["age", "score"]], kept["died"]),
            (table[["age", "score"]], kept["died"]),
            (kept[["age", "score"]], table["died"]),
        )
    ]
    assert fits[0] == fits[1] == fits[2]
    fits = [
        BoostedTreesClassifier(2, max_depth=1, edges={"x0": [30, 60], "x1": [0.3, 0.6]}).fit(x, y).revealed(to="Q")
        for x, y in (
            (kept.tensor("age", "score"), kept["died"]),
            (table.tensor("age", "score"), kept["died"]),
            (kept.tensor("age", "score"), table["died"]),
        )
    ]
    assert fits[0].splits() == fits[1].splits() == fits[2].splits()


def test_filters_are_kept_by_tables_made_of_columns(both):
    table, kept = both
    wanted = KEPT["score"].mean()
    made = kept.with_columns(double=kept["score"] * 2, known=kept["dose"] > 0)
    for found in (
        tables.mean(Table({"x": kept["score"]}), "x"),
        tables.mean(Table({"x": kept["score"], "y": table["score"]}), "y"),
        tables.mean(table.where(kept["score"] > -1), "score"),
        tables.mean(kept.where(kept["score"] > -1), "score"),
    ):
        assert abs(float(found.reveal()) - wanted) < 1e-5
    assert abs(float(tables.mean(made, "double").reveal()) - 2 * wanted) < 1e-5
    died = KEPT[KEPT["died"]]["score"].mean()
    narrower = kept.where(kept["died"]).with_columns(double=kept["score"] * 2)  # of a filter that has its rows, too
    assert abs(float(tables.mean(narrower, "double").reveal()) - 2 * died) < 1e-5
    assert abs(float(tables.mean(table.where(kept["died"]), "score").reveal()) - died) < 1e-5
    with pytest.raises(ArgumentError, match="another filter"):
        table.with_columns(x=kept["score"])
    other = table.where(table["age"] < 80)
    for refused in (
        lambda: other["age"] > kept["age"],
        lambda: Table({"x": kept["age"], "y": other["age"]}),
        lambda: other.with_columns(x=kept["age"]),
    ):
        with pytest.raises(ArgumentError, match="filter"):
            refused()


ROW_BY_ROW = {
    "sum": lambda x: (x * 2 + 1).relu(), "choice": lambda x: torch.where(x > 40, x, -x), "view": lambda x: x[:, None],
    "side by side": lambda x: torch.stack((x, x), 1), "of a row": lambda x: torch.stack((x, x * 2), 1).amax(1),
    "layer": lambda x: F.linear(x.float().unsqueeze(1), torch.ones(3, 1)), "code": lambda x: (x > 40).long(),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_goes_row_by_row_keeps_the_filter(both, name):
    _, kept = both
    assert ROW_BY_ROW[name](kept["age"]).counting is kept["age"].counting is not None
