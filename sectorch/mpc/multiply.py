"""Products of two shared values, and squares, from masked openings.

xy = c d - c s - d r + r s for c = x + r and d = y + s public to A and S: only <r s> has to be dealt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..choreography import Net, protocol
from .deal import deal
from .mask import Masked, open_masked
from .shares import Shares
from .truncate import deal_quotient, public_quotient, wrap_term


@protocol("multiply", "PrivHFL, C.4.1, Equation 5")
def multiply(net: Net, product: Callable, x: Shares, y: Shares) -> Shares:
    """product(x, y) for any map that is linear in both arguments: element-wise, matmul, einsum; mod 2^64.

    Args:
        product: exact integer kernel f(x, y).

    Rounds 1; online 16 bytes per element of x and of y; dealt 8 per element of the result. Nobody learns anything.
    """
    return multiply_masked(net, product, open_masked(net, x), open_masked(net, y))


def multiply_masked(net: Net, product: Callable, x: Masked, y: Masked) -> Shares:
    """`multiply` for values that are open under their masks already. No further message online."""
    rs = deal(net, net.locally(net.Q, product, x.r, y.r))

    def half(c, d, r, s, rs):
        return rs - product(c, s) - product(r, d)

    return Shares(
        net.locally(
            net.A, lambda c, d, r, s, rs: half(c, d, r, s, rs).add_(product(c, d)), x.c, y.c, x.r_A, y.r_A, rs.A
        ),
        net.locally(net.S, half, x.c, y.c, x.r_S, y.r_S, rs.S),
    )


@protocol("square", "PrivHFL, C.4.1, with one opening")
def square(net: Net, x: Shares, shift: int = 0) -> Shares:
    """(x >> shift)^2, the truncation as in `truncate` and at no further opening.

    Args:
        shift: 0..32; with a shift |x| < 2^62.

    Rounds 1, online 16 bytes per element; dealt 8, with a shift 24. Nobody learns anything.

    With x >> f = C - R + [w] 2^(64-f), where R = r >> f and w = msb(r) counts only where msb(c') = 0:
    (x >> f)^2 = C^2 - 2 C R + R^2 + [w] 2^(65-f) (C - R), the square of the last term being 0 mod 2^64 for f <= 32.
    """
    Q, A, S = net.Q, net.A, net.S
    x = open_masked(net, x)
    quotient = deal_quotient(net, x, shift)
    squared = deal(net, net.locally(Q, torch.square, quotient.value))
    C, no_wrap = public_quotient(net, x, shift)

    def half(C, R, RR):
        return RR - 2 * C * R

    if shift == 0:
        return Shares(
            net.locally(A, lambda C, R, RR: half(C, R, RR).add_(C * C), C, quotient.shares.A, squared.A),
            net.locally(S, half, C, quotient.shares.S, squared.S),
        )

    crossed = deal(net, net.locally(Q, lambda R, w: R.to(torch.int32) * w, quotient.value, quotient.wrap), torch.int32)

    def with_wrap(C, h, R, RR, w, wR):
        wrap = (wrap_term(w, shift) * C).sub_(wrap_term(wR, shift)).bitwise_left_shift_(1)
        return half(C, R, RR).add_(wrap.bitwise_and_(h))

    return Shares(
        net.locally(
            A, lambda C, h, *v: with_wrap(C, h, *v).add_(C * C),
            C, no_wrap, quotient.shares.A, squared.A, quotient.wraps.A, crossed.A,
        ),
        net.locally(S, with_wrap, C, no_wrap, quotient.shares.S, squared.S, quotient.wraps.S, crossed.S),
    )  # fmt: skip
