"""A matrix times a tile mod 2^64 for processors that multiply vectors of eight 64-bit words (AVX-512).

A block of the result, six rows of four vectors, stays in registers while the depth passes by: for each of its steps
four vectors of the tile are read and six words of the matrix, for 24 products. torch's own kernel writes each row again
for each step. The depth is cut so that a tile's part stays in the first-level cache for all rows. What comes next is
asked for meanwhile: it stands too far apart for the processor to see that it follows.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .loops import compiled, counted, intrinsic

DEEP = 64
"""Steps of the depth at a time: 32 KiB of a tile."""
AHEAD = 8
"""Steps of the depth whose parts of a tile are asked for before they are needed."""
_WORD, _PLACE = ir.IntType(64), ir.IntType(32)
_LINE = ir.VectorType(_WORD, 8)
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
                return builder.inttoptr(builder.add(address, number(64 * i)), _LINE.as_pointer())

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
                        ir.Constant(_LINE, ir.Undefined), builder.load(at, align=8), _PLACE(0)
                    )
                    words = builder.shuffle_vector(word, word, ir.Constant(ir.VectorType(_PLACE, 8), [0] * 8))
                    products = (builder.mul(words, part) for part in ys)
                    found += [builder.add(sums[side * i + j], product) for j, product in enumerate(products)]
                return builder.add(x, number(8)), builder.add(y, number(_BYTES)), *found

            _, _, *found = counted(builder, depth, (left, tile, *begun), step)
            for place, total in zip(places, found, strict=True):
                builder.store(total, place, align=8)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return run


_six, _four, _two, _one = (_block(rows) for rows in (6, 4, 2, 1))
_narrow, _narrow_one = _block(6, 1), _block(1, 1)


@compiled
def multiply(left, tile, columns, out):
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
