"""Secure inference among parties of a federation: who plays what, and how Q and those that answer know each other."""

from __future__ import annotations

from dataclasses import dataclass

from ...choreography import Party
from ...choreography.roles import STAR, Roles
from ...errors import ArgumentError, IdentityError
from ...federated.parties import Names, listed
from ...members import answering_parties
from ...mpc.star.seed import Identities
from ..identity.identity import fingerprint
from .file import Federated


def star_of(names: Names) -> dict[Party, str]:
    """The parties of secure inference: Q, S, those that answer, in their order, a dealer, and owners by their names."""
    single = [role for role in ("Q", "S", "D") if role in names]
    if not {"Q", "S", "A"} <= set(names) <= {"Q", "S", "A", "D", "O"} or not all(
        isinstance(names[role], str) for role in single
    ):
        raise ArgumentError(
            f"secure inference has one Q, one S, one A or a list of them, and may have a D and a list O of owners; got "
            f"{dict(names)}"
        )
    answering = listed(names["A"])
    if not answering:
        raise ArgumentError("a session needs at least one answering party, got none")
    return {
        **{Party(role, role): str(names[role]) for role in single},
        **dict(zip(answering_parties(len(answering)), answering, strict=True)),
        **{Party(name, "O"): name for name in listed(names.get("O", ()))},
    }


def roles_of(cast: dict[Party, str]) -> Roles:
    """The roles that edges and streams of these are taken from: any number of owners play one."""
    return OWNED if any(party.role == "O" for party in cast) else STAR


OWNED = Roles("Q A S D O", edges="Q-S A-S D-S O-S", streams="Q-A D-A O-A")
"""The roles of secure inference, and that of those who own an input or learn a result and hold no shares."""


@dataclass
class Named(Identities):
    """Q, a dealer or an owner, and an answering party, each of whom knows the other's key from the federation file."""

    file: Federated | None = None

    def trust(self, name: str, public: bytes) -> None:
        if self.file is None or fingerprint(public) != self.file.member(name).identity:
            raise IdentityError(f"the key that came for '{name}' is not the one that the federation file names")
