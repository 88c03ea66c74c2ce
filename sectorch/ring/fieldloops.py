"""Compiled loops over GF(2^64) (`field.py`), of proofs and hashes; see `mpc/star/dealing_proofs.py`.

A product of two words, as polynomials over GF(2), has two words. Sums of products are kept in that form and reduced
once. The loops exist twice, with the same results: `PORTABLE` multiplies pairs of words (by the processor's carry-less
product where it has one, else by shifts), and `IN_VECTORS` multiplies lines of eight words, on processors with
`jit.has_bit_vectors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import types

from .bitloops import bits_of_rows, load_rows, times_bit_matrix, transpose_bits, transpose_bytes
from .jit import (
    BYTE,
    LINE,
    LINE_BYTES,
    LINE_WORDS,
    WORD,
    aligned_words,
    aligned_zeros,
    broadcast,
    call,
    compiled,
    counted_loop,
    inlined,
    instruction,
    intrinsic,
    line_of,
    load,
    offset,
    shuffle,
    store,
    word,
)

_REDUCED = np.uint64(0b11011)
"""x^64 in the field: x^4 + x^3 + x + 1."""

# Carry-less products. The instruction multiplies two words out of two pairs of words in memory.


_PAIR = ir.VectorType(WORD, 2)


def _multiply_pairs(builder: Any, x: Any, y: Any, which: int) -> Any:
    """The product of the low words of two pairs (0x00), of their high words (0x11), or of x's high and y's low
    (0x01)."""
    return call(builder, "llvm.x86.pclmulqdq", _PAIR, x, y, BYTE(which))


def _pair(builder: Any, address: Any, i: int) -> Any:
    return load(builder, offset(builder, address, 16, i), _PAIR)


@intrinsic
def _carryless_by_instruction(context, x, y):
    """The product of two polynomials of degree below 64, as its low and its high word."""

    def generate(context, builder, signature, values):
        zero = ir.Constant(_PAIR, [0, 0])
        left, right = (builder.insert_element(zero, v, word(0)) for v in values)
        product = _multiply_pairs(builder, left, right, 0)
        words = [builder.extract_element(product, word(i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


def _add_dot(builder: Any, x: Any, mask: Any, y: Any, total: Any) -> None:
    """Add the inner product of eight words at x and eight at y to a sum of two words; of x only the bits that are set
    in `mask`, if it is given."""
    result = _pair(builder, total, 0)
    for i in range(LINE_WORDS // 2):
        left, right = _pair(builder, x, i), _pair(builder, y, i)
        left = left if mask is None else builder.and_(left, _pair(builder, mask, i))
        for which in (0x00, 0x11):
            result = builder.xor(result, _multiply_pairs(builder, left, right, which))
    store(builder, result, total)


_dot_lines = instruction(lambda builder, x, y, total: _add_dot(builder, x, None, y, total))
_masked_dot_lines = instruction(_add_dot)


@instruction
def _weigh_line(builder, x, y, totals):
    """Eight words at an address, each times one word at another, added to the two words of each of eight sums."""
    factor = load(builder, y, WORD)
    weight = builder.insert_element(ir.Constant(_PAIR, [0, 0]), factor, word(0))
    for i in range(LINE_WORDS // 2):
        pair = _pair(builder, x, i)
        for half in range(2):
            total = builder.xor(_pair(builder, totals, 2 * i + half), _multiply_pairs(builder, pair, weight, half))
            store(builder, total, offset(builder, totals, 16, 2 * i + half))


@instruction
def xor_line(builder, x, y, out):
    """The xor of eight words at an address and of eight at another."""
    store(builder, builder.xor(load(builder, x), load(builder, y)), out)


@compiled
def carryless_by_shifts(x, y):
    """The same product by shifts, for processors without the instruction."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(64):
        bit = np.uint64(0) - ((x >> np.uint64(i)) & np.uint64(1))
        low ^= (y << np.uint64(i)) & bit
        # In two shifts: for i = 0 one by 64 would be undefined.
        high ^= (y >> np.uint64(63 - i) >> np.uint64(1)) & bit
    return low, high


