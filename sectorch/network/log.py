"""Events at a party, none of which holds a secret: they go to its log, and to watchers such as metrics and traces.

The log has one line for each event, with facts as NAME=VALUE. A value that is more than a word is in JSON's quotes,
which escape what controls a terminal or ends a line; so text of another party stays within its value. `LineFormatter`
escapes lines of other loggers, and `JsonFormatter` writes each line as a JSON object.

    query client=alice key=SHA256:... asked=predict rows=32 model=3f0c... learned=result outcome=done seconds=0.061
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from .. import files
from ..choreography import Party
from ..choreography.ledger import Observer
from ..errors import ReceiptError
from .receipts import Receipts

QUERIES = logging.getLogger("sectorch.query")
FORMATS = ("text", "json")
STRANGERS = ("refused",)
"""Events that a peer without a certificate can cause, as often as it likes."""
MOST, PERIOD = 100, 60.0
"""Lines of such an event in a period of so many seconds; the next line has the number of those left out (`unsaid`)."""
_WORD = re.compile(r"[A-Za-z0-9_.@:+/,-]+")


class Watcher:
    """Gets the events of this process. Its methods are called from many threads, and do not raise."""

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
        """Take an event; the log's line of it leaves out facts that are None."""

    def step(self, name: str, trace: object, facts: dict[str, Any]) -> AbstractContextManager[Any]:
        """A context for a step. The step `query` has others within it, in the same thread.

        Args:
            trace: what another party's `trace_context` gave, as it came over the network; None if nothing came.
        """
        return nullcontext()

    def trace_context(self) -> str | None:
        """What the other parties get for their `step`: the context of the step that this thread is in."""
        return None


_WATCHERS: tuple[Watcher, ...] = ()


def watch(watcher: Watcher) -> Callable[[], None]:
    """Give a watcher all events from now on; returns a function that ends this."""
    global _WATCHERS
    _WATCHERS = (*_WATCHERS, watcher)

    def end() -> None:
        global _WATCHERS
        _WATCHERS = tuple(other for other in _WATCHERS if other is not watcher)

    return end


@contextmanager
def step(name: str, trace: object = None, **facts: Any) -> Iterator[None]:
    """Show the block to the watchers as a step of that name."""
    with ExitStack() as stack:
        for watcher in _WATCHERS:
            stack.enter_context(watcher.step(name, trace, facts))
        yield


def trace_entry() -> dict[str, str]:
    """The entry `trace` of a request, if there are traces: it ties the other parties' steps to this thread's step."""
    found = next((trace for watcher in _WATCHERS if (trace := watcher.trace_context()) is not None), None)
    return {} if found is None else {"trace": found}


