"""What language models and fine-tuning need of training: each recipe beside plain torch, and in a session.

The parameters of three steps may be apart by what gradients err by. A logarithm of a softmax errs by 1e-5 + 2e-6
sqrt(11) at most, and so does the gradient, by as much of an entry below one: 2e-5. Three steps at a rate of 0.1 with a
momentum of 0.9 multiply it by 0.1 (1 + 1.9 + 2.71). An Adam's step of 0.01 is longer by a fiftieth in the first step
(docs/training.md, Fraction bits), and by less later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from cases import some
from torch import nn
from torch.utils.checkpoint import checkpoint

import sectorch
from sectorch import DifferentiableTensor, Session
from sectorch.errors import DimensionError, RangeExceededError

WORDS, LENGTH = 11, 4
WEIGHTS = torch.linspace(0.5, 2, WORDS)


class LanguageModel(nn.Module):
    """Token and place embeddings, a LayerNorm, a layer, and the token embedding once more as the last layer."""

    def __init__(self, tied: bool = True, again: bool = False):
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(WORDS, 6), nn.Embedding(LENGTH, 6), nn.LayerNorm(6)
        self.wide, self.last, self.again = nn.Linear(6, 6), nn.Linear(6, WORDS, bias=False), again
        if tied:
            self.last.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        inner = lambda v: F.gelu(self.wide(self.norm(v)))
        return self.last(x + (checkpoint(inner, x, use_reentrant=False) if self.again else inner(x)))


def next_words(model: nn.Module, ids: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1), **options)


def words() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, WORDS, (3, LENGTH)),)


def answered() -> tuple[torch.Tensor, ...]:
    """Ids, and labels of which those of a prompt count nothing."""
    (ids,) = words()
    return ids, torch.where(torch.arange(LENGTH) < torch.tensor([[1], [2], [3]]), -1, ids)


def labelled(model: nn.Module, ids: Any, labels: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), **options)


def rows() -> tuple[torch.Tensor, ...]:
    return torch.rand(4, 6), torch.randint(0, 3, (4,))


def classes(model: nn.Module, x: Any, y: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(x), y, **options)


def flags() -> tuple[torch.Tensor, ...]:
    return torch.rand(4, 6), (torch.rand(4, 3) > 0.5).float()


def accumulated(model: nn.Module, x: Any, y: Any) -> torch.Tensor:
    """The gradients of two halves of a batch, one after the other."""
    first, second = (F.cross_entropy(model(x[part]), y[part]) / 2 for part in (slice(0, 2), slice(2, 4)))
    first.backward()
    return second


def layers(*kinds: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(kind() for kind in kinds))


class Recipe(NamedTuple):
    model: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    data: Callable[[], tuple[torch.Tensor, ...]]
    optimiser: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)
    schedule: Callable[..., Any] | None = None
    apart: float = 1.2e-5


def of_options(loss: Callable, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda *given: loss(*given, **options)


def warm(optimiser: torch.optim.Optimizer) -> Any:
    """Warm-up, and a cosine after it."""
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min(1.0, (n + 1) / 2) * math.cos(n / 10))


net = layers(lambda: nn.Linear(6, 5), nn.Tanh, lambda: nn.Linear(5, 3))
RECIPES = {
    "tied": Recipe(LanguageModel, next_words, words),
    "not tied, AdamW, warm-up": Recipe(
        lambda: LanguageModel(False), next_words, words, lambda p: torch.optim.AdamW(p, 0.01), warm, apart=3e-4
    ),
    "ignored": Recipe(LanguageModel, of_options(labelled, ignore_index=-1), answered),
    "a class ignored": Recipe(LanguageModel, of_options(next_words, ignore_index=3), words),
    "smoothed": Recipe(LanguageModel, of_options(next_words, label_smoothing=0.1), words),
    "weighted": Recipe(LanguageModel, of_options(next_words, weight=WEIGHTS), words),
    "weighted sum": Recipe(
        LanguageModel, of_options(next_words, weight=WEIGHTS, reduction="sum"), words,
        lambda p: torch.optim.SGD(p, 0.01), apart=2e-5,
    ),
    "all of them": Recipe(
        LanguageModel, of_options(labelled, ignore_index=-1, weight=WEIGHTS, label_smoothing=0.1), answered
    ),
    "all, by row": Recipe(
        LanguageModel,
        lambda *given: labelled(*given, ignore_index=3, weight=WEIGHTS, label_smoothing=0.1, reduction="none").mean(),
        lambda: words() * 2,
    ),
    "checkpointed": Recipe(lambda: LanguageModel(again=True), next_words, words),
    "pos_weight": Recipe(
        net, lambda m, x, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))(m(x), y), flags
    ),
    "norm first": Recipe(layers(lambda: nn.LayerNorm(6), lambda: nn.Linear(6, 3)), classes, rows),
    "PReLU": Recipe(layers(lambda: nn.Linear(6, 5), lambda: nn.PReLU(5), lambda: nn.Linear(5, 3)), classes, rows),
    "Adamax": Recipe(net, classes, rows, lambda p: torch.optim.Adamax(p, 0.01), apart=3e-4),
    "Rprop": Recipe(net, classes, rows, lambda p: torch.optim.Rprop(p, 0.01)),
    "accumulated": Recipe(net, accumulated, rows),
}  # fmt: skip


def fitted(recipe: Recipe, session: Session | None, steps: int = 3) -> dict[str, torch.Tensor]:
    """The losses and the parameters after some steps; without a session in plain."""
    torch.manual_seed(0)
    model = recipe.model()
    if session is not None:
        model = sectorch.shared(model, session=session)
    optimiser = recipe.optimiser(model.parameters())
    schedule = None if recipe.schedule is None else recipe.schedule(optimiser)
    found = {}
    torch.manual_seed(1)
    for number in range(steps):
        given = recipe.data()
        if session is not None:
            given = tuple(sectorch.share(v, session=session) for v in given)
        with sectorch.step(session) if session is not None else torch.enable_grad():
            optimiser.zero_grad()
            loss = recipe.loss(model, *given)
            loss.backward()
            optimiser.step()
        if schedule is not None:
            schedule.step()
        found[f"loss {number}"] = loss
    found |= dict(model.named_parameters())
    return {k: v.reveal() if isinstance(v, DifferentiableTensor) else v.detach() for k, v in found.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_what_plain_torch_learns(name: str):
    recipe = RECIPES[name]
    plain, found = fitted(recipe, None), fitted(recipe, Session(reference=True))
    for key, value in plain.items():
        allowed = 4e-5 * max(1.0, float(value.abs().max())) if key.startswith("loss") else recipe.apart
        assert (found[key] - value).abs().max() <= allowed, key


OPTIONS = (
    {"ignore_index": -1},
    {"ignore_index": 2, "weight": WEIGHTS[:4], "label_smoothing": 0.2},
    {"ignore_index": -1, "weight": WEIGHTS[:4], "reduction": "none"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_losses_of_secret_labels_in_a_step_are_bit_for_bit_the_references(options: dict[str, Any]):
    torch.manual_seed(0)
    x, labels, found = torch.randn(5, 4), torch.tensor([0, 2, 3, 1, 3]), []
    labels = torch.where(labels == 1, options["ignore_index"], labels)
    for session in (Session(), Session(reference=True)):
        p = DifferentiableTensor(sectorch.share(x, session=session), requires_grad=True)
        y = sectorch.share(labels, session=session, owner="A")
        with sectorch.step(session):
            loss = F.cross_entropy(p, y, **options)
            loss.sum().backward()
        found.append((loss.reveal(), p.grad.reveal()))
    plain = x.clone().requires_grad_()
    wanted = F.cross_entropy(plain, labels, **options)
    wanted.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.allclose(found[0][0], wanted, atol=4e-5) and torch.allclose(found[0][1], plain.grad, atol=4e-5)


@pytest.mark.parametrize("name", some(RECIPES, ["norm first"]))
def test_a_recipe_in_a_session_is_bit_for_bit_the_references(name: str):
    session = Session()
    found, wanted = fitted(RECIPES[name], session), fitted(RECIPES[name], Session(reference=True))
    assert all(torch.equal(value, wanted[key]) for key, value in found.items())


@pytest.mark.parametrize("owner", ["Q", "S"])
def test_labels_that_are_no_class_are_refused_or_withhold_the_loss(owner: str):
    """Also beside ignored ones."""
    session = Session()
    x = DifferentiableTensor(sectorch.share(torch.rand(3, 4), session=session), requires_grad=True)
    for wrong, ignored in ((-1, -100), (4, -100), (-2, -1), (4, -1), (-100, -1)):
        labels = sectorch.share(torch.tensor([0, wrong, -1 if ignored == -1 else 1]), session=session, owner=owner)
        with pytest.raises(DimensionError if owner == "Q" else RangeExceededError):
            F.cross_entropy(x, labels, ignore_index=ignored).reveal()
    labels = sectorch.share(torch.full((3,), -1), session=session, owner=owner)
    with pytest.raises(RangeExceededError):  # the mean of no label: torch's is not a number
        F.cross_entropy(x, labels, ignore_index=-1).reveal()


def test_training_ends_when_a_revealed_bit_says_so_and_an_average_is_kept():
    """Early stopping: of the validation loss only whether it fell is learned."""
    plain_steps, steps = [], []
    for session in (None, Session(reference=True)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        model = model if session is None else sectorch.shared(model, session=session)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        optimiser = torch.optim.SGD(model.parameters(), 1.2)
        x, y = torch.rand(6, 3), torch.rand(6, 1)
        if session is not None:
            x, y = (sectorch.share(v, session=session) for v in (x, y))
        best, count = None, 0
        for _ in range(20):
            optimiser.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimiser.step()
            average.update_parameters(model)
            with torch.no_grad():
                loss = F.mse_loss(average(x), y)
            count += 1
            if best is not None:
                worse = loss >= best
                if bool(worse if session is None else worse.reveal()):
                    break
            best = loss
        values = [p.detach() if session is None else p.reveal() for p in average.module.parameters()]
        (plain_steps if session is None else steps).append((count, values))
    assert plain_steps[0][0] == steps[0][0] < 20
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain_steps[0][1], steps[0][1], strict=True))