if binding.get_host_cpu_features().get("pclmul", False):
    carryless: Callable[..., Any] = _carryless_by_instruction

    @inlined
    def dot(x, i, y, j, totals, k):
        """totals[k] += the inner product of rows x[i] and y[j]."""
        _dot_lines(x.ctypes.data + 64 * i, y.ctypes.data + 64 * j, totals.ctypes.data + 16 * k)

    @inlined
    def masked_dot(x, i, mask, j, y, totals, k):
        """totals[k] += the inner product of x[i] & mask[j] and y."""
        at, of = x.ctypes.data + 64 * i, mask.ctypes.data + 64 * j
        _masked_dot_lines(at, of, y.ctypes.data, totals.ctypes.data + 16 * k)

    @inlined
    def weigh(x, i, start, weights, totals):
        """totals[c] += x[i, start + c] weights[i] for eight c."""
        at = x.ctypes.data + 8 * (i * x.shape[1] + start)
        _weigh_line(at, weights.ctypes.data + 8 * i, totals.ctypes.data)

else:
    carryless = carryless_by_shifts

    @inlined
    def weigh(x, i, start, weights, totals):
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


@compiled
def reduce_product(low, high):
    """low + x^64 high in the field."""
    # high (x^4 + x^3 + x + 1) has a degree of at most 67, so `above` has four bits, and their product fits a word.
    first, above = carryless(high, _REDUCED)
    second, _ = carryless(above, _REDUCED)
    return low ^ first ^ second


@compiled
def product(x, y):
    """x y in the field."""
    low, high = carryless(np.uint64(x), np.uint64(y))
    return reduce_product(low, high)


@compiled
def times(x, y, out):
    """x y of [n], element by element."""
    for i in range(len(x)):
        out[i] = np.int64(product(x[i], y[i]))


@compiled
def inner_products(x, y, out):
    """The inner product of each row of x [n, m] with y [m]."""
    for i in range(len(x)):
        low, high = np.uint64(0), np.uint64(0)
        for j in range(len(y)):
            a, b = carryless(np.uint64(x[i, j]), np.uint64(y[j]))
            low ^= a
            high ^= b
        out[i] = np.int64(reduce_product(low, high))


@functools.cache
def spread_plan(variables: int) -> tuple[np.ndarray, np.ndarray]:
    """How values at {0, 1}^v, one to a row, become those at {0, 1, infinity}^v.

    Returns:
        The xors [3^v - 2^v, 3]: two rows, and the further row that their xor, a value at infinity, is written to. Then
        the row of each point's value [3^v].
    """
    blocks, xors, rows = [0], [], 1 << variables
    for variable in range(variables):
        half, parts = 1 << (variables - variable - 1), []
        for first in blocks:
            xors += [(first + i, first + half + i, rows + i) for i in range(half)]
            parts += [first, first + half, rows]
            rows += half
        blocks = parts
    return np.array(xors, np.int64).reshape(-1, 3), np.array(blocks, np.int64)


@compiled
def _spread(values, xors):
    """Take the xors of a `spread_plan`, for rows of eight words."""
    at = values.ctypes.data
    for i in range(len(xors)):
        xor_line(at + 64 * xors[i, 0], at + 64 * xors[i, 1], at + 64 * xors[i, 2])


@compiled
def load_columns(x, start, out):
    """Eight columns of x, with zeros beyond its end."""
    size = min(LINE_WORDS, x.shape[1] - start)
    if size == LINE_WORDS:
        for i in range(len(x)):
            for c in range(LINE_WORDS):
                out[i, c] = np.uint64(x[i, start + c])
    else:
        out[: len(x)] = 0
        for i in range(len(x)):
            for c in range(size):
                out[i, c] = np.uint64(x[i, start + c])


@compiled
def load_padded(words, start, out):
    """Eight words of a row, with zeros beyond its end."""
    for c in range(LINE_WORDS):
        out[0, c] = np.uint64(words[start + c]) if start + c < len(words) else np.uint64(0)


@compiled
def _reduce_sums(totals, out):
    for p in range(len(out)):
        out[p] = np.int64(reduce_product(totals[p, 0], totals[p, 1]))


def bit_points(x, y, weights, out) -> None:
    """sum_w weights_w (x y)_w at all points {0, 1, infinity}^6; x, y: packed bits in tiles [T, 64, 8]; see
    `spread_plan`."""
    _bit_points(x, y, weights, *spread_plan(6), out)


