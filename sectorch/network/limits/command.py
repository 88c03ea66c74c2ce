"""`sectorch limits`: what clients may ask of a party, and what they have used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...cli.command import Parser, ended, print_json
from ..names import NAME, readable
from .file import MEGABYTE, Limits, read
from .usage import EVERYBODY, Row, shown


def limits(arguments: Sequence[str] | None = None) -> int:
    """`sectorch limits`."""
    p = Parser(
        "limits",
        "Check a file of limits, and show what clients have used of them. Nothing is changed.",
        ["sectorch limits limits.toml"],
    )
    p.add_argument("file", type=Path, help="limits, of --limits at a server or an answering party")
    p.takes_json("all of it")
    return ended(p, arguments, _limits)


def _limits(options: argparse.Namespace, console: Console) -> None:
    found = read(options.file)
    rows = shown(found.usage) if found.usage.exists() else []
    lines = [(row, most) for row in rows if (most := _most(found, row)) is not None or row.what != "sessions"]
    if options.json:
        names = ("account", "model", "what", "used")
        print_json([{**{n: getattr(row, n) for n in names}, "limit": most} for row, most in lines])
        return
    table = Table("account", "model", "counted", "over", "used", "limit", box=None)
    for row, most in lines:
        over = "all time" if row.model else "a day"
        cells = (_account(row.account), row.model, row.what, over, _amount(row.what, row.used))
        table.add_row(*(Text(readable(cell)) for cell in (*cells, "" if most is None else _amount(row.what, most))))
    console.print(table)
    console.print(f"{found.usage}: {'nothing is used yet' if not rows else f'{len(rows)} counts'}", highlight=False)


def _most(found: Limits, row: Row) -> int | None:
    """The limit that holds for it; of a key it is that of the name it came with, which is not known here."""
    if row.account == EVERYBODY:
        return found.models.get(row.model, {}).get(row.what)
    if not NAME.fullmatch(row.account) or row.account.startswith("SHA256:"):
        return None
    limit = found.of(row.account)
    return limit.in_all.get(row.what) if row.model else limit.daily.get(row.what)


def _account(account: str) -> str:
    return "all clients" if account == EVERYBODY else account


def _amount(what: str, count: int) -> str:
    return f"{count / MEGABYTE:.1f} MB" if what == "bytes" else str(count)
