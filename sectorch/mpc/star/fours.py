"""Maxima of long rows by groups of four: half the levels of a tree of pairs, for some twice as many comparisons.

Of four values all six pairs are compared at once: x_i - x_j of two values that are open under their masks is open under
the difference of these, which D knows. With b_ij = [x_i >= x_j] for i < j, the first of the largest is told by

    w_0 = b_01 b_02 b_03,   w_1 = (1 - b_01) b_12 b_13,   w_2 = (1 - b_02) (1 - b_12) b_23,

and the maximum is x_3 + w_0 (x_0 - x_3) + w_1 (x_1 - x_3) + w_2 (x_2 - x_3).
"""

from __future__ import annotations

import functools

import torch

from ...choreography import Net, leaf, protocol
from .circuit import Circuit
from .compare import drelu
from .layers import Layer, and_layers, pick
from .mask import Masked, open_masked
from .pool import max_tree
from .select import select
from .shares import Shares, each

LONG = 32
"""Values from which on a maximum is taken so."""
FOUR = 4
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


@protocol("max_by_fours", "docs/protocols.md")
def max_by_fours(net: Net, x: Shares, high: int = 63) -> Shares:
    """The maximum along the first dimension. Exact.

    Args:
        x: [m, ...]; all values within 2^62 of zero.
        high: as in `maximum`.

    Levels of `max_of_four` on a quarter of what is left, as long as there are four, and then `max_tree`. Of 128 values
    four levels for seven.
    """
    while (count := x.shape[0]) >= FOUR:
        whole = count // FOUR * FOUR
        top = max_of_four(net, x[:whole], high)
        x = each(_joined, top, x[whole:]) if count > whole else top
    return max_tree(net, x, high)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


@protocol("max_of_four", "docs/protocols.md")
def max_of_four(net: Net, x: Shares, high: int = 63) -> Shares:
    """The larger of each four of [4 n, ...] that are n apart: [n, ...]. Exact.

    Args:
        high: differences are known to lie in [-2^high, 2^high).

    Rounds 1 (opening) + ceil(log4 ceil(high / 3)) (trees) + 1 (pairs) + 1 (bits). Six comparisons for a result, the
    pairs' 12 bits opened and 12 dealt, and three times `select`. Nobody learns anything.
    """
    size = x.shape[0] // FOUR
    four = each(by_words, x, FOUR)
    masked = open_masked(net, four)
    pairs = Masked(*(differences(v, PAIRS) for v in (masked.c, masked.r, masked.r_A, masked.r_S)))
    bits = each(torch.Tensor.view, drelu(net, pairs, high), len(PAIRS), -1)

    layers, places = _winners()
    won = and_layers(net, bits, layers)
    wins = each(_rows, won, places)
    last = tuple(PAIRS.index((i, FOUR - 1)) for i in range(FOUR - 1))
    over = select(net, wins, Masked(*(_columns(v, last) for v in (pairs.c, pairs.r, pairs.r_A, pairs.r_S))))
    return each(_largest, over, four, torch.Size((size, *x.shape[1:])))


@functools.cache
def _winners() -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """One layer: w_0, w_1 and w_2 of the rows b_ij."""
    circuit = Circuit(len(PAIRS))
    b = {pair: row for row, pair in enumerate(PAIRS)}
    first, second, third = b[0, 1], b[0, 2], b[1, 2]
    w_0 = circuit.gate((first, second, b[0, 3]))
    w_1 = circuit.gate((third, b[1, 3]), (first, third, b[1, 3]))
    w_2 = circuit.gate((second, b[2, 3]), (third, b[2, 3]), (second, third, b[2, 3]), onto=b[2, 3])
    return circuit.layers((w_0, w_1, w_2))


@leaf
def by_words(x: torch.Tensor, m: int) -> torch.Tensor:
    """[m n, ...] -> [64, m, W]: the i-th of the m of every result, 64 of them to a word of packed bits."""
    flat = x.reshape(m, x.numel() // m)
    missing = -flat.shape[1] % 64
    wide = flat.shape[1] + missing
    return torch.nn.functional.pad(flat, (0, missing)).view(m, 64, wide // 64).transpose(0, 1).contiguous()


@leaf
def differences(x: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """[64, m, W] -> [64, pairs, W]."""
    return torch.stack([x[:, i] - x[:, j] for i, j in pairs], 1)


@leaf
def _columns(x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([x[:, i] for i in which], 1)


@leaf
def _rows(words: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
    return pick(words, which).reshape(-1)


@leaf
def _largest(over: torch.Tensor, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """x_3 and what the largest is above it, in the shape of the results."""
    return (over.sum(1) + x[:, FOUR - 1]).view(-1)[: shape.numel()].view(shape)
