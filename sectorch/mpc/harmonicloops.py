"""Compiled loops for `harmonics.py`: the same bits in one pass over memory.

The loops run over the elements low .. high, a span at a time that stays in the first-level cache. Every product and sum
is rounded on its own: the loops are not compiled with fast mathematics, which would contract them. The file stands
alone because it imports numba.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from llvmlite import ir
from numba import types

from ..backend import SERIES_BITS, Series
from ..ring.jit import array, compiled, intrinsic, run_on_words
from .harmonics import DIGIT, scale_of

_SPAN = 512
_ONE = 2.0**SERIES_BITS
_HALF = 1 << (DIGIT - 1)
_COS = np.array([-1.0 / ((2 * k - 1) * (2 * k)) for k in range(11, 0, -1)])
_SIN = np.array([-1.0 / ((2 * k) * (2 * k + 1)) for k in range(11, 0, -1)])


def less_basis(turns: torch.Tensor, terms: int, v_A: torch.Tensor) -> torch.Tensor:
    """`harmonics.basis`, less v_A."""
    out = torch.empty(v_A.shape, dtype=torch.int64)
    flat = array(turns).reshape(-1)
    held, into = (v.view(2, 2 * terms, len(flat)).numpy() for v in (v_A.contiguous(), out))
    run_on_words(len(flat), _less_basis, flat, scale_of(turns), held, into)
    return out


def combine_harmonics(turns: torch.Tensor, held: torch.Tensor, series: Series) -> tuple[torch.Tensor, torch.Tensor]:
    """`harmonics.combine_harmonics`."""
    flat = array(turns).reshape(-1)
    out = torch.empty(2, *turns.shape, dtype=torch.int64)
    halves = held.contiguous().view(2, held.shape[1], len(flat)).numpy()  # of a longer series, the first terms
    factors = np.array(series.cos), np.array(series.sin)
    run_on_words(len(flat), _combined, flat, scale_of(turns), *factors, halves, out.view(2, len(flat)).numpy())
    return out[0], out[1]


@intrinsic
def _nearest(context, value):
    """Round to a whole number, half to even."""

    def generate(_, builder, signature, values):
        double = ir.DoubleType()
        name = "llvm.nearbyint.f64"
        f = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(double, [double]), name)
        return builder.fptosi(builder.call(f, values), ir.IntType(64))

    return types.int64(types.float64), generate


@compiled
def _start(turns, scale, cos, sin, before_cos, before_sin, twice):
    """cos and sin of the angles and of zero times them; see `harmonics.cos_sin`."""
    count = len(turns)
    half, square = np.empty(_SPAN), np.empty(_SPAN)
    for i in range(count):
        half[i] = np.float64(turns[i]) * scale * math.pi
        square[i] = half[i] * half[i]
        before_cos[i], before_sin[i] = 0.0, 0.0
    for k in range(len(_COS)):
        c, s = _COS[k], _SIN[k]
        for i in range(count):
            before_cos[i] = (before_cos[i] + 1.0) * square[i] * c
            before_sin[i] = (before_sin[i] + 1.0) * square[i] * s
    for i in range(count):
        c, s = before_cos[i] + 1.0, (before_sin[i] + 1.0) * half[i]
        cos[i], sin[i] = 1.0 - 2.0 * (s * s), 2.0 * (s * c)
        twice[i] = 2.0 * cos[i]
        before_cos[i], before_sin[i] = 1.0, 0.0


@compiled
def _further(count, cos, sin, before_cos, before_sin, twice):
    """The next harmonic, by the Chebyshev recurrence."""
    for i in range(count):
        c, s = twice[i] * cos[i] - before_cos[i], twice[i] * sin[i] - before_sin[i]
        before_cos[i], before_sin[i] = cos[i], sin[i]
        cos[i], sin[i] = c, s


@compiled
def _put_less(count, value, held_first, held_second, first, second):
    """Write the digits of values, less those of `held`."""
    for i in range(count):
        whole = _nearest(value[i] * _ONE)
        digit = (whole + _HALF) >> DIGIT
        first[i] = digit - held_first[i]
        second[i] = whole - (digit << DIGIT) - held_second[i]


@compiled
def _less_basis(turns, scale, held, out, low, high):
    cos, sin, twice = np.empty(_SPAN), np.empty(_SPAN), np.empty(_SPAN)
    before_cos, before_sin = np.empty(_SPAN), np.empty(_SPAN)
    terms = out.shape[1] // 2
    for start in range(low, high, _SPAN):
        end = min(high, start + _SPAN)
        count = end - start
        _start(turns[start:end], scale, cos, sin, before_cos, before_sin, twice)
        for j in range(terms):
            p, q = 2 * j, 2 * j + 1
            _put_less(
                count, cos, held[0, p, start:end], held[1, p, start:end], out[0, p, start:end], out[1, p, start:end]
            )
            _put_less(
                count, sin, held[0, q, start:end], held[1, q, start:end], out[0, q, start:end], out[1, q, start:end]
            )
            _further(count, cos, sin, before_cos, before_sin, twice)


@compiled
def _add(count, x, y, a, b, held_first, held_second, first, second):
    """Add the products of P = a x + b y, in digits, with `held`."""
    for i in range(count):
        whole = _nearest((a * x[i] + b * y[i]) * _ONE)
        digit = (whole + _HALF) >> DIGIT
        rest = whole - (digit << DIGIT)
        first[i] += digit * held_first[i]
        second[i] += digit * held_second[i] + rest * held_first[i]


@compiled
def _combined(turns, scale, a, b, held, out, low, high):
    cos, sin, twice = np.empty(_SPAN), np.empty(_SPAN), np.empty(_SPAN)
    before_cos, before_sin = np.empty(_SPAN), np.empty(_SPAN)
    for start in range(low, high, _SPAN):
        end = min(high, start + _SPAN)
        count = end - start
        first, second = out[0, start:end], out[1, start:end]
        first[:], second[:] = 0, 0
        _start(turns[start:end], scale, cos, sin, before_cos, before_sin, twice)
        for j in range(len(a)):
            p, q = 2 * j, 2 * j + 1
            _add(count, cos, sin, a[j], b[j], held[0, p, start:end], held[1, p, start:end], first, second)
            _add(count, sin, cos, a[j], -b[j], held[0, q, start:end], held[1, q, start:end], first, second)
            _further(count, cos, sin, before_cos, before_sin, twice)
