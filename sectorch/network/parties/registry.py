"""At the server: who answers under which name, with which version, and over which of several connections.

A name may be answered by several processes of one party (replicas), which say that they are, and each have a store of
their own. Of the versions that they have, the one that was made last is answered with, unless one is asked for; of
those that have it, the process with the fewest sessions. Material that was prepared at one is used at that one.
"""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass

from ...errors import BusyError, UnknownModelError
from ..names import party_of
from ..store.store import fingerprint, version
from ..wire.link import Link
from .serving import Model


@dataclass
class Offered(Model):
    """A model that an answering party has, over one connection.

    Attributes:
        link: the connection. made: when the model was made, by the party's own clock; the latest one counts.
    """

    link: Link
    made: int = 0
    number: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of its masked weights, in a session."""
        return sum(8 * math.prod(entry["shape"]) for entry in self.description["weights"])

    @property
    def version(self) -> str:
        return version(self.description, self.edition)

    @property
    def open(self) -> bool:
        return self.link.closed is None


class Registry:
    """All that answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count(1)
        self._offers: dict[str, list[Offered]] = {}

    def names(self) -> list[str]:
        """Of the models that can be asked."""
        with self._lock:
            return sorted(name for name, offers in self._offers.items() if any(o.open for o in offers))

    def prune(self) -> None:
        """Forget connections that are closed."""
        with self._lock:
            found = {name: [o for o in offers if o.open] for name, offers in self._offers.items()}
            self._offers = {name: offers for name, offers in found.items() if offers}

    def add(self, name: str, offered: Offered) -> list[Link]:
        """A connection answers under this name, in place of what it did before; connections that it takes the place of.

        A store is of one process: who comes with the store of another one is that one, started again.

        Raises:
            BusyError: another one answers, and the two are not both replicas.
        """
        with self._lock:
            others = [o for o in self._offers.get(name, []) if o.open and o.link is not offered.link]
            replaced = [o for o in others if o.keeper and o.keeper == offered.keeper]
            others = [o for o in others if o not in replaced]
            if any(not (o.keeper and offered.keeper) for o in others):
                raise BusyError(f"'{name}' is answering already; replicas of it are all started as such (--replica)")
            offered.number = next(self._count)
            self._offers[name] = [*others, offered]
        return [o.link for o in replaced]

    def find(self, name: str, wanted: object = None, keeper: str | None = None) -> Offered:
        """Who is asked now.

        Args:
            wanted: the version that is asked for, if it is there; whoever asks sees which one it gets.
            keeper: whose store has the other half of what was prepared.

        Raises:
            UnknownModelError: nobody has that name, or who has the material is away.
        """
        with self._lock:
            there = [o for o in self._offers.get(name, []) if o.open]
        if not there:
            raise self._unknown(name)
        if keeper and all(o.keeper for o in there):
            there = [o for o in there if o.keeper == keeper]
            if not there:
                raise UnknownModelError(f"the replica of '{name}' at which that was prepared is not connected")
        exact = [o for o in there if o.version == wanted] or there
        latest = max(exact, key=lambda o: (o.made, o.number)).version
        same = [o for o in exact if o.version == latest]
        return min(same, key=lambda o: (o.link.sessions, -o.number))

    def _unknown(self, name: str) -> UnknownModelError:
        names, party = self.names(), party_of(name)
        others = f"there are: {', '.join(names)}" if names else "nor any other"
        if any(party_of(other) == party for other in names):
            return UnknownModelError(f"no model '{name}' is connected; {others}")
        return UnknownModelError(
            f"no model '{name}' is connected; {others}. A party that has just been started compiles first, which can "
            f"take a minute: if '{party}' was, ask again"
        )

    def another(self, names: list[str], lost: list[Link]) -> bool:
        """Whether all of these can be asked over other connections."""
        with self._lock:
            return all(any(o.open and o.link not in lost for o in self._offers.get(name, [])) for name in names)


def current(offered: Offered) -> dict:
    """What material that can be used with it is bound to."""
    return {"edition": offered.edition, "fingerprint": fingerprint(offered.description)}
