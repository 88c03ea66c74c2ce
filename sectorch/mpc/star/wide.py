"""Comparisons in one round: blocks of more bits than `compare.py` takes, and one AND over all of them.

As there, D deals the thermometer code of each block of r, and A and S pick by c's public block, without a message.
A block of w bits has 2^w - 1 bits dealt. With few of them one layer of ANDs does what a tree does in several: of B
blocks D deals the products of up to B masks, some 2^(B + 1) bits. 43 planes in seven blocks take 89 bytes and one
round, where blocks of three take 23 and two. Slow networks have it so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...choreography import Located, Net, leaf
from ...ring.bitplanes import fast, planes, rows, words_for, xor_along
from .circuit import Circuit
from .deal import Made, deal_bits
from .layers import Layer, and_layers
from .mask import Masked
from .shares import Shares
from .trees import join


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
        """Bits that are dealt for an element."""
        return sum((1 << width) - 1 for width in self.widths)


def blocks_between(low: int, high: int, count: int) -> Blocks:
    """Planes low .. high - 1 in so many blocks of like size."""
    least, more = divmod(high - low, count)
    return Blocks(low, tuple(least + (i < more) for i in range(count) if least + (i < more)))


def deal_wide_codes(net: Net, x: Masked, spans: tuple[Blocks, ...], tops: tuple[int, ...] = ()) -> Shares:
    """Thermometer codes of r's blocks in these spans, and r's planes `tops`.

    Returns:
        words [bits, W], XOR-shared; as many bits an element are dealt. Nobody learns anything.
    """
    shape = sum(span.codes for span in spans) + len(tops), words_for(x.shape.numel())
    return deal_bits(net, Made(_masked_codes, shape, (x.r, spans, tops)))


@leaf(shapes=lambda r, spans, tops, v_A: torch.empty_like(v_A))
def _masked_codes(r: torch.Tensor, spans: tuple[Blocks, ...], tops: tuple[int, ...], v_A: torch.Tensor) -> torch.Tensor:
    """At D: the codes under v_A."""
    if loops := fast(r, v_A):
        out = torch.empty_like(v_A)
        arrays = loops.array(r).reshape(-1), v_A.numpy(), _numbers(spans), np.array(tops, np.int64), out.numpy()
        loops.on_words(v_A.shape[1], loops.wide_codes, *arrays)
        return out
    bits = planes(rows(r))
    codes = [thermometers(bits[p : p + width]) for p, width in _numbers(spans).tolist()]
    return torch.cat((*codes, *(bits[top : top + 1] for top in tops))) ^ v_A


def _numbers(spans: tuple[Blocks, ...]) -> np.ndarray:
    """The first plane and the width of every block: [blocks, 2]."""
    found = []
    for span in spans:
        plane = span.low
        for width in span.widths:
            found.append((plane, width))
            plane += width
    return np.array(found, np.int64).reshape(-1, 2)


def thermometers(block: torch.Tensor) -> torch.Tensor:
    """Planes [w, W], least significant first -> [2^w - 1, W]: u_j = [j < value of the block]."""
    code = block[:0]
    for plane in block:
        code = torch.cat((code | plane, plane.unsqueeze(0), code & plane))
    return code


def hot(block: torch.Tensor) -> torch.Tensor:
    """Planes [w, W] -> [2^w, W]: h_j = [value of the block = j]."""
    code = torch.full_like(block[:1], -1)
    for plane in block:
        code = torch.cat((code & ~plane, code & plane))
    return code


@leaf(shapes=lambda bits, codes, spans, *_: bits.new_empty(2 * sum(len(s.widths) for s in spans), bits.shape[1]))
def wide_leaves(bits: torch.Tensor, codes: torch.Tensor, spans: tuple[Blocks, ...], first: bool) -> torch.Tensor:
    """One party's half of lt and then eq of the blocks of every span; `first` is the party that adds [c = 0].

    Args:
        bits: c's bit planes, public [64, W]. codes: its half of the codes of these spans, of the same width.
    """
    out, at, row = bits.new_empty(2 * sum(len(s.widths) for s in spans), bits.shape[1]), 0, 0
    for span in spans:
        count = len(span.widths)
        _pick(bits, codes[at : at + span.codes], span, first, out[row : row + 2 * count])
        at, row = at + span.codes, row + 2 * count
    return out


def _pick(bits: torch.Tensor, codes: torch.Tensor, span: Blocks, first: bool, out: torch.Tensor) -> None:
    """lt and eq of one span, into `out`."""
    if loops := fast(bits, codes, out):
        arrays = bits.numpy(), codes.numpy(), _numbers((span,)), -int(first), out.numpy()
        loops.on_words(bits.shape[1], loops.wide_leaves, *arrays)
        return
    count, at = len(span.widths), 0
    for i, (plane, width) in enumerate(_numbers((span,)).tolist()):
        h, u = hot(bits[plane : plane + width]), codes[at : at + (1 << width) - 1]
        out[i] = xor_along(h[:-1] & u)
        out[count + i] = out[i] ^ xor_along(h[1:] & u)
        if first:
            out[count + i] ^= h[0]
        at += (1 << width) - 1


def wide_less(net: Net, x: Masked, bits: Located, span: Blocks) -> Shares:
    """[c < r] in the planes of a span, for x's mask r and the public planes of c: XOR-shared words [W]. Rounds 1."""
    codes = deal_wide_codes(net, x, (span,))
    at_A, at_S = wide_leaves(bits, codes.A, (span,), True), wide_leaves(bits, codes.S, (span,), False)
    return and_layers(net, Shares(at_A, at_S), _one_layer(len(span.widths)))[0]


@functools.cache
def _one_layer(blocks: int) -> tuple[Layer, ...]:
    """lt of all blocks, in one layer."""
    circuit = Circuit(2 * blocks)
    lt, _ = join(circuit, [(i, blocks + i) for i in range(blocks)])
    return circuit.layers((lt,))[0]


Polynomial = frozenset[frozenset[int]]
"""A xor of ANDs of rows, each once; the empty AND is 1."""


def polynomial(*ands: Sequence[int]) -> Polynomial:
    """The xor of these ANDs."""
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
