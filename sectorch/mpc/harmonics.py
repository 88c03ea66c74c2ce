"""Cosines and sines of the multiples of an angle, in two digits: the numbers that `series.py` deals and multiplies by.

The public multipliers must be the same at A and S to the last bit: a difference of one unit would be multiplied by a
share, which is a random ring element. They are therefore computed with IEEE additions and multiplications alone, each
rounded once, and not by a library's cosine, which differs between machines. `harmonicloops.py` computes the same in one
pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..backend import SERIES_BITS, Series

DIGIT = SERIES_BITS // 2
"""Bits of a digit."""

_CHUNK = 1 << 15
_CHUNK_AWAY = 1 << 22  # on a device, where each step is a launch


def cos_sin(turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 2 pi t for float64 t in [-1/2, 1/2), the same bits on every IEEE machine; error below 1e-14.

    Taylor polynomials at half the angle, then the double-angle formulas.
    """
    half = turns * math.pi
    square = half * half
    cos, sin = torch.zeros_like(half), torch.zeros_like(half)
    # At |half| <= pi/2 the first term left out is (pi/2)^24 / 24! < 2^-63. Horner's rule, from the last term on.
    for k in range(11, 0, -1):
        cos = (cos + 1.0) * square * (-1.0 / ((2 * k - 1) * (2 * k)))
        sin = (sin + 1.0) * square * (-1.0 / ((2 * k) * (2 * k + 1)))
    cos, sin = cos + 1.0, (sin + 1.0) * half
    return 1.0 - 2.0 * (sin * sin), 2.0 * (sin * cos)


def harmonics(turns: torch.Tensor, terms: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield cos and sin of 2 pi j t for j = 1..terms, by the Chebyshev recurrence; t is an int32 or int64 fraction."""
    cos, sin = cos_sin(turns.to(torch.float64) * scale_of(turns))
    twice = 2.0 * cos
    previous = torch.ones_like(cos), torch.zeros_like(sin)
    current = cos, sin
    for _ in range(terms):
        yield current
        previous, current = current, (twice * current[0] - previous[0], twice * current[1] - previous[1])


def scale_of(turns: torch.Tensor) -> float:
    """The factor that turns a whole number of this type into a fraction of a turn."""
    return 2.0 ** (-32 if turns.dtype == torch.int32 else -64)


def round_series(values: torch.Tensor) -> torch.Tensor:
    """Round to `SERIES_BITS` fraction bits, half to even."""
    return values.mul(2.0**SERIES_BITS).round_().to(torch.int64)


def _digits(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v = first + 2^-26 second, both at 26 fraction bits; the second within half a unit of the first."""
    whole = round_series(values)
    # Rounded, not cut, so that the second digit is signed and at most half a unit of the first: 2^25.
    first = (whole + (1 << (DIGIT - 1))) >> DIGIT
    return first, whole.sub_(first << DIGIT)


def _in_chunks(turns: torch.Tensor, leading: tuple[int, ...], fill) -> torch.Tensor:
    """int64 [*leading, *shape], filled by `fill` a cache-sized chunk at a time."""
    flat = turns.reshape(-1)
    out = torch.empty(*leading, flat.shape[0], dtype=torch.int64, device=flat.device)
    size = _CHUNK if flat.is_cpu else _CHUNK_AWAY
    for start in range(0, flat.shape[0], size):
        fill(out[..., start : start + size], flat[start : start + size])
    return out.view((*leading, *turns.shape))


def series_at(turns: torch.Tensor, series: Series) -> torch.Tensor:
    """The values of the series at these fractions of its period, at `SERIES_BITS` fraction bits."""

    def fill(out, turns):
        out.fill_(round(series.constant * 2.0**SERIES_BITS))
        for j, (cos, sin) in enumerate(harmonics(turns, len(series.cos))):
            out += round_series(series.cos[j] * cos) + round_series(series.sin[j] * sin)

    return _in_chunks(turns, (), fill)


def basis(turns: torch.Tensor, terms: int) -> torch.Tensor:
    """cos and sin of the harmonics, each in two digits: [2, 2 terms, *shape]."""

    def fill(out, turns):
        for j, values in enumerate(harmonics(turns, terms)):
            for i, value in enumerate(values):
                out[0, 2 * j + i], out[1, 2 * j + i] = _digits(value)

    return _in_chunks(turns, (2, 2 * terms), fill)


def less_basis(turns: torch.Tensor, terms: int, v_A: torch.Tensor) -> torch.Tensor:
    """`basis`, less v_A."""
    return basis(turns, terms).sub_(v_A)


def combine_harmonics(turns: torch.Tensor, held: torch.Tensor, series: Series) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums P1 B1 and P1 B2 + P2 B1 over cos and sin of all harmonics.

    Args:
        turns: the public fractions of a period, from which the multipliers P follow.
        held: the factors B, a basis or a half of one, [2, 2 terms, *shape].
    """
    first, second = (torch.zeros(turns.shape, dtype=torch.int64, device=turns.device) for _ in range(2))
    for j, (cos, sin) in enumerate(harmonics(turns, len(series.cos))):
        a, b = series.cos[j], series.sin[j]
        for i, value in enumerate((a * cos + b * sin, a * sin - b * cos)):
            high, low = _digits(value)
            first.addcmul_(high, held[0, 2 * j + i])
            second.addcmul_(high, held[1, 2 * j + i]).addcmul_(low, held[0, 2 * j + i])
    return first, second
