"""Losses, directions and updates in the clear: what a released number is worth."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sectorch.federated import FederationError
from sectorch.protocols.capride import ModelError, training
from sectorch.protocols.capride.settings import (
    Directions,
    Party,
    Settings,
    contrasts,
    deep_directions,
    deep_parameters,
    draw,
    features_and_logits,
    head_directions,
    head_of,
    of_predictions,
)
from sectorch.protocols.capride.training import agreed_logits, deep_update, head_update

EXACT = dict(rtol=1e-9, atol=1e-9)
"""float64 throughout: sums of a few thousand terms of order one."""


def network(d: int = 5, classes: int = 4, bias: bool = True) -> nn.Module:
    torch.manual_seed(d)
    return nn.Sequential(nn.Linear(6, d), nn.Softplus(), nn.Linear(d, classes, bias=bias)).double().eval()


def case(n: int = 30, classes: int = 4, seed: int = 0, **kw):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draws, dtype=torch.float64)
    z = 5 * torch.randn(n, classes, generator=draws, dtype=torch.float64)
    return network(classes=classes, **kw), x, z


def autograd(model: nn.Module, x: torch.Tensor, z: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
    """The gradient that a party could compute if the peer's logits were open."""
    loss = training.pairwise(model(x), z, temperature)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


@given(st.integers(0, 10**6), st.floats(0.5, 8), st.integers(2, 12))
@settings(max_examples=50)
def test_equations_8_and_9(seed: int, temperature: float, classes: int):
    draws = torch.Generator().manual_seed(seed)
    u, z = (3 * torch.randn(7, classes, generator=draws, dtype=torch.float64) for _ in range(2))
    u.requires_grad_()
    logs, peer = (u / temperature).log_softmax(1), (z / temperature).log_softmax(1)
    true = F.kl_div(peer, logs, reduction="sum", log_target=True)
    torch.testing.assert_close(training.true_kl(u, z, temperature), true, **EXACT)
    gradients = [torch.autograd.grad(f(u, z, temperature), u)[0] for f in (training.true_kl, training.approximate_kl)]
    torch.testing.assert_close(*gradients, **EXACT)


@given(st.integers(0, 10**6), st.floats(0.5, 8), st.floats(0.1, 50), st.integers(1, 4), st.integers(1, 30))
def test_equations_4_to_6(seed: int, temperature: float, weight: float, peers: int, size: int):
    """What a batch adds to the cross-entropy: lambda T^2 times the peers' mean of Equation 9, a mean over the batch. Of
    samples outside the round's subset nothing is added, and in scalar mode of the peers nothing."""
    model, x, _ = case(seed=seed)
    draws = torch.Generator().manual_seed(seed)
    z = 5 * torch.randn(peers, 30, 4, generator=draws, dtype=torch.float64)
    subset, batch = (torch.randperm(30, generator=draws)[:count] for count in (20, size))
    party = Party("P", model, x, torch.zeros(30).long())
    how = Settings(temperature=temperature, weight=weight)
    u, inside = model(x[batch]), torch.isin(batch, subset)
    added = training.distillation(model, party, training.Update(0.0, subset, z.mean(0)[subset]), how)(batch, u)
    mean = sum(training.approximate_kl(u[inside], one[batch][inside], temperature) for one in z) / peers
    torch.testing.assert_close(added, weight * temperature**2 * mean / size, **EXACT)
    scalar = training.distillation(model, party, training.Update(0.0, subset), how)(batch, u)
    own = training.local_uncertainty(u[inside], temperature)
    torch.testing.assert_close(scalar, weight * temperature**2 * own / size, **EXACT)


@given(st.integers(0, 10**6), st.floats(0.5, 8), st.booleans(), st.integers(2, 9), st.integers(1, 40))
@settings(max_examples=50)
def test_the_head_gradient_is_exact(seed: int, temperature: float, bias: bool, classes: int, n: int):
    model, x, z = case(n, classes, seed, bias=bias)
    features, logits = features_and_logits(model, x)
    changes, basis = head_directions(features, classes, bias)
    asked = Directions.of(of_predictions(changes, logits, temperature))
    rank = torch.linalg.matrix_rank(torch.cat([features, torch.ones(n, int(bias))], 1).detach())
    assert len(asked) == (classes - 1) * int(rank), "one number for each contrast and feature direction"
    assert float(asked.weights.abs().sum(2).max()) <= 1 + 1e-12
    found = head_update(basis, asked, asked.on(z, temperature))
    true = autograd(model, x, z, temperature)
    torch.testing.assert_close(found[:, :5], true["2.weight"], rtol=1e-7, atol=1e-7)
    if bias:
        torch.testing.assert_close(found[:, 5], true["2.bias"], rtol=1e-7, atol=1e-7)


def test_a_lower_rank_is_the_gradient_s_projection():
    model, x, z = case()
    features, logits = features_and_logits(model, x)
    changes, basis = head_directions(features, 4, True, rank=2)
    asked = Directions.of(of_predictions(changes, logits, 2.0))
    found = head_update(basis, asked, asked.on(z, 2.0))
    true = autograd(model, x, z, 2.0)
    whole = torch.cat([true["2.weight"], true["2.bias"].unsqueeze(1)], 1)
    torch.testing.assert_close(found, whole @ basis.features @ basis.features.t(), rtol=1e-7, atol=1e-7)


def test_contrasts_are_orthonormal_and_blind_to_shifts():
    for classes in (2, 7):
        c = contrasts(classes)
        torch.testing.assert_close(c.t() @ c, torch.eye(classes - 1, dtype=torch.float64), **EXACT)
        assert float(c.sum(0).abs().max()) < 1e-12


