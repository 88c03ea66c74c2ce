"""What one querying party spends: its own budget of the run, and the lasting ones of the organisations that answer it.

A question is a chunk of queries that are asked at once. It has an identity, its mark, from before anybody is charged
until its labels are on disk, and is charged once however often it has to be asked:

    1. budget/PARTY.json       the mark and the size of the question
    2. the organisations' own  each with that mark, which none takes twice
    3. budget/PARTY.json       the party's own charge; from here on the answers count as given
    4. noise/PARTY-NUMBER.pt   what the guardian has drawn for the mark
    5. the asking, and the answers on disk

A run that goes on between 1 and 5 asks under the same mark. Whoever paid does not pay again, and the answers have the
noise of the first time, so that whoever heard both has heard one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...dp import Budget, BudgetExhaustedError, BudgetFile, BudgetFileError, Mechanism
from ...dp.mechanisms import Drawn
from ...federated.folder import RunFolder
from .plan import Plan
from .settings import Party, Settings


@dataclass(frozen=True)
class Question:
    """Queries that are asked at once: the how manieth of their party's, a name that no other has, and how many."""

    number: int
    mark: str
    queries: int
    charged: bool = False


Others = Callable[[Question], Mapping[str, int]]
"""How many of a question's queries each party elsewhere affords."""


class Spending:
    """The budgets that answers to a querying party are charged to.

    `stopped` says why it spends no more, once it does not; a run that goes on later stays stopped.

    Args:
        name: the party's.
        budget: its own, of this run; takes up what the folder holds.
        lasting: of the organisations that answer it, where they are here.
        others: asks those that are not.

    Raises:
        BudgetFileError: an organisation's file lacks a charge of this run: it is an older copy, or was started anew.
    """

    def __init__(
        self, name: str, budget: Budget, lasting: Sequence[BudgetFile], folder: RunFolder,
        others: Others = lambda question: {},
    ):  # fmt: skip
        self.name, self.budget, self.lasting, self.folder, self._others = name, budget, lasting, folder, others
        kept = folder.record(f"budget/{name}") or {"curve": None, "paid": [], "next": None, "stopped": ""}
        if kept["curve"] is not None:
            budget.restore(np.asarray(kept["curve"]))
        self.paid, self.stopped = list(kept["paid"]), kept["stopped"]
        waiting = kept["next"]
        self._next = Question(**waiting) if waiting is not None and "number" in waiting else None
        for file in lasting:
            check_held(file, self.paid)

    def charge(self, number: int, most: int, curve: np.ndarray) -> Question:
        """A question of as many of so many queries as everybody affords; on disk before this returns it.

        Args:
            number: of the question, from 0. One that was charged and has no answers is the same question.

        Raises:
            BudgetExhaustedError: not one query, now or when the run was here before; nothing was spent.
        """
        before = self._next if self._next is not None and self._next.number == number else None
        if self.stopped and before is None:
            raise BudgetExhaustedError(self.stopped)
        asked = before or Question(number, secrets.token_hex(16), most)
        if before is None:
            self._keep(asked)
        fits = [file.affordable(asked.queries, curve, asked.mark) for file in self.lasting]
        if not asked.charged:
            fits.append(_affordable(self.budget, asked.queries, curve))
        asked = Question(number, asked.mark, min([asked.queries, *fits]), asked.charged)
        told = self._others(asked) if asked.queries else {}
        count = min([asked.queries, *told.values()])
        if not count:
            words = self.stopped or self._lacking(curve, told)
            self.stopped = words if self.paid else ""
            self._keep(None)
            self.stopped = words
            raise BudgetExhaustedError(words)
        self._keep(asked := Question(number, asked.mark, count, asked.charged))
        for file in self.lasting:
            file.charge(count * curve, asked.mark, self.name, count)
        if not asked.charged:
            self.budget.charge(count * curve)
            self.paid.append(asked.mark)
        if count < most:
            self.stopped = self.stopped or self._lacking(curve, told)
        self._keep(asked := Question(number, asked.mark, count, True))
        return asked

    def answered(self) -> None:
        """The answers are on disk: the question is not asked again."""
        self._keep(None)

    def credit(self, curve: np.ndarray) -> None:
        """Give back what a step turned out not to cost. Where a run dies in the middle, some of it stays charged."""
        self.budget.credit(curve)
        self._keep(self._next)
        for file in self.lasting:
            file.credit(curve)

    def _lacking(self, curve: np.ndarray, told: Mapping[str, int]) -> str:
        """The words of the first budget that does not afford one query more."""
        for budget in (self.budget, *self.lasting):
            try:
                budget.check(curve)
            except BudgetExhaustedError as error:
                return str(error)
        return _refused(self.name, told) if told else ""

    def _keep(self, question: Question | None) -> None:
        self._next = question
        record = {"epsilon": self.budget.spent, "curve": self.budget.curve.tolist(), "paid": self.paid}
        waiting = None if question is None else vars(question)
        self.folder.keep(f"budget/{self.name}", record={**record, "next": waiting, "stopped": self.stopped})


