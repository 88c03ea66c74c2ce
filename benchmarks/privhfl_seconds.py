"""Seconds, bytes and memory of PrivHFL's secure queries: Tables 2, 3 and 4, Figure 8 (`benchmarks/privhfl.py` runs it).

Run by itself it makes one measurement, in a process of its own: NET QUERIES CHUNK ANSWERING, and prints it as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from privhfl_paper import PAPER
from rich.table import Table

import sectorch
from sectorch.data.selection import expand
from sectorch.federated.shared_training import retrain_on_shares
from sectorch.federated.training import predict, train
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.protocols.privhfl import PRESETS, federation, plain_query, secure_query
from sectorch.protocols.privhfl.query import Steps

REPEATS, SHORT = 5, 2.0
"""How often a query is measured that takes less than so many seconds."""

LONGEST = 180.0
"""Seconds; `table2` extrapolates rows that would take longer."""


def model_of(name: str):
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, shape


def measure(name: str, queries: int, chunk: int | None = None, answering: int = 1) -> dict:
    """A secure query of random images, answered by so many parties with one model each, in this process.

    A short one is repeated, and the run of median length is reported, beside the shortest and the longest.
    """
    model, shape = model_of(name)
    images = torch.rand(queries, *shape)
    secure_query(images[: min(queries, 8)], [model])  # loads libraries; a new session is opened below
    runs: list[tuple[float, float, Steps]] = []
    while not runs or (len(runs) < REPEATS and runs[0][0] < SHORT):
        start, cpu = time.perf_counter(), time.process_time()
        with sectorch.profile() as profile:
            total, steps = secure_query(images, [model] * answering, frac_bits=20, chunk=chunk)
        runs.append((time.perf_counter() - start, time.process_time() - cpu, steps))
    runs.sort(key=lambda run: run[0])
    seconds, cpu, steps = runs[len(runs) // 2]
    error = float((total[:64] - plain_query(images[:64], [model] * answering)).abs().max())
    return dict(
        net=name, queries=queries, answering=answering, **vars(steps), seconds=seconds, cpu=cpu, error=error,
        shortest=runs[0][0], longest=runs[-1][0], runs=len(runs),
        MB=profile.bytes / 1e6, setup_MB=profile.setup_bytes / 1e6,
        peak_GB=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, load=os.getloadavg()[0],
        threads=torch.get_num_threads(),
    )  # fmt: skip


def measured(
    o: argparse.Namespace,
    title: str,
    jobs: list[tuple[str, int, str]],
    chunk: int | None = None,
    longest: float = float("inf"),
) -> list[dict]:
    """A table of secure queries, each in a process of its own; what would take too long is extrapolated and says so."""
    shown = Table(
        title=f"{title}\nseconds of all parties together, in one process: one querying party, {o.answering} answering, "
        f"exact ReLU, 20 fraction bits, random images"
    )
    columns = ("net", "queries", "1 share", "2 predict", "3 aggregate", "whole", "from", "to", "CPU s", "MB/query",
               "weights MB", "error", "chunk", "peak GB", "load", "paper")  # fmt: skip
    for column in columns:
        shown.add_column(column, justify="left" if column in ("net", "paper") else "right")
    out: list[dict] = []
    for name, queries, paper in jobs:
        before = next((row for row in out if row["net"] == name), None)
        if before and before["seconds"] * queries / before["queries"] > longest:
            row = dict(extrapolated(before, queries), paper=f"{paper}; OURS EXTRAPOLATED from {before['queries']}")
        else:
            command = [sys.executable, __file__, name, str(queries), str(chunk or 0), str(o.answering)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = dict(json.loads(done.stdout.splitlines()[-1]), paper=paper)
        out.append(row)
        peak = "?" if row["peak_GB"] is None else f"{row['peak_GB']:.2f}"
        each = (row["MB"] - row["setup_MB"]) / queries
        shown.add_row(
            name, str(queries), f"{row['share']:.3f}", f"{row['predict']:.2f}", f"{row['aggregate']:.3f}",
            *(f"{row[name]:.2f}" for name in _WHOLE), f"{each:.2f}", f"{row['setup_MB']:.1f}",
            f"{row['error']:.0e}", str(row["chunk"]), peak, f"{row['load']:.1f}", row["paper"],
        )  # fmt: skip
        print(json.dumps(row), file=sys.stderr, flush=True)
    o.console.print(shown)
    return out


_WHOLE = ("seconds", "shortest", "longest", "cpu")


def extrapolated(row: dict, queries: int) -> dict:
    """The same row for more queries, whose time is in proportion; peak memory is not known."""
    factor = queries / row["queries"]
    times = {name: factor * row[name] for name in ("share", "predict", "aggregate", *_WHOLE)}
    MB = row["setup_MB"] + factor * (row["MB"] - row["setup_MB"])
    return {**row, **times, "queries": queries, "MB": MB, "peak_GB": None, "extrapolated": True}


def unseen(o: argparse.Namespace) -> list[dict]:
    """Retraining on shares (labels="shares"): seconds, bytes, rounds of an epoch; what the retrained model tells Q."""
    out, how = [], replace(PRESETS["digits"].retraining, epochs=o.epochs)
    shown = Table(title=f"An epoch on shares, 30 samples and {o.queries[-1]} queries, batches of {how.batch_size}")
    for column in ("net", "fraction bits", "steps", "CPU s", "MB", "rounds a step", "argmax known before", "after"):
        shown.add_column(column, justify="right")
    for net, bits in (("cnn", 20), ("vgg7-small", 16)):
        clients, _, classes = federation("digits", 3, architectures=(net,))
        for client in clients:
            train(
                client.model, client.images, client.labels, replace(PRESETS["digits"].local, epochs=o.local_epochs), 0
            )
        asker, *others = clients
        x = expand(asker.images, o.queries[-1], "mixup", generator=torch.Generator().manual_seed(0))
        soft = plain_query(x, [client.model for client in others]).softmax(1)
        after = copy.deepcopy(asker.model)
        own = F.one_hot(asker.labels, classes).double()
        train(after, torch.cat((asker.images, x)), torch.cat((own, soft)), how, 0)
        known = [
            float((predict(model, x).argmax(1) == soft.argmax(1)).double().mean()) for model in (asker.model, after)
        ]
        halves = {"Q": (soft * 2**bits).round().long(), "S": torch.zeros(soft.shape, dtype=torch.int64)}
        one = replace(how, epochs=1)
        args = asker.model, asker.images, asker.labels, x, [halves], classes
        retrain_on_shares(sectorch.Session(), "Q", *args, one, 0, bits)  # loads libraries
        start = time.process_time()
        with sectorch.profile() as profile:
            retrain_on_shares(sectorch.Session(), "Q", *args, one, 0, bits)
        steps = -(-(len(x) + len(asker.images)) // one.batch_size)
        row = dict(net=net, bits=bits, steps=steps, cpu=time.process_time() - start, MB=profile.bytes / 1e6,
                   rounds=profile.rounds / steps, before=known[0], after=known[1])  # fmt: skip
        out.append(row)
        shown.add_row(net, str(bits), str(steps), f"{row['cpu']:.2f}", f"{row['MB']:.1f}", f"{row['rounds']:.0f}",
                      *(f"{100 * value:.0f} %" for value in known))  # fmt: skip
    o.console.print(shown)
    return out


def table2(o: argparse.Namespace) -> list[dict]:
    nets = o.nets or ["vgg7", "resnet8", "resnet10"]
    jobs = [(n, q, PAPER["table2"].get((n, q), "(not in the paper)")) for q in o.queries for n in nets]
    return measured(o, "Table 2: the three steps (paper: one GPU)", jobs, longest=LONGEST)


def table3(o: argparse.Namespace) -> list[dict]:
    jobs = [(n, 1, PAPER["table3"].get(n, "(not in the paper)")) for n in o.nets or ["vgg7", "resnet8", "resnet10"]]
    return measured(o, "Table 3: one prediction", jobs)


def table4(o: argparse.Namespace) -> list[dict]:
    nets = o.nets or ["cryptonets", "cryptonets_relu", "mlp"]
    jobs = [
        (n, b, PAPER["table4"].get((n, b), "(not in the paper)")) for n in nets for b in (128, 256, 512, 1024, 2048)
    ]
    return measured(o, "Table 4: small networks by batch (paper: one GPU; HE-T is HE-Transformer)", jobs)


def fig8(o: argparse.Namespace) -> list[dict]:
    nets = o.nets or ["vgg7", "resnet8", "resnet10"]
    jobs = [(n, b, PAPER["fig8"]) for n in nets for b in (1, 2, 4, 8, 16, 32, 64)]
    return measured(o, "Figure 8: batches on the CPU", jobs)


def memory(o: argparse.Namespace) -> list[dict]:
    nets = o.nets or ["vgg7"]
    jobs = [(n, q, "(not in the paper)") for n in nets for q in o.queries]
    return measured(o, "Peak memory against the number of queries, 16 at once", jobs, chunk=16)


def main() -> None:
    name, queries, chunk, *answering = sys.argv[1:]
    print(json.dumps(measure(name, int(queries), int(chunk) or None, *map(int, answering))))


if __name__ == "__main__":
    main()
