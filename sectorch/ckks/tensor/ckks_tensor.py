"""CKKSTensor: an encrypted tensor that looks like a torch tensor, its batch in the slots, and fails closed.

Batch packing: dimension 0 lies in the slots, and every element of a row is one ciphertext; [B, 1, 28, 28] is 784
ciphertexts for any B up to the slot count. No operation moves a sample to another slot, so none needs a rotation.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from os import PathLike
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

import msgspec
import numpy as np
import torch
from msgspec import Meta
from tenseal import sealapi
from torch import nn
from torch.utils import _pytree as pytree

from ...deprecation import renamed_attribute
from ...errors import (
    ArgumentError,
    DtypeError,
    KeyMismatchError,
    LevelError,
    MissingKeyError,
    NonFiniteError,
    ScaleError,
    SecretAccessError,
    SectorchError,
    SerialisationError,
    ShapeError,
    SlotError,
    UnsupportedOpError,
)
from ...tensor.dispatch import METADATA, SECRETS, is_operator
from ...tensor.table import CONVERSIONS, OpTable, as_sectorch_error, check_same_device, spell, torch_on_meta
from ..scheme.ciphertext import (
    Cipher,
    add_numbers,
    allocate_ciphertexts,
    capacity,
    check_capacity,
    clear_pending_factor,
    empty,
    empty_like,
    encoding_error,
    fresh_error,
    make_sendable,
    need_level,
    settle,
    smallest,
    times_numbers,
    times_weight,
    weight_scale,
)
from ..scheme.encryption import add_flood_noise, encode_slots, encrypt_fresh
from ..scheme.keys import (
    Count,
    Keys,
    OwnerKeys,
    PublicHead,
    PublicKeys,
    SecretKey,
    keygen,
    read_container,
    write_container,
)
from ..scheme.ntt import plus_, times_
from ..scheme.seal import VALUE_BOUND

DEPTH = 5
"""Levels of the keys that `encrypt(x)` makes: a small network with squares."""


class CKKSTensor(torch.Tensor):
    """An encrypted [batch, ...] tensor. Only its shape, dtype, level and scale can be read without the secret key."""

    cipher: Cipher
    batch: int
    row_shape: tuple[int, ...]
    float_dtype: torch.dtype

    @staticmethod
    def __new__(cls, cipher: Cipher, batch: int, shape: tuple[int, ...], dtype: torch.dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, (batch, *shape), dtype=dtype)
        self.cipher, self.batch, self.row_shape, self.float_dtype = cipher, batch, tuple(shape), dtype
        return self

    def __init__(self, *_args: Any, **_kwargs: Any):
        super().__init__()

    if TYPE_CHECKING:  # torch's stubs say that these give a Tensor; of an encrypted one they give an encrypted one
        __add__: Callable[..., CKKSTensor]
        __sub__: Callable[..., CKKSTensor]
        __mul__: Callable[..., CKKSTensor]
        __truediv__: Callable[..., CKKSTensor]
        sum: Callable[..., CKKSTensor]
        unsqueeze: Callable[..., CKKSTensor]

    @property
    def full_shape(self) -> torch.Size:
        return torch.Size((self.batch, *self.row_shape))

    @property
    def keys(self) -> PublicKeys:
        return self.cipher.keys

    @property
    def levels_left(self) -> int:
        """Multiplications in sequence that the modulus chain still allows."""
        return self.cipher.levels_left

    @property
    def ciphertext_bytes(self) -> int:
        return 8 * math.prod(self.cipher.data.shape)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedOpError(
            f"{func} reached the content of a CKKSTensor past the dispatch table; nothing was computed. "
            f"sectorch.ckks.supported_ops() lists what works"
        )

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise SecretAccessError("a CKKSTensor cannot be pickled or copied; .save(path) writes it")

    def __deepcopy__(self, memo) -> NoReturn:
        self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"CKKSTensor(shape={tuple(self.full_shape)}, dtype={self.float_dtype}, levels_left={self.levels_left})"

    @property
    def bound(self) -> float:
        """A bound on every value's magnitude, which only the evaluator may know."""
        return self.cipher.bound

    @property
    def error_bound(self) -> float:
        """Every value is within this of the plain computation's (8 standard deviations a step)."""
        return self.cipher.error_bound

    def bounded(self, bound: float) -> CKKSTensor:
        """The same ciphertexts with another declared bound, for a caller who knows more than the operands' bounds say.

        Nobody can check it: with a value beyond the bound the result is wrong, and no error says so.

        Raises:
            ArgumentError: no positive finite bound. ScaleError: one that the level cannot hold.
        """
        if not 0 < bound < math.inf:
            raise ArgumentError(f"a bound is positive and finite, got {bound}")
        cipher = check_capacity(replace(self.cipher, largest=bound / abs(self.cipher.multiplier)), "a declared bound")
        return CKKSTensor(cipher, self.batch, self.row_shape, self.float_dtype)

    settled = renamed_attribute("settled", "smallest_form")

    def smallest_form(self) -> CKKSTensor:
        """The same values relinearised, rescaled and with at most two primes, which is the smallest form to send.

        The form follows from shapes alone.

        Raises:
            ScaleError: its values may not fit two primes. LevelError: the tensor ends in a product with a weight of a
                single number, which takes a level.
        """
        return CKKSTensor(make_sendable(self.cipher), self.batch, self.row_shape, self.float_dtype)

    def decrypt(self, secret: SecretKey | None = None, *, flood_bits: int | None = None) -> torch.Tensor:
        """Decrypt to the plain tensor [batch, ...].

        Args:
            secret: the key of the same key set. May be left out where the tensor comes from `encrypt(x)` without keys,
                in the process that called it, which made the keys and kept the secret (`tensor.keys.secret`).
            flood_bits: add noise of this many bits over the ciphertext's own error. Needed where decrypted results are
                given to others (docs/ckks.md, IND-CPA-D). `ckks.flood_distance(N, flood_bits, n)` bounds what n
                ciphertexts under one key then show.

        Error: `error_bound` where the tensor was computed, and that of a float32 result's rounding.

        Raises:
            KeyMismatchError: the key of another set.
            MissingKeyError: no key named, and none kept here.
        """
        if secret is None:
            secret = getattr(self.keys, "secret", None)
            if secret is None:
                raise MissingKeyError("decrypt() needs the secret key, which is not here: decrypt(keys.secret)")
        if not isinstance(secret, SecretKey):
            raise ArgumentError(f"decrypt() takes keys.secret, got {type(secret).__name__}")
        if secret.identity != self.keys.identity or secret.parameters != self.keys.parameters:
            raise KeyMismatchError(
                f"the tensor was encrypted under keys {self.keys.identity[:8]}, the key is of {secret.identity[:8]}"
            )
        cipher = self.cipher if flood_bits is None else add_flood_noise(settle(self.cipher), flood_bits)
        if cipher.data.is_meta:
            return torch.empty(self.full_shape, dtype=self.float_dtype, device="meta")
        if cipher.pending == 0:
            cipher = smallest(cipher)
        context, scale = self.keys.context, cipher.scale
        out = torch.empty(cipher.count, self.batch, dtype=torch.float64)
        plain = sealapi.Plaintext()
        for i in range(cipher.count):
            secret.decryptor.decrypt(context.write(cipher.data[i], scale), plain)
            out[i] = torch.from_numpy(np.asarray(context.encoder.decode_double(plain)[: self.batch]))
        return (out * cipher.multiplier).t().reshape(self.full_shape).to(self.float_dtype)

    def save(self, path: str | PathLike, *, keys: bool = False) -> None:
        """Write the ciphertexts, with the public keys if asked.

        Readers of the file see shapes, parameters, and the bound that was declared at encryption; no bound that depends
        on an evaluator's weights.

        Raises:
            LevelError: the tensor ends in a product with a weight of a single number, which takes a level.
        """
        c = clear_pending_factor(self.cipher)
        meta = CiphertextsHead.of(
            self.keys.parameters, identity=self.keys.identity, batch=self.batch, shape=list(self.row_shape),
            pending=c.pending, factor=c.factor, size=c.size, primes_left=c.level + 1, dtype=str(self.float_dtype),
            bound=c.bound if c.declared and not math.isnan(c.largest) else None,
        )  # fmt: skip
        blobs = {f"q{j}": _packed(c.data[:, :, j], q) for j, q in enumerate(c.primes)}
        write_container(path, meta, blobs | (self.keys.blobs() if keys else {}))


