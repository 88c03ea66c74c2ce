"""What it costs that Q is not trusted to deal: VGG-7, LeNet and ResNet-50, with Q trusted, audited and verified.

    python benchmarks/dealing.py                              # VGG-7 and LeNet, one of 2 and of 4 calls, and verified
    python benchmarks/dealing.py --nets resnet50 --counts --repeats 3
    python benchmarks/dealing.py --json results.json
    python benchmarks/dealing.py --processes --counts 2       # the three parties as processes, by the clock
    python benchmarks/dealing.py --nets --calls 10000         # honest calls: how many are refused

Ahead of the query and after it are timed apart: material is prepared, and then used. All parties are in this process
and on one thread, and the seconds are of its processor, the work of all three together. With `--processes` Q is this
process, S and A are two others on this machine (Linux), connected by TLS, and the seconds are by the clock: ahead until
the last of them has nothing more to do, to 0.01 s, with what they write to their stores in the folder for temporary
files. What is compared alternates, and medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from subprocess import Popen

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sectorch
from sectorch import Scheme
from sectorch.errors import FixedPointRangeError, RangeExceededError, SectorchError
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.session import Session
from sectorch.testing.local_network import Stage

BEYOND = (RangeExceededError, FixedPointRangeError)


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


def sent(profile: sectorch.profile) -> dict[str, int]:
    """Bytes of a call."""
    proof = sum(line.bytes for line in profile.ledger if line.protocol == "prove")
    return {"ahead_bytes": profile.offline_bytes, "online_bytes": profile.online_bytes, "proof_bytes": proof}


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
        found[n] |= sent(profile)
    for _ in track(range(repeats), f"{name}", transient=True):
        for n in levels:
            start = time.process_time()
            secure[n].preprocess(1)
            middle = time.process_time()
            secure[n](x)
            found[n]["ahead"].append(middle - start)
            found[n]["online"].append(time.process_time() - middle)
    return list(found.values())


def in_processes(name: str, levels: dict[str, Scheme], repeats: int) -> list[dict]:
    """As `measured`, of three processes."""
    model, x = built(name)
    plain = sectorch.reference(model)(x)
    found = {n: {"net": name, "dealer": n, "ahead": [], "online": [], "same": True} for n in levels}
    with Stage({"model": (model, x)}) as stage, contextlib.ExitStack() as opened:
        remote = {}
        for number, (n, scheme) in enumerate(levels.items()):
            connection = opened.enter_context(stage.connect(f"client{number}"))
            remote[n] = connection.model("model", scheme)
            for _ in range(2):  # the setup, and what is compiled
                with sectorch.profile() as profile:
                    remote[n](x)
            found[n] |= sent(profile)
        for _ in track(range(repeats), f"{name}", transient=True):
            for n, row in found.items():
                start = time.perf_counter()
                remote[n].prepare(tuple(x.shape))
                row["ahead"].append(until_done(stage.processes.values()) - start)
                start = time.perf_counter()
                y = remote[n](x)
                row["online"].append(time.perf_counter() - start)
                row["same"] &= torch.equal(y, plain)
    return list(found.values())


QUIET = 0.25
"""Seconds without work after which a process is taken to have none."""


def until_done(processes: Iterable[Popen]) -> float:
    """When the last of the others had nothing more to do; Q does not wait for them where it need not."""
    said = [Path(f"/proc/{process.pid}/stat") for process in processes]
    spent, last = None, time.perf_counter()
    while time.perf_counter() - last < QUIET:
        now = [file.read_text().split(")")[-1].split()[11:13] for file in said]  # its time, and the system's for it
        if now != spent:
            spent, last = now, time.perf_counter()
        time.sleep(0.002)
    return last


class Normed(torch.nn.Module):
    """What has no proof, and is audited: norms, attention, GELU and softmax."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(6), torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x)
        x = torch.nn.functional.gelu(self.attention(x, x, x, need_weights=False)[0])
        return torch.nn.functional.softmax(self.head(x), -1)


def edges(name: str) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """Nets whose results are in range for every input of it, up to its ends."""
    nn = torch.nn
    model, shape = {
        "dense": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), (5,)),
        "relu": (nn.ReLU(), (6,)),
        "linear": (nn.Linear(4, 3, bias=False), (4,)),
        "pools": (nn.Sequential(nn.MaxPool2d(2), nn.ReLU6(), nn.AvgPool2d(2)), (1, 4, 4)),
        "convolution": (
            nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)
            ),
            (1, 6, 6),
        ),
    }[name]
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):  # sums of weights below 1
                layer.weight /= 1.1 * layer.weight.flatten(1).abs().sum(1).view(-1, *[1] * (layer.weight.dim() - 1))
    return model.double().eval(), shape


HONEST = {"dense": 1, "relu": 1, "linear": 1, "pools": 1, "convolution": 1, "mlp": 1, "cryptonets_relu": 5}
HONEST |= {"lenet": 40, "vgg5": 1000, "vgg7": 1000, "resnet8": 1000}
"""Nets that are called honestly, and in how many rounds once."""
AUDITED = {"normed": 2}
"""Those that have no proof."""


