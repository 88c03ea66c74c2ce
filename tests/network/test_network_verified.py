"""Verified dealing over TLS: who asks proves what it deals, and a Q that deals falsely is shown nothing."""

from __future__ import annotations

import pytest
import torch
from network_world import Trio, until
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography import Phase
from sectorch.choreography.run.party import PartyRuntime
from sectorch.network import answer
from sectorch.network.federation.policy import _accepted
from sectorch.network.parties.admission import Admission
from sectorch.network.parties.said import scheme_in, scheme_of
from sectorch.ring.scheme import Scheme

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
    """What Q sends ahead of a query is changed by change(line, value); the protocols in which Q is sent something."""
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
        with pytest.raises(errors.RefusedError, match=r"ask with Scheme\(verified=True\)"):
            trio.connection.model("hospital-b", scheme)
    assert until(trio.idle, 30)
    assert torch.equal(trio.connection.model("hospital-b", VERIFIED)(GOOD), sectorch.reference(model)(GOOD))


@pytest.mark.parametrize("label", ["v_S", "c_S", "more_S", "proof_S"])
def test_who_deals_or_proves_falsely_is_shown_nothing(insisting, monkeypatch, label):
    trio, model = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    with monkeypatch.context() as patch:
        to_Q = changed(patch, lambda line, value: value + 1 if line.label == label else value)
        with pytest.raises(errors.SectorchError, match="dealt something else") as caught:
            remote(GOOD)
    assert {path.rsplit("/", 1)[-1] for path in to_Q} <= {"prove", "seed", "agree"}, "coins, and nothing else"
    assert "share" not in str(caught.value)
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)), "the next question is taken"


def test_a_proof_that_is_another_calls_fails(insisting, monkeypatch):
    """Of the same session: every word of it is replaced by that of the call before."""
    trio, _ = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    kept: dict[tuple[int, str], list] = {}

    def again(line, value):
        if line.label != "proof_S":
            return value
        before = kept.setdefault((line.call, "sent"), [])
        before.append(value.clone())
        first = kept[min(kept)]
        return first[len(before) - 1] if len(kept) > 1 else value

    with monkeypatch.context() as patch:
        changed(patch, again)
        remote(GOOD)
        with pytest.raises(errors.SectorchError, match="dealt something else"):
            remote(GOOD)


def test_an_end_has_the_same_form_for_any_model_and_input(insisting, monkeypatch):
    """The same words, and the same messages to Q before it, whatever the query."""
    trio, _ = insisting
    remote = trio.connection.model("hospital-b", VERIFIED)
    ends = []
    for x in (GOOD, torch.zeros(3, 4), -100 * GOOD):
        with monkeypatch.context() as patch:
            to_Q = changed(patch, lambda line, value: value + 1 if line.label == "v_S" else value)
            with pytest.raises(errors.SectorchError) as caught:
                remote(x)
        ends.append((type(caught.value), str(caught.value), [path for path in to_Q if path != "seed"]))
    assert ends[0] == ends[1] == ends[2]


def test_a_request_without_the_word_is_one_without_a_proof():
    """As a client of before sends it."""
    request = scheme_in(VERIFIED)
    assert scheme_of(request) == VERIFIED
    del request["verified"]
    assert scheme_of(request) == Scheme()
    for wrong in ("yes", 1, None):
        with pytest.raises(errors.FrameError):
            scheme_of({**request, "verified": wrong})


def test_what_an_operator_asks_for_is_one_thing():
    Admission(verified=True).check("clinic", VERIFIED, 3)
    Admission(audited=4).check("clinic", VERIFIED, 1)
    with pytest.raises(errors.ArgumentError, match="name one of the two"):
        Admission(verified=True, audited=2)
    with pytest.raises(errors.ArgumentError, match="true or false"):
        _accepted({"model": "lenet", "clients": [], "verified": 2}, None, None)
