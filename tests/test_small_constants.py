"""Public numbers below the last place of fixed point: guards against zero keep their digits, in every spelling."""

from __future__ import annotations

import math

import pytest
import torch
from cases import by_turns
from torch import nn

import sectorch
from sectorch import errors
from sectorch.tensor import Scheme

GUARDS = {
    "x + e": lambda x, e: x + e,
    "x - -e": lambda x, e: x - -e,
    "x + tensor": lambda x, e: x + torch.tensor(e),
    "x + tensor of one number": lambda x, e: x + torch.full((3,), e),
    "clamp": lambda x, e: x.clamp(min=e),
    "clamp between": lambda x, e: torch.clamp(x, e, 2 - 1e-7),
    "clamp below a large number": lambda x, e: torch.clamp(x, e, 2.0**13),
    "clamp_min": lambda x, e: x.clamp_min(e),
    "clamp by a tensor": lambda x, e: x.clamp(min=torch.tensor(e)),
    "maximum": lambda x, e: torch.maximum(x, torch.tensor(e)),
    "maximum from the left": lambda x, e: torch.maximum(torch.tensor([e]), x),
    "max": lambda x, e: torch.max(x, torch.full_like(x, e) if type(x) is torch.Tensor else torch.full((2, 3), e)),
    "where": lambda x, e: torch.where(x > 0, x, e),
    "where not": lambda x, e: torch.where(x <= 0, torch.tensor(e), x),
    "masked_fill": lambda x, e: x.masked_fill(x == 0, e),
    "in place": lambda x, e: (x * 1).clamp_(min=e),
    "added in place": lambda x, e: (x * 1).add_(e),
    "in two halves": lambda x, e: (x + e / 2).add_(e / 2),
    "less a half": lambda x, e: x + 1.5 * e - e / 2,
    "a view after it": lambda x, e: x.clamp(min=e).unsqueeze(0).flatten(0, 1),
}
"""x and a guard e against its zeros."""

USES = {
    "log": (lambda v, x: v.log(), 0.0),
    "log2": (lambda v, x: v.log2(), 0.0),
    "log10": (lambda v, x: v.log10(), 0.0),
    "x log": (lambda v, x: x * v.log(), 0.0),
    "quotient": (lambda v, x: x / v, 0.0),
    "sqrt": (lambda v, x: v.sqrt(), 0.0),
    "rsqrt": (lambda v, x: v.rsqrt(), 2.0**-29),
    "power": (lambda v, x: v**0.125, 0.0),
    "reciprocal": (lambda v, x: v.reciprocal(), 2.0**-15),
    "small numerator": (lambda v, x: 3e-6 / v, 1e-7),
}
"""A function of the guarded value and of x, and what the guard has to be for its result at zero to be in range."""

EPSILONS = (1e-4, 1e-7, 1e-9, 1e-12, 5e-13, 1e-30)


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


SCHEMES = {"20": Scheme(), "24": Scheme(24), "wan": Scheme(network="wan")}
X = torch.tensor([[0.0, 0.25, 0.75], [0.0, 1.5, 1.0]])


def tolerance(use: str, right: torch.Tensor, e: float, f: int) -> torch.Tensor:
    """From the errors that docs/ops.md states, for an argument with 2 f fraction bits, and 2^-13 of a constant."""
    y, last = right.abs(), 2.0**-f
    argument = min(2.0**-13, 2.0 ** (-2 * f - 1) / e)
    if use == "quotient":
        return 5 * last + 3 * last * y
    if use == "reciprocal":
        return 4 * last * (1 + y) + y * argument
    if use == "small numerator":
        return 4 * last + 4 * last * y + y * argument
    if use == "rsqrt":
        return 4 * last + 4 * last * y + y * argument
    return 12 * last * (1 + y) + argument * (1 if use in ("log", "log2", "log10") else 0) * 1.5


@by_turns(guard=GUARDS, use=USES, e=EPSILONS, scheme=SCHEMES)
def test_a_guard_against_zero_keeps_its_digits(guard, use, e, scheme):
    """In every spelling, before every function, down to any number, bit for bit as the reference."""
    (function, least), scheme = USES[use], SCHEMES[scheme]
    e = max(e, least)
    model = Of(lambda x: function(GUARDS[guard](x, e), x)).eval()
    came, right = sectorch.secure(model, scheme)(X), model(X.double())
    assert (came.double() - right).abs().le(tolerance(use, right, e, scheme.frac_bits)).all(), (came, right)
    assert torch.equal(came, sectorch.reference(model, scheme)(X))


