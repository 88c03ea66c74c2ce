"""`sectorch up` and `sectorch run` as users have them: five processes, one of which is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import PIPE, Command
from network_world import until

from sectorch.cli.main import run
from sectorch.federated.parties import Simulation
from sectorch.network.federation.programs import function_of
from sectorch.testing.local_network import PROGRAM, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "secure_sum.py"

PARTIES = {"north": "H1", "south": "H2", "west": "H3", "collector": "C"}
SLOW = """
def slow(parties):
    import time
    from pathlib import Path
    own = {name: encode(x, 20) for name, x in parties.inputs.items()}
    with parties.session(ROLES, label="slow") as session:
        if parties.present("H1"):
            Path("there").touch()
            time.sleep(600)
        session.run(session.trace(total), own)
"""


class Running:
    """Everything that it starts ends with it."""

    def __init__(self, folder: Path):
        self.folder, self.processes, self.started = folder, dict[str, Command](), list[Command]()
        self.program = folder / "sums.py"
        self.program.write_text(EXAMPLE.read_text().split("if __name__")[0] + SLOW)
        self.file = str(folder / "trial" / "federation.toml")
        entries = [f"{name}={role}" for name, role in PARTIES.items()]
        server = f"localhost:{free_port()}"
        assert run(["federation", "try", str(folder / "trial"), *entries, "--server", server, "--json"]) == 0
        for seed, (name, role) in enumerate(PARTIES.items()):
            np.save(folder / f"{role}.npy", np.random.default_rng(seed).normal(size=4))
            own = [] if role == "C" else ["--input", f"{role}={folder}/{role}.npy"]
            for function in ("program", "slow"):
                what = ["federation", "accept", self.file, f"{self.program}:{function}", "--as", name]
                assert run([*what, *own, "--json"]) == 0
        receipts = f'\n[files]\nreceipts = "{folder}/receipts"\n'
        for name in PARTIES:
            path = folder / "trial" / f"{name}.toml"
            path.write_text(receipts + path.read_text())

    def start(self, *arguments: str) -> Command:
        process = Command(
            [*PROGRAM, *arguments], cwd=self.folder, stdout=PIPE, stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.started.append(process)
        return process

    def up(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = Command(
                [*PROGRAM, "up", self.file, "--as", name], cwd=self.folder, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def run(self, function: str) -> Command:
        return self.start(
            "run", self.file, f"{self.program}:{function}", "--as", "collector", "--json", "--wait", "240"
        )

    def close(self) -> None:
        self.processes |= {str(number): process for number, process in enumerate(self.started)}
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.mark.sectorch_long
def test_four_parties_that_are_up_and_one_that_is_killed(tmp_path, capsys):
    """Bit for bit as one process; killed -9 in the middle, the others and the starter end; then it is right again."""
    running = Running(tmp_path)
    try:
        for name in ("server", *PARTIES):
            running.up(name)
        vectors = {role: torch.from_numpy(np.load(tmp_path / f"{role}.npy")) for role in ("H1", "H2", "H3")}
        alone = function_of(f"{EXAMPLE}:program")(Simulation(vectors))["sum"].numpy()
        for attempt in range(2):
            said, errors = (starting := running.run("program")).communicate(timeout=260)
            assert starting.returncode == 0, errors
            found = json.loads(said)["parties"]
            assert {name: p["outcome"] for name, p in found.items()} == dict.fromkeys(PARTIES, "done")
            assert all((p["rounds"], p["online_bytes"]) == (1, 96) for p in found.values())
            kept = sorted((tmp_path / "trial" / "collector-results").glob("*/sum.npy"))
            assert len(kept) == attempt + 1
            np.testing.assert_array_equal(np.load(kept[-1]), alone)
            if attempt:
                break
            stuck = running.run("slow")
            assert until(lambda: (tmp_path / "there").exists(), 300)
            began = time.monotonic()
            running.processes["north"].send_signal(signal.SIGKILL)
            _, errors = stuck.communicate(timeout=60)
            print(f"ended {time.monotonic() - began:.1f} s after the kill")
            assert stuck.returncode == 1 and "'north'" in errors.splitlines()[-1], errors
            running.processes["north"].wait()
            running.up("north")
        for name in PARTIES:
            running.processes[name].terminate()
        assert [running.processes[name].wait(60) for name in PARTIES] == [0] * 4
        for name in PARTIES:
            assert run(["audit", str(tmp_path / "receipts" / f"{name}-P.receipts"), "--json"]) == 0
    finally:
        running.close()
