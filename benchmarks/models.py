"""Secure against plain for the papers' nets, both in the same run, beside PrivHFL's Table 3.

    python benchmarks/models.py                               # all nets, batches 1, 8, 32
    python benchmarks/models.py --nets vgg7 --batches 256     # one of them
    python benchmarks/models.py --json results.json

Plain and secure calls alternate, so that a machine whose speed drifts does not favour one of them; the medians are
printed. Every pair of net and batch runs in a process of its own, whose peak resident memory is read at the end. All
three parties' work is in the secure time, and all their data in the memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sectorch
from sectorch import Scheme
from sectorch.nn.models import ZOO, randomize_batchnorm

PAPER = {  # PrivHFL, Table 3: seconds and MB of one prediction
    "vgg7": ("1.03", "0.35", "66.61"),
    "resnet8": ("1.63", "0.36", "73.85"),
    "resnet10": ("2.00", "0.53", "105.88"),
}
RELUS = 100_032


def measure(name: str, batch: int, repeats: int, relu: str) -> dict:
    """One net and batch, in this process."""
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    images = torch.randn(batch, *shape)
    secure_model = sectorch.secure(model, Scheme(relu=relu))
    with torch.no_grad():
        expected = model(images)
        with sectorch.profile() as first:
            error = float((secure_model(images) - expected).abs().max())
        plain, secure = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(3):
                model(images)
            plain.append((time.perf_counter() - start) / 3)
            start = time.perf_counter()
            secure_model(images)
            secure.append(time.perf_counter() - start)
        with sectorch.profile() as profile:
            secure_model(images)
    return {
        "net": name,
        "batch": batch,
        "plain": statistics.median(plain),
        "secure": statistics.median(secure),
        "error": error,
        "MB": profile.bytes / batch / 1e6,
        "online_MB": profile.online_bytes / batch / 1e6,
        "weights_MB": first.setup_bytes / 1e6,
        "rounds": profile.rounds,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def measure_relu() -> dict:
    """100,000 exact ReLUs with truncation, all parties together."""
    from sectorch.mpc.star.relu import relu
    from sectorch.mpc.star.shares import Shares

    session = sectorch.Session()
    seconds = []
    for _ in range(21):
        with session.call(session.answering[0]) as net:
            halves = (net.own(p, torch.randint(-(2**49), 2**49, (RELUS,))) for p in (net.A, net.S))
            shared = Shares(*halves)
            with sectorch.profile() as profile:
                relu(net, shared, 20)
        seconds.append(profile.seconds)
    dealt = profile.bytes_between("Q", "S") / RELUS
    return {
        "seconds": statistics.median(seconds),
        "opened": profile.bytes_between("A", "S") / RELUS,
        "dealt": dealt,
        "rounds": profile.rounds,
    }


def in_own_process(*arguments: str) -> dict:
    out = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--relu", default="exact", choices=["exact", "privhfl"])
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--here", action="store_true", help="measure one net and batch in this process, print JSON")
    options = parser.parse_args()
    if options.here:
        row = measure(options.nets[0], options.batches[0], options.repeats, options.relu)
        print(json.dumps(row))
        return

    console = Console(width=140)
    relu_row = measure_relu()
    console.print(
        f"{RELUS} exact ReLUs with truncation, all parties: {1e3 * relu_row['seconds']:.2f} ms, "
        f"{relu_row['opened']:.2f} bytes opened and {relu_row['dealt']:.2f} dealt each, {relu_row['rounds']} rounds"
    )
    table = Table(title=f"relu={options.relu}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = [
        "net",
        "batch",
        "plain_ms",
        "secure_ms",
        "ratio",
        "error",
        "MB/image",
        "online_MB",
        "weights_MB",
        "rounds",
        "peak_GB",
    ]
    for column in [*columns, "PrivHFL CPU s", "GPU s", "MB"]:
        table.add_column(column, justify="left" if column == "net" else "right")
    rows = []
    jobs = [(net, batch) for net in options.nets for batch in options.batches]
    for net, batch in track(jobs, "measuring", console=console, transient=True):
        common = ["--repeats", str(options.repeats), "--relu", options.relu]
        row = in_own_process("--here", "--nets", net, "--batches", str(batch), *common)
        rows.append(row)
        table.add_row(
            net, str(batch), f"{1e3 * row['plain']:.2f}", f"{1e3 * row['secure']:.1f}",
            f"{row['secure'] / row['plain']:.1f}", f"{row['error']:.1e}", f"{row['MB']:.2f}", f"{row['online_MB']:.2f}",
            f"{row['weights_MB']:.1f}", str(row["rounds"]), f"{row['peak_GB']:.2f}",
            *(PAPER.get(net, ("", "", "")) if batch == 1 else ("", "", "")),
        )  # fmt: skip
    console.print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"relu": relu_row, "models": rows}, file, indent=2)


if __name__ == "__main__":
    main()
