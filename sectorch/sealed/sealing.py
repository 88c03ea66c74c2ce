"""Files under a party's key: AES-256-GCM in segments, under a key of its own derived from a fresh nonce."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .. import files
from ..choreography.streams import derive
from ..errors import ArgumentError

SEGMENT = 4 << 20
NONCE_BYTES, TAG_BYTES = 32, 16


def key_of(path: Path) -> bytes:
    """The 32 bytes of a key file, which is made if it is not there. Raises ArgumentError, OSError."""
    if not path.exists():
        files.write(path, os.urandom(32), 0o600)
    key = path.read_bytes()
    if len(key) != 32:
        raise ArgumentError(f"{path} does not hold a store's key (32 bytes)")
    return key


def sealed(key: bytes, parts: list, about: bytes) -> Iterator[bytes]:
    """A nonce, then segments; the last one is marked, so that a cut file does not open."""
    nonce = os.urandom(NONCE_BYTES)
    cipher = AESGCM(derive(key, nonce, "piece", 32))
    yield nonce
    held, number = bytearray(), 0
    for part in parts:
        view = memoryview(part).cast("B")
        at = 0
        while at < len(view):
            count = min(SEGMENT - len(held), len(view) - at)
            held += view[at : at + count]
            at += count
            if len(held) == SEGMENT:
                yield cipher.encrypt(struct.pack(">IQ", 0, number), held, about)
                held, number = bytearray(), number + 1
    yield cipher.encrypt(struct.pack(">IQ", 1, number), held, about)


def opened(key: bytes, file: BinaryIO, size: int, about: bytes) -> bytearray:
    """Raises InvalidTag where a segment is not what was sealed, in that place, for that use."""
    count = -(-(size - NONCE_BYTES) // (SEGMENT + TAG_BYTES))
    length = size - NONCE_BYTES - count * TAG_BYTES
    if length < 0 or count < 1:
        raise InvalidTag
    cipher = AESGCM(derive(key, file.read(NONCE_BYTES), "piece", 32))
    out, at = bytearray(length), 0
    for number in range(count):
        part = cipher.decrypt(
            struct.pack(">IQ", int(number == count - 1), number), file.read(SEGMENT + TAG_BYTES), about
        )
        out[at : at + len(part)] = part
        at += len(part)
    return out
