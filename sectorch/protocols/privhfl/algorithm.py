"""Algorithm 1 (PrivHFL, appendix C.1), line by line. The numbers in comments are the algorithm's lines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...choreography.roles import STAR
from ...data.seeds import derive, generator
from ...data.selection import NEEDS, expand, select
from ...dp.budget import charge
from ...federated.participants import Participant, Samples
from ...federated.run import Held, Run, estimated_by, note, progress
from ...federated.shared_training import check_shareable, kept_halves, retrain_on_shares
from ...federated.training import Training, accuracy, features, predict, seconds_of, train
from ...federated.watch import Estimate
from ...session import Session
from .query import check_range, plain_query, secure_query, soft_labels
from .settings import NoisySums, Settings


@dataclass(frozen=True)
class Inputs:
    """What Algorithm 1 takes: each client's data, and seed of its own draws, at the client; what is public.

    Attributes:
        control: of `experiment.py`, in the place of lines 8 to 13.
    """

    names: Sequence[str]
    data: Mapping[str, Held]
    seed: Mapping[str, Held]
    test: Held
    classes: int
    how: Settings
    control: Callable[..., dict] | None = None

    def of_round(self, j: str, t: int, model: Mapping[str, Held]) -> tuple[int, dict[str, Held], Inputs]:
        """What P_Q^j's part of a round takes; a worker is sent nothing else."""
        answers = answering(self.names, j, t, self.how) if self.how.asks else ()
        used = {j: None, **dict.fromkeys(self.names if self.how.control == "pooled" else answers)}
        return t, {i: model[i] for i in used}, replace(self, data={i: self.data[i] for i in used})


def privhfl(run: Run, given: Inputs) -> dict[str, Held]:
    """Each client's trained model, at the client."""
    model = run.each(given.names, local, lambda j: (given.data[j], given.seed[j], given.test, given.how))  # 1-3
    for t in range(1, given.how.iterations + 1):  # 4
        if given.how.sequential:
            for j in given.names:  # 5
                model[j] = iteration(run, j, *given.of_round(j, t, model))
        else:
            model = run.each(given.names, iteration, lambda j, t=t, model=model: given.of_round(j, t, model))  # 5
    return model


def local(run: Run, j: str, data: Held, seed: Held, test: Held, how: Settings) -> Held:
    """Line 2: P_j locally trains M_j on D_j."""
    model = run.at(j, train_alone, data, how.local, seed, stage=f"local/{j}", into=data.known.model, shared=True)  # 2
    run.at(j, measure, model, test, stage=f"round-0/{j}/accuracy")
    return model


def iteration(run: Run, j: str, t: int, model: Mapping[str, Held], given: Inputs) -> Held:
    """Lines 6 to 14, for the querying party P_Q^j."""
    data, seed, how, stage = given.data[j], given.seed[j], given.how, f"round-{t}/{j}"
    x = pictures(data.known, how)
    x = run.at(j, choose, data, model[j], seed, t, how, stage=f"{stage}/queries", public=x, keep=False)  # 6, 7
    y = responses(run, j, t, x, model, given)  # 8-13
    new = retrained(run, j, t, x, y, model[j], given)  # 14
    run.at(j, measure, new, given.test, stage=f"{stage}/accuracy")
    return new


def responses(run: Run, j: str, t: int, x: Held, model: Mapping[str, Held], given: Inputs) -> Held:
    """Lines 8 to 13: the soft labels of the queries {x_b}, or what a control has in their place, at P_Q^j."""
    how, data, stage, classes = given.how, given.data, f"round-{t}/{j}", given.classes
    C = answering(given.names, j, t, how)  # 8
    if given.control is not None:
        others, cast = [data[i] for i in data if i != j], {"Q": j, "A": given.names}
        args = (data[j], model[j], given.seed[j], x, others, len(given.names), t, how, classes)
        return run.among(given.control, cast, *args, at=j, stage=f"{stage}/rows", roles=None)
    for i in C if how.secure else ():
        run.at(i, check_range, i, model[i], data[i], how.frac_bits, stage=f"{stage}/{i}/range")
    protocol, roles = (ask, STAR) if how.secure else (ask_in_the_clear, None)
    cast, args = {"Q": j, "A": C, "S": "S"}, (x, C, [model[i] for i in C], how, classes)
    if how.labels == "shares":
        run.at(j, check_shareable, j, model[j], how.frac_bits, stage=f"{stage}/fits")
        return run.among(ask_unseen, cast, *args, j, at=[j, "S"], stage=f"{stage}/labels")
    return run.among(protocol, cast, *args, at=j, stage=f"{stage}/labels", roles=roles)  # 9-13


