"""Private gradients of many kinds of models: those of torch.func, clipped row by row, or a refusal; never others.

A model of the zoo is built by a function of no arguments; its rows have four features, and its results four classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import long, some
from torch import nn
from torch.func import functional_call, grad, vmap

import sectorch
from sectorch import Session
from sectorch.choreography.ledger import Transcript
from sectorch.dp import Budget, PrivateGradients
from sectorch.errors import ArgumentError, SectorchError, ShapeError

ROWS = 6


class Own(nn.Module):
    """Modules, and a forward made of them."""

    def __init__(self, forward: Callable, **modules: Any):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def tied(*names: str, same: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for name in names:
        for layer in (model[2], model[4]) if same else (model[4],):
            setattr(layer, name, getattr(model[0], name))
    return model


def frozen(*names: str, of: Callable[[], nn.Module] = tied) -> nn.Module:
    model = of()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(names))
    return model


def fixed(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def normalised(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 4))


def own(forward: Callable, **modules: Any) -> Callable[[], nn.Module]:
    return lambda: Own(forward, **{name: build() for name, build in modules.items()})


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Sigmoid(), nn.Sequential(nn.Identity(), layer))


def biases_of_two_sizes() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
    model[4].bias = model[2].bias
    return model


def ladder() -> nn.Module:
    """The weight of the first and second layer, the bias of the second and third, all twice."""
    model = tied("weight", same=False)
    model[2].bias = model[4].bias
    return nn.Sequential(model, nn.Tanh(), model)


def four() -> nn.Module:
    return nn.Linear(4, 4)


def two() -> nn.Module:
    return nn.Linear(2, 2)


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.layer = fixed(nn.Linear(inputs, outputs))
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Words(nn.Module):
    """A classifier of texts of three words: frozen embeddings and attention with adapters, and a trained last layer."""

    def __init__(self):
        super().__init__()
        self.words = fixed(nn.Embedding(9, 6))
        self.query, self.value, self.norm = LoRA(6, 6), LoRA(6, 6), fixed(nn.LayerNorm(6))
        self.head = nn.Linear(6, 4)

    def forward(self, ids):
        x = self.words(ids)
        x = x + (self.query(x) @ x.mT / 6**0.5).softmax(-1) @ self.value(x)
        return self.head(self.norm(x).mean(1))


class MixedWords(Words):
    """Each text sees its neighbour's words."""

    def forward(self, ids):
        return super().forward(ids.roll(1, 0))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "plain": tied,
    "no bias": lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False)),
    "tied weights": lambda: tied("weight"),
    "tied biases": lambda: tied("bias"),
    "tied layers": lambda: tied("weight", "bias"),
    "two tied weights": lambda: tied("weight", same=False),
    "biases of two sizes": biases_of_two_sizes,
    "one layer three times": twice,
    "ladder": ladder,
    "frozen weight": lambda: frozen("0.weight"),
    "frozen later weight": lambda: frozen("2.weight", "4.bias"),
    "frozen biases": lambda: frozen("0.bias", "2.bias", "4.bias"),
    "frozen first layer": lambda: frozen("0."),
    "frozen last layer": lambda: frozen("4."),
    "frozen tied weight": lambda: frozen("0.weight", of=lambda: tied("weight")),
    "frozen weight of one layer three times": lambda: frozen("0.weight", of=twice),
    "frozen convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), fixed(nn.Conv1d(2, 4, 3, padding=1, groups=2)), nn.Flatten(), nn.Linear(8, 4)
    ),
    "frozen LayerNorm": lambda: normalised(fixed(nn.LayerNorm(6))),
    "frozen BatchNorm": lambda: normalised(fixed(nn.BatchNorm1d(6)).eval()),
    "LayerNorm": lambda: normalised(nn.LayerNorm(6, elementwise_affine=False)),
    "GroupNorm": lambda: normalised(nn.GroupNorm(2, 6, affine=False)),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 4)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "unused": own(lambda self, x: self.a(x), a=four, b=four),
    "unused later": own(lambda self, x: self.a(x) + 0 * self.b(x).detach(), a=four, b=four),
    "residual": own(lambda self, x: x + self.a(torch.relu(self.a(x) + self.b(x))), a=four, b=four),
    "branches": own(
        lambda self, x: self.c(torch.cat((self.a(x), self.b(x)), 1).softmax(1)),
        a=four, b=four, c=lambda: nn.Linear(8, 4),
    ),
    "sequences": own(lambda self, x: self.a(x.view(-1, 2, 2)).flatten(1), a=two),
    "two places and then one": own(
        lambda self, x: self.b(torch.tanh(self.a(torch.tanh(self.a(x.view(-1, 2, 2)))[:, 0]) + x[:, :2])),
        a=two, b=lambda: nn.Linear(2, 4),
    ),
    "places in two dimensions": own(
        lambda self, x: self.b(self.a(x.view(-1, 2, 2, 1)).relu().flatten(1)), a=lambda: nn.Linear(1, 3),
        b=lambda: nn.Linear(12, 4),
    ),
    "adapter": own(lambda self, x: self.a(torch.relu(self.b(x))), a=lambda: LoRA(4, 4), b=lambda: LoRA(4, 4)),
    "nested": own(lambda self, x: self.a(torch.tanh(self.b(x))), a=tied, b=lambda: tied("weight")),
}  # fmt: skip
FEW = ("tied weights", "tied biases", "one layer three times", "ladder", "frozen weight", "frozen first layer",
       "frozen convolution", "in place", "unused", "biases of two sizes", "frozen later weight", "adapter",
       "two places and then one")  # fmt: skip


