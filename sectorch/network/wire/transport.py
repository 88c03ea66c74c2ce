"""gRPC: one bidirectional stream a client, raw frames in both directions, mutual TLS, keep-alive."""

from __future__ import annotations

import logging
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc

from ...errors import (
    BusyError,
    FrameError,
    IdentityError,
    NetworkError,
    PeerLostError,
)
from ..identity.certificates import Credentials, certificate_print, peer_name
from ..log import write
from .link import Link

log = logging.getLogger("sectorch.server")
METHOD = "/sectorch.Star/Connect"
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 1500),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
]
_SERVER = [
    *_KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),
]
STREAMS = 64
STREAMS_EACH = 16
"""Connections that are served at once: of all certificates together, and of one."""
CONNECTIONS = 4096
"""Connections that may be open at once, also those that have not shown a certificate yet."""
RESERVED = 256
"""File descriptors that stay for everything else: stores, logs, torch."""


def connections() -> int:
    """How many connections this process may hold: `CONNECTIONS`, or what its limit of file descriptors leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(STREAMS, min(CONNECTIONS, soft - RESERVED))


def listen(
    address: str, current: Callable[[], Credentials], welcome: Callable[[str, str], Link]
) -> tuple[grpc.Server, int]:
    """Start serving. `current` gives the credentials of each new handshake. `welcome` is called with the name in each
    client's certificate and its fingerprint; one without a name is refused.

    There are bounds on connections of all certificates, of one, and of those that show none; who comes beyond them is
    refused.

    Raises:
        PeerLostError: the address cannot be bound. IdentityError: the certificate is not valid now.
    """
    from concurrent.futures import ThreadPoolExecutor

    current().check_dates()
    served: Counter[str] = Counter()
    lock = threading.Lock()

    def handle(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            shown, *_ = context.auth_context().get("x509_pem_cert") or [b""]
            certificate = shown if isinstance(shown, bytes) else b""
            name = peer_name(certificate)
        except IdentityError as error:
            write(log, "refused", by=context.peer(), why=error)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        with lock:
            full = served[name] >= STREAMS_EACH
            served[name] += not full
        if full:
            write(log, "refused", by=context.peer(), client=name, why=FULL)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{FULL}: {STREAMS_EACH} of '{name}'")
        try:
            link = welcome(name, certificate_print(certificate))
            write(log, "connected", client=name, by=context.peer(), certificate=link.certificate)
            context.add_callback(lambda: link.close(PeerLostError(f"the connection to {link.peer} was closed")))
            threading.Thread(target=link.pump, args=(incoming,), daemon=True, name=f"from {link.peer}").start()
            yield from link.outgoing()
        finally:
            with lock:
                served[name] -= 1
        if isinstance(link.closed, FrameError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"FrameError: {link.closed}"[:400])

    options = [*_SERVER, ("grpc.max_allowed_incoming_connections", connections())]
    server = grpc.server(ThreadPoolExecutor(STREAMS), options=options, maximum_concurrent_rpcs=STREAMS)
    method = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("sectorch.Star", {"Connect": method})])
    tls = _tls(current)
    try:
        port = server.add_secure_port(address, tls)
    except RuntimeError:
        port = 0
    if not port:
        raise PeerLostError(f"cannot listen on {address}: the address is in use or the certificate is not usable")
    server.start()
    return server, port


def _tls(current: Callable[[], Credentials]) -> grpc.ServerCredentials:
    """Mutual TLS with the credentials that there are at each handshake."""
    used = current()

    def configured(own: Credentials) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        now = current()
        if now is used:
            return None
        used = now
        return configured(now)

    return grpc.dynamic_ssl_server_credentials(configured(used), changed, True)  # pyright: ignore[reportArgumentType]


def dial(
    address: str, credentials: Credentials, link: Link, patience: float = 5.0, ended: Callable[[], None] = lambda: None
) -> grpc.Channel:
    """Connect a client's link to the server; `ended` is called once when the connection is over.

    Raises:
        IdentityError: a certificate was refused, by this side or by the server.
        PeerLostError: nobody answers there.
    """
    credentials.check_dates()
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    channel = grpc.secure_channel(address, tls, options=_KEEPALIVE)
    call = channel.stream_stream(METHOD)(link.outgoing())
    try:
        grpc.channel_ready_future(channel).result(timeout=patience)
    except grpc.FutureTimeoutError:
        detail = _why(call)
        link.close(PeerLostError("the connection was not made"))
        channel.close()
        raise refusal(address, detail or "nobody answers") from None

    def pump() -> None:
        link.pump(call)
        call.cancel()
        ended()

    threading.Thread(target=pump, daemon=True, name=f"from {link.peer}").start()
    return channel


FULL = "too many connections of one certificate"
_REFUSALS = {
    FULL: (BusyError, "the server has as many connections of this certificate as it takes on; close some"),
    "RPC limit": (BusyError, "the server has as many clients as it takes on; ask again later"),
    "Handshake read failed": (PeerLostError, "the connection was closed while it was being made"),
    "broke (Socket closed": (PeerLostError, "the connection was closed as soon as it was made"),
    "reset by peer": (PeerLostError, "the connection was reset"),
    "certificate has expired": (IdentityError, "the server's certificate has expired"),
    "certificate purpose": (IdentityError, "its certificate is not a server's: a client may be posing as the server"),
    "Hostname Verification": (IdentityError, "the server's certificate is for another host name"),
    "CERTIFICATE_VERIFY_FAILED": (IdentityError, "the server's certificate is not of the CA that --ca names"),
    "signature failure": (IdentityError, "the server's certificate is not of the CA that --ca names"),
    "BAD_SIGNATURE": (IdentityError, "the server's certificate is not of the CA that --ca names"),
    "Socket closed": (
        IdentityError,
        "the server closed the connection: probably it does not accept this party's certificate",
    ),
    "Connection refused": (PeerLostError, "nobody listens there"),
}
"""What gRPC says when no connection comes about, and what it means; the first that fits. A server that refuses a
certificate closes the connection after its own half of the handshake is over, and not within it."""


def refusal(address: str, detail: str) -> NetworkError:
    """Why there is no connection, as a typed error with a clear text."""
    for said, (kind, text) in _REFUSALS.items():
        if said in detail:
            return kind(f"cannot connect to {address}: {text}")
    known = any(word in detail.lower() for word in ("certificate", "handshake", "ssl", "tls", "verif"))
    return (IdentityError if known else PeerLostError)(f"cannot connect to {address}: {detail[:200]}")


def _why(call: grpc.Call) -> str:
    """What the call's status says, if it has one already."""
    if not isinstance(call, grpc.Future):  # as the call of a stream is
        return ""
    call.cancel() if call.is_active() and not call.done() else None
    try:
        return (call.details() or "") if call.done() else ""
    except (grpc.RpcError, NetworkError):
        return ""
