"""Two checkouts of sectorch against each other in one run: calls alternate, so that no drift favours one of them.

    git worktree add ../before v0.1.0
    python benchmarks/against.py ../before                                  # ReLUs, LeNet and VGG-7
    python benchmarks/against.py ../before --what relu vgg7:32 --repeats 40 # one net and batch, or 100,032 ReLUs

Each checkout has a process of its own, with torch and everything else of this Python. Milliseconds are medians, and the
ratio is the median of the ratios of neighbouring calls. Bytes are per element of a ReLU, and per image of a net.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RELUS = 100_032
WHAT = ["relu", "lenet:1", "vgg7:1", "vgg7:32"]


def serve(what: str, threads: int) -> None:
    """In a process of one checkout: a call for every line that comes, its seconds on a line."""
    import torch

    import sectorch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    call, count = relus() if what == "relu" else net(*what.split(":"))
    for _ in range(3):
        call()
    with sectorch.profile() as profile:
        call()
    ahead = profile.offline_bytes - profile.setup_bytes
    print(json.dumps([profile.rounds, profile.online_bytes / count, ahead / count]), flush=True)
    for _ in sys.stdin:
        print(call(), flush=True)


def relus():
    """ReLU and truncation of values that depend on the query, all parties together."""
    import torch

    import sectorch
    from sectorch.mpc.relu import relu
    from sectorch.mpc.shares import Shares

    session = sectorch.Session()
    x, mask = (torch.randint(-(1 << 50), 1 << 50, (RELUS,)) for _ in range(2))

    def call() -> float:
        with session.call(session.answering[0]) as net:
            shares = Shares(net.own(net.A, x - mask), net.own(net.S, mask))
            start = time.perf_counter()
            relu(net, shares, 20)
            return time.perf_counter() - start

    return call, RELUS


def net(name: str, batch: str):
    import torch

    import sectorch
    from sectorch.nn.models import ZOO

    construct, shape = ZOO[name]
    secure, x = sectorch.secure(construct().eval()), torch.randn(int(batch), *shape)

    def call() -> float:
        start = time.perf_counter()
        secure(x)
        return time.perf_counter() - start

    return call, int(batch)


class Checkout:
    """A process that runs the code of one folder."""

    def __init__(self, folder: Path, what: str, threads: int):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", what, "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        )  # fmt: skip
        self.rounds, self.online, self.ahead = json.loads(self.process.stdout.readline())
        self.seconds: list[float] = []

    def call(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(float(self.process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", default=Path(), help="the other checkout")
    parser.add_argument("--what", nargs="+", default=WHAT, help="relu, or NET:BATCH")
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
        ratio = statistics.median(b / a for a, b in zip(before.seconds, now.seconds, strict=True))
        row = {"what": what, "ratio": ratio}
        for name, one in (("before", before), ("now", now)):
            row[name] = {
                "ms": 1e3 * statistics.median(one.seconds), "least ms": 1e3 * min(one.seconds),
                "rounds": one.rounds, "online": one.online, "ahead": one.ahead,
            }  # fmt: skip
            one.process.kill()
            values = ", ".join(f"{value:.5g} {key}" for key, value in row[name].items())
            print(f"{what} {name}: {values}", flush=True)
        print(f"{what}: {ratio:.2f} times the seconds", flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
