"""Comparisons with public thresholds as ring shares of 0 and 1: by the tree of `compare`, or by keys in no round."""

from __future__ import annotations

from ...choreography import Net, protocol
from .compare import drelu
from .fss import signs
from .mask import Masked
from .select import bit_to_ring
from .shares import Shares


@protocol("at_least", "docs/protocols.md")
def at_least(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), fss: bool = False, high: int = 63) -> Shares:
    """[x - t >= 0] for each public threshold t, as shares of 0 and 1: [T, *shape]. Exact.

    Args:
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.

    Rounds: ceil(log4(ceil(high / 3))) (tree) + 1 (bit), or none with `fss`, where the dealt bytes are some twenty times
    as many.
    """
    if fss:
        return signs(net, x, thresholds, high)
    return bit_to_ring(net, drelu(net, x, high, thresholds), x.shape, len(thresholds))
