"""`examples/hospitals.py` as five processes and a server over mutual TLS: the bits of one process, and its costs."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import PIPE, Command, run_command

from sectorch.cli.main import run
from sectorch.testing.local_network import PROGRAM, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals.py"
PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H4", "west": "H5"}


@pytest.mark.sectorch_long
@pytest.mark.parametrize("way", ["horizontal", "vertical"])
def test_five_hospitals_as_processes_learn_the_model_of_one_process(tmp_path, capsys, way):
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(
            [*PROGRAM, *arguments], cwd=tmp_path, stdout=PIPE, stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ))  # fmt: skip
        return started[-1]

    run_command([sys.executable, str(EXAMPLE), str(tmp_path)], check=True)
    own = {name: ["--input", f"{role}={way}-{role}.npy"] for name, role in PARTIES.items()}
    try:
        alone = start("run", f"{EXAMPLE}:{way}", *itertools.chain(*own.values()), "--out", "alone.npz", "--json")
        found, errors = alone.communicate(timeout=600)
        assert alone.returncode == 0, errors
        one = json.loads(found)["cost"]
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        trial, server = tmp_path / "trial", f"localhost:{free_port()}"
        assert run(["federation", "try", str(trial), *entries, "--server", server, "--json"]) == 0
        start(*shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])
        file, began = str(trial / "federation.toml"), time.monotonic()
        parties = {
            name: start("run", f"{EXAMPLE}:{way}", "--federation", file, "--as", name, *own[name],
                        "--out", f"{name}.npz", "--json")
            for name in PARTIES
        }  # fmt: skip
        said = {name: process.communicate(timeout=600) for name, process in parties.items()}
        took = time.monotonic() - began
        assert [process.returncode for process in parties.values()] == [0] * 5, said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    wanted = dict(np.load(tmp_path / "alone.npz"))
    for name in PARTIES:
        learned = dict(np.load(tmp_path / f"{name}.npz"))
        assert learned.keys() == wanted.keys()
        assert all(np.array_equal(learned[key], wanted[key]) for key in wanted), name
    cost = json.loads(said["south"][0])["cost"]
    print(
        f"{way}: one process {one['seconds']:.1f} s, {one['rounds']} rounds, {one['bytes'] / 1e6:.2f} MB; five "
        f"{cost['seconds']:.1f} s ({took:.1f} s with their start), {cost['rounds']} rounds, {cost['bytes'] / 1e6:.2f} "
        f"MB"
    )
