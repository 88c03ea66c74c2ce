"""Options that several commands of the network have: logs, cores, files, health, metrics and traces."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from ...cli.command import Parser, above_zero, not_negative, writable
from ...errors import ArgumentError
from ..identity.certificate_files import Renewal
from ..identity.identity import Credentials, Pins
from ..log import FORMATS, begin, watch
from ..observe import Management, Metrics, SpanWriter, health
from ..store import BUDGET

console = Console(stderr=True, soft_wrap=True)
"""Words for whoever runs a command; a line stays one line, as a journal keeps it."""


def tell(words: str) -> None:
    """A line for whoever runs a command, as it is."""
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def add_certificate(p: Parser, required: bool = True) -> None:
    p.add_argument("--cert", type=Path, required=required, help="this party's certificate (PEM)")
    p.add_argument("--key", type=Path, required=required, help="its private key (PEM)")


def add_client(p: Parser, required: bool = True) -> None:
    """Options of a client of the server: who it is, and where the server is."""
    add_certificate(p, required)
    p.add_argument("--ca", type=Path, required=required, help="CA of the server's certificate (PEM)")
    p.add_argument("--server", default="localhost:7100", help="host:port of the server")
    p.add_argument("--identity", type=Path, help="identity key; NAME-identity.pem beside the certificate")


def add_pins(p: Parser) -> None:
    p.add_argument("--pins", type=Path, help="file of known identity keys")
    p.add_argument(
        "--trust-on-first-use", action="store_true", help="trust whom the pins do not name, and write the key down"
    )
    p.add_argument("--require-pin", action="store_true", help="does nothing: it is what happens anyway")


def pins_of(options: argparse.Namespace) -> Pins:
    if options.require_pin and options.trust_on_first_use:
        raise ArgumentError("--require-pin and --trust-on-first-use exclude each other; leave one out")
    if options.require_pin:
        console.print("--require-pin is the default now and will be removed; leave it out")
    return Pins(options.pins, first_use=options.trust_on_first_use)


def add_patience(p: Parser) -> None:
    p.add_argument(
        "--patience", type=above_zero, default=60.0, help="seconds without a word that mean that a party hangs"
    )


def add_store(p: Parser) -> None:
    p.add_argument("--store", type=Path, help="folder for prepared material")
    p.add_argument("--store-key", type=Path, help="key file that seals it; in the folder")
    p.add_argument("--store-budget", type=above_zero, default=BUDGET / 1e9, help="GB of prepared material at most")


def add_drain(p: Parser) -> None:
    p.add_argument("--drain", type=not_negative, default=30.0, help="seconds that SIGTERM leaves running calls to end")


def add_log(p: Parser) -> None:
    p.add_argument("--log", type=Path, metavar="FILE", help="add the log's lines to a file, one for each query too")
    p.add_argument("--log-format", choices=FORMATS, default="text", help="lines of NAME=VALUE, or JSON objects")


def add_receipts(p: Parser) -> None:
    p.add_argument(
        "--receipts", type=Path, metavar="FILE", help="sign for each query here first; `sectorch audit` reads it"
    )


def add_limits(p: Parser) -> None:
    p.add_argument("--limits", type=Path, metavar="FILE", help="what each client may ask; `sectorch limits` shows it")


def check_room(options: argparse.Namespace) -> None:
    """Whether there is room where a party is to write. Raises ArgumentError."""
    if options.store is not None:
        writable(options.store, "--store")
    if options.receipts is not None:
        writable(options.receipts.parent, "--receipts")
    if options.log is not None:
        writable(options.log.parent, "--log")


def begin_log(options: argparse.Namespace, level: int = logging.INFO) -> None:
    """Raises ArgumentError."""
    try:
        begin(options.log, level, options.log_format)
    except OSError as error:
        raise ArgumentError(f"cannot write the log {options.log}: {error.strerror}") from None


# What a command that runs for long asks of the operating system for its process.


def add_core(p: Parser) -> None:
    p.add_argument(
        "--core", type=int, metavar="N",
        help="run on this processor core alone, and S's workers on those after it: a third faster for small models",
    )  # fmt: skip


def on_core(options: argparse.Namespace, worker: int = 0) -> None:
    """Bind this process to one core, with one thread of torch's, where `--core` asks for it.

    Python runs one thread at a time, and a small call passes from thread to thread some hundred times. On one core that
    is a context switch; between two cores it is a wake-up each time.

    Raises:
        ArgumentError: this process may not use the core, or the system does not support it.
    """
    if options.core is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ArgumentError("--core: this system does not let a process choose its cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if options.core not in cores:
        raise ArgumentError(f"--core is one of {', '.join(map(str, cores))} here, got {options.core}")
    mine = {cores[(cores.index(options.core) + worker) % len(cores)]}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), mine)
    torch.set_num_threads(1)


def few_arenas() -> None:
    """Limit malloc to two arenas. With glibc's default of eight a core, each session's thread keeps freed memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


