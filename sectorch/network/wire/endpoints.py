"""Connections over mutual TLS: a server's listener, which bounds their number, and a client's `dial`.

One thread of the listener accepts connections, does their handshakes and waits for their first bytes. So a peer that
shows no certificate, or sends nothing, costs a file descriptor for some seconds and no thread. A connection that is
served has a thread of its own.
"""

from __future__ import annotations

import errno
import ipaddress
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

from ...errors import ArgumentError, BusyError, FrameError, IdentityError, NetworkError, PeerLostError, VersionError
from ..identity.identity import Credentials, certificate_print, peer_name
from ..log import write
from ..memory import NO_MEMORY
from ..names import account_of
from .channel import PeerLink, closing_frame
from .tls_stream import LINGER, READ, SMALL, Stream, Tls, context_of, tls_error_text, with_length


def host_port(address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT or [IPv6 ADDRESS]:PORT.

    Raises:
        ArgumentError: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not colon
        or not bare
        or not (port.isascii() and port.isdigit())
        or int(port) > 65535
        or "/" in bare
        or not bare.isprintable()
    ):
        raise ArgumentError(f"a server's address is host:port, as cloud.example:7100; got {address!r}")
    return bare, int(port)


def listen_address(server: str) -> str:
    """Where a server listens that others reach at `server`: there on loopback, and elsewhere on all addresses.

    Raises:
        ArgumentError: it is no address.
    """
    host, port = host_port(server)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return server if host == "localhost" else f"0.0.0.0:{port}"
    if address.is_loopback:
        return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    return f"[::]:{port}" if address.version == 6 else f"0.0.0.0:{port}"


def listen_error(error: OSError) -> str:
    """Why a server cannot listen on an address, and what to do."""
    if error.errno == errno.EADDRINUSE:  # its own text repeats the address
        return f"{os.strerror(error.errno or 0)}; stop what listens there, or name another port"
    return error.strerror or str(error)


log = logging.getLogger("sectorch.server")
STREAMS = 64
STREAMS_EACH = 16
"""Connections that are served at the same time: of all certificates together, and of one."""
CONNECTIONS = 4096
"""Connections that may be open at the same time, with those that have not shown a certificate."""
RESERVED = 256
"""File descriptors that are left for everything else: stores, logs, torch."""
HANDSHAKE = 10.0
"""Seconds for a handshake and the first bytes."""
TICK = 0.5
BACKLOG = 256


