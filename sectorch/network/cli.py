"""The commands of the three processes: server, answer, query and models."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.utils import _pytree as pytree

from ..choreography.ledger import Profile
from ..cli.command import Parser, bars, ended, print_json, writable
from ..errors import ArgumentError, IdentityError, NetworkError, RangeExceededError, StoreInUseError
from ..nn.model_file import read_model
from ..ring.scheme import Scheme, limit_bits_of
from .identity.certificates import Credentials
from .identity.identity import Pins
from .parties.answer import Answering
from .parties.client import connect
from .parties.query import RemoteModel
from .parties.server import RUNNING, Server
from .store.store import BUDGET, Store

console = Console(stderr=True)
RETRY = 2.0
"""Seconds between attempts of an answering party to reach the server again."""


def _certificate(p: Parser) -> None:
    p.add_argument("--cert", type=Path, required=True, help="this party's certificate (PEM)")
    p.add_argument("--key", type=Path, required=True, help="its private key (PEM)")


def _client(p: Parser) -> None:
    """Options of a client of the server: who it is, and where the server is."""
    _certificate(p)
    p.add_argument("--ca", type=Path, required=True, help="CA of the server's certificate (PEM)")
    p.add_argument("--server", default="localhost:7100", help="host:port of the server")
    p.add_argument("--identity", type=Path, help="identity key; NAME-identity.pem beside the certificate")


def _pins(p: Parser) -> None:
    p.add_argument("--pins", type=Path, help="file of known identity keys")
    p.add_argument(
        "--trust-on-first-use", action="store_true", help="trust whom the pins do not name, and write the key down"
    )
    p.add_argument("--require-pin", action="store_true", help="does nothing: it is what happens anyway")


def _known(options: argparse.Namespace) -> Pins:
    if options.require_pin and options.trust_on_first_use:
        raise ArgumentError("--require-pin and --trust-on-first-use exclude each other; leave one out")
    if options.require_pin:
        console.print("--require-pin is the default now and will be removed; leave it out")
    return Pins(options.pins, first_use=options.trust_on_first_use)


def _patience(p: Parser) -> None:
    p.add_argument("--patience", type=float, default=60.0, help="seconds without a word that mean that a party hangs")


def _store(p: Parser) -> None:
    p.add_argument("--store", type=Path, help="folder for prepared material")
    p.add_argument("--store-key", type=Path, help="key file that seals it; in the folder")
    p.add_argument("--store-budget", type=float, default=BUDGET / 1e9, help="GB of prepared material at most")


def server(arguments: Sequence[str] | None = None) -> int:
    """`sectorch server`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
    p = Parser(
        "server",
        "Run the server S, which stands between the clients and learns nothing. Ctrl-C stops it.",
        ["sectorch server --listen 0.0.0.0:7100 --cert server.pem --key server-key.pem --clients-ca ca.pem"],
    )
    _certificate(p)
    p.add_argument("--clients-ca", type=Path, required=True, help="CA of the clients' certificates (PEM)")
    p.add_argument("--listen", default="0.0.0.0:7100", help="host:port to listen on")
    p.add_argument("--running", type=int, default=RUNNING, help="calls that run at the same time")
    _store(p)
    _patience(p)
    return ended(p, arguments, _server)


def _server(options: argparse.Namespace, _: Console) -> None:
    _log()
    _few_arenas()
    if options.running < 1:
        raise ArgumentError(f"--running is at least 1, got {options.running}")
    kept = Store(options.store, options.store_key, _bytes(options.store_budget))
    credentials = Credentials.read(options.cert, options.key, options.clients_ca)
    running = Server(options.listen, credentials, options.running, kept, _positive(options.patience))
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
    _client(p)
    _pins(p)
    _store(p)
    _patience(p)
    return ended(p, arguments, _answer)


def _answer(options: argparse.Namespace, _: Console) -> None:
    _log()
    (description, weights), name = read_model(options.model), options.name
    credentials = Credentials.read(options.cert, options.key, options.ca, options.identity)
    kept = Store(options.store, options.store_key, _bytes(options.store_budget))
    known, patience = _known(options), _positive(options.patience)
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


