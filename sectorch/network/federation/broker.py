"""The server's side of federations: it brings the parties of sessions together, and relays frames that it cannot read.

`SessionBroker` holds the sessions. Parties ask to meet under a label. When all named parties have come, each is told,
and from then on the frames of a pair are forwarded from one connection to the other. The server does not learn what the
parties do: it compares the digests that they send, so that a difference gives a clear error before anything runs, and
the parties compare them again end to end (`sealed_channel`).

`NoteBoard` delivers notes between parties that are up. A note is signed by its author and addressed to its reader
(`proposals`); the server checks neither. A party has one connection under its name, and others with a tag each for
those that wait for replies.
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
    message_form,
)
from ..names import NAME, name_of, readable
from ..wire.channel import PeerLink

Key = tuple[str, tuple[str, ...]]
"""A label, and the names of the parties that meet under it."""


def find_deadlock(waits: Mapping[str, Key], there: Mapping[Key, set[str]]) -> list[str]:
    """Find parties each of which waits for the next one, and the last one for the first.

    Only parties with a single thread can be in a deadlock; they say so when they ask to meet. A party with other
    threads may still come to another session.

    Args:
        waits: the session in which each single-threaded party waits.
        there: the parties that have come to each session.

    Returns:
        Their names; empty if there is no deadlock.
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
    """The error text of a deadlock for one party. It names the labels of that party's own sessions only."""

    def hops() -> Iterator[str]:
        for name, awaited in zip(found, [*found[1:], found[0]], strict=True):
            label, names = waits[name]
            yield f"'{name}' waits for '{awaited}'" + (f" in '{readable(label)}'" if to in names else "")

    return (
        f"these parties wait in a circle, and none of them will come: {', '.join(hops())}; start all of them again. A "
        f"program that opens one session after another holds one that all are in meanwhile, and then this cannot be"
    )


CLOCKS = 300.0
"""Seconds by which a party's clock may differ from the server's, since certificates and logs depend on clocks."""
LONGEST = 64 << 10
"""Bytes of one note."""
MAX_TAGS = 64
"""Connections of one party that wait for replies."""
Place = tuple[str, str]
"""A party's name and a tag; the tag is empty for the process that is up."""


class NoteBoard:
    """The connections of a server that take notes. Its methods are called by the threads that read connections."""

    def __init__(self):
        self._lock = threading.Lock()
        self._places: dict[Place, tuple[PeerLink, str]] = {}

    def register(self, link: PeerLink, request: IsUp) -> ServerReply:
        """Let this connection take the notes for its party and tag.

        Raises:
            FrameError: the tag is invalid.
            BusyError: another process of that name is up, or too many wait for replies.
            RefusedError: the party's clock differs too much.
        """
        check_clock(link.peer, request.time)
        if request.tag and not NAME.fullmatch(request.tag):
            raise FrameError("a tag that is none")
        place = link.peer, request.tag
        with self._lock:
            self._places = {p: (there, token) for p, (there, token) in self._places.items() if there.closed is None}
            known = self._places.get(place)
            if known is not None and known[0] is not link:
                raise BusyError(f"'{link.peer}' is up already, in another process; stop that one first")
            if sum(name == link.peer for name, _ in self._places) > MAX_TAGS:
                raise BusyError(f"{MAX_TAGS} connections of '{link.peer}' wait for replies already")
            self._places[place] = link, os.urandom(8).hex()
        return ServerReply()

    def parties_up(self, request: WhoIsUp) -> PartiesUp:
        """The named parties that are up, each with a token that changes when it is started again."""
        return PartiesUp(up={name: token for name in request.parties if (token := self.token(name))})

    def token(self, name: str) -> str:
        """The token of a party; empty if it is not up."""
        with self._lock:
            link, token = self._places.get((name, ""), (None, ""))
        return token if link is not None and link.closed is None else ""

    def note(self, link: PeerLink, request: Note) -> ServerReply:
        """Deliver a note.

        Raises:
            FrameError: the note is too long, or names no party.
            PeerLostError: its reader is not up.
        """
        tag = request.tag
        name = name_of(request.to, "the name of the party that a note is for", FrameError)
        if len(json.dumps(message_form(request.note))) > LONGEST:
            raise FrameError(f"a note is an object of at most {LONGEST} bytes")
        with self._lock:
            there, _ = self._places.get((name, tag), (None, ""))
        if there is not None and there.closed is None:
            with suppress(SectorchError):  # the connection was just closed
                there.tell(Delivery(note=request.note, sender=link.peer))
                return ServerReply()
        raise PeerLostError(f"'{name}' is not up" if not tag else f"'{name}' does not wait for that reply any more")


def check_clock(name: str, reported: float) -> None:
    """Raise RefusedError for a party whose clock differs by more than `CLOCKS`."""
    difference = abs(reported - time.time())
    if difference > CLOCKS:
        raise RefusedError(
            f"the clock of '{name}' and the server's are {difference:.0f} s apart, at most {CLOCKS:.0f} are let pass: "
            f"set the clock (NTP)"
        )


