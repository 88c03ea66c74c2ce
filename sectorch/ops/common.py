"""What handlers share: operands of four kinds, fraction bits, and sums.

An operand is a SharedTensor, a PrivateTensor of the answering party, a plain tensor, or a Python number.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..backend import MAX_SHIFT
from ..errors import FixedPointRangeError, UnsupportedOpError
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..ring.scheme import VANISHED
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from ..tensor.table import Context
from .ranges import CAPACITY, beyond, dropped, fitted, forbid, limit_at, limit_bits

SLACK_BITS = 6
"""Fraction bits above f that a factor may carry. They come free from averages; each halves the range of a product."""

KEPT = 2.0**-13
"""The relative error of a constant that logarithms and inverse roots need not mend."""


def typed(x: SharedTensor, dtype: torch.dtype) -> SharedTensor:
    """The same ring elements for another dtype."""
    return x.like(x.shares, bound=x.bound, dtype=dtype)


def real(x: SharedTensor) -> SharedTensor:
    """The same ring elements as a floating-point operand of torch functions."""
    return x if fractional(x) else typed(x, torch.float32)


def summand(context: Context, value: Any) -> SharedTensor:
    """Any operand as shares at its own scale: whole numbers carry no fraction bits."""
    return shared_operand(context, value, context.frac_bits if fractional(value) else 0)


def is_secret(x: Any) -> bool:
    return isinstance(x, SecretTensor)


def raised(context: Context, x: SharedTensor, scale_bits: int) -> SharedTensor:
    """The same value with more fraction bits: a local shift to the left."""
    bits = scale_bits - x.scale_bits
    if bits == 0:
        return x
    bound = None if x.bound is None else x.bound * 2.0**bits
    made = x.like(x.shares << bits, scale_bits, bound)
    made.whole_bits = x.whole_bits + bits
    return made


def shortened(context: Context, x: SharedTensor, scale_bits: int) -> SharedTensor:
    """The value rounded to at most `scale_bits` fraction bits."""
    while x.scale_bits > scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits - scale_bits)
        bound = None if x.bound is None else x.bound / 2.0**shift + 1
        x = x.like(context.backend.truncate(x.shares, shift), x.scale_bits - shift, bound)
    return x


def settled(context: Context, x: SharedTensor, slack: int = SLACK_BITS, most: float | None = None) -> SharedTensor:
    """The value ready to be a factor: truncated to f fraction bits unless it has at most `slack` more.

    What is truncated is checked beside that to be below `most`, which is the activation limit where it is not given.
    """
    while x.scale_bits - context.frac_bits > slack:
        shift = excess(context, x.scale_bits)
        limit = limit_bits(context, x, x.scale_bits - shift, most)
        shares = context.backend.truncate(x.shares, shift, limit)
        x = x.like(shares, x.scale_bits - shift, dropped(context, x, shift, most))
    return x


def settled_bits(context: Context, scale_bits: int) -> int:
    """The fraction bits that `settled` leaves of so many."""
    while scale_bits - context.frac_bits > SLACK_BITS:
        scale_bits -= excess(context, scale_bits)
    return scale_bits


def beside(context: Context, x: SharedTensor, *bounds: float) -> SharedTensor:
    """The value with few enough fraction bits that its difference from public bounds stays in the range."""
    fits = max(map(abs, bounds), default=0.0) < 2.0 ** (HEADROOM_BITS - 2 - x.scale_bits)
    return x if fits else settled(context, x, 0)


def aligned(context: Context, *values: SharedTensor) -> list[SharedTensor]:
    """The values at one scale, the finest; but one with more than 2 f bits is truncated before others are raised to it.

    Raising to more than 2 f bits would take the range that the project promises away from them.
    """
    if len({x.scale_bits for x in values}) > 1:
        values = tuple(settled(context, x, 0) if x.scale_bits > 2 * context.frac_bits else x for x in values)
    scale = max(x.scale_bits for x in values)
    # The sum of all must stay in the ring.
    part = CAPACITY / len(values)
    if any(x.bound is not None and x.bound * 2.0 ** (scale - x.scale_bits) > part for x in values):
        if part < limit_at(context, scale):
            values = tuple(settled(context, x, 0) for x in values)
            scale = max(x.scale_bits for x in values)
        values = tuple(fitted(context, x, part * 2.0 ** (x.scale_bits - scale)) for x in values)
    return [raised(context, x, scale) for x in values]


def encoded_public(context: Context, value: Any, scale_bits: int, kept: bool = False) -> torch.Tensor:
    """A public number or tensor as ring elements.

    Args:
        kept: whether its digits are kept beside, where it has none among these fraction bits.

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
    """Note a public operand that is not zero, and has no entry that is after its encoding."""
    noted = VANISHED.get()
    if noted is None or is_secret(value) or not fractional(value):
        return
    sizes = torch.as_tensor(value).detach().abs()
    if not sizes.is_meta and sizes.numel() and 0 < float(sizes.max()) <= 2.0 ** (-scale_bits - 1):
        noted.append(float(sizes.max()))


