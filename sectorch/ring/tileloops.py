"""Loops over tiles of 64 columns: a matrix times tiles that are there, or that are unfolded from images on the way.

A tile is multiplied as soon as it is unfolded, so that it is read from the nearest caches.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from . import vectorloops, wordloops
from .loops import compiled, intrinsic, room

_LINE = ir.VectorType(ir.IntType(64), 8)
_by_vectors, _by_words = vectorloops.multiply, wordloops.multiply

ROWS = 96
"""Of the matrix, which a thread multiplies by a tile at a time."""


@compiled
def products(left, tiles, wide, out, low, high):
    """Some rows of the matrix times a tile, for the pairs low .. high of both; `out` as of `tiles.times_tiles`.

    `wide` is whether the processor multiplies vectors of 64-bit words.
    """
    rows, width = len(left), tiles.shape[2]
    groups, turns = -(-rows // ROWS), out.shape[2] // width
    for at in range(low, high):  # what is larger is read once
        number, group = (at % len(tiles), at // len(tiles)) if groups > len(tiles) else (at // groups, at % groups)
        row = group * ROWS
        end, start = min(row + ROWS, rows), number % turns * width
        place = out[number // turns, row:end, start : start + width]
        if wide:
            _by_vectors(left[row:end], tiles[number], width, place)
        else:
            _by_words(left[row:end], tiles[number], width, place)


@compiled
def convolved(images, places, depth, left, wide, out, low, high):
    """The columns of tiles low .. high of a convolution, [n, r, positions].

    Args:
        images: words, padded. places: where each window begins, tile by tile; filled up to whole tiles.
        depth: where its words stand from there.
    """
    positions = out.shape[2]
    tile, held = room(8 * len(depth)).reshape(-1, 64), room(8 * len(left)).reshape(-1, 64)
    for at in range(low, high):
        _unfold(images, places[64 * at : 64 * at + 64], depth, tile)
        image, start = 64 * at // positions, 64 * at % positions
        columns, whole = min(64, len(out) * positions - 64 * at), start + 64 <= positions
        place = out[image, :, start : start + 64] if whole else held
        if wide:
            _by_vectors(left, tile, columns, place)
        else:
            _by_words(left, tile, columns, place)
        if not whole:
            _spread(held, out, image, start)


@intrinsic
def _line(context, source, target):
    """Eight words from one address to another."""

    def generate(context, builder, signature, values):
        source, target = (builder.inttoptr(value, _LINE.as_pointer()) for value in values)
        builder.store(builder.load(source, align=8), target, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@compiled
def _unfold(images, places, depth, tile):
    """The words of 64 windows, one after the other; of eight that stand side by side a line at once."""
    beside = np.ones(8, np.bool_)
    for c in range(63):
        beside[c // 8] &= places[c + 1] - places[c] == 1 or c % 8 == 7
    source, target = images.ctypes.data, tile.ctypes.data
    for k in range(len(depth)):
        for group in range(8):
            if beside[group]:
                start = np.int64(depth[k] + places[8 * group])
                _line(source + 8 * start, target + 64 * (8 * k + group))
            else:
                for c in range(8 * group, 8 * group + 8):
                    tile[k, c] = images[depth[k] + places[c]]


@compiled
def _spread(held, out, image, start):
    """A tile's columns that belong to several images, or reach beyond the last one."""
    column = 0
    while column < 64 and image < len(out):
        count = min(64 - column, out.shape[2] - start)
        for i in range(len(held)):
            for c in range(count):
                out[image, i, start + c] = held[i, column + c]
        column, image, start = column + count, image + 1, 0
