"""Rows of attention, recurrent layers, transposed convolutions and resampling. Entries are at most 2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.errors import ShapeError, UnsupportedOpError

from .base import Data, call, number, op, refused
from .normalization import SOFTMAX, TERM
from .smooth import SIG

ATTENTION = 2 * (8 + SOFTMAX + 5 * TERM + 5) + 5
ATTENTION_WHY = "3 products, scaled, err by 8, and the 5 weights together by as much and twice 5 terms; values are 2"
GATE = 8 + 8 + 1 + 2 * SIG
GATE_WHY = "a gate sums 4 products of 2 twice and 2 biases, then sigmoid or tanh; a step multiplies three of them"


def n(*shape: int) -> Data:
    return number(*shape, low=-2, high=2)


def h(*shape: int) -> Data:
    return number(*shape, low=-1, high=1)


def weights(gates: int, into: int = 3, width: int = 2, copies: int = 1) -> list[Data]:
    """w_ih, w_hh, b_ih, b_hh of a layer and direction."""
    rows = gates * width
    return [h(rows, into).private, h(rows, width).private, h(rows).private, h(rows).private] * copies


def cell(name: str, gates: int, factor: int):
    hidden = (h(2, 2), h(2, 2)) if name == "lstm_cell" else h(2, 2)
    return op(name, call(n(2, 3), hidden, *weights(gates)), ulps=factor * GATE, why=GATE_WHY)


def projected(options: tuple):
    """An LSTM whose state of 2 is projected to 1."""
    own = [h(8, 3).private, h(8, 1).private, h(8).private, h(8).private, h(1, 2).private]
    return call(n(2, 2, 3), (h(1, 2, 1), h(1, 2, 2)), own, True, 1, *options, False, False)


def layers(name: str, gates: int, factor: int):
    def state(copies: int):
        return (h(copies, 2, 2), h(copies, 2, 2)) if name == "lstm" else h(copies, 2, 2)

    options = (0.0, False)
    return op(
        name,
        call(n(3, 2, 3), state(1), weights(gates), True, 1, *options, False, False),
        call(n(2, 2, 3), state(2), weights(gates, copies=2), True, 1, *options, True, True),
        call(n(2, 2, 3), state(2), weights(gates) + weights(gates, 2), True, 2, *options, False, False),
        call(n(2, 2, 3), state(1), weights(gates)[:2], False, 1, *options, False, False),
        call(n(4, 3), torch.tensor([2, 1, 1]), state(2), weights(gates, copies=2), True, 1, *options, True),
        *([projected(options)] if name == "lstm" else []),
        ulps=6 * factor * GATE,
        why=GATE_WHY + "; at most 6 steps follow one another",
        errors=(
            refused(
                UnsupportedOpError, "dropout", n(3, 2, 3), state(1), weights(gates), True, 1, 0.5, True, False, False
            ),
        ),
    )


IMAGE = number(1, 2, 3, 4)

ROWS = (
    op(
        "scaled_dot_product_attention",
        call(n(2, 5, 3), n(2, 5, 3), n(2, 5, 3)),
        call(n(1, 2, 4, 3), n(1, 2, 5, 3), n(1, 2, 5, 3)),
        call(n(2, 5, 3), n(2, 5, 3), n(2, 5, 3), is_causal=True),
        call(n(2, 5, 3), n(2, 5, 3), n(2, 5, 3), n(5, 5).public),
        call(n(2, 5, 3), n(2, 5, 3), n(2, 5, 3), torch.ones(5, 5).tril().bool()),
        call(n(2, 5, 3), n(2, 5, 3), n(2, 5, 3), scale=0.5),
        ulps=ATTENTION,
        why=ATTENTION_WHY,
        errors=(
            refused(UnsupportedOpError, "model.eval", n(5, 3), n(5, 3), n(5, 3), dropout_p=0.5),
            refused(ShapeError, "reduction dim|must match", n(5, 3), n(5, 4), n(5, 3)),
        ),
    ),
    op(
        "multi_head_attention",
        call(
            n(3, 2, 4),
            n(5, 2, 4),
            n(5, 2, 4),
            4,
            2,
            h(12, 4).private,
            h(12).private,
            None,
            None,
            False,
            0.0,
            h(4, 4).private,
            h(4).private,
            False,
        ),
        call(
            n(3, 4),
            n(3, 4),
            n(3, 4),
            4,
            1,
            h(12, 4).private,
            h(12).private,
            None,
            None,
            False,
            0.0,
            h(4, 4).private,
            h(4).private,
            False,
            attn_mask=torch.ones(3, 3).triu(1).bool(),
            average_attn_weights=False,
        ),
        ulps=10_000,
        why="projections of 4 entries err by 7 and reach 9; scores err by 2 2 9 7 / sqrt 2 = 180, the mixture by "
        "9 (180 + 80), and 4 of them are added",
    ),
    cell("lstm_cell", 4, 4),
    cell("gru_cell", 3, 4),
    cell("rnn_tanh_cell", 1, 2),
    cell("rnn_relu_cell", 1, 2),
    layers("lstm", 4, 4),
    layers("gru", 3, 4),
    layers("rnn_tanh", 1, 2),
    layers("rnn_relu", 1, 2),
    op(
        "conv_transpose2d",
        call(n(1, 2, 3, 4), n(2, 3, 2, 2)),
        call(n(2, 2, 3, 4), n(2, 3, 2, 2).private, n(3).private),
        call(n(1, 2, 3, 4), n(2, 3, 3, 3).public, n(3).public, 2, 1, 1),
        call(n(2, 3, 4), n(2, 3, 2, 2).private, n(3)),
        call(n(1, 4, 3, 3), n(4, 2, 2, 2).private, None, 1, 0, 0, 2),
        call(n(1, 2, 3, 4), n(2, 3, 2, 2), None, (2, 1), (1, 0), (0, 0), 1, (1, 2)),
        ulps=36.5,
        why="2 3 3 products of 2 and the bias 1/2",
        errors=(
            refused(ShapeError, "channels|size", n(1, 3, 4, 4), n(2, 3, 2, 2)),
            refused(ShapeError, "negative padding", n(1, 2, 3, 4), n(2, 3, 3, 3).public, None, 2, -8),
        ),
    ),
    op(
        "conv_transpose1d",
        call(n(1, 2, 5), n(2, 3, 2)),
        call(n(2, 2, 5), n(2, 3, 2).private, n(3).private, 2, 1, 1),
        call(n(2, 5), n(2, 3, 2).private),
        ulps=8.5,
        why="2 2 products of 2 and the bias 1/2",
        errors=(refused(ShapeError, "one number", n(0, 2, 5), n(2, 3, 2).private, None, 2, (1, 2)),),
    ),
    op(
        "interpolate",
        call(IMAGE, (6, 8), keys=(F.interpolate, F.upsample)),
        call(IMAGE, scale_factor=2.0, keys=(F.interpolate, F.upsample)),
        call(IMAGE, (5, 3), None, "bilinear", False, keys=(F.interpolate,)),
        call(IMAGE, scale_factor=2.0, mode="bilinear", align_corners=True, keys=(F.interpolate,)),
        call(IMAGE, (6, 6), mode="bicubic", align_corners=False, keys=(F.interpolate,)),
        call(number(1, 2, 5), 8, mode="linear", keys=(F.interpolate,)),
        call(number(1, 2, 5), 8, mode="nearest-exact", keys=(F.interpolate,)),
        call(IMAGE, (6, 8), keys=(F.upsample_nearest, F.upsample_bilinear)),
        ulps=2 * 4 * 3.2,
        why="two dimensions, each 4 products of |x| / 2 + 1.6 / 2",
        errors=(refused(UnsupportedOpError, "area", IMAGE, (2, 2), mode="area"),),
    ),
    op(
        "unfold_patches",
        call(IMAGE, 2),
        call(IMAGE, (2, 1), 1, 1, 2),
        call(number(2, 4, 4), 2, stride=2),
        call(IMAGE, 2, dilation=(2, 1), padding=(1, 0)),
        ulps=0.5,
        why="entries keep their encoding",
    ),
    op(
        "fold",
        call(number(2, 12, 9), (4, 4), 2),
        call(number(12, 9), (4, 4), 2),
        call(number(2, 27, 16), 8, 3, padding=1, stride=2),
        ulps=5,
        why="at most 9 entries, each rounded",
    ),
)
