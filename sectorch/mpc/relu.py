"""ReLU, exact and leak-free, with the truncation that follows a linear layer in the same opening.

With x' = x + 2^(f-1), c = x' + r open to A and S, logical shifts and 0 <= x' < 2^62,

    x' >> f = (c >> f) - (r >> f) - u + 2^(64-f) msb(r) (1 - msb(c)),       u = [c mod 2^f < r mod 2^f],

and the sign bit of x' is that of a comparison whose low part is u: [c < r] = lt xor eq u, with lt and eq of the planes from
f on. One tree over the planes below f and one above run side by side. With k = not (c_63 xor r_63 xor lt), the layer

    b = [x' >= 0] = k xor eq u,     b u = (k xor eq) u,     b msb(r) = k msb(r) xor eq u msb(r)

gives all bits that max(x', 0) >> f takes; Q knows msb(r), so that the last needs no opening of its own.
"""

from __future__ import annotations

import torch

from ..bitplanes import planes, rows
from ..choreography import Located, Message, Net, protocol
from ..ring import logical_shift, rounded_shift
from .compare import block_count, check_planes, deal_codes, drelu, forest, leaves, open_blocks
from .deal import deal, deal_bits
from .fss import gate
from .layers import and_layers, pick
from .mask import Masked, open_masked
from .select import open_bit, random_bits, select
from .shares import Shares, add, sub, whole
from .truncate import check_shift, half, truncate


def relu(net: Net, x: Shares, shift: int = 0, high: int = 63, fss: bool = False) -> Shares:
    """max(x, 0) / 2^shift, rounded half up: `ramps` with the threshold 0."""
    return ramps(net, x, (0,), shift, high, fss)[0]


def _ramps(
    net: Net, x: Shares, thresholds: tuple[int, ...] = (0,), shift: int = 0, high: int = 63, fss: bool = False
) -> list[Shares]:
    """The ideal functionality."""

    def above(v: torch.Tensor, t: int) -> torch.Tensor:
        return ((rounded_shift(v, shift) if shift else v) - t).clamp_(min=0)

    return [whole(net, lambda v, t=t: above(v, t), x.A) for t in thresholds]


@protocol("ramps", "PrivHFL, 3.3 (ii), made exact and leak-free", ideal=_ramps)
def ramps(
    net: Net, x: Shares, thresholds: tuple[int, ...] = (0,), shift: int = 0, high: int = 63, fss: bool = False
) -> list[Shares]:
    """max(x / 2^shift - t, 0) for each public threshold t, x / 2^shift rounded half up. Exact: a function of x.

    Args:
        thresholds: ring elements at the scale of the result. One opening and one dealing of r serves them all.
        shift: fraction bits to drop, 0..32; with a shift |x - t 2^shift| < 2^62 - 2^(shift-1).
        high: x - t 2^shift is known to lie in [-2^high, 2^high - 2^shift); fewer planes are compared.
        fss: by function secret sharing: one round (two with a shift), and some twenty times as many dealt bytes.

    Rounds: 1 (opening) + ceil(log2 B) (trees) + 1 (bit), and with a shift 1 more; B = ceil((high - shift) / 3) blocks.
    ReLU by 20 bits: 7 rounds, 31.75 bytes online (8 of them ahead after a linear layer), 60.75 dealt, per element.
    Nobody learns anything.
    """
    check_shift(shift)
    check_planes(high, shift)
    if fss:
        floor = truncate(net, x, shift, fss) if shift else x
        return gate(net, open_masked(net, floor), high - shift, thresholds)
    if shift:
        return _floored(net, open_masked(net, x), thresholds, shift, high)
    x = open_masked(net, x)
    bits = drelu(net, x, high, thresholds)
    results = []
    for i, t in enumerate(thresholds):
        words = Shares(*(net.locally(p, lambda w, i=i: w.view(len(thresholds), -1)[i], h)
                         for p, h in ((net.A, bits.A), (net.S, bits.S))))  # fmt: skip
        c = net.locally((net.A, net.S), torch.sub, x.c, t) if t else x.c
        results.append(select(net, words, Masked(c, x.r, x.r_A, x.r_S)))
    return results


