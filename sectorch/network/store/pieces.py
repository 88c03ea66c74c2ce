"""Offline material as bytes and back: a JSON head with shapes and dtypes, then raw tensors.

length of the head 8 | head, padded to 8 | tensors, each padded to 8
"""

from __future__ import annotations

import json
from math import prod

import torch

from ...choreography.program.material import Material
from ...choreography.run.frames import raw
from ...errors import MaterialError

_KEPT = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32)
_DTYPES = {str(d).removeprefix("torch."): d for d in _KEPT}


def write_piece(material: Material) -> tuple[list, int]:
    """The parts of a piece in order, and how many bytes they are together.

    Raises:
        MaterialError: it was used, or holds something that is not kept.
    """
    if material.values is None:
        raise MaterialError(f"the material of call {material.call} was used already; prepare it again")
    parts: list = []
    places: dict[tuple, int] = {}
    size = 0

    def written(value: object) -> object:
        nonlocal size
        if value is None or not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, str, type(None))):
                raise MaterialError(f"an offline step gave a {type(value).__name__}, which is not kept")
            return {"plain": value}
        if value.dtype not in _KEPT:
            raise MaterialError(f"an offline step gave {value.dtype}, which is not kept")
        entry: dict = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place not in places:
            data = raw(value)
            places[place] = size
            parts.append(data)
            if len(data) % 8:
                parts.append(bytes(-len(data) % 8))
            size += len(data) + -len(data) % 8
        return {**entry, "at": places[place]}

    head = {
        "call": material.call, "session": material.session.hex(), "program": material.program,
        "setup": material.setup,
        "values": [written(v) for v in material.values],
    }  # fmt: skip
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "big"), text, *parts], 8 + len(text) + size


def read_piece(data: bytearray) -> Material:
    """What `write_piece` wrote; its tensors share the memory of `data`.

    Raises:
        ValueError: it is something else. The caller has checked that nobody changed it.
    """
    length = int.from_bytes(data[:8], "big")
    head = json.loads(bytes(data[8 : 8 + length]))
    if set(head) != {"call", "session", "program", "setup", "values"}:
        raise ValueError("a piece of another version")
    start = 8 + length

    def read(entry: dict) -> object:
        if "plain" in entry:
            return entry["plain"]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start + entry["at"]).view(shape)

    values = [read(entry) for entry in head["values"]]
    return Material(head["call"], bytes.fromhex(head["session"]), head["program"], head["setup"], values)
