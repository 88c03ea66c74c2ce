"""Algorithm 1 (CaPriDe, section 3), with updates computed only from what the protocol releases."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from ...data.seeds import derive, generator
from ...federated.errors import CheckpointError, FederationError
from ...federated.estimate import Estimate
from ...federated.folder import RunFolder, digest
from ...federated.participants import Samples
from ...federated.training import optimiser_of, predict, seconds_of
from ...federated.watch import Watch
from . import losses
from .baselines import average
from .directions import Directions
from .exchange import Exchange, Simulated
from .guard import Guard
from .meter import Meter
from .question import Question
from .report import Result, rounds_table
from .settings import WEIGHT_OF_A_PEER, Party, Settings, chain, check
from .traffic import Traffic
from .training import distillation, in_the_clear, mutual, own_view, scores, train_party
from .update import Update

FEW = 8
"""Encrypted answers that are not worth an estimate."""


class _State:
    """A party's models and their optimisers, small first."""

    def __init__(self, party: Party, how: Settings):
        kept = [party.model] if party.large is None else [party.model, party.large]
        self.models = [copy.deepcopy(model).eval() for model in kept]
        self.steps = [optimiser_of(model, how.local) for model in self.models]

    def tensors(self) -> list:
        return [[m.state_dict(), o.state_dict()] for m, o in zip(self.models, self.steps, strict=True)]

    def load(self, tensors: list) -> None:
        for model, steps, (weights, moments) in zip(self.models, self.steps, tensors, strict=True):
            model.load_state_dict(weights)
            steps.load_state_dict(moments)

    def copied(self, party: Party, how: Settings) -> _State:
        new = _State(party, how)
        new.load(copy.deepcopy(self.tensors()))
        return new

    @property
    def small(self) -> nn.Module:
        return self.models[0]