def connection_limit() -> int:
    """The number of connections that this process may hold: `CONNECTIONS`, or what its file descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(STREAMS, min(CONNECTIONS, soft - RESERVED))


@dataclass(eq=False)
class _PendingConnection:
    """A connection that is not served yet, or was refused and waits for its peer to read why.

    Attributes:
        by: the peer's address. until: when it is dropped.
    """

    sock: socket.socket
    by: str
    tls: Tls
    until: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE)
    refused: bool = False


class Listener:
    """Listens and serves connections until `stop`.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        welcome: gives the link of a client; called with the name in its certificate and the certificate's fingerprint.
        shared: whether other processes may listen on the same port; each connection goes to one of them.

    Raises:
        PeerLostError: the address cannot be bound. IdentityError: the certificate is not valid now, or unusable.
    """

    def __init__(
        self, address: str, credentials: Credentials, welcome: Callable[[str, str], PeerLink], shared: bool = False
    ):
        self.use(credentials)
        self._welcome = welcome
        self._pending: dict[_PendingConnection, None] = {}  # in the order in which they came
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
        """Use these credentials from the next handshake on.

        Raises:
            IdentityError: they are not valid now, or unusable; the former ones stay in use.
        """
        credentials.check_dates()
        self._context = context_of(credentials, server=True)

    def stop(self, grace: float = 0.5) -> None:
        """End all connections, after at most `grace` seconds for the queued frames of links that are closed."""
        self._stopped.set()
        self._thread.join()
        end = time.monotonic() + grace
        while self._streams and time.monotonic() < end:
            time.sleep(0.005)
        for stream in list(self._streams):
            stream.close()

    def wait(self) -> None:
        """Block until the listener is stopped."""
        self._stopped.wait()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for key, _ in self._selector.select(TICK):
                    self._read(key.data) if key.data is not None else self._accept(key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                for pending in [k for k in self._pending if k.until < now]:
                    self._drop(pending)
        finally:
            for pending in list(self._pending):
                self._drop(pending)
            for listening in self._listening:
                listening.close()
            self._selector.close()
            self._stopped.set()

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptors are left; open connections go on
            write(log, "refused", why=f"cannot accept a connection: {error.strerror}")
            if not self._make_room():
                time.sleep(0.05)
            return
        if len(self._pending) + len(self._streams) >= connection_limit() and not self._make_room():
            sock.close()
            return
        sock.setblocking(False)
        host, port = address[:2]
        by = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        pending = _PendingConnection(sock, by, Tls(self._context))
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _make_room(self) -> bool:
        """Drop a connection that has not shown a certificate for a new one; returns whether there was one.

        It is the oldest one of the host that has most of them. So a client whose host has few is not kept out by
        another host's, and one of the same host has as long as it takes to fill all places anew.
        """
        hosts = Counter(pending.by.rpartition(":")[0] for pending in self._pending)
        if not hosts:
            return False
        most = max(hosts, key=lambda host: hosts[host])
        oldest = next(pending for pending in self._pending if pending.by.rpartition(":")[0] == most)
        write(log, "refused", by=oldest.by, why="it showed no certificate, and its place was needed for another")
        self._drop(oldest)
        return True

    def _drop(self, pending: _PendingConnection) -> None:
        self._pending.pop(pending, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(pending.sock)
        pending.sock.close()

    def _read(self, pending: _PendingConnection) -> None:
        """Take bytes of a pending connection."""
        try:
            came = pending.sock.recv(READ if pending.refused else SMALL)
            if not came:
                self._drop(pending)
            elif not pending.refused:
                pending.tls.feed(came)
                self._continue(pending)
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._refuse(pending, tls_error_text(error, "client"))
        except OSError:
            self._drop(pending)

    def _continue(self, pending: _PendingConnection) -> None:
        """Continue the handshake; after it, and with the first bytes, serve the connection or refuse it."""
        if not pending.tls.shaken:
            try:
                reply = pending.tls.shake()
            except ssl.SSLError:
                with suppress(OSError):
                    pending.sock.send(pending.tls.closing_bytes())
                raise
            if reply:
                pending.sock.send(reply)
        if not pending.tls.shaken:
            return
        first = bytearray(2 * SMALL)
        if not (count := pending.tls.read(memoryview(first))):
            return
        certificate = pending.tls.peer_certificate()
        try:
            name = peer_name(certificate)
        except IdentityError as error:
            self._refuse(pending, error, tell=True)
            return
        with self._lock:
            own = self._served[account_of(name)]
            full = own >= STREAMS_EACH or self._served.total() >= STREAMS
            self._served[account_of(name)] += not full
        if full:
            text = "the server has as many clients as it takes on; ask again later"
            if own >= STREAMS_EACH:
                text = (
                    f"the server has as many connections of this certificate as it takes on, {STREAMS_EACH}; close some"
                )
            self._refuse(pending, BusyError(text), tell=True, client=name)
            return
        self._pending.pop(pending, None)
        self._selector.unregister(pending.sock)
        serving = (pending, name, certificate_print(certificate), bytes(first[:count]))
        try:
            threading.Thread(target=self._serve, args=serving, daemon=True, name=f"from {name}").start()
        except RuntimeError:  # there is no memory for its stack
            with self._lock:
                self._served[account_of(name)] -= 1
            pending.sock.close()
            write(log, "refused", by=pending.by, client=name, why=NO_MEMORY)

    def _refuse(
        self, pending: _PendingConnection, error: NetworkError, tell: bool = False, client: str | None = None
    ) -> None:
        """Log why a connection is refused, tell its peer, and give the peer `LINGER` seconds to read it."""
        write(log, "refused", by=pending.by, client=client, why=error)
        with suppress(OSError):
            if tell:
                pending.sock.send(pending.tls.encrypt(with_length(closing_frame(error))) + pending.tls.closing_bytes())
            pending.sock.shutdown(socket.SHUT_WR)
        pending.refused, pending.until = True, time.monotonic() + LINGER

    def _serve(self, pending: _PendingConnection, name: str, certificate: str, first: bytes) -> None:
        stream = None
        try:
            link = self._welcome(name, certificate)
            write(log, "connected", client=name, by=pending.by, certificate=certificate)
            stream = Stream(pending.sock, pending.tls, link, first)
            with self._lock:
                self._streams.add(stream)
            if self._stopped.is_set():
                stream.close()
            stream.run()
            if isinstance(link.closed, FrameError):  # another version, or another program
                write(log, "refused", by=pending.by, client=name, why=link.closed)
        finally:
            pending.sock.close()
            with self._lock:
                self._served[account_of(name)] -= 1
                if stream is not None:
                    self._streams.discard(stream)


def check_free(address: str) -> None:
    """Check, before the long work at a server's start, that it could listen on an address.

    Raises:
        PeerLostError: another process listens there, or it is no address of this machine.
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
                raise PeerLostError(f"cannot listen on {address}: {listen_error(error)}") from None
    raise PeerLostError(f"cannot listen on {address}")


def _bound_once(host: str, port: int, shared: bool) -> list[socket.socket]:
    listening: list[socket.socket] = []
    lacking = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, (name, _, *scope) in dict.fromkeys((family, to) for family, _, _, _, to in found):
            at = (str(name), port, *scope)  # a link-local address of IPv6 is one of an interface
            try:
                listening.append(socket.create_server(at, family=family, backlog=BACKLOG, reuse_port=shared))  # type: ignore[arg-type]
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


NOBODY_LISTENS = "nobody listens there"
RETRY = 0.2
"""Seconds between attempts to reach a server that does not answer."""


def dial(
    address: str,
    credentials: Credentials,
    link: PeerLink,
    patience: float = 5.0,
    ended: Callable[[], None] = lambda: None,
) -> Stream:
    """Connect a client's link to the server, with further attempts while it does not answer.

    A server that does not accept this party's certificate says so only after this: in TLS 1.3 the client's handshake
    ends first. Then the first wait on the link raises an `IdentityError`.

    Args:
        patience: seconds for all attempts.
        ended: called once when the connection is over.

    Raises:
        IdentityError: a certificate was refused, by this side or by the server.
        PeerLostError: nobody answers there. ArgumentError: it is no address.
    """
    host, port = host_port(address)
    credentials.check_dates()
    context, end = context_of(credentials), time.monotonic() + patience
    while True:
        try:
            stream = _connect(host, port, context, end, link, ended)
            stream.start()
            return stream
        except NetworkError as error:
            if not isinstance(error, PeerLostError) or time.monotonic() + RETRY > end:
                link.close(PeerLostError("the connection was not made"))
                raise refusal(address, error) from None
        time.sleep(RETRY)


def refusal(address: str, error: NetworkError) -> NetworkError:
    """A connection's error, with its address; a PeerLostError unless it is about identity, load or version."""
    kind = type(error) if isinstance(error, (IdentityError, BusyError, VersionError)) else PeerLostError
    return kind(f"cannot connect to {address}: {error}")


def _connect(
    host: str, port: int, context: ssl.SSLContext, end: float, link: PeerLink, ended: Callable[[], None]
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
