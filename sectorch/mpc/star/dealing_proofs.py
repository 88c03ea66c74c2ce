"""Proofs of dealing: with `verified=True` the dealer proves to A and S that it dealt what the protocol says.

`deal` notes a claim for each dealt value (`note_claim`); `dealing_constraints.py` says what is claimed of which value.
The claims of a call are proved together (`prove`) before anything that depends on them is revealed (`prove_pending`).
The proof shows nothing else: it is a distributed zero-knowledge proof on secret-shared inputs.

Sources: D. Boneh, E. Boyle, H. Corrigan-Gibbs, N. Gilboa, Y. Ishai, "Zero-knowledge proofs on secret-shared data via
fully linear PCPs", CRYPTO 2019; E. Boyle, N. Gilboa, Y. Ishai, A. Nof, CCS 2019. Here several variables are folded at a
time, which costs D little and saves rounds; see docs/verified.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...choreography import Located, Message, Net, Party, Phase, leaf, protocol
from ...choreography.located import compute, with_shapes
from ...choreography.net import Compute, Move
from ...choreography.program.trace import Node, Program
from ...choreography.streams import key_stream
from ...errors import FalseDealingError, UnsupportedOpError
from ...ring.bitplanes import Rows, RowSums, columns_of, words_for
from ...ring.field import (
    TILE,
    combined_words,
    fold_rows,
    inner_product,
    inner_product_of_tiles,
    points,
    points_of_bits,
    points_of_chosen,
    points_of_folded_bits,
    times,
    twice_folded_bits,
    weighted_rows_sum,
    weights_at,
)
from .shares import Shares, each

# Dealt values, and claims on words


ROWS = 6
"""Variables that the first step folds of bits: 64 words become one."""
WORD_ROWS = 3
"""Variables that the first step folds of words, in 8 rows of 8 parts."""


@dataclass(frozen=True)
class DealerShares:
    """A value in shares of which D knows both: one is at A and D, the other at S and D."""

    A: Located
    S: Located

    @property
    def at_dealer(self) -> Located:
        """An XOR-shared value as D knows it."""
        return self.A ^ self.S

    @property
    def shares(self) -> Shares:
        """The halves of A and S, without D's knowledge of them."""
        return Shares(self.A, self.S)

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    def __getitem__(self, index: Any) -> DealerShares:
        return DealerShares(self.A[index], self.S[index])

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """Apply an additive f to each half; a list where f returns a tuple."""
        found = [compute(f, half, *public, **named) for half in (self.A, self.S)]
        several = type(found[0]) is tuple
        return [DealerShares(*halves) for halves in zip(*found, strict=True)] if several else DealerShares(*found)


