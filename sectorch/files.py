"""Files that are complete or absent, also after a power cut: written beside their place, synchronised, moved there.

A file is for its owner alone (mode 600), whatever the umask allows, unless its writer says that it is public.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

PUBLIC = 0o644
"""The permissions of a file that has no secret, such as a certificate."""


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
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


def create(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that does not exist yet; of several processes that create it one does. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(8).hex()}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            file.write(data)
        flush_to_disk(partial)
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    flush_to_disk(path.parent)


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


def private(path: str, flags: int) -> int:
    """The `opener` of `open` for a file that only its owner can read; one that exists keeps its permissions."""
    return os.open(path, flags, 0o600)


def others_can_read(path: Path) -> bool:
    """Whether others can read a file of secrets. The group of a file of root may: it is a service's own group.

    Raises:
        OSError: there is no such file.
    """
    found = path.stat()
    if os.name != "posix":
        return False
    of_service = found.st_uid == 0 and os.geteuid() != 0
    group = stat.S_IWGRP | stat.S_IXGRP if of_service else stat.S_IRWXG
    return bool(found.st_mode & (stat.S_IRWXO | group))


def free_bytes(folder: Path) -> int:
    """Bytes that a process without special rights can still write to a folder's disk. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
