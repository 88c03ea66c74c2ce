"""Training on a participant's own machine, in the clear, and what a trained model gives."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..data.seeds import generator
from ..deprecation import renamed_fields
from ..nn.watched import calls_of
from .errors import FederationError
from .options import Options, option

OPTIMIZERS = ("sgd", "adam")
Extra = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Places of a batch and the logits on it -> what is added to its loss."""


@renamed_fields(optimiser="optimizer", batch="batch_size", decay="gamma", smoothing="label_smoothing", clip="max_norm")
@dataclass(frozen=True)
class Training(Options):
    """How a model is trained.

    A last batch of a single sample is left out: batch normalisation cannot use it.
    """

    optimizer: str = option("adam", "its rule", among=OPTIMIZERS)
    lr: float = option(1e-3, "learning rate", above=0, below=math.inf)
    batch_size: int = option(32, "samples of a step", least=2)
    epochs: int = option(50, "how often all samples are seen", least=0)
    milestones: tuple[int, ...] = option((), "epochs after which the learning rate falls", least=0, hidden=True)
    gamma: float = option(0.1, "what it is multiplied by there", above=0, most=1, hidden=True)
    momentum: float = option(0.0, "of sgd", least=0, below=1, hidden=True)
    label_smoothing: float = option(0.0, "of hard labels, spread over all classes", least=0, below=1)
    max_norm: float | None = option(None, "the largest norm of a step's gradient", above=0, hidden=True)

    def lasting(self, epochs: int | None) -> Training:
        """The same over another number of epochs, with the milestones at the same fractions; None is this one."""
        if epochs is None or epochs == self.epochs:
            return self
        moved = tuple(max(1, m * epochs // self.epochs) for m in self.milestones) if self.epochs else ()
        return replace(self, epochs=epochs, milestones=moved)


def train(
    model: nn.Module,
    images: torch.Tensor,
    targets: torch.Tensor,
    how: Training,
    seed: int,
    tick: Callable[[], None] = lambda: None,
    *,
    extra: Extra | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Cross-entropy training in place; leaves the model in evaluation mode.

    Args:
        images: [N, C, H, W].
        targets: [N] labels, or [N, classes] probabilities (soft labels).
        seed: of the order of batches and of the layers that draw; the same seed gives the same weights on the same
            machine and number of threads.
        tick: called after every epoch.
        extra: what is added to a batch's mean cross entropy.
        optimizer: one that goes on from an earlier training; a new one of `how` unless given.
    """
    if targets.dim() == 1:
        loss_of = functools.partial(F.cross_entropy, label_smoothing=how.label_smoothing)
    else:
        targets = targets.to(images.dtype)
        loss_of = lambda logits, wanted: -(wanted * logits.log_softmax(1)).sum(1).mean()
    optimizer = optimizer or optimizer_of(model, how)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(how.milestones), how.gamma)
    order = generator(seed, "batches")
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(how.epochs):
            for batch in torch.randperm(len(images), generator=order).split(how.batch_size):
                if len(batch) < 2:
                    continue
                optimizer.zero_grad(set_to_none=True)
                logits = model(images[batch])
                loss = loss_of(logits, targets[batch])
                (loss if extra is None else loss + extra(batch, logits)).backward()
                if how.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), how.max_norm)
                optimizer.step()
            schedule.step()
            tick()
    model.eval()


def seconds_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, how: Training, steps: int = 3) -> float:
    """What such training would take on this machine, from a few of its steps on a copy."""
    some = images[: how.batch_size * steps]
    used = math.ceil(len(some) / how.batch_size)
    tried = copy.deepcopy(model)
    train(tried, some[: how.batch_size], labels[: how.batch_size], replace(how, epochs=1, milestones=()), 0)
    start = time.perf_counter()
    train(tried, some, labels[: len(some)], replace(how, epochs=1, milestones=()), 0)
    return (time.perf_counter() - start) / used * math.ceil(len(images) / how.batch_size) * how.epochs


def optimizer_of(model: nn.Module, how: Training) -> torch.optim.Optimizer:
    """What `train` takes steps with."""
    if how.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), how.lr)
    return torch.optim.SGD(model.parameters(), how.lr, momentum=how.momentum)


@torch.no_grad()
def predict(model: nn.Module, images: torch.Tensor, batch: int = 512) -> torch.Tensor:
    """Logits [N, classes] of a model in evaluation mode, in bounded memory."""
    return torch.cat([model(piece) for piece in images.split(batch)])


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The fraction of right answers."""
    return float((predict(model, images).argmax(1) == labels).double().mean())


@torch.no_grad()
def features(model: nn.Module, images: torch.Tensor, batch: int = 512) -> torch.Tensor:
    """[N, F]: what enters the last linear layer, for the strategies that look at distances.

    A model without a linear layer gives its logits.
    """
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not last:
        return predict(model, images, batch)
    with calls_of(last[-1]) as seen:
        for piece in images.split(batch):
            model(piece)
    if not seen:
        raise FederationError("the model did not run its last linear layer in the thread that called it")
    return torch.cat([entered.flatten(1) for entered, _ in seen])
