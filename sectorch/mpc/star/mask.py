"""The masked opening: A and S learn c = x + r for a mask r that is uniform to both of them and known to D.

r = r_A + r_S with r_A from k_DA and r_S from k_DS: the dealer knows both, at no cost. One opening serves comparison,
truncation, selection and multiplication of the same x: mask once, use often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...ring.bitplanes import planes_below, words_for
from .owed import Debt, Owed
from .shares import Shares


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return f"Masked({tuple(self.shape)})"


class MaskedOwed(Masked):
    """c = x + r where D took what it owed of x into r; it is dealt when somebody asks for halves of r."""

    def __init__(self, c: Located, r: Located, r_A: Located, r_S: Located, debt: Debt):
        for name, value in (("c", c), ("r", r), ("mine", r_A), ("theirs", r_S), ("debt", debt)):
            object.__setattr__(self, name, value)

    mine: Located
    theirs: Located
    debt: Debt

    @property
    def r_A(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  made when it is asked for
        with self.debt.asked():
            return self.mine + self.debt.dealt.A

    @property
    def r_S(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  made when it is asked for
        with self.debt.asked():
            return self.theirs + self.debt.dealt.S


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
    mine, theirs = (x.mine, x.theirs) if isinstance(x, Owed) else (x.A, x.S)
    c_A = (mine + r_A).send(A, S, "c_A")
    c_S = (theirs + r_S).send(S, A, "c_S")
    if isinstance(x, Owed):
        return MaskedOwed(c_A + c_S, whole_mask(r_A, r_S, x.debt.part), r_A, r_S, x.debt)
    return Masked(c_A + c_S, whole_mask(r_A, r_S), r_A, r_S)


@leaf(shapes=lambda r_A, *_: torch.empty_like(r_A))
def whole_mask(r_A: torch.Tensor, r_S: torch.Tensor, owed: torch.Tensor | None = None) -> torch.Tensor:
    """At D: the mask of an opening, with what D owes of the opened value in it."""
    r = r_A + r_S
    return r if owed is None else r.add_(owed)


@leaf(shapes=lambda v, thresholds=(0,): v.new_empty(64, len(thresholds) * words_for(v.numel())))
def planes_of(v: torch.Tensor, thresholds: tuple[int, ...] = (0,)) -> torch.Tensor:
    """The bit planes of v - t for each threshold t, side by side: [64, T W], W = ceil(N / 64)."""
    return planes_below(v, thresholds)
