"""`sectorch shapley`: train a federation, and value its clients securely."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...data.datasets import DATASETS
from ...data.partition import DividedData, federation
from ...federated.command import Command, Options, Place, option
from ...federated.errors import FederationError
from ...federated.training import LocalTraining
from .experiment import Valuation
from .program import MODELS, RATES, STEPS, build
from .settings import Settings


def for_model(found: DividedData, model: str) -> DividedData:
    """The samples as a model takes them: padded with zeros to steps of 64 for the GRU, 28 x 28 for the CNN."""
    if model == "cnn" and len(found.shape) == 3 and found.shape[1:] != (28, 28):
        change = lambda x: F.interpolate(x, (28, 28), mode="bilinear", align_corners=False)
    elif model == "rnn":
        size = torch.Size(found.shape).numel()
        change = lambda x: F.pad(x.flatten(1), (0, max(0, 64 * STEPS - size) if size < 64 * STEPS else -size % STEPS))
    else:
        return found
    train, test = ({n: (change(x), y) for n, (x, y) in part.items()} for part in (found.train, found.test))
    return DividedData(found.name, train, test, found.classes)


@dataclass(frozen=True)
class Trained(Options):
    """Clients, and the rounds of federated averaging that are valued."""

    data: str = option("digits", "data set", among=tuple(DATASETS))
    clients: int = option(5, "how many", least=2, several=True)
    rounds: int = option(10, "of federated averaging", least=1)
    model: str = option("logistic", "what is trained", among=MODELS)
    hidden: int = option(3, "hidden layers of the DNN", least=0, most=7, several=True)
    alpha: float = option(0.5, "of the Dirichlet partition", above=0)
    samples: int | None = option(None, "training samples in all (default: the data set's)", least=1)
    tests: int | None = option(None, "test samples in all (default: the data set's)", least=1, several=True)
    epochs: int = option(1, "local epochs of a round", least=1)
    leave: tuple[str, ...] = option((), "NAME:FIRST-LAST, rounds that a client attends")
    seed: int = option(0, "of training and sampling", least=0, several=True)


def _attendance(text: str, rounds: int, names: list[str]) -> tuple[str, range]:
    try:
        name, span = text.split(":")
        first, last = (int(part) for part in span.split("-"))
    except ValueError:
        raise FederationError(f"--leave takes NAME:FIRST-LAST, as in c2:1-5, got {text!r}") from None
    if name not in names or not 1 <= first <= last <= rounds:
        raise FederationError(f"--leave {text}: clients are {', '.join(names)} and rounds 1-{rounds}")
    return name, range(first - 1, last)


def _prepare(how: Trained, settings: Settings, place: Place) -> Valuation:
    """The valuation; one party of a federation takes its own part of the data set, and a server none."""
    workers = place.workers
    settings = settings.but(processes=workers.count, parallel="ray" if workers.kind == "ray" else settings.parallel)
    found = federation(
        how.data, how.clients, alpha=how.alpha, samples=how.samples, tests=how.tests, seed=how.seed, root=place.root
    )
    found = for_model(found, how.model)
    names = list(found.train)
    return Valuation(
        build(how.model, found.shape, found.classes, hidden=how.hidden, seed=how.seed), found.shape, names,
        {n: (found.train[n], found.test[n]) for n in names}, settings, place.parties, rounds=how.rounds,
        training=LocalTraining(epochs=how.epochs, lr=RATES[how.model]),
        attending=dict(_attendance(text, how.rounds, names) for text in how.leave), out=place.out,
        own=place.own(how.seed),
    )  # fmt: skip


def _cast(how: Trained, settings: Settings) -> list[str]:
    return [*(f"c{i}" for i in range(1, how.clients + 1)), "P", "X"]


COMMAND = Command(
    "shapley",
    "Shapley values of the clients of a federated run, without showing models or test data (SecSV): all parties on\n"
    "this machine, a simulation, which protects nothing, or one of a federation, whose roles are c1, c2, ..., P and\n"
    "X. A run that was stopped goes on when started again, at the coalition where it stopped.",
    (
        "sectorch shapley --data digits --clients 5 --rounds 10 --model logistic",
        "sectorch shapley --model cnn --protocol hesv --rounds 1 --tests 100",
        "sectorch shapley --data bank --data-root ~/data --estimator kernel --budget 20",
        "sectorch shapley --clients 4 --rounds 2 --federation federation.toml --as north",
    ),
    Trained(),
    Settings(),
    _cast,
    _prepare,
    lambda how: Settings(),
    {"in the clear": {"protocol": "plain"}},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
