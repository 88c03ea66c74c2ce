"""A session whose other parties are elsewhere, and what a process knows of each of its answering parties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...choreography import Party
from ...choreography.program.setup import Setup
from ...choreography.roles import STAR
from ...choreography.run.party import PartyRuntime
from ...members import Members, answering_parties
from ...mpc.star.seed import Identities
from ...session import Q, Session


@dataclass
class Part:
    """One answering party of a session: its model's description, and how it and Q know each other."""

    description: dict
    identities: Identities
    weights: dict[str, torch.Tensor] | None = None


class RemoteSession(Session):
    """A session whose other parties are elsewhere.

    Args:
        runtime: of this process's party.
        identities: of Q and each answering party that this process knows of.
        place, of: which of how many answering parties the first of them is.
        fresh: whether it begins now; else it is taken up for its prepared material.
        dealer, owners: as of a `Session`.
        known: how one of those and an answering party know each other.
    """

    def __init__(
        self, runtime: PartyRuntime, identities: Sequence[Identities], place: int, of: int, fresh: bool, *,
        dealer: Party = Q, owners: Sequence[str] = (), known: Callable[[Party, Party], Identities] | None = None,
    ):  # fmt: skip
        self._begin(Members(STAR, answering_parties(len(identities)), dealer, owners))
        self.device = torch.device("cpu")
        self.runtime = runtime
        several = max(of, len(identities))
        self._numbers = {party: itertools.count(place + i, several) for i, party in enumerate(self.answering)}
        self._fresh = fresh
        self._open()
        if fresh:
            among = dict(zip(self.answering, identities, strict=True))
            self._seed(lambda client, party: among[party] if client == Q or known is None else known(client, party))

    def _number(self, party: Party | None) -> int:
        return next(self._numbers[self.answering_party(party)])

    def _new_setup(self, party: Party | None) -> Setup:
        return super()._new_setup(party) if self._fresh else Setup(None)
