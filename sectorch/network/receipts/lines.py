"""The lines of a file of receipts: their form, the hash that chains them and the signature of the party.

A line is one JSON object in canonical form: keys in order, no blanks, ASCII. What every line has:

    number      0, 1, 2, ...
    event       "began": a process opened the file; "asked": a query, before it was served; "opened": what a program is
                about to reveal; "ended": how a query ended
    time        UTC by the party's own clock, as 2026-01-31T23:59:59.123456Z
    previous    SHA-256 of the line before it, in hexadecimal digits; 64 zeros in the first one
    signature   Ed25519 over a context and the line's canonical bytes without this entry

What else a line has is in the declared types below, one for each event.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import UNSET, Meta, UnsetType

from ...errors import ReceiptError

FORMAT = 1
NOTHING = "0" * 64
"""What stands in the place of the hash of a line before the first one."""
LONGEST = 64 << 10
"""Bytes of one line."""
_CONTEXT = b"sectorch receipt v1\x00"
HASH = re.compile(r"[0-9a-f]{64}")


class ReceiptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="event"):
    """What every line has."""

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
        learned: what the client learns at most. rows: there where the model's inputs have rows.
        key, certificate: the fingerprints by which the party knows the client.
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


class OpenedLine(ReceiptLine, frozen=True, kw_only=True, tag="opened"):
    """What this party is about to send that somebody learns something by.

    Attributes:
        of: the number of the query's line. to: who learns it.
        most: how often it does so at most from the query's beginning on; a loop that reveals the same again has a line
            when that number is reached.
    """

    of: int
    what: str
    to: str
    most: int


class EndedLine(ReceiptLine, frozen=True, kw_only=True, tag="ended"):
    """How the query of the line `of` ended."""

    of: int
    outcome: str


_KINDS = {str(kind.__struct_config__.tag): kind for kind in (BeganLine, AskedLine, OpenedLine, EndedLine)}


def hash_of(line: bytes) -> str:
    """The hash by which the next line refers to a line, which is without its end-of-line."""
    return hashlib.sha256(line).hexdigest()


def signed(record: Mapping[str, object], key: Ed25519PrivateKey) -> bytes:
    """The line of a record, without its end-of-line.

    Raises:
        ReceiptError: the record is not of the form of its event, or too long.
    """
    line = _canonical({**record, "signature": key.sign(_CONTEXT + _canonical(record)).hex()})
    parsed(line)
    return line


def parsed(line: bytes) -> ReceiptLine:
    """What a line says, signature and all, which is not checked here.

    Raises:
        ReceiptError: the line is not of the form in which a party writes it.
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
