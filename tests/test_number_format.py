"""The number format: chosen by the weights where none is named, by weights and values where a batch is given, and what
an error says to do about it works."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import by_turns, some
from torch import nn

import sectorch
from sectorch import errors
from sectorch.network import save_model
from sectorch.serving.description import load_program
from sectorch.serving.model_file import read_model
from sectorch.tensor import Scheme


def net(total: float, bias: float = 0.0) -> Any:
    """The weights of each output of its second layer sum to so much in magnitude."""
    model: Any = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        model[2].weight.div_(model[2].weight.abs().sum(1, keepdim=True)).mul_(total)
        model[2].bias.fill_(bias)
        model[0].bias.zero_()
    return model.requires_grad_(False)


X = torch.rand(5, 6)
TOTALS = (1.0, 503.0, 506.0, 1e3, 1.1e3, 2e4, 1.2e5)


@pytest.mark.parametrize("total", some(TOTALS, [503.0, 506.0, 1.2e5]))
def test_as_precise_as_the_weights_allow(total):
    """The default format wherever it fits, and else the most fraction bits that hold the sums beside the same limit."""
    model = net(total)
    secured = sectorch.secure(model)
    x = X / max(1.0, total / 100)
    came, scheme = secured(x), secured.scheme
    if total <= Scheme().gain:
        assert scheme == Scheme() and not secured.format_reason
    else:
        assert scheme.gain >= total and scheme.activation_bits >= 12 and "'2.weight' sums to" in secured.format_reason
        assert Scheme(scheme.frac_bits + 1, limit_bits=12).gain < total
    assert (came - model(x)).abs().max() <= 2.0**-scheme.frac_bits * (8 + 8 * total)
    reference = sectorch.reference(model)
    assert torch.equal(came, reference(x)) and reference.scheme == scheme
    explained = sectorch.explain(model, X)
    assert f"{scheme.frac_bits} fraction bits, activations below {scheme.activation_limit:g}" in str(explained)
    assert ("'2.weight'" in explained.number_format) == (total > Scheme().gain)
    ahead = sectorch.secure(model)
    ahead.preprocess(5, (6,))
    assert torch.equal(ahead(x), came)


def test_a_bias_may_need_a_larger_limit():
    model = net(1.0, 9000.0)
    secured = sectorch.secure(model)
    assert (secured(X) - model(X)).abs().max() <= 1.5e-2 and secured.scheme == Scheme(20, limit_bits=14)
    assert "'2.bias', which is added to activations, reaches 9000" in secured.format_reason


def test_a_named_format_stays_and_what_no_format_holds_is_refused():
    for scheme in (Scheme(limit_bits=12), Scheme(19), Scheme(21)):
        with pytest.raises(errors.FixedPointRangeError, match=r"layer '2' \(Linear\): weight '2.weight'"):
            sectorch.secure(net(1e5), scheme)(X)
    for total in (2e5, 3e7):  # so few fraction bits somebody has to name
        with pytest.raises(errors.FixedPointRangeError, match=r"use Scheme\(frac_bits=1\d, limit_bits=12\)"):
            sectorch.secure(net(total))(X)
    with pytest.raises(errors.FixedPointRangeError, match="no format of 10 fraction bits or more"):
        sectorch.secure(net(1e11))(X)


SCHEMES = {"12": Scheme(limit_bits=12), "15": Scheme(limit_bits=15), "22": Scheme(22), "24": Scheme(24, limit_bits=9)}


@by_turns(total=(506.0, 1.1e3, 2e4, 1e6, 3e7), scheme=SCHEMES, bias=(0.0, 9000.0))
def test_the_way_out_of_weights_that_are_too_large_works_at_once(total, scheme, bias):
    model = net(total, bias)
    with torch.no_grad():
        model[4].weight.fill_(1e3)  # whose own error would be the next one
    try:
        sectorch.secure(model, SCHEMES[scheme])(X / total)
    except errors.FixedPointRangeError as error:
        found = re.search(r"use Scheme\(frac_bits=(\d+), limit_bits=(\d+)\)", str(error))
        assert found, error
        fits = Scheme(int(found[1]), limit_bits=int(found[2]))
        assert fits.activation_bits >= SCHEMES[scheme].activation_bits
        sectorch.secure(model, fits).choose_format(X)
        secured = sectorch.secure(model, fits)
        secured.check_weights(X)


@pytest.mark.parametrize("largest", [4095.9999999, 4096.0, 5000.0, 1e5, 4e6])
def test_the_way_out_of_an_input_that_is_too_large_works(largest):
    """It leaves the weights the room that they had."""
    x = torch.tensor([[largest, 1.0]], dtype=torch.float64)
    model = nn.Linear(2, 1).double().eval().requires_grad_(False)
    model.weight.fill_(250.0 if largest < 1e4 else 1.0)
    with pytest.raises(errors.FixedPointRangeError, match="input reaches") as error:
        sectorch.secure(model)(x)
    found = re.search(r"Scheme\(frac_bits=(\d+), limit_bits=(\d+)\)", str(error.value))
    assert found, error.value
    fits = Scheme(int(found[1]), limit_bits=int(found[2]))
    assert fits.gain >= Scheme().gain
    if largest < 5000:  # the sum of products is an activation too
        model.weight.fill_(0.5)
    assert torch.allclose(sectorch.secure(model, fits)(x), model(x), rtol=1e-4)


def test_an_error_names_the_input():
    class Two(nn.Module):
        def forward(self, age, income):
            return age + income

    with pytest.raises(errors.FixedPointRangeError, match="the input 'income' reaches"):
        sectorch.secure(Two().eval())(age=torch.ones(2), income=torch.full((2,), 1e5))


def folded() -> tuple[Any, torch.Tensor]:
    """The weights of one output of a layer sum to 1058 once the norm behind it is folded in."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
    nn.init.normal_(model[0].weight)
    model[1].running_var.fill_(0.003)
    return model.requires_grad_(False), torch.randn(8, 64) * 20


