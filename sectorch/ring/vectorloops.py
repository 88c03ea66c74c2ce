"""Products of a matrix and tiles mod 2^64 for processors that multiply vectors of eight 64-bit words (AVX-512).

A block of the result, eight rows of two vectors, stays in registers while the depth passes by: for each of its steps
two vectors of a tile are read and eight words of the matrix, for sixteen products. torch's own kernel writes each row
again for each step. The depth is cut where a tile's part, and the matrix's, would leave the caches.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .loops import compiled, counted, intrinsic

TILE = 64
"""Columns of a tile."""
DEEP = 256
"""Steps of the depth at a time: 128 KiB of a tile."""
ROWS = 64
"""Of the matrix, which a thread multiplies by a tile at a time."""
_WORD, _PLACE = ir.IntType(64), ir.IntType(32)
_LINE = ir.VectorType(_WORD, 8)
_SIDE = 2  # vectors of a block
_BYTES = 8 * TILE

AHEAD = 32
"""Steps of the depth whose parts of a tile are asked for before they are needed: they stand too far apart for the
processor to see that they follow."""


def _prefetch(builder, address) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _PLACE, _PLACE, _PLACE])
    f = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(f, [builder.inttoptr(address, byte), _PLACE(0), _PLACE(3), _PLACE(1)])


def _block(rows: int):
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
                return builder.inttoptr(builder.add(address, number(64 * i)), _LINE.as_pointer())

            def row(address, stride, i: int):
                return builder.add(address, builder.mul(stride, number(i)))

            places = [line(row(out, spread, i), j) for i in range(rows) for j in range(_SIDE)]
            begun = [builder.load(place, align=8) for place in places]

            def step(values: list) -> tuple:
                x, y, *sums = values
                ys = [builder.load(line(y, j), align=8) for j in range(_SIDE)]
                for j in range(_SIDE):
                    _prefetch(builder, builder.add(y, number(_BYTES * AHEAD + 64 * j)))
                found = []
                for i in range(rows):
                    at = builder.inttoptr(row(x, apart, i), _WORD.as_pointer())
                    word = builder.insert_element(
                        ir.Constant(_LINE, ir.Undefined), builder.load(at, align=8), _PLACE(0)
                    )
                    words = builder.shuffle_vector(word, word, ir.Constant(ir.VectorType(_PLACE, 8), [0] * 8))
                    products = (builder.mul(words, part) for part in ys)
                    found += [builder.add(sums[_SIDE * i + j], product) for j, product in enumerate(products)]
                return builder.add(x, number(8)), builder.add(y, number(_BYTES)), *found

            _, _, *found = counted(builder, depth, (left, tile, *begun), step)
            for place, total in zip(places, found, strict=True):
                builder.store(total, place, align=8)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return run


_eight, _four, _two, _one = (_block(rows) for rows in (8, 4, 2, 1))


@compiled
def products(left, tiles, out, low, high):
    """Some rows of the matrix times a tile, for the pairs low .. high of both; `out` as of `tiles.times_tiles`."""
    rows, depth = left.shape
    groups, turns, spread = -(-rows // ROWS), out.shape[2] // TILE, 8 * out.shape[2]
    for at in range(low, high):
        tile, row = at // groups, at % groups * ROWS
        end, start = min(row + ROWS, rows), tile % turns * TILE
        place = out[tile // turns]
        place[row:end, start : start + TILE] = 0
        for k in range(0, depth, DEEP):
            deep, i = min(DEEP, depth - k), row
            while i < end:
                x = left.ctypes.data + 8 * (i * depth + k)
                y = tiles.ctypes.data + _BYTES * (tile * depth + k)
                z = place.ctypes.data + spread * i + 8 * start
                count = 8 if end - i >= 8 else 4 if end - i >= 4 else 2 if end - i >= 2 else 1
                for c in range(0, _BYTES, 64 * _SIDE):
                    if count == 8:
                        _eight(x, 8 * depth, y + c, z + c, spread, deep)
                    elif count == 4:
                        _four(x, 8 * depth, y + c, z + c, spread, deep)
                    elif count == 2:
                        _two(x, 8 * depth, y + c, z + c, spread, deep)
                    else:
                        _one(x, 8 * depth, y + c, z + c, spread, deep)
                i += count
