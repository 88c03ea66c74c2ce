"""`CaPriDe`: Algorithm 1 with its parties, settings and folder; parties of one data set, networks, and the command."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from ... import ckks
from ...data.datasets import IMAGES, Dataset
from ...data.partition import partition
from ...data.seeds import derive, generator
from ...display import Plot
from ...errors import FederationError
from ...federated.command import Command, Options, option
from ...federated.folder import digest
from ...federated.outcome import Outcome, Received, percents, table, titled, where_it_ran
from ...federated.participants import FederatedExperiment, Samples, dataset_of
from ...federated.parties import Simulation
from ...federated.run import Held, Run
from ...federated.watch import Estimate, Watch
from ...nn.fhe import fhe_friendly
from ...nn.models import BasicBlock, resnet18
from .algorithm import Inputs, ask, capride, divergences
from .exchange import Exchange, Simulated
from .settings import METHODS, WEIGHT_OF_A_PEER, Party, Settings, chain, check
from .training import State

# (epsilon, delta) of the Gaussian noise on aggregates, and a run's statement in words.
#
# **What it is stated for.** Neighbours are two models of P_l whose logits on one of P_k's samples differ, by at most
# `logit_change` in the largest entry, while the others agree. P_k divides each direction so that a sample enters an
# aggregate with weights whose magnitudes add up to at most 1 (`Directions.of`; P_l cannot see that, it relies on an
# honest P_k). Such a change moves each of the R numbers of a round by at most logit_change / T, and their vector by
# sqrt(R) times that in the L2 norm. Rounds add up in Renyi divergence; the conversion to (epsilon, delta) is
# `sectorch.dp`'s.
#
# It is a statement on P_l's logits, not on P_l's training data. The flooding of `flood_bits` is not counted.


def epsilon(records: dict[str, list[dict]], how: Settings) -> float | None:
    """The largest epsilon of any party asked about any of its peers, over all rounds; None without noise."""
    asked = [r["sigma"] for found in records.values() for r in found if "sigma" in r]
    if not asked or min(asked) == 0:
        return None
    # dp-accounting is needed for runs with noise only.
    from ...dp.noise import epsilon_of, gaussian_curve

    change = how.logit_change / how.temperature
    worst = 0.0
    for found in records.values():
        for peer in {name for r in found for name in r.get("asked", ())}:
            asked = [r for r in found if peer in r.get("asked", ())]
            curves = [gaussian_curve(r["sigma"], change * math.sqrt(r["released"])) for r in asked]
            worst = max(worst, epsilon_of(sum(curves[1:], curves[0]), how.delta)) if asked else worst
    return worst


def statement(
    size: int, numbers: int, how: Settings, eps: float | None, leakage: float, apart: bool = False
) -> list[str]:
    """What each party got to know, in words.

    Args:
        size: bytes of all messages.
        numbers: that the guards counted.
        leakage: the largest that any party measured of any of its peers.
    """
    if not how.asks:
        seen = {
            "local": "Nothing was exchanged.",
            "fedavg": "Every party's model was open to the averaging.",
            "fedavg-dp": f"Every party's model was open to the averaging but for noise of {how.model_sigma:g}.",
        }.get(how.method, "Every party's logits on every other party's samples were open.")
        return [f"A baseline, which protects nothing of what it exchanges. {seen}"]
    if not how.encrypted:
        return [
            f"Simulated in the clear: {numbers} aggregates that an encrypted run would have released. Protects nothing."
        ]
    out = [
        f"{size / 1e6:.1f} MB of ciphertexts and public keys travelled; {numbers} numbers were released to the owners "
        f"of the samples, who alone can decrypt them, all of them aggregates over a batch.",
        f"Each decrypted number is a linear equation on a peer's logits. All together explain up to {leakage:.3g} of "
        f"what sets them apart from the owner's own on a sample (measured by the owner before it asked; "
        + ("NO limit was set)." if how.leakage is None else f"limit {how.leakage:g})."),
    ]
    if how.update == "scalar":
        out.append("Scalar mode: the decrypted number has no gradient. No model learned anything from a peer.")
    if eps is not None:
        out.append(
            f"With the noise on each aggregate: ({eps:.3g}, {how.delta:g})-DP for a change of one sample's "
            f"logits by at most {how.logit_change:g}."
        )
    return [
        *out,
        "Public: shapes, architectures' depths, who asks whom, which samples (by number) a round is over.",
        "Not covered: parties that cheat, what the trained models show, and pairs of models unlike the meter's prior.",
        where_it_ran(apart),
    ]


@dataclass
class Result(Outcome):
    """A finished run.

    Attributes:
        parties: those that were here; with others elsewhere it was `apart`.
        records: for each of them the record of local training and one for each round.
        messages: what each role received, by protocol and message, as the core's observers saw it.
        released: the guards' counts; see `ckks.ReleaseLedger`.
    """

    parties: Sequence[Party]
    classes: int
    settings: Settings
    records: dict[str, list[dict]]
    models: dict[str, list[nn.Module]] = field(repr=False)
    messages: list[dict] = field(repr=False)
    released: dict[str, list[int]] = field(repr=False)
    parameters: ckks.Parameters | None
    seconds: dict[str, float]
    apart: bool = False

    @property
    def label(self) -> str:
        """The method's name in tables and plots."""
        how = self.settings
        return f"{how.method} ({how.update})" if how.asks else how.method

    def accuracy(self, stage: int) -> float:
        """The mean over parties after local training (0) or a round (-1: the last); of large models, if there are."""
        return sum(found[stage]["accuracy"] for found in self.records.values()) / len(self.records)

    @property
    def gain(self) -> float:
        """U of section 3.1: the mean over parties of the accuracy after less that before the collaboration."""
        return self.accuracy(-1) - self.accuracy(0)

    def per_class(self, stage: int) -> list[list[float | None]]:
        """The accuracy of each class at each party: `[class][party]`."""
        return [[found[stage]["per_class"][c] for found in self.records.values()] for c in range(self.classes)]

    @property
    def epsilon(self) -> float | None:
        """(epsilon, delta) of the noise, see the first section; None without noise."""
        return epsilon(self.records, self.settings)

    @property
    def leakage(self) -> dict[str, float]:
        """By "peer>owner": the share of a sample's logits that all answers so far explain (`capride/training.py`)."""
        return {
            f"{peer}>{owner}": value
            for owner, found in self.records.items()
            for record in found
            for peer, value in record.get("leakage", {}).items()
        }

    @property
    def statement(self) -> list[str]:
        """What was released to whom, in words."""
        size, numbers = sum(row["bytes"] for row in self.messages), sum(count for count, _ in self.released.values())
        return statement(
            size, numbers, self.settings, self.epsilon, max(self.leakage.values(), default=0.0), self.apart
        )

    def table(self) -> Table:
        """Accuracy of each party before and after, and of each class."""
        heads = ("party", "samples", "before", "after", "gain", "numbers a round", "leakage")
        clear = "" if self.protected else ", simulated in the clear"
        shown = titled(f"Test accuracy, %: {self.label}{clear}", heads, 1)
        for party in self.parties:
            found = self.records[party.name]
            before, after = found[0]["accuracy"], found[-1]["accuracy"]
            released = str(found[-1].get("released", ""))
            told = [f"{peer} {value:.2f}" for peer, value in self._told(party.name).items()]
            shown.add_row(party.name, str(len(party.labels)), *percents([before, after]), released, ", ".join(told))
        shown.add_section()
        shown.add_row("mean", "", *percents([self.accuracy(0), self.accuracy(-1)]), "", "")
        return shown

    def _told(self, owner: str) -> dict[str, float]:
        return {pair.split(">")[0]: value for pair, value in self.leakage.items() if pair.endswith(f">{owner}")}

    def class_table(self) -> Table:
        """The mean accuracy over parties, class by class."""
        shown = titled("Per class, mean over parties, %", ("class", "before", "after", "gain"))
        for c, (before, after) in enumerate(zip(self.per_class(0), self.per_class(-1), strict=True)):
            first, last = ([v for v in found if v is not None] for found in (before, after))
            if (len(first), len(last)) == (len(before), len(after)):
                shown.add_row(str(c), *percents([sum(first) / len(first), sum(last) / len(last)]))
        return shown

    @property
    def protected(self) -> bool:
        """Whether anything was encrypted; baselines and simulations protect nothing."""
        return self.settings.asks and self.settings.encrypted

    def as_dict(self) -> dict:
        """For JSON. Seconds differ from run to run, and encrypted results by the noise."""
        parties = [
            dict(
                name=p.name, samples=len(p.labels), per_class=p.labels.bincount(minlength=self.classes).tolist(),
                architecture=p.architecture, rounds=self.records[p.name],
            )
            for p in self.parties
        ]  # fmt: skip
        return dict(
            method=self.label, encrypted=self.protected, settings=json.loads(json.dumps(self.settings.as_dict())),
            parties=parties, before=self.accuracy(0), after=self.accuracy(-1), gain=self.gain, epsilon=self.epsilon,
            curve=[self.accuracy(t) for t in range(len(next(iter(self.records.values()))))],
            parameters=str(self.parameters) if self.parameters else None, seconds=self.seconds,
            threads=torch.get_num_threads(), messages=self.messages, released=self.released, leakage=self.leakage,
            statement=self.statement,
        )  # fmt: skip

    def headline(self) -> dict[str, float]:
        return {"before": self.accuracy(0), "after": self.accuracy(-1)}

    def tables(self) -> list[Table]:
        return [self.table(), self.class_table(), *([table(self.messages)] if self.messages else [])]

    def sentences(self) -> list[str]:
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        return [*self.statement, *([f"Seconds: {seconds}."] if seconds and self.protected else [])]

    def rows(self) -> dict[str, list[dict]]:
        rows = [
            dict(party=p.name, samples=len(p.labels), round=t, accuracy=r["accuracy"])
            for p in self.parties
            for t, r in enumerate(self.records[p.name])
        ]
        return {"accuracy": rows}

    def plots(self) -> list[Plot]:
        """As Figures 2, 4 and 5: by round, by class with its spread over parties, by party."""
        up, stages = "mean test accuracy, %", {"before": 0, f"after {self.label}": -1}
        curve = {t: 100 * v for t, v in enumerate(self.as_dict()["curve"])}
        known = lambda stage: {c: [100 * v for v in p if v is not None] for c, p in enumerate(self.per_class(stage))}
        each = lambda stage: {p.name: 100 * self.records[p.name][stage]["accuracy"] for p in self.parties}
        return [
            Plot("accuracy_by_round", "round (0 is local training)", up, {self.label: curve}),
            Plot("accuracy_by_class", "class", up, {n: known(t) for n, t in stages.items()}, kind="bars"),
            Plot("accuracy_by_party", "party", up, {n: each(t) for n, t in stages.items()}, kind="bars"),
        ]


