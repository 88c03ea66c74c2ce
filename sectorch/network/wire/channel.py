"""One session over a link: what a `PartyRuntime` sends and receives through, with back-pressure and a deadline.

What waits here to be read is bounded by what this party knows, whatever the sender says. Between calls, and in a call
until this party has worked out its shapes, there is room for `AHEAD` and one part; then it tells the peer to go on, and
until the call is over there is room for a window and the largest message that the peer has to send in it.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, overload

from ... import errors
from ...choreography.run.frames import PART_BYTES, Frame, Kind, pack
from ...errors import (
    AbortedError,
    FrameError,
    IdentityError,
    PeerLostError,
    SectorchError,
)
from .. import messages
from ..names import readable
from .deadline import Deadline

T = TypeVar("T")
WINDOW = 16 << 20
"""Bytes of unused messages beyond which no further one is begun."""
CREDIT = 4 << 20
"""Bytes of which a receiver says at once that it has used them."""
AHEAD = 2 << 20
"""Bytes that a party may send of a call before the receiver says that it is ready for it."""
IDLE = 4 << 20
"""Bytes that a session keeps of what comes before it is ready: `AHEAD`, one part, and names."""
LARGEST = 1 << 30
"""Bytes of one message for which there may be room beyond the window."""
FRAME = 1 << 10
"""Bytes by which a frame that waits counts more than it has on the wire: about what it takes beside its payload."""
TOGETHER = 32 << 10
"""Bytes of frames that nobody can be waiting for yet which go as one."""
REQUESTS = 64
REQUEST_BYTES = 1 << 20
"""How many requests of a session may wait to be answered, and their bytes together."""

RELAYED = " (as the server relays it)"
_KINDS = (
    "BusyError", "MaterialError", "StoreFullError", "IdentityError", "KeyAgreementError", "UnknownModelError",
    "RefusedError", "ReceiptError", "QuotaError", "QuotaFileError", "SessionOverError", "FalseDealingError",
)  # fmt: skip
"""Errors that keep their type on the way to another party; all others become an AbortedError."""


def again(error: SectorchError) -> SectorchError:
    """A fresh error of the same kind and text, to be raised at another place; the others are told the same of it."""
    found = type(error)(str(error))
    if (told := getattr(error, "told", None)) is not None:
        vars(found)["told"] = told
    return found


def error_of(text: str) -> SectorchError:
    """What another party said of an error ("Type: text"), as an error here."""
    text = readable(text)
    kind, _, said = text.partition(": ")
    if kind in _KINDS:
        return relayed(getattr(errors, kind), said)
    return AbortedError(said if kind == "AbortedError" and said else text)


def relayed(kind: type[SectorchError], said: str) -> SectorchError:
    """An error of another party's. One about identities says so: whoever stands in between may want a key pinned."""
    return kind(said + RELAYED if issubclass(kind, IdentityError) and not said.endswith(RELAYED) else said)


class Peer(Protocol):
    """What a channel needs of the link that carries it (`link.Link`)."""

    peer: str
    closed: SectorchError | None

    def send(self, data: bytes, urgent: bool = False) -> None: ...

    def tell(self, message: messages.ControlMessage | Mapping[str, Any], session: bytes = ...) -> None: ...

    def refuse(self, session: bytes, reason: str) -> None: ...

    def forget(self, channel: Channel) -> None: ...

    def check_idle(self) -> None: ...


