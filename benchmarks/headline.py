"""The figures on the README and the home page: one dated run on one machine.

    python benchmarks/headline.py                       # all; benchmarks/results/headline.json
    python benchmarks/headline.py bert-base --json one.json

Each model runs in a process of its own, with random weights and one input: a first call, which traces and masks the
weights, calls that compute everything (`secure_s` is their median), and calls from prepared material (`online_s`), in
turn with plain torch. All parties' work is in the seconds, and no network. 'error' is the largest difference over the
largest magnitude of the plain float32 result. The file says which processor, commit and day the figures are of.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from huggingface import drawn
from real_size import CASES, MEMORY
from rich.console import Console
from rich.table import Table
from torch import nn

import sectorch
from sectorch.nn.models import ZOO, randomize_batchnorm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "headline.json"

NETS = {"lenet": "LeNet, 28 x 28", "vgg7": "VGG-7, 32 x 32", "resnet10": "ResNet-10, 32 x 32"}
VISION = {"resnet18": "ResNet-18, 224 x 224", "resnet50": "ResNet-50, 224 x 224"}
TRANSFORMERS = {
    "vit-s": "ViT-S, 224 x 224",
    "gpt2-small": "GPT-2 small, 64 tokens",
    "bert-base": "BERT-base, 128 tokens",
}
NAMES = NETS | VISION | TRANSFORMERS


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The model in evaluation mode, and what it is called with."""
    generator = torch.Generator().manual_seed(0)
    if name in TRANSFORMERS:
        case = CASES[name]
        model, given = case.build(), case.inputs()
        drawn(model, case)
        return model, (), given
    if name in NETS:
        construct, shape = ZOO[name]
        model = construct()
        randomize_batchnorm(model, generator)
    else:
        model, shape = torchvision.models.get_model(name), (3, 224, 224)
        for layer in model.modules():  # deep nets leave every range with statistics that no batch has
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0
        with torch.no_grad():
            model(torch.randn(8, *shape, generator=generator))
    model.eval()
    return model, (torch.randn(1, *shape, generator=generator),), {}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(name: str, repeats: int) -> dict[str, Any]:
    """One model in this process."""
    torch.manual_seed(0)
    model, arguments, options = build(name)

    def result(called: nn.Module) -> torch.Tensor:
        found = called(*arguments, **options)
        return found[0] if name in TRANSFORMERS else found

    with torch.no_grad():
        expected = result(model)
        secured = sectorch.secure(model)
        error = float((result(secured) - expected).abs().max() / expected.abs().max())
        with sectorch.profile() as spent:
            result(secured)
        took: dict[str, list[float]] = {"plain_s": [], "secure_s": [], "online_s": []}
        for _ in range(repeats):
            took["plain_s"].append(seconds(lambda: result(model)))
            took["secure_s"].append(seconds(lambda: result(secured)))
            secured.preprocess(sectorch.Inputs(*arguments, **options))
            took["online_s"].append(seconds(lambda: result(secured)))
    return {
        **{key: statistics.median(values) for key, values in took.items()},
        "error": error, "bytes": spent.bytes, "online_bytes": spent.online_bytes, "rounds": spent.rounds,
    }  # fmt: skip


def about() -> dict[str, str | int]:
    """The machine, the commit and the day."""
    git = lambda *arguments: subprocess.run(
        ["git", *arguments], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__, "commit": git("rev-parse", "--short=8", "HEAD"),
        "changed_files": len(git("status", "--porcelain", "--untracked-files=no", "..").splitlines()),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--here", action="store_true", help="one model, in this process; prints its row as JSON")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    warnings.simplefilter("ignore")
    if options.here:
        print(json.dumps(measured(options.names[0], options.repeats)))
        return
    environment = os.environ | MEMORY | {"OMP_WAIT_POLICY": "passive"}
    rows = {}
    for name in options.names or NAMES:
        command = [sys.executable, __file__, name, "--here", "--repeats", str(options.repeats)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        rows[name] = {"what": NAMES[name], **json.loads(out.splitlines()[-1])}
        print(f"{NAMES[name]}: {rows[name]['secure_s']:.3g} s", file=sys.stderr)
    options.json.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = Table(title="one input, all parties in one process")
    heads = list(next(iter(rows.values())))
    for head in heads:
        table.add_column(head, justify="left" if head == "what" else "right")
    for row in rows.values():
        table.add_row(*(v if isinstance(v, str) else f"{v:.3g}" for v in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
