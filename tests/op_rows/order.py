"""Rows of positions and orders. Positions are torch's: the samples have no equal entries along the dimension, or the
first of equals is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.errors import DimensionError, ShapeError, UnsupportedOpError

from .base import call, distinct, index, number, op, refused, whole

T = torch.Tensor
X = distinct(3, 5)
LINE = distinct(7)
EXACT = "an order keeps entries: encoding"
NO_DIM = refused(DimensionError, "Dimension out of range", X, 4)
INDEX = whole(2, 3, low=0, high=5)


def position(name: str):
    return op(
        name,
        call(X),
        call(X, 1),
        call(X, dim=0, keepdim=True),
        call(LINE),
        call(X, -1, True),
        call(distinct(1)),
        call(X, None, True),
        ulps=0,
        why="positions are whole",
        errors=(NO_DIM,),
    )


def extreme(name: str, *keys):
    return op(
        name,
        call(number(2, 3, 4)),
        call(number(3, 4), number(3, 4)),
        call(number(3, 4), number(3, 4).public),
        call(number(3, 4).public, number(3, 4)),
        call(whole(3)),
        call(number()),
        call(X, 1),
        call(X, dim=0, keepdim=True),
        call(X, 1, True),
        call(number(3, 4), other=number(3, 4)),
        ulps=0.5,
        why=EXACT,
        errors=(NO_DIM,),
    )


ROWS = (
    position("argmax"),
    position("argmin"),
    extreme("max"),
    extreme("min"),
    op(
        "sort",
        call(X),
        call(X, 0),
        call(X, 1, True),
        call(LINE, descending=True),
        call(distinct(1)),
        call(distinct(8)),
        call(whole(9, low=0, high=3), stable=True),
        call(whole(3, 4, low=0, high=2), dim=0, descending=True, stable=True),
        ulps=0.5,
        why=EXACT,
        errors=(NO_DIM,),
    ),
    op(
        "argsort",
        call(X),
        call(X, 0),
        call(X, 1, True),
        call(LINE, descending=True),
        ulps=0,
        why="positions are whole",
        errors=(NO_DIM,),
    ),
    op("msort", call(X), call(LINE), ulps=0.5, why=EXACT),
    op(
        "topk",
        call(X, 2),
        call(X, 1, 0),
        call(LINE, 3, largest=False),
        call(X, 5, -1, True, True),
        ulps=0.5,
        why=EXACT,
        errors=(refused(ShapeError, "k not in range", X, 9),),
    ),
    op(
        "one_hot",
        call(INDEX, 5),
        call(INDEX, num_classes=6),
        ulps=0,
        why="exact",
        errors=(refused(UnsupportedOpError, "num_classes", INDEX),),
    ),
    op(
        "embedding",
        call(INDEX, number(5, 4), keys=(F.embedding,)),
        call(INDEX, number(5, 4).private, keys=(F.embedding,)),
        call(INDEX, number(5, 4).public, keys=(F.embedding,)),
        call(index(2, 3, below=5), number(5, 4), keys=(F.embedding,)),
        call(number(5, 4), INDEX, keys=(torch.embedding,)),
        call(number(5, 4).private, INDEX, keys=(torch.embedding,)),
        ulps=0.5,
        why="one entry of the weight is taken; the others are multiplied by an exact 0",
    ),
)
