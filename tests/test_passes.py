"""Graph passes: each changes the bytes and not the values."""

from __future__ import annotations

import contextlib
import copy
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
from sectorch.mpc.star import masking, multiply, relu
from sectorch.nn import passes
from sectorch.nn.graph import is_samplewise


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
        return masking._open_masked(net, shares)

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


APART = {
    "sum": lambda x, w: x.sum(1), "sums": lambda x, w: x.sum((-1, 1)), "argmax": lambda x, w: x.argmax(-1),
    "unsqueeze": lambda x, w: x.unsqueeze(-1) + x.unsqueeze(1).sum(1).unsqueeze(-1),
    "pad": lambda x, w: F.pad(x, (0, 0, 1, 0)), "pick": lambda x, w: x.index_select(1, torch.tensor([2, 0])),
    "squeeze": lambda x, w: x.sum(1, keepdim=True).squeeze(1), "div": lambda x, w: x / 3,
    "to": lambda x, w: (x > 0).to(torch.int64), "more than": lambda x, w: x > w[0, :3],
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x.sum(1), w),
}  # fmt: skip
MEET = {
    "sum": lambda x, w: x.sum(0, keepdim=True) + x, "sum of all": lambda x, w: x.sum() + x,
    "sums": lambda x, w: x.sum((0, 1)) + x, "sum from the end": lambda x, w: x.sum(-3) + x,
    "argmax": lambda x, w: x.argmax(0) + x, "argmax of all": lambda x, w: x.argmax() + x,
    "unsqueeze": lambda x, w: x.unsqueeze(0) + x, "unsqueeze from the end": lambda x, w: x.unsqueeze(-4) + x,
    "pad": lambda x, w: F.pad(x, (0, 0, 0, 0, 0, 1)), "div": lambda x, w: x / (1 + x.abs().sum(0)),
    "more than": lambda x, w: x > x.sum(0), "einsum": lambda x, w: torch.einsum("bij,bk->ijk", x, w[:, :3]),
    "einsum of two": lambda x, w: torch.einsum("bij,cij->bc", x, x),
    "roll": lambda x, w: x.roll(1, 0),
}  # fmt: skip


@pytest.mark.parametrize("meet", [False, True])
def test_each_function_that_is_known_keeps_rows_apart_or_not(meet: bool):
    """Three rows of [3, 3], so that no shape tells the rows' dimension from another."""
    for name, f in (MEET if meet else APART).items():

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.ones(3, 4))

            def forward(self, x):
                return f(x, self.w)

        assert samplewise(Net().eval(), torch.rand(3, 3, 3)) is not meet, name


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


HALF = 2.0**-21
WEIGHTS, FACTORS = (1e-6, 1e-3, 0.1, 30.0), (1e-4, 1 / 4000, 1 / 255, -0.3, 0.9, 1.7, 12.0, -70.0, 1e3, 1e4)


class Beside(nn.Module):
    """A public factor before or after a layer, which errs by `bound` at most where no pass is applied."""

    def __init__(self, size: float, factor: float, before: bool, divides: bool):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.layer.weight.copy_(torch.randn(4, 8).sign() * size)
        self.factor, self.before, self.divides = factor, before, divides

    def times(self, x):
        return x / (1 / self.factor) if self.divides else x * self.factor

    def forward(self, x):
        return self.layer(self.times(x)) if self.before else self.times(self.layer(x))

    def bound(self, x):
        weight, factor = self.layer.weight.double().abs(), abs(self.factor)
        if self.before:
            scaled = x.double().abs() * factor
            rounded = (factor + 2) * HALF + scaled * 2 * HALF
            return rounded @ weight.T + (scaled + rounded).sum(-1, keepdim=True) * HALF + 4 * HALF
        layer = HALF * (weight.sum(1) + x.double().abs().sum(-1, keepdim=True) + 4)
        return factor * layer + self.layer(x).double().abs() * 2 * HALF * factor + 4 * HALF


