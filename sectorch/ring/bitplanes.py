"""Bit planes: 64 ring elements to a word, so that one 64-bit operation works on one bit of 64 elements.

Layout: N elements are padded to 64 * W and seen as a matrix [64, W]; plane j is a row of W words, and bit t of word w
belongs to element t * W + w. A vector of packed bits ("word vector", [W]) has the same layout.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from . import logical_shift

_STAGES = (
    (32, 0x00000000FFFFFFFF),
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)
_CHUNK = 1 << 14  # columns transposed at a time: 8 MiB, which stays in the last-level cache
_CHUNK_ON_DEVICE = 1 << 18  # the same on a device, where each step is a launch: 128 MiB


@functools.cache
def _compiled() -> ModuleType:
    return importlib.import_module("sectorch.ring.bitloops")  # numba takes half a second, and a dry run needs none


COMPILED = True
"""Whether compiled loops are used on the CPU; tests switch them off to compare them with torch's functions."""


def fast(*tensors: torch.Tensor) -> ModuleType | None:
    """The compiled loops (`bitloops.py`), where these tensors are in this machine's own memory."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
    return _compiled() if COMPILED else None


def words_for(count: int) -> int:
    """W: 64-bit words for one bit of each of `count` elements."""
    return -(-count // 64)


def to_rows(elements: torch.Tensor) -> torch.Tensor:
    """Elements of any shape -> [64, W], zero padded; a view where nothing has to be padded."""
    flat = elements.reshape(-1)
    if flat.shape[0] % 64:
        flat = F.pad(flat, (0, -flat.shape[0] % 64))
    return flat.view(64, -1)


def from_rows(matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[64, W] -> the first elements, in `shape`."""
    return matrix.reshape(-1)[: shape.numel()].view(shape)


