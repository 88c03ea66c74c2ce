"""Receipts: a signed line for each query before it is served, and another when it ends, in a file of one party.

A line is on the disk (fsync) before the party goes on, and a query whose receipt cannot be written is not served. A
process that is killed leaves a query without an end, which an audit shows, and at most a half-written last line. The
next opening cuts that line off, and says so in the line that it writes in its place.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import UNSET, Meta, UnsetType

from .. import files
from ..errors import ArgumentError, IdentityError, ReceiptError, ReceiptsInUseError
from .identity.identity import Credentials, certificate_print, read_identity

# The lines of a file. A line is one JSON object in canonical form: keys in order, no blanks, ASCII.


FORMAT = 1
NOTHING = "0" * 64
"""The hash of the line before the first one."""
LONGEST = 64 << 10
"""Largest number of bytes of a line."""
_CONTEXT = b"sectorch receipt v1\x00"
HASH = re.compile(r"[0-9a-f]{64}")


class ReceiptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="event"):
    """The entries that all lines have; `event` names a line's type.

    Attributes:
        number: 0, 1, 2, ...
        time: UTC by the party's own clock.
        previous: SHA-256 of the line before, in hexadecimal digits; 64 zeros in the first line.
        signature: Ed25519 over a context and the line's canonical bytes without this entry.
    """

    number: int
    time: Annotated[str, Meta(pattern=r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")]
    previous: str
    signature: str


class BeganLine(ReceiptLine, frozen=True, kw_only=True, tag="began"):
    """A process opened the file.

    Attributes:
        public: the public key by which the file's lines are checked.
        cut_bytes, cut_hash: size and SHA-256 of a half-written line that was cut off.
    """

    format: int
    party: str
    role: str
    certificate: str
    public: str
    cut_bytes: int | UnsetType = UNSET
    cut_hash: str | UnsetType = UNSET


class AskedLine(ReceiptLine, frozen=True, kw_only=True, tag="asked"):
    """A query, before it was served.

    Attributes:
        learned: what the client learns at most. rows: of the inputs, if the model's inputs have rows.
        key, certificate: the fingerprints by which the party knows the client.
        commitment: the answering party's key, and its signature of `version` (`identity/commitment.py`).
    """

    role: str
    session: str
    call: int
    client: str
    model: str
    version: str
    asked: str
    learned: str
    rows: int | UnsetType = UNSET
    key: str | UnsetType = UNSET
    certificate: str | UnsetType = UNSET
    commitment: Annotated[str, Meta(pattern=r"\A[0-9a-f]{192}\Z")] | UnsetType = UNSET


class OpenedLine(ReceiptLine, frozen=True, kw_only=True, tag="opened"):
    """A reveal that this party is about to send.

    Attributes:
        of: the number of the query's line. to: the party that learns the value.
        most: largest number of such reveals since the query began; when it is reached, there is another line.
    """

    of: int
    what: str
    to: str
    most: int


class ReleasedLine(ReceiptLine, frozen=True, kw_only=True, tag="released"):
    """A release under a policy (`sectorch.release`), once it is charged and before its first message.

    Attributes:
        of: the number of the query's line. policy: the policy's digest. name: of the release.
        asked: the kind, dimensions and shape of the statistic. to: the parties that learn it.
        cells: the largest number of cells that are released. epsilon: what was charged, or was under that name before;
            0 without noise.
        withheld: the number of cells that were withheld, in a second line at a party that learns it.
    """

    of: int
    name: str
    policy: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    asked: str
    to: str
    cells: int
    epsilon: float
    withheld: int | UnsetType = UNSET


class EndedLine(ReceiptLine, frozen=True, kw_only=True, tag="ended"):
    """The outcome of the query of the line `of`.

    Attributes:
        statement, server: where S signs what it sends, a hash of what it has signed in this query, and its public key.
    """

    of: int
    outcome: str
    statement: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | UnsetType = UNSET
    server: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | UnsetType = UNSET


_KINDS = {str(kind.__struct_config__.tag): kind for kind in (BeganLine, AskedLine, OpenedLine, ReleasedLine, EndedLine)}


def hash_of(line: bytes) -> str:
    """The hash of a line, without its end-of-line, that the next line has."""
    return hashlib.sha256(line).hexdigest()


def sign_line(record: Mapping[str, object], key: Ed25519PrivateKey) -> bytes:
    """The line of a record, without its end-of-line.

    Raises:
        ReceiptError: the record does not have its event's entries, or is too long.
    """
    line = _canonical({**record, "signature": key.sign(_CONTEXT + _canonical(record)).hex()})
    parse_line(line)
    return line


def parse_line(line: bytes) -> ReceiptLine:
    """A line's content; its signature is not checked.

    Raises:
        ReceiptError: a party does not write such a line.
    """
    if len(line) > LONGEST:
        raise ReceiptError(f"it is longer than {LONGEST} bytes")
    try:
        record = json.loads(line)
        if line.endswith(b"\r"):
            raise ReceiptError("its end is that of another system's text files: get the file anew, copied as it is")
        if not isinstance(record, dict) or _canonical(record) != line:
            raise ReceiptError("it is not a JSON object in the form in which a party writes it")
    except (ValueError, RecursionError):
        raise ReceiptError("it is not JSON") from None
    kind = _KINDS.get(str(record.get("event")))
    if kind is None:
        raise ReceiptError("it is of an event that this version does not know")
    try:
        found = msgspec.convert(record, kind)
    except (msgspec.ValidationError, UnicodeError, RecursionError):
        raise ReceiptError(f"its entries are not those of '{record['event']}'") from None
    if isinstance(found, BeganLine) and found.format != FORMAT:
        raise ReceiptError(f"it is of format {found.format}, and this version reads {FORMAT}")
    return found


def check_signature(line: ReceiptLine, public: Ed25519PublicKey) -> None:
    """Raise ReceiptError unless the key has signed a line."""
    unsigned = {name: value for name, value in msgspec.to_builtins(line).items() if name != "signature"}
    try:
        public.verify(bytes.fromhex(line.signature), _CONTEXT + _canonical(unsigned))
    except (InvalidSignature, ValueError):
        raise ReceiptError("its signature is not right: the line was changed, or another key has signed it") from None


def public_key(line: BeganLine) -> Ed25519PublicKey:
    """The key in a `began` line. Raises ReceiptError."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(line.public))
    except ValueError:
        raise ReceiptError("it does not hold an Ed25519 public key") from None


