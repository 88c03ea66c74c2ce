"""One session over a link: what a `PartyRuntime` sends and receives through, with back-pressure and a deadline.

What waits here to be read is bounded by what this party knows, whatever the sender says. Between calls, and in a call
until this party has worked out its shapes, there is room for `AHEAD` and one part; then it tells the peer to go on, and
until the call is over there is room for a window and the largest message that the peer has to send in it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, overload

from ... import errors
from ...choreography.run.frames import PART_BYTES, Frame, Kind, pack, unpack
from ...errors import AbortedError, FrameError, IdentityError, PeerLostError, SectorchError
from .. import messages
from ..messages import ControlMessage, message_form
from ..names import readable

# How long a party waits for another one, in one place: for each step, and at the server for each call.
#
# A step's time begins anew with what the peer says. Clients wait for a server that waits for others, so that its beats
# are words to them. The server waits for the client alone: a beat brings it nothing, and all its waits of one call have
# a limit together, which grows with what has come and gone, as a large call over a slow line takes its time.


SILENCE = 60.0
"""Seconds without a word after which a party counts as hanging."""
CALL = 600.0
"""Seconds that the server waits for one party in one call, beside those of `PACE`."""
PACE = 1 << 20
"""Bytes a second that a party may at least be expected to send and take."""


class Deadline:
    """For the waits of one end of a session's channel.

    Args:
        peer: whom this end waits for.
        silence: seconds of a step; `SILENCE` if None.
        call: seconds of all waits of a call together, for a peer whose beats are no words; None for the others.
    """

    def __init__(self, peer: str, silence: float | None = None, call: float | None = None):
        self.silence = SILENCE if silence is None else silence
        self._peer, self._call = peer, call
        self._heard = time.monotonic()
        # Each counter has one writer: the link's pump that of bytes, the session's thread the others.
        self._moved = self._moved_before = 0
        self._spent: float | None = None

    def heard(self, beat: bool) -> None:
        """The peer said something."""
        if not beat or self._call is None:
            self._heard = time.monotonic()

    def moved(self, count: int) -> None:
        """So many bytes came from the peer, or were taken by it."""
        self._moved += count

    def begin(self) -> None:
        """A call begins."""
        self._spent = None if self._call is None else 0.0
        self._moved_before = self._moved

    def rest(self) -> None:
        """The call is over."""
        self._spent = None

    @contextmanager
    def waiting(self, silence: float | None) -> Iterator[Wait]:
        """A wait of a step; without `silence` it may be long, but for the call's limit."""
        wait = Wait(self, silence)
        try:
            yield wait
        finally:
            if self._spent is not None:
                self._spent += time.monotonic() - wait.since

    def left(self, since: float, silence: float | None) -> float | None:
        """Seconds that a wait may still take; None where it may take any time.

        Raises:
            PeerLostError: none.
        """
        now, ends = time.monotonic(), []
        if silence is not None:
            ends.append((max(since, self._heard) + silence, f"has said nothing for {silence:.0f} s; it may hang"))
        if self._spent is not None and self._call is not None:
            allowed = self._call + (self._moved - self._moved_before) / PACE
            ends.append(
                (since + allowed - self._spent, f"keeps a call waiting for more than {self._call:.0f} s in all")
            )
        for end, said in ends:
            if now >= end:
                raise PeerLostError(f"{self._peer} {said}")
        return min(end for end, _ in ends) - now if ends else None


class Wait:
    """One wait; see `Deadline.waiting`."""

    def __init__(self, deadline: Deadline, silence: float | None):
        self.since = time.monotonic()
        self._deadline, self._silence = deadline, silence

    def left(self) -> float | None:
        """As of `Deadline.left`."""
        return self._deadline.left(self.since, self._silence)


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


def copy_error(error: SectorchError) -> SectorchError:
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
        return relayed_error(getattr(errors, kind), said)
    return AbortedError(said if kind == "AbortedError" and said else text)


def relayed_error(kind: type[SectorchError], said: str) -> SectorchError:
    """An error of another party's. One about identities says so: whoever stands in between may want a key pinned."""
    return kind(said + RELAYED if issubclass(kind, IdentityError) and not said.endswith(RELAYED) else said)


