"""What handlers share: operands of four kinds, fraction bits, and products.

An operand is a SharedTensor, a PrivateTensor of the answering party, a plain tensor, or a Python number.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from ..choreography import Located, Phase
from ..errors import FixedPointRangeError, UnsupportedOpError
from ..mpc.guard import flags_of_bits, raise_flags
from ..mpc.linear import linear
from ..mpc.mask import open_masked
from ..mpc.multiply import multiply
from ..mpc.shares import Shares, add, add_at_A, each
from ..mpc.sign import at_least
from ..mpc.truncate import MAX_SHIFT, truncate
from ..mpc.within import raise_outside
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..table import Context, Fixed
from ..tensor import PrivateTensor, SecretTensor, SharedTensor

MAX_FACTOR_BITS = 10
INFINITE = 2.0**29
SLACK_BITS = 6
"""Fraction bits above f that a factor may carry. They come free from averages; each halves the range of a product."""


CAPACITY = 2.0**HEADROOM_BITS
"""What every element is below in magnitude: protocols are exact for such."""


ROOM = 129 / 128
"""What a value that was checked may have grown by before it is checked again; `Scheme.gain` leaves room for it."""


def fixed(x: SharedTensor) -> Fixed:
    """The content of a SharedTensor as a handler's value."""
    return Fixed(x.shares, x.scale_bits, x.bound)


def limit_at(context: Context, scale_bits: int) -> float:
    """The activation limit as a whole number of the ring, at so many fraction bits."""
    return 2.0 ** (context.scheme.activation_bits + scale_bits)


def limit_bits(context: Context, x: Fixed, scale_bits: int, most: float = math.inf) -> int | None:
    """For protocols that bring x to so many fraction bits: the bits that it must fit, or None if it is sure to.

    Without range checks, and for values that their handler vouches for, nothing is checked.

    Args:
        most: what x must be below in magnitude, if that is less than the activation limit.
    """
    if x.bound is None or not context.scheme.range_check:
        return None
    bits = _bits(context, most) + scale_bits
    return bits if x.bound * 2.0 ** (scale_bits - x.scale_bits) > 2.0**bits else None


def _bits(context: Context, most: float) -> int:
    return min(context.scheme.activation_bits, math.floor(math.log2(most)) if most < math.inf else 64)


def dropped(context: Context, x: Fixed, shift: int, most: float = math.inf) -> float | None:
    """The bound of x with so many fraction bits less, after the check that `limit_bits` asks for."""
    if x.bound is None:
        return None
    smaller = x.bound / 2.0**shift + 1
    return min(smaller, 2.0 ** (_bits(context, most) + x.scale_bits - shift)) if context.scheme.range_check else smaller


def fitted(context: Context, x: Fixed, allowed: float) -> Fixed:
    """x, of which every element is below `allowed` (of the ring) in magnitude: by its bound, or by a check.

    Raises:
        FixedPointRangeError: hardly any value would be: the product or sum is too large for the number representation.
    """
    if x.bound is None or x.bound <= allowed or not context.scheme.range_check:
        return x
    bits = math.floor(math.log2(allowed)) if allowed >= 1 else 0
    if bits <= x.scale_bits - context.frac_bits + 1:
        raise FixedPointRangeError(
            f"a sum or product here leaves the range for any operand of magnitude {2.0 ** (bits - x.scale_bits):.3g}; "
            f"scale the operands down first, or use fewer than {context.frac_bits} fraction bits"
        )
    net = context.net
    masked = open_masked(net, x.shares)
    raise_outside(net, masked, masked.c, bits, fss=context.scheme.fss)
    return Fixed(x.shares, x.scale_bits, 2.0**bits)


def summand(context: Context, value: Any) -> Fixed:
    """Any operand as shares at its own scale: whole numbers carry no fraction bits."""
    return shared_operand(context, value, context.frac_bits if _fractional(value) else 0)


def is_secret(x: Any) -> bool:
    return isinstance(x, SecretTensor)


def raised(context: Context, x: Fixed, scale_bits: int) -> Fixed:
    """The same value with more fraction bits: a local shift to the left."""
    bits = scale_bits - x.scale_bits
    if bits == 0:
        return x
    bound = None if x.bound is None else x.bound * 2.0**bits
    return Fixed(each(context.net, lambda v: v << bits, x.shares), scale_bits, bound)