def _affordable(budget: Budget, most: int, curve: np.ndarray) -> int:
    while most and not budget.affords(most * curve):
        most -= 1
    return most


def _refused(asker: str, told: Mapping[str, int]) -> str:
    """Who of the others affords least, in words."""
    owner = min(told, key=lambda name: told[name])
    return (
        f"{owner} answers {told[owner] or 'none'} of the next queries of {asker}: its own budget, over all runs and "
        f"askers, affords no more; leave {owner} out, ask less, or use more noise"
    )


def check_held(file: BudgetFile, paid: Iterable[str]) -> None:
    """Whether a budget holds these charges.

    Raises:
        BudgetFileError: it is an older copy, or was started anew.
    """
    if not all(file.holds(mark) for mark in paid):
        raise BudgetFileError(f"the budget {file.path} lacks a charge of this run; put back a copy that lacks none")


def noise_of(question: Question, asker: str, mechanism: Mechanism, classes: int, folder: RunFolder) -> Drawn:
    """The guardian's noise for a question: drawn once, and on disk until the question is answered.

    Returns:
        of as many queries as the question has now, which may be fewer than when it was first asked.
    """
    forget_noise(asker, question.number, folder)
    name = f"noise/{asker}-{question.number}"
    wanted = {"mark": question.mark, "mechanism": repr(mechanism)}
    if folder.record(name) == wanted:
        return tuple(part[: question.queries] for part in folder.tensors(name))
    drawn = mechanism.draw(question.queries, classes)
    folder.keep(name, list(drawn), wanted)
    return drawn


def forget_noise(asker: str, answered: int, folder: RunFolder) -> None:
    """So many questions of a party are answered."""
    for number in range(answered):
        folder.drop(f"noise/{asker}-{number}.*")


@contextmanager
def organisations(
    how: Settings, asking: Iterable[Party], answering: Sequence[Party]
) -> Iterator[dict[str, BudgetFile]]:
    """The budget file of each organisation that may answer, locked; none where the settings name no folder.

    Raises:
        BudgetFileError: see `BudgetFile`; nothing was charged.
    """
    with ExitStack() as stack:
        found: dict[str, BudgetFile] = {}
        if how.budgets is not None and how.control is None:
            limit = None if how.budget_epsilon is None else (how.budget_epsilon, how.delta)
            owners = {a.owner for q in asking for a in answering if a.owner != q.owner}
            for owner in sorted(owners):
                found[owner] = stack.enter_context(BudgetFile(Path(how.budgets) / f"{owner}.json", limit))
        yield found


def check_spent(plans: Mapping[str, Plan], owners: Mapping[str, str], books: Mapping[str, BudgetFile]) -> None:
    """Whether each organisation could answer one query of each plan, before anything is trained.

    Args:
        plans: of the parties that have not asked yet.
        owners: of each answering party.

    Raises:
        BudgetExhaustedError: naming the first whose budget is too small; nothing was spent.
    """
    for owner, file in books.items():
        wanted = [p.mechanism.curve for p in plans.values() if owner in {owners[name] for name in p.voters}]
        if wanted:
            file.check(np.sum(wanted, axis=0))
