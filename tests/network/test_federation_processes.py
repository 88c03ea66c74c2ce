"""`sectorch run` and `sectorch federation` as a user has them: a server and parties as processes, over mutual TLS."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from commands import PIPE, Command
from network_world import until

from sectorch.cli.main import run
from sectorch.testing.local_network import PROGRAM, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "secure_sum.py"
PARTIES = {"north": "H1", "south": "H2", "west": "H3", "collector": "C"}
STUCK = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import torch
from secure_sum import ROLES, total

def program(parties):
    with parties.session(ROLES, label="stuck") as session:
        if parties.present("H1"):
            Path("there").touch()
            time.sleep(600)
        session.run(session.trace(total), dict.fromkeys(parties.inputs, torch.zeros(4).long()))
"""


class Running:
    """A federation that was set up by its command; everything that it starts ends with it."""

    def __init__(self, folder: Path):
        self.folder = folder
        server = f"localhost:{free_port()}"
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert run(["federation", "try", str(folder / "trial"), *entries, "--server", server, "--json"]) == 0
        made = json.loads(printed.getvalue())
        assert set(made["parties"]) == set(PARTIES)
        self.processes: list[Command] = []
        self.server = self.start(*shlex.split(made["server_command"])[1:])
        for seed, role in enumerate(PARTIES.values()):
            np.save(folder / f"{role}.npy", np.random.default_rng(seed).normal(size=4))

    def start(self, *arguments: str) -> Command:
        process = Command(
            [*PROGRAM, *arguments], cwd=self.folder, stdout=PIPE, stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def party(self, name: str, program: str) -> Command:
        own = [] if name == "collector" else ["--input", f"{PARTIES[name]}={PARTIES[name]}.npy"]
        file = str(self.folder / "trial" / "federation.toml")
        return self.start("run", program, "--federation", file, "--as", name, *own, "--out", f"{name}.npy", "--json")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("processes"))
    yield running
    running.close()


def test_a_choreography_of_four_processes_and_one_that_is_killed(running):
    """A party is killed -9 in a session: the others end, who waits for it with its name. Then the sum is right.

    A hospital that has sent its vector waits for nobody, so it may have ended before.
    """
    (running.folder / "stuck.py").write_text(STUCK)
    parties = {name: running.party(name, "stuck.py:program") for name in PARTIES}
    assert until(lambda: (running.folder / "there").exists(), 240)
    parties["north"].send_signal(signal.SIGKILL)
    for name in ("south", "west", "collector"):
        _, said = parties[name].communicate(timeout=60)
        lost = parties[name].returncode == 1 and "'north' gave up or is lost" in said.splitlines()[-1]
        assert lost or (name != "collector" and parties[name].returncode == 0), said
    assert not list(running.folder.glob("collector.npy"))

    parties = {name: running.party(name, f"{EXAMPLE}:program") for name in PARTIES}
    found = {name: process.communicate(timeout=240) for name, process in parties.items()}
    assert [process.returncode for process in parties.values()] == [0] * 4, found
    whole = sum(np.load(running.folder / f"{role}.npy") for role in ("H1", "H2", "H3"))
    np.testing.assert_allclose(np.load(running.folder / "collector.npy"), whole, rtol=0, atol=3 * 2.0**-21)
    for name in ("north", "south", "west"):
        assert json.loads(found[name][0])["learned"] == {} and not (running.folder / f"{name}.npy").exists()
    cost = json.loads(found["collector"][0])["cost"]
    assert (cost["rounds"], cost["online_bytes"]) == (1, 96)


def test_a_party_that_is_stopped_by_its_user_ends_and_the_others_wait(running):
    process = running.party("north", f"{EXAMPLE}:program")
    assert _waits(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def _waits(process: Command) -> bool:
    """Whether it says that it waits for the others."""
    assert process.stderr is not None
    return any("waits for" in line for line in iter(process.stderr.readline, ""))
