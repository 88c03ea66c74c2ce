"""ReLU, exact and leak-free, with the truncation that follows a linear layer in the same opening.

`ramps` is the protocol: max(x / 2^f - t, 0) for several public thresholds t. `relu` is `ramps` with the threshold 0,
and `maximum` is y + ReLU(x - y).

With x' = x + 2^(f-1), c = x' + r open to A and S, logical shifts and 0 <= x' < 2^62,

    x' >> f = (c >> f) - (r >> f) - u + 2^(64-f) msb(r) (1 - msb(c)),       u = [c mod 2^f < r mod 2^f],

and the sign bit of x' follows from a comparison whose low part is u: [c < r] = lt xor eq u, with lt and eq of the
planes from f on. A tree over the planes below f and a tree over those above run side by side (`compare.py`). With
k = not (c_63 xor r_63 xor lt), one more layer of ANDs

    b = [x' >= 0] = k xor eq u,     b u = (k xor eq) u,     b msb(r) = k msb(r) xor eq u msb(r)

gives all bits that max(x', 0) >> f needs (`_floor_bits`). D knows msb(r), so msb(r) is not opened.

Source: PrivHFL, 3.3 (ii), whose own DReLU is in `mpc/leaky.py`.
"""

from __future__ import annotations

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...ring import as_signed, logical_shift
from ...ring.bitplanes import fast, words_for
from . import dealing_constraints
from .and_layers import and_layers
from .compare import BLOCK, block_count, check_planes, deal_codes, drelu, forest_worth, pick_blocks
from .dealing_proofs import DealerShares
from .fss import gate
from .guard import clear_padding, raise_flags
from .masking import ComputedCorrection, Masked, deal_bits, open_masked, planes_of
from .select import BitMask, by_words, deal_mask, mask_select, open_masked_bit, per_element, random_bits, select
from .shares import Shares, each
from .thresholds import planes_above, raise_above
from .truncate import check_shift, deal_operands, half, truncate


def relu(
    net: Net, x: Shares, shift: int = 0, high: int = 63, fss: bool = False, limit_bits: int | None = None
) -> Shares:
    """Compute max(x, 0) / 2^shift, rounded half up: `ramps` with the threshold 0. Arguments and costs as there."""
    return ramps(net, x, (0,), shift, high, fss, limit_bits)[0]


@protocol("ramps", "PrivHFL, 3.3 (ii), made exact and leak-free")
def ramps(
    net: Net, x: Shares, thresholds: tuple[int, ...] = (0,), shift: int = 0, high: int = 63, fss: bool = False,
    limit_bits: int | None = None,
) -> list[Shares]:  # fmt: skip
    """Compute max(x / 2^shift - t, 0) for each public threshold t, with x / 2^shift rounded half up. Exact.

    Args:
        x: shares, any shape.
        thresholds: ring elements at the scale of the result. One opening and one dealing of r serve them all.
        shift: fraction bits to drop, 0..32; with a shift |x - t 2^shift| < 2^62 - 2^(shift-1), and with fss |x| too.
        high: x - t 2^shift is known to lie in [-2^high, 2^high - 2^shift); fewer planes are compared then.
        fss: compare by function keys (`fss.py`): one round (two with a shift), and some twenty times the dealt bytes.
        limit_bits: raise a flag (`guard.py`) where the first result is 2^limit_bits or more; about 8 bytes more.

    Returns:
        One tensor of shares for each threshold.

    Rounds: 1 (opening) + ceil(log4 B) (trees) + 1 (bit), and with a shift 1 more; B = ceil((high - shift) / 3) blocks.
    ReLU by 20 bits: 5 rounds, 29.25 bytes online (8 of them ahead after a linear layer), 69.875 dealt, per element.
    For so many elements that bytes are worth a round (`forest_worth`): 6 rounds, 30.75 online, 62.5 dealt.
    Nobody learns anything.
    """
    check_shift(shift)
    check_planes(high, shift)
    if fss:
        floor = truncate(net, x, shift, fss) if shift else x
        return gate(net, open_masked(net, floor), high - shift, thresholds, limit_bits)
    if shift:
        return _ramps_by_trees(net, open_masked(net, x), thresholds, shift, high, limit_bits)
    m = open_masked(net, x)
    limit = () if limit_bits is None else (as_signed(thresholds[0] + (1 << limit_bits)),)
    bits = drelu(net, m, high, thresholds + limit)
    bits = each(torch.Tensor.view, bits, len(thresholds) + len(limit), -1)
    if limit:
        raise_flags(net, each(clear_padding, bits[-1], x.shape))
    return [select(net, bits[i], Masked(m.c - t if t else m.c, m.r, m.r_A, m.r_S)) for i, t in enumerate(thresholds)]


