"""Loops over tiles of 64 columns: a matrix times tiles that are there, or that are unfolded from images on the way.

A tile is multiplied as soon as it is unfolded, so that it is read from the nearest caches.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .jit import aligned_words, compiled, counted_loop, inlined, intrinsic
from .jit import array as array
from .jit import run_in_threads as run_in_threads

# A matrix times a tile mod 2^64 for processors that multiply vectors of eight 64-bit words (AVX-512).
#
# A block of the result, six rows of four vectors, stays in registers while the depth passes by: for each of its steps
# four vectors of the tile are read and six words of the matrix, for 24 products. torch's own kernel writes each row
# again for each step. The depth is cut so that a tile's part stays in the first-level cache for all rows. What comes
# next is asked for meanwhile: it stands too far apart for the processor to see that it follows.


DEEP = 64
"""Steps of the depth at a time: 32 KiB of a tile."""
AHEAD = 8
"""Steps of the depth whose parts of a tile are asked for before they are needed."""
_WORD, _PLACE = ir.IntType(64), ir.IntType(32)
_VECTOR_LINE = ir.VectorType(_WORD, 8)
_SIDE = 4  # vectors of a block; where fewer columns are left, blocks of one
_BYTES = 8 * 64  # of a tile's row


def _prefetch(builder, address) -> None:
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    f = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(f, [builder.inttoptr(address, byte), number(0), number(3), number(1)])


@intrinsic
def _ask_for(context, address):
    """A line of the cache, ahead of the time when it is read."""

    def generate(context, builder, signature, values):
        _prefetch(builder, *values)
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _block(rows: int, side: int = _SIDE):
    """So many rows of a block of the result, added to what is there.

    Of the matrix its address and how far its rows are apart, of the tile its address, of the result both; the depth.
    """

    @intrinsic
    def run(context, left, apart, tile, out, spread, depth):
        def generate(context, builder, signature, values):
            left, apart, tile, out, spread, depth = values

            def number(n: int):
                return ir.Constant(_WORD, n)

            def line(address, i: int):
                return builder.inttoptr(builder.add(address, number(64 * i)), _VECTOR_LINE.as_pointer())

            def row(address, stride, i: int):
                return builder.add(address, builder.mul(stride, number(i)))

            places = [line(row(out, spread, i), j) for i in range(rows) for j in range(side)]
            begun = [builder.load(place, align=8) for place in places]

            def step(values: list) -> tuple:
                x, y, *sums = values
                ys = [builder.load(line(y, j), align=8) for j in range(side)]
                for j in range(side):
                    _prefetch(builder, builder.add(y, number(_BYTES * AHEAD + 64 * j)))
                found = []
                for i in range(rows):
                    at = builder.inttoptr(row(x, apart, i), _WORD.as_pointer())
                    word = builder.insert_element(
                        ir.Constant(_VECTOR_LINE, ir.Undefined), builder.load(at, align=8), _PLACE(0)
                    )
                    words = builder.shuffle_vector(word, word, ir.Constant(ir.VectorType(_PLACE, 8), [0] * 8))
                    products = (builder.mul(words, part) for part in ys)
                    found += [builder.add(sums[side * i + j], product) for j, product in enumerate(products)]
                return builder.add(x, number(8)), builder.add(y, number(_BYTES)), *found

            _, _, *found = counted_loop(builder, depth, (left, tile, *begun), step)
            for place, total in zip(places, found, strict=True):
                builder.store(total, place, align=8)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return run


_six, _four, _two, _one = (_block(rows) for rows in (6, 4, 2, 1))
_narrow, _narrow_one = _block(6, 1), _block(1, 1)


@compiled
def multiply_by_vectors(left, tile, columns, out):
    """[r, K] times the first columns of [K, 64], into out [r, 64]; the rows of all three are contiguous.

    Columns beside them, up to a whole vector, are written as well.
    """
    rows, depth = left.shape
    apart, spread = left.strides[0], out.strides[0]
    vectors = -(-columns // 8)
    out[:, : 8 * vectors] = 0
    for k in range(0, depth, DEEP):
        deep, vector = min(DEEP, depth - k), 0
        while vector < vectors:
            x, y = left.ctypes.data + 8 * k, tile.ctypes.data + _BYTES * k + 64 * vector
            z, i, whole = out.ctypes.data + 64 * vector, 0, vector + _SIDE <= vectors
            while i < rows:
                if rows - i >= 6:
                    count = 6
                    if vector == 0:
                        for following in range(x + 6 * apart, x + 12 * apart, apart):
                            for c in range(0, 8 * deep, 64):
                                _ask_for(following + c)
                    if whole:
                        _six(x, apart, y, z, spread, deep)
                    else:
                        _narrow(x, apart, y, z, spread, deep)
                elif not whole:
                    count = 1
                    _narrow_one(x, apart, y, z, spread, deep)
                elif rows - i >= 4:
                    count = 4
                    _four(x, apart, y, z, spread, deep)
                elif rows - i >= 2:
                    count = 2
                    _two(x, apart, y, z, spread, deep)
                else:
                    count = 1
                    _one(x, apart, y, z, spread, deep)
                i, x, z = i + count, x + apart * count, z + spread * count
            vector += _SIDE if whole else 1


# A matrix times a tile mod 2^64 for processors whose vector units have no product of 64-bit words.
#
# Of x = x_0 + 2^32 x_1 and y only x_0 y_0 is needed whole, and of x_0 y_1 + x_1 y_0 the low half: products of 32-bit
# words, which these processors have, summed up apart and put together at the end.


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
                whole[c] += (a0 * c0 + a1 * c1) + (a2 * c2 + a3 * c3)
                cross[c] += (a0 * d0 + b0 * c0) + (a1 * d1 + b1 * c1)
                cross[c] += (a2 * d2 + b2 * c2) + (a3 * d3 + b3 * c3)
        for k in range(depth // 4 * 4, depth):
            for c in range(columns):
                whole[c] += x[k] * tile[k, c]
        for c in range(columns):
            row[c] = whole[c] + (cross[c] << _HALF)


_LINE = ir.VectorType(ir.IntType(64), 8)
_by_vectors, _by_words = multiply_by_vectors, multiply_by_words

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
def convolve_tiles(images, places, depth, left, wide, out, low, high):
    """The columns of tiles low .. high of a convolution, [n, r, positions].

    Args:
        images: words, padded. places: where each window begins, tile by tile; filled up to whole tiles.
        depth: where its words stand from there.
    """
    positions = out.shape[2]
    tile, held = aligned_words(8 * len(depth)).reshape(-1, 64), aligned_words(8 * len(left)).reshape(-1, 64)
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


# Convolutions with few channels, and their gradients, as compiled loops mod 2^64: nothing is unfolded.
#
# Images stand in rows of their padded width, so that a kernel's place is an offset, and what a place adds to all
# outputs of a channel is one long product with a number; the outputs that this makes between the rows are left out. For
# a stride of one. `products.py` and `training/layers.py` have the forms in torch functions, which give the same
# numbers.


MOST_CHANNELS = 32
"""Outputs from which on unfolding and a matrix product are faster."""


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
    """Of each place of a kernel, in rows of so many."""
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
    """An image [oh, ow] in rows of so many; what stands between them stays as it is."""
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


# Karatsuba's convolutions: 64 windows' sums, their 36 products with the taps' sums, and the outputs from those.


_WINDOW_WORD, _WINDOW_PLACE = ir.IntType(64), ir.IntType(32)
_WINDOW_LINE = ir.VectorType(_WINDOW_WORD, 8)
_windows_by_vectors, _windows_by_words = multiply_by_vectors, multiply_by_words

KARATSUBA_ROWS = 48
"""Outputs at a time, whose 36 products stay in the second-level cache."""
_ROW = 512
"""Bytes of 64 words."""


def _window_line(builder, address, offset):
    """Eight words at an address and an offset from it, in bytes."""
    offset = offset if isinstance(offset, ir.Value) else ir.Constant(_WINDOW_WORD, offset)
    return builder.inttoptr(builder.add(address, offset), _WINDOW_LINE.as_pointer())


def _picked(builder, x, y, places: list[int]):
    """Of two lines, one after the other, the words at these places."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_WINDOW_PLACE, 8), places))


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
        row = builder.add(source, builder.mul(width, ir.Constant(_WINDOW_WORD, r)))
        left, right = (
            [builder.load(_window_line(builder, row, start + 64 * i), align=8) for i in range(3)] for start in (0, 24)
        )
        for s in range(5):
            words = _every_third(builder, left if s < 3 else right, s % 3)
            builder.store(words, _window_line(builder, target, _ROW * (5 * r + s)), align=64)


