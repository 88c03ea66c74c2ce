"""The public numbers of a protocol's steps: where they are, a protocol decides, rounds and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..choreography.program.trace import Program

WIDTH = 64
"""A number below it may be a place in a word, and stands for a power of two."""


def numbers_of(program: Program) -> list[int]:
    """All whole numbers that its steps take, in their order."""
    return list(dict.fromkeys(v for node in program.nodes for operand in node.operands for v in _numbers(operand)))


def constants_of(program: Program) -> list[int]:
    """Ring elements that these stand for: those beyond a word's places as they are, the others as powers of two."""
    found = numbers_of(program)
    large = [abs(v) for v in found if WIDTH < abs(v) < 1 << 62]
    return list(dict.fromkeys([*large, *(1 << v for v in found if 0 < v < 62)]))


def _numbers(operand: Any) -> Iterator[int]:
    if isinstance(operand, (tuple, list)):
        for part in operand:
            yield from _numbers(part)
    elif isinstance(operand, int) and not isinstance(operand, bool):
        yield operand
