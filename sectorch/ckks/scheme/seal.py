"""The border with SEAL: contexts, and ciphertexts as residues and back through SEAL's serialised form.

SEAL (Microsoft SEAL 4, through `tenseal.sealapi`) does every cryptographic primitive. Its objects are read and written
through an anonymous file in memory. SEAL writes zstd; what is read is inflated into a buffer of the one size that it
may have, and each field of it is checked; nothing is ever unpickled.

The form (SEAL 4, little endian): a 16-byte header (magic 0xA15E, header size, version, compression, total size), then
parms_id (32 bytes), NTT flag (1), size, N, number of primes (8 each), scale (float64), correction factor (8), and the
words as a nested array with a header of its own and a word count.
"""

from __future__ import annotations

import os
import struct
import threading
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
import zstandard
from tenseal import sealapi

from ..errors import SecurityLevelError, SerialisationError
from .parameters import Parameters

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


def saved(thing: Any) -> bytes:
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


def loaded(thing: Any, context: Context, content: Blob, what: str) -> Any:
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


class Context:
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
        return self.parse(saved(ciphertext))

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
        body = _inflated(saved(plain), self._largest)
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
    return _HEADER.unpack_from(saved(sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.CKKS)))[3]


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
def context_of(parameters: Parameters) -> Context:
    """The context of some parameters; kept, for it is public."""
    return Context(parameters)