class CiphertextsHead(PublicHead, frozen=True, kw_only=True):
    """`meta` of a file of ciphertexts: their keys, shapes and state, and the bound that was declared for them."""

    identity: str
    batch: Count
    shape: Annotated[list[Count], Meta(max_length=64)]
    pending: Count
    factor: float
    size: Count
    primes_left: Count
    dtype: Literal["torch.float32", "torch.float64"]
    bound: float | None = None
    kind: ClassVar[str] = "ciphertexts"
    needed: ClassVar[tuple[str, ...]] = ()


def load(path: str | PathLike, keys: PublicKeys | Keys | None = None) -> CKKSTensor:
    """Read a file of `CKKSTensor.save`. Without a bound in the file, values may be as large as the level allows.

    Args:
        keys: the public keys of the same set; may be left out if the file has them.

    Raises:
        SerialisationError: damaged, or a residue beyond its prime.
        KeyMismatchError: no keys, or those of another set.
    """
    meta, blobs = read_container(path, CiphertextsHead)
    keys = keys.public if isinstance(keys, Keys) else keys
    if keys is None:
        if "public" not in blobs:
            raise KeyMismatchError(f"{path} was saved without keys; name them: load(path, keys.public)")
        keys = PublicKeys.from_blobs(meta, blobs)
    own = msgspec.structs.asdict(PublicHead.of(keys.parameters))
    if meta.identity != keys.identity or any(getattr(meta, name) != value for name, value in own.items()):
        raise KeyMismatchError(f"{path} belongs to keys {meta.identity[:8]}, given were {keys.identity[:8]}")
    p, batch, shape, dtype = keys.parameters, meta.batch, tuple(meta.shape), getattr(torch, meta.dtype[6:])
    size, primes, pending, factor, bound = meta.size, meta.primes_left, meta.pending, meta.factor, meta.bound
    bad = not 1 <= batch <= p.slots or size not in (2, 3) or not 1 <= primes <= p.depth + 1 or not pending < primes
    bad |= bound is not None and not 0 < bound < math.inf
    if bad or not math.isfinite(factor) or factor == 0 or any(f"q{j}" not in blobs for j in range(primes)):
        raise SerialisationError(f"{path} is damaged: its head does not describe ciphertexts")
    words = math.prod(shape) * size * p.degree
    if any(len(blobs[f"q{j}"]) != words * _word(q).itemsize for j, q in enumerate(p.primes[:primes])):
        raise SerialisationError(f"{path} is damaged: residues of another length than its head says")
    data = empty(math.prod(shape), size, primes, p.degree, False, "loading")
    for j, q in enumerate(p.primes[:primes]):
        data[:, :, j] = _unpacked(blobs[f"q{j}"], data[:, :, j].shape, q)
    left = primes - 1 - pending
    largest = capacity(p, left) / 2 if bound is None else bound / abs(factor)
    cipher = Cipher(data, keys, pending, factor, largest, fresh_error(p.degree, p.scales[left]), bound is not None)
    return CKKSTensor(check_capacity(cipher, "a loaded tensor"), batch, shape, dtype)


