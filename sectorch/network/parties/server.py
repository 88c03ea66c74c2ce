"""The server S: relays keys, holds one half of every share, and serves many sessions at once."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...choreography import Party
from ...choreography.program.lockstep import BatchedCall
from ...choreography.program.projection import part_of
from ...errors import (
    BusyError,
    FalseDealingError,
    FrameError,
    IdentityError,
    MaterialError,
    NetworkError,
    PeerLostError,
    SectorchError,
    SessionOverError,
    UnknownModelError,
)
from ...mpc.star.key_agreement import Identities
from ...serving.description import load_program
from ...session import Q, S, answering_parties
from ...tensor import Scheme
from ..federation.broker import SessionBroker
from ..identity.identity import Credentials
from ..limits import Quotas
from ..log import write
from ..messages import (
    AllStored,
    Close,
    Failure,
    Hello,
    KeptSessions,
    ListModels,
    MaterialReady,
    ModelQuery,
    Models,
    OfferedModel,
    Open,
    Register,
    Serve,
    ServerProcess,
    ServerReply,
    ServerRequest,
    SessionParts,
    StoredCall,
    ToFollow,
    ToServer,
    Void,
    message_form,
    parse_message,
)
from ..names import model_name, party_of
from ..receipts.receipts import Receipts
from ..store import Shelf, Store, fingerprint, version
from ..wire.channel import CALL, Channel, Link
from ..wire.endpoints import Listener
from ..wire.fair_queue import FairQueue
from .batching import BatchCandidate, ServerBatcher
from .session import AnsweringParty, PartySession, ProgramCache, in_full, join_threads, load_loops, reason, scheme_of

# S's side of one session, to its end.


log = logging.getLogger("sectorch.server")
BEAT = 5.0
IDLE = 600.0
"""Seconds without a call after which a session ends: it holds memory, and a place among those of its client."""


@dataclass
class ServedModel:
    """What an answering party said of its model.

    Attributes:
        edition: its name for the weights. keeper: for a replica, the name of its store.
    """

    description: dict
    edition: str
    keeper: str


@dataclass
class SessionSubject:
    """What a session is about, as it was opened.

    Attributes:
        session: its name, by which its material is known. client: who asks. certificate: its fingerprint.
        names, models: of the answering parties, in their order.
        request: Q's, in which `calls` are those for which this party has material.
    """

    session: bytes
    client: str
    certificate: str
    names: list[str]
    models: Sequence[ServedModel]
    scheme: Scheme
    request: Open

    @property
    def facts(self) -> dict[str, str]:
        """For the log's line of each query."""
        versions = ",".join(version(model.description, model.edition) for model in self.models)
        names = ",".join(self.names)
        return {"client": self.client, "certificate": self.certificate, "model": names, "version": versions}


def material_owner(client: str, name: str, model: ServedModel, scheme: Scheme) -> dict:
    """Whose material it is."""
    return {
        "client": client, "model": name, "fingerprint": fingerprint(model.description), "edition": model.edition,
        "scheme": repr(scheme), **({"keeper": model.keeper} if model.keeper else {}),
    }  # fmt: skip


