"""The server S: relays keys, holds one half of every share, and serves many sessions at once."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from ...choreography import Party
from ...errors import (
    BusyError,
    FrameError,
    IdentityError,
    MaterialError,
    PeerLostError,
    SectorchError,
)
from ...members import answering_parties
from ...nn.program import load_program
from ...session import Q
from ...tensor import Scheme
from ..federation.meetings import Meetings
from ..identity.certificates import Credentials
from ..limits.quotas import Quotas
from ..log import write
from ..messages import (
    Failure,
    Hello,
    KeptSessions,
    ListModels,
    Models,
    OfferedModel,
    Open,
    Register,
    Serve,
    ServerReply,
    ServerRequest,
    SessionParts,
    ToServer,
    Void,
    form,
    read,
)
from ..names import model_name, party_of
from ..receipts.receipts import Receipts
from ..store.shelf import Shelf
from ..store.store import Store
from ..wire.channel import Channel
from ..wire.deadline import CALL
from ..wire.link import Link
from ..wire.listen import Listener
from ..wire.turns import Turns
from .place import Place
from .registry import Offered, Registry, current
from .said import join, load, reason, scheme_of
from .serving import IDLE, Serving, Told, binding, part

log = logging.getLogger("sectorch.server")
RUNNING = 2
"""Calls that run at the same time; further ones wait their turn, so that memory stays bounded."""
SESSIONS, SESSIONS_EACH = 128, 32
"""Sessions that may be open at once: of all clients together, and of one."""
WEIGHT_MEMORY = 2 << 30
"""Bytes of masked weights that open sessions may hold together."""


class Server:
    """S as a service. Only S listens; clients dial out and prove their names by certificate.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        running: calls that run at the same time.
        store: where prepared material is kept; a temporary one unless given.
        patience: seconds without a word after which a party counts as hanging.
        call: seconds that one party may keep a call waiting in all, and one more for each MiB that it sends or takes.
        receipts: a file in which each query is signed for, with the credentials' identity key, before it is served.
        limits: a file of what each client may ask (`limits.file`).
        idle: seconds without a call after which a session ends; its client opens another one with its next call.
        place: which of several workers or replicas it is.

    Raises:
        ArgumentError: that is no file of limits. QuotaFileError: what is used of them cannot be kept.
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
        limits: str | Path | None = None,
        idle: float = IDLE,
        place: Place | None = None,
    ):
        load()
        self._place = place or Place()
        self.store = store or Store()
        self.store.evicted = self._evicted
        self._waits = patience, call
        self._registry = Registry()
        self._links: set[Link] = set()
        self._sessions: dict[bytes, tuple[str, int]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._turns = Turns(running)
        self._meetings = Meetings(self._links_of)
        self._receipts = None if receipts is None else Receipts(receipts, credentials, "S")
        self._quotas: Quotas | None = None
        try:
            self._quotas = None if limits is None else Quotas(limits, credentials.called, "S")
            self._serving = Serving(self._turns, self.store, self._receipts, self._quotas, self._registry.another, idle)
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
        if self._quotas is not None:
            self._quotas.close()

    def reload(self) -> None:
        """Read the limits anew."""
        if self._quotas is not None:
            self._quotas.reload()

    def drain(self, seconds: float) -> bool:
        """Begin no more calls and sessions; whether those that run were done in that time."""
        return self._turns.drain("the server is stopping; ask again when it is back", seconds)

    def wait(self) -> None:
        """Until stopped."""
        self.listener.wait()

    def models(self) -> list[str]:
        """Names of the models whose answering parties are connected."""
        return self._registry.names()

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
        link = Link(name, self._request, *self._waits, certificate=certificate, on_close=self._meetings.look)
        with self._lock:
            self._links = {known for known in self._links if known.closed is None} | {link}
        self._registry.prune()
        return link

    def _links_of(self, name: str) -> list[Link]:
        with self._lock:
            return [link for link in self._links if link.peer == name]

    def _request(self, link: Link, request: dict) -> None:
        """A request that belongs to no session, from a client whose certificate says `link.peer`."""
        try:
            answer = self._answer(link, read(ToServer, request, "request"))
        except SectorchError as error:
            answer = Failure(error=type(error).__name__, text=str(error))
        link.tell({"do": "reply", "number": request.get("number"), **form(answer)})

    def _answer(self, link: Link, request: ServerRequest) -> ServerReply:
        if isinstance(request, Register):
            return self._register(link, request)
        if isinstance(request, ListModels):
            return Models(models=self.models())
        if isinstance(request, Open):
            return self._open(link, request)
        if isinstance(request, Void):
            return self._void(link, request)
        if isinstance(request, Hello):
            return self._place
        self._place.check_first()
        return self._meetings.answer(link, request)

    def _register(self, link: Link, request: Register) -> KeptSessions:
        name = model_name(request.name, "an answering party's name", IdentityError)
        if party_of(name) != link.peer:
            raise IdentityError(f"the certificate is for '{link.peer}' and cannot answer as '{name}'")
        load_program(request.description)
        offered = Offered(request.description, request.edition, request.keeper, link, request.made)
        for replaced in self._registry.add(name, offered):
            replaced.close(PeerLostError(f"'{name}' was started again"))
        for shelf in self.store.shelves(model=name):
            own = shelf.binding.get("keeper", "") in (request.keeper, "")
            if own and any(shelf.binding[k] != v for k, v in current(offered).items()):
                write(log, "dropped", calls=len(shelf), model=name, why="it has another model now")
                shelf.drop()
        write(log, "answers", model=name, version=offered.version)
        return KeptSessions(sessions=[shelf.session.hex() for shelf in self.store.shelves(model=name)])

    def _open(self, link: Link, request: Open) -> SessionParts:
        if self._turns.closed:
            raise BusyError(self._turns.closed)
        self._place.check(link.peer)
        names = [model_name(name, "a model's name in a request", FrameError) for name in request.models]
        if len(set(map(party_of, names))) < len(names):
            raise FrameError("a session has models of different parties")
        scheme, keeper = scheme_of(request.scheme), None
        resume = None if request.resume is None else bytes.fromhex(request.resume)
        if resume is not None:
            keeper = self.store.shelf(resume).binding.get("keeper")
        models = [self._registry.find(name, request.version, keeper) for name in names]
        # Q names the session and has opened its end already, so that nothing that S says of it comes too early.
        wire = bytes.fromhex(request.session)
        if wire in self._sessions or self.store.holds(wire):
            raise FrameError("that session is or was open; sessions are named afresh")
        if resume is not None:
            request = replace(request, calls=self._kept(link, resume, request, models[0], scheme))
        if link.peer in map(party_of, names):
            raise FrameError("a party cannot ask its own model: the model would be its own to run")
        if self._quotas is not None:
            self._quotas.session(link.peer, "", names)
        self._admit(wire, link.peer, sum(model.weight_bytes for model in models))
        answering = answering_parties(len(models))
        channels: dict[Party, Channel] = {}
        try:
            channels[Q] = link.open(wire)
            for party, model in zip(answering, models, strict=True):
                channels[party] = model.link.open(wire)
            self._tie(list(channels.values()))
            for place, (party, model) in enumerate(zip(answering, models, strict=True)):
                channels[party].link.tell(Serve(
                    session=request.session, client=link.peer, place=place, of=len(models), model=names[place],
                    edition=model.edition, scheme=request.scheme, lasting=request.lasting, resume=request.resume,
                    calls=request.calls,
                ))  # fmt: skip
        except BaseException as error:
            part(channels, reason(error, "the server"))
            with self._lock:
                self._sessions.pop(wire, None)
            raise
        told = Told(resume or wire, link.peer, link.certificate, names, list(models), scheme, request)
        run = (told, channels)
        thread = threading.Thread(target=self._serve, args=run, daemon=True, name=f"session of {link.peer}")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return SessionParts(parts=[OfferedModel(model.description, model.edition) for model in models])

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

    def _kept(self, link: Link, session: bytes, request: Open, model: Offered, scheme: Scheme) -> list[int]:
        """The calls of the material that Q wants to use, if it is its own, of this model, and still here."""
        shelf = self.store.shelf(session)
        if shelf.binding != binding(link.peer, request.models[0], model, scheme):
            raise MaterialError("that material was prepared for another client, model or number format; prepare again")
        shelf.keep(request.calls)
        return list(shelf.calls())

    def _evicted(self, shelf: Shelf) -> None:
        """The answering party drops its half of what had to go here; Q hears of it when it comes back for it."""
        with suppress(SectorchError):
            model = self._registry.find(shelf.binding["model"], keeper=shelf.binding.get("keeper"))
            model.link.tell(Void(sessions=[shelf.session.hex()]))

    def _void(self, link: Link, request: Void) -> ServerReply:
        """An answering party has no half any more of these sessions' material."""
        for shelf in self.store.shelves():
            if shelf.session.hex() in request.sessions and party_of(shelf.binding["model"]) == link.peer:
                shelf.drop()
        return ServerReply()

    def _serve(self, told: Told, channels: dict[Party, Channel]) -> None:
        try:
            self._serving.serve(told, channels)
        finally:
            with self._lock:
                self._sessions.pop(channels[Q].session, None)