def query(arguments: Sequence[str] | None = None) -> int:
    """`sectorch query`."""
    p = Parser(
        "query",
        "Ask a model, or prepare for asking it. You alone learn the result.",
        (
            "sectorch query hospital-b images.npy --cert alice.pem --key alice-key.pem --ca ca.pem --out logits.npy",
            "sectorch query hospital-b --prepare 1000 --cert alice.pem --key alice-key.pem --ca ca.pem",
        ),
    )
    p.add_argument("name", help="which model to ask; `sectorch models` lists them")
    p.add_argument("inputs", type=Path, nargs="?", help="a .npy file, rows first")
    _client(p)
    p.add_argument("--out", type=Path, help="where to write the predictions (.npy)")
    p.add_argument("--batch", type=int, default=32, help="rows per query")
    p.add_argument("--prepare", type=int, default=0, help="have so many rows prepared ahead; what is at hand counts")
    p.add_argument("--network", default="lan", choices=("lan", "wan"), help="fewest bytes, or fewest rounds")
    p.add_argument(
        "--activation-limit", type=float, metavar="L", help="a power of two that inputs and activations are below; 4096"
    )
    p.add_argument("--no-range-check", action="store_true", help="trust model and inputs to stay below it")
    _pins(p)
    p.add_argument("--store", type=Path, help="folder for prepared material")
    _patience(p)
    p.takes_json("figures, and the predictions unless --out takes them,")
    p.parse_args = p.parse_intermixed_args  # the optional file of inputs may come after options
    return ended(p, arguments, _query, "stopped; the other parties were told, and what was prepared is kept")


def _query(options: argparse.Namespace, _: Console) -> None:
    _log(logging.WARNING)
    if options.prepare < 0 or (options.inputs is None and not options.prepare):
        raise ArgumentError("name a file of inputs, or rows to --prepare")
    if options.batch < 1:
        raise ArgumentError(f"--batch is at least 1, got {options.batch}")
    limit = None if options.activation_limit is None else limit_bits_of(options.activation_limit)
    scheme = Scheme(network=options.network, range_check=not options.no_range_check, limit_bits=limit)
    rows = None if options.inputs is None else _read(options.inputs)
    if options.out is not None:
        writable(options.out.parent)
    credentials = Credentials.read(options.cert, options.key, options.ca, options.identity)
    folder, known = options.store or _own_folder(credentials.name), _known(options)
    kept = _own_store(folder, needed=options.prepare > 0)
    patience = _positive(options.patience)
    with connect(options.server, credentials, pins=known, store=kept, silence=patience) as connection:
        model, figures = connection.model(options.name, scheme), {}
        if options.prepare:
            _prepare(model, options.prepare, options.batch)
            figures["prepared_rows"] = options.prepare
        if rows is not None:
            figures |= _ask(model, rows, options)
        model.close()
    withheld = figures.pop("withheld", [])
    if options.json:
        print_json(figures)
    if withheld:
        named = ", ".join(withheld[:8]) + (f" and {len(withheld) - 8} more batches" if len(withheld) > 8 else "")
        raise RangeExceededError(
            f"no predictions for rows {named}, which are nan (null in JSON): a value between input and result left its "
            f"range. The other rows are right, and the other parties do not know; asking again may tell them"
        )


def _prepare(model: RemoteModel, rows: int, batch: int) -> None:
    """Top up what is at hand; after an interruption the same command goes on where it stopped."""
    full = (batch, *model.row)
    missing = rows // batch - model.prepared_calls(full)
    shapes = [full] * max(0, missing)
    rest = (rows % batch, *model.row)
    if rows % batch and not model.prepared_calls(rest):
        shapes.append(rest)
    with bars(console) as progress:
        task = progress.add_task("preparing", total=rows, completed=rows - sum(s[0] for s in shapes))
        for shape in shapes:
            model.prepare(shape)
            progress.advance(task, shape[0])
    console.print(f"{rows} rows are prepared, in calls of {batch}")


