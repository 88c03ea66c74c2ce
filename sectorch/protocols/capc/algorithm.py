"""CaPC from end to end (CaPC, 3.2 and 4.2): local models, queries within a budget, retraining from scratch."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ...data.seeds import derive
from ...data.selection import NEEDS, select
from ...dp import Budget, BudgetFile
from ...federated.batched import Task, answer_of, grouped, logits_of, seconds_of_all, train_all, train_group
from ...federated.estimate import Estimate
from ...federated.folder import RunFolder, digest, named
from ...federated.parallel import Workers
from ...federated.participants import Samples
from ...federated.parties import Parties, Simulation
from ...federated.received import Received
from ...federated.scores import Scores, scores
from ...federated.training import features
from ...federated.turns import Turns, joined
from ...federated.watch import Watch
from ...session import S
from .ask import Panel, SimulatedPanel, Voter
from .asking import Asking
from .plan import Forecast, Plan, forecast, plan, validated
from .report import Record, Result, summary
from .settings import Party, Settings, check, check_apart
from .spending import check_spent, organisations


class CaPC:
    """Confidential and private collaborative learning among parties with models of their own.

    Args:
        parties: each with private data and an untrained model; those with a pool ask about it, one after another.
        test: images and labels that accuracies are measured on.
        classes: how many; the same for all.
        settings: see `Settings`.
        out: a folder for checkpoints; a run that was stopped goes on from there. None keeps nothing.
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
        local: str | Path | None = None,
        workers: Workers | None = None,
        together: Parties | None = None,
        own: int | None = None,
    ):
        self.together = together or Simulation()
        mine = {party.name: self.together.present(party.name) for party in parties}
        self.apart = not (all(mine.values()) and self.together.present(S.name))
        self.parties = [party if mine[party.name] else party.elsewhere() for party in parties]
        self.mine, self.test, self.classes = [p for p in self.parties if mine[p.name]], test, classes
        self.settings, self.workers = settings or Settings(), workers or Workers()
        self._own = self.settings.seed if own is None else own
        if self.apart:
            check_apart(self.parties, self.settings, self.workers.count)
        check(self.parties, test, classes, self.settings)
        self.querying = [party for party in self.parties if len(party.questions)]
        for party in self.querying:
            plan(self.parties, party, classes, self.settings)
        self.folder = RunFolder(out)
        people = {party.name: party.fingerprint() for party in self.parties}
        known = self.settings.as_dict()
        alone = {"local": known["local"], "seed": known["seed"], "parties": people}
        self.folder.claim({**known, "parties": people, "test": digest(*test)})
        if self.apart:
            alone |= {"own": self._own}
        self.local = (RunFolder(local) if local else self.folder.inside("local")).inside(named(alone))
        self.local.claim(alone)
        self.forecasts: dict[str, Forecast] = {}
        self.plans: dict[str, Plan] = {}
        self.records: dict[str, Record] = {}

    def run(self, watch: Watch | None = None) -> Result:
        """Everything, or what of it is not in `out` yet.

        Raises:
            TooFewVotersError: so many parties were lost that a query had to be refused. What was answered is kept.
            BudgetExhaustedError: an organisation's own budget affords no query more; before any training. Apart, at
                the party whose it is and at one that got no answer for it, when all turns are over.
            BudgetFileError: such a budget cannot be read, is another run's just now, or lacks a charge.
            NetworkError: a party was lost. What was answered is kept; nothing is charged twice when all start again.
        """
        watch = watch or Watch()
        with organisations(self.settings, self.querying, self.mine) as books:
            return self._run(watch, books)

    def _run(self, watch: Watch, books: Mapping[str, BudgetFile]) -> Result:
        asks = [party for party in self.querying if self.together.present(party.name)]
        watch.begins(1 + len(asks))
        if new := [owner for owner, file in books.items() if file.new]:
            watch.warn(f"started a new budget for {', '.join(new)}: nothing that they answered before is in it")
        for party in asks:
            self._forecast(party, watch)
        if not self.apart:
            fresh = [party.name for party in asks if self.folder.record(f"budget/{party.name}") is None]
            owners = {party.name: party.owner for party in self.parties}
            check_spent({name: self.plans[name] for name in fresh}, owners, books)
        models = self._local(watch)
        watch.finished("local", None)
        waiting = [party for party in asks if self.folder.record(f"after/{party.name}") is None]
        if not books and not self.apart:  # which one process has
            self.workers.ahead(waiting, functools.partial(self._one_ahead, models), self.folder)
        asking = self._turns(models, watch, books) if self.apart else self._asking(models, self.folder, books)
        for party in asks:
            if not self.apart:
                self._ask(party, models, self.folder, watch, asking)
            self._retrain(party, self.records[party.name], self.folder, watch)
            watch.finished(party.name, self.records[party.name])
        spent = {owner: file.budget for owner, file in books.items()}
        return Result(self.parties, self.classes, self.settings, self.records, self.forecasts, spent, self.apart)

    def _turns(self, models: dict[str, Any], watch: Watch, books: Mapping[str, BudgetFile]) -> Asking:
        """All askers, each here or elsewhere; retraining waits until nobody waits for this party."""
        names, said = [party.name for party in self.parties], self._agreed()
        with joined(names, self.together, label="capc", agreed=said) as turns:
            asking = self._asking(models, self.folder, books, turns)
            for party in self.querying:
                if self.together.present(party.name):
                    self._ask(party, models, self.folder, watch, asking)
                else:
                    asking.follow(party, watch)
        if asking.refusals and not any(len(record.asked) for record in self.records.values()):
            raise asking.refusals[0]
        for refusal in asking.refusals:
            watch.warn(str(refusal))
        return asking

    def so_far(self) -> Table:
        """The querying parties as far as they have come."""
        return summary(self.records.values())

    def estimate(self) -> Estimate | None:
        """What is left: training, from a part of it; asking, from a few queries to each architecture. None apart."""
        if self.apart:
            return None
        tasks = [task for group in self._left() for task in group]
        total = Estimate(seconds_of_all(tasks, self.settings.local) if tasks else 0.0)
        costs: dict[str, tuple[Estimate, Estimate]] = {}
        for party in self.querying:
            if self.folder.record(f"after/{party.name}") is not None:
                continue
            planned = plan(self.parties, party, self.classes, self.settings)
            # A plan is made when the asker has looked at its own data; until then it may be the whole pool.
            count = self.settings.queries or len(party.questions) if self.settings.planned else planned.queries
            more = 1 + count / len(party.images)
            own = seconds_of_all([Task(party.name, party.model, party.images, party.labels)], self.settings.local)
            total += Estimate(own) * (more + 4)  # cross-validation: five models of four fifths
            for other in self.parties:
                if other.owner != party.owner and self._secure and isinstance(other.model, nn.Module):
                    key = str(other.model)
                    if key not in costs:
                        costs[key] = self._asked(other, party, planned)
                    session, query = costs[key]
                    total += session + query * count
        return total

    @property
    def _secure(self) -> bool:
        return self.settings.inference != "simulated" and self.settings.control is None

    def _asked(self, voter: Party, party: Party, planned: Plan, rows: int = 4) -> tuple[Estimate, Estimate]:
        """What a session with this party's model and then each query take, measured on black images."""
        how, one = self.settings, [Voter(voter.name, copy.deepcopy(voter.model).eval())]
        panel = Panel(
            one, self.classes, inference=how.inference, argmax=how.argmax, frac_bits=how.frac_bits,
            sample=party.questions[:1], batch=how.chunk,
        )  # fmt: skip
        found = []
        black = torch.zeros_like(party.questions[:1]).repeat(rows, *[1] * (party.questions.dim() - 1))
        for _ in range(2):
            with Received() as received:
                start = time.perf_counter()
                panel.ask(black, planned.mechanism)
                found.append(Estimate(time.perf_counter() - start, sum(received.bytes.values())))
        first, later = found
        return first + later * -1.0, later * (1 / rows)

    # Before anything is asked.

    def _forecast(self, party: Party, watch: Watch) -> None:
        """What the asker's own data say of its model, and so of what it is to ask; a warning where that is little."""
        name, how = f"validated-{party.name}", self.settings
        kept = self.local.record(name)
        if kept is None:
            kept = {"own": validated(party, how, self._own)}
            self.local.keep(name, record=kept)
        believed = Forecast(kept["own"], 0.0)
        planned = plan(self.parties, party, self.classes, how, believed)
        self.plans[party.name] = planned
        self.forecasts[party.name] = forecast(planned, self.classes, kept["own"], how)
        if how.control is None and (warning := self.forecasts[party.name].warning(party.name)):
            watch.warn(warning)

    def _left(self) -> list[list[Task]]:
        """Groups of models that are not trained yet; what scikit-learn fits is not kept, and fitted each time."""
        tasks = [Task(party.name, party.model, party.images, party.labels) for party in self.mine]
        groups = grouped(tasks, self.settings.local)
        return [group for group in groups if self.local.record(group[0].name) is None]

    def _local(self, watch: Watch) -> dict[str, Any]:
        """All parties train on their own data."""
        tick = watch.step("local training", len(self.mine))
        left = [group for group in self._left() if isinstance(group[0].model, nn.Module)]
        self.workers.ahead(left, self._group, self.local)
        models: dict[str, Any] = {}
        for group in grouped([Task(p.name, p.model, p.images, p.labels) for p in self.mine], self.settings.local):
            kept = self.local.tensors(group[0].name)
            if kept is None:
                models.update(self._group(group, self.local))
            else:
                for task in group:
                    models[task.name] = _loaded(task.model, kept[task.name])
            tick(len(group))
        return models

    def _group(self, group: list[Task], folder: RunFolder) -> dict[str, Any]:
        models = train_group(group, self.settings.local, derive(self._own, "local"))
        if isinstance(group[0].model, nn.Module):
            states = {name: model.state_dict() for name, model in models.items()}
            folder.keep(group[0].name, states, {"models": len(states)})
        return models

    # One querying party.

    def _one_ahead(self, models: dict[str, Any], party: Party, folder: RunFolder) -> None:
        """What a worker does for a querying party."""
        self._ask(party, models, folder, Watch(), self._asking(models, folder, {}))
        self._retrain(party, self.records[party.name], folder, Watch())

    def _asking(
        self, models: dict[str, Any], folder: RunFolder, books: Mapping[str, BudgetFile], turns: Turns | None = None
    ) -> Asking:
        how, said = self.settings, self._agreed() if turns else ""
        return Asking(self.parties, self.classes, how, models, books, folder, self.together, turns, said)

    def _agreed(self) -> str:
        """What all parties have to agree on; where and how large an organisation's budget is, is its own."""
        how = {n: v for n, v in self.settings.as_dict().items() if n not in ("budgets", "budget_epsilon")}
        known = [[p.name, p.owner, len(p.images), p.shape, len(p.questions), str(p.model)] for p in self.parties]
        return json.dumps([how, known, self.classes])

    def _queries(self, party: Party, model: Any, count: int) -> torch.Tensor:
        """Indices of the pool, chosen by the party's own model (appendix C)."""
        kind = self.settings.selection
        needs = NEEDS[kind]
        inner = lambda images: features(model, images) if isinstance(model, nn.Module) else images.flatten(1)
        return select(
            kind,
            count,
            size=len(party.questions),
            logits=logits_of(model, party.questions) if "logits" in needs else None,
            features=inner(party.questions) if "features" in needs else None,
            known=inner(party.images) if kind == "kcenter" else None,
            seed=derive(self._own, party.name, "select"),
        )

    def _ask(self, party: Party, models: dict[str, Any], folder: RunFolder, watch: Watch, asking: Asking) -> None:
        """Its queries, answered."""
        how, planned, own = self.settings, self.plans[party.name], models[party.name]
        chosen, mechanism = self._queries(party, own, planned.queries), planned.mechanism
        budget = Budget(how.epsilon, how.delta)
        record = Record(party.name, party.architecture, mechanism, budget, self._scores(own), truth=party.truth)
        self.records[party.name] = record
        if how.control is not None:
            self._control(party, record, planned, chosen, models)
        else:
            asking.ask(party, planned, chosen, record, watch)

    def _control(self, party: Party, record: Record, planned: Plan, chosen: torch.Tensor, models: dict) -> None:
        """What stands in the answers' place where nobody is asked; nothing is spent."""
        asked, control = party.questions[chosen], self.settings.control
        if control == "longer":
            return
        if control == "true-labels":
            labels = party.truth[chosen] if party.truth is not None else chosen
        elif control == "own-labels":
            labels = answer_of(models[party.name], asked)
        else:
            panel = SimulatedPanel([Voter(name, models[name]) for name in planned.voters], self.classes)
            labels = panel.votes(asked).argmax(1)
        record.add(chosen, labels, None)

    def _retrain(self, party: Party, record: Record, folder: RunFolder, watch: Watch) -> None:
        """From scratch, on the private data and the labelled queries."""
        kept, name = folder.record(f"after/{party.name}"), f"after/{party.name}"
        if kept is not None:
            record.after, record.model = Scores.from_dict(kept), _loaded(party.model, folder.tensors(name))
            return
        if self.settings.control == "longer":
            count = self.plans[party.name].queries
            again = torch.arange(count) % len(party.images)
            images, labels = party.images[again], party.labels[again]
        else:
            known = record.labels >= 0
            images, labels = party.questions[record.asked[known]], record.labels[known]
        task = Task(party.name, party.model, torch.cat((party.images, images)), torch.cat((party.labels, labels)))
        tick = watch.step(f"{party.name}: retraining", 1)
        (model,) = train_all([task], self.settings.local, derive(self._own, "retraining"), tick).values()
        record.after, record.model = self._scores(model), model
        if isinstance(model, nn.Module):
            folder.keep(name, model.state_dict(), record.after.as_dict())

    def _scores(self, model: Any) -> Scores:
        """On the test set."""
        images, labels = self.test
        return scores(answer_of(model, images), labels, self.classes)


def _loaded(model: nn.Module, state: dict) -> nn.Module:
    """A copy with these weights, in evaluation mode."""
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model.eval()
