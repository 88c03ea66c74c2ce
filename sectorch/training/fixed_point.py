"""Fraction bits and ranges of training: gradients, parameters and the state of an optimiser.

With f fraction bits for activations and weights,

- a gradient has up to f + 6 and is below 2^`gradient_bits` in magnitude, which is checked where it is rounded;
- parameters, momenta and means of squares have up to 2 f + 6, so that steps far below 2^-f add up;
- a product with a public number keeps the bits of the shared factor, and the number's first 14 bits or more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..config import Scheme
from ..errors import ArgumentError
from ..ops.common import (
    CAPACITY,
    SLACK_BITS,
    as_factor,
    check_fits,
    dropped_bits_bound,
    limit_at,
    limit_bits,
    raise_scale,
    round_scale,
)
from ..ring import HEADROOM_BITS, products
from ..tensor import SharedTensor
from ..tensor.table import Context
from .autograd_values import SPAN, Cell, PublicInput, places
from .operations import CHANGED, STATE

FACTOR_BITS = 14
"""The least bits of a public factor: its relative error is 2^-15 at most."""

NUMBER_BITS = 24
"""The bits of a public factor where the ring has room."""

ROOM_BITS = 4
"""Activations up to 2^4 in a sum of products with gradients cost the gradients no bits."""


def gradient_bits(context: Context) -> int:
    """Gradients are below 2^this: 4 with 20 fraction bits, and one more for each bit less."""
    return max(0, 24 - context.frac_bits)


def parameter_bits(scheme: Scheme) -> int:
    """Parameters are below 2^this, half of the bits of activations: 6 with 20 fraction bits, 8 with 16."""
    return scheme.activation_bits // 2


def state_bits(context: Context) -> int:
    """The most fraction bits of parameters and of an optimiser's state."""
    return 2 * context.frac_bits + SLACK_BITS


def as_gradient(context: Context, x: SharedTensor, bits: int | None = None) -> SharedTensor:
    """x with at most `bits` fraction bits (f + 6 unless given), below the limit of gradients: a truncation or a
    check."""
    bits = context.frac_bits + SLACK_BITS if bits is None else bits
    most = 2.0 ** gradient_bits(context)
    while x.scale_bits > bits:
        shift = min(32, x.scale_bits - bits)
        limit, bound = None, None if x.bound is None else x.bound / 2.0**shift + 1
        if x.scale_bits - shift == bits:
            limit = limit_bits(context, x, bits, most)
            bound = dropped_bits_bound(context, x, shift, most)
        x = x.like(context.backend.truncate(x.shares, shift, limit), x.scale_bits - shift, bound)
    return check_fits(context, x, most * 2.0**x.scale_bits)


def factor(context: Context, cell: Cell) -> SharedTensor:
    """A forward value as a factor of f fraction bits, computed once for all products."""
    x = cell.content  # raises for a view of a tensor that has changed since
    if cell.own:
        return x
    if "factor" not in cell.reusable:
        cell.reusable["factor"] = x if x.scale_bits <= context.frac_bits else as_factor(context, x, 0)
    return cell.reusable["factor"]


def operand(context: Context, cell: Any, terms: int = 1) -> Any:
    """A factor of a sum of `terms` products: of a gradient with the bits for which there is room, else `factor`."""
    if not isinstance(cell, Cell):
        return cell
    if not cell.gradient:
        return factor(context, cell)
    x = cell.content
    room = HEADROOM_BITS - context.frac_bits - gradient_bits(context) - ROOM_BITS - max(0, terms - 1).bit_length()
    bits = min(context.frac_bits + SLACK_BITS, max(context.frac_bits, room))
    key = f"gradient {bits}"
    if key not in cell.reusable:
        cell.reusable[key] = as_gradient(context, x, bits)
    return cell.reusable[key]


def parameter(context: Context, x: SharedTensor) -> SharedTensor:
    """A parameter after a step: with 2 f + 6 fraction bits, and checked to be below the limit of parameters."""
    return check_fits(context, at_state_bits(context, x), 2.0 ** (parameter_bits(context.scheme) + state_bits(context)))


CHANGED.append(parameter)


def state(context: Context, x: SharedTensor) -> SharedTensor:
    """A tensor of an optimiser's state, with one of a few bounds: with a new bound in each step, each step would be
    another program.

    The smallest bound is a little above that of squares of gradients, and ten times that of gradients.
    """
    if x.bound is None:
        return x
    if x.scale_bits <= context.frac_bits and x.bound <= 2.0 ** (x.scale_bits + 1):  # signs and factors
        return x.bounded(2.0 ** (x.scale_bits + 1))
    few = 1.25 * 4.0 ** gradient_bits(context) * 2.0**x.scale_bits
    return x.bounded(few if x.bound <= few <= CAPACITY else max(x.bound, CAPACITY))