@dataclass(frozen=True)
class WordClaims:
    """Claims base + sum X Y = 0 in GF(2^64), one for each element of tensors [copies, ...].

    Attributes:
        base: words.
        copies: the size of the first dimension.
        terms_A, terms_S: pairs of words X of A (or of S) and bits Y of the other party, packed for each copy
            (`ring/bitplanes.py`). D knows both.
    """

    base: DealerShares
    copies: int
    terms_A: tuple[tuple[Located, Located], ...] = ()
    terms_S: tuple[tuple[Located, Located], ...] = ()

    @property
    def width(self) -> int:
        """Words of the packed bits."""
        return self.copies * words_for(self.base.shape.numel() // self.copies)


@dataclass(frozen=True)
class ClaimTerm:
    """A term X Y of so many copies; `place` are the columns of its claim among those of all claims."""

    X: Located
    Y: Located
    copies: int
    place: tuple[int, int]


@dataclass(frozen=True)
class ClaimTerms:
    """The terms of all claims: those with X at A and those with X at S."""

    of_A: list[ClaimTerm]
    of_S: list[ClaimTerm]

    @classmethod
    def of(cls, words: Sequence[WordClaims]) -> ClaimTerms:
        ends = itertools.accumulate(w.width for w in words)
        placed = [(w, (end - w.width, end)) for w, end in zip(words, ends, strict=True)]
        return cls(
            [ClaimTerm(*term, w.copies, place) for w, place in placed for term in w.terms_A],
            [ClaimTerm(*term, w.copies, place) for w, place in placed for term in w.terms_S],
        )

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The columns of the claims of all terms, of those with X at A and of those with X at S."""
        return tuple(term.place for term in self.of_A), tuple(term.place for term in self.of_S)

    def factors(self, nothing: DealerShares) -> tuple[DealerShares, DealerShares]:
        """The factors X, [64, C], and Y, packed [C], each as A and S hold them."""
        return (
            DealerShares(_words(self.of_A, nothing.A), _words(self.of_S, nothing.S)),
            DealerShares(_bits(self.of_S, nothing.A), _bits(self.of_A, nothing.S)),
        )


def _words(terms: Sequence[ClaimTerm], nothing: Located) -> Located:
    return compute(columns, tuple(term.copies for term in terms), nothing, *(term.X for term in terms))


def _bits(terms: Sequence[ClaimTerm], nothing: Located) -> Located:
    return compute(flat, nothing, *(term.Y for term in terms))


def concatenate_shares(f: Callable, nothing: DealerShares, found: Sequence[DealerShares], *public: Any) -> DealerShares:
    """Concatenate values by f; `nothing`, an empty value, stands first, so that there may be none."""
    sides = [nothing.A, *(v.A for v in found)], [nothing.S, *(v.S for v in found)]
    return DealerShares(*(compute(f, *public, *side) for side in sides))


@leaf
def flat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


@leaf
def columns(copies: tuple[int, ...], nothing: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """The elements of all parts in the order of packed bits: [64, W], with zeros at the end of each copy."""
    return columns_of(parts, copies, nothing)


# Claims on rows of packed bits: some rows are products of others, and some are zero
#
# Each row of a claim is a sum (xor) of rows of two tensors of packed bits, of which A and S have halves. So each party
# computes all rows of all claims in one step and writes them to their places.


@dataclass(frozen=True)
class RowSets:
    """The rows that are summed: for each claim x y = z those of x, y and z, and those of each sum that is zero."""

    x: Sequence[Rows]
    y: Sequence[Rows]
    z: Sequence[Rows]
    zeros: Sequence[Rows] = ()


class ClaimSums(Protocol):
    """The form of claims on two tensors [m, W] and [n, W]. Hashable, so that its plan is made once."""

    def sets(self, count: int, at_A: bool) -> RowSets:
        """The rows that A or S sums. `count` is m; the rows of the second tensor are numbered from m on."""
        ...


@dataclass(frozen=True)
class ProductClaims:
    """Claims on the rows of two dealt tensors, for each bit of them."""

    first: DealerShares
    second: DealerShares
    sums: ClaimSums

    @property
    def words(self) -> tuple[int, int]:
        """The numbers of words of the products, and of the sums that are zero."""
        (count, width), sums = self.first.shape, self.sums
        sets = _sets(sums, count, True)
        return len(sets.z) * width, len(sets.zeros) * width


@functools.lru_cache(maxsize=1024)
def _sets(sums: ClaimSums, count: int, at_A: bool) -> RowSets:
    return sums.sets(count, at_A)


@dataclass(frozen=True)
class CarrySums:
    """Claims on the bits [65, W] of a mask and its last carry, with the planes [64, W] of a half of the mask."""

    def sets(self, count: int, at_A: bool) -> RowSets:
        """c_{k+1} xor c_k = (r_A,k xor c_k) (r_S,k xor c_k), and c_0 = 0: halves of c are r xor one's own."""
        bits = [(k,) for k in range(64)]
        carries = [*((k, count + k) for k in range(64)), (64,)]
        x, y = (bits, carries[:64]) if at_A else (carries[:64], bits)
        return RowSets(x, y, [carries[k + 1] + carries[k] for k in range(64)], carries[:1])


@dataclass(frozen=True)
class CodeSums:
    """Claims on thermometer codes [7 blocks + tops, W] of blocks of three planes in these spans, and a mask's bits."""

    spans: tuple[tuple[int, int], ...]
    tops: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> RowSets:
        """A block's codes are sums of r_1 r_0, r_2 r_1, r_2 r_0, r_2 r_1 r_0 and of r_0, r_1, r_2."""
        # u_j is [j < v] for a block's value v, so that u_i xor u_j is [i < v <= j]. `middle` is v in {2, 3, 6, 7},
        # which is r_1; `both` is v in {3, 7}, r_1 r_0; `high` is v in {5, 7}, r_2 r_0; `low` is an odd v, r_0. u_3 is
        # r_2 and u_5 r_2 r_1.
        starts = [plane for low, high in self.spans for plane in range(low, high, 3)]
        blocks = (count - len(self.tops)) // 7
        u = [[(k * blocks + block,) for block in range(blocks)] for k in range(7)]
        r = [[(count + low + i,) if low + i >= 0 else () for low in starts] for i in range(3)]
        high, both, middle, zeros = _all(u[4], u[5], u[6]), _all(u[2], u[3], u[6]), _all(u[1], u[3], u[5]), []
        low = _all(middle, u[0], u[2], u[4], u[6])
        for found, plane in ((low, r[0]), (middle, r[1]), (u[3], r[2])):
            zeros += _all(found, plane)
        zeros += [(7 * blocks + i, count + top) for i, top in enumerate(self.tops)]
        return RowSets([*r[1], *r[2], *r[2], *r[2]], [*r[0], *r[1], *r[0], *both], [*both, *u[5], *high, *u[6]], zeros)


def _all(*sets: list[Rows]) -> list[Rows]:
    """For each block the sum of its rows in all sets."""
    return [sum(rows, ()) for rows in zip(*sets, strict=True)]


@dataclass(frozen=True)
class ProductSums:
    """Claims that each dealt row is the product of two rows, which are dealt ones or rows of the second tensor."""

    x: tuple[int, ...]
    y: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> RowSets:
        return RowSets([(row,) for row in self.x], [(row,) for row in self.y], [(row,) for row in range(count)])


def factors(nothing: DealerShares, found: Sequence[ProductClaims]) -> list[DealerShares]:
    """All claims as four values: x, y, z in tiles [T, 64, 8] of words, padded with zeros, and the sums that are zero.

    Each value is the concatenation of that of all claims, as A and S compute it from their halves.
    """
    sums = tuple(p.sums for p in found)
    at_A = compute(_factors, sums, True, nothing.A, *(v.A for p in found for v in (p.first, p.second)))
    at_S = compute(_factors, sums, False, nothing.S, *(v.S for p in found for v in (p.first, p.second)))
    return [DealerShares(*halves) for halves in zip(at_A, at_S, strict=True)]


def _shapes_of_factors(sums: tuple[ClaimSums, ...], at_A: bool, nothing: torch.Tensor, *values: torch.Tensor):
    size, zeros, _ = _placed(sums, tuple(v.shape for v in values), at_A)
    return *(nothing.new_empty(size).view(-1, *TILE) for _ in "xyz"), nothing.new_empty(zeros)


@leaf(shapes=_shapes_of_factors)
def _factors(sums: tuple[ClaimSums, ...], at_A: bool, nothing: torch.Tensor, *values: torch.Tensor):
    size, zeros, placed = _placed(sums, tuple(v.shape for v in values), at_A)
    out = nothing.new_empty(3 * size + zeros)
    rows = out[: 3 * size].view(3, size)
    rows[:, -math.prod(TILE) :] = 0  # the padding of the last tile
    for claim, first, second in zip(placed, values[::2], values[1::2], strict=True):
        claim.into(first, second, out)
    return *rows.view(3, -1, *TILE), out[3 * size :]


@functools.lru_cache(maxsize=256)
def _placed(sums: tuple[ClaimSums, ...], shapes: tuple[torch.Size, ...], at_A: bool) -> tuple[int, int, list[RowSums]]:
    """Words of each factor and of the zeros, and for each claim its sums with their places: x, y, z, then the zeros."""
    found = [(_sets(s, m, at_A), width) for s, (m, width) in zip(sums, shapes[::2], strict=True)]
    total = sum(len(sets.z) * width for sets, width in found)
    size = -(-total // math.prod(TILE)) * math.prod(TILE)
    at, zero, placed = 0, 3 * size, []
    for sets, width in found:
        count, lost = len(sets.z), len(sets.zeros)
        # Words of one claim and one factor are contiguous, row after row, since `RowSums` writes row by row.
        starts = [part + at + i * width for part in (0, size, 2 * size) for i in range(count)]
        starts += [zero + i * width for i in range(lost)]
        placed.append(RowSums([*sets.x, *sets.y, *sets.z, *sets.zeros], starts))
        at, zero = at + count * width, zero + lost * width
    return size, zero - 3 * size, placed


# The proof
#
# The claims are products x y = z of packed bits, and words b + sum X Y = 0 in GF(2^64) with bits Y. A and S hold each
# of these values in XOR shares, and D knows them. Random coins, which D learns after it has dealt, combine all claims
# to one: that the inner product <x, y> of two shared vectors is a shared number. It is folded as in the sumcheck
# protocol: vectors of length 2^v m are the values of two multilinear functions of v variables, whose values are
# vectors of length m. D sends
#
#     H(p) = <x(p), y(p)>    for p in {0, 1, infinity}^v    (at infinity: the leading coefficient)
#
# in shares, whose sum over {0, 1}^v has to be the claim. A and S draw a point r, and the new claim is that <x(r), y(r)>
# = H(r). Each party computes its shares of both sides, since x(r) is linear in x and H(r) in D's message. In the first
# step bits are 64 to a word, with v = 6, and words that bits choose have v = 3; later steps have v = 4. A and S do the
# first two steps in one pass, so that the words that bits become in the first step are never written to memory. At the
# end A sends S its half of the last factors, which a random entry of D, A and S makes uniform; S compares.


FOLDED = 4
"""Variables that every later step folds."""
POINTS_OF_BITS, POINTS_OF_WORDS = 3**ROWS, 3**WORD_ROWS


@protocol("prove", "Boneh et al., CRYPTO 2019; docs/verified.md", [
    Message("coin", "S", "D", "a draw of k_SA"),
    Message("proof_S", "D", "S", "proof_A of k_DA"),
    Message("last", "A", "S", "hidden of k_DA and k_DS"),
])  # fmt: skip
def prove(net: Net, products: Sequence[ProductClaims], words: Sequence[WordClaims]) -> None:
    """Prove that dealt values are as claimed. A false claim passes with a probability below 2^-56.

    Rounds 2 for each step, and 1. The steps are 2 + ceil(log16 n) for n = bits / 1024 + terms / 128 + 1, with full
    tiles of 2^15 bits. Bytes: 16 from S to D for each step; from D to S 8 (3^6 + 3^3 + 1) in the first step and 8 * 3^4
    in each other one, or fewer in the last; 32 from A to S. Nobody learns anything: D sends uniform words, two of A's
    last words are uniform, and the other two follow from what S has.

    Raises:
        FalseDealingError: at S, where a claim is false.
    """
    D, A, S = net.D, net.A, net.S
    hidden = DealerShares(net.common(D, A, (2,), "hidden"), net.common(D, S, (2,), "hidden"))
    secret = net.common(A, S, (2,), "secret_coin")
    nothing = DealerShares(hidden.A[:0], hidden.S[:0])
    x, y, z, zero = factors(nothing, products)
    base = concatenate_shares(columns, nothing, [w.base for w in words], tuple(w.copies for w in words))
    terms = ClaimTerms.of(words)
    X, Y = terms.factors(nothing)
    count = X.A.shape[1] + X.S.shape[1]

    # The order of messages is the proof's soundness: D learns a coin after S has received all that the coin tests.
    coins, coins_D = (
        compute(_first_coins, coin, x.shape[0] * x.shape[2], base.shape[1])
        for coin in _coin(net, *(v.S for v in (x, y, z, zero, base, X, Y)))
    )
    *_, inner, omega, lam = coins
    *_, inner_D, omega_D, lam_D = coins_D
    tests, *weights = compute(_tests, secret, coins, zero.shape[0])
    wrong = each(_wrong, z.shares, zero.shares, base.shares, omega, lam, *weights)
    of_A, of_S = ((compute(_scales, lam, places), compute(_scales, lam_D, places)) for places in terms.places)
    bits_D, chosen_D = (x.at_dealer, y.at_dealer), (X.A, Y.S, of_A[1], X.S, Y.A, of_S[1])
    sent = [_send(net, compute(_first_proof, *bits_D, *chosen_D, hidden.at_dealer, inner_D, omega_D))]
    point, point_D = (compute(_first_point, coin) for coin in _coin(net, sent[0].S))

    def terms_left(coin_A: Located, coin_S: Located, inner: Located, point: Located) -> tuple[Located, Located]:
        """The factors of words and the hidden ones after the first step, at A and at S; D computes both."""
        return (
            compute(_terms_folded, X.A, Y.A, hidden.A, coin_A, inner, point, count, (0, X.A.shape[1])),
            compute(_terms_folded, X.S, Y.S, hidden.S, coin_S, inner, point, count, (X.A.shape[1], 0)),
        )

    others_A, others_S = terms_left(of_A[0], of_S[0], inner, point)
    halves_D = terms_left(of_A[1], of_S[1], inner_D, point_D)
    others_D = halves_D[0] ^ halves_D[1]
    sent.append(_send(net, compute(_second_proof, *bits_D, others_D, omega_D, point_D)))
    second, second_D = (compute(_point, coin, FOLDED) for coin in _coin(net, sent[1].S))
    left = Shares(
        compute(_twice_folded, x.A, y.A, others_A, omega, point, second),
        compute(_twice_folded, x.S, y.S, others_S, omega, point, second),
    )
    left_D = compute(_twice_folded, *bits_D, others_D, omega_D, point_D, second_D)
    points = [point, second]
    while left.shape[1] > 1:
        variables = _variables(left.shape[1])
        sent.append(_send(net, compute(_proof, left_D, variables)))
        point, point_D = (compute(_point, coin, variables) for coin in _coin(net, sent[-1].S))
        left, left_D = each(_folded, left, point[0]), compute(_folded, left_D, point_D[0])
        points.append(point)
    wanted = compute(_wanted, tests, weights, [point[-1] for point in points])
    last = each(_last, left, wrong, *wanted, *sent)
    net.check(S, _compare_last, last.A.send(A, S, "last"), last.S)


def _coin(net: Net, *received: Located) -> tuple[Located, Located]:
    """Draw a coin that D learns after S has received these values: as A and S have it, and as D has it."""
    coin = net.common(net.A, net.S, (2,), "coin")
    return coin, compute(_after, coin, *received).send(net.S, net.D, "coin")


def _send(net: Net, proof: Located) -> Shares:
    """Send a part of the proof in shares of A and S."""
    proof_A = net.common(net.D, net.A, proof.shape, "proof_A")
    return Shares(proof_A, (proof ^ proof_A).send(net.D, net.S, "proof_S"))


@leaf
def _after(coin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return coin.clone()


@leaf
def _first_coins(coin: torch.Tensor, width: int, claims: int) -> tuple[torch.Tensor, ...]:
    """The random weights that combine all claims.

    Of the 64 rows of bits, of the 8 rows of words and of the 8 parts of a row; of the words of a row of bits, and of
    the columns of claims on words.
    """
    return key_stream(coin, 80 + width + claims).split((64, 8, 8, width, claims))


@leaf
def _scales(lam: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The weights of the columns of terms, from the weights of their claims at these places."""
    return torch.cat([lam[:0], *(lam[at:end] for at, end in places)])


@leaf
def _tests(secret: torch.Tensor, coins: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
    """The weights of all values that have to be zero; D never learns them.

    Of each step's test; of `count` words; of the 64 rows of bits; of the 8 rows of words, and of their 64 parts.
    """
    tests, kappa = key_stream(secret, 64 + count).split((64, count))
    alpha, outer, inner = coins[:3]
    outer = times(outer, tests[1:2])
    return tests, kappa, times(alpha, tests[:1]), outer, times(outer.view(8, 1), inner).view(-1)


@leaf
def _wrong(z, zero, base, omega, lam, kappa, rows, _, parts) -> torch.Tensor:
    """One party's half of the weighted sum that has to be zero together with the proof's messages: [1]."""
    sums = inner_product_of_tiles(z, rows, omega) ^ inner_product(zero, kappa)
    return sums ^ inner_product(inner_product(base, lam)[:, 0], parts)


@leaf(shapes=lambda x, *_: x.new_empty(POINTS_OF_BITS + POINTS_OF_WORDS + 1))
def _first_proof(x, y, X_A, Y_S, of_A, X_S, Y_A, of_S, hidden, inner, omega) -> torch.Tensor:
    """H of the bits, H of the words, and the product of the hidden factors."""
    chosen = (X_A, Y_S, of_A), (X_S, Y_A, of_S)
    words, others = (points_of_chosen(X.view(8, 8, -1), Y, inner, scales) for X, Y, scales in chosen)
    return torch.cat((points_of_bits(x, y, omega), words ^ others, times(hidden[:1], hidden[1:])))


@leaf(shapes=lambda coin: tuple(coin.new_empty(n) for n in (64, 8, 1, POINTS_OF_BITS + POINTS_OF_WORDS + 1)))
def _first_point(coin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weights at the random point: of the rows of bits, of words, of the hidden factors, and of D's message."""
    point, word_point, scale = key_stream(coin, ROWS + WORD_ROWS + 1).split((ROWS, WORD_ROWS, 1))
    sent = weights_at(point, infinity=True), weights_at(word_point, infinity=True), scale
    return weights_at(point), weights_at(word_point), scale.clone(), torch.cat(sent)


def _beside(count: int) -> int:
    """Columns of [16, n] for so many columns of terms and the hidden factors."""
    return -(-count // 2) + 1


@leaf(shapes=lambda X, *others: X.new_empty(2, 1 << FOLDED, _beside(others[-2])))
def _terms_folded(X, Y, hidden, scales, inner, point, count: int, at: tuple[int, int]) -> torch.Tensor:
    """One party's factors [2, 16, n] of the terms and the hidden ones after the first step, padded with zeros.

    Args:
        count: columns of all terms.
        at: the first column of the terms of which this party has X, and of those of which it has Y.
    """
    _, word_weights, scale, _ = point
    out = X.new_zeros(2, 1 << FOLDED, _beside(count))
    X = times(weighted_rows_sum(X.view(8, -1), word_weights).view(8, -1), times(inner.view(8, 1), scales))
    for row, found in enumerate((X, combined_words(Y, word_weights))):
        padded = out.new_zeros(8, 2 * out.shape[2] - 2)
        padded[:, at[row] : at[row] + found.shape[1]] = found
        out[row, :, :-1] = padded.view(1 << FOLDED, -1)
    out[:, 0, -1] = torch.cat((times(hidden[:1], scale), hidden[1:]))
    return out


@leaf(shapes=lambda x, *_: x.new_empty(3**FOLDED))
def _second_proof(x, y, others, omega, point) -> torch.Tensor:
    """H of the bits after the first step, and of the other factors."""
    return points_of_folded_bits(x, y, point[0], omega) ^ points(others[0], others[1], FOLDED)


@leaf(shapes=lambda x, y, others, *_: x.new_empty(2, _padded_size(x.numel() // 16 + others.shape[2])))
def _twice_folded(x, y, others, omega, point, second) -> torch.Tensor:
    """The factors [2, n] after two steps, padded with zeros."""
    weights, bits = second[0], x.numel() // 16
    out = x.new_zeros(2, _padded_size(bits + others.shape[2]))
    out[0, :bits] = twice_folded_bits(x, point[0], weights, omega)
    out[1, :bits] = twice_folded_bits(y, point[0], weights)
    out[:, bits : bits + others.shape[2]] = fold_rows(others, weights, others.shape[2])
    return out


@leaf(shapes=lambda left, variables: left.new_empty(3**variables))
def _proof(left, variables: int) -> torch.Tensor:
    """H of the folded factors."""
    x, y = left.view(2, 1 << variables, -1)
    return points(x, y, variables)


@leaf(shapes=lambda coin, variables: (coin.new_empty(1 << variables), coin.new_empty(3**variables)))
def _point(coin: torch.Tensor, variables: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights at the random point: of the rows, and of D's message."""
    point = key_stream(coin, variables)
    return weights_at(point), weights_at(point, infinity=True)


@leaf(shapes=lambda left, weights: left.new_empty(2, _padded_size(left.shape[1] // weights.shape[0])))
def _folded(left: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts = left.view(2, weights.shape[0], -1)
    return fold_rows(parts, weights, _padded_size(parts.shape[2]))


@leaf
def _wanted(tests, weights: Sequence[torch.Tensor], points: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The weights of all messages of the proof in the sum that has to be zero, and of the last one in the last claim.

    The sum tests for each step that its values at {0, 1}^v add up to the claim that the step before has left.
    """
    _, rows, outer, _ = weights
    corners = [torch.cat((_at_corners(rows, ROWS), _at_corners(outer, WORD_ROWS), tests.new_zeros(1)))]
    # The claim of a step is the message before at its point: that message counts with the weights of the point as well.
    for number, point in enumerate(points[1:], 2):
        variables = round(math.log(point.shape[0], 3))
        corners[-1] ^= times(points[number - 2], tests[number : number + 1])
        corners.append(_at_corners(tests[number : number + 1].expand(1 << variables), variables))
    return torch.cat(corners), points[-1].clone()


def _at_corners(values: torch.Tensor, variables: int) -> torch.Tensor:
    """Place values at {0, 1}^variables, [2^v], among {0, 1, infinity}^variables, with zeros elsewhere: [3^v]."""
    out = values.new_zeros([3] * variables)
    out[(slice(2),) * variables] = values.view([2] * variables)
    return out.view(-1)


@leaf(shapes=lambda left, *_: left.new_empty(4))
def _last(left, wrong, total, claim, *sent: torch.Tensor) -> torch.Tensor:
    """One party's half of the two last factors, of the last claim and of the sum that has to be zero: [4]."""
    claim = inner_product(sent[-1], claim)
    return torch.cat((left[:, 0], claim, wrong ^ inner_product(torch.cat(sent), total)))


@with_shapes(lambda half_A, half_S: half_A[:1])
def _compare_last(half_A: torch.Tensor, half_S: torch.Tensor) -> torch.Tensor:
    """At S: raise FalseDealingError unless the last factors' product is the claim, and the sum is zero."""
    x, y, claim, wrong = (half_A ^ half_S).split(1)
    if not torch.equal(times(x, y), claim) or bool(wrong != 0):
        raise FalseDealingError("the dealer has dealt something else than the protocol says: its proof fails")
    return half_S[:1]


def _variables(count: int) -> int:
    """How many variables a step folds of so many columns."""
    return min(FOLDED, (count - 1).bit_length())


def _padded_size(count: int) -> int:
    """So many columns with the padding that the next step needs."""
    variables = _variables(count)
    return -(-count >> variables) << variables


# Claims that are not proved yet


CLAIM_PROTOCOLS = ("deal", "deal_bits")
"""Protocols whose messages are claimed when they are dealt, and proved later."""
PROVED_PROTOCOLS = (*CLAIM_PROTOCOLS, "prove", "deal_product", "check_places", "check_channels")
"""Protocols in which a dealer may send with `verified=True`. `deal_product` is checked at once."""

MOST = 1 << 22
"""Most words of claims before they are proved: a proof of so many uses some 500 MiB, of all parties."""

Claim = Callable[[DealerShares], None]
"""A function that notes what has to hold of a dealt value."""


@dataclass
class DealingProofs:
    """The proofs of dealing of a call.

    Attributes:
        required: whether the dealer proves what it deals before it is used.
        products, words: the claims that are not proved yet.
        masks: the dealt bits of masks and the planes of the masks' halves, by A's half; see
            `dealing_constraints.bits_of`.
    """

    required: bool = False
    products: list[ProductClaims] = field(default_factory=list)
    words: list[WordClaims] = field(default_factory=list)
    masks: dict[Located, tuple[DealerShares, DealerShares]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of words of all claims."""
        return sum(sum(p.words) for p in self.products) + sum(w.base.shape.numel() for w in self.words)


def note_claim(net: Net, claim: Claim | None, dealt: DealerShares) -> None:
    """Note the claim of a dealt value where dealing is proved, and prove the pending claims if they are many.

    Raises:
        UnsupportedOpError: dealing is proved, and there is no claim.
    """
    proofs = net.state(DealingProofs)
    if claim is None:
        refuse_unproved(net)
    elif proofs.required and dealt.shape.numel():
        claim(dealt)
        if proofs.size > MOST:
            prove_pending(net)


def refuse_unproved(net: Net) -> None:
    """Raise UnsupportedOpError where dealing is proved. Called by protocols whose dealing has no proof."""
    if net.state(DealingProofs).required:
        raise UnsupportedOpError(
            "with verified=True every dealt value is proved, and there is no proof of what this operation deals; "
            "audited=n covers all operations"
        )


def prove_pending(net: Net) -> None:
    """Prove the pending claims of this call. Every protocol that reveals something calls this first."""
    proofs = net.state(DealingProofs)
    if proofs.size:
        products, words, proofs.products, proofs.words = proofs.products, proofs.words, [], []
        prove(net, products, words)


def check_proved(program: Program, dealer: Party) -> None:
    """Check a program that was traced with verified=True, including protocols that users have written.

    Raises:
        UnsupportedOpError: the dealer sends something outside of `PROVED_PROTOCOLS`, or a message to another party than
            A and S depends on a value that was dealt after the last proof.
    """
    latest: dict[Any, int] = {}  # for each value the last step of dealing that it depends on
    proof = -1
    # A false value is found at the next proof, so a party beside A and S may get nothing that was dealt after the last
    # one.
    for i, node in enumerate(program.call):
        depends = max((latest.get(slot, -1) for slot in node.operand_slots), default=-1)
        header = node.step.header if isinstance(node.step, Move) else None
        if _is_proof(node):
            proof = i
        elif header is not None and header.src == dealer and header.phase != Phase.ONLINE:
            if header.protocol not in PROVED_PROTOCOLS:
                raise UnsupportedOpError(f"'{header.path}' deals '{header.label}', which is not proved; use audited=n")
            depends = i if header.protocol in CLAIM_PROTOCOLS and header.bytes else depends
        elif (
            header is not None and header.dst.role not in ("A", "S") and header.protocol != "prove" and depends > proof
        ):
            raise UnsupportedOpError(f"'{header.path}' sends '{header.label}' to {header.dst} before all is proved")
        latest.update(dict.fromkeys(node.slots, depends))


def _is_proof(node: Node) -> bool:
    return isinstance(node.step, Compute) and not node.step.pure and node.step.path.split("/")[-1] == "prove"
