"""Weights of large models, of which no form is kept that can be made again: same numbers, and what stays in memory."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch.choreography import Phase
from sectorch.errors import FixedPointRangeError
from sectorch.mpc.star.linear import mask_streamed_weight
from sectorch.nn import weights
from sectorch.ring import products
from sectorch.session import Session

WEIGHT = 160


class Net(nn.Module):
    """Norms that are folded, groups, a weight that is read twice, as a transpose and as a summand too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.groups = nn.Conv2d(8, 8, 3, groups=2)
        self.wide = nn.Linear(8 * 16, 32)
        self.twice = nn.Parameter(torch.randn(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.wide(F.relu(self.groups(x)).flatten(1))
        y = F.linear(x, self.twice.t()) + self.twice[0]
        return torch.cat((y, F.linear(y, self.twice[:5])), 1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is, and its weights from 160 elements on."""
    monkeypatch.setattr(weights, "LARGE_MODEL", 1)
    monkeypatch.setattr(weights, "LARGE_WEIGHT", WEIGHT)


@pytest.mark.parametrize("how", [{}, {"network": "wan"}, {"verified": True}, {"audited": 2}], ids=str)
def test_the_numbers_are_those_of_kept_weights(model, large, how):
    scheme, x = sectorch.Scheme(**how), torch.randn(3, 3, 6, 6)
    expected = sectorch.reference(model, scheme)(x)
    secure = sectorch.secure(model, scheme, session=Session())
    assert torch.equal(secure(x), expected)
    secure.preprocess(3)
    assert torch.equal(secure(x), expected)


def test_rounds_and_bytes_are_those_of_kept_weights(model, monkeypatch):
    x, seen = torch.randn(2, 3, 6, 6), []
    for limit in (1, 1 << 28):
        monkeypatch.setattr(weights, "LARGE_MODEL", limit)
        monkeypatch.setattr(weights, "LARGE_WEIGHT", WEIGHT)
        with sectorch.profile() as profile:
            sectorch.secure(model, session=Session())(x)
        seen.append([(m.label, m.bytes, m.phase) for m in profile.ledger])
    assert seen[0] == seen[1]
    assert any(phase == Phase.SETUP for _, _, phase in seen[0])


def of_shapes(*shapes: tuple[int, ...]) -> list[list[torch.dtype]]:
    """Of each shape the dtypes of the tensors with content of it, each piece of memory once."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    kept = [{t.untyped_storage().data_ptr(): t.dtype for t in found if t.shape == shape} for shape in shapes]
    return [sorted(dtypes.values(), key=str) for dtypes in kept]


@pytest.mark.parametrize("rows", [1, 5])
def test_only_the_sum_with_the_mask_is_kept(large, rows):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(37, 131)).eval().requires_grad_(False)
    secure = sectorch.secure(model, session=Session())
    x = torch.randn(rows, 37)
    for _ in range(2):
        secure(x)
        # The user's, the module's own in float64, and omega + a at S; and it stands in no tiles.
        assert of_shapes((131, 37), (3, 37, 64)) == [[torch.float32, torch.float64, torch.int64], []]


def test_kept_weights_take_more():
    """The control. What products take in tiles alone is kept in tiles alone, and comes out of them for a single row."""
    model = nn.Sequential(nn.Linear(37, 131)).eval().requires_grad_(False)
    secure = sectorch.secure(model, session=Session())
    for rows, plain in ((5, 0), (1, 3), (200, 3), (5, 3)):
        x = torch.randn(rows, 37)
        assert torch.equal(secure(x), sectorch.reference(model)(x))
        if not products.unit():  # another processor has a form of its own
            tiles, weights = of_shapes((3, 37, 64), (131, 37))
            assert (len(tiles), weights.count(torch.int64)) == (3, plain)


def test_no_two_masks_are_alike():
    """The key is drawn for each weight, from the streams of the session; what S holds of zeros is the mask."""
    seen = []
    for session in (Session(), Session()):
        setup = session.setup(session.answering[0])
        for _ in range(2):
            zeros = setup.own(setup.A, torch.zeros(8, 8, dtype=torch.int64), Phase.SETUP)
            seen.append(mask_streamed_weight(setup, zeros, torch.Tensor.clone).masked._value)
    words = torch.stack(seen).flatten().tolist()
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("limit", [1, 1 << 28], ids=["streamed", "kept"])
def test_a_factor_of_a_norm_that_fixed_point_cannot_hold_is_refused(monkeypatch, limit):
    """A norm's tensors are only finite when they are bound; as a factor their sums are checked, streamed or kept."""
    monkeypatch.setattr(weights, "LARGE_MODEL", limit)
    monkeypatch.setattr(weights, "LARGE_WEIGHT", WEIGHT)
    model = nn.BatchNorm1d(200).eval().requires_grad_(False)
    with torch.no_grad():
        model.weight.fill_(1e9)
    with pytest.raises(FixedPointRangeError):
        sectorch.secure(model, session=Session())(torch.randn(2, 200))


def test_a_weight_that_fixed_point_cannot_hold_is_refused(large):
    model = nn.Linear(20, 20).eval().requires_grad_(False)
    with torch.no_grad():
        model.weight[3, 5] = 1e9
    with pytest.raises(FixedPointRangeError):
        sectorch.secure(model, session=Session())(torch.randn(2, 20))
