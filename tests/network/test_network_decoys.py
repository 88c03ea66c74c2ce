"""Decoys over TLS: who is not able to take part is refused, an S that cheats leaves evidence that anybody checks."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import check_refused_number
from network_world import Trio, until
from torch import nn

import sectorch
from sectorch import decoys, errors
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.decoys import Decoys, KnownAnswers
from sectorch.network import answer, receipts, server_evidence
from sectorch.network.audit import audit, compare
from sectorch.network.commands.ask import query
from sectorch.network.identity.commitment import commitment_to, opens, sign_version, signer_of
from sectorch.network.identity.identity import Credentials, fingerprint_of, new_identity, read_identity
from sectorch.network.memory import MemoryBound
from sectorch.network.model_audit import check_model_command, read_record
from sectorch.network.parties.remote_model import PendingQueries
from sectorch.network.parties.server import Registry
from sectorch.network.store import Store
from sectorch.nn.inputs import Inputs
from sectorch.serving.model_file import read_model, save_model

ACCOUNTABLE = Scheme(accountable=True)
GOOD = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def checking(pki, tmp_path):
    """A party that checks the server, with a lasting store, and its model."""
    _, made = pki
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    made = dict(made)
    server = made["server"]
    if server.identity is None:
        identity = new_identity()
        made["server"] = Credentials(server.certificate, server.key, server.authority, identity)
    trio = Trio(made, model, GOOD, tmp_path)
    trio.party.close()
    store = Store(tmp_path / "store-a")
    trio.key = fingerprint_of(made["server"].identity)
    trio.party = answer(
        trio.address, made["hospital-b"], model, GOOD, pins=trio.pins, store=store, audit_server=trio.key
    )
    yield trio, model
    trio.close()


def coins(monkeypatch, *flips: bool) -> None:
    left = iter(flips)
    monkeypatch.setattr(Decoys, "flip", lambda self: next(left, False))


def falsify(monkeypatch) -> None:
    """S changes a word of what it sends A for the first layer."""
    own = PartyRuntime.transfer

    def transfer(self, line, value):
        false = self.me.role == "S" == line.src.role and line.label == "m"
        return own(self, line, value + (1 << 20) if false else value)

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)


def test_questions_and_decoys_have_the_bits_of_the_reference(checking, monkeypatch):
    trio, model = checking
    plain = sectorch.reference(model)(GOOD)
    coins(monkeypatch, False, True, True, False, True, False)
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    assert all(torch.equal(remote(GOOD), plain) for _ in range(3))
    assert remote.decoys_asked == 3
    assert until(lambda: remote(GOOD) is not None and remote.decoys_checked == 3, 30)
    remote.prepare(GOOD, 2)
    coins(monkeypatch, True, False)
    assert torch.equal(remote(GOOD), plain) and not remote.prepared()
    assert torch.equal(trio.connection.model("hospital-b")(GOOD), plain), "who does not ask for it is answered too"


def test_a_server_that_cheats_in_a_decoy_leaves_evidence(checking, monkeypatch, caplog, capsys):
    trio, model = checking
    folder = trio.party.store.folder
    coins(monkeypatch, False, False, True, False)  # no decoy is asked again: that would find S out at once
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    remote(GOOD)
    with monkeypatch.context() as patch:
        falsify(patch)
        assert not torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)), "no decoy, and nobody notices"
        with pytest.raises(errors.SectorchError) as caught:
            while True:  # A checks beside the calls: it may find S out one call later
                remote(GOOD)
    assert "something else" in str(caught.value) or "other messages" in str(caught.value)
    assert until(lambda: list(folder.glob("false-server-*.evidence")), 30)
    (path,) = folder.glob("false-server-*.evidence")
    assert path.stat().st_mode & 0o77 == 0
    assert server_evidence.evidence_command([str(path), "--key", trio.key, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["key"] == trio.key and shown["model"] == "hospital-b"
    other = fingerprint_of(trio.made["alice"].identity)
    assert server_evidence.evidence_command([str(path), "--key", other]) == 1
    assert f"signed by {trio.key} and not by {other}" in capsys.readouterr().err
    head, evidence = server_evidence.read_evidence(path)
    evidence.check(server_evidence.trace_program(head)[0])
    assert not any(secret in caplog.text for secret in (head.with_Q, head.with_A, head.setup_key))

    with pytest.raises(errors.SectorchError, match="answers nothing over it any more"):
        trio.connection.model("hospital-b")(GOOD)
    trio.party.close()  # which outlives the process
    again = lambda: answer(
        trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, store=Store(folder), audit_server=True
    )
    trio.party = again()
    with pytest.raises(errors.SectorchError, match="answers nothing over it any more"):
        trio.connection.model("hospital-b")(GOOD)
    data = bytearray(path.read_bytes())
    path.unlink()
    assert torch.equal(trio.connection.model("hospital-b")(GOOD), sectorch.reference(model)(GOOD))
    for at in range(0, len(data), len(data) // 60):  # a changed file is no evidence
        changed = bytearray(data)
        changed[at] ^= 1
        bad = path.with_name("changed")
        bad.write_bytes(changed)
        try:
            found, shown = server_evidence.read_evidence(bad)
            shown.check(server_evidence.trace_program(found)[0])
        except errors.SectorchError:
            continue
        parts = lambda e: [*e.setup, *e.from_Q, *e.from_A]
        assert found.statement == head.statement and (found.session, found.call) == (head.session, head.call)
        assert all(torch.equal(a, b) for a, b in zip(parts(shown), parts(evidence), strict=True)), "facts for people"


# What receipts show: which model, by whose commitment, and what the server has signed.


def test_a_version_is_a_commitment_that_its_owner_alone_can_open(small_model):
    weights = {name: value.detach() for name, value in small_model.state_dict().items()}
    owner, other = read_identity(new_identity()), read_identity(new_identity())
    edition, salt = commitment_to(weights, owner)
    description = {"any": 1}
    version = sectorch.network.store.version(description, edition)
    assert commitment_to(dict(reversed(weights.items())), owner) == (edition, salt), "one name at all processes"
    assert opens(version, description, weights, salt)
    name, value = next(iter(weights.items()))
    last = value.clone()
    last.view(-1)[-1] = torch.nextafter(last.view(-1)[-1], torch.tensor(torch.inf))
    for changed in (
        (description, {**weights, name: last}, salt),
        ({"any": 2}, weights, salt),
        (description, {**weights, name: value.double()}, salt),
        (description, weights, commitment_to(weights, other)[1]),  # guessed weights are not confirmed without the key
        (description, weights, salt[:-1]),
        (description, weights, b""),
    ):
        assert not opens(version, *changed)
    signed = sign_version(owner, "m", version)
    assert signer_of(signed, "m", version) == sectorch.network.identity.identity.fingerprint(
        owner.public_key().public_bytes_raw()
    )
    flipped = f"{signed[:-1]}{int(signed[-1], 16) ^ 1:x}"
    for wrong in ((signed, "n", version), (signed, "m", version[:-1]), (flipped, "m", version), ("", "m", version)):
        with pytest.raises(errors.IdentityError, match="has not signed the version"):
            signer_of(*wrong)


def test_receipts_of_all_parties_name_one_commitment_and_what_s_has_signed(pki, tmp_path, monkeypatch, caplog):
    made = dict(pki[1])
    server = made["server"]
    made["server"] = Credentials(server.certificate, server.key, server.authority, new_identity())
    model = nn.Sequential(nn.Linear(4, 2)).eval()
    trio = Trio(made, model, GOOD, tmp_path, receipts=True)
    try:
        trio.party.close()
        trio.party = answer(
            trio.address, made["hospital-b"], model, GOOD, pins=trio.pins, audit_server=True,
            receipts=trio.receipts["A"],
        )  # fmt: skip
        coins(monkeypatch, True, False, False)
        remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
        for _ in range(2):
            remote(GOOD)
        trio.connection.model("hospital-b")(GOOD)
        weights, offer = trio.party._offers.latest()[0].weights, trio.party._offers.latest()[0]
    finally:
        trio.close()
    found = {who: audit(path) for who, path in trio.receipts.items()}
    for one, other in ((found["Q"], found["A"]), (found["Q"], found["S"]), (found["A"], found["S"])):
        assert compare(one, other).agree and compare(one, other).same == 4
    owner = read_identity(made["hospital-b"].identity)
    for entry in found["Q"].queries:
        assert opens(entry.version, offer.description, weights, commitment_to(weights, owner)[1])
        assert entry.signed_by == fingerprint_of(made["hospital-b"].identity)
    signed = [(entry.statement, entry.server) for entry in found["Q"].queries]
    assert len({statement for statement, _ in signed[:3]}) == 3, "a decoy's line is as any other's"
    assert {key for _, key in signed[:3]} == {fingerprint_of(made["server"].identity)}
    assert signed[3] == ("", ""), "nothing is signed in an ordinary session"
    other = copy.deepcopy(found["A"])
    other.queries[0].statement = "0" * 64
    assert [names for *_, names in compare(found["Q"], other).differing] == [["statement"]]
    line = trio.receipts["Q"].read_text().splitlines()[1]
    record = json.loads(line)
    key = read_identity(made["alice"].identity)
    del record["signature"]
    forged = receipts.sign_line({**record, "version": "0" * 64}, key).decode()
    lines = trio.receipts["Q"].read_text().splitlines()[:1]
    (tmp_path / "forged").write_text("\n".join([*lines, forged, ""]))
    with pytest.raises(errors.ReceiptError, match="has not signed the version of 'hospital-b'"):
        audit(tmp_path / "forged")


@pytest.mark.parametrize("signed", ["", "0" * 192, "another model", "another key"])
def test_a_version_that_its_owner_has_not_signed_is_refused(checking, monkeypatch, signed):
    trio, _ = checking
    find = Registry.find
    if signed.startswith("another"):
        offer = trio.party._offers.latest()[0]
        owner = trio.made["hospital-b" if signed == "another model" else "alice"].identity
        name = "hospital-c" if signed == "another model" else offer.name
        signed = sign_version(read_identity(owner), name, offer.version)
    monkeypatch.setattr(Registry, "find", lambda *args: replace(find(*args), signed=signed))
    with pytest.raises(errors.IdentityError, match="signed the version of"):
        trio.connection.model("hospital-b", ACCOUNTABLE)


def test_q_knows_the_servers_key(checking, monkeypatch):
    trio, model = checking
    plain = sectorch.reference(model)(GOOD)
    assert torch.equal(trio.connection.model("hospital-b", ACCOUNTABLE, server_key=trio.key)(GOOD), plain)
    wrong = fingerprint_of(trio.made["alice"].identity)
    with pytest.raises(errors.FalseServerError, match=re.escape(f"{trio.key}, and {wrong} is the one")):
        trio.connection.model("hospital-b", ACCOUNTABLE, server_key=wrong)(GOOD)
    with pytest.raises(errors.ArgumentError, match=r"add Scheme\(accountable=True\)"):
        trio.connection.model("hospital-b", server_key=trio.key)
    with pytest.raises(errors.ArgumentError, match="the server's key is a fingerprint"):
        trio.connection.model("hospital-b", ACCOUNTABLE, server_key="x")
    trio.party.close()
    trio.party = answer(trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, audit_server=True)
    remote = trio.connection.model("hospital-b", ACCOUNTABLE)
    remote(GOOD)
    end_sessions(remote)
    monkeypatch.setattr(trio.server._serving, "_key", read_identity(new_identity()))
    with pytest.raises(errors.FalseServerError, match=re.escape(f"and {trio.key} is the one that is known")):
        remote(GOOD)  # another session, and another key than the first time


def test_what_a_keeps_of_decoys_counts_in_its_memory(checking, monkeypatch):
    trio, _ = checking
    memory, reserved = trio.party._memory, []
    memory.limit = 1 << 40
    own, put = MemoryBound.reserve, trio.party._auditor._checks.put
    monkeypatch.setattr(MemoryBound, "reserve", lambda *args: reserved.append(args[1:]) or own(*args))
    trio.connection.model("hospital-b")(GOOD)
    plain = reserved[-1]
    held = []
    monkeypatch.setattr(trio.party._auditor._checks, "put", lambda work: held.append(work) or put(work))
    coins(monkeypatch, True, False)
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    remote(GOOD)
    of_decoy, of_question = reserved[-2:]
    (check, *_) = held[0]
    assert of_decoy[0] == plain[0] + check.bytes < of_question[0] + plain[1] + 1, "every call: any may be a decoy"
    assert of_question[1] == 0 < plain[1] < of_decoy[1], "the copy of the masked weights, and the setup of Q and S"
    assert check.bytes > sum(value.nbytes for value in check.sent) > 0
    assert until(lambda: memory._calls == 0, 30), "what was checked is given back"
    memory.limit = (1 << 34) + of_question[0] - 1
    monkeypatch.setattr("sectorch.network.memory.WAIT", 0.0)
    monkeypatch.setattr("sectorch.network.memory.resident", lambda: 1 << 34)
    with pytest.raises(errors.SectorchError, match="takes about"):
        remote(GOOD)


# Whether A answers with the model that it has committed to.


def swap(trio) -> None:
    """A goes on under its commitment with another model: what it has registered stays."""
    offer = trio.party._offers.latest()[0]
    offer.weights = {name: value.clone() for name, value in offer.weights.items()}
    for value in offer.weights.values():
        value += 0.5


def end_sessions(remote) -> None:
    for opened in list(remote._sessions.values()):
        remote._end(opened)


def test_another_model_under_the_same_commitment_is_noticed_by_repeated_decoys(checking, monkeypatch):
    trio, _ = checking
    monkeypatch.setattr("sectorch.decoys.flip", lambda rate: True)  # each decoy but the first is asked again
    coins(monkeypatch, True, True, False, True)
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    version = remote.version
    remote(GOOD)
    end_sessions(remote)
    swap(trio)
    with pytest.raises(errors.OtherAnswerError, match="answered with other bits"):
        remote(GOOD)
    assert remote.version == version


def test_known_answers_are_asked_among_questions_and_notice_another_model(checking, monkeypatch):
    trio, model = checking
    x = torch.randn(40, 4)
    answers = sectorch.reference(model)(x)
    flips = iter([True, False, False, True, False, True])
    known = KnownAnswers(x, answers, rate=0.5)
    monkeypatch.setattr(KnownAnswers, "flip", lambda self: next(flips))
    remote, before = trio.connection.model("hospital-b", known=known), trio.party.answered
    assert torch.equal(remote(GOOD), sectorch.reference(model)(GOOD)) and (known.rows, known.right) == (3, 3)
    remote(GOOD[:1])
    assert until(lambda: trio.party.answered == before + 3, 30)
    remote(GOOD[:2])
    assert known.right == 5, "as many rows as the question has"
    end_sessions(remote)
    swap(trio)
    with pytest.raises(errors.OtherAnswerError, match="with known answers"):
        remote(GOOD)
    with pytest.raises(errors.ArgumentError, match="known is KnownAnswers"):
        trio.connection.model("hospital-b", known=x)


@pytest.fixture
def audited(checking, tmp_path, monkeypatch):
    """Two decoys of two sessions that A has kept, the file of its model, and what an auditor compares."""
    trio, model = checking
    trio.party.close()
    folder, path = tmp_path / "records", tmp_path / "model.safetensors"
    folder.mkdir()
    save_model(model, GOOD, path)
    trio.party = answer(
        trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, audit_server=trio.key, keep_decoys=folder
    )
    coins(monkeypatch, True, False, True, False)
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    remote(GOOD)
    end_sessions(remote)
    remote(GOOD[:1])
    assert until(lambda: len(list(folder.glob("decoy-*.record"))) == 2, 30)
    return trio, model, remote.version, sorted(folder.iterdir()), path


def test_an_auditor_checks_with_the_weights_which_model_has_answered(audited, tmp_path, capsys):
    trio, model, version, records, path = audited
    known = ["--version", version, "--key", trio.key]
    for record in records:
        assert record.stat().st_mode & 0o77 == 0
        assert check_model_command([str(record), str(path), *known, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["version"], shown["key"], shown["model"]) == (version, trio.key, "hospital-b")
        assert shown["signed_by"] == fingerprint_of(trio.made["hospital-b"].identity)
        assert check_model_command([str(record), str(path)]) == 0
        assert shown["statement"] in "".join(capsys.readouterr().out.split())
    record = records[0]
    head, check, _ = read_record(record, read_model(path)[1])
    secrets = (head.salt, head.seed, head.between, *head.labels.values(), head.with_Q, head.with_A, head.setup_key)
    assert not any(secret in repr((head, check, check.between)) for secret in secrets)
    assert set(check.between.calls) == {check.statement.call} and len(check.between.labels) > 0
    for draw in (lambda key: key.of_call(check.statement.call + 1), lambda key: key.words("other label", 0, 0, 1)):
        with pytest.raises(errors.KeyAgreementError, match="not among those that were shown"):
            draw(check.between)
    other, wrong = tmp_path / "other.safetensors", fingerprint_of(trio.made["alice"].identity)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[2].bias[0] += 2.0**-12
    save_model(changed, GOOD, other)
    for options, why in (
        ([record, other], "these weights do not open version"),
        ([record, path, "--key", wrong], f"signed by {trio.key} and not by {wrong}"),
        ([record, path, "--version", "8c2e"], f"is of version {version} and not of 8c2e"),
        ([path, path], "is no record of a decoy"),
        ([tmp_path / "missing", path], "cannot read"),
        ([record, record], "sectorch convert"),
    ):
        assert check_model_command([*map(str, options), "--json"]) == 1
        out, said = capsys.readouterr()
        assert out == "" and why in " ".join(said.split()) and "Traceback" not in said
        assert not any(secret in said for secret in secrets)
    assert check_model_command([str(record), str(path), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    data = record.read_bytes()
    for at in range(8, len(data), len(data) // 30):  # a changed record is none, or says the same of the call
        bad = tmp_path / "changed"
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if check_model_command([str(bad), str(path), *known, "--json"]) == 0:
            again = json.loads(capsys.readouterr().out)
            assert {**again, "found_at": ""} == {**whole, "found_at": ""}
        assert "Traceback" not in capsys.readouterr().err


def test_an_a_that_answers_with_another_model_is_found_by_an_auditor(audited, tmp_path, monkeypatch, capsys):
    """Under its commitment: what it shows the auditor opens the version."""
    trio, model, version, records, path = audited
    swap(trio)
    coins(monkeypatch, True, False)
    monkeypatch.setattr("sectorch.decoys.flip", lambda rate: False)  # no decoy is asked again
    remote = trio.connection.model("hospital-b", ACCOUNTABLE, decoys=0.3)
    assert remote.version == version and not torch.equal(remote(GOOD), sectorch.reference(model)(GOOD))
    folder = records[0].parent
    assert until(lambda: len(list(folder.iterdir())) == 3, 30)
    (new,) = set(folder.iterdir()) - set(records)
    assert check_model_command([str(new), str(path), "--version", version]) == 1
    assert "other messages than these weights give, as S has signed" in " ".join(capsys.readouterr().err.split())


def test_decoys_are_kept_where_they_are_checked(checking, tmp_path):
    trio, model = checking
    made = (trio.address, trio.made["hospital-b"], model, GOOD)
    with pytest.raises(errors.ArgumentError, match="add --audit-server"):
        answer(*made, pins=trio.pins, keep_decoys=tmp_path)
    with pytest.raises(errors.ArgumentError, match="there is no folder"):
        answer(*made, pins=trio.pins, audit_server=True, keep_decoys=tmp_path / "missing")


def test_a_client_or_server_that_cannot_is_refused(checking, pki, tmp_path):
    trio, model = checking
    with pytest.raises(errors.ArgumentError, match="add Scheme"):
        trio.connection.model("hospital-b", decoys=0.1)
    for rate in (1, -0.1, float("nan"), float("inf"), "0.1", True, None, torch.tensor(0.1)):
        with pytest.raises(errors.ArgumentError, match="0 <= decoys < 1"):
            trio.connection.model("hospital-b", ACCOUNTABLE, decoys=rate)
    with pytest.raises(errors.ArgumentError, match="leave accountable=True out"):
        trio.connection.aggregate(["hospital-b", "bob"], ACCOUNTABLE)
    trio.party.close()
    trio.start_answering()
    with pytest.raises(errors.RefusedError, match="--audit-server"):
        trio.connection.model("hospital-b", ACCOUNTABLE)
    trio.party.close()
    wrong = fingerprint_of(trio.made["alice"].identity)
    trio.party = answer(trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, audit_server=wrong)
    with pytest.raises(errors.SectorchError, match="is the one that is known"):
        trio.connection.model("hospital-b", ACCOUNTABLE)(GOOD)
    with pytest.raises(errors.ArgumentError, match="the server's key is a fingerprint"):
        answer(trio.address, trio.made["hospital-b"], model, GOOD, pins=trio.pins, audit_server="x")


def test_a_server_without_an_identity_is_refused(pki, tmp_path):
    _, made = pki
    server = made["server"]
    bare = {**made, "server": Credentials(server.certificate, server.key, server.authority)}
    model = nn.Sequential(nn.Linear(4, 2)).eval()
    trio = Trio(bare, model, GOOD, tmp_path)
    try:
        with pytest.raises(errors.RefusedError, match="no identity key to sign what it sends"):
            trio.connection.model("hospital-b", ACCOUNTABLE)
    finally:
        trio.close()


def test_a_query_that_failed_is_repeated_as_what_it_was():
    """Else a name that comes again would be that of a real call, and S could falsify those alone."""
    pending, coin = PendingQueries(), Decoys(0.5)
    for _ in range(50):
        inputs, seen = Inputs(torch.randn(2)), []
        for _ in range(3):
            with pytest.raises(KeyError), pending.decoy_or_name(inputs, coin) as found:
                seen.append(found)
                raise KeyError
        with pending.decoy_or_name(inputs, coin) as found:
            seen.append(found)
        assert len(set(seen)) == 1
        with pending.decoy_or_name(inputs, coin) as (_, name):
            assert name != seen[0][1]
    assert not pending._names and not pending._decoys - {name}


def test_files_that_are_no_evidence(tmp_path, capsys):
    for name, content in (("empty", b""), ("text", b"x" * 100), ("head", b"\0" * 7 + b"\2{}" + b" " * 8)):
        path = tmp_path / name
        path.write_bytes(content)
        assert server_evidence.evidence_command([str(path)]) == 1 and "no evidence" in capsys.readouterr().err
    assert server_evidence.evidence_command([str(tmp_path / "missing")]) == 1
    assert decoys.ServerEvidence.__name__ in repr(decoys.ServerEvidence)


@pytest.fixture
def questions(tmp_path):
    np.save(tmp_path / "x.npy", GOOD.numpy())
    return str(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--decoys", "0.1", "--prepare", "3"], "leave --decoys or --prepare out"),
        (["--decoys", "0.1", "--verified"], "leave audited and verified out"),
        *((["--decoys", rate], "0 <= decoys < 1") for rate in ("1", "nan", "inf", "1e400", "-0.1")),
    ],
)
def test_options_that_do_not_go_together_are_one_line(questions, capsys, options, why):
    assert query(["hospital-b", questions, *options]) != 0
    lines = capsys.readouterr().err.strip()
    assert why in " ".join(lines.split()) and "Traceback" not in lines


@pytest.mark.parametrize("rate", ["", "x", "10%", "0,1", "[0.1]"])
def test_a_rate_that_is_no_number_is_one_line(questions, capsys, rate):
    check_refused_number(query, ["hospital-b", questions, "--decoys", rate], "--decoys", capsys)


@pytest.fixture
def asking(checking, tmp_path):
    """The options by which alice asks."""
    trio, _ = checking
    credentials = trio.made["alice"]
    files = {"--cert": credentials.certificate, "--key": credentials.key, "--ca": credentials.authority}
    options = ["--server", trio.address, "--pins", str(trio.pins.path), "--store", str(tmp_path / "q"), "--json"]
    for option, content in {**files, "--identity": credentials.identity}.items():
        path = tmp_path / option.strip("-")
        path.write_bytes(content)
        path.chmod(0o600)
        options += [option, str(path)]
    return options


def test_the_command_asks_decoys_and_says_how_many(checking, questions, asking, capsys, monkeypatch):
    _, model = checking
    coins(monkeypatch, True, False)
    assert query(["hospital-b", questions, "--decoys", "0.1", *asking]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["decoys"] == 1 and shown["rows"] == len(GOOD)
    assert torch.allclose(torch.tensor(shown["predictions"]), sectorch.reference(model)(GOOD))


def test_the_command_asks_known_rows_and_refuses_other_answers(
    checking, questions, asking, tmp_path, capsys, monkeypatch
):
    _, model = checking
    rows = torch.randn(5, 4)
    plain = sectorch.reference(model)(rows)
    right, wrong, labelled = (tmp_path / f"{name}.npz" for name in ("right", "wrong", "labelled"))
    np.savez(right, x=rows.numpy(), answers=plain.numpy())
    np.savez(wrong, x=rows.numpy(), answers=(plain + 2.0**-20).numpy())
    np.savez(labelled, x=rows.numpy(), labels=plain.argmax(1).numpy())
    flips = iter([True, False] * 3)
    monkeypatch.setattr(KnownAnswers, "flip", lambda self: next(flips))
    for path, more in ((right, ["--decoys", "0.1"]), (labelled, ["--known-rate", "0.3", "--known-accuracy", "0.9"])):
        assert query(["hospital-b", questions, "--known-answers", str(path), *more, *asking]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["known_rows"] == shown["known_right"] == len(GOOD) == shown["rows"]
        assert torch.allclose(torch.tensor(shown["predictions"]), sectorch.reference(model)(GOOD))
    assert query(["hospital-b", questions, "--known-answers", str(wrong), *asking]) == 1
    out, said = capsys.readouterr()
    assert "rows with known answers" in said and "predictions" not in out


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"x": 3}, [], "has to hold x, and answers or labels; it holds x"),
        ({"x": 3, "answers": 2}, [], "3 rows have as many answers"),
        ({"x": 3, "answers": 3, "labels": 3}, [], "it holds answers, labels, x"),
        ({"x": 3, "labels": 3}, ["--known-rate", "1"], "0 <= rate < 1"),
        ({"x": 3, "answers": 3}, ["--known-accuracy", "0.9"], "an accuracy is of labels"),
        (None, ["--known-rate", "0.1"], "--known-answers FILE: name it"),
    ],
)
def test_known_answers_that_are_none_are_refused_before_anything_is_sent(arrays, options, said, tmp_path, capsys):
    inputs, path = tmp_path / "inputs.npy", tmp_path / "known.npz"
    np.save(inputs, GOOD.numpy())
    if arrays is not None:
        np.savez(path, **{name: np.zeros(count, np.int64) for name, count in arrays.items()})
        options = ["--known-answers", str(path), *options]
    nobody = ["--server", "localhost:1", *(v for k in ("cert", "key", "ca") for v in (f"--{k}", str(tmp_path / k)))]
    assert query(["hospital-b", str(inputs), *options, *nobody]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
