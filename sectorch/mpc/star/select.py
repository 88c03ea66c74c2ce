"""From XOR-shared bits to ring values: a bit as a ring element, and the product of a bit with a masked value.

D knows a random bit b = b_A xor b_S, both halves of which are from streams. A and S open e = s xor b, which is uniform
to them. So s = e xor b is b or 1 - b, depending on the public e. The product of s with a value x = c - r, where c is
public to A and S and D knows r, is then b x or x - b x: D deals b and b r.
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
    """A random bit for each element, in several copies: XOR halves in words of packed bits, both known to D.

    Attributes:
        b_A, b_S: words at A and D, and at S and D. They may hold further copies.
        shape: of the elements. copies: how many of them this mask has; None for one without a dimension of copies.
        at: the first copy of this mask in the words.
    """

    b_A: Located
    b_S: Located
    shape: torch.Size
    copies: int | None
    at: int = 0

    def halves(self) -> DealerShares:
        """The words of this mask's copies."""
        width, count = words_for(self.shape.numel()), self.copies or 1
        if count * width == self.b_A.shape.numel():
            return DealerShares(self.b_A, self.b_S)
        own = slice(self.at * width, (self.at + count) * width)
        return DealerShares(self.b_A[own], self.b_S[own])

    def part(self, first: int, last: int) -> BitMask:
        """The mask of the copies first .. last - 1."""
        return BitMask(self.b_A, self.b_S, self.shape, last - first, self.at + first)

    @property
    def words(self) -> tuple:
        """The arguments by which kernels take a mask."""
        return self.b_A, self.b_S, self.shape, self.copies, self.at


@leaf
def per_element(
    first: torch.Tensor, second: torch.Tensor, shape: torch.Size, copies: int | None, at: int = 0
) -> torch.Tensor:
    """Unpack two halves of words to all ones or zero per element: `shape`, or [copies, *shape], from copy `at` on."""
    width, count = words_for(shape.numel()), copies or 1
    first, second = (v[at * width : (at + count) * width] for v in (first, second))
    return masks_of(first ^ second, shape, copies)


def random_bits(net: Net, shape: torch.Size, copies: int | None = None) -> BitMask:
    """Draw b = b_A xor b_S from streams, for elements of this shape (once, or `copies` times). No message."""
    words = (words_for(shape.numel()) * (copies or 1),)
    b_A = net.common(net.D, net.A, words, "b_A")
    b_S = net.common(net.D, net.S, words, "b_S")
    return BitMask(b_A, b_S, shape, copies)


def deal_mask(net: Net, mask: BitMask, dtype: torch.dtype = torch.int64) -> Shares:
    """Deal the bits of a mask as ring elements 0 and 1: 8 bytes for each, or 4 with int32."""
    shape = mask.shape if mask.copies is None else (mask.copies, *mask.shape)
    correction = ComputedCorrection(bits_less, torch.Size(shape), mask.words)
    return deal(net, correction, dtype, dealing_constraints.bits_as_numbers(net, mask.halves, mask.copies))


def choose_by_bits(mask: BitMask, v: Located, shift: int = 0) -> ComputedCorrection:
    """The value that D deals for a v of its own: v >> shift (logical) where the mask's bit is set, and 0 elsewhere."""
    shape = mask.shape if mask.copies is None else (mask.copies, *mask.shape)
    return ComputedCorrection(_chosen_less, torch.Size(shape), (*mask.words, v, shift))


def by_words(words: torch.Tensor, shape: torch.Size, copies: int | None, at: int = 0) -> np.ndarray:
    """Packed bits as an array [copies, W], from copy `at` on. Views of numpy take a quarter of the time of torch's."""
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
    """`open_masked_bit` of s xor b, for XOR-shared words s and a mask b."""
    b = mask.halves()
    return open_masked_bit(net, Shares(s.A ^ b.A, s.S ^ b.S))


@protocol("open_bit", "docs/protocols.md", [
    Message("e_A", "A", "S", "b_A of k_DA"), Message("e_S", "S", "A", "b_S of k_DS"),
])  # fmt: skip
def open_masked_bit(net: Net, e: Shares) -> tuple[Located, Located]:
    """Open bits e = s xor b to A and S, in two halves of words.

    Args:
        e: XOR shares that b_A and b_S are already part of. Nothing else may be sent under the same b.

    Rounds 1, online two bits per element. e is uniform to A and S; D receives nothing.
    """
    return e.A.send(net.A, net.S, "e_A"), e.S.send(net.S, net.A, "e_S")


