"""Tensors and public facts as bytes and back: a JSON head with shapes and dtypes, then raw tensors.

length of the head 8 | head, padded to 8 | tensors, each padded to 8
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..choreography.run.frames import raw
from ..errors import ArgumentError

_KEPT = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float32,
    torch.float16,
)  # fmt: skip
_DTYPES = {str(d).removeprefix("torch."): d for d in _KEPT}


def written(head: Mapping[str, Any], values: Sequence[Any]) -> tuple[list, int]:
    """The parts of a file in order, and how many bytes they are together.

    Args:
        head: what JSON has, without an entry "values". values: tensors, numbers, strings and None; a tensor that stands
            there twice is kept once.

    Raises:
        ArgumentError: something else.
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
        if value.dtype not in _KEPT:
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


def read(data: bytearray) -> tuple[dict[str, Any], list[Any]]:
    """Head and values of what `written` wrote; its tensors share the memory of `data`.

    Raises:
        ValueError: it is something else. The caller has checked that nobody changed it.
    """
    length = int.from_bytes(data[:8], "big")
    head = json.loads(bytes(data[8 : 8 + length]))
    start = 8 + length

    def value(entry: dict) -> object:
        if "plain" in entry:
            return entry["plain"]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start + entry["at"]).view(shape)

    return head, [value(entry) for entry in head.pop("values")]
