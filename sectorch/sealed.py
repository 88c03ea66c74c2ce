"""Sealed files, and tensors as bytes: how a party stores them under its own key.

A file is encrypted with AES-256-GCM in segments, under a key that is derived from the party's key and a fresh nonce.
Tensors and public facts are a JSON head with shapes and dtypes, then raw tensors:

    length of the head 8 | head, padded to 8 | tensors, each padded to 8
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from . import files
from .choreography.run.frames import raw
from .choreography.streams import derive
from .errors import ArgumentError

SEGMENT = 4 << 20
NONCE_BYTES, TAG_BYTES = 32, 16


def key_of(path: Path) -> bytes:
    """The 32 bytes of a key file, which nobody else can read; creates the file if it does not exist.

    Raises:
        ArgumentError: others can read it, or it holds no key. OSError.
    """
    if not path.exists():
        files.create(path, os.urandom(32))
    if files.others_can_read(path):
        raise ArgumentError(
            f"others can read {path}, the key of what is stored: chmod 600 {path}, and if somebody may have read it, "
            f"remove the folder that it is for"
        )
    key = path.read_bytes()
    if len(key) != 32:
        raise ArgumentError(f"{path} does not hold a store's key (32 bytes)")
    return key


def seal(key: bytes, parts: list, about: bytes) -> Iterator[bytes]:
    """A nonce, then segments; the last segment is marked, so that a truncated file does not open."""
    nonce = os.urandom(NONCE_BYTES)
    cipher = AESGCM(derive(key, nonce, "piece", 32))
    yield nonce
    segment, number = bytearray(), 0
    for part in parts:
        view = memoryview(part).cast("B")
        at = 0
        while at < len(view):
            count = min(SEGMENT - len(segment), len(view) - at)
            segment += view[at : at + count]
            at += count
            if len(segment) == SEGMENT:
                yield cipher.encrypt(struct.pack(">IQ", 0, number), segment, about)
                segment, number = bytearray(), number + 1
    yield cipher.encrypt(struct.pack(">IQ", 1, number), segment, about)


def unseal(key: bytes, file: BinaryIO, size: int, about: bytes) -> bytearray:
    """The bytes that `seal` took. Raises InvalidTag unless every segment was sealed in its place and for this use."""
    count = -(-(size - NONCE_BYTES) // (SEGMENT + TAG_BYTES))
    length = size - NONCE_BYTES - count * TAG_BYTES
    if length < 0 or count < 1:
        raise InvalidTag
    cipher = AESGCM(derive(key, file.read(NONCE_BYTES), "piece", 32))
    out, at = bytearray(length), 0
    for number in range(count):
        nonce = struct.pack(">IQ", int(number == count - 1), number)
        part = cipher.decrypt(nonce, file.read(SEGMENT + TAG_BYTES), about)
        out[at : at + len(part)] = part
        at += len(part)
    return out


_STORABLE = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
    torch.float16,
)  # fmt: skip
_DTYPES = {str(d).removeprefix("torch."): d for d in _STORABLE}


def write_tensors(head: Mapping[str, Any], values: Sequence[Any]) -> tuple[list, int]:
    """The parts of a file in order, and how many bytes they are together.

    Args:
        head: a mapping that JSON can hold, without an entry "values".
        values: tensors, numbers, strings and None; a tensor that occurs twice is stored once.

    Raises:
        ArgumentError: other values.
    """
    parts: list = []
    places: dict[tuple, int] = {}
    size = 0

    def entry(value: object) -> object:
        nonlocal size
        if value is None or not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, str, type(None))):
                raise ArgumentError(f"a {type(value).__name__}, which is not kept")
            return {"plain": value}
        if value.dtype not in _STORABLE:
            raise ArgumentError(f"{value.dtype}, which is not kept")
        found: dict = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place not in places:
            data = raw(value)
            places[place] = size
            parts.append(data)
            if len(data) % 8:
                parts.append(bytes(-len(data) % 8))
            size += len(data) + -len(data) % 8
        return {**found, "at": places[place]}

    text = json.dumps({**head, "values": [entry(v) for v in values]}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "big"), text, *parts], 8 + len(text) + size


class StoredValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value in a head: a tensor by its shape, its dtype and its place behind the head; or a plain value."""

    plain: bool | int | float | str | None = None
    shape: list[int] | None = None
    dtype: str = ""
    at: int = 0


class SealedHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The head of a file of tensors, to which each kind of file adds its public facts."""

    values: list[StoredValue]


Head = TypeVar("Head", bound=SealedHead)


def read_tensors(data: bytearray, of: type[Head]) -> tuple[Head, list[Any]]:
    """Head and values of the bytes that `write_tensors` gave; tensors share the memory of `data`.

    Raises:
        ValueError: the bytes are something else. The caller has checked that they were not changed.
    """
    start = 8 + int.from_bytes(data[:8], "big")
    try:
        head = msgspec.convert(json.loads(bytes(data[8:start])), of)
    except msgspec.ValidationError as error:
        raise ValueError(f"a file of another version ({error})") from None

    def value(entry: StoredValue) -> object:
        if entry.shape is None:
            return entry.plain
        dtype, count = _DTYPES[entry.dtype], prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start + entry.at).view(entry.shape)

    return head, [value(entry) for entry in head.values]
