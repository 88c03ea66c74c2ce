"""Exact comparison on packed bit planes: the sign of a masked value, as an XOR-shared bit.

From c = x + r, public to A and S, and r, known to the dealer, the sign of x is

    msb(x) = c_63 xor r_63 xor [c mod 2^63 < r mod 2^63].

The low 63 bits are cut into blocks of three. For each block D deals the thermometer code of r's block in XOR shares,
u_j = [j < r] for j = 0..6, and A and S pick by the public block of c, without a message:

    [c < r] = xor_j [c = j] u_j,        [c = r] = xor_j [c = j] (u_{j-1} xor u_j),   u_{-1} = 1, u_7 = 0.

The blocks are then combined, the more significant one first, in a tree:

    lt = lt_hi xor eq_hi lt_lo,         eq = eq_hi eq_lo,

two ANDs a node (`circuit.py`, `layers.py`). The dealt blocks cost nothing online, so the tree has a third of the leaves
that single bits would give, and up to two levels less. A comparison of the low planes alone says where a truncation
borrows (`truncate.py`); several trees side by side share their rounds and messages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..bitplanes import planes, rows, words_for
from ..choreography import Located, Net, leaf, protocol
from ..errors import ArgumentError
from .circuit import Circuit
from .deal import deal_bits
from .layers import Layer, and_layers, pick
from .mask import Masked
from .shares import Shares, each, whole

BLOCK = 3
"""Bits in a block. Three minimises bytes: 7/3 dealt bits per bit, against fewer tree nodes."""

CODES = (1 << BLOCK) - 1

SPAN = 1 << 12
"""Words of the leaves at a time: few enough to stay in the cache, and enough for two cores."""


def check_planes(high: int, low: int = 0) -> None:
    """Raise `ArgumentError` unless low < high <= 63."""
    if not low < high <= 63:
        raise ArgumentError(f"a comparison looks at planes {low}..high-1 with {low} < high <= 63, got high = {high}")


def block_count(low: int, high: int) -> int:
    """Blocks that cover the planes low .. high - 1."""
    return -(-(high - low) // BLOCK)


def blocks_of(bit_planes: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Planes [64, W] -> [blocks, 3, W], least significant block first; reaches below `low` to fill the last block.

    That does no harm: where the planes that a block and the comparison below it share are equal, they are equal in
    both.
    """
    blocks = block_count(low, high)
    start = high - BLOCK * blocks
    if start < 0:
        bit_planes = torch.cat([bit_planes.new_zeros(-start, bit_planes.shape[-1]), bit_planes[:high]])
        start, high = 0, high - start
    return bit_planes[start:high].unflatten(0, (blocks, BLOCK))


