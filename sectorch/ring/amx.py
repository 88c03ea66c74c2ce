"""Products mod 2^64 on a processor's matrix unit (Intel AMX: bytes, with 32-bit sums), exact for every fan-in.

With bytes x = sum_i x_i 2^(8 i) and y = sum_j y_j 2^(8 j),

    x y = sum_{s < 8} 2^(8 s) sum_{i + j = s} x_i y_j   mod 2^64,

36 products of planes of bytes. The unit multiplies tiles of 16 rows of 64 bytes and adds four neighbouring products of
bytes at a time. A tile of a plane of x has 64 summands of 16 rows; one of y has four summands of 16 columns in each of
its 16 rows. The sum over i + j = s and K summands is at most 8 K 255^2, which for K <= 1024 is below 2^31; longer sums
are cut there and added in int64, where wrapping is meant. Source: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 2, TDPBUUD.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import torch
from llvmlite import ir
from numba import types

from .jit import compiled, intrinsic, run_in_threads

SIDE = 16
"""Rows of a tile, and words in a row."""
WORDS = SIDE * SIDE
DEEP = 4 * SIDE
"""Summands of a tile."""
PLANES = 8
COLUMNS = 128
"""Columns of the result at a time: what their part of y takes stays in the second-level cache."""
ROWS = 512
"""Rows of the result at a time: what their part of x takes stays there too, unless the fan-in is large."""
DEPTH = 1024
"""Fan-in at a time, at most."""


def pack_tiles(x: torch.Tensor) -> torch.Tensor:
    """[n, K] -> tiles of words int32 [n / 16, 8, K / 64, 16, 16], for `product`."""
    n, deep = x.shape
    out = torch.empty(-(-n // SIDE), PLANES, -(-deep // DEEP), SIDE, SIDE, dtype=torch.int32)
    _pack_left(x.contiguous().view(-1).numpy(), np.arange(n) * deep, np.arange(deep), _words(out).view(np.uint64))
    return out


def _words(tiles: torch.Tensor) -> np.ndarray:
    return tiles.numpy().view(np.uint32)


def product(
    x: torch.Tensor, x_rows: np.ndarray, x_depth: np.ndarray, y: torch.Tensor, y_rows: np.ndarray, y_depth: np.ndarray,
    out: torch.Tensor, out_rows: np.ndarray, out_columns: np.ndarray, tiles: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out[out_rows[i] + out_columns[j]] = sum_k x[x_rows[i] + x_depth[k]] y[y_rows[j] + y_depth[k]] mod 2^64.

    Args:
        x, y, out: int64, contiguous, whose elements are numbered. x is better the one with more rows.
        tiles: x as `packed` made it.
    """
    kept = _NOTHING if tiles is None else _words(tiles)
    size = -(-len(x_rows) // (2 * SIDE * torch.get_num_threads())) * 2 * SIDE
    size = max(2 * SIDE, min(ROWS, size))
    blocks = max(1, -(-len(x_depth) // DEPTH))
    depth = max(DEEP, -(-len(x_depth) // (blocks * DEEP)) * DEEP)
    tall, wide = -(-min(size, len(x_rows)) // SIDE), -(-len(y_rows) // SIDE)
    room = (
        0 if len(kept) else tall * 2 * SIDE * depth,
        COLUMNS * 2 * depth,
        PLANES * 4 * WORDS,
        2 * tall * wide * WORDS,
    )
    xs, ys, outs = (v.view(-1).numpy() for v in (x, y, out))

    def run(low: int, high: int) -> None:
        part = _scratch(room)
        _times(
            xs, x_rows, x_depth, ys, y_rows, y_depth, outs, out_rows, out_columns, kept, *part, size, depth, low, high
        )

    run_in_threads(-(-len(x_rows) // size), run)
    return out


_NOTHING = np.empty((0, PLANES, 0, SIDE, SIDE), np.uint32)
_kept = threading.local()


def _scratch(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of this thread of so many 32-bit words, each at a line of the cache: a tile is loaded six times as fast
    from there. Fresh memory would cost more in page faults than the product in time."""
    held = getattr(_kept, "words", None)
    if held is None or len(held) < sum(sizes):
        with torch.inference_mode(False):
            held = _kept.words = torch.empty(sum(sizes), dtype=torch.int32).numpy().view(np.uint32)
    ends = list(itertools.accumulate(sizes))
    return [held[end - size : end] for size, end in zip(sizes, ends, strict=True)]


_BYTE, _WORD64 = ir.IntType(8), ir.IntType(64)


def _declared(builder, name: str, *kinds):
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)


def _numbers(*tiles: int):
    return [ir.Constant(_BYTE, tile) for tile in tiles]


def _tile(name: str, *tiles: int):
    """An instruction on tiles only."""

    @intrinsic
    def run(context):
        def generate(context, builder, signature, values):
            builder.call(_declared(builder, f"llvm.x86.{name}", *[_BYTE] * len(tiles)), _numbers(*tiles))
            return context.get_dummy_value()

        return types.void(), generate

    return run


def _memory(name: str, *tiles: int):
    """An instruction on a tile of 16 rows that follow each other in memory, 64 bytes each; or on the configuration."""

    @intrinsic
    def run(context, address):
        def generate(context, builder, signature, values):
            place = builder.inttoptr(values[0], _BYTE.as_pointer())
            kinds = [*[_BYTE] * len(tiles), _BYTE.as_pointer(), *[_WORD64] * len(tiles)]
            stride = [ir.Constant(_WORD64, 64)] * len(tiles)
            builder.call(_declared(builder, f"llvm.x86.{name}", *kinds), [*_numbers(*tiles), place, *stride])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return run


_configure, _release = _memory("ldtilecfg"), _tile("tilerelease")
_zero0, _zero1, _zero2, _zero3 = (_tile("tilezero", t) for t in range(4))
_load4, _load5, _load6, _load7 = (_memory("tileloadd64", t) for t in range(4, 8))
_store0, _store1, _store2, _store3 = (_memory("tilestored64", t) for t in range(4))
_dot0, _dot1, _dot2, _dot3 = (_tile("tdpbuud", t, 4 + t // 2, 6 + t % 2) for t in range(4))


@compiled
def _line(x, start, depth, out):
    """x[start + depth[k]] for up to 64 summands, and zeros beyond them."""
    count = len(depth)
    if count == DEEP and depth[DEEP - 1] - depth[0] == DEEP - 1:
        whole = x[start + depth[0] : start + depth[0] + DEEP]
        for c in range(DEEP):
            out[c] = np.uint64(whole[c])
        return
    for c in range(count):
        out[c] = np.uint64(x[np.uint64(start + depth[c])])
    for c in range(count, DEEP):
        out[c] = np.uint64(0)


_EIGHT = ir.VectorType(_WORD64, 8)


@intrinsic
def _spread(context, line, out, stride):
    """64 summands -> their eight planes: byte j of word g is that of summand 8 j + g, for x and for y. Addresses: of
    the summands, of the first plane's 64 bytes, and how far the planes are apart."""

    def generate(context, builder, signature, values):
        def number(n: int):
            return ir.Constant(_EIGHT, [n] * 8)

        def at(address):
            return builder.inttoptr(address, _EIGHT.as_pointer())

        start = at(values[0])
        rows = [builder.load(builder.gep(start, [ir.Constant(_WORD64, j)]), align=8) for j in range(8)]
        for width, mask in ((4, 0x00000000FFFFFFFF), (2, 0x0000FFFF0000FFFF), (1, 0x00FF00FF00FF00FF)):
            shift = number(8 * width)
            for j in (j for j in range(8) if not j & width):
                x, y = rows[j], rows[j + width]
                swap = builder.and_(builder.xor(builder.lshr(x, shift), y), number(mask))
                rows[j], rows[j + width] = builder.xor(x, builder.shl(swap, shift)), builder.xor(y, swap)
        for p, row in enumerate(rows):
            far = builder.mul(values[2], ir.Constant(_WORD64, p))
            builder.store(row, at(builder.add(values[1], far)), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@compiled
def _pack_left(x, rows, depth, out):
    """x[rows[i] + depth[k]] -> tiles [rows / 16, 8, K / 64, 16, 8], of eight bytes each."""
    line, at, tiles = np.empty(DEEP, np.uint64), out.ctypes.data, out.shape[2]
    for i in range(-(-len(rows) // SIDE)):
        for k in range(-(-len(depth) // DEEP)):
            for r in range(SIDE):
                if i * SIDE + r < len(rows):
                    _line(x, rows[i * SIDE + r], depth[k * DEEP : (k + 1) * DEEP], line)
                else:
                    line[:] = 0
                _spread(line.ctypes.data, at + ((i * PLANES * tiles + k) * SIDE + r) * DEEP, tiles * SIDE * DEEP)


@compiled
def _pack_right(y, columns, depth, out):
    """y[columns[p] + depth[k]] -> tiles of words [columns / 16, 8, K / 64, 16, 16], of four bytes each."""
    line, tile = np.empty(DEEP, np.uint64), np.empty((PLANES, SIDE, DEEP), np.uint8)
    words = tile.view(np.uint32)
    for j in range(-(-len(columns) // SIDE)):
        for k in range(-(-len(depth) // DEEP)):
            for n in range(SIDE):
                if j * SIDE + n < len(columns):
                    _line(y, columns[j * SIDE + n], depth[k * DEEP : (k + 1) * DEEP], line)
                else:
                    line[:] = 0
                _spread(line.ctypes.data, tile.ctypes.data + n * DEEP, SIDE * DEEP)
            for p in range(PLANES):
                turned = out[j, p, k]
                for q in range(SIDE):
                    for n in range(SIDE):
                        turned[q, n] = words[p, n, q]


@compiled
def _steps(a, b, other_a, other_b, steps):
    """Add the products of tiles, over so many tiles of K; two beside each other at a time, or one."""
    for _ in range(steps):
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


@intrinsic
def _put(context, sums, part):
    """Add eight sums of products of bytes, the s-th times 2^(8 s), to eight of the result. Addresses; the parts of one
    s are four tiles behind those of the one before."""

    def generate(context, builder, signature, values):
        kind, wide = ir.VectorType(ir.IntType(32), 8), 4 * 4 * WORDS
        place = builder.inttoptr(values[0], _EIGHT.as_pointer())
        total = builder.load(place, align=8)
        for s in range(PLANES):
            at = builder.inttoptr(builder.add(values[1], ir.Constant(_WORD64, s * wide)), kind.as_pointer())
            more = builder.zext(builder.load(at, align=4), _EIGHT)
            total = builder.add(total, builder.shl(more, ir.Constant(_EIGHT, [8 * s] * 8)))
        builder.store(total, place, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@compiled
def _times(
    x, x_rows, x_depth, y, y_rows, y_depth, out, out_rows, out_columns, kept, left, right, part, sums, size, depth,
    low, high,
):  # fmt: skip
    """`product` for the rows of x in blocks low .. high of `size`, with a fan-in of `depth` at a time."""
    deep, wide = len(x_depth), len(y_rows)
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    for t in range(8):
        configuration[16 + 2 * t] = 64
        configuration[48 + t] = SIDE
    given, tiles, tile = len(kept) > 0, depth // DEEP, 4 * WORDS
    tall, across = -(-min(size, len(x_rows)) // SIDE), -(-wide // SIDE)
    own = left.view(np.uint64).reshape((0 if given else tall, PLANES, tiles, SIDE, 8))
    blocks = right.reshape((COLUMNS // SIDE, PLANES, tiles, SIDE, SIDE))
    sums = sums.view(np.int64).reshape((tall * SIDE, across * SIDE))
    left_plane, right_plane = tile * (kept.shape[2] if given else tiles), tile * tiles
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
            steps = -(-(last - first) // DEEP)
            if given:
                left_at = kept.ctypes.data + block * size // SIDE * left_row + first // DEEP * tile
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
                            for p in range(s + 1):
                                _steps(a + p * left_plane, b + (s - p) * right_plane, other_a, other_b, steps)
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
                                    _put(place, near)
                                    _put(place + 64, near + 32)
                                    place += 8 * across * SIDE
                                    near += 64
        rows = out_rows[block * size : (block + 1) * size]
        for top in range(0, len(rows), SIDE):
            for j in range(wide):
                for i in range(top, min(top + SIDE, len(rows))):
                    out[rows[i] + out_columns[j]] = sums[i, j]
    _release()
