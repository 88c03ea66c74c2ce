"""`sectorch.shuffle`: rows in an order that nobody knows, the same for several tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from ..tensor import SharedTensor
from ..tensor.table import Context


def shuffle(x: Any, *others: Any) -> Any:
    """The rows of x, and those of the others in the same order: a uniform one that nobody knows and nobody learns.

    Args:
        x, others: SharedTensors of one session with as many rows; of any shapes, dtypes and owners.

    Returns:
        x in its new order, or a tuple where there are several. Rows that are revealed tell what they are, and not where
        they stood.

    Rounds 2, online 16 bytes per element, dealt 8 (`mpc/star/shuffle.py`). Exact. In a reference session the order is
    another in each call too.

    Raises:
        ArgumentError: not in shares, or of two sessions.
        ShapeError: no rows, or not as many in each.
    """
    given = [v.as_shared() if hasattr(v, "as_shared") else v for v in (x, *others)]
    for value in given:
        if not isinstance(value, SharedTensor):
            raise ArgumentError(f"shuffle() takes tensors in shares, got a {type(value).__name__}; share it first")
        if value.session is not given[0].session or value.party != given[0].party:
            raise ArgumentError("shuffle() takes tensors of one session; share them in one")
        if not value.shares.shape or value.shares.shape[0] != given[0].shares.shape[0]:
            raise ShapeError(f"shuffle() needs equal numbers of rows, got {[tuple(v.shares.shape) for v in given]}")
    shapes = [value.shares.shape for value in given]
    context = Context(given[0].session, given[0].party, given[0].scheme)
    with context.session.operation(context.party):
        backend = context.backend
        rows = backend.each(_beside, *(value.shares for value in given))
        rows = backend.shuffled(rows) if rows.shape[0] > 1 else rows
        made, at = [], 0
        for value, shape in zip(given, shapes, strict=True):
            width = math.prod(shape[1:])
            moved = value.like(
                backend.each(partial(_columns, at=at, width=width, shape=shape), rows), bound=value.bound
            )
            moved.whole_bits, at = value.whole_bits, at + width
            made.append(moved)
    return made[0] if not others else tuple(made)


def _beside(*values: Tensor) -> Tensor:
    return torch.cat([v.reshape(len(v), math.prod(v.shape[1:])) for v in values], 1)


def _columns(rows: Tensor, at: int, width: int, shape: tuple) -> Tensor:
    return rows[:, at : at + width].reshape(shape)
