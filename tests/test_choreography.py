"""One program, three parties: what a choreography refuses, how it counts, and the ways in which it can be run."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import long, some
from helpers import CASES, lines_of, ring_values, run, run_with_profile, stands
from helpers import session as shared_session

from sectorch.choreography import PROTOCOLS, Message, Net, Party, Phase, protocol
from sectorch.choreography.ledger import Profile
from sectorch.choreography.located import ArgumentSlot, PartialCall, compute, leaf, run_on_shapes
from sectorch.choreography.net import Compute
from sectorch.choreography.roles import STAR, Cast
from sectorch.errors import (
    ArgumentError,
    KeyAgreementError,
    MisplacedValueError,
    SecretBranchError,
    SessionMismatchError,
    StreamReuseError,
    TopologyError,
    UndeclaredMessageError,
)
from sectorch.mpc.star.key_agreement import seed
from sectorch.mpc.star.shares import share
from sectorch.mpc.star.truncate import truncate
from sectorch.session import Session


def declared(*messages: Message):
    """A protocol of this test only: run at once, and taken off the list again."""

    def decorate(f):
        wrapped = protocol("of_a_test", "tests", messages)(f)
        del PROTOCOLS["of_a_test"]
        return wrapped

    return decorate


@pytest.fixture
def net():
    session = shared_session()
    with session.call(session.answering[0]) as net:
        yield net


# What is refused.


def test_a_party_cannot_compute_on_what_it_does_not_hold(net):
    at_Q = net.own(net.Q, torch.ones(2, 3))
    at_QA = net.common(net.Q, net.A, (2, 3), "r")
    with pytest.raises(MisplacedValueError, match=r"S cannot compute add: a value of shape \(2, 3\) is at Q only"):
        net.fresh(net.S, torch.add, at_Q, 1)
    with pytest.raises(MisplacedValueError, match=r"nobody holds all that add takes: \(2, 3\) at A, Q; \(2, 3\) at S;"):
        at_QA + net.own(net.S, torch.ones(2, 3))
    with pytest.raises(MisplacedValueError, match=r"A does not hold a value of shape \(2, 3\), which is at Q"):
        at_Q.at("A")
    with pytest.raises(SecretBranchError, match="add_ changes a tensor in place"):
        at_Q.add_(1)
    with pytest.raises(SecretBranchError, match="in place"):
        torch.add(at_Q, 1, out=torch.ones(2, 3))
    assert (at_Q + at_QA).owners == {net.Q} and (at_QA + 1).owners == {net.Q, net.A}
    with pytest.raises(MisplacedValueError, match=r"S cannot read a value held by \['A', 'Q'\]"):
        net.read(at_QA, net.S)
    assert net.read(at_QA - at_QA, net.Q).count_nonzero() == 0


@declared(Message("a", "A", "S", ""), Message("b", "S", "A", ""), Message("c", "Q", "S", ""))
def send(net: Net, value, src: Party, dst: Party, label: str):
    return net.send(value, src, dst, label)


def test_clients_have_no_channel_to_each_other(net):
    for src, dst, label in ((net.Q, net.A, "a"), (net.A, net.Q, "b"), (net.S, net.S, "b"), (net.Q, net.Q, "c")):
        with pytest.raises(TopologyError, match=f"no channel from {src} to {dst}"):
            send(net, net.own(src, torch.ones(1)), src, dst, label)


def test_only_a_holder_sends(net):
    with pytest.raises(MisplacedValueError, match="Q cannot send 'c': it does not hold the value"):
        send(net, net.own(net.A, torch.ones(1)), net.Q, net.S, "c")


def test_messages_are_declared(net):
    value = net.own(net.Q, torch.ones(1))
    with Profile() as profile:
        with pytest.raises(UndeclaredMessageError, match="'c' was sent outside a protocol"):
            net.send(value, net.Q, net.S, "c")
        with pytest.raises(UndeclaredMessageError, match="sent 'z', which it does not declare; it declares a, b, c"):
            send(net, value, net.Q, net.S, "z")
        with pytest.raises(UndeclaredMessageError, match="'c' from Q to S, not from S to Q"):
            send(net, net.own(net.S, torch.ones(1)), net.S, net.Q, "c")
        with pytest.raises(UndeclaredMessageError, match="declares 'c' from Q to S, not from S to A"):
            send(net, net.own(net.S, torch.ones(1)), net.S, net.A, "c")
    assert profile.ledger == [], "nothing was sent"
    assert net._stack == [], "a failed protocol is left"


def test_an_inner_protocol_does_not_send_under_the_outer_declaration(net):
    @declared()
    def inner(net):
        return send.__wrapped__(net, net.own(net.Q, torch.ones(1)), net.Q, net.S, "c")

    @declared(Message("c", "Q", "S", ""))
    def outer(net):
        return inner(net)

    with pytest.raises(UndeclaredMessageError, match="declares no message"):
        outer(net)


BRANCHES = dict(
    bool=bool, len=len, iter=iter, list=list, index=lambda v: [1, 2][v], float=float, int=int,
    eq=lambda v: bool(v == v), eq_number=lambda v: [v != 0].index(True), ne=lambda v: 1 if v != 0 else 2,
    lt=lambda v: sorted((v, v)), le=lambda v: 0 <= v <= 2, ge=lambda v: v >= 0 or v,
    contains=lambda v: 1 in v, unpack=lambda v: (lambda *_: 0)(*v), is_in=lambda v: v in [1, 2],
    match=lambda v: 0 if v else 1, complex=complex, range=lambda v: range(v), sum=sum, math=math.floor,
)  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_a_located_value_steers_no_control_flow(name: str, net):
    for value in (net.own(net.Q, torch.ones(1, dtype=torch.int64)), net.own(net.Q, 3)):
        with pytest.raises(TypeError) as raised:
            BRANCHES[name](value)
        if name not in ("complex", "math", "contains"):  # Python refuses these with a TypeError of its own
            assert isinstance(raised.value, SecretBranchError)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_located_value_cannot_be_taken_away(duplicate, net):
    with pytest.raises(SecretBranchError, match="cannot be copied or pickled"):
        duplicate(net.own(net.Q, torch.ones(1)))
    with pytest.raises((ArgumentError, StreamReuseError, SecretBranchError, TypeError)):
        duplicate(shared_session())


def test_representations_show_no_content(net):
    x = torch.tensor([123456789, 987654321])
    shares = share(net, net.own(net.Q, x))
    shown = [repr(v) for v in (net.own(net.Q, x), shares, shares.A, shares.S, net, shared_session())]
    assert shown[0] == "Located((2,) at Q, online)"
    assert shown[2] == "Located((2,) at A, offline)"
    for value in (*x, *shares.A._value, *shares.S._value):
        assert str(value.item()) not in " ".join(shown)


def test_values_of_two_sessions_do_not_meet(net):
    other = Session()
    x = ring_values((5,))
    with other.call(other.answering[0]) as elsewhere:
        theirs = share(elsewhere, elsewhere.own(elsewhere.Q, x))
        ours = share(net, net.own(net.Q, x))
        for attempt in (
            lambda: ours + theirs,
            lambda: truncate(net, theirs, 20),
            lambda: net.read(theirs.A, net.A),
            lambda: send(net, elsewhere.own(elsewhere.Q, x), net.Q, net.S, "c"),
        ):
            with pytest.raises(SessionMismatchError, match="two sessions"):
                attempt()


def test_a_session_has_an_answering_party():
    with pytest.raises(ArgumentError, match="at least one answering party, got 0"):
        Session(0)


def test_a_party_is_one_object_of_its_name_and_role():
    party = Party("A", "A")
    for again in (Party(name="A", role="A"), copy.deepcopy(party), pickle.loads(pickle.dumps(party))):
        assert again is party
    assert party not in {Party("A", "S"), Party("B", "A")}
    with pytest.raises(AttributeError, match="stays as it is"):
        party.name = "B"
    with pytest.raises(AttributeError, match="stays as it is"):
        del party.name
    with pytest.raises(TypeError, match="no kinds"):
        type("Other", (Party,), {})


def test_two_ends_that_did_not_agree_on_a_key():
    session = Session()
    net = session.setup(session.answering[0])
    with pytest.raises(KeyAgreementError, match="did not agree on one key"):
        net.install(net.Q, net.A, net.own(net.Q, torch.arange(32, dtype=torch.uint8)))
    fresh = Party("B", "A")
    with pytest.raises(KeyAgreementError, match="hold no pair key yet"):
        cast = Cast(STAR, {"Q": net.Q, "A": fresh, "S": net.S, "D": net.Q})
        Net(session.runtime, 77, cast, Phase.OFFLINE).common(net.Q, fresh, (1,), "r")


# Phases and rounds.


@declared(*(Message(f"{s}{d}", s, d, "") for s, d in ("QS", "SQ", "SA", "AS")))
def hops(net: Net, value, path: str):
    for src, dst in itertools.pairwise(path):
        value = net.send(value, getattr(net, src), getattr(net, dst), src + dst)
    return value


def words(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.int32)


def test_phases_and_rounds_follow_data_dependence(net):
    setup = shared_session().setup(net.A)
    with Profile() as profile:
        weight = hops(setup, setup.own(net.A, words(5), Phase.SETUP), "AS")
        assert (weight.phase, weight.rounds) == (Phase.SETUP, {net.S: 1})
        # In a call the weight counts as there from the start: what depends on it alone is sent ahead of the query.
        early = hops(net, weight, "SQ")
        assert (early.phase, early.rounds) == (Phase.OFFLINE, {net.Q: 1})
        mask = hops(net, net.common(net.Q, net.A, (4,), "r", torch.int32), "QSA")
        assert (mask.phase, mask.rounds) == (Phase.OFFLINE, {net.S: 1, net.A: 2})
        both = early[:4] + mask
        assert (both.phase, both.rounds) == (Phase.OFFLINE, {net.Q: 1, net.S: 1, net.A: 2})
        assert hops(net, both, "AS").rounds == {net.Q: 1, net.S: 3, net.A: 2}

        # Three offline rounds behind a value cost the query nothing; its own rounds start anew.
        query = hops(net, net.own(net.Q, words(3)), "QS")
        assert (query.phase, query.rounds) == (Phase.ONLINE, {net.S: 1})
        mixed = query + both[:3]
        assert (mixed.phase, mixed.rounds) == (Phase.ONLINE, {net.S: 1})
        answer = hops(net, mixed, "SASQ")
        assert (answer.phase, answer.rounds) == (Phase.ONLINE, {net.S: 3, net.A: 2, net.Q: 4})
        # Two messages that do not wait for each other share a round.
        hops(net, net.own(net.A, words(1)), "AS")
    rounds = [(line.phase.name, line.round, line.bytes) for line in profile.ledger]
    assert rounds == [
        ("SETUP", 1, 20), ("OFFLINE", 1, 20), ("OFFLINE", 1, 16), ("OFFLINE", 2, 16), ("OFFLINE", 3, 16),
        ("ONLINE", 1, 12), ("ONLINE", 2, 12), ("ONLINE", 3, 12), ("ONLINE", 4, 12), ("ONLINE", 1, 4),
    ]  # fmt: skip
    assert [profile.rounds_of(phase) for phase in Phase] == [1, 3, 4]
    assert profile.rounds == 4


def test_local_work_takes_no_round(net):
    x = net.own(net.Q, torch.ones(3))
    for _ in range(5):
        x = -x
    a, b = compute(lambda v: (v, v + 1), x)
    assert (a.rounds, b.rounds, b.phase) == ({}, {}, Phase.ONLINE)


def _set(v, plain):
    plain[:] = v


CHANGES = dict(
    setitem=_set, relu=lambda v, p: F.relu(v, inplace=True), iadd=lambda v, p: compute(operator.iadd, v, 1),
    dunder=lambda v, p: compute(torch.Tensor.__imul__, v, 2), item=lambda v, p: compute(operator.setitem, v, 0, 9),
    its=lambda v, p: compute(torch.Tensor.__setitem__, v, 0, 9), aten=lambda v, p: torch.ops.aten.add_.Tensor(p, v),
    norm=lambda v, p: F.batch_norm(v.view(3, 1), p[:1], p[:1], training=True), method=lambda v, p: v.add_(1),
    out=lambda v, p: torch.add(v, 1, out=p),
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_located_value_is_not_changed_and_changes_no_plain_tensor(name: str, net):
    v, plain = net.own(net.Q, torch.tensor([-1.0, 0.0, 2.0])), torch.zeros(3)
    with pytest.raises(SecretBranchError, match="in place"):
        CHANGES[name](v, plain)
    assert torch.equal(net.read(v, net.Q), torch.tensor([-1.0, 0.0, 2.0])) and not plain.count_nonzero()


@pytest.mark.parametrize("name", ["item", "tolist", "numpy"])
def test_the_content_of_a_located_value_is_for_read_alone(name: str, net):
    v = net.own(net.Q, torch.tensor([3.0]))
    with pytest.raises(SecretBranchError, match="asks for the content"):
        getattr(v, name)()
    with pytest.raises(SecretBranchError, match="asks for the content"):
        torch.equal(v, v)


# One program run in several ways.


@pytest.mark.parametrize("case", some(CASES, stands), ids=str)
@pytest.mark.parametrize("n", [70, *long(1, 64)])
def test_a_dry_run_sends_what_a_real_one_sends(case, n: int):
    inputs = case.inputs(n)
    outputs, real = run_with_profile(Session(case.answering), case, inputs)
    shapes, dry = run_with_profile(Session(case.answering, dry=True), case, inputs)
    case.check(inputs, outputs)
    assert lines_of(real) == lines_of(dry)
    assert [(s.shape, s.dtype) for s in shapes] == [(o.shape, o.dtype) for o in outputs]
    assert all(s.is_meta for s in shapes)
    assert (dry.rounds, dry.bytes) == (real.rounds, real.bytes)


def test_the_seeding_of_a_session():
    with Profile() as real:
        Session(2)
    assert len(real.ledger) == 8 + 7, "the second answering party shares k_SQ"
    with Profile() as opened:
        dry = Session(2, dry=True)
    assert opened.ledger == [], "a dry session stands for one that is open already"
    with Profile() as again:
        for i, party in enumerate(dry.answering):
            seed(dry.setup(party), first=i == 0)
    assert lines_of(again) == lines_of(real)


@pytest.mark.parametrize("case", some(CASES, stands), ids=str)
def test_functions_of_a_protocol_leave_their_arguments_alone(case, monkeypatch):
    inner, seen = Compute.run, []

    def run_(step, runtime, call, values):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in values]
        result = inner(step, runtime, call, values)
        for was, now in zip(before, values, strict=True):
            assert not isinstance(was, torch.Tensor) or was.is_meta or torch.equal(was, now), step
        seen.append(step)
        return result

    monkeypatch.setattr(Compute, "run", run_)
    run(case.program, *case.inputs(70), session=Session(case.answering))
    assert seen


@leaf
def _two(x: torch.Tensor, scale) -> tuple[torch.Tensor, torch.Tensor]:
    return x * scale, x[0]


def test_a_kept_shape_is_torchs():
    """Twice each, so that the second is looked up; arguments that are equal and not the same do not meet."""
    f = operator
    x, wide = (torch.empty(s, dtype=torch.int64, device="meta") for s in ((2, 3), (4, 1, 3)))
    small, turned = x.to(torch.int32), torch.empty(3, 2, dtype=torch.int64, device="meta").T
    calls = [(op, a, b) for op in (f.add, f.lt, f.xor) for a in (x, small, turned) for b in (x, wide, 1, True, turned)]
    calls += [(f.mul, x, one) for one in (1, 1.0, True)] + [(f.getitem, x, at) for at in (1, 0, True, False)]
    calls += [(f.getitem, x, (slice(None), at)) for at in (slice(1, None), slice(None, 1), 1, True, None)]
    calls += [
        (PartialCall(torch.sum, (ArgumentSlot(0),), dict(dim=dim, keepdim=kept)), x)
        for dim in (0, 1)
        for kept in (False, True)
    ]
    calls += [(PartialCall(torch.clamp, (ArgumentSlot(0),), dict(min=low)), x) for low in (0, 0.0)]
    calls += [(_two.kernel, x, scale) for scale in (1, 2.0)] + [
        (lambda y, shape=shape: y.view(shape), x) for shape in (6, (3, 2))
    ]
    for _ in range(2):
        for g, *values in calls:
            found, wanted = run_on_shapes(g, values), g(*values)
            for y, like in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, wanted)), strict=True):
                assert (y.shape, y.stride(), y.dtype, y.is_meta) == (like.shape, like.stride(), like.dtype, True)
    assert run_on_shapes(f.add, (x, 1)) is not run_on_shapes(f.add, (x, 1))


def test_words_are_drawn_where_the_session_is():
    session = Session(device="meta")
    assert session.runtime.draw(frozenset((session.Q, session.S)), "words", 1 << 20, 0, 3).is_meta
