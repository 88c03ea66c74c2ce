"""Sums of subsets of rows, mod 2^64: products with matrices of 0 and 1 that come as packed bits.

Of four rows at a time all sixteen sums are made, and each subset takes one of them: the compiled loop adds 14 numbers
for an element of 40 subsets, where a product of matrices multiplies and adds 40.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import numpy as np
import torch

from . import bitplanes
from .products import matmul


@functools.cache
def _compiled() -> ModuleType:
    return importlib.import_module("sectorch.ring.subsetloops")


def subset_sums(words: torch.Tensor, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The sum of those rows [R, n] whose bit is set, for each line of packed bits [k, W]: [k, n].

    Args:
        start: the first row's number; the bit of row 64 w + t is bit t of word w.
    """
    count, columns = rows.shape
    if not bitplanes.COMPILED or not words.is_cpu or not rows.is_cpu:
        bits = bitplanes.spread(words).transpose(1, 2).flatten(1)[:, start : start + count]
        return matmul(bits.bitwise_and(1), rows)
    loops = _compiled()
    out = torch.zeros(words.shape[0], columns, dtype=torch.int64)
    keys = np.empty((-(-count // 8) * 2, words.shape[0]), np.uint8)
    loops.keys_of(loops.array(words), start, count, keys)
    arrays = keys, loops.array(rows), out.numpy(), loops.BLOCK
    loops.over(-(-columns // loops.BLOCK), loops.sums_of, *arrays)
    return out
