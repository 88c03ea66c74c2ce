"""From XOR-shared bits to ring values: bit to ring, and the product of a shared bit with a masked value.

The dealer knows a random bit b = b_A xor b_S (both halves from streams). A and S open e = s xor b, which is uniform to
them, so that s = e xor b is b or 1 - b by a public e. The product of s with a value x = c - r, where c is public to A
and S and r known to D, is then b x or x - b x: only b and b r have to be dealt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...ring import logical_shift
from ...ring.bitplanes import fast, masks_of, words_for
from . import dealing_constraints
from .dealing_proofs import DealerShares
from .masking import ComputedCorrection, Masked, deal
from .shares import Shares


@dataclass(frozen=True)
class BitMask:
    """A random bit per element: its XOR halves as words at A and at S, both of which D knows.

    Of words drawn together the copies from `at` on.
    """

    b_A: Located
    b_S: Located
    shape: torch.Size
    copies: int | None
    at: int = 0

    def halves(self) -> DealerShares:
        """Its words, of which D knows both halves."""
        width, count = words_for(self.shape.numel()), self.copies or 1
        if count * width == self.b_A.shape.numel():
            return DealerShares(self.b_A, self.b_S)
        own = slice(self.at * width, (self.at + count) * width)
        return DealerShares(self.b_A[own], self.b_S[own])

    def part(self, first: int, last: int) -> BitMask:
        """The copies first .. last - 1."""
        return BitMask(self.b_A, self.b_S, self.shape, last - first, self.at + first)

    @property
    def words(self) -> tuple:
        """What a kernel takes of it."""
        return self.b_A, self.b_S, self.shape, self.copies, self.at


@leaf
def per_element(
    first: torch.Tensor, second: torch.Tensor, shape: torch.Size, copies: int | None, at: int = 0
) -> torch.Tensor:
    """Two halves of words -> a mask per element: `shape`, or [copies, *shape], of the copies from `at` on."""
    width, count = words_for(shape.numel()), copies or 1
    first, second = (v[at * width : (at + count) * width] for v in (first, second))
    return masks_of(first ^ second, shape, copies)


def random_bits(net: Net, shape: torch.Size, copies: int | None = None) -> BitMask:
    """b = b_A xor b_S from streams, for elements of this shape (once, or `copies` times). No message."""
    words = (words_for(shape.numel()) * (copies or 1),)
    b_A = net.common(net.D, net.A, words, "b_A")
    b_S = net.common(net.D, net.S, words, "b_S")
    return BitMask(b_A, b_S, shape, copies)


def deal_mask(net: Net, mask: BitMask, dtype: torch.dtype = torch.int64) -> Shares:
    """The bits of a mask as 0 and 1 in the ring; 8 bytes for each, or 4."""
    shape = mask.shape if mask.copies is None else (mask.copies, *mask.shape)
    made = ComputedCorrection(bits_less, torch.Size(shape), mask.words)
    return deal(net, made, dtype, dealing_constraints.bits_as_numbers(net, mask.halves, mask.copies))


def choose_by_bits(mask: BitMask, v: Located, shift: int = 0) -> ComputedCorrection:
    """What D deals of its own v: v >> shift (logical) where a bit is set, and 0 elsewhere."""
    shape = mask.shape if mask.copies is None else (mask.copies, *mask.shape)
    return ComputedCorrection(_chosen_less, torch.Size(shape), (*mask.words, v, shift))


def by_words(words: torch.Tensor, shape: torch.Size, copies: int | None, at: int = 0) -> np.ndarray:
    """Packed bits as an array [copies, W], from copy `at` on: numpy's views take a quarter of the time of torch's."""
    width, count = words_for(shape.numel()), copies or 1
    return words.numpy()[at * width : (at + count) * width].reshape(count, width)


@leaf(shapes=lambda first, second, shape, copies, at, v_A: torch.empty_like(v_A))
def bits_less(first, second, shape: torch.Size, copies: int | None, at: int, v_A: torch.Tensor) -> torch.Tensor:
    """The bits of two halves of words as 0 and 1, less v_A."""
    if not (loops := fast(first, second, v_A)):
        return (-per_element(first, second, shape, copies, at)).to(v_A.dtype) - v_A
    out = torch.empty((copies or 1, shape.numel()), dtype=v_A.dtype)
    words = [by_words(v, shape, copies, at) for v in (first, second)]
    loops.run_on_words(words[0].shape[1], loops.bits_less, *words, v_A.numpy().reshape(out.shape), out.numpy())
    return out.view(v_A.shape)


@leaf(shapes=lambda first, second, shape, copies, at, v, shift, v_A: torch.empty_like(v_A))
def _chosen_less(
    first, second, shape: torch.Size, copies: int | None, at: int, v: torch.Tensor, shift: int, v_A: torch.Tensor
) -> torch.Tensor:
    """v >> shift where the bits of two halves of words are set and 0 elsewhere, less v_A."""
    if not (loops := fast(first, second, v, v_A)):
        return ((logical_shift(v, shift) if shift else v) & per_element(first, second, shape, copies, at)) - v_A
    out = torch.empty((copies or 1, shape.numel()), dtype=torch.int64)
    words = [by_words(x, shape, copies, at) for x in (first, second)]
    arrays = loops.array(v).reshape(-1), shift, v_A.numpy().reshape(out.shape), out.numpy()
    loops.run_on_words(words[0].shape[1], loops.chosen_less, *words, *arrays)
    return out.view(v_A.shape)


def open_bit(net: Net, s: Shares, mask: BitMask) -> tuple[Located, Located]:
    """`open_masked_bit` of s xor b."""
    b = mask.halves()
    return open_masked_bit(net, Shares(s.A ^ b.A, s.S ^ b.S))


@protocol("open_bit", "docs/protocols.md", [
    Message("e_A", "A", "S", "b_A of k_DA"), Message("e_S", "S", "A", "b_S of k_DS"),
])  # fmt: skip
def open_masked_bit(net: Net, e: Shares) -> tuple[Located, Located]:
    """e = s xor b becomes known to A and S, in two halves of words. Rounds 1, two bits per element.

    Args:
        e: halves that b_A and b_S are in already, which nothing else has been sent under. e is uniform to both.
    """
    return e.A.send(net.A, net.S, "e_A"), e.S.send(net.S, net.A, "e_S")


@leaf(shapes=lambda first, second, shape, copies, b, one: torch.empty_like(b))
def _opened_bit(first, second, shape: torch.Size, copies: int | None, b: torch.Tensor, one: int) -> torch.Tensor:
    """One party's half of s = e xor b, from the public halves of e and its half of b; A is the `one` that adds e."""
    if not (loops := fast(first, second, b)):
        e = per_element(first, second, shape, copies)
        s = (b ^ e).sub_(e)
        return s.sub_(e) if one else s
    out = torch.empty((copies or 1, shape.numel()), dtype=torch.int64)
    words = [by_words(v, shape, copies) for v in (first, second)]
    loops.run_on_words(words[0].shape[1], loops.ring_bits, *words, b.numpy().reshape(out.shape), one, out.numpy())
    return out.view(b.shape)


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
    b = deal_mask(net, mask)
    e = open_bit(net, s, mask)
    return Shares(_opened_bit(*e, shape, copies, b.A, 1), _opened_bit(*e, shape, copies, b.S, 0))


