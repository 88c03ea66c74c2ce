"""Tensors that Q and S hold: collected, drawn, computed with, revealed; against the clear, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import long
from scipy.stats import chisquare
from torch import nn

import sectorch
from sectorch.choreography.ledger import Observer, Profile, Transcript
from sectorch.errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    PeerLostError,
    RangeExceededError,
    SessionMismatchError,
    ShapeError,
)
from sectorch.testing import check_program
from sectorch.testing.protocols import ProtocolFault

SEEDS = [0, *long(1, 2, 3, 4)]


def shared(session, values, owner="Q", **how):
    parts = zip(values, session.answering, strict=True)
    return [sectorch.share(x, session=session, party=party, owner=owner, **how) for x, party in parts]


def numbers(*shape, seed=0):
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("seed", SEEDS)
def test_operations_on_tensors_of_q_and_s_are_those_of_any_others(network, seed):
    """Bit for bit: a collected tensor against the same shared with one answering party, at every kind of protocol."""
    session, values = sectorch.Session(answering=3), [numbers(4, 5, seed=10 * seed + i) for i in range(3)]
    total = sectorch.collect(shared(session, values, scheme=network))
    other = sum(sectorch.share(x, session=session, scheme=network) for x in values)
    assert total.party is session.Q and (total.reveal() - sum(values)).abs().max() < 1e-5
    for f in (
        lambda x: x, lambda x: x.relu(), lambda x: x * x, lambda x: x.amax(1), lambda x: x.argmax(1), lambda x: x > 1,
        lambda x: x @ x.T, lambda x: (x / 8).exp(), lambda x: x.sort(1).values, lambda x: x - 2 * x.sum(),
        lambda x: F.one_hot(x.argmax(1), 5), lambda x: x.softmax(1),
    ):  # fmt: skip
        assert torch.equal(f(total).reveal(), f(other).reveal())
    assert torch.equal(total.reveal("S"), other.reveal("S"))


@pytest.mark.parametrize("engine", ["shares", "yao"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_vote_is_that_in_the_clear(engine, seed):
    torch.manual_seed(seed)
    session, x = sectorch.Session(answering=3), torch.randn(6, 4)
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)).eval() for _ in range(3)]
    votes = sum(F.one_hot(model(x).argmax(1), 5) for model in models)
    logits = [
        sectorch.secure(model, session=session, party=party)(sectorch.share(x, session=session, party=party))
        for model, party in zip(models, session.answering, strict=True)
    ]
    with Profile() as profile:
        ballots = [sectorch.one_hot_argmax(y, engine=engine) for y in logits]
        histogram = sectorch.collect(ballots)
    learned = {(m.protocol, m.label) for m in profile.ledger if m.shows and m.protocol != "garbled_pair"}
    assert not learned and torch.equal(histogram.reveal(), votes)
    noise, check = torch.randint(-3, 4, (6, 5)), torch.randint(-4, 1, (6, 1)).expand(6, 5).contiguous()
    at_S = dict(session=session, party=session.Q, limit=5)
    noisy = histogram + sectorch.draw("S", lambda shape: noise, (6, 5), **at_S)
    sure = histogram + sectorch.draw("S", lambda shape: check, (6, 5), **at_S) - 1
    wanted, clear = (votes + noise).argmax(1), (votes + check - 1).amax(1) >= 0
    for other in ("shares", "yao"):
        assert torch.equal(sectorch.reveal_argmax(noisy, engine=other), wanted)
        found = sectorch.reveal_argmax(noisy, where=sure, engine=other)
        assert torch.equal(found, torch.where(clear, wanted, -1))
        assert torch.equal(sectorch.one_hot_argmax(noisy, engine=other).reveal(), F.one_hot(wanted, 5))


def test_a_reference_session_gives_the_same():
    session = sectorch.Session(answering=2, reference=True)
    values = [numbers(3, 4, seed=i) for i in range(2)]
    parts = zip(shared(session, values), ("yao", "shares"), strict=True)
    ballots = [sectorch.one_hot_argmax(x, engine=engine) for x, engine in parts]
    drawn = sectorch.draw("Q", lambda shape: torch.arange(12).view(shape), (3, 4), session=session, party=session.Q)
    total = sectorch.collect(ballots) + drawn
    wanted = sum(F.one_hot(x.argmax(1), 4) for x in values) + torch.arange(12).view(3, 4)
    assert torch.equal(total.reveal(), wanted)
    found = sectorch.reveal_argmax(total, engine="yao", where=total - 5)
    assert torch.equal(found, torch.where(wanted.amax(1) >= 5, wanted.argmax(1), -1))


def test_cost_and_what_crosses():
    """One message of each answering party, 8 bytes per element, uniform at S, and another one for the same input."""
    views, session = [], sectorch.Session(answering=2)
    for _ in range(2):
        parts = shared(session, [torch.ones(40, 25), torch.zeros(40, 25)])
        with Profile() as profile, Transcript() as transcript:
            sectorch.collect(parts)
        assert [(m.protocol, m.label, m.src.role, m.dst.role, m.bytes) for m in profile.ledger] == 2 * [
            ("collect", "masked_A", "A", "S", 8 * 1000)
        ]
        assert max(m.round for m in profile.ledger) <= 2 and not any(m.learner for m in profile.ledger)
        views.append(torch.cat([value.flatten() for _, value in transcript.lines]))
    assert not bool((views[0] == views[1]).any())
    tops = np.bincount((torch.cat(views).numpy() >> 56) & 255, minlength=256)
    assert chisquare(tops).pvalue > 1e-6


@pytest.mark.parametrize("bad", [0, 1])
def test_a_value_out_of_range_withholds_what_depends_on_it(bad):
    """Whichever summand it is in, before or after it was collected; and Q learns one bit, of all of them together."""
    session, values = sectorch.Session(answering=2), [torch.ones(3), torch.ones(3)]
    values[bad] = torch.tensor([1.0, 5000.0, 1.0])
    total = sectorch.collect([x.relu() for x in shared(session, values)])
    for use in (lambda: total.reveal(), lambda: (2 * total).reveal("S"), lambda: total.sum().reveal()):
        with Profile() as profile, pytest.raises(RangeExceededError):
            use()
        assert [(m.dst.name, m.label) for m in profile.ledger if m.shows].count(("Q", "key")) == 2
        assert ("Q", "x_S") not in {(m.dst.name, m.label) for m in profile.ledger}
    with pytest.raises(RangeExceededError):
        sectorch.reveal_argmax((total > 2).long())
    assert total.unchecked().reveal().shape == (3,)
    later = sectorch.collect(shared(session, [torch.full((3,), 3000.0), torch.full((3,), 3000.0)]))
    with pytest.raises(RangeExceededError):
        later.relu().reveal()
    fine = sectorch.collect([x.relu() for x in shared(session, 2 * [torch.ones(3)])])
    assert fine.flags and torch.equal(fine.relu().reveal(), torch.full((3,), 2.0))


class _Gone(Observer):
    def message(self, line, value):
        if line.src.name == "A2":
            raise PeerLostError("A2 is gone")


def test_a_lost_party_is_left_out_of_both_halves():
    session = sectorch.Session(answering=3)
    parts, lost = shared(session, [torch.full((2,), v) for v in (1, 10, 100)]), []
    with _Gone(), pytest.raises(PeerLostError):
        sectorch.collect(parts)
    with _Gone():
        total = sectorch.collect(parts, lost=lambda party, error: lost.append((party.name, str(error))))
    assert total.reveal().tolist() == [101, 101] and lost == [("A2", "A2 is gone")]
    with _Gone(), pytest.raises(ArgumentError, match="all 1 answering parties were lost"):
        sectorch.collect(parts[1:2], lost=lambda *_: None)


def test_what_is_revealed_is_seen():
    def vote(x):
        total = sectorch.collect([sectorch.one_hot_argmax(x, engine="yao")])
        sectorch.collect([x]).reveal("S")
        return sectorch.reveal_argmax(total, engine="yao")

    x = torch.randn(5, 3)
    check_program(vote, x, reveals=[("Q", (5,)), ("S", (5, 3))])
    with pytest.raises(ProtocolFault, match=r"Q learns a value of shape \(5,\)"):
        check_program(vote, x, reveals=[("S", (5, 3))])
    check_program(lambda x: sectorch.collect([x.relu()]).reveal(), x, reveals=[("Q", (5, 3))])


def test_a_count_of_yes_and_no_and_scales_that_differ():
    session = sectorch.Session(answering=2)
    x, y = shared(session, [torch.tensor([True, False]), torch.tensor([True, True])])
    assert sectorch.collect([x, y]).reveal().tolist() == [2, 1]
    assert sectorch.collect([x]).dtype == torch.bool and sectorch.collect([x]).reveal().tolist() == [True, False]
    x, y = shared(session, [torch.tensor([0.5, 2.0]), torch.tensor([0.25, 3.0])])
    assert sectorch.collect([x * x, y]).reveal().tolist() == [0.5, 7.0]
    again = sectorch.collect([sectorch.collect([x]), y])
    assert again.reveal().tolist() == [0.75, 5.0]


def test_what_does_not_fit_is_refused_and_nothing_sent():
    session = sectorch.Session(answering=2, owners=["O"])
    x, y = shared(session, [torch.ones(2, 3), torch.ones(2, 3)])
    total = sectorch.collect([x])
    at_Q = dict(session=session, party=session.Q)
    zeros, other = lambda shape: torch.zeros(shape, dtype=torch.int64), sectorch.share(torch.ones(2, 3))
    with Profile() as profile:
        for error, match, use in (
            (SessionMismatchError, r"two holders \(Q and A2\).*sectorch.collect", lambda: total + y),
            (SessionMismatchError, "one session", lambda: sectorch.collect([x, other])),
            (ArgumentError, "non-empty list", lambda: sectorch.collect([])),
            (ArgumentError, "non-empty list", lambda: sectorch.collect([torch.ones(2)])),
            (ArgumentError, "must be an answering party", lambda: sectorch.aggregate([total])),
            (ArgumentError, "must be an answering party", lambda: sectorch.share(torch.ones(2), **at_Q)),
            (ArgumentError, "revealed to one of them", lambda: total.reveal("O")),
            (ArgumentError, "who learns a result, is Q, O or S", lambda: total.reveal("A1")),
            (ArgumentError, r"collect\(\[x\]\) moves", lambda: sectorch.reveal_argmax(x)),
            (ArgumentError, r"collect\(\[x\]\) moves", lambda: sectorch.reveal_argmax(total)),
            (ArgumentError, "an engine is shares or yao, got 'tee'", lambda: sectorch.one_hot_argmax(x, engine="tee")),
            (ArgumentError, "at least two classes", lambda: sectorch.one_hot_argmax(x[:, :1], engine="yao")),
            (ArgumentError, "2 to 60 bits above 4", lambda: sectorch.one_hot_argmax(x, engine="yao", bits=61)),
            (ArgumentError, "a SharedTensor", lambda: sectorch.one_hot_argmax(torch.ones(2, 2))),
            (ArgumentError, "what O draws is no half", lambda: sectorch.draw("O", zeros, (2,), session=session)),
            (ArgumentError, "who learns a result, is Q, O or S", lambda: sectorch.draw("A", zeros, (2,), **at_Q)),
            (ShapeError, r"gave \(3,\)", lambda: sectorch.draw("S", lambda shape: torch.zeros(3).long(), (2,), **at_Q)),
            (DtypeError, "torch.float32", lambda: sectorch.draw("S", torch.zeros, (2,), **at_Q)),
            (ShapeError, "gave a int", lambda: sectorch.draw("S", lambda shape: 3, (2,), **at_Q)),
            (
                FixedPointRangeError,
                "below 7",
                lambda: sectorch.draw("S", lambda s: zeros(s) + 7, (2,), limit=7, **at_Q),
            ),
        ):
            with pytest.raises(error, match=match):
                use()
    assert not profile.ledger
    strict = sectorch.Scheme(verified=True)
    with pytest.raises(ArgumentError, match="proves nothing"):
        sectorch.collect([sectorch.share(torch.ones(2), session=session, scheme=strict)])


def test_draws_are_anew_in_each_call_and_nobody_elses():
    drawn = []
    session = sectorch.Session()
    f = lambda shape: drawn.append(torch.randint(0, 1000, shape)) or drawn[-1]
    for owner, party in (("S", session.Q), ("Q", session.Q), ("S", None), ("A", None)):
        with Profile() as profile:
            x = sectorch.draw(owner, f, (3,), session=session, party=party)
        assert not profile.ledger and torch.equal(x.reveal(), drawn[-1])
    assert len(drawn) == 4
    half = sectorch.draw("S", torch.zeros, (2,), session=session, dtype=torch.float32) + 0.5
    assert half.reveal().tolist() == [0.5, 0.5]


OWNERS = [("A", "S"), ("Q", "S"), ("S", "A"), ("H1", "A"), ("S", "H2"), ("H1", "H2")]
"""Who in a new session the two holders of an old one are: both stay, one, none; and those who hold nothing there."""


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("owners", OWNERS, ids="-".join)
def test_a_tensor_of_two_parties_is_one_of_two_others(owners, reference):
    """Bit for bit, numbers of all kinds, with fraction bits of a product and of none, and what is computed of them."""
    old, new = (sectorch.Session(owners=names, reference=reference) for names in ((), ("H1", "H2")))
    x, i = sectorch.share(numbers(4, 5), session=old, limit=64.0), sectorch.share(torch.arange(6), session=old)
    for y, limit in ((x * x - 3, 2.0**21), (x, 64.0), (i * 3, 2.0**24), (x > 0, None), ((x > 0).float(), 8.0)):
        moved = sectorch.reshare(y, new, owners, limit=limit)
        assert moved.session is new and moved.dtype == y.dtype and torch.equal(moved.reveal(), y.reveal())
        assert torch.equal(moved.reveal("H1"), y.reveal())
    moved = sectorch.reshare(x * x - 3, new, owners, limit=2.0**21)
    same = sectorch.share(moved.reveal(), session=new, limit=2.0**21)
    for f in (lambda x: (x / 64).exp(), lambda x: x.relu() + 1, lambda x: x.amax(1), lambda x: x.argmax(1)):
        assert torch.equal(f(moved).reveal(), f(same).reveal())
    if owners[0] == "A":
        session = sectorch.Session(answering=2, reference=reference)
        own = sectorch.reshare(sectorch.collect([sectorch.share(torch.ones(3), session=session)]), new, ("Q", "S"))
        assert own.reveal().tolist() == [1, 1, 1]


@pytest.mark.parametrize("owners", OWNERS, ids="-".join)
def test_a_half_moves_under_fresh_masks(owners):
    """What is received is uniform, and another in each move; a half of a new holder does not move."""
    views, x = [], sectorch.share(torch.ones(40, 25), session=sectorch.Session(), scheme=sectorch.Scheme(20))
    for _ in range(2):
        new = sectorch.Session(owners=["H1", "H2"])
        with Profile() as profile, Transcript() as transcript:
            sectorch.reshare(x.unchecked(), new, owners)
        moves = sum(owner not in ("A", "S") for owner in owners)
        assert [(m.label, m.dst.role, m.bytes) for m in profile.ledger] == moves * [("x_S", "S", 8 * 1000)]
        assert not any(m.learner for m in profile.ledger)
        views.append(torch.cat([value.flatten() for _, value in transcript.lines] or [torch.empty(0).long()]))
    assert not bool((views[0] == views[1]).any())
    if len(views[0]):
        tops = np.bincount((torch.cat(views).numpy() >> 56) & 255, minlength=256)
        assert chisquare(tops).pvalue > 1e-6


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0.0, -1.0, "8"])
def test_a_limit_that_bounds_nothing_is_refused(limit):
    """With a bound that is NaN no check of the range would fail: five times 4e6 came out below zero."""
    for call in (
        lambda: sectorch.share(torch.ones(3), limit=limit),
        lambda: sectorch.draw("S", torch.zeros, (3,), dtype=torch.float32, limit=limit),
        lambda: sectorch.reshare(sectorch.share(torch.ones(3)), sectorch.Session(), ("A", "S"), limit=limit),
    ):
        with pytest.raises(ArgumentError, match="limit is a number above 0"):
            call()


def test_a_limit_beyond_the_format_says_no_more_than_none():
    x = torch.full((8192,), 4e6)
    for limit in (None, 1e30):
        moved = sectorch.reshare(sectorch.share(x, limit=limit), sectorch.Session(), ("A", "S"))
        assert bool((moved.sum() > 0).reveal()) and bool((sectorch.share(x, limit=limit).sum() > 0).reveal())


def test_what_cannot_be_moved_to_another_session_is_refused():
    old, new, x = sectorch.Session(), sectorch.Session(owners=["H1"]), torch.ones(3)
    shared, other = sectorch.share(x, session=old), sectorch.share(x, session=sectorch.Session(reference=True))
    verified = sectorch.share(x, session=sectorch.Session(), scheme=sectorch.Scheme(verified=True))
    with pytest.raises(RangeExceededError):
        sectorch.reshare(sectorch.share(5000.0 * x, session=old).relu(), new, ("A", "S"))
    assert sectorch.reshare(shared, None, ("A", "S")) is shared
    with pytest.raises(ArgumentError, match="of neither"):
        sectorch.reshare(None, None, ("A", "S"), shape=(3,))
    for bad, owners, how, error, text in (
        (sectorch.share(x, session=new), ("A", "S"), {}, ArgumentError, "of another session"),
        (other, ("A", "S"), {}, ArgumentError, "both or none"),
        (shared, ("A", "A"), {}, ArgumentError, "of two parties"),
        (shared, ("A", "H7"), {}, ArgumentError, "'H7'"),
        (shared, "AS", {}, ArgumentError, "of two parties"),
        (None, ("A", "S"), {}, ArgumentError, "of a shape that all know"),
        (None, ("A", "S"), dict(shape=(3,)), ArgumentError, "has no half of this tensor"),
        (shared, ("A", "S"), dict(limit=0.5), FixedPointRangeError, "name limit= above"),
        (shared, ("A", new.answering[0]), {}, ArgumentError, "are one: A"),
        (x, ("A", "S"), {}, ArgumentError, "takes a SharedTensor"),
        (shared, ("A", "S"), dict(limit=math.nan), ArgumentError, "number above 0"),
        (shared, ("A", "S"), dict(limit=0), ArgumentError, "number above 0"),
        (verified, ("A", "S"), {}, ArgumentError, "proved by nobody"),
    ):
        with Profile() as profile, pytest.raises(error, match=text):
            sectorch.reshare(bad, new, owners, **how)
        assert not profile.ledger
