"""Options that the commands of the network have in common, and what they mean."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rich.console import Console

from ...cli.command import Parser, above_zero, not_negative, writable
from ...errors import ArgumentError
from ..identity.identity import Pins
from ..log import FORMATS, begin
from ..store.store import BUDGET

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


def known_pins(options: argparse.Namespace) -> Pins:
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