def _ramps_by_trees(
    net: Net, x: Masked, thresholds: tuple[int, ...], shift: int, high: int, limit_bits: int | None = None
) -> list[Shares]:
    """`ramps` with a shift, by trees: first the bits of every threshold, then the products with them."""
    copies = len(thresholds)
    below = tuple(as_signed((t << shift) - half(shift)) for t in thresholds)
    mask = random_bits(net, x.shape, 3 * copies)
    operands = deal_operands(net, x, mask.part(0, 2 * copies), copies, shift)
    wraps = deal_mask(net, mask.part(2 * copies, 3 * copies), torch.int32)
    e = open_masked_bit(net, _compare(net, x, below, mask, shift, high, limit_bits))
    results = []
    for i, t in enumerate(below):
        place = i, copies, t, shift
        at_A = _product(*e, x.c, operands.A, wraps.A, *place, 1)
        results.append(Shares(at_A, _product(*e, x.c, operands.S, wraps.S, *place, 0)))
    return results


@leaf(shapes=lambda first, second, c, *_: torch.empty_like(c))
def _product(first, second, c, operands, wraps, i: int, copies: int, t: int, shift: int, one: int) -> torch.Tensor:
    """One party's half of s C - s R - s u + 2^(64-f) s msb(r) for threshold i; A has `one` = 1 and adds public terms.

    Args:
        first, second: public, the halves of e as words.
        operands: its halves of R, of the bits of s and u, and of s R, for all T thresholds, [1 + 3 T, ...].
        wraps: its halves of the bits of s msb(r).
        t: the threshold less the rounding half, in units of c.
    """
    if loops := fast(first, second, c, operands, wraps):
        out = torch.empty(c.shape, dtype=torch.int64)
        words = (by_words(v, c.shape, 3 * copies) for v in (first, second))
        dealt = (v.numpy().reshape(n, c.numel()) for v, n in ((operands, 1 + 3 * copies), (wraps, copies)))
        place = range(copies)[i], copies, one, t, shift, out.numpy().reshape(-1)
        loops.run_on_words(
            words_for(c.numel()), loops.floor_elements, *words, loops.array(c).reshape(-1), *dealt, *place
        )
        return out
    e, R = per_element(first, second, c.shape, 3 * copies), operands[0]
    bits, chosen = operands[1 : 1 + 2 * copies], operands[1 + 2 * copies :]
    out = mask_select(e[i], bits[i], one).mul_(logical_shift(c - t, shift))
    out -= mask_select(e[i], chosen[i], R)
    out -= mask_select(e[copies + i], bits[copies + i], one)
    return out.add_(mask_select(e[2 * copies + i], wraps[i].to(torch.int64), one).bitwise_left_shift_(64 - shift))


def _compare(
    net: Net,
    x: Masked,
    thresholds: tuple[int, ...],
    mask: BitMask,
    shift: int,
    high: int,
    limit_bits: int | None = None,
) -> Shares:
    """Compute b = [x' >= 0], b u and b msb(r) (1 - msb(c)) for every threshold: words [3 T W], XOR-shared and masked.

    With a limit, a flag is raised where x' of the first threshold is 2^(shift + limit_bits) or more.

    Args:
        thresholds: less the rounding half, in units of c.
        mask: the bits that the result is masked by.
    """
    copies = len(thresholds)
    spans = ((0, shift), (shift, high))
    counts = tuple(block_count(*span) for span in spans)
    plane = high if limit_bits is None else min(high, shift + limit_bits)
    # The blocks from the limit on are compared once more, with the first threshold alone: `above` are their planes.
    top = block_count(plane, high)
    codes = deal_codes(net, x, spans, (high,) if high == 63 else (high, 63))

    bits = planes_of(x.c, thresholds)
    above = planes_above(bits[:, : words_for(x.shape.numel())], plane, high) if top else None
    elements = copies * x.shape.numel()
    if top:
        layers, places = forest_worth(net, elements, (*counts, top), (False, True, True), (1, counts[1] - top))
    else:
        layers, places = forest_worth(net, elements, counts, (False, True))
    u, lt, eq, *far = places

    state = Shares(
        _leaves_and_above(bits, codes.A, spans, top, True, above),
        _leaves_and_above(bits, codes.S, spans, top, False, above),
    )
    state = and_layers(net, state, layers)
    # The codes end with r's planes `high`, for the sign of x', and 63, for msb(r): one row where they are the same
    # plane.
    r_high = -1 if high == 63 else -2
    if above is not None:
        raise_above(net, state, (u, *far), above[high], codes.shares, r_high, x.shape)

    return _floor_bits(net, x, state, codes, bits, mask, (eq, lt, u), (r_high, high))


