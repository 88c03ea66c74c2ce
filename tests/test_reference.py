"""`sectorch.reference`: what a secure run computes, bit for bit, however it is run."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from cases import by_turns, long, some
from sklearn.datasets import load_digits
from torch import nn

import sectorch
from sectorch import Scheme
from sectorch.errors import KeyAgreementError
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.nn.module import SecureModule
from sectorch.serving.description import describe, load_program

# Models.


def randomised(model: nn.Module) -> nn.Module:
    randomize_batchnorm(model.eval(), torch.Generator().manual_seed(0))
    return model.requires_grad_(False)


def zoo(name: str, rows: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    return randomised(construct()), torch.randn(rows, *shape)


@pytest.mark.parametrize("name", ["lenet", "cryptonets", *long("mlp", "cryptonets_relu", "vgg7", "resnet8")])
def test_the_zoo_in_every_way_of_running_it(name: str):
    model, x = zoo(name, 3)
    wanted = sectorch.reference(model)(x)
    secure = sectorch.secure(model, session=sectorch.Session())
    assert torch.equal(secure(x), wanted)
    secure.preprocess(3)
    assert torch.equal(secure(x), wanted), "on prepared material"
    assert torch.equal(sectorch.secure(model, session=sectorch.Session(), chunk=2)(x), wanted), "in pieces"
    assert torch.equal(torch.cat([secure(row[None]) for row in x]), wanted), "row by row"
    shared = secure(sectorch.share(x, session=secure.session))
    assert torch.equal(shared.reveal(), wanted), "on shares"
    session = sectorch.Session()
    served = SecureModule(load_program(*describe(model, x)), session, session.answering[0], Scheme(), None)
    assert torch.equal(served(x), wanted), "as the parties of a network read it"


@pytest.mark.parametrize("name", ["mlp", *long("lenet", "cryptonets_relu")])
def test_slow_networks_compute_the_same(name: str):
    model, x = zoo(name, 1)
    wan = sectorch.secure(model, Scheme(network="wan"), session=sectorch.Session())
    assert torch.equal(wan(x), sectorch.reference(model)(x))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("name", ZOO)
def test_the_whole_zoo(name: str, network: str):
    model, x = zoo(name, 2)
    secure = sectorch.secure(model, Scheme(network=network), session=sectorch.Session())
    assert torch.equal(secure(x), sectorch.reference(model)(x))


VISION = [
    "resnet18", "resnet50", "vgg11_bn", "mobilenet_v2", "squeezenet1_1", "densenet121", "shufflenet_v2_x0_5",
    "mnasnet0_5", "regnet_y_400mf", "mobilenet_v3_small",
]  # fmt: skip


@pytest.mark.sectorch_long
@pytest.mark.parametrize("name", VISION)
def test_ten_nets_of_torchvision(name: str):
    torch.manual_seed(0)
    model, x = randomised(torchvision.models.get_model(name)), torch.randn(1, 3, 64, 64)
    wanted = sectorch.reference(model)(x)
    assert torch.equal(sectorch.secure(model, session=sectorch.Session())(x), wanted)
    assert (wanted - model(x)).abs().max() <= 1e-3 * model(x).abs().max()


def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small CNN, trained for a moment on the bundled digits, and 450 test images."""
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:1347]), y[:1347]).backward()
        optimiser.step()
    return model.eval().requires_grad_(False), x[1347:], y[1347:]


def test_digits():
    model, x, y = digits()
    wanted = sectorch.reference(model)(x)
    assert torch.equal(sectorch.secure(model, session=sectorch.Session())(x), wanted)
    right = (wanted.argmax(1) == y).float().mean()
    assert right == (model(x).argmax(1) == y).float().mean() and right > 0.85


SMOOTH = {
    "activations": lambda: nn.Sequential(
        nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9), nn.SiLU(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4),
        nn.Softplus(),
    ),
    "norms": lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4), nn.Softmax(-1)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    "recurrent": lambda: First(nn.LSTM(6, 5, batch_first=True)),
}  # fmt: skip


