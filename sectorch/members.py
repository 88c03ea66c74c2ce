"""Who is in a session: the parties by their roles, the casts of its calls, who owns inputs and who learns results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .choreography import Party
from .choreography.roles import STAR, Roles
from .errors import ArgumentError

Q, A, S = Party("Q", "Q"), Party("A", "A"), Party("S", "S")
"""The parties of a session with one answering party."""


class Members:
    """The parties of a session.

    Args:
        roles: of protocols of one's own, or `STAR`.
        answering: the answering parties of secure inference. dealer: Q, or a party of its own.
        owners: names of parties that own inputs and learn results, and hold no shares.
        names: of the parties that play roles of one's own, by role.

    Attributes:
        casts: for each answering party, or None in roles of one's own, who plays what in a call.
        playing: the roles of those casts: `STAR`, and one for each owner.

    Raises:
        ArgumentError: two parties of one name.
    """

    def __init__(
        self,
        roles: Roles,
        answering: Sequence[Party] = (A,),
        dealer: Party = Q,
        owners: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ):
        self.roles, self.dealer = roles, dealer
        self.answering: tuple[Party, ...] = tuple(answering) if roles is STAR else ()
        self.owners = tuple(Party(name, "O") for name in owners)
        taken = [*(p.name for p in (*self.answering, *self.owners, Q, S)), "D"]
        if not all(isinstance(name, str) and name for name in owners) or len(set(taken)) < len(taken):
            raise ArgumentError(f"owners are names, each another and none of Q, A, S and D; got {list(owners)}")
        self.playing = with_owners(len(self.owners)) if roles is STAR else roles
        also = {f"O{i + 1}": owner for i, owner in enumerate(self.owners)}
        if roles is STAR:
            self.casts: dict[Party | None, dict[str, Party]] = {
                party: {"Q": Q, "A": party, "S": S, "D": dealer, **also} for party in self.answering
            }
        else:
            self.casts = {None: {role: Party(name, role) for role, name in (names or {}).items()}}
        self.parties = frozenset(party for cast in self.casts.values() for party in cast.values())

    def answering_party(self, party: Party | None = None) -> Party:
        """`party`, if it is one of the answering parties; the first of them for None. Raises ArgumentError."""
        if not self.answering:
            raise ArgumentError(f"secure inference needs the roles {STAR}; this session has {self.roles}")
        if party is None:
            return self.answering[0]
        if not isinstance(party, Party) or party not in self.answering:
            known = isinstance(party, Party)
            raise ArgumentError(
                f"party must be an answering party of the session ({', '.join(p.name for p in self.answering)}), got "
                f"{f'{party.name} of role {party.role}' if known else f'a {type(party).__name__}'}; "
                f"pass party=session.answering[i], or leave it out for the first"
            )
        return party

    def named(self, who: Any, answering: Party) -> list[Party]:
        """Owners of an input, or who learns a result: one or several of Q, this A, S and the owners; Q for None.

        Raises ArgumentError for any other."""
        found, of = [], {str(key): p for p in (Q, answering, S) for key in (p, p.role, p.name)} | {"None": Q}
        of |= {owner.name: owner for owner in self.owners}
        for name in who if isinstance(who, (list, tuple)) and who else [who]:
            if not isinstance(name, (str, Party, type(None))) or str(name) not in of:
                known = ", ".join([Q.name, answering.name, *(owner.name for owner in self.owners)])
                raise ArgumentError(f"an owner, or who learns a result, is {known} or S, got {name!r:.40}")
            found.append(of[str(name)])
        return list(dict.fromkeys(found))


def members_of(
    answering: int, dealer: str, owners: Sequence[str], roles: Roles, names: Mapping[str, str] | None, reference: bool
) -> Members:
    """Those whom a `Session` of these arguments has. Raises ArgumentError as it does."""
    if answering < 1:
        raise ArgumentError(f"a session needs at least one answering party, got {answering}")
    if dealer not in ("Q", "D"):
        raise ArgumentError(
            f"the dealer is Q, or D, a party of its own, got {dealer!r}; A and S must not know the masks"
        )
    if roles is not STAR and (answering > 1 or dealer != "Q" or reference or owners):
        raise ArgumentError(
            f"answering, dealer, owners and reference are for secure inference, and the roles are {roles}"
        )
    called = {name: name for name in roles.names} | dict(names or {})
    different = set(called) == set(roles.names) and len(set(called.values())) == len(called)
    if names and (roles is STAR or not different):
        raise ArgumentError(f"names are of different parties in roles of one's own, got {names} for {roles}")
    return Members(roles, answering_parties(answering), Q if dealer == "Q" else Party("D", "D"), owners, called)


def answering_parties(count: int) -> tuple[Party, ...]:
    """The answering parties of a session, as it calls them."""
    return tuple(Party("A" if count == 1 else f"A{i + 1}", "A") for i in range(count))


def with_owners(count: int) -> Roles:
    """The roles of secure inference and so many owners: each has an edge to S and a stream with A, as Q does."""
    if not count:
        return STAR
    names = [f"O{i + 1}" for i in range(count)]
    edges = " ".join(f"{name}-S" for name in names)
    streams = " ".join(f"{name}-A" for name in names)
    return Roles(f"Q A S D {' '.join(names)}", edges=f"Q-S A-S D-S {edges}", streams=f"Q-A D-A {streams}")
