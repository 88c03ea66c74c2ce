"""`sectorch audit`: whether a file of receipts is whole, and who learned what by it, and when."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...cli.command import Parser, ended, print_json
from ...errors import ArgumentError, ReceiptError
from ..identity.identity import PRINT, fingerprint, fingerprint_of
from ..names import readable
from .audit import Audit, Comparison, Entry, compare
from .audit import audit as checked
from .page import ROLES, page, write_page

CELL = 100
"""Characters of what is learned in a table of the terminal."""


def audit(arguments: Sequence[str] | None = None) -> int:
    """`sectorch audit`."""
    p = Parser(
        "audit",
        "Check every line of a party's receipts, and show who learned what, and when. A changed file is an error.",
        (
            "sectorch audit receipts.jsonl --key SHA256:...",
            "sectorch audit receipts.jsonl --key SHA256:... --head 5c1d...   lines cut off since the head was noted",
            "sectorch audit server.jsonl --against hospital-b.jsonl          queries that only one of them has",
            "sectorch audit server.jsonl --key SHA256:... --page june.html   to be printed and filed",
        ),
    )
    p.add_argument("file", type=Path, help="receipts, of --receipts at a server, an answering or a querying party")
    p.add_argument(
        "--key",
        metavar="KEY",
        help="who has to have signed: a fingerprint, or a PEM file (Ed25519 identity key, public key or certificate)",
    )
    p.add_argument("--head", metavar="HASH", help="the head of an earlier audit, or `receipt` of a line of the log")
    p.add_argument("--against", type=Path, metavar="FILE", help="another party's receipts of the same queries")
    p.add_argument("--against-key", metavar="KEY", help="who has to have signed those")
    p.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="write a page (HTML) that can be printed and filed",
    )
    p.takes_json("all of it")
    return ended(p, arguments, _audit)


def _audit(options: argparse.Namespace, console: Console) -> None:
    if options.against_key and not options.against:
        raise ArgumentError("--against-key is of the file that --against names")
    found = checked(options.file, _key(options.key), options.head)
    other = checked(options.against, _key(options.against_key)) if options.against else None
    if other is not None and other.key == found.key:
        raise ArgumentError(
            f"both files are signed by {found.key}: --against takes another party's; --head finds what was cut from "
            f"one's own since a head was noted"
        )
    compared = None if other is None else compare(found, other)
    if options.page is not None:
        write_page(options.page, page(found, options.key is not None, other, compared))
    if options.json:
        said = found.as_dict()
        if other is not None and compared is not None:
            about = {k: v for k, v in other.as_dict().items() if k not in ("queries", "totals")}
            said["against"] = {**about, **compared.as_dict()}
        print_json(said)
    else:
        _show(console, found, options.key is not None)
        if other is not None and compared is not None:
            _show_comparison(console, found, other, compared)
        if options.page is not None:
            _said_on(console)(f"the page is in {options.page}")
    if compared is not None and not compared.agree:
        raise ReceiptError(
            f"the two files do not agree: {len(compared.missing)} queries are in {options.file} alone, "
            f"{len(compared.beyond)} in {options.against} alone, and {len(compared.differing)} differ"
        )


def _key(named: str | None) -> str | None:
    """The fingerprint of the key that was named."""
    if named is None or PRINT.fullmatch(named):
        return named
    try:
        pem = Path(named).read_bytes()
    except (OSError, ValueError):
        raise ArgumentError(
            f"a key is a fingerprint, SHA256: and 43 characters, or a PEM file that is there; got {ascii(named)[:80]}"
        ) from None
    if b"PRIVATE KEY" in pem:
        return fingerprint_of(pem)
    try:
        certificate = b"CERTIFICATE" in pem
        public = x509.load_pem_x509_certificate(pem).public_key() if certificate else load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise ArgumentError(
            f"{named} holds neither an identity key nor a public key nor a certificate in PEM"
        ) from None
    if not isinstance(public, Ed25519PublicKey):
        raise ArgumentError(
            f"{named} holds a key of another kind: receipts are signed with the party's Ed25519 identity key, whose "
            f"fingerprint it tells you (`sectorch keys show`)"
        )
    return fingerprint(public.public_bytes_raw())


def _show(console: Console, found: Audit, known: bool) -> None:
    say = _said_on(console)
    console.print(_table("", found.queries))
    totals = Table("client", "model", "queries", "done", "rows", "rows done", title="totals")
    for total in found.totals():
        totals.add_row(*(Text(readable(str(value))) for value in total.values()))
    console.print(totals)
    firsts: dict[str, int] = {}
    for entry in found.queries:
        by = entry.key or (f"certificate {entry.certificate}" if entry.certificate else "")
        models = [f"'{model}' answered with version {version}" for model, version in entry.models.items()]
        for words in ([f"'{entry.client}' was known by {by}"] if by else []) + models:
            firsts.setdefault(words, entry.line)
    for words, line in firsts.items():
        say(f"{words}, first in line {line + 1}")
    for entry in found.queries:
        for opened in entry.opened:
            say(
                f"line {opened.line + 1}, of the query of line {entry.line + 1}: revealed to {opened.to}: {opened.text}"
            )
    if found.cut:
        at = ", ".join(str(number + 1) for number in found.cut)
        say(f"a half-written line was cut off before line {at}: a process had been ended in the middle")
    say(f"{found.path}: {len(found.heads)} lines are whole, of '{found.party}', {ROLES.get(found.role, found.role)}")
    say(
        f"signed by {found.key}"
        + ("" if known else ", which is for you to compare with what its owner told you (--key)")
    )
    say(f"head: {found.head}")


def _show_comparison(console: Console, found: Audit, other: Audit, compared: Comparison) -> None:
    say = _said_on(console)
    say(
        f"against {other.path}, of '{other.party}', {ROLES.get(other.role, other.role)}, signed by {other.key}: "
        f"{compared.same} agree"
    )
    for entries, audit in ((compared.missing, found), (compared.beyond, other)):
        if entries:
            console.print(_table(f"in {audit.path} alone", entries))
    for one, theirs, names in compared.differing:
        say(f"line {one.line + 1} and line {theirs.line + 1} there are of one query and differ in {', '.join(names)}")


def _said_on(console: Console) -> Callable[[str], None]:
    """Words of a file that others may have written, as a line."""
    return lambda text: console.print(readable(text), markup=False, highlight=False, soft_wrap=True)


def _table(title: str, entries: Sequence[Entry]) -> Table:
    table = Table("line", "time (UTC)", "client", "asked", "rows", "model", "learned", "outcome", box=None)
    table.columns[1].no_wrap = True
    table.title = Text(readable(title)) if title else None
    for e in entries:
        learned = e.learned if len(e.learned) <= CELL else f"{e.learned[:CELL]}... (--json and --page have all)"
        learned += "" if e.done or e.learned == "nothing" else " at most"
        time, rows = e.time[:19].replace("T", " "), "" if e.rows is None else str(e.rows)
        cells = (str(e.line + 1), time, e.client, e.asked, rows, e.model, learned, e.outcome)
        table.add_row(*(Text(readable(cell), overflow="fold") for cell in cells))
    return table
