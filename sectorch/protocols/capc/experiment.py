"""`CaPC`: the collaboration with its parties, settings, folders and budgets, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.table import Table

from ...dp import Budget, BudgetFile
from ...federated.command import Command
from ...federated.outcome import Scores
from ...federated.participants import FederatedExperiment
from ...federated.run import Held, Run
from ...federated.watch import Watch
from ...session import S
from .algorithm import Asked, Inputs, capc
from .ask import Sitting
from .plan import Forecast, Plan, check_spent, forecast, organisations, plan, validated
from .report import Record, Result, summary
from .settings import CONTROLS, PRESETS, Collaboration, Party, Settings, check, check_apart, divided
from .votes import try_on_shares


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
