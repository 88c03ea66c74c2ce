"""Secure inference among parties of a federation: who plays what, and how Q and those that answer know each other."""

from __future__ import annotations

from dataclasses import dataclass

from ...choreography import Party
from ...errors import ArgumentError, IdentityError
from ...federated.parties import Names
from ...mpc.star.seed import Identities
from ...session import Q, S
from ..identity.identity import fingerprint
from ..parties.remote import parties as answering_parties
from .file import Federated


def star_of(names: Names) -> dict[Party, str]:
    """The parties of secure inference: Q, S, and those that answer, in their order."""
    if not {"Q", "S", "A"} == set(names) or not all(isinstance(names[role], str) for role in ("Q", "S")):
        raise ArgumentError(f"secure inference has one Q, one S, and one A or a list of them; got {dict(names)}")
    answering = [names["A"]] if isinstance(names["A"], str) else list(names["A"])
    if not answering:
        raise ArgumentError("a session needs at least one answering party, got none")
    return {
        Q: str(names["Q"]),
        S: str(names["S"]),
        **dict(zip(answering_parties(len(answering)), answering, strict=True)),
    }


@dataclass
class Named(Identities):
    """Q and an answering party, each of whom knows the other's key from the federation file."""

    file: Federated | None = None

    def trust(self, name: str, public: bytes) -> None:
        if self.file is None or fingerprint(public) != self.file.member(name).identity:
            raise IdentityError(f"the key that came for '{name}' is not the one that the federation file names")
