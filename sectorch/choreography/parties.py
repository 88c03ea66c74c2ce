"""The parties of a choreography, and what their values depend on."""

from __future__ import annotations

from enum import IntEnum
from threading import Lock
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary


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
