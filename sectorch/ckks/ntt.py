"""SEAL's negacyclic number-theoretic transform as two exact integer matrix products.

SEAL's transform of a polynomial c of degree below N has at place i the value c(psi^(2 br(i) + 1)), psi the smallest
primitive 2N-th root of unity mod q and br the reversal of log2 N bits. With N = A B, c split as c[u, v] (coefficient of
X^(u B + v)) and i = (j, k), that is

    c(x_jk) = sum_v x_jk^v sum_u z_j^u c[u, v],   z_j = psi^(B (2 br_A(j) + 1)),
    x_jk^v = psi^(v (2 br_A(j) + 1)) * psi^(2 A br_B(k) v),

a product with the A x A matrix z_j^u, an element-wise twist, and a product with a B x B matrix: no permutation is left
over, and both products run at the speed of `products.py`. The results are SEAL's bit for bit (tests).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from .errors import SecurityLevelError
from .modular import dot, plus_, row_sum, times_

_SIDE = 64
_PIECE = 8  # polynomials at a time


def _reversed_bits(count: int) -> list[int]:
    bits = count.bit_length() - 1
    return [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(count)]


def smallest_root(q: int, order: int) -> int:
    """The smallest primitive root of unity of the given even order (a power of two) mod the prime q."""
    if (q - 1) % order:
        raise SecurityLevelError(f"the prime {q} has no root of unity of order {order}; choose q = 1 mod 2N")
    root = next(r for r in (pow(g, (q - 1) // order, q) for g in range(2, q)) if pow(r, order // 2, q) == q - 1)
    square, best = root * root % q, root
    for _ in range(order // 2 - 1):
        root = root * square % q
        best = min(best, root)
    return best


class Transform:
    """The transform of one degree and prime, on int64 tensors [..., N] of residues. Holds its tables: 4 N words."""

    def __init__(self, degree: int, q: int):
        self.degree, self.q = degree, q
        self.rows, self.columns = degree // _SIDE, _SIDE
        psi = smallest_root(q, 2 * degree)
        powers = [1]
        for _ in range(2 * degree - 1):
            powers.append(powers[-1] * psi % q)
        table = torch.tensor(powers)
        order = 2 * degree
        outer = torch.tensor([2 * r + 1 for r in _reversed_bits(self.rows)])
        inner = torch.tensor([2 * r for r in _reversed_bits(self.columns)])
        u, v = torch.arange(self.rows), torch.arange(self.columns)
        first = outer[:, None] * u * self.columns % order
        twist = outer[:, None] * v % order
        second = inner[:, None] * self.rows * v % order
        scale_rows, scale_columns = pow(self.rows, -1, q), pow(self.columns, -1, q)
        self._first, self._twist, self._second = _Matrix(table[first], q), table[twist], _Matrix(table[second], q)
        # The inverses are the conjugate transposes over the number of points.
        self._first_back = _Matrix(times_(table[-first.t() % order].contiguous(), scale_rows, q), q)
        self._twist_back = table[-twist % order]
        self._second_back = _Matrix(times_(table[-second.t() % order].contiguous(), scale_columns, q), q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients [..., N] -> values in SEAL's order [..., N]."""

        def part(piece: torch.Tensor) -> torch.Tensor:
            y = times_(self._first(piece), self._twist, self.q)
            return _by_rows(self._second, y)

        return self._in_pieces(part, x)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Values in SEAL's order [..., N] -> coefficients [..., N]."""

        def part(piece: torch.Tensor) -> torch.Tensor:
            x = times_(_by_rows(self._second_back, piece), self._twist_back, self.q)
            return self._first_back(x)

        return self._in_pieces(part, y)

    def _in_pieces(self, f: Callable, x: torch.Tensor) -> torch.Tensor:
        """f on a few polynomials at a time, so that what passes between its steps stays in cache."""
        polynomials = x.reshape(-1, self.rows, self.columns)
        out = torch.empty_like(polynomials)
        for target, piece in zip(out.split(_PIECE), polynomials.split(_PIECE), strict=True):
            target.copy_(f(piece.contiguous()))
        return out.view(x.shape)


class _Matrix:
    """A square matrix mod q that multiplies [p, A, B] from the left, with what exactness needs computed once.

    Entries are centred, |entry| <= q/2, and cut into as few digits as leave the residues whole, row sums times q being
    at most 2^62: one for primes near 2^28 and A = 128, two for 36 bits, three for 41.
    """

    def __init__(self, entries: torch.Tensor, q: int):
        self.q = q
        entries = torch.where(entries > q // 2, entries - q, entries)
        for count in range(1, 6):
            self.width = -(-q.bit_length() // count)
            digits = [entries >> (self.width * i) for i in range(count)]
            digits = [d & ((1 << self.width) - 1) for d in digits[:-1]] + digits[-1:]
            if count == 5 or max(row_sum(d) for d in digits) * q <= 2.0**62:
                break
        self.parts = [(digit.unsqueeze(-1).contiguous(), row_sum(digit)) for digit in reversed(digits)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = None
        for weight, total in self.parts:
            term = dot(weight, x, self.q, lambda w, v: torch.nn.functional.conv1d(v, w), total)
            result = term if result is None else plus_(times_(result, (1 << self.width) % self.q, self.q), term, self.q)
        return result


def _by_rows(matrix: _Matrix, x: torch.Tensor) -> torch.Tensor:
    """Each row of x [p, A, B] times the transpose of a matrix [B, B]: in tiles of 64 rows, transposed."""
    tiles = x.view(-1, _SIDE, _SIDE).transpose(1, 2).contiguous()
    return matrix(tiles).transpose(1, 2).reshape(x.shape)


@lru_cache(maxsize=64)
def transform(degree: int, q: int) -> Transform:
    """The transform of a degree (a power of two from 4096) and a prime q = 1 mod 2 degree; kept."""
    return Transform(degree, q)
