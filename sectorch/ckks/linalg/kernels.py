"""The compiled loop of Matrix Reducing: many small exact matrix products modulo a prime in float64.

BLAS takes several times as long for them (the matrices of one slot are a few rows by 8 to 64 columns, and each is read
once), and torch makes passes over memory for the digits and the reduction.
"""

from __future__ import annotations

import numpy as np

from ...ring.loops import compiled
from ..scheme.kernels import rint


@compiled
def multiplied(right, left, q, bits, out, low, high):
    """out[s] = right[s] @ left[s] mod q, centred, for low <= s < high.

    Args:
        right: float64 [S, T, K], centred residues; cut at 2^bits into two digits, or whole where bits is 0.
        left: float64 [S, K, M], integers.

    Exact while a digit times K times the largest of `left` is at most 2^53 (`modular.products` chooses `bits` so).
    """
    _, rows, inner = right.shape
    width = left.shape[2]
    inverse, base = 1.0 / q, 2.0**bits
    upper, lower = np.empty(width), np.empty(width)
    for s in range(low, high):
        for t in range(rows):
            upper[:], lower[:] = 0.0, 0.0
            for k in range(inner):
                rest = right[s, t, k]
                if bits:
                    digit = rint(rest / base)
                    rest -= digit * base
                    for m in range(width):
                        upper[m] += digit * left[s, k, m]
                for m in range(width):
                    lower[m] += rest * left[s, k, m]
            for m in range(width):
                value = lower[m]
                if bits:
                    above = upper[m]
                    above -= rint(above * inverse) * q
                    above *= base
                    value -= rint(value * inverse) * q
                    value += above - rint(above * inverse) * q
                out[s, t, m] = value - rint(value * inverse) * q


__all__ = ["multiplied"]
