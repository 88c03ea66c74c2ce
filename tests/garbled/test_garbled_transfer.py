"""Oblivious transfer by extension: its functionality, its layout, its refusals, and what goes over the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.choreography import Phase
from sectorch.choreography.ledger import Profile, Transcript
from sectorch.errors import KeyAgreementError, TopologyError
from sectorch.garbled import correlate, oblivious_transfer, relay, transfer
from sectorch.garbled.circuit import private_words
from sectorch.garbled.transfer import TRANSFERS, correlated_transfer, pack, transpose_streams, unpack
from sectorch.ring.bitplanes import words_for
from sectorch.session import Session

SESSION = Session()
A, S, Q = SESSION.answering[0], SESSION.S, SESSION.Q
PAIRS = {p: correlate(SESSION.setup(A), p) for p in (A, S)}
SHAPE = st.sampled_from([(), (0,), (1,), (63,), (64,), (65,), (3, 5), (2, 64), (2, 3, 7)])


@pytest.mark.parametrize("garbler", [A, S], ids=str)
def test_a_pair_is_correlated(garbler):
    """Q has both seeds of every row and the garbler the one that its Delta names; Delta's colour is one."""
    pair, net = PAIRS[garbler], SESSION.setup(A)
    delta, seeds, both = net.read(pair.delta, garbler), net.read(pair.seeds, garbler), net.read(pair.both_seeds, Q)
    bits = [int(delta[i // 64]) >> i % 64 & 1 for i in range(TRANSFERS)]
    assert bits[0] == 1
    assert torch.equal(both[range(TRANSFERS), bits], seeds)
    assert len({bytes(seed.numpy()) for row in both for seed in row}) == 2 * TRANSFERS


def test_delta_is_random():
    """Any two of 40 differ in 127 random bits, and the mean of each is that of a fair coin (eight deviations)."""
    ones = torch.zeros(128)
    for _ in range(40):
        session = Session()
        net = session.setup(session.answering[0])
        delta = net.read(correlate(net, session.S).delta, session.S)
        ones += ((delta.unsqueeze(1) >> torch.arange(64)) & 1).view(-1)
    assert ones[0] == 40
    # 40 fair coins give all ones or all zeros with probability 2^-39; 127 of them below 10^-9.
    assert ((ones[1:] > 0) & (ones[1:] < 40)).all()


def test_only_the_parties_of_the_call_may_garble():
    with pytest.raises(TopologyError, match="Q cannot garble for Q"):
        correlate(SESSION.setup(A), Q)


@given(shape=SHAPE, seed=st.integers(0, 1 << 30), garbler=st.sampled_from([A, S]))
def test_correlated_transfers(shape, seed: int, garbler):
    bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    with SESSION.call(A) as net, Profile() as profile:
        q, t = correlated_transfer(net, PAIRS[garbler], net.own(Q, bits))
        q, t, delta = net.read(q, garbler), net.read(t, Q), net.read(PAIRS[garbler].delta, garbler)
    assert t.shape == (*bits.shape, 2)
    assert torch.equal(t, q ^ ((-bits).unsqueeze(-1) & delta))
    edges = 1 if garbler == S else 2
    assert profile.bytes == edges * 8 * TRANSFERS * words_for(bits.numel())
    assert profile.rounds == edges


@given(shape=SHAPE, seed=st.integers(0, 1 << 30), garbler=st.sampled_from([A, S]))
def test_one_of_two_messages_arrives(shape, seed: int, garbler):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, shape, generator=generator)
    messages = torch.randint(-(1 << 63), (1 << 63) - 1, (*shape, 2, 2), generator=generator)
    with SESSION.call(A) as net, Profile() as profile, Transcript() as transcript:
        out = oblivious_transfer(net, PAIRS[garbler], net.own(garbler, messages), net.own(Q, bits))
        out = net.read(out, Q)
    assert torch.equal(out, torch.where(bits.unsqueeze(-1) == 1, messages[..., 1, :], messages[..., 0, :]))
    edges = 1 if garbler == S else 2
    assert profile.bytes == edges * (8 * TRANSFERS * words_for(bits.numel()) + 32 * bits.numel())
    assert profile.rounds == 2 * edges
    if garbler == S and bits.numel():
        # What was sent is neither message, and the one not chosen stays hidden from Q: it lacks q xor (1 - r) Delta.
        (sealed,) = [value for line, value in transcript.received("Q")]
        assert not (sealed == messages).all(-1).any()


def test_the_message_not_chosen_is_under_a_pad_that_Q_lacks():
    """Both messages zero: what is sent are the pads. Q's own pad is one of the two, the other is uniform."""
    bits = torch.randint(0, 2, (20_000,))
    with SESSION.call(A) as net, Transcript() as transcript:
        out = oblivious_transfer(net, PAIRS[S], net.own(S, torch.zeros(20_000, 2, 2).long()), net.own(Q, bits))
        assert not net.read(out, Q).any()
    (pads,) = [value for line, value in transcript.received("Q")]
    other = pads[torch.arange(20_000), 1 - bits]
    ones = ((other.unsqueeze(-1) >> torch.arange(64)) & 1).double().mean(0)
    assert ((ones - 0.5).abs() < 8 * 0.5 / 20_000**0.5).all(), "eight standard deviations of a fair coin"
    assert len(torch.unique(pads.view(-1, 2), dim=0)) == 40_000


@given(count=st.integers(0, 200), seed=st.integers(0, 1 << 30))
def test_packing_and_transposing(count: int, seed: int):
    bits = torch.randint(0, 2, (128, count), generator=torch.Generator().manual_seed(seed))
    columns = torch.stack([pack(row) for row in bits])
    assert all(torch.equal(unpack(words, torch.Size((count,))), row) for words, row in zip(columns, bits, strict=True))
    blocks = transpose_streams(columns, count)
    assert blocks.shape == (count, 2)
    apart = (blocks.unsqueeze(-1) >> torch.arange(64)) & 1
    assert torch.equal(apart.reshape(count, 128), bits.T)


def test_streams_are_fresh_in_every_call():
    """The same bits twice, in one call and in another: no column and no block is the same."""
    bits, seen = torch.ones(640).long(), []
    for _ in range(2):
        with SESSION.call(A) as net, Transcript() as transcript:
            for _ in range(2):
                correlated_transfer(net, PAIRS[S], net.own(Q, bits))
        seen += [value for _, value in transcript.lines]
    rows = torch.cat(seen)
    assert len(torch.unique(rows, dim=0)) == len(rows) == 4 * TRANSFERS


def test_a_relayed_message_arrives_and_S_sees_the_pad_alone():
    value = torch.zeros(50_000).long()
    for src, dst in ((A, Q), (Q, A)):
        with SESSION.call(A) as net, Transcript() as transcript, Profile() as profile:
            out = relay(net, net.own(src, value), src, dst)
            assert out.owners == {dst}
            assert torch.equal(net.read(out, dst), value)
        (first, sealed), (second, forwarded) = transcript.lines
        assert (first.src, first.dst, second.src, second.dst) == (src, S, S, dst)
        assert torch.equal(sealed, forwarded)
        assert profile.bytes == 2 * 8 * 50_000
        assert profile.rounds == 2
        ones = ((sealed.unsqueeze(-1) >> torch.arange(64)) & 1).double().mean(0)
        assert ((ones - 0.5).abs() < 8 * 0.5 / 50_000**0.5).all()


def test_a_pair_is_made_in_the_setup_and_costs_what_it_says():
    for garbler, edges in (("A", 2), ("S", 1)):
        session = Session()
        party = session.answering[0] if garbler == "A" else session.S
        with Profile() as profile:
            correlate(session.setup(session.answering[0]), party)
        assert profile.bytes == profile.setup_bytes == edges * (32 + 32 * TRANSFERS)
        assert profile.rounds_of(Phase.SETUP) == 2 * edges


def test_a_bad_point_stops_the_setup(monkeypatch):
    """S hands A a point that is not Q's: sealed, it comes out as noise, which is hardly ever a point."""
    session = Session()
    point = torch.zeros(4).long()
    monkeypatch.setattr(transfer, "start", lambda: (b"", point))
    with pytest.raises(KeyAgreementError, match="outside the group"):
        correlate(session.setup(session.answering[0]), session.S)


def test_reprs_show_nothing_secret():
    words = repr(PAIRS[A])
    assert "tensor" not in words
    assert str(int(SESSION.setup(A).read(PAIRS[A].delta, A)[0])) not in words
    assert private_words(3).shape == (3,)
