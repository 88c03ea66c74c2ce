"""SEAL's negacyclic number-theoretic transform: its tables, and the transform of int64 tensors.

SEAL's transform of a polynomial c of degree below N has at place i the value c(psi^(2 br(i) + 1)), psi the smallest
primitive 2N-th root of unity mod q and br the reversal of log2 N bits. Its steps (Cooley and Tukey, Gentleman and Sande
back) are in `loops.py`; the results are SEAL's bit for bit (tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ...errors import ScaleError, SecurityLevelError
from ...ring.jit import run_in_threads
from ...ring.products import matmul
from . import loops


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


def reversed_bits(count: int) -> np.ndarray:
    """The numbers below a power of two with their bits in reverse."""
    out = np.zeros(1, np.int64)
    while len(out) < count:
        out = np.concatenate([2 * out, 2 * out + 1])
    return out


def centred_double(value: int, q: int) -> float:
    """A residue as the double nearest to zero."""
    value %= q
    return float(value - q if value > q // 2 else value)


@dataclass(frozen=True)
class Tables:
    """What the compiled loops need of some primes.

    Attributes:
        primes: float64 [P].
        roots: float64 [P, 4, N]: the roots of the steps in the order in which `loops.py` meets them, their quotients
            by q, and both again for the way back.
        scales: float64 [P], 1/N mod q.
    """

    primes: np.ndarray
    roots: np.ndarray
    scales: np.ndarray


@lru_cache(maxsize=64)
def roots(degree: int, q: int, power: int = 1) -> np.ndarray:
    """A prime's `Tables.roots`; with a power of two, of that power of the root of so many times the degree."""
    psi = pow(smallest_root(q, 2 * degree * power), power, q)
    powers = [1]
    for _ in range(2 * degree - 1):
        powers.append(powers[-1] * psi % q)
    table = np.array([centred_double(p, q) for p in powers])
    rows = degree // loops.COLUMNS
    order, groups = [np.arange(rows)], 1
    while groups < loops.COLUMNS:  # within a row: [groups, rows] roots of this step
        order.append((rows * groups + np.arange(groups)[:, None] + np.arange(rows) * groups).ravel())
        groups *= 2
    exponents = reversed_bits(degree)[np.concatenate(order)]
    forward, backward = table[exponents], table[-exponents % (2 * degree)]
    return np.stack([forward, forward / q, backward, backward / q])


@lru_cache(maxsize=32)
def tables(degree: int, primes: tuple[int, ...]) -> Tables:
    """The tables of a degree (a power of two from 4096) and primes = 1 mod 2 degree below 2^50; kept."""
    scales = np.array([centred_double(pow(degree, -1, q), q) for q in primes])
    return Tables(np.array(primes, np.float64), np.stack([roots(degree, q) for q in primes]), scales)


