"""CaPC from end to end (CaPC, 3.2 and 4.2): local models, queries within a budget, retraining from scratch."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ...choreography import Located, Message, Net, protocol
from ...choreography.roles import STAR
from ...data.seeds import derive
from ...data.selection import NEEDS, select
from ...dp import Budget, BudgetExhaustedError, BudgetFile, ConfidentGNMax
from ...errors import FrameError
from ...federated.folder import RunFolder, Workers, digest, named
from ...federated.outcome import Received, Scores, scores
from ...federated.participants import Samples
from ...federated.parties import TURN, Parties, Simulation, Turns, meet
from ...federated.training import Task, answer_of, features, grouped, logits_of, seconds_of_all, train_all, train_group
from ...federated.watch import Estimate, Watch
from ...session import S
from .ask import Panel, SimulatedPanel, Voter
from .plan import (
    Forecast,
    Plan,
    Question,
    Spending,
    check_held,
    check_spent,
    forecast,
    forget_noise,
    noise_of,
    organisations,
    plan,
    validated,
)
from .report import Record, Result, summary
from .settings import Party, Settings, check, check_apart

# Parties and the guardian in processes apart: which question is next, and whose budget affords it.


_NEXT = "which question of the asker is next: its number and mark, its queries, and how many it will ask in all"
_AFFORDS = "for how many of these queries the budget of an organisation has room"


@protocol("capc_turn", "CaPC, 3.2, step 1", [Message("question", "C", "S", "nothing", _NEXT)], roles=TURN)
def tell(net: Net, question: Located) -> Located:
    """The asker's next question, or that there is none, int64 [5]. Rounds 1, bytes 40."""
    return question.send(net.C, net.S, "question").at(net.S)


@protocol("capc_told", "CaPC, 3.2, step 1", [Message("question", "S", "C", "nothing", _NEXT)], roles=TURN)
def told(net: Net, question: Located) -> Located:
    """The same, to another party. Rounds 1, bytes 40."""
    return question.send(net.S, net.C, "question")


@protocol("capc_affords", "docs/capc.md", [Message("affords", "C", "S", "nothing", _AFFORDS)], roles=TURN)
def affords(net: Net, count: Located) -> Located:
    """What a party's budget affords of the question, int64 [1]. Rounds 1, bytes 8."""
    return count.send(net.C, net.S, "affords").at(net.S)


@protocol("capc_afforded", "docs/capc.md", [Message("afforded", "S", "C", "nothing", _AFFORDS)], roles=TURN)
def afforded(net: Net, counts: Located) -> Located:
    """What all budgets afford, int64 [parties], to each party. Rounds 1, bytes 8 a party."""
    return counts.send(net.S, net.C, "afforded")


def following(turns: Turns, asker: str, question: Question | None, planned: int = 0) -> tuple[Question, int]:
    """The asker's next question, as everybody hears it, and how many queries it will ask in all.

    Args:
        question: at the asker; None elsewhere. One of no queries says that it asks no more.

    Raises:
        FrameError: the asker says what is no question.
    """
    said = None
    if question is not None:
        mark = bytes.fromhex(question.mark)
        words = [int.from_bytes(mark[i : i + 8], "big", signed=True) for i in (0, 8)]
        said = torch.tensor([planned, question.number, question.queries, *words])
    planned, number, queries, *words = turns.hear(asker, said, 5, tell, told).tolist()
    if not (0 <= number < 1 << 31 and 0 <= queries <= planned < 1 << 31):
        raise FrameError(f"{asker} asks question {number} of {queries} queries out of {planned}")
    mark = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return Question(number, mark.hex(), queries), planned


def all_afford(turns: Turns, own: Mapping[str, int]) -> dict[str, int]:
    """How many of the queries each party affords, as everybody hears it.

    Args:
        own: of the parties that are here.
    """
    counts = turns.hear_all({name: torch.tensor([count]) for name, count in own.items()}, 1, affords, afforded)
    return {name: max(0, int(count)) for name, count in counts.items()}


# The questions of one querying party after another: asked, answered, or, elsewhere, followed (CaPC, 3.2 and 4.2).


