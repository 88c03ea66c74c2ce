"""Two checkouts of sectorch against each other in one run: calls alternate, so that no drift favours one of them.

    git worktree add ../before v0.1.0
    python benchmarks/against.py ../before                                  # ReLUs, LeNet, VGG-7 and ResNet-50
    python benchmarks/against.py ../before --what relu vgg7:32 --repeats 40 # one net and batch, or 100,032 ReLUs
    python benchmarks/against.py ../before --what torchvision.resnet18:1    # at 224, and not the one of the paper at 64
    python benchmarks/against.py ../before --what encoder:1                 # 12 layers of BERT-base's size
    python benchmarks/against.py ../before --what lenet:1:processes         # its parties as three processes

Each checkout has a process of its own, with torch and everything else of this Python. For each, milliseconds of the
processor (all threads; of the querying party alone, where the parties are processes) and of the clock are medians, with
the quartiles, and beside them plain torch's in the same turns. Ratios are medians of the ratios of neighbouring calls.
Bytes are per element of a ReLU, and per image of a net; faults are pages that a call touches first. `relu` is one call
in a turn, on caches that the other process has emptied; `relu:10` ten, as those of a net follow one another: times are
their means, and faults those of all.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

RELUS = 100_032
WHAT = ["relu", "lenet:1", "vgg7:1", "vgg7:8", "vgg7:32", "resnet50:1"]


def serve(what: str, threads: int) -> None:
    """In a process of one checkout: for every line that comes a call, and what it took on a line."""
    import torch

    import sectorch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    name, _, number = what.partition(":")
    in_a_row = int(number or 1) if name == "relu" else 1
    call, plain, count = relus() if name == "relu" else net(*what.split(":"))
    call()
    first = time.perf_counter() - start
    for _ in range(2):
        call()
    with sectorch.profile() as profile:
        call()
    plain()
    about = {"rounds": profile.rounds, "online": profile.online_bytes / count, "first s": first}
    print(json.dumps(about | {"ahead": (profile.offline_bytes - profile.setup_bytes) / count}), flush=True)
    for _ in sys.stdin:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        calls = [call() for _ in range(in_a_row)]
        took = [1e3 * seconds for seconds in (*map(statistics.fmean, zip(*calls, strict=True)), *timed(plain))]
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([*took, used.ru_minflt - faults, used.ru_maxrss / 1e3]), flush=True)


TAKEN = ("processor ms", "clock ms", "plain processor ms", "plain clock ms", "faults", "peak MB")


def timed(f) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    f()
    return time.process_time() - processor, time.perf_counter() - clock


def relus():
    """ReLU and truncation of values that depend on the query, all parties together."""
    import torch

    import sectorch

    try:
        from sectorch.mpc.star.relu import relu
        from sectorch.mpc.star.shares import Shares
    except ModuleNotFoundError:  # where they stood in version 0.1
        from sectorch.mpc.relu import relu
        from sectorch.mpc.shares import Shares

    session = sectorch.Session()
    x, mask = (torch.randint(-(1 << 50), 1 << 50, (RELUS,)) for _ in range(2))

    def call() -> tuple[float, float]:
        with session.call(session.answering[0]) as net:
            shares = Shares(net.own(net.A, x - mask), net.own(net.S, mask))
            return timed(lambda: relu(net, shares, 20))

    values = torch.randn(RELUS)
    return call, values.relu, RELUS


def net(name: str, batch: str, how: str = ""):
    import torch

    import sectorch
    from sectorch.nn.models import ZOO, randomize_batchnorm

    if name in ZOO:
        construct, shape = ZOO[name]
        model = construct().eval()
        randomize_batchnorm(model, torch.Generator().manual_seed(0))
    elif name.startswith("encoder"):
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        model = torch.nn.TransformerEncoder(layer, int(name[7:] or 12), enable_nested_tensor=False).eval()
        shape = (128, 768)
    else:
        import torchvision

        # Its norms stay as they are made: with random ones an untrained ResNet-50 leaves the default range.
        name, shape = name.removeprefix("torchvision."), (3, 224, 224)
        model = torchvision.models.get_model(name, weights=None).eval()
    x = torch.randn(int(batch), *shape)
    if how == "processes":
        # The present place, and where it stood before it and in version 0.1.
        places = "testing.local_network", "network.parties.stage", "network.stage"
        place = next(p for p in places if importlib.util.find_spec(f"sectorch.{p}"))
        Stage = importlib.import_module(f"sectorch.{place}").Stage

        stage = Stage({name: (model, torch.randn(2, *shape))})
        secure = stage.__enter__().connect("alice").model(name)
    else:
        secure = sectorch.secure(model)
    plain = torch.no_grad()(lambda: model(x))
    return lambda: timed(lambda: secure(x)), plain, int(batch)


class Checkout:
    """A process that runs the code of one folder."""

    def __init__(self, folder: Path, what: str, threads: int):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", what, "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        )  # fmt: skip
        self.about = json.loads(self.process.stdout.readline())
        self.taken: list[list[float]] = []

    def call(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.taken.append(json.loads(self.process.stdout.readline()))

    def row(self) -> dict:
        """Medians, and the quartiles of times."""
        row = dict(self.about)
        for name, values in zip(TAKEN, zip(*self.taken, strict=True), strict=True):
            row[name] = statistics.median(values)
            if name.endswith("ms") and len(values) > 3:
                low, _, high = statistics.quantiles(values, n=4)
                row[f"{name}, quartiles"] = [low, high]
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", default=Path(), help="the other checkout")
    parser.add_argument("--what", nargs="+", default=WHAT, help="relu, relu:CALLS, or NET:BATCH")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.threads)
    rows = []
    for what in options.what:
        folders = options.before, Path(__file__).parent.parent
        before, now = (Checkout(folder, what, options.threads) for folder in folders)
        for _ in range(options.repeats):
            before.call()
            now.call()
        row = {"what": what, "before": before.row(), "now": now.row()}
        for at, name in enumerate(TAKEN[:2]):
            ratios = [b[at] / a[at] for a, b in zip(before.taken, now.taken, strict=True)]
            row[f"ratio of {name}"] = statistics.median(ratios)
        for one in (before, now):
            one.process.stdin.close()
            one.process.wait(60)
        for name in ("before", "now"):
            shown = row[name]
            values = ", ".join(f"{shown[key]:.5g} {key}" for key in (*TAKEN, *one.about))
            print(f"{what} {name}: {values}", flush=True)
        print(f"{what}: {row['ratio of processor ms']:.2f} times the processor's time", flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
