"""The questions of a querying party: agreed on by all, paid by the organisations that answer, and asked once.

A question is a chunk of queries that are asked at once. It has a mark from before anybody is charged until its labels
are on disk, and is charged once however often it has to be asked:

    1. questions/ASKER-NUMBER.json   at the asker: its mark and size
    2. the organisations' budgets    each with that mark, which none takes twice
    3. ASKER/NUMBER/noise-*.pt       at the guardian: what it has drawn for the mark, until the next question comes
    4. ASKER/NUMBER/labels-*.pt      at the asker

A run that goes on between 1 and 4 asks under the same mark. Whoever paid does not pay again, and the answers have the
noise of the first time, so that whoever heard both has heard one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...choreography import Located, Message, Net, protocol
from ...dp import Budget, BudgetExhaustedError, BudgetFile, BudgetFileError, ConfidentGNMax
from ...errors import FrameError
from ...federated.parties import TURN, Turns
from ...federated.run import Held, Run
from .plan import Plan, plan
from .settings import Party, Settings

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


@dataclass(frozen=True)
class Question:
    """Queries that are asked at once: the how manieth of their party's, a name that no other has, and how many."""

    number: int
    mark: str
    queries: int


NONE = "0" * 32
"""The mark of no question: the asker asks no more."""


def following(turns: Turns | None, asker: str, question: Question | None, planned: int = 0) -> tuple[Question, int]:
    """The asker's next question, as everybody hears it, and how many queries it will ask in all.

    Args:
        turns: where parties are elsewhere.
        question: at the asker; None elsewhere. One of no queries says that it asks no more.

    Raises:
        FrameError: the asker says what is no question.
    """
    if turns is None and question is not None:
        return question, planned
    said = None
    if question is not None:
        mark = bytes.fromhex(question.mark)
        words = [int.from_bytes(mark[i : i + 8], "big", signed=True) for i in (0, 8)]
        said = torch.tensor([planned, question.number, question.queries, *words])
    if turns is None:
        raise FrameError(f"{asker} is elsewhere, and there are no turns")
    planned, number, queries, *words = turns.hear(asker, said, 5, tell, told).tolist()
    if not (0 <= number < 1 << 31 and 0 <= queries <= planned < 1 << 31):
        raise FrameError(f"{asker} asks question {number} of {queries} queries out of {planned}")
    mark = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return Question(number, mark.hex(), queries), planned


def all_afford(turns: Turns | None, own: Mapping[str, int]) -> dict[str, int]:
    """How many of the queries each party affords, as everybody hears it.

    Args:
        own: of the parties that are here.
    """
    if turns is None:
        return dict(own)
    counts = turns.hear_all({name: torch.tensor([count]) for name, count in own.items()}, 1, affords, afforded)
    return {name: max(0, int(count)) for name, count in counts.items()}


