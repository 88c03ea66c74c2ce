"""What values are below, and the checks of what nothing proves.

Every shared value has a public bound. A protocol is exact for ring elements below 2^62; an operation whose result could
be beyond that, or a factor beyond the activation limit, is checked, securely and beside the computation
(`mpc/star/guard.py`). A value that is sure to fit is not.
"""

from __future__ import annotations

import math

from ..backend import Value
from ..errors import FixedPointRangeError
from ..ring import HEADROOM_BITS
from ..tensor import SharedTensor
from ..tensor.table import Context

CAPACITY = 2.0**HEADROOM_BITS
"""What every element is below in magnitude: protocols are exact for such."""


ROOM = 129 / 128
"""What a value that was checked may have grown by before it is checked again; `Scheme.gain` leaves room for it."""


def domain_bits(context: Context) -> int:
    """Functions and norms are right for arguments below 2^this in magnitude: 56 - 2 f, above the activation limit."""
    return 56 - 2 * context.frac_bits


def limit_at(context: Context, scale_bits: int) -> float:
    """The activation limit as a whole number of the ring, at so many fraction bits."""
    return 2.0 ** (context.scheme.activation_bits + scale_bits)


def limit_bits(context: Context, x: SharedTensor, scale_bits: int, most: float | None = None) -> int | None:
    """For protocols that bring x to so many fraction bits: the bits that it must fit, or None if it is sure to.

    Without range checks, and for values that their handler vouches for, nothing is checked.

    Args:
        most: what x must be below in magnitude; None for the activation limit.
    """
    if x.bound is None or not context.scheme.range_check:
        return None
    bits = _bits(context, most) + scale_bits
    return bits if x.bound * 2.0 ** (scale_bits - x.scale_bits) > 2.0**bits else None


def _bits(context: Context, most: float | None) -> int:
    return context.scheme.activation_bits if most is None else math.floor(math.log2(most))


def dropped(context: Context, x: SharedTensor, shift: int, most: float | None = None) -> float | None:
    """The bound of x with so many fraction bits less, after the check that `limit_bits` asks for."""
    if x.bound is None:
        return None
    smaller = x.bound / 2.0**shift + 1
    return min(smaller, 2.0 ** (_bits(context, most) + x.scale_bits - shift)) if context.scheme.range_check else smaller


def above(limit: int, low: int) -> int:
    """The limit of x - low in bits, for x below 2^limit: more where `low` is no small part of that."""
    if -low <= 2.0 ** (limit - 2):
        return limit
    return math.ceil(math.log2(2.0**limit - low))


def planes(x: SharedTensor, factor: float = 1.0, more: float = 0.0) -> int:
    """Planes that a comparison has to look at of `factor` x and a number of magnitude `more`: as many as the bound has
    bits, and all 63 of what nothing is known of, or is taken for granted without a check: a result would else depend on
    the dealer's mask where a value is beyond."""
    if x.bound is None or not x.scheme.range_check:
        return 63
    return max(1, min(63, math.frexp(factor * x.bound + more)[1]))


def fitted(context: Context, x: SharedTensor, allowed: float) -> SharedTensor:
    """x, of which every element is below `allowed` (of the ring) in magnitude: by its bound, or by a check.

    Raises:
        FixedPointRangeError: hardly any value would be: the product or sum is too large for the number representation.
    """
    if x.bound is None or x.bound <= allowed or not context.scheme.range_check:
        return x
    bits = math.frexp(allowed)[1] - 1 if allowed >= 1 else 0  # log2 would round up what lies just below a power
    if bits <= x.scale_bits - context.frac_bits + 1:
        raise FixedPointRangeError(
            f"a sum or product here leaves the range for any operand of magnitude {2.0 ** (bits - x.scale_bits):.3g}; "
            f"scale the operands down first, or use fewer than {context.frac_bits} fraction bits"
        )
    context.backend.flag_outside(x.shares, bits)
    return x.like(x.shares, x.scale_bits, 2.0**bits)


def forbid(context: Context, bad: Value) -> None:
    """The call's result is withheld, with `RangeExceededError` at Q, if one of these is 1.

    Args:
        bad: shared 0 and 1, of any shape. Nobody learns which of them is set; see `mpc/star/guard.py`.
    """
    if context.scheme.range_check:
        context.backend.flag(bad)


def beyond(x: SharedTensor, factor: float) -> bool:
    """Whether x times a factor may leave the ring."""
    return x.bound is not None and x.bound * factor > CAPACITY


def within_domain(context: Context, x: SharedTensor) -> SharedTensor:
    """x, below 2^`domain_bits` in magnitude."""
    return fitted(context, x, 2.0 ** (domain_bits(context) + x.scale_bits))
