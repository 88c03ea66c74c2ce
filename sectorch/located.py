"""Parties, and values that only some of them hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from .errors import SecretBranchError


@dataclass(frozen=True)
class Party:
    """One participant. `role` is Q (querying), A (answering) or S (server); a session may have several A."""

    name: str
    role: str

    def __repr__(self) -> str:
        return self.name


class Phase(IntEnum):
    """What a value depends on; a value computed from several takes the latest."""

    SETUP = 0
    OFFLINE = 1
    ONLINE = 2


class Located:
    """A value held by its owners only. It has a shape for everybody, and a content for nobody but `Net.locally`."""

    __slots__ = ("_session", "_value", "owners", "phase", "round", "slot")

    def __init__(self, value, owners: frozenset[Party], phase: Phase, round: int, session: bytes, slot=None):
        self._value = value
        self.owners = owners
        self.phase = phase
        self.round = round
        self.slot = slot
        self._session = session

    @property
    def shape(self) -> torch.Size:
        return self._value.shape

    def __repr__(self) -> str:
        names = ", ".join(sorted(p.name for p in self.owners))
        return f"Located({tuple(self.shape)} at {names}, {self.phase.name.lower()})"

    def _refuse(self, *_):
        raise SecretBranchError(
            "a located value cannot steer Python control flow or be unpacked: most parties do not hold it. "
            "Compute on it inside net.locally(...), or write the choice as arithmetic (sectorch.mpc.select)"
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __index__ = __float__ = __int__ = _refuse
    __contains__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __reduce__(self):
        raise SecretBranchError("a located value cannot be copied or pickled")
