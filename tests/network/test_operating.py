"""What an operator meets on a bad day: full disks, open files, addresses of two kinds. Each is one line with a way out."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from network_world import Trio

from sectorch import errors
from sectorch.cli.main import run
from sectorch.network import Store
from sectorch.network.commands.array_files import write_arrays
from sectorch.network.commands.options import check_store_room
from sectorch.network.log import begin
from sectorch.network.wire.endpoints import listen_address

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


# Addresses.


@pytest.mark.parametrize(
    ("server", "listen"),
    [
        ("localhost:7100", "localhost:7100"),
        ("127.0.0.1:7100", "127.0.0.1:7100"),
        ("127.9.9.9:7100", "127.9.9.9:7100"),
        ("[::1]:7100", "[::1]:7100"),
        ("[0:0:0:0:0:0:0:1]:7100", "[::1]:7100"),
        ("[2001:db8::7]:7100", "[::]:7100"),
        ("192.0.2.1:7100", "0.0.0.0:7100"),
        ("cloud.example:7100", "0.0.0.0:7100"),
        ("localhost.example:7100", "0.0.0.0:7100"),
    ],
)
def test_a_server_listens_where_its_clients_dial(tmp_path, capsys, server, listen):
    assert listen_address(server) == listen
    assert run(["keys", "try", str(tmp_path / "trial"), "--server", server]) == 0
    assert f"sectorch server --listen {listen} " in capsys.readouterr().out


@pytest.mark.parametrize("server", ["7100", "host:", ":7100", "host:x", "host:70000", "[]:7100"])
def test_keys_try_refuses_what_is_no_address(tmp_path, capsys, server):
    assert run(["keys", "try", str(tmp_path / "trial"), f"--server={server}"]) == 1
    assert "a server's address is host:port" in capsys.readouterr().err and not (tmp_path / "trial").exists()


# Files of secrets.


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_files_of_a_store_a_log_and_a_result_are_their_owners_alone(trio, open_umask, tmp_path):
    """With a umask that allows everything; pieces, bindings, names, keys, locks of S, A and Q."""
    trio.close()
    stores = {who: Store(tmp_path / who) for who in "SAQ"}
    assert all(len(store.name) == 32 for store in stores.values())
    trio.start_server(stores["S"])
    trio.start_answering(stores["A"])
    trio.start_querying(stores["Q"])
    trio.connection.model("hospital-b").prepare(X, 1)
    kept = [path for who in "SAQ" for path in (tmp_path / who).rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} >= {".piece", ".sealed", ".key", ".lock", ".name"}
    assert {path.name: mode(path) for path in kept if mode(path) != 0o600} == {}
    for suffix in (".npy", ".npz", ".safetensors", ""):
        (tmp_path / f"y{suffix}").touch(0o666)
        for name in ("x", "y"):
            write_arrays(torch.ones(2), tmp_path / f"{name}{suffix}")
            assert mode(tmp_path / f"{name}{suffix}") == 0o600


def test_a_log_is_its_owners_alone_and_one_that_exists_stays_as_it_is(tmp_path, open_umask):
    root, before = logging.getLogger(), logging.getLogger().handlers
    (tmp_path / "shared.log").touch(0o640)
    try:
        for name, wanted in (("new.log", 0o600), ("shared.log", 0o640)):
            root.handlers = []
            begin(tmp_path / name)
            logging.getLogger("sectorch.server").warning("a line")
            for handler in root.handlers:
                handler.close()
            assert mode(tmp_path / name) == wanted and "a line" in (tmp_path / name).read_text()
    finally:
        root.handlers = before


@pytest.mark.parametrize("permissions", [0o644, 0o640, 0o604, 0o660])
def test_a_key_of_a_store_that_others_can_read_is_refused(tmp_path, permissions):
    Store(tmp_path / "own").close()
    key = tmp_path / "own" / "store.key"
    key.chmod(permissions)
    with pytest.raises(errors.ArgumentError, match=f"others can read {key}, .*: chmod 600 {key}, and if"):
        Store(tmp_path / "own")
    with pytest.raises(errors.ArgumentError, match="others can read"):
        Store(tmp_path / "other", key)
    key.chmod(0o600)
    Store(tmp_path / "own").close()


# Full disks.


@pytest.fixture
def full_disk(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)


def test_a_store_that_is_there_may_be_full_and_one_that_is_not_says_what_it_needs(tmp_path, capsys, full_disk):
    with pytest.raises(errors.ArgumentError, match=r"has less than 1 MiB, which are needed to start\); make room"):
        check_store_room(tmp_path / "new", "--store")
    for at in (tmp_path / "one", tmp_path / "many" / "worker-0"):
        Store(at).close()
    for at in ("one", "many"):
        check_store_room(tmp_path / at, "--store")
        assert re.search(r"is full .*: nothing more is prepared until there is room; queries", capsys.readouterr().err)
