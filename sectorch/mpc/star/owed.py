"""Shares of which D owes a part, for what is opened under a mask next.

A product leaves a part of its result with D: a b of a linear layer, r s of two secret values. D deals it, 8 bytes an
element, or takes it into the mask, which only D knows as a whole:

    (x_A + r_A) + (x_S + r_S) = x + r,        x = x_A + x_S - owed,        r = r_A + r_S + owed.

All that a truncation takes is r, so that nothing is dealt there. x_A and x_S alone are no shares: from both D would
read what only A may know. Whoever asks for the halves has the part dealt first.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...choreography import Located, Net
from ...choreography.located import compute, innermost, running
from .deal import deal
from .shares import Shares, whole


class Debt:
    """A part that D has, and deals once if it is asked to.

    Args:
        of: the debt whose part this one was made of, and how shares of it follow from shares of that.
    """

    def __init__(self, net: Net, part: Located, of: tuple[Debt, Callable[[Shares], Shares]] | None = None):
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
        with net.lock, self._lock, running(net):
            yield net

    @property
    def dealt(self) -> Shares:
        """In shares."""
        with self.asked() as net:
            if self._dealt is None:
                self._dealt = deal(net, self.part) if self._of is None else self._of[1](self._of[0].dealt)
            return self._dealt


class Owed(Shares):
    """x = mine + theirs, less the part that D owes; `mine` at A, `theirs` at S."""

    def __init__(self, mine: Located, theirs: Located, debt: Debt):
        for name, value in (("mine", mine), ("theirs", theirs), ("debt", debt), ("_paid", None)):
            object.__setattr__(self, name, value)

    mine: Located
    theirs: Located
    debt: Debt
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
        return super().__mul__(public) if isinstance(public, Shares) else self.moved(operator.mul, whole(public))

    def __lshift__(self, bits: int) -> Shares:
        return self.moved(operator.lshift, bits)

    def __getitem__(self, index: Any) -> Shares:
        return self.moved(operator.getitem, index)

    def _with(self, f: Callable, other: Any) -> Owed:
        """A sum or a difference, with broadcasting; D owes what it owed of both."""
        net, part = self.debt.net, self.debt.part
        if isinstance(other, Owed):
            owed = Debt(net, f(part, other.debt.part))
            return Owed(f(self.mine, other.mine), f(self.theirs, other.theirs), owed)
        if isinstance(other, Shares):
            mine, theirs = f(self.mine, other.A), f(self.theirs, other.S)
        else:
            mine, theirs = f(self.mine, whole(other)), self.theirs
        if mine.shape == self.shape:
            return Owed(mine, theirs, self.debt)
        return Owed(mine, theirs.expand(mine.shape), Debt(net, part.expand(mine.shape)))

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """As of `Shares`; D too applies f to what it owes. Of what is as large as this one, D deals this one's part."""
        found = [compute(f, part, *public, **named) for part in (self.mine, self.theirs, self.debt.part)]
        several = type(found[0]) is tuple
        parts = list(zip(*found, strict=True)) if several else [tuple(found)]
        made = []
        for i, (mine, theirs, part) in enumerate(parts):
            follow = lambda x, i=i: x.moved(f, *public, **named)[i] if several else x.moved(f, *public, **named)
            less = part.shape.numel() < self.shape.numel()
            made.append(Owed(mine, theirs, Debt(self.debt.net, part, None if less else (self.debt, follow))))
        return made if several else made[0]


def owing(net: Net, mine: Located, theirs: Located, part: Located) -> Shares:
    """mine + theirs - part, of which D owes the part; it is dealt at once where D proves what it deals."""
    return Shares(mine, theirs) - deal(net, part) if net.verified else Owed(mine, theirs, Debt(net, part))
