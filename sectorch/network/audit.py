"""`sectorch audit`: checks a file of receipts, shows its queries, and compares it with another party's file."""

from __future__ import annotations

import argparse
import datetime
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import files
from ..cli.command import Parser, command_status, print_json
from ..errors import ArgumentError, IdentityError, ReceiptError
from . import receipts
from .identity.commitment import signer_of
from .identity.identity import PRINT, fingerprint, fingerprint_of
from .names import readable

NOT_RECORDED = "not recorded"
"""The outcome of a query without an end in the file: its process was killed, or it still runs."""


@dataclass
class RevealRecord:
    """Reveals by a party's own messages in a query; the file had this line before a message left."""

    line: int
    what: str
    to: str
    most: int

    @property
    def text(self) -> str:
        return self.what if self.most == 1 else f"{self.what}, at most {self.most} times"


@dataclass
class ReleaseRecord:
    """A release in a query (`receipts.ReleasedLine`); `withheld` is known where the party learned it."""

    line: int
    name: str
    policy: str
    asked: str
    to: str
    cells: int
    epsilon: float
    withheld: int | None = None

    @property
    def text(self) -> str:
        hidden = "" if self.withheld is None else f", {self.withheld} withheld"
        cost = f", epsilon {self.epsilon:g}" if self.epsilon else ""
        return f"'{self.name}' ({self.asked}) under the policy {self.policy[:16]}: {self.cells} cells{hidden}{cost}"


@dataclass
class Entry:
    """One query in one party's receipts.

    Attributes:
        opened: the reveals that the party has sent, in a program of its own. releases: those under its policy.
        certificate, key: the fingerprints by which the party knows the client; empty if it does not.
        signed_by: the fingerprint of the key that has signed the model's version; empty where none is shown.
        statement, server: a hash of what S has signed in the query, and its key's fingerprint, where S signs.
    """

    line: int
    time: str
    session: str
    call: int
    client: str
    model: str
    version: str
    asked: str
    learned: str
    rows: int | None = None
    certificate: str = ""
    key: str = ""
    outcome: str = NOT_RECORDED
    ended: str = ""
    opened: list[RevealRecord] = field(default_factory=list)
    releases: list[ReleaseRecord] = field(default_factory=list)
    signed_by: str = ""
    statement: str = ""
    server: str = ""

    @property
    def done(self) -> bool:
        return self.outcome == "done"

    @property
    def models(self) -> dict[str, str]:
        """The models that were asked, and their versions."""
        return dict(zip(self.model.split(","), self.version.split(","), strict=False))


@dataclass
class Audit:
    """The content of a file of receipts all of whose lines are right.

    Attributes:
        key: the fingerprint of the key that has signed every line; only its owner can confirm it.
        certificate: the fingerprint of the party's own certificate, when it opened the file last.
        heads: the hash of each line; the last one is the file's head.
        begun: times at which a process opened the file.
        cut: numbers of lines before which a half-written line was cut off.
    """

    path: Path
    party: str = ""
    role: str = ""
    key: str = ""
    certificate: str = ""
    heads: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    queries: list[Entry] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.heads[-1]

    def totals(self) -> list[dict]:
        """Queries and rows for each client and model, and those of queries that were done."""
        sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for entry in self.queries:
            counts = {"queries": 1, "rows": entry.rows or 0}
            if entry.done:
                counts |= {"done": 1, "rows_done": entry.rows or 0}
            sums[entry.client, entry.model].update(counts)
        names = ("queries", "done", "rows", "rows_done")
        return [
            {"client": client, "model": model, **{name: count[name] for name in names}}
            for (client, model), count in sorted(sums.items())
        ]

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "file": str(self.path), "party": self.party, "role": self.role, "key": self.key,
            "lines": len(self.heads), "head": self.head, "begun": self.begun, "cut": self.cut,
            "queries": [asdict(entry) for entry in self.queries], "totals": self.totals(),
        }  # fmt: skip


