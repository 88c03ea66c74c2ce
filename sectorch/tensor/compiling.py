"""What a model's code is told while it runs on secrets: that it is being compiled, as in torch.export."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import traceback

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_LOCK = threading.Lock()
_inside = 0
_before: list[bool] = []


_NOTED = "_torchdynamo_disable"
"""How the names of torch's notes begin."""


def _notes() -> dict:
    return traceback.current_meta.setdefault("custom", {})


_notes()


@contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true inside.

    Code that looks at a tensor's values to save work (whether a mask hides anything, say) asks that, and then takes the
    way that looks at nothing. torch.export's own tracing sets the same flags, of the process. The last of several
    threads sets them back.

    Under these flags torch notes in a dict of the process, under "custom", what it would leave out of an export. It
    makes and deletes that entry call by call, which fails where two threads do so at once, but leaves one that it
    finds. So there is one from the import of this module on, and the last thread takes away notes that threads which
    overlapped have left in it.
    """
    global _inside
    with _LOCK:
        if not _inside:
            _before[:] = [getattr(torch.compiler, flag, False) for flag in _FLAGS]
            _notes()
        _inside += 1
        for flag in _FLAGS:
            setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                for flag, value in zip(_FLAGS, _before, strict=True):
                    setattr(torch.compiler, flag, value)
                notes = _notes()
                for name in [name for name in notes if name.startswith(_NOTED)]:
                    notes.pop(name, None)


def exported() -> bool:
    """Whether torch says so by itself, whatever threads are inside of `compiling`."""
    with _LOCK:
        return any(_before) if _inside else torch.compiler.is_compiling()
