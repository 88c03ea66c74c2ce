"""Trees that combine the blocks of comparisons, as layers of ANDs: how many levels they have, and what they cost.

A node joins up to four neighbours, of which 4 is the most significant one:

    lt = lt_4 xor eq_4 lt_3 xor eq_4 eq_3 lt_2 xor eq_4 eq_3 eq_2 lt_1,         eq = eq_4 eq_3 eq_2 eq_1,

in one round. A node of two has two bits dealt and one of four 22: over 7 and 15 blocks side by side, those of a ReLU by
20 bits, two levels have 110 and three 51.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ...choreography import Net
from .circuit import Circuit
from .layers import WIDEST, Layer

Node = tuple[int, int]
"""A node of a tree by numbers of a circuit: lt and eq."""


def join(circuit: Circuit, nodes: Sequence[Node]) -> Node:
    """One node of up to four neighbours, least significant first."""
    if len(nodes) == 1:
        return nodes[0]
    equals = [equal for _, equal in reversed(nodes)]
    less = [lt for lt, _ in reversed(nodes)]
    lt = circuit.gate(*((*equals[:i], less[i]) for i in range(1, len(nodes))), onto=less[0])
    return lt, circuit.gate(tuple(equals))


def levels_of(blocks: int) -> int:
    """Levels of a tree over so many blocks: ceil(log4)."""
    return 0 if blocks <= 1 else 1 + levels_of(-(-blocks // WIDEST))


def _bits(group: int, lowest: bool) -> int:
    """Bits that a node of so many blocks opens and has dealt; the lowest of a level needs no eq."""
    opened, dealt = 2 * group - 2, 2**group - group - 1 + 2 ** (group - 1) - group
    return 0 if group == 1 else 2 * opened + dealt if lowest else 2 * (opened + 1) + dealt + 2 ** (group - 1) - 1


@functools.cache
def grouped(count: int, levels: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How a tree of so many levels joins its blocks: bits an element, and for each level the sizes of its groups, least
    significant first. Of all trees with groups of like size the one with the fewest bits, opened and dealt."""
    if levels == 0:
        return 0, ()
    found = []
    for groups in range(-(-count // WIDEST), min(count, WIDEST ** (levels - 1)) + 1):
        sizes = tuple(count // groups + (i < count % groups) for i in range(groups))
        bits, above = grouped(groups, levels - 1)
        found.append((bits + sum(_bits(size, i == 0) for i, size in enumerate(sizes)), (sizes, *above)))
    return min(found)


def tree(circuit: Circuit, nodes: list[Node], levels: int) -> Node:
    """The root of a tree over these blocks, least significant first."""
    for sizes in grouped(len(nodes), levels)[1]:
        ends = itertools.accumulate(sizes)
        nodes = [join(circuit, nodes[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return nodes[0]


@functools.cache
def forest(
    blocks: tuple[int, ...], whole: tuple[bool | None, ...], above: tuple[int, int] | None = None, spare: int = 0
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The layers that combine trees of so many blocks, side by side, and where their results stand.

    The state is [lt, eq] of the first tree's blocks, least significant first, and so on. The results are the rows of
    one lt for each tree, followed by the tree's eq for those that are `whole`: the values are equal in all planes. The
    lowest block's eq enters for these only. None of a tree whose blocks only stand below others (`whole` is None).

    Args:
        above: a tree, and how many of its lowest blocks the trees after it stand above: their results are of both
            together, and nodes that trees have in common are made once.
        spare: levels more than it takes, for which narrower nodes have fewer bits dealt.
    """
    circuit, leaves_of, at = Circuit(2 * sum(blocks)), [], 0
    for count in blocks:
        leaves_of.append([(at + i, at + count + i) for i in range(count)])
        at += 2 * count
    if above is not None:
        below = leaves_of[above[0]][: above[1]]
        leaves_of[above[0] + 1 :] = [below + own for own in leaves_of[above[0] + 1 :]]
    trees = [(nodes, kept) for nodes, kept in zip(leaves_of, whole, strict=True) if kept is not None]
    levels = max(levels_of(len(nodes)) for nodes, _ in trees) + spare
    roots = [(tree(circuit, nodes, levels), kept) for nodes, kept in trees]
    return circuit.layers(tuple(row for (lt, eq), kept in roots for row in ((lt, eq) if kept else (lt,))))


LAN_ROUND = 1 << 16
"""Bytes that a round is worth unless a scheme says more: half a millisecond of 1 Gbit/s."""
MUCH = 48_000_000
"""Bytes ahead in a call after which bytes are dear, and not rounds: 4 s of 100 Mbit/s, in which 80 rounds pass."""


def forest_worth(
    net: Net, count: int, blocks: tuple[int, ...], whole: tuple[bool | None, ...], above: tuple[int, int] | None = None
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """`forest` for so many elements, with a level more than it takes where the bytes that this saves are worth more
    than a round is: `net.round_bytes`, until the call has been dealt so much that it waits for nothing else."""
    worth = LAN_ROUND if net.round_bytes is None or net.ahead > MUCH else net.round_bytes
    found = (forest(blocks, whole, above, spare) for spare in range(3))
    return min(found, key=lambda made: bits_of_layers(made[0]) * count // 8 + len(made[0]) * worth)


@functools.cache
def bits_of_layers(layers: tuple[Layer, ...]) -> int:
    """Bits an element that layers open, both ways, and have dealt."""
    return sum(2 * len(layer.opened) + len(layer.products) for layer in layers)
