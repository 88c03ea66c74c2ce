"""Exact arithmetic modulo word-sized primes on int64 tensors: reduction, products, and matrix products with limbs.

Every function takes moduli below 2^50 (`MAX_PRIME_BITS`) and gives residues in [0, q). The bounds that make them exact
stand beside the code; `tests/ckks/test_modular.py` holds them against Python integers.
"""

from __future__ import annotations

import math

import torch

from ...ring.products import matmul
from ..errors import ScaleError

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
