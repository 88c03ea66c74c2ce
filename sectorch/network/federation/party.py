"""A party of a federation: its connection to the server, and the sessions in which it meets others."""

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
from ...errors import ArgumentError, DeadlockError, FrameError, PeerLostError, RefusedError, SectorchError
from ...federated.parties import Names
from ...session import Q, Session
from ..messages import ControlMessage, Delivery, Meet, PartFinished, PartiesMissing, Refusal, SessionBegin, Unmeet
from ..names import readable
from ..parties.client import Connection
from ..parties.session import RemoteSession, abort_reason
from ..wire.channel import Channel, copy_error
from ..wire.tls_stream import no_other_threads, start_thread
from .broker import Key, wire_of
from .config import FederationFile, credentials, read_federation
from .programs import FederationIdentities, check_edges, roles_of, star_of
from .reveals import Ledger
from .sealed_channel import EdgeEnds, RelayedChannel, SealedChannel, digest_of

# Sessions that come about: what a party waits for, and its ends of one that the server has named.


BEAT = 2.0
"""Seconds between words to the others, so that a long computation is no silence."""


class SessionCalls:
    """What the server says of the sessions that come about."""

    def __init__(self):
        self._changed = threading.Condition()
        self._expected: dict[Key, SessionEnds | SectorchError | None] = {}

    def expect(self, key: Key) -> None:
        with self._changed:
            if key in self._expected:
                raise ArgumentError(f"this party waits for '{key[0]}' with the same parties already")
            self._expected[key] = None

    def forget(self, key: Key) -> None:
        with self._changed:
            meeting = self._expected.pop(key, None)
        if isinstance(meeting, SessionEnds):  # it began as this party stopped waiting: the others need not wait for it
            meeting.give_up(PeerLostError("it does not wait any more"))

    def refuse(self, key: Key, error: SectorchError) -> None:
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = error
                self._changed.notify_all()

    def give_up(self, keys: Iterable[Key], error: BaseException) -> None:
        """This party does not wait any more for what it waits for under these; see `wait`."""
        with self._changed:
            for key in keys:
                if key in self._expected and self._expected[key] is None:
                    self._expected[key] = PeerLostError(str(error))
            self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again at the sessions that this party is in: one has failed."""
        with self._changed:
            self._changed.notify_all()

    def came(self, key: Key, open_: Callable[[], SessionEnds]) -> bool:
        """Whether this party waited for it, and takes part."""
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = open_()
                self._changed.notify_all()
                return True
        return False

    def wait(self, key: Key, connection: Connection, seconds: float | None, others: list[SessionEnds]) -> SessionEnds:
        """The session, when all have come; that one of the `others`, which this party is in, fails ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while (meeting := self._expected.get(key)) is None:
                left = 1.0 if end is None else min(1.0, end - time.monotonic())
                if connection.link.closed is not None:
                    raise copy_error(connection.link.closed)
                for other in others:
                    other.alive()
                if left <= 0:
                    raise PeerLostError(f"not all of {', '.join(key[1])} came for '{key[0]}' in {seconds:.0f} s")
                self._changed.wait(left)
            del self._expected[key]
        if isinstance(meeting, SectorchError):
            raise meeting
        return meeting


class SessionEnds:
    """This party's ends of a session that the server has named: one channel to the server, one to each other party.

    `failed` is called when it has.
    """

    def __init__(self, connection: Connection, run: bytes, names: tuple[str, ...], failed: Callable[[], None]):
        link = connection.link
        self.run, self._connection, self._heard = run, connection, failed
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
        self._heard()

    def alive(self) -> None:
        """Raises what the session failed with."""
        self._control.beat()

    def give_up(self, error: BaseException) -> None:
        """The others' session ends with the reason, which holds no secret."""
        self._control.abort(abort_reason(error, f"'{self._connection.name}'"))
        if isinstance(error, SectorchError):  # another thread of this party, which is in it, ends with the same
            self._failed(error)
        self.close()

    def done(self) -> None:
        """This party has done its part."""
        try:
            self._connection.ask(PartFinished(meeting=self.run.hex()))
        finally:
            self.close()

    def close(self) -> None:
        for channel in (*self.channels.values(), self._control):
            channel.close()


