"""`CaPC`: the collaboration with its parties, settings, folders and budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from ...dp import Budget, BudgetFile
from ...federated.folder import Workers, digest
from ...federated.outcome import Scores
from ...federated.participants import Samples
from ...federated.parties import Parties, Simulation
from ...federated.run import Experiment, Held, Run
from ...federated.watch import Watch
from ...session import S
from .algorithm import Asked, Inputs, capc
from .ask import Sitting
from .plan import Forecast, Plan, check_spent, forecast, organisations, plan, validated
from .report import Record, Result, summary
from .settings import Party, Settings, check, check_apart
from .votes import try_on_shares


class CaPC(Experiment):
    """Confidential and private collaborative learning among parties with models of their own.

    Args:
        parties: each with private data and an untrained model; those with a pool ask about it, one after another.
        test: images and labels that accuracies are measured on.
        classes: how many; the same for all.
        settings: see `Settings`.
        out: a folder for finished stages; a run that was stopped goes on from there. None keeps nothing.
        local: a folder for the local training alone, which several runs may share; inside `out` unless named.
        workers: that train and ask for several parties at once, through `out`.
        together: who is here, of the parties by their names and the guardian S; all of them unless given. Of a party
            elsewhere names, the number and shape of samples and questions and the architecture are used, nothing else.
        own: seed of what a party draws and nobody else needs to know, its batches, its choice of questions;
            `settings.seed` unless given. Apart, it is each party's own secret.

    With all parties in this process, with the real protocols and real noise, it is a simulation. Apart, a run in which
    one is lost ends for all, and goes on where each was when all start again.

    Raises, before any training starts:
        FederationError: what protects nothing, among parties apart: controls, queries in the clear.
        FederationError, TooFewVotersError, PrivacyError: naming what came and the way out.
        CheckpointError: `out` holds another run, or one of an older version.
    """

    def __init__(
        self,
        parties: Sequence[Party],
        test: Samples,
        classes: int,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
        local: str | Path | None = None,
        workers: Workers | None = None,
        together: Parties | None = None,
        own: int | None = None,
    ):
        who, how = together or Simulation(), settings or Settings()
        here = {party.name: who.present(party.name) for party in parties}
        self.parties = [party if here[party.name] else party.elsewhere() for party in parties]
        self.mine, self.test, self.classes = [p for p in self.parties if here[p.name]], test, classes
        self.settings, self._own = how, how.seed if own is None else own
        if not (all(here.values()) and who.present(S.name)):
            check_apart(self.parties, how)
        check(self.parties, test, classes, how)
        if callable(how.vote) and how.inference in ("mpc", "ckks"):
            try_on_shares(how.vote, self.parties[0].name, classes)
        self.querying = [party for party in self.parties if len(party.questions)]
        for party in self.querying:
            plan(self.parties, party, classes, how)
        people = [[p.name, p.owner, len(p.images), p.shape, len(p.questions), str(p.model)] for p in self.parties]
        what = {"run": "capc", **how.agreed, "people": people, "classes": classes}
        budgets = {"budgets": how.budgets, "budget_epsilon": how.budget_epsilon, "test": digest(*test)}
        self.stages = Run(
            what, own={**budgets, "parties": {p.name: p.fingerprint() for p in self.parties}},
            members=[*here, S.name], parties=who, out=out, shared=local, workers=workers,
        )  # fmt: skip
        self._agreed = json.dumps(what)
        self._books: Mapping[str, BudgetFile] = {}
        self._asked: dict[str, Asked] = {}
        self.forecasts: dict[str, Forecast] = {}
        self.plans: dict[str, Plan] = {}

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
            return super().run(watch)  # pyright: ignore[reportReturnType]  as `outcome` gives it

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
        fixed = self.parties, run.public(self.test), self.classes, self.settings, self._agreed, self._own
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
            for k, labels in enumerate(asked.labels):
                piece = asked.chosen.value[start : start + len(labels.value)]
                record.add(piece, labels.value, done.get(f"{party.name}/{k}/labels"))
                start += len(piece)
            record.after, record.model = Scores.from_dict(asked.after.value), asked.model.value
            found[party.name] = record
        return found

    def so_far(self) -> Table:
        """The finished stages."""
        return summary(self.records().values()) if self._asked else self.stages.table()
