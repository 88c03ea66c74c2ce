"""CaPC from end to end, to be read beside the paper (4.2): local models, queries within a budget, retraining.

Steps 1 to 3 of section 3.2 for a batch of queries are `Panel.ask` of `ask.py`, and `release` of
`sectorch/dp/mechanisms.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...data.seeds import derive
from ...data.selection import NEEDS, select
from ...dp import BudgetFile, Mechanism, charge
from ...federated.outcome import scores
from ...federated.participants import Samples
from ...federated.parties import Parties
from ...federated.run import ABSENT, Held, Run, digest_of, estimated_by, note, progress
from ...federated.training import (
    Task,
    Training,
    answer_of,
    features,
    grouped,
    logits_of,
    seconds_of_all,
    train_all,
    train_group,
)
from ...federated.watch import Estimate
from ...session import S
from .ask import SimulatedPanel, Sitting, Voter
from .plan import Plan
from .questions import Questions
from .settings import Party, Settings


@dataclass(frozen=True)
class Public:
    """What everybody knows of a run: the parties (of those elsewhere sizes and architectures) and the settings."""

    parties: Sequence[Party]
    classes: int
    how: Settings
    agreed: str


@dataclass
class Asked:
    """What one querying party did, with its results at that party."""

    plan: Plan | None
    before: Held
    chosen: Held | None = None
    labels: list[Held] = field(default_factory=list)
    curve: Any = None
    stopped: str = ""
    refusals: Sequence[Exception] = ()
    model: Held | None = None
    after: Held | None = None


def capc(
    run: Run, public: Public, test: Samples, own: int, plans: Mapping[str, Plan], books: Mapping[str, BudgetFile]
) -> dict[str, Asked]:
    """Local models; then for each querying party: queries, answers, and a model from scratch.

    Args:
        own: a party's own seed, of what it draws and nobody else needs to know.
        plans: of the querying parties that are here.
        books: the budgets of the organisations that are here.
    """
    data = {p.name: Held((p.name,), p.fingerprint(), p if run.present(p.name) else ABSENT, p) for p in public.parties}
    models, measured = local_models(run, public, own), run.public(test)
    askers = [p.name for p in public.parties if len(p.questions)]
    known = lambda q: (data[q], models, own, measured, public, plans.get(q), books)
    if books or run.apart:  # which one process has, and others follow
        asked = {q: query(run, q, *known(q)) for q in askers}
        return {q: retrained(run, q, one, *known(q)) if run.present(q) else one for q, one in asked.items()}
    return run.each(askers, alone, known)  # pyright: ignore[reportArgumentType, reportReturnType]


def alone(run: Run, q: str, *known: Any) -> Asked:
    """A querying party that waits for no other."""
    return retrained(run, q, query(run, q, *known), *known)


def query(
    run: Run, q: str, data: Held, models: Mapping[str, Held], own: int, test: Held, public: Public,
    planned: Plan | None, books: Mapping[str, BudgetFile],
) -> Asked:  # fmt: skip
    """Section 3.2 for P_q's queries, "until their privacy budget of epsilon is reached"."""
    how, asker = public.how, data.public
    asked = Asked(planned, run.at(q, measure, models[q], test, public.classes, stage=f"{q}/before"))
    if planned is not None:
        seed = derive(own, q, "select")
        asked.chosen = run.at(q, choose, data, models[q], how.selection, planned.queries, seed, stage=f"{q}/chosen")
    if how.control is not None:
        return instead(run, q, asked, data, models, public)
    questions = Questions(run, public.parties, asker, planned, public.classes, how, books, public.agreed)
    with Sitting(q, how, public.classes, public.agreed) as sitting:
        for k, start, n, mark in questions:
            stage, mechanism, names = f"{q}/{k}", questions.plan.mechanism, questions.plan.voters
            shape = asker.questions[:n].to("meta")
            images = run.at(q, taken, data, asked.chosen, start, n, stage=f"{stage}/queries", public=shape, keep=False)
            noise = run.at(S.name, draw_noise, mechanism, n, public.classes, mark, q, k, stage=f"{stage}/noise")
            voters, cast = [models[name] for name in names], {"Q": q, "A": list(names), "S": S.name}
            with charge(questions.budgets(), mechanism, n, mark=mark, asker=q):
                labels = run.among(
                    ask, cast, sitting, images, names, voters, mechanism, noise, at=q, stage=f"{stage}/labels",
                    roles=None,
                )  # fmt: skip
            asked.labels.append(labels)
            questions.answered(labels, mark)
    asked.plan, asked.curve = questions.plan, questions.curve
    asked.stopped, asked.refusals = questions.stopped, questions.refusals
    return asked


