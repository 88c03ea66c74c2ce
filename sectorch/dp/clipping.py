"""The sum of clipped gradients of single rows, in secret: linear layers need no gradient of any single row.

Where a weight is used T times, with the inputs a_t and the backpropagated outputs d_t, a row's gradient of it is the
sum of the products d_t a_t^T. Its square norm is the sum of (d_s . d_t)(a_s . a_t) over all pairs of uses: |d|^2 |a|^2
of one use. That of a bias is the sum of d_s . d_t. The sum of clipped gradients is the product of inputs with outputs
that were made shorter. Sources: Goodfellow, "Efficient per-example gradient computations", 2015; Abadi et al., "Deep
learning with differential privacy", CCS 2016.

Every rounding goes the way that keeps a norm below the bound: squares up, factors down; what is left is taken from the
bound (`margin`). A matrix of products of T uses is rounded up by T units on its diagonal, so that the difference is
positive semidefinite; the sum of the products of two such matrices is then no smaller. Inputs beyond 16 and outputs
beyond 8 are cut there first, in secret, for the gradient only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

from torch import Tensor

from ..ops.common import raised
from ..tensor import SharedTensor
from ..tensor.table import Context
from ..training.arithmetic import crossed, matmul, plus, product, squared, summed, vouched
from ..training.functions import torch
from ..training.scale import at

INPUT_BITS, OUTPUT_BITS = 4, 3
"""Inputs are below 2^4 and outputs below 2^3."""

DELTA_BITS, FACTOR_BITS, GRID_BITS, SQUARE_BITS = 22, 34, 26, 8
"""Fraction bits of outputs, of what shortens them, of sums, and of |a|^2."""

ROOT_MARGIN = 2.0**-17
"""Above the error of `rsqrt` for results up to one, 4e-6."""


@dataclass(frozen=True)
class Use:
    """One run of a linear layer: its inputs [B, d] and backpropagated outputs [B, k]."""

    inputs: SharedTensor
    outputs: SharedTensor


@dataclass(frozen=True)
class Uses:
    """The uses of a weight [k, d], of a bias [k], or of both where they have the same: their numbers among all uses."""

    numbers: tuple[int, ...]
    inputs: int
    outputs: int
    weight: bool = True
    bias: bool = True

    @property
    def largest(self) -> float:
        """What the square of a row's gradient can be at most."""
        parts = 4.0**INPUT_BITS * self.inputs * self.weight + self.bias
        return len(self.numbers) ** 2 * 4.0**OUTPUT_BITS * self.outputs * parts

    @property
    def count(self) -> int:
        """Entries of the gradient."""
        return self.outputs * (self.inputs * self.weight + self.bias)


def largest(parameters: Sequence[Uses]) -> float:
    """What the square of a row's gradient can be at most."""
    return sum(each.largest for each in parameters)


def margin(parameters: Sequence[Uses]) -> float:
    """By how much a row's clipped gradient may be longer than what it was clipped to.

    Shortened outputs are rounded by 2^-27 each, and a factor by 2^-35. A rounded sum has sqrt(P) 2^-27 more for each of
    two neighbours.
    """
    rounded = sum(each.largest / 4.0**OUTPUT_BITS for each in parameters)
    count = sum(each.count for each in parameters)
    return (math.sqrt(rounded) + math.sqrt(count)) * 2.0**-27 + math.sqrt(largest(parameters)) * 2.0**-35


def clipped_sums(
    context: Context, uses: Sequence[Use], parameters: Sequence[Uses], clip: float
) -> list[tuple[SharedTensor | None, SharedTensor | None]]:
    """For each weight and bias the sums [k, d] and [k] over the rows, at 26 fraction bits, of clipped gradients.

    Args:
        clip: of a row's gradient of all of these, in norm; above `margin`; the number of rows times clip is below 2^15.

    Rounds some 70; a comparison of each input and output where their bounds do not tell, and some of each row.
    """
    room = 59 - math.ceil(math.log2(largest(parameters)))
    bits = min(26, room - SQUARE_BITS)
    inputs = [_cut(context, use.inputs, context.frac_bits, INPUT_BITS) for use in uses]
    outputs = [_cut(context, use.outputs, DELTA_BITS, OUTPUT_BITS) for use in uses]
    squares = []
    for each in parameters:
        square = _products(context, [outputs[i] for i in each.numbers], OUTPUT_BITS, bits)
        if each.weight:
            sizes = _products(context, [inputs[i] for i in each.numbers], INPUT_BITS, SQUARE_BITS)
            square = product(context, torch.mul, square, plus(context, sizes, int(each.bias) << SQUARE_BITS))
        else:
            square = raised(context, square, bits + SQUARE_BITS)
        squares.append(square if len(each.numbers) == 1 else _mapped(context, partial(_sum, dim=(1, 2)), [square]))
    total = reduce(partial(plus, context), squares)
    factor = _factor(context, total, clip - margin(parameters), largest(parameters))
    column = factor.like(context.backend.moved(_upright, factor.shares))
    short = [product(context, torch.mul, column, d, GRID_BITS) for d in outputs]
    sums = []
    for each in parameters:
        d = _mapped(context, _below, [short[i] for i in each.numbers])
        a = _mapped(context, _below, [inputs[i] for i in each.numbers]) if each.weight else None
        weight = None if a is None else product(context, crossed, d, a, GRID_BITS)
        sums.append((weight, summed(context, d) if each.bias else None))
    return sums


def _upright(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def _below(*values: Tensor) -> Tensor:
    return torch.cat(values)


def _beside(*values: Tensor) -> Tensor:
    return torch.stack(values, -2)


def _parts(x: Tensor, most: int) -> Tensor:
    """[B, ..., n] -> [B, C, ..., n / C]: the last dimension in parts of so many entries at most, zeros at its end."""
    count = max(1, -(-x.shape[-1] // most))
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % count))
    return x.unflatten(-1, (count, -1)).movedim(-2, 1)


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x, y.mT.contiguous())


def _sum(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return x.sum(dim)


def _mapped(context: Context, f: Callable, values: Sequence[SharedTensor]) -> SharedTensor:
    return values[0].like(context.backend.each(f, *(x.shares for x in values)), values[0].scale_bits)


def _products(context: Context, values: Sequence[SharedTensor], limit_bits: int, bits: int) -> SharedTensor:
    """A row's products of T uses by pairs, at so many bits and rounded up: [B, T, T], and [B] of one use.

    They are summed up in parts that are below 2^61 whatever the values are.
    """
    count = len(values)
    x = values[0] if count == 1 else _mapped(context, _beside, values)
    x = _mapped(context, partial(_parts, most=1 << max(0, 61 - 2 * (limit_bits + x.scale_bits))), [x])
    parts = x.shares.shape[1]
    one = count == 1
    x = _mapped(context, partial(_sum, dim=-1), [squared(context, x)]) if one else product(context, _pairs, x, x)
    found = _mapped(context, partial(_sum, dim=1), [at(context, x, bits)])
    return plus(context, found, parts if one else torch.eye(count, dtype=torch.int64) * (count * parts))


def _cut(context: Context, x: SharedTensor, bits: int, limit_bits: int) -> SharedTensor:
    """x at so many bits within -2^limit_bits and 2^limit_bits."""
    x = at(context, x, bits)
    if x.bound is None or x.bound > 2.0 ** (limit_bits + bits):
        x = at(context, torch.clamp(x, -(2.0**limit_bits), 2.0**limit_bits), bits)
    return x.bounded(None)


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
