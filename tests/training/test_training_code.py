"""Ordinary training code beside itself in plain: what modules, copies, checkpoints and secret ids do, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import sectorch
from sectorch import DifferentiableTensor, Session
from sectorch.errors import ArgumentError, SecretAccessError, UnsupportedOpError

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), (5, 4)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 2)), (5, 4)),
    "behind": (lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.GroupNorm(2, 4)), (5, 4)),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Conv1d(2, 2, 2)), (3, 2, 4)),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")), (2, 1, 6, 6)
    ),
    "alpha dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.3), nn.Linear(4, 2)), (5, 4)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 2)), (5, 4)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 2)), (5, 4)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 2)), (5, 4)),
    "weight norm of all": (lambda: parametrizations.weight_norm(nn.Linear(4, 2), dim=None), (5, 4)),
    "cayley": (lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), (5, 4)),
    "checkpoint": (lambda: Checkpointed(nn.Linear(4, 4), nn.AlphaDropout(0.2), nn.Tanh(), nn.Linear(4, 2)), (5, 4)),
}  # fmt: skip


class Checkpointed(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return checkpoint(super().forward, input, use_reentrant=False)


@pytest.mark.parametrize("name", ["layer norm", "behind", "circular", "spectral norm", "weight norm", "checkpoint",
                                  *long(*(n for n in MODELS))])  # fmt: skip
def test_a_model_is_trained_as_in_plain(name: str):
    """Gradients err by some 2^-14 of themselves, of which three steps of 0.1 make 2^-16."""
    make, shape = MODELS[name]
    torch.manual_seed(1)
    session, plain, x = Session(reference=True), make(), torch.rand(shape)
    shared = sectorch.shared(copy.deepcopy(plain), session=session)
    for model, data in ((plain, x), (shared, sectorch.share(x, session=session))):
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for step in range(3):
            torch.manual_seed(step)
            optimiser.zero_grad()
            model(data).pow(2).mean().backward()
            optimiser.step()
    for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
        assert torch.allclose(p.detach(), q.detach().reveal(), atol=2.0**-16, rtol=0)


def halve_gradients(p: Any) -> None:
    p.grad.mul_(0.5)


def hooked(model: Any) -> Any:
    """A hook on a tensor, one that is called when its gradient is there, and one on a layer, of before sharing."""
    model[0].weight.register_hook(lambda g: g * 0.5)
    model[2].weight.register_post_accumulate_grad_hook(halve_gradients)
    model[1].register_full_backward_hook(lambda layer, given, came: (given[0] * 0.25,))
    return model


def by_hand(model: Any) -> None:
    for p in model.parameters():
        p.data -= 0.1 * p.grad.data


def clipped(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def chosen(model: Any, x: Any) -> Any:
    """A straight-through choice of a class, as in `F.gumbel_softmax(hard=True)`."""
    soft = model(x).softmax(1)
    hard = torch.zeros_like(soft).scatter(1, soft.argmax(1, keepdim=True), 1.0)
    return (hard - soft.detach() + soft).pow(3)


def written(model: Any, x: Any) -> Any:
    scores = model(x)
    return scores.scatter(-1, scores.argmax(-1, keepdim=True), 0.25)


RECIPES: dict[str, tuple[Callable, Callable, Callable]] = {
    "hooks": (hooked, lambda m, x: m(x), lambda m: None),
    "data": (lambda m: m, lambda m, x: m(x), by_hand),
    "clipped": (lambda m: m, lambda m, x: m(x), clipped),
    "chosen": (lambda m: m, chosen, lambda m: None),
    "written": (lambda m: m, written, lambda m: None),
}
"""What is done with a plain model, with its batch, and with its gradients."""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_recipe_gives_the_weights_of_plain_torch(name: str, recorded: bool):
    before, run, after = RECIPES[name]
    session, ends = Session(reference=True), []
    for secret in (False, True):
        torch.manual_seed(1)
        model = before(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
        model = sectorch.shared(model, session=session) if secret else model
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            x: Any = torch.rand(5, 4, generator=torch.Generator().manual_seed(step))
            x = sectorch.share(x, session=session) if secret else x
            with sectorch.step(session) if secret and recorded else torch.enable_grad():
                optimiser.zero_grad()
                run(model, x).pow(2).sum().backward()
                after(model)
                optimiser.step()
        ends.append([p.detach().reveal() if secret else p.detach() for p in model.parameters()])
    for p, q in zip(*ends, strict=True):
        assert torch.allclose(p, q, atol=2.0**-15, rtol=0)


@pytest.mark.parametrize("secret", [True, False])
@pytest.mark.parametrize("padding", [None, 0])
def test_rows_at_secret_places_have_their_gradient(secret: bool, padding: int | None):
    session, ids = Session(reference=not secret), torch.tensor([[0, 1, 3], [6, 2, 0]])
    places: Any = sectorch.share(ids, session=session)
    plain = nn.Embedding(7, 4, padding_idx=padding)
    looks: list[Callable] = [lambda e, i: F.embedding(i, e.weight, padding_idx=padding)]
    looks += [lambda e, i: e.weight[i], lambda e, i: e.weight.index_select(0, i[0])] if padding is None else []
    for look in looks:
        table = sectorch.shared(copy.deepcopy(plain), session=session)
        plain.zero_grad()
        look(plain, ids).pow(2).sum().backward()
        look(table, places).pow(2).sum().backward()
        assert plain.weight.grad is not None
        assert torch.allclose(table.weight.grad.reveal(), plain.weight.grad, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, *({"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)})]
)
def test_averages_of_a_shared_model_are_those_of_a_plain_one(options: dict):
    torch.manual_seed(0)
    session, plain, x = Session(reference=True), nn.Linear(4, 2), torch.rand(5, 4)
    shared = sectorch.shared(copy.deepcopy(plain), session=session)
    means = []
    for model, data in ((plain, x), (shared, sectorch.share(x, session=session))):
        means.append(AveragedModel(model, **options))
        optimiser = torch.optim.SGD(model.parameters(), 0.3)
        for _ in range(3):
            optimiser.zero_grad()
            model(data).pow(2).mean().backward()
            optimiser.step()
            means[-1].update_parameters(model)
    for p, q in zip(means[0].parameters(), means[1].parameters(), strict=True):
        assert torch.allclose(p.detach(), q.detach().reveal(), atol=2.0**-16, rtol=0)


def test_a_copy_has_memory_of_its_own_and_a_module_starts_anew():
    session = Session(reference=True)
    model = sectorch.shared(nn.Linear(4, 2), session=session)
    other = copy.deepcopy(model)
    assert isinstance(other.weight, nn.Parameter) and other.weight.requires_grad
    before = other.weight.detach().reveal()
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    assert torch.allclose(model.weight.detach().reveal(), nn.Linear(4, 2).weight.detach(), atol=2.0**-20)
    assert torch.equal(other.weight.detach().reveal(), before)


def test_what_cannot_be_trained_is_refused_by_what_to_do():
    session = Session(reference=True)
    x = torch.rand(3, 4)
    model = sectorch.shared(nn.Linear(4, 4), session=session)
    secret: Any = sectorch.share(x, session=session)
    with pytest.raises(ArgumentError, match=r"DifferentiableTensor\(share\(x.detach\(\)\), requires_grad=True\)"):
        sectorch.share(x.clone().requires_grad_(), session=session)
    leaf = DifferentiableTensor(secret, requires_grad=True)
    model(leaf[:2]).sum().backward()
    assert leaf.grad.reveal()[2].tolist() == [0, 0, 0, 0]
    with torch.inference_mode():
        with pytest.raises(ArgumentError, match="inference_mode"):
            sectorch.shared(nn.Linear(4, 2), session=session)
        with pytest.raises(ArgumentError, match="inference_mode"):
            DifferentiableTensor(secret, requires_grad=True)
        assert model(secret).shape == (3, 4)
    with pytest.raises(UnsupportedOpError, match="lazy"):
        sectorch.shared(nn.LazyLinear(3), session=session)
    with pytest.raises(UnsupportedOpError, match=r"torch\.frexp"):
        torch.frexp(model(secret))
    plain = nn.Linear(4, 2)
    made_before = torch.optim.SGD(plain.parameters(), 0.1)
    sectorch.shared(plain, session=session)(secret).sum().backward()
    with pytest.raises(ArgumentError, match=r"make it after sectorch.shared"):
        made_before.step()
    with pytest.raises(SecretAccessError, match=r"p\.copy_\(x\)"):
        plain.weight.data = plain.weight.detach() * 2
    with pytest.warns(FutureWarning):
        scripted = torch.jit.script(nn.Linear(4, 2))
    with pytest.raises(ArgumentError, match="scripted"):
        sectorch.shared(scripted, session=session)
    scaler = torch.amp.GradScaler("cpu")
    optimiser = torch.optim.SGD(plain.parameters(), 0.1)
    scaler.scale(plain(secret).sum()).backward()
    with pytest.raises(UnsupportedOpError, match="enabled=False"):
        scaler.step(optimiser)
    for option, way in (({"max_norm": 1.0}, "max_norm out"), ({"sparse": True}, "sparse=True out")):
        table = sectorch.shared(nn.Embedding(4, 2, **option), session=session)
        with pytest.raises(UnsupportedOpError, match=way):
            table(torch.tensor([1, 2])).sum().backward()
    for transform in (torch.func.vmap, torch.func.jacrev):
        with pytest.raises(UnsupportedOpError, match="whole batch"):
            transform(model)(leaf.detach())
    free = sectorch.shared(parametrizations.orthogonal(nn.Linear(4, 4)), session=session)
    with pytest.raises(UnsupportedOpError, match="cayley"):
        free(secret)
