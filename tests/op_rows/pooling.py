"""Rows of pooling."""

from __future__ import annotations

import torch.nn.functional as F

from sectorch.errors import ShapeError, UnsupportedOpError

from .base import call, number, op, refused, whole

X = number(1, 2, 5, 6)
LINE = number(2, 3, 7)
MAX = "a maximum keeps an entry: encoding"
MEAN = "1/2, a truncation, and |mean| = 4 for 1/k to 20 significant bits; where counts differ, |sum| / 2 = 2 k"

ROWS = (
    op(
        "max_pool2d",
        call(X, 2),
        call(X, (3, 2)),
        call(X, 3, 1),
        call(X, 3, 2, 1),
        call(X, 2, 2, 0, 2),
        call(X, 3, 2, 1, 1, True),
        call(X, 2, stride=(1, 2), padding=(1, 0)),
        call(number(2, 4, 4), 2),
        call(X, 2, ceil_mode=True),
        call(X, 1),
        ulps=0.5,
        why=MAX,
        errors=(
            refused(ShapeError, "pad", X, 2, 1, 2),
            refused(ShapeError, "Output size is too small", X, 9),
        ),
    ),
    op(
        "max_pool1d",
        call(LINE, 2),
        call(LINE, 3, 2, 1),
        call(LINE, 2, 1, 0, 2),
        call(LINE, 3, 2, 0, 1, True),
        call(LINE, (2,)),
        call(number(3, 6), 2),
        ulps=0.5,
        why=MAX,
        errors=(refused(ShapeError, "pad", LINE, 2, 1, 2),),
    ),
    op(
        "avg_pool2d",
        call(X, 2),
        call(X, 3),
        call(X, (2, 3), 1),
        call(X, 3, 2, 1),
        call(X, 3, 2, 1, False, False),
        call(X, 3, 2, 1, True),
        call(X, 3, 2, 1, True, False),
        call(X, 2, divisor_override=3),
        call(number(2, 4, 4), 2),
        call(X, 2, ceil_mode=True),
        ulps=19.5,
        why=MEAN + "; k at most 9",
        errors=(refused(ShapeError, "pad", X, 2, 1, 2),),
    ),
    op(
        "avg_pool1d",
        call(LINE, 2),
        call(LINE, 3),
        call(LINE, 3, 2, 1),
        call(LINE, 3, 2, 1, True, False),
        call(LINE, (2,), (1,)),
        call(number(3, 6), 2),
        ulps=7.5,
        why=MEAN + "; k at most 3",
        errors=(refused(ShapeError, "pad", LINE, 2, 1, 2),),
    ),
    op(
        "adaptive_avg_pool2d",
        call(X, 1),
        call(X, (2, 3)),
        call(X, (None, 2)),
        call(X, 4),
        call(number(2, 4, 4), 2),
        call(X, (5, 6)),
        ulps=5.5,
        why=MEAN,
        errors=(refused(ShapeError, "Expected 3D or 4D", number(4), 2),),
    ),
    op(
        "adaptive_avg_pool1d",
        call(LINE, 1),
        call(LINE, 3),
        call(number(3, 6), 2),
        call(LINE, (2,)),
        ulps=5.5,
        why=MEAN,
        errors=(refused(ShapeError, "Expected 2 to 3 dim", number(4), 2),),
    ),
    op(
        "adaptive_max_pool2d",
        call(X, 1),
        call(X, (2, 3)),
        call(X, (None, 2)),
        call(X, 4),
        call(number(2, 4, 4), 2),
        ulps=0.5,
        why=MAX,
    ),
    op(
        "max_pool2d_with_indices",
        call(X, 2),
        call(X, 3, 1),
        call(X, (3, 2), 2, 1),
        call(X, 2, 2, 0, 2),
        call(X, 3, 2, 1, 1, ceil_mode=True),
        call(number(2, 4, 4), 2, return_indices=True),
        ulps=0.5,
        why=MAX,
        errors=(refused(ShapeError, "pad", X, 2, 1, 2),),
    ),
    op("max_pool1d_with_indices", call(LINE, 2), call(LINE, 3, 2, 1), call(number(3, 6), (2,)), ulps=0.5, why=MAX),
    op(
        "adaptive_max_pool2d_with_indices",
        call(X, 1),
        call(X, (2, 3)),
        call(X, (None, 2)),
        call(number(2, 4, 4), 2),
        ulps=0.5,
        why=MAX,
    ),
    op("adaptive_max_pool1d_with_indices", call(LINE, 3), call(number(3, 6), 2), ulps=0.5, why=MAX),
    op(
        "max_unpool2d",
        call(number(2, 3, 1, 1), whole(2, 3, 1, 1, low=0, high=4), 2),
        call(number(2, 1, 1), whole(2, 1, 1, low=0, high=9).public, 3),
        ulps=0.5,
        why=MAX,
        errors=(refused(UnsupportedOpError, "overlap", X, whole(1, 2, 5, 6, low=0, high=1), 2, 1),),
    ),
)
