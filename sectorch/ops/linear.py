"""Products, of shared values with shared, private and public ones, and the linear layers made of them.

`bilinear` is the one product that all handlers use. It chooses the protocol by who holds the operands.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import MAX_SHIFT
from ..choreography import Located, leaf
from ..config import NEEDS, Scheme, WeightNeed
from ..errors import ArgumentError, DtypeError, FixedPointRangeError, ShapeError
from ..ring import HEADROOM_BITS, check_encodable, encode, products
from ..ring.products import PreparedProduct, kept_letters, letters_of, result_letters
from ..ring.products import einsum as contracted
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import Context, implements, stepwise
from .common import (
    CAPACITY,
    ROOM,
    SLACK_BITS,
    add_values,
    as_factor,
    beyond,
    check_fits,
    domain_bits,
    encoded_public,
    factor_bits,
    fractional,
    limit_at,
    local_map,
    note_vanished,
    refuse,
    round_scale,
    signed_sum,
    sum_bound,
)

T = torch.Tensor
COARSE_LIMIT = 2.0**39
"""Factors below this, in ring elements: fewer bits of one show whether the product stays in the ring."""

Sums = Callable[[torch.Tensor], torch.Tensor]
"""A function of the magnitudes of a product's operand: what they sum to for each output if the other one is 1."""


def without_preparation(product: Callable, x: torch.Tensor, w: torch.Tensor, _made: None) -> torch.Tensor:
    return product(x, w)