def _packed(residues: torch.Tensor, q: int) -> bytes:
    """Residues as little-endian words of 4 bytes below 2^32, else of 8."""
    return residues.contiguous().numpy().astype(_word(q)).tobytes()


def _word(q: int) -> np.dtype:
    return np.dtype("<u4" if q < 1 << 32 else "<u8")


def _unpacked(content: bytes, shape: torch.Size, q: int) -> torch.Tensor:
    words = np.frombuffer(content, dtype=_word(q))
    if words.size and int(words.max()) >= q:
        raise SerialisationError("the file is damaged: a residue is not below its prime")
    return torch.from_numpy(words.astype(np.int64)).view(shape)


def encrypt(
    x: torch.Tensor, keys: PublicKeys | Keys | None = None, *, depth: int = DEPTH, bound: float | None = VALUE_BOUND,
    level: int | None = None,
) -> CKKSTensor:  # fmt: skip
    """Encrypt [batch, ...] with the batch in the slots: one ciphertext for each element of a row.

    Args:
        x: floating point, finite, the batch at most the number of slots.
        keys: `keys.public`; or the whole `keys`, of which the public half is used.
            Without keys, fresh ones of this depth are made and stay with the tensor in this process: `e.decrypt()` and
            `f(e).decrypt()` work here, files and messages carry no secret, and `encrypt(y, e.keys)` encrypts under the
            same keys.
        depth: multiplications in sequence that fresh keys allow.
        bound: the largest magnitude of a value. The evaluator learns it and refuses computations that could wrap. The
            default is the same for all data. Choose the bound by the kind of data, not by this batch. With None
            nothing is refused, and a value that does not fit its level wraps without an error; for protocols that
            check their ranges by other means.
        level: multiplications that the ciphertexts allow; by default those of the keys, which are the most. Time and
            size go with level + 1.

    Error: below 8 sqrt(N (1 + 2N/3) / 12 + 16 N) / scale in every slot (8 sigma; the rounding of SEAL's last step and
    an error of standard deviation 3.2). A party without the secret key learns the shape.

    Raises:
        SlotError, DtypeError, NonFiniteError, ScaleError, MemoryBudgetError: before anything is encrypted.
    """
    public = keys.public if isinstance(keys, Keys) else keys
    if not isinstance(public, PublicKeys | None):
        raise ArgumentError(f"encrypt() takes keys.public (or keys), got {type(keys).__name__}")
    if isinstance(x, CKKSTensor) or not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        raise DtypeError(f"encrypt() takes a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 1 or x.shape[0] < 1:
        raise ShapeError("encrypt() takes a tensor whose first dimension is the batch, of at least one sample")
    if public is None:
        public = OwnerKeys(keygen(depth, slots=x.shape[0]))
    p = public.parameters
    level = p.depth if level is None else level
    if type(level) is not int or not 0 <= level <= p.depth:
        raise LevelError(f"the keys have levels 0 to {p.depth}, and level={level!r} was asked for")
    if bound is not None and (not isinstance(bound, (int, float)) or not 0 < bound < capacity(p, level)):
        raise ScaleError(f"a bound is positive and below 2^{math.log2(capacity(p, level)):.0f}, got {bound!r}")
    if x.shape[0] > p.slots:
        raise SlotError(
            f"a batch of {x.shape[0]} does not fit {p.slots} slots; keygen(depth, slots={x.shape[0]}) or cut it"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.detach().to(torch.float64).reshape(x.shape[0], -1)
    shape = (rows.shape[1], 2, level + 1, p.degree)
    if x.is_meta:
        out = empty(*shape, True, "encrypting")
    else:
        if not bool(torch.isfinite(rows).all()):
            raise NonFiniteError("the input holds NaN or infinity")
        if rows.numel() and float(rows.abs().max()) > (p.primes[0] / p.scales[0] / 2 if bound is None else bound):
            named = "what the last level holds" if bound is None else f"{bound:g}, the bound that the evaluator is told"
            raise ScaleError(
                f"the input goes beyond {named}; scale it down, or declare a larger one: encrypt(x, keys, bound=...)"
            )
        out = encrypt_fresh(public, shape[0], shape[2], encode_slots(rows.t().numpy(), p.degree, p.scales[level]))
    largest = math.nan if bound is None else float(bound)
    fresh = Cipher(out, public, largest=largest, error=fresh_error(p.degree, p.scales[level]), declared=True)
    return CKKSTensor(check_capacity(fresh, "an encryption"), x.shape[0], tuple(x.shape[1:]), dtype)


# Rerandomisation: a fresh encryption of zero is added to an answer, whose ciphertexts then do not show how they were
# computed.
#
# Q holds the secret key and knows the ciphertexts that it sent; the second polynomial of an untouched answer is a known
# combination of those, with A's weights as coefficients. A public-key encryption of zero makes it pseudo-random. Q then
# learns the result and its error, whose size depends on the weights; `flood_bits` hides that too. Q sees all N
# coefficients of each ciphertext's error: `flood_distance` bounds the distance.


def zeros(c: Cipher) -> torch.Tensor:
    """Fresh encryptions of zero, of the level of c: int64 [n, 2, level + 1, N]."""
    return encrypt_fresh(c.keys, c.count, c.level + 1)


def rerandomise(y: CKKSTensor, flood_bits: float | None = None) -> CKKSTensor:
    """Add a fresh encryption of zero, and noise if asked, to the rescaled ciphertexts of `y`.

    Error: that of a fresh encryption, and of the noise.

    Args:
        flood_bits: k; the errors that Q sees are then within `flood_distance(N, k, n)`, about sqrt(n N) 2^-k, of errors
            that do not depend on A's weights, for the n ciphertexts that Q gets under its keys. None adds no noise.
    """
    return CKKSTensor(rerandomise_cipher(y.cipher, flood_bits), y.batch, y.row_shape, y.float_dtype)


def rerandomise_cipher(c: Cipher, flood_bits: float | None = None) -> Cipher:
    """`rerandomise` of ciphertexts."""
    c = make_sendable(c) if flood_bits is None else settle(clear_pending_factor(c))
    if not c.data.is_meta:
        data = c.data.clone()
        other = zeros(c)
        for j, q in enumerate(c.primes):
            data[:, :, j] = plus_(data[:, :, j].contiguous(), other[:, :, j], q)
        c = replace(c, data=data)
    c = replace(c, error=c.error + fresh_error(c.keys.parameters.degree, c.scale))
    if flood_bits is not None:
        c = add_flood_noise(c, flood_bits)
    return without_bounds(check_capacity(c, "an answer"))


def without_bounds(c: Cipher) -> Cipher:
    """`c` as its receiver may see it, without the evaluator's bounds, which depend on the weights.

    The bound of the level replaces them: everybody knows that values which are sent fit it.
    """
    largest = c.largest if math.isnan(c.largest) else capacity(c.keys.parameters, c.levels_left) / 2
    return replace(c, largest=largest, error=0.0, declared=False)


# Encryptions without content, for a dry run and for the form of another party's ciphertexts.


@dataclass(frozen=True)
class BlankKeys:
    """The public keys of ciphertexts without content."""

    parameters: Any
    identity = "dry run"
    context = relin = None

    def rotation(self, element: int) -> None:
        """No key is needed where there is nothing to rotate."""


def blank_encryption(x: torch.Tensor, parameters: Any, bound: float | None, level: int | None = None) -> CKKSTensor:
    """`encrypt(x, keys, bound=bound)` without keys or values: only x's shape and dtype, and the parameters, enter."""
    keys: Any = BlankKeys(parameters)
    top: int = parameters.depth if level is None else level
    data = allocate_ciphertexts((math.prod(x.shape[1:]), 2, top + 1, parameters.degree), True, "encrypting")
    error = fresh_error(parameters.degree, parameters.scales[top])
    cipher = Cipher(data, keys, largest=math.nan if bound is None else float(bound), error=error, declared=True)
    return CKKSTensor(
        cipher, x.shape[0], tuple(x.shape[1:]), torch.float64 if x.dtype == torch.float64 else torch.float32
    )


# Shared by the handlers: which ciphertext holds which element, broadcasting, and plain operands of three kinds.
#
# A plain operand is a number, a tensor that is the same for every sample (one number a ciphertext), or a tensor with
# the batch's own dimension (one number a slot, which SEAL encodes).


def index_of(x: CKKSTensor) -> torch.Tensor:
    """The number of the ciphertext of each element of a row: int64, of the row's shape."""
    return torch.arange(math.prod(x.row_shape)).view(x.row_shape)


def take_ciphertexts(c: Cipher, index: torch.Tensor) -> Cipher:
    """The ciphertexts with these numbers, in this order; repeated ones are copied."""
    flat = index.reshape(-1)
    if flat.numel() == c.count and torch.equal(flat, torch.arange(c.count)):
        return c
    out = empty_like(c.data, "a selection", flat.numel())
    if not c.data.is_meta:
        torch.index_select(c.data, 0, flat, out=out)
    return replace(c, data=out)


def spread_to(x: CKKSTensor, row_shape: tuple[int, ...]) -> Cipher:
    """x broadcast to a row shape."""
    return take_ciphertexts(x.cipher, index_of(x).expand(row_shape))


def broadcast(x: CKKSTensor, other: Any) -> tuple[int, ...]:
    """The row shape of x with another operand; the batch must stay the batch.

    Raises:
        UnsupportedOpError: the batch would meet another dimension.
        SlotError: two batches of different sizes.
    """
    shape = getattr(other, "full_shape", None) or (other.shape if isinstance(other, torch.Tensor) else ())
    if isinstance(other, CKKSTensor):
        if other.keys.identity != x.keys.identity:
            raise KeyMismatchError("two tensors under different keys cannot meet; encrypt both under one public key")
        if other.batch != x.batch:
            raise SlotError(f"batches of {x.batch} and {other.batch} cannot meet: their samples lie in different slots")
        if len(shape) != len(x.full_shape):
            raise UnsupportedOpError(
                f"shapes {tuple(x.full_shape)} and {tuple(shape)}: the batch (dimension 0) would meet another "
                f"dimension; unsqueeze the smaller one behind the batch"
            )
    out = torch.broadcast_shapes(x.full_shape, shape)
    if len(out) != len(x.full_shape) or out[0] != x.batch:
        raise UnsupportedOpError(
            f"shapes {tuple(x.full_shape)} and {tuple(shape)}: the batch (dimension 0) is in the slots and cannot be "
            f"broadcast"
        )
    return tuple(out[1:])


def plain(value: Any) -> torch.Tensor:
    """A plain operand as float64.

    Raises:
        DtypeError, NonFiniteError
    """
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise DtypeError("complex operands are not supported on CKKSTensors")
        value = value.detach().to(torch.float64)
    else:
        value = torch.tensor(float(value), dtype=torch.float64)
    if not value.is_meta and not bool(torch.isfinite(value).all()):
        raise NonFiniteError("a plain operand holds NaN or infinity")
    return value


def magnitude(value: torch.Tensor) -> float:
    """The largest magnitude of a plain operand's entries; 1 in a dry run, which knows its shape only."""
    return 1.0 if value.is_meta else float(value.abs().max()) if value.numel() else 0.0


def per_slot(value: torch.Tensor, row_shape: tuple[int, ...]) -> bool:
    """Whether a plain operand differs from sample to sample."""
    return value.dim() == len(row_shape) + 1 and value.shape[0] > 1


def slot_numbers(value: torch.Tensor, row_shape: tuple[int, ...]) -> list[float]:
    """One number a ciphertext."""
    if value.is_meta:
        return [0.0] * math.prod(row_shape)
    value = value[0] if value.dim() == len(row_shape) + 1 else value
    return value.expand(row_shape).reshape(-1).tolist()


def _columns(value: torch.Tensor, row_shape: tuple[int, ...]) -> torch.Tensor:
    return value.expand(value.shape[0], *row_shape).reshape(value.shape[0], -1).t()


def _encoded(c: Cipher, column: torch.Tensor, scale: float) -> torch.Tensor:
    """A column of slots as residues [primes, N], encoded by SEAL."""
    context = c.keys.context
    return torch.from_numpy(context.parse_plain(context.encode(column.tolist(), c.level, scale), c.level).copy())


def plus_plain(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...]) -> Cipher:
    """c + a plain tensor. Error of the encoding: at most sqrt(N)/scale in a slot, less than a fresh encryption's."""
    if not per_slot(value, row_shape):
        return c if value.is_meta else add_numbers(c, slot_numbers(value, row_shape))

    def add(part: torch.Tensor, encoded: torch.Tensor) -> None:
        for j, q in enumerate(c.primes):
            part[0, j] = plus_(part[0, j].clone(), encoded[j], q)

    largest = c.largest + magnitude(value) / abs(c.multiplier)
    error = c.error + encoding_error(c.keys.parameters.degree, c.scale)
    more = check_capacity(replace(c, largest=largest, error=error, declared=False), "a sum")
    return replace(more, data=_with_slots(c, value, row_shape, c.scale / c.multiplier, add).data)


def times_plain(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...]) -> Cipher:
    """c * a plain tensor: one level, which a single number takes only if no other weights follow."""
    if value.numel() == 1:
        return times_weight(c, 1.0 if value.is_meta else float(value))
    what = "a product with a plain tensor"
    need_level(c, what)
    if not per_slot(value, row_shape):
        return times_numbers(c, slot_numbers(value, row_shape), what)

    def multiply(part: torch.Tensor, encoded: torch.Tensor) -> None:
        for j, q in enumerate(c.primes):
            part[:, j] = times_(part[:, j].contiguous(), encoded[j].expand(part.shape[0], -1), q)

    scale, most = weight_scale(c) * c.multiplier, magnitude(value) * abs(c.multiplier)
    off = encoding_error(c.keys.parameters.degree, weight_scale(c))
    product = replace(
        c, data=torch.empty(0, *c.data.shape[1:], device="meta"), pending=c.pending + 1,
        factor=1.0, pending_factor=None, largest=c.largest * most,
        error=c.error * (most + off) + c.largest * off, declared=False,
    )  # fmt: skip
    check_capacity(product, what)
    return replace(product, data=_with_slots(c, value, row_shape, scale, multiply).data)


