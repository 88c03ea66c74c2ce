"""The five papers' commands: a process of each party over mutual TLS, and one process with all of them, bit for bit."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from commands import DEVNULL, Command, run_command
from network_world import until
from paper_world import PAPERS, Paper, compared, costs, started

from sectorch.cli.main import run
from sectorch.testing.local_network import PROGRAM, free_port


def alone(paper: Paper, folder: Path) -> float:
    """All parties in one process, and its seconds."""
    begun = time.monotonic()
    process = started(folder, *shlex.split(paper.line), "--no-plots", "--out", "whole")
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return time.monotonic() - begun


def federation(paper: Paper, folder: Path, capsys: pytest.CaptureFixture) -> Path:
    (folder / "keys").mkdir()
    entries = [f"{party}={role}" for party, role in paper.parties.items()]
    server = f"localhost:{free_port()}"
    assert run(["federation", "try", str(folder / "trial"), *entries, "--server", server, "--json"]) == 0
    capsys.readouterr()
    return folder / "trial" / "federation.toml"


def said_of(processes: dict[str, Command]) -> dict[str, str]:
    for process in processes.values():
        process.kill()
    return {name: process.communicate()[0] or "" for name, process in processes.items()}


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", PAPERS)
def test_commands(name, tmp_path, capsys):
    """All tensors that a party keeps and the simulation keeps under the same name are equal: weights, labels, models.
    So are the values in their results, the bytes of each message and the rounds of each call."""
    paper = PAPERS[name]
    file = federation(paper, tmp_path, capsys)
    seconds = [alone(paper, tmp_path)]
    hub = Command([*PROGRAM, "up", str(file), "--as", "server"], cwd=tmp_path, stderr=DEVNULL)
    parties: dict[str, Command] = {}
    try:
        begun = time.monotonic()
        join = ["--no-plots", "--federation", str(file)]
        for party in paper.parties:
            parties[party] = started(tmp_path, *shlex.split(paper.line), *join, "--as", party, "--out", party)
        assert until(lambda: all(process.poll() is not None for process in parties.values()), 500)
        seconds.append(time.monotonic() - begun)
        ended = [process.returncode for process in parties.values()]
    finally:
        told = said_of({"server": hub, **parties})
    assert ended == [0] * len(parties), told
    folders = {party: tmp_path / party for party in paper.parties}
    count, cost = compared(paper, tmp_path / "whole", folders), costs(paper, tmp_path / "whole", folders.values())
    print(
        f"{name}: {count} files alike; {seconds[0]:.1f} s in one process, {seconds[1]:.1f} s in {len(parties)}; {cost}"
    )


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", PAPERS)
def test_up_and_run(name, tmp_path, capsys):
    """The same by `sectorch run`, among parties that are up and have accepted it before."""
    paper = PAPERS[name]
    file = federation(paper, tmp_path, capsys)
    _, *options = shlex.split(paper.line)
    for party in paper.parties:
        own = ["--own", f"budgets={tmp_path}/{party}-budgets", "--own", "budget_epsilon=300"] if paper.own else []
        assert run(["federation", "accept", str(file), name, "--as", party, *own, "--json", "--", *options]) == 0
    starter = next(party for party in paper.parties if party != "hub")
    seconds = [alone(paper, tmp_path)]
    ups = {party: started(tmp_path, "up", str(file), "--as", party) for party in ("server", *paper.parties)}
    try:
        begun = time.monotonic()
        start = [*PROGRAM, "run", str(file), name, "--as", starter, "--json", "--wait", "240", "--", *options]
        said = run_command(start, cwd=tmp_path, timeout=400)
        seconds.append(time.monotonic() - begun)
    finally:
        told = said_of(ups)
    assert said.returncode == 0, (said.stderr, told)
    found = json.loads(said.stdout)["parties"]
    assert {party: line["outcome"] for party, line in found.items()} == dict.fromkeys(paper.parties, "done")
    folders = {party: next((file.parent / f"{party}-results").glob(f"{name}-*-1")) for party in paper.parties}
    count, cost = compared(paper, tmp_path / "whole", folders), costs(paper, tmp_path / "whole", folders.values())
    if paper.own:
        assert all(list((tmp_path / f"{party}-budgets").iterdir()) for party in paper.parties if party != "hub")
    print(f"{name}: {count} files alike; {seconds[0]:.1f} s in one process, {seconds[1]:.1f} s by run; {cost}")