def _swap_operands(product: Callable, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return product(x, y)


def bilinear(
    context: Context,
    product: Callable,
    x: Any,
    y: Any,
    terms: int = 1,
    sums: tuple[Sums, Sums] = (torch.abs, torch.abs),
    fine: bool = False,
    most: float = CAPACITY,
) -> SharedTensor:
    """product(x, y) for a map that is linear in both, where at least one operand is shared.

    A shared and a private operand take Pi_Matmul, two shared ones the masked multiplication, and a public operand no
    message.

    Args:
        terms: the number of products that one output sums up.
        sums: for x and for y, where it is not shared: the sums of its magnitudes in one output, or upper bounds.
        fine: whether a private operand has 2 f fraction bits, in two words of f. This costs another product with the
            same opened operand, and a truncation.
        most: the limit of a sum of products of two shared operands, as a ring element.
    """
    if not isinstance(x, SharedTensor):
        if not isinstance(y, SharedTensor):
            refuse("a secret summand to a product without one", "add it to the product's result")
        return bilinear(context, partial(_swap_operands, product), y, x, terms, (sums[1], sums[0]), fine, most)
    backend = context.backend
    if isinstance(y, SharedTensor):
        limits = _factor_limits(context, x, y, terms, most)
        left, right = as_factor(context, x, most=limits[0]), as_factor(context, y, most=limits[1])
        if left.scale_bits + right.scale_bits > 2 * context.frac_bits + SLACK_BITS:
            left, right = as_factor(context, left, 0), as_factor(context, right, 0)
        left, right = _factors(context, left, right, terms, limits, most)
        bound = None if left.bound is None or right.bound is None else terms * left.bound * right.bound
        if bound is not None and terms == 1 and bound > CAPACITY:
            return _checked_product(context, product, left, right)
        shares = backend.multiply(product, left.shares, right.shares)
        return left.like(shares, left.scale_bits + right.scale_bits, bound)
    if isinstance(y, PrivateTensor):
        left = as_factor(context, x)
        gain = 2.0**y.weight_bits * context.scheme.gain
        if left.bound is not None and min(left.bound, limit_at(context, left.scale_bits)) * gain > CAPACITY:
            left = as_factor(context, left, 0)  # fraction bits above f would take the range away
        left = check_fits(context, left, limit_at(context, left.scale_bits) * ROOM)
        if left.bound is not None and context.scheme.range_check:
            context.net.rely(check_sums(y, sums[1]))
        run = product if isinstance(product, PreparedProduct) else partial(without_preparation, product)
        bits, below = y.weight_bits, None
        if fine and bits:
            high = torch.round(y * 2.0**bits) * 2.0**-bits
            y, below = high, (y - high) * 2.0**bits
        shares = backend.linear(run, left.shares, y.weight())
        reach = None if left.bound is None else left.bound * gain
        if isinstance(below, PrivateTensor):  # half a last place at most
            rounded = None if left.bound is None else left.bound * 2.0 ** (bits - 1) * terms
            rest = left.like(backend.linear(run, left.shares, below.weight()), left.scale_bits + bits, rounded)
            rest = round_scale(context, rest, left.scale_bits)
            shares, reach = shares + rest.shares, sum_bound(reach, rest.bound)
        return left.like(shares, left.scale_bits + y.weight_bits, reach)
    return _times_public(context, product, x, y, sums[1])


def _factor_limits(
    context: Context, x: SharedTensor, y: SharedTensor, terms: int, largest: float
) -> tuple[float | None, float | None]:
    """The limits of two factors' magnitudes under which the sum of `terms` products stays below `largest`.

    None for a factor that only has to be below the activation limit. A single product is checked itself.
    """
    if x.bound is None or y.bound is None or terms <= 1:
        return None, None
    f, limit = context.frac_bits, context.scheme.activation_limit
    scales = [v.scale_bits if v.scale_bits <= f + SLACK_BITS else f for v in (x, y)]
    # A truncation may add a ring element, two truncations two.
    grown = [2.0 ** (1 - scale) if v.scale_bits != scale else 0.0 for v, scale in zip((x, y), scales, strict=True)]
    bounds = (x.bound / 2.0**x.scale_bits, y.bound / 2.0**y.scale_bits)
    sizes = [min(most + more, limit) for most, more in zip(bounds, grown, strict=True)]
    product = largest / terms / 2.0 ** sum(scales)
    if sizes[0] * sizes[1] <= product:
        return None, None
    half = math.sqrt(product)
    if min(sizes) > half:  # limits are powers of two: where one bit is left over, the second factor has it
        first = 2.0 ** (math.floor(math.log2(product)) // 2)
        return first, product / first
    other = product / min(sizes)
    return (None, other) if sizes[0] <= sizes[1] else (other, None)


def _factors(
    context: Context,
    x: SharedTensor,
    y: SharedTensor,
    terms: int,
    most: tuple[float | None, float | None],
    largest: float,
) -> tuple[SharedTensor, SharedTensor]:
    """Two factors, held to the activation limit or to `most` if their products could leave the range to `largest`."""
    if x.bound is None or y.bound is None or terms * x.bound * y.bound <= largest:
        return x, y
    limit = context.scheme.activation_limit
    left, right = (limit if m is None else m for m in most)
    return check_fits(context, x, left * 2.0**x.scale_bits), check_fits(context, y, right * 2.0**y.scale_bits)


def _checked_product(context: Context, product: Callable, x: SharedTensor, y: SharedTensor) -> SharedTensor:
    """The product of two factors below the activation limit, whose product may be beyond the ring.

    A second product, with fewer bits of one factor, stays in the ring and shows how large the first one is. The check
    runs beside the result, which does not wait for it.
    """
    backend, scale = context.backend, x.scale_bits + y.scale_bits
    sizes = _checked_bound(x), _checked_bound(y)
    if max(sizes) * math.sqrt(min(sizes)) > CAPACITY / 4:  # the fewer bits would be too few
        x, y = (check_fits(context, v, COARSE_LIMIT) for v in (x, y))
    over = 1 + math.ceil(math.log2(_checked_bound(x) * _checked_bound(y) / CAPACITY))
    shortens_x = x.shares.shape.numel() < y.shares.shape.numel()
    long, short = (y, x) if shortens_x else (x, y)
    coarse = round_scale(context, short, short.scale_bits - over)
    result = backend.multiply(product, x.shares, y.shares)
    left, right = (coarse, y) if shortens_x else (x, coarse)
    probe = backend.multiply(product, left.shares, right.shares)
    size = _checked_bound(long)
    probe = check_fits(context, x.like(probe, scale - over, size * _checked_bound(coarse)), CAPACITY / 2.0**over - size)
    return x.like(result, scale, 2.0**over * (_checked_bound(probe) + size))


def _checked_bound(x: SharedTensor) -> float:
    """The bound of a factor of `_checked_product`, which checks none that is vouched for."""
    if x.bound is None:
        raise ArgumentError("a product is checked for factors that have a bound")
    return x.bound


def check_sums(weight: PrivateTensor, sums: Sums) -> Located:
    """The owner's check, once a weight, that no sum of products with it leaves the ring. The result is a zero.

    Raises:
        FixedPointRangeError: at the owner, naming the weight and the largest sum that it may have.
    """
    setup, how = weight.session.setup(weight.party), ("sums", sums)
    with setup.lock:
        if how not in weight.derived:
            checked = setup.check(weight.party, _check_sums_at_owner, weight.value, sums, weight.scheme, weight.label)
            weight.derived[how] = checked
    return weight.derived[how]


@leaf(shapes=lambda value, *_: value.new_zeros(()))
def _check_sums_at_owner(value: torch.Tensor, sums: Sums, scheme: Scheme, label: str) -> torch.Tensor:
    largest = float(sums(value.to(torch.float64).abs()).max()) if value.numel() else 0.0
    need, noted = WeightNeed(label, total=largest), NEEDS.get()
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
    """e for the numbers 2^e and -2^e; None for any other operand."""
    if isinstance(value, numbers.Real) and value != 0:
        mantissa, exponent = math.frexp(abs(value))
        return exponent - 1 if mantissa == 0.5 else None
    return None


def _times_public(
    context: Context, product: Callable, x: SharedTensor, value: Any, sums: Sums = torch.abs
) -> SharedTensor:
    """x times a public operand. No message. Powers of two and whole numbers cost no fraction bits.

    A small fraction keeps f significant bits. A large one keeps fewer fraction bits, so that its product with any
    activation stays in the ring; its error is relative to the factor.
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
            x = as_factor(context, x, 0)
        return times_encoded(context, product, x, weight, 0, sums)
    weight = torch.as_tensor(value, dtype=torch.float64)
    size = _magnitude(weight)
    if size > SLACK_BITS and isinstance(value, torch.Tensor):
        small = weight.abs() < 2.0**SLACK_BITS
        x = as_factor(context, x, 0)
        parts = (torch.where(small, weight, 0.0), f), (torch.where(small, 0.0, weight), f + SLACK_BITS - size)
    else:
        scale = factor_bits(context, x.scale_bits)
        room = 2 * f + SLACK_BITS - scale
        summed = sums is not torch.abs  # of several products: more bits would take from the range of each
        most = f if summed else min(f - size, f + SLACK_BITS + MAX_SHIFT - scale)
        bits = min(max(f, most), room - size) if size > 0 else max(f, most)
        parts = ((weight, bits),)
        x = as_factor(context, x, most=CAPACITY / _largest(weight, sums) / 2.0 ** (scale + bits))
    if len(parts) == 1:
        note_vanished(weight, parts[0][1])
    results = [times_encoded(context, product, x, encode(part, bits), bits, sums) for part, bits in parts]
    results = [r if r.scale_bits <= 2 * f + SLACK_BITS else as_factor(context, r) for r in results]
    return results[0] if len(results) == 1 else add_values(context, as_factor(context, results[0], 0), results[1])


def _times_power_of_two(context: Context, x: SharedTensor, exponent: int, negative: bool) -> SharedTensor:
    """x 2^exponent or its negative: the scale changes as far as it may, and a shift of the shares does the rest."""
    shares = -x.shares if negative else x.shares
    moved = max(0, min(exponent, x.scale_bits - context.frac_bits)) if exponent > 0 else exponent
    x, rest = x.like(shares, x.scale_bits - moved, x.bound), exponent - moved
    if rest > 0:
        x = check_fits(context, x, CAPACITY / 2.0**rest)
        bound = None if x.bound is None else x.bound * 2.0**rest
        return x.like(x.shares << rest, x.scale_bits, bound)
    return x if x.scale_bits <= 2 * context.frac_bits + SLACK_BITS else as_factor(context, x)


def times_encoded(
    context: Context, product: Callable, x: SharedTensor, weight: torch.Tensor, bits: int, sums: Sums
) -> SharedTensor:
    """x times ring elements of so many fraction bits."""
    largest = _largest(weight, sums)
    if beyond(x, largest):
        x = as_factor(context, x, SLACK_BITS, CAPACITY / largest / 2.0**context.frac_bits)
    x = check_fits(context, x, CAPACITY / max(1.0, largest))
    bound = None if x.bound is None else x.bound * largest
    shares = context.backend.each(product, x.shares, weight.to(context.session.device))
    return x.like(shares, x.scale_bits + bits, bound)


def _largest(weight: torch.Tensor, sums: Sums) -> float:
    """The largest sum of magnitudes in one output; 1 for no entries, and if they are not known."""
    known = not weight.is_meta and weight.numel()
    return (float(sums(weight.detach().to(torch.float64).abs()).max()) or 1.0) if known else 1.0


def _magnitude(values: torch.Tensor) -> int:
    """The least k with all |v| < 2^k; 0 for no values, and if they are not known."""
    if values.is_meta or not values.numel():
        return 0
    return math.frexp(float(values.detach().to(torch.float64).abs().max()))[1]


def times_number(context: Context, x: SharedTensor, factor: float) -> SharedTensor:
    """x times a public number."""
    return _times_public(context, torch.mul, x, factor)


# Layers and matrix products.


def _same_dtype(x: Any, y: Any) -> None:
    if x.dtype != y.dtype:
        raise DtypeError(
            f"expected both operands to have the same dtype, but got {x.dtype} and {y.dtype}; use x.to({y.dtype})"
        )


@implements("matmul", torch.matmul, torch.linalg.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm,
            torch.mv, T.mv, torch.dot, T.dot, torch.vdot, T.vdot, note="1 round for two secrets")  # fmt: skip
def matmul(context: Context, x: Any, y: Any) -> SharedTensor:
    _same_dtype(x, y)
    return bilinear(context, products.matmul, x, y, x.shape[-1], (rows_of, columns_of))


def rows_of(w: torch.Tensor) -> torch.Tensor:
    """`Sums` of a left operand of matmul."""
    return w.sum(-1)


def columns_of(w: torch.Tensor) -> torch.Tensor:
    """`Sums` of a right operand of matmul."""
    return w.sum(-2) if w.dim() > 1 else w.sum(-1)


def _sum_per_kernel(w: torch.Tensor) -> torch.Tensor:
    """`Sums` of a convolution's weight; an upper bound, since padding is zero."""
    return w.flatten(1).sum(1)


def sum_of_all(w: torch.Tensor) -> torch.Tensor:
    """`Sums` of any operand; an upper bound."""
    return w.sum()


@implements("outer", torch.outer, T.outer, torch.ger, T.ger, note="1 round for two secrets")
def outer(context: Context, x: Any, y: Any) -> SharedTensor:
    return bilinear(context, torch.outer, x, y)


@implements("addmm", torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.addmv, T.addmv,
            note="1 round for two secrets")  # fmt: skip
def addmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = torch.matmul(x, y)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


@implements("linear", F.linear, note="PrivHFL, Figure 3")
def linear(context: Context, x: Any, weight: Any, bias: Any = None) -> SharedTensor:
    _same_dtype(x, weight)
    if not isinstance(x, SharedTensor) and not isinstance(weight, SharedTensor):
        return signed_sum(context, F.linear(x, weight), bias)
    terms = x.shape[-1]
    if weight.dim() == 1:
        y = bilinear(context, lambda a, w, *_: products.matmul(a, w), x, weight, terms, (rows_of, columns_of))
    elif isinstance(x, SharedTensor) and not isinstance(weight, SharedTensor):
        y = bilinear(context, products.Linear(), x, weight, terms, (rows_of, rows_of))
    else:
        y = bilinear(
            context, lambda a, w, *_: products.matmul(a, w.transpose(-1, -2)), x, weight, terms, (rows_of, rows_of)
        )
    return add_bias(context, x, y, bias)


def add_bias(context: Context, x: Any, y: SharedTensor, bias: Any) -> SharedTensor:
    if bias is None:
        return y
    return signed_sum(context, y, bias)


def _terms(equation: str, operands: tuple) -> int:
    """The number of products that one output of an einsum sums up. A dimension of one may broadcast."""
    letters, sizes = letters_of(equation, operands), {}
    for letter, n in zip(letters, (n for o in operands for n in o.shape), strict=True):
        sizes[letter] = max(n, sizes.get(letter, 1))
    kept = kept_letters(equation, letters)
    return math.prod(n for letter, n in sizes.items() if letter not in kept)


@dataclass(frozen=True)
class _Contracted:
    """`Sums` of an einsum's operand, of which one output takes every entry `times` times."""

    dims: tuple[int, ...]
    times: int

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        return self.times * (w.sum(self.dims) if self.dims else w)


def _contracted(equation: str, operands: tuple, at: int) -> _Contracted:
    letters, before = letters_of(equation, operands), sum(o.dim() for o in operands[:at])
    kept, shape = kept_letters(equation, letters), operands[at].shape
    dims = tuple(d for d in range(len(shape)) if letters[before + d] not in kept)
    return _Contracted(dims, _terms(equation, operands) // max(1, math.prod(shape[d] for d in dims)))


MOST_ENTRIES = 1 << 22
"""Entries of a product of plain or private operands that is computed before a product with a shared one, at most."""


def _einsum_pairwise(equation: str, operands: tuple) -> Any:
    """An einsum of many operands, two at a time: first the pair with the fewest shared ones and the smallest result."""
    letters = letters_of(equation, operands)
    names = {token: chr(ord("A") + i) for i, token in enumerate(dict.fromkeys(letters))}
    names = {token: name if name <= "Z" else chr(ord(name) + 6) for token, name in names.items()}
    rest, parts = iter(letters), []
    for operand in operands:
        parts.append(("".join(names[next(rest)] for _ in range(operand.dim())), operand))
    out = "".join(names[token] for token in result_letters(equation, letters))
    sizes: dict[str, int] = {}
    for spelled, operand in parts:
        for name, size in zip(spelled, operand.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))

    def kept(i: int, j: int) -> str:
        wanted = set(out).union(*(spelled for k, (spelled, _) in enumerate(parts) if k not in (i, j)))
        return "".join(name for name in dict.fromkeys(parts[i][0] + parts[j][0]) if name in wanted)

    def cost(pair: tuple[int, int]) -> tuple:
        i, j = pair
        entries = math.prod(sizes[name] for name in kept(i, j))
        shared = sum(isinstance(parts[k][1], SharedTensor) for k in pair)
        # First pairs whose product fits in memory, then those with a common letter, then those with fewer secret
        # factors.
        return entries > MOST_ENTRIES, not set(parts[i][0]) & set(parts[j][0]), shared, entries

    while len(parts) > 2:
        i, j = min(itertools.combinations(range(len(parts)), 2), key=cost)
        spelled = kept(i, j)
        made = torch.einsum(f"{parts[i][0]},{parts[j][0]}->{spelled}", parts[i][1], parts[j][1])
        parts = [*(part for k, part in enumerate(parts) if k not in (i, j)), (spelled, made)]
    return torch.einsum(f"{parts[0][0]},{parts[1][0]}->{out}", parts[0][1], parts[1][1])


@implements("einsum", torch.einsum, note="1 round for two secrets; of many operands two at a time")
@stepwise
def einsum(context: Context, equation: str, *operands: Any) -> SharedTensor:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(operands) == 1:
        return local_map(context, partial(torch.einsum, equation), operands[0], terms=_terms(equation, operands))
    if len(operands) != 2:
        return _einsum_pairwise(equation, operands)
    x, y = operands
    sums = _contracted(equation, operands, 0), _contracted(equation, operands, 1)
    return bilinear(context, partial(contracted, equation), x, y, _terms(equation, operands), sums)


def require_one_dimension(*given: Any) -> None:
    """Refuse biases and statistics of several dimensions: torch's meta functions accept them, its kernels do not."""
    for of_channels in given:
        if of_channels is not None and of_channels.dim() != 1:
            raise ShapeError(f"expected one dimension, an entry for each channel, got {list(of_channels.shape)}")


def not_negative(*paddings: Any) -> None:
    """Refuse negative paddings, which torch's meta functions accept."""
    if any(min(as_pair(padding)) < 0 for padding in paddings if not isinstance(padding, str)):
        raise ShapeError(f"negative padding is not supported, got {', '.join(map(str, paddings))}")


def as_pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return int(value), int(value)
    if len(value) == 1:
        return value[0], value[0]
    return int(value[0]), int(value[1])


def _as_widths(
    x: Any, padding: Any, kernel: tuple[int, ...], stride: Any, dilation: tuple[int, ...]
) -> tuple[Any, tuple]:
    """Resolve padding="same" and "valid"; an uneven "same" is padded explicitly."""
    if not isinstance(padding, str):
        return x, padding
    if padding == "valid":
        return x, (0,) * len(kernel)
    both = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if all(b % 2 == 0 for b in both):
        return x, tuple(b // 2 for b in both)
    widths = [side for b in reversed(both) for side in (b // 2, b - b // 2)]
    return F.pad(x, widths), (0,) * len(kernel)


@implements("conv2d", torch.conv2d, F.conv2d, note="PrivHFL, Figure 3")
def conv2d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    _same_dtype(x, weight)
    require_one_dimension(bias)
    not_negative(padding)
    stride, dilation = as_pair(stride), as_pair(dilation)
    x, padding = _as_widths(x, padding, tuple(weight.shape[2:]), stride, dilation)
    if x.dim() == 3:
        whole = torch.conv2d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return whole.squeeze(0)
    product = products.Conv2d(stride, as_pair(padding), dilation, groups)
    y = bilinear(context, product, x, weight, math.prod(weight.shape[1:]), (sum_of_all, _sum_per_kernel))
    return add_bias(context, x, y, None if bias is None else bias.view(-1, 1, 1))


@implements("conv1d", torch.conv1d, F.conv1d, note="as conv2d with height one")
def conv1d(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1) -> torch.Tensor:  # fmt: skip
    require_one_dimension(bias)
    if any(isinstance(v, (tuple, list)) and len(v) != 1 for v in (stride, padding, dilation)):
        raise ShapeError(f"conv1d takes one number for stride, padding and dilation, got {(stride, padding, dilation)}")
    stride, dilation = as_pair(stride)[0], as_pair(dilation)[0]
    x, padding = _as_widths(x, padding, tuple(weight.shape[2:]), (stride,), (dilation,))
    padding = as_pair(padding)[0]
    if x.dim() == 2:
        return torch.conv1d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    y = torch.conv2d(
        x.unsqueeze(2), weight.unsqueeze(2), bias, (1, stride), (0, padding), (1, dilation), groups
    )  # fmt: skip
    return y.squeeze(2)


@implements(
    "batch_norm",
    F.batch_norm,
    note="evaluation mode; an affine map at A's secret scale, of an input or [N, C] to 2^-40, else to 2^-20",
)
def batch_norm(
    context: Context, x: SharedTensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> SharedTensor:  # fmt: skip
    if training or running_mean is None or running_var is None:
        refuse("batch_norm on batch statistics", "use running statistics: call model.eval()")
    require_one_dimension(running_mean, running_var, weight, bias)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = (1, -1) + (1,) * (x.dim() - 2)
    # Of features and of an input as it was given; planes between layers are as large as the net's own values.
    fine = x.given or x.dim() == 2
    return bilinear(context, torch.mul, x, scale.view(shape), fine=fine) + shift.view(shape)


@implements("batch_norm", torch.batch_norm)
def native_batch_norm(
    context: Context, x: SharedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool = True,
) -> SharedTensor:  # fmt: skip
    """torch.batch_norm has the weights before the statistics."""
    return batch_norm(context, x, running_mean, running_var, weight, bias, training, momentum, eps)


@implements("matmul", T.__rmatmul__)
def reflected_matmul(context: Context, x: Any, y: Any) -> SharedTensor:
    """y @ x."""
    return matmul(context, y, x)


@implements("addmm", torch.addbmm, T.addbmm)
def addbmm(context: Context, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> SharedTensor:
    product = torch.matmul(x, y).sum(0)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)