def small(context: Context, value: Any) -> float | None:
    """A public number, or that of a tensor of one number, of which f fraction bits keep at most eight digits; else
    None. The guards of logarithms and quotients against zero are such."""
    if isinstance(value, torch.Tensor):
        if is_secret(value) or value.is_meta or not value.is_floating_point() or not value.numel():
            return None
        value = value.detach()
        first = float(value.flatten()[0])
        return first if 0 < abs(first) < 2.0 ** (8 - context.frac_bits) and bool((value == first).all()) else None
    return value if isinstance(value, float) and 0 < abs(value) < 2.0 ** (8 - context.frac_bits) else None


def finer(context: Context, x: SharedTensor) -> SharedTensor:
    """x with at least 2 f fraction bits, among which a small public number keeps its digits."""
    scale = max(x.scale_bits, 2 * context.frac_bits)
    return raised(context, fitted(context, x, CAPACITY / 2.0 ** (scale - x.scale_bits)), scale)


def standing_for(x: SharedTensor, value: float, least: int = 0) -> int:
    """The ring element of a small positive number at the scale of x, which x keeps in mind where it lacks digits.

    Args:
        least: what it is at least.
    """
    element = max(least, round(value * 2.0**x.scale_bits))
    if value > 0 and abs(element * 2.0**-x.scale_bits - value) > value * KEPT:
        x.constant = element, value
    return element


def unshared(context: Context, value: Any, scale_bits: int, kept: bool = False) -> Any:
    """A summand that is not shared, as ring elements: public, or held by its owner."""
    if isinstance(value, PrivateTensor):
        limit = context.scheme.activation_limit if context.scheme.range_check else None
        return context.backend.held(value.encoded(scale_bits, limit))
    return encoded_public(context, value, scale_bits, kept)


def shared_operand(context: Context, value: Any, scale_bits: int) -> SharedTensor:
    """Any operand as shares. No message."""
    if isinstance(value, SharedTensor):
        return value
    content = unshared(context, value, scale_bits)
    if isinstance(content, torch.Tensor):
        content = content.to(context.session.device)
    return context.tensor(context.backend.embedded(content), scale_bits, _largest(context, value, scale_bits))


def _largest(context: Context, value: Any, scale_bits: int) -> float:
    """The bound of a summand that is not shared: of a private one what `encoded` holds it to."""
    if isinstance(value, PrivateTensor):
        return limit_at(context, scale_bits)
    value = torch.as_tensor(value)
    if value.is_meta or not value.numel():
        return limit_at(context, scale_bits)
    largest = float(value.detach().to(torch.float64).abs().max())
    return largest * 2.0**scale_bits + 1


def end_to_end(*parts: torch.Tensor) -> torch.Tensor:
    """The parts one after the other along the first dimension."""
    return torch.cat(parts)


