"""Bit matrices of 64 rows, transposed: the step under all compiled loops that go from elements to bit planes."""

from __future__ import annotations

import numpy as np

from .loops import compiled

SIDE = 8
"""Words transposed at a time: a line of the cache."""


@compiled
def transposed(a):
    """64 bit rows of 8 words each: row j becomes bit j of all 64. H. S. Warren, Hacker's Delight, 7-3."""
    j, mask = 32, np.uint64(0x00000000FFFFFFFF)
    while j:
        shift = np.uint64(j)
        for k in range(0, 64, 2 * j):
            for i in range(k, k + j):
                for c in range(SIDE):
                    swap = ((a[i, c] >> shift) ^ a[i + j, c]) & mask
                    a[i + j, c] ^= swap
                    a[i, c] ^= swap << shift
        j >>= 1
        mask ^= mask << np.uint64(j)


@compiled
def planes_at(v, width, word, a):
    """The bit planes of the elements in 8 words from `word` on; zeros beyond the end."""
    count = min(SIDE, width - word)
    if count == SIDE and 63 * width + word + SIDE <= len(v):
        for t in range(64):
            row = v[t * width + word : t * width + word + SIDE]
            for c in range(SIDE):
                a[t, c] = np.uint64(row[c])
    else:
        a[:] = 0
        for t in range(64):
            for c in range(count):
                at = t * width + word + c
                if at < len(v):
                    a[t, c] = np.uint64(v[at])
    transposed(a)
    return count