def planes(matrix: torch.Tensor) -> torch.Tensor:
    """[..., 64, W] elements -> [..., 64, W] bit planes: row j holds bit j. The transpose of 64x64 bit blocks.

    Six exchange steps with masks (H. S. Warren, Hacker's Delight, 7-3), over all words at once. Its own inverse.
    """
    if matrix.dim() == 2 and fast(matrix):
        return planes_below(matrix)
    out = matrix.clone(memory_format=torch.contiguous_format)
    if out.is_meta:
        return out
    for part in out.split(_CHUNK if out.is_cpu else _CHUNK_ON_DEVICE, dim=-1):
        for j, mask in _STAGES:
            pairs = part.unflatten(-2, (32 // j, 2, j))
            low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
            swap = (low >> j).bitwise_xor_(high).bitwise_and_(mask)
            high.bitwise_xor_(swap)
            low.bitwise_xor_(swap.bitwise_left_shift_(j))
    return out


def planes_below(v: torch.Tensor, thresholds: tuple[int, ...] = (0,)) -> torch.Tensor:
    """The bit planes of v - t for each threshold t, side by side: [64, T W]."""
    if not (loops := fast(v)):
        rows = [to_rows(v - t if t else v) for t in thresholds]
        return planes(torch.cat(rows, -1) if len(rows) > 1 else rows[0])
    width = words_for(v.numel())
    out = v.new_empty(64, len(thresholds) * width)
    for i, t in enumerate(thresholds):
        loops.run_on_words(width, loops.planes, loops.array(v).reshape(-1), t, out.numpy(), i * width)
    return out


def signs_of(v: torch.Tensor) -> torch.Tensor:
    """The sign bits of elements as packed bits: plane 63."""
    if not (loops := fast(v)):
        return planes_below(v)[63].clone()
    out = torch.empty(words_for(v.numel()), dtype=torch.int64)
    loops.run_on_words(len(out), loops.signs, loops.array(v).reshape(-1), out.numpy())
    return out


def spread(words: torch.Tensor) -> torch.Tensor:
    """Packed bits [..., W] -> masks [..., 64, W]: all ones for the elements whose bit is set, zero for the others."""
    positions = torch.arange(63, -1, -1, device=words.device).view(64, 1)
    return (words.unsqueeze(-2) << positions).bitwise_right_shift_(63)


def xor_along(values: torch.Tensor) -> torch.Tensor:
    """The xor along the first dimension: [n, ...] -> [...], for n of one and more."""
    while (count := len(values)) > 1:
        half = count // 2
        folded = values[:half] ^ values[half : 2 * half]
        if count % 2:
            folded[0] ^= values[-1]
        values = folded
    return values[0]


def masks_of(words: torch.Tensor, shape: torch.Size, copies: int | None) -> torch.Tensor:
    """Packed bits [W] or [copies * W] -> a mask per element: `shape`, or [copies, *shape]."""
    if loops := fast(words):
        out = words.new_empty(copies or 1, shape.numel())
        matrix = loops.array(words).reshape(out.shape[0], -1)
        loops.run_on_words(matrix.shape[1], loops.masks, matrix, out.numpy())
        return out.view(shape if copies is None else (copies, *shape))
    if copies is None:
        return from_rows(spread(words), shape)
    matrices = spread(words.view(copies, words_for(shape.numel())))
    return matrices.flatten(1)[:, : shape.numel()].view(copies, *shape)


Rows = tuple[int, ...]
"""Numbers of rows."""


class RowSums:
    """Sums (xor) of some rows of two tensors [m, W] and [n, W], each written to a position in a vector.

    Args:
        sets: the rows of each sum; rows of the second tensor are numbered from m on.
        starts: the position of each sum.
    """

    def __init__(self, sets: Sequence[Rows], starts: Sequence[int]):
        self.sets, self.starts = sets, np.array(starts, np.int64)
        self.ends = np.cumsum([len(rows) for rows in sets], dtype=np.int64)
        self.rows = np.array([row for rows in sets for row in rows], np.int64)

    def into(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums into `out` [N]."""
        if loops := fast(x, y, out):
            arrays = loops.array(x), loops.array(y), self.ends, self.rows, self.starts, out.numpy()
            loops.run_on_words(x.shape[1], loops.sums_of_rows, *arrays)
            return
        for start, rows in zip(self.starts.tolist(), self.sets, strict=True):
            found = out[start : start + x.shape[1]].zero_()
            for row in rows:
                found ^= x[row] if row < len(x) else y[row - len(x)]


# The claims about dealt values, element by element: kernels of `mpc/star/dealing_constraints.py`.


def sum_bits(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The bit planes of x + y and those of its last carry, xor a mask [65, W]."""
    if loops := fast(x, y, mask):
        out = torch.empty_like(mask)
        arrays = [loops.array(v).reshape(-1) for v in (x, y)]
        loops.run_on_words(mask.shape[1], loops.sum_bits, *arrays, mask.numpy(), out.numpy())
        return out
    bits = planes_below(x + y)
    first, second = (signs_of(v) for v in (x, y))
    return torch.cat((bits, ((first & second) | ((first | second) & ~bits[63]))[None])).bitwise_xor_(mask)


def complements(words: torch.Tensor, v: torch.Tensor, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the other half of a bit as a number must be, for one half v = bit - other [N] or [copies, N].

    Returns:
        Its value where the other half of the packed bits is 0, int64, and the xor of that with its value where it is 1.
    """
    if loops := fast(words, v):
        zero, difference = (v.new_empty(v.shape, dtype=torch.int64) for _ in range(2))
        matrix = words.view(copies or 1, -1).numpy()
        arrays = [x.view(len(matrix), -1).numpy() for x in (v, zero, difference)]
        loops.run_on_words(matrix.shape[1], loops.complements, matrix, *arrays)
        return zero, difference
    bit = masks_of(words, v.shape if copies is None else v.shape[1:], copies).bitwise_and_(1)
    zero, one = ((bit ^ i).to(v.dtype).sub_(v).to(torch.int64) for i in (0, 1))
    return zero, zero ^ one


def choice_words(
    zero: torch.Tensor, one: torch.Tensor, words: torch.Tensor, copies: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The one of two words that each bit chooses, and its xor with the other one."""
    if loops := fast(zero, one, words):
        base, difference = torch.empty_like(zero), torch.empty_like(zero)
        matrix = words.view(copies or 1, -1).numpy()
        first, *rest = [x.view(len(matrix), -1).numpy() for x in (zero, one, base, difference)]
        loops.run_on_words(matrix.shape[1], loops.choose_words, first, rest[0], matrix, *rest[1:])
        return base, difference
    difference = zero ^ one
    return zero ^ (difference & masks_of(words, zero.shape if copies is None else zero.shape[1:], copies)), difference


def quotients(
    v: torch.Tensor, r: torch.Tensor, low: torch.Tensor, last: torch.Tensor, shift: int
) -> tuple[torch.Tensor, ...]:
    """The coefficients of 1, c, c' and c c' in (r >> shift) - v + (low xor c) - 2^(64 - shift) (last xor c')."""
    if loops := fast(v, r, low, last):
        out = v.new_empty(4, *v.shape)
        arrays = [loops.array(x).reshape(-1) for x in (v, r, low, last)]
        loops.run_on_words(len(low), loops.quotients, *arrays, shift, out.view(4, -1).numpy())
        return out.unbind()
    rest = logical_shift(r, shift) - v
    low, last = (masks_of(words, r.shape, None).bitwise_and_(1) for words in (low, last))
    zero, first, second, both = (rest + (low ^ i) - ((last ^ j) << (64 - shift)) for j in (0, 1) for i in (0, 1))
    return zero, zero ^ first, zero ^ second, zero ^ first ^ second ^ both


def columns_of(parts: Sequence[torch.Tensor], copies: Sequence[int], nothing: torch.Tensor) -> torch.Tensor:
    """The elements of all parts in the layout of packed words: [64, W], with zeros at the end of each copy."""
    counts = [(number, part.numel() // number) for number, part in zip(copies, parts, strict=True)]
    width, at = sum(number * words_for(count) for number, count in counts), 0
    out = nothing.new_empty(64, width)
    if loops := fast(out, *parts):
        place, found = loops.place_elements, out.numpy()
        for (number, count), part in zip(counts, parts, strict=True):
            place(loops.array(part).reshape(number, count), found, at)
            at += number * words_for(count)
        return out
    for (number, count), part in zip(counts, parts, strict=True):
        width = words_for(count)
        padded = F.pad(part.reshape(number, count), (0, -count % 64)).view(number, 64, width)
        out[:, at : at + number * width] = padded.transpose(0, 1).reshape(64, -1)
        at += number * width
    return out
