"""The answering party A: which models it offers, whose queries it admits, and how it answers them.

`Admission` decides which queries are answered and bans clients that dealt falsely. `ModelOffers` holds the current
version of each model. `Answering` connects to the server and runs one thread for each session. `answer` starts all of
that for a module in this process.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn
from torch.export import ExportedProgram

from ... import files
from ...choreography.program.lockstep import BatchedCall
from ...config import MOST_AUDITED, Scheme
from ...decoys import DecoyCheck, Statements
from ...deprecation import renamed_attribute
from ...errors import (
    ArgumentError,
    DecoyError,
    FalseDealingError,
    FalseServerError,
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
from ..identity.commitment import commitment_to, sign_version
from ..identity.identity import Credentials, PinnedIdentities, Pins, ServerKey, context, read_identity
from ..identity.identity import fingerprint as fingerprint_of_key
from ..limits import Charge, Quotas, records_unready
from ..log import write
from ..memory import MemoryBound
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
from ..model_audit import write_record
from ..names import LONGEST, account_of, name_of, readable
from ..receipts import Receipts
from ..server_evidence import write_evidence
from ..store import MaterialBinding, Shelf, Store, fingerprint, version
from ..wire.channel import Channel, PeerLink, copy_error
from ..wire.fair_queue import FairQueue
from .batching import AnsweringBatcher, BatchCandidate
from .client import Connection, no_identity
from .session import (
    AnsweringParty,
    PartySession,
    ProgramCache,
    abort_reason,
    join_threads,
    log_text,
    scheme_from_message,
)

log = logging.getLogger("sectorch.answer")
MAX_WAITING = 128
"""Queries of one client that may wait here. The server's own limit is lower."""


MAX_CHECKS = 16
"""Decoys that wait to be checked; beyond, a session waits for its own."""


