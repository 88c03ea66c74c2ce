"""Every function over its whole stated domain, from the last place to the limit of activations.

Inputs are multiples of the last place, so that what is measured is the function and not the rounding of its argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from domain_numbers import BITS, LAST, LIMIT, close, grid, layer_norm, numbers, shared
from example_counts import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch
from sectorch.tensor import SharedTensor
from sectorch.tensor.table import Context


def places(count: int, frac_bits: int = BITS, signed: bool = True) -> torch.Tensor:
    """Magnitudes from the last place to the limit, evenly in the exponent, and some whole and half numbers."""
    limit = 56 - 2 * frac_bits
    sizes = 2.0 ** torch.linspace(-frac_bits, limit - 1e-3, count, dtype=torch.float64)
    sizes = torch.cat((torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 14.0]).double(), sizes))
    return grid(torch.cat((sizes, -sizes)) if signed else sizes, frac_bits)


def everywhere(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def positive(x: torch.Tensor) -> torch.Tensor:
    return x > 0


@dataclass(frozen=True)
class Domain:
    """Where a function is right, and how far it may be off there: `bound(x, y)`, the note of its row, for 20 bits.

    What is left out ends in a range error: a result of 2^16 or more, or an argument outside of `where`.
    """

    function: Callable
    bound: Callable = lambda x, y: 8 * LAST + 1e-5 * y.abs()
    where: Callable = everywhere


def flat(error: float) -> Callable:
    return lambda x, y: torch.full_like(x, error)


DOMAINS = {
    "exp": Domain(torch.exp, lambda x, y: 6e-6 * y + 2e-6),
    "expm1": Domain(torch.expm1, lambda x, y: 6e-6 * (y + 1) + 2e-6),
    "exp2": Domain(torch.exp2),
    "sinh": Domain(torch.sinh, lambda x, y: 6e-6 * y.abs() + 6e-6),
    "cosh": Domain(torch.cosh, lambda x, y: 6e-6 * y + 2e-6),
    "sigmoid": Domain(torch.sigmoid, flat(4e-6)),
    "tanh": Domain(torch.tanh, flat(8e-6)),
    "erf": Domain(torch.erf, flat(4e-6)),
    "erfc": Domain(torch.erfc, flat(4e-6)),
    "gelu": Domain(F.gelu, flat(4e-6)),
    "gelu tanh": Domain(lambda x: F.gelu(x, approximate="tanh"), flat(4e-6)),
    "softplus": Domain(F.softplus, flat(5e-6)),
    "logsigmoid": Domain(F.logsigmoid, flat(5e-6)),
    "silu": Domain(F.silu, flat(3e-5)),
    "mish": Domain(F.mish, flat(3e-5)),
    "elu": Domain(F.elu, flat(4e-6)),
    "celu": Domain(lambda x: F.celu(x, 0.01), flat(4e-6)),
    "selu": Domain(F.selu),
    "softsign": Domain(F.softsign, flat(4e-6)),
    "tanhshrink": Domain(F.tanhshrink, flat(8e-6)),
    "hardswish": Domain(F.hardswish),
    "cos": Domain(torch.cos, flat(4e-6)),
    "sin": Domain(torch.sin, flat(4e-6)),
    "tan": Domain(torch.tan, lambda x, y: 1e-5 * (1 + y * y), lambda x: torch.cos(x).abs() > 1e-3),
    "sinc": Domain(torch.sinc, flat(1e-5)),
    "log_ndtr": Domain(torch.special.log_ndtr, flat(1e-5)),
    "i0e": Domain(torch.special.i0e, flat(8e-6)),
    "atan": Domain(torch.atan, flat(8e-6)),
    "asin": Domain(torch.asin, flat(2e-5), lambda x: x.abs() <= 1),
    "acos": Domain(torch.acos, flat(2e-5), lambda x: x.abs() <= 1),
    "asinh": Domain(torch.asinh, flat(1e-5)),
    "acosh": Domain(torch.acosh, lambda x, y: 1e-5 + 1e-6 / y.clamp(min=1e-3), lambda x: x >= 1),
    "atanh": Domain(torch.atanh, lambda x, y: 4e-6 + 1e-6 / (1 - x.abs()), lambda x: x.abs() < 1),
    "log": Domain(torch.log, flat(4e-6), positive),
    "log2": Domain(torch.log2, flat(8e-6), positive),
    "log1p": Domain(torch.log1p, flat(4e-6), lambda x: x > -1),
    "sqrt": Domain(torch.sqrt, lambda x, y: 2e-6 + 4e-6 * y, lambda x: x >= 0),
    "rsqrt": Domain(torch.rsqrt, lambda x, y: 2e-6 + 1e-6 * y, positive),
    "reciprocal": Domain(torch.reciprocal, lambda x, y: 2e-6 * (1 + y.abs())),
    "x^0.7": Domain(lambda x: x**0.7, where=lambda x: x >= 0),
    "x^2.5": Domain(lambda x: x**2.5, where=lambda x: x >= 0),
    "x^-1.5": Domain(lambda x: x**-1.5, where=positive),
    "x^-2": Domain(lambda x: x**-2),
    "x^2": Domain(torch.square),
    "x^3": Domain(lambda x: x**3),
    "x^5": Domain(lambda x: x**5),
    "3^x": Domain(lambda x: 3**x),
    "x / 3": Domain(lambda x: x / 3),
    "x / (x + 1.5)": Domain(lambda x: x / (x + 1.5), where=lambda x: (x + 1.5).abs() > 0.1),
    "log(relu(x) + 1e-8)": Domain(lambda x: torch.log(x.relu() + 1e-8), flat(1.2e-5)),
    "sqrt(relu(x) + 1e-8)": Domain(lambda x: torch.sqrt(x.relu() + 1e-8), lambda x, y: 2e-6 + 4e-6 * y),
    "1 / (relu(x) + 1e-3)": Domain(lambda x: 1 / (x.relu() + 1e-3), lambda x, y: LAST + 5e-4 * y),
}  # 1e-3 is encoded with an error of 4e-4 of it


def check(name: str, x: torch.Tensor) -> int:
    """Compare where the function is right; how many places that was."""
    domain = DOMAINS[name]
    x = x[domain.where(x)]
    y = domain.function(x)
    here = y.isfinite() & (y.abs() < LIMIT)
    x, y = x[here], y[here]
    if not x.numel():
        return 0
    got = domain.function(shared(x)).reveal()
    excess = (got - y).abs() - domain.bound(x, y)
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"{name}({x[worst]}) = {got[worst]}, not {y[worst]}"
    return len(x)


@pytest.mark.parametrize("name", DOMAINS)
def test_from_the_last_place_to_the_limit(name: str):
    assert check(name, places(150)) > 50


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", DOMAINS)
def test_a_dense_grid(name: str):
    check(name, torch.cat((places(5000), grid(torch.linspace(-20, 20, 10_000).double()))))


@fewer(10)
@given(name=st.sampled_from(sorted(DOMAINS)), x=st.lists(numbers, min_size=10, max_size=30))
def test_random_places(name: str, x: list[float]):
    check(name, torch.tensor(x, dtype=torch.float64))


# Other numbers of fraction bits.

BITS_BOUNDS = {
    "log": (torch.log, lambda x, y: 0 * y, positive),
    "sqrt": (torch.sqrt, lambda x, y: y.clamp(min=1), lambda x: x >= 0),
    "sigmoid": (torch.sigmoid, lambda x, y: 0 * y, everywhere),
    "exp": (torch.exp, lambda x, y: y, everywhere),
    "sin": (torch.sin, lambda x, y: 0 * y, everywhere),
    "softsign": (F.softsign, lambda x, y: 0 * y, lambda x: x.abs() < 2**13),
    "reciprocal": (torch.reciprocal, lambda x, y: y.abs(), everywhere),
    "x / 3": (lambda x: x / 3, lambda x, y: y.abs(), everywhere),
    "atan": (torch.atan, lambda x, y: 0 * y, everywhere),
}


@pytest.mark.parametrize("bits", [10, 16, 24])
@pytest.mark.parametrize("name", BITS_BOUNDS)
def test_other_formats(name: str, bits: int):
    """Within four last places, or four last places and 2e-6 times a scale: a mantissa has f bits, and the fit and what
    a saturated series leaves out are below 2e-6."""
    function, scale, where = BITS_BOUNDS[name]
    x = places(60, bits)
    x = x[where(x)]
    y = function(x)
    x, y = (v[y.isfinite() & (y.abs() < 2.0 ** (56 - 2 * bits))] for v in (x, y))
    got = function(shared(x, bits)).reveal()
    last = 2.0**-bits
    bound = (4 * last + 2e-6) * (1 + scale(x, y))
    worst = int(((got - y).abs() - bound).argmax())
    assert (got - y).abs()[worst] <= bound[worst], f"{name}({x[worst]}) = {got[worst]}, not {y[worst]}"


# Softmax and what rests on it.


@fewer(4)
@given(spread=st.floats(0.01, 40_000), n=st.sampled_from([2, 10, 300]), seed=st.integers(0, 99))
def test_logarithms_of_softmax_reach_down(spread: float, n: int, seed: int):
    x = grid((torch.randn(3, n, generator=torch.Generator().manual_seed(seed)) * spread).clamp(-60_000, 60_000))
    error = 1e-5 + 2e-6 * math.sqrt(n)
    close(lambda v: v.log_softmax(-1), x, 0, error / LAST)
    close(lambda v: v.logsumexp(-1), x, 0, error / LAST)
    close(lambda v: F.cross_entropy(v, torch.tensor([0, 1, 0]), reduction="none"), x, 0, error / LAST)
    close(lambda v: v.softmax(-1), x, error, 8)


@pytest.mark.parametrize("distance", [8.0, 11.0, 16.0])
def test_many_small_terms_of_a_softmax(distance: float):
    """A vocabulary of words that are all unlikely: together they count."""
    x = torch.full((1, 50_000), -distance).double()
    x[0, 0] = 0
    close(lambda v: v.log_softmax(-1), x, 0, (1e-5 + 2e-6 * math.sqrt(50_000)) / LAST)


# Public factors and divisors.


@fewer(8)
@given(
    st.lists(numbers, min_size=1, max_size=10),
    st.one_of(st.floats(1e-6, 60_000), st.integers(2, 60_000).map(float)),
    st.booleans(),
)
def test_public_factors_and_divisors(x: list[float], factor: float, negative: bool):
    x, factor = torch.tensor(x, dtype=torch.float64), -factor if negative else factor
    small = x[(x * factor).abs() < LIMIT]
    if small.numel():
        close(lambda v: v * factor, small, 2e-6, 1)
        close(lambda v: v * factor + 1, small, 2e-6, 2)
    small = x[(x / factor).abs() < LIMIT]
    if small.numel():
        close(lambda v: v / factor, small, 2e-6, 1)
        close(lambda v: v / torch.full(v.shape, factor, dtype=torch.float64), small, 1e-5, 2)


@fewer(8)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_quotients_of_secrets(pairs: list[tuple[float, float]]):
    x, y = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    here = (y != 0) & ((x / y).abs() < LIMIT)
    x, y = x[here], y[here]
    if x.numel():
        got, wanted = (shared(x) / shared(y)).reveal(), x / y
        assert ((got - wanted).abs() <= 8 * LAST + 2e-6 * wanted.abs()).all()


# What cannot be held is declared: the range check, which is elsewhere, turns it into an error.

OUTSIDE = {
    "exp": (torch.exp, [11.1, 12.0, 700.0, 60_000.0]),
    "expm1": (torch.expm1, [11.1, 40.0]),
    "exp2": (torch.exp2, [16.1, 40.0]),
    "sinh": (torch.sinh, [11.9, -11.9, 700.0]),
    "3^x": (lambda x: 3**x, [10.2, 60.0]),
    "log": (torch.log, [0.0, -1.0, -60_000.0]),
    "log1p": (torch.log1p, [-1.0, -3.0]),
    "sqrt": (torch.sqrt, [-LAST, -5.0]),
    "rsqrt": (torch.rsqrt, [0.0, -1.0]),
    "reciprocal": (torch.reciprocal, [0.0, LAST, -LAST]),
    "x^2": (torch.square, [2100.0, -60_000.0]),
    "x * x": (lambda x: x * x, [2100.0, -60_000.0]),
    "x^3": (lambda x: x**3, [170.0, -60_000.0]),
    "x^0.7": (lambda x: x**0.7, [-1.0]),
    "x^-1.5": (lambda x: x**-1.5, [0.0, 5e-4]),
    "1 / x": (lambda x: 1 / x, [0.0, LAST]),
    "x / y": (lambda x: 30_000.0 / x, [0.0, 0.3, -0.3]),
    "asin": (torch.asin, [1.01, -2.0]),
    "acosh": (torch.acosh, [0.9, -3.0]),
    "atanh": (torch.atanh, [1.0, -1.5]),
    "var": (lambda x: (x[..., None] * torch.tensor([0.0, 1.0])).var(-1), [1000.0, 60_000.0]),
    "mse": (lambda x: F.mse_loss(x, torch.zeros(x.shape)), [1000.0, 60_000.0]),
    "layer_norm": (lambda x: layer_norm(0.0)(x[..., None].expand(*x.shape, 4)), [3.0]),
}


class Declared:
    """Records whether what `require` and `forbid` declare holds."""

    def __init__(self, monkeypatch):
        self.broken = 0
        for name in ("arithmetic", "losses", "normalization", "smooth"):
            module = getattr(sectorch.ops, name)
            for which in ("require", "forbid"):
                if hasattr(module, which):
                    monkeypatch.setattr(module, which, getattr(self, which))

    @staticmethod
    def value(context: Context, x: SharedTensor) -> torch.Tensor:
        return x.like(x.shares, dtype=torch.float64).reveal()

    def require(self, context: Context, x: SharedTensor, low: float | None = None, high: float | None = None) -> None:
        v = self.value(context, x)
        self.broken += int(low is not None and bool((v < low).any())) + int(
            high is not None and bool((v >= high).any())
        )

    def forbid(self, context: Context, bad) -> None:
        v = self.value(context, context.tensor(bad, 0))
        assert bool(((v == 0) | (v == 1)).all())
        self.broken += int(bool((v == 1).any()))


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_cannot_be_held_is_declared(name: str, monkeypatch):
    function, values = OUTSIDE[name]
    for value in values:
        declared = Declared(monkeypatch)
        function(shared(torch.tensor([value], dtype=torch.float64)))
        assert declared.broken, f"{name}({value})"


@pytest.mark.parametrize("name", DOMAINS)
def test_what_can_be_held_is_not_refused(name: str, monkeypatch):
    declared = Declared(monkeypatch)
    check(name, torch.cat([v[DOMAINS[name].function(v).abs() < LIMIT / 4] for v in [places(60)]]))
    assert not declared.broken


# Losses at both ends.


@fewer(5)
@given(
    x=st.lists(numbers, min_size=1, max_size=10),
    width=st.one_of(st.floats(1e-3, 1), st.floats(1, 30_000)),
    target=st.sampled_from([0.0, 1.0]),
)
def test_losses_of_large_and_small_numbers(x: list[float], width: float, target: float):
    x = torch.tensor(x, dtype=torch.float64)
    y, none = torch.full(x.shape, target, dtype=torch.float64), {"reduction": "none"}
    close(lambda v: F.smooth_l1_loss(v, y, beta=width, **none), x, 4e-6)
    if width < 32:  # beyond, products with a difference may leave the range, which is declared
        close(lambda v: F.huber_loss(v, y, delta=width, **none), x, 1e-5)
    z = x.clamp(-0.99 * LIMIT, 0.99 * LIMIT)  # softplus of what is next to the limit may be withheld (docs/ops.md)
    close(lambda v: F.binary_cross_entropy_with_logits(v, y, **none), z, 0, 5 + 1e-6 * float(z.abs().max()) / LAST)
    close(lambda v: F.soft_margin_loss(v, 2 * y - 1, **none), z, 1e-6, wanted=F.softplus(-z * (2 * y - 1)))
    p = grid(torch.sigmoid(x))
    close(lambda v: F.binary_cross_entropy(v, y, **none), p, 0)
    close(lambda v: F.kl_div(grid(x), v, **none), p, 1e-5, 16)


@settings(max_examples=10)
@given(scale=st.floats(0.01, 5000), seed=st.integers(0, 99))
def test_local_response_norms(scale: float, seed: int):
    x = grid(torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(seed)) * scale)
    close(lambda v: F.local_response_norm(v, 3), x, 1e-4)
