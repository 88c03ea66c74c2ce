"""Smooth functions in one round: trigonometric series of a masked opening.

A and S learn c = x + r modulo a period P. Since cos(w (c - r)) = cos(w c) cos(w r) + sin(w c) sin(w r), a series

    f(x) = k + sum_j a_j cos(j w x) + b_j sin(j w x),       w = 2 pi / P,

is linear in the values cos(j w r) and sin(j w r), which Q deals ahead; A and S multiply their shares by public numbers.
The mask is uniform on the period, so the opening shows nothing, and 32 bits of it are enough.

The public multipliers must be the same at A and S to the last bit: a difference of one unit would be multiplied by a
share, which is a random ring element. They are therefore computed with IEEE additions and multiplications alone, each
rounded once, and not by a library's cosine, which differs from machine to machine.
"""

from __future__ import annotations

import math

import torch

from ..choreography import Message, Net, protocol
from .deal import deal
from .series import Series
from .shares import Shares

OPENED_BITS = 32
_CHUNK = 1 << 15


def scales(frac_bits: int) -> tuple[int, int]:
    """Fraction bits of the dealt values and of the public multipliers; their sum is the result's."""
    return min(frac_bits + 4, 24), min(frac_bits + 2, 22)


def cos_sin(turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 2 pi t for float64 t in [-1/2, 1/2), the same bits on every IEEE machine; error below 1e-14.

    Taylor polynomials at half the angle, then the double-angle formulas.
    """
    half = turns * math.pi
    square = half * half
    cos, sin = torch.zeros_like(half), torch.zeros_like(half)
    for k in range(11, 0, -1):
        cos = (cos + 1.0) * square * (-1.0 / ((2 * k - 1) * (2 * k)))
        sin = (sin + 1.0) * square * (-1.0 / ((2 * k) * (2 * k + 1)))
    cos, sin = cos + 1.0, (sin + 1.0) * half
    return 1.0 - 2.0 * (sin * sin), 2.0 * (sin * cos)


def _harmonics(turns32: torch.Tensor, terms: int):
    """Yield cos and sin of 2 pi j t for j = 1..terms, t = turns32 / 2^32, by the Chebyshev recurrence."""
    cos, sin = cos_sin(turns32.to(torch.float64) * 2.0**-OPENED_BITS)
    twice = 2.0 * cos
    previous = torch.ones_like(cos), torch.zeros_like(sin)
    current = cos, sin
    for _ in range(terms):
        yield current
        previous, current = current, (twice * current[0] - previous[0], twice * current[1] - previous[1])


def _rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    return values.mul(2.0**bits).round_().to(torch.int64)


def _in_chunks(turns32: torch.Tensor, rows: int, fill) -> torch.Tensor:
    """int64 [rows, *shape], filled a cache-sized piece at a time."""
    flat = turns32.reshape(-1)
    out = torch.empty(rows, flat.shape[0], dtype=torch.int64, device=flat.device)
    if not out.is_meta:
        for start in range(0, flat.shape[0], _CHUNK):
            fill(out[:, start : start + _CHUNK], flat[start : start + _CHUNK])
    return out.view(rows, *turns32.shape)


def _top_bits(half: torch.Tensor, width: int) -> torch.Tensor:
    """The upper 32 of the low `width` bits, as int32: a half of x modulo the period, to 2^-32 of a period."""
    return (half << (64 - width)).bitwise_right_shift_(32).to(torch.int32)


@protocol("trigonometric", "docs/protocols.md; Fourier extension", [
    Message("c_A", "A", "S", "r_A of k_QA"), Message("c_S", "S", "A", "r_S of k_SQ"),
])  # fmt: skip
def trigonometric(net: Net, x: Shares, scale_bits: int, series: Series, frac_bits: int) -> Shares:
    """series(x) at sum(scales(frac_bits)) fraction bits.

    Args:
        x: at `scale_bits` fraction bits, in [series.low, series.high]; beyond it the result is bounded and meaningless.

    Rounds 1, bytes 8 per element online; dealt 16 per term. Error: series.error, plus series.weight * 2^-25 and
    2^-22 per term for rounding, plus 2^-31 of the period times the slope (at 20 fraction bits). Nobody learns anything.
    """
    Q, A, S = net.Q, net.A, net.S
    width = series.period_bits + scale_bits
    terms = len(series.cos)
    basis_bits, public_bits = scales(frac_bits)

    r_A = net.common(Q, A, x.shape, "r_A", torch.int32)
    r_S = net.common(Q, S, x.shape, "r_S", torch.int32)

    def fill_basis(out, turns):
        for j, (cos, sin) in enumerate(_harmonics(turns, terms)):
            out[2 * j], out[2 * j + 1] = _rounded(cos, basis_bits), _rounded(sin, basis_bits)

    def fill_public(out, turns):
        for j, (cos, sin) in enumerate(_harmonics(turns, terms)):
            a, b = series.cos[j], series.sin[j]
            out[2 * j] = _rounded(a * cos + b * sin, public_bits)
            out[2 * j + 1] = _rounded(a * sin - b * cos, public_bits)

    basis = deal(net, net.locally(Q, lambda a, s: _in_chunks(a + s, 2 * terms, fill_basis), r_A, r_S))
    c_A = net.send(net.locally(A, lambda v, r: _top_bits(v, width) + r, x.A, r_A), A, S, "c_A")
    c_S = net.send(net.locally(S, lambda v, r: _top_bits(v, width) + r, x.S, r_S), S, A, "c_S")
    public = net.locally((A, S), lambda a, s: _in_chunks(a + s, 2 * terms, fill_public), c_A, c_S)

    def combined(public, basis):
        out = public[0] * basis[0]
        for multiplier, value in zip(public[1:], basis[1:], strict=True):
            out.addcmul_(multiplier, value)
        return out

    constant = round(series.constant * 2.0 ** (basis_bits + public_bits))
    return Shares(
        net.locally(A, lambda p, v: combined(p, v).add_(constant), public, basis.A),
        net.locally(S, combined, public, basis.S),
    )
