"""Functions that all handlers use: operands, fraction bits, sums, bounds and range checks.

An operand is a SharedTensor, a PrivateTensor of the answering party, a plain tensor, or a Python number.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..backend import MAX_SHIFT, Normal, Value
from ..config import VANISHED
from ..errors import FixedPointRangeError, UnsupportedOpError
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..ring.fixed_point import weighted_bit_sum
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from ..tensor.table import Context

# Bounds and range checks.
#
# Every shared value has a public bound. A protocol is exact for ring elements below 2^62. A result that could be beyond
# that, and a factor that could be beyond the activation limit, is checked, securely and beside the computation
# (`mpc/star/guard.py`). A value whose bound proves that it fits is not checked.


CAPACITY = 2.0**HEADROOM_BITS
"""The range in which protocols are exact: every element is below this in magnitude."""

ROOM = 129 / 128
"""The factor by which a checked value may grow before it is checked again; `Scheme.gain` leaves room for it."""


def domain_bits(context: Context) -> int:
    """k: functions and norms are right for arguments below 2^k in magnitude. 56 - 2 f, above the activation limit."""
    return 56 - 2 * context.frac_bits


def limit_at(context: Context, scale_bits: int) -> float:
    """The activation limit as a ring element with so many fraction bits."""
    return 2.0 ** (context.scheme.activation_bits + scale_bits)


def limit_bits(context: Context, x: SharedTensor, scale_bits: int, most: float | None = None) -> int | None:
    """The number of bits to which a protocol has to hold x, at so many fraction bits; None if no check is needed.

    Without range checks, and for values that their handler vouches for, nothing is checked.

    Args:
        most: the limit of x's magnitude; by default the activation limit.
    """
    if x.bound is None or not context.scheme.range_check:
        return None
    bits = _bits(context, most) + scale_bits
    return bits if x.bound * 2.0 ** (scale_bits - x.scale_bits) > 2.0**bits else None


def _bits(context: Context, most: float | None) -> int:
    return context.scheme.activation_bits if most is None else math.floor(math.log2(most))


def dropped_bits_bound(context: Context, x: SharedTensor, shift: int, most: float | None = None) -> float | None:
    """The bound of x after it was truncated by `shift` bits and checked as `limit_bits` says."""
    if x.bound is None:
        return None
    smaller = x.bound / 2.0**shift + 1
    return min(smaller, 2.0 ** (_bits(context, most) + x.scale_bits - shift)) if context.scheme.range_check else smaller


def limit_of_difference(limit: int, low: int) -> int:
    """The limit of x - low in bits, for x below 2^limit."""
    if -low <= 2.0 ** (limit - 2):
        return limit
    return math.ceil(math.log2(2.0**limit - low))


def planes(x: SharedTensor, factor: float = 1.0, more: float = 0.0) -> int:
    """The number of bit planes that a comparison of `factor` x with numbers up to `more` looks at.

    As many as the bound has bits; all 63 if there is no bound, or none that is checked: for a value beyond it the
    result would depend on the dealer's mask.
    """
    if x.bound is None or not x.scheme.range_check:
        return 63
    return max(1, min(63, math.frexp(factor * x.bound + more)[1]))


def check_fits(context: Context, x: SharedTensor, allowed: float) -> SharedTensor:
    """x, held to ring elements below `allowed` in magnitude: by its bound, or by a check.

    Raises:
        FixedPointRangeError: hardly any value would pass: the scheme has no room for this product or sum.
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
    """Withhold the call's result, with `RangeExceededError` at Q, if one of these bits is 1.

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
    return check_fits(context, x, 2.0 ** (domain_bits(context) + x.scale_bits))


SLACK_BITS = 6
"""Fraction bits above f that a factor may have. Averages leave them at no cost; each halves the range of a product."""

KEPT = 2.0**-13
"""The relative error of a small constant's encoding up to which logarithms and inverse roots do not correct it."""


def with_dtype(x: SharedTensor, dtype: torch.dtype) -> SharedTensor:
    """x with another dtype and unchanged ring elements."""
    return x.like(x.shares, bound=x.bound, dtype=dtype)


def as_floating(x: SharedTensor) -> SharedTensor:
    """x as a floating-point operand of torch functions, with unchanged ring elements."""
    return x if fractional(x) else with_dtype(x, torch.float32)


def summand(context: Context, value: Any) -> SharedTensor:
    """Any operand as shares, whole numbers without fraction bits. No message."""
    return shared_operand(context, value, context.frac_bits if fractional(value) else 0)


