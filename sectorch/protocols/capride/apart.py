"""Parties in processes apart: their sessions, two for each pair, and the round on which all of them go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ...choreography import Located, Message, Net, protocol
from ...federated.parties import Parties
from ...session import Session
from .exchange import PEERS
from .settings import Party

Sessions = Mapping[tuple[str, str], Session]
"""By owner and peer: those that a party which is here takes part in."""


@protocol("capride_finished", "the beginning of a round", [
    Message("finished", "Pk", "Pl", "nothing", "the last round that P_k has finished"),
], roles=PEERS)  # fmt: skip
def finished(net: Net, number: Located) -> Located:
    """A party that was stopped comes back with the round that it has kept. int64 [1]. Rounds 1, bytes 8."""
    return number.send(net.Pk, net.Pl, "finished")


@contextmanager
def joined(parties: Sequence[Party], together: Parties, agreed: str) -> Iterator[Sessions]:
    """The sessions of each owner and peer one of whom is here. All parties open them in the same order.

    Args:
        agreed: what all have to agree on.

    Raises:
        RefusedError: another party has other settings, or knows of others than these. PeerLostError: one did not come.
    """
    with ExitStack() as stack:
        sessions = {}
        for k, peer in itertools.permutations([p.name for p in parties], 2):
            if together.present(k) or together.present(peer):
                session = together.session(PEERS, {"Pk": k, "Pl": peer}, label=f"capride {k} {peer}", agreed=agreed)
                sessions[k, peer] = stack.enter_context(session)
        yield sessions


def slowest(sessions: Sessions, done: int) -> int:
    """The last round that all parties have finished; this one has finished `done`. Waits for all of them."""
    found = [done]
    for session in sessions.values():
        with session.call() as net:
            number = torch.tensor([done], device=None if session.present(net.Pk) else "meta")
            arrived = finished(net, net.own(net.Pk, number))
            if session.present(net.Pl):
                found.append(int(net.read(arrived, net.Pl)))
    return min(found)
