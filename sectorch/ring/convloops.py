"""Convolutions with few channels, and their gradients, as compiled loops mod 2^64: nothing is unfolded.

Images stand in rows of their padded width, so that a kernel's place is an offset, and what a place adds to all outputs
of a channel is one long product with a number; the outputs that this makes between the rows are left out. For a stride
of one. `products.py` and `training/convolutions.py` have the forms in torch functions, which give the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from .loops import compiled, over

MOST_CHANNELS = 32
"""Outputs from which on unfolding and a matrix product are faster."""


def _padded(x: torch.Tensor, padding: tuple[int, int]) -> np.ndarray:
    """[n, c, h, w] -> [n, c, (h + 2 p) (w + 2 q)]."""
    if padding != (0, 0):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    return x.contiguous().flatten(2).numpy()


def convolved(
    x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """x [n, c, h, w], weight [o, c, kh, kw] -> [n, o, oh, ow]."""
    wide = x.shape[3] + 2 * padding[1]
    high = x.shape[2] + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1)
    out = torch.empty(len(x), len(weight), high, wide - dilation[1] * (weight.shape[3] - 1), dtype=torch.int64)
    offsets = _offsets(weight.shape, dilation, wide)
    arrays = _padded(x, padding), weight.contiguous().flatten(2).numpy(), offsets, wide, out.numpy()
    over(len(x), _convolved, *arrays)
    return out


def weight_gradient(
    g: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """g [n, o, oh, ow], x [n, c, h, w] -> [o, c, kh, kw]."""
    wide = x.shape[3] + 2 * padding[1]
    out = torch.empty(g.shape[1], x.shape[1], *kernel, dtype=torch.int64)
    offsets = _offsets(out.shape, dilation, wide)
    over(
        g.shape[1], _weight_gradient, g.contiguous().numpy(), _padded(x, padding), offsets, wide, out.flatten(2).numpy()
    )
    return out


def input_gradient(
    g: torch.Tensor, weight: torch.Tensor, size: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """g [n, o, oh, ow], weight [o, c, kh, kw] -> [n, c, h, w]; `size` is h and w."""
    high, wide = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    out = torch.empty(len(g), weight.shape[1], high, wide, dtype=torch.int64)
    offsets = _offsets(weight.shape, dilation, wide)
    arrays = g.contiguous().numpy(), weight.contiguous().flatten(2).numpy(), offsets, wide, out.flatten(2).numpy()
    over(len(g), _input_gradient, *arrays)
    return out[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _offsets(shape: torch.Size, dilation: tuple[int, int], wide: int) -> np.ndarray:
    """Of each place of a kernel, in rows of so many."""
    rows, columns = np.arange(shape[2]) * dilation[0] * wide, np.arange(shape[3]) * dilation[1]
    return (rows[:, None] + columns).reshape(-1)


@compiled
def _convolved(x, weight, offsets, wide, out, low, high):
    """Images low .. high."""
    rows, columns = out.shape[2], out.shape[3]
    length = (rows - 1) * wide + columns
    total = np.empty(length, np.int64)
    for n in range(low, high):
        for o in range(out.shape[1]):
            total[:] = 0
            for c in range(x.shape[1]):
                for k in range(len(offsets)):
                    factor, image = weight[o, c, k], x[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        total[p] += factor * image[p]
            for y in range(rows):
                for z in range(columns):
                    out[n, o, y, z] = total[y * wide + z]


@compiled
def _spread(g, wide, line):
    """An image [oh, ow] in rows of so many; what stands between them stays as it is."""
    for y in range(g.shape[0]):
        for z in range(g.shape[1]):
            line[y * wide + z] = g[y, z]


@compiled
def _weight_gradient(g, x, offsets, wide, out, low, high):
    """Outputs low .. high."""
    length = (g.shape[2] - 1) * wide + g.shape[3]
    line = np.zeros(length, np.int64)
    for o in range(low, high):
        out[o] = 0
        for n in range(g.shape[0]):
            _spread(g[n, o], wide, line)
            for c in range(x.shape[1]):
                for k in range(len(offsets)):
                    total, image = np.int64(0), x[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        total += line[p] * image[p]
                    out[o, c, k] += total


@compiled
def _input_gradient(g, weight, offsets, wide, out, low, high):
    """Images low .. high."""
    length = (g.shape[2] - 1) * wide + g.shape[3]
    line = np.zeros(length, np.int64)
    for n in range(low, high):
        out[n] = 0
        for o in range(g.shape[1]):
            _spread(g[n, o], wide, line)
            for c in range(out.shape[1]):
                for k in range(len(offsets)):
                    factor, image = weight[o, c, k], out[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        image[p] += factor * line[p]