def audit(path: str | Path, key: str | None = None, head: str | None = None) -> Audit:
    """Check the form, number, chain and signature of every line of a file of receipts.

    Args:
        key: the fingerprint of the key that must have signed. Without it the file is checked against the key that it
            names itself, and anybody can make such a file.
        head: the hash of a line that was noted elsewhere (`Receipts.head`), which the file must have. Without it, lines
            that were cut off at the end are not noticed.

    Raises:
        ReceiptError: a line is wrong; the text has the number of the first one.
        ArgumentError: the file cannot be read, or the head is no hash.
    """
    if head is not None and not receipts.HASH.fullmatch(head):
        raise ArgumentError("a head is the SHA-256 of a line, 64 digits in lower case, as an audit prints it")
    found = Audit(Path(path))
    public, opened, last = None, {}, receipts.NOTHING
    for number, line in enumerate(_lines(found.path)):
        try:
            record = receipts.parse_line(line)
            if public is None:
                if not isinstance(record, receipts.BeganLine):
                    raise ReceiptError("the first line does not begin a file: lines before it were cut off")
                public = receipts.public_key(record)
                found.party, found.role = record.party, record.role
                found.key = fingerprint(public.public_bytes_raw())
                if key not in (None, found.key):
                    raise ReceiptError(f"the file is signed by {found.key} and not by {key}")
            if record.number != number or record.previous != last:
                raise ReceiptError("it does not follow on the line before: lines were removed, moved or changed")
            receipts.check_signature(record, public)
            _add_line(found, record, opened)
        except ReceiptError as error:
            way = "" if found.key else "; where the line is no receipt at all, name the file that --receipts wrote"
            raise ReceiptError(f"{path}, line {number + 1}: {error}{way}") from None
        last = receipts.hash_of(line)
        found.heads.append(last)
    if public is None:
        raise ReceiptError(f"{path} holds no receipts")
    if head is not None and head not in found.heads:
        raise ReceiptError(f"{path} does not have the line of the noted head: it was cut before it, or written anew")
    return found


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines, without their ends."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(receipts.LONGEST + 1):
                if not line.endswith(b"\n"):
                    time.sleep(0.05)  # a party may be writing it just now
                    line += file.readline(receipts.LONGEST + 1)
                if not line.endswith(b"\n"):
                    raise ReceiptError(
                        f"{path}, line {number + 1}: it is half written: a process was ended in the middle, or the end "
                        f"was cut off; where it was a process, the party's next start says so in the file"
                    )
                yield line[:-1]
                number += 1
    except IsADirectoryError:
        inside = sorted(file.name for file in path.iterdir() if file.is_file())[:6]
        said = f"its files are {', '.join(inside)}" if inside else "it has no files"
        raise ArgumentError(f"{path} is a folder, and an audit is of one file: {said}") from None
    except OSError as error:
        raise ArgumentError(f"cannot read the receipts {path}: {error.strerror}") from None


def _add_line(found: Audit, record: receipts.ReceiptLine, opened: dict[int, Entry]) -> None:
    """Add a line's content. `opened` has the queries without an end, by the number of their lines."""
    if isinstance(record, receipts.BeganLine):
        same = found.party, found.role, found.key
        own = record.party, record.role, fingerprint(bytes.fromhex(record.public))
        if own != same:
            raise ReceiptError("it goes on with another party, role or key than the file began with")
        if record.cut_bytes is not msgspec.UNSET:
            found.cut.append(record.number)
        found.begun.append(record.time)
        found.certificate = record.certificate
        opened.clear()
    elif isinstance(record, receipts.AskedLine):
        facts = msgspec.to_builtins(record)
        entry = Entry(line=record.number, **{k: v for k, v in facts.items() if k in Entry.__dataclass_fields__})
        if record.role != found.role:
            raise ReceiptError("it is of another role than the file began with")
        if found.role == "Q":
            entry.key, entry.certificate = found.key, found.certificate
        if record.commitment is not msgspec.UNSET:
            try:
                entry.signed_by = signer_of(record.commitment, record.model, record.version)
            except IdentityError as error:
                raise ReceiptError(str(error)) from None
        found.queries.append(entry)
        opened[entry.line] = entry
    elif isinstance(record, receipts.OpenedLine):
        entry = opened.get(record.of)
        if entry is None:
            raise ReceiptError("it opens something in a query that has not begun, or has ended")
        reveal = RevealRecord(record.number, record.what, record.to, record.most)
        entry.opened = [o for o in entry.opened if (o.what, o.to) != (reveal.what, reveal.to)] + [reveal]
    elif isinstance(record, receipts.ReleasedLine):
        entry = opened.get(record.of)
        if entry is None:
            raise ReceiptError("it releases something in a query that has not begun, or has ended")
        facts = msgspec.to_builtins(record)
        entry.releases.append(
            ReleaseRecord(record.number, **{k: v for k, v in facts.items() if k in ReleaseRecord.__dataclass_fields__})
        )
    elif isinstance(record, receipts.EndedLine):
        entry = opened.pop(record.of, None)
        if entry is None:
            raise ReceiptError("it ends a query that has not begun, or has ended")
        entry.outcome, entry.ended = record.outcome, record.time
        if record.statement is not msgspec.UNSET and record.server is not msgspec.UNSET:
            entry.statement, entry.server = record.statement, fingerprint(bytes.fromhex(record.server))