def is_secret(x: Any) -> bool:
    return isinstance(x, SecretTensor)


def raise_scale(context: Context, x: SharedTensor, scale_bits: int) -> SharedTensor:
    """x with more fraction bits: a local shift to the left."""
    bits = scale_bits - x.scale_bits
    if bits == 0:
        return x
    bound = None if x.bound is None else x.bound * 2.0**bits
    made = x.like(x.shares << bits, scale_bits, bound)
    made.whole_bits = x.whole_bits + bits
    return made


def round_scale(context: Context, x: SharedTensor, scale_bits: int) -> SharedTensor:
    """The value rounded to at most `scale_bits` fraction bits."""
    while x.scale_bits > scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits - scale_bits)
        bound = None if x.bound is None else x.bound / 2.0**shift + 1
        x = x.like(context.backend.truncate(x.shares, shift), x.scale_bits - shift, bound)
    return x


def as_factor(context: Context, x: SharedTensor, slack: int = SLACK_BITS, most: float | None = None) -> SharedTensor:
    """x as a factor of a product: truncated to f fraction bits, unless it has at most `slack` more.

    A truncation also checks that x is below `most`, by default the activation limit.
    """
    while x.scale_bits - context.frac_bits > slack:
        shift = excess_bits(context, x.scale_bits)
        limit = limit_bits(context, x, x.scale_bits - shift, most)
        shares = context.backend.truncate(x.shares, shift, limit)
        x = x.like(shares, x.scale_bits - shift, dropped_bits_bound(context, x, shift, most))
    return x


def factor_bits(context: Context, scale_bits: int) -> int:
    """The fraction bits of `as_factor(x)` for an x of so many."""
    while scale_bits - context.frac_bits > SLACK_BITS:
        scale_bits -= excess_bits(context, scale_bits)
    return scale_bits


def fit_beside_bounds(context: Context, x: SharedTensor, *bounds: float) -> SharedTensor:
    """x with so few fraction bits that its difference from public bounds stays in the range."""
    fits = max(map(abs, bounds), default=0.0) < 2.0 ** (HEADROOM_BITS - 2 - x.scale_bits)
    return x if fits else as_factor(context, x, 0)


def align_scales(context: Context, *values: SharedTensor) -> list[SharedTensor]:
    """The values at one scale, the finest. A value with more than 2 f fraction bits is truncated first.

    A raise to more than 2 f fraction bits would leave less range than sectorch promises.
    """
    if len({x.scale_bits for x in values}) > 1:
        values = tuple(as_factor(context, x, 0) if x.scale_bits > 2 * context.frac_bits else x for x in values)
    scale = max(x.scale_bits for x in values)
    # The sum of all must stay in the ring.
    part = CAPACITY / len(values)
    if any(x.bound is not None and x.bound * 2.0 ** (scale - x.scale_bits) > part for x in values):
        if part < limit_at(context, scale):
            values = tuple(as_factor(context, x, 0) for x in values)
            scale = max(x.scale_bits for x in values)
        values = tuple(check_fits(context, x, part * 2.0 ** (x.scale_bits - scale)) for x in values)
    return [raise_scale(context, x, scale) for x in values]


def encoded_public(context: Context, value: Any, scale_bits: int, kept: bool = False) -> torch.Tensor:
    """A public number or tensor as ring elements.

    Args:
        kept: whether the caller keeps the number itself, so that one that is encoded as zero is not noted.

    Raises:
        FixedPointRangeError: a value that does not fit, in general or at this scale.
    """
    value = torch.as_tensor(value)
    check_encodable(value, context.frac_bits, "a public operand")
    largest = 0.0 if value.is_meta or not value.numel() else float(value.detach().to(torch.float64).abs().max())
    if largest >= 2.0 ** (HEADROOM_BITS - scale_bits):
        raise FixedPointRangeError(
            f"a public operand reaches magnitude {largest:.6g}, but beside a tensor of {scale_bits} "
            f"fraction bits the range is below {2.0 ** (HEADROOM_BITS - scale_bits):g}"
        )
    if not kept:
        note_vanished(value, scale_bits)
    return encode(value, scale_bits)


def note_vanished(value: Any, scale_bits: int) -> None:
    """Note a public operand that is not zero, but is encoded as zero in every entry."""
    noted = VANISHED.get()
    if noted is None or is_secret(value) or not fractional(value):
        return
    sizes = torch.as_tensor(value).detach().abs()
    if not sizes.is_meta and sizes.numel() and 0 < float(sizes.max()) <= 2.0 ** (-scale_bits - 1):
        noted.append(float(sizes.max()))