class ServerAuditor:
    """Checks the server's part of decoys, in a thread of its own, and keeps evidence if it is found out.

    From then on this party answers nothing over that server. The evidence is a file, `false-server-….evidence`;
    removing it lifts that. Where it cannot be written, that ends with this process.

    Args:
        key: the fingerprint of the server's identity key; empty takes the key that a session's server shows.
        folder: where evidence is written; None writes none.
        memory: the process's bound on memory, in which a decoy counts until it is checked.
        records: a folder in which each decoy that was found right is kept for an auditor (`sectorch check-model`).

    Raises:
        ArgumentError: the key is no fingerprint, or there is no such folder.
    """

    def __init__(
        self, key: str = "", folder: Path | None = None, memory: MemoryBound | None = None,
        records: Path | None = None,
    ):  # fmt: skip
        if records is not None and not records.is_dir():
            raise ArgumentError(f"there is no folder {records} to keep decoys in: make it, for its owner alone")
        self._memory, self._records = memory or MemoryBound(), records
        self._key, self._folder, self._found = ServerKey(key), folder, False
        self._checks: queue.Queue[tuple[DecoyCheck, ModelOffer, Scheme, dict[str, str]] | None] = queue.Queue(
            MAX_CHECKS
        )
        self._thread = threading.Thread(target=self._work, daemon=True, name="checking decoys")
        self._thread.start()

    def attach(self, statements: Statements, offer: ModelOffer, scheme: Scheme, facts: Callable[[], dict]) -> None:
        """Check the decoys of a session."""
        statements.trust = self._key.trust
        statements.check = lambda check: self._add(check, offer, scheme, facts())

    def _add(self, check: DecoyCheck, offer: ModelOffer, scheme: Scheme, facts: dict[str, str]) -> None:
        self._memory.take_over(check.bytes)  # of the call, which still runs
        self._checks.put((check, offer, scheme, facts))

    def refuse(self, who: str) -> None:
        """Raise RefusedError once the server was found out."""
        if self._found or (self._folder is not None and any(self._folder.glob("false-server-*.evidence"))):
            raise RefusedError(
                f"the server has computed something else than its program, as it has signed, and {who} answers "
                f"nothing over it any more; it keeps the evidence"
            )

    def close(self) -> None:
        """End the thread, after the checks that wait."""
        self._checks.put(None)
        self._thread.join(CHECKING)

    def _work(self) -> None:
        while (work := self._checks.get()) is not None:
            check, offer, scheme, facts = work
            try:
                check.note()
                self._write_log(check, offer, scheme, facts)
            except Exception:  # a full disk, or a fault of this package: the next decoy is checked all the same
                log.exception("the check of a decoy failed")
            finally:
                self._memory.release(check.bytes)
                del check, work

    def _write_log(self, check: DecoyCheck, offer: ModelOffer, scheme: Scheme, facts: dict[str, str]) -> None:
        found, said = check.statements.found, {**facts, "call": check.statement.call}
        if found is None:
            kept = {} if self._records is None else {"record": self._keep_record(self._records, check, offer, scheme)}
            write(log, "decoy checked", logging.DEBUG, **said, **kept)
        elif isinstance(found, DecoyError):
            write(log, "decoy that cannot be checked", logging.WARNING, **said, why=log_text(found))
        else:
            server = fingerprint_of_key(check.statement.public)
            write(
                log,
                "false server",
                logging.ERROR,
                **said,
                server=server,
                evidence=self._keep(found, check, offer, scheme),
            )

    def _keep(self, found: FalseServerError, check: DecoyCheck, offer: ModelOffer, scheme: Scheme) -> str:
        """Write the evidence; returns the file's name, or why there is none."""
        self._found = True  # until a file says so
        if self._folder is None:
            return "not kept: no --store"
        path = self._folder / f"false-server-{_name_of(check)}.evidence"
        try:
            write_evidence(path, found.evidence, check.program, offer.description, scheme, _facts_of(offer))
        except OSError as error:
            return f"not kept: {error.strerror}"
        self._found = False
        return str(path)

    def _keep_record(self, folder: Path, check: DecoyCheck, offer: ModelOffer, scheme: Scheme) -> str:
        """Write a decoy for an auditor; returns the file's name, or why there is none."""
        path = folder / f"decoy-{_name_of(check)}.record"
        try:
            write_record(path, check, offer.description, scheme, _facts_of(offer), offer.signed, offer.salt)
        except OSError as error:
            return f"not kept: {error.strerror}"
        return str(path)


def _name_of(check: DecoyCheck) -> str:
    """The name of a file about a call."""
    return hashlib.sha256(check.statement.signed_bytes()).hexdigest()[:32]


def _facts_of(offer: ModelOffer) -> dict[str, str]:
    """What a file about a call says of the model, and when it was written."""
    return {"model": offer.name, "version": offer.version, "found_at": datetime.now(timezone.utc).isoformat()}


CHECKING = 5.0
"""Seconds that `ServerAuditor.close` waits for the checks that wait."""


