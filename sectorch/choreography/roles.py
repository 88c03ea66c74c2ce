"""Roles: who takes part in a choreography, along which edges they send, and which pairs share a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from threading import Lock
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

from ..errors import ArgumentError, MisplacedValueError, TopologyError

# The parties of a choreography, and what their values depend on.


class Party:
    """One participant. `role` is Q (querying), A (answering) or S (server); a session may have several A.

    There is one object of each name and role, which is equal to itself alone: a call asks thousands of times who is
    among some parties, and Python answers that of itself.
    """

    __slots__ = ("__weakref__", "name", "role")
    name: str
    role: str
    _known: ClassVar[WeakValueDictionary[tuple[str, str], Party]] = WeakValueDictionary()
    _making: ClassVar[Lock] = Lock()

    def __new__(cls, name: str, role: str) -> Party:
        with cls._making:
            found = cls._known.get((name, role))
            if found is None:
                found = cls._known[name, role] = object.__new__(cls)
                object.__setattr__(found, "name", name)
                object.__setattr__(found, "role", role)
        return found

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("a party has no kinds but its role")

    def _stays(self, name: str, *_: Any) -> NoReturn:
        raise AttributeError(f"a party's {name} stays as it is")

    __setattr__ = __delattr__ = _stays

    def __reduce__(self) -> tuple:
        return Party, (self.name, self.role)

    def __repr__(self) -> str:
        return self.name


class Phase(IntEnum):
    """What a value depends on; a value computed from several takes the latest."""

    SETUP = 0
    OFFLINE = 1
    ONLINE = 2


@dataclass(frozen=True, init=False)
class Roles:
    """The roles of a protocol.

    Args:
        names: of the roles, apart by spaces. Whoever plays a role is bound to it by the session.
        edges: pairs that may send to each other, as in "A-S Q-S". An edge's ends share a stream.
        streams: further pairs that share a stream (`net.common`), whose ends have no edge.

    Raises:
        ArgumentError: no name of Python's, a name twice, or an edge or stream of a role that is not named.
    """

    names: tuple[str, ...]
    edges: frozenset[frozenset[str]]
    streams: frozenset[frozenset[str]]

    def __init__(self, names: str, edges: str, streams: str = ""):
        known = tuple(names.split())
        if not known or len(set(known)) < len(known) or not all(name.isidentifier() for name in known):
            raise ArgumentError(f"roles are different names apart by spaces, got {names!r}")
        object.__setattr__(self, "names", known)
        object.__setattr__(self, "edges", frozenset(_pairs(edges, known)))
        object.__setattr__(self, "streams", self.edges | frozenset(_pairs(streams, known)))

    def __str__(self) -> str:
        return " ".join(self.names) + " with edges " + " ".join(sorted("-".join(sorted(edge)) for edge in self.edges))

    def check_edge(self, src: str, dst: str) -> None:
        """Raise TopologyError unless these roles have an edge."""
        if frozenset((src, dst)) not in self.edges:
            raise TopologyError(f"no edge from {src} to {dst}; the roles are {self}")


def _pairs(text: str, known: tuple[str, ...]) -> Iterable[frozenset[str]]:
    for pair in text.split():
        ends = pair.split("-")
        if len(ends) != 2 or ends[0] == ends[1] or not set(ends) <= set(known):
            raise ArgumentError(f"'{pair}' is no pair of the roles {' '.join(known)}; write it as in {known[0]}-B")
        yield frozenset(ends)


STAR = Roles("Q A S D", edges="Q-S A-S D-S", streams="Q-A D-A")
"""The roles of secure inference: Q queries, A has the model, S serves, and D deals correlated randomness: Q does."""


@dataclass(frozen=True)
class Cast:
    """Roles, and the parties that play them in a call; one party may play several."""

    roles: Roles
    parties: Mapping[str, Party]

    def __post_init__(self):
        if set(self.parties) != set(self.roles.names):
            raise ArgumentError(f"the roles {' '.join(self.roles.names)} were given parties for {sorted(self.parties)}")

    def __repr__(self) -> str:
        return ", ".join(str(party) for party in dict.fromkeys(self.parties.values()))

    def has_edge(self, src: Party, dst: Party) -> bool:
        """Whether the two may send to each other."""
        return (src, dst) in self._edges

    def check_edge(self, src: Party, dst: Party) -> None:
        """Raise TopologyError unless the two may send to each other."""
        if not (type(src) is type(dst) is Party and (src, dst) in self._edges):
            self.check_party(src)
            self.check_party(dst)
            raise TopologyError(f"no channel from {src} to {dst}; the roles are {self.roles}")

    def check_stream(self, p: Party, q: Party) -> None:
        """Raise TopologyError unless the two share a stream."""
        if not (type(p) is type(q) is Party and (p, q) in self._streams):
            self.check_party(p)
            self.check_party(q)
            raise TopologyError(f"{p} and {q} share no stream; the roles are {self.roles}")

    def check_party(self, party: Any) -> None:
        """Raise TopologyError for what is none, such as its name."""
        if not isinstance(party, Party):
            raise TopologyError(f"a party is one of the net, as net.{self.roles.names[0]}; got {party!r}")

    def check_plays(self, names: Iterable[str], protocol: str) -> None:
        """Raise MisplacedValueError unless all these roles are played."""
        missing = [name for name in names if name not in self.parties]
        if missing:
            raise MisplacedValueError(f"'{protocol}' has a role {missing[0]}, and this call has {self.roles}")

    @cached_property
    def _edges(self) -> frozenset[tuple[Party, Party]]:
        return self._bound(self.roles.edges)

    @cached_property
    def _streams(self) -> frozenset[tuple[Party, Party]]:
        return self._bound(self.roles.streams)

    def _bound(self, pairs: Iterable[frozenset[str]]) -> frozenset[tuple[Party, Party]]:
        """These pairs of two different parties, both ways."""
        played = ([self.parties[name] for name in pair] for pair in pairs)
        return frozenset(ends for p, q in played if p is not q for ends in ((p, q), (q, p)))
