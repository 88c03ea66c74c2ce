"""Z_2^128 on pairs of int64 words, for sums of squares that leave Z_2^64.

A value is a tensor [2, ...]: the low word, then the high word. All functions are exact mod 2^128.
"""

from __future__ import annotations

import math

import torch

from .bitplanes import fast
from .fixed_point import as_signed, logical_shift

_DIGIT = 22
"""Bits of a digit. Three make a word, of which the last is signed; six make a value."""
_MASK = (1 << _DIGIT) - 1
MOST_TERMS = 1 << 17
"""Most products that `sum_of_products` sums up: three of 44 bits for each stay below 2^63."""


def widen(v: torch.Tensor) -> torch.Tensor:
    """Signed words [...] as values [2, ...]."""
    return torch.stack((v, v >> 63))


def constant(value: int, like: torch.Tensor) -> torch.Tensor:
    """A whole number as a value that broadcasts against `like`, [2, ...]."""
    words = torch.tensor((as_signed(value), as_signed(value >> 64)), dtype=torch.int64, device=like.device)
    return words.view(2, *[1] * (like.dim() - 1))


def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y."""
    low = x[0] + y[0]
    least = -1 << 63  # flips the order of signed words into that of unsigned ones
    carry = ((low ^ least) < (x[0] ^ least)).to(torch.int64)
    return torch.stack((low, x[1] + y[1] + carry))


def minus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x - y."""
    return ~plus(~x, y)


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y."""
    if fast(x, y):
        from .wideloops import products  # imports numba, which an import of the package must not

        x, y = (v.contiguous() for v in torch.broadcast_tensors(x, y))
        out = torch.empty_like(x)
        products(*(v.view(2, -1).numpy() for v in (x, y, out)))
        return out
    left, right = _digits(x), _digits(y)
    columns = [[left[i] * right[k - i] for i in range(k + 1)] for k in range(len(left))]
    return _join([sum(products[1:], products[0]) for products in columns])


def sum_of(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The sum of signed words over `dims`, which are kept."""
    return _join([d.sum(dims, keepdim=True) for d in _word_digits(x)])


def sum_of_products(x: torch.Tensor, y: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The sum of x y over `dims`, which are kept, for signed words; `MOST_TERMS` at most."""
    last = range(x.dim() - len(dims), x.dim())
    if fast(x, y) and sorted(d % x.dim() for d in dims) == list(last):
        from .wideloops import sums_of_products  # imports numba, which an import of the package must not

        out = x.new_empty(2, *x.shape[: last.start], *[1] * len(dims))
        n = terms_of(x, dims)
        rows = [v.contiguous().view(-1, n).numpy() for v in (x, y)]
        sums_of_products(*rows, out.view(2, -1).numpy())
        return out
    left = _word_digits(x)
    right = left if x is y else _word_digits(y)
    columns = []
    for k in range(5):
        products = [left[i] * right[k - i] for i in range(max(0, k - 2), min(k, 2) + 1)]
        columns.append(sum(products[1:], products[0]).sum(dims, keepdim=True))
    return _join(columns)


def low_word_above(x: torch.Tensor, bits: int) -> torch.Tensor:
    """floor(x / 2^bits) mod 2^64, for 0 to 64 bits."""
    if bits in (0, 64):
        return x[bits // 64].clone()
    return logical_shift(x[0], bits) | (x[1] << (64 - bits))


def square_sum(x: torch.Tensor, dims: tuple[int, ...], centred: bool) -> torch.Tensor:
    """The sum of x^2 over `dims`, which are kept; `centred`: n times it, less the square of the sum of x."""
    squares = sum_of_products(x, x, dims)
    if not centred:
        return squares
    total, n = sum_of(x, dims), terms_of(x, dims)
    return minus(times(constant(n, squares), squares), times(total, total))


def terms_of(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    """How many elements a sum over `dims` has."""
    return math.prod(x.shape[d] for d in dims)


def _word_digits(x: torch.Tensor) -> list[torch.Tensor]:
    return [x & _MASK, (x >> _DIGIT) & _MASK, x >> 2 * _DIGIT]


def _digits(x: torch.Tensor) -> list[torch.Tensor]:
    """Six digits of a value, the last of 18 bits."""
    return [low_word_above(x, k * _DIGIT) & _MASK for k in range(3)] + [
        logical_shift(x[1], k * _DIGIT - 64) & _MASK for k in range(3, 6)
    ]


def _join(columns: list[torch.Tensor]) -> torch.Tensor:
    """The sum of signed words times 2^0, 2^22, 2^44 and so on."""
    total = widen(columns[0])
    for k, column in enumerate(columns[1:], 1):
        bits = k * _DIGIT
        if bits < 64:
            words = torch.stack((column << bits, column >> (64 - bits)))
        else:
            words = torch.stack((torch.zeros_like(column), column << (bits - 64)))
        total = plus(total, words)
    return total
