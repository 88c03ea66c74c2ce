"""Shared randomness: key agreement, and AES-CTR streams that two parties draw from without talking.

A pair of parties holds one secret per session. From it, HKDF-SHA256 derives an AES-128 key for each label (the name of
a protocol's random value), and a draw is the key stream from the counter block

    call (32 bits) | draw within the call (32 bits) | 0 (32 bits) | block (32 bits), from 2 on

so a draw is addressed by (session, call, label, place in the program) and does not depend on earlier draws. A party
that runs ahead of the others therefore draws the same values. A call whose streams may be shown has a secret of its own
(`PairKey.of_call`), and one key for all labels: its draws differ in their numbers. Counters begin at 2 because those of
AES-GCM do (NIST SP 800-38D; block 1 is for its tag): GCM's encryption of zeros is the same stream, and OpenSSL computes
it faster on processors with vectors of AES (benchmarks/streams.py). AES, X25519 and HKDF are those of the
`cryptography` package.
Source: PrivHFL, Figure 18 (Pi_Seed) and section 2.3.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.constant_time import bytes_eq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import KeyAgreementError, StreamReuseError

SECRET_BYTES = 32
_ZEROS = memoryview(bytes(1 << 18))  # plaintext: the key stream itself comes out; 256 KiB stay in cache
_FIRST = (2).to_bytes(4, "big")
_LONG = 1 << 16
"""From so many bytes on, a stream by GCM is faster than one by CTR on processors with vectors of AES."""


class PairKey:
    """The secret of two parties in one session, and the streams under it. Its repr shows nothing.

    Args:
        one_call: it is of one call alone (`of_call`), in which all draws have different numbers, whatever their labels.
            Then they are places of one stream: a key for each label would cost as much as a draw.
    """

    def __init__(self, secret: bytes, session: bytes, one_call: bool = False):
        if len(secret) != SECRET_BYTES:
            raise KeyAgreementError(f"a pair secret has {SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = secret
        self._session = session
        self._one_call = one_call
        self._keys: dict[str, algorithms.AES] = {}
        self._streams: dict[str, CipherContext] = {}
        self._latest: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "PairKey(...)"

    def __reduce__(self):
        raise StreamReuseError("a pair key cannot be copied or pickled: two copies would draw the same randomness")

    def same_secret(self, other: PairKey) -> bool:
        """Whether both ends hold the same secret, in constant time."""
        return bytes_eq(self._secret, other._secret)

    def of_call(self, call: int) -> bytes:
        """The secret of one call. To reveal it shows the call's streams, and no others."""
        return derive(self._secret, self._session, f"call/{call}", SECRET_BYTES)

    def replica(self) -> PairKey:
        """A key that draws the same streams a second time, for a party that checks another's computation."""
        return PairKey(self._secret, self._session, self._one_call)

    def disclose(self, call: int, labels: Iterable[str]) -> DisclosedKey:
        """What shows the streams of one call that has a secret of its own, and those of labels in all other calls."""
        return DisclosedKey(
            self._session, {call: self.of_call(call)}, {label: self._label_key(label) for label in labels}
        )

    def _label_key(self, label: str) -> bytes:
        return derive(self._secret, self._session, f"stream/{label}", 16)

    def words(self, label: str, call: int, draw: int, count: int, pinned: bool = False) -> torch.Tensor:
        """`count` uniform ring elements, int64 [count]; `pinned` in page-locked memory, from which a device can copy.

        Raises:
            StreamReuseError: this place of the stream, or a later one of the same call, was drawn already.
        """
        out = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.fill(label, call, draw, out.numpy().data.cast("B") if count else memoryview(b""))
        return out

    def fill(self, label: str, call: int, draw: int, out: memoryview) -> None:
        """As `words`, into existing memory."""
        self._claim(label, call, draw)
        self._fill(label, call, draw, out)

    def filling(self, label: str, call: int, draw: int, out: memoryview) -> Callable[[], None]:
        """As `fill`, in two steps: this marks the place as drawn, and the returned function writes the words, in any
        thread."""
        self._claim(label, call, draw)
        return functools.partial(self._fill, label, call, draw, out)

    def _claim(self, label: str, call: int, draw: int) -> None:
        if not (0 <= call < 1 << 32 and 0 <= draw < 1 << 32):
            raise StreamReuseError("the counters of this session are used up; open a new session")
        with self._lock:  # if two threads ask for one place, one is refused
            # Draws of a label go up, so the latest number of each label tells all that were made.
            latest = self._latest.setdefault(call, {})
            if self._one_call:  # of different labels they come in any order
                label, last = str(draw), latest.get(str(draw), -1)
            else:
                last = latest.get(label, -1)
            if draw <= last:
                raise StreamReuseError(f"draw {draw} of '{label}' in call {call} was made already")
            latest[label] = draw

    def forget(self, call: int) -> None:
        """Drop the bookkeeping of a finished call; the session never hands out its number again."""
        with self._lock:
            self._latest.pop(call, None)

    def _fill(self, label: str, call: int, draw: int, out: memoryview) -> None:
        if not len(out):
            return
        label = "one call" if self._one_call else label
        key = self._keys.get(label)
        if key is None:
            key = self._keys[label] = algorithms.AES(self._label_key(label))
        # A nonce for each call and draw. The counter of blocks follows it, and starts at 2, as GCM's content does.
        nonce = call.to_bytes(4, "big") + draw.to_bytes(4, "big") + bytes(4)
        if by_gcm(len(out)):
            _fill(Cipher(key, modes.GCM(nonce)).encryptor(), out)
            return
        stream = self._streams.pop(label, None)  # while another thread has the stream, this one makes a new one
        if stream is None:
            stream = Cipher(key, modes.CTR(nonce + _FIRST)).encryptor()
        else:
            stream.reset_nonce(nonce + _FIRST)
        _fill(stream, out)
        self._streams[label] = stream