def times_number(c: Cipher, number: float) -> Cipher:
    """`c` times a public number. Free, except for zero."""
    if number == 0:
        return times_numbers(c, [0.0] * c.count, "a product with zero")
    return replace(c, factor=c.factor * number)


def _with_slots(c: Cipher, value: torch.Tensor, row_shape: tuple[int, ...], scale: float, f: Callable) -> Cipher:
    """f(ciphertext, encoded) in place on a copy of each ciphertext, with its column of slots."""
    out = empty_like(c.data, "an operation with a plain tensor")
    if not c.data.is_meta:
        out.copy_(c.data)
        sign = -1.0 if scale < 0 else 1.0
        for part, column in zip(out, _columns(value, row_shape), strict=True):
            f(part, _encoded(c, sign * column, abs(scale)))
    return replace(c, data=out)


# Dispatch: the table from torch functions to handlers. A function that is not in it is refused.
#
# The table is one of `sectorch.tensor.table`, as SharedTensor's is, with its canonical names; the steps are those of
# `sectorch.tensor.dispatch`: torch itself runs first, on meta tensors, so that shapes and error texts are torch's own;
# then the handler, whose result must have the shape that torch gave. A missing function raises an error with the
# nearest name. Errors name the layer of the model that was running.

CIPHERTEXTS = OpTable(
    "CKKSTensors",
    "Homomorphic encryption computes polynomials only: sectorch.nn.fhe_friendly(model) replaces activations and "
    "max-pooling (then fine-tune it: sectorch.nn.fine_tune), and sectorch.ckks.to_shares(e, ...) goes on with shares",
)
"""The operations of CKKSTensors. Handlers are f(*args, **kwargs) -> CKKSTensor, or a list or tuple of them."""

