"""The commands of the three processes: server, answer, query, models, and keys."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import ArgumentError, IdentityError, NetworkError, StoreInUseError
from ..nn.program import describe_exported
from ..runtime.ledger import Profile
from .answer import Answering
from .bench import bench
from .certificates import Credentials, issue, make_authority, write_secret
from .client import connect
from .identity import Pins, fingerprint_of, new_identity
from .query import RemoteModel
from .server import RUNNING, Server
from .store import BUDGET, Store

keys = typer.Typer(help="Identity keys, and a small certificate authority for trying it out.", no_args_is_help=True)
console = Console(stderr=True)
RETRY = 2.0
"""Seconds between attempts of an answering party to reach the server again."""

Cert = Annotated[Path, typer.Option("--cert", help="this party's certificate (PEM)")]
Key = Annotated[Path, typer.Option("--key", help="its private key (PEM)")]
Authority = Annotated[Path, typer.Option("--ca", help="CA of the other side's certificates (PEM)")]
Address = Annotated[str, typer.Option("--server", help="host:port of the server")]
Identity = Annotated[Path | None, typer.Option(help="identity key; NAME-identity.pem beside the certificate")]
PinFile = Annotated[Path | None, typer.Option("--pins", help="file of known identity keys")]
RequirePin = Annotated[bool, typer.Option("--require-pin", help="refuse whom the pins do not name")]
Folder = Annotated[Path | None, typer.Option("--store", help="folder for prepared material")]
StoreKey = Annotated[Path | None, typer.Option("--store-key", help="key file that seals it; in the folder")]
Budget = Annotated[float, typer.Option("--store-budget", help="GB of prepared material at most")]
Patience = Annotated[float, typer.Option(help="seconds without a word after which a party counts as hanging")]
DEFAULT_BUDGET = BUDGET / 1e9


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (server, answer, query, models, bench):
        app.command()(command)
    app.add_typer(keys, name="keys")


def server(
    cert: Cert,
    key: Key,
    clients_ca: Annotated[Path, typer.Option("--clients-ca", help="CA of the clients' certificates (PEM)")],
    listen: Annotated[str, typer.Option(help="host:port to listen on")] = "0.0.0.0:7100",
    running: Annotated[int, typer.Option(help="calls that run at the same time")] = RUNNING,
    store: Folder = None,
    store_key: StoreKey = None,
    store_budget: Budget = DEFAULT_BUDGET,
    patience: Patience = 60.0,
) -> None:
    """Run the server S. Example: sectorch server --cert server.pem --key server-key.pem --clients-ca ca.pem"""
    _log()
    _few_arenas()
    kept = Store(store, store_key, _bytes(store_budget))
    running_server = Server(listen, Credentials.read(cert, key, clients_ca), running, kept, patience)
    console.print(f"listening on port {running_server.port}; Ctrl-C stops")
    _until_stopped(running_server.wait, running_server.stop)


def answer(
    model: Annotated[Path, typer.Argument(help="a .pt2 file made by torch.export.save")],
    name: Annotated[str, typer.Option(help="the name in this party's certificate")],
    cert: Cert,
    key: Key,
    ca: Authority,
    server: Address = "localhost:7100",
    identity: Identity = None,
    pins: PinFile = None,
    require_pin: RequirePin = False,
    store: Folder = None,
    store_key: StoreKey = None,
    store_budget: Budget = DEFAULT_BUDGET,
    patience: Patience = 60.0,
) -> None:
    """Answer queries. Example: sectorch answer model.pt2 --name hospital-b --cert ... --key ... --ca ..."""
    _log()
    try:
        exported = torch.export.load(model)
    except Exception as error:
        raise ArgumentError(f"cannot load {model}: {str(error).splitlines()[0]}") from None
    module = exported.module()
    (example,) = exported.example_inputs[0]
    description, weights = describe_exported(module.graph, module, example)
    credentials = Credentials.read(cert, key, ca, identity)
    kept = Store(store, store_key, _bytes(store_budget))
    party = Answering(server, credentials, description, weights, Pins(pins, require_pin), kept, patience)
    stopped = threading.Event()

    def serve() -> None:
        party.register(name)
        console.print(f"'{name}' answers through {server}; Ctrl-C stops")
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


def query(
    name: Annotated[str, typer.Argument(help="which model to ask; `sectorch models` lists them")],
    cert: Cert,
    key: Key,
    ca: Authority,
    inputs: Annotated[Path | None, typer.Argument(help="a .npy file, rows first")] = None,
    server: Address = "localhost:7100",
    out: Annotated[Path | None, typer.Option(help="where to write the predictions (.npy)")] = None,
    batch: Annotated[int, typer.Option(help="rows per query")] = 32,
    prepare: Annotated[int, typer.Option(help="have so many rows prepared ahead; what is at hand counts")] = 0,
    network: Annotated[str, typer.Option(help="lan: fewest bytes; wan: fewest rounds")] = "lan",
    identity: Identity = None,
    pins: PinFile = None,
    require_pin: RequirePin = False,
    store: Folder = None,
    patience: Patience = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="print figures as JSON")] = False,
) -> None:
    """Ask a model. Example: sectorch query hospital-b images.npy --cert ... --key ... --ca ... --out logits.npy"""
    _log(logging.WARNING)
    if inputs is None and prepare < 1:
        raise ArgumentError("name a file of inputs, or rows to --prepare")
    if batch < 1:
        raise ArgumentError(f"--batch is at least 1, got {batch}")
    rows = None if inputs is None else _read(inputs)
    credentials = Credentials.read(cert, key, ca, identity)
    known, kept = Pins(pins, require_pin), _own_store(store or _own_folder(credentials.name), needed=prepare > 0)
    with connect(server, credentials, pins=known, store=kept, silence=patience) as connection:
        try:
            model = connection.model(name, network=network)
            if prepare:
                _prepare(model, prepare, batch)
            if rows is not None:
                _ask(model, rows, batch, out, as_json)
            model.close()
        except KeyboardInterrupt:
            console.print("stopped; the other parties were told, and what was prepared is kept")
            raise typer.Exit(130) from None


def _prepare(model: RemoteModel, rows: int, batch: int) -> None:
    """Top up what is at hand; after an interruption the same command goes on where it stopped."""
    full = (batch, *model.row)
    missing = rows // batch - model.prepared_calls(full)
    shapes = [full] * max(0, missing)
    rest = (rows % batch, *model.row)
    if rows % batch and not model.prepared_calls(rest):
        shapes.append(rest)
    with _bar() as progress:
        task = progress.add_task("preparing", total=rows, completed=rows - sum(s[0] for s in shapes))
        for shape in shapes:
            model.prepare(shape)
            progress.advance(task, shape[0])
    console.print(f"{rows} rows are prepared, in calls of {batch}")


def _ask(model: RemoteModel, rows: torch.Tensor, batch: int, out: Path | None, as_json: bool) -> None:
    results, start = [], time.perf_counter()
    ahead = model.prepared_calls((batch, *model.row)) if len(rows) >= batch else 0
    with Profile() as profile, _bar() as progress:
        task = progress.add_task("asking", total=len(rows))
        for piece in rows.split(batch):
            results.append(model(piece))
            progress.advance(task, len(piece))
    seconds = time.perf_counter() - start
    predictions = torch.cat(results)
    if out is not None:
        np.save(out, predictions.numpy())
    if as_json:
        print(json.dumps({"rows": len(rows), **profile.as_dict(), "seconds": seconds, "prepared_calls": ahead}))
        return
    console.print(
        f"{len(rows)} rows in {seconds:.2f} s, {profile.bytes / len(rows) / 1e6:.3f} MB a row, {profile.rounds} rounds"
        + (f"; written to {out}" if out else "")
    )
    if out is None:
        print(np.array2string(predictions.numpy(), precision=4, threshold=200))


def models(cert: Cert, key: Key, ca: Authority, server: Address = "localhost:7100", identity: Identity = None) -> None:
    """List the models that can be asked."""
    with connect(server, Credentials.read(cert, key, ca, identity)) as connection:
        for name in connection.models():
            print(name)


@keys.command("init")
def keys_init(folder: Annotated[Path, typer.Argument(help="where the CA is made")]) -> None:
    """Make a CA. Example: sectorch keys init pki"""
    console.print(f"CA certificate: {make_authority(folder)}")


@keys.command("issue")
def keys_issue(
    folder: Annotated[Path, typer.Argument(help="the CA's folder")],
    name: Annotated[str, typer.Argument(help="the party's name")],
    host: Annotated[list[str] | None, typer.Option(help="for a server: its host names or addresses")] = None,
    days: Annotated[float, typer.Option(help="how long it is valid")] = 90,
) -> None:
    """Issue a certificate, and a client's identity key. Examples: sectorch keys issue pki alice;
    sectorch keys issue pki server --host localhost"""
    credentials = issue(folder, name, server=bool(host), hosts=tuple(host or ()), days=days)
    console.print(f"{folder / name}.pem and {folder / name}-key.pem")
    if credentials.identity is not None:
        console.print(f"{folder / name}-identity.pem: {fingerprint_of(credentials.identity)}", highlight=False)


@keys.command("identity")
def keys_identity(path: Annotated[Path, typer.Argument(help="the file to make")]) -> None:
    """Make an identity key, for certificates of another CA. Example: sectorch keys identity alice-identity.pem"""
    if path.exists():
        raise ArgumentError(f"{path} is there already; an identity is made once")
    write_secret(path, new_identity())
    console.print(f"{path}: {fingerprint_of(path.read_bytes())}", highlight=False)


@keys.command("show")
def keys_show(path: Annotated[Path, typer.Argument(help="an identity file")]) -> None:
    """Print the fingerprint of an identity key, to tell the other party. Example: sectorch keys show a-identity.pem"""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    print(fingerprint_of(pem))


@keys.command("pin")
def keys_pin(
    name: Annotated[str, typer.Argument(help="the other party's name")],
    fingerprint: Annotated[str, typer.Argument(help="the fingerprint that it told you")],
    pins: PinFile = None,
) -> None:
    """Know another party by this identity key from now on. Example: sectorch keys pin hospital-b SHA256:..."""
    known = Pins(pins)
    known.pin(name, fingerprint)
    console.print(f"{known.path} knows '{name}' by {fingerprint}", highlight=False)


def _read(path: Path) -> torch.Tensor:
    try:
        rows = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
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


def _bytes(gigabytes: float) -> int:
    if not gigabytes > 0:
        raise ArgumentError(f"--store-budget is above 0 GB, got {gigabytes}")
    return int(gigabytes * 1e9)


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True)


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
