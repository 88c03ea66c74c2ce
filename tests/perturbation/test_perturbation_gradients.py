"""The recovered gradient is autograd's: the paper's nets, random graphs, masks, statistics, several batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from perturbation_cases import NETS, TOLERANCE, batches, one_round, plain_gradient, programs, relative_error
from torch import nn

from sectorch.protocols.perturbation import Noise, Scheme, cohort

SCHEMES = [
    *(("mse", m, None) for m in (1, 2, 4)),
    ("cross_entropy", 1, "shift"),
    *(("cross_entropy", m, "paper") for m in (1, 2, 4)),
]
DEEP = ("resnet32", "resnet56")


def check(name: str, loss: str, m: int, exchange: str | None, clients: int, dtype: torch.dtype, masked: bool):
    torch.manual_seed(1)
    make, shape = NETS[name]
    model = make().to(dtype)
    scheme = Scheme(model, loss, m, exchange=exchange)
    parts = batches(shape, 4, loss, clients, dtype)
    found = one_round(scheme, model, parts, masked)
    expected = plain_gradient(scheme, model, parts, [len(x) for x, _ in parts])
    assert relative_error(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("loss, m, exchange", SCHEMES)
@pytest.mark.parametrize("name", [name for name in NETS if name not in DEEP])
def test_gradient_of_the_papers_nets(name, loss, m, exchange):
    check(name, loss, m, exchange, 2, torch.float64, masked=True)


@pytest.mark.parametrize("loss, m, exchange", SCHEMES)
@pytest.mark.parametrize("name", ["mlp7", "resnet20", "densenet"])
def test_gradient_in_float32(name, loss, m, exchange):
    check(name, loss, m, exchange, 2, torch.float32, masked=False)


@pytest.mark.parametrize("name", ["mlp3", "resnet20", "resnet20 without norms", "densenet"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_gradient_with_the_noise_on_the_bias(name, loss, m):
    """alpha is 1 and its gradient 0, so sigma (or psi) alone has to be taken off: m + 1 terms."""
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(m)
        make, shape = NETS[name]
        model = make().to(dtype)
        scheme = Scheme(model, loss, m, exchange="paper", noise_on="bias")
        assert scheme.term_count == m + 1
        parts = batches(shape, 4, loss, 3, dtype)
        found = one_round(scheme, model, parts, masked=True)
        assert relative_error(found, plain_gradient(scheme, model, parts, [4, 5, 6])) <= TOLERANCE[dtype]


@pytest.mark.parametrize("clients", [1, 5, 10])
@pytest.mark.parametrize("loss, m, exchange", [SCHEMES[1], SCHEMES[3], SCHEMES[5]])
def test_gradient_of_many_clients(clients, loss, m, exchange):
    check("mlp3", loss, m, exchange, clients, torch.float64, masked=clients > 1)


@pytest.mark.parametrize("name", DEEP)
def test_gradient_of_deep_nets(name):
    check(name, "mse", 2, None, 2, torch.float64, masked=True)
    check(name, "cross_entropy", 2, "paper", 2, torch.float64, masked=True)


@pytest.mark.parametrize("loss, m, exchange", [SCHEMES[0], SCHEMES[2], SCHEMES[3], SCHEMES[5]])
@pytest.mark.parametrize("name", DEEP)
def test_gradient_of_deep_nets_in_float32(name, loss, m, exchange):
    check(name, loss, m, exchange, 2, torch.float32, masked=m == 2)


@pytest.mark.parametrize("loss, m, exchange", SCHEMES)
def test_bytes_are_those_of_the_paper(loss, m, exchange):
    """Up: the gradient and m + 1 or 3m noise terms, O(2m|W|) and O(3m|W|); down: the model and r_a. Ring elements have
    8 bytes, as float64."""
    model = NETS["mlp5"][0]().double()
    size = sum(p.nbytes for p in model.parameters())
    scheme = Scheme(model, loss, m, exchange=exchange)
    noisy, key = scheme.perturb(model.state_dict())
    part, server = batches((12,), 4, loss, 1, torch.float64)[0], lambda request: scheme.answer(key, request)
    terms = {"mse": m + 2, "shift": 1, "paper": 3 * m + 1}[exchange or loss]
    assert scheme.client_step(noisy, part, server=server).nbytes == terms * size
    assert scheme.client_step(noisy, part, masks=cohort(2)[0], share=0.5, server=server).nbytes == terms * size
    assert noisy.nbytes == size + 2 * 4 * 8 + 16


@pytest.mark.sectorch_long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("clients", [1, 5, 10])
@pytest.mark.parametrize("loss, m, exchange", SCHEMES)
@pytest.mark.parametrize("name", list(NETS))
def test_gradient_everywhere(name, loss, m, exchange, clients, dtype):
    check(name, loss, m, exchange, clients, dtype, masked=clients > 1)


def random_graph(model: nn.Module, choice: tuple):
    loss, m, exchange = choice
    outputs = model.head.out_features
    scheme = Scheme(model, loss, min(m, outputs), exchange=exchange, channels=2)
    parts = batches((2, 4, 4), outputs, loss, 2, torch.float64)
    found = one_round(scheme, model, parts)
    expected = plain_gradient(scheme, model, parts, [len(x) for x, _ in parts])
    assert relative_error(found, expected) <= TOLERANCE[torch.float64]
    trained = model.eval()(parts[0][0])
    scale = trained.abs().max() + 1
    assert (scheme.inference_model(model.state_dict())(parts[0][0]) - trained).abs().max() <= 1e-6 * scale


@settings(max_examples=50)
@given(programs(), st.sampled_from(SCHEMES))
def test_random_graphs(model, choice):
    random_graph(model, choice)


@pytest.mark.sectorch_long
@settings(max_examples=1000)
@given(programs(), st.sampled_from(SCHEMES))
def test_random_graphs_long(model, choice):
    random_graph(model, choice)


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_several_local_batches_are_their_mean(loss):
    torch.manual_seed(2)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, loss)
    parts = batches((12,), 4, loss, 3, torch.float64)
    noisy, key = scheme.perturb(model.state_dict())
    found = scheme.recover(key, [scheme.client_step(noisy, parts)], [15])
    expected = plain_gradient(scheme, model, parts, [len(x) for x, _ in parts])
    assert relative_error(found, expected) <= TOLERANCE[torch.float64]


def test_frozen_parameters_are_noised_and_not_returned():
    torch.manual_seed(3)
    model = NETS["mlp3"][0]().double()
    model[0].weight.requires_grad_(False)
    scheme = Scheme(model, "mse")
    parts = batches((12,), 4, "mse", 2, torch.float64)
    found = one_round(scheme, model, parts)
    assert "0.weight" not in found
    assert relative_error(found, plain_gradient(scheme, model, parts, [4, 5])) <= 1e-6
    assert not torch.equal(scheme.perturb(model.state_dict())[0].state["0.weight"], model[0].weight)


def test_batch_statistics_are_those_of_plain_training():
    torch.manual_seed(4)
    model = NETS["resnet20"][0]().double()
    scheme = Scheme(model)
    parts = batches((3, 8, 8), 4, "cross_entropy", 1, torch.float64)
    noisy, key = scheme.perturb(model.state_dict())
    found = scheme.recover(key, [scheme.client_step(noisy, parts[0])], [1])
    changed = scheme.update_statistics(model.state_dict(), found)
    model(parts[0][0])  # training mode: the buffers move
    after = dict(model.named_buffers())
    assert set(changed) == set(after)
    for name, value in changed.items():
        torch.testing.assert_close(value, after[name], rtol=1e-10, atol=1e-12)


def test_dropout_is_the_clients_own():
    """The same draw gives the same gradient: dropout is homogeneous given its mask."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    scheme = Scheme(model, "mse")
    parts = batches((6,), 3, "mse", 1, torch.float64)
    torch.manual_seed(9)
    found = one_round(scheme, model, parts)
    torch.manual_seed(9)
    assert relative_error(found, plain_gradient(scheme, model, parts, [4])) <= 1e-6


@pytest.mark.parametrize("additive", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("exchange", ["paper", "shift"])
def test_cross_entropy_is_safe_for_large_noise(additive, exchange):
    """Logits of magnitude 100 and noise of hundreds of nats: nothing overflows in log space."""
    torch.manual_seed(5)
    model = NETS["mlp3"][0]().double()
    with torch.no_grad():
        model[-1].weight.mul_(100)
    scheme = Scheme(model, exchange=exchange, noise=Noise(additive=additive))
    parts = batches((12,), 4, "cross_entropy", 2, torch.float64)
    expected = plain_gradient(scheme, model, parts, [4, 5])
    assert relative_error(one_round(scheme, model, parts), expected) <= 1e-6
