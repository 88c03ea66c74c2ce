"""Maxima over windows, by a tree of pairwise maxima. PrivHFL, 3.3 (iii)."""

from __future__ import annotations

import torch

from ...choreography import Net, protocol
from .relu import maximum
from .shares import Shares, each


@protocol("max_tree", "PrivHFL, 3.3 (iii)")
def max_tree(net: Net, x: Shares, high: int = 63, fss: bool = False) -> Shares:
    """The maximum along the first dimension. Exact.

    Args:
        x: [m, ...]; all values within 2^62 of zero.
        high, fss: as in `maximum`.

    ceil(log2 m) levels of `maximum` on half of what is left; m - 1 comparisons per result in all.
    """
    while (count := x.shape[0]) > 1:
        half = count // 2
        top = maximum(net, x[:half], x[half : 2 * half], high, fss)
        x = each(_joined, top, x[2 * half :]) if count % 2 else top
    return x[0]


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)
