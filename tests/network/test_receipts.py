"""Receipts: each query is signed for at each party before it is served, and whatever changes the file is found."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import PIPE, Command
from hypothesis import given
from hypothesis import strategies as st
from network_world import Trio, until
from torch import nn

from sectorch import errors
from sectorch.cli.main import run
from sectorch.network import answer, connect, receipts, save_model
from sectorch.network.audit import NOT_RECORDED, audit, compare
from sectorch.network.identity.identity import certificate_print, fingerprint_of, new_identity, read_identity
from sectorch.network.log import QUERIES
from sectorch.network.parties.session import PartySession
from sectorch.network.receipts import Receipts
from sectorch.testing.local_network import Stage

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
ASKED = {
    "session": "ab" * 16, "client": "alice", "key": "SHA256:x", "model": "hospital-b", "version": "12",
    "asked": "predict", "rows": 32, "learned": "result",
}  # fmt: skip


@pytest.fixture(scope="session")
def made(pki):
    """The credentials, and an identity key for the server as well."""
    return {**pki[1], "server": dataclasses.replace(pki[1]["server"], identity=new_identity())}


@pytest.fixture(scope="module")
def written(made, tmp_path_factory) -> tuple[bytes, str]:
    """A file of two openings and five queries, one of which failed and one of which has no end; and its key."""
    path = tmp_path_factory.mktemp("receipts") / "a.jsonl"
    for calls in (range(3), range(3, 5)):
        receipts = Receipts(path, made["hospital-b"], "A")
        for call in calls:
            number = receipts.begin_query(call=call, **ASKED)
            if call != 2:
                receipts.end_query(number, "done" if call else "PeerLostError")
        receipts.close()
    return path.read_bytes(), fingerprint_of(made["hospital-b"].identity)


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """Where the properties put what they have changed."""
    return tmp_path_factory.mktemp("changed") / "a.jsonl"


def kept(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def split(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


def head_of(content: bytes) -> str:
    return receipts.hash_of(split(content)[-1].rstrip(b"\n"))


# What is found.


def test_a_file_that_nobody_changed_is_whole(written, changed):
    content, key = written
    found = audit(kept(changed, content), key, head_of(content))
    assert (found.party, found.role, found.key, len(found.heads)) == ("hospital-b", "A", key, 11)
    outcomes = ["PeerLostError", "done", NOT_RECORDED, "done", "done"]
    assert [entry.outcome for entry in found.queries] == outcomes
    total = {"client": "alice", "model": "hospital-b", "queries": 5, "done": 3, "rows": 160, "rows_done": 96}
    assert found.totals() == [total]
    assert found.head == head_of(content) and len(found.begun) == 2 and found.cut == []


@given(data=st.data())
def test_any_change_of_a_byte_is_found(written, changed, data):
    content, key = written
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    with pytest.raises(errors.ReceiptError):
        audit(kept(changed, content[:at] + bytes([other]) + content[at + 1 :]), key)


@given(data=st.data())
def test_a_line_that_is_removed_moved_or_doubled_is_found(written, changed, data):
    content, key = written
    all_lines = split(content)
    at = data.draw(st.integers(0, len(all_lines) - 2))
    to = data.draw(st.integers(at + 1, len(all_lines) - 1))
    others = {
        "removed": all_lines[:at] + all_lines[at + 1 :],
        "swapped": [all_lines[{at: to, to: at}.get(i, i)] for i in range(len(all_lines))],
        "doubled": [*all_lines[: to + 1], all_lines[at], *all_lines[to + 1 :]],
        "a blank line": [*all_lines[:at], b"\n", *all_lines[at:]],
    }
    for what, changed_lines in others.items():
        with pytest.raises(errors.ReceiptError):
            audit(kept(changed, b"".join(changed_lines)), key)
            pytest.fail(what)


@given(data=st.data())
def test_what_is_cut_off_is_found_by_a_head_that_was_noted(written, changed, data):
    content, key = written
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    with pytest.raises(errors.ReceiptError):
        audit(kept(changed, cut), key, head_of(content))


def test_lines_that_are_cut_off_whole_are_found_by_nothing_else(written, changed):
    """Why heads are to be noted; an earlier head is still right of a file that goes on."""
    content, key = written
    first = b"".join(split(content)[:6])
    assert len(audit(kept(changed, first), key).heads) == 6
    assert len(audit(kept(changed, content), key, head_of(first)).heads) == 11


def resigned(content: bytes, identity: bytes) -> bytes:
    """The same file as another key would have written it."""
    key, previous, made = read_identity(identity), receipts.NOTHING, b""
    for line in split(content):
        record = {k: v for k, v in json.loads(line).items() if k != "signature"} | {"previous": previous}
        if record["event"] == "began":
            record["public"] = key.public_key().public_bytes_raw().hex()
        line = receipts.sign_line(record, key)
        previous, made = receipts.hash_of(line), made + line + b"\n"
    return made


def test_another_key_is_found(written, changed):
    content, key = written
    assert audit(kept(changed, resigned(content, new_identity()))).key != key, "whole in itself, and says whose it is"
    with pytest.raises(errors.ReceiptError, match="is signed by SHA256"):
        audit(changed, key)
    with pytest.raises(errors.ReceiptError, match="noted head"):
        audit(changed, head=head_of(content))


@given(data=st.data())
def test_a_line_that_another_key_has_signed_is_found(written, changed, data):
    content, key = written
    all_lines, forged = split(content), split(resigned(content, new_identity()))
    at = data.draw(st.integers(0, len(all_lines) - 1))
    record = json.loads(forged[at]) | {"previous": json.loads(all_lines[at])["previous"]}
    own = {k: v for k, v in record.items() if k != "signature"}
    line = receipts.sign_line(own, read_identity(new_identity())) + b"\n"
    with pytest.raises(errors.ReceiptError):
        audit(kept(changed, b"".join([*all_lines[:at], line, *all_lines[at + 1 :]])), key)


@given(content=st.binary(max_size=300))
def test_what_is_no_file_of_receipts_is_refused_and_left_as_it_is(made, changed, content):
    with pytest.raises(errors.ReceiptError):
        audit(kept(changed, content))
    if content and not b'{"certificate":"'.startswith(content):
        with pytest.raises(errors.ReceiptError):
            Receipts(changed, made["hospital-b"], "A")
        assert changed.read_bytes() == content


@pytest.mark.parametrize("line", [b"[" * 60000, b"9" * 60000, b'{"event":NaN}', b'{"event":["asked"]}', b"x" * 200000])
def test_an_unkind_line_is_a_typed_error(changed, line):
    with pytest.raises(errors.ReceiptError):
        audit(kept(changed, line + b"\n"))


# The file.


def test_the_file_is_its_owners_alone_and_of_one_process(made, tmp_path):
    path = tmp_path / "a.jsonl"
    receipts = Receipts(path, made["hospital-b"], "A")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(errors.ReceiptsInUseError, match="in use"):
        Receipts(path, made["hospital-b"], "A")
    other = f"import fcntl; fcntl.flock(open({str(path)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert ended.returncode == 1 and "BlockingIOError" in ended.stderr
    receipts.close()
    with pytest.raises(errors.ReceiptError, match="closed"):
        receipts.begin_query(call=1, **ASKED)
    path.chmod(0o644)
    Receipts(path, made["hospital-b"], "A").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("who, role", [("alice", "A"), ("hospital-b", "Q")])
def test_a_file_of_another_party_is_refused(made, written, tmp_path, who, role):
    path = kept(tmp_path / "a.jsonl", written[0])
    with pytest.raises(errors.ReceiptError, match="is of another"):
        Receipts(path, made[who], role)
    assert path.read_bytes() == written[0]


def test_a_party_without_an_identity_key_keeps_no_receipts(pki, tmp_path):
    with pytest.raises(errors.IdentityError, match="sectorch keys identity"):
        Receipts(tmp_path / "s.jsonl", pki[1]["server"], "S")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_plain_file_is_refused(made, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(kept(tmp_path / "there", b""))
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path, tmp_path / "no" / "file", Path("/dev/null")):
        with pytest.raises(errors.ReceiptError):
            Receipts(path, made["hospital-b"], "A")
    assert (tmp_path / "there").read_bytes() == b""


@given(data=st.data())
def test_a_half_written_line_is_cut_off_and_the_file_says_so(made, written, changed, data):
    """Wherever a process was killed in the middle of a line: what is whole stays, and the next line says it."""
    content, key = written
    size = data.draw(st.integers(1, len(content) - 1))
    half = split(content[:size])[-1]
    Receipts(kept(changed, content[:size]), made["hospital-b"], "A").close()
    found, now = audit(changed, key), changed.read_bytes()
    whole = content[:size] if half.endswith(b"\n") else content[: size - len(half)]
    assert now.startswith(whole) and len(found.heads) == whole.count(b"\n") + 1
    last = json.loads(split(now)[-1])
    if half.endswith(b"\n"):
        assert found.cut == [] and "cut_bytes" not in last
    else:
        assert found.cut == [last["number"]]
        assert (last["cut_bytes"], last["cut_hash"]) == (len(half), receipts.hash_of(half))


def test_a_process_that_is_killed_leaves_a_file_that_goes_on(made, pki, tmp_path):
    """kill -9 in the middle of writing: every line that was acknowledged is there."""
    folder, path = pki[0], tmp_path / "a.jsonl"
    program = (
        "import sys\nfrom sectorch.network.identity.identity import Credentials\n"
        "from sectorch.network.receipts import Receipts\n"
        "name, path, folder = sys.argv[1:]\n"
        "credentials = Credentials.read(f'{folder}/{name}.pem', f'{folder}/{name}-key.pem', f'{folder}/ca.pem')\n"
        f"receipts, facts = Receipts(path, credentials, 'A'), {ASKED!r}\n"
        "while True:\n"
        "    number = receipts.begin_query(call=1, **facts)\n"
        "    print(number, flush=True)\n"
        "    receipts.end_query(number, 'done')\n"
    )
    process = Command([sys.executable, "-c", program, "hospital-b", str(path), str(folder)], stdout=PIPE)
    out = process.stdout
    acknowledged = [int(out.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in out.read().splitlines()]
    process.wait()
    out.close()
    receipts = Receipts(path, made["hospital-b"], "A")
    number = receipts.begin_query(call=2, **ASKED)
    receipts.close()
    found = audit(path, fingerprint_of(made["hospital-b"].identity))
    assert {entry.line for entry in found.queries} >= {*acknowledged, number}
    assert sum(entry.outcome == NOT_RECORDED for entry in found.queries) <= 2 and len(found.begun) == 2


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_half_of_a_line_and_may_have_room_again(made, tmp_path, monkeypatch):
    path, put = tmp_path / "a.jsonl", os.pwrite
    receipts = Receipts(path, made["hospital-b"], "A")
    before = path.read_bytes()

    def half(handle, data, at):
        return full() if at > len(before) else put(handle, data[:10], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        with pytest.raises(errors.ReceiptError, match="No space left on device"):
            receipts.begin_query(call=1, **ASKED)
    assert path.read_bytes() == before
    receipts.end_query(receipts.begin_query(call=1, **ASKED), "done")
    assert [entry.outcome for entry in audit(path).queries] == ["done"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(errors.ReceiptError, match="No space left on device"):
            receipts.begin_query(call=2, **ASKED)
    with pytest.raises(errors.ReceiptError, match="start again"):
        receipts.begin_query(call=3, **ASKED)


@pytest.mark.parametrize("how", ["removed", "moved over", "cut", "longer"])
def test_a_file_that_another_program_changes_is_not_gone_on_with(made, tmp_path, how):
    path = tmp_path / "a.jsonl"
    receipts = Receipts(path, made["hospital-b"], "A")
    if how == "removed":
        path.unlink()
    elif how == "moved over":
        os.replace(kept(tmp_path / "other", b""), path)
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (1 if how == "longer" else -1))
    with pytest.raises(errors.ReceiptError, match="changed or removed"):
        receipts.begin_query(call=1, **ASKED)


# Three parties.


@pytest.fixture
def trio(made, small_model, tmp_path):
    trio = Trio(made, small_model, X, tmp_path, receipts=True)
    yield trio
    trio.close()


def audits(trio: Trio, queries: int = 0) -> dict:
    """Each party's receipts, once they have so many whole queries."""
    key = {"S": "server", "A": "hospital-b", "Q": "alice"}

    def whole() -> bool:
        found = [audit(path) for path in trio.receipts.values()]
        return all(sum(e.outcome != NOT_RECORDED for e in a.queries) == queries for a in found)

    assert until(whole, 30)
    return {who: audit(path, fingerprint_of(trio.made[key[who]].identity)) for who, path in trio.receipts.items()}


