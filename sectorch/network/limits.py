"""What clients have used, on disk: a SQLite file that several processes of one party share.

A charge is on the disk (`synchronous=FULL`) before anything of what it is for is done. It is made and compared with its
limits in one transaction, so that two that come at once are not both the last one.

    used      by account, model, thing and quarter of an hour; what is older than a day goes
    in_all    by account, model and thing, for good; `*` is all clients together
    asked     queries that may be asked again without a charge, by the name that the client gave them

An account is a client's name, or the identity key that it proved: who has two names has one key, and who makes a new
key keeps the name. Each counts for itself.
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

from ..cli.command import Parser, command_status, print_json
from ..errors import ArgumentError, QuotaError, QuotaFileError, SectorchError
from .log import write
from .messages import Entries, ModelQuery, Prepare, in_file, read_table, read_toml
from .names import NAME, model_name, name_of, readable
from .wire.channel import Channel

# What a client may ask of a party: limits in a file, and what it has used of them, which lasts.


# Time that only goes on, for limits of a day: no setting of the clock forgives what was used.
#
# While the machine runs, time is what it counts since it was started, whatever its clock is set to. Over a restart of
# the machine it is the clock, and no time has passed where that was set back.


_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockReading:
    """What a machine's clocks say.

    Args:
        boot: a name for the time since its start; empty where there is none. since: seconds since then. wall: the
            clock, in seconds.
    """

    boot: str
    since: float
    wall: float


def read_clocks() -> ClockReading:
    """Of this machine, now."""
    try:
        boot = _BOOT.read_text().strip()
        return ClockReading(boot, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
    except (OSError, AttributeError):  # another system than Linux
        return ClockReading("", 0.0, time.time())


@dataclass
class UsageClock:
    """The time of one file of usage, as it was written last.

    Args:
        now: seconds that have passed for it. last: the reading then.
    """

    now: float
    last: ClockReading

    def advance(self, reading: ClockReading) -> None:
        """Go on to a reading; never back."""
        before = self.last
        if reading.boot and reading.boot == before.boot:
            self.now += max(0.0, reading.since - before.since)
            # Of several processes one may have read earlier than another: what was counted is not counted again.
            reading = ClockReading(reading.boot, max(reading.since, before.since), reading.wall)
        else:
            self.now += max(0.0, reading.wall - before.wall)
        self.last = reading


Read = Callable[[], ClockReading]


# The file of a party's limits.
#
#     usage = "limits.usage"      # where what is used is kept; beside this file, with this ending, unless named
#
#     [default]                   # of each client
#     queries_a_day = 1000
#     rows_a_day = 20000
#     sessions_a_day = 500
#     megabytes_a_day = 20000
#     queries_in_all = 50000      # of each model, for good
#     rows_in_all = 1000000
#
#     [clients.hospital-a]        # what differs for one
#     rows_a_day = 100000
#
#     [models.hospital-b]         # of all clients together
#     rows_in_all = 5000000
#
# What is not named has no limit. A day is the last 24 hours, whenever one looks.


DAILY = {"queries": "queries_a_day", "rows": "rows_a_day", "sessions": "sessions_a_day", "bytes": "megabytes_a_day"}
"""What is counted over a day, and its entry."""
IN_ALL = {"queries": "queries_in_all", "rows": "rows_in_all"}
"""What is counted for good, and its entry."""
MEGABYTE = 1_000_000
LARGEST = 1 << 60


@dataclass(frozen=True)
class Limit:
    """Of one client: the most of each thing, by what is counted; what is missing has no limit."""

    daily: Mapping[str, int] = field(default_factory=dict)
    in_all: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What a file of limits says.

    Args:
        usage: the file in which what is used is kept.
        default, clients: of each client, and of those that differ.
        models: of all clients together, by model.
    """

    usage: Path
    default: Limit = Limit()
    clients: Mapping[str, Limit] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, client: str) -> Limit:
        """What this client may ask."""
        return self.clients.get(client, self.default)


