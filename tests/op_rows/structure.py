"""Rows of operations that move entries: their only error is the encoding of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.errors import DimensionError, NonFiniteError, ShapeError, UnsupportedOpError

from .base import OpRow, Sample, call, flags, index, mask, number, refused, whole

T = torch.Tensor
X = number(2, 3, 4)
M = number(3, 4)
LINE = number(6)
PLANES = number(1, 8, 4, 6)
IMAGE = number(1, 2, 3, 4)
NO_DIM = refused(DimensionError, "Dimension out of range", X, 7)


def moved(name: str, *samples: Sample, errors: tuple = (), plain: bool = False, operands: int = 0) -> OpRow:
    return OpRow(name, samples, 0.5, "entries keep their encoding", tuple(errors), operands=operands, plain=plain)


ROWS = (
    moved(
        "permute",
        call(X, (2, 0, 1)),
        call(X, (0, -1, 1)),
        call(X, 2, 0, 1, keys=(T.permute,)),
        call(X, (2, 0, 1), keys=(torch.permute_copy,)),
        errors=(refused(ShapeError, "number of dimensions", X, (0, 1)),),
    ),
    moved(
        "transpose", call(X, 0, 2), call(X, -1, 1), errors=(refused(DimensionError, "Dimension out of range", X, 0, 5),)
    ),
    moved("t", call(M), call(number(3)), call(M, keys=(T.T.__get__,)), errors=(refused(ShapeError, "<= 2", X),)),
    moved("mT", call(X), call(M), call(M, keys=(T.H.__get__,)), errors=(refused(ShapeError, "matrices", LINE),)),
    moved(
        "movedim",
        call(X, 0, 2),
        call(X, (0, 1), (2, 0)),
        errors=(refused(DimensionError, "Dimension out of range", X, 0, 5),),
    ),
    moved(
        "squeeze",
        call(number(1, 3, 1)),
        call(number(1, 3, 1), 0),
        call(number(1, 3, 1), -2),
        call(number(1, 3, 1), (0, 2)),
        errors=(NO_DIM,),
    ),
    moved("unsqueeze", call(M, 0), call(M, -1), call(number(), 0), errors=(NO_DIM,)),
    moved(
        "expand",
        call(number(1, 3), 2, -1, keys=(T.expand,)),
        call(number(1, 3), (4, 2, 3)),
        errors=(refused(ShapeError, "must match the existing size", M, 2, 4),),
    ),
    moved(
        "broadcast_to",
        call(number(1, 3), (2, 3)),
        call(number(), (2, 2)),
        errors=(refused(ShapeError, "must match the existing size", M, (2, 4)),),
    ),
    moved("narrow", call(X, 1, 1, 2), call(X, -1, 0, 1), errors=(refused(ShapeError, "exceeds", X, 1, 2, 5),)),
    moved("select", call(X, 1, 2), call(X, -1, -1), errors=(refused(DimensionError, "out of range", X, 1, 3),)),
    moved("diagonal", call(M), call(X, 1, 0, 2), call(M, offset=-1)),
    moved(
        "unfold", call(X, 2, 2, 1), call(LINE, 0, 3, 2), errors=(refused(ShapeError, "maximum size", LINE, 0, 9, 1),)
    ),
    moved("detach", call(X), call(number())),
    moved(
        "index_select",
        call(X, 1, index(4, below=3)),
        call(LINE, 0, index(2, below=6)),
        errors=(
            refused(DimensionError, "out of range", X, 5, index(4, below=3)),
            refused(DimensionError, "out of range", X, 1, torch.tensor([3])),
        ),
    ),
    moved(
        "repeat",
        call(M, 2, 1),
        call(M, (2, 1, 3)),
        call(number(), 3),
        errors=(refused(ShapeError, "Number of dimensions of repeat dims", M, 2),),
    ),
    moved("tile", call(M, (2,)), call(M, (2, 1, 1)), call(M, 2, 1, keys=(T.tile,))),
    moved(
        "repeat_interleave",
        call(M, 2),
        call(M, 3, 1),
        call(LINE, index(6, below=3)),
        call(M, torch.tensor([2, 0, 1]), dim=0),
        errors=(refused(ShapeError, "repeats must have the same size", M, torch.tensor([1, 2]), 0),),
    ),
    moved(
        "flip",
        call(X, (0, 2)),
        call(M, (1,)),
        call(X, keys=(torch.fliplr, T.fliplr, torch.flipud, T.flipud)),
        errors=(refused(DimensionError, "Dimension out of range", X, (5,)),),
    ),
    moved(
        "roll",
        call(M, 1),
        call(M, (1, -2), (0, 1)),
        call(M, 2, dims=1),
        errors=(refused(DimensionError, "Dimension out of range", M, 1, 5),),
    ),
    moved("rot90", call(M), call(X, 3, (1, 2)), errors=(refused(ShapeError, "total dims", LINE),)),
    moved(
        "gather",
        call(M, 1, index(3, 2, below=4)),
        call(LINE, 0, index(3, below=6)),
        errors=(refused(DimensionError, "out of bounds", M, 1, torch.tensor([[9]])),),
    ),
    moved("take_along_dim", call(M, index(3, 2, below=4), 1), call(M, index(5, below=12))),
    moved(
        "masked_select",
        call(M, mask(3, 4)),
        call(M, mask(4)),
        errors=(refused(UnsupportedOpError, "secret", M, flags(3, 4)),),
    ),
    moved("tril", call(M), call(X, 1), errors=(refused(ShapeError, "at least 2 dim", LINE),)),
    moved("triu", call(M), call(X, diagonal=-1), errors=(refused(ShapeError, "at least 2 dim", LINE),)),
    moved("diag", call(M), call(LINE), call(LINE, 1), errors=(refused(ShapeError, "1D or 2D", X),)),
    moved("diag_embed", call(M), call(LINE, -1), call(M, 1, 0, 2)),
    moved("pixel_shuffle", call(PLANES, 2), errors=(refused(ShapeError, "upscale_factor = 3", PLANES, 3),)),
    moved("pixel_unshuffle", call(PLANES, 2), errors=(refused(ShapeError, "invalid", PLANES, 5),)),
    moved("channel_shuffle", call(PLANES, 4), errors=(refused(ShapeError, "divisible by groups", PLANES, 3),)),
    moved("clone", call(X), call(number()), call(X, memory_format=torch.preserve_format)),
    moved("contiguous", call(X), call(number())),
    moved("conj", call(X), call(number())),
    moved("nan_to_num", call(X), call(number())),
    moved("isfinite", call(X), call(whole(3)), plain=True),
    moved("linalg_diagonal", call(X), call(X, offset=1, dim1=0, dim2=2)),
    moved(
        "split",
        call(X, 2, 1),
        call(LINE, 4),
        call(LINE, [1, 5]),
        call(X, [1, 3], dim=2),
        call(LINE, [1, 5], keys=(T.split_with_sizes, torch.split_with_sizes, torch.split_with_sizes_copy)),
        call(LINE, [1, 5], keys=(torch.unsafe_split_with_sizes, T.unsafe_split_with_sizes)),
        call(LINE, 4, keys=(torch.unsafe_split, T.unsafe_split)),
    ),
    moved(
        "tensor_split",
        call(X, 2, 1),
        call(LINE, 4),
        call(LINE, (1, 3)),
        call(X, [1], dim=2),
        errors=(refused(ShapeError, "at least a 1-dim", number(), 2),),
    ),
    moved("chunk", call(LINE, 4), call(X, 2, -1), errors=(refused(ShapeError, "greater than 0", LINE, 0),)),
    moved("unbind", call(X), call(X, 1), call(M, -1), call(M, keys=(T.__iter__,)), errors=(NO_DIM,)),
    moved(
        "reshape",
        call(X, (4, 6)),
        call(X, (-1,)),
        call(number(), (1, 1)),
        call(X, 6, -1, keys=(T.reshape, T.view)),
        call(X, (4, 6), keys=(torch.view_copy,)),
        call(X, (2, 12), keys=(T.reshape, T.view)),
        call(X, number(4, 6).public, keys=(T.reshape_as, T.view_as)),
        call(X, number(4, 6), keys=(T.reshape_as, T.view_as)),
        errors=(
            refused(ShapeError, "shape .* is invalid", X, (5, 5)),
            refused(UnsupportedOpError, "reinterpret", X, torch.int32, key=T.view),
        ),
    ),
    moved(
        "flatten",
        call(X),
        call(X, 1),
        call(X, 0, 1),
        call(number()),
        call(X, keys=(T.ravel, torch.ravel)),
        errors=(NO_DIM,),
    ),
    moved(
        "unflatten",
        call(LINE, 0, (2, 3)),
        call(M, -1, (2, -1)),
        errors=(refused(ShapeError, "multiply up", LINE, 0, (4, 2)),),
    ),
    moved(
        "expand_as",
        call(number(1, 3), number(2, 3)),
        call(number(1, 3), number(2, 3).public),
        call(number(1, 3), number(2, 3).private),
        errors=(refused(ShapeError, "must match the existing size", M, number(5, 5)),),
    ),
    moved(
        "getitem",
        call(X, 0),
        call(X, (slice(None), 1)),
        call(X, (Ellipsis, -1)),
        call(X, (None, slice(1, None), slice(0, 3, 2))),
        call(X, index(3, below=2)),
        call(X, (index(3, below=2), index(3, below=3))),
        call(X, mask(2, 3)),
        call(X, [0, 1, 0]),
        call(X, (0, [1, 2], slice(None))),
        call(LINE, mask(6)),
        call(X, ()),
        call(X, None),
        call(X, True),
        errors=(
            refused(DimensionError, "out of bounds", X, 5),
            refused(DimensionError, "too many indices", LINE, (0, 0)),
            refused(UnsupportedOpError, "secret mask", X, flags(2)),
            refused(
                UnsupportedOpError, "several secret indices", X, (whole(2, low=0, high=2), whole(2, low=0, high=2))
            ),
            refused(UnsupportedOpError, "beside a secret index", X, (None, whole(2, low=0, high=2))),
            refused(UnsupportedOpError, "not whole", X, number(2)),
        ),
    ),
    moved(
        "cat",
        call([M, M]),
        call((M, M), 1),
        call([M, M.public], -1),
        call([M.private, M], dim=0),
        call([M]),
        call([whole(2), whole(3)]),
        call([whole(2), LINE]),
        call([number(0), LINE]),
        errors=(
            refused(ShapeError, "Sizes of tensors must match", [M, number(3, 5)]),
            refused(DimensionError, "Dimension out of range", [M, M], 4),
        ),
    ),
    moved(
        "stack",
        call([M, M]),
        call((M, M), 1),
        call([M, M.public], -1),
        call([M.private, M], dim=0),
        call([whole(2), whole(2)]),
        errors=(refused(ShapeError, "equal size", [M, number(3, 5)]),),
    ),
    moved(
        "hstack",
        call([M, M]),
        call((LINE, LINE)),
        call([M.public, M]),
        errors=(refused(ShapeError, "must match except", [M, number(5, 5)]),),
    ),
    moved(
        "vstack",
        call([M, M]),
        call((LINE, LINE)),
        call([M.public, M]),
        errors=(refused(ShapeError, "must match except", [M, number(5, 5)]),),
    ),
    moved(
        "pad",
        call(M, (1, 2)),
        call(M, (1, 0, 2, 1), value=0.3),
        call(IMAGE, (1, 2, 1, 1), "reflect"),
        call(IMAGE, (2, 1, 0, 3), mode="replicate"),
        call(IMAGE, (1, 2, 1, 0), mode="circular"),
        call(M, (-1, 1)),
        call(number(2, 5), (2, 3), mode="reflect"),
        call(IMAGE, (-1, 1, 1, 0), mode="replicate"),
        call(M, (1, 1), "constant", 2),
        call(whole(3), (1, 1), value=2),
        errors=(
            refused(NonFiniteError, "NaN", M, (1, 1), value=float("nan")),
            refused(UnsupportedOpError, "Padding size 2 is not supported for 4D", IMAGE, (9, 9), mode="reflect"),
            refused(ShapeError, "less than the corresponding input dimension", IMAGE, (9, 9, 0, 0), mode="reflect"),
            refused(ShapeError, "narrow", M, (-9, 1)),
        ),
    ),
    moved("constant_pad_nd", call(M, (1, 2), 0.5), call(M, (1, -1, 0, 2)), call(whole(3), (1, 1), 2)),
    moved(
        "masked_fill",
        call(M, mask(3, 4), 0.3),
        call(M, mask(4), -1),
        call(M, mask(3, 4), number().public),
        call(whole(3), mask(3), 2),
        call(M, torch.zeros(3, 4, dtype=torch.bool), 1.0),
        errors=(
            refused(NonFiniteError, "NaN", M, flags(3, 4), float("nan")),
            refused(NonFiniteError, "NaN", M, mask(3, 4), float("nan")),
        ),
    ),
    moved(
        "to",
        call(X, keys=(T.float, T.double, T.half, T.bfloat16, T.cpu), ulps=2.0**14),
        call(whole(4, low=0, high=2), keys=(T.long, T.int, T.bool)),
        call(flags(4), keys=(T.long, T.int, T.bool, T.float)),
        call(X, torch.float64, keys=(T.to, T.type)),
        call(X, "cpu", keys=(T.to,)),
        call(X, "cpu", torch.float64, keys=(T.to,)),
        call(whole(4), torch.float32, keys=(T.to, T.type)),
        call(flags(4), torch.int64, keys=(T.to, T.type)),
        call(X, keys=(T.long, T.int, T.short, T.char), ulps=0),
        call(flags(4), keys=(T.short, T.char, T.byte)),
        call(whole(4, low=0, high=2), keys=(T.short, T.char, T.byte)),
        call(X, torch.int64, keys=(T.to, T.type), ulps=0),
        call(number(5, low=0, high=300), torch.int32, keys=(T.to,), ulps=0),
        call(X, whole(1).public, keys=(T.to, T.type_as), ulps=0),
        call(X, whole(1), keys=(T.to, T.type_as), ulps=0),
        call(X, number(1).public, keys=(T.to, T.type_as)),
        call(whole(4), number(1), keys=(T.to, T.type_as)),
        call(X, dtype=torch.float32, copy=True, keys=(T.to,)),
        errors=(
            refused(UnsupportedOpError, "meta", X, "meta", key=T.to),
        ),
    ),
    moved("requires_grad_", call(X, False), errors=(refused(UnsupportedOpError, "gradient", X),)),
    moved(
        "dropout",
        call(X, 0.5, False),
        call(X, 0.0, True),
        call(X, p=0.3, training=False, keys=(F.dropout, F.alpha_dropout)),
        call(X, 0.5, False, keys=(F.dropout, F.alpha_dropout)),
        call(X, p=0.3, train=False, keys=(torch.dropout,)),
        call(IMAGE, 0.5, False, keys=(F.dropout2d,)),
        call(number(1, 2, 2, 2, 2), 0.5, False, keys=(F.dropout3d,)),
        errors=(refused(UnsupportedOpError, "model.eval", X, 0.5, True),),
    ),
    moved(
        "constant_like",
        call(X, keys=(torch.zeros_like, torch.ones_like)),
        call(X, 2.5, keys=(torch.full_like,)),
        call(X, dtype=torch.int64, keys=(torch.zeros_like, torch.ones_like)),
        call(whole(3), 2, keys=(torch.full_like,)),
        call(X, (2, 5), keys=(T.new_zeros, T.new_ones)),
        call(X, (2, 5), 1.5, keys=(T.new_full,)),
        plain=True,
    ),
)