class Channel:
    """One session's frames to and from one peer.

    Raises from every wait:
        PeerLostError: the connection ended, or the peer kept this party waiting for too long (`Deadline`).
        AbortedError, or the error that the peer named: it gave the session up.
    """

    def __init__(self, link: Peer, session: bytes, deadline: Deadline | None = None):
        self.link, self.session = link, session
        self.deadline = deadline or Deadline(link.peer)
        # Each counter has one writer: the link's pump those of what came, this session's thread the others.
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        self._came = self._used = self._credited = 0
        self._sent = self._credit_got = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._room: int | None = None
        self._requests: deque[bytes] = deque()
        self._request_bytes = 0
        # Calls that this side has begun, those for which the peer is ready, and where it waits for that.
        self._begun = self._ready = self._ready_at = 0
        self._failure: SectorchError | None = None
        self._on_failure: list[Callable[[SectorchError], None]] = []
        self._changed = threading.Condition()

    # What came.

    def take(self, frame: Frame, read: Callable[[Frame], dict]) -> None:
        """Keep a frame of this session that came.

        Raises:
            FrameError: the peer sends more than it may.
        """
        self._heard(frame)
        if frame.kind == Kind.DATA:
            self._keep(frame)
            return
        with self._changed:
            if frame.kind == Kind.CONTROL:
                self._asked(frame, read)
            elif frame.kind == Kind.CREDIT:
                if frame.number > self._sent - self._credit_got:
                    raise FrameError(f"{self.link.peer} has used more than it was sent")
                self._credit_got += frame.number
                self.deadline.moved(frame.number)
            self._changed.notify_all()
        if frame.kind == Kind.ABORT:
            self.fail(error_of(bytes(frame.payload[:600]).decode(errors="replace")))

    def _heard(self, frame: Frame) -> None:
        """What came may count as a word of the peer's."""
        self.deadline.heard(beat=frame.kind == Kind.CREDIT and not frame.number)

    def _keep(self, frame: Frame) -> None:
        room, size = self._room, frame.size + FRAME
        if self._failure is not None:
            return
        if self.waiting + size > (IDLE if room is None else room):
            self._drop()
            raise FrameError(f"{self.link.peer} sends more than it was given room for")
        if 2 * len(frame.payload) < memoryview(memoryview(frame.payload).obj).nbytes:
            frame = replace(frame, payload=bytes(frame.payload))  # it would keep what came together with it
        self._came += size
        self.deadline.moved(size)
        self._frames.put(frame)
        if room is None:
            self.link.check_idle()

    def _asked(self, frame: Frame, read: Callable[[Frame], dict]) -> None:
        if len(frame.payload) > REQUEST_BYTES:
            raise FrameError(f"{self.link.peer} sends a request of {len(frame.payload)} bytes; at most {REQUEST_BYTES}")
        asked = read(frame)
        if asked.get("do") == "go":
            messages.read(messages.Go, asked)
            self._ready += 1
        elif len(self._requests) >= REQUESTS or self._request_bytes + len(frame.payload) > REQUEST_BYTES:
            raise FrameError(f"{self.link.peer} sends more requests than are answered")
        else:
            self._requests.append(bytes(frame.payload))
            self._request_bytes += len(frame.payload)

    @property
    def waiting(self) -> int:
        """Bytes that have come and that nobody has read."""
        return self._came - self._used

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes of messages that came, and of those that this end has sent or holds back."""
        return self._came, self._sent

    @property
    def idle(self) -> bool:
        """Whether this party expects nothing of a call now."""
        return self._room is None

    def expect(self, largest: int, room: int | None = None) -> None:
        """From now on, and until `rest`, there is room for a window and a message of so many bytes.

        Args:
            room: for so many bytes, where that is less: for all that the peer has to send.
        """
        largest = min(largest, LARGEST)
        most = WINDOW + largest + (largest // PART_BYTES + 2) * (FRAME + FRAME)
        self._room = most if room is None else max(IDLE, min(room, most))
        self.tell(messages.Go())

    def rest(self) -> None:
        """The call is over."""
        self._room = None
        self.deadline.rest()

    def fail(self, failure: SectorchError) -> None:
        with self._changed:
            known, self._failure = self._failure, self._failure or failure
            self._changed.notify_all()
        if known is None:
            self._frames.put(None)
            for heard in list(self._on_failure):
                heard(failure)

    def on_failure(self, heard: Callable[[SectorchError], None]) -> None:
        """Call this when the session fails here, or at once where it has: whoever waits for another one hears it."""
        with self._changed:
            self._on_failure.append(heard)
            failure = self._failure
        if failure is not None:
            heard(failure)

    def receive(self) -> Frame:
        """The next frame."""
        with self.deadline.waiting(self.deadline.silence) as wait:
            while True:
                try:
                    frame = self._frames.get(timeout=wait.left())
                    break
                except Empty:
                    continue  # a word of the peer's may have come meanwhile
        if frame is None:
            self._frames.put(None)  # whoever asks again gets the same answer
            raise again(self._failure or PeerLostError("the session was closed"))
        self._used += frame.size + FRAME
        if self._used - self._credited >= CREDIT:
            count, self._credited = self._used - self._credited, self._used
            self._credit(count)
        return frame

    @property
    def ended(self) -> bool:
        """Whether the session was ended, by anybody, or the connection was lost."""
        return self._failure is not None

    @overload
    def request(self, kind: type[T], silence: float | None = None) -> T: ...
    @overload
    def request(self, kind: Any, silence: float | None = None) -> Any: ...
    def request(self, kind: Any, silence: float | None = None) -> Any:
        """The next message of this session, of a declared type; without `silence` it may be long in coming.

        Raises:
            FrameError: what came is of another type.
        """
        with self._changed:
            self._wait(lambda: self._requests, silence)
            request = self._requests.popleft()
            self._request_bytes -= len(request)
        return messages.read(kind, json.loads(request))

    # What goes.

    def send(self, parts: Iterable[bytes], later: bool = False) -> None:
        """Send the frames of one message, once there is room for it.

        Args:
            later: it may be held back until there are `TOGETHER` bytes, the next message, or `flush`.
        """
        if self._sent - self._credit_got > WINDOW:
            self.flush()
            with self._changed:
                self._wait(lambda: self._sent - self._credit_got <= WINDOW, self.deadline.silence)
        for part in parts:
            if self._too_early():
                self.flush()
                with self._changed:
                    self._wait(lambda: not self._too_early(), self.deadline.silence)
            if self._failure is not None:
                raise again(self._failure)
            self._sent += len(part) + FRAME
            self._held.append(part)
            self._held_bytes += len(part)
            if self._held_bytes >= TOGETHER:
                self.flush()
        if not later:
            self.flush()

    @property
    def crowded(self) -> bool:
        """Whether the peer has not used half a window of what it was sent."""
        return self._sent - self._credit_got > WINDOW // 2

    def flush(self) -> None:
        """Send what was held back."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self.link.send(held[0] if len(held) == 1 else b"".join(held))

    def flush_together(self, others: Sequence[Channel]) -> None:
        """The same for several channels: what goes over one link goes as one."""
        held: dict[int, tuple[Peer, list[bytes]]] = {}
        for channel in (self, *others):
            if channel._held:
                held.setdefault(id(channel.link), (channel.link, []))[1].extend(channel._held)
                channel._held, channel._held_bytes = [], 0
        for link, parts in held.values():
            with suppress(PeerLostError):  # each session hears of it where it waits next
                link.send(parts[0] if len(parts) == 1 else b"".join(parts))

    def _too_early(self) -> bool:
        return self._ready < self._begun and self._sent >= self._ready_at

    def tell(self, message: messages.ControlMessage | Mapping[str, Any]) -> None:
        """Send a message of this session."""
        self.link.tell(message, self.session)

    def begin(self) -> None:
        """A call begins: only `AHEAD` bytes of it are sent until the peer has said that it is ready (`expect`)."""
        self._begun += 1
        self.deadline.begin()
        self._ready_at = self._sent + AHEAD

    def beat(self) -> None:
        """Tell the peer that this side is alive, though it has nothing to send. Raises what the session failed with."""
        if self._failure is not None:
            raise again(self._failure)
        self._credit(0)

    def _credit(self, count: int) -> None:
        self.link.send(pack(Frame(Kind.CREDIT, self.session, number=count)), urgent=True)

    # The end.

    def abort(self, reason: str) -> None:
        """Tell the other end that the session is over, and why; the reason holds no secret."""
        self.link.refuse(self.session, reason)

    def close(self) -> None:
        """Forget the session here; what is still queued of it is dropped."""
        self.link.forget(self)
        with self._changed:
            self._failure = self._failure or PeerLostError("the session was closed")
            self._requests.clear()
            self._changed.notify_all()
        self._drop()
        self._frames.put(None)

    def _drop(self) -> None:
        with suppress(Empty):
            while True:
                self._frames.get_nowait()

    def _wait(self, ready: Callable[[], object], silence: float | None) -> None:
        """Called with the condition held."""
        with self.deadline.waiting(silence) as wait:
            while not ready():
                if self._failure is not None:
                    raise again(self._failure)
                self._changed.wait(wait.left())
