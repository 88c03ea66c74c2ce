"""What the parties of a session tell each other beside its messages: number format, names, reasons of an end."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import threading
import time
from pathlib import Path

from ...errors import (
    FalseDealingError,
    FixedPointRangeError,
    FrameError,
    KeyAgreementError,
    MaterialError,
    NetworkError,
    QuotaFileError,
    ReceiptError,
    SectorchError,
    StoreFullError,
)
from ...tensor import Scheme
from ..messages import NumberFormat, form

UNFIT = (
    "the model does not fit the number format of the question (fraction bits, activation limit): name a smaller "
    "limit_bits, or fewer fraction bits; its owner's log says which weight"
)
"""What the others are told of weights that are too large: not which, nor by how much."""
ENDING = 5.0
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


def scheme_in(scheme: Scheme) -> NumberFormat:
    """A number representation as a part of a request; `scheme_of` reads it."""
    return NumberFormat(**{name: getattr(scheme, name) for name in NumberFormat.__struct_fields__})


def scheme_of(said: NumberFormat) -> Scheme:
    """The number representation that Q asks for.

    Raises:
        FrameError: not one that exists.
    """
    try:
        return Scheme(relu="exact", **form(said))
    except SectorchError as error:
        raise FrameError(str(error)) from None


def join(threads: list[threading.Thread]) -> None:
    """Wait for sessions that are ending; they end at once, since their channels are closed, but for a running step."""
    end = time.monotonic() + ENDING
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def in_full(error: BaseException) -> str:
    """An error for the log of the party where it arose, which may name that party's own values."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_TOLD = (NetworkError, MaterialError, KeyAgreementError, FalseDealingError, ReceiptError, QuotaFileError)
"""Whose text the others are told."""


def reason(error: BaseException, who: str) -> str:
    """What the other parties are told of an error: its type, and the text of our own kinds, which hold no secret.

    Args:
        who: this party, in words: of an error of another kind, and of a full disk, the others learn where it arose.
    """
    if isinstance(error, KeyboardInterrupt):
        return "AbortedError: stopped by its user"
    if isinstance(error, FixedPointRangeError):
        return f"RefusedError: {UNFIT}"
    ours = type(error).__module__.partition(".")[0] in ("sectorch", "builtins")
    known = isinstance(error, _TOLD) and ours and _raised_here(error)
    said = getattr(error, "told", None) or error
    if isinstance(error, (StoreFullError, ReceiptError, QuotaFileError)):
        said = f"at {who}: {error}"
    kind = type(error).__name__ if ours else "an error"
    return f"{kind}: {said if known else f'at {who}, whose own log says more'}"


def _raised_here(error: BaseException) -> bool:
    """Whether this package has raised it, or nobody yet: the text of a program's own may hold what it likes."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is None or at.tb_frame.f_code.co_filename.startswith(_PACKAGE)


@functools.cache
def load() -> None:
    """Load what a call needs before there is a connection, once, since signs of life wait while a library is loaded.

    They wait for a full garbage collection too, which holds the interpreter's lock and looks at every object there is:
    a third of a second of processor time, and seconds on a machine that has ten times as much to do as it can. What is
    there by now is code and tables for the most part, and collections pass over it from now on, in this process.
    """
    importlib.import_module("sectorch.ring.bitloops")
    gc.collect()
    gc.freeze()
