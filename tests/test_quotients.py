"""Rounded quotients and whole numbers, over every number of fraction bits and the whole range: exact, or withheld."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch
from sectorch import Scheme, errors

LARGE = Scheme(frac_bits=1, limit_bits=59)
"""Whole numbers below 2^59 in magnitude."""
SCHEMES = st.integers(1, 26).flatmap(
    lambda f: st.builds(Scheme, st.just(f), limit_bits=st.sampled_from([None, 61 - 2 * f - 1]))
)


@st.composite
def quotients(draw) -> tuple[Scheme, torch.Tensor, Any, Any]:
    """A scheme, dividends over its whole range, and a divisor as plain and as given; each as it is encoded."""
    scheme = draw(SCHEMES)
    whole = draw(st.booleans())
    bits = draw(st.floats(0.5, scheme.activation_bits - 0.01))
    unit = 1.0 if whole else 2.0**-scheme.frac_bits
    values = draw(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
    x = torch.round(torch.tensor(values, dtype=torch.float64) * 2.0**bits / unit) * unit
    most = min(2.0**bits, 2.0**20)
    y = round(draw(st.floats(unit, max(most, unit))) / unit) * unit * draw(st.sampled_from([1, -1]))
    if whole:
        return scheme, x.long(), int(y), draw(st.sampled_from(["number", "tensor", "secret"]))
    return scheme, x, y, draw(st.sampled_from(["number", "tensor", "secret"]))


@given(quotients())
def test_a_rounded_quotient_is_exact_or_withheld(case):
    scheme, x, y, how = case
    secret = sectorch.share(x, scheme=scheme)
    divisor = y if how == "number" else torch.full(x.shape, y, dtype=x.dtype)
    given = sectorch.share(divisor, scheme=scheme, session=secret.session) if how == "secret" else divisor
    quotient = torch.floor(x.double() / y) if isinstance(x[0].item(), float) else x // y
    for call, expected in ((torch.floor_divide, quotient), (torch.remainder, x - quotient * y)):
        try:
            found = call(secret, given).reveal()
        except (errors.RangeExceededError, errors.FixedPointRangeError, errors.UnsupportedOpError):
            assert not (isinstance(y, int) and how == "number"), "whole numbers by a public one have no limit"
            continue
        assert torch.equal(found.double(), expected.double())


@given(
    st.lists(st.integers(-(2**59) + 1, 2**59 - 1), min_size=1, max_size=20),
    st.integers(-(2**61), 2**61).filter(bool),
    st.integers(1, 26),
)
def test_whole_numbers_by_a_public_one(values, divisor, frac_bits):
    scheme = Scheme(frac_bits, limit_bits=61 - 2 * frac_bits)
    x = torch.tensor(values) % 2 ** (61 - 2 * frac_bits) - 2 ** (60 - 2 * frac_bits)
    secret = sectorch.share(x, scheme=scheme)
    assert torch.equal((secret // divisor).reveal(), x // divisor)
    assert torch.equal((secret % divisor).reveal(), x % divisor)
    assert torch.equal(
        torch.div(secret, divisor, rounding_mode="trunc").reveal(), x.div(divisor, rounding_mode="trunc")
    )
    assert torch.equal(torch.fmod(secret, divisor).reveal(), torch.fmod(x, divisor))


def test_a_divisor_beyond_the_range():
    x = sectorch.share(torch.tensor([5, -7]), scheme=LARGE)
    for divisor in (1 << 62, -(1 << 70), 1e30, float("inf"), torch.tensor([1e30, 2.0])):
        with pytest.raises(errors.SectorchError):
            (x // divisor).reveal()


WHOLE = {
    "add": lambda x, y: x + y,
    "compare": lambda x, y: x > y,
    "equal": lambda x, y: x == y,
    "maximum": torch.maximum,
    "largest": lambda x, _: x.amax(),
    "sort": lambda x, _: x.sort().values,
    "where": lambda x, y: torch.where(x > y, x, y),
    "abs": lambda x, _: x.abs(),
    "clamp": lambda x, _: x.clamp(-5, 1 << 40),
    "isin": lambda x, y: torch.isin(x, y),
    "cumsum": lambda x, _: x.cumsum(0),
}


@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=8)
@given(st.lists(st.tuples(*2 * [st.integers(-(2**55), 2**55)]), min_size=1, max_size=8))
def test_large_whole_numbers_are_exact(name, values):
    x, y = (torch.tensor(v) for v in zip(*values, strict=True))
    a = sectorch.share(x, scheme=LARGE)
    b = sectorch.share(y, scheme=LARGE, session=a.session)
    found = WHOLE[name](a, b).reveal()
    assert torch.equal(found, WHOLE[name](x, y)), (x, y, found)
