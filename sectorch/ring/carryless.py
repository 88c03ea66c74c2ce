"""Products of polynomials over GF(2), by the processor's carry-less products where it has them, for compiled loops.

A product of two words has two words. Eight words, a line of the cache, are taken at a time: `dot` and `masked_dot` are
inner products of lines, which the instruction takes from memory in pairs. Where there is none, shifts do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from .loops import compiled, inlined, intrinsic

SIDE = 8
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
            for i in range(SIDE // 2):
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
        for i in range(SIDE // 2):
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
        line = ir.VectorType(_WORD, SIDE)
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
        for c in range(SIDE):
            low, high = carryless(np.uint64(x[i, start + c]), np.uint64(weights[i]))
            totals[c, 0] ^= low
            totals[c, 1] ^= high

    @inlined
    def dot(x, i, y, j, totals, k):
        for c in range(SIDE):
            low, high = carryless(x[i, c], y[j, c])
            totals[k, 0] ^= low
            totals[k, 1] ^= high

    @inlined
    def masked_dot(x, i, mask, j, y, totals, k):
        for c in range(SIDE):
            low, high = carryless(x[i, c] & mask[j, c], y[0, c])
            totals[k, 0] ^= low
            totals[k, 1] ^= high
