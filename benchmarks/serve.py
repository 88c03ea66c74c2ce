"""Many clients of one model, each asking in a closed loop: queries a second, latencies, and what each party spends.

    python benchmarks/serve.py                  # LeNet; 1, 4 and 16 clients; S and A on one core, and on two
    python benchmarks/serve.py --clients 16 --workers 2 --cores 2 --json serve.json
    python benchmarks/serve.py --soak 2000      # queries of 16 clients: memory, files and threads stay flat
    python benchmarks/serve.py --clients 20 --net vgg7 --seconds 30     # S with 20 open sessions

S and A are processes of their own, `sectorch server` and `sectorch answer`, confined to the first cores. Each client
has a connection, a certificate and a session of its own. The clients are forked from this process, so that they share
the memory that torch takes; they share the machine's cores with S and A, and that is why processor time is given for
each party: a server of its own does as many queries a second as it has cores, over its seconds for one. Every result
is compared with `sectorch.reference`, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sectorch
from sectorch.errors import UnknownModelError
from sectorch.network import connect
from sectorch.network.identity.identity import Credentials, Pins
from sectorch.network.parties.client import Connection
from sectorch.network.parties.remote_model import RemoteModel
from sectorch.testing.local_network import Stage, example

TICKS = os.sysconf("SC_CLK_TCK")
POOL = 64
"""Different images that are asked for."""


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                found += family(int(child))
        except OSError:
            continue
    return found


def cpu(pids: list[int]) -> float:
    """Processor seconds of these processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def memory(pids: list[int]) -> dict[str, float]:
    """Resident MB (of several processes: what they share counts once for each), and files and threads."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    count = lambda what: sum(len(os.listdir(f"/proc/{pid}/{what}")) for pid in pids)
    return {"MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "files": count("fd"), "threads": count("task")}


def asked(connection: Connection, net: str) -> RemoteModel:
    """The model, once the answering party is connected to this client's worker too."""
    end = time.monotonic() + 30
    while True:
        try:
            return connection.model(net)
        except UnknownModelError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


class Client(threading.Thread):
    """One client: a connection, a session, and queries one after the other."""

    def __init__(self, number: int, orders: dict[str, Any], images: torch.Tensor, expected: torch.Tensor):
        super().__init__(daemon=True)
        self.number, self.orders, self.images, self.expected = number, orders, images, expected
        self.took: list[float] = []
        self.wrong = self.done = 0
        self.ready, self.begin, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.failed = ""

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.work()
        except BaseException:
            self.failed = traceback.format_exc()
            self.ready.set()

    def work(self) -> None:
        folder, name = Path(self.orders["folder"]), f"client-{self.number}"
        credentials = Credentials.read(*(folder / f for f in (f"{name}.pem", f"{name}-key.pem", "ca.pem")))
        batch = self.orders["batch"]
        with connect(f"localhost:{self.orders['port']}", credentials, 60.0, pins=Pins(folder / "pins")) as connection:
            model = asked(connection, self.orders["net"])
            for _ in range(self.orders["warm"]):
                model(self.images[:batch])
            self.ready.set()
            self.begin.wait()
            at = self.number
            while not self.stopped.is_set() and self.done < self.orders["most"]:
                rows = [(at + i) % POOL for i in range(batch)]
                start = time.perf_counter()
                got = model(self.images[rows])
                self.took.append(time.perf_counter() - start)
                self.wrong += not torch.equal(got, self.expected[rows])
                self.done, at = self.done + 1, at + batch
            self.stopped.wait()


def clients(pipe: Pipe, images: torch.Tensor, expected: torch.Tensor) -> None:
    """A process with some of the clients; it does what comes over the pipe."""
    torch.set_num_threads(1)
    running: list[Client] = []
    while (order := pipe.recv()) is not None:
        if order["do"] == "open":
            running = [Client(n, order, images, expected) for n in order["clients"]]
            for one in running:
                one.start()
            for one in running:
                one.ready.wait()
            pipe.send({"failed": "".join(one.failed for one in running)})
        elif order["do"] == "begin":
            spent = time.process_time()
            for one in running:
                one.begin.set()
            pipe.send({})
        elif order["do"] == "count":
            alive = any(one.is_alive() and one.done < one.orders["most"] for one in running)
            pipe.send({"done": sum(one.done for one in running), "alive": alive})
        else:
            for one in running:
                one.stopped.set()
            pipe.send({"cpu": time.process_time() - spent})
            for one in running:
                one.join(60)
            failed = "".join(one.failed for one in running)
            took = [second for one in running for second in one.took]
            pipe.send({"took": took, "wrong": sum(one.wrong for one in running), "failed": failed})


