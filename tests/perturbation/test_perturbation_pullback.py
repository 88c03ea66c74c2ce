"""The batched backward pass: every kind of layer, operations in place, layers used twice, and exact powers of two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from perturbation_cases import NETS, batches, one_round, plain_gradient, relative_error
from torch import nn

from sectorch.choreography.pages import Spare
from sectorch.nn.pullback import UpdateTerms
from sectorch.protocols.perturbation import BatchMismatchError, Noise, NoiseError, NotPerturbableError, Scheme


class Net(nn.Module):
    """Two convolutions with a function between, then a linear layer."""

    def __init__(self, between, *layers: nn.Module):
        super().__init__()
        self.a, self.b, self.between = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), between
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.between(self, self.a(x)).flatten(1))


def statement(self, x):
    """The rectified x is read by its old name."""
    F.relu_(x)
    return self.b(x) + x


def twice(self, x):
    return self.b(F.relu(self.b(F.relu(x)))) + x


def augmented(self, x):
    y = F.relu(x, inplace=True)
    z = self.b(y)
    z += y
    return z + x


LAYERS = [
    nn.Conv2d(4, 4, 3, padding="same", bias=False), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2), nn.PReLU(), nn.PReLU(), nn.LeakyReLU(0.1),
    nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4).eval(),
    nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, track_running_stats=False), nn.MaxPool2d(3, 1, 1),
    nn.AdaptiveAvgPool2d(4), nn.AdaptiveMaxPool2d(4), nn.ZeroPad2d(0), nn.Identity(), nn.ReLU(inplace=True),
]  # fmt: skip
FORMS = {
    "statement": statement,
    "twice": twice,
    "augmented": augmented,
    "difference": lambda self, x: self.b(F.relu(x)) - x,
    "doubled": lambda self, x: self.b(F.relu(x + x) / 2),
    "scaled": lambda self, x: x.mul(3).relu().add(self.b(x)),
    "broadcast": lambda self, x: x + self.b(x).mean((2, 3), keepdim=True),
    "leaky": lambda self, x: F.leaky_relu(self.b(x), 0.2, True),
    "sizes": lambda self, x: F.avg_pool2d(self.b(x), 3, 1, 1).view(x.size(0), -1),
}


def check(model: nn.Module, shape: tuple[int, ...], outputs: int, loss: str = "mse", m: int = 2) -> None:
    scheme = Scheme(model, loss, m)
    parts = batches(shape, outputs, loss, 2, torch.float64)
    found = one_round(scheme, model, parts)
    assert relative_error(found, plain_gradient(scheme, model, parts, [len(x) for x, _ in parts])) <= 1e-6


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("loss, m", [("mse", 2), ("cross_entropy", 3)])
def test_layers(layer, loss, m):
    torch.manual_seed(1)
    check(Net(lambda self, x: self.layers[0](self.b(x)), layer).double(), (2, 4, 4), 3, loss, m)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms(form):
    torch.manual_seed(2)
    check(Net(form).double(), (2, 4, 4), 3)


def test_one_dimension():
    torch.manual_seed(3)
    body = [nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(6, 5, 2), nn.AvgPool1d(2)]
    check(nn.Sequential(*body, nn.Flatten(), nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(), (2, 13), 3)


def test_frozen_layers_of_every_place():
    torch.manual_seed(4)
    model = NETS["densenet"][0]().double()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 1)
    check(model, (3, 8, 8), 4)
    model = NETS["mlp5"][0]().double()
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    check(model, (12,), 4)


def test_a_view_changed_in_place_is_refused_where_the_tensor_is_read_again():
    with pytest.raises(NotPerturbableError, match=r"view in place.*inplace=False"):
        Scheme(Net(lambda self, x: self.b(F.relu(x.contiguous(), inplace=True)) + x))


def test_a_norm_over_one_value_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    scheme = Scheme(model)
    noisy, _ = scheme.perturb(model.state_dict())
    with pytest.raises(BatchMismatchError, match="'1' takes the statistics of its batch"):
        scheme.client_step(noisy, (torch.ones(1, 3, dtype=torch.float64), torch.tensor([1])))


def test_terms_are_added_up_and_zero_where_nothing_came():
    terms = UpdateTerms(2, {"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": torch.zeros(1)}, Spare())
    left, right = torch.randn(2, 5, 2), torch.randn(5, 3)
    for _ in range(2):
        terms.product("a", left, right)
        terms.put("b", [torch.ones(2), torch.full((2,), 2.0)])
        terms.put("of another layer", [torch.ones(2), torch.ones(2)])
    rows = terms.finish()
    torch.testing.assert_close(rows[:, :6], 2 * torch.einsum("tbo,bi->toi", left, right).flatten(1))
    assert rows[:, 6:].tolist() == [[2, 2, 0], [4, 4, 0]]


def test_memory_is_handed_out_again_only_when_nobody_holds_it():
    spare, like = Spare(), torch.zeros(1, dtype=torch.float64)
    for hold in (lambda t: t, lambda t: t[0, :2], lambda t: t.numpy(), lambda t: t.detach()):
        taken = spare.take((2, 5), like)
        place, held = taken.data_ptr(), hold(taken)
        del taken
        other = spare.take((2, 5), like)
        assert other.data_ptr() != place
        place = other.data_ptr()
        del held, other
        assert spare.take((2, 5), like).data_ptr() == place
    assert spare.take((3, 5), like).shape == (3, 5)
    assert spare.take((3, 5), like.float()).dtype == torch.float32


def test_an_update_that_is_kept_does_not_change():
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, "mse")
    noisy, _ = scheme.perturb(model.state_dict())
    parts = batches((12,), 4, "mse", 3, torch.float64)
    updates = [scheme.client_step(noisy, part) for part in parts]
    for part, update in zip(parts, updates, strict=True):
        assert torch.equal(scheme.client_step(noisy, part).terms, update.terms)


@pytest.mark.parametrize("name", ["mlp7", "resnet20 without norms", "densenet without norms"])
def test_powers_of_two_round_as_the_plain_pass(name):
    """Bit for bit: a product with a power of two is exact, so every sum is the plain one times its channel's scale."""
    torch.manual_seed(5)
    make, shape = NETS[name]
    model = make()
    scheme = Scheme(model)
    x = torch.randn(8, *shape)
    noised = scheme.inference_model(model.state_dict())
    assert torch.equal(noised(x), model.eval()(x))
    _, key = scheme.perturb(model.state_dict())
    assert set(key.scales.tolist()) == {0.25, 0.5, 1.0, 2.0, 4.0}


def test_real_scales_where_digits_allow_or_on_demand():
    model = NETS["mlp5"][0]()
    _, real = Scheme(model, noise=Noise(powers_of_two=False)).perturb(model.state_dict())
    _, double = Scheme(model).perturb(model.double().state_dict())
    for key in (real, double):
        assert len(key.scales.unique()) > 60
        assert key.scales.min() >= 0.25
        assert key.scales.max() <= 4
    with pytest.raises(NoiseError, match=r"a spread of 2 or more, got 1\.5"):
        Noise(spread=1.5, powers_of_two=True)
    assert not Noise(spread=1.5).exact(torch.float32)
    assert [Noise().size(torch.float32), Noise().size(torch.float64), Noise(additive=3.0).size(torch.float32)] == [
        0.25,
        1,
        3,
    ]
