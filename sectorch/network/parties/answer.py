"""The answering party A: owns a model, answers queries in as many sessions as are opened."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from ...choreography.program.together import Taking
from ...choreography.run.frames import raw
from ...errors import (
    FrameError,
    IdentityError,
    MaterialError,
    NetworkError,
    PeerLostError,
    RefusedError,
)
from ...nn.describe import Example, describe
from ...nn.program import load_program
from ...session import A, S
from ..identity.certificates import Credentials
from ..identity.identity import PinnedIdentities, Pins, context
from ..log import write
from ..names import LONGEST, name_of, readable
from ..receipts.receipts import Receipts
from ..store.store import Store, fingerprint, version
from ..wire.channel import Channel, again
from ..wire.link import Link
from ..wire.turns import Turns
from .client import Connection
from .joint import Joining, Joint
from .known import Known
from .remote import Part
from .said import in_full, join, reason, scheme_of, session_of
from .session import PartySession

log = logging.getLogger("sectorch.answer")
SESSIONS = 128


class Answering:
    """A running answering party; `close` ends it.

    Args:
        pins: the clients that are known; the file in the user's settings unless given.
        store: where prepared material is kept; a temporary one unless given.
        unchecked: whether questions with range_check=False are answered too.
        receipts: a file in which each query is signed for before it is answered.

    Raises:
        ReceiptError, ReceiptsInUseError, IdentityError: receipts cannot be written there, or not signed.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        description: dict,
        weights: dict[str, torch.Tensor],
        pins: Pins | None = None,
        store: Store | None = None,
        patience: float | None = None,
        unchecked: bool = False,
        receipts: str | Path | None = None,
    ):
        load_program(description, weights)
        self._address, self._credentials, self._patience = address, credentials, patience
        self._worker, self._label = 0, ""
        self._everywhere = [self]
        self._description, self._weights = description, weights
        self._pins = pins or Pins()
        self._unchecked = unchecked
        self.store = store or Store()
        self._edition = self.store.edition(_digest(weights))
        self._fingerprint = fingerprint(description)
        self._threads: list[threading.Thread] = []
        self._turns = Turns(SESSIONS, SESSIONS, SESSIONS)  # all run at once here: the server has them wait
        self._connection: Connection | None = None
        self._programs, self._joint = Known(), Joint()
        self._known: Link | None = None
        self.answered = 0
        self._receipts = None if receipts is None else Receipts(receipts, credentials, "A")

    @property
    def connection(self) -> Connection:
        """To the server; it may have ended since.

        Raises:
            PeerLostError: there was none yet.
        """
        if self._connection is None:
            raise PeerLostError("this answering party has not registered with the server yet")
        return self._connection

    def register(self, name: str) -> None:
        """Be known to the server under `name`, which the certificate must carry; dials where there is no connection.

        Raises:
            ArgumentError: what is no name; nothing was sent. BusyError: another connection answers under it.
            PeerLostError: the server is not there. IdentityError: a certificate was refused.
        """
        name_of(name, "an answering party's name")
        if self._connection is None or self._connection.link.closed is not None:
            self._hang_up()
            self._connection = Connection(
                self._address, self._credentials, on_serve=self._serve, silence=self._patience, pins=self._pins,
                worker=self._worker,
            )  # fmt: skip
        request = {"do": "register", "name": name, "description": self._description, "edition": self._edition}
        there = set(self.connection.ask(request)["sessions"])
        self._known, self._label = self.connection.link, self.connection.place.label
        for shelf in self.store.shelves(replica=self._label) if self._label else self.store.shelves():
            if shelf.session.hex() not in there or shelf.binding.get("edition") != self._edition:
                shelf.drop()

    def beside(self, address: str, worker: int) -> Answering:
        """The same party at another server, or at another of its workers: what it has is in common.

        Args:
            address: of the server. worker: which of those behind that address.
        """
        other = copy.copy(self)
        other._address, other._worker, other._label = address, worker, ""
        other._connection, other._known, other._threads = None, None, []
        self._everywhere.append(other)
        return other

    def leave(self) -> None:
        """End the connection, and the sessions over it; what is in common with others stays."""
        self._hang_up()
        join(self._threads)

    def drain(self, seconds: float) -> bool:
        """Begin no more calls and sessions; whether those that run were done in that time."""
        why = f"'{self._credentials.name}' is stopping; ask again when it is back"
        return self._turns.drain(why, seconds)

    def renew(self, credentials: Credentials) -> None:
        """From now on, this party dials with these; the connection that there is goes on."""
        for one in self._everywhere:
            one._credentials = credentials

    def unready(self) -> str:
        """Why nothing is answered now; empty while this party is registered with its server."""
        there = self._known is not None and self._known.closed is None
        return self._turns.closed or ("" if there else "not registered with the server")

    def figures(self) -> dict[str, float]:
        """What there is at this moment, by the names of `observe.metrics.GAUGES`."""
        link = self._known
        there = link is not None and link.closed is None
        sessions = link.sessions if there and link is not None else 0
        return {"sessions": sessions, "connections": there, **self._turns.figures(), **self.store.figures()}

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        self.leave()
        self.store.close()
        if self._receipts is not None:
            self._receipts.close()

    def wait(self) -> None:
        """Until the connection ends.

        Raises:
            PeerLostError: the server is gone.
        """
        self.connection.ended.wait()
        raise again(self.connection.link.closed or PeerLostError("the connection ended"))

    def _serve(self, request: dict) -> None:
        """Open this party's end at once, so that no frame is missed, and run the session beside."""
        channel = self.connection.link.open(session_of(request))
        full = self.connection.link.sessions > SESSIONS
        if full or self._turns.closed:
            many = "this answering party has as many sessions as it takes on; ask again later"
            channel.abort(f"BusyError: {many if full else self._turns.closed}")
            channel.close()
            return
        thread = threading.Thread(target=self._session, args=(channel, request), daemon=True, name="answering")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _session(self, channel: Channel, request: dict) -> None:
        said, session, party = "that session is over", channel.session, None
        try:
            if request.get("resume") is not None:
                session = session_of({"session": request["resume"]})
            party = self._party(session, channel, request)
            while (asked := channel.request()).get("do") != "close":
                join = self._joins(party, asked)
                with self._turns.turn(str(request.get("for")), channel.beat):
                    stored = party.follow(asked, join)
                if stored is not None:
                    channel.tell(stored)
                self.answered += asked.get("do") in ("predict", "aggregate")
        except Exception as error:
            said = reason(error, f"'{self.connection.name}'")
            # Whom the pins refuse, and the command that pins it, is for this party's own user.
            own = error if isinstance(error, IdentityError) else in_full(error)
            write(log, "session ended", client=readable(str(request.get("for")), LONGEST), why=own)
            if not isinstance(error, NetworkError):
                log.debug("in detail", exc_info=error)
        finally:
            channel.close()
            channel.abort(said)
            if party is not None:
                party.close()
            if not request.get("lasting"):
                self.store.forget(session)

    def _joins(self, party: PartySession, asked: dict) -> Callable[[Taking], None] | None:
        """How a call is taken that S takes with others; None of any other."""
        if asked.get("joint") is None or party.joinable(asked) is None:
            return None
        return lambda taking: self._joint.take(Joining(taking), asked)

    def _party(self, session: bytes, channel: Channel, request: dict) -> PartySession:
        client, scheme = _client(request), scheme_of(request)
        place, of, resume = request.get("place", 0), request.get("of", 1), request.get("resume")
        if type(place) is not int or type(of) is not int or not 0 <= place < of:
            raise MaterialError("a place among the answering parties that does not exist")
        if not (self._unchecked or scheme.range_check):
            raise RefusedError(f"'{self.connection.name}' answers with range checks only: leave range_check=False out")
        names = {"Q": client, "A": self.connection.name}
        agreed = context(self._description, self._edition, scheme, place, of)
        identities = PinnedIdentities(names, self.connection.identity, agreed, self._pins)
        who = lambda: {"client": client, "key": identities.proved}
        label = {"replica": self._label} if self._label else {}
        binding = lambda: {
            **who(), "fingerprint": self._fingerprint, "edition": self._edition, "scheme": repr(scheme), **label,
        }  # fmt: skip
        if resume is not None:
            identities.proved = self._pins.known().get(client, "")  # that key has dealt what is here, or it is void
            self.store.shelf(session, None)
            self.store.shelf(session, binding()).keep(request.get("calls"))
            channel.tell({"do": "ready"})
        model = {"model": self.connection.name, "version": version(self._description, self._edition)}
        return PartySession(
            A, session, {S: channel}, [Part(self._description, identities, self._weights)], scheme,
            lambda: self.store.shelf(session, binding()), place=place, of=of, fresh=resume is None,
            facts=lambda: {**who(), **model}, receipts=self._receipts, known=self._programs,
        )  # fmt: skip