log = logging.getLogger("sectorch.server")
MAX_WAITING, MAX_RUNNING = 64, 256
"""Sessions that one party may wait for, and take part in, at the same time."""


def wire_of(run: bytes, one: str, other: str) -> bytes:
    """The session name that the frames of a pair of parties carry."""
    low, high = sorted((one, other))
    return hashlib.sha256(run + low.encode() + b"|" + high.encode()).digest()[:16]


@dataclass
class _WaitingSession:
    """A session whose parties have not all come; `alone` are those with a single thread, which waits."""

    digest: str
    links: dict[str, PeerLink] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)


@dataclass
class _RunningSession:
    """A session of which all parties have come; `finished` are those that have done their part."""

    run: bytes
    label: str
    links: dict[str, PeerLink]
    finished: set[str] = field(default_factory=set)


class SessionBroker:
    """The federation sessions of a server. Its methods are called by the threads that read connections.

    Args:
        links: gives the connections of a client.
    """

    def __init__(self, links: Callable[[str], Collection[PeerLink]] = lambda name: ()):
        self._lock, self.notes, self._links = threading.Lock(), NoteBoard(), links
        self._waiting: dict[Key, _WaitingSession] = {}
        self._running: dict[bytes, _RunningSession] = {}

    def __len__(self) -> int:
        return len(self._running)

    def answer(self, link: PeerLink, request: ServerRequest) -> ServerReply:
        """Answer a federation's request. Raises SectorchError."""
        if isinstance(request, Meet):
            return self.meet(link, request)
        if isinstance(request, Unmeet):
            return self.unmeet(link, request)
        if isinstance(request, PartFinished):
            return self.finish(link, request)
        if isinstance(request, IsUp):
            return self.notes.register(link, request)
        if isinstance(request, WhoIsUp):
            return self.notes.parties_up(request)
        if isinstance(request, Note):
            return self.notes.note(link, request)
        raise FrameError(f"no server answers '{request.do}'")

    def meet(self, link: PeerLink, request: Meet) -> PartiesMissing:
        """Add a party to a session, and begin the session when all have come. The reply names the missing parties.

        Raises:
            FrameError: the request is invalid.
            IdentityError: the party is not among those it names.
            RefusedError: another party waits with another digest, or the clock differs too much.
            BusyError: the party waits for this session already, or for too many.
        """
        label, digest, names = request.label, request.digest, _names(request)
        if link.peer not in names:
            raise IdentityError(f"the certificate is for '{link.peer}', which is not among {', '.join(names)}")
        check_clock(link.peer, request.time)
        with self._lock:
            self._drop_closed()
            found = self._waiting.get((label, names))
            if found is not None and found.digest != digest:
                del self._waiting[label, names]
                running, missing = None, []
            else:
                running, missing = self._join(link, label, names, found or _WaitingSession(digest))
                if missing:
                    alone = self._waiting[label, names].alone
                    (alone.add if request.alone else alone.discard)(link.peer)
        # Without the lock, since all of these send.
        if running is not None:
            self._begin(running)
        elif missing:
            self.break_deadlocks()
        elif not missing and found is not None:
            self._refuse_mismatch(found, label, names, link.peer)
        return PartiesMissing(missing=missing)

    def _join(
        self, link: PeerLink, label: str, names: tuple[str, ...], waiting: _WaitingSession
    ) -> tuple[_RunningSession | None, list[str]]:
        """The session, if all parties have come, and those that are missing. Called with the lock held."""
        name = link.peer
        if name in waiting.links:
            raise BusyError(f"'{name}' waits for '{readable(label)}' already; one of the two has to stop")
        if sum(name in g.links for g in self._waiting.values()) >= MAX_WAITING:
            raise BusyError(f"'{name}' waits for {MAX_WAITING} sessions already")
        if sum(name in r.links for r in self._running.values()) >= MAX_RUNNING:
            raise BusyError(f"'{name}' takes part in {MAX_RUNNING} sessions already")
        waiting.links[name] = link
        missing = [other for other in names if other not in waiting.links]
        if missing:
            self._waiting[label, names] = waiting
            return None, missing
        self._waiting.pop((label, names), None)
        running = _RunningSession(os.urandom(16), label, waiting.links)
        self._running[running.run] = running
        return running, []

    def unmeet(self, link: PeerLink, request: Unmeet) -> ServerReply:
        """Remove a party that has stopped waiting."""
        with self._lock:
            waiting = self._waiting.get((request.label, _names(request)))
            if waiting is not None and waiting.links.get(link.peer) is link:
                del waiting.links[link.peer]
            self._drop_closed()
        return ServerReply()

    def finish(self, link: PeerLink, request: PartFinished) -> ServerReply:
        """Note that a party has done its part: it may leave without ending the session for the others."""
        with self._lock:
            running = self._running.get(bytes.fromhex(request.meeting))
            if running is not None and running.links.get(link.peer) is link:
                running.finished.add(link.peer)
                if running.finished == set(running.links):
                    self._end(running)
        return ServerReply()

    def break_deadlocks(self) -> None:
        """Find parties that wait in a circle, and refuse the sessions for which they wait.

        Called when a party begins to wait, and when a connection ends.
        """
        refusals: list[tuple[PeerLink, Key, str]] = []
        with self._lock:
            self._drop_closed()
            waits: dict[str, Key] = {}
            for key, waiting in self._waiting.items():
                waits |= dict.fromkeys(filter(self._has_one_connection, waiting.alone & waiting.links.keys()), key)
            found = find_deadlock(waits, {key: set(waiting.links) for key, waiting in self._waiting.items()})
            for key in {waits[name] for name in found}:
                refusals += [
                    (link, key, deadlock_message(found, waits, name))
                    for name, link in self._waiting.pop(key).links.items()
                ]
        for link, key, text in refusals:
            _refuse(link, key, DeadlockError(text))
        if found:
            write(log, "circle", parties=",".join(found))

    def _has_one_connection(self, name: str) -> bool:
        """Whether a client has one connection. With several, another process may still come."""
        return sum(link.closed is None for link in self._links(name)) <= 1

    def _refuse_mismatch(self, waiting: _WaitingSession, label: str, names: tuple[str, ...], late: str) -> None:
        """Refuse a session because one party came with another digest than those that wait.

        Called without the lock, since sending may block.

        Raises:
            RefusedError: always, for the party that came last.
        """
        there = ", ".join(sorted(waiting.links))
        text = (
            f"{there} would run something else as '{readable(label)}' than '{late}': all parties need the same "
            f"federation file, program, settings and version of sectorch"
        )
        for link in waiting.links.values():
            _refuse(link, (label, names), RefusedError(text))
        raise RefusedError(text)

    def _drop_closed(self) -> None:
        for key, waiting in list(self._waiting.items()):
            waiting.links = {name: link for name, link in waiting.links.items() if link.closed is None}
            if not waiting.links:
                del self._waiting[key]

    def _begin(self, running: _RunningSession) -> None:
        names = sorted(running.links)
        ready = threading.Event()
        for name, link in running.links.items():
            for other, there in running.links.items():
                if other != name:
                    link.forward(wire_of(running.run, name, other), there, ready)
        begin = SessionBegin(meeting=running.run.hex(), label=running.label, parties=names)
        for name, link in running.links.items():
            try:
                control = link.open(running.run)
                control.on_failure(lambda failure, name=name: self._end_for_others(running, name, failure))
                link.tell(begin, urgent=True)
            except SectorchError as error:
                self._end_for_others(running, name, error)
        ready.set()
        with self._lock:
            ended = running.run not in self._running
            if ended:
                self._clear(running)
        if ended:  # a party may have heard of the session only after its end: end it there too
            for link in running.links.values():
                link.refuse(running.run, "PeerLostError: a party left as the session began, or gave it up")
            return
        write(log, "session began", session=running.run.hex(), label=readable(running.label), parties=",".join(names))

    def _end_for_others(self, running: _RunningSession, name: str, failure: SectorchError) -> None:
        """End a session for the others after one party left or failed, unless that party had done its part."""
        with self._lock:
            if running.run not in self._running or (name in running.finished and name):
                return
            del self._running[running.run]
        who = f"'{name}' gave up or is lost: " if name else ""
        text = f"{type(failure).__name__}: {who}{failure}"
        write(log, "session ended", session=running.run.hex(), by=name or None, why=text)
        for other, link in running.links.items():
            if other != name:
                link.refuse(running.run, text)
        with self._lock:  # after the refusals: frames of a cleared session would be refused first, without the reason
            self._clear(running)

    def _end(self, running: _RunningSession) -> None:
        """Called with the lock held."""
        del self._running[running.run]
        self._clear(running)

    def _clear(self, running: _RunningSession) -> None:
        for name, link in running.links.items():
            link.end_forwarding(running.run)
            for other in running.links:
                if other != name:
                    link.end_forwarding(wire_of(running.run, name, other))


def _refuse(link: PeerLink, key: Key, error: NetworkError) -> None:
    label, parties = key
    with suppress(SectorchError):
        link.tell(Refusal(label=label, parties=list(parties), error=type(error).__name__, text=str(error)), urgent=True)


def _names(request: Meet | Unmeet) -> tuple[str, ...]:
    names = tuple(sorted(name_of(name, "a party's name in a request", FrameError) for name in request.parties))
    if len(set(names)) < len(names):
        raise FrameError("parties that meet have different names")
    return names
