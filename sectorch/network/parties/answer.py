"""The answering party A: owns a model, answers queries in as many sessions as are opened."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from ...choreography.program.together import Taking
from ...errors import (
    ArgumentError,
    FrameError,
    IdentityError,
    MaterialError,
    NetworkError,
    PeerLostError,
)
from ...session import A, S
from ..identity.certificates import Credentials
from ..identity.identity import PinnedIdentities, Pins, context, read_identity
from ..limits.quotas import Quotas
from ..log import write
from ..messages import (
    Aggregate,
    Close,
    ControlMessage,
    KeptSessions,
    ModelQuery,
    Predict,
    Ready,
    Register,
    Serve,
    ToFollow,
    Void,
)
from ..names import LONGEST, name_of, readable
from ..receipts.receipts import Receipts
from ..store.shelf import Shelf
from ..store.store import Store
from ..wire.channel import Channel, again
from ..wire.link import Link
from ..wire.turns import Turns
from .admission import Admission
from .client import Connection, no_identity
from .joint import Joining, Joint
from .offers import Offer, Offers
from .remote import Part
from .said import in_full, join, reason, scheme_of
from .session import PartySession

log = logging.getLogger("sectorch.answer")
SESSIONS = 128


class Answering:
    """A running answering party; `close` ends it.

    Args:
        pins: the clients that are known; the file in the user's settings unless given.
        store: where prepared material is kept; a temporary one unless given.
        unchecked, audited, verified: as of `Admission`, which keeps evidence in a lasting store's folder.
        receipts: a file in which each query is signed for before it is answered.
        limits: a file of what each client may ask (`limits.file`).
        model: the name of this model after the party's own and a slash; without it, it has the party's own. Others are
            added by `offer`.
        replica: whether others of this party answer as well, each with a store of its own.
        imprecise: whether models that lose digits in fixed point are answered with, too (`PrecisionWarning`).

    Raises:
        PrecisionError: the model loses digits, by the look at its precision that `secure` has.
        ArgumentError: that is no file of limits. QuotaFileError: what is used of them cannot be kept.
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
        limits: str | Path | None = None,
        *,
        model: str = "",
        replica: bool = False,
        audited: int = 1,
        verified: bool = False,
        imprecise: bool = False,
    ):
        if credentials.identity is None:
            raise no_identity(credentials.name)
        self._offers = Offers(credentials.name, read_identity(credentials.identity), imprecise)
        self._offers.give(model, description, weights)
        self._address, self._credentials, self._patience = address, credentials, patience
        self._worker, self._label = 0, ""
        self._everywhere = [self]
        self._pins = pins or Pins()
        self.store = store or Store()
        self._admission = Admission(unchecked, audited, self.store.folder if self.store.lasting else None, verified)
        self.store.evicted = self._evicted
        if replica and not self.store.lasting:
            raise ArgumentError("a replica has a store of its own (--store FOLDER), by which the server knows it again")
        self._keeper = self.store.name if replica else ""
        self._threads: list[threading.Thread] = []
        self._turns = Turns(SESSIONS, SESSIONS, SESSIONS)  # all run at once here: the server has them wait
        self._connection: Connection | None = None
        self._joint = Joint()
        self._known: Link | None = None
        self.answered = 0
        self._receipts = None if receipts is None else Receipts(receipts, credentials, "A")
        try:
            self._quotas = None if limits is None else Quotas(limits, credentials.name, "A")
        except BaseException:
            self._keep_no_more()
            raise

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
        if name_of(name, "an answering party's name") != self._credentials.name:
            own = self._credentials.name
            raise IdentityError(f"the certificate is for '{own}' and cannot answer as '{name}'; --name says '{own}'")
        if self._connection is None or self._connection.link.closed is not None:
            self._hang_up()
            self._connection = Connection(
                self._address, self._credentials, on_serve=self._serve, silence=self._patience, pins=self._pins,
                worker=self._worker,
            )  # fmt: skip
        offers, there = self._offers.all(), set()
        for offer in offers:
            there |= self._registered(offer)
        self._known, self._label = self.connection.link, self.connection.place.label
        editions = {offer.edition for offer in offers}
        for shelf in self.store.shelves(replica=self._label) if self._label else self.store.shelves():
            if shelf.session.hex() not in there or shelf.binding.get("edition") not in editions:
                shelf.drop()

    def _registered(self, offer: Offer) -> set[str]:
        """Tell the server of a model; the sessions of which it has material."""
        request = Register(
            name=offer.name, description=offer.description, edition=offer.edition, keeper=self._keeper, made=offer.made
        )
        return set(self.connection.ask(request, KeptSessions).sessions)

    def offer(self, description: dict, weights: dict[str, torch.Tensor], model: str = "") -> bool:
        """Answer with this model from now on, in place of the one of that name, if there is one; whether it is another.

        The server knows it before sessions of the one before end, which is when their running calls have.

        Args:
            model: its name after this party's and a slash; empty for the party's own.

        Raises:
            ProgramError, PrecisionError: it is no description, or loses digits; the one before goes on.
        """
        if model:
            name_of(model, "a model's name")
        now = self._offers.give(model, description, weights)
        if now is None:
            return False
        try:
            for one in self._everywhere:
                if not one.unready():  # else the server hears of it when this party dials again
                    one._registered(now)
        finally:
            self._offers.retire()
        write(log, "offers", model=now.name, version=now.version)
        return True

    def reload(self) -> None:
        """Read the limits anew."""
        if self._quotas is not None:
            self._quotas.reload()

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

    def _evicted(self, shelf: Shelf) -> None:
        """The server drops its half of what had to go here; Q hears of it when it comes back for it."""
        for one in self._everywhere:
            with suppress(NetworkError):
                one.connection.link.tell(Void(sessions=[shelf.session.hex()]))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        self.leave()
        self.store.close()
        if self._quotas is not None:
            self._quotas.close()
        self._keep_no_more()

    def _keep_no_more(self) -> None:
        if self._receipts is not None:
            self._receipts.close()

    def wait(self) -> None:
        """Until the connection ends.

        Raises:
            PeerLostError: the server is gone.
        """
        self.connection.ended.wait()
        raise again(self.connection.link.closed or PeerLostError("the connection ended"))

    def _serve(self, request: ControlMessage) -> None:
        """Open this party's end at once, so that no frame is missed, and run the session beside."""
        if isinstance(request, Void):
            for shelf in self.store.shelves():
                if shelf.session.hex() in request.sessions:
                    shelf.drop()
        if not isinstance(request, Serve):
            return
        channel = self.connection.link.open(bytes.fromhex(request.session))
        full = self.connection.link.sessions > SESSIONS
        if full or self._turns.closed:
            many = "this answering party has as many sessions as it takes on; ask again later"
            channel.abort(f"BusyError: {many if full else self._turns.closed}")
            channel.close()
            return
        thread = threading.Thread(target=self._session, args=(channel, request), daemon=True, name="answering")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _session(self, channel: Channel, request: Serve) -> None:
        said, session, party = "that session is over", channel.session, None
        try:
            if request.resume is not None:
                session = bytes.fromhex(request.resume)
            offer = self._offers.find(request.model, request.edition)
            self._offers.rest(channel, offer)
            party = self._party(session, channel, request, offer)
            self._admission.check_key(party.who["client"], party.who["key"])
            if self._quotas is not None:
                who = party.who
                self._quotas.session(who["client"], who["key"], [who["model"]])
            while not isinstance(asked := channel.request(ToFollow), Close):
                self._offers.begin(channel, offer)
                join = self._joins(party, asked)
                with self._turns.turn(request.client, channel.beat):
                    who = party.who["client"], party.who["key"], party.who["model"]
                    with self._admission.asking(*who, channel.beat), self._charged(party, channel, asked):
                        stored = party.follow(asked, join)
                if stored is not None:
                    channel.tell(stored)
                self.answered += isinstance(asked, Predict | Aggregate)
                self._offers.rest(channel, offer)
        except Exception as error:
            said = reason(error, f"'{self.connection.name}'")
            if party is not None:
                self._admission.ended(error, party.who)
            # Whom the pins refuse, and the command that pins it, is for this party's own user.
            own = error if isinstance(error, IdentityError) else in_full(error)
            write(log, "session ended", client=readable(request.client, LONGEST), why=own)
            if not isinstance(error, NetworkError):
                log.debug("in detail", exc_info=error)
        finally:
            self._offers.end(channel)
            channel.close()
            channel.abort(said)
            if party is not None:
                party.close()
            if not request.lasting:
                self.store.forget(session)

    def _charged(self, party: PartySession, channel: Channel, asked: ModelQuery) -> AbstractContextManager[None]:
        if self._quotas is None:
            return nullcontext()
        rows, who = party.asked(asked).rows, party.who
        return self._quotas.query(asked, rows, who["client"], who["key"], [who["model"]], [channel], [channel])

    def _joins(self, party: PartySession, asked: ModelQuery) -> Callable[[Taking], None] | None:
        """How a call is taken that S takes with others; None of any other."""
        if not isinstance(asked, Predict) or asked.joint is None or party.joinable(asked) is None:
            return None
        joint, calls = asked.joint, asked.calls
        return lambda taking: self._joint.take(Joining(taking), joint, calls)

    def _party(self, session: bytes, channel: Channel, request: Serve, offer: Offer) -> PartySession:
        client = name_of(request.client, "the name of a client that the server relays", FrameError)
        scheme, place, of, resume = scheme_of(request.scheme), request.place, request.of, request.resume
        if not place < of:
            raise MaterialError("a place among the answering parties that does not exist")
        self._admission.check(self.connection.name, scheme, of)
        names = {"Q": client, "A": offer.name}
        agreed = context(offer.description, offer.edition, scheme, place, of)
        identities = PinnedIdentities(names, self.connection.identity, agreed, self._pins)
        who = lambda: {"client": client, "key": identities.proved}
        label = {"replica": self._label} if self._label else {}
        binding = lambda: {
            **who(), "fingerprint": offer.fingerprint, "edition": offer.edition, "scheme": repr(scheme), **label,
        }  # fmt: skip
        if resume is not None:
            identities.proved = self._pins.known().get(client, "")  # that key has dealt what is here, or it is void
            self.store.shelf(session, None)
            shelf = self.store.shelf(session, binding())
            shelf.keep(request.calls)
            channel.tell(Ready(calls=list(shelf.calls())))
        model = {"model": offer.name, "version": offer.version}
        return PartySession(
            A, session, {S: channel}, [Part(offer.description, identities, offer.weights)], scheme,
            lambda: self.store.shelf(session, binding()), place=place, of=of, fresh=resume is None,
            facts=lambda: {**who(), **model}, receipts=self._receipts, known=offer.programs,
        )  # fmt: skip
