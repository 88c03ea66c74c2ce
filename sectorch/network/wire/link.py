"""One connection between a client and the server: frames in both directions, sorted into the channels of sessions.

A link knows nothing of TLS: the stream that carries it feeds it what came (`pump`) and takes what goes (`outbox`). What
is queued is bounded on both sides without ever holding up the connection: in each direction of a session, a message is
begun only while the receiver has not used less than a window's bytes of earlier ones; it says what it used with
credits. The receiver does not rely on that: what waits in a session, and in all that are idle, has bounds of its own
(`channel.py`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ...choreography.run.frames import PART_BYTES, Frame, Kind, pack, unpack
from ...errors import FrameError, PeerLostError, SectorchError
from ..messages import ControlMessage, form
from .channel import Channel, again, error_of
from .deadline import Deadline
from .outbox import OUTBOX_BYTES, URGENT_BYTES, Outbox

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
                raise again(self.closed)
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
        payload = json.dumps(form(message)).encode()
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