def small_public_number(context: Context, value: Any) -> float | None:
    """A public number of which f fraction bits keep at most eight digits, also from a constant tensor; None otherwise.

    Such numbers guard logarithms and quotients against zero.
    """
    if isinstance(value, torch.Tensor):
        if is_secret(value) or value.is_meta or not value.is_floating_point() or not value.numel():
            return None
        value = value.detach()
        first = float(value.flatten()[0])
        return first if 0 < abs(first) < 2.0 ** (8 - context.frac_bits) and bool((value == first).all()) else None
    return value if isinstance(value, float) and 0 < abs(value) < 2.0 ** (8 - context.frac_bits) else None


def with_fine_scale(context: Context, x: SharedTensor) -> SharedTensor:
    """x with at least 2 f fraction bits, so that a small public number beside it keeps its digits."""
    scale = max(x.scale_bits, 2 * context.frac_bits)
    return raise_scale(context, check_fits(context, x, CAPACITY / 2.0 ** (scale - x.scale_bits)), scale)


def standing_for(x: SharedTensor, value: float, least: int = 0) -> int:
    """The ring element of a small positive number at the scale of x; x notes the number if the element lacks digits.

    Args:
        least: a lower bound of the element.
    """
    element = max(least, round(value * 2.0**x.scale_bits))
    if value > 0 and abs(element * 2.0**-x.scale_bits - value) > value * KEPT:
        x.constant = element, value
    return element


def public_summand(context: Context, value: Any, scale_bits: int, kept: bool = False) -> Any:
    """The ring elements of a summand that is not shared: public, or located at its owner."""
    if isinstance(value, PrivateTensor):
        limit = context.scheme.activation_limit if context.scheme.range_check else None
        return context.backend.owner_summand(value.encoded(scale_bits, limit))
    return encoded_public(context, value, scale_bits, kept)


def shared_operand(context: Context, value: Any, scale_bits: int) -> SharedTensor:
    """Any operand as shares. No message."""
    if isinstance(value, SharedTensor):
        return value
    content = public_summand(context, value, scale_bits)
    if isinstance(content, torch.Tensor):
        content = content.to(context.session.device)
    return context.tensor(context.backend.embedded(content), scale_bits, _largest(context, value, scale_bits))


def _largest(context: Context, value: Any, scale_bits: int) -> float:
    """The bound of a summand that is not shared; `PrivateTensor.encoded` holds a private one to the limit."""
    if isinstance(value, PrivateTensor):
        return limit_at(context, scale_bits)
    value = torch.as_tensor(value)
    if value.is_meta or not value.numel():
        return limit_at(context, scale_bits)
    largest = float(value.detach().to(torch.float64).abs().max())
    return largest * 2.0**scale_bits + 1


def end_to_end(*parts: torch.Tensor) -> torch.Tensor:
    """The parts, concatenated along the first dimension."""
    return torch.cat(parts)


def signed_sum(context: Context, x: Any, y: Any, sign: int = 1) -> SharedTensor:
    """x + sign * y with broadcasting, at the finer of the two scales. No message."""
    if not isinstance(x, SharedTensor):
        return _plus(context, local_map(context, torch.neg, y) if sign < 0 else y, x)
    if not isinstance(y, SharedTensor):
        return _plus(context, x, y, sign)
    left, right = align_scales(context, x, y)
    shares = left.shares - right.shares if sign < 0 else left.shares + right.shares
    made = left.like(shares, left.scale_bits, sum_bound(left.bound, right.bound))
    made.whole_bits = min(left.whole_bits, right.whole_bits)
    return made


def sum_bound(x: float | None, y: float | None) -> float | None:
    """The bound of a sum."""
    return None if x is None or y is None else x + y


