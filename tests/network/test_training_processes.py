"""Trainings as users have them: `sectorch run` and `sectorch up` as processes of their own, over mutual TLS."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import training_program
from commands import PIPE, Command
from network_world import until

from sectorch.cli.main import run
from sectorch.federated.parties import Simulation
from sectorch.testing.local_network import PROGRAM, free_port

FILE = Path(training_program.__file__)
PARTIES = {"north": "Q", "east": "A", "south": "S", "west": "H1"}
FEW = ("north", "east", "south")

pytestmark = pytest.mark.sectorch_long


class Running:
    """A server and parties in a folder; all processes end with it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.file, self.started = (
            folder,
            str(folder / "trial" / "federation.toml"),
            list[Command](),
        )
        for role in PARTIES.values():
            np.save(folder / f"{role}.npy", training_program.rows_of(role).numpy())
        entries, server = [f"{name}={role}" for name, role in PARTIES.items()], f"localhost:{free_port()}"
        assert run(["federation", "try", str(folder / "trial"), *entries, "--server", server, "--json"]) == 0
        self.start("server", *shlex.split(json.loads(capsys.readouterr().out)["server_command"])[1:])

    def start(self, name: str, *arguments: str) -> Command:
        with (self.folder / f"{name}.log").open("a") as log:
            self.started.append(Command(
                [*PROGRAM, *arguments], cwd=self.folder, stdout=PIPE, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            ))  # fmt: skip
        return self.started[-1]

    def among(self, functions: dict[str, str]) -> dict[str, Command]:
        """`sectorch run` at each of these parties, to the end."""
        found = {}
        for name, function in functions.items():
            own = f"{PARTIES[name]}={PARTIES[name]}.npy"
            what = ["run", f"{FILE}:{function}", "--federation", self.file, "--as", name, "--input", own]
            found[name] = self.start(name, *what, "--out", f"{name}.npz", "--json")
        for process in found.values():
            process.communicate(timeout=300)
        return found

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Running]:
    found = Running(tmp_path, capsys)
    yield found
    found.close()


def alone(name: str, roles: str = "QAS") -> dict[str, np.ndarray]:
    found = getattr(training_program, name)(Simulation({role: training_program.rows_of(role) for role in roles}))
    return {key: value.numpy() for key, value in found.items()}


@pytest.mark.parametrize("name", ["steps", "estimators", "private"])
def test_three_processes_have_the_bits_of_one(running, name):
    """Also where one of them collects cycles all the time."""
    functions = dict.fromkeys(FEW, name) | ({"east": "collected"} if name == "steps" else {})
    began = time.monotonic()
    assert [process.returncode for process in running.among(functions).values()] == [0] * 3, running.said("east")
    print(f"{name}: {time.monotonic() - began:.1f} s with the start of three processes")
    learned, wanted = np.load(running.folder / "east.npz"), alone(name)
    assert set(learned) == wanted.keys() - {"loss"}
    assert all(np.array_equal(learned[key], wanted[key]) for key in learned)
    if name == "steps":
        (loss,) = np.load(running.folder / "north.npz").values()
        assert np.array_equal(loss, wanted["loss"])


@pytest.mark.parametrize("who", FEW)
def test_a_script_with_another_constant_is_found_out_and_nothing_is_learned(running, who):
    found = running.among(dict.fromkeys(FEW, "steps") | {who: "other_steps"})
    assert [process.returncode for process in found.values()] == [1] * 3
    said = {name: running.said(name) for name in FEW}
    assert any("computed with another public number" in text for text in said.values()), said
    assert not any("Traceback" in text for text in said.values()), said
    assert not list(running.folder.glob("*.npz"))


def test_a_job_among_parties_that_are_up_goes_on_after_a_kill(running):
    """A is killed -9 after half of the steps, comes up again, and the job is started again: the same bits."""
    for name, role in PARTIES.items():
        what = ["federation", "accept", running.file, f"{FILE}:stuck", "--as", name]
        bounds = ["--reveals", *(f"{party}=1000" for party in PARTIES)]  # where it goes on is not known ahead
        assert run([*what, "--input", f"{role}={running.folder}/{role}.npy", *bounds, "--json"]) == 0
    up = {name: running.start(name, "up", running.file, "--as", name) for name in PARTIES}
    start = lambda: running.start(
        "starter", "run", running.file, f"{FILE}:stuck", "--as", "west", "--job", "seven", "--json", "--wait", "240"
    )
    stopped = start()
    assert until(lambda: (running.folder / "there").exists(), 240)
    up["east"].send_signal(signal.SIGKILL)
    began = time.monotonic()
    stopped.communicate(timeout=60)
    print(f"ended {time.monotonic() - began:.1f} s after the kill")
    assert stopped.returncode == 1 and "'east'" in running.said("starter").splitlines()[-1]
    assert not list(running.folder.glob("trial/*-results/*/*.npy")), "nothing was revealed"
    states = [path for path in (running.folder / "trial").rglob("*.state") if int(path.stem) == 2]
    assert len(states) == 4, "each party has its half of the second step"
    up["east"].wait()
    running.start("east", "up", running.file, "--as", "east")
    again = start()
    said, _ = again.communicate(timeout=260)
    assert again.returncode == 0, running.said("starter")
    assert {p["outcome"] for p in json.loads(said)["parties"].values()} == {"done"}
    wanted = {key: value.numpy() for key, value in whole(running.folder / "alone").items()}
    for name in ("east", "west"):
        results = (running.folder / "trial" / f"{name}-results").glob("*/*.npy")
        learned = {path.stem: np.load(path) for path in results}
        assert int(learned.pop("began")) == 2 and learned.keys() == wanted.keys()
        assert all(np.array_equal(learned[key], wanted[key]) for key in learned)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """What one process learns that is not stopped."""
    own = {role: training_program.rows_of(role) for role in PARTIES.values()}
    return training_program.program(Simulation(own, folder))