implements = CIPHERTEXTS.implements
_OBSERVERS: ContextVar[tuple[Callable, ...]] = ContextVar("sectorch_ckks_observers", default=())


def supported_ops() -> list[str]:
    """Names of the operations that CKKSTensors take."""
    return sorted(CIPHERTEXTS.rows)


@contextmanager
def observe_operations(observer: Callable) -> Iterator[None]:
    """Within this context, call observer(name, layer, result) after every operation of this thread's CKKSTensors."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def call(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute a torch function of CKKSTensors; see the comment above."""
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in SECRETS:
        raise SecretAccessError(
            f"{spell(func)} would take the content out of a CKKSTensor; only .decrypt(secret) does, at the key's holder"
        )
    handler = CIPHERTEXTS.handler.get(func)
    try:
        if handler is None:
            raise UnsupportedOpError(CIPHERTEXTS.unsupported(func, args, kwargs))
        if func in CONVERSIONS:
            check_same_device(args[0], args[1:], kwargs)
        meta = _on_meta(func, args, kwargs)
        result = _checked(handler(*args, **kwargs), meta, func)
    except SectorchError as error:
        if isinstance(error, DtypeError) and is_operator(func, args):
            error = UnsupportedOpError(str(error))  # Python takes a TypeError for "ask the other operand"
        raise add_location(error) from error.__cause__
    except Exception as error:
        raise add_location(as_sectorch_error(func, error)) from None
    for observer in _OBSERVERS.get():
        observer(spell(func), layer_here(), result)
    return result


