"""Many queries through three processes: memory, file handles and threads of each stay flat, and no material is left.

    python benchmarks/soak.py                   # 1,000 queries of LeNet, half of them prepared ahead
    python benchmarks/soak.py --queries 200 --json soak.json

Every tenth query opens a session of its own; every fiftieth is given up half-way.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sectorch.testing.local_network import Stage, example


def figures(pid: int) -> tuple[float, int, int]:
    """Resident MB, open file handles and threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
    )  # fmt: skip


def left(folder: Path) -> int:
    """Pieces of material on disk, of all three parties."""
    return sum(name.endswith(".piece") for _, _, names in os.walk(folder) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="lenet")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, images = example(options.net, 64)
    rows, wrong, given_up, start = [], 0, 0, time.perf_counter()
    with Stage({"hospital-b": (model, images)}) as stage, torch.no_grad():
        pids = {"S": stage.processes["server"].pid, "A": stage.processes["hospital-b"].pid, "Q": os.getpid()}
        connection = stage.connect("alice")
        remote = connection.model("hospital-b")
        for i in track(range(options.queries), "asking", console=Console(stderr=True)):
            x = images[i % 64 : i % 64 + 1]
            if i % 10 == 9:
                remote.close()
                remote = connection.model("hospital-b")
            if i % 2:
                remote.prepare(1)
            if i % 50 == 49:  # this party leaves in the middle, and comes back
                send, count = connection.link.send, [0]

                def leaving(data: bytes, urgent: bool = False, send=send, count=count) -> None:
                    count[0] += 1
                    if count[0] == 2:
                        raise KeyboardInterrupt
                    send(data, urgent)

                connection.link.send = leaving
                try:
                    remote(x)
                except KeyboardInterrupt:
                    given_up += 1
                connection.link.send = send
            wrong += int((remote(x) - model(x)).abs().max() > 1e-3)
            if i % max(1, options.queries // 10) == 0 or i == options.queries - 1:
                now = {who: figures(pid) for who, pid in pids.items()}
                rows.append(
                    {
                        "query": i + 1,
                        **{who: dict(zip(("MB", "files", "threads"), now[who], strict=True)) for who in now},
                    }
                )
        while remote.prepared():
            remote(images[:1])
        remote.close()
        time.sleep(0.5)
        pieces = left(stage.folder)
        connection.close()
    seconds = time.perf_counter() - start
    table = Table(
        title=f"{options.queries} queries in {seconds:.0f} s; {wrong} wrong, {given_up} given up; pieces left: {pieces}"
    )
    table.add_column("after query", justify="right")
    for who in "SAQ":
        table.add_column(f"{who}: MB, files, threads", justify="right")
    for row in rows:
        cells = (f"{row[w]['MB']:.0f}, {row[w]['files']}, {row[w]['threads']}" for w in "SAQ")
        table.add_row(str(row["query"]), *cells)
    Console(width=110).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "wrong": wrong, "left": pieces}, indent=1))


if __name__ == "__main__":
    main()