STATE.append(state)


def no_larger(y: SharedTensor, x: SharedTensor) -> SharedTensor:
    """y, whose entries are those of x or zero, with the bound of x."""
    return y.bounded(None if x.bound is None else x.bound * 2.0 ** (y.scale_bits - x.scale_bits))


def known_bound(context: Context, x: SharedTensor) -> float:
    """The bound of x; without range checks the bound that is assumed."""
    return x.bound if x.bound is not None else 2.0 ** (context.scheme.activation_bits + x.scale_bits)


def times(
    context: Context, x: SharedTensor, number: float | PublicInput, scale_bits: int, wide: bool = False,
    exponent: int | None = None,
) -> SharedTensor:  # fmt: skip
    """x times a public number, with `scale_bits` fraction bits.

    The number keeps 14 bits at least: the error is 2^-15 of the product and one unit in the last place.

    Args:
        wide: whether the number's size changes from step to step. Its bits are then counted from the next multiple of
            `autograd_values.SPAN`, so that all numbers of one form take the same steps.
        exponent: the exponent from which the number's bits are counted; that of its own size unless given.

    Raises:
        ArgumentError: a number that is not finite.
    """
    if not isinstance(number, PublicInput):
        if not math.isfinite(number):
            raise ArgumentError(f"a shared tensor times {number} is no number")
        if number == 0:
            return x.like(x.shares * 0, scale_bits, 0.0)
        mantissa, power = math.frexp(abs(number))
        if mantissa == 0.5 and exponent is None:  # a power of two moves the binary point
            shifted = x.like(x.shares if number > 0 else -x.shares, x.scale_bits - power + 1, x.bound)
            return at_scale_bits(context, shifted, scale_bits)
    if exponent is None:
        exponent = number.exponent if isinstance(number, PublicInput) else places(number, wide)
    least = FACTOR_BITS + (SPAN - 1 if wide else 0)
    room = _room(context, x)
    fine = context.frac_bits + SLACK_BITS
    if room < NUMBER_BITS and fine < x.scale_bits < state_bits(context):  # a later product would round them
        x = round_scale(context, x, max(fine, x.scale_bits - (NUMBER_BITS - room)))
        x = x if _room(context, x) >= NUMBER_BITS else check_fits(context, x, limit_at(context, x.scale_bits))
    elif room < FACTOR_BITS:  # a value without a bound is checked against the activation limit, and keeps its bits
        x = check_fits(context, x, limit_at(context, x.scale_bits))
    room = _room(context, x)
    if room < least:
        x = round_scale(context, x, x.scale_bits - (least - room))
        room = least
    bits = min(room, NUMBER_BITS)
    bound = None if x.bound is None else x.bound * 2.0**bits
    if isinstance(number, PublicInput):
        shares = context.backend.each(operator.mul, x.shares, number.as_integer(context, bits - exponent))
    else:
        shares = x.shares * round(number * 2.0 ** (bits - exponent))
    return at_scale_bits(context, x.like(shares, x.scale_bits + bits - exponent, bound), scale_bits)


def _room(context: Context, x: SharedTensor) -> int:
    """The bits of a factor of x for which the ring has room."""
    return math.floor(math.log2(CAPACITY / max(1.0, known_bound(context, x))))


def at_scale_bits(context: Context, x: SharedTensor, scale_bits: int) -> SharedTensor:
    """x with exactly `scale_bits` fraction bits."""
    x = round_scale(context, x, scale_bits)
    if x.scale_bits < scale_bits:
        x = raise_scale(context, check_fits(context, x, CAPACITY / 2.0 ** (scale_bits - x.scale_bits)), scale_bits)
    return x


def finer_sum(context: Context, x: Any, y: Any, sign: int = 1) -> Any:
    """x + y, or x - y, at the finer scale of the two: a parameter keeps its bits when a coarser step is added."""
    f = torch.sub if sign < 0 else torch.add
    if not isinstance(x, SharedTensor) or not isinstance(y, SharedTensor) or x.infinite or y.infinite:
        return f(x, y)
    scale = min(max(x.scale_bits, y.scale_bits), state_bits(context))
    x, y = (
        check_fits(context, round_scale(context, v, scale), CAPACITY / 2.0 ** (1 + max(0, scale - v.scale_bits)))
        for v in (x, y)
    )
    x, y = (raise_scale(context, v, scale) for v in (x, y))
    bound = None if x.bound is None or y.bound is None else x.bound + y.bound
    total = x.like(context.backend.each(f, x.shares, y.shares), scale, bound)
    total.whole_bits = min(x.whole_bits, y.whole_bits)
    return total


