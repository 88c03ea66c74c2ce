"""`nn.channels`: a network of scaled channels computes the same, and how many scales are free in networks in use."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import torchvision
from cases import some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sectorch.errors import ArgumentError, ChannelScaleError
from sectorch.nn import channels
from sectorch.nn.models import ZOO

VISION = {
    "alexnet": 9344, "densenet121": 52064, "googlenet": 14560, "inception_v3": 34432, "mnasnet0_5": 20128,
    "regnet_x_400mf": 31776, "resnet18": 7680, "resnext50_32x4d": 53120, "squeezenet1_1": 2944, "vgg11_bn": 13696,
    "convnext_tiny": 0, "mobilenet_v2": 0, "shufflenet_v2_x0_5": 0, "vit_b_16": 0,
}  # fmt: skip
"""Networks of torchvision, and how many scales are free in each; 0 where one of its layers is refused."""

DEEPER = ("googlenet", "inception_v3", "resnext50_32x4d", "vgg11_bn", "shufflenet_v2_x0_5")
"""More of what the others are made of: residual sums, concatenations, groups, a layer that is refused."""


def powers(count: int, roots: torch.Tensor, seed: int) -> torch.Tensor:
    scales = torch.ones(count, dtype=torch.float64)
    scales[roots] = torch.exp2(
        torch.randint(-2, 3, (len(roots),), generator=torch.Generator().manual_seed(seed)).double()
    )
    return scales


def check(model: nn.Module, *shape: int, width: int | None = None) -> int:
    """That scales which are powers of two change no digit of the output; the number of free scales."""
    found = channels(model, width)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, *shape)
    with torch.no_grad():
        expected = model(x)
        for seed in range(2):
            scaled = found.scale(state, powers(found.count, found.roots, seed))
            assert not len(found.roots) or any(not torch.equal(scaled[name], state[name]) for name in scaled)
            output = torch.func.functional_call(model, state | scaled, (x,))
            exact = not found.norm_inputs  # r^2 (var + eps) - eps rounds
            assert torch.equal(output, expected) if exact else torch.allclose(output, expected, 1e-3, 1e-3)
    return len(found.roots)


@pytest.mark.parametrize("name", some(VISION, lambda name: name not in DEEPER))
def test_networks_of_torchvision(name):
    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(weights=None, num_classes=10, **options).eval()
    if not VISION[name]:
        with pytest.raises(ChannelScaleError, match="cannot be scaled"):
            channels(model)
        return
    size = 96 if name == "inception_v3" else 64
    assert check(model, 3, size, size) == VISION[name]


@pytest.mark.parametrize("name", ["vgg7", "resnet8", "lenet", "cryptonets_relu", "mlp"])
def test_the_papers_networks(name):
    torch.manual_seed(0)
    make, shape = ZOO[name]
    assert check(make().eval(), *shape) > 0


class Net(nn.Module):
    """A function of two convolutions of one width, and a linear layer."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), between
        self.relu, self.head = nn.ReLU(), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.between(self, self.a(x)).flatten(1))


@pytest.mark.parametrize(
    "between, free",
    [
        (lambda net, x: net.b(F.relu(x)), 8),
        (lambda net, x: net.b(F.relu(x)) + x, 4),
        (lambda net, x: net.b(F.relu(net.b(x))), 4),
        (lambda net, x: net.relu(net.b(net.relu(x))), 8),
    ],
    ids=["chain", "sum", "layer used twice", "activation used twice"],
)
def test_what_shares_a_scale(between, free):
    """An activation has no weight: that it is used twice ties nothing."""
    torch.manual_seed(0)
    assert check(Net(between), 2, 4, 4) == free


def test_scales_that_are_none_are_refused():
    found = channels(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    state, scales = found.graph.state_dict(), torch.ones(found.count)
    for wrong in (scales[1:], scales * 2, scales * 0, -scales, scales * float("nan"), scales * float("inf")):
        with pytest.raises(ArgumentError, match="positive numbers, with 1 at 0"):
            found.scale(state, wrong)


class Branches(nn.Module):
    """Two inputs, a concatenation, and an output [N, C, H, W] whose channels have scale 1."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 3), nn.Conv2d(1, 5, 3)
        self.join = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 6, 1), nn.LeakyReLU(0.2))

    def forward(self, x, y):
        return self.join(torch.cat([self.left(x), self.right(y)], 1))


def test_inputs_and_outputs_have_scale_one():
    torch.manual_seed(0)
    model = Branches()
    found = channels(model)
    assert len(found.roots) == 8 and found.parameters["join.1.bias"].rows is None
    x, y = torch.randn(2, 2, 6, 6), torch.randn(2, 1, 6, 6)
    expected = model(x, y)
    scaled = found.scale(model.state_dict(), powers(found.count, found.roots, 0))
    assert torch.equal(torch.func.functional_call(model, scaled, (x, y)), expected)


def test_in_training_the_input_of_a_norm_has_scale_one():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    assert len(channels(model).roots) == 4, "gamma and beta only"
    assert len(channels(model.eval()).roots) == 8


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 1 << 20), st.booleans())
def test_chains_of_any_width(widths, seed, bias):
    torch.manual_seed(seed)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b, bias), nn.ReLU())]
    assert check(nn.Sequential(*layers), widths[0]) == sum(widths[1:-1])


@pytest.mark.parametrize(
    "model, words",
    [
        (3, r"takes a torch.nn.Module, got int"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), r"'1' \(GELU\) cannot be scaled"),
        (Net(lambda net, x: net.b(x) * x), "two scaled tensors"),
        (Net(lambda net, x: x if x.sum() > 0 else net.b(x)), "control flow"),
    ],
)
def test_what_carries_no_scale_is_named(model, words):
    with pytest.raises(ChannelScaleError, match=words):
        channels(model)
