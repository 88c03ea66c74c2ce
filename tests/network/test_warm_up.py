"""Loops that are compiled before the first query, once on a machine."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import sectorch
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


LOOP = """
from sectorch.ring.jit import compiled


@compiled
def doubled(x):
    return 2 * x
"""


def test_loops_of_a_folder_that_cannot_be_written_are_read_from_it(tmp_path, monkeypatch):
    """And nothing is written, nor is another folder taken."""
    (tmp_path / "loop_of_an_image.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "loops"))

    def imported():
        sys.modules.pop("loop_of_an_image", None)
        return importlib.import_module("loop_of_an_image").doubled

    assert imported()(21) == 42
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "loops").rglob("*")}
    assert kept
    monkeypatch.setattr("sectorch.ring.jit.os.access", lambda *_: False)
    loop = imported()
    assert loop(21) == 42 and loop.stats.cache_path.startswith(str(tmp_path / "loops"))
    assert sum(loop.stats.cache_hits.values()) == 1
    assert loop(0.5) == 1.0, "another kind of number is compiled, and not kept"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "loops").rglob("*")} == kept


def test_loops_for_another_processor_in_a_folder_that_cannot_be_written_are_no_secret(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(warming, "loop_folder", lambda: tmp_path)
    monkeypatch.setattr(warming.os, "access", lambda *_: False)
    assert warming.warm(said.append) > 0 and list(tmp_path.iterdir()) == []
    assert len(said) == 1 and "not for this processor" in said[0] and "NUMBA_CACHE_DIR" in said[0]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["warm", "--into", str(tmp_path / "file" / "loops")]) == 1
    assert "compiled loops cannot be kept in" in capsys.readouterr().err


@pytest.mark.sectorch_long
def test_a_read_only_package_without_a_home_compiles_nothing_after_warm_into(tmp_path):
    """In a mount namespace, where package and folder are read-only for root too. All may read them."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    loops, package, before = tmp_path / "loops", Path(sectorch.__file__).parent, os.umask(0o077)
    try:
        subprocess.run([sys.executable, "-m", "sectorch", "warm", "--into", str(loops)], check=True, timeout=900)
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o004 for path in loops.rglob("*"))
    count = len(list(loops.rglob("*.nbc")))
    fixed = "; ".join(f"mount --bind {path} {path}; mount -o remount,bind,ro {path}" for path in (loops, package))
    own = [f"NUMBA_CACHE_DIR={loops}", f"PYTHONPATH={package.parent}", "PATH=/usr/bin:/bin", "HOME=/nonexistent"]
    bare = ["unshare", "-m", "bash", "-c", f'set -e; {fixed}; exec env -i "$@"', "bash", *own]
    python = [*bare, "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", sys.executable]
    again = subprocess.run([*python, "-m", "sectorch", "warm"], cwd="/", capture_output=True, text=True, timeout=600)
    assert again.stdout.startswith(f"compiled before, in {loops}") and again.stderr == ""
    fails = "import numba.core.dispatcher as d; d.compiler.compile_extra = None\n"  # what compiles anew
    subprocess.run([*python, "-c", fails + NET], cwd="/", check=True, timeout=600)
    assert len(list(loops.rglob("*.nbc"))) == count > 15


@pytest.mark.sectorch_long
def test_a_query_after_it_compiles_nothing(tmp_path):
    """In an empty folder of compiled loops: as many files after a query as before it."""
    known = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    count = lambda: len(list(Path(tmp_path).rglob("*.nbc")))
    subprocess.run([sys.executable, "-m", "sectorch.cli.main", "warm"], env=known, check=True, timeout=600)
    before = count()
    subprocess.run([sys.executable, "-c", NET], env=known, check=True, timeout=600)
    assert count() == before > 15
