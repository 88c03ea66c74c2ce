"""From XOR-shared bits to ring values: bit to ring, and the product of a shared bit with a masked value.

Q knows a random bit b = b_A xor b_S (both halves from streams). A and S open e = s xor b, which is uniform to them, so
that s = e xor b is b or 1 - b by a public e. The product of s with a value v = C - R + [wrap], where C is public to A
and S and R known to Q (see `mpc/truncate.py`), is then b v or v - b v: only b, b R and b [wrap] have to be dealt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bitplanes import spread, unrows, words_for
from ..choreography import Located, Message, Net, protocol
from .deal import deal
from .mask import Masked
from .shares import Shares
from .truncate import deal_quotient, public_quotient, wrap_term


@dataclass(frozen=True)
class BitMask:
    """A random bit per element: `b` at Q as a mask per element, its XOR halves as words at A and at S."""

    b: Located
    b_A: Located
    b_S: Located
    shape: torch.Size
    copies: int | None


def per_element(first: torch.Tensor, second: torch.Tensor, shape: torch.Size, copies: int | None) -> torch.Tensor:
    """Two halves of words -> a mask per element."""
    return unrows(spread(first ^ second), shape, copies)


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


@protocol("bit_to_ring", "docs/protocols.md")
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
        net.locally(net.A, lambda e, b: ((b ^ e) - e).sub_(e), e, b.A),
        net.locally(net.S, lambda e, b: (b ^ e) - e, e, b.S),
    )


@protocol("select", "docs/protocols.md")
def select(net: Net, s: Shares, x: Masked, shift: int = 0) -> Shares:
    """s * (x >> shift) for XOR-shared bits s and a masked x; the shift rounds as in `truncate`.

    Args:
        s: words [W] for the elements of x.
        shift: 0, or 1..32 with |x| < 2^62.

    Rounds 1, online two bits per element. Dealt: 16 bytes per element, with a shift 24 and 8 for the wrap-around.
    """
    Q, A, S = net.Q, net.A, net.S
    mask = random_bits(net, x.shape)
    b = deal(net, net.locally(Q, torch.neg, mask.b))
    quotient = deal_quotient(net, x, shift)
    chosen = deal(net, net.locally(Q, torch.bitwise_and, quotient.value, mask.b))
    wrapped = None
    if shift:
        wrapped = deal(net, net.locally(Q, lambda m, b: m & b.to(torch.int32), quotient.wrap, mask.b), torch.int32)

    def ahead(one, b, whole, chosen, wrap=None, wrapped=None):
        """Both answers for e = 0, and what e = 1 changes in them."""
        pairs = [b, (one - b).bitwise_xor_(b), chosen, (whole - chosen).bitwise_xor_(chosen)]
        if shift:
            low = wrap_term(wrapped, shift)
            pairs += [low, wrap_term(wrap - wrapped, shift).bitwise_xor_(low)]
        return tuple(pairs)

    def online(e, public, s0, s1, v0, v1, w0=None, w1=None):
        out = s1.bitwise_and(e).bitwise_xor_(s0).mul_(public[0])
        v = v1.bitwise_and(e).bitwise_xor_(v0)
        out -= v
        if shift:
            out += torch.bitwise_and(w1, e, out=v).bitwise_xor_(w0).bitwise_and_(public[1])
        return out

    prepared = {}
    for party, one in ((A, 1), (S, 0)):
        halves = [b, quotient.shares, chosen] + ([quotient.wraps, wrapped] if shift else [])
        mine = [h.A if party == A else h.S for h in halves]
        prepared[party] = net.locally(party, lambda *v, one=one: ahead(one, *v), *mine)

    e = open_bit(net, s, mask)
    C, no_wrap = public_quotient(net, x, shift)
    return Shares(
        net.locally(A, lambda e, C, h, *v: online(e, (C, h), *v), e, C, no_wrap, *prepared[A]),
        net.locally(S, lambda e, C, h, *v: online(e, (C, h), *v), e, C, no_wrap, *prepared[S]),
    )
