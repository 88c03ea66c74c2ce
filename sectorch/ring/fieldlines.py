"""What `fieldvectors.py` does with lines, on processors that multiply polynomials, and matrices of bits, in vectors
(AVX-512 with VPCLMULQDQ, GFNI and VBMI).

A line is eight words of 64 bits. Its products with another are two vectors of four: of the words at even places, and of
those at odd ones. Sums of products stay in such vectors and are reduced once.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from .carryless import SIDE
from .loops import counted, intrinsic

NEEDED = ("pclmul", "avx512f", "avx512bw", "avx512vbmi", "vpclmulqdq", "gfni")
_WORD, _BYTE, _PLACE = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_LINE, _BYTES = ir.VectorType(_WORD, SIDE), ir.VectorType(_BYTE, 64)


def available() -> bool:
    """Whether this processor has all of it, and loops are compiled for it, not for one that `NUMBA_CPU_NAME` names."""
    features = binding.get_host_cpu_features()
    return getattr(config, "CPU_NAME", None) is None and all(features.get(name, False) for name in NEEDED)


def _function(builder, name: str, result, *arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _number(n: int):
    return ir.Constant(_WORD, n)


def _all(n: int):
    return ir.Constant(_LINE, [n] * SIDE)


def _line(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=8)


def _keep(builder, line, address) -> None:
    builder.store(line, builder.inttoptr(address, _LINE.as_pointer()), align=8)


def _spread_out(builder, word):
    """A word, eight times."""
    line = builder.insert_element(ir.Constant(_LINE, ir.Undefined), word, _PLACE(0))
    return _shuffled(builder, line, line, [0] * SIDE)


def _everywhere(builder, address):
    """The word at an address, eight times."""
    return _spread_out(builder, builder.load(builder.inttoptr(address, _WORD.as_pointer()), align=8))


def _products(builder, x, y):
    """Of the words at even places, and of those at odd ones."""
    f = _function(builder, "llvm.x86.pclmulqdq.512", _LINE, _LINE, _LINE, _BYTE)
    return [builder.call(f, [x, y, _BYTE(which)]) for which in (0x00, 0x11)]


def _shuffled(builder, x, y, places: list[int]):
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_PLACE, len(places)), places))


def _reduced(builder, even, odd):
    """The eight words of two vectors of products in the field: x^64 is x^4 + x^3 + x + 1."""
    low, high = (
        _shuffled(builder, even, odd, [part + 2 * (i // 2) + 8 * (i % 2) for i in range(SIDE)]) for part in (0, 1)
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
        found = _line(builder, at)
        x, y = (x, y) if weights is None else (builder.and_(x, y), weights)
        for product in _products(builder, x, y):
            found = builder.xor(found, product)
        _keep(builder, found, at)

    return take


def _rows(builder, x, apart):
    return [_line(builder, builder.add(x, builder.mul(apart, _number(i)))) for i in range(8)]


def _dots(masked: bool):
    """Eight lines, the values at {0, 1}^3 of a function of three variables, times eight others, at all points
    {0, 1, infinity}^3; each line of products is added to one of 27 sums. `masked`: x and y are bits, of which the words
    of one more line stand for those that are set in both."""

    @intrinsic
    def run(context, x, y, weights, totals):
        def generate(context, builder, signature, values):
            x, y, weights, totals = values
            take = _taken_by(builder, totals, _line(builder, weights) if masked else None)
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
        words, first = _line(builder, bits), _spread_out(builder, shift)
        chosen = (builder.and_(builder.lshr(words, builder.add(first, _all(8 * i))), _all(1)) for i in range(8))
        ys = [builder.sub(_all(0), bit) for bit in chosen]
        _at_points(builder, _rows(builder, x, apart), ys, _taken_by(builder, totals, _line(builder, weights)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@intrinsic
def times_line(context, x, y, out):
    """A line times another, in the field."""

    def generate(context, builder, signature, values):
        x, y, out = values
        _keep(builder, _reduced(builder, *_products(builder, _line(builder, x), _line(builder, y))), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def times_powers(context, x, count, scale):
    """So many lines, each after the other, of which line t is multiplied by x^t times another line."""

    def generate(context, builder, signature, values):
        x, count, scale = values

        def step(values: list) -> tuple:
            at, by = values
            _keep(builder, _reduced(builder, *_products(builder, _line(builder, at), by)), at)
            over = builder.and_(builder.ashr(by, _all(63)), _all(0b11011))
            return builder.add(at, _number(64)), builder.xor(builder.shl(by, _all(1)), over)

        counted(builder, count, (x, _line(builder, scale)), step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def weighed_sum(context, x, apart, weights, count, out):
    """sum_i weights_i x_i of `count` lines x_i that are so many bytes apart, in the field."""

    def generate(context, builder, signature, values):
        x, apart, weights, count, out = values

        def step(values: list) -> tuple:
            at, by, *sums = values
            products = _products(builder, _line(builder, at), _everywhere(builder, by))
            found = [builder.xor(s, product) for s, product in zip(sums, products, strict=True)]
            return builder.add(at, apart), builder.add(by, _number(8)), *found

        _, _, *sums = counted(builder, count, (x, weights, _all(0), _all(0)), step)
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
    f = _function(builder, "llvm.x86.vgf2p8affineqb.512", _BYTES, _BYTES, _BYTES, _BYTE)
    return builder.call(f, [x, matrices, _BYTE(0)])


_UNITS = 0x8040201008040201  # as eight bytes: the unit vectors


@intrinsic
def copy_tile(context, x, out):
    """64 lines."""

    def generate(context, builder, signature, values):
        for i in range(64):
            line = _line(builder, builder.add(values[0], _number(64 * i)))
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
        found = [ir.Constant(_LINE, [0] * SIDE)] * 8
        for i in range(8):
            row = builder.bitcast(_line(builder, builder.add(bits, _number(512 * i))), _BYTES)
            for j in range(8):
                matrix = _everywhere(builder, builder.add(matrices, _number(64 * i + 8 * j)))
                mapped = _mapped(builder, row, builder.bitcast(matrix, _BYTES))
                found[j] = builder.xor(found[j], builder.bitcast(mapped, _LINE))
        for j, line in enumerate(_turned(builder, found)):
            _keep(builder, builder.bitcast(line, _LINE), builder.add(out, builder.mul(apart, _number(j))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate
