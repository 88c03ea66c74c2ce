"""Files that are whole or not there, also after a power cut: written beside their place, synchronised, moved there."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file of so many permissions at most, in place of what is there. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, os.fstat(handle).st_mode & mode)
            file.write(data)
        move(partial, path)
    except BaseException:  # a full disk, say
        partial.unlink(missing_ok=True)
        raise


def move(partial: Path, path: Path) -> None:
    """Put a file that was written whole in the place of `path`; on return a power cut does not undo it."""
    _synchronise(partial)
    os.replace(partial, path)
    flush_to_disk(path.parent)


def flush_to_disk(folder: Path) -> None:
    """Until this returns, a power cut could bring a removed name of the folder back, or lose a new one."""
    _synchronise(folder)


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
