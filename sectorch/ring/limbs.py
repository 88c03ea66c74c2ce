"""Exact matrix products mod 2^64 where int64 products do not exist: sums of products of limbs.

An int64 is cut into signed digits, x = sum_i x_i 2^(w i) mod 2^64 with -2^(w-1) <= x_i < 2^(w-1), and

    x y = sum_{i + j < n} 2^(w (i + j)) x_i y_j   mod 2^64,

every digit product by a floating-point or int8 matrix product that is exact as long as no partial sum leaves its
accumulator. With fan-in K (for a convolution c_in kh kw), |sum| <= K 2^(2w - 2):

| kind    | w  | digits | products | accumulator    | exact for K up to   |
|---------|----|--------|----------|----------------|---------------------|
| float64 | 22 | 3      | 6        | 53-bit integer | 2^(53 - 42) = 2048  |
| int8    | 8  | 8      | 36       | int32          | (2^31 - 1) / 2^14 = 131071 |

Longer sums are cut into pieces of that length and added in int64, where wrapping is meant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import ArgumentError


@dataclass(frozen=True)
class Limbs:
    """A way to cut: `bits` per digit, `count` digits, and the longest sum of digit products that stays exact."""

    bits: int
    count: int
    longest: int


FLOAT64 = Limbs(22, 3, 1 << 11)
INT8 = Limbs(8, 8, ((1 << 31) - 1) >> 14)
KINDS = {"float64": FLOAT64, "int8": INT8}
_FILLED = 64  # rows, columns and fan-in from which on int8 products fill the tensor cores
_FULL_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities with float64 units at half the rate of float32; the others have a 32nd or a 64th of it. On an
H100 (9.0) float64 limbs are 1.5 to 3.1 times as fast as int8 (`benchmarks/products.py --limbs --device cuda`); no
other device was timed."""
_ROWS, _MULTIPLE = 17, 8  # least rows and the granularity that torch._int_mm asks for on CUDA


def kind_for(x: torch.Tensor, y: torch.Tensor) -> str:
    """The faster limbs for `x @ y` where x is."""
    if min(x.shape[-2], x.shape[-1], y.shape[-1]) < _FILLED:
        return "float64"
    full = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) in _FULL_FLOAT64
    return "float64" if full else "int8"


def digits(x: torch.Tensor, limbs: Limbs) -> torch.Tensor:
    """Signed digits of int64 [...]: int64 [count, ...], the least significant first."""
    out = x.new_empty(limbs.count, *x.shape)
    half = 1 << (limbs.bits - 1)
    rest = x
    for i in range(limbs.count):
        out[i] = ((rest + half) & (2 * half - 1)) - half
        rest = (rest - out[i]) >> limbs.bits
    return out


def matmul(x: torch.Tensor, y: torch.Tensor, kind: str = "float64") -> torch.Tensor:
    """`x @ y` mod 2^64 for int64 [..., n, K] and [..., K, m], exact for any K.

    Raises:
        ArgumentError: an unknown kind.
    """
    if kind not in KINDS:
        raise ArgumentError(f"limbs are of kind {' or '.join(KINDS)}, got {kind!r}")
    limbs, fan_in = KINDS[kind], x.shape[-1]
    total = short_matmul(x[..., : limbs.longest], y[..., : limbs.longest, :], kind)
    for start in range(limbs.longest, fan_in, limbs.longest):
        piece = slice(start, start + limbs.longest)
        total.add_(short_matmul(x[..., piece], y[..., piece, :], kind))
    return total


def short_matmul(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """`matmul` for a fan-in that the accumulator holds.

    Raises:
        ArgumentError: the fan-in is longer, and digit sums could leave the accumulator.
    """
    limbs, fan_in = KINDS[kind], x.shape[-1]
    if fan_in > limbs.longest:
        raise ArgumentError(f"{kind} limbs are exact up to a fan-in of {limbs.longest}, got {fan_in}; cut the sum")
    product = _float_products if kind == "float64" else _int_products
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:])
    left, right = digits(x, limbs), digits(y, limbs)

    def parts() -> Iterator[torch.Tensor]:
        for i in range(limbs.count):
            # all digits of y that still count for this digit of x, in one wide product
            for j, value in enumerate(product(left[i], right[: limbs.count - i])):
                yield value.to(torch.int64).bitwise_left_shift_(limbs.bits * (i + j))

    return functools.reduce(torch.Tensor.add_, parts())


def _float_products(x: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """[..., n, K] with each of [d, ..., K, m]."""
    return torch.matmul(x.to(torch.float64), ys.to(torch.float64))


def _int_products(x: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The same by int8 products with int32 sums; torch has them for two matrices at a time."""
    batch, (n, k), (count, m) = x.shape[:-2], x.shape[-2:], (ys.shape[0], ys.shape[-1])
    pairs = math.prod(batch)
    lefts = x.to(torch.int8).reshape(pairs, n, k)
    rights = ys.to(torch.int8).movedim(0, -2).reshape(pairs, k, count * m)
    out = x.new_zeros(pairs, n, count * m, dtype=torch.int32)
    for i in range(pairs):
        out[i] = _int_mm(lefts[i], rights[i])
    return out.view(*batch, n, count, m).movedim(-2, 0)


def _int_mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """int8 [n, K] @ [K, m] -> int32, padded to the shapes that the kernel takes."""
    (n, k), m = x.shape, y.shape[1]
    rows, inner, columns = max(0, _ROWS - n), -k % _MULTIPLE, -m % _MULTIPLE
    if n == 0 or k == 0 or m == 0:
        return x.new_zeros(n, m, dtype=torch.int32)
    if rows or inner or columns:
        x, y = F.pad(x, (0, inner, 0, rows)), F.pad(y, (0, columns, 0, inner))
    product = torch._int_mm(x.contiguous(), y.contiguous())  # pyright: ignore[reportPrivateImportUsage]  not in torch's stubs
    return product[:n, :m]
