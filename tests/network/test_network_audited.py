"""Audited dealing over TLS: who asks is looked at, a Q that cheats is told off, banned, and leaves signed evidence."""

from __future__ import annotations

import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from network_world import Trio, until
from torch import nn

import sectorch
from sectorch import errors
from sectorch.audits import _Here
from sectorch.choreography import Phase
from sectorch.choreography.run.party import PartyRuntime
from sectorch.choreography.run.replay import DealerReplay
from sectorch.config import Scheme
from sectorch.mpc.star.audit import Promise
from sectorch.network import answer
from sectorch.network.federation.policy import _rule
from sectorch.network.identity.identity import fingerprint
from sectorch.network.parties.answer import Admission
from sectorch.network.store import Store

AUDITED = Scheme(audited=2)
GOOD = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def insisting(pki, tmp_path):
    """A party that answers audited questions only, with a lasting store, and its model."""
    _, made = pki
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    trio = Trio(made, model, GOOD, tmp_path)
    trio.party.close()
    store = Store(tmp_path / "store-a")
    trio.party = answer(trio.address, made["hospital-b"], model, GOOD, pins=trio.pins, store=store, audited=2)
    yield trio, model
    trio.close()


def cheat(monkeypatch, promising: bool, calls=lambda call: True) -> None:
    """Q adds 1 to all that it deals, and promises so if `promising`."""
    here = threading.local()
    own, rehearsed, sent = _Here.promise, DealerReplay.transfer, PartyRuntime.transfer

    def false(line, value):
        dealt = line.phase == Phase.OFFLINE and line.path != "audit" and line.src.role == "Q" and calls(line.call)
        return value + 1 if dealt else value

    def promise(self):
        here.promising = promising
        try:
            return own(self)
        finally:
            here.promising = False

    def rehearse(self, line, value):
        return rehearsed(self, line, false(line, value) if getattr(here, "promising", False) else value)

    def transfer(self, line, value):
        return sent(self, line, false(line, value) if self.me.role == "Q" else value)

    monkeypatch.setattr(_Here, "promise", promise)
    monkeypatch.setattr(DealerReplay, "transfer", rehearse)
    monkeypatch.setattr(PartyRuntime, "transfer", transfer)


def test_audited_questions_have_the_same_answers(insisting):
    trio, model = insisting
    plain = sectorch.reference(model)(GOOD)
    remote = trio.connection.model("hospital-b", AUDITED)
    assert torch.equal(remote(GOOD), plain) and torch.equal(remote(GOOD), plain)
    remote.prepare(len(GOOD))
    assert torch.equal(remote(GOOD), plain), "what was prepared was audited before"
    assert torch.equal(trio.connection.model("hospital-b", Scheme(audited=3))(GOOD), plain), "more than is asked for"


def test_who_is_not_looked_at_is_not_answered(insisting):
    trio, model = insisting
    with pytest.raises(errors.RefusedError, match=r"ask with Scheme\(audited=2\), or --audited 2"):
        trio.connection.model("hospital-b")
    with pytest.raises(errors.ArgumentError, match="among several answering parties Q is trusted"):
        trio.connection.aggregate(["hospital-b", "bob"], AUDITED)
    assert until(trio.idle, 30)
    assert torch.equal(trio.connection.model("hospital-b", AUDITED)(GOOD), sectorch.reference(model)(GOOD))


def test_who_deals_otherwise_than_it_promised_is_sent_nothing(insisting, monkeypatch):
    trio, model = insisting
    remote = trio.connection.model("hospital-b", AUDITED)
    to_Q = []
    with monkeypatch.context() as patch:
        cheat(patch, promising=False)
        transfer = PartyRuntime.transfer

        def noted(self, line, value):
            came = transfer(self, line, value)
            to_Q.extend([line.path] if line.dst.role == self.me.role == "Q" else [])
            return came

        patch.setattr(PartyRuntime, "transfer", noted)
        with pytest.raises(errors.SectorchError, match="has dealt something else in call"):
            remote(GOOD)
    assert set(to_Q) == {"audit"}, "after the keys, Q was told which call is used, and nothing else"
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)), "which is no evidence, and no ban"