def write(log: logging.Logger, event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Write a line of an event, and give the event to the watchers; the line leaves out facts that are None.

    Of events that strangers cause there are `MOST` lines in a `PERIOD`, so that they cannot fill a disk. Watchers get
    all of them.
    """
    within_limit = True
    if event in STRANGERS:
        within_limit, unsaid = _LINE_LIMITS.setdefault(event, _LineLimit()).count()
        facts = {**facts, "unsaid": unsaid or None}
    if within_limit:
        text = " ".join([event, *(f"{k}={_quoted(v)}" for k, v in facts.items() if v is not None)])
        log.log(level, "%s", text, extra={"event": event, "facts": facts})
    for watcher in _WATCHERS:
        watcher.on_event(event, facts)


class _LineLimit:
    """Counts the lines of one event."""

    def __init__(self):
        self._lock = threading.Lock()
        self._since, self._lines, self._unsaid = -PERIOD, 0, 0

    def count(self) -> tuple[bool, int]:
        """Count an event; returns whether it may have a line, and how many had none since the last line."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= PERIOD:
                self._since, self._lines = now, 0
            if self._lines >= MOST:
                self._unsaid += 1
                return False, 0
            self._lines += 1
            unsaid, self._unsaid = self._unsaid, 0
            return True, unsaid


_LINE_LIMITS: dict[str, _LineLimit] = {}


def _quoted(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


class TrafficCount(Observer):
    """Counts the bytes of the messages that one party sends and receives."""

    def __init__(self, me: Party):
        self._me, self.bytes = me, 0

    def message(self, line: Any, value: Any) -> None:
        if self._me in (line.src, line.dst):
            self.bytes += line.bytes


@dataclass
class QueryFacts:
    """A query that is logged: the number of its receipt's line, if there is one, and further facts.

    Attributes:
        more: for the log. signed: for the receipt of its end.
    """

    number: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    signed: dict[str, str] = field(default_factory=dict)


@contextmanager
def query(
    me: Party,
    receipts: Receipts | None = None,
    session: str = "",
    call: int = 0,
    trace: object = None,
    commitment: str | None = None,
    **facts: Any,
) -> Iterator[QueryFacts]:
    """Log the query that runs in the block when it ends, and write its receipts, if receipts are kept.

    Args:
        me: this party.
        session, call: the query's name in the receipts of all parties.
        trace: see `Watcher.step`.
        commitment: for the receipt alone; see `receipts.AskedLine`.

    Raises:
        ReceiptError: a receipt cannot be written. The block is not entered, or its result must not be used.
    """
    outcome, number, head, failed, asked = "done", None, None, None, QueryFacts()
    moved, since = TrafficCount(me), time.monotonic()
    try:
        if receipts is not None:
            number = receipts.begin_query(session=session, call=call, commitment=commitment, **facts)
        asked.number = number
        with step("query", trace, party=me.role, session=session, call=call, **facts), moved:
            yield asked
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        if receipts is not None and number is not None:
            try:
                head = receipts.end_query(number, outcome, **asked.signed)
            except ReceiptError as error:
                failed, outcome = error, outcome if outcome != "done" else type(error).__name__
        took = {"seconds": round(time.monotonic() - since, 3), "bytes": moved.bytes}
        write(QUERIES, "query", **facts, **asked.more, outcome=outcome, **took, receipt=head)
    if failed is not None:
        raise failed


def learned_description(what: object, of: int, in_shares: bool) -> str:
    """What the client learns by a query of this kind when it is done.

    Args:
        what: the query's name, `ModelQuery.do`. of: number of answering parties. in_shares: whether results stay so.
    """
    if what == "aggregate":
        return f"sum-of-{of}-results"
    if what == "predict":
        return "what-the-step-reveals" if in_shares else "result"
    return "nothing"


class LineFormatter(logging.Formatter):
    """Writes a record as one line without characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line, in ASCII: time (UTC), level, logger, event, the event's facts.

    A record that is no event has a `message` in their place.
    """

    def format(self, record: logging.LogRecord) -> str:
        time_ = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        head = {"time": time_.isoformat(timespec="milliseconds"), "level": record.levelname, "logger": record.name}
        event, facts = getattr(record, "event", None), getattr(record, "facts", None)
        if isinstance(event, str) and isinstance(facts, dict):
            shown = {
                name: value if isinstance(value, (bool, int, float)) else str(value)
                for name, value in facts.items()
                if value is not None and name not in head
            }
            return json.dumps({**head, "event": event, **shown})
        more = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**head, "message": record.getMessage(), **more})


class _PrivateFile(logging.handlers.WatchedFileHandler):
    """A log's file, which only its owner can read: it has who asked whom. One that exists keeps its permissions."""

    def _open(self) -> TextIOWrapper:
        handle = files.private(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return TextIOWrapper(os.fdopen(handle, "ab"), self.encoding)


def begin(file: Path | None = None, level: int = logging.INFO, form: str = "text") -> None:
    """Send the log's records from `level` on to standard error, and those from INFO on to a file, if one is named.

    A file that was removed, or moved away as logrotate does, is made again with the next line.

    Args:
        form: one of `FORMATS`.

    Raises:
        OSError: the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setLevel(level)
    if file is not None:
        handlers.append(_PrivateFile(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
