"""Softmax, norms and variances, and layers that normalise by statistics of the input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import MAX_SHIFT, Normal, Value
from ..ring import HEADROOM_BITS
from ..ring.wide import MOST_TERMS
from ..tensor import PrivateTensor, SharedTensor
from ..tensor.table import Context, implements
from . import series as series_of
from .common import (
    SLACK_BITS,
    as_factor,
    check_fits,
    dims_of,
    domain_bits,
    encoded_public,
    end_to_end,
    exponent_map,
    fit_beside_bounds,
    forbid,
    planes,
    raise_scale,
    refuse,
    round_scale,
    summand,
    unary_map,
    within_domain,
)
from .linear import check_sums, without_preparation
from .series import RSQRT_OF_QUARTER, SQRT
from .smooth import logarithm_bound, multiple_of, quotient, quotient_bits, reciprocal_of_sum, series, series_times

# Sums of squares over the whole domain of the scheme: deviations with an exponent that all entries of a row share.
#
# A square has twice the bits of its root, and a sum of n squares log2 n more: squares of f-bit numbers leave the ring
# when they sum to 2^(62-2f). So the deviations d = x - mean are first scaled to fit:
#
# 1. x is rounded to so few bits that its squares fit in any case. (One opening serves this step and step 3.) The coarse
#    sum of squares tells the row's regime; a regime is a factor of two wide.
# 2. The mean is that of the coarse numbers, corrected twice by the mean of the residuals. It is then the nearest number
#    at the scale of the deviations, so constant rows have deviations of zero.
# 3. m is d times the power of two of the regime, rounded. The sum of the m^2 is below 2^62, and above 2^48 except for
#    rows that are almost constant. So it has its significant bits in every regime.


T = torch.Tensor
SQUARES_BITS = 61
"""Sums of squares stay below 2^61, and with an eps below 2^62."""
MOST_SHIFT = MAX_SHIFT - 1
"""Bits by which the scaled deviations are truncated at most: they fill 62 before."""


@dataclass(frozen=True)
class Regimes:
    """The regimes of a row's size, which are public. `scales[j]`: the fraction bits of m in regime j, decreasing."""

    coarse: int
    thresholds: tuple[int, ...]
    scales: tuple[int, ...]
    least: tuple[float, ...]
    """A lower bound of the sum of the m^2 in regime j."""
    most: tuple[float, ...]
    """An upper bound of the sum of the d^2 in regime j."""


@dataclass(frozen=True)
class Deviations:
    """m, the sum of its squares (dimensions kept), and the unary code of each row's regime."""

    scaled: Value
    squares: Value
    bits: Value | None
    regimes: Regimes


def regimes(context: Context, n: int, cap: float = math.inf) -> Regimes:
    """The regimes of rows of n activations. `cap`: fraction bits that m may have at most.

    A coarse number errs by half a unit and the coarse mean by less than three. So the root mean square of the d lies
    within 3 units of the coarse one, from 4 units on within a factor of four.
    """
    limit = domain_bits(context)
    coarse = math.floor((SQUARES_BITS - math.log2(n)) / 2 - limit)
    largest = n * 4.0**limit
    thresholds, scales, least, most = [], [], [], []
    while True:
        j = len(scales)
        low = max(0.0, 2.0 ** (j + 1) - 3) if j else 0.0
        most.append(min(largest, n * (4 * 2.0**j + 3) ** 2 * 4.0**-coarse))
        scales.append(math.floor(min(cap, (SQUARES_BITS - math.log2(most[-1])) / 2)))
        least.append(n * low * low * 4.0 ** (scales[-1] - coarse) / 2)
        if most[-1] == largest:
            return Regimes(coarse, tuple(thresholds), tuple(scales), tuple(least), tuple(most))
        thresholds.append(16 * n << (2 * j))