def test_each_party_signs_for_each_query_and_they_agree(trio, caplog):
    caplog.set_level(logging.INFO)
    remote = trio.connection.model("hospital-b")
    remote.prepare(2)
    remote(X)
    with pytest.raises(errors.FixedPointRangeError):
        remote(X * 1e9)  # nothing was asked
    remote(X[:1])
    found = audits(trio, 3)
    for who, of in found.items():
        said = [(e.client, e.model, e.asked, e.rows, e.learned, e.outcome, e.version) for e in of.queries]
        assert of.role == who
        assert said == [
            ("alice", "hospital-b", asked, rows, learned, "done", remote.version)
            for asked, rows, learned in (("prepare", 2, "nothing"), ("predict", 2, "result"), ("predict", 1, "result"))
        ]
    alice = trio.made["alice"]
    assert {e.key for e in found["A"].queries} == {fingerprint_of(alice.identity)}
    assert {e.certificate for e in found["S"].queries} == {certificate_print(alice.certificate)}
    noted = lambda: [r.getMessage().partition("receipt=")[2] for r in list(caplog.records) if r.name == QUERIES.name]
    heads = [of.heads[e.line + 1] for of in found.values() for e in of.queries]
    # A line of the log is written after that of the file.
    assert until(lambda: sorted(noted()) == sorted(heads), 30), "the log notes the head after each query"
    for one in found.values():
        for other in found.values():
            compared = compare(one, other)
            assert compared.agree and compared.same == 3


