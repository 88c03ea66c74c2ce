"""Smooth functions of shared values: trigonometric series of a masked opening, and mantissa and exponent.

**Series** (`trigonometric`). A and S learn c = x + r modulo a period P. Since cos(w (c - r)) = cos(w c) cos(w r) +
sin(w c) sin(w r), a series

    f(x) = k + sum_j a_j cos(j w x) + b_j sin(j w x),       w = 2 pi / P,

is linear in the values cos(j w r) and sin(j w r), which D deals ahead; A and S multiply their shares by public numbers.
The mask is uniform on the period, so the opening shows nothing.

D's numbers and the public ones are rounded, and the roundings depend on D's mask. The result must not: a Q that deals
would learn from many results where a hidden value lies between two roundings. So x is opened with all its bits, and
both kinds of numbers have 52 fraction bits, in two digits of 26. With B = B1 + 2^-26 B2 and P = P1 + 2^-26 P2,

    P B = P1 B1 + 2^-26 (P1 B2 + P2 B1)         to 2^-54,

of which the second part is brought to the first one's scale. The sum is the series to within `draw_error`, and the
caller rounds it exactly to f fraction bits. A rounded result depends on D's mask only where the series is closer than
that to the middle between two results: for 20 bits, for about one x in 2^28 (the exponential) to 2^32. The public
multipliers are the same at A and S to the last bit (`harmonics.py`).

**Mantissa and exponent** (`normalise`). One opening of x is compared with all powers of two of its range at once. The
bits [x >= 2^k] are a unary code of the exponent e in x = m 2^e, m in [1/2, 1). So every function of e is a public
linear map of them, and so is the power of two that brings x into [1/2, 1).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..backend import SERIES_BITS, Normal, Series
from ..choreography import Located, Message, Net, leaf, protocol
from ..choreography.located import compute
from ..ring import logical_shift
from ..ring.bitplanes import fast
from ..ring.fixed_point import weighted_bit_sum
from . import harmonics
from .harmonics import DIGIT
from .star.compare import drelu
from .star.fss import choose_by_keys
from .star.masking import ComputedCorrection, DealersMask, Masked, deal, open_masked
from .star.multiply import multiply_masked
from .star.select import choose
from .star.shares import Shares, each
from .star.thresholds import at_least
from .star.truncate import public_quotient, quotient, truncate, truncate_and_multiply, wrap_term

# Series


@leaf
def turns_of(half: torch.Tensor, width: int) -> torch.Tensor:
    """A half of x modulo the period 2^width, as a fraction of the period in 32 or 64 bits. Nothing is rounded."""
    return (half << (32 - width)).to(torch.int32) if width <= 32 else half << (64 - width)


@leaf(shapes=lambda turns, series: torch.empty_like(turns, dtype=torch.int64))
def value_at(turns: torch.Tensor, series: Series) -> torch.Tensor:
    """The series at public fractions of its period, at `SERIES_BITS` fraction bits."""
    return harmonics.series_at(turns, series)


@leaf(shapes=lambda turns, terms, v_A: torch.empty_like(v_A))
def _less_basis(turns: torch.Tensor, terms: int, v_A: torch.Tensor) -> torch.Tensor:
    """At D: cos and sin of the harmonics, each in two digits [2, 2 terms, *shape], less v_A."""
    return _loops(turns, v_A).less_basis(turns, terms, v_A)


@leaf(shapes=lambda turns, held, series: (held[0, 0], held[1, 0]))
def _combined(turns: torch.Tensor, held: torch.Tensor, series: Series) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's half of the sums P1 B1 and P1 B2 + P2 B1, with P at the public turns."""
    return _loops(turns, held).combine_harmonics(turns, held, series)


def _loops(*tensors: torch.Tensor) -> ModuleType:
    """The module that computes: compiled loops, which give the same bits, or `harmonics` on a device."""
    if not fast(*tensors):
        return harmonics
    from . import harmonicloops  # imports numba, which an import of the package must not

    return harmonicloops


def draw_error(series: Series) -> float:
    """A bound on the distance of two results of `trigonometric` for one x, whatever D draws.

    Each result is within half of it of the series. The summands: a unit of 2^-52 for the dropped digit; the roundings
    of the dealt and of the public numbers, and the products of two lower digits; and 2^-50 (j + 1) for cos and sin of
    the j-th harmonic.
    """
    terms = len(series.cos)
    rounding = 1 + series.weight + terms + terms / 2
    amplitudes = [abs(a) + abs(b) for a, b in zip(series.cos, series.sin, strict=True)]
    computed = sum((j + 2) * 2.0**-50 * a for j, a in enumerate(amplitudes))
    return 2 * (rounding * 2.0**-SERIES_BITS + 4 * computed)


