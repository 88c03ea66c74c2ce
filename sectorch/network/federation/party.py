"""A party of a federation: its connection to the server, and the sessions in which it meets others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...choreography import Party, Roles
from ...choreography.roles import STAR
from ...choreography.run.party import PartyRuntime
from ...errors import ArgumentError, FrameError, PeerLostError, RefusedError, SectorchError
from ...session import Session
from ..identity.certificates import Credentials
from ..names import readable
from ..parties.client import Connection
from ..parties.said import reason, session_of
from ..wire.channel import Channel, again
from .file import Federated, credentials, read
from .meetings import wire_of
from .secured import Ends, Relayed, Secured, digest_of

log = logging.getLogger("sectorch.federation")
BEAT = 2.0
"""Seconds between words to the others, so that a long computation is no silence."""
RETRY = 1.0
"""Seconds between attempts to reach the server."""
SILENCE = 30.0
"""Seconds without a word after which another party counts as hanging; a connection that breaks is noticed at once."""


Key = tuple[str, tuple[str, ...]]
"""A label, and the names of the parties that meet under it."""


class _Called:
    """What the server says of the sessions that come about."""

    def __init__(self):
        self._changed = threading.Condition()
        self._expected: dict[Key, Meeting | SectorchError | None] = {}

    def expect(self, key: Key) -> None:
        with self._changed:
            if key in self._expected:
                raise ArgumentError(f"this party waits for '{key[0]}' with the same parties already")
            self._expected[key] = None

    def forget(self, key: Key) -> None:
        with self._changed:
            meeting = self._expected.pop(key, None)
        if isinstance(meeting, Meeting):  # it began as this party stopped waiting: the others need not wait for it
            meeting.give_up(PeerLostError("it does not wait any more"))

    def refuse(self, key: Key, text: str) -> None:
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = RefusedError(text)
                self._changed.notify_all()

    def came(self, key: Key, open_: Callable[[], Meeting]) -> bool:
        """Whether this party waited for it, and takes part."""
        with self._changed:
            if key in self._expected and self._expected[key] is None:
                self._expected[key] = open_()
                self._changed.notify_all()
                return True
        return False

    def wait(self, key: Key, connection: Connection, seconds: float | None) -> Meeting:
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while (meeting := self._expected.get(key)) is None:
                left = 1.0 if end is None else min(1.0, end - time.monotonic())
                if connection.link.closed is not None:
                    raise again(connection.link.closed)
                if left <= 0:
                    raise PeerLostError(f"not all of {', '.join(key[1])} came for '{key[0]}' in {seconds:.0f} s")
                self._changed.wait(left)
            del self._expected[key]
        if isinstance(meeting, SectorchError):
            raise meeting
        return meeting


class Meeting:
    """This party's ends of a session that the server has named: one channel to the server, one to each other party."""

    def __init__(self, connection: Connection, run: bytes, names: tuple[str, ...]):
        link = connection.link
        self.run, self._connection = run, connection
        self._control = link.open(run)
        self.channels: dict[str, Channel] = {
            name: link.open(wire_of(run, connection.name, name), Relayed, name)
            for name in names
            if name != connection.name
        }
        self._control.on_failure(self._failed)

    def _failed(self, failure: SectorchError) -> None:
        for channel in self.channels.values():
            channel.fail(failure)

    def give_up(self, error: BaseException) -> None:
        """The others' session ends with the reason, which holds no secret."""
        self._control.abort(reason(error, f"'{self._connection.name}'"))
        self.close()

    def done(self) -> None:
        """This party has done its part."""
        try:
            self._connection.ask({"do": "done", "meeting": self.run.hex()})
        finally:
            self.close()

    def close(self) -> None:
        for channel in (*self.channels.values(), self._control):
            channel.close()


