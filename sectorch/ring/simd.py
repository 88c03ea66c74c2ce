"""Bit matrices of 64 rows, transposed: the step under all compiled loops that go from elements to bit planes.

In vectors where the processor has them: eight rows at a time bit by bit, then byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from .jit import aligned_zeros, compiled, counted_loop, inlined, intrinsic

# Products of polynomials over GF(2), by the processor's carry-less products where it has them, for compiled loops.
#
# A product of two words has two words. Eight words, a line of the cache, are taken at a time: `dot` and `masked_dot`
# are inner products of lines, which the instruction takes from memory in pairs. Where there is none, shifts do the
# same.


LINE_WORDS = 8
"""Words taken at a time: a line of the cache."""
_WORD, _BYTE, _PLACE = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_PAIR = ir.VectorType(_WORD, 2)


def _multiplied(builder, x, y, which: int):
    """The product of the low words of two pairs (0x00), of their high words (0x11), or of x's high and y's low
    (0x01)."""
    kind = ir.FunctionType(_PAIR, [_PAIR, _PAIR, _BYTE])
    f = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.pclmulqdq")
    return builder.call(f, [x, y, ir.Constant(_BYTE, which)])


@intrinsic
def _instruction(context, x, y):
    """The product of two polynomials of degree below 64, as its low and its high word, by PCLMULQDQ."""

    def generate(context, builder, signature, values):
        zero = ir.Constant(_PAIR, [0, 0])
        left, right = (builder.insert_element(zero, v, ir.Constant(_PLACE, 0)) for v in values)
        product = _multiplied(builder, left, right, 0)
        words = [builder.extract_element(product, ir.Constant(_PLACE, i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


def _line(masked: bool):
    """Eight words at an address times eight at another, added to the two words of a sum; `masked`: only the bits that
    are set in eight more."""

    @intrinsic
    def run(context, x, mask, y, total):
        def generate(context, builder, signature, values):
            places = [builder.inttoptr(v, _PAIR.as_pointer()) for v in values]

            def pair(of, i):
                found = builder.load(builder.gep(places[of], [ir.Constant(_PLACE, i)]))
                found.align = 8
                return found

            found = pair(3, 0)
            for i in range(LINE_WORDS // 2):
                left, right = pair(0, i), pair(2, i)
                left = builder.and_(left, pair(1, i)) if masked else left
                for which in (0x00, 0x11):
                    found = builder.xor(found, _multiplied(builder, left, right, which))
            builder.store(found, places[3], align=8)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return run


@intrinsic
def _weighed_line(context, x, y, totals):
    """Eight words at an address, each times one word at another, added to the two words of each of eight sums."""

    def generate(context, builder, signature, values):
        line, sums = (builder.inttoptr(v, _PAIR.as_pointer()) for v in (values[0], values[2]))
        word = builder.load(builder.inttoptr(values[1], _WORD.as_pointer()))
        weight = builder.insert_element(ir.Constant(_PAIR, [0, 0]), word, ir.Constant(_PLACE, 0))
        for i in range(LINE_WORDS // 2):
            pair = builder.load(builder.gep(line, [ir.Constant(_PLACE, i)]), align=8)
            for half in range(2):
                at = builder.gep(sums, [ir.Constant(_PLACE, 2 * i + half)])
                found = builder.xor(builder.load(at, align=8), _multiplied(builder, pair, weight, half))
                builder.store(found, at, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def xor_line(context, x, y, out):
    """The xor of eight words at an address and of eight at another."""

    def generate(context, builder, signature, values):
        line = ir.VectorType(_WORD, LINE_WORDS)
        places = [builder.inttoptr(v, line.as_pointer()) for v in values]
        left, right = (builder.load(place) for place in places[:2])
        left.align = right.align = 8
        builder.store(builder.xor(left, right), places[2], align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@compiled
def _shifted(x, y):
    """The same product by shifts, for processors without the instruction."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(64):
        bit = np.uint64(0) - ((x >> np.uint64(i)) & np.uint64(1))
        low ^= (y << np.uint64(i)) & bit
        high ^= (y >> np.uint64(63 - i) >> np.uint64(1)) & bit
    return low, high