@compiled
def _bit_points(x, y, weights, xors, places, out):
    xs, ys = aligned_words(len(places)), aligned_words(len(places))
    scale, totals = aligned_zeros(1), np.zeros((len(places), 2), np.uint64)
    for tile in range(len(x)):
        load_columns(x[tile], 0, xs)
        load_columns(y[tile], 0, ys)
        load_columns(weights[LINE_WORDS * tile :].reshape(1, -1), 0, scale)
        _spread(xs, xors)
        _spread(ys, xors)
        for p in range(len(places)):
            masked_dot(xs, p, ys, p, scale, totals, p)
    _reduce_sums(totals[places], out)


@compiled
def tiles_weighed(x, rows, columns, out):
    """The sum of words in tiles [T, 64, 8], by the weights of their rows and of their columns."""
    totals, last = np.empty((LINE_WORDS, 2), np.uint64), np.zeros(2, np.uint64)
    for tile in range(len(x)):
        totals[:] = 0
        for i in range(len(rows)):
            weigh(x[tile], i, 0, rows, totals)
        for c in range(LINE_WORDS):
            total = reduce_product(totals[c, 0], totals[c, 1])
            low, high = carryless(total, np.uint64(columns[LINE_WORDS * tile + c]))
            last[0] ^= low
            last[1] ^= high
    out[0] = np.int64(reduce_product(last[0], last[1]))


def chosen_points(x, y, inner, scales, out) -> None:
    """sum_c inner_t scales_c (x y)_{t,c} at all points {0, 1, infinity}^3, of words x [8, 8, C] and bits y of packed
    words [C].

    Of a word the bit 8 i + t is that of x[i, t]; the points are of i.
    """
    _chosen_points(x, y, inner, scales, *spread_plan(3), out)


@compiled
def _chosen_points(x, y, inner, scales, xors, places, out):
    count = len(places)
    xs, ys = aligned_words(count), aligned_words(count)
    totals, bits, scale = np.zeros((8 * count, 2), np.uint64), aligned_words(1), aligned_words(1)
    for start in range(0, x.shape[2], LINE_WORDS):
        load_padded(y, start, bits)
        load_padded(scales, start, scale)
        for t in range(8):
            load_columns(x[:, t], start, xs)
            for i in range(8):
                # A bit as a mask of a word, so that an AND with it chooses the word or zero.
                for c in range(LINE_WORDS):
                    ys[i, c] = np.uint64(0) - ((bits[0, c] >> np.uint64(8 * i + t)) & np.uint64(1))
            _spread(xs, xors)
            _spread(ys, xors)
            for p in range(count):
                masked_dot(xs, p, ys, p, scale, totals, count * t + p)
    for p in range(count):
        low, high = np.uint64(0), np.uint64(0)
        for t in range(8):
            total = totals[count * t + places[p]]
            a, b = carryless(reduce_product(total[0], total[1]), np.uint64(inner[t]))
            low ^= a
            high ^= b
        out[p] = np.int64(reduce_product(low, high))


def points(x, y, out) -> None:
    """sum_j (x y)_j at all points {0, 1, infinity}^v; x, y: [2^v, m]."""
    _points(x, y, *spread_plan(len(x).bit_length() - 1), out)


@compiled
def _points(x, y, xors, places, out):
    xs, ys = aligned_words(len(places)), aligned_words(len(places))
    totals = np.zeros((len(places), 2), np.uint64)
    for start in range(0, x.shape[1], LINE_WORDS):
        load_columns(x, start, xs)
        load_columns(y, start, ys)
        _spread(xs, xors)
        _spread(ys, xors)
        for p in range(len(places)):
            dot(xs, p, ys, p, totals, p)
    _reduce_sums(totals[places], out)


@compiled
def weights_at(point, infinity, out):
    """The weights of a function's values at {0, 1}^v, or {0, 1, infinity}^v, for its value at a point of the field:
    of each variable t the products of 1 + t, t and t + t^2."""
    out[0], count = 1, 1
    for v in range(len(point)):
        t = np.uint64(point[v])
        squared = product(t, t)
        for i in range(count - 1, -1, -1):  # from the end, since each weight is replaced by two or three
            weight = np.uint64(out[i])
            one = product(weight, t)
            if infinity:
                out[3 * i + 2] = np.int64(one ^ product(weight, squared))
                out[3 * i + 1], out[3 * i] = np.int64(one), np.int64(weight ^ one)
            else:
                out[2 * i + 1], out[2 * i] = np.int64(one), np.int64(weight ^ one)
        count *= 3 if infinity else 2


