"""What has to hold of each value that is dealt: as products of bits, zeros and words (`prove.py`).

A mask r = r_A + r_S has carries c_0 = 0 and, with c_k and the bits of r_A and r_S,

    c_{k+1} = c_k xor (r_A,k xor c_k) (r_S,k xor c_k),       r_k = r_A,k xor r_S,k xor c_k.

The bits of r and its last carry are dealt in XOR shares, once for a mask: so A and S have shares of every carry. What
else is dealt of a mask is a product of these bits, or a word that a few bits choose among words that A and S have: of
words a_i of A and s_i of S, one of which is right for each value i of a bit b = b_A xor b_S,

    a_b xor s_b = (a_{b_A} xor s_{b_S}) xor b_S (a_0 xor a_1) xor b_A (s_0 xor s_1).

A and S work out their halves of a claim from what each holds; D does it for both.
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
from .dealing_proofs import Carries, Claim, Codes, DealerShares, DealtProducts, Products, Words, claims_of
from .masking import ComputedCorrection, Masked, deal_bits, planes_of


def _both(f: Callable, *values: Any) -> DealerShares:
    """f of what A has of the values, and of what S has."""
    return DealerShares(*(compute(f, *(_half(v, side) for v in values)) for side in "AS"))


def _several(f: Callable, *values: Any) -> list[DealerShares]:
    """As `_both`, of an f that gives several."""
    found = [compute(f, *(_half(v, side) for v in values)) for side in "AS"]
    return [DealerShares(*halves) for halves in zip(*found, strict=True)]


def _half(v: Any, side: str) -> Any:
    return getattr(v, side) if isinstance(v, DealerShares) else v


_AT = DealerShares(True, False)  # type: ignore[arg-type]
"""Whether it is A."""


@leaf(shapes=lambda r_A, r_S, v_A: torch.empty_like(v_A))
def _bits_less(r_A: torch.Tensor, r_S: torch.Tensor, v_A: torch.Tensor) -> torch.Tensor:
    """At D: the planes of the bits of r_A + r_S and of its last carry, under v_A."""
    return bitplanes.sum_bits(r_A, r_S, v_A)


def bits_of(net: Net, mask: Masked) -> DealerShares:
    """Words [65, W] of the bits of r and of its last carry; proved, and dealt once for a mask."""
    return _bits_beside(net, mask)[0]


def _bits_beside(net: Net, mask: Masked) -> tuple[DealerShares, DealerShares]:
    """As `bits_of`, and the planes of r_A at A and r_S at S."""
    known = claims_of(net).masks
    if mask.r_A not in known:
        shape = (65, words_for(mask.shape.numel()))
        made = ComputedCorrection(_bits_less, shape, (mask.r_A, mask.r_S))

        def claim(bits: DealerShares) -> None:
            own = DealerShares(planes_of(mask.r_A), planes_of(mask.r_S))
            _noted(net, Products(bits, own, Carries()))
            known[mask.r_A] = bits, own

        deal_bits(net, made, claim)
    return known[mask.r_A]


def _noted(net: Net, products: Products) -> None:
    """Among the claims of now: what comes first for a claim may be so much that those before it are proved."""
    claims_of(net).products.append(products)


def codes(net: Net, mask: Masked, spans: Sequence[tuple[int, int]], tops: Sequence[int]) -> Claim:
    """Of thermometer codes, words [7 blocks + tops, W], of the blocks of three planes in these spans, from -2 on."""

    def claim(dealt: DealerShares) -> None:
        _noted(net, Products(dealt, bits_of(net, mask), Codes(tuple(spans), tuple(tops))))

    return claim


def ands(net: Net, alpha: DealerShares, sets: np.ndarray) -> Claim:
    """Of the products of sets of rows of alpha, words [opened, W]; without its last row, a set is dealt as well."""

    def claim(dealt: DealerShares) -> None:
        rows: list[Rows] = [tuple(row for row in rows if row >= 0) for rows in sets.tolist()]
        place = {found: number for number, found in enumerate(rows)}
        many = dealt.shape[0]
        others = tuple(place[found[:-1]] if found[:-1] in place else many + found[0] for found in rows)
        sums = DealtProducts(others, tuple(many + found[-1] for found in rows))
        _noted(net, Products(dealt, alpha, sums))

    return claim


def floor_products(net: Net, alpha: DealerShares, mask: Masked) -> Claim:
    """Of the products of the masks eq, k and u, words [3, T W], and of w = msb(r), as `relu.py` deals them."""

    def claim(dealt: DealerShares) -> None:
        _noted(net, Products(dealt, _both(_floor_operands, alpha, bits_of(net, mask)), _FLOOR))

    return claim


_FLOOR = DealtProducts((6, 7, 7, 8, 6, 0), (8, 8, 9, 9, 9, 9))
"""Of eq, k, u and w, which come after the six that are dealt: eq u, k u, k w, u w, eq w and eq u w."""


@leaf
def _floor_operands(alpha: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """eq, k and u, and w for each copy."""
    return torch.cat((alpha, bits[63].repeat(alpha.shape[1] // bits.shape[1])[None]))


# Words


def bits_as_numbers(net: Net, words: Callable[[], DealerShares], copies: int | None) -> Claim:
    """Of the bits of words [W] or [copies * W] as ring elements 0 and 1, of 64 or 32 bits."""

    def claim(dealt: DealerShares) -> None:
        bits = words()
        base, factor = compute(_complement, bits.A, dealt.A, copies)
        base = DealerShares(base, dealt.S.to(torch.int64))
        claims_of(net).words.append(Words(base, copies or 1, ((factor, bits.S),)))

    return claim


@leaf
def _complement(words, v_A, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What S's half has to be where its half of the bit is 0, and what is different where it is 1."""
    return bitplanes.complements(words, v_A, copies)