def test_a_receipt_says_nothing_of_what_was_asked_or_found(trio):
    """Whatever the numbers are, the receipts are the same but for times, names of sessions, hashes and signatures."""
    said = []
    for x in (X, torch.zeros_like(X), X.abs() * 37):
        start = {who: path.stat().st_size for who, path in trio.receipts.items()}
        remote = trio.connection.model("hospital-b")
        result = remote(x)
        remote.close()
        assert until(trio.idle, 30)
        grown = {who: path.read_bytes()[start[who] :] for who, path in trio.receipts.items()}
        for text in grown.values():
            for value in (*x.flatten().tolist(), *result.flatten().tolist()):
                assert value == 0 or repr(value).encode()[:7] not in text
        free = ("time", "session", "previous", "signature", "number", "of")
        records = {who: [json.loads(line) for line in split(text)] for who, text in grown.items()}
        said.append(
            {who: [{k: v for k, v in r.items() if k not in free} for r in all_] for who, all_ in records.items()}
        )
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("who, by", [("S", "at the server"), ("A", "at 'hospital-b'"), ("Q", "not served")])
def test_a_query_without_a_receipt_is_not_served(trio, who, by, monkeypatch):
    """A party whose disk is full: an error at whoever asks, which says where, and the next query works."""
    remote = trio.connection.model("hospital-b")
    remote(X)
    audits(trio, 1)
    names = {path.stat().st_ino: party for party, path in trio.receipts.items()}
    put = os.pwrite

    def at(handle, data, where):
        return full() if names.get(os.fstat(handle).st_ino) == who else put(handle, data, where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", at)
        with pytest.raises(errors.ReceiptError, match=f"{by}.*"):
            remote(X)
    assert until(trio.idle, 30)
    assert len(audit(trio.receipts[who]).queries) == 1
    assert not any(e.done for party in "SAQ" for e in audit(trio.receipts[party]).queries[1:])
    remote(X)
    assert until(lambda: all(audit(path).queries[-1].done for path in trio.receipts.values()), 30)


def test_the_receipt_is_there_before_the_query_is_served(trio, monkeypatch):
    seen, predict = [], PartySession.predict

    def looked(party, *arguments):
        who = party._me.role
        seen.append((who, [entry.outcome for entry in audit(trio.receipts[who]).queries]))
        return predict(party, *arguments)

    monkeypatch.setattr(PartySession, "predict", looked)
    trio.connection.model("hospital-b")(X)
    assert sorted(seen) == [(who, [NOT_RECORDED]) for who in "AQS"]


def test_a_result_whose_end_has_no_receipt_is_not_given_out(trio, monkeypatch):
    remote = trio.connection.model("hospital-b")
    monkeypatch.setattr(
        trio.connection.receipts, "end_query", lambda *_: (_ for _ in ()).throw(errors.ReceiptError("full"))
    )
    with pytest.raises(errors.ReceiptError, match="full"):
        remote(X)
    assert [e.outcome for e in audit(trio.receipts["Q"]).queries] == [NOT_RECORDED]


def test_that_a_result_is_withheld_is_in_the_receipts_of_the_querying_party_alone(made, tmp_path):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)), nn.ReLU()).eval().requires_grad_(False)
    for layer in model[:2]:
        layer.weight.fill_(100.0)
    trio = Trio(made, model, torch.ones(1, 1), tmp_path, receipts=True)
    try:
        with pytest.raises(errors.RangeExceededError):
            trio.connection.model("hospital-b")(torch.ones(1, 1))
        found = audits(trio, 1)
        assert {who: found[who].queries[0].outcome for who in found} == {
            "S": "done", "A": "done", "Q": "RangeExceededError",
        }  # fmt: skip
        assert compare(found["A"], found["Q"]).agree, "outcomes are not compared"
    finally:
        trio.close()


