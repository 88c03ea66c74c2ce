"""Training on a party's own machine, in the clear: local, with an update from the peers, and between two models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...data.seeds import generator
from ...federated.errors import FederationError
from ...federated.training import Extra, Training, predict, train
from . import losses
from .directions import features_and_logits
from .settings import Party, Settings
from .update import Update

TOP = 5
"""A sample counts for the paper's second accuracy where its class is among so many largest logits."""


def train_party(
    model: nn.Module,
    steps: torch.optim.Optimizer,
    party: Party,
    how: Training,
    seed: int,
    extra: Extra | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Cross entropy (Eq. 3, as a mean) and `extra`, in place, going on with the party's own optimiser."""
    train(model, party.images, party.labels, how, seed, tick, extra=extra, optimizer=steps)


def _scale(how: Settings) -> float:
    """lambda_k T^2."""
    if how.weight is None:
        raise FederationError("the weight of a peer is not chosen; `CaPriDe` chooses it, or name weight=")
    return how.weight * how.temperature**2


def distillation(model: nn.Module, party: Party, update: Update, how: Settings) -> Extra:
    """lambda_k L_DL of Eq. 6 on a batch, from what was released.

    Scalar mode: of Eq. 10 only the local uncertainty has a gradient; the decrypted number has none. Otherwise the
    agreed logits stand for the peers' and, in forward mode, the correction is added as a linear function of the
    parameters.
    """
    scale = _scale(how)
    row = torch.full((len(party.labels),), -1)
    row[update.subset] = torch.arange(len(update.subset))
    live = dict(model.named_parameters())

    def extra(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        inside = row[batch] >= 0
        u = logits[inside]
        if update.logits is None:
            loss = losses.local_uncertainty(u, how.temperature)
        else:
            loss = losses.approximate_kl(u, update.logits[row[batch][inside]].to(u.dtype), how.temperature)
        loss = scale * loss / len(batch)
        for name, value in (update.correction or {}).items():
            loss = loss - scale / len(update.subset) * (value * live[name]).sum()
        return loss

    return extra


def in_the_clear(peers: list[torch.Tensor], how: Settings) -> Extra:
    """The baselines that see the peers' logits on the party's samples: the true KL (deep mutual learning), or L2."""
    loss_of = losses.true_kl if how.method == "dml" else losses.l2
    scale = _scale(how) / len(peers)

    def extra(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        found = (loss_of(logits, z[batch], how.temperature) for z in peers)
        return scale * functools.reduce(torch.add, found) / len(batch)

    return extra


def mutual(
    small: nn.Module,
    small_steps: torch.optim.Optimizer,
    large: nn.Module,
    large_steps: torch.optim.Optimizer,
    party: Party,
    how: Settings,
    use: tuple,
) -> None:
    """One epoch of mutual distillation between a party's two models (section 4.4), each on its labels and on the
    other's predictions (Zhang et al., 2018), on the party's own data and machine.
    """
    order, t = generator(how.seed, party.name, *use), how.temperature
    for model in (small, large):
        model.train()
    for batch in torch.randperm(len(party.labels), generator=order).split(how.batch):
        x, y = party.images[batch], party.labels[batch]
        logits = [small(x), large(x)]
        targets = [(z.detach() / t).softmax(1) for z in reversed(logits)]
        for model, steps, u, target in zip((small, large), (small_steps, large_steps), logits, targets, strict=True):
            steps.zero_grad(set_to_none=True)
            learned = F.kl_div((u / t).log_softmax(1), target, reduction="batchmean")
            (F.cross_entropy(u, y, label_smoothing=how.smoothing) + t**2 * learned).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
    for model in (small, large):
        model.eval()


def scores(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, classes: int) -> dict:
    """Accuracy over all samples, that of the five largest logits, and the accuracy of each class (None where it has no
    sample).
    """
    logits = predict(model, images)
    right, near = logits.argmax(1) == labels, logits.topk(min(TOP, classes), 1).indices == labels[:, None]
    each = [right[labels == c] for c in range(classes)]
    return dict(
        accuracy=float(right.double().mean()),
        top5=float(near.any(1).double().mean()),
        per_class=[float(r.double().mean()) if len(r) else None for r in each],
    )


@torch.no_grad()
def own_view(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and logits of a model in evaluation mode on all samples."""
    return features_and_logits(model, images)