@dataclass
class Comparison:
    """The comparison of two parties' receipts, for queries in which both took part.

    Attributes:
        missing, beyond: queries that only the first file has, or only the other one.
        differing: pairs of entries that disagree, with the names of the entries' facts that differ.
        same: the number of queries that agree.
    """

    missing: list[Entry] = field(default_factory=list)
    beyond: list[Entry] = field(default_factory=list)
    differing: list[tuple[Entry, Entry, list[str]]] = field(default_factory=list)
    same: int = 0

    @property
    def agree(self) -> bool:
        return not (self.missing or self.beyond or self.differing)

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "agree": self.agree, "same": self.same, "only_here": [asdict(e) for e in self.missing],
            "only_there": [asdict(e) for e in self.beyond],
            "differing": [{"here": asdict(a), "there": asdict(b), "in": names} for a, b, names in self.differing],
        }  # fmt: skip


def compare(one: Audit, other: Audit) -> Comparison:
    """Compare two parties' receipts, query by query.

    Only queries in which the other party took part count: a client's own, and those of an answering party's model.
    Outcomes are not compared, since they may differ: a result that Q withholds is done for the others. Nor are times.
    """
    found, there = Comparison(), defaultdict(list)
    for entry in other.queries:
        if _concerns(entry, one):
            there[entry.session, entry.call].append(entry)
    for entry in one.queries:
        if not _concerns(entry, other):
            continue
        match = there[entry.session, entry.call]
        if not match:
            found.missing.append(entry)
            continue
        theirs = match.pop(0)
        differ = _differ(entry, theirs)
        if differ:
            found.differing.append((entry, theirs, differ))
        else:
            found.same += 1
    found.beyond = sorted((e for rest in there.values() for e in rest), key=lambda e: e.line)
    return found


def _concerns(entry: Entry, party: Audit) -> bool:
    return party.role == "S" or party.party in (entry.models if party.role == "A" else (entry.client,))


def _differ(one: Entry, other: Entry) -> list[str]:
    names = [n for n in ("client", "asked", "rows", "learned") if getattr(one, n) != getattr(other, n)]
    both = [
        n for n in ("key", "certificate", "signed_by", "statement", "server") if getattr(one, n) and getattr(other, n)
    ]
    names += [n for n in both if getattr(one, n) != getattr(other, n)]
    few, many = sorted((one.models, other.models), key=len)
    names += ["model"] if few.keys() - many.keys() else []
    return names + (["version"] if any(many.get(k, v) != v for k, v in few.items()) else [])


# An audit as a page that can be printed.


