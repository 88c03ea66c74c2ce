"""Exact comparison on packed bit planes: the sign of a masked value, as an XOR-shared bit.

From c = x + r, public to A and S, and r, known to the dealer, the sign of x is

    msb(x) = c_63 xor r_63 xor [c mod 2^63 < r mod 2^63].

The low 63 bits are cut into blocks of three. For each block D deals the thermometer code of r's block in XOR shares,
u_j = [j < r] for j = 0..6, and A and S pick by the public block of c, without a message:

    [c < r] = xor_j [c = j] u_j,        [c = r] = xor_j [c = j] (u_{j-1} xor u_j),   u_{-1} = 1, u_7 = 0.

The blocks are then combined in a tree (`trees.py`). The dealt blocks cost nothing online, so the tree has a third of
the leaves that single bits would give, and levels less. A comparison of the low planes alone says where a truncation
borrows (`truncate.py`); several trees side by side share their rounds and messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from ...choreography import Net, leaf, protocol
from ...errors import ArgumentError
from ...ring import signed
from ...ring.bitplanes import fast, planes, rows, words_for, xor_along
from . import proved
from .circuit import Circuit
from .deal import Made, deal_bit_halves
from .halves import Halves
from .layers import Layer, and_layers
from .mask import Masked, planes_of
from .shares import Shares, each
from .trees import forest_worth, grouped, levels_of

BLOCK = 3
"""Bits in a block. Three minimises bytes: 7/3 dealt bits per bit, against fewer tree nodes."""

CODES = (1 << BLOCK) - 1


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
    return xor_along(hot & codes)


def deal_codes(net: Net, x: Masked, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()) -> Shares:
    """`deal_code_halves` as A and S have them."""
    return deal_code_halves(net, x, spans, tops).shares


def deal_code_halves(net: Net, x: Masked, spans: Sequence[tuple[int, int]], tops: tuple[int, ...] = ()) -> Halves:
    """Thermometer codes of the blocks of r for planes low .. high - 1 of each span, and r's planes `tops`.

    Returns:
        words [7 blocks + len(tops), W], XOR-shared, of which as many bits an element are dealt.
    """
    counts = [block_count(*span) for span in spans]
    shape = CODES * sum(counts) + len(tops), words_for(x.shape.numel())
    planes = [(high - BLOCK * count, high) for count, (_, high) in zip(counts, spans, strict=True)]
    made = Made(masked_codes, shape, (x.r, tuple(spans), tops))
    return deal_bit_halves(net, made, proved.codes(net, x, planes, tops))


@leaf(shapes=lambda r, spans, tops, v_A: torch.empty_like(v_A))
def masked_codes(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...], v_A: torch.Tensor):
    """At D: thermometer codes of the blocks of r, followed by r's planes `tops`; all under v_A."""
    if not (loops := fast(r, v_A)):
        return codes_of(r, spans, tops).bitwise_xor_(v_A)
    out = torch.empty_like(v_A)
    arrays = loops.array(r).reshape(-1), v_A.numpy(), _numbers(spans), _numbers(tops), out.numpy()
    loops.on_words(v_A.shape[1], loops.codes, *arrays)
    return out


@functools.cache
def _numbers(values: tuple) -> np.ndarray:
    return np.array(values, np.int64)


def codes_of(r: torch.Tensor, spans: Sequence[tuple[int, int]], tops: tuple[int, ...]) -> torch.Tensor:
    """Thermometer codes of the blocks of r, followed by r's planes `tops`."""
    bits = planes(rows(r))
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
    """One party's half of lt and eq of all blocks, in the order of `forest`; `first` is the party that adds [c = 0].

    Args:
        bits: c's bit planes, public [64, T W] for T thresholds. codes: its half of the codes of these spans, [.., W].
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
    """lt and then eq of a span's blocks, into `out`; their codes are those from `block` on, of `total` blocks."""
    blocks = block_count(*span)
    if loops := fast(bits, codes, out):
        place = span[1] - BLOCK * blocks, blocks, -int(first), out.numpy(), 0
        loops.on_words(bits.shape[1], loops.leaves, bits.numpy(), codes.numpy(), total, block, *place)
        return
    hot = one_hot(blocks_of(bits, *span))
    codes = codes[: CODES * total].unflatten(0, (CODES, total))[:, block : block + blocks]
    codes = _copied(codes, bits.shape[1] // max(1, codes.shape[-1]))
    out[:blocks] = pick_less(hot, codes)
    out[blocks:] = pick_equal(hot, codes)
    if first:
        out[blocks:] ^= hot[0]


@protocol("drelu", "PrivHFL, Figure 4, made exact and leak-free")
def drelu(net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """[x - t >= 0] for each public threshold t, as XOR-shared bits. Exact.

    Args:
        x: a masked opening of N elements.
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.
        thresholds: ring elements; one opening and one dealing of r serves them all.

    Returns:
        words [T * W], W = ceil(N / 64).

    In B = ceil(high / 3) blocks. Rounds ceil(log4 B), or one more (`trees.py`). Dealt:
    7 B + 1 bits per element, and per element and threshold
    those of the tree's nodes (`grouped`). With 63 planes three rounds, 148 and 55 bits, and 104 online per threshold.
    Nobody learns anything: all messages are uniform to their receivers.
    """
    check_planes(high)
    span, copies = (0, high), len(thresholds)
    blocks = block_count(*span)
    codes = deal_codes(net, x, [span], (high,))

    bits = planes_of(x.c, tuple(map(signed, thresholds)))
    state = Shares(leaves(bits, codes.A, (span,), True), leaves(bits, codes.S, (span,), False))
    layers, _ = forest_worth(net, copies * x.shape.numel(), (blocks,), (False,))
    less = and_layers(net, state, layers)
    return ~(less[0] ^ each(_copied, codes[-1], copies) ^ bits[high])


def _copied(words: torch.Tensor, copies: int) -> torch.Tensor:
    """The same words for every threshold, along the last dimension."""
    return words if copies == 1 else words.repeat(*[1] * (words.dim() - 1), copies)


@functools.cache
def _conjunction(blocks: int) -> tuple[Layer, ...]:
    """The layers of one AND over all blocks."""
    circuit, rows = Circuit(blocks), list(range(blocks))
    for sizes in grouped(blocks, levels_of(blocks))[1]:
        ends = itertools.accumulate(sizes)
        parts = [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        rows = [circuit.gate(tuple(part)) if len(part) > 1 else part[0] for part in parts]
    return circuit.layers(tuple(rows))[0]


@protocol("is_zero", "docs/protocols.md")
def is_zero(net: Net, x: Masked) -> Shares:
    """[x = 0] as XOR-shared bits: c = r in all 64 planes, by a tree of ANDs over the blocks. Exact.

    Returns:
        words [W], W = ceil(N / 64).

    Rounds 3; 22 blocks: dealt 154 + 35 bits per element, online 74 bits.
    """
    span = (0, 64)
    blocks = block_count(*span)
    codes, bits = deal_codes(net, x, [span]), planes_of(x.c)
    state = Shares(leaves(bits, codes.A, (span,), True), leaves(bits, codes.S, (span,), False))
    return and_layers(net, state[blocks:], _conjunction(blocks))[0]
