"""Rows of statistics of several variables, of derivatives, and of functions that are quotients of waves."""

from __future__ import annotations

import torch

from sectorch.errors import ShapeError, UnsupportedOpError

from .base import call, number, op, refused, whole
from .normalization import STANDARD

T = torch.Tensor
X = number(3, 4, low=-2, high=2)
LINE = number(6, low=-2, high=2)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.25])

ROWS = (
    op(
        "cov",
        call(X),
        call(LINE),
        call(X, correction=0, aweights=WEIGHTS),
        call(X, fweights=torch.tensor([1, 2, 1, 3])),
        ulps=90,
        why="d = x - mean errs by 3 and is at most 4: 4 products of 2 4 3 over 3, and 1/3 encoded: 64 / 2",
        errors=(
            refused(UnsupportedOpError, "too few", number(1)),
            refused(UnsupportedOpError, "secret weights", X, aweights=number(4, low=1, high=2)),
            refused(ShapeError, "two or fewer dimensions", number(2, 2, 2)),
        ),
    ),
    op(
        "corrcoef",
        call(number(3, 6)),
        call(LINE),
        ulps=2 * 2.24 * (STANDARD + 1) + 24,
        why="as cosine_similarity, of entries whose mean is off by 3, over a norm of 1/2 or more",
    ),
    op(
        "gradient",
        call(LINE),
        call(X, spacing=0.3),
        call(X, spacing=[2.0, 0.5], edge_order=2),
        call(X, dim=1, spacing=[torch.tensor([0.0, 1.0, 1.5, 3.0])]),
        ulps=20,
        why="at most three entries of 1/2 over 0.3, and factors rounded to 2^-20 of entries up to 2",
        errors=(
            refused(UnsupportedOpError, "whole numbers", whole(4)),
            refused(UnsupportedOpError, "secret places", LINE, spacing=[number(6)]),
        ),
    ),
    op(
        "tan",
        call(number(3, 4, low=-1.2, high=1.2)),
        ulps=90,
        whole=False,
        why="sine and cosine err by 5: (5 + 5 2.6) / 0.36, and a quotient of 2.6",
    ),
    op("sinc", call(X), call(number(8, low=-0.3, high=0.3)), call(number(8, low=-90, high=90)), ulps=14, why="1e-5"),
)