class CaPriDe:
    """Decentralised learning on encrypted data, or one of the baselines it is compared with.

    Args:
        parties: each with its private data and its models.
        test: images and labels that accuracies are measured on.
        classes: how many.
        settings: see `Settings`.
        out: a folder for the run; a run that was killed goes on from there. None keeps nothing.

    `run()` gives a `Result` with the trained models. All parties are in this process; each one's keys, data and model
    are used in its own `Owner` and `Peer` only. A round is kept when all of it went well, and an error leaves every
    model as the round found it; what was released stays counted.

    Raises, before any training or encryption:
        FederationError, ModelError: naming the party, what came, and the way out.
        SecurityLevelError: the models are too deep for 128-bit security.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self,
        parties: Sequence[Party],
        test: Samples,
        classes: int,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
    ):
        self.parties, self.test, self.classes = list(parties), test, classes
        how = settings or Settings()
        if how.weight is None:
            how = replace(how, weight=WEIGHT_OF_A_PEER * (len(self.parties) - 1))
        self.settings = how
        check(self.parties, test, classes, how)
        self.parameters = chain(self.parties, how) if how.asks else None
        self.folder = RunFolder(out)
        people = {party.name: party.fingerprint() for party in self.parties}
        self.folder.claim({**how.as_dict(), "parties": people, "test": digest(*test)})
        kept = self.folder.record("ledger") or {}
        self.traffic = Traffic(kept.get("messages", ()))
        self.guards = {p.name: Guard(p.name, kept.get("released"), self._keep_ledger) for p in self.parties}
        known = self.folder.tensors("meters") or {}
        self.meters = {pair: Meter.of(pair.split(">")[0], *tensors) for pair, tensors in known.items()}
        self.exchange: Exchange | None = None
        self.states = {party.name: _State(party, how) for party in self.parties}
        self.records: dict[str, list[dict]] = {party.name: [] for party in self.parties}

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            DisaggregationError: a round's answers would tell more of a peer's logits than `Settings.leakage`.
            KeyMismatchError, CorruptedCiphertextError, LevelError: from the encrypted exchange.
        """
        watch, how = watch or Watch(), self.settings
        watch.begins(1 + how.rounds)
        kept = self.folder.record("state")
        if kept is not None:
            done, self.records = kept["round"], kept["records"]
            tensors = self.folder.tensors(f"round-{done}")
            if tensors is None:
                raise CheckpointError(
                    f"{self.folder.path}/round-{done}.pt is missing; remove the folder and start again"
                )
            for name, state in self.states.items():
                state.load(tensors[name])
            for t in range(done + 1):
                watch.finished(f"round {t}", self.records)
        else:
            self._local(watch)
            done = 0
        if how.asks:
            self.connect(watch)
        for t in range(done + 1, how.rounds + 1):
            self.round(t, watch)
        return Result(
            self.parties, self.classes, how, self.records, {n: s.models for n, s in self.states.items()},
            self.traffic.rows, self.released, self.parameters, dict(self.exchange.seconds) if self.exchange else {},
        )  # fmt: skip

    def so_far(self) -> Table:
        """The mean accuracies of the last finished rounds."""
        how = self.settings
        return rounds_table(f"{how.method} ({how.update})" if how.asks else how.method, self.records)

    def estimate(self) -> Estimate | None:
        """Training, and encrypted answers as one of them takes; None where too few are asked to try one."""
        how, size = self.settings, len(self.parties)
        kept = self.folder.record("state")
        left = how.rounds - (kept["round"] if kept else 0)
        total = Estimate(0.0)
        for party in self.parties:
            for model in (party.model, *([party.large] if party.large else [])):
                total += Estimate(seconds_of(model, party.images, party.labels, how.local)) * left
        asks = left * size * min(how.peers or size, size - 1) if how.asks and how.encrypted else 0
        if not asks:
            return total
        if asks <= FEW:
            return None
        tried = CaPriDe(self.parties[:2], self.test, self.classes, how.but(rounds=1, warmup=0, peers=None))
        start = time.perf_counter()
        tried._ask(1, tried.parties[0], {p.name: p.model.eval() for p in tried.parties}, Watch())
        return total + Estimate(time.perf_counter() - start, tried.traffic.bytes) * asks

    def connect(self, watch: Watch | None = None) -> Exchange:
        """The exchange of a run: new keys, and the counts of what was released before."""
        if self.parameters is None:
            raise FederationError(f"method {self.settings.method!r} asks nobody, so there is no exchange to make")
        kind = Exchange if self.settings.encrypted else Simulated
        self.exchange = kind(
            self.parties,
            self.classes,
            self.parameters,
            self.settings,
            guards=self.guards,
            traffic=self.traffic,
            watch=watch,
        )
        return self.exchange

    @property
    def released(self) -> dict[str, list[int]]:
        """All parties' counts; see `Guard.released`."""
        return {place: count for guard in self.guards.values() for place, count in guard.released.items()}

    def _keep_ledger(self) -> None:
        self.folder.keep("ledger", record={"messages": self.traffic.rows, "released": self.released})

    def round(self, t: int, watch: Watch | None = None) -> None:
        """One round of all parties, on the models that the round before left."""
        watch, how = watch or Watch(), self.settings
        models = {name: state.small for name, state in self.states.items()}
        logits = {p.name: self._plain_logits(p, models) for p in self.parties} if how.method in ("dml", "l2") else {}
        new, records = {}, {}
        for party in self.parties:
            start, record, extra = time.perf_counter(), {}, None
            state = self.states[party.name].copied(party, how)
            for group in (group for steps in state.steps for group in steps.param_groups):
                group["lr"] = how.rate_in(t)
            if how.asks:
                update, record = self._ask(t, party, models, watch)
                extra = distillation(state.small, party, update, how)
            elif how.method in ("dml", "l2"):
                extra = in_the_clear(logits[party.name], how)
            tick = watch.step(f"{party.name}: training, round {t}", how.epochs)
            train_party(state.small, state.steps[0], party, how.local, self._seed(party, t, "round"), extra, tick)
            if party.large is not None:
                train_party(state.models[1], state.steps[1], party, how.local, self._seed(party, t, "large"))
                mutual(
                    state.small, state.steps[0], state.models[1], state.steps[1], party, how, (t, "mutual")
                )  # fmt: skip
            new[party.name], records[party.name] = state, dict(record, seconds=time.perf_counter() - start)
        if how.method.startswith("fedavg"):
            average({n: s.small for n, s in new.items()}, self.parties, how, t)
        self._commit(t, new, records, watch)

    def _local(self, watch: Watch) -> None:
        """Algorithm 1's first loop: every party alone."""
        how, new, records = self.settings, {}, {}
        alone = how.local.lasting(how.warmup)
        for party in self.parties:
            start = time.perf_counter()
            state = self.states[party.name].copied(party, how)
            tick = watch.step(f"{party.name}: local training", how.warmup * len(state.models))
            for model, steps in zip(state.models, state.steps, strict=True):
                train_party(model, steps, party, alone, self._seed(party, "local"), tick=tick)
            new[party.name], records[party.name] = state, dict(seconds=time.perf_counter() - start)
        self._commit(0, new, records, watch)

    def _seed(self, party: Party, *use: object) -> int:
        return derive(self.settings.seed, party.name, *use)

    def _commit(self, t: int, new: dict[str, _State], records: dict[str, dict], watch: Watch) -> None:
        for party in self.parties:
            models = new[party.name].models
            measured = scores(models[-1], *self.test, self.classes)
            if len(models) > 1:
                measured["small_accuracy"] = scores(models[0], *self.test, self.classes)["accuracy"]
            records[party.name] = {**records[party.name], **measured}
        together = {name: [*found, records[name]] for name, found in self.records.items()}
        self.folder.keep(f"round-{t}", {name: state.tensors() for name, state in new.items()})
        self.folder.keep("state", record={"round": t, "records": together})
        self.folder.drop("round-*.pt", but=f"round-{t}.pt")
        self._keep_ledger()
        self.states, self.records = new, together
        watch.finished(f"round {t}", self.records)

    def _plain_logits(self, party: Party, models: dict[str, nn.Module]) -> list[torch.Tensor]:
        return [predict(model, party.images) for name, model in models.items() if name != party.name]

    def asked(self, t: int, party: Party) -> list[str]:
        """The peers of a round, in the parties' order; drawn anew each time."""
        others = [p.name for p in self.parties if p is not party]
        if self.settings.peers is None:
            return others
        chosen = torch.randperm(len(others), generator=generator(self.settings.seed, party.name, t, "peers"))
        return [others[i] for i in sorted(chosen[: self.settings.peers].tolist())]

    def subset(self, t: int, party: Party) -> torch.Tensor:
        """The samples of a round's aggregates; drawn anew each time, from a seed that all parties know."""
        order = torch.randperm(len(party.labels), generator=generator(self.settings.seed, party.name, t, "subset"))
        return order[: self.settings.subset(len(party.labels))].sort().values

    def _ask(self, t: int, party: Party, models: dict[str, nn.Module], watch: Watch) -> tuple[Update, dict]:
        """The inner loop of Algorithm 1 for one party: publish, be answered, decrypt, and make the update of it."""
        how, model, chosen = self.settings, models[party.name], self.subset(t, party)
        question = Question(party, model, chosen, how, generator(how.seed, party.name, t, "directions"))
        peers, exchange = self.asked(t, party), self.exchange or self.connect(watch)
        published = question.published(len(party.labels))
        sigma, leakage = self._measured(t, party, model, published, peers, exchange)
        answers = exchange.ask(
            t,
            party,
            published,
            len(question.subset),
            {name: models[name] for name in peers},
            sigma,
            {name: self.meters[f"{name}>{party.name}"].size for name in peers},
        )
        released = torch.stack([answers[name] for name in peers]).mean(0)  # Eq. 5
        update = question.update(released, exchange.sigma(party, sigma) / len(peers) ** 0.5)
        if update.logits is not None and sigma > 0:
            _, own = own_view(model, party.images)
            noise = exchange.sigma(party, sigma)
            for name in peers:
                self.meters[f"{name}>{party.name}"].learn(published, answers[name], noise, how.temperature)
            known = torch.stack([self.meters[f"{name}>{party.name}"].expected(own.detach()) for name in peers]).mean(0)
            update = replace(update, logits=known[question.subset])
        uncertainty = float(losses.local_uncertainty(question.logits.double(), how.temperature))
        record = dict(
            asked=peers,
            samples=len(question.subset),
            released=len(released),
            sigma=sigma,
            leakage=leakage,
            distillation_loss=uncertainty - update.loss,
        )
        return update, record

    def _measured(
        self, t: int, party: Party, model: nn.Module, asked: Directions, peers: list[str], exchange: Exchange
    ) -> tuple[float, dict[str, float]]:
        """The noise that a question needs, and what each peer's answers will have told. Counted before it is asked."""
        how, found = self.settings, {}
        needed = [how.sigma or 0.0]
        features, logits = own_view(model, party.images)
        for name in peers:
            pair = f"{name}>{party.name}"
            if pair not in self.meters:
                self.meters[pair] = Meter(features, logits, name)
            found[name] = self.meters[pair], self.meters[pair].information(asked, how.temperature)
            if how.sigma is None and how.leakage is not None:
                # The rounds to come will ask much the same; what this one may tell is its share of what is left.
                needed.append(found[name][0].sigma_for(found[name][1], how.leakage, how.rounds - t + 1))
        sigma = max(needed)
        told = {
            name: meter.spend(party.name, information, exchange.sigma(party, sigma), how.leakage)
            for name, (meter, information) in found.items()
        }
        self.folder.keep("meters", {pair: meter.tensors() for pair, meter in self.meters.items()})
        return sigma, told
