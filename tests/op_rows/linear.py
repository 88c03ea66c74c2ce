"""Rows of matrix products and linear layers. Entries are at most 2, so that each product errs by 2/2 + 2/2 = 2 ulps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sectorch.errors import DtypeError, ShapeError, UnsupportedOpError

from .base import Data, call, number, op, refused, whole

T = torch.Tensor


def n(*shape: int) -> Data:
    return number(*shape, low=-2, high=2)


VARIANCE = number(3, low=0.5, high=2).public
MM, BMM, MV = (torch.mm, T.mm), (torch.bmm, T.bmm), (torch.mv, T.mv)
DOT = (torch.dot, T.dot, torch.vdot, T.vdot)
RIGHT = (T.__rmatmul__,)
ADDMM, BADDBMM = (torch.addmm, T.addmm), (torch.baddbmm, T.baddbmm)
ADDBMM, ADDMV = (torch.addbmm, getattr(T, "addbmm", None)), (torch.addmv, T.addmv)


def added(keys: tuple, bias: Data, x: Data, y: Data) -> tuple[Any, ...]:
    """The forms of bias * beta + x @ y * alpha."""
    return (
        call(bias, x, y, keys=keys),
        call(bias.private, x, y.private, keys=keys),
        call(bias, x, y, beta=0.5, alpha=2, keys=keys),
        call(bias, x, y, beta=1.5, alpha=0.7, keys=keys),
    )


ROWS = (
    op(
        "matmul",
        call(n(3, 4), n(4, 2)),
        call(n(4), n(4)),
        call(n(3, 4), n(4)),
        call(n(4), n(4, 2)),
        call(n(2, 3, 4), n(4, 2)),
        call(n(2, 1, 3, 4), n(5, 4, 2)),
        call(n(3, 4), n(2, 4, 3)),
        call(whole(3, 4), whole(4, 2)),
        call(n(3, 4).public, n(4, 2)),
        call(n(3, 0), n(0, 2)),
        call(n(3, 4), n(4, 2), keys=MM),
        call(n(3, 4), n(4, 2).private, keys=MM),
        call(n(2, 3, 4), n(2, 4, 2), keys=BMM),
        call(n(2, 3, 4), n(2, 4, 2).private, keys=BMM),
        call(n(3, 4), n(4), keys=MV),
        call(n(4), n(4), keys=DOT),
        call(n(4, 2), n(3, 4), keys=RIGHT),
        call(n(4, 4), n(4, 4), keys=RIGHT),
        ulps=8,
        why="4 terms of 2",
        pairs="ss sp s. ps .s",
        errors=(
            refused(ShapeError, "same reduction dim", n(3, 4), n(3, 4)),
            refused(DtypeError, "dtype", n(3, 4), whole(4, 2).public),
        ),
    ),
    op(
        "outer",
        call(n(3), n(4)),
        call(n(3), n(4).private),
        call(n(3).public, n(4)),
        ulps=2,
        why="one product",
        pairs="ss sp s. ps .s",
        errors=(refused(ShapeError, "1-D argument", n(2, 3), n(4)),),
    ),
    op(
        "addmm",
        *added(ADDMM, n(2, 3), n(2, 4), n(4, 3)),
        *added(ADDMM, n(3), n(2, 4), n(4, 3)),
        *added(BADDBMM, n(2, 2, 3), n(2, 2, 4), n(2, 4, 3)),
        *added(ADDBMM, n(2, 3), n(1, 2, 4), n(1, 4, 3)),
        *added(ADDBMM, n(2, 3), n(2, 2, 2), n(2, 2, 3)),
        *added(ADDMV, n(2), n(2, 4), n(4)),
        ulps=20,
        why="product 4 2 = 8; alpha 0.7 encoded: 0.7 (8 + 1 truncation) + 16 / 2; bias 1.5 / 2 + 2 / 2",
        errors=(refused(ShapeError, "same reduction dim", n(2, 3), n(2, 4), n(2, 3)),),
    ),
    op(
        "linear",
        call(n(2, 4), n(3, 4)),
        call(n(2, 4), n(3, 4), n(3)),
        call(n(2, 4), n(3, 4).private, n(3).private),
        call(n(2, 4), n(3, 4).public, n(3).public),
        call(n(4), n(3, 4).private),
        call(n(2, 2, 4), n(3, 4).private, n(3).private),
        call(n(2, 4), n(4)),
        call(n(2, 4).public, n(3, 4).private, n(3)),
        call(n(2, 4).public, n(3, 4)),
        call(n(0, 4), n(3, 4).private),
        call(number(3, 70, low=-0.2, high=0.2), number(130, 70, low=-0.2, high=0.2).private, ulps=14),
        ulps=8.5,
        why="4 products of 2 and the bias 1/2; 70 products of 0.2",
        pairs="ss sp s.",
        errors=(
            refused(ShapeError, "same reduction dim", n(2, 4), n(3, 5)),
            refused(DtypeError, "dtype", n(2, 4), whole(3, 4).public),
        ),
    ),
    op(
        "einsum",
        call("ij,jk->ik", n(3, 4), n(4, 2)),
        call("bij,bjk->bik", n(2, 3, 4), n(2, 4, 2).private),
        call("ij,ij->", n(2, 2), n(2, 2)),
        call("i,j", n(3), n(2).public),
        call("ii->i", n(3, 3)),
        call("ij->ji", n(2, 3)),
        call("ij,jk", n(3, 4).private, n(4, 2)),
        call("...i,i->...", n(2, 3, 4), n(4)),
        call("ij->", n(2, 3)),
        call("i,i,i->", n(3), n(3), n(3), ulps=100),
        call("ij,jk,kl,l", n(2, 3), n(3, 2).private, n(2, 3).private, n(3).public, ulps=500),
        call(
            "bij,r,ir,jr,kr->bk", n(3, 2, 4), n(3).private, n(2, 3).private, n(4, 3).private, n(2, 3).private, ulps=8000
        ),
        call("...ij,jk,...k->...i", n(2, 3, 4), n(4, 2).private, n(2, 2), ulps=500),
        ulps=8,
        why="4 terms of 2; of many operands, the terms times the others' magnitudes",
        errors=(refused(ShapeError, "subscript j has size 3", "ij,jk->ik", n(3, 4), n(3, 2)),),
    ),
    op(
        "conv2d",
        call(n(1, 2, 4, 5), n(3, 2, 2, 2)),
        call(n(2, 2, 4, 5), n(3, 2, 2, 2).private, n(3).private),
        call(n(1, 2, 4, 5), n(3, 2, 2, 2).public, n(3).public, 2, 1),
        call(n(1, 2, 4, 5), n(3, 2, 2, 2), n(3)),
        call(n(2, 4, 5), n(3, 2, 2, 2).private, n(3)),
        call(n(1, 2, 6, 6), n(2, 2, 2, 2).private, None, (1, 2), (1, 0), (2, 1)),
        call(n(1, 4, 4, 4), n(6, 2, 2, 2).private, n(6).private, 1, 0, 1, 2),
        call(n(1, 3, 4, 4), n(6, 1, 2, 2), None, 1, 1, 1, 3),
        call(n(1, 2, 4, 4), n(3, 2, 3, 3).private, padding="same", ulps=36),
        call(n(1, 2, 4, 4), n(3, 2, 2, 2).private, n(3).private, padding="same"),
        call(n(1, 2, 4, 4), n(3, 2, 3, 3), padding="valid", ulps=36),
        call(n(1, 2, 4, 4).public, n(3, 2, 2, 2)),
        call(n(0, 2, 4, 4), n(3, 2, 2, 2).private),
        call(n(1, 2, 4, 4), n(3, 2, 1, 1), stride=2, dilation=1, groups=1),
        ulps=16.5,
        why="2 2 2 products of 2 and the bias 1/2; 2 3 3 products of 2",
        errors=(
            refused(ShapeError, "Invalid channel dimensions", n(1, 3, 4, 4), n(3, 2, 2, 2)),
            refused(ShapeError, "greater than actual input size", n(1, 2, 4, 4), n(3, 2, 5, 5)),
            refused(DtypeError, "dtype", n(1, 2, 4, 4), whole(3, 2, 2, 2).public),
        ),
    ),
    op(
        "conv1d",
        call(n(2, 2, 6), n(3, 2, 2)),
        call(n(2, 2, 6), n(3, 2, 2).private, n(3).private),
        call(n(1, 2, 7), n(3, 2, 2).public, n(3).public, 2, 1),
        call(n(2, 6), n(3, 2, 2).private, n(3)),
        call(n(1, 2, 7), n(2, 2, 2), None, (2,), (1,), (2,)),
        call(n(1, 4, 6), n(4, 2, 2), None, 1, 0, 1, 2),
        call(n(1, 2, 6), n(3, 2, 3).private, padding="same", ulps=12),
        call(n(1, 2, 6), n(3, 2, 2), padding="same"),
        call(n(1, 2, 6), n(3, 2, 2), padding="valid"),
        ulps=8.5,
        why="2 2 products of 2 and the bias 1/2; 2 3 products of 2",
        errors=(refused(ShapeError, "Invalid channel dimensions", n(1, 3, 6), n(3, 2, 2)),),
    ),
    op(
        "batch_norm",
        call(n(2, 3), n(3).public, VARIANCE, n(3).public, n(3).public),
        call(n(2, 3, 2, 2), n(3).private, VARIANCE.private, n(3).private, n(3).private, False, 0.1, 1e-5),
        call(n(2, 3, 4), n(3).private, VARIANCE.private),
        call(n(2, 3), n(3).public, VARIANCE, eps=1e-3, training=False),
        call(
            n(2, 3, 2),
            n(3).private,
            n(3).public,
            n(3).public,
            VARIANCE,
            False,
            0.1,
            1e-5,
            False,
            keys=(torch.batch_norm,),
        ),
        ulps=8,
        why="scale at most 2.83: 2.83 / 2 + 2 / 2, shift 1/2; both are float32, entries at most 7.7: 13.3 2^-22",
        errors=(
            refused(UnsupportedOpError, "model.eval", n(2, 3), n(3).public, VARIANCE, training=True, key=F.batch_norm),
        ),
    ),
)