def settled(context: Context, x: Fixed, slack: int = SLACK_BITS, most: float = math.inf) -> Fixed:
    """The value ready to be a factor: truncated to f fraction bits unless it has at most `slack` more.

    What is truncated is checked beside that to be below the activation limit, and `most`.
    """
    while x.scale_bits - context.frac_bits > slack:
        shift = excess(context, x.scale_bits)
        limit = limit_bits(context, x, x.scale_bits - shift, most)
        shares = truncate(context.net, x.shares, shift, context.scheme.fss, limit)
        x = Fixed(shares, x.scale_bits - shift, dropped(context, x, shift, most))
    return x


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
    at_A = net.locally(net.A, lambda v: v, content)
    shape = at_A.shape
    return Fixed(Shares(at_A, zeros_at_S(context, shape)), scale_bits, _largest(context, value, scale_bits))


def _largest(context: Context, value: Any, scale_bits: int) -> float:
    """The bound of a summand that is not shared: of a private one what `encoded` holds it to."""
    if isinstance(value, PrivateTensor):
        return limit_at(context, scale_bits)
    value = torch.as_tensor(value)
    if value.is_meta or not value.numel():
        return limit_at(context, scale_bits)
    largest = float(value.to(torch.float64).abs().max())
    return 2.0 ** (HEADROOM_BITS - 2) if largest >= INFINITE else largest * 2.0**scale_bits + 1


def zeros_at_S(context: Context, shape: torch.Size) -> Located:
    """S's half of a value that A holds alone."""
    net = context.net
    return net.locally(net.S, torch.zeros_like, net.own(net.S, torch.zeros(shape, dtype=torch.int64), Phase.SETUP))


def total(context: Context, x: Any, y: Any, sign: int = 1) -> Fixed:
    """x + sign * y with broadcasting, at the finer of the two scales. No message."""
    net = context.net
    if not isinstance(x, SharedTensor):
        negative = Fixed(each(net, torch.neg, y.shares), y.scale_bits, y.bound) if sign < 0 else fixed(y)
        return _plus(context, negative, x)
    if not isinstance(y, SharedTensor):
        return _plus(context, fixed(x), y, sign)
    left, right = aligned(context, fixed(x), fixed(y))
    shares = each(net, torch.sub if sign < 0 else torch.add, left.shares, right.shares)
    return Fixed(shares, left.scale_bits, both(left.bound, right.bound))


def both(x: float | None, y: float | None) -> float | None:
    """The bound of a sum."""
    return None if x is None or y is None else x + y


def _plus(context: Context, x: Fixed, value: Any, sign: int = 1) -> Fixed:
    """x + sign * value for a value that is not shared: A adds it to its half."""
    scale = x.scale_bits
    if scale == 0 and _fractional(value):
        scale = context.frac_bits
        x = raised(context, x, scale)
    bound = _largest(context, value, scale)
    if x.bound is not None and x.bound + bound > CAPACITY:
        x = settled(context, x, 0)
        scale, bound = x.scale_bits, _largest(context, value, x.scale_bits)
        x = fitted(context, x, CAPACITY - bound)
    content = located_or_public(context, value, scale)
    if sign < 0:
        content = context.setup.locally(context.party, torch.neg, content) if type(content) is Located else -content
    return Fixed(add_at_A(context.net, x.shares, content), scale, both(x.bound, bound))


