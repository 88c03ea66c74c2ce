"""The border with SEAL: contexts, and ciphertexts as residues and back through SEAL's serialised form.

SEAL (Microsoft SEAL 4, through `tenseal.sealapi`) does every cryptographic primitive. Its objects are read and written
through an anonymous file in memory. SEAL writes zstd; what is read is inflated into a buffer of the one size that it
may have, and each field of it is checked; nothing is ever unpickled.

The form (SEAL 4, little endian): a 16-byte header (magic 0xA15E, header size, version, compression, total size), then
parms_id (32 bytes), NTT flag (1), size, N, number of primes (8 each), scale (float64), correction factor (8), and the
words as a nested array with a header of its own and a word count.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
import zstandard
from tenseal import sealapi

from ...errors import SecurityLevelError, SerialisationError
from .ntt import MAX_PRIME_BITS

# Parameters: ring degree and modulus chain at 128-bit security, and the canonical scale of every level.
#
# A chain is q_0, q_1 .. q_depth and the special prime P of key switching. A ciphertext of level t holds its residues
# mod q_0 .. q_t. At level t a settled ciphertext has exactly the scale D_t, where D_depth = 2^scale_bits and D_(t-1) =
# D_t^2 / q_t: the scale that a product of two of them has after one rescale. Plain weights are encoded at D_(t-1) q_t /
# D_t, so linear layers land on it too, and no two ciphertexts ever disagree on their scale (Kim, Papadimitriou and
# Polyakov, 2020, "reduced-error CKKS"). The primes are chosen one by one so that D_t stays near 2^scale_bits.

DEGREES = (4096, 8192, 16384, 32768)
SECURITY_BITS = 128
INTEGER_BITS = 8
"""log2 of the magnitude that fits the last level: q_0 = 2^(scale_bits + INTEGER_BITS), half of it on each side of 0."""
VALUE_BOUND = 8.0
"""The bound on a fresh ciphertext's values unless another is declared: the same for all data."""
SPECIAL_BITS = 4
"""The special prime is this many bits larger than q_0, where 2^50 allows it: key switching then adds less error than a
rescale does."""
_PREFERRED, _LEAST, _MOST = 28, 20, 40


def max_bits(degree: int) -> int:
    """log2 of the largest modulus, special prime included, that SEAL calls 128-bit secure
    (HomomorphicEncryption.org).
    """
    return sealapi.CoeffModulus.MaxBitCount(degree, sealapi.SEC_LEVEL_TYPE.TC128)


@dataclass(frozen=True)
class Parameters:
    """Public parameters: everything that both sides must agree on.

    Attributes:
        degree: N of the ring Z[X]/(X^N + 1); N/2 slots.
        primes: q_0 .. q_depth, each 1 mod 2N and below 2^50.
        special: the prime of key switching.
        scale_bits: log2 of the scale of a fresh ciphertext.

    Raises:
        SecurityLevelError: SEAL does not accept the set at 128 bits.
    """

    degree: int
    primes: tuple[int, ...]
    special: int
    scale_bits: int

    def __post_init__(self):
        if self.degree not in DEGREES:
            raise SecurityLevelError(f"the ring degree must be one of {DEGREES}, got {self.degree}")
        if self.total_bits > max_bits(self.degree):
            raise SecurityLevelError(
                f"a modulus of {self.total_bits} bits at degree {self.degree} is weaker than {SECURITY_BITS} bits of "
                f"security; {max_bits(self.degree)} bits is SEAL's limit: take a larger degree or a smaller depth"
            )
        if not 2 <= len(self.primes) <= 40 or len({*self.primes, self.special}) != len(self.primes) + 1:
            raise SecurityLevelError("a modulus chain is made of 2 to 40 distinct primes and one special prime")
        if max(self.special, *self.primes).bit_length() > MAX_PRIME_BITS:
            raise SecurityLevelError(f"primes of a chain, the special one included, must be below 2^{MAX_PRIME_BITS}")
        for q in (*self.primes, self.special):
            if q < 1 << 12 or not is_prime(q) or (q - 1) % (2 * self.degree):
                raise SecurityLevelError(f"{q} is not a prime that is 1 mod {2 * self.degree}")

    @property
    def depth(self) -> int:
        return len(self.primes) - 1

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def integer_bits(self) -> int:
        """log2 of q_0 over the scale: what `choose` was asked for."""
        return round(math.log2(self.primes[0])) - self.scale_bits

    @property
    def total_bits(self) -> int:
        return math.prod((self.special, *self.primes)).bit_length()

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """D_0 .. D_depth."""
        scales = [2.0**self.scale_bits]
        for q in reversed(self.primes[1:]):
            scales.append(scales[-1] ** 2 / q)
        return tuple(reversed(scales))

    def __str__(self) -> str:
        bits = [q.bit_length() for q in self.primes]
        return (
            f"CKKS with N = {self.degree} ({self.slots} slots), depth {self.depth}, scale 2^{self.scale_bits}, primes "
            f"of {bits} + {self.special.bit_length()} bits: {self.total_bits} of the {max_bits(self.degree)} that "
            f"{SECURITY_BITS}-bit security allows"
        )