def rounds_table(label: str, records: dict[str, list[dict]]) -> Table:
    """The mean accuracy over parties of the last rounds that are finished."""
    shown = Table("round", "mean accuracy, %", title=label)
    stages = min((len(found) for found in records.values()), default=0)
    for t in range(stages)[-5:]:
        shown.add_row(str(t), f"{100 * sum(f[t]['accuracy'] for f in records.values()) / len(records):.2f}")
    return shown


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


# Parties for experiments: one data set divided among them, and the networks that each of them has.


SPLITS = ("homogeneous", "heterogeneous", "no-overlap")


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two linear layers with 24 hidden units: 4 levels with the polynomial GELU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 24), nn.ReLU(), nn.Linear(24, classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A strided convolution of four channels and two linear layers: 7 levels with the polynomial GELU."""
    side = (shape[1] + 1) // 2 * ((shape[2] + 1) // 2)
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * side, 16), nn.ReLU(), nn.Linear(16, classes),
    )  # fmt: skip


def cnn32(shape: tuple[int, ...], classes: int) -> nn.Module:
    """For 32 x 32 images: two strided convolutions and two linear layers, 10 levels with the polynomial GELU."""
    side = -(-shape[1] // 8) * -(-shape[2] // 8)
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 5, stride=4, padding=2), nn.ReLU(),
        nn.Conv2d(4, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * side, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


def resnet4(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The smallest ResNet: a strided stem of 8 channels, one block of 16, a linear layer: 9 levels with the polynomial
    GELU.
    """
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes),
    )  # fmt: skip


