"""A plain loop over rounds, FedAvg or perturbed, from the same seed: what the command and tests run.

All parties are in this process, or it is one of a federation: each client then has its own samples, the server the
model. One round is one server step on the weighted mean gradient of the clients' current batches (Eq. 3); momentum and
weight decay act at the server. Both methods draw the same batches, so their curves can be compared step by step.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.table import Table
from torch import nn

from ...choreography import Party, Phase
from ...choreography.ledger import Observer
from ...choreography.net import Sent
from ...data.errors import DatasetMissingError
from ...display import Plot
from ...federated.command import Options, option
from ...federated.errors import CheckpointError, FederationError
from ...federated.folder import RunFolder, digest
from ...federated.outcome import Outcome
from ...federated.parties import Parties, Simulation
from ...federated.watch import Estimate, Watch
from ...optional_deps import required_imports
from .errors import BatchMismatchError, WeightError
from .messages import SERVER, roles_of
from .rounds import Federation
from .scheme import EXCHANGES, LOSSES, PLACES, Recovered, Scheme

# Data sets for the commands: scikit-learn's bundled ones, and CIFAR-100 or an image folder where there is one.


NAMES = ("digits", "breast-cancer", "diabetes", "cifar100", "images")


@dataclass(frozen=True)
class Data:
    """Inputs and targets, split; targets are class numbers, or [N, 1] numbers for a regression."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    outputs: int
    regression: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].shape[1:])

    def targets(self, which: torch.Tensor, loss: str, dtype: torch.dtype) -> torch.Tensor:
        """Targets as the loss takes them: one-hot for a classification under mse."""
        if self.regression:
            return which.to(dtype)
        return torch.nn.functional.one_hot(which, self.outputs).to(dtype) if loss == "mse" else which


def load(name: str, root: str | None = None, dtype: torch.dtype = torch.float64) -> Data:
    """One data set, 4:1 training and test, the same split every time; columns of tables are standardised.

    Raises:
        BatchMismatchError: an unknown name, or files that are not there (nothing is downloaded).
        DatasetMissingError: scikit-learn or torchvision is not installed.
    """
    if name not in NAMES:
        raise BatchMismatchError(f"data {name!r} is not known; there are {', '.join(NAMES)}")
    if name in ("cifar100", "images"):
        return _images(name, root, dtype)
    with required_imports(name, "scikit-learn", DatasetMissingError):
        from sklearn import datasets
        from sklearn.model_selection import train_test_split

    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    elif name == "breast-cancer":
        x, y = datasets.load_breast_cancer(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y)
    else:
        x, y = datasets.load_diabetes(return_X_y=True)
        x, y = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)[:, None]
        y = (y - y.mean()) / y.std()
    if x.dim() == 2:
        x = (x - x.mean(0)) / x.std(0)
    regression = y.is_floating_point()
    train, test = train_test_split(range(len(x)), test_size=0.2, random_state=0, stratify=None if regression else y)
    outputs = 1 if regression else int(y.max()) + 1
    return Data(name, (x[train], y[train]), (x[test], y[test]), outputs, regression)


def _images(name: str, root: str | None, dtype: torch.dtype) -> Data:
    if root is None or not Path(root).is_dir():
        none = "" if root is None else f"; {root} is none"
        raise BatchMismatchError(
            f"data {name!r} is read from a folder that is there already: name it with --data-root{none}"
        )
    with required_imports(name, "torchvision", DatasetMissingError):
        from torchvision import datasets, transforms
    shrink = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    try:
        if name == "cifar100":
            sets = [datasets.CIFAR100(root, train=train, transform=transforms.ToTensor()) for train in (True, False)]
        else:
            sets = [datasets.ImageFolder(Path(root) / part, transform=shrink) for part in ("train", "test")]
    except (RuntimeError, OSError) as error:
        wanted = "cifar-100-python" if name == "cifar100" else "train/ and test/ with a folder of images for each class"
        raise BatchMismatchError(f"data {name!r} is not in {root}, which should hold {wanted}") from error
    loaded = []
    for part in sets:
        pairs = [part[i] for i in range(len(part))]
        loaded.append((torch.stack([x for x, _ in pairs]).to(dtype), torch.tensor([y for _, y in pairs])))
    return Data(name, loaded[0], loaded[1], int(loaded[0][1].max()) + 1, False)


# The settings of a run.


METHODS = ("perturbed", "fedavg")


