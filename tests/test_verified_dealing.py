"""Verified dealing: the same bits, whatever is dealt falsely is found, and a dealer that proves adaptively is, too.

What D can falsify is what it sends: here a word of a dealt message, in any way, after which D proves as it should, or
as well as it can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers import ring_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.backend import RaisedFlags
from sectorch.choreography import Located, Message, Net, Phase, leaf, protocol
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.net import Compute
from sectorch.config import Scheme
from sectorch.errors import (
    ArgumentError,
    FalseDealingError,
    FixedPointRangeError,
    RangeExceededError,
    UnsupportedOpError,
)
from sectorch.mpc.star import backend, dealing_proofs
from sectorch.mpc.star.compare import RoundBudget, is_zero
from sectorch.mpc.star.dealing_proofs import (
    DealerShares,
    DealingProofs,
    ProductClaims,
    RowSets,
    WordClaims,
    check_proved,
    prove_pending,
)
from sectorch.mpc.star.linear import linear, mask_weight
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.maximum import max_by_fours
from sectorch.mpc.star.multiply import square
from sectorch.mpc.star.relu import ramps, relu
from sectorch.mpc.star.select import bit_to_ring
from sectorch.mpc.star.shares import Shares, reveal, share
from sectorch.mpc.star.thresholds import raise_outside
from sectorch.mpc.star.truncate import truncate
from sectorch.ring import field
from sectorch.ring.products import Conv2d, Linear
from sectorch.session import Session
from sectorch.tensor import shared

DEALT = ("v_S", "c_S", "more_S")
"""Labels of what a dealer sends that is no proof."""


def rounded(x: torch.Tensor, shift: int) -> torch.Tensor:
    return (x + (1 << shift >> 1)) >> shift


def _layer(product: Callable, *shape: int) -> Callable:
    def run(net: Net, x: Shares) -> Shares:
        omega = net.setup.own(net.A, ring_values(shape, 63, 7), phase=Phase.SETUP)
        return linear(net, net.setup, product, x, mask_weight(net.setup, omega))

    return run


def _plain(product: Callable, *shape: int) -> Callable:
    return lambda x: product(x, ring_values(shape, 63, 7))


def _held(net: Net, x: Shares) -> Shares:
    masked = open_masked(net, x)
    raise_outside(net, masked, 43, everywhere=True)
    assert len(net.state(RaisedFlags)) == 1
    return x


def _of_more_levels(protocol: Callable) -> Callable:
    """As of large values, where bytes are worth more than a round."""

    def run(net: Net, x: Shares) -> Shares:
        net.state(RoundBudget).round_bytes = 0
        return protocol(net, x)

    return run


PROTOCOLS: dict[str, tuple[Callable, Callable, tuple[int, ...]]] = {
    "relu": (partial(relu, high=43), lambda x: x.clamp(min=0), (70,)),
    "relu_20": (partial(relu, shift=20), lambda x: rounded(x, 20).clamp(min=0), (70,)),
    "relu_1_limited": (partial(relu, shift=1, limit_bits=44), lambda x: rounded(x, 1).clamp(min=0), (3,)),
    "relu_20_limited_of_more_levels": (
        _of_more_levels(partial(relu, shift=20, limit_bits=40)), lambda x: rounded(x, 20).clamp(min=0), (70,),
    ),
    "ramps": (
        lambda net, x: ramps(net, x, (0, 1 << 20), 20)[1], lambda x: (rounded(x, 20) - (1 << 20)).clamp(min=0), (5, 13),
    ),
    "truncate": (partial(truncate, shift=20), partial(rounded, shift=20), (65,)),
    "truncate_limited": (partial(truncate, shift=3, limit_bits=45), partial(rounded, shift=3), (64,)),
    "max": (max_by_fours, lambda x: x.amax(0), (6, 5)),
    "is_zero": (
        lambda net, x: bit_to_ring(net, is_zero(net, open_masked(net, x)), x.shape), lambda x: (x == 0).long(), (9,),
    ),
    "held": (_held, lambda x: x, (65,)),
    "linear_few": (_layer(Linear(), 5, 7), _plain(Linear(), 5, 7), (3, 7)),
    "linear_many": (_layer(Linear(), 5, 7), _plain(Linear(), 5, 7), (90, 7)),
    "conv": (_layer(Conv2d((1, 1), (1, 1)), 4, 3, 3, 3), _plain(Conv2d((1, 1), (1, 1)), 4, 3, 3, 3), (2, 3, 9, 9)),
    "conv_groups": (
        _layer(Conv2d((2, 2), (0, 0), (1, 1), 3), 6, 1, 2, 2), _plain(Conv2d((2, 2), (0, 0), (1, 1), 3), 6, 1, 2, 2),
        (1, 3, 5, 5),
    ),
}  # fmt: skip


def outcome(protocol: Callable, x: torch.Tensor, session: Session | None = None) -> torch.Tensor:
    session = session or Session()
    with session.call() as net:
        net.state(DealingProofs).required = True
        y = protocol(net, share(net, net.own(net.Q, x)))
        prove_pending(net)
        return net.read(reveal(net, y), net.Q)


class Falsified:
    """D sends something else in the place of dealt message number `which`."""

    def __init__(self, which: int, change: Callable[[torch.Tensor], torch.Tensor]):
        self.which, self.change, self.seen = which, change, 0
        self._send = Net.send

    def __enter__(self) -> Falsified:
        def send(net: Net, value: Located, src, dst, label: str) -> Located:
            if src == net.D and label in DEALT:
                if self.seen == self.which:
                    value = value + self.change(value._value)
                self.seen += 1
            return self._send(net, value, src, dst, label)

        Net.send = send
        return self

    def __exit__(self, *_) -> None:
        Net.send = self._send


def _at(place: float, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(v: torch.Tensor) -> torch.Tensor:
        difference = torch.zeros(v.numel(), dtype=torch.int64)
        difference[min(v.numel() - 1, int(place * v.numel()))] = number
        return difference.to(v.dtype).view(v.shape)

    return change


def _family(v: torch.Tensor) -> torch.Tensor:
    """Differences whose sum is nothing."""
    difference = torch.zeros(v.numel(), dtype=v.dtype)
    difference[0] += 5
    difference[-1] -= 5
    return difference.view(v.shape) if v.numel() > 1 else difference.view(v.shape) + 1


WAYS = {
    "lowest bit first": _at(0, 1), "lowest bit last": _at(1, 1), "middle": _at(0.5, 1 << 29),
    "highest bit first": _at(0, -(1 << 63) | 1 << 31), "highest bit last": _at(1, -(1 << 63) | 1 << 31),
    "less one": _at(0.3, -1), "a family": _family, "all": torch.ones_like,
}  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOLS)
@given(st.integers(0, 1 << 30))
@settings(max_examples=4)
def test_honest_dealing_gives_the_same_numbers(name, seed):
    protocol, plain, shape = PROTOCOLS[name]
    x = ring_values(shape, 40, seed)
    assert torch.equal(outcome(protocol, x), plain(x))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_whatever_is_dealt_falsely_is_found(name):
    """Each message in one way after the other; the next in the next way."""
    protocol, _, shape = PROTOCOLS[name]
    which, ways = 0, list(WAYS.values())
    while True:
        with Falsified(which, ways[(which + len(name)) % len(ways)]) as falsified:
            try:
                outcome(protocol, ring_values(shape, 40, which))
            except FalseDealingError:
                which += 1
                continue
        assert which >= falsified.seen > 0, f"message {which} was false, and nobody noticed"
        return


@pytest.mark.parametrize(("name", "which", "rows"), [("relu_20", 0, 4), ("ramps", 0, 7), ("truncate", 2, 2)])
def test_each_row_of_what_is_dealt_together_is_looked_at(name, which, rows):
    """What results by shift and by bits take is one message, of rows that are claimed each in its own way."""
    protocol, _, shape = PROTOCOLS[name]
    for row in range(rows):

        def change(v: torch.Tensor, row: int = row) -> torch.Tensor:
            assert v.shape == (rows, *shape)
            return torch.zeros_like(v).index_fill_(0, torch.tensor(row), 1)

        with Falsified(which, change), pytest.raises(FalseDealingError):
            outcome(protocol, ring_values(shape, 40, row))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", PROTOCOLS)
def test_whatever_is_dealt_falsely_is_found_in_every_way(name):
    """Each message in each way, and then 50 times in random words."""
    protocol, _, shape = PROTOCOLS[name]
    draw, tried = random.Random(0), 0
    with Falsified(-1, torch.ones_like) as counted:
        outcome(protocol, ring_values(shape, 40, 0))
    anyhow = [lambda v: torch.randint(-(1 << 31), 1 << 31, v.shape).to(v.dtype)] * 8
    anyhow += [_at(draw.random(), 1 << draw.randrange(63)) for _ in range(42)]
    for which in range(counted.seen):
        for change in [*WAYS.values(), *anyhow]:
            if name != "relu_20" and change in anyhow[8:] and draw.random() < 0.5:
                continue
            with Falsified(which, lambda v, change=change: _something(change(v))), pytest.raises(FalseDealingError):
                outcome(protocol, ring_values(shape, 40, which))
            tried += 1
    print(f"{name}: {tried} falsifications, all found")


def _something(difference: torch.Tensor) -> torch.Tensor:
    """It, but that 32 bits may have lost it."""
    return difference if bool(difference.any()) else torch.ones_like(difference)


# The proof by itself, and a dealer that proves as well as it can.


def _halves(net: Net, shape: tuple[int, ...]) -> DealerShares:
    return DealerShares(net.common(net.D, net.A, shape, "a"), net.common(net.D, net.S, shape, "s"))


@dataclass(frozen=True)
class _Rows:
    """Rows of x and y, which are dealt one above the other, times each other; and one row that is zero."""

    def sets(self, count: int, at_A: bool) -> RowSets:
        many = (count - 1) // 2
        x, y, z = ([(part + i,) for i in range(many)] for part in (0, many, count))
        return RowSets(x, y, z, [(count - 1,)])


def _claimed(net: Net, rows: int, width: int, wrong: int = 0) -> tuple[list[ProductClaims], list[WordClaims]]:
    """Claims that hold, but for a difference in the first product."""
    x, y = _halves(net, (rows, width)), _halves(net, (rows, width))
    z_A = net.common(net.D, net.A, (rows, width), "z")
    at = torch.zeros(rows, width, dtype=torch.int64)
    at.view(-1)[:1] = wrong
    z = DealerShares(z_A, ((x.at_dealer & y.at_dealer) ^ z_A ^ at).send(net.D, net.S, "v_S"))
    X, Y = net.common(net.D, net.A, (2, 64 * width), "X"), net.common(net.D, net.S, (2 * width,), "Y")
    base_A = net.common(net.D, net.A, (2, 64 * width), "base")
    base = DealerShares(base_A, (base_A ^ _chosen(X, Y)).send(net.D, net.S, "v_S"))
    zero = net.common(net.D, net.A, (1, width), "zero")
    zero = DealerShares(zero, zero.send(net.D, net.S, "v_S"))
    factors = DealerShares(*(torch.cat([getattr(v, side) for v in (x, y, zero)]) for side in "AS"))
    return [ProductClaims(factors, z, _Rows())], [WordClaims(base, 2, ((X, Y),))]


def _chosen(X: Located, Y: Located) -> Located:
    bits = (Y.view(2, 1, -1) >> torch.arange(64).view(1, 64, 1)).bitwise_and(1)
    return X & -(bits.reshape(X.shape))


def proved(rows: int, width: int, wrong: int = 0) -> None:
    @protocol("made", "this test", [Message("v_S", "D", "S", "z of k_DA")])
    def made(net: Net) -> tuple:
        return _claimed(net, rows, width, wrong)

    with Session().call() as net:
        dealing_proofs.prove(net, *made(net))


@given(st.integers(1, 3), st.integers(1, 70))
@settings(max_examples=15)
def test_what_holds_is_accepted(rows, width):
    proved(rows, width)


def test_nothing_to_prove_is_accepted():
    with Session().call() as net:
        dealing_proofs.prove(net, [], [])


def test_each_single_bit_counts():
    for bit in range(64):
        with pytest.raises(FalseDealingError):
            proved(1, 1, -(1 << 63) if bit == 63 else 1 << bit)


def _inverse(x: torch.Tensor) -> torch.Tensor:
    power = torch.ones_like(x)
    for _ in range(63):
        power = field.times(field.times(power, power), x)
    return field.times(power, power)


def test_a_dealer_that_proves_what_is_false_step_by_step(monkeypatch):
    """It knows all but the coins to come, and makes every sum fit: until the last product does not."""
    names = "_first_proof", "_second_proof", "_proof", "_first_point", "_point"
    first_proof, second_proof, proof, first_point, point = (getattr(dealing_proofs, name).kernel for name in names)
    compared = dealing_proofs._compare_last
    error: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    def first(*values):
        found, omega = first_proof(*values), values[-1]
        error[:] = [field.times(torch.tensor([5]), omega[:1])]  # of the first word, times its weight
        found[0] ^= error[0][0]
        sent[:] = [found]
        return found

    def then(found):
        found[0] ^= error[-1][0]
        sent.append(found)
        return found

    def second(*values):
        return then(second_proof(*values))

    def later(left, variables):
        return then(proof(left, variables))

    def at_first(coin):
        return folded(first_point(coin))

    def at(coin, variables):
        return folded(point(coin, variables))

    def folded(found):
        """What the error is worth at the point drawn, by the weight of the first value that was sent."""
        if len(error) == len(sent):
            error.append(field.times(error[-1], found[-1][:1]))
        return found

    def looked(theirs, mine):
        seen.append(theirs ^ mine)
        return compared(theirs, mine)

    for name, f in zip(names, (first, second, later, at_first, at), strict=True):
        f.shapes = getattr(dealing_proofs, name).kernel.shapes
        monkeypatch.setattr(dealing_proofs, name, f)
    looked.shapes = compared.shapes
    monkeypatch.setattr(dealing_proofs, "_compare_last", looked)
    with pytest.raises(FalseDealingError):
        proved(2, 40, wrong=5)
    x, y, claim, wrong = seen[0].split(1)
    assert not wrong.any(), "every sum fitted"
    assert torch.equal(field.times(x, y) ^ claim, error[-1]) and error[-1].any()


@pytest.mark.parametrize("count", [64, 1280])
def test_what_a_relu_claims_and_what_the_proof_sends(count):
    """As docs/verified.md has it: of a ReLU by 20 bits 268 products, 68 zeros and 8 terms, and 65 bits dealt more."""
    x, sent = ring_values((count,), 40, 0), {}
    for verified in (False, True):
        with Transcript() as transcript, Session().call() as net:
            net.state(DealingProofs).required = verified
            relu(net, share(net, net.own(net.Q, x)), 20)
            found = replace(net.state(DealingProofs))  # whose claims are taken out when they are proved
            prove_pending(net)
        sent[verified] = [line for line, _ in transcript.lines]
    width = count // 64
    assert [sum(words) for words in zip(*(p.words for p in found.products), strict=True)] == [268 * width, 68 * width]
    assert sum(len(w.terms_A + w.terms_S) * w.width for w in found.words) == 8 * width
    mine = [line for line in sent[True] if line.protocol == "prove"]
    assert sum(m.bytes for m in sent[True]) - sum(m.bytes for m in sent[False] + mine) == 65 * count // 8
    n, steps, points = 32 * -(-268 * width // 512) + 4 * width + 1, 1, 3**dealing_proofs.FOLDED  # after the second step
    while n > 1:
        variables = min(dealing_proofs.FOLDED, (n - 1).bit_length())
        n, steps, points = -(-n // (1 << variables)), steps + 1, points + 3**variables
    assert sum(m.bytes for m in mine) == 16 * (2 + steps) + 8 * (3**6 + 3**3 + 1 + points) + 32 < 10_000
    assert max(m.round for m in mine) == 1 + (2 * (1 + steps) + 1), "after the round in which it was dealt"


# Whole models.


def cnn() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.ReLU(), nn.AvgPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(6, 3)).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return cnn()


X = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def online(transcript: Transcript) -> list[tuple]:
    """What was sent after the query: protocols, ends and bytes."""
    lines = [line for line, _ in transcript.lines if line.phase == Phase.ONLINE]
    return [(line.path, line.label, line.src.name, line.dst.name, line.bytes) for line in lines]


def test_a_model_gives_the_same_bits_and_online_only_the_query_is_looked_at(model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "LAN_ROUND", 0)  # a dealer that proves what it deals has neither keys nor wide blocks
    trusted, verified, lines = sectorch.secure(model), sectorch.secure(model, Scheme(verified=True)), []
    with Transcript() as before:
        y = trusted(X)
    with Transcript() as after:
        assert torch.equal(verified(X), y)
    assert online(before) == looked_at(after)
    unchecked = [sectorch.secure(model, Scheme(verified=proved, range_check=False)) for proved in (False, True)]
    for secure in unchecked:
        with Transcript() as transcript:
            secure(X)
        lines.append(online(transcript))
    assert lines[0] == lines[1], "not a byte more"
    verified.preprocess(X.shape[0])
    with Transcript() as after:
        assert torch.equal(verified(X), y)
    assert {line.phase for line, _ in after.lines} == {Phase.ONLINE}


def looked_at(transcript: Transcript) -> list[tuple]:
    """What was sent after the query, without its check."""
    return [line for line in online(transcript) if line[0] not in ("open_masked", "raise_outside/and_layers")]


def test_all_calls_of_a_session_meet_the_weights_that_s_was_sent_first():
    """S is sent the masked weights once: what A has later, in its own process, is not what these calls are of."""
    changed = cnn()
    verified, sent = sectorch.secure(changed, Scheme(verified=True)), []
    for _ in range(2):
        with Transcript() as transcript:
            y = verified(X)
        sent.append((y, sum(line.label == "omega_masked" for line, _ in transcript.lines)))
        with torch.no_grad():
            for weight in changed.parameters():
                weight.add_(1)
    (first, masked), (second, again) = sent
    assert torch.equal(first, second) and masked == 3 and again == 0
    assert not torch.equal(sectorch.secure(changed, Scheme(verified=True))(X), first)


def test_several_proofs_where_there_is_much(model, monkeypatch):
    y = sectorch.secure(model)(X)
    monkeypatch.setattr(dealing_proofs, "MOST", 6_000)
    verified = sectorch.secure(model, Scheme(verified=True))
    with Transcript() as transcript:
        assert torch.equal(verified(X), y)
    assert sum(line.label == "last" for line, _ in transcript.lines) > 1


def test_operation_by_operation_and_results_in_shares(model):
    session = Session()
    verified = sectorch.secure(model, Scheme(verified=True), session=session)
    kept = verified.in_shares(X)
    with Transcript() as transcript:
        assert torch.equal((kept.relu() + 1).reveal(), sectorch.secure(model)(X).relu() + 1)
    assert any(line.label == "last" for line, _ in transcript.lines)


@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Softmax(-1), torch.randn(2, 4)), (nn.GELU(), torch.randn(2, 4)), (nn.LayerNorm(4), torch.randn(2, 4))],
)
def test_what_has_no_proof_is_refused_and_nothing_is_sent(layer, x):
    with Transcript() as transcript, pytest.raises(UnsupportedOpError, match="audited"):
        sectorch.secure(nn.Sequential(nn.Linear(4, 4), layer).eval(), Scheme(verified=True))(x)
    assert not online(transcript)


def test_protocols_without_a_proof_are_refused():
    with pytest.raises(UnsupportedOpError):
        outcome(square, torch.arange(3))
    with pytest.raises(UnsupportedOpError):
        outcome(partial(relu, fss=True), torch.arange(3))
    with pytest.raises(UnsupportedOpError):
        outcome(_layer(lambda x, w, _: x * w, 3), torch.arange(3))


@pytest.mark.parametrize("options", [{"network": "wan"}, {"relu": "privhfl"}, {"audited": 2}, {}])
def test_a_scheme_says_what_it_covers(options):
    with pytest.raises(ArgumentError, match="verified"):
        Scheme(verified=True if options else "yes", **options)


def test_a_program_that_shows_something_before_its_proof_is_refused():
    session = Session()

    def program(net: Net, early: bool) -> torch.Tensor:
        net.state(DealingProofs).required = True
        y = relu(net, share(net, net.own(net.Q, torch.empty(3, dtype=torch.int64, device="meta"))), 20)
        if not early:
            prove_pending(net)
        return net.read(reveal(net, y), net.Q)

    check_proved(session.trace(partial(program, early=False)), session.Q)
    with pytest.raises(UnsupportedOpError, match="before all is proved"):
        check_proved(session.trace(partial(program, early=True)), session.Q)


def test_several_answering_parties_prove_each_for_itself():
    torch.manual_seed(0)
    models, x = [nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval() for _ in range(2)], torch.randn(2, 4)
    totals = []
    for scheme in (Scheme(), Scheme(verified=True)):
        session = Session(2)
        with Transcript() as transcript:
            secure = [sectorch.secure(m, scheme, session=session, party=p)
                      for m, p in zip(models, session.answering, strict=True)]  # fmt: skip
            totals.append(sectorch.aggregate([f.in_shares(x) for f in secure]))
    assert torch.equal(*totals)
    assert sum(line.label == "last" for line, _ in transcript.lines) == 2 * 2, "of each one's call, and of its flags"


# A query beyond the range.


@pytest.mark.parametrize(
    ("element", "inside"),
    [(0, True), ((1 << 32) - 1, True), (-(1 << 32), True), (1 << 32, False), (-(1 << 32) - 1, False), (1 << 61, False),
     (-(1 << 63), False), ((1 << 63) - 1, False)],
)  # fmt: skip
def test_an_input_that_is_no_number_of_the_range_has_no_result(element, inside, monkeypatch):
    """Q shares what it likes, and looks at nothing itself: below 2^12 with 20 fraction bits there is a result."""

    def lying(value: torch.Tensor, *_) -> torch.Tensor:
        words = torch.zeros(value.shape, dtype=torch.int64)
        words.view(-1)[-1:] = element
        return words

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), torch.zeros(2, 4)
    monkeypatch.setattr(shared, "encoded_input", leaf(lying, shapes=lambda value, *_: value.long()))
    verified = sectorch.secure(model, Scheme(verified=True))
    if inside:
        assert torch.equal(verified(x), sectorch.secure(model)(x))
        return
    with pytest.raises(RangeExceededError):
        verified(x)


def lie(monkeypatch, element: int) -> None:
    """Q shares this ring element in the place of its last one."""

    def lying(value: torch.Tensor, *_) -> torch.Tensor:
        words = torch.zeros(value.shape, dtype=torch.int64)
        words.view(-1)[-1:] = element
        return words

    monkeypatch.setattr(shared, "encoded_input", leaf(lying, shapes=lambda value, *_: value.long()))


@pytest.mark.parametrize("element", [-(1 << 63), (1 << 63) - 1, (1 << 63) - (1 << 32), (1 << 31) - (1 << 63)])
@pytest.mark.parametrize("weight", [0.5, 0.5 + 2.0**-20])
def test_an_input_at_the_ends_of_the_ring_has_no_result_whatever_the_weights(element, weight, monkeypatch):
    """Times an even weight, 2^63 is nothing: what is looked at is the input, and not what becomes of it."""
    model = nn.Linear(3, 2).eval()
    with torch.no_grad():
        model.weight.fill_(weight)
    x = torch.zeros(2, 3)
    assert torch.equal(sectorch.secure(model, Scheme(verified=True))(x), sectorch.reference(model)(x))
    lie(monkeypatch, element)
    with pytest.raises(RangeExceededError):
        sectorch.secure(model, Scheme(verified=True))(x)


@pytest.mark.parametrize(
    ("element", "inside"),
    [((1 << 32) - 1, True), (-(1 << 32), True), (1 << 32, False), (-(1 << 32) - 1, False), (-(1 << 63), False)],
)
def test_a_tensor_that_is_shared_alone_is_held_to_its_range(element, inside, monkeypatch):
    """Nothing is computed with it that would look at it a second time."""
    lie(monkeypatch, element)
    zeros = torch.zeros(3, dtype=torch.float64)
    x = sectorch.share(zeros, session=sectorch.Session(), scheme=Scheme(verified=True), limit=4096.0)
    if inside:
        assert x.reveal().tolist() == [0, 0, element / 2**20]
        return
    with pytest.raises(RangeExceededError):
        x.reveal()


def test_a_layer_of_no_inputs_is_its_bias():
    model, x = nn.Linear(1, 3).eval(), torch.zeros(2, 0)
    model.weight, model.in_features = nn.Parameter(torch.zeros(3, 0)), 0
    assert torch.equal(sectorch.secure(model, Scheme(verified=True))(x), sectorch.reference(model)(x))


@pytest.mark.parametrize("element", [2, -1, -2, 1 << 20, (1 << 63) - 1, -(1 << 63)])
def test_a_truth_value_that_is_none_has_no_result(element, monkeypatch):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, m: torch.Tensor) -> torch.Tensor:
            return self.last((~m).float())

    model, m = Counted().eval(), torch.tensor([[True, False, True]])
    assert torch.equal(sectorch.secure(model, Scheme(verified=True))(m), sectorch.reference(model)(m))
    lie(monkeypatch, element)
    with pytest.raises(RangeExceededError):
        sectorch.secure(model, Scheme(verified=True))(m)


def test_the_code_of_an_index_is_not_q_s_word():
    """A trusted Q shares the code of its own index; here that could be any vector: it is worked out of the index."""

    class Coded(nn.Module):
        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(i, 5).float()

    i, shared_by_q = torch.tensor([1, 3]), []
    for scheme in (Scheme(), Scheme(verified=True)):
        with sectorch.profile() as seen:
            assert sectorch.secure(Coded().eval(), scheme)(i).argmax(-1).tolist() == [1, 3]
        shared_by_q.append(sum(m.protocol == "share" for m in seen.ledger))
    assert shared_by_q == [2, 1]


def test_an_honest_input_at_the_end_of_the_range_is_answered():
    """What would be rounded to the limit is refused where it is, at every level, and not by who looks at shares."""
    model, unit = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU()).double().eval(), 2.0**-20
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    verified, reference = sectorch.secure(model, Scheme(verified=True)), sectorch.reference(model)
    for last in (4096 - unit, unit - 4096, 4096 - 0.75 * unit):
        x = torch.full((1, 2), last, dtype=torch.float64)
        assert torch.equal(verified(x), reference(x))
    for beyond in (4096 - unit / 2, unit / 2 - 4096, 4096 - unit / 8):
        x = torch.full((1, 2), beyond, dtype=torch.float64)
        for level in (verified, reference, sectorch.secure(model)):
            with pytest.raises(FixedPointRangeError, match="below 4096"):
                level(x)


def test_what_is_shared_alone_is_held_to_its_range_too(monkeypatch):
    session, big = Session(), lambda value, *_: torch.full(value.shape, 1 << 62)
    with monkeypatch.context() as patch:
        patch.setattr(shared, "encoded_input", leaf(big, shapes=lambda value, *_: value.long()))
        beyond = shared.share_tensor(torch.zeros(3), session=session, scheme=Scheme(verified=True))
    within = shared.share_tensor(torch.ones(3), session=session, scheme=Scheme(verified=True))
    assert torch.equal((within + 1).relu().reveal(), torch.full((3,), 2.0))
    with pytest.raises(RangeExceededError):
        (beyond + within).relu().reveal()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x).relu()
        return self.one(h), self.two(h).relu()


@pytest.mark.parametrize("label", ["c_S", "v_S"])
def test_what_is_done_until_an_end_does_not_depend_on_model_or_input(label, monkeypatch):
    """Every step, with what it is taken on, and every message: the same ones for weights and inputs far apart."""
    send, run = Net.send, Compute.run
    steps: list[str] = []

    def false(net: Net, value: Located, src, dst, name: str) -> Located:
        return send(net, value + 1 if src == net.D and name == label else value, src, dst, name)

    def computed(step: Compute, runtime, call: int, values) -> object:
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__ for v in values]
        steps.append(f"{step.path} {getattr(step.f, '__name__', step.f)} {shapes}")
        return run(step, runtime, call, values)

    def until_the_end(scale: float, x: torch.Tensor) -> list[str]:
        model = cnn()
        with torch.no_grad():
            for weight in model.parameters():
                weight *= scale
        verified = sectorch.secure(model, Scheme(verified=True))
        steps.clear()
        with Transcript() as transcript, pytest.raises(FalseDealingError) as caught:
            verified(x)
        shown = {m.protocol for m, _ in transcript.lines if m.dst.role == "Q"}
        assert shown <= {"prove", "seed", "agree"}, "coins, and keys"
        messages = [f"{m.path} {m.label} {m.src} {m.dst} {m.shape} {m.dtype}" for m, _ in transcript.lines]
        return [*steps, *messages, str(caught.value)]

    monkeypatch.setattr(Net, "send", false)
    monkeypatch.setattr(Compute, "run", computed)
    done = [until_the_end(scale, x) for scale in (0.0, 3.0) for x in (torch.zeros_like(X), 500 * X)]
    assert len(done[0]) > 30 and done[1:] == done[:1] * 3


@pytest.mark.parametrize("rows", [0, 2])
def test_results_with_flags_of_their_own_and_no_rows_at_all(rows):
    torch.manual_seed(0)
    model, x = TwoHeads().eval(), torch.randn(rows, 4)
    wanted = sectorch.secure(model)(x)
    found = sectorch.secure(model, Scheme(verified=True))(x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
