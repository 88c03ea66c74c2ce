"""ReLU, exact and leak-free, with the truncation that follows a linear layer for free."""

from __future__ import annotations

import torch

from ..choreography import Net, protocol
from .compare import check_planes, drelu
from .fss import gate
from .mask import Masked, open_masked
from .select import select
from .shares import Shares, each
from .truncate import check_shift


@protocol("relu", "PrivHFL, 3.3 (ii), made exact and leak-free")
def relu(net: Net, x: Shares, shift: int = 0, high: int = 63, fss: bool = False) -> Shares:
    """max(x, 0) >> shift.

    Args:
        shift: fraction bits to drop, 0..32; with a shift |x| < 2^62 and the result is within one unit of
            max(x, 0) / 2^shift. Without, it is exact.
        high: x is known to lie in [-2^high, 2^high - 2^shift); fewer planes are compared.
        fss: by function secret sharing: one round, and some twenty times as many dealt bytes; see `mpc/fss.py`.

    Rounds: 1 (opening) + ceil(log2 B) (tree) + 1 (bit), B = ceil((63 - shift) / 3) blocks. Nobody learns anything.
    """
    check_shift(shift)
    check_planes(shift, high)
    return relu_masked(net, open_masked(net, x), shift, high, fss)


def relu_masked(net: Net, x: Masked, shift: int = 0, high: int = 63, fss: bool = False) -> Shares:
    """`relu` for a value that is open under its mask already."""
    if fss:
        return gate(net, x, shift, shift, high)[0]
    return select(net, drelu(net, x, shift, high), x, shift)


@protocol("maximum", "PrivHFL, 3.3 (iii)")
def maximum(net: Net, x: Shares, y: Shares, low: int = 0, high: int = 63, fss: bool = False) -> Shares:
    """max(x, y) = y + ReLU(x - y), for |x - y| < 2^63 - 2^low.

    Args:
        low: planes to drop; two values that differ by less than 2^low may come out either way.
        high: x - y is known to lie in [-2^high, 2^high - 2^low).
        fss: as in `relu`.
    """
    check_planes(low, high)
    A, S = net.A, net.S
    difference = Shares(net.locally(A, torch.sub, x.A, y.A), net.locally(S, torch.sub, x.S, y.S))
    d = open_masked(net, difference)
    larger = gate(net, d, 0, low, high)[0] if fss else select(net, drelu(net, d, low, high), d)
    return Shares(net.locally(A, torch.add, y.A, larger.A), net.locally(S, torch.add, y.S, larger.S))


def ramps(
    net: Net, x: Masked, thresholds: tuple[int, ...], shift: int = 0, high: int = 63, fss: bool = False
) -> list[Shares]:
    """max(x - t, 0) >> shift for each public threshold t: one opening and one dealing of r for all comparisons."""
    if fss:
        return gate(net, x, shift, shift, high, thresholds)
    bits = drelu(net, x, shift, high, thresholds)
    parts = []
    for i, t in enumerate(thresholds):
        chosen = each(net, lambda w, i=i: w.view(len(thresholds), -1)[i], bits)
        moved = Masked(net.locally((net.A, net.S), torch.sub, x.c, t), x.r, x.r_A, x.r_S)
        parts.append(select(net, chosen, moved, shift))
    return parts
