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
from pathlib import Path

import torch
from rich.console import RenderableType
from torch import nn

from ...choreography import Party, Phase
from ...choreography.ledger import Observer
from ...choreography.steps import Sent
from ...federated.errors import CheckpointError, FederationError
from ...federated.estimate import Estimate
from ...federated.folder import RunFolder, digest
from ...federated.parties import Parties, Simulation
from ...federated.watch import Watch
from .data import Data
from .edges import SERVER, roles_of
from .errors import WeightError
from .recover import Recovered
from .report import History
from .rounds import Federation
from .scheme import Scheme
from .settings import Settings


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
    norms = [model.get_submodule(name) for name, own in scheme.plan.batch_norms.items() if own]
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
    norms = [name for name, own in scheme.plan.batch_norms.items() if own]
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