def _has_instruction() -> bool:
    return bool(binding.get_host_cpu_features().get("pclmul", False))


if _has_instruction():
    carryless: Callable[..., Any] = _instruction
    _plain_line, _masked_line = _line(masked=False), _line(masked=True)

    @inlined
    def dot(x, i, y, j, totals, k):
        """totals[k] += the inner product of rows x[i] and y[j]."""
        at = x.ctypes.data + 64 * i
        _plain_line(at, at, y.ctypes.data + 64 * j, totals.ctypes.data + 16 * k)

    @inlined
    def masked_dot(x, i, mask, j, y, totals, k):
        """totals[k] += the inner product of x[i] & mask[j] and y."""
        at, of = x.ctypes.data + 64 * i, mask.ctypes.data + 64 * j
        _masked_line(at, of, y.ctypes.data, totals.ctypes.data + 16 * k)

    @inlined
    def weighed(x, i, start, weights, totals):
        """totals[c] += x[i, start + c] weights[i] for eight c."""
        at = x.ctypes.data + 8 * (i * x.shape[1] + start)
        _weighed_line(at, weights.ctypes.data + 8 * i, totals.ctypes.data)

else:
    carryless = _shifted

    @inlined
    def weighed(x, i, start, weights, totals):
        for c in range(LINE_WORDS):
            low, high = carryless(np.uint64(x[i, start + c]), np.uint64(weights[i]))
            totals[c, 0] ^= low
            totals[c, 1] ^= high

    @inlined
    def dot(x, i, y, j, totals, k):
        for c in range(LINE_WORDS):
            low, high = carryless(x[i, c], y[j, c])
            totals[k, 0] ^= low
            totals[k, 1] ^= high

    @inlined
    def masked_dot(x, i, mask, j, y, totals, k):
        for c in range(LINE_WORDS):
            low, high = carryless(x[i, c] & mask[j, c], y[0, c])
            totals[k, 0] ^= low
            totals[k, 1] ^= high


# What `fieldvectors.py` does with lines, on processors that multiply polynomials, and matrices of bits, in vectors
# (AVX-512 with VPCLMULQDQ, GFNI and VBMI).
#
# A line is eight words of 64 bits. Its products with another are two vectors of four: of the words at even places, and
# of those at odd ones. Sums of products stay in such vectors and are reduced once.


NEEDED = ("pclmul", "avx512f", "avx512bw", "avx512vbmi", "vpclmulqdq", "gfni")
_FIELD_WORD, _FIELD_BYTE, _FIELD_PLACE = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_LINE, _BYTES = ir.VectorType(_FIELD_WORD, LINE_WORDS), ir.VectorType(_FIELD_BYTE, 64)


def available() -> bool:
    """Whether this processor has all of it, and loops are compiled for it, not for one that `NUMBA_CPU_NAME` names."""
    features = binding.get_host_cpu_features()
    return getattr(config, "CPU_NAME", None) is None and all(features.get(name, False) for name in NEEDED)


def _function(builder, name: str, result, *arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _number(n: int):
    return ir.Constant(_FIELD_WORD, n)


def _all(n: int):
    return ir.Constant(_LINE, [n] * LINE_WORDS)


def _field_line(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=8)


def _keep(builder, line, address) -> None:
    builder.store(line, builder.inttoptr(address, _LINE.as_pointer()), align=8)


def _spread_out(builder, word):
    """A word, eight times."""
    line = builder.insert_element(ir.Constant(_LINE, ir.Undefined), word, _FIELD_PLACE(0))
    return _shuffled(builder, line, line, [0] * LINE_WORDS)


def _everywhere(builder, address):
    """The word at an address, eight times."""
    return _spread_out(builder, builder.load(builder.inttoptr(address, _FIELD_WORD.as_pointer()), align=8))


def _products(builder, x, y):
    """Of the words at even places, and of those at odd ones."""
    f = _function(builder, "llvm.x86.pclmulqdq.512", _LINE, _LINE, _LINE, _FIELD_BYTE)
    return [builder.call(f, [x, y, _FIELD_BYTE(which)]) for which in (0x00, 0x11)]


def _shuffled(builder, x, y, places: list[int]):
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_FIELD_PLACE, len(places)), places))


