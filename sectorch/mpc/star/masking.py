"""Dealing correlated randomness, deferred corrections, and masked openings.

The dealer D knows every mask and receives nothing that a mask hides. D is Q unless the session names another party.

- `deal` turns a value of D into shares: A draws its half from k_DA, and D sends S the rest.
- `open_masked` shows A and S c = x + r for a mask r = r_A + r_S, with r_A from k_DA and r_S from k_DS: c is uniform to
  both, and D knows r at no cost. One opening serves comparison, truncation, selection and multiplication of the same x.
- `DeferredShares` are the result of a product. The dealer still holds one term of it, which is folded into the mask of
  the next opening at no cost, or dealt when a caller first reads a half.

Source: PrivHFL, 2.3 (shares from streams) and C.4.1 (Beaver).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute, innermost, run_in
from ...ring.bitplanes import planes_below, words_for
from .dealing_proofs import Claim, DealerShares, DealingProofs, note_claim
from .shares import Shares, check_whole_numbers

# Dealing


@dataclass(frozen=True)
class ComputedCorrection:
    """A value that D computes and masks by A's half in one kernel: less(*values, v_A), of the dtype of v_A.

    It stands in the place of v in v - v_A and v ^ v_A, so that v itself is never written to memory.
    """

    less: Callable
    shape: torch.Size | tuple[int, ...]
    values: tuple

    def __sub__(self, v_A: Located) -> Located:
        return compute(self.less, *self.values, v_A)

    __xor__ = __sub__


@protocol("deal", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_known(
    net: Net, v: Located | ComputedCorrection, dtype: torch.dtype = torch.int64, claim: Claim | None = None
) -> DealerShares:
    """Deal v = v_A + v_S, mod 2^64 (int64) or mod 2^32 (int32); D goes on to know both halves.

    Args:
        v: at D.
        dtype: int64 or int32, the ring of the halves.
        claim: notes what has to hold of v where D proves what it deals (`dealing_constraints.py`); None where there is
            no proof.

    Ahead of the query: 1 message of 8 (or 4) bytes per element from D to S, which is uniform to S. A receives nothing.

    Raises:
        UnsupportedOpError: D has to prove what it deals, and there is no claim.
    """
    v_A = net.common(net.D, net.A, v.shape, "v_A", dtype)
    dealt = DealerShares(v_A, (v - v_A).send(net.D, net.S, "v_S"))
    note_claim(net, claim, dealt)
    return dealt


def deal(
    net: Net, v: Located | ComputedCorrection, dtype: torch.dtype = torch.int64, claim: Claim | None = None
) -> Shares:
    """`deal_known`, for what D computes nothing with."""
    return deal_known(net, v, dtype, claim).shares


@protocol("deal_bits", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_bits(net: Net, v: Located | ComputedCorrection, claim: Claim | None = None) -> DealerShares:
    """`deal` for words of packed bits: v = v_A xor v_S. D sends S one bit per bit, which is uniform to S."""
    v_A = net.common(net.D, net.A, v.shape, "v_A")
    dealt = DealerShares(v_A, (v ^ v_A).send(net.D, net.S, "v_S"))
    note_claim(net, claim, dealt)
    return dealt


# Additive shares with a deferred correction
#
# After a product D still holds one term of the result: a b of a linear layer, r s of two secret values. D could deal
# it for 8 bytes an element. Or D adds it to the mask r of the next opening, which nobody else knows:
#
#     (x_A + r_A) + (x_S + r_S) = x + r,        x = x_A + x_S - term,        r = r_A + r_S + term.
#
# A truncation needs r alone, so nothing is dealt for it. x_A and x_S without the term are no shares of x: from both D
# would learn what only A may know. The term is therefore dealt before a caller gets a half.


class PendingCorrection:
    """The term that D holds of a product's result. D deals it when a caller first needs it in shares.

    Args:
        net: the net of the product.
        value: the term, at D.
        of: where the term follows from that of another correction: that correction, and the map on its shares. The
            other one is dealt then, which is no larger.
    """

    def __init__(
        self,
        net: Net,
        value: Located,
        of: tuple[PendingCorrection, Callable[[DealerShares], DealerShares]] | None = None,
    ):
        self.net, self.value, self._of = net, value, of
        self._dealt: DealerShares | None = None
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"PendingCorrection({tuple(self.value.shape)})"

    @contextmanager
    def dealing_net(self) -> Iterator[Net]:
        """Enter the net in which the term is dealt; of two threads that need it, one deals it.

        It is the net of the running call where that call has the parties and the session of the product, and else the
        net of the product.
        """
        net, asking = self.net, innermost()
        if isinstance(asking, Net) and asking is not asking.setup is net.setup and asking.cast == net.cast:
            net = asking
        with net.lock, self._lock, run_in(net):
            yield net

    @property
    def dealt(self) -> DealerShares:
        """The term in shares of A and S, as D knows them; dealt on first use, 8 bytes an element from D to S."""
        with self.dealing_net() as net:
            if self._dealt is None:
                self._dealt = deal_known(net, self.value) if self._of is None else self._of[1](self._of[0].dealt)
            return self._dealt

    @property
    def shares(self) -> Shares:
        """The term in shares of A and S."""
        return self.dealt.shares


class DeferredShares(Shares):
    """Additive shares with a deferred correction: x = half_A + half_S - correction.

    After a product the dealer still holds one term. It is folded into the mask of the next opening at no cost, or dealt
    (8 bytes per element) when a caller first reads `.A` or `.S`.

    Attributes:
        half_A: at A. half_S: at S. Together they are no shares of x, and nothing but an opening may use them.
    """

    def __init__(self, half_A: Located, half_S: Located, correction: PendingCorrection):
        for name, value in (("half_A", half_A), ("half_S", half_S), ("correction", correction), ("_complete", None)):
            object.__setattr__(self, name, value)

    half_A: Located
    half_S: Located
    correction: PendingCorrection
    _complete: Shares | None

    @property
    def complete(self) -> Shares:
        """Ordinary shares of x: the correction is dealt and subtracted."""
        with self.correction.dealing_net():
            complete = self._complete
            if complete is None:
                complete = Shares(self.half_A, self.half_S) - self.correction.shares
                object.__setattr__(self, "_complete", complete)
            return complete

    @property
    def A(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  computed on first use
        return self.complete.A

    @property
    def S(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  computed on first use
        return self.complete.S

    @property
    def shape(self) -> torch.Size:
        return self.half_A.shape

    def __repr__(self) -> str:
        return f"DeferredShares({tuple(self.shape)})"

    def __add__(self, other: Any) -> Shares:
        return self._combine(operator.add, other)

    def __sub__(self, other: Any) -> Shares:
        return self._combine(operator.sub, other)

    def __rsub__(self, other: Any) -> Shares:
        return -self + other

    __radd__ = __add__

    def __neg__(self) -> Shares:
        return self.moved(operator.neg)

    def __mul__(self, public: Any) -> Shares:
        if isinstance(public, Shares):
            return super().__mul__(public)
        return self.moved(operator.mul, check_whole_numbers(public))

    def __lshift__(self, bits: int) -> Shares:
        return self.moved(operator.lshift, bits)

    def __getitem__(self, index: Any) -> Shares:
        return self.moved(operator.getitem, index)

    def _combine(self, f: Callable, other: Any) -> DeferredShares:
        """Add or subtract, with broadcasting; the corrections of both operands are combined as well."""
        net, value = self.correction.net, self.correction.value
        if isinstance(other, DeferredShares):
            correction = PendingCorrection(net, f(value, other.correction.value))
            return DeferredShares(f(self.half_A, other.half_A), f(self.half_S, other.half_S), correction)
        if isinstance(other, Shares):
            half_A, half_S = f(self.half_A, other.A), f(self.half_S, other.S)
        else:
            half_A, half_S = f(self.half_A, check_whole_numbers(other)), self.half_S
        if half_A.shape == self.shape:
            return DeferredShares(half_A, half_S, self.correction)
        return DeferredShares(half_A, half_S.expand(half_A.shape), PendingCorrection(net, value.expand(half_A.shape)))

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """Apply f as `Shares.moved` does, at D also to the correction.

        Where a result is at least as large as this tensor, this tensor's correction is what is dealt, and f is applied
        to its shares. So the results that derive from one product have it dealt once.
        """
        correction = self.correction
        found = [compute(f, value, *public, **named) for value in (self.half_A, self.half_S, correction.value)]
        several = type(found[0]) is tuple
        results = []
        for i, (half_A, half_S, value) in enumerate(zip(*found, strict=True) if several else [tuple(found)]):
            follow = lambda x, i=i: x.moved(f, *public, **named)[i] if several else x.moved(f, *public, **named)
            of = None if value.shape.numel() < self.shape.numel() else (correction, follow)
            results.append(DeferredShares(half_A, half_S, PendingCorrection(correction.net, value, of)))
        return results if several else results[0]


def defer_correction(net: Net, half_A: Located, half_S: Located, value: Located) -> Shares:
    """Shares of half_A + half_S - value, for a value at D.

    The correction is deferred; it is dealt at once where D proves what it deals, since a mask with an unproved term
    would be an unproved mask.
    """
    if net.state(DealingProofs).required:
        return Shares(half_A, half_S) - deal(net, value)
    return DeferredShares(half_A, half_S, PendingCorrection(net, value))


# Masked openings


@dataclass(frozen=True, eq=False, repr=False)
class Masked:
    """A value x that is open under a mask: c = x + r. All tensors have one shape.

    Attributes:
        c: public to A and S. r: at D. r_A: its half at A and D. r_S: its half at S and D.
    """

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

    @property
    def at_dealer(self) -> DealerShares:
        """The halves of r, which D knows too."""
        return DealerShares(self.r_A, self.r_S)

    def __repr__(self) -> str:
        return f"Masked({tuple(self.shape)})"


class MaskedDeferred(Masked):
    """An opening whose mask r contains the deferred correction of x; it is dealt when a half of r is first read."""

    def __init__(self, c: Located, r: Located, half_A: Located, half_S: Located, correction: PendingCorrection):
        for name, value in (("c", c), ("r", r), ("half_A", half_A), ("half_S", half_S), ("correction", correction)):
            object.__setattr__(self, name, value)

    half_A: Located
    half_S: Located
    correction: PendingCorrection

    @property
    def r_A(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  computed on first use
        with self.correction.dealing_net():
            return self.half_A + self.correction.shares.A

    @property
    def r_S(self) -> Located:  # pyright: ignore[reportIncompatibleVariableOverride]  computed on first use
        with self.correction.dealing_net():
            return self.half_S + self.correction.shares.S

    @property
    def at_dealer(self) -> DealerShares:
        with self.correction.dealing_net():
            dealt = self.correction.dealt
            return DealerShares(self.half_A + dealt.A, self.half_S + dealt.S)


class DealersMask(Masked):
    """An opening under a mask r of D's of which A and S have no halves: for truncations, which need none."""

    def __init__(self, c: Located, r: Located):
        object.__setattr__(self, "c", c)
        object.__setattr__(self, "r", r)


