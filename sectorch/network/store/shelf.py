"""The material of one session on disk: a piece for each prepared call, used once."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag

from ... import files
from ...choreography.program.material import Material
from ...errors import MaterialError, StoreFullError
from ...sealed.sealing import NONCE_BYTES, SEGMENT, TAG_BYTES, opened, sealed
from .pieces import read_piece, write_piece
from .room import Store as Shared
from .room import make

NAME = re.compile(r"(\d{10})-(\d+x\d+)\.piece")
RETURN = 5.0
"""Seconds for which a session that takes material up waits for what the one before has read ahead: as long as a party
takes to notice that another one is gone."""


class Keeper(Shared, Protocol):
    """Where a session's material is kept (`store.Store`)."""

    folder: Path
    lasting: bool
    key: bytes

    @property
    def used(self) -> int: ...

    def room(self, client: object) -> int: ...

    def dropped(self, shelf: Shelf) -> None: ...


class Shelf:
    """The pieces of one session. Made by `Store.shelf`."""

    def __init__(self, store: Keeper, session: bytes, binding: dict):
        self.store, self.session, self.binding = store, session, binding
        self.folder = store.folder / session.hex()
        self._pieces: dict[int, tuple[tuple[int, int], int]] = {}
        for path in self.folder.iterdir():
            if name := NAME.fullmatch(path.name):
                program, rows = map(int, name[2].split("x"))
                self._pieces[int(name[1])] = (program, rows), path.stat().st_size
        self._lock = threading.Condition()
        self._lent: set[int] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in list(self._pieces.values()))

    def calls(self) -> dict[int, tuple[int, int]]:
        """The calls that have a piece, in order, and their kinds."""
        with self._lock:
            return {call: kind for call, (kind, _) in sorted(self._pieces.items())}

    def put(self, material: Material, kind: tuple[int, int]) -> int:
        """Keep material; returns the bytes that it takes on disk.

        Raises:
            StoreFullError: the budget is used up; nothing is kept.
        """
        parts, size = write_piece(material)
        size += (size // SEGMENT + 2) * TAG_BYTES + NONCE_BYTES
        make(self.store, self.binding.get("client"), size)
        room = self.store.budget - self.store.used
        if size > room:
            raise StoreFullError(
                f"a prepared call takes {size / 1e6:.1f} MB and {max(0, room) / 1e6:.1f} of "
                f"{self.store.budget / 1e6:.0f} MB are free in the store: {max(0, room) // size} more fit"
            )
        path = self._path(material.call, kind)
        partial = path.with_suffix(".part")
        with kept_whole(partial):
            with open(partial, "wb") as file:
                for part in sealed(self.store.key, parts, self._about(material.call, kind)):
                    file.write(part)
                size = file.tell()
            if self.store.lasting:
                files.move(partial, path)
            else:
                os.replace(partial, path)
        with self._lock:
            self._pieces[material.call] = kind, size
        return size

    def take(self, call: int, kind: tuple[int, int]) -> Material:
        """The material of a call, which is gone from disk before it is returned.

        Raises:
            MaterialError: it is not here, was used already, or is not whole; it is never used then.
        """
        with self._lock:
            held = self._pieces.get(call)
            if held is None or held[0] != kind:
                raise MaterialError(f"call {call} was not prepared for such inputs, or was used already")
            del self._pieces[call]
        path = self._path(call, kind)
        claimed = path.with_suffix(".claimed")
        try:
            os.replace(path, claimed)
            with claimed.open("rb") as sealed:
                os.unlink(claimed)
                if self.store.lasting:
                    files.settle(self.folder)
                size = os.fstat(sealed.fileno()).st_size
                material = read_piece(opened(self.store.key, sealed, size, self._about(call, kind)))
        except OSError as error:
            raise MaterialError(
                f"the material of call {call} cannot be read ({error.strerror}); it is dropped"
            ) from None
        except (InvalidTag, ValueError):
            raise MaterialError(f"the material of call {call} is not whole; it is dropped and was not used") from None
        if (material.call, material.session) != (call, self.session):
            raise MaterialError(f"the material of call {call} is of another call; it is dropped and was not used")
        return material

    def lend(self, call: int) -> None:
        """The piece of this call is read ahead; until it is `used` or `put_back`, it is neither here nor gone."""
        with self._lock:
            self._lent.add(call)

    def used(self, call: int) -> None:
        """What was read ahead was used, or could not be read."""
        with self._lock:
            self._lent.discard(call)
            self._lock.notify_all()

    def put_back(self, material: Material, kind: tuple[int, int]) -> None:
        """What was read ahead was not used: it is kept again, unless it has become void meanwhile."""
        call = material.call
        try:
            if call in self._lent:
                self.put(material, kind)
        finally:
            with self._lock:
                void = call not in self._lent and self._pieces.pop(call, None) is not None
            if void:
                self._path(call, kind).unlink(missing_ok=True)
            self.used(call)

    def keep(self, calls: object) -> None:
        """Remove the pieces of all other calls: nobody will ask for them.

        A session before this one may still have pieces that it has read ahead. They are waited for; what does not come
        back within `RETURN` seconds is void here, and so at all parties.
        """
        wanted = set(calls) if isinstance(calls, list) and all(type(c) is int for c in calls) else set()
        with self._lock:
            self._lock.wait_for(lambda: not self._lent, RETURN)
            self._lent.clear()
            others = {call: kind for call, (kind, _) in self._pieces.items() if call not in wanted}
            for call in others:
                del self._pieces[call]
        for call, kind in others.items():
            self._path(call, kind).unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove the session's material."""
        with self._lock:
            self._pieces.clear()
            self._lent.clear()
        self.store.dropped(self)

    def _path(self, call: int, kind: tuple[int, int]) -> Path:
        return self.folder / f"{call:010d}-{'x'.join(map(str, kind))}.piece"

    def _about(self, call: int, kind: tuple[int, int]) -> bytes:
        about = {"session": self.session.hex(), "call": call, "kind": list(kind), "binding": self.binding}
        return json.dumps(about, sort_keys=True).encode()


@contextmanager
def kept_whole(partial: Path) -> Iterator[None]:
    """What is written in the block is there whole, or `partial` is removed.

    Raises:
        StoreFullError: the disk is full. MaterialError: it cannot be written for another reason.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = StoreFullError if full else MaterialError
        raise kind(f"prepared material cannot be kept: {error.strerror}; nothing of this call is kept") from None
