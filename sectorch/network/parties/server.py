"""The server S: relays keys, holds one half of every share, and serves many sessions at once.

`Server` listens, answers requests, and opens sessions; `Registry` holds the models of the connected answering parties;
`ServerSessions` runs one session to its end.

What S keeps after a call: of a `Predict` whose results are opened, nothing of the call. The session keeps the masked
weights and pair keys until it ends, and S's shares of results that stay in shares (`PartySession.retained`) until the
next such call or the end. Prepared material stays in the `Store`, bound to client, model and number format
(`material_owner`), until it is used, dropped or evicted; a store that is not lasting forgets a session's at its end.
Receipts and quotas, where they are set, record who asked what, and no values.

What happens when a party is lost: its `PeerLink` closes, so that its channels fail. `Server._link_failures` fails the
other channels of each session at once; `ServerSessions.serve` ends the session and sends the reason. Where A was lost,
the query raises an `AbortedError` at Q with that reason. Where another replica answers for A, it is a
`SessionOverError`, and `RemoteModel.ask` repeats the query by itself. Both times a repeated query has the name of the
failed one (`PendingQueries`), so that no quota is charged twice.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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
    RefusedError,
    SectorchError,
    SessionOverError,
    UnknownModelError,
    VersionError,
)
from ...mpc.star.key_agreement import Identities
from ...serving.description import load_program
from ...session import Q, S, answering_parties
from ...tensor import Scheme
from ..federation.broker import SessionBroker
from ..identity.identity import Credentials, read_identity
from ..limits import Quotas, records_unready
from ..log import write
from ..memory import NO_MEMORY, MemoryBound, is_out_of_memory
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
    common_protocol,
    message_form,
    parse_message,
    release,
)
from ..names import account_of, model_name, party_of
from ..receipts import Receipts
from ..store import MaterialBinding, Shelf, Store, fingerprint, join_ranges, version
from ..wire.channel import CALL, Channel, PeerLink
from ..wire.endpoints import Listener
from ..wire.fair_queue import FairQueue
from .batching import BatchCandidate, ServerBatcher
from .session import (
    AnsweringParty,
    PartySession,
    ProgramCache,
    abort_reason,
    join_threads,
    load_loops,
    log_text,
    scheme_from_message,
)

log = logging.getLogger("sectorch.server")
BEAT = 5.0
"""Seconds between signs of life to a client that waits."""
IDLE = 600.0
"""Seconds without a call after which a session ends: it holds memory, and counts towards its client's limit."""

IDLE_WHEN_SHORT = 5.0
"""The same where a call was refused for want of memory, so that many clients are served in turns."""


@dataclass
class ServedModel:
    """A model as its answering party registered it.

    Attributes:
        edition: the party's commitment to the weights. signed: its signature of the version.
        keeper: for a replica, the name of its store.
    """

    description: dict
    edition: str
    keeper: str
    signed: str


@dataclass
class SessionSubject:
    """The parties and settings with which a session was opened.

    Attributes:
        session: its name, under which its material is stored.
        client: the client's name.
        certificate: the fingerprint of the client's certificate.
        names, models: of the answering parties, in their order.
        request: the client's; its `calls` are those for which this party has material.
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
        """The facts that the log's line of each query has."""
        versions = ",".join(version(model.description, model.edition) for model in self.models)
        names = ",".join(self.names)
        return {"client": self.client, "certificate": self.certificate, "model": names, "version": versions}


def material_owner(client: str, name: str, model: ServedModel, scheme: Scheme) -> MaterialBinding:
    """The binding of S's prepared material: it is used for this client, model and number format only."""
    return MaterialBinding(
        client=client, model=name, fingerprint=fingerprint(model.description), edition=model.edition,
        scheme=repr(scheme), keeper=model.keeper,
    )  # fmt: skip