class Admission:
    """Decides which queries an answering party takes, and bans identity keys that dealt falsely.

    A ban is a file of evidence, `false-dealing-FINGERPRINT.json`; removing the file lifts the ban. Where the file
    cannot be written, the ban ends with this process.

    Args:
        unchecked: whether to answer queries with range_check=False.
        audited: the number of calls that a client deals for each one that is used, at least (`Scheme.audited`); 1
            trusts clients to deal correctly.
        folder: where evidence is written; None writes none.
        verified: whether clients have to prove what they deal (`Scheme.verified`). Such queries are not audited.
        auditor: checks decoys; without it accountable queries (`Scheme.accountable`) are not answered.

    Raises:
        ArgumentError: `audited` or `verified` is out of range, or both are set.
    """

    def __init__(
        self, unchecked: bool = False, audited: int = 1, folder: Path | None = None, verified: bool = False,
        auditor: ServerAuditor | None = None,
    ):  # fmt: skip
        if type(audited) is not int or not 1 <= audited <= MOST_AUDITED:
            raise ArgumentError(f"audited is a whole number of calls, 1 to {MOST_AUDITED}, got {audited!r}")
        if type(verified) is not bool or (verified and audited != 1):
            raise ArgumentError(
                "verified is True or False, and covers what audited=n does but for operations without a proof: name "
                "one of the two"
            )
        self._unchecked, self._audited, self._folder, self._verified = unchecked, audited, folder, verified
        self.auditor = auditor
        self._banned: set[str] = set()
        self._lock, self._turns = (
            threading.Lock(),
            defaultdict[str, FairQueue](lambda: FairQueue(1, MAX_WAITING, MAX_WAITING)),
        )

    def check(self, who: str, scheme: Scheme, of: int) -> None:
        """Raise RefusedError for a query that this party does not answer.

        Args:
            who: this party's name.
            of: the number of parties that answer the query.
        """
        if not (self._unchecked or scheme.range_check):
            raise RefusedError(f"'{who}' answers with range checks only: leave range_check=False out")
        if self.auditor is not None:
            self.auditor.refuse(f"'{who}'")
        if scheme.accountable and of > 1:
            raise RefusedError(f"S signs what it computes for one answering party, and '{who}' is asked alone then")
        if scheme.accountable and self.auditor is None:
            raise RefusedError(
                f"'{who}' does not check what the server computes: leave accountable=True out, or ask its operator for "
                f"--audit-server"
            )
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
    def query_turn(self, client: str, key: str, model: str, tick: Callable[[], None]) -> Iterator[None]:
        """Run one query of an identity key in the block, and ban the key if it is found to deal falsely.

        Where dealing is audited, the queries of one key run one at a time. Otherwise a client could deal falsely in
        many sessions at once and be banned only after all of them.

        Args:
            tick: called periodically while the query waits.

        Raises:
            RefusedError: the key is banned.
            FalseDealingError: raised by the block; the evidence is written and the key banned first.
        """
        with self._lock:
            turns = self._turns[key]
        with turns.turn(key, tick) if self._audited > 1 else nullcontext():
            self.check_key(client, key)
            try:
                yield
            except FalseDealingError as error:
                if error.evidence is not None:
                    self._ban(client, key, model, error.evidence)
                raise

    def check_key(self, client: str, key: str) -> None:
        """Raise RefusedError for an identity key that is banned, or where the server was found out."""
        if self.auditor is not None:
            self.auditor.refuse("this party")
        if key in self._banned or (self._folder is not None and self._file(key).exists()):
            raise RefusedError(
                f"'{client}' has dealt falsely before, as it has signed, and is not answered any more; the answering "
                f"party keeps the evidence"
            )

    def note_error(self, error: Exception, facts: dict[str, str]) -> None:
        """Log a false dealing that ended a session without evidence signed by the client, so that nobody is banned.

        This happens where S detects it after this party has finished its part of the call.
        """
        if isinstance(error, FalseDealingError) and error.evidence is None:
            write(log, "false dealing", logging.ERROR, **facts, evidence="none that it has signed: no ban")

    def _ban(self, client: str, key: str, model: str, evidence: Evidence) -> None:
        """Ban a key and write the evidence."""
        promise = evidence.promise
        said = {
            "client": client, "key": key, "model": model, "found_at": datetime.now(timezone.utc).isoformat(),
            "session": promise.session.hex(), "program": promise.program, "calls": list(promise.calls),
            "promised": [digest.hex() for digest in promise.digests],
            "streams": [named.hex() for named in promise.streams], "signature": promise.signature.hex(),
            "public_key": evidence.public.hex(), "call": evidence.call, "digest_of_its_streams": evidence.found.hex(),
            "stream_with_A": evidence.with_A.hex(), "stream_with_S": evidence.with_S.hex(),
        }  # fmt: skip
        kept = self._write_evidence(key, json.dumps(said, indent=1).encode())
        facts = {"client": client, "key": key, "model": model, "call": evidence.call}
        write(log, "false dealing", logging.ERROR, **facts, evidence=kept)

    def _write_evidence(self, key: str, said: bytes) -> str:
        """Write the evidence; returns the file's name, or why there is none (then the ban ends with this process)."""
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


