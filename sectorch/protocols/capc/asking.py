"""The questions of one querying party after another: asked, answered, or, elsewhere, followed (CaPC, 3.2 and 4.2)."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ...choreography.roles import STAR
from ...dp import BudgetExhaustedError, BudgetFile, ConfidentGNMax
from ...errors import FrameError
from ...federated.folder import RunFolder
from ...federated.parties import Parties
from ...federated.received import Received
from ...federated.turns import Turns
from ...federated.watch import Watch
from ...session import S
from .apart import all_afford, following
from .ask import Panel, SimulatedPanel, Voter
from .plan import Plan, plan
from .record import Record
from .settings import Party, Settings
from .spending import Question, Spending, check_held, forget_noise, noise_of


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
