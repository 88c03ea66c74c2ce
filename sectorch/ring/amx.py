"""Products mod 2^64 on a processor's matrix unit (Intel AMX: bytes, with 32-bit sums), exact for every fan-in.

With bytes x = sum_i x_i 2^(8 i) and y = sum_j y_j 2^(8 j),

    x y = sum_{s < 8} 2^(8 s) sum_{i + j = s} x_i y_j   mod 2^64.

The unit multiplies tiles of 16 rows of 64 bytes and adds four neighbouring products of bytes at a time. So x is kept as
two words of four bytes, X_0 (bytes 3 .. 0) and X_1 (bytes 7 .. 4), and y as eight words Y_t of the bytes t - 3 .. t,
with zeros for bytes below 0:

    sum_{i + j = s} x_i y_j = X_0 . Y_s + X_1 . Y_{s - 4},

the second for s >= 4 only: 12 products of words. A sum over K of them is at most 8 K 255^2, which for K <= 512 is below
2^31; longer sums are cut there and added in int64, where wrapping is meant. Source: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 2, TDPBUUD.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import torch
from llvmlite import ir
from numba import types

from .loops import compiled, intrinsic, over

SIDE = 16
"""Rows of a tile, and words in a row."""
WORDS = SIDE * SIDE
COLUMNS = 64
"""Columns of the result at a time: what their part of y takes stays in the second-level cache."""
ROWS = 512
"""Rows of the result at a time."""
DEPTH = 512
"""Fan-in at a time, at most."""


def packed(x: torch.Tensor) -> torch.Tensor:
    """[n, K] -> tiles of words int32 [n / 16, K / 16, 2, 16, 16], for `product`."""
    n, deep = x.shape
    out = torch.empty(-(-n // SIDE), -(-deep // SIDE), 2, SIDE, SIDE, dtype=torch.int32)
    _pack_left(x.contiguous().view(-1).numpy(), np.arange(n) * deep, np.arange(deep), _words(out))
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
    depth = -(-len(x_depth) // (blocks * SIDE)) * SIDE
    depth = max(SIDE, depth)
    tall, wide = -(-min(size, len(x_rows)) // SIDE), -(-len(y_rows) // SIDE)
    room = (
        0 if len(kept) else tall * 2 * SIDE * depth,
        COLUMNS * 8 * depth,
        4 * WORDS,
        8 * WORDS,
        2 * tall * wide * WORDS,
    )
    xs, ys, outs = (v.view(-1).numpy() for v in (x, y, out))

    def run(low: int, high: int) -> None:
        part = _scratch(room)
        _times(
            xs, x_rows, x_depth, ys, y_rows, y_depth, outs, out_rows, out_columns, kept, *part, size, depth, low, high
        )

    over(-(-len(x_rows) // size), run)
    return out


_NOTHING = np.empty((0, 0, 2, SIDE, SIDE), np.uint32)
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


@intrinsic
def _turned(context, word):
    """The bytes of a 64-bit word in the other order."""

    def generate(_, builder, signature, values):
        return builder.bswap(values[0])

    return types.uint64(types.uint64), generate


@compiled
def _pack_left(x, rows, depth, out):
    """x[rows[i] + depth[k]] -> tiles [rows / 16, K / 16, 2, 16, 16] of X_0 and X_1."""
    tall, deep = len(rows), len(depth)
    for i in range(-(-tall // SIDE)):
        for k in range(-(-deep // SIDE)):
            low, high, at = out[i, k, 0], out[i, k, 1], depth[k * SIDE : (k + 1) * SIDE]
            if len(at) < SIDE or (i + 1) * SIDE > tall:
                low[:], high[:] = 0, 0
            together = len(at) == SIDE and at[SIDE - 1] - at[0] == SIDE - 1
            for r in range(min(SIDE, tall - i * SIDE)):
                row = rows[i * SIDE + r]
                if together:
                    line = x[row + at[0] : row + at[0] + SIDE]
                    for c in range(SIDE):
                        word = _turned(np.uint64(line[c]))
                        low[r, c], high[r, c] = np.uint32(word >> np.uint64(32)), np.uint32(word)
                else:
                    for c in range(len(at)):
                        word = _turned(np.uint64(x[row + at[c]]))
                        low[r, c], high[r, c] = np.uint32(word >> np.uint64(32)), np.uint32(word)


@compiled
def _pack_right(y, columns, depth, out):
    """y[columns[p] + depth[k]] -> tiles [columns / 16, K / 16, 8, 16, 16] of Y_0 to Y_7."""
    wide, deep = len(columns), len(depth)
    line = np.zeros(SIDE, np.uint64)
    for j in range(-(-wide // SIDE)):
        places = columns[j * SIDE : (j + 1) * SIDE]
        line[:] = 0
        for k in range(-(-deep // SIDE)):
            tile = out[j, k]
            for r in range(SIDE):
                at = k * SIDE + r
                if at < deep:
                    for c in range(len(places)):
                        line[c] = np.uint64(y[places[c] + depth[at]])
                else:
                    line[:] = 0
                for t in range(3):
                    for c in range(SIDE):
                        tile[t, r, c] = np.uint32(line[c] << np.uint64(24 - 8 * t))
                for t in range(3, 8):
                    for c in range(SIDE):
                        tile[t, r, c] = np.uint32(line[c] >> np.uint64(8 * t - 24))


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
        a += 8 * WORDS
        b += 32 * WORDS


@compiled
def _add(sums, part, s):
    """Four tiles of sums of products of words, times 2^(8 s)."""
    if s == 0:
        for i in range(4 * WORDS):
            sums[i] = np.int64(part[i])
    else:
        shift = np.int64(8 * s)
        for i in range(4 * WORDS):
            sums[i] += np.int64(part[i]) << shift


@compiled
def _put(sums, near, row, column, start):
    """Add a tile at its place."""
    for r in range(SIDE):
        line, tile = sums[row + r, column : column + SIDE], near[start + r * SIDE : start + (r + 1) * SIDE]
        for c in range(SIDE):
            line[c] += tile[c]


@compiled
def _times(
    x, x_rows, x_depth, y, y_rows, y_depth, out, out_rows, out_columns, kept, left, right, part, near, sums, size,
    depth, low, high,
):  # fmt: skip
    """`product` for the rows of x in blocks low .. high of `size`, with a fan-in of `depth` at a time."""
    deep, wide = len(x_depth), len(y_rows)
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    for t in range(8):
        configuration[16 + 2 * t] = 64
        configuration[48 + t] = SIDE
    given, tiles = len(kept) > 0, depth // SIDE
    tall, across = -(-min(size, len(x_rows)) // SIDE), -(-wide // SIDE)
    own = left.reshape((0 if given else tall, tiles, 2, SIDE, SIDE))
    blocks = right.reshape((COLUMNS // SIDE, tiles, 8, SIDE, SIDE))
    near, sums = near.view(np.int64), sums.view(np.int64).reshape((tall * SIDE, across * SIDE))
    left_row, right_row = 8 * WORDS * (kept.shape[1] if given else tiles), tiles * 32 * WORDS
    right_at, part_at = right.ctypes.data, part.ctypes.data
    _configure(configuration.ctypes.data)
    for block in range(low, high):
        mine = x_rows[block * size : (block + 1) * size]
        tall = -(-len(mine) // SIDE)
        sums[:] = 0
        for first in range(0, deep, depth):
            last = min(deep, first + depth)
            steps = -(-(last - first) // SIDE)
            if given:
                left_at = kept.ctypes.data + block * size // SIDE * left_row + first // SIDE * 8 * WORDS
            else:
                left_at = left.ctypes.data
                _pack_left(x, mine, x_depth[first:last], own)
            for at in range(0, wide, COLUMNS):
                beside = y_rows[at : at + COLUMNS]
                count = -(-len(beside) // SIDE)
                _pack_right(y, beside, y_depth[first:last], blocks)
                for i in range(0, tall, 2):
                    other_a = left_row if i + 1 < tall else 0
                    for j in range(0, count, 2):
                        other_b = right_row if j + 1 < count else 0
                        for s in range(8):
                            _zero0()
                            _zero1()
                            _zero2()
                            _zero3()
                            a, b = left_at + i * left_row, right_at + j * right_row + s * 4 * WORDS
                            _steps(a, b, other_a, other_b, steps)
                            if s >= 4:
                                _steps(a + 4 * WORDS, b - 16 * WORDS, other_a, other_b, steps)
                            _store0(part_at)
                            _store1(part_at + 4 * WORDS)
                            _store2(part_at + 8 * WORDS)
                            _store3(part_at + 12 * WORDS)
                            _add(near, part, s)
                        for u in range(2 if other_a else 1):
                            for v in range(2 if other_b else 1):
                                _put(sums, near, (i + u) * SIDE, at + (j + v) * SIDE, (2 * u + v) * WORDS)
        rows = out_rows[block * size : (block + 1) * size]
        for top in range(0, len(rows), SIDE):
            for j in range(wide):
                for i in range(top, min(top + SIDE, len(rows))):
                    out[rows[i] + out_columns[j]] = sums[i, j]
    _release()
