"""The answering party A: owns a model, answers queries in as many sessions as are opened."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn
from torch.export import ExportedProgram

from ... import files
from ...choreography.program.lockstep import BatchedCall
from ...choreography.run.frames import raw
from ...choreography.streams import derive
from ...config import MOST_AUDITED, Scheme
from ...errors import (
    ArgumentError,
    FalseDealingError,
    FrameError,
    IdentityError,
    MaterialError,
    NetworkError,
    PeerLostError,
    RefusedError,
    SessionOverError,
)
from ...mpc.star.audit import Evidence
from ...nn.dry_run import check_served
from ...serving.description import Example, describe, load_program
from ...session import A, S
from ..identity.identity import Credentials, PinnedIdentities, Pins, context, read_identity
from ..limits import Quotas
from ..log import write
from ..messages import (
    Aggregate,
    Close,
    ControlMessage,
    KeptSessions,
    MaterialReady,
    ModelQuery,
    Predict,
    Register,
    Serve,
    ToFollow,
    Void,
)
from ..names import LONGEST, name_of, readable
from ..receipts.receipts import Receipts
from ..store import Shelf, Store, fingerprint, version
from ..wire.channel import Channel, Link, copy_error
from ..wire.fair_queue import FairQueue
from .batching import AnsweringBatcher, BatchCandidate
from .client import Connection, no_identity
from .session import AnsweringParty, PartySession, ProgramCache, in_full, join_threads, reason, scheme_of

# Which questions an answering party takes, and whose it takes no more.


log = logging.getLogger("sectorch.answer")
MANY = 128
"""Questions of one client that may wait here: the server has them wait before."""


class Admission:
    """What an answering party asks of a question, and the identity keys of those who dealt falsely.

    Evidence is a file, `false-dealing-FINGERPRINT.json`, whose presence is the ban: whoever removes it lifts it. Where
    it cannot be kept, the ban ends with this process.

    Args:
        unchecked: whether questions with range_check=False are answered too.
        audited: of how many calls at least one is used (`Scheme.audited`); 1 where clients are trusted to deal.
        verified: whether clients have to prove what they deal (`Scheme.verified`); who asks so is never audited.
        folder: where evidence is kept, if it is.

    Raises:
        ArgumentError: that is no number of calls.
    """

    def __init__(
        self, unchecked: bool = False, audited: int = 1, folder: Path | None = None, verified: bool = False
    ):  # fmt: skip
        if type(audited) is not int or not 1 <= audited <= MOST_AUDITED:
            raise ArgumentError(f"audited is a whole number of calls, 1 to {MOST_AUDITED}, got {audited!r}")
        if type(verified) is not bool or (verified and audited != 1):
            raise ArgumentError(
                "verified is True or False, and covers what audited=n does but for operations without a proof: name "
                "one of the two"
            )
        self._unchecked, self._audited, self._folder, self._verified = unchecked, audited, folder, verified
        self._banned: set[str] = set()
        self._guard, self._asking = threading.Lock(), defaultdict[str, FairQueue](lambda: FairQueue(1, MANY, MANY))

    def check(self, who: str, scheme: Scheme, of: int) -> None:
        """Raise RefusedError for a question that is not taken.

        Args:
            who: this party. of: how many parties answer it.
        """
        if not (self._unchecked or scheme.range_check):
            raise RefusedError(f"'{who}' answers with range checks only: leave range_check=False out")
        if scheme.verified:
            return
        if self._verified:
            raise RefusedError(
                f"'{who}' answers those only who prove what they deal: ask with Scheme(verified=True), or --verified"
            )
        if of > 1 and max(scheme.audited, self._audited) > 1:
            raise RefusedError(f"what Q deals for several answering parties is not audited, and '{who}' is asked alone")
        if scheme.audited < self._audited:
            raise RefusedError(
                f"'{who}' answers those only whose dealing it can look at: ask with Scheme(audited={self._audited}), "
                f"or --audited {self._audited}"
            )

    @contextmanager
    def asking(self, client: str, key: str, model: str, tick: Callable[[], None]) -> Iterator[None]:
        """A question of this identity key's, and no other of its own beside it where dealing is to be audited: who
        cheats in many sessions at once is found out in one, and banned, before the next begins.

        Args:
            tick: called now and then while it waits.

        Raises:
            RefusedError: evidence is kept of what this key has dealt.
            FalseDealingError: as from the question; evidence is kept, and the key banned.
        """
        with self._guard:
            turns = self._asking[key]
        with turns.turn(key, tick) if self._audited > 1 else nullcontext():
            self.check_key(client, key)
            try:
                yield
            except FalseDealingError as error:
                if error.evidence is not None:
                    self._ban(client, key, model, error.evidence)
                raise

    def check_key(self, client: str, key: str) -> None:
        """Raise RefusedError where evidence is kept of what this identity key has dealt."""
        if key in self._banned or (self._folder is not None and self._file(key).exists()):
            raise RefusedError(
                f"'{client}' has dealt falsely before, as it has signed, and is not answered any more; the answering "
                f"party keeps the evidence"
            )

    def ended(self, error: Exception, facts: dict[str, str]) -> None:
        """A session has ended with this error: note a false dealing of which there is no evidence, and so no ban.

        S may find it out when this party has done its part of the call already.
        """
        if isinstance(error, FalseDealingError) and error.evidence is None:
            write(log, "false dealing", logging.ERROR, **facts, evidence="none that it has signed: no ban")

    def _ban(self, client: str, key: str, model: str, evidence: Evidence) -> None:
        """Answer this key no more, and keep why."""
        promise = evidence.promise
        said = {
            "client": client, "key": key, "model": model, "found_at": datetime.now(timezone.utc).isoformat(),
            "session": promise.session.hex(), "program": promise.program, "calls": list(promise.calls),
            "promised": [digest.hex() for digest in promise.digests],
            "streams": [named.hex() for named in promise.streams], "signature": promise.signature.hex(),
            "public_key": evidence.public.hex(), "call": evidence.call, "digest_of_its_streams": evidence.found.hex(),
            "stream_with_A": evidence.with_A.hex(), "stream_with_S": evidence.with_S.hex(),
        }  # fmt: skip
        kept = self._kept(key, json.dumps(said, indent=1).encode())
        facts = {"client": client, "key": key, "model": model, "call": evidence.call}
        write(log, "false dealing", logging.ERROR, **facts, evidence=kept)

    def _kept(self, key: str, said: bytes) -> str:
        """Where evidence is kept, or why not."""
        if self._folder is not None:
            try:
                files.write(self._file(key), said, 0o600)
                return str(self._file(key))
            except OSError as error:
                why = f"not kept: {error.strerror}"
        else:
            why = "not kept: no --store"
        self._banned.add(key)
        return why

    def _file(self, key: str) -> Path:
        folder = self._folder or Path()
        return folder / f"false-dealing-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


# At an answering party: the models that it has, by name, each as it is now and as older sessions know it.


RESTING = 2.0
"""Seconds without a call after which a session of an older version is ended."""


@dataclass(eq=False)
class ModelOffer:
    """A model under a name, as it was given.

    Attributes:
        name: PARTY or PARTY/MODEL. edition: this party's name for the weights.
        made: when it was given, in microseconds; the latest version is the one that answers.
        over: whether another one has taken its place.
    """

    name: str
    description: dict
    weights: dict[str, torch.Tensor] = field(repr=False)
    edition: str
    made: int
    programs: ProgramCache = field(default_factory=ProgramCache, repr=False)
    over: bool = False

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.description)

    @property
    def version(self) -> str:
        return version(self.description, self.edition)


class ModelOffers:
    """The models of one answering party, and the sessions in which they are asked.

    Args:
        party: its name. identity: its long-term key, from which its names for weights come: they are the same at all
            processes of the party, and say nothing about the weights to others.
        imprecise: whether models that lose digits in fixed point are offered, with a warning.
    """

    def __init__(self, party: str, identity: Ed25519PrivateKey, imprecise: bool = False):
        self._party, self._key, self._imprecise = party, identity.private_bytes_raw(), imprecise
        self._lock = threading.Lock()
        self._offers: dict[str, list[ModelOffer]] = {}
        self._asked: dict[Channel, tuple[ModelOffer, float | None]] = {}

    def give(self, model: str, description: dict, weights: dict[str, torch.Tensor]) -> ModelOffer | None:
        """From now on this is the model; None if it was so already. What it takes the place of stays until `retire`.

        Args:
            model: its name after the party's; empty for the party's own.

        Raises:
            ProgramError: it is no description, or the weights do not fit it. Nothing changes.
            PrecisionError: it loses digits in fixed point. Nothing changes.

        Warns:
            PrecisionWarning: it does, and such models are offered.
        """
        served, name = load_program(description, weights), f"{self._party}/{model}" if model else self._party
        check_served(served, name, self._imprecise)
        edition = derive(self._key, _digest(weights), "edition", 16).hex()
        new = ModelOffer(name, description, weights, edition, _now())
        with self._lock:
            held = self._offers.setdefault(new.name, [])
            if held and held[-1].version == new.version:
                return None
            held.append(new)
        return new

    def retire(self) -> None:
        """End the sessions of models whose place others have taken, as soon as they have no running call."""
        with self._lock:
            for held in self._offers.values():
                for offer in held[:-1]:
                    offer.over = True
                del held[:-1]
        threading.Thread(target=self._part, daemon=True, name="retiring").start()

    def _part(self) -> None:
        """A session has ended its call some time after this party has done its part: the server goes on with it."""
        while True:
            with self._lock:
                left = [(channel, *asked) for channel, asked in self._asked.items() if asked[0].over]
            for channel, offer, since in left:
                if since is not None and time.monotonic() - since > RESTING:
                    channel.fail(_over(offer))
                    self.end(channel)
            if not left:
                return
            time.sleep(RESTING / 4)

    def all(self) -> list[ModelOffer]:
        """As they are now."""
        with self._lock:
            return [held[-1] for held in self._offers.values()]

    def find(self, name: object, edition: object) -> ModelOffer:
        """The model that a session is opened with.

        Raises:
            SessionOverError: another version has taken its place, or there is none of that name.
        """
        with self._lock:
            found = next((o for o in self._offers.get(str(name), []) if o.edition == edition), None)
        if found is None:
            raise SessionOverError(f"'{self._party}' has another version now; ask again")
        return found

    def begin(self, channel: Channel, offer: ModelOffer) -> None:
        """A call of a session begins.

        Raises:
            SessionOverError: another version has taken the model's place; nothing of the call was done.
        """
        with self._lock:
            if offer.over:
                raise _over(offer)
            self._asked[channel] = offer, None

    def rest(self, channel: Channel, offer: ModelOffer) -> None:
        """A session has no call now."""
        with self._lock:
            self._asked[channel] = offer, time.monotonic()

    def end(self, channel: Channel) -> None:
        """A session has ended."""
        with self._lock:
            self._asked.pop(channel, None)


def _over(offer: ModelOffer) -> SessionOverError:
    return SessionOverError(f"'{offer.name}' has another version now; asking again opens a session with that one")


def _now() -> int:
    return time.time_ns() // 1000


def _digest(weights: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(raw(value))
    return digest.digest()


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
        self._offers = ModelOffers(credentials.name, read_identity(credentials.identity), imprecise)
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
        self._turns = FairQueue(SESSIONS, SESSIONS, SESSIONS)  # all run at once here: the server has them wait
        self._connection: Connection | None = None
        self._joint = AnsweringBatcher()
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

    def _registered(self, offer: ModelOffer) -> set[str]:
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
        join_threads(self._threads)

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
        raise copy_error(self.connection.link.closed or PeerLostError("the connection ended"))

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

    def _joins(self, party: PartySession, asked: ModelQuery) -> Callable[[BatchedCall], None] | None:
        """How a call is taken that S takes with others; None of any other."""
        if not isinstance(asked, Predict) or asked.joint is None or party.joinable(asked) is None:
            return None
        joint, calls = asked.joint, asked.calls
        return lambda taking: self._joint.take(BatchCandidate(taking), joint, calls)

    def _party(self, session: bytes, channel: Channel, request: Serve, offer: ModelOffer) -> PartySession:
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
            channel.tell(MaterialReady(calls=list(shelf.calls())))
        model = {"model": offer.name, "version": offer.version}
        return PartySession(
            A, session, {S: channel}, [AnsweringParty(offer.description, identities, offer.weights)], scheme,
            lambda: self.store.shelf(session, binding()), place=place, of=of, fresh=resume is None,
            facts=lambda: {**who(), **model}, receipts=self._receipts, known=offer.programs,
        )  # fmt: skip


# Answering with a module of this process's own, in one call.


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
    limits: str | Path | None = None,
    replica: bool = False,
    audited: int = 1,
    verified: bool = False,
    imprecise: bool = False,
) -> Answering:
    """Answer queries with `model`.

    Args:
        model: in evaluation mode: whatever `sectorch.secure` takes, or what torch.export made of it.
        inputs: what it is called with; see `save_model`.
        name: the certificate's common name, which is the default.
        pins, store, unchecked, receipts, limits, replica, audited, verified, imprecise: see `Answering`.
        patience: seconds without a word after which a party counts as hanging; 60 unless named.

    Raises:
        SectorchError: what `secure` raises for such a call. ProgramError: it cannot be described.
        PrecisionError: it loses digits in fixed point.
        ArgumentError: what is no name. IdentityError: the name or the certificate is refused.
        ReceiptError: see `Answering`.
    """
    name = name_of(name or credentials.name, "an answering party's name")  # before a recording, which takes its time
    description, weights = describe(model, inputs)
    running = Answering(
        address,
        credentials,
        description,
        weights,
        pins,
        store,
        patience,
        unchecked,
        receipts,
        limits,
        replica=replica,
        audited=audited,
        verified=verified,
        imprecise=imprecise,
    )
    try:
        running.register(name)
    except BaseException:
        running.close()
        raise
    return running
