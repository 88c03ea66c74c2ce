"""Training and predictions on a participant's own machine, in the clear."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from ..data.seeds import derive, generator
from ..deprecation import renamed_fields
from ..errors import FederationError, FixedPointRangeError
from ..nn.symbolic_trace import calls_of
from ..optional_deps import required_imports
from .command import Options, option
from .participants import Participant
from .run import ABSENT, Held, Run, digest_of, estimated_by, progress
from .watch import Estimate

OPTIMIZERS = ("sgd", "adam")
State = dict[str, torch.Tensor]
"""A state_dict."""
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
    weight_decay: float = option(0.0, "what is added of a weight to its gradient", least=0, below=math.inf, hidden=True)

    def lasting(self, epochs: int | None) -> Training:
        """The same over another number of epochs, with the milestones at the same fractions; None is this one."""
        if epochs is None or epochs == self.epochs:
            return self
        moved = tuple(max(1, m * epochs // self.epochs) for m in self.milestones) if self.epochs else ()
        return replace(self, epochs=epochs, milestones=moved)


def train(
    model: nn.Module, images: torch.Tensor, targets: torch.Tensor, how: Training, seed: int,
    tick: Callable[[], None] = lambda: None, *, extra: Extra | None = None,
    optimizer: torch.optim.Optimizer | None = None, smallest: int = 2,
    step: Callable[[], AbstractContextManager] = nullcontext,
) -> None:  # fmt: skip
    """Cross-entropy training in place; leaves the model in evaluation mode. Of shared tensors as of plain ones.

    Args:
        images: [N, C, H, W].
        targets: [N] labels, or [N, classes] probabilities (soft labels).
        seed: of the order of batches and of the layers that draw; the same seed gives the same weights on the same
            machine and number of threads.
        tick: called after every epoch.
        extra: what is added to a batch's mean cross entropy.
        optimizer: one that goes on from an earlier training; a new one of `how` unless given.
        smallest: samples of the smallest batch that makes a step; batch normalisation needs two.
        step: what a step of the optimizer is taken in, such as `sectorch.step`.
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
                if len(batch) < smallest:
                    continue
                with step():
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
        return torch.optim.Adam(model.parameters(), how.lr, weight_decay=how.weight_decay)
    return torch.optim.SGD(model.parameters(), how.lr, momentum=how.momentum, weight_decay=how.weight_decay)


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


# Many small models trained as one batched computation (`torch.func`), with the same results as one by one. A
# scikit-learn classifier may take a model's place; `answer_of` and `logits_of` take both.

_DRAWS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.RReLU)


@dataclass(frozen=True)
class Task:
    """A model to train (an nn.Module or a scikit-learn classifier, which is copied) and its data."""

    name: str
    model: Any
    images: torch.Tensor
    labels: torch.Tensor


def train_all(
    tasks: Sequence[Task], how: Training, seed: int, tick: Callable[[int], None] = lambda count: None
) -> dict[str, Any]:
    """Trained copies of all models, by name, in evaluation mode. The same seed gives the same models.

    Args:
        tick: called with the number of finished models.
    """
    trained: dict[str, Any] = {}
    for group in grouped(tasks, how):
        trained.update(train_group(group, how, seed))
        tick(len(group))
    return {task.name: trained[task.name] for task in tasks}