def _on_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's own result on shapes; a mask among the indices of `x[...]` keeps its content, which the shape comes from.

    Raises:
        DtypeError: an operand that is no real number, or a tensor of none.
    """

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, CKKSTensor):
            return torch.empty(leaf.full_shape, dtype=leaf.float_dtype, device="meta")
        if isinstance(leaf, torch.Tensor):
            if leaf.is_complex():
                raise DtypeError(f"{spell(func)}: complex operands are not supported on CKKSTensors")
            return leaf if func is torch.Tensor.__getitem__ else leaf.to("meta")
        if isinstance(leaf, numbers.Complex) and not isinstance(leaf, numbers.Real):
            raise DtypeError(f"{spell(func)}: complex operands are not supported on CKKSTensors")
        return leaf

    args, kwargs = pytree.tree_map(to_meta, (args, kwargs))
    return torch_on_meta(func, args, kwargs)


def _checked(result: Any, meta: Any, func: Callable) -> Any:
    if isinstance(result, (tuple, list)):
        return type(meta)(_checked(r, m, func) for r, m in zip(result, meta, strict=True))
    if result.full_shape[1:] == meta.shape[1:] and result.full_shape[0] != meta.shape[0]:
        raise UnsupportedOpError(
            f"{spell(func)} would change the batch from {result.full_shape[0]} to {meta.shape[0]} samples; they lie "
            f"in the slots, and none can be taken away or moved. Encrypt the batch that is meant, or decrypt first"
        )
    if result.full_shape != meta.shape:
        raise ShapeError(f"internal error: {spell(func)} gave {tuple(result.full_shape)}, torch {tuple(meta.shape)}")
    if meta.dtype not in (torch.float32, torch.float64):
        raise DtypeError(
            f"{spell(func)} would give {meta.dtype}, and ciphertexts are of float32 or float64; decrypt first"
        )
    if meta.dtype != result.float_dtype:
        return CKKSTensor(result.cipher, result.batch, result.row_shape, meta.dtype)
    return result


def _self_of(frame: FrameType) -> Any:
    """`self` of a running function.

    Before Python 3.13 `f_locals` is a copy that the frame keeps, and it keeps tensors alive that the function has
    dropped. So it is emptied.
    """
    variables = frame.f_locals
    own = variables.get("self")
    if type(variables) is dict:
        variables.clear()
    return own


def layer_here() -> str | None:
    """The dotted name and type of the innermost nn.Module whose forward is running, within the outermost one."""
    inner = outer = None
    frame = sys._getframe(1)
    while frame is not None:
        module = _self_of(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            inner = inner if inner is not None else module
            outer = module if any(m is inner for m in module.modules()) else outer
        frame = frame.f_back
    if inner is None or outer is None:
        return None
    name = next((n for n, m in outer.named_modules() if m is inner), "")
    return f"layer '{name}' ({type(inner).__name__})" if name else f"layer {type(inner).__name__}"


def add_location(error: SectorchError) -> SectorchError:
    """The error with the layer that was running in its text."""
    layer = layer_here()
    if layer is None or getattr(error, "layer", None):
        return error
    found = type(error)(f"{layer}: {error}")
    found.layer = layer
    return found


def wrap(like: CKKSTensor, cipher: Cipher, shape: Any) -> CKKSTensor:
    """A handler's result: the batch and dtype of `like`, the ciphertexts' shape without the batch."""
    return CKKSTensor(cipher, like.batch, tuple(shape), like.float_dtype)
