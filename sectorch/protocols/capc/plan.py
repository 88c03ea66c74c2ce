"""Before anything is asked: the mechanism that a budget allows, how many queries, and what answers to expect.

Nobody knows the votes before they are counted, and to look at them would cost privacy (docs/privacy.md). A forecast is
made of what the asker knows: how many vote, how good its own model is on data that it was not trained on, and two
assumptions that are settings, the voters' accuracy and the correlation between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...data.seeds import derive, generator
from ...dp import (
    MECHANISMS,
    BudgetFile,
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
from ...errors import FederationError
from ...federated.run import estimated_by
from ...federated.training import Task, Training, answer_of, seconds_of_all, train_all
from ...federated.watch import Estimate
from .settings import Party, Settings, TooFewVotersError
from .votes import unanimous_votes

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
    """What an asker expects: the accuracy of its own model by cross-validation, and of the answers (None: of a vote of
    the user's own nothing is known)."""

    own: float
    vote: float | None = None

    @property
    def worse(self) -> bool:
        """Whether the answers are expected to be worse than the asker's own."""
        return self.vote is not None and self.vote < self.own

    def warning(self, name: str) -> str:
        """A sentence for people; empty where there is nothing to warn of."""
        if self.vote is None or not self.worse:
            return ""
        return (
            f"{name}: the noisy vote is expected to be right in {100 * self.vote:.0f} % of its answers, and its own "
            f"model in {100 * self.own:.0f} %: it may well be worse afterwards. Ask fewer queries (--plan), find more "
            f"voters or allow a larger epsilon."
        )


def moved_by(parties: Sequence[Party], asking: Party, colluding: int) -> int:
    """Votes that C organisations together can move: the sum of the C largest numbers of models that answer."""
    models = Counter(party.owner for party in parties if party.owner != asking.owner)
    return sum(count for _, count in models.most_common(colluding))


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
    votes = unanimous_votes(voters, classes, how)
    if how.threshold is not None and how.threshold > int(votes.max()):
        raise TooFewVotersError(f"{len(voters)} answering parties have no {how.threshold} votes; lower the threshold")
    moved, size = how.ballot_votes * moved_by(parties, asking, how.colluding), len(asking.questions)
    queries = min(how.queries or size, size)
    if how.planned:
        # Without a forecast, a single query: what is refused then is refused for any number.
        queries = 1 if forecast is None else best(queries, len(voters), classes, moved, how, forecast.own)
    mechanism = _mechanism(queries, moved, how)
    queries = min(queries, queries_for(mechanism, how.epsilon, how.delta))
    law = how.noise if isinstance(how.noise, str) else type(how.noise).__name__
    if mechanism.moved < moved:
        raise PrivacyError(
            f"{law} is for {mechanism.moved} votes that an organisation moves, and here it moves {moved}"
        )
    if not queries:
        raise PrivacyError(
            f"{law} noise of scale {mechanism.scale:g} spends more than epsilon {how.epsilon:g} on the first "
            f"query ({epsilon_for(mechanism, 1, how.delta):.3f}); use a larger scale or budget"
        )
    chance = unanimous(mechanism, votes)
    if chance < how.reliability:
        could = ""
        if law == how.noise and how.vote == "argmax":
            known = law, len(voters), classes, how.delta, queries
            reach = reachable_epsilon(*known, moved=moved, reliability=how.reliability)
            could = f"reaches it from epsilon {reach:.2f} on" if reach else "never reaches it"
            could = f"this number of parties {could}; or "
        raise TooFewVotersError(
            f"{len(voters)} answering parties are too few for {queries} queries within epsilon {how.epsilon:g}, delta "
            f"{how.delta:g}: at noise of scale {mechanism.scale:.2f} even a unanimous vote would come out with "
            f"probability {chance:.2f}, below {how.reliability:g}; {could}ask fewer queries, or find more parties"
        )
    if how.selection != "random" and queries == size:
        raise FederationError(
            f"{asking.name} asks about all {queries} images of its pool, so that '{how.selection}' chooses nothing; "
            f"ask fewer queries than that, half as many say, or take selection 'random'"
        )
    return Plan(mechanism, queries, voters)


def unanimous(mechanism: Mechanism, votes: torch.Tensor) -> float:
    """Pr[a class with the most of these votes is returned]: how useful the mechanism can be at best."""
    if isinstance(mechanism, ConfidentGNMax):
        return math.exp(mechanism.log_answered(votes)) * unanimous(mechanism.answer, votes)
    return float(mechanism.distribution(votes)[(votes == votes.max()).numpy()].sum())


def _mechanism(queries: int, moved: int, how: Settings) -> Mechanism:
    """With the noise that is named, or the least at which so many answered queries stay within the budget."""
    if not isinstance(how.noise, str):
        return how.noise
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
    if callable(how.vote):
        return Forecast(own)
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
            law = str(how.noise)
            mechanism = MECHANISMS[law](scale_for(law, how.epsilon, how.delta, n, moved), moved)
            chance = right(mechanism, voters, classes, how.voter_accuracy or own, how.correlation)
            found[n] = n * (chance - own)
        count *= 1.2
    return max(found, key=lambda n: found[n])


def _validation_time(party: Party, how: Training, seed: int) -> Estimate:
    """Five models of four fifths."""
    return Estimate((FOLDS - 1) * seconds_of_all([Task(party.name, party.model, party.images, party.labels)], how))


@estimated_by(_validation_time)
def validated(party: Party, how: Training, seed: int) -> float:
    """The accuracy of the party's model by cross-validation on its own data: each fifth by a model of the others.

    Args:
        seed: of the fifths and of the training.
    """
    count = min(FOLDS, len(party.images))
    if count < 2:
        return 0.0
    order = torch.randperm(len(party.images), generator=generator(seed, party.name, "folds"))
    folds, tasks = [order[i::count] for i in range(count)], []
    for i in range(count):
        rest = torch.cat(folds[:i] + folds[i + 1 :])
        tasks.append(Task(f"{party.name}-{i}", party.model, party.images[rest], party.labels[rest]))
    models = train_all(tasks, how, derive(seed, party.name, "validation"))
    hits = [
        int((answer_of(models[task.name], party.images[fold]) == party.labels[fold]).sum())
        for task, fold in zip(tasks, folds, strict=True)
    ]
    return sum(hits) / len(order)


# The budgets of the organisations that answer.


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
            for owner in sorted({a.owner for q in asking for a in answering if a.owner != q.owner}):
                found[owner] = stack.enter_context(how.budget_file(owner))
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
