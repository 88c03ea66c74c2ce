"""Rows of ReLU and what is built from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.errors import NonFiniteError, ShapeError, UnsupportedOpError

from .base import call, number, op, refused, whole

T = torch.Tensor
X = number(2, 3)
EXACT = "a comparison is exact and a choice keeps an entry: the encoding error of the input, or of a bound"

ROWS = (
    op(
        "relu",
        call(X),
        call(whole(3)),
        call(X, inplace=True, keys=(F.relu,)),
        call(X, keys=(F.relu,)),
        ulps=0.5,
        why=EXACT,
        operands=1,
    ),
    op(
        "leaky_relu",
        call(X),
        call(X, 0.25),
        call(X, negative_slope=0.3),
        call(X, -0.5),
        call(X, 1.5),
        call(X, 0.3, inplace=True),
        ulps=6,
        why="s x + (1 - s) relu(x): encoded factors 4 / 2 + 4 / 2, entries (|s| + |1 - s|) / 2",
        operands=1,
    ),
    op(
        "rrelu",
        call(X, keys=(F.rrelu, torch.rrelu, F.rrelu_, torch.rrelu_)),
        call(X, 0.25, 0.75, inplace=True, keys=(F.rrelu,)),
        call(X, 0.25, 0.75, keys=(F.rrelu, torch.rrelu, F.rrelu_, torch.rrelu_)),
        ulps=6,
        why="as leaky_relu with the middle slope",
        errors=(refused(UnsupportedOpError, "training", X, 0.1, 0.3, True),),
    ),
    op(
        "prelu",
        call(number(2, 3), number(3, low=-1, high=1)),
        call(number(2, 3, 2), number(3, low=-1, high=1).private),
        call(number(2, 3), number(1, low=-1, high=1).public),
        call(number(4), number(1, low=-1, high=1)),
        ulps=3,
        why="relu 1/2, (x - relu(x)) w: 4 / 2 + 1 / 2",
        errors=(refused(ShapeError, "Found parameter numbers = 4", number(2, 3), number(4)),),
    ),
    op("abs", call(X), call(whole(3)), ulps=0.5, why=EXACT, operands=1),
    op(
        "clamp",
        call(X, -1.0, 2.0),
        call(X, min=-0.3),
        call(X, max=1.3),
        call(X, 0, 1),
        call(X, -0.3, 0.7),
        call(X, 2.0, -1.0),
        call(whole(2, 3), -1, 2),
        call(X, 1.0, 1.0),
        call(X, number(low=-1, high=0).private, number(low=0, high=1).private),
        call(X, max=number(3, low=-1, high=1)),
        call(X, number(low=-1, high=0).public, number(low=0, high=1).public),
        ulps=0.5,
        why=EXACT,
    ),
    op(
        "clamp_min",
        call(X, 0.3),
        call(X, -1),
        call(whole(3), 1),
        ulps=0.5,
        why=EXACT,
        errors=(refused(NonFiniteError, "NaN", X, float("nan")),),
    ),
    op(
        "clamp_max",
        call(X, 0.3),
        call(X, -1),
        call(whole(3), 1),
        ulps=0.5,
        why=EXACT,
        errors=(refused(NonFiniteError, "infinite", X, float("-inf")),),
    ),
    op("relu6", call(number(2, 3, low=-8, high=8)), call(X, inplace=True), ulps=0.5, why=EXACT, operands=1),
    op(
        "hardtanh",
        call(X),
        call(X, -0.5, 1.5),
        call(X, min_val=-2.0, max_val=0.3),
        call(X, -1.0, 1.0),
        ulps=0.5,
        why=EXACT,
        operands=1,
    ),
)