ROLES = {"Q": "the querying party (Q)", "A": "the answering party (A)", "S": "the server (S)"}
_OWN = {
    "Q": "This party learned what is listed, and nothing else of the models that it asked.",
    "A": "This party itself learned nothing: it held masked values, which tell neither questions nor results.",
    "S": "This party itself learned nothing: it held masked values, which tell no model, question or result.",
}
_ASSUMED = (
    "The server does not put together what it holds with what a client or an answering party holds.",
    "All parties follow the protocol. Who does not can make results wrong; a client that does not can read the model.",
    "The primitives hold: AES-128, X25519, HKDF-SHA256, Ed25519, TLS 1.3.",
    "Public are the architecture of a model, all shapes, how often and when was asked. What results tell of a model or "
    "of the data that it was trained on is not hidden by any of this.",
)
LISTED = 1000
"""Largest number of queries that the page lists; these are the last ones."""


def page(found: Audit, known: bool, other: Audit | None = None, compared: Comparison | None = None) -> str:
    """The page of an audit, as HTML that loads no other files.

    Args:
        known: whether the file was checked against a given key.
        other, compared: another party's receipts, and the comparison of both.
    """
    folder = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: readable(value) if isinstance(value, str) else value,
    )  # fmt: skip
    times = sorted(entry.time[:10] for entry in found.queries)
    return folder.get_template("audit.html").render(
        audit=found, known=known, other=other, compared=compared, roles={**ROLES, **_role_names(found, other)},
        period=f"{times[0]} to {times[-1]}" if times else "", groups=_groups(found), queries=found.queries[-LISTED:],
        opened=[(entry, opened) for entry in found.queries for opened in entry.opened][-LISTED:],
        released=[(entry, released) for entry in found.queries for released in entry.releases][-LISTED:],
        unfinished=sum(not entry.done for entry in found.queries), assumptions=_ASSUMED,
        own=_OWN.get(found.role, "What this party learned stands in its own record of each run."),
        now=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC", name=readable(found.path.name),
        version=metadata.version("sectorch"),
    )  # fmt: skip


def write_page(path: Path, text: str) -> None:
    """The page as a file that is its owner's alone.

    Raises:
        ArgumentError: it cannot be written, or does not go by a page's name: receipts and keys are never written over.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"--page writes HTML, got {path}: name it {path.with_suffix('.html').name}, and print that")
    try:
        files.write(path, text.encode(), 0o600)
    except OSError as error:
        raise ArgumentError(f"cannot write the page {path}: {error.strerror}") from None


def _role_names(*audits: Audit | None) -> dict[str, str]:
    """Roles of programs of one's own go by their names."""
    return {a.role: f"the role {a.role}" for a in audits if a is not None and a.role not in ROLES}


