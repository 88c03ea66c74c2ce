"""The sweeps of `sweeps/`, as a long test, and what their cases stand on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from network_world import until
from sweeps.leaks import across
from sweeps.links import MODES, Proxy
from sweeps.papers import PAPERS, apart
from sweeps.sweep import places

HERE = Path(__file__).parent
SENT = bytes(range(256)) * 40


@pytest.mark.parametrize("count", [1, 7, 20])
def test_places_are_all_over_a_run(count):
    events = "ssrrff" * 50
    found = places(events, count)
    assert len(found) == len(set(found)) == count
    among_all = [number for kinds, number in found if not kinds]
    assert all(0 <= number < len(events) for number in among_all)
    if count == 20:
        assert max(among_all) - min(among_all) > 0.9 * len(events) and sum(bool(kinds) for kinds, _ in found) == 6


def test_results_are_compared_tensor_by_tensor():
    """A large tensor that differs by much does not hide a small one that differs by little; what is missing differs."""
    one = {"meter": torch.tensor([1e6]), "bias": torch.tensor([0.1, 0.2]), "none": torch.empty(0)}
    other = {"meter": torch.tensor([2e6]), "bias": torch.tensor([0.1, 0.5]), "none": torch.empty(0)}
    assert apart(one, other) == pytest.approx({"meter": 1e6, "bias": 0.3, "none": 0.0})
    assert apart(one, {**other, "bias": torch.tensor([0.1])})["bias"] == float("inf")
    assert apart(one, {"bias": other["bias"]})["meter"] == float("inf")
    assert apart({}, {}) == {"nothing": float("inf")}


class Through:
    """A connection through a proxy to a socket of this process."""

    def __init__(self, tmp_path: Path, mode: str):
        with socket.create_server(("127.0.0.1", 0)) as end, socket.create_server(("127.0.0.1", 0)) as free:
            port, target = free.getsockname()[1], end.getsockname()[1]
            free.close()
            self.proxy = Proxy(port, target, mode, True, 5000, str(tmp_path / "failed"), str(tmp_path / "passed"))
            threading.Thread(target=self.proxy.run, daemon=True).start()
            self.near = socket.create_connection(("127.0.0.1", port))
            self.far, _ = end.accept()
        self.came, self.over = b"", False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := self.far.recv(1 << 16):
                self.came += data
        self.over = True

    def send(self) -> None:
        with suppress(OSError):
            for at in range(0, len(SENT), 1000):
                self.near.sendall(SENT[at : at + 1000])
                until(lambda: len(self.came) >= at + 1000, 0.05)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_a_link_fails_as_it_is_told(tmp_path, mode):
    """The bytes before its place pass, and what comes after is as the mode says."""
    link = Through(tmp_path, mode)
    link.send()
    if mode in ("none", "delay"):
        assert until(lambda: link.came == SENT, 20)
    elif mode in ("drop", "close", "cut"):
        assert until(lambda: link.over, 20) and link.came == SENT[: len(link.came)] and len(link.came) < len(SENT)
    elif mode == "corrupt":
        assert until(lambda: len(link.came) == len(SENT), 20)
        assert sum(a != b for a, b in zip(link.came, SENT, strict=True)) == 1
    elif mode == "reorder":
        assert until(lambda: len(link.came) == len(SENT), 20) and link.came != SENT
        assert sorted(link.came) == sorted(SENT)
    elif mode == "truncate":
        assert until(lambda: len(link.came) == len(SENT) - 100, 20)
    else:
        assert until(lambda: (tmp_path / "failed").exists(), 20) and not link.over
        assert link.came == SENT[: len(link.came)] and len(link.came) < 6500
        assert mode != "trickle" or until(lambda: len(link.came) > 4000, 20)
    link.close()


def recorded(path: Path, *messages: np.ndarray) -> None:
    head = (
        '{"path": "p", "label": "l", "src": "S", "dst": "A", "role": "A", "hidden": true, "dtype": "int64", "size": %d}'
    )
    path.mkdir(parents=True)
    (path / "traffic").write_bytes(b"".join((head % m.nbytes).encode() + b"\n" + m.tobytes() for m in messages))


def test_a_mask_that_is_used_twice_is_found(tmp_path):
    """Secrets under fresh masks, under the same mask, and the same message again."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(-(2**63), 2**63 - 1, 4000)
    secret, mask = [rng.integers(0, 1 << 44, 4000) for _ in range(2)], draw()
    cases = {"fresh": [s + draw() for s in secret], "reused": [s + mask for s in secret], "again": [mask, mask]}
    for name, messages in cases.items():
        recorded(tmp_path / name / "alice", *messages)
    assert across(tmp_path / "fresh", ["alice"]) == set()
    assert "differ by what is not uniform" in str(across(tmp_path / "reused", ["alice"]))
    assert "the same in most bytes" in str(across(tmp_path / "again", ["alice"]))


@pytest.mark.sectorch_long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("of", ["inference", "training", *PAPERS])
@pytest.mark.parametrize("what", ["kill", "links"])
def test_a_sweep(tmp_path, what, of):
    """Each party killed at 20 places, each link failing in each way; see `python -m sweeps --help`."""
    command = [sys.executable, "-m", "sweeps", what, of, "--out", str(tmp_path)]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    start = time.monotonic()
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    print(done.stdout, f"{time.monotonic() - start:.0f} s")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sectorch_long
def test_idle_connections_beside_a_client(tmp_path):
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, "-m", "sweeps", "idle", "inference", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
