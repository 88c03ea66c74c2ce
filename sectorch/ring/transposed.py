"""Bit matrices of 64 rows, transposed: the step under all compiled loops that go from elements to bit planes.

In vectors (`fieldlines.py`) where the processor has them: eight rows at a time bit by bit, then byte by byte.
"""

from __future__ import annotations

import numpy as np

from .fieldlines import available, bits_of_rows, turned_rows
from .loops import compiled, lines

SIDE = 8
"""Words transposed at a time: a line of the cache."""
_RUN = 64
"""Words of a row that are taken at a time. The rows stand far apart, and often fall into the same few sets of the
cache, where a line of each would be gone before its turn comes again."""


@compiled
def transposed(a):
    """64 bit rows of some words each: row j becomes bit j of all 64. H. S. Warren, Hacker's Delight, 7-3."""
    words = a.reshape(a.size)
    j, mask = 32, np.uint64(0x00000000FFFFFFFF)
    while j:
        shift, size = np.uint64(j), a.shape[1] * j
        for k in range(0, len(words), 2 * size):
            x, y = words[k : k + size], words[k + size : k + 2 * size]
            for i in range(size):
                swap = ((x[i] >> shift) ^ y[i]) & mask
                y[i] ^= swap
                x[i] ^= swap << shift
        j >>= 1
        mask ^= mask << np.uint64(j)


@compiled
def _lines_in_vectors(v, width, word, count, room, out, threshold):
    """The bit planes of the elements, less a threshold, in `count` words from `word` on: whole lines, _RUN at most."""
    x, apart, bits, to, spread = v.ctypes.data + 8 * word, 8 * width, room.ctypes.data, out.ctypes.data, out.strides[0]
    for i in range(0, 64, 8):
        for c in range(0, count, SIDE):
            bits_of_rows(x + (i + 7) * apart + 8 * c, -apart, bits + 512 * c + 8 * i, 512, threshold)
    for i in range(0, 64, 8):
        for c in range(0, count, SIDE):
            turned_rows(bits + 512 * c + 64 * i, to + i * spread + 8 * c, spread)


@compiled
def _lines_by_shifts(v, width, word, count, room, out, threshold):
    """As `_lines_in_vectors`, on any processor, and of words that are not whole lines; zeros beyond the end."""
    a = room.reshape(room.size)[: 64 * count].reshape(64, count)
    a[:] = 0
    for t in range(64):
        row = v[t * width + word : t * width + word + count]
        for c in range(len(row)):
            a[t, c] = np.uint64(row[c]) - np.uint64(threshold)
    transposed(a)
    for t in range(64):
        for c in range(count):
            out[t, c] = np.int64(a[t, c])


_whole_lines = _lines_in_vectors if available() else _lines_by_shifts


@compiled
def planes_at(v, width, word, out, threshold):
    """The bit planes of elements int64 [N], less a threshold, in as many words from `word` on as `out` [64, ..] has
    columns."""
    count = out.shape[1]
    room = lines(8 * min(_RUN, count))
    whole = max(0, min(count, len(v) - 63 * width - word)) // SIDE * SIDE
    for start in range(0, whole, _RUN):
        _whole_lines(v, width, word + start, min(_RUN, whole - start), room, out[:, start:], threshold)
    for start in range(whole, count, _RUN):
        _lines_by_shifts(v, width, word + start, min(_RUN, count - start), room, out[:, start:], threshold)