def choose(
    depth: int,
    *,
    slots: int | None = None,
    scale_bits: int | None = None,
    integer_bits: int = INTEGER_BITS,
    degree: int | None = None,
) -> Parameters:
    """The smallest degree whose 128-bit modulus carries a depth, and the largest scale up to 2^40 that fits it.

    Args:
        depth: multiplications in sequence (a linear layer, a square and a product each take one).
        slots: samples in a batch that must fit; N/2 slots.
        scale_bits: log2 of the scale; unless named, at least 28 and as large as the degree allows.
        integer_bits: the results are below 2^(integer_bits - 1) in magnitude.
        degree: the ring degree, if it must be this one.

    Raises:
        SecurityLevelError: nothing secure has this depth and scale; the message names what would fit.
    """
    if not 1 <= depth <= 38 or not 2 <= integer_bits <= 20:
        raise SecurityLevelError(
            f"depth must be between 1 and 38 and integer_bits between 2 and 20, got {depth} and {integer_bits}"
        )
    most = min(_MOST, MAX_PRIME_BITS - integer_bits)
    if scale_bits is not None and not _LEAST <= scale_bits <= most:
        raise SecurityLevelError(f"scale_bits must be between {_LEAST} and {most}, got {scale_bits}")
    if slots is not None and slots > DEGREES[-1] // 2:
        raise SecurityLevelError(
            f"at most {DEGREES[-1] // 2} slots in one ciphertext, asked for {slots}; cut the batch"
        )
    for candidate in DEGREES if degree is None else (degree,):
        if candidate not in DEGREES:
            raise SecurityLevelError(f"the ring degree must be one of {DEGREES}, got {candidate}")
        if slots is not None and candidate // 2 < slots:
            continue
        # depth primes of the scale's bits, q_0 with `integer_bits` more, and the special prime with `SPECIAL_BITS`
        # beyond q_0.
        room = (max_bits(candidate) - 2 * integer_bits - SPECIAL_BITS) // (depth + 2)
        wanted = scale_bits or (_LEAST if degree is not None else _PREFERRED)
        # Primes lie a little above or below their power of two: where the product is a bit too long, one bit less will
        # do.
        for bits in [scale_bits] if scale_bits else range(min(room, most), wanted - 1, -1):
            chain = _chain(candidate, depth, bits, integer_bits) if room >= bits else None
            if chain is not None:
                return chain
    limit = degree or DEGREES[-1]
    least = scale_bits or _LEAST
    fits = (max_bits(limit) - 2 * integer_bits - SPECIAL_BITS) // least - 2
    raise SecurityLevelError(
        f"no 128-bit secure chain at degree {limit} has depth {depth} with scale 2^{least}; depth {fits} fits. Fold "
        f"layers together, use square in place of higher polynomials, or run the non-linear layers on shares"
    )


def _chain(degree: int, depth: int, scale_bits: int, integer_bits: int) -> Parameters | None:
    """Primes from the top: each the unused one nearest to D_t^2 / 2^scale_bits, so that the next scale is near it.

    None where their product is longer than the degree's limit.
    """
    aim = 2.0**scale_bits
    used: set[int] = set()

    def take(near: float, limit: int | None = None) -> int:
        q = _nearest_prime(near, 2 * degree, used, limit)
        used.add(q)
        return q

    special_bits = min(scale_bits + integer_bits + SPECIAL_BITS, MAX_PRIME_BITS)
    special = take(2.0**special_bits, 1 << special_bits)
    first = take(2.0 ** (scale_bits + integer_bits), 1 << (scale_bits + integer_bits))
    scale, upper = aim, []
    for _ in range(depth):
        upper.append(take(scale * scale / aim))
        scale = scale * scale / upper[-1]
    if math.prod((special, first, *upper)).bit_length() > max_bits(degree):
        return None
    return Parameters(degree, (first, *reversed(upper)), special, scale_bits)


