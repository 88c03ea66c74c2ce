"""Operations among a model's own weights: run at their owner, kept with them, and in place only on copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sectorch
from sectorch.errors import UnsupportedOpError
from sectorch.tensor import Scheme, private_tensor, share_tensor

X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 1.0, -1.0, 2.0]])


@torch.fx.wrap
def untraced(x, weight, bias):
    """As in torchvision's Swin Transformer V2: a part of a copied bias is set to zero."""
    bias = bias.clone()
    bias[1:3].zero_()
    other = bias.clone()
    other += 1
    other[0] = other[1:2].mul_(2).sum()
    return nn.functional.linear(x, weight, bias) + other


class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return untraced(x, self.linear.weight, self.linear.bias)


def test_copies_may_be_changed_and_weights_are_not():
    torch.manual_seed(0)
    model = Copying().eval().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    secured = sectorch.secure(model, session=sectorch.Session())
    for _ in range(2):  # the second call must not see what the first one changed
        assert float((secured(X) - model(X)).abs().max()) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.fixture
def weight():
    session = sectorch.Session()
    return private_tensor(torch.arange(6.0), session, session.answering[0], Scheme(), "w")


def test_a_weight_and_its_views_are_not_changed_in_place(weight):
    for change in (lambda: weight.zero_(), lambda: weight[1:].add_(1), lambda: weight.view(2, 3)[0].mul_(2)):
        with pytest.raises(UnsupportedOpError, match="would change a weight in place"):
            change()


def test_a_copy_that_others_are_views_of_is_not_changed(weight):
    copy = weight.clone()
    view = copy[:2]
    with pytest.raises(UnsupportedOpError, match="would change a weight in place"):
        copy.zero_()
    with pytest.raises(UnsupportedOpError, match="would change a weight in place"):
        copy[3:].zero_()
    del view
    copy.zero_()


def test_two_copies_are_two(weight):
    x = share_tensor(torch.ones(6), session=weight.session)
    first, second = weight.clone(), weight.clone()
    first.zero_()
    first[2:4].add_(5)
    assert torch.allclose((x * first).reveal(), torch.tensor([0.0, 0, 5, 5, 0, 0]), atol=1e-5)
    assert torch.allclose((x * second).reveal(), torch.arange(6.0), atol=1e-5)
    assert torch.allclose((x * weight).reveal(), torch.arange(6.0), atol=1e-5)
