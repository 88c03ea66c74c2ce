"""The server's side of a federation's sessions: it brings parties together and relays what it cannot read.

Parties ask to meet under a label; when all that were named are there, each is told, and from then on frames of a pair
go from one end's connection to the other's as they came. What the parties are about to do is none of the server's
business: it compares the digest that each says, so that a difference has a clear error before anything runs, and the
parties compare it once more past the server (`secured.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import (
    BusyError,
    DeadlockError,
    FrameError,
    IdentityError,
    NetworkError,
    PeerLostError,
    RefusedError,
    SectorchError,
)
from ..log import write
from ..messages import (
    Delivery,
    IsUp,
    Meet,
    Note,
    PartFinished,
    PartiesMissing,
    PartiesUp,
    Refusal,
    ServerReply,
    ServerRequest,
    SessionBegin,
    Unmeet,
    WhoIsUp,
)
from ..names import NAME, name_of, readable
from ..wire.channel import Link

# Parties that wait for each other in a circle: each for another one, which waits in another session.
#
# A party that has one thread opens one session after another, and comes to none while it waits for the parties of one.
# It says so when it asks to meet; of a party that does not, another thread may still come, and it is in no circle.


Key = tuple[str, tuple[str, ...]]
"""A label, and the names of the parties that meet under it."""


def find_deadlock(waits: Mapping[str, Key], there: Mapping[Key, set[str]]) -> list[str]:
    """Names of parties each of which waits for the next one, and the last one for the first; none if there is none.

    Args:
        waits: in what each party waits that does nothing else meanwhile. there: who has come to it.
    """
    over: set[str] = set()
    for first in waits:
        path = [first]
        while path:
            awaited = _next(path[-1], waits, there, over)
            if awaited is None:
                over.add(path.pop())
            elif awaited in path:
                return path[path.index(awaited) :]
            else:
                path.append(awaited)
    return []


def _next(name: str, waits: Mapping[str, Key], there: Mapping[Key, set[str]], over: set[str]) -> str | None:
    key = waits[name]
    return next((other for other in key[1] if other in waits and other not in there[key] and other not in over), None)


def deadlock_message(found: list[str], waits: Mapping[str, Key], to: str) -> str:
    """What one party is told of a circle; the label of a session that it is not in is none of its business."""

    def hops() -> Iterator[str]:
        for name, awaited in zip(found, [*found[1:], found[0]], strict=True):
            label, names = waits[name]
            yield f"'{name}' waits for '{awaited}'" + (f" in '{readable(label)}'" if to in names else "")

    return (
        f"these parties wait in a circle, and none of them will come: {', '.join(hops())}; start all of them again. A "
        f"program that opens one session after another holds one that all are in meanwhile, and then this cannot be"
    )


# The server's side of parties that are up: it knows which connection of a party takes notes, and hands them on.
#
# A note is signed by the party that wrote it, for the one that reads it (`proposals.py`); the server looks at neither.
# A party has one connection under its name that is up, and others under a tag each, for whoever waits for replies.


CLOCKS = 300.0
"""Seconds by which a party's clock may differ from the server's: certificates and logs go by clocks."""
LONGEST = 64 << 10
"""Bytes of one note."""
TAGS_EACH = 64
"""Connections of one party that wait for replies."""
Place = tuple[str, str]
"""A party's name and a tag; none is that of the process that is up."""


class NoteBoard:
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

    def who(self, request: WhoIsUp) -> PartiesUp:
        """Which of the parties are up, each with a word that changes when it comes again."""
        return PartiesUp(up={name: token for name in request.parties if (token := self.token(name))})

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
                there.tell(Delivery(note=request.note, sender=sender))
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


class SessionBroker:
    """All of a server's. Its methods are called by the threads that read the clients' connections.

    Args:
        links: a client's connections.
    """

    def __init__(self, links: Callable[[str], Collection[Link]] = lambda name: ()):
        self._lock, self.notes, self._links = threading.Lock(), NoteBoard(), links
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
        if isinstance(request, PartFinished):
            return self.done(link, request)
        if isinstance(request, IsUp):
            return self.notes.up(link, request)
        if isinstance(request, WhoIsUp):
            return self.notes.who(request)
        if isinstance(request, Note):
            return self.notes.note(link, request)
        raise FrameError(f"no server answers '{request.do}'")

    def meet(self, link: Link, request: Meet) -> PartiesMissing:
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
        return PartiesMissing(missing=missing)

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

    def done(self, link: Link, request: PartFinished) -> ServerReply:
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
            found = find_deadlock(waits, {key: set(gathering.links) for key, gathering in self._waiting.items()})
            for key in {waits[name] for name in found}:
                told += [
                    (link, key, deadlock_message(found, waits, name))
                    for name, link in self._waiting.pop(key).links.items()
                ]
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
        begin = SessionBegin(meeting=running.run.hex(), label=running.label, parties=names)
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
            link.end_forwarding(running.run)
            for other in running.links:
                if other != name:
                    link.end_forwarding(wire_of(running.run, name, other))


def _refuse(link: Link, key: Key, error: NetworkError) -> None:
    label, parties = key
    with suppress(SectorchError):
        link.tell(Refusal(label=label, parties=list(parties), error=type(error).__name__, text=str(error)), urgent=True)


def _names(request: Meet | Unmeet) -> tuple[str, ...]:
    names = tuple(sorted(name_of(name, "a party's name in a request", FrameError) for name in request.parties))
    if len(set(names)) < len(names):
        raise FrameError("parties that meet have different names")
    return names
