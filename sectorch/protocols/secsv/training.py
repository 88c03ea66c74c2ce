"""FedAvg (McMahan et al., 2017): the rounds whose local models are valued. In the clear, or apart (`apart.py`).

Models are averaged in whole multiples of 2^-30, so that a sum of shares is the sum of the models bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...data.seeds import derive, generator
from ...deprecation import renamed_fields
from ...errors import FixedPointRangeError
from .errors import FederationError

State = dict[str, torch.Tensor]
AVERAGED_BITS = 30
"""Fraction bits of the models that are averaged."""


@renamed_fields(batch="batch_size", decay="weight_decay")
@dataclass(frozen=True)
class Training:
    """Local training in each round: epochs, batch size, Adam's rate, and a weight decay that keeps weights small."""

    epochs: int = 1
    batch_size: int = 32
    lr: float = 1e-2
    weight_decay: float = 1e-4

    def __post_init__(self):
        if self.epochs < 1 or self.batch_size < 1 or not self.lr > 0:
            raise FederationError(f"training needs positive epochs, batch_size and lr, got {self}")


RATES = {"logistic": 1e-2, "cnn": 3e-3, "dnn": 5e-3, "rnn": 1e-2}
"""Learning rates with which the bundled data trains well and a square activation's outputs stay within the format."""


def fedavg(
    model: nn.Module,
    train: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    rounds: int,
    how: Training = Training(),
    *,
    attending: Mapping[str, range] | None = None,
    seed: int = 0,
) -> tuple[list[dict[str, State]], list[dict[str, float]]]:
    """Local models of every round, and the clients' aggregation weights: their numbers of training samples.

    Args:
        model: gives the architecture and the first global model; not changed.
        train: each client's samples.
        attending: rounds (from 0) that a client attends; all unless named. Clients may join and leave.
        seed: of the batches.
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
        total = sum(weighted(local[n], len(train[n][1])) for n in there)
        current = average(torch.as_tensor(total), sum(len(train[n][1]) for n in there), current)
    return models, weights


def weighted(state: Mapping[str, torch.Tensor], weight: int) -> torch.Tensor:
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


def average(total: torch.Tensor, whole: int, like: Mapping[str, torch.Tensor]) -> State:
    """The global model from the sum of `weighted` models, mod 2^64, and of their weights."""
    flat, found = total.double() / (whole * 2.0**AVERAGED_BITS), {}
    for name, value in like.items():
        found[name], flat = flat[: value.numel()].view(value.shape).to(value.dtype), flat[value.numel() :]
    return found


def local_model(model: nn.Module, start: State, x, y, how: Training, seed: int) -> State:
    """What a client makes of the global model in a round, on its own samples."""
    net = copy.deepcopy(model)
    net.load_state_dict(start)
    net.train()
    optimiser = torch.optim.Adam(net.parameters(), how.lr, weight_decay=how.weight_decay)
    order = generator(seed, "batches")
    for _ in range(how.epochs):
        for part in torch.randperm(len(y), generator=order).split(how.batch_size):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(net(x[part]), y[part]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
    return {k: v.detach().clone() for k, v in net.state_dict().items()}