def _ask(model: RemoteModel, rows: torch.Tensor, options: argparse.Namespace) -> dict:
    """Ask about all rows, and show the predictions or write them; returns figures.

    All batches are asked, whether or not one has no result: the other parties learn nothing of that.
    """
    model.check(rows)
    results, withheld, start, batch = [], [], time.perf_counter(), options.batch
    ahead = sum(model.prepared().values())
    with Profile() as profile, bars(console) as progress:
        task = progress.add_task("asking", total=len(rows))
        for at, piece in zip(range(0, len(rows), batch), rows.split(batch), strict=True):
            try:
                results.append(model(piece))
            except RangeExceededError:
                results.append(None)
                withheld.append(f"{at} to {at + len(piece) - 1}")
            progress.advance(task, len(piece))
    used = ahead - sum(model.prepared().values())
    figures = {"rows": len(rows), **profile.as_dict(), "seconds": time.perf_counter() - start, "prepared_calls": used}
    del figures["online_seconds"], figures["offline_seconds"]  # of this process's own arithmetic, which is little
    figures["withheld"] = withheld
    predictions = _with_gaps(results, rows, batch)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        np.save(options.out, predictions.numpy())
    else:
        figures["predictions"] = pytree.tree_map(lambda v: None if v != v else v, predictions.tolist())
    if options.json:
        return figures
    console.print(
        f"{len(rows)} rows in {figures['seconds']:.2f} s, {profile.bytes / len(rows) / 1e6:.3f} MB a row, "
        f"{profile.rounds} rounds" + (f"; written to {options.out}" if options.out else "")
    )
    if options.out is None:
        print(np.array2string(predictions.numpy(), precision=4, threshold=200))
    return figures


def _with_gaps(results: list[torch.Tensor | None], rows: torch.Tensor, batch: int) -> torch.Tensor:
    """All batches' predictions, with nan for those that have none."""
    known = next((y for y in results if y is not None), None)
    if known is None:
        return torch.full((len(rows),), torch.nan)
    pieces = zip(results, rows.split(batch), strict=True)
    dtype = known.dtype if known.is_floating_point() else torch.float64
    gap = lambda piece: torch.full((len(piece), *known.shape[1:]), torch.nan, dtype=dtype)
    return torch.cat([gap(piece) if y is None else y for y, piece in pieces])


def models(arguments: Sequence[str] | None = None) -> int:
    """`sectorch models`."""
    p = Parser(
        "models",
        "List the models that can be asked.",
        ["sectorch models --server cloud.example:7100 --cert alice.pem --key alice-key.pem --ca ca.pem"],
    )
    _client(p)
    _pins(p)
    p.takes_json("the names")
    return ended(p, arguments, _models)


def _models(options: argparse.Namespace, _: Console) -> None:
    credentials = Credentials.read(options.cert, options.key, options.ca, options.identity)
    with connect(options.server, credentials, pins=_known(options)) as connection:
        names = connection.models()
    if options.json:
        print_json(list(names))
    else:
        print("\n".join(names))


def _read(path: Path) -> torch.Tensor:
    try:
        rows = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ArgumentError(f"cannot read {path}: {said}") from None
    if rows.dim() < 1 or not len(rows):
        raise ArgumentError(f"{path} holds no rows")
    return rows


def _own_folder(name: str) -> Path:
    """Where this user's data are kept."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "sectorch" / name


def _own_store(folder: Path, needed: bool) -> Store:
    """The store, or a temporary one where another query of this user has it and nothing is to be prepared."""
    try:
        return Store(folder)
    except StoreInUseError:
        if needed:
            raise
        console.print("another query uses the prepared material; this one goes without")
        return Store()


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ArgumentError(f"--patience is above 0 seconds, got {seconds}")
    return seconds


def _bytes(gigabytes: float) -> int:
    if not gigabytes > 0:
        raise ArgumentError(f"--store-budget is above 0 GB, got {gigabytes}")
    return int(gigabytes * 1e9)


def _few_arenas() -> None:
    """Two malloc arenas: glibc's default of eight a core lets each session's thread keep freed memory of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


def _log(level: int = logging.INFO) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(message)s")


def _until_stopped(wait: Callable[[], None], stop: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        wait()
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        stop()
