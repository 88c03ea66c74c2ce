"""The server's side of parties that are up: it knows which connection of a party takes notes, and hands them on.

A note is signed by the party that wrote it, for the one that reads it (`proposals.py`); the server looks at neither. A
party has one connection under its name that is up, and others under a tag each, for whoever waits for replies.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress

from ...errors import BusyError, FrameError, PeerLostError, RefusedError, SectorchError
from ..messages import AreUp, Delivered, IsUp, Note, ServerReply, WhoIsUp
from ..names import NAME, name_of
from ..wire.link import Link

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

    def up(self, link: Link, request: IsUp) -> ServerReply:
        """From now on this connection takes notes for its party.

        Raises:
            FrameError: a tag that is none. BusyError: another process of that name is up, or too many wait.
            RefusedError: its clock is far off.
        """
        check_clock(link.peer, request.time)
        if request.tag and not NAME.fullmatch(request.tag):
            raise FrameError("a tag that is none")
        place = link.peer, request.tag
        with self._lock:
            self._there = {p: (there, token) for p, (there, token) in self._there.items() if there.closed is None}
            known = self._there.get(place)
            if known is not None and known[0] is not link:
                raise BusyError(f"'{link.peer}' is up already, in another process; stop that one first")
            if sum(name == link.peer for name, _ in self._there) > TAGS_EACH:
                raise BusyError(f"{TAGS_EACH} connections of '{link.peer}' wait for replies already")
            self._there[place] = link, os.urandom(8).hex()
        return ServerReply()

    def who(self, request: WhoIsUp) -> AreUp:
        """Which of the parties are up, each with a word that changes when it comes again."""
        return AreUp(up={name: token for name in request.parties if (token := self.token(name))})

    def token(self, name: str) -> str:
        """Of a party that is up here; empty where it is not."""
        with self._lock:
            link, token = self._there.get((name, ""), (None, ""))
        return token if link is not None and link.closed is None else ""

    def note(self, link: Link, request: Note) -> ServerReply:
        """Hand a note on.

        Raises:
            FrameError: it is none. PeerLostError: whom it is for is not there.
        """
        self.deliver(link.peer, request)
        return ServerReply()

    def deliver(self, sender: str, request: Note) -> None:
        """Hand a note on to one that is here; see `note`."""
        tag = request.tag
        name = name_of(request.to, "the name of the party that a note is for", FrameError)
        if len(json.dumps(request.note)) > LONGEST:
            raise FrameError(f"a note is an object of at most {LONGEST} bytes")
        with self._lock:
            there, _ = self._there.get((name, tag), (None, ""))
        if there is not None and there.closed is None:
            with suppress(SectorchError):  # then it is lost
                there.tell(Delivered(note=request.note, sender=sender))
                return
        raise PeerLostError(f"'{name}' is not up" if not tag else f"'{name}' does not wait for that reply any more")


def check_clock(name: str, said: float) -> None:
    """Whether a party's clock is near this one's; see `CLOCKS`. Raises RefusedError."""
    apart = abs(said - time.time())
    if apart > CLOCKS:
        raise RefusedError(
            f"the clock of '{name}' and the server's are {apart:.0f} s apart, at most {CLOCKS:.0f} are let pass: "
            f"set the clock (NTP)"
        )