def choice_constraint(
    net: Net, mask_bits: Callable[[], DealerShares], value: DealerShares, copies: int | None
) -> Claim:
    """Of b v for a bit b of words and a value v = v_A + v_S: 0 = a_0 = -d_A, or d_S - v_S = v_A - d_A."""

    def claim(dealt: DealerShares) -> None:
        bits = mask_bits()
        base, factor = _several(_chosen, _AT, dealt, value, bits, copies)
        terms = ((factor.A, bits.S),), ((factor.S, bits.A),)
        claims_of(net).words.append(Words(base, copies or 1, *terms))

    return claim


@leaf
def _chosen(at_A: bool, dealt, value, bits, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The word that one's own half of the bit takes of the two, and the difference that the other half makes."""
    zero, one = (-dealt, value - dealt) if at_A else (dealt, dealt - value)
    return bitplanes.choice_words(zero, one, bits, copies)


def sign(net: Net, mask: Masked) -> Claim:
    """Of msb(r) as a number."""
    return bits_as_numbers(net, lambda: _both(_row, bits_of(net, mask), 63), None)


@leaf
def _row(words: torch.Tensor, row: int) -> torch.Tensor:
    return words[row].clone()


def quotient(net: Net, mask: Masked, shift: int) -> Claim:
    """Of r >> f = (r_A >> f) + (r_S >> f) + c_f - 2^(64-f) c_64."""

    def claim(dealt: DealerShares) -> None:
        low, last = _several(_two_carries, *_bits_beside(net, mask), shift)
        base, *factors = compute(_quotients, dealt.A, mask.r_A, low.A, last.A, shift)
        at_S = compute(_less_quotient, dealt.S, mask.r_S, shift)
        chosen = low.S, last.S, low.S & last.S
        claims_of(net).words.append(Words(DealerShares(base, at_S), 1, tuple(zip(factors, chosen, strict=True))))

    return claim


@leaf
def _two_carries(bits: torch.Tensor, own: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves of c_f and of c_64."""
    return bits[shift] ^ own[shift], bits[64].clone()


@leaf
def _quotients(v_A, r_A, low, last, shift: int) -> tuple[torch.Tensor, ...]:
    """What S's half less its r_S >> f has to be, by S's halves of the two carries: coefficients of 1, c, c', c c'."""
    return bitplanes.quotients(v_A, r_A, low, last, shift)


@leaf
def _less_quotient(v_S: torch.Tensor, r_S: torch.Tensor, shift: int) -> torch.Tensor:
    return v_S - logical_shift(r_S, shift)
