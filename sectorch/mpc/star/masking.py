"""The masked opening: A and S learn c = x + r for a mask r that is uniform to both of them and known to D.

r = r_A + r_S with r_A from k_DA and r_S from k_DS: the dealer knows both, at no cost. One opening serves comparison,
truncation, selection and multiplication of the same x: mask once, use often.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute, innermost, run_in
from ...ring.bitplanes import planes_below, words_for
from .dealing_proofs import Claim, DealerShares, note_claim
from .shares import Shares, check_whole_numbers

# Dealing: D knows a value v that A and S must hold in shares. A's half comes from k_DA, S is sent the correction.
#
# D, the dealer, knows all masks and sees nothing that is under them. It is Q unless the session names another party.


@dataclass(frozen=True)
class ComputedCorrection:
    """A value that D computes and puts under A's half in one kernel: less(*values, v_A), of the type of v_A."""

    less: Callable
    shape: torch.Size | tuple[int, ...]
    values: tuple

    def __sub__(self, v_A: Located) -> Located:
        return compute(self.less, *self.values, v_A)

    __xor__ = __sub__


@protocol("deal", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_halves(
    net: Net, v: Located | ComputedCorrection, dtype: torch.dtype = torch.int64, claim: Claim | None = None
) -> DealerShares:
    """v = v_A + v_S, mod 2^64 (int64) or mod 2^32 (int32).

    Args:
        claim: what has to hold of it (`proved.py`), for where D is not trusted; None where there is no proof.

    Ahead of the query; one message of 8 (or 4) bytes per element from D to S, which is uniform to S.
    """
    v_A = net.common(net.D, net.A, v.shape, "v_A", dtype)
    dealt = DealerShares(v_A, (v - v_A).send(net.D, net.S, "v_S"))
    note_claim(net, claim, dealt)
    return dealt


def deal(
    net: Net, v: Located | ComputedCorrection, dtype: torch.dtype = torch.int64, claim: Claim | None = None
) -> Shares:
    """`deal_halves` as A and S have them."""
    return deal_halves(net, v, dtype, claim).shares


@protocol("deal_bits", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_bit_halves(net: Net, v: Located | ComputedCorrection, claim: Claim | None = None) -> DealerShares:
    """v = v_A xor v_S for words of packed bits; one bit per bit from D to S."""
    v_A = net.common(net.D, net.A, v.shape, "v_A")
    dealt = DealerShares(v_A, (v ^ v_A).send(net.D, net.S, "v_S"))
    note_claim(net, claim, dealt)
    return dealt


def deal_bits(net: Net, v: Located | ComputedCorrection, claim: Claim | None = None) -> Shares:
    """`deal_bit_halves` as A and S have them."""
    return deal_bit_halves(net, v, claim).shares


# Shares of which D owes a part, for what is opened under a mask next.
#
# A product leaves a part of its result with D: a b of a linear layer, r s of two secret values. D deals it, 8 bytes an
# element, or takes it into the mask, which only D knows as a whole:
#
#     (x_A + r_A) + (x_S + r_S) = x + r,        x = x_A + x_S - owed,        r = r_A + r_S + owed.
#
# All that a truncation takes is r, so that nothing is dealt there. x_A and x_S alone are no shares: from both D would
# read what only A may know. Whoever asks for the halves has the part dealt first.


class PendingCorrection:
    """A part that D has, and deals once if it is asked to.

    Args:
        of: the debt whose part this one was made of, and how shares of it follow from shares of that.
    """

    def __init__(self, net: Net, part: Located, of: tuple[PendingCorrection, Callable[[Shares], Shares]] | None = None):
        self.net, self.part, self._of = net, part, of
        self._dealt: Shares | None = None
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Debt({tuple(self.part.shape)})"

    @contextmanager
    def asked(self) -> Iterator[Net]:
        """The net in which halves are made: of two threads that ask for them one makes them. It is that of the call
        that asks; where another protocol runs, or none, that of the product."""
        net, asking = self.net, innermost()
        if isinstance(asking, Net) and asking is not asking.setup is net.setup and asking.cast == net.cast:
            net = asking
        with net.lock, self._lock, run_in(net):
            yield net

    @property
    def dealt(self) -> Shares:
        """In shares."""
        with self.asked() as net:
            if self._dealt is None:
                self._dealt = deal(net, self.part) if self._of is None else self._of[1](self._of[0].dealt)
            return self._dealt


class DeferredShares(Shares):
    """x = mine + theirs, less the part that D owes; `mine` at A, `theirs` at S."""

    def __init__(self, mine: Located, theirs: Located, debt: PendingCorrection):
        for name, value in (("mine", mine), ("theirs", theirs), ("debt", debt), ("_paid", None)):
            object.__setattr__(self, name, value)

    mine: Located
    theirs: Located
    debt: PendingCorrection
    _paid: Shares | None

    @property
    def paid(self) -> Shares:
        """The same with D's part dealt."""
        with self.debt.asked():
            paid = self._paid
            if paid is None:
                paid = Shares(self.mine, self.theirs) - self.debt.dealt
                object.__setattr__(self, "_paid", paid)
            return paid

    @property
    def A(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  made when it is asked for
        return self.paid.A

    @property
    def S(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  made when it is asked for
        return self.paid.S

    @property
    def shape(self) -> torch.Size:
        return self.mine.shape

    def __repr__(self) -> str:
        return f"Owed({tuple(self.shape)})"

    def __add__(self, other: Any) -> Shares:
        return self._with(operator.add, other)

    def __sub__(self, other: Any) -> Shares:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> Shares:
        return -self + other

    __radd__ = __add__

    def __neg__(self) -> Shares:
        return self.moved(operator.neg)

    def __mul__(self, public: Any) -> Shares:
        return (
            super().__mul__(public)
            if isinstance(public, Shares)
            else self.moved(operator.mul, check_whole_numbers(public))
        )

    def __lshift__(self, bits: int) -> Shares:
        return self.moved(operator.lshift, bits)

    def __getitem__(self, index: Any) -> Shares:
        return self.moved(operator.getitem, index)

    def _with(self, f: Callable, other: Any) -> DeferredShares:
        """A sum or a difference, with broadcasting; D owes what it owed of both."""
        net, part = self.debt.net, self.debt.part
        if isinstance(other, DeferredShares):
            owed = PendingCorrection(net, f(part, other.debt.part))
            return DeferredShares(f(self.mine, other.mine), f(self.theirs, other.theirs), owed)
        if isinstance(other, Shares):
            mine, theirs = f(self.mine, other.A), f(self.theirs, other.S)
        else:
            mine, theirs = f(self.mine, check_whole_numbers(other)), self.theirs
        if mine.shape == self.shape:
            return DeferredShares(mine, theirs, self.debt)
        return DeferredShares(mine, theirs.expand(mine.shape), PendingCorrection(net, part.expand(mine.shape)))

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """As of `Shares`; D too applies f to what it owes. Of what is as large as this one, D deals this one's part."""
        found = [compute(f, part, *public, **named) for part in (self.mine, self.theirs, self.debt.part)]
        several = type(found[0]) is tuple
        parts = list(zip(*found, strict=True)) if several else [tuple(found)]
        made = []
        for i, (mine, theirs, part) in enumerate(parts):
            follow = lambda x, i=i: x.moved(f, *public, **named)[i] if several else x.moved(f, *public, **named)
            less = part.shape.numel() < self.shape.numel()
            made.append(
                DeferredShares(
                    mine, theirs, PendingCorrection(self.debt.net, part, None if less else (self.debt, follow))
                )
            )
        return made if several else made[0]


def defer_correction(net: Net, mine: Located, theirs: Located, part: Located) -> Shares:
    """mine + theirs - part, of which D owes the part; it is dealt at once where D proves what it deals."""
    return (
        Shares(mine, theirs) - deal(net, part)
        if net.verified
        else DeferredShares(mine, theirs, PendingCorrection(net, part))
    )


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


class MaskedDeferred(Masked):
    """c = x + r where D took what it owed of x into r; it is dealt when somebody asks for halves of r."""

    def __init__(self, c: Located, r: Located, r_A: Located, r_S: Located, debt: PendingCorrection):
        for name, value in (("c", c), ("r", r), ("mine", r_A), ("theirs", r_S), ("debt", debt)):
            object.__setattr__(self, name, value)

    mine: Located
    theirs: Located
    debt: PendingCorrection

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
    mine, theirs = (x.mine, x.theirs) if isinstance(x, DeferredShares) else (x.A, x.S)
    c_A = (mine + r_A).send(A, S, "c_A")
    c_S = (theirs + r_S).send(S, A, "c_S")
    if isinstance(x, DeferredShares):
        return MaskedDeferred(c_A + c_S, whole_mask(r_A, r_S, x.debt.part), r_A, r_S, x.debt)
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
