"""Statistics of a table among parties apart, over TLS: the bits of one process at those who learn, none elsewhere."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import PIPE, Command
from table_programs import example, statistics

from sectorch.cli.main import run
from sectorch.federated.parties import Simulation
from sectorch.testing.local_network import PROGRAM, free_port

PROGRAMS = Path(__file__).parent / "table_programs.py"
PARTIES = {"north": "Q", "registry": "A", "south": "S", "west": "H4"}
OWNERS, LEARNERS = ("Q", "A", "H4"), ("south", "west")


@pytest.mark.sectorch_long
def test_statistics_of_four_processes_are_those_of_one(tmp_path, capsys):
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(Command([*PROGRAM, *arguments], cwd=tmp_path, stdout=PIPE, stderr=PIPE, env=environment))
        return started[-1]

    for owner in OWNERS:
        np.save(tmp_path / f"{owner}.npy", example(owner).numpy())
    own = {name: ["--input", f"{role}={role}.npy"] if role in OWNERS else [] for name, role in PARTIES.items()}
    program = f"{PROGRAMS}:statistics"
    try:
        alone = start("run", program, *itertools.chain(*own.values()), "--out", "alone.npz", "--json")
        found, errors = alone.communicate(timeout=600)
        assert alone.returncode == 0, errors
        one = json.loads(found)["cost"]
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        trial, server = tmp_path / "trial", f"localhost:{free_port()}"
        assert run(["federation", "try", str(trial), *entries, "--server", server, "--json"]) == 0
        start(*shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])
        file = str(trial / "federation.toml")
        parties = {
            name: start("run", program, "--federation", file, "--as", name, *own[name], "--out", f"{name}.npz",
                        "--json")
            for name in PARTIES
        }  # fmt: skip
        said = {name: process.communicate(timeout=600) for name, process in parties.items()}
        assert [process.returncode for process in parties.values()] == [0] * len(PARTIES), said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    wanted = dict(np.load(tmp_path / "alone.npz"))
    plain = statistics(Simulation({owner: example(owner) for owner in OWNERS}))
    assert wanted.keys() == plain.keys()
    assert all(np.array_equal(wanted[key], plain[key], equal_nan=True) for key in wanted)
    for name in PARTIES:
        learned = dict(np.load(tmp_path / f"{name}.npz")) if (tmp_path / f"{name}.npz").exists() else {}
        assert set(learned) == (set(wanted) if name in LEARNERS else set()), name
        assert all(np.array_equal(learned[key], wanted[key], equal_nan=True) for key in learned), name
    apart = json.loads(said["south"][0])["cost"]
    print(f"one process {one['seconds']:.1f} s, {one['rounds']} rounds, {one['bytes'] / 1e6:.2f} MB; four "
          f"{apart['seconds']:.1f} s, {apart['rounds']} rounds, {apart['bytes'] / 1e6:.2f} MB")  # fmt: skip


def test_the_program_in_one_process_is_right():
    """What the program of the processes computes, against numpy."""
    own = {owner: example(owner) for owner in OWNERS}
    found = statistics(Simulation(own))
    rows, died = torch_rows(own), own["A"].numpy()[:, 0] == 1
    age, months, sex = rows.T
    for code in (0, 1):
        assert abs(found["mean"][code, 0] - np.nanmean(age[sex == code])) <= 2.0**-20
    with np.errstate(invalid="ignore"):
        old = age >= 60
    counts = [[(old & (sex == s) & (died == d)).sum() for d in (False, True)] for s in (0, 1)]
    assert found["old"].tolist() == counts
    assert found["median"] == np.median(age[old])
    assert abs(found["deviation"] - months[old].std(ddof=1)) <= 2.0**-19
    known = ~np.isnan(age)
    assert abs(found["correlation"][0, 1] - np.corrcoef(age[known], months[known])[0, 1]) <= 2.0**-19


def torch_rows(own: dict) -> np.ndarray:
    return np.concatenate([own["Q"].numpy(), own["H4"].numpy()])