def total(context: Context, x: Any, y: Any, sign: int = 1) -> SharedTensor:
    """x + sign * y with broadcasting, at the finer of the two scales. No message."""
    if not isinstance(x, SharedTensor):
        return _plus(context, local(context, torch.neg, y) if sign < 0 else y, x)
    if not isinstance(y, SharedTensor):
        return _plus(context, x, y, sign)
    left, right = aligned(context, x, y)
    shares = left.shares - right.shares if sign < 0 else left.shares + right.shares
    made = left.like(shares, left.scale_bits, both(left.bound, right.bound))
    made.whole_bits = min(left.whole_bits, right.whole_bits)
    return made


def both(x: float | None, y: float | None) -> float | None:
    """The bound of a sum."""
    return None if x is None or y is None else x + y


def _plus(context: Context, x: SharedTensor, value: Any, sign: int = 1) -> SharedTensor:
    """x + sign * value for a value that is not shared.

    A small number, as the 1e-8 under a logarithm, would be lost among f fraction bits: x then gets 2 f.
    """
    little = small(context, value)
    known, bits = x.constant or (0, 0.0), x.scale_bits
    x = x if little is None else finer(context, x)
    scale = x.scale_bits
    if scale == 0 and fractional(value):
        scale = context.frac_bits
        x = raised(context, x, scale)
    bound = _largest(context, value, scale)
    if x.bound is not None and x.bound + bound > CAPACITY:
        if CAPACITY - bound < limit_at(context, scale):
            x = settled(context, x, 0)
            scale, bound = x.scale_bits, _largest(context, value, x.scale_bits)
        x = fitted(context, x, CAPACITY - bound)
    content = unshared(context, value, scale, little is not None)
    made = x.like(x.shares - content if sign < 0 else x.shares + content, scale, both(x.bound, bound))
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


def plus(context: Context, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """Sum of two handler values."""
    x, y = aligned(context, x, y)
    return x.like(x.shares + y.shares, x.scale_bits, both(x.bound, y.bound))


def local(context: Context, f: Callable, x: SharedTensor, *public: Any, terms: int = 1) -> SharedTensor:
    """A public linear map of a shared tensor. No message.

    Args:
        terms: how many elements one result sums up, with weights of one.
    """
    if terms > 1 and x.bound is not None and beyond(x, terms):
        if terms > 8:  # of products, which may be large, with fewer bits, as in `summable`; a few are checked
            over = math.ceil(math.log2(x.bound * terms / CAPACITY))
            x = shortened(context, x, max(min(context.frac_bits, x.scale_bits), x.scale_bits - over))
        x = fitted(context, x, CAPACITY / terms)
    bound = None if x.bound is None else x.bound * max(1, terms)
    made = x.like(context.backend.moved(f, x.shares, *public), bound=bound)
    made.whole_bits = x.whole_bits
    return made


def excess(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """Planes that a comparison of an activation has to look at: 63, or fewer where the limit is taken for granted."""
    if context.scheme.limit_bits is None or context.scheme.range_check:
        return 63  # a range check needs them all
    return min(63, scale_bits + context.scheme.limit_bits + extra)


def require(context: Context, x: SharedTensor, low: float | None = None, high: float | None = None) -> None:
    """The call's result is withheld, with `RangeExceededError` at Q, unless low <= x < high holds everywhere.

    A comparison for each bound: rounds beside those of the result, not before them.
    """
    if not context.scheme.range_check:
        return
    bounds = [b for b in (low, high) if b is not None]
    x = beside(context, x, *bounds)
    bits = context.backend.at_least(x.shares, tuple(math.ceil(b * 2**x.scale_bits) for b in bounds))
    if low is not None:
        forbid(context, -bits[0] + 1)
    if high is not None:
        forbid(context, bits[-1])


def refuse(what: str, instead: str) -> NoReturn:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")
