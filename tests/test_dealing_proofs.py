"""The proof of dealing by itself: each word that is claimed, and each of the proof, has a weight of its own, and D
learns it after S has received the word."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import ring_values

from sectorch.choreography import Located, Net, Phase
from sectorch.choreography.net import Move
from sectorch.errors import FalseDealingError
from sectorch.mpc.star import dealing_proofs
from sectorch.mpc.star.dealing_proofs import (
    CLAIM_PROTOCOLS,
    DealerShares,
    DealingProofs,
    ProductClaims,
    RowSets,
    WordClaims,
    prove_pending,
)
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.shares import reveal, share
from sectorch.ring.field import TILE, times, xor_of
from sectorch.session import Session

ROW, TILE_WORDS = TILE[1], TILE[0] * TILE[1]
"""Words of a row of a tile, and of a tile."""
COPIES, ELEMENTS = 2, 128
COLUMNS = ELEMENTS // 64


@dataclass(frozen=True)
class _Rows:
    """Of two rows x and y the product, of a third one that it is zero."""

    def sets(self, count: int, at_A: bool) -> RowSets:
        return RowSets([(0,)], [(1,)], [(count,)], [(2,)])


class Claims:
    """Claims that hold: `width` products, which are all ones, and as many zeros; and of `ELEMENTS` in each copy, with a
    term of A and two of S."""

    def __init__(self, width: int):
        self.values = {
            "factors": torch.cat((torch.full((2, width), -1), torch.zeros(1, width, dtype=torch.int64))),
            "z": torch.full((1, width), -1),
            "X": ring_values((3, COPIES, ELEMENTS), 63, 1) | 1,
            "Y": torch.full((3, COPIES * COLUMNS), -1),
        }
        X = self.values["X"]
        self.values["base"] = X[0] ^ X[1] ^ X[2]
        self.masks = {name: ring_values((*v.shape,), 63, 2 + i) for i, (name, v) in enumerate(self.values.items())}

    def prove(self, session: Session) -> None:
        with session.call() as net:

            def at(value: torch.Tensor, other) -> Located:
                return Located(value, frozenset((net.D, other)), Phase.OFFLINE, {}, net.runtime.session)

            def halves(name: str) -> DealerShares:
                mask = self.masks[name]
                return DealerShares(at(mask, net.A), at(self.values[name] ^ mask, net.S))

            X, Y = self.values["X"], self.values["Y"]
            of_A = ((at(X[0], net.A), at(Y[0], net.S)),)
            of_S = tuple((at(X[i], net.S), at(Y[i], net.A)) for i in (1, 2))
            words = WordClaims(halves("base"), COPIES, of_A, of_S)
            dealing_proofs.prove(net, [ProductClaims(halves("factors"), halves("z"), _Rows())], [words])


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


def _refused(claims: Claims, session: Session) -> None:
    with pytest.raises(FalseDealingError):
        claims.prove(session)


def test_the_claims_hold(session):
    for width in (1, TILE_WORDS, TILE_WORDS + 1):
        Claims(width).prove(session)


SAME = {
    "products of a row": ("z", (0, 1)), "of a tile's columns": ("z", (3, 3 + ROW)),
    "of tiles": ("z", (7, 7 + TILE_WORDS)), "zeros": ("factors", (2 * (TILE_WORDS + 9), 2 * (TILE_WORDS + 9) + 1)),
    "words of a row": ("base", (0, 1)), "parts of a row": ("base", (0, COLUMNS)), "rows": ("base", (0, 8 * COLUMNS)),
    "copies": ("base", (0, ELEMENTS)), "terms of A": ("X", (0, 1)), "terms of S": ("X", (256, 700)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_two_differences_that_are_the_same_do_not_make_one_another_good(name, session):
    which, places = SAME[name]
    claims = Claims(TILE_WORDS + 9)
    for place in places:
        claims.values[which].view(-1)[place] ^= 5
    _refused(claims, session)


@pytest.mark.parametrize("width", [1, 9, TILE_WORDS, TILE_WORDS + 1])
def test_the_first_and_the_last_word_of_all_that_is_claimed_count(width, session):
    claims = Claims(width)
    for v in claims.values.values():
        for place in (0, v.numel() - 1):
            for bit in (1, -(1 << 63)):
                v.view(-1)[place] ^= bit
                _refused(claims, session)
                v.view(-1)[place] ^= bit
    claims.prove(session)


class Changed:
    """D sends another word in one message of the proof."""

    def __init__(self, step: int, place: int, monkeypatch):
        self.sizes: list[int] = []
        send = Net.send

        def changed(net: Net, value: Located, src, dst, label: str) -> Located:
            if label == "proof_S":
                if len(self.sizes) == step:
                    difference = torch.zeros(value.shape, dtype=torch.int64)
                    difference[place] = 5
                    value = value ^ difference
                self.sizes.append(value.shape.numel())
            return send(net, value, src, dst, label)

        monkeypatch.setattr(Net, "send", changed)


def test_each_word_of_the_proof_counts(session, monkeypatch):
    """Those at infinity, too, which the sum at {0, 1}^v does not have: of them every fifth."""
    claims = Claims(TILE_WORDS + 9)
    with monkeypatch.context() as patch:
        sizes = Changed(-1, 0, patch).sizes
        claims.prove(session)
    first = (
        dealing_proofs.POINTS_OF_BITS,
        dealing_proofs.POINTS_OF_BITS + dealing_proofs.POINTS_OF_WORDS - 1,
        dealing_proofs.POINTS_OF_BITS + dealing_proofs.POINTS_OF_WORDS,
    )
    assert len(sizes) == 4 and sizes[0] == first[-1] + 1
    for step, size in enumerate(sizes):
        for place in {*range(0, size, 5), size - 1, *(first if step == 0 else ())}:
            with monkeypatch.context() as patch:
                Changed(step, place, patch)
                _refused(claims, session)


def test_no_coin_is_shown_before_all_that_it_is_drawn_for_has_been_received():
    """Each depends on all that D has sent to S until then: however messages are delayed, S waits."""
    session = Session()

    def program(net: Net) -> torch.Tensor:
        net.state(DealingProofs).required = True
        y = relu(net, share(net, net.own(net.Q, torch.empty(3, dtype=torch.int64, device="meta"))), 20)
        prove_pending(net)
        return net.read(reveal(net, y), net.Q)

    received: dict = {}
    """Of each value the messages of D's that it depends on."""
    sent, coins, proofs = set(), 0, 0
    for number, node in enumerate(session.trace(program).call):
        depends = set().union(*(received.get(slot, ()) for slot in node.operand_slots))
        header = node.step.header if isinstance(node.step, Move) else None
        if header is not None and (header.protocol in CLAIM_PROTOCOLS or header.label == "proof_S"):
            sent.add(number)
            depends.add(number)
            proofs += header.label == "proof_S"
        if header is not None and header.label == "coin":
            coins += 1
            assert depends == sent, f"coin {coins} depends on {len(depends)} of {len(sent)} messages"
        received.update(dict.fromkeys(node.slots, depends))
    assert coins == proofs + 1 > 3


