"""The owner's own check of what its weights lose in fixed point, before anything is shared."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

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


def test_strict_refuses_calls_of_several_threads():
    """The first thread looked and was refused; those that came meanwhile, and every later call, got a result."""
    strict, x = sectorch.secure(Head().eval(), strict=True), torch.randn(4, 200)

    def call(_) -> bool:
        try:
            return strict(x) is None
        except PrecisionError:
            return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(4)))
    assert call(None)


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


class Calls(nn.Module):
    """A function of x and of A's w."""

    def __init__(self, function, w):
        super().__init__()
        self.register_buffer("w", w)
        self.function = function

    def forward(self, x):
        return self.function(x, self.w)


HIDDEN = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
LOSING = {
    "mul": lambda x, w: torch.tanh(x) * w[0] * 1e5,
    "mul by what was made of weights": lambda x, w: torch.tanh(x) * (w[0] * 2) * 1e5,
    "addcmul": lambda x, w: torch.addcmul(x * 1e-6, torch.tanh(x), w[0]) * 1e5,
    "matmul": lambda x, w: x @ w * 1e5,
    "matmul from the left": lambda x, w: w @ x.T * 1e5,
    "bmm": lambda x, w: torch.bmm(x.unsqueeze(0), w.unsqueeze(0)) * 1e5,
    "addmm": lambda x, w: torch.addmm(w[0], x, w) * 1e5,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w) * 1e5,
    "einsum of a list": lambda x, w: torch.einsum("ij,jk->ik", [x, w]) * 1e5,
    "tensordot": lambda x, w: torch.tensordot(x, w, 1) * 1e5,
    "by name": lambda x, w: torch.nn.functional.linear(input=x, weight=w) * 1e5,
    "bilinear": lambda x, w: torch.nn.functional.bilinear(x, torch.tanh(x), w.expand(2, 6, 6)) * 1e4,
    "conv_transpose1d": lambda x, w: torch.nn.functional.conv_transpose1d(x.unsqueeze(1), w.unsqueeze(1)[:1]) * 1e5,
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, (6,), w[0]) * 1e5,
    "behind a mask": lambda x, w: (
        (x.masked_fill(torch.eye(6, dtype=torch.bool), -torch.inf).softmax(-1) @ x) @ w * 1e5
    ),
    "where": lambda x, w: torch.where(x > 0, torch.tanh(x), 0.5) * w[0] * 1e5,
}  # fmt: skip
"""Functions of x and of weights of about 1e-5, which keep three bits."""


@pytest.mark.parametrize("name", LOSING)
def test_whatever_a_weight_meets_is_looked_at(name):
    x, w = torch.randn(6, 6) * 20, HIDDEN * 3e-6
    model = Calls(LOSING[name], w).eval()
    with pytest.warns(PrecisionWarning, match="off by"):
        got = sectorch.secure(model)(x)
    assert (got - model(x)).abs().max() > 1e-3 * model(x).abs().max()  # so it was said for a reason


FINE = {
    "ordinary": lambda x, w: x @ w,
    "small beside others": lambda x, w: x @ w + torch.tanh(x) * (w[0] * 1e-9),
    "a quotient": lambda x, w: x / (w[0].abs() * 1e4 + 100),
    "a batch norm of large variance": lambda x, w: torch.nn.functional.batch_norm(x, w[0], w[1].abs() * 1e8 + 1e6),
    "a batch norm of small variance": lambda x, w: torch.nn.functional.batch_norm(x, w[0], w[1].abs() * 1e-7) * 1e-3,
    "a mask": lambda x, w: x.masked_fill(torch.eye(6, dtype=torch.bool), -torch.inf).softmax(-1) @ w,
    "a mask that is added": lambda x, w: (x + torch.eye(6) * torch.finfo(torch.float32).min).softmax(-1) @ w,
    "epsilon": lambda x, w: torch.nn.functional.layer_norm(x, (6,), w[0], w[1], 1e-12),
    "a public inverse": lambda x, w: x * 3e-5 + x / 7000,
}


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("strict", [False, True])
def test_what_keeps_its_digits_is_not_named(name, strict):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        sectorch.secure(Calls(FINE[name], HIDDEN.clone()).eval(), strict=strict)(torch.randn(6, 6))


def test_inverses_are_looked_at_as_they_are_computed(monkeypatch):
    """Without the finer products of inverses, quotients and batch norms by large numbers lose digits, and are named."""
    batch_norm = lambda x, w: torch.nn.functional.batch_norm(x, w * 0, w**2)
    functions = {"div": lambda x, w: x / w, "mul": lambda x, w: torch.relu(x) * (1 / w), "batch_norm": batch_norm}
    x, w = torch.rand(4, 6) * 4000, torch.tensor([9e4, 6e4]).repeat(3)
    for function in functions.values():
        sectorch.secure(Calls(function, w).eval(), strict=True)(x)
    from sectorch.ops import arithmetic, linear
    from sectorch.ops.linear import bilinear

    coarse = lambda *args, fine=False, **kwargs: bilinear(*args, **kwargs)
    monkeypatch.setattr(arithmetic, "bilinear", coarse)
    monkeypatch.setattr(linear, "bilinear", coarse)
    for function in functions.values():
        with pytest.warns(PrecisionWarning, match="off by"):
            sectorch.secure(Calls(function, w).eval())(x)


def test_a_calibration_batch_is_looked_at():
    """Its numbers are alike, and their difference is small beside them; drawn ones are not."""
    torch.manual_seed(0)
    model = nn.Linear(200, 10, bias=False).eval()
    with torch.no_grad():
        model.weight -= model.weight.mean(1, keepdim=True)
        model.weight *= 1e-2
    x = 1000 + torch.randn(4, 200) * 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        sectorch.secure(model)(x)
    for rows in (1, 4):
        with pytest.warns(PrecisionWarning, match="on the calibration batch"):
            sectorch.secure(model, sectorch.Scheme(20, limit_bits=12), calibrate=x[:rows])(x)
    with pytest.raises(PrecisionError, match="calibration batch"):
        sectorch.secure(model, sectorch.Scheme(20, limit_bits=12), calibrate=x, strict=True)(x)


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

    monkeypatch.setattr("sectorch.nn.module.find_precision_loss", failing)
    model = nn.Linear(3, 2).eval()
    strict = sectorch.secure(model, strict=True)
    for _ in range(2):
        with pytest.raises(PrecisionError, match=r"\(IndexError\); leave out strict=True"):
            strict(x)
    assert (sectorch.secure(model)(x) - model(x)).abs().max() < 1e-4
