"""Tables of several owners in shares: columns by name, statistics, and what is computed of them.

    patients = sectorch.owned(frame, owner="A", session=session).share()
    print(patients["age"].shape, patients.schema["age"])

See docs/tables.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .evaluation import evaluate
from .join import join
from .nullable import NullableColumn
from .release import GovernedResult, Policy, PolicyError, PolicyLedger, release
from .statistics import (
    Axis,
    HypothesisTest,
    LabelledResult,
    Statistic,
    TestResult,
    chi_square,
    correlation,
    count,
    covariance,
    cross_table,
    histogram,
    maximum,
    mean,
    median,
    minimum,
    quantile,
    std,
    sum,
    t_test,
    variance,
)
from .survival import kaplan_meier, life_table, log_rank
from .table import Column, OwnedTable, Table, owned

if TYPE_CHECKING:
    from .boosting import BoostedTreesClassifier, BoostedTreesRegressor

__all__ = [
    "Axis",
    "BoostedTreesClassifier",
    "BoostedTreesRegressor",
    "Column",
    "GovernedResult",
    "HypothesisTest",
    "LabelledResult",
    "NullableColumn",
    "OwnedTable",
    "Policy",
    "PolicyError",
    "PolicyLedger",
    "Statistic",
    "Table",
    "TestResult",
    "chi_square",
    "correlation",
    "count",
    "covariance",
    "cross_table",
    "evaluate",
    "histogram",
    "join",
    "kaplan_meier",
    "life_table",
    "log_rank",
    "maximum",
    "mean",
    "median",
    "minimum",
    "owned",
    "quantile",
    "release",
    "std",
    "sum",
    "t_test",
    "variance",
]


def __getattr__(name: str) -> Any:
    if name in ("BoostedTreesClassifier", "BoostedTreesRegressor"):  # they need scikit-learn
        from . import boosting

        return getattr(boosting, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
