"""Who takes part in a program: all parties in this process, or one of them, whose others are elsewhere.

A program among parties is a function of `Parties`. It opens sessions by their roles, brings in what the parties that
are here have, and returns what they learned. The same function runs as a simulation (`Simulation`) and as one party of
a federation (`sectorch.network.federation.party.Federation`), with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..choreography import Located, Net, Party, Phase, Roles
from ..choreography.located import compute, run_in
from ..choreography.net import Runtime
from ..choreography.roles import STAR, Cast
from ..choreography.run.local import LocalRuntime
from ..errors import ArgumentError
from ..session import S, Session

Names = Mapping[str, str | Sequence[str]]
"""Of the parties that play each role; several in a list."""


class Parties(Protocol):
    """What a program among parties is given.

    `inputs` are the tensors that the parties that are here bring, by name. `folder` is where they keep what a later run
    goes on with (`sectorch.Checkpoints`); it need not be there.
    """

    inputs: Mapping[str, torch.Tensor]
    folder: Path

    def present(self, party: str) -> bool:
        """Whether that party's values are in this process."""
        ...

    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = ..., agreed: str = ...
    ) -> AbstractContextManager[Session]:
        """A session of these roles, which ends with the block.

        Args:
            names: of the parties that play them, by role; they go by their roles' names unless given. In secure
                inference (`STAR`) A may be several, in a list: they are the session's `answering`, in that order; D may
                be a dealer, and O a list of owners that hold no shares (`Session(owners=)`).
            label: of two sessions of the same parties at the same time, each has its own.
            agreed: settings, or a program's digest, that must be the same at all parties.
        """
        ...

    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = ..., agreed: str = ...
    ) -> AbstractContextManager[Runtime]:
        """What a session runs on: for protocols in which several parties play one role, on nets of their own.

        Args:
            parties: everyone, with the name that it goes by among the parties.
        """
        ...


class Simulation:
    """All parties in this process: for development and as the oracle of tests. It protects nothing."""

    def __init__(self, inputs: Mapping[str, torch.Tensor] | None = None, folder: str | Path = "kept"):
        self.inputs: Mapping[str, torch.Tensor] = dict(inputs or {})
        self.folder = Path(folder)

    def present(self, party: str) -> bool:
        return True

    @contextmanager
    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = "session", agreed: str = ""
    ) -> Iterator[Session]:
        if roles is STAR:
            yield star(names or {})
        else:
            yield Session(roles=roles, names={role: str(name) for role, name in (names or {}).items()})

    @contextmanager
    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = "session", agreed: str = ""
    ) -> Iterator[Runtime]:
        yield LocalRuntime(frozenset(parties))


def listed(names: str | Sequence[str]) -> list[str]:
    """One name, or several."""
    return [names] if isinstance(names, str) else list(names)


def star(names: Names, dry: bool = False) -> Session:
    """A session of secure inference in one process; see `Parties.session`."""
    dealer, owners = "D" if "D" in names else "Q", listed(names.get("O", ()))
    return Session(answering=len(listed(names.get("A", "A"))), dealer=dealer, owners=owners, dry=dry)


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """What a program returned, by name: a tensor, a mapping of tensors, or nothing. What others learned is left out.

    Raises:
        ArgumentError: something else.
    """
    if result is None:
        return {}
    named = {"result": result} if isinstance(result, torch.Tensor) else result
    if not isinstance(named, Mapping) or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise ArgumentError(f"a program returns a tensor, tensors by name, or nothing, got a {type(result).__name__}")
    return {str(name): value for name, value in named.items() if not value.is_meta}


# Clients and a server in processes apart take turns: what one says, all hear, from the beginning of a run to its end.
#
# Each client has a net of its own with the server. A paper declares what is said (a protocol from C to S) and how it is
# passed on (one from S to C), of the roles in `TURN`.


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
        with run_in(next(iter(self._nets.values()))):
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
