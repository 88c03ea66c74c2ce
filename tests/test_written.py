"""Secrets written into tensors that a forward makes, in a program and operation by operation; random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sectorch
from sectorch.errors import NonFiniteError, SectorchError, UnsupportedOpError


class Writer(nn.Module):
    def __init__(self, body: Callable, alone: bool):
        super().__init__()
        self.layer, self.body, self.alone, self.kept = nn.Linear(4, 4), body, alone, None

    def forward(self, x):
        if self.alone:
            torch.rand(1)  # a module that draws runs operation by operation
        return self.body(self, x, self.layer(x))


def row_by_row(_module, x, y):
    out = torch.zeros(x.shape[0], 3, 4)
    for i in range(3):
        out[:, i] = torch.relu(y + i)
    return out * 2


def under_another_name(_module, _x, y):
    out = torch.ones(2, 4)
    other = out
    out[0] = y[0]
    return other + 1, {"out": out}


def added_up(_module, x, y):
    out = x.new_zeros(x.shape)
    out += y
    return out.add_(y)


def whole_numbers(_module, _x, y):
    out = torch.zeros(2, 4, dtype=torch.int64)
    out[1] = y[0] > 0
    return out.sum(0)


def empty(_module, _x, y):
    out = torch.empty_like(y)
    out.copy_(y)
    return out.sum(0), y.new_empty(2, 2).fill_(y[0, 0])


def frequencies(_module, _x, y):
    out = torch.zeros(3, 3, dtype=torch.complex64)
    out[:, :2] = torch.fft.rfft(y)[:, :2]
    return torch.fft.irfft(out, n=4)


RIGHT = (row_by_row, under_another_name, added_up, whole_numbers, empty, frequencies)


def view_before(_module, x, y):
    out = torch.zeros(2, 4)
    view = out[0]
    out[0] = y[0]
    return torch.where(view > 0, x[0], y[0])


def array_before(_module, x, y):
    out = torch.zeros(2, 4)
    array = out.numpy()
    out[0] = y[0]
    return y + torch.from_numpy(array)[0]


def into_a_view(_module, _x, y):
    out = torch.zeros(3, 4)
    out[:, 0] += y[:, 0]
    return out


def rounded(_module, _x, y):
    out = torch.zeros(2, 4, dtype=torch.int64)
    out[0] = y[0]
    return out


def into_a_buffer(module, _x, y):
    module.kept[0] = y[0]
    return y


def by_a_mask(_module, _x, y):
    out = torch.zeros(3, 4)
    out[y > 0] = 1.0
    return y + out


REFUSED = (view_before, array_before, into_a_view, rounded, into_a_buffer, by_a_mask)


def made(body: Callable, alone: bool) -> tuple[Writer, torch.Tensor]:
    torch.manual_seed(0)
    return Writer(body, alone).eval(), torch.randn(3, 4)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("body", RIGHT)
def test_a_tensor_that_the_forward_makes_takes_secrets(body: Callable, alone: bool):
    plain, x = made(body, alone)
    secure = sectorch.secure(plain)
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(plain(x))
    found = torch.utils._pytree.tree_leaves(secure(x))
    assert (secure.traces.alone is None) != alone
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert float((a.double() - b.double()).abs().max()) < 1e-4


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("body", REFUSED)
def test_what_others_would_see_unwritten_is_refused(body: Callable, alone: bool):
    plain, x = made(body, alone)
    plain.kept = torch.zeros(2, 4)
    with pytest.raises(UnsupportedOpError, match=r"where it cannot stay secret|torch\.where"):
        sectorch.secure(plain)(x)


def test_a_later_call_does_not_read_it_unwritten():
    def body(module, _x, y):
        if module.kept is not None:
            return module.kept + y[0]
        module.kept = torch.zeros(4)
        module.kept[0] = y[0, 0]
        return module.kept

    plain, x = made(body, False)
    secure = sectorch.secure(plain)
    secure(x)
    with pytest.raises(NonFiniteError):
        secure(x)


@pytest.mark.parametrize(
    "draw", [torch.randn_like, torch.rand_like, torch.bernoulli, lambda y: torch.normal(y, 1.0), lambda y: y.uniform_()]
)
def test_random_numbers_say_whose_they_are(draw: Callable):
    for alone in (False, True):
        plain, x = made(lambda _module, _x, y: y + draw(y), alone)
        with pytest.raises(SectorchError, match="as an input"):
            sectorch.secure(plain)(x)
