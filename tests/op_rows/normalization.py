"""Rows of softmax and of layers that normalise by statistics of the input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sectorch.errors import DimensionError, ShapeError, UnsupportedOpError

from .base import call, number, op, refused
from .smooth import EXP, LOG, RECIPROCAL, RSQRT, SQRT

NORM = (torch.norm, torch.Tensor.norm)
LINALG = (torch.linalg.vector_norm, torch.linalg.norm)
X = number(3, 4)
CUBE = number(2, 4, 3)
TERM = EXP + 2
"""e^(x - max): the series, the input, a truncation."""
NO_DIM = refused(DimensionError, "Dimension out of range", X, 4)
SOFTMAX = 4 * TERM + TERM + RECIPROCAL + 4
SOFTMAX_WHY = "n = 4 terms in the sum, which is at least 1; one in the numerator; the reciprocal, truncated twice"
STANDARD = 3 + 2.5 * (3 + RSQRT + 1)
STANDARD_WHY = (
    "d = x - mean errs by 3, the sum of n squares by 2 3 |d| sqrt n, half of which, relative to it, is in the inverse "
    "root: 3 for a deviation of at least 1; the root's series truncated; results are at most 2.5"
)
AFFINE = 2 * (STANDARD + 1) + 1.75
"""Times a weight of at most 2, plus a bias."""


def n(*shape: int):
    return number(*shape, low=-2, high=2)


def soft(name: str, *keys, ulps: float, why: str):
    return op(
        name,
        call(X, 1),
        call(X, -1),
        call(X, dim=0),
        call(number(5), 0, ulps=ulps + TERM),
        call(CUBE, 1),
        ulps=ulps,
        why=why,
        errors=(NO_DIM,),
    )


ROWS = (
    soft("softmax", ulps=SOFTMAX, why=SOFTMAX_WHY),
    soft("softmin", ulps=SOFTMAX, why=SOFTMAX_WHY),
    soft("log_softmax", ulps=4 * TERM + LOG + 2, why="n = 4 terms in a sum of at least 1, its log, and x - max"),
    op(
        "logsumexp",
        call(X, 1),
        call(X, -1, True),
        call(X, dim=0),
        call(X, (1,)),
        ulps=4 * TERM + LOG + 2,
        why="as log_softmax",
        errors=(NO_DIM,),
    ),
    op(
        "layer_norm",
        call(X, (4,)),
        call(X, (4,), n(4).private, n(4).private),
        call(CUBE, (4, 3), n(4, 3), n(4, 3).public),
        call(X, (4,), None, None, 1e-2),
        call(X, [4], eps=1e-3),
        ulps=AFFINE,
        why=STANDARD_WHY,
        errors=(refused(ShapeError, "normalized_shape", X, (5,)),),
    ),
    op(
        "rms_norm",
        call(X, (4,)),
        call(X, (4,), n(4).private),
        call(CUBE, (4, 3), n(4, 3), 1e-3),
        ulps=AFFINE,
        why=STANDARD_WHY,
        errors=(refused(ShapeError, "normalized_shape", X, (5,)),),
    ),
    op(
        "group_norm",
        call(CUBE, 2),
        call(number(1, 4, 2, 2), 2, n(4).private, n(4).private),
        call(CUBE, 4, None, None, 1e-3),
        ulps=AFFINE,
        why=STANDARD_WHY,
        errors=(refused(ShapeError, "divisible", CUBE, 3),),
    ),
    op(
        "instance_norm",
        call(number(2, 3, 5), keys=(F.instance_norm,)),
        call(number(1, 2, 3, 3), None, None, n(2).private, n(2).private, keys=(F.instance_norm,)),
        call(
            number(2, 3, 5),
            n(3).private,
            n(3).private,
            n(3).private,
            number(3, low=0.5, high=2).private,
            True,
            0.1,
            1e-5,
            False,
            keys=(torch.instance_norm,),
        ),
        ulps=AFFINE,
        why=STANDARD_WHY,
    ),
    op(
        "local_response_norm",
        call(number(1, 4, 3), 2),
        call(number(1, 4, 3, 3), 3, 0.1, 0.75, 2.0),
        ulps=200,
        why="x (k + a mean)^-beta by exp and log: 4 (30 relative, the power is at most 1), mean of squares 16 4 a",
    ),
    op("normalize", call(X), call(X, dim=0), call(X, 1.0, 1), call(CUBE, 2.0, 2), ulps=STANDARD, why=STANDARD_WHY),
    op(
        "var",
        call(X),
        call(X, 1),
        call(X, (0, 1)),
        call(X, 0, True, True),
        call(X, dim=1, correction=0),
        call(X, False),
        ulps=80,
        why="d = x - mean errs by 3: 2 5 3 n per sum, over n - 1 at most 45; 1 / (n - 1) encoded: 16 n / 2",
        errors=(refused(UnsupportedOpError, "too few", number(1)),),
    ),
    op("std", call(X), call(X, 1), call(X, dim=1, correction=0), ulps=80, why="as var, over 2 std (at least 1/2)"),
    op(
        "norm",
        call(X, 1, keys=NORM, ulps=6.5),
        call(X, 2, 1, keys=NORM + LINALG),
        call(X, math.inf, keys=NORM),
        call(X, p=1, dim=0, keys=NORM),
        call(X, 2, -1, True, keys=NORM + LINALG),
        call(X, keys=NORM),
        call(X, ord=1, dim=1, keys=LINALG),
        call(X, keys=LINALG),
        call(X, math.inf, keys=(torch.linalg.vector_norm,)),
        call(X, 1, keys=(torch.linalg.vector_norm,), ulps=6.5),
        call(X, 1, keys=(torch.linalg.norm,), ulps=6.5),
        call(X, math.inf, keys=(torch.linalg.norm,), ulps=6.5),
        call(X, keys=(torch.linalg.matrix_norm,)),
        call(X, -1, keys=(torch.linalg.matrix_norm,), ulps=6.5),
        call(CUBE, -math.inf, (0, 2), True, keys=(torch.linalg.matrix_norm,), ulps=6.5),
        ulps=6 + 4 * (SQRT + 1) + 1,
        why="sum of 12 squares, 12 4 / (2 norm) with a norm of at least 4; the root's 2^(e/2) <= 4",
    ),
)