@leaf(shapes=lambda bits, _, spans, top, *_1: bits.new_empty(2 * (_blocks(spans) + top), bits.shape[1]))
def _leaves_and_above(bits, codes, spans: tuple, top: int, first: bool, above=None) -> torch.Tensor:
    """One party's half of lt and eq: of both trees' blocks, and of the first threshold's `top` blocks beyond."""
    total, at, width = _blocks(spans), 0, codes.shape[1]
    several = bits.shape[1] > width
    state = (bits.new_zeros if several and top else bits.new_empty)(2 * (total + top), bits.shape[1])
    for span in spans:
        blocks = block_count(*span)
        pick_blocks(bits, codes, total, at, span, first, state[2 * at : 2 * (at + blocks)])
        at += blocks
    if above is not None:  # only the first threshold has a limit: the rows of the other copies are zero and unused
        high, place = spans[-1][1], state[2 * total :]
        out = place.new_empty(2 * top, width) if several else place
        pick_blocks(above, codes, total, total - top, (high - BLOCK * top, high), first, out)
        if several:
            place[:, :width] = out
    return state


def _blocks(spans: tuple) -> int:
    return sum(block_count(*span) for span in spans)


@leaf(shapes=lambda state, *_: state.new_empty(3, state.shape[1]))
def _masked_tops(
    state, codes, bits, alpha, rows: tuple[int, int, int], tops: tuple[int, int], first: bool
) -> torch.Tensor:
    """One party's half of eq, of k, which is [x' >= 0] without the lower planes, and of u; masked by its alpha.

    Args:
        rows: the rows of eq, lt and u in the state.
        tops: the row of r's highest plane among the codes, and the number of that plane.
        first: whether this party adds the public terms.
    """
    (eq, lt, u), (r_high, high) = rows, tops
    top = _repeated(codes[r_high], alpha)
    if loops := fast(state, top, bits, alpha):
        out, arrays = torch.empty_like(alpha), [v.numpy() for v in (state[eq], state[lt], state[u], top, bits[high])]
        loops.run_on_words(out.shape[1], loops.mask_floor_operands, *arrays, alpha.numpy(), -int(first), out.numpy())
        return out
    k = state[lt] ^ top
    if first:
        k = (k ^ bits[high]).bitwise_not_()
    return torch.stack((state[eq], k, state[u])).bitwise_xor_(alpha)