class First(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


WAYS = [(name, network) for network in ("lan", "wan") for name in SMOOTH]


@pytest.mark.parametrize(
    ("name", "network"), some(WAYS, [("norms", "lan"), ("attention", "lan"), ("activations", "wan")])
)
def test_smooth_models(name: str, network: str):
    """But for one value in 2^28, and here are a few thousand: less than one failure in 10^4 runs."""
    torch.manual_seed(0)
    model, x = SMOOTH[name]().eval(), torch.randn(2, 4, 6)
    secure = sectorch.secure(model, Scheme(network=network), session=sectorch.Session())
    assert torch.equal(secure(x), sectorch.reference(model)(x))


class Does(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x):
        return self.function(x)


TIES = torch.tensor([[0.3, 0.3, 0.1, 0.3], [20.0, 20.0, 30.0, 20.0]]).repeat(16, 1)
AFTER_A_SERIES = {
    "argmax": lambda x: torch.sigmoid(x).argmax(-1),
    "topk": lambda x: torch.topk(torch.tanh(x), 2)[1],
    "max": lambda x: torch.max(torch.sigmoid(x), -1)[1],
    "eq": lambda x: torch.sigmoid(x) == torch.sigmoid(x),
    "ge": lambda x: torch.sigmoid(x)[:, 0] >= torch.sigmoid(x)[:, 1],
    "sign": lambda x: torch.sign(torch.log(x) - torch.log(x)),
    "erf of zero": lambda x: torch.erf(x * 0) == 0,
    "whole factor": lambda x: torch.sigmoid(x) * 3000,
    "sum": lambda x: torch.sigmoid(x).repeat(1, 600).sum(-1),
    "mean": lambda x: torch.tanh(x).repeat(1, 700).mean(-1),
    "beside": lambda x: torch.sigmoid(x) + 2000.0,
}


@by_turns(name=AFTER_A_SERIES, frac_bits=[20, 26])
def test_a_series_is_rounded_before_anybody_looks_at_it(name: str, frac_bits: int):
    """Ties stand on masks otherwise, and whole factors and sums bring up what a rounding should drop."""
    model = Does(AFTER_A_SERIES[name])
    secure = sectorch.secure(model, Scheme(frac_bits=frac_bits), session=sectorch.Session())
    try:
        wanted = sectorch.reference(model, secure.scheme)(TIES)
    except sectorch.errors.FixedPointRangeError:
        return
    assert torch.equal(secure(TIES), wanted)


@by_turns(spread=[0.0003, 0.03, 1.0], frac_bits=[20, 24, 26])
def test_norms_of_small_variance(frac_bits: int, spread: float):
    torch.manual_seed(0)
    model, x = nn.LayerNorm(16).eval(), torch.randn(16, 16) * spread
    secure = sectorch.secure(model, Scheme(frac_bits=frac_bits), session=sectorch.Session())
    wanted = sectorch.reference(model, secure.scheme)(x)
    assert torch.equal(secure(x), wanted)
    assert (wanted - model(x)).abs().max() < 1e-3


@pytest.mark.parametrize("frac_bits", [24, 25, 26])
def test_smooth_functions_with_many_fraction_bits(frac_bits: int):
    functions = {
        torch.cos: [0.03, -0.05], torch.exp: [9.9, -3.0], torch.reciprocal: [2.0**-12, 50.0],
        torch.rsqrt: [2.0**-14, 50.0],
    }  # fmt: skip
    for function, places in functions.items():
        model, x = Does(function), torch.tensor(places)
        secure = sectorch.secure(model, Scheme(frac_bits=frac_bits, limit_bits=6), session=sectorch.Session())
        wanted = sectorch.reference(model, secure.scheme)(x)
        assert torch.equal(secure(x), wanted)
        assert torch.allclose(wanted, function(x), rtol=1e-5, atol=1e-5)


def steep_rnn() -> nn.Module:
    rnn = nn.RNN(6, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(-torch.rand(8, 6) * 30)
        rnn.weight_hh_l0.mul_(0.1)
    return First(rnn)


def steep_encoder() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        encoder.linear1.weight.mul_(150)
        encoder.linear2.weight.mul_(1e-3)
    return nn.Sequential(encoder)


@pytest.mark.parametrize("make", [steep_rnn, steep_encoder])
def test_calibration_assumes_nothing_of_values_that_it_did_not_see(make):
    torch.manual_seed(0)
    model, x = make().eval(), torch.rand(2, 3, 6) + 0.1
    secure = sectorch.secure(model, session=sectorch.Session(), calibrate=x)
    wanted = sectorch.reference(model, secure.scheme)(x)
    assert torch.equal(secure(x), wanted)
    assert (wanted - model(x)).abs().max() < 1e-3


@pytest.mark.parametrize("frac_bits", [10, 16, 24, 26])
def test_any_number_of_fraction_bits(frac_bits: int):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3)).eval(),
        None,
    )
    x = torch.randn(7, 5)
    secure = sectorch.secure(model, Scheme(frac_bits=frac_bits), session=sectorch.Session())
    assert torch.equal(secure(x), sectorch.reference(model, secure.scheme)(x))


def test_calibrated():
    model, x, _ = digits()
    secure = sectorch.secure(model, session=sectorch.Session(), calibrate=x)
    assert torch.equal(secure(x[:9]), sectorch.reference(model, secure.scheme)(x[:9]))
    assert torch.equal(secure(x[:9]), sectorch.reference(model, calibrate=x)(x[:9]))


class Branches(nn.Module):
    """fx cannot trace it, and it gives a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x if x.shape[0] > 1 else -x)
        return {"values": torch.relu(y), "label": y.argmax(1), "positive": y > 0}


def test_modules_that_run_as_they_are():
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(5, 4)
    secure, wanted = sectorch.secure(model, session=sectorch.Session())(x), sectorch.reference(model)(x)
    assert secure.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.dtype == secure[name].dtype and torch.equal(secure[name], value)


# What it is.


def test_the_reference_sends_and_draws_nothing():
    model, x = zoo("lenet", 2)
    ideal = sectorch.reference(model)
    with sectorch.profile() as profile:
        ideal(x)
    assert profile.ledger == [] and profile.bytes == 0
    session = sectorch.Session(reference=True)
    net = session.net(session.answering[0])
    with pytest.raises(KeyAgreementError, match="hold no pair key"):
        net.common(net.Q, net.A, (3,), "mask")


def test_refusals_are_those_of_a_secure_module():
    least = sectorch.reference(nn.Linear(2, 2).eval(), sectorch.Scheme(10), calibrate=torch.zeros(1, 2))
    assert least.scheme.frac_bits == 10
    ideal = sectorch.reference(nn.Linear(2, 2).eval())
    with pytest.raises(sectorch.errors.FixedPointRangeError):
        ideal(torch.full((1, 2), 1e9))
    with pytest.raises(sectorch.errors.TrainingModeError):
        sectorch.reference(nn.Linear(2, 2))


def test_the_model_is_not_changed():
    model, x = zoo("resnet8", 1)
    before = copy.deepcopy(model.state_dict())
    sectorch.reference(model)(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_reference_takes_a_scheme():
    for wrong in (16, torch.float32):
        with pytest.raises(sectorch.errors.ArgumentError, match=r"reference\(\) takes a Scheme"):
            sectorch.reference(nn.Linear(2, 2).eval(), wrong)
