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

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import QuotaError, QuotaFileError, SectorchError
from . import clock as clocks
from .clock import Clock, Reading
from .file import Limits

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

    def __init__(self, path: Path, party: str, role: str, who: str, reading: Callable[[], Reading] = clocks.read):
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
            self._keep(Clock(0.0, reading))
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
        clock = Clock(float(held["now"]), Reading(held["boot"], float(held["since"]), float(held["wall"])))
        clock.advance(self._reading())
        self._keep(clock)
        return clock.now

    def _keep(self, clock: Clock) -> None:
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
class Row:
    """What one account has used. `model` is empty for what counts over a day, over all models."""

    account: str
    model: str
    what: str
    used: int


def shown(path: Path) -> list[Row]:
    """What is used by everybody, without changing anything.

    Raises:
        QuotaFileError: it is not there, or cannot be read.
    """
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=WAIT)
        try:
            held = dict(db.execute("SELECT name, value FROM about"))
            clock = Clock(float(held["now"]), Reading(held["boot"], float(held["since"]), float(held["wall"])))
            clock.advance(clocks.read())
            since = int((clock.now - DAY) // SLOT)
            daily = "SELECT account, '', what, SUM(count) FROM used WHERE slot >= ? GROUP BY account, what"
            rows: list[tuple] = [
                *db.execute(daily, (since,)), *db.execute("SELECT account, model, what, count FROM in_all"),
            ]  # fmt: skip
        finally:
            db.close()
    except (sqlite3.Error, OSError, ValueError, KeyError) as error:
        raise QuotaFileError(f"cannot read what is used in {path}: {_why(error)}") from None
    return sorted((Row(*row) for row in rows), key=lambda row: (row.account, row.model, row.what))


def _span(seconds: float) -> str:
    minutes = max(1, int(-(-seconds // 60)))
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