class DisclosedKey(PairKey):
    """What somebody is shown of a pair's secret: enough to draw some streams a second time, and no others.

    Args:
        calls: secrets of calls that have one of their own, by number.
        labels: keys of the streams of labels, which calls without a secret of their own draw from.
    """

    def __init__(self, session: bytes, calls: Mapping[int, bytes], labels: Mapping[str, bytes]):
        super().__init__(bytes(SECRET_BYTES), session)
        self.calls, self.labels = dict(calls), dict(labels)

    def of_call(self, call: int) -> bytes:
        return self._shown(self.calls, call)

    def _label_key(self, label: str) -> bytes:
        return self._shown(self.labels, label)

    def replica(self) -> DisclosedKey:
        return DisclosedKey(self._session, self.calls, self.labels)

    def _shown(self, keys: Mapping, name: object) -> bytes:
        if name not in keys:
            raise KeyAgreementError(f"the streams of {name!r} are not among those that were shown")
        return keys[name]


class PairKeys:
    """The pair keys that a process holds in one session, by pair of parties. Its repr shows nothing."""

    def __init__(self, session: bytes):
        self._session = session
        self._keys: dict[frozenset, PairKey] = {}
        self._separate: dict[int, dict[frozenset, PairKey]] = {}

    def __repr__(self) -> str:
        return f"PairKeys({len(self._keys)} pairs)"

    def words(
        self, pair: frozenset, label: str, call: int, draw: int, count: int, pinned: bool = False
    ) -> torch.Tensor:
        """As `PairKey.words`, from the call's own key if it has one."""
        return self._of_call(pair, call).words(label, call, draw, count, pinned)

    def fill(self, pair: frozenset, label: str, call: int, draw: int, out: memoryview) -> None:
        """As `words`, into existing memory."""
        self._of_call(pair, call).fill(label, call, draw, out)

    def filling(self, pair: frozenset, label: str, call: int, draw: int, out: memoryview) -> Callable[[], None]:
        """As `PairKey.filling`."""
        return self._of_call(pair, call).filling(label, call, draw, out)

    def _of_call(self, pair: frozenset, call: int) -> PairKey:
        found = self._separate.get(call)
        if found is None:
            return self.of(pair)
        if pair not in found:
            self.lend(pair, call, self.of(pair).of_call(call))
        return found[pair]

    def of(self, pair: frozenset) -> PairKey:
        """The key of this pair.

        Raises:
            KeyAgreementError: the pair has no key yet.
        """
        key = self._keys.get(pair)
        if key is None:
            raise KeyAgreementError(f"{_names(pair)} hold no pair key yet: run the seed protocol first")
        return key

    def install(self, pair: frozenset, key: PairKey) -> None:
        """Keep the key of a pair.

        Raises:
            KeyAgreementError: the pair has a key with another secret.
        """
        if not self._keys.setdefault(pair, key).same_secret(key):
            raise KeyAgreementError(f"{_names(pair)} did not agree on one key")

    def separate(self, call: int) -> None:
        """Let this call draw from its own keys (`PairKey.of_call`)."""
        self._separate.setdefault(call, {})

    def lend(self, pair: frozenset, call: int, secret: bytes) -> None:
        """Let this call and pair draw from this secret of the call."""
        self._separate.setdefault(call, {})[pair] = PairKey(secret, self._session, one_call=True)

    def forget(self, call: int) -> None:
        """Drop the bookkeeping and the keys of a finished call."""
        self._separate.pop(call, None)
        for key in tuple(self._keys.values()):
            key.forget(call)

    def clear(self) -> None:
        """Drop all keys."""
        self._keys.clear()
        self._separate.clear()


