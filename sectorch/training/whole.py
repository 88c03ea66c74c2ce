"""Functions that the other table composes of torch functions: on what autograd follows, the same composition.

Their handlers compute with torch's functions alone, so each of these comes to the table of gradients by itself: a
recurrent layer is its steps, and attention its products and its softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..tensor.arguments import positional, renamed
from ..tensor.table import COMPOSED, SHARES
from .tensor import FUNCTIONS

ROWS = (
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention", "multi_head_attention",
    "conv3d", "conv_transpose3d", "max_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "bilinear", "cdist", "pdist", "multi_margin_loss", "det", "slogdet", "logcumsumexp", "xlog1py",
    "quantile", "cosine_embedding_loss",
)  # fmt: skip
"""Rows of the other table. Their handlers take the context of a call, and none is asked for it here."""


def _composed(function: Callable, handler: Callable, *args: Any, **kwargs: Any) -> Any:
    if function in COMPOSED and (made := COMPOSED[function](*args, **kwargs)) is not NotImplemented:
        return made
    args, kwargs = positional(function, handler, args, kwargs)
    return handler(None, *args, **renamed(function, handler, len(args), kwargs))


for _name in ROWS:
    for _key in SHARES.rows[_name].keys:
        FUNCTIONS.setdefault(_key, partial(_composed, _key, SHARES.handler[_key]))
for _key, _composition in COMPOSED.items():
    FUNCTIONS.setdefault(_key, _composition)


def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    """A^-1 B, or B A^-1: the inverse has a gradient."""
    inverse = torch.linalg.inv(A)
    vectors = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    if vectors and left:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


FUNCTIONS[torch.linalg.solve] = solve
