"""`sectorch perturbed-fl`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from ...federated.command import Command, Options, Place, option
from .experiment import PerturbedFL
from .nets import MODELS, build
from .protocol import SERVER, clients_of
from .settings import NAMES, REGRESSIONS, Settings, load


@dataclass(frozen=True)
class Trained(Options):
    """What is trained, on what, and how it is computed."""

    data: str = option("digits", "data set; images is a folder of train/ and test/", among=NAMES)
    model: str | None = option(None, "the net (default: cnn for images, mlp3 for tables)", among=MODELS, several=True)
    float32: bool = option(False, "float64 otherwise")
    threads: int = option(1, "of torch; more than one rarely helps nets this small", least=1)
    seed: int = option(0, "of weights, batches and noise", least=0, several=True)


def _prepare(how: Trained, settings: Settings, place: Place) -> PerturbedFL:
    torch.set_num_threads(how.threads)
    dtype = torch.float32 if how.float32 else torch.float64
    data = load(how.data, str(place.root) if place.root else None, dtype)
    name = how.model or ("cnn" if len(data.shape) == 3 else "mlp3")
    torch.manual_seed(settings.seed)
    # In a federation the server's first model is its own to draw: the clients know the seed.
    model = build(name, data, dtype, place.own(how.seed))
    return PerturbedFL(data, model, settings, out=place.out, parties=place.parties)


def _cast(how: Trained, settings: Settings) -> list[str]:
    return [SERVER.name, *clients_of(settings.clients)]


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
    lambda how: Settings(learning_rate=0.05, loss="mse" if how.data in REGRESSIONS else "cross_entropy"),
    {"fedavg": {"method": "fedavg"}},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