@pytest.mark.parametrize("twice", ["as the hidden product", "in the points of words"])
def test_an_error_is_not_made_good_by_its_like(twice, session, monkeypatch):
    """The sums fit, and no coefficient at infinity is wrong. D sends an error that is the same at all points once more
    as the hidden product; one that three of six variables choose, whose sum is none for words, in the points of words:
    it would be the same at the point drawn if their coins were those three's."""
    coins, proof, compared = (
        dealing_proofs._first_coins.kernel,
        dealing_proofs._first_proof.kernel,
        dealing_proofs._compare_last,
    )
    drawn: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    def first_coins(coin: torch.Tensor, *counts: int) -> tuple[torch.Tensor, ...]:
        drawn[:] = coins(coin, *counts)
        return tuple(drawn)

    def first_proof(*values) -> torch.Tensor:
        alpha, outer, _, omega, _ = drawn
        claimed = times(times(torch.tensor([5]), alpha[:1]), omega[:1])
        found = proof(*values)
        bits, words = found[: dealing_proofs.POINTS_OF_BITS], found[dealing_proofs.POINTS_OF_BITS : -1]
        if twice == "as the hidden product":
            error = times(claimed, _inverse(xor_of(alpha)[None]))
            bits ^= dealing_proofs._at_corners(error.expand(64), 6)
            found[-1:] ^= error
        else:
            sums, ratio = xor_of(alpha.view(8, 8)), times(outer[:1], _inverse(outer[1:2]))
            error = torch.zeros(8, dtype=torch.int64)
            error[:1] = times(claimed, _inverse(sums[:1] ^ times(sums[1:2], ratio)))
            error[1:2] = times(error[:1], ratio)
            bits ^= dealing_proofs._at_corners(error.repeat_interleave(8), 6)
            words ^= dealing_proofs._at_corners(error, 3)
        return found

    def looked(theirs: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        seen.append(theirs ^ mine)
        return compared(theirs, mine)

    first_proof.shapes, looked.shapes = proof.shapes, compared.shapes
    claims = Claims(9)
    claims.values["z"].view(-1)[0] ^= 5
    for name, f in (("_first_coins", first_coins), ("_first_proof", first_proof), ("_compare_last", looked)):
        monkeypatch.setattr(dealing_proofs, name, f)
    _refused(claims, session)
    x, y, claim, wrong = seen[0].split(1)
    assert torch.equal(times(x, y), claim) and wrong.any(), "D proved as it should afterwards, and that does not fit"


def _inverse(x: torch.Tensor) -> torch.Tensor:
    power = torch.ones_like(x)
    for _ in range(63):
        power = times(times(power, power), x)
    return times(power, power)
