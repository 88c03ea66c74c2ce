"""The loops of `karatsuba.py`: 64 windows' sums, their 36 products with the taps' sums, and the outputs from those."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from . import vectorloops, wordloops
from .loops import compiled, intrinsic, room

_WORD, _PLACE = ir.IntType(64), ir.IntType(32)
_LINE = ir.VectorType(_WORD, 8)
_by_vectors, _by_words = vectorloops.multiply, wordloops.multiply

ROWS = 48
"""Outputs at a time, whose 36 products stay in the second-level cache."""
_ROW = 512
"""Bytes of 64 words."""


def _line(builder, address, offset):
    """Eight words at an address and an offset from it, in bytes."""
    offset = offset if isinstance(offset, ir.Value) else ir.Constant(_WORD, offset)
    return builder.inttoptr(builder.add(address, offset), _LINE.as_pointer())


def _picked(builder, x, y, places: list[int]):
    """Of two lines, one after the other, the words at these places."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_PLACE, 8), places))


def _every_third(builder, lines, first: int):
    """Words first, first + 3, ... of three lines, one after the other."""
    places = [first + 3 * i for i in range(8)]
    two = _picked(builder, lines[0], lines[1], [p % 16 for p in places])
    return _picked(builder, two, lines[2], [i if p < 16 else p - 8 for i, p in enumerate(places)])


def _woven(builder, x, y, z):
    """Three lines that have the words of x, y and z in turn."""
    for part in range(3):
        turns = [divmod(8 * part + k, 3) for k in range(8)]
        two = _picked(builder, x, y, [i + 8 * (turn == 1) for i, turn in turns])
        yield _picked(builder, two, z, [k if turn < 2 else 8 + i for k, (i, turn) in enumerate(turns)])


def _sums(builder, d):
    """What the taps' sums are multiplied by, from five inputs."""
    d0, d1, d2, d3, d4 = d
    pairs = (d0, d1, d2), (d2, d1, d3), (d4, d2, d3)
    return [builder.sub(x, builder.add(y, z)) for x, y, z in pairs] + [d1, d2, d3]


def _outputs(builder, m):
    """Three outputs from six products."""
    m0, m1, m2, m3, m4, m5 = m
    triples = (m0, m3, m4), (m1, m3, m5), (m2, m4, m5)
    return [builder.add(x, builder.add(y, z)) for x, y, z in triples]


def _of_addresses(write):
    """What a loop calls for the code that `write` writes, of three numbers: addresses, and bytes between places."""

    @intrinsic
    def run(context, first, second, third):
        def generate(context, builder, signature, values):
            write(builder, *values)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return run


@_of_addresses
def _taken(builder, source, width, target):
    """Eight windows side by side, of rows of so many bytes, into 25 rows of 64 words; reads a word beyond them."""
    for r in range(5):
        row = builder.add(source, builder.mul(width, ir.Constant(_WORD, r)))
        left, right = (
            [builder.load(_line(builder, row, start + 64 * i), align=8) for i in range(3)] for start in (0, 24)
        )
        for s in range(5):
            words = _every_third(builder, left if s < 3 else right, s % 3)
            builder.store(words, _line(builder, target, _ROW * (5 * r + s)), align=64)


@_of_addresses
def _summed(builder, source, target, apart):
    """Sums of eight windows, of 25 rows of 64 words, to 36 places so many bytes apart."""
    rows = [[builder.load(_line(builder, source, _ROW * (5 * r + s)), align=64) for s in range(5)] for r in range(5)]
    rows = [_sums(builder, row) for row in rows]
    for b in range(6):
        for a, total in enumerate(_sums(builder, [row[b] for row in rows])):
            place = builder.mul(apart, ir.Constant(_WORD, 6 * a + b))
            builder.store(total, _line(builder, target, place), align=64)


@_of_addresses
def _combined(builder, source, apart, target):
    """The outputs of eight windows from products at 36 places so many bytes apart, into nine rows of 64 words."""
    rows = []
    for a in range(6):
        places = [builder.mul(apart, ir.Constant(_WORD, 6 * a + b)) for b in range(6)]
        rows.append(_outputs(builder, [builder.load(_line(builder, source, place), align=64) for place in places]))
    for s in range(3):
        for r, total in enumerate(_outputs(builder, [row[s] for row in rows])):
            builder.store(total, _line(builder, target, _ROW * (3 * r + s)), align=64)


@_of_addresses
def _written(builder, source, target, width):
    """The outputs of eight windows side by side, of nine rows of 64 words, into rows of so many bytes."""
    for r in range(3):
        row = builder.add(target, builder.mul(width, ir.Constant(_WORD, r)))
        lines = [builder.load(_line(builder, source, _ROW * (3 * r + s)), align=64) for s in range(3)]
        for i, words in enumerate(_woven(builder, *lines)):
            builder.store(words, _line(builder, row, 64 * i), align=8)


