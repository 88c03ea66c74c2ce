"""From XOR-shared bits to ring values: bit to ring, and the product of a shared bit with a masked value.

The dealer knows a random bit b = b_A xor b_S (both halves from streams). A and S open e = s xor b, which is uniform to
them, so that s = e xor b is b or 1 - b by a public e. The product of s with a value x = c - r, where c is public to A
and S and r known to D, is then b x or x - b x: only b and b r have to be dealt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bitplanes import spread, unrows, words_for
from ..choreography import Located, Message, Net, leaf, protocol
from .deal import deal
from .mask import Masked
from .shares import Shares, unshared


@dataclass(frozen=True)
class BitMask:
    """A random bit per element: `b` at D as a mask per element, its XOR halves as words at A and at S."""

    b: Located
    b_A: Located
    b_S: Located
    shape: torch.Size
    copies: int | None


@leaf
def per_element(first: torch.Tensor, second: torch.Tensor, shape: torch.Size, copies: int | None) -> torch.Tensor:
    """Two halves of words -> a mask per element: `shape`, or [copies, *shape]."""
    if copies is None:
        return unrows(spread(first ^ second), shape)
    matrices = spread((first ^ second).view(copies, -1))
    return matrices.flatten(1)[:, : shape.numel()].view(copies, *shape)


def random_bits(net: Net, shape: torch.Size, copies: int | None = None) -> BitMask:
    """b = b_A xor b_S from streams, for elements of this shape (once, or `copies` times). No message."""
    words = (words_for(shape.numel()) * (copies or 1),)
    b_A = net.common(net.D, net.A, words, "b_A")
    b_S = net.common(net.D, net.S, words, "b_S")
    return BitMask(per_element(b_A, b_S, shape, copies), b_A, b_S, shape, copies)


@protocol("open_bit", "docs/protocols.md", [
    Message("e_A", "A", "S", "b_A of k_DA"), Message("e_S", "S", "A", "b_S of k_DS"),
])  # fmt: skip
def open_bit(net: Net, s: Shares, mask: BitMask) -> Located:
    """e = s xor b, known to A and S, as a mask per element. Rounds 1, two bits per element; e is uniform to both."""
    A, S = net.A, net.S
    e_A = (s.A ^ mask.b_A).send(A, S, "e_A")
    e_S = (s.S ^ mask.b_S).send(S, A, "e_S")
    return per_element(e_A, e_S, mask.shape, mask.copies)


@leaf
def opened_bit(e: torch.Tensor, b: torch.Tensor, first: bool) -> torch.Tensor:
    """One party's half of s = e xor b, from the public mask e and its half of b; `first` is the party that adds e."""
    s = (b ^ e).sub_(e)
    return s.sub_(e) if first else s


def _bits(net: Net, s: Shares, shape: torch.Size, copies: int | None = None) -> Shares:
    """The ideal functionality of `bit_to_ring`."""
    return unshared(net, s.A.view(shape if copies is None else (copies, *shape)))


@protocol("bit_to_ring", "docs/protocols.md", ideal=_bits)
def bit_to_ring(net: Net, s: Shares, shape: torch.Size, copies: int | None = None) -> Shares:
    """XOR-shared bits as additive shares of 0 and 1.

    Args:
        s: words [W] for the elements of `shape`, or [copies * W].

    Returns:
        `shape`, or [copies, *shape].

    Rounds 1, online two bits per element; dealt 8 bytes.
    """
    mask = random_bits(net, shape, copies)
    b = deal(net, -mask.b)
    e = open_bit(net, s, mask)
    return Shares(opened_bit(e, b.A, first=True), opened_bit(e, b.S, first=False))


def _selected(net: Net, s: Shares, x: Masked) -> Shares:
    """The ideal functionality of `select`."""
    return unshared(net, s.A.view(x.shape) * x.c)


@protocol("select", "docs/protocols.md", ideal=_selected)
def select(net: Net, s: Shares, x: Masked) -> Shares:
    """s * x for XOR-shared bits s and a masked x. Exact.

    Args:
        s: words [W] for the elements of x.

    Rounds 1, online two bits per element. Dealt: 16 bytes per element.
    """
    mask = random_bits(net, x.shape)
    b = deal(net, -mask.b)
    chosen = deal(net, x.r & mask.b)
    ahead_A = _ahead(b.A, x.r_A, chosen.A, first=True)
    ahead_S = _ahead(b.S, x.r_S, chosen.S, first=False)
    e = open_bit(net, s, mask)
    return Shares(_online(e, x.c, *ahead_A), _online(e, x.c, *ahead_S))


@leaf
def _ahead(b, r, chosen, first: bool) -> tuple[torch.Tensor, ...]:
    """A half of s and of s r, each for e = 0 and as what e = 1 changes in it; `first` is the party that adds e."""
    return b, (int(first) - b).bitwise_xor_(b), chosen, (r - chosen).bitwise_xor_(chosen)


@leaf
def _online(e, c, s0, s1, v0, v1) -> torch.Tensor:
    """A half of s c - s r."""
    out = s1.bitwise_and(e).bitwise_xor_(s0).mul_(c)
    return out.sub_(v1.bitwise_and(e).bitwise_xor_(v0))
