"""Which secrets a party may not tell apart: those for which its own inputs and what it learns are the same."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from ..errors import ArgumentError
from .constants import WIDTH, numbers_of
from .outcomes import Outcomes
from .played import Protocol

CONSTANTS = 2
"""Pairs more, of secrets at the protocol's own numbers, where steps decide."""
GROUP = 24

Values = tuple[int, ...]
"""What each input is, in all its elements."""
Pair = tuple[Values, Values]


def pairs_of(protocol: Protocol, outcomes: Outcomes, random: np.random.Generator, party: str) -> list[Pair]:
    """Pairs of secrets that differ as much as they can: in their lowest bits, signs, sizes, sums and zeros, and some of
    which one is where a step of the protocol decides."""
    alike: dict[tuple, list[Values]] = {}
    own = [i for i, g in enumerate(protocol.given) if g.party == party]
    special = [-abs(v) for v in numbers_of(protocol.program) if abs(v) > WIDTH][:CONSTANTS]
    for values, learned in _candidates(protocol, outcomes, random, party, special):
        alike.setdefault((tuple(values[i] for i in own), learned), []).append(values)
    wanted: list[Pair] = []
    for group in alike.values():
        kept = [values for values in group if set(values) & set(special)][: GROUP // 2]
        few = group if len(group) <= GROUP else [group[i] for i in random.permutation(len(group))[:GROUP]]
        wanted += itertools.combinations(dict.fromkeys([*few, *kept]), 2)
    found: list[Pair] = []
    for weigh in (_low_bits, _signs, _sizes, _sums, _zeros):
        pair = max((p for p in wanted if p not in found), key=lambda p: (weigh(*p), _sizes(*p)), default=None)
        if pair is not None:
            found.append(pair)
    known = {values for pair in found for values in pair}
    for value in special:  # beside a secret that is in another pair already: so it costs one run more
        at = [p for p in wanted if any(value in v for v in p) and p not in found]
        pair = max(at, key=lambda p: (bool(known & set(p)), any(set(v) == {value} for v in p)), default=None)
        if pair is not None:
            found.append(pair)
    return found[: outcomes.case.pairs]


def _candidates(
    protocol: Protocol, outcomes: Outcomes, random: np.random.Generator, party: str, special: list[int]
) -> list[tuple[Values, tuple]]:
    """Secrets, and what the party learns of each."""
    pools = []
    for g in protocol.given:
        near = [0, 1, -1, 2, 3, -7, (1 << 20) + 1, -(1 << 20), 1 << 40, g.low, g.high, g.high - 1, *special]
        pools.append(sorted({v for v in near if g.low <= v <= g.high}))
    count = math.prod(map(len, pools))
    most = min(count, protocol.n if outcomes.elementwise else 64)
    named = [(v,) * len(pools) for v in special if all(v in pool for pool in pools)]
    drawn = (_combination(pools, i) for i in _places(random, count, most))
    chosen = list(dict.fromkeys([*named, *drawn]))[:most]
    learns = [i for i, owners in enumerate(protocol.learners) if party in owners]
    if not learns:
        return [(values, ()) for values in chosen]
    if outcomes.elementwise:
        columns = [list(column) for column in zip(*chosen, strict=True)]
        sizes = [g.size(protocol.n) for g in protocol.given]
        inputs = [
            torch.tensor(column).repeat(-(-size.numel() // len(column)))[: size.numel()].view(size)
            for column, size in zip(columns, sizes, strict=True)
        ]
        results = [y.reshape(-1) for i, y in enumerate(outcomes.reference(inputs)) if i in learns]
        if any(y.numel() < len(chosen) for y in results):
            raise ArgumentError(
                "the reference gives one number for several elements of an input: pass elementwise=False, and small "
                "shapes, or have it give one for each"
            )
        return [(values, tuple(int(y[at]) for y in results)) for at, values in enumerate(chosen)]
    found = []
    for values in chosen:
        results = outcomes.reference(outcomes.filled(values))
        found.append((values, tuple(tuple(results[i].reshape(-1).tolist()) for i in learns)))
    return found


def _places(random: np.random.Generator, count: int, most: int) -> list[int]:
    """So many numbers below the count, each once."""
    if count < 1 << 16:
        return random.permutation(count)[:most].tolist()
    return list(dict.fromkeys(random.integers(count, size=most).tolist()))


def _combination(pools: list[list[int]], i: int) -> Values:
    """The i-th of all combinations."""
    found = []
    for pool in reversed(pools):
        i, at = divmod(i, len(pool))
        found.append(pool[at])
    return tuple(reversed(found))


def _low_bits(one: Values, other: Values) -> int:
    return sum((a ^ b) & 1 for a, b in zip(one, other, strict=True))


def _signs(one: Values, other: Values) -> int:
    return sum((a < 0) != (b < 0) for a, b in zip(one, other, strict=True))


def _sizes(one: Values, other: Values) -> int:
    return sum((a - b).bit_length() for a, b in zip(one, other, strict=True))


def _sums(one: Values, other: Values) -> int:
    return ((sum(one) ^ sum(other)) & 1) + (one != other)


def _zeros(one: Values, other: Values) -> int:
    return sum((a == 0) != (b == 0) for a, b in zip(one, other, strict=True))
