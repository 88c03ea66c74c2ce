"""Key generation, public and secret keys, and their files.

`PublicKeys` (encryption, relinearisation, rotation) go to whoever encrypts or evaluates; `SecretKey` decrypts and stays
with Q. Both carry an identity, the hash of the public key, so that a ciphertext meets only its own keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from tenseal import sealapi

from ...errors import KeyMismatchError, MissingKeyError, SecretAccessError, SerialisationError
from .ntt import times_
from .seal import (
    INTEGER_BITS,
    Blob,
    Parameters,
    SealContext,
    choose,
    context_of,
    key_sizes,
    load_seal_object,
    save_seal_object,
    secret_size,
    unpack,
)

# The file of keys: named byte strings with a JSON head. Nothing in it is code, and every length is checked.

_MAGIC = b"SECTORCH-CKKS-1\n"
_LENGTH = struct.Struct("<Q")
_LARGEST_HEAD = 1 << 24
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class PublicHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The entry `meta` in the head of a file of public keys: the parameters.

    Attributes:
        kind: what such a file holds. needed: the byte strings that it has.
    """

    degree: Count
    primes: Annotated[list[Count], Meta(max_length=40)]
    special: Count
    scale_bits: Annotated[int, Meta(ge=0, le=62)]
    kind: ClassVar[str] = "public keys"
    needed: ClassVar[tuple[str, ...]] = ("public",)

    @classmethod
    def of(cls: type[Head], p: Parameters, **more: Any) -> Head:
        """The entry for parameters, with the entries that a kind of file has in addition."""
        return cls(degree=p.degree, primes=list(p.primes), special=p.special, scale_bits=p.scale_bits, **more)

    @property
    def parameters(self) -> Parameters:
        return Parameters(self.degree, tuple(self.primes), self.special, self.scale_bits)


class SecretHead(PublicHead, frozen=True, kw_only=True):
    """`meta` of a file of a secret key."""

    identity: str
    kind: ClassVar[str] = "secret key"
    needed: ClassVar[tuple[str, ...]] = ("secret",)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    meta: msgspec.Raw
    blobs: list[tuple[str, Count]]


Head = TypeVar("Head", bound=PublicHead)


def write_container(
    path: str | PathLike, meta: PublicHead, blobs: Mapping[str, bytes | memoryview], private: bool = False
) -> None:
    """Write magic, head and blobs. A private file is made readable to its owner alone."""
    sizes = [[name, len(blob)] for name, blob in blobs.items()]
    head = json.dumps({"kind": meta.kind, "meta": msgspec.to_builtins(meta), "blobs": sizes}).encode()
    mode = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with os.fdopen(mode, "wb") as file:
        for part in (_MAGIC, _LENGTH.pack(len(head)), head, *blobs.values()):
            file.write(part)


