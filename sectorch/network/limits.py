"""Quotas: what clients may ask of a party, and what they have used, which lasts across restarts.

`Quotas` charges queries and sessions; `Limits` is the file of a party's limits; `Usage` is the file of what is used;
`limits` is the command `sectorch limits`.

What is charged. A query is charged before this party does anything of it: one query, and one row for each row of the
batch (at least one). A step of a language model is a query with a row for each text, so a row is a token. Preparing is
charged by its bytes alone, since nothing is learned from it; prepared calls are charged when they are used. Bytes are
counted at the end.

A charge is final, however the query ends, with one exception. A query may be repeated without a charge, under the same
name and with the same size, if this party had sent nothing of it, or if it ended because a process of this party or the
server was lost before this party had done its part. A client cannot cause that: a query that ended because its client
left, or aborted it, stays charged.

The file of usage is a SQLite file, which several processes of one party share:

    used      by account, what is counted, and quarter of an hour; entries older than a day are deleted
    in_all    by account, model and what is counted, without end; account `*` is all clients together
    asked     queries that may be repeated without a charge, by the name that the client gave them

A charge is on disk (`synchronous=FULL`) before the query is served. Comparison with the limits and charge are one
transaction, so that two charges at the same time cannot both use the last unit. A client has two accounts, its name
and the identity key that it proved, each with the whole limit: neither another name nor another key gives more.

A file of limits, in which an entry that is missing sets no limit, and a day is the last 24 hours:

    usage = "limits.usage"      # the file of usage; by default beside this file, with this ending

    [default]                   # of each client
    queries_a_day = 1000
    rows_a_day = 20000
    sessions_a_day = 500
    megabytes_a_day = 20000
    queries_in_all = 50000      # of each model, without end
    rows_in_all = 1000000

    [clients.hospital-a]        # entries that differ for one client
    rows_a_day = 100000

    [models.hospital-b]         # of all clients together
    rows_in_all = 5000000
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import files
from ..cli.command import Parser, command_status, print_json
from ..errors import ArgumentError, NetworkError, QuotaError, QuotaFileError, SectorchError
from .log import write
from .messages import Entries, ModelQuery, Prepare, in_file, read_table, read_toml
from .names import NAME, account_of, model_name, name_of, readable
from .receipts import Receipts
from .wire.channel import Channel

log = logging.getLogger("sectorch.limits")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockReading:
    """A reading of a machine's clocks.

    Args:
        boot: an identifier of the machine's start; empty where there is none.
        since: seconds since that start.
        wall: the wall clock, in seconds.
    """

    boot: str
    since: float
    wall: float


def read_clocks() -> ClockReading:
    """Read this machine's clocks."""
    try:
        boot = _BOOT.read_text().strip()
        return ClockReading(boot, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
    except (OSError, AttributeError):  # another system than Linux
        return ClockReading("", 0.0, time.time())


@dataclass
class UsageClock:
    """The monotonic clock of a file of usage, so that setting the clock back does not reset a quota.

    While the machine runs, it counts the seconds since the machine's start. Across a restart of the machine it follows
    the wall clock, and stands still where that was set back.

    Args:
        now: seconds that have passed for the file.
        last: the reading at that time.
    """

    now: float
    last: ClockReading

    def advance(self, reading: ClockReading) -> None:
        """Move forward to a reading; never back."""
        before = self.last
        if reading.boot and reading.boot == before.boot:
            self.now += max(0.0, reading.since - before.since)
            # Another process may have advanced the clock already: seconds that were counted are not counted again.
            reading = ClockReading(reading.boot, max(reading.since, before.since), reading.wall)
        else:
            self.now += max(0.0, reading.wall - before.wall)
        self.last = reading

    def facts(self) -> dict[str, str]:
        """The clock as it is kept in the file."""
        last = self.last
        return {"now": repr(self.now), "boot": last.boot, "since": repr(last.since), "wall": repr(last.wall)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, str]) -> UsageClock:
        """The clock that `facts` gave."""
        last = ClockReading(facts["boot"], float(facts["since"]), float(facts["wall"]))
        return cls(float(facts["now"]), last)