@contextmanager
def heartbeats(edges: list[SealedChannel]) -> Iterator[None]:
    """Beside the block, the others hear now and then that this party is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            for edge in edges:
                with suppress(SectorchError):  # the session's own thread meets it too
                    edge.beat()

    thread = start_thread(beat, "beats")
    try:
        yield
    finally:
        over.set()
        thread.join()


log = logging.getLogger("sectorch.federation")
RETRY = 1.0
"""Seconds between attempts to reach the server."""
SILENCE = 30.0
"""Seconds without a word after which another party counts as hanging; a connection that breaks is noticed at once."""


class Federation:
    """This process is one party of a federation. Use as a context manager, or `close` it.

    Args:
        path: of the federation file. as_: this party's name in it.
        folder: where its certificate and keys are; that of the file unless named.
        inputs: what this party brings into programs, by name (`federated.parties.Parties`). What it keeps for a later
            run of one is in the folder `NAME-kept` beside the file.
        patience: seconds to wait for the server. wait: seconds to wait for other parties; None for ever.
        on_note: called with notes of other parties (`notes.py`), in the thread that reads the connection.
        needs: roles that somebody has to play in what it is here for.

    Raises:
        ArgumentError, IdentityError: the file, or this party's own, are not right; nothing was sent.
        PeerLostError: the server is not there. IdentityError: a certificate was refused.
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
        for role in needs:
            self.file.named(role)
        self.name = as_
        own = credentials(self.file, as_, Path(path).parent if folder is None else Path(folder))
        self._called, self._open, self._on_note = SessionCalls(), list[SessionEnds](), on_note
        self._bound, self._over, self._awaited = "", "", set[Key]()
        self._ledger: Ledger | None = None
        self._own, self._dialling = own, threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._home = self.file.home(as_)
        self._at(self._home, patience)

    def _at(self, server: str, patience: float) -> Connection:
        """The connection to a server, which is made where there is none."""
        lost = lambda found: found is None or (server != self._home and found.link.closed is not None)
        if lost(self._connections.get(server)):
            with self._dialling:
                if lost(self._connections.get(server)):
                    self._connections[server] = self._dialled(server, patience)
        return self._connections[server]

    def _dialled(self, server: str, patience: float) -> Connection:
        end, told = time.monotonic() + patience, False
        serve = functools.partial(self._serve, server)
        while True:
            left = max(1.0, end - time.monotonic())
            try:
                return Connection(
                    self.file.servers[server], self._own, on_serve=serve, patience=min(5.0, left), silence=SILENCE,
                    worker=0,
                )  # fmt: skip
            except PeerLostError as error:
                if time.monotonic() + RETRY > end:
                    raise
                if not told:
                    log.info("%s; dialling again for %.0f s", error, left)
                told = True
                time.sleep(RETRY)

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Federation({self.file.name}, as {self.name})"

    @property
    def address(self) -> str:
        """Of the server at which this party hears of what others propose."""
        return self.file.servers[self._home]

    @property
    def connection(self) -> Connection:
        """To that server; to others it is made with the first session there."""
        return self._connections[self._home]

    def close(self) -> None:
        """Leave; sessions that are open end at the others."""
        with self._dialling:
            for connection in self._connections.values():
                connection.close()

    def taking(
        self, inputs: Mapping[str, torch.Tensor], bound: str, folder: Path | None = None, ledger: Ledger | None = None
    ) -> Federation:
        """This party in one run of several: with inputs of its own, and sessions that are bound to the run.

        Args:
            bound: the run's name and what was agreed on; all parties of its sessions have the same.
            folder: for what a later run goes on with.
            ledger: of what the run may reveal, and has revealed; anything, and it is not noted, unless given.
        """
        found = copy.copy(self)
        found._ledger = ledger
        found.folder = self.folder if folder is None else folder
        found.inputs, found._open, found._bound, found._awaited = dict(inputs), [], bound, set()
        if ledger is not None:
            ledger.ends = found.give_up
        return found

    def give_up(self, error: BaseException) -> None:
        """End the sessions that this party, or this run of it, is in, and waits for, at all parties."""
        self._over = str(error)
        self._called.give_up(list(self._awaited), error)
        for meeting in list(self._open):
            meeting.give_up(error)

    @contextmanager
    def session(
        self,
        roles: Roles,
        names: Names | None = None,
        *,
        label: str = "session",
        agreed: str = "",
    ) -> Iterator[Session]:
        """A session of these roles among parties of the federation; begins when all of them are there.

        In the block, what a choreography does runs as this party's part; at its end this party has done its part, and
        an error ends the session for all. Messages between two parties are sealed end to end: the server, which relays
        them, learns who talks to whom, when, and how many bytes.

        Args:
            names: that the parties go by in the session, by role, each a party's name or its role in the federation
                file; the roles themselves unless given. In secure inference (`STAR`) A may be several, in a list: they
                are the session's `answering`, in that order; D may be a dealer, and O a list of owners.
            label: under which they meet; two sessions of the same parties at the same time have different ones.
            agreed: what they have to agree on beside roles and names: settings, a program's digest.

        Raises:
            ArgumentError: a role that nobody plays, or this party plays none; nothing was sent.
            RefusedError: another party would do something else under this label.
            DeadlockError: the parties wait in a circle, each for another one that waits in another session, and each
                has but one thread that could come.
            PeerLostError: somebody did not come, or was lost. AbortedError: somebody gave up.
            KeyAgreementError, IdentityError: somebody is not who the file names, or agrees on something else.
        """
        called = dict(names or {})
        if roles is STAR:
            parties = star_of(called)
            roles = roles_of(parties)
            cast = self._cast(roles, parties)
            digest = self._digest(roles, cast, *self._within(label, agreed))
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
        """What `session` runs on: for protocols in which several parties play one role, on nets of their own.

        Args:
            parties: everyone, with whom in the federation file it is, by name or role there.
            label, agreed: as of `session`, and so is what is raised.
        """
        with self._runtime(roles, parties, label, agreed) as runtime:
            self._watch(runtime, label, parties)
            yield runtime

    def _watch(
        self, runtime: PartyRuntime, label: str, parties: Mapping[Party, str], session: Session | None = None
    ) -> None:
        """From now on the run's ledger has all that is revealed; the session has its keys."""
        if self._ledger is not None:
            cast = {party: self.file.named(name).name for party, name in parties.items()}
            self._ledger.watch(runtime, label, cast, session)

    @contextmanager
    def _runtime(self, roles: Roles, parties: Mapping[Party, str], label: str, agreed: str) -> Iterator[PartyRuntime]:
        cast = self._cast(roles, parties)
        if self._ledger is not None:
            self._ledger.check_session(label, agreed, cast)
        label, agreed = self._within(label, agreed)
        digest = self._digest(roles, cast, label, agreed)
        mine = next(party for party, name in cast.items() if name == self.name)
        meeting = self._meet(label, tuple(sorted(cast.values())), digest)
        self._open.append(meeting)
        try:
            edges = self._secure(meeting, cast, mine, roles, digest)
            runtime = PartyRuntime(mine, meeting.run, edges)
            try:
                with heartbeats(list(edges.values())):
                    yield runtime
            finally:
                runtime.close()
        except BaseException as error:
            if self._ledger is not None:
                self._ledger.end()
            meeting.give_up(error)
            raise
        finally:
            self._open.remove(meeting)
        meeting.done()

    def present(self, party: str) -> bool:
        """Whether a party, named as in the federation file or by its role there, is this one."""
        return self.file.named(party).name == self.name

    def _within(self, label: str, agreed: str) -> tuple[str, str]:
        """Label and what is agreed, of this run alone."""
        return (f"{self._bound[:16]} {label}", f"{agreed} {self._bound}") if self._bound else (label, agreed)

    def _cast(self, roles: Roles, parties: Mapping[Party, str]) -> dict[Party, str]:
        """The names in the federation file of those that take part."""
        cast = {party: self.file.named(name).name for party, name in parties.items()}
        if len(set(cast.values())) < len(cast):
            raise ArgumentError(f"each role of {roles} is played by another party; got {_said(cast)}")
        if self.name not in cast.values():
            raise ArgumentError(f"'{self.name}' plays no role of {roles}; its parties are {_said(cast)}")
        check_edges(self.file, roles, cast)
        return cast

    def _digest(self, roles: Roles, cast: Mapping[Party, str], label: str, agreed: str) -> bytes:
        """What all that take part have to be about to do."""
        return digest_of(json.dumps({
            "federation": self.file.digest, "roles": [sorted(map(sorted, p)) for p in (roles.edges, roles.streams)],
            "cast": sorted((party.role, party.name, name) for party, name in cast.items()), "agreed": agreed,
            "label": label, "version": metadata.version("sectorch"),
        }, sort_keys=True))  # fmt: skip

    def _meet(self, label: str, names: tuple[str, ...], digest: bytes) -> SessionEnds:
        if self._over:
            raise PeerLostError(self._over)
        key = label, names
        connection = self._at(self.file.meets_at(names), 5.0 if self._wait is None else self._wait)
        self._called.expect(key)
        self._awaited.add(key)
        try:
            request = Meet(
                label=label, digest=digest.hex(), parties=list(names), time=time.time(), alone=no_other_threads()
            )
            missing = connection.ask(request, PartiesMissing).missing
            if missing:
                log.info("'%s' waits for %s", self.name, ", ".join(missing))
            return self._called.wait(key, connection, self._wait, self._open)
        except BaseException:
            self._called.forget(key)
            with suppress(SectorchError):
                connection.link.tell(Unmeet(label=label, parties=list(names)))
            raise
        finally:
            self._awaited.discard(key)

    def _serve(self, server: str, request: ControlMessage) -> None:
        """A session begins there; in the thread that reads the connection, so that no frame is missed."""
        if isinstance(request, Delivery):
            if self._on_note is not None:
                self._on_note(request)
            return
        if not isinstance(request, SessionBegin | Refusal):
            raise FrameError(f"the server says '{request.do}' to a party of a federation, who answers no queries here")
        key, connection = (request.label, tuple(request.parties)), self._connections.get(server)
        known = {member.name for member in self.file.members}
        here = self.name in key[1] and known.issuperset(key[1]) and self.file.meets_at(key[1]) == server
        if connection is None or not here:
            raise FrameError("the server begins a session that is at another one, or of nobody")
        if isinstance(request, Refusal):
            kind = DeadlockError if request.error == DeadlockError.__name__ else RefusedError
            self._called.refuse(key, kind(readable(request.text)))
            return
        run = bytes.fromhex(request.meeting)
        if not self._called.came(key, lambda: SessionEnds(connection, run, key[1], self._called.wake)):
            connection.link.refuse(run, "PeerLostError: it does not wait any more")

    def _secure(
        self, meeting: SessionEnds, who: Mapping[Party, str], mine: Party, roles: Roles, digest: bytes
    ) -> dict[Party, SealedChannel]:
        """Edges to those that this party has an edge to."""
        edges = {}
        for party, name in who.items():
            if frozenset((mine.role, party.role)) in roles.edges:
                pinned = self.file.member(name).identity
                ends = EdgeEnds(self.name, name, self.connection.identity, pinned, meeting.run, digest)
                edges[party] = SealedChannel(meeting.channels[name], ends, self.file.largest)
        for step in (SealedChannel.hello, SealedChannel.prove, SealedChannel.agree):
            for edge in edges.values():
                step(edge)
        return edges


def _said(cast: Mapping[Party, str]) -> dict[str, str]:
    return {party.name: name for party, name in cast.items()}
