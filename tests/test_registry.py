"""A user's own operation: dispatched, explained, listed, prepared, run by the reference, and held to what it says."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import sectorch
from sectorch import errors
from sectorch.ops.registry import REGISTERED
from sectorch.tensor import SharedTensor
from sectorch.tensor.table import SHARES
from sectorch.testing import check_op


@contextlib.contextmanager
def registered(func, f, **stated):
    """An operation of this test only; the library's own is back after it."""
    own = SHARES.row_of.get(func), SHARES.handler.get(func)
    sectorch.register_op(func, **stated)(f)
    try:
        yield func
    finally:
        SHARES._release(func)
        del REGISTERED[func]
        if own[1] is not None:
            SHARES.implements(own[0].name, func)(own[1])


def entr(x):
    return -x * torch.log(x)


class Entropy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return torch.special.entr(torch.softmax(self.layer(x), -1) * 0.9 + 0.05).sum(-1)


def test_an_operation_of_a_users_file():
    model, x = Entropy().eval(), torch.randn(3, 5)
    with pytest.raises(errors.UnsupportedOpError, match=r"special.entr|special_entr"):
        sectorch.secure(model, session=sectorch.Session())(x)
    with registered(torch.special.entr, entr, domain=(2.0**-10, 1.0), error=1e-5, note="of probabilities"):
        secured = sectorch.secure(model, session=sectorch.Session())
        y = secured(x)
        torch.testing.assert_close(y, model(x), rtol=0, atol=1e-4)
        assert torch.equal(y, sectorch.reference(model)(x))
        secured.preprocess(3)
        assert torch.equal(secured(x), y)
        (row,) = [row for row in sectorch.supported_ops() if row["kind"] == __name__.rsplit(".", 1)[-1]]
        assert row["note"] == "of probabilities" and not row["exact"] and "entr" in row["name"]
        assert "entr" in str(sectorch.explain(model, x))
        assert check_op(torch.special.entr, examples=12) < 1e-5
        half = torch.special.entr(sectorch.share(torch.tensor([0.5]))).reveal()
        torch.testing.assert_close(half, torch.special.entr(torch.tensor([0.5])), rtol=0, atol=1e-5)
    with pytest.raises(errors.UnsupportedOpError):
        torch.special.entr(sectorch.share(torch.ones(1)))


def shifted(x: SharedTensor) -> SharedTensor:
    """max(x, 0) by one method of the backend."""
    return x.like(x.backend.ramps(x.shares, (0,))[0], bound=x.bound)


def positive(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(positive, (x,), x)
    return x.clamp(min=0)


def test_an_operation_of_ones_own_function_made_of_a_protocol():
    """Anybody's function that goes through __torch_function__ may be one; this one is exact, in five rounds."""
    with registered(positive, shifted, error=0, rounds=5, bytes=32, exact=True):
        assert check_op(positive) == 0


def test_what_an_operation_says_of_itself_is_held_against_it():
    """A wrong result, an error that is too small, a domain that is too wide, a cost that is too low, another shape."""

    def fails(f, message, **stated):
        with registered(torch.special.entr, f, **stated), pytest.raises(AssertionError, match=message):
            check_op(torch.special.entr)

    domain = (2.0**-10, 1.0)
    fails(lambda x: -x * torch.log2(x), "is stated", domain=domain, error=1e-4)
    fails(entr, "is stated", domain=domain, error=1e-9)
    fails(lambda x: x - x * x, "is stated", domain=domain, error=0.05)
    fails(entr, "rounds online, and 3 are stated", domain=domain, error=1e-4, rounds=3)
    fails(entr, "bytes online per element, and 5 are stated", domain=domain, error=1e-4, bytes=5)
    # Torch itself gives -inf below zero: a finite result there is not within any error.
    fails(lambda x: x * 0, "is stated", domain=(-1.0, 1.0), error=1e3)
    with registered(torch.special.entr, lambda x: entr(x).sum(), domain=domain, error=1e-4):
        with pytest.raises((AssertionError, errors.SectorchError)):
            check_op(torch.special.entr)


def test_several_operands_and_arguments():
    with registered(positive, shifted, error=0), pytest.raises(errors.ArgumentError, match="was not registered"):
        check_op(torch.special.entr)
    with registered(torch.special.xlogy, lambda x, y: x * torch.log(y), domain=(2.0**-8, 8.0), error=2e-4,
                    override=True):  # fmt: skip
        check_op(torch.special.xlogy, operands=2, examples=12)
    with registered(torch.dist, lambda x, y, p=2: (x - y).abs().sum(), domain=(-8, 8), error=1e-3, override=True):
        assert check_op(torch.dist, operands=2, examples=6, arguments={"p": 1}) < 1e-3


@pytest.mark.parametrize(
    ("given", "stated", "message"),
    [
        (torch.relu, {"error": 0}, "has a handler"),
        (3, {"error": 0}, "takes a torch function, got a int"),
        (torch.special.entr, {"error": -1}, "an error is at least 0"),
        (torch.special.entr, {"error": float("nan")}, "an error is at least 0"),
        (torch.special.entr, {"error": 0, "domain": (1, 1)}, "a domain goes from"),
    ],
)
def test_what_cannot_be_registered(given, stated, message):
    before = dict(SHARES.rows)
    with pytest.raises(errors.ArgumentError, match=message):
        sectorch.register_op(given, **stated)(entr)
    assert SHARES.rows == before and given not in REGISTERED


def test_a_function_that_gives_no_secret_tensor():
    with registered(torch.special.entr, lambda x: 3.0, error=0):
        with pytest.raises(errors.UnsupportedOpError, match="it has to give a SharedTensor"):
            torch.special.entr(sectorch.share(torch.ones(2)))


def test_a_result_of_yes_and_no():
    def near(x):
        return (x * 2 > 1) * (x * 2 < 3)

    def inside(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(inside, (x,), x)
        return ((x > 0.5) & (x < 1.5)).to(torch.int64)

    with registered(inside, lambda x: near(x).to(torch.int64), error=0, exact=True):
        assert check_op(inside, examples=12) == 0
