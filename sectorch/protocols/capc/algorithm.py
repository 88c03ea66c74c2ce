"""CaPC, to be read beside the paper: steps 1 to 3 of section 3.2 (`label`), and the collaboration of 4.2 (`capc`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...data.seeds import derive
from ...data.selection import NEEDS, select
from ...dp import BudgetFile, Mechanism, charge
from ...dp.mechanisms import Drawn
from ...federated.outcome import scores
from ...federated.participants import Samples
from ...federated.parties import Parties
from ...federated.run import ABSENT, Held, Run, estimated_by, note, progress
from ...federated.shared_training import kept_halves, retrain_on_shares
from ...federated.training import Task, answer_of, features, local_models, logits_of, seconds_of_all, train_all
from ...federated.watch import Estimate
from ...session import S, Session
from ...tensor.holders import collect
from .plan import Plan
from .questions import Questions
from .settings import Party, Settings
from .votes import CONTROL


def label(
    panel: Any, queries: torch.Tensor, mechanism: Mechanism, least: int, noise: Drawn | None, opened: bool = True
) -> Any:
    """3.2: the labels of queries x of P_i*, which P_i* alone learns, and nobody anything else.

    Args:
        panel: the answering parties, an `ask.Panel`.
        opened: whether P_i* learns them; see `NoisyMax.release`.
    """
    ballots = []
    for voter in panel.there:  # 1: for each i != i*
        with panel.unless_lost(voter):
            logits = panel.logits(voter, queries)  # 1a: Enc(r_i)
            ballots.append(panel.ballot(voter, logits))  # 1b, 1c: s_i + s^_i = OneHot(argmax(r_i)); 2: s^_i to the PG
    panel.check_votes(len(ballots), least)
    votes = collect(ballots)  # 2: s is the sum of all s_i, s^ that of all s^_i
    return mechanism.release(votes, noise, engine=panel.argmax, party=panel.helper, opened=opened)  # 2: noise, 3: max


@dataclass(frozen=True)
class Inputs:
    """What a collaboration starts from: of parties elsewhere their sizes and architectures.

    Attributes:
        agreed: what all parties have to have alike.
        own: a party's own seed, of what it draws and nobody else needs to know.
        sitting: opens an asker's session with its voters (`ask.Sitting`).
        plans: of the querying parties that are here.
        books: the budgets of the organisations that are here.
    """

    parties: Sequence[Party]
    test: Held
    classes: int
    how: Settings
    agreed: str
    own: int
    sitting: Callable[[str, Settings, int, str], Any]
    plans: Mapping[str, Plan]
    books: Mapping[str, BudgetFile]

    def party(self, name: str) -> Party:
        return next(party for party in self.parties if party.name == name)


@dataclass
class Asked:
    """What one querying party did, with its results at that party."""

    plan: Plan | None
    before: Held
    chosen: Held | None = None
    labels: list[Held] = field(default_factory=list)
    count: int = 0
    curve: Any = None
    stopped: str = ""
    refusals: Sequence[Exception] = ()
    model: Held | None = None
    after: Held | None = None


def capc(run: Run, given: Inputs) -> dict[str, Asked]:
    """4.2, Collaboration: what each querying party did, in the end with its model."""
    askers = [party.name for party in given.parties if len(party.questions)]
    models = local_models(run, given.parties, given.how.local, derive(given.own, "local"))  # "local models for all"
    if not (given.books or run.apart):
        each: Any = run.each  # of a part that gives more than one value
        return each(askers, alone, lambda q: (models, given))
    asked = {q: query(run, q, models, given) for q in askers}  # "query-answer pairs for each querying party"
    return {q: retrained(run, q, one, given) for q, one in asked.items()}


def alone(run: Run, q: str, models: Mapping[str, Held], given: Inputs) -> Asked:
    """A querying party that waits for no other."""
    return retrained(run, q, query(run, q, models, given), given)


def query(run: Run, q: str, models: Mapping[str, Held], given: Inputs) -> Asked:
    """4.2: the queries of P_q, "until their privacy budget of epsilon is reached"."""
    how, classes, planned, data = given.how, given.classes, given.plans.get(q), brought(run, q, given)
    opened = how.labels == "open"
    asked = Asked(planned, run.at(q, measure, models[q], given.test, classes, stage=f"{q}/before"))
    if planned is not None:
        seed = derive(given.own, q, "select")
        asked.chosen = run.at(q, choose, data, models[q], how.selection, planned.queries, seed, stage=f"{q}/chosen")
    if how.control is not None:
        if planned is not None and how.control in CONTROL:  # another function in the protocol's place
            cast, voters = {"Q": q, "A": list(planned.voters)}, [models[name] for name in planned.voters]
            args = (data, asked.chosen, models[q], list(planned.voters), voters, how, classes)
            found = run.among(CONTROL[how.control], cast, *args, at=q, stage=f"{q}/labels", roles=None)
            asked.labels.append(found)
        return asked
    questions = Questions(run, given.parties, given.party(q), planned, classes, how, given.books, given.agreed)
    with given.sitting(q, how, classes, given.agreed) as sitting:
        for k, start, n, mark in questions:
            stage, mechanism, names = f"{q}/{k}", questions.plan.mechanism, questions.plan.voters
            shape = given.party(q).questions[:n].to("meta")
            images = run.at(q, taken, data, asked.chosen, start, n, stage=f"{stage}/queries", public=shape, keep=False)
            noise = run.at(S.name, draw_noise, mechanism, n, classes, mark, q, k, stage=f"{stage}/noise")
            cast, voters = {"Q": q, "A": list(names), "S": S.name}, [models[name] for name in names]
            with charge(questions.budgets(), mechanism, n, mark=mark, asker=q):
                args, at = (sitting, images, names, voters, mechanism, noise), q if opened else [q, S.name]
                labels = run.among(ask, cast, *args, at=at, stage=f"{stage}/labels", roles=None)
            asked.labels.append(labels)
            asked.count += n
            questions.answered(labels, mark)
    asked.plan, asked.curve = questions.plan, questions.curve
    asked.stopped, asked.refusals = questions.stopped, questions.refusals
    return asked


def retrained(run: Run, q: str, asked: Asked, given: Inputs) -> Asked:
    """4.2: P_q is "retrained on their D_i plus the newly labelled data", from scratch; on labels that nobody has
    with the first voter and the guardian."""
    unseen = given.how.labels == "shares" and bool(asked.labels)
    if not (unseen or run.present(q)):
        return asked
    data, shape, count = brought(run, q, given), given.party(q).model, asked.plan.queries if asked.plan else 0
    known, seed = isinstance(shape, nn.Module), derive(given.own, "retraining")
    if unseen and asked.plan:
        cast, args = {"Q": q, "A": asked.plan.voters[0], "S": S.name}, (asked.labels, given.classes, given.how, q)
        answered = run.at(q, taken, data, asked.chosen, 0, asked.count, stage=f"{q}/answered",
                          public=given.party(q).questions[: asked.count].to("meta"), keep=False)  # fmt: skip
        asked.model = run.among(retrain_unseen, cast, data, answered, *args, at=q, stage=f"{q}/model", into=shape)
    else:
        asked.model = run.at(
            q, retrain, data, asked.chosen, asked.labels, given.how, count, seed, stage=f"{q}/model",
            into=shape if known else None, keep=known,
        )  # fmt: skip
    asked.after = run.at(q, measure, asked.model, given.test, given.classes, stage=f"{q}/after")
    return asked


def brought(run: Run, name: str, given: Inputs) -> Held:
    """A party with its data, at that party."""
    party = given.party(name)
    return Held((name,), party.fingerprint(), party if run.present(name) else ABSENT, party)


# The stages: functions at one party.


def measure(model: Any, test: Samples, classes: int) -> dict:
    """`Scores` on the test set."""
    return scores(answer_of(model, test[0]), test[1], classes).as_dict()


def choose(data: Party, model: Any, kind: str, count: int, seed: int) -> torch.Tensor:
    """Places of the pool, chosen by the party's own model (appendix C)."""
    needs, pool = NEEDS[kind], data.questions
    inner = lambda images: features(model, images) if isinstance(model, nn.Module) else images.flatten(1)
    return select(
        kind, count, size=len(pool), logits=logits_of(model, pool) if "logits" in needs else None,
        features=inner(pool) if "features" in needs else None,
        known=inner(data.images) if kind == "kcenter" else None, seed=seed,
    )  # fmt: skip


