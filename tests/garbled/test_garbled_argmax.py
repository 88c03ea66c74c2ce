"""Steps 1c and 3 of CaPC: both forms against torch.argmax, what cutting bits does, cost, projections, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from example_counts import fewer
from helpers import Case, World, lines_of, play, run_with_profile, world_of
from hypothesis import given
from hypothesis import strategies as st
from test_projection import assert_projections_give

from sectorch.choreography import PROTOCOLS, Phase
from sectorch.choreography.ledger import Profile
from sectorch.errors import ArgumentError, MisplacedValueError, SessionMismatchError, ShapeError
from sectorch.garbled import (
    argmax,
    argmax_noisy,
    argmax_noisy_shares,
    argmax_onehot,
    argmax_onehot_shares,
    correlate,
    relay,
)
from sectorch.session import Session
from sectorch.testing import Given

SESSION = Session()
A, S, Q = SESSION.answering[0], SESSION.S, SESSION.Q
PAIRS = {p: correlate(SESSION.setup(A), p) for p in (A, S)}
ONE_HOT = {
    "garbled": lambda net, *v, **k: argmax_onehot(net, PAIRS[A], *v, **k),
    "shares": argmax_onehot_shares,
}
NOISY = {
    "garbled": lambda net, *v, **k: argmax_noisy(net, PAIRS[S], *v, **k),
    "shares": argmax_noisy_shares,
}
SHAPE = st.sampled_from([(2,), (10,), (0, 3), (1, 10), (3, 5, 7), (65, 2), (4, 1, 3), (2, 0, 4)])


def ring(shape, seed: int) -> torch.Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=torch.Generator().manual_seed(seed))


def votes(shape, bits: int, seed: int) -> torch.Tensor:
    """Signed numbers of that many bits; a third of the vectors have few distinct values, and so ties."""
    full = ring(shape, seed) >> (64 - bits)
    coarse = full % 3 - 1
    return torch.where(torch.arange(full[..., :1].numel()).view(full[..., :1].shape) % 3 == 0, coarse, full)


def one_hot(kind: str, values: torch.Tensor, mask: torch.Tensor, **how):
    """s and s^ of a run on shares mask and values - mask."""
    with SESSION.call(A) as net:
        s, own = ONE_HOT[kind](net, net.own(A, mask), net.own(Q, values - mask), **how)
        assert (s.owners, own.owners) == ({Q}, {A})
        return net.read(s, Q), net.read(own, A)


def label(kind: str, values: torch.Tensor, mask: torch.Tensor, **how) -> torch.Tensor:
    with SESSION.call(A) as net:
        found = NOISY[kind](net, net.own(S, mask), net.own(Q, values - mask), **how)
        assert found.owners == {Q}
        return net.read(found, Q)


@pytest.mark.parametrize("kind", ONE_HOT)
@fewer(10)
@given(shape=SHAPE, bits=st.integers(2, 62), seed=st.integers(0, 1 << 30))
def test_exact_where_nothing_is_dropped(kind: str, shape, bits: int, seed: int):
    values, mask = votes(shape, bits, seed), ring(shape, seed + 1)
    expected = values.argmax(-1)
    s, own = one_hot(kind, values, mask, drop=0, bits=bits)
    assert s.shape == own.shape == values.shape
    assert torch.equal(s + own, F.one_hot(expected, shape[-1]))
    found = label(kind, values, mask, drop=0, bits=bits)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


def test_all_64_bits_of_the_ring():
    values, mask = votes((500, 5), 64, 1), ring((500, 5), 2)
    assert torch.equal(label("garbled", values, mask, drop=0, bits=64), values.argmax(-1))
    s, own = one_hot("garbled", values, mask, drop=0, bits=64)
    assert torch.equal(s + own, F.one_hot(values.argmax(-1), 5))


@fewer(8)
@given(drop=st.integers(1, 40), bits=st.integers(3, 22), classes=st.integers(2, 12), seed=st.integers(0, 1 << 30))
def test_what_dropping_low_bits_does(drop: int, bits: int, classes: int, seed: int):
    """The module's claim: the number found is below the largest by less than 2^(drop + 1)."""
    top = 1 << (drop + bits - 1)
    values = ring((64, classes), seed) % (2 * top - (1 << drop)) + (1 << drop) - top
    # Half of the vectors are close races: all within a few units of the cut.
    values[::2] = values[::2, :1] + values[::2] % (5 << drop)
    values.clamp_(-top + (1 << drop), top - 1)
    largest = values.amax(-1)
    for kind in NOISY:
        found = label(kind, values, ring(values.shape, seed + 1), drop=drop, bits=bits)
        loss = largest - values.gather(-1, found.unsqueeze(-1)).squeeze(-1)
        # On shares each match may go to a number that is less by under 2^drop, and there are ceil(log2 C) of them.
        assert (loss < (2 << drop if kind == "garbled" else ((classes - 1).bit_length() << drop))).all()
        s, own = one_hot(kind, values, ring(values.shape, seed + 2), drop=drop, bits=bits)
        assert torch.equal((s + own).sum(-1), torch.ones(64).long())
        assert ((s + own == 0) | (s + own == 1)).all()