@protocol("select", "docs/protocols.md")
def select(net: Net, s: Shares, x: Masked) -> Shares:
    """s * x for XOR-shared bits s and a masked x. Exact.

    Args:
        s: words [W] for the elements of x.

    Rounds 1, online two bits per element. Dealt: 16 bytes per element.
    """
    mask = random_bits(net, x.shape)
    b = deal_mask(net, mask)
    chosen = deal(
        net,
        choose_by_bits(mask, x.r),
        claim=dealing_constraints.choice_constraint(net, mask.halves, DealerShares(x.r_A, x.r_S), None),
    )
    e = open_bit(net, s, mask)
    return Shares(_product(*e, x.c, b.A, x.r_A, chosen.A, 1), _product(*e, x.c, b.S, x.r_S, chosen.S, 0))


def mask_select(e: torch.Tensor, unset: torch.Tensor, whole: torch.Tensor | int) -> torch.Tensor:
    """`unset` where the mask e is zero, and whole - unset where it is all ones."""
    return (whole - unset).bitwise_xor_(unset).bitwise_and_(e).bitwise_xor_(unset)


@leaf(shapes=lambda first, second, c, *_: torch.empty_like(c))
def _product(first, second, c, b, r, chosen, one: int) -> torch.Tensor:
    """One party's half of s c - s r, where s = e xor b; A is the `one` that adds e."""
    if not (loops := fast(first, second, c, b, r, chosen)):
        e = per_element(first, second, c.shape, None)
        return mask_select(e, b, one).mul_(c).sub_(mask_select(e, chosen, r))
    out = torch.empty(c.shape, dtype=torch.int64)
    arrays = [loops.array(v).reshape(-1) for v in (first, second, c, b, r, chosen)]
    loops.run_on_words(len(arrays[0]), loops.select_elements, *arrays, one, out.view(-1).numpy())
    return out