def column() -> tuple[Any, torch.Tensor]:
    """A column to 4254, and a norm whose factor is 236."""
    model: Any = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).eval()
    model[0].running_var.copy_(torch.tensor([1e6, 8e-6]))
    return model.requires_grad_(False), torch.tensor([[4254.0, 0.001], [10.0, 0.002]])


@pytest.mark.parametrize("made", [folded, column])
def test_calibration_chooses_a_format_for_values_and_weights(made):
    model, x = made()
    secured = sectorch.secure(model, calibrate=x)
    came = secured(x)
    assert (came - model(x)).abs().max() <= 1e-3 * model(x).abs().max()
    assert torch.equal(came, sectorch.reference(model, calibrate=x)(x))


def test_calibration_says_that_there_is_no_format():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval().requires_grad_(False)
    model[0].weight.fill_(1.0)
    model[1].weight.fill_(1e4)
    x = torch.full((1, 2), 1e4)
    with pytest.raises(errors.FixedPointRangeError, match=r"holds both: layer '1'.*'1.weight' sums to 2e\+04"):
        sectorch.secure(model, calibrate=x)


def test_a_model_file_says_which_format_its_weights_need(tmp_path):
    """A decides; whoever reads the description computes in that format where the question names none."""
    model = net(2e4)
    save_model(model, X, tmp_path / "m.safetensors")
    description, _ = read_model(tmp_path / "m.safetensors")
    secured = sectorch.secure(model)
    secured(X)
    scheme = secured.scheme
    assert description["format"] == [scheme.frac_bits, scheme.limit_bits]
    served = load_program(description)
    assert served.scheme(Scheme(network="wan")) == Scheme(scheme.frac_bits, "exact", "wan", True, scheme.limit_bits)
    assert served.scheme(Scheme(16)) == Scheme(16) and served.scheme(Scheme(limit_bits=12)) == Scheme(limit_bits=12)
    for bad in ([20], [20, 13.0], [30, 1], [20, 40], "20", [True, 12], {"version": 2}):
        changed = description | (bad if isinstance(bad, dict) else {"format": bad})
        with pytest.raises(errors.ProgramError):
            load_program(changed)
    save_model(net(1.0), X, tmp_path / "n.safetensors")
    assert "format" not in read_model(tmp_path / "n.safetensors")[0]
