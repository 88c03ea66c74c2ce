"""The op table as data: one row for every operation of `tensor/dispatch.py`; `test_ops.py` runs templates over it.

The rows are in `op_rows/`, a file for each kind of operation.
"""

from __future__ import annotations

from op_rows import (
    activation,
    arithmetic,
    compare,
    composites,
    fourier,
    indexing,
    linalg,
    linear,
    losses,
    margins,
    networks,
    normalization,
    order,
    pooling,
    ranks,
    reduction,
    smooth,
    statistics,
    structure,
)
from op_rows.base import OpRow

KINDS = (
    activation,
    arithmetic,
    composites,
    compare,
    fourier,
    linalg,
    linear,
    losses,
    margins,
    networks,
    normalization,
    order,
    indexing,
    pooling,
    ranks,
    reduction,
    smooth,
    statistics,
    structure,
)
ROWS: dict[str, OpRow] = {row.name: row for kind in KINDS for row in kind.ROWS}
