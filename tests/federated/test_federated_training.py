"""Many models trained side by side, and what scores say of predictions."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sectorch.federated import FederationError, Scores, Training
from sectorch.federated.outcome import equal_opportunity, equalized_odds, scores
from sectorch.federated.training import Task, features, grouped, seconds_of_all, train, train_all
from sectorch.protocols.capc import collaboration


def small(parties: int, **options):
    return collaboration("digits", parties, querying=1, pool=12, **options)[0]


def test_training_together_is_training_alone():
    """A group in one batched computation: each model as if it were the only one, up to the order of its batches."""
    how = Training("adam", 1e-2, 512, 20)  # full batches: the order does not matter
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in small(4)]
    tasks[1] = replace(tasks[1], images=tasks[1].images[:30], labels=tasks[1].labels[:30])  # sizes may differ
    together = train_all(tasks, how, 0)
    for task in tasks:
        (alone,) = train_all([task], how, 0).values()
        for a, b in zip(alone.parameters(), together[task.name].parameters(), strict=True):
            # 20 steps of Adam at 1e-2 magnify rounding of float32 gradients; weights are about 0.1.
            torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


@pytest.mark.parametrize("soft", [False, True])
def test_a_step_is_along_the_gradient_of_the_mean_cross_entropy(soft):
    """By hard labels with smoothing, or by probabilities; and of what is added to it."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3).double(), torch.randn(12, 5).double(), torch.randint(3, (12,))
    probabilities = torch.softmax(torch.randn(12, 3).double(), 1) if soft else F.one_hot(y, 3) * 0.9 + 0.1 / 3
    before = [p.detach().clone().requires_grad_() for p in model.parameters()]
    logits = F.linear(x, *before)
    loss = -(probabilities * logits.log_softmax(1)).sum() / 12 + 0.3 * logits.square().mean()
    wanted = [p - 0.5 * g for p, g in zip(before, torch.autograd.grad(loss, before), strict=True)]
    how = Training("sgd", 0.5, 12, 1, label_smoothing=0.1)
    train(model, x, probabilities if soft else y, how, 0, extra=lambda _, logits: 0.3 * logits.square().mean())
    for found, right in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("size", [30, 32, 33, 34])
def test_a_model_rests_where_it_would_on_its_own(size):
    """Beside a larger one, and with a last batch of one sample, which training alone leaves out: its steps are those
    of its own samples. All samples are equal, so that the order does not matter, but for rounding."""
    one, other = [Task(p.name, p.model, p.images, p.labels) for p in small(4)[:2]]
    same = lambda task, n: replace(
        task, images=task.images[:1].expand(n, 1, 8, 8).clone(), labels=task.labels[:1].repeat(n)
    )
    how = Training("adam", 1e-3, 16, 8, milestones=(4,))
    together = train_all([same(one, size), same(other, 70)], how, 0)
    alone = copy.deepcopy(one.model)
    train(alone, *(same(one, size).images, same(one, size).labels), how, 0)
    for a, b in zip(alone.parameters(), together[one.name].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_scores_and_fairness():
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    predicted = torch.tensor([0, 0, 0, 1, 1, 0])
    found = scores(predicted, labels, 3)
    assert found.accuracy == pytest.approx(4 / 6) and found.per_class[:2] == [0.75, 0.5]
    assert np.isnan(found.per_class[2]) and found.balanced == pytest.approx(0.625)
    group = torch.tensor([0, 0, 1, 1, 0, 1])
    assert equal_opportunity(predicted, labels, group) == 1.0  # of label 1: group 0 always, group 1 never
    assert equal_opportunity(predicted, labels, group, favoured=0) == 0.5
    assert equalized_odds(predicted, labels, group) == 1.0
    assert equalized_odds(labels, labels, group) == 0.0
    with pytest.raises(FederationError, match="vectors of one length"):
        scores(predicted, labels[:-1], 2)


def test_groups_are_those_that_nothing_keeps_apart():
    people = small(6, architectures=("cnn", "mlp", "vgg7-small"))
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in people]
    how = Training("adam", 1e-2, 32, 2)
    assert [[task.name for task in group] for group in grouped(tasks, how)] == [
        ["p1", "p4"],
        ["p2", "p5"],
        ["p3"],
        ["p6"],
    ]
    assert len(grouped(tasks, replace(how, optimizer="sgd"))) == 6
    assert seconds_of_all(tasks, how) > 0


def test_scores_go_through_json():
    found = Scores(0.5, [1.0, float("nan"), 0.25])
    again = Scores.from_dict(found.as_dict())
    assert found.as_dict()["per_class"][1] is None and again.balanced == found.balanced == 0.625


def test_features_of_a_model_that_computes_in_threads_of_its_own_are_refused():
    class Apart(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(3, 2)

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.last, x).result()

    model, images = Apart(), torch.randn(5, 3)
    assert torch.equal(features(torch.nn.Sequential(model.last), images), images)
    with pytest.raises(FederationError, match="in the thread that called it"):
        features(model, images)
