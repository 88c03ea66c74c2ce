"""Ballots: what a party says of its logits, the paper's one-hot argmax or a function of the user's own; the controls.

def top_two(logits, name):                      # runs on shares, and in the clear for learning curves
    return F.one_hot(logits.topk(2).indices, 10).sum(1)

Settings(vote=top_two, ballot_votes=2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...data.seeds import generator
from ...errors import FederationError
from ...federated.training import answer_of, logits_of
from ...session import Session
from ...tensor import SharedTensor, share_tensor
from .settings import Party, Settings, Vote


def whole_numbers(ballot: Any, shape: Sequence[int]) -> Any:
    """A ballot, plain or in shares, as int64 of this shape.

    Raises:
        FederationError: it is something else.
    """
    if not isinstance(ballot, torch.Tensor | SharedTensor):
        raise FederationError(f"a vote is a tensor computed from the logits, and this one is a {type(ballot).__name__}")
    if tuple(ballot.shape) != tuple(shape) or ballot.is_floating_point():
        raise FederationError(
            f"a vote gives whole numbers {tuple(shape)}, a row for each query's logits, got {ballot.dtype} "
            f"{tuple(ballot.shape)}; compare (F.one_hot, topk, >) instead of scaling, and end with .long()"
        )
    return ballot.long()


def plain_ballot(
    vote: str | Vote, name: str, model: Any, images: torch.Tensor, classes: int, most: int | None = None
) -> torch.Tensor:
    """A party's ballots [N, classes] in the clear. most: as of `own_ballot`.

    Raises:
        FederationError: a model that names other classes; what `own_ballot` raises.
    """
    if callable(vote):
        return own_ballot(vote, name, logits_of(model, images), most)
    answers = answer_of(model, images)
    if int(answers.max()) >= classes or int(answers.min()) < 0:
        raise FederationError(f"{name}'s model names a class outside of 0..{classes - 1}")
    return F.one_hot(answers, classes)


def own_ballot(vote: Vote, name: str, logits: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Ballots by the user's own function, in the clear.

    Args:
        most: the most votes that a ballot may give in all; None does not look.

    Raises:
        FederationError: no whole numbers, numbers below 0, or more votes than the noise covers.
    """
    ballot = whole_numbers(vote(logits, name), logits.shape)
    if int(ballot.min()) < 0:
        raise FederationError(f"a ballot of {name} has {int(ballot.min())} votes for a class; give none below 0")
    if most is not None and (votes := int(ballot.sum(1).max())) > most:
        raise FederationError(
            f"a ballot of {name} gives {votes} votes in all, and the noise covers {most}: name ballot_votes={votes}"
        )
    return ballot


def try_on_shares(vote: Vote, name: str, classes: int) -> None:
    """Run a vote of the user's own on shares of zeros, before anything is trained.

    Raises:
        SectorchError: it asks for what shares do not tell, or gives no whole numbers.
    """
    logits = share_tensor(torch.zeros(2, classes), session=Session())
    whole_numbers(vote(logits, name), logits.shape)


def unanimous_votes(names: Sequence[str], classes: int, how: Settings) -> torch.Tensor:
    """The counts [classes] of a query on which all models agree: each class is likelier than the one before it.

    A vote of the user's own is tried out, on these logits and on others of all sizes, random and equal ones.
    """
    alike = torch.arange(classes, dtype=torch.float32)
    if not callable(how.vote):
        return len(names) * (alike == classes - 1).long()
    sizes = torch.cat((torch.zeros(1), torch.tensor([4.0]).repeat(4), 2.0 ** torch.arange(-16, 22, 2)))
    random = torch.randn(16, len(sizes), classes, generator=generator(0, "ballots"))
    levels = torch.tensor([-1.0, 1.0])[:, None, None].expand(2, len(sizes), classes)
    tried = torch.cat((alike[None], (torch.cat((random, levels)) * sizes[:, None]).flatten(0, 1)))
    return torch.stack([own_ballot(how.vote, name, tried, how.ballot_votes)[0] for name in names]).sum(0)


# Controls: a function in the protocol's place. Nobody is asked, and nothing is spent.


def true_labels(_: Any, data: Party, chosen: torch.Tensor, *more: Any) -> torch.Tensor:
    """The pool's own, where an experiment has them."""
    return data.truth[chosen] if data.truth is not None else chosen


def own_labels(_: Any, data: Party, chosen: torch.Tensor, model: Any, *more: Any) -> torch.Tensor:
    """Those of the asker's own model."""
    return answer_of(model, data.questions[chosen])


def plain_vote(
    _: Any, data: Party, chosen: torch.Tensor, model: Any, names: Sequence[str], voters: Sequence[Any], how: Settings,
    classes: int,
) -> torch.Tensor:  # fmt: skip
    """The vote without noise."""
    images, pairs = data.questions[chosen], zip(names, voters, strict=True)
    return torch.stack([plain_ballot(how.vote, name, voter, images, classes) for name, voter in pairs]).sum(0).argmax(1)


CONTROL = {"true-labels": true_labels, "own-labels": own_labels, "no-noise": plain_vote}