def grouped(tasks: Sequence[Task], how: Training) -> list[list[Task]]:
    """Tasks that are trained together: those of one architecture, where nothing in it changes or draws as it runs."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        together = _batchable(task.model, how)
        groups.setdefault(str(task.model) if together else f"alone/{task.name}", []).append(task)
    return list(groups.values())


def train_group(group: Sequence[Task], how: Training, seed: int) -> dict[str, Any]:
    """One of `grouped`, trained. What it is seeded with are the names in the group, so a part of it is another."""
    first = group[0]
    if _batchable(first.model, how):
        return _together(group, how, generator(seed, "batches", *(task.name for task in group)))
    return {task.name: _alone(task, how, derive(seed, task.name, "train")) for task in group}


def seconds_of_all(tasks: Sequence[Task], how: Training) -> float:
    """What training all of them would take on this machine, from an epoch of each group or a few steps of a model."""
    total = 0.0
    for group in grouped(tasks, how):
        if len(group) > 1:
            start = time.perf_counter()
            train_group(group, replace(how, epochs=1, milestones=()), 0)
            total += (time.perf_counter() - start) * how.epochs
        elif isinstance(group[0].model, nn.Module):
            total += seconds_of(group[0].model, group[0].images, group[0].labels, how)
        else:
            start = time.perf_counter()
            _alone(group[0], how, 0)
            total += time.perf_counter() - start
    return total


def _batchable(model: Any, how: Training) -> bool:
    """Adam on a network in which nothing changes or draws while it runs: no batch statistics, no dropout."""
    if not isinstance(model, nn.Module) or how.optimizer != "adam" or how.weight_decay:
        return False
    return not list(model.buffers()) and not any(isinstance(layer, _DRAWS) for layer in model.modules())


def _alone(task: Task, how: Training, seed: int) -> Any:
    if isinstance(task.model, nn.Module):
        model = copy.deepcopy(task.model)
        train(model, task.images, task.labels, how, seed)
        return model
    with required_imports("a classifier with fit()", "scikit-learn", FederationError):
        from sklearn.base import clone

    classifier: Any = clone(task.model)
    if "random_state" in classifier.get_params():
        classifier.set_params(random_state=seed % 2**32)
    return classifier.fit(task.images.flatten(1).numpy(), task.labels.numpy())


def _together(tasks: Sequence[Task], how: Training, draw: torch.Generator) -> dict[str, nn.Module]:
    """Adam on all models of one architecture at once; data sets may differ in size."""
    models = [copy.deepcopy(task.model).train() for task in tasks]
    base = copy.deepcopy(models[0]).to("meta")
    weights, _ = stack_module_state(models)
    weights = {name: value.detach().clone() for name, value in weights.items()}
    sizes = torch.tensor([len(task.labels) for task in tasks])
    most = int(sizes.max())
    pad = lambda v: torch.cat((v, v.new_zeros((most - len(v), *v.shape[1:]))))
    images = torch.stack([pad(task.images) for task in tasks])
    labels = torch.stack([pad(task.labels) for task in tasks])

    def loss_of(weights, x, y, used):
        losses = F.cross_entropy(functional_call(base, weights, (x,)), y, reduction="none")
        return (losses * used).sum() / used.sum().clamp_min(1)

    gradients = vmap(grad(loss_of))
    adam = _Adam(weights, len(tasks))
    rows = torch.arange(len(tasks))[:, None]
    beyond = torch.arange(most)[None] >= sizes[:, None]
    for epoch in range(how.epochs):
        rate = how.lr * how.gamma ** sum(epoch >= milestone for milestone in how.milestones)
        # Each model has an order of its own; padding comes last and does not count.
        order = torch.rand(len(tasks), most, generator=draw).masked_fill(beyond, 2.0).argsort(1)
        for start in range(0, most, how.batch_size):
            chosen = order[:, start : start + how.batch_size]
            used = (~beyond.gather(1, chosen)).float()
            found = gradients(weights, images[rows, chosen], labels[rows, chosen], used)
            adam.step(found, rate, used.sum(1) >= 2)
    for i, model in enumerate(models):
        model.load_state_dict({name: value[i].detach() for name, value in weights.items()})
        model.eval()
    return {task.name: model for task, model in zip(tasks, models, strict=True)}


class _Adam:
    """torch's Adam with its defaults, for models that are stacked; in a step some of them may rest, as `train` leaves
    out a batch of fewer than two samples."""

    def __init__(self, weights: dict[str, torch.Tensor], models: int):
        self.weights, self.steps = weights, torch.zeros(models)
        self.first, self.second = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))

    def step(self, gradients: dict[str, torch.Tensor], rate: float, moves: torch.Tensor) -> None:
        """In place; `moves` says which models take it."""
        self.steps += moves
        one, two = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        for name, weight in self.weights.items():
            wide = lambda v, weight=weight: v.view(-1, *[1] * (weight.dim() - 1))
            gradient, now = gradients[name], wide(moves)
            first = self.first[name].lerp(gradient, 0.1)
            second = self.second[name] * 0.999 + 0.001 * gradient**2
            change = rate * (first / wide(one)) / ((second / wide(two)).sqrt() + 1e-8)
            for kept, new in ((self.first[name], first), (self.second[name], second), (weight, weight - change)):
                kept.copy_(torch.where(now, new, kept))


def answer_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    """The class that a trained model gives each image, int64 [N]; of equal logits the first."""
    if isinstance(model, nn.Module):
        return predict(model, images).argmax(1)
    return torch.as_tensor(model.predict(images.flatten(1).numpy()), dtype=torch.int64)


def logits_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Logits of a module, or the logarithms of a scikit-learn classifier's probabilities, [N, classes]."""
    if isinstance(model, nn.Module):
        return predict(model, images)
    return torch.as_tensor(model.predict_proba(images.flatten(1).numpy())).clamp_min(1e-12).log()


# The same as stages of a run.


def local_models(run: Run, people: Sequence[Participant], how: Training, seed: int) -> dict[str, Held]:
    """Each participant's trained model, at the participant; of those elsewhere the architecture. Groups of one
    architecture are trained together, by several workers beside each other; what scikit-learn fits is not kept."""
    tasks = [Task(p.name, p.model, p.images, p.labels) for p in people if run.present(p.name)]
    groups = {group[0].name: group for group in grouped(tasks, how)}
    kept = [name for name, group in groups.items() if isinstance(group[0].model, nn.Module)]
    states = run.each(kept, _group_states, lambda name: (groups[name], how, seed))
    prints, models = {p.name: p.fingerprint() for p in people}, dict[str, Held]()
    for first, group in groups.items():
        found: Any = ABSENT
        if not run.dry:
            found = states[first].value if first in states else train_group(group, how, seed)
        for task in group:
            model = found if found is ABSENT else found[task.name]
            model = _loaded(task.model, model) if isinstance(model, dict) else model
            made = (states[first], task.name) if first in states else (prints[task.name], how, seed)
            models[task.name] = Held((task.name,), digest_of(made), model, task.model)
    for p in people:
        shape = copy.deepcopy(p.model).to("meta").eval() if isinstance(p.model, nn.Module) else None
        models.setdefault(p.name, Held((p.name,), f"brought by {p.name}", ABSENT, shape))
    return models