@contextmanager
def _beating(edges: list[Secured]) -> Iterator[None]:
    """Beside the block, the others hear now and then that this party is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            for edge in edges:
                with suppress(SectorchError):  # the session's own thread meets it too
                    edge.beat()

    thread = threading.Thread(target=beat, daemon=True, name="beats")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Federation:
    """This process is one party of a federation. Use as a context manager, or `close` it.

    Args:
        path: of the federation file. as_: this party's name in it.
        folder: where its certificate and keys are; that of the file unless named.
        inputs: what this party brings into programs, by name (`federated.parties.Parties`).
        patience: seconds to wait for the server. wait: seconds to wait for other parties; None for ever.

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
    ):
        self.inputs: Mapping[str, torch.Tensor] = dict(inputs or {})
        self._wait = wait
        self.file: Federated = read(path)
        self.name = as_
        own = credentials(self.file, as_, Path(path).parent if folder is None else Path(folder))
        self._called = _Called()
        self._connection = self._dialled(own, patience)

    def _dialled(self, own: Credentials, patience: float) -> Connection:
        end, told = time.monotonic() + patience, False
        while True:
            left = max(1.0, end - time.monotonic())
            try:
                return Connection(
                    self.file.server, own, on_serve=self._serve, patience=min(5.0, left), silence=SILENCE
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

    def close(self) -> None:
        """Leave; sessions that are open end at the others."""
        self._connection.close()

    @contextmanager
    def session(
        self,
        roles: Roles,
        names: Mapping[str, str] | None = None,
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
                file; the roles themselves unless given.
            label: under which they meet; two sessions of the same parties at the same time have different ones.
            agreed: what they have to agree on beside roles and names: settings, a program's digest.

        Raises:
            ArgumentError: a role that nobody plays, or this party plays none; nothing was sent.
            RefusedError: another party would do something else under this label.
            PeerLostError: somebody did not come, or was lost. AbortedError: somebody gave up.
            KeyAgreementError, IdentityError: somebody is not who the file names, or agrees on something else.
        """
        called = {role: role for role in roles.names} if names is None else dict(names)
        cast = self._cast(roles, called)
        pairs = [sorted(map(sorted, pairs)) for pairs in (roles.edges, roles.streams)]
        digest = digest_of(json.dumps({
            "federation": self.file.digest, "roles": pairs, "called": called, "cast": cast, "agreed": agreed,
            "label": label, "version": metadata.version("sectorch"),
        }, sort_keys=True))  # fmt: skip
        who = {Party(called[role], role): cast[role] for role in roles.names}
        mine = next(party for party, name in who.items() if name == self.name)
        meeting = self._meet(label, tuple(sorted(cast.values())), digest)
        try:
            edges = self._secure(meeting, who, mine, roles, digest)
            runtime = PartyRuntime(mine, meeting.run, edges)
            try:
                with _beating(list(edges.values())):
                    yield Session(roles=roles, names=called, runtime=runtime)
            finally:
                runtime.close()
        except BaseException as error:
            meeting.give_up(error)
            raise
        meeting.done()

    def present(self, party: str) -> bool:
        """Whether a party, named as in the federation file or by its role there, is this one."""
        return self.file.named(party).name == self.name

    def _cast(self, roles: Roles, called: Mapping[str, str]) -> dict[str, str]:
        """The names in the federation file of those that play the roles."""
        if roles is STAR:
            raise ArgumentError("secure inference has parties of its own: `sectorch answer` and `sectorch query`")
        if set(called) != set(roles.names):
            raise ArgumentError(f"names are one for each of {roles}; got {dict(called)}")
        cast = {role: self.file.named(name).name for role, name in called.items()}
        if len(set(cast.values())) < len(cast):
            raise ArgumentError(f"each role of {roles} is played by another party; got {cast}")
        if self.name not in cast.values():
            raise ArgumentError(f"'{self.name}' plays no role of {roles}; its parties are {cast}")
        return cast

    def _meet(self, label: str, names: tuple[str, ...], digest: bytes) -> Meeting:
        key = label, names
        self._called.expect(key)
        try:
            request = {"do": "meet", "label": label, "digest": digest.hex(), "parties": names, "time": time.time()}
            missing = self._connection.ask(request).get("missing")
            if missing:
                log.info("'%s' waits for %s", self.name, ", ".join(map(str, missing)))
            return self._called.wait(key, self._connection, self._wait)
        except BaseException:
            self._called.forget(key)
            with suppress(SectorchError):
                self._connection.link.tell({"do": "unmeet", "label": label, "parties": names})
            raise

    def _serve(self, request: dict) -> None:
        """A session begins; in the thread that reads the connection, so that no frame is missed."""
        parties = request.get("parties")
        if not isinstance(parties, list):
            raise FrameError("the server begins a session of nobody")
        key = str(request.get("label")), tuple(map(str, parties))
        if "refused" in request:
            self._called.refuse(key, readable(str(request["refused"])))
            return
        run = session_of({"session": request.get("meeting")})
        if not self._called.came(key, lambda: Meeting(self._connection, run, key[1])):
            self._connection.link.refuse(run, "PeerLostError: it does not wait any more")

    def _secure(
        self, meeting: Meeting, who: Mapping[Party, str], mine: Party, roles: Roles, digest: bytes
    ) -> dict[Party, Secured]:
        """Edges to those that this party has an edge to."""
        edges = {}
        for party, name in who.items():
            if frozenset((mine.role, party.role)) in roles.edges:
                pinned = self.file.member(name).identity
                ends = Ends(self.name, name, self._connection.identity, pinned, meeting.run, digest)
                edges[party] = Secured(meeting.channels[name], ends, self.file.largest)
        for step in (Secured.hello, Secured.prove, Secured.agree):
            for edge in edges.values():
                step(edge)
        return edges
