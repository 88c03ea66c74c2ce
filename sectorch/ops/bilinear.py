"""Products: of two shared values, of a shared and a private one, and by public numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from ..errors import FixedPointRangeError
from ..mpc.linear import linear
from ..mpc.multiply import multiply
from ..mpc.shares import each
from ..ring import check_encodable, encode
from ..table import Context, Fixed
from ..tensor import PrivateTensor, SharedTensor
from .common import SLACK_BITS, encoded_public, fixed, fractional, refuse, settled
from .ranges import CAPACITY, ROOM, beyond, fitted, limit_at

MAX_FACTOR_BITS = 10
Sums = Callable[[torch.Tensor], torch.Tensor]
"""Of the magnitudes of a product's second operand: what they sum to for each output, where the first is one
everywhere."""


def bilinear(
    context: Context,
    product: Callable,
    x: Any,
    y: Any,
    terms: int = 1,
    sums: tuple[Sums, Sums] = (torch.abs, torch.abs),
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
            x = fitted(context, settled(context, x) if beyond(x, 2.0**exponent) else x, CAPACITY / 2.0**exponent)
        shares = x.shares if value > 0 else each(net, torch.neg, x.shares)
        if exponent <= 0:
            finer = Fixed(shares, x.scale_bits - exponent, x.bound)
            return finer if finer.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, finer)
        bound = None if x.bound is None else x.bound * 2.0**exponent
        return Fixed(each(net, lambda v: v << exponent, shares), x.scale_bits, bound)
    factor = torch.as_tensor(value)
    factor = factor.to(torch.float64) if not factor.is_meta else factor
    largest = 1.0 if factor.is_meta or not factor.numel() else float(sums(factor.abs()).max())
    if not fractional(value):
        weight = encoded_public(context, value, 0)
        x = fitted(context, settled(context, x) if beyond(x, largest) else x, CAPACITY / max(1.0, largest))
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


def scaled(context: Context, x: Fixed, factor: float) -> Fixed:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)
