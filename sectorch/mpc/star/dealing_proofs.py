"""What a call has dealt and still has to prove: noted where it is dealt, and proved before anything is shown."""

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

# Values of which A and S have halves and D both, and what can be claimed of them in a proof (`prove.py`).


ROWS = 6
"""Variables of the first step of bits: 64 words become one."""
WORD_ROWS = 3
"""Variables of the first step of words, in 8 rows of 8 parts."""


@dataclass(frozen=True)
class DealerShares:
    """A value in XOR shares, of which D knows both: one at A and D, the other at S and D."""

    A: Located
    S: Located

    @property
    def whole(self) -> Located:
        """At D."""
        return self.A ^ self.S

    @property
    def shares(self) -> Shares:
        """Without D."""
        return Shares(self.A, self.S)

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    def __getitem__(self, index: Any) -> DealerShares:
        return DealerShares(self.A[index], self.S[index])


@dataclass(frozen=True)
class Words:
    """Claims base + sum X Y = 0 in GF(2^64), for each element of tensors [copies, ...].

    Attributes:
        base: words. terms_A, terms_S: pairs of X, words of A or of S, and of bits Y of the other, packed for each copy
            (`ring/bitplanes.py`); D knows both.
    """

    base: DealerShares
    copies: int
    terms_A: tuple[tuple[Located, Located], ...] = ()
    terms_S: tuple[tuple[Located, Located], ...] = ()

    @property
    def width(self) -> int:
        """Words of packed bits."""
        return self.copies * words_for(self.base.shape.numel() // self.copies)


@dataclass(frozen=True)
class Term:
    """A term X Y: `place`, the columns of its claim; of so many copies."""

    X: Located
    Y: Located
    copies: int
    place: tuple[int, int]


@dataclass(frozen=True)
class ClaimTerms:
    """All terms: those with X at A, and then those with X at S."""

    of_A: list[Term]
    of_S: list[Term]

    @classmethod
    def of(cls, words: Sequence[Words]) -> ClaimTerms:
        ends = itertools.accumulate(w.width for w in words)
        placed = [(w, (end - w.width, end)) for w, end in zip(words, ends, strict=True)]
        return cls(
            [Term(*term, w.copies, place) for w, place in placed for term in w.terms_A],
            [Term(*term, w.copies, place) for w, place in placed for term in w.terms_S],
        )

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The columns of their claims, of those of A and those of S."""
        return tuple(term.place for term in self.of_A), tuple(term.place for term in self.of_S)

    def factors(self, nothing: DealerShares) -> tuple[DealerShares, DealerShares]:
        """What A and S have of X, [64, C], and of Y, packed [C]."""
        return (
            DealerShares(_words(self.of_A, nothing.A), _words(self.of_S, nothing.S)),
            DealerShares(_bits(self.of_S, nothing.A), _bits(self.of_A, nothing.S)),
        )


def _words(terms: Sequence[Term], nothing: Located) -> Located:
    return compute(columns, tuple(term.copies for term in terms), nothing, *(term.X for term in terms))


def _bits(terms: Sequence[Term], nothing: Located) -> Located:
    return compute(flat, nothing, *(term.Y for term in terms))


def concatenate_shares(f: Callable, nothing: DealerShares, found: Sequence[DealerShares], *public: Any) -> DealerShares:
    """All of them beside each other, by f, which is given nothing first."""
    sides = [nothing.A, *(v.A for v in found)], [nothing.S, *(v.S for v in found)]
    return DealerShares(*(compute(f, *public, *side) for side in sides))


@leaf
def flat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


@leaf
def columns(copies: tuple[int, ...], nothing: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """The elements of all parts as bits of packed words stand: [64, W], with zeros at the end of each copy."""
    return columns_of(parts, copies, nothing)


# Which rows of dealt bits are claimed to be products of which, and which to be zero (`proved.py`).
#
# Each row of a claim is a sum (xor) of rows of two tensors of packed bits, of which A and S have halves. So both work
# out all rows of all claims in one step, straight into their places.


@dataclass(frozen=True)
class Sets:
    """Rows that are summed: for each claim x y = z those of x, of y and of z, and those of each sum that is zero."""

    x: Sequence[Rows]
    y: Sequence[Rows]
    z: Sequence[Rows]
    zeros: Sequence[Rows] = ()


class ClaimSums(Protocol):
    """Claims on two tensors [m, W] and [n, W]; hashable, and the same in every call."""

    def sets(self, count: int, at_A: bool) -> Sets:
        """Which rows A or S sums; `count` is m, and rows of the second tensor go on after those of the first."""
        ...


@dataclass(frozen=True)
class Products:
    """Claims on rows of two dealt tensors, for each bit of them."""

    first: DealerShares
    second: DealerShares
    sums: ClaimSums

    @property
    def words(self) -> tuple[int, int]:
        """Of the products, and of what is zero."""
        (count, width), sums = self.first.shape, self.sums
        sets = _sets(sums, count, True)
        return len(sets.z) * width, len(sets.zeros) * width


@functools.lru_cache(maxsize=1024)
def _sets(sums: ClaimSums, count: int, at_A: bool) -> Sets:
    return sums.sets(count, at_A)


@dataclass(frozen=True)
class Carries:
    """Of the bits [65, W] of a mask and of its last carry, and the planes [64, W] of one's own half of the mask."""

    def sets(self, count: int, at_A: bool) -> Sets:
        """c_{k+1} xor c_k = (r_A,k xor c_k) (r_S,k xor c_k), and c_0 = 0: halves of c are r xor one's own."""
        bits = [(k,) for k in range(64)]
        carries = [*((k, count + k) for k in range(64)), (64,)]
        x, y = (bits, carries[:64]) if at_A else (carries[:64], bits)
        return Sets(x, y, [carries[k + 1] + carries[k] for k in range(64)], carries[:1])


@dataclass(frozen=True)
class Codes:
    """Of thermometer codes [7 blocks + tops, W] of the blocks of three planes in these spans, and the bits."""

    spans: tuple[tuple[int, int], ...]
    tops: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> Sets:
        """A block's codes are sums of r_1 r_0, r_2 r_1, r_2 r_0, r_2 r_1 r_0 and of r_0, r_1, r_2."""
        starts = [plane for low, high in self.spans for plane in range(low, high, 3)]
        blocks = (count - len(self.tops)) // 7
        u = [[(k * blocks + block,) for block in range(blocks)] for k in range(7)]
        r = [[(count + low + i,) if low + i >= 0 else () for low in starts] for i in range(3)]
        high, both, middle, zeros = _all(u[4], u[5], u[6]), _all(u[2], u[3], u[6]), _all(u[1], u[3], u[5]), []
        low = _all(middle, u[0], u[2], u[4], u[6])
        for found, plane in ((low, r[0]), (middle, r[1]), (u[3], r[2])):
            zeros += _all(found, plane)
        zeros += [(7 * blocks + i, count + top) for i, top in enumerate(self.tops)]
        return Sets([*r[1], *r[2], *r[2], *r[2]], [*r[0], *r[1], *r[0], *both], [*both, *u[5], *high, *u[6]], zeros)


def _all(*sets: list[Rows]) -> list[Rows]:
    """The sums of all sets of each block."""
    return [sum(rows, ()) for rows in zip(*sets, strict=True)]


@dataclass(frozen=True)
class DealtProducts:
    """Each dealt row is the product of two rows, of the dealt ones themselves or of the second tensor."""

    x: tuple[int, ...]
    y: tuple[int, ...]

    def sets(self, count: int, at_A: bool) -> Sets:
        return Sets([(row,) for row in self.x], [(row,) for row in self.y], [(row,) for row in range(count)])


def factors(nothing: DealerShares, found: Sequence[Products]) -> list[DealerShares]:
    """All claims after each other: x, y and z in tiles [T, 64, 8] of words, with zeros at the end, and what is zero, in
    one."""
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
    rows[:, -math.prod(TILE) :] = 0  # fewer words than a tile has are at the end
    for claim, first, second in zip(placed, values[::2], values[1::2], strict=True):
        claim.into(first, second, out)
    return *rows.view(3, -1, *TILE), out[3 * size :]


@functools.lru_cache(maxsize=256)
def _placed(sums: tuple[ClaimSums, ...], shapes: tuple[torch.Size, ...], at_A: bool) -> tuple[int, int, list[RowSums]]:
    """Words of each factor and of what is zero, and the sums with their places: x, y, z and then the zeros."""
    found = [(_sets(s, m, at_A), width) for s, (m, width) in zip(sums, shapes[::2], strict=True)]
    total = sum(len(sets.z) * width for sets, width in found)
    size = -(-total // math.prod(TILE)) * math.prod(TILE)
    at, zero, placed = 0, 3 * size, []
    for sets, width in found:
        count, lost = len(sets.z), len(sets.zeros)
        starts = [part + at + i * width for part in (0, size, 2 * size) for i in range(count)]
        starts += [zero + i * width for i in range(lost)]
        placed.append(RowSums([*sets.x, *sets.y, *sets.z, *sets.zeros], starts))
        at, zero = at + count * width, zero + lost * width
    return size, zero - 3 * size, placed


# The dealer proves to A and S that what it dealt is what it should be, and shows nothing of it: a distributed proof.
#
# What is claimed (`claims.py`) are products x y = z of packed bits, and words b + sum X Y = 0 in GF(2^64) with bits Y;
# A and S hold each of these values in XOR shares, and D, the dealer, knows all of them. With coins that D learns after
# it has dealt all claims become one, that an inner product <x, y> of two shared vectors is a shared number. It is
# folded as in the sumcheck protocol: vectors of length 2^v m are the values of two multilinear functions of v
# variables, which are vectors of length m. D sends
#
#     H(p) = <x(p), y(p)>    for p in {0, 1, infinity}^v    (at infinity stands the coefficient),
#
# in shares, and the sum over {0, 1}^v has to be the claim. A and S draw a point r, and the claim is now that
# <x(r), y(r)> = H(r), which each works out of its own shares, since x(r) is linear in x, and H(r) in what was sent. In
# the first step bits are 64 to a word, with v = 6, and words that bits choose have v = 3; then v = 4. A and S take the
# first two steps at once, so that nobody writes down the words that bits become in the first one. At the end A shows S
# its half of what is left. An entry that D and A and S draw at random makes that uniform, and S compares.
#
# Source: Boneh, Boyle, Corrigan-Gibbs, Gilboa and Ishai, CRYPTO 2019 (fully linear proofs, on shared inputs); Boyle,
# Gilboa, Ishai and Nof, CCS 2019. With several variables at a time, which costs D little and saves rounds; see
# docs/verified.md.


FOLDED = 4
"""Variables of the others."""
POINTS_OF_BITS, POINTS_OF_WORDS = 3**ROWS, 3**WORD_ROWS


@protocol("prove", "Boneh et al., CRYPTO 2019; docs/verified.md", [
    Message("coin", "S", "D", "a draw of k_SA"),
    Message("proof_S", "D", "S", "proof_A of k_DA"),
    Message("last", "A", "S", "hidden of k_DA and k_DS"),
])  # fmt: skip
def prove(net: Net, products: Sequence[Products], words: Sequence[Words]) -> None:
    """What was dealt is as claimed, or S raises FalseDealingError: but for a probability below 2^-56.

    Rounds 2 a step, and 1: two steps, and ceil(log16 n) for n = bits / 1024 + terms / 128 + 1, with whole tiles of
    2^15 bits. Bytes 16 from S to D for each step; 8 (3^6 + 3^3 + 1) and 8 * 3^4, or less in the last step, from D to S;
    32 from A to S. Nobody learns anything: D sends uniform words, and of A's last ones two are uniform, and the others
    follow from what S has.
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

    coins, coins_D = (
        compute(_first_coins, coin, x.shape[0] * x.shape[2], base.shape[1])
        for coin in _coin(net, *(v.S for v in (x, y, z, zero, base, X, Y)))
    )
    *_, inner, omega, lam = coins
    *_, inner_D, omega_D, lam_D = coins_D
    tests, *weights = compute(_tests, secret, coins, zero.shape[0])
    wrong = each(_wrong, z.shares, zero.shares, base.shares, omega, lam, *weights)
    of_A, of_S = ((compute(_scales, lam, places), compute(_scales, lam_D, places)) for places in terms.places)
    bits_D, chosen_D = (x.whole, y.whole), (X.A, Y.S, of_A[1], X.S, Y.A, of_S[1])
    sent = [_send(net, compute(_first_proof, *bits_D, *chosen_D, hidden.whole, inner_D, omega_D))]
    point, point_D = (compute(_first_point, coin) for coin in _coin(net, sent[0].S))

    def terms_left(coin_A: Located, coin_S: Located, inner: Located, point: Located) -> tuple[Located, Located]:
        """What A has after the first step, and what S has, of all but bits, by coins of who works it out."""
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
    net.check(S, _compared, last.A.send(A, S, "last"), last.S)


def _coin(net: Net, *received: Located) -> tuple[Located, Located]:
    """A coin that D learns after S has received these: as A and S have it, and as D has."""
    coin = net.common(net.A, net.S, (2,), "coin")
    return coin, compute(_after, coin, *received).send(net.S, net.D, "coin")


def _send(net: Net, proof: Located) -> Shares:
    """A part of the proof in shares of A and S."""
    proof_A = net.common(net.D, net.A, proof.shape, "proof_A")
    return Shares(proof_A, (proof ^ proof_A).send(net.D, net.S, "proof_S"))


@leaf
def _after(coin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return coin.clone()


@leaf
def _first_coins(coin: torch.Tensor, width: int, claims: int) -> tuple[torch.Tensor, ...]:
    """Weights: of the 64 rows of bits, of the 8 rows of words and of the 8 parts of a row; of the words of a row of
    bits, and of the columns of claims on words."""
    return key_stream(coin, 80 + width + claims).split((64, 8, 8, width, claims))


@leaf
def _scales(lam: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Of the columns of terms that belong to claims at these places."""
    return torch.cat([lam[:0], *(lam[at:end] for at, end in places)])


@leaf
def _tests(secret: torch.Tensor, coins: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
    """Weights of what has to be zero, which D never learns.

    Of each step's test; of `count` words; of the 64 rows of bits; of the 8 rows of words, and of their 64 parts.
    """
    tests, kappa = key_stream(secret, 64 + count).split((64, count))
    alpha, outer, inner = coins[:3]
    outer = times(outer, tests[1:2])
    return tests, kappa, times(alpha, tests[:1]), outer, times(outer.view(8, 1), inner).view(-1)


@leaf
def _wrong(z, zero, base, omega, lam, kappa, rows, _, parts) -> torch.Tensor:
    """One party's half of what has to be zero with no proof, and with the first one: [1]."""
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
    """The weights of the rows of bits, and of words, at the points drawn; of the hidden factors; and of the proof."""
    point, word_point, scale = key_stream(coin, ROWS + WORD_ROWS + 1).split((ROWS, WORD_ROWS, 1))
    sent = weights_at(point, infinity=True), weights_at(word_point, infinity=True), scale
    return weights_at(point), weights_at(word_point), scale.clone(), torch.cat(sent)


def _beside(count: int) -> int:
    """Columns of the rows [16, n] of so many columns of terms, and the hidden factors."""
    return -(-count // 2) + 1


@leaf(shapes=lambda X, *others: X.new_empty(2, 1 << FOLDED, _beside(others[-2])))
def _terms_folded(X, Y, hidden, scales, inner, point, count: int, at: tuple[int, int]) -> torch.Tensor:
    """The factors [2, 16, n] of the terms and the hidden ones after the first step; with zeros at the end of rows.

    Args:
        count: columns of all terms. at: where those begin of which this party has X, and those of which it has Y.
    """
    _, word_weights, scale, _ = point
    out = X.new_zeros(2, 1 << FOLDED, _beside(count))
    X = times(weighted_rows_sum(X.view(8, -1), word_weights).view(8, -1), times(inner.view(8, 1), scales))
    for row, found in enumerate((X, combined_words(Y, word_weights))):
        whole = out.new_zeros(8, 2 * out.shape[2] - 2)
        whole[:, at[row] : at[row] + found.shape[1]] = found
        out[row, :, :-1] = whole.view(1 << FOLDED, -1)
    out[:, 0, -1] = torch.cat((times(hidden[:1], scale), hidden[1:]))
    return out


@leaf(shapes=lambda x, *_: x.new_empty(3**FOLDED))
def _second_proof(x, y, others, omega, point) -> torch.Tensor:
    """H of the bits after the first step, and of all else."""
    return points_of_folded_bits(x, y, point[0], omega) ^ points(others[0], others[1], FOLDED)


@leaf(shapes=lambda x, y, others, *_: x.new_empty(2, _whole(x.numel() // 16 + others.shape[2])))
def _twice_folded(x, y, others, omega, point, second) -> torch.Tensor:
    """The factors [2, n] after two steps, with zeros at the end."""
    weights, bits = second[0], x.numel() // 16
    out = x.new_zeros(2, _whole(bits + others.shape[2]))
    out[0, :bits] = twice_folded_bits(x, point[0], weights, omega)
    out[1, :bits] = twice_folded_bits(y, point[0], weights)
    out[:, bits : bits + others.shape[2]] = fold_rows(others, weights, others.shape[2])
    return out


@leaf(shapes=lambda left, variables: left.new_empty(3**variables))
def _proof(left, variables: int) -> torch.Tensor:
    """H of what is left."""
    x, y = left.view(2, 1 << variables, -1)
    return points(x, y, variables)


@leaf(shapes=lambda coin, variables: (coin.new_empty(1 << variables), coin.new_empty(3**variables)))
def _point(coin: torch.Tensor, variables: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the rows at the point drawn, and of the proof."""
    point = key_stream(coin, variables)
    return weights_at(point), weights_at(point, infinity=True)


@leaf(shapes=lambda left, weights: left.new_empty(2, _whole(left.shape[1] // weights.shape[0])))
def _folded(left: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts = left.view(2, weights.shape[0], -1)
    return fold_rows(parts, weights, _whole(parts.shape[2]))


@leaf
def _wanted(tests, weights: Sequence[torch.Tensor], points: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Weights of all that was sent: in what has to be zero, and of the last step in the claim.

    The values of each step at {0, 1}^v are the claim of the step before.
    """
    _, rows, outer, _ = weights
    corners = [torch.cat((_at_corners(rows, ROWS), _at_corners(outer, WORD_ROWS), tests.new_zeros(1)))]
    for number, point in enumerate(points[1:], 2):
        variables = round(math.log(point.shape[0], 3))
        corners[-1] ^= times(points[number - 2], tests[number : number + 1])
        corners.append(_at_corners(tests[number : number + 1].expand(1 << variables), variables))
    return torch.cat(corners), points[-1].clone()


def _at_corners(values: torch.Tensor, variables: int) -> torch.Tensor:
    """Those of {0, 1}^variables, [2^v], among {0, 1, infinity}^variables, and zeros: [3^v]."""
    out = values.new_zeros([3] * variables)
    out[(slice(2),) * variables] = values.view([2] * variables)
    return out.view(-1)


@leaf(shapes=lambda left, *_: left.new_empty(4))
def _last(left, wrong, total, claim, *sent: torch.Tensor) -> torch.Tensor:
    """One party's half of the last factors, of the claim and of what has to be zero: [4]."""
    claim = inner_product(sent[-1], claim)
    return torch.cat((left[:, 0], claim, wrong ^ inner_product(torch.cat(sent), total)))


@with_shapes(lambda mine, theirs: mine[:1])
def _compared(theirs: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """At S: raises FalseDealingError unless the product of the last factors is the claim, and zero is zero."""
    x, y, claim, wrong = (theirs ^ mine).split(1)
    if not torch.equal(times(x, y), claim) or bool(wrong != 0):
        raise FalseDealingError("the dealer has dealt something else than the protocol says: its proof fails")
    return mine[:1]


def _variables(count: int) -> int:
    """Of the step that folds so many."""
    return min(FOLDED, (count - 1).bit_length())


def _whole(count: int) -> int:
    """With zeros at the end, so that they can be folded."""
    variables = _variables(count)
    return -(-count >> variables) << variables


NOTED = ("deal", "deal_bits")
"""Protocols whose messages are claimed, and proved later."""
PROVED = (*NOTED, "prove", "deal_product", "check_places", "check_channels")
"""Those in which a dealer may send where dealing is proved: `deal_product` has its own looked at at once."""

MOST = 1 << 22
"""Words of claims that are kept before they are proved: a proof works on some 500 MiB for them, of all parties."""

Claim = Callable[[DealerShares], None]
"""Notes what has to hold of a value that was dealt in these halves."""


@dataclass
class PendingProofs:
    """What is not proved yet."""

    products: list[Products] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    masks: dict[Located, tuple[DealerShares, DealerShares]] = field(default_factory=dict)
    """The bits of masks, and the planes of their halves, by the half that A has; see `proved.py`."""

    @property
    def size(self) -> int:
        """Words of all claims."""
        return sum(sum(p.words) for p in self.products) + sum(w.base.shape.numel() for w in self.words)


def claims_of(net: Net) -> PendingProofs:
    """Those of a call."""
    if net.claims is None:
        net.claims = PendingProofs()
    return net.claims


def note_claim(net: Net, claim: Claim | None, dealt: DealerShares) -> None:
    """Note the claim of a dealt value, where dealing is proved.

    Raises:
        UnsupportedOpError: it has none.
    """
    if claim is None:
        refuse_unproved(net)
    elif net.verified and dealt.shape.numel():
        claim(dealt)
        if claims_of(net).size > MOST:
            prove_pending(net)


def refuse_unproved(net: Net) -> None:
    """Raise UnsupportedOpError where dealing is proved, in a protocol that deals what has no proof."""
    if net.verified:
        raise UnsupportedOpError(
            "with verified=True every dealt value is proved, and there is no proof of what this operation deals; "
            "audited=n covers all operations"
        )


def prove_pending(net: Net) -> None:
    """Prove what is not proved yet. Whatever shows a result, or anything of one, does this first."""
    found = net.claims
    if found is not None and found.size:
        net.claims = PendingProofs(masks=found.masks)
        prove(net, found.products, found.words)


def check_proved(program: Program, dealer: Party) -> None:
    """Look once more at a program that was traced with verified=True, whoever wrote what is in it.

    Raises:
        UnsupportedOpError: the dealer sends what is not among what is proved, or something goes to others than A and S
            that depends on what was dealt after the last proof before it.
    """
    latest: dict[Any, int] = {}
    """The last step of dealing that a value depends on."""
    proof = -1
    for i, node in enumerate(program.call):
        depends = max((latest.get(slot, -1) for slot in node.taken), default=-1)
        header = node.step.header if isinstance(node.step, Move) else None
        if _is_proof(node):
            proof = i
        elif header is not None and header.src == dealer and header.phase != Phase.ONLINE:
            if header.protocol not in PROVED:
                raise UnsupportedOpError(f"'{header.path}' deals '{header.label}', which is not proved; use audited=n")
            depends = i if header.protocol in NOTED and header.bytes else depends
        elif (
            header is not None and header.dst.role not in ("A", "S") and header.protocol != "prove" and depends > proof
        ):
            raise UnsupportedOpError(f"'{header.path}' sends '{header.label}' to {header.dst} before all is proved")
        latest.update(dict.fromkeys(node.slots, depends))


def _is_proof(node: Node) -> bool:
    return isinstance(node.step, Compute) and not node.step.pure and node.step.path.split("/")[-1] == "prove"
