"""`sectorch shapley`: train a federation, and value its clients securely."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import RenderableType

from ...data.datasets import ImageSplit, from_torchvision, root_of
from ...data.errors import DataError, DatasetMissingError, PartitionError
from ...data.seeds import generator
from ...federated.command import Command, Options, Place, option
from ...federated.errors import FederationError
from ...federated.folder import RunFolder
from ...federated.parties import Simulation
from ...federated.watch import Estimate, Watch
from ...optional_deps import required_imports
from .evaluation import ShapleyEvaluation, digest_of
from .program import MODELS, RATES, STEPS, Program, Training, build, fedavg
from .report import Result
from .settings import Settings, feasible
from .together import JointValuation

# Data for experiments: what is bundled with scikit-learn, what torchvision has, and tables from a folder.
#
# | name | samples | classes | from |
# | --- | --- | ---: | --- |
# | digits | 1 x 8 x 8, 1797 (28 x 28 for the CNN) | 10 | scikit-learn |
# | breast-cancer | 30 numbers padded to 48, 569 | 2 | scikit-learn, in place of BANK |
# | mnist | 1 x 28 x 28, 70000 | 10 | torchvision, when on disk |
# | bank, agnews, mirna | 48, 300, 640 numbers | 2, 4, 2 | train.npz and test.npz with x and y, in a folder so named |
#
# Labels are divided among clients by Dir(0.5), label by label, test samples in the same proportions (SecSV, 7.1;
# Yurochkin et al., 2019). Nothing is downloaded.


Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Federation:
    """Each client's training and test samples, by name."""

    name: str
    train: dict[str, Pair]
    test: dict[str, Pair]
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(next(iter(self.test.values()))[0].shape[1:])


def federation(
    name: str,
    clients: int,
    *,
    alpha: float = 0.5,
    test_fraction: float = 0.5,
    samples: int | None = None,
    tests: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> Federation:
    """A data set divided among clients by Dir(alpha).

    Args:
        name: one of `DATA`.
        test_fraction: of the bundled sets that goes to testing; the others come divided.
        samples, tests: keep this many training and test samples in all.

    Raises:
        DataError: a name or a number that cannot be.
        DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    for what, count in (("samples", samples), ("tests", tests)):
        if count is not None and count < 1:
            raise DataError(f"{what} must be at least 1, got {count}")
    if name not in DATA:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATA)}")
    if not 0 < test_fraction < 1 or clients < 2:
        raise DataError(f"between 0 and 1 of the samples are for tests, and at least two clients; got {test_fraction} "
                        f"and {clients}")  # fmt: skip
    train, test, classes = DATA[name](root_of(root), test_fraction)
    train, test = _some(train, samples, seed, "train"), _some(test, tests, seed, "test")
    proportions = dirichlet(classes, clients, alpha, seed)
    names = [f"c{i + 1}" for i in range(clients)]
    parts = [divide(pair[1], proportions, 2 if pair is train else 1, seed) for pair in (train, test)]
    of_train, of_test = (
        {n: (pair[0][part], pair[1][part]) for n, part in zip(names, each, strict=True)}
        for pair, each in zip((train, test), parts, strict=True)
    )
    return Federation(name, of_train, of_test, classes)


def for_model(found: Federation, model: str) -> Federation:
    """The samples as a model takes them: padded with zeros to steps of 64 for the GRU, 28 x 28 for the CNN."""
    if model == "cnn" and len(found.shape) == 3 and found.shape[1:] != (28, 28):
        change = lambda x: F.interpolate(x, (28, 28), mode="bilinear", align_corners=False)
    elif model == "rnn":
        size = torch.Size(found.shape).numel()
        change = lambda x: F.pad(x.flatten(1), (0, max(0, 64 * STEPS - size) if size < 64 * STEPS else -size % STEPS))
    else:
        return found
    train, test = ({n: (change(x), y) for n, (x, y) in part.items()} for part in (found.train, found.test))
    return Federation(found.name, train, test, found.classes)


def dirichlet(classes: int, clients: int, alpha: float, seed: int) -> torch.Tensor:
    """[classes, clients]: for each label the clients' shares of it, from Dir_clients(alpha)."""
    if not 0 < alpha < float("inf"):
        raise PartitionError(f"alpha must be above 0 and finite, got {alpha}")
    gamma = torch._standard_gamma(  # pyright: ignore[reportPrivateImportUsage]  not in torch's stubs
        torch.full((classes, clients), float(alpha), dtype=torch.float64), generator=generator(seed, "dirichlet")
    ).clamp_min(1e-300)
    return gamma / gamma.sum(1, keepdim=True)


def divide(labels: torch.Tensor, proportions: torch.Tensor, least: int, seed: int) -> list[torch.Tensor]:
    """Disjoint sorted indices for each client; a client with fewer than `least` takes from the one who has most.

    Raises:
        PartitionError: fewer samples than clients need.
    """
    clients = proportions.shape[1]
    if len(labels) < clients * least:
        raise PartitionError(f"{clients} clients with at least {least} samples each, but there are {len(labels)}")
    draw = generator(seed, "divide", len(labels))
    hands: list[list[int]] = [[] for _ in range(clients)]
    for label, row in enumerate(proportions):
        own = torch.nonzero(labels == label).flatten()
        own = own[torch.randperm(len(own), generator=draw)].tolist()
        ends = [0, *(row.cumsum(0) * len(own)).round().long().tolist()]
        ends[-1] = len(own)
        for hand, start, end in zip(hands, ends, ends[1:], strict=False):
            hand += own[start:end]
    for hand in hands:
        while len(hand) < least:
            hand.append(max(hands, key=len).pop())
    return [torch.tensor(sorted(hand)) for hand in hands]


def _some(pair: Pair, count: int | None, seed: int, what: str) -> Pair:
    if count is None or count >= len(pair[1]):
        return pair
    chosen = torch.randperm(len(pair[1]), generator=generator(seed, "some", what))[:count]
    return pair[0][chosen], pair[1][chosen]


def _bundled(name: str) -> tuple[np.ndarray, np.ndarray]:
    with required_imports(name, "scikit-learn", DatasetMissingError):
        from sklearn import datasets
    data = getattr(datasets, f"load_{name.replace('-', '_')}")()
    return data.data, data.target


def _cut(x: torch.Tensor, y: torch.Tensor, fraction: float) -> tuple[Pair, Pair]:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    cut = round(len(y) * (1 - fraction))
    return (x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]])


