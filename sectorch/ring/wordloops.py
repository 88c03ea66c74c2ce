"""A matrix times a tile mod 2^64 for processors whose vector units have no product of 64-bit words.

Of x = x_0 + 2^32 x_1 and y only x_0 y_0 is needed whole, and of x_0 y_1 + x_1 y_0 the low half: products of 32-bit
words, which these processors have, summed up apart and put together at the end.
"""

from __future__ import annotations

import numpy as np

from .loops import compiled

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@compiled
def multiply(left, tile, columns, out):
    """[r, K] times the first columns of [K, 64], into out [r, 64]; four terms of the sums at a time."""
    rows, depth = left.shape
    whole, cross = np.empty(columns, np.uint64), np.empty(columns, np.uint64)
    for i in range(rows):
        x, row = left[i], out[i]
        whole[:], cross[:] = 0, 0
        for k in range(0, depth - 3, 4):
            a0, a1, a2, a3 = x[k] & _LOW, x[k + 1] & _LOW, x[k + 2] & _LOW, x[k + 3] & _LOW
            b0, b1, b2, b3 = x[k] >> _HALF, x[k + 1] >> _HALF, x[k + 2] >> _HALF, x[k + 3] >> _HALF
            y0, y1, y2, y3 = tile[k], tile[k + 1], tile[k + 2], tile[k + 3]
            for c in range(columns):
                c0, c1, c2, c3 = y0[c] & _LOW, y1[c] & _LOW, y2[c] & _LOW, y3[c] & _LOW
                d0, d1, d2, d3 = y0[c] >> _HALF, y1[c] >> _HALF, y2[c] >> _HALF, y3[c] >> _HALF
                whole[c] += (a0 * c0 + a1 * c1) + (a2 * c2 + a3 * c3)
                cross[c] += (a0 * d0 + b0 * c0) + (a1 * d1 + b1 * c1)
                cross[c] += (a2 * d2 + b2 * c2) + (a3 * d3 + b3 * c3)
        for k in range(depth // 4 * 4, depth):
            for c in range(columns):
                whole[c] += x[k] * tile[k, c]
        for c in range(columns):
            row[c] = whole[c] + (cross[c] << _HALF)
