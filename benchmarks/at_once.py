"""Twenty queries at once, from four clients, of two models through one server: are all right, and how much S holds.

python benchmarks/at_once.py
python benchmarks/at_once.py --nets lenet vgg7 --queries 20 --clients 4 --batch 8
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from pathlib import Path

import torch

from sectorch.testing.local_network import Stage, example


def peak(pid: int) -> float:
    """The largest resident memory that a process has had, MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs=2, default=["lenet", "vgg7"])
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {net: example(net, options.batch) for net in options.nets}
    names = [f"client-{i}" for i in range(options.clients)]
    errors: dict[int, float] = {}
    with Stage(models) as stage, torch.no_grad():
        idle = peak(stage.processes["server"].pid)
        connections = [stage.connect(name) for name in names]

        def ask(i: int) -> None:
            net = options.nets[i % 2]
            model, images = models[net]
            remote = connections[i // 2 % options.clients].model(net)
            with torch.no_grad():  # of this thread
                errors[i] = float((remote(images[: options.batch]) - model(images[: options.batch])).abs().max())
            remote.close()

        start = time.perf_counter()
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(options.queries)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        held = peak(stage.processes["server"].pid)
        for connection in connections:
            connection.close()
    right = sum(error < 1e-2 for error in errors.values())
    print(f"{right} of {options.queries} right (largest error {max(errors.values()):.1e}) in {seconds:.1f} s")
    print(f"the server held {held:.0f} MB at most, {idle:.0f} MB before the first query")


if __name__ == "__main__":
    main()
