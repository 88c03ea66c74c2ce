"""A client's side of a connection: it dials the server, and knows what it means if there is none."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from ...errors import BusyError, IdentityError, NetworkError, PeerLostError
from ..identity.certificates import Credentials
from .address import host_port
from .link import Link
from .stream import READ, Stream
from .tls import Tls, context_of, why

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
        raise PeerLostError("nobody listens there") from None
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
        raise why(error) from None
    except TimeoutError:
        sock.close()
        raise PeerLostError("nobody answers: the handshake was not finished in time") from None
    except OSError:
        sock.close()
        raise PeerLostError("the connection was closed while it was being made") from None
