"""Loops that are compiled before the first query, once on a machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sectorch.cli.main import run
from sectorch.network import warm_up as warming
from sectorch.network.identity.authority import enrol, make_authority


def test_it_is_said_once_and_kept_beside_the_loops(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(warming, "loop_folder", lambda: tmp_path)
    assert warming.warm(said.append) > 0
    assert len(said) == 1 and str(tmp_path) in said[0] and list(tmp_path.glob("sectorch-*.compiled"))
    assert warming.warm(said.append) == 0 and len(said) == 1


def test_where_nothing_can_be_kept_it_says_so_each_time(monkeypatch, capsys):
    monkeypatch.setattr(warming, "loop_folder", lambda: None)
    assert run(["warm", "--json"]) == 0
    out, err = capsys.readouterr()
    assert '"folder": null' in out and "NUMBA_CACHE_DIR" in err and err.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    make_authority(tmp_path)
    enrol(tmp_path, "server", hosts=("localhost",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sectorch.network.commands.serve.warm", lambda tell: pytest.fail("it compiled first"))
    with socket.create_server(("localhost", 0)) as other:
        files = ["--cert", "server.pem", "--key", "server-key.pem", "--clients-ca", "ca.pem"]
        assert run(["server", "--listen", f"localhost:{other.getsockname()[1]}", *files]) == 1
    assert "cannot listen on localhost" in capsys.readouterr().err


NET = """
import torch
from torch import nn
import sectorch
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
sectorch.secure(net)(torch.rand(8, 1, 8, 8))
sectorch.secure(nn.Conv2d(48, 48, 3).eval())(torch.rand(1, 48, 60, 60))
"""


@pytest.mark.sectorch_long
def test_a_query_after_it_compiles_nothing(tmp_path):
    """In an empty folder of compiled loops: as many files after a query as before it."""
    known = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    count = lambda: len(list(Path(tmp_path).rglob("*.nbc")))
    subprocess.run([sys.executable, "-m", "sectorch.cli.main", "warm"], env=known, check=True, timeout=600)
    before = count()
    subprocess.run([sys.executable, "-c", NET], env=known, check=True, timeout=600)
    assert count() == before > 15
