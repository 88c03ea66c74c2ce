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
from ..mpc.linear import linear
from ..mpc.multiply import multiply
from ..mpc.shares import Shares, add, add_at_A, each
from ..mpc.truncate import MAX_SHIFT, truncate
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..table import Context, Fixed
from ..tensor import PrivateTensor, SecretTensor, SharedTensor

INFINITE = 2.0**29
SLACK_BITS = 6
"""Fraction bits above f that a factor may carry. They come free from averages; each halves the range of a product."""


def limit_bits(context: Context) -> int:
    """Activations lie below 2^this in magnitude: 56 - 2 f."""
    return 56 - 2 * context.frac_bits


def require(context: Context, x: Fixed, low: float | None = None, high: float | None = None) -> None:
    """Declare that low <= x < high must hold: a value outside makes the call end in RangeExceededError at Q."""


def forbid(context: Context, bad: Shares) -> None:
    """Declare that no element of `bad`, additive shares mod 2^64 of 0 and 1, is 1; otherwise as `require`."""


def fixed(x: SharedTensor) -> Fixed:
    """The content of a SharedTensor as a handler's value."""
    return Fixed(x.shares, x.scale_bits)


def summand(context: Context, value: Any) -> Fixed:
    """Any operand as shares at its own scale: whole numbers carry no fraction bits."""
    return shared_operand(context, value, context.frac_bits if _fractional(value) else 0)


def is_secret(x: Any) -> bool:
    return isinstance(x, SecretTensor)


def raised(context: Context, x: Fixed, scale_bits: int) -> Fixed:
    """The same value with more fraction bits: a local shift to the left."""
    bits = scale_bits - x.scale_bits
    return x if bits == 0 else Fixed(each(context.net, lambda v: v << bits, x.shares), scale_bits)


def shortened(context: Context, x: Fixed, scale_bits: int) -> Fixed:
    """The value rounded to at most `scale_bits` fraction bits."""
    while x.scale_bits > scale_bits:
        shift = min(MAX_SHIFT, x.scale_bits - scale_bits)
        x = Fixed(truncate(context.net, x.shares, shift, context.scheme.fss), x.scale_bits - shift)
    return x


def settled(context: Context, x: Fixed, slack: int = SLACK_BITS) -> Fixed:
    """The value ready to be a factor: truncated to f fraction bits unless it has at most `slack` more."""
    while x.scale_bits - context.frac_bits > slack:
        shift = excess(context, x.scale_bits)
        x = Fixed(truncate(context.net, x.shares, shift, context.scheme.fss), x.scale_bits - shift)
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
        return value.encoded(scale_bits)
    return encoded_public(context, value, scale_bits, infinite=True)


def shared_operand(context: Context, value: Any, scale_bits: int) -> Fixed:
    """Any operand as shares; one that is not shared becomes A's half, with zero at S. No message."""
    if isinstance(value, SharedTensor):
        return fixed(value)
    net = context.net
    content = located_or_public(context, value, scale_bits)
    at_A = net.locally(net.A, lambda v: v, content)
    shape = at_A.shape
    return Fixed(Shares(at_A, zeros_at_S(context, shape)), scale_bits)


def zeros_at_S(context: Context, shape: torch.Size) -> Located:
    """S's half of a value that A holds alone."""
    net = context.net
    return net.locally(net.S, torch.zeros_like, net.own(net.S, torch.zeros(shape, dtype=torch.int64), Phase.SETUP))


def total(context: Context, x: Any, y: Any, sign: int = 1) -> Fixed:
    """x + sign * y with broadcasting, at the finer of the two scales. No message."""
    net = context.net
    if not isinstance(x, SharedTensor):
        negative = Fixed(each(net, torch.neg, y.shares), y.scale_bits) if sign < 0 else fixed(y)
        return _plus(context, negative, x)
    if not isinstance(y, SharedTensor):
        return _plus(context, fixed(x), y, sign)
    left, right = aligned(context, fixed(x), fixed(y))
    return Fixed(each(net, torch.sub if sign < 0 else torch.add, left.shares, right.shares), left.scale_bits)


def _plus(context: Context, x: Fixed, value: Any, sign: int = 1) -> Fixed:
    """x + sign * value for a value that is not shared: A adds it to its half.

    A small number, as the 1e-8 under a logarithm, would be lost among f fraction bits: x then gets 2 f.
    """
    scale = x.scale_bits
    if isinstance(value, float) and 0 < abs(value) < 2.0 ** (8 - context.frac_bits):
        scale = max(scale, 2 * context.frac_bits)
        x = raised(context, x, scale)
    if scale == 0 and _fractional(value):
        scale = context.frac_bits
        x = raised(context, x, scale)
    content = located_or_public(context, value, scale)
    if sign < 0:
        content = context.setup.locally(context.party, torch.neg, content) if type(content) is Located else -content
    return Fixed(add_at_A(context.net, x.shares, content), scale)


