"""Algorithm 1 (PrivHFL, appendix C.1), line by line. The numbers in comments are the algorithm's lines."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...choreography.roles import STAR
from ...data.expansion import expand
from ...data.seeds import derive, generator
from ...data.selection import NEEDS, select
from ...dp.budget import charge
from ...federated.participants import Participant, Samples
from ...federated.parties import Parties
from ...federated.run import Held, Run, estimated_by, note, progress
from ...federated.training import Training, accuracy, features, predict, seconds_of, train
from ...federated.watch import Estimate
from ...session import Session
from .query import check_range, plain_query, secure_query, soft_labels
from .settings import NoisySums, Settings


@dataclass(frozen=True)
class Public:
    """What everybody knows of a run."""

    classes: int
    clients: int
    how: Settings


def privhfl(
    run: Run, clients: Sequence[Participant], test: Samples, classes: int, how: Settings, own: int
) -> dict[str, Held]:
    """Train all clients' models.

    Args:
        own: a party's own seed, of what it draws and nobody else needs to know.

    Returns:
        Each client's model, at the client.
    """
    names, shape = [c.name for c in clients], {c.name: c.model for c in clients}
    data = {c.name: run.bring(c.name, c, public=c.elsewhere()) for c in clients}
    seed = {name: run.bring(name, own) for name in names}
    measured, public = run.public(test), Public(classes, len(clients), how)
    model = run.each(names, local, lambda c: (data[c], shape[c], how, seed[c], measured))  # 1-3
    for t in range(1, how.iterations + 1):  # 4

        def round_of(q: str, t: int = t) -> tuple:
            asked = {a: (data[a], model[a]) for a in answering(names, q, t, how)} if how.asks else {}  # 8: the set C
            others = [data[o] for o in names if o != q] if how.control == "pooled" else []
            return t, data[q], shape[q], model[q], seed[q], asked, others, measured, public

        if how.sequential:
            for q in names:  # 5
                model[q] = iteration(run, q, *round_of(q))
        else:
            model = run.each(names, iteration, round_of)  # 5
    return model


def local(run: Run, name: str, data: Held, shape: nn.Module, how: Settings, seed: Held, test: Held) -> Held:
    """Line 2, the baseline that asks nobody."""
    model = run.at(name, train_alone, data, how.local, seed, stage=f"local/{name}", into=shape, shared=True)
    run.at(name, measure, model, test, stage=f"round-0/{name}/accuracy")
    return model


def iteration(
    run: Run, q: str, t: int, data: Held, shape: nn.Module, model: Held, seed: Held,
    asked: Mapping[str, tuple[Held, Held]], others: Sequence[Held], test: Held, public: Public,
) -> Held:  # fmt: skip
    """Lines 6 to 14 for one querying party."""
    how, stage, client = public.how, f"round-{t}/{q}", data.known
    count, _ = how.budget(len(client.images))
    empty = torch.empty((count, *client.shape), device="meta")
    queries = run.at(q, choose, data, model, seed, t, how, stage=f"{stage}/queries", public=empty, keep=False)  # 6, 7
    if how.asks:
        if how.secure:
            for a, (samples, answer) in asked.items():
                run.at(a, check_range, a, answer, samples, how.frac_bits, stage=f"{stage}/{a}/range")
        protocol, roles = (ask, STAR) if how.secure else (ask_in_the_clear, None)
        cast, models = {"Q": q, "A": list(asked), "S": "S"}, [answer for _, answer in asked.values()]
        rows = run.among(
            protocol, cast, queries, list(asked), models, public, at=q, stage=f"{stage}/labels", roles=roles
        )  # 8-13
    else:
        rows = instead(run, q, t, data, model, seed, queries, others, public)
    found = run.at(q, retrain, data, model, seed, queries, rows, t, public, stage=f"{stage}/model", into=shape)  # 14
    run.at(q, measure, found, test, stage=f"{stage}/accuracy")
    return found


def _training_time(data: Participant, how: Training, *_: Any) -> Estimate:
    return Estimate(seconds_of(data.model, data.images, data.labels, how))


def _retraining_time(data: Participant, *args: Any) -> Estimate:
    how = args[-1].how
    more = 1 + how.budget(len(data.images))[0] / len(data.images)
    return Estimate(seconds_of(data.model, data.images, data.labels, how.retraining) * more)


@estimated_by(_training_time)
def train_alone(data: Participant, how: Training, seed: int) -> nn.Module:
    """Line 2: the stand-alone baseline."""
    model = copy.deepcopy(data.model)
    train(model, data.images, data.labels, how, derive(seed, data.name, "local"), progress(how.epochs))
    return model


def measure(model: nn.Module, test: Samples) -> float:
    """The accuracy on the test set."""
    return accuracy(model, *test)


def answering(names: Sequence[str], q: str, t: int, how: Settings) -> list[str]:
    """Line 8: C of the other clients, in the clients' order."""
    others = [name for name in names if name != q]
    draw = generator(how.seed, q, t, "answering")
    chosen = torch.randperm(len(others), generator=draw)[: how.answering(len(names))]
    return [others[i] for i in sorted(chosen.tolist())]


def expanded(values: torch.Tensor, data: Participant, seed: int, t: int, how: Settings) -> torch.Tensor:
    """Line 6: a client's images, or its labels in the same way, as a pool."""
    _, size = how.budget(len(data.images))
    draw = generator(seed, data.name, t, "pool")
    return expand(values, size, how.expansion, lambdas=how.lambdas, generator=draw)


