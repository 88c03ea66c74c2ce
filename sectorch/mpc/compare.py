"""Exact comparison on packed bit planes: the sign of a masked value, as an XOR-shared bit.

From c = x + r, public to A and S, and r, known to Q, the sign of x is

    msb(x) = c_63 xor r_63 xor [c mod 2^63 < r mod 2^63].

The low 63 bits are cut into blocks of three. For each block Q deals the thermometer code of r's block in XOR shares,
u_j = [j < r] for j = 0..6, and A and S pick by the public block of c, without a message:

    [c < r] = xor_j [c = j] u_j,        [c = r] = xor_j [c = j] (u_{j-1} xor u_j),   u_{-1} = 1, u_7 = 0.

The blocks are then combined, the more significant one first, in a tree:

    lt = lt_hi xor eq_hi lt_lo,         eq = eq_hi eq_lo,

two ANDs a node by XOR Beaver triples that Q deals. Planes below the fraction may be dropped: the sign is then exact for
all but those x in (-2^low, 0), which may come out either way; with the truncation that follows this is less than one
unit in the last place. The dealt blocks cost nothing online, so the tree has a third of the leaves that single bits
would give, and up to two levels less.
"""

from __future__ import annotations

import torch

from ..bitplanes import planes, rows, words_for
from ..choreography import Message, Net, protocol
from ..errors import ArgumentError
from .deal import deal_bits
from .mask import Masked
from .shares import Shares

BLOCK = 3
"""Bits in a block. Three minimises bytes: 7/3 dealt bits per bit, against fewer tree nodes."""

CODES = (1 << BLOCK) - 1


def _top(bit_planes: torch.Tensor, high: int) -> torch.Tensor:
    """The plane that decides the sign once the borrow from the planes below `high` is known: [1, W]."""
    return bit_planes[high : high + 1]


def check_planes(low: int, high: int) -> None:
    """Raise `ArgumentError` unless 0 <= low < high <= 63."""
    if not 0 <= low < high <= 63:
        raise ArgumentError(f"a comparison looks at planes low..high-1 with 0 <= low < high <= 63, got {low}..{high}")


