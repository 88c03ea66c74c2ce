"""Before anything is asked: the mechanism that a budget allows, how many queries, and what answers to expect.

Nobody knows the votes before they are counted, and to look at them would cost privacy (docs/privacy.md). A forecast is
made of what the asker knows: how many vote, how good its own model is on data that it was not trained on, and two
assumptions that are settings, the voters' accuracy and the correlation between them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...data.seeds import derive, generator
from ...dp import (
    MECHANISMS,
    Budget,
    BudgetExhaustedError,
    BudgetFile,
    BudgetFileError,
    ConfidentGNMax,
    GNMax,
    Mechanism,
    NoisyMax,
    PrivacyError,
    epsilon_for,
    queries_for,
    reachable_epsilon,
    scale_for,
)
from ...dp.mechanisms import Drawn
from ...federated.errors import FederationError
from ...federated.folder import RunFolder
from ...federated.training import Task, answer_of, train_all
from .settings import Party, Settings, TooFewVotersError

FOLDS = 5
CHECKED = 2.0
"""How many times the answer's noise that of the check is, unless it is named."""


@dataclass(frozen=True)
class Plan:
    """What one querying party will do: so many queries of this mechanism to these parties."""

    mechanism: Mechanism
    queries: int
    voters: tuple[str, ...]


@dataclass(frozen=True)
class Forecast:
    """What an asker expects: the accuracy of its own model by cross-validation, and of the answers."""

    own: float
    vote: float

    @property
    def worse(self) -> bool:
        """Whether the answers are expected to be worse than the asker's own."""
        return self.vote < self.own

    def warning(self, name: str) -> str:
        """A sentence for people; empty where there is nothing to warn of."""
        if not self.worse:
            return ""
        return (
            f"{name}: the noisy vote is expected to be right in {100 * self.vote:.0f} % of its answers, and its own "
            f"model in {100 * self.own:.0f} %: it may well be worse afterwards. Ask fewer queries (--plan), find more "
            f"voters or allow a larger epsilon."
        )


def moved_by(parties: Sequence[Party], asking: Party, colluding: int) -> int:
    """Votes that C organisations together can move: the sum of the C largest numbers of models that answer."""
    owned: dict[str, int] = {}
    for party in parties:
        if party.owner != asking.owner:
            owned[party.owner] = owned.get(party.owner, 0) + 1
    return sum(sorted(owned.values(), reverse=True)[:colluding])


def plan(
    parties: Sequence[Party], asking: Party, classes: int, how: Settings, forecast: Forecast | None = None
) -> Plan:
    """The mechanism, from the budget, and how often it may be used.

    The organisation's own other models do not answer it: it has them already.

    Args:
        forecast: with it and `how.planned`, so many queries are taken as bring the most (`best`).

    Raises:
        TooFewVotersError: so few voters that a unanimous vote would drown; says which epsilon they could serve.
        PrivacyError: the budget does not allow a single query.
        FederationError: a selection that selects nothing.
    """
    voters = tuple(party.name for party in parties if party.owner != asking.owner)
    if len(voters) < how.least:
        raise TooFewVotersError(f"{asking.name} has {len(voters)} answering parties, and a query needs {how.least}")
    if how.threshold is not None and how.threshold > len(voters):
        raise TooFewVotersError(f"{len(voters)} answering parties have no {how.threshold} votes; lower the threshold")
    moved, size = moved_by(parties, asking, how.colluding), len(asking.questions)
    queries = min(how.queries or size, size)
    if how.planned:
        # Without a forecast, a single query: what is refused then is refused for any number.
        queries = 1 if forecast is None else best(queries, len(voters), classes, moved, how, forecast.own)
    mechanism = _mechanism(queries, moved, how)
    queries = min(queries, queries_for(mechanism, how.epsilon, how.delta))
    if not queries:
        raise PrivacyError(
            f"{how.noise} noise of scale {mechanism.scale:g} spends more than epsilon {how.epsilon:g} on the first "
            f"query ({epsilon_for(mechanism, 1, how.delta):.3f}); use a larger scale or budget"
        )
    chance = mechanism.unanimous(len(voters), classes)
    if chance < how.reliability:
        reach = reachable_epsilon(
            how.noise, len(voters), classes, how.delta, queries, moved=moved, reliability=how.reliability
        )
        could = f"reaches it from epsilon {reach:.2f} on" if reach else "never reaches it"
        raise TooFewVotersError(
            f"{len(voters)} answering parties are too few for {queries} queries within epsilon {how.epsilon:g}, delta "
            f"{how.delta:g}: at noise of scale {mechanism.scale:.2f} even a unanimous vote would come out with "
            f"probability {chance:.2f}, below {how.reliability:g}; this number of parties {could}; or ask fewer "
            f"queries, or find more parties"
        )
    if how.selection != "random" and queries == size:
        raise FederationError(
            f"{asking.name} asks about all {queries} images of its pool, so that '{how.selection}' chooses nothing; "
            f"ask fewer queries than that, half as many say, or take selection 'random'"
        )
    return Plan(mechanism, queries, voters)


