"""Pi_Share (PrivHFL, Figure 2): Q's input becomes shares of A and S; and the way back, to Q alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...backend import Noise
from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.declaration import PAYLOADS
from ...choreography.located import shaped
from ...errors import DtypeError
from .shares import Shares


def _of_ring_elements(f: Callable) -> Callable:
    """Refuse fractions and booleans, before anything is drawn."""

    @functools.wraps(f)
    def run(net: Net, x: Located) -> Shares:
        if x.dtype not in PAYLOADS:
            raise DtypeError(
                f"share takes ring elements (int64), got {x.dtype}: sectorch.ring.encode(x, bits) makes them of "
                f"fractions, x.long() of booleans"
            )
        return f(net, x)

    return run


@protocol("share", "PrivHFL, Figure 2", [Message("x_S", "Q", "S", "x_A of k_QA")])
@_of_ring_elements
def share(net: Net, x: Located) -> Shares:
    """Q secret-shares x: A draws its half from k_QA, S is sent the rest.

    Args:
        x: int64 at Q, any shape.

    Rounds 1, bytes 8 per element (Q to S). A learns nothing, S receives uniform bits.

    Raises:
        DtypeError: of fractions or booleans, which are no ring elements.
    """
    Q, A, S = net.Q, net.A, net.S
    x_A = net.common(Q, A, x.shape, "x_A")
    return Shares(x_A, (x - x_A).send(Q, S, "x_S"))


@protocol(
    "reveal",
    "PrivHFL, Figure 5, n = 1",
    [
        Message("masked_A", "A", "S", "r of k_QA", opens="Q"),
        Message("result", "S", "Q", "r of k_QA", "the result, which is Q's to learn"),
    ],
)
def reveal(net: Net, x: Shares) -> Located:
    """x becomes known to Q and to nobody else.

    Rounds 2, bytes 16 per element. S receives A's half under a mask that only Q and A know.
    """
    return _revealed(net, [(net, x)])


@protocol("reveal_to_A", "docs/training.md", [Message("x_S", "S", "A", "x_A", "the result, which is A's to learn")])
def reveal_to_A(net: Net, x: Shares) -> Located:
    """x becomes known to A and to nobody else. Rounds 1, bytes 8 per element."""
    return x.A + x.S.send(net.S, net.A, "x_S")


@protocol("reveal_to_S", "docs/training.md", [Message("x_A", "A", "S", "x_S", "the result, which is S's to learn")])
def reveal_to_S(net: Net, x: Shares) -> Located:
    """x becomes known to S and to nobody else. Rounds 1, bytes 8 per element."""
    return x.S + x.A.send(net.A, net.S, "x_A")


@protocol(
    "aggregate",
    "PrivHFL, Figure 5",
    [
        Message("masked_A", "A", "S", "r_j of k_QA", opens="Q"),
        Message("sum", "S", "Q", "the sum of the r_j", "the sum over the answering parties, which is Q's to learn"),
    ],
)
def aggregate(net: Net, terms: list[tuple[Net, Shares]]) -> Located:
    """Pi_Agg: Q learns the sum of the answering parties' tensors and nothing about a single one.

    Args:
        net: the net of any of the parties; it carries the sum from S to Q.
        terms: for each answering party its net and its shares, all of one shape.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum.
    """
    return _revealed(net, terms, "sum")


@protocol(
    "aggregate_noisy",
    "PrivHFL, Figure 5, with noise at S",
    [
        Message("masked_A", "A", "S", "r_j of k_QA", opens="Q"),
        Message("noisy_sum", "S", "Q", "the sum of the r_j", "the sum over the answering parties and S's noise"),
    ],
)
def aggregate_noisy(net: Net, terms: list[tuple[Net, Shares]], noise: Located) -> Located:
    """Pi_Agg, but S adds noise of its own to the sum before it goes to Q, who learns their sum and neither of the two.

    Args:
        net, terms: as of `aggregate`.
        noise: int64 at S, of the terms' shape.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum. S knows the noise.
    """
    return _revealed(net, terms, "noisy_sum", noise)


def at_server(noise: Noise, shape: torch.Size) -> Callable[[], torch.Tensor]:
    """What S computes to draw its noise; a dry run draws none."""
    return shaped(lambda: torch.empty(shape, dtype=torch.int64, device="meta"))(lambda: noise(shape))


def _revealed(net: Net, terms: list[tuple[Net, Shares]], label: str = "result", *at_S: Located) -> Located:
    """A_j to S: x_A - r_j; S to Q: the sum of both halves, and of what S adds; Q adds the r_j."""
    Q, S = net.Q, net.S
    masks, halves = [], list(at_S)
    for net_j, x in terms:
        with net_j.within(net):
            r = net_j.common(Q, net_j.A, x.shape, "r")
            halves += [(x.A - r).send(net_j.A, S, "masked_A"), x.S]
        masks.append(r)
    return _sum(_sum(*halves).send(S, Q, label), *masks)


@leaf
def _sum(*values: torch.Tensor) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