@protocol("trigonometric", "docs/protocols.md; Fourier extension", [
    Message("c_A", "A", "S", "r_A of k_DA"), Message("c_S", "S", "A", "r_S of k_DS"),
])  # fmt: skip
def trigonometric(
    net: Net,
    x: Shares | Masked,
    scale_bits: int,
    series: Series,
    later: Series | None = None,
    part: slice | None = None,
    digits: bool = False,
) -> Any:
    """Compute series(x) at `SERIES_BITS` = 52 fraction bits.

    Args:
        x: at `scale_bits` fraction bits, in [series.low, series.high]; beyond it the series is periodic. Shares, or an
            opening that other protocols use as well.
        later: another series of the same period. Then the result is (series(x), (first, second)), of which
            `finish_series` makes later(x) without an opening of x.
        part: of an opening, which is then flattened: the elements that are computed.
        digits: return two sums for `round_digits`, which takes the place of the second round.

    Rounds 2, or 1 from an opening. Per element 8 bytes online, or 16 where x and the period have more than 32 bits, and
    16 for the second digit; dealt 32 for each term and 12. Error: series.error, and half of `draw_error(series)`, which
    depends on D's mask: round the result before it is used. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for the harmonics.
    """
    D, A, S = net.D, net.A, net.S
    width, terms = series.period_bits + scale_bits, max(len(s.cos) for s in (series, later or series))
    if isinstance(x, Masked):
        opened = (v if part is None else compute(torch.flatten, v)[part] for v in (x.c, x.r))
        public, mask = (compute(turns_of, v, width) for v in opened)
    else:
        drawn = torch.int32 if width <= 32 else torch.int64
        r_A, r_S = net.common(D, A, x.shape, "r_A", drawn), net.common(D, S, x.shape, "r_S", drawn)
        c_A = (turns_of(x.A, width) + r_A).send(A, S, "c_A")
        c_S = (turns_of(x.S, width) + r_S).send(S, A, "c_S")
        public, mask = c_A + c_S, r_A + r_S
    basis = deal(net, ComputedCorrection(_less_basis, (2, 2 * terms, *mask.shape), (mask, terms)))

    if digits:
        return _digits(public, basis, series)
    found = finish_series(net, *_digits(public, basis, series), series)
    return found if later is None else (found, _digits(public, basis, later))


def _digits(public: Located, basis: Shares, series: Series) -> tuple[Shares, Shares]:
    """The sums P1 B1 and P1 B2 + P2 B1 of a series."""
    (first_A, second_A), (first_S, second_S) = (_combined(public, half, series) for half in (basis.A, basis.S))
    return Shares(first_A, first_S), Shares(second_A, second_S)


def finish_series(net: Net, first: Shares, second: Shares, series: Series) -> Shares:
    """Compute the later series of `trigonometric`. Rounds 1; per element 16 bytes online and 12 dealt."""
    return first + _drop_digit(net, second) + round(series.constant * 2.0**SERIES_BITS)


@protocol("drop_digit", "docs/protocols.md")
def _drop_digit(net: Net, x: Shares) -> Shares:
    """Compute floor(x / 2^26) or one more, depending on D's mask. For digits that a later rounding drops, not results.

    This is the truncation of `truncate.py` without its borrow. Rounds 1; per element 16 bytes online and 12 dealt.
    Nobody learns anything.
    """
    masked = open_masked(net, x)
    known = quotient(net, masked, DIGIT)
    R, wrap = deal(net, known.value), deal(net, known.wrap, torch.int32)
    C, no_wrap = compute(public_quotient, masked.c, DIGIT)
    return each(_hidden_quotient, no_wrap, R, wrap) + C


def _hidden_quotient(no_wrap, R, wrap) -> torch.Tensor:
    """One party's half of the summand that the public quotient lacks."""
    return wrap_term(wrap, DIGIT).bitwise_and_(no_wrap).sub_(R)


@protocol("round_digits", "docs/protocols.md")
def round_digits(
    net: Net, first: Shares, second: Shares, series: Series, shift: int, how: tuple = (), factor: Shares | None = None
) -> Shares:
    """Compute the series of two digits, and drop `shift` fraction bits: `finish_series` and `truncate` in one opening.

    Both digits are opened. With c2 = second + r2 and the public quotient C of c2 by 2^26, first + C is open under the
    mask r1 + (r2 >> 26), but for 2^38 where c2 has wrapped around. A truncation by at most 32 bits divides 2^38, so
    that term is added to its result.

    Args:
        shift: 1..32; the result has `SERIES_BITS` - shift fraction bits.
        how: arguments of `truncate` after the shift.
        factor: multiply the result by it, mod 2^64: `truncate_and_multiply`. It takes no further round.

    Rounds and bytes are those of `truncate`, 16 bytes online and 8 dealt more; with a factor those of
    `truncate_and_multiply`, 16 and 16 more. Rounding is exact but for `draw_error`. Nobody learns anything.
    """
    high, low = open_masked(net, first), open_masked(net, second)
    c, no_wrap = compute(_open_sum, high.c, low.c, round(series.constant * 2.0**SERIES_BITS))
    y, w = DealersMask(c, compute(_mask_of_sum, high.r, low.r)), compute(_wrapped, low.r)
    wrap, bits = deal(net, w), 64 - DIGIT - shift
    if factor is None:
        return each(_with_wrap, truncate(net, y, shift, *how), no_wrap, wrap, bits)
    other = open_masked(net, factor)
    with_s = deal(net, w * other.r)
    product = truncate_and_multiply(net, y, shift, factor)
    return each(_with_wrapped_product, product, no_wrap, other.c, wrap, with_s, bits)


