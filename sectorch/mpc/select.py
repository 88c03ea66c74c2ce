"""From XOR-shared bits to ring values: bit to ring, and the product of a shared bit with a masked value.

Q knows a random bit b = b_A xor b_S (both halves from streams). A and S open e = s xor b, which is uniform to them, so
that s = e xor b is b or 1 - b by a public e. The product of s with a value x = c - r, where c is public to A and S and
r known to Q, is then b x or x - b x: only b and b r have to be dealt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bitplanes import spread, unrows, words_for
from ..choreography import Located, Message, Net, protocol
from .deal import deal
from .mask import Masked
from .shares import Shares, whole


@dataclass(frozen=True)
class BitMask:
    """A random bit per element: `b` at Q as a mask per element, its XOR halves as words at A and at S."""

    b: Located
    b_A: Located
    b_S: Located
    shape: torch.Size
    copies: int | None


def per_element(first: torch.Tensor, second: torch.Tensor, shape: torch.Size, copies: int | None) -> torch.Tensor:
    """Two halves of words -> a mask per element: `shape`, or [copies, *shape]."""
    if copies is None:
        return unrows(spread(first ^ second), shape)
    matrices = spread((first ^ second).view(copies, -1))
    return matrices.flatten(1)[:, : shape.numel()].view(copies, *shape)


def random_bits(net: Net, shape: torch.Size, copies: int | None = None) -> BitMask:
    """b = b_A xor b_S from streams, for elements of this shape (once, or `copies` times). No message."""
    words = (words_for(shape.numel()) * (copies or 1),)
    b_A = net.common(net.Q, net.A, words, "b_A")
    b_S = net.common(net.Q, net.S, words, "b_S")
    b = net.locally(net.Q, per_element, b_A, b_S, shape, copies)
    return BitMask(b, b_A, b_S, shape, copies)


@protocol("open_bit", "docs/protocols.md", [
    Message("e_A", "A", "S", "b_A of k_QA"), Message("e_S", "S", "A", "b_S of k_SQ"),
])  # fmt: skip
def open_bit(net: Net, s: Shares, mask: BitMask) -> Located:
    """e = s xor b, known to A and S, as a mask per element. Rounds 1, two bits per element; e is uniform to both."""
    A, S = net.A, net.S
    e_A = net.send(net.locally(A, torch.bitwise_xor, s.A, mask.b_A), A, S, "e_A")
    e_S = net.send(net.locally(S, torch.bitwise_xor, s.S, mask.b_S), S, A, "e_S")
    return net.locally((A, S), per_element, e_A, e_S, mask.shape, mask.copies)


def opened_bit(e: torch.Tensor, b: torch.Tensor, first: bool) -> torch.Tensor:
    """One party's half of s = e xor b, from the public mask e and its half of b; `first` is the party that adds e."""
    s = (b ^ e).sub_(e)
    return s.sub_(e) if first else s


def _bits(net: Net, s: Shares, shape: torch.Size, copies: int | None = None) -> Shares:
    """The ideal functionality of `bit_to_ring`."""
    return whole(net, lambda v: v.view(shape if copies is None else (copies, *shape)), s.A)


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
    b = deal(net, net.locally(net.Q, torch.neg, mask.b))
    e = open_bit(net, s, mask)
    return Shares(
        net.locally(net.A, lambda e, b: opened_bit(e, b, True), e, b.A),
        net.locally(net.S, lambda e, b: opened_bit(e, b, False), e, b.S),
    )


def _selected(net: Net, s: Shares, x: Masked) -> Shares:
    """The ideal functionality of `select`."""
    return whole(net, lambda s, v: s.view(v.shape) * v, s.A, x.c)


@protocol("select", "docs/protocols.md", ideal=_selected)
def select(net: Net, s: Shares, x: Masked) -> Shares:
    """s * x for XOR-shared bits s and a masked x. Exact.

    Args:
        s: words [W] for the elements of x.

    Rounds 1, online two bits per element. Dealt: 16 bytes per element.
    """
    Q, A, S = net.Q, net.A, net.S
    mask = random_bits(net, x.shape)
    b = deal(net, net.locally(Q, torch.neg, mask.b))
    chosen = deal(net, net.locally(Q, torch.bitwise_and, x.r, mask.b))

    def ahead(one, b, r, chosen):
        """Both answers for e = 0, and what e = 1 changes in them."""
        return b, (one - b).bitwise_xor_(b), chosen, (r - chosen).bitwise_xor_(chosen)

    def online(e, c, s0, s1, v0, v1):
        out = s1.bitwise_and(e).bitwise_xor_(s0).mul_(c)
        return out.sub_(v1.bitwise_and(e).bitwise_xor_(v0))

    at_A = net.locally(A, lambda *v: ahead(1, *v), b.A, x.r_A, chosen.A)
    at_S = net.locally(S, lambda *v: ahead(0, *v), b.S, x.r_S, chosen.S)
    e = open_bit(net, s, mask)
    return Shares(net.locally(A, online, e, x.c, *at_A), net.locally(S, online, e, x.c, *at_S))
