"""Compiled loops for Z_2^128; in their own file since they are loaded at their first use."""

from __future__ import annotations

import numpy as np

from .jit import compiled


@compiled
def sums_of_products(x, y, out):
    """out[:, i] = the sum of x[i, j] y[i, j] over j mod 2^128, low word and high word, of signed words."""
    half = np.int64(0xFFFFFFFF)
    for i in range(len(x)):
        high, above, middle, low = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for j in range(x.shape[1]):
            a, b, c, d = x[i, j] >> 32, x[i, j] & half, y[i, j] >> 32, y[i, j] & half
            one, other, least = a * d, b * c, b * d
            high += a * c
            above += (one >> 32) + (other >> 32)
            middle += (one & half) + (other & half) + ((least >> 32) & half)
            low += least & half
        first = np.uint64(low) + np.uint64(middle << 32)
        carry = np.int64(1) if first < np.uint64(low) else np.int64(0)
        out[0, i] = np.int64(first)
        out[1, i] = high + above + (middle >> 32) + carry


@compiled
def products(x, y, out):
    """out[:, i] = x[:, i] y[:, i] mod 2^128, low words and high words."""
    half, bits = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(x.shape[1]):
        low, other = np.uint64(x[0, i]), np.uint64(y[0, i])
        a, b, c, d = low >> bits, low & half, other >> bits, other & half
        middle = a * d + (b * d >> bits)
        rest = b * c + (middle & half)
        high = a * c + (middle >> bits) + (rest >> bits)
        out[0, i] = np.int64(low * other)
        out[1, i] = np.int64(high) + x[0, i] * y[1, i] + x[1, i] * y[0, i]