def thermometer(blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[blocks, 3, W] -> [7, blocks, W]: u_j = [j < value of the block]; into `out` if it is given."""
    out = blocks.new_empty(CODES, blocks.shape[0], blocks.shape[2]) if out is None else out
    r0, r1, r2 = blocks.unbind(1)
    some = torch.bitwise_or(r1, r0, out=out[4])
    both = torch.bitwise_and(r1, r0, out=out[6])
    torch.bitwise_or(r2, some, out=out[0])
    torch.bitwise_or(r2, r1, out=out[1])
    torch.bitwise_or(r2, both, out=out[2])
    out[3].copy_(r2)
    some.bitwise_and_(r2)
    both.bitwise_and_(r2)
    torch.bitwise_and(r2, r1, out=out[5])
    return out


def one_hot(blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[blocks, 3, W] -> [8, blocks, W]: h_j = [value of the block = j]; into `out` if it is given."""
    out = blocks.new_empty(CODES + 1, blocks.shape[0], blocks.shape[2]) if out is None else out
    c0, c1, c2 = blocks.unbind(1)
    torch.bitwise_or(c1, c0, out=out[0]).bitwise_not_()
    torch.bitwise_and(c1, c0, out=out[3])
    torch.bitwise_xor(c0, out[3], out=out[1])
    torch.bitwise_xor(c1, out[3], out=out[2])
    torch.bitwise_and(out[:4], c2, out=out[4:])
    out[:4].bitwise_xor_(out[4:])
    return out


def pick_less(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """This party's half of [c < r] per block, from public h_j and its halves of u_j."""
    return _pick(hot[:CODES], codes)


def pick_equal(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """This party's half of [c = r] per block, but for the term h_0, which A adds."""
    return pick_less(hot, codes).bitwise_xor_(_pick(hot[1:], codes))


def _pick(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """xor_j h_j u_j."""
    out, part = hot[0] & codes[0], torch.empty_like(codes[0])
    for h, u in zip(hot[1:], codes[1:], strict=True):
        out.bitwise_xor_(torch.bitwise_and(h, u, out=part))
    return out


Node = tuple[int, int | None]
"""A node of a tree by numbers of a circuit: lt, and eq where somebody needs it."""


def join(circuit: Circuit, high: Node, low: Node) -> Node:
    """lt = lt_hi xor eq_hi lt_lo, eq = eq_hi eq_lo."""
    lt = circuit.land(high[1], low[0], high[0])
    return lt, None if low[1] is None else circuit.land(high[1], low[1])


def levels(circuit: Circuit, nodes: list[Node]) -> list[list[Node]]:
    """A tree from its blocks, least significant first, to its root: level l has nodes of 2^l blocks."""
    found = [nodes]
    while len(nodes) > 1:
        pairs = zip(nodes[0::2], nodes[1::2], strict=False)
        nodes = [join(circuit, high, low) for low, high in pairs] + nodes[len(nodes) // 2 * 2 :]
        found.append(nodes)
    return found


def _prefix(tree: list[list[Node]], blocks: int) -> list[Node]:
    """Nodes of a tree that together cover its lowest blocks, least significant first."""
    parts, at = [], 0
    while at < blocks:
        level = max(k for k in range(len(tree)) if at % (1 << k) == 0 and at + (1 << k) <= blocks)
        parts.append(tree[level][at >> level])
        at += 1 << level
    return parts


def _folded(circuit: Circuit, nodes: list[Node]) -> Node:
    """One node of neighbours, least significant first: those that are there first are joined first."""
    nodes = list(nodes)
    while len(nodes) > 1:
        depths = [max(circuit.depth(row) for row in node if row is not None) for node in nodes]
        i = min(range(len(nodes) - 1), key=lambda i: max(depths[i : i + 2]))
        nodes[i : i + 2] = [join(circuit, nodes[i + 1], nodes[i])]
    return nodes[0]


@functools.cache
def forest(
    blocks: tuple[int, ...], whole: tuple[bool, ...], above: tuple[int, int] | None = None
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The layers that combine trees of so many blocks, side by side, and where their results stand.

    The state is [lt, eq] of the first tree's blocks, least significant first, and so on. The results are the rows of
    one lt for each tree, followed by the tree's eq for those that are `whole`: the values are equal in all planes. The
    lowest block's eq enters for these only.

    Args:
        above: a tree, and how many of its lowest blocks the trees after it stand above: their results are of both
            together.
    """
    circuit, trees, at = Circuit(2 * sum(blocks)), [], 0
    for number, (count, kept) in enumerate(zip(blocks, whole, strict=True)):
        kept = kept or (above is not None and number > above[0])
        trees.append(levels(circuit, [(at + i, at + count + i if kept or i else None) for i in range(count)]))
        at += 2 * count
    nodes = [tree[-1][0] for tree in trees]
    if above is not None:
        tree, count = above
        below = _prefix(trees[tree], count)
        nodes[tree + 1 :] = [_folded(circuit, [*below, node]) for node in nodes[tree + 1 :]]
    wanted = [row for (lt, eq), kept in zip(nodes, whole, strict=True) for row in ((lt, eq) if kept else (lt,))]
    return circuit.layers(tuple(wanted))


def deal_codes(
    net: Net, x: Masked, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()
) -> tuple[Shares, Located]:
    """Thermometer codes of the blocks of r for planes low .. high - 1 of each span, and r's planes `tops`.

    Returns:
        words [7 blocks + len(tops), W], XOR-shared, of which as many bits an element are dealt; and the planes, at D.
    """

    codes, planes_of_r = codes_of(x.r, spans, tops)
    return deal_bits(net, codes), planes_of_r


def _shapes_of_codes(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...]):
    width = words_for(r.numel())
    blocks = sum(block_count(*span) for span in spans)
    return r.new_empty(CODES * blocks + len(tops), width), r.new_empty(len(tops), width)


@leaf(shapes=_shapes_of_codes)
def codes_of(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...]):
    """At D: thermometer codes of the blocks of r, followed by r's planes `tops`; and these planes once more."""
    bits = planes(rows(r))
    counts = [block_count(*span) for span in spans]
    out = bits.new_empty(CODES * sum(counts) + len(tops), bits.shape[1])
    place = out[: CODES * sum(counts)].unflatten(0, (CODES, -1)).split(counts, 1)
    for span, part in zip(spans, place, strict=True):
        thermometer(blocks_of(bits, *span), part)
    for i, top in enumerate(tops):
        out[i - len(tops)] = bits[top]
    return out, out[len(out) - len(tops) :]


@leaf
def planes_of(v: torch.Tensor) -> torch.Tensor:
    """The bit planes of a tensor: [64, W], W = ceil(N / 64)."""
    return planes(rows(v))


def _shapes_of_blocks(bits: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()):
    blocks = sum(block_count(*span) for span in spans)
    return bits.new_empty(CODES + 1, blocks, bits.shape[1]), bits.new_empty(len(tops), bits.shape[1])


@leaf(shapes=_shapes_of_blocks)
def open_planes(bits: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()):
    """Public bit planes [64, W] of c -> h_j of the blocks of all spans [8, blocks, W], and c's planes `tops`."""
    counts = [block_count(*span) for span in spans]
    hot = bits.new_empty(CODES + 1, sum(counts), bits.shape[1])
    for span, part in zip(spans, hot.split(counts, 1), strict=True):
        one_hot(blocks_of(bits, *span), part)
    return hot, pick(bits, tops)


@leaf(shapes=lambda hot, codes, counts, *_: hot.new_empty(2 * sum(counts), hot.shape[2]))
def leaves(
    hot: torch.Tensor, codes: torch.Tensor, counts: Sequence[int], first: bool, copies: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One party's half of lt and eq of all blocks, in the order of `forest`; `first` is the party that adds [c = 0].

    Into `out` [2 blocks, W] if it is given.
    """
    total, width = sum(counts), hot.shape[2]
    codes = _copied(codes[: CODES * total].unflatten(0, (CODES, -1)), copies)
    out = hot.new_empty(2 * total, width) if out is None else out
    for at in range(0, width, SPAN):
        span = slice(at, at + SPAN)
        less, other = _pick(hot[:CODES, :, span], codes[..., span]), _pick(hot[1:, :, span], codes[..., span])
        other.bitwise_xor_(less)
        if first:
            other.bitwise_xor_(hot[0, :, span])
        row = 0
        for lt, eq in zip(less.split(counts), other.split(counts), strict=True):
            out[2 * row : 2 * row + len(lt), span] = lt
            out[2 * row + len(lt) : 2 * row + 2 * len(lt), span] = eq
            row += len(lt)
    return out


def _signs(net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """The ideal functionality of `drelu`: whole numbers 0 and 1, for several thresholds [T, *shape]."""
    if len(thresholds) == 1:
        return whole(net, lambda v: (v - thresholds[0] >= 0).to(torch.int64), x.c)
    return whole(net, lambda v: torch.stack([(v - t >= 0).to(torch.int64) for t in thresholds]), x.c)


@protocol("drelu", "PrivHFL, Figure 4, made exact and leak-free", ideal=_signs)
def drelu(net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """[x - t >= 0] for each public threshold t, as XOR-shared bits. Exact.

    Args:
        x: a masked opening of N elements.
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.
        thresholds: ring elements; one opening and one dealing of r serves them all.

    Returns:
        words [T * W], W = ceil(N / 64).

    In B = ceil(high / 3) blocks. Rounds ceil(log2 B). Dealt: 7 B + 1 bits per element and 2 B - 2 - levels per element
    and threshold; online 2 (3 (B - 1) - levels) bits per element and threshold. Nobody learns anything: all messages
    are uniform to their receivers.
    """
    check_planes(high)
    span, copies = (0, high), len(thresholds)
    blocks = block_count(*span)
    codes, _ = deal_codes(net, x, [span], (high,))

    hot, top = open_planes(planes_below(x.c, thresholds), [span], (high,))
    state = Shares(
        leaves(hot, codes.A, (blocks,), True, copies),
        leaves(hot, codes.S, (blocks,), False, copies),
    )
    layers, _ = forest((blocks,), (False,))
    less = and_layers(net, state, layers)
    return ~(less[0] ^ each(_copied, codes[-1], copies) ^ top[0])


@leaf
def planes_below(c: torch.Tensor, thresholds: tuple[int, ...]) -> torch.Tensor:
    """The bit planes of c - t for each threshold, side by side: [64, T W]."""
    return planes(torch.cat([rows(c - t if t else c) for t in thresholds], -1))


def _copied(words: torch.Tensor, copies: int) -> torch.Tensor:
    """The same words for every threshold, along the last dimension."""
    return words if copies == 1 else words.repeat(*[1] * (words.dim() - 1), copies)


def _zeros(net: Net, x: Masked) -> Shares:
    """The ideal functionality of `is_zero`."""
    return whole(net, lambda v: (v == 0).to(torch.int64), x.c)


@functools.cache
def _conjunction(blocks: int) -> tuple[Layer, ...]:
    """The layers of one AND over all blocks."""
    layers = []
    while blocks > 1:
        half = blocks // 2
        left = tuple(range(half))
        right = tuple(range(half, 2 * half))
        layers.append(Layer(left + right, left, right, (), tuple(range(2 * half, blocks))))
        blocks -= half
    return tuple(layers)


@protocol("is_zero", "docs/protocols.md", ideal=_zeros)
def is_zero(net: Net, x: Masked) -> Shares:
    """[x = 0] as XOR-shared bits: c = r in all 64 planes, by a tree of ANDs over the blocks. Exact.

    Returns:
        words [W], W = ceil(N / 64).

    Rounds 5; 22 blocks: dealt 154 + 21 bits per element, online 84 bits.
    """
    span = (0, 64)
    blocks = block_count(*span)
    codes, _ = deal_codes(net, x, [span])
    hot, _ = open_planes(planes_of(x.c), [span])
    state = Shares(leaves(hot, codes.A, (blocks,), True), leaves(hot, codes.S, (blocks,), False))
    return and_layers(net, state[blocks:], _conjunction(blocks))[0]