def _fractional(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


Sums = Callable[[torch.Tensor], torch.Tensor]
"""Of the magnitudes of a product's second operand: what they sum to for each output, where the first is one
everywhere."""


def bilinear(
    context: Context, product: Callable, x: Any, y: Any, terms: int = 1, sums: tuple[Sums, Sums] = (torch.abs, torch.abs)
) -> Fixed:
    """product(x, y) for a map that is linear in both, where at least one operand is shared.

    A shared and a private operand run Pi_Matmul, two shared ones the masked multiplication, a public one no message.
    `product` is called as product(x, y); for a private x the roles are exchanged.

    Args:
        terms: products that one output sums up.
        sums: for x and for y as the operand that is not shared: at least the largest sum of its magnitudes that enters
            one output.
    """
    if not isinstance(x, SharedTensor):
        if not isinstance(y, SharedTensor):
            refuse("a secret summand to a product without one", "add it to the product's result")
        return bilinear(context, lambda b, a, *_: product(a, b), y, x, terms, sums[::-1])
    net = context.net
    if isinstance(y, SharedTensor):
        left, right = fixed(x), fixed(y)
        most = _shares_of_range(context, left, right, terms)
        left, right = settled(context, left, most=most[0]), settled(context, right, most=most[1])
        if left.scale_bits + right.scale_bits > 2 * context.frac_bits + SLACK_BITS:
            left, right = settled(context, left, 0), settled(context, right, 0)
        left, right = _factors(context, left, right, terms)
        known = left.bound is not None and right.bound is not None
        bound = terms * left.bound * right.bound if known else None
        return Fixed(multiply(net, product, left.shares, right.shares), left.scale_bits + right.scale_bits, bound)
    if isinstance(y, PrivateTensor):
        left = settled(context, fixed(x))
        left = fitted(context, left, limit_at(context, left.scale_bits) * ROOM)
        if left.bound is not None:
            _check_sums(context, y, sums[1])
        accepts_tiles = hasattr(product, "tiled")
        run = product if accepts_tiles else lambda a, w, _tiles: product(a, w)
        shares = linear(net, context.setup, run, left.shares, y.weight())
        bound = None if left.bound is None else left.bound * 2.0**y.weight_bits * context.scheme.gain
        return Fixed(shares, left.scale_bits + y.weight_bits, bound)
    return _times_public(context, product, fixed(x), y, sums[1])


def _shares_of_range(context: Context, x: Fixed, y: Fixed, terms: int) -> tuple[float, float]:
    """What two factors may be in magnitude so that the sum of so many products stays in the ring; infinite for one
    that surely is."""
    if x.bound is None or y.bound is None:
        return math.inf, math.inf
    f, limit = context.frac_bits, context.scheme.activation_limit
    scales = [v.scale_bits if v.scale_bits <= f + SLACK_BITS else f for v in (x, y)]
    sizes = [min(v.bound / 2.0**v.scale_bits, limit) for v in (x, y)]
    product = CAPACITY / terms / 2.0 ** sum(scales)
    if sizes[0] * sizes[1] <= product:
        return math.inf, math.inf
    half = math.sqrt(product)
    if min(sizes) > half:
        return half, half
    other = product / min(sizes)
    return (math.inf, other) if sizes[0] <= sizes[1] else (other, math.inf)


def _factors(context: Context, x: Fixed, y: Fixed, terms: int) -> tuple[Fixed, Fixed]:
    """Two settled factors whose sum of so many products stays in the ring: what is not sure to is checked."""
    if x.bound is None or y.bound is None or terms * x.bound * y.bound <= CAPACITY:
        return x, y
    most = _shares_of_range(context, x, y, terms)
    if most == (math.inf, math.inf):  # below the limit they fit
        most = context.scheme.activation_limit, context.scheme.activation_limit
    return tuple(
        fitted(context, v, min(m, context.scheme.activation_limit) * 2.0**v.scale_bits)
        for v, m in zip((x, y), most, strict=True)
    )


def _check_sums(context: Context, weight: PrivateTensor, sums: Sums) -> None:
    """The owner's check, once a weight, that no sum of products with it leaves the ring.

    Raises:
        FixedPointRangeError: at the owner, naming the weight and what it may sum to.
    """
    if sums in weight.summed or not context.scheme.range_check:
        return
    scheme, allowed = context.scheme, context.scheme.gain

    def check(value: torch.Tensor) -> torch.Tensor:
        largest = 0.0 if value.is_meta or not value.numel() else float(sums(value.abs()).max())
        if largest > allowed:
            bits = 61 - 2 * scheme.frac_bits - math.ceil(math.log2(largest * 64 / 63))
            way = f"activation_limit={2.0**bits:g}" if bits > 0 else "fewer fraction bits"
            raise FixedPointRangeError(
                f"{weight.label}: the weights of one output sum to magnitude {largest:.4g}, and with activations up to "
                f"{scheme.activation_limit:g} at {scheme.frac_bits} fraction bits they may sum to {allowed:.4g}; "
                f"use {way}, or normalise the layer"
            )
        return value.new_zeros(())

    context.setup.locally(context.party, check, weight.value)
    weight.summed.add(sums)


def _times_public(context: Context, product: Callable, x: Fixed, value: Any, sums: Sums = torch.abs) -> Fixed:
    """Times a public operand: local. Powers of two and integers cost no fraction bits."""
    net = context.net
    if isinstance(value, numbers.Real) and value != 0 and math.frexp(abs(value))[0] == 0.5:
        check_encodable(torch.tensor(float(value)), context.frac_bits, "a public operand")
        exponent = math.frexp(abs(value))[1] - 1
        if exponent > 0:
            x = fitted(context, settled(context, x) if _beyond(x, 2.0**exponent) else x, CAPACITY / 2.0**exponent)
        shares = x.shares if value > 0 else each(net, torch.neg, x.shares)
        if exponent <= 0:
            finer = Fixed(shares, x.scale_bits - exponent, x.bound)
            return finer if finer.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, finer)
        bound = None if x.bound is None else x.bound * 2.0**exponent
        return Fixed(each(net, lambda v: v << exponent, shares), x.scale_bits, bound)
    factor = torch.as_tensor(value)
    factor = factor.to(torch.float64) if not factor.is_meta else factor
    largest = 1.0 if factor.is_meta or not factor.numel() else float(sums(factor.abs()).max())
    if not _fractional(value):
        weight = encoded_public(context, value, 0)
        x = fitted(context, settled(context, x) if _beyond(x, largest) else x, CAPACITY / max(1.0, largest))
        bound = None if x.bound is None else x.bound * largest
        return Fixed(each(net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits, bound)
    x = settled(context, x)
    bits = context.frac_bits
    if not isinstance(value, torch.Tensor):
        # A small factor keeps f significant bits: its error would otherwise grow with what it scales.
        bits += min(MAX_FACTOR_BITS, max(0, -math.frexp(float(value))[1]))
    weight = encode(torch.as_tensor(value, dtype=torch.float64), bits)
    check_encodable(torch.as_tensor(value), context.frac_bits, "a public operand")
    grown = (largest + 2.0**-bits) * 2.0**bits
    x = fitted(context, x, CAPACITY / grown)
    bound = None if x.bound is None else x.bound * grown
    result = Fixed(each(net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits + bits, bound)
    return result if result.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, result)


def _beyond(x: Fixed, factor: float) -> bool:
    return x.bound is not None and x.bound * factor > CAPACITY


def scaled(context: Context, x: Fixed, factor: float) -> Fixed:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)


