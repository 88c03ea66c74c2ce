"""Comparisons with public thresholds as ring shares of 0 and 1: by the tree of `compare`, or by keys in no round."""

from __future__ import annotations

from ...choreography import Net, protocol
from .compare import drelu
from .fss import signs
from .mask import Masked
from .select import bit_to_ring
from .shares import Shares


@protocol("at_least", "docs/protocols.md")
def at_least(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), fss: bool = False) -> Shares:
    """[x - t >= 0] for each public threshold t, as shares of 0 and 1: [T, *shape]. Exact.

    Rounds: 5 (tree) + 1 (bit), or none with `fss`, where the dealt bytes are some twenty times as many.
    """
    if fss:
        return signs(net, x, thresholds)
    return bit_to_ring(net, drelu(net, x, thresholds=thresholds), x.shape, len(thresholds))
