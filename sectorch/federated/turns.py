"""Clients and a server in processes apart take turns: what one says, all hear, from the beginning of a run to its end.

Each client has a net of its own with the server. A paper declares what is said (a protocol from C to S) and how it is
passed on (one from S to C), of the roles in `TURN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..choreography import Located, Net, Party, Phase, Roles
from ..choreography.located import compute, running
from ..choreography.roles import Cast
from ..choreography.steps import Runtime
from ..session import S
from .parties import Parties

TURN = Roles("C S", edges="C-S")

Say = Callable[[Net, Located], Located]
"""A declared protocol of one message."""


class Turns:
    """All clients and the server: that one is lost ends the run for all.

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

    def hear(self, client: str, said: torch.Tensor | None, count: int, tell: Say, told: Say) -> torch.Tensor:
        """What a client says to the server, and the server to everybody. Rounds 2, bytes 8 count (clients + 1).

        Args:
            said: int64 [count], at the client; None elsewhere.
        """
        net = self._nets[client]
        return self._passed(tell(net, net.own(net.C, _or_blank(said, count))), told)

    def hear_all(self, said: Mapping[str, torch.Tensor], count: int, tell: Say, told: Say) -> dict[str, torch.Tensor]:
        """What each client says, at everybody. Rounds 2, bytes 8 count clients (clients + 1).

        Args:
            said: int64 [count] of the clients that are here.
        """
        at_S = [tell(net, net.own(net.C, _or_blank(said.get(name), count))) for name, net in self._nets.items()]
        with running(next(iter(self._nets.values()))):
            value = compute(torch.cat, at_S)
        return dict(zip(self._nets, self._passed(value, told).split(count), strict=True))

    def _passed(self, value: Located, told: Say) -> torch.Tensor:
        for net in self._nets.values():
            value = told(net, value)
        return next(iter(self._nets.values())).agreed(value, self._everyone)


def _or_blank(said: torch.Tensor | None, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta") if said is None else said


@contextmanager
def joined(clients: Sequence[str], together: Parties, *, label: str, agreed: str) -> Iterator[Turns]:
    """Everybody meets.

    Args:
        label: the paper's.
        agreed: what all have to agree on.

    Raises:
        RefusedError: another party has other settings, or knows of others than these. PeerLostError: one did not come.
    """
    everyone = {**{Party(name, "C"): name for name in clients}, S: S.name}
    with together.runtime(TURN, everyone, label=label, agreed=agreed) as runtime:
        yield Turns(clients, runtime)
