"""What server and clients agree on: the data's split, the net, the scheme, and how messages carry tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from sectorch.protocols.perturbation import Scheme
from sectorch.protocols.perturbation.experiment import build
from sectorch.protocols.perturbation.settings import Data, Settings, load


def settings_of(config: Mapping) -> Settings:
    """The run's settings, from Flower's run config."""
    names = ("clients", "rounds", "batch-size", "local-batches", "learning-rate", "momentum", "weight-decay")
    chosen = {name.replace("-", "_"): config[name] for name in (*names, "loss", "partitions", "seed")}
    return Settings(**chosen)


def setup(config: Mapping) -> tuple[Settings, Data, nn.Module, Scheme]:
    """Settings, data, the net with its first weights, and the scheme."""
    torch.set_num_threads(1)
    settings = settings_of(config)
    data = load(config["data"])
    model = build(config["model"], data, torch.float64, settings.seed)
    exchange = "shift" if settings.loss == "cross_entropy" else None
    return settings, data, model, Scheme(model, settings.loss, settings.partitions, exchange=exchange)


def pack(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Tensors as Flower arrays, bit for bit."""
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()})


def unpack(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """What `pack` was given."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
