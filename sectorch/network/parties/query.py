"""Q's models: a model at another party, asked over a connection."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import (
    ArgumentError,
    DtypeError,
    FrameError,
    MaterialError,
    RangeExceededError,
    SectorchError,
    ShapeError,
    StoreFullError,
)
from ...ring import check_encodable
from ...ring.scheme import check_limit
from ...session import Q, S
from ...tensor import Scheme
from ..identity.identity import PinnedIdentities, Pins, context
from ..names import name_of
from ..store.store import Shelf, Store, fingerprint
from ..wire.channel import Channel
from ..wire.link import Link
from .session import Part, PartySession, reason, scheme_in


@dataclass
class Opened:
    """One session that is open at this party, and its end of the channel to S."""

    name: bytes
    channel: Channel
    party: PartySession
    binding: dict


class Asker(Protocol):
    """What a query needs of the connection that it goes over (`client.Connection`)."""

    name: str
    authority: str
    identity: Any
    pins: Pins
    link: Link

    @property
    def store(self) -> Store: ...

    def ask(self, request: dict, patience: float = 30.0) -> dict: ...


def open_session(connection: Asker, names: list[str], scheme: Scheme, shelf: Shelf | None = None) -> Opened:
    """Open a session with the models of these names, or take up the one that a shelf's material belongs to.

    Raises:
        ArgumentError: what is no name; nothing was sent.
        UnknownModelError, BusyError, IdentityError, KeyAgreementError: no session came about.
        MaterialError: the material is void.
    """
    for name in names:
        name_of(name, "an answering party's name")
    wire = os.urandom(16)
    session = wire if shelf is None else shelf.session
    request: dict[str, Any] = {"do": "open", "session": wire.hex(), "models": names, **scheme_in(scheme)}
    request["lasting"] = connection.store.lasting
    if shelf is not None:
        request |= {"resume": session.hex(), "calls": list(shelf.calls())}
    channel = connection.link.open(wire)
    try:
        replied = connection.ask(request).get("parts")
        if not isinstance(replied, list) or len(replied) != len(names) or not all(map(_is_part, replied)):
            raise FrameError("the server's reply lacks the models' descriptions")
        binding = {
            "client": connection.name, "model": names[0], "fingerprint": fingerprint(replied[0].get("description")),
            "edition": replied[0].get("edition"), "scheme": repr(scheme), "authority": connection.authority,
        }  # fmt: skip
        if shelf is not None:
            if shelf.binding != binding:
                raise MaterialError(f"'{names[0]}' has another model now, or was started again without its store")
            if channel.request(channel.patience).get("do") != "ready":
                raise FrameError("the server does not say whether the material is there")
        parts = [
            Part(part.get("description"), _other(connection, part, scheme, names, place))
            for place, part in enumerate(replied)
        ]
        party = PartySession(
            Q, session, {S: channel}, parts, scheme,
            lambda: connection.store.shelf(session, binding), of=len(names), fresh=shelf is None,
        )  # fmt: skip
    except BaseException as error:
        channel.abort(reason(error))
        channel.close()
        raise
    return Opened(session, channel, party, binding)


def _is_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("description"), dict) and isinstance(part.get("edition"), str)


def _other(connection: Asker, part: dict, scheme: Scheme, names: list[str], place: int) -> PinnedIdentities:
    """Who Q and the answering party of this place are to each other, for the model that S says it has."""
    agreed = context(part["description"], part["edition"], scheme, place, len(names))
    both = {"Q": connection.name, "A": names[place]}
    return PinnedIdentities(both, connection.identity, agreed, connection.pins)


def run(opened: Opened, request: dict, work: Callable[[], Any]) -> Any:
    """Ask for `request` in a session and take part; where that fails, the session is given up at all parties.

    Raises:
        RangeExceededError: the session goes on, and the others learn nothing of it.
    """
    try:
        opened.channel.begin()
        opened.channel.tell(request)
        opened.party.expect(torch.Size(request["shape"]))
        result, beyond = None, None
        try:
            result = work()
        except RangeExceededError as error:
            beyond = error  # the others have done their part, and do not hear of it
        opened.channel.rest()
    except BaseException as error:
        opened.channel.abort(reason(error))
        opened.channel.close()
        raise
    if beyond is not None:
        raise beyond
    return result


def check_input(x: Any, row: tuple[int, ...], dtype: torch.dtype, scheme: Scheme) -> None:
    """Raise what a bad input asks for, before anything is sent."""
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"expected a torch tensor, got {type(x).__name__}")
    if x.dtype != dtype:
        raise DtypeError(f"the model takes {dtype}, got {x.dtype}; use x.to({dtype})")
    if x.dim() < 1 or tuple(x.shape[1:]) != row or x.shape[0] < 1:
        raise ShapeError(f"the model takes [rows, {', '.join(map(str, row))}], got {list(x.shape)}")
    check_encodable(x, scheme.frac_bits, "the input")
    check_limit(x, scheme)


class RemoteModel:
    """A model at another party, asked by this one: call it with a plain tensor, get the plain result.

    Only this party learns the result; A and S learn its shape. Raises on a call:
        DtypeError, ShapeError, NonFiniteError, FixedPointRangeError: a bad input; nothing was sent.
        BusyError: too many calls wait at the server. MaterialError: a prepared call that is void; it is dropped.
        RangeExceededError: a value between input and result left its range: no result, and A and S do not know.
        RefusedError: a weight of A's does not fit the number format.
        NetworkError and its kinds: the query ended; nothing of it was revealed, and the next call opens a new session.
    """

    def __init__(self, connection: Asker, name: str, scheme: Scheme):
        self.connection, self.name = connection, name
        self._scheme = scheme
        self._lock = threading.Lock()
        self._opened: dict[bytes, Opened] = {}
        self._live: Opened | None = None
        shelves = self._shelves()
        first = self._take_up(shelves[0]) if shelves else self._fresh()
        self.row, self.dtype = first.party.row, first.party.dtype

    def __repr__(self) -> str:
        return f"RemoteModel('{self.name}', rows of shape {self.row})"

    def check(self, x: torch.Tensor) -> None:
        """Raise what a call on x would raise for a bad input; nothing is sent."""
        check_input(x, self.row, self.dtype, self._scheme)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction for a batch x [rows, ...]; with prepared material of that shape, online phase only."""
        self.check(x)
        with self._lock:
            opened, calls, then = self._prepared_for(x)
            opened = opened or self._fresh()
            request = {"do": "predict", "shape": list(x.shape), "use": calls, "then": then}
            return self._run(opened, request, lambda: opened.party.predict(x, calls, then))

    def prepare(self, shape: int | tuple[int, ...], count: int = 1, progress: Callable[[], None] | None = None) -> None:
        """Do all that does not depend on the input, for `count` later calls with inputs of this shape.

        Args:
            shape: of a whole input [rows, ...], or its number of rows.
            progress: called after each of them.

        Raises:
            StoreFullError: they do not all fit the parties' disk budgets; says how many more do. What is there stays.
        """
        shape = (shape, *self.row) if isinstance(shape, int) else tuple(shape)
        if count < 1 or shape[0] < 1 or shape[1:] != self.row:
            raise ArgumentError(
                f"prepare takes [rows, {', '.join(map(str, self.row))}] and a count of at least one, "
                f"got {list(shape)} and {count}"
            )
        for left in range(count - 1, -1, -1):
            with self._lock:
                opened = self._fresh()
                reply = self._run(opened, {"do": "prepare", "shape": list(shape)}, lambda: self._prepare(opened, shape))
            if progress is not None:
                progress()
            if left and reply < left:
                raise StoreFullError(
                    f"{reply} more calls of {list(shape)} fit the parties' stores and {left} more were asked for; "
                    f"{count - left} were prepared"
                )

    def _prepare(self, opened: Opened, shape: tuple[int, ...]) -> int:
        """One prepared call; how many more have room. It counts once S has said that all have stored it."""
        kept = opened.party.prepare(torch.Size(shape))
        shelf = self.connection.store.shelf(opened.name, opened.binding)
        try:
            reply = opened.channel.request(opened.channel.patience)
            if reply.get("do") != "stored" or type(reply.get("more")) is not int:
                raise FrameError("the server does not say whether the material is stored")
        except BaseException:
            gone = {call for call, _, _ in kept}
            shelf.keep([call for call in shelf.calls() if call not in gone])
            raise
        size = sum(size for _, _, size in kept)
        return min(reply["more"], (shelf.store.budget - shelf.store.used) // max(1, size))

    def prepared(self) -> dict[tuple[int, ...], int]:
        """Shapes for which material is at hand, and how many calls it serves. A large batch is several calls."""
        counts: Counter[tuple[int, ...]] = Counter()
        for shelf in self._shelves():
            opened = self._opened.get(shelf.session)
            coming = {} if opened is None else opened.party.coming()
            counts.update({**shelf.calls(), **coming}.values())
        return dict(counts)

    def prepared_calls(self, shape: tuple[int, ...]) -> int:
        """How many inputs of this shape can be asked from material at hand."""
        with self._lock:
            opened = next(iter(self._opened.values()), None) or self._fresh()
            pieces = opened.party.pieces(torch.empty(shape, dtype=self.dtype, device="meta"))
        wanted, at_hand = [tuple(piece) for piece in pieces], self.prepared()
        return min(at_hand.get(piece, 0) // wanted.count(piece) for piece in set(wanted))

    def close(self) -> None:
        """End the sessions. Unused material stays in a lasting store, and is dropped on all sides from another."""
        for opened in list(self._opened.values()):
            with suppress(SectorchError):
                opened.channel.tell({"do": "close"})
            self._forget(opened)
            opened.channel.close()

    def _shelves(self) -> list[Shelf]:
        """This client's material of the model, the oldest sessions' first."""
        wanted = {
            "client": self.connection.name, "model": self.name, "scheme": repr(self._scheme),
            "authority": self.connection.authority,
        }  # fmt: skip
        reading = {name for name, opened in self._opened.items() if opened.party.coming()}
        return [s for s in self.connection.store.shelves(**wanted) if len(s) or s.session in reading]

    def _prepared_for(self, x: torch.Tensor) -> tuple[Opened | None, list[int], list[int]]:
        """A session with prepared calls for each piece of the batch; the calls, and those of a next such batch."""
        for shelf in self._shelves():
            at_hand = dict(shelf.calls())
            opened = self._opened.get(shelf.session)
            if opened is not None:
                at_hand |= opened.party.coming()
            if sum(shape[0] for shape in at_hand.values()) < x.shape[0]:
                continue
            opened = opened or self._take_up(shelf)
            pieces = [tuple(piece) for piece in opened.party.pieces(x)]
            calls = _chosen(pieces, at_hand)
            if calls:
                return opened, calls, _chosen(pieces, {c: s for c, s in at_hand.items() if c not in calls})
        return None, [], []

    def _take_up(self, shelf: Shelf) -> Opened:
        try:
            opened = open_session(self.connection, [self.name], self._scheme, shelf)
        except MaterialError as error:
            count = len(shelf)
            shelf.drop()
            raise MaterialError(
                f"{count} prepared calls of '{self.name}' are void and were dropped, none was used: {error}; "
                f"asking again works without them"
            ) from None
        self._opened[opened.name] = opened
        return opened

    def _fresh(self) -> Opened:
        if self._live is None:
            self._live = open_session(self.connection, [self.name], self._scheme)
            self._opened[self._live.name] = self._live
        return self._live

    def _run(self, opened: Opened, request: dict, work: Callable[[], Any]) -> Any:
        try:
            return run(opened, request, work)
        except RangeExceededError:
            raise
        except BaseException:
            self._forget(opened)
            raise

    def _forget(self, opened: Opened) -> None:
        self._opened.pop(opened.name, None)
        opened.party.close()
        if self._live is opened:
            self._live = None
        if not self.connection.store.lasting:
            self.connection.store.forget(opened.name)


def _chosen(pieces: list[tuple[int, ...]], at_hand: dict[int, tuple[int, ...]]) -> list[int]:
    """A prepared call for each piece, the first ones first, or none at all."""
    left, calls = dict(sorted(at_hand.items())), []
    for piece in pieces:
        call = next((call for call, shape in left.items() if shape == piece), None)
        if call is None:
            return []
        calls.append(call)
        del left[call]
    return calls
