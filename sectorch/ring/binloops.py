"""Compiled loops of products with a 0/1 matrix of bins; in their own file since they are loaded at their first use.

The matrix has a row for each row of data and a column for each pair of a feature and a bin but the last one: whether
the row's bin is at most that one. Its owner has it as bin numbers; others as ring elements, under a mask.
"""

from __future__ import annotations

import numpy as np
import torch

from .jit import array, compiled, run_in_threads


@compiled
def _sums_of_words(x, matrix, out, low, high):
    """out[j, c] = sum_i x[i, j] matrix[i, c] for the columns low .. high."""
    rows, count = x.shape
    out[:, low:high] = 0
    for i in range(rows):
        row = matrix[i, low:high]
        for j in range(count):
            factor, total = x[i, j], out[j, low:high]
            for c in range(len(row)):
                total[c] += factor * row[c]


@compiled
def _choices_of_words(table, matrix, out, low, high):
    """out[i, j] = sum_c matrix[i, c] table[j, c] for the rows low .. high."""
    count, columns = table.shape
    for i in range(low, high):
        for j in range(count):
            total = np.int64(0)
            for c in range(columns):
                total += matrix[i, c] * table[j, c]
            out[i, j] = total


@compiled
def _sums_of_codes(x, codes, bins, out, low, high):
    """`_sums_of_words` from bin numbers, for the features low .. high; out [j, feature, bin but the last]."""
    rows, count = x.shape
    out[:, low:high] = 0
    for i in range(rows):
        for f in range(low, high):
            b = codes[i, f]
            if b < bins - 1:
                for j in range(count):
                    out[j, f, b] += x[i, j]
    for j in range(count):
        for f in range(low, high):
            for b in range(1, bins - 1):
                out[j, f, b] += out[j, f, b - 1]


@compiled
def _choices_of_codes(table, codes, out, low, high):
    """`_choices_of_words` from bin numbers; table[j, feature, bin] is the sum over the bins from this one on."""
    count = len(table)
    for i in range(low, high):
        for j in range(count):
            total = np.int64(0)
            for f in range(codes.shape[1]):
                total += table[j, f, codes[i, f]]
            out[i, j] = total


def sums(x: torch.Tensor, matrix: torch.Tensor, bins: int) -> torch.Tensor:
    """x^T times the matrix, [count, columns], mod 2^64.

    Args:
        x: [rows, count].
        matrix: bin numbers (uint8, [rows, features]), or words [rows, columns].
    """
    if matrix.dtype == torch.uint8:
        out = torch.empty(x.shape[1], matrix.shape[1], bins - 1, dtype=torch.int64)
        run_in_threads(matrix.shape[1], _sums_of_codes, array(x), array(matrix), bins, out.numpy())
        return out.flatten(1)
    out = torch.empty(x.shape[1], matrix.shape[1], dtype=torch.int64)
    run_in_threads(matrix.shape[1], _sums_of_words, array(x), array(matrix), out.numpy())
    return out


def choices(table: torch.Tensor, matrix: torch.Tensor, bins: int) -> torch.Tensor:
    """The matrix times the table's rows, [rows, count], mod 2^64.

    Args:
        table: [count, columns].
        matrix: as of `sums`.
    """
    out = torch.empty(matrix.shape[0], table.shape[0], dtype=torch.int64)
    if matrix.dtype == torch.uint8:
        cells = table.view(len(table), matrix.shape[1], bins - 1)
        above = torch.nn.functional.pad(cells.flip(-1).cumsum(-1).flip(-1), (0, 1))
        run_in_threads(len(matrix), _choices_of_codes, array(above), array(matrix), out.numpy())
    else:
        run_in_threads(len(matrix), _choices_of_words, array(table), array(matrix), out.numpy())
    return out
