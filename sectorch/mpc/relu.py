"""ReLU, exact and leak-free, with the truncation that follows a linear layer in the same opening.

With x' = x + 2^(f-1), c = x' + r open to A and S, logical shifts and 0 <= x' < 2^62,

    x' >> f = (c >> f) - (r >> f) - u + 2^(64-f) msb(r) (1 - msb(c)),       u = [c mod 2^f < r mod 2^f],

and the sign bit of x' is that of a comparison whose low part is u: [c < r] = lt xor eq u, with lt and eq of the planes
from f on. One tree over the planes below f and one above run side by side. With k = not (c_63 xor r_63 xor lt), the
layer

    b = [x' >= 0] = k xor eq u,     b u = (k xor eq) u,     b msb(r) = k msb(r) xor eq u msb(r)

gives all bits that max(x', 0) >> f takes; Q knows msb(r), so that the last needs no opening of its own.
"""

from __future__ import annotations

import torch

from ..bitplanes import planes, rows
from ..choreography import Located, Message, Net, protocol
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
    compared = [
        each(lambda w, i=i: w.view(len(thresholds) + len(limit), -1)[i], bits)
        for i in range(len(thresholds) + len(limit))
    ]
    if limit:
        shape = x.shape
        raise_flags(net, each(lambda w: kept_rows(w, shape), compared[-1]))
    results = []
    for t, words in zip(thresholds, compared, strict=False):
        c = net.locally((net.A, net.S), torch.sub, x.c, t) if t else x.c
        results.append(select(net, words, Masked(c, x.r, x.r_A, x.r_S)))
    return results


def _floored(
    net: Net, x: Masked, thresholds: tuple[int, ...], shift: int, high: int, limit_bits: int | None = None
) -> list[Shares]:
    """`ramps` with a shift, by trees: the bits of every threshold, and then the products with them."""
    A, S, copies = net.A, net.S, len(thresholds)
    moved = net.locally((A, S), lambda c: tuple(c + signed(half(shift) - (t << shift)) for t in thresholds), x.c)
    mask = random_bits(net, x.shape, 3 * copies)
    at_A, at_S = _deal_products(net, x, mask, copies, shift)
    e = open_bit(net, _compared(net, x, moved, shift, high, limit_bits), mask)

    def product(e, c, s0, s1, p0, p1, v0, v1, w0, w1, i):
        out = s1.bitwise_and(e[i]).bitwise_xor_(s0).mul_(c)
        part = p1.bitwise_and(e[i]).bitwise_xor_(p0)
        out -= part
        out -= torch.bitwise_and(v1, e[copies + i], out=part).bitwise_xor_(v0)
        out += torch.bitwise_and(w1, e[2 * copies + i], out=part).bitwise_xor_(w0)
        return out

    results = []
    for i, c in enumerate(moved):
        C = net.locally((A, S), logical_shift, c, shift)
        mine = slice(8 * i, 8 * i + 8)
        results.append(
            Shares(
                net.locally(A, lambda *v, i=i: product(*v, i), e, C, *at_A[mine]),
                net.locally(S, lambda *v, i=i: product(*v, i), e, C, *at_S[mine]),
            )
        )
    return results


def _deal_products(net: Net, x: Masked, mask: BitMask, copies: int, shift: int) -> tuple[tuple, tuple]:
    """What the products s (C - R), s u and s msb(r) take, ahead of the query.

    Returns:
        at A and at S, for each threshold four pairs: the half for e = 0, and what e = 1 changes in it.
    """
    R = net.locally(net.Q, lambda r: logical_shift(r, shift), x.r)
    quotient = deal(net, R)
    bits = deal(net, net.locally(net.Q, lambda b: b[: 2 * copies].neg(), mask.b))
    chosen = deal(net, net.locally(net.Q, lambda R, b: R & b[:copies], R, mask.b))
    wraps = deal(net, net.locally(net.Q, lambda b: b[2 * copies :].neg().to(torch.int32), mask.b), torch.int32)

    def ahead(one, R, bits, chosen, wraps):
        prepared = []
        for i in range(copies):
            w = wraps[i].to(torch.int64).bitwise_left_shift_(64 - shift)
            for all_of_it, part in ((one, bits[i]), (R, chosen[i]), (one, bits[copies + i]), (one << (64 - shift), w)):
                prepared += [part, (all_of_it - part).bitwise_xor_(part)]
        return tuple(prepared)

    return (
        net.locally(net.A, lambda *v: ahead(1, *v), quotient.A, bits.A, chosen.A, wraps.A),
        net.locally(net.S, lambda *v: ahead(0, *v), quotient.S, bits.S, chosen.S, wraps.S),
    )


