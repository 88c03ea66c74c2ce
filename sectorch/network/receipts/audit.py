"""Reading receipts: whether a file is what one key has signed, line after line, and what it says beside another one."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from ...errors import ArgumentError, ReceiptError
from ..identity.identity import fingerprint
from . import lines

NOT_RECORDED = "not recorded"
"""The outcome of a query whose end the file does not have: its process was killed, or runs still."""


@dataclass
class Opened:
    """What a party has revealed in a query by its own messages: before each left, its file had this."""

    line: int
    what: str
    to: str
    most: int

    @property
    def text(self) -> str:
        return self.what if self.most == 1 else f"{self.what}, at most {self.most} times"


@dataclass
class Entry:
    """One query in one party's receipts.

    `opened` is what the party itself has sent, in a program of its own, that somebody learned something by.
    `certificate` and `key` are the fingerprints by which that party knows the client, empty where it does not.
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
    opened: list[Opened] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.outcome == "done"

    @property
    def models(self) -> dict[str, str]:
        """The models that were asked, and their versions."""
        return dict(zip(self.model.split(","), self.version.split(","), strict=False))


@dataclass
class Audit:
    """A file of receipts that was found whole.

    Attributes:
        key: the fingerprint of the key that has signed every line; whose it is, only its owner can say.
        certificate: the fingerprint of the party's own certificate, the last time that it opened the file.
        heads: the hash of each line; the last one is the file's head.
        begun: when a process opened the file. cut: lines that say that a half-written one was cut off before them.
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
        """For each client and model: queries, rows, and how many of them were done."""
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
    """Check every line of a file of receipts: form, number, chain and signature. A fraction of a millisecond a line.

    Args:
        key: the fingerprint of the key that has to have signed. Without one the file is checked against the key that
            stands in it, and whoever can make a key can make a file.
        head: the hash of a line, noted elsewhere (`Receipts.head`): the file has to have it still. Without one nobody
            can see that lines were cut off at the end.

    Raises:
        ReceiptError: the file is not whole; says which line is the first that is wrong.
        ArgumentError: it cannot be read, or the head is no hash.
    """
    if head is not None and not lines.HASH.fullmatch(head):
        raise ArgumentError("a head is the SHA-256 of a line, 64 digits in lower case, as an audit prints it")
    found = Audit(Path(path))
    public, opened, last = None, {}, lines.NOTHING
    for number, line in enumerate(_lines(found.path)):
        try:
            record = lines.parsed(line)
            if public is None:
                if not isinstance(record, lines.BeganLine):
                    raise ReceiptError("the first line does not begin a file: lines before it were cut off")
                public = lines.public_key(record)
                found.party, found.role = record.party, record.role
                found.key = fingerprint(public.public_bytes_raw())
                if key not in (None, found.key):
                    raise ReceiptError(f"the file is signed by {found.key} and not by {key}")
            if record.number != number or record.previous != last:
                raise ReceiptError("it does not follow on the line before: lines were removed, moved or changed")
            lines.check_signature(record, public)
            _take(found, record, opened)
        except ReceiptError as error:
            way = "" if found.key else "; where the line is no receipt at all, name the file that --receipts wrote"
            raise ReceiptError(f"{path}, line {number + 1}: {error}{way}") from None
        last = lines.hash_of(line)
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
            while line := file.readline(lines.LONGEST + 1):
                if not line.endswith(b"\n"):
                    time.sleep(0.05)  # a party may be writing it just now
                    line += file.readline(lines.LONGEST + 1)
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


def _take(found: Audit, record: lines.ReceiptLine, opened: dict[int, Entry]) -> None:
    """Add what a line says. `opened` are the queries without an end, by the number of their lines."""
    if isinstance(record, lines.BeganLine):
        same = found.party, found.role, found.key
        own = record.party, record.role, fingerprint(bytes.fromhex(record.public))
        if own != same:
            raise ReceiptError("it goes on with another party, role or key than the file began with")
        if record.cut_bytes is not msgspec.UNSET:
            found.cut.append(record.number)
        found.begun.append(record.time)
        found.certificate = record.certificate
        opened.clear()
    elif isinstance(record, lines.AskedLine):
        said = msgspec.to_builtins(record)
        entry = Entry(line=record.number, **{k: v for k, v in said.items() if k in Entry.__dataclass_fields__})
        if record.role != found.role:
            raise ReceiptError("it is of another role than the file began with")
        if found.role == "Q":
            entry.key, entry.certificate = found.key, found.certificate
        found.queries.append(entry)
        opened[entry.line] = entry
    elif isinstance(record, lines.OpenedLine):
        entry = opened.get(record.of)
        if entry is None:
            raise ReceiptError("it opens something in a query that has not begun, or has ended")
        said = Opened(record.number, record.what, record.to, record.most)
        entry.opened = [o for o in entry.opened if (o.what, o.to) != (said.what, said.to)] + [said]
    elif isinstance(record, lines.EndedLine):
        entry = opened.pop(record.of, None)
        if entry is None:
            raise ReceiptError("it ends a query that has not begun, or has ended")
        entry.outcome, entry.ended = record.outcome, record.time


@dataclass
class Comparison:
    """What two parties' receipts say of the queries that both took part in.

    Attributes:
        missing, beyond: queries that only the first file has, or only the other one.
        differing: pairs that both have, with the names of what they disagree on.
        same: how many they agree on.
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
    """Hold two parties' receipts against each other, query by query.

    Only queries in which the other party had a part count: a client's own, and those of an answering party's own model.
    Outcomes may differ (a result that Q withholds is done for the others) and are not compared; nor are times.
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
    found.beyond = sorted((e for left in there.values() for e in left), key=lambda e: e.line)
    return found


def _concerns(entry: Entry, party: Audit) -> bool:
    return party.role == "S" or party.party in (entry.models if party.role == "A" else (entry.client,))


def _differ(one: Entry, other: Entry) -> list[str]:
    names = [n for n in ("client", "asked", "rows", "learned") if getattr(one, n) != getattr(other, n)]
    both = [n for n in ("key", "certificate") if getattr(one, n) and getattr(other, n)]
    names += [n for n in both if getattr(one, n) != getattr(other, n)]
    few, many = sorted((one.models, other.models), key=len)
    names += ["model"] if few.keys() - many.keys() else []
    return names + (["version"] if any(many.get(k, v) != v for k, v in few.items()) else [])
