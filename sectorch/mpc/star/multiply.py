"""Products of two shared values, and squares, from masked openings.

xy = c d - c s - d r + r s for c = x + r and d = y + s public to A and S: only <r s> has to be dealt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...choreography import Net, leaf, protocol
from ...choreography.located import compute
from .masking import Masked, defer_correction, open_masked
from .shares import Shares


@protocol("multiply", "PrivHFL, C.4.1, Equation 5")
def multiply(net: Net, product: Callable, x: Shares, y: Shares) -> Shares:
    """product(x, y) for any map that is linear in both arguments: element-wise, matmul, einsum; mod 2^64.

    Args:
        product: exact integer kernel f(x, y).

    Rounds 1; online 16 bytes per element of x and of y; dealt 8 per element of the result, unless it is opened under a
    mask next (`owed.py`). Nobody learns anything.
    """
    return multiply_masked(net, product, open_masked(net, x), open_masked(net, y))


def multiply_masked(net: Net, product: Callable, x: Masked, y: Masked) -> Shares:
    """`multiply` for values that are open under their masks already. No further message online."""
    return defer_correction(
        net,
        _product(product, x.c, y.c, x.r_A, y.r_A, True),
        _product(product, x.c, y.c, x.r_S, y.r_S, False),
        compute(_less, product, x.r, y.r),
    )


@leaf
def _product(product: Callable, c, d, r, s, first: bool) -> torch.Tensor:
    """A half of c d - c s - d r; the first party adds c d, as c (d - s)."""
    return product(c, d - s if first else -s) - product(r, d)


@leaf
def _less(product: Callable, r, s) -> torch.Tensor:
    """What D owes: - r s."""
    return -product(r, s)


@protocol("square", "PrivHFL, C.4.1, with one opening")
def square(net: Net, x: Shares) -> Shares:
    """x^2 mod 2^64. Rounds 1, online 16 bytes per element; dealt 8, as of `multiply`. Nobody learns anything.

    With c = x + r open to A and S: x^2 = c^2 - 2 c r + r^2.
    """
    opened = open_masked(net, x)
    c, r = opened.c, opened.r
    owed = compute(_less, torch.mul, r, r)
    return defer_correction(net, _square(c, opened.r_A, True), _square(c, opened.r_S, False), owed)


@leaf
def _square(c, r, first: bool) -> torch.Tensor:
    """A half of c^2 - 2 c r; the first party adds c^2."""
    return c * (c - 2 * r) if first else -2 * c * r
