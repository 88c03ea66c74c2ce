"""Rows of sums and products. Numbers are at most 4 in magnitude unless a sample says otherwise."""

from __future__ import annotations

import torch

from sectorch.errors import ArgumentError, FixedPointRangeError, NonFiniteError, ShapeError, UnsupportedOpError

from .base import call, number, op, refused, whole
from .smooth import E_X, RECIP

T = torch.Tensor
X = number(2, 3)
SMALL = number(2, 3, low=-2, high=2)
SHARED = number(2, 3, low=0.5, high=4)
DIVISOR = SHARED.public
BASE = number(2, 3, low=0.5, high=2)
RDIV = (getattr(T, "__rdiv__", None), T.__rtruediv__)
DIV = (
    torch.div,
    torch.divide,
    torch.true_divide,
    T.div,
    T.divide,
    T.true_divide,
    T.__truediv__,
    T.div_,
    T.divide_,
    T.true_divide_,
    T.__itruediv__,
)
POW = (torch.pow, T.pow, T.__pow__, torch.float_power, T.float_power)
MISMATCH = refused(ShapeError, "roadcast", X, number(2, 4))
TOO_LARGE = refused(FixedPointRangeError, r"reaches magnitude 8.38861e\+06", X, torch.full((3,), 2.0**23))
NOT_A_NUMBER = refused(NonFiniteError, "1 NaN and 0 infinite", X, torch.tensor([1.0, float("nan"), 2.0]))
INFINITE = refused(NonFiniteError, "0 NaN and 1 infinite", X, float("inf"))

