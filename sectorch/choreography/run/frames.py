"""Messages on the wire: a fixed header, names, a shape, and raw bytes. Nothing in a frame is executed or unpickled.

    magic 2 | version 1 | kind 1 | session 16 | call 4 | number 4 | part 4 | parts 4 | dtype 1 | dims 1
    | path length 2 | label length 2 | payload length 4 | dims * 8 | path | label | payload

Integers are big-endian. `number` counts the messages of one session in one direction of an edge, so a lost, repeated or
foreign frame is noticed. Tensors above `PART_BYTES` are sent in parts. Several frames may be joined to one message of
the transport.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from ...errors import FrameError
from ..declaration import PAYLOADS

MAGIC, VERSION = b"SX", 3
PART_BYTES = 1 << 20
MAX_DIMS = 12
_HEAD = struct.Struct(">2sBB16sIIIIBBHHI")


class Kind(IntEnum):
    """The kind of a frame."""

    DATA = 1
    CONTROL = 2
    ABORT = 3
    CREDIT = 4


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class Frame:
    """One frame. A control frame's payload is JSON, an abort's is its reason; a credit's `number` counts bytes.

    Frames are not changed. The class is not frozen, since a frozen one takes four times as long to make and a call has
    many.
    """

    kind: Kind
    session: bytes
    call: int = 0
    number: int = 0
    path: str = ""
    label: str = ""
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1
    payload: bytes | memoryview = b""

    @property
    def size(self) -> int:
        """Bytes of the frame on the wire."""
        path, label = self.path, self.label
        names = len(path if path.isascii() else path.encode()) + len(label if label.isascii() else label.encode())
        return _HEAD.size + 8 * len(self.shape) + names + len(self.payload)

    def __repr__(self) -> str:
        return (
            f"Frame({self.kind.name}, call {self.call}, {self.path}/{self.label} {self.shape}, {len(self.payload)} B)"
        )


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    path, label = frame.path.encode(), frame.label.encode()
    head = _HEAD.pack(
        MAGIC, VERSION, frame.kind, frame.session, frame.call, frame.number, frame.part, frame.parts,
        PAYLOADS.index(frame.dtype), len(frame.shape), len(path), len(label), len(frame.payload),
    )  # fmt: skip
    return b"".join((head, struct.pack(f">{len(frame.shape)}Q", *frame.shape), path, label, frame.payload))


def unpack(data: bytes | memoryview) -> Iterator[Frame]:
    """The frames in some bytes, one after another; payloads are views of `data`.

    Raises:
        FrameError: the bytes are not what `pack` writes.
    """
    view, start = memoryview(data), 0
    while start < len(data):
        frame, start = _unpack_one(view, start)
        yield frame


def _unpack_one(data: memoryview, start: int) -> tuple[Frame, int]:
    if len(data) - start < _HEAD.size:
        raise FrameError(f"a frame of {len(data) - start} bytes is shorter than its header")
    magic, version, kind, session, call, number, part, parts, dtype, dims, n_path, n_label, n_payload = (
        _HEAD.unpack_from(data, start)
    )
    if magic == MAGIC and version != VERSION:
        raise FrameError(f"a frame of version {version}, and this side reads {VERSION}: install the same release")
    if magic != MAGIC:
        raise FrameError("not a frame of this protocol")
    if kind not in _KINDS or dtype >= len(PAYLOADS) or dims > MAX_DIMS or not part < parts:
        raise FrameError("a frame header holds an impossible value")
    shape_at = start + _HEAD.size
    path_at = shape_at + 8 * dims
    label_at, payload_at = path_at + n_path, path_at + n_path + n_label
    end = payload_at + n_payload
    if end > len(data):
        raise FrameError("a frame's lengths do not add up")
    shape = struct.unpack_from(f">{dims}Q", data, shape_at)
    try:
        path, label = str(data[path_at:label_at], "utf-8"), str(data[label_at:payload_at], "utf-8")
    except UnicodeDecodeError:
        raise FrameError("a frame's names are not text") from None
    payload = data[payload_at:end]
    return Frame(_KINDS[kind], session, call, number, path, label, PAYLOADS[dtype], shape, part, parts, payload), end


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy where it is stored so."""
    if not tensor.numel():
        return memoryview(b"")
    # numpy's view of it, since a view of torch's takes several times as long.
    return tensor.detach().contiguous().numpy().data.cast("B")


def tensor_of(payload: bytes | memoryview, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own memory that has these bytes."""
    if not payload:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(bytearray(payload), _IN_NUMPY[dtype]).reshape(shape))


_IN_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8}


@functools.lru_cache(1 << 12)
def _names(path: str, label: str, shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[int, int, int, int], bytes]:
    """What a header says of a message beside its place and its content, and the bytes between the two."""
    p, n = path.encode(), label.encode()
    return (PAYLOADS.index(dtype), len(shape), len(p), len(n)), struct.pack(f">{len(shape)}Q", *shape) + p + n


def parts_of(frame: Frame, tensor: torch.Tensor) -> Iterator[bytes]:
    """A tensor as packed frames, each of at most `PART_BYTES` of payload."""
    data = raw(tensor)
    lengths, names = _names(frame.path, frame.label, tensor.shape, tensor.dtype)
    count = max(1, -(-len(data) // PART_BYTES))
    for i in range(count):
        part = data[i * PART_BYTES : (i + 1) * PART_BYTES]
        head = _HEAD.pack(
            MAGIC, VERSION, frame.kind, frame.session, frame.call, frame.number, i, count, *lengths, len(part)
        )
        yield b"".join((head, names, part))
