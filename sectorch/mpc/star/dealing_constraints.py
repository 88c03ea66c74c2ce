"""Constraints on dealt values: what a dealer claims of each kind of value that it deals, for `dealing_proofs.py`.

Claims are products of bits, sums of bits that are zero, and words that are zero. Each function here returns the `Claim`
of one kind of value. A mask r = r_A + r_S has carries c_0 = 0 and, with c_k and the bits of r_A and r_S,

    c_{k+1} = c_k xor (r_A,k xor c_k) (r_S,k xor c_k),       r_k = r_A,k xor r_S,k xor c_k.

The bits of r and its last carry are dealt in XOR shares, once for each mask, which gives A and S shares of every carry.
Everything else that is dealt of a mask is a product of these bits, or a word that a few bits choose among words of A
and of S. With words a_0, a_1 of A and s_0, s_1 of S, the choice by a bit b = b_A xor b_S is

    a_b xor s_b = (a_{b_A} xor s_{b_S}) xor b_S (a_0 xor a_1) xor b_A (s_0 xor s_1).

A and S compute their halves of a claim from what each holds; D computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...choreography import Net, leaf
from ...choreography.located import compute
from ...ring import bitplanes, logical_shift
from ...ring.bitplanes import Rows, words_for
from .dealing_proofs import (
    CarrySums,
    Claim,
    CodeSums,
    DealerShares,
    DealingProofs,
    ProductClaims,
    ProductSums,
    WordClaims,
)
from .masking import ComputedCorrection, Masked, deal_bits, planes_of


def _both(f: Callable, *values: Any) -> DealerShares:
    """Apply f to A's halves of the values, and to S's."""
    return DealerShares(*(compute(f, *(_half(v, side) for v in values)) for side in "AS"))


def _several(f: Callable, *values: Any) -> list[DealerShares]:
    """`_both` for an f that returns a tuple."""
    found = [compute(f, *(_half(v, side) for v in values)) for side in "AS"]
    return [DealerShares(*halves) for halves in zip(*found, strict=True)]


def _half(v: Any, side: str) -> Any:
    return getattr(v, side) if isinstance(v, DealerShares) else v


_AT = DealerShares(True, False)  # type: ignore[arg-type]
"""An argument of kernels of both parties: whether the party is A."""


@leaf(shapes=lambda r_A, r_S, v_A: torch.empty_like(v_A))
def _bits_less(r_A: torch.Tensor, r_S: torch.Tensor, v_A: torch.Tensor) -> torch.Tensor:
    """At D: the bit planes of r_A + r_S and its last carry, masked by v_A."""
    return bitplanes.sum_bits(r_A, r_S, v_A)


def bits_of(net: Net, mask: Masked) -> DealerShares:
    """Deal the bits of r and its last carry, words [65, W], with their own claim; once for each mask."""
    return _bits_and_halves(net, mask)[0]


def _bits_and_halves(net: Net, mask: Masked) -> tuple[DealerShares, DealerShares]:
    """`bits_of`, and the planes of r_A at A and r_S at S."""
    masks = net.state(DealingProofs).masks
    if mask.r_A not in masks:
        shape = (65, words_for(mask.shape.numel()))
        correction = ComputedCorrection(_bits_less, shape, (mask.r_A, mask.r_S))

        def claim(bits: DealerShares) -> None:
            halves = DealerShares(planes_of(mask.r_A), planes_of(mask.r_S))
            _add_products(net, ProductClaims(bits, halves, CarrySums()))
            masks[mask.r_A] = bits, halves

        deal_bits(net, correction, claim)
    return masks[mask.r_A]


def _add_products(net: Net, products: ProductClaims) -> None:
    """Add claims to the pending ones of this moment: dealing what the claims need may have proved the earlier ones."""
    net.state(DealingProofs).products.append(products)


def codes(net: Net, mask: Masked, spans: Sequence[tuple[int, int]], tops: Sequence[int]) -> Claim:
    """The claim of thermometer codes, words [7 blocks + tops, W], of the blocks of three planes in these spans.

    A span may begin at plane -2, where its lowest block is padded with zeros.
    """

    def claim(dealt: DealerShares) -> None:
        _add_products(net, ProductClaims(dealt, bits_of(net, mask), CodeSums(tuple(spans), tuple(tops))))

    return claim


def ands(net: Net, alpha: DealerShares, sets: np.ndarray) -> Claim:
    """The claim of the products of sets of rows of alpha, words [opened rows, W].

    A product of three or more rows is claimed as that of all but the last row, which is dealt as well, and the last.
    """

    def claim(dealt: DealerShares) -> None:
        factors: list[Rows] = [tuple(row for row in rows if row >= 0) for rows in sets.tolist()]
        place = {rows: number for number, rows in enumerate(factors)}
        count = dealt.shape[0]  # rows of alpha are numbered after the dealt ones
        # `sets` has all subsets that Beaver's formula needs, so a set without its last row is dealt too, or is one row
        # of alpha.
        x = tuple(place[rows[:-1]] if rows[:-1] in place else count + rows[0] for rows in factors)
        sums = ProductSums(x, tuple(count + rows[-1] for rows in factors))
        _add_products(net, ProductClaims(dealt, alpha, sums))

    return claim


def floor_products(net: Net, alpha: DealerShares, mask: Masked) -> Claim:
    """The claim of the products of the masks of eq, k and u, words [3, T W], and of w = msb(r), as in `relu.py`."""

    def claim(dealt: DealerShares) -> None:
        _add_products(net, ProductClaims(dealt, _both(_floor_operands, alpha, bits_of(net, mask)), _FLOOR))

    return claim


_FLOOR = ProductSums((6, 7, 7, 8, 6, 0), (8, 8, 9, 9, 9, 9))
"""eq u, k u, k w, u w, eq w and eq u w: rows 0..5 are the dealt products, rows 6..9 are eq, k, u and w."""


@leaf
def _floor_operands(alpha: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The masks of eq, k and u, and w repeated for each threshold."""
    return torch.cat((alpha, bits[63].repeat(alpha.shape[1] // bits.shape[1])[None]))


# Claims on words


def bits_as_numbers(net: Net, words: Callable[[], DealerShares], copies: int | None) -> Claim:
    """The claim of bits, words [W] or [copies * W], that are dealt as ring elements 0 and 1 of 64 or 32 bits."""

    def claim(dealt: DealerShares) -> None:
        bits = words()
        base, factor = compute(_complement, bits.A, dealt.A, copies)
        base = DealerShares(base, dealt.S.to(torch.int64))
        net.state(DealingProofs).words.append(WordClaims(base, copies or 1, ((factor, bits.S),)))

    return claim


@leaf
def _complement(words, v_A, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The required half of S where its half of the bit is 0, and the difference where it is 1."""
    return bitplanes.complements(words, v_A, copies)


def choice_constraint(
    net: Net, mask_bits: Callable[[], DealerShares], value: DealerShares, copies: int | None
) -> Claim:
    """The claim of d = b v for a bit b of words and a value v = v_A + v_S.

    Where b = 0, d_S = -d_A; where b = 1, d_S - v_S = v_A - d_A.
    """

    def claim(dealt: DealerShares) -> None:
        bits = mask_bits()
        base, factor = _several(_choice_words, _AT, dealt, value, bits, copies)
        terms = ((factor.A, bits.S),), ((factor.S, bits.A),)
        net.state(DealingProofs).words.append(WordClaims(base, copies or 1, *terms))

    return claim


@leaf
def _choice_words(at_A: bool, dealt, value, bits, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The word that a party's own half of the bit chooses, and the difference that the other half makes."""
    zero, one = (-dealt, value - dealt) if at_A else (dealt, dealt - value)
    return bitplanes.choice_words(zero, one, bits, copies)


def sign(net: Net, mask: Masked) -> Claim:
    """The claim of msb(r), dealt as a number."""
    return bits_as_numbers(net, lambda: _both(_row, bits_of(net, mask), 63), None)


@leaf
def _row(words: torch.Tensor, row: int) -> torch.Tensor:
    return words[row].clone()


def quotient(net: Net, mask: Masked, shift: int) -> Claim:
    """The claim of the quotient r >> f = (r_A >> f) + (r_S >> f) + c_f - 2^(64-f) c_64."""

    def claim(dealt: DealerShares) -> None:
        low, last = _several(_two_carries, *_bits_and_halves(net, mask), shift)
        base, *factors = compute(_quotients, dealt.A, mask.r_A, low.A, last.A, shift)
        at_S = compute(_less_quotient, dealt.S, mask.r_S, shift)
        chosen = low.S, last.S, low.S & last.S
        net.state(DealingProofs).words.append(
            WordClaims(DealerShares(base, at_S), 1, tuple(zip(factors, chosen, strict=True)))
        )

    return claim


@leaf
def _two_carries(bits: torch.Tensor, own: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's halves of the carries c_f and c_64."""
    return bits[shift] ^ own[shift], bits[64].clone()


@leaf
def _quotients(v_A, r_A, low, last, shift: int) -> tuple[torch.Tensor, ...]:
    """The required value of S's half less r_S >> f: coefficients of 1, c, c' and c c' for S's halves of the carries."""
    return bitplanes.quotients(v_A, r_A, low, last, shift)


@leaf
def _less_quotient(v_S: torch.Tensor, r_S: torch.Tensor, shift: int) -> torch.Tensor:
    return v_S - logical_shift(r_S, shift)
