"""What range checks cost: seconds and bytes of one question with and without them, asked in turn in one run.

    python benchmarks/ranges.py                        # LeNet, VGG-7, ResNet-50, and an encoder layer of BERT's size
    python benchmarks/ranges.py lenet --repeats 20

Weights are random, and so are BatchNorm statistics. Seconds are medians of calls after the first, all parties' work one
after another in one process; what they are more is the median of the ratios of neighbouring calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn

import sectorch
from sectorch import Scheme
from sectorch.nn.models import lenet, randomize_batchnorm, vgg7


def layer_of_bert() -> nn.Module:
    return nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")


MODELS = {
    "lenet": (lenet, (1, 1, 28, 28)),
    "vgg7": (vgg7, (1, 3, 32, 32)),
    "resnet50": (torchvision.models.resnet50, (1, 3, 64, 64)),
    "bert layer": (layer_of_bert, (1, 128, 768)),
}


def measured(name: str, repeats: int) -> dict:
    torch.manual_seed(0)
    construct, shape = MODELS[name]
    model = construct().eval().requires_grad_(False)
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    x, row = torch.randn(shape), {"model": name}
    ways = {
        check: sectorch.secure(model, Scheme(range_check=check), session=sectorch.Session()) for check in (False, True)
    }
    spent: dict = {False: [], True: []}
    for check, secure in ways.items():
        secure(x)
        with sectorch.profile() as profile:
            secure(x)
        row |= {
            f"bytes {check}": profile.bytes,
            f"online {check}": profile.online_bytes,
            f"rounds {check}": profile.rounds,
        }
    for _ in range(repeats):
        for check, secure in ways.items():
            start = time.perf_counter()
            secure(x)
            spent[check].append(time.perf_counter() - start)
    for check, seconds in spent.items():
        row[f"seconds {check}"] = statistics.median(seconds)
    row["seconds ratio"] = statistics.median(b / a for a, b in zip(spent[False], spent[True], strict=True))
    for what in ("bytes", "online"):
        row[f"{what} ratio"] = row[f"{what} True"] / row[f"{what} False"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model", help=", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    console, shown = Console(), Table(title="With range checks, beside without")
    for column in ("model", "s without", "s with", "s", "bytes", "online bytes", "rounds"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    rows = []
    for name in options.models:
        rows.append(row := measured(name, options.repeats))
        console.print(f"{name} measured", style="dim")
        shown.add_row(
            name, f"{row['seconds False']:.3f}", f"{row['seconds True']:.3f}",
            *(f"{100 * (row[f'{what} ratio'] - 1):+.1f} %" for what in ("seconds", "bytes", "online")),
            f"{row['rounds False']} -> {row['rounds True']}",
        )  # fmt: skip
    console.print(shown)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
