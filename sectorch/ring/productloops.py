"""Compiled loops of products mod 2^64 (`products.py`): a matrix times tiles of 64 columns, convolutions, sums of rows.

A tile is 64 columns of a matrix, or of an image that is unfolded on the way. It is multiplied as soon as it is
unfolded, so that it is read from the nearest caches. There are three ways to multiply: in vectors of 64-bit words
(AVX-512), by products of 32-bit words, and on a matrix unit for bytes (Intel AMX).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir

from .jit import (
    BYTE,
    INDEX,
    LINE,
    VOID,
    WORD,
    aligned_words,
    broadcast,
    call,
    compiled,
    counted_loop,
    inlined,
    instruction,
    line_of,
    load,
    offset,
    run_in_threads,
    shuffle,
    store,
    word,
)
from .jit import array as array

# In vectors of 64-bit words.
#
# A block of the result, six rows of four vectors, stays in registers while the loop passes over the depth: each step
# reads four vectors of the tile and six words of the matrix, for 24 products. torch's own kernel writes each row of the
# result again for each step. The depth is cut so that a tile's part stays in the first-level cache for all rows. The
# loop prefetches what comes next: it stands too far apart in memory for the processor to predict.


DEEP = 64
"""Steps of the depth at a time: 32 KiB of a tile."""
AHEAD = 8
"""Parts of a tile are prefetched so many steps before they are needed."""
_VECTORS = 4  # vectors of a block; where fewer columns are left, blocks of one
_ROW = 8 * 64
"""Bytes of a tile's row."""


def _prefetch(builder: Any, address: Any) -> None:
    place = builder.inttoptr(address, BYTE.as_pointer())
    call(builder, "llvm.prefetch.p0i8", VOID, place, INDEX(0), INDEX(3), INDEX(1))


_prefetch_line = instruction(_prefetch)


def _block(rows: int, side: int = _VECTORS) -> Callable:
    """An instruction that adds a product to a block of `rows` rows and `side` vectors of the result."""

    @instruction
    def multiply(builder, left, left_stride, tile, out, out_stride, depth):
        places = [offset(builder, offset(builder, out, out_stride, i), 64, j) for i in range(rows) for j in range(side)]

        def body(values: list) -> tuple:
            x, y, *sums = values
            ys = [load(builder, offset(builder, y, 64, j)) for j in range(side)]
            for j in range(side):
                _prefetch(builder, builder.add(y, word(_ROW * AHEAD + 64 * j)))
            totals = []
            for i in range(rows):
                factor = broadcast(builder, load(builder, offset(builder, x, left_stride, i), WORD))
                products = (builder.mul(factor, part) for part in ys)
                totals += [builder.add(sums[side * i + j], product) for j, product in enumerate(products)]
            return builder.add(x, word(8)), builder.add(y, word(_ROW)), *totals

        _, _, *totals = counted_loop(builder, depth, (left, tile, *(load(builder, place) for place in places)), body)
        for place, total in zip(places, totals, strict=True):
            store(builder, total, place)

    return multiply


_six, _four, _two, _one = (_block(rows) for rows in (6, 4, 2, 1))
_narrow, _narrow_one = _block(6, 1), _block(1, 1)


