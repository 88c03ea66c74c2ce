"""Compiled loops over masked words: one pass over memory where torch functions make three or four."""

from __future__ import annotations

import numpy as np

from .jit import compiled


@compiled
def add_encoded(words, values, scale):
    """words[i] += round(scale values[i]), half to even, mod 2^64. The product has to be below 2^63 in magnitude."""
    for i in range(len(words)):
        words[i] += np.int64(np.rint(np.float64(values[i]) * scale))


@compiled
def add_decoded(real, words, factor):
    """real[i] += factor words[i], the words read as signed integers."""
    for i in range(len(words)):
        real[i] += factor * np.float64(words[i])
