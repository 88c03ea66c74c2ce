"""`PerturbedFL`: rounds of perturbed models, or of FedAvg, as stages of a run.

One round is one server step on the weighted mean gradient of the clients' current batches (Eq. 3); momentum and weight
decay act at the server. Both methods draw the same batches, so their curves can be compared step by step.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...choreography import Party, Phase
from ...choreography.ledger import Observer
from ...federated.errors import FederationError
from ...federated.folder import digest
from ...federated.outcome import Received
from ...federated.parties import Parties, Simulation
from ...federated.run import Experiment, Held, Run, note, progress
from ...federated.watch import Estimate, Watch
from ...session import Session
from .protocol import SERVER, Federation, clients_of, roles_of
from .report import History
from .scheme import Recovered, Scheme
from .settings import Data, Settings, batch_of, shards


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