def test_a_sum_of_several_parties_is_one_query_of_all(made, tmp_path, small_model):
    trio = Trio(made, small_model, X, tmp_path, receipts=True)
    bob = answer(trio.address, made["bob"], small_model, X, pins=trio.pins, receipts=tmp_path / "bob.jsonl")
    try:
        group = trio.connection.aggregate(["hospital-b", "bob"])
        group(X)
        group.close()
        trio.receipts["bob"] = tmp_path / "bob.jsonl"
        assert until(trio.idle, 30)
        found = {who: audit(path) for who, path in trio.receipts.items()}
        assert all(e.learned == "sum-of-2-results" and e.done for a in found.values() for e in a.queries)
        for one, other in (("S", "A"), ("S", "bob"), ("Q", "A"), ("bob", "Q"), ("Q", "S"), ("A", "S")):
            compared = compare(found[one], found[other])
            assert compared.agree and compared.same == 1, (one, other)
    finally:
        bob.close()
        trio.close()


# Processes, and the command.


@pytest.mark.sectorch_long
def test_processes_one_of_which_is_killed_keep_whole_receipts(tmp_path):
    """kill -9 of the server between queries: its file goes on, and those of all three agree."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 3)).eval().requires_grad_(False)
    x, files = torch.randn(2, 6), {who: tmp_path / f"{who}.jsonl" for who in ("server", "hospital-b", "alice")}
    identity = kept(tmp_path / "identity.pem", new_identity())
    with Stage({}, options=("--receipts", str(files["server"]), "--identity", str(identity))) as stage:
        save_model(model, x, tmp_path / "model.safetensors")
        credentials = {name: stage.credentials(name) for name in ("alice", "hospital-b")}

        own = ("--name", "hospital-b", "--server", f"localhost:{stage.port}", "--pins", str(stage.pins.path))
        own = (*own, *stage._files("hospital-b", "--ca"), "--receipts", str(files["hospital-b"]))
        stage._start("hospital-b", ["answer", str(tmp_path / "model.safetensors"), *own])

        def ask(times: int) -> None:
            with stage.connect("visitor") as visitor:
                assert until(lambda: visitor.models() == ["hospital-b"], 60)
            with connect(
                f"localhost:{stage.port}", credentials["alice"], pins=stage.pins, receipts=files["alice"]
            ) as connection:
                for _ in range(times):
                    connection.model("hospital-b")(x)

        ask(2)
        stage.processes["server"].send_signal(signal.SIGKILL)
        stage.processes["server"].wait()
        stage.start_server()
        ask(1)
        keys = {"server": identity.read_bytes(), **{name: made.identity for name, made in credentials.items()}}
        audits = lambda: {name: audit(path, fingerprint_of(keys[name])) for name, path in files.items()}
        assert until(lambda: all(sum(e.done for e in found.queries) == 3 for found in audits().values()), 30)
        found = audits()
        assert [len(found[name].begun) for name in files] == [2, 1, 2]
        assert all(compare(a, b).same == 3 and compare(a, b).agree for a in found.values() for b in found.values())


def audited(capsys, *arguments: object) -> tuple[int, str, str]:
    status = run(["audit", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, " ".join(shown.out.split()), shown.err


def test_the_command_shows_who_learned_what(trio, capsys, tmp_path):
    remote = trio.connection.model("hospital-b")
    for _ in range(3):
        remote(X)
    found = audits(trio, 3)
    files, key = trio.receipts, fingerprint_of(trio.made["server"].identity)
    status, out, _ = audited(capsys, files["S"], "--key", key, "--head", found["S"].head)
    assert status == 0 and f"head: {found['S'].head}" in out and f"signed by {key}" in out
    said = json.loads(shown(capsys, files["S"], "--against", files["A"], "--json"))
    assert said["against"]["agree"] and said["against"]["same"] == 3 and len(said["queries"]) == 3
    assert said["totals"][0] | {"client": "alice", "rows_done": 6, "queries": 3} == said["totals"][0]
    # A's owner hides the last query, with the key and without a trace in the file itself.
    hidden = kept(tmp_path / "hidden.jsonl", b"".join(split(files["A"].read_bytes())[:-2]))
    assert audited(capsys, hidden)[0] == 0
    for one, other, alone in ((files["S"], hidden, "1 queries are in"), (hidden, files["Q"], "1 in")):
        status, out, said = audited(capsys, one, "--against", other)
        assert status == 1 and alone in said and "alone" in out
    status, out, said = audited(capsys, hidden, "--head", found["A"].head)
    assert status == 1 and out == "" and "noted head" in said


def shown(capsys, *arguments: object) -> str:
    assert run(["audit", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_query_on_which_two_files_differ_is_shown(made, capsys, tmp_path):
    for who, role, rows in (("server", "S", 32), ("hospital-b", "A", 31)):
        receipts = Receipts(tmp_path / role, made[who], role)
        receipts.end_query(receipts.begin_query(call=1, **{**ASKED, "rows": rows}), "done")
        receipts.close()
    status, out, said = audited(capsys, tmp_path / "S", "--against", tmp_path / "A")
    assert status == 1 and "differ in rows" in out and "1 differ" in said


def test_keys_that_the_command_takes(written, made, tmp_path, capsys):
    path, key = kept(tmp_path / "a.jsonl", written[0]), written[1]
    identity = kept(tmp_path / "identity.pem", made["hospital-b"].identity)
    certificate = kept(tmp_path / "certificate.pem", made["hospital-b"].certificate)
    assert audited(capsys, path, "--key", key)[0] == audited(capsys, path, "--key", identity)[0] == 0
    for other, said in ((certificate, "another kind"), ("SHA256:x", "a key is"), (path, "holds neither")):
        status, out, words = audited(capsys, path, "--key", other)
        assert (status, out) == (1, "") and said in words
    status, out, words = audited(capsys, path, "--key", fingerprint_of(new_identity()))
    assert (status, out) == (1, "") and "line 1: the file is signed by" in words


def test_words_in_a_file_control_no_terminal(made, capsys, tmp_path):
    receipts = Receipts(tmp_path / "a", made["hospital-b"], "A")
    receipts.begin_query(call=1, **{**ASKED, "asked": "\x1b[2J[bold]x"})
    receipts.close()
    run(["audit", str(tmp_path / "a")])
    assert "\x1b" not in capsys.readouterr().out