class Questions:
    """One querying party's questions, as every process of a run goes through them.

    Args:
        planned: at the asker; elsewhere it follows from the number of queries that the asker says.
        books: the budgets of the organisations that are here.
        agreed: what all parties agree on; a charge is for a question of that run.

    Attributes:
        asked: queries so far.
        stopped: why the asker asks no more than these, once it does not; a run that goes on later stays stopped.
        refusals: of organisations that are here, what a budget did not afford: not one query.

    Raises:
        BudgetFileError: a budget lacks a charge of this run: it is an older copy, or was started anew.
    """

    def __init__(
        self, run: Run, parties: Iterable[Party], asker: Party, planned: Plan | None, classes: int, how: Settings,
        books: Mapping[str, BudgetFile], agreed: str,
    ):  # fmt: skip
        self._run, self._parties, self.asker, self._plan, self._classes = run, list(parties), asker, planned, classes
        self._how, self._books, self._agreed = how, books, agreed
        self._here, self._total = run.present(asker.name), planned.queries if planned else 0
        self._budget, self.asked, self.stopped, self._number = Budget(how.epsilon, how.delta), 0, "", 0
        self.refusals: list[BudgetExhaustedError] = []
        for line in run.folder.lines("paid"):
            file = books.get(line["owner"])
            if file is not None and not file.holds(line["mark"]):
                raise BudgetFileError(
                    f"the budget {file.path} lacks a charge of this run; put back a copy that lacks none"
                )

    def __iter__(self) -> Iterator[tuple[int, int, int, str]]:
        """Number, first query, size and mark of each question, when everybody has agreed to it."""
        while (found := self._next()) is not None:
            yield found

    def _next(self) -> tuple[int, int, int, str] | None:
        """The next question; None where there is none.

        Raises:
            FrameError: the asker says what it did not plan.
        """
        own = self._own() if self._here else None
        if self._run.dry:
            return None if own is None or not own.queries else self._taken(own)
        question, self._total = following(self._run.turns, self.asker.name, own, self._total)
        self._run.folder.drop(f"{self.asker.name}/{question.number - 1}/noise-*")  # its labels are on the asker's disk
        if not question.queries:
            return None
        if self._plan is None:
            how = replace(self._how, planned=False, queries=self._total)
            self._plan = plan(self._parties, self.asker, self._classes, how)
        if question.number != self._number:
            raise FrameError(
                f"{self.asker.name} asks question {question.number} in one run, where {self._number} is next"
            )
        if question.queries > min(self._how.chunk, self.plan.queries - self.asked):
            raise FrameError(f"{self.asker.name} asks {question.queries} queries at once, which is no chunk")
        mark = self._bound(question)
        counts = all_afford(self._run.turns, self._affordable(question, mark))
        count = min([question.queries, *counts.values()])
        if self._here and count < question.queries:
            self._stop(count, counts)
        if not count:
            return None
        question = replace(question, queries=count)
        if self._here:
            self._run.folder.keep(self._file(), record=vars(question))
        return self._taken(question)

    def budgets(self) -> list[Budget | BudgetFile]:
        """What a question is charged to: its asker's budget of the run, and those of the answering organisations."""
        if self._run.dry:
            return []
        return [*self._files(), *([self._budget] if self._here else [])]

    def answered(self, labels: Held, mark: str) -> None:
        """Note what was paid; at the asker, give back what queries without an answer did not cost."""
        folder = self._run.folder
        paid = {(line["owner"], line["mark"]) for line in folder.lines("paid")}
        for owner in self._owners():
            if (owner, mark) not in paid:
                folder.append("paid", {"owner": owner, "mark": mark})
        mechanism = self.plan.mechanism
        if not labels.present or self._run.dry or not isinstance(mechanism, ConfidentGNMax):
            return
        if unanswered := int((labels.value < 0).sum()):
            curve = unanswered * mechanism.answer.curve
            self._budget.credit(curve)
            for file in self._files() if self._run.turns is None else ():
                file.credit(curve, mark)

    def _owners(self) -> list[str]:
        """The organisations that answer, with a budget here."""
        here = {p.owner for p in self._parties if p.name in self.plan.voters and self._run.present(p.name)}
        return [] if self._run.dry else sorted(here & self._books.keys())

    def _files(self) -> list[BudgetFile]:
        return [self._books[owner] for owner in self._owners()]

    @property
    def plan(self) -> Plan:
        """The asker's, or what follows from the number of queries that it says."""
        if self._plan is None:
            raise FrameError(f"{self.asker.name} has asked nothing yet")
        return self._plan

    @property
    def curve(self) -> np.ndarray:
        """What the asker has spent in this run."""
        return self._budget.curve

    def _own(self) -> Question:
        """At the asker: the question that was told before, or as many queries as its budget affords."""
        folder, curve = self._run.folder, self.plan.mechanism.curve
        self.stopped = self.stopped or (folder.record(f"questions/{self.asker.name}-stopped") or {}).get("text", "")
        kept = folder.record(self._file())
        if kept is not None:
            return Question(**kept)
        most = 0 if self.stopped else min(self._how.chunk, self.plan.queries - self.asked)
        count = most
        while count and not self._budget.affords(count * curve):
            count -= 1
        if count < most:
            self._stop(count, {})
        if not count:
            return Question(self._number, NONE, 0)
        made = Question(self._number, secrets.token_hex(16), count)
        if not self._run.dry:
            folder.keep(self._file(), record=vars(made))
        return made

    def _taken(self, question: Question) -> tuple[int, int, int, str]:
        start = self.asked
        self._number, self.asked = self._number + 1, self.asked + question.queries
        return question.number, start, question.queries, self._bound(question)

    def _bound(self, question: Question) -> str:
        """The mark of the question of this run; under it nothing else is answered for nothing."""
        said = json.dumps([self._agreed, self.asker.name, question.number, question.mark])
        return hashlib.sha256(said.encode()).hexdigest()[:32]

    def _affordable(self, question: Question, mark: str) -> dict[str, int]:
        """Of each party that is here."""
        most, curve, found = question.queries, self.plan.mechanism.curve, {}
        for p in self._parties:
            if self._run.present(p.name):
                file = self._books.get(p.owner) if p.name in self.plan.voters else None
                found[p.name] = most if file is None else file.affordable(most, curve, mark)
                if file is not None and not found[p.name]:
                    try:
                        file.check(curve)
                    except BudgetExhaustedError as error:
                        self.refusals.append(error)
        return found

    def _stop(self, count: int, counts: Mapping[str, int]) -> None:
        """At the asker: no more than `count` further queries, in the words of the first budget that has no room."""
        self.stopped = self._lacking((count + 1) * self.plan.mechanism.curve, counts)
        if self._run.dry:
            return
        if self.asked + count:
            self._run.folder.keep(f"questions/{self.asker.name}-stopped", record={"text": self.stopped})
        else:
            self.refusals.append(BudgetExhaustedError(self.stopped))

    def _lacking(self, curve: np.ndarray, counts: Mapping[str, int]) -> str:
        for budget in (self._budget, *self._files()):
            try:
                budget.check(curve)
            except BudgetExhaustedError as error:
                return str(error)
        least = min(counts, key=lambda name: counts[name])
        return (
            f"{least} answers {counts[least] or 'none'} of the next queries of {self.asker.name}: its own budget, over "
            f"all runs and askers, affords no more; leave {least} out, ask less, or use more noise"
        )

    def _file(self) -> str:
        return f"questions/{self.asker.name}-{self._number}"
