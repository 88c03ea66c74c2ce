"""A matrix times tiles of 64 columns, mod 2^64: by torch or a compiled loop, whichever is faster on this processor."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


@functools.cache
def wide_products() -> bool:
    """Whether the processor multiplies vectors of 64-bit words, so that torch's int64 kernels are fast."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def times_tiles(left: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """[r, K] times [tiles, K, 64] -> [tiles, r, 64]."""
    if wide_products() or left.is_meta or tiles.is_meta:
        return F.conv1d(tiles, left.unsqueeze(-1))
    from . import tileloops  # numba takes half a second to load

    return tileloops.times_tiles(left, tiles)
