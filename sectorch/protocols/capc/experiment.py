"""`CaPC`: the collaboration with its parties, settings, folders and budgets, and the command."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ...display import Plot
from ...dp import ORDERS, Budget, BudgetFile, ConfidentGNMax, Mechanism, epsilon_of
from ...errors import FederationError
from ...federated.command import Command
from ...federated.outcome import Outcome, Scores, learned, merged, table, titled, where_it_ran
from ...federated.participants import FederatedExperiment
from ...federated.run import Held, Run
from ...federated.watch import Watch
from ...session import S
from .algorithm import Asked, Inputs, capc
from .ask import Sitting
from .plan import Forecast, Plan, check_spent, forecast, organisations, plan, validated
from .settings import CONTROLS, PRESETS, Collaboration, Party, Settings, check, check_apart, divided
from .votes import try_on_shares

STEPS = ("infer", "onehot", "argmax")
"""Seconds of step 1a, of 1b and 1c, of 2 and 3."""
UNANSWERED, UNSEEN = -1, -2
"""In a record's labels."""


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class Record:
    """What one querying party did and got.

    `asked` are indices of its pool, `labels` what came, -1 where Confident-GNMax did not answer and `UNSEEN` where they
    stayed in shares. `votes` and the data-dependent curve `oracle` are known to a simulation in the clear alone
    (`SimulatedPanel`), and are not private. `truth` are the true labels of the pool.
    """

    name: str
    architecture: str
    mechanism: Mechanism
    budget: Budget = field(repr=False)
    before: Scores
    after: Scores | None = None
    truth: torch.Tensor | None = field(default=None, repr=False)
    asked: torch.Tensor = field(default_factory=_none, repr=False)
    labels: torch.Tensor = field(default_factory=_none, repr=False)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    voters: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    oracle: np.ndarray | None = None
    votes: list[list[int]] = field(default_factory=list, repr=False)
    received: list[list[dict]] = field(default_factory=list, repr=False)
    stopped: str = ""
    model: Any = field(default=None, repr=False)

    def add(self, asked: torch.Tensor, labels: torch.Tensor, answer: dict | None) -> None:
        """Some more labels. `answer` is the stage's record; None where nobody was asked."""
        self.asked, self.labels = torch.cat((self.asked, asked)), torch.cat((self.labels, labels))
        if answer is None:
            return
        for step in STEPS:
            self.seconds[step] += answer["steps"][step]
        self.voters += [answer["voters"]] * len(asked)
        self.lost += [name for name in answer["lost"] if name not in self.lost]
        self.received.append(answer.get("received", []))
        for votes, label in zip(answer.get("votes") or (), labels.tolist(), strict=False):
            self.votes.append(votes)
            answered = (label >= 0,) if isinstance(self.mechanism, ConfidentGNMax) else ()
            curve = self.mechanism.curve_of(np.asarray(votes), *answered)
            self.oracle = curve if self.oracle is None else self.oracle + curve

    @property
    def answered(self) -> int:
        """Queries that have a label."""
        return int((self.labels != UNANSWERED).sum())

    @property
    def right(self) -> float | None:
        """The fraction of right ones among the answers, where an experiment knows it."""
        known = self.labels >= 0
        if self.truth is None or not known.any():
            return None
        return float((self.truth[self.asked] == self.labels)[known].double().mean())

    def right_at(self, scale: float) -> float | None:
        """The expected fraction of right answers at another scale of the noise, exactly; where votes are known."""
        if self.truth is None or not self.votes or isinstance(self.mechanism, ConfidentGNMax):
            return None
        mechanism = replace(self.mechanism, scale=scale)
        pairs = zip(self.votes, self.truth[self.asked].tolist(), strict=True)
        return float(np.mean([mechanism.distribution(votes)[true] for votes, true in pairs]))

    @property
    def spent(self) -> list[float]:
        """Epsilon after each query. What was charged and never answered counts from the start."""
        if not self.voters:
            return [0.0] * len(self.asked)
        answers = (self.labels != UNANSWERED).cumsum(0).tolist()
        costs = [self.mechanism.cost(i + 1, count) for i, count in enumerate(answers)]
        extra = np.clip(self.budget.curve - costs[-1], 0, None)
        return [epsilon_of(extra + cost, self.budget.delta) for cost in costs]

    @property
    def retrained(self) -> Scores:
        """`after`, once there is one.

        Raises:
            FederationError: the party was not retrained yet.
        """
        if self.after is None:
            raise FederationError(f"{self.name} was not retrained yet")
        return self.after

    @property
    def gain(self) -> float:
        return self.retrained.accuracy - self.before.accuracy

    def counts(self, classes: int) -> list[int | None]:
        """Answers of each class; None where nobody knows."""
        if (self.labels == UNSEEN).any():
            return [None] * classes
        return self.labels[self.labels >= 0].bincount(minlength=classes).tolist()

    def sentences(self) -> list[str]:
        """What the party got for which epsilon."""
        m, b = self.mechanism, self.budget
        out = [
            f"{self.answered} labels by {type(m).__name__} with scale {m.scale:g}; ({b.spent:.3f}, {b.delta:g})-DP for "
            f"a change of all data of an organisation ({m.moved} {'vote' if m.moved == 1 else 'votes'}), whatever the "
            f"votes were."
        ]
        if isinstance(m, ConfidentGNMax):
            out.append(
                f"{len(self.asked) - self.answered} of {len(self.asked)} queries were not answered, for want of "
                f"{m.threshold} votes under noise of scale {m.sigma1:g}; their checks are in the figure."
            )
        if self.oracle is not None:
            out.append(
                f"the data-dependent epsilon would be {epsilon_of(self.oracle, b.delta):.3f}. It depends on the votes "
                f"and is NOT private itself, and in the secure protocol nobody could compute it."
            )
        if self.lost:
            out.append(f"lost on the way: {', '.join(self.lost)}; the rest answered, with the same noise.")
        if self.stopped:
            out.append(f"stopped by its budget. {self.stopped}.")
        return [f"{self.name}: {text}" for text in out]

    def as_dict(self, classes: int, forecast: Forecast) -> dict:
        true = None if self.truth is None else self.truth[self.asked].bincount(minlength=classes).tolist()
        noise: dict = dict(kind=type(self.mechanism).__name__, scale=self.mechanism.scale, moved=self.mechanism.moved)
        if isinstance(self.mechanism, ConfidentGNMax):
            noise.update(threshold=self.mechanism.threshold, check_scale=self.mechanism.sigma1)
        return dict(
            name=self.name,
            architecture=self.architecture,
            before=self.before.as_dict(),
            after=self.retrained.as_dict(),
            queries=len(self.asked),
            answered=self.answered,
            right=self.right,
            forecast=dict(own=forecast.own, right=forecast.vote),
            queries_per_class=self.counts(classes),
            true_classes_asked=true,
            noise=noise,
            epsilon=dict(
                limit=self.budget.limit,
                delta=self.budget.delta,
                spent=self.budget.spent,
                remaining=self.budget.remaining,
                after_each_query=self.spent,
                data_dependent_not_private=None if self.oracle is None else epsilon_of(self.oracle, self.budget.delta),
            ),
            voters=self.voters,
            lost=self.lost,
            stopped=self.stopped,
            seconds=self.seconds,
        )


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
        title = "Recall of each class before -> after, % (answers of that class)"
        shown = titled(title, ("class", *self.records))
        columns = [
            [
                f"{100 * before:.0f}->{100 * after:.0f} ({'unseen' if count is None else count})"
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
            settings=self.settings.as_dict(), parties=len(self.parties),
            organisations=len({party.owner for party in self.parties}),
            samples=[len(party.images) for party in self.parties],
            querying=[r.as_dict(self.classes, self.forecasts[r.name]) for r in self.records.values()],
            mean={n: self.mean(n) for n in ("before", "after", "gain", "balanced_gain", "epsilon") if self.records},
            epsilon_if_all_querying_parties_collude=self.epsilon_of_all,
            organisations_spent={o: dict(spent=b.spent, limit=b.limit, delta=b.delta) for o, b in self.lasting.items()},
            received=self.received, bytes=sum(row["bytes"] for row in self.received), statement=self.sentences(),
        )  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        """Of each querying party and class, and of each query."""
        parties, queries = [], []
        for r in self.records.values():
            lines: list[tuple] = [
                ("all", r.before.accuracy, r.retrained.accuracy, r.answered),
                ("balanced", r.before.balanced, r.retrained.balanced, r.answered),
                *zip(
                    range(self.classes), r.before.per_class, r.retrained.per_class, r.counts(self.classes), strict=True
                ),
            ]
            names = ("party", "architecture", "class", "before", "after", "answers")
            parties += [dict(zip(names, (r.name, r.architecture, *line), strict=True)) for line in lines]
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
        """The privacy statement in words: what each role learned, from the ledger, and what the figures promise."""
        return [
            *self._learned(),
            *(self._promised() if self.settings.control is None else ()),
            "Public: model architectures, shapes, who asks, how many queries, the classes, the scale of the noise.",
            f"Not covered: {self._repeated()}, the guardian colluding with anybody, parties that cheat, the query "
            f"choice of a party (a party's own data are not protected from itself).",
            where_it_ran(self.apart),
        ]

    def _learned(self) -> list[str]:
        how = self.settings
        if not self.records:
            return ["This party asked nothing: what each role received stands in the results of those that asked."]
        if how.control is not None:
            return [f"Nobody was asked by the protocol: a control ({how.control})."]
        if how.inference == "simulated":
            return [
                "This run computed all votes in the clear (inference='simulated'): labels are drawn from the same "
                "mechanism as in the secure run, and nothing was protected."
            ]
        names = {"A": "Answering parties", "S": "The privacy guardian", "Q": "Querying parties"}
        out = learned(self.received, names, "nothing: masked values only")
        if how.labels == "shares":
            out.append(
                "The labels stayed in shares; the querying party learned its retrained model, which tells about them, "
                "up to all. So the promise is that of the noise, as if it had the labels."
            )
        if how.inference == "open":
            out.append("The answering parties saw every query in plain (inference='open').")
        seconds = [sum(r.seconds[step] for r in self.records.values()) for step in STEPS]
        return [
            *out,
            "Seconds, all parties one after another: step 1a {:.1f}, 1b-1c {:.1f}, 2-3 {:.1f}.".format(*seconds),
        ]

    def _promised(self) -> list[str]:
        how, out = self.settings, [text for name, f in self.forecasts.items() if (text := f.warning(name))]
        for record in self.records.values():
            out += record.sentences()
        if len(self.records) > 1:
            out.append(
                f"If all {len(self.records)} querying parties pool their labels, the figures add up: epsilon "
                f"{self.epsilon_of_all:.3f} for an organisation that answered all of them."
            )
        if callable(how.vote):
            name = how.as_dict()["vote"]["kind"]
            out.append(
                f"A party's ballot was that of {name}: at most {how.ballot_votes} votes in all, which the noise "
                f"covers. That was tried on random logits before the run; on shares nobody can look."
            )
        if self.lasting:
            owner, least = min(self.lasting.items(), key=lambda pair: pair[1].remaining)
            out.append(
                f"The {len(self.lasting)} answering organisations have budgets of their own, over all runs and askers "
                f"that were charged to them: {owner}, which has least left, has spent epsilon {least.spent:.3f} of "
                f"{least.limit:g} at delta {least.delta:g}."
            )
        return out

    def _repeated(self) -> str:
        if self.lasting:
            return "what organisations answered in runs that did not name their budgets"
        return "what repeated runs add up to (each starts a new budget)"


def summary(records: Iterable[Record]) -> Table:
    """A row for each querying party, as far as it has come."""
    heads = ("party", "model", "accuracy", "gain", "balanced", "queries", "epsilon", "left")
    shown = titled("Querying parties: test accuracy and balanced accuracy in %, epsilon spent and left", heads, 2)
    for r in records:
        change = lambda name, r=r: (
            f"{100 * getattr(r.before, name):.1f}->" + (f"{100 * getattr(r.after, name):.1f}" if r.after else "")
        )
        shown.add_row(
            r.name, r.architecture, change("accuracy"), f"{100 * r.gain:+.2f}" if r.after else "", change("balanced"),
            str(len(r.asked)), f"{r.budget.spent:.3f}", f"{r.budget.remaining:.3f}",
        )  # fmt: skip
    return shown


def _labels(value: Any, asker: str) -> torch.Tensor:
    """A question's labels as a record has them."""
    return value if isinstance(value, torch.Tensor) else torch.full((len(value[asker]),), UNSEEN)


class CaPC(FederatedExperiment[Result, Party, Settings]):
    """Confidential and private collaborative learning among parties with models of their own.

    Those of them with a pool ask about it, one after another. See `FederatedExperiment` for the arguments; beside the
    parties the guardian S takes part. In one process the protocols and the noise are real.

    Raises, before any training starts:
        TooFewVotersError, PrivacyError: naming what came and the way out.
    """

    label, servers = "capc", (S.name,)

    def _checked(self, settings: Settings | None, complete: bool) -> Settings:
        how = settings or Settings()
        if not complete:
            check_apart(self.parties, how)
        check(self.parties, self.test, self.classes, how)
        if callable(how.vote) and how.inference in ("mpc", "ckks"):
            try_on_shares(how.vote, self.parties[0].name, self.classes)
        self.querying = [party for party in self.parties if len(party.questions)]
        for party in self.querying:
            plan(self.parties, party, self.classes, how)
        self._books: Mapping[str, BudgetFile] = {}
        self._asked: dict[str, Asked] = {}
        self.forecasts: dict[str, Forecast] = {}
        self.plans: dict[str, Plan] = {}
        return how

    def run(self, watch: Watch | None = None) -> Result:
        """Everything, or what of it is not in `out` yet.

        Raises:
            TooFewVotersError: so many parties were lost that a query had to be refused. What was answered is kept.
            BudgetExhaustedError: an organisation's own budget affords no query more; before any training. Apart, at
                the party whose it is and at one that got no answer for it, when all turns are over.
            BudgetFileError: such a budget cannot be read, is another run's just now, or lacks a charge.
            NetworkError: a party was lost. What was answered is kept; nothing is charged twice when all start again.
        """
        with organisations(self.settings, self.querying, self.mine) as self._books:
            return super().run(watch)

    def algorithm(self, run: Run) -> dict[str, Asked]:
        """How many queries (4.4), and then `capc`."""
        if new := [owner for owner, file in self._books.items() if file.new]:
            run.watch.warn(f"started a new budget for {', '.join(new)}: nothing that they answered before is in it")
        for party in self.querying:
            if run.present(party.name):
                self._forecast(run, party)
        if not run.apart and not run.dry:
            fresh = [p.name for p in self.querying if not run.folder.record(f"questions/{p.name}-0")]
            check_spent({n: self.plans[n] for n in fresh}, {p.name: p.owner for p in self.parties}, self._books)
        fixed = self.parties, run.public(self.test), self.classes, self.settings, json.dumps(self._agreed), self._own
        return capc(run, Inputs(*fixed, Sitting, self.plans, self._books))

    def _forecast(self, run: Run, party: Party) -> None:
        """What the asker's own data say of its model, and so of what it is to ask; a warning where that is little."""
        name, how = party.name, self.settings
        mine = Held((name,), party.fingerprint(), party)
        own = run.at(name, validated, mine, how.local, self._own, stage=f"{name}/validated", shared=True)
        planned = plan(self.parties, party, self.classes, how, Forecast(own.value) if own.present else None)
        self.plans[name] = planned
        if own.present:
            self.forecasts[name] = forecast(planned, self.classes, own.value, how)
            if how.control is None and (warning := self.forecasts[name].warning(name)):
                run.watch.warn(warning)

    def outcome(self, found: dict[str, Asked]) -> Result:
        self._asked = found
        refusals = [error for asked in found.values() for error in asked.refusals]
        records = self.records()
        if self.stages.apart:
            if refusals and not any(len(record.asked) for record in records.values()):
                raise refusals[0]
            for refusal in refusals:
                self.stages.watch.warn(str(refusal))
        spent = {owner: file.budget for owner, file in self._books.items()}
        return Result(self.parties, self.classes, self.settings, records, self.forecasts, spent, self.stages.apart)

    def records(self) -> dict[str, Record]:
        """Of each querying party that is here."""
        done, found = {record["stage"]: record for record in self.stages.records}, {}
        for party in self.querying:
            asked = self._asked.get(party.name)
            if asked is None or asked.plan is None or asked.chosen is None or not asked.before.present:
                continue
            if asked.model is None or asked.after is None:
                continue
            budget = Budget(self.settings.epsilon, self.settings.delta)
            if asked.curve is not None:
                budget.restore(asked.curve)
            record = Record(
                party.name, party.architecture, asked.plan.mechanism, budget, Scores.from_dict(asked.before.value),
                truth=party.truth, stopped=asked.stopped,
            )  # fmt: skip
            start = 0
            for k, labels in enumerate(_labels(one.value, party.name) for one in asked.labels):
                piece = asked.chosen.value[start : start + len(labels)]
                record.add(piece, labels, done.get(f"{party.name}/{k}/labels"))
                start += len(piece)
            if more := done.get(f"{party.name}/model", {}).get("received"):  # on shares
                record.received.append(more)
            record.after, record.model = Scores.from_dict(asked.after.value), asked.model.value
            found[party.name] = record
        return found

    def so_far(self) -> Table:
        """The finished stages."""
        return summary(self.records().values()) if self._asked else self.stages.table()


def _base(how: Collaboration) -> Settings:
    return PRESETS.get(how.data, PRESETS["digits"]).settings()


def _cast(how: Collaboration, settings: Settings) -> list[str]:
    return [*(f"p{i}" for i in range(1, (how.parties or PRESETS.get(how.data, PRESETS["digits"]).parties) + 1)), S.name]


COMMAND = Command(
    "capc",
    "Confidential and private collaborative learning (CaPC): all parties in this process, a simulation of the real\n"
    "protocols, or one of a federation, whose roles are p1, p2, ... and S. A run that was stopped goes on when\n"
    "started again.",
    (
        "sectorch capc --data digits --parties 50 --epsilon 10 --delta 1e-5 --noise gaussian --inference mpc",
        "sectorch capc --parties 20 50 100 --inference simulated --out runs/parties      gain per party count",
        "sectorch capc --parties 20 --plan --seed 0 1 2 3 4 --controls --inference simulated --out runs/gains",
        "sectorch capc --parties 60 --models-each 3 --skewed --selection entropy --pool 100 --queries 50",
        "sectorch capc --parties 5 --querying 1 --epsilon 40 --federation federation.toml --as north",
    ),
    Collaboration(),
    Settings(),
    _cast,
    CaPC.prepared(divided),
    _base,
    {name: {"control": name} for name in CONTROLS},
)
