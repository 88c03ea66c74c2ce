"""The five papers' commands: a process of each party over mutual TLS, and one process with all of them, bit for bit."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drawn import FOLDER
from network_world import until
from torch.utils import _pytree as pytree

from sectorch.cli.main import run
from sectorch.network.parties.stage import PROGRAM, free_port

HERE = Path(__file__).parent


@dataclass
class Paper:
    """A command, its parties, the names in its results that all who have them must have alike, and whose files."""

    line: str
    parties: dict[str, str]
    results: tuple[str, ...] = ()
    keeping: tuple[str, ...] | None = None


CLIENTS = ("north", "south", "west")
PAPERS = {
    "perturbed-fl": Paper(
        "perturbed-fl --data digits --clients 3 --rounds 4 --batch-size 8",
        {"hub": "Server", **{name: f"C{i}" for i, name in enumerate(CLIENTS)}},
        keeping=("hub",),  # a client has no model
    ),
    "capride": Paper(
        "capride --parties 3 --samples 32 --test-samples 100 --network mlp --rounds 2 --warmup 2 --head-rank 4",
        {name: f"P{i + 1}" for i, name in enumerate(CLIENTS)},
    ),
    "privhfl": Paper(
        "privhfl --clients 3 --samples 60 --test-samples 100 --queries 8 --local-epochs 2 --retraining-epochs 2",
        {"hub": "S", **{name: f"c{i + 1}" for i, name in enumerate(CLIENTS)}},
    ),
    "capc": Paper(
        "capc --parties 4 --querying 2 --pool 6 --queries 4 --epsilon 60 --argmax shares --local-optimiser sgd "
        "--local-lr 0.1 --local-epochs 2",
        {"hub": "S", **{name: f"p{i + 1}" for i, name in enumerate((*CLIENTS, "east"))}},
    ),
    "shapley": Paper(
        "shapley --clients 3 --rounds 2 --samples 120 --tests 24 --skip --no-compare",
        {"hub": "P", "helper": "X", **{name: f"c{i + 1}" for i, name in enumerate(CLIENTS)}},
        ("values", "intervals", "rounds"),
        keeping=("hub",),  # the others have no values
    ),
}  # fmt: skip


def started(folder: Path, *line: str, **more: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, FOLDER: str(folder / "keys"), **more}
    command = [sys.executable, str(HERE / "drawn_command.py"), *line, "--no-plots"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def tensors(folder: Path) -> dict[str, object]:
    return {str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in folder.rglob("*.pt")}


def leaves(value: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


@pytest.mark.long
@pytest.mark.parametrize("name", PAPERS)
def test_commands(name, tmp_path, capsys):
    """All tensors that a party keeps and the simulation keeps under the same name are equal: weights, labels, models.
    So are the ledgers in their results."""
    paper = PAPERS[name]
    (tmp_path / "keys").mkdir()
    entries = [f"{party}={role}" for party, role in paper.parties.items()]
    server = f"localhost:{free_port()}"
    assert run(["federation", "try", str(tmp_path / "trial"), *entries, "--server", server, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    line, begun = shlex.split(paper.line), time.monotonic()
    whole = started(tmp_path, *line, "--out", "whole")
    said, _ = whole.communicate(timeout=400)
    assert whole.returncode == 0, said
    seconds = [time.monotonic() - begun]

    hub = subprocess.Popen(
        [*PROGRAM, *shlex.split(made["server_command"])[1:]], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    parties: dict[str, subprocess.Popen] = {}
    try:
        begun = time.monotonic()
        join = ["--federation", str(tmp_path / "trial" / "federation.toml")]
        for party in paper.parties:
            parties[party] = started(tmp_path, *line, *join, "--as", party, "--out", party)
        assert until(lambda: all(process.poll() is not None for process in parties.values()), 500)
        seconds.append(time.monotonic() - begun)
        told = {party: process.communicate()[0] for party, process in parties.items()}
        assert all(process.returncode == 0 for process in parties.values()), told
    finally:
        for process in (hub, *parties.values()):
            process.kill()
            process.wait()

    expected, compared = tensors(tmp_path / "whole"), 0
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    for party in paper.keeping or paper.parties:
        for path, value in tensors(tmp_path / party).items():
            if path in expected and leaves(value):
                compared += 1
                pairs = zip(leaves(value), _of(expected[path], value), strict=True)
                assert all(torch.equal(x, y) for x, y in pairs), (party, path)
        own = json.loads((tmp_path / party / "results.json").read_text())
        for key in paper.results:
            assert key not in own or own[key] == results[key], (party, key)
    assert compared or paper.results
    print(f"{name}: {compared} files alike; {seconds[0]:.1f} s in one process, {seconds[1]:.1f} s in {len(parties)}")


def _of(whole: object, part: object) -> list[torch.Tensor]:
    """Of a file with all parties' tensors by name, those of the party that has the other file."""
    if isinstance(whole, dict) and isinstance(part, dict) and whole.keys() > part.keys():
        return leaves({key: whole[key] for key in part})
    return leaves(whole)