def read_limits(path: str | Path) -> Limits:
    """The limits in a file.

    Raises:
        ArgumentError: it is not there, or not one; in one line, with what is wrong in it.
    """
    path = Path(path)
    try:
        return _parsed(read_toml(path, "the limits", "limits"), path)
    except ArgumentError as error:
        raise in_file(error, path) from None


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


def _parsed(said: object, path: Path) -> Limits:
    file = read_table(_File, said, "the file")
    usage = path.parent / (file.usage or f"{path.stem}.usage")
    if usage.resolve() == path.resolve():
        raise ArgumentError("usage names this file itself; name another")
    default = read_table(_Client, file.default, "[default]")
    clients = {}
    for name, table in file.clients.items():
        own = read_table(_Client, table, f"[clients.{name_of(name, 'the name of a table in [clients]')}]")
        clients[name] = _limit(own, default)
    models = {
        name: _numbers(
            read_table(_Model, table, f"[models.{model_name(name, 'the name of a table in [models]')}]"), IN_ALL
        )
        for name, table in file.models.items()
    }
    return Limits(usage, _limit(default), clients, models)


def _limit(own: _Client, default: _Client | None = None) -> Limit:
    """A client's limits, and where it has none those of each."""
    daily, in_all = ({**_numbers(default, known), **_numbers(own, known)} for known in (DAILY, IN_ALL))
    if "bytes" in daily:
        daily["bytes"] *= MEGABYTE
    return Limit(daily, in_all)


def _numbers(entries: _Client | _Model | None, known: Mapping[str, str]) -> dict[str, int]:
    """What has a limit, by what is counted."""
    found = {what: getattr(entries, name, None) for what, name in known.items()}
    return {what: most for what, most in found.items() if most is not None}


