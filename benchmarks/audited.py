"""What audited dealing costs: VGG-7, LeNet and ResNet-50, off and with one of n calls used, in turn.

    python benchmarks/audited.py                              # VGG-7 and LeNet, n = 2 and 4
    python benchmarks/audited.py --nets resnet50 --repeats 3
    python benchmarks/audited.py --json results.json

Ahead of the query and after it are timed apart: material is prepared, and then used. All parties are in this process,
on one thread unless --threads says otherwise, so that the seconds are the work of all three together. What is compared
alternates, and medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sectorch
from sectorch import Scheme
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.session import Session


def built(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A net and a picture for it."""
    torch.manual_seed(0)
    if name in ZOO:
        construct, shape = ZOO[name]
        model = construct().eval()
    else:
        import torchvision

        model, shape = torchvision.models.get_model(name, weights=None).eval(), (3, 224, 224)
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, torch.randn(1, *shape)


def measured(name: str, counts: list[int], repeats: int) -> list[dict]:
    """Seconds and bytes ahead of the query and after it, for each count."""
    model, x = built(name)
    secure = {n: sectorch.secure(model, Scheme(audited=n), session=Session()) for n in counts}
    found = {n: {"net": name, "audited": n, "ahead": [], "online": []} for n in counts}
    plain = None
    for n in counts:  # the setup, and what is compiled
        y = secure[n](x)
        plain = y if plain is None else plain
        found[n] |= {"same": torch.equal(y, plain)}
        with sectorch.profile() as profile:
            secure[n](x)
        found[n] |= {"ahead_bytes": profile.offline_bytes, "online_bytes": profile.online_bytes}
    for _ in track(range(repeats), f"{name}", transient=True):
        for n in counts:
            start = time.perf_counter()
            secure[n].preprocess(1)
            middle = time.perf_counter()
            secure[n](x)
            found[n]["ahead"].append(middle - start)
            found[n]["online"].append(time.perf_counter() - middle)
    return list(found.values())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nets", nargs="+", default=["lenet", "vgg7"])
    p.add_argument("--counts", nargs="+", type=int, default=[2, 4])
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--json")
    options = p.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for net in options.nets for row in measured(net, [1, *options.counts], options.repeats)]
    table = Table(
        "net", "one of", "ahead s", "times", "online s", "times", "ahead MB", "times", "online MB", "same bits"
    )
    for row in rows:
        off = next(r for r in rows if r["net"] == row["net"] and r["audited"] == 1)
        cells = [row["net"], str(row["audited"])]
        for part in ("ahead", "online"):
            mine, before = statistics.median(row[part]), statistics.median(off[part])
            cells += [f"{mine:.4f}", f"{mine / before:.2f}"]
        cells += [f"{row['ahead_bytes'] / 1e6:.4f}", f"{row['ahead_bytes'] / off['ahead_bytes']:.4f}"]
        table.add_row(*cells, f"{row['online_bytes'] / 1e6:.4f}", "yes" if row["same"] else "NO")
    Console(width=120).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
