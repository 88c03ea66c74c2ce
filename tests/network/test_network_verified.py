"""Verified dealing over TLS: who asks proves what it deals, and a Q that deals falsely is shown nothing."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from network_world import Trio, until
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography import Phase
from sectorch.choreography.program.projection import Projection
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.network import Store, answer
from sectorch.network.commands.ask import query
from sectorch.network.federation.policy import _rule
from sectorch.network.messages import NumberFormat, message_form, parse_message
from sectorch.network.parties.answer import Admission
from sectorch.network.parties.session import scheme_from_message, scheme_to_message

VERIFIED = Scheme(verified=True)
GOOD = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def insisting(pki, tmp_path):
    """A party that answers only those who prove what they deal, and its model."""
    _, made = pki
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    trio = Trio(made, model, GOOD, tmp_path)
    trio.party.close()
    trio.party = answer(trio.address, made["hospital-b"], model, GOOD, pins=trio.pins, verified=True)
    yield trio, model
    trio.close()


def changed(monkeypatch, change) -> list[str]:
    """What Q sends ahead of a query is changed by change(line, value); the protocols in which Q is sent something.

    By Q alone: the others are in this process too, and as they are.
    """
    sent, to_Q = PartyRuntime.transfer, []

    def transfer(self, line, value):
        mine = self.me.role == "Q" and line.src == self.me and line.phase == Phase.OFFLINE
        came = sent(self, line, change(line, value) if mine else value)
        if line.dst.role == self.me.role == "Q":
            to_Q.append(line.path)
        return came

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    return to_Q


def test_questions_have_the_same_answers(insisting):
    trio, model = insisting
    plain = sectorch.reference(model)(GOOD)
    remote = trio.connection.model("hospital-b", VERIFIED)
    assert torch.equal(remote(GOOD), plain) and torch.equal(remote(GOOD), plain)
    remote.prepare(len(GOOD))
    assert torch.equal(remote(GOOD), plain), "what was prepared was proved before"


def test_who_does_not_prove_is_not_answered(insisting):
    trio, model = insisting
    for scheme in (Scheme(), Scheme(audited=4)):
        with pytest.raises(errors.RefusedError, match=r"ask with Scheme\(verified=True\), or --verified"):
            trio.connection.model("hospital-b", scheme)
    assert until(trio.idle, 30)
    assert torch.equal(trio.connection.model("hospital-b", VERIFIED)(GOOD), sectorch.reference(model)(GOOD))


@pytest.mark.parametrize("label", ["v_S", "c_S", "more_S", "proof_S"])
def test_who_deals_or_proves_falsely_is_shown_nothing(insisting, monkeypatch, caplog, label):
    trio, model = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    with monkeypatch.context() as patch:
        to_Q = changed(patch, lambda line, value: value + 1 if line.label == label else value)
        with pytest.raises(errors.FalseDealingError, match="dealt something else") as caught:
            remote(GOOD)
    assert nothing_but_coins(to_Q)
    assert "share" not in str(caught.value)
    assert until(trio.idle, 30)
    logged = [(r.name, r.facts) for r in caplog.records if r.getMessage().startswith("false dealing")]
    assert {name for name, _ in logged} == {"sectorch.server", "sectorch.answer"}, "a line at S, and one at A"
    assert len(logged) == 2 and all(facts["client"] == "alice" for _, facts in logged)
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)), "the next question is taken"


def nothing_but_coins(to_Q: list[str]) -> bool:
    return {path.rsplit("/", 1)[-1] for path in to_Q} <= {"prove", "seed", "agree"}


@pytest.mark.parametrize("cut", [lambda v: v[:-1], lambda v: v[:0], lambda v: v.to(torch.int32), lambda v: v[None]])
def test_a_proof_of_another_form_is_refused(insisting, monkeypatch, cut):
    trio, model = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    with monkeypatch.context() as patch:
        to_Q = changed(patch, lambda line, value: cut(value) if line.label == "proof_S" else value)
        with pytest.raises(errors.SectorchError) as caught:
            remote(GOOD)
    assert isinstance(caught.value, errors.NetworkError), (type(caught.value), caught.value)
    assert nothing_but_coins(to_Q) and until(trio.idle, 30)
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD))


def test_nothing_is_shown_to_who_sends_no_proof(insisting, monkeypatch):
    """Q is gone when it should send a part of it: each part, in turn. What it sent before was right."""
    trio, model = insisting
    parts, before = [0], []

    def leaves(line, value):
        if line.label == "proof_S":
            parts[0] += 1
            before.append(nothing_but_coins(to_Q))
            if parts[0] == wanted:
                trio.kill("Q")
        return value

    for wanted in (1, 2, 0):
        parts[0] = 0
        remote = trio.connection.model("hospital-b", VERIFIED)
        with monkeypatch.context() as patch:
            to_Q = changed(patch, leaves)
            if wanted == 0:
                assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD))
                break
            with pytest.raises(errors.NetworkError):
                remote(GOOD)
        assert nothing_but_coins(to_Q) and until(lambda: trio.server.sessions == 0, 30)
        trio.restart("Q")
    assert parts[0] >= 2 and all(before), "until its last part, nothing is shown"
    assert not nothing_but_coins(to_Q), "and then the result is"


def test_who_withholds_its_proof_until_it_is_too_late_is_shown_nothing(insisting, monkeypatch):
    """Q is there, and beats, and sends its proof when S has given the call up. All that it sends is right."""
    trio, model = insisting
    remote, late = trio.connection.model("hospital-b", VERIFIED), []

    def withhold(line, value):
        if line.label == "proof_S" and not late:
            late.append(until(lambda: trio.server.sessions == 0, 30))
        return value

    with monkeypatch.context() as patch:
        to_Q, failed = changed(patch, withhold), failures(patch)
        hurried(patch, 0.5)
        with pytest.raises(errors.AbortedError, match="PeerLostError: alice has said nothing"):
            remote(GOOD)
        assert late == [True] and nothing_but_coins(to_Q) and until(trio.idle, 30)
    assert failed.pop("A", errors.AbortedError) is errors.AbortedError, "unless it had done its part"
    assert failed == {"S": errors.PeerLostError, "Q": errors.AbortedError}
    assert torch.equal(trio.connection.model("hospital-b", VERIFIED)(GOOD), sectorch.reference(model)(GOOD))


def hurried(monkeypatch, seconds: float) -> None:
    """S waits so long for a part of a proof, and as usual for everything else."""
    sent = PartyRuntime.transfer

    def transfer(self, line, value):
        if line.label != "proof_S" or self.me.role != "S":
            return sent(self, line, value)
        deadline = self._channels[line.src].deadline
        usual, deadline.silence = deadline.silence, seconds
        try:
            return sent(self, line, value)
        finally:
            deadline.silence = usual

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)


def failures(monkeypatch) -> dict[str, type]:
    """By role, with which error a party's part of a call ends."""
    take, found = Projection.call, {}

    def call(self, runtime, *args):
        try:
            return take(self, runtime, *args)
        except errors.SectorchError as error:
            found[runtime.me.role] = type(error)
            raise

    monkeypatch.setattr(Projection, "call", call)
    return found


