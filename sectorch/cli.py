"""The command line: `sectorch --help` shows the whole product in a screen."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .errors import ArgumentError, SectorchError
from .network.answer import Answering
from .network.certificates import Credentials, issue, make_authority
from .network.client import connect
from .network.server import Server
from .nn.program import describe_exported
from .protocols.perturbation.cli import main as perturbed_main
from .protocols.privhfl.cli import main as privhfl_main
from .runtime.ledger import Profile
from .table import supported_ops

app = typer.Typer(help="Secure tensors for PyTorch: predictions without showing model or input.", no_args_is_help=True)
keys = typer.Typer(help="A small certificate authority for trying it out.", no_args_is_help=True)
app.add_typer(keys, name="keys")
console = Console(stderr=True)

Cert = Annotated[Path, typer.Option("--cert", help="this party's certificate (PEM)")]
Key = Annotated[Path, typer.Option("--key", help="its private key (PEM)")]
Authority = Annotated[Path, typer.Option("--ca", help="CA of the other side's certificates (PEM)")]
Address = Annotated[str, typer.Option("--server", help="host:port of the server")]


@app.command()
def server(
    cert: Cert,
    key: Key,
    clients_ca: Annotated[Path, typer.Option("--clients-ca", help="CA of the clients' certificates (PEM)")],
    listen: Annotated[str, typer.Option(help="host:port to listen on")] = "0.0.0.0:7100",
    running: Annotated[int, typer.Option(help="queries that run at the same time")] = 2,
) -> None:
    """Run the server S. Example: sectorch server --cert server.pem --key server-key.pem --clients-ca ca.pem"""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    running_server = Server(listen, Credentials.read(cert, key, clients_ca), running)
    console.print(f"listening on port {running_server.port}; Ctrl-C stops")
    _until_stopped(lambda: running_server.wait(), running_server.stop)


@app.command()
def answer(
    model: Annotated[Path, typer.Argument(help="a .pt2 file made by torch.export.save")],
    name: Annotated[str, typer.Option(help="the name in this party's certificate")],
    cert: Cert,
    key: Key,
    ca: Authority,
    server: Address = "localhost:7100",
) -> None:
    """Answer queries. Example: sectorch answer model.pt2 --name hospital-b --cert ... --key ... --ca ..."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        exported = torch.export.load(model)
    except Exception as error:
        raise ArgumentError(f"cannot load {model}: {str(error).splitlines()[0]}") from None
    module = exported.module()
    (example,) = exported.example_inputs[0]
    description, weights = describe_exported(module.graph, module, example)
    party = Answering(server, Credentials.read(cert, key, ca), description, weights)
    try:
        party.register(name)
        console.print(f"'{name}' answers through {server}; Ctrl-C stops")
        _until_stopped(party.wait, party.close)
    finally:
        party.close()


@app.command()
def query(
    name: Annotated[str, typer.Argument(help="which model to ask; `sectorch models` lists them")],
    inputs: Annotated[Path, typer.Argument(help="a .npy file, rows first")],
    cert: Cert,
    key: Key,
    ca: Authority,
    server: Address = "localhost:7100",
    out: Annotated[Path | None, typer.Option(help="where to write the predictions (.npy)")] = None,
    batch: Annotated[int, typer.Option(help="rows per query")] = 32,
    prepare: Annotated[int, typer.Option(help="rows to prepare ahead of the first query")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print figures as JSON")] = False,
) -> None:
    """Ask a model. Example: sectorch query hospital-b images.npy --cert ... --key ... --ca ... --out logits.npy"""
    try:
        rows = torch.from_numpy(np.load(inputs, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {inputs}: {error}") from None
    with connect(server, Credentials.read(cert, key, ca)) as connection:
        model = connection.model(name)
        pieces = rows.split(batch)
        for _ in range(min(len(pieces), -(-prepare // batch))):
            model.prepare(batch)
        results, start = [], time.perf_counter()
        with Profile() as profile, Progress(console=console, transient=True) as progress:
            task = progress.add_task("asking", total=len(rows))
            for piece in pieces:
                results.append(model(piece))
                progress.advance(task, len(piece))
        seconds = time.perf_counter() - start
        model.close()
    predictions = torch.cat(results)
    if out is not None:
        np.save(out, predictions.numpy())
    if as_json:
        print(json.dumps({"rows": len(rows), **profile.as_dict(), "seconds": seconds}))
        return
    console.print(
        f"{len(rows)} rows in {seconds:.2f} s, {profile.bytes / len(rows) / 1e6:.3f} MB a row, {profile.rounds} rounds"
        + (f"; written to {out}" if out else "")
    )
    if out is None:
        print(np.array2string(predictions.numpy(), precision=4, threshold=200))


@app.command()
def models(cert: Cert, key: Key, ca: Authority, server: Address = "localhost:7100") -> None:
    """List the models that can be asked."""
    with connect(server, Credentials.read(cert, key, ca)) as connection:
        for name in connection.models():
            print(name)


@app.command()
def ops(as_json: Annotated[bool, typer.Option("--json", help="the whole table as JSON")] = False) -> None:
    """List the torch operations that work on secret tensors."""
    rows = supported_ops()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table()
    for column in ("operation", "kind", "note"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["kind"], row["note"])
    Console().print(table)


@app.command("perturbed-fl", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def perturbed_fl(context: typer.Context) -> None:
    """Perturbed-model federated learning. Example: sectorch perturbed-fl --data digits --clients 5 --rounds 20"""
    raise typer.Exit(perturbed_main(context.args))


@app.command("privhfl", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def privhfl(context: typer.Context) -> None:
    """PrivHFL: learning from secure queries. Example: sectorch privhfl --data digits --clients 10 --queries 500"""
    raise typer.Exit(privhfl_main(context.args) or 0)


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
    """Issue a certificate. Examples: sectorch keys issue pki alice; sectorch keys issue pki server --host localhost"""
    issue(folder, name, server=bool(host), hosts=tuple(host or ()), days=days)
    console.print(f"{folder / name}.pem and {folder / name}-key.pem")


def _until_stopped(wait, stop) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        wait()
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        stop()


def main() -> None:
    """Errors of our own kinds are one line; a traceback only with --debug as the first argument."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except SectorchError as error:
        if debug:
            raise
        console.print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.print("stopped")
        raise SystemExit(130) from None
