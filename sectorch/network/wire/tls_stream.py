"""A TLS connection that carries a link: one thread reads it, and one writes what senders could not write themselves.

    length 4 | frames, as `choreography.run.frames` packs them

in TLS records. A length of zero is a sign of life: each end gives one where it has sent nothing else for `PING`
seconds. An end that gets no whole record for `SILENT` of them while it waits for one takes the connection for lost.
So a link that lets single bytes through counts as silent, and the time in which this end reads nothing does not.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from ...errors import FrameError, IdentityError, NetworkError, PeerLostError, SectorchError
from ..identity.identity import Credentials
from .channel import Link

# Threads of this package's own, which carry a connection and give signs of life: none of them opens a session.


_LOCK = threading.Lock()
_OURS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(work: Callable[..., Any], name: str, *args: Any) -> threading.Thread:
    """A thread that does this and ends with the process."""
    thread = threading.Thread(target=work, args=args, daemon=True, name=name)
    with _LOCK:
        _OURS.add(thread)
    thread.start()
    return thread


def no_other_threads() -> bool:
    """Whether this process has no thread but the one that asks and those: while it waits, nobody else here begins
    anything."""
    with _LOCK:
        others = [thread for thread in threading.enumerate() if thread not in _OURS]
    return others == [threading.current_thread()]


# TLS 1.3 with certificates on both sides, over bytes in memory: whoever holds the socket reads and writes it.
#
# So a lock is held for the cipher alone and never while somebody waits, and two threads may read and write at once,
# which `ssl.SSLSocket` does not allow before Python 3.13.


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

    def peer_certificate(self) -> bytes:
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


def tls_error_text(error: ssl.SSLError, other: str = "server") -> NetworkError:
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


PING = 0.9
SILENT = 5
WAITS = 3
"""How often in `PING` a read that waits looks at the time: bytes that come one by one do not put that off for long."""
WAIT = struct.pack("ll", 0, 900_000 // WAITS)
"""As a socket takes it: a read that waits gives up after it."""
LARGEST = 8 << 20
"""Bytes of frames that go together at most."""
SMALL = 32 << 10
"""Bytes up to which what comes together is copied out of the buffer for reading."""
SLICE = 128 << 10
"""Bytes that are put into records at once, so that the first of them leave while others are made."""
READ = 256 << 10
LINGER = 3.0
"""Seconds for a last word to reach the peer, whose own are read and dropped meanwhile."""
_HEAD = struct.Struct(">I")


def piece(data: bytes) -> bytes:
    """Frames as they go in records."""
    return _HEAD.pack(len(data)) + data


class Stream:
    """A connection whose handshake is over.

    Args:
        sock: which no one else reads or writes any more.
        first: bytes that the peer sent after its handshake, if they were read already.
        ended: called once when the connection is over.
    """

    def __init__(self, sock: socket.socket, tls: Tls, link: Link, first: bytes = b"", ended: Callable = lambda: None):
        self.link = link
        self._sock, self._tls, self._first, self._ended = sock, tls, first, ended
        self._sealed = self._plain = memoryview(b"")
        self._broken, self._silent, self._left, self._wrote = False, False, False, 0.0
        self._written = threading.Event()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, WAIT)

    def start(self) -> None:
        """Carry the link, in threads of its own."""
        start_thread(self.run, f"from {self.link.peer}")

    def run(self) -> None:
        """Carry the link until the connection is over."""
        start_thread(self._keep_writing, f"to {self.link.peer}")
        try:
            self.link.outbox.begin(self._write)
            self.link.pump(self._pieces())
            if not self._silent and not self._left:
                self._linger()
        finally:
            self.close()
            self._sock.close()
            self._ended()

    def close(self) -> None:
        """End the connection now, without a word."""
        self._break()
        self.link.close(PeerLostError(f"the connection to {self.link.peer} was closed"))

    # What goes.

    def _write(self, data: bytes) -> bool:
        """Send frames; whether all of it went, or could go, without waiting. For one thread at a time."""
        self._wrote = time.monotonic()
        if len(data) <= SLICE:
            self._plain = memoryview(piece(data))
        else:
            try:
                self._sealed = memoryview(self._tls.sealed(_HEAD.pack(len(data)) + data[: SLICE - _HEAD.size]))
            except OSError:  # the connection is over; whoever reads it says why
                self._break()
                return True
            self._plain = memoryview(data)[SLICE - _HEAD.size :]
        return self._go_on()

    def _go_on(self) -> bool:
        try:
            while not self._broken:
                while self._sealed:
                    count = self._sock.send(self._sealed, socket.MSG_DONTWAIT)
                    self._sealed = self._sealed[count:]
                if not self._plain:
                    break
                part, self._plain = self._plain[:SLICE], self._plain[SLICE:]
                self._sealed = memoryview(self._tls.sealed(part))
        except BlockingIOError:
            return False
        except OSError:  # whoever reads the connection says why
            self._break()
        return True

    def _break(self) -> None:
        self._broken = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever reads it hears of it

    def _keep_writing(self) -> None:
        """What senders leave, signs of life, and the end."""
        outbox = self.link.outbox
        while not outbox.over and not self._broken:
            if outbox.wait_for_handover(PING):
                while not self._go_on():
                    self._wait_for_room()
                outbox.write_waiting()
            elif time.monotonic() - self._wrote >= PING and outbox.empty():
                with suppress(SectorchError):
                    outbox.put(b"", urgent=True)
        if not self._broken:
            with suppress(OSError):
                self._sock.sendall(self._tls.last())
                self._sock.shutdown(socket.SHUT_WR)
        self._written.set()

    def _wait_for_room(self) -> None:
        wait = select.poll()
        with suppress(ValueError):  # closed meanwhile
            wait.register(self._sock, select.POLLOUT)
        wait.poll(1e3 * PING)

    # What comes.

    def _pieces(self) -> Iterator[bytes | memoryview]:
        try:
            yield from self._read()
        except EOFError:
            self._left = True  # who has ended the connection drops what comes: nothing of it is waited for
            return
        except ssl.SSLError as error:
            raise tls_error_text(error) from None

    def _read(self) -> Iterator[bytes | memoryview]:
        came = memoryview(bytearray(READ))
        plain = memoryview(bytearray(2 * SMALL))
        have = len(self._first)
        plain[:have] = self._first
        large, done = None, 0
        while True:
            if large is None:
                at = 0
                while have - at >= _HEAD.size:
                    (size,) = _HEAD.unpack_from(plain, at)
                    if size > LARGEST:
                        raise FrameError(f"{size} bytes in one piece; at most {LARGEST}")
                    end = at + _HEAD.size + size
                    if end <= have:
                        if size:
                            yield bytes(plain[at + _HEAD.size : end])
                        at = end
                    elif _HEAD.size + size > SMALL:
                        # Memory that is not touched before something comes for it.
                        large = np.empty(size, np.uint8).data
                        done = have - at - _HEAD.size
                        large[:done] = plain[at + _HEAD.size : have]
                        at = have
                    else:
                        break
                plain[: have - at] = plain[at:have]
                have -= at
            if large is not None and done == len(large):
                whole, large = large, None
                yield whole
                continue
            into = plain[have:] if large is None else large[done:]
            count = self._decrypted(into, came)
            if large is None:
                have += count
            else:
                done += count

    def _decrypted(self, into: memoryview, came: memoryview) -> int:
        """The next bytes of a record; waits for it."""
        if count := self._tls.read(into):
            return count
        since, silent = time.monotonic(), 0
        while True:
            try:
                self._tls.feed(came[: self._sock.recv_into(came)])
            except BlockingIOError:
                silent += 1
            if count := self._tls.read(into):
                return count
            long = time.monotonic() - since > SILENT * PING
            if silent >= SILENT * WAITS or (long and not self._more()):
                self._silent = True  # who says nothing reads no last word
                raise PeerLostError(f"{self.link.peer} has given no sign of life for {SILENT * PING:g} s")
            if self.link.closed is not None and time.monotonic() - since > LINGER:
                raise EOFError

    def _more(self) -> bool:
        """Whether bytes are here that were not read: then it was this process that did not come to it."""
        wait = select.poll()
        wait.register(self._sock, select.POLLIN)
        return bool(wait.poll(0))

    def _linger(self) -> None:
        """Wait until what is queued is out, and for the peer to have read it: then it ends the connection."""
        end, came = time.monotonic() + LINGER, bytearray(READ)
        with suppress(OSError):
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    if not self._sock.recv_into(came):
                        break
        self._written.wait(max(0.0, end - time.monotonic()))
