"""Tables of several owners in shares: columns by name, statistics, and what is computed of them.

    patients = sectorch.owned(frame, owner="A", session=session).share()
    print(patients["age"].shape, patients.schema["age"])

See docs/tables.md.
"""

from __future__ import annotations

from .evaluation import evaluate
from .statistics import Axis, LabelledResult, Statistic
from .table import Column, OwnedTable, Table, owned

__all__ = [
    "Axis",
    "Column",
    "LabelledResult",
    "OwnedTable",
    "Statistic",
    "Table",
    "evaluate",
    "owned",
]
