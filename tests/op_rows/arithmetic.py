"""Rows of sums and products. Numbers are at most 4 in magnitude unless a sample says otherwise."""

from __future__ import annotations

import torch

from sectorch.errors import ArgumentError, FixedPointRangeError, NonFiniteError, ShapeError, UnsupportedOpError

from .base import call, number, op, refused, whole

T = torch.Tensor
X = number(2, 3)
SMALL = number(2, 3, low=-2, high=2)
DIVISOR = number(2, 3, low=0.5, high=4).public
MISMATCH = refused(ShapeError, "roadcast", X, number(2, 4))
TOO_LARGE = refused(FixedPointRangeError, r"reaches magnitude 8.38861e\+06", X, torch.full((3,), 2.0**23))
NOT_A_NUMBER = refused(NonFiniteError, "1 NaN and 0 infinite", X, torch.tensor([1.0, float("nan"), 2.0]))
INFINITE = refused(NonFiniteError, "0 NaN and 1 infinite", X, float("inf"))

ROWS = (
    op("add", call(X, X), call(X, 0.3), call(X, 2), call(whole(2, 3), 0.3), call(whole(2, 3), whole(2, 3)),
       call(X, X, alpha=3, keys=(torch.add, T.add, T.add_), ulps=2),
       call(X, X, keys=(torch.add, T.add, T.add_)),
       call(X, X, alpha=-0.3, keys=(torch.add, T.add, T.add_), ulps=3),
       ulps=1, why="1/2 per summand; alpha a: 1/2 + |a|/2 (+ 4/2 where a itself is encoded)",
       pairs="ss sp s. ps .s", operands=2, errors=(MISMATCH, TOO_LARGE, NOT_A_NUMBER, INFINITE)),
    op("sub", call(X, X), call(X, 0.3), call(whole(2, 3), 0.3),
       call(X, X, keys=(torch.sub, torch.subtract, T.sub, T.sub_)),
       call(X, X, alpha=2, keys=(torch.sub, torch.subtract, T.sub, T.sub_), ulps=1.5),
       ulps=1, why="1/2 per summand; alpha 2: 1/2 + 2/2",
       pairs="ss sp s. ps .s", operands=2, errors=(MISMATCH, TOO_LARGE, NOT_A_NUMBER)),
    op("rsub", call(X, X), call(X, 0.3), call(X, X, alpha=2, keys=(torch.rsub,), ulps=1.5),
       ulps=1, why="as sub", pairs="ss sp s. ps .s", operands=2, errors=(MISMATCH,)),
    op("neg", call(X), call(whole(3)), ulps=0.5, why="encoding", operands=1),
    op("positive", call(X), call(whole(3)), ulps=0.5, why="encoding", operands=1),
    op("mul", call(X, X), call(X, 0.3), call(X, -0.25), call(X, 3), call(X, 0), call(whole(2, 3), 0.3),
       call(whole(2, 3), whole(2, 3)), call(X, whole(2, 3).public), call(X, whole(2, 3)),
       ulps=4, why="|x| / 2 + |y| / 2 = 4 / 2 + 4 / 2",
       pairs="ss sp s. ps .s", operands=2, errors=(MISMATCH, TOO_LARGE, NOT_A_NUMBER, INFINITE)),
    op("div", call(X, DIVISOR), call(X, DIVISOR.private), call(X, 3.0), call(X, 7), call(X, -4), call(whole(2, 3), 4),
       call(whole(2, 3), 3), call(X, whole(2, 3, low=1).public),
       ulps=3.5, why="1 / d at most 2, encoded: |x| / 2 + 2 / 2; a private 1 / d is float32: |x| 2 2^-24 more",
       pairs="sp s.", errors=(
           refused(ArgumentError, "division by zero", X, 0),
           refused(UnsupportedOpError, "rounds", X, 2.0, rounding_mode="floor"),
           refused(ShapeError, "roadcast", X, number(2, 4).public),
           refused(NonFiniteError, "infinite", X, torch.tensor([1.0, 0.0, 2.0])))),
    op("square", call(X), call(whole(3)), ulps=4, why="2 |x| / 2", operands=1),
    op("pow", call(SMALL, 0), call(SMALL, 1), call(SMALL, 2), call(SMALL, 3), call(SMALL, 4), call(SMALL, 5),
       call(SMALL, 2.0), call(whole(3), 3),
       ulps=58, why="|x| <= 2; x^2 errs by 2, truncated 3; x^4 by 2 4 3 = 24, truncated 25; x^5 by 2 25 + 16 / 2",
       errors=(refused(UnsupportedOpError, "whole number", X, 0.5),
               refused(UnsupportedOpError, "negative power", X, -1, key=torch.pow),
               refused(UnsupportedOpError, "whole number", X, number(2, 3)))),
    op("addcmul", call(X, X, X), call(X, X, X, value=0.3), call(X, X, X, value=2), call(X, X, X.private),
       call(X, X.public, X), call(X.public, X, X),
       ulps=10, why="1/2 + |v| (4 + 1 truncation) + 16 / 2 for an encoded v = 0.3; 1/2 + 2 4 for v = 2",
       errors=(refused(ShapeError, "roadcast", X, number(2, 4), X),)),
    op("lerp", call(X, X, 0.3), call(X, X, number(2, 3, low=0, high=1)), call(X, X.public, 0.5),
       call(X.public, X, number(2, 3, low=0, high=1).private),
       ulps=5.5, why="1/2 + |end - start| / 2 + |w| 1 = 1/2 + 8 / 2 + 1",
       errors=(refused(ShapeError, "roadcast", X, number(2, 4), 0.5),)),
)  # fmt: skip
