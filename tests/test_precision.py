"""The owner's own check of what its weights lose in fixed point, before anything is shared."""

from __future__ import annotations

import warnings

import pytest
import torch
from cases import long
from torch import nn

import sectorch
from sectorch.errors import PrecisionError, PrecisionWarning
from sectorch.nn import passes


class Head(nn.Module):
    """A last layer of small weights, whose inputs are large; or of larger ones behind a smaller input."""

    def __init__(self, divided: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.divided = nn.Linear(200, 50), nn.Linear(50, 10), divided
        with torch.no_grad():
            self.body.weight.mul_(50)
            self.head.weight.mul_(1e-4 * divided)
            self.head.bias.mul_(1e-4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)) / self.divided)


def test_weights_that_lose_their_digits_are_named_before_a_call():
    model, x = Head().eval(), torch.randn(4, 200)
    with pytest.warns(PrecisionWarning, match=r"layer 'head' \(Linear\).*20 fraction bits.*off by") as warned:
        got = sectorch.secure(model)(x)
    assert "test_precision.py" in str(warned[0].message)
    assert (got - model(x)).abs().max() > 2.0**-8 * model(x).abs().max()
    strict = sectorch.secure(model, strict=True)
    for _ in range(2):
        with sectorch.profile() as p, pytest.raises(PrecisionError, match=r"layer 'head' \(Linear\)"):
            strict(x)
        assert p.bytes == 0


def test_what_the_warning_says_helps():
    x = torch.randn(4, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Head(256.0).eval()
        got = sectorch.secure(model, strict=True)(x)
    assert (got - Head().eval()(x)).abs().max() < 2.0**-9 * model(x).abs().max()


def nets():
    yield "mlp", nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10), nn.Softmax(1)), torch.rand(3, 784)
    conv = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4), nn.LogSoftmax(1),
    )  # fmt: skip
    conv[2].running_var.fill_(1e-3)
    yield "conv", conv, torch.randn(2, 3, 12, 12)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    yield "transformer", nn.Sequential(layer, nn.LayerNorm(16)), torch.randn(2, 5, 16)
    yield "ids", nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 2)), torch.randint(0, 50, (4, 3))

    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            y = self.linear(x)
            chosen = nn.functional.one_hot(y.argmax(1), 6) * 100 + torch.floor(y * 8)
            return torch.where(y > 0, chosen, y.sort(1).values), y.topk(2).values

    yield "decides", Decides(), torch.randn(40, 6)
    yield "relu6", nn.Sequential(nn.Linear(4, 4), nn.ReLU6()), torch.randn(2, 4)
    yield "lstm", nn.LSTM(4, 5, bidirectional=True), torch.randn(3, 2, 4)


@pytest.mark.parametrize("seed", [0, 1, *long(2)])
def test_ordinary_networks_are_not_named(seed):
    torch.manual_seed(seed)
    for _name, model, x in nets():
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrecisionWarning)
            sectorch.secure(model.eval(), strict=bool(seed))(x)


def test_a_pass_that_spoils_weights_is_found(monkeypatch):
    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(200, 10)

        def forward(self, x):
            return self.linear(x / 7000)

    model, x = Divides().eval(), torch.rand(2, 200) * 1000
    monkeypatch.setattr(passes, "_split", lambda factor, most: (factor, 0))
    with pytest.warns(PrecisionWarning, match=r"layer 'linear'"):
        sectorch.secure(model)(x)
    monkeypatch.undo()
    sectorch.secure(model, strict=True)(x)


class Drawing(nn.Module):
    def forward(self, x):
        return x * 2 + torch.rand(())


def test_strict_refuses_what_cannot_be_looked_at(monkeypatch):
    """A module that runs operation by operation, and a look that fails; without strict both run."""
    x = torch.rand(2, 3)
    with pytest.raises(PrecisionError, match="operation by operation"):
        sectorch.secure(Drawing().eval(), strict=True)(x)

    def failing(*_):
        raise IndexError("of the inside")

    monkeypatch.setattr("sectorch.nn.module.loss", failing)
    model = nn.Linear(3, 2).eval()
    strict = sectorch.secure(model, strict=True)
    for _ in range(2):
        with pytest.raises(PrecisionError, match=r"\(IndexError\); leave out strict=True"):
            strict(x)
    assert (sectorch.secure(model)(x) - model(x)).abs().max() < 1e-4
