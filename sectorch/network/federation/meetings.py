"""The server's side of a federation's sessions: it brings parties together and relays what it cannot read.

Parties ask to meet under a label; when all that were named are there, each is told, and from then on frames of a pair
go from one end's connection to the other's as they came. What the parties are about to do is none of the server's
business: it compares the digest that each says, so that a difference has a clear error before anything runs, and the
parties compare it once more past the server (`secured.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import (
    BusyError,
    DeadlockError,
    FrameError,
    IdentityError,
    NetworkError,
    RefusedError,
    SectorchError,
)
from ..log import write
from ..messages import (
    Begins,
    Done,
    IsUp,
    Meet,
    Missing,
    Note,
    Refused,
    ServerReply,
    ServerRequest,
    Unmeet,
    WhoIsUp,
)
from ..names import name_of, readable
from ..wire.link import Link
from .circles import Key, circle, said
from .notes import Notes, check_clock

log = logging.getLogger("sectorch.server")
WAITING_EACH, MEETINGS_EACH = 64, 256
"""What one party may wait for, and take part in, at once."""


def wire_of(run: bytes, one: str, other: str) -> bytes:
    """The name on the way of the pair's frames."""
    low, high = sorted((one, other))
    return hashlib.sha256(run + low.encode() + b"|" + high.encode()).digest()[:16]


@dataclass
class _Gathering:
    """Parties that wait for others; `alone` are those that do nothing else meanwhile."""

    digest: str
    links: dict[str, Link] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)


@dataclass
class _Running:
    """A session in which all parties are."""

    run: bytes
    label: str
    links: dict[str, Link]
    over: set[str] = field(default_factory=set)