def retrained(run: Run, j: str, t: int, x: Held, y: Held, model: Held, given: Inputs) -> Held:
    """Line 14, at P_Q^j; on labels that nobody has with the first answering party and the server."""
    data, how, stage, into = given.data[j], given.how, f"round-{t}/{j}/model", given.data[j].known.model
    if how.labels == "open":
        return run.at(j, retrain, data, model, given.seed[j], x, y, t, given.classes, how, stage=stage, into=into)
    cast, args = {"Q": j, "A": answering(given.names, j, t, how)[0], "S": "S"}, (data, model, x, y, t, j)
    return run.among(retrain_unseen, cast, *args, given.classes, how, at=j, stage=stage, into=into)


def answering(names: Sequence[str], q: str, t: int, how: Settings) -> list[str]:
    """Line 8: C of the other clients, in the clients' order."""
    others = [name for name in names if name != q]
    draw = generator(how.seed, q, t, "answering")
    chosen = torch.randperm(len(others), generator=draw)[: how.answering(len(names))]
    return [others[i] for i in sorted(chosen.tolist())]


# The stages: functions at one party, and the protocol.


def _training_time(data: Participant, how: Training, *_: Any) -> Estimate:
    return Estimate(seconds_of(data.model, data.images, data.labels, how))


def _retraining_time(data: Participant, *args: Any) -> Estimate:
    how: Settings = args[-1]
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


def pictures(client: Participant, how: Settings) -> torch.Tensor:
    """Queries of a client, of which the shape is public."""
    return torch.empty((how.budget(len(client.images))[0], *client.shape), device="meta")


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
    session: Session, x: torch.Tensor, names: Sequence[str], models: Sequence[nn.Module], how: Settings, classes: int
) -> dict:
    """Lines 8 to 13 (section 3.3): the queries' soft labels at Q."""
    here = [a for a, model in zip(names, models, strict=True) if not any(p.is_meta for p in model.parameters())]
    with ExitStack() as stack:
        files = [stack.enter_context(how.budget_file(a)) for a in here] if how.budgets else []
        if files:
            stack.enter_context(charge(files, NoisySums(how, classes), len(x)))
        total, steps = secure_query(
            x, models, frac_bits=how.frac_bits, relu=how.relu, normalise=how.normalise, sigma=how.sigma,
            chunk=how.chunk, tick=progress(None), session=session,
        )  # fmt: skip
    note(**vars(steps))
    return {"labels": labels_of(total, len(models), how, classes)}


def ask_unseen(
    session: Session, x: torch.Tensor, names: Sequence[str], models: Sequence[nn.Module], how: Settings, classes: int,
    querying: str,
) -> dict:  # fmt: skip
    """Lines 8 to 13, of which nobody learns the soft labels: their halves at Q and S."""
    total, steps = secure_query(
        x, models, frac_bits=how.frac_bits, relu=how.relu, normalise=how.normalise, chunk=how.chunk,
        tick=progress(None), session=session, opened=False,
    )  # fmt: skip
    note(**vars(steps))
    sharp = how.temperature * (len(models) if how.average else 1)
    labels: Any = total / len(models) if how.normalise else torch.softmax(total / sharp, 1)
    return kept_halves(labels, querying)


def ask_in_the_clear(
    _: Any, x: torch.Tensor, names: Sequence[str], models: Sequence[nn.Module], how: Settings, classes: int
) -> dict:
    """What `ask` computes, as an ablation. Protects nothing."""
    total = plain_query(x, models, how.normalise, how.sigma, how.frac_bits)
    return {"labels": labels_of(total, len(models), how, classes)}


def labels_of(total: torch.Tensor, parties: int, how: Settings, classes: int) -> torch.Tensor:
    """Line 13, Figure 5: soft labels of a sum over so many parties."""
    bits = max(how.label_bits, (classes - 1).bit_length()) if how.label_bits else None
    return soft_labels(total, parties, how.normalise, bits, how.temperature * (parties if how.average else 1))


@estimated_by(_retraining_time)
def retrain(
    data: Participant, model: nn.Module, seed: int, x: torch.Tensor, y: dict, t: int, classes: int, how: Settings
) -> nn.Module:
    """Line 14: on the private data set and the labelled queries."""
    model, training = copy.deepcopy(model), how.retraining
    images = torch.cat([data.images, y.get("images", x)])
    targets = torch.cat([one_hot(data.labels, classes), y["labels"]])
    train(model, images, targets, training, derive(seed, data.name, t, "retraining"), progress(training.epochs))
    return model


def retrain_unseen(
    session: Session, data: Participant, model: nn.Module, x: torch.Tensor, y: dict, t: int, querying: str,
    classes: int, how: Settings,
) -> nn.Module | None:  # fmt: skip
    """Line 14 on shares: the same, with batches in an order that all know."""
    seed = derive(how.seed, querying, t, "retraining")
    args = data.images, data.labels, x, [y or {}], classes, how.retraining, seed, how.frac_bits
    return retrain_on_shares(session, querying, model, *args)


def one_hot(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """As `train` takes soft labels."""
    return F.one_hot(labels, classes).double()
