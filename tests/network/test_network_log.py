"""What the parties write down: a line for each query, who was refused, where a disk is full; nobody forges a line."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex

import pytest
import torch
from network_world import Trio, logs_as_in_a_new_process, pieces_in, until

from sectorch import errors, files
from sectorch.network import Store
from sectorch.network.identity.identity import certificate_print, fingerprint_of, new_identity
from sectorch.network.log import QUERIES, LineFormatter, begin, write
from sectorch.network.parties.session import abort_reason
from sectorch.network.store import MaterialBinding, version

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


def facts(line: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in shlex.split(line) if "=" in part)


def queries(caplog) -> list[dict[str, str]]:
    return [facts(r.getMessage()) for r in caplog.records if r.name == QUERIES.name]


def test_each_party_has_a_line_of_each_query_and_they_agree(trio, caplog):
    """Who asked, by the key that it proved at A and the certificate at S; which version; what was learned."""
    caplog.set_level(logging.INFO)
    remote = trio.connection.model("hospital-b")
    remote.prepare(2)
    remote(X)
    with pytest.raises(errors.FixedPointRangeError):
        remote(X * 1e9)
    assert until(lambda: len(queries(caplog)) == 6, 30)
    described = trio.described[0]
    same = {
        "client": "alice", "model": "hospital-b", "rows": "2", "outcome": "done",
        "version": version(described, trio.party._offers.latest()[0].edition),
    }  # fmt: skip
    own = [
        {},
        {"key": fingerprint_of(trio.made["alice"].identity)},
        {"certificate": certificate_print(trio.made["alice"].certificate)},
    ]
    said = [{**same, **more, **asked} for more in own for asked in (
        {"asked": "prepare", "learned": "nothing"}, {"asked": "predict", "learned": "result"},
    )]  # fmt: skip
    by_text = lambda found: sorted(json.dumps(line, sort_keys=True) for line in found)
    found = [{k: v for k, v in line.items() if k not in ("seconds", "bytes")} for line in queries(caplog)]
    assert by_text(found) == by_text(said)
    assert all(float(line["seconds"]) >= 0 and int(line["bytes"]) > 0 for line in queries(caplog))


def test_a_query_that_fails_has_a_line_that_says_so(trio, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    remote = trio.connection.model("hospital-b")
    monkeypatch.setattr("sectorch.network.parties.session.PartySession._take_part", lambda *_: 1 / 0)
    with pytest.raises(errors.NetworkError, match="ZeroDivisionError: at "):
        remote(X)
    assert until(lambda: len(queries(caplog)) == 3, 30)
    assert {line["outcome"] for line in queries(caplog)} <= {"ZeroDivisionError", "AbortedError"}


def test_material_that_another_key_has_dealt_is_void(trio, small_model, tmp_path):
    """A client's prepared calls are those of the key that A knew it by then."""
    trio.connection.close()
    kept = Store(tmp_path / "alice")
    trio.start_querying(kept)
    trio.connection.model("hospital-b").prepare(2)
    trio.connection.close()
    trio.pins.pin("alice", fingerprint_of(new_identity()))
    trio.start_querying(Store(tmp_path / "alice"))
    with pytest.raises(errors.MaterialError, match="void"):
        trio.connection.model("hospital-b")(X)


# Disks that are full.


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_has_a_name_and_leaves_no_half_of_a_piece(trio, monkeypatch, caplog, tmp_path):
    """At A, whose store lasts: Q is told that it is A's disk, A's log says so, and nothing stays."""
    caplog.set_level(logging.INFO)
    trio.party.close()
    trio.start_answering(Store(tmp_path / "a"))
    remote = trio.connection.model("hospital-b")
    move = files.move

    def moved(partial, path):
        full() if partial.suffix == ".part" and path.suffix == ".piece" else move(partial, path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "move", moved)
        with pytest.raises(errors.StoreFullError, match=r"at 'hospital-b': .* No space left on device"):
            remote.prepare(2)
    assert pieces_in(tmp_path / "a") == 0
    assert [name for _, _, names in os.walk(tmp_path / "a") for name in names if name.endswith(".part")] == []
    written = [r.getMessage() for r in caplog.records if r.name == "sectorch.answer"]
    assert until(lambda: any("No space left" in r.getMessage() for r in caplog.records), 30), written


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "key", bytes(32))
    store = Store(tmp_path / "store", key_file=_key(tmp_path, monkeypatch))
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(errors.StoreFullError, match="No space left on device"):
        store.shelf(bytes(16), MaterialBinding(client="alice"))
    assert [
        p.name for p in tmp_path.rglob("*") if p.name not in ("store", "store.lock", "store.used", "store.name", "kept")
    ] == []


def _key(folder, monkeypatch):
    monkeypatch.undo()
    files.write(folder / "kept", bytes(range(32)))
    return folder / "kept"


def test_an_error_of_another_kind_names_the_party_where_it_arose():
    assert abort_reason(KeyError("a weight"), "the server") == "KeyError: at the server, whose own log says more"


# Lines.


@pytest.mark.parametrize("text", ["over\n2026-01-01 alice connected", "\x1b[2K\rnothing", "a b\u2028c", 'a" b="c'])
def test_what_another_party_says_stays_within_its_value(text, tmp_path):
    log, file = logging.getLogger("sectorch.test"), tmp_path / "log"
    handler = logging.FileHandler(file)
    handler.setFormatter(LineFormatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        write(log, "session ended", client="alice", why=text)
        log.warning("%s", text)
    finally:
        log.removeHandler(handler)
        handler.close()
    lines = file.read_text().split("\n")
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert lines[0].startswith("session ended client=alice why=")
    assert json.loads(lines[0].partition("why=")[2]) == text


def test_a_log_file_has_the_queries_though_the_terminal_has_not(tmp_path, capsys):
    with logs_as_in_a_new_process():
        begin(tmp_path / "log", logging.WARNING)
        write(QUERIES, "query", client="alice")
    assert (tmp_path / "log").read_text().endswith(" query client=alice\n")
    assert capsys.readouterr().err == ""