def many_files() -> None:
    """Raise the limit of file descriptors to the system's: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class MonitoredParty(Protocol):
    """A running party, as monitoring sees it: `Server`, `Answering`, or the services of `sectorch up`."""

    def unready(self) -> str: ...

    def figures(self) -> dict[str, float]: ...

    def renew(self, credentials: Credentials) -> None: ...


def add_watch(p: Parser) -> None:
    """Add the options of monitoring, which is off by default: health and metrics over HTTP, and traces."""
    p.add_argument("--manage", metavar="HOST:PORT", help="answer /live and /ready there, by plain HTTP")
    p.add_argument("--manage-anywhere", action="store_true", help="although other machines reach that address")
    p.add_argument("--metrics", action="store_true", help="answer /metrics for Prometheus there too")
    p.add_argument("--metrics-clients", action="store_true", help="with the names of clients, which are personal data")
    add_traces(p)


def add_traces(p: Parser) -> None:
    p.add_argument("--traces", action="store_true", help="send a trace of each query to OTEL_EXPORTER_OTLP_ENDPOINT")


class Monitoring:
    """The monitored party, once it has started, and the renewal of its credentials."""

    def __init__(self):
        self.party: MonitoredParty | None = None
        self._renewal: Renewal | None = None

    def begin(self, party: MonitoredParty, credentials: Credentials, read: Callable[[], Credentials]) -> None:
        """Monitor a party that has started with these credentials, and renew them when their files change."""
        self.party = party
        self._renewal = Renewal(credentials, read, party.renew)
        self._renewal.start()

    def check_renewal(self) -> None:
        """Check the files of the credentials now."""
        if self._renewal is not None:
            self._renewal.soon()

    def close(self) -> None:
        if self._renewal is not None:
            self._renewal.close()

    def unready(self) -> str:
        return "starting" if self.party is None else self.party.unready()

    def figures(self) -> dict[str, float]:
        party = {} if self.party is None else self.party.figures()
        return {"ready": not self.unready(), **party, **({} if self._renewal is None else self._renewal.figures())}


@contextmanager
def monitoring(options: argparse.Namespace) -> Iterator[Monitoring]:
    """Monitoring in the block, as the options ask for it. Health says "starting" until `Monitoring.begin`.

    Raises:
        ArgumentError: the options contradict each other, the address is invalid, in use or reachable by other machines,
            or a package is not installed.
    """
    _check(options)
    watching = Monitoring()
    with ExitStack() as stack:
        stack.enter_context(tracing(options))
        stack.callback(watching.close)
        if options.manage is not None:
            pages = health(watching.unready)
            if options.metrics:
                metrics = Metrics(watching.figures, options.metrics_clients)
                stack.callback(watch(metrics))
                pages["/metrics"] = metrics.page
            management = Management(options.manage, pages, options.manage_anywhere)
            stack.callback(management.close)
            console.print(f"port {management.port} answers {', '.join(pages)}", highlight=False)
        yield watching


@contextmanager
def tracing(options: argparse.Namespace) -> Iterator[None]:
    """Trace the queries of the block, if the options ask for it. Raises ArgumentError."""
    if not options.traces:
        yield
        return
    traces = SpanWriter()
    end: Callable[[], None] = watch(traces)
    try:
        yield
    finally:
        end()
        traces.close()


def _check(options: argparse.Namespace) -> None:
    metrics = options.metrics or options.metrics_clients
    if options.manage is None and (metrics or options.manage_anywhere):
        raise ArgumentError("--metrics and --manage-anywhere say what is on the port of --manage HOST:PORT; name one")
    if options.metrics_clients and not options.metrics:
        raise ArgumentError("--metrics-clients adds names to --metrics; add that, or leave it out")