@pytest.mark.parametrize("other_session", [False, True])
def test_a_proof_that_is_another_calls_fails(insisting, monkeypatch, other_session):
    """Every word of it is replaced by that of the call before, of this session or of another."""
    trio, _ = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    kept: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        changed(patch, lambda line, value: (line.label == "proof_S" and kept.append(value.clone())) or value)
        remote(GOOD)
    if other_session:
        remote.close()
        remote = trio.connection.model("hospital-b", VERIFIED)
    with monkeypatch.context() as patch:
        changed(patch, lambda line, value: kept.pop(0) if line.label == "proof_S" else value)
        with pytest.raises(errors.FalseDealingError, match="its proof fails"):
            remote(GOOD)
    assert not kept


def test_an_end_has_the_same_form_for_any_model_and_input(insisting, monkeypatch):
    """The same words, and before it the same messages to Q, of the same sizes, whatever the query and the weights."""
    trio, model = insisting
    ends = []
    for scale in (1, 3):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter *= scale
        trio.party.close()
        trio.party = answer(trio.address, trio.made["hospital-b"], other, GOOD, pins=trio.pins, verified=True)
        for x in (GOOD, torch.zeros(3, 4)):
            for label in ("c_S", "v_S"):
                remote = trio.connection.model("hospital-b", VERIFIED)
                with monkeypatch.context() as patch:
                    false = lambda line, value, label=label: value + 1 if line.label == label else value
                    to_Q, sizes = changed(patch, false), came_to_Q(patch)
                    with pytest.raises(errors.FalseDealingError) as caught:
                        remote(x)
                ends.append((label, str(caught.value), to_Q, sizes))
    for label in ("c_S", "v_S"):
        first, *others = [end[1:] for end in ends if end[0] == label]
        assert others == [first] * 3