def chosen(pool: torch.Tensor, data: Participant, model: nn.Module, seed: int, t: int, how: Settings) -> torch.Tensor:
    """Line 7: the places of the pool that are asked about."""
    (count, size), needs = how.budget(len(data.images)), NEEDS[how.selection]
    return select(
        how.selection, count, size=size,
        logits=predict(model, pool) if "logits" in needs else None,
        features=features(model, pool) if "features" in needs else None,
        known=features(model, data.images) if how.selection == "kcenter" else None,
        seed=derive(seed, data.name, t, "select"),
    )  # fmt: skip


def choose(data: Participant, model: nn.Module, seed: int, t: int, how: Settings) -> torch.Tensor:
    """Lines 6 and 7: the queries."""
    pool = expanded(data.images, data, seed, t, how)
    return pool[chosen(pool, data, model, seed, t, how)]


def ask(
    session: Session, queries: torch.Tensor, names: Sequence[str], models: Sequence[nn.Module], public: Public
) -> dict:
    """Lines 8 to 13 (section 3.3): the queries' soft labels at Q."""
    how = public.how
    here = [a for a, model in zip(names, models, strict=True) if not any(p.is_meta for p in model.parameters())]
    with ExitStack() as stack:
        files = [stack.enter_context(how.budget_file(a)) for a in here] if how.budgets else []
        if files:
            stack.enter_context(charge(files, NoisySums(how, public.classes), len(queries)))
        total, steps = secure_query(
            queries, models, frac_bits=how.frac_bits, relu=how.relu, normalise=how.normalise, sigma=how.sigma,
            chunk=how.chunk, tick=progress(None), session=session,
        )  # fmt: skip
    note(**vars(steps))
    return {"labels": labels_of(total, len(models), public)}


def ask_in_the_clear(
    _: Any, queries: torch.Tensor, names: Sequence[str], models: Sequence[nn.Module], public: Public
) -> dict:
    """What `ask` computes, as an ablation. Protects nothing."""
    how = public.how
    total = plain_query(queries, models, how.normalise, how.sigma, how.frac_bits)
    return {"labels": labels_of(total, len(models), public)}


def labels_of(total: torch.Tensor, parties: int, public: Public) -> torch.Tensor:
    """Line 13, Figure 5: soft labels of a sum over so many parties."""
    how = public.how
    bits = max(how.label_bits, (public.classes - 1).bit_length()) if how.label_bits else None
    return soft_labels(total, parties, how.normalise, bits, how.temperature * (parties if how.average else 1))


@estimated_by(_retraining_time)
def retrain(
    data: Participant, model: nn.Module, seed: int, queries: torch.Tensor, rows: dict, t: int,
    public: Public,
) -> nn.Module:  # fmt: skip
    """Line 14: on the private data set and the labelled queries."""
    how, model = public.how.retraining, copy.deepcopy(model)
    images = torch.cat([data.images, rows.get("images", queries)])
    targets = torch.cat([one_hot(data.labels, public.classes), rows["labels"]])
    train(model, images, targets, how, derive(seed, data.name, t, "retraining"), progress(how.epochs))
    return model


def one_hot(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """As `train` takes soft labels."""
    return F.one_hot(labels, classes).double()


# In a control nobody is asked. In the queries' place come as many other rows, so that retraining takes as many steps.


def instead(
    run: Run, q: str, t: int, data: Held, model: Held, seed: Held, queries: Held, others: Sequence[Held], public: Public
) -> Held:
    """The rows of a control: images, where they are not the queries, and labels."""
    stage = f"round-{t}/{q}/rows"
    if public.how.control == "longer":
        return run.at(q, own_again, data, public, stage=stage)
    if public.how.control == "pooled":  # as if others had sent their samples
        cast = {"Q": q, "A": [one.parties[0] for one in others]}
        count, _ = public.how.budget(len(data.known.images))
        return run.among(pooled, cast, q, count, others, t, public, at=q, stage=stage, roles=None)
    labels = mixed_labels if public.how.control == "own-mixup" else own_labels
    return run.at(q, labels, data, model, seed, queries, t, public, stage=stage)


def own_again(data: Participant, public: Public) -> dict:
    """The client's own samples once more."""
    count, _ = public.how.budget(len(data.images))
    again = torch.arange(count) % len(data.images)
    return {"images": data.images[again], "labels": one_hot(data.labels[again], public.classes)}


def pooled(_: Parties, q: str, count: int, others: Sequence[Participant], t: int, public: Public) -> dict:
    """The samples of all others."""
    images, labels = torch.cat([o.images for o in others]), torch.cat([o.labels for o in others])
    order = torch.randperm(len(labels), generator=generator(public.how.seed, q, t, "pooled"))
    places = order.repeat(-(-count // len(order)))[:count]
    return {"images": images[places], "labels": one_hot(labels[places], public.classes)}


def mixed_labels(data: Participant, model: nn.Module, seed: int, queries: torch.Tensor, t: int, public: Public) -> dict:
    """The queries with the labels of the images that they are mixtures of."""
    how, pool = public.how, expanded(data.images, data, seed, t, public.how)
    mixed = expanded(one_hot(data.labels, public.classes)[:, :, None, None], data, seed, t, how)
    return {"labels": mixed[chosen(pool, data, model, seed, t, how)].flatten(1)}


def own_labels(data: Participant, model: nn.Module, seed: int, queries: torch.Tensor, t: int, public: Public) -> dict:
    """As if all who would have answered were the client itself: a sum of as many answers is as sharp."""
    parties = public.how.answering(public.clients)
    return {"labels": labels_of(plain_query(queries, [model], public.how.normalise) * parties, parties, public)}