class Normed(nn.Module):
    """BatchNorm after a layer. Folded, the weights are rounded after they are scaled, and else before."""

    def __init__(self, size: float, deviation: float):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.layer.weight.copy_(torch.randn(4, 8).sign() * size)
        self.norm.running_var.fill_(deviation**2)
        self.norm.running_mean.normal_(0, size)

    def forward(self, x):
        return self.norm(self.layer(x))

    def bound(self, x):
        weight, ones = self.layer.weight.double().abs(), x.double().abs().sum(-1, keepdim=True)
        gain = (self.norm.running_var.double() + self.norm.eps).rsqrt()
        layer = HALF * (weight.sum(1) + ones + 4)
        apart = gain * layer + (self.layer(x).double().abs() + 8) * HALF
        return apart + HALF * (ones + 4 + weight.sum(1) * gain)


class Averaged(nn.Module):
    """A layer after the mean of nine. Half of the last place of 9/16 may be lost for each of its inputs."""

    def __init__(self, size: float):
        super().__init__()
        self.layer, self.pool = nn.Linear(8, 4), nn.AvgPool2d(3)
        self.layer.weight.copy_(torch.randn(4, 8).sign() * size)

    def forward(self, x):
        return self.layer(self.pool(x.reshape(-1, 8, 1, 1).expand(-1, 8, 3, 3)).flatten(1))

    def bound(self, x):
        weight, size = self.layer.weight.double().abs(), x.double().abs()
        return (size + 3) * 2 * HALF @ weight.T + (size.sum(-1, keepdim=True) + 4) * HALF


def beside(weights, factors):
    for size in weights:
        yield size, f"average, {size}", lambda size=size: Averaged(size)
        for factor in factors:
            if abs(factor) <= 1e3:
                yield size / factor, f"norm, {size} {factor}", lambda s=size, f=factor: Normed(s, abs(f))
            for before in (False, True):
                for divides in (False, True):
                    name = f"{size} {factor} {before=} {divides=}"
                    yield size * factor, name, lambda s=size, f=factor, b=before, d=divides: Beside(s, f, b, d)


def apart_from_plain(weights, factors) -> list[str]:
    """Which layers with a factor beside them err by more than the bound, with the passes or without."""
    wrong = []
    for gain, name, construct in beside(weights, factors):
        torch.manual_seed(0)
        with torch.no_grad():
            model = construct().eval()
            factor = abs(getattr(model, "factor", 1.0))
            x = torch.rand(4, 8) * min(
                1000.0, 1000 / max(factor, 1) / max(1, 8 * float(model.layer.weight.abs().max()))
            )
            expected, bound = copy.deepcopy(model).double()(x.double()), model.bound(x)
            for passes_too in (True, False):
                off = {p: lambda program: None for p in passes.PASSES} if not passes_too else {}
                with mock.patch.multiple(passes, **off) if off else contextlib.nullcontext():
                    try:
                        y = sectorch.reference(model)(x)
                    except sectorch.errors.FixedPointRangeError:
                        # The weights of one output may sum to 504, with a factor of up to 16 folded in.
                        assert 8 * abs(gain) > 504 / 16, name
                        continue
                excess = ((y.double() - expected).abs() - bound - 2.0**-23 * expected.abs()).max()
                if excess > 0:
                    wrong.append(f"{name} {passes_too=}: {float(excess)} beyond {float(bound.max())}")
    return wrong


def test_passes_keep_the_precision_of_a_few_layers_with_factors():
    assert not apart_from_plain((1e-3,), (1 / 4000, 12.0))


@pytest.mark.sectorch_long
def test_passes_keep_the_precision_of_layers_with_factors():
    assert not apart_from_plain(WEIGHTS, FACTORS)


def test_the_sweep_finds_small_factors_that_are_folded(monkeypatch):
    monkeypatch.setattr(passes, "_split", lambda factor, most: (factor, 0))
    assert apart_from_plain((1e-3,), (1 / 4000,))