def drawn(shape: tuple[int, ...], dtype: torch.dtype, limit: float, known: random.Random) -> torch.Tensor:
    """An input somewhere in the range: of the usual size, of any size, or made of the range's ends and of zeros."""
    kind = known.randrange(4)
    x = torch.randn(shape, dtype=torch.float64) * 2.0 ** known.randrange(-6, 3)
    if kind == 1:
        x = (torch.rand(shape, dtype=torch.float64) * 2 - 1) * limit * 2.0 ** -known.randrange(12)
    last = limit - 2.0**-20 if dtype == torch.float64 else limit * (1 - 2.0**-24)  # and rounded to no more
    if kind == 2:
        ends = [last, -last, limit / 2, -limit / 2, 0, 2.0**-20, -(2.0**-20), 2.0**-21, 1, -1, 6]
        x = torch.tensor(ends, dtype=torch.float64)[torch.randint(len(ends), shape)]
    if kind == 3:
        x = (torch.randint(2, shape) * 2 - 1).double() * last
    return x.clamp(-last, last).to(dtype)


def honest(calls: int, scheme: Scheme) -> list[dict]:
    """So many calls of nobody who cheats, each compared with `sectorch.reference`, which refuses what it has to."""
    plain, limit = Scheme(), scheme.activation_limit
    turns_of = HONEST | (AUDITED if scheme.audited > 1 else {})
    nets = {}
    for name in turns_of:
        if name in AUDITED:
            model, shape = Normed().eval(), (3, 6)
        elif name in ZOO:
            model, x = built(name)
            shape = tuple(x.shape[1:])
        else:
            model, shape = edges(name)
        nets[name] = sectorch.secure(model, scheme, session=Session()), sectorch.reference(model, plain), shape
        nets[name] += (next(iter(model.state_dict().values()), torch.zeros((), dtype=torch.float64)).dtype,)
    found = {name: {"net": name, "calls": 0, "out of range": 0, "refused": 0, "other bits": 0} for name in turns_of}
    turns = (name for number in itertools.count() for name, every in turns_of.items() if number % every == 0)
    known = random.Random(0)
    for number, name in enumerate(itertools.islice(turns, calls), 1):
        secure, reference, shape, dtype = nets[name]
        row, rows = found[name], 1 if turns_of[name] > 100 else (1, 2, 3, 7)[found[name]["calls"] % 4]
        x = drawn((rows, *shape), dtype, limit, known)
        row["calls"] += 1
        try:
            wanted = reference(x)
        except SectorchError:
            wanted = None
        try:
            y = secure(x)
            row["other bits"] += wanted is None or not torch.equal(y, wanted)
        except SectorchError as error:
            row["out of range" if wanted is None and isinstance(error, BEYOND) else "refused"] += 1
            if wanted is not None or not isinstance(error, BEYOND):
                print(name, type(error).__name__, error, x.dtype, x.abs().max(), flush=True)
        if number % 500 == 0:
            failed = sum(row["refused"] + row["other bits"] for row in found.values())
            print(f"{number} calls, {failed} failed", flush=True)
    return list(found.values())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nets", nargs="*", default=["lenet", "vgg7"])
    p.add_argument("--counts", nargs="*", type=int, default=[2, 4], help="audited: one of so many calls is used")
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--calls", type=int, default=0, help="honest calls of each level")
    p.add_argument("--honest", nargs="*", default=["verified"], help="levels, as they are called in the table")
    p.add_argument("--processes", action="store_true", help="three processes over TLS, by the clock")
    p.add_argument("--json")
    options = p.parse_args()
    torch.set_num_threads(1)
    audited = {f"audited, 1 of {n}": Scheme(audited=n) for n in options.counts}
    levels = {"trusted": Scheme(), **audited, "verified": Scheme(verified=True)}
    how = in_processes if options.processes else measured
    rows = [row for net in options.nets for row in how(net, levels, options.repeats)]
    table = Table(
        "net", "Q is", "ahead s", "times", "online s", "times", "ahead MB", "times", "proof kB", "online MB", "same"
    )
    for row in rows:
        off = next(r for r in rows if r["net"] == row["net"] and r["dealer"] == "trusted")
        cells = [row["net"], row["dealer"]]
        for part in ("ahead", "online"):
            mine, before = statistics.median(row[part]), statistics.median(off[part])
            cells += [f"{mine:.4f}", f"{mine / before:.2f}"]
        cells += [f"{row['ahead_bytes'] / 1e6:.4f}", f"{row['ahead_bytes'] / off['ahead_bytes']:.4f}"]
        cells.append(f"{row['proof_bytes'] / 1e3:.1f}")
        table.add_row(*cells, f"{row['online_bytes'] / 1e6:.4f}", "yes" if row["same"] else "NO")
    if rows:
        Console(width=120).print(table)
    honestly = []
    for level in options.honest if options.calls else ():
        for row in honest(options.calls, levels[level]):
            honestly.append({"dealer": level, **row})
            print(f"{level}: {row}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows + honestly, file, indent=1)


if __name__ == "__main__":
    main()
