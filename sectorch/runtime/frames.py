"""Messages on the wire: a fixed header, names, a shape, and raw bytes. Nothing in a frame is executed or unpickled.

    magic 2 | version 1 | kind 1 | session 16 | call 4 | number 4 | part 4 | parts 4 | dtype 1 | dims 1
    | path length 2 | label length 2 | payload length 4 | dims * 8 | path | label | payload

Integers are big-endian. `number` counts the messages of one session in one direction of an edge, so a lost, repeated or
foreign frame is noticed. Tensors above `PART_BYTES` travel in parts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from ..errors import FrameError

MAGIC, VERSION = b"SX", 1
PART_BYTES = 1 << 20
MAX_BYTES = 1 << 31
MAX_DIMS = 12
_HEAD = struct.Struct(">2sBB16sIIIIBBHHI")
_DTYPES = (torch.int64, torch.int32, torch.uint8)


class Kind(IntEnum):
    """What a frame carries."""

    DATA = 1
    CONTROL = 2
    ABORT = 3


@dataclass(frozen=True)
class Frame:
    """One frame; for control frames `label` names the request and the payload is JSON."""

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

    def __repr__(self) -> str:
        return (
            f"Frame({self.kind.name}, call {self.call}, {self.path}/{self.label} {self.shape}, {len(self.payload)} B)"
        )


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    path, label = frame.path.encode(), frame.label.encode()
    head = _HEAD.pack(
        MAGIC, VERSION, frame.kind, frame.session, frame.call, frame.number, frame.part, frame.parts,
        _DTYPES.index(frame.dtype), len(frame.shape), len(path), len(label), len(frame.payload),
    )  # fmt: skip
    return b"".join((head, struct.pack(f">{len(frame.shape)}Q", *frame.shape), path, label, frame.payload))


def unpack(data: bytes) -> Frame:
    """Bytes as a frame.

    Raises:
        FrameError: anything that `pack` cannot have made.
    """
    if len(data) < _HEAD.size:
        raise FrameError(f"a frame of {len(data)} bytes is shorter than its header")
    magic, version, kind, session, call, number, part, parts, dtype, dims, n_path, n_label, n_payload = (
        _HEAD.unpack_from(data)
    )
    if magic != MAGIC or version != VERSION:
        raise FrameError("not a frame of this protocol version")
    if kind not in Kind._value2member_map_ or dtype >= len(_DTYPES) or dims > MAX_DIMS or not part < parts:
        raise FrameError("a frame header holds an impossible value")
    at = _HEAD.size + 8 * dims
    if len(data) != at + n_path + n_label + n_payload:
        raise FrameError("a frame's lengths do not add up")
    shape = struct.unpack_from(f">{dims}Q", data, _HEAD.size)
    try:
        path = data[at : at + n_path].decode()
        label = data[at + n_path : at + n_path + n_label].decode()
    except UnicodeDecodeError:
        raise FrameError("a frame's names are not text") from None
    payload = memoryview(data)[at + n_path + n_label :]
    return Frame(Kind(kind), session, call, number, path, label, _DTYPES[dtype], shape, part, parts, payload)


def parts_of(frame: Frame, tensor: torch.Tensor) -> list[bytes]:
    """A tensor as packed frames, each of at most `PART_BYTES` of payload."""
    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    count = max(1, -(-len(data) // PART_BYTES))
    shape = tuple(tensor.shape)
    return [
        pack(
            Frame(
                frame.kind, frame.session, frame.call, frame.number, frame.path, frame.label, tensor.dtype, shape, i,
                count, data[i * PART_BYTES : (i + 1) * PART_BYTES],
            )
        )
        for i in range(count)
    ]  # fmt: skip
