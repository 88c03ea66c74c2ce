"""Rows of operations that are made of others: products, distances, functions, volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.errors import DimensionError, ShapeError, UnsupportedOpError

from .base import call, definite, flags, index, number, op, refused, whole
from .smooth import ERF, LOG, SOFTPLUS

T = torch.Tensor
X = number(3, 4, low=-2, high=2)
Y = number(3, 4, low=-2, high=2)
SQUARE = number(3, 3, low=-2, high=2)
THREE = number(2, 3)
LINE = number(5, low=-2, high=2)
APART = number(3, 4, low=3, high=4)
POSITIVE = number(3, 4, low=0.5, high=4)
VOLUME = number(1, 2, 3, 4, 5)
KERNEL = number(3, 2, 2, 3, 2, low=-1, high=1)
NORM = "sums of squares and a root within 2 of the sides' errors, of at most 4 sides"
SECRETS = "products of numbers up to 4 with errors of 1/2, a sum of some"

ROWS = (
    op("kron", call(X, SQUARE), call(LINE, X), call(X, SQUARE.public), ulps=3, why=SECRETS),
    op("inner", call(X, Y), call(LINE, LINE.public), call(number(), X), ulps=12, why=SECRETS),
    op(
        "tensordot",
        call(X, number(4, 2), 1),
        call(X, Y, ([0, 1], [0, 1])),
        call(X, Y.public, 2),
        ulps=28,
        why=SECRETS,
    ),
    op(
        "cross",
        call(THREE, THREE),
        call(THREE, number(1, 3).public),
        call(THREE, THREE, 1, keys=(torch.cross, T.cross)),
        call(SQUARE, SQUARE, dim=0),
        ulps=10,
        why=SECRETS,
        errors=(refused(DimensionError, "out of range", THREE, THREE, dim=5),),
    ),
    op("vecdot", call(X, Y), call(X, Y.public), call(X, Y, dim=0), ulps=10, why=SECRETS),
    op(
        "multi_dot",
        call([X, number(4, 2), number(2, 3)]),
        call([X, number(4, 2).public]),
        ulps=160,
        why="2 products of 4 and 2 terms, errors times 4 4",
    ),
    op(
        "matrix_power",
        call(SQUARE, 2),
        call(SQUARE, 3),
        call(SQUARE, 0),
        call(SQUARE, 1),
        call(definite(3, 3), -1, ulps=200),
        call(definite(3, 3), -2, ulps=500),
        ulps=120,
        why="2 products of 3 terms: errors times 3 2, and once more; inverses as inv",
    ),
    op("trace", call(X), call(whole(3, 3)), ulps=2, why="3 entries of 1/2"),
    op(
        "addr",
        call(X, number(3), number(4)),
        call(number(4), number(3), number(4), beta=2, alpha=0.5),
        ulps=8,
        why=SECRETS,
    ),
    op("addcdiv", call(X, Y, POSITIVE), call(X, Y, POSITIVE.public, value=0.5), ulps=48, why="div, by 1/2 or more"),
    op("diff", call(X), call(X, 2, 0), call(X, prepend=number(3, 1)), call(flags(6)), ulps=2, why="4 entries of 1/2"),
    op(
        "trapezoid",
        call(X),
        call(X, dx=0.3),
        call(X, torch.arange(4.0)),
        call(X, dim=0),
        ulps=12,
        why="3 halves of sums",
    ),
    op(
        "cumulative_trapezoid", call(X), call(X, torch.arange(4.0)), call(X, dx=0.5, dim=0), ulps=12, why="as trapezoid"
    ),
    op("var_mean", call(X), call(X, 1), call(X, dim=0, keepdim=True, correction=0), ulps=24, relative=2, why="var"),
    op("std_mean", call(X), call(X, 1), call(X, dim=0, keepdim=True, correction=0), ulps=24, relative=4, why="std"),
    op("dist", call(X, Y), call(X, Y.public, 1), call(X, Y, float("inf")), ulps=16, relative=4, why=NORM),
    op(
        "pairwise_distance",
        call(X, APART),
        call(X, Y, 1.0),
        call(X, APART, keepdim=True),
        ulps=12,
        relative=4,
        why=NORM,
    ),
    op("cdist", call(X, APART), call(X, APART.public, 1.0), ulps=12, relative=4, why=NORM),
    op("pdist", call(number(3, 4)), call(number(3, 4), 1.0), ulps=12, relative=4, why=NORM),
    op(
        "bilinear",
        call(X, number(3, 5), number(2, 4, 5), number(2)),
        call(X, number(3, 5), number(2, 4, 5).public, None),
        ulps=400,
        why="20 products of three numbers up to 4: errors times 16",
    ),
    op("deg2rad", call(X), ulps=2, why="a public factor"),
    op("rad2deg", call(X), ulps=32, relative=2, why="1/2 times 57, and a factor of 20 significant bits"),
    op("sum_to_size", call(X, 1, 4), call(X, (4,)), call(X, 3, 4), ulps=2, why="3 entries of 1/2"),
    op(
        "prod",
        call(POSITIVE, 0),
        call(X, 1, True),
        call(whole(6)),
        call(number()),
        call(number(0, 3)),
        call(number(0, 3), 0),
        call(whole(6), dtype=torch.float32),
        ulps=200,
        why="4 factors up to 4",
    ),
    op(
        "cumprod",
        call(X, 0),
        call(X, dim=1),
        call(whole(5), 0),
        call(whole(5), 0, dtype=torch.float32),
        ulps=40,
        why="4 factors up to 2: 2^3 times 4 errors",
    ),
    *(
        op(
            f"chebyshev_polynomial_{kind}",
            call(number(3, 4, low=-1, high=1), 5),
            call(X, 3),
            call(X, 2),
            call(X, 1),
            call(X, 0),
            call(X, -1),
            call(X, torch.tensor(3)),
            ulps=ulps,
            why="e_(k+1) = 2 |x| e_k + |P_k| + e_(k-1) + 1/2 from e_1 = 1/2, 1; the largest at n = 5 and |x| = 1",
            errors=(
                refused(UnsupportedOpError, "degree 2.5 .* a whole number up to 64", X, 2.5),
                refused(UnsupportedOpError, "degree nan .* a whole number", X, float("nan")),
                refused(UnsupportedOpError, "degree 65 .* a whole number", X, 65),
                refused(UnsupportedOpError, "call it for each public degree", X, torch.tensor([1, 2, 3, 4])),
                refused(UnsupportedOpError, "call it for each public degree", X, whole(3, 4)),
            ),
        )
        for kind, ulps in (("t", 45), ("u", 91))
    ),
    op(
        "logit",
        call(number(3, 4, low=0.1, high=0.9)),
        call(X, 0.25),
        ulps=2 * LOG + 14,
        whole=False,
        why="two logs of 0.1 or more",
    ),
    op("logaddexp", call(X, Y), call(X, Y.public), ulps=SOFTPLUS + 4, why="a maximum and softplus"),
    op(
        "logaddexp2",
        call(X, Y),
        call(X, Y.public),
        ulps=1.5 * SOFTPLUS + 10,
        why="as logaddexp, of factors",
    ),
    op("logcumsumexp", call(X, 0), call(X, dim=1), ulps=2 * SOFTPLUS + 8, why="two steps of logaddexp"),
    op("hypot", call(X, APART), call(X, APART.public), ulps=12, relative=4, why=NORM),
    op("xlog1py", call(X, POSITIVE), call(X, 2.0), ulps=4 * (LOG + 4), why="|x| log, truncated"),
    op(
        "xlogy",
        call(X, POSITIVE),
        call(X, 2.0),
        call(X, POSITIVE.public),
        ulps=4 * (LOG + 4),
        why="|x| log, truncated",
    ),
    op("ndtr", call(X), ulps=ERF + 3, why="half of erf"),
    op("ldexp", call(X, torch.tensor([0, 1, -1, 3])), ulps=6, why="the input's 1/2 times 8, and a rounding"),
    op(
        "conv3d",
        call(VOLUME, KERNEL),
        call(VOLUME, KERNEL, number(3), padding=1, stride=(1, 2, 2)),
        call(VOLUME, KERNEL.private, number(3).private, padding="same"),
        call(number(2, 3, 4, 5, low=-2, high=2), KERNEL),
        ulps=70,
        why="24 products of 4 and 1 with errors of 1/2",
    ),
    op(
        "conv_transpose3d",
        call(number(1, 2, 3, 4, 5, low=-3, high=3), number(2, 3, 2, 3, 2, low=-1, high=1)),
        call(VOLUME, number(2, 3, 2, 1, 2, low=-1, high=1), number(3), (2, 1, 3), 1, (1, 0, 2)),
        call(VOLUME, number(2, 2, 2, 3, 2, low=-1, high=1).private, number(4).private, groups=2, dilation=2),
        call(number(2, 3, 4, 5, low=-2, high=2), number(2, 3, 2, 3, 2, low=-1, high=1)),
        ulps=70,
        why="24 products of 4 and 1 with errors of 1/2",
        errors=(refused(ShapeError, "channels", VOLUME, number(3, 2, 1, 1, 1)),),
    ),
    op(
        "max_pool3d",
        call(VOLUME, 2),
        call(VOLUME, (2, 3, 2), stride=1, padding=1),
        ulps=0.5,
        why="an entry",
        errors=(refused(UnsupportedOpError, "indices", VOLUME, 2, return_indices=True),),
    ),
    op(
        "avg_pool3d",
        call(VOLUME, 2),
        call(VOLUME, (2, 3, 2), 1, 1),
        call(VOLUME, 2, divisor_override=3),
        ulps=16,
        why="means",
    ),
    op("adaptive_avg_pool3d", call(VOLUME, 2), call(VOLUME, (None, 3, 2)), ulps=8, why="means"),
    op("adaptive_max_pool3d", call(VOLUME, 2), call(VOLUME, (1, 3, 2)), ulps=0.5, why="an entry"),
    op("adaptive_max_pool1d", call(number(1, 2, 7), 3), ulps=0.5, why="an entry"),
    op(
        "embedding_bag",
        call(index(2, 3, below=5), number(5, 4)),
        call(whole(2, 3, low=0, high=5), number(5, 4), mode="sum"),
        call(index(6, below=5), number(5, 4), torch.tensor([0, 2]), mode="max"),
        ulps=8,
        why="means of at most 4 entries",
        errors=(refused(UnsupportedOpError, "padding_idx", index(2, 3, below=5), number(5, 4), padding_idx=0),),
    ),
    op(
        "grid_sample",
        call(number(1, 2, 3, 4), number(1, 2, 3, 2, low=-1, high=1).public, align_corners=True, keys=(F.grid_sample,)),
        call(
            number(1, 2, 3, 4),
            number(1, 2, 3, 2, low=-1, high=1).public,
            0,
            0,
            True,
            keys=(torch.grid_sampler, torch.grid_sampler_2d),
        ),
        ulps=24,
        why="8 entries up to 4 times weights rounded to 2^-20, and their own 1/2",
    ),
)