class Transform:
    """The transform of one degree and prime, on int64 tensors [..., N] of residues."""

    def __init__(self, degree: int, q: int):
        self.degree, self.q = degree, q

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients [..., N] -> values in SEAL's order [..., N]."""
        return self._run(x, False)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Values in SEAL's order [..., N] -> coefficients [..., N]."""
        return self._run(y, True)

    def _run(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        rows, t = out.view(-1, self.degree).numpy(), tables(self.degree, (self.q,))
        run_in_threads(len(rows), loops.transform_loop, rows, t.roots[0], t.scales[0], t.primes[0], backwards)
        return out


@lru_cache(maxsize=64)
def transform(degree: int, q: int) -> Transform:
    """The transform of a degree and prime, cached."""
    return Transform(degree, q)


# Exact arithmetic modulo word-sized primes on int64 tensors: reduction, products, and matrix products with limbs.
#
# Every function takes moduli below 2^50 (`MAX_PRIME_BITS`) and gives residues in [0, q). The bounds that make them
# exact stand beside the code; `tests/ckks/test_ckks_arithmetic.py` checks them against Python integers.

MAX_PRIME_BITS = 50
_WORD = 62
"""Sums of products stay below 2^62, so that int64 holds them and `reduce_` is exact."""
_CHUNK = 1 << 16  # elements worked on at a time: the temporaries stay in the second-level cache


def reduce_(x: torch.Tensor, q: int) -> torch.Tensor:
    """x mod q in [0, q), in place on an int64 tensor of any shape with |x| <= 2^62.

    The quotient is estimated in float64, less a quarter. int64 -> float64 errs by a relative 2^-53 and so does each of
    the roundings of x * (1/q), hence by less than 2^62 / q * 2^-51 < 1/4 in all for q > 2^13. The estimate is then at
    most the quotient and more than the quotient less 3/2, so that the remainder lies in [0, 2q): one step brings it
    into [0, q).
    """
    flat = x.view(-1) if x.is_contiguous() else None
    if flat is None:
        x.copy_(reduce_(x.contiguous(), q))
        return x
    for part in flat.split(_CHUNK):
        quotient = part.double().mul_(1.0 / q).sub_(0.25).floor_().to(torch.int64)
        part.add_(quotient, alpha=-q)
        _one_step(part, q)
    return x


def _one_step(r: torch.Tensor, q: int) -> None:
    """From [0, 2q) to [0, q), in place."""
    r.sub_(q)
    r.add_((r >> 63).bitwise_and_(q))


def times_(x: torch.Tensor, y: torch.Tensor | int, q: int) -> torch.Tensor:
    """x * y mod q for residues in [0, q), in place on a contiguous x; y broadcasts against x's first dimension's rows.

    For q < 2^31 the product is below 2^62 and `reduce_` applies. Above, the product wraps mod 2^64 but its remainder
    does not: the float64 estimate of x * y / q has a relative error below 4 * 2^-53 (the product, 1/q, the product with
    it), an absolute one below q * 2^-51 <= 1/2. Less a half, it is at most the quotient and more than the quotient less
    2, so wrapped(x y) - wrapped(estimate * q) is the true difference, in [0, 2q).
    """
    if isinstance(y, int) or x.dim() < 2:
        rows = [(x.view(-1), y.reshape(-1) if isinstance(y, torch.Tensor) else y)]
    else:
        full = y.shape == x.shape
        rows = _rows(x, y if full else y.expand(x.shape), full)
    for left, right in rows:
        if isinstance(right, int):
            for part in left.split(_CHUNK):
                _times_part(part, right, q)
        else:
            _times_part(left, right, q)
    return x


def _rows(x: torch.Tensor, y: torch.Tensor, full: bool):
    span = max(1, _CHUNK // max(1, x[0].numel()))
    for start in range(0, x.shape[0], span):
        yield x[start : start + span], y[start : start + span]


def _times_part(x: torch.Tensor, y: torch.Tensor | int, q: int) -> None:
    if q < 1 << 31:
        x.mul_(y)
        reduce_(x, q)
        return
    other = y.double() if isinstance(y, torch.Tensor) else float(y)
    quotient = x.double().mul_(other).mul_(1.0 / q).sub_(0.5).floor_().to(torch.int64)
    x.mul_(y).add_(quotient, alpha=-q)
    _one_step(x, q)


def plus_(x: torch.Tensor, y: torch.Tensor, q: int) -> torch.Tensor:
    """x + y mod q for residues in [0, q), in place."""
    x.add_(y).sub_(q)
    return x.add_((x >> 63).bitwise_and_(q))


def minus_(x: torch.Tensor, y: torch.Tensor, q: int) -> torch.Tensor:
    """x - y mod q for residues in [0, q), in place."""
    x.sub_(y)
    return x.add_((x >> 63).bitwise_and_(q))


def row_sum(weight: torch.Tensor) -> float:
    """An upper bound on the sum over a row of |weight|, int64 [rows, K]: how much a product with it can grow.

    Summed in float64, which errs by a relative K 2^-53: below 2^-30 for any K that fits memory, and added.
    """
    return float(weight.double().abs_().sum(dim=1).max()) * (1 + 2.0**-30) if weight.numel() else 0.0


def limb_width(q: int, total: float) -> int:
    """Bits of the pieces into which residues mod q are cut, so that a product with rows that sum to `total` is exact.

    A piece below 2^l gives |sum| < total 2^l; with 2^l <= 2^62 / total that is at most 2^62, and the carry that `dot`
    adds is below 2^50: int64 holds it. Residues stay whole where total * q <= 2^62.

    Raises:
        ScaleError: the rows are so large that no useful piece is left.
    """
    if total * q <= 2.0**_WORD:
        return q.bit_length()
    width = _WORD - math.frexp(total)[1]
    if width < 4:
        raise ScaleError(
            f"the integer weights of a layer sum to {total:.1e} in a row, too large for exact products; scale the "
            f"weights down (fold a factor into another layer) or use smaller scale_bits"
        )
    return -(-q.bit_length() // -(-q.bit_length() // width))


def dot(
    weight: torch.Tensor, columns: torch.Tensor, q: int, product=matmul, total: float | None = None
) -> torch.Tensor:
    """weight @ columns mod q, exactly: int64 [rows, K] signed integers times residues [K, n] -> residues [rows, n].

    Args:
        product: what multiplies; any exact bilinear int64 map of the two.
        total: `row_sum(weight)`, where it is known.

    Cost: one int64 product per limb; primes near 2^28 and rows below 2^34 need one.
    """
    width = limb_width(q, row_sum(weight) if total is None else total)
    if width >= q.bit_length():
        return reduce_(product(weight, columns).contiguous(), q)

    def limb(shift: int) -> torch.Tensor:
        return product(weight, (columns >> shift).bitwise_and_((1 << width) - 1)).contiguous()

    highest, *others = reversed(range(0, q.bit_length(), width))
    result = reduce_(limb(highest), q)
    for shift in others:
        result = reduce_(limb(shift).add_(times_(result, (1 << width) % q, q)), q)
    return result
