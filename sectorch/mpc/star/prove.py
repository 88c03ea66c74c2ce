"""The dealer proves to A and S that what it dealt is what it should be, and shows nothing of it: a distributed proof.

What is claimed (`claims.py`) are products x y = z of packed bits, and words b + sum X Y = 0 in GF(2^64) with bits Y; A
and S hold each of these values in XOR shares, and D, the dealer, knows all of them. With coins that D learns after it
has dealt all claims become one, that an inner product <x, y> of two shared vectors is a shared number. It is folded as
in the sumcheck protocol: vectors of length 2^v m are the values of two multilinear functions of v variables, which are
vectors of length m. D sends

    H(p) = <x(p), y(p)>    for p in {0, 1, infinity}^v    (at infinity stands the coefficient),

in shares, and the sum over {0, 1}^v has to be the claim. A and S draw a point r, and the claim is now that
<x(r), y(r)> = H(r), which each works out of its own shares, since x(r) is linear in x, and H(r) in what was sent. In
the first step bits are 64 to a word, with v = 6, and words that bits choose have v = 3; then v = 4. At the end A shows
S its half of what is left. An entry that D and A and S draw at random makes that uniform, and S compares.

Source: Boneh, Boyle, Corrigan-Gibbs, Gilboa and Ishai, CRYPTO 2019 (fully linear proofs, on shared inputs); Boyle,
Gilboa, Ishai and Nof, CCS 2019. With several variables at a time, which costs D little and saves rounds; see
docs/verified.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute, shaped
from ...choreography.streams import key_stream
from ...errors import FalseDealingError
from ...ring.field import (
    combined,
    combined_bits,
    combined_words,
    inner_product,
    points,
    points_of_bits,
    points_of_chosen,
    scaled,
    times,
    weights_at,
    xor_of,
)
from .halves import ROWS, WORD_ROWS, Halves, Products, Terms, Words, columns, flat, gathered, rows_of
from .shares import Shares, each

FOLDED = 4
"""Variables of the others."""
POINTS_OF_BITS, POINTS_OF_WORDS = 3**ROWS, 3**WORD_ROWS


@protocol("prove", "Boneh et al., CRYPTO 2019; docs/verified.md", [
    Message("coin", "S", "D", "a draw of k_SA"),
    Message("proof_S", "D", "S", "proof_A of k_DA"),
    Message("last", "A", "S", "hidden of k_DA and k_DS"),
])  # fmt: skip
def prove(net: Net, products: Sequence[Products], zeros: Sequence[Halves], words: Sequence[Words]) -> None:
    """What was dealt is as claimed, or S raises FalseDealingError: but for a probability below 2^-56.

    Args:
        zeros: words that are zero.

    Rounds 2 a step, and 1: a first step, and ceil(log16 n) for n = bits / 64 + terms / 8 + 1, with whole words of bits.
    Bytes 16 from S to D for each step; 8 (3^6 + 3^3 + 1) and 8 * 3^4, or less in the last step, from D to S; 32 from A
    to S. Nobody learns anything: D sends uniform words,
    and of A's last ones two are uniform, and the others follow from what S has.
    """
    D, A, S = net.D, net.A, net.S
    hidden = Halves(net.common(D, A, (2,), "hidden"), net.common(D, S, (2,), "hidden"))
    secret = net.common(A, S, (2,), "secret_coin")
    x, y, z = (gathered(rows_of, hidden, [getattr(p, name) for p in products]) for name in "xyz")
    zero = gathered(flat, hidden, zeros)
    base = gathered(columns, hidden, [w.base for w in words], tuple(w.copies for w in words))
    terms = Terms.of(words)
    X, Y = terms.factors(hidden)

    first, first_D = _coin(net, *(v.S for v in (x, y, z, zero, base, X, Y)))
    all_D = x.whole, y.whole, *terms.whole(hidden), hidden.whole, first_D
    claims, (of_A, of_S) = base.shape[1], terms.places
    sent = _send(net, compute(_first_proof, *all_D, claims, of_A + of_S))
    coin, coin_D = _coin(net, sent.S)
    state = each(_first_claim, z.shares, zero.shares, base.shares, sent, first, coin, secret)
    at_A = x.A, y.A, X.A, Y.A, hidden.A, first, coin, claims, of_A, (0, X.S.shape[1])
    at_S = x.S, y.S, X.S, Y.S, hidden.S, first, coin, claims, of_S, (X.A.shape[1], 0)
    left = Shares(compute(_first_folded, *at_A), compute(_first_folded, *at_S))
    left_D = compute(_first_folded, *all_D, coin_D, claims, of_A + of_S, (0, 0))
    number = 1
    while (count := left.shape[1]) > 1:
        variables, number = min(FOLDED, (count - 1).bit_length()), number + 1
        sent = _send(net, compute(_proof, left_D, variables))
        coin, coin_D = _coin(net, sent.S)
        state = each(_next_claim, state, sent, coin, secret, variables, number)
        left, left_D = each(_folded, left, coin, variables), compute(_folded, left_D, coin_D, variables)
    last = each(_last, left, state)
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


def _first_coins(coin: torch.Tensor, width: int, claims: int) -> Sequence[torch.Tensor]:
    """Weights: of the 64 rows of bits, of the 8 rows of words and of the 8 parts of a row; of the words of a row of
    bits, and of the columns of claims on words."""
    return key_stream(coin, 80 + width + claims).split((64, 8, 8, width, claims))


def _scales(lam: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Of the columns of terms that belong to claims at these places."""
    return torch.cat([lam[:0], *(lam[at:end] for at, end in places)])