@compiled
def _beside(source, sizes):
    """Of eight windows at a time, whether they stand side by side, and whether all of them have nine outputs."""
    side, whole = np.ones(8, np.bool_), np.ones(8, np.bool_)
    for q in range(64):
        side[q // 8] &= q % 8 == 0 or source[q] - source[q - 1] == 3
        whole[q // 8] &= sizes[q, 0] == 3 and sizes[q, 1] == 3
    return side, side & whole


@compiled
def _one_by_one(beside, starts, sizes, side, width):
    """For windows that are not taken eight at a time: pairs of a place beside `starts` and one in rows of 64 words."""
    found, count = np.empty((64 * side * side, 2), np.int64), 0
    for r in range(side):
        for q in range(64):
            if not beside[q // 8] and r < sizes[q, 0]:
                for s in range(sizes[q, 1]):
                    found[count] = starts[q] + r * width + s, 64 * (side * r + s) + q
                    count += 1
    return found[:count]


@compiled
def _sums_of(images, channel, width, source, side, singly, held, tiles):
    """Sums of 64 windows in all channels, [6, 6, c + 1, 64]; not the last row."""
    words, begin, apart = held.reshape(-1), held.ctypes.data, tiles.strides[1]
    for c in range(tiles.shape[2] - 1):
        for k in range(len(singly)):
            words[singly[k, 1]] = images[c * channel + singly[k, 0]]
        for g in range(8):
            if side[g]:
                _taken(images.ctypes.data + 8 * (c * channel + source[8 * g]), 8 * width, begin + 64 * g)
        for g in range(8):
            _summed(begin + 64 * g, tiles.ctypes.data + _ROW * c + 64 * g, apart)


@compiled
def _outputs_of(products, count, target, whole, singly, held, out, start, positions, width):
    """Rows of the outputs of 64 windows, from their products [6, 6, rows, 64], into the channels from `start` on."""
    words, begin, apart = held.reshape(-1), held.ctypes.data, products.strides[1]
    for o in range(count):
        channel = start + o * positions
        for g in range(8):
            _combined(products.ctypes.data + _ROW * o + 64 * g, apart, begin + 64 * g)
            if whole[g]:
                _written(begin + 64 * g, out.ctypes.data + 8 * (channel + target[8 * g]), 8 * width)
        for k in range(len(singly)):
            out[channel + singly[k, 0]] = words[singly[k, 1]]


@compiled
def convolved(images, source, target, sizes, width, channel, weight, wide, parts, out, low, high):
    """Tiles of 64 windows, and of each so many parts of the outputs: low .. high of both.

    Args:
        images: words, padded; a row has `width` of them, and a channel `channel`.
        source, target, sizes: of the windows, as of `karatsuba._places`.
        weight: [6, 6, o, c]. wide: whether the processor multiplies vectors of 64-bit words.
        out: [n, o, h, w].
    """
    outputs, channels = weight.shape[2], weight.shape[3]
    # A row more: 36 lines that are a power of two apart would drive one another out of the cache.
    tiles = room(288 * (channels + 1)).reshape(6, 6, channels + 1, 64)
    products = room(288 * (ROWS + 1)).reshape(6, 6, ROWS + 1, 64)
    held, flat = room(200).reshape(25, 64), out.reshape(-1)
    positions, groups = out.shape[2] * out.shape[3], -(-outputs // ROWS)
    all_inputs = np.full((64, 2), 5, np.int64)
    for at in range(low, high):
        here, part = slice(at // parts * 64, at // parts * 64 + 64), at % parts
        side, whole = _beside(source[here], sizes[here])
        columns = 64
        while sizes[here][columns - 1, 0] == 0:
            columns -= 1
        read = _one_by_one(side, source[here], all_inputs, 5, width)
        written = _one_by_one(whole, target[here], sizes[here], 3, out.shape[3])
        _sums_of(images, channel, width, source[here], side, read, held, tiles)
        for row in range(groups * part // parts * ROWS, min(outputs, groups * (part + 1) // parts * ROWS), ROWS):
            count = min(ROWS, outputs - row)
            for a in range(6):
                for b in range(6):
                    left, tile = weight[a, b, row : row + count], tiles[a, b, :channels]
                    place = products[a, b, :count]
                    if wide:
                        _by_vectors(left, tile, columns, place)
                    else:
                        _by_words(left, tile, columns, place)
            place = flat, row * positions, positions, out.shape[3]
            _outputs_of(products, count, target[here], whole, written, held, *place)
