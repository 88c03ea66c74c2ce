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


ALIASES = {
    "contiguous": lambda c: c.contiguous(),
    "float twice": lambda c: c.contiguous().float(),
    "positive": lambda c: +c,
    "atleast_1d": torch.atleast_1d,
    "broadcast": lambda c: torch.broadcast_tensors(c, torch.ones(2, 1))[0],
    "real": lambda c: c.real,
    "dropout": lambda c: nn.functional.dropout(c, 0.5, False),
    "reshape": lambda c: c.reshape(2, 3),
    "detach": lambda c: c.detach(),
    "iteration": lambda c: next(iter(c)),
}


@pytest.mark.parametrize("same", [lambda c: c.to(torch.float32), lambda c: c.type_as(c), lambda c: c.float()])
def test_a_conversion_that_changes_nothing_gives_the_tensor_itself(weight, same):
    copy = weight.clone()
    assert same(copy) is copy
    assert copy.to(torch.float32, copy=True) is not copy


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("name", ALIASES)
def test_memory_that_another_tensor_shares_is_not_changed(weight, name, inference):
    """Torch would change both; here the other would keep its old value."""
    with torch.inference_mode(inference):
        plain = torch.arange(6.0)
        shared = ALIASES[name](plain)
        plain.add_(1)
        assert torch.equal(shared, ALIASES[name](plain)), "torch shares memory here"
        copy = weight.clone()
        other = ALIASES[name](copy)
        for change in (lambda: copy.zero_(), lambda: copy[3:].zero_()):
            with pytest.raises(UnsupportedOpError, match="would change a weight in place"):
                change()
        del other
        copy.zero_()


def test_what_is_computed_from_a_copy_does_not_bind_it(weight):
    copy = weight.clone()
    doubled = copy * 2
    copy.zero_()
    x = share_tensor(torch.ones(6), session=weight.session)
    assert torch.allclose((x * doubled).reveal(), 2 * torch.arange(6.0), atol=1e-5)


def test_two_copies_are_two(weight):
    x = share_tensor(torch.ones(6), session=weight.session)
    first, second = weight.clone(), weight.clone()
    first.zero_()
    first[2:4].add_(5)
    assert torch.allclose((x * first).reveal(), torch.tensor([0.0, 0, 5, 5, 0, 0]), atol=1e-5)
    assert torch.allclose((x * second).reveal(), torch.arange(6.0), atol=1e-5)
    assert torch.allclose((x * weight).reveal(), torch.arange(6.0), atol=1e-5)
