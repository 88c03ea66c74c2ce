"""Products of a matrix and tiles mod 2^64 for processors whose vector units have no product of 64-bit words.

Of x = x_0 + 2^32 x_1 and y only x_0 y_0 is needed whole, and of x_0 y_1 + x_1 y_0 the low half: products of 32-bit
words, which these processors have, summed up apart and put together at the end.
"""

from __future__ import annotations

import numpy as np

from .loops import compiled

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@compiled
def products(left, tiles, out, low, high):
    """The rows low .. high of all results, four terms of their sums at a time; `out` as of `tiles.times_tiles`."""
    rows, depth = left.shape
    width, turns = tiles.shape[2], out.shape[2] // tiles.shape[2]
    whole, cross = np.empty(width, np.uint64), np.empty(width, np.uint64)
    for at in range(low, high):
        number = at // rows
        tile, x, start = tiles[number], left[at % rows], number % turns * width
        row = out[number // turns, at % rows, start : start + width]
        whole[:], cross[:] = 0, 0
        for k in range(0, depth - 3, 4):
            a0, a1, a2, a3 = x[k] & _LOW, x[k + 1] & _LOW, x[k + 2] & _LOW, x[k + 3] & _LOW
            b0, b1, b2, b3 = x[k] >> _HALF, x[k + 1] >> _HALF, x[k + 2] >> _HALF, x[k + 3] >> _HALF
            y0, y1, y2, y3 = tile[k], tile[k + 1], tile[k + 2], tile[k + 3]
            for c in range(width):
                c0, c1, c2, c3 = y0[c] & _LOW, y1[c] & _LOW, y2[c] & _LOW, y3[c] & _LOW
                d0, d1, d2, d3 = y0[c] >> _HALF, y1[c] >> _HALF, y2[c] >> _HALF, y3[c] >> _HALF
                whole[c] += (a0 * c0 + a1 * c1) + (a2 * c2 + a3 * c3)
                cross[c] += (a0 * d0 + b0 * c0) + (a1 * d1 + b1 * c1)
                cross[c] += (a2 * d2 + b2 * c2) + (a3 * d3 + b3 * c3)
        for k in range(depth // 4 * 4, depth):
            for c in range(width):
                whole[c] += x[k] * tile[k, c]
        for c in range(width):
            row[c] = whole[c] + (cross[c] << _HALF)