class Asking:
    """What all turns have in common.

    Attributes:
        refusals: of the parties that are here, what a budget did not afford: not one query of theirs, or by theirs.

    Args:
        models: trained, of the parties that are here.
        books: the budgets of the organisations that are here.
        folder: where questions, noise and answers are kept.
        turns: where parties are elsewhere, how all hear of a question.
        agreed: what all agree on; a charge is for a question of that run.

    Raises:
        BudgetFileError: a budget lacks a charge of this run.
    """

    def __init__(
        self, parties: Sequence[Party], classes: int, settings: Settings, models: Mapping[str, Any],
        books: Mapping[str, BudgetFile], folder: RunFolder, together: Parties, turns: Turns | None = None,
        agreed: str = "",
    ):  # fmt: skip
        self.parties, self.classes, self.settings, self.models = parties, classes, settings, models
        self.books, self.folder, self.together, self.turns, self.agreed = books, folder, together, turns, agreed
        self.refusals: list[BudgetExhaustedError] = []
        for file in books.values() if turns else ():
            check_held(file, [line["mark"] for line in folder.lines("paid")])

    def ask(self, party: Party, planned: Plan, chosen: torch.Tensor, record: Record, watch: Watch) -> None:
        """A party that is here asks, in chunks, each charged before it is asked; the answers go into `record`."""
        how, mechanism, turns = self.settings, planned.mechanism, self.turns
        lasting = [] if turns else [file for owner, file in self.books.items() if owner != party.owner]
        told = functools.partial(self._told, turns, party, planned.queries) if turns else lambda question: {}
        spending = Spending(party.name, record.budget, lasting, self.folder, told)
        tick = watch.step(f"{party.name}: {planned.queries} queries to {len(planned.voters)} parties", planned.queries)
        number = 0
        with ExitStack() as stack:
            panel = functools.cache(lambda: self._panel(stack, party, planned))
            for piece in chosen.split(how.chunk):
                name = f"labels/{party.name}-{number}"
                answered, labels = self.folder.record(name), self.folder.tensors(name)
                if answered is None:
                    try:
                        question = spending.charge(number, len(piece), mechanism.curve)
                    except BudgetExhaustedError as error:
                        self.refusals += [] if number else [error]
                        break
                    queries = party.questions[piece[: question.queries]]
                    answered, labels = self._answer(panel(), party, planned, question, queries)
                    self.folder.keep(name, labels, answered)
                    unanswered = int((labels < 0).sum())
                    if unanswered and isinstance(mechanism, ConfidentGNMax):
                        spending.credit(unanswered * mechanism.answer.curve)
                    spending.answered()
                record.add(piece[: len(labels)], labels, answered)
                tick(len(labels))
                number += 1
            if turns:
                following(turns, party.name, Question(number, "0" * 32, 0), planned.queries)
        forget_noise(party.name, number, self.folder)
        record.stopped = spending.stopped

    def _told(self, turns: Turns, party: Party, planned: int, question: Question) -> dict[str, int]:
        """Everybody hears of the question, and the asker hears who affords it."""
        following(turns, party.name, question, planned)
        return all_afford(turns, {party.name: question.queries})

    def follow(self, party: Party, watch: Watch) -> None:
        """A party elsewhere asks: those who are here answer, add up, or hear of it.

        Raises:
            FrameError: it asks what it did not plan, or again what was answered: under a question's mark nobody pays
                twice, so that only a run that goes on may ask it again.
        """
        if self.turns is None:
            return
        tick, planned, last = watch.step(f"{party.name} asks", None), None, -1
        with ExitStack() as stack:
            panel = functools.cache(lambda: self._panel(stack, party, planned))
            while (heard := following(self.turns, party.name, None))[0].queries:
                question, most = heard
                if question.number <= last:
                    raise FrameError(f"{party.name} asks question {question.number} again in one run: {last} was last")
                last = question.number
                planned = planned or self._planned(party, most)
                if question.queries > min(self.settings.chunk, planned.queries):
                    raise FrameError(f"{party.name} asks {question.queries} queries at once, which is no chunk")
                account = _Account(self, party, planned, question)
                told = all_afford(self.turns, account.affords())
                self.refusals += account.refused()
                question = replace(question, queries=min([question.queries, *told.values()]))
                if question.queries:
                    account.pay(question.queries)
                    if self._takes_part(party, planned):
                        shape = (question.queries, *party.questions.shape[1:])
                        queries = torch.empty(shape, dtype=party.questions.dtype, device="meta")
                        self._answer(panel(), party, planned, question, queries)
                    tick(question.queries)
        if self.together.present(S.name):
            forget_noise(party.name, heard[0].number, self.folder)

    def _planned(self, party: Party, queries: int) -> Plan:
        """The plan of a party elsewhere, from the number of queries that it says."""
        return plan(self.parties, party, self.classes, replace(self.settings, planned=False, queries=queries))

    def _takes_part(self, party: Party, planned: Plan) -> bool:
        return any(self.together.present(name) for name in (party.name, *planned.voters, S.name))

    def _answer(
        self, panel: Panel, party: Party, planned: Plan, question: Question, queries: torch.Tensor
    ) -> tuple[dict, torch.Tensor]:
        """Whoever is here does its part of a question; the labels have a shape only where the asker is elsewhere."""
        drawn = None
        if self.together.present(S.name):
            drawn = noise_of(question, party.name, planned.mechanism, self.classes, self.folder)
        with Received() as received:
            answer = panel.ask(queries, planned.mechanism, self.settings.least, drawn)
        return dict(answer.as_dict(), received=received.rows()), answer.labels

    def _panel(self, stack: ExitStack, party: Party, planned: Plan | None) -> Panel:
        how, names = self.settings, () if planned is None else planned.voters
        voters = [Voter(name, self.models[name] if name in self.models else self._shapes(name)) for name in names]
        if how.inference == "simulated":
            return SimulatedPanel(voters, self.classes)
        cast, label = {"Q": party.name, "A": list(names), "S": S.name}, f"capc {party.name}"
        session = stack.enter_context(self.together.session(STAR, cast, label=label, agreed=self.agreed))
        return Panel(
            voters, self.classes, inference=how.inference, argmax=how.argmax, frac_bits=how.frac_bits,
            sample=party.questions[:1], batch=how.chunk, session=session,
        )  # fmt: skip

    def _shapes(self, name: str) -> Any:
        """The architecture of a party elsewhere."""
        return copy.deepcopy(next(p.model for p in self.parties if p.name == name)).to("meta").eval()