def _plus(context: Context, x: SharedTensor, value: Any, sign: int = 1) -> SharedTensor:
    """x + sign * value for a value that is not shared.

    A small number, such as the 1e-8 under a logarithm, would vanish at f fraction bits: x then gets 2 f.
    """
    little = small_public_number(context, value)
    known, bits = x.constant or (0, 0.0), x.scale_bits
    x = x if little is None else with_fine_scale(context, x)
    scale = x.scale_bits
    if scale == 0 and fractional(value):
        scale = context.frac_bits
        x = raise_scale(context, x, scale)
    bound = _largest(context, value, scale)
    if x.bound is not None and x.bound + bound > CAPACITY:
        if CAPACITY - bound < limit_at(context, scale):
            x = as_factor(context, x, 0)
            scale, bound = x.scale_bits, _largest(context, value, x.scale_bits)
        x = check_fits(context, x, CAPACITY - bound)
    content = public_summand(context, value, scale, little is not None)
    made = x.like(x.shares - content if sign < 0 else x.shares + content, scale, sum_bound(x.bound, bound))
    counted = isinstance(value, (int, float)) and math.isfinite(value) and value == int(value)
    made.whole_bits = min(x.whole_bits, scale) if counted else 0
    if little is not None:
        standing_for(made, sign * little)
        element, value = known[0] << max(0, scale - bits), known[1] + sign * little
        if value > 0 and known[1] and scale >= bits:  # a small number beside another
            made.constant = element + sign * round(little * 2.0**scale), value
    return made


def fractional(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def add_values(context: Context, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """Sum of two handler values."""
    x, y = align_scales(context, x, y)
    return x.like(x.shares + y.shares, x.scale_bits, sum_bound(x.bound, y.bound))


def local_map(context: Context, f: Callable, x: SharedTensor, *public: Any, terms: int = 1) -> SharedTensor:
    """A public linear map of a shared tensor. No message.

    Args:
        terms: the number of elements that one result sums up, with weights of one.
    """
    if terms > 1 and x.bound is not None and beyond(x, terms):
        if terms > 8:  # sums of many products lose bits, as in `summable`; sums of a few are checked
            over = math.ceil(math.log2(x.bound * terms / CAPACITY))
            x = round_scale(context, x, max(min(context.frac_bits, x.scale_bits), x.scale_bits - over))
        x = check_fits(context, x, CAPACITY / terms)
    bound = None if x.bound is None else x.bound * max(1, terms)
    made = x.like(context.backend.moved(f, x.shares, *public), bound=bound)
    made.whole_bits = x.whole_bits
    return made


def excess_bits(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """The bit planes of an activation that a comparison looks at: 63, or fewer if the limit holds without a check."""
    if context.scheme.limit_bits is None or context.scheme.range_check:
        return 63  # a range check needs them all
    return min(63, scale_bits + context.scheme.limit_bits + extra)


def require(context: Context, x: SharedTensor, low: float | None = None, high: float | None = None) -> None:
    """Withhold the call's result, with `RangeExceededError` at Q, unless low <= x < high everywhere.

    One comparison for each bound. The result does not wait for them.
    """
    if not context.scheme.range_check:
        return
    bounds = [b for b in (low, high) if b is not None]
    x = fit_beside_bounds(context, x, *bounds)
    bits = context.backend.at_least(x.shares, tuple(math.ceil(b * 2**x.scale_bits) for b in bounds))
    if low is not None:
        forbid(context, -bits[0] + 1)
    if high is not None:
        forbid(context, bits[-1])


def write_if_inplace(x: SharedTensor, result: Any, inplace: bool) -> Any:
    """The result of an activation, which replaces the content of x if the argument `inplace` says so."""
    if inplace:
        if x.aliased:
            refuse("an in-place activation on a view", "pass inplace=False")
        x.shares, x.scale_bits, x.bound, x.whole_bits = result.shares, result.scale_bits, result.bound, 0
    return result


def dims_of(x: SharedTensor, dim: Any) -> tuple[int, ...]:
    """The dimensions that a reduction names, counted from the front; all of them for None and for none."""
    count = len(x.shares.shape)
    chosen = range(count) if dim is None or dim in ((), []) else (dim,) if isinstance(dim, int) else dim
    return tuple(d % max(1, count) for d in chosen)


def refuse(what: str, instead: str) -> NoReturn:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")


# Public functions of a unary code, which is a bit [x >= t] for each of some thresholds t. No message.


def exponent_map(context: Context, x: Normal, g: Callable[[int], int], below: int | None = None) -> Value:
    """g(e) for a public function g of the exponent e = low + step, low + 2 step .. high, with ring values.

    Args:
        below: the value for x < 2^low; g(low + step) unless named.
    """
    values = [g(e) for e in range(x.low + x.step, x.high + 1, x.step)]
    start = values[0] if below is None else below
    steps = [values[0] - start, *(b - a for a, b in itertools.pairwise(values)), 0]
    return unary_map(context, x.bits, start, steps)


def unary_map(context: Context, bits: Value, start: int, steps: list[int]) -> Value:
    """start + sum_k steps[k] bits[k]: a public step function of a value whose unary code is `bits`."""
    return context.backend.each(weighted_bit_sum, bits, steps) + start