@compiled
def combine_rows(x, weights, out):
    """sum_i weights_i x_i of rows x [n, m]."""
    totals, whole = np.empty((LINE_WORDS, 2), np.uint64), x.shape[1] // LINE_WORDS * LINE_WORDS
    for start in range(0, whole, LINE_WORDS):
        totals[:] = 0
        for i in range(len(x)):
            weigh(x, i, start, weights, totals)
        _reduce_sums(totals, out[start : start + LINE_WORDS])
    for j in range(whole, x.shape[1]):
        low, high = np.uint64(0), np.uint64(0)
        for i in range(len(x)):
            a, b = carryless(np.uint64(x[i, j]), np.uint64(weights[i]))
            low ^= a
            high ^= b
        out[j] = np.int64(reduce_product(low, high))


@compiled
def _tables(weights):
    """The sum of the weights of the set bits, for each value of each byte of a word.

    A word's sum is then eight look-ups in place of 64 conditional additions.
    """
    tables = np.zeros((8, 256), np.uint64)
    for i in range(len(weights)):
        table, below = tables[i // 8], 1 << (i % 8)
        for v in range(below):
            table[below + v] = table[v] ^ np.uint64(weights[i])
    return tables


@compiled
def _look_up(tables, bits):
    total = np.uint64(0)
    for k in range(8):
        total ^= tables[k, (bits >> np.uint64(8 * k)) & np.uint64(255)]
    return total


@compiled
def _tile(x, tables, a, out):
    """sum_i weights_i x_i of a tile [64, 8] of packed bits, by the weights' tables; row t has the sums of bits t."""
    load_columns(x, 0, a)
    transpose_bits(a)
    for t in range(64):
        for c in range(LINE_WORDS):
            out[t, c] = _look_up(tables, a[t, c])


def folded_points(x, y, weights, scales, out) -> None:
    """As `points`, v = 4, of packed bits x and y in tiles [T, 64, 8], which are combined by weights: sum_i weights_i
    x_i of the bit t of a word belongs to row t mod 16. That of x is multiplied by x^t times the word's scale."""
    _folded_points(x, y, weights, scales, *spread_plan(4), out)


@compiled
def _folded_points(x, y, weights, scales, xors, places, out):
    tables, count = _tables(weights), len(places)
    a, left, right = aligned_words(64), aligned_words(64), aligned_words(64)
    xs, ys = aligned_words(count), aligned_words(count)
    totals = np.zeros((count, 2), np.uint64)
    for tile in range(len(x)):
        _tile(x[tile], tables, a, left)
        _tile(y[tile], tables, a, right)
        for c in range(LINE_WORDS):
            scale = np.uint64(scales[LINE_WORDS * tile + c])
            for t in range(64):  # bit t has the weight x^t: the scale is multiplied by x from bit to bit
                left[t, c] = product(left[t, c], scale)
                scale = (scale << np.uint64(1)) ^ ((np.uint64(0) - (scale >> np.uint64(63))) & _REDUCED)
        for s in range(0, 64, 16):
            xs[:16], ys[:16] = left[s : s + 16], right[s : s + 16]
            _spread(xs, xors)
            _spread(ys, xors)
            for p in range(count):
                dot(xs, p, ys, p, totals, p)
    _reduce_sums(totals[places], out)


@compiled
def twice_folded(x, weights, second, scales, out):
    """The rows of `folded_points` combined by more weights: sum_p second_p x_{16 s + p} of word w at s W + w, W = 8 T.

    Args:
        scales: for each word, or none.
    """
    width, tables = LINE_WORDS * len(x), _tables(weights)
    a, found, by = aligned_words(64), aligned_words(64), np.empty(64, np.uint64)
    for t in range(64):
        # The second weights, times x^t of bit t where words have scales.
        by[t] = product(second[t % 16], np.uint64(1) << np.uint64(t if len(scales) else 0))
    for tile in range(len(x)):
        _tile(x[tile], tables, a, found)
        for c in range(LINE_WORDS):
            w = LINE_WORDS * tile + c
            for s in range(4):
                low, high = np.uint64(0), np.uint64(0)
                for t in range(16 * s, 16 * s + 16):
                    first, last = carryless(found[t, c], by[t])
                    low ^= first
                    high ^= last
                total = reduce_product(low, high)
                if len(scales):
                    total = product(total, scales[w])
                out[s * width + w] = np.int64(total)


@compiled
def combined_words(words, weights, out):
    """sum_i weights_i of the bits 8 i + t that are set, of each word: [C] -> [8, C]."""
    for w in range(len(words)):
        bits = np.uint64(words[w])
        for t in range(8):
            found = np.uint64(0)
            for i in range(8):
                found ^= np.uint64(weights[i]) & (np.uint64(0) - ((bits >> np.uint64(8 * i + t)) & np.uint64(1)))
            out[t, w] = np.int64(found)


# The same loops on lines of eight words. A line's products with another are two vectors of four: of the words at even
# places, and of those at odd places. Sums of products stay in such vectors and are reduced once.


def _multiply_lines(builder: Any, x: Any, y: Any) -> list:
    """The products of the words at even places, and of those at odd places."""
    return [call(builder, "llvm.x86.pclmulqdq.512", LINE, x, y, BYTE(which)) for which in (0x00, 0x11)]


def _reduce_line(builder: Any, even: Any, odd: Any) -> Any:
    """The eight words of two vectors of products, in the field: x^64 is x^4 + x^3 + x + 1."""
    low, high = (
        shuffle(builder, even, odd, [part + 2 * (i // 2) + 8 * (i % 2) for i in range(LINE_WORDS)]) for part in (0, 1)
    )
    over = builder.lshr(high, line_of(63))  # what shifts by 4, 3 and 1 push beyond the word, to be reduced again
    for shift in (61, 60):
        over = builder.xor(over, builder.lshr(high, line_of(shift)))
    for part in (high, over):
        for shift in (0, 1, 3, 4):
            low = builder.xor(low, builder.shl(part, line_of(shift)))
    return low


def _at_points(builder: Any, xs: list, ys: list, take: Callable) -> None:
    """Calls `take` with the values of two functions at each of {0, 1, infinity}^v, in the order of `spread_plan`.

    Args:
        xs, ys: their values at {0, 1}^v. At infinity a function has the xor of its values at 0 and 1.
    """
    if len(xs) == 1:
        take(xs[0], ys[0])
        return
    half = len(xs) // 2
    ends = [[builder.xor(*pair) for pair in zip(v[:half], v[half:], strict=True)] for v in (xs, ys)]
    for left, right in ((xs[:half], ys[:half]), (xs[half:], ys[half:]), ends):
        _at_points(builder, left, right, take)


def _add_products(builder: Any, totals: Any, weights: Any) -> Callable:
    """A function that adds a pair's products to the next line of sums.

    With weights, x and y are bits, and the weights of those that are set in both are added.
    """
    addresses = (offset(builder, totals, 64, i) for i in range(_CUBE))

    def take(x: Any, y: Any) -> None:
        at = next(addresses)
        total = load(builder, at)
        x, y = (x, y) if weights is None else (builder.and_(x, y), weights)
        for product in _multiply_lines(builder, x, y):
            total = builder.xor(total, product)
        store(builder, total, at)

    return take


@instruction
def plain_dots(builder, x, y, totals):
    """Eight lines, the values at {0, 1}^3 of a function of three variables, times eight others, at all points
    {0, 1, infinity}^3; each line of products is added to one of 27 sums."""
    _at_points(builder, load_rows(builder, x, 64), load_rows(builder, y, 64), _add_products(builder, totals, None))


@instruction
def masked_dots(builder, x, y, weights, totals):
    """As `plain_dots`, of lines of bits: each bit that is set in both stands for a word of one more line."""
    take = _add_products(builder, totals, load(builder, weights))
    _at_points(builder, load_rows(builder, x, 64), load_rows(builder, y, 64), take)


@instruction
def chosen_dots(builder, x, apart, bits, shift, weights, totals):
    """As `masked_dots`, of lines x that are `apart` bytes apart and, for each i of them, the bits shift + 8 i of eight
    words, each of which chooses a word of x or none."""
    words, first = load(builder, bits), broadcast(builder, shift)
    chosen = (builder.and_(builder.lshr(words, builder.add(first, line_of(8 * i))), line_of(1)) for i in range(8))
    ys = [builder.sub(line_of(0), bit) for bit in chosen]
    _at_points(builder, load_rows(builder, x, apart), ys, _add_products(builder, totals, load(builder, weights)))


@instruction
def times_line(builder, x, y, out):
    """A line times another, in the field."""
    store(builder, _reduce_line(builder, *_multiply_lines(builder, load(builder, x), load(builder, y))), out)


@instruction
def times_powers(builder, x, count, scale):
    """`count` lines after each other, of which line t is multiplied by x^t times another line."""

    def body(values: list) -> tuple:
        at, by = values
        store(builder, _reduce_line(builder, *_multiply_lines(builder, load(builder, at), by)), at)
        over = builder.and_(builder.ashr(by, line_of(63)), line_of(0b11011))
        return builder.add(at, word(64)), builder.xor(builder.shl(by, line_of(1)), over)

    counted_loop(builder, count, (x, load(builder, scale)), body)


@instruction
def weighed_sum(builder, x, apart, weights, count, out):
    """sum_i weights_i x_i of `count` lines x_i that are `apart` bytes apart, in the field."""

    def body(values: list) -> tuple:
        at, by, *sums = values
        products = _multiply_lines(builder, load(builder, at), broadcast(builder, load(builder, by, WORD)))
        results = [builder.xor(s, product) for s, product in zip(sums, products, strict=True)]
        return builder.add(at, apart), builder.add(by, word(8)), *results

    _, _, *sums = counted_loop(builder, count, (x, weights, line_of(0), line_of(0)), body)
    store(builder, _reduce_line(builder, *sums), out)


@instruction
def copy_tile(builder, x, out):
    """64 lines."""
    for i in range(64):
        store(builder, load(builder, offset(builder, x, 64, i)), offset(builder, out, 64, i))


@instruction
def combine_bit_rows(builder, bits, matrices, out, apart):
    """Eight lines of sums, `apart` bytes apart, of eight lines of bits, 512 bytes apart; see `_bit_matrices`."""
    sums = [line_of(0)] * 8
    for i in range(8):
        row = builder.bitcast(load(builder, offset(builder, bits, 512, i)), LINE_BYTES)
        for j in range(8):
            matrix = broadcast(builder, load(builder, offset(builder, matrices, 8, 8 * i + j), WORD))
            product = times_bit_matrix(builder, row, builder.bitcast(matrix, LINE_BYTES))
            sums[j] = builder.xor(sums[j], builder.bitcast(product, LINE))
    for j, row in enumerate(transpose_bytes(builder, sums)):
        store(builder, builder.bitcast(row, LINE), offset(builder, out, apart, j))


_CUBE = 27
"""Points of three variables, whose values are eight lines."""


@compiled
def _spread_cubes(values, xors):
    """As `_spread`, for rows of eight lines: the last three variables are spread later, by `_at_points`."""
    at = values.ctypes.data
    for i in range(len(xors)):
        x, y, out = at + 512 * xors[i, 0], at + 512 * xors[i, 1], at + 512 * xors[i, 2]
        for j in range(0, 512, 64):
            xor_line(x + j, y + j, out + j)


@compiled
def _reduce_cubes(totals, places, out):
    for q in range(len(places)):
        for p in range(_CUBE):
            # A line of sums has four sums of two words each, low and high in turn.
            low, high = np.uint64(0), np.uint64(0)
            for i in range(0, LINE_WORDS, 2):
                low ^= totals[_CUBE * places[q] + p, i]
                high ^= totals[_CUBE * places[q] + p, i + 1]
            out[_CUBE * q + p] = np.int64(reduce_product(low, high))


@compiled
def _bit_points_in_vectors(x, y, weights, xors, places, out):
    count = len(places)
    xs, ys, totals = aligned_zeros(8 * count), aligned_zeros(8 * count), aligned_zeros(_CUBE * count)
    at_x, at_y, to, scale = xs.ctypes.data, ys.ctypes.data, totals.ctypes.data, weights.ctypes.data
    for tile in range(len(x)):
        copy_tile(x.ctypes.data + 4096 * tile, at_x)
        copy_tile(y.ctypes.data + 4096 * tile, at_y)
        _spread_cubes(xs, xors)
        _spread_cubes(ys, xors)
        for q in range(count):
            masked_dots(at_x + 512 * q, at_y + 512 * q, scale + 64 * tile, to + 64 * _CUBE * q)
    _reduce_cubes(totals, places, out)


@compiled
def tiles_weighed_in_vectors(x, rows, columns, out):
    line, by, found = aligned_zeros(1), aligned_zeros(1), np.uint64(0)
    for tile in range(len(x)):
        weighed_sum(x.ctypes.data + 4096 * tile, 64, rows.ctypes.data, len(rows), line.ctypes.data)
        times_line(line.ctypes.data, columns.ctypes.data + 64 * tile, line.ctypes.data)
        xor_line(by.ctypes.data, line.ctypes.data, by.ctypes.data)
    for c in range(LINE_WORDS):
        found ^= by[0, c]
    out[0] = np.int64(found)


@compiled
def _points_in_vectors(x, y, xors, places, out):
    count = len(places)
    xs, ys, totals = aligned_zeros(8 * count), aligned_zeros(8 * count), aligned_zeros(_CUBE * count)
    at_x, at_y, to = xs.ctypes.data, ys.ctypes.data, totals.ctypes.data
    for start in range(0, x.shape[1], LINE_WORDS):
        load_columns(x, start, xs)
        load_columns(y, start, ys)
        _spread_cubes(xs, xors)
        _spread_cubes(ys, xors)
        for q in range(count):
            plain_dots(at_x + 512 * q, at_y + 512 * q, to + 64 * _CUBE * q)
    _reduce_cubes(totals, places, out)


def bit_points_in_vectors(x, y, weights, out) -> None:
    _bit_points_in_vectors(x, y, weights, *spread_plan(3), out)


def points_in_vectors(x, y, out) -> None:
    variables = len(x).bit_length() - 1
    if variables < 3:
        points(x, y, out)
    else:
        _points_in_vectors(x, y, *spread_plan(variables - 3), out)


@compiled
def chosen_points_in_vectors(x, y, inner, scales, out):
    width = x.shape[2]
    rest, bits, scale, totals = aligned_zeros(8), aligned_zeros(1), aligned_zeros(1), aligned_zeros(8 * _CUBE)
    for start in range(0, width, LINE_WORDS):
        size = min(LINE_WORDS, width - start)
        load_padded(y, start, bits)
        load_padded(scales, start, scale)
        for t in range(8):
            at, apart = x.ctypes.data + 8 * (t * width + start), 64 * width
            # Whole lines are read, which may not reach into the next row: the last columns are copied beside zeros.
            if size < LINE_WORDS:
                load_columns(x[:, t], start, rest)
                at, apart = rest.ctypes.data, 64
            to = totals.ctypes.data + 64 * _CUBE * t
            chosen_dots(at, apart, bits.ctypes.data, t, scale.ctypes.data, to)
    for p in range(_CUBE):
        low, high = np.uint64(0), np.uint64(0)
        for t in range(8):
            first, second = np.uint64(0), np.uint64(0)
            for i in range(0, LINE_WORDS, 2):
                first ^= totals[_CUBE * t + p, i]
                second ^= totals[_CUBE * t + p, i + 1]
            a, b = carryless(reduce_product(first, second), np.uint64(inner[t]))
            low ^= a
            high ^= b
        out[p] = np.int64(reduce_product(low, high))


@compiled
def _bit_matrices(weights):
    """The matrix that takes byte i of 64 bits to byte j of the sum of their weights, for each i and j.

    GF2P8AFFINEQB reads row r of a matrix from byte 7 - r, and `bits_of_rows` gives the last row's bits first.
    """
    found = np.zeros((8, 8), np.uint64)
    for i in range(8):
        for k in range(8):
            weight = np.uint64(weights[8 * i + k])
            for j in range(8):
                for r in range(8):
                    bit = (weight >> np.uint64(8 * j + r)) & np.uint64(1)
                    found[i, j] |= bit << np.uint64(8 * (7 - r) + 7 - k)
    return found


@compiled
def _tile_in_vectors(x, matrices, bits, found, group):
    """As `_tile`, of a tile at an address: line t has the sums of bits t, in groups of 16 lines that are `group` times
    eight lines apart."""
    for i in range(8):
        bits_of_rows(x + 512 * i, 64, bits.ctypes.data + 512 * i, 64, 0)
    for i in range(8):
        to = found.ctypes.data + 512 * (i // 2 * group + i % 2)
        combine_bit_rows(bits.ctypes.data + 64 * i, matrices.ctypes.data, to, 64)


def folded_points_in_vectors(x, y, weights, scales, out) -> None:
    _folded_points_in_vectors(x, y, weights, scales, *spread_plan(1), out)


@compiled
def _folded_points_in_vectors(x, y, weights, scales, xors, places, out):
    count = len(places)
    xs, ys, totals = aligned_zeros(32 * count), aligned_zeros(32 * count), aligned_zeros(_CUBE * count)
    matrices, bits, scale, by = _bit_matrices(weights), aligned_zeros(64), aligned_zeros(1), aligned_zeros(1)
    by[:] = np.uint64(1 << 16)  # x^16, between one group of bits and the next
    for tile in range(len(x)):
        _tile_in_vectors(x.ctypes.data + 4096 * tile, matrices, bits, xs, count)
        _tile_in_vectors(y.ctypes.data + 4096 * tile, matrices, bits, ys, count)
        for c in range(LINE_WORDS):
            scale[0, c] = np.uint64(scales[LINE_WORDS * tile + c])
        for s in range(4):
            at_x, at_y = xs.ctypes.data + 512 * count * s, ys.ctypes.data + 512 * count * s
            times_powers(at_x, 16, scale.ctypes.data)
            times_line(scale.ctypes.data, by.ctypes.data, scale.ctypes.data)
            _spread_cubes(xs[8 * count * s :], xors)
            _spread_cubes(ys[8 * count * s :], xors)
            for q in range(count):
                plain_dots(at_x + 512 * q, at_y + 512 * q, totals.ctypes.data + 64 * _CUBE * q)
    _reduce_cubes(totals, places, out)


@compiled
def twice_folded_in_vectors(x, weights, second, scales, out):
    matrices, bits, found = _bit_matrices(weights), aligned_zeros(64), aligned_zeros(64)
    by, factors = np.empty(64, np.int64), np.empty(64, np.int64)
    # Bit t counts x^t where words have scales, as in `folded_points`.
    for t in range(64):
        by[t], factors[t] = second[t % 16], np.int64(1) << t if len(scales) else np.int64(1)
    times_in_vectors(by, factors, by)
    for tile in range(len(x)):
        _tile_in_vectors(x.ctypes.data + 4096 * tile, matrices, bits, found, 2)
        for s in range(4):
            to = out.ctypes.data + 64 * (s * len(x) + tile)
            weighed_sum(found.ctypes.data + 1024 * s, 64, by.ctypes.data + 128 * s, 16, to)
            if len(scales):
                times_line(to, scales.ctypes.data + 64 * tile, to)


@compiled
def combine_rows_in_vectors(x, weights, out):
    count, width = x.shape
    rest, found = aligned_zeros(count), aligned_zeros(1)
    if not count:
        out[:] = 0
        return
    for start in range(0, width, LINE_WORDS):
        at, apart, to = x.ctypes.data + 8 * start, 8 * width, out.ctypes.data + 8 * start
        if width - start < LINE_WORDS:
            load_columns(x, start, rest)
            at, apart, to = rest.ctypes.data, 64, found.ctypes.data
        weighed_sum(at, apart, weights.ctypes.data, count, to)
        for c in range(width - start if width - start < LINE_WORDS else 0):
            out[start + c] = np.int64(found[0, c])


@compiled
def times_in_vectors(x, y, out):
    whole = len(x) // LINE_WORDS * LINE_WORDS
    for i in range(0, whole, LINE_WORDS):
        times_line(x.ctypes.data + 8 * i, y.ctypes.data + 8 * i, out.ctypes.data + 8 * i)
    for i in range(whole, len(x)):
        out[i] = np.int64(product(x[i], y[i]))


class FieldLoops(NamedTuple):
    """The loops of a kind of processor. Each computes as its namesake in this file."""

    times: Callable[..., None]
    inner_products: Callable[..., None]
    bit_points: Callable[..., None]
    tiles_weighed: Callable[..., None]
    chosen_points: Callable[..., None]
    points: Callable[..., None]
    weights_at: Callable[..., None]
    combine_rows: Callable[..., None]
    folded_points: Callable[..., None]
    twice_folded: Callable[..., None]
    combined_words: Callable[..., None]


PORTABLE = FieldLoops(
    times, inner_products, bit_points, tiles_weighed, chosen_points, points, weights_at, combine_rows, folded_points,
    twice_folded, combined_words,
)  # fmt: skip
IN_VECTORS = PORTABLE._replace(
    times=times_in_vectors, bit_points=bit_points_in_vectors, tiles_weighed=tiles_weighed_in_vectors,
    chosen_points=chosen_points_in_vectors, points=points_in_vectors, combine_rows=combine_rows_in_vectors,
    folded_points=folded_points_in_vectors, twice_folded=twice_folded_in_vectors,
)  # fmt: skip