class _Account:
    """What the organisations that are here pay for one question of a party elsewhere: each once, whatever happens.

    The mark says which question of which asker in which run: under it nothing else is answered for nothing.
    """

    def __init__(self, asking: Asking, party: Party, planned: Plan, question: Question):
        said = json.dumps([asking.agreed, party.name, planned.queries, question.number, question.mark])
        self._mark = hashlib.sha256(said.encode()).hexdigest()[:32]
        self._folder, self._asker, self._question = asking.folder, party.name, question
        self._curve = planned.mechanism.curve
        self._here = [p for p in asking.parties if asking.together.present(p.name)]
        self._books = {
            p.name: asking.books[p.owner] for p in self._here if p.name in planned.voters and p.owner in asking.books
        }

    def affords(self) -> dict[str, int]:
        """Of each party that is here."""
        most = self._question.queries
        return {
            p.name: self._books[p.name].affordable(most, self._curve, self._mark) if p.name in self._books else most
            for p in self._here
        }

    def pay(self, queries: int) -> None:
        """On disk when this returns, and only then the votes are given."""
        for file in self._books.values():
            if not file.holds(self._mark):
                file.charge(queries * self._curve, self._mark, self._asker, queries)
                self._folder.append("paid", {"asker": self._asker, "queries": queries, "mark": self._mark})

    def refused(self) -> list[BudgetExhaustedError]:
        """The words of a budget that affords no query of this question."""
        found = []
        for file in self._books.values():
            if not file.affordable(1, self._curve, self._mark):
                try:
                    file.check(self._curve)
                except BudgetExhaustedError as error:
                    found.append(error)
        return found


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
        with meet(names, self.together, label="capc", agreed=said) as turns:
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