def _canonical(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


log = logging.getLogger("sectorch.receipts")
_MODE = 0o600


class Receipts:
    """The receipts of one party, open for writing until `close`.

    Args:
        path: the file; made (mode 600) if it does not exist, and continued if it is this party's.
        credentials: of the party; its identity key signs.
        role: S, A or Q.

    Raises:
        IdentityError: the party has no identity key.
        ReceiptsInUseError: another process, or another party of this process, has the file open.
        ReceiptError: it is no file of this party's receipts, its last line is invalid, or it cannot be written.
    """

    def __init__(self, path: str | Path, credentials: Credentials, role: str):
        self.path, self._role = Path(path), role
        self._key = _signing_key(credentials)
        self._lock = threading.Lock()
        self._broken = self._failed = ""
        self._number, self._previous, self._size = 0, NOTHING, 0
        self._handle = self._open()
        self._unlock = weakref.finalize(self, os.close, self._handle)
        public = self._key.public_key().public_bytes_raw().hex()
        own = {
            "format": FORMAT, "party": credentials.called, "role": role,
            "certificate": certificate_print(credentials.certificate), "public": public,
        }  # fmt: skip
        try:
            self._lock_file()
            begins, half = self._last({k: own[k] for k in ("party", "role", "public")})
            os.fchmod(self._handle, os.fstat(self._handle).st_mode & _MODE)
            self._write({"event": "began", **own, **begins}, over=half)
            files.flush_to_disk(self.path.parent)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ReceiptError(f"cannot use the receipts {self.path}: {error.strerror}") from None
            raise
        log.info("receipts of %s go on at line %d of %s; its head is %s", role, self._number, self.path, self.head)

    def __repr__(self) -> str:
        return f"Receipts({self.path}, {self._number} lines)"

    @property
    def head(self) -> str:
        """The hash of the last line. An audit with it notices when lines are cut off."""
        return self._previous

    def begin_query(self, **facts: Any) -> int:
        """Write the line of a query that is about to begin; returns its number. Facts that are None are left out.

        Raises:
            ReceiptError: it cannot be written, so the query must not be served.
        """
        return self._add({"event": "asked", "role": self._role, **{k: v for k, v in facts.items() if v is not None}})[0]

    def record_reveal(self, number: int, what: str, to: str, most: int) -> None:
        """Write the line of a reveal that is about to be sent; see `OpenedLine`.

        Raises:
            ReceiptError: it cannot be written, so the reveal must not be sent.
        """
        self._add({"event": "opened", "of": number, "what": what, "to": to, "most": most})

    def record_release(self, number: int, **facts: Any) -> None:
        """Write the line of a release that is charged; see `ReleasedLine`.

        Raises:
            ReceiptError: it cannot be written, so the release must not go on.
        """
        self._add({"event": "released", "of": number, **facts})

    def end_query(self, number: int, outcome: str, **facts: str) -> str:
        """Write the line of a query's end, with these facts (`EndedLine`); returns the file's head after it.

        Raises:
            ReceiptError: it cannot be written.
        """
        return self._add({"event": "ended", "of": number, "outcome": outcome, **facts})[1]

    def unready(self) -> str:
        """Why no receipt can be written now, so that nothing is served; empty while receipts can be written."""
        with self._lock:
            try:
                self._check_file()
                if files.free_bytes(self.path.parent) < LONGEST:
                    raise ReceiptError(f"the disk is full: make room for {self.path}")
                if self._failed:  # a quota or a limit that the disk's own figures do not show
                    with tempfile.TemporaryFile(dir=self.path.parent) as probe:
                        probe.write(bytes(LONGEST))
                    self._failed = ""
                return ""
            except ReceiptError as error:
                why = str(error)
            except OSError as error:
                why = self._failed or error.strerror
        return f"no receipt can be written ({why}), and what has none is not served"

    def close(self) -> None:
        """Close the file; nothing can be served with it any more."""
        with self._lock:
            self._broken = self._broken or "the party was closed"
            self._unlock()

    def _open(self) -> int:
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise ReceiptError(f"cannot open the receipts {self.path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ReceiptError(f"{self.path} is not a plain file, and receipts are kept in one")
        return handle

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReceiptsInUseError(
                f"the receipts {self.path} are in use by another process; name another file, one for each party"
            ) from None

    def _last(self, own: dict[str, str]) -> tuple[dict[str, object], bytes]:
        """Go to the end of the file; returns entries about a half-written last line, and that line.

        The first and the last line are checked; `sectorch audit` checks all of them.
        """
        self._size = os.fstat(self._handle).st_size
        if not self._size:
            return {}, b""
        # A half-written line, a whole one and their ends: two lines of the largest size hold the last whole line.
        tail_at = max(0, self._size - 2 * LONGEST - 2)
        tail = os.pread(self._handle, self._size - tail_at, tail_at)
        whole, _, half = tail.rpartition(b"\n")
        begins: dict[str, object] = {}
        if half:
            if len(half) > LONGEST or not (whole or _begins_one(half)):
                raise ReceiptError(f"{self.path} is not a file of receipts; it is left as it is")
            log.warning(
                "the last line of %s was half written (%d bytes): a process was ended in the middle; it is cut off, "
                "and the file says so", self.path, len(half),
            )  # fmt: skip
            begins = {"cut_bytes": len(half), "cut_hash": hashlib.sha256(half).hexdigest()}
            self._size -= len(half)
        if not self._size:
            return begins, half
        first = os.pread(self._handle, LONGEST + 1, 0).partition(b"\n")[0]
        last = whole.rpartition(b"\n")[2]
        try:
            begun, ending = parse_line(first), parse_line(last)
            if not isinstance(begun, BeganLine) or begun.number or begun.previous != NOTHING:
                raise ReceiptError("the first line does not begin one")
            check_signature(begun, public_key(begun))
            if others := [k for k, v in own.items() if getattr(begun, k) != v]:
                raise ReceiptError(f"it is of another {' and '.join(others)}; name another file")
            check_signature(ending, self._key.public_key())
        except ReceiptError as error:
            raise ReceiptError(
                f"cannot go on with the receipts {self.path}: {error}; `sectorch audit` says more; name another"
            ) from None
        self._number, self._previous = ending.number + 1, hash_of(last)
        return begins, half

    def _add(self, record: dict[str, object]) -> tuple[int, str]:
        """Add a line; returns its number and its hash."""
        with self._lock:
            try:
                return self._write(record)
            except OSError as error:
                why = self._failed = error.strerror or str(error)
            except ReceiptError as error:
                why = str(error)
        log.error("no receipt can be written to %s: %s", self.path, why)
        raise ReceiptError(f"no receipt can be written ({why}), and what has none is not served")

    def _write(self, record: dict[str, object], over: bytes = b"") -> tuple[int, str]:
        """Add a line, in the place of the half-written line `over` at the end."""
        self._check_file(len(over))
        time = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        number = self._number
        line = sign_line({"number": number, "time": time, "previous": self._previous, **record}, self._key)
        # Set before anything is written: if the process goes on after an error in the middle, it writes nothing more.
        self._broken = "an earlier line may not be on the disk; start again"
        try:
            self._put(line + b"\n")
        except OSError:
            if not over:  # a full disk, which may have room again later, keeps nothing of the line
                os.ftruncate(self._handle, self._size)
                self._broken = ""
            raise
        # The new line is written over the half-written one, so at every moment the file ends with a line or with a
        # half.
        if len(over) > len(line) + 1:
            os.ftruncate(self._handle, self._size + len(line) + 1)
        os.fsync(self._handle)
        self._broken = self._failed = ""
        self._number, self._previous, self._size = number + 1, hash_of(line), self._size + len(line) + 1
        return number, self._previous

    def _check_file(self, over: int = 0) -> None:
        """Raise ReceiptError if nothing may be written any more; `over` bytes are at the end that are written over."""
        if self._broken:
            raise ReceiptError(self._broken)
        state = os.fstat(self._handle)
        if state.st_size != self._size + over or not state.st_nlink:
            raise ReceiptError("another program has changed or removed the file")

    def _put(self, data: bytes) -> None:
        at, left = self._size, memoryview(data)
        while left:
            count = os.pwrite(self._handle, left, at)
            at, left = at + count, left[count:]


def _begins_one(half: bytes) -> bool:
    """Whether a half-written line can be the first one of a file."""
    begin = b'{"certificate":"'
    return half[: len(begin)] == begin[: len(half)]


def _signing_key(credentials: Credentials) -> Ed25519PrivateKey:
    if not isinstance(credentials, Credentials):
        raise ArgumentError(f"receipts are signed by a party's Credentials, got {type(credentials).__name__}")
    if credentials.identity is None:
        raise IdentityError(
            f"'{credentials.called}' has no identity key to sign receipts: `sectorch keys identity FILE` makes one; "
            f"keep it as NAME-identity.pem beside the certificate NAME.pem, or name it with --identity"
        )
    return read_identity(credentials.identity)
