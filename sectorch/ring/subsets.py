"""Sums of subsets of rows, mod 2^64: products with matrices of 0 and 1 that come as packed bits.

Of four rows at a time all sixteen sums are made, and each subset takes one of them: the compiled loop adds 14 numbers
for an element of 40 subsets, where a product of matrices multiplies and adds 40.
"""

from __future__ import annotations

import numpy as np
import torch

from .bitplanes import fast, spread
from .loops import array, compiled, inlined, over
from .products import matmul

_BLOCK = 128
"""Columns at a time: two times sixteen sums of so many take 32 KiB."""


def subset_sums(words: torch.Tensor, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The sum of those rows [R, n] whose bit is set, for each line of packed bits [k, W]: [k, n].

    Args:
        start: the first row's number; the bit of row 64 w + t is bit t of word w.
    """
    count, columns = rows.shape
    if not fast(words, rows):
        bits = spread(words).transpose(1, 2).flatten(1)[:, start : start + count]
        return matmul(bits.bitwise_and(1), rows)
    out = torch.zeros(words.shape[0], columns, dtype=torch.int64)
    keys = np.empty((-(-count // 8) * 2, words.shape[0]), np.uint8)
    _keys(array(words), start, count, keys)
    over(-(-columns // _BLOCK), _sums, keys, array(rows), out.numpy(), _BLOCK)
    return out


@compiled
def _keys(words, start, count, keys):
    """Which of its four rows a subset takes, four bits."""
    for q in range(len(keys)):
        for s in range(len(words)):
            key = 0
            for i in range(min(4, count - 4 * q)):
                place = start + 4 * q + i
                key |= ((words[s, place >> 6] >> (place & 63)) & 1) << i
            keys[q, s] = key


@compiled
def _sums(keys, rows, out, block, low, high):
    """Blocks low .. high of the columns; two times four rows together."""
    sums = np.zeros((2, 16, block), np.int64)
    for at in range(low * block, min(high * block, rows.shape[1]), block):
        width = min(block, rows.shape[1] - at)
        for q in range(0, len(keys), 2):
            for half in range(2):
                _made(sums[half], rows, 4 * (q + half), at, width)
            for s in range(keys.shape[1]):
                first, second = sums[0, keys[q, s]], sums[1, keys[q + 1, s]]
                into = out[s, at : at + width]
                for j in range(width):
                    into[j] += first[j] + second[j]


@inlined
def _made(sums, rows, start, at, width):
    """The sixteen sums of four rows, of which some may be missing."""
    for i in range(4):
        for below in range(1 << i):
            into, before = sums[below + (1 << i)], sums[below]
            if start + i < len(rows):
                row = rows[start + i, at : at + width]
                for j in range(width):
                    into[j] = before[j] + row[j]
