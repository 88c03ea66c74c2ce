"""`network="wan"`: the same results by keys instead of trees, in few rounds, and `explain` knows what they cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch.errors import ArgumentError
from sectorch.nn.models import ZOO
from sectorch.tensor import Scheme, share_tensor


@pytest.mark.parametrize(("check", "rounds"), [pytest.param(False, 29, marks=pytest.mark.sectorch_long), (True, 30)])
def test_vgg7_in_few_rounds(check: bool, rounds: int):
    torch.manual_seed(0)
    construct, shape = ZOO["vgg7"]
    model, x = construct().eval(), torch.randn(1, *shape)
    secured = sectorch.secure(model, Scheme(network="wan", range_check=check), session=sectorch.Session())
    with sectorch.profile() as p:
        y = secured(x)
    with torch.no_grad():
        expected = model(x)
    assert p.rounds <= rounds
    assert (y - expected).abs().max() <= 1e-4
    assert torch.equal(y.argmax(1), expected.argmax(1))
    if not check:
        return
    explained = sectorch.explain(model, x, Scheme(network="wan"))
    assert (explained.rounds, explained.bytes) == (p.rounds, p.bytes)


def test_key_bytes_of_a_relu():
    """For the borrow 20 levels with one word of payload, for the ReLU of the rest 43 with two; and one more each."""
    n = 640
    secured = sectorch.secure(nn.Sequential(nn.Linear(8, n), nn.ReLU()).eval(), Scheme(network="wan"))
    secured(torch.zeros(1, 8))
    with sectorch.profile() as p:
        secured(torch.zeros(1, 8))
    keys = {label: sum(m.bytes for m in p.ledger if m.label == label) for label in ("seeds", "values")}
    assert keys == {"seeds": (20 + 43) * 16 * n, "values": 21 * 8 * n + 44 * 16 * n}
    assert p.bytes_between("S", "A") > sum(keys.values())


X = torch.cat([torch.linspace(-8, 8, 61), torch.tensor([0.0, 1e-5, -1e-5])]).view(8, 8)
X = torch.round(X * 2**20) / 2**20  # so that no input is rounded, and signs are exact
FUNCTIONS = {
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "abs": torch.abs,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1.5, 2),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "amax": lambda x: x.amax(1),
    "max_pool2d": lambda x: F.max_pool2d(x[None, None], 3, 2, 1),
    "ge": lambda x: x >= 0.5,
    "lt": lambda x: x < x.t(),
    "sign": torch.sign,
    "exp": lambda x: torch.exp(x / 4),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "reciprocal": lambda x: (x.abs() + 0.5).reciprocal(),
    "sort": lambda x: x.sort(1).values,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_give_the_same_in_fewer_rounds_or_as_many(name: str):
    function = FUNCTIONS[name]
    rounds = {}
    for network in ("lan", "wan"):
        with sectorch.profile() as p:
            y = function(share_tensor(X, scheme=Scheme(network=network))).reveal()
        rounds[network] = p.rounds
        assert (y.to(torch.float64) - function(X).to(torch.float64)).abs().max() <= 1e-4
    assert rounds["wan"] <= rounds["lan"]


def test_an_unknown_network():
    with pytest.raises(ArgumentError, match="network must be one of lan, wan, got 'dsl'"):
        sectorch.secure(nn.Linear(2, 2).eval(), Scheme(network="dsl"))
