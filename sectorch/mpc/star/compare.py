"""Exact comparison on packed bit planes: the sign of a masked value, and whether it is zero, as XOR-shared bits.

From c = x + r, public to A and S, and r, known to the dealer, the sign of x is

    msb(x) = c_63 xor r_63 xor [c mod 2^63 < r mod 2^63].

The low 63 bits are cut into blocks of three. For each block D deals the thermometer code of r's block in XOR shares,
u_j = [j < r] for j = 0..6, and A and S select by the public block of c, without a message:

    [c < r] = xor_j [c = j] u_j,        [c = r] = xor_j [c = j] (u_{j-1} xor u_j),   u_{-1} = 1, u_7 = 0.

The blocks are combined in a tree of ANDs. Dealt blocks cost nothing online, so the tree has a third of the leaves that
single bits would give, and fewer levels. A comparison of the low planes alone gives the borrow of a truncation
(`truncate.py`); several trees side by side share their rounds and messages.

The file has three parts: trees (`forest`), blocks of three bits (`drelu`, `is_zero`), and wide blocks, which compare in
one round for more dealt bytes (`wide_less`).

Source: PrivHFL, Figure 4 (Pi_DReLU), whose protocol leaks (`mpc/leaky.py`); the tree is that of carry lookahead.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...choreography import Located, Net, leaf, protocol
from ...errors import ArgumentError
from ...ring import as_signed
from ...ring.bitplanes import fast, planes, to_rows, words_for, xor_along
from . import dealing_constraints
from .and_layers import WIDEST, AndCircuit, AndLayer, and_layers
from .dealing_proofs import DealerShares
from .masking import ComputedCorrection, Masked, deal_bits, planes_of
from .shares import Shares, each

# Trees that combine blocks, as layers of ANDs
#
# A node joins up to four neighbours, of which 4 is the most significant one:
#
#     lt = lt_4 xor eq_4 lt_3 xor eq_4 eq_3 lt_2 xor eq_4 eq_3 eq_2 lt_1,         eq = eq_4 eq_3 eq_2 eq_1,
#
# in one round. For a node of two neighbours two bits are dealt, for one of four 22. For the 7 and 15 blocks of a ReLU
# by 20 bits, side by side, that makes 110 bits with two levels and 51 with three.


Node = tuple[int, int]
"""The rows lt and eq of a node, by their numbers in a circuit."""


def join(circuit: AndCircuit, nodes: Sequence[Node]) -> Node:
    """Join neighbours, least significant first, to one node."""
    if len(nodes) == 1:
        return nodes[0]
    equals = [equal for _, equal in reversed(nodes)]
    less = [lt for lt, _ in reversed(nodes)]
    lt = circuit.gate(*((*equals[:i], less[i]) for i in range(1, len(nodes))), onto=less[0])
    return lt, circuit.gate(tuple(equals))


def levels_of(blocks: int) -> int:
    """The fewest levels of a tree over so many blocks: ceil(log4 blocks)."""
    return 0 if blocks <= 1 else 1 + levels_of(-(-blocks // WIDEST))


def _bits(group: int, lowest: bool) -> int:
    """Bits that a node of so many blocks opens and has dealt; the lowest node of a level needs no eq."""
    # eq_g .. eq_2 and lt_{g-1} .. lt_1 are opened. Dealt are the products of all sets of two and more of the operands
    # of eq_g .. eq_2 lt_1, 2^g - g - 1, and those sets with lt_i of each shorter AND, 2^(g-1) - g. eq adds one operand,
    # and the 2^(g-1) - 1 sets that have it.
    opened, dealt = 2 * group - 2, 2**group - group - 1 + 2 ** (group - 1) - group
    return 0 if group == 1 else 2 * opened + dealt if lowest else 2 * (opened + 1) + dealt + 2 ** (group - 1) - 1


@functools.cache
def group_blocks(count: int, levels: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How a tree of so many levels joins its blocks with the fewest bits, opened and dealt.

    Only trees whose groups in a level differ in size by one at most are compared.

    Returns:
        The bits an element, and for each level the sizes of its groups, least significant first.
    """
    if levels == 0:
        return 0, ()
    found = []
    # So many groups that no node has more than `WIDEST` blocks, and few enough for the levels above.
    for groups in range(-(-count // WIDEST), min(count, WIDEST ** (levels - 1)) + 1):
        sizes = tuple(count // groups + (i < count % groups) for i in range(groups))
        bits, above = group_blocks(groups, levels - 1)
        found.append((bits + sum(_bits(size, i == 0) for i, size in enumerate(sizes)), (sizes, *above)))
    return min(found)


def tree(circuit: AndCircuit, nodes: list[Node], levels: int) -> Node:
    """Add a tree over these blocks, least significant first, and return its root."""
    for sizes in group_blocks(len(nodes), levels)[1]:
        ends = itertools.accumulate(sizes)
        nodes = [join(circuit, nodes[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return nodes[0]


@functools.cache
def forest(
    blocks: tuple[int, ...], whole: tuple[bool | None, ...], above: tuple[int, int] | None = None, spare: int = 0
) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
    """Return the layers that evaluate several trees side by side, and the rows of their results.

    The state is [lt, eq] of the first tree's blocks, least significant first, then of the second tree's, and so on.

    Args:
        blocks: the number of blocks of each tree.
        whole: for each tree whether its eq is a result as well: whether the values are equal in all planes. Only then
            does the lowest block's eq matter. None for a tree without a result, whose blocks only stand below others.
        above: a tree, and how many of its lowest blocks stand below the blocks of all later trees. The results of the
            later trees are of both together; nodes that they have in common are evaluated once.
        spare: levels in addition to the fewest. Nodes are narrower then, and fewer bits are dealt.

    Returns:
        The layers, and for each tree the row of lt, followed by that of eq where it is a result.
    """
    circuit, leaves_of, at = AndCircuit(2 * sum(blocks)), [], 0
    for count in blocks:
        leaves_of.append([(at + i, at + count + i) for i in range(count)])
        at += 2 * count
    if above is not None:
        below = leaves_of[above[0]][: above[1]]
        leaves_of[above[0] + 1 :] = [below + own for own in leaves_of[above[0] + 1 :]]
    trees = [(nodes, with_eq) for nodes, with_eq in zip(leaves_of, whole, strict=True) if with_eq is not None]
    levels = max(levels_of(len(nodes)) for nodes, _ in trees) + spare
    roots = [(tree(circuit, nodes, levels), with_eq) for nodes, with_eq in trees]
    return circuit.layers(tuple(row for (lt, eq), with_eq in roots for row in ((lt, eq) if with_eq else (lt,))))


LAN_ROUND = 1 << 18
"""Bytes that a round is worth unless the scheme sets more: 2 ms of 1 Gbit/s. A step of GPT-2 takes 1.7 ms a round more
among three processes than in one, beside what the message travels."""


@dataclass
class RoundBudget:
    """What fewer rounds are worth in a call.

    Attributes:
        round_bytes: the bytes that saving a round is worth, where the call's scheme says so.
        spent: the bytes that the call is dealt in addition for fewer rounds; see `maximum.levels_worth`.
        scale: what a round of the call's link is worth, relative to one of "wan". `MUCH`, and all other bytes that are
            dealt for fewer rounds, are limited in proportion.
    """

    round_bytes: int | None = None
    spent: int = 0
    scale: float = 1.0


MUCH = 48_000_000
"""Bytes ahead after which a call saves bytes and not rounds, on the link "wan": 4 s of 100 Mbit/s."""


def forest_worth(
    net: Net, count: int, blocks: tuple[int, ...], whole: tuple[bool | None, ...], above: tuple[int, int] | None = None
) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
    """`forest` for so many elements, with further levels where the bytes that they save are worth more than rounds.

    A round is worth the call's `round_bytes`, or `LAN_ROUND` where there are none and once it has been dealt `MUCH`
    times `scale`.
    """
    budget = net.state(RoundBudget)
    given = budget.round_bytes
    worth = LAN_ROUND if given is None or net.offline_bytes > MUCH * budget.scale else given
    forests = (forest(blocks, whole, above, spare) for spare in range(3))
    return min(forests, key=lambda f: bits_of_layers(f[0]) * count // 8 + len(f[0]) * worth)


@functools.cache
def bits_of_layers(layers: tuple[AndLayer, ...]) -> int:
    """Bits an element that layers open, in both directions, and have dealt."""
    return sum(2 * len(layer.opened_rows) + len(layer.products) for layer in layers)


# Blocks of three bits


BLOCK = 3
"""Bits in a block. Three minimises bytes: 7/3 dealt bits per bit, against fewer tree nodes."""

CODES = (1 << BLOCK) - 1
"""Bits of a block's thermometer code."""


def check_planes(high: int, low: int = 0) -> None:
    """Raise `ArgumentError` unless low < high <= 63."""
    if not low < high <= 63:
        raise ArgumentError(f"a comparison looks at planes {low}..high-1 with {low} < high <= 63, got high = {high}")


def block_count(low: int, high: int) -> int:
    """How many blocks cover the planes low .. high - 1."""
    return -(-(high - low) // BLOCK)


def blocks_of(bit_planes: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Planes [64, W] -> [blocks, 3, W], least significant block first.

    The lowest block reaches below `low` where the planes do not fill it. A comparison of the planes below then has some
    planes in common with it. The result is the same: the block decides only where it is different, and where it is
    equal the common planes are equal in both.
    """
    blocks = block_count(low, high)
    start = high - BLOCK * blocks
    if start < 0:
        bit_planes = torch.cat([bit_planes.new_zeros(-start, bit_planes.shape[-1]), bit_planes[:high]])
        start, high = 0, high - start
    return bit_planes[start:high].unflatten(0, (blocks, BLOCK))


def thermometer(blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Thermometer codes: [blocks, 3, W] -> [7, blocks, W], u_j = [j < value of the block]; into `out` if given."""
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
    """One-hot codes: [blocks, 3, W] -> [8, blocks, W], h_j = [value of the block = j]; into `out` if given."""
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
    """One party's half of [c < r] per block, from the public h_j and its halves of u_j."""
    return _pick(hot[:CODES], codes)


def pick_equal(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """One party's half of [c = r] per block, without the term h_0, which A adds."""
    return pick_less(hot, codes).bitwise_xor_(_pick(hot[1:], codes))


def _pick(hot: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """xor_j h_j u_j."""
    return xor_along(hot & codes)


def deal_codes(net: Net, x: Masked, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()) -> DealerShares:
    """Deal thermometer codes of r's blocks in the planes low .. high - 1 of each span, and r's planes `tops`.

    Returns:
        Words [7 blocks + len(tops), W], XOR-shared. As many bits an element are dealt ahead of the query.
    """
    counts = [block_count(*span) for span in spans]
    shape = CODES * sum(counts) + len(tops), words_for(x.shape.numel())
    planes = [(high - BLOCK * count, high) for count, (_, high) in zip(counts, spans, strict=True)]
    correction = ComputedCorrection(masked_codes, shape, (x.r, tuple(spans), tops))
    return deal_bits(net, correction, dealing_constraints.codes(net, x, planes, tops))


@leaf(shapes=lambda r, spans, tops, v_A: torch.empty_like(v_A))
def masked_codes(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...], v_A: torch.Tensor):
    """At D: thermometer codes of the blocks of r, followed by r's planes `tops`; masked by v_A."""
    if not (loops := fast(r, v_A)):
        return codes_of(r, spans, tops).bitwise_xor_(v_A)
    out = torch.empty_like(v_A)
    arrays = loops.array(r).reshape(-1), v_A.numpy(), _numbers(spans), _numbers(tops), out.numpy()
    loops.run_on_words(v_A.shape[1], loops.codes, *arrays)
    return out


@functools.cache
def _numbers(values: tuple) -> np.ndarray:
    return np.array(values, np.int64)


def codes_of(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...]) -> torch.Tensor:
    """Thermometer codes of the blocks of r, followed by r's planes `tops`."""
    bits = planes(to_rows(r))
    counts = [block_count(*span) for span in spans]
    out = bits.new_empty(CODES * sum(counts) + len(tops), bits.shape[1])
    place = out[: CODES * sum(counts)].unflatten(0, (CODES, -1)).split(counts, 1)
    for span, part in zip(spans, place, strict=True):
        thermometer(blocks_of(bits, *span), part)
    for i, top in enumerate(tops):
        out[i - len(tops)] = bits[top]
    return out


@leaf(shapes=lambda bits, codes, spans, *_: bits.new_empty(2 * sum(block_count(*s) for s in spans), bits.shape[1]))
def leaves(bits: torch.Tensor, codes: torch.Tensor, spans: Sequence[tuple[int, int]], first: bool) -> torch.Tensor:
    """One party's half of lt and eq of all blocks, in the order of `forest`; the `first` party adds [c = 0].

    Args:
        bits: c's bit planes, public [64, T W] for T thresholds.
        codes: its half of the codes of these spans, [.., W].
    """
    total = sum(block_count(*span) for span in spans)
    out, at = bits.new_empty(2 * total, bits.shape[1]), 0
    for span in spans:
        blocks = block_count(*span)
        pick_blocks(bits, codes, total, at, span, first, out[2 * at : 2 * (at + blocks)])
        at += blocks
    return out


def pick_blocks(
    bits: torch.Tensor, codes: torch.Tensor, total: int, block: int, span: tuple[int, int], first: bool,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write lt and then eq of a span's blocks into `out`.

    Args:
        total, block: `codes` has so many blocks, of which this span's are those from `block` on.
    """
    blocks = block_count(*span)
    if loops := fast(bits, codes, out):
        place = span[1] - BLOCK * blocks, blocks, -int(first), out.numpy(), 0
        loops.run_on_words(bits.shape[1], loops.leaves, bits.numpy(), codes.numpy(), total, block, *place)
        return
    hot = one_hot(blocks_of(bits, *span))
    codes = codes[: CODES * total].unflatten(0, (CODES, total))[:, block : block + blocks]
    codes = _copied(codes, bits.shape[1] // max(1, codes.shape[-1]))
    out[:blocks] = pick_less(hot, codes)
    out[blocks:] = pick_equal(hot, codes)
    if first:
        out[blocks:] ^= hot[0]


@protocol("drelu", "PrivHFL, Figure 4, made exact and leak-free")
def drelu(net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,), wide: bool = False) -> Shares:
    """Compute [x - t >= 0] for each public threshold t, as XOR-shared bits. Exact.

    Args:
        x: a masked opening of N elements.
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.
        thresholds: ring elements; one opening and one dealing of r serve them all.
        wide: as few blocks as a tree of two levels joins, 16: a round less than 63 planes in blocks of three take, and
            11 bytes more.

    Returns:
        Words [T * W], W = ceil(N / 64), XOR-shared.

    Rounds ceil(log4 B) for B = ceil(high / 3) blocks, or one more (`forest_worth`). Dealt: 7 B + 1 bits per element,
    and for each threshold those of the tree's nodes (`group_blocks`). With 63 planes: three rounds, 148 bits and 55 for
    each threshold dealt, 104 for each threshold online. Nobody learns anything: every message is uniform to its
    receiver.
    """
    check_planes(high)
    span, copies = (0, high), len(thresholds)
    blocks = block_count(*span)
    bits = planes_of(x.c, tuple(map(as_signed, thresholds)))
    if wide:
        spans, (layers, _) = two_levels(high)
        codes = each(_copied, deal_wide_codes(net, x, spans, (high,)), copies)
        state = Shares(wide_leaves(bits, codes.A, spans, True), wide_leaves(bits, codes.S, spans, False))
        less = and_layers(net, state, layers)
        return ~(less[0] ^ codes[-1] ^ bits[high])
    codes = deal_codes(net, x, [span], (high,)).shares
    state = Shares(leaves(bits, codes.A, (span,), True), leaves(bits, codes.S, (span,), False))
    layers, _ = forest_worth(net, copies * x.shape.numel(), (blocks,), (False,))
    less = and_layers(net, state, layers)
    return ~(less[0] ^ each(_copied, codes[-1], copies) ^ bits[high])


@functools.cache
def two_levels(high: int) -> tuple[tuple[Blocks], tuple[tuple[AndLayer, ...], tuple[int, ...]]]:
    """The blocks of so many planes for a tree of two levels, and the tree."""
    span = blocks_between(0, high, min(high, WIDEST**2))
    return (span,), forest((len(span.widths),), (False,))


@functools.cache
def two_level_excess(high: int, copies: int = 1) -> float:
    """The bytes an element that `drelu` takes more with `wide`, or infinity where a tree of blocks has two levels."""
    blocks = block_count(0, high)
    if levels_of(blocks) <= 2:
        return math.inf
    (span,), (layers, _) = two_levels(high)
    narrow, _ = forest((blocks,), (False,))
    return (span.codes - CODES * blocks + copies * (bits_of_layers(layers) - bits_of_layers(narrow))) / 8


@leaf(shapes=lambda words, copies: words.new_empty(*words.shape[:-1], copies * words.shape[-1]))
def _copied(words: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat words for every threshold, along the last dimension."""
    return words if copies == 1 else words.repeat(*[1] * (words.dim() - 1), copies)


@functools.cache
def _conjunction(blocks: int) -> tuple[AndLayer, ...]:
    """The layers of one AND over all blocks."""
    circuit, rows = AndCircuit(blocks), list(range(blocks))
    for sizes in group_blocks(blocks, levels_of(blocks))[1]:
        ends = itertools.accumulate(sizes)
        parts = [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        rows = [circuit.gate(tuple(part)) if len(part) > 1 else part[0] for part in parts]
    return circuit.layers(tuple(rows))[0]


@protocol("is_zero", "docs/protocols.md")
def is_zero(net: Net, x: Masked) -> Shares:
    """Compute [x = 0] as XOR-shared bits: whether c = r in all 64 planes, by a tree of ANDs over the blocks. Exact.

    Returns:
        Words [W], W = ceil(N / 64), XOR-shared.

    Rounds 3. For the 22 blocks 154 + 35 bits per element are dealt, and 74 sent online. Nobody learns anything.
    """
    span = (0, 64)
    blocks = block_count(*span)
    codes, bits = deal_codes(net, x, [span]), planes_of(x.c)
    state = Shares(leaves(bits, codes.A, (span,), True), leaves(bits, codes.S, (span,), False))
    return and_layers(net, state[blocks:], _conjunction(blocks))[0]


# Wide blocks: comparisons in one round, for slow networks
#
# For a block of w bits D deals a thermometer code of 2^w - 1 bits. With few blocks one layer of ANDs replaces a tree:
# for B blocks D deals the products of up to B masks, some 2^(B + 1) bits. 43 planes in seven blocks take 89 bytes and
# one round, where blocks of three take 23 bytes and two rounds.


@dataclass(frozen=True)
class Blocks:
    """Planes from `low` on in blocks of so many bits, least significant first."""

    low: int
    widths: tuple[int, ...]

    @property
    def high(self) -> int:
        """The plane above the last block."""
        return self.low + sum(self.widths)

    @property
    def codes(self) -> int:
        """Bits that are dealt for an element's codes."""
        return sum((1 << width) - 1 for width in self.widths)


def blocks_between(low: int, high: int, count: int) -> Blocks:
    """Cut the planes low .. high - 1 into so many blocks, whose sizes differ by one at most."""
    least, more = divmod(high - low, count)
    return Blocks(low, tuple(least + (i < more) for i in range(count) if least + (i < more)))


def deal_wide_codes(net: Net, x: Masked, spans: tuple[Blocks, ...], tops: tuple[int, ...] = ()) -> Shares:
    """Deal thermometer codes of r's blocks in these spans, and r's planes `tops`.

    Returns:
        Words [bits, W], XOR-shared. As many bits an element are dealt ahead of the query. Nobody learns anything.
    """
    shape = sum(span.codes for span in spans) + len(tops), words_for(x.shape.numel())
    return deal_bits(net, ComputedCorrection(_masked_codes, shape, (x.r, spans, tops))).shares


@leaf(shapes=lambda r, spans, tops, v_A: torch.empty_like(v_A))
def _masked_codes(r: torch.Tensor, spans: tuple[Blocks, ...], tops: tuple[int, ...], v_A: torch.Tensor) -> torch.Tensor:
    """At D: the codes and planes of `deal_wide_codes`, masked by v_A."""
    if loops := fast(r, v_A):
        out = torch.empty_like(v_A)
        arrays = loops.array(r).reshape(-1), v_A.numpy(), _wide_words(spans), np.array(tops, np.int64), out.numpy()
        loops.run_on_words(v_A.shape[1], loops.wide_codes, *arrays)
        return out
    bits = planes(to_rows(r))
    codes = [thermometers(bits[p : p + width]) for p, width in _wide_words(spans).tolist()]
    return torch.cat((*codes, *(bits[top : top + 1] for top in tops))) ^ v_A


def _wide_words(spans: tuple[Blocks, ...]) -> np.ndarray:
    """The first plane and the width of every block: [blocks, 2]."""
    found = []
    for span in spans:
        plane = span.low
        for width in span.widths:
            found.append((plane, width))
            plane += width
    return np.array(found, np.int64).reshape(-1, 2)


def thermometers(block: torch.Tensor) -> torch.Tensor:
    """Thermometer code: planes [w, W], least significant first -> [2^w - 1, W], u_j = [j < value of the block]."""
    code = block[:0]
    for plane in block:
        code = torch.cat((code | plane, plane.unsqueeze(0), code & plane))
    return code


def hot(block: torch.Tensor) -> torch.Tensor:
    """One-hot code: planes [w, W] -> [2^w, W], h_j = [value of the block = j]."""
    code = torch.full_like(block[:1], -1)
    for plane in block:
        code = torch.cat((code & ~plane, code & plane))
    return code


@leaf(shapes=lambda bits, codes, spans, *_: bits.new_empty(2 * sum(len(s.widths) for s in spans), bits.shape[1]))
def wide_leaves(bits: torch.Tensor, codes: torch.Tensor, spans: tuple[Blocks, ...], first: bool) -> torch.Tensor:
    """One party's half of lt and then eq of the blocks of every span; the `first` party adds [c = 0].

    Args:
        bits: c's bit planes, public [64, W].
        codes: its half of the codes of these spans, of the same width.
    """
    out, at, row = bits.new_empty(2 * sum(len(s.widths) for s in spans), bits.shape[1]), 0, 0
    for span in spans:
        count = len(span.widths)
        _pick_wide(bits, codes[at : at + span.codes], span, first, out[row : row + 2 * count])
        at, row = at + span.codes, row + 2 * count
    return out


def _pick_wide(bits: torch.Tensor, codes: torch.Tensor, span: Blocks, first: bool, out: torch.Tensor) -> None:
    """Write lt and eq of one span's blocks into `out`."""
    if loops := fast(bits, codes, out):
        arrays = bits.numpy(), codes.numpy(), _wide_words((span,)), -int(first), out.numpy()
        loops.run_on_words(bits.shape[1], loops.wide_leaves, *arrays)
        return
    count, at = len(span.widths), 0
    for i, (plane, width) in enumerate(_wide_words((span,)).tolist()):
        h, u = hot(bits[plane : plane + width]), codes[at : at + (1 << width) - 1]
        out[i] = xor_along(h[:-1] & u)
        out[count + i] = out[i] ^ xor_along(h[1:] & u)
        if first:
            out[count + i] ^= h[0]
        at += (1 << width) - 1


def wide_less(net: Net, x: Masked, bits: Located, span: Blocks) -> Shares:
    """Compute [c < r] in the planes of a span, for x's mask r and the public planes of c: XOR-shared words [W].

    Rounds 1. Nobody learns anything.
    """
    codes = deal_wide_codes(net, x, (span,))
    at_A, at_S = wide_leaves(bits, codes.A, (span,), True), wide_leaves(bits, codes.S, (span,), False)
    return and_layers(net, Shares(at_A, at_S), one_layer(len(span.widths)))[0]


@functools.cache
def one_layer(blocks: int) -> tuple[AndLayer, ...]:
    """The layer that computes lt of all blocks."""
    circuit = AndCircuit(2 * blocks)
    lt, _ = join(circuit, [(i, blocks + i) for i in range(blocks)])
    return circuit.layers((lt,))[0]


# Polynomials over bits, for circuits whose products are multiplied out


Polynomial = frozenset[frozenset[int]]
"""The xor of ANDs of rows, each AND once; the empty AND is 1."""


def polynomial(*ands: Sequence[int]) -> Polynomial:
    """The polynomial that is the xor of these ANDs."""
    return _sum([frozenset(rows) for rows in ands])


def complement(p: Polynomial) -> Polynomial:
    """1 xor p."""
    return p ^ {frozenset()}


def product(*factors: Polynomial) -> Polynomial:
    """The AND of polynomials, multiplied out."""
    found = polynomial(())
    for factor in factors:
        found = _sum([p | q for p in found for q in factor])
    return found


def _sum(ands: Sequence[frozenset[int]]) -> Polynomial:
    found: set[frozenset[int]] = set()
    for factors in ands:
        found ^= {factors}
    return frozenset(found)