def at_state_bits(context: Context, x: SharedTensor) -> SharedTensor:
    """x with the fraction bits of an optimiser's state."""
    return at_scale_bits(context, x, state_bits(context))


def square_gradient(context: Context, x: SharedTensor) -> SharedTensor:
    """The square of a gradient, at twice its bits."""
    bound = None if x.bound is None else x.bound**2
    return x.like(context.backend.square(x.shares), 2 * x.scale_bits, bound)


def plain_number(value: Any) -> float | None:
    """The value of a public number, or of a public tensor with one entry; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if type(value) is torch.Tensor and value.numel() == 1 and value.dim() == 0 and not value.is_meta:
        return float(value)
    return None


# Products and sums of shares whose ranges the caller knows, without range checks, for fits of estimators.
#
# A product is right if its result is below 2^62 as an integer of the ring, whatever its terms are, since they are added
# mod 2^64. So sums of many products that are known to be small (of a column with residuals, of a matrix with its
# approximate inverse) need no room for the largest terms. Unknown ranges are checked by `check_below`, or certified at
# the end of the fit.


matmul = products.matmul


def cross_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x^T y."""
    return products.matmul(x.mT.contiguous(), y)


def context_of(x: SharedTensor) -> Context:
    return Context(x.session, x.party, x.scheme)


def product(
    context: Context, f: Callable, x: SharedTensor, y: SharedTensor, bits: int | None = None, halved: int = 0
) -> SharedTensor:
    """f(x, y) / 2^halved, for a map that is linear in both; rounded to `bits` fraction bits if given.

    Rounds 1, and 5 for each rounding. The caller knows that the result is below 2^62.
    """
    shares = context.backend.multiply(f, x.shares, y.shares)
    result = x.like(shares, x.scale_bits + y.scale_bits + halved, dtype=torch.float32)
    return result if bits is None else at_scale_bits(context, result, bits)


def square_shares(context: Context, x: SharedTensor) -> SharedTensor:
    """x^2, as `product`."""
    return x.like(context.backend.square(x.shares), 2 * x.scale_bits)


def sum_rows(context: Context, x: SharedTensor, halved: int = 0) -> SharedTensor:
    """The sum of the rows over 2^halved. No message."""
    return x.like(context.backend.each(partial(torch.sum, dim=0), x.shares), x.scale_bits + halved)


def with_known_range(context: Context, x: SharedTensor, bits: int) -> SharedTensor:
    """x with `bits` fraction bits; the caller knows its range."""
    return at_scale_bits(context, x.bounded(None), bits)


def check_below(context: Context, x: SharedTensor, below_bits: int) -> SharedTensor:
    """x with the bound 2^below_bits, which is checked in secret unless a smaller bound is known.

    If the check fails, no result of the fit is revealed.
    """
    if x.bound is None:
        x = x.bounded(2.0**63)
    return check_fits(context, x, 2.0 ** (below_bits + x.scale_bits))


def whole_bits(x: SharedTensor) -> int:
    """The bits before the binary point, by the bound; at most those of the activation limit."""
    most = x.scheme.activation_bits
    if x.bound is None:
        return most
    return next((b for b in range(most) if x.bound <= 2.0 ** (b + x.scale_bits)), most)


def pad_with_number(context: Context, x: SharedTensor, number: float) -> SharedTensor:
    """x with one entry more at the end of its last dimension: a public number. No message."""
    whole = round(number * 2**x.scale_bits)
    return x.like(context.backend.affine(_pad, x.shares, whole))


def _pad(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((x, torch.full_like(x[..., :1], number)), -1)


def diagonal(context: Context, x: SharedTensor) -> SharedTensor:
    """The matrix with this column as its diagonal. No message."""
    return x.like(context.backend.each(_diagonal, x.shares))


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.diag(x[:, 0])


def add_known(context: Context, x: SharedTensor, y: Any) -> SharedTensor:
    """x + y without a range check, for y with the same fraction bits or a public integer of the ring."""
    if not isinstance(y, SharedTensor):
        return x.like(x.shares + y)
    return x.like(context.backend.each(torch.add, x.shares, y.shares))


def minus(context: Context, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """x - y without a range check, for y with the same fraction bits."""
    return x.like(context.backend.each(torch.sub, x.shares, y.shares))