def _digits(_root: Path, fraction: float):
    x, y = _bundled("digits")
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return *_cut(images, torch.tensor(y, dtype=torch.int64), fraction), 10


def _breast_cancer(_root: Path, fraction: float):
    x, y = _bundled("breast-cancer")
    train, test = _cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64), fraction)
    mean, spread = train[0].mean(0), train[0].std(0)
    # A quarter of a standard deviation is the unit, which keeps features and outputs within a few units.
    return *((F.pad((v - mean) / (4 * spread), (0, 18)), t) for v, t in (train, test)), 2


def _mnist(root: Path, _fraction: float):
    def read() -> list[ImageSplit]:
        from torchvision.datasets import MNIST

        parts = [MNIST(str(root), train=train) for train in (True, False)]
        return [ImageSplit(p.data.unsqueeze(1), p.targets) for p in parts]

    train, test = from_torchvision("mnist", root / "MNIST", f"d.MNIST('{root}', download=True)", read)
    return train.take(), test.take(), 10


def _table(name: str, features: int, classes: int) -> Callable:
    def read(root: Path, _fraction: float):
        folder, pairs = root / name, []
        for part in ("train", "test"):
            path = folder / f"{part}.npz"
            try:
                with np.load(path, allow_pickle=False) as found:
                    x, y = torch.tensor(found["x"], dtype=torch.float32), torch.tensor(found["y"], dtype=torch.int64)
            except (OSError, KeyError, ValueError) as error:
                raise DatasetMissingError(
                    f"{name} is not on disk: looked for {path} with arrays x [n, {features}] and y [n] "
                    f"({type(error).__name__}); make them from the data set, or name another root (--data-root)"
                ) from error
            if x.shape[1:] != (features,) or y.shape != x.shape[:1]:
                raise DataError(f"{path}: x must be [n, {features}] and y [n], got {list(x.shape)} and {list(y.shape)}")
            pairs.append((x, y))
        return *pairs, classes

    return read


DATA: dict[str, Callable] = {
    "digits": _digits,
    "breast-cancer": _breast_cancer,
    "mnist": _mnist,
    "bank": _table("bank", 48, 2),
    "agnews": _table("agnews", 300, 4),
    "mirna": _table("mirna", 640, 2),
}


@dataclass(frozen=True)
class Trained(Options):
    """Clients, and the rounds of federated averaging that are valued."""

    data: str = option("digits", "data set", among=tuple(DATA))
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
            how = Training(epochs=self.how.epochs, lr=RATES[self.how.model])
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
        place.parties, rounds=how.rounds, training=Training(epochs=how.epochs, lr=RATES[how.model]),
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