ROWS = (
    op(
        "add",
        call(X, X),
        call(X, 0.3),
        call(X, 2),
        call(whole(2, 3), 0.3),
        call(whole(2, 3), whole(2, 3)),
        call(X, X, alpha=3, keys=(torch.add, T.add, T.add_), ulps=2),
        call(X, X, keys=(torch.add, T.add, T.add_)),
        call(X, X, alpha=-0.3, keys=(torch.add, T.add, T.add_), ulps=3),
        ulps=1,
        why="1/2 per summand; alpha a: 1/2 + |a|/2 (+ 4/2 where a itself is encoded)",
        pairs="ss sp s. ps .s",
        operands=2,
        errors=(MISMATCH, NOT_A_NUMBER),
    ),
    op(
        "sub",
        call(X, X),
        call(X, 0.3),
        call(whole(2, 3), 0.3),
        call(X, X, keys=(torch.sub, torch.subtract, T.sub, T.sub_)),
        call(X, X, alpha=2, keys=(torch.sub, torch.subtract, T.sub, T.sub_), ulps=1.5),
        ulps=1,
        why="1/2 per summand; alpha 2: 1/2 + 2/2",
        pairs="ss sp s. ps .s",
        operands=2,
        errors=(MISMATCH, NOT_A_NUMBER),
    ),
    op(
        "rsub",
        call(X, X),
        call(X, 0.3),
        call(X, X, alpha=2, keys=(torch.rsub,), ulps=1.5),
        ulps=1,
        why="as sub",
        pairs="ss sp s. ps .s",
        operands=2,
        errors=(MISMATCH,),
    ),
    op("neg", call(X), call(whole(3)), ulps=0.5, why="encoding", operands=1),
    op("positive", call(X), call(whole(3)), ulps=0.5, why="encoding", operands=1),
    op(
        "mul",
        call(X, X),
        call(X, 0.3),
        call(X, -0.25),
        call(X, 3),
        call(X, 0),
        call(whole(2, 3), 0.3),
        call(whole(2, 3), whole(2, 3)),
        call(X, whole(2, 3).public),
        call(X, whole(2, 3)),
        ulps=4,
        why="|x| / 2 + |y| / 2 = 4 / 2 + 4 / 2",
        pairs="ss sp s. ps .s",
        operands=2,
        errors=(MISMATCH, TOO_LARGE, NOT_A_NUMBER, INFINITE),
    ),
    op(
        "div",
        call(X, 3.0, keys=DIV),
        call(X, 7, keys=DIV),
        call(X, -4, keys=DIV),
        call(whole(2, 3), 4, keys=DIV),
        call(whole(2, 3), 3, keys=DIV),
        call(X, whole(2, 3, low=1).public, keys=DIV),
        call(X, DIVISOR, keys=DIV),
        call(X, DIVISOR.private, keys=DIV),
        call(X, SHARED, keys=DIV),
        call(X.public, SHARED, keys=DIV),
        call(SHARED, X, keys=RDIV),
        call(SHARED, 3.0, keys=RDIV),
        call(SHARED, -2, keys=RDIV),
        call(SHARED, X.public, keys=RDIV),
        ulps=4 * (RECIP + 1) + 1,
        why="1 / d at most 2: |x| (a shared reciprocal, truncated) + 2 / 2; a public one errs by 1/2",
        pairs="ss sp s.",
        errors=(
            refused(ArgumentError, "division by zero", X, 0),
            refused(ShapeError, "roadcast", X, number(2, 4).public),
            refused(NonFiniteError, "infinite", X, torch.tensor([1.0, 0.0, 2.0])),
        ),
    ),
    op("square", call(X), call(whole(3)), ulps=4, why="2 |x| / 2", operands=1),
    op(
        "pow",
        *(call(SMALL, exponent, keys=POW) for exponent in (0, 1, 2, 3, 4, 5, 2.0)),
        call(whole(3), 3, keys=POW),
        *(call(SHARED, exponent, keys=POW, ulps=12.5) for exponent in (-1, 0.5, -0.5)),
        call(SHARED, -2, keys=POW, ulps=30.5),
        call(BASE, 0.7, keys=POW, ulps=1.4 + 1.7 * (E_X + 4.2)),
        call(BASE, -1.3, keys=POW, ulps=1.4 + 2.5 * (E_X + 8)),
        call(BASE, SMALL, keys=POW, ulps=1.4 + 4 * (E_X + 10)),
        call(BASE, SMALL.public, keys=POW, ulps=1.4 + 4 * (E_X + 10)),
        call(2.0, SMALL, keys=(torch.pow, torch.float_power), ulps=1.4 + 4 * (E_X + 2.5)),
        call(SMALL, 2.0, keys=(T.__rpow__,), ulps=1.4 + 4 * (E_X + 2.5)),
        call(SMALL, 3, keys=(T.__rpow__,), ulps=1.4 + 9 * (E_X + 2.5)),
        *(call(whole(6, low=-2, high=9), base, keys=(T.__rpow__,)) for base in (2, 3, 1, -3)),
        *(call(whole(6, low=0, high=9), base, keys=(T.__rpow__,)) for base in (0, -1)),
        ulps=58,
        why="|x| <= 2; x^2 errs by 2, truncated 3; x^4 by 2 4 3 = 24, truncated 25; x^5 by 2 25 + 16 / 2; "
        "x^y = exp(y log x): y (log truncated) + |log| / 2, then exp; reciprocal and roots as in smooth.py",
        errors=(refused(UnsupportedOpError, "positive number", -2.0, X, key=torch.pow),),
    ),
    op(
        "bitwise_left_shift",
        call(whole(4), 2),
        call(whole(4), whole(4, low=0, high=9).public),
        ulps=0,
        why="whole numbers",
        errors=(refused(UnsupportedOpError, "secret number of places", whole(4), whole(4)),),
    ),
    op("bitwise_right_shift", call(whole(9, low=-40, high=40), 2), call(whole(4), 0), ulps=0, why="whole numbers"),
    op(
        "addcmul",
        call(X, X, X),
        call(X, X, X, value=0.3),
        call(X, X, X, value=2),
        call(X, X, X.private),
        call(X, X.public, X),
        call(X.public, X, X),
        ulps=10,
        why="1/2 + |v| (4 + 1 truncation) + 16 / 2 for an encoded v = 0.3; 1/2 + 2 4 for v = 2",
        errors=(refused(ShapeError, "roadcast", X, number(2, 4), X),),
    ),
    op(
        "lerp",
        call(X, X, 0.3),
        call(X, X, number(2, 3, low=0, high=1)),
        call(X, X.public, 0.5),
        call(X.public, X, number(2, 3, low=0, high=1).private),
        ulps=5.5,
        why="1/2 + |end - start| / 2 + |w| 1 = 1/2 + 8 / 2 + 1",
        errors=(refused(ShapeError, "roadcast", X, number(2, 4), 0.5),),
    ),
)
