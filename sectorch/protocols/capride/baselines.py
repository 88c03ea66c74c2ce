"""FedAvg and FedAvg with differential privacy, for comparison (section 4.2). The other baselines are in `training.py`.

Models are averaged by number of samples (McMahan et al., 2016), after each party has, for "fedavg-dp", added Gaussian
noise of `model_sigma` to every parameter of its own (Wei et al., 2020; the paper has 0.01).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...data.seeds import generator
from .settings import Party, Settings


@torch.no_grad()
def average(models: dict[str, nn.Module], parties: Sequence[Party], how: Settings, round_: int) -> None:
    """Every model becomes the weighted mean, in place."""
    total = sum(len(party.labels) for party in parties)
    mean: dict[str, torch.Tensor] = {}
    for party in parties:
        draw = generator(how.seed, party.name, round_, "model noise")
        for name, value in models[party.name].state_dict().items():
            sent = value.double()
            if how.method == "fedavg-dp" and value.is_floating_point():
                sent = sent + how.model_sigma * torch.randn(value.shape, generator=draw, dtype=torch.float64)
            mean[name] = mean.get(name, 0) + sent * (len(party.labels) / total)
    for model in models.values():
        model.load_state_dict({name: value.to(model.state_dict()[name].dtype) for name, value in mean.items()})
