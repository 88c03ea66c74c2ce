"""Prepared offline material on disk, encrypted; each piece is used once.

    FOLDER/store.key                         32 bytes, unless a key file is named
    FOLDER/SESSION/binding.sealed            the client, model and number format that it is for (`MaterialBinding`)
    FOLDER/SESSION/CALL-KIND.piece           the material of one call; its kind is the program and the number of rows

A `Store` has the material of one party, a `Shelf` that of one session. A piece is encrypted by AES-256-GCM in segments,
under a key of its own derived from the store's key and a fresh nonce. Its associated data name the session, the call,
its kind and the binding, so that a piece that was renamed, moved or cut does not decrypt. `Shelf.take` renames a piece,
which succeeds for one caller only, and deletes it before it returns the content: a crash can lose a piece, and never
lets it be used twice.

A folder that is restored from a backup has pieces that were used. So a party writes each use down in a file outside
the folder (`UsedPlaces`, FOLDER.used unless another is named), and the parties tell each other what they have used when
they take up a session again. A piece that this party or another one has used is dropped, with a warning that names it.
Only where the folder and that file are restored together, at all three parties, does nobody know.

Eviction: a client may use all of a store that no other needs. When another client needs room, abandoned material goes
first, the oldest before others. Then, as long as the new client has less than its share, the oldest session of the
client with the most material goes. Evicted material is void at all parties, since it is of no use without this part;
`on_evict` tells them.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import hashlib
import io
import itertools
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from cryptography.exceptions import InvalidTag

from .. import files
from ..choreography.program.projection import Material
from ..choreography.run.frames import raw
from ..cli.command import is_full
from ..deprecation import renamed_attribute
from ..errors import ArgumentError, FrameError, MaterialError, StoreFullError, StoreInUseError
from ..sealed import NONCE_BYTES, SEGMENT, TAG_BYTES, SealedHead, key_of, read_tensors, seal, unseal, write_tensors
from .log import write
from .names import account_of

log = logging.getLogger("sectorch.store")
UNUSED = 7 * 86400.0
"""Seconds after which prepared material counts as abandoned by its client."""


class MaterialBinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What the prepared material of a session is for; it is used for nothing else. Empty entries are not written.

    Attributes:
        client: the name of the client whose queries use it.
        model, edition, fingerprint: the model's name, its owner's name for the weights, a digest of its description.
        scheme: the number format.
        key: at A, the fingerprint of the client's identity key.
        authority: at Q, the CA of the server. replica: at Q and A, which of several server processes has S's half.
        keeper: at S, the name of the store of the replica of A that has A's half.
    """

    client: str
    model: str = ""
    edition: str = ""
    fingerprint: str = ""
    scheme: str = ""
    key: str = ""
    authority: str = ""
    replica: str = ""
    keeper: str = ""


class PieceHead(SealedHead, frozen=True, kw_only=True):
    """The facts of a piece of `Material`."""

    call: int
    session: str
    program: str
    setup: int | None
    digests: str = ""


def write_piece(material: Material) -> tuple[list, int]:
    """Serialize a piece; returns its parts in order, and their bytes.

    Raises:
        MaterialError: the material was used, or holds a value that cannot be stored.
    """
    if material.values is None:
        raise MaterialError(f"the material of call {material.call} was used already; prepare it again")
    head = {
        "call": material.call, "session": material.session.hex(), "program": material.program,
        "setup": material.setup, **({"digests": material.digests.hex()} if material.digests else {}),
    }  # fmt: skip
    try:
        return write_tensors(head, material.values)
    except ArgumentError as error:
        raise MaterialError(f"an offline step gave {error}") from None


def read_piece(data: bytearray) -> Material:
    """Read what `write_piece` wrote; the tensors share the memory of `data`, which the caller has authenticated.

    Raises:
        ValueError: it is no piece of this version.
    """
    head, values = read_tensors(data, PieceHead)
    return Material(
        head.call, bytes.fromhex(head.session), head.program, head.setup, values, digests=bytes.fromhex(head.digests)
    )


