"""`CaPriDe`: Algorithm 1 with its parties, settings and folder."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import replace

from rich.table import Table
from torch import nn

from ...federated.errors import FederationError
from ...federated.folder import digest
from ...federated.outcome import Received
from ...federated.participants import FederatedExperiment
from ...federated.parties import Simulation
from ...federated.run import Held, Run
from ...federated.watch import Estimate, Watch
from .algorithm import Inputs, ask, capride, divergences
from .exchange import Exchange, Simulated
from .report import Result, rounds_table
from .settings import WEIGHT_OF_A_PEER, Party, Settings, chain, check
from .training import State

FEW = 8
"""Encrypted answers that are not worth an estimate."""


class CaPriDe(FederatedExperiment[Result, Party, Settings]):
    """Decentralised learning on encrypted data, or one of the baselines it is compared with.

    See `FederatedExperiment` for the arguments. `run()` gives a `Result` with the trained models of the parties that
    are here; each one's keys, data and model are used in its own `Owner` and `Peer` only. What was released, and what
    was asked, stays counted whatever comes after.

    Raises, before any training or encryption:
        ModelError: naming the party, what came, and the way out.
        SecurityLevelError: the models are too deep for 128-bit security.
    """

    label = "capride"

    def _checked(self, settings: Settings | None, complete: bool) -> Settings:
        how = settings or Settings()
        if how.weight is None:
            how = replace(how, weight=WEIGHT_OF_A_PEER * (len(self.parties) - 1))
        if not (complete or (how.asks and how.encrypted)):
            raise FederationError(f"{how.method} in the clear is a control of a simulation: it protects nothing")
        check(self.parties, self.test, self.classes, how)
        self.parameters = chain(self.parties, how) if how.asks else None
        return how

    def _facts(self) -> dict:
        return {"test": digest(*self.test)}

    @functools.cached_property
    def exchange(self) -> Exchange | None:
        """Keys, sessions and counts; None for a baseline that asks nobody."""
        if self.parameters is None:
            return None
        kind, stages = Exchange if self.settings.encrypted else Simulated, self.stages
        return kind(self.parties, self.classes, self.parameters, self.settings, stages.parties, stages.folder)

    def inputs(self, run: Run) -> Inputs:
        """What Algorithm 1 takes."""
        return Inputs(
            self.parties, *self._brought(run), run.public(self.test), self.classes, self.settings, self.exchange
        )

    def algorithm(self, run: Run) -> dict[str, Held]:
        return capride(run, self.inputs(run))

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            DisaggregationError: a round's answers would tell more of a peer's logits than `Settings.leakage`.
            KeyMismatchError, CorruptedCiphertextError, LevelError: from the encrypted exchange.
        """
        try:
            return super().run(watch)
        finally:
            if self.exchange is not None:
                self.exchange.__exit__()

    def outcome(self, found: Mapping[str, Held]) -> Result:
        models: dict[str, list[nn.Module]] = {
            p.name: State(p, self.settings, found[p.name].value).models for p in self.mine
        }
        seconds: dict[str, float] = {}
        for record in self.stages.records:
            for what, value in record.get("spent", {}).items():
                seconds[what] = seconds.get(what, 0.0) + value
        return Result(
            self.mine, self.classes, self.settings, self.records(), models, self.stages.received, self.released,
            self.parameters, seconds, self.stages.apart,
        )  # fmt: skip

    @property
    def released(self) -> dict[str, list[int]]:
        """The counts of all parties here; see `ckks.ReleaseLedger`."""
        return {} if self.exchange is None else self.exchange.released

    def records(self) -> dict[str, list[dict]]:
        """Of each party that is here, as far as it has come: a record of local training and one of each round."""
        done = {record["stage"]: record for record in self.stages.records}
        found: dict[str, list[dict]] = {party.name: [] for party in self.mine}
        for name, rounds in found.items():
            for t in range(self.settings.rounds + 1):
                stages = [done.get(f"round-{t}/{name}/{what}", {}) for what in ("answers", "model", "accuracy")]
                if not stages[-1]:
                    break
                facts = {key: value for stage in stages for key, value in stage.items() if key not in NOT_FACTS}
                rounds.append({**facts, "seconds": sum(stage.get("seconds", 0.0) for stage in stages)})
        return found

    def so_far(self) -> Table:
        """The mean accuracies of the last finished rounds."""
        how = self.settings
        return rounds_table(f"{how.method} ({how.update})" if how.asks else how.method, self.records())

    def estimate(self) -> Estimate | None:
        """Training, and encrypted answers as one of them takes; None where too few are asked, or parties are apart."""
        how, size = self.settings, len(self.parties)
        encrypted = how.asks and how.encrypted
        if encrypted and how.rounds * size * min(how.peers or size, size - 1) <= FEW:
            return None
        return self.stages.estimate(self.algorithm, {divergences: self._asking} if encrypted else {})

    def _asking(self, exchange: Exchange, t: int, owner: Party, question: None, models: Mapping) -> Estimate:
        return self._answer * len(models)

    @functools.cached_property
    def _answer(self) -> Estimate:
        """One encrypted answer, tried by two parties."""
        (owner, peer), how = self.parties[:2], self.settings.but(rounds=1)
        question = ask(1, owner, State(owner, how).tensors(), 0, how)
        start, parameters = time.perf_counter(), chain([owner, peer], how)
        with Exchange([owner, peer], self.classes, parameters, how) as exchange, Received() as received:
            divergences(Simulation(), exchange, 1, owner, question, {peer.name: peer.model.eval()})
        return Estimate(time.perf_counter() - start, sum(row["bytes"] for row in received.rows()))


NOT_FACTS = frozenset(("stage", "parties", "received", "value", "spent", "seconds"))
"""Of a stage's record: what its party did not note for the report."""
