"""The server's side of connections: mutual TLS, one link a client, and bounds on who is connected.

One thread accepts, shakes hands with all who knock, and waits for their first words; so those who show no certificate,
or say nothing, cost a file descriptor for some seconds and no thread. Who is served has a thread of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import ArgumentError, BusyError, IdentityError, NetworkError, PeerLostError
from ..identity.identity import Credentials, certificate_print, peer_name
from ..log import write
from .channel import Link, closing_frame
from .tls_stream import LINGER, READ, SMALL, Stream, Tls, context_of, piece, tls_error_text

# Where a server listens: host:port, [v6 address]:port.


def host_port(address: str) -> tuple[str, int]:
    """A server's address in its parts.

    Raises:
        ArgumentError: it is no host:port.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not (port.isascii() and port.isdigit()) or int(port) > 65535 or "/" in bare:
        raise ArgumentError(f"a server's address is host:port, as cloud.example:7100; got {address!r}")
    return bare, int(port)


def unheard(error: OSError) -> str:
    """Why nobody can listen on an address, and the way out where there is one."""
    if error.errno == errno.EADDRINUSE:  # its own text repeats the address
        return f"{os.strerror(error.errno or 0)}; stop what listens there, or name another port"
    return error.strerror or str(error)


log = logging.getLogger("sectorch.server")
STREAMS = 64
STREAMS_EACH = 16
"""Connections that are served at once: of all certificates together, and of one."""
CONNECTIONS = 4096
"""Connections that may be open at once, also those that have not shown a certificate yet."""
RESERVED = 256
"""File descriptors that stay for everything else: stores, logs, torch."""
KNOCKING = 10.0
"""Seconds for a handshake and the first words."""
TICK = 0.5
BACKLOG = 256


def connection_limit() -> int:
    """How many connections this process may hold: `CONNECTIONS`, or what its limit of file descriptors leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(STREAMS, min(CONNECTIONS, soft - RESERVED))


@dataclass(eq=False)
class _Knock:
    """A connection that is not served yet, or never will be."""

    sock: socket.socket
    by: str
    tls: Tls
    until: float = field(default_factory=lambda: time.monotonic() + KNOCKING)
    refused: bool = False


class Listener:
    """Serves until stopped.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        welcome: called with the name in each client's certificate and its fingerprint; one without a name is refused.
        shared: whether other processes may listen there too: each connection is somebody's.

    Raises:
        PeerLostError: the address cannot be bound. IdentityError: the certificate is not valid now, or no use.
    """

    def __init__(
        self, address: str, credentials: Credentials, welcome: Callable[[str, str], Link], shared: bool = False
    ):
        self.use(credentials)
        self._welcome = welcome
        self._knocking: set[_Knock] = set()
        self._streams: set[Stream] = set()
        self._served: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._listening = _bound(address, shared)
        self.port: int = self._listening[0].getsockname()[1]
        self._selector = selectors.DefaultSelector()
        for listening in self._listening:
            self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"listening on {self.port}")
        self._thread.start()

    def use(self, credentials: Credentials) -> None:
        """Show this certificate, and take those of its CA, from the next handshake on.

        Raises:
            IdentityError: it is not valid now, or cannot be used; the one before stays.
        """
        credentials.check_dates()
        self._context = context_of(credentials, server=True)

    def stop(self, grace: float = 0.5) -> None:
        """End all connections; those whose links are closed have so many seconds for what is queued."""
        self._stopped.set()
        self._thread.join()
        end = time.monotonic() + grace
        while self._streams and time.monotonic() < end:
            time.sleep(0.005)
        for stream in list(self._streams):
            stream.close()

    def wait(self) -> None:
        """Until stopped."""
        self._stopped.wait()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for key, _ in self._selector.select(TICK):
                    self._hear(key.data) if key.data is not None else self._accept(key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                for knock in [k for k in self._knocking if k.until < now]:
                    self._drop(knock)
        finally:
            for knock in list(self._knocking):
                self._drop(knock)
            for listening in self._listening:
                listening.close()
            self._selector.close()
            self._stopped.set()

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no more file descriptors: those who are connected are served on
            write(log, "refused", why=f"cannot accept a connection: {error.strerror}")
            time.sleep(0.05)
            return
        if len(self._knocking) + len(self._streams) >= connection_limit():
            sock.close()
            return
        sock.setblocking(False)
        host, port = address[:2]
        by = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        knock = _Knock(sock, by, Tls(self._context))
        self._knocking.add(knock)
        self._selector.register(sock, selectors.EVENT_READ, knock)

    def _drop(self, knock: _Knock) -> None:
        self._knocking.discard(knock)
        with suppress(KeyError, ValueError):
            self._selector.unregister(knock.sock)
        knock.sock.close()

    def _hear(self, knock: _Knock) -> None:
        """Something came from one that knocks."""
        try:
            came = knock.sock.recv(READ if knock.refused else SMALL)
            if not came:
                self._drop(knock)
            elif not knock.refused:
                knock.tls.feed(came)
                self._go_on(knock)
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._refuse(knock, tls_error_text(error, "client"))
        except OSError:
            self._drop(knock)

    def _go_on(self, knock: _Knock) -> None:
        if not knock.tls.shaken:
            try:
                said = knock.tls.shake()
            except ssl.SSLError:
                with suppress(OSError):
                    knock.sock.send(knock.tls.last())
                raise
            if said:
                knock.sock.send(said)
        if not knock.tls.shaken:
            return
        first = bytearray(2 * SMALL)
        if not (count := knock.tls.read(memoryview(first))):
            return
        certificate = knock.tls.peer_certificate()
        try:
            name = peer_name(certificate)
        except IdentityError as error:
            self._refuse(knock, error, tell=True)
            return
        with self._lock:
            all_, of_it = self._served.total(), self._served[name]
            full = all_ >= STREAMS or of_it >= STREAMS_EACH
            self._served[name] += not full
        if full:
            few = f"the server has as many connections of this certificate as it takes on, {STREAMS_EACH}; close some"
            said = few if of_it >= STREAMS_EACH else "the server has as many clients as it takes on; ask again later"
            self._refuse(knock, BusyError(said), tell=True, client=name)
            return
        self._knocking.discard(knock)
        self._selector.unregister(knock.sock)
        serving = (knock, name, certificate_print(certificate), bytes(first[:count]))
        threading.Thread(target=self._serve, args=serving, daemon=True, name=f"from {name}").start()

    def _refuse(self, knock: _Knock, error: NetworkError, tell: bool = False, client: str | None = None) -> None:
        """Say why, and wait a little for it to be heard."""
        write(log, "refused", by=knock.by, client=client, why=error)
        with suppress(OSError):
            if tell:
                knock.sock.send(knock.tls.sealed(piece(closing_frame(error))) + knock.tls.last())
            knock.sock.shutdown(socket.SHUT_WR)
        knock.refused, knock.until = True, time.monotonic() + LINGER

    def _serve(self, knock: _Knock, name: str, certificate: str, first: bytes) -> None:
        stream = None
        try:
            link = self._welcome(name, certificate)
            write(log, "connected", client=name, by=knock.by, certificate=certificate)
            stream = Stream(knock.sock, knock.tls, link, first)
            with self._lock:
                self._streams.add(stream)
            if self._stopped.is_set():
                stream.close()
            stream.run()
        finally:
            knock.sock.close()
            with self._lock:
                self._served[name] -= 1
                if stream is not None:
                    self._streams.discard(stream)


def check_free(address: str) -> None:
    """Nobody else listens there now: for before the long work that a server begins with.

    Raises:
        PeerLostError: somebody does, or it is no address of this machine.
    """
    for sock in _bound(address, False):
        sock.close()


def _bound(address: str, shared: bool) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host, on one port."""
    host, port = host_port(address)
    for attempt in reversed(range(10)):
        try:
            return _bound_once(host, port, shared)
        except OSError as error:
            if port or not attempt:  # a port that is free on one of the addresses need not be on the others
                raise PeerLostError(f"cannot listen on {address}: {unheard(error)}") from None
    raise PeerLostError(f"cannot listen on {address}")