def retrained(
    run: Run, q: str, asked: Asked, data: Held, models: Mapping[str, Held], own: int, test: Held, public: Public,
    planned: Plan | None, books: Mapping[str, BudgetFile],
) -> Asked:  # fmt: skip
    """ "Retrained on their D_i plus the newly labelled data", from scratch."""
    shape, seed = data.known.model, derive(own, "retraining")
    known = isinstance(shape, nn.Module)
    asked.model = run.at(
        q, retrain, data, asked.chosen, asked.labels, public.how, planned.queries if planned else 0, seed,
        stage=f"{q}/model", into=shape if known else None, keep=known,
    )  # fmt: skip
    asked.after = run.at(q, measure, asked.model, test, public.classes, stage=f"{q}/after")
    return asked


def local_models(run: Run, public: Public, own: int) -> dict[str, Held]:
    """ "We first train local models for all parties", those of one architecture side by side."""
    here = [Task(p.name, p.model, p.images, p.labels) for p in public.parties if run.present(p.name)]
    groups = {group[0].name: group for group in grouped(here, public.how.local)}
    kept = [name for name, group in groups.items() if isinstance(group[0].model, nn.Module)]
    states = run.each(kept, trained, lambda name: (groups[name], public.how.local, derive(own, "local")))
    fingerprint, models = {p.name: p.fingerprint() for p in public.parties}, dict[str, Held]()
    for first, group in groups.items():
        there: Any = ABSENT
        if not run.dry:  # what scikit-learn fits is not kept
            there = (
                states[first].value if first in states else train_group(group, public.how.local, derive(own, "local"))
            )
        for task in group:
            made = (states[first], task.name) if first in states else (fingerprint[task.name], public.how.local, own)
            model = there if there is ABSENT else there[task.name]
            model = loaded(task.model, model) if isinstance(model, dict) else model
            models[task.name] = Held((task.name,), digest_of(made), model, task.model)
    for p in public.parties:
        shape = copy.deepcopy(p.model).to("meta").eval() if isinstance(p.model, nn.Module) else None
        models.setdefault(p.name, Held((p.name,), f"brought by {p.name}", ABSENT, shape))
    return models


def trained(run: Run, first: str, group: Sequence[Task], how: Training, seed: int) -> Held:
    """The weights of a group's models, at the first of its parties."""
    return run.at(first, side_by_side, group, how, seed, stage=f"local/{first}", shared=True)


# The stages: functions at one party.


@estimated_by(lambda group, how, seed: Estimate(seconds_of_all(group, how)))
def side_by_side(group: Sequence[Task], how: Training, seed: int) -> dict[str, dict]:
    tick = progress(len(group))
    found = {name: model.state_dict() for name, model in train_group(group, how, seed).items()}
    tick(len(group))
    return found


def loaded(model: nn.Module, state: dict) -> nn.Module:
    """A copy with these weights, in evaluation mode."""
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model.eval()


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


def draw_noise(
    mechanism: Mechanism, count: int, classes: int, mark: str, asker: str, number: int
) -> list[torch.Tensor]:
    """DPNoise at the guardian (step 2): drawn once for the mark of a question."""
    return list(mechanism.draw(count, classes))


@estimated_by(lambda sitting, images, names, voters, *_: sitting.cost(images, names, voters))
def ask(
    parties: Parties, sitting: Sitting, images: torch.Tensor, names: Sequence[str], voters: Sequence[Any],
    mechanism: Mechanism, noise: Sequence[torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Steps 1 to 3: the labels, to the querying party."""
    tick = progress(len(images))
    panel = sitting.panel(parties, images[:1], names, voters)
    answer = panel.ask(images, mechanism, sitting.how.least, None if noise is None else tuple(noise))
    note(steps=answer.seconds, voters=answer.voters, lost=answer.lost, votes=answer.votes)
    tick(len(images))
    return answer.labels


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


# In a control nobody is asked, and nothing is spent.


def instead(run: Run, q: str, asked: Asked, data: Held, models: Mapping[str, Held], public: Public) -> Asked:
    """What stands in the answers' place."""
    control, planned = public.how.control, asked.plan
    if control == "true-labels":
        asked.labels.append(run.at(q, true_labels, data, asked.chosen, stage=f"{q}/labels"))
    elif control == "own-labels":
        asked.labels.append(run.at(q, own_labels, data, asked.chosen, models[q], stage=f"{q}/labels"))
    elif control == "no-noise" and planned is not None:
        cast = {"Q": q, "A": list(planned.voters)}
        voters = [models[name] for name in planned.voters]
        asked.labels.append(
            run.among(
                plain_vote, cast, data, asked.chosen, voters, public.classes, at=q, stage=f"{q}/labels", roles=None
            )
        )
    return asked


def true_labels(data: Party, chosen: torch.Tensor) -> torch.Tensor:
    return data.truth[chosen] if data.truth is not None else chosen


def own_labels(data: Party, chosen: torch.Tensor, model: Any) -> torch.Tensor:
    return answer_of(model, data.questions[chosen])


def plain_vote(_: Parties, data: Party, chosen: torch.Tensor, voters: Sequence[Any], classes: int) -> torch.Tensor:
    panel = SimulatedPanel([Voter(str(i), model) for i, model in enumerate(voters)], classes)
    return panel.votes(data.questions[chosen]).argmax(1)
