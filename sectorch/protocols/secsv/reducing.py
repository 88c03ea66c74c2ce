"""Matrix Reducing between encrypted weights and one server's share of the features (SecSV, section 5.2, Algorithm 5).

Y = A X for A [d_out, d_in] encrypted and X [d_in, columns] a share modulo Q. Slot (i, j) of a ciphertext holds output i
of column j; R W slots hold R >= d_out rows of W columns, so that d_in products and no rotation give W columns, as in
Algorithm 5. The terms of the sum come in another order: where the paper adds A[i, i+j+o] X[i+j+o, j] over o, we add
A[i, o] X[o, j]. It is the same set of terms in each slot. But now the plain factor of a term is the same in all rows,
hence a polynomial in X^(N / 2W): a server encodes W numbers and not R W, by a product with a public W x W matrix over
the integers. That is linear modulo Q, so shares are encoded exactly, each server its own
(`ckks.MatrixReducing` encodes real numbers, which a share is not).

The encoded plaintext has W different values in SEAL's transformed order, each at N / W places. The products over o and
over all column blocks at once are then W small matrix products (`modular.product`), exact modulo each prime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ... import ckks
from ...ckks.ntt import transform
from ...errors import ShapeError
from .modular import centred, centred_, product, residues

MOST_COLUMNS = 256
"""W at most: encoding takes W products for a number, and larger blocks save less than that costs."""
ENCODING_BITS = 19
"""log2 of the encoding matrix's scale: its entries are integers of that size divided by W."""


@dataclass
class Counts:
    """Homomorphic operations: products of a ciphertext and a plaintext (or of two ciphertexts), rotations."""

    products: int = 0
    rotations: int = 0

    def add(self, other: Counts) -> None:
        self.products += other.products
        self.rotations += other.rotations


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
        """W, the columns of a ciphertext; a power of two."""
        return min(MOST_COLUMNS, self.degree // 2 >> (self.rows - 1).bit_length())

    def tiles(self, columns: int) -> int:
        """Ciphertexts of a result with so many columns."""
        return -(-columns // self.width)

    def counts(self, columns: int) -> Counts:
        """Lemma 6.1: d_in products for each ciphertext of the result, and no rotation."""
        return Counts(self.inner * self.tiles(columns), 0)

    def slots(self, matrix: torch.Tensor) -> torch.Tensor:
        """What is encrypted, [slots, d_in]: entry (i, k) of the matrix in all the W slots of row i."""
        height = self.degree // 2 // self.width
        rows = torch.zeros(height, matrix.shape[1], dtype=torch.float64)
        rows[: matrix.shape[0]] = matrix
        return rows.repeat_interleave(self.width, dim=0)

    def prepare(self, data: torch.Tensor, primes: tuple[int, ...], weight: int = 1) -> list[torch.Tensor]:
        """Ciphertexts int64 [d_in, 2, primes, N] times a weight below 2^20, as `multiply` wants them: a prime each,
        float64 [W, d_in, 2 N / W], centred.
        """
        count, size, _, degree = data.shape
        values = data.view(count, size, len(primes), 2 * self.width, degree // (2 * self.width))
        # A real-valued plaintext has the same values forward and backward: place i meets place 2 W - 1 - i.
        both = torch.stack([values[:, :, :, : self.width], values[:, :, :, self.width :].flip(3)])
        ordered = both.permute(3, 4, 1, 2, 0, 5).reshape(len(primes), self.width, count, -1)
        return [centred_(ordered[j].double().mul_(weight), q) for j, q in enumerate(primes)]

    def restore(self, values: torch.Tensor, tiles: int) -> torch.Tensor:
        """One prime's results [W, tiles, 2 N / W] -> residues in SEAL's order [tiles, 2, N]."""
        half = values.view(self.width, tiles, 2, 2, -1).permute(3, 1, 2, 0, 4)
        return torch.cat([half[0], half[1].flip(2)], dim=2).reshape(tiles, 2, self.degree)

    def encode(self, share: torch.Tensor, primes: tuple[int, ...]) -> list[torch.Tensor]:
        """A share int64 [primes, d_in, columns] -> a prime each, transformed plaintexts float64 [W, tiles, d_in]."""
        _, inner, columns = share.shape
        tiles = self.tiles(columns)
        padded = torch.nn.functional.pad(share, (0, tiles * self.width - columns))
        out = []
        for j, q in enumerate(primes):
            numbers = centred(padded[j], q).view(inner, tiles, self.width).permute(2, 1, 0).reshape(self.width, -1)
            matrix = encoding(self.degree, self.width, q)
            out.append(product(matrix, numbers, q, q / 2 + 1).view(self.width, tiles, inner))
        return out

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
            values = product(right[j], left[j], q, largest[j])
            out[:, :, j] = self.restore(residues(values, q), tiles)
        return out


@lru_cache(maxsize=64)
def encoding(degree: int, width: int, q: int) -> torch.Tensor:
    """Numbers of the W columns -> the first W transformed values of their plaintext, mod q: float64 [W, W], centred.

    The plaintext is round(2^b C^T / W), C[j, k] = cos(pi k 3^j / 2W) the slots' values at X^(N / 2W): its rounding
    gives a slot a relative error of about 0.3 W 2^-b.
    """
    powers = torch.tensor([pow(3, j, 4 * width) for j in range(width)])
    angles = powers[:, None] * torch.arange(2 * width) % (4 * width)
    coefficients = (torch.cos(angles.double() * (math.pi / (2 * width))) * (2.0**ENCODING_BITS / width)).round_()
    polynomials = torch.zeros(width, degree, dtype=torch.int64)
    polynomials[:, :: degree // (2 * width)] = coefficients.to(torch.int64).remainder(q)
    values = transform(degree, q).forward(polynomials)[:, :: degree // (2 * width)]
    return centred(values[:, :width].t().contiguous(), q)


def encrypt_matrix(layout: Reducing, matrix: torch.Tensor, keys: ckks.Keys) -> torch.Tensor:
    """A under the clients' key: int64 [d_in, 2, primes, N]."""
    return ckks.encrypt(layout.slots(matrix), keys).cipher.data


__all__ = ["Counts", "Reducing", "centred_", "encoding", "encrypt_matrix"]
