"""The sum of clipped gradients of single rows, in secret: linear layers need no gradient of any single row.

A row's gradient of a linear layer is the product of its backpropagated output d and its input a, so its square norm is
|d|^2 (|a|^2 + 1), that of the bias with it, and the sum of clipped ones is the product of inputs with outputs that were
made shorter. Sources: Goodfellow, "Efficient per-example gradient computations", 2015; Abadi et al., "Deep learning
with differential privacy", CCS 2016.

Every rounding goes the way that keeps a norm below the bound: squares up, factors down; what is left is taken from the
bound (`margin`). Inputs beyond 16 and outputs beyond 8 are cut there first, in secret, for the gradient only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

from torch import Tensor

from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import crossed, plus, product, squared, summed, vouched
from ..training.functions import torch
from ..training.scale import at

INPUT_BITS, OUTPUT_BITS = 4, 3
"""Inputs are below 2^4 and outputs below 2^3."""

DELTA_BITS, FACTOR_BITS, GRID_BITS, SQUARE_BITS = 22, 34, 26, 8
"""Fraction bits of outputs, of what shortens them, of sums, and of |a|^2."""

ROOT_MARGIN = 2.0**-17
"""Above the error of `rsqrt` for results up to one, 4e-6."""


@dataclass(frozen=True)
class Rows:
    """One linear layer's inputs [B, d] and backpropagated outputs [B, k]."""

    inputs: SharedTensor
    outputs: SharedTensor

    @property
    def sizes(self) -> tuple[int, int]:
        return self.inputs.shares.shape[1], self.outputs.shares.shape[1]


def largest(sizes: Sequence[tuple[int, int]]) -> float:
    """What the square of a row's gradient can be at most."""
    return sum(4.0**INPUT_BITS * d * 4.0**OUTPUT_BITS * k + 4.0**OUTPUT_BITS * k for d, k in sizes)


def margin(sizes: Sequence[tuple[int, int]]) -> float:
    """By how much a row's clipped gradient may be longer than what it was clipped to.

    Shortened outputs are rounded by 2^-27 each, and a factor by 2^-35. A rounded sum has sqrt(P) 2^-27 more for each of
    two neighbours.
    """
    rounded = sum(k * (4.0**INPUT_BITS * d + 1) for d, k in sizes)
    count = sum((d + 1) * k for d, k in sizes)
    return (math.sqrt(rounded) + math.sqrt(count)) * 2.0**-27 + math.sqrt(largest(sizes)) * 2.0**-35


def clipped_sums(context: Context, layers: Sequence[Rows], clip: float) -> list[tuple[SharedTensor, SharedTensor]]:
    """For each layer the sums [k, d] and [k] over the rows, at 26 fraction bits, of gradients that are each below clip.

    Args:
        clip: in norm, above `margin`; the number of rows times clip is below 2^15.

    Rounds some 70; a comparison of each input and output where their bounds do not tell, and some of each row.
    """
    sizes = [layer.sizes for layer in layers]
    room = 59 - math.ceil(math.log2(largest(sizes)))
    bits = min(26, room - SQUARE_BITS)
    inputs = [_cut(context, layer.inputs, context.frac_bits, INPUT_BITS) for layer in layers]
    outputs = [_cut(context, layer.outputs, DELTA_BITS, OUTPUT_BITS) for layer in layers]
    squares = []
    for a, d in zip(inputs, outputs, strict=True):
        square = plus(context, _up(context, _row_squares(context, a), SQUARE_BITS), 1 << SQUARE_BITS)
        squares.append(product(context, torch.mul, _up(context, _row_squares(context, d), bits), square))
    total = reduce(partial(plus, context), squares)
    factor = _factor(context, total, clip - margin(sizes), largest(sizes))
    sums = []
    for a, d in zip(inputs, outputs, strict=True):
        column = factor.like(context.backend.moved(_upright, factor.shares))
        short = product(context, torch.mul, column, d, GRID_BITS)
        sums.append((product(context, crossed, short, a, GRID_BITS), summed(context, short)))
    return sums


def _upright(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


def _cut(context: Context, x: SharedTensor, bits: int, limit_bits: int) -> SharedTensor:
    """x at so many bits within -2^limit_bits and 2^limit_bits."""
    x = at(context, x, bits)
    if x.bound is None or x.bound > 2.0 ** (limit_bits + bits):
        x = at(context, torch.clamp(x, -(2.0**limit_bits), 2.0**limit_bits), bits)
    return x.bounded(None)


def _row_squares(context: Context, x: SharedTensor) -> SharedTensor:
    square = squared(context, x)
    return square.like(context.backend.each(_row_sums, square.shares))


def _up(context: Context, x: SharedTensor, bits: int) -> SharedTensor:
    """x rounded to so many bits and no smaller."""
    return x if x.scale_bits <= bits else plus(context, at(context, x, bits), 1)


def _rungs(room: int) -> list[int]:
    """10, and twice as much as long as half of the room is not reached; the largest first."""
    found = [10]
    while 2 * found[0] < room:
        found.insert(0, 2 * found[0])
    return found


def _factor(context: Context, square: SharedTensor, clip: float, most: float) -> SharedTensor:
    """min(1, clip / sqrt(square)) or a little less, [B] at 34 fraction bits.

    The ratio t = square / clip^2, rounded up, is divided by 2^10 where it is larger, and before by 2^20, 2^40 and so on
    as far as it can be large at all; its root's inverse is then within 4e-6, which is taken off.
    """
    room = max(1, math.ceil(math.log2(most / clip**2)))
    mantissa, exponent = math.frexp(1 / clip**2)
    coarse = _up(context, square, square.scale_bits - 16)
    whole = math.ceil(mantissa * 2**15)
    scale = coarse.scale_bits + 15 - exponent
    ratio = coarse.like(coarse.shares * whole, scale)
    digits = min(context.frac_bits, 60 - room)
    ratio = _up(context, ratio, digits) if scale > digits else vouched(context, ratio, digits)
    factors = []
    for bits in _rungs(room):
        threshold = 1 << (bits + digits)
        large = ratio.like(context.backend.at_least(ratio.shares, (threshold,))[0], 0)
        smaller = _up(context, ratio.like(ratio.shares, digits + bits), digits)
        less = smaller.like(context.backend.each(torch.sub, smaller.shares, ratio.shares), digits)
        ratio = plus(context, ratio, product(context, torch.mul, less, large, digits))
        factors.append(large.like(large.shares * -((1 << bits // 2) - 1) + (1 << bits // 2), bits // 2))
    ratio = ratio.like(ratio.shares, digits, 2.0 ** (10 + digits), dtype=torch.float32)
    root = vouched(context, torch.rsqrt(torch.clamp(ratio, min=1.0)), context.frac_bits)
    found = plus(context, root, -round(ROOT_MARGIN * 2**context.frac_bits))
    for more in factors:
        found = product(context, torch.mul, found, more)
    return at(context, found, FACTOR_BITS)
