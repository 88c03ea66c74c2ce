"""What it costs that Q is not trusted to deal: VGG-7, LeNet and ResNet-50, with Q trusted, audited and verified.

    python benchmarks/dealing.py                              # VGG-7 and LeNet, one of 2 and of 4 calls, and verified
    python benchmarks/dealing.py --nets resnet50 --counts --repeats 3
    python benchmarks/dealing.py --json results.json
    python benchmarks/dealing.py --nets --calls 10000         # honest calls that are verified: how many are refused

Ahead of the query and after it are timed apart: material is prepared, and then used. All parties are in this process
and on one thread, and the seconds are of its processor, the work of all three together. What is compared alternates,
and medians are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sectorch
from sectorch import Scheme
from sectorch.errors import SectorchError
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

        model, shape = torchvision.models.get_model(name, weights=None), (3, 224, 224)
        for layer in model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = 1.0  # as many statistics as it takes for activations of the usual size
        model(torch.randn(4, *shape))
        return model.eval(), torch.randn(1, *shape)
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, torch.randn(1, *shape)


def measured(name: str, levels: dict[str, Scheme], repeats: int) -> list[dict]:
    """Seconds and bytes ahead of the query and after it, for each level."""
    model, x = built(name)
    secure = {n: sectorch.secure(model, scheme, session=Session()) for n, scheme in levels.items()}
    found = {n: {"net": name, "dealer": n, "ahead": [], "online": []} for n in levels}
    plain = None
    for n in levels:  # the setup, and what is compiled
        y = secure[n](x)
        plain = y if plain is None else plain
        found[n] |= {"same": torch.equal(y, plain)}
        with sectorch.profile() as profile:
            secure[n](x)
        found[n] |= {"ahead_bytes": profile.offline_bytes, "online_bytes": profile.online_bytes}
    for _ in track(range(repeats), f"{name}", transient=True):
        for n in levels:
            start = time.process_time()
            secure[n].preprocess(1)
            middle = time.process_time()
            secure[n](x)
            found[n]["ahead"].append(middle - start)
            found[n]["online"].append(time.process_time() - middle)
    return list(found.values())


HONEST = {"mlp": 1, "cryptonets_relu": 2, "lenet": 5, "vgg5": 500, "vgg7": 500, "resnet8": 500}
"""Nets that are called honestly, and in how many rounds once."""


def honest(calls: int) -> list[dict]:
    """So many verified calls of nobody who cheats, each compared with `sectorch.reference`."""
    nets = {}
    for name in HONEST:
        model, x = built(name)
        verified = sectorch.secure(model, Scheme(verified=True), session=Session())
        nets[name] = verified, sectorch.reference(model), x.shape[1:]
    found = {name: {"net": name, "calls": 0, "refused": 0, "other bits": 0} for name in HONEST}
    turns = (name for number in itertools.count() for name, every in HONEST.items() if number % every == 0)
    for number, name in enumerate(itertools.islice(turns, calls), 1):
        secure, reference, shape = nets[name]
        row, rows = found[name], 1 if HONEST[name] > 100 else 1 + found[name]["calls"] % 3
        x = torch.randn(rows, *shape) * 2.0 ** random.randrange(-6, 3)
        row["calls"] += 1
        try:
            row["other bits"] += not torch.equal(secure(x), reference(x))
        except SectorchError as error:
            row["refused"] += 1
            print(name, error)
        if number % 500 == 0:
            print(
                f"{number} calls, {sum(row['refused'] + row['other bits'] for row in found.values())} failed",
                flush=True,
            )
    return list(found.values())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nets", nargs="*", default=["lenet", "vgg7"])
    p.add_argument("--counts", nargs="*", type=int, default=[2, 4], help="audited: one of so many calls is used")
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--calls", type=int, default=0, help="honest calls")
    p.add_argument("--json")
    options = p.parse_args()
    torch.set_num_threads(1)
    audited = {f"audited, 1 of {n}": Scheme(audited=n) for n in options.counts}
    levels = {"trusted": Scheme(), **audited, "verified": Scheme(verified=True)}
    rows = [row for net in options.nets for row in measured(net, levels, options.repeats)]
    table = Table("net", "Q is", "ahead s", "times", "online s", "times", "ahead MB", "times", "online MB", "same bits")
    for row in rows:
        off = next(r for r in rows if r["net"] == row["net"] and r["dealer"] == "trusted")
        cells = [row["net"], row["dealer"]]
        for part in ("ahead", "online"):
            mine, before = statistics.median(row[part]), statistics.median(off[part])
            cells += [f"{mine:.4f}", f"{mine / before:.2f}"]
        cells += [f"{row['ahead_bytes'] / 1e6:.4f}", f"{row['ahead_bytes'] / off['ahead_bytes']:.4f}"]
        table.add_row(*cells, f"{row['online_bytes'] / 1e6:.4f}", "yes" if row["same"] else "NO")
    if rows:
        Console(width=120).print(table)
    honestly = honest(options.calls) if options.calls else []
    for row in honestly:
        print(f"{row['net']}: {row['calls']} honest calls, {row['refused']} refused, {row['other bits']} of other bits")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows + honestly, file, indent=1)


if __name__ == "__main__":
    main()
