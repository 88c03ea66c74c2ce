"""Bad input is refused by name, and the server's model is as it was."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from perturbation_cases import NETS, batches
from torch import nn

from sectorch.errors import SectorchError
from sectorch.protocols.perturbation import (
    BatchMismatchError,
    DroppedClientError,
    ExchangeError,
    Noise,
    NoiseError,
    NonFiniteGradientError,
    NotPerturbableError,
    Scheme,
    StaleKeyError,
    StateMismatchError,
    WeightError,
)
from sectorch.protocols.perturbation.scheme import check_noise


class Through(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def between(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "model, words",
    [
        (between(nn.Sigmoid()), r"'1' \(Sigmoid\) cannot be scaled: f\(r x\) is not r f\(x\)"),
        (between(nn.GELU()), r"'1' \(GELU\).*use ReLU"),
        (between(nn.LayerNorm(6)), r"'1' \(LayerNorm\).*mix channels.*BatchNorm"),
        (between(nn.ReLU6()), r"\(ReLU6\).*fixed size"),
        (between(nn.ReLU(), nn.AvgPool1d(2), nn.Linear(3, 6)), r"\(AvgPool1d\).*different scales"),
        (between(nn.ReLU(), nn.Bilinear(1, 1, 1)), "Bilinear|input"),
        (between(nn.Softplus()), "Softplus"),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), "leave a softmax at the end to the loss"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "ends in layer '1' .ReLU.*nn.Linear"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 3)), "takes .N, features.|flatten"),
        (Through(torch.sigmoid), "sigmoid"),
        (Through(lambda x: x * x), "two scaled tensors"),
        (Through(lambda x: x + 1), "a constant is added"),
        (Through(lambda x: x.softmax(1)), "softmax"),
        (Through(lambda x: torch.cat([x, x])), "along dimension 0"),
        (Through(lambda x: x.mean(1)), "mixes channels"),
        (Through(lambda x: x.view(2, 3)), "only a view"),
        (Branches(), "control flow that torch.fx cannot see"),
    ],
)
def test_architectures(model, words):
    with pytest.raises(NotPerturbableError, match=words):
        Scheme(model)


def test_unused_and_shared_parameters():
    model = between(nn.ReLU())
    model.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(NotPerturbableError, match="no layer of the graph uses: extra"):
        Scheme(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    with pytest.raises(NotPerturbableError, match="share one parameter"):
        Scheme(model)
    with pytest.raises(NotPerturbableError, match=r"takes a torch.nn.Module, got int"):
        Scheme(3)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(loss="hinge"), "hinge"),
        (dict(partitions=0), "from 1 to n_L = 3"),
        (dict(partitions=4), "from 1 to n_L = 3"),
        (dict(partitions=True), "True"),
        (dict(exchange="no"), "'no'"),
        (dict(partitions=2, exchange="shift"), "one noise for all classes"),
        (dict(frac_bits=0), "from 1 to 60"),
        (dict(noise_on="rows"), "'rows'"),
        (dict(noise_on="bias"), "one term already"),
    ],
)
def test_arguments(arguments, words):
    with pytest.raises(SectorchError, match=words):
        Scheme(between(nn.ReLU()), **arguments)


def test_noise_on_the_bias_needs_one():
    with pytest.raises(NotPerturbableError, match="'2' has no bias to take the noise"):
        Scheme(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), "mse", noise_on="bias")


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_has_to_be_positive(size):
    with pytest.raises(NoiseError, match="positive"):
        Noise(additive=size)
    with pytest.raises(NoiseError, match="above 1"):
        Noise(spread=size)
    one = torch.ones(3)
    with pytest.raises(NoiseError, match="1 of 3 channel scales are not positive and finite"):
        check_noise(torch.tensor([1.0, size, 2.0]), one, one, one)
    if size != -1.0:
        with pytest.raises(NoiseError, match="1 of 3 entries of gamma"):
            check_noise(one, torch.tensor([1.0, size, 2.0]), one, one)


@pytest.fixture(params=["mse", "shift", "paper"])
def world(request):
    torch.manual_seed(8)
    model = NETS["mlp3"][0]().double()
    loss = "mse" if request.param == "mse" else "cross_entropy"
    scheme = Scheme(model, loss, exchange=None if loss == "mse" else request.param)
    part = batches((12,), 4, loss, 1, torch.float64)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield scheme, model, part
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_state_dicts(world):
    scheme, model, _ = world
    state = model.state_dict()
    for call in (scheme.perturb, scheme.inference_model):
        with pytest.raises(StateMismatchError, match=r"lacks 0.weight"):
            call({name: tensor for name, tensor in state.items() if name != "0.weight"})
        with pytest.raises(StateMismatchError, match="has extra, which the model lacks"):
            call(state | {"extra": torch.ones(1)})
        with pytest.raises(StateMismatchError, match=r"'0.bias' has shape \[2\]; the model's is \[16\]"):
            call(state | {"0.bias": torch.ones(2)})
        with pytest.raises(NonFiniteGradientError, match=r"not finite at 0.bias"):
            call(state | {"0.bias": torch.full((16,), float("nan"))})
        with pytest.raises(StateMismatchError, match="all float32 or all float64"):
            call(state | {"0.bias": torch.ones(16)})


def test_batches(world):
    scheme, model, (x, y) = world
    noisy, _ = scheme.perturb(model.state_dict())
    with pytest.raises(BatchMismatchError, match="no batch"):
        scheme.client_step(noisy, [])
    with pytest.raises(BatchMismatchError, match=r"inputs of shape \[4, 12\], targets of \[3"):
        scheme.client_step(noisy, (x, y[:3]))
    with pytest.raises(BatchMismatchError, match=r"inputs \[4, 11\]"):
        scheme.client_step(noisy, (x[:, :11], y))
    with pytest.raises(BatchMismatchError, match="float32"):
        scheme.client_step(noisy, (x.float(), y))
    with pytest.raises(NonFiniteGradientError, match="not finite"):
        scheme.client_step(noisy, (x * float("nan"), y))
    if scheme.loss == "mse":
        with pytest.raises(BatchMismatchError, match=r"targets of shape \[4, 3\] for outputs of shape \[4, 4\]"):
            scheme.client_step(noisy, (x, y[:, :3]))
    else:
        with pytest.raises(BatchMismatchError, match="class numbers run from 9 to 9; the model has 4 outputs"):
            scheme.client_step(noisy, (x, torch.full((4,), 9)))
        with pytest.raises(BatchMismatchError, match="do not sum to one"):
            scheme.client_step(noisy, (x, torch.ones(4, 4, dtype=torch.float64)))


def test_updates(world):
    scheme, model, part = world
    noisy, key = scheme.perturb(model.state_dict())
    _, other = scheme.perturb(model.state_dict())
    update = scheme.client_step(noisy, part, server=lambda request: scheme.answer(key, request))
    with pytest.raises(StaleKeyError, match="another round's noisy model"):
        scheme.recover(other, [update], [1])
    with pytest.raises(DroppedClientError, match="no client sent"):
        scheme.recover(key, [], [])
    with pytest.raises(WeightError, match="1 updates and 2 weights"):
        scheme.recover(key, [update], [1, 2])
    for weight in (0, -1, float("nan")):
        with pytest.raises(WeightError, match="positive number"):
            scheme.recover(key, [update], [weight])
    with pytest.raises(StateMismatchError, match="this scheme takes"):
        scheme.recover(key, [replace(update, terms=update.terms[:, 1:])], [1])
    with pytest.raises(NonFiniteGradientError, match="update 0 holds NaN"):
        scheme.recover(key, [replace(update, terms=update.terms * float("inf"))], [1])
    found = scheme.recover(key, [update], [1])
    found["0.bias"] = torch.zeros(3)
    with pytest.raises(StateMismatchError, match=r"does not fit the model at 0.bias"):
        scheme.step(model, torch.optim.SGD(model.parameters(), 0.1), found)


def test_the_exchange_needs_the_server_of_the_round():
    torch.manual_seed(8)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, exchange="paper")
    part = batches((12,), 4, "cross_entropy", 1, torch.float64)[0]
    noisy, key = scheme.perturb(model.state_dict())
    _, other = scheme.perturb(model.state_dict())
    with pytest.raises(ExchangeError, match="pass server="):
        scheme.client_step(noisy, part)
    with pytest.raises(StaleKeyError, match="another round"):
        scheme.client_step(noisy, part, server=lambda request: scheme.answer(other, request))
    arrived = pickle.loads(pickle.dumps(noisy))
    update = scheme.client_step(arrived, part, server=lambda request: scheme.answer(key, request))
    assert scheme.recover(key, [update], [1]).keys() == dict(model.named_parameters()).keys()
    with pytest.raises(ExchangeError, match="holds"):
        scheme.answer(key, replace(_request(scheme, noisy, key, part), alpha=torch.ones(2)))


def _request(scheme, noisy, key, part):
    seen = []
    scheme.client_step(noisy, part, server=lambda request: seen.append(request) or scheme.answer(key, request))
    return seen[0]


def test_a_key_shows_nothing():
    scheme = Scheme(NETS["mlp3"][0]())
    _, key = scheme.perturb(NETS["mlp3"][0]().state_dict())
    assert repr(key) == "Key(...)"
