"""`examples/registry.py` as five processes and a server over mutual TLS: the releases of one process, bit for bit."""

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

EXAMPLE = Path(__file__).parents[2] / "examples" / "registry.py"
PARTIES = {"north": "Q", "vendor": "A", "centre": "S", "south": "south", "registry": "registry"}


@pytest.mark.sectorch_long
def test_hospitals_registry_and_vendor_as_processes_learn_what_one_process_releases(tmp_path, capsys):
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(
            [*PROGRAM, *arguments], cwd=tmp_path, stdout=PIPE, stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ))  # fmt: skip
        return started[-1]

    run_command([sys.executable, str(EXAMPLE), str(tmp_path)], check=True)
    own = {name: ["--input", f"{role}={name}.npy"] for name, role in PARTIES.items() if name != "centre"}
    try:
        alone = start("run", f"{EXAMPLE}:program", *itertools.chain(*own.values()), "--out", "alone.npz", "--json")
        found, errors = alone.communicate(timeout=600)
        assert alone.returncode == 0, errors
        one = json.loads(found)["cost"]
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        trial, server = tmp_path / "trial", f"localhost:{free_port()}"
        assert run(["federation", "try", str(trial), *entries, "--server", server, "--json"]) == 0
        start(*shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])
        file, began = str(trial / "federation.toml"), time.monotonic()
        parties = {
            name: start("run", f"{EXAMPLE}:program", "--federation", file, "--as", name, *own.get(name, ()),
                        "--out", f"{name}.npz", "--json")
            for name in PARTIES
        }  # fmt: skip
        said = {name: process.communicate(timeout=900) for name, process in parties.items()}
        took = time.monotonic() - began
        assert [process.returncode for process in parties.values()] == [0] * 5, said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    wanted = dict(np.load(tmp_path / "alone.npz"))
    for name in ("north", "south", "registry", "vendor"):
        learned = dict(np.load(tmp_path / f"{name}.npz"))
        expected = {key: v for key, v in wanted.items() if name != "vendor" or key.startswith("vendor")}
        assert learned.keys() == expected.keys(), name
        assert all(np.array_equal(learned[key], v, equal_nan=True) for key, v in expected.items()), name
    assert not (tmp_path / "centre.npz").exists() or not dict(np.load(tmp_path / "centre.npz"))
    cost = json.loads(said["south"][0])["cost"]
    print(
        f"one process {one['seconds']:.1f} s, {one['bytes'] / 1e6:.2f} MB; five {cost['seconds']:.1f} s ({took:.1f} s "
        f"with their start), {cost['bytes'] / 1e6:.2f} MB"
    )
