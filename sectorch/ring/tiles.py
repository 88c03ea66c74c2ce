"""A matrix times tiles of 64 columns, mod 2^64: by the compiled loop for this kind of processor."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F

TILE = 64
"""Columns of a tile."""


@functools.cache
def wide_products() -> bool:
    """Whether the processor multiplies vectors of 64-bit words."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[K, n] -> [ceil(n/64), K, 64], zero padded."""
    rows, n = matrix.shape
    if n % TILE:
        matrix = F.pad(matrix, (0, -n % TILE))
    return matrix.view(rows, -1, TILE).permute(1, 0, 2).contiguous()


def times_tiles(left: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[r, K] times [tiles, K, 64] -> [tiles, r, 64].

    Args:
        out: [n, r, P] where the result goes instead, each of whose n parts has P / 64 tiles side by side.
    """
    if left.is_meta or tiles.is_meta:
        return F.conv1d(tiles, left.unsqueeze(-1))
    from . import tileloops  # numba takes half a second to load
    from .loops import array, over

    out = torch.empty(len(tiles), len(left), TILE, dtype=torch.int64) if out is None else out
    arrays = (array(v).view(np.uint64) for v in (left, tiles))
    pieces = len(tiles) * -(-len(left) // tileloops.ROWS)
    over(pieces, tileloops.products, *arrays, wide_products(), out.numpy().view(np.uint64))
    return out


def times_unfolded(
    left: torch.Tensor, images: torch.Tensor, places: np.ndarray, depth: np.ndarray, out: torch.Tensor
) -> None:
    """[r, K] times the unfolded columns of a convolution, [K, n P], into out [n, r, P].

    Args:
        images: words [.]. places: where each column begins there [n P]. depth: where its K words stand from there.
    """
    from . import tileloops
    from .loops import array, over

    count = -(-len(places) // TILE)
    places = np.pad(places, (0, count * TILE - len(places)), "edge").view(np.uint64)
    arrays = images.numpy().view(np.uint64), places, depth.view(np.uint64), array(left).view(np.uint64)
    over(count, tileloops.convolved, *arrays, wide_products(), out.numpy().view(np.uint64))
