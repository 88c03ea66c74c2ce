"""Parties and the guardian in processes apart: which question is next, and whose budget affords it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...choreography import Located, Message, Net, protocol
from ...errors import FrameError
from ...federated.turns import TURN, Turns
from .spending import Question

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


def following(turns: Turns, asker: str, question: Question | None, planned: int = 0) -> tuple[Question, int]:
    """The asker's next question, as everybody hears it, and how many queries it will ask in all.

    Args:
        question: at the asker; None elsewhere. One of no queries says that it asks no more.

    Raises:
        FrameError: the asker says what is no question.
    """
    said = None
    if question is not None:
        mark = bytes.fromhex(question.mark)
        words = [int.from_bytes(mark[i : i + 8], "big", signed=True) for i in (0, 8)]
        said = torch.tensor([planned, question.number, question.queries, *words])
    planned, number, queries, *words = turns.hear(asker, said, 5, tell, told).tolist()
    if not (0 <= number < 1 << 31 and 0 <= queries <= planned < 1 << 31):
        raise FrameError(f"{asker} asks question {number} of {queries} queries out of {planned}")
    mark = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return Question(number, mark.hex(), queries), planned


def all_afford(turns: Turns, own: Mapping[str, int]) -> dict[str, int]:
    """How many of the queries each party affords, as everybody hears it.

    Args:
        own: of the parties that are here.
    """
    counts = turns.hear_all({name: torch.tensor([count]) for name, count in own.items()}, 1, affords, afforded)
    return {name: max(0, int(count)) for name, count in counts.items()}
