"""What the results of operations are below in magnitude, where their handlers do not say."""

from __future__ import annotations

import torch

from ..errors import FixedPointRangeError
from ..ring import HEADROOM_BITS
from .secret import SecretTensor
from .shared import SharedTensor
from .table import Context, Row

NO_LARGER = frozenset((
    "abs", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "amax", "amin", "avg_pool1d",
    "avg_pool2d", "channel_shuffle", "clone", "contiguous", "diag", "diag_embed", "dropout", "flip", "gather",
    "hardshrink", "hardswish", "index_select", "leaky_relu", "masked_select", "max", "max_pool1d",
    "max_pool2d", "maximum", "mean", "min", "minimum", "msort", "neg", "pixel_shuffle", "pixel_unshuffle", "positive",
    "relu", "repeat", "repeat_interleave", "requires_grad_", "roll", "rot90", "silu", "softshrink", "sort",
    "take_along_dim", "tanhshrink", "tile", "to", "topk", "tril", "triu", "unfold_patches",
))  # fmt: skip
"""Operations whose results are no larger in magnitude than their largest shared operand, and so are views. What joins
shared and public operands says its bound itself."""

AT_MOST_FOUR = frozenset((
    "acos", "asin", "atan", "atan2", "cos", "cosine_similarity", "erf", "erfc", "hardsigmoid", "sigmoid", "sign", "sin",
    "softmax", "softmin", "softsign", "tanh",
))  # fmt: skip

ONE_LARGER = frozenset(("gelu", "logsigmoid", "mish", "softplus"))
"""Operations whose results are larger than their operand by two at most."""


def bound_of(
    context: Context, row: Row, scale_bits: int, dtype: torch.dtype, given: list[SecretTensor], outermost: bool
) -> float | None:
    """The bound of a result whose handler gave none.

    None only in a handler that is another's part, which vouches for it: what a user holds has a bound.
    """
    one = 2.0**scale_bits
    if not context.scheme.range_check:
        return None
    if dtype == torch.bool or row.name in AT_MOST_FOUR:
        return 4 * one
    bounds = [
        2.0 ** (scale_bits - x.scale_bits) * x.bound
        for x in given
        if isinstance(x, SharedTensor) and x.bound is not None
    ]
    known = len(bounds) == sum(isinstance(x, SharedTensor) for x in given)
    if known and not dtype.is_floating_point and any(plain_dtype(x).is_floating_point for x in given):
        return 2.0**32  # positions
    if known and (row.view or row.name in NO_LARGER | ONE_LARGER):
        return max(bounds) + (2 * one if row.name in ONE_LARGER else 0)
    return 2.0**HEADROOM_BITS if outermost else None


def check_bound(context: Context, row: Row, bound: float | None, outermost: bool) -> None:
    """Nothing goes on with a result that no check holds to the ring, though its handler said how large it may be.

    Raises:
        FixedPointRangeError: a fault of the operation.
    """
    if outermost and bound is not None and bound > 2.0**HEADROOM_BITS and context.scheme.range_check:
        raise FixedPointRangeError(
            f"internal error: '{row.name}' may leave the range; please report it, and use range_check=False meanwhile"
        )


def plain_dtype(x: SecretTensor) -> torch.dtype:
    """What a secret tensor passes for."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype
