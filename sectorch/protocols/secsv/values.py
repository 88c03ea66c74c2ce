"""Shapley values from the utilities of coalitions, exactly. A coalition is an integer, bit i standing for player i."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeVar

Name = TypeVar("Name", int, str)
"""How a client is called: by its number, or by its name."""
Utility = Callable[[int], float]
"""v(S). v(0), of nobody, is the utility of the model that a round begins with."""


def coalition(players: Iterable[int]) -> int:
    """The coalition of some players."""
    mask = 0
    for player in players:
        mask |= 1 << player
    return mask


def members(mask: int) -> list[int]:
    """The players of a coalition, in ascending order."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def coalitions(players: Sequence[int]) -> list[int]:
    """All nonempty coalitions, small ones first: the order that SampleSkip needs."""
    return [coalition(c) for size in range(1, len(players) + 1) for c in combinations(players, size)]


def shapley(players: Sequence[int], v: Utility) -> dict[int, float]:
    """phi_i = (1/n) sum over S without i of C(n-1, |S|)^-1 [v(S + i) - v(S)], by all 2^n coalitions (SecSV, 3).

    Source: SecSV, section 3, the single-round Shapley value; Shapley (1953).
    """
    n = len(players)
    value = {mask: v(mask) for mask in [0, *coalitions(players)]}
    out = dict.fromkeys(players, 0.0)
    for mask, utility in value.items():
        size = mask.bit_count()
        for player in players:
            if mask >> player & 1:
                out[player] += utility / (n * comb(n - 1, size - 1))
            elif size < n:
                out[player] -= utility / (n * comb(n - 1, size))
    return out


def total(rounds: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """phi_i = sum over rounds of phi_t,i: the federated value. A client has values only for rounds it attended."""
    out: dict[int, float] = {}
    for one in rounds:
        for player, value in one.items():
            out[player] = out.get(player, 0.0) + value
    return out


def error(estimated: Mapping[Name, float], exact: Mapping[Name, float]) -> float:
    """Euclidean distance, over the clients of either (SecSV, 7.1)."""
    return sum((estimated.get(i, 0.0) - exact.get(i, 0.0)) ** 2 for i in estimated.keys() | exact.keys()) ** 0.5
