"""`sectorch shapley`: train a federation, and value its clients securely."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import RenderableType

from ...data.datasets import DATASETS
from ...data.partition import DividedData, federation
from ...federated.command import Command, Options, Place, option
from ...federated.errors import FederationError
from ...federated.folder import RunFolder
from ...federated.parties import Simulation
from ...federated.training import LocalTraining, fedavg
from ...federated.watch import Estimate, Watch
from .experiment import ShapleyEvaluation, digest_of
from .program import MODELS, RATES, STEPS, Program, build
from .report import Result
from .settings import Settings, feasible
from .together import JointValuation


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


class Valuation:
    """Training in the clear, and the valuation of its rounds: what the command runs."""

    def __init__(self, how: Trained, settings: Settings, place: Place):
        self.how, self.settings, self.out = how, settings, place.out
        found = federation(
            how.data, how.clients, alpha=how.alpha, samples=how.samples, tests=how.tests, seed=how.seed,
            root=place.root,
        )  # fmt: skip
        self.found = for_model(found, how.model)
        self.model = build(how.model, self.found.shape, self.found.classes, hidden=how.hidden, seed=how.seed)
        feasible(how.clients, Program(self.model, self.found.shape), settings)
        self.attending = dict(_attendance(text, how.rounds, list(self.found.train)) for text in how.leave)
        self.folder = RunFolder(place.out).inside("training")
        self.folder.claim({**how.as_dict(), "first": digest_of({"": self.model.state_dict()})})
        self.tested = 0

    def so_far(self) -> RenderableType:
        return ""

    def estimate(self) -> Estimate:
        """The rounds' encryption and all coalitions, from one round of untrained models and one coalition of it."""
        everybody = 2**self.how.clients - 1
        count = self.how.rounds * min(self.settings.budget or everybody, everybody)
        models = {name: self.model.state_dict() for name in self.found.train}
        quick = self.settings.but(compare=False, processes=1, parallel="subsets")
        v = ShapleyEvaluation(self.model, [models], self.found.test, None, quick).utilities(0)
        v.ask([1])
        begun, tested = (_taken(records) for records in (v.begun, v.records.values()))
        return begun * self.how.rounds + tested * count

    def run(self, watch: Watch | None = None) -> Result:
        """The values; training is done once and kept. Two trainings may differ in the last bit."""
        models, weights = self._trained()
        run = ShapleyEvaluation(self.model, models, self.found.test, weights, self.settings, out=self.out)
        return run.run(watch)

    def _trained(self) -> tuple[list, list]:
        kept = self.folder.tensors("models")
        if kept is None:
            how = LocalTraining(epochs=self.how.epochs, lr=RATES[self.how.model])
            models, weights = fedavg(
                self.model, self.found.train, self.how.rounds, how, attending=self.attending, seed=self.how.seed
            )
            kept = {"models": models, "weights": weights}
            self.folder.keep("models", kept)
        return kept["models"], kept["weights"]


def _joint(how: Trained, settings: Settings, place: Place) -> JointValuation:
    """One party of a federation: a client has its own part of the data set, and a server none."""
    found = for_model(
        federation(how.data, how.clients, alpha=how.alpha, samples=how.samples, tests=how.tests, seed=how.seed,
                   root=place.root), how.model,
    )  # fmt: skip
    model = build(how.model, found.shape, found.classes, hidden=how.hidden, seed=how.seed)
    return JointValuation(
        model, found.shape, list(found.train), {n: (found.train[n], found.test[n]) for n in found.train}, settings,
        place.parties, rounds=how.rounds, training=LocalTraining(epochs=how.epochs, lr=RATES[how.model]),
        attending=dict(_attendance(text, how.rounds, list(found.train)) for text in how.leave), out=place.out,
        own=place.own(how.seed),
    )  # fmt: skip


def _taken(records) -> Estimate:
    seconds, size = (sum(sum(r.get(key, {}).values()) for r in records) for key in ("seconds", "bytes"))
    return Estimate(seconds, size)


def _attendance(text: str, rounds: int, names: list[str]) -> tuple[str, range]:
    try:
        name, span = text.split(":")
        first, last = (int(part) for part in span.split("-"))
    except ValueError:
        raise FederationError(f"--leave takes NAME:FIRST-LAST, as in c2:1-5, got {text!r}") from None
    if name not in names or not 1 <= first <= last <= rounds:
        raise FederationError(f"--leave {text}: clients are {', '.join(names)} and rounds 1-{rounds}")
    return name, range(first - 1, last)


def _prepare(how: Trained, settings: Settings, place: Place) -> Valuation | JointValuation:
    workers = place.workers
    parallel = "ray" if workers.kind == "ray" else settings.parallel
    settings = settings.but(processes=workers.count, parallel=parallel)
    if isinstance(place.parties, Simulation):
        return Valuation(how, settings, place)
    return _joint(how, settings, place)


def _cast(how: Trained, settings: Settings) -> list[str]:
    return [*(f"c{i}" for i in range(1, how.clients + 1)), "P", "X"]


COMMAND = Command(
    "shapley",
    "Shapley values of the clients of a federated run, without showing models or test data (SecSV): all parties on\n"
    "this machine, a simulation, which protects nothing, or one of a federation, whose roles are c1, c2, ..., P and\n"
    "X. A run that was stopped goes on when started again, at the coalition where it stopped.",
    (
        "sectorch shapley --data digits --clients 5 --rounds 10 --model logistic --skip",
        "sectorch shapley --model cnn --protocol hesv --rounds 1 --tests 100",
        "sectorch shapley --data bank --data-root ~/data --estimator kernel --budget 20",
        "sectorch shapley --clients 4 --rounds 2 --federation federation.toml --as north",
    ),
    Trained(),
    Settings(),
    _cast,
    _prepare,
    lambda how: Settings(),
    {"in the clear": lambda settings: settings.but(protocol="plain")},
)
parser, main = COMMAND.parser, COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
