"""A party of a federation: its connections to servers, and its sessions with other parties.

`Federation` is the party. To open a session it sends `Meet` and waits (`SessionCalls`); when the server announces the
session, `SessionEnds` opens its channels, and each edge is encrypted end to end (`sealed_channel`).
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...choreography import Party, Roles
from ...choreography.roles import STAR
from ...choreography.run.party import PartyRuntime
from ...deprecation import renamed_attribute
from ...errors import ArgumentError, DeadlockError, FrameError, PeerLostError, RefusedError, SectorchError
from ...federated.parties import Names
from ...session import Q, Session
from ..messages import ControlMessage, Delivery, Meet, PartFinished, PartiesMissing, Refusal, SessionBegin, Unmeet
from ..names import readable
from ..parties.client import Connection
from ..parties.session import RemoteSession, abort_reason
from ..wire.channel import Channel, copy_error
from ..wire.endpoints import NOBODY_LISTENS
from ..wire.tls_stream import is_single_threaded, start_carrier
from .broker import Key, wire_of
from .config import FederationFile, credentials, read_federation
from .programs import FederationIdentities, check_edges, roles_of, star_of
from .reveals import Ledger
from .sealed_channel import EdgeEnds, RelayedChannel, SealedChannel, digest_of

BEAT = 2.0
"""Seconds between heartbeats to the other parties, which a long computation would otherwise delay."""


class SessionCalls:
    """The sessions for which this party waits, and the server's announcements of them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._expected: dict[Key, SessionEnds | SectorchError | None] = {}

    def begin_wait(self, key: Key) -> None:
        """Expect a session. Raises ArgumentError if this party waits for it already."""
        with self._changed:
            if key in self._expected:
                raise ArgumentError(f"this party waits for '{key[0]}' with the same parties already")
            self._expected[key] = None

    def forget(self, key: Key) -> None:
        """Stop waiting for a session."""
        with self._changed:
            ends = self._expected.pop(key, None)
        if isinstance(ends, SessionEnds):  # it began at the same moment: end it for the others
            ends.give_up(PeerLostError("it does not wait any more"))

    def refuse(self, key: Key, error: SectorchError) -> None:
        """End a wait with an error of the server's."""
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = error
                self._changed.notify_all()

    def give_up(self, keys: Iterable[Key], error: BaseException) -> None:
        """End these waits with an error."""
        with self._changed:
            for key in keys:
                if key in self._expected and self._expected[key] is None:
                    self._expected[key] = PeerLostError(str(error))
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake the waits, which check the sessions that this party is in: one has failed."""
        with self._changed:
            self._changed.notify_all()

    def open_session(self, key: Key, open_: Callable[[], SessionEnds]) -> bool:
        """Open an announced session by `open_`, if this party waits for it; returns whether it does."""
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = open_()
                self._changed.notify_all()
                return True
        return False

    def wait(self, key: Key, connection: Connection, seconds: float | None, others: list[SessionEnds]) -> SessionEnds:
        """Wait until all parties have come, and return the session's ends.

        Args:
            seconds: to wait; None waits without limit.
            others: the open sessions of this party. If one fails, its error ends the wait.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while (ends := self._expected.get(key)) is None:
                remaining = 1.0 if end is None else min(1.0, end - time.monotonic())
                if connection.link.closed is not None:
                    raise copy_error(connection.link.closed)
                for other in others:
                    other.check_alive()
                if remaining <= 0:
                    raise PeerLostError(f"not all of {', '.join(key[1])} came for '{key[0]}' in {seconds:.0f} s")
                self._changed.wait(remaining)
            del self._expected[key]
        if isinstance(ends, SectorchError):
            raise ends
        return ends