class UsedPlaces:
    """The places of prepared calls that one party has used, by session, in a text file outside its store's folder.

    The first line names the store. Others are `begin SESSION`, `used SESSION CALL`, `back SESSION CALL` (it was put
    back unused) and `end SESSION`. A session that has not begun, or has ended, has no usable piece; so a file that is
    missing, or of another store, makes none usable.

    Args:
        path: the file; made (mode 600) if it does not exist.
        store: the store's name.
        sessions: those whose folders are there; the others are forgotten.

    Raises:
        ArgumentError: it is another file. OSError: it cannot be read or written.
    """

    TITLE = "sectorch used places 1 of "
    MOST = 10_000
    """Lines after which the file is written anew."""

    def __init__(self, path: Path, store: str, sessions: Iterable[bytes]):
        self.path, self._title = path, self.TITLE + store
        self._lock = threading.Lock()
        self._lines = 0
        before = self._read() if path.exists() else {}
        self._used = {session: before[session] for session in sessions if session in before}
        try:
            self._rewrite()
        except OSError as error:  # on a full disk, the longer file that is there says the same
            if not (before and is_full(error)):
                raise

    def _read(self) -> dict[bytes, set[int]]:
        text = self.path.read_bytes()
        title, *lines = text[: text.rfind(b"\n") + 1].decode("ascii", "replace").splitlines() or [""]
        used: dict[bytes, set[int]] = {}
        try:
            if not title.startswith(self.TITLE):
                raise ValueError
            for line in lines if title == self._title else ():
                word, name, *call = line.split(" ")
                session, number = bytes.fromhex(name), int(*call or "0")
                if word == "begin":
                    used[session] = set()
                elif word == "end":
                    used.pop(session, None)
                elif word == "used":
                    used[session].add(number)
                elif word == "back":
                    used[session].discard(number)
                else:
                    raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ArgumentError(
                f"{self.path} does not say which prepared calls were used; name another file, or remove this one, and "
                f"what was prepared is dropped"
            ) from None
        return used

    def _rewrite(self) -> None:
        """Write the file anew, with what holds now."""
        lines = [self._title]
        for session, used in self._used.items():
            lines += [f"begin {session.hex()}", *(f"used {session.hex()} {call}" for call in sorted(used))]
        files.write(self.path, "".join(f"{line}\n" for line in lines).encode())
        self._lines = 0

    def _add(self, line: str) -> None:
        """Add a line, which is on the disk when this returns; nothing of it stays if that fails."""
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(handle).st_size
            try:
                data = f"{line}\n".encode()
                if os.write(handle, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
        self._lines += 1
        if self._lines > self.MOST:
            with suppress(OSError):
                self._rewrite()

    def begin(self, session: bytes) -> None:
        """Write down that pieces of a session may be used from now on. Raises OSError."""
        with self._lock:
            self._used[session] = set()
            self._add(f"begin {session.hex()}")

    def use(self, session: bytes, call: int) -> None:
        """Write down that a call's piece is used.

        Raises:
            KeyError: the session has ended. OSError: it cannot be written. The piece must not be used.
        """
        with self._lock:
            used = self._used[session]
            used.add(call)
            self._add(f"used {session.hex()} {call}")

    def put_back(self, session: bytes, call: int) -> None:
        """Write down that a call's piece was not used after all. Raises OSError."""
        with self._lock:
            if call in self._used.get(session, ()):
                self._used[session].discard(call)
                self._add(f"back {session.hex()} {call}")

    def end(self, session: bytes) -> None:
        """Write down that no piece of a session is used any more. Where that fails, the next start says it."""
        with self._lock:
            if self._used.pop(session, None) is not None:
                with suppress(OSError):
                    self._add(f"end {session.hex()}")

    def known(self, session: bytes) -> bool:
        """Whether pieces of a session may be used."""
        with self._lock:
            return session in self._used

    def of(self, session: bytes) -> list[int]:
        """The calls of a session that were used, in order."""
        with self._lock:
            return sorted(self._used.get(session, ()))


def as_ranges(calls: Iterable[int]) -> list[int]:
    """Numbers in order as ranges: first and last of each, in one list."""
    ranges: list[int] = []
    for call in calls:
        if ranges and call == ranges[-1] + 1:
            ranges[-1] = call
        else:
            ranges += [call, call]
    return ranges


def join_ranges(one: list[int], other: list[int]) -> list[int]:
    """The ranges of numbers that are in ranges of one of two parties."""
    joined: list[int] = []
    for first, last in sorted([*_pairs(one), *_pairs(other)]):
        if joined and first <= joined[-1] + 1:
            joined[-1] = max(joined[-1], last)
        else:
            joined += [first, last]
    return joined


def calls_in(ranges: list[int], calls: Iterable[int]) -> list[int]:
    """The calls that are in ranges, as another party gave them.

    Raises:
        FrameError: they are no ranges in order.
    """
    if len(ranges) % 2 or any(a > b for a, b in itertools.pairwise(ranges)):
        raise FrameError("the ranges of calls that were used are not in order")
    return [call for call in calls if (at := bisect.bisect_left(ranges, call)) % 2 or call in ranges[at : at + 1]]


PIECE_NAME = re.compile(r"(\d{10})-(\d+x\d+)\.piece")
LEASE_WAIT = 5.0
"""Seconds for which a resumed session waits for pieces that an earlier one has read ahead: about the time in which a
party notices that another one is lost."""


class Shelf:
    """The stored pieces of one session; `Store.shelf` makes it.

    A piece that is read ahead is leased: until it is used or put back, `take` does not find it, and `keep_only` waits
    for it.
    """

    def __init__(self, store: Store, session: bytes, binding: MaterialBinding):
        self.store, self.session, self.binding = store, session, binding
        self.folder = store.folder / session.hex()
        self._pieces: dict[int, tuple[tuple[int, int], int]] = {}
        for path in self.folder.iterdir():
            if name := PIECE_NAME.fullmatch(path.name):
                program, rows = map(int, name[2].split("x"))
                self._pieces[int(name[1])] = (program, rows), path.stat().st_size
        self._lock = threading.Condition()
        self._leased: set[int] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in list(self._pieces.values()))

    def last_change(self) -> float:
        """When a piece was last added or used: that changes the folder."""
        try:
            return self.folder.stat().st_mtime
        except OSError:
            return 0.0

    def is_stale(self, client: str) -> bool:
        """Whether this is abandoned material of another client than this one."""
        return (
            len(self) > 0
            and account_of(self.binding.client) != account_of(client)
            and time.time() - self.last_change() > UNUSED
        )

    def calls(self) -> dict[int, tuple[int, int]]:
        """The calls that have a piece, in order, and their kinds."""
        with self._lock:
            return {call: kind for call, (kind, _) in sorted(self._pieces.items())}

    def put(self, material: Material, kind: tuple[int, int]) -> int:
        """Store the material of a call; returns its bytes on disk.

        Raises:
            StoreFullError: the budget is used up; nothing is stored.
        """
        parts, size = write_piece(material)
        size += (size // SEGMENT + 2) * TAG_BYTES + NONCE_BYTES
        places = self.store.places
        self.store.make_room(self.binding.client, size)
        room = self.store.budget - self.store.used
        if size > room:
            raise StoreFullError(
                f"a prepared call takes {size / 1e6:.1f} MB and {max(0, room) / 1e6:.1f} of "
                f"{self.store.budget / 1e6:.0f} MB are free in the store: {max(0, room) // size} more fit"
            )
        path = self._path(material.call, kind)
        partial = path.with_suffix(".part")
        with all_or_nothing(partial):
            with open(partial, "wb", opener=files.private) as file:
                for part in seal(self.store.key, parts, self._about(material.call, kind)):
                    file.write(part)
                size = file.tell()
            if self.store.lasting:
                files.move(partial, path)
            else:
                os.replace(partial, path)
            if places is not None:
                places.put_back(self.session, material.call)
        with self._lock:
            self._pieces[material.call] = kind, size
        return size

    def take(self, call: int, kind: tuple[int, int]) -> Material:
        """Take the material of a call, which is deleted from disk before it is returned.

        Raises:
            MaterialError: there is none, it was used already, or it is damaged; then it is never used.
        """
        with self._lock:
            held = self._pieces.get(call)
            if held is None or held[0] != kind:
                raise MaterialError(f"call {call} was not prepared for such inputs, or was used already")
            del self._pieces[call]
        path = self._path(call, kind)
        # Removed from the disk before it is read, through a file that is open: a crash at any moment loses the piece,
        # and none can be read twice. `Store._clean` removes what was claimed. Its use is written down last, when its
        # bytes are free on a disk that may be full, and before anything is done with it.
        claimed = path.with_suffix(".claimed")
        try:
            os.replace(path, claimed)
            with claimed.open("rb") as sealed:
                os.unlink(claimed)
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
        if self.store.places is not None:
            try:
                self.store.places.use(self.session, call)
            except (OSError, KeyError) as error:
                why = error.strerror if isinstance(error, OSError) else "the session is over"
                raise MaterialError(
                    f"that call {call} is used cannot be written to {self.store.places.path} ({why}); it is dropped "
                    f"and was not used"
                ) from None
        return material

    def used_ranges(self) -> list[int]:
        """The calls of this session that this party has used, as `as_ranges` gives them; leased ones are not yet."""
        if self.store.places is None:
            return []
        with self._lock:
            return as_ranges([call for call in self.store.places.of(self.session) if call not in self._leased])

    def refuse_used(self, ranges: list[int], by: str) -> None:
        """Drop the pieces of calls that another party has used, with a warning that names them.

        Args:
            ranges: as that party gave them. by: who has used them, for the log.

        Raises:
            FrameError: they are no ranges.
        """
        with self._lock:
            dropped = {call: self._pieces.pop(call)[0] for call in calls_in(ranges, list(self._pieces))}
        for call, kind in dropped.items():
            self._path(call, kind).unlink(missing_ok=True)
        if dropped:
            self.store.warn_of_restored(self, sorted(dropped), by)

    def lease(self, call: int) -> None:
        """Lease the piece of a call, which is read ahead, until `end_lease` or `put_back`."""
        with self._lock:
            self._leased.add(call)

    def end_lease(self, call: int) -> None:
        """End a lease: the piece was used, or could not be read."""
        with self._lock:
            self._leased.discard(call)
            self._lock.notify_all()

    def put_back(self, material: Material, kind: tuple[int, int]) -> None:
        """Store a leased piece that was not used again, unless it has become void meanwhile."""
        call = material.call
        try:
            if call in self._leased:
                self.put(material, kind)
        finally:
            with self._lock:
                void = call not in self._leased and self._pieces.pop(call, None) is not None
            if void:
                self._path(call, kind).unlink(missing_ok=True)
            self.end_lease(call)

    def keep_only(self, calls: object) -> None:
        """Remove the pieces of all calls but these.

        An earlier session may still lease pieces. This waits for them up to `LEASE_WAIT` seconds; those that are not
        put back by then are void here, and so at all parties.
        """
        wanted = set(calls) if isinstance(calls, list) and all(type(c) is int for c in calls) else set()
        with self._lock:
            self._lock.wait_for(lambda: not self._leased, LEASE_WAIT)
            self._leased.clear()
            others = {call: kind for call, (kind, _) in self._pieces.items() if call not in wanted}
            for call in others:
                del self._pieces[call]
        for call, kind in others.items():
            self._path(call, kind).unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove all material of the session."""
        with self._lock:
            self._pieces.clear()
            self._leased.clear()
        self.store.remove_shelf(self)

    def _path(self, call: int, kind: tuple[int, int]) -> Path:
        return self.folder / f"{call:010d}-{'x'.join(map(str, kind))}.piece"

    def _about(self, call: int, kind: tuple[int, int]) -> bytes:
        binding = msgspec.to_builtins(self.binding)
        about = {"session": self.session.hex(), "call": call, "kind": list(kind), "binding": binding}
        return json.dumps(about, sort_keys=True).encode()


@contextmanager
def all_or_nothing(partial: Path) -> Iterator[None]:
    """Write in the block; if that fails, `partial` is removed.

    Raises:
        StoreFullError: the disk is full.
        MaterialError: it cannot be written for another reason.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        kind = StoreFullError if is_full(error) else MaterialError
        raise kind(f"prepared material cannot be kept: {error.strerror}; nothing of this call is kept") from None


BUDGET = 4 << 30


class Store:
    """The prepared material of one party.

    Args:
        folder: where it is kept. By default a temporary one, with a key in memory, which ends with this object; a
            store with a folder is `lasting`.
        key_file: of the key, made if it does not exist; by default in the folder.
        budget: largest number of bytes on disk.
        used_file: where uses are written down (`UsedPlaces`), outside the folder; by default FOLDER.used beside it.

    Raises:
        ArgumentError: the folder, the key or the file of uses cannot be used.
        StoreInUseError: another process uses the folder.
    """

    def __init__(
        self, folder: str | Path | None = None, key_file: str | Path | None = None, budget: int = BUDGET,
        used_file: str | Path | None = None,
    ):  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(prefix="sectorch-") if folder is None else folder)
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, True) if folder is None else None
        self.budget = budget
        self.lasting = folder is not None
        self._lock = threading.Lock()
        self._shelves: dict[bytes, Shelf] = {}
        self.places: UsedPlaces | None = None
        self.on_evict: Callable[[Shelf], None] = lambda shelf: None
        """Called with a shelf that was evicted."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_folder()
            self.key = key_of(Path(key_file) if key_file else self.folder / "store.key") if folder else os.urandom(32)
            self._clean()
            if self.lasting:
                path = Path(used_file) if used_file else self.folder.with_name(f"{self.folder.name}.used")
                if path.resolve().is_relative_to(self.folder.resolve()):
                    raise ArgumentError(f"{path} is in the store's folder, and would be restored with it; name another")
                self._refuse_used(path)
        except OSError as error:
            raise ArgumentError(f"cannot keep material in {folder}: {error.strerror}") from None

    def __repr__(self) -> str:
        return f"Store({self.folder}, {self.used / 1e6:.1f} of {self.budget / 1e6:.0f} MB)"

    def _lock_folder(self) -> None:
        """Lock the folder: two processes on one folder would delete each other's half-written pieces."""
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
        """Load the shelves, and remove what was claimed or half written when a process ended."""
        for folder in list(self.folder.iterdir()):
            if not folder.is_dir():
                continue
            for path in folder.iterdir():
                if not PIECE_NAME.fullmatch(path.name) and path.name != "binding.sealed":
                    path.unlink()
            try:
                session = bytes.fromhex(folder.name)
                sealed = (folder / "binding.sealed").read_bytes()
                content = unseal(self.key, io.BytesIO(sealed), len(sealed), b"binding" + session)
                self._shelves[session] = Shelf(self, session, msgspec.json.decode(content, type=MaterialBinding))
            except (ValueError, OSError, InvalidTag, msgspec.MsgspecError):
                shutil.rmtree(folder)

    def _refuse_used(self, path: Path) -> None:
        """Drop the pieces that were used before, or of which nothing is known: this folder came from a backup."""
        places = UsedPlaces(path, self.name, list(self._shelves))
        for session, shelf in list(self._shelves.items()):
            if not places.known(session):
                self.warn_of_restored(shelf, list(shelf.calls()), "nothing is known of that session here")
                shelf.drop()
            else:
                shelf.refuse_used(as_ranges(places.of(session)), "this party")
        self.places = places

    def warn_of_restored(self, shelf: Shelf, calls: list[int], by: str) -> None:
        """Log that pieces were dropped that are of a backup, or whose use a crash has interrupted."""
        numbers = as_ranges(calls)
        named = ",".join(f"{a}-{b}" if a < b else str(a) for a, b in itertools.islice(_pairs(numbers), 20))
        write(
            log, "restored", logging.WARNING, session=shelf.session.hex(), calls=len(calls), numbers=named,
            client=shelf.binding.client, model=shelf.binding.model or None, used_by=by,
            why="used before, and not again: this store is of a backup, or a crash came between",
        )  # fmt: skip

    @property
    def used(self) -> int:
        """Bytes on disk."""
        return sum(shelf.bytes for shelf in self.shelves())

    def figures(self) -> dict[str, float]:
        """The current values of the gauges of `observe.GAUGES`."""
        shelves = self.shelves()
        kept = {"store_bytes": sum(shelf.bytes for shelf in shelves), "calls_prepared": sum(map(len, shelves))}
        return {**kept, "store_budget_bytes": self.budget}

    def shelves(self, **wanted: object) -> list[Shelf]:
        """The shelves whose binding has these entries."""
        with self._lock:
            shelves = list(self._shelves.values())
        return [s for s in shelves if all(getattr(s.binding, k) == v for k, v in wanted.items())]

    def holds(self, session: bytes) -> bool:
        """Whether there is a shelf of that session."""
        with self._lock:
            return session in self._shelves

    def shelf(self, session: bytes, binding: MaterialBinding | None = None) -> Shelf:
        """The shelf of a session; with a `binding`, it is made if there is none.

        Raises:
            MaterialError: there is none, or it has another binding.
        """
        with self._lock:
            shelf = self._shelves.get(session)
            if shelf is None and binding is not None:
                if self.places is not None:
                    self._note_begin(self.places, session)
                folder = self.folder / session.hex()
                content = b"".join(seal(self.key, [msgspec.json.encode(binding)], b"binding" + session))
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

    def _note_begin(self, places: UsedPlaces, session: bytes) -> None:
        """Write down that a session begins. Raises StoreFullError, MaterialError."""
        try:
            places.begin(session)
        except OSError as error:
            kind = StoreFullError if is_full(error) else MaterialError
            raise kind(f"prepared material cannot be kept: {error.strerror} at {places.path}") from None

    def _write(self, path: Path, data: bytes) -> None:
        if self.lasting:
            files.write(path, data)
        else:
            with open(path, "wb", opener=files.private) as file:
                file.write(data)

    @property
    def name(self) -> str:
        """A random name of this folder, which is kept in it. A copy of the key in another folder has another name."""
        path = self.folder / "store.name"
        try:
            if not path.exists():
                self._write(path, os.urandom(16).hex().encode())
            return path.read_text()
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read or write {path}: {error}") from None

    def free_bytes(self, client: str) -> int:
        """Bytes that a client's material can still take, counting what would be evicted for it."""
        sizes, account = self._sizes(), account_of(client)
        stale = sum(shelf.bytes for shelf in self.shelves() if shelf.is_stale(client))
        return max(0, self.budget - sizes.total() + stale, self._share(sizes, account) - sizes[account])

    room = renamed_attribute("room", "free_bytes")

    def make_room(self, client: str, size: int) -> None:
        """Evict other clients' material until `size` bytes are free, as far as the rules of eviction allow."""
        account = account_of(client)
        while (sizes := self._sizes()).total() + size > self.budget:
            others = [s for s in self.shelves() if len(s) and account_of(s.binding.client) != account]
            candidates = [s for s in others if s.is_stale(client)]
            if not candidates and sizes[account] + size <= self._share(sizes, account):
                most = max((sizes[account_of(s.binding.client)] for s in others), default=0)
                candidates = [s for s in others if sizes[account_of(s.binding.client)] == most]
            if not candidates:
                return
            shelf = min(candidates, key=Shelf.last_change)
            own = shelf.binding
            write(log, "evicted", calls=len(shelf), client=own.client, model=own.model or None, for_client=client)
            shelf.drop()
            self.on_evict(shelf)

    def _sizes(self) -> Counter[str]:
        """Bytes by client, whose names that differ in case are one."""
        sizes: Counter[str] = Counter()
        for shelf in self.shelves():
            if count := shelf.bytes:
                sizes[account_of(shelf.binding.client)] += count
        return sizes

    def _share(self, sizes: Counter[str], account: str) -> int:
        return self.budget // len({*sizes, account})

    def forget(self, session: bytes) -> None:
        """Remove the material of a session, if there is any."""
        with self._lock:
            shelf = self._shelves.get(session)
        if shelf is not None:
            shelf.drop()

    def close(self) -> None:
        """Unlock the folder, and remove it if it is temporary."""
        self._unlock()
        if self._remove is not None:
            self._remove()

    def remove_shelf(self, shelf: Shelf) -> None:
        """Remove a shelf and its folder."""
        with self._lock:
            self._shelves.pop(shelf.session, None)
        gone = shelf.folder.with_suffix(".dropped")  # renamed first, so that after a crash `_clean` removes all of it
        with suppress(OSError):
            os.replace(shelf.folder, gone)
            if self.lasting:
                files.flush_to_disk(self.folder)
        if self.places is not None:
            self.places.end(shelf.session)
        shutil.rmtree(gone, ignore_errors=True)


def _pairs(ranges: list[int]) -> Iterator[tuple[int, int]]:
    return zip(ranges[::2], ranges[1::2], strict=True)


def fingerprint(*things: object) -> str:
    """The SHA-256 of public descriptions as JSON."""
    return hashlib.sha256(json.dumps(things, sort_keys=True).encode()).hexdigest()


def tensor_digest(named: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """SHA-256 of tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, value in named:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(raw(value))
    return digest.digest()


def version(description: dict, edition: object) -> str:
    """The version of a model: a digest of its architecture and of its owner's commitment to the weights."""
    return fingerprint(description, edition)
