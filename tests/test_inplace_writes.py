"""Secrets written into tensors that a forward makes, in a program and operation by operation; random numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from cases import by_turns
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


def view_before(_module, x, y):
    out = torch.zeros(2, 4)
    view = out[0]
    out[0] = y[0]
    return torch.where(view > 0, x[0], y[0])


def into_a_view(_module, _x, y):
    out = torch.zeros(3, 4)
    out[:, 0] += y[:, 0]
    seen = out[1]
    out[1, 2] = y[0, 0]
    return out, seen


def into_overlapping_views(_module, _x, y):
    out = torch.zeros(3, 4)
    first, last = out[:2], out[1:]
    first.add_(y[:2])
    last.sub_(y[1:] * 2)
    return out, first, last


def into_a_view_of_a_view(_module, _x, y):
    out = torch.zeros(2, 3, 4)
    inner = out[0]
    inner[1] += y[1]
    inner[2].copy_(y[2])
    return out, inner


def loops_and_corners(_module, _x, y):
    out, wide = torch.zeros(3, 4), y.new_full((4, 5), 0.0)
    for i in range(3):
        out[i] += y[i]
    wide[:3, :4].copy_(y)
    return out, wide


def into_a_view_of_whole_numbers(_module, _x, y):
    out = torch.zeros(3, 4, dtype=torch.int64)
    out[0] += y[0] > 0
    return out


def by_a_mask(_module, _x, y):
    out = torch.zeros(3, 4)
    out[y > 0] = 1.0
    return y + out


RIGHT = (
    row_by_row, under_another_name, added_up, whole_numbers, empty, frequencies, view_before, into_a_view,
    into_overlapping_views, into_a_view_of_a_view, loops_and_corners, into_a_view_of_whole_numbers, by_a_mask,
)  # fmt: skip


def array_before(_module, x, y):
    out = torch.zeros(2, 4)
    array = out.numpy()
    out[0] = y[0]
    return y + torch.from_numpy(array)[0]


def rounded(_module, _x, y):
    out = torch.zeros(2, 4, dtype=torch.int64)
    out[0] = y[0]
    return out


def into_a_buffer(module, _x, y):
    module.kept[0] = y[0]
    return y


def several_by_a_mask(_module, _x, y):
    y[y > 0] = y[y > 0] * 2
    return y


REFUSED = (array_before, rounded, into_a_buffer, several_by_a_mask)


def made(body: Callable, alone: bool) -> tuple[Writer, torch.Tensor]:
    torch.manual_seed(0)
    return Writer(body, alone).eval(), torch.randn(3, 4)


@by_turns(body=RIGHT, alone=[False, True])
def test_a_tensor_that_the_forward_makes_takes_secrets(body: Callable, alone: bool):
    plain, x = made(body, alone)
    secure = sectorch.secure(plain)
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(plain(x))
    found = torch.utils._pytree.tree_leaves(secure(x))
    assert (secure.graphs.eager_reason is None) != alone
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert float((a.double() - b.double()).abs().max()) < 1e-4
    if not alone:
        for a, b in zip(found, torch.utils._pytree.tree_leaves(sectorch.reference(plain)(x)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("body", REFUSED)
def test_what_others_would_see_unwritten_is_refused(body: Callable, alone: bool):
    plain, x = made(body, alone)
    plain.kept = torch.zeros(2, 4)
    with pytest.raises(UnsupportedOpError, match=r"where it cannot stay secret|torch\.where"):
        sectorch.secure(plain)(x)


def sliced(_module, _x, y):
    y[:, 1:] += y[:, :1]
    y[..., 2:] *= 2
    return y


def added_to_a_view(_module, _x, y):
    view = y.view(-1)[2:7]
    view.add_(1)
    view.mul_(y[0, 0])
    return y, view


def base_and_views(_module, _x, y):
    column, across = y[:, 1], y.t()
    y[1] = 0.0
    y.mul_(2)
    return y, column, across


def through_several_views(_module, _x, y):
    y.t()[1:][0].unsqueeze(0).relu_()
    torch.atleast_2d(y[0]).mul_(2)
    torch.hsplit(y, 2)[0].neg_()
    y[:3, :3].diagonal().zero_()
    return y


def by_data(_module, _x, y):
    y.data.mul_(2)
    return y


def by_positions(_module, _x, y):
    y[:, torch.tensor([0, 2])] *= 3
    y[torch.tensor([True, False, True])] += 1
    y[:, :2].masked_fill_(torch.tensor([True, False]), 2.0)
    y[0].scatter_add_(0, torch.tensor([0, 0]), y[1, :2].clone())
    return y


def parts(_module, _x, y):
    first, last = y.split(2, 1)
    first.mul_(2)
    last += first
    for row in y.unbind(0):
        row.clamp_(min=0)
    for row in y:
        row.mul_(3)
    return y


def expanded_before(_module, _x, y):
    wide = y[:1].expand(3, 4)
    y[0] = 1.0
    return wide


def scanned(_module, _x, y):
    grid = y.clone().view(3, 2, 2)
    grid[:, :, 1].add_(grid[:, :, 0])
    grid[:, 1:] *= grid[:, :1]
    return grid


def by_keyword(_module, _x, y):
    torch.nn.functional.relu(y[:, 1:], inplace=True)
    y[0].fill_(y[1, 1])
    y[1].zero_()
    return y


END = float("-inf")


def minus_infinity_in_a_view(_module, _x, y):
    y[:, :2].masked_fill_(torch.tensor([True, False]), END)
    across = y.t()
    across += torch.tensor([0.0, 0.0, END, 0.0])[:, None]
    return y.softmax(1)


def minus_infinity_beside_a_view(_module, _x, y):
    row, other = y[1], y.clone()
    seen = other[0]
    y[:, 0] = END
    other.masked_fill_(torch.eye(3, 4).bool(), END)
    return row.softmax(0), y.softmax(1), seen.isinf(), other.amax(1)


def numbers_over_minus_infinity(_module, _x, y):
    out, rows = y.new_full((3, 4), END), torch.full((3, 4), END)
    out[:, 1:].copy_(y[:, 1:])
    rows[0] = y[0]
    rows[1:, 0] = y[1:, 1]
    return out.softmax(1), rows.softmax(1)


def of_the_shape_of_another(_module, _x, y):
    other = y.clone()
    column, same = y[:, -1:], y.view_as(other)
    wide = y[0].expand_as(other)
    column.mul_(2)
    y[1].zero_()
    return y, same, wide


def copied_by_a_conversion(_module, _x, y):
    kept = y.to(torch.float32, copy=True)
    y[0] = 0.0
    kept[1] = 1.0
    return y, kept


VIEWS = (sliced, added_to_a_view, base_and_views, through_several_views, by_data, by_positions, parts, expanded_before,
         scanned, by_keyword, minus_infinity_in_a_view, minus_infinity_beside_a_view, numbers_over_minus_infinity,
         of_the_shape_of_another, copied_by_a_conversion)  # fmt: skip


@by_turns(body=VIEWS, alone=[False, True])
def test_a_write_into_a_view_is_seen_by_all_of_its_memory(body: Callable, alone: bool):
    test_a_tensor_that_the_forward_makes_takes_secrets(body, alone)


def copied_or_not(_module, _x, y):
    turned = y.t().contiguous()
    turned.add_(1)
    return y, turned


def mixed_views(_module, _x, y):
    column = y[:, -1:]
    mesh = torch.meshgrid(y[0], y[1], indexing="ij")
    column.mul_(2)
    return mesh


def overlapping_itself(_module, _x, y):
    y[:1].expand(3, 4).add_(1)
    return y


@pytest.mark.parametrize("alone", [False, True])
def test_a_write_that_torch_refuses_or_that_hangs_on_strides(alone: bool):
    """torch writes into no memory twice; operation by operation nobody knows whether `contiguous` makes a copy."""
    for body in (overlapping_itself, *((copied_or_not, mixed_views) if alone else ())):
        plain, x = made(body, alone)
        with pytest.raises(SectorchError, match=r"out of place|more than one element"):
            sectorch.secure(plain)(x)
    if not alone:
        test_a_tensor_that_the_forward_makes_takes_secrets(copied_or_not, False)


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


MASKS = (
    lambda y: y > 0, lambda y: y[:, 0, 0] > 0, lambda y: (slice(None), y[0] > 0), lambda y: (None, y > 0),
    lambda y: (slice(None), y[0, :, 0] > 0, slice(1)), lambda y: y.sum() > 0, lambda y: y[:2] > 0, lambda y: y != y,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_number_written_by_a_secret_mask_is_torchs_or_refused(dtype: torch.dtype):
    x = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(2)) * 3
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    right = 0
    for mask, value in itertools.product(MASKS, (0.0, -1, 1.5, float("inf"), float("nan"), True, 1e9)):
        plain, secret = x.clone(), sectorch.share(x)
        with contextlib.suppress(IndexError, RuntimeError):
            plain[mask(plain)] = value
        try:
            secret[mask(secret)] = value
            found = secret.reveal()
        except SectorchError:
            continue
        assert torch.allclose(found.double(), plain.double(), atol=1e-5), (mask, value)
        right += 1
    assert right >= len(MASKS) - 1
