"""A shuffle of the rows of a shared tensor by an order that nobody knows.

The order is composed of three, each of which two of the parties know: rho of A and S, pi of A and D, sigma of S and D.
So each party lacks one, and to it the whole order is as uniform as the one that it lacks. With masks a of D and S, b
and c of D and A,

    S sends A   m = rho(x_S) - a,                  and A makes of it  y = pi(rho(x_A) + m) + c
    A sends S   y,                                 and D deals S      e = sigma(pi(a) - c) - b
    A keeps     b,                                 and S has          sigma(y) + e,

whose sum is sigma(pi(rho(x))). A is sent m under a, which it lacks. S is sent y under c and e under b, which it lacks:
both are uniform together, whatever x and the orders are. D receives nothing.

Three orders of pairs: Araki, Furukawa, Ohara, Pinkas, Rosemarin, Tsuchida, "Secure graph analysis at scale", CCS 2021.
A dealt correlation in place of each resharing, and orders of two parties composed: Chase, Ghosh, Poburinnaya,
"Secret-shared shuffle", ASIACRYPT 2020.
"""

from __future__ import annotations

import torch

from ...choreography import Message, Net, leaf, protocol
from .dealing_proofs import refuse_unproved
from .shares import Shares


@protocol(
    "shuffle",
    "Araki et al., CCS 2021, with dealt correlations (Chase et al., ASIACRYPT 2020)",
    [
        Message("m", "S", "A", "a of k_DS"),
        Message("y", "A", "S", "c of k_DA"),
        Message("e", "D", "S", "b of k_DA"),
    ],
)
def shuffle(net: Net, x: Shares) -> Shares:
    """The rows of x [n, ...] in a uniform order that nobody knows, with fresh halves.

    Rounds 2, online 16 bytes per element; dealt 8 per element. Exact. Nobody learns anything. An order is that of n
    words of 64 bits, which is uniform but for n^2 / 2^65 (equal words).
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
    """The rows of x in the order of their keys."""
    return x[torch.argsort(keys, stable=True)]
