"""Boosted trees among four hospitals as processes over mutual TLS: the bits of one process, and of the reference."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from boosting_programs import OWNERS
from commands import PIPE, Command

from sectorch.cli.main import run
from sectorch.testing.local_network import PROGRAM, free_port

PROGRAMS = Path(__file__).parent / "boosting_programs.py"
PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H4"}
LEARNERS = ("east", "mid")


def inputs(way: str, folder: Path) -> dict[str, Path]:
    """What each hospital has, as files: columns, or rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).round(2)
    people = np.c_[x, x[:, 0] + x[:, 3] > 0.2 * random.normal(size=60)].astype(np.float64)
    have = (
        {"Q": people[:, :1], "A": people[:, 1:2], "S": people[:, 2:3], "H4": people[:, 3:]}
        if way == "vertical"
        else dict(zip(OWNERS, np.array_split(people, 4), strict=True))
    )
    files = {owner: folder / f"{owner}.npy" for owner in OWNERS}
    for owner, own in have.items():
        np.save(files[owner], own)
    return files


@pytest.mark.sectorch_long
@pytest.mark.parametrize("way", ["vertical", "horizontal"])
def test_four_hospitals_as_processes_train_the_trees_of_one_process(tmp_path, capsys, way):
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(Command([*PROGRAM, *arguments], cwd=tmp_path, stdout=PIPE, stderr=PIPE, env=environment))
        return started[-1]

    files = inputs(way, tmp_path)
    own = {name: ["--input", f"{role}={files[role]}"] for name, role in PARTIES.items()}
    try:
        alone = start("run", f"{PROGRAMS}:{way}", *itertools.chain(*own.values()), "--out", "alone.npz", "--json")
        _, errors = alone.communicate(timeout=600)
        assert alone.returncode == 0, errors
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        trial, server = tmp_path / "trial", f"localhost:{free_port()}"
        assert run(["federation", "try", str(trial), *entries, "--server", server, "--json"]) == 0
        start(*shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])
        file = str(trial / "federation.toml")
        parties = {
            name: start("run", f"{PROGRAMS}:{way}", "--federation", file, "--as", name, *own[name],
                        "--out", f"{name}.npz", "--json")
            for name in PARTIES
        }  # fmt: skip
        said = {name: process.communicate(timeout=600) for name, process in parties.items()}
        assert [process.returncode for process in parties.values()] == [0] * len(PARTIES), said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    wanted = dict(np.load(tmp_path / "alone.npz"))
    assert set(wanted) == {"risk", "features_", "thresholds_", "leaves_", "base_"}
    assert np.unique(wanted["risk"]).size > 2
    for name in PARTIES:
        learned = dict(np.load(tmp_path / f"{name}.npz")) if (tmp_path / f"{name}.npz").exists() else {}
        learned = {"risk" if key == "result" else key: value for key, value in learned.items()}  # a single one
        expected = set(wanted) - {"risk"} if name in LEARNERS else {"risk"} if name == "north" else set()
        assert set(learned) == expected, name
        assert all(np.array_equal(learned[key], wanted[key]) for key in learned), name