def test_forward_mode_is_the_directional_derivative():
    model, x, z = case()
    drawn = draw(model, 6, torch.Generator().manual_seed(1))
    changes = deep_directions(model, x, drawn)
    found = Directions(of_predictions(changes, model(x), 2.0), torch.ones(6)).on(z, 2.0)
    true = autograd(model, x, z, 2.0)
    flat = torch.cat([true[name].flatten() for name in deep_parameters(model)])
    torch.testing.assert_close(found, drawn @ flat, **EXACT)


def test_forward_gradients_are_unbiased():
    """The mean over many draws of directions is the gradient; the agreed logits only lower the spread.

    The estimate's covariance is |g|^2 (1 + ...) / D at most P |g - known|^2 / D for each entry together, so that the
    mean over 200 independent draws of 4 directions is within 6 standard errors, estimated from the draws themselves.
    """
    model, x, z = case()
    true = autograd(model, x, z, 2.0)
    flat = torch.cat([true[name].flatten() for name in deep_parameters(model)])
    draws = torch.Generator().manual_seed(2)
    spreads = []
    for agreed in (model(x).detach(), z + torch.randn(z.shape, generator=draws, dtype=torch.float64)):
        estimates = []
        for _ in range(200):
            drawn = draw(model, 4, draws)
            asked = Directions.of(of_predictions(deep_directions(model, x, drawn), model(x), 2.0))
            deep, _ = deep_update(model, x, agreed, drawn, asked, asked.on(z, 2.0), 2.0)
            estimates.append(torch.cat([value.flatten() for value in deep.values()]))
        estimates = torch.stack(estimates)
        error = estimates.std(0) / len(estimates) ** 0.5
        assert bool(((estimates.mean(0) - flat).abs() < 6 * error + 1e-9).all())
        spreads.append(float(estimates.std(0).norm()))
    assert spreads[1] < spreads[0] / 2, "a control variate near the peer's logits lowers the variance"


def test_all_directions_give_the_whole_gradient():
    model, x, z = case()
    size = sum(p.numel() for p in deep_parameters(model).values())
    drawn = draw(model, size, torch.Generator().manual_seed(3))
    asked = Directions.of(of_predictions(deep_directions(model, x, drawn), model(x), 2.0))
    deep, _ = deep_update(model, x, model(x).detach(), drawn, asked, asked.on(z, 2.0), 2.0)
    true = autograd(model, x, z, 2.0)
    for name, value in deep.items():
        torch.testing.assert_close(value, true[name], rtol=1e-7, atol=1e-7)


def test_agreed_logits_agree_and_pull_as_the_head_gradient_does():
    model, x, z = case(n=60)
    features, logits = (t.detach() for t in features_and_logits(model, x))
    changes, _ = head_directions(features, 4, True)
    asked = Directions.of(of_predictions(changes, logits, 2.0))
    agree = lambda peer: agreed_logits(logits, changes, asked, asked.on(peer, 2.0), 2.0, 0.0)
    agreed = agree(z)
    # The ridge of 1e-14 of the largest entry, times the square of the system's condition, below 1e3 here.
    torch.testing.assert_close(asked.on(agreed, 2.0), asked.on(z, 2.0), rtol=1e-6, atol=1e-6)
    found, true = (autograd(model, x, target, 2.0)["2.weight"] for target in (agreed, z))
    torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-6)
    # With directions of the deep layers as well, every measured derivative is met.
    drawn = draw(model, 8, torch.Generator().manual_seed(4))
    more = torch.cat([changes, deep_directions(model, x, drawn)])
    both = Directions.of(of_predictions(more, logits, 2.0))
    all_met = agreed_logits(logits, more, both, both.on(z, 2.0), 2.0, 0.0)
    torch.testing.assert_close(both.on(all_met, 2.0), both.on(z, 2.0), rtol=1e-4, atol=1e-4)
    # A peer that agrees with the party pulls nowhere, and one that is linear in its features is found, but for shifts.
    torch.testing.assert_close(agree(logits), logits, rtol=1e-6, atol=1e-6)
    linear = features @ torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    centred = lambda t: t - t.mean(1, keepdim=True)
    torch.testing.assert_close(centred(agree(linear)), centred(linear), rtol=1e-5, atol=1e-5)


def test_noise_shrinks_the_agreed_logits_towards_the_own():
    model, x, z = case(n=60)
    features, logits = (t.detach() for t in features_and_logits(model, x))
    changes, _ = head_directions(features, 4, True)
    asked = Directions.of(of_predictions(changes, logits, 2.0))
    moved = [
        float((agreed_logits(logits, changes, asked, asked.on(z, 2.0), 2.0, sigma) - logits).norm())
        for sigma in (0.0, 10.0, 1000.0)
    ]
    assert moved[0] > moved[1] > moved[2]


def test_other_threads_may_call_the_model_meanwhile():
    both = threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, x):
            both.wait(60)
            return x

    model, inputs = nn.Sequential(Waits(), nn.Linear(3, 2)), torch.randn(2, 5, 3)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(features_and_logits, model), inputs))
    for x, (features, logits) in zip(inputs, found, strict=True):
        assert torch.equal(features, x) and torch.equal(logits, model[1](x))


def test_models_without_a_plain_head_are_refused():
    with pytest.raises(ModelError, match="no classifier head"):
        head_of(nn.Conv2d(1, 1, 3))
    with pytest.raises(ModelError, match="output must be that of its last linear layer"):
        features_and_logits(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), torch.zeros(2, 3))
    with pytest.raises(FederationError, match="between 1 and 35 directions"):
        draw(network(), 36, torch.Generator())


def test_questions_do_not_change_the_model():
    model, x, _ = case()
    before = copy.deepcopy(model.state_dict())
    deep_directions(model, x, draw(model, 3, torch.Generator().manual_seed(0)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and not model.get_parameter(name).grad_fn