def _floored(net: Net, x: Masked, thresholds: tuple[int, ...], shift: int, high: int) -> list[Shares]:
    """`ramps` with a shift, by trees: the bits of every threshold, and then the products with them."""
    Q, A, S = net.Q, net.A, net.S
    shape, copies = x.shape, len(thresholds)
    spans = ((0, shift), (shift, high))
    counts = tuple(block_count(*span) for span in spans)
    codes = deal_codes(net, x, spans, (high, 63))
    moved = net.locally((A, S), lambda c: tuple(c + (half(shift) - (t << shift)) for t in thresholds), x.c)
    hot, tops = net.locally((A, S), lambda *c: open_blocks(torch.cat([rows(v) for v in c], -1), spans, (high, 63)), *moved)
    layers, (u, lt, eq) = forest(counts, (False, True))
    state = and_layers(
        net,
        Shares(
            net.locally(A, lambda h, w: leaves(h, w, counts, True, copies), hot, codes.A),
            net.locally(S, lambda h, w: leaves(h, w, counts, False, copies), hot, codes.S),
        ),
        layers,
    )

    top = -1 if high == 63 else -2  # r's plane `high` among the codes, and r's sign last

    def operands(state, codes, tops, first):
        k = state[lt] ^ codes[top].repeat(copies)
        return torch.stack((state[eq], ~(k ^ tops[0]) if first else k, state[u]))

    taken = Shares(
        net.locally(A, lambda *v: operands(*v, True), state.A, codes.A, tops),
        net.locally(S, lambda *v: operands(*v, False), state.S, codes.S, tops),
    )
    wraps = Shares(*(net.locally(p, lambda w: w[-1].repeat(copies), c) for p, c in ((A, codes.A), (S, codes.S))))
    bits = _floor_bits(net, taken, wraps, net.locally(Q, lambda r: planes(rows(r))[63].repeat(copies), x.r), tops)

    mask = random_bits(net, shape, 3 * copies)
    R = net.locally(Q, lambda r: logical_shift(r, shift), x.r)
    dealt_R = deal(net, R)
    dealt_bits = deal(net, net.locally(Q, lambda b: b[: 2 * copies].neg(), mask.b))
    chosen = deal(net, net.locally(Q, lambda R, b: R & b[:copies], R, mask.b))
    wrapped = deal(net, net.locally(Q, lambda b: b[2 * copies :].neg().to(torch.int32), mask.b), torch.int32)

    def ahead(one, R, bits, chosen, wrapped):
        """For each threshold the halves for e = 0, and what e = 1 changes in them."""
        prepared = []
        for i in range(copies):
            s, v, p = bits[i], bits[copies + i], chosen[i]
            w = wrapped[i].to(torch.int64) << (64 - shift)
            prepared += [s, (one - s).bitwise_xor_(s), p, (R - p).bitwise_xor_(p)]
            prepared += [v, (one - v).bitwise_xor_(v), w, ((one << (64 - shift)) - w).bitwise_xor_(w)]
        return tuple(prepared)

    def online(e, c, s0, s1, p0, p1, v0, v1, w0, w1, i):
        e_s, e_v, e_w = e[i], e[copies + i], e[2 * copies + i]
        out = s1.bitwise_and(e_s).bitwise_xor_(s0).mul_(logical_shift(c, shift))
        part = p1.bitwise_and(e_s).bitwise_xor_(p0)
        out -= part
        out -= torch.bitwise_and(v1, e_v, out=part).bitwise_xor_(v0)
        out += torch.bitwise_and(w1, e_w, out=part).bitwise_xor_(w0)
        return out

    at_A = net.locally(A, lambda *v: ahead(1, *v), dealt_R.A, dealt_bits.A, chosen.A, wrapped.A)
    at_S = net.locally(S, lambda *v: ahead(0, *v), dealt_R.S, dealt_bits.S, chosen.S, wrapped.S)
    e = open_bit(net, bits, mask)
    return [
        Shares(
            net.locally(A, lambda *v, i=i: online(*v, i), e, c, *at_A[8 * i : 8 * i + 8]),
            net.locally(S, lambda *v, i=i: online(*v, i), e, c, *at_S[8 * i : 8 * i + 8]),
        )
        for i, c in enumerate(moved)
    ]


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
    return add(net, y, relu(net, sub(net, x, y), 0, high, fss))
