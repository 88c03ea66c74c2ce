"""The client's side: requests to the server, and Q's models."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from .. import errors
from ..errors import ArgumentError, DtypeError, NetworkError, PeerLostError, SectorchError, ShapeError
from ..ring import check_encodable
from ..session import Q, S
from .certificates import Credentials
from .link import Link
from .session import PartySession, reason, scheme_of
from .transport import dial


class Connection:
    """A client's connection to the server. Use as a context manager, or `close` it.

    Args:
        on_serve: called with a request to take part in a session; an answering party gives one.
    """

    def __init__(self, address: str, credentials: Credentials, on_serve: Any = None, patience: float = 5.0):
        self.name = credentials.name
        self._on_serve = on_serve
        self._numbers = itertools.count()
        self._replies: dict[int, Any] = {}
        self._arrived = threading.Condition()
        self.link = Link(f"the server at {address}", self._request)
        self._channel = dial(address, credentials, self.link, patience)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave; open sessions end at the other parties with a typed error."""
        self.link.close(PeerLostError("this connection was closed"))
        self._channel.close()

    def ask(self, request: dict, patience: float = 30.0) -> dict:
        """Send a request that belongs to no session and wait for the reply.

        Raises:
            the error that the server names, as its type here; PeerLostError: none came.
        """
        number = next(self._numbers)
        self.link.tell({**request, "number": number})
        with self._arrived:
            arrived = self._arrived.wait_for(lambda: number in self._replies or self.link.closed, patience)
            if number not in self._replies:
                closed = self.link.closed
                raise (
                    closed if arrived and closed else PeerLostError(f"the server has not replied for {patience:.0f} s")
                )
            reply = self._replies.pop(number)
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), None)
            known = isinstance(kind, type) and issubclass(kind, SectorchError)
            raise (kind if known else NetworkError)(str(reply.get("text"))[:400])
        return reply

    def _request(self, link: Link, request: dict) -> None:
        if request.get("do") == "reply":
            with self._arrived:
                self._replies[request.get("number")] = request
                self._arrived.notify_all()
        elif request.get("do") == "serve" and self._on_serve is not None:
            self._on_serve(request)

    def models(self) -> list[str]:
        """Names of the models that can be asked."""
        return list(self.ask({"do": "models"})["models"])

    def model(self, name: str, frac_bits: int = 20) -> RemoteModel:
        """Open a session with the answering party of that name.

        Raises:
            UnknownModelError: it is not connected; the text lists those that are.
        """
        return RemoteModel(self, name, frac_bits)


class RemoteModel:
    """A model at another party, asked by this one: call it with a plain tensor, get the plain result.

    Only this party learns the result; A and S learn its shape. Raises on a call:
        DtypeError, ShapeError, NonFiniteError, FixedPointRangeError: a bad input; nothing was sent.
        PeerLostError, AbortedError, FrameError: the query ended; nothing of it was revealed, and the next call opens a
        new session.
    """

    def __init__(self, connection: Connection, name: str, frac_bits: int):
        self.connection, self.name = connection, name
        self._frac_bits = frac_bits
        self._lock = threading.Lock()
        self._open()

    def __repr__(self) -> str:
        return f"RemoteModel('{self.name}', rows of shape {self._party.row})"

    def _open(self) -> None:
        request = {"do": "open", "model": self.name, "frac_bits": self._frac_bits}
        scheme = scheme_of(request)
        reply = self.connection.ask(request)
        session = bytes.fromhex(reply["session"])
        self._channel = self.connection.link.open(session)
        try:
            self._party = PartySession(Q, session, {S: self._channel}, reply["description"], scheme)
        except BaseException as error:
            self._end(error)
            raise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction for a batch x [rows, ...]."""
        self._check(x)
        with self._lock:
            self._ready()
            return self._run({"do": "predict", "shape": list(x.shape)}, lambda: self._party.predict(x))

    def prepare(self, rows: int) -> None:
        """Do all that does not depend on the input, for one later call with so many rows."""
        if rows < 1:
            raise ArgumentError(f"prepare needs at least one row, got {rows}")
        shape = torch.Size((rows, *self._party.row))
        with self._lock:
            self._ready()
            self._run({"do": "prepare", "shape": list(shape)}, lambda: self._party.prepare(shape))

    def prepared(self) -> dict[tuple[int, ...], int]:
        """Input shapes for which material is at hand, and how many calls it serves."""
        return self._party.secured.prepared()

    def close(self) -> None:
        """End the session; unused material is dropped on all sides."""
        if self._channel is not None:
            self._channel.tell({"do": "close"})
            self._channel.close()
            self._channel = None

    def _ready(self) -> None:
        if self._channel is None:
            self._open()

    def _run(self, request: dict, work: Any) -> Any:
        try:
            self._channel.tell(request)
            return work()
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        """Give the session up: the others are told, and the next call starts afresh."""
        self._channel.abort(reason(error))
        self._channel.close()
        self._channel = None

    def _check(self, x: Any) -> None:
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"expected a torch tensor, got {type(x).__name__}")
        if x.dtype != self._party.dtype:
            raise DtypeError(f"the model takes {self._party.dtype}, got {x.dtype}; use x.to({self._party.dtype})")
        if tuple(x.shape[1:]) != self._party.row or x.dim() < 1 or x.shape[0] < 1:
            raise ShapeError(f"the model takes [rows, {', '.join(map(str, self._party.row))}], got {list(x.shape)}")
        check_encodable(x, self._frac_bits, "the input")


def connect(address: str, credentials: Credentials, patience: float = 5.0) -> Connection:
    """Connect to a server as a client.

    Raises:
        IdentityError: a certificate was refused. PeerLostError: nobody answers there.
    """
    return Connection(address, credentials, patience=patience)
