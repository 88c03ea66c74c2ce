"""A TLS connection that carries a link: one thread reads it, and one writes what senders could not write themselves.

    length 4 | frames, as `choreography.run.frames` packs them

in TLS records. A length of zero is a sign of life: each end sends one when it has sent nothing else for `PING` seconds.
An end that waits for a record and gets no whole one for `SILENT * PING` seconds takes the connection for lost. So a
link that lets single bytes through counts as silent; time in which this end does not read is not counted.
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
from ..memory import with_memory
from .channel import PeerLink

_LOCK = threading.Lock()
_CARRIERS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that carry connections; none of them opens a session."""


def start_carrier(work: Callable[..., Any], name: str, *args: Any) -> threading.Thread:
    """Run a function in a daemon thread that carries a connection."""
    thread = threading.Thread(target=work, args=args, daemon=True, name=name)
    with _LOCK:
        _CARRIERS.add(thread)
    thread.start()
    return thread


def is_single_threaded() -> bool:
    """Whether no thread but this one could open a session in this process; carriers of connections do not count."""
    with _LOCK:
        return [t for t in threading.enumerate() if t not in _CARRIERS] == [threading.current_thread()]


def context_of(credentials: Credentials, server: bool = False) -> ssl.SSLContext:
    """The TLS settings of a party: TLS 1.3, its certificate, and peers with a certificate of its CA for their purpose.

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
        certificate, key = (_pipe(pem, pipes) for pem in (credentials.certificate, credentials.key))
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


def _pipe(pem: bytes, pipes: list[int]) -> str:
    """A path from which `ssl`, which takes files only, reads these bytes. So no key goes to a disk."""
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
    """One end of a TLS connection, over bytes in memory; its user reads and writes the socket.

    The lock is held for the cipher only, and never while a thread waits. So two threads may read and write at the same
    time, which `ssl.SSLSocket` does not allow before Python 3.13.
    """

    def __init__(self, context: ssl.SSLContext, host: str | None = None):
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=host is None, server_hostname=host)
        self._lock = threading.Lock()
        self.shaken = False

    def shake(self) -> bytes:
        """Continue the handshake with the bytes that were fed; returns the bytes to send.

        Raises:
            OSError: the handshake has failed; `closing_bytes` are still to be sent.
        """
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.shaken = True
        return self._out.read()

    def closing_bytes(self) -> bytes:
        """The bytes to send at the end, or after an error: the alert that says why."""
        with self._lock:
            with suppress(ssl.SSLError, ValueError):
                self._tls.unwrap()  # does not wait for the peer's end
            return self._out.read()

    def peer_certificate(self) -> bytes:
        """The peer's certificate, as PEM."""
        der = self._tls.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode() if der else b""

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that came from the socket; empty ones mean that the peer has ended the connection."""
        with self._lock:
            self._in.write(data) if data else self._in.write_eof()

    def read(self, into: memoryview) -> int:
        """Write the next bytes of one record into a buffer; returns their number, 0 while there is no whole record.

        Raises:
            EOFError: the peer has ended the connection. OSError: it is broken, or was refused.
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

    def encrypt(self, *parts: bytes | memoryview) -> bytes:
        """Records that hold these bytes, to be sent in the order of the calls."""
        with self._lock:
            for part in map(memoryview, parts):
                while part:  # a record at a time
                    part = part[self._tls.write(part) :]
            return self._out.read()


_EXPIRED, _EARLY, _PURPOSE, _HOST, _ADDRESS = 10, 9, 26, 62, 64
"""OpenSSL's codes for an invalid certificate (X509_V_ERR_...)."""
_INVALID = {
    _EXPIRED: "the {}'s certificate has expired",
    _EARLY: "the {}'s certificate is not valid yet: one of the two clocks may be wrong",
    _PURPOSE: "its certificate is not a {}'s: a client may be posing as the server",
    _HOST: "the {}'s certificate is for another host name",
    _ADDRESS: "the {}'s certificate is for another host name",
}
_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")
"""Parts of the names of alerts by which a peer refuses this party's certificate. The last one comes where the
certificate names the peer's CA, which has not signed it."""


