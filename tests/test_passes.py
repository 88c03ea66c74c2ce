"""Graph passes: each changes the bytes and not the values."""

from __future__ import annotations

import random
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.mpc.star import mask, multiply, relu
from sectorch.nn import passes
from sectorch.nn.samplewise import is_samplewise


class FunctionalPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv(x)), 2)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.AvgPool2d(3)
        self.linear, self.head = nn.Linear(16, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv(x) * 0.3)).flatten(1) * -1.7
        return self.head(torch.relu(self.linear(x) / 3))


CASES = {
    "fold_batchnorm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), (2, 2, 6, 6)
    ),
    "pool_before_relu": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 2, 6, 6)),
    "pool_before_relu ": (FunctionalPool, (2, 2, 6, 6)),
    "fold_scales": (Scales, (2, 2, 6, 6)),
}  # fmt: skip


def spent(model: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    secured = sectorch.secure(model, session=sectorch.Session())
    secured(x)
    with sectorch.profile() as p:
        y = secured(x)
    return p.bytes, y


@pytest.mark.parametrize("case", CASES)
def test_pass_changes_bytes_and_not_values(case):
    torch.manual_seed(0)
    construct, shape = CASES[case]
    model = construct().eval().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.2), layer.running_var.uniform_(0.5, 1.5)
    x = torch.randn(*shape)
    with_pass, y = spent(model, x)
    with mock.patch.object(passes, case.strip(), lambda program: None):
        without, z = spent(model, x)
    assert with_pass < without
    # Values below ten, rows of at most 36 products: a few units of 2^-20 each way.
    for got in (y, z):
        assert (got - model(x)).abs().max() < 5e-5


def test_one_opening_serves_several_uses():
    x = torch.randn(64)

    def program(shared):
        return torch.relu(shared) + shared.abs() + shared * shared

    def run():
        session = sectorch.Session()
        shared = sectorch.share(x, session=session, scheme=sectorch.Scheme(range_check=False))
        with sectorch.profile() as p, session.call(session.answering[0]):
            y = program(shared)
        return p.bytes_between("A", "S"), y.reveal()

    once, y = run()

    def always(net, shares):
        return mask._open_masked(net, shares)

    with (
        mock.patch.object(relu, "open_masked", always),
        mock.patch.object(multiply, "open_masked", always),
    ):
        often, z = run()
    assert often - once == 2 * 16 * 64
    for got in (y, z):
        assert (got - program(x)).abs().max() < 1e-4


def test_a_relu_that_others_read_stays_before_the_pool():
    class Two(nn.Module):
        def forward(self, x):
            y = torch.relu(x)
            return F.max_pool2d(y, 2), y.sum()

    model, x = Two().eval(), torch.randn(1, 1, 4, 4)
    for got, expected in zip(sectorch.secure(model)(x), model(x), strict=True):
        assert (got - expected).abs().max() < 1e-4


def test_batches_are_cut_only_where_rows_do_not_meet():
    class Meets(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    x = torch.empty(2, 2)
    assert not samplewise(Meets().eval(), x)
    assert samplewise(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), x)


def samplewise(model: nn.Module, x: torch.Tensor) -> bool:
    return is_samplewise(sectorch.secure(model).program(x))


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(SEEDS)
def test_layers_with_other_readers_and_other_axes(seed: int):
    """BatchNorm on a third axis, tied and transposed weights, and scales beside them."""
    draw, number = random.Random(seed), random.Random(seed).choice([0.3, -1.7, 3.0])
    kind = draw.randrange(4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.norm.running_mean.copy_(torch.arange(4) * 0.3)
            self.norm.running_var.copy_(torch.tensor([0.1, 1, 4, 9]))
            if draw.random() < 0.5:
                self.b.weight = self.a.weight

        def forward(self, x):
            if kind == 0:
                return self.norm(self.a(x)) * number
            if kind == 1:
                return F.linear(self.norm(self.a(x.flatten(0, 1))).relu(), self.a.weight.t())
            if kind == 2:
                return self.a(x) * number + self.b(x)
            h = self.a(x)
            return F.linear(h / number, self.b.weight[:2]) + h[..., :2]

    torch.manual_seed(seed)
    model, x = Model().eval().requires_grad_(False), torch.randn(2, 4, 4)
    secured = sectorch.reference(model)
    assert secured.program(x) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = secured(x)
    # Values below ten and rows of four products, a few units of 2^-20 each, times at most 3.2 by the smallest variance.
    assert (got - model(x)).abs().max() < 1e-4
