"""What handlers share: operands of four kinds, fraction bits, and products.

An operand is a SharedTensor, a PrivateTensor of the answering party, a plain tensor, or a Python number.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import replace
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

MAX_FACTOR_BITS = 10
INFINITE = 2.0**29
SLACK_BITS = 6
"""Fraction bits above f that a factor may carry. They come free from averages; each halves the range of a product."""


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
    """x + sign * value for a value that is not shared: A adds it to its half."""
    scale = x.scale_bits
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
    """Times a public operand: local. Powers of two and integers cost no fraction bits."""
    net = context.net
    if isinstance(value, numbers.Real) and value != 0 and math.frexp(abs(value))[0] == 0.5:
        check_encodable(torch.tensor(float(value)), context.frac_bits, "a public operand")
        exponent = math.frexp(abs(value))[1] - 1
        shares = x.shares if value > 0 else each(net, torch.neg, x.shares)
        if exponent <= 0:
            finer = Fixed(shares, x.scale_bits - exponent)
            return finer if finer.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, finer)
        return Fixed(each(net, lambda v: v << exponent, shares), x.scale_bits)
    if not _fractional(value):
        weight = encoded_public(context, value, 0)
        return Fixed(each(net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits)
    x = settled(context, x)
    bits = context.frac_bits
    if not isinstance(value, torch.Tensor):
        # A small factor keeps f significant bits: its error would otherwise grow with what it scales.
        bits += min(MAX_FACTOR_BITS, max(0, -math.frexp(float(value))[1]))
    weight = encode(torch.as_tensor(value, dtype=torch.float64), bits)
    check_encodable(torch.as_tensor(value), context.frac_bits, "a public operand")
    result = Fixed(each(net, lambda v: product(v, weight.to(v.device)), x.shares), x.scale_bits + bits)
    return result if result.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, result)


def scaled(context: Context, x: Fixed, factor: float) -> Fixed:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)


def plus(context: Context, x: Fixed, y: Fixed) -> Fixed:
    """Sum of two handler values."""
    x, y = aligned(context, x, y)
    return Fixed(add(context.net, x.shares, y.shares), x.scale_bits)


def local(context: Context, f: Callable, x: SharedTensor) -> Fixed:
    """A linear map that each party applies to its half, and Q to whole numbers of its own."""
    shares = each(context.net, f, x.shares)
    if x.shares.Q is not None:
        shares = replace(shares, Q=context.net.locally(context.net.Q, f, x.shares.Q))
    return Fixed(shares, x.scale_bits)


def excess(context: Context, scale_bits: int) -> int:
    """Fraction bits above f, which a non-linear step drops at no cost: at most what one truncation can."""
    return min(MAX_SHIFT, max(0, scale_bits - context.frac_bits))


def bound(context: Context, scale_bits: int, extra: int = 0) -> int:
    """Planes that a comparison of an activation has to look at: 63, or fewer where the scheme bounds the values."""
    if context.scheme.value_bits is None:
        return 63
    return min(63, scale_bits + context.scheme.value_bits + extra)


def require(context: Context, x: Fixed, low: float | None = None, high: float | None = None) -> None:
    """The call's result is withheld unless low <= x < high holds everywhere."""


def refuse(what: str, instead: str) -> None:
    """Raise for an argument that a supported operation does not take."""
    raise UnsupportedOpError(f"{what} is not supported on secret tensors; {instead}")
