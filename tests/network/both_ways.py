"""A program in one process, and as a process of each party with a server, over mutual TLS."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from commands import PIPE, Command

from sectorch.cli.main import run
from sectorch.testing.local_network import PROGRAM, free_port


@dataclass
class BothWays:
    """What all learn in one process, what each party's process learns, and the costs of each."""

    wanted: dict[str, np.ndarray]
    learned: dict[str, dict[str, np.ndarray]]
    one: dict[str, Any]
    costs: dict[str, dict[str, Any]]
    seconds: float

    def line(self, name: str) -> str:
        """The costs in a line, of the processes as this party saw them."""
        described = lambda cost: f"{cost['seconds']:.1f} s, {cost['rounds']} rounds, {cost['bytes'] / 1e6:.2f} MB"
        parties = f"{len(self.costs)} {described(self.costs[name])} ({self.seconds:.1f} s with their start)"
        return f"one process {described(self.one)}; {parties}"


def run_both_ways(
    program: str,
    parties: Mapping[str, str],
    inputs: Mapping[str, Sequence[str]],
    folder: Path,
    capsys,
    killed: str = "",
) -> BothWays:
    """Run FILE:FUNCTION with `sectorch run` in this folder.

    Args:
        parties: each organisation and its role. inputs: the options of each organisation that has an input.
        killed: an organisation whose process is killed (-9) when it has saved a state; then all are started again, and
            the costs are those of this second run.
    """
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(Command([*PROGRAM, *arguments], cwd=folder, stdout=PIPE, stderr=PIPE, env=environment))
        return started[-1]

    try:
        alone = start("run", program, *itertools.chain(*inputs.values()), "--out", "alone.npz", "--json")
        found, errors = alone.communicate(timeout=600)
        assert alone.returncode == 0, errors
        entries = [f"{name}={role}" for name, role in parties.items()]
        trial, server = folder / "trial", f"localhost:{free_port()}"
        assert run(["federation", "try", str(trial), *entries, "--server", server, "--json"]) == 0
        start(*shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])
        file, began = str(trial / "federation.toml"), time.monotonic()
        start_all = lambda: {
            name: start("run", program, "--federation", file, "--as", name, *inputs.get(name, ()),
                        "--out", f"{name}.npz", "--json")
            for name in parties
        }  # fmt: skip
        if killed:
            of_one, first = set(folder.rglob("*.state")), start_all()
            while not set(folder.rglob("*.state")) - of_one:
                assert all(process.poll() is None for process in first.values()), "it was over before it was killed"
                time.sleep(0.05)
            first[killed].kill()
            assert all(process.communicate(timeout=900) and process.returncode for process in first.values())
        running = start_all()
        said = {name: process.communicate(timeout=900) for name, process in running.items()}
        took = time.monotonic() - began
        assert [process.returncode for process in running.values()] == [0] * len(parties), said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    results = {name: folder / f"{name}.npz" for name in parties}
    return BothWays(
        dict(np.load(folder / "alone.npz")),
        {name: dict(np.load(path)) if path.exists() else {} for name, path in results.items()},
        json.loads(found)["cost"], {name: json.loads(text)["cost"] for name, (text, _) in said.items()}, took,
    )  # fmt: skip
