"""The parties of a program, all in this process or one of them, and turns of clients with a server.

A program among parties is a function of `Parties`. It opens sessions by their roles, takes the inputs of the parties
that are here, and returns their results. The same function runs as a simulation (`Simulation`) and as one party of
a federation (`sectorch.network.federation.party.Federation`), with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..choreography import Located, Net, Party, Phase, Roles
from ..choreography.located import compute, run_in
from ..choreography.net import Runtime
from ..choreography.roles import STAR, Cast
from ..choreography.run.local import LocalRuntime
from ..errors import ArgumentError
from ..secure_sum import PAIR
from ..session import S, Session

Names = Mapping[str, str | Sequence[str]]
"""The names of the parties by role; several parties of a role in a list."""


class Parties(Protocol):
    """The parties of a program: the simulation's, or those of a federation.

    `inputs` are the tensors of the parties that are here, by name. `folder` is for the state with which a later run
    goes on (`sectorch.Checkpoints`); it need not exist.
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
            names: the parties' names by role; by default those of the roles. In secure inference (`STAR`) A may be a
                list, which gives the session's `answering` in that order; D may be a dealer, and O a list of owners
                without shares (`Session(owners=)`).
            label: two sessions of the same parties at the same time need different labels.
            agreed: settings, or a program's digest, which must be the same at all parties.
        """
        ...

    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = ..., agreed: str = ...
    ) -> AbstractContextManager[Runtime]:
        """The runtime of a session, for protocols with nets of their own, in which several parties play one role.

        Args:
            parties: all parties, with their names.
        """
        ...


class Simulation:
    """All parties in this process, for development and as the oracle of tests. It protects nothing."""

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


@contextmanager
def client_sessions(
    parties: Parties, clients: Sequence[str], server: str = "Server", *, label: str = "client", agreed: str = ""
) -> Iterator[dict[str, Session | None]]:
    """A session of each client with the server, of the roles `sectorch.secure_sum.PAIR`, for sums with drop-outs.

    When a client is lost, its session ends and the others go on. None stands for the sessions without a party here.

    Args:
        clients, server: names of the parties.
        label, agreed: as of `Parties.session`.
    """
    with ExitStack() as stack:
        yield {
            client: stack.enter_context(
                parties.session(PAIR, {"Server": server, "Client": client}, label=f"{label} {client}", agreed=agreed)
            )
            if parties.present(server) or parties.present(client)
            else None
            for client in clients
        }


def as_list(names: str | Sequence[str]) -> list[str]:
    """One name or several, as a list."""
    return [names] if isinstance(names, str) else list(names)


def star(names: Names, dry: bool = False) -> Session:
    """A session of secure inference in one process; see `Parties.session`."""
    dealer, owners = "D" if "D" in names else "Q", as_list(names.get("O", ()))
    return Session(answering=len(as_list(names.get("A", "A"))), dealer=dealer, owners=owners, dry=dry)


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """The results of a program by name, from a tensor, a mapping of tensors, or None; without other parties' results.

    Raises:
        ArgumentError: the program returned something else.
    """
    if result is None:
        return {}
    named = {"result": result} if isinstance(result, torch.Tensor) else result
    if not isinstance(named, Mapping) or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise ArgumentError(f"a program returns a tensor, tensors by name, or nothing, got a {type(result).__name__}")
    return {str(name): value for name, value in named.items() if not value.is_meta}


# Turns of clients: a client sends a message to the server, which broadcasts it. Each client has a net of its own with
# the server. A paper declares the message (a protocol from C to S) and its broadcast (one from S to C), of the roles
# `TURN`.

TURN = Roles("C S", edges="C-S")

Say = Callable[[Net, Located], Located]
"""A declared protocol of one message."""


class Turns:
    """All parties of a run. The loss of one of them ends the run for all.

    Args:
        clients: the other parties' names, in the order of their turns.
        hub: the party that passes on what it hears.
    """

    def __init__(self, clients: Sequence[str], runtime: Runtime, hub: str = S.name):
        parties = {name: Party(name, "C") for name in clients}
        self._hub = Party(hub, "S")
        self._everyone = frozenset((*parties.values(), self._hub))
        casts = [Cast(TURN, {"C": party, "S": self._hub}) for party in parties.values()]
        self._nets = {
            name: Net(runtime, number, cast, Phase.ONLINE)
            for number, (name, cast) in enumerate(zip(parties, casts, strict=True))
        }

    def hear(self, speaker: str, message: torch.Tensor | None, count: int, tell: Say, broadcast: Say) -> torch.Tensor:
        """Send a party's message to the hub, which broadcasts it. Rounds 2, bytes 8 count (clients + 1); of the hub
        itself 1 and 8 count clients.

        Args:
            message: int64 [count], at the speaker; None elsewhere.
        """
        if speaker == self._hub.name:
            net = next(iter(self._nets.values()))
            return self._broadcast(net.own(net.S, _or_meta(message, count)), broadcast)
        net = self._nets[speaker]
        return self._broadcast(tell(net, net.own(net.C, _or_meta(message, count))), broadcast)

    def hear_all(
        self, messages: Mapping[str, torch.Tensor], count: int, tell: Say, broadcast: Say
    ) -> dict[str, torch.Tensor]:
        """Broadcast a message of each client. Rounds 2, bytes 8 count clients (clients + 1).

        Args:
            messages: int64 [count], of the clients that are here.
        """
        at_S = [tell(net, net.own(net.C, _or_meta(messages.get(name), count))) for name, net in self._nets.items()]
        with run_in(next(iter(self._nets.values()))):
            value = compute(torch.cat, at_S)
        return dict(zip(self._nets, self._broadcast(value, broadcast).split(count), strict=True))

    def compare(self, messages: Mapping[str, torch.Tensor], tell: Say, broadcast: Say) -> list[int]:
        """Whether a party's number is not 0, and whether all are at the same step, by the digests beside them.

        Rounds 2, bytes 40 clients.

        Args:
            messages: int64 [2], a number and a digest, of the members that are here.

        Returns:
            The largest number, the hub's digest, and which client's digest is the first that differs, or -1.
        """
        own = lambda net, party, name: net.own(party, _or_meta(messages.get(name), 2))
        one = next(iter(self._nets.values()))
        rows = [own(one, one.S, self._hub.name)]
        rows += [tell(net, own(net, net.C, name)) for name, net in self._nets.items()]
        with run_in(one):
            value = compute(_compared, rows)
        return self._broadcast(value, broadcast).tolist()

    def _broadcast(self, value: Located, broadcast: Say) -> torch.Tensor:
        for net in self._nets.values():
            value = broadcast(net, value)
        return next(iter(self._nets.values())).agreed(value, self._everyone)


def _or_meta(message: torch.Tensor | None, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta") if message is None else message


@contextmanager
def meet(clients: Sequence[str], together: Parties, *, label: str, agreed: str, hub: str = S.name) -> Iterator[Turns]:
    """Open a run of all parties.

    Args:
        label: of the paper.
        agreed: settings that must be the same at all parties.
        hub: the party beside the clients.

    Raises:
        RefusedError: another party has other settings or other parties. PeerLostError: a party is missing.
    """
    everyone = {**{Party(name, "C"): name for name in clients}, Party(hub, "S"): hub}
    with together.runtime(TURN, everyone, label=label, agreed=agreed) as runtime:
        yield Turns(clients, runtime, hub)


def _compared(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    hub, *clients = rows
    other = torch.stack([row[1] != hub[1] for row in clients])
    first = torch.where(other.any(), other.long().argmax(), -torch.ones_like(hub[0]))
    return torch.stack((torch.stack([row[0] for row in rows]).amax(), hub[1], first))