class SessionEnds:
    """This party's channels of one session: to the server, and through it to each other party.

    Args:
        run: the name that the server gave the session.
        names: of all its parties.
        on_failure: called when the session has failed.
    """

    def __init__(self, connection: Connection, run: bytes, names: tuple[str, ...], on_failure: Callable[[], None]):
        link = connection.link
        self.run, self._connection, self._on_failure = run, connection, on_failure
        self._control = link.open(run)
        self.channels: dict[str, Channel] = {
            name: link.open(wire_of(run, connection.name, name), RelayedChannel, name)
            for name in names
            if name != connection.name
        }
        self._control.on_failure(self._failed)

    def _failed(self, failure: SectorchError) -> None:
        for channel in self.channels.values():
            channel.fail(failure)
        self._on_failure()

    def check_alive(self) -> None:
        """Raise the session's failure, if any."""
        self._control.beat()

    def give_up(self, error: BaseException) -> None:
        """End the session at all parties, with a reason that holds no secret (`abort_reason`)."""
        self._control.abort(abort_reason(error, f"'{self._connection.name}'"))
        if isinstance(error, SectorchError):  # so that another thread in this session raises the same error
            self._failed(error)
        self.close()

    def finish(self) -> None:
        """Tell the server that this party has done its part."""
        try:
            self._connection.ask(PartFinished(meeting=self.run.hex()))
        finally:
            self.close()

    def close(self) -> None:
        for channel in (*self.channels.values(), self._control):
            channel.close()


