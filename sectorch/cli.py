"""The command line: `sectorch --help` shows the whole product in a screen."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .errors import SectorchError
from .network.cli import register as register_network
from .protocols.capc.cli import main as capc_main
from .protocols.capride.cli import main as capride_main
from .protocols.perturbation.cli import main as perturbed_main
from .protocols.privhfl.cli import main as privhfl_main
from .protocols.secsv.cli import main as shapley_main
from .table import supported_ops

app = typer.Typer(help="Secure tensors for PyTorch: predictions without showing model or input.", no_args_is_help=True)
register_network(app)
console = Console(stderr=True)


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


@app.command("capc", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def capc(context: typer.Context) -> None:
    """CaPC: labels by noisy vote of many parties. Example: sectorch capc --data digits --parties 50 --epsilon 10"""
    raise typer.Exit(capc_main(context.args) or 0)


@app.command(
    "capride", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def capride(context: typer.Context) -> None:
    """CaPriDe: learning on encrypted data. Example: sectorch capride --data digits --parties 3 --split no-overlap"""
    raise typer.Exit(capride_main(context.args))


@app.command("perturbed-fl", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def perturbed_fl(context: typer.Context) -> None:
    """Perturbed-model federated learning. Example: sectorch perturbed-fl --data digits --clients 5 --rounds 20"""
    raise typer.Exit(perturbed_main(context.args))


@app.command(
    "privhfl", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def privhfl(context: typer.Context) -> None:
    """PrivHFL: learning from secure queries. Example: sectorch privhfl --data digits --clients 10 --queries 500"""
    raise typer.Exit(privhfl_main(context.args) or 0)


@app.command(
    "shapley", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def shapley(context: typer.Context) -> None:
    """SecSV: what each client contributed. Example: sectorch shapley --data digits --clients 5 --rounds 10 --skip"""
    raise typer.Exit(shapley_main(context.args))


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
