"""What handlers share: operands of four kinds, fraction bits, and sums.

An operand is a SharedTensor, a PrivateTensor of the answering party, a plain tensor, or a Python number.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..choreography import Located
from ..errors import FixedPointRangeError, UnsupportedOpError
from ..located import compute
from ..mpc.mask import open_masked
from ..mpc.shares import Shares, each
from ..mpc.sign import at_least
from ..mpc.truncate import MAX_SHIFT, truncate
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..table import Context, Fixed
from ..tensor import PrivateTensor, SecretTensor, SharedTensor
from .ranges import CAPACITY, beyond, dropped, fitted, forbid, limit_at, limit_bits

INFINITE = 2.0**29
SLACK_BITS = 6
"""Fraction bits above f that a factor may carry. They come free from averages; each halves the range of a product."""


def fixed(x: SharedTensor) -> Fixed:
    """The content of a SharedTensor as a handler's value."""
    return Fixed(x.shares, x.scale_bits, x.bound)


def tensor(context: Context, x: Fixed, dtype: torch.dtype = torch.float32) -> SharedTensor:
    """A handler's value as an operand of torch functions."""
    return SharedTensor(x.shares, x.scale_bits, context.session, context.party, context.scheme, dtype, x.bound)


def summand(context: Context, value: Any) -> Fixed:
    """Any operand as shares at its own scale: whole numbers carry no fraction bits."""
    return shared_operand(context, value, context.frac_bits if fractional(value) else 0)


def is_secret(x: Any) -> bool:
    return isinstance(x, SecretTensor)


def raised(context: Context, x: Fixed, scale_bits: int) -> Fixed:
    """The same value with more fraction bits: a local shift to the left."""
    bits = scale_bits - x.scale_bits
    if bits == 0:
        return x
    bound = None if x.bound is None else x.bound * 2.0**bits
    return Fixed(x.shares << bits, scale_bits, bound)


def shortened(context: Context, x: Fixed, scale_bits: int) -> Fixed:
    """The value rounded to at most `scale_bits` fraction bits."""
    while x.scale_bits > scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits - scale_bits)
        bound = None if x.bound is None else x.bound / 2.0**shift + 1
        x = Fixed(truncate(context.net, x.shares, shift, context.scheme.fss), x.scale_bits - shift, bound)
    return x


def settled(context: Context, x: Fixed, slack: int = SLACK_BITS, most: float | None = None) -> Fixed:
    """The value ready to be a factor: truncated to f fraction bits unless it has at most `slack` more.

    What is truncated is checked beside that to be below `most`, which is the activation limit where it is not given.
    """
    while x.scale_bits - context.frac_bits > slack:
        shift = excess(context, x.scale_bits)
        limit = limit_bits(context, x, x.scale_bits - shift, most)
        shares = truncate(context.net, x.shares, shift, context.scheme.fss, limit)
        x = Fixed(shares, x.scale_bits - shift, dropped(context, x, shift, most))
    return x


def settled_bits(context: Context, scale_bits: int) -> int:
    """The fraction bits that `settled` leaves of so many."""
    while scale_bits - context.frac_bits > SLACK_BITS:
        scale_bits -= excess(context, scale_bits)
    return scale_bits


def beside(context: Context, x: Fixed, *bounds: float) -> Fixed:
    """The value with few enough fraction bits that its difference from public bounds stays in the range."""
    fits = max(map(abs, bounds), default=0.0) < 2.0 ** (HEADROOM_BITS - 2 - x.scale_bits)
    return x if fits else settled(context, x, 0)


def aligned(context: Context, *values: Fixed) -> list[Fixed]:
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


def encoded_public(context: Context, value: Any, scale_bits: int, infinite: bool = False) -> torch.Tensor:
    """A public number or tensor as ring elements.

    Args:
        infinite: whether infinities, and magnitudes from 2^29 on (of an attention mask, say), stand for the largest
            summand that the scale allows, 2^(60 - scale_bits).

    Raises:
        FixedPointRangeError: a value that does not fit, in general or at this scale.
    """
    value = torch.as_tensor(value)
    if infinite and value.is_floating_point() and not value.is_meta:
        end = 2.0 ** (HEADROOM_BITS - 2 - scale_bits)
        endless = value.abs() >= INFINITE
        check_encodable(torch.where(endless, 0.0, value), context.frac_bits, "a public operand")
        value = torch.where(endless, value.sign() * end, value)
    else:
        check_encodable(value, context.frac_bits, "a public operand")
    largest = 0.0 if value.is_meta or not value.numel() else float(value.to(torch.float64).abs().max())
    if largest >= 2.0 ** (HEADROOM_BITS - scale_bits):
        raise FixedPointRangeError(
            f"a public operand reaches magnitude {largest:.6g}, but beside a tensor of {scale_bits} "
            f"fraction bits the range is below {2.0 ** (HEADROOM_BITS - scale_bits):g}"
        )
    return encode(value, scale_bits)


def located_or_public(context: Context, value: Any, scale_bits: int) -> Located | torch.Tensor:
    """A summand that is not shared, as ring elements: located at A for a private one."""
    if isinstance(value, PrivateTensor):
        return value.encoded(scale_bits, context.scheme.activation_limit if context.scheme.range_check else None)
    return encoded_public(context, value, scale_bits, infinite=True)


