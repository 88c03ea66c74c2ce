"""`PrivHFL`: Algorithm 1 with its clients, settings, folders and parties; its controls, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ...data.seeds import generator
from ...display import Plot
from ...errors import FederationError
from ...federated.command import Command
from ...federated.outcome import Outcome, learned, merged, percents, table, titled, where_it_ran
from ...federated.participants import FederatedData, FederatedExperiment, Participant, images_and_labels
from ...federated.run import Held, Run
from ...federated.watch import Estimate
from ...session import S
from . import settings
from .algorithm import Inputs, answering, ask, chosen, expanded, labels_of, one_hot, privhfl
from .query import plain_query
from .settings import CONTROLS, PRESETS, Settings, check, divided

STEPS = ("share", "predict", "aggregate", "retraining")


@dataclass
class Result(Outcome):
    """A finished run.

    Attributes:
        clients: those that were here, of `parties` in all; with some elsewhere it was `apart`.
        records: for each of them the record of local training and one for each round.
    """

    clients: Sequence[Participant]
    classes: int
    settings: Settings
    records: dict[str, list[dict]]
    models: dict[str, nn.Module] = field(repr=False)
    parties: int
    apart: bool = False

    @property
    def architectures(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(client.architecture for client in self.clients))

    def accuracies(self, stage: int, architecture: str | None = None) -> list[float]:
        """Of each client (of one architecture), after local training (0) or after a round; -1 is the last."""
        names = [c.name for c in self.clients if architecture in (None, c.architecture)]
        return [self.records[name][stage]["accuracy"] for name in names]

    def mean(self, stage: int, architecture: str | None = None) -> float:
        """The mean accuracy over clients."""
        values = self.accuracies(stage, architecture)
        return sum(values) / len(values) if values else math.nan

    def headline(self) -> dict[str, float]:
        return {"alone": self.mean(0), "after": self.mean(-1)}

    @property
    def received(self) -> list[dict]:
        """The ledger's rows over all queries."""
        return merged(record.get("received", []) for records in self.records.values() for record in records)

    def seconds(self) -> dict[str, float]:
        """Of all clients together: the steps of Algorithm 1."""
        flat = [record for records in self.records.values() for record in records]
        return {"local": sum(r.get("seconds", 0) for r in flat), **{s: sum(r.get(s, 0) for r in flat) for s in STEPS}}

    def tables(self) -> list[Table]:
        return [self.table(), table(self.received)]

    def table(self) -> Table:
        """Each client's accuracy before and after."""
        shown = accuracies(self.clients, self.records, self.settings.iterations)
        shown.add_section()
        rounds = range(self.settings.iterations + 1)
        for name in (*self.architectures, None):
            count = len(self.accuracies(0, name))
            shown.add_row("mean", name or "all", str(count), *percents([self.mean(stage, name) for stage in rounds]))
        return shown

    @property
    def statement(self) -> list[str]:
        """Who learned what; see `statement`."""
        return statement(self.received, self.settings, self.parties, self.epsilon, self.apart)

    @property
    def epsilon(self) -> dict[str, float]:
        """What the noise gives; empty without noise. See `privacy.spent`."""
        return settings.spent(self.records, self.settings, self.classes) if self.settings.noised else {}

    def sentences(self) -> list[str]:
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds().items())
        return [*self.statement, f"Seconds, all clients and parties one after another: {seconds}."]

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Seconds differ from run to run; the rest, for one seed, does not."""
        rounds = range(self.settings.iterations + 1)
        clients = [
            dict(
                name=c.name,
                architecture=c.architecture,
                samples=len(c.images),
                per_class=c.labels.bincount(minlength=self.classes).tolist(),
                accuracy=[record["accuracy"] for record in self.records[c.name]],
                queries=[record["queries"] for record in self.records[c.name][1:]],
                answering=[record["answering"] for record in self.records[c.name][1:]],
            )
            for c in self.clients
        ]
        return dict(
            settings=json.loads(json.dumps(self.settings.as_dict())), clients=clients,
            mean=[self.mean(stage) for stage in rounds],
            by_architecture={a: [self.mean(stage, a) for stage in rounds] for a in self.architectures},
            seconds=self.seconds(), threads=torch.get_num_threads(), bytes=sum(row["bytes"] for row in self.received),
            received=self.received, epsilon=self.epsilon, statement=self.statement,
        )  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        rows = [
            dict(client=c.name, architecture=c.architecture, samples=len(c.images), round=t, accuracy=r["accuracy"])
            for c in self.clients
            for t, r in enumerate(self.records[c.name])
        ]
        return {"accuracy": rows}

    def plots(self) -> list[Plot]:
        rounds, names = range(self.settings.iterations + 1), [*self.architectures, None]
        lines = {name or "all": {t: 100 * self.mean(t, name) for t in rounds} for name in names}
        stages = {"alone": 0, "after PrivHFL": -1}
        bars = {label: {n or "all": 100 * self.mean(t, n) for n in names} for label, t in stages.items()}
        up = "mean test accuracy, %"
        return [
            Plot("accuracy_per_round", "round (0 is local training)", up, lines),
            Plot("accuracy_per_architecture", "architecture", up, bars, kind="bars"),
        ]


def statement(
    rows: list[dict], how: Settings, clients: int, epsilon: dict[str, float], apart: bool = False
) -> list[str]:
    """The privacy statement in words. What a role learns comes from the ledger's rows; the rest no ledger can see.

    Args:
        epsilon: what noise gives; empty where there is none.
    """
    if not how.asks:
        return [f"Nobody was asked: a control ({how.control})."]
    if not how.secure:
        return ["This run was in the clear (secure=False): every query, model and prediction was open. An ablation."]
    if apart and not rows:
        return ["What each role received stands in the results of those that asked."]
    names = {"A": "Answering parties", "S": "The server", "Q": "Querying parties"}
    out = learned(rows, names, "nothing: uniform bits under masks that they do not know")
    noised = " and the server's noise" if how.noised else ""
    kind, answering = "normalised predictions" if how.normalise else "logits", how.answering(clients)
    if how.labels == "shares":
        out.append(
            f"Q learned its retrained model. The soft labels of {answering} parties' {kind} stayed in shares (the sum "
            f"that it received is empty), but a model that was trained on them still tells about them, up to all."
        )
    elif answering == 1 and not how.noised:
        out.append(f"One party answered each query, so the sum that Q learned IS that party's {kind}. Raise C.")
    else:
        leaks = how.relu == "privhfl"
        summand = "; what the paper's ReLU shows it gives each party's weights, and so every summand" if leaks else (
            ", and no summand"
        )  # fmt: skip
        out.append(f"Q learned the sum of the {kind} of {answering} parties{noised} for each of its queries{summand}.")
    shown = "the retrained model" if how.labels == "shares" else "the sum"
    return [
        *out,
        *(settings.sentences(epsilon, how) if how.noised else ()),
        "Public: architectures, shapes, who asks whom, how many queries, the number format.",
        f"Not covered: {'' if how.noised else f'what {shown} itself says about the models (no noise was added), '}"
        "the server colluding with a client, parties that cheat.",
        where_it_ran(apart),
    ]


def accuracies(clients: Sequence[Participant], records: dict[str, list[dict]], iterations: int) -> Table:
    """A row for each client, as far as it has come; round 0 is local training."""
    columns = ("client", "architecture", "samples", "alone", *(f"round {t + 1}" for t in range(iterations)), "gain")
    shown = titled("Test accuracy, %", columns, 2)
    for client in clients:
        values = percents([record["accuracy"] for record in records.get(client.name, [])])
        values, gain = (values[:-1], values[-1]) if values else ([], "")
        missing = [""] * (iterations + 1 - len(values))
        shown.add_row(client.name, client.architecture, str(len(client.images)), *values, *missing, gain)
    return shown


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
                    if more := done[f"{stage}/model"].get("received"):  # on shares
                        record["received"] = merged((record["received"], more))
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
