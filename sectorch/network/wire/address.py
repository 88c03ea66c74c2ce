"""Where a server listens: host:port, [v6 address]:port."""

from __future__ import annotations

import errno
import os

from ...errors import ArgumentError


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
