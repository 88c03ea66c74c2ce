"""`network="wan"`: the same results by wide blocks and keys, in few rounds, and `explain` knows what they cost."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import LONG, by_turns, some
from torch import nn

import sectorch
from sectorch.choreography import Phase
from sectorch.errors import ArgumentError
from sectorch.mpc.star import backend
from sectorch.mpc.star.compare import RoundBudget
from sectorch.mpc.star.maximum import WORTH, levels_worth, plan_blocks, ramp_of_largest
from sectorch.mpc.star.shares import share
from sectorch.nn.models import ZOO
from sectorch.session import Session
from sectorch.tensor import Scheme, share_tensor


@pytest.mark.parametrize(("check", "rounds"), [pytest.param(False, 29, marks=LONG), (True, 30)])
def test_vgg7_in_few_rounds(check: bool, rounds: int):
    torch.manual_seed(0)
    construct, shape = ZOO["vgg7"]
    model, x = construct().eval(), torch.randn(1, *shape)
    secured = sectorch.secure(model, Scheme(network="wan", range_check=check), session=sectorch.Session())
    with sectorch.profile() as p:
        y = secured(x)
    with torch.no_grad():
        expected = model(x)
    assert p.rounds <= rounds and p.bytes - p.setup_bytes < 50e6
    assert torch.equal(y, sectorch.reference(model, Scheme(network="wan", range_check=check))(x))
    assert (y - expected).abs().max() <= 1e-4
    assert torch.equal(y.argmax(1), expected.argmax(1))
    if not check:
        return
    explained = sectorch.explain(model, x, Scheme(network="wan"))
    assert (explained.rounds, explained.bytes) == (p.rounds, p.bytes)


def test_bytes_in_addition_are_bounded_over_a_call():
    """Each layer takes half of what is left at most: of equal ones the first has one level, and later ones three."""
    n, spent = 100_000, 0
    one, three = (plan_blocks(1, 20, 63, 40, 12, levels).bits for levels in (1, 3))
    net = Session()._net(None, Phase.OFFLINE)
    found = [levels_worth(net, 1, n, 20, 63, 40, 12) for _ in range(20)]
    for levels in found:
        more = -(-(one - three) * n // 8)
        assert levels == (1 if 2 * more <= WORTH - spent else 3)
        spent += more if levels == 1 else 0
    assert net.state(RoundBudget).spent == spent <= WORTH and {1, 3} == set(found)
    assert levels_worth(net, 1, 100, 20, 63, 40, 12) == 1, "a small layer after them"


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


POOLED = {
    "conv relu pool": lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)],
    "conv pool relu": lambda: [nn.Conv2d(2, 3, 3), nn.MaxPool2d((1, 3)), nn.ReLU()],
    "with padding, at the edge": lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, 1, 1)],
    "nine values": lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3, 2)],
    "nothing to truncate": lambda: [nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(50, 2)],
}


@by_turns(
    ids=str, name=POOLED, keyed=[0, 1 << 10],
    scheme=[Scheme(network="wan"), Scheme(network="wan", limit_bits=4, range_check=False)],
)  # fmt: skip
def test_a_pooling_and_its_relu_are_one_step(name: str, keyed: int, scheme: Scheme):
    torch.manual_seed(0)
    model, x = nn.Sequential(*POOLED[name]()).eval(), torch.randn(3, 2, 11, 10)
    with patch.object(backend, "KEYED", keyed):
        secured = sectorch.secure(model, scheme)
        assert torch.equal(secured(x), sectorch.reference(model, scheme)(x))
        with sectorch.profile() as p:
            secured(x)
    if not keyed:
        alone = any(name in line.path for line in p.ledger for name in ("max_of_four", "max_tree"))
        assert alone == (name in ("nine values", "nothing to truncate"))
    assert sectorch.diff(model, x, scheme).table()


def test_a_pooling_that_somebody_else_reads_is_a_step_of_its_own():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            y = F.max_pool2d(self.conv(x), 2)
            return torch.relu(y), y.sum()

    model, x = Both().eval(), torch.randn(1, 2, 8, 8)
    scheme = Scheme(network="wan")
    for found, wanted in zip(sectorch.secure(model, scheme)(x), sectorch.reference(model, scheme)(x), strict=True):
        assert torch.equal(found, wanted)


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


EVERY_RUN = ("relu", "clamp", "amax", "max_pool2d", "lt", "sigmoid", "reciprocal", "sort")


@pytest.mark.parametrize("name", some(FUNCTIONS, EVERY_RUN))
def test_functions_give_the_same_in_fewer_rounds_or_as_many(name: str):
    function = FUNCTIONS[name]
    rounds = {}
    for network in ("lan", "wan"):
        with sectorch.profile() as p:
            y = function(share_tensor(X, scheme=Scheme(network=network))).reveal()
        rounds[network] = p.rounds
        assert (y.to(torch.float64) - function(X).to(torch.float64)).abs().max() <= 1e-4
    assert rounds["wan"] <= rounds["lan"]


def test_a_pooling_of_a_keyword_is_recorded_and_computed_by_itself():
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(torch.max_pool2d(input=x * x, kernel_size=2))

    x = torch.randn(1, 1, 4, 4)
    for scheme in (Scheme(), Scheme(network="wan")):
        secured = sectorch.secure(Net().eval(), scheme)
        assert torch.equal(secured(x), sectorch.reference(Net().eval(), scheme)(x))


@pytest.mark.parametrize("options", [{"levels": 2}, {"limit_bits": 0}], ids=str)
def test_a_plan_that_there_is_none_of(options: dict):
    held = sectorch.Session()
    with held.call(held.answering[0]) as net, pytest.raises(ArgumentError, match="levels is 1 or 3, and a limit 1 bit"):
        ramp_of_largest(net, share(net, net.own(net.Q, torch.ones(1, 2, dtype=torch.int64))), 20, **options)


def test_no_block_is_wider_than_eight_bits():
    for limit in (2, 30):
        plan = plan_blocks(4, 1, 63, 63, limit, 1)
        assert max(w for span in (plan.pair, *plan.signs) for w in span.widths) <= 8
