"""A small HTTP server for the machinery around a party: `/live`, `/ready`, and `/metrics` if it is asked for.

It is no part of the protocol: it answers GET, reads nothing of what is asked but the path, and says nothing secret.
Orchestrators, load balancers and monitoring speak plain HTTP and have no certificate, so it has a port of its own, on
loopback unless the operator says otherwise. Nobody can hold it up: a connection is for one question, ends after
`PATIENCE` seconds, and when there are `MOST` of them the oldest is closed for a new one.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from ...errors import ArgumentError

PATIENCE = 5.0
"""Seconds that a connection may take in all."""
MOST = 16
"""Connections at once."""

Page = tuple[int, str, bytes]
"""Status, type of content, content."""


class Management:
    """Serves pages on an address until `close`.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        pages: what is answered, by path; each is called in a thread of its own.
        anywhere: whether the address may be one that other machines reach.

    Raises:
        ArgumentError: no such address, one that is in use, or one that others reach.
    """

    def __init__(self, address: str, pages: Mapping[str, Callable[[], Page]], anywhere: bool = False):
        family, place = _place(address, anywhere)
        try:
            self._server = _Server(family, place, dict(pages))
        except OSError as error:
            raise ArgumentError(f"cannot listen on {address} for --manage: {error.strerror}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True, name="management")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.drop(everyone=True)


def _place(address: str, anywhere: bool) -> tuple[socket.AddressFamily, tuple]:
    """What to bind: the address's own loopback, or any if `anywhere`."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError(f"--manage takes HOST:PORT, as 127.0.0.1:7101, got {ascii(address)[:80]}")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(f"--manage {address}: no such host: {error.strerror}") from None
    family, _, _, _, place = found[0]
    if not anywhere and not all(ipaddress.ip_address(str(each[4][0])).is_loopback for each in found):
        raise ArgumentError(
            f"--manage {address} can be reached from other machines, and whoever reaches it sees names of models and "
            f"how much is asked: name a loopback address, or add --manage-anywhere where a firewall stands before it"
        )
    return family, place


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 2 * MOST

    def __init__(self, family: socket.AddressFamily, place: tuple, pages: dict[str, Callable[[], Page]]):
        self.address_family, self.pages = family, pages
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        self._lock = threading.Lock()
        super().__init__(place, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MOST
            oldest = next(iter(self._open)) if full else None
            self._open[request] = time.monotonic()
        if oldest is not None:
            self._drop(oldest)
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True, name="managed").start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            request.settimeout(PATIENCE)
            with suppress(OSError, ValueError):  # it went, or was closed for being slow
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        self.drop()

    def drop(self, everyone: bool = False) -> None:
        """End the connections that took too long, or all of them."""
        late = time.monotonic() - PATIENCE
        with self._lock:
            ended = [request for request, since in self._open.items() if everyone or since < late]
        for request in ended:
            self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Its own thread notices, and closes it."""
        with self._lock:
            self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is written of who asks: a probe comes every few seconds."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        self._send(*((404, TEXT, b"not here\n") if page is None else page()))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A line that repeats nothing of what was sent."""
        status = 405 if code == 501 else code
        self._send(status, TEXT, b"GET only\n" if status == 405 else b"not understood\n")

    def version_string(self) -> str:
        return "sectorch"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: see `handle_error`."""


TEXT = "text/plain; charset=utf-8"


def health(unready: Callable[[], str]) -> dict[str, Callable[[], Page]]:
    """The pages `/live` and `/ready`.

    Args:
        unready: why the party takes nothing on now; empty if it does.
    """

    def ready() -> Page:
        why = unready()
        return (503, TEXT, f"{why}\n".encode()) if why else (200, TEXT, b"ready\n")

    return {"/live": lambda: (200, TEXT, b"live\n"), "/ready": ready}
