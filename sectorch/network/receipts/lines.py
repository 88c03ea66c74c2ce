"""The lines of a file of receipts: their form, the hash that chains them and the signature of the party.

A line is one JSON object in canonical form: keys in order, no blanks, ASCII. What every line has:

    number      0, 1, 2, ...
    event       "began": a process opened the file; "asked": a query, before it was served; "opened": what a program is
                about to reveal; "ended": how a query ended
    time        UTC by the party's own clock, as 2026-01-31T23:59:59.123456Z
    previous    SHA-256 of the line before it, in hexadecimal digits; 64 zeros in the first one
    signature   Ed25519 over a context and the line's canonical bytes without this entry

What else a line has is in `FORMS`. `opened` and `ended` have the number of the line that it belongs to in `of`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ...errors import ReceiptError

FORMAT = 1
NOTHING = "0" * 64
"""What stands in the place of the hash of a line before the first one."""
LONGEST = 64 << 10
"""Bytes of one line."""
_CONTEXT = b"sectorch receipt v1\x00"
HASH = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")

_LINE = {"number": int, "event": str, "time": str, "previous": str, "signature": str}
FORMS: dict[str, tuple[dict[str, type], dict[str, type]]] = {
    "began": (
        {"format": int, "party": str, "role": str, "certificate": str, "public": str},
        {"cut_bytes": int, "cut_hash": str},
    ),
    "asked": (
        {
            "role": str, "session": str, "call": int, "client": str, "model": str, "version": str, "asked": str,
            "learned": str,
        },
        {"rows": int, "key": str, "certificate": str},
    ),
    "opened": ({"of": int, "what": str, "to": str, "most": int}, {}),
    "ended": ({"of": int, "outcome": str}, {}),
}  # fmt: skip
"""What a line of each event has beside what every line has: always, and sometimes.

`opened` says what this party is about to send that somebody learns something by, to whom, and that from the query's
beginning on it does so at most so often; a loop that reveals the same again has a line when that number is reached.
`public` is the public key by which the file's lines are checked; `cut_bytes` and `cut_hash` are size and SHA-256 of a
half-written line that was cut off. `learned` is what the client learns at most;
`rows` is there where the model's inputs have rows; `key` and `certificate` are the
fingerprints by which the party knows the client.
"""


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


def parsed(line: bytes) -> dict:
    """The record in a line, signature and all, which is not checked here.

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
    event = record.get("event")
    must, may = FORMS.get(event if isinstance(event, str) else "", (None, {}))
    if must is None:
        raise ReceiptError("it is of an event that this version does not know")
    known = {**_LINE, **must, **may}
    wrong = [k for k, v in record.items() if k not in known or type(v) is not known[k]]
    missing = [k for k in (*_LINE, *must) if k not in record]
    if wrong or missing or not _TIME.fullmatch(record["time"]):
        raise ReceiptError(f"its entries are not those of '{event}'")
    if event == "began" and record["format"] != FORMAT:
        raise ReceiptError(f"it is of format {record['format']}, and this version reads {FORMAT}")
    return record


def check_signature(record: Mapping[str, object], public: Ed25519PublicKey) -> None:
    """Raise ReceiptError unless the key has signed a parsed record."""
    unsigned = {k: v for k, v in record.items() if k != "signature"}
    try:
        public.verify(bytes.fromhex(str(record["signature"])), _CONTEXT + _canonical(unsigned))
    except (InvalidSignature, ValueError):
        raise ReceiptError("its signature is not right: the line was changed, or another key has signed it") from None


def public_key(record: Mapping[str, object]) -> Ed25519PublicKey:
    """The key in a `began` line. Raises ReceiptError."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(str(record["public"])))
    except ValueError:
        raise ReceiptError("it does not hold an Ed25519 public key") from None


def _canonical(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