def deviations(
    context: Context, x: SharedTensor, dims: tuple[int, ...], centred: bool, cap: float = math.inf, wanted: int = 0
) -> Deviations:
    """The entries of each row over `dims`, less the row's mean if `centred`, as m at the scale of the row's regime.

    Args:
        cap: fraction bits that m may have at most.
        wanted: fraction bits that m has in rows of all but equal entries. Where n is large, the lowest regime has
            fewer, and is divided once more, by the sum of the m^2 of a first attempt.
    """
    backend = context.backend
    n = math.prod(x.shares.shape[d] for d in dims)
    found = regimes(context, n, cap)
    bottom = found.scales[-1]
    x = within_domain(context, x).bounded(None)
    x = raise_scale(context, x, max(x.scale_bits, context.frac_bits, found.coarse))
    x = round_scale(context, x, max(found.coarse, bottom + MOST_SHIFT))
    more = min(cap, wanted, bottom + MOST_SHIFT) - found.scales[0]
    more = max(0, min(math.floor(more), (SQUARES_BITS - 5 - math.ceil(math.log2(n))) // 2))
    fine = max(x.scale_bits, found.scales[0] + more)
    if fine - bottom > MOST_SHIFT:
        refuse("an eps above the square of the largest activation", "use a smaller one")
    drop = x.scale_bits - found.coarse
    near = backend.truncate(x.shares, drop) if drop else x.shares

    def total(v: Value) -> Value:
        return backend.each(torch.sum, v, dim=dims, keepdim=True)

    mean = None
    if centred:
        limit = domain_bits(context) + found.coarse
        mean = moment_quotient(context, total(near), limit + math.ceil(math.log2(n)) + 1, n, 2.5, 2.0**limit)
        near = near - mean
    sums = total(backend.square(near))
    bits = None
    if found.thresholds:
        bits = backend.at_least(sums, found.thresholds)
    if mean is not None:
        drop = fine - found.coarse
        mean = _refine(context, x.shares, mean << drop, dims, n, fine - x.scale_bits, drop)
    scaled = _scale_to_regime(context, x, mean, bits, found.scales, fine)
    squares = total(backend.multiply(torch.mul, scaled, scaled))
    if more:
        bits, found = _split_lowest(context, squares, bits, found, more)
        scaled = _scale_to_regime(context, x, mean, bits, found.scales, fine)
        squares = total(backend.multiply(torch.mul, scaled, scaled))
    return Deviations(scaled, squares, bits, found)


def _scale_to_regime(
    context: Context, x: SharedTensor, mean: Value | None, bits: Value | None, scales: tuple[int, ...], fine: int
) -> Value:
    """x - mean, the mean at `fine` fraction bits, at the scale of its regime and rounded."""
    backend, finer = context.backend, fine - x.scale_bits
    if bits is None:
        product = x.shares << finer
        product = product if mean is None else product - mean
    else:
        factor = by_regime(context, bits, [1 << (k - scales[-1]) for k in scales])
        product = backend.multiply(torch.mul, x.shares, factor << finer)
        if mean is not None:
            product = product - backend.multiply(torch.mul, mean, factor)
    shift = fine - scales[-1]
    return backend.truncate(product, shift) if shift else product


def _split_lowest(
    context: Context, squares: Value, bits: Value | None, found: Regimes, more: int
) -> tuple[Value, Regimes]:
    """Split the lowest regime in `more` + 1, by a sum of squares that is right to a factor of two from 16 n on."""
    backend, scale = context.backend, found.scales[0]
    sizes = [SQUARES_BITS - 1 - 2 * k for k in range(more, 0, -1)]
    codes = backend.at_least(squares, tuple(1 << k for k in sizes))
    if bits is not None:  # a row of another regime is above all of these
        above = bits[:1]
        both = backend.multiply(torch.mul, codes, above)
        codes = codes + above - both
        bits = backend.each(end_to_end, codes, bits)
    least = (0.0, *(2.0 ** (SQUARES_BITS - 5) for _ in sizes))
    most = tuple(2.0 ** (k + 1 - 2 * scale) for k in sizes)
    return codes if bits is None else bits, Regimes(
        found.coarse,
        found.thresholds,
        (*range(scale + more, scale, -1), *found.scales),
        (*least, *found.least[1:]),
        (*most, *found.most),
    )


def by_regime(context: Context, bits: Value, values: list[int]) -> Value:
    """A public function of the regime."""
    return unary_map(context, bits, values[0], [b - a for a, b in itertools.pairwise(values)])


def _times_regime(context: Context, x: Value, bits: Value | None, values: list[int]) -> Value:
    if bits is None:
        return x * values[0]
    return context.backend.multiply(torch.mul, x, by_regime(context, bits, values))


def moment_quotient(
    context: Context, x: Value, size: int, n: float, error: float = math.inf, largest: float = math.inf
) -> Value:
    """x / n to the nearest ring element, and within `error` of that, for |x| < 2^size and a public n >= 1.

    One truncation where it is precise enough, and two where not.

    Args:
        largest: |x / n| is at most this.
    """
    backend = context.backend
    k = math.floor(math.log2(n))
    if n == 1 << k:
        return backend.truncate(x, k) if k else x
    bits = min(SQUARES_BITS - size, MAX_SHIFT - k)
    factor = round(2.0 ** (k + bits) / n)
    off = abs(factor * n - 2.0 ** (k + bits)) / 2.0 ** (k + bits)  # of the quotient
    if min(2.0 ** (size - k - bits - 1), largest * off) + 0.5 <= error:
        return backend.truncate(x * factor, k + bits)
    bits = min(MOST_SHIFT, SQUARES_BITS - size + k)
    factor = round(2.0 ** (k + bits) / n)
    x = backend.truncate(x, k) if k else x
    return backend.truncate(x * factor, bits)


def _refine(context: Context, x: Value, mean: Value, dims: tuple[int, ...], n: int, finer: int, drop: int) -> Value:
    """The mean of x at `finer` more bits, to the nearest, from a mean that is within 2^(drop + 2) of it.

    Sums of residuals are exact, even if terms wrap around. The second sum is within a few units times n, so that its
    quotient is rounded once.
    """
    spare = math.ceil(math.log2(n))
    size = spare + 2 + drop
    for _ in range(2):
        rest = context.backend.each(_sum_of_residuals, x, mean, finer, dims)
        mean = mean + moment_quotient(context, rest, size, n)
        k = math.floor(math.log2(n))
        size = spare + 2 + max(0, size - k - min(SQUARES_BITS - size, MAX_SHIFT - k))
    return mean


def _sum_of_residuals(x: torch.Tensor, mean: torch.Tensor, finer: int, dims: tuple[int, ...]) -> torch.Tensor:
    return (x << finer).sub_(mean).sum(dims, keepdim=True)


def standardize(
    context: Context, x: SharedTensor, dims: tuple[int, ...], eps: float, centred: bool, unit: bool = False,
    weight: PrivateTensor | None = None,
) -> SharedTensor:  # fmt: skip
    """(x - mean) / sqrt(mean of squares + eps) along dims; without `centred` the mean is not taken off.

    Args:
        unit: divide by the root of the sum of squares, not of their mean. Rows of zeros then stay zeros without an eps.
        weight: multiplies the result (`weighted_bits` says whether it can). The scaled deviations are multiplied by it
            and rounded while the inverse root is computed, so that no rounding stands between the two factors.
    """
    if eps < 0:
        refuse("a negative eps", "use a positive one")
    backend, f = context.backend, context.frac_bits
    n = math.prod(x.shares.shape[d] for d in dims)
    gain = 1.0 if unit else math.sqrt(n)
    half = math.log2(gain)
    plan = None if unit else plan_exact(context, x, n, eps, centred)
    rows = _rows_by_eps(context, x, dims, eps, centred, unit) if plan is None else _exact_rows(context, x, dims, plan)
    bits = min(f + MAX_SHIFT, math.floor(HEADROOM_BITS - 2 - half))
    scaled, most = rows.scaled, 1.0 if unit else gain
    if weight is not None:
        most *= context.scheme.gain
        bits = min(bits, weighted_bits(context, n) or 0)
        if context.scheme.range_check:
            context.net.rely(check_sums(weight, torch.abs))
        scaled = backend.linear(partial(without_preparation, torch.mul), scaled, weight.weight())
        scaled = backend.truncate(scaled, weight.weight_bits)
    # The exponents are even, so that the power of two of each is exact; the rest of the gain is in the series.
    whole = math.floor(math.log2(rows.gain))
    inverse = series_times(
        context, rows.mantissa, multiple_of(RSQRT_OF_QUARTER, rows.gain * 2.0**-whole), rows.power(bits + whole - f)
    )
    bound = 1.01 * most * 2.0**bits if context.scheme.range_check else None
    return x.like(backend.multiply(torch.mul, scaled, inverse), bits, bound)


@dataclass(frozen=True)
class StandardRows:
    """Rows that `standardize` has brought to a common scale: the result is scaled gain 2^-e / sqrt(mantissa).

    Attributes:
        scaled: m, below 2^(`SQUARES_BITS` / 2) in magnitude.
        mantissa: in 1/4 .. 1, dimensions kept.
        power: returns 2^(k - e) for a number k of bits.
    """

    scaled: Value
    mantissa: SharedTensor
    gain: float
    power: Callable[[int], Value]


def _rows_by_eps(
    context: Context, x: SharedTensor, dims: tuple[int, ...], eps: float, centred: bool, unit: bool
) -> StandardRows:
    """The rows by `deviations`, and the sum of their squares and of eps."""
    backend, f = context.backend, context.frac_bits
    n = math.prod(x.shares.shape[d] for d in dims)
    cap = (SQUARES_BITS - 1 - math.log2(n * eps)) / 2 if eps else math.inf
    wanted = f + 10
    if eps:
        wanted = min(wanted, math.ceil(f - 4 - math.log2(eps) / 2))
    d = deviations(context, x, dims, centred, cap, wanted)
    offsets = [round(n * eps * 4.0**k) for k in d.regimes.scales]
    low = max(0, math.floor(math.log2(max(1, min(a + b for a, b in zip(offsets, d.regimes.least, strict=True))))) - 1)
    sums = backend.each(torch.clone, d.squares)
    if any(offsets):
        offset = offsets[0] if d.bits is None else by_regime(context, d.bits, offsets)
        sums = sums + offset
    normal = backend.normalise(sums, low - low % 2, HEADROOM_BITS, 2)
    if not eps and not unit:
        forbid(context, -normal.bits[0] + 1)
    power = lambda bits: exponent_map(context, normal, lambda e: 1 << bits - e // 2)
    return StandardRows(d.scaled, x.like(normal.mantissa, normal.high), 1.0 if unit else math.sqrt(n), power)


# Rows whose statistics fit Z_2^128. The sum of squares is exact (`Backend.square_sum`), so no rounding and no coarse
# sum stands before it. T, with the eps in it, is known by two words: its highest bits, and for rows below 2^`LEAST`
# units of that word the 62 bits below. The exponent of the high word is the row's regime: the deviations times the
# power of two of the regime are rounded once.


LEAST = 20
"""Bits that the highest word of a sum of squares has where it is used alone: its root is right to 2^-22."""
FEWEST_BITS = 17
"""The same where eps alone makes them, so that there is no second word."""
SHORTEST_ROW = 32
"""Shorter rows are many for their elements; the two keys of a row would outweigh what they save."""


@dataclass(frozen=True)
class ExactRows:
    """How the sum of squares of a row is cut into words.

    Attributes:
        scale: fraction bits of the entries. size: they are below 2^size.
        offset: eps in units of T.
        shifts: bits below the high word, and below the low word where there is one.
        lows: the lowest exponent of each word.
        top: the deviations of a row of exponent e are multiplied by 2^(top - (shifts[0] + e) / 2).
    """

    n: int
    centred: bool
    scale: int
    size: int
    offset: int
    shifts: tuple[int, ...]
    lows: tuple[int, ...]
    top: int


def plan_exact(context: Context, x: SharedTensor, n: int, eps: float, centred: bool) -> ExactRows | None:
    """The plan for rows of n entries, or None where Z_2^128 has no room for them, or eps is 0."""
    scale = max(x.scale_bits, 2 * context.frac_bits)
    copies = n * n if centred else n
    offset = round(copies * eps * 4.0**scale)
    if not offset or not SHORTEST_ROW <= n <= MOST_TERMS:
        return None
    for size in (context.scheme.activation_bits + scale + 1, context.scheme.activation_bits + scale):
        above = max(2, math.ceil(math.log2(copies * 4.0**size + offset)) - HEADROOM_BITS)
        above += above % 2
        below = above + LEAST - HEADROOM_BITS
        top = math.floor(SQUARES_BITS - 1e-6 + (math.log2(n) / 2 if centred else 0))
        if above > 64 or size >= HEADROOM_BITS - 1 or below < 2 or 2 * top < above + HEADROOM_BITS:
            continue
        if offset >> above >= 1 << FEWEST_BITS:
            return ExactRows(n, centred, scale, size, offset, (above,), (_even_exponent(offset >> above),), top)
        lows = LEAST, min(LEAST, _even_exponent(offset >> below))
        return ExactRows(n, centred, scale, size, offset, (above, below), lows, top)
    return None


def _even_exponent(value: int) -> int:
    """The largest even k with 2^k <= value; 0 for 0."""
    return max(0, value.bit_length() - 1) // 2 * 2


def _exact_rows(context: Context, x: SharedTensor, dims: tuple[int, ...], plan: ExactRows) -> StandardRows:
    backend, n = context.backend, plan.n
    x = check_fits(context, x, 2.0 ** (plan.size + x.scale_bits - plan.scale)).bounded(None)
    x = raise_scale(context, x, plan.scale)
    words = backend.square_sum(x.shares, dims, plan.centred, plan.offset, plan.shifts)
    normal = backend.normalise(words[0], plan.lows[0], HEADROOM_BITS, 2, HEADROOM_BITS)
    above = plan.shifts[0]
    shift_of = lambda e: 1 << plan.top - (above + e) // 2
    factor = exponent_map(context, normal, shift_of, shift_of(plan.lows[0]))
    scaled = backend.multiply(torch.mul, x.shares, factor)
    if plan.centred:
        scaled = scaled - backend.multiply(torch.mul, _exact_mean(context, x.shares, dims, plan), factor)
    scaled = backend.truncate(scaled, MOST_SHIFT)
    gain = (n if plan.centred else math.sqrt(n)) * 2.0 ** (MOST_SHIFT - plan.top)
    mantissa = x.like(normal.mantissa, normal.high)
    if len(plan.shifts) == 1:
        return StandardRows(scaled, mantissa, gain, lambda bits: _constant(context, normal, 1 << bits))
    # The low word's mantissa and power are right where the high word is below its range; there its own are constant.
    lower = backend.normalise(words[1], plan.lows[1], HEADROOM_BITS, 2)
    least = 1 << HEADROOM_BITS - 1
    rest = lower.mantissa - least
    mantissa = x.like(normal.mantissa + rest - backend.multiply(torch.mul, rest, normal.bits[0]), HEADROOM_BITS)

    def power(bits: int) -> Value:
        """2^bits in the high word's range, where the regime takes the exponent up, and more below it."""
        steps = lambda e: (1 << bits + (HEADROOM_BITS - e) // 2) - (1 << bits)
        more = exponent_map(context, lower, steps)
        return more - backend.multiply(torch.mul, more, normal.bits[0]) + (1 << bits)

    return StandardRows(scaled, mantissa, gain, power)


def _constant(context: Context, normal: Normal, value: int) -> Value:
    """A public number as a value of each row."""
    return normal.bits[0] * 0 + value


def _exact_mean(context: Context, x: Value, dims: tuple[int, ...], plan: ExactRows) -> Value:
    """The mean of x to the nearest, or the next. Each half of the row has a sum below 2^62."""
    backend, spare = context.backend, 30
    sums = backend.each(_sums_of_halves, x, dims)
    coarse = backend.each(torch.sum, backend.truncate(sums, spare), dim=0) * round(2.0**spare / plan.n)
    return _refine(context, x, coarse, dims, plan.n, 0, spare)


def _sums_of_halves(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    longest = max(dims, key=lambda d: x.shape[d])
    first = x.shape[longest] // 2
    parts = x.narrow(longest, 0, first), x.narrow(longest, first, x.shape[longest] - first)
    return torch.stack([part.sum(dims, keepdim=True) for part in parts])


def weighted_bits(context: Context, n: int) -> int | None:
    """The fraction bits of `standardize` with a weight, for rows of n; None if the ring has no room for it.

    |m| < 2^(SQUARES_BITS / 2) times a weight below the scheme's gain has to fit, and so has the result, of up to
    sqrt(n) times the gain. The inverse root, of f bits beside the power of two, has to be a whole number.
    """
    gain, half = math.log2(context.scheme.gain), math.log2(n) / 2
    bits = math.floor(SQUARES_BITS - 0.02 - half - gain)
    fits = SQUARES_BITS / 2 + context.frac_bits + gain < SQUARES_BITS
    whole = bits + math.floor(half) - context.frac_bits >= HEADROOM_BITS // 2
    return min(bits, context.frac_bits + MAX_SHIFT) if fits and whole else None


def mean_of_squares(
    context: Context, x: SharedTensor, dims: tuple[int, ...], divisor: float, centred: bool
) -> SharedTensor:
    """The sum over `dims` of (x - mean)^2, or of x^2, over `divisor`; dimensions are kept. At 2 f + 3 fraction bits.

    A result from 2^(59-2f) on ends in a range error.
    """
    backend, f = context.backend, context.frac_bits
    bits, dropped = 2 * f + 3, MOST_SHIFT
    k = math.floor(math.log2(divisor))
    d = deviations(context, x, dims, centred, (dropped + bits - k) // 2)
    beyond = [most / divisor >= 2.0 ** (HEADROOM_BITS - bits) for most in d.regimes.most]
    if d.bits is None:
        bits = min(bits, math.floor(SQUARES_BITS - math.log2(d.regimes.most[0] / divisor)))
    elif any(beyond):
        forbid(context, by_regime(context, d.bits, [int(b) for b in beyond]))
    sums = backend.truncate(d.squares, dropped)
    if divisor != 2.0**k:
        factor = round(2.0 ** (k + 30) / divisor)
        sums = backend.truncate(sums * factor, 30)
    powers = [_power(dropped - 2 * s - k + bits) for s in d.regimes.scales]
    return x.like(_times_regime(context, sums, d.bits, powers), bits)


def _power(exponent: int) -> int:
    return 1 << min(max(0, exponent), HEADROOM_BITS)


def root_mean_square(
    context: Context, x: SharedTensor, dims: tuple[int, ...], divisor: float, centred: bool
) -> SharedTensor:
    """The square root of `mean_of_squares`, in the whole domain; dimensions are kept."""
    backend, f = context.backend, context.frac_bits
    n = math.prod(x.shares.shape[d] for d in dims)
    k = math.floor(math.log2(divisor)) // 2
    spare = min(f // 2, SQUARES_BITS - 32 - f)
    largest = math.ceil(domain_bits(context) + math.log2(n / divisor) / 2) + 1
    finer = SQUARES_BITS - largest - spare
    d = deviations(context, x, dims, centred, finer - k)
    normal = backend.normalise(d.squares, 0, HEADROOM_BITS)
    root = series(context, x.like(normal.mantissa, normal.high), SQRT)
    size = 2.0 ** (k + spare) / math.sqrt(divisor)
    power = exponent_map(context, normal, lambda e: round(2.0 ** (e / 2) * size), 0)
    product = root.like(backend.multiply(torch.mul, root.shares, power), root.scale_bits + spare)
    product = round_scale(context, product, spare).shares
    powers = [_power(finer - s - k) for s in d.regimes.scales]
    return x.like(_times_regime(context, product, d.bits, powers), spare + finer)


# Softmax and its kin, and the layers.


def _sum_bits(shape: torch.Size, dim: int) -> int:
    """k: a sum along dim of numbers up to 1 + 2^-19 is below 2^k."""
    n = shape[dim]
    return math.ceil(math.log2(n + 1)) + (n >= 1 << 18)


def _shifted_exp(context: Context, x: SharedTensor, dim: int) -> tuple[SharedTensor, SharedTensor]:
    """x - max x, and e to that with about 2 f fraction bits, so that a sum of many small ones is right.

    The square of a series for half of it: e^(-28) is where it ends, and an error of e^(x/2) is scaled with it.
    """
    backend, which = context.backend, series_of.EXP
    difference = fit_beside_bounds(context, x - x.amax(dim, keepdim=True), 2 * which.low)
    half = difference.like(difference.shares, difference.scale_bits + 1)
    low = int(encoded_public(context, which.low, half.scale_bits))
    root = series(context, half, which, opened=True)
    squares, _ = backend.where_between(half.shares, low, None, root.shares, planes(half, more=-low), squared=True)
    e = root.like(squares, 2 * root.scale_bits)
    spare = HEADROOM_BITS - _sum_bits(x.shares.shape, dim)
    return difference, round_scale(context, e, spare)


@implements("softmax", torch.softmax, T.softmax, F.softmax, torch.special.softmax,
            note="error 1e-5 + 2e-6 sqrt(n) |result| of n entries", exact=False, at_most=4.0)  # fmt: skip
def softmax(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> SharedTensor:
    e, inverse = softmax_factors(context, x, _default_dim(x, dim))
    e = round_scale(context, e, min(context.frac_bits + SLACK_BITS, MAX_SHIFT + context.frac_bits - inverse.scale_bits))
    return e.like(context.backend.multiply(torch.mul, e.shares, inverse.shares), e.scale_bits + inverse.scale_bits)


def softmax_factors(context: Context, x: SharedTensor, dim: int) -> tuple[SharedTensor, SharedTensor]:
    """e^(x - max x) along dim, and the inverse of its sum there; dimensions are kept. Their product is the softmax."""
    _, e = _shifted_exp(context, x, dim)
    total = e.like(context.backend.each(torch.sum, e.shares, dim, keepdim=True), e.scale_bits)
    return e, reciprocal_of_sum(context, total, _sum_bits(x.shares.shape, dim))


@implements("log_softmax", torch.log_softmax, T.log_softmax, F.log_softmax, torch.special.log_softmax,
            note="error 1e-5 + 2e-6 sqrt(n) of n entries, however small a result", exact=False)  # fmt: skip
def log_softmax(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> SharedTensor:
    dim = _default_dim(x, dim)
    y, e = _shifted_exp(context, x, dim)
    return y - _log_of_sum(context, e, x.shares.shape, dim, True)


def _default_dim(x: SharedTensor, dim: int | None) -> int:
    if dim is None:
        return 0 if x.dim() in (0, 1, 3) else 1
    return dim


@implements("softmin", F.softmin, note="softmax of -x", exact=False, at_most=4.0)
def softmin(
    context: Context, x: SharedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> torch.Tensor:
    return F.softmax(-x, _default_dim(x, dim))


def _log_of_sum(context: Context, e: SharedTensor, shape: torch.Size, dim: int, keepdim: bool) -> SharedTensor:
    """log of the sum of e along dim, which is at least about 1."""
    backend = context.backend
    total = backend.each(torch.sum, e.shares, dim, keepdim=keepdim)
    s = e.scale_bits
    normal = backend.normalise(total, s - 1, s + _sum_bits(shape, dim))
    m = series(context, e.like(normal.mantissa, normal.high), series_of.LOG)
    whole = exponent_map(context, normal, lambda k: round((k - s) * math.log(2) * 2**m.scale_bits))
    return m.like(m.shares + whole, m.scale_bits, logarithm_bound(m.scale_bits))


@implements("logsumexp", torch.logsumexp, T.logsumexp, torch.special.logsumexp,
            note="error 1e-5 + 2e-6 sqrt(n) of n entries", exact=False)  # fmt: skip
def logsumexp(context: Context, x: Any, dim: Any, keepdim: bool = False) -> torch.Tensor:
    x = x if x.is_floating_point() else x.to(torch.float32)
    if not isinstance(dim, int):
        dims = dims_of(x, tuple(dim))
        if len(dims) != 1:
            kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
            flat = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
            found = torch.logsumexp(flat, -1)
            return found.reshape(kept) if keepdim else found
        dim = dims[0]
    largest = x.amax(dim, keepdim=keepdim)
    _, e = _shifted_exp(context, x, dim)
    return largest + _log_of_sum(context, e, x.shares.shape, dim, keepdim)


def _affine(x: SharedTensor, weight: Any, bias: Any) -> SharedTensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _standard_affine(
    context: Context, x: SharedTensor, count: int, eps: float, centred: bool, weight: Any, bias: Any
) -> SharedTensor:
    """`standardize` over the last `count` dimensions, times the weight, plus the bias.

    With the model's own weight the result is rounded to f bits once, for all that use it.
    """
    dims = tuple(range(-count, 0))
    n = math.prod(x.shares.shape[d] for d in dims)
    own = isinstance(weight, PrivateTensor) and weight.weight_bits == context.frac_bits
    if not own or weighted_bits(context, n) is None:
        return _affine(standardize(context, x, dims, eps, centred), weight, bias)
    made = _affine(standardize(context, x, dims, eps, centred, weight=weight), None, bias)
    return as_factor(context, made, 0)


@implements("layer_norm", F.layer_norm, torch.layer_norm,
            note="everywhere; error 4e-6 + 1e-5 |result|; 1e-3 if sigma < 2^-13 and eps < 1e-8",
            exact=False)  # fmt: skip
def layer_norm(context: Context, x: SharedTensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
               eps: float = 1e-5, cudnn_enabled: bool = True) -> SharedTensor:  # fmt: skip
    return _standard_affine(context, x, len(tuple(normalized_shape)), eps, True, weight, bias)


@implements("rms_norm", F.rms_norm, torch.rms_norm, note="everywhere; error 4e-6 + 1e-5 |result|", exact=False)
def rms_norm(
    context: Context, x: SharedTensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> SharedTensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _standard_affine(context, x, len(tuple(normalized_shape)), eps, False, weight, None)


def _per_channel(parameter: Any, dims: int) -> Any:
    return None if parameter is None else parameter.view(1, -1, *([1] * (dims - 2)))


@implements("group_norm", F.group_norm, torch.group_norm, note="everywhere; error 4e-6 + 1e-5 |result|", exact=False)
def group_norm(context: Context, x: SharedTensor, num_groups: int, weight: Any = None, bias: Any = None,
               eps: float = 1e-5, cudnn_enabled: bool = True) -> SharedTensor:  # fmt: skip
    shape = x.shape
    y = standardize(context, x.reshape(shape[0], num_groups, -1), (-1,), eps, True).reshape(shape)
    return _affine(y, _per_channel(weight, len(shape)), _per_channel(bias, len(shape)))


@implements("instance_norm", F.instance_norm, note="everywhere; error 4e-6 + 1e-5 |result|", exact=False)
def instance_norm(
    context: Context, x: SharedTensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    y = standardize(context, x, tuple(range(2, x.dim())), eps, True)
    return _affine(y, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()))


@implements("instance_norm", torch.instance_norm)
def native_instance_norm(
    context: Context, x: SharedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """torch.instance_norm has the weights before the statistics."""
    return instance_norm(context, x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@implements("local_response_norm", F.local_response_norm,
            note="as log of its sum of squares; error 4e-6 + 1e-4 |result|; with k = 0 of its root too, and no zeros",
            exact=False)  # fmt: skip
def local_response_norm(context: Context, x: SharedTensor, size: int, alpha: float = 1e-4, beta: float = 0.75,
                        k: float = 1.0) -> SharedTensor:  # fmt: skip
    outside = 1.0  # a factor that stands before the quotient, so that its divisor has its digits
    if k == 0:
        outside = (size / alpha) ** beta
    elif k**beta * 2.0 ** quotient_bits(context) < context.scheme.activation_limit:
        least = 2.0 ** ((context.scheme.activation_bits - quotient_bits(context)) / beta)
        outside, alpha, k = (least / k) ** beta, alpha * least / k, least
    scaled = x * math.sqrt(alpha / size) if k else x
    squares = scaled.square().unsqueeze(1).flatten(3)
    padded = F.pad(squares, (0, 0, size // 2, (size - 1) // 2))
    sums = F.avg_pool2d(padded, (size, 1), stride=1, divisor_override=1).squeeze(1).reshape(x.shape)
    if not k:
        return quotient(context, x, summand(context, sums**beta)) * outside
    most = min(1.0, k**beta) * 2.0 ** (quotient_bits(context) + x.scale_bits)  # then no quotient is beyond the domain
    y = quotient(context, check_fits(context, x, most), summand(context, (sums + k) ** beta), positive=True)
    return y if outside == 1.0 else y * outside


@implements("normalize", F.normalize, note="p = 2, 1; everywhere; error 4e-6", exact=False)
def normalize(
    context: Context, x: SharedTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> SharedTensor:
    if p not in (1, 2):
        refuse(f"normalize with p={p}", "use p=2 or p=1")
    dims = dims_of(x, dim)
    least = 2.0**-context.frac_bits
    if p == 2 and eps <= least:  # of a vector that is not zero, the norm is above
        return standardize(context, x, dims, 0.0, False, unit=True)
    size = x.abs().sum(dims, keepdim=True) if p == 1 else norm(context, x, 2, dims, True)
    return quotient(context, x, summand(context, size.clamp_min(max(eps, least))), positive=True)


@implements("var", torch.var, T.var, note="result < 2^16; error 2e-6 + 1e-6 |result|")
def var(context: Context, x: SharedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
        correction: Any = None) -> SharedTensor:  # fmt: skip
    return _statistic(context, mean_of_squares, x, dim, unbiased, keepdim, correction)


def _statistic(context: Context, which: Any, x: SharedTensor, dim: Any, unbiased: Any, keepdim: bool,
               correction: Any) -> SharedTensor:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = dims_of(x, dim)
    n = math.prod(x.shares.shape[d] for d in dims)
    if n <= correction:
        refuse("the variance of too few elements", "it is not a number")
    return _without_dims(context, which(context, x, dims, n - correction, True), dims, keepdim)


def _without_dims(context: Context, x: SharedTensor, dims: tuple[int, ...], keepdim: bool) -> SharedTensor:
    if keepdim:
        return x
    shape = [size for d, size in enumerate(x.shares.shape) if d not in dims]
    return x.like(context.backend.each(torch.reshape, x.shares, shape), x.scale_bits)


@implements("std", torch.std, T.std, note="everywhere; error 2e-6 + 1e-6 |result|", exact=False)
def std(context: Context, x: SharedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
        correction: Any = None) -> SharedTensor:  # fmt: skip
    return _statistic(context, root_mean_square, x, dim, unbiased, keepdim, correction)


@implements("norm", torch.linalg.norm, note="p = 1, 2, inf; error 2e-6 + 1e-6 |result|", exact=False)
def linalg_norm(context: Context, x: SharedTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *,
                dtype: Any = None) -> torch.Tensor:  # fmt: skip
    """Vector norms, and for matrices the Frobenius norm, 1 and infinity; other orders are operator norms."""
    matrix = len(dim) == 2 if isinstance(dim, (list, tuple)) else dim is None and x.dim() == 2
    rows, columns = dim if isinstance(dim, (list, tuple)) and matrix else (-2, -1)
    if matrix and ord in (1, -1, math.inf, -math.inf):
        sums = x.abs().sum(rows if abs(ord) == 1 else columns, keepdim=True)
        return (sums.amax if ord > 0 else sums.amin)((rows, columns), keepdim=keepdim)
    if matrix and ord not in (None, "fro"):
        refuse(f"the matrix norm of order {ord}", "use the Frobenius norm, 1 or inf, or vector_norm")
    return norm(context, x, 2 if ord is None else ord, dim, keepdim)


@implements("norm", torch.linalg.matrix_norm)
def matrix_norm(context: Context, x: SharedTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *,
                dtype: Any = None) -> torch.Tensor:  # fmt: skip
    return linalg_norm(context, x, ord, tuple(dim), keepdim)


@implements("norm", torch.norm, T.norm, torch.linalg.vector_norm)
def norm(context: Context, x: SharedTensor, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None,
         dtype: Any = None, ord: Any = None) -> torch.Tensor:  # fmt: skip
    p = ord if ord is not None else (2 if p in (None, "fro") else p)
    dims = dims_of(x, dim)
    if p == 2:
        return _without_dims(context, root_mean_square(context, x, dims, 1, False), dims, keepdim)
    if p == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if p == math.inf:
        return x.abs().amax(dims, keepdim=keepdim)
    return refuse(f"a norm of order {p}", "use 1, 2 or inf")
