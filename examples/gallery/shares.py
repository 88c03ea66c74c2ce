"""Broken protocols on shares of A and S, each in a few lines, with its source and its repaired twin.

    python examples/gallery/run.py

Nothing of them is told to the check but the protocol, its inputs and its reference.
"""

from __future__ import annotations

import torch
from exhibit import Exhibit

from sectorch.choreography import Located, Message, Net, protocol
from sectorch.mpc.star.compare import drelu
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.multiply import multiply
from sectorch.mpc.star.select import bit_to_ring
from sectorch.mpc.star.shares import Shares, share
from sectorch.mpc.star.truncate import truncate
from sectorch.testing import Given

F = 20
SMALL = Given(low=-(1 << 50), high=1 << 50)
POSITIVE = Given(low=0, high=(1 << 61) - 1)


def logical(x: Located, bits: int) -> Located:
    """x >> bits of an unsigned word."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sign(net: Net, x: Shares) -> Shares:
    """[x >= 0], exact."""
    return bit_to_ring(net, drelu(net, open_masked(net, x)), x.shape)


# PrivHFL's DReLU: r x is opened to Q, for a small positive r.


@protocol("gallery_drelu", "PrivHFL, Figure 4", [
    Message("z_A", "A", "S", "delta of k_QA"), Message("z", "S", "Q", "a positive factor of k_SA"),
    Message("y_S", "Q", "S", "a stream of k_QA"),
])  # fmt: skip
def privhfl_drelu(net: Net, x: Shares) -> Shares:
    Q, A, S = net.Q, net.A, net.S
    r = (net.common(S, A, x.shape, "r") & 4095) + 1
    delta, y_A = net.common(Q, A, x.shape, "delta"), net.common(Q, A, x.shape, "y")
    z = (r * x.S + (r * x.A - delta).send(A, S, "z_A")).send(S, Q, "z")
    return Shares(y_A, ((z + delta >= 0).to(torch.int64) - y_A).send(Q, S, "y_S"))


# The rounding of this project's first edition: up where the low bits of x and of the mask, which Q knows, carry.


@protocol("gallery_rounding", "sectorch 0.1", [
    Message("c_A", "A", "S", "r_A of k_QA"), Message("c_S", "S", "A", "r_S of k_QS"),
    Message("high_S", "Q", "S", "a stream of k_QA"), Message("top_S", "Q", "S", "a stream of k_QA"),
])  # fmt: skip
def first_rounding(net: Net, x: Shares) -> Shares:
    Q, A, S = net.Q, net.A, net.S
    r_A, r_S = net.common(Q, A, x.shape, "r_A"), net.common(Q, S, x.shape, "r_S")
    c = (x.A + r_A).send(A, S, "c_A") + (x.S + r_S).send(S, A, "c_S")
    high_A, top_A = net.common(Q, A, x.shape, "high"), net.common(Q, A, x.shape, "top")
    high_S = (logical(r_A + r_S, F) - high_A).send(Q, S, "high_S")
    top_S = (logical(r_A + r_S, 63) - top_A).send(Q, S, "top_S")
    wrapped = 1 - logical(c, 63)
    at_A = logical(c, F) - high_A + (top_A * wrapped << (64 - F))
    return Shares(at_A, (top_S * wrapped << (64 - F)) - high_S)


# Each party cuts its own share: right but for one unit, as the shares decide.


@protocol("gallery_local_truncation", "SecureML (Mohassel and Zhang, S&P 2017), 4.1")
def local_truncation(net: Net, x: Shares) -> Shares:
    return Shares(x.A >> F, -(-x.S >> F))


# A Beaver triple that serves two products.


@protocol("gallery_triple", "Beaver, CRYPTO 1991, of one triple for two products", [
    Message(f"{name}_{side}", side, "S" if side == "A" else "A", "a mask of the dealer's")
    for name in ("e", "f", "g") for side in ("A", "S")
] + [Message("c_S", "Q", "S", "a stream of k_QA")])  # fmt: skip
def triple_twice(net: Net, x: Shares, y: Shares, z: Shares) -> Shares:
    Q, A, S = net.Q, net.A, net.S
    a_A, a_S = net.common(Q, A, x.shape, "a"), net.common(Q, S, x.shape, "a")
    b_A, b_S = net.common(Q, A, x.shape, "b"), net.common(Q, S, x.shape, "b")
    c_A = net.common(Q, A, x.shape, "c")
    a, b = Shares(a_A, a_S), Shares(b_A, b_S)
    c = Shares(c_A, ((a_A + a_S) * (b_A + b_S) - c_A).send(Q, S, "c_S"))

    def opened(v: Shares, name: str) -> Located:
        return v.A.send(A, S, f"{name}_A") + v.S.send(S, A, f"{name}_S")

    e, f, g = opened(x - a, "e"), opened(y - b, "f"), opened(z - b, "g")
    product = lambda d: c + Shares(e * b.A, e * b.S) + Shares(d * a.A, d * a.S) + e * d
    return product(f) + product(g)


def triple_each(net: Net, x: Shares, y: Shares, z: Shares) -> Shares:
    return multiply(net, torch.mul, x, y) + multiply(net, torch.mul, x, z)


# A mask of 40 bits for a value of 50.


@protocol("gallery_short_mask", "a mask from too short a range", [Message("c", "A", "S", "r of k_QA")])
def short_mask(net: Net, x: Shares) -> Shares:
    r = logical(net.common(net.Q, net.A, x.shape, "r"), 24)
    c = (x.A + r).send(net.A, net.S, "c")
    return Shares(-r, x.S + c)


@protocol("gallery_whole_mask", "its repair", [Message("c", "A", "S", "r of k_QA")])
def whole_mask(net: Net, x: Shares) -> Shares:
    r = net.common(net.Q, net.A, x.shape, "r")
    c = (x.A + r).send(net.A, net.S, "c")
    return Shares(-r, x.S + c)


# The lowest bit of a mask is never set: S, who takes its own share off, has the parity.


@protocol("gallery_low_bit", "a mask without its lowest bit", [Message("c", "A", "S", "r of k_QA")])
def low_bit_kept(net: Net, x: Shares) -> Shares:
    r = net.common(net.Q, net.A, x.shape, "r") & -2
    c = (x.A + r).send(net.A, net.S, "c")
    return Shares(-r, x.S + c)


# Comparison by a positive random factor: S learns r (x - y), and is to learn its sign alone.


@protocol("gallery_factor", "comparison by a positive random factor", [
    Message("x", "Q", "S", "s of k_QA"), Message("y", "A", "S", "s of k_QA"),
])  # fmt: skip
def factor(net: Net, x: Located, y: Located) -> Located:
    Q, A, S = net.Q, net.A, net.S
    r = (net.common(Q, A, x.shape, "r") & 4095) + 1
    s = net.common(Q, A, x.shape, "s")
    difference = (r * x + s).send(Q, S, "x") - (r * y + s).send(A, S, "y")
    return (difference >= 0).to(torch.int64).at("S")


@protocol("gallery_compare", "its repair", [Message("bit", "A", "S", "nothing", "whether x >= y")])
def compared(net: Net, x: Located, y: Located) -> Located:
    bit = sign(net, share(net, x) - y)
    return bit.S + bit.A.send(net.A, net.S, "bit")


# The dealer is asked for help with what is under its own mask.


@protocol("gallery_dealer", "a dealer who learns", [
    Message("c_A", "A", "S", "r of k_QA"), Message("c", "S", "Q", "r, which Q dealt"),
    Message("y_S", "Q", "S", "a stream of k_QA"),
])  # fmt: skip
def dealer_learns(net: Net, x: Shares) -> Shares:
    Q, A, S = net.Q, net.A, net.S
    r, y_A = net.common(Q, A, x.shape, "r"), net.common(Q, A, x.shape, "y")
    c = (x.S + (x.A + r).send(A, S, "c_A")).send(S, Q, "c")
    return Shares(y_A, ((c - r >= 0).to(torch.int64) - y_A).send(Q, S, "y_S"))


# A share is sent as it is: uniform, until its receiver adds its own.


@protocol("gallery_unmasked", "a share without its mask", [Message("x_A", "A", "S", "nothing")])
def unmasked(net: Net, x: Shares) -> Shares:
    opened = x.S + x.A.send(net.A, net.S, "x_A")
    return Shares(net.common(net.Q, net.A, x.shape, "half") * 0, (opened >= 0).to(torch.int64))


# One value is wrong under one of 2^64 masks: no random draw ever shows it.


@protocol("gallery_one_mask", "planted", [Message("y_S", "Q", "S", "r of k_QA")])
def one_mask(net: Net, x: Located) -> Shares:
    r = net.common(net.Q, net.A, x.shape, "r")
    off = (x - r == 37 - (1 << 63)).to(torch.int64) * (x == 37).to(torch.int64)
    return Shares(r, (x - r + off).send(net.Q, net.S, "y_S"))


# Two dealt values under one mask: each is uniform, and where they are equal the bit that chooses is zero.


_CHOSEN = [
    Message("c_A", "A", "S", "r_A of k_QA"), Message("c_S", "S", "A", "r_S of k_QS"),
    Message("e_A", "A", "S", "b_A of k_QA"), Message("e_S", "S", "A", "b_S of k_QS"),
    Message("b", "Q", "S", "v of k_QA"), Message("br", "Q", "S", "w of k_QA"),
]  # fmt: skip


def _odd_ones(net: Net, x: Shares, again: bool) -> Shares:
    """x where its lowest bit s is set, and 0 elsewhere: s x = b c - b r or c - r - (b c - b r), as e = s xor b says."""
    Q, A, S = net.Q, net.A, net.S
    r_A, r_S = net.common(Q, A, x.shape, "r_A"), net.common(Q, S, x.shape, "r_S")
    b_A, b_S = net.common(Q, A, x.shape, "b_A"), net.common(Q, S, x.shape, "b_S")
    v = net.common(Q, A, x.shape, "v")
    w = v if again else net.common(Q, A, x.shape, "w")
    c = (x.A + r_A).send(A, S, "c_A") + (x.S + r_S).send(S, A, "c_S")
    e = ((x.A ^ b_A).send(A, S, "e_A") ^ (x.S ^ b_S).send(S, A, "e_S")) & 1
    r, b = r_A + r_S, (b_A ^ b_S) & 1
    at_A, at_S = v * c - w, (b - v).send(Q, S, "b") * c - (b * r - w).send(Q, S, "br")
    return Shares(at_A + e * (c - r_A - at_A * 2), at_S + e * (-r_S - at_S * 2))


@protocol("gallery_dealt_once", "ramps, with one mask for both dealt values", _CHOSEN)
def dealt_once(net: Net, x: Shares) -> Shares:
    return _odd_ones(net, x, again=True)


@protocol("gallery_dealt_each", "its repair", _CHOSEN)
def dealt_each(net: Net, x: Shares) -> Shares:
    return _odd_ones(net, x, again=False)


GALLERY = [
    Exhibit("PrivHFL's DReLU", "PrivHFL, Figure 4", privhfl_drelu, sign, [SMALL], lambda x: (x >= 0).long(),
            ["Q tells", "z of gallery_drelu", "x < 0"]),
    Exhibit("the first edition's rounding", "sectorch 0.1", first_rounding, lambda net, x: truncate(net, x, F),
            [POSITIVE], lambda x: x >> F, ["draws", "the low", "r_A of", "which Q knows"],
            right=lambda x: (x + (1 << (F - 1))) >> F, allowed={"error": 1}),
    Exhibit("local truncation", "SecureML, 4.1", local_truncation, lambda net, x: truncate(net, x, F),
            [Given(low=-(1 << 40), high=1 << 40)], lambda x: x >> F, ["draws", "half of x0", "decides it"],
            right=lambda x: (x + (1 << (F - 1))) >> F, allowed={"error": 1}),
    Exhibit("an error under one mask", "planted", one_mask, share, [Given("Q", low=0, high=255)], lambda x: x,
            ["exhaustive", "input 37 is 38", "r of gallery_one_mask is -9223372036854775808"]),
    Exhibit("a triple used twice", "Beaver, CRYPTO 1991", triple_twice, triple_each, [Given()] * 3,
            lambda x, y, z: x * y + x * z, ["g_"]),
    Exhibit("one mask for two dealt values", "planted in ramps by mutation", dealt_once, dealt_each, [Given()],
            lambda x: x * (x & 1), ["S tells", "of gallery_dealt_once"]),
    Exhibit("a mask too short", "statistical masking without its margin", short_mask, whole_mask, [SMALL],
            lambda x: x, ["c of gallery_short_mask"]),
    Exhibit("a mask without its lowest bit", "an off-by-one in a mask", low_bit_kept, whole_mask, [Given()],
            lambda x: x, ["c of gallery_low_bit", "bit 0"]),
    Exhibit("a positive random factor", "textbook comparison", factor, compared,
            [Given("Q", low=-(1 << 48), high=1 << 48), Given("A", low=-(1 << 48), high=1 << 48)],
            lambda x, y: (x >= y).long(), ["S tells", "x of", "y of"]),
    Exhibit("a dealer who learns", "a comparison done by the dealer", dealer_learns, sign, [SMALL],
            lambda x: (x >= 0).long(), ["Q tells", "c of gallery_dealer", "r of"]),
    Exhibit("a share without its mask", "an opening to one party too many", unmasked, sign, [SMALL],
            lambda x: (x >= 0).long(), ["S tells", "x_A of gallery_unmasked"]),
]  # fmt: skip
