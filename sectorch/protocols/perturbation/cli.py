"""`sectorch perturbed-fl`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from ...federated.command import Command, Options, Place, option
from ...federated.errors import FederationError
from .federated import NAMES, Data, DenseNet, PerturbedFL, ResNet, Settings, load, mlp
from .messages import SERVER

MODELS = ("mlp3", "mlp5", "mlp7", "cnn", "resnet20", "resnet32", "resnet56", "densenet")


@dataclass(frozen=True)
class Trained(Options):
    """What is trained, on what, and how it is computed."""

    data: str = option("digits", "data set; images is a folder of train/ and test/", among=NAMES)
    model: str | None = option(None, "the net (default: cnn for images, mlp3 for tables)", among=MODELS, several=True)
    float32: bool = option(False, "float64 otherwise")
    threads: int = option(1, "of torch; more than one rarely helps nets this small", least=1)
    seed: int = option(0, "of weights, batches and noise", least=0, several=True)


def build(name: str, data: Data, dtype: torch.dtype, seed: int) -> nn.Module:
    """A net for the data's shape, with weights from `seed`."""
    torch.manual_seed(seed)
    inputs = torch.Size(data.shape).numel()
    channels = data.shape[0]
    if name.startswith("mlp"):
        body = mlp(int(name[3:]), inputs, data.outputs)
        return (nn.Sequential(nn.Flatten(), *body) if len(data.shape) > 1 else body).to(dtype)
    if len(data.shape) != 3:
        raise FederationError(f"{name} takes images; {data.name} has inputs of shape {list(data.shape)}; use mlp3")
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(128, data.outputs),
        ).to(dtype)  # fmt: skip
    if name == "densenet":
        return DenseNet(data.outputs, channels).to(dtype)
    return ResNet(int(name[6:]), data.outputs, channels).to(dtype)


def _prepare(how: Trained, settings: Settings, place: Place) -> PerturbedFL:
    torch.set_num_threads(how.threads)
    dtype = torch.float32 if how.float32 else torch.float64
    data = load(how.data, str(place.root) if place.root else None, dtype)
    name = how.model or ("cnn" if len(data.shape) == 3 else "mlp3")
    torch.manual_seed(settings.seed)
    # Among parties apart the server's first model is its own to draw: the clients know the seed.
    model = build(name, data, dtype, place.own(how.seed))
    return PerturbedFL(data, model, settings, out=place.out, parties=place.parties)


def _cast(how: Trained, settings: Settings) -> list[str]:
    return [SERVER.name, *(f"C{i}" for i in range(settings.clients))]


COMMAND = Command(
    "perturbed-fl",
    "Federated learning on perturbed models: all parties in this process, or one of a federation.\n"
    "The site's page on perturbed models says what the noise hides, and what not. A run that was stopped goes on when\n"
    "started again.",
    (
        "sectorch perturbed-fl --data digits --clients 5 --rounds 20 --controls fedavg",
        "sectorch perturbed-fl --data diabetes --rounds 200 --out runs/diabetes",
        "sectorch perturbed-fl --exchange paper --partitions 2 --rounds 10",
        "sectorch perturbed-fl --clients 2 --federation federation.toml --as north",
    ),
    Trained(),
    Settings(learning_rate=0.05),
    _cast,
    _prepare,
    lambda how: Settings(learning_rate=0.05, loss="mse" if how.data == "diabetes" else "cross_entropy"),
    {"fedavg": lambda settings: settings.but(method="fedavg")},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
