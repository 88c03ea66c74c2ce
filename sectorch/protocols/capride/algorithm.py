"""Algorithm 1 (CaPriDe, section 3), with updates computed only from what the protocol releases."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, protocol
from ...ckks.releases import SIGMAS
from ...data.seeds import derive, generator
from ...federated.errors import CheckpointError, FederationError
from ...federated.folder import RunFolder, digest
from ...federated.participants import Samples
from ...federated.parties import Parties, Simulation
from ...federated.training import predict, seconds_of
from ...federated.watch import Estimate, Watch
from ...session import Session
from . import training
from .exchange import PEERS, Exchange, Simulated
from .report import Result, Traffic, rounds_table
from .settings import WEIGHT_OF_A_PEER, Directions, Party, Settings, chain, check, contrasts
from .training import (
    Question,
    State,
    Update,
    average,
    distillation,
    in_the_clear,
    mutual,
    own_view,
    scores,
    train_party,
)

# Parties in processes apart: their sessions, two for each pair, and the round on which all of them go on.


Sessions = Mapping[tuple[str, str], Session]
"""By owner and peer: those that a party which is here takes part in."""


@protocol("capride_finished", "the beginning of a round", [
    Message("finished", "Pk", "Pl", "nothing", "the last round that P_k has finished"),
], roles=PEERS)  # fmt: skip
def finished(net: Net, number: Located) -> Located:
    """A party that was stopped comes back with the round that it has kept. int64 [1]. Rounds 1, bytes 8."""
    return number.send(net.Pk, net.Pl, "finished")


@contextmanager
def joined(parties: Sequence[Party], together: Parties, agreed: str) -> Iterator[Sessions]:
    """The sessions of each owner and peer one of whom is here. All parties open them in the same order.

    Args:
        agreed: what all have to agree on.

    Raises:
        RefusedError: another party has other settings, or knows of others than these. PeerLostError: one did not come.
    """
    with ExitStack() as stack:
        sessions = {}
        for k, peer in itertools.permutations([p.name for p in parties], 2):
            if together.present(k) or together.present(peer):
                session = together.session(PEERS, {"Pk": k, "Pl": peer}, label=f"capride {k} {peer}", agreed=agreed)
                sessions[k, peer] = stack.enter_context(session)
        yield sessions


def slowest(sessions: Sessions, done: int) -> int:
    """The last round that all parties have finished; this one has finished `done`. Waits for all of them."""
    found = [done]
    for session in sessions.values():
        with session.call() as net:
            number = torch.tensor([done], device=None if session.present(net.Pk) else "meta")
            arrived = finished(net, net.own(net.Pk, number))
            if session.present(net.Pl):
                found.append(int(net.read(arrived, net.Pl)))
    return min(found)


# The meter: how much of a peer's logits P_k can reconstruct from all its answers so far, known before it asks.
#
# P_k, honest but curious, knows its directions q, its own logits u, and that the peer's model resembles its own. It
# takes the difference d = z - u for a linear function of its features, d_j = W (h_j, 1) with Gaussian W, and z for the
# same in all rounds: the prior of `ckks.LinearMeter`. `tests/capride/test_capride_meter.py` holds it against attacks
# with other priors. P_k can measure before it asks; P_l cannot, who sees ciphertexts. A peer further from P_k than the
# prior reckons with would tell more through the same noise. So P_k states the size of its own logits, P_l scales its
# logits down to it (`exchange.fitted`), and |z - u| <= |z| + |u| is at most twice that size.


SPREAD = 2.0
"""The size of z - u that is reckoned with, in sizes of P_k's own logits about their row means: the most that logits of
no larger size are away; unrelated ones are 1.4 away."""


class Meter(ckks.LinearMeter):
    """What one party can know of one peer.

    Args:
        features: [n, d], of P_k's own model on its own samples. logits: [n, M], its own.
        peer: whose logits; for errors.
    """

    def __init__(self, features: torch.Tensor, logits: torch.Tensor, peer: str):
        h = torch.cat([features.detach().double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        u = logits.detach().double()
        left, singular, _ = torch.linalg.svd(h, full_matrices=False)
        kept = singular > 1e-9 * singular[0]
        basis, width = left[:, kept] * singular[kept], u.shape[1] - 1
        size = float((u - u.mean(1, keepdim=True)).norm())
        # A model that says the same of everything tells nothing of the size of others' logits.
        size = max(size, float(len(u)) ** 0.5)
        basis *= SPREAD * size / float(basis.norm()) / width**0.5
        self._begin(peer, basis, None, u)

    def _begin(self, peer: str, basis: torch.Tensor, known: torch.Tensor | None, own: torch.Tensor) -> None:
        super().__init__(basis, own.shape[1] - 1, f"{peer}'s logits", known)
        self.own, self.contrasts = own, contrasts(own.shape[1])
        self.go_back(None)

    @classmethod
    def of(cls, peer: str, basis: torch.Tensor, known: torch.Tensor, own: torch.Tensor) -> Meter:
        """A meter as `tensors` kept it, which has heard nothing yet; see `go_back`."""
        self = cls.__new__(cls)
        self._begin(peer, basis, known, own)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """What is counted: on disk before a question is asked, and never taken back."""
        return [self.basis, self.known, self.own]

    def heard(self) -> list[torch.Tensor]:
        """What was answered, and the information in that: a part of the round that made use of it."""
        return [self.found, self.learned]

    def go_back(self, heard: list[torch.Tensor] | None) -> None:
        """To what was heard by the end of a round; nothing where it is None. What was asked stays counted."""
        nothing = torch.zeros_like(self.known)
        self.found, self.learned = (nothing[0], nothing) if heard is None else heard

    @property
    def size(self) -> float:
        """What logits about their row means may measure for the prior to hold: a root mean square over samples."""
        return float(self.basis.norm()) * (self.width / len(self.basis)) ** 0.5 / SPREAD

    def asked(self, directions: Directions, temperature: float) -> torch.Tensor:
        """Questions as linear functions of the unknown: [R, K]."""
        return self.rows(directions.weights @ self.contrasts) / temperature

    def told(self, directions: Directions, temperature: float) -> torch.Tensor:
        """The information in the answers to one question, under noise of deviation 1: [K, K]."""
        rows = self.asked(directions, temperature)
        return rows.t() @ rows

    def learn(self, directions: Directions, answers: torch.Tensor, sigma: float, temperature: float) -> None:
        """Take in what was answered to a question that `spend` has counted."""
        missing, variance = answers - directions.on(self.own, temperature), max(sigma, SIGMAS[0]) ** 2
        self.found = self.found + self.asked(directions, temperature).t() @ missing / variance
        self.learned = self.learned + self.told(directions, temperature) / variance

    def expected(self, own: torch.Tensor) -> torch.Tensor:
        """The peer's logits given all answers that came, under the prior about P_k's logits of now: float64 [n, M].

        The prior's size is the one under which the answers are likeliest; 0 where noise is all that they hold.
        """
        moved = torch.linalg.lstsq(self.basis, (own.double() - self.own) @ self.contrasts).solution.flatten()
        values, vectors = torch.linalg.eigh(self.learned)
        missing = vectors.t() @ (self.found - self.learned @ moved)
        variance = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-16, 1)]).double().unsqueeze(1)
        grown = 1 + variance * values.clamp_min(0)
        likeliest = int((variance * missing.square() / grown - grown.log()).sum(1).argmax())
        w = vectors @ (variance[likeliest] * missing / grown[likeliest])
        return own.double() + self.basis @ w.view(self.basis.shape[1], -1) @ self.contrasts.t()


FEW = 8
"""Encrypted answers that are not worth an estimate."""


class CaPriDe:
    """Decentralised learning on encrypted data, or one of the baselines it is compared with.

    Args:
        parties: each with its private data and its models.
        test: images and labels that accuracies are measured on.
        classes: how many.
        settings: see `Settings`.
        out: a folder for the run; a run that was killed goes on from there. None keeps nothing.
        together: who is here, by the parties' names; all of them unless given. Of the others the name, the number and
            shape of samples and the architecture are used, nothing else.
        own: seed of what a party draws and nobody else needs to know, batches and directions; `settings.seed` unless
            given. Apart, it is each party's own secret.

    `run()` gives a `Result` with the trained models of the parties that are here; each one's keys, data and model are
    used in its own `Owner` and `Peer` only. A round is kept when all of it went well, and an error leaves every model
    as the round found it; what was released stays counted. Parties apart go on from the last round that all have kept.

    Raises, before any training or encryption:
        FederationError, ModelError: naming the party, what came, and the way out.
        SecurityLevelError: the models are too deep for 128-bit security.
        FederationError: a method that protects nothing, among parties apart.
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
        together: Parties | None = None,
        own: int | None = None,
    ):
        self.together = together or Simulation()
        here = {party.name: self.together.present(party.name) for party in parties}
        self.parties = [party if here[party.name] else party.elsewhere() for party in parties]
        self.mine = [party for party in parties if here[party.name]]
        self.apart = len(self.mine) < len(self.parties)
        self.test, self.classes = test, classes
        how = settings or Settings()
        if how.weight is None:
            how = replace(how, weight=WEIGHT_OF_A_PEER * (len(self.parties) - 1))
        self.settings, self._own = how, how.seed if own is None else own
        if self.apart and not (how.asks and how.encrypted):
            raise FederationError(f"{how.method} in the clear is a control of a simulation: it protects nothing")
        check(self.parties, test, classes, how)
        self.parameters = chain(self.parties, how) if how.asks else None
        self.folder = RunFolder(out)
        people = {party.name: party.fingerprint() for party in self.parties}
        self.folder.claim({**how.as_dict(), "parties": people, "test": digest(*test)})
        kept = self.folder.record("ledger") or {}
        self.traffic = Traffic(kept.get("messages", ()))
        self.ledgers = {p.name: ckks.ReleaseLedger(p.name, kept.get("released"), self._keep_ledger) for p in self.mine}
        known = self.folder.tensors("meters") or {}
        self.meters = {pair: Meter.of(pair.split(">")[0], *tensors) for pair, tensors in known.items()}
        self.exchange: Exchange | None = None
        self.states = {party.name: State(party, how) for party in self.mine}
        self.records: dict[str, list[dict]] = {party.name: [] for party in self.mine}

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            DisaggregationError: a round's answers would tell more of a peer's logits than `Settings.leakage`.
            KeyMismatchError, CorruptedCiphertextError, LevelError: from the encrypted exchange.
        """
        watch, how = watch or Watch(), self.settings
        watch.begins(1 + how.rounds)
        kept, done = self.folder.record("state"), 0
        if kept is None:
            self._local(watch)
        else:
            done = kept["round"]
            self._go_back(kept, done)
            for t in range(done + 1):
                watch.finished(f"round {t}", self.records)
        if self.apart:
            self._run_apart(done, watch)
        else:
            if how.asks:
                self.connect(watch)
            for t in range(done + 1, how.rounds + 1):
                self.round(t, watch)
        return Result(
            self.mine, self.classes, how, self.records, {n: s.models for n, s in self.states.items()},
            self.traffic.rows, self.released, self.parameters, dict(self.exchange.seconds) if self.exchange else {},
            self.apart,
        )  # fmt: skip

    def _go_back(self, kept: dict, done: int) -> None:
        """To the end of a round that is in the folder."""
        found, heard = self.folder.tensors(f"round-{done}"), {}
        try:
            for name, state in self.states.items():
                state.load(found[name][0])
                heard |= found[name][1]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            gone = f"{self.folder.path}/round-{done}.pt is missing or of another version"
            raise CheckpointError(f"{gone}; remove the folder and start again") from error
        for pair, meter in self.meters.items():
            meter.go_back(heard.get(pair))
        self.records = {name: found[: done + 1] for name, found in kept["records"].items()}

    def _run_apart(self, done: int, watch: Watch) -> None:
        """The rounds that not all parties have finished; each begins when all have kept the one before."""
        known = [[p.name, len(p.labels), p.shape, str(p.model)] for p in self.parties]
        said = json.dumps([self.settings.as_dict(), known, self.classes, str(self.parameters)])
        with joined(self.parties, self.together, said) as sessions:
            self.connect(watch, sessions)
            kept = slowest(sessions, done)
            if kept < done:  # somebody was stopped before it had kept that round
                self._go_back(self.folder.record("state") or {}, kept)
            for t in range(kept + 1, self.settings.rounds + 1):
                self.round(t, watch)
                if slowest(sessions, t) != t:
                    raise FederationError(f"another party has not finished round {t}, and takes part in what follows")

    def so_far(self) -> Table:
        """The mean accuracies of the last finished rounds."""
        how = self.settings
        return rounds_table(f"{how.method} ({how.update})" if how.asks else how.method, self.records)

    def estimate(self) -> Estimate | None:
        """Training, and encrypted answers as one of them takes; None where too few are asked, or parties are apart."""
        how, size = self.settings, len(self.parties)
        if self.apart:
            return None
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

    def connect(self, watch: Watch | None = None, sessions: Sessions | None = None) -> Exchange:
        """The exchange of a run: new keys, and the counts of what was released before."""
        if self.parameters is None:
            raise FederationError(f"method {self.settings.method!r} asks nobody, so there is no exchange to make")
        kind = Exchange if self.settings.encrypted else Simulated
        self.exchange = kind(
            self.parties, self.classes, self.parameters, self.settings, ledgers=self.ledgers, traffic=self.traffic,
            watch=watch, sessions=sessions,
        )  # fmt: skip
        return self.exchange

    @property
    def released(self) -> dict[str, list[int]]:
        """All parties' counts; see `ckks.ReleaseLedger`."""
        return {place: count for ledger in self.ledgers.values() for place, count in ledger.released.items()}

    def _keep_ledger(self) -> None:
        self.folder.keep("ledger", record={"messages": self.traffic.rows, "released": self.released})

    def round(self, t: int, watch: Watch | None = None) -> None:
        """One round of all parties, on the models that the round before left: first all ask, then each trains."""
        watch, how = watch or Watch(), self.settings
        models = {p.name: self.states[p.name].small if p.name in self.states else p.model for p in self.parties}
        asked = {p.name: self._ask(t, p, models, watch) for p in self.parties} if how.asks else {}
        logits = {p.name: self._plain_logits(p, models) for p in self.parties} if how.method in ("dml", "l2") else {}
        new, records = {}, {}
        for party in self.mine:
            start, record, extra = time.perf_counter(), {}, None
            state = self.states[party.name].copied(party, how)
            for group in (group for steps in state.steps for group in steps.param_groups):
                group["lr"] = how.rate_in(t)
            if found := asked.get(party.name):
                update, record = found
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
            record["seconds"] = record.get("seconds", 0.0) + time.perf_counter() - start
            new[party.name], records[party.name] = state, record
        if how.method.startswith("fedavg"):
            average({n: s.small for n, s in new.items()}, self.parties, how, t)
        self._commit(t, new, records, watch)

    def _local(self, watch: Watch) -> None:
        """Algorithm 1's first loop: every party alone."""
        how, new, records = self.settings, {}, {}
        alone = how.local.lasting(how.warmup)
        for party in self.mine:
            start = time.perf_counter()
            state = self.states[party.name].copied(party, how)
            tick = watch.step(f"{party.name}: local training", how.warmup * len(state.models))
            for model, steps in zip(state.models, state.steps, strict=True):
                train_party(model, steps, party, alone, self._seed(party, "local"), tick=tick)
            new[party.name], records[party.name] = state, dict(seconds=time.perf_counter() - start)
        self._commit(0, new, records, watch)

    def _seed(self, party: Party, *use: object) -> int:
        return derive(self._own, party.name, *use)

    def _commit(self, t: int, new: dict[str, State], records: dict[str, dict], watch: Watch) -> None:
        for party in self.mine:
            models = new[party.name].models
            measured = scores(models[-1], *self.test, self.classes)
            if len(models) > 1:
                measured["small_accuracy"] = scores(models[0], *self.test, self.classes)["accuracy"]
            records[party.name] = {**records[party.name], **measured}
        together = {name: [*found, records[name]] for name, found in self.records.items()}
        heard = {pair: meter.heard() for pair, meter in self.meters.items()}
        answers = {name: {pair: found for pair, found in heard.items() if pair.endswith(f">{name}")} for name in new}
        self.folder.keep(f"round-{t}", {name: [state.tensors(), answers[name]] for name, state in new.items()})
        self.folder.keep("state", record={"round": t, "records": together})
        self.folder.drop("round-*.pt", f"round-{t}.pt", f"round-{t - 1 if self.apart else t}.pt")
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

    def _ask(self, t: int, party: Party, models: dict[str, nn.Module], watch: Watch) -> tuple[Update, dict] | None:
        """The inner loop of Algorithm 1 for one party: publish, be answered, decrypt, and make the update of it.

        Of a party elsewhere its questions are answered, if it asks one that is here.
        """
        start, how, model, chosen = time.perf_counter(), self.settings, models[party.name], self.subset(t, party)
        peers, exchange = self.asked(t, party), self.exchange or self.connect(watch)
        if party.name not in self.states:
            exchange.ask(t, party, None, 0, {name: models[name] for name in peers})
            return None
        question = Question(party, model, chosen, how, generator(self._own, party.name, t, "directions"))
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
        uncertainty = float(training.local_uncertainty(question.logits.double(), how.temperature))
        record = dict(
            asked=peers,
            samples=len(question.subset),
            released=len(released),
            sigma=sigma,
            leakage=leakage,
            distillation_loss=uncertainty - update.loss,
            seconds=time.perf_counter() - start,
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
            found[name] = self.meters[pair], self.meters[pair].told(asked, how.temperature)
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