def _reduced(builder, even, odd):
    """The eight words of two vectors of products in the field: x^64 is x^4 + x^3 + x + 1."""
    low, high = (
        _shuffled(builder, even, odd, [part + 2 * (i // 2) + 8 * (i % 2) for i in range(LINE_WORDS)]) for part in (0, 1)
    )
    over = builder.lshr(high, _all(63))
    for shift in (61, 60):
        over = builder.xor(over, builder.lshr(high, _all(shift)))
    for part in (high, over):
        for shift in (0, 1, 3, 4):
            low = builder.xor(low, builder.shl(part, _all(shift)))
    return low


def _at_points(builder, xs, ys, take: Callable) -> None:
    """The values of two functions at all of {0, 1, infinity}^v, of those at {0, 1}^v, in the order of
    `fieldloops.spread_plan`: takes each pair."""
    if len(xs) == 1:
        take(xs[0], ys[0])
        return
    half = len(xs) // 2
    ends = [[builder.xor(*pair) for pair in zip(v[:half], v[half:], strict=True)] for v in (xs, ys)]
    for left, right in ((xs[:half], ys[:half]), (xs[half:], ys[half:]), ends):
        _at_points(builder, left, right, take)


def _taken_by(builder, totals, weights):
    """Adds a pair's products to the next line of sums: of the words of a line of weights for those bits that are set in
    both, or of the pair's own words."""
    places = (builder.add(totals, _number(64 * i)) for i in range(27))

    def take(x, y) -> None:
        at = next(places)
        found = _field_line(builder, at)
        x, y = (x, y) if weights is None else (builder.and_(x, y), weights)
        for product in _products(builder, x, y):
            found = builder.xor(found, product)
        _keep(builder, found, at)

    return take


def _rows(builder, x, apart):
    return [_field_line(builder, builder.add(x, builder.mul(apart, _number(i)))) for i in range(8)]


def _dots(masked: bool):
    """Eight lines, the values at {0, 1}^3 of a function of three variables, times eight others, at all points
    {0, 1, infinity}^3; each line of products is added to one of 27 sums. `masked`: x and y are bits, of which the words
    of one more line stand for those that are set in both."""

    @intrinsic
    def run(context, x, y, weights, totals):
        def generate(context, builder, signature, values):
            x, y, weights, totals = values
            take = _taken_by(builder, totals, _field_line(builder, weights) if masked else None)
            _at_points(builder, _rows(builder, x, _number(64)), _rows(builder, y, _number(64)), take)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return run


plain_dots, masked_dots = _dots(masked=False), _dots(masked=True)


@intrinsic
def chosen_dots(context, x, apart, bits, shift, weights, totals):
    """As `masked_dots`, of lines x that are so many bytes apart and, for each i of them, the bits shift + 8 i of eight
    words, each of which chooses a word of x or none."""

    def generate(context, builder, signature, values):
        x, apart, bits, shift, weights, totals = values
        words, first = _field_line(builder, bits), _spread_out(builder, shift)
        chosen = (builder.and_(builder.lshr(words, builder.add(first, _all(8 * i))), _all(1)) for i in range(8))
        ys = [builder.sub(_all(0), bit) for bit in chosen]
        _at_points(builder, _rows(builder, x, apart), ys, _taken_by(builder, totals, _field_line(builder, weights)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@intrinsic
def times_line(context, x, y, out):
    """A line times another, in the field."""

    def generate(context, builder, signature, values):
        x, y, out = values
        _keep(builder, _reduced(builder, *_products(builder, _field_line(builder, x), _field_line(builder, y))), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def times_powers(context, x, count, scale):
    """So many lines, each after the other, of which line t is multiplied by x^t times another line."""

    def generate(context, builder, signature, values):
        x, count, scale = values

        def step(values: list) -> tuple:
            at, by = values
            _keep(builder, _reduced(builder, *_products(builder, _field_line(builder, at), by)), at)
            over = builder.and_(builder.ashr(by, _all(63)), _all(0b11011))
            return builder.add(at, _number(64)), builder.xor(builder.shl(by, _all(1)), over)

        counted_loop(builder, count, (x, _field_line(builder, scale)), step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def weighed_sum(context, x, apart, weights, count, out):
    """sum_i weights_i x_i of `count` lines x_i that are so many bytes apart, in the field."""

    def generate(context, builder, signature, values):
        x, apart, weights, count, out = values

        def step(values: list) -> tuple:
            at, by, *sums = values
            products = _products(builder, _field_line(builder, at), _everywhere(builder, by))
            found = [builder.xor(s, product) for s, product in zip(sums, products, strict=True)]
            return builder.add(at, apart), builder.add(by, _number(8)), *found

        _, _, *sums = counted_loop(builder, count, (x, weights, _all(0), _all(0)), step)
        _keep(builder, _reduced(builder, *sums), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


def _turned(builder, rows):
    """Eight lines whose words are eight bytes: byte j of line i becomes byte i of line j, word by word."""
    rows = [builder.bitcast(row, _BYTES) for row in rows]
    for distance in (4, 2, 1):
        found = list(rows)
        for i in (i for i in range(8) if not i & distance):
            x, y = rows[i], rows[i + distance]
            kept = [b if not b & distance else 64 + b - distance for b in range(64)]
            moved = [b + distance if not b & distance else 64 + b for b in range(64)]
            found[i], found[i + distance] = _shuffled(builder, x, y, kept), _shuffled(builder, x, y, moved)
        rows = found
    return rows


def _mapped(builder, x, matrices):
    """Each byte of a line's words times a matrix of 8 x 8 bits, of which there is one for each word."""
    f = _function(builder, "llvm.x86.vgf2p8affineqb.512", _BYTES, _BYTES, _BYTES, _FIELD_BYTE)
    return builder.call(f, [x, matrices, _FIELD_BYTE(0)])


_UNITS = 0x8040201008040201  # as eight bytes: the unit vectors


@intrinsic
def copy_tile(context, x, out):
    """64 lines."""

    def generate(context, builder, signature, values):
        for i in range(64):
            line = _field_line(builder, builder.add(values[0], _number(64 * i)))
            _keep(builder, line, builder.add(values[1], _number(64 * i)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def bits_of_rows(context, x, apart, out, spread, threshold):
    """Eight lines, so many bytes apart and less a threshold, bit by bit: line t // 8 of `out`, which are `spread` bytes
    apart, has in byte t % 8 of a word the bits t of the same word of all eight, the last line's first."""

    def generate(context, builder, signature, values):
        x, apart, out, spread, threshold = values
        units, less = builder.bitcast(_all(_UNITS), _BYTES), _spread_out(builder, threshold)
        rows = [builder.sub(row, less) for row in _rows(builder, x, apart)]
        for i, row in enumerate(_turned(builder, rows)):
            found = builder.bitcast(_mapped(builder, units, row), _LINE)
            _keep(builder, found, builder.add(out, builder.mul(spread, _number(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@intrinsic
def turned_rows(context, x, out, apart):
    """Eight lines after each other, byte by byte: byte j of a word of line i becomes byte i of the same word of line j
    of `out`, which are so many bytes apart."""

    def generate(context, builder, signature, values):
        x, out, apart = values
        for i, line in enumerate(_turned(builder, _rows(builder, x, _number(64)))):
            _keep(builder, builder.bitcast(line, _LINE), builder.add(out, builder.mul(apart, _number(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def combined_rows(context, bits, matrices, out, apart):
    """Eight lines of sums, so many bytes apart, of eight lines of bits that are 512 bytes apart: see `matrices`."""

    def generate(context, builder, signature, values):
        bits, matrices, out, apart = values
        found = [ir.Constant(_LINE, [0] * LINE_WORDS)] * 8
        for i in range(8):
            row = builder.bitcast(_field_line(builder, builder.add(bits, _number(512 * i))), _BYTES)
            for j in range(8):
                matrix = _everywhere(builder, builder.add(matrices, _number(64 * i + 8 * j)))
                mapped = _mapped(builder, row, builder.bitcast(matrix, _BYTES))
                found[j] = builder.xor(found[j], builder.bitcast(mapped, _LINE))
        for j, line in enumerate(_turned(builder, found)):
            _keep(builder, builder.bitcast(line, _LINE), builder.add(out, builder.mul(apart, _number(j))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


SIDE = 8
"""Words transposed at a time: a line of the cache."""
_RUN = 64
"""Words of a row that are taken at a time. The rows stand far apart, and often fall into the same few sets of the
cache, where a line of each would be gone before its turn comes again."""


@compiled
def transpose_bits(a):
    """64 bit rows of some words each: row j becomes bit j of all 64. H. S. Warren, Hacker's Delight, 7-3."""
    words = a.reshape(a.size)
    j, mask = 32, np.uint64(0x00000000FFFFFFFF)
    while j:
        shift, size = np.uint64(j), a.shape[1] * j
        for k in range(0, len(words), 2 * size):
            x, y = words[k : k + size], words[k + size : k + 2 * size]
            for i in range(size):
                swap = ((x[i] >> shift) ^ y[i]) & mask
                y[i] ^= swap
                x[i] ^= swap << shift
        j >>= 1
        mask ^= mask << np.uint64(j)


@compiled
def _lines_in_vectors(v, width, word, count, room, out, threshold):
    """The bit planes of the elements, less a threshold, in `count` words from `word` on: whole lines, _RUN at most."""
    x, apart, bits, to, spread = v.ctypes.data + 8 * word, 8 * width, room.ctypes.data, out.ctypes.data, out.strides[0]
    for i in range(0, 64, 8):
        for c in range(0, count, SIDE):
            bits_of_rows(x + (i + 7) * apart + 8 * c, -apart, bits + 512 * c + 8 * i, 512, threshold)
    for i in range(0, 64, 8):
        for c in range(0, count, SIDE):
            turned_rows(bits + 512 * c + 64 * i, to + i * spread + 8 * c, spread)


@compiled
def _lines_by_shifts(v, width, word, count, room, out, threshold):
    """As `_lines_in_vectors`, on any processor, and of words that are not whole lines; zeros beyond the end."""
    a = room.reshape(room.size)[: 64 * count].reshape(64, count)
    a[:] = 0
    for t in range(64):
        row = v[t * width + word : t * width + word + count]
        for c in range(len(row)):
            a[t, c] = np.uint64(row[c]) - np.uint64(threshold)
    transpose_bits(a)
    for t in range(64):
        for c in range(count):
            out[t, c] = np.int64(a[t, c])


_whole_lines = _lines_in_vectors if available() else _lines_by_shifts


@compiled
def planes_at(v, width, word, out, threshold):
    """The bit planes of elements int64 [N], less a threshold, in as many words from `word` on as `out` [64, ..] has
    columns."""
    count = out.shape[1]
    room = aligned_zeros(8 * min(_RUN, count))
    whole = max(0, min(count, len(v) - 63 * width - word)) // SIDE * SIDE
    for start in range(0, whole, _RUN):
        _whole_lines(v, width, word + start, min(_RUN, whole - start), room, out[:, start:], threshold)
    for start in range(whole, count, _RUN):
        _lines_by_shifts(v, width, word + start, min(_RUN, count - start), room, out[:, start:], threshold)