def _mechanism(queries: int, moved: int, how: Settings) -> Mechanism:
    """With the noise that is named, or the least at which so many answered queries stay within the budget."""
    if how.threshold is None:
        scale = how.scale or scale_for(how.noise, how.epsilon, how.delta, queries, moved)
        return MECHANISMS[how.noise](scale, moved)
    if how.scale is None:
        # A check costs moved^2 / 2 sigma_1^2 where an answer costs moved^2 / sigma^2: both as one answer under less.
        alone = scale_for(how.noise, how.epsilon, how.delta, queries, moved)
        if how.check_scale is None:
            scale = alone * math.sqrt(1 + 1 / (2 * CHECKED**2))
        else:
            left = 1 / alone**2 - 1 / (2 * how.check_scale**2)
            if left <= 0:
                raise PrivacyError(f"checks under noise of scale {how.check_scale:g} alone spend the budget; use more")
            scale = left**-0.5
        scale = math.ceil(scale * 1024) / 1024
    else:
        scale = how.scale
    return ConfidentGNMax(how.threshold, how.check_scale or CHECKED * scale, GNMax(scale, moved))


def forecast(planned: Plan, classes: int, own: float, how: Settings) -> Forecast:
    """Of the answers of a plan."""
    mechanism = planned.mechanism.answer if isinstance(planned.mechanism, ConfidentGNMax) else planned.mechanism
    return Forecast(own, right(mechanism, len(planned.voters), classes, how.voter_accuracy or own, how.correlation))


def right(mechanism: NoisyMax, voters: int, classes: int, accuracy: float, correlation: float) -> float:
    """The probability of a right answer, if a voter is right with probability `accuracy`, and two of them together as
    `correlation` says: the number of right votes is beta-binomial. Half of the wrong votes are for one other class, the
    rest is spread.
    """
    from scipy.stats import betabinom

    accuracy = min(max(accuracy, 1e-3), 1 - 1e-3)
    rest = 1 / correlation - 1
    chances = betabinom.pmf(range(voters + 1), voters, accuracy * rest, (1 - accuracy) * rest)
    total, weight = 0.0, 0.0
    for count, chance in enumerate(chances):
        if chance < 1e-4:
            continue
        weight += chance
        total += chance * mechanism.distribution(_votes(count, voters - count, classes))[0]
    return float(total / weight)


def _votes(right: int, wrong: int, classes: int) -> list[int]:
    """Right votes first, and then the wrong ones."""
    others = classes - 2
    one = math.ceil(wrong / 2) if others else wrong
    return [right, one, *((wrong - one + i) // others for i in range(others))]


def best(most: int, voters: int, classes: int, moved: int, how: Settings, own: float) -> int:
    """The number of queries, up to `most`, with the most right answers beyond those of the asker's own model.

    n queries within epsilon need a noise that grows with n; n (Pr[right] - own) first grows with n and then falls. On
    a grid of ratio 1.2. Where no number promises anything, it is the one that loses least.
    """
    found: dict[int, float] = {}
    count = 1.0
    while (n := min(round(count), most)) not in found or n < most:
        if n not in found:
            mechanism = MECHANISMS[how.noise](scale_for(how.noise, how.epsilon, how.delta, n, moved), moved)
            chance = right(mechanism, voters, classes, how.voter_accuracy or own, how.correlation)
            found[n] = n * (chance - own)
        count *= 1.2
    return max(found, key=lambda n: found[n])


def validated(party: Party, how: Settings, own: int | None = None) -> float:
    """The accuracy of the party's model by cross-validation on its own data: each fifth by a model of the others.

    Args:
        own: seed of the fifths and of the training; that of the settings unless given.
    """
    own = how.seed if own is None else own
    count = min(FOLDS, len(party.images))
    if count < 2:
        return 0.0
    order = torch.randperm(len(party.images), generator=generator(own, party.name, "folds"))
    folds = [order[i::count] for i in range(count)]
    tasks = [
        Task(f"{party.name}-{i}", party.model, party.images[kept], party.labels[kept])
        for i in range(count)
        for kept in [torch.cat([fold for k, fold in enumerate(folds) if k != i])]
    ]
    models = train_all(tasks, how.local, derive(own, party.name, "validation"))
    hits = [
        int((answer_of(models[task.name], party.images[fold]) == party.labels[fold]).sum())
        for task, fold in zip(tasks, folds, strict=True)
    ]
    return sum(hits) / len(order)


# What one querying party spends: its own budget of the run, and the lasting ones of the organisations that answer it.
#
# A question is a chunk of queries that are asked at once. It has an identity, its mark, from before anybody is charged
# until its labels are on disk, and is charged once however often it has to be asked:
#
#     1. budget/PARTY.json       the mark and the size of the question
#     2. the organisations' own  each with that mark, which none takes twice
#     3. budget/PARTY.json       the party's own charge; from here on the answers count as given
#     4. noise/PARTY-NUMBER.pt   what the guardian has drawn for the mark
#     5. the asking, and the answers on disk
#
# A run that goes on between 1 and 5 asks under the same mark. Whoever paid does not pay again, and the answers have the
# noise of the first time, so that whoever heard both has heard one.


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
