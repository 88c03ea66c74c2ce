"""Private inference beside CrypTen: the same nets, weights, inputs and batches, on one machine, in turn.

    python benchmarks/peers.py --python PYTHON3.10 [--environment DIR] [--nets vgg7 resnet10 resnet18 resnet50]

Makes CrypTen's environment (PyPI, version 0.4.1, as benchmarks/training_peers.py does) in DIR unless it is there, with
a Python that it runs on, and writes benchmarks/results/peers.json. Both run on the processor alone. All parties are on
this machine, sectorch's in one process, CrypTen's in two; what is dealt ahead is made in the call, by both.

Trust is not the same. sectorch's result is exact fixed-point arithmetic, a function of the input alone, and a value
that leaves its range is no result; none of its three parties learns anything alone. CrypTen's two parties trust a third
one for their correlated randomness, which is in their processes here; it truncates shares locally, which is off by a
unit and, rarely, by everything, and it checks no ranges.
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

from training_peers import environment, run

HERE = Path(__file__).parent
RESULT = HERE / "results/peers.json"
NETS = {"vgg7": 7, "resnet10": 5, "resnet18": 5, "resnet50": 3}
"""Calls of sectorch's in a turn, but for the first one, which traces."""
BESIDE = ("--no-deps", "torchvision==0.15.2", "pillow<11")


def wanted(name: str, batch: int, folder: Path) -> tuple[Any, Any]:
    """The net and its input; what both sides read is in the folder afterwards."""
    import torch

    from sectorch.nn.models import ZOO, randomize_batchnorm

    torch.manual_seed(0)
    if name in ZOO:
        model, shape = ZOO[name][0]().eval(), ZOO[name][1]
        randomize_batchnorm(model, torch.Generator().manual_seed(0))
    else:
        import torchvision

        # Its norms stay as they are made: with random ones an untrained ResNet-50 leaves both sides' ranges.
        model, shape = torchvision.models.get_model(name, weights=None).eval(), (3, 224, 224)
    x = torch.randn(batch, *shape)
    with torch.no_grad():
        plain = model(x)
    for file, value in (("weights", model.state_dict()), ("input", x), ("plain", plain)):
        torch.save(value, folder / f"{file}.pt")
    return model, x


def ours(name: str, batch: int, calls: int, folder: Path) -> None:
    """Calls of sectorch's and of plain torch's, as peers_crypten.py prints them."""
    import torch

    import sectorch

    model, x = wanted(name, batch, folder)
    plain, secure = torch.load(folder / "plain.pt"), sectorch.secure(model)
    with sectorch.profile() as seen:
        result = secure(x)
    seconds, plainly = [], []
    for _ in range(calls):
        began = time.perf_counter()
        with sectorch.profile() as seen:
            result = secure(x)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        with torch.no_grad():
            model(x)
        plainly.append(time.perf_counter() - began)
    said = {"seconds": seconds, "plain": plainly, "bytes": seen.bytes, "rounds": seen.rounds}
    print(json.dumps({**said, "error": float((result - plain).abs().max())}))


def compared(name: str, batch: int, rounds: int, calls: int, peer: str) -> dict[str, Any]:
    """A net on both sides, in turn."""
    found: dict[str, list[dict[str, Any]]] = {"sectorch": [], "CrypTen 0.4.1": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            mine = sys.executable, __file__, "--ours", folder, "--nets", name, "--batch", batch
            found["sectorch"].append(run(*mine))
            found["CrypTen 0.4.1"].append(run(peer, HERE / "peers_crypten.py", name, folder, calls))
    row: dict[str, Any] = {"plain s": statistics.median(s for one in found["sectorch"] for s in one["plain"])}
    for side, runs in found.items():
        seconds = [s for one in runs for s in one["seconds"]]
        spread = {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)}
        row[side] = {"seconds": spread, **{key: runs[-1][key] for key in ("bytes", "rounds", "error")}}
    row["ratio"] = row["CrypTen 0.4.1"]["seconds"]["median"] / row["sectorch"]["seconds"]["median"]
    return row


def main() -> None:
    """Prints two lines a net, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.10")
    parser.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "crypten-0.4.1")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--peers-calls", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        ours(given.nets[0], given.batch, NETS[given.nets[0]], given.ours)
        return
    peer = environment(given.environment, given.python)
    if subprocess.run([peer, "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([peer, "-m", "pip", "install", "--quiet", *BESIDE], check=True)
    result: dict[str, Any] = {"batch": given.batch, "cores": os.cpu_count(), "nets": {}}
    for name in given.nets:
        row = result["nets"][name] = compared(name, given.batch, given.rounds, given.peers_calls, peer)
        for side in ("sectorch", "CrypTen 0.4.1"):
            it = row[side]
            seconds = it["seconds"]
            print(
                f"{name}, {side}: {seconds['median']:.3f} s ({seconds['least']:.3f} to {seconds['most']:.3f}), "
                f"{it['bytes'] / 1e6:.1f} MB, {it['rounds']} rounds, error {it['error']:.1e}",
                flush=True,
            )
        print(f"{name}: CrypTen takes {row['ratio']:.1f} times as long; plain {row['plain s']:.3f} s", flush=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
