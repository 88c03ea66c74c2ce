"""Whole numbers of few bits: where they leave their dtype they wrap as torch's do, and what would not is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch import errors
from sectorch.session import Session

WIDE = sectorch.Scheme(8, limit_bits=40)
VALUES = {
    torch.int8: [100, -128, 50, 7],
    torch.uint8: [200, 3, 250, 0],
    torch.int16: [30000, -32768, 5, 1],
    torch.int32: [2_000_000, -2_000_000, 5, 1],
}
LEAVE = {
    "add": lambda x: x + x,
    "add a number": lambda x: x + 100,
    "subtract": lambda x: x - x.flip(0),
    "subtract a number": lambda x: x - 10,
    "from a number": lambda x: 1 - x,
    "neg": lambda x: -x,
    "abs": lambda x: x.abs(),
    "triple": lambda x: x * 3,
    "alpha": lambda x: torch.add(x, x, alpha=3),
    "in place": lambda x: x.clone().add_(x),
    "a view": lambda x: (x + x).view(2, 2).t().reshape(-1),
    "sum": lambda x: x.sum(0, keepdim=True, dtype=x.dtype).expand(4),
    "cumsum": lambda x: x.cumsum(0, dtype=x.dtype),
    "quotient": lambda x: (x - 10) // 3,
}
READ = {
    "as it is": lambda y: y,
    "twice": lambda y: (y + y, (y + y) > 0),
    "long": lambda y: y.long(),
    "float": lambda y: y.float() / 2,
    "above": lambda y: y > 10,
    "equal": lambda y: y == 0,
    "total": lambda y: y.sum(),
    "choice": lambda y: torch.where(y > 0, y, torch.zeros_like(y)),
    "quotient": lambda y: y // 2,
    "remainder": lambda y: y % 7,
    "fraction": lambda y: y * 0.5,
    "position": lambda y: y.argmax(),
    "order": lambda y: y.sort().values,
    "zero": lambda y: y.bool(),
    "joined": lambda y: torch.cat([y, torch.zeros(1)]),
    "clamped": lambda y: y.clamp(0, 100),
}


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def function(f: Callable[..., Any]) -> nn.Module:
    return Function(f).eval()


def flat(result: Any) -> list[torch.Tensor]:
    return [leaf for part in result for leaf in (part if isinstance(part, tuple) else (part,))]


@pytest.mark.parametrize("dtype", VALUES)
def test_what_leaves_its_dtype_is_read_as_torch_reads_it(dtype):
    x, wrong = torch.tensor(VALUES[dtype], dtype=dtype), []
    for left, leave in LEAVE.items():
        model = function(lambda x, leave=leave: tuple(read(leave(x)) for read in READ.values()))
        for given in (x, x.flip(0)):
            results = zip(flat(sectorch.reference(model, WIDE)(given)), flat(model(given)), strict=True)
            for at, (got, want) in enumerate(results):
                if got.dtype != want.dtype or not torch.allclose(got.double(), want.double(), rtol=1e-6, atol=1e-5):
                    wrong.append((left, at, got.tolist(), want.tolist()))
    assert not wrong


ALL = (torch.float32, torch.float64, torch.int64, torch.bool, *VALUES)
FLOATS = {
    "a bound that cuts nothing": lambda x: x.clamp(max=float("inf")),
    "a bound beyond the range": lambda x: x.clamp(min=-1e10, max=1e10),
    "a bound in a tensor": lambda x: x.clamp(max=torch.tensor(1e10)),
    "padding": lambda x: F.pad(x, (1, 2), value=3.5),
    "padding below zero": lambda x: F.pad(x, (1, 0), value=-0.5),
    "powers of two": lambda x: 2 ** (x != 0),
    "powers of a negative number": lambda x: (-2) ** (x > 0),
    "powers of one": lambda x: torch.pow(-1, x > 0),
    "shifted": lambda x: torch.bitwise_left_shift(x > 0, 1),
    "filled by infinity": lambda x: x.masked_fill(x > 0, float("-inf")) > 0,
    "filled by a number beyond": lambda x: x.masked_fill(x > 0, 1e10) > 0,
    "a truth value by infinity": lambda x: (x > 0) * float("inf"),
    "written by infinity": lambda x: x.clone().fill_(float("inf")),
}


@pytest.mark.parametrize("name", FLOATS)
def test_whole_numbers_that_meet_floats(name):
    """torch's value and dtype, or an error of ours; what torch refuses may be taken, unless it cannot be read."""
    for dtype in ALL:
        values = VALUES.get(dtype, [1, -2, 0, 3])
        x = torch.tensor(values, dtype=torch.float64).to(dtype)
        try:
            got = FLOATS[name](sectorch.share(x, session=Session(reference=True))).reveal()
        except errors.SectorchError:
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError):
            want = FLOATS[name](x)
            assert got.dtype == want.dtype and torch.equal(got.double(), want.double()), (dtype, got, want)