@dataclass(frozen=True)
class Settings(Options):
    """One run."""

    clients: int = option(5, "how many", least=1, several=True)
    rounds: int = option(100, "of training, one server step each", least=1)
    batch_size: int = option(32, "of a client", least=1)
    local_batches: int = option(1, "averaged before an update is sent", least=1)
    learning_rate: float = option(0.1, "of the server's step", above=0, below=math.inf)
    momentum: float = option(0.9, "of the server's step", least=0, below=1)
    weight_decay: float = option(0.0, "of the server's step", least=0, below=math.inf)
    loss: str = option("cross_entropy", "cross_entropy for classes, mse for numbers", among=LOSSES)
    partitions: int = option(1, "m, 1 to the number of outputs", least=1, several=True)
    exchange: str | None = option(None, "for cross-entropy (default: shift)", among=EXCHANGES)
    masked: bool = option(True, "with masks", flag="no-masks", off="the server then sees each client's gradient")
    seed: int = option(0, "of weights, batches and noise", least=0, several=True)
    gradient_variance: float = option(
        0.0,
        "of the Gaussian noise which every FedAvg client adds to its gradient: the baseline of Table IV, not a "
        "calibrated mechanism",
        least=0,
        below=math.inf,
    )
    noise_on: str = option("weights", "where the noise is; bias: m + 1 terms, and hides less", among=PLACES)
    degree: int | None = option(None, "with how many others a client shares masks, even (default: all)", least=2)
    method: str = option("perturbed", "this scheme, or fedavg", among=METHODS)


# What a run shows.


@dataclass
class History(Outcome):
    """What a run shows: per round the training loss before the step; at the end the test score, seconds and bytes.

    `score` is the test accuracy in percent, or the mean squared error of a regression.
    """

    losses: list[float] = field(default_factory=list)
    score: float = float("nan")
    client_seconds: float = 0.0
    server_seconds: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    model: nn.Module | None = field(default=None, repr=False)
    settings: Settings = field(default_factory=Settings)
    regression: bool = False
    apart: bool = False
    """Whether other parties were elsewhere; the training loss is nobody's to know then."""

    def headline(self) -> dict[str, float]:
        name = "test MSE" if self.regression else "test accuracy"
        return {"last loss": self.losses[-1], name: self.score}

    @property
    def unit(self) -> str:
        return "loss, and MSE" if self.regression else "loss, and %"

    def tables(self) -> list[Table]:
        shown = Table(title=f"{self.settings.clients} clients, {len(self.losses)} rounds, {self.settings.method}")
        heads = ("test MSE" if self.regression else "test accuracy, %", "last loss", "client s", "server s", "MB down")
        for head in (*heads, "MB up"):
            shown.add_column(head, justify="right")
        seconds = (f"{self.client_seconds:.2f}", f"{self.server_seconds:.2f}")
        size = (f"{self.down_bytes / 1e6:.2f}", f"{self.up_bytes / 1e6:.2f}")
        shown.add_row(f"{self.score:.4f}", f"{self.losses[-1]:.5f}", *seconds, *size)
        return [shown]

    def sentences(self) -> list[str]:
        if self.settings.method == "fedavg":
            return ["FedAvg: every client sees the model, and the server every client's gradient. Protects nothing."]
        seen = "the sum of the clients' masked updates" if self.settings.masked else "each client's update (no masks)"
        return [
            f"Clients saw a noised model, the server {seen}; the site's page on it says what the noise hides.",
            "All parties ran in one process, which therefore protected nothing: this is a simulation."
            if not self.apart
            else "This process was one party; what the others have never left them.",
        ]

    def as_dict(self) -> dict[str, Any]:
        kept = ("losses", "score", "client_seconds", "server_seconds", "down_bytes", "up_bytes")
        found = {"settings": self.settings.as_dict(), **{name: getattr(self, name) for name in kept}}
        return found | {"losses": [None if loss != loss else loss for loss in self.losses]} if self.apart else found

    def rows(self) -> dict[str, list[dict]]:
        return {"losses": [dict(round=t, loss=loss) for t, loss in enumerate(self.losses) if loss == loss]}

    def plots(self) -> list[Plot]:
        if self.apart:
            return []
        return [Plot("curve", "round", "training loss", {self.settings.method: dict(enumerate(self.losses))})]


def shards(count: int, clients: int, seed: int) -> list[torch.Tensor]:
    """Sample numbers of each client: shuffled, sizes in proportion 1 : 2 : 1 : 2 ... so that weights differ."""
    if not 1 <= clients <= count // 2:
        raise WeightError(f"{clients} clients for {count} samples; between 1 and {count // 2} are possible")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = torch.tensor([1 + client % 2 for client in range(clients)]).cumsum(0)
    cuts = [int(count * part / parts[-1]) for part in parts[:-1]]
    return list(torch.tensor_split(order, cuts))