def _compared(
    net: Net, x: Masked, moved: tuple[Located, ...], shift: int, high: int, limit_bits: int | None = None
) -> Shares:
    """For the public c of every threshold: [x' >= 0], and by it u and the wrap-around bit: words [3 T W],
    XOR-shared; a flag is raised beside them where x' of the first threshold is 2^(shift + limit_bits) or more."""
    A, S, copies = net.A, net.S, len(moved)
    spans = ((0, shift), (shift, high))
    counts = tuple(block_count(*span) for span in spans)
    plane = high if limit_bits is None else min(high, shift + limit_bits)
    top, total = block_count(plane, high), sum(counts)
    codes, tops = deal_codes(net, x, spans, (high,) if high == 63 else (high, 63))

    def public(*c):
        return planes(torch.cat([rows(v) for v in c], -1) if copies > 1 else rows(c[0]))

    bits = net.locally((A, S), public, *moved)
    hot, signs = net.locally((A, S), lambda b: open_planes(b, spans, (high, 63)), bits)
    width = x.shape.numel() + 63 >> 6
    if top:
        first = net.locally((A, S), lambda b: b[:, :width], bits) if copies > 1 else bits
        hot_top, sign = blocks_above(net, first, plane, high, both=False)
        trees = forest((*counts, top), (False, True, True), (1, counts[1] - top))
    else:
        hot_top, sign, trees = None, None, forest(counts, (False, True))
    layers, (u, lt, eq, *far) = trees

    def blocks(h, w, h_top, first):
        state = (h.new_empty if copies == 1 or not top else h.new_zeros)(2 * (total + top), h.shape[2])
        leaves(h, w, counts, first, copies, state[: 2 * total])
        if top:  # of the first threshold only; the other copies stand empty, and nobody looks at them
            leaves(h_top, part_of(w, total, total - top, total), (top,), first, out=state[2 * total :, :width])
        return state

    state = and_layers(
        net,
        Shares(
            net.locally(A, lambda *v: blocks(*v, True), hot, codes.A, hot_top),
            net.locally(S, lambda *v: blocks(*v, False), hot, codes.S, hot_top),
        ),
        layers,
    )
    r_high = -1 if high == 63 else -2
    if top:
        raise_above(net, state, (u, *far), sign, codes, r_high, x.shape)

    def operands(state, codes, signs, first):
        k = state[lt] ^ codes[r_high].repeat(copies)
        return torch.stack((state[eq], ~(k ^ signs[0]) if first else k, state[u]))

    taken = Shares(
        net.locally(A, lambda *v: operands(*v, True), state.A, codes.A, signs),
        net.locally(S, lambda *v: operands(*v, False), state.S, codes.S, signs),
    )
    last = lambda w: w[-1].repeat(copies)
    return _floor_bits(net, taken, each(last, codes), net.locally(net.Q, last, tops), signs)


@protocol("floor_bits", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_QA"), Message("masked_S", "S", "A", "alpha_S of k_SQ"),
])  # fmt: skip
def _floor_bits(net: Net, taken: Shares, wraps: Shares, wrap: Located, tops: Located) -> Shares:
    """b = k xor eq u, b u, and b w (1 - msb(c)) for a bit w = msb(r) that Q knows: words [3 W], XOR-shared.

    Args:
        taken: words [3, W] of eq, k and u. wraps: w in shares. wrap: w at Q. tops: public, msb(c) in its last row.

    Rounds 1, online six bits per element, dealt six.
    """
    Q, A, S = net.Q, net.A, net.S
    alpha_A, alpha_S = net.common(Q, A, taken.shape, "alpha_A"), net.common(Q, S, taken.shape, "alpha_S")

    def products(a, s, w):
        eq, k, u = a ^ s
        return torch.stack((eq & u, k & u, k & w, u & w, eq & w, eq & u & w))

    dealt = deal_bits(net, net.locally(Q, products, alpha_A, alpha_S, wrap))
    sent_A = net.send(net.locally(A, torch.bitwise_xor, taken.A, alpha_A), A, S, "masked_A")
    sent_S = net.send(net.locally(S, torch.bitwise_xor, taken.S, alpha_S), S, A, "masked_S")
    public = net.locally((A, S), torch.bitwise_xor, sent_A, sent_S)

    def joined(public, taken, alpha, dealt, w, tops, first):
        (eq, k, u), (a_eq, a_k, a_u) = public, alpha
        eq_u = (eq & a_u) ^ (a_eq & u) ^ dealt[0]
        k_u = (k & a_u) ^ (a_k & u) ^ dealt[1]
        both = eq & u
        if first:
            eq_u, k_u = eq_u ^ both, k_u ^ (k & u)
        k_w = (k & w) ^ dealt[2]
        eq_u_w = (both & w) ^ (eq & dealt[3]) ^ (u & dealt[4]) ^ dealt[5]
        return torch.cat((taken[1] ^ eq_u, eq_u ^ k_u, (k_w ^ eq_u_w) & ~tops[-1]))

    return Shares(
        net.locally(A, lambda *v: joined(*v, True), public, taken.A, alpha_A, dealt.A, wraps.A, tops),
        net.locally(S, lambda *v: joined(*v, False), public, taken.S, alpha_S, dealt.S, wraps.S, tops),
    )


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