def _repeated(words: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Repeat the words of one threshold for all thresholds, as many as `beside` has."""
    copies = beside.shape[-1] // max(1, len(words))
    return words if copies <= 1 else words.repeat(copies)


@protocol("floor_bits", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def _floor_bits(
    net: Net, x: Masked, state: Shares, codes: DealerShares, c: Located, mask: BitMask,
    rows: tuple[int, int, int], tops: tuple[int, int],
) -> Shares:  # fmt: skip
    """Compute b = k xor eq u, b u, and b w (1 - msb(c)) for w = msb(r): words [3 W], XOR-shared and masked.

    Args:
        x: the opening, whose r has the sign bit w.
        state: the results of the trees.
        codes: what D dealt for them; the last row is w.
        c: the bit planes of the public c.
        mask: the bits that the result is masked by.
        rows, tops: as for `_masked_tops`.

    Rounds 1; per element six bits online and six dealt. Nobody learns anything.
    """
    D, A, S = net.D, net.A, net.S
    shape = 3, state.shape[1]
    alpha_A, alpha_S = net.common(D, A, shape, "alpha_A"), net.common(D, S, shape, "alpha_S")
    claim = dealing_constraints.floor_products(net, DealerShares(alpha_A, alpha_S), x)
    dealt = deal_bits(
        net, ComputedCorrection(_floor_products, (6, shape[1]), (alpha_A, alpha_S, codes.A, codes.S)), claim
    )
    sent_A = _masked_tops(state.A, codes.A, c, alpha_A, rows, tops, True).send(A, S, "masked_A")
    sent_S = _masked_tops(state.S, codes.S, c, alpha_S, rows, tops, False).send(S, A, "masked_S")
    return Shares(
        _floor_halves(sent_A, sent_S, alpha_A, dealt.A, codes.A, c, mask.b_A, True),
        _floor_halves(sent_A, sent_S, alpha_S, dealt.S, codes.S, c, mask.b_S, False),
    )


@leaf(shapes=lambda alpha_A, alpha_S, codes_A, codes_S, v_A: torch.empty_like(v_A))
def _floor_products(alpha_A, alpha_S, codes_A, codes_S, v_A: torch.Tensor) -> torch.Tensor:
    """At D: the products of the masks of eq, k and u, and of w, that `_floor_bits` needs; masked by v_A."""
    w = _repeated(codes_A[-1] ^ codes_S[-1], v_A)
    if loops := fast(alpha_A, alpha_S, w, v_A):
        out, arrays = torch.empty_like(v_A), [v.numpy() for v in (alpha_A, alpha_S, w, v_A)]
        loops.run_on_words(v_A.shape[1], loops.floor_products, *arrays, out.numpy())
        return out
    eq, k, u = alpha_A ^ alpha_S
    return torch.stack((eq & u, k & u, k & w, u & w, eq & w, eq & u & w)).bitwise_xor_(v_A)


@leaf(shapes=lambda sent, *_: sent.new_empty(sent.numel()))
def _floor_halves(sent_A, sent_S, alpha, dealt, codes, c, b, first: bool) -> torch.Tensor:
    """One party's half of b, b u and b w (1 - msb(c)), masked by its half of `b`.

    By Beaver's formula from eq, k and u, which are open under the masks alpha; `dealt` are the products of the masks,
    in the order of `_floor_products`.
    """
    w = _repeated(codes[-1], sent_A)
    if loops := fast(sent_A, sent_S, alpha, dealt, w, c, b):
        out = torch.empty_like(sent_A)
        arrays = [v.numpy() for v in (sent_A, sent_S, alpha, dealt, w, c[63], b.view(out.shape), out)]
        loops.run_on_words(out.shape[1], loops.combine_floor, *arrays, -int(first))
        return out.view(-1)
    # As `loops.combine_floor`: with x = X ^ a for each open X, products of two secrets are dealt, all others local. w
    # is shared and never opened: with c it would tell something of x near a wrap.
    (eq, k, u), (a_eq, a_k, a_u) = sent_A ^ sent_S, alpha
    eq_u = (eq & a_u) ^ (a_eq & u) ^ dealt[0]
    k_u = (k & a_u) ^ (a_k & u) ^ dealt[1]
    both, k_half = eq & u, (sent_A if first else sent_S)[1] ^ a_k
    if first:
        eq_u, k_u = eq_u ^ both, k_u ^ (k & u)
    k_w = (k & w) ^ dealt[2]
    eq_u_w = (both & w) ^ (eq & dealt[3]) ^ (u & dealt[4]) ^ dealt[5]
    return torch.cat((k_half ^ eq_u, eq_u ^ k_u, (k_w ^ eq_u_w) & ~c[63])) ^ b


@protocol("maximum", "PrivHFL, 3.3 (iii)")
def maximum(net: Net, x: Shares, y: Shares, high: int = 63, fss: bool = False) -> Shares:
    """Compute max(x, y) = y + ReLU(x - y), for |x - y| < 2^63. Exact. Costs as `ramps` without a shift.

    Args:
        high: x - y is known to lie in [-2^high, 2^high).
        fss: as in `ramps`.
    """
    return y + relu(net, x - y, 0, high, fss)
