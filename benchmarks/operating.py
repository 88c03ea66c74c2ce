"""What an operator asks before the parties go on a small machine: bounds on memory, growth, one core, large queries.

    python benchmarks/operating.py memory                  # 20 clients of VGG-7 under the limits of deploy/
    python benchmarks/operating.py memory --clients 10 --server 1.3 --answer 1.6
    python benchmarks/operating.py growth --queries 10000  # resident memory of S and A, of a small net
    python benchmarks/operating.py core --clients 30       # S and A on one core
    python benchmarks/operating.py large --megabytes 50    # one query of so many bytes, in batches of 256 rows

S and A are processes, the clients are threads of this one. `memory` bounds each process by the system as well
(`RLIMIT_DATA`, as `ulimit -d` does): a process that takes more fails, and the figures show that it is alive.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sectorch.errors import BusyError, NetworkError
from sectorch.network import Store, connect
from sectorch.testing.local_network import PROGRAM, Stage, example

PAUSE = 1.0
"""Seconds after a refusal until a client asks again."""


def status(pid: int, what: str = "VmRSS") -> float:
    """MB of a process: `VmRSS` now, `VmHWM` at most, `VmData` of data."""
    return int(re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1.024e-3


def small_net() -> tuple[nn.Module, torch.Tensor]:
    """A net of 1,000 weights, and images."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
    return net, torch.rand(8, 1, 8, 8)


def ask_all(stage: Stage, net: str, model: nn.Module, x: torch.Tensor, clients: int, each: int, seconds: float) -> dict:
    """Each client asks `each` queries, and again after a refusal; counts of what came, and each query's seconds."""
    counts, took, lock = Counter[str](), list[float](), threading.Lock()
    with torch.no_grad():
        expected = model(x)
    connections = [stage.connect(f"client-{i}") for i in range(clients)]
    end = time.monotonic() + seconds

    def ask(i: int) -> None:
        remote, done = None, 0
        while done < each and time.monotonic() < end:
            start = time.perf_counter()
            try:
                remote = remote or connections[i].model(net)
                with torch.no_grad():
                    right = bool((remote(x) - expected).abs().max() < 1e-2)
                result = "right" if right else "wrong"
            except NetworkError as error:
                result = "refused for memory" if isinstance(error, BusyError) else type(error).__name__
            with lock:
                counts[result] += 1
                if result in ("right", "wrong"):
                    took.append(time.perf_counter() - start)
            if result == "right":
                done += 1
            else:
                time.sleep(PAUSE)
        with lock:
            counts["clients with all answers"] += done == each

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return {**counts, "seconds": round(spent, 1), "median of a query": round(float(np.median(took or [0])), 2)}


def memory(options: argparse.Namespace) -> None:
    model, images = example(options.net, max(2, options.rows))
    bounds = {"server": options.server, "model": options.answer}
    given = {name: ("--memory", str(0.9 * limit)) for name, limit in bounds.items()}
    started = {name: ("prlimit", f"--data={int(limit * 1e9)}") for name, limit in bounds.items()}
    with Stage({"model": (model, images)}, options=given, started=started) as stage:
        pids = {name: stage.processes[name].pid for name in bounds}
        before = {name: status(pid) for name, pid in pids.items()}
        counts = ask_all(stage, "model", model, images[: options.rows], options.clients, options.each, options.seconds)
        print(
            f"{options.clients} clients of {options.net}, {options.each} queries of {options.rows} rows each: {counts}"
        )
        for name, pid in pids.items():
            ended = stage.processes[name].poll()
            print(f"{name}: {'alive' if ended is None else f'ended with {ended}'}, limit {bounds[name] * 1e3:.0f} MB, "
                  f"resident {before[name]:.0f} MB before, {status(pid, 'VmHWM'):.0f} at most, "
                  f"data {status(pid, 'VmData'):.0f}")  # fmt: skip


