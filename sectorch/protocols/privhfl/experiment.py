"""`PrivHFL`: Algorithm 1 with its clients, settings, folders and parties; its controls, and the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ...data.seeds import generator
from ...federated.command import Command
from ...federated.errors import FederationError
from ...federated.participants import FederatedData, FederatedExperiment, Participant, images_and_labels
from ...federated.run import Held, Run
from ...federated.watch import Estimate
from ...session import S
from .algorithm import Inputs, answering, ask, chosen, expanded, labels_of, one_hot, privhfl
from .query import plain_query
from .report import Result, accuracies
from .settings import CONTROLS, PRESETS, Settings, check, divided

# The controls, a function each in the place of lines 8 to 13. Nobody is asked. As many other rows come in the queries'
# place, so that retraining takes as many steps.


@dataclass(frozen=True)
class Round:
    """What a client has in a round, and its control is made of.

    Attributes:
        x: the queries. others: all others, for `pooled`. clients: how many there are in all.
    """

    data: Participant
    model: nn.Module
    seed: int
    x: torch.Tensor
    others: Sequence[Participant]
    clients: int
    t: int
    how: Settings
    classes: int


def longer(one: Round) -> dict:
    """The client's own samples once more."""
    again = torch.arange(len(one.x)) % len(one.data.images)
    return {"images": one.data.images[again], "labels": one_hot(one.data.labels[again], one.classes)}


def pooled(one: Round) -> dict:
    """The samples of all others, as if they had sent them."""
    images, labels = images_and_labels(one.others)
    order = torch.randperm(len(labels), generator=generator(one.how.seed, one.data.name, one.t, "pooled"))
    places = order.repeat(-(-len(one.x) // len(order)))[: len(one.x)]
    return {"images": images[places], "labels": one_hot(labels[places], one.classes)}


def own_mixup(one: Round) -> dict:
    """The queries with the labels of the images that they are mixtures of."""
    data, at = one.data, (one.data, one.seed, one.t, one.how)
    pool, mixed = expanded(data.images, *at), expanded(one_hot(data.labels, one.classes)[:, :, None, None], *at)
    return {"labels": mixed[chosen(pool, data, one.model, one.seed, one.t, one.how)].flatten(1)}


def own_labels(one: Round) -> dict:
    """As if all who would have answered were the client itself: a sum of as many answers is as sharp."""
    parties = one.how.answering(one.clients)
    total = plain_query(one.x, [one.model], one.how.normalise) * parties
    return {"labels": labels_of(total, parties, one.how, one.classes)}


FUNCTIONS: dict[str, Callable[[Round], dict]] = {
    "longer": longer, "own-labels": own_labels, "own-mixup": own_mixup, "pooled": pooled,
}  # fmt: skip


def control(_: Any, *of_round: Any) -> dict:
    """The stage: the rows of the run's control, at the querying party."""
    one = Round(*of_round)
    return FUNCTIONS[str(one.how.control)](one)


class PrivHFL(FederatedExperiment[Result, Participant, Settings]):
    """Heterogeneous federated learning without an auxiliary data set; the parties are its clients.

    See `FederatedExperiment` for the arguments. `run()` does all of Algorithm 1, or the part of it that is not in `out`
    yet, and gives a `Result` with the trained models of the clients that are here.

    Raises:
        FixedPointRangeError: on a run: a trained model leaves the range of the number format on its owner's own data.
    """

    label, servers, whose = "privhfl", (S.name,), "clients"

    def _checked(self, settings: Settings | None, complete: bool) -> Settings:
        how = settings or Settings()
        if not (complete or (how.asks and how.secure)):
            raise FederationError("controls, and queries in the clear, are for a simulation: they protect nothing")
        self._query = check(self.parties, self.test, self.classes, how)
        return how

    def algorithm(self, run: Run) -> dict[str, Held]:
        (data, seed), instead = self._brought(run), None if self.settings.asks else control
        given = Inputs(list(data), data, seed, run.public(self.test), self.classes, self.settings, instead)
        return privhfl(run, given)

    def outcome(self, found: Mapping[str, Held]) -> Result:
        models: dict[str, nn.Module] = {c.name: found[c.name].value for c in self.mine}
        return Result(
            self.mine, self.classes, self.settings, self.records(), models, len(self.parties), self.stages.apart
        )

    def records(self) -> dict[str, list[dict]]:
        """Of each client that is here, as far as it has come: a record of local training and one of each round."""
        done = {record["stage"]: record for record in self.stages.records}
        found: dict[str, list[dict]] = {}
        for client in self.mine:
            for t in range(self.settings.iterations + 1):
                stage = f"round-{t}/{client.name}"
                if f"{stage}/accuracy" not in done:
                    break
                record = {"accuracy": done[f"{stage}/accuracy"]["value"]}
                if t == 0:
                    record["seconds"] = done[f"local/{client.name}"]["seconds"]
                else:
                    record |= self._asked(client, t, done.get(f"{stage}/labels", {}))
                    record["retraining"] = done[f"{stage}/model"]["seconds"]
                found.setdefault(client.name, []).append(record)
        return found

    def _asked(self, client: Participant, t: int, record: Mapping) -> dict:
        """Who answered in a round, and what it took."""
        if not self.settings.asks:
            return {"answering": [], "queries": 0}
        count, _ = self.settings.budget(len(client.images))
        names = answering([c.name for c in self.parties], client.name, t, self.settings)
        kept = {name: record[name] for name in ("share", "predict", "aggregate", "chunk", "received") if name in record}
        return {"answering": names, "queries": count, **kept}

    def so_far(self) -> Table:
        """Each client's accuracies as far as the run has come."""
        return accuracies(self.parties, self.records(), self.settings.iterations)

    def estimate(self) -> Estimate | None:
        """What is left: training, from a few batches of each client; asking, from a query to each architecture. None
        in a federation."""
        return self.stages.estimate(self.algorithm, {ask: self._asking})

    def _asking(self, queries, names: Sequence[str], models: Sequence[nn.Module], *_) -> Estimate:
        measured = [self._query[str(model)] for model in models]
        return sum((session + query * len(queries) for session, query in measured), Estimate(0.0))


def _base(how: FederatedData) -> Settings:
    preset = PRESETS.get(how.data, PRESETS["digits"])
    return Settings(local=preset.local, retraining=preset.retraining)


COMMAND = Command(
    "privhfl",
    "Heterogeneous federated learning without an auxiliary data set (PrivHFL): all parties in this process, a\n"
    "simulation, which protects nothing, or one of a federation, whose roles are c1, c2, ... and S. A run that was\n"
    "stopped goes on when started again.",
    (
        "sectorch privhfl --data digits --clients 10 --queries 500",
        "sectorch privhfl --queries 100 250 500 --out runs/sweep          accuracy per query count, and its plot",
        "sectorch privhfl --seed 0 1 2 3 4 --controls --out runs/gains    with controls, five seeds and their spread",
        "sectorch privhfl --partition dirichlet --alpha 0.5 --selection icd --pool 2000 -C 0.6 --iterations 2",
        "sectorch privhfl --data cifar10 --data-root ~/data --clients 50 --queries 10000",
        "sectorch privhfl --clients 3 --federation federation.toml --as north",
    ),
    FederatedData(),
    Settings(),
    lambda how, settings: [*(f"c{i}" for i in range(1, how.clients + 1)), S.name],
    PrivHFL.prepared(divided),
    _base,
    {name: {"control": name} for name in CONTROLS},
)
