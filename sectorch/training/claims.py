"""Rows of the other table that have no gradient on shares, with the way out; all others have one, or need none.

`tests/training/test_training_table.py` holds every row to this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..tensor.table import SHARES
from .tensor import REFUSED

_COMPLEX = "complex results are not followed; compute with a public matrix of sines and cosines, or without a gradient"

NO_GRADIENT = {
    "cholesky": "torch.linalg.inv and torch.linalg.slogdet have one",
    "embedding_bag": "sum F.embedding over the bag",
    "fill_diagonal": "x.masked_fill(torch.eye(n, dtype=torch.bool), value) has one",
    "gaussian_nll_loss": "write 0.5 * (torch.log(v) + (x - y) ** 2 / v)",
    "logdet": "take torch.linalg.slogdet(x).logabsdet",
    "rrelu": "F.leaky_relu has one",
    "max_unpool2d": "torch.zeros(n, c, h * w).scatter(2, indices.flatten(2), x.flatten(2)) has one",
    "setitem": "torch.where, torch.cat and torch.index_put write out of place",
    "sinc": "divide torch.sin by its argument, away from zero",
    **dict.fromkeys(
        ("adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices"), "call it without return_indices"
    ),
    **dict.fromkeys(
        ("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2", "irfftn", "rfft",
         "rfft2", "rfftn", "stft", "istft", "complex", "view_as_complex", "view_as_real", "imag", "polar"),
        _COMPLEX,
    ),
}  # fmt: skip
"""Row of the other table -> the way out."""

NOTHING_TO_FOLLOW = frozenset((
    "all", "any", "argmax", "argmin", "argsort", "bitwise_left_shift", "bitwise_right_shift", "bucketize",
    "constant_like", "count_nonzero", "eq",
    "floor_divide", "ge", "gt", "heaviside", "isclose", "isfinite", "isin", "le", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "ne", "one_hot", "requires_grad_", "searchsorted", "signbit",
))  # fmt: skip
"""Rows whose results are no numbers that change smoothly: torch follows them nowhere."""

for _name, _text in NO_GRADIENT.items():
    for _key in (*SHARES.rows[_name].keys, *SHARES.rows[_name].in_place):
        REFUSED[_key] = _text

REFUSED |= {
    F.multilabel_margin_loss: "F.multi_margin_loss and F.multilabel_soft_margin_loss have one",
    torch.matrix_exp: 'of parametrizations.orthogonal give orthogonal_map="cayley"',
    torch.linalg.matrix_exp: 'of parametrizations.orthogonal give orthogonal_map="cayley"',
}
