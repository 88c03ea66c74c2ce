"""Secure querying: lines 8 to 13 of Algorithm 1 (PrivHFL, section 3.3), on the secure tensors.

One session has Q, the server and all answering parties. A query crosses it in three steps, timed apart as in Table 2:
sharing (Pi_Share, Figure 2), secure prediction (Figures 3 and 4, our exact ReLU), and aggregation (Pi_Agg, Figure 5).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...config import Scheme
from ...dp.noise import on_grid
from ...errors import FederationError, FixedPointRangeError
from ...federated.participants import Participant
from ...nn.inputs import Inputs
from ...nn.module import SecureModule, ranges, record_program, secure
from ...session import Session
from ...tensor import SharedTensor, share_tensor
from ...tensor.holders import aggregate, collect


@dataclass
class Steps:
    """Seconds of the three steps of Table 2, all parties' work in one process; and the rows that went at once."""

    share: float = 0.0
    predict: float = 0.0
    aggregate: float = 0.0
    chunk: int = 0

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """A block of one of the steps."""
        start = time.perf_counter()
        yield
        setattr(self, step, getattr(self, step) + time.perf_counter() - start)


@torch.no_grad()
def secure_query(
    queries: torch.Tensor, models: Sequence[nn.Module], *, frac_bits: int = 20, relu: str = "exact",
    normalise: bool = False, sigma: float = 0.0, chunk: int | None = None, tick: Callable[[], None] = lambda: None,
    session: Session | None = None, opened: bool = True,
) -> tuple[Any, Steps]:  # fmt: skip
    """The sum of the answering parties' logits, which Q learns, and no single party's.

    Args:
        queries: Q's [B, C, H, W]; finite and below 2^(62 - 2 frac_bits). On the meta device where Q is elsewhere.
        models: one of each answering party, in evaluation mode; on the meta device that of a party elsewhere.
        frac_bits: fraction bits of the shares.
        relu: "exact", or the paper's leaky "privhfl".
        normalise: sum the softmax of the logits instead, computed on shares (appendix B.3, Figure 13).
        sigma: of the discrete Gaussian noise that S adds to each sum; 0 is none. See `settings.curve`.
        chunk: queries that go at once; by memory unless named. Shares of a chunk are dropped before the next one
            starts; what stays is one masked model at a time, and shares of the logits.
        tick: called after each chunk of each answering party.
        session: of these parties; one of its own, with all of them in this process, unless given.
        opened: whether Q learns the sum. If not, Q and S hold it in shares; no noise is added.

    Returns:
        [B, classes] float64: the sum, with an error of the order of 2^-frac_bits for each layer and party, a shape only
        where Q is elsewhere; and the seconds of the steps.

    Rounds and bytes: those of `secure` for each chunk and party, and 2 rounds for the sum of a chunk (1 where it is not
    opened). A and S receive uniform bits. With a single answering party the sum is its own logits, and Q learns them.

    Raises:
        FederationError: no models. What `sectorch.secure` and `sectorch.share` raise on models and queries.
    """
    if not models:
        raise FederationError("a query needs at least one answering party, got none")
    session, steps, y = session or Session(answering=len(models)), Steps(), []
    for model, party in zip(models, session.answering, strict=True):  # 8
        secured = secure(model, Scheme(frac_bits, relu), session=session, party=party)
        # All parties cut the batch in the same places, so that their answers can be added up.
        steps.chunk = steps.chunk or chunk or secured.pieces(queries)[0].shapes[0][0]
        y.append([])
        for x in queries.split(steps.chunk):
            y[-1].append(predictions(secured, x, normalise, steps))  # 9-11
            tick()
        del secured
    with steps.timed("aggregate"):
        noise = functools.partial(on_grid, sigma) if sigma else None
        add = (lambda terms: aggregate(terms, noise).double()) if opened else collect
        return torch.cat([add(terms) for terms in zip(*y, strict=True)]), steps  # 13


def predictions(secured: SecureModule, x: torch.Tensor, normalise: bool, steps: Steps) -> SharedTensor:
    """Lines 9 to 11: one answering party's predictions of queries, [N, classes], in shares of it and the server."""
    with steps.timed("share"):
        shared = share_tensor(x.detach(), session=secured.session, party=secured.party, scheme=secured.scheme)  # 9
    with steps.timed("predict"):
        logits = secured(shared)  # 10
        answer = torch.softmax(logits, 1) if normalise else logits
    if not isinstance(answer, SharedTensor):
        raise FederationError(f"a model answers with a tensor of logits, got a {type(answer).__name__}")
    return answer  # 11


def check_range(name: str, model: nn.Module, owner: Participant, frac_bits: int) -> None:
    """An answering party looks, on its own images, whether its activations fit the number format.

    Raises:
        FixedPointRangeError: they reach half of the limit.
    """
    own = Inputs(owner.images[:64])
    program = record_program(model, own)
    if program is None:
        return
    largest, where = ranges(program, own)
    limit = Scheme(frac_bits).activation_limit
    if 2 * largest >= limit:
        raise FixedPointRangeError(
            f"{name}'s model reaches {largest:.4g} at {where}, too close to the limit {limit:.0f} of {frac_bits} "
            f"fraction bits; choose fewer fraction bits"
        )


@torch.no_grad()
def plain_query(
    queries: torch.Tensor, models: Sequence[nn.Module], normalise: bool = False, sigma: float = 0.0,
    frac_bits: int = 20,
) -> torch.Tensor:  # fmt: skip
    """What `secure_query` computes, in the clear and in float64: for tests and ablations. Protects nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for model in models:
        model = copy.deepcopy(model).double()
        logits = torch.cat([model(piece.double()) for piece in queries.split(512)])
        total = total + (logits.softmax(1) if normalise else logits)
    return total + on_grid(sigma, total.shape, frac_bits) / 2.0**frac_bits if sigma else total


def soft_labels(
    total: torch.Tensor, parties: int, normalise: bool, bits: int | None, temperature: float = 1.0
) -> torch.Tensor:
    """y <- softmax(y) at Q (Figure 5), or the mean of normalised answers; [B, classes] float64 that add up to one.

    A mean that noise has moved off the probability vectors becomes the nearest one.

    Args:
        bits: probabilities are rounded to multiples of 2^-bits; None leaves them. A secure and a plain run differ by
            some 2^-f, and training multiplies such a difference; rounding takes most of it away. 2^-bits must be at
            most 1 / classes, so that some class is left.
        temperature: that logits are divided by; the number of parties makes the sum a mean.
    """
    labels = _nearest(total / parties) if normalise else (total / temperature).softmax(1)
    if bits is None:
        return labels
    # At least one whole unit for the likeliest class, which otherwise could be rounded away among many.
    rounded = (labels.clamp_min(0) * 2**bits).round()
    return rounded / rounded.sum(1, keepdim=True)


def _nearest(points: torch.Tensor) -> torch.Tensor:
    """Each row's nearest probability vector: less one number, and what is then negative is zero (Duchi et al. 2008)."""
    falling = points.sort(1, descending=True).values
    counts = torch.arange(1, points.shape[1] + 1, dtype=points.dtype)
    above = (falling.cumsum(1) - 1) / counts
    last = (falling > above).sum(1, keepdim=True) - 1
    return (points - above.gather(1, last)).clamp_min(0)
