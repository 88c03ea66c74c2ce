"""The server's side of parties that are up: it knows which connection of a party takes notes, and hands them on.

A note is signed by the party that wrote it, for the one that reads it (`proposals.py`); the server looks at neither. A
party has one connection under its name that is up, and others under a tag each, for whoever waits for replies.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import BusyError, FrameError, PeerLostError, RefusedError, SectorchError
from ..names import NAME, name_of
from ..wire.link import Link

LATEST = 1e12
"""Seconds since 1970 beyond which a number is no time."""
CLOCKS = 300.0
"""Seconds by which a party's clock may differ from the server's: certificates and logs go by clocks."""
LONGEST = 64 << 10
"""Bytes of one note."""
TAGS_EACH = 64
"""Connections of one party that wait for replies."""
Place = tuple[str, str]
"""A party's name and a tag; none is that of the process that is up."""


class Notes:
    """All of a server's. Its methods are called by the threads that read the connections."""

    def __init__(self):
        self._lock = threading.Lock()
        self._there: dict[Place, tuple[Link, str]] = {}

    @property
    def requests(self) -> dict[str, Callable[[Link, dict], dict]]:
        """What a client may ask, by its name in a request."""
        return {"up": self.up, "who": self.who, "note": self.note}

    def up(self, link: Link, request: dict) -> dict:
        """From now on this connection takes notes for its party.

        Raises:
            FrameError: a tag that is none. BusyError: another process of that name is up, or too many wait.
            RefusedError: its clock is far off.
        """
        check_clock(link.peer, request.get("time"))
        tag = request.get("tag", "")
        if not isinstance(tag, str) or (tag and not NAME.fullmatch(tag)):
            raise FrameError("a tag that is none")
        place = link.peer, tag
        with self._lock:
            self._there = {p: (there, token) for p, (there, token) in self._there.items() if there.closed is None}
            known = self._there.get(place)
            if known is not None and known[0] is not link:
                raise BusyError(f"'{link.peer}' is up already, in another process; stop that one first")
            if sum(name == link.peer for name, _ in self._there) > TAGS_EACH:
                raise BusyError(f"{TAGS_EACH} connections of '{link.peer}' wait for replies already")
            self._there[place] = link, os.urandom(8).hex()
        return {}

    def who(self, _: Link, request: dict) -> dict:
        """Which of the parties are up, each with a word that changes when it comes again."""
        names = request.get("parties")
        if not isinstance(names, list) or len(names) > 256:
            raise FrameError("who is up is asked of a list of names")
        return {"up": {name: token for name in map(str, names) if (token := self.token(name))}}

    def token(self, name: str) -> str:
        """Of a party that is up here; empty where it is not."""
        with self._lock:
            link, token = self._there.get((name, ""), (None, ""))
        return token if link is not None and link.closed is None else ""

    def note(self, link: Link, request: dict) -> dict:
        """Hand a note on.

        Raises:
            FrameError: it is none. PeerLostError: whom it is for is not there.
        """
        self.deliver(link.peer, request)
        return {}

    def deliver(self, sender: str, request: dict) -> None:
        """Hand a note on to one that is here; see `note`."""
        to, tag, note = request.get("to"), request.get("tag", ""), request.get("note")
        name = name_of(to, "the name of the party that a note is for", FrameError)
        if not isinstance(note, dict) or not isinstance(tag, str) or len(json.dumps(note)) > LONGEST:
            raise FrameError(f"a note is an object of at most {LONGEST} bytes")
        with self._lock:
            there, _ = self._there.get((name, tag), (None, ""))
        if there is not None and there.closed is None:
            with suppress(SectorchError):  # then it is lost
                there.tell({"do": "serve", "note": note, "from": sender})
                return
        raise PeerLostError(f"'{name}' is not up" if not tag else f"'{name}' does not wait for that reply any more")


def check_clock(name: str, said: Any) -> None:
    """Whether a party's clock is near this one's; see `CLOCKS`. Raises FrameError, RefusedError."""
    if type(said) not in (int, float) or not abs(said) < LATEST:
        raise FrameError("a request to meet that does not say the time")
    apart = abs(said - time.time())
    if apart > CLOCKS:
        raise RefusedError(
            f"the clock of '{name}' and the server's are {apart:.0f} s apart, at most {CLOCKS:.0f} are let pass: "
            f"set the clock (NTP)"
        )