def test_a_false_promise_is_evidence_and_a_ban(insisting, monkeypatch, caplog):
    trio, model = insisting
    folder = trio.party.store.folder
    with monkeypatch.context() as patch:
        cheat(patch, promising=True)
        with pytest.raises(errors.SectorchError, match="promised another dealing of call"):
            trio.connection.model("hospital-b", AUDITED)(GOOD)
    assert until(lambda: list(folder.glob("false-dealing-*.json")), 30)
    (path,) = folder.glob("false-dealing-*.json")
    said = json.loads(path.read_text())
    public = bytes.fromhex(said["public_key"])
    assert said["client"] == "alice" and said["key"] == fingerprint(public) and said["model"] == "hospital-b"
    promise = Promise(
        bytes.fromhex(said["session"]), said["program"], tuple(said["calls"]),
        tuple(map(bytes.fromhex, said["promised"])), tuple(map(bytes.fromhex, said["streams"])),
        bytes.fromhex(said["signature"]),
    )  # fmt: skip
    Ed25519PublicKey.from_public_bytes(public).verify(promise.signature, promise.statement())
    assert said["digest_of_its_streams"] not in said["promised"] and said["call"] in said["calls"]
    assert not any(said[name] in caplog.text for name in ("stream_with_A", "stream_with_S"))

    banned = "'alice' has dealt falsely before, as it has signed"
    with pytest.raises(errors.RefusedError, match=banned):
        trio.connection.model("hospital-b", AUDITED)(GOOD)
    trio.party.close()  # the ban outlives the process
    trio.party = answer(
        trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, store=Store(folder), audited=2
    )  # fmt: skip
    with pytest.raises(errors.RefusedError, match=banned):
        trio.connection.model("hospital-b", AUDITED)(GOOD)
    trio.start_querying(name="bob")
    assert torch.equal(trio.connection.model("hospital-b", AUDITED)(GOOD), sectorch.reference(model)(GOOD))
    path.unlink()
    trio.start_querying(name="alice")
    assert torch.equal(trio.connection.model("hospital-b", AUDITED)(GOOD), sectorch.reference(model)(GOOD))


def test_an_admission_of_no_number_of_calls():
    for wrong in (0, 65, 2.0, True, "2"):
        with pytest.raises(errors.ArgumentError, match="audited is a whole number of calls"):
            Admission(audited=wrong)


def test_who_leaves_when_it_hears_that_it_was_looked_at_has_left_evidence(insisting, monkeypatch):
    """Q promises one false dealing and ends its session as soon as it is told that another call is used."""
    trio, _ = insisting
    folder, told = trio.party.store.folder, []
    for _ in range(12):
        remote = trio.connection.model("hospital-b", AUDITED)
        first: list[int] = []
        with monkeypatch.context() as patch:
            cheat(patch, promising=True, calls=lambda call: call == (first.append(call) or first[0]))
            transfer = PartyRuntime.transfer

            def leaving(self, line, value):
                came = transfer(self, line, value)
                if self.me.role == "Q" and line.label == "chosen":
                    told.append(int(came))
                    raise errors.AbortedError("Q leaves")
                return came

            patch.setattr(PartyRuntime, "transfer", leaving)
            with pytest.raises(errors.SectorchError):
                remote(GOOD)
        if until(lambda: list(folder.glob("false-dealing-*.json")), 0.5):
            break
    assert 1 not in told, "it never heard that another call than its false one is used"
    assert list(folder.glob("false-dealing-*.json"))


def test_sessions_that_are_open_are_no_further_chances(insisting, monkeypatch):
    """Q has opened several, and cheats in all of them at once: what comes after the first that is found is refused."""
    trio, _ = insisting
    remotes = [trio.connection.model("hospital-b", AUDITED) for _ in range(4)]
    said = []

    def ask(remote):
        try:
            remote(GOOD)
        except errors.SectorchError as error:
            said.append(str(error))

    with monkeypatch.context() as patch:
        cheat(patch, promising=True)
        threads = [threading.Thread(target=ask, args=(remote,)) for remote in remotes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(said) == 4 and sum("promised another dealing" in text for text in said) == 1
    assert sum("has dealt falsely before" in text for text in said) == 3


def test_a_full_disk_is_no_way_out(insisting, monkeypatch, caplog):
    trio, _ = insisting

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        cheat(patch, promising=True)
        patch.setattr("sectorch.files.write", full)
        with pytest.raises(errors.SectorchError, match="promised another dealing"):
            trio.connection.model("hospital-b", AUDITED)(GOOD)
        assert until(lambda: "not kept: No space left on device" in caplog.text, 30)
    with pytest.raises(errors.RefusedError, match="has dealt falsely before"):
        trio.connection.model("hospital-b", AUDITED)(GOOD)


@pytest.mark.parametrize("said", [0, 65, 2.0, True, "2"])
def test_a_policy_says_how_many(said):
    federated = SimpleNamespace(member=lambda name: SimpleNamespace(name=name))
    accepted = partial(_rule, own=None, federated=federated)
    model = {"model": "m.safetensors", "clients": ["alice"]}
    assert accepted({**model, "audited": 3}).audited == 3 and accepted(model).audited == 1
    with pytest.raises(errors.ArgumentError, match=r"audited in .* is 1 to 64 calls"):
        accepted({**model, "audited": said})
