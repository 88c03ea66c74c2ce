"""Compiled loops of comparisons in one round (`mpc/star/wide.py`); see `bitloops.py`."""

from __future__ import annotations

import numpy as np

from .loops import compiled, lines
from .transposed import planes_at as _planes_at

_FEW = 32
"""Words combined at a time: every value of a block has a row of them, which stays in the first-level cache."""
_CODED = 256
"""Words of which codes are made at a time: the more, the fewer places are written to by turns."""


@compiled
def wide_codes(r, mask, blocks, tops, out, low, high):
    """Thermometer codes of r's blocks, each of some width from some plane on, r's planes `tops`, and a mask on all."""
    width = -(-len(r) // 64)
    columns = min(_CODED, high - low)
    a = lines(8 * columns).view(np.int64).reshape(64, columns)
    for start in range(low, high, _CODED):
        end = min(start + _CODED, high)
        _planes_at(r, width, start, a[:, : end - start], 0)
        row = 0
        for b in range(len(blocks)):
            size = 0
            for plane in range(blocks[b, 0], blocks[b, 0] + blocks[b, 1]):
                bits = a[plane]
                for j in range(row, row + size):
                    code, above = out[j, start:end], out[j + size + 1, start:end]
                    for w in range(end - start):
                        above[w] = code[w] & bits[w]
                        code[w] |= bits[w]
                out[row + size, start:end] = bits[: end - start]
                size = 2 * size + 1
            row += size
        for i in range(len(tops)):
            out[row + i, start:end] = a[tops[i], : end - start]
        for i in range(len(out)):
            found, under = out[i, start:end], mask[i, start:end]
            for w in range(end - start):
                found[w] ^= under[w]


@compiled
def wide_leaves(bits, words, blocks, first, out, low, high):
    """One party's half of lt and eq of blocks, each of some width from some plane on, in rows b and len(blocks) + b.

    `words` are its halves of their thermometer codes, one block's after the other's.
    """
    hot = np.empty((1 << blocks[:, 1].max(), _FEW), np.int64)
    for left in range(low, high, _FEW):
        size, at = min(_FEW, high - left), 0
        for b in range(len(blocks)):
            for w in range(size):
                hot[0, w] = -1
            for k in range(blocks[b, 1]):
                plane = bits[blocks[b, 0] + k, left : left + size]
                for j in range(1 << k):
                    unset, taken = hot[j], hot[j + (1 << k)]
                    for w in range(size):
                        taken[w] = unset[w] & plane[w]
                        unset[w] ^= taken[w]
            less, equal = out[b, left : left + size], out[len(blocks) + b, left : left + size]
            for w in range(size):
                less[w], equal[w] = 0, hot[0, w] & first
            for j in range((1 << blocks[b, 1]) - 1):
                code, here, above = words[at + j, left : left + size], hot[j], hot[j + 1]
                for w in range(size):
                    less[w] ^= here[w] & code[w]
                    equal[w] ^= (here[w] ^ above[w]) & code[w]
            at += (1 << blocks[b, 1]) - 1
