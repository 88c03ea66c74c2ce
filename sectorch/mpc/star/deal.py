"""Dealing: D knows a value v that A and S must hold in shares. A's half comes from k_DA, S is sent the correction.

D, the dealer, knows all masks and sees nothing that is under them. It is Q unless the session names another party.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...choreography import Located, Message, Net, protocol
from ...choreography.located import compute
from .claims import Claim, noted
from .halves import Halves
from .shares import Shares


@dataclass(frozen=True)
class Made:
    """A value that D computes and puts under A's half in one kernel: less(*values, v_A), of the type of v_A."""

    less: Callable
    shape: torch.Size | tuple[int, ...]
    values: tuple

    def __sub__(self, v_A: Located) -> Located:
        return compute(self.less, *self.values, v_A)

    __xor__ = __sub__


@protocol("deal", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_halves(net: Net, v: Located | Made, dtype: torch.dtype = torch.int64, claim: Claim | None = None) -> Halves:
    """v = v_A + v_S, mod 2^64 (int64) or mod 2^32 (int32).

    Args:
        claim: what has to hold of it (`proved.py`), for where D is not trusted; None where there is no proof.

    Ahead of the query; one message of 8 (or 4) bytes per element from D to S, which is uniform to S.
    """
    v_A = net.common(net.D, net.A, v.shape, "v_A", dtype)
    dealt = Halves(v_A, (v - v_A).send(net.D, net.S, "v_S"))
    noted(net, claim, dealt)
    return dealt


def deal(net: Net, v: Located | Made, dtype: torch.dtype = torch.int64, claim: Claim | None = None) -> Shares:
    """`deal_halves` as A and S have them."""
    return deal_halves(net, v, dtype, claim).shares


@protocol("deal_bits", "PrivHFL, 2.3 (shares from streams)", [Message("v_S", "D", "S", "v_A of k_DA")])
def deal_bit_halves(net: Net, v: Located | Made, claim: Claim | None = None) -> Halves:
    """v = v_A xor v_S for words of packed bits; one bit per bit from D to S."""
    v_A = net.common(net.D, net.A, v.shape, "v_A")
    dealt = Halves(v_A, (v ^ v_A).send(net.D, net.S, "v_S"))
    noted(net, claim, dealt)
    return dealt


def deal_bits(net: Net, v: Located | Made, claim: Claim | None = None) -> Shares:
    """`deal_bit_halves` as A and S have them."""
    return deal_bit_halves(net, v, claim).shares
