"""A file of named byte strings with a JSON head. Nothing in it is code, and every length is checked."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from os import PathLike

from ..errors import SerialisationError

_MAGIC = b"SECTORCH-CKKS-1\n"
_LENGTH = struct.Struct("<Q")
_LARGEST_HEAD = 1 << 24


def write_container(
    path: str | PathLike, kind: str, meta: dict, blobs: Mapping[str, bytes | memoryview], private: bool = False
) -> None:
    """Write magic, head and blobs. A private file is made readable to its owner alone."""
    head = json.dumps({"kind": kind, "meta": meta, "blobs": [[n, len(b)] for n, b in blobs.items()]}).encode()
    mode = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with os.fdopen(mode, "wb") as file:
        for part in (_MAGIC, _LENGTH.pack(len(head)), head, *blobs.values()):
            file.write(part)


def read_container(path: str | PathLike, kind: str) -> tuple[dict, dict[str, bytes]]:
    """The head's `meta` and the blobs.

    Raises:
        SerialisationError: not such a file, of another kind, or of another length than its head says.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise SerialisationError(f"{path} is no file of sectorch.ckks")
        raw = file.read(_LENGTH.size)
        size = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else _LARGEST_HEAD + 1
        if size > _LARGEST_HEAD:
            raise SerialisationError(f"{path} is damaged: its head is too long")
        try:
            head = json.loads(file.read(size))
            found, meta = head["kind"], dict(head["meta"])
            sizes = [(str(name), int(length)) for name, length in head["blobs"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SerialisationError(f"{path} is damaged: its head cannot be read") from error
        if found != kind:
            raise SerialisationError(f"{path} holds {found!r}, not {kind!r}")
        rest = os.fstat(file.fileno()).st_size - file.tell()
        if any(length < 0 for _, length in sizes) or sum(length for _, length in sizes) != rest:
            raise SerialisationError(f"{path} is damaged: its length does not fit its head")
        return meta, {name: file.read(length) for name, length in sizes}
