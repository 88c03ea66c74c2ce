"""Convolutions with kernels of 3 x 3 mod 2^64 in 36 products for nine outputs, which take 81 one by one.

Two polynomials of three coefficients are multiplied in six products (Karatsuba). Read from the result back, which takes
as many, that is a filter of three taps g on five inputs d, with three outputs y:

    m_0 = g_0 (d_0 - d_1 - d_2)        m_3 = (g_0 + g_1) d_1        y_0 = m_0 + m_3 + m_4
    m_1 = g_1 (d_2 - d_1 - d_3)        m_4 = (g_0 + g_2) d_2        y_1 = m_1 + m_3 + m_5
    m_2 = g_2 (d_4 - d_2 - d_3)        m_5 = (g_1 + g_2) d_3        y_2 = m_2 + m_4 + m_5

In two dimensions it is done to the columns and to the rows. Nothing is divided, so that the bits are those of the other
way in every ring; Winograd's filters save as much, but halve their taps, and 2 has no inverse mod 2^64.

The taps' sums are made once, and of a window of 5 x 5 its sums for all outputs. What is left are 36 products of
matrices, [outputs, channels] times [channels, windows].

Source: Karatsuba and Ofman, "Multiplication of multidigit numbers on automata", 1963; Winograd, "Arithmetic complexity
of computations", 1980, for the transposition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from .tiles import TILE, wide_products

SIDE = 3
"""Outputs of a window in each dimension."""
_SUMS = 600
"""Products that take as long as a window's sums for a channel, or an output's from them."""
_READ = 48
"""Windows that take as long to multiply as a tap's sums to read."""
_WORTH = 1.1
"""The other way must take so many times as long."""


def windows_of_images(positions: Sequence[int]) -> tuple[int, int]:
    """Windows that cover so many output rows and columns."""
    return -(-positions[0] // SIDE), -(-positions[1] // SIDE)


def faster(images: int, positions: Sequence[int], weight: torch.Size) -> bool:
    """Whether a convolution with a stride of one is faster so, by its shapes: all parties choose alike."""
    outputs, channels, *kernel = weight
    if kernel != [SIDE, SIDE]:
        return False
    count = images * math.prod(windows_of_images(positions))
    read = max(count, _READ * -(-count // TILE))
    taken = 36 * outputs * channels * read + _SUMS * (outputs + channels) * count
    return _WORTH * taken < 9 * outputs * channels * images * math.prod(positions)


def prepared(weight: torch.Tensor) -> torch.Tensor:
    """Weight [o, c, 3, 3] -> the sums of its taps, [6, 6, o, c]."""
    return _taps(_taps(weight.permute(2, 3, 0, 1), 1), 0)


def _taps(g: torch.Tensor, dim: int) -> torch.Tensor:
    g0, g1, g2 = g.unbind(dim)
    return torch.stack([g0, g1, g2, g0 + g1, g0 + g2, g1 + g2], dim)


def convolved(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """x [n, c, h, w] and a prepared weight [6, 6, o, c] -> [n, o, h + 2 p - 2, w + 2 q - 2]."""
    from . import karatsubaloops  # numba takes half a second to load
    from .loops import over

    images, outputs = len(x), weight.shape[2]
    positions = x.shape[2] + 2 * padding[0] - 2, x.shape[3] + 2 * padding[1] - 2
    out = torch.empty(images, outputs, *positions, dtype=torch.int64)
    high, wide = (SIDE * count for count in windows_of_images(positions))
    below, right = high + 2 - padding[0] - x.shape[2], wide + 3 - padding[1] - x.shape[3]
    x = F.pad(x, (padding[1], right, padding[0], below)).contiguous()  # a row has a word more, which is read and unused
    places = _places(images, tuple(x.shape[1:]), outputs, positions)
    count = len(places[0]) // TILE
    parts = max(1, min(torch.get_num_threads() // max(1, count), -(-outputs // karatsubaloops.ROWS)))
    words, weight_words, found = (v.numpy().view(np.uint64) for v in (x.view(-1), weight, out))
    arrays = words, *places, x.shape[3], x.shape[2] * x.shape[3], weight_words
    over(count * parts, karatsubaloops.convolved, *arrays, wide_products(), parts, found)
    return out


@functools.lru_cache(maxsize=64)
def _places(
    images: int, padded: tuple[int, int, int], outputs: int, positions: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each window where it begins, where its outputs begin in channel 0, and how many rows and columns of them there
    are, [., 2]; filled up to whole tiles with windows that have none."""
    channels, height, width = padded
    image, row, column = (index.reshape(-1) for index in np.indices((images, *windows_of_images(positions)), np.int64))
    row, column = SIDE * row, SIDE * column
    source = (image * channels * height + row) * width + column
    target = (image * outputs * positions[0] + row) * positions[1] + column
    sizes = np.minimum(SIDE, np.stack([positions[0] - row, positions[1] - column], 1))
    more = -len(source) % TILE
    return np.pad(source, (0, more), "edge"), np.pad(target, (0, more)), np.pad(sizes, ((0, more), (0, 0)))
