"""TLS 1.3 with certificates on both sides, over bytes in memory: whoever holds the socket reads and writes it.

So a lock is held for the cipher alone and never while somebody waits, and two threads may read and write at once, which
`ssl.SSLSocket` does not allow before Python 3.13.
"""

from __future__ import annotations

import os
import ssl
import threading
from contextlib import suppress

from ...errors import IdentityError, NetworkError, PeerLostError
from ..identity.certificates import Credentials


def context_of(credentials: Credentials, server: bool = False) -> ssl.SSLContext:
    """What this party shows, and whom it takes: certificates of its CA, for the other one's purpose.

    Raises:
        IdentityError: the certificate, the key or the CA cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA that is named may be one below a root
    if server:
        context.num_tickets = 0
    else:
        context.hostname_checks_common_name = False
    pipes: list[int] = []
    try:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
        certificate, key = (_piped(pem, pipes) for pem in (credentials.certificate, credentials.key))
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        said = getattr(error, "reason", None) or type(error).__name__
        raise IdentityError(
            f"the certificate of '{credentials.called}', its key or the CA's certificate cannot be used ({said}); "
            f"name PEM files that hold one each"
        ) from None
    finally:
        for end in pipes:
            os.close(end)
    return context


def _piped(pem: bytes, pipes: list[int]) -> str:
    """A name under which `ssl` reads these bytes, which it takes from files only; no key goes to a disk for that."""
    reading, writing = os.pipe()
    pipes.append(reading)
    try:
        os.set_blocking(writing, False)
        if os.write(writing, pem) < len(pem):
            raise ValueError
    finally:
        os.close(writing)
    return f"/dev/fd/{reading}"


class Tls:
    """One end of a connection. `feed` takes what came from the socket, `sealed` gives what goes there."""

    def __init__(self, context: ssl.SSLContext, host: str | None = None):
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=host is None, server_hostname=host)
        self._lock = threading.Lock()
        self.shaken = False

    def shake(self) -> bytes:
        """Go on with the handshake, by what came; what has to be sent for it.

        Raises:
            OSError: it is over; `last` is to be sent still.
        """
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.shaken = True
        return self._out.read()

    def last(self) -> bytes:
        """What is to be sent of an end, or of an error: the alert that says why."""
        with self._lock:
            with suppress(ssl.SSLError, ValueError):
                self._tls.unwrap()  # the other side's end is not waited for
            return self._out.read()

    def shown(self) -> bytes:
        """The other side's certificate, as PEM."""
        der = self._tls.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode() if der else b""

    def feed(self, data: bytes | memoryview) -> None:
        """Take what came from the socket; nothing means that nothing more comes."""
        with self._lock:
            self._in.write(data) if data else self._in.write_eof()

    def read(self, into: memoryview) -> int:
        """The next bytes of one record; none if there is no whole one.

        Raises:
            EOFError: the other side has ended the connection. OSError: it is broken, or was refused.
        """
        with self._lock:
            if not self._in.pending and not self._tls.pending() and not self._in.eof:
                return 0
            try:
                count: int = self._tls.read(len(into), into)  # type: ignore[assignment]  # with a buffer it is one
            except ssl.SSLWantReadError:
                return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                count = 0
        if not count:
            raise EOFError
        return count

    def sealed(self, data: bytes | memoryview) -> bytes:
        """Records that hold `data`, to be sent in the order in which they were made."""
        with self._lock:
            done = self._tls.write(data)
            while done < len(data):  # a record at a time
                done += self._tls.write(memoryview(data)[done:])
            return self._out.read()


_EXPIRED, _EARLY, _PURPOSE, _HOST, _ADDRESS = 10, 9, 26, 62, 64
"""OpenSSL's codes of what is wrong with a certificate (X509_V_ERR_...)."""
_WRONG = {
    _EXPIRED: "the {}'s certificate has expired",
    _EARLY: "the {}'s certificate is not valid yet: one of the two clocks may be wrong",
    _PURPOSE: "its certificate is not a {}'s: a client may be posing as the server",
    _HOST: "the {}'s certificate is for another host name",
    _ADDRESS: "the {}'s certificate is for another host name",
}
_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")
"""What the other side's alerts have in their names where it does not accept this party's certificate; the last one
where a CA of the right name has not signed it."""


def why(error: ssl.SSLError, other: str = "server") -> NetworkError:
    """What a TLS error means for this party.

    Args:
        other: what the other side is: a server or a client.
    """
    said = (error.reason or error.strerror or type(error).__name__).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        wrong = _WRONG.get(error.verify_code, "the {}'s certificate is not of the CA that --ca names")
        return IdentityError(wrong.format(other))
    if "ALERT" in (error.reason or "") and any(word in (error.reason or "") for word in _ALERTS):
        return IdentityError(f"the {other} does not accept this party's certificate ({said})")
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return IdentityError(f"the {other} shows no certificate")
    if isinstance(error, ssl.SSLEOFError):
        return PeerLostError("the connection was closed while it was being made")
    return PeerLostError(f"what came is no TLS of this kind, or was changed on the way ({said})")
