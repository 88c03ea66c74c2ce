"""Shuffle: the rows of a shared tensor in a uniform order that no party knows.

The order is composed of three, each known to two of the parties: rho to A and S, pi to A and D, sigma to S and D. So
each party lacks one of them, and to that party the composed order is uniform. With masks a of D and S, and b and c of D
and A,

    S sends A   m = rho(x_S) - a,                  and A makes of it  y = pi(rho(x_A) + m) + c
    A sends S   y,                                 and D deals S      e = sigma(pi(a) - c) - b
    A keeps     b,                                 and S has          sigma(y) + e,

whose sum is sigma(pi(rho(x))). A lacks a, so m is uniform to it. S lacks b and c, so y and e are jointly uniform to it,
whatever x and the orders are. D receives nothing.

Sources: three orders, one for each pair of parties: Araki, Furukawa, Ohara, Pinkas, Rosemarin, Tsuchida, "Secure graph
analysis at scale", CCS 2021. A dealt correlation in place of each resharing, and orders of two parties composed: Chase,
Ghosh, Poburinnaya, "Secret-shared shuffle", ASIACRYPT 2020.
"""

from __future__ import annotations

import torch

from ...choreography import Message, Net, leaf, protocol
from .dealing_proofs import refuse_unproved
from .shares import Shares


@protocol(
    "shuffle",
    "Araki et al., CCS 2021, with dealt correlations (Chase et al., ASIACRYPT 2020)",
    [Message("m", "S", "A", "a of k_DS"), Message("y", "A", "S", "c of k_DA"), Message("e", "D", "S", "b of k_DA")],
)
def shuffle(net: Net, x: Shares) -> Shares:
    """Shuffle the rows of x [n, ...]; the result has fresh halves. Exact.

    An order is that of n uniform words of 64 bits: uniform up to a distance of n^2 / 2^65, where two words are equal.

    Rounds 2, online 16 bytes per element; dealt 8 per element. Nobody learns anything.

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for the correlation.
    """
    refuse_unproved(net)
    D, A, S = net.D, net.A, net.S
    rho = net.common(A, S, x.shape[:1], "rho")
    pi, sigma = net.common(D, A, x.shape[:1], "pi"), net.common(D, S, x.shape[:1], "sigma")
    a = net.common(D, S, x.shape, "a")
    b, c = net.common(D, A, x.shape, "b"), net.common(D, A, x.shape, "c")
    e = (in_order(in_order(a, pi) - c, sigma) - b).send(D, S, "e")
    m = (in_order(x.S, rho) - a).send(S, A, "m")
    y = (in_order(in_order(x.A, rho) + m, pi) + c).send(A, S, "y")
    return Shares(b, in_order(y, sigma) + e)


@leaf
def in_order(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sort the rows of x by their keys."""
    return x[torch.argsort(keys, stable=True)]
