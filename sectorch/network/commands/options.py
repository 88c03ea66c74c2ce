"""Options that several commands of the network have: identity, logs, files, and the process's cores."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import resource
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

from ...cli.command import Parser, above_zero, is_full, not_negative, room_error, writable
from ...errors import ArgumentError
from ..identity.identity import Pins
from ..log import FORMATS, begin
from ..store import BUDGET, Store

console = Console(stderr=True, soft_wrap=True)
"""For the user of a command; a line is not wrapped, since a journal keeps it as one."""


def tell(text: str) -> None:
    """Print a line for the user of a command, without markup."""
    console.print(text, highlight=False, markup=False)


def add_certificate(p: Parser, required: bool = True) -> None:
    p.add_argument("--cert", type=Path, required=required, help="this party's certificate (PEM)")
    p.add_argument("--key", type=Path, required=required, help="its private key (PEM)")


def add_client(p: Parser, required: bool = True) -> None:
    """Add the options of a client: its certificate and identity, and the server's address and CA."""
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
    p.add_argument("--store-used", type=Path, help="file of what was used of it, outside the folder; FOLDER.used")
    p.add_argument("--store-budget", type=above_zero, default=BUDGET / 1e9, help="GB of prepared material at most")


def store_of(options: argparse.Namespace) -> Store:
    """The store that the options of `add_store` name. Raises ArgumentError, StoreInUseError."""
    return Store(options.store, options.store_key, int(options.store_budget * 1e9), options.store_used)


def add_memory(p: Parser) -> None:
    p.add_argument(
        "--memory",
        type=above_zero,
        metavar="GB",
        help="refuse what would take more memory; limits of a container and `ulimit` bound it too",
    )


def memory_of(options: argparse.Namespace) -> int | None:
    """The bound of `add_memory`, in bytes."""
    return None if options.memory is None else int(options.memory * 1e9)


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
    """Check that there is room where a party writes. Raises ArgumentError."""
    if options.store is not None:
        check_store_room(options.store, "--store")
    if options.receipts is not None:
        writable(options.receipts.parent, "--receipts")
    if options.log is not None:
        writable(options.log.parent, "--log")


def check_store_room(store: Path, named: str) -> None:
    """Check that a store can be written to. One that exists may be full: queries need no prepared material.

    Raises:
        ArgumentError: it cannot be written to, or there is no room to make it.
    """
    _, error = room_error(store)
    there = any(list(store.glob(f"{pattern}store.lock")) for pattern in ("", "*/"))  # of this process, of workers
    if error is not None and is_full(error) and there:
        tell(
            f"{store} is full ({error.strerror}): nothing more is prepared until there is room; queries, and what was "
            f"prepared before, go on"
        )
        return
    writable(store, named)


def begin_log(options: argparse.Namespace, level: int = logging.INFO) -> None:
    """Start the log as the options ask for it. Raises ArgumentError."""
    try:
        begin(options.log, level, options.log_format)
    except OSError as error:
        raise ArgumentError(f"cannot write the log {options.log}: {error.strerror}") from None


# Settings of a process that runs for long.


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
