"""S's side of one session, to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...choreography import Party
from ...choreography.program.part import part_of
from ...choreography.program.together import Taking
from ...errors import FalseDealingError, MaterialError, NetworkError, PeerLostError, SessionOverError
from ...mpc.star.seed import Identities
from ...session import Q, S
from ...tensor import Scheme
from ..limits.quotas import Quotas
from ..log import write
from ..messages import AllStored, Close, ModelQuery, Open, Ready, Stored, ToFollow
from ..receipts.receipts import Receipts
from ..store.store import Store, fingerprint, version
from ..wire.channel import Channel
from ..wire.turns import Turns
from .joint import Gathering, Joining
from .known import Known
from .remote import Part
from .said import in_full, reason
from .session import PartySession

log = logging.getLogger("sectorch.server")
BEAT = 5.0
IDLE = 600.0
"""Seconds without a call after which a session ends: it holds memory, and a place among those of its client."""


@dataclass
class Model:
    """What an answering party said of its model.

    Attributes:
        edition: its name for the weights. keeper: for a replica, the name of its store.
    """

    description: dict
    edition: str
    keeper: str


@dataclass
class Told:
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
    models: Sequence[Model]
    scheme: Scheme
    request: Open

    @property
    def facts(self) -> dict[str, str]:
        """For the log's line of each query."""
        versions = ",".join(version(model.description, model.edition) for model in self.models)
        names = ",".join(self.names)
        return {"client": self.client, "certificate": self.certificate, "model": names, "version": versions}


def binding(client: str, name: str, model: Model, scheme: Scheme) -> dict:
    """Whose material it is."""
    return {
        "client": client, "model": name, "fingerprint": fingerprint(model.description), "edition": model.edition,
        "scheme": repr(scheme), **({"keeper": model.keeper} if model.keeper else {}),
    }  # fmt: skip


class Serving:
    """The sessions of one process of S's.

    Args:
        turns: of the calls. store: of prepared material. receipts, quotas: if any are kept.
        others: whether all models of a session can be asked over other connections than those that were lost.
        idle: seconds without a call after which a session ends.
    """

    def __init__(
        self, turns: Turns, store: Store, receipts: Receipts | None, quotas: Quotas | None = None,
        others: Callable[[list[str], list[Any]], bool] = lambda names, lost: False, idle: float = IDLE,
    ):  # fmt: skip
        self._others, self._idle = others, idle
        self._turns, self._store, self._receipts, self._quotas = turns, store, receipts, quotas
        self._known, self._gathering = Known(), Gathering(turns)

    def serve(self, told: Told, channels: dict[Party, Channel]) -> None:
        """One session."""
        request, session = told.request, told.session
        fresh, said, party = request.resume is None, "that session is over", None
        try:
            identities = Identities({"Q": told.client, "A": ""})
            bound, facts = binding(told.client, told.names[0], told.models[0], told.scheme), told.facts
            party = PartySession(
                S, session, channels, [Part(model.description, identities) for model in told.models], told.scheme,
                lambda: self._store.shelf(session, bound), of=len(told.models), fresh=fresh, alive=beats(channels),
                facts=lambda: facts, receipts=self._receipts, known=self._known,
            )  # fmt: skip
            if not fresh:
                self._ready(session, channels)
            while not isinstance(asked := self._next(told, party, channels[Q]), Close):
                with self._charged(told, party, channels, asked):
                    self._ask(party, told.client, channels, asked)
            for channel in answering(channels):
                channel.tell(asked)
        except Exception as error:
            lost = [channel.link for channel in answering(channels) if channel.link.closed is not None]
            if lost and isinstance(error, NetworkError) and self._others(told.names, lost):
                error = SessionOverError(f"{error}; others answer as well, and asking again asks one of them")
            if isinstance(error, FalseDealingError):
                write(log, "false dealing", logging.ERROR, **told.facts)
            said = reason(error, "the server")
            write(log, "session ended", client=told.client, why=in_full(error))
            log.debug("in detail", exc_info=error)
        finally:
            part(channels, said)
            if party is not None:
                party.close()
            if not request.lasting:
                self._store.forget(session)

    def _next(self, told: Told, party: PartySession, channel: Channel) -> ModelQuery | Close:
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
            for channel in answering(channels):
                channel.tell(replace(asked, joint=joint, calls=calls))

        def join(taking: Taking) -> None:
            taking.receive()
            self._gathering.take(Joining(taking, begin), client, channels[Q].beat)

        try:
            party.follow(asked, join, {Q: room})
        finally:
            self._gathering.leave(room)

    def _call(self, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery) -> None:
        for channel in answering(channels):
            channel.tell(asked)
        stored = party.follow(asked)
        if stored is not None:
            theirs = [channel.request(Stored, channel.deadline.silence) for channel in answering(channels)]
            channels[Q].tell(AllStored(more=min(each.room // max(1, each.bytes) for each in (stored, *theirs))))

    def _charged(
        self, told: Told, party: PartySession, channels: dict[Party, Channel], asked: ModelQuery
    ) -> AbstractContextManager[None]:
        """What is asked is charged, before the answering parties hear of it."""
        if self._quotas is None:
            return nullcontext()
        rows = party.asked(asked).rows
        return self._quotas.query(asked, rows, told.client, "", told.names, [channels[Q]], answering(channels))

    def _ready(self, session: bytes, channels: dict[Party, Channel]) -> None:
        """Whether the answering party still has its half of the material."""
        try:
            shelf = self._store.shelf(session)
            for channel in answering(channels):
                shelf.keep(channel.request(Ready, channel.deadline.silence).calls)
        except MaterialError:
            self._store.forget(session)
            raise
        channels[Q].tell(Ready(calls=list(shelf.calls())))


def answering(channels: dict[Party, Channel]) -> list[Channel]:
    """The channels to answering parties."""
    return [channel for party, channel in channels.items() if party.role == "A"]


def part(channels: dict[Party, Channel], said: str) -> None:
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
