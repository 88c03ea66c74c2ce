"""One connection between a client and the server: frames in both directions, sorted into the inboxes of sessions.

A link knows nothing of gRPC: the transport feeds it what came (`pump`) and takes what goes (`outgoing`). A full inbox
holds the pump back, a full outbox the sender: memory is bounded on both sides.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import AbortedError, FrameError, NetworkError, PeerLostError
from ..runtime.frames import Frame, Kind, pack, unpack

INBOX_BYTES = 256 << 20
OUTBOX_FRAMES = 128
PATIENCE = 60.0
"""Seconds without a frame after which a party counts as hanging."""


class Inbox:
    """The frames of one session, in order, from one peer."""

    def __init__(self, peer: str):
        self._peer = peer
        self._frames: deque[Frame] = deque()
        self._requests: deque[dict] = deque()
        self._held = 0
        self._failure: NetworkError | None = None
        self._changed = threading.Condition()

    def put(self, frame: Frame) -> None:
        with self._changed:
            while self._held > INBOX_BYTES and self._failure is None:
                self._changed.wait(1.0)
            self._frames.append(frame)
            self._held += len(frame.payload)
            self._changed.notify_all()

    def put_request(self, request: dict) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def fail(self, failure: NetworkError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def receive(self) -> Frame:
        """The next frame.

        Raises:
            PeerLostError, AbortedError: none will come.
        """
        frame = self._take(self._frames, PATIENCE)
        with self._changed:
            self._held -= len(frame.payload)
            self._changed.notify_all()
        return frame

    def request(self, patience: float | None = None) -> dict:
        """The next request of this session; without `patience` it may be long in coming."""
        return self._take(self._requests, patience)

    def _take(self, from_: deque, patience: float | None) -> Any:
        end = None if patience is None else time.monotonic() + patience
        with self._changed:
            while not from_:
                if self._failure is not None:
                    raise type(self._failure)(str(self._failure))
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise PeerLostError(f"{self._peer} has sent nothing for {patience:.0f} s; it may hang")
                self._changed.wait(min(left, 1.0) if left is not None else 1.0)
            return from_.popleft()


class Link:
    """The connection to `peer`.

    Args:
        on_request: called with requests that belong to no session.
    """

    def __init__(self, peer: str, on_request: Callable[[Link, dict], None]):
        self.peer = peer
        self._on_request = on_request
        self._outbox: queue.Queue[bytes | None] = queue.Queue(OUTBOX_FRAMES)
        self._inboxes: dict[bytes, Inbox] = {}
        self._lock = threading.Lock()
        self.closed: NetworkError | None = None

    def open(self, session: bytes) -> Channel:
        """This end of a session."""
        with self._lock:
            if self.closed is not None:
                raise type(self.closed)(str(self.closed))
            if session in self._inboxes:
                raise FrameError("that session is open already")
            inbox = self._inboxes[session] = Inbox(self.peer)
        return Channel(self, session, inbox)

    def forget(self, session: bytes) -> None:
        with self._lock:
            self._inboxes.pop(session, None)

    def send(self, data: bytes) -> None:
        """Queue a packed frame."""
        while True:
            if self.closed is not None:
                raise type(self.closed)(str(self.closed))
            try:
                return self._outbox.put(data, timeout=1.0)
            except queue.Full:
                continue

    def tell(self, request: dict, session: bytes = bytes(16)) -> None:
        """Send a request, of a session or of none."""
        payload = json.dumps(request).encode()
        self.send(pack(Frame(Kind.CONTROL, session, label="request", payload=payload)))

    def outgoing(self) -> Iterator[bytes]:
        """What the transport has to send; ends when the link is closed and everything is out."""
        while True:
            try:
                data = self._outbox.get(timeout=1.0)
            except queue.Empty:
                if self.closed is not None:
                    return
                continue
            if data is None:
                return
            yield data

    def pump(self, incoming: Iterable[bytes]) -> None:
        """Sort what comes until it ends; then every session of the link fails with the reason."""
        reason: NetworkError = PeerLostError(f"the connection to {self.peer} was closed")
        try:
            for data in incoming:
                self._route(unpack(data))
        except NetworkError as error:
            reason = error
        except Exception as error:
            reason = PeerLostError(f"the connection to {self.peer} broke ({_short(error)})")
        self.close(reason)

    def _route(self, frame: Frame) -> None:
        with self._lock:
            inbox = self._inboxes.get(frame.session)
        if frame.kind == Kind.CONTROL:
            try:
                request = json.loads(bytes(frame.payload))
            except (ValueError, RecursionError):
                raise FrameError("a request is not JSON") from None
            if not isinstance(request, dict):
                raise FrameError("a request is not an object")
            if frame.session == bytes(16):
                self._on_request(self, request)
            elif inbox is not None:
                inbox.put_request(request)
        elif inbox is not None:  # else: late frames of a session that has ended here
            if frame.kind == Kind.ABORT:
                inbox.fail(AbortedError(bytes(frame.payload[:400]).decode(errors="replace")))
            else:
                inbox.put(frame)

    def close(self, reason: NetworkError) -> None:
        """Fail all sessions of the link; frames that are queued may still go out."""
        with self._lock:
            if self.closed is not None:
                return
            self.closed = reason
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.fail(reason)


class Channel:
    """One session over a link: what a `PartyRuntime` sends and receives through."""

    def __init__(self, link: Link, session: bytes, inbox: Inbox):
        self.link, self.session, self.inbox = link, session, inbox

    def send(self, data: bytes) -> None:
        self.link.send(data)

    def receive(self) -> Frame:
        return self.inbox.receive()

    def request(self, patience: float | None = None) -> dict:
        return self.inbox.request(patience)

    def tell(self, request: dict) -> None:
        self.link.tell(request, self.session)

    def abort(self, reason: str) -> None:
        """Tell the other end that the session is over, and why; the reason holds no secret."""
        try:
            self.link.send(pack(Frame(Kind.ABORT, self.session, payload=reason.encode()[:400])))
        except NetworkError:
            return

    def close(self) -> None:
        self.link.forget(self.session)


def _short(error: Exception) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return (text or type(error).__name__).splitlines()[0][:200]
