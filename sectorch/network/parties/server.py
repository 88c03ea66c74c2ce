"""The server S: relays keys, holds one half of every share, and serves many sessions at once."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from pathlib import Path

from ...choreography import Party
from ...errors import (
    BusyError,
    FrameError,
    IdentityError,
    MaterialError,
    PeerLostError,
    SectorchError,
    UnknownModelError,
)
from ...nn.program import load_program
from ...session import Q
from ...tensor import Scheme
from ..federation.meetings import Meetings
from ..identity.certificates import Credentials
from ..log import write
from ..names import name_of
from ..receipts.receipts import Receipts
from ..store.store import Store, fingerprint, version
from ..wire.channel import Channel
from ..wire.deadline import CALL
from ..wire.link import Link
from ..wire.listen import Listener
from ..wire.turns import Turns
from .place import Place
from .remote import parties
from .said import join, load, reason, scheme_in, scheme_of, session_of
from .serving import Model, Serving, Told, binding, part

log = logging.getLogger("sectorch.server")
RUNNING = 2
"""Calls that run at the same time; further ones wait their turn, so that memory stays bounded."""
SESSIONS, SESSIONS_EACH = 128, 32
"""Sessions that may be open at once: of all clients together, and of one."""
WEIGHT_MEMORY = 2 << 30
"""Bytes of masked weights that open sessions may hold together."""
MOST_MODELS = 64


@dataclass
class _Model(Model):
    """An answering party that is connected."""

    link: Link

    @property
    def weight_bytes(self) -> int:
        return sum(8 * math.prod(entry["shape"]) for entry in self.description["weights"])


class Server:
    """S as a service. Only S listens; clients dial out and prove their names by certificate.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        running: calls that run at the same time.
        store: where prepared material is kept; a temporary one unless given.
        patience: seconds without a word after which a party counts as hanging.
        call: seconds that one party may keep a call waiting in all, and one more for each MiB that it sends or takes.
        receipts: a file in which each query is signed for, with the credentials' identity key, before it is served.
        place: which of several workers or replicas it is.

    Raises:
        ReceiptError, ReceiptsInUseError, IdentityError: receipts cannot be written there, or not signed.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        running: int = RUNNING,
        store: Store | None = None,
        patience: float | None = None,
        call: float = CALL,
        receipts: str | Path | None = None,
        place: Place | None = None,
    ):
        load()
        self._place = place or Place()
        self.store = store or Store()
        self._waits = patience, call
        self._models: dict[str, _Model] = {}
        self._links: set[Link] = set()
        self._sessions: dict[bytes, tuple[str, int]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._turns = Turns(running)
        self._meetings = Meetings()
        self._receipts = None if receipts is None else Receipts(receipts, credentials, "S")
        self._serving = Serving(self._turns, self.store, self._receipts)
        try:
            self.listener = Listener(address, credentials, self._welcome, shared=self._place.workers > 1)
        except BaseException:
            self._keep_no_more()
            raise

    @property
    def port(self) -> int:
        """On which it listens."""
        return self.listener.port

    def stop(self) -> None:
        """Stop serving; running sessions fail at the clients with a typed error."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(PeerLostError("the server was stopped"))
        self.listener.stop()
        join(self._threads)
        self.store.close()
        self._keep_no_more()

    def _keep_no_more(self) -> None:
        if self._receipts is not None:
            self._receipts.close()

    def drain(self, seconds: float) -> bool:
        """Begin no more calls and sessions; whether those that run were done in that time."""
        return self._turns.drain("the server is stopping; ask again when it is back", seconds)

    def wait(self) -> None:
        """Until stopped."""
        self.listener.wait()

    def models(self) -> list[str]:
        """Names of the answering parties that are connected."""
        with self._lock:
            return sorted(name for name, model in self._models.items() if model.link.closed is None)

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    def renew(self, credentials: Credentials) -> None:
        """New handshakes are made with these from now on; connections that are open go on.

        Raises:
            IdentityError: they cannot be used; those before stay.
        """
        self.listener.use(credentials)

    def unready(self) -> str:
        """Why no sessions are taken on now; empty while they are."""
        return self._turns.closed

    def figures(self) -> dict[str, float]:
        """What there is at this moment, by the names of `observe.metrics.GAUGES`."""
        with self._lock:
            weights = sum(size for _, size in self._sessions.values())
            open_ = sum(link.closed is None for link in self._links)
        return {
            "sessions": self.sessions, "connections": open_, "models": len(self.models()),
            "masked_weight_bytes": weights, **self._turns.figures(), **self.store.figures(),
        }  # fmt: skip

    def _welcome(self, name: str, certificate: str) -> Link:
        link = Link(name, self._request, *self._waits, certificate=certificate)
        with self._lock:
            self._links = {known for known in self._links if known.closed is None} | {link}
            self._models = {n: m for n, m in self._models.items() if m.link.closed is None}
        return link

    def _request(self, link: Link, request: dict) -> None:
        """A request that belongs to no session, from a client whose certificate says `link.peer`."""
        what, number = request.get("do"), request.get("number")
        try:
            if what == "register":
                answer = self._register(link, request)
            elif what == "models":
                answer = {"models": self.models()}
            elif what == "open":
                answer = self._open(link, request)
            elif what in self._meetings.requests:
                self._place.check_first()
                answer = self._meetings.requests[str(what)](link, request)
            elif what == "hello":
                answer = self._place.said()
            else:
                answer = {"error": "FrameError", "text": "an unknown request"}
        except SectorchError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        link.tell({"do": "reply", "number": number, **answer})

    def _register(self, link: Link, request: dict) -> dict:
        name = name_of(request.get("name"), "an answering party's name", IdentityError)
        edition = str(request.get("edition"))[:64]
        if name != link.peer:
            text = f"the certificate is for '{link.peer}' and cannot answer as '{name}'"
            return {"error": "IdentityError", "text": text}
        given = request.get("description")
        description = given if isinstance(given, dict) else {}
        load_program(description)
        with self._lock:
            held = self._models.get(name)
            if held is not None and held.link.closed is None and held.link is not link:
                raise BusyError(f"'{name}' is answering already")
            self._models[name] = _Model(description, edition, link)
        kept = self.store.shelves(model=name)
        current = {"edition": edition, "fingerprint": fingerprint(description)}
        for shelf in kept:
            if any(shelf.binding[k] != v for k, v in current.items()):
                write(log, "dropped", calls=len(shelf), model=name, why="it has another model now")
                shelf.drop()
        write(log, "answers", model=name, version=version(description, edition))
        return {"sessions": [shelf.session.hex() for shelf in self.store.shelves(model=name)]}

    def _open(self, link: Link, request: dict) -> dict:
        if self._turns.closed:
            raise BusyError(self._turns.closed)
        self._place.check(link.peer)
        asked, resume = request.get("models"), request.get("resume")
        if not isinstance(asked, list) or not 0 < len(asked) <= MOST_MODELS:
            raise FrameError(f"a session has 1 to {MOST_MODELS} different models")
        names = [name_of(name, "a model's name in a request", FrameError) for name in asked]
        if len(set(names)) < len(names):
            raise FrameError(f"a session has 1 to {MOST_MODELS} different models")
        scheme = scheme_of(request)
        with self._lock:
            found = [self._models.get(name) for name in names]
        models: list[_Model] = []
        for name, model in zip(names, found, strict=True):
            if model is None or model.link.closed is not None:
                there = ", ".join(self.models()) or "none"
                raise UnknownModelError(f"no model '{name}' is connected; there are: {there}")
            models.append(model)
        # Q names the session and has opened its end already, so that nothing that S says of it comes too early.
        wire = session_of(request)
        if wire in self._sessions or self.store.holds(wire):
            raise FrameError("that session is or was open; sessions are named afresh")
        session = wire if resume is None else self._kept(link, request, names[0], models[0], scheme)
        if link.peer in names:
            raise FrameError("a party cannot ask its own model: the model would be its own to run")
        self._admit(wire, link.peer, sum(model.weight_bytes for model in models))
        answering = parties(len(models))
        channels: dict[Party, Channel] = {}
        try:
            channels[Q] = link.open(wire)
            for party, model in zip(answering, models, strict=True):
                channels[party] = model.link.open(wire)
            self._tie(list(channels.values()))
            shared = {k: request[k] for k in ("resume", "calls", "lasting") if k in request} | scheme_in(scheme)
            for place, (party, model) in enumerate(zip(answering, models, strict=True)):
                serve = {"do": "serve", "session": wire.hex(), "for": link.peer, "place": place, "of": len(models)}
                channels[party].link.tell({**serve, "edition": model.edition, **shared})
        except BaseException as error:
            part(channels, reason(error, "the server"))
            with self._lock:
                self._sessions.pop(wire, None)
            raise
        told = Told(session, link.peer, link.certificate, names, list(models), scheme, request)
        run = (told, channels)
        thread = threading.Thread(target=self._serve, args=run, daemon=True, name=f"session of {link.peer}")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return {
            "parts": [{"description": model.description, "edition": model.edition} for model in models],
        }

    def _tie(self, channels: list[Channel]) -> None:
        """What one party says of the session's end is heard while S waits for another one, or for its turn."""
        for channel in channels:
            channel.on_failure(self._turns.wake)
            for other in channels:
                if other is not channel:
                    channel.on_failure(other.fail)

    def _admit(self, wire: bytes, client: str, weight_bytes: int) -> None:
        with self._lock:
            open_, mine = len(self._sessions), sum(name == client for name, _ in self._sessions.values())
            if open_ >= SESSIONS or mine >= SESSIONS_EACH:
                raise BusyError(
                    f"{open_} sessions are open, {mine} of them of '{client}'; close some, or ask again later"
                )
            held = sum(size for _, size in self._sessions.values())
            if self._sessions and held + weight_bytes > WEIGHT_MEMORY:
                raise BusyError(f"open sessions hold {held >> 20} MiB of masked weights; ask again later")
            self._sessions[wire] = client, weight_bytes

    def _kept(self, link: Link, request: dict, name: str, model: _Model, scheme: Scheme) -> bytes:
        """The session whose material Q wants to use, if it is its own, of this model, and still here."""
        session = session_of({"session": request.get("resume")})
        shelf = self.store.shelf(session)
        if shelf.binding != binding(link.peer, name, model, scheme):
            raise MaterialError("that material was prepared for another client, model or number format; prepare again")
        shelf.keep(request.get("calls"))
        return session

    def _serve(self, told: Told, channels: dict[Party, Channel]) -> None:
        try:
            self._serving.serve(told, channels)
        finally:
            with self._lock:
                self._sessions.pop(channels[Q].session, None)