@contextmanager
def heartbeats(edges: list[SealedChannel]) -> Iterator[None]:
    """Send heartbeats over these edges during the block."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            for edge in edges:
                with suppress(SectorchError):  # the session's own thread raises it too
                    edge.beat()

    thread = start_carrier(beat, "beats")
    try:
        yield
    finally:
        over.set()
        thread.join()


log = logging.getLogger("sectorch.federation")
RETRY = 1.0
"""Seconds between attempts to reach the server."""
SILENCE = 30.0
"""Seconds of silence after which another party counts as lost. A closed connection is noticed at once."""


class Federation:
    """This process as one party of a federation. Use as a context manager, or `close` it.

    Args:
        path: of the federation file.
        as_: this party's name in it.
        folder: of its certificate and keys; by default the folder of the federation file.
        inputs: this party's inputs to programs, by name (`federated.parties.Parties`). What a program keeps for a later
            run is in the folder `NAME-kept` beside the file.
        patience: seconds to wait for the server.
        wait: seconds to wait for other parties; None waits without limit.
        on_note: called with notes of other parties (`proposals`), in the thread that reads the connection.
        needs: roles that a party has to play for the caller's purpose.

    Raises:
        ArgumentError: the federation file or this party's files are invalid, or nobody plays a role of `needs`; nothing
            was sent.
        IdentityError: keys or certificates are invalid, or the server refused the certificate.
        PeerLostError: the server cannot be reached.
    """

    def __init__(
        self,
        path: str | Path,
        as_: str,
        folder: str | Path | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        *,
        patience: float = 5.0,
        wait: float | None = 600.0,
        on_note: Callable[[Delivery], None] | None = None,
        needs: Sequence[str] = (),
    ):
        self.inputs: Mapping[str, torch.Tensor] = dict(inputs or {})
        self.folder = Path(path).parent / f"{as_}-kept"
        self._wait = wait
        self.file: FederationFile = read_federation(path)
        self._path = Path(path)
        for role in needs:
            self.file.member_named(role)
        self.name = as_
        own = credentials(self.file, as_, Path(path).parent if folder is None else Path(folder))
        self._calls, self._open, self._on_note = SessionCalls(), list[SessionEnds](), on_note
        self._bound, self._ended, self._awaited = "", "", set[Key]()
        self._ledger: Ledger | None = None
        self._own, self._dialling = own, threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._home = self.file.home(as_)
        self._at(self._home, patience)

    def _at(self, server: str, patience: float) -> Connection:
        """The connection to a server, made on first use. A closed one is made again, except that to the home server."""
        missing = lambda found: found is None or (server != self._home and found.link.closed is not None)
        if missing(self._connections.get(server)):
            with self._dialling:
                if missing(self._connections.get(server)):
                    self._connections[server] = self._connect(server, patience)
        return self._connections[server]

    def _connect(self, server: str, patience: float) -> Connection:
        end, logged = time.monotonic() + patience, False
        serve = functools.partial(self._serve, server)
        while True:
            remaining = max(1.0, end - time.monotonic())
            try:
                return Connection(
                    self.file.servers[server], self._own, on_serve=serve, patience=min(5.0, remaining), silence=SILENCE,
                    worker=0,
                )  # fmt: skip
            except PeerLostError as error:
                if time.monotonic() + RETRY > end:
                    raise self._server_is_down(server, error) from None
                if not logged:
                    log.info("%s; dialling again for %.0f s", error, remaining)
                logged = True
                time.sleep(RETRY)

    def _server_is_down(self, server: str, error: PeerLostError) -> PeerLostError:
        """What to do about a server that cannot be reached: somebody has to start it, or the file is wrong."""
        if NOBODY_LISTENS not in str(error):
            return PeerLostError(f"{error}; that is the address of the server '{server}' in {self._path}")
        return PeerLostError(
            f"{error}: the server '{server}' of the federation is not up; start it there first, "
            f"`sectorch up {self._path.name} --as {server}`, and leave it running"
        )

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Federation({self.file.name}, as {self.name})"

    @property
    def address(self) -> str:
        """The address of the home server, over which this party gets proposals."""
        return self.file.servers[self._home]

    @property
    def connection(self) -> Connection:
        """The connection to the home server."""
        return self._connections[self._home]

    def close(self) -> None:
        """Close the connections; open sessions end at the other parties too."""
        with self._dialling:
            for connection in self._connections.values():
                connection.close()

    def for_run(
        self, inputs: Mapping[str, torch.Tensor], bound: str, folder: Path | None = None, ledger: Ledger | None = None
    ) -> Federation:
        """This party for one run: with inputs of the run, and with sessions that are bound to it.

        Args:
            inputs: this party's inputs, by name.
            bound: the run's name and what was agreed on; equal at all parties of its sessions.
            folder: for what the run keeps for a later one.
            ledger: limits and records what the run reveals; None does neither.
        """
        found = copy.copy(self)
        found._ledger = ledger
        found.folder = self.folder if folder is None else folder
        found.inputs, found._open, found._bound, found._awaited = dict(inputs), [], bound, set()
        if ledger is not None:
            ledger.ends = found.give_up
        return found

    taking = renamed_attribute("taking", "for_run")

    def give_up(self, error: BaseException) -> None:
        """End the sessions of this party (or of this run), also those for which it waits, at all parties."""
        self._ended = str(error)
        self._calls.give_up(list(self._awaited), error)
        for ends in list(self._open):
            ends.give_up(error)

    @contextmanager
    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = "session", agreed: str = ""
    ) -> Iterator[Session]:
        """A session of these roles among parties of the federation; it begins when all of them have come.

        In the block, a choreography runs this party's part. The end of the block ends this party's part; an error in it
        ends the session for all. Messages between two parties are encrypted end to end: the server that relays them
        learns who sends to whom, when, and how many bytes.

        Args:
            roles: of the protocol.
            names: the party of each role, by its name or its role in the federation file; by default that of the same
                role. In secure inference (`STAR`), A may be a list of answering parties, whose order is that of the
                session's `answering`; D may be a dealer, and O a list of owners.
            label: under which the parties meet; sessions of the same parties at the same time need different ones.
            agreed: what the parties have to agree on in addition to roles and names: settings, a program's digest.

        Raises:
            ArgumentError: a role that nobody plays, or this party plays none; nothing was sent.
            RefusedError: another party would run something else under this label.
            DeadlockError: the parties wait in a circle, each for another one that waits in another session, and each
                has only one thread.
            PeerLostError: a party did not come, or was lost.
            AbortedError: a party ended the session.
            KeyAgreementError, IdentityError: a party has another key than the file names, or agrees on something else.
        """
        called = dict(names or {})
        if roles is STAR:
            parties = star_of(called)
            roles = roles_of(parties)
            cast = self._cast(roles, parties)
            digest = self._digest(roles, cast, *self._bind(label, agreed))
            named = lambda client, party: FederationIdentities(
                {"Q": cast[client], "A": cast[party]}, self.connection.identity, digest, self.file
            )
            identities = [named(Q, party) for party in cast if party.role == "A"]
            dealer = next((party for party in cast if party.role == "D"), Q)
            owners = [party.name for party in cast if party.role == "O"]
            with self._runtime(roles, cast, label, agreed) as runtime:
                session = RemoteSession(
                    runtime, identities, 0, len(identities), True, dealer=dealer, owners=owners, known=named
                )
                self._watch(runtime, label, cast, session)
                yield session
            return
        called = called or {role: role for role in roles.names}
        if set(called) != set(roles.names) or not all(isinstance(name, str) for name in called.values()):
            raise ArgumentError(f"names are one for each of {roles}; got {called}")
        single = {role: str(called[role]) for role in roles.names}
        parties = {Party(name, role): name for role, name in single.items()}
        with self._runtime(roles, parties, label, agreed) as runtime:
            session = Session(roles=roles, names=single, runtime=runtime)
            self._watch(runtime, label, parties, session)
            yield session

    @contextmanager
    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = "session", agreed: str = ""
    ) -> Iterator[PartyRuntime]:
        """The runtime on which `session` runs, for protocols in which several parties play one role.

        Args:
            roles: of the protocol.
            parties: all parties of the protocol, each with its name or role in the federation file.
            label, agreed: see `session`, which raises the same errors.
        """
        with self._runtime(roles, parties, label, agreed) as runtime:
            self._watch(runtime, label, parties)
            yield runtime

    def _watch(
        self, runtime: PartyRuntime, label: str, parties: Mapping[Party, str], session: Session | None = None
    ) -> None:
        """Let the run's ledger watch all that is revealed after the key agreement."""
        if self._ledger is not None:
            cast = {party: self.file.member_named(name).name for party, name in parties.items()}
            self._ledger.watch(runtime, label, cast, session)

    @contextmanager
    def _runtime(self, roles: Roles, parties: Mapping[Party, str], label: str, agreed: str) -> Iterator[PartyRuntime]:
        cast = self._cast(roles, parties)
        if self._ledger is not None:
            self._ledger.check_session(label, agreed, cast)
        label, agreed = self._bind(label, agreed)
        digest = self._digest(roles, cast, label, agreed)
        mine = next(party for party, name in cast.items() if name == self.name)
        ends = self._meet(label, tuple(sorted(cast.values())), digest)
        self._open.append(ends)
        try:
            edges = self._secure(ends, cast, mine, roles, digest)
            runtime = PartyRuntime(mine, ends.run, edges)
            try:
                with heartbeats(list(edges.values())):
                    yield runtime
            finally:
                runtime.close()
        except BaseException as error:
            if self._ledger is not None:
                self._ledger.end()
            ends.give_up(error)
            raise
        finally:
            self._open.remove(ends)
        ends.finish()

    def present(self, party: str) -> bool:
        """Whether this process is the party of that name or role in the federation file."""
        return self.file.member_named(party).name == self.name

    def _bind(self, label: str, agreed: str) -> tuple[str, str]:
        """Bind a label and what is agreed to this run."""
        return (f"{self._bound[:16]} {label}", f"{agreed} {self._bound}") if self._bound else (label, agreed)

    def _cast(self, roles: Roles, parties: Mapping[Party, str]) -> dict[Party, str]:
        """The names in the federation file of the parties of a session."""
        cast = {party: self.file.member_named(name).name for party, name in parties.items()}
        if len(set(cast.values())) < len(cast):
            raise ArgumentError(f"each role of {roles} is played by another party; got {_cast_names(cast)}")
        if self.name not in cast.values():
            raise ArgumentError(f"'{self.name}' plays no role of {roles}; its parties are {_cast_names(cast)}")
        check_edges(self.file, roles, cast)
        return cast

    def _digest(self, roles: Roles, cast: Mapping[Party, str], label: str, agreed: str) -> bytes:
        """The digest of all that the parties of a session have to agree on."""
        return digest_of(json.dumps({
            "federation": self.file.digest, "roles": [sorted(map(sorted, p)) for p in (roles.edges, roles.streams)],
            "cast": sorted((party.role, party.name, name) for party, name in cast.items()), "agreed": agreed,
            "label": label, "version": metadata.version("sectorch"),
        }, sort_keys=True))  # fmt: skip

    def _meet(self, label: str, names: tuple[str, ...], digest: bytes) -> SessionEnds:
        if self._ended:
            raise PeerLostError(self._ended)
        key = label, names
        connection = self._at(self.file.meets_at(names), 5.0 if self._wait is None else self._wait)
        self._calls.begin_wait(key)
        self._awaited.add(key)
        try:
            request = Meet(
                label=label, digest=digest.hex(), parties=list(names), time=time.time(), alone=is_single_threaded()
            )
            missing = connection.ask(request, PartiesMissing).missing
            if missing:
                log.info("'%s' waits for %s", self.name, ", ".join(missing))
            return self._calls.wait(key, connection, self._wait, self._open)
        except BaseException:
            self._calls.forget(key)
            with suppress(SectorchError):
                connection.link.tell(Unmeet(label=label, parties=list(names)))
            raise
        finally:
            self._awaited.discard(key)

    def _serve(self, server: str, request: ControlMessage) -> None:
        """Handle a server's message, in the thread that reads the connection: so a session's channels are open before
        its first frame is read."""
        if isinstance(request, Delivery):
            if self._on_note is not None:
                self._on_note(request)
            return
        if not isinstance(request, SessionBegin | Refusal):
            raise FrameError(f"the server says '{request.do}' to a party of a federation, who answers no queries here")
        key, connection = (request.label, tuple(request.parties)), self._connections.get(server)
        known = {member.name for member in self.file.members}
        ours = self.name in key[1] and known.issuperset(key[1]) and self.file.meets_at(key[1]) == server
        if connection is None or not ours:
            raise FrameError("the server begins a session that is at another one, or of nobody")
        if isinstance(request, Refusal):
            kind = DeadlockError if request.error == DeadlockError.__name__ else RefusedError
            self._calls.refuse(key, kind(readable(request.text)))
            return
        run = bytes.fromhex(request.meeting)
        if not self._calls.open_session(key, lambda: SessionEnds(connection, run, key[1], self._calls.wake)):
            connection.link.refuse(run, "PeerLostError: it does not wait any more")

    def _secure(
        self, ends: SessionEnds, cast: Mapping[Party, str], mine: Party, roles: Roles, digest: bytes
    ) -> dict[Party, SealedChannel]:
        """Agree on keys with the parties to which this party's role has an edge."""
        edges = {}
        for party, name in cast.items():
            if frozenset((mine.role, party.role)) in roles.edges:
                pinned = self.file.member(name).identity
                edge = EdgeEnds(self.name, name, self.connection.identity, pinned, ends.run, digest)
                edges[party] = SealedChannel(ends.channels[name], edge, self.file.largest)
        for step in (SealedChannel.hello, SealedChannel.prove, SealedChannel.agree):
            for edge in edges.values():
                step(edge)
        return edges


def _cast_names(cast: Mapping[Party, str]) -> dict[str, str]:
    return {party.name: name for party, name in cast.items()}
