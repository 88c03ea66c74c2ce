"""`PerturbedFL`: rounds of perturbed models, or of FedAvg, as stages of a run; the paper's nets, and the command.

One round is one server step on the weighted mean gradient of the clients' current batches (Eq. 3); momentum and weight
decay act at the server. Both methods draw the same batches, so their curves can be compared step by step.
"""

from __future__ import annotations

import copy
import functools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from ...choreography import Party, Phase
from ...choreography.ledger import Observer
from ...display import Plot
from ...errors import FederationError
from ...federated import outcome
from ...federated.command import Command, Options, Place, option
from ...federated.folder import digest
from ...federated.outcome import Outcome, Received, where_it_ran
from ...federated.parties import Parties, Simulation
from ...federated.run import Experiment, Held, Run, note, progress
from ...federated.watch import Estimate, Watch
from ...session import Session
from .protocol import SERVER, Federation, clients_of, roles_of
from .scheme import Recovered, Scheme
from .settings import NAMES, REGRESSIONS, Data, Settings, batch_of, load, shards


@dataclass
class History(Outcome):
    """A finished run.

    Attributes:
        losses: of each round, before its step; not a number where parties are apart, whose joint loss nobody knows.
        score: the test accuracy in percent, or the mean squared error of a regression; of the server.
        received: the ledger's rows: what each role received.
        epsilon: of a record, at the settings' delta, where the sums are private.
    """

    settings: Settings
    losses: list[float]
    score: float
    client_seconds: float
    server_seconds: float
    received: list[dict]
    regression: bool
    apart: bool
    model: nn.Module = field(repr=False)
    epsilon: float | None = None

    @property
    def down_bytes(self) -> int:
        return self._bytes(lambda role: role != "Server")

    @property
    def up_bytes(self) -> int:
        return self._bytes(lambda role: role == "Server")

    def _bytes(self, to: Any) -> int:
        if self.settings.method == "fedavg":
            return sum(p.nbytes for p in self.model.parameters()) * self.settings.clients * len(self.losses)
        return sum(row["bytes"] for row in self.received if to(row["role"]))

    def headline(self) -> dict[str, float]:
        name = "test MSE" if self.regression else "test accuracy"
        return {"last loss": self.losses[-1], name: self.score}

    @property
    def unit(self) -> str:
        return "loss, and MSE" if self.regression else "loss, and %"

    def tables(self) -> list[Table]:
        heads = ("test MSE" if self.regression else "test accuracy, %", "last loss", "client s", "server s", "MB down")
        title = f"{self.settings.clients} clients, {len(self.losses)} rounds, {self.settings.method}"
        shown = outcome.titled(title, (*heads, "MB up"))
        seconds = (f"{self.client_seconds:.2f}", f"{self.server_seconds:.2f}")
        size = (f"{self.down_bytes / 1e6:.2f}", f"{self.up_bytes / 1e6:.2f}")
        shown.add_row(f"{self.score:.4f}", f"{self.losses[-1]:.5f}", *seconds, *size)
        clients = [row | {"role": re.sub(r"^C\d+$", "each client", row["role"])} for row in self.received]
        return [shown, *([outcome.table(clients)] if clients else [])]

    def sentences(self) -> list[str]:
        how = self.settings
        if how.method == "fedavg":
            return ["FedAvg: every client sees the model, and the server every client's gradient. Protects nothing."]
        masked = how.masked and how.clients > 1
        seen = "the sum of the clients' masked updates" if masked else "each client's update (no masks)"
        bias = how.noise_on == "bias"
        exchange = {
            "paper": "By the paper's exchange the server can compute the true prediction of every sample of every "
            "client (of two classes, its odds within a factor of 20), and a client that of its own samples and with it "
            "the noise on the last layer, against Lemma 7.",
            "shift": "By the shift exchange a client's softmax is the true one: it knows the prediction of its own "
            "samples, against Lemma 7, and from two rounds the noise on the last layer. The server learns nothing of "
            "them.",
            None: "A client knows the true outputs of its own samples but for one direction a partition, and from two "
            "rounds these as well, up to what a step changes, against Lemma 7"
            + (", if fewer than half as many partitions as outputs have noise of their own." if bias else "."),
        }
        private = [] if self.epsilon is None else [
            f"Each sum had the noise of {how.clients} clients, of which {how.clients - how.colluding} carry the "
            f"promise. What the run shows of one record, replaced by another, is within epsilon {self.epsilon:.4g} at "
            f"delta {how.delta:g}: to the server, and to it with {how.colluding} other clients at most."
        ]  # fmt: skip
        return [
            f"Clients saw a noised model, the server {seen}; the site's page on it says what the noise hides.",
            *private, exchange[how.exchange_used], where_it_ran(self.apart),
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        kept = ("score", "client_seconds", "server_seconds", "down_bytes", "up_bytes", "received")
        losses = [None if loss != loss else loss for loss in self.losses]
        private = {} if self.epsilon is None else {"epsilon": self.epsilon}
        return {
            "settings": self.settings.as_dict(), "losses": losses, **{name: getattr(self, name) for name in kept},
            **private,
        }  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        return {"losses": [dict(round=t, loss=loss) for t, loss in enumerate(self.losses) if loss == loss]}

    def plots(self) -> list[Plot]:
        if self.apart:
            return []
        return [Plot("curve", "round", "training loss", {self.settings.method: dict(enumerate(self.losses))})]


class PerturbedFL(Experiment[History]):
    """Rounds of FedAvg or of perturbed models on one data set, from the same seed.

    Args:
        data: whose training samples are divided among the clients.
        model: the first global model; it keeps its weights.
        settings: see `Settings`.
        out: a folder; a run that was stopped goes on there, a twentieth of its rounds back at most. None keeps nothing.
        parties: who is here, of Server, C0, C1, ...; all of them unless given. Where the server is elsewhere the model
            stays as it is given, where a client is elsewhere the training loss is not known.

    Raises:
        FederationError, WeightError: settings that do not fit the model or the data; FedAvg in a federation.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self, data: Data, model: nn.Module, settings: Settings, *, out: str | Path | None = None,
        parties: Parties | None = None,
    ):  # fmt: skip
        self.data, self.settings, self.model = data, settings, model
        parties, clients = parties or Simulation(), clients_of(settings.clients)
        if settings.method != "perturbed" and not all(map(parties.present, (SERVER.name, *clients))):
            raise FederationError("FedAvg is the control of a simulation: it protects nothing in a federation")
        if data.regression and settings.loss != "mse":
            raise FederationError(f"{data.name} is a regression; use --loss mse")
        scheme_of(copy.deepcopy(model).train(), settings)
        self.parts = shards(len(data.train[0]), settings.clients, settings.seed)
        people = {name: len(part) for name, part in zip(clients, self.parts, strict=True)}
        self.stages = Run(
            {"run": "perturbed-fl", **settings.as_dict(), "data": data.name, "net": str(model), "people": people},
            own={"first": digest(*model.state_dict().values(), *data.train)},
            members=[SERVER.name, *clients], parties=parties, out=out,
        )  # fmt: skip

    def algorithm(self, run: Run) -> tuple[Held, Held]:
        how, names = self.settings, clients_of(self.settings.clients)
        images, targets = self.data.train[0], self.data.targets(self.data.train[1], how.loss, self.data.train[0].dtype)
        own = [(images[part], targets[part]) for part in self.parts]
        shards = [run.bring(c, part, [t.to("meta") for t in part]) for c, part in zip(names, own, strict=True)]
        state = run.bring(SERVER.name, {"model": self.model.state_dict()})
        cast, roles = (
            {c: c for c in (SERVER.name, *names)},
            roles_of(how.clients) if how.method == "perturbed" else None,
        )
        for stage, first, last in stages_of(how):
            state = run.among(
                train_rounds, cast, self.model, state, shards, how, first, last, at=SERVER.name, stage=stage,
                roles=roles, replaces=state, counted=how.private is not None,
            )  # fmt: skip
        return state, run.at(SERVER.name, score_state, self.model, state, self.data, stage="score")

    def outcome(self, found: tuple[Held, Held]) -> History:
        (state, score), records, model = found, self.stages.records, copy.deepcopy(self.model).train()
        if state.present:
            model.load_state_dict(state.value["model"])
        losses = [loss for record in records for loss in record.get("losses", ())]
        losses += [float("nan")] * (self.settings.rounds - len(losses))
        client, server = (sum(r.get(f"{who}_seconds", 0.0) for r in records) for who in ("client", "server"))
        return History(
            self.settings, losses, score.value if score.present else float("nan"), client, server, self.stages.received,
            self.data.regression, self.stages.apart, model, self._epsilon(),
        )  # fmt: skip

    def _epsilon(self) -> float | None:
        """Of a record, over all rounds and those that were sent again; None where the sums are not private."""
        how, samples = self.settings, [len(part) for part in self.parts]
        if (shares := how.private) is None:
            return None
        from ...dp import epsilon_of

        sums = how.sums_of_a_record(samples, how.rounds)
        for stage, first, last in stages_of(how):  # whoever has lost it, each repetition shows the server further sums
            sums += (self.stages.starts(stage) - 1) * how.sums_of_a_record(samples, last - first, first)
        return epsilon_of(sums * shares.curve, how.delta)

    def estimate(self) -> Estimate | None:
        """What is left, from the second of two rounds; None in a federation, who do not try it out."""
        return self.stages.estimate(self.algorithm, {train_rounds: lambda *args: self._round * (args[-1] - args[-2])})

    @functools.cached_property
    def _round(self) -> Estimate:
        how, spent = self.settings, 0.0
        with Received() as received:
            for _ in range(2):
                start = time.perf_counter()
                PerturbedFL(self.data, self.model, how.but(rounds=1)).run()
                spent = time.perf_counter() - start
        return Estimate(spent, sum(received.bytes.values()) / 2)


def train(data: Data, model: nn.Module, settings: Settings, perturbed: bool, watch: Watch | None = None) -> History:
    """Train a copy of `model`, which keeps its weights, by one of the two methods."""
    return PerturbedFL(data, model, settings.but(method="perturbed" if perturbed else "fedavg")).run(watch)


def stages_of(how: Settings) -> Iterator[tuple[str, int, int]]:
    """The name, first round and end of each stage: what a run that was stopped repeats at least."""
    every = max(1, how.rounds // 20)
    for first in range(0, how.rounds, every):
        last = min(first + every, how.rounds)
        yield f"round-{last}", first, last


def scheme_of(model: nn.Module, how: Settings) -> Scheme:
    """The scheme of these settings."""
    return Scheme(model, how.loss, how.partitions, exchange=how.exchange, noise_on=how.noise_on, private=how.private)


def train_rounds(
    session: Session | Parties, model: nn.Module, state: dict[str, Any] | None, shards: Sequence[tuple], how: Settings,
    first: int, last: int,
) -> dict[str, Any]:  # fmt: skip
    """The stage of rounds first .. last - 1: III-A to III-C, "until the convergence"; the server's state after them.

    Args:
        state: at the server the weights and what the optimiser keeps. shards: of each client its samples and targets;
            of clients elsewhere tensors without content.
    """
    model, tick = copy.deepcopy(model).train(), progress(last - first)
    optimizer = torch.optim.SGD(model.parameters(), how.learning_rate, how.momentum, weight_decay=how.weight_decay)
    if state is not None:
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
    scheme, weights, losses = scheme_of(model, how), [len(y) for _, y in shards], []
    federation = None
    with Seconds() as seconds:
        if isinstance(session, Session):
            federation = Federation(scheme, how.clients, masked=how.masked, degree=how.degree, session=session)
        for number in range(first, last):
            batches = [_batches(shard, client, number, how) for client, shard in enumerate(shards)]
            if not isinstance(session, Session) or session.complete:
                losses.append(_mean_loss(model, scheme, batches, weights))
            if federation is None:
                gradient = _plain_round(scheme, model, batches, weights, seconds, how.gradient_variance)
            else:
                gradient = federation.round(None if state is None else model.state_dict(), batches, weights)
            if gradient is not None:  # and else the server, in another process, steps
                with seconds.of("server"):
                    scheme.step(model, optimizer, gradient)
            tick()
    note(losses=losses, client_seconds=seconds.client, server_seconds=seconds.server)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _batches(shard: tuple, client: int, number: int, how: Settings) -> list[tuple]:
    """A client's batches of a round."""
    turns = range(number * how.local_batches, (number + 1) * how.local_batches)
    chosen = [batch_of(torch.arange(len(shard[1])), client, turn, how.batch_size, how.seed) for turn in turns]
    return [(shard[0][index.to(shard[0].device)], shard[1][index.to(shard[1].device)]) for index in chosen]


def score_of(model: nn.Module, data: Data) -> float:
    """Test accuracy in percent, or the mean squared error of a regression."""
    training = model.training
    with torch.no_grad():
        outputs = model.eval()(data.test[0])
    model.train(training)
    if data.regression:
        return float((outputs - data.test[1]).square().mean())
    return 100 * float((outputs.argmax(1) == data.test[1]).double().mean())


def score_state(model: nn.Module, state: dict[str, Any], data: Data) -> float:
    """The stage of the score: the server's, of its last weights."""
    model = copy.deepcopy(model)
    model.load_state_dict(state["model"])
    return score_of(model, data)


class Seconds(Observer):
    """Seconds that the server and the clients compute, from the ledger's observers and from `of`."""

    def __init__(self) -> None:
        self.client = self.server = 0.0

    def message(self, line: Any, value: torch.Tensor) -> None:
        """Takes no time."""

    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None:
        if SERVER in owners:
            self.server += seconds
        else:
            self.client += seconds

    @contextmanager
    def of(self, who: str) -> Iterator[None]:
        """Count the time of a block as the server's or the client's."""
        start = time.perf_counter()
        yield
        setattr(self, who, getattr(self, who) + time.perf_counter() - start)


# FedAvg in the clear, the control.


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


def _plain_round(
    scheme: Scheme, model: nn.Module, batches: list, weights: list[int], seconds: Seconds, variance: float
) -> Recovered:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    with seconds.of("client"):
        found = [plain_update(scheme, model, mine) for mine in batches]
        for gradient in (gradient for gradients, _ in found for gradient in gradients if variance):
            gradient += variance**0.5 * torch.randn_like(gradient)
    with seconds.of("server"):
        shares = [weight / sum(weights) for weight in weights]
        columns = zip(*(gradients for gradients, _ in found), strict=True)
        recovered = Recovered({name: _mixed(shares, column) for name, column in zip(names, columns, strict=True)})
        mixed = [_mixed(shares, column) for column in zip(*(s for _, s in found), strict=True)]
        norms = [name for name, own in scheme.plan.channels.batch_norms.items() if own]
        recovered.statistics = {name: (mixed[2 * i], mixed[2 * i + 1]) for i, name in enumerate(norms)}
    return recovered


def _mean_loss(model: nn.Module, scheme: Scheme, batches: list, weights: list[int]) -> float:
    """The joint training loss on this round's batches at the true weights, in eval mode (no statistics change)."""
    model.eval()
    with torch.no_grad():
        means = [sum(float(scheme.loss_fn(model(x), y)) for x, y in mine) / len(mine) for mine in batches]
    model.train()
    return sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)


# The paper's nets at the sizes of its tables: MLP-3/5/7, ResNet-20/32/56, and a small DenseNet.

MODELS = ("mlp3", "mlp5", "mlp7", "cnn", "resnet20", "resnet32", "resnet56", "densenet")


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
