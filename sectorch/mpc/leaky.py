"""HAZARDOUS: the paper's own DReLU, which shows Q the sign and the rough size of every activation.

PrivHFL, Figure 4, masks x by a random positive factor r that A and S share, and opens z = r x to Q. The paper's proof
of Theorem 3 says that z is uniform. It is not: r must be small enough that r x does not wrap around, or the sign would
be lost. So z has the sign of x, is zero exactly where x is, and its size follows |x|. Q, who knows its own query,
learns about the model's hidden layers from every answer.

This file stands alone because it leaks. It exists to compare with the paper's figures; `relu="exact"` leaks nothing and
sends fewer bytes. See docs/paper-mode.md, and tests/test_leaks.py for the attack.
"""

from __future__ import annotations

import torch

from ..choreography import Message, Net, protocol
from .star.multiply import multiply
from .star.shares import Shares, concatenate, each
from .star.truncate import truncate

R_BITS = 12
"""The factor is uniform in 1 .. 2^12 at most, and less where |x| < 2^52 or more: r x stays below 2^63."""


@protocol("leaky_drelu", "PrivHFL, Figure 4", [
    Message("z_A", "A", "S", "delta of k_QA"),
    Message("z", "S", "Q", "a positive factor r < 2^12 of k_SA",
            "the sign, the zeros and, over several queries, the value of every activation"),
    Message("y_S", "Q", "S", "delta' of k_QA"),
])  # fmt: skip
def leaky_drelu(net: Net, x: Shares, bits: int = 63 - R_BITS) -> Shares:
    """Compute [x >= 0] as shares of 0 and 1 by opening r x to Q. LEAKS to Q.

    Args:
        x: shares, |x| < 2^bits.
        bits: below 63; the factor is at most 2^(63 - bits).

    Rounds 3, bytes 24 per element. Q learns the sign and the zeros of x, and over several queries its values.
    """
    Q, A, S = net.Q, net.A, net.S
    r = (net.common(S, A, x.shape, "r") & ((1 << min(R_BITS, 63 - bits)) - 1)) + 1
    delta = net.common(Q, A, x.shape, "delta")
    z_A = (r * x.A - delta).send(A, S, "z_A")
    z = (r * x.S + z_A).send(S, Q, "z")
    sign = (z + delta >= 0).to(torch.int64)
    y_A = net.common(Q, A, x.shape, "delta_prime")
    return Shares(y_A, (sign - y_A).send(Q, S, "y_S"))


@protocol("leaky_relu_privhfl", "PrivHFL, Figure 4 and 3.3 (ii)")
def leaky_relu_privhfl(net: Net, x: Shares, shift: int = 0, bits: int = 63 - R_BITS) -> Shares:
    """Compute ReLU(x) / 2^shift in the paper's way, for |x| < 2^bits: x times `leaky_drelu`. LEAKS to Q."""
    y = multiply(net, torch.mul, x, leaky_drelu(net, x, bits))
    return truncate(net, y, shift) if shift else y


@protocol("leaky_maxpool_privhfl", "PrivHFL, 3.3 (iii)")
def leaky_maxpool_privhfl(net: Net, x: Shares, bits: int = 63 - R_BITS) -> Shares:
    """Compute the maximum along the first dimension by a tree of max(x, y) = ReLU(x - y) + y. Exact. LEAKS to Q.

    Args:
        x: [m, ...]; differences of values are below 2^bits.

    ceil(log2 m) levels of `leaky_relu_privhfl` without a truncation, m - 1 of them per result. Q learns of each pair
    that is compared which is larger, whether they are equal, and over several queries how far they are apart.
    """
    while (count := x.shape[0]) > 1:
        one, other = x[: count // 2], x[count // 2 : 2 * (count // 2)]
        top = other + leaky_relu_privhfl(net, one - other, 0, bits)
        x = each(concatenate, top, x[2 * (count // 2) :]) if count % 2 else top
    return x[0]
