"""ReLU, exact and leak-free, with the truncation that follows a linear layer in the same opening.

With x' = x + 2^(f-1), c = x' + r open to A and S, logical shifts and 0 <= x' < 2^62,

    x' >> f = (c >> f) - (r >> f) - u + 2^(64-f) msb(r) (1 - msb(c)),       u = [c mod 2^f < r mod 2^f],

and the sign bit of x' is that of a comparison whose low part is u: [c < r] = lt xor eq u, with lt and eq of the planes
from f on. One tree over the planes below f and one above run side by side. With k = not (c_63 xor r_63 xor lt), the
layer

    b = [x' >= 0] = k xor eq u,     b u = (k xor eq) u,     b msb(r) = k msb(r) xor eq u msb(r)

gives all bits that max(x', 0) >> f takes; D knows msb(r), so that the last needs no opening of its own.
"""

from __future__ import annotations

import torch

from ..bitplanes import planes, rows, words_for
from ..choreography import Located, Message, Net, leaf, protocol
from ..located import compute
from ..ring import logical_shift, rounded_shift, signed
from .compare import block_count, check_planes, deal_codes, drelu, forest, leaves, open_planes
from .deal import deal, deal_bits
from .fss import gate
from .guard import kept_rows, raise_flags
from .layers import and_layers
from .mask import Masked, open_masked
from .select import BitMask, open_bit, random_bits, select
from .shares import Shares, each, whole
from .truncate import check_shift, half, truncate
from .within import blocks_above, part_of, raise_above


def relu(
    net: Net, x: Shares, shift: int = 0, high: int = 63, fss: bool = False, limit_bits: int | None = None
) -> Shares:
    """max(x, 0) / 2^shift, rounded half up: `ramps` with the threshold 0."""
    return ramps(net, x, (0,), shift, high, fss, limit_bits)[0]


def _ramps(
    net: Net, x: Shares, thresholds: tuple[int, ...] = (0,), shift: int = 0, high: int = 63, fss: bool = False,
    limit_bits: int | None = None,
) -> list[Shares]:  # fmt: skip
    """The ideal functionality."""

    def above(v: torch.Tensor, t: int) -> torch.Tensor:
        return ((rounded_shift(v, shift) if shift else v) - t).clamp_(min=0)

    found = [whole(net, lambda v, t=t: above(v, t), x.A) for t in thresholds]
    if limit_bits is not None:
        raise_flags(net, whole(net, lambda y: (y >= 1 << limit_bits).to(torch.int64), found[0].A))
    return found


@protocol("ramps", "PrivHFL, 3.3 (ii), made exact and leak-free", ideal=_ramps)
def ramps(
    net: Net, x: Shares, thresholds: tuple[int, ...] = (0,), shift: int = 0, high: int = 63, fss: bool = False,
    limit_bits: int | None = None,
) -> list[Shares]:  # fmt: skip
    """max(x / 2^shift - t, 0) for each public threshold t, x / 2^shift rounded half up. Exact: a function of x.

    Args:
        thresholds: ring elements at the scale of the result. One opening and one dealing of r serves them all.
        shift: fraction bits to drop, 0..32; with a shift |x - t 2^shift| < 2^62 - 2^(shift-1).
        high: x - t 2^shift is known to lie in [-2^high, 2^high - 2^shift); fewer planes are compared.
        fss: by function secret sharing: one round (two with a shift), and some twenty times as many dealt bytes.
        limit_bits: raise a flag (`mpc/guard.py`) where the first result is 2^limit_bits or more; about 5 bytes more.

    Rounds: 1 (opening) + ceil(log2 B) (trees) + 1 (bit), and with a shift 1 more; B = ceil((high - shift) / 3) blocks.
    ReLU by 20 bits: 7 rounds, 31.75 bytes online (8 of them ahead after a linear layer), 60.75 dealt, per element.
    Nobody learns anything.
    """
    check_shift(shift)
    check_planes(high, shift)
    if fss:
        floor = truncate(net, x, shift, fss) if shift else x
        return gate(net, open_masked(net, floor), high - shift, thresholds, limit_bits)
    if shift:
        return _floored(net, open_masked(net, x), thresholds, shift, high, limit_bits)
    x = open_masked(net, x)
    limit = () if limit_bits is None else (signed(thresholds[0] + (1 << limit_bits)),)
    bits = drelu(net, x, high, thresholds + limit)
    bits = each(torch.Tensor.view, bits, len(thresholds) + len(limit), -1)
    if limit:
        raise_flags(net, each(kept_rows, bits[-1], x.shape))
    return [select(net, bits[i], Masked(x.c - t if t else x.c, x.r, x.r_A, x.r_S)) for i, t in enumerate(thresholds)]