FORMAT = "1"
DAY, SLOT = 86400, 900
EVERYBODY = "*"
WAIT = 20.0
"""Seconds to wait for another process's charge."""
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
        client: its name. key: the fingerprint of the identity key that it proved; empty where it proved none.
        models: that it asks. counts: how much of what.
        query: its own name for what it asks, by which it may ask again; empty where it may not.
    """

    client: str
    key: str
    models: tuple[str, ...]
    counts: Mapping[str, int]
    query: str = ""

    @property
    def accounts(self) -> list[str]:
        return [self.client, *([self.key] if self.key else [])]

    @property
    def about(self) -> str:
        """What has to be the same where it is asked again."""
        return repr((self.key, self.models, sorted(self.counts.items())))


class Usage:
    """The file of one party, open in one process. `close` lets go of it.

    Args:
        path: made (mode 600) if it is not there.
        party, role: whose it is.
        who: this party, in words, for whom it refuses.
        reading: the machine's clocks.

    Raises:
        QuotaFileError: it is another party's, damaged, or cannot be used.
    """

    def __init__(self, path: Path, party: str, role: str, who: str, reading: Callable[[], ClockReading] = read_clocks):
        self.path, self._who, self._reading = path, who, reading
        self._lock = threading.Lock()
        self._process = os.urandom(8).hex()
        self._processes = path.with_name(f"{path.name}.processes")
        self._alive: int | None = None
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
                self._live()
        except BaseException:
            self.close()
            raise

    def _live(self) -> None:
        """This process is one of those that have the file; traces of those that ended are removed."""
        for name in os.listdir(self._processes):
            self._lives(name)
        self._alive = os.open(self._processes / self._process, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)

    def _check(self, party: str, role: str) -> None:
        own = {"format": FORMAT, "party": party, "role": role}
        held = dict(self._db.execute("SELECT name, value FROM about"))
        if not held:
            reading = self._reading()
            self._say(own)
            self._keep(UsageClock(0.0, reading))
        elif {k: held.get(k) for k in own} != own:
            raise QuotaFileError(
                f"{self.path} has what is used of '{held.get('party')}' as {held.get('role')} (format "
                f"{held.get('format')}), and this is '{party}' as {role}; name another file"
            )

    def charge(self, charge: Charge, limits: Limits) -> bool:
        """Count it, if that keeps within the limits; whether it is counted now, and not an earlier time.

        Raises:
            QuotaError: it does not; nothing is counted. QuotaFileError: it cannot be counted.
        """
        with self._writing():
            now = self._now()
            if charge.query and self._paid(charge):
                return False
            self._within(charge, limits, now)
            self._count(charge, now)
            return True

    def end(self, charge: Charge, extra: Mapping[str, int], again: bool) -> None:
        """What was charged has ended.

        Args:
            extra: what is counted now that it is known. again: whether it may be asked again without a charge.

        Raises:
            QuotaFileError: it cannot be written.
        """
        with self._writing(full=False):  # killed or not, the system has it; a power cut may leave a query to ask again
            more = Charge(charge.client, charge.key, charge.models, {k: v for k, v in extra.items() if v})
            self._count(more, self._now())
            if charge.query:
                mine = "client = ? AND query = ? AND process = ?"
                change = "UPDATE asked SET process = '' WHERE " if again else "DELETE FROM asked WHERE "
                self._db.execute(change + mine, (charge.client, charge.query, self._process))

    def close(self) -> None:
        """Let go of it. It can be charged no more."""
        with self._lock:
            with suppress(sqlite3.Error):
                self._db.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._alive is not None:
            with suppress(OSError):
                (self._processes / self._process).unlink()
            os.close(self._alive)
            self._alive = None

    def _paid(self, charge: Charge) -> bool:
        """Whether it was charged when it was asked before, and that ended because a process or the server went away."""
        where, values = "client = ? AND query = ?", (charge.client, charge.query)
        found = self._db.execute(f"SELECT about, process FROM asked WHERE {where}", values).fetchone()
        if found is None or found[0] != charge.about or self._lives(found[1]):
            return False
        self._db.execute(f"UPDATE asked SET process = ? WHERE {where}", (self._process, *values))
        return True

    def _lives(self, process: str) -> bool:
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

    def _within(self, charge: Charge, limits: Limits, now: float) -> None:
        limit = limits.of(charge.client)
        for account in charge.accounts:
            for what, most in limit.daily.items():
                wanted = charge.counts.get(what, 0)
                used = self._day(account, what, now)
                # Bytes are known afterwards: there has to be room for one.
                if (sum(used.values()) >= most) if what == "bytes" else wanted and sum(used.values()) + wanted > most:
                    raise QuotaError(self._daily(what, most, used, max(1, wanted), now))
            for model in charge.models:
                for what, most in limit.in_all.items():
                    self._in_all(account, model, what, most, charge.counts.get(what, 0))
        for model in charge.models:
            for what, most in limits.models.get(model, {}).items():
                self._in_all(EVERYBODY, model, what, most, charge.counts.get(what, 0))

    def _daily(self, what: str, most: int, used: Mapping[int, int], wanted: int, now: float) -> str:
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

    def _in_all(self, account: str, model: str, what: str, most: int, wanted: int) -> None:
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
        old = int((now - DAY) // SLOT)
        self._db.execute("DELETE FROM used WHERE slot < ?", (old,))
        self._db.execute("DELETE FROM asked WHERE slot < ?", (old,))
        if charge.query:
            row = (charge.client, charge.query, charge.about, self._process, slot)
            self._db.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", row)

    def _now(self) -> float:
        """The time that has passed, after which it is written down."""
        held = dict(self._db.execute("SELECT name, value FROM about"))
        clock = UsageClock(float(held["now"]), ClockReading(held["boot"], float(held["since"]), float(held["wall"])))
        clock.advance(self._reading())
        self._keep(clock)
        return clock.now

    def _keep(self, clock: UsageClock) -> None:
        last = clock.last
        self._say({"now": repr(clock.now), "boot": last.boot, "since": repr(last.since), "wall": repr(last.wall)})

    def _say(self, about: Mapping[str, str]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", list(about.items()))

    @contextmanager
    def _writing(self, full: bool = True) -> Iterator[None]:
        """A transaction, which is whole or not there."""
        try:
            with self._lock:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                    raise
        except SectorchError:
            raise
        except (sqlite3.Error, OSError, ValueError, KeyError) as error:
            raise QuotaFileError(
                f"what is used cannot be counted ({_why(error)}), and what is not counted is not served"
            ) from None


@dataclass(frozen=True)
class UsageRow:
    """What one account has used. `model` is empty for what counts over a day, over all models."""

    account: str
    model: str
    what: str
    used: int


def read_usage(path: Path) -> list[UsageRow]:
    """What is used by everybody, without changing anything.

    Raises:
        QuotaFileError: it is not there, or cannot be read.
    """
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=WAIT)
        try:
            held = dict(db.execute("SELECT name, value FROM about"))
            clock = UsageClock(
                float(held["now"]), ClockReading(held["boot"], float(held["since"]), float(held["wall"]))
            )
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


# `sectorch limits`: what clients may ask of a party, and what they have used.


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


def _most(found: Limits, row: UsageRow) -> int | None:
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


# What a party charges of queries and sessions, and what it does not charge twice.
#
# A query is charged before this party does anything of it: one query, and a row for each row of the batch (one at
# least). A step of a language model is a query with a row for each text, which is a row a token. Preparing is charged
# by its bytes alone, as nothing is learned from it; what was prepared is charged when it is asked. Bytes are counted at
# the end.
#
# Nothing is given back, however a query ends, with one exception. It may be asked again, under the same name and as
# large, where this party had sent nothing of it, or where it ended because a process of this party or the server went
# away before this party had done its part. Who asks cannot bring that about: a query that ended because its asker went
# away, or gave it up, is paid for.


log = logging.getLogger("sectorch.limits")


class Quotas:
    """The limits of one party, and what is used of them.

    Args:
        limits: the file in which they stand.
        party, role: whose they are.

    Raises:
        ArgumentError: that is no file of limits. QuotaFileError: what is used cannot be kept.
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
        """Read the limits anew; what is used stays where it is. Where they are wrong, those that were read hold."""
        try:
            limits = read_limits(self.path)
        except ArgumentError as error:
            log.error("the limits stay as they were: %s", error)
            return
        log.info("the limits in %s hold now", self.path)
        self.limits = Limits(self.limits.usage, limits.default, limits.clients, limits.models)

    def session(self, client: str, key: str, models: Sequence[str]) -> None:
        """A client opens a session. Raises QuotaError, QuotaFileError."""
        self._charge(Charge(client, key, tuple(models), {"sessions": 1}), "session")

    @contextmanager
    def query(
        self, asked: ModelQuery, rows: int | None, client: str, key: str, models: Sequence[str],
        channels: Sequence[Channel], others: Sequence[Channel],
    ) -> Iterator[None]:  # fmt: skip
        """A query is served in the block.

        Args:
            asked: the request. rows: that it is for.
            channels: over which what it takes is counted. others: than the client's, whose end is not its doing.

        Raises:
            QuotaError: it is not served. QuotaFileError: it is not served, or may not count as served.
        """
        counts = {} if isinstance(asked, Prepare) else {"queries": 1, "rows": max(1, rows or 0)}
        charge = Charge(client, key, tuple(models), counts, asked.query if counts else "")
        everywhere = {*channels, *others}
        before, sent = _carried(channels), _sent(everywhere)
        self._charge(charge, asked.do)
        again = True
        try:
            yield
            again = False
        except BaseException:
            again = _sent(everywhere) == sent or any(channel.link.closed is not None for channel in others)
            raise
        finally:
            self.usage.end(charge, {"bytes": _carried(channels) - before}, again)

    def _charge(self, charge: Charge, what: str) -> None:
        try:
            counted = self.usage.charge(charge, self.limits)
        except QuotaError as error:
            write(log, "over its limit", client=charge.client, asked=what, why=str(error))
            raise
        if not counted:
            write(log, "asked again", client=charge.client, asked=what, models=",".join(charge.models))

    def close(self) -> None:
        """Let go of what is used."""
        self.usage.close()


def _carried(channels: Sequence[Channel]) -> int:
    return sum(sum(channel.carried) for channel in channels)


def _sent(channels: Iterable[Channel]) -> int:
    return sum(channel.carried[1] for channel in channels)