def _nearest_prime(near: float, step: int, used: set[int], limit: int | None) -> int:
    centre = round(near / step) * step + 1
    for distance in range(1 << 20):
        for q in (centre - distance * step, centre + distance * step):
            if q > 1 << 12 and q not in used and (limit is None or q < limit) and is_prime(q):
                return q
    raise SecurityLevelError(f"no prime that is 1 mod {step} near {near:.0f}")


def is_prime(n: int) -> bool:
    """Miller-Rabin with the bases that decide every n below 3.3 * 10^24 (Sorenson and Webster, 2015)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if n < 2 or any(n % p == 0 for p in bases):
        return n in bases
    d, twos = n - 1, 0
    while d % 2 == 0:
        d, twos = d // 2, twos + 1
    for base in bases:
        x = pow(base, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


_HEADER = struct.Struct("<HBBBBHQ")
_BODY = struct.Struct("<32sBQQQdQ")
_MAGIC, _VERSION_MAJOR = 0xA15E, 4
_PLAIN, _ZSTD = 0, 2
Blob: TypeAlias = bytes | memoryview
"""What SEAL wrote. A part of a message is looked at where it lies: keys are tens of megabytes."""


class _Memory(threading.local):
    """An anonymous file of this thread, for SEAL to save to and load from. It never touches a disk."""

    def __init__(self):
        self.descriptor = os.memfd_create("sectorch-ckks", os.MFD_CLOEXEC)
        self.owner = os.getpid()

    @property
    def path(self) -> str:
        if self.owner != os.getpid():  # after a fork the file would be shared with the parent
            self.__init__()
        return f"/proc/self/fd/{self.descriptor}"

    def read(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    def write(self, *parts: bytes | memoryview) -> None:
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.writev(self.descriptor, parts)


_memory = _Memory()


def save_seal_object(thing: Any) -> bytes:
    """What SEAL writes of one of its objects."""
    path = _memory.path
    thing.save(path)
    return _memory.read()


def unpack(content: Blob, into: memoryview) -> None:
    """Write one of SEAL's keys without compression: the bytes of `key_sizes`, whatever the key is.

    Raises:
        SerialisationError: a key of another length.
    """
    body = _inflated(content, len(into) - _HEADER.size)
    if len(body) != len(into) - _HEADER.size:
        raise SerialisationError(f"a key of {len(body)} bytes where {len(into) - _HEADER.size} were expected")
    into[: _HEADER.size], into[_HEADER.size :] = _header(len(into)), body


def key_sizes(parameters: Parameters) -> tuple[int, int]:
    """Bytes of a public key and of a relinearisation key, unpacked."""
    pieces = len(parameters.primes)
    one = _HEADER.size + _BODY.size + _HEADER.size + 8 + 16 * (pieces + 1) * parameters.degree
    return one, _HEADER.size + 32 + 8 + 8 + pieces * one


def secret_size(parameters: Parameters) -> int:
    """Bytes of a secret key, unpacked."""
    return 2 * _HEADER.size + 56 + 8 * (len(parameters.primes) + 1) * parameters.degree


def load_seal_object(thing: Any, context: SealContext, content: Blob, what: str) -> Any:
    """Load one of SEAL's objects, with SEAL's own validity check.

    Raises:
        SerialisationError: SEAL refuses the bytes for these parameters.
    """
    path = _memory.path
    _memory.write(content)
    try:
        thing.load(context.seal, path)
    except (RuntimeError, ValueError, IndexError) as error:
        raise SerialisationError(f"SEAL does not accept the {what} for these parameters: {error}") from None
    return thing


class SealContext:
    """SEAL's context of some parameters, its evaluator and encoder, and the parms_id of every level. No keys."""

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        raw = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)
        raw.set_poly_modulus_degree(parameters.degree)
        raw.set_coeff_modulus([sealapi.Modulus(q) for q in (*parameters.primes, parameters.special)])
        self.seal = sealapi.SEALContext(raw, True, sealapi.SEC_LEVEL_TYPE.TC128)
        if not self.seal.parameters_set():
            raise SecurityLevelError(f"SEAL refuses the parameters: {self.seal.parameters_error_message()}")
        self.evaluator = sealapi.Evaluator(self.seal)
        self.encoder = sealapi.CKKSEncoder(self.seal)
        data, ids = self.seal.first_context_data(), []
        while data is not None:
            ids.append(list(data.parms_id()))
            data = data.next_context_data()
        ids.reverse()
        self.parms_ids = ids
        self._ids = [struct.pack("<4Q", *one) for one in ids]

    def encode(self, values: Any, level: int, scale: float) -> Any:
        """A plaintext of SEAL: a list of at most N/2 numbers, one a slot."""
        plain = sealapi.Plaintext()
        self.encoder.encode(values, self.parms_ids[level], scale, plain)
        return plain

    def read(self, ciphertext: Any) -> tuple[np.ndarray, float]:
        """A ciphertext of SEAL -> residues uint64 [size, primes, N] and its scale."""
        return self.parse(save_seal_object(ciphertext))

    def parse(self, content: bytes) -> tuple[np.ndarray, float]:
        """SEAL's serialised ciphertext -> residues [size, primes, N] and the scale.

        Raises:
            SerialisationError: anything but a ciphertext of these parameters in NTT form with 2 or 3 polynomials.
        """
        body = _inflated(content, self._largest)
        if len(body) < _BODY.size + _HEADER.size + 8:
            raise SerialisationError("the bytes are too short for a ciphertext")
        identity, ntt, size, degree, primes, scale, _ = _BODY.unpack_from(body)
        if degree != self.parameters.degree or not 1 <= primes <= len(self._ids) or not 2 <= size <= 3 or ntt != 1:
            raise SerialisationError(
                f"a ciphertext of degree {degree} with {primes} primes and {size} polynomials does not belong to "
                f"{self.parameters}"
            )
        if identity != self._ids[primes - 1]:
            raise SerialisationError("the ciphertext belongs to other parameters")
        count = size * degree * primes
        return _words(body, _BODY.size, count).reshape(size, primes, degree), scale

    def parse_plain(self, plain: Any, level: int) -> np.ndarray:
        """The residues [primes, N] of a plaintext of SEAL in NTT form."""
        body = _inflated(save_seal_object(plain), self._largest)
        count = (level + 1) * self.parameters.degree
        return _words(body, len(body) - 8 * count - _HEADER.size - 8, count).reshape(level + 1, -1)

    def parse_public_key(self, content: Blob) -> np.ndarray:
        """SEAL's serialised PublicKey -> residues [2, primes + 1, N], the special prime last.

        Raises:
            SerialisationError: another length than a key of these parameters has.
        """
        shape = 2, len(self.parameters.primes) + 1, self.parameters.degree
        count = shape[0] * shape[1] * shape[2]
        body = _inflated(content, _BODY.size + _HEADER.size + 8 + 8 * count)
        return _words(body, _BODY.size, count).reshape(shape)

    def parse_secret_key(self, content: Blob) -> np.ndarray:
        """SEAL's serialised SecretKey -> residues [primes + 1, N], the special prime last.

        Raises:
            SerialisationError: another length than a key of these parameters has.
        """
        shape = len(self.parameters.primes) + 1, self.parameters.degree
        count = shape[0] * shape[1]
        body = _inflated(content, 48 + _HEADER.size + 8 + 8 * count)
        return _words(body, 48, count).reshape(shape)

    def parse_switching_keys(self, content: Blob) -> dict[int, np.ndarray]:
        """SEAL's serialised RelinKeys or GaloisKeys -> by index the residues [primes, 2, primes + 1, N], special last.

        Raises:
            SerialisationError: another length or shape than keys of these parameters have.
        """
        count, degree = len(self.parameters.primes), self.parameters.degree
        words = 2 * (count + 1) * degree
        each = _HEADER.size + _BODY.size + _HEADER.size + 8 + 8 * words
        # Residues have 12 bits of 64 at least, and the places of keys that were not made are empty.
        body = _inflated(content, 6 * len(content) + 8 * degree + 4096)
        (entries,) = struct.unpack_from("<Q", body, 32)
        found, at = {}, 40
        for index in range(entries):
            if at + 8 > len(body):
                raise SerialisationError("the bytes are too short for the keys that they state")
            (pieces,) = struct.unpack_from("<Q", body, at)
            at += 8
            if pieces not in (0, count) or at + pieces * each > len(body):
                raise SerialisationError(f"switching keys of {pieces} pieces do not belong to {self.parameters}")
            if pieces:
                starts = [at + i * each + each - 8 * words for i in range(pieces)]
                rows = [np.frombuffer(body, "<i8", words, start).reshape(2, count + 1, degree) for start in starts]
                found[index] = np.stack(rows)
                at += pieces * each
        if at != len(body):
            raise SerialisationError("the length of the bytes does not fit the keys that they state")
        return found

    @property
    def _largest(self) -> int:
        # A ciphertext of three polynomials, and its headers.
        return 3 * len(self.parameters.primes) * self.parameters.degree * 8 + 4096

    def write(self, residues: torch.Tensor | np.ndarray, scale: float) -> Any:
        """Residues [size, primes, N] -> a ciphertext of SEAL, which checks each residue against its prime."""
        array = residues.numpy() if isinstance(residues, torch.Tensor) else residues
        size, primes, degree = array.shape
        words = np.ascontiguousarray(array, dtype="<i8").data.cast("B")
        array_header = _header(_HEADER.size + 8 + len(words))
        body = _BODY.pack(self._ids[primes - 1], 1, size, degree, primes, scale, 1)
        total = _HEADER.size + len(body) + len(array_header) + 8 + len(words)
        ciphertext = sealapi.Ciphertext(self.seal)
        path = _memory.path
        _memory.write(_header(total) + body + array_header + struct.pack("<Q", size * degree * primes), words)
        try:
            ciphertext.load(self.seal, path)
        except (RuntimeError, ValueError) as error:
            raise SerialisationError(f"SEAL does not accept the residues: {error}") from None
        return ciphertext