def resnet8(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small ResNet (16, 32, 64 channels), for the large model where images are small."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


SMALL: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "cnn32": cnn32, "resnet4": resnet4}
"""FHE-friendly after `fhe_friendly`."""
LARGE: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": lambda shape, classes: resnet18(classes, shape[0]),
}
"""For the two-model arrangement: any network, never evaluated under encryption."""
USUAL = {"digits": "mlp", "cifar10": "cnn32", "cifar100": "cnn32", "ham10000": "cnn32"}


def build(name: str, shape: tuple[int, ...], classes: int, seed: int, activation: str = "gelu") -> nn.Module:
    """A network with random weights, which depend on the seed only; the small ones with polynomials for ReLUs.

    Raises:
        FederationError: an unknown name.
    """
    if name not in SMALL and name not in LARGE:
        raise FederationError(f"there is no network {name!r}; there are {', '.join((*SMALL, *LARGE))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (SMALL.get(name) or LARGE[name])(shape, classes)
    return fhe_friendly(model, activation) if name in SMALL else model


def divide(
    labels: torch.Tensor, parties: int, split: str, *, samples: int | None = None, alpha: float = 0.5, seed: int = 0
) -> list[torch.Tensor]:
    """Disjoint indices for each party.

    Args:
        split: "homogeneous" (classes alike for all), "heterogeneous" (class proportions of each party from Dir(alpha);
            the paper draws them at random without naming a law), "no-overlap" (class c belongs to party c mod K, so
            that two parties get the even and the odd classes).
        samples: of each party; all, as evenly as they can be divided, unless named.

    Raises:
        FederationError, PartitionError: an unknown split, or one that leaves a party without samples.
    """
    if samples is not None and samples < 1:
        raise FederationError(f"samples of each party must be at least 1, got {samples}")
    if split not in SPLITS:
        raise FederationError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    if split != "no-overlap":
        kind = "iid" if split == "homogeneous" else "dirichlet"
        return partition(labels, parties, samples, kind=kind, alpha=alpha, seed=seed)
    if int(labels.max()) + 1 < parties:
        raise FederationError(f"{parties} parties cannot have classes of their own: there are {int(labels.max()) + 1}")
    out = []
    for k in range(parties):
        own = torch.nonzero(labels % parties == k).flatten()
        if samples is not None:
            if samples > len(own):
                raise FederationError(f"party {k} has {len(own)} samples of its own classes, {samples} were asked for")
            own = own[torch.randperm(len(own), generator=generator(seed, "no-overlap", k))[:samples]].sort().values
        out.append(own)
    return out


@dataclass(frozen=True)
class Parties(Options):
    """Parties made of one data set (sections 4.1 and 4.2)."""

    data: str = option("digits", "data set", among=IMAGES)
    parties: int = option(2, "how many", least=2, several=True)
    split: str = option("homogeneous", "who has which classes", among=SPLITS, several=True)
    alpha: float = option(0.5, "of the heterogeneous split's Dirichlet law", above=0)
    samples: int | None = option(None, "of each party (default: all, divided)", least=1)
    network: str | None = option(None, "the FHE-friendly one (default: the data set's)", among=tuple(SMALL))
    activation: str = option("gelu", "in place of ReLU under encryption", among=("gelu", "square"))
    large: str | None = option(
        None, "a second, large model of each party, distilled with the small one", among=tuple(LARGE)
    )
    test_samples: int | None = option(None, "the first so many test images (default: all)", least=1)
    seed: int = option(0, "of everything but keys and noise", least=0, several=True)


def federation(
    data: str | Dataset = "digits", parties: int = 2, split: str = "homogeneous", *, root: str | Path | None = None,
    **known,
) -> tuple[list[Party], Samples, int]:  # fmt: skip
    """Parties, test set and number of classes: what `CaPriDe` takes.

    Args:
        data: a name, or a data set.
        root: where data sets lie.
        known: other fields of `Parties`.

    Raises:
        FederationError: fewer than two parties, or a network that does not exist.
        DatasetMissingError, PartitionError: as `sectorch.data` raises them.
    """
    return divided(dataset_of(data, root), Parties(parties=parties, split=split, **known))


def divided(dataset: Dataset, how: Parties, own: int | None = None) -> tuple[list[Party], Samples, int]:
    """The same, by `Parties`.

    Args:
        own: seed of the first weights; that of `how` unless given.
    """
    drawn = how.seed if own is None else own
    shape, name, made = dataset.shape, how.network or USUAL.get(dataset.name, "mlp"), []
    hands = divide(
        dataset.train.labels, how.parties, how.split, samples=how.samples, alpha=how.alpha, seed=how.seed
    )  # fmt: skip
    for k, part in enumerate(hands):
        who = f"P{k + 1}"
        small = build(name, shape, dataset.classes, derive(drawn, who, "weights"), how.activation)
        big = build(how.large, shape, dataset.classes, derive(drawn, who, "large weights")) if how.large else None
        made.append(Party(who, small, *dataset.train.take(part), architecture=name, large=big))
    return made, dataset.test.take(slice(how.test_samples)), dataset.classes


COMMAND = Command(
    "capride",
    "Decentralised learning on encrypted data (CaPriDe): all parties in this process, or one of a federation, whose\n"
    "roles are P1, P2, .... A run that was stopped goes on when started again.",
    (
        "sectorch capride --data digits --parties 3 --split no-overlap --rounds 20 --update head",
        "sectorch capride --simulate --controls local fedavg fedavg-dp dml l2       in the clear, with baselines",
        "sectorch capride --large resnet8 --update forward                          two models a party",
        "sectorch capride --parties 2 --federation federation.toml --as north",
    ),
    Parties(),
    Settings(),
    lambda how, settings: [f"P{i}" for i in range(1, how.parties + 1)],
    CaPriDe.prepared(divided),
    lambda how: Settings(),
    {method: {"method": method} for method in METHODS if method != "capride"},
)
