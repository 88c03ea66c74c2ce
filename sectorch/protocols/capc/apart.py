"""Parties and the guardian in processes apart: which question is next, and whose budget affords it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ...choreography import Located, Message, Net, Party, Phase, Roles, protocol
from ...choreography.located import compute, running
from ...choreography.roles import Cast
from ...choreography.steps import Runtime
from ...errors import FrameError
from ...federated.parties import Parties
from ...session import S
from .spending import Question

TURN = Roles("C S", edges="C-S")
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


class Turns:
    """All parties and the guardian, from the first question of a run to the last: that one is lost ends it for all.

    Args:
        parties: their names, in the order of their turns.
    """

    def __init__(self, parties: Sequence[str], runtime: Runtime):
        named = {name: Party(name, "C") for name in parties}
        self._everyone = frozenset((*named.values(), S))
        casts = [Cast(TURN, {"C": party, "S": S}) for party in named.values()]
        self._nets = {
            name: Net(runtime, number, cast, Phase.ONLINE)
            for number, (name, cast) in enumerate(zip(named, casts, strict=True))
        }

    def next(self, asker: str, question: Question | None, planned: int = 0) -> tuple[Question, int]:
        """The asker's next question, as everybody hears it, and how many queries it will ask in all.

        Args:
            question: at the asker; None elsewhere. One of no queries says that it asks no more.

        Raises:
            FrameError: the asker says what is no question.
        """
        net = self._nets[asker]
        own = torch.empty(5, dtype=torch.int64, device="meta")
        if question is not None:
            mark = bytes.fromhex(question.mark)
            words = [int.from_bytes(mark[i : i + 8], "big", signed=True) for i in (0, 8)]
            own = torch.tensor([planned, question.number, question.queries, *words])
        value = tell(net, net.own(net.C, own))
        for other in self._nets.values():
            value = told(other, value)
        planned, number, queries, *words = net.agreed(value, self._everyone).tolist()
        if not (0 <= number < 1 << 31 and 0 <= queries <= planned < 1 << 31):
            raise FrameError(f"{asker} asks question {number} of {queries} queries out of {planned}")
        mark = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
        return Question(number, mark.hex(), queries), planned

    def afforded(self, own: Mapping[str, int]) -> dict[str, int]:
        """How many of the queries each party affords, as everybody hears it.

        Args:
            own: of the party that is here.
        """
        counts = {
            name: torch.tensor([own[name]]) if name in own else torch.empty(1, dtype=torch.int64, device="meta")
            for name in self._nets
        }
        said = [affords(net, net.own(net.C, counts[name])) for name, net in self._nets.items()]
        first = next(iter(self._nets.values()))
        with running(first):
            value = compute(torch.cat, said)
        for net in self._nets.values():
            value = afforded(net, value)
        found = first.agreed(value, self._everyone).tolist()
        return {name: max(0, count) for name, count in zip(self._nets, found, strict=True)}


@contextmanager
def joined(parties: Sequence[str], together: Parties, agreed: str) -> Iterator[Turns]:
    """Everybody meets.

    Args:
        agreed: what all have to agree on.

    Raises:
        RefusedError: another party has other settings, or knows of others than these. PeerLostError: one did not come.
    """
    everyone = {**{Party(name, "C"): name for name in parties}, S: S.name}
    with together.runtime(TURN, everyone, label="capc", agreed=agreed) as runtime:
        yield Turns(parties, runtime)
