"""Sums of squares of whole rows, exact in Z_2^128, from one opening of their entries.

Statistics of a row need n Σx² - (Σx)² or Σx². Of entries with 40 fraction bits these leave Z_2^64. In Z_2^128 they fit,
and no entry has to be rounded first: with c = x + r open mod 2^64, and c and r read as signed numbers,

    x = c - r + 2^64 ω,        ω = α - β [r < 0],        α = [c < -2^62],        β = α + [c >= 2^62]

over the integers, for |x| < 2^62: c and r differ by more than 2^63 only where c wraps around. α and β are public, and D
knows [r < 0]. With q_i = n c_i - Σc and t_i = n r_i - Σr, or c_i and r_i where the mean is not taken off,

    T = Σ c q - 2 Σ q r + Σ r t + 2^65 Σ ω (q - t)        mod 2^128.

The first term is public, D knows the third, and the others are linear in r, [r < 0] and [r < 0] t with public factors.
Halves of r mod 2^64 lack its carry κ in r = r_A + r_S + 2^64 κ, which D deals beside the other two.

Source: Beaver's products (PrivHFL, C.4.1), with operands that are lifted to a larger ring as in `truncate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...choreography import Message, Net, leaf, protocol
from ...ring import wide
from ...ring.wide import minus, plus, sum_of, sum_of_products, terms_of, times
from .dealing_proofs import refuse_unproved
from .fss import borrow
from .masking import ComputedCorrection, DealersMask, Masked, deal
from .shares import Shares


@protocol("square_sum", "docs/protocols.md; PrivHFL, C.4.1 (Beaver)", [
    Message("c_A", "A", "S", "rho_A of k_DA"), Message("c_S", "S", "A", "rho_S of k_DS"),
])  # fmt: skip
def square_sum(
    net: Net, x: Masked, dims: tuple[int, ...], centred: bool, offset: int, shifts: Sequence[int]
) -> list[Shares]:
    """Compute floor((T + offset) / 2^k) mod 2^64 for each k of `shifts`. Exact.

    T is the sum of x^2 over `dims`, and with `centred` n times that, less the square of the sum of x.

    Args:
        x: an opening of values below 2^62 in magnitude.
        dims: n elements, `wide.MOST_TERMS` at most; they are kept, with size 1.
        offset: public, added to T. T + offset is below 2^128.
        shifts: 1 to 64 bits each.

    Rounds 1 beside the opening. Dealt 24 bytes an element; for each row 32 bytes online and, for each shift k, 8 bytes
    and a key of k planes dealt. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for these products and keys.
    """
    refuse_unproved(net)
    D, A, S = net.D, net.A, net.S
    mask = x.at_dealer
    known = deal(net, ComputedCorrection(_known_less, (3, *x.shape), (x.r, mask.A, mask.S, dims, centred)))
    halves = (
        _half(x.c, mask.A, known.A, dims, centred, offset, first=True),
        _half(x.c, mask.S, known.S, dims, centred, 0, first=False),
    )
    rho_A = net.common(D, A, halves[0].shape, "rho_A")
    rho_S = net.common(D, S, halves[1].shape, "rho_S")
    c_A, c_S = _plus(halves[0], rho_A).send(A, S, "c_A"), _plus(halves[1], rho_S).send(S, A, "c_S")
    # The halves lack D's term, which is in the mask, so that nothing is dealt for it.
    c, rho = _plus(c_A, c_S), _mask_of_sum(x.r, rho_A, rho_S, dims, centred)
    opened = DealersMask(c[0], rho[0])
    results = []
    for shift in shifts:
        R = deal(net, _above(rho, shift))
        u = borrow(net, opened, opened.c, shift)
        results.append(Shares(_above(c, shift) - R.A - u.A, -R.S - u.S))
    return results


@leaf(shapes=lambda r, _A, _S, _dims, _centred, v_A: torch.empty_like(v_A))
def _known_less(r, r_A, r_S, dims: tuple[int, ...], centred: bool, v_A) -> torch.Tensor:
    """At D: [r < 0], [r < 0] t and κ, less v_A."""
    negative = (r < 0).to(torch.int64)
    # The sum of two halves of one sign leaves the range of a word exactly if r has the other sign.
    below, above = (r_A & r_S & ~r) < 0, (~r_A & ~r_S & r) < 0
    carry = below.to(torch.int64) - above.to(torch.int64)
    return torch.stack((negative, negative * _centred(r, dims, centred), carry)) - v_A


def _centred(v: torch.Tensor, dims: tuple[int, ...], centred: bool) -> torch.Tensor:
    """n v_i - Σv mod 2^64, or v."""
    return terms_of(v, dims) * v - v.sum(dims, keepdim=True) if centred else v


def _row_shapes(c, _r, _known, dims: tuple[int, ...], *_, **__) -> torch.Tensor:
    return c.new_empty(2, *c.sum(dims, keepdim=True).shape)


@leaf(shapes=_row_shapes)
def _half(c, r, known, dims: tuple[int, ...], centred: bool, offset: int, first: bool) -> torch.Tensor:
    """One party's half of T without D's term; the first party adds what is public."""
    total = _twice_product(c, r, dims, centred)
    if first:
        total = plus(minus(wide.square_sum(c, dims, centred), total), wide.constant(offset, total))
    else:
        total = minus(torch.zeros_like(total), total)
    bound = 1 << 62
    low = (c < -bound).to(torch.int64)
    beyond, q = low + (c >= bound), _centred(c, dims, centred)
    wrapped = -low * _centred(r, dims, centred) - beyond * (known[0] * q - known[1]) - q * known[2]
    wrapped = wrapped + low * q if first else wrapped
    wrapped = wrapped.sum(dims, keepdim=True)
    return plus(total, torch.stack((torch.zeros_like(wrapped), wrapped << 1)))


def _twice_product(c: torch.Tensor, r: torch.Tensor, dims: tuple[int, ...], centred: bool) -> torch.Tensor:
    """2 Σ q r mod 2^128 for signed words c and r."""
    product = sum_of_products(c, r, dims)
    if centred:
        n = wide.constant(terms_of(c, dims), product)
        product = minus(times(n, product), times(sum_of(c, dims), sum_of(r, dims)))
    return plus(product, product)


@leaf(shapes=lambda x, _y: torch.empty_like(x))
def _plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plus(x, y)


@leaf(shapes=lambda _r, rho_A, *_: torch.empty_like(rho_A))
def _mask_of_sum(r, rho_A, rho_S, dims: tuple[int, ...], centred: bool) -> torch.Tensor:
    """At D: the mask of T, with D's term in it."""
    return minus(plus(rho_A, rho_S), wide.square_sum(r, dims, centred))


@leaf(shapes=lambda x, _shift: torch.empty_like(x[0]))
def _above(x: torch.Tensor, shift: int) -> torch.Tensor:
    return wide.low_word_above(x, shift)
