"""Smooth functions over their whole stated domains: dense grids and random points, within the bounds of their rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch

ULP = 2.0**-20  # an input is off by half of it, which the slope multiplies, and the revealed result by one

# function, low, high, bound(x, y): the note of the op's row, for 20 fraction bits
DOMAINS = {
    "exp": (torch.exp, -40, 9.99, lambda x, y: 6e-6 * y + 2e-6),
    "sigmoid": (torch.sigmoid, -100, 100, lambda x, y: 4e-6),
    "tanh": (torch.tanh, -100, 100, lambda x, y: 8e-6),
    "erf": (torch.erf, -100, 100, lambda x, y: 4e-6),
    "gelu": (F.gelu, -100, 100, lambda x, y: 4e-6),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), -100, 100, lambda x, y: 4e-6),
    "softplus": (F.softplus, -100, 100, lambda x, y: 5e-6),
    "silu": (F.silu, -100, 100, lambda x, y: 4e-6 * x.abs() + 2e-6),
    "mish": (F.mish, -100, 100, lambda x, y: 4e-6 * x.abs() + 2e-6),
    "elu": (F.elu, -100, 100, lambda x, y: 4e-6),
    "cos": (torch.cos, -1000, 1000, lambda x, y: 4e-6),
    "sin": (torch.sin, -1000, 1000, lambda x, y: 4e-6),
    "log": (torch.log, 2.0**-14, 2.0**20 - 1, lambda x, y: 4e-6 + 1e-6 / x),
    "sqrt": (torch.sqrt, 2.0**-16, 2.0**20 - 1, lambda x, y: 2e-6 + 1e-6 / y + 4e-6 * y),
    "rsqrt": (torch.rsqrt, 2.0**-14, 2.0**20 - 1, lambda x, y: 2e-6 + 4e-6 * y + ULP * y**3),
    "reciprocal": (torch.reciprocal, 2.0**-12, 2.0**20 - 1, lambda x, y: 2e-6 * (1 + y) + 1e-6 * y * y),
    "negative reciprocal": (torch.reciprocal, -(2.0**20) + 1, -(2.0**-12), lambda x, y: 2e-6 * (1 - y) + 1e-6 * y * y),
}


def check(name: str, x: torch.Tensor) -> None:
    function, _, _, bound = DOMAINS[name]
    x = x.to(torch.float64)
    got = function(sectorch.share(x)).reveal()
    expected = function(x)
    excess = (got - expected).abs() - bound(x, expected)
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"{name}({x[worst]}) = {got[worst]}, not {expected[worst]}"


def grid(low: float, high: float) -> torch.Tensor:
    """Evenly spaced points, and where the domain spans octaves as many evenly spaced in the exponent."""
    even = torch.linspace(low, high, 5000, dtype=torch.float64)
    if low * high <= 0:
        return even
    sign = math.copysign(1.0, low)
    ends = sorted((math.log2(abs(low)), math.log2(abs(high))))
    return torch.cat((even, sign * 2.0 ** torch.linspace(*ends, 5000, dtype=torch.float64).clamp(*ends)))


@pytest.mark.parametrize("name", DOMAINS)
def test_dense_grid(name):
    _, low, high, _ = DOMAINS[name]
    check(name, grid(low, high).clamp(low, high))


@pytest.mark.parametrize("name", DOMAINS)
@settings(max_examples=10)
@given(data=st.data())
def test_random_points(name, data):
    _, low, high, _ = DOMAINS[name]
    check(name, torch.tensor(data.draw(st.lists(st.floats(low, high), min_size=1, max_size=20))))
