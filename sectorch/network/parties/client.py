"""A client's connection to the server: requests and their replies, and the models that it can ask."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from ... import errors
from ...config import Scheme, scheme_fields, scheme_of
from ...decoys import KnownAnswers
from ...errors import ArgumentError, FrameError, IdentityError, NetworkError, PeerLostError, SectorchError, VersionError
from ..identity.identity import Credentials, Pins, read_identity
from ..messages import (
    PROTOCOLS,
    ControlMessage,
    Failure,
    Hello,
    ListModels,
    Models,
    ServerProcess,
    ServerReply,
    ToClient,
    message_form,
    parse_message,
    release,
    speaks,
)
from ..names import model_name, readable, worker_of
from ..receipts import Receipts
from ..store import Store
from ..wire.channel import PeerLink, copy_error, relayed_error
from ..wire.endpoints import dial, refusal
from .remote_model import RemoteGroup, RemoteModel
from .session import load_loops

log = logging.getLogger("sectorch.client")
R = TypeVar("R", bound=ServerReply)
REACHING = 10.0
"""Seconds to connect until the right one of a server's workers answers."""
CLOSING = 3.0
"""Seconds to wait at closing until queued frames have reached the server."""


class Connection:
    """A client's connection to the server. Use as a context manager, or `close` it.

    Args:
        address: host:port of the server.
        on_serve: called with messages that are no replies (`messages.ToClient`); given by an answering party.
        patience: seconds to wait for the connection.
        pins: the known answering parties; the file in the user's settings by default.
        store: where this client's part of prepared material is kept; a temporary one by default. It is closed with the
            connection.
        silence: seconds without a frame after which the server counts as lost; 60 by default.
        receipts: a file in which each query is signed for before anything of it is sent.
        worker: number of the server's worker, where it has several; by default the one for this client's name.

    Raises:
        IdentityError: a certificate was refused, or there is no identity key.
        ReceiptError: receipts cannot be written there.
        ReceiptsInUseError: another process writes receipts there.
        PeerLostError: nobody answers.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        on_serve: Callable[[Any], None] | None = None,
        patience: float = 5.0,
        *,
        pins: Pins | None = None,
        store: Store | None = None,
        silence: float | None = None,
        receipts: str | Path | None = None,
        worker: int | None = None,
    ):
        self.name = credentials.name
        if credentials.identity is None:
            raise no_identity(self.name)
        self.identity = read_identity(credentials.identity)
        self.authority = hashlib.sha256(credentials.authority).hexdigest()
        self.pins = pins or Pins()
        self._store = store
        self._on_serve = on_serve
        self._dial_arguments = address, credentials, silence, patience
        self.place, self._worker = ServerProcess(), worker
        self._dialling, self._closed = threading.Lock(), False
        self._models: weakref.WeakSet[RemoteModel] = weakref.WeakSet()
        self._numbers = itertools.count()
        self._replies: dict[int, dict | None] = {}
        self._arrived = threading.Condition()
        self.receipts = None if receipts is None else Receipts(receipts, credentials, "Q")
        try:
            self._dial()
        except BaseException:
            if self.receipts is not None:
                self.receipts.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _dial(self) -> None:
        """Connect until the wanted worker answers: behind one address, any of them may."""
        end = time.monotonic() + REACHING
        while not self._dial_once():
            if time.monotonic() > end:
                wanted = self._worker_number(self.place)
                raise PeerLostError(
                    f"worker {wanted} of the server at {self._dial_arguments[0]} is not there; ask again later"
                )

    def _worker_number(self, place: ServerProcess) -> int:
        return worker_of(self.name, place.workers) if self._worker is None else self._worker

    def _dial_once(self) -> bool:
        """Connect once; returns whether the wanted worker has answered."""
        address, credentials, silence, patience = self._dial_arguments
        load_loops()
        ended, link = (
            threading.Event(),
            PeerLink(f"the server at {address}", self._request, silence, on_close=self._wake),
        )
        self._stream = dial(address, credentials, link, patience, lambda: self._note_end(ended))
        self.ended, self.link = ended, link
        try:  # in TLS 1.3, a server refuses a client's certificate only after the handshake
            hello = Hello(protocols=list(PROTOCOLS), release=release())
            self.place = self._ask(link, hello, ServerProcess, patience)
            if self.place.protocol not in PROTOCOLS:
                spoken = [self.place.protocol] if self.place.protocol else []
                raise FrameError(f"it answers in {speaks(spoken, self.place.release)}")
        except NetworkError as error:
            self._hang_up()
            raise refusal(address, self._version_error(error)) from None
        if self.place.worker != self._worker_number(self.place) < self.place.workers:
            self._hang_up()
            return False
        return True

    def _version_error(self, error: NetworkError) -> NetworkError:
        """The error of a first message; a VersionError where the server does not understand that message."""
        if not isinstance(error, FrameError):
            return error
        own = speaks(PROTOCOLS, release())
        return VersionError(
            f"the server does not speak {own}, which '{self.name}' speaks: install the same release at both ({error})"
        )

    def live_link(self) -> PeerLink:
        """The open link. A client connects again if it was lost; an answering party does so itself, by `register`."""
        with self._dialling:
            if self.link.closed is not None and not self._closed and self._on_serve is None:
                self._stream.close()
                self._dial()
                log.warning("the server was away; connected again")
            return self.link

    @property
    def store(self) -> Store:
        """The store of this client's prepared material."""
        if self._store is None:
            self._store = Store()
        return self._store

    def close(self) -> None:
        """Close the connection; open sessions end at the other parties too."""
        for model in list(self._models):
            model.close()
        with self._dialling:
            self._closed = True
            self._hang_up()
        if self._store is not None:
            self._store.close()
        if self.receipts is not None:
            self.receipts.close()

    def _hang_up(self) -> None:
        self.link.leave()
        self.ended.wait(CLOSING)
        self._stream.close()
        self._note_end(self.ended)

    def _note_end(self, ended: threading.Event) -> None:
        ended.set()
        self._wake()

    def _wake(self) -> None:
        """Wake the threads that wait for a reply, after the link was closed."""
        with self._arrived:
            self._arrived.notify_all()

    def ask(
        self, request: ControlMessage | Mapping[str, Any], kind: type[R] = ServerReply, patience: float = 30.0
    ) -> R:
        """Send a request that belongs to no session and wait for the reply; connects again if the server was lost.

        Args:
            kind: declared type of the reply.
            patience: seconds to wait for it.

        Raises:
            SectorchError: the error that the server replied with.
            FrameError: the reply is of another type.
            PeerLostError: no reply came, or the server cannot be reached.
            IdentityError: a certificate was refused.
        """
        return self._ask(self.live_link(), request, kind, patience)

    def _ask(self, link: PeerLink, request: ControlMessage | Mapping[str, Any], kind: type[R], patience: float) -> R:
        number = next(self._numbers)
        with self._arrived:
            self._replies[number] = None
        try:
            link.tell({**message_form(request), "number": number})
            with self._arrived:
                self._arrived.wait_for(lambda: self._replies[number] or link.closed, patience)
                reply = self._replies[number]
        finally:
            with self._arrived:
                self._replies.pop(number, None)
        if reply is None:
            closed = link.closed
            raise copy_error(closed) if closed else PeerLostError(f"the server has not replied for {patience:.0f} s")
        content = {name: value for name, value in reply.items() if name not in ("do", "number")}
        if "error" in content:
            failure = parse_message(Failure, content, "reply")
            error = getattr(errors, failure.error, None)
            known = error if isinstance(error, type) and issubclass(error, SectorchError) else NetworkError
            raise relayed_error(known, readable(failure.text))
        return parse_message(kind, content, "reply")

    def _request(self, link: PeerLink, request: dict) -> None:
        number = request.get("number")
        if request.get("do") == "reply":
            with self._arrived:
                if type(number) is int and number in self._replies:
                    self._replies[number] = request
                    self._arrived.notify_all()
        elif self._on_serve is not None:
            self._on_serve(parse_message(ToClient, request))

    def models(self) -> list[str]:
        """Names of the models that can be asked.

        Raises:
            FrameError: the server's list has an invalid name.
        """
        listed = self.ask(ListModels(), Models).models
        return [model_name(name, "a model's name in the server's list", FrameError) for name in listed]

    @scheme_fields
    def model(
        self, name: str, scheme: Scheme | Literal["lan", "wan"] | None = None, *, version: str | None = None,
        decoys: float = 0.0, server_key: str = "", known: KnownAnswers | None = None,
    ) -> RemoteModel:  # fmt: skip
        """A model at an answering party.

        Args:
            name: PARTY, or PARTY/MODEL.
            scheme: see `sectorch.secure`; with exact ReLU. A and S learn it.
            version: the version to accept (`RemoteModel.version`). By default any is accepted, and a change is logged
                as a warning.
            decoys: the probability that a call is a decoy, with `Scheme(accountable=True)`: it comes before a question,
                on an input that is made up, and A checks what S computes in it (docs/decoys.md). Nobody is sent it.
            server_key: the fingerprint of the key with which the server has to sign then. Without it the first key that
                it shows is the one that it has to show in all sessions of this model.
            known: rows whose answers this party knows, for a model of one input with rows. They are asked among its
                questions, in batches of the question's size.

        Raises:
            ArgumentError: the name, the number format, the rate of decoys or the server's key is invalid.
            RefusedError: A does not answer without range checks, or has another version.
            UnknownModelError: the model is not connected; the text lists those that are.
        """
        model = RemoteModel(
            self, name, _check_exact_relu(scheme_of("model", scheme)), version, decoys, server_key, known
        )
        self._models.add(model)
        return model

    @scheme_fields
    def aggregate(self, names: list[str], scheme: Scheme | Literal["lan", "wan"] | None = None) -> RemoteGroup:
        """Several models as one whose result is the sum of theirs; nothing else is learned.

        Args:
            names: of the models, of different parties.
            scheme: see `model`; the same for all of them.

        Raises:
            ArgumentError, RefusedError: see `model`; also for a scheme whose dealing is audited.
            UnknownModelError: one is not connected.
            ShapeError: they take different kinds of input.
        """
        scheme = _check_exact_relu(scheme_of("aggregate", scheme))
        scheme.check_trusting()
        return RemoteGroup(self, names, scheme)


def no_identity(name: str) -> IdentityError:
    """The error of a client without an identity key."""
    return IdentityError(
        f"'{name}' has no identity key, by which other clients know it: `sectorch keys identity FILE` makes one; keep "
        f"it as {name}-identity.pem beside the certificate, or name it with --identity"
    )


def _check_exact_relu(scheme: Scheme) -> Scheme:
    if scheme.relu != "exact":
        raise ArgumentError(f"relu={scheme.relu!r} is not answered over the network: it shows Q every activation")
    return scheme


def connect(
    address: str,
    credentials: Credentials,
    patience: float = 5.0,
    *,
    pins: Pins | None = None,
    store: Store | None = None,
    silence: float | None = None,
    receipts: str | Path | None = None,
) -> Connection:
    """Connect to a server as a client.

    Args:
        patience: seconds to wait for the connection.
        pins, store, silence, receipts: see `Connection`.

    Raises:
        IdentityError: a certificate was refused.
        ReceiptError: see `Connection`.
        PeerLostError: nobody answers there.
    """
    return Connection(
        address, credentials, patience=patience, pins=pins, store=store, silence=silence, receipts=receipts
    )