@leaf(shapes=lambda first, second, shape, copies, b, one: torch.empty_like(b))
def _opened_bit(first, second, shape: torch.Size, copies: int | None, b: torch.Tensor, one: int) -> torch.Tensor:
    """One party's half of s = e xor b, from the public halves of e and its half of b; A has `one` = 1 and adds e."""
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
    """Convert XOR-shared bits to additive shares of 0 and 1. Exact.

    Args:
        s: words [W] for the elements of `shape`, or [copies * W].

    Returns:
        Shares of `shape`, or of [copies, *shape].

    Rounds 1; per element two bits online and 8 bytes dealt. Nobody learns anything.
    """
    mask = random_bits(net, shape, copies)
    b = deal_mask(net, mask)
    e = open_bit(net, s, mask)
    return Shares(_opened_bit(*e, shape, copies, b.A, 1), _opened_bit(*e, shape, copies, b.S, 0))


@protocol("select", "docs/protocols.md")
def select(net: Net, s: Shares, x: Masked) -> Shares:
    """Compute s * x for XOR-shared bits s and a masked x. Exact.

    Args:
        s: words [W] for the elements of x.

    Rounds 1; per element two bits online and 16 bytes dealt. Nobody learns anything.
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


@protocol("select_square", "docs/protocols.md")
def select_square(net: Net, s: Shares, x: Masked) -> Shares:
    """Compute s * x^2 for XOR-shared bits s and a masked x, as s c^2 - 2 c (s r) + s r^2. Exact mod 2^64.

    Args:
        s: words [W] for the elements of x.

    Rounds 1; per element two bits online and 32 bytes dealt. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for r^2.
    """
    mask = random_bits(net, x.shape)
    b, r_squared = deal_mask(net, mask), x.r * x.r
    square = deal(net, r_squared)
    chosen, chosen_square = (deal(net, choose_by_bits(mask, v)) for v in (x.r, r_squared))
    e = open_bit(net, s, mask)
    at_A = _square_product(*e, x.c, b.A, x.r_A, chosen.A, square.A, chosen_square.A, 1)
    return Shares(at_A, _square_product(*e, x.c, b.S, x.r_S, chosen.S, square.S, chosen_square.S, 0))


@leaf(shapes=lambda first, second, c, *_: torch.empty_like(c))
def _square_product(first, second, c, b, r, chosen, square, chosen_square, one: int) -> torch.Tensor:
    """One party's half of s c^2 - 2 c (s r) + s r^2, where s = e xor b; A has `one` = 1 and adds e."""
    e = per_element(first, second, c.shape, None)
    out = mask_select(e, b, one).mul_(c).sub_(mask_select(e, chosen, r).mul_(2)).mul_(c)
    return out.add_(mask_select(e, chosen_square, square))


@protocol("choose", "docs/protocols.md")
def choose(net: Net, s: Shares, x: Masked, copies: int) -> tuple[Shares, Shares]:
    """Convert several XOR-shared bits of each element to numbers, and multiply x by each of them. Exact.

    Args:
        s: words [copies * W] for the elements of x.

    Returns:
        s as 0 and 1, and s * x: [copies, *x.shape] each.

    Rounds 1; per element and copy two bits online and 16 bytes dealt. Nobody learns anything.
    """
    mask = random_bits(net, x.shape, copies)
    b = deal_mask(net, mask)
    claim = dealing_constraints.choice_constraint(net, mask.halves, DealerShares(x.r_A, x.r_S), copies)
    chosen = deal(net, choose_by_bits(mask, x.r), claim=claim)
    e = open_bit(net, s, mask)
    at_A, at_S = (_choices(*e, x.c, *held) for held in ((b.A, x.r_A, chosen.A, 1), (b.S, x.r_S, chosen.S, 0)))
    return Shares(at_A[0], at_S[0]), Shares(at_A[1], at_S[1])


@leaf(shapes=lambda first, second, c, b, *_: (b, b))
def _choices(first, second, c, b, r, chosen, one: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's halves of s and of s c - s r for every copy; A has `one` = 1 and adds e."""
    e = per_element(first, second, c.shape, b.shape[0])
    s = mask_select(e, b, one)
    return s, (s * c).sub_(mask_select(e, chosen, r))


def mask_select(e: torch.Tensor, unset: torch.Tensor, total: torch.Tensor | int) -> torch.Tensor:
    """`unset` where the mask e is zero, and total - unset where it is all ones."""
    return (total - unset).bitwise_xor_(unset).bitwise_and_(e).bitwise_xor_(unset)


@leaf(shapes=lambda first, second, c, *_: torch.empty_like(c))
def _product(first, second, c, b, r, chosen, one: int) -> torch.Tensor:
    """One party's half of s c - s r, where s = e xor b; A has `one` = 1 and adds e."""
    if not (loops := fast(first, second, c, b, r, chosen)):
        e = per_element(first, second, c.shape, None)
        return mask_select(e, b, one).mul_(c).sub_(mask_select(e, chosen, r))
    out = torch.empty(c.shape, dtype=torch.int64)
    arrays = [loops.array(v).reshape(-1) for v in (first, second, c, b, r, chosen)]
    loops.run_on_words(len(arrays[0]), loops.select_elements, *arrays, one, out.view(-1).numpy())
    return out