RESTING = 2.0
"""Seconds without a call after which a session of a replaced version is ended."""


@dataclass(eq=False)
class ModelOffer:
    """One version of a model that this party offers under a name.

    Attributes:
        name: PARTY or PARTY/MODEL.
        edition: this party's commitment to the weights. salt: opens it. signed: its signature of the version.
        made: when the version was added, in microseconds; the latest one answers.
        programs: the programs of its calls, shared by its sessions.
        replaced: whether a later version has replaced it.
    """

    name: str
    description: dict
    weights: dict[str, torch.Tensor] = field(repr=False)
    edition: str
    salt: bytes = field(repr=False)
    signed: str
    made: int
    programs: ProgramCache = field(default_factory=ProgramCache, repr=False)
    replaced: bool = False

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.description)

    @property
    def version(self) -> str:
        return version(self.description, self.edition)


class ModelOffers:
    """The models of one answering party, and the sessions that use them.

    Args:
        party: its name.
        identity: its long-term key. It signs versions, and salts the commitments to weights: these are equal at all
            processes of the party, and reveal nothing about the weights to others.
        imprecise: whether to offer models that lose digits in fixed point, with a warning.
    """

    def __init__(self, party: str, identity: Ed25519PrivateKey, imprecise: bool = False):
        self._party, self._key, self._imprecise = party, identity, imprecise
        self._lock = threading.Lock()
        self._offers: dict[str, list[ModelOffer]] = {}
        self._sessions: dict[Channel, tuple[ModelOffer, float | None]] = {}

    def set(self, model: str, description: dict, weights: dict[str, torch.Tensor]) -> ModelOffer | None:
        """Make this the current version of a model. The version before it stays usable until `retire`.

        Args:
            model: the part of the name after the party's; empty for the party's own.

        Returns:
            The offer, or None where this version is the current one already.

        Raises:
            ProgramError: the description is invalid, or the weights do not fit it. Nothing changes.
            PrecisionError: the model loses digits in fixed point. Nothing changes.

        Warns:
            PrecisionWarning: the model loses digits, and `imprecise` allows it.
        """
        served, name = load_program(description, weights), f"{self._party}/{model}" if model else self._party
        check_served(served, name, self._imprecise)
        edition, salt = commitment_to(weights, self._key)
        signed = sign_version(self._key, name, version(description, edition))
        new = ModelOffer(name, description, weights, edition, salt, signed, time.time_ns() // 1000)
        with self._lock:
            held = self._offers.setdefault(new.name, [])
            if held and held[-1].version == new.version:
                return None
            held.append(new)
        return new

    def retire(self) -> None:
        """End the sessions of replaced versions, each as soon as it has no running call."""
        with self._lock:
            for held in self._offers.values():
                for offer in held[:-1]:
                    offer.replaced = True
                del held[:-1]
        threading.Thread(target=self._end_replaced_sessions, daemon=True, name="retiring").start()

    def _end_replaced_sessions(self) -> None:
        """Wait for each session to be without a call for `RESTING` seconds: the server may still be working on a call
        whose part here is finished."""
        while True:
            with self._lock:
                left = [(channel, *asked) for channel, asked in self._sessions.items() if asked[0].replaced]
            for channel, offer, since in left:
                if since is not None and time.monotonic() - since > RESTING:
                    channel.fail(_replaced_error(offer))
                    self.end_session(channel)
            if not left:
                return
            time.sleep(RESTING / 4)

    def latest(self) -> list[ModelOffer]:
        """The current version of each model."""
        with self._lock:
            return [held[-1] for held in self._offers.values()]

    def find(self, name: object, edition: object) -> ModelOffer:
        """The version that a session is opened with.

        Raises:
            SessionOverError: there is no such version, or no longer.
        """
        with self._lock:
            found = next((o for o in self._offers.get(str(name), []) if o.edition == edition), None)
        if found is None:
            raise SessionOverError(f"'{self._party}' has another version now; ask again")
        return found

    def begin_call(self, channel: Channel, offer: ModelOffer) -> None:
        """Record that a call of a session begins.

        Raises:
            SessionOverError: the version was replaced; nothing of the call was done.
        """
        with self._lock:
            if offer.replaced:
                raise _replaced_error(offer)
            self._sessions[channel] = offer, None

    def end_call(self, channel: Channel, offer: ModelOffer) -> None:
        """Record that a session has no running call."""
        with self._lock:
            self._sessions[channel] = offer, time.monotonic()

    def end_session(self, channel: Channel) -> None:
        """Forget a session that has ended."""
        with self._lock:
            self._sessions.pop(channel, None)


def _replaced_error(offer: ModelOffer) -> SessionOverError:
    return SessionOverError(f"'{offer.name}' has another version now; asking again opens a session with that one")


SESSIONS = 128
"""Sessions that one connection may have open."""


class Answering:
    """A running answering party; `close` ends it.

    Args:
        address: host:port of the server.
        description, weights: of the model, as `describe` gives them.
        pins: the known clients; the file in the user's settings by default.
        store: where prepared material is kept; a temporary one by default.
        patience: seconds of silence after which the server counts as lost; 60 by default.
        unchecked, audited, verified: see `Admission`. Evidence goes to the folder of a lasting store.
        receipts: a file in which each query is signed for before it is answered.
        limits: a file of the quotas of clients (`limits.Quotas`).
        model: the part of the model's name after the party's own and a slash; empty gives it the party's name. `offer`
            adds other models.
        replica: whether other processes of this party answer as well, each with a store of its own.
        imprecise: whether to answer with models that lose digits in fixed point (`PrecisionWarning`).
        memory: bytes that this process may hold; see `MemoryBound`.
        audit_server: whether to check decoys (`ServerAuditor`), and so to answer accountable queries; the fingerprint
            of the server's identity key, or True for any.
        keep_decoys: a folder in which each checked decoy is kept for an auditor who has the weights (docs/decoys.md).

    Raises:
        PrecisionError: the model loses digits in fixed point, by the check that `secure` does.
        ArgumentError: the file of limits is invalid, or a replica has no lasting store.
        QuotaFileError: the use of quotas cannot be recorded.
        ReceiptError, ReceiptsInUseError, IdentityError: receipts cannot be written or signed.
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
        memory: int | None = None,
        audit_server: bool | str = False,
        keep_decoys: str | Path | None = None,
    ):
        self._memory = MemoryBound(memory)
        if credentials.identity is None:
            raise no_identity(credentials.name)
        self._offers = ModelOffers(credentials.name, read_identity(credentials.identity), imprecise)
        self._offers.set(model, description, weights)
        self._address, self._credentials, self._patience = address, credentials, patience
        self._worker, self._label = 0, ""
        self._instances = [self]
        self._pins = pins or Pins()
        self.store = store or Store()
        folder = self.store.folder if self.store.lasting else None
        known = audit_server if isinstance(audit_server, str) else ""
        records = None if keep_decoys is None else Path(keep_decoys)
        if records is not None and not audit_server:
            raise ArgumentError("decoys are kept where they are checked: add --audit-server (audit_server=)")
        self._auditor = ServerAuditor(known, folder, self._memory, records) if audit_server else None
        self._admission = Admission(unchecked, audited, folder, verified, self._auditor)
        self.store.on_evict = self._void_material
        if replica and not self.store.lasting:
            raise ArgumentError("a replica has a store of its own (--store FOLDER), by which the server knows it again")
        self._keeper = self.store.name if replica else ""
        self._threads: list[threading.Thread] = []
        self._turns = FairQueue(SESSIONS, SESSIONS, SESSIONS)  # nothing waits here: the server limits running calls
        self._connection: Connection | None = None
        self._batcher = AnsweringBatcher()
        self._registered_link: PeerLink | None = None
        self.answered = 0
        with ExitStack() as files:
            self._receipts = (
                None if receipts is None else files.enter_context(closing(Receipts(receipts, credentials, "A")))
            )
            self._quotas = (
                None if limits is None else files.enter_context(closing(Quotas(limits, credentials.name, "A")))
            )
            self._close_files = files.pop_all().close

    @property
    def connection(self) -> Connection:
        """The last connection to the server, which may be closed.

        Raises:
            PeerLostError: there was none yet.
        """
        if self._connection is None:
            raise PeerLostError("this answering party has not registered with the server yet")
        return self._connection

    def register(self, name: str) -> None:
        """Register with the server under `name`, connecting first where there is no open connection.

        Material whose other half the server no longer has, or which belongs to another version, is dropped.

        Args:
            name: the name in the certificate.

        Raises:
            ArgumentError: the name is invalid; nothing was sent.
            BusyError: another connection answers under it.
            PeerLostError: the server cannot be reached.
            IdentityError: a certificate was refused, or is for another name.
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
        offers, at_server = self._offers.latest(), set()
        for offer in offers:
            at_server |= self._register_offer(offer)
        self._registered_link, self._label = self.connection.link, self.connection.place.label
        editions = {offer.edition for offer in offers}
        for shelf in self.store.shelves(replica=self._label) if self._label else self.store.shelves():
            if shelf.session.hex() not in at_server or shelf.binding.edition not in editions:
                shelf.drop()

    def _register_offer(self, offer: ModelOffer) -> set[str]:
        """Register one model; returns the sessions for which the server has prepared material."""
        request = Register(
            name=offer.name, description=offer.description, edition=offer.edition, keeper=self._keeper, made=offer.made,
            signed=offer.signed,
        )  # fmt: skip
        return set(self.connection.ask(request, KeptSessions).sessions)

    def offer(self, description: dict, weights: dict[str, torch.Tensor], model: str = "") -> bool:
        """Add a model, or replace the version of that name.

        The server hears of the new version first. Then sessions of the replaced version end, after their running calls.

        Args:
            model: the part of the name after this party's and a slash; empty for the party's own.

        Returns:
            Whether it differs from the version before.

        Raises:
            ArgumentError: the name is invalid.
            ProgramError, PrecisionError: the description is invalid, or the model loses digits. The version before
                stays.
        """
        if model:
            name_of(model, "a model's name")
        now = self._offers.set(model, description, weights)
        if now is None:
            return False
        try:
            for one in self._instances:
                if not one.unready():  # otherwise `register` tells the server at the next connection
                    one._register_offer(now)
        finally:
            self._offers.retire()
        write(log, "offers", model=now.name, version=now.version)
        return True

    def reload(self) -> None:
        """Read the file of limits again."""
        if self._quotas is not None:
            self._quotas.reload()

    beside = renamed_attribute("beside", "at_server")

    def at_server(self, address: str, worker: int) -> Answering:
        """The same party at another server, or at another worker of one, with shared models, store and quotas.

        Args:
            address: host:port of the server.
            worker: number of the worker behind that address.
        """
        other = copy.copy(self)
        other._address, other._worker, other._label = address, worker, ""
        other._connection, other._registered_link, other._threads = None, None, []
        self._instances.append(other)
        return other

    def leave(self) -> None:
        """End the connection and its sessions; what `at_server` shares stays open."""
        self._hang_up()
        join_threads(self._threads)

    def drain(self, seconds: float) -> bool:
        """Begin no more calls and sessions; returns whether the running ones ended within `seconds`."""
        why = f"'{self._credentials.name}' is stopping; ask again when it is back"
        return self._turns.drain(why, seconds)

    def renew(self, credentials: Credentials) -> None:
        """Use these credentials for later connections; an open one stays."""
        for one in self._instances:
            one._credentials = credentials

    def unready(self) -> str:
        """Why no query is answered now; empty while this party is registered and not stopping."""
        registered = self._registered_link is not None and self._registered_link.closed is None
        why = "" if registered else "not registered with the server"
        return self._turns.closed or why or records_unready(self._receipts, self._quotas)

    def figures(self) -> dict[str, float]:
        """The current values of the gauges of `observe.GAUGES`."""
        link = self._registered_link
        sessions = link.sessions if link is not None and link.closed is None else 0
        connected = link is not None and link.closed is None
        return {"sessions": sessions, "connections": connected, **self._turns.figures(), **self.store.figures()}

    def _void_material(self, shelf: Shelf) -> None:
        """Have the server drop its half of material that was evicted here. Q is told when it asks for that material."""
        for one in self._instances:
            with suppress(NetworkError):
                one.connection.link.tell(Void(sessions=[shelf.session.hex()]))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        self.leave()
        if self._auditor is not None:
            self._auditor.close()
        self.store.close()
        self._close_files()

    def wait(self) -> None:
        """Block until the connection ends.

        Raises:
            PeerLostError: always, once it has ended.
        """
        self.connection.ended.wait()
        raise copy_error(self.connection.link.closed or PeerLostError("the connection ended"))

    def _serve(self, request: ControlMessage) -> None:
        """Handle a message of the server's: drop material, or open a session and run it in a thread.

        The channel is opened before this returns, so that no frame of the session is missed.
        """
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
        try:
            thread.start()
        except RuntimeError as error:  # there is no memory for its stack
            channel.abort(abort_reason(error, f"'{self.connection.name}'"))
            channel.close()
            return
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _session(self, channel: Channel, request: Serve) -> None:
        """Answer the queries of one session until Q closes it or it fails."""
        ending, session, party, charge = "that session is over", channel.session, None, None
        try:
            if request.resume is not None:
                session = bytes.fromhex(request.resume)
            offer = self._offers.find(request.model, request.edition)
            self._offers.end_call(channel, offer)
            party = self._open_party_session(session, channel, request, offer)
            client, key, model = (party.query_facts[fact] for fact in ("client", "key", "model"))
            self._admission.check_key(client, key)
            if self._quotas is not None:
                self._quotas.session(client, key, [model])
            while not isinstance(query := self._next_query(channel, charge), Close):
                self._offers.begin_call(channel, offer)
                join = self._batch_joiner(party, query)
                with self._turns.turn(account_of(request.client), channel.beat):
                    client, key, model = (party.query_facts[fact] for fact in ("client", "key", "model"))
                    turn = self._admission.query_turn(client, key, model, channel.beat)
                    with turn, self._charge(party, channel, query) as charge:
                        stored = party.follow(query, join)
                if stored is not None:
                    channel.tell(stored)
                self.answered += isinstance(query, Predict | Aggregate)
                self._offers.end_call(channel, offer)
        except Exception as error:
            ending = abort_reason(error, f"'{self.connection.name}'")
            if party is not None:
                self._admission.note_error(error, party.query_facts)
            # The text of an IdentityError is written for this party's user: it names the command that pins the key.
            own = error if isinstance(error, IdentityError) else log_text(error)
            write(log, "session ended", client=readable(request.client, LONGEST), why=own)
            if not isinstance(error, NetworkError):
                log.debug("in detail", exc_info=error)
        finally:
            self._offers.end_session(channel)
            channel.close()
            channel.abort(ending)
            if party is not None:
                party.close()
            if not request.lasting:
                self.store.forget(session)

    def _next_query(self, channel: Channel, before: Charge | None) -> ModelQuery | Close:
        """The next query of a session, whose last one had the charge `before`."""
        with nullcontext() if self._quotas is None else self._quotas.next_query(before, channel):
            return channel.request(ToFollow)

    def _charge(
        self, party: PartySession, channel: Channel, query: ModelQuery
    ) -> AbstractContextManager[Charge | None]:
        if self._quotas is None:
            return nullcontext()
        rows, who = party.requested_inputs(query).rows, party.query_facts
        return self._quotas.query(query, rows, who["client"], who["key"], [who["model"]], [channel], [channel])

    def _batch_joiner(self, party: PartySession, query: ModelQuery) -> Callable[[BatchedCall], None] | None:
        """What runs a call that S has put into a batch; None for any other query."""
        if not isinstance(query, Predict) or query.joint is None or party.batchable_program(query) is None:
            return None
        joint, calls = query.joint, query.calls
        return lambda call: self._batcher.take(BatchCandidate(call), joint, calls)

    def _open_party_session(self, session: bytes, channel: Channel, request: Serve, offer: ModelOffer) -> PartySession:
        client = name_of(request.client, "the name of a client that the server relays", FrameError)
        scheme, place, of, resume = scheme_from_message(request.scheme), request.place, request.of, request.resume
        if not place < of:
            raise MaterialError("a place among the answering parties that does not exist")
        self._admission.check(self.connection.name, scheme, of)
        names = {"Q": client, "A": offer.name}
        agreed = context(offer.description, offer.edition, scheme, place, of)
        identities = PinnedIdentities(names, self.connection.identity, agreed, self._pins)
        who = lambda: {"client": client, "key": identities.proved}
        binding = lambda: MaterialBinding(
            **who(), fingerprint=offer.fingerprint, edition=offer.edition, scheme=repr(scheme), replica=self._label
        )
        if resume is not None:
            # Nothing is proved anew in a resumed session: its material is bound to the key that dealt it, and where
            # that is not the pinned one now, the shelf below is not found.
            identities.proved = self._pins.fingerprints().get(client, "")
            self.store.shelf(session, None)
            shelf = self.store.shelf(session, binding())
            shelf.refuse_used(request.used, "another party")
            shelf.keep_only(request.calls)
            channel.tell(MaterialReady(calls=list(shelf.calls()), used=shelf.used_ranges()))
        model = {"model": offer.name, "version": offer.version}
        party = PartySession(
            A, session, {S: channel}, [AnsweringParty(offer.description, identities, offer.weights)], scheme,
            lambda: self.store.shelf(session, binding()), place=place, of=of, fresh=resume is None,
            facts=lambda: {**who(), **model}, receipts=self._receipts, known=offer.programs, memory=self._memory,
            commitment=offer.signed if of == 1 else None,
        )  # fmt: skip
        if self._auditor is not None and scheme.accountable:
            self._auditor.attach(party.session.statements, offer, scheme, lambda: {**who(), **model})
        return party


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
    audit_server: bool | str = False,
    keep_decoys: str | Path | None = None,
) -> Answering:
    """Answer queries with `model`.

    Args:
        address: host:port of the server.
        model: a module in evaluation mode that `sectorch.secure` takes, or what torch.export made of it.
        inputs: example inputs; see `save_model`.
        name: the certificate's common name, which is the default.
        pins, store, patience, unchecked, receipts, limits, replica, audited, verified, imprecise: see `Answering`.
        audit_server, keep_decoys: see `Answering`.

    Returns:
        The running party, registered with the server.

    Raises:
        SectorchError: what `secure` raises for such a call.
        ProgramError: the model cannot be described.
        PrecisionError: the model loses digits in fixed point.
        ArgumentError: the name is invalid.
        IdentityError: the name or the certificate is refused.
        ReceiptError: see `Answering`.
    """
    name = name_of(name or credentials.name, "an answering party's name")  # before tracing, which takes long
    description, weights = describe(model, inputs)
    running = Answering(
        address, credentials, description, weights, pins, store, patience, unchecked, receipts, limits,
        replica=replica, audited=audited, verified=verified, imprecise=imprecise, audit_server=audit_server,
        keep_decoys=keep_decoys,
    )  # fmt: skip
    try:
        running.register(name)
    except BaseException:
        running.close()
        raise
    return running
