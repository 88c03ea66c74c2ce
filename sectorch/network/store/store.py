"""Offline material on disk: sealed, each piece used once.

    FOLDER/store.key                         32 bytes, unless a key file is named
    FOLDER/SESSION/binding.sealed            whose it is: client, model, description, edition, number format
    FOLDER/SESSION/CALL-KIND.piece           the material of one call; its kind is the program and the number of rows

A piece is AES-256-GCM in segments, under a key of its own derived from the store's key and a fresh nonce. Its
associated data name the session, the call, its kind and the binding, so that a piece that is renamed, moved or cut
does not open. `take` renames a piece, which only one taker can, and removes the name from disk before the content is
handed out: a crash loses a piece and never brings it back.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag

from ... import files
from ...errors import (
    ArgumentError,
    MaterialError,
    StoreInUseError,
)
from ...sealed.sealing import key_of, opened, sealed
from .room import room
from .shelf import NAME, Shelf, kept_whole

BUDGET = 4 << 30


class Store:
    """The material of one party.

    Args:
        folder: where it is kept; a temporary one that ends with this object, under a key in memory, unless named.
        key_file: the key, made if it is not there; in the folder unless named.
        budget: bytes on disk at most.

    Raises:
        ArgumentError: the folder or the key cannot be used. StoreInUseError: another process has the folder.
    """

    def __init__(self, folder: str | Path | None = None, key_file: str | Path | None = None, budget: int = BUDGET):
        self.folder = Path(tempfile.mkdtemp(prefix="sectorch-") if folder is None else folder)
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, True) if folder is None else None
        self.budget = budget
        self.lasting = folder is not None
        self._lock = threading.Lock()
        self._shelves: dict[bytes, Shelf] = {}
        self.evicted: Callable[[Shelf], None] = lambda shelf: None
        """Told of a session whose material had to go for another client's."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_folder()
            self.key = key_of(Path(key_file) if key_file else self.folder / "store.key") if folder else os.urandom(32)
            self._clean()
        except OSError as error:
            raise ArgumentError(f"cannot keep material in {folder}: {error.strerror}") from None

    def __repr__(self) -> str:
        return f"Store({self.folder}, {self.used / 1e6:.1f} of {self.budget / 1e6:.0f} MB)"

    def _lock_folder(self) -> None:
        """Two processes on one folder would take each other's half-written pieces for left-overs."""
        handle = os.open(self.folder / "store.lock", os.O_CREAT | os.O_RDWR, 0o600)
        self._unlock = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()
            raise StoreInUseError(
                f"the store {self.folder} is in use by another process; name another --store"
            ) from None

    def _clean(self) -> None:
        """Load what is whole; what was claimed or half written when a process ended is removed."""
        for folder in list(self.folder.iterdir()):
            if not folder.is_dir():
                continue
            for path in folder.iterdir():
                if not NAME.fullmatch(path.name) and path.name != "binding.sealed":
                    path.unlink()
            try:
                session = bytes.fromhex(folder.name)
                sealed = (folder / "binding.sealed").read_bytes()
                binding = json.loads(opened(self.key, io.BytesIO(sealed), len(sealed), b"binding" + session))
                self._shelves[session] = Shelf(self, session, binding)
            except (ValueError, OSError, InvalidTag):
                shutil.rmtree(folder)

    @property
    def used(self) -> int:
        """Bytes on disk."""
        return sum(shelf.bytes for shelf in self.shelves())

    def figures(self) -> dict[str, float]:
        """What is kept, and how much may be."""
        shelves = self.shelves()
        kept = {"store_bytes": sum(shelf.bytes for shelf in shelves), "calls_prepared": sum(map(len, shelves))}
        return {**kept, "store_budget_bytes": self.budget}

    def shelves(self, **wanted: object) -> list[Shelf]:
        """The sessions whose binding has these entries."""
        with self._lock:
            shelves = list(self._shelves.values())
        return [s for s in shelves if all(s.binding.get(k) == v for k, v in wanted.items())]

    def holds(self, session: bytes) -> bool:
        """Whether there is material of that session."""
        with self._lock:
            return session in self._shelves

    def shelf(self, session: bytes, binding: dict | None = None) -> Shelf:
        """The material of a session; with a `binding` it may be new.

        Raises:
            MaterialError: there is none, or it is bound to something else.
        """
        with self._lock:
            shelf = self._shelves.get(session)
            if shelf is None and binding is not None:
                folder = self.folder / session.hex()
                content = b"".join(sealed(self.key, [json.dumps(binding).encode()], b"binding" + session))
                with kept_whole(folder):
                    folder.mkdir(mode=0o700)
                    self._write(folder / "binding.sealed", content)
                    if self.lasting:
                        files.settle(self.folder)
                shelf = self._shelves[session] = Shelf(self, session, binding)
        if shelf is None:
            raise MaterialError(
                "their other half is not here any more: the server or the answering party was started without its "
                "store, or has another model now"
            )
        if binding is not None and shelf.binding != binding:
            raise MaterialError("the material of that session was prepared for another client, model or number format")
        return shelf

    def _write(self, path: Path, data: bytes) -> None:
        if self.lasting:
            files.write(path, data)
        else:
            path.write_bytes(data)

    @property
    def name(self) -> str:
        """A name for this folder, which it keeps, though others may have the same key."""
        path = self.folder / "store.name"
        try:
            if not path.exists():
                self._write(path, os.urandom(16).hex().encode())
            return path.read_text()
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read or write {path}: {error}") from None

    def room(self, client: object) -> int:
        """Bytes that a client's material can still take, in place of others' where it has less than its share."""
        return room(self, client)

    def forget(self, session: bytes) -> None:
        """Remove the material of a session, if there is any."""
        with self._lock:
            shelf = self._shelves.get(session)
        if shelf is not None:
            shelf.drop()

    def close(self) -> None:
        """Let go of the folder, and remove it if it is a temporary one."""
        self._unlock()
        if self._remove is not None:
            self._remove()

    def dropped(self, shelf: Shelf) -> None:
        with self._lock:
            self._shelves.pop(shelf.session, None)
        gone = shelf.folder.with_suffix(".dropped")  # whole or not at all: `_clean` removes what a crash leaves
        with suppress(OSError):
            os.replace(shelf.folder, gone)
            if self.lasting:
                files.settle(self.folder)
        shutil.rmtree(gone, ignore_errors=True)


def fingerprint(*things: object) -> str:
    """A name for public descriptions: SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(things, sort_keys=True).encode()).hexdigest()


def version(description: dict, edition: object) -> str:
    """A name for a model as it is now: another architecture or other weights are another version."""
    return fingerprint(description, edition)[:32]