@leaf
def _open_sum(c: torch.Tensor, d: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The public sum of a constant, c and the quotient of d, and the mask of the elements where d may have wrapped."""
    C, no_wrap = public_quotient(d, DIGIT)
    return C.add_(c).add_(constant), no_wrap


@leaf
def _mask_of_sum(r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """At D: the mask of `_open_sum`."""
    return logical_shift(s, DIGIT).add_(r)


@leaf
def _wrapped(r: torch.Tensor) -> torch.Tensor:
    """At D: msb(r)."""
    return logical_shift(r, 63)


@leaf
def _with_wrap(y, no_wrap, wrap, bits: int) -> torch.Tensor:
    """One party's half of y + 2^bits wrap where the public mask is set."""
    return (wrap << bits).bitwise_and_(no_wrap).add_(y)


@leaf
def _with_wrapped_product(y, no_wrap, d, wrap, with_s, bits: int) -> torch.Tensor:
    """One party's half of y + 2^bits wrap (d - s) where the public mask is set."""
    return (d * wrap).sub_(with_s).bitwise_left_shift_(bits).bitwise_and_(no_wrap).add_(y)


# Mantissa and exponent


@protocol("normalise", "docs/protocols.md")
def normalise(
    net: Net, x: Shares, low: int, high: int, fss: bool = False, step: int = 1, selected: bool = False,
    planes: int = 63,
) -> Normal:  # fmt: skip
    """Compute the mantissa and the exponent of x, for ring values 2^low <= x < 2^high. Exact.

    Below the range the mantissa is 1/2 and the exponent low + step; above it the mantissa is 1 - 2^-high and the
    exponent high. The first and the last bit of the result show that; a caller that has to refuse such values checks
    them.

    Args:
        low, high: 0 <= low < high <= 62.
        fss: compare by function keys (`fss.py`): comparison and bits then take no round.
        step: the exponents are those of `low` + step and so on to `high`, and the mantissa is in [2^-step, 1).
        selected: multiply x by each bit beside its conversion (`choose`): the product takes no round, and 8 dealt bytes
            for each threshold more (with `fss` 16 for each plane).
        planes: x is known to lie in 0 .. 2^planes - 1, with planes >= high; 63 assumes nothing.

    Rounds 1 + 3 (comparison) + 1 (bits) + 1 (product). Per element 32 bytes online and 18.5 dealt, and for each of the
    (high - low) / step + 1 thresholds 13.25 online and 14.875 dealt. Nobody learns anything.
    """
    masked, thresholds = open_masked(net, x), powers(low, high, step)
    if selected:
        if fss:
            bits, chosen = choose_by_keys(net, masked, thresholds, planes)
        else:
            bits, chosen = choose(net, drelu(net, masked, planes, thresholds), masked, len(thresholds))
        product = each(weighted_bit_sum, chosen, factor_steps(low, high, step))
    else:
        bits = at_least(net, masked, thresholds, fss, planes)
        factor = each(weighted_bit_sum, bits, factor_steps(low, high, step))
        product = multiply_masked(net, torch.mul, masked, open_masked(net, factor))
    return Normal(mantissa(product, bits, high), bits, low, high, step)


def powers(low: int, high: int, step: int = 1) -> tuple[int, ...]:
    """The thresholds that tell exponents apart."""
    return tuple(1 << k for k in range(low, high + 1, step))


def factor_steps(low: int, high: int, step: int = 1) -> list[int]:
    """By how much the factor 2^(high - e) changes at each threshold.

    It is 2^(high-low-step) from the first threshold on, each further one divides it by 2^step, and outside the range it
    is 0: a constant mantissa takes its place there.
    """
    factors = [1 << (high - k - step) for k in range(low, high, step)]
    return [b - a for a, b in zip([0, *factors], [*factors, 0], strict=True)]


def mantissa(product: Any, bits: Any, high: int) -> Any:
    """The product of x with its factor, and outside the range 1/2 or almost 1; linear in both."""
    # Below the range product and bits are 0. In it bits[0] takes the half away. Above it the product is 0 again.
    half, largest = 1 << (high - 1), (1 << high) - 1
    return product + half - bits[0] * half + bits[-1] * largest
