"""A connection between a client and the server, and the sessions that it carries.

- `PeerLink`: one connection. It sorts incoming frames into the channels of sessions, and forwards those between others.
- `Channel`: one session's frames to and from the peer, with back-pressure; a `PartyRuntime` sends through it.
- `Outbox`: the frames that wait to be written to the connection.
- `Deadline`: how long a party waits for its peer.

Memory is bounded at the receiver, whatever the sender does. Between calls, and in a call until this party knows its
shapes, a channel has room for `AHEAD` bytes and one part. Then `grant_credit` tells the peer to go on, and until
`end_call` there is room for a window and the largest message that the peer has to send in the call. At the sender, a
message is begun only while the receiver has less than a window of earlier ones unread, which it reports by credits.

A link knows nothing of TLS: the stream that carries it feeds it incoming bytes (`pump`) and writes its `outbox`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, overload

from ... import errors
from ...choreography.run.frames import PART_BYTES, Frame, Kind, pack, unpack
from ...errors import AbortedError, FrameError, IdentityError, PeerLostError, SectorchError
from .. import messages
from ..messages import ControlMessage, message_form
from ..names import readable

SILENCE = 60.0
"""Seconds of silence after which a party counts as lost."""
CALL = 600.0
"""Seconds that the server waits for one party in one call, in addition to the time that `PACE` allows."""
PACE = 1 << 20
"""Bytes a second that a party is expected to send and take at least."""


class Deadline:
    """How long one end of a channel waits for its peer: in each step, and at the server in each call.

    A step's time starts again with each frame of the peer. A client waits for a server that may itself wait for others,
    so to the client a heartbeat counts as activity. The server waits for the client alone, so there a heartbeat does
    not count, and all waits of one call have a common limit. It grows with the bytes that were carried, since a large
    call over a slow line takes long.

    Args:
        peer: the peer's name, for errors.
        silence: seconds of a step; `SILENCE` if None.
        call: seconds of all waits of a call; None sets no limit, and counts heartbeats as activity.
    """

    def __init__(self, peer: str, silence: float | None = None, call: float | None = None):
        self.silence = SILENCE if silence is None else silence
        self._peer, self._call = peer, call
        self._heard = time.monotonic()
        # Each counter has one writer: the link's reader that of bytes, the session's thread the others.
        self._moved = self._moved_before = 0
        self._spent: float | None = None

    def note_frame(self, beat: bool) -> None:
        """Record that a frame came from the peer."""
        if not beat or self._call is None:
            self._heard = time.monotonic()

    def add_bytes(self, count: int) -> None:
        """Record bytes that came from the peer, or that it has read."""
        self._moved += count

    def begin_call(self) -> None:
        """Start the limit of a call."""
        self._spent = None if self._call is None else 0.0
        self._moved_before = self._moved

    def end_call(self) -> None:
        """End the limit of a call."""
        self._spent = None

    @contextmanager
    def start_wait(self, silence: float | None) -> Iterator[Callable[[], float | None]]:
        """Time a step's wait in the block, with `remaining` of that wait as a function.

        Args:
            silence: seconds of the step; None applies the call's limit only.
        """
        since = time.monotonic()
        try:
            yield lambda: self.remaining(since, silence)
        finally:
            if self._spent is not None:
                self._spent += time.monotonic() - since

    def remaining(self, since: float, silence: float | None) -> float | None:
        """Seconds that a wait may still take; None where it has no limit.

        Raises:
            PeerLostError: the time is over.
        """
        now, ends = time.monotonic(), []
        if silence is not None:
            ends.append((max(since, self._heard) + silence, f"has said nothing for {silence:.0f} s; it may hang"))
        if self._spent is not None and self._call is not None:
            allowed = self._call + (self._moved - self._moved_before) / PACE
            ends.append(
                (since + allowed - self._spent, f"keeps a call waiting for more than {self._call:.0f} s in all")
            )
        for end, why in ends:
            if now >= end:
                raise PeerLostError(f"{self._peer} {why}")
        return min(end for end, _ in ends) - now if ends else None


T = TypeVar("T")
WINDOW = 16 << 20
"""Bytes of unread messages beyond which the sender begins no further one."""
CREDIT = 4 << 20
"""Bytes after which a receiver reports what it has read."""
AHEAD = 2 << 20
"""Bytes of a call that a party may send before the receiver grants credit for it."""
IDLE = 4 << 20
"""Bytes that a session buffers before it grants credit: `AHEAD`, one part, and labels."""
LARGEST = 1 << 30
"""Bytes of one message for which credit beyond the window can be granted."""
FRAME = 1 << 10
"""Bytes that each buffered frame counts in addition to its size: about the memory that it takes beside its payload."""
TOGETHER = 32 << 10
"""Bytes of deferred frames (`send(later=True)`) that are sent together."""
REQUESTS = 64
REQUEST_BYTES = 1 << 20
"""Requests of a session that may wait to be answered, and their bytes together."""

RELAYED = " (as the server relays it)"
_KINDS = (
    "BusyError", "MaterialError", "StoreFullError", "IdentityError", "KeyAgreementError", "UnknownModelError",
    "RefusedError", "ReceiptError", "QuotaError", "QuotaFileError", "SessionOverError", "FalseDealingError",
)  # fmt: skip
"""Errors that keep their type at the other parties; all others become an AbortedError."""


def copy_error(error: SectorchError) -> SectorchError:
    """A new error of the same type, text and public reason, to be raised in another thread."""
    found = type(error)(str(error))
    if (told := getattr(error, "told", None)) is not None:
        vars(found)["told"] = told
    return found


def parse_error(text: str) -> SectorchError:
    """The error that another party named ("Type: text")."""
    text = readable(text)
    kind, _, content = text.partition(": ")
    if kind in _KINDS:
        return relayed_error(getattr(errors, kind), content)
    return AbortedError(content if kind == "AbortedError" and content else text)


def relayed_error(kind: type[SectorchError], text: str) -> SectorchError:
    """An error of another party, with a mark where it is about identities.

    The server relays these texts and could forge one that asks a user to pin a key.
    """
    return kind(text + RELAYED if issubclass(kind, IdentityError) and not text.endswith(RELAYED) else text)


class Channel:
    """One session's frames to and from one peer.

    Raises from every wait:
        PeerLostError: the connection ended, or the peer kept this party waiting too long (`Deadline`).
        AbortedError, or the error that the peer named: the peer ended the session.
    """

    def __init__(self, link: PeerLink, session: bytes, deadline: Deadline | None = None):
        self.link, self.session = link, session
        self.deadline = deadline or Deadline(link.peer)
        # Each counter has one writer: the link's reader those of incoming bytes, the session's thread the others.
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        self._received = self._read = self._credited = 0
        self._sent = self._credit_received = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._room: int | None = None
        self._requests: deque[bytes] = deque()
        self._request_bytes = 0
        # Calls that this side has begun; those for which the peer has granted credit; the byte at which to wait for it.
        self._begun = self._ready = self._ready_at = 0
        self._failure: SectorchError | None = None
        self._on_failure: list[Callable[[SectorchError], None]] = []
        self._changed = threading.Condition()

    # Incoming frames.

    def take(self, frame: Frame, read: Callable[[Frame], dict]) -> None:
        """Take an incoming frame of this session.

        Args:
            read: decodes the payload of a control frame.

        Raises:
            FrameError: the peer sends more than it may.
        """
        self._note_activity(frame)
        if frame.kind == Kind.DATA:
            self._queue(frame)
            return
        with self._changed:
            if frame.kind == Kind.CONTROL:
                self._take_control(frame, read)
            elif frame.kind == Kind.CREDIT:
                if frame.number > self._sent - self._credit_received:
                    raise FrameError(f"{self.link.peer} has used more than it was sent")
                self._credit_received += frame.number
                self.deadline.add_bytes(frame.number)
            self._changed.notify_all()
        if frame.kind == Kind.ABORT:
            self.fail(parse_error(bytes(frame.payload[:600]).decode(errors="replace")))

    def _note_activity(self, frame: Frame) -> None:
        """Mark the peer as alive; called for every frame received."""
        self.deadline.note_frame(beat=frame.kind == Kind.CREDIT and not frame.number)

    def _queue(self, frame: Frame) -> None:
        room, size = self._room, frame.size + FRAME
        if self._failure is not None:
            return
        if self.unread_bytes + size > (IDLE if room is None else room):
            self._drop()
            raise FrameError(f"{self.link.peer} sends more than it was given room for")
        if 2 * len(frame.payload) < memoryview(memoryview(frame.payload).obj).nbytes:
            frame.payload = bytes(frame.payload)  # a view would keep the whole buffer in memory
        self._received += size
        self.deadline.add_bytes(size)
        self._frames.put(frame)
        if room is None:
            self.link.check_idle()

    def _take_control(self, frame: Frame, read: Callable[[Frame], dict]) -> None:
        if len(frame.payload) > REQUEST_BYTES:
            raise FrameError(f"{self.link.peer} sends a request of {len(frame.payload)} bytes; at most {REQUEST_BYTES}")
        message = read(frame)
        if message.get("do") == "go":
            messages.parse_message(messages.Go, message)
            self._ready += 1
        elif len(self._requests) >= REQUESTS or self._request_bytes + len(frame.payload) > REQUEST_BYTES:
            raise FrameError(f"{self.link.peer} sends more requests than are answered")
        else:
            self._requests.append(bytes(frame.payload))
            self._request_bytes += len(frame.payload)

    @property
    def unread_bytes(self) -> int:
        """Bytes that were received and not read yet."""
        return self._received - self._read

    @property
    def byte_counts(self) -> tuple[int, int]:
        """Bytes of messages that were received, and of those that this end has sent or deferred."""
        return self._received, self._sent

    @property
    def idle(self) -> bool:
        """Whether no call has credit now."""
        return self._room is None

    def grant_credit(self, largest: int, room: int | None = None) -> None:
        """Until `end_call`, have room for a window and the largest message of a call, and tell the peer to go on.

        Args:
            largest: bytes of that message.
            room: bytes of all that the peer has to send, which limits the room further.
        """
        largest = min(largest, LARGEST)
        most = WINDOW + largest + (largest // PART_BYTES + 2) * (FRAME + FRAME)
        self._room = most if room is None else max(IDLE, min(room, most))
        self.tell(messages.Go())

    def end_call(self) -> None:
        """End a call: its credit and its limit of time."""
        self._room = None
        self.deadline.end_call()

    def fail(self, failure: SectorchError) -> None:
        """End the session here with this error: all waits raise it. The first failure counts."""
        with self._changed:
            known, self._failure = self._failure, self._failure or failure
            self._changed.notify_all()
        # Outside of the lock, as the callbacks may use this channel.
        if known is None:
            self._frames.put(None)
            for callback in list(self._on_failure):
                callback(failure)

    def on_failure(self, callback: Callable[[SectorchError], None]) -> None:
        """Call this function when the session fails here, or now if it has failed."""
        with self._changed:
            self._on_failure.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def receive(self) -> Frame:
        """The next frame."""
        frame = self._wait_for_frame() if self._frames.empty() else self._frames.get()
        if frame is None:
            self._frames.put(None)  # for the next call of `receive`
            raise copy_error(self._failure or PeerLostError("the session was closed"))
        self._read += frame.size + FRAME
        if self._read - self._credited >= CREDIT:
            count, self._credited = self._read - self._credited, self._read
            self._credit(count)
        return frame

    def _wait_for_frame(self) -> Frame | None:
        with self.deadline.start_wait(self.deadline.silence) as remaining:
            while True:
                with suppress(Empty):  # activity of the peer may have moved the deadline
                    return self._frames.get(timeout=remaining())

    @property
    def ended(self) -> bool:
        """Whether the session was ended by any party, or the connection was lost."""
        return self._failure is not None

    @overload
    def request(self, kind: type[T], silence: float | None = None) -> T: ...
    @overload
    def request(self, kind: Any, silence: float | None = None) -> Any: ...
    def request(self, kind: Any, silence: float | None = None) -> Any:
        """The next control message of this session.

        Args:
            kind: its declared type.
            silence: seconds to wait without activity of the peer; None waits without limit.

        Raises:
            FrameError: the message is of another type.
        """
        with self._changed:
            self._wait(lambda: self._requests, silence)
            request = self._requests.popleft()
            self._request_bytes -= len(request)
        return messages.parse_message(kind, json.loads(request))

    # Outgoing frames.

    def send(self, parts: Iterable[bytes], later: bool = False) -> None:
        """Send the frames of one message, once the peer has room for it.

        Args:
            later: whether it may be deferred until there are `TOGETHER` bytes, another message, or `flush`.
        """
        # Only the start of a message waits for the window: the receiver has room for a window and the largest message
        # beside it.
        if self._sent - self._credit_received > WINDOW:
            self.flush()
            with self._changed:
                self._wait(lambda: self._sent - self._credit_received <= WINDOW, self.deadline.silence)
        for part in parts:
            if self._waits_for_peer():
                self.flush()
                with self._changed:
                    self._wait(lambda: not self._waits_for_peer(), self.deadline.silence)
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
        """Whether the peer has more than half a window unread."""
        return self._sent - self._credit_received > WINDOW // 2

    def flush(self) -> None:
        """Send the deferred frames."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self.link.send(held[0] if len(held) == 1 else b"".join(held))

    def flush_together(self, others: Sequence[Channel]) -> None:
        """Send the deferred frames of several channels, together where they share a link."""
        held: dict[int, tuple[PeerLink, list[bytes]]] = {}
        for channel in (self, *others):
            if channel._held:
                held.setdefault(id(channel.link), (channel.link, []))[1].extend(channel._held)
                channel._held, channel._held_bytes = [], 0
        for link, parts in held.values():
            with suppress(PeerLostError):  # each session raises it at its next wait
                link.send(parts[0] if len(parts) == 1 else b"".join(parts))

    def _waits_for_peer(self) -> bool:
        return self._ready < self._begun and self._sent >= self._ready_at

    def tell(self, message: messages.ControlMessage | Mapping[str, Any]) -> None:
        """Send a message of this session."""
        self.link.tell(message, self.session)

    def begin_call(self) -> None:
        """Begin a call: only `AHEAD` bytes of it are sent until the peer calls `grant_credit`."""
        self._begun += 1
        self.deadline.begin_call()
        self._ready_at = self._sent + AHEAD

    def beat(self) -> None:
        """Send a heartbeat. Raises the session's failure, if any."""
        if self._failure is not None:
            raise copy_error(self._failure)
        self._credit(0)

    def _credit(self, count: int) -> None:
        self.link.send(pack(Frame(Kind.CREDIT, self.session, number=count)), urgent=True)

    def abort(self, reason: str) -> None:
        """Tell the peer that the session is over, and why; the reason must hold no secret (`abort_reason`)."""
        self.link.refuse(self.session, reason)

    def close(self) -> None:
        """Remove the session from the link; its buffered frames are dropped."""
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
        """Wait for a condition; called with `_changed` held."""
        with self.deadline.start_wait(silence) as remaining:
            while not ready():
                if self._failure is not None:
                    raise copy_error(self._failure)
                self._changed.wait(remaining())


