"""Exact truncation: x / 2^f rounded half up, as a function of x alone.

With x' = x + 2^(f-1) and c = x' + r, open to A and S, c' = c + 2^62 and logical shifts, for |x'| < 2^62,

    x' >> f = (c' >> f) - 2^(62-f) - (r >> f) - u + 2^(64-f) msb(r) (1 - msb(c')),     u = [c mod 2^f < r mod 2^f].

A and S know the public quotient C = (c' >> f) - 2^(62-f) and whether msb(c') = 0; D knows R = r >> f and the bit
msb(r). The last term restores the 2^64 that is lost where c' = x' + 2^62 + r wraps around: x' + 2^62 is below 2^63, so
that happens exactly if msb(r) = 1 and msb(c') = 0. Local truncation of shares, which most systems use, fails with
probability |x|/2^64 per element instead.

u is the borrow of the planes that are dropped. Without it the result would be floor(x' / 2^f) or one more, depending on
x' mod 2^f + r mod 2^f. D, which is Q as a rule, knows r, and could infer x' mod 2^f from many results to the same
query. With the borrow the result does not depend on r. The borrow is a comparison in f planes: in a tree of its own, in
one round by wide blocks (`compare.py`), by function keys (`fss.py`), or as a part of a sign's tree (`relu.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...backend import MAX_SHIFT
from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute
from ...errors import ArgumentError
from ...ring import HEADROOM_BITS, logical_shift, sign_mask
from ...ring.bitplanes import fast, signs_of, words_for
from . import dealing_constraints
from .and_layers import and_layers
from .compare import (
    CODES,
    Blocks,
    bits_of_layers,
    block_count,
    blocks_between,
    deal_codes,
    deal_wide_codes,
    forest,
    forest_worth,
    leaves,
    one_layer,
    wide_leaves,
    wide_less,
)
from .dealing_proofs import DealerShares
from .fss import borrow, borrow_and_product
from .masking import ComputedCorrection, Masked, deal, open_masked, planes_of
from .select import BitMask, bits_less, by_words, mask_select, open_bit, per_element, random_bits
from .shares import Shares, each
from .thresholds import raise_outside

BORROW_BLOCKS = 5
"""Blocks of a borrow in one round: for 20 planes 75 bits of codes and 37 of products are dealt."""

WIDEST_CODE = 10
"""Most bits of a block of `borrow_as_number`, for which 1,023 are dealt."""


@functools.cache
def wide_excess(shift: int) -> tuple[float, int]:
    """The bytes an element that a borrow by wide blocks takes beyond those of a tree, and the rounds that it saves."""
    span, count = blocks_between(0, shift, BORROW_BLOCKS), block_count(0, shift)
    wide, (layers, _) = one_layer(len(span.widths)), forest((count,), (False,))
    bits = span.codes + bits_of_layers(wide) - CODES * count - bits_of_layers(layers)
    return bits / 8, len(layers) - len(wide)


@functools.cache
def number_span(shift: int) -> tuple[Blocks, float]:
    """The blocks of `borrow_as_number` with the fewest bytes, and the bytes an element that it takes beyond a tree."""
    tree = (CODES * block_count(0, shift) + bits_of_layers(forest((block_count(0, shift),), (False,))[0]) + 2) / 8 + 8
    found = []
    for count in range(1, min(BORROW_BLOCKS, shift) + 1):
        span = blocks_between(0, shift, count)
        if max(span.widths) <= WIDEST_CODE:
            found.append((span.codes / 8 + (2 * count - 1) / 4 + 8 * len(_sets(count)) - tree, count))
    more, count = min(found)
    return blocks_between(0, shift, count), more


@dataclass(frozen=True)
class Quotient:
    """What D knows of x >> f: `value` = r >> f, and the bit `wrap` = msb(r) (int32)."""

    value: Located
    wrap: Located


def quotient(net: Net, x: Masked, shift: int) -> Quotient:
    """r >> shift and msb(r), at D."""
    return Quotient(compute(logical_shift, x.r, shift), (x.r < 0).to(torch.int32))


def check_shift(shift: int, least: int = 0) -> None:
    """Raise `ArgumentError` unless least <= shift <= 32.

    The bit msb(r) is shared mod 2^32, and 2^(64-f) times it uses the low f bits of that.
    """
    if not least <= shift <= MAX_SHIFT:
        raise ArgumentError(f"a truncation shifts by {least} to {MAX_SHIFT} bits, got {shift}")


def half(shift: int) -> int:
    """What rounding half up adds before the floor."""
    return (1 << shift) >> 1


@leaf
def public_quotient(c: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """C, and the mask (all ones) of the elements with msb(c') = 0, for c with the half added."""
    lifted = c + (1 << HEADROOM_BITS)
    C = logical_shift(lifted, shift).sub_(1 << (HEADROOM_BITS - shift))
    return C, sign_mask(lifted.bitwise_not_())


def wrap_term(wrap: torch.Tensor, shift: int) -> torch.Tensor:
    """2^(64 - shift) times a bit shared mod 2^32, as an int64 half."""
    return wrap.to(torch.int64).bitwise_left_shift_(64 - shift)


@protocol("truncate", "docs/protocols.md")
def truncate(
    net: Net, x: Shares | Masked, shift: int, fss: bool = False, limit_bits: int | None = None, wide: bool = False,
    number: bool = False,
) -> Shares:  # fmt: skip
    """Compute floor(x / 2^shift + 1/2) for |x| < 2^62 - 2^(shift-1). Exact.

    Args:
        x: shares of any shape, or their opening.
        shift: fraction bits to drop, 1..32.
        fss: compute the borrow by function secret sharing (`fss.py`): no round, and 24 * shift + 24 more dealt bytes.
        limit_bits: raise a flag (`guard.py`) where the result is not within -2^limit_bits .. 2^limit_bits - 1. The
            planes above are then compared as well (`thresholds.py`).
        wide: compute the borrow in one round by wide blocks (`compare.py`), with some 9 more dealt bytes.
        number: compute the borrow as a number in that round (`borrow_as_number`), so that no round brings its bit into
            the ring; with some 100 more dealt bytes.

    Rounds 1 (opening) + ceil(log4 B) (borrow; or one more, see `forest_worth`) + 1 (bit), B = ceil(shift / 3). With 20
    bits: 4 rounds, 19.75 bytes online (8 of them ahead after a linear layer), 27.875 dealt, per element. Nobody learns
    anything.
    """
    check_shift(shift, least=1)
    masked = x if isinstance(x, Masked) else open_masked(net, x)
    wrap = deal(
        net,
        ComputedCorrection(negative_less, masked.shape, (masked.r,)),
        torch.int32,
        dealing_constraints.sign(net, masked),
    )
    if fss or number:
        R = deal(
            net,
            ComputedCorrection(shifted_less, masked.shape, (masked.r, shift)),
            claim=dealing_constraints.quotient(net, masked, shift),
        )
        c, limit = masked.c + half(shift), None if limit_bits is None else shift + limit_bits
        if fss:
            u = borrow(net, masked, c, shift)
            if limit is not None:
                raise_outside(net, masked, limit, shift, half(shift), fss=True)
        else:
            bits = planes_of(masked.c, (-half(shift),))
            u = borrow_as_number(net, masked, bits, shift)
            if limit is not None:
                raise_outside(net, masked, limit, shift, half(shift), each(_low_bits, u), bits)
        return Shares(_floor(c, R.A, wrap.A, u.A, shift, 1), _floor(c, R.S, wrap.S, u.S, shift, 0))
    mask = random_bits(net, masked.shape, 1)
    operands = deal_operands(net, masked, mask, 0, shift)
    bits = planes_of(masked.c, (-half(shift),))
    words = _borrow(net, masked, bits, shift, wide)
    e = open_bit(net, words, mask)
    if limit_bits is not None:
        raise_outside(net, masked, shift + limit_bits, shift, half(shift), words, bits)
    at_A = _floor_by_bit(*e, masked.c, operands.A, wrap.A, shift, 1)
    return Shares(at_A, _floor_by_bit(*e, masked.c, operands.S, wrap.S, shift, 0))


@protocol("truncate_and_multiply", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def truncate_and_multiply(net: Net, x: Shares | Masked, shift: int, y: Shares) -> Shares:
    """Compute floor(x / 2^shift + 1/2) y, element by element, for |x| < 2^62 - 2^(shift-1). Exact mod 2^64. By keys.

    With d = y + s open beside c, the product is d q - s q for the quotient q of `truncate`. Of s q, s C is local, and
    D deals s R and s msb(r), whose factors it knows. s u is the second payload of the borrow's key.

    Rounds 1; per element 32 bytes online, and 64 shift + 56 dealt. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for keys.
    """
    check_shift(shift, least=1)
    masked, other = x if isinstance(x, Masked) else open_masked(net, x), open_masked(net, y)
    known, c = quotient(net, masked, shift), masked.c + half(shift)
    R, w = deal(net, known.value), deal(net, known.wrap, torch.int32)
    with_R, with_w = deal(net, known.value * other.r), deal(net, _times_bit(known.wrap, other.r), torch.int32)
    u, with_u = borrow_and_product(net, masked, c, shift, other.r)
    halves = []
    for party, first in (("A", 1), ("S", 0)):
        q = _floor(c, *(getattr(v, party) for v in (R, w, u)), shift, first)
        dealt = (getattr(v, party) for v in (with_R, with_w, with_u))
        halves.append(_product_half(c, other.c, q, *dealt, getattr(other, f"r_{party}"), shift))
    return Shares(*halves)


@leaf
def _times_bit(wrap: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """At D: msb(r) s mod 2^32."""
    return wrap * s.to(torch.int32)


@leaf
def _product_half(c, d, q, with_R, with_w, with_u, s, shift: int) -> torch.Tensor:
    """One party's half of d q - s q, from its halves of q, s R, s msb(r), s u and s."""
    C, no_wrap = public_quotient(c, shift)
    return d * q - s * C - wrap_term(with_w, shift).bitwise_and_(no_wrap) + with_R + with_u


def deal_operands(net: Net, x: Masked, mask: BitMask, chosen: int, shift: int) -> Shares:
    """Deal the operands of a result by shift and opened bits: R, the bits of the mask, and R times the first bits.

    Args:
        x: the opening whose r is shifted; R = r >> shift (logical).
        mask: random bits in B copies.
        chosen: how many of the copies R is multiplied by.

    Returns:
        Shares [1 + B + chosen, *x.shape]. Ahead of the query, 8 bytes for each element of them.
    """
    count = mask.copies or 1

    def claim(dealt: DealerShares) -> None:
        dealing_constraints.quotient(net, x, shift)(dealt[0])
        dealing_constraints.bits_as_numbers(net, mask.halves, count)(dealt[1 : 1 + count])
        if chosen:
            dealing_constraints.choice_constraint(net, mask.part(0, chosen).halves, dealt[0], chosen)(
                dealt[1 + count :]
            )

    correction = ComputedCorrection(operands_less, (1 + count + chosen, *x.shape), (*mask.words, x.r, chosen, shift))
    return deal(net, correction, claim=claim)


@leaf(shapes=lambda *values: torch.empty_like(values[-1]))
def operands_less(
    first, second, shape: torch.Size, copies: int | None, at: int, r, chosen: int, shift: int, v_A: torch.Tensor
) -> torch.Tensor:
    """At D: the values of `deal_operands`, less v_A."""
    if loops := fast(first, second, r, v_A):
        out = torch.empty_like(v_A)
        words = [by_words(v, shape, copies, at) for v in (first, second)]
        rows = [v.numpy().reshape(1 + len(words[0]) + chosen, r.numel()) for v in (v_A, out)]
        loops.run_on_words(
            words_for(r.numel()), loops.operands, *words, loops.array(r).reshape(-1), chosen, shift, *rows
        )
        return out
    R, bits = logical_shift(r, shift).unsqueeze(0), per_element(first, second, shape, copies or 1, at)
    return torch.cat((R, -bits, bits[:chosen] & R)) - v_A


@leaf(shapes=lambda c, *_: torch.empty_like(c))
def _floor(c, R, wrap, u, shift: int, first: int) -> torch.Tensor:
    """One party's half of x >> shift; the `first` party adds the public quotient."""
    if not (loops := fast(c, R, wrap, u)):
        C, no_wrap = public_quotient(c, shift)
        half = wrap_term(wrap, shift).bitwise_and_(no_wrap).sub_(R).sub_(u)
        return half.add_(C) if first else half
    out = torch.empty(c.shape, dtype=torch.int64)
    arrays = [loops.array(v).reshape(-1) for v in (c, R, wrap, u)]
    loops.run_on_words(c.numel(), loops.floors, *arrays, shift, first, out.view(-1).numpy())
    return out


@leaf(shapes=lambda first, second, c, *_: torch.empty_like(c))
def _floor_by_bit(first, second, c, operands, wrap, shift: int, one: int) -> torch.Tensor:
    """`_floor` where u is open under a random bit, in two halves of words; `operands` are R and that bit."""
    if not (loops := fast(first, second, c, operands, wrap)):
        u = mask_select(per_element(first, second, c.shape, None), operands[1], one)
        return _floor(c + half(shift), operands[0], wrap, u, shift, one)
    out = torch.empty(c.shape, dtype=torch.int64)
    words = (by_words(v, c.shape, None)[0] for v in (first, second))
    elements = loops.array(c).reshape(-1), operands.numpy().reshape(2, c.numel()), loops.array(wrap).reshape(-1)
    arrays = *words, *elements, half(shift), shift, one, out.numpy().reshape(-1)
    loops.run_on_words(words_for(c.numel()), loops.floors_by_bit, *arrays)
    return out


@leaf(shapes=lambda r, shift, v_A: torch.empty_like(v_A))
def shifted_less(r: torch.Tensor, shift: int, v_A: torch.Tensor) -> torch.Tensor:
    """At D: r >> shift (logical), less v_A."""
    if not (loops := fast(r, v_A)):
        return logical_shift(r, shift) - v_A
    out, arrays = torch.empty_like(v_A), [loops.array(v).reshape(-1) for v in (r, v_A)]
    loops.run_on_words(r.numel(), loops.shifted_less, arrays[0], shift, arrays[1], out.view(-1).numpy())
    return out


@leaf(shapes=lambda r, v_A: torch.empty_like(v_A))
def negative_less(r: torch.Tensor, v_A: torch.Tensor) -> torch.Tensor:
    """At D: msb(r) less v_A, mod 2^32."""
    if not (loops := fast(r, v_A)):
        return (r < 0).to(torch.int32) - v_A
    out, arrays = torch.empty_like(v_A), [loops.array(v).reshape(-1) for v in (r, v_A)]
    loops.run_on_words(r.numel(), loops.negative_less, *arrays, out.view(-1).numpy())
    return out


# The borrow as a number
#
# Of the ANDs of a borrow u = lt_1 xor eq_1 lt_0 xor ... one is 1 at most, so that u is their sum as well. With each bit
# open under a mask, d = b xor alpha, b = d + (1 - 2 d) alpha in the ring: a sum of products of bits is linear in the
# products of masks, which D deals as numbers.


@functools.cache
def _sets(count: int) -> tuple[tuple[int, ...], ...]:
    """The sets of opened rows, lt of so many blocks and then eq of all but the lowest, whose masks' product is dealt.

    First those of eq alone, then for each block those of its lt and of eq above it. The numbers of sets of eq count in
    binary, with the highest block's eq as the last digit.
    """
    equal = [
        tuple(2 * count - 2 - bit for bit in range(count - 1) if number >> bit & 1) for number in range(1 << count - 1)
    ]
    return (*equal[1:], *((i, *rows) for i in range(count) for rows in equal[: 1 << count - 1 - i]))


@protocol("borrow_as_number", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def borrow_as_number(net: Net, x: Masked, bits: Located, shift: int) -> Shares:
    """Compute [c mod 2^shift < r mod 2^shift] for x's mask r as additive shares of 0 and 1. Exact.

    Args:
        bits: the public planes of c.

    Rounds 1; of 20 planes an element opens 10 bits, and 121 bytes are dealt. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for wide blocks.
    """
    D, A, S = net.D, net.A, net.S
    span, _ = number_span(shift)
    count = len(span.widths)
    codes = deal_wide_codes(net, x, (span,))
    state = Shares(wide_leaves(bits, codes.A, (span,), True), wide_leaves(bits, codes.S, (span,), False))
    shape = 2 * count - 1, words_for(x.shape.numel())
    alpha_A, alpha_S = net.common(D, A, shape, "alpha_A"), net.common(D, S, shape, "alpha_S")
    products = ComputedCorrection(
        _mask_products_less, torch.Size((len(_sets(count)), *x.shape)), (alpha_A, alpha_S, count, x.shape)
    )
    dealt = deal(net, products)
    sent_A = _opened_rows(state.A, alpha_A, count).send(A, S, "masked_A")
    sent_S = _opened_rows(state.S, alpha_S, count).send(S, A, "masked_S")
    at_A = _sum_of_ands(sent_A, sent_S, dealt.A, count, x.shape, True)
    return Shares(at_A, _sum_of_ands(sent_A, sent_S, dealt.S, count, x.shape, False))


@leaf(shapes=lambda state, alpha, count: torch.empty_like(alpha))
def _opened_rows(state: torch.Tensor, alpha: torch.Tensor, count: int) -> torch.Tensor:
    """lt of all blocks, and eq of all but the lowest, masked."""
    return torch.cat((state[:count], state[count + 1 :])).bitwise_xor_(alpha)


@leaf(shapes=lambda alpha_A, alpha_S, count, shape, v_A: torch.empty_like(v_A))
def _mask_products_less(alpha_A, alpha_S, count: int, shape: torch.Size, v_A: torch.Tensor) -> torch.Tensor:
    """At D: the products of masks of `_sets` as numbers, less v_A."""
    alpha = alpha_A ^ alpha_S
    words = torch.stack([functools.reduce(torch.bitwise_and, [alpha[i] for i in rows]) for rows in _sets(count)])
    words = words.reshape(-1)
    return bits_less(words, torch.zeros_like(words), shape, len(_sets(count)), 0, v_A)


@leaf(shapes=lambda sent_A, sent_S, dealt, *_: dealt[0])
def _sum_of_ands(sent_A, sent_S, dealt, count: int, shape: torch.Size, first: bool) -> torch.Tensor:
    """One party's half of lt_{n-1} + eq_{n-1} (lt_{n-2} + eq_{n-2} (... + eq_1 lt_0)), from the opened rows.

    The half of a product with sets of masks: the lowest block's lt with all sets of eq, of which each step takes one.
    """
    d = per_element(sent_A.reshape(-1), sent_S.reshape(-1), shape, 2 * count - 1) & 1
    s, sets = 1 - 2 * d, 1 << count - 1
    equal = torch.cat((torch.full_like(dealt[:1], int(first)), dealt[: sets - 1]))
    total, at = torch.zeros_like(equal), sets - 1
    for i in range(count):
        total = total + d[i] * equal[:sets] + s[i] * dealt[at : at + sets]
        at, sets = at + sets, sets // 2
        if sets:  # the eq of the next block
            total = d[count + i] * total[:sets] + s[count + i] * total[sets:]
    return total[0]


@leaf(shapes=lambda u: u.new_empty(words_for(u.numel())))
def _low_bits(u: torch.Tensor) -> torch.Tensor:
    """One party's half of a bit that is shared as a number, in packed words: the halves' lowest bits are XOR shares."""
    return signs_of(u << 63)


def _borrow(net: Net, x: Masked, bits: Located, shift: int, wide: bool) -> Shares:
    """u = [c mod 2^shift < r mod 2^shift] as XOR-shared words [W], from the planes of c, by a tree or in one round."""
    if wide:
        return wide_less(net, x, bits, blocks_between(0, shift, BORROW_BLOCKS))
    span, count = (0, shift), block_count(0, shift)
    codes = deal_codes(net, x, [span])
    state = Shares(leaves(bits, codes.A, (span,), True), leaves(bits, codes.S, (span,), False))
    layers, _ = forest_worth(net, x.shape.numel(), (count,), (False,))
    return and_layers(net, state, layers)[0]