class Crowd:
    """Processes that are the clients."""

    def __init__(self, processes: int, images: torch.Tensor, expected: torch.Tensor):
        context = multiprocessing.get_context("fork")
        self.pipes: list[Pipe] = []
        for _ in range(processes):
            here, there = context.Pipe()
            context.Process(target=clients, args=(there, images, expected), daemon=True).start()
            self.pipes.append(here)

    def each(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        used = list(zip(self.pipes, orders, strict=False))
        for pipe, order in used:
            pipe.send(order)
        return [pipe.recv() for pipe, _ in used]

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def check(replies: list[dict[str, Any]]) -> None:
    failed = "".join(reply.get("failed", "") for reply in replies)
    if failed:
        raise SystemExit(failed)


def measure(stage: Stage, crowd: Crowd, net: str, count: int, cores: int, options: argparse.Namespace) -> dict:
    """So many clients at once: one row."""
    most = options.soak or 1 << 60
    for number in range(count):
        stage.credentials(f"client-{number}")
    processes = min(count, len(crowd.pipes))
    shares = [list(range(count))[i::processes] for i in range(processes)]
    order = {
        "folder": str(stage.folder), "port": stage.port, "net": net, "batch": options.batch, "warm": options.warm,
    }  # fmt: skip
    check(crowd.each([{**order, "do": "open", "clients": mine, "most": -(-most // count)} for mine in shares]))
    parties = {"S": stage.processes["server"].pid, "A": stage.processes[net].pid}
    pids = {who: family(pid) for who, pid in parties.items()}
    before, held = {who: cpu(pids[who]) for who in pids}, {who: memory(pids[who]) for who in pids}
    crowd.each([{"do": "begin"}] * processes)
    start = time.perf_counter()
    rows, last = [], 0
    while time.perf_counter() - start < (options.seconds if most == 1 << 60 else 3600):
        time.sleep(0.2)
        if most < 1 << 60:
            said = crowd.each([{"do": "count"}] * processes)
            done = sum(one["done"] for one in said)
            if done - last >= most / 10:
                last = done
                rows.append({"query": done, **{who: memory(pids[who]) for who in pids}})
            if not any(one["alive"] for one in said):
                break
    seconds = time.perf_counter() - start
    after, now = {who: cpu(pids[who]) for who in pids}, {who: memory(pids[who]) for who in pids}
    spent = crowd.each([{"do": "stop"}] * processes)
    found = [pipe.recv() for pipe in crowd.pipes[:processes]]
    check(found)
    took = sorted(second for one in found for second in one["took"])
    done = len(took)
    each = {who: 1e3 * (after[who] - before[who]) / done for who in pids}
    return {
        "net": net, "clients": count, "cores": cores, "workers": options.workers, "batch": options.batch,
        "queries": done, "seconds": seconds, "queries a second": done / seconds,
        "p50 ms": 1e3 * statistics.median(took), "p99 ms": 1e3 * took[min(done - 1, int(0.99 * done))],
        "S cpu ms": each["S"], "A cpu ms": each["A"], "clients cpu ms": 1e3 * sum(s["cpu"] for s in spent) / done,
        "S MB": [held["S"]["MB"], now["S"]["MB"]], "A MB": [held["A"]["MB"], now["A"]["MB"]],
        "wrong": sum(one["wrong"] for one in found), "memory": rows,
    }  # fmt: skip


def printed(rows: list[dict]) -> None:
    table = Table(title="one query: processor ms at each party; MB at begin and end")
    for name in (
        "net",
        "clients",
        "cores",
        "workers",
        "queries",
        "q/s",
        "p50",
        "p99",
        "S",
        "A",
        "clients'",
        "S MB",
        "A MB",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row[k] for k in ("queries a second", "p50 ms", "p99 ms", "S cpu ms", "A cpu ms", "clients cpu ms"))
        held = ("{:.0f}, {:.0f}".format(*row[k]) for k in ("S MB", "A MB"))
        counts = (str(row[k]) for k in ("net", "clients", "cores", "workers", "queries"))
        table.add_row(*counts, *(f"{x:.1f}" for x in figures), *held)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="+", default=["lenet"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="of S and A together")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of S; 0: it is one process")
    parser.add_argument("--batch", type=int, default=1, help="rows of a query")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm", type=int, default=3, help="queries of each client before")
    parser.add_argument("--processes", type=int, default=16, help="of the clients; several clients are threads of one")
    parser.add_argument(
        "--soak", type=int, metavar="QUERIES", help="so many queries, and memory at every tenth of them"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_cores, rows = sorted(os.sched_getaffinity(0)), []
    for net in options.net:
        model, images = example(net, POOL)
        with torch.no_grad():
            expected = sectorch.reference(model)(images)
        for cores in options.cores:
            crowd = Crowd(min(options.processes, max(options.clients)), images, expected)
            os.sched_setaffinity(0, all_cores[:cores])  # S and A inherit it, and the clients do not
            more = ("--workers", str(options.workers)) if options.workers else ()
            try:
                with Stage({net: (model, images[:2])}, options=more) as stage:
                    for count in [max(options.clients)] if options.soak else options.clients:
                        rows.append(measure(stage, crowd, net, count, cores, options))
                        printed(rows[-1:])
            finally:
                os.sched_setaffinity(0, all_cores)
                crowd.end()
    printed(rows)
    for row in rows:
        for line in row["memory"]:
            print(f"after query {line['query']:5}: { ({who: line[who] for who in ('S', 'A')}) }")
    wrong, asked = (sum(row[what] for row in rows) for what in ("wrong", "queries"))
    print(f"{wrong} of {asked} results differ from the reference")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
