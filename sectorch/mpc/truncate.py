"""Truncation without failure: x >> f from a masked opening, and the quotient form that other protocols build on.

With c' = c + 2^62 and logical shifts, for |x| < 2^62,

    x >> f = (c' >> f) - 2^(62-f) - (r >> f) + 2^(64-f) msb(r) (1 - msb(c')),

up to one unit in the last place. A and S know the public quotient C = (c' >> f) - 2^(62-f) and whether msb(c') = 0; Q
knows r >> f and the bit msb(r). The last term puts back the 2^64 that was lost where c' = x + 2^62 + r wrapped around:
x + 2^62 is below 2^63, so that happened exactly if msb(r) = 1 and msb(c') = 0. Local truncation of shares, which most
systems use, fails with probability |x|/2^64 per element instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choreography import Located, Net, protocol
from ..errors import ArgumentError
from ..ring import HEADROOM_BITS, logical_shift, sign_mask
from .deal import deal
from .mask import Masked, open_masked
from .shares import Shares

MAX_SHIFT = 32
"""The wrap-around bit is shared mod 2^32, of which a shift by f uses the low f bits."""


@dataclass(frozen=True)
class Quotient:
    """Q's part of x >> f: `value` = r >> f and the bit `wrap` = msb(r) (int32) at Q, and both in shares."""

    value: Located
    wrap: Located | None
    shares: Shares
    wraps: Shares | None


def deal_quotient(net: Net, x: Masked, shift: int) -> Quotient:
    """Deal r >> shift and msb(r): 8 + 4 bytes per element, or nothing for shift 0, where r's halves serve."""
    check_shift(shift)
    if shift == 0:
        return Quotient(x.r, None, x.mask, None)
    value = net.locally(net.Q, lambda r: logical_shift(r, shift), x.r)
    wrap = net.locally(net.Q, lambda r: (r < 0).to(torch.int32), x.r)
    return Quotient(value, wrap, deal(net, value), deal(net, wrap, torch.int32))


def check_shift(shift: int, least: int = 0) -> None:
    """Raise `ArgumentError` unless least <= shift <= 32."""
    if not least <= shift <= MAX_SHIFT:
        raise ArgumentError(f"a truncation shifts by {least} to {MAX_SHIFT} bits, got {shift}")


def public_quotient(net: Net, x: Masked, shift: int) -> tuple[Located, Located]:
    """C and the mask (all ones) of the elements with msb(c') = 0, at A and S."""
    if shift == 0:
        return x.c, x.c

    def quotient(c):
        lifted = c + (1 << HEADROOM_BITS)
        C = logical_shift(lifted, shift).sub_(1 << (HEADROOM_BITS - shift))
        return C, sign_mask(lifted.bitwise_not_())

    return net.locally((net.A, net.S), quotient, x.c)


def wrap_term(wrap: torch.Tensor, shift: int) -> torch.Tensor:
    """2^(64 - shift) times a bit shared mod 2^32, as an int64 half."""
    return wrap.to(torch.int64).bitwise_left_shift_(64 - shift)


@protocol("truncate", "docs/protocols.md")
def truncate(net: Net, x: Shares, shift: int) -> Shares:
    """x >> shift, for |x| < 2^62; the result is floor(x / 2^shift) or one more.

    Args:
        shift: 1..32 bits.

    Rounds 1, bytes 16 online (8 of them ahead after a linear layer), 12 dealt, per element. Nobody learns anything.
    """
    check_shift(shift, least=1)
    return truncate_masked(net, open_masked(net, x), shift)


def truncate_masked(net: Net, x: Masked, shift: int) -> Shares:
    """`truncate` for a value that is open under its mask already. No further message online."""
    quotient = deal_quotient(net, x, shift)
    C, no_wrap = public_quotient(net, x, shift)

    def half(rho, wrap, no_wrap):
        return wrap_term(wrap, shift).bitwise_and_(no_wrap).sub_(rho)

    return Shares(
        net.locally(
            net.A, lambda C, h, rho, w: half(rho, w, h).add_(C), C, no_wrap, quotient.shares.A, quotient.wraps.A
        ),
        net.locally(net.S, lambda h, rho, w: half(rho, w, h), no_wrap, quotient.shares.S, quotient.wraps.S),
    )
