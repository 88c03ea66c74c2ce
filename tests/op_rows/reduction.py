"""Rows of sums, means, maxima and minima along dimensions."""

from __future__ import annotations

import torch

from sectorch.errors import ArgumentError, DimensionError, ShapeError

from .base import call, flags, number, op, refused, whole

X = number(2, 3, 4)
CHOICE = "a maximum keeps an entry: encoding"
NO_DIM = refused(DimensionError, "Dimension out of range", X, 3)
OVER = (call(X, 0), call(X, -1, True), call(X, (0, 2)), call(X, dim=1), call(X, dim=(1, 2), keepdim=True))
PAIR = (call(X, X), call(whole(2, 3), whole(2, 3)), call(X, X.public), call(X, X.private))


def tree(name: str):
    return op(name, call(X), *OVER, call(whole(3, 2), 0), call(number(1, 3), 0), ulps=0.5, why=CHOICE, errors=(NO_DIM,))


def larger(name: str):
    return op(
        name,
        *PAIR,
        ulps=0.5,
        why=CHOICE,
        pairs="ss sp s. ps .s",
        operands=2,
        errors=(refused(ShapeError, "roadcast", X, number(2, 3, 5)),),
    )


ROWS = (
    op(
        "sum",
        call(X),
        *OVER,
        call(whole(2, 3)),
        call(flags(2, 3), 0),
        call(number(0, 3), 0),
        call(number()),
        call(X, dtype=torch.float64),
        ulps=12,
        why="24 entries of 1/2",
        errors=(NO_DIM,),
    ),
    op(
        "mean",
        call(X),
        *OVER,
        call(number(4, 2), 0),
        call(number()),
        call(X, 1, dtype=torch.float64),
        ulps=5.5,
        why="1/2, a truncation, and |mean| = 4 for 1/n to 20 significant bits",
        errors=(NO_DIM, refused(ArgumentError, "no elements", number(0))),
    ),
    op(
        "cumsum",
        call(X, 0),
        call(X, dim=-1),
        call(whole(4), 0),
        ulps=2,
        why="at most 4 entries of 1/2",
        errors=(NO_DIM,),
    ),
    tree("amax"),
    tree("amin"),
    larger("maximum"),
    larger("minimum"),
)