class Openings(WeakKeyDictionary[Shares, Masked]):
    """The openings that a call has made, by their shares, so that shares are masked once."""


def open_masked(net: Net, x: Shares) -> Masked:
    """Open x + r to A and S, or return the opening that this call has made of the same shares before.

    Rounds 1 (both directions at once), bytes 16 per element. After a linear layer S's half does not depend on the
    query, and then the 8 bytes from S to A are sent ahead. A and S receive uniform bits, D nothing.
    """
    opened = net.state(Openings)
    masked = opened.get(x) if isinstance(x, Shares) else None
    if masked is None:
        masked = opened[x] = _open_masked(net, x)
    return masked


@protocol(
    "open_masked",
    "docs/protocols.md; PrivHFL, C.4.1 (Beaver)",
    [Message("c_A", "A", "S", "r_A of k_DA"), Message("c_S", "S", "A", "r_S of k_DS")],
)
def _open_masked(net: Net, x: Shares) -> Masked:
    """Open x + r to A and S, for a fresh mask r that only D knows."""
    D, A, S = net.D, net.A, net.S
    r_A = net.common(D, A, x.shape, "r_A")
    r_S = net.common(D, S, x.shape, "r_S")
    half_A, half_S = (x.half_A, x.half_S) if isinstance(x, DeferredShares) else (x.A, x.S)
    c_A = (half_A + r_A).send(A, S, "c_A")
    c_S = (half_S + r_S).send(S, A, "c_S")
    if isinstance(x, DeferredShares):
        return MaskedDeferred(c_A + c_S, dealer_mask(r_A, r_S, x.correction.value), r_A, r_S, x.correction)
    return Masked(c_A + c_S, dealer_mask(r_A, r_S), r_A, r_S)


@leaf(shapes=lambda r_A, *_: torch.empty_like(r_A))
def dealer_mask(r_A: torch.Tensor, r_S: torch.Tensor, correction: torch.Tensor | None = None) -> torch.Tensor:
    """At D: the mask of an opening, with the deferred correction of the opened value in it."""
    r = r_A + r_S
    return r if correction is None else r.add_(correction)


@leaf(shapes=lambda v, thresholds=(0,): v.new_empty(64, len(thresholds) * words_for(v.numel())))
def planes_of(v: torch.Tensor, thresholds: tuple[int, ...] = (0,)) -> torch.Tensor:
    """The bit planes of v - t for each threshold t, side by side: [64, T W], W = ceil(N / 64)."""
    return planes_below(v, thresholds)
