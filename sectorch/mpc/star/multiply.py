"""Products of two shared values, and squares, from masked openings.

With c = x + r and d = y + s public to A and S, x y = c d - c s - d r + r s. A and S have shares of r and s; D knows r s
and defers it (`masking.py`).

Source: PrivHFL, C.4.1, Equation 5 (Beaver).
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
    """Compute product(x, y) for a map that is linear in both arguments: element-wise, matmul, einsum.

    Args:
        product: exact integer kernel f(x, y).

    Returns:
        Shares of the product, exactly mod 2^64, with a deferred correction unless dealing is proved.

    Rounds 1; online 16 bytes per element of x and of y; ahead 8 per element of the result, or nothing where the result
    is opened under a mask next. Nobody learns anything.
    """
    return multiply_masked(net, product, open_masked(net, x), open_masked(net, y))


def multiply_masked(net: Net, product: Callable, x: Masked, y: Masked) -> Shares:
    """`multiply` of values that are already open under their masks. No further message online."""
    return defer_correction(
        net,
        _product(product, x.c, y.c, x.r_A, y.r_A, True),
        _product(product, x.c, y.c, x.r_S, y.r_S, False),
        compute(_less, product, x.r, y.r),
    )


@leaf
def _product(product: Callable, c, d, r, s, first: bool) -> torch.Tensor:
    """One party's half of c d - c s - d r; the first party adds c d, as c (d - s)."""
    return product(c, d - s if first else -s) - product(r, d)


@leaf
def _less(product: Callable, r, s) -> torch.Tensor:
    """At D: the deferred correction, - r s."""
    return -product(r, s)


@protocol("square", "PrivHFL, C.4.1, with one opening")
def square(net: Net, x: Shares) -> Shares:
    """Compute x^2 = c^2 - 2 c r + r^2 from one opening c = x + r. Exact mod 2^64.

    Rounds 1, online 16 bytes per element; ahead 8 or nothing, as for `multiply`. Nobody learns anything.
    """
    opened = open_masked(net, x)
    c, r = opened.c, opened.r
    correction = compute(_less, torch.mul, r, r)
    return defer_correction(net, _square(c, opened.r_A, True), _square(c, opened.r_S, False), correction)


@leaf
def _square(c, r, first: bool) -> torch.Tensor:
    """One party's half of c^2 - 2 c r; the first party adds c^2."""
    return c * (c - 2 * r) if first else -2 * c * r
