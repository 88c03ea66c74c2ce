"""The controls of PrivHFL, a function each in the place of lines 8 to 13.

Nobody is asked. As many other rows come in the queries' place, so that retraining takes as many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...data.seeds import generator
from ...federated.participants import Participant, images_and_labels
from .algorithm import chosen, expanded, labels_of, one_hot
from .query import plain_query
from .settings import Settings


@dataclass(frozen=True)
class Round:
    """What a client has in a round, and its control is made of.

    Attributes:
        x: the queries. others: all others, for `pooled`. clients: how many there are in all.
    """

    data: Participant
    model: nn.Module
    seed: int
    x: torch.Tensor
    others: Sequence[Participant]
    clients: int
    t: int
    how: Settings
    classes: int


def longer(one: Round) -> dict:
    """The client's own samples once more."""
    again = torch.arange(len(one.x)) % len(one.data.images)
    return {"images": one.data.images[again], "labels": one_hot(one.data.labels[again], one.classes)}


def pooled(one: Round) -> dict:
    """The samples of all others, as if they had sent them."""
    images, labels = images_and_labels(one.others)
    order = torch.randperm(len(labels), generator=generator(one.how.seed, one.data.name, one.t, "pooled"))
    places = order.repeat(-(-len(one.x) // len(order)))[: len(one.x)]
    return {"images": images[places], "labels": one_hot(labels[places], one.classes)}


def own_mixup(one: Round) -> dict:
    """The queries with the labels of the images that they are mixtures of."""
    data, at = one.data, (one.data, one.seed, one.t, one.how)
    pool, mixed = expanded(data.images, *at), expanded(one_hot(data.labels, one.classes)[:, :, None, None], *at)
    return {"labels": mixed[chosen(pool, data, one.model, one.seed, one.t, one.how)].flatten(1)}


def own_labels(one: Round) -> dict:
    """As if all who would have answered were the client itself: a sum of as many answers is as sharp."""
    parties = one.how.answering(one.clients)
    total = plain_query(one.x, [one.model], one.how.normalise) * parties
    return {"labels": labels_of(total, parties, one.how, one.classes)}


FUNCTIONS: dict[str, Callable[[Round], dict]] = {
    "longer": longer, "own-labels": own_labels, "own-mixup": own_mixup, "pooled": pooled,
}  # fmt: skip


def control(_: Any, *of_round: Any) -> dict:
    """The stage: the rows of the run's control, at the querying party."""
    one = Round(*of_round)
    return FUNCTIONS[str(one.how.control)](one)
