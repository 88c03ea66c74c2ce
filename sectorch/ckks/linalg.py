"""Vector packing: encrypted matrix products by Matrix Squaring and Matrix Reducing (SecSV, sections 4.2 and 5.2).

A matrix lies row by row in the slots of one ciphertext, and A B is a sum of slot-wise products of shifted copies that
the encrypting side prepares. With i, j the place in the result and indices mod d_in,

    Reducing:  sum over o < d_in of A[i, i + j + o] B[i + j + o, j]: d_in products, no rotation; d_out m slots.
    Squaring:  A padded to d' rows, d' the smallest divisor of d_in that holds them, and copied to d_in rows: the same
               sum over o < d' gives in row r + b d' a part of row r; rotations add the d_in / d' parts. d_in^2 slots.

`prepare` of the paper's shifts: X_o = phi^o sigma(A), Y_o = psi^o tau(B), cut (Reducing) or square (Squaring). Indexing
mod d_in covers m > d_in (copies of A side by side) and d_out > d_in (copies of B one above the other) alike. What does
not fit the slots is split into blocks of rows, of columns, and for Squaring of the inner dimension where d_in >
floor(sqrt(slots)). Each sum is relinearised and rescaled once. One level.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from ..choreography.streams import SECRET_BYTES, PairKey, random_secret
from ..deprecation import renamed_attribute
from ..errors import ArgumentError, ScaleError, ShapeError, SlotError
from ..ring.jit import array, run_in_threads
from .linalgloops import (
    accept_uniform,
    add_centred,
    arrange_slots,
    decrypt_many,
    encrypt_symmetric,
    multiply_slots,
    transform_columns,
)
from .scheme import loops
from .scheme.ciphertext import (
    Cipher,
    add,
    check_capacity,
    check_keys,
    empty,
    encoding_error,
    inner,
    inner_products,
    multiply,
    need_level,
    relinearise,
    settle,
    switch,
    times_integers,
    weight_scale,
    words,
)
from .scheme.encryption import decode_slots, encode_slots
from .scheme.keys import Keys, PublicKeys, SecretKey
from .scheme.ntt import reversed_bits, roots, tables, transform
from .scheme.seal import VALUE_BOUND, Parameters
from .tensor.ckks_tensor import CKKSTensor, encrypt, magnitude


@dataclass
class ProductCounts:
    """Homomorphic operations: products of two ciphertexts, or of a ciphertext and a plaintext, and rotations."""

    products: int = 0
    rotations: int = 0

    def add(self, other: ProductCounts) -> None:
        self.products += other.products
        self.rotations += other.rotations


@dataclass
class PackedOperand:
    """A prepared matrix: for each block its shifted copies [copies, slots], encrypted or (B only) plain.

    `left @ right` is the product, `left + other` a sum of matrices of one layout, `left - plain` a difference with a
    plain one, and `integer * left` a multiple.
    """

    shape: tuple[int, int]
    blocks: Mapping[tuple[int, int], torch.Tensor | Cipher]
    layout: MatrixProduct | None = field(default=None, repr=False)
    encoded: dict = field(default_factory=dict, repr=False)

    def __matmul__(self, other: PackedOperand) -> EncryptedMatrix:
        if other.layout is None:
            raise ArgumentError("this operand has no layout; a MatrixProduct prepares it (prepare_right)")
        return other.layout.multiply(self, other)

    def __add__(self, other: PackedOperand) -> PackedOperand:
        return replace(self, blocks={at: add(self.cipher(at), other.cipher(at)) for at in self.blocks}, encoded={})

    def __sub__(self, plain: PackedOperand) -> PackedOperand:
        taken = lambda c, slots: CKKSTensor(c, slots.shape[1], (c.count,), torch.float64) - slots.t()
        blocks = {at: taken(self.cipher(at), plain.plain(at)).cipher for at in self.blocks}
        return replace(self, blocks=blocks, encoded={})

    def __rmul__(self, integer: int) -> PackedOperand:
        return replace(self, blocks={at: times_integers(self.cipher(at), integer) for at in self.blocks}, encoded={})

    def cipher(self, at: tuple[int, int]) -> Cipher:
        """An encrypted block."""
        block = self.blocks[at]
        if not isinstance(block, Cipher):
            raise ArgumentError("this operand is plain, and an encrypted one is needed here")
        return block

    def plain(self, at: tuple[int, int]) -> torch.Tensor:
        """A plain block."""
        block = self.blocks[at]
        if isinstance(block, Cipher):
            raise ArgumentError("this operand is encrypted, and a plain one is needed here")
        return block

    def residues(self, at: tuple[int, int], c: Cipher) -> np.ndarray:
        """A plain block, encoded by SEAL for products with c: int64 [copies, 1, primes, N]. Cached."""
        key = (*at, c.level, c.levels_left)
        if key not in self.encoded:
            context, scale = c.keys.context, weight_scale(c)
            plains = (context.encode(row.tolist(), c.level, scale) for row in self.plain(at))
            self.encoded[key] = np.stack([context.parse_plain(p, c.level) for p in plains])[:, None]
        return self.encoded[key]


@dataclass
class EncryptedMatrix:
    """An encrypted result [rows, columns] in blocks of slots, and the operations that it took."""

    shape: tuple[int, int]
    blocks: dict[tuple[int, int], Cipher]
    tile: tuple[int, int]
    width: int
    counts: ProductCounts = field(default_factory=ProductCounts)

    def __add__(self, other: EncryptedMatrix) -> EncryptedMatrix:
        return replace(self, blocks={at: add(block, other.blocks[at]) for at, block in self.blocks.items()})

    def decrypt(self, secret: SecretKey) -> torch.Tensor:
        """Decrypt to the plain matrix, float64."""
        rows, columns = self.tile
        out = torch.zeros(self.shape, dtype=torch.float64)
        for (i, j), cipher in self.blocks.items():
            slots = CKKSTensor(cipher, cipher.keys.parameters.slots, (1,), torch.float64).decrypt(secret).view(-1)
            target = out[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            target.copy_(slots[: rows * self.width].view(rows, self.width)[: target.shape[0], : target.shape[1]])
        return out


class MatrixProduct(ABC):
    """A B for A [d_out, d_in] and B [d_in, m] with so many slots.

    The encrypting party calls `prepare_left` and `prepare_right`, the evaluator `multiply`.

    Error: that of a sum of `terms` slot-wise products, each |a| e_b + |b| e_a, and of one relinearisation and rescale.
    """

    tile: tuple[int, int]
    inner: int
    width: int

    def __init__(self, d_out: int, d_in: int, m: int, slots: int):
        if min(d_out, d_in, m) < 1:
            raise ShapeError(f"a matrix product needs positive sizes, got {d_out} x {d_in} times {d_in} x {m}")
        self.d_out, self.d_in, self.m, self.slots = d_out, d_in, m, slots
        self._layout()

    @abstractmethod
    def _layout(self) -> None:
        """Choose the tile of the result, the inner block and the width of a row in the slots."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """Slot-wise products for a pair of blocks."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of a block in the slots."""

    @abstractmethod
    def finish(self, c: Cipher, counts: ProductCounts) -> Cipher:
        """From the sum of products to the block of the result."""

    def rotations(self) -> list[int]:
        """Steps for which `keygen(..., rotations=)` has to make keys."""
        return []

    def _ranges(self, length: int, step: int) -> Iterator[tuple[int, int, int]]:
        for number, start in enumerate(range(0, length, step)):
            yield number, start, min(length, start + step)

    def _copies(self, block: torch.Tensor, left: bool) -> torch.Tensor:
        """[terms, slots]: the shifted copies of a block of A [<= tile rows, inner] or B [inner, <= tile columns]."""
        if block.is_meta:
            return torch.empty(self.terms, self.slots, dtype=torch.float64, device="meta")
        period = self.tile[0]
        i, j, o = torch.arange(self.rows), torch.arange(self.width), torch.arange(self.terms)
        k = (i[None, :, None] + j[None, None, :] + o[:, None, None]) % self.inner
        padded = torch.zeros((period, self.inner) if left else (self.inner, self.width), dtype=torch.float64)
        padded[: block.shape[0], : block.shape[1]] = block
        values = padded[(i % period)[None, :, None], k] if left else padded[k, j[None, None, :]]
        out = torch.zeros(self.terms, self.slots, dtype=torch.float64)
        out[:, : self.rows * self.width] = values.flatten(1)
        return out

    left = renamed_attribute("left", "prepare_left")
    right = renamed_attribute("right", "prepare_right")

    def prepare_left(
        self, matrix: torch.Tensor, keys: PublicKeys | Keys, bound: float | None = VALUE_BOUND
    ) -> PackedOperand:
        """Pack and encrypt A [d_out, d_in]; its entries are below `bound`, as with `encrypt`."""
        return self._operand(matrix, keys, (self.d_out, self.d_in), (self.tile[0], self.inner), True, bound)

    def prepare_right(
        self, matrix: torch.Tensor, keys: PublicKeys | Keys | None, bound: float | None = VALUE_BOUND
    ) -> PackedOperand:
        """Pack and encrypt B [d_in, m]. Without keys it stays plain (a share, say), for products with plain vectors."""
        return self._operand(matrix, keys, (self.d_in, self.m), (self.inner, self.tile[1]), False, bound)

    def _operand(
        self,
        matrix: torch.Tensor,
        keys: PublicKeys | Keys | None,
        shape: tuple,
        steps: tuple,
        left: bool,
        bound: float | None,
    ) -> PackedOperand:
        if tuple(matrix.shape) != shape:
            raise ShapeError(f"{type(self).__name__} was made for a matrix of shape {shape}, got {tuple(matrix.shape)}")
        blocks: dict[tuple[int, int], torch.Tensor | Cipher] = {}
        for i, top, bottom in self._ranges(shape[0], steps[0]):
            for j, start, end in self._ranges(shape[1], steps[1]):
                copies = self._copies(matrix.detach()[top:bottom, start:end].double(), left)
                blocks[i, j] = copies if keys is None else encrypt(copies.t(), keys, bound=bound).cipher
        return PackedOperand(shape, blocks, self)

    def multiply(self, left: PackedOperand, right: PackedOperand, each: bool = False) -> EncryptedMatrix:
        """A B, encrypted. The evaluator learns the shapes; nothing is sent.

        Args:
            each: relinearise and rescale every product of two ciphertexts, as a library without inner products does.

        Raises:
            ShapeError: operands of other shapes than the product was made for.
        """
        if (left.shape, right.shape) != ((self.d_out, self.d_in), (self.d_in, self.m)):
            raise ShapeError(
                f"{type(self).__name__} was made for {self.d_out} x {self.d_in} times {self.d_in} x {self.m}, got "
                f"{left.shape} times {right.shape}"
            )
        counts = ProductCounts()
        blocks = {}
        inner_blocks = -(-self.d_in // self.inner)
        for i, *_ in self._ranges(self.d_out, self.tile[0]):
            for j, *_ in self._ranges(self.m, self.tile[1]):
                parts = (self._block(left.cipher((i, k)), right, (k, j), counts, each) for k in range(inner_blocks))
                blocks[i, j] = self.finish(settle(relinearise(functools.reduce(add, parts))), counts)
        return EncryptedMatrix((self.d_out, self.m), blocks, self.tile, self.width, counts)

    def _block(self, x: Cipher, right: PackedOperand, at: tuple[int, int], counts: ProductCounts, each: bool) -> Cipher:
        counts.products += self.terms
        y = right.blocks[at]
        if isinstance(y, Cipher) and each:
            return _sum_of(settle(relinearise(multiply(x, y, "a matrix product"))))
        if isinstance(y, Cipher):
            return inner(x, y, "a matrix product")
        need_level(x, "a matrix product")
        off, most = encoding_error(x.keys.parameters.degree, weight_scale(x)), magnitude(y)
        known = replace(
            x, data=x.data[:0], pending=x.pending + 1, largest=self.terms * x.largest * most,
            error=self.terms * (x.error * (most + off) + x.largest * off), declared=False,
        )  # fmt: skip
        check_capacity(known, "a matrix product")
        return replace(known, data=inner_products(x, words(x.data), right.residues(at, x), "a matrix product"))


def _sum_of(c: Cipher) -> Cipher:
    """The sum of all ciphertexts of c as one; residues below 2^50 leave room for 2^13 of them."""
    total = empty(1, c.size, c.level + 1, c.data.shape[3], c.data.is_meta, "a sum")
    if not c.data.is_meta:
        torch.sum(c.data, 0, keepdim=True, out=total)
        total.remainder_(torch.tensor(c.primes).view(-1, 1))
    return check_capacity(replace(c, data=total, largest=c.count * c.largest, error=c.count * c.error), "a sum")


class MatrixReducing(MatrixProduct):
    """d_in products for d_out * m results in one ciphertext, no rotation (SecSV, Algorithm 5; any d_out, d_in, m)."""

    def _layout(self) -> None:
        rows = min(self.d_out, self.slots)
        columns = min(self.m, max(1, self.slots // rows))
        self.tile, self.inner, self.width = (rows, columns), self.d_in, columns

    @property
    def terms(self) -> int:
        return self.d_in

    @property
    def rows(self) -> int:
        return self.tile[0]

    def finish(self, c: Cipher, counts: ProductCounts) -> Cipher:
        return c


class MatrixSquaring(MatrixProduct):
    """Jiang et al. (2018) with SecSV's blocks: d' products and about log2(d_in / d') rotations for each pair of
    blocks.
    """

    def _layout(self) -> None:
        side = min(self.d_in, math.isqrt(self.slots))
        if side < 1:
            raise SlotError("Matrix Squaring needs at least one slot")
        rows = next(d for d in range(min(self.d_out, side), side + 1) if side % d == 0)
        self.tile, self.inner, self.width = (rows, min(self.m, side)), side, side

    @property
    def terms(self) -> int:
        return self.tile[0]

    @property
    def rows(self) -> int:
        return self.inner

    def _plan(self) -> list[tuple[str, int]]:
        """How to add n row blocks: ("double", s): x + rotation by s blocks; ("add", s): first + rotated x."""
        n, steps = self.inner // self.tile[0], []
        for bit in bin(n)[3:]:
            done = steps[-1][1] if steps else 1
            steps.append(("double", done * 2))
            if bit == "1":
                steps.append(("one more", done * 2 + 1))
        return steps

    def rotations(self) -> list[int]:
        step = self.tile[0] * self.width
        return sorted({step * (n // 2 if kind == "double" else n - 1) for kind, n in self._plan()})

    def finish(self, c: Cipher, counts: ProductCounts) -> Cipher:
        step, whole = self.tile[0] * self.width, c
        for kind, n in self._plan():
            shift = n // 2 if kind == "double" else n - 1
            c = add(c, rotate(c if kind == "double" else whole, step * shift))
            counts.rotations += 1
        return c


def rotate(c: Cipher, steps: int) -> Cipher:
    """Slots moved to the left by `steps`, cyclically, by SEAL and the rotation keys. Adds a key-switching error.

    Raises:
        MissingKeyError: no rotation keys; keygen(..., rotations=[...]).
    """
    c = settle(relinearise(c))
    degree = c.data.shape[3]
    element = pow(3, steps % (degree // 2), 2 * degree)
    key = c.keys.rotation(element)
    if c.data.is_meta or element == 1:
        return c
    # In SEAL's order place i holds the value at psi^(2 br(i) + 1); the automorphism takes it from that root's power.
    order = reversed_bits(degree)
    moved = torch.from_numpy(order[(element * (2 * order + 1) % (2 * degree) - 1) // 2])
    turned = empty(c.count, 3, c.level + 1, degree, False, "a rotation")
    turned[:, 0], turned[:, 2] = c.data[:, 0][..., moved], c.data[:, 1][..., moved]
    turned[:, 1] = 0
    return switch(replace(c, data=turned), key)


# Exact matrix products modulo small primes in float64, which holds every integer below 2^53.
#
# Residues are centred (|r| <= q/2). A product whose sums could pass 2^53 is done in digits of one factor. The machine's
# double-precision matrix product is the fastest exact one for primes of 22 to 30 bits.

_EXACT = 52.9


def to_centred_(x: torch.Tensor, q: int) -> torch.Tensor:
    """x mod q in about [-q/2, q/2], in place on integers below 2^52 held as float64."""
    return x.sub_(torch.round(x * (1.0 / q)).mul_(q))


def residues(x: torch.Tensor, q: int) -> torch.Tensor:
    """Centred float64 -> int64 in [0, q)."""
    return x.to(torch.int64).remainder_(q)


def to_centred(x: torch.Tensor, q: int) -> torch.Tensor:
    """int64 in [0, q) -> float64 in [-q/2, q/2]."""
    return torch.where(x > q // 2, x - q, x).double()


def product(
    left: torch.Tensor, right: torch.Tensor, q: int, largest: float, left_bits: float | None = None
) -> torch.Tensor:
    """left @ right mod q, centred float64.

    Args:
        left: centred residues [n, K].
        right: integers [K, m] of magnitude at most `largest`.
        left_bits: log2 of what `left` is at most, where that is less than half of q.

    `left` is cut into digits of b bits with largest * 2^b * K below 2^53.
    """
    room = _room(left.shape[-1], largest)
    if (math.log2(q) - 1 if left_bits is None else left_bits) <= room:
        return to_centred_(left @ right, q)
    width = min(22, math.floor(room))
    digits, rest = [], left
    for _ in range(-(-q.bit_length() // width) - 1):
        high = torch.floor(rest * 2.0**-width)
        digits.append(rest - high * 2.0**width)
        rest = high
    total = to_centred_(rest @ right, q)
    for digit in reversed(digits):  # Horner: |total| 2^width stays below 2^(29 + 24)
        total = to_centred_(total.mul_(2.0**width).add_(digit @ right), q)
    return total


def products(left: torch.Tensor, right: torch.Tensor, q: int, largest: float) -> torch.Tensor:
    """left[s] @ right[s] mod q for every s, centred float64 [S, n, m]: many small products, each in one pass.

    Args:
        left: centred residues [S, n, K].
        right: integers [S, K, m], int32 or float64, of magnitude at most `largest`; reduced first where two digits are
            not enough.
    """
    inner, bits = left.shape[-1], math.log2(q) - 1
    if 2 * _room(inner, largest) < bits + 1:
        right, largest = to_centred_(right.double().clone(), q), q / 2 + 1
    room = _room(inner, largest)
    if 2 * room < bits + 1:
        half = inner // 2
        sums = (
            products(left[..., :half], right[:, :half], q, largest),
            products(left[..., half:], right[:, half:], q, largest),
        )
        return to_centred_(sums[0].add_(sums[1]), q)
    out = torch.empty(*left.shape[:2], right.shape[2], dtype=torch.float64)
    digit = 0 if bits <= room else math.floor(room) + 1  # rounding to nearest leaves half a digit
    run_in_threads(
        len(left), multiply_slots, left.contiguous().numpy(), right.contiguous().numpy(), float(q), digit, out.numpy()
    )
    return out


def _room(inner: int, largest: float) -> float:
    """log2 of what a factor may be for sums of `inner` products with others up to `largest` to be exact in float64."""
    return _EXACT - math.log2(max(2, inner)) - math.log2(largest)


def uniform(shape: tuple[int, ...], primes: tuple[int, ...], stream: PairKey | None = None) -> torch.Tensor:
    """Uniform residues int64 [primes, *shape] for primes below 2^31; exact. From the operating system's randomness,
    or from a stream.

    A residue takes 32 bits, drawn anew where they are not below the largest multiple of the prime.
    """
    count, stream = math.prod(shape), stream or PairKey(random_secret(), random_secret())
    out = torch.empty(len(primes), count, dtype=torch.int64)
    for j, q in enumerate(primes):
        limit, rest, draw = (1 << 32) // q * q, out[j].numpy(), 0
        while len(rest):
            # As many as are needed on average and eight deviations, which are at most half of the root of the number.
            needed = len(rest) * (1 << 32) / limit
            words = stream.words("secsv share", j, draw, math.ceil(needed + 8 * math.sqrt(needed)) // 2 + 1)
            rest = rest[accept_uniform(words.numpy().view(np.uint32), q, limit, rest) :]
            draw += 1
    return out.view(len(primes), *shape)


# Encryption under the secret key, at half the size, and decryption of many ciphertexts at once.
#
# (c0, c1) = (m + e - a s, a) with a uniform, from a seed: c0 and the seed travel, and the receiver draws a from the
# seed again. SEAL writes symmetric encryptions in this form too. Against an encryption under the public key the error
# is smaller (e alone), and three primes take three transforms instead of twelve. The seed comes from the operating
# system and is for one call; a is drawn from it by AES-CTR, e from a stream of its own.

SEED_WORDS = SECRET_BYTES // 4
"""int32 words of a seed."""


def encrypt_seeded(slots: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Real numbers [slots, n] under the secret key: c0 int32 [n, primes, N], and the seed int32 [8].

    Raises:
        ScaleError: NaN, infinity, or numbers beyond what float64 encodes exactly.
    """
    p = keys.parameters
    messages = encode_slots(slots.t().numpy(), p.degree, p.scales[p.depth])
    if not float(np.abs(messages).max(initial=0.0)) < loops.EXACT / 2:
        raise ScaleError("the input holds NaN or infinity, or goes beyond what is encoded exactly; scale it down")
    seed = random_secret()
    errors = np.empty(messages.shape, np.int8)
    words = PairKey(random_secret(), random_secret()).words("ckks error", 0, 0, messages.size).numpy()
    loops.binomial(words, errors.reshape(-1))
    out, t = torch.empty(len(messages), len(p.primes), p.degree, dtype=torch.int32), tables(p.degree, p.primes)
    key = torch.frombuffer(bytearray(seed), dtype=torch.int32)
    drawn = second(key, len(messages), p).numpy()
    secret = keys.secret.transformed[: len(p.primes)]
    run_in_threads(len(messages), encrypt_symmetric, messages, errors, drawn, secret, t.roots, t.primes, out.numpy())
    return out, key


def second(seed: torch.Tensor, count: int, p: Parameters) -> torch.Tensor:
    """The second halves a of so many encryptions, int64 [primes, n, N], from their seed."""
    return uniform((count, p.degree), p.primes, PairKey(seed.numpy().tobytes(), b"ckks seeded"))


def decrypt(ciphertexts: torch.Tensor, keys: Keys, scale: float) -> np.ndarray:
    """The slots complex128 [n, N / 2] of residues [n, 2, primes, N], of primes below 2^31 and up to three."""
    p, count = keys.parameters, ciphertexts.shape[2]
    primes = p.primes[:count]
    t = tables(p.degree, primes)
    parts = np.empty((count, len(ciphertexts), p.degree))
    secret = keys.secret.transformed[:count]
    run_in_threads(len(ciphertexts), decrypt_many, array(ciphertexts), secret, t.roots, t.scales, t.primes, parts)
    first, others = primes[0], primes[1:]
    # x = x_0 + q_0 d, d centred: by Garner's digits of the other primes, whose product is below 2^62.
    above, weight = np.zeros(parts.shape[1:], np.int64), 1
    for part, q in zip(parts[1:], others, strict=True):
        rest = (part - parts[0]).astype(np.int64) % q * pow(first, -1, q) % q
        above += (rest - above % q) % q * pow(weight, -1, q) % q * weight
        weight *= q
    above -= np.where(above > weight // 2, weight, 0)
    return decode_slots(parts[0] + float(first) * above, scale)


# Matrix Reducing between encrypted weights and one server's share of the features (SecSV, section 5.2, Algorithm 5).
#
# Y = A X for A [d_out, d_in] encrypted and X [d_in, columns] a share modulo Q. Slot (i, j) of a ciphertext holds output
# i of two columns, as the real and the imaginary part (A is real, so they do not mix): R W slots hold R >= d_out rows
# of 2 W columns, and d_in products and no rotation give them, as in Algorithm 5, which uses the real parts only.
#
# The terms of the sum come in another order: where the paper adds A[i, i+j+o] X[i+j+o, j] over o, we add A[i, o] X[o,
# j]. It is the same set of terms in each slot. But now the plain factor of a term is the same in all rows, hence a
# polynomial in X^(N / 2W): a server encodes 2 W numbers and not R W, by a product with a public matrix of integers.
# That is linear modulo Q, so shares are encoded exactly, each server its own (`ckks.MatrixReducing` encodes real
# numbers, and a share is none). The encoded plaintext has 2 W different values in SEAL's transformed order, each at N
# / 2W places, and the products over o and over all column blocks at once are 2 W small matrix products
# (`products`) for each prime.

MOST_SLOTS = 512
"""The largest W: twice as many slots would save less than their encoding costs, and double its error."""
DENSE_SLOTS = 128
"""Up to this W a matrix of residues encodes; above, a matrix of small integers and SEAL's transform are faster."""
ENCODING_BITS = 19
"""log2 of the encoding matrix's scale: its entries are integers of that size divided by W."""


@dataclass(frozen=True)
class Reducing:
    """The layout of one layer's product: d_out and d_in of the encrypted matrix, and the ring degree.

    Raises:
        ShapeError: more outputs than slots.
    """

    rows: int
    inner: int
    degree: int

    def __post_init__(self):
        if not 1 <= self.rows <= self.degree // 2 or self.inner < 1:
            raise ShapeError(
                f"Matrix Reducing holds 1 to {self.degree // 2} outputs of a layer in a ciphertext, got {self.rows} x "
                f"{self.inner}; narrow the layer or take a larger ring degree"
            )

    @property
    def width(self) -> int:
        """W, the slots of a row; a power of two."""
        return min(MOST_SLOTS, self.degree // 2 >> (self.rows - 1).bit_length())

    @property
    def columns(self) -> int:
        """Columns of a ciphertext: two a slot."""
        return 2 * self.width

    @property
    def encoding_cost(self) -> float:
        """The estimated cost of encoding a ciphertext's columns at both servers, against all other work on it.

        It decides only whether it pays to leave samples out of a test.
        """
        return self.width / 192

    def tiles(self, columns: int) -> int:
        """Ciphertexts of a result with so many columns."""
        return -(-columns // self.columns)

    def counts(self, columns: int) -> ProductCounts:
        """Lemma 6.1: d_in products for each ciphertext of the result, and no rotation."""
        return ProductCounts(self.inner * self.tiles(columns), 0)

    def slots(self, matrix: torch.Tensor) -> torch.Tensor:
        """The slots to encrypt, [slots, d_in]: entry (i, k) of the matrix in all the W slots of row i."""
        height = self.degree // 2 // self.width
        rows = torch.zeros(height, matrix.shape[1], dtype=torch.float64)
        rows[: matrix.shape[0]] = matrix
        return rows.repeat_interleave(self.width, dim=0)

    def prepare(
        self, first: torch.Tensor, second: torch.Tensor, primes: tuple[int, ...], weight: int = 1
    ) -> list[torch.Tensor]:
        """Ciphertexts times a weight below 2^20, as `multiply` takes them: for each prime int32
        [2 W, d_in, N / W], centred.

        Args:
            first: [d_in, primes, N].
            second: [primes, d_in, N].
        """
        out = []
        for j, q in enumerate(primes):
            target = torch.empty(self.columns, len(first), 2 * self.degree // self.columns, dtype=torch.int32)
            halves = first[:, j].numpy(), second[j].numpy()
            run_in_threads(self.columns, arrange_slots, *halves, float(weight), float(q), target.numpy())
            out.append(target)
        return out

    def restore(self, values: torch.Tensor, tiles: int) -> torch.Tensor:
        """One prime's results [2 W, tiles, N / W] -> residues in SEAL's order [tiles, 2, N]."""
        return values.view(self.columns, tiles, 2, -1).permute(1, 2, 0, 3).reshape(tiles, 2, self.degree)

    def encode(self, share: torch.Tensor, primes: tuple[int, ...]) -> list[torch.Tensor]:
        """A share int64 [primes, d_in, columns] -> each prime's transformed plaintexts, float64 [2 W, tiles, d_in]."""
        _, inner, columns = share.shape
        tiles, span = self.tiles(columns), self.columns
        padded = torch.nn.functional.pad(share, (0, tiles * span - columns))
        out = []
        for j, q in enumerate(primes):
            numbers = to_centred(padded[j], q).view(inner, tiles, span).permute(2, 1, 0).reshape(span, -1)
            out.append(self._encoded(numbers, q).view(span, tiles, inner))
        return out

    def _encoded(self, numbers: torch.Tensor, q: int) -> torch.Tensor:
        """Centred residues [2 W, count] -> the 2 W transformed values of each column's plaintext mod q, centred."""
        if self.width <= DENSE_SLOTS:
            return product(encoding(self.degree, self.width, q), numbers, q, q / 2 + 1)
        coefficients = _coefficients(self.width, numbers, q)
        # A polynomial in X^step: its transform repeats that of 2 W coefficients, at the step-th power of the root.
        out, table = torch.empty_like(coefficients), roots(self.columns, q, self.degree // self.columns)
        run_in_threads(numbers.shape[1], transform_columns, coefficients.numpy(), table, float(q), out.numpy())
        return out

    def constant(self, value: int, primes: tuple[int, ...]) -> torch.Tensor:
        """The transformed plaintext of one number in all columns, residues [primes, N]: a bias is multiplied by it."""
        share = torch.tensor([value % q for q in primes]).view(-1, 1, 1).expand(-1, 1, self.columns)
        values = [residues(v.view(-1), q) for v, q in zip(self.encode(share, primes), primes, strict=True)]
        return torch.stack(values).repeat_interleave(self.degree // self.columns, dim=1)

    def multiply(
        self, left: list[torch.Tensor], right: list[torch.Tensor], primes: tuple[int, ...], largest: list[float]
    ) -> torch.Tensor:
        """The encrypted product, int64 [tiles, 2, primes, N], at the scale of A times 2^ENCODING_BITS.

        Args:
            left: `prepare`, or a sum of several; magnitudes at most `largest`, a number for each prime.
            right: `encode`.
        """
        tiles = right[0].shape[1]
        out = torch.empty(tiles, 2, len(primes), self.degree, dtype=torch.int64)
        for j, q in enumerate(primes):
            values = products(right[j], left[j], q, largest[j])
            out[:, :, j] = self.restore(residues(values, q), tiles)
        return out


@lru_cache(maxsize=16)
def basis(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 2 W columns -> the coefficients of their plaintext that are not zero: integers, twice [W + 1, W].

    Column j < W is the real part of slot j, column W + j the imaginary one. Coefficient k is the sum of the real parts
    times round(2^b cos(pi k 3^j / 2W) / W) and of the imaginary ones times round(2^b sin(..) / W): rounding gives a
    slot an error of about 0.4 W 2^-b of the numbers' size. For 2 W - k the cosines change their sign, the sines do not.
    """
    powers = torch.tensor([pow(3, j, 4 * width) for j in range(width)])
    angles = (torch.arange(width + 1)[:, None] * powers % (4 * width)).double() * (math.pi / (2 * width))
    scale = 2.0**ENCODING_BITS / width
    return (torch.cos(angles) * scale).round_(), (torch.sin(angles) * scale).round_()


def _coefficients(width: int, numbers: torch.Tensor, q: int) -> torch.Tensor:
    """Centred residues [2 W, count] -> the 2 W coefficients of each column's plaintext mod q, up to q in magnitude.

    3^(W/2) = 1 + 2 W mod 4 W for W >= 4: columns j and j + W/2 of the basis are equal where k is even, and opposite
    where it is odd. With the symmetry in k this leaves a quarter of the products.
    """
    sums = []
    for part, half in zip(basis(width), numbers.split(width), strict=True):
        first, second = half.split(width // 2)
        total = torch.empty(width + 1, numbers.shape[1], dtype=torch.float64)
        for parity, joined in ((0, first + second), (1, first - second)):
            rows = part[parity::2, : width // 2]
            total[parity::2] = product(rows, joined, q, q + 2, ENCODING_BITS - math.log2(width))
        sums.append(total)
    cosines, sines = sums
    return torch.cat([cosines + sines, (sines - cosines)[1:-1].flip(0)])


@lru_cache(maxsize=64)
def encoding(degree: int, width: int, q: int) -> torch.Tensor:
    """`basis` and the transform after it as one matrix, mod q: float64 [2 W, 2 W], centred."""
    polynomials = torch.zeros(2 * width, degree, dtype=torch.int64)
    cosines, sines = basis(width)
    whole = torch.cat([torch.cat([cosines, sines], 1), torch.cat([-cosines, sines], 1)[1:-1].flip(0)])
    polynomials[:, :: degree // (2 * width)] = residues(whole.t(), q)
    values = transform(degree, q).forward(polynomials)[:, :: degree // (2 * width)]
    return to_centred(values.t().contiguous(), q)


def encrypt_matrix(
    layout: Reducing, matrix: torch.Tensor, keys: Keys | PublicKeys
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Encrypt A under the clients' key; see `encrypt_seeded`. Of shapes shapes, for which public keys do."""
    if not isinstance(keys, Keys) or matrix.is_meta:
        shape = matrix.shape[1], len(keys.parameters.primes), layout.degree
        half = torch.empty(shape, dtype=torch.int32, device="meta")
        return half, half.new_empty(SEED_WORDS)
    return encrypt_seeded(layout.slots(matrix), keys)


def decrypt_columns(layout: Reducing, output: torch.Tensor, keys: Keys, scale: float) -> torch.Tensor:
    """All rows and columns of a result: float64 [R, tiles * 2 W], the unused ones too."""
    slots = decrypt(output, keys, scale).reshape(len(output), -1, layout.width)
    both = np.concatenate([np.real(slots), np.imag(slots)], axis=2)
    return torch.from_numpy(both.transpose(1, 0, 2).reshape(both.shape[1], -1))


@dataclass(frozen=True)
class EncodedShare:
    """A share as plaintexts of a layout's products, encoded once for several of them.

    Attributes:
        parts: as `Reducing.encode` gives.
    """

    columns: int
    parts: list[torch.Tensor] = field(repr=False)

    @classmethod
    def of(cls, layout: Reducing, share: torch.Tensor, primes: tuple[int, ...]) -> EncodedShare:
        """Of a share, residues int64 [primes, d_in, columns]."""
        _, inner, columns = share.shape
        if share.is_meta:
            part = torch.empty(layout.columns, layout.tiles(columns), inner, dtype=torch.float64, device="meta")
            return cls(columns, [part] * len(primes))
        return cls(columns, layout.encode(share, primes))


@dataclass(frozen=True)
class ReducingOperand:
    """An encrypted matrix [d_out, d_in], prepared for products with shares of the other factor: `matrix @ share`.

    Each party that holds an additive share of X mod Q holds such a matrix, and their products add up to A X, with no
    rotation and no error of the mask. `matrix + other` is the encrypted sum. Sums are exact: residues are centred.

    Attributes:
        parts: for each prime int32 [2 W, d_in, N / W], as `Reducing.prepare` gives.
    """

    layout: Reducing
    keys: PublicKeys
    parts: list[torch.Tensor] = field(repr=False)

    @classmethod
    def from_seeded(
        cls, layout: Reducing, keys: PublicKeys, first: torch.Tensor, seed: torch.Tensor, weight: int = 1
    ) -> ReducingOperand:
        """What `encrypt_matrix` gave, as it arrived, times an integer below 2^20."""
        p = keys.parameters
        if first.is_meta:
            shape = layout.columns, len(first), 2 * p.degree // layout.columns
            return cls(layout, keys, [torch.empty(shape, dtype=torch.int32, device="meta") for _ in p.primes])
        return cls(layout, keys, layout.prepare(first, second(seed, len(first), p), p.primes, weight))

    def __add__(self, other: ReducingOperand) -> ReducingOperand:
        check_keys(self, other)
        if self.layout != other.layout or self.parts[0].shape != other.parts[0].shape:
            raise ShapeError(f"matrices of {self.layout} and {other.layout} cannot be added")
        primes, sums = self.keys.parameters.primes, []
        for q, x, y in zip(primes, self.parts, other.parts, strict=True):
            total = torch.empty_like(x)
            if not x.is_meta:
                run_in_threads(
                    len(x), add_centred, *(t.flatten(1).numpy() for t in (x, y)), q, total.flatten(1).numpy()
                )
            sums.append(total)
        return replace(self, parts=sums)

    def __matmul__(self, share: torch.Tensor | EncodedShare) -> EncryptedColumns:
        """Times a share, residues int64 [primes, d_in, columns]. One rescale, so that two primes of three are left.

        Raises:
            ShapeError: a share of another shape, of other primes, or encoded for another layout.
        """
        p, inner = self.keys.parameters, self.parts[0].shape[1]
        if isinstance(share, torch.Tensor) and (share.dim() != 3 or share.shape[:2] != (len(p.primes), inner)):
            raise ShapeError(f"a share is [{len(p.primes)} primes, {inner}, columns] here, got {tuple(share.shape)}")
        right = EncodedShare.of(self.layout, share, p.primes) if isinstance(share, torch.Tensor) else share
        form = self.layout.columns, self.layout.tiles(right.columns), inner
        if len(right.parts) != len(p.primes) or any(tuple(part.shape) != form for part in right.parts):
            raise ShapeError(f"a share that is encoded for another layout than {self.layout} or for other primes")
        if right.parts[0].is_meta or self.parts[0].is_meta:
            shape = self.layout.tiles(right.columns), 2, len(p.primes), p.degree
            out = torch.empty(shape, dtype=torch.int64, device="meta")
        else:
            out = self.layout.multiply(self.parts, right.parts, p.primes, [q / 2 + 1 for q in p.primes])
        cipher = settle(Cipher(out, self.keys, pending=1, largest=math.nan))
        return EncryptedColumns(self.layout, cipher, right.columns)


@dataclass(frozen=True)
class EncryptedColumns:
    """The encrypted product of a `ReducingOperand` and a share, or a sum of such: [d_out, columns]."""

    layout: Reducing
    cipher: Cipher
    columns: int

    def __add__(self, other: EncryptedColumns) -> EncryptedColumns:
        if (self.layout, self.columns) != (other.layout, other.columns):
            raise ShapeError(
                f"{self.columns} columns of {self.layout} and {other.columns} of {other.layout} are no sum"
            )
        return replace(self, cipher=add(self.cipher, other.cipher))

    def decrypt(self, keys: Keys) -> torch.Tensor:
        """float64 [d_out, columns], at the scale of the matrix times that of the shared integers.

        The matrix was encrypted at the scale of the keys' highest level (`encrypt_matrix`).

        Raises:
            KeyMismatchError: it was encrypted under other keys.
        """
        check_keys(self.cipher, replace(self.cipher, keys=keys.public))
        p = keys.parameters
        scale = p.scales[p.depth] * 2.0**ENCODING_BITS / p.primes[-1]
        return decrypt_columns(self.layout, self.cipher.data, keys, scale)[: self.layout.rows, : self.columns]