def test_the_bound_on_dropping_is_reached():
    """14 = 7 + 7 is cut to 0 + 0, and 0 wins although it is less by 14; by 16 it cannot be."""
    cut = lambda value: label("garbled", torch.tensor([[0, value]]), torch.tensor([[0, 7]]), drop=3, bits=8).item()
    assert [cut(v) for v in (14, 15, 16)] == [0, 1, 1]
    assert label("garbled", torch.tensor([[0, 14]]), torch.tensor([[0, 8]]), drop=3, bits=8).item() == 1


@pytest.mark.parametrize("kind", ONE_HOT)
def test_the_default_serves_logits_of_40_fraction_bits(kind: str):
    """Real logits up to 2^15, whose best two differ by 2^-13 or more, on any shares."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.rand(400, 10, generator=generator, dtype=torch.float64) * 2 - 1) * 2.0**14.9
    top = logits.topk(2, -1).values
    logits = logits[top[:, 0] - top[:, 1] >= 2.0**-13]
    values = torch.round(logits * 2.0**40).long()
    s, own = one_hot(kind, values, ring(values.shape, 3))
    assert torch.equal(s + own, F.one_hot(logits.argmax(-1), 10))


@pytest.mark.parametrize("kind", ONE_HOT)
def test_shares_are_fresh_and_uniform(kind: str):
    """The same inputs twice: neither half repeats, and each half's bits are fair coins (eight deviations)."""
    values, mask = torch.zeros(3000, 4).long(), ring((3000, 4), 5)
    first, second = (one_hot(kind, values, mask, drop=0) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert not (one == two).any()
        ones = ((one.reshape(-1, 1) >> torch.arange(64)) & 1).double().mean(0)
        assert ((ones - 0.5).abs() < 8 * 0.5 / one.numel() ** 0.5).all()


def test_answering_parties_may_be_one_batch_dimension():
    values, mask = votes((5, 8, 10), 30, 6), ring((5, 8, 10), 7)
    s, own = one_hot("garbled", values, mask, drop=0)
    assert torch.equal((s + own).sum(0), F.one_hot(values.argmax(-1), 10).sum(0))
    # Step 2 and step 3 of the paper: the sums of both sides, and noise at the privacy guardian.
    noise = ring((8, 10), 8) >> 58
    found = label("garbled", s.sum(0) + own.sum(0) + noise, own.sum(0) + noise)
    assert torch.equal(found, (F.one_hot(values.argmax(-1), 10).sum(0) + noise).argmax(-1))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_chunks_are_joined(count: int, monkeypatch):
    monkeypatch.setattr(argmax, "CHUNK", 64)
    values, mask = votes((count, 3), 20, 9), ring((count, 3), 10)
    s, own = one_hot("garbled", values, mask, drop=0, bits=20)
    assert torch.equal(s + own, F.one_hot(values.argmax(-1), 3))
    assert torch.equal(label("garbled", values, mask, drop=0, bits=20), values.argmax(-1))


# Cost.


def measured(session: Session, step: str, shape, **how) -> Profile:
    """The ledger of one step; a dry session's values have shapes only."""
    party = session.answering[0]
    pair = correlate(session.setup(party), party if step == "onehot" else session.S)
    values = torch.zeros(shape).long()
    with session.call(party) as net, Profile() as profile:
        if step == "onehot":
            argmax_onehot(net, pair, net.own(party, values), net.own(net.Q, values), **how)
        else:
            argmax_noisy(net, pair, net.own(net.S, values), net.own(net.Q, values), **how)
    return profile


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("shape", [(64, 10), (3, 2), (1100, 3)])
def test_bytes_and_rounds_are_those_of_the_docstring(shape, bits: int):
    n, c = torch.Size(shape[:-1]).numel(), shape[-1]
    ands = c * (bits - 1) + (2 * c - 3) * bits + c - 2
    chunks = [min(argmax.CHUNK, n - at) for at in range(0, n, argmax.CHUNK)]
    columns = sum(16 * 64 * -(-c * bits * m // 64) for m in chunks)  # choice bits are padded to words
    step = measured(SESSION, "onehot", shape, drop=0, bits=bits)
    assert step.bytes == step.online_bytes == 2 * (columns + n * (32 * ands + 8 * c))
    assert step.rounds == 4
    decoding = sum(8 * -(-(c - 1).bit_length() * m // 64) for m in chunks)
    step = measured(SESSION, "noisy", shape, drop=0, bits=bits)
    assert step.bytes == step.online_bytes == columns + n * 32 * ands + decoding
    assert step.rounds == 2
    assert step.bytes_between("A", "S") == 0


def test_the_figure_of_the_docstring():
    profile = measured(SESSION, "onehot", (64, 10))
    assert profile.bytes_between("A", "S") == profile.bytes_between("Q", "S") == 64 * 32_784


@pytest.mark.parametrize("step", ["onehot", "noisy"])
def test_a_dry_run_counts_what_a_run_sends(step: str):
    for shape in ((70, 3), (0, 2)):
        dry, real = (measured(Session(dry=d), step, shape, drop=0, bits=9) for d in (True, False))
        assert lines_of(dry) == lines_of(real)
        assert dry.bytes == real.bytes


def test_material_can_be_prepared():
    """Labels and nonces of the pair streams do not depend on the query; the pair is made once a session."""
    values, mask = votes((5, 4), 20, 1), ring((5, 4), 2)
    inputs = {"mask": mask, "votes": values - mask}

    def onehot(net):
        held = net.own(net.A, mask, name="mask"), net.own(net.Q, mask, name="votes")
        s, own = argmax_onehot(net, correlate(net.setup, net.A), *held, drop=0, bits=20)
        return net.read(s, net.Q), net.read(own, net.A)

    program = SESSION.trace(onehot)
    material, sent = SESSION.prepare(program, {}), []
    for prepared in (material, None):
        with Profile() as profile:
            s, own = SESSION.run(program, inputs, prepared)
        assert torch.equal(s + own, F.one_hot(values.argmax(-1), 4))
        sent.append({m.phase for m in profile.ledger})
    assert sent == [{Phase.ONLINE}] * 2, "labels are drawn, and the pair was made with the material"


# Each party on its own.


COUNT = 70
VALUES = {name: votes((COUNT, 3), 9, i) for i, name in enumerate(("onehot", "noisy", "onehot_shares", "noisy_shares"))}


def _pair(world: World, garbler):
    if "pair" not in world.kept:
        world.kept["pair"] = correlate(world.setup, garbler)
    return world.kept["pair"]


def _to_Q(world: World, s, own):
    """Both halves at Q, so that the test can see their sum: what the protocol never does."""
    return s + relay(world.net, own, world.net.A, world.net.Q)


HOW = dict(drop=0, bits=10)


def _onehot(world, x, at_Q):
    return _to_Q(world, *argmax_onehot(world.net, _pair(world, world.net.A), x.A, at_Q, **HOW))


def _onehot_shares(world, x, at_Q):
    return _to_Q(world, *argmax_onehot_shares(world.net, x.A, at_Q, **HOW))


def _noisy(world, x, at_Q):
    return argmax_noisy(world.net, _pair(world, world.net.S), x.S, at_Q, **HOW)


def _noisy_shares(world, x, at_Q):
    return argmax_noisy_shares(world.net, x.S, at_Q, **HOW)


def case_of(name: str, run, garbler: str) -> Case:
    values = VALUES[name]

    def program(world: World, x):
        net, mask = world.net, ring((COUNT, 3), 12)
        party = net.A if garbler == "A" else net.S
        held = net.own(party, world.place(party, mask), Phase.ONLINE)
        halves = type(x)(held if garbler == "A" else x.A, held if garbler == "S" else x.S)
        return run(world, halves, net.own(net.Q, world.place(net.Q, values - mask), Phase.ONLINE))

    def check(inputs, outputs):
        expected = values.argmax(-1)
        wanted = F.one_hot(expected, 3) if name.startswith("onehot") else expected
        assert torch.equal(outputs[0], wanted)

    return Case(name, program, check, [Given(shape=(1,))], elementwise=False)


STEPS = [
    case_of("onehot", _onehot, "A"), case_of("noisy", _noisy, "S"),
    case_of("onehot_shares", _onehot_shares, "A"), case_of("noisy_shares", _noisy_shares, "S"),
]  # fmt: skip


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_projections_together_give_the_result_at_Q(case):
    """As in tests/test_projection.py: one party to a thread, with its own keys and nobody else's values."""
    assert_projections_give(case, case.inputs(COUNT))


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_dry_session_runs_every_step(case):
    _, real = run_with_profile(Session(), case, case.inputs(COUNT))
    session = Session(dry=True)
    with Profile() as dry, session.call(session.answering[0]) as net:
        play(world_of(session, net), case.program, case.inputs(COUNT))
    assert lines_of(dry) == lines_of(real)


# Refusals.


@pytest.mark.parametrize("step", [*ONE_HOT.values(), *NOISY.values()])
def test_refusals_send_nothing(step):
    zeros = lambda *shape: torch.zeros(shape).long()
    garbler = A if step in ONE_HOT.values() else S
    cases = [
        (zeros(3, 4), zeros(3, 5), {}, ShapeError, r"\(3, 4\) and \(3, 5\)"),
        (zeros(), zeros(), {}, ShapeError, "one shape"),
        (zeros(3, 1), zeros(3, 1), {}, ArgumentError, "at least two classes, got 1"),
        (zeros(3, 4), zeros(3, 4), dict(drop=0, bits=1), ArgumentError, "got d=0, b=1"),
        (zeros(3, 4), zeros(3, 4), dict(drop=-1, bits=8), ArgumentError, "got d=-1, b=8"),
        (zeros(3, 4), zeros(3, 4), dict(drop=40, bits=32), ArgumentError, "d \\+ b <= 64, got d=40, b=32"),
    ]
    for first, second, how, error, text in cases:
        with SESSION.call(A) as net, Profile() as profile, pytest.raises(error, match=text):
            step(net, net.own(garbler, first), net.own(Q, second), **how)
        assert profile.ledger == []


def test_a_pair_serves_its_own_garbler_and_session():
    zeros, other = torch.zeros(3, 4).long(), Session()
    foreign = correlate(other.setup(other.answering[0]), other.S)
    for step, garbler, pair, error in (
        (argmax_onehot, A, PAIRS[S], MisplacedValueError), (argmax_noisy, S, PAIRS[A], MisplacedValueError),
        (argmax_noisy, S, foreign, SessionMismatchError),
    ):  # fmt: skip
        with SESSION.call(A) as net, Profile() as profile, pytest.raises(error):
            step(net, pair, net.own(garbler, zeros), net.own(Q, zeros))
        assert profile.ledger == []


def test_nothing_but_the_label_and_public_points_is_shown():
    own = {name: spec for name, spec in PROTOCOLS.items() if name.startswith(("garbled", "argmax"))}
    assert len(own) == 13
    shown = {(name, m.label, m.dst) for name, spec in own.items() for m in spec.messages if m.shows}
    assert shown == {
        ("garbled_argmax_noisy", "decoding", "Q"), ("garbled_argmax_confident", "decoding", "Q"),
        ("garbled_pair", "point", "S"), ("garbled_pair", "points", "Q"),
        ("garbled_transfer", "sealed", "Q"),
    }  # fmt: skip
