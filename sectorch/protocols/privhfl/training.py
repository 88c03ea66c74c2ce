"""Training on a client's own machine, in the clear: lines 2 and 14 of Algorithm 1 (PrivHFL, appendices C.1 and F)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...data.seeds import generator
from .errors import PrivHFLError

OPTIMISERS = ("sgd", "adam")


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    `milestones` are epochs after which the learning rate falls by `decay`. A last batch of a single sample is left out:
    batch normalisation cannot use it.
    """

    optimiser: str
    lr: float
    batch: int
    epochs: int
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    momentum: float = 0.0

    def __post_init__(self):
        if self.optimiser not in OPTIMISERS:
            raise PrivHFLError(f"there is no optimiser {self.optimiser!r}; there are {', '.join(OPTIMISERS)}")
        if self.batch < 2:
            raise PrivHFLError(f"a batch needs at least two samples for batch normalisation, got {self.batch}")
        if self.epochs < 0:
            raise PrivHFLError(f"the number of epochs must not be negative, got {self.epochs}")
        if not 0 < self.lr < float("inf"):
            raise PrivHFLError(f"the learning rate must be above 0, got {self.lr}")


@dataclass(frozen=True)
class Preset:
    """The training settings of a data set."""

    local: Training
    retraining: Training
    samples: int
    """Private samples of each client."""


def _retraining(batch: int) -> Training:
    """Appendix F: Adam, 50 epochs, learning rate 2e-3, "decayed by a factor of 0.1 on 25 epochs"."""
    return Training("adam", 2e-3, batch, 50, (25,))


PRESETS: dict[str, Preset] = {
    "svhn": Preset(Training("sgd", 0.5, 256, 250), _retraining(256), 1465),
    "cifar10": Preset(Training("sgd", 0.1, 64, 500), _retraining(64), 1000),
    "tiny-imagenet": Preset(Training("sgd", 0.01, 64, 500), _retraining(64), 10000),
    "digits": Preset(Training("sgd", 0.1, 10, 150), _retraining(64), 30),
}
"""Table 7 for the paper's data sets (momentum is not in the table, and is taken as none); ours for digits."""


def train(
    model: nn.Module,
    images: torch.Tensor,
    targets: torch.Tensor,
    how: Training,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Cross-entropy training in place; leaves the model in evaluation mode.

    Args:
        images: [N, C, H, W].
        targets: [N] labels, or [N, classes] probabilities (soft labels).
        seed: of the order of batches and of the layers that draw; the same seed gives the same weights on the same
            machine and number of threads.
        tick: called after every epoch.
    """
    if targets.dim() == 1:
        loss_of = F.cross_entropy
    else:
        targets = targets.to(images.dtype)
        loss_of = lambda logits, wanted: -(wanted * logits.log_softmax(1)).sum(1).mean()
    optimiser = _optimiser(model, how)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(how.milestones), how.decay)
    order = generator(seed, "batches")
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(how.epochs):
            for batch in torch.randperm(len(images), generator=order).split(how.batch):
                if len(batch) < 2:
                    continue
                optimiser.zero_grad(set_to_none=True)
                loss_of(model(images[batch]), targets[batch]).backward()
                optimiser.step()
            schedule.step()
            tick()
    model.eval()


def _optimiser(model: nn.Module, how: Training) -> torch.optim.Optimizer:
    if how.optimiser == "adam":
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
    seen: list[torch.Tensor] = []
    hook = last[-1].register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0].flatten(1)))
    try:
        for piece in images.split(batch):
            model(piece)
    finally:
        hook.remove()
    return torch.cat(seen)