def growth(options: argparse.Namespace) -> None:
    model, images = small_net()
    with Stage({"model": (model, images)}) as stage, stage.connect("alice") as connection, torch.no_grad():
        pids = {"S": stage.processes["server"].pid, "A": stage.processes["model"].pid, "Q": os.getpid()}
        remote, expected, wrong = connection.model("model"), model(images), 0
        start = time.perf_counter()
        for i in range(options.queries):
            wrong += int((remote(images[i % 8 : i % 8 + 1]) - expected[i % 8 : i % 8 + 1]).abs().max() > 1e-3)
            if i % 10 == 9:  # a session of its own
                remote.close()
                remote = connection.model("model")
            if i + 1 in (1, 100, 1000) or (i + 1) % max(1, options.queries // 10) == 0:
                held = ", ".join(f"{who} {status(pid):.1f}" for who, pid in pids.items())
                files = ", ".join(f"{who} {len(os.listdir(f'/proc/{pid}/fd'))}" for who, pid in pids.items())
                print(
                    f"after {i + 1} queries, {time.perf_counter() - start:.0f} s: {held} MB; files {files}", flush=True
                )
    print(f"{options.queries} queries, {wrong} wrong")


def core(options: argparse.Namespace) -> None:
    model, images = example(options.net, 2)
    with Stage({"model": (model, images)}, options=dict.fromkeys(("server", "model"), ("--core", "0"))) as stage:
        pids = {name: stage.processes[name].pid for name in ("server", "model")}
        for pid in pids.values():  # `taskset -p`, for all threads
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
        counts = ask_all(stage, "model", model, images[:1], options.clients, options.each, options.seconds)
        held = {name: round(status(pid, "VmHWM")) for name, pid in pids.items()}
    print(f"{options.clients} clients of {options.net}, S and A on one core: {counts}; MB at most: {held}")


def large(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10)).eval()
    rows = int(options.megabytes * 1e6 / (784 * 4))
    x = torch.rand(rows, 1, 28, 28)
    with Stage({"model": (model, x[:2])}) as stage, tempfile.TemporaryDirectory() as folder:
        stage.credentials("alice")
        np.save(f"{folder}/x.npy", x.numpy())
        pids = {name: stage.processes[name].pid for name in ("server", "model")}
        before = {name: status(pid) for name, pid in pids.items()}
        own = [f"--{n}={stage.folder}/{f}" for n, f in
               (("cert", "alice.pem"), ("key", "alice-key.pem"), ("ca", "ca.pem"), ("pins", "pins"))]  # fmt: skip
        start = time.perf_counter()
        command = [*PROGRAM, "query", "model", f"{folder}/x.npy", f"--out={folder}/y.npy", *own]
        asked = subprocess.run([*command, f"--server=localhost:{stage.port}"], capture_output=True, text=True)
        spent = time.perf_counter() - start
        if asked.returncode:
            raise SystemExit(f"the query ended with {asked.returncode}: {asked.stderr[-600:]}")
        with torch.no_grad():
            error = float((torch.from_numpy(np.load(f"{folder}/y.npy")) - model(x)).abs().max())
        with connect(f"localhost:{stage.port}", stage.credentials("bob"), pins=stage.pins, store=Store()) as connection:
            start = time.perf_counter()
            with torch.no_grad():
                one = float((connection.model("model")(x) - model(x)).abs().max())
            at_once = time.perf_counter() - start
        held = {name: f"{before[name]:.0f} to {status(pid, 'VmHWM'):.0f}" for name, pid in pids.items()}
    print(f"{x.numel() * 4 / 1e6:.0f} MB, {rows} rows: `sectorch query` {spent:.1f} s, error {error:.1e}; "
          f"`remote(x)` {at_once:.1f} s, error {one:.1e}; MB: {held}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "growth", "core", "large"))
    parser.add_argument("--net")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--each", type=int, default=2, help="queries of each client")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="after which no client asks again")
    parser.add_argument("--server", type=float, default=4 * 1.0737, help="GB of S")
    parser.add_argument("--answer", type=float, default=6 * 1.0737, help="GB of A")
    parser.add_argument("--queries", type=int, default=10000)
    parser.add_argument("--megabytes", type=float, default=50)
    options = parser.parse_args()
    options.net = options.net or {"memory": "vgg7"}.get(options.what, "lenet")
    options.clients = options.clients or {"memory": 20}.get(options.what, 30)
    torch.set_num_threads(1)
    {"memory": memory, "growth": growth, "core": core, "large": large}[options.what](options)


if __name__ == "__main__":
    main()
