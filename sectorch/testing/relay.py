"""A relay that makes a connection slower: delay and rate in each direction, for measuring without a real network.

    python -m sectorch.testing.relay TARGET_PORT DELAY_SECONDS BITS_PER_SECOND

It prints the port it listens on, and copies bytes (TLS passes through it unread). Each direction is a link of its own:
bytes leave at the rate, and arrive the delay later.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

CHUNK = 16 << 10


class Direction:
    """One direction of a connection. The sockets are closed when both directions, which share `ended`, have ended."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float, rate: float, ended: list):
        self._source, self._target, self._delay, self._rate, self._ended = source, target, delay, rate, ended
        self._in_flight: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        self._room = int(max(256 << 10, 2 * delay * rate / 8)) // CHUNK + 1
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        free = time.perf_counter()
        while True:
            try:
                data = self._source.recv(CHUNK)
            except OSError:
                data = b""
            free = max(free, time.perf_counter()) + 8 * len(data) / self._rate
            with self._changed:
                self._in_flight.append((free + self._delay, data))
                self._changed.notify_all()
                while data and len(self._in_flight) > self._room:
                    self._changed.wait()
            if not data:
                return

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._in_flight:
                    self._changed.wait()
                due, data = self._in_flight.popleft()
                self._changed.notify_all()
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            try:
                if data:
                    self._target.sendall(data)
                    continue
                self._target.shutdown(socket.SHUT_WR)
            except OSError:
                with suppress(OSError):
                    self._source.shutdown(socket.SHUT_RD)
            self._ended.append(self)
            if len(self._ended) == 2:
                self._source.close()
                self._target.close()
            return


def relay(port: int, delay: float, rate: float) -> socket.socket:
    """Listen on a free port of this machine and pass every connection on to `port`; close the result to stop."""
    listening = socket.create_server(("localhost", 0))

    def accept() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("localhost", port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ended: list[Direction] = []
            Direction(near, far, delay, rate, ended)
            Direction(far, near, delay, rate, ended)

    threading.Thread(target=accept, daemon=True).start()
    return listening


def main() -> None:
    port, delay, rate = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    print(relay(port, delay, rate).getsockname()[1], flush=True)
    sys.stdin.read()  # until whoever started it goes away


if __name__ == "__main__":
    main()