@leaf(shapes=lambda x, *_: x.new_empty(POINTS_OF_BITS + POINTS_OF_WORDS + 1))
def _first_proof(x, y, X, Y, hidden, first, claims: int, places: tuple) -> torch.Tensor:
    """H of the bits, H of the words, and the product of the hidden factors."""
    _, _, inner, omega, lam = _first_coins(first, x.shape[1], claims)
    words = points_of_chosen(scaled(X, _scales(lam, places)).view(8, 8, -1), Y, inner)
    return torch.cat((points_of_bits(x, y, omega, ROWS), words, times(hidden[:1], hidden[1:])))


@leaf(shapes=lambda z, *_: z.new_empty(2))
def _first_claim(z, zero, base, sent, first, coin, secret) -> torch.Tensor:
    """One party's half of the claim after the first step, and of what has to be zero: [2]."""
    alpha, outer, inner, omega, lam = _first_coins(first, z.shape[1], base.shape[1])
    tests, kappa = _tests(secret, zero.shape[0])
    bits, words, product = sent.split((POINTS_OF_BITS, POINTS_OF_WORDS, 1))
    wrong = inner_product(zero, kappa)
    wrong ^= times(inner_product(inner_product(z, omega)[:, 0] ^ _corners(bits, ROWS), alpha), tests[:1])
    sums = inner_product(inner_product(base, lam).view(8, 8), inner)[:, 0]
    wrong ^= times(inner_product(sums ^ _corners(words, WORD_ROWS), outer), tests[1:2])
    point, word_point, scale = key_stream(coin, ROWS + WORD_ROWS + 1).split((ROWS, WORD_ROWS, 1))
    claim = inner_product(bits, weights_at(point, infinity=True)) ^ times(product, scale)
    return torch.cat((claim ^ inner_product(words, weights_at(word_point, infinity=True)), wrong))


def _shape_of_folded(x, y, X, Y, *_others) -> torch.Tensor:
    (before, after), mine = _others[-1], _others[-2]
    return x.new_empty(2, 64 * x.shape[1] + 8 * (before + sum(end - at for at, end in mine) + after) + 1)


@leaf(shapes=_shape_of_folded)
def _first_folded(x, y, X, Y, hidden, first, coin, claims: int, mine: tuple, around: tuple[int, int]) -> torch.Tensor:
    """The factors [2, n] after the first step: of the bits, of the terms, and the hidden ones.

    Args:
        claims: columns of all claims. mine: where the claims of the terms are whose X this party has.
        around: columns of terms before and after these, of which it has Y only.
    """
    _, _, inner, omega, lam = _first_coins(first, x.shape[1], claims)
    point, word_point, scale = key_stream(coin, ROWS + WORD_ROWS + 1).split((ROWS, WORD_ROWS, 1))
    weights, word_weights = weights_at(point), weights_at(word_point)
    X = times(combined(X.view(8, -1), word_weights).view(8, -1), times(inner.view(8, 1), _scales(lam, mine)))
    Y = combined_words(Y, word_weights)
    own, X = X.shape[1], F.pad(X, around)
    if Y.shape[1] < X.shape[1]:
        Y = F.pad(Y, (0, own) if around[0] else (own, 0))
    return torch.stack((
        torch.cat((combined_bits(x, weights, omega), X.reshape(-1), times(hidden[:1], scale))),
        torch.cat((combined_bits(y, weights), Y.reshape(-1), hidden[1:])),
    ))  # fmt: skip


@leaf(shapes=lambda left, variables: left.new_empty(3**variables))
def _proof(left, variables: int) -> torch.Tensor:
    """H of what is left."""
    x, y = _split(left, variables)
    return points(x, y, variables)


@leaf(shapes=lambda state, *_: state)
def _next_claim(state, sent, coin, secret, variables: int, number: int) -> torch.Tensor:
    """As `_first_claim`, after a later step."""
    tests, _ = _tests(secret, 0)
    wrong = xor_of(_corners(sent, variables)).view(1) ^ state[:1]
    claim = inner_product(sent, weights_at(key_stream(coin, variables), infinity=True))
    return torch.cat((claim, state[1:] ^ times(wrong, tests[number : number + 1])))


@leaf(shapes=lambda left, coin, variables: left.new_empty(2, -(-left.shape[1] >> variables)))
def _folded(left, coin, variables: int) -> torch.Tensor:
    weights = weights_at(key_stream(coin, variables))
    return torch.stack([combined(part, weights) for part in _split(left, variables)])


@leaf
def _last(left, state) -> torch.Tensor:
    """One party's half of the last factors, of the claim and of what has to be zero: [4]."""
    return torch.cat((left[:, 0], state))


@shaped(lambda mine, theirs: mine[:1])
def _compared(theirs: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """At S: raises FalseDealingError unless the product of the last factors is the claim, and zero is zero."""
    x, y, claim, wrong = (theirs ^ mine).split(1)
    if not torch.equal(times(x, y), claim) or bool(wrong != 0):
        raise FalseDealingError("the dealer has dealt something else than the protocol says: its proof fails")
    return mine[:1]


def _tests(secret: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Weights of what has to be zero, which D never learns: of each step's test, and of each word."""
    return key_stream(secret, 64 + count).split((64, count))


def _split(left: torch.Tensor, variables: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, n] -> x and y [2^variables, m], with zeros at the end."""
    missing = -left.shape[1] % (1 << variables)
    left = F.pad(left, (0, missing)) if missing else left
    x, y = left.view(2, 1 << variables, -1)
    return x, y


def _corners(sent: torch.Tensor, variables: int) -> torch.Tensor:
    """H at {0, 1}^variables."""
    return sent.view([3] * variables)[(slice(2),) * variables].reshape(-1)
