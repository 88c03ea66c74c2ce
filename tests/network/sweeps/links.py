"""A TCP proxy that fails as it is told: in one direction, once so many bytes have passed it there.

    drop      both connections are reset          close     both are ended (FIN)
    delay     everything comes 300 ms later       corrupt   one bit is changed, 50 bytes on
    truncate  a piece of 100 bytes is left out     cut      half of what came is passed on, then both are ended
    reorder   two pieces change places            stall     this direction is silent for ever
    silent    both directions are                 trickle   one byte a second
    halfopen  this direction's reader is gone: nothing is taken any more

It fails once: connections that are made later pass. TLS passes through it unread.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MODES = ("drop", "close", "delay", "corrupt", "truncate", "cut", "reorder", "stall", "silent", "trickle", "halfopen")
CHUNK = 16 << 10
DELAY = 0.3
BEHIND = 4 << 20
TRICKLE = 300
"""Bytes that wait to trickle, beyond which nothing more is taken."""


@dataclass
class Way:
    """One direction of a connection."""

    source: socket.socket
    target: socket.socket
    up: bool
    seen: int = 0
    queue: list[tuple[float, bytes]] = field(default_factory=list)
    held: bytes = b""
    failing: bool = False
    silent: bool = False
    ended: bool = False

    @property
    def waiting(self) -> int:
        return sum(len(data) for _, data in self.queue)


class Proxy:
    """From a port of this machine to another one.

    Args:
        mode: of `MODES`, or "none". up: which direction fails, the client's to the server or the other.
        after: bytes of that direction after which it does, over all connections.
        noted: file for the time at which it did. passed: file for the bytes that passed, up and down.
    """

    def __init__(self, port: int, target: int, mode: str, up: bool, after: int, noted: str, passed: str):
        self.mode, self.up, self.after, self.noted, self.passed = mode, up, after, Path(noted), Path(passed)
        self._target = target
        self._server = socket.create_server(("127.0.0.1", port), backlog=64)
        self._ways: list[Way] = []
        self._counts = {True: 0, False: 0}
        self._failed = False

    def run(self) -> int:
        while True:
            readable = [
                way.source for way in self._ways if not way.ended and way.waiting < BEHIND and not self._deaf(way)
            ]
            writable = [way.target for way in self._ways if way.queue and way.queue[0][0] <= time.monotonic()]
            ready, room, _ = select.select([self._server, *readable], writable, [], 0.02)
            for one in ready:
                self._accept() if one is self._server else self._read(one)
            for way in list(self._ways):
                if way.target in room and way.queue:
                    self._write(way)
            if self.mode == "none":
                beside = self.passed.with_suffix(".part")
                beside.write_text(f"{self._counts[True]} {self._counts[False]}")
                beside.replace(self.passed)

    def _deaf(self, way: Way) -> bool:
        return way.failing and (self.mode == "halfopen" or (self.mode == "trickle" and len(way.queue) > TRICKLE))

    def _accept(self) -> None:
        near, _ = self._server.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways += [Way(near, far, True), Way(far, near, False)]

    def _read(self, source: socket.socket) -> None:
        way = next((w for w in self._ways if w.source is source), None)
        if way is None:
            return
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            way.ended = True
            if not way.queue and not way.silent:
                self._end(way)
            return
        self._counts[way.up] += len(data)
        way.seen += len(data)
        begins = not self._failed and self.mode != "none" and way.up == self.up and self._counts[way.up] >= self.after
        if begins:
            self._failed = True
            self.noted.write_text(repr(time.monotonic()))
            self._begin(way, data)
        elif way.failing:
            self._go_on(way, data)
        elif not way.silent:
            way.queue.append((time.monotonic(), data))

    def _begin(self, way: Way, data: bytes) -> None:
        now, way.failing = time.monotonic(), True
        if self.mode == "drop":
            self._reset(way)
        elif self.mode == "close":
            self._close(way)
        elif self.mode == "cut":
            with suppress(OSError):
                way.target.sendall(data[: len(data) // 2])
            self._close(way)
        elif self.mode == "corrupt":
            changed, at = bytearray(data), min(50, len(data) - 1)
            changed[at] ^= 1
            way.queue.append((now, bytes(changed)))
            way.failing = False
        elif self.mode == "truncate":
            at = len(data) // 3
            way.queue.append((now, data[:at] + data[at + 100 :] if len(data) > 200 else b""))
            way.failing = False
        elif self.mode == "reorder":
            way.held = data
        elif self.mode in ("stall", "silent"):
            way.silent = True
            if self.mode == "silent":
                for other in self._pair(way):
                    other.silent, other.queue = True, []
        else:
            self._go_on(way, data)

    def _go_on(self, way: Way, data: bytes) -> None:
        now = time.monotonic()
        if self.mode == "delay":
            way.queue.append((now + DELAY, data))
        elif self.mode == "reorder" and way.held:
            way.queue += [(now, data), (now, way.held)]
            way.held, way.failing = b"", False
        elif self.mode == "trickle":
            after = max([now, *(due for due, _ in way.queue)])
            way.queue += [(after + 1 + i, data[i : i + 1]) for i in range(min(len(data), TRICKLE))]

    def _write(self, way: Way) -> None:
        _, data = way.queue.pop(0)
        try:
            if data:
                sent = way.target.send(data)
                if sent < len(data):
                    way.queue.insert(0, (0.0, data[sent:]))
        except OSError:
            self._close(way)
            return
        if way.ended and not way.queue and not way.silent:
            self._end(way)

    def _pair(self, way: Way) -> list[Way]:
        return [w for w in self._ways if {w.source, w.target} == {way.source, way.target}]

    def _end(self, way: Way) -> None:
        """One direction has ended: so does its other side; both have, and the connection is over."""
        with suppress(OSError):
            way.target.shutdown(socket.SHUT_WR)
        if all(w.ended for w in self._pair(way)):
            self._close(way)

    def _close(self, way: Way) -> None:
        gone = self._pair(way)
        self._ways = [w for w in self._ways if w not in gone]
        for end in (way.source, way.target):
            end.close()

    def _reset(self, way: Way) -> None:
        for end in (way.source, way.target):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(way)
