"""What the network tests share: three parties in this process over real TLS, and a way to kill each of them."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from sectorch import errors
from sectorch.network import Pins, Server, Store, connect
from sectorch.network.identity.identity import fingerprint_of
from sectorch.network.parties.answer import Answering
from sectorch.nn.inputs import Inputs
from sectorch.nn.module import SecureModule
from sectorch.serving.description import describe, from_json, load_program, to_json
from sectorch.session import Session
from sectorch.tensor import Scheme


def known(path: Path, made: dict) -> Pins:
    """A file of pins with the identity keys of all clients among these credentials."""
    pins = Pins(path)
    for name, credentials in made.items():
        if credentials.identity is not None:
            pins.pin(name, fingerprint_of(credentials.identity))
    return pins


@contextmanager
def logs_as_in_a_new_process() -> Iterator[logging.Logger]:
    """The root logger without handlers, as a command finds it; afterwards it is what it was, and files are closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield root
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


@functools.cache
def _described(model: nn.Module, shape: torch.Size, versions: tuple[int, ...]) -> tuple[dict, dict]:
    return describe(model, torch.zeros(shape))


def described(model: nn.Module, x: torch.Tensor) -> tuple[dict, dict]:
    """`describe` of a float32 model, once for a model as it is."""
    return copy.deepcopy(_described(model, x.shape, tuple(t._version for t in model.state_dict().values())))


def in_one_process(described: tuple[dict, dict], inputs: Inputs) -> object:
    """What the parties of a network compute of a description as it travels, here in one process."""
    description, weights = described
    session = Session()
    served = load_program(from_json(to_json(description)), weights)
    return SecureModule(served, session, session.answering[0], Scheme(), None)(inputs)


class Trio:
    """S, A and Q with fresh links; A and Q know all clients' keys.

    `kill(party)` is what a process that dies looks like to the others.
    """

    def __init__(
        self,
        made: dict,
        model: nn.Module,
        x: torch.Tensor,
        folder: Path,
        patience: float = 60.0,
        receipts: bool = False,
        limits: str = "",
    ):
        self.made, self.folder, self.patience = made, folder, patience
        self.receipts = {who: folder / f"{who}.jsonl" for who in "SAQ"} if receipts else {}
        self.limits = {}
        for who in "SA" if limits else "":
            self.limits[who] = folder / f"{who}.toml"
            self.limits[who].write_text(limits)
        self.described = described(model, x)
        self.server = self.party = self.connection = None
        self.pins = known(folder / "pins", made)
        self.port = 0
        self.start_server()
        self.start_answering()
        self.start_querying()

    def start_server(self, store: Store | None = None) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                self.server = Server(
                    f"localhost:{self.port}", self.made["server"], store=store, patience=self.patience,
                    receipts=self.receipts.get("S"), limits=self.limits.get("S"),
                )  # fmt: skip
                break
            except OSError:  # the port of the one that died is not free yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.port = self.server.port

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def start_answering(self, store: Store | None = None, described=None) -> None:
        description, weights = described or self.described
        deadline = time.monotonic() + 30
        while True:  # the server may not have noticed yet that the one before died
            party = Answering(
                self.address, self.made["hospital-b"], description, weights, self.pins, store,
                self.patience, receipts=self.receipts.get("A"), limits=self.limits.get("A"),
            )  # fmt: skip
            try:
                party.register("hospital-b")
                break
            except errors.BusyError:
                party.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.party = party

    def start_querying(self, store: Store | None = None, name: str = "alice") -> None:
        self.connection = connect(
            self.address, self.made[name], pins=self.pins, store=store, silence=self.patience,
            receipts=self.receipts.get("Q"),
        )  # fmt: skip

    def links(self, who: str) -> list:
        """The links over which a party sends."""
        if who == "S":
            return list(self.server._links)
        return [(self.connection if who == "Q" else self.party.connection).link]

    def kill(self, who: str) -> None:
        """Break a party's connections without a word."""
        if who == "S":
            self.server.listener.stop(grace=0)
        else:
            (self.connection if who == "Q" else self.party.connection)._stream.close()

    def kill_at(self, who: str, message: int) -> list[int]:
        """Kill a party when it is about to send its message of that number; returns the count of what it sent."""
        sent = [0]
        for link in self.links(who):
            inner = link.send

            def send(data: bytes, urgent: bool = False, inner=inner) -> None:
                if sent[0] == message:
                    self.kill(who)
                sent[0] += 1
                inner(data, urgent)

            link.send = send
        return sent

    def restart(self, who: str) -> None:
        """The party comes back; with S, the others dial again."""
        if who in "S":
            self.server.stop()
            self.party.close()
            self.connection.close()
            self.start_server()
            self.start_answering()
            self.start_querying()
        elif who == "A":
            self.party.close()
            self.start_answering()
        else:
            self.connection.close()
            self.start_querying()

    def idle(self) -> bool:
        """No session is open anywhere."""
        links = [link for who in "SAQ" for link in self.links(who)]
        return self.server.sessions == 0 and sum(link.sessions for link in links) == 0

    def close(self) -> None:
        self.connection.close()
        self.party.close()
        self.server.stop()


def until(what, seconds: float) -> bool:
    """Whether it becomes true in that time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def pieces_in(folder: Path) -> int:
    """Pieces of prepared material on disk; a folder that goes away meanwhile has none."""
    return sum(name.endswith(".piece") for _, _, names in os.walk(folder) for name in names)


def handles() -> int:
    """Open file handles of this process."""
    return len(os.listdir("/proc/self/fd"))


def session_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("session of")]


def resident() -> int:
    """Bytes of memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