def rows(count: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 4


def of_single_rows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """torch's own gradient of each row, by name; zeros of what takes no part."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(trained: dict, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, trained, (row[None],)), label[None])

    return vmap(grad(loss), (None, 0, 0))(trained, x, y)


def private(plain: nn.Module, clip: float, noise: float, count: int = ROWS, loss: Any = F.cross_entropy) -> nn.Module:
    """The shared model after a step, with its gradients."""
    session = Session(reference=True)
    model = sectorch.shared(copy.deepcopy(plain), owner="A", session=session)
    steps = PrivateGradients(
        model, max_grad_norm=clip, noise_multiplier=noise, rows=count, batch_size=count, budget=Budget(1e30, 1e-5)
    )
    x, y = (
        sectorch.share(v, session=session, **more) for v, more in zip(rows(count), ({"limit": 8.0}, {}), strict=True)
    )
    steps.backward(loss, x, y)  # in their order, so that a single row can be looked at
    assert steps.steps == 1 and steps.budget.spent > 0
    return model


@pytest.mark.parametrize("name", some(RIGHT, FEW))
def test_gradients_are_the_clipped_ones_of_single_rows(name: str):
    torch.manual_seed(3)
    plain = RIGHT[name]()
    x, y = rows()
    single = of_single_rows(copy.deepcopy(plain), x, y)
    norms = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in single.values()))
    clip = float(norms.median())  # which clips one half of the rows
    found = dict(private(plain, clip, 2.0**-26 / clip).named_parameters())
    for key, p in plain.named_parameters():
        given = found[key].grad
        if not p.requires_grad or not single[key].any():
            assert given is None, f"{key} takes no part, and has a gradient"
            continue
        wanted = (single[key] * (clip / norms).clamp(max=1).view(-1, *[1] * p.dim())).mean(0)
        # Gradients err by some 2^-16 on shares, and a row of norm one is clipped to some 2^-11 less.
        assert torch.allclose(given.reveal(), wanted, atol=1e-3), f"{key}: {(given.reveal() - wanted).abs().max()}"


@pytest.mark.parametrize("name", some(RIGHT, ("ladder",)))
def test_no_row_is_longer_than_the_bound(name: str):
    """The gradient of a batch of one is that row's, of all trainable parameters together."""
    torch.manual_seed(3)
    plain = RIGHT[name]()
    own = torch.sqrt(sum((g**2).sum() for g in of_single_rows(copy.deepcopy(plain), *rows(1)).values()))
    for clip in (0.01, 0.3):
        model = private(plain, clip, 2.0**-26 / clip, 1)
        length = torch.sqrt(
            sum((p.grad.reveal().double() ** 2).sum() for p in model.parameters() if p.grad is not None)
        )
        assert min(clip, own) * 0.98 <= length <= clip + 2.0**-19, f"{length} for a bound of {clip}"


def test_noise_is_in_each_entry_once_and_in_no_other():
    """A weight of three layers has the noise of one, and what is frozen none; both parties' together have 2 sigma^2."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    for layer in model[1:]:
        layer.weight = model[0].weight
    model[1].bias.requires_grad_(False)
    session = Session(reference=True)
    shared = sectorch.shared(model, session=session)
    steps = PrivateGradients(shared, max_grad_norm=0.5, noise_multiplier=64.0, rows=2, batch_size=2)
    steps.backward(F.mse_loss, *(sectorch.share(torch.rand(2, 40), session=session, limit=1.0) for _ in range(2)))
    assert shared[1].bias.grad is None and shared[1].weight.grad is shared[0].weight.grad
    drawn = shared[0].weight.grad.reveal() * 2 / (0.5 * 64)
    assert abs(float(drawn.var()) - 2) < 9 * 2 * (2 / 1600) ** 0.5, "of 1600 draws, nine deviations of their variance"
    assert abs(float(drawn.mean())) < 9 * (2 / 1600) ** 0.5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.a(x) * self.scale


class Averaged(nn.Module):
    """A mean of its rows in a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.a(x)


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: F.linear(x, layer.weight) * 3
    return layer


def weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


MIXES, OTHERS, FUNCTION = (
    "the model mixes rows",
    r"with trainable parameters \(",
    "used by a function beside its linear",
)
STATISTICS, SHAPE = "keeps statistics", "a linear layer that is trained takes"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm": (lambda: normalised(nn.BatchNorm1d(6)), STATISTICS),
    "BatchNorm without statistics": (lambda: normalised(nn.BatchNorm1d(6, track_running_stats=False)), STATISTICS),
    "frozen BatchNorm in training": (lambda: normalised(fixed(nn.BatchNorm1d(6))), STATISTICS),
    "BatchNorm with weights": (lambda: normalised(nn.BatchNorm1d(6).eval()), OTHERS),
    "InstanceNorm": (lambda: normalised(nn.InstanceNorm1d(6, track_running_stats=True)), STATISTICS),
    "LayerNorm": (lambda: normalised(nn.LayerNorm(6)), OTHERS),
    "GroupNorm": (lambda: normalised(nn.GroupNorm(2, 6)), OTHERS),
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 1), nn.Flatten()), OTHERS),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Flatten()), OTHERS),
    "attention": (lambda: nn.MultiheadAttention(4, 1), OTHERS),
    "recurrent": (lambda: nn.LSTM(4, 4), OTHERS),
    "parameter of no module": (Scaled, OTHERS),
    "weight norm": (weight_norm, OTHERS),
    "forward of its own": (patched, OTHERS),
    "all frozen": (lambda: fixed(tied()), "there are none"),
    "no layer": (nn.ReLU, "there are none"),
    "all unused": (own(lambda self, x: x * 2 + 0 * self.a(x).detach(), a=four), "depends on no trainable"),
    "weight in a function": (own(lambda self, x: F.linear(self.a(x), self.a.weight.t()), a=four), FUNCTION),
    "bias in a function": (own(lambda self, x: self.a(x) + self.a.bias, a=four), FUNCTION),
    "weight in a function alone": (own(lambda self, x: self.b(x) @ self.a.weight, a=four, b=four), FUNCTION),
    "mean of rows": (own(lambda self, x: self.a(x - x.mean(0)), a=four), MIXES),
    "mean of rows later": (own(lambda self, x: self.a(x) - self.a(x).mean(0), a=four), MIXES),
    "sum of rows before": (own(lambda self, x: self.a(x.cumsum(0)), a=four), MIXES),
    "sum of rows after": (own(lambda self, x: self.a(x.flip(0).cumsum(0).flip(0)), a=four), MIXES),
    "next row": (own(lambda self, x: self.a(x.roll(1, 0)), a=four), MIXES),
    "order undone": (own(lambda self, x: self.b(self.a(x.flip(0)).flip(0)), a=four, b=four), MIXES),
    "softmax of rows": (own(lambda self, x: self.a(x).softmax(0), a=four), MIXES),
    "batch norm": (own(lambda self, x: F.batch_norm(self.a(x), None, None, training=True), a=four), MIXES),
    "statistics": (Averaged, STATISTICS),
    "halves of rows": (own(lambda self, x: self.a(x.view(-1, 2)).view(-1, 4), a=two), SHAPE),
    "rows second": (own(lambda self, x: self.a(x.view(-1, 2, 2).mT.mT.transpose(0, 1)).transpose(0, 1).flatten(1),
                        a=two), SHAPE),
    "six rows second of six places": (
        own(lambda self, x: self.a(x[:, None, :].expand(-1, 6, 4).transpose(0, 1)).transpose(0, 1).sum(1), a=four),
        MIXES,
    ),
    "one result": (own(lambda self, x: self.a(x).sum(0), a=four), "a result for each row"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_of_single_rows_is_refused(name: str):
    build, text = REFUSED[name]
    torch.manual_seed(3)
    with pytest.raises((ArgumentError, ShapeError), match=text):
        private(build(), 1.0, 1.0)


def test_a_loss_is_a_sum_over_rows():
    mean = lambda z, y, reduction: F.cross_entropy(z, y)
    pairs = lambda z, y, reduction: ((z - z.roll(1, 0)) ** 2).sum()
    first = lambda z, y, reduction: F.cross_entropy(z - z[:1], y, reduction=reduction)
    for loss in (mean, pairs, first):
        with pytest.raises(ArgumentError, match="is not the sum of their losses"):
            private(tied(), 1.0, 1.0, loss=loss)
    for loss in (lambda z, y, reduction: F.cross_entropy(z, y, reduction="none"), lambda z, y, reduction: 0.0):
        with pytest.raises(SectorchError, match=r"is one shared number|of several rows is one number"):
            private(tied(), 1.0, 1.0, loss=loss)


@pytest.mark.parametrize("reference", [True, *long(False)])
def test_adapters_over_a_secret_base_have_the_clipped_gradients_of_single_texts(reference: bool):
    """The ids of words are secret, the base is A's; a text's gradient is the sum over the places of its words."""
    torch.manual_seed(3)
    plain = Words()
    x, y = torch.randint(0, 9, (ROWS, 3)), torch.arange(ROWS) % 4
    single = of_single_rows(copy.deepcopy(plain), x, y)
    norms = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in single.values()))
    clip, session = float(norms.median()), Session(reference=reference)
    model = sectorch.shared(copy.deepcopy(plain), owner="A", session=session)
    steps = PrivateGradients(model, max_grad_norm=clip, noise_multiplier=2.0**-26 / clip, rows=ROWS, batch_size=ROWS)
    with Transcript() as sent:
        steps.backward(F.cross_entropy, *(sectorch.share(v, session=session) for v in (x, y)))
    assert not [line for line, _ in sent.lines if line.shows]
    for key, p in model.named_parameters():
        if not p.requires_grad:
            assert p.cell.own and p.grad is None
            continue
        wanted = (single[key] * (clip / norms).clamp(max=1).view(-1, *[1] * p.dim())).mean(0)
        assert wanted.abs().max() > 0.003
        assert torch.allclose(p.grad.reveal(), wanted, atol=2e-4), f"{key}: {(p.grad.reveal() - wanted).abs().max()}"