def _groups(found: Audit) -> list[dict[str, Any]]:
    """What was learned, by whom, of which version of what."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for e in found.queries:
        known = e.key or (f"certificate {e.certificate}" if e.certificate else "its name alone")
        groups.setdefault((e.learned, e.client, known, e.model, e.version), []).append(e)
    return [
        dict(zip(("learned", "client", "known", "model", "version"), key, strict=True))
        | {"queries": len(of), "rows": sum(e.rows or 0 for e in of), "first": of[0].time[:19].replace("T", " ")}
        | {"last": of[-1].time[:19].replace("T", " ")}
        for key, of in sorted(groups.items())
    ]


# `sectorch audit`: whether a file of receipts is intact, and who learned what by it, and when.


CELL = 100
"""Characters of what is learned in a table of the terminal."""


def audit_command(arguments: Sequence[str] | None = None) -> int:
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
    p.add_argument("--page", type=Path, metavar="FILE", help="write a page (HTML) that can be printed and filed")
    p.takes_json("all of it")
    return command_status(p, arguments, _audit)


def _audit(options: argparse.Namespace, console: Console) -> None:
    if options.against_key and not options.against:
        raise ArgumentError("--against-key is of the file that --against names")
    found = audit(options.file, _key(options.key), options.head)
    other = audit(options.against, _key(options.against_key)) if options.against else None
    if other is not None and other.key == found.key:
        raise ArgumentError(
            f"both files are signed by {found.key}: --against takes another party's; --head finds what was cut from "
            f"one's own since a head was noted"
        )
    compared = None if other is None else compare(found, other)
    if options.page is not None:
        write_page(options.page, page(found, options.key is not None, other, compared))
    if options.json:
        content = found.as_dict()
        if other is not None and compared is not None:
            about = {k: v for k, v in other.as_dict().items() if k not in ("queries", "totals")}
            content["against"] = {**about, **compared.as_dict()}
        print_json(content)
    else:
        _show(console, found, options.key is not None)
        if other is not None and compared is not None:
            _show_comparison(console, found, other, compared)
        if options.page is not None:
            _printer(console)(f"the page is in {options.page}")
    if compared is not None and not compared.agree:
        raise ReceiptError(
            f"the two files do not agree: {len(compared.missing)} queries are in {options.file} alone, "
            f"{len(compared.beyond)} in {options.against} alone, and {len(compared.differing)} differ"
        )


def _key(named: str | None) -> str | None:
    """The fingerprint of a key that is given by its fingerprint or by a file."""
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
    say = _printer(console)
    console.print(_table("", found.queries))
    totals = Table("client", "model", "queries", "done", "rows", "rows done", title="totals")
    for total in found.totals():
        totals.add_row(*(Text(readable(str(value))) for value in total.values()))
    console.print(totals)
    firsts: dict[str, int] = {}
    for entry in found.queries:
        by = f"key {entry.key}" if entry.key else f"certificate {entry.certificate}" if entry.certificate else ""
        by_key = f", signed by {entry.signed_by}" if entry.signed_by else ""
        models = [f"'{model}' answered with version {version}{by_key}" for model, version in entry.models.items()]
        models += [f"the server signed with {entry.server}"] if entry.server else []
        for words in ([f"'{entry.client}' showed {by}"] if by else []) + models:
            firsts.setdefault(words, entry.line)
    for words, line in firsts.items():
        say(f"{words}, first in line {line + 1}")
    for entry in found.queries:
        for released in entry.releases:
            say(
                f"line {released.line + 1}, of the query of line {entry.line + 1}: released to {released.to}: "
                f"{released.text}"
            )
        for opened in entry.opened:
            say(
                f"line {opened.line + 1}, of the query of line {entry.line + 1}: revealed to {opened.to}: {opened.text}"
            )
    if found.cut:
        at = ", ".join(str(number + 1) for number in found.cut)
        say(f"a half-written line was cut off before line {at}: a process had been ended in the middle")
    say(f"{found.path}: {len(found.heads)} lines are intact, of '{found.party}', {ROLES.get(found.role, found.role)}")
    say(
        f"signed by {found.key}"
        + ("" if known else ", which is for you to compare with what its owner told you (--key)")
    )
    say(f"head: {found.head}")


def _show_comparison(console: Console, found: Audit, other: Audit, compared: Comparison) -> None:
    say = _printer(console)
    say(
        f"against {other.path}, of '{other.party}', {ROLES.get(other.role, other.role)}, signed by {other.key}: "
        f"{compared.same} agree"
    )
    for entries, audit in ((compared.missing, found), (compared.beyond, other)):
        if entries:
            console.print(_table(f"in {audit.path} alone", entries))
    for one, theirs, names in compared.differing:
        say(f"line {one.line + 1} and line {theirs.line + 1} there are of one query and differ in {', '.join(names)}")


def _printer(console: Console) -> Callable[[str], None]:
    """Prints lines that may have text of another party's file."""
    return lambda text: console.print(readable(text), markup=False, highlight=False, soft_wrap=True)


def _table(title: str, entries: Sequence[Entry]) -> Table:
    names = "line", "time (UTC)", "client", "asked", "rows", "model", "learned", "outcome"
    table = Table(*names, box=None, pad_edge=False, collapse_padding=True)  # 80 columns without a broken name
    table.columns[1].no_wrap = True
    table.title = Text(readable(title)) if title else None
    for e in entries:
        learned = e.learned if len(e.learned) <= CELL else f"{e.learned[:CELL]}... (--json and --page have all)"
        learned += "" if e.done or e.learned == "nothing" else " at most"
        time, rows = e.time[:19].replace("T", " "), "" if e.rows is None else str(e.rows)
        cells = (str(e.line + 1), time, e.client, e.asked, rows, e.model, learned, e.outcome)
        table.add_row(*(Text(readable(cell), overflow="fold") for cell in cells))
    return table
