"""What happens at a party, told once: to its log, and to whoever watches, such as metrics and traces; nothing secret.

The log has one line for each thing that happened, with its facts as NAME=VALUE. A value that is more than a word is in
JSON's quotes, which escape what controls a terminal or ends a line: whatever another party says stays within its value.
`LineFormatter` sees to the same for lines that others write, and `JsonFormatter` writes each line as a JSON object.

    query client=alice key=SHA256:... asked=predict rows=32 model=3f0c... learned=result outcome=done seconds=0.061
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..choreography import Party
from ..choreography.ledger import Observer
from ..errors import ReceiptError
from .receipts import Receipts

QUERIES = logging.getLogger("sectorch.query")
FORMATS = ("text", "json")
STRANGERS = ("refused",)
"""Events that somebody without a certificate can cause, as often as they like."""
MOST, PERIOD = 100, 60.0
"""Lines of such an event in so many seconds; the next period's first line says how many had none (`unsaid`)."""
_WORD = re.compile(r"[A-Za-z0-9_.@:+/,-]+")


class Watcher:
    """Is told what happens in this process. Its methods are called from many threads, and do not raise."""

    def happened(self, event: str, facts: dict[str, Any]) -> None:
        """What the log has a line of; facts that are None are left out there."""

    def step(self, name: str, trace: object, facts: dict[str, Any]) -> AbstractContextManager[Any]:
        """A step is done in the block: `query` is one, and others are parts of it, in the same thread.

        Args:
            trace: what another party's `carried` gave, as it came over the network; None if nothing came.
        """
        return nullcontext()

    def carried(self) -> str | None:
        """What the other parties are told of the step that this thread is in, for their `step`."""
        return None


_WATCHERS: tuple[Watcher, ...] = ()


def watch(watcher: Watcher) -> Callable[[], None]:
    """From now on it is told what happens; what is returned ends that."""
    global _WATCHERS
    _WATCHERS = (*_WATCHERS, watcher)

    def end() -> None:
        global _WATCHERS
        _WATCHERS = tuple(other for other in _WATCHERS if other is not watcher)

    return end


@contextmanager
def step(name: str, trace: object = None, **facts: Any) -> Iterator[None]:
    """Those who watch see the block as a step of that name."""
    with ExitStack() as stack:
        for watcher in _WATCHERS:
            stack.enter_context(watcher.step(name, trace, facts))
        yield


def trace_entry() -> dict[str, str]:
    """An entry of a request, by which the other parties' steps of it belong to the step that this thread is in."""
    found = [said for watcher in _WATCHERS if (said := watcher.carried()) is not None]
    return {"trace": found[0]} if found else {}


def write(log: logging.Logger, event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Something happened: one line, and a word to those who watch; facts that are None are left out.

    Of what strangers cause there are `MOST` lines in a `PERIOD`, so that nobody fills a disk; those who watch hear all.
    """
    if event in STRANGERS:
        said, unsaid = _SELDOM.setdefault(event, _Seldom()).may()
        facts = {**facts, "unsaid": unsaid or None}
    else:
        said = True
    if said:
        _line(log, event, level, facts)
    for watcher in _WATCHERS:
        watcher.happened(event, facts)


def _line(log: logging.Logger, event: str, level: int, facts: dict[str, Any]) -> None:
    text = " ".join([event, *(f"{k}={_shown(v)}" for k, v in facts.items() if v is not None)])
    log.log(level, "%s", text, extra={"event": event, "facts": facts})


class _Seldom:
    """Whether one more line may be written, and how many had to be left out before it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._since, self._lines, self._unsaid = -PERIOD, 0, 0

    def may(self) -> tuple[bool, int]:
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


_SELDOM: dict[str, _Seldom] = {}


def _shown(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


class TrafficCount(Observer):
    """Counts the bytes that one party sends and receives in the block."""

    def __init__(self, me: Party):
        self._me, self.bytes = me, 0

    def message(self, line: Any, value: Any) -> None:
        if self._me in (line.src, line.dst):
            self.bytes += line.bytes


@dataclass
class QueryFacts:
    """What is asked: the number of its receipt's line, if there is one, and further facts for its line in the log."""

    number: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


@contextmanager
def query(
    me: Party, receipts: Receipts | None = None, session: str = "", call: int = 0, trace: object = None, **facts: Any
) -> Iterator[QueryFacts]:
    """What is asked in the block has a line at its end, whichever way it ends, and its receipts, if any are kept.

    Args:
        me: the party that this is.
        session, call: which query it is, for the receipts; all parties name it so.
        trace: see `Watcher.step`.

    Raises:
        ReceiptError: there can be no receipt. The block is not entered, or what came of it must not be used.
    """
    outcome, number, head, failed, asked = "done", None, None, None, QueryFacts()
    moved, since = TrafficCount(me), time.monotonic()
    try:
        if receipts is not None:
            number = receipts.begin_query(session=session, call=call, **facts)
        asked.number = number
        with step("query", trace, party=me.role, session=session, call=call, **facts), moved:
            yield asked
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        if receipts is not None and number is not None:
            try:
                head = receipts.ended(number, outcome)
            except ReceiptError as error:
                failed, outcome = error, outcome if outcome != "done" else type(error).__name__
        took = {"seconds": round(time.monotonic() - since, 3), "bytes": moved.bytes}
        write(QUERIES, "query", **facts, **asked.more, outcome=outcome, **took, receipt=head)
    if failed is not None:
        raise failed


def learned_description(what: object, of: int, in_shares: bool) -> str:
    """What the one that asks learns of such a question when it is done."""
    if what == "aggregate":
        return f"sum-of-{of}-results"
    if what == "predict":
        return "what-the-step-reveals" if in_shares else "result"
    return "nothing"


class LineFormatter(logging.Formatter):
    """A record as one line, in which nothing controls a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object on one line, in ASCII: time (UTC), level, logger, event, and the event's facts.

    A line that is no event has a `message` in their place.
    """

    def format(self, record: logging.LogRecord) -> str:
        time_ = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        head = {"time": time_.isoformat(timespec="milliseconds"), "level": record.levelname, "logger": record.name}
        event, facts = getattr(record, "event", None), getattr(record, "facts", None)
        if isinstance(event, str) and isinstance(facts, dict):
            said = {name: _plain(value) for name, value in facts.items() if value is not None and name not in head}
            return json.dumps({**head, "event": event, **said})
        more = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**head, "message": record.getMessage(), **more})


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float)) else str(value)


def begin(file: Path | None = None, level: int = logging.INFO, form: str = "text") -> None:
    """Write to standard error what is of that level, and all but details to a file, if one is named.

    A file that is moved away, as logrotate does, or removed is made anew with the next line.

    Args:
        form: one of `FORMATS`.

    Raises:
        OSError: the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setLevel(level)
    if file is not None:
        handlers.append(logging.handlers.WatchedFileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