DAILY = {"queries": "queries_a_day", "rows": "rows_a_day", "sessions": "sessions_a_day", "bytes": "megabytes_a_day"}
"""What is counted over a day, and its entry in the file of limits."""
IN_ALL = {"queries": "queries_in_all", "rows": "rows_in_all"}
"""What is counted without end, and its entry in the file of limits."""
MEGABYTE = 1_000_000
LARGEST = 1 << 60


@dataclass(frozen=True)
class Limit:
    """The limits of one client, by what is counted; what is missing has no limit."""

    daily: Mapping[str, int] = field(default_factory=dict)
    in_all: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The content of a file of limits.

    Args:
        usage: path of the file of usage.
        default: limits of each client.
        clients: limits of clients that differ.
        models: limits of all clients together, by model.
    """

    usage: Path
    default: Limit = Limit()
    clients: Mapping[str, Limit] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, client: str) -> Limit:
        """The limits of a client."""
        return self.clients.get(account_of(client), self.default)


_Most = Annotated[
    Annotated[int, Meta(ge=0, le=LARGEST // MEGABYTE)] | None, Meta(description="a whole number of at least 0")
]


class _Model(msgspec.Struct, frozen=True):
    queries_in_all: _Most = None
    rows_in_all: _Most = None


class _Client(msgspec.Struct, frozen=True):
    queries_a_day: _Most = None
    rows_a_day: _Most = None
    sessions_a_day: _Most = None
    megabytes_a_day: _Most = None
    queries_in_all: _Most = None
    rows_in_all: _Most = None


class _File(msgspec.Struct, frozen=True):
    usage: Annotated[str, Meta(pattern=r"\A[^\0]+\Z", description="the file in which what is used is kept")] = ""
    default: Entries = {}
    clients: Entries = {}
    models: Entries = {}


def read_limits(path: str | Path) -> Limits:
    """Read a file of limits.

    Raises:
        ArgumentError: the file is missing or invalid; the text is one line that says what is wrong.
    """
    path = Path(path)
    try:
        file = read_table(_File, read_toml(path, "the limits", "limits"), "the file")
        usage = path.parent / (file.usage or f"{path.stem}.usage")
        if usage.resolve() == path.resolve():
            raise ArgumentError("usage names this file itself; name another")
        default = read_table(_Client, file.default, "[default]")
        clients = {}
        for name, table in file.clients.items():
            where = f"[clients.{name_of(name, 'the name of a table in [clients]')}]"
            if account_of(name) in clients:
                raise ArgumentError(f"{where} differs from another table in case alone, and both are one client's")
            clients[account_of(name)] = _limit(default, read_table(_Client, table, where))
        models = {}
        for name, table in file.models.items():
            where = f"[models.{model_name(name, 'the name of a table in [models]')}]"
            models[name] = _entries(IN_ALL, read_table(_Model, table, where))
    except ArgumentError as error:
        raise in_file(error, path) from None
    return Limits(usage, _limit(default), clients, models)


def _limit(*tables: _Client) -> Limit:
    """The limits of a client; entries of later tables go before those of earlier ones."""
    daily = _entries(DAILY, *tables)
    if "bytes" in daily:
        daily["bytes"] *= MEGABYTE
    return Limit(daily, _entries(IN_ALL, *tables))


def _entries(names: Mapping[str, str], *tables: _Client | _Model) -> dict[str, int]:
    """The limits that are set, by what is counted."""
    pairs = ((what, getattr(table, name)) for table in tables for what, name in names.items())
    return {what: most for what, most in pairs if most is not None}


FORMAT = "1"
DAY, SLOT = 86400, 900
EVERYBODY = "*"
LEAST_ROOM = 64 << 10
"""Bytes that the file's disk has room for while queries are counted."""
WAIT = 20.0
"""Seconds to wait for another process's transaction."""
UNCONFIRMED = 60.0
"""Seconds after an answer in which the loss of the server may have kept it from the client."""
_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS used (account TEXT, what TEXT, slot INTEGER, count INTEGER NOT NULL,
    PRIMARY KEY (account, what, slot)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS in_all (account TEXT, model TEXT, what TEXT, count INTEGER NOT NULL,
    PRIMARY KEY (account, model, what)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS asked (client TEXT, query TEXT, about TEXT NOT NULL, process TEXT NOT NULL,
    slot INTEGER NOT NULL, PRIMARY KEY (client, query)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Charge:
    """What one client is about to use.

    Args:
        client: its name.
        key: the fingerprint of the identity key that it proved; empty where it proved none.
        models: that it asks.
        counts: the amount of each thing that is counted.
        query: the client's name for the query, by which it may be repeated; empty where it may not.
    """

    client: str
    key: str
    models: tuple[str, ...]
    counts: Mapping[str, int]
    query: str = ""

    @property
    def accounts(self) -> list[str]:
        return [account_of(self.client), *([self.key] if self.key else [])]

    @property
    def about(self) -> str:
        """What has to be equal where the query is repeated."""
        return repr((self.key, self.models, sorted(self.counts.items())))


class Usage:
    """The file of usage of one party, open in one process until `close`.

    Args:
        path: of the file; made (mode 600) if it does not exist.
        party, role: to whom the file belongs.
        who: this party, in words, for error texts.
        reading: reads the machine's clocks.

    Raises:
        QuotaFileError: the file is another party's, damaged, or cannot be used.
    """

    def __init__(self, path: Path, party: str, role: str, who: str, reading: Callable[[], ClockReading] = read_clocks):
        self.path, self._who, self._reading = path, who, reading
        self._lock = threading.Lock()
        self._process = os.urandom(8).hex()
        self._processes = path.with_name(f"{path.name}.processes")
        self._alive: int | None = None
        self._failed = False
        try:
            self.new = not path.exists()
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._processes.mkdir(mode=0o700, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise QuotaFileError(f"cannot keep what is used in {path}: {_why(error)}") from None
        try:
            with self._writing():
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._check(party, role)
                self._mark_alive()
        except BaseException:
            self.close()
            raise

    def _mark_alive(self) -> None:
        """Mark this process as a user of the file by a locked file, and remove the marks of processes that ended."""
        # `_is_alive` removes the mark of a process that holds no lock on it: the system has unlocked it at its end.
        for name in os.listdir(self._processes):
            self._is_alive(name)
        self._alive = os.open(self._processes / self._process, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)

    def _check(self, party: str, role: str) -> None:
        own = {"format": FORMAT, "party": party, "role": role}
        held = dict(self._db.execute("SELECT name, value FROM about"))
        if not held:
            self._write_facts({**own, **UsageClock(0.0, self._reading()).facts()})
        elif {k: held.get(k) for k in own} != own:
            raise QuotaFileError(
                f"{self.path} has what is used of '{held.get('party')}' as {held.get('role')} (format "
                f"{held.get('format')}), and this is '{party}' as {role}; name another file"
            )

    def charge(self, charge: Charge, limits: Limits) -> bool:
        """Count a charge, if the limits allow it.

        Returns:
            Whether it was counted; false for a repeated query that was charged before.

        Raises:
            QuotaError: the limits do not allow it; nothing is counted.
            QuotaFileError: it cannot be counted.
        """
        with self._writing():
            now = self._now()
            if charge.query and self._is_repetition(charge):
                return False
            # In one transaction, so that two processes cannot both find room for the last query.
            self._check_limits(charge, limits, now)
            self._count(charge, now)
            return True

    def end(self, charge: Charge, extra: Mapping[str, int], again: bool) -> None:
        """Record that a charged query has ended.

        Args:
            extra: amounts that are known only now.
            again: whether the query may be repeated without a charge.

        Raises:
            QuotaFileError: it cannot be written.
        """
        with self._writing(full=False):  # not lost if the process is killed; a power cut may only allow a repetition
            more = Charge(charge.client, charge.key, charge.models, {k: v for k, v in extra.items() if v})
            self._count(more, self._now())
            if charge.query:
                mine = "client = ? AND query = ? AND process = ?"
                change = "UPDATE asked SET process = '' WHERE " if again else "DELETE FROM asked WHERE "
                self._db.execute(change + mine, (charge.client, charge.query, self._process))

    def allow_repetition(self, charge: Charge) -> None:
        """Let a query that has ended be repeated without a charge. Raises QuotaFileError."""
        with self._writing(full=False):
            row = (charge.client, charge.query, charge.about, "", int(self._now() // SLOT))
            self._db.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", row)

    def unready(self) -> str:
        """Why no query can be counted now, so that none is served; empty while queries can be counted."""
        try:
            if files.free_bytes(self.path.parent) < LEAST_ROOM:
                return f"what is used cannot be counted, and is not served: make room for {self.path}"
            if self._failed:
                with self._writing(full=False):
                    self._db.execute("UPDATE about SET value = value WHERE name = 'format'")
        except (QuotaFileError, OSError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            with suppress(sqlite3.Error):
                self._db.close()
            if self._alive is not None:
                with suppress(OSError):
                    (self._processes / self._process).unlink()
                os.close(self._alive)
                self._alive = None

    def _is_repetition(self, charge: Charge) -> bool:
        """Whether a query was charged before and may be repeated: it was marked so, or its process has ended."""
        where, values = "client = ? AND query = ?", (charge.client, charge.query)
        found = self._db.execute(f"SELECT about, process FROM asked WHERE {where}", values).fetchone()
        if found is None or found[0] != charge.about or self._is_alive(found[1]):
            return False
        self._db.execute(f"UPDATE asked SET process = ? WHERE {where}", (self._process, *values))
        return True

    def _is_alive(self, process: str) -> bool:
        if not process:
            return False
        try:
            handle = os.open(self._processes / process, os.O_RDWR)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self._processes / process).unlink(missing_ok=True)
            return False
        except OSError:
            return True
        finally:
            os.close(handle)

    def _check_limits(self, charge: Charge, limits: Limits, now: float) -> None:
        limit = limits.of(charge.client)
        for account in charge.accounts:
            for what, most in limit.daily.items():
                wanted = charge.counts.get(what, 0)
                used = self._day(account, what, now)
                # Bytes are known afterwards: there has to be room for one.
                if (sum(used.values()) >= most) if what == "bytes" else wanted and sum(used.values()) + wanted > most:
                    raise QuotaError(self._daily_text(what, most, used, max(1, wanted), now))
            for model in charge.models:
                for what, most in limit.in_all.items():
                    self._check_in_all(account, model, what, most, charge.counts.get(what, 0))
        for model in charge.models:
            for what, most in limits.models.get(model, {}).items():
                self._check_in_all(EVERYBODY, model, what, most, charge.counts.get(what, 0))

    def _daily_text(self, what: str, most: int, used: Mapping[int, int], wanted: int, now: float) -> str:
        amount = (
            (lambda n: f"{n / 1e6:g} MB") if what == "bytes" else (lambda n: f"{n} {what if n != 1 else what[:-1]}")
        )
        said = f"{self._who} lets this client use {amount(most)} a day"
        if wanted > most:
            return f"{said}, and {amount(wanted)} were asked for at once; ask for fewer"
        left, free = sum(used.values()), now
        for slot, count in sorted(used.items()):
            if left + wanted <= most:
                break
            left, free = left - count, (slot + 1) * SLOT + DAY
        asked = "" if what == "bytes" else f", and {amount(wanted)} more asked for"
        return f"{said}; {amount(sum(used.values()))} are used{asked}; there is room again in {_span(free - now)}"

    def _check_in_all(self, account: str, model: str, what: str, most: int, wanted: int) -> None:
        if not wanted:
            return
        query = "SELECT count FROM in_all WHERE account = ? AND model = ? AND what = ?"
        (used,) = self._db.execute(query, (account, model, what)).fetchone() or (0,)
        if used + wanted <= most:
            return
        if account == EVERYBODY:
            raise QuotaError(
                f"{self._who} has answered as much of '{model}' as it will, to whoever asks; ask its owner"
            )
        raise QuotaError(
            f"{self._who} lets this client ask '{model}' for {most} {what} in all; {used} are used, and {wanted} more "
            f"asked for; they do not become free again: ask its owner for more"
        )

    def _day(self, account: str, what: str, now: float) -> dict[int, int]:
        since = int((now - DAY) // SLOT)
        query = "SELECT slot, count FROM used WHERE account = ? AND what = ? AND slot >= ?"
        return dict(self._db.execute(query, (account, what, since)))

    def _count(self, charge: Charge, now: float) -> None:
        slot = int(now // SLOT)
        add = "ON CONFLICT DO UPDATE SET count = count + excluded.count"
        for what, count in charge.counts.items():
            for account in charge.accounts:
                self._db.execute(f"INSERT INTO used VALUES (?, ?, ?, ?) {add}", (account, what, slot, count))
            for account in (*charge.accounts, EVERYBODY):
                for model in charge.models:
                    self._db.execute(f"INSERT INTO in_all VALUES (?, ?, ?, ?) {add}", (account, model, what, count))
        # What has left the day's window is dropped here, so that the file does not grow.
        old = int((now - DAY) // SLOT)
        self._db.execute("DELETE FROM used WHERE slot < ?", (old,))
        self._db.execute("DELETE FROM asked WHERE slot < ?", (old,))
        if charge.query:
            row = (charge.client, charge.query, charge.about, self._process, slot)
            self._db.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", row)

    def _now(self) -> float:
        """Advance the file's clock, and return its time."""
        clock = UsageClock.from_facts(dict(self._db.execute("SELECT name, value FROM about")))
        clock.advance(self._reading())
        self._write_facts(clock.facts())
        return clock.now

    def _write_facts(self, about: Mapping[str, str]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", list(about.items()))

    @contextmanager
    def _writing(self, full: bool = True) -> Iterator[None]:
        """A transaction in the block."""
        try:
            with self._lock:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                    self._failed = False
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                    raise
        except SectorchError:
            raise
        except (sqlite3.Error, OSError, ValueError, KeyError) as error:
            self._failed = True
            raise QuotaFileError(
                f"what is used cannot be counted ({_why(error)}), and what is not counted is not served"
            ) from None


@dataclass(frozen=True)
class UsageRow:
    """What one account has used. `model` is empty for amounts of a day, which count all models."""

    account: str
    model: str
    what: str
    used: int


def read_usage(path: Path) -> list[UsageRow]:
    """What each account has used; nothing is changed.

    Raises:
        QuotaFileError: the file is missing or cannot be read.
    """
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=WAIT)
        try:
            clock = UsageClock.from_facts(dict(db.execute("SELECT name, value FROM about")))
            clock.advance(read_clocks())
            since = int((clock.now - DAY) // SLOT)
            daily = "SELECT account, '', what, SUM(count) FROM used WHERE slot >= ? GROUP BY account, what"
            rows: list[tuple] = [
                *db.execute(daily, (since,)), *db.execute("SELECT account, model, what, count FROM in_all"),
            ]  # fmt: skip
        finally:
            db.close()
    except (sqlite3.Error, OSError, ValueError, KeyError) as error:
        raise QuotaFileError(f"cannot read what is used in {path}: {_why(error)}") from None
    return sorted((UsageRow(*row) for row in rows), key=lambda row: (row.account, row.model, row.what))


def _span(seconds: float) -> str:
    minutes = max(1, int(-(-seconds // 60)))
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def limits(arguments: Sequence[str] | None = None) -> int:
    """`sectorch limits`."""
    p = Parser(
        "limits",
        "Check a file of limits, and show what clients have used of them. Nothing is changed.",
        ["sectorch limits limits.toml"],
    )
    p.add_argument("file", type=Path, help="limits, of --limits at a server or an answering party")
    p.takes_json("all of it")
    return command_status(p, arguments, _limits)


def _limits(options: argparse.Namespace, console: Console) -> None:
    found = read_limits(options.file)
    rows = read_usage(found.usage) if found.usage.exists() else []
    lines = [(row, most) for row in rows if (most := _limit_of(found, row)) is not None or row.what != "sessions"]
    if options.json:
        names = ("account", "model", "what", "used")
        print_json([{**{n: getattr(row, n) for n in names}, "limit": most} for row, most in lines])
        return
    table = Table("account", "model", "counted", "over", "used", "limit", box=None)
    for row, most in lines:
        over = "all time" if row.model else "a day"
        account = "all clients" if row.account == EVERYBODY else row.account
        cells = (account, row.model, row.what, over, _amount(row.what, row.used))
        table.add_row(*(Text(readable(cell)) for cell in (*cells, "" if most is None else _amount(row.what, most))))
    if lines:
        console.print(table)
    console.print(f"{found.usage}: {'nothing is used yet' if not rows else f'{len(rows)} counts'}", highlight=False)


def _limit_of(found: Limits, row: UsageRow) -> int | None:
    """The limit of a row. That of a key is the limit of the name that it came with, which is not known here."""
    if row.account == EVERYBODY:
        return found.models.get(row.model, {}).get(row.what)
    if not NAME.fullmatch(row.account) or row.account.startswith("SHA256:"):
        return None
    limit = found.of(row.account)
    return limit.in_all.get(row.what) if row.model else limit.daily.get(row.what)


def _amount(what: str, count: int) -> str:
    return f"{count / MEGABYTE:.1f} MB" if what == "bytes" else str(count)


class Quotas:
    """The limits of one party, and what clients have used of them.

    Args:
        limits: path of the file of limits.
        party, role: to whom they belong.

    Raises:
        ArgumentError: the file of limits is invalid.
        QuotaFileError: the file of usage cannot be used.
    """

    def __init__(self, limits: str | Path, party: str, role: str):
        self.path = Path(limits)
        self.limits: Limits = read_limits(limits)
        who = "the server" if role == "S" else f"'{party}'"
        self.usage = Usage(self.limits.usage, party, role, who)
        if self.usage.new:
            log.warning("%s was not there: what clients use is counted from now on", self.usage.path)

    def __repr__(self) -> str:
        return f"Quotas({self.path}, {self.usage.path})"

    def reload(self) -> None:
        """Read the file of limits again. If it is invalid, the former limits stay."""
        try:
            limits = read_limits(self.path)
        except ArgumentError as error:
            log.error("the limits stay as they were: %s", error)
            return
        log.info("the limits in %s hold now", self.path)
        self.limits = Limits(self.limits.usage, limits.default, limits.clients, limits.models)

    def session(self, client: str, key: str, models: Sequence[str]) -> None:
        """Charge a session. Raises QuotaError, QuotaFileError."""
        self._charge(Charge(client, key, tuple(models), {"sessions": 1}), "session")

    @contextmanager
    def query(
        self, asked: ModelQuery, rows: int | None, client: str, key: str, models: Sequence[str],
        channels: Sequence[Channel], others: Sequence[Channel],
    ) -> Iterator[Charge]:  # fmt: skip
        """Charge a query, and serve it in the block, which gets the charge.

        Args:
            asked: the request.
            rows: number of its rows.
            client, key, models: see `Charge`.
            channels: whose bytes are counted.
            others: channels to other parties than the client, which cannot make them fail.

        Raises:
            QuotaError: the limits do not allow the query; it is not served.
            QuotaFileError: the charge cannot be written; the query is not served, or its end is not recorded.
        """
        counts = {} if isinstance(asked, Prepare) else {"queries": 1, "rows": max(1, rows or 0)}
        charge = Charge(client, key, tuple(models), counts, asked.query if counts else "")
        all_channels = {*channels, *others}
        before, sent = _bytes_carried(channels), _bytes_sent(all_channels)
        self._charge(charge, asked.do)
        again = True
        try:
            yield charge
            again = False
        except BaseException:
            again = _bytes_sent(all_channels) == sent or any(channel.link.closed is not None for channel in others)
            raise
        finally:
            self.usage.end(charge, {"bytes": _bytes_carried(channels) - before}, again)

    @contextmanager
    def next_query(self, before: Charge | None, channel: Channel) -> Iterator[None]:
        """Wait in the block for what follows a query that was answered.

        Where the server is lost instead within `UNCONFIRMED` seconds, it may not have passed the answer on, and the
        query may be repeated without a charge. A client cannot bring that about; one that lies about its answer then
        gets one query.
        """
        answered = time.monotonic()
        try:
            yield
        except NetworkError:
            lost = channel.link.closed is not None and time.monotonic() - answered < UNCONFIRMED
            if lost and before is not None and before.query:
                self.usage.allow_repetition(before)
            raise

    def _charge(self, charge: Charge, what: str) -> None:
        try:
            counted = self.usage.charge(charge, self.limits)
        except QuotaError as error:
            write(log, "over its limit", client=charge.client, asked=what, why=str(error))
            raise
        if not counted:
            write(log, "asked again", client=charge.client, asked=what, models=",".join(charge.models))

    def close(self) -> None:
        """Close the file of usage."""
        self.usage.close()


def _bytes_carried(channels: Sequence[Channel]) -> int:
    return sum(sum(channel.byte_counts) for channel in channels)


def _bytes_sent(channels: Iterable[Channel]) -> int:
    return sum(channel.byte_counts[1] for channel in channels)


def records_unready(receipts: Receipts | None, quotas: Quotas | None) -> str:
    """Why nothing could be recorded now that has to be before it is served; empty if it could."""
    return (receipts.unready() if receipts else "") or (quotas.usage.unready() if quotas else "")