def test_texts_that_see_each_other_are_refused():
    """Ids are whole numbers, and other ones are tried too."""
    session = Session(reference=True)
    model = sectorch.shared(MixedWords(), owner="A", session=session)
    steps = PrivateGradients(model, max_grad_norm=1.0, noise_multiplier=1.0, rows=ROWS, batch_size=ROWS)
    x, y = torch.randint(0, 9, (ROWS, 3)), torch.arange(ROWS) % 4
    with pytest.raises(ArgumentError, match=MIXES):
        steps.backward(F.cross_entropy, *(sectorch.share(v, session=session) for v in (x, y)))


def test_nothing_is_spent_or_changed_where_a_step_is_refused():
    session, budget = Session(reference=True), Budget(5.0, 1e-5)
    model = sectorch.shared(Own(lambda self, x: self.a(x) - x.mean(0), a=nn.Linear(4, 4)), session=session)
    steps = PrivateGradients(model, max_grad_norm=1.0, noise_multiplier=9.0, rows=6, batch_size=6, budget=budget)
    x, y = (sectorch.share(v, session=session) for v in rows())
    state = torch.random.get_rng_state()
    with pytest.raises(ArgumentError, match=MIXES):
        steps.backward(F.cross_entropy, x, y)
    assert not budget.spent and not steps.steps and "forward" not in vars(model.a) and model.a.weight.grad is None
    assert torch.equal(state, torch.random.get_rng_state())
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ArgumentError, match="there are none"):
        steps.backward(F.cross_entropy, x, y)


def test_what_is_frozen_stays_and_what_is_freed_moves():
    session = Session(reference=True)
    model = sectorch.shared(frozen("0.", of=tied), session=session)
    steps = PrivateGradients(model, max_grad_norm=1.0, noise_multiplier=1.0, rows=6, batch_size=6)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = (sectorch.share(v, session=session) for v in rows())
    for still in (True, False):
        before = model[0].weight.reveal()
        steps.backward(F.cross_entropy, x, y)
        optimiser.step()
        assert torch.equal(before, model[0].weight.reveal()) == still
        model[0].requires_grad_(True)