def read_container(path: str | PathLike, of: type[Head]) -> tuple[Head, dict[str, bytes]]:
    """The head's `meta`, as its declared type, and the blobs.

    Raises:
        SerialisationError: not such a file, of another kind, or of another form or length than its head says.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise SerialisationError(f"{path} is no file of sectorch.ckks")
        raw = file.read(_LENGTH.size)
        size = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else _LARGEST_HEAD + 1
        if size > _LARGEST_HEAD:
            raise SerialisationError(f"{path} is damaged: its head is too long")
        try:
            head = msgspec.json.decode(file.read(size), type=_Head)
            if head.kind != of.kind:
                raise SerialisationError(f"{path} holds {head.kind!r}, not {of.kind!r}")
            meta = msgspec.json.decode(head.meta, type=of)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise SerialisationError(f"{path} is damaged: its head cannot be read") from error
        if len(dict(head.blobs)) < len(head.blobs):
            raise SerialisationError(f"{path} is damaged: its head names a part twice")
        if sum(length for _, length in head.blobs) != os.fstat(file.fileno()).st_size - file.tell():
            raise SerialisationError(f"{path} is damaged: its length does not fit its head")
        blobs = {name: file.read(length) for name, length in head.blobs}
    if missing := [name for name in of.needed if name not in blobs]:
        raise SerialisationError(f"{path} is damaged: it has no part {missing[0]!r}")
    return meta, blobs


class SwitchingKey:
    """A key of SEAL that takes another polynomial's secret to the holder's, as residues for the compiled loops.

    Attributes:
        residues: int64 [primes, 2, primes + 1, N], the special prime's last.
    """

    def __init__(self, residues: np.ndarray):
        self.residues = residues


class PublicKeys:
    """What A and whoever encrypts to Q hold. Nothing in it helps to decrypt.

    Args:
        key: the public key as SEAL's object.
        relin, galois: keys that SEAL made or has accepted (`_accepted`).
    """

    def __init__(self, parameters: Parameters, key: Any, relin: Blob | None, galois: Blob | None):
        self.parameters = parameters
        self.context: SealContext = context_of(parameters)
        public = save_seal_object(key)
        self.identity = hashlib.sha256(public).hexdigest()[:32]
        self._bytes: dict[str, Blob | None] = {"public": public, "relin": relin, "galois": galois}

    def __repr__(self) -> str:
        return f"PublicKeys({self.identity[:8]}, {self.parameters})"

    @cached_property
    def encryption_key(self) -> np.ndarray:
        """The public key as `encryption.encrypt_fresh` takes it: centred float64 [2, primes + 1, N].

        The special prime's residues are last; the others are divided by it.
        """
        p, residues = self.parameters, self.context.parse_public_key(self._blob("public"))
        rows = []
        for j, q in enumerate((*p.primes, p.special)):
            words = torch.from_numpy(residues[:, j].copy())
            scaled = words if q == p.special else times_(words, pow(p.special, -1, q), q)
            rows.append(torch.where(scaled > q // 2, scaled - q, scaled).double())
        return torch.stack(rows, dim=1).numpy()

    @cached_property
    def relin(self) -> SwitchingKey:
        """The relinearisation key."""
        return SwitchingKey(self.context.parse_switching_keys(self._blob("relin"))[0])

    def _blob(self, name: str) -> Blob:
        blob = self._bytes[name]
        if not blob:
            raise MissingKeyError("products of two ciphertexts need the relinearisation key, which was not included")
        return blob

    @cached_property
    def _rotations(self) -> dict[int, np.ndarray]:
        blob = self._bytes["galois"]
        return self.context.parse_switching_keys(blob) if blob else {}

    def rotation(self, element: int) -> SwitchingKey:
        """The key of the automorphism X -> X^element."""
        found = self._rotations.get((element - 1) // 2)
        if found is None:
            raise MissingKeyError("rotations need rotation keys: sectorch.ckks.keygen(..., rotations=steps)")
        return SwitchingKey(found)

    @property
    def nbytes(self) -> int:
        """Bytes to send, once."""
        return sum(len(b) for b in self._bytes.values() if b)

    def blobs(self) -> dict[str, Blob]:
        """The keys as SEAL serialises them."""
        return {name: b for name, b in self._bytes.items() if b}

    def message(self) -> torch.Tensor:
        """The public and the relinearisation key as a message: uint8, of the length that `message_bytes` gives.

        Raises:
            MissingKeyError: there is no relinearisation key.
        """
        message = torch.empty(self.message_bytes(self.parameters), dtype=torch.uint8)
        into, at = message.numpy().data, 0
        for name, length in zip(("public", "relin"), key_sizes(self.parameters), strict=True):
            unpack(self._blob(name), into[at : at + length])
            at += length
        return message

    @staticmethod
    def message_bytes(parameters: Parameters) -> int:
        """Bytes of a `message`: about 16 N (primes + 1)^2, whatever the keys are."""
        return sum(key_sizes(parameters))

    @classmethod
    def from_message(cls, parameters: Parameters, message: torch.Tensor) -> PublicKeys:
        """The keys that were sent, of the identity that they have at their owner. They keep the message, uncopied.

        Raises:
            SerialisationError: SEAL does not accept them for these parameters.
        """
        content, length = message.contiguous().numpy().data, key_sizes(parameters)[0]
        return cls._accepted(parameters, content[:length], content[length:], None)

    @classmethod
    def _accepted(cls, parameters: Parameters, public: Blob, relin: Blob | None, galois: Blob | None) -> PublicKeys:
        """Keys that another party, or a file, gave.

        Raises:
            SerialisationError: SEAL does not accept them for these parameters.
        """
        context = context_of(parameters)
        key = load_seal_object(sealapi.PublicKey(), context, public, "public key")
        if relin:
            load_seal_object(sealapi.RelinKeys(), context, relin, "relinearisation key")
        if galois:
            load_seal_object(sealapi.GaloisKeys(), context, galois, "rotation keys")
        return cls(parameters, key, relin, galois)

    def save(self, path: str | PathLike) -> None:
        """Write the public keys; they are safe to hand out."""
        write_container(path, PublicHead.of(self.parameters), self.blobs())

    @classmethod
    def load(cls, path: str | PathLike) -> PublicKeys:
        """Raises:
        SerialisationError, SecurityLevelError: not such a file, or weaker than 128 bits.
        """
        return cls.from_blobs(*read_container(path, PublicHead))

    @classmethod
    def from_blobs(cls, meta: PublicHead, blobs: dict[str, bytes]) -> PublicKeys:
        return cls._accepted(meta.parameters, blobs["public"], blobs.get("relin"), blobs.get("galois"))


class SecretKey:
    """Q's key. It decrypts; it cannot be pickled, copied or printed, and is saved only by name."""

    def __init__(self, parameters: Parameters, identity: str, key: Any):
        self.parameters, self.identity = parameters, identity
        context = context_of(parameters)
        self._key = key
        self.decryptor = sealapi.Decryptor(context.seal, key)

    @cached_property
    def transformed(self) -> np.ndarray:
        """The polynomial in SEAL's order, modulo each prime and the special one: float64 [primes + 1, N], centred."""
        p, residues = self.parameters, context_of(self.parameters).parse_secret_key(save_seal_object(self._key))
        chain = np.array((*p.primes, p.special))[:, None]
        return np.where(residues > chain // 2, residues - chain, residues).astype(np.float64)

    def __repr__(self) -> str:
        return f"SecretKey({self.identity[:8]})"

    def __reduce_ex__(self, protocol):
        raise SecretAccessError("a secret key cannot be pickled or copied; secret.save(path) writes it, unencrypted")

    __deepcopy__ = __copy__ = __reduce_ex__

    def message(self) -> torch.Tensor:
        """The key for somebody who is to have the same one, uint8 [message_bytes]: for a secured channel alone."""
        found = torch.empty(self.message_bytes(self.parameters), dtype=torch.uint8)
        unpack(save_seal_object(self._key), found.numpy().data)
        return found

    @staticmethod
    def message_bytes(parameters: Parameters) -> int:
        """Bytes of a `message`: about 8 N (primes + 1), whatever the key is."""
        return secret_size(parameters)

    @classmethod
    def from_message(cls, public: PublicKeys, message: torch.Tensor) -> SecretKey:
        """The key that was sent, beside its public half.

        Raises:
            SerialisationError: SEAL does not accept it for these parameters.
        """
        context = context_of(public.parameters)
        key = load_seal_object(sealapi.SecretKey(), context, message.contiguous().numpy().data, "secret key")
        return cls(public.parameters, public.identity, key)

    def save(self, path: str | PathLike) -> None:
        """Write the secret key, readable to the owner of the file alone. Whoever reads it can decrypt everything."""
        meta = SecretHead.of(self.parameters, identity=self.identity)
        write_container(path, meta, {"secret": save_seal_object(self._key)}, private=True)

    @classmethod
    def load(cls, path: str | PathLike) -> SecretKey:
        """Raises:
        SerialisationError, SecurityLevelError: not such a file, or weaker than 128 bits.
        """
        meta, blobs = read_container(path, SecretHead)
        key = load_seal_object(sealapi.SecretKey(), context_of(meta.parameters), blobs["secret"], "secret key")
        return cls(meta.parameters, meta.identity, key)


class OwnerKeys(PublicKeys):
    """The public keys of `encrypt(x)` without keys, with the secret beside them, for the process that made them.

    What it writes (`save`, `blobs`) is the public half; `.secret.save(path)` writes the other, if that is wanted.
    """

    def __init__(self, keys: Keys):
        self.__dict__.update(keys.public.__dict__)
        self.secret = keys.secret

    def __reduce_ex__(self, protocol):
        raise SecretAccessError("keys with a secret cannot be pickled or copied; .save(path) writes the public ones")

    __deepcopy__ = __copy__ = __reduce_ex__


@dataclass(frozen=True)
class Keys:
    """Both halves, as `keygen` makes them. `public` is to be handed out, `secret` is to be kept."""

    public: PublicKeys
    secret: SecretKey

    @property
    def parameters(self) -> Parameters:
        return self.public.parameters

    def __str__(self) -> str:
        return f"keys {self.public.identity[:8]}: {self.parameters}; {self.public.nbytes / 1e6:.1f} MB of public keys"


def keygen(
    depth: int,
    *,
    slots: int | None = None,
    scale_bits: int | None = None,
    integer_bits: int = INTEGER_BITS,
    degree: int | None = None,
    rotations: Iterable[int] = (),
) -> Keys:
    """Keys for computations of some depth at 128-bit security; `print(keys)` says what was chosen.

    Args:
        depth, slots, scale_bits, integer_bits, degree: see `parameters.choose`.
        rotations: steps by which slots will be rotated (vector packing only).

    SEAL makes the keys, from the operating system's randomness. Secret coefficients are ternary, errors have a standard
    deviation of 3.2.

    Raises:
        SecurityLevelError: no secure parameters for what was asked.
    """
    chosen = choose(depth, slots=slots, scale_bits=scale_bits, integer_bits=integer_bits, degree=degree)
    return keys_for(chosen, rotations)


def keys_for(parameters: Parameters, rotations: Iterable[int] = ()) -> Keys:
    """What `keygen` makes, of parameters that are known."""
    context = context_of(parameters)
    generator = sealapi.KeyGenerator(context.seal)
    public, relin = sealapi.PublicKey(), sealapi.RelinKeys()
    generator.create_public_key(public)
    generator.create_relin_keys(relin)
    galois = None
    steps = sorted({int(s) for s in rotations} - {0})
    if any(abs(s) >= parameters.slots for s in steps):
        raise KeyMismatchError(f"rotations must be smaller than the {parameters.slots} slots")
    if steps:
        galois = sealapi.GaloisKeys()
        # A rotation to the left by s is the automorphism X -> X^(3^s) of the ring.
        elements = [pow(3, step % parameters.slots, 2 * parameters.degree) for step in steps]
        generator.create_galois_keys(elements, galois)
    halves = PublicKeys(parameters, public, save_seal_object(relin), galois and save_seal_object(galois))
    return Keys(halves, SecretKey(parameters, halves.identity, generator.secret_key()))