def _header(total: int) -> bytes:
    """The header of an object of this SEAL, not compressed, of so many bytes with it."""
    return _HEADER.pack(_MAGIC, _HEADER.size, _VERSION_MAJOR, _version_minor(), _PLAIN, 0, total)


@cache
def _version_minor() -> int:
    """What this SEAL writes: it refuses objects of a later version, and TenSEAL's releases bring several."""
    return _HEADER.unpack_from(save_seal_object(sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)))[3]


def _inflated(content: Blob, largest: int) -> Blob:
    """The body of one of SEAL's objects, at most `largest` bytes of it."""
    if len(content) < _HEADER.size:
        raise SerialisationError("the bytes are too short for a SEAL object")
    magic, header, major, _, compression, _, total = _HEADER.unpack_from(content)
    if magic != _MAGIC or header != _HEADER.size or total != len(content) or major != _VERSION_MAJOR:
        raise SerialisationError("the bytes are no SEAL 4 object")
    body = content[_HEADER.size :]
    if compression == _PLAIN:
        return body
    if compression != _ZSTD:
        raise SerialisationError(f"compression {compression} is not one that SEAL writes here; zstd is 2")
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            out = reader.read(largest + 1)
    except zstandard.ZstdError as error:
        raise SerialisationError(f"the bytes do not inflate: {error}") from None
    if len(out) > largest:
        raise SerialisationError("the bytes inflate to more than any ciphertext of these parameters")
    return out


def _words(body: Blob, start: int, count: int) -> np.ndarray:
    if len(body) != start + _HEADER.size + 8 + 8 * count:
        raise SerialisationError("the length of the bytes does not fit the shape that they state")
    (stated,) = struct.unpack_from("<Q", body, start + _HEADER.size)
    if stated != count:
        raise SerialisationError("the word count of the bytes does not fit the shape that they state")
    return np.frombuffer(body, dtype="<i8", count=count, offset=start + _HEADER.size + 8)


@lru_cache(maxsize=16)
def context_of(parameters: Parameters) -> SealContext:
    """The context of some parameters; kept, for it is public."""
    return SealContext(parameters)
