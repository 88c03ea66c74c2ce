"""Compiled loops of sums of subsets of rows (`subsets.py`)."""

from __future__ import annotations

import numpy as np

from .loops import array as array
from .loops import compiled, inlined
from .loops import over as over

BLOCK = 128
"""Columns at a time: two times sixteen sums of so many take 32 KiB."""


@compiled
def keys_of(words, start, count, keys):
    """Which of its four rows a subset takes, four bits."""
    for q in range(len(keys)):
        for s in range(len(words)):
            key = 0
            for i in range(min(4, count - 4 * q)):
                place = start + 4 * q + i
                key |= ((words[s, place >> 6] >> (place & 63)) & 1) << i
            keys[q, s] = key


@compiled
def sums_of(keys, rows, out, block, low, high):
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