def plus(context: Context, x: Fixed, y: Fixed) -> Fixed:
    """Sum of two handler values."""
    x, y = aligned(context, x, y)
    return Fixed(add(context.net, x.shares, y.shares), x.scale_bits, both(x.bound, y.bound))


def local(context: Context, f: Callable, x: SharedTensor, terms: int = 1) -> Fixed:
    """A linear map that each party applies to its half, whose results sum up so many elements with weights of one."""
    value = fixed(x)
    if terms > 1 and _beyond(value, terms):
        value = fitted(context, settled(context, value, 0), CAPACITY / terms)
    bound = None if value.bound is None else value.bound * max(1, terms)
    return Fixed(each(context.net, f, value.shares), value.scale_bits, bound)


def excess(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """Planes that a comparison of an activation has to look at: 63, or fewer where the scheme bounds the values."""
    if context.scheme.value_bits is None or context.scheme.range_check:
        return 63  # a range check needs them all
    return min(63, scale_bits + context.scheme.value_bits + extra)


def forbid(context: Context, bad: Shares) -> None:
    """The call's result is withheld, with `RangeExceededError` at Q, if one of these is 1.

    Args:
        bad: additive shares of 0 and 1, of any shape. Nobody learns which of them is set; see `mpc/guard.py`.
    """
    if context.scheme.range_check:
        raise_flags(context.net, flags_of_bits(context.net, bad))


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
        forbid(context, add_at_A(net, each(net, lambda v: -v[0], bits), 1))
    if high is not None:
        forbid(context, each(net, lambda v: v[-1], bits))


def refuse(what: str, instead: str) -> None:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")