def block_count(low: int, high: int) -> int:
    """Blocks that cover the planes low .. high - 1."""
    return -(-(high - low) // BLOCK)


def tree_levels(blocks: int) -> list[int]:
    """Pairs joined at each level; the most significant block waits where the count is odd."""
    levels = []
    while blocks > 1:
        levels.append(blocks // 2)
        blocks -= blocks // 2
    return levels


def blocks_of(bit_planes: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Planes [64, W] -> [blocks, 3, W], least significant block first; reaches below `low` to fill the last block."""
    blocks = block_count(low, high)
    start = high - BLOCK * blocks
    if start < 0:
        bit_planes = torch.cat([bit_planes.new_zeros(-start, bit_planes.shape[-1]), bit_planes[:high]])
        start, high = 0, high - start
    return bit_planes[start:high].unflatten(0, (blocks, BLOCK))


def thermometer(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 3, W] -> [7, blocks, W]: u_j = [j < value of the block]."""
    r0, r1, r2 = blocks.unbind(1)
    some, both = r1 | r0, r1 & r0
    return torch.stack((r2 | some, r2 | r1, r2 | both, r2, r2 & some, r2 & r1, r2 & both))


def one_hot(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 3, W] -> [8, blocks, W]: h_j = [value of the block = j]."""
    c0, c1, c2 = blocks.unbind(1)
    low = torch.stack((~(c1 | c0), c0 & ~c1, c1 & ~c0, c1 & c0))
    high = low & c2
    return torch.cat((low ^ high, high))


def xor_all(values: torch.Tensor) -> torch.Tensor:
    """XOR along the first dimension, in place of the argument."""
    while (count := values.shape[0]) > 1:
        half = count // 2
        values[:half].bitwise_xor_(values[count - half :])
        values = values[: count - half]
    return values[0]


def pick_less(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """This party's half of [c < r] per block, from public h_j and its halves of u_j."""
    return xor_all(hot[:CODES] & codes)


def pick_equal(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """This party's half of [c = r] per block, but for the term h_0, which A adds."""
    return xor_all((hot[:CODES] ^ hot[1:]).bitwise_and_(codes))


@protocol("less_than_tree", "docs/protocols.md", [
    Message("masked_A", "A", "S", "alpha_A of k_QA"), Message("masked_S", "S", "A", "alpha_S of k_SQ"),
])  # fmt: skip
def less_than_tree(net: Net, less: Shares, equal: Shares) -> Shares:
    """Combine blocks of [c < r] and [c = r], XOR-shared, into one bit per element.

    Args:
        less: words [blocks, W], least significant block first.
        equal: words [blocks - 1, W], of the blocks but the least significant.

    Returns:
        words [W], XOR-shared.

    Rounds ceil(log2 blocks); online 2 * (3 * pairs - 1) bits per element and level, dealt 2 * pairs - 1.
    """
    Q, A, S = net.Q, net.A, net.S
    blocks, width = less.shape
    levels = tree_levels(blocks)
    opened = sum(3 * pairs - 1 for pairs in levels)
    alpha_A = net.common(Q, A, (opened, width), "alpha_A")
    alpha_S = net.common(Q, S, (opened, width), "alpha_S")
    triples = deal_bits(net, net.locally(Q, lambda a, s: _products(a ^ s, levels), alpha_A, alpha_S))

    at, done = 0, 0
    for pairs in levels:
        mine, made = slice(at, at + 3 * pairs - 1), slice(done, done + 2 * pairs - 1)
        at, done = mine.stop, made.stop
        first = net.locally(A, lambda g, p, a: _operands(g, p, pairs).bitwise_xor_(a[mine]), less.A, equal.A, alpha_A)
        second = net.locally(S, lambda g, p, a: _operands(g, p, pairs).bitwise_xor_(a[mine]), less.S, equal.S, alpha_S)
        public = net.locally(
            (A, S), torch.bitwise_xor, net.send(first, A, S, "masked_A"), net.send(second, S, A, "masked_S")
        )
        less_A, equal_A = net.locally(
            A, lambda d, g, p, a, t: _join(d, g, p, a[mine], t[made], pairs, True),
            public, less.A, equal.A, alpha_A, triples.A,
        )  # fmt: skip
        less_S, equal_S = net.locally(
            S, lambda d, g, p, a, t: _join(d, g, p, a[mine], t[made], pairs, False),
            public, less.S, equal.S, alpha_S, triples.S,
        )  # fmt: skip
        less, equal = Shares(less_A, less_S), Shares(equal_A, equal_S)
    return Shares(net.locally(A, lambda g: g[0], less.A), net.locally(S, lambda g: g[0], less.S))


def _operands(less: torch.Tensor, equal: torch.Tensor, pairs: int) -> torch.Tensor:
    """What a level opens: eq_hi of every pair, then lt_lo of every pair, then eq_lo of all but the lowest."""
    return torch.cat((equal[0 : 2 * pairs : 2], less[0 : 2 * pairs : 2], equal[1 : 2 * pairs - 1 : 2]))


def _products(alpha: torch.Tensor, levels: list[int]) -> torch.Tensor:
    """The Beaver products of all levels: alpha_hi & alpha_lo for every AND."""
    out, at = [], 0
    for pairs in levels:
        high, low = alpha[at : at + pairs], alpha[at + pairs : at + 3 * pairs - 1]
        out += [high & low[:pairs], high[1:] & low[pairs:]]
        at += 3 * pairs - 1
    return torch.cat(out) if out else alpha[:0]


def _join(public, less, equal, alpha, triple, pairs: int, first: bool):
    """One level at one party: lt = lt_hi xor eq_hi lt_lo and eq = eq_hi eq_lo, by Beaver's formula."""
    high, low = public[:pairs], public[pairs:]
    alpha_high, alpha_low = alpha[:pairs], alpha[pairs:]
    high, alpha_high = torch.cat((high, high[1:])), torch.cat((alpha_high, alpha_high[1:]))
    ands = (high & alpha_low).bitwise_xor_(alpha_high.bitwise_and_(low)).bitwise_xor_(triple)
    if first:
        ands.bitwise_xor_(high.bitwise_and_(low))
    joined = ands[:pairs].bitwise_xor_(less[1 : 2 * pairs : 2])
    return torch.cat((joined, less[2 * pairs :])), torch.cat((ands[pairs:], equal[2 * pairs - 1 :]))


@protocol("drelu", "PrivHFL, Figure 4, made exact and leak-free")
def drelu(net: Net, x: Masked, low: int = 0, high: int = 63, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """[x - t >= 0] for each public threshold t, as XOR-shared bits.

    Args:
        x: a masked opening of N elements.
        low: planes below are dropped: exact for x - t outside (-2^low, 0), where either answer may come.
        high: x - t is known to lie in [-2^high, 2^high - 2^low); 63 assumes nothing.
        thresholds: ring elements; one opening and one dealing of r serves them all.

    Returns:
        words [T * W], W = ceil(N / 64).

    With L = high - low planes in B = ceil(L / 3) blocks. Rounds ceil(log2 B). Dealt: 7 B + 1 bits per element and
    2 B - 2 - levels per element and threshold; online 2 (3 (B - 1) - levels) bits per element and threshold.
    Nobody learns anything: all messages are uniform to their receivers.
    """
    check_planes(low, high)
    Q, A, S = net.Q, net.A, net.S
    blocks, width, copies = block_count(low, high), words_for(x.shape.numel()), len(thresholds)

    def code(r):
        bits = planes(rows(r))
        return torch.cat((thermometer(blocks_of(bits, low, high)).flatten(0, 1), _top(bits, high)))

    def public(c):
        bits = torch.cat([planes(rows(c - t if t else c)) for t in thresholds], dim=-1)
        return one_hot(blocks_of(bits, low, high)), _top(bits, high)[0]

    codes = deal_bits(net, net.locally(Q, code, x.r))
    hot, top = net.locally((A, S), public, x.c)

    def leaves(hot, codes, first):
        codes = _copied(codes[:-1].view(CODES, blocks, width), copies)
        equal = pick_equal(hot, codes)
        if first:
            equal ^= hot[0]
        return pick_less(hot, codes), equal[1:]

    less_A, equal_A = net.locally(A, lambda h, u: leaves(h, u, True), hot, codes.A)
    less_S, equal_S = net.locally(S, lambda h, u: leaves(h, u, False), hot, codes.S)
    less = less_than_tree(net, Shares(less_A, less_S), Shares(equal_A, equal_S))
    return Shares(
        net.locally(A, lambda g, u, top: ~(g ^ _copied(u[-1], copies) ^ top), less.A, codes.A, top),
        net.locally(S, lambda g, u: g ^ _copied(u[-1], copies), less.S, codes.S),
    )


def _copied(words: torch.Tensor, copies: int) -> torch.Tensor:
    """The same words for every threshold, along the last dimension."""
    return words if copies == 1 else words.repeat(*[1] * (words.dim() - 1), copies)


@protocol("is_zero", "docs/protocols.md", [
    Message("masked_A", "A", "S", "alpha_A of k_QA"), Message("masked_S", "S", "A", "alpha_S of k_SQ"),
])  # fmt: skip
def is_zero(net: Net, x: Masked) -> Shares:
    """[x = 0] as XOR-shared bits: c = r in all 64 planes, by a tree of ANDs over the blocks.

    Returns:
        words [W], W = ceil(N / 64).

    Rounds 5; 22 blocks: dealt 154 + 21 bits per element, online 84 bits.
    """
    Q, A, S = net.Q, net.A, net.S
    blocks, width = block_count(0, 64), words_for(x.shape.numel())
    codes = deal_bits(net, net.locally(Q, lambda r: thermometer(blocks_of(planes(rows(r)), 0, 64)), x.r))
    hot = net.locally((A, S), lambda c: one_hot(blocks_of(planes(rows(c)), 0, 64)), x.c)
    at_A = net.locally(A, lambda h, u: pick_equal(h, u).bitwise_xor_(h[0]), hot, codes.A)
    at_S = net.locally(S, pick_equal, hot, codes.S)

    while blocks > 1:
        half = blocks // 2
        blocks -= half
        alpha_A = net.common(Q, A, (2 * half, width), "alpha_A")
        alpha_S = net.common(Q, S, (2 * half, width), "alpha_S")
        triple = deal_bits(
            net, net.locally(Q, lambda a, s: (a[:half] ^ s[:half]) & (a[half:] ^ s[half:]), alpha_A, alpha_S)
        )
        masked_A = net.locally(A, lambda e, a: e[: 2 * half] ^ a, at_A, alpha_A)
        masked_S = net.locally(S, lambda e, a: e[: 2 * half] ^ a, at_S, alpha_S)
        public = net.locally(
            (A, S), torch.bitwise_xor, net.send(masked_A, A, S, "masked_A"), net.send(masked_S, S, A, "masked_S")
        )

        def join(d, e, a, t, first, half=half):
            both = (d[:half] & a[half:]) ^ (a[:half] & d[half:]) ^ t
            if first:
                both ^= d[:half] & d[half:]
            return torch.cat((both, e[2 * half :]))

        at_A = net.locally(A, lambda d, e, a, t: join(d, e, a, t, True), public, at_A, alpha_A, triple.A)
        at_S = net.locally(S, lambda d, e, a, t: join(d, e, a, t, False), public, at_S, alpha_S, triple.S)
    return Shares(net.locally(A, lambda e: e[0], at_A), net.locally(S, lambda e: e[0], at_S))
