"""The outcome of a run: tables, results.json and a CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.table import Table
from torch import nn

from ... import ckks
from ...display import Plot
from ...federated.outcome import Outcome, percents, table, titled, where_it_ran
from .settings import Party, Settings

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