@_of_addresses
def _summed(builder, source, target, apart):
    """Sums of eight windows, of 25 rows of 64 words, to 36 places so many bytes apart."""
    rows = [
        [builder.load(_window_line(builder, source, _ROW * (5 * r + s)), align=64) for s in range(5)] for r in range(5)
    ]
    rows = [_sums(builder, row) for row in rows]
    for b in range(6):
        for a, total in enumerate(_sums(builder, [row[b] for row in rows])):
            place = builder.mul(apart, ir.Constant(_WINDOW_WORD, 6 * a + b))
            builder.store(total, _window_line(builder, target, place), align=64)


@_of_addresses
def _combined(builder, source, apart, target):
    """The outputs of eight windows from products at 36 places so many bytes apart, into nine rows of 64 words."""
    rows = []
    for a in range(6):
        places = [builder.mul(apart, ir.Constant(_WINDOW_WORD, 6 * a + b)) for b in range(6)]
        rows.append(
            _outputs(builder, [builder.load(_window_line(builder, source, place), align=64) for place in places])
        )
    for s in range(3):
        for r, total in enumerate(_outputs(builder, [row[s] for row in rows])):
            builder.store(total, _window_line(builder, target, _ROW * (3 * r + s)), align=64)


@_of_addresses
def _written(builder, source, target, width):
    """The outputs of eight windows side by side, of nine rows of 64 words, into rows of so many bytes."""
    for r in range(3):
        row = builder.add(target, builder.mul(width, ir.Constant(_WINDOW_WORD, r)))
        lines = [builder.load(_window_line(builder, source, _ROW * (3 * r + s)), align=64) for s in range(3)]
        for i, words in enumerate(_woven(builder, *lines)):
            builder.store(words, _window_line(builder, row, 64 * i), align=8)


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
def convolve_windows(images, source, target, sizes, width, channel, weight, wide, parts, out, low, high):
    """Tiles of 64 windows, and of each so many parts of the outputs: low .. high of both.

    Args:
        images: words, padded; a row has `width` of them, and a channel `channel`.
        source, target, sizes: of the windows, as of `karatsuba._places`.
        weight: [6, 6, o, c]. wide: whether the processor multiplies vectors of 64-bit words.
        out: [n, o, h, w].
    """
    outputs, channels = weight.shape[2], weight.shape[3]
    # A row more: 36 lines that are a power of two apart would drive one another out of the cache.
    tiles = aligned_words(288 * (channels + 1)).reshape(6, 6, channels + 1, 64)
    products = aligned_words(288 * (KARATSUBA_ROWS + 1)).reshape(6, 6, KARATSUBA_ROWS + 1, 64)
    held, flat = aligned_words(200).reshape(25, 64), out.reshape(-1)
    positions, groups = out.shape[2] * out.shape[3], -(-outputs // KARATSUBA_ROWS)
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
        for row in range(
            groups * part // parts * KARATSUBA_ROWS,
            min(outputs, groups * (part + 1) // parts * KARATSUBA_ROWS),
            KARATSUBA_ROWS,
        ):
            count = min(KARATSUBA_ROWS, outputs - row)
            for a in range(6):
                for b in range(6):
                    left, tile = weight[a, b, row : row + count], tiles[a, b, :channels]
                    place = products[a, b, :count]
                    if wide:
                        _windows_by_vectors(left, tile, columns, place)
                    else:
                        _windows_by_words(left, tile, columns, place)
            place = flat, row * positions, positions, out.shape[3]
            _outputs_of(products, count, target[here], whole, written, held, *place)


# Compiled loops of sums of subsets of rows (`products.py`).


BLOCK = 128
"""Columns at a time: two times sixteen sums of so many take 32 KiB."""


@compiled
def keys_of(words, start, count, keys):
    """Which of its four rows a subset takes, four bits."""
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
                _made(sums[half], rows, 4 * (q + half), at, width)
            for s in range(keys.shape[1]):
                first, second = sums[0, keys[q, s]], sums[1, keys[q + 1, s]]
                into = out[s, at : at + width]
                for j in range(width):
                    into[j] += first[j] + second[j]


@inlined
def _made(sums, rows, start, at, width):
    """The sixteen sums of four rows, of which some may be missing."""
    for i in range(4):
        for below in range(1 << i):
            into, before = sums[below + (1 << i)], sums[below]
            if start + i < len(rows):
                row = rows[start + i, at : at + width]
                for j in range(width):
                    into[j] = before[j] + row[j]