def _group_states(run: Run, first: str, group: Sequence[Task], how: Training, seed: int) -> Held:
    """The weights of a group's models, at the first of its participants."""
    return run.at(first, train_states, group, how, seed, stage=f"local/{first}", shared=True)


@estimated_by(lambda group, how, seed: Estimate(seconds_of_all(group, how)))
def train_states(group: Sequence[Task], how: Training, seed: int) -> dict[str, State]:
    """The stage of `local_models`: the weights of each model of a group."""
    tick = progress(len(group))
    found = {name: model.state_dict() for name, model in train_group(group, how, seed).items()}
    tick(len(group))
    return found


def _loaded(model: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model.eval()


# FedAvg (McMahan et al., 2017), in the clear and for parties that add up shares of their models.
#
# Models are averaged in whole multiples of 2^-30, so that a sum of shares is the sum of the models bit for bit.


AVERAGED_BITS = 30
"""Fraction bits of the models that are averaged."""


@renamed_fields(batch="batch_size", decay="weight_decay")
@dataclass(frozen=True)
class LocalTraining(Training):
    """A client's training in a round of FedAvg: short, and with what keeps weights small."""

    lr: float = option(1e-2, "learning rate", above=0, below=math.inf)
    batch_size: int = option(32, "samples of a step", least=1)
    epochs: int = option(1, "how often all samples are seen", least=1)
    max_norm: float | None = option(1.0, "the largest norm of a step's gradient", above=0, hidden=True)
    weight_decay: float = option(
        1e-4, "what is added of a weight to its gradient", least=0, below=math.inf, hidden=True
    )


def fedavg(
    model: nn.Module, train: Mapping[str, tuple[torch.Tensor, torch.Tensor]], rounds: int,
    how: Training = LocalTraining(), *, attending: Mapping[str, range] | None = None, seed: int = 0,
) -> tuple[list[dict[str, State]], list[dict[str, float]]]:  # fmt: skip
    """Local models of every round, and the clients' aggregation weights: their numbers of training samples.

    Args:
        model: gives the architecture and the first global model; not changed.
        train: each client's samples.
        how: local training in each round.
        attending: rounds (from 0) that a client attends; all unless named. Clients may join and leave.
        seed: of the batches.

    Raises:
        FederationError: no round, or a round that nobody attends.
        FixedPointRangeError: a model that diverged.
    """
    if rounds < 1:
        raise FederationError(f"at least one round, got {rounds}")
    current = {k: v.detach().clone() for k, v in model.state_dict().items()}
    models, weights = [], []
    for t in range(rounds):
        there = [n for n in train if attending is None or t in attending.get(n, range(rounds))]
        if not there:
            raise FederationError(f"nobody attends round {t + 1}")
        local = {n: local_model(model, current, *train[n], how, derive(seed, n, t)) for n in there}
        models.append(local)
        weights.append({n: float(len(train[n][1])) for n in there})
        total = sum(weighted_model(local[n], len(train[n][1])) for n in there)
        current = average_model(torch.as_tensor(total), sum(len(train[n][1]) for n in there), current)
    return models, weights


def weighted_model(state: Mapping[str, torch.Tensor], weight: int) -> torch.Tensor:
    """A model times its aggregation weight as whole numbers, int64 [parameters]: what is added up, or shared.

    Raises:
        FixedPointRangeError: a parameter times the weight of 2^32 and more.
    """
    flat = torch.cat([value.detach().double().flatten() for value in state.values()])
    largest = float(flat.abs().max()) * weight
    if not largest < 2.0 ** (62 - AVERAGED_BITS):
        raise FixedPointRangeError(
            f"a local model has a parameter which, times its weight of {weight}, is {largest:.3g}; averages take less "
            f"than 2^{62 - AVERAGED_BITS}: train with a smaller rate"
        )
    return (flat * 2.0**AVERAGED_BITS).round().long() * weight


def average_model(total: torch.Tensor, weight: int, like: Mapping[str, torch.Tensor]) -> State:
    """The global model from the sum of `weighted_model`, mod 2^64, and of the weights."""
    flat, found = total.double() / (weight * 2.0**AVERAGED_BITS), {}
    for name, value in like.items():
        found[name], flat = flat[: value.numel()].view(value.shape).to(value.dtype), flat[value.numel() :]
    return found


def local_model(
    model: nn.Module, start: State, x: torch.Tensor, y: torch.Tensor, how: Training, seed: int,
    tick: Callable[[], None] = lambda: None,
) -> State:  # fmt: skip
    """What a client makes of the global model in a round, on its own samples; see `train`."""
    local = copy.deepcopy(model)
    local.load_state_dict(start)
    train(local, x, y, how, seed, tick, smallest=1)
    return {k: v.detach().clone() for k, v in local.state_dict().items()}
