"""An edge between two parties of a federation, through a server that can neither read nor change what goes over it.

Both ends agree on keys by X25519, and each signs both public keys with its long-term Ed25519 key (as SIGMA and the
station-to-station protocol do), together with the session, both names and the digest of what the session is for. Each
end knows the other's long-term key from the federation file. Each frame is then sealed by AES-256-GCM under a key of
its direction, with the count of frames as nonce. The server sees how many bytes go when, and can hold them back.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...choreography.run.frames import Frame, Kind, pack, unpack
from ...choreography.streams import agree, derive, keypair
from ...errors import FrameError, IdentityError, KeyAgreementError
from ..identity.identity import fingerprint
from ..wire.channel import Channel

_TAG = b"sectorch v1 edge signature"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
LAST = 1 << 32


class RelayedChannel(Channel):
    """A channel to another client through the server. A bad frame ends this session, not the connection."""

    def take(self, frame: Frame, read: Callable[[Frame], dict]) -> None:
        try:
            super().take(frame, read)
        except FrameError as error:
            self.fail(error)

    def _note_activity(self, frame: Frame) -> None:
        """Only sealed frames mark the other end as alive: the server could forge the others, and hide a lost party.

        A forged sealed frame is refused when it is read.
        """
        if frame.kind == Kind.DATA:
            super()._note_activity(frame)


@dataclass(frozen=True)
class EdgeEnds:
    """The two ends of an edge, as this party knows them.

    Args:
        me, other: their names.
        key: this party's identity key.
        pinned: the fingerprint of the other's.
        session: the session's name.
        digest: of what both have agreed to do.
    """

    me: str
    other: str
    key: Ed25519PrivateKey
    pinned: str
    session: bytes
    digest: bytes

    def statement(self, signer: str, of_signer: bytes, reader: str, of_reader: bytes) -> bytes:
        """The bytes that an end signs. Each part has its length before it, so that no two statements are equal."""
        parts = (_TAG, self.session, self.digest, signer.encode(), of_signer, reader.encode(), of_reader)
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class SealedChannel:
    """This party's end of an edge; a `choreography.run.party.Channel`.

    Call `hello` at all edges of a session, then `prove` at all, then `agree` at all.

    Args:
        channel: to the other end, through the server.
        ends: who they are.
        largest: bytes of the largest message that may come.
    """

    def __init__(self, channel: Channel, ends: EdgeEnds, largest: int):
        self._channel, self._ends = channel, ends
        self._private, self._public = keypair()
        self._peer_public = b""
        self._sent, self._received = itertools.count(), itertools.count()
        self._sending = threading.Lock()
        self._seal: AESGCM | None = None
        self._open: AESGCM | None = None
        channel.begin_call()
        channel.grant_credit(largest + (largest >> 12) + (1 << 20))

    def hello(self) -> None:
        """Send this session's public key."""
        self._send_part("hello", self._public)

    def prove(self) -> None:
        """Sign both public keys, and send the signature.

        Raises:
            FrameError: the other end sent no key.
        """
        self._peer_public = self._receive_part("hello", KEY_BYTES)
        ends = self._ends
        signed = ends.key.sign(ends.statement(ends.me, self._public, ends.other, self._peer_public))
        self._send_part("proof", ends.key.public_key().public_bytes_raw() + signed)

    def agree(self) -> None:
        """Check the other end's signature and derive the keys.

        Raises:
            KeyAgreementError: the signature is of another statement, or the key is invalid.
            IdentityError: the signature is by another identity key than the pinned one.
        """
        ends, proof = self._ends, self._receive_part("proof", KEY_BYTES + SIGNATURE_BYTES)
        public, signature = proof[:KEY_BYTES], proof[KEY_BYTES:]
        try:
            known = Ed25519PublicKey.from_public_bytes(public)
            known.verify(signature, ends.statement(ends.other, self._peer_public, ends.me, self._public))
        except (InvalidSignature, ValueError):
            raise KeyAgreementError(
                f"'{ends.other}' has not signed this session: it has another federation file, program or version, or "
                f"the server has put a key of its own in between. Nothing was sent; compare with '{ends.other}'"
            ) from None
        if fingerprint(public) != ends.pinned:
            raise IdentityError(
                f"'{ends.other}' has the identity key {fingerprint(public)}, and the federation file names "
                f"{ends.pinned}; ask '{ends.other}' which one is right"
            )
        secret = agree(self._private, self._public, self._peer_public, ends.session)
        self._seal = AESGCM(derive(secret, ends.session, f"edge/{ends.me}/{ends.other}", 32))
        self._open = AESGCM(derive(secret, ends.session, f"edge/{ends.other}/{ends.me}", 32))

    def send(self, parts: Iterable[bytes], later: bool = False) -> None:
        with self._sending:
            self._channel.send(map(self._encrypt, parts), later)

    def beat(self) -> None:
        """Send a heartbeat: a sealed frame without content, numbered like the others.

        So the other end notices within two heartbeats that frames were held back, and nobody can forge one.
        """
        if self._channel.crowded or not self._sending.acquire(blocking=False):
            return  # the other end has frames to read, or another thread is sending to it
        try:
            self._channel.send([self._encrypt(b"")])
        finally:
            self._sending.release()

    def flush(self) -> None:
        with self._sending:
            self._channel.flush()

    def receive(self) -> Frame:
        """The next frame.

        Raises:
            FrameError: the frame is not what the other end sent, or not the next one.
            PeerLostError, AbortedError: see `wire.channel.Channel`.
        """
        data = b""
        while not data:  # a heartbeat is empty
            data = self._decrypt(next(self._received), self._channel.receive())
        frames = list(unpack(data))
        if len(frames) != 1:
            raise FrameError(f"a frame of '{self._ends.other}' that is not one")
        return frames[0]

    def _decrypt(self, number: int, frame: Frame) -> bytes:
        other = self._ends.other
        if self._open is None or frame.kind != Kind.DATA or frame.number != number or frame.label != "":
            raise FrameError(f"a frame of '{other}' that does not belong here: some were held back, or put in between")
        try:
            return self._open.decrypt(_nonce(number), bytes(frame.payload), None)
        except InvalidTag:
            raise FrameError(f"a frame of '{other}' was changed on the way, or is not of this session") from None

    def _encrypt(self, part: bytes) -> bytes:
        # A nonce is used once: numbers go up, under the lock of the sender, and each direction has its own key.
        number = next(self._sent)
        if self._seal is None or number >= LAST:
            raise FrameError("an edge without keys, or at the end of their use; begin a new session")
        data = self._seal.encrypt(_nonce(number), part, None)
        return pack(Frame(Kind.DATA, self._channel.session, number=number, payload=data))

    def _send_part(self, label: str, data: bytes) -> None:
        self._channel.send([pack(Frame(Kind.DATA, self._channel.session, label=label, payload=data))])

    def _receive_part(self, label: str, size: int) -> bytes:
        frame = self._channel.receive()
        if frame.kind != Kind.DATA or frame.label != label or len(frame.payload) != size:
            raise FrameError(f"'{self._ends.other}' does not agree on keys as this version does")
        return bytes(frame.payload)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def digest_of(agreed: str) -> bytes:
    """The 32-byte digest of what the parties of a session have to agree on."""
    return hashlib.sha256(agreed.encode()).digest()
