"""Rows of rounding, of what stands at a place of an order, and of counts of what is so."""

from __future__ import annotations

import torch

from sectorch.errors import ArgumentError, DimensionError, ShapeError, UnsupportedOpError

from .base import OpRow, Sample, call, distinct, flags, index, mask, number, op, refused, whole

T = torch.Tensor
X = number(2, 3)
D = distinct(3, 5)
WHOLE = whole(3, 4)
COUNT = whole(3, 4, low=1, high=4)
EXACT = "exact on encoded values; the entries are multiples of 1/8 or no such"
NO_DIM = refused(DimensionError, "Dimension out of range", D, 4)
SORTED = torch.tensor([-3.0, -1.0, 0.25, 0.25, 2.0])


def exact(name: str, *samples: Sample, errors: tuple = (), ulps: float = 0.5, **more) -> OpRow:
    return op(name, *samples, ulps=ulps, why=EXACT, errors=errors, **more)


def rounded(name: str) -> OpRow:
    return exact(name, call(X), call(number(9, low=-40, high=40)), call(WHOLE), operands=1)


def quotient(name: str, *reflected) -> OpRow:
    turned = (call(COUNT, 7, keys=reflected), call(number(9, low=1, high=3), -7.5, keys=reflected)) if reflected else ()
    return op(
        name,
        call(number(9, low=-40, high=40), 3),
        call(number(9, low=-40, high=40), -2.5),
        call(WHOLE, 3),
        call(WHOLE, -2),
        call(whole(9, low=-1000, high=1000), torch.tensor([3, -3, 7, 2, -1, 10, 5, -8, 1])),
        call(WHOLE, COUNT),
        *turned,
        ulps=1,
        why="whole quotients of whole numbers and multiples of 1/8 are exact, and what they leave",
        errors=(refused(ArgumentError, "division by zero", X, 0),),
    )


ROWS = (
    *(rounded(name) for name in ("floor", "ceil", "trunc")),
    exact("round", call(X), call(number(9, low=-40, high=40)), call(X, decimals=1), operands=1, ulps=2),
    exact("frac", call(X), call(number(9, low=-40, high=40)), operands=1),
    quotient("floor_divide", T.__rfloordiv__),
    quotient("remainder", T.__rmod__),
    quotient("fmod"),
    exact("median", call(D), call(D, 1), call(D, 0, True), call(distinct(4)), call(number()), errors=(NO_DIM,)),
    exact(
        "kthvalue",
        call(D, 2),
        call(D, 1, 0, True),
        call(distinct(7), k=7),
        errors=(refused(ShapeError, "out of range", D, 9),),
    ),
    exact(
        "quantile",
        call(D, 0.3),
        call(D, torch.tensor([0.0, 0.25, 1.0]), 1, True),
        call(D, 0.7, 0, interpolation="lower"),
        call(D, 0.7, 0, interpolation="higher"),
        call(D, 0.7, 0, interpolation="nearest"),
        call(D, 0.7, dim=1, interpolation="midpoint"),
        ulps=4,
        errors=(refused(ShapeError, "range", D, 1.5), refused(UnsupportedOpError, "secret q", D, number())),
    ),
    exact("cummax", call(D, 1), call(whole(9), 0), errors=(NO_DIM,)),
    exact("cummin", call(D, 0), call(whole(9), dim=0), errors=(NO_DIM,)),
    exact("bucketize", call(X, SORTED), call(X, SORTED, right=True), call(X.public, distinct(1))),
    exact(
        "searchsorted",
        call(SORTED, X),
        call(SORTED, X, right=True),
        call(SORTED, X, side="right", out_int32=True),
        errors=(refused(UnsupportedOpError, "sorter", SORTED, X, sorter=torch.arange(5)),),
    ),
    *(
        exact(name, call(flags(3, 4)), call(WHOLE, 1), call(X, 0, True), call(flags(0, 2), 0), errors=(NO_DIM,))
        for name in ("any", "all")
    ),
    exact("count_nonzero", call(WHOLE), call(X, 1), call(flags(3, 4), (0, 1))),
    exact(
        "isin",
        call(WHOLE, torch.tensor([1, 3])),
        call(WHOLE, COUNT, invert=True),
        call(index(5, below=4), COUNT),
    ),
    exact(
        "logical_xor",
        call(flags(2, 3), flags(2, 3)),
        call(flags(2, 3), mask(2, 3)),
        call(WHOLE, WHOLE, keys=(torch.logical_xor, T.logical_xor)),
        errors=(refused(UnsupportedOpError, "compare them first", X, X, key=torch.bitwise_xor),),
    ),
    exact("signbit", call(X), call(WHOLE), whole=False),
    exact("heaviside", call(X, X), call(WHOLE, WHOLE), call(X, X.public)),
    exact("isclose", call(X, X), call(WHOLE, WHOLE), call(X, X.public)),
    exact("copysign", call(X, X.public), call(X, -1.0), call(X, number(2, 3, low=0.5)), ulps=1),
    exact("aminmax", call(X), call(X, dim=1), call(X, dim=0, keepdim=True)),
)