def _floored(
    net: Net, x: Masked, thresholds: tuple[int, ...], shift: int, high: int, limit_bits: int | None = None
) -> list[Shares]:
    """`ramps` with a shift, by trees: the bits of every threshold, and then the products with them."""
    copies = len(thresholds)
    moved = [x.c + signed(half(shift) - (t << shift)) for t in thresholds]
    mask = random_bits(net, x.shape, 3 * copies)
    at_A, at_S = _deal_products(net, x, mask, copies, shift)
    e = open_bit(net, _compared(net, x, moved, shift, high, limit_bits), mask)
    results = []
    for i, c in enumerate(moved):
        C, mine = compute(logical_shift, c, shift), slice(8 * i, 8 * i + 8)
        results.append(Shares(_product(e, C, i, copies, *at_A[mine]), _product(e, C, i, copies, *at_S[mine])))
    return results


@leaf
def _product(e, C, i: int, copies: int, s0, s1, p0, p1, v0, v1, w0, w1) -> torch.Tensor:
    """One party's half of s C - s R - s u + 2^(64-f) s msb(r): of each the half for e = 0, and what e = 1 changes."""
    out = s1.bitwise_and(e[i]).bitwise_xor_(s0).mul_(C)
    part = p1.bitwise_and(e[i]).bitwise_xor_(p0)
    out -= part
    out -= torch.bitwise_and(v1, e[copies + i], out=part).bitwise_xor_(v0)
    out += torch.bitwise_and(w1, e[2 * copies + i], out=part).bitwise_xor_(w0)
    return out


def _deal_products(net: Net, x: Masked, mask: BitMask, copies: int, shift: int) -> tuple[tuple, tuple]:
    """What the products s (C - R), s u and s msb(r) take, ahead of the query.

    Returns:
        at A and at S, for each threshold four pairs: the half for e = 0, and what e = 1 changes in it.
    """
    R = compute(logical_shift, x.r, shift)
    quotient = deal(net, R)
    bits = deal(net, -mask.b[: 2 * copies])
    chosen = deal(net, R & mask.b[:copies])
    wraps = deal(net, (-mask.b[2 * copies :]).to(torch.int32), torch.int32)
    return (
        _ahead(1, quotient.A, bits.A, chosen.A, wraps.A, copies, shift),
        _ahead(0, quotient.S, bits.S, chosen.S, wraps.S, copies, shift),
    )


@leaf
def _ahead(one: int, R, bits, chosen, wraps, copies: int, shift: int) -> tuple[torch.Tensor, ...]:
    """For each threshold the half for e = 0, and what e = 1 changes in it, of s, s R, s u and 2^(64-f) s msb(r)."""
    prepared = []
    for i in range(copies):
        w = wraps[i].to(torch.int64).bitwise_left_shift_(64 - shift)
        for all_of_it, part in ((one, bits[i]), (R, chosen[i]), (one, bits[copies + i]), (one << (64 - shift), w)):
            prepared += [part, (all_of_it - part).bitwise_xor_(part)]
    return tuple(prepared)


def _compared(
    net: Net, x: Masked, moved: list[Located], shift: int, high: int, limit_bits: int | None = None
) -> Shares:
    """For the public c of every threshold: [x' >= 0], and by it u and the wrap-around bit: words [3 T W],
    XOR-shared; a flag is raised beside them where x' of the first threshold is 2^(shift + limit_bits) or more."""
    copies = len(moved)
    spans = ((0, shift), (shift, high))
    counts = tuple(block_count(*span) for span in spans)
    plane = high if limit_bits is None else min(high, shift + limit_bits)
    top = block_count(plane, high)
    codes, tops = deal_codes(net, x, spans, (high,) if high == 63 else (high, 63))

    bits = _planes_beside(*moved)
    hot, signs = open_planes(bits, spans, (high, 63))
    if top:
        hot_top, sign = blocks_above(bits[:, : words_for(x.shape.numel())], plane, high, False)
        trees = forest((*counts, top), (False, True, True), (1, counts[1] - top))
    else:
        hot_top, sign, trees = None, None, forest(counts, (False, True))
    layers, (u, lt, eq, *far) = trees

    state = Shares(
        _leaves_and_above(hot, codes.A, counts, copies, top, True, hot_top),
        _leaves_and_above(hot, codes.S, counts, copies, top, False, hot_top),
    )
    state = and_layers(net, state, layers)
    r_high = -1 if high == 63 else -2
    if top:
        raise_above(net, state, (u, *far), sign, codes, r_high, x.shape)

    k = ~(state[lt] ^ each(_repeated, codes[r_high], copies) ^ signs[0])
    return _floor_bits(
        net,
        each(_stacked, state[eq], k, state[u]),
        each(_repeated, codes[-1], copies),
        _repeated(tops[-1], copies),
        signs,
    )


