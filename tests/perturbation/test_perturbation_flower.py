"""examples/flower_perturbed: `flwr run` reaches the plain command's accuracy on Flower's simulation engine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sectorch.protocols.perturbation.experiment import build, train
from sectorch.protocols.perturbation.settings import Settings, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_perturbed"
FLWR = os.environ.get("SECTORCH_FLWR") or shutil.which("flwr", path=str(Path(sys.executable).parent))
"""The command of this environment, or of one that `SECTORCH_FLWR` names and that can import sectorch and torch."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise RuntimeError(f"the SuperLink did not start (exit code {process.poll()})")


@pytest.fixture
def superlink(tmp_path):
    """A local SuperLink of the test's own, ended with it; the ports are free ones."""
    home = tmp_path / "home"
    home.mkdir()
    settings = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    folder = str(Path(FLWR).parent)
    environment = os.environ | settings | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    port = free_port()
    command = [str(Path(folder) / "flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--allow-runtime-dependency-installation"]
    connection = f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(connection)
    with (tmp_path / "superlink.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield environment
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.sectorch_long
@pytest.mark.skipif(FLWR is None, reason="needs Flower: pip install '.[flower]', or SECTORCH_FLWR=/path/to/flwr")
@pytest.mark.parametrize("loss, partitions", [("cross_entropy", 1), ("mse", 2)])
def test_flwr_run_reaches_the_plain_accuracy(loss, partitions, superlink, tmp_path):
    example = tmp_path / "app"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__"))
    chosen = f'rounds=15 clients=3 loss="{loss}" partitions={partitions} learning-rate=0.1 out="{tmp_path / "out"}"'
    command = [FLWR, "run", str(example), "--stream", "--federation-config", "num-supernodes=3"]
    done = subprocess.run(
        [*command, "--run-config", chosen], env=superlink, capture_output=True, text=True, timeout=500, check=False
    )
    assert (tmp_path / "out" / "results.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    data = load("digits")
    settings = Settings(3, 15, learning_rate=0.1, loss=loss, partitions=partitions)
    plain = train(data, build("mlp3", data, torch.float64, 0), settings, perturbed=True)
    fedavg = train(data, build("mlp3", data, torch.float64, 0), settings, perturbed=False)
    assert found == {"score": plain.score, "rounds": 15}
    assert found["score"] == fedavg.score