class ServerSessions:
    """The sessions of one process of S's.

    Args:
        turns: of the calls. store: of prepared material. receipts, quotas: if any are kept.
        others: whether all models of a session can be asked over other connections than those that were lost.
        idle: seconds without a call after which a session ends.
    """

    def __init__(
        self, turns: FairQueue, store: Store, receipts: Receipts | None, quotas: Quotas | None = None,
        others: Callable[[list[str], list[Any]], bool] = lambda names, lost: False, idle: float = IDLE,
    ):  # fmt: skip
        self._others, self._idle = others, idle
        self._turns, self._store, self._receipts, self._quotas = turns, store, receipts, quotas
        self._known, self._gathering = ProgramCache(), ServerBatcher(turns)

    def serve(self, told: SessionSubject, channels: dict[Party, Channel]) -> None:
        """One session."""
        request, session = told.request, told.session
        fresh, said, party = request.resume is None, "that session is over", None
        try:
            identities = Identities({"Q": told.client, "A": ""})
            bound, facts = material_owner(told.client, told.names[0], told.models[0], told.scheme), told.facts
            party = PartySession(
                S, session, channels,
                [AnsweringParty(model.description, identities) for model in told.models], told.scheme,
                lambda: self._store.shelf(session, bound), of=len(told.models), fresh=fresh, alive=beats(channels),
                facts=lambda: facts, receipts=self._receipts, known=self._known,
            )  # fmt: skip
            if not fresh:
                self._ready(session, channels)
            while not isinstance(asked := self._next(told, party, channels[Q]), Close):
                with self._charged(told, party, channels, asked):
                    self._ask(party, told.client, channels, asked)
            for channel in answering_channels(channels):
                channel.tell(asked)
        except Exception as error:
            lost = [channel.link for channel in answering_channels(channels) if channel.link.closed is not None]
            if lost and isinstance(error, NetworkError) and self._others(told.names, lost):
                error = SessionOverError(f"{error}; others answer as well, and asking again asks one of them")
            if isinstance(error, FalseDealingError):
                write(log, "false dealing", logging.ERROR, **told.facts)
            said = reason(error, "the server")
            write(log, "session ended", client=told.client, why=in_full(error))
            log.debug("in detail", exc_info=error)
        finally:
            close_channels(channels, said)
            if party is not None:
                party.close()
            if not request.lasting:
                self._store.forget(session)

    def _next(self, told: SessionSubject, party: PartySession, channel: Channel) -> ModelQuery | Close:
        """What is asked next.

        Raises:
            SessionOverError: nothing for so long that the session ends. One that would lose something by it goes on:
                what stays in shares, and prepared material of a client that keeps none itself.
        """
        while True:
            try:
                return channel.request(ToFollow, self._idle)
            except PeerLostError:
                held = not told.request.lasting and any(map(len, self._store.shelves(client=told.client)))
                if channel.ended:
                    raise
                if not (held or party.staying):
                    raise SessionOverError(
                        f"nothing was asked for {self._idle:g} s, and the session is over; asking again opens another"
                    ) from None

    def _ask(self, party: PartySession, client: str, channels: dict[Party, Channel], asked: ModelQuery) -> None:
        """What is asked, with the calls of other sessions where that can be, and else in a turn of its own."""
        program = party.joinable(asked)
        part = None if program is None else part_of(program, frozenset({S}))
        room = None if part is None else self._gathering.room(part, Q)
        if room is None:
            with self._turns.turn(client, channels[Q].beat):
                self._call(party, channels, asked)
            return

        def begin(joint: str, calls: int) -> None:
            for channel in answering_channels(channels):
                channel.tell(replace(asked, joint=joint, calls=calls))

        def join(taking: BatchedCall) -> None:
            taking.receive()
            self._gathering.take(BatchCandidate(taking, begin), client, channels[Q].beat)

        try:
            party.follow(asked, join, {Q: room})
        finally:
            self._gathering.leave(room)

    def _call(self, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery) -> None:
        for channel in answering_channels(channels):
            channel.tell(asked)
        stored = party.follow(asked)
        if stored is not None:
            theirs = [channel.request(StoredCall, channel.deadline.silence) for channel in answering_channels(channels)]
            channels[Q].tell(AllStored(more=min(each.room // max(1, each.bytes) for each in (stored, *theirs))))

    def _charged(
        self, told: SessionSubject, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery
    ) -> AbstractContextManager[None]:
        """What is asked is charged, before the answering parties hear of it."""
        if self._quotas is None:
            return nullcontext()
        rows = party.asked(asked).rows
        return self._quotas.query(asked, rows, told.client, "", told.names, [channels[Q]], answering_channels(channels))

    def _ready(self, session: bytes, channels: dict[Party, Channel]) -> None:
        """Whether the answering party still has its half of the material."""
        try:
            shelf = self._store.shelf(session)
            for channel in answering_channels(channels):
                shelf.keep(channel.request(MaterialReady, channel.deadline.silence).calls)
        except MaterialError:
            self._store.forget(session)
            raise
        channels[Q].tell(MaterialReady(calls=list(shelf.calls())))


def answering_channels(channels: dict[Party, Channel]) -> list[Channel]:
    """The channels to answering parties."""
    return [channel for party, channel in channels.items() if party.role == "A"]


def close_channels(channels: dict[Party, Channel], said: str) -> None:
    """Close all channels of a session, and tell their other ends why."""
    for channel in channels.values():
        channel.close()
        channel.abort(said)


def beats(channels: dict[Party, Channel]) -> Callable[[], None]:
    """Called often: tells the clients now and then that S is alive, though it waits for another one."""
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if time.monotonic() - last > BEAT:
            last = time.monotonic()
            for channel in channels.values():
                channel.beat()

    return alive


# At the server: who answers under which name, with which version, and over which of several connections.
#
# A name may be answered by several processes of one party (replicas), which say that they are, and each have a store of
# their own. Of the versions that they have, the one that was made last is answered with, unless one is asked for; of
# those that have it, the process with the fewest sessions. Material that was prepared at one is used at that one.


@dataclass
class ConnectedModel(ServedModel):
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
        self._offers: dict[str, list[ConnectedModel]] = {}

    def names(self) -> list[str]:
        """Of the models that can be asked."""
        with self._lock:
            return sorted(name for name, offers in self._offers.items() if any(o.open for o in offers))

    def prune(self) -> None:
        """Forget connections that are closed."""
        with self._lock:
            found = {name: [o for o in offers if o.open] for name, offers in self._offers.items()}
            self._offers = {name: offers for name, offers in found.items() if offers}

    def add(self, name: str, offered: ConnectedModel) -> list[Link]:
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

    def find(self, name: str, wanted: object = None, keeper: str | None = None) -> ConnectedModel:
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


def current(offered: ConnectedModel) -> dict:
    """What material that can be used with it is bound to."""
    return {"edition": offered.edition, "fingerprint": fingerprint(offered.description)}


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
        place: ServerProcess | None = None,
    ):
        load_loops()
        self._place = place or ServerProcess()
        self.store = store or Store()
        self.store.evicted = self._evicted
        self._waits = patience, call
        self._registry = Registry()
        self._links: set[Link] = set()
        self._sessions: dict[bytes, tuple[str, int]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._turns = FairQueue(running)
        self._meetings = SessionBroker(self._links_of)
        self._receipts = None if receipts is None else Receipts(receipts, credentials, "S")
        self._quotas: Quotas | None = None
        try:
            self._quotas = None if limits is None else Quotas(limits, credentials.called, "S")
            self._serving = ServerSessions(
                self._turns, self.store, self._receipts, self._quotas, self._registry.another, idle
            )
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
        join_threads(self._threads)
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
            answer = self._answer(link, parse_message(ToServer, request, "request"))
        except SectorchError as error:
            answer = Failure(error=type(error).__name__, text=str(error))
        link.tell({"do": "reply", "number": request.get("number"), **message_form(answer)})

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
        offered = ConnectedModel(request.description, request.edition, request.keeper, link, request.made)
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
            close_channels(channels, reason(error, "the server"))
            with self._lock:
                self._sessions.pop(wire, None)
            raise
        told = SessionSubject(resume or wire, link.peer, link.certificate, names, list(models), scheme, request)
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

    def _kept(self, link: Link, session: bytes, request: Open, model: ConnectedModel, scheme: Scheme) -> list[int]:
        """The calls of the material that Q wants to use, if it is its own, of this model, and still here."""
        shelf = self.store.shelf(session)
        if shelf.binding != material_owner(link.peer, request.models[0], model, scheme):
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

    def _serve(self, told: SessionSubject, channels: dict[Party, Channel]) -> None:
        try:
            self._serving.serve(told, channels)
        finally:
            with self._lock:
                self._sessions.pop(channels[Q].session, None)
