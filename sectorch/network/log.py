"""What a party writes down: one line for each thing that happened, with its facts as NAME=VALUE, and nothing secret.

A value that is more than a word is in JSON's quotes, which escape what controls a terminal or ends a line: whatever
another party says stays within its value. `LineFormatter` sees to the same for lines that others write.

    query client=alice key=SHA256:... asked=predict rows=32 model=3f0c... learned=result outcome=done
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ReceiptError
from .receipts.receipts import Receipts

QUERIES = logging.getLogger("sectorch.query")
_WORD = re.compile(r"[A-Za-z0-9_.@:+/,-]+")


def write(log: logging.Logger, event: str, level: int = logging.INFO, **facts: Any) -> None:
    """One line; facts that are None are left out."""
    log.log(level, "%s", " ".join([event, *(f"{k}={_shown(v)}" for k, v in facts.items() if v is not None)]))


def _shown(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


@contextmanager
def query(receipts: Receipts | None = None, session: str = "", call: int = 0, **facts: Any) -> Iterator[None]:
    """What is asked in the block has a line at its end, whichever way it ends, and its receipts, if any are kept.

    Args:
        session, call: which query it is, for the receipts; all parties name it so.

    Raises:
        ReceiptError: there can be no receipt. The block is not entered, or what came of it must not be used.
    """
    outcome, number, head, failed = "done", None, None, None
    try:
        if receipts is not None:
            number = receipts.asked(session=session, call=call, **facts)
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        if receipts is not None and number is not None:
            try:
                head = receipts.ended(number, outcome)
            except ReceiptError as error:
                failed, outcome = error, outcome if outcome != "done" else type(error).__name__
        write(QUERIES, "query", **facts, outcome=outcome, receipt=head)
    if failed is not None:
        raise failed


def learned(what: object, of: int, in_shares: bool) -> str:
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


def begin(file: Path | None = None, level: int = logging.INFO) -> None:
    """Write to standard error what is of that level, and all but details to a file, if one is named. Raises OSError."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setLevel(level)
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(LineFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