def _names(pair: frozenset) -> list[str]:
    return sorted(party.name for party in pair)


class KeyStream:
    """The key stream of a seed, drawn a piece at a time. The seed must have no other use."""

    def __init__(self, seed: bytes, salt: bytes, label: str):
        self._stream = _stream(derive(seed, salt, f"stream/{label}", 16), _LONG)

    def __repr__(self) -> str:
        return "KeyStream(...)"

    def fill(self, out: memoryview) -> None:
        """The next bytes of the stream, as many as `out` has."""
        _fill(self._stream, out)


@functools.cache
def _vectors() -> bool:
    """Whether the processor encrypts several blocks with one instruction, and OpenSSL's GCM uses it."""
    from llvmlite import binding  # what numba is built on; it takes a while to load

    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("vaes", "vpclmulqdq", "avx512f", "avx512bw", "avx512vl"))


def by_gcm(length: int) -> bool:
    """Whether a stream of so many bytes is computed by GCM."""
    return length >= _LONG and _vectors()


def _stream(key: bytes, length: int) -> CipherContext:
    """The stream of a key that has no other use."""
    if by_gcm(length):
        return Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
    return Cipher(algorithms.AES(key), modes.CTR(bytes(12) + _FIRST)).encryptor()


def _fill(stream: CipherContext, out: memoryview) -> None:
    for start in range(0, len(out), len(_ZEROS)):
        part = out[start : start + len(_ZEROS)]
        stream.update_into(_ZEROS[: len(part)], part)


def derive(secret: bytes, salt: bytes, info: str, length: int) -> bytes:
    """HKDF-SHA256 with the project's domain separation."""
    return HKDF(SHA256(), length, salt, b"sectorch v1/" + info.encode()).derive(secret)


def key_stream(key: torch.Tensor, count: int) -> torch.Tensor:
    """`count` words of the AES-128-CTR key stream under a key of two words, which must have no other use."""
    out = torch.empty(count, dtype=torch.int64, device=key.device)
    if key.is_meta or not count:
        return out
    stream = _stream(key.cpu().numpy().tobytes(), 8 * count)
    words = out if out.device.type == "cpu" else torch.empty(count, dtype=torch.int64, device="cpu")
    _fill(stream, words.numpy().data.cast("B"))
    return words.to(key.device)


def random_secret() -> bytes:
    """A fresh pair secret from the operating system."""
    return os.urandom(SECRET_BYTES)


def keypair() -> tuple[X25519PrivateKey, bytes]:
    """A fresh X25519 key pair; the public half as 32 raw bytes."""
    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, own_public: bytes, peer_public: bytes, session: bytes) -> bytes:
    """The secret that both ends of an X25519 exchange derive.

    Both public keys enter the derivation, so a relay that swaps one of them ends with two different secrets.

    Raises:
        KeyAgreementError: the peer's key is a point of low order.
    """
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(peer_public))
    except ValueError as error:
        raise KeyAgreementError("the peer's X25519 public key is not valid") from error
    low, high = sorted((own_public, peer_public))
    return derive(shared, session + low + high, "pair secret", SECRET_BYTES)