class Channel:
    """One session's frames to and from one peer.

    Raises from every wait:
        PeerLostError: the connection ended, or the peer kept this party waiting for too long (`Deadline`).
        AbortedError, or the error that the peer named: it gave the session up.
    """

    def __init__(self, link: Link, session: bytes, deadline: Deadline | None = None):
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
            messages.parse_message(messages.Go, asked)
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
            raise copy_error(self._failure or PeerLostError("the session was closed"))
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
        return messages.parse_message(kind, json.loads(request))

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
                raise copy_error(self._failure)
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
        held: dict[int, tuple[Link, list[bytes]]] = {}
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
            raise copy_error(self._failure)
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
                    raise copy_error(self._failure)
                self._changed.wait(wait.left())


# What waits to go over a connection: bounded, and written by whoever adds to it while the connection takes it.
#
# A thread that sends finds nothing waiting most of the time, and then writes itself: no other thread has to wake up. A
# write never waits. What the connection does not take at once, and what others have added meanwhile, is left to a
# thread that does nothing else (`Stream`).


OUTBOX_BYTES = 16 << 20
TOGETHER_BYTES = 256 << 10
"""Small frames that wait for the connection go as one message of up to this size."""
URGENT_BYTES = 4 << 20
"""Refusals and credits that may wait beyond the outbox for a peer that takes nothing."""
STUCK = 20.0
"""Seconds after which a connection that takes nothing more counts as lost."""
IN_TURN = 8
"""Messages that a sender writes of others' before it leaves the rest to the connection's own thread."""


class Outbox:
    """What waits for `peer`, from all threads."""

    def __init__(self, peer: str):
        self._peer = peer
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting: deque[bytes] = deque()
        self._write: Callable[[bytes], bool] | None = None
        self._writing = self._handed_over = False
        self._changed = threading.Semaphore(0)
        self._closed: SectorchError | None = None
        self.queued = self.taken = 0

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self.queued - self.taken

    def put(self, data: bytes, urgent: bool = False) -> None:
        """Add a packed frame, and write what waits; waits itself while too much does, unless it is `urgent`.

        Raises:
            PeerLostError: the connection has taken nothing for `STUCK` seconds. Or what it was closed with.
        """
        with self._lock:
            while not urgent and self.size > OUTBOX_BYTES and self._closed is None:
                if not self._room.wait(STUCK):
                    raise PeerLostError(f"{self._peer} has taken nothing for {STUCK:.0f} s; it may hang")
            if self._closed is not None:
                raise copy_error(self._closed)
            self.queued += len(data)
            self._waiting.append(data)
            if self._writing or self._write is None:
                return
            self._writing = True
        self.go_on()

    def go_on(self) -> None:
        """Write what waits, as the one who may. `left` tells when that has to be gone on with."""
        for _ in range(IN_TURN):
            if (data := self.take(last=True)) is None:
                return
            if self._write is None or not self._write(data):
                break
        with self._lock:
            self._handed_over = True
        self._changed.release()

    def take(self, last: bool = False) -> bytes | None:
        """What goes next, small frames together; None if nothing waits, and then whoever writes is done (`last`)."""
        with self._lock:
            if not self._waiting:
                self._writing = self._writing and not last
                if self._closed is not None:
                    self._changed.release()
                return None
            data = self._waiting.popleft()
            size = len(data)
            if self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                together = [data]
                while self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                    together.append(self._waiting.popleft())
                    size += len(together[-1])
                data = b"".join(together)
            self.taken += size
            self._room.notify_all()
        return data

    def left(self, seconds: float) -> bool:
        """Whether, within that time, a sender left the writing to whoever calls this; see `go_on`."""
        self._changed.acquire(timeout=seconds)
        with self._lock:
            handed_over, self._handed_over = self._handed_over, False
        return handed_over

    def begin(self, write: Callable[[bytes], bool]) -> None:
        """What waits and what comes is given to `write`, which says whether the connection can take more now."""
        with self._lock:
            self._write, self._writing = write, True
        self.go_on()

    def close(self, reason: SectorchError) -> None:
        """Take nothing more; what waits still goes."""
        with self._lock:
            self._closed = reason
            self._room.notify_all()
        self._changed.release()

    @property
    def over(self) -> bool:
        """Whether it is closed and everything is out."""
        with self._lock:
            return self._closed is not None and not self._waiting and not self._writing

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting


# One connection between a client and the server: frames in both directions, sorted into the channels of sessions.
#
# A link knows nothing of TLS: the stream that carries it feeds it what came (`pump`) and takes what goes (`outbox`).
# What is queued is bounded on both sides without ever holding up the connection: in each direction of a session, a
# message is begun only while the receiver has not used less than a window's bytes of earlier ones; it says what it used
# with credits. The receiver does not rely on that: what waits in a session, and in all that are idle, has bounds of its
# own (`channel.py`).


IDLE_BYTES = 128 << 20
"""What may wait in all sessions of a link together in which this party expects nothing."""
RELAYED_BYTES = PART_BYTES + (1 << 18)
"""The largest frame that is handed on: one part of a message, sealed, and names."""


class Link:
    """The connection to `peer`.

    Args:
        on_request: called with requests that belong to no session.
        silence, call: of the deadlines of its sessions; see `Deadline`.
        certificate: the fingerprint of the peer's, where this end knows it.
        on_close: called once when the link fails or is left; a last word may still be on its way then.
    """

    def __init__(
        self,
        peer: str,
        on_request: Callable[[Link, dict], None],
        silence: float | None = None,
        call: float | None = None,
        certificate: str = "",
        on_close: Callable[[], None] = lambda: None,
    ):
        self.peer, self.certificate = peer, certificate
        self._on_request, self._on_close = on_request, on_close
        self._waits = silence, call
        self.outbox = Outbox(peer)
        self._lock = threading.Lock()
        self._channels: dict[bytes, Channel] = {}
        self._onward: dict[bytes, tuple[Link, threading.Event]] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self.closed: SectorchError | None = None
        self._leaving = False

    def open(self, session: bytes, kind: type[Channel] = Channel, peer: str = "") -> Channel:
        """This end of a session.

        Args:
            kind: of channel. peer: who is at its other end, where that is somebody beyond this link's.

        Raises:
            FrameError: it is open already.
        """
        with self._lock:
            if self.closed is not None:
                raise copy_error(self.closed)
            if session in self._channels:
                raise FrameError("that session is open already")
            deadline = Deadline(f"'{peer}'" if peer else self.peer, *self._waits)
            channel = self._channels[session] = kind(self, session, deadline)
        return channel

    def forward(self, session: bytes, to: Link, ready: threading.Event) -> None:
        """Frames of this session go to another link as they come, once it is ready; see `part`."""
        with self._lock:
            self._onward[session] = to, ready

    def part(self, session: bytes) -> None:
        """A session is over here: it is not forwarded any more, and its channel is closed."""
        with self._lock:
            self._onward.pop(session, None)
            channel = self._channels.get(session)
        if channel is not None:
            channel.close()

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return len(self._channels)

    def forget(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(channel.session) is channel:
                del self._channels[channel.session]

    def check_idle(self) -> None:
        """Raise FrameError if too much waits in the sessions in which this party expects nothing."""
        with self._lock:
            waiting = sum(channel.waiting for channel in self._channels.values() if channel.idle)
        if waiting > IDLE_BYTES:
            raise FrameError(f"{self.peer} sends more to idle sessions than is kept of them")

    def send(self, data: bytes, urgent: bool = False) -> None:
        """Queue a packed frame; waits while too much is queued, unless it is `urgent`.

        Raises:
            PeerLostError: the connection is closed, or has taken nothing for `STUCK` seconds, or nothing of so much
                that is urgent; then it is closed.
        """
        if urgent and self.outbox.size > OUTBOX_BYTES + URGENT_BYTES:
            self.close(PeerLostError(f"{self.peer} takes nothing of what it is told"))
        self.outbox.put(data, urgent)

    def tell(
        self, message: ControlMessage | Mapping[str, Any], session: bytes = bytes(16), urgent: bool = False
    ) -> None:
        """Send a message, of a session or of none; see `send`."""
        payload = json.dumps(message_form(message)).encode()
        self.send(pack(Frame(Kind.CONTROL, session, label="request", payload=payload)), urgent)

    def refuse(self, session: bytes, reason: str) -> None:
        """Tell the peer that a session is over here."""
        try:
            self.send(pack(Frame(Kind.ABORT, session, payload=reason.encode()[:600])), urgent=True)
        except SectorchError:
            return

    def pump(self, incoming: Iterable[bytes | memoryview]) -> None:
        """Sort what comes until it ends; then every session of the link fails with the reason.

        After `leave`, what comes is dropped until the peer ends the connection.
        """
        reason: SectorchError = PeerLostError(f"the connection to {self.peer} was closed")
        try:
            for data in incoming:
                if self._leaving:
                    continue
                if self.closed is not None:
                    break
                for frame in unpack(data):
                    self._route(frame)
        except SectorchError as error:
            reason = error
        except Exception as error:
            reason = PeerLostError(f"the connection to {self.peer} broke ({error or type(error).__name__})")
        self.close(reason)

    def _route(self, frame: Frame) -> None:
        if frame.kind == Kind.CONTROL and frame.session == bytes(16):
            self._on_request(self, _request(frame))
            return
        if frame.kind == Kind.ABORT and frame.session == bytes(16):
            raise error_of(bytes(frame.payload[:600]).decode(errors="replace"))
        channel = self._channels.get(frame.session)
        onward = self._onward.get(frame.session)
        if channel is not None:
            channel.take(frame, _request)
        elif onward is not None:
            _hand_on(frame, *onward)
        elif frame.kind in (Kind.DATA, Kind.CONTROL):
            self._foreign(frame.session)

    def _foreign(self, session: bytes) -> None:
        """Frames of a session that is not open here, or no longer: the peer is told once, and nothing is kept."""
        if session not in self._refused:
            self._refused[session] = None
            while len(self._refused) > 256:
                self._refused.popitem(last=False)
            self.refuse(session, "FrameError: that session is not open here")

    def leave(self) -> None:
        """Close this end when all that is queued is out; the peer, having read it, ends the connection (`pump`)."""
        self._leaving = True
        self.close(PeerLostError("this connection was closed"))

    def close(self, reason: SectorchError) -> None:
        """Fail all sessions of the link; frames that are queued may still go out."""
        with self._lock:
            if self.closed is not None:
                return
            self.closed = reason
            channels = list(self._channels.values())
        if isinstance(reason, FrameError):
            with suppress(SectorchError):
                self.outbox.put(farewell(reason), urgent=True)
        self.outbox.close(reason)
        for channel in channels:
            channel.fail(reason)
        self._on_close()


def _hand_on(frame: Frame, to: Link, ready: threading.Event) -> None:
    """Waits while too much is queued for the other link; what comes for one that is closed is dropped.

    Nothing of a client's is urgent to another one, whose connection it would end. One that takes nothing is lost: it
    would hold up whoever sends to it, at each frame.

    Raises:
        FrameError: a frame larger than the parts in which messages go.
    """
    if frame.size > RELAYED_BYTES:
        raise FrameError(f"a frame of {frame.size} bytes for another party; at most {RELAYED_BYTES}")
    ready.wait()
    try:
        to.send(pack(frame))
    except SectorchError as error:  # whatever that one was closed with: the sender's connection goes on
        to.close(error)


def _request(frame: Frame) -> dict:
    try:
        request = json.loads(bytes(frame.payload))
    except (ValueError, RecursionError):
        raise FrameError("a request is not JSON") from None
    if not isinstance(request, dict):
        raise FrameError("a request is not an object")
    return request


def farewell(reason: SectorchError) -> bytes:
    """A frame that says why a connection ends."""
    return pack(Frame(Kind.ABORT, bytes(16), payload=f"{type(reason).__name__}: {reason}".encode()[:600]))