def batch_of(shard: torch.Tensor, client: int, turn: int, size: int, seed: int) -> torch.Tensor:
    """The `turn`-th batch of a client's shard; the epoch's order depends on the seed, client and epoch alone."""
    per_epoch = max(1, len(shard) // size)
    generator = torch.Generator().manual_seed(hash((seed, client, turn // per_epoch)) % (1 << 62))
    order = torch.randperm(len(shard), generator=generator)
    return shard[order[(turn % per_epoch) * size :][:size]]


def score_of(model: nn.Module, data: Data) -> float:
    """Test accuracy in percent, or the mean squared error of a regression."""
    model.eval()
    with torch.no_grad():
        outputs = model(data.test[0])
    model.train()
    if data.regression:
        return float((outputs - data.test[1]).square().mean())
    return 100 * float((outputs.argmax(1) == data.test[1]).double().mean())


class PerturbedFL:
    """Rounds of FedAvg or of perturbed models on one data set, from the same seed.

    Args:
        data: whose training samples are divided among the clients.
        model: the first global model; it keeps its weights.
        settings: see `Settings`.
        out: a folder; a run that was stopped goes on there, a twentieth of its rounds back at most. None keeps nothing.
        parties: who is here, of Server, C0, C1, ...; all of them unless given. Where the server is elsewhere the model
            stays as it is given, where a client is elsewhere the training loss is not known.

    Raises:
        FederationError, WeightError: settings that do not fit the model or the data; FedAvg among parties apart.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self,
        data: Data,
        model: nn.Module,
        settings: Settings,
        *,
        out: str | Path | None = None,
        parties: Parties | None = None,
    ):
        self.data, self.settings = data, settings
        self._parties = parties or Simulation()
        self._here = [self._parties.present(f"C{client}") for client in range(settings.clients)]
        self._serves = self._parties.present(SERVER.name)
        if settings.method != "perturbed" and not (self._serves and all(self._here)):
            raise FederationError("FedAvg is the control of a simulation: it protects nothing among parties apart")
        if data.regression and settings.loss != "mse":
            raise FederationError(f"{data.name} is a regression; use --loss mse")
        self._given = model
        self.model = copy.deepcopy(model).train()
        self.scheme = Scheme(
            self.model, settings.loss, settings.partitions, exchange=settings.exchange, noise_on=settings.noise_on
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
        )
        self.parts = shards(len(data.train[0]), settings.clients, settings.seed)
        self.weights = [len(part) for part in self.parts]
        self.federation: Federation | None = None
        self.history = History(model=self.model, settings=settings, regression=data.regression)
        self.history.apart = not (self._serves and all(self._here))
        self.folder = RunFolder(out)
        first = digest(*self.model.state_dict().values(), *data.train)
        self.folder.claim({**settings.as_dict(), "data": data.name, "first": first})

    def so_far(self) -> RenderableType:
        """The last loss."""
        losses = self.history.losses
        return f"{self.settings.method}: loss {losses[-1]:.5f} after {len(losses)} rounds" if losses else ""

    def estimate(self) -> Estimate | None:
        """What is left, from the second of two rounds; None among parties apart, who do not try it out."""
        if not isinstance(self._parties, Simulation):
            return None
        times, two = [], self.settings.but(rounds=2)
        tried = PerturbedFL(self.data, self._given, two)
        with tried._joined():
            for number in range(2):
                start = time.perf_counter()
                tried._round(number)
                times.append(time.perf_counter() - start)
        size = (tried.history.down_bytes + tried.history.up_bytes) / 2
        left = self.settings.rounds - (self.folder.record("state") or {"done": 0})["done"]
        return Estimate(times[1], size) * left

    def run(self, watch: Watch | None = None) -> History:
        """All rounds, or those that are not in the folder yet."""
        watch, how = watch or Watch(), self.settings
        watch.begins(how.rounds)
        every = max(1, how.rounds // 20)
        kept = self._resumed()
        for number in range(kept):
            watch.finished(f"round {number + 1}", self.history.losses[number])
        with self._joined():
            done = self._gone_on(kept)
            for number in range(done, how.rounds):
                self._round(number)
                watch.finished(f"round {number + 1}", self.history.losses[number])
                if (number + 1) % every == 0:
                    self._keep(number + 1)
        if self._serves:
            self.history.score = score_of(self.model, self.data)
        return self.history

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """The parties have their keys inside; FedAvg needs none."""
        how = self.settings
        if how.method != "perturbed":
            yield
            return
        said = json.dumps([how.as_dict(), self.data.name, self.weights, str(self.model)], sort_keys=True)
        with self._parties.session(roles_of(how.clients), label="perturbed-fl", agreed=said) as session:
            self.federation = Federation(
                self.scheme, how.clients, masked=how.masked, degree=how.degree, session=session
            )  # fmt: skip
            yield

    def _gone_on(self, kept: int) -> int:
        """How many rounds are finished: apart, as the server has kept them; a client has no model of its own."""
        if self.federation is None or not self.history.apart:
            return kept
        done = self.federation.begin(kept)
        losses = self.history.losses
        self.history.losses = [*losses[:done], *[math.nan] * (done - len(losses))]
        return done

    def _round(self, number: int) -> None:
        how, history = self.settings, self.history
        batches = [self._batches(client, part, number) for client, part in enumerate(self.parts)]
        known = self._serves and all(self._here)
        history.losses.append(_mean_loss(self.model, self.scheme, batches, self.weights) if known else math.nan)
        if self.federation is not None:
            with _Meter(history):
                state = self.model.state_dict() if self._serves else None
                recovered = self.federation.round(state, batches, self.weights)
        else:
            recovered = _plain_round(
                self.scheme, self.model, batches, self.weights, history, how.gradient_variance
            )  # fmt: skip
        begun = time.perf_counter()
        if recovered is not None:  # and else the server, in another process, steps
            self.scheme.step(self.model, self.optimizer, recovered)
        history.server_seconds += time.perf_counter() - begun

    def _batches(self, client: int, part: torch.Tensor, number: int) -> list[tuple]:
        how, (images, targets) = self.settings, self.data.train
        dtype = next(self.model.parameters()).dtype
        chosen = [
            batch_of(part, client, number * how.local_batches + b, how.batch_size, how.seed)
            for b in range(how.local_batches)
        ]
        found = [(images[index], self.data.targets(targets[index], how.loss, dtype)) for index in chosen]
        return found if self._here[client] else [(x.to("meta"), y.to("meta")) for x, y in found]

    def _keep(self, done: int) -> None:
        shown = self.history.as_dict()
        del shown["settings"], shown["score"]
        self.folder.keep(f"round-{done}", {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        self.folder.keep("state", record={"done": done, **shown})
        self.folder.drop("round-*.pt", f"round-{done}.pt")

    def _resumed(self) -> int:
        kept = self.folder.record("state")
        if kept is None:
            return 0
        done = kept.pop("done")
        tensors = self.folder.tensors(f"round-{done}")
        if tensors is None:
            raise CheckpointError(f"{self.folder.path}/round-{done}.pt is missing; remove the folder and start again")
        self.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        for name, value in kept.items():
            setattr(self.history, name, value)
        self.folder.drop("round-*.pt", f"round-{done}.pt")  # a kill may have come between the record and that
        return done


def train(data: Data, model: nn.Module, settings: Settings, perturbed: bool, watch: Watch | None = None) -> History:
    """Train a copy of `model`, which keeps its weights, by one of the two methods."""
    return PerturbedFL(data, model, settings.but(method="perturbed" if perturbed else "fedavg")).run(watch)


class _Meter(Observer):
    """Bytes and seconds of server and clients, into a history."""

    def __init__(self, history: History):
        self._history = history

    def message(self, line: Sent, value: torch.Tensor) -> None:
        if line.src == SERVER:
            self._history.down_bytes += line.bytes
        else:
            self._history.up_bytes += line.bytes

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        if SERVER in owners:
            self._history.server_seconds += seconds
        else:
            self._history.client_seconds += seconds


def plain_update(
    scheme: Scheme, model: nn.Module, batches: list[tuple]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a FedAvg client computes: mean gradient over its batches, and its batch norms' statistics."""
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    parameters = dict(model.named_parameters())
    norms = [model.get_submodule(name) for name, own in scheme.plan.channels.batch_norms.items() if own]
    total = sum(len(x) for x, _ in batches)
    gradients, statistics = [torch.zeros_like(parameters[n]) for n in names], []
    seen: list[torch.Tensor] = []
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs: seen.extend(_moments(inputs[0].detach()))) for norm in norms
    ]
    try:
        for x, y in batches:
            seen.clear()
            running = {id(b): b.clone() for norm in norms for b in norm.buffers()}
            value = scheme.loss_fn(model(x), y)
            for into, new in zip(gradients, torch.autograd.grad(value, [parameters[n] for n in names]), strict=True):
                into.add_(new, alpha=len(x) / total)
            for norm in norms:
                for buffer in norm.buffers():
                    buffer.copy_(running[id(buffer)])
            weighted = [s * (len(x) / total) for s in seen]
            statistics = [a + b for a, b in zip(statistics, weighted, strict=True)] if statistics else weighted
    finally:
        for hook in hooks:
            hook.remove()
    return gradients, statistics


def _moments(x: torch.Tensor) -> list[torch.Tensor]:
    dims = [d for d in range(x.dim()) if d != 1]
    return [x.mean(dims), x.var(dims)]


def _mixed(shares: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts times their shares, added up."""
    return functools.reduce(torch.add, (share * part for share, part in zip(shares, parts, strict=True)))


def _plain_round(scheme, model, batches, weights, history, variance) -> Recovered:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    size = sum(p.nbytes for p in model.parameters())
    begun = time.perf_counter()
    found = [plain_update(scheme, model, mine) for mine in batches]
    if variance:
        for gradients, _ in found:
            for gradient in gradients:
                gradient += variance**0.5 * torch.randn_like(gradient)
    history.client_seconds += time.perf_counter() - begun
    begun = time.perf_counter()
    shares = [weight / sum(weights) for weight in weights]
    recovered = Recovered()
    for index, name in enumerate(names):
        recovered[name] = _mixed(shares, [gradients[index] for gradients, _ in found])
    mixed = [_mixed(shares, column) for column in zip(*(s for _, s in found), strict=True)]
    norms = [name for name, own in scheme.plan.channels.batch_norms.items() if own]
    recovered.statistics = {name: (mixed[2 * i], mixed[2 * i + 1]) for i, name in enumerate(norms)}
    history.server_seconds += time.perf_counter() - begun
    history.down_bytes += size * len(batches)
    history.up_bytes += size * len(batches)
    return recovered


def _mean_loss(model: nn.Module, scheme: Scheme, batches: list, weights: list[int]) -> float:
    """The joint training loss on this round's batches at the true weights, in eval mode (no statistics change)."""
    model.eval()
    with torch.no_grad():
        means = [sum(float(scheme.loss_fn(model(x), y)) for x, y in mine) / len(mine) for mine in batches]
    model.train()
    return sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)


# The paper's nets at the sizes of its Tables: MLP-3/5/7, ResNet-20/32/56, and a small DenseNet.


def mlp(layers: int, inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """An MLP of `layers` linear layers with ReLU between them."""
    widths = [inputs, *[width] * (layers - 1), outputs]
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _activation(x: torch.Tensor, slope: float) -> torch.Tensor:
    return F.leaky_relu(x, slope) if slope else F.relu(x)


class _Block(nn.Module):
    """Two 3x3 convolutions and the sum with a shortcut, which is 1x1 where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool, slope: float):
        super().__init__()
        self.slope = slope
        make = (lambda: nn.BatchNorm2d(outputs)) if norm else nn.Identity
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not norm)
        self.norm1 = make()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=not norm)
        self.norm2 = make()
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=not norm), make())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(_activation(self.norm1(self.conv1(x)), self.slope)))
        return _activation(out + self.shortcut(x), self.slope)


class ResNet(nn.Module):
    """ResNet-20, 32, 56 of He et al. for small images: 6n + 2 layers, 16, 32 and 64 channels.

    Args:
        slope: of the activations below zero; 0 is ReLU.
    """

    def __init__(
        self, depth: int, classes: int, channels: int = 3, norm: bool = True, width: int = 16, slope: float = 0.0
    ):
        super().__init__()
        self.slope = slope
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=not norm)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            for index in range((depth - 2) // 6):
                outputs = width << stage
                blocks.append(_Block(inputs, outputs, 2 if stage and not index else 1, norm, slope))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(_activation(self.norm(self.stem(x)), self.slope))
        return self.head(torch.flatten(self.pool(x), 1))


class _Dense(nn.Module):
    def __init__(self, inputs: int, growth: int, norm: bool):
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs) if norm else nn.Identity()
        self.conv = nn.Conv2d(inputs, growth, 3, 1, 1, bias=not norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    """A small DenseNet: blocks of concatenated layers, with a 1x1 convolution and pooling between them."""

    def __init__(
        self, classes: int, channels: int = 3, growth: int = 8, blocks: tuple[int, ...] = (3, 3), norm: bool = True
    ):
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1)]
        for index, layers in enumerate(blocks):
            for _ in range(layers):
                parts.append(_Dense(width, growth, norm))
                width += growth
            if index < len(blocks) - 1:
                parts += [nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
        parts += [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))
