"""The bits of values that a party knows, lined up by the elements that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ..ring.bitplanes import planes, rows
from .known import Known

Row = tuple[np.ndarray, str, str]
"""A bit of each element as packed bytes, its name, and how its party came by it."""


def whole(value: torch.Tensor, n: int) -> torch.Tensor | None:
    """A value as [k, n]: k of each element; or, packed, as [k, words], also of several side by side. None where it is
    neither."""
    words = -(-n // 64)
    if value.dim() and value.shape[-1] == n:
        return value.reshape(-1, n)
    if value.dim() and value.shape[0] == n:
        return value.reshape(n, -1).T.contiguous()
    if value.numel() == n:
        return value.reshape(1, n)
    if value.numel() and value.dim() and value.shape[-1] % words == 0 and value.dtype == torch.int64:
        return value.reshape(-1, words)
    return None


def rows_of(known: Known, n: int, places: Iterable[int]) -> Iterator[tuple[np.ndarray, str]]:
    """Bits of a value at these places of a word, each of all elements as packed bytes, with its name."""
    lined = whole(known.value, n)
    if lined is None:
        return
    several = len(lined) > 1
    for i, one in enumerate(lined):
        name = f"{known.name}{f' [{i}]' if several else ''}"
        if lined.shape[-1] != n:
            yield one.contiguous().numpy().view(np.uint8), f"the packed bits of {name}"
            continue
        width = 8 * one.dtype.itemsize
        packed = planes(rows(one.to(torch.int64))).numpy()
        for place in dict.fromkeys(min(p, width - 64 + p) if p >= 62 else p for p in places if p >= 62 or p < width):
            yield packed[place].view(np.uint8), f"bit {place} of {name}"


def plane_of(name: str) -> int:
    """The place in a word of a bit that `rows_of` has named; 0 of packed bits."""
    return int(name.split()[1]) if name.startswith("bit ") else 0


def unpacked(row: np.ndarray, n: int) -> torch.Tensor:
    """The bit of each element, in order: bit t of word w is element t * W + w."""
    words = row.view(np.uint64)
    bits = (words[None, :] >> np.arange(64, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(bits.reshape(-1)[:n].astype(bool))