def taken(data: Party, chosen: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """The images of one question."""
    return data.questions[chosen[start : start + count]]


def draw_noise(mechanism: Mechanism, count: int, classes: int, mark: str, asker: str, number: int) -> list:
    """DPNoise at the guardian (step 2): drawn once for the mark of a question."""
    return list(mechanism.draw(count, classes))


@estimated_by(lambda sitting, images, names, voters, *_: sitting.cost(images, names, voters))
def ask(
    parties: Parties, sitting: Any, images: torch.Tensor, names: Sequence[str], voters: Sequence[Any],
    mechanism: Mechanism, noise: Sequence[torch.Tensor] | None,
) -> Any:  # fmt: skip
    """Steps 1 to 3 (`label`) of a question: the labels, to the querying party, or their halves, to it and S."""
    tick = progress(len(images))
    panel = sitting.panel(parties, images[:1], names, voters)
    opened = sitting.how.labels == "open"
    answer = panel.ask(images, mechanism, sitting.how.least, None if noise is None else tuple(noise), opened)
    labels = answer.labels if opened else kept_halves(answer.labels, sitting.asker)
    note(steps=answer.seconds, voters=answer.voters, lost=answer.lost, votes=answer.votes)
    tick(len(images))
    return labels


def _retraining_time(data: Party, chosen: Any, labels: Any, how: Settings, count: int, seed: int) -> Estimate:
    task = Task(data.name, data.model, data.images, data.labels)
    return Estimate(seconds_of_all([task], how.local) * (1 + count / len(data.images)))


@estimated_by(_retraining_time)
def retrain(
    data: Party, chosen: torch.Tensor, labels: Sequence[torch.Tensor], how: Settings, count: int, seed: int
) -> Any:
    """From scratch, on the private data and the labelled queries."""
    if how.control == "longer":
        again = torch.arange(count) % len(data.images)
        images, targets = data.images[again], data.labels[again]
    else:
        found = torch.cat([torch.empty(0, dtype=torch.int64), *labels])
        images, targets = data.questions[chosen[: len(found)][found >= 0]], found[found >= 0]
    task = Task(data.name, data.model, torch.cat((data.images, images)), torch.cat((data.labels, targets)))
    (model,) = train_all([task], how.local, seed, progress(1)).values()
    return model


def retrain_unseen(
    session: Session, data: Party, answered: torch.Tensor, labels: Sequence[dict | None], classes: int, how: Settings,
    querying: str,
) -> nn.Module | None:  # fmt: skip
    """`retrain` on shares, with batches in an order that all know."""
    halves, seed = [one or {} for one in labels], derive(how.seed, querying, "retraining")
    args = data.images, data.labels, answered, halves, classes, how.local, seed, how.frac_bits
    return retrain_on_shares(session, querying, data.model, *args, whole=True)
