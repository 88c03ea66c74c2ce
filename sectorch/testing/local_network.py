"""Three parties as processes on this machine over an emulated link (`Stage`), and `sectorch bench`, which times them.

S and A are processes of their own, Q is this one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from ..choreography.ledger import Profile
from ..cli.command import Parser, add_link, at_least, bars, chosen_network, command_status, print_json, writable
from ..config import Link, Scheme
from ..errors import ArgumentError, NetworkError, PeerLostError
from ..network.identity.authority import enrol, make_authority
from ..network.identity.identity import Credentials, Pins, fingerprint_of
from ..network.parties.client import Connection, connect
from ..network.parties.remote_model import RemoteModel
from ..network.store import Store
from ..nn.models import ZOO, randomize_batchnorm
from ..nn.module import secure
from ..serving.description import Example
from ..serving.model_file import save_model
from ..session import Session

PROGRAM = [sys.executable, "-c", "from sectorch.cli.main import main; main()"]
START = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Stage:
    """A server process, and an answering process for each model. Use as a context manager.

    Args:
        models: by name, with what they are called with (see `save_model`); or what writes the model file.
        link: what every client's connection to the server is made to be; loopback as it is if None.
        threads: of torch, for each process; with one, and where there are several cores, S has the first to itself.
        options: of the server's command; or, by name, of each process ("server" is the server's).
        started: by name, the command that a process is started by, as `prlimit --data=N`.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[nn.Module, Example] | Callable[[Path], None]],
        link: Link | None = None,
        threads: int = 1,
        options: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
        started: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self._cores = sorted(os.sched_getaffinity(0)) if threads == 1 and hasattr(os, "sched_getaffinity") else []
        self._temporary = tempfile.TemporaryDirectory(prefix="sectorch-stage-")
        self.folder = Path(self._temporary.name)
        self._placed = 0
        self._link, self._threads, self._started = link, threads, started or {}
        self._options = options if isinstance(options, Mapping) else {"server": options}
        self.processes: dict[str, subprocess.Popen] = {}
        self.port = free_port()
        make_authority(self.folder)
        enrol(self.folder, "server", hosts=("localhost",))
        self.pins = Pins(self.folder / "pins")
        try:
            self.start_server()
            self.connect("visitor", direct=True).close()
            for name, model in models.items():
                self.credentials(name)
                path = self.folder / f"{name}.safetensors"
                save_model(model[0], model[1], path) if isinstance(model, tuple) else model(path)
                self.start_answering(name)
            with self.connect("visitor", direct=True) as connection:
                end = time.monotonic() + START
                while set(connection.models()) != set(models):
                    self._check(end)
                    time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_server(self) -> None:
        files = self._files("server", "--clients-ca")
        store = ("--store", str(self.folder / "store-s"))
        self._start("server", ["server", "--listen", f"localhost:{self.port}", *files, *store])

    def start_answering(self, name: str) -> None:
        files = (*self._files(name, "--ca"), "--pins", str(self.pins.path))
        store = ("--store", str(self.folder / f"store-{name}"))
        to = ("--server", f"localhost:{self._port()}")
        self._start(name, ["answer", str(self.folder / f"{name}.safetensors"), "--name", name, *to, *files, *store])

    def credentials(self, name: str) -> Credentials:
        """A client's credentials, made on first use; all clients know each other's identity keys."""
        if not (self.folder / f"{name}.pem").exists():
            identity = enrol(self.folder, name).identity
            if identity is None:
                raise ArgumentError(f"{name} is enrolled as a server, and a client has an identity key")
            self.pins.pin(name, fingerprint_of(identity))
        return Credentials.read(*(self.folder / f for f in (f"{name}.pem", f"{name}-key.pem", "ca.pem")))

    def connect(self, name: str, direct: bool = False) -> Connection:
        """Connect a client in this process, waiting for the server to start. `direct` goes past the emulated link."""
        credentials, end = self.credentials(name), time.monotonic() + START
        address = f"localhost:{self.port if direct else self._port()}"
        store = Store(self.folder / f"store-of-{name}")
        while True:
            try:
                return connect(address, credentials, pins=self.pins, store=store)
            except PeerLostError:
                self._check(end)

    def _check(self, end: float) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise PeerLostError(f"the process of '{name}' ended with {process.returncode}")
        if time.monotonic() > end:
            raise NetworkError(f"the parties did not come up in {START:.0f} s")

    def _files(self, name: str, authority: str) -> tuple[str, ...]:
        named = {"--cert": f"{name}.pem", "--key": f"{name}-key.pem", authority: "ca.pem"}
        return tuple(part for option, file in named.items() for part in (option, str(self.folder / file)))

    def _start(self, name: str, arguments: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        if len(self._cores) > 1:
            first, *others = self._cores
            mine = first if name == "server" else others[self._placed % len(others)]
            self._placed += name != "server"
            arguments = [*arguments, "--core", str(mine)]
        arguments = [*arguments, *self._options.get(name, ())]
        with (self.folder / f"{name}.log").open("a") as log:
            command = [*self._started.get(name, ()), *PROGRAM, *arguments]
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _port(self) -> int:
        """The port to dial: the server's, or that of a relay of this client's own."""
        if self._link is None:
            return self.port
        relay = [sys.executable, "-m", "sectorch.testing.relay"]
        figures = (str(self.port), str(self._link.rtt_ms / 2e3), str(self._link.mbit * 1e6))
        process = subprocess.Popen([*relay, *figures], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes[f"relay {len(self.processes)}"] = process
        return int(process.stdout.readline() if process.stdout else "")

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._temporary.cleanup()


console = Console(stderr=True)


@dataclass
class Figures:
    """Medians of one net and batch: a query with everything, its offline part alone, and its online part alone.

    `predicted` has what `Profile.seconds_over` says of the two parts.
    """

    net: str
    batch: int
    network: str
    seconds: float
    offline_seconds: float
    online_seconds: float
    rounds: int
    offline_bytes: int
    online_bytes: int
    weights_bytes: int
    error: float
    predicted: dict[str, float]


def prediction(model: nn.Module, x: torch.Tensor, scheme: Scheme) -> dict[str, float]:
    """Seconds of the parts of a later call, by the messages and the computation of one in this process."""
    secured = secure(model, scheme, session=Session())
    for _ in range(2):
        secured(x)
    with Profile() as profile:
        secured(x)
    return profile.seconds_over(scheme.link)


def example(net: str, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A net of the zoo with random weights, and random images."""
    torch.manual_seed(0)
    construct, shape = ZOO[net]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, torch.randn(max(2, batch), *shape)


def _timed(call: Callable[[], Any]) -> tuple[float, Profile]:
    start = time.perf_counter()
    with Profile() as profile:
        call()
    return time.perf_counter() - start, profile


def measure(model: RemoteModel, x: torch.Tensor, repeats: int) -> dict:
    """Seconds of whole, of offline-only and of online-only calls in turns, and what a call sends."""
    with Profile() as first:
        result = model(x)
    whole = [_timed(lambda: model(x)) for _ in range(repeats)]
    prepared = [_timed(lambda: model.prepare(tuple(x.shape))) for _ in range(repeats + 1)]
    online = [_timed(lambda: model(x)) for _ in range(repeats + 1)]
    seconds = [statistics.median(second for second, _ in found) for found in (whole, prepared, online)]
    profile, offline, later = (found[-1][1] for found in (whole, prepared, online))
    return dict(
        seconds=seconds[0], offline_seconds=seconds[1], online_seconds=seconds[2], rounds=profile.rounds,
        offline_bytes=offline.bytes, online_bytes=later.bytes, weights_bytes=first.setup_bytes, result=result,
        bytes=profile.bytes,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """`sectorch bench`."""
    p = Parser(
        "bench",
        "Measure three processes over an emulated network.",
        (
            "sectorch bench --network wan --nets lenet",
            "sectorch bench --nets lenet vgg7 --batches 1 32 --round-trip 100 --mbit 20 --out runs/mobile",
        ),
    )
    add_link(p)
    p.add_argument("--nets", nargs="+", default=["lenet", "vgg7"], choices=tuple(ZOO), metavar="NET",
                   help=f"of {', '.join(ZOO)}")  # fmt: skip
    p.add_argument("--batches", type=at_least(1), nargs="+", default=[1, 8], help="batch sizes")
    p.add_argument("--repeats", type=at_least(1), default=3, help="of each; medians are printed")
    p.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of results.json")
    p.takes_json("results.json")
    return command_status(p, arguments, _run, "stopped; what was measured is in {out}")


def _run(options: argparse.Namespace, results: Console) -> None:
    scheme = Scheme(network=chosen_network(options))
    link = scheme.link
    writable(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    path, rows = options.out / "results.json", []
    about = {"round_trip_ms": link.rtt_ms, "mbit": link.mbit, "torch_threads_each": 1}
    found = {"network": about, "rows": []}
    with bars(console) as progress:
        task = progress.add_task("measuring", total=len(options.nets) * len(options.batches))
        for net in options.nets:
            model, x = example(net, max(options.batches))
            with Stage({net: (model, x)}, link) as stage, stage.connect("alice") as connection, torch.no_grad():
                for batch in options.batches:
                    remote = connection.model(net, scheme)
                    figures = measure(remote, x[:batch], options.repeats)
                    figures["predicted"] = prediction(model, x[:batch], scheme)
                    remote.close()
                    error = float((figures.pop("result") - model(x[:batch])).abs().max())
                    del figures["bytes"]
                    rows.append(Figures(net, batch, str(scheme.network), **figures, error=error))
                    found["rows"].append(asdict(rows[-1]))
                    path.write_text(json.dumps(found, indent=1) + "\n")
                    progress.advance(task)
    if options.json:
        print_json(found)
        return
    results.print(table(rows, about))
    results.print(f"written: {path}")


def table(rows: list[Figures], about: dict) -> Table:
    """The figures as a table."""
    title = f"Three processes, {about['round_trip_ms']:g} ms round trip, {about['mbit']:g} Mbit/s each way"
    shown = Table(title=title)
    names = "net", "batch", "s", "offline s", "online s", "predicted", "rounds", "offline MB", "online MB", "error"
    for column in names:
        shown.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        said = ", ".join(f"{row.predicted[name]:.3f}" for name in ("offline", "online"))
        shown.add_row(
            row.net, str(row.batch), f"{row.seconds:.3f}", f"{row.offline_seconds:.3f}", f"{row.online_seconds:.3f}",
            said,
            str(row.rounds), f"{row.offline_bytes / 1e6:.2f}", f"{row.online_bytes / 1e6:.2f}", f"{row.error:.0e}",
        )  # fmt: skip
    return shown
