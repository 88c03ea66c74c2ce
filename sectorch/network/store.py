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

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag

from .. import files
from ..choreography.program.projection import Material
from ..errors import ArgumentError, MaterialError, StoreFullError, StoreInUseError
from ..sealed import NONCE_BYTES, SEGMENT, TAG_BYTES, key_of, read_tensors, seal, unseal, write_tensors
from .log import write

# Whose material goes when a store is full: what nobody came back for, and what is more than a client's share.
#
# A client may use all of a store that no other needs. When another one needs room, first what has not been touched for
# `UNUSED` seconds goes, the oldest first; then, as long as who asks has less than its share, the oldest session's of
# who has most. What goes is void at all parties: it cannot be used without this half, and the others hear of it.


log = logging.getLogger("sectorch.store")
UNUSED = 7 * 86400.0
"""Seconds after which a client counts as one that does not come back for what was prepared."""


def free_bytes(store: Store, client: object) -> int:
    """Bytes that a client can still have."""
    sizes = _sizes(store)
    stale = sum(shelf.bytes for shelf in store.shelves() if _stale(shelf, client))
    return max(0, store.budget - sizes.total() + stale, _share(store, sizes, client) - sizes[client])


def make_room(store: Store, client: object, size: int) -> None:
    """See that so many bytes are free, as far as others' material may go for it."""
    while (sizes := _sizes(store)).total() + size > store.budget:
        others = [s for s in store.shelves() if len(s) and s.binding.get("client") != client]
        going = [s for s in others if _stale(s, client)]
        if not going and sizes[client] + size <= _share(store, sizes, client):
            most = max((sizes[s.binding.get("client")] for s in others), default=0)
            going = [s for s in others if sizes[s.binding.get("client")] == most]
        if not going:
            return
        shelf = min(going, key=_touched)
        facts = {"client": shelf.binding.get("client"), "model": shelf.binding.get("model"), "for_client": client}
        write(log, "evicted", calls=len(shelf), **facts)
        shelf.drop()
        store.evicted(shelf)


def _sizes(store: Store) -> Counter:
    sizes: Counter = Counter()
    for shelf in store.shelves():
        if count := shelf.bytes:
            sizes[shelf.binding.get("client")] += count
    return sizes


def _share(store: Store, sizes: Counter, client: object) -> int:
    return store.budget // len({*sizes, client})


def _stale(shelf: Shelf, client: object) -> bool:
    return len(shelf) > 0 and shelf.binding.get("client") != client and time.time() - _touched(shelf) > UNUSED


def _touched(shelf: Shelf) -> float:
    """When a piece of it was last made or used: that changes the folder."""
    try:
        return shelf.folder.stat().st_mtime
    except OSError:
        return 0.0


# Offline material as bytes and back.


def write_piece(material: Material) -> tuple[list, int]:
    """The parts of a piece in order, and how many bytes they are together.

    Raises:
        MaterialError: it was used, or holds something that is not kept.
    """
    if material.values is None:
        raise MaterialError(f"the material of call {material.call} was used already; prepare it again")
    head = {
        "call": material.call, "session": material.session.hex(), "program": material.program,
        "setup": material.setup,
    }  # fmt: skip
    try:
        return write_tensors(head, material.values)
    except ArgumentError as error:
        raise MaterialError(f"an offline step gave {error}") from None


def read_piece(data: bytearray) -> Material:
    """What `write_piece` wrote; its tensors share the memory of `data`.

    Raises:
        ValueError: it is something else. The caller has checked that nobody changed it.
    """
    head, values = read_tensors(data)
    if set(head) != {"call", "session", "program", "setup"}:
        raise ValueError("a piece of another version")
    return Material(head["call"], bytes.fromhex(head["session"]), head["program"], head["setup"], values)


# The material of one session on disk: a piece for each prepared call, used once.


NAME = re.compile(r"(\d{10})-(\d+x\d+)\.piece")
RETURN = 5.0
"""Seconds for which a session that takes material up waits for what the one before has read ahead: as long as a party
takes to notice that another one is gone."""


class Shelf:
    """The pieces of one session. Made by `Store.shelf`."""

    def __init__(self, store: Store, session: bytes, binding: dict):
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
        make_room(self.store, self.binding.get("client"), size)
        room = self.store.budget - self.store.used
        if size > room:
            raise StoreFullError(
                f"a prepared call takes {size / 1e6:.1f} MB and {max(0, room) / 1e6:.1f} of "
                f"{self.store.budget / 1e6:.0f} MB are free in the store: {max(0, room) // size} more fit"
            )
        path = self._path(material.call, kind)
        partial = path.with_suffix(".part")
        with all_or_nothing(partial):
            with open(partial, "wb") as file:
                for part in seal(self.store.key, parts, self._about(material.call, kind)):
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
                    files.flush_to_disk(self.folder)
                size = os.fstat(sealed.fileno()).st_size
                material = read_piece(unseal(self.store.key, sealed, size, self._about(call, kind)))
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
def all_or_nothing(partial: Path) -> Iterator[None]:
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
                binding = json.loads(unseal(self.key, io.BytesIO(sealed), len(sealed), b"binding" + session))
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
                content = b"".join(seal(self.key, [json.dumps(binding).encode()], b"binding" + session))
                with all_or_nothing(folder):
                    folder.mkdir(mode=0o700)
                    self._write(folder / "binding.sealed", content)
                    if self.lasting:
                        files.flush_to_disk(self.folder)
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
        return free_bytes(self, client)

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
                files.flush_to_disk(self.folder)
        shutil.rmtree(gone, ignore_errors=True)


def fingerprint(*things: object) -> str:
    """A name for public descriptions: SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(things, sort_keys=True).encode()).hexdigest()


def version(description: dict, edition: object) -> str:
    """A name for a model as it is now: another architecture or other weights are another version."""
    return fingerprint(description, edition)[:32]


# Prepared material on disk, sealed.