def test_shares_wrap_as_the_reference_does():
    model = function(lambda x: ((x - 10).float(), (x + x) > 100, x))
    x = torch.tensor(VALUES[torch.uint8], dtype=torch.uint8)
    pairs = zip(sectorch.secure(model)(x), model(x), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)
    shared: Any = sectorch.share(x) - 10
    assert torch.equal((shared > 100).reveal(), (x - 10) > 100)
    assert torch.equal(shared.reveal(), x - 10)


def test_inputs_in_their_dtype_cost_no_truncation():
    x = torch.tensor(VALUES[torch.uint8], dtype=torch.uint8)
    sent = []
    for given in (x, x.long()):
        shared = sectorch.share(given)
        with sectorch.profile() as profile:
            shared.float()
        sent.append(profile.bytes)
    assert sent == [0, 0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x > -1,
        lambda x: x == 300,
        lambda x: x // -3,
        lambda x: x % -3,
        lambda x: torch.fmod(x, torch.tensor(-3)),
        lambda x: torch.div(x, -3, rounding_mode="trunc"),
        lambda x: x.clamp(min=-5),
        lambda x: x < 2**40,
    ],
)
def test_a_number_that_the_dtype_does_not_hold_is_refused(f):
    """torch takes -1 for 255 beside uint8, so that no uint8 is above -1."""
    x = torch.tensor(VALUES[torch.uint8], dtype=torch.uint8)
    with pytest.raises(errors.SectorchError, match=r"modulo 2\^8"):
        sectorch.reference(function(f))(x)
    wide = function(lambda x: f(x.long()))
    assert torch.equal(sectorch.reference(wide)(x), wide(x))


def test_whole_numbers_beyond_the_range_lose_no_digits():
    """A float that is added to 2^30 is smaller than its last place; a whole number is not."""
    days = torch.tensor([200, 3, 255])
    with pytest.raises(errors.FixedPointRangeError, match="limit_bits=59"):
        sectorch.reference(function(lambda x: x + 2**30))(days)
    exact = sectorch.reference(function(lambda x: x + 2**30), sectorch.Scheme(1, limit_bits=59))
    assert torch.equal(exact(days), days + 2**30)
    assert sectorch.reference(function(lambda x: (x > 2**30, x.masked_fill(x > 100, 2**30))))(days)[1].max() == 2**30
    flags = function(lambda x: (x > 2).masked_fill(x > 100, 2**40))
    assert torch.equal(sectorch.reference(flags)(days), flags(days))


def test_a_hook_sees_whether_an_argument_was_given_by_name():
    layer = nn.Linear(4, 2).eval()
    layer.register_forward_pre_hook(lambda _, args, kwargs: (tuple(2 * a for a in args), kwargs), with_kwargs=True)
    x = torch.rand(3, 4)
    secure = sectorch.reference(layer)
    for got, want in ((secure(x), layer(x)), (secure(input=x), layer(input=x)), (secure(x), layer(x))):
        assert torch.allclose(got, want, atol=1e-4)
