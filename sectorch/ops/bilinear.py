"""Products: of two shared values, of a shared and a private one, and by public numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..backend import MAX_SHIFT
from ..choreography import Located, leaf
from ..errors import ArgumentError, FixedPointRangeError
from ..ring import HEADROOM_BITS, check_encodable, encode
from ..ring.products import Tiled
from ..ring.scheme import NEEDS, Need, Scheme
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import Context
from .common import (
    SLACK_BITS,
    both,
    encoded_public,
    fractional,
    note_vanished,
    plus,
    refuse,
    settled,
    settled_bits,
    shortened,
)
from .ranges import CAPACITY, ROOM, beyond, domain_bits, fitted, limit_at

LONGEST = 2.0**39
"""What factors of this magnitude have for a product shows with fewer bits of one whether it stays in the ring."""

Sums = Callable[[torch.Tensor], torch.Tensor]
"""Of the magnitudes of a product's second operand: what they sum to for each output, where the first is one
everywhere."""


def _unprepared(product: Callable, x: torch.Tensor, w: torch.Tensor, _made: None) -> torch.Tensor:
    return product(x, w)


def _swapped(product: Callable, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return product(x, y)


def bilinear(
    context: Context,
    product: Callable,
    x: Any,
    y: Any,
    terms: int = 1,
    sums: tuple[Sums, Sums] = (torch.abs, torch.abs),
    fine: bool = False,
) -> SharedTensor:
    """product(x, y) for a map that is linear in both, where at least one operand is shared.

    A shared and a private operand run Pi_Matmul, two shared ones the masked multiplication, a public one no message.
    `product` is called as product(x, y); for a private x the roles are exchanged.

    Args:
        terms: products that one output sums up.
        sums: for x and for y as the operand that is not shared: at least the largest sum of its magnitudes that enters
            one output.
        fine: multiply with 2 f fraction bits of a private operand, in two words of f. It takes another product with
            the same opened operand, and a truncation.
    """
    if not isinstance(x, SharedTensor):
        if not isinstance(y, SharedTensor):
            refuse("a secret summand to a product without one", "add it to the product's result")
        return bilinear(context, partial(_swapped, product), y, x, terms, (sums[1], sums[0]), fine)
    backend = context.backend
    if isinstance(y, SharedTensor):
        most = _shares_of_range(context, x, y, terms)
        left, right = settled(context, x, most=most[0]), settled(context, y, most=most[1])
        if left.scale_bits + right.scale_bits > 2 * context.frac_bits + SLACK_BITS:
            left, right = settled(context, left, 0), settled(context, right, 0)
        left, right = _factors(context, left, right, terms, most)
        bound = None if left.bound is None or right.bound is None else terms * left.bound * right.bound
        if bound is not None and terms == 1 and bound > CAPACITY:
            return _checked_product(context, product, left, right)
        shares = backend.multiply(product, left.shares, right.shares)
        return left.like(shares, left.scale_bits + right.scale_bits, bound)
    if isinstance(y, PrivateTensor):
        left = settled(context, x)
        gain = 2.0**y.weight_bits * context.scheme.gain
        if left.bound is not None and min(left.bound, limit_at(context, left.scale_bits)) * gain > CAPACITY:
            left = settled(context, left, 0)  # fraction bits above f would take the range away
        left = fitted(context, left, limit_at(context, left.scale_bits) * ROOM)
        if left.bound is not None and context.scheme.range_check:
            context.net.rely(check_sums(y, sums[1]))
        run = product if isinstance(product, Tiled) else partial(_unprepared, product)
        bits, below = y.weight_bits, None
        if fine and bits:
            high = torch.round(y * 2.0**bits) * 2.0**-bits
            y, below = high, (y - high) * 2.0**bits
        shares = backend.linear(run, left.shares, y.weight())
        bound = None if left.bound is None else left.bound * gain
        if isinstance(below, PrivateTensor):  # half a last place at most
            most = None if left.bound is None else left.bound * 2.0 ** (bits - 1) * terms
            rest = left.like(backend.linear(run, left.shares, below.weight()), left.scale_bits + bits, most)
            rest = shortened(context, rest, left.scale_bits)
            shares, bound = shares + rest.shares, both(bound, rest.bound)
        return left.like(shares, left.scale_bits + y.weight_bits, bound)
    return _times_public(context, product, x, y, sums[1])


def _shares_of_range(
    context: Context, x: SharedTensor, y: SharedTensor, terms: int
) -> tuple[float | None, float | None]:
    """What two factors may be in magnitude so that the sum of so many products stays in the ring; None for one that
    only needs to be below the activation limit. A single product is checked itself."""
    if x.bound is None or y.bound is None or terms <= 1:
        return None, None
    f, limit = context.frac_bits, context.scheme.activation_limit
    scales = [v.scale_bits if v.scale_bits <= f + SLACK_BITS else f for v in (x, y)]
    # What is truncated may grow by an element, or two in two steps.
    grown = [2.0 ** (1 - scale) if v.scale_bits != scale else 0.0 for v, scale in zip((x, y), scales, strict=True)]
    bounds = (x.bound / 2.0**x.scale_bits, y.bound / 2.0**y.scale_bits)
    sizes = [min(most + more, limit) for most, more in zip(bounds, grown, strict=True)]
    product = CAPACITY / terms / 2.0 ** sum(scales)
    if sizes[0] * sizes[1] <= product:
        return None, None
    half = math.sqrt(product)
    if min(sizes) > half:
        return half, half
    other = product / min(sizes)
    return (None, other) if sizes[0] <= sizes[1] else (other, None)


def _factors(
    context: Context, x: SharedTensor, y: SharedTensor, terms: int, most: tuple[float | None, float | None]
) -> tuple[SharedTensor, SharedTensor]:
    """Two settled factors; where their products may leave the ring, each is below the activation limit, or `most`."""
    if x.bound is None or y.bound is None or terms * x.bound * y.bound <= CAPACITY:
        return x, y
    limit = context.scheme.activation_limit
    left, right = (limit if m is None else m for m in most)
    return fitted(context, x, left * 2.0**x.scale_bits), fitted(context, y, right * 2.0**y.scale_bits)


def _checked_product(context: Context, product: Callable, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """The product of two factors that may be beyond the ring, though neither is beyond the activation limit.

    One factor with fewer bits, times the other, stays in the ring, and shows beside the product how large that is. No
    step of the result waits for it.
    """
    backend, scale = context.backend, x.scale_bits + y.scale_bits
    sizes = _known(x), _known(y)
    if max(sizes) * math.sqrt(min(sizes)) > CAPACITY / 4:  # the fewer bits would be too few
        x, y = (fitted(context, v, LONGEST) for v in (x, y))
    over = 1 + math.ceil(math.log2(_known(x) * _known(y) / CAPACITY))
    shortens_x = x.shares.shape.numel() < y.shares.shape.numel()
    long, short = (y, x) if shortens_x else (x, y)
    coarse = shortened(context, short, short.scale_bits - over)
    result = backend.multiply(product, x.shares, y.shares)
    left, right = (coarse, y) if shortens_x else (x, coarse)
    probe = backend.multiply(product, left.shares, right.shares)
    size = _known(long)
    probe = fitted(context, x.like(probe, scale - over, size * _known(coarse)), CAPACITY / 2.0**over - size)
    return x.like(result, scale, 2.0**over * (_known(probe) + size))


def _known(x: SharedTensor) -> float:
    """The bound of a factor of `_checked_product`, which checks none that is vouched for."""
    if x.bound is None:
        raise ArgumentError("a product is checked for factors that have a bound")
    return x.bound


def check_sums(weight: PrivateTensor, sums: Sums) -> Located:
    """The owner's check, once a weight, that no sum of products with it leaves the ring; gives nothing to compute with.

    Raises:
        FixedPointRangeError: at the owner, naming the weight and what it may sum to.
    """
    setup, how = weight.session.setup(weight.party), ("sums", sums)
    with setup.lock:
        if how not in weight.derived:
            checked = setup.check(weight.party, _checked_sums, weight.value, sums, weight.scheme, weight.label)
            weight.derived[how] = checked
    return weight.derived[how]


@leaf(shapes=lambda value, *_: value.new_zeros(()))
def _checked_sums(value: torch.Tensor, sums: Sums, scheme: Scheme, label: str) -> torch.Tensor:
    largest = float(sums(value.abs().to(torch.float64)).max()) if value.numel() else 0.0
    need, noted = Need(label, total=largest), NEEDS.get()
    if noted is not None:
        noted.append(need)
    elif largest > scheme.gain:
        error = FixedPointRangeError(
            f"{label}: the weights of one output sum to magnitude {largest:.4g}, and with activations up to "
            f"{scheme.activation_limit:g} at {scheme.frac_bits} fraction bits they may sum to {scheme.gain:.4g}; "
            f"{scheme.way_out([need])}"
        )
        error.needs = (need,)
        raise error
    return value.new_zeros(())


def _exponent(value: Any) -> int | None:
    """e of a number that is 2^e or -2^e; None of anything else."""
    if isinstance(value, numbers.Real) and value != 0:
        mantissa, exponent = math.frexp(abs(value))
        return exponent - 1 if mantissa == 0.5 else None
    return None


def _times_public(
    context: Context, product: Callable, x: SharedTensor, value: Any, sums: Sums = torch.abs
) -> SharedTensor:
    """Times a public operand: local. Powers of two and whole numbers cost no fraction bits.

    A fraction keeps f significant bits if it is small, and fewer fraction bits if it is large: its error grows with
    what it scales, and its product with any activation stays in the ring.
    """
    f = context.frac_bits
    exponent = _exponent(value)
    if exponent is not None:
        check_encodable(torch.tensor(float(value)), f, "a public operand")
        return _times_power_of_two(context, x, exponent, value < 0)
    check_encodable(torch.as_tensor(value), f, "a public operand")
    if not fractional(value) or (isinstance(value, float) and value == int(value)):
        weight = encoded_public(context, value if isinstance(value, torch.Tensor) else int(value), 0)
        if x.bound is None and x.scale_bits + domain_bits(context) + _magnitude(weight) > HEADROOM_BITS:
            x = settled(context, x, 0)
        return times_encoded(context, product, x, weight, 0, sums)
    weight = torch.as_tensor(value, dtype=torch.float64)
    size = _magnitude(weight)
    if size > SLACK_BITS and isinstance(value, torch.Tensor):
        small = weight.abs() < 2.0**SLACK_BITS
        x = settled(context, x, 0)
        parts = (torch.where(small, weight, 0.0), f), (torch.where(small, 0.0, weight), f + SLACK_BITS - size)
    else:
        scale = settled_bits(context, x.scale_bits)
        room = 2 * f + SLACK_BITS - scale
        summed = sums is not torch.abs  # of several products: more bits would take from the range of each
        most = f if summed else min(f - size, f + SLACK_BITS + MAX_SHIFT - scale)
        bits = min(max(f, most), room - size) if size > 0 else max(f, most)
        parts = ((weight, bits),)
        x = settled(context, x, most=CAPACITY / _largest(weight, sums) / 2.0 ** (scale + bits))
    if len(parts) == 1:
        note_vanished(weight, parts[0][1])
    results = [times_encoded(context, product, x, encode(part, bits), bits, sums) for part, bits in parts]
    results = [r if r.scale_bits <= 2 * f + SLACK_BITS else settled(context, r) for r in results]
    return results[0] if len(results) == 1 else plus(context, settled(context, results[0], 0), results[1])


def _times_power_of_two(context: Context, x: SharedTensor, exponent: int, negative: bool) -> SharedTensor:
    """x 2^exponent, or the negative of it: fraction bits move as far as they may, and a shift does the rest."""
    shares = -x.shares if negative else x.shares
    moved = max(0, min(exponent, x.scale_bits - context.frac_bits)) if exponent > 0 else exponent
    x, rest = x.like(shares, x.scale_bits - moved, x.bound), exponent - moved
    if rest > 0:
        x = fitted(context, x, CAPACITY / 2.0**rest)
        bound = None if x.bound is None else x.bound * 2.0**rest
        return x.like(x.shares << rest, x.scale_bits, bound)
    return x if x.scale_bits <= 2 * context.frac_bits + SLACK_BITS else settled(context, x)


def times_encoded(
    context: Context, product: Callable, x: SharedTensor, weight: torch.Tensor, bits: int, sums: Sums
) -> SharedTensor:
    """x times ring elements of so many fraction bits."""
    largest = _largest(weight, sums)
    if beyond(x, largest):
        x = settled(context, x, SLACK_BITS, CAPACITY / largest / 2.0**context.frac_bits)
    x = fitted(context, x, CAPACITY / max(1.0, largest))
    bound = None if x.bound is None else x.bound * largest
    shares = context.backend.each(product, x.shares, weight.to(context.session.device))
    return x.like(shares, x.scale_bits + bits, bound)


def _largest(weight: torch.Tensor, sums: Sums) -> float:
    """What the magnitudes of the factors of one output sum to at most; 1 of none, and where they are not known."""
    known = not weight.is_meta and weight.numel()
    return (float(sums(weight.detach().to(torch.float64).abs()).max()) or 1.0) if known else 1.0


def _magnitude(values: torch.Tensor) -> int:
    """The least k with all |v| < 2^k; 0 of no values, and where they are not known."""
    if values.is_meta or not values.numel():
        return 0
    return math.frexp(float(values.detach().to(torch.float64).abs().max()))[1]


def scaled(context: Context, x: SharedTensor, factor: float) -> SharedTensor:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)