@leaf
def _planes_beside(*c: torch.Tensor) -> torch.Tensor:
    """The bit planes of all of them, side by side."""
    return planes(torch.cat([rows(v) for v in c], -1) if len(c) > 1 else rows(c[0]))


@leaf(shapes=lambda hot, _, counts, copies, top, *_1: hot.new_empty(2 * (sum(counts) + top), hot.shape[2]))
def _leaves_and_above(hot, codes, counts: tuple[int, ...], copies: int, top: int, first: bool, hot_top) -> torch.Tensor:
    """One party's half of lt and eq of both trees, and of the `top` blocks above the limit, of the first threshold."""
    total = sum(counts)
    state = (hot.new_empty if copies == 1 or not top else hot.new_zeros)(2 * (total + top), hot.shape[2])
    leaves(hot, codes, counts, first, copies, state[: 2 * total])
    if top:  # the other copies stand empty, and nobody looks at them
        place = state[2 * total :, : codes.shape[1]]
        leaves(hot_top, part_of(codes, total, total - top, total), (top,), first, out=place)
    return state


@leaf
def _repeated(words: torch.Tensor, copies: int) -> torch.Tensor:
    return words if copies == 1 else words.repeat(copies)


@leaf
def _stacked(*words: torch.Tensor) -> torch.Tensor:
    return torch.stack(words)


@protocol("floor_bits", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def _floor_bits(net: Net, taken: Shares, wraps: Shares, wrap: Located, tops: Located) -> Shares:
    """b = k xor eq u, b u, and b w (1 - msb(c)) for a bit w = msb(r) that D knows: words [3 W], XOR-shared.

    Args:
        taken: words [3, W] of eq, k and u. wraps: w in shares. wrap: w at D. tops: public, msb(c) in its last row.

    Rounds 1, online six bits per element, dealt six.
    """
    D, A, S = net.D, net.A, net.S
    alpha_A, alpha_S = net.common(D, A, taken.shape, "alpha_A"), net.common(D, S, taken.shape, "alpha_S")
    dealt = deal_bits(net, _floor_products(alpha_A ^ alpha_S, wrap))
    sent_A = (taken.A ^ alpha_A).send(A, S, "masked_A")
    sent_S = (taken.S ^ alpha_S).send(S, A, "masked_S")
    public = sent_A ^ sent_S
    return Shares(
        _floor_joined(public, taken.A, alpha_A, dealt.A, wraps.A, tops, True),
        _floor_joined(public, taken.S, alpha_S, dealt.S, wraps.S, tops, False),
    )


@leaf
def _floor_products(alpha: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is dealt for `_floor_bits`: products of the masks of eq, k and u, and of w."""
    eq, k, u = alpha
    return torch.stack((eq & u, k & u, k & w, u & w, eq & w, eq & u & w))


@leaf
def _floor_joined(public, taken, alpha, dealt, w, tops, first: bool) -> torch.Tensor:
    """One party's half of b, b u and b w (1 - msb(c)) from eq, k and u, open under the masks alpha."""
    (eq, k, u), (a_eq, a_k, a_u) = public, alpha
    eq_u = (eq & a_u) ^ (a_eq & u) ^ dealt[0]
    k_u = (k & a_u) ^ (a_k & u) ^ dealt[1]
    both = eq & u
    if first:
        eq_u, k_u = eq_u ^ both, k_u ^ (k & u)
    k_w = (k & w) ^ dealt[2]
    eq_u_w = (both & w) ^ (eq & dealt[3]) ^ (u & dealt[4]) ^ dealt[5]
    return torch.cat((taken[1] ^ eq_u, eq_u ^ k_u, (k_w ^ eq_u_w) & ~tops[-1]))


def _larger(net: Net, x: Shares, y: Shares, high: int = 63, fss: bool = False) -> Shares:
    """The ideal functionality of `maximum`."""
    return whole(net, torch.maximum, x.A, y.A)


@protocol("maximum", "PrivHFL, 3.3 (iii)", ideal=_larger)
def maximum(net: Net, x: Shares, y: Shares, high: int = 63, fss: bool = False) -> Shares:
    """max(x, y) = y + ReLU(x - y), for |x - y| < 2^63. Exact.

    Args:
        high: x - y is known to lie in [-2^high, 2^high).
        fss: as in `ramps`.
    """
    return y + relu(net, x - y, 0, high, fss)
