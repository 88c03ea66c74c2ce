"""gRPC: one bidirectional stream a client, raw frames in both directions, mutual TLS, keep-alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from ...errors import (
    BusyError,
    FrameError,
    IdentityError,
    NetworkError,
    PeerLostError,
)
from ..identity.certificates import Credentials, peer_name
from .link import Link

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
]


def listen(
    address: str, credentials: Credentials, welcome: Callable[[str], Link], workers: int = 64
) -> tuple[grpc.Server, int]:
    """Start serving. `welcome` is called with the name in each client's certificate; one without a name is refused.

    Raises:
        PeerLostError: the address cannot be bound. IdentityError: the certificate is not valid now.
    """
    from concurrent.futures import ThreadPoolExecutor

    credentials.check_dates()

    def handle(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            certificate, *_ = context.auth_context().get("x509_pem_cert") or [b""]
            name = peer_name(certificate if isinstance(certificate, bytes) else b"")
        except IdentityError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        link = welcome(name)
        context.add_callback(lambda: link.close(PeerLostError(f"the connection to {link.peer} was closed")))
        threading.Thread(target=link.pump, args=(incoming,), daemon=True, name=f"from {link.peer}").start()
        yield from link.outgoing()
        if isinstance(link.closed, FrameError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"FrameError: {link.closed}"[:400])

    server = grpc.server(ThreadPoolExecutor(workers), options=_SERVER, maximum_concurrent_rpcs=workers)
    method = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("sectorch.Star", {"Connect": method})])
    tls = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)], credentials.authority, require_client_auth=True
    )
    try:
        port = server.add_secure_port(address, tls)
    except RuntimeError:
        port = 0
    if not port:
        raise PeerLostError(f"cannot listen on {address}: the address is in use or the certificate is not usable")
    server.start()
    return server, port


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


_REFUSALS = {
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
    "RPC limit": (BusyError, "the server has as many clients as it takes on; ask again later"),
    "Connection refused": (PeerLostError, "nobody listens there"),
}
"""What gRPC says when no connection comes about, and what it means."""


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
