"""Clients and the server in processes apart: whose turn it is to ask, and whether it still asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...choreography import Located, Message, Net, Party, Phase, Roles, protocol
from ...choreography.roles import Cast
from ...choreography.steps import Runtime
from ...federated.parties import Parties
from ...session import S

TURN = Roles("C S", edges="C-S")


@protocol("privhfl_turn", "Algorithm 1, line 5", [
    Message("wanted", "C", "S", "nothing", "whether the client whose turn it is asks, or has its answers from before"),
], roles=TURN)  # fmt: skip
def tell(net: Net, wanted: Located) -> Located:
    """A client that was stopped may have its answers: they are not asked for twice. int64 [1]. Rounds 1, bytes 8."""
    return wanted.send(net.C, net.S, "wanted").at(net.S)


@protocol("privhfl_told", "Algorithm 1, line 5", [
    Message("told", "S", "C", "nothing", "whether the client whose turn it is asks, or has its answers from before"),
], roles=TURN)  # fmt: skip
def told(net: Net, wanted: Located) -> Located:
    """The same, to another client. Rounds 1, bytes 8."""
    return wanted.send(net.S, net.C, "told")


class Turns:
    """All clients and the server, from the beginning of a run to its end: that one is lost ends the run for all.

    Args:
        clients: their names, in the order of their turns.
    """

    def __init__(self, clients: Sequence[str], runtime: Runtime):
        parties = {name: Party(name, "C") for name in clients}
        self._everyone = frozenset((*parties.values(), S))
        casts = [Cast(TURN, {"C": party, "S": S}) for party in parties.values()]
        self._nets = {
            name: Net(runtime, number, cast, Phase.ONLINE)
            for number, (name, cast) in enumerate(zip(parties, casts, strict=True))
        }

    def asks(self, client: str, wanted: bool | None = None) -> bool:
        """Whether the client whose turn it is asks; `wanted` where it is here. Everybody hears the same."""
        net = self._nets[client]
        own = torch.empty(1, dtype=torch.int64, device="meta") if wanted is None else torch.tensor([int(wanted)])
        value = tell(net, net.own(net.C, own))
        for other in self._nets.values():
            value = told(other, value)
        return bool(net.agreed(value, self._everyone))


@contextmanager
def joined(clients: Sequence[str], together: Parties, agreed: str) -> Iterator[Turns]:
    """Everybody meets.

    Args:
        agreed: what all have to agree on.

    Raises:
        RefusedError: another party has other settings, or knows of others than these. PeerLostError: one did not come.
    """
    parties = {**{Party(name, "C"): name for name in clients}, S: S.name}
    with together.runtime(TURN, parties, label="privhfl", agreed=agreed) as runtime:
        yield Turns(clients, runtime)