@compiled
def multiply_by_vectors(left, tile, columns, out):
    """[r, K] times the first columns of [K, 64], into out [r, 64]; the rows of all three are contiguous.

    Columns beside them, up to a whole vector, are written as well.
    """
    rows, depth = left.shape
    apart, out_stride = left.strides[0], out.strides[0]
    vectors = -(-columns // 8)
    # The blocks add to the result, once for each part of the depth.
    out[:, : 8 * vectors] = 0
    for k in range(0, depth, DEEP):
        deep, vector = min(DEEP, depth - k), 0
        while vector < vectors:
            x, y = left.ctypes.data + 8 * k, tile.ctypes.data + _ROW * k + 64 * vector
            z, i, whole = out.ctypes.data + 64 * vector, 0, vector + _VECTORS <= vectors
            while i < rows:
                if rows - i >= 6:
                    count = 6
                    # The next six rows of the matrix, while these are multiplied by the first columns; the other
                    # columns find them.
                    if vector == 0:
                        for following in range(x + 6 * apart, x + 12 * apart, apart):
                            for c in range(0, 8 * deep, 64):
                                _prefetch_line(following + c)
                    if whole:
                        _six(x, apart, y, z, out_stride, deep)
                    else:
                        _narrow(x, apart, y, z, out_stride, deep)
                elif not whole:
                    count = 1
                    _narrow_one(x, apart, y, z, out_stride, deep)
                elif rows - i >= 4:
                    count = 4
                    _four(x, apart, y, z, out_stride, deep)
                elif rows - i >= 2:
                    count = 2
                    _two(x, apart, y, z, out_stride, deep)
                else:
                    count = 1
                    _one(x, apart, y, z, out_stride, deep)
                i, x, z = i + count, x + apart * count, z + out_stride * count
            vector += _VECTORS if whole else 1


# By products of 32-bit words, for processors whose vector units have no product of 64-bit words.
#
# With x = x_0 + 2^32 x_1 and y = y_0 + 2^32 y_1, x y mod 2^64 is x_0 y_0 + 2^32 (x_0 y_1 + x_1 y_0). The two sums are
# added up separately and combined at the end.


_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@compiled
def multiply_by_words(left, tile, columns, out):
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
                # Four terms for one load and one store of each sum. All sums may wrap: of `whole` 64 bits count, of
                # `cross` the low 32.
                whole[c] += (a0 * c0 + a1 * c1) + (a2 * c2 + a3 * c3)
                cross[c] += (a0 * d0 + b0 * c0) + (a1 * d1 + b1 * c1)
                cross[c] += (a2 * d2 + b2 * c2) + (a3 * d3 + b3 * c3)
        for k in range(depth // 4 * 4, depth):
            for c in range(columns):
                whole[c] += x[k] * tile[k, c]
        for c in range(columns):
            row[c] = whole[c] + (cross[c] << _HALF)


ROWS = 96
"""Rows of the matrix that a thread multiplies by a tile at a time."""


@compiled
def multiply_tile(left, tile, columns, wide, out):
    """[r, K] times the first columns of [K, 64], into out [r, 64], in vectors if the processor is `wide`."""
    if wide:
        multiply_by_vectors(left, tile, columns, out)
    else:
        multiply_by_words(left, tile, columns, out)


@compiled
def products(left, tiles, wide, out, low, high):
    """Some rows of the matrix times a tile, for the pairs low .. high of both; `out` as of `times_tiles`.

    `wide` is whether the processor multiplies vectors of 64-bit words.
    """
    rows, width = len(left), tiles.shape[2]
    groups, turns = -(-rows // ROWS), out.shape[2] // width
    for at in range(low, high):  # the larger of the two is read once
        number, group = (at % len(tiles), at // len(tiles)) if groups > len(tiles) else (at // groups, at % groups)
        row = group * ROWS
        end, start = min(row + ROWS, rows), number % turns * width
        place = out[number // turns, row:end, start : start + width]
        multiply_tile(left[row:end], tiles[number], width, wide, place)


@compiled
def convolve_tiles(images, places, depth, left, wide, out, low, high):
    """The columns of tiles low .. high of a convolution, [n, r, positions].

    Args:
        images: words, padded. places: where each window begins, tile by tile; filled up to whole tiles.
        depth: where its words stand from there.
    """
    positions = out.shape[2]
    tile, columns_beside = aligned_words(8 * len(depth)).reshape(-1, 64), aligned_words(8 * len(left)).reshape(-1, 64)
    for at in range(low, high):
        _unfold(images, places[64 * at : 64 * at + 64], depth, tile)
        image, start = 64 * at // positions, 64 * at % positions
        # A tile whose windows belong to two images, or end before it does, is computed beside and copied from there.
        columns, whole = min(64, len(out) * positions - 64 * at), start + 64 <= positions
        place = out[image, :, start : start + 64] if whole else columns_beside
        multiply_tile(left, tile, columns, wide, place)
        if not whole:
            _spread(columns_beside, out, image, start)


@compiled
def times_vector(matrix, x, out, rows, low, high):
    """out[i] = sum_k matrix[i, k] x[k] mod 2^64, for rows low .. high, so many at a time."""
    for i in range(low * rows, min(high * rows, len(out))):
        total, row = np.int64(0), matrix[i]
        for k in range(len(x)):
            total += row[k] * x[k]
        out[i] = total


_copy_line = instruction(lambda builder, source, target: store(builder, load(builder, source), target))


@compiled
def _unfold(images, places, depth, tile):
    """The words of 64 windows, one after the other; eight windows side by side are copied a line at a time."""
    beside = np.ones(8, np.bool_)
    # Whether the windows of each group of eight follow one another; from one group to the next they need not.
    for c in range(63):
        beside[c // 8] &= places[c + 1] - places[c] == 1 or c % 8 == 7
    source, target = images.ctypes.data, tile.ctypes.data
    for k in range(len(depth)):
        for group in range(8):
            if beside[group]:
                start = np.int64(depth[k] + places[8 * group])
                _copy_line(source + 8 * start, target + 64 * (8 * k + group))
            else:
                for c in range(8 * group, 8 * group + 8):
                    tile[k, c] = images[depth[k] + places[c]]


@compiled
def _spread(columns, out, image, start):
    """Write a tile's columns that belong to several images, or reach beyond the last one, to their images."""
    column = 0
    while column < 64 and image < len(out):
        count = min(64 - column, out.shape[2] - start)
        for i in range(len(columns)):
            for c in range(count):
                out[image, i, start + c] = columns[i, column + c]
        column, image, start = column + count, image + 1, 0


# Convolutions with few channels and a stride of one, and their gradients: nothing is unfolded.
#
# Images stand in rows of their padded width, so that a place of the kernel is an offset, and a place adds to all
# outputs of a channel one long row times a number. The outputs between the rows of the image are left out.
# `products.py` and `training/layers.py` have the forms in torch functions, which give the same numbers.


MOST_CHANNELS = 32
"""With more output channels, unfolding and a matrix product are faster."""


def _padded(x: torch.Tensor, padding: tuple[int, int]) -> np.ndarray:
    """[n, c, h, w] -> [n, c, (h + 2 p) (w + 2 q)]."""
    if padding != (0, 0):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    return x.contiguous().flatten(2).numpy()


def convolve_images(
    x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """x [n, c, h, w], weight [o, c, kh, kw] -> [n, o, oh, ow]."""
    wide = x.shape[3] + 2 * padding[1]
    high = x.shape[2] + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1)
    out = torch.empty(len(x), len(weight), high, wide - dilation[1] * (weight.shape[3] - 1), dtype=torch.int64)
    offsets = _offsets(weight.shape, dilation, wide)
    arrays = _padded(x, padding), weight.contiguous().flatten(2).numpy(), offsets, wide, out.numpy()
    run_in_threads(len(x), _convolved, *arrays)
    return out


def weight_gradient(
    g: torch.Tensor, x: torch.Tensor, kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """g [n, o, oh, ow], x [n, c, h, w] -> [o, c, kh, kw]."""
    wide = x.shape[3] + 2 * padding[1]
    out = torch.empty(g.shape[1], x.shape[1], *kernel, dtype=torch.int64)
    offsets = _offsets(out.shape, dilation, wide)
    run_in_threads(
        g.shape[1], _weight_gradient, g.contiguous().numpy(), _padded(x, padding), offsets, wide, out.flatten(2).numpy()
    )
    return out


def input_gradient(
    g: torch.Tensor, weight: torch.Tensor, size: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> torch.Tensor:
    """g [n, o, oh, ow], weight [o, c, kh, kw] -> [n, c, h, w]; `size` is h and w."""
    high, wide = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    out = torch.empty(len(g), weight.shape[1], high, wide, dtype=torch.int64)
    offsets = _offsets(weight.shape, dilation, wide)
    arrays = g.contiguous().numpy(), weight.contiguous().flatten(2).numpy(), offsets, wide, out.flatten(2).numpy()
    run_in_threads(len(g), _input_gradient, *arrays)
    return out[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _offsets(shape: torch.Size, dilation: tuple[int, int], wide: int) -> np.ndarray:
    """The offset of each place of a kernel, in rows of `wide` words."""
    rows, columns = np.arange(shape[2]) * dilation[0] * wide, np.arange(shape[3]) * dilation[1]
    return (rows[:, None] + columns).reshape(-1)


@compiled
def _convolved(x, weight, offsets, wide, out, low, high):
    """Images low .. high."""
    rows, columns = out.shape[2], out.shape[3]
    length = (rows - 1) * wide + columns
    total = np.empty(length, np.int64)
    for n in range(low, high):
        for o in range(out.shape[1]):
            total[:] = 0
            for c in range(x.shape[1]):
                for k in range(len(offsets)):
                    factor, image = weight[o, c, k], x[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        total[p] += factor * image[p]
            for y in range(rows):
                for z in range(columns):
                    out[n, o, y, z] = total[y * wide + z]


@compiled
def _spread_images(g, wide, line):
    """Write an image [oh, ow] in rows of `wide` words; the words between them are not changed."""
    for y in range(g.shape[0]):
        for z in range(g.shape[1]):
            line[y * wide + z] = g[y, z]


@compiled
def _weight_gradient(g, x, offsets, wide, out, low, high):
    """Outputs low .. high."""
    length = (g.shape[2] - 1) * wide + g.shape[3]
    line = np.zeros(length, np.int64)
    for o in range(low, high):
        out[o] = 0
        for n in range(g.shape[0]):
            _spread_images(g[n, o], wide, line)
            for c in range(x.shape[1]):
                for k in range(len(offsets)):
                    total, image = np.int64(0), x[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        total += line[p] * image[p]
                    out[o, c, k] += total


@compiled
def _input_gradient(g, weight, offsets, wide, out, low, high):
    """Images low .. high."""
    length = (g.shape[2] - 1) * wide + g.shape[3]
    line = np.zeros(length, np.int64)
    for n in range(low, high):
        out[n] = 0
        for o in range(g.shape[1]):
            _spread_images(g[n, o], wide, line)
            for c in range(out.shape[1]):
                for k in range(len(offsets)):
                    factor, image = weight[o, c, k], out[n, c, offsets[k] : offsets[k] + length]
                    for p in range(length):
                        image[p] += factor * line[p]


# Karatsuba's convolutions (`products.py` has the method): 64 windows' sums, their 36 products with the taps' sums, and
# the outputs from those.


KARATSUBA_ROWS = 48
"""Outputs at a time, whose 36 products stay in the second-level cache."""


def _every_third(builder, lines, first: int):
    """Words first, first + 3, ... of three lines, one after the other."""
    places = [first + 3 * i for i in range(8)]
    two = shuffle(builder, lines[0], lines[1], [p % 16 for p in places])
    return shuffle(builder, two, lines[2], [i if p < 16 else p - 8 for i, p in enumerate(places)])


def _interleave(builder, x, y, z):
    """Three lines with the words of x, y and z in turn."""
    for part in range(3):
        turns = [divmod(8 * part + k, 3) for k in range(8)]
        two = shuffle(builder, x, y, [i + 8 * (turn == 1) for i, turn in turns])
        yield shuffle(builder, two, z, [k if turn < 2 else 8 + i for k, (i, turn) in enumerate(turns)])


def _sums(builder, d):
    """The six factors of the taps' sums, from five inputs."""
    d0, d1, d2, d3, d4 = d
    pairs = (d0, d1, d2), (d2, d1, d3), (d4, d2, d3)
    return [builder.sub(x, builder.add(y, z)) for x, y, z in pairs] + [d1, d2, d3]


def _outputs(builder, m):
    """Three outputs from six products."""
    m0, m1, m2, m3, m4, m5 = m
    triples = (m0, m3, m4), (m1, m3, m5), (m2, m4, m5)
    return [builder.add(x, builder.add(y, z)) for x, y, z in triples]


@instruction
def _read_windows(builder, source, width, target):
    """Eight windows side by side, in rows of `width` bytes, into 25 rows of 64 words; reads a word beyond them."""
    for r in range(5):
        row = offset(builder, source, width, r)
        # Inputs 3 and 4 of a window are 0 and 1 of the next: they are every third word from three words (24 bytes) on.
        left, right = ([load(builder, builder.add(row, word(start + 64 * i))) for i in range(3)] for start in (0, 24))
        for s in range(5):
            words = _every_third(builder, left if s < 3 else right, s % 3)
            store(builder, words, offset(builder, target, _ROW, 5 * r + s), 64)


@instruction
def _sum_windows(builder, source, target, apart):
    """The sums of eight windows in 25 rows of 64 words, into 36 places that are `apart` bytes apart."""
    rows = [[load(builder, offset(builder, source, _ROW, 5 * r + s), align=64) for s in range(5)] for r in range(5)]
    rows = [_sums(builder, row) for row in rows]
    for b in range(6):
        for a, total in enumerate(_sums(builder, [row[b] for row in rows])):
            store(builder, total, offset(builder, target, apart, 6 * a + b), 64)


@instruction
def _combine_windows(builder, source, apart, target):
    """The outputs of eight windows from products at 36 places, `apart` bytes apart, into nine rows of 64 words."""
    rows = []
    for a in range(6):
        products = [load(builder, offset(builder, source, apart, 6 * a + b), align=64) for b in range(6)]
        rows.append(_outputs(builder, products))
    for s in range(3):
        for r, total in enumerate(_outputs(builder, [row[s] for row in rows])):
            store(builder, total, offset(builder, target, _ROW, 3 * r + s), 64)


@instruction
def _write_windows(builder, source, target, width):
    """The outputs of eight windows side by side in nine rows of 64 words, into rows of `width` bytes."""
    for r in range(3):
        lines = [load(builder, offset(builder, source, _ROW, 3 * r + s), align=64) for s in range(3)]
        for i, words in enumerate(_interleave(builder, *lines)):
            store(builder, words, offset(builder, offset(builder, target, width, r), 64, i))


@compiled
def _side_by_side(source, sizes):
    """For each group of eight windows: whether they are side by side, and whether all of them have nine outputs too."""
    side, whole = np.ones(8, np.bool_), np.ones(8, np.bool_)
    # A window of five inputs has three outputs, so the next one begins three words on.
    for q in range(64):
        side[q // 8] &= q % 8 == 0 or source[q] - source[q - 1] == 3
        whole[q // 8] &= sizes[q, 0] == 3 and sizes[q, 1] == 3
    return side, side & whole


@compiled
def _one_by_one(beside, starts, sizes, side, width):
    """For windows that are copied word by word: pairs of a place in the image and a place in rows of 64 words."""
    found, count = np.empty((64 * side * side, 2), np.int64), 0
    for r in range(side):
        for q in range(64):
            if not beside[q // 8] and r < sizes[q, 0]:
                for s in range(sizes[q, 1]):
                    found[count] = starts[q] + r * width + s, 64 * (side * r + s) + q
                    count += 1
    return found[:count]


@compiled
def _sums_of(images, channel, width, source, side, singly, scratch, tiles):
    """Sums of 64 windows in all channels, [6, 6, c + 1, 64]; not the last row."""
    words, begin, apart = scratch.reshape(-1), scratch.ctypes.data, tiles.strides[1]
    for c in range(tiles.shape[2] - 1):
        for k in range(len(singly)):
            words[singly[k, 1]] = images[c * channel + singly[k, 0]]
        # Windows that are not side by side were copied above, word by word.
        for g in range(8):
            if side[g]:
                _read_windows(images.ctypes.data + 8 * (c * channel + source[8 * g]), 8 * width, begin + 64 * g)
        for g in range(8):
            _sum_windows(begin + 64 * g, tiles.ctypes.data + _ROW * c + 64 * g, apart)


@compiled
def _outputs_of(products, count, target, whole, singly, scratch, out, start, positions, width):
    """Rows of the outputs of 64 windows, from their products [6, 6, rows, 64], into the channels from `start` on."""
    words, begin, apart = scratch.reshape(-1), scratch.ctypes.data, products.strides[1]
    for o in range(count):
        channel = start + o * positions
        for g in range(8):
            _combine_windows(products.ctypes.data + _ROW * o + 64 * g, apart, begin + 64 * g)
            if whole[g]:
                _write_windows(begin + 64 * g, out.ctypes.data + 8 * (channel + target[8 * g]), 8 * width)
        for k in range(len(singly)):
            out[channel + singly[k, 0]] = words[singly[k, 1]]


@compiled
def convolve_windows(images, source, target, sizes, width, channel, weight, wide, parts, out, low, high):
    """The outputs of tiles of 64 windows; `parts` pieces of work for each tile, of which low .. high are done.

    Args:
        images: words, padded; a row has `width` of them, and a channel `channel`.
        source, target, sizes: of the windows, as of `products._karatsuba_places`.
        weight: [6, 6, o, c]. wide: whether the processor multiplies vectors of 64-bit words.
        out: [n, o, h, w].
    """
    outputs, channels = weight.shape[2], weight.shape[3]
    # A row more: 36 lines that are a power of two apart would drive one another out of the cache.
    tiles = aligned_words(288 * (channels + 1)).reshape(6, 6, channels + 1, 64)
    products = aligned_words(288 * (KARATSUBA_ROWS + 1)).reshape(6, 6, KARATSUBA_ROWS + 1, 64)
    scratch, flat = aligned_words(200).reshape(25, 64), out.reshape(-1)
    positions, groups = out.shape[2] * out.shape[3], -(-outputs // KARATSUBA_ROWS)
    all_inputs = np.full((64, 2), 5, np.int64)
    for at in range(low, high):
        here, part = slice(at // parts * 64, at // parts * 64 + 64), at % parts
        side, whole = _side_by_side(source[here], sizes[here])
        columns = 64
        # The last tile is filled up with windows that have no output.
        while sizes[here][columns - 1, 0] == 0:
            columns -= 1
        to_read = _one_by_one(side, source[here], all_inputs, 5, width)
        to_write = _one_by_one(whole, target[here], sizes[here], 3, out.shape[3])
        _sums_of(images, channel, width, source[here], side, to_read, scratch, tiles)
        for row in range(
            groups * part // parts * KARATSUBA_ROWS,
            min(outputs, groups * (part + 1) // parts * KARATSUBA_ROWS),
            KARATSUBA_ROWS,
        ):
            count = min(KARATSUBA_ROWS, outputs - row)
            for a in range(6):
                for b in range(6):
                    left, tile = weight[a, b, row : row + count], tiles[a, b, :channels]
                    multiply_tile(left, tile, columns, wide, products[a, b, :count])
            place = flat, row * positions, positions, out.shape[3]
            _outputs_of(products, count, target[here], whole, to_write, scratch, *place)


# Sums of subsets of rows.


BLOCK = 128
"""Columns at a time: two times sixteen sums of so many take 32 KiB."""


@compiled
def keys_of(words, start, count, keys):
    """Four bits for each subset and four rows: the rows that the subset takes."""
    for q in range(len(keys)):
        for s in range(len(words)):
            key = 0
            for i in range(min(4, count - 4 * q)):
                place = start + 4 * q + i
                key |= ((words[s, place >> 6] >> (place & 63)) & 1) << i
            keys[q, s] = key


@compiled
def sums_of(keys, rows, out, block, low, high):
    """Blocks low .. high of the columns; two times four rows together."""
    sums = np.zeros((2, 16, block), np.int64)
    for at in range(low * block, min(high * block, rows.shape[1]), block):
        width = min(block, rows.shape[1] - at)
        for q in range(0, len(keys), 2):
            for half in range(2):
                # Sums with a row beyond the last keep what they had before: no key has the bit of such a row.
                _sixteen_sums(sums[half], rows, 4 * (q + half), at, width)
            for s in range(keys.shape[1]):
                first, second = sums[0, keys[q, s]], sums[1, keys[q + 1, s]]
                into = out[s, at : at + width]
                for j in range(width):
                    into[j] += first[j] + second[j]


@inlined
def _sixteen_sums(sums, rows, start, at, width):
    """The sixteen sums of four rows, of which some may be missing."""
    for i in range(4):
        for below in range(1 << i):
            into, before = sums[below + (1 << i)], sums[below]
            if start + i < len(rows):
                row = rows[start + i, at : at + width]
                for j in range(width):
                    into[j] = before[j] + row[j]


# On a matrix unit for bytes (Intel AMX), exact for every fan-in.
#
# With bytes x = sum_i x_i 2^(8 i) and y = sum_j y_j 2^(8 j),
#
#     x y = sum_{s < 8} 2^(8 s) sum_{i + j = s} x_i y_j   mod 2^64,
#
# 36 products of planes of bytes. The unit multiplies tiles of 16 rows of 64 bytes and adds four neighbouring products
# of bytes at a time. A tile of a plane of x has 64 summands of 16 rows; one of y has four summands of 16 columns in
# each of its 16 rows. The sum over i + j = s and K summands is at most 8 K 255^2, which for K <= 1024 is below 2^31;
# longer sums are cut there and added in int64, where wrapping is meant. Source: Intel 64 and IA-32 Architectures
# Software Developer's Manual, volume 2, TDPBUUD.


SIDE = 16
"""Rows of a tile, and words in a row."""
WORDS = SIDE * SIDE
UNIT_DEPTH = 4 * SIDE
"""Summands of a tile."""
PLANES = 8
COLUMNS = 128
"""Columns of the result at a time: what their part of y takes stays in the second-level cache."""
UNIT_ROWS = 512
"""Rows of the result at a time: what their part of x takes stays there too, unless the fan-in is large."""
FAN_IN = 1024
"""Fan-in at a time, at most."""


def pack_tiles(x: torch.Tensor) -> torch.Tensor:
    """[n, K] -> tiles of words int32 [n / 16, 8, K / 64, 16, 16], for `multiply_on_unit`."""
    n, deep = x.shape
    out = torch.empty(-(-n // SIDE), PLANES, -(-deep // UNIT_DEPTH), SIDE, SIDE, dtype=torch.int32)
    _pack_left(x.contiguous().view(-1).numpy(), np.arange(n) * deep, np.arange(deep), _words(out).view(np.uint64))
    return out


def _words(tiles: torch.Tensor) -> np.ndarray:
    return tiles.numpy().view(np.uint32)


def multiply_on_unit(
    x: torch.Tensor, x_rows: np.ndarray, x_depth: np.ndarray, y: torch.Tensor, y_rows: np.ndarray, y_depth: np.ndarray,
    out: torch.Tensor, out_rows: np.ndarray, out_columns: np.ndarray, tiles: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out[out_rows[i] + out_columns[j]] = sum_k x[x_rows[i] + x_depth[k]] y[y_rows[j] + y_depth[k]] mod 2^64.

    Args:
        x, y, out: int64, contiguous; rows and depths are numbers of elements. It is faster if x has more rows than y.
        tiles: `pack_tiles` of x, which is then not read.
    """
    prepared = _NO_TILES if tiles is None else _words(tiles)
    # Blocks of whole pairs of tiles, as `_multiply_tiles` takes them, and at least one block for each thread.
    size = -(-len(x_rows) // (2 * SIDE * torch.get_num_threads())) * 2 * SIDE
    size = max(2 * SIDE, min(UNIT_ROWS, size))
    blocks = max(1, -(-len(x_depth) // FAN_IN))
    depth = max(UNIT_DEPTH, -(-len(x_depth) // (blocks * UNIT_DEPTH)) * UNIT_DEPTH)
    tall, wide = -(-min(size, len(x_rows)) // SIDE), -(-len(y_rows) // SIDE)
    room = (
        0 if len(prepared) else tall * 2 * SIDE * depth,
        COLUMNS * 2 * depth,
        PLANES * 4 * WORDS,
        2 * tall * wide * WORDS,
    )
    arrays = [v.view(-1).numpy() for v in (x, y, out)]
    places = [(x_rows, x_depth), (y_rows, y_depth), (out_rows, out_columns)]
    arguments = *(a for array, place in zip(arrays, places, strict=True) for a in (array, *place)), prepared

    def run(low: int, high: int) -> None:
        _multiply_on_unit(*arguments, *_scratch(room), size, depth, low, high)

    run_in_threads(-(-len(x_rows) // size), run)
    return out


_NO_TILES = np.empty((0, PLANES, 0, SIDE, SIDE), np.uint32)
_thread = threading.local()


def _scratch(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of this thread of so many 32-bit words, each at a line of the cache, where a tile loads six times as fast.

    They are reused: the page faults of fresh memory would take longer than the product.
    """
    words = getattr(_thread, "words", None)
    if words is None or len(words) < sum(sizes):
        with torch.inference_mode(False):
            words = _thread.words = torch.empty(sum(sizes), dtype=torch.int32).numpy().view(np.uint32)
    ends = list(itertools.accumulate(sizes))
    return [words[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _tile_instruction(name: str, *tiles: int) -> Callable:
    """An instruction on tiles only."""

    @instruction
    def run(builder):
        call(builder, f"llvm.x86.{name}", VOID, *map(BYTE, tiles))

    return run


def _memory_instruction(name: str, *tiles: int) -> Callable:
    """An instruction on a tile of 16 rows that follow each other in memory, 64 bytes each; or on the configuration."""

    @instruction
    def run(builder, address):
        place, strides = builder.inttoptr(address, BYTE.as_pointer()), [word(64)] * len(tiles)
        call(builder, f"llvm.x86.{name}", VOID, *map(BYTE, tiles), place, *strides)

    return run


_configure, _release = _memory_instruction("ldtilecfg"), _tile_instruction("tilerelease")
_zero0, _zero1, _zero2, _zero3 = (_tile_instruction("tilezero", t) for t in range(4))
_load4, _load5, _load6, _load7 = (_memory_instruction("tileloadd64", t) for t in range(4, 8))
_store0, _store1, _store2, _store3 = (_memory_instruction("tilestored64", t) for t in range(4))
_dot0, _dot1, _dot2, _dot3 = (_tile_instruction("tdpbuud", t, 4 + t // 2, 6 + t % 2) for t in range(4))


@compiled
def _gather(x, start, depth, out):
    """x[start + depth[k]] for up to 64 summands, and zeros beyond them."""
    count = len(depth)
    if count == UNIT_DEPTH and depth[UNIT_DEPTH - 1] - depth[0] == UNIT_DEPTH - 1:
        whole = x[start + depth[0] : start + depth[0] + UNIT_DEPTH]
        for c in range(UNIT_DEPTH):
            out[c] = np.uint64(whole[c])
        return
    for c in range(count):
        out[c] = np.uint64(x[np.uint64(start + depth[c])])
    for c in range(count, UNIT_DEPTH):
        out[c] = np.uint64(0)


@instruction
def _split_bytes(builder, summands, out, stride):
    """64 summands -> their eight planes: byte j of word g is that of summand 8 j + g, for x and for y.

    Addresses: of the summands, of the first plane's 64 bytes, and how far the planes are apart.
    """
    rows = [load(builder, offset(builder, summands, 64, j)) for j in range(8)]
    for width, mask in ((4, 0x00000000FFFFFFFF), (2, 0x0000FFFF0000FFFF), (1, 0x00FF00FF00FF00FF)):
        shift = line_of(8 * width)
        for j in (j for j in range(8) if not j & width):
            x, y = rows[j], rows[j + width]
            swap = builder.and_(builder.xor(builder.lshr(x, shift), y), line_of(mask))
            rows[j], rows[j + width] = builder.xor(x, builder.shl(swap, shift)), builder.xor(y, swap)
    for p, row in enumerate(rows):
        store(builder, row, offset(builder, out, stride, p))


@compiled
def _pack_left(x, rows, depth, out):
    """x[rows[i] + depth[k]] -> tiles [rows / 16, 8, K / 64, 16, 8], of eight bytes each."""
    line, at, tiles = np.empty(UNIT_DEPTH, np.uint64), out.ctypes.data, out.shape[2]
    for i in range(-(-len(rows) // SIDE)):
        for k in range(-(-len(depth) // UNIT_DEPTH)):
            for r in range(SIDE):
                if i * SIDE + r < len(rows):
                    _gather(x, rows[i * SIDE + r], depth[k * UNIT_DEPTH : (k + 1) * UNIT_DEPTH], line)
                else:
                    line[:] = 0
                _split_bytes(
                    line.ctypes.data, at + ((i * PLANES * tiles + k) * SIDE + r) * UNIT_DEPTH, tiles * SIDE * UNIT_DEPTH
                )


@compiled
def _pack_right(y, columns, depth, out):
    """y[columns[p] + depth[k]] -> tiles of words [columns / 16, 8, K / 64, 16, 16], of four bytes each."""
    line, tile = np.empty(UNIT_DEPTH, np.uint64), np.empty((PLANES, SIDE, UNIT_DEPTH), np.uint8)
    words = tile.view(np.uint32)
    for j in range(-(-len(columns) // SIDE)):
        for k in range(-(-len(depth) // UNIT_DEPTH)):
            for n in range(SIDE):
                if j * SIDE + n < len(columns):
                    _gather(y, columns[j * SIDE + n], depth[k * UNIT_DEPTH : (k + 1) * UNIT_DEPTH], line)
                else:
                    line[:] = 0
                _split_bytes(line.ctypes.data, tile.ctypes.data + n * UNIT_DEPTH, SIDE * UNIT_DEPTH)
            for p in range(PLANES):
                turned = out[j, p, k]
                for q in range(SIDE):
                    for n in range(SIDE):
                        turned[q, n] = words[p, n, q]


@compiled
def _multiply_tiles(a, b, other_a, other_b, steps):
    """Add the products of tiles, over so many tiles of K; two beside each other at a time, or one."""
    for _ in range(steps):
        # Tiles 0 to 3 are the sums, 4 and 5 two of x below each other, 6 and 7 two of y beside each other: dot t is
        # that of tiles 4 + t // 2 and 6 + t % 2, so that each loaded tile is used twice.
        _load4(a)
        _load6(b)
        _dot0()
        if other_a:
            _load5(a + other_a)
            _dot2()
        if other_b:
            _load7(b + other_b)
            _dot1()
            if other_a:
                _dot3()
        a += 4 * WORDS
        b += 4 * WORDS


@instruction
def _add_planes(builder, sums, part):
    """Add eight sums of products of bytes, the s-th times 2^(8 s), to eight of the result. Addresses; the parts of one
    s are four tiles behind those of the one before."""
    total = load(builder, sums)
    for s in range(PLANES):
        products = load(builder, offset(builder, part, 4 * 4 * WORDS, s), ir.VectorType(INDEX, 8), 4)
        total = builder.add(total, builder.shl(builder.zext(products, LINE), line_of(8 * s)))
    store(builder, total, sums)


@compiled
def _multiply_on_unit(
    x, x_rows, x_depth, y, y_rows, y_depth, out, out_rows, out_columns, prepared, left, right, part, sums, size, depth,
    low, high,
):  # fmt: skip
    """`multiply_on_unit` for the rows of x in blocks low .. high of `size`, with a fan-in of `depth` at a time."""
    deep, wide = len(x_depth), len(y_rows)
    configuration = np.zeros(64, np.uint8)
    # Palette 1: bytes 16 + 2 t are the bytes of a row of tile t, and bytes 48 + t its rows (SDM, LDTILECFG).
    configuration[0] = 1
    for t in range(8):
        configuration[16 + 2 * t] = 64
        configuration[48 + t] = SIDE
    is_prepared, tiles, tile = len(prepared) > 0, depth // UNIT_DEPTH, 4 * WORDS
    tall, across = -(-min(size, len(x_rows)) // SIDE), -(-wide // SIDE)
    own = left.view(np.uint64).reshape((0 if is_prepared else tall, PLANES, tiles, SIDE, 8))
    blocks = right.reshape((COLUMNS // SIDE, PLANES, tiles, SIDE, SIDE))
    sums = sums.view(np.int64).reshape((tall * SIDE, across * SIDE))
    left_plane, right_plane = tile * (prepared.shape[2] if is_prepared else tiles), tile * tiles
    left_row, right_row = PLANES * left_plane, PLANES * right_plane
    right_at, part_at, sums_at = right.ctypes.data, part.ctypes.data, sums.ctypes.data
    packed = -1
    _configure(configuration.ctypes.data)
    for block in range(low, high):
        mine = x_rows[block * size : (block + 1) * size]
        tall = -(-len(mine) // SIDE)
        sums[:] = 0
        for first in range(0, deep, depth):
            last = min(deep, first + depth)
            steps = -(-(last - first) // UNIT_DEPTH)
            if is_prepared:
                left_at = prepared.ctypes.data + block * size // SIDE * left_row + first // UNIT_DEPTH * tile
            else:
                left_at = left.ctypes.data
                _pack_left(x, mine, x_depth[first:last], own)
            for at in range(0, wide, COLUMNS):
                beside = y_rows[at : at + COLUMNS]
                count = -(-len(beside) // SIDE)
                if packed != first * wide + at:  # the same for all rows, if it is the whole of y
                    _pack_right(y, beside, y_depth[first:last], blocks)
                    packed = first * wide + at
                for i in range(0, tall, 2):
                    other_a = left_row if i + 1 < tall else 0
                    for j in range(0, count, 2):
                        other_b = right_row if j + 1 < count else 0
                        a, b = left_at + i * left_row, right_at + j * right_row
                        for s in range(PLANES):
                            _zero0()
                            _zero1()
                            _zero2()
                            _zero3()
                            for p in range(s + 1):  # planes p of x and s - p of y have the weight 2^(8 s)
                                _multiply_tiles(a + p * left_plane, b + (s - p) * right_plane, other_a, other_b, steps)
                            near = part_at + 4 * s * tile
                            _store0(near)
                            _store1(near + tile)
                            _store2(near + 2 * tile)
                            _store3(near + 3 * tile)
                        for u in range(2 if other_a else 1):
                            for v in range(2 if other_b else 1):
                                place = sums_at + 8 * ((i + u) * SIDE * across * SIDE + at + (j + v) * SIDE)
                                near = part_at + (2 * u + v) * tile
                                for _ in range(SIDE):
                                    _add_planes(place, near)
                                    _add_planes(place + 64, near + 32)
                                    place += 8 * across * SIDE
                                    near += 64
        rows = out_rows[block * size : (block + 1) * size]
        # In blocks of sixteen rows, as either index may be the contiguous one in `out`.
        for top in range(0, len(rows), SIDE):
            for j in range(wide):
                for i in range(top, min(top + SIDE, len(rows))):
                    out[rows[i] + out_columns[j]] = sums[i, j]
    _release()