def test_a_query_beyond_the_range_has_no_result(insisting, monkeypatch):
    """Q shares other words than its input's, and deals and proves as it should."""
    trio, model = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    sent = PartyRuntime.transfer

    def transfer(self, line, value):
        lies = self.me.role == "Q" and line.src == self.me and line.label == "x_S"
        return sent(self, line, value + (1 << 45) if lies else value)

    with monkeypatch.context() as patch:
        patch.setattr(PartyRuntime, "transfer", transfer)
        with pytest.raises(errors.RangeExceededError):
            remote(GOOD)
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)), "the next question is taken"


def came_to_Q(monkeypatch) -> list[tuple]:
    """The labels and shapes of what Q is sent."""
    sent, came_there = PartyRuntime.transfer, []

    def transfer(self, line, value):
        came = sent(self, line, value)
        if line.dst.role == self.me.role == "Q":
            came_there.append((line.label, tuple(came.shape), came.dtype))
        return came

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    return came_there


def test_what_was_prepared_falsely_is_kept_by_nobody_who_uses_it(pki, tmp_path, monkeypatch):
    """S has no half of it, on disk either, and what was prepared without a proof is not used with one."""
    _, made = pki
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    trio = Trio(made, model, GOOD, tmp_path)
    trio.connection.close()
    trio.start_querying(Store(tmp_path / "store-q"))
    try:
        remote = trio.connection.model("hospital-b", VERIFIED)
        with monkeypatch.context() as patch:
            changed(patch, lambda line, value: value + 1 if line.label == "v_S" else value)
            with pytest.raises(errors.FalseDealingError):
                remote.prepare(len(GOOD))
        assert until(trio.idle, 30)
        assert not any(len(shelf) for shelf in trio.server.store.shelves())
        assert remote.prepared() == {}
        plain = trio.connection.model("hospital-b")
        plain.prepare(len(GOOD))
        assert plain.prepared() and trio.connection.model("hospital-b", VERIFIED).prepared() == {}
        plain.close()
        for shelf in trio.connection.store.shelves():  # Q says that it is another's
            monkeypatch.setattr(shelf, "binding", replace(shelf.binding, scheme=repr(VERIFIED)))
        with pytest.raises(errors.MaterialError, match="another client, model or number format"):
            trio.connection.model("hospital-b", VERIFIED)
        remote = trio.connection.model("hospital-b", VERIFIED)
        assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD))
    finally:
        trio.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--network", "wan"], "of fast links such as network='lan', got network='wan'"),
        (["--audited", "2"], "name one of the two"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(tmp_path, capsys, options, said):
    assert query(["hospital-b", str(tmp_path / "x.npy"), "--verified", *options]) != 0
    lines = capsys.readouterr().err.strip()
    assert said in " ".join(lines.split()) and "Traceback" not in lines


def test_a_request_without_the_word_is_one_without_a_proof():
    """As a client of before sends it."""
    said = message_form(scheme_to_message(VERIFIED))
    assert scheme_from_message(parse_message(NumberFormat, said)) == VERIFIED
    del said["verified"]
    assert scheme_from_message(parse_message(NumberFormat, said)) == Scheme()
    for wrong in ("yes", 1, None):
        with pytest.raises(errors.FrameError, match="verified: expected `bool`"):
            parse_message(NumberFormat, {**said, "verified": wrong})


def test_what_an_operator_asks_for_is_one_thing():
    Admission(verified=True).check("clinic", VERIFIED, 3)
    Admission(audited=4).check("clinic", VERIFIED, 1)
    with pytest.raises(errors.ArgumentError, match="name one of the two"):
        Admission(verified=True, audited=2)
    federated = SimpleNamespace(member=lambda name: SimpleNamespace(name=name))
    said = {"model": "lenet", "clients": ["alice"]}
    assert _rule({**said, "verified": True}, None, federated).verified is True
    assert _rule(said, None, federated).verified is False
    with pytest.raises(errors.ArgumentError, match="true or false"):
        _rule({**said, "verified": 2}, None, None)
