"""Files that are complete or absent, also after a power cut: written beside their place, synchronised, moved there."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file, replacing an older one, with the permissions `mode` at most. Raises OSError."""
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
    """Move a complete file to `path`, replacing an older one; after the return a power cut does not undo it."""
    flush_to_disk(partial)
    os.replace(partial, path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Make a file's content, or a folder's removed and new names, permanent: a power cut can undo them before."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
