"""Fit the trigonometric series that sectorch/ops/series.py lacks, and write that file.

    python tools/fit_series.py              # those of `FUNCTIONS` that the file does not have yet
    python tools/fit_series.py exp atan     # these anew

The others stay as they are: least squares end in other last digits on another machine, and results would change with
them.

Least squares on a Chebyshev-like grid over [low, high], inside a longer period that leaves the series free to close
smoothly outside (a Fourier extension); a small penalty keeps the coefficients small, because their sum multiplies the
rounding of the protocol. The error printed beside each function is the largest on a dense grid.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch

from sectorch.ops import series

erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_slope(x):
    return 0.5 * (1 + erf(x / math.sqrt(2))) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope(x):
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def i0e_of_root(u):
    """i0e(x) where u = 1 / sqrt(1 + |x|): smooth down to u = 0, near which it is u / sqrt(2 pi)."""
    return torch.special.i0e(torch.from_numpy(np.maximum(u, 1e-9) ** -2 - 1)).numpy()


def log_ndtr_above(x):
    return np.log1p(-0.5 * np.vectorize(math.erfc)(x / math.sqrt(2)))


def log_ndtr_below(v):
    """log_ndtr(-s) + s^2 / 2 + log(1 + s) where v = 1 / (1 + s): smooth down to v = 0, where it is -log(2 pi) / 2."""
    s = 1 / np.maximum(v, 1e-9) - 1
    return torch.special.erfcx(torch.from_numpy(s / math.sqrt(2))).div(2).log().numpy() + np.log1p(s)


# name: function, low, high, log2 of the period, terms, penalty
FUNCTIONS = {
    "exp": (np.exp, -14, 0, 5, 12, 1e-6),
    "sigmoid": (sigmoid, -14, 14, 5, 32, 1e-6),
    "tanh_softplus": (lambda x: np.tanh(np.log1p(np.exp(x))), -14, 14, 5, 36, 1e-6),
    "softplus": (lambda x: np.log1p(np.exp(x)), -14, 14, 5, 38, 1e-6),
    "erf": (erf, -4, 4, 4, 13, 1e-5),
    "gelu": (lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), -5.25, 5.25, 4, 13, 1e-6),
    "gelu_tanh": (
        lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), -5.25, 5.25, 4, 16, 1e-6
    ),
    "gelu_slope": (gelu_slope, -5.25, 5.25, 4, 14, 1e-6),
    "gelu_tanh_slope": (gelu_tanh_slope, -5.25, 5.25, 4, 18, 1e-6),
    "reciprocal": (lambda x: 1 / x, 0.5, 1, 0, 10, 1e-6),
    "rsqrt": (lambda x: x**-0.5, 0.5, 1, 0, 9, 1e-6),
    "rsqrt_of_quarter": (lambda x: x**-0.5, 0.25, 1, 1, 12, 1e-6),
    "sqrt": (np.sqrt, 0.5, 1, 0, 9, 1e-6),
    "log": (np.log, 0.5, 1, 0, 9, 1e-6),
    "atan": (np.arctan, -1, 1, 2, 11, 1e-6),
    "i0e_of_root": (i0e_of_root, 0, 1, 1, 10, 1e-6),
    "log_ndtr_above": (log_ndtr_above, 0, 5.25, 4, 8, 1e-6),
    "log_ndtr_below": (log_ndtr_below, 0, 1, 1, 8, 1e-6),
}  # fmt: skip


def basis(x: np.ndarray, period: float, terms: int) -> np.ndarray:
    angles = 2 * math.pi / period * np.outer(x, np.arange(1, terms + 1))
    return np.concatenate([np.ones((len(x), 1)), np.cos(angles), np.sin(angles)], axis=1)


def fit(f, low: float, high: float, period_bits: int, terms: int, penalty: float):
    n, period = 8000, 2.0**period_bits
    nodes = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(n) + 0.5) / n)
    x = np.concatenate([nodes, np.linspace(low, high, n)])
    a = basis(x, period, terms)
    stacked = np.concatenate([a, penalty * math.sqrt(len(x)) * 1e-2 * np.eye(a.shape[1])])
    c = np.linalg.lstsq(stacked, np.concatenate([f(x), np.zeros(a.shape[1])]), rcond=None)[0]
    dense = np.linspace(low, high, 100_003)
    return c, float(np.abs(basis(dense, period, terms) @ c - f(dense)).max())


def main(anew: set[str]) -> None:
    if unknown := anew - FUNCTIONS.keys():
        sys.exit(f"no function {', '.join(sorted(unknown))} in FUNCTIONS")
    out = [
        '"""Trigonometric series of common functions. Written by tools/fit_series.py; do not edit.',
        "",
        "The coefficients are data and not computed on import: A and S must multiply by the same public numbers, to",
        'the last bit, on any machine.\n"""',
        "",
        "from __future__ import annotations",
        "",
        "from ..backend import Series",
        "",
    ]
    for name, (f, low, high, period_bits, terms, penalty) in FUNCTIONS.items():
        kept = None if name in anew else getattr(series, name.upper(), None)
        if kept is None:
            c, error = fit(f, low, high, period_bits, terms, penalty)
            rounded = [float(f"{v:.17g}") for v in c]
            print(f"{name:15s} {terms:3d} terms  error {error:.1e}  sum of coefficients {np.abs(c[1:]).sum():.1f}")
        else:
            rounded, error = [kept.constant, *kept.cos, *kept.sin], kept.error
        head = f"{float(low)!r}, {float(high)!r}, {period_bits}, {error:.2e}, {rounded[0]!r}"
        out += [f"{name.upper()} = Series(", f"    {head},"]
        for part in (rounded[1 : terms + 1], rounded[terms + 1 :]):
            lines = [", ".join(repr(v) for v in part[i : i + 4]) for i in range(0, len(part), 4)]
            out += ["    (", *(f"        {line}," for line in lines), "    ),"]
        out += [")  # fmt: skip", ""]
    path = Path(__file__).parent.parent / "sectorch" / "ops" / "series.py"
    path.write_text("\n".join(out).rstrip() + "\n")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