def _bound_once(host: str, port: int, shared: bool) -> list[socket.socket]:
    listening: list[socket.socket] = []
    lacking = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, to in dict.fromkeys((family, str(to[0])) for family, _, _, _, to in found):
            try:
                listening.append(socket.create_server((to, port), family=family, backlog=BACKLOG, reuse_port=shared))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error  # as ::1 is where there is no IPv6
                continue
            listening[-1].setblocking(False)
            port = listening[-1].getsockname()[1]
        if not listening:
            raise lacking
    except BaseException:
        for sock in listening:
            sock.close()
        raise
    return listening


# A client's side of a connection: it dials the server, and knows what it means if there is none.


NOBODY_LISTENS = "nobody listens there"
RETRY = 0.2
"""Seconds between attempts to reach one who is not there."""


def dial(
    address: str, credentials: Credentials, link: Link, patience: float = 5.0, ended: Callable[[], None] = lambda: None
) -> Stream:
    """Connect a client's link to the server, trying again while nobody is there; `ended` is called once when the
    connection is over.

    A server that does not accept this party's certificate says so after this: the first answer is an `IdentityError`.

    Raises:
        IdentityError: a certificate was refused, by this side or by the server.
        PeerLostError: nobody answers there. ArgumentError: that is no address.
    """
    host, port = host_port(address)
    credentials.check_dates()
    context, end = context_of(credentials), time.monotonic() + patience
    while True:
        try:
            stream = _connected(host, port, context, end, link, ended)
            stream.start()
            return stream
        except NetworkError as error:
            if not isinstance(error, PeerLostError) or time.monotonic() + RETRY > end:
                link.close(PeerLostError("the connection was not made"))
                raise refusal(address, error) from None
        time.sleep(RETRY)


def refusal(address: str, error: NetworkError) -> NetworkError:
    """Why there is no connection, with the address; what is no word of identity or of numbers is that it was lost."""
    kind = type(error) if isinstance(error, (IdentityError, BusyError)) else PeerLostError
    return kind(f"cannot connect to {address}: {error}")


def _connected(
    host: str, port: int, context: ssl.SSLContext, end: float, link: Link, ended: Callable[[], None]
) -> Stream:
    left = lambda: max(0.001, end - time.monotonic())
    try:
        sock = socket.create_connection((host, port), timeout=left())
    except socket.gaierror:
        raise PeerLostError(f"no address is known for {host!r}") from None
    except ConnectionRefusedError:
        raise PeerLostError(NOBODY_LISTENS) from None
    except TimeoutError:
        raise PeerLostError("nobody answers") from None
    except OSError as error:
        raise PeerLostError(error.strerror or str(error)) from None
    try:
        tls = Tls(context, host)
        while True:
            sock.settimeout(left())
            sock.sendall(tls.shake())
            if tls.shaken:
                return Stream(sock, tls, link, ended=ended)
            tls.feed(sock.recv(READ))
    except ssl.SSLError as error:
        sock.close()
        raise tls_error_text(error) from None
    except TimeoutError:
        sock.close()
        raise PeerLostError("nobody answers: the handshake was not finished in time") from None
    except OSError:
        sock.close()
        raise PeerLostError("the connection was closed while it was being made") from None