class ServerSessions:
    """Runs the sessions of one server process.

    Args:
        turns: the queue of calls.
        store: of prepared material.
        receipts, quotas: where each query is recorded; None records none.
        has_alternative: whether all models of these names can be asked over connections other than the lost ones.
        idle: seconds without a call after which a session ends.
        memory: the process's bound on memory.
        key: signs what is sent in accountable sessions.
    """

    def __init__(
        self, turns: FairQueue, store: Store, receipts: Receipts | None, quotas: Quotas | None = None,
        has_alternative: Callable[[list[str], list[Any]], bool] = lambda names, lost: False, idle: float = IDLE,
        memory: MemoryBound | None = None, key: Ed25519PrivateKey | None = None,
    ):  # fmt: skip
        self._memory, self._key = memory, key
        self._has_alternative, self._idle = has_alternative, idle
        self._turns, self._store, self._receipts, self._quotas = turns, store, receipts, quotas
        self._programs, self._batcher = ProgramCache(), ServerBatcher(turns)

    def serve(self, subject: SessionSubject, channels: dict[Party, Channel]) -> None:
        """Serve the queries of one session until its client closes it or it fails."""
        request, session = subject.request, subject.session
        fresh, ending, party = request.resume is None, "that session is over", None
        try:
            identities = Identities({"Q": subject.client, "A": ""})
            bound, facts = (
                material_owner(subject.client, subject.names[0], subject.models[0], subject.scheme),
                subject.facts,
            )
            party = PartySession(
                S, session, channels,
                [AnsweringParty(model.description, identities) for model in subject.models], subject.scheme,
                lambda: self._store.shelf(session, bound), of=len(subject.models), fresh=fresh,
                alive=heartbeat(channels), facts=lambda: facts, receipts=self._receipts, known=self._programs,
                memory=self._memory, commitment=subject.models[0].signed if len(subject.models) == 1 else None,
            )  # fmt: skip
            party.session.statements.key = self._key
            if not fresh:
                self._confirm_material(session, channels)
            while not isinstance(asked := self._next_request(subject, party, channels[Q]), Close):
                with self._charge(subject, party, channels, asked):
                    self._run_call(party, subject.client, channels, asked)
            for channel in answering_channels(channels):
                channel.tell(asked)
        except Exception as error:
            lost = [channel.link for channel in answering_channels(channels) if channel.link.closed is not None]
            if lost and isinstance(error, NetworkError) and self._has_alternative(subject.names, lost):
                error = SessionOverError(f"{error}; others answer as well, and asking again asks one of them")
            if isinstance(error, FalseDealingError):
                write(log, "false dealing", logging.ERROR, **subject.facts)
            ending = abort_reason(error, "the server")
            if self._memory is not None and BusyError.__name__ in ending:
                self._memory.note_refusal()
            write(log, "session ended", client=subject.client, why=log_text(error))
            log.debug("in detail", exc_info=error)
        finally:
            close_channels(channels, ending)
            if party is not None:
                party.close()
            if not request.lasting:
                self._store.forget(session)

    def _next_request(self, subject: SessionSubject, party: PartySession, channel: Channel) -> ModelQuery | Close:
        """The client's next query.

        Raises:
            SessionOverError: the client has asked nothing for `idle` seconds, or for `IDLE_WHEN_SHORT` where a party
                has no memory left for others. A session that would lose something by ending goes on: one with results
                in shares, or with prepared material of a client without a lasting store.
        """
        begun = time.monotonic()
        while True:
            try:
                return channel.request(ToFollow, min(self._idle, IDLE_WHEN_SHORT))
            except PeerLostError:
                if channel.ended:
                    raise
                over = time.monotonic() - begun >= self._idle or (self._memory is not None and self._memory.short)
                has_material = not subject.request.lasting and any(map(len, self._store.shelves(client=subject.client)))
                if over and not (has_material or party.retained):
                    idle = min(self._idle, time.monotonic() - begun)
                    raise SessionOverError(
                        f"nothing was asked for {idle:.3g} s, and the session is over; asking again opens another"
                    ) from None

    def _run_call(self, party: PartySession, client: str, channels: dict[Party, Channel], asked: ModelQuery) -> None:
        """Run a call, in a batch with calls of other sessions where possible, otherwise alone in a turn of its own.

        A call that comes while no other runs or waits goes alone: S and A then compute while its client still deals.
        """
        with self._turns.turn_if_idle(account_of(client)) as idle:
            if idle:
                self._run_alone(party, channels, asked)
                return
        program = party.batchable_program(asked)
        part = None if program is None else part_of(program, frozenset({S}))
        room = None if part is None else self._batcher.reserve(part, Q)
        if room is None:
            with self._turns.turn(account_of(client), channels[Q].beat):
                self._run_alone(party, channels, asked)
            return

        def begin(joint: str, calls: int) -> None:
            for channel in answering_channels(channels):
                channel.tell(replace(asked, joint=joint, calls=calls))

        def join(call: BatchedCall) -> None:
            call.receive()
            self._batcher.take(BatchCandidate(call, begin), account_of(client), channels[Q].beat)

        try:
            party.follow(asked, join, {Q: room})
        finally:
            self._batcher.release(room)

    def _run_alone(self, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery) -> None:
        for channel in answering_channels(channels):
            channel.tell(asked)
        stored = party.follow(asked)
        if stored is not None:
            theirs = [channel.request(StoredCall, channel.deadline.silence) for channel in answering_channels(channels)]
            channels[Q].tell(AllStored(more=min(each.room // max(1, each.bytes) for each in (stored, *theirs))))

    def _charge(
        self, subject: SessionSubject, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery
    ) -> AbstractContextManager[object]:
        """Charge the query to the client's quota, before the answering parties hear of it."""
        if self._quotas is None:
            return nullcontext()
        rows = party.requested_inputs(asked).rows
        return self._quotas.query(
            asked, rows, subject.client, "", subject.names, [channels[Q]], answering_channels(channels)
        )

    def _confirm_material(self, session: bytes, channels: dict[Party, Channel]) -> None:
        """Keep the prepared calls of which the answering party has its half, and tell the client which they are.

        Raises:
            MaterialError: the material is void; it is dropped.
        """
        try:
            shelf = self._store.shelf(session)
            known = shelf.used_ranges()
            for channel in answering_channels(channels):
                ready = channel.request(MaterialReady, channel.deadline.silence)
                shelf.refuse_used(ready.used, channel.link.peer)
                shelf.keep_only(ready.calls)
                known = join_ranges(known, ready.used)
        except MaterialError:
            self._store.forget(session)
            raise
        channels[Q].tell(MaterialReady(calls=list(shelf.calls()), used=known))


def answering_channels(channels: dict[Party, Channel]) -> list[Channel]:
    """The channels to answering parties."""
    return [channel for party, channel in channels.items() if party.role == "A"]


def close_channels(channels: dict[Party, Channel], why: str) -> None:
    """Close all channels of a session, and send the other ends the reason."""
    for channel in channels.values():
        channel.close()
        channel.abort(why)


def heartbeat(channels: dict[Party, Channel]) -> Callable[[], None]:
    """A function that is called often while S waits, and sends a sign of life every `BEAT` seconds."""
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if time.monotonic() - last > BEAT:
            last = time.monotonic()
            for channel in channels.values():
                channel.beat()

    return alive


@dataclass
class ConnectedModel(ServedModel):
    """A model that an answering party offers over one connection.

    Attributes:
        link: the connection.
        made: when the version was added, by the party's clock; the latest one answers.
        number: counts registrations; of equal ones, the latest is preferred.
    """

    link: PeerLink
    made: int = 0
    number: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of its masked weights in a session."""
        return sum(8 * math.prod(entry["shape"]) for entry in self.description["weights"])

    @property
    def version(self) -> str:
        return version(self.description, self.edition)

    @property
    def open(self) -> bool:
        return self.link.closed is None


class Registry:
    """The models of all connected answering parties.

    Several processes of one party (replicas) may answer under one name, each with a store of its own. A query goes to
    the latest version, unless it names one, and of the processes with that version to the one with the fewest
    sessions. Material that was prepared at a replica is used at that replica.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count(1)
        self._offers: dict[str, list[ConnectedModel]] = {}

    def names(self) -> list[str]:
        """Names of the models that can be asked."""
        with self._lock:
            return sorted(name for name, offers in self._offers.items() if any(o.open for o in offers))

    def prune(self) -> None:
        """Remove the models of closed connections."""
        with self._lock:
            found = {name: [o for o in offers if o.open] for name, offers in self._offers.items()}
            self._offers = {name: offers for name, offers in found.items() if offers}

    def add(self, name: str, offered: ConnectedModel) -> list[PeerLink]:
        """Register a model, replacing what the same connection registered under this name before.

        A store belongs to one process: a connection with the store of another one is that process, started again.

        Returns:
            The connections that are replaced; they are to be closed.

        Raises:
            BusyError: another connection answers under the name, and the two are not both replicas.
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

    def find(self, name: str, wanted: object = None, keeper: str = "") -> ConnectedModel:
        """The model and connection that a new session uses.

        Args:
            wanted: the preferred version. Where it is not connected, another one is found; the client checks.
            keeper: the store that has the other half of prepared material.

        Raises:
            UnknownModelError: no such model is connected, or the replica with the material is not.
        """
        with self._lock:
            candidates = [o for o in self._offers.get(name, []) if o.open]
        if not candidates:
            raise self._unknown(name)
        if keeper and all(o.keeper for o in candidates):
            candidates = [o for o in candidates if o.keeper == keeper]
            if not candidates:
                raise UnknownModelError(f"the replica of '{name}' at which that was prepared is not connected")
        exact = [o for o in candidates if o.version == wanted] or candidates
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

    def has_alternative(self, names: list[str], lost: list[PeerLink]) -> bool:
        """Whether all of these models can be asked over other connections."""
        with self._lock:
            return all(any(o.open and o.link not in lost for o in self._offers.get(name, [])) for name in names)


RUNNING = 2
"""Calls that run at the same time; others wait, which bounds memory."""
SESSIONS, SESSIONS_PER_CLIENT = 128, 32
"""Open sessions: of all clients together, and of one client."""
WEIGHT_MEMORY = 2 << 30
"""Bytes of masked weights that all open sessions may hold."""


class Server:
    """S as a service. Only S listens; all others connect to it and prove their names by certificate.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        running: calls that run at the same time.
        store: where prepared material is kept; a temporary one by default.
        patience: seconds of silence after which a party counts as lost.
        call: seconds that one party may keep a call waiting in all, plus one for each MiB that it sends or takes.
        receipts: a file in which each query is signed for, with the credentials' identity key, before it is served.
        limits: a file of the quotas of clients (`limits.Quotas`).
        idle: seconds without a call after which a session ends; its client opens another one with its next call.
        place: which of several workers or replicas this process is.
        memory: bytes that this process may hold; see `MemoryBound`.

    Raises:
        ArgumentError: the file of limits is invalid.
        QuotaFileError: the use of quotas cannot be recorded.
        ReceiptError, ReceiptsInUseError, IdentityError: receipts cannot be written or signed.
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
        memory: int | None = None,
    ):
        load_loops()
        self._memory = MemoryBound(memory)
        self._place = place or ServerProcess()
        self.store = store or Store()
        self.store.on_evict = self._void_material
        self._timeouts = patience, call
        self._key = None if credentials.identity is None else read_identity(credentials.identity)
        self._registry = Registry()
        self._links: set[PeerLink] = set()
        self._sessions: dict[bytes, tuple[str, int]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._turns = FairQueue(running)
        self._broker = SessionBroker(self._links_of)
        with ExitStack() as files:
            self._receipts = (
                None if receipts is None else files.enter_context(closing(Receipts(receipts, credentials, "S")))
            )
            self._quotas = (
                None if limits is None else files.enter_context(closing(Quotas(limits, credentials.called, "S")))
            )
            self._serving = ServerSessions(
                self._turns,
                self.store,
                self._receipts,
                self._quotas,
                self._registry.has_alternative,
                idle,
                self._memory,
                self._key,
            )
            self.listener = Listener(address, credentials, self._welcome, shared=self._place.workers > 1)
            self._close_files = files.pop_all().close

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self.listener.port

    def stop(self) -> None:
        """Stop serving; the clients' running sessions fail with a PeerLostError."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(PeerLostError("the server was stopped"))
        self.listener.stop()
        join_threads(self._threads)
        self.store.close()
        self._close_files()

    def reload(self) -> None:
        """Read the file of limits again."""
        if self._quotas is not None:
            self._quotas.reload()

    def drain(self, seconds: float) -> bool:
        """Begin no more calls and sessions; returns whether the running ones ended within `seconds`."""
        return self._turns.drain("the server is stopping; ask again when it is back", seconds)

    def wait(self) -> None:
        """Block until the server is stopped."""
        self.listener.wait()

    def models(self) -> list[str]:
        """Names of the models whose answering parties are connected."""
        return self._registry.names()

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def renew(self, credentials: Credentials) -> None:
        """Use these credentials for new handshakes; open connections stay.

        Raises:
            IdentityError: they cannot be used; the former ones stay in use.
        """
        self.listener.use(credentials)

    def unready(self) -> str:
        """Why no sessions are accepted now; empty while they are."""
        return self._turns.closed or records_unready(self._receipts, self._quotas)

    def figures(self) -> dict[str, float]:
        """The current values of the gauges of `observe.GAUGES`."""
        with self._lock:
            weights = sum(size for _, size in self._sessions.values())
            open_ = sum(link.closed is None for link in self._links)
        return {
            "sessions": self.sessions, "connections": open_, "models": len(self.models()),
            "masked_weight_bytes": weights, **self._turns.figures(), **self.store.figures(),
        }  # fmt: skip

    def _welcome(self, name: str, certificate: str) -> PeerLink:
        link = PeerLink(
            name, self._request, *self._timeouts, certificate=certificate, on_close=self._broker.break_deadlocks
        )
        with self._lock:
            self._links = {known for known in self._links if known.closed is None} | {link}
        self._registry.prune()
        return link

    def _links_of(self, name: str) -> list[PeerLink]:
        with self._lock:
            return [link for link in self._links if link.peer == name]

    def _request(self, link: PeerLink, request: dict) -> None:
        """Answer a request that belongs to no session, from the client `link.peer` of the certificate."""
        try:
            answer = self._answer(link, parse_message(ToServer, request, "request"))
        except SectorchError as error:
            if isinstance(error, VersionError):
                write(log, "refused", client=link.peer, why=error)
            answer = Failure(error=type(error).__name__, text=str(error))
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            self._memory.note_refusal()
            write(log, "refused", client=link.peer, why=log_text(error))
            answer = Failure(error=BusyError.__name__, text=f"at the server, {NO_MEMORY}")
        link.tell({"do": "reply", "number": request.get("number"), **message_form(answer)})

    def _answer(self, link: PeerLink, request: ServerRequest) -> ServerReply:
        if isinstance(request, Register):
            return self._register(link, request)
        if isinstance(request, ListModels):
            return Models(models=self.models())
        if isinstance(request, Open):
            return self._open(link, request)
        if isinstance(request, Void):
            return self._drop_material(link, request)
        if isinstance(request, Hello):
            return replace(self._place, protocol=common_protocol(request, link.peer), release=release())
        self._place.check_first()
        return self._broker.answer(link, request)

    def _register(self, link: PeerLink, request: Register) -> KeptSessions:
        name = model_name(request.name, "an answering party's name", IdentityError)
        if party_of(name) != link.peer:
            raise IdentityError(f"the certificate is for '{link.peer}' and cannot answer as '{name}'")
        load_program(request.description)
        offered = ConnectedModel(
            request.description, request.edition, request.keeper, request.signed, link, request.made
        )
        for replaced in self._registry.add(name, offered):
            replaced.close(PeerLostError(f"'{name}' was started again"))
        for shelf in self.store.shelves(model=name):
            own, now = shelf.binding, (offered.edition, fingerprint(offered.description))
            if own.keeper in (request.keeper, "") and (own.edition, own.fingerprint) != now:
                write(log, "dropped", calls=len(shelf), model=name, why="it has another model now")
                shelf.drop()
        write(log, "answers", model=name, version=offered.version)
        return KeptSessions(sessions=[shelf.session.hex() for shelf in self.store.shelves(model=name)])

    def _open(self, link: PeerLink, request: Open) -> SessionParts:
        if self._turns.closed:
            raise BusyError(self._turns.closed)
        self._place.check(link.peer)
        names = [model_name(name, "a model's name in a request", FrameError) for name in request.models]
        if len(set(map(party_of, names))) < len(names):
            raise FrameError("a session has models of different parties")
        scheme, keeper = scheme_from_message(request.scheme), ""
        if scheme.accountable and self._key is None:
            raise RefusedError(
                "this server has no identity key to sign what it sends: leave accountable=True out, or ask its "
                "operator for one (`sectorch keys identity FILE`, beside the certificate)"
            )
        resume = None if request.resume is None else bytes.fromhex(request.resume)
        if resume is not None:
            keeper = self.store.shelf(resume).binding.keeper
        models = [self._registry.find(name, request.version, keeper) for name in names]
        # Q chose the session's name and has opened its end already: no frame of S's comes before Q can take it.
        wire = bytes.fromhex(request.session)
        if wire in self._sessions or self.store.holds(wire):
            raise FrameError("that session is or was open; sessions are named afresh")
        if resume is not None:
            calls = self._usable_calls(link, resume, request, models[0], scheme)
            request = replace(
                request, calls=calls, used=join_ranges(request.used, self.store.shelf(resume).used_ranges())
            )
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
            self._link_failures(list(channels.values()))
            for place, (party, model) in enumerate(zip(answering, models, strict=True)):
                channels[party].link.tell(Serve(
                    session=request.session, client=link.peer, place=place, of=len(models), model=names[place],
                    edition=model.edition, scheme=request.scheme, lasting=request.lasting, resume=request.resume,
                    calls=request.calls, used=request.used,
                ))  # fmt: skip
            subject = SessionSubject(resume or wire, link.peer, link.certificate, names, list(models), scheme, request)
            run = (subject, channels)
            thread = threading.Thread(target=self._serve, args=run, daemon=True, name=f"session of {link.peer}")
            thread.start()
        except BaseException as error:
            close_channels(channels, abort_reason(error, "the server"))
            with self._lock:
                self._sessions.pop(wire, None)
            raise
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return SessionParts(parts=[OfferedModel(model.description, model.edition, model.signed) for model in models])

    def _link_failures(self, channels: list[Channel]) -> None:
        """Where one channel of a session fails, fail the others and wake the queue, so that S stops waiting at once."""
        for channel in channels:
            channel.on_failure(self._turns.wake)
            for other in channels:
                if other is not channel:
                    channel.on_failure(other.fail)

    def _admit(self, wire: bytes, client: str, weight_bytes: int) -> None:
        with self._lock:
            open_, mine = (
                len(self._sessions),
                sum(account_of(name) == account_of(client) for name, _ in self._sessions.values()),
            )
            if open_ >= SESSIONS or mine >= SESSIONS_PER_CLIENT:
                raise BusyError(
                    f"{open_} sessions are open, {mine} of them of '{client}'; close some, or ask again later"
                )
            held = sum(size for _, size in self._sessions.values())
            if self._sessions and held + weight_bytes > WEIGHT_MEMORY:
                raise BusyError(f"open sessions hold {held >> 20} MiB of masked weights; ask again later")
            self._memory.check(weight_bytes)
            self._sessions[wire] = client, weight_bytes

    def _usable_calls(
        self, link: PeerLink, session: bytes, request: Open, model: ConnectedModel, scheme: Scheme
    ) -> list[int]:
        """The prepared calls that Q may use: of its own material, for this model and format, and still in the store."""
        shelf = self.store.shelf(session)
        if shelf.binding != material_owner(link.peer, request.models[0], model, scheme):
            raise MaterialError("that material was prepared for another client, model or number format; prepare again")
        shelf.refuse_used(request.used, link.peer)
        shelf.keep_only(request.calls)
        return list(shelf.calls())

    def _void_material(self, shelf: Shelf) -> None:
        """Have the answering party drop its half of evicted material. Q is told when it asks for that material."""
        with suppress(SectorchError):
            model = self._registry.find(shelf.binding.model, keeper=shelf.binding.keeper)
            model.link.tell(Void(sessions=[shelf.session.hex()]))

    def _drop_material(self, link: PeerLink, request: Void) -> ServerReply:
        """Drop the material of sessions of which the answering party has lost its half."""
        for shelf in self.store.shelves():
            if shelf.session.hex() in request.sessions and party_of(shelf.binding.model) == link.peer:
                shelf.drop()
        return ServerReply()

    def _serve(self, subject: SessionSubject, channels: dict[Party, Channel]) -> None:
        try:
            self._serving.serve(subject, channels)
        finally:
            with self._lock:
                self._sessions.pop(channels[Q].session, None)
