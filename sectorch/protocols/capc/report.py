"""The outcome of a run: what each querying party did and got, and its privacy statement."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from ...dp import ORDERS, Budget, epsilon_of
from ...federated.outcome import Outcome
from ...federated.received import merged, table
from ...plots import Plot
from .plan import Forecast
from .record import Record
from .settings import Party, Settings
from .statement import sentences

SCALES = (0.5, 1.0, 2.0, 4.0, 7.0, 10.0, 15.0, 20.0, 40.0)
"""At which the accuracy of the answers is drawn; the paper's sigmas, 7 and 40, among them (Figure 11)."""


@dataclass
class Result(Outcome):
    """A finished run. `lasting` are the organisations' own budgets after it, where there are such; `apart`: with others
    elsewhere, of whom there are no records."""

    parties: Sequence[Party]
    classes: int
    settings: Settings
    records: dict[str, Record]
    forecasts: dict[str, Forecast]
    lasting: dict[str, Budget] = field(default_factory=dict)
    apart: bool = False

    def mean(self, what: str) -> float:
        """Over querying parties: "before", "after" or "gain" in accuracy; "balanced_gain"; "right"; "epsilon"."""
        of = {
            "before": lambda r: r.before.accuracy,
            "after": lambda r: r.retrained.accuracy,
            "gain": lambda r: r.gain,
            "balanced_gain": lambda r: r.retrained.balanced - r.before.balanced,
            "right": lambda r: r.right,
            "epsilon": lambda r: r.budget.spent,
        }[what]
        return statistics.fmean(v for v in map(of, self.records.values()) if v is not None)

    def headline(self) -> dict[str, float]:
        if not self.records:
            return {}
        return {"before": self.mean("before"), "after": self.mean("after")}

    @property
    def received(self) -> list[dict]:
        """The ledger's rows over all queries."""
        return merged(rows for record in self.records.values() for rows in record.received)

    @property
    def epsilon_of_all(self) -> float:
        """What all querying parties together learn about an organisation, if they pool their labels."""
        total = sum((r.budget.curve for r in self.records.values()), np.zeros_like(ORDERS))
        return epsilon_of(total, self.settings.delta)

    def tables(self) -> list[Table]:
        return [summary(self.records.values()), self.class_table(), *([table(self.received)] if self.received else [])]

    def class_table(self) -> Table:
        """Recall of each class before and after, and the answers of that class."""
        shown = Table(title="Recall of each class before -> after, % (answers of that class)")
        for name in ("class", *self.records):
            shown.add_column(name, justify="right")
        columns = [
            [
                f"{100 * before:.0f}->{100 * after:.0f} ({count})"
                for before, after, count in zip(
                    r.before.per_class, r.retrained.per_class, r.counts(self.classes), strict=True
                )
            ]
            for r in self.records.values()
        ]
        for k, row in enumerate(zip(*columns, strict=True)):
            shown.add_row(str(k), *row)
        return shown

    def as_dict(self) -> dict:
        """Labels carry noise from the operating system: two runs differ."""
        return dict(
            settings=self.settings.as_dict(),
            parties=len(self.parties),
            organisations=len({party.owner for party in self.parties}),
            samples=[len(party.images) for party in self.parties],
            querying=[r.as_dict(self.classes, self.forecasts[r.name]) for r in self.records.values()],
            mean={n: self.mean(n) for n in ("before", "after", "gain", "balanced_gain", "epsilon") if self.records},
            epsilon_if_all_querying_parties_collude=self.epsilon_of_all,
            organisations_spent={o: dict(spent=b.spent, limit=b.limit, delta=b.delta) for o, b in self.lasting.items()},
            received=self.received,
            bytes=sum(row["bytes"] for row in self.received),
            statement=self.sentences(),
        )

    def rows(self) -> dict[str, list[dict]]:
        """Of each querying party and class, and of each query."""
        parties, queries = [], []
        for r in self.records.values():
            for when in ("accuracy", "balanced"):
                pair = dict(before=getattr(r.before, when), after=getattr(r.retrained, when))
                name = "all" if when == "accuracy" else when
                parties.append({"party": r.name, "architecture": r.architecture, "class": name, **pair,
                                "answers": r.answered})  # fmt: skip
            for k, count in enumerate(r.counts(self.classes)):
                pair = dict(before=r.before.per_class[k], after=r.retrained.per_class[k])
                parties.append({"party": r.name, "architecture": r.architecture, "class": k, **pair, "answers": count})
            voters = r.voters or [0] * len(r.asked)
            columns = zip(r.asked.tolist(), r.labels.tolist(), voters, r.spent, strict=True)
            queries += [
                dict(party=r.name, query=i, pool_index=index, label=label, voters=count, epsilon_spent=spent)
                for i, (index, label, count, spent) in enumerate(columns)
            ]
        return {"parties": parties, "queries": queries}

    def plots(self) -> list[Plot]:
        spent = {r.name: dict(enumerate(r.spent, 1)) for r in self.records.values()}
        gains = {
            r.name: {
                k: 100 * (after - before)
                for k, (before, after) in enumerate(zip(r.before.per_class, r.retrained.per_class, strict=True))
                if after == after
            }
            for r in self.records.values()
        }
        made = [
            Plot("epsilon_per_query", "queries", "epsilon spent", spent, levels={"budget": self.settings.epsilon}),
            Plot("class_balance", "class", "gain in recall, points", gains, kind="bars"),
        ]
        known = {r.name: {s: right for s in SCALES if (right := r.right_at(s)) is not None}
                 for r in self.records.values()}  # fmt: skip
        if all(known.values()):
            lines = {name: {s: 100 * right for s, right in found.items()} for name, found in known.items()}
            made.append(Plot("scale_accuracy", "scale of the noise", "right answers, %", lines, log=True))
        return made

    def sentences(self) -> list[str]:
        return sentences(self)


def summary(records: Iterable[Record]) -> Table:
    """A row for each querying party, as far as it has come."""
    shown = Table(title="Querying parties: test accuracy and balanced accuracy in %, epsilon spent and left")
    for column in ("party", "model", "accuracy", "gain", "balanced", "queries", "epsilon", "left"):
        shown.add_column(column, justify="left" if column in ("party", "model") else "right")
    for r in records:
        change = lambda name, r=r: (
            f"{100 * getattr(r.before, name):.1f}->" + (f"{100 * getattr(r.after, name):.1f}" if r.after else "")
        )
        shown.add_row(
            r.name,
            r.architecture,
            change("accuracy"),
            f"{100 * r.gain:+.2f}" if r.after else "",
            change("balanced"),
            str(len(r.asked)),
            f"{r.budget.spent:.3f}",
            f"{r.budget.remaining:.3f}",
        )
    return shown
