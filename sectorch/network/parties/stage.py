"""Three parties on this machine for trying out and measuring: S and A as processes of their own, Q in this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ...errors import ArgumentError, NetworkError, PeerLostError
from ...nn.describe import Example
from ...nn.model_file import save_model
from ..identity.authority import enrol, make_authority
from ..identity.certificates import Credentials
from ..identity.identity import Pins, fingerprint_of
from ..store.store import Store
from .client import Connection, connect

PROGRAM = [sys.executable, "-c", "from sectorch.cli.main import main; main()"]
START = 120.0


@dataclass(frozen=True)
class Network:
    """A link between each client and the server: one-way delay in seconds and bits a second, in each direction."""

    delay: float
    rate: float


NETWORKS = {"lan": Network(0.00025, 1e9), "wan": Network(0.02, 100e6)}
"""Round trips of 0.5 ms at 1 Gbit/s and of 40 ms at 100 Mbit/s."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Stage:
    """A server process, and an answering process for each model. Use as a context manager.

    Args:
        models: by name, with what they are called with (see `save_model`); or what writes the model file.
        network: an emulated link for every client; loopback as it is if None.
        threads: of torch, for each process; with one, and where there are several cores, S has the first to itself.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[nn.Module, Example] | Callable[[Path], None]],
        network: Network | None = None,
        threads: int = 1,
        options: tuple[str, ...] = (),
    ):
        self._cores = sorted(os.sched_getaffinity(0)) if threads == 1 and hasattr(os, "sched_getaffinity") else []
        self._kept = tempfile.TemporaryDirectory(prefix="sectorch-stage-")
        self.folder = Path(self._kept.name)
        self._placed = 0
        self._network, self._threads, self._options = network, threads, options
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
        self._start("server", ["server", "--listen", f"localhost:{self.port}", *files, *store, *self._options])

    def start_answering(self, name: str) -> None:
        files = (*self._files(name, "--ca"), "--pins", str(self.pins.path))
        store = ("--store", str(self.folder / f"store-{name}"))
        to = ("--server", f"localhost:{self._way()}")
        self._start(name, ["answer", str(self.folder / f"{name}.safetensors"), "--name", name, *to, *files, *store])

    def credentials(self, name: str) -> Credentials:
        """A client's, made when it is first named; all of them know each other's identity keys."""
        if not (self.folder / f"{name}.pem").exists():
            identity = enrol(self.folder, name).identity
            if identity is None:
                raise ArgumentError(f"{name} is enrolled as a server, and a client has an identity key")
            self.pins.pin(name, fingerprint_of(identity))
        return Credentials.read(*(self.folder / f for f in (f"{name}.pem", f"{name}-key.pem", "ca.pem")))

    def connect(self, name: str, direct: bool = False) -> Connection:
        """A client's connection from this process; waits for the server to come up. `direct` is past the network."""
        credentials, end = self.credentials(name), time.monotonic() + START
        address = f"localhost:{self.port if direct else self._way()}"
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
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen([*PROGRAM, *arguments], env=environment, stdout=log, stderr=log)

    def _way(self) -> int:
        """The port to dial: the server's, or that of a relay of this client's own."""
        if self._network is None:
            return self.port
        relay = [sys.executable, "-m", "sectorch.network.wire.relay"]
        figures = (str(self.port), str(self._network.delay), str(self._network.rate))
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
        self._kept.cleanup()