def _client(request: dict) -> str:
    return name_of(request.get("for"), "the name of a client that the server relays", FrameError)


def _digest(weights: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(raw(value))
    return digest.digest()


def answer(
    address: str,
    credentials: Credentials,
    model: nn.Module | ExportedProgram,
    inputs: Example | Sequence[Example],
    name: str | None = None,
    *,
    pins: Pins | None = None,
    store: Store | None = None,
    patience: float | None = None,
    unchecked: bool = False,
    receipts: str | Path | None = None,
) -> Answering:
    """Answer queries with `model`.

    Args:
        model: in evaluation mode: whatever `sectorch.secure` takes, or what torch.export made of it.
        inputs: what it is called with; see `save_model`.
        name: the certificate's common name, which is the default.
        pins, store, unchecked, receipts: see `Answering`.
        patience: seconds without a word after which a party counts as hanging; 60 unless named.

    Raises:
        SectorchError: what `secure` raises for such a call. ProgramError: it cannot be described.
        ArgumentError: what is no name. IdentityError: the name or the certificate is refused.
        ReceiptError: see `Answering`.
    """
    name = name_of(name or credentials.name, "an answering party's name")  # before a recording, which takes its time
    description, weights = describe(model, inputs)
    running = Answering(address, credentials, description, weights, pins, store, patience, unchecked, receipts)
    try:
        running.register(name)
    except BaseException:
        running.close()
        raise
    return running