def shared_operand(context: Context, value: Any, scale_bits: int) -> Fixed:
    """Any operand as shares; one that is not shared becomes A's half, with zero at S. No message."""
    if isinstance(value, SharedTensor):
        return fixed(value)
    net = context.net
    content = located_or_public(context, value, scale_bits)
    device = context.session.device
    at_A = content if type(content) is Located else net.public(net.A, content.to(device))
    at_S = net.public(net.S, torch.zeros((), dtype=torch.int64, device=device)).expand(at_A.shape)
    return Fixed(Shares(at_A, at_S), scale_bits, _largest(context, value, scale_bits))


def _largest(context: Context, value: Any, scale_bits: int) -> float:
    """The bound of a summand that is not shared: of a private one what `encoded` holds it to."""
    if isinstance(value, PrivateTensor):
        return limit_at(context, scale_bits)
    value = torch.as_tensor(value)
    if value.is_meta or not value.numel():
        return limit_at(context, scale_bits)
    largest = float(value.to(torch.float64).abs().max())
    return 2.0 ** (HEADROOM_BITS - 2) if largest >= INFINITE else largest * 2.0**scale_bits + 1


def end_to_end(*parts: torch.Tensor) -> torch.Tensor:
    """The parts one after the other along the first dimension."""
    return torch.cat(parts)


def total(context: Context, x: Any, y: Any, sign: int = 1) -> Fixed:
    """x + sign * y with broadcasting, at the finer of the two scales. No message."""
    if not isinstance(x, SharedTensor):
        negative = Fixed(-y.shares, y.scale_bits, y.bound) if sign < 0 else fixed(y)
        return _plus(context, negative, x)
    if not isinstance(y, SharedTensor):
        return _plus(context, fixed(x), y, sign)
    left, right = aligned(context, fixed(x), fixed(y))
    shares = each(torch.sub if sign < 0 else torch.add, left.shares, right.shares)
    return Fixed(shares, left.scale_bits, both(left.bound, right.bound))


def both(x: float | None, y: float | None) -> float | None:
    """The bound of a sum."""
    return None if x is None or y is None else x + y


def _plus(context: Context, x: Fixed, value: Any, sign: int = 1) -> Fixed:
    """x + sign * value for a value that is not shared: A adds it to its half.

    A small number, as the 1e-8 under a logarithm, would be lost among f fraction bits: x then gets 2 f.
    """
    scale = x.scale_bits
    if isinstance(value, float) and 0 < abs(value) < 2.0 ** (8 - context.frac_bits):
        scale = max(scale, 2 * context.frac_bits)
        x = raised(context, fitted(context, x, CAPACITY / 2.0 ** (scale - x.scale_bits)), scale)
    if scale == 0 and fractional(value):
        scale = context.frac_bits
        x = raised(context, x, scale)
    bound = _largest(context, value, scale)
    if x.bound is not None and x.bound + bound > CAPACITY:
        if CAPACITY - bound < limit_at(context, scale):
            x = settled(context, x, 0)
            scale, bound = x.scale_bits, _largest(context, value, x.scale_bits)
        x = fitted(context, x, CAPACITY - bound)
    content = located_or_public(context, value, scale)
    return Fixed(x.shares - content if sign < 0 else x.shares + content, scale, both(x.bound, bound))


def fractional(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def plus(context: Context, x: Fixed, y: Fixed) -> Fixed:
    """Sum of two handler values."""
    x, y = aligned(context, x, y)
    return Fixed(x.shares + y.shares, x.scale_bits, both(x.bound, y.bound))


def local(context: Context, f: Callable, x: SharedTensor, *public: Any, terms: int = 1) -> Fixed:
    """A linear map that each party applies to its half, and Q to whole numbers of its own.

    Args:
        terms: how many elements one result sums up, with weights of one.
    """
    value, own = fixed(x), x.shares.Q
    if terms > 1 and beyond(value, terms):
        if terms > 8:  # of products, which may be large, with fewer bits, as in `summable`; a few are checked
            over = math.ceil(math.log2(value.bound * terms / CAPACITY))
            value = shortened(context, value, max(min(context.frac_bits, value.scale_bits), value.scale_bits - over))
        value = fitted(context, value, CAPACITY / terms)
    bound = None if value.bound is None else value.bound * max(1, terms)
    shares = each(f, value.shares, *public)
    if own is not None:
        shares = replace(shares, Q=compute(f, own, *public))
    return Fixed(shares, value.scale_bits, bound)


def excess(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """Planes that a comparison of an activation has to look at: 63, or fewer where the limit is taken for granted."""
    if context.scheme.limit_bits is None or context.scheme.range_check:
        return 63  # a range check needs them all
    return min(63, scale_bits + context.scheme.limit_bits + extra)


def require(context: Context, x: Fixed, low: float | None = None, high: float | None = None) -> None:
    """The call's result is withheld, with `RangeExceededError` at Q, unless low <= x < high holds everywhere.

    A comparison for each bound: rounds beside those of the result, not before them.
    """
    if not context.scheme.range_check:
        return
    bounds = [b for b in (low, high) if b is not None]
    x = beside(context, x, *bounds)
    net, thresholds = context.net, tuple(math.ceil(b * 2**x.scale_bits) for b in bounds)
    bits = at_least(net, open_masked(net, x.shares), thresholds, context.scheme.fss)
    if low is not None:
        forbid(context, -bits[0] + 1)
    if high is not None:
        forbid(context, bits[-1])


def refuse(what: str, instead: str) -> None:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")
