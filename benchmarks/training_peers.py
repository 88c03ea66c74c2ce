"""Seconds and bytes of a training step beside CrypTen: the same net, batch and machine, in turn.

    python benchmarks/training_peers.py --python PYTHON3.10 [--environment DIR] [--model lenet] [--batch 128]
    python benchmarks/training_peers.py --epoch          an epoch of sectorch's alone, and the memory that it takes

Makes CrypTen's environment (PyPI, version 0.4.1) in DIR unless it is there, with a Python that it runs on, and writes
benchmarks/results/training.json. Both run on the processor alone, on random pictures, by stochastic gradient descent
with momentum; all parties are on this machine. What each protects from whom is not the same: see docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results/training.json"
PICTURES = 60_000
SHAPES = {"mlp": (64,), "lenet": (1, 28, 28)}
PACKAGES = (
    ("setuptools<70", "wheel", "numpy==1.26.4", "protobuf<4", "omegaconf", "pyyaml", "torch==2.0.1"),
    ("--no-build-isolation", "onnx==1.14.1"),
    ("--no-deps", "crypten==0.4.1"),
)
"""What is installed, one call of pip after the other."""


def environment(folder: Path, python: str, packages: tuple[tuple[str, ...], ...] = PACKAGES) -> str:
    """A peer's Python, CrypTen's unless its packages are named; made if it is not there."""
    found = folder / "bin/python"
    if not (folder / "made").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        for together in packages:
            subprocess.run([str(found), "-m", "pip", "install", "--quiet", *together], check=True)
        (folder / "made").touch()
    return str(found)


def ours(name: str, batch: int, steps: int) -> None:
    """Steps of sectorch's, as training_crypten.py prints them."""
    import torch
    import torch.nn.functional as F
    import training

    import sectorch

    torch.manual_seed(0)
    session = sectorch.Session()
    model = sectorch.shared(training.MODELS[name](), session=session)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x, y = torch.rand(batch, *SHAPES[name]), torch.randint(0, 10, (batch,))
    seconds, resident, sent = [], [], 0
    for _ in range(steps):
        began = time.perf_counter()
        with sectorch.profile() as seen, sectorch.step(session):
            secret = sectorch.share(x, session=session, limit=2.0)
            labels = sectorch.share(y, session=session, owner="S")  # CrypTen's are secret too
            optimiser.zero_grad()
            F.cross_entropy(model(secret), labels).backward()
            optimiser.step()
        seconds.append(time.perf_counter() - began)
        sent = seen.online_bytes + seen.offline_bytes
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    print(json.dumps({"seconds": seconds, "bytes": sent, "resident": resident}))


def run(*command: Any) -> dict[str, Any]:
    """What a command's last line says."""
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def epoch(name: str, batch: int) -> None:
    """Prints what a whole epoch took, and how much memory its process had after its first steps and at its end."""
    steps = -(-PICTURES // batch)
    found = run(sys.executable, __file__, "--ours", "--model", name, "--batch", batch, "--steps", steps)
    load, memory = os.getloadavg()[0], [n / 1e6 for n in found["resident"]]
    print(
        f"an epoch of {PICTURES:,}: {steps} steps, {sum(found['seconds']) / 60:.1f} minutes, a step "
        f"{statistics.median(found['seconds']):.2f} s; {memory[min(20, steps - 1)]:.0f} MB resident after 20 steps, "
        f"{memory[-1]:.0f} at the end, {max(memory):.0f} at most; load {load:.1f}"
    )


def main() -> None:
    """Prints a line for each, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.10")
    parser.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "crypten-0.4.1")
    parser.add_argument("--model", choices=list(SHAPES), default="lenet")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=9, help="of sectorch's; the first ones, which trace, are left out")
    parser.add_argument("--peers-steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epoch", action="store_true", help="a whole epoch of sectorch's alone")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.epoch:
        epoch(given.model, given.batch)
        return
    if given.ours:
        ours(given.model, given.batch, given.steps)
        return
    peer = environment(given.environment, given.python)
    found: dict[str, list[dict[str, Any]]] = {"sectorch": [], "CrypTen 0.4.1": []}
    for _ in range(given.rounds):
        same = "--model", given.model, "--batch", given.batch
        mine = run(sys.executable, __file__, "--ours", *same, "--steps", given.steps)
        found["sectorch"].append({**mine, "seconds": mine["seconds"][3:]})
        theirs = run(peer, HERE / "training_crypten.py", given.model, given.batch, given.peers_steps)
        found["CrypTen 0.4.1"].append({**theirs, "seconds": theirs["seconds"][1:]})
    result: dict[str, Any] = {"model": given.model, "batch": given.batch, "cores": os.cpu_count()}
    for name, runs in found.items():
        seconds = [s for one in runs for s in one["seconds"]]
        result[name] = {
            "seconds": {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)},
            "bytes": runs[-1]["bytes"],
        }
        step = statistics.median(seconds)
        whole = -(-PICTURES // given.batch) * step
        print(
            f"{name}: {step:.2f} s a step ({min(seconds):.2f} to {max(seconds):.2f}), "
            f"{runs[-1]['bytes'] / 1e6:.0f} MB; "
            f"{whole / 60:.1f} minutes an epoch of {PICTURES:,}"
        )
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