def _fractional(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def bilinear(context: Context, product: Callable, x: Any, y: Any) -> Fixed:
    """product(x, y) for a map that is linear in both, where at least one operand is shared.

    A shared and a private operand run Pi_Matmul, two shared ones the masked multiplication, a public one no message.
    `product` is called as product(x, y); for a private x the roles are exchanged.
    """
    if not isinstance(x, SharedTensor):
        if not isinstance(y, SharedTensor):
            refuse("a secret summand to a product without one", "add it to the product's result")
        return bilinear(context, lambda b, a, *_: product(a, b), y, x)
    net = context.net
    if isinstance(y, SharedTensor):
        left, right = settled(context, fixed(x)), settled(context, fixed(y))
        if left.scale_bits + right.scale_bits > 2 * context.frac_bits + SLACK_BITS:
            left, right = settled(context, left, 0), settled(context, right, 0)
        return Fixed(multiply(net, product, left.shares, right.shares), left.scale_bits + right.scale_bits)
    if isinstance(y, PrivateTensor):
        left = settled(context, fixed(x))
        accepts_tiles = hasattr(product, "tiled")
        run = product if accepts_tiles else lambda a, w, _tiles: product(a, w)
        shares = linear(net, context.setup, run, left.shares, y.weight())
        return Fixed(shares, left.scale_bits + y.weight_bits)
    return _times_public(context, product, fixed(x), y)


def _times_public(context: Context, product: Callable, x: Fixed, value: Any) -> Fixed:
    """Times a public operand: local. Powers of two and whole numbers cost no fraction bits.

    A fraction keeps f significant bits if it is small, and fewer fraction bits if it is large: its error grows with
    what it scales, and its product with any activation stays in the ring.
    """
    net, f = context.net, context.frac_bits
    if isinstance(value, numbers.Real) and value != 0 and math.frexp(abs(value))[0] == 0.5:
        check_encodable(torch.tensor(float(value)), f, "a public operand")
        return _times_power_of_two(context, x, math.frexp(abs(value))[1] - 1, value < 0)
    check_encodable(torch.as_tensor(value), f, "a public operand")
    if not _fractional(value) or (isinstance(value, float) and value == int(value)):
        weight = encoded_public(context, value if isinstance(value, torch.Tensor) else int(value), 0)
        if x.scale_bits + limit_bits(context) + _magnitude(weight) > HEADROOM_BITS:
            x = settled(context, x, 0)
        return Fixed(each(net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits)
    weight = torch.as_tensor(value, dtype=torch.float64)
    size = _magnitude(weight)
    if size > SLACK_BITS and isinstance(value, torch.Tensor):
        small = weight.abs() < 2.0**SLACK_BITS
        x = settled(context, x, 0)
        parts = (torch.where(small, weight, 0.0), f), (torch.where(small, 0.0, weight), f + SLACK_BITS - size)
    else:
        x = settled(context, x)
        room = 2 * f + SLACK_BITS - x.scale_bits
        most = f if isinstance(value, torch.Tensor) else min(f - size, f + SLACK_BITS + MAX_SHIFT - x.scale_bits)
        parts = ((weight, min(max(f, most), room - size) if size > 0 else max(f, most)),)
    results = [_times_encoded(context, product, x, *part) for part in parts]
    return results[0] if len(results) == 1 else plus(context, settled(context, results[0], 0), results[1])


def _times_power_of_two(context: Context, x: Fixed, exponent: int, negative: bool) -> Fixed:
    """x 2^exponent, or the negative of it: fraction bits move as far as they may, and a shift does the rest."""
    shares = each(context.net, torch.neg, x.shares) if negative else x.shares
    moved = max(0, min(exponent, x.scale_bits - context.frac_bits)) if exponent > 0 else exponent
    x = Fixed(shares, x.scale_bits - moved)
    if exponent > moved:
        return Fixed(each(context.net, lambda v: v << (exponent - moved), shares), x.scale_bits)
    return x if x.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, x)


def _times_encoded(context: Context, product: Callable, x: Fixed, weight: torch.Tensor, bits: int) -> Fixed:
    weight = encode(weight, bits)
    result = Fixed(each(context.net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits + bits)
    return result if result.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, result)


def _magnitude(values: torch.Tensor) -> int:
    """The least k with all |v| < 2^k; 0 of no values, and where they are not known."""
    if values.is_meta or not values.numel():
        return 0
    return math.frexp(float(values.to(torch.float64).abs().max()))[1]


def scaled(context: Context, x: Fixed, factor: float) -> Fixed:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)


def plus(context: Context, x: Fixed, y: Fixed) -> Fixed:
    """Sum of two handler values."""
    x, y = aligned(context, x, y)
    return Fixed(add(context.net, x.shares, y.shares), x.scale_bits)


def local(context: Context, f: Callable, x: SharedTensor) -> Fixed:
    """A linear map that each party applies to its half."""
    return Fixed(each(context.net, f, x.shares), x.scale_bits)


def excess(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """Planes that a comparison of an activation has to look at: 63, or fewer where the scheme bounds the values."""
    if context.scheme.value_bits is None:
        return 63
    return min(63, scale_bits + context.scheme.value_bits + extra)


def refuse(what: str, instead: str) -> None:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")