@by_turns(guard=GUARDS, e=(1e-8, 1e-15))
def test_a_guard_hides_no_negative_number(guard, e):
    """torch gives NaN for the logarithm of a negative sum, and so there is no result; a floor holds whatever x is."""
    x = torch.tensor([[-0.5, 1.0, 1.0], [1.0, 1.0, 1.0]])
    model = Of(lambda x: GUARDS[guard](x, e).log()).eval()
    if bool(model(x).isfinite().all()):
        assert (sectorch.secure(model)(x) - model(x)).abs().max() < 1e-3
    else:
        with pytest.raises(errors.RangeExceededError, match="logarithm"):
            sectorch.secure(model)(x)


WRITES = {
    "pad": lambda x, e: nn.functional.pad(x, (1, 1), value=e),
    "index_fill": lambda x, e: x.index_fill(0, torch.tensor([0]), e),
    "cat": lambda x, e: torch.cat([x, torch.full((1, 3), e)]),
    "stack": lambda x, e: torch.stack([x, torch.full((2, 3), e)]),
    "scatter": lambda x, e: x.scatter(1, torch.tensor([[0], [1]]), e),
    "setitem": lambda x, e: torch.index_put(x, (torch.tensor([0]),), torch.tensor(e)),
    "two numbers": lambda x, e: x + torch.tensor([e, e / 2, 0.0]),
    "where of two numbers": lambda x, e: torch.where(x > 0, x, torch.tensor([e, e / 2, 0.0])),
    "mul": lambda x, e: x * (e / 1e6),
    "mul by a tensor": lambda x, e: torch.relu(x) * (torch.tensor([e, 0.0, e]) / 1e6),
}
"""Where a number e is not kept for what is behind it."""


@pytest.mark.parametrize("name", WRITES)
def test_a_number_that_counts_as_zero_is_named_beforehand(name):
    model = Of(lambda x: WRITES[name](x, 1e-9)).eval()
    with pytest.warns(errors.PrecisionWarning, match="counts as 0"):
        (problem,) = sectorch.explain(model, X).problems
    assert "is below the last place 9.5e-07 of the number format and counts as 0" in problem
    with pytest.warns(errors.PrecisionWarning, match=r"at .*test_small_constants.py:\d+: .* counts as 0"):
        sectorch.secure(model)(X)
    with sectorch.profile() as p, pytest.raises(errors.PrecisionError, match="counts as 0"):
        sectorch.secure(model, strict=True)(X)
    assert p.bytes == 0
    larger = Of(lambda x: WRITES[name](x, 1.0)).eval()
    assert sectorch.explain(larger, X).problems == []
    sectorch.secure(larger)(X)


@by_turns(guard=GUARDS, e=(1e-4, 1e-9, 1e-15))
def test_a_guard_is_not_named(guard, e):
    assert sectorch.explain(Of(lambda x: GUARDS[guard](x, e)).eval(), X).problems == []


TABLES = {
    "noise of a transform": lambda x: x @ torch.tensor([[1.0, 1e-17], [0.5, 1.0], [1e-16, 2.0]]),
    "sin of pi": lambda x: x + torch.sin(torch.tensor([0.0, math.pi, 1.0])),
    "epsilon": lambda x: nn.functional.layer_norm(x, (3,), eps=1e-12) + nn.functional.normalize(x, eps=1e-12),
    "comparisons": lambda x: (x > 1e-9) * x + (x >= 1e-12) * 1.0,
}


@pytest.mark.parametrize("name", TABLES)
def test_entries_beside_others_are_not_named(name):
    assert sectorch.explain(Of(TABLES[name]).eval(), X).problems == []
    sectorch.secure(Of(TABLES[name]).eval())(X)


@pytest.mark.parametrize(
    ("alpha", "beta", "k", "size"),
    [(256.0, 0.5, 0.0, 256), (1.0, 0.3, 0.0, 5), (1e-4, 0.75, 1e-6, 5), (1e-4, 0.75, 1.0, 5)],
)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_local_response_norm_of_a_small_k(alpha, beta, k, size, scale):
    model = nn.LocalResponseNorm(size, alpha, beta, k).eval()
    x = (torch.rand(2, 8, 3) + 0.25) * scale
    right = model(x)
    came = sectorch.secure(model)(x)
    assert (came - right).abs().max() <= 4e-6 + 1e-4 * right.abs().max()
    assert torch.equal(came, sectorch.reference(model)(x))
