"""`sectorch server` and `sectorch answer`: the processes that run until they are stopped."""

from __future__ import annotations

import argparse
import ctypes
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from ...cli.command import Parser, ended
from ...errors import ArgumentError, IdentityError, NetworkError
from ...nn.model_file import read_model
from ..identity.certificates import Credentials
from ..parties.answer import Answering
from ..parties.server import RUNNING, Server
from ..store.store import Store
from .options import (
    add_certificate,
    add_client,
    add_patience,
    add_pins,
    add_store,
    console,
    known_pins,
    log_to_stderr,
    positive,
)

RETRY = 2.0
"""Seconds between attempts of an answering party to reach the server again."""


def server(arguments: Sequence[str] | None = None) -> int:
    """`sectorch server`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
    p = Parser(
        "server",
        "Run the server S, which stands between the clients and learns nothing. Ctrl-C stops it.",
        ["sectorch server --listen 0.0.0.0:7100 --cert server.pem --key server-key.pem --clients-ca ca.pem"],
    )
    add_certificate(p)
    p.add_argument("--clients-ca", type=Path, required=True, help="CA of the clients' certificates (PEM)")
    p.add_argument("--listen", default="0.0.0.0:7100", help="host:port to listen on")
    p.add_argument("--running", type=int, default=RUNNING, help="calls that run at the same time")
    add_store(p)
    add_patience(p)
    return ended(p, arguments, _server)


def _server(options: argparse.Namespace, _: Console) -> None:
    log_to_stderr()
    _few_arenas()
    if options.running < 1:
        raise ArgumentError(f"--running is at least 1, got {options.running}")
    kept = Store(options.store, options.store_key, _bytes(options.store_budget))
    credentials = Credentials.read(options.cert, options.key, options.clients_ca)
    running = Server(options.listen, credentials, options.running, kept, positive(options.patience))
    console.print(f"listening on port {running.port}; Ctrl-C stops")
    _until_stopped(running.wait, running.stop)


def answer(arguments: Sequence[str] | None = None) -> int:
    """`sectorch answer`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
    p = Parser(
        "answer",
        "Answer queries with a model of your own, which nobody sees. Ctrl-C stops it.",
        ["sectorch answer model.safetensors --name clinic --cert clinic.pem --key clinic-key.pem --ca ca.pem"],
    )
    p.add_argument("model", type=Path, help="a model file, of sectorch.network.save_model or `sectorch convert`")
    p.add_argument("--name", required=True, help="the name in this party's certificate")
    p.add_argument(
        "--answer-unchecked", action="store_true", help="answer questions that are asked with --no-range-check too"
    )
    add_client(p)
    add_pins(p)
    add_store(p)
    add_patience(p)
    return ended(p, arguments, _answer)


def _answer(options: argparse.Namespace, _: Console) -> None:
    log_to_stderr()
    (description, weights), name = read_model(options.model), options.name
    credentials = Credentials.read(options.cert, options.key, options.ca, options.identity)
    kept = Store(options.store, options.store_key, _bytes(options.store_budget))
    known, patience = known_pins(options), positive(options.patience)
    unchecked = options.answer_unchecked
    party = Answering(options.server, credentials, description, weights, known, kept, patience, unchecked)
    stopped = threading.Event()

    def serve() -> None:
        party.register(name)
        console.print(f"'{name}' answers through {options.server}; Ctrl-C stops")
        while not stopped.is_set():
            try:
                party.wait()
            except NetworkError as error:
                console.print(f"{error}; trying again until it is back", highlight=False)
            while not stopped.wait(RETRY):
                try:
                    party.reconnect(name)
                    console.print(f"'{name}' answers again")
                    break
                except IdentityError as error:
                    if "answering already" not in str(error):
                        raise
                except NetworkError:
                    continue

    def stop() -> None:
        stopped.set()
        party.close()

    _until_stopped(serve, stop)


def _bytes(gigabytes: float) -> int:
    if not gigabytes > 0:
        raise ArgumentError(f"--store-budget is above 0 GB, got {gigabytes}")
    return int(gigabytes * 1e9)


def _few_arenas() -> None:
    """Two malloc arenas: glibc's default of eight a core lets each session's thread keep freed memory of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


def _until_stopped(wait: Callable[[], None], stop: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        wait()
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        stop()
