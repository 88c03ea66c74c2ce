"""Private inference beside CrypTen and SPU: the same nets, weights, inputs and batches, on one machine, in turn.

    python benchmarks/peers.py --python PYTHON3.10 [--environments DIR] [--nets vgg7 resnet10 resnet18 resnet50]

Makes the environments of CrypTen 0.4.1 and SPU 0.9.5 from PyPI in DIR unless they are there, with a Python that both
run on, and writes benchmarks/results/peers.json, where other nets' rows stay if they were measured on as many cores and
for as many rows of input. (CrypTen's of ResNet-18 and ResNet-50
there are of one call a turn, in two turns and in one: --rounds 2, --rounds 1, --peers-calls 1.) All
run on the processor alone. All parties are on this machine, sectorch's in one process, CrypTen's in two, SPU's in three
threads; what is dealt ahead is made in the call, by all. SPU computes the nets that are sequences of layers (VGG-7),
with norms folded into convolutions, as sectorch folds them.

Trust is not the same. sectorch's result is exact fixed-point arithmetic, a function of the input alone, and a value
that leaves its range is no result; none of its three parties learns anything alone. CrypTen's two parties trust a third
one for their correlated randomness, which is in their processes here; it truncates shares locally, which is off by a
unit and, rarely, by everything, and it checks no ranges. SPU's three (ABY3) are an honest majority, as sectorch's are,
and hold input and model in replicated shares; its truncation errs as CrypTen's does, and no range is checked either.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from training_peers import PACKAGES, environment, run

HERE = Path(__file__).parent
RESULT = HERE / "results/peers.json"
NETS = {"vgg7": 7, "resnet10": 5, "resnet18": 5, "resnet50": 3}
"""Calls of sectorch's in a turn, but for the first one, which traces."""
KEPT = ("bytes", "rounds", "error")
CRYPTEN, SPU = "CrypTen 0.4.1", "SPU 0.9.5"
ENVIRONMENTS = {
    CRYPTEN: (*PACKAGES, ("--no-deps", "torchvision==0.15.2"), ("requests", "pillow<11")),
    SPU: (("spu==0.9.5",),),
}
IN_SPU = ("vgg7",)


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

        # Its norms stay about as they are made: with random ones an untrained ResNet-50 leaves both sides' ranges, and
        # CrypTen does not read a net whose norms are equal.
        model, shape = torchvision.models.get_model(name, weights=None).eval(), (3, 224, 224)
        for layer in model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                for value in (*layer.parameters(), layer.running_mean, layer.running_var):
                    value.data += torch.randn(value.shape) / 1000
    x = torch.randn(batch, *shape)
    with torch.no_grad():
        plain = model(x)
    for file, value in (("weights", model.state_dict()), ("input", x), ("plain", plain)):
        torch.save(value, folder / f"{file}.pt")
    if name in IN_SPU:
        layers, arrays = in_arrays(model)
        (folder / "layers.json").write_text(json.dumps(layers))
        arrays = {f"w{i}": w.detach().numpy() for i, w in enumerate(arrays)}
        np.savez(folder / "arrays.npz", input=x.permute(0, 2, 3, 1).numpy(), plain=plain.numpy(), **arrays)
    return model, x


def in_arrays(model: Any) -> tuple[list[str], list[Any]]:
    """A sequence of layers as peers_spu.py reads it: their names, and the weights and biases, channels last."""
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    names = {torch.nn.ReLU: "relu", torch.nn.MaxPool2d: "pool", torch.nn.AdaptiveAvgPool2d: "mean"}
    layers, arrays = [], []
    for layer, after in itertools.pairwise([*model, None]):
        if isinstance(layer, torch.nn.Conv2d):
            folded = fuse_conv_bn_eval(layer, after)
            layers.append("conv")
            arrays += [folded.weight.permute(2, 3, 1, 0), folded.bias]
        elif isinstance(layer, torch.nn.Linear):
            layers.append("linear")
            arrays += [layer.weight.t(), layer.bias]
        elif not isinstance(layer, torch.nn.BatchNorm2d | torch.nn.Flatten):
            layers.append(names[type(layer)])
    return layers, arrays


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


def compared(name: str, batch: int, rounds: int, calls: int, peers: dict[str, str]) -> dict[str, Any]:
    """A net on all sides, in turn."""
    found: dict[str, list[dict[str, Any]]] = {"sectorch": [], **{peer: [] for peer in peers}}
    with tempfile.TemporaryDirectory() as folder:
        theirs = {
            CRYPTEN: (HERE / "peers_crypten.py", name, folder, calls),
            SPU: (HERE / "peers_spu.py", folder, calls),
        }
        for _ in range(rounds):
            mine = sys.executable, __file__, "--ours", folder, "--nets", name, "--batch", batch
            found["sectorch"].append(run(*mine))
            for peer, python in peers.items():
                found[peer].append(run(python, *theirs[peer]))
    row: dict[str, Any] = {"plain s": statistics.median(s for one in found["sectorch"] for s in one["plain"])}
    for side, runs in found.items():
        seconds = [s for one in runs for s in one["seconds"]]
        spread = {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)}
        row[side] = {"seconds": spread, **{key: v for key, v in runs[-1].items() if key in KEPT}}
    for peer in peers:
        row[peer]["ratio"] = row[peer]["seconds"]["median"] / row["sectorch"]["seconds"]["median"]
    return row


def made(folder: Path, python: str, peer: str) -> str:
    """A peer's Python in its environment."""
    return environment(folder / peer.lower().replace(" ", "-"), python, ENVIRONMENTS[peer])


def main() -> None:
    """Prints a line a net and side, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.10")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "sectorch-peers")
    parser.add_argument("--peers", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--peers-calls", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        ours(given.nets[0], given.batch, NETS[given.nets[0]], given.ours)
        return
    pythons = {peer: made(given.environments, given.python, peer) for peer in given.peers}
    how = {"batch": given.batch, "cores": len(os.sched_getaffinity(0))}
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept = before["nets"] if before | how == before else {}
    result: dict[str, Any] = {**how, "nets": {name: row for name, row in kept.items() if name in NETS}}
    for name in given.nets:
        peers = {peer: python for peer, python in pythons.items() if peer != SPU or name in IN_SPU}
        row = result["nets"][name] = compared(name, given.batch, given.rounds, given.peers_calls, peers)
        for side in ("sectorch", *peers):
            it, seconds = row[side], row[side]["seconds"]
            sent = f", {it['bytes'] / 1e6:.1f} MB, {it['rounds']} rounds" if "bytes" in it else ""
            times = (
                f", {it['ratio']:.1f} times sectorch's" if "ratio" in it else f", plain torch {row['plain s']:.3f} s"
            )
            spread = f"{seconds['least']:.3f} to {seconds['most']:.3f}"
            print(
                f"{name}, {side}: {seconds['median']:.3f} s ({spread}){sent}, error {it['error']:.1e}{times}",
                flush=True,
            )
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
