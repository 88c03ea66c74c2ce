"""Rows of what moves or writes entries of several tensors by public positions."""

from __future__ import annotations

import torch

from sectorch.errors import DimensionError, SectorchError, ShapeError, UnsupportedOpError

from .base import OpRow, Sample, call, flags, index, mask, number, op, refused, whole

T = torch.Tensor
X = number(2, 3, 4)
M = number(3, 4)
SMALL = number(3, 4, low=-2, high=2)
LINE = number(6)
SECRET = whole(2, low=0, high=3)
AT = index(2, below=3)


def moved(name: str, *samples: Sample, errors: tuple = ()) -> OpRow:
    return op(name, *samples, ulps=1, why="entries keep their encoding, or that of a written number", errors=errors)


def summed(name: str, *samples: Sample, errors: tuple = ()) -> OpRow:
    return op(name, *samples, ulps=6, why="at most 12 entries of 1/2", errors=errors)


ROWS = (
    *(moved(f"atleast_{n}d", call(number()), call(LINE), call(M), call(LINE, M)) for n in (1, 2, 3)),
    moved(
        "meshgrid",
        call(LINE, number(2), keys=(torch.meshgrid,), indexing="ij"),
        call([LINE, number(2)], keys=(torch._VF.meshgrid,), indexing="xy"),
    ),
    moved("cartesian_prod", call(LINE, number(2)), call(LINE)),
    moved("block_diag", call(M, LINE), call(M, number(), number(2, 2).public)),
    moved("column_stack", call([M, number(3)]), call((LINE, LINE.public))),
    moved("dstack", call([M, M]), call((LINE, LINE))),
    moved("hsplit", call(M, 2), call(LINE, [1, 4]), errors=(refused(ShapeError, "at least", number(), 2),)),
    moved("vsplit", call(M, 3), errors=(refused(ShapeError, "at least", LINE, 2),)),
    moved("dsplit", call(X, 2), errors=(refused(ShapeError, "at least", M, 2),)),
    moved("diagflat", call(M), call(LINE, 1)),
    moved("combinations", call(LINE), call(LINE, 3), call(LINE, with_replacement=True)),
    moved(
        "take",
        call(M, index(5, below=12)),
        errors=(refused(UnsupportedOpError, "secret positions", M, SECRET),),
    ),
    moved("fftshift", call(M), call(LINE, 0)),
    moved("ifftshift", call(M), call(M, (1,))),
    moved(
        "index_copy",
        call(M, 1, AT, number(3, 2)),
        call(M.public, 0, AT, number(2, 4)),
        call(whole(3, 4), 0, AT, whole(2, 4)),
        errors=(refused(UnsupportedOpError, "secret positions", M, 1, SECRET, number(3, 2)),),
    ),
    moved(
        "index_fill",
        call(M, 1, AT, 0.3),
        call(M, 0, AT, number()),
        call(whole(3), 0, AT, 2),
        errors=(refused(DimensionError, "out of range", M, 4, AT, 0.3),),
    ),
    moved(
        "scatter",
        call(M, 0, index(2, 4, below=3), number(2, 4)),
        call(M, 1, index(3, 2, below=4), 0.3),
        call(M.public, 0, index(1, 4, below=3), number(2, 4)),
        call(whole(3, 4), 0, index(2, 4, below=3), whole(2, 4), reduce="add"),
        call(whole(3, 4), 0, index(2, 4, below=3), 2, reduce="multiply"),
        call(M, 0, whole(2, 4, low=0, high=2), number(2, 4)),
        call(M.public, 1, whole(3, 3, low=0, high=3), number(3, 3)),
        call(M, -1, whole(2, 2, low=0, high=3), 0.3),
        call(mask(3, 4), 1, whole(3, 1, low=0, high=3), True),
        call(number(), 0, whole(low=0, high=1), number()),
        call(M, 1, whole(3, 0, low=0, high=3), M),
        call(whole(3, 4), 0, whole(2, 4, low=0, high=2), whole(2, 4), reduce="add"),
        errors=(
            refused(UnsupportedOpError, "secret positions", M, 0, whole(2, 4, low=0, high=2), M, reduce="multiply"),
            refused(ShapeError, "self.dtype to be equal", M, 0, whole(2, 4, low=0, high=2), whole(2, 4)),
            refused(ShapeError, "to be no larger than self", M, 0, whole(2, 5, low=0, high=2), number(2, 5)),
        ),
    ),
    moved("fill_diagonal", call(M, 0.3), call(number(7, 3), -1.0, True), call(whole(4, 4), 2)),
    moved("masked_scatter", call(M, mask(3, 4), number(12)), call(M, mask(4), M)),
    moved("slice_scatter", call(M, number(1, 4), 0, 1, 2), call(M, number(3, 2), 1, 0, 4, 2)),
    moved("select_scatter", call(M, number(4), 0, 1), call(M.public, number(3), 1, -1)),
    moved("diagonal_scatter", call(M, number(3)), call(M, number(2), -1)),
    moved(
        "fill",
        call(M, 0.3, keys=(torch.fill, T.fill_, torch.fill_)),
        call(M, number(), keys=(torch.fill, T.fill_, torch.fill_)),
        call(M, keys=(T.zero_, torch.zero_)),
    ),
    moved("copy", call(M, number(4)), call(M, M.public), call(M, whole(3, 4)), call(whole(3), flags(3))),
    moved(
        "setitem",
        call(M, 0, 0.3),
        call(M, (slice(None), AT), number(3, 2)),
        call(M, mask(3, 4), number()),
        call(whole(4), index(2, below=4), 2),
        call(M, flags(3, 4), 0.3),
        call(X, (slice(None), flags(3, 4)), number()),
        call(whole(3, 4), (flags(3), slice(1, 3)), 2),
        errors=(
            refused(UnsupportedOpError, "secret positions", M, SECRET, 0.3, key=T.__setitem__),
            refused(
                UnsupportedOpError, "several entries by a secret mask", M, flags(3, 4), number(2), key=T.__setitem__
            ),
            refused(UnsupportedOpError, "into a plain tensor", M.public, 0, number(4), key=T.__setitem__),
        ),
    ),
    moved(
        "index_put",
        call(M, (AT, AT), number(2)),
        call(M, (torch.tensor([0, 0]), torch.tensor([1, 1])), number(2), True),
        call(M, (mask(3, 4),), 0.0 * torch.ones(())),
    ),
    moved("put", call(M, index(3, below=12), number(3)), call(M, torch.tensor([1, 1]), number(2), True)),
    summed(
        "index_add",
        call(M, 0, index(5, below=3), number(5, 4)),
        call(M, 1, AT, number(3, 2), alpha=2),
        call(M.public, 1, AT, number(3, 2)),
        errors=(refused(UnsupportedOpError, "secret positions", M, 1, SECRET, number(3, 2)),),
    ),
    summed(
        "scatter_add",
        call(M, 0, index(3, 4, below=3), M),
        call(whole(4), 0, index(3, below=4), whole(4)),
        call(M, 1, whole(3, 4, low=0, high=3), M),
        call(whole(4), 0, whole(3, low=0, high=3), whole(3)),
    ),
    op(
        "scatter_reduce",
        call(M, 0, index(3, 4, below=3), M, "sum"),
        *(
            call(M, 1, index(3, 9, below=4), number(3, 9), how, include_self=self)
            for how in ("sum", "mean", "amax", "amin")
            for self in (True, False)
        ),
        *(
            call(SMALL, 0, index(5, 4, below=3), number(5, 4, low=-2, high=2), "prod", include_self=self, ulps=500)
            for self in (True, False)
        ),
        *(call(whole(4), 0, index(9, below=4), whole(9), how) for how in ("mean", "amax", "prod")),
        call(M.public, 0, index(2, 4, below=3), M, "amax", include_self=False),
        call(M, 0, index(2, 4, below=3), M.public, "amin"),
        ulps=12,
        why="at most 10 entries of 1/2, and a quotient; a product of 6 factors up to 2: 2^5 times 6 errors, twice",
        errors=(
            refused(UnsupportedOpError, "secret positions", M, 0, whole(3, 4, low=0, high=3), M, "amax"),
            refused(SectorchError, "reduce", M, 0, index(3, 4, below=3), M, "median"),
        ),
    ),
    op(
        "index_reduce",
        *(
            call(M, 1, index(9, below=4), number(3, 9), how, include_self=self)
            for how in ("mean", "amax", "amin")
            for self in (True, False)
        ),
        call(SMALL, 0, index(5, below=3), number(5, 4, low=-2, high=2), "prod", ulps=500),
        ulps=12,
        why="as scatter_reduce",
    ),
)