OUTBOX_BYTES = 16 << 20
TOGETHER_BYTES = 256 << 10
"""Size up to which small frames are joined into one write."""
URGENT_BYTES = 4 << 20
"""Bytes of urgent frames (refusals, credits) that may wait beyond `OUTBOX_BYTES`."""
STUCK = 20.0
"""Seconds after which a connection that takes no bytes counts as lost."""
IN_TURN = 8
"""Writes that a sending thread does before it leaves the rest to the connection's own thread."""


class Outbox:
    """The bounded queue of frames to `peer`, filled by all threads.

    Mostly the queue is empty, and the thread that sends writes to the connection itself, so that no other thread has to
    wake up. Writes never block. Frames that the connection does not take at once, and frames that other threads added
    meanwhile, are left to the connection's writing thread (`Stream`).
    """

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
        """Bytes in the queue."""
        return self.queued - self.taken

    def put(self, data: bytes, urgent: bool = False) -> None:
        """Add a packed frame and write the queue; blocks while the queue is full, unless `urgent`.

        Raises:
            PeerLostError: the connection has taken nothing for `STUCK` seconds.
            SectorchError: the outbox was closed with it.
        """
        with self._lock:
            while not urgent and self.size > OUTBOX_BYTES and self._closed is None:
                if not self._room.wait(STUCK):
                    raise PeerLostError(f"{self._peer} has taken nothing for {STUCK:.0f} s; it may hang")
            if self._closed is not None:
                raise copy_error(self._closed)
            self.queued += len(data)
            self._waiting.append(data)
            # One thread writes at a time. Others leave their frame in the queue, which that thread finds before it
            # stops.
            if self._writing or self._write is None:
                return
            self._writing = True
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the queue; called by the one thread that has set `_writing`. Where the connection takes no more, hand
        over to the thread in `wait_for_handover`."""
        for _ in range(IN_TURN):
            if (data := self.take(last=True)) is None:
                return
            if self._write is None or not self._write(data):
                break
        with self._lock:
            self._handed_over = True
        self._changed.release()

    def take(self, last: bool = False) -> bytes | None:
        """The next bytes to write, small frames joined; None if the queue is empty.

        Args:
            last: whether the caller stops writing then.
        """
        with self._lock:
            if not self._waiting:
                # Under the lock under which the queue was found empty: whoever adds a frame later finds that nobody
                # writes.
                self._writing = self._writing and not last
                if self._closed is not None:
                    self._changed.release()
                return None
            data = self._waiting.popleft()
            size = len(data)
            if self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                joined = [data]
                while self._waiting and size + len(self._waiting[0]) <= TOGETHER_BYTES:
                    joined.append(self._waiting.popleft())
                    size += len(joined[-1])
                data = b"".join(joined)
            self.taken += size
            self._room.notify_all()
        return data

    def wait_for_handover(self, seconds: float) -> bool:
        """Wait for `write_waiting` to hand the writing over; returns whether it did within `seconds`."""
        self._changed.acquire(timeout=seconds)
        with self._lock:
            handed_over, self._handed_over = self._handed_over, False
        return handed_over

    def begin(self, write: Callable[[bytes], bool]) -> None:
        """Start writing by `write`, which returns whether the connection can take more now."""
        with self._lock:
            self._write, self._writing = write, True
        self.write_waiting()

    def close(self, reason: SectorchError) -> None:
        """Accept no more frames; the queue is still written."""
        with self._lock:
            self._closed = reason
            self._room.notify_all()
        self._changed.release()

    @property
    def over(self) -> bool:
        """Whether it is closed and completely written."""
        with self._lock:
            return self._closed is not None and not self._waiting and not self._writing

    def empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._waiting


IDLE_BYTES = 128 << 20
"""Bytes that may be buffered in all idle sessions of a link together."""
RELAYED_BYTES = PART_BYTES + (1 << 18)
"""The largest frame that is forwarded: one encrypted part of a message, and labels."""


class PeerLink:
    """The connection to `peer`.

    Args:
        on_request: called with messages that belong to no session.
        silence, call: of the deadlines of its sessions; see `Deadline`.
        certificate: the fingerprint of the peer's certificate, where this end knows it.
        on_close: called once when the link fails or is closed; queued frames may still be on their way then.
    """

    def __init__(
        self,
        peer: str,
        on_request: Callable[[PeerLink, dict], None],
        silence: float | None = None,
        call: float | None = None,
        certificate: str = "",
        on_close: Callable[[], None] = lambda: None,
    ):
        self.peer, self.certificate = peer, certificate
        self._on_request, self._on_close = on_request, on_close
        self._timeouts = silence, call
        self.outbox = Outbox(peer)
        self._lock = threading.Lock()
        self._channels: dict[bytes, Channel] = {}
        self._forwards: dict[bytes, tuple[PeerLink, threading.Event]] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self.closed: SectorchError | None = None
        self._leaving = False

    def open(self, session: bytes, kind: type[Channel] = Channel, peer: str = "") -> Channel:
        """Open this end of a session.

        Args:
            kind: the class of channel.
            peer: the party at the other end, where it is not this link's peer.

        Raises:
            FrameError: the session is open already.
            SectorchError: the link was closed with it.
        """
        with self._lock:
            if self.closed is not None:
                raise copy_error(self.closed)
            if session in self._channels:
                raise FrameError("that session is open already")
            deadline = Deadline(f"'{peer}'" if peer else self.peer, *self._timeouts)
            channel = self._channels[session] = kind(self, session, deadline)
        return channel

    def forward(self, session: bytes, to: PeerLink, ready: threading.Event) -> None:
        """Forward this session's incoming frames to another link, once it is ready; see `end_forwarding`."""
        with self._lock:
            self._forwards[session] = to, ready

    def end_forwarding(self, session: bytes) -> None:
        """Stop forwarding a session, and close its channel if there is one."""
        with self._lock:
            self._forwards.pop(session, None)
            channel = self._channels.get(session)
        if channel is not None:
            channel.close()

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._channels)

    def forget(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(channel.session) is channel:
                del self._channels[channel.session]

    def check_idle(self) -> None:
        """Raise FrameError if the idle sessions have buffered too much."""
        with self._lock:
            waiting = sum(channel.unread_bytes for channel in self._channels.values() if channel.idle)
        if waiting > IDLE_BYTES:
            raise FrameError(f"{self.peer} sends more to idle sessions than is kept of them")

    def send(self, data: bytes, urgent: bool = False) -> None:
        """Queue a packed frame; blocks while the queue is full, unless `urgent`.

        Raises:
            PeerLostError: the connection is closed, or has taken nothing for `STUCK` seconds. Where too many urgent
                frames wait, the connection is closed.
        """
        if urgent and self.outbox.size > OUTBOX_BYTES + URGENT_BYTES:
            self.close(PeerLostError(f"{self.peer} takes nothing of what it is told"))
        self.outbox.put(data, urgent)

    def tell(
        self, message: ControlMessage | Mapping[str, Any], session: bytes = bytes(16), urgent: bool = False
    ) -> None:
        """Send a control message, of a session or (session zero) of none; see `send`."""
        payload = json.dumps(message_form(message)).encode()
        self.send(pack(Frame(Kind.CONTROL, session, label="request", payload=payload)), urgent)

    def refuse(self, session: bytes, reason: str) -> None:
        """Tell the peer that a session is over here, if it can be reached."""
        try:
            self.send(pack(Frame(Kind.ABORT, session, payload=reason.encode()[:600])), urgent=True)
        except SectorchError:
            return

    def pump(self, incoming: Iterable[bytes | memoryview]) -> None:
        """Route incoming frames until the connection ends; then every session of the link fails with the reason.

        After `leave`, incoming frames are dropped until the peer ends the connection.
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
            raise parse_error(bytes(frame.payload[:600]).decode(errors="replace"))
        channel = self._channels.get(frame.session)
        onward = self._forwards.get(frame.session)
        if channel is not None:
            channel.take(frame, _request)
        elif onward is not None:
            _forward_frame(frame, *onward)
        elif frame.kind in (Kind.DATA, Kind.CONTROL):
            self._refuse_unknown(frame.session)

    def _refuse_unknown(self, session: bytes) -> None:
        """Drop a frame of a session that is not open here, and tell the peer once."""
        if session not in self._refused:
            self._refused[session] = None
            while len(self._refused) > 256:
                self._refused.popitem(last=False)
            self.refuse(session, "FrameError: that session is not open here")

    def leave(self) -> None:
        """Close this end after the queue is written; the peer reads all of it and then ends the connection (`pump`)."""
        self._leaving = True
        self.close(PeerLostError("this connection was closed"))

    def close(self, reason: SectorchError) -> None:
        """Close the link and fail all its sessions; queued frames may still be written."""
        with self._lock:
            if self.closed is not None:
                return
            self.closed = reason
            # Failed below without the lock: a channel that closes asks the link to forget it.
            channels = list(self._channels.values())
        if isinstance(reason, FrameError):
            with suppress(SectorchError):
                self.outbox.put(closing_frame(reason), urgent=True)
        self.outbox.close(reason)
        for channel in channels:
            channel.fail(reason)
        self._on_close()


def _forward_frame(frame: Frame, to: PeerLink, ready: threading.Event) -> None:
    """Forward a frame to another link; blocks while that link's queue is full, and drops the frame if it is closed.

    The frame is not urgent: urgent frames could overflow the queue and so end another client's connection. A link that
    takes nothing is closed, because it would block the sender at every frame.

    Raises:
        FrameError: the frame is larger than a part of a message.
    """
    if frame.size > RELAYED_BYTES:
        raise FrameError(f"a frame of {frame.size} bytes for another party; at most {RELAYED_BYTES}")
    ready.wait()
    try:
        to.send(pack(frame))
    except SectorchError as error:  # the receiver's failure; the sender's connection stays open
        to.close(error)


def _request(frame: Frame) -> dict:
    try:
        request = json.loads(bytes(frame.payload))
    except (ValueError, RecursionError):
        raise FrameError("a request is not JSON") from None
    if not isinstance(request, dict):
        raise FrameError("a request is not an object")
    return request


def closing_frame(reason: SectorchError) -> bytes:
    """The frame that tells the peer why the connection ends."""
    return pack(Frame(Kind.ABORT, bytes(16), payload=f"{type(reason).__name__}: {reason}".encode()[:600]))