class Meetings:
    """All of a server's. Its methods are called by the threads that read the clients' connections.

    Args:
        links: a client's connections.
    """

    def __init__(self, links: Callable[[str], Collection[Link]] = lambda name: ()):
        self._lock, self.notes, self._links = threading.Lock(), Notes(), links
        self._waiting: dict[Key, _Gathering] = {}
        self._running: dict[bytes, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def answer(self, link: Link, request: ServerRequest) -> ServerReply:
        """What a client asks of a federation's. Raises SectorchError."""
        if isinstance(request, Meet):
            return self.meet(link, request)
        if isinstance(request, Unmeet):
            return self.unmeet(link, request)
        if isinstance(request, Done):
            return self.done(link, request)
        if isinstance(request, IsUp):
            return self.notes.up(link, request)
        if isinstance(request, WhoIsUp):
            return self.notes.who(request)
        if isinstance(request, Note):
            return self.notes.note(link, request)
        raise FrameError(f"no server answers '{request.do}'")

    def meet(self, link: Link, request: Meet) -> Missing:
        """A party asks to meet others; who is still missing is the reply.

        Raises:
            FrameError: what is no such request. IdentityError: it is not among those it names.
            RefusedError: another one waits for them with another program; or its clock is far off.
            BusyError: it waits for them already, or for too many.
        """
        label, digest, names = request.label, request.digest, _names(request)
        if link.peer not in names:
            raise IdentityError(f"the certificate is for '{link.peer}', which is not among {', '.join(names)}")
        check_clock(link.peer, request.time)
        with self._lock:
            self._forget_lost()
            found = self._waiting.get((label, names))
            if found is not None and found.digest != digest:
                del self._waiting[label, names]
                running, missing = None, []
            else:
                running, missing = self._join(link, label, names, found or _Gathering(digest))
                if missing:
                    alone = self._waiting[label, names].alone
                    (alone.add if request.alone else alone.discard)(link.peer)
        if running is not None:
            self._begin(running)
        elif missing:
            self.look()
        elif not missing and found is not None:
            self._dissolve(found, label, names, link.peer)
        return Missing(missing=missing)

    def _join(
        self, link: Link, label: str, names: tuple[str, ...], gathering: _Gathering
    ) -> tuple[_Running | None, list[str]]:
        """The session, once all are there, and who is missing. Called with the lock held."""
        name = link.peer
        if name in gathering.links:
            raise BusyError(f"'{name}' waits for '{readable(label)}' already; one of the two has to stop")
        if sum(name in g.links for g in self._waiting.values()) >= WAITING_EACH:
            raise BusyError(f"'{name}' waits for {WAITING_EACH} sessions already")
        if sum(name in r.links for r in self._running.values()) >= MEETINGS_EACH:
            raise BusyError(f"'{name}' takes part in {MEETINGS_EACH} sessions already")
        gathering.links[name] = link
        missing = [other for other in names if other not in gathering.links]
        if missing:
            self._waiting[label, names] = gathering
            return None, missing
        self._waiting.pop((label, names), None)
        running = _Running(os.urandom(16), label, gathering.links)
        self._running[running.run] = running
        return running, []

    def unmeet(self, link: Link, request: Unmeet) -> ServerReply:
        """A party does not wait any more."""
        with self._lock:
            gathering = self._waiting.get((request.label, _names(request)))
            if gathering is not None and gathering.links.get(link.peer) is link:
                del gathering.links[link.peer]
            self._forget_lost()
        return ServerReply()

    def done(self, link: Link, request: Done) -> ServerReply:
        """A party has done its part of a session: it may leave without the others' session ending."""
        with self._lock:
            running = self._running.get(bytes.fromhex(request.meeting))
            if running is not None and running.links.get(link.peer) is link:
                running.over.add(link.peer)
                if running.over == set(running.links):
                    self._end(running)
        return ServerReply()

    def look(self) -> None:
        """Whether parties wait in a circle, which has to be looked for when one begins to wait, or a connection ends.

        What they wait for is dissolved, and all who wait in it are told why.
        """
        told: list[tuple[Link, Key, str]] = []
        with self._lock:
            self._forget_lost()
            waits: dict[str, Key] = {}
            for key, gathering in self._waiting.items():
                waits |= dict.fromkeys(filter(self._once, gathering.alone & gathering.links.keys()), key)
            found = circle(waits, {key: set(gathering.links) for key, gathering in self._waiting.items()})
            for key in {waits[name] for name in found}:
                told += [(link, key, said(found, waits, name)) for name, link in self._waiting.pop(key).links.items()]
        for link, key, text in told:
            _refuse(link, key, DeadlockError(text))
        if found:
            write(log, "circle", parties=",".join(found))

    def _once(self, name: str) -> bool:
        """Whether a client has one connection: with several it may be several processes, of which each may come."""
        return sum(link.closed is None for link in self._links(name)) <= 1

    def _dissolve(self, gathering: _Gathering, label: str, names: tuple[str, ...], late: str) -> None:
        """One party came with another digest than those that wait: they, and it, are told, and nobody waits.

        Called without the lock, so that one that takes nothing of what it is told holds up nobody.
        """
        there = ", ".join(sorted(gathering.links))
        text = (
            f"{there} would run something else as '{readable(label)}' than '{late}': all parties need the same "
            f"federation file, program, settings and version of sectorch"
        )
        for link in gathering.links.values():
            _refuse(link, (label, names), RefusedError(text))
        raise RefusedError(text)

    def _forget_lost(self) -> None:
        for key, gathering in list(self._waiting.items()):
            gathering.links = {name: link for name, link in gathering.links.items() if link.closed is None}
            if not gathering.links:
                del self._waiting[key]

    def _begin(self, running: _Running) -> None:
        names = sorted(running.links)
        told = threading.Event()
        for name, link in running.links.items():
            for other, there in running.links.items():
                if other != name:
                    link.forward(wire_of(running.run, name, other), there, told)
        begin = Begins(meeting=running.run.hex(), label=running.label, parties=names)
        for name, link in running.links.items():
            try:
                control = link.open(running.run)
                control.on_failure(lambda failure, name=name: self._lost(running, name, failure))
                link.tell(begin, urgent=True)
            except SectorchError as error:
                self._lost(running, name, error)
        told.set()
        with self._lock:
            ended = running.run not in self._running
            if ended:
                self._clear(running)
        if ended:  # who was told of the session only after its end hears once more that it is over
            for link in running.links.values():
                link.refuse(running.run, "PeerLostError: a party left as the session began, or gave it up")
            return
        write(log, "session began", session=running.run.hex(), label=readable(running.label), parties=",".join(names))

    def _lost(self, running: _Running, name: str, failure: SectorchError) -> None:
        """A party left, or gave the session up: the others hear of it, unless it had done its part."""
        with self._lock:
            if running.run not in self._running or (name in running.over and name):
                return
            del self._running[running.run]
        who = f"'{name}' gave up or is lost: " if name else ""
        text = f"{type(failure).__name__}: {who}{failure}"
        write(log, "session ended", session=running.run.hex(), by=name or None, why=text)
        for other, link in running.links.items():
            if other != name:
                link.refuse(running.run, text)
        with self._lock:  # only now: what somebody still sends would be refused first, without a name
            self._clear(running)

    def _end(self, running: _Running) -> None:
        """Called with the lock held."""
        del self._running[running.run]
        self._clear(running)

    def _clear(self, running: _Running) -> None:
        for name, link in running.links.items():
            link.part(running.run)
            for other in running.links:
                if other != name:
                    link.part(wire_of(running.run, name, other))


def _refuse(link: Link, key: Key, error: NetworkError) -> None:
    label, parties = key
    with suppress(SectorchError):
        link.tell(Refused(label=label, parties=list(parties), error=type(error).__name__, text=str(error)), urgent=True)


def _names(request: Meet | Unmeet) -> tuple[str, ...]:
    names = tuple(sorted(name_of(name, "a party's name in a request", FrameError) for name in request.parties))
    if len(set(names)) < len(names):
        raise FrameError("parties that meet have different names")
    return names
