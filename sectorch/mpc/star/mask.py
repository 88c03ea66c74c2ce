"""The masked opening: A and S learn c = x + r for a mask r that is uniform to both of them and known to D.

r = r_A + r_S with r_A from k_DA and r_S from k_DS: the dealer knows both, at no cost. One opening serves comparison,
truncation, selection and multiplication of the same x: mask once, use often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...ring.bitplanes import planes_beside, words_for
from .shares import Shares


@dataclass(frozen=True)
class Masked:
    """c = x + r: `c` at A and S, `r` at D, and r's halves at A (and D) and at S (and D). All of one shape."""

    c: Located
    r: Located
    r_A: Located
    r_S: Located
    made_by: ClassVar[str] = "open_masked(net, x) makes it of Shares"

    @property
    def shape(self) -> torch.Size:
        return self.c.shape

    @property
    def mask(self) -> Shares:
        return Shares(self.r_A, self.r_S)


def open_masked(net: Net, x: Shares) -> Masked:
    """Open x + r to A and S, or use the opening that this call has made of the same shares already.

    Rounds 1 (both directions at once), bytes 16 per element. After a linear layer S's half does not depend on the
    query, and then the 8 bytes from S to A are sent ahead. A and S receive uniform bits.
    """
    masked = net.opened.get(x) if isinstance(x, Shares) else None
    if masked is None:
        masked = net.opened[x] = _open_masked(net, x)
    return masked


@protocol(
    "open_masked",
    "docs/protocols.md; PrivHFL, C.4.1 (Beaver)",
    [Message("c_A", "A", "S", "r_A of k_DA"), Message("c_S", "S", "A", "r_S of k_DS")],
)
def _open_masked(net: Net, x: Shares) -> Masked:
    """x + r becomes known to A and S for a mask r that only D knows."""
    D, A, S = net.D, net.A, net.S
    r_A = net.common(D, A, x.shape, "r_A")
    r_S = net.common(D, S, x.shape, "r_S")
    c_A = (x.A + r_A).send(A, S, "c_A")
    c_S = (x.S + r_S).send(S, A, "c_S")
    return Masked(c_A + c_S, r_A + r_S, r_A, r_S)


@leaf(shapes=lambda v: v.new_empty(64, words_for(v.numel())))
def planes_of(v: torch.Tensor) -> torch.Tensor:
    """The bit planes of a tensor: [64, W], W = ceil(N / 64)."""
    return planes_beside((v,))