def tls_error_text(error: ssl.SSLError, other: str = "server") -> NetworkError:
    """A TLS error as an error of this package, in words for this party.

    Args:
        other: the peer: "server" or "client".
    """
    reason = (error.reason or error.strerror or type(error).__name__).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        text = _INVALID.get(error.verify_code, "the {}'s certificate is not of the CA that --ca names")
        return IdentityError(text.format(other))
    if "ALERT" in (error.reason or "") and any(word in (error.reason or "") for word in _ALERTS):
        return IdentityError(f"the {other} does not accept this party's certificate ({reason})")
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return IdentityError(f"the {other} shows no certificate")
    if isinstance(error, ssl.SSLEOFError):
        return PeerLostError("the connection was closed while it was being made")
    return PeerLostError(f"what came is no TLS of this kind, or was changed on the way ({reason})")


PING = 0.9
SILENT = 5
WAITS = 3
"""How often in `PING` a waiting read looks at the time, so that bytes that come one by one do not put that off long."""
WAIT = struct.pack("ll", 0, 900_000 // WAITS)
"""`PING / WAITS` as a `timeval`, after which a waiting read gives up."""
LARGEST = 8 << 20
"""Largest number of bytes of frames behind one length."""
SMALL = 32 << 10
"""Bytes up to which frames are read through a buffer and copied; longer ones are read into memory of their own."""
SLICE = 128 << 10
"""Bytes that are encrypted at a time, so that the first records leave while others are made."""
READ = 256 << 10
"""Bytes of the buffer for the socket."""
LINGER = 3.0
"""Seconds for the last frames to reach the peer; what it sends meanwhile is read and dropped."""
_HEAD = struct.Struct(">I")
FIRST = (16 << 10) - _HEAD.size
"""Bytes that are in one record of TLS together with their length."""


def with_length(data: bytes) -> bytes:
    """Frames with their length before them."""
    return _HEAD.pack(len(data)) + data


class Stream:
    """A connection whose handshake is over, and which carries a link.

    Args:
        sock: the socket; nothing else reads or writes it.
        first: bytes that the peer has sent after its handshake and that were read already.
        ended: called once when the connection is over.
    """

    def __init__(
        self, sock: socket.socket, tls: Tls, link: PeerLink, first: bytes = b"", ended: Callable = lambda: None
    ):
        self.link = link
        self._sock, self._tls, self._first, self._ended = sock, tls, first, ended
        # What `_write` could not send: encrypted bytes, and plain ones behind them.
        self._encrypted = self._plain = memoryview(b"")
        self._broken = self._peer_silent = self._peer_ended = False
        self._last_write, self._all_written = 0.0, threading.Event()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, WAIT)

    def start(self) -> None:
        """Carry the link, in threads of its own."""
        start_carrier(self.run, f"from {self.link.peer}")

    def run(self) -> None:
        """Carry the link until the connection is over."""
        start_carrier(self._keep_writing, f"to {self.link.peer}")
        try:
            self.link.outbox.begin(self._write)
            self.link.pump(self._incoming())
            if not self._peer_silent and not self._peer_ended:
                self._linger()
        finally:
            self.close()
            self._sock.close()
            self._ended()

    def close(self) -> None:
        """End the connection now; nothing more is sent."""
        self._break()
        self.link.close(PeerLostError(f"the connection to {self.link.peer} was closed"))

    # Outgoing bytes.

    def _write(self, data: bytes) -> bool:
        """Send frames without waiting, as far as the socket takes them; called by one thread at a time.

        Returns:
            Whether all bytes went; the rest is for `_write_rest`. True also where the connection is broken.
        """
        self._last_write = time.monotonic()
        whole = memoryview(data)
        try:  # only what is in one record with the length is copied
            begun = self._tls.encrypt(_HEAD.pack(len(data)) + data[:FIRST], whole[FIRST:SLICE])
        except (OSError, MemoryError):  # the connection is over; the reading thread reports why
            self._break()
            return True
        self._encrypted, self._plain = memoryview(begun), whole[SLICE:]
        return self._write_rest()

    def _write_rest(self) -> bool:
        try:
            while not self._broken:
                while self._encrypted:
                    count = self._sock.send(self._encrypted, socket.MSG_DONTWAIT)
                    self._encrypted = self._encrypted[count:]
                if not self._plain:
                    break
                part, self._plain = self._plain[:SLICE], self._plain[SLICE:]
                self._encrypted = memoryview(self._tls.encrypt(part))
        except BlockingIOError:
            return False
        except (OSError, MemoryError):  # the reading thread reports why
            self._break()
        return True

    def _break(self) -> None:
        self._broken = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reading thread

    def _keep_writing(self) -> None:
        """Write what senders could not write themselves, signs of life, and the end; the writing thread's loop."""
        outbox = self.link.outbox
        while not outbox.over and not self._broken:
            if outbox.wait_for_handover(PING):
                while not self._write_rest():
                    self._wait_for_room()
                outbox.write_waiting()
            elif time.monotonic() - self._last_write >= PING and outbox.empty():
                with suppress(SectorchError):
                    outbox.put(b"", urgent=True)
        if not self._broken:
            with suppress(OSError):
                self._sock.sendall(self._tls.closing_bytes())
                self._sock.shutdown(socket.SHUT_WR)
        self._all_written.set()

    def _wait_for_room(self) -> None:
        wait = select.poll()
        with suppress(ValueError):  # closed meanwhile
            wait.register(self._sock, select.POLLOUT)
        wait.poll(1e3 * PING)

    # Incoming bytes.

    def _incoming(self) -> Iterator[bytes | memoryview]:
        """The frames that come, a length's worth at a time, until the peer ends the connection."""
        try:
            yield from self._read()
        except EOFError:
            self._peer_ended = True  # it drops what is sent to it, so `_linger` would wait for nothing
            return
        except ssl.SSLError as error:
            raise tls_error_text(error) from None

    def _read(self) -> Iterator[bytes | memoryview]:
        # `plain[:have]` is decrypted and not yet given out. Small frames are copied out of it. A large one is read
        # into memory of its own (`large`, of which `done` bytes are there), so that its payload is not copied again.
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
                        # numpy does not touch the memory: a peer that names a size and sends nothing takes none.
                        large = with_memory(lambda size=size: np.empty(size, np.uint8)).data
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
            count = self._wait_for_bytes(into, came)
            if large is None:
                have += count
            else:
                done += count

    def _wait_for_bytes(self, into: memoryview, came: memoryview) -> int:
        """Wait for a record, and write its next bytes into a buffer; returns their number.

        Raises:
            PeerLostError: the peer gave no sign of life.
            EOFError: the link is closed, and the peer has had `LINGER` seconds to end the connection.
        """
        if count := self._tls.read(into):
            return count
        since, silent = time.monotonic(), 0
        while True:
            try:
                count = self._sock.recv_into(came)
                with_memory(lambda: self._tls.feed(came[:count]))
            except BlockingIOError:
                silent += 1
            if count := self._tls.read(into):
                return count
            long = time.monotonic() - since > SILENT * PING
            # Bytes that are here and were not read mean that this process was late, and not the peer.
            if silent >= SILENT * WAITS or (long and not self._has_bytes()):
                self._peer_silent = True  # it reads no last frames, so `_linger` would wait for nothing
                raise PeerLostError(f"{self.link.peer} has given no sign of life for {SILENT * PING:g} s")
            if self.link.closed is not None and time.monotonic() - since > LINGER:
                raise EOFError

    def _has_bytes(self) -> bool:
        """Whether the socket has bytes that were not read."""
        wait = select.poll()
        wait.register(self._sock, select.POLLIN)
        return bool(wait.poll(0))

    def _linger(self) -> None:
        """Wait until all queued frames were sent, and until the peer has read them and ends the connection."""
        end, came = time.monotonic() + LINGER, bytearray(READ)
        with suppress(OSError):
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    if not self._sock.recv_into(came):
                        break
        self._all_written.wait(max(0.0, end - time.monotonic()))
