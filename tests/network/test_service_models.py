"""A model under `sectorch up`, as its owner and those who ask have it: whom it answers, and whom not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Command, run_command
from network_world import until
from torch import nn

from sectorch.cli.main import run
from sectorch.network import save_model
from sectorch.testing.local_network import PROGRAM, free_port


@pytest.fixture
def folder(tmp_path) -> Path:
    """A federation of a clinic, which answers alice and not bob."""
    server = f"localhost:{free_port()}"
    parties = ["clinic=A", "alice=Q", "bob=B"]
    assert run(["federation", "try", str(tmp_path / "fed"), *parties, "--server", server, "--json"]) == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 6)
    save_model(model, x, tmp_path / "model.safetensors")
    np.save(tmp_path / "x.npy", x.numpy())
    with torch.no_grad():
        np.save(tmp_path / "y.npy", model(x).numpy())
    file, what = str(tmp_path / "fed" / "federation.toml"), str(tmp_path / "model.safetensors")
    assert run(["federation", "accept", file, what, "--as", "clinic", "--from", "alice", "--json"]) == 0
    return tmp_path


def test_who_asks_is_said_by_files_or_by_a_federation_and_not_by_both(folder, capsys):
    file, x = str(folder / "fed" / "federation.toml"), str(folder / "x.npy")
    whole = ["--federation", file, "--as", "alice"]
    for words, why in (
        ([], "say who asks"),
        (["--federation", file], "leave the other out"),
        ([*whole, "--pins", x], "leave the other out"),
        ([*whole, "--cert", x], "leave the other out"),
        (["--as", "alice"], "say who asks"),
        (["--federation", file, "--as", "nobody"], "has no party 'nobody'"),
    ):
        assert run(["query", "clinic", x, *words]) == 1
        assert why in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert run(["query", "nobody", x, *whole]) == 1
    assert "has no party 'nobody'" in capsys.readouterr().err


@pytest.mark.sectorch_long
def test_a_model_is_answered_to_whom_its_owner_has_accepted(folder):
    """Processes: right for alice, refused to bob, right again for alice after the clinic was killed -9."""
    file, known = str(folder / "fed" / "federation.toml"), {**os.environ, "OMP_NUM_THREADS": "1"}
    (folder / "fed" / "clinic.toml").write_text(
        f'[files]\nreceipts = "{folder}/receipts"\n\n' + (folder / "fed" / "clinic.toml").read_text()
    )
    running: dict[str, Command] = {}

    def up(name: str) -> None:
        with (folder / f"{name}.log").open("a") as log:
            running[name] = Command([*PROGRAM, "up", file, "--as", name], stdout=log, stderr=log, env=known)

    def asks(name: str, out: str) -> subprocess.CompletedProcess:
        words = ["query", "clinic", str(folder / "x.npy"), "--federation", file, "--as", name, "--out", out, "--json"]
        own = ["--store", str(folder / f"{name}-store")]
        return run_command([*PROGRAM, *words, *own], timeout=240, env=known)

    answers = lambda times: (folder / "clinic.log").read_text().count("answers through") == times
    try:
        up("server"), up("clinic")
        assert until(lambda: answers(1), 240), (folder / "clinic.log").read_text()
        first = asks("alice", str(folder / "first.npy"))
        assert first.returncode == 0, first.stderr
        np.testing.assert_allclose(np.load(folder / "first.npy"), np.load(folder / "y.npy"), atol=1e-3)
        refused = asks("bob", str(folder / "bob.npy"))
        assert refused.returncode == 1 and "has not accepted that 'bob' asks" in refused.stderr
        assert not (folder / "bob.npy").exists()
        running["clinic"].send_signal(signal.SIGKILL)
        running["clinic"].wait()
        up("clinic")
        assert until(lambda: answers(2), 240), (folder / "clinic.log").read_text()
        again = asks("alice", str(folder / "again.npy"))
        assert again.returncode == 0 and json.loads(again.stdout)["version"] == json.loads(first.stdout)["version"]
        np.testing.assert_allclose(np.load(folder / "again.npy"), np.load(folder / "y.npy"), atol=1e-3)
        for name in ("clinic", "server"):
            running[name].terminate()
            assert running[name].wait(60) == 0
        assert run(["audit", str(folder / "receipts" / "clinic-A.receipts"), "--json"]) == 0
    finally:
        for process in running.values():
            process.kill()
            process.wait()
