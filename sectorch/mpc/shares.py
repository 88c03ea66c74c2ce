"""Additive shares x = x_A + x_S mod 2^64, and what can be done on them without a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..choreography import Located, Net


@dataclass(frozen=True, eq=False)
class Shares:
    """One ring tensor (int64, any shape), half at the answering party, half at the server. Equal to itself only.

    Attributes:
        Q: where these are Q's own whole numbers, shared by Q and only moved since, the numbers as Q has them: Q can
            then be asked whether they may be looked up. None of everything else.
    """

    A: Located
    S: Located
    Q: Located | None = None

    @property
    def shape(self) -> torch.Size:
        return self.A.shape


def each(net: Net, f: Callable, *shares: Shares) -> Shares:
    """A and S each apply f to their halves: a local map. It commutes with sharing if f is additive."""
    return Shares(
        net.locally(net.A, f, *(x.A for x in shares)),
        net.locally(net.S, f, *(x.S for x in shares)),
    )


def add(net: Net, x: Shares, y: Shares) -> Shares:
    """x + y, with broadcasting. No message."""
    return each(net, torch.add, x, y)


def sub(net: Net, x: Shares, y: Shares) -> Shares:
    """x - y, with broadcasting. No message."""
    return each(net, torch.sub, x, y)


def add_at_A(net: Net, x: Shares, value) -> Shares:
    """x + value, where value (public, or held by A) is added to A's half only. No message."""
    y = net.locally(net.A, torch.add, x.A, value)
    return Shares(y, x.S if y.shape == x.shape else net.locally(net.S, torch.Tensor.expand, x.S, y.shape))


def whole(net: Net, f: Callable, *values: Located) -> Shares:
    """In the reference: f of values that A holds whole, as A's half; S's half is zero, and has a shape only."""
    return unshared(net, net.locally(net.A, f, *(net.given(v, net.A) for v in values)))


def unshared(net: Net, value: Located) -> Shares:
    """In the reference: a whole value as shares, of which S's half is zero and has a shape only."""
    zero = net.own(net.S, torch.empty(value.shape, dtype=torch.int64, device="meta"))
    return Shares(net.given(value, net.A), zero)
