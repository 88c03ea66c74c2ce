"""Shapley values from the utilities of coalitions, exactly. A coalition is an integer, bit i standing for player i."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from typing import TypeVar

import numpy as np
import torch

from ...data.seeds import generator
from ...errors import CheckpointError as CheckpointError
from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import FederationError as FederationError
from ...errors import SectorchError

Name = TypeVar("Name", int, str)
"""How a client is called: by its number, or by its name."""
Utility = Callable[[int], float]
"""v(S). v(0), of nobody, is the utility of the model that a round begins with."""


def coalition(players: Iterable[int]) -> int:
    """The coalition of some players."""
    return sum({1 << player for player in players})


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
                out[player] += utility / (n * math.comb(n - 1, size - 1))
            elif size < n:
                out[player] -= utility / (n * math.comb(n - 1, size))
    return out


def total(rounds: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """phi_i = sum over rounds of phi_t,i: the federated value. A client has values only for rounds it attended."""
    out: dict[int, float] = defaultdict(float)
    for player, value in (pair for one in rounds for pair in one.items()):
        out[player] += value
    return dict(out)


def error(estimated: Mapping[Name, float], exact: Mapping[Name, float]) -> float:
    """Euclidean distance, over the clients of either (SecSV, 7.1)."""
    return sum((estimated.get(i, 0.0) - exact.get(i, 0.0)) ** 2 for i in estimated.keys() | exact.keys()) ** 0.5


# What can be wrong with a valuation. All are raised before anything is encrypted, unless they say otherwise.


class RoutingError(FederationError):
    """No client may decrypt some layer at the security level that was asked for.

    Example:
        client 3 owns the model under test and may not decrypt its outputs

    What to do:
        Ask for a lower routing level, or have more clients take part: every layer needs a client that may decrypt it.
    """


class EstimatorMissingError(SectorchError, ImportError):
    """An estimator lives in a library that is not installed.

    Example:
        permutation sampling or KernelSHAP needs shapiq, which is not installed: pip install 'sectorch[shapley]', or use
        estimator 'exact' or 'group-testing'

    What to do:
        `pip install 'sectorch[shapley]'`, or take an estimator that is here.
    """


# Confidence intervals of Shapley values, for payments: the test samples are the randomness.
#
# A client's value is the mean over the M test samples of its gains g: of a sample, the weighted mean over coalitions S
# of [S + i is right] - [S is right], which lies in [-1, 1]; over T rounds their sum. The interval holds every mean mu
# that the samples do not speak against. Whoever stakes a fixed share s of a fortune on g - mu wins nothing in
# expectation:
#
#     E product over samples of (1 - s + s (1 + g) / (1 + mu)) <= 1
#
# for independent samples whose expectations' mean is mu, by the inequality of the means. They need not be alike, so
# each owner's samples may come from a population of its own. By Markov's inequality such a fortune, and the mean of
# several, passes 2/alpha with a probability of at most alpha/2; the same against 1 - g gives the other end. This holds
# for any number of samples and any distribution of g. Source: Waudby-Smith and Ramdas (2024), Estimating means of
# bounded random variables by betting, with constant stakes.
#
# Where of a coalition only the count is known (all of HESV's; else the first global model's), its hits are taken to
# fall on the samples where they make the fortune least: those of what adds to the value on the samples that gained most
# already, those of what takes off on the others, for the logarithm of a fortune is a concave function of each gain. The
# interval is then wider, never narrower. A coalition that was not tested may have been right on none or on all, so an
# estimator's sampling error is in the interval too.


LEVEL = 0.95
"""Of each interval by itself: of twenty, one may fail."""
MOST = 12
"""Clients of a round: every coalition is gone through for each of them."""
_STEPS = 50
"""Halvings of the range in which an end is sought."""


@dataclass(frozen=True)
class Hits:
    """What is known of the samples that a coalition's model classifies correctly.

    Attributes:
        each: of every sample, bool [M]; None where only the count is known, or nothing.
        least, most: the count.
    """

    each: np.ndarray | None
    least: int
    most: int

    @classmethod
    def of(cls, record: Mapping | None, samples: int) -> Hits:
        """From the record of a test; None where there was none."""
        if record is None:
            return cls(None, 0, samples)
        if record["samples"] is None:
            return cls(None, record["right"], record["right"])
        packed = int(record["samples"], 16).to_bytes(-(-samples // 8), "little")
        each = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[:samples].astype(bool)
        return cls(each, int(each.sum()), int(each.sum()))


@dataclass(frozen=True)
class Gains:
    """A client's gains on M samples in so many rounds, as far as they are known.

    Attributes:
        rounds: how many were added up.
        known: what the coalitions of which each sample is known come to, float64 [M].
        counted: the coefficients and the hits of the other coalitions.
    """

    rounds: int
    known: np.ndarray
    counted: tuple[tuple[float, Hits], ...]

    def __add__(self, other: Gains) -> Gains:
        return Gains(self.rounds + other.rounds, self.known + other.known, self.counted + other.counted)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Both ends; each is passed with a probability of at most (1 - level) / 2.

        Error: 1e-12 of rounding, and 2^-50 of the range.
        """
        low, high = (self._end(sign, level) for sign in (1, -1))
        return self.rounds * low, -self.rounds * high

    def _end(self, sign: int, level: float) -> float:
        """The least mean of sign * gains / rounds that the samples do not speak against."""
        spread, samples = np.sort(sign * self.known), len(self.known)
        for coefficient, hits in self.counted:
            if sign * coefficient > 0:
                spread[samples - hits.least :] += sign * coefficient
            else:
                spread[: hits.most] += sign * coefficient
        gains, counts = np.unique(np.round(spread / self.rounds, 12), return_counts=True)
        passed = math.log(2 / (1 - level))
        shares = np.array(_stakes(samples, passed))[:, None]

        def fortune(mean: float) -> float:
            logs = np.log1p(shares * ((1 + gains) / (1 + mean) - 1)) @ counts
            top = float(np.max(logs))
            return top + math.log(float(np.exp(logs - top).mean()))

        low, high = -1.0, 1.0  # the fortune falls with the mean
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if fortune(middle) >= passed else (low, middle)
        return low


def _stakes(samples: int, passed: float) -> list[float]:
    """The best stake for gains as spread out as can be, then twice it, and so on below one."""
    out = [min(0.5, math.sqrt(2 * passed / samples))]
    while 2 * out[-1] < 1:
        out.append(2 * out[-1])
    return out


def gains(players: Sequence[int], hits: Callable[[int], Hits], samples: int, player: int) -> Gains:
    """A client's gains in one round; hits of 0 are nobody's."""
    n, known, counted = len(players), np.zeros(samples), []
    for mask in [0, *coalitions(players)]:
        others = mask.bit_count() - (mask >> player & 1)
        coefficient = (1 if mask >> player & 1 else -1) / (n * math.comb(n - 1, others))
        found = hits(mask)
        if found.each is None:
            counted.append((coefficient, found))
        else:
            known += coefficient * found.each
    return Gains(1, known, tuple(counted))


def of_rounds(
    rounds: Sequence[tuple[Sequence[int], Mapping[int, dict], float]], samples: int, previous: bool
) -> list[dict[int, Gains]]:
    """Every client's gains in every round, from what was recorded.

    Args:
        rounds: of each its players, the records by coalition, and nobody's utility.
        previous: nobody's model is that of everybody in the round before; else nobody is right on no sample.
    """
    out: list[dict[int, Gains]] = []
    last: Hits | None = None
    for players, records, nobody in rounds:
        count = round(nobody * samples)
        first = Hits(None, count, count) if previous else Hits(np.zeros(samples, bool), 0, 0)
        hits = {mask: Hits.of(records.get(mask), samples) for mask in coalitions(players)}
        hits[0] = first if last is None or not previous else last
        out.append({i: gains(players, hits.__getitem__, samples, i) for i in players})
        last = hits[coalition(players)]
    return out


# Other measures of contribution from the same secure utilities (SecSV, section 6.2.5).
#
# They take a cached function of coalitions like the estimators, so that after a valuation most cost no further test.


def contribution_index(players: Sequence[int], v: Utility) -> dict[int, float]:
    """Song et al. (2019), single-round: Shapley values divided by their sum of magnitudes; 0 where all are 0."""
    values = shapley(players, v)
    whole = sum(abs(x) for x in values.values())
    return {i: x / whole if whole else 0.0 for i, x in values.items()}


def group_values(groups: Sequence[Sequence[int]], v: Utility) -> list[float]:
    """Ma et al. (2021): Shapley values of groups of clients, each group one player.

    Raises:
        FederationError: a client in two groups, or an empty group.
    """
    flat = [i for group in groups for i in group]
    if len(set(flat)) < len(flat) or not all(groups):
        raise FederationError(f"groups must not be empty nor share a client, got {[list(g) for g in groups]}")
    masks = [coalition(group) for group in groups]

    def grouped(mask: int) -> float:
        return v(sum(masks[k] for k in range(len(masks)) if mask >> k & 1))

    values = shapley(range(len(groups)), grouped)
    return [values[k] for k in range(len(groups))]


def truncated(
    players: Sequence[int], v: Utility, *, orders: int = 20, tolerance: float = 1e-3, seed: int = 0
) -> dict[int, float]:
    """Truncated Monte Carlo (Ghorbani and Zou, 2019; Wei et al., 2020, for rounds of FL).

    In each order of the clients, marginal gains are taken as 0 once the coalition's utility is within `tolerance` of
    everybody's. If there are at most `orders` orders, all are used.
    """
    return _mean_gains(_orders(players, orders, seed), v, v(coalition(players)), tolerance)


def _mean_gains(orders: Sequence[Sequence[int]], v: Utility, everyone: float, tolerance: float) -> dict[int, float]:
    """The mean over orders of what each client adds to those before it, as in `truncated`."""
    out = dict.fromkeys(sorted(orders[0]), 0.0)
    for order in orders:
        mask, before = 0, v(0)
        for player in order:
            mask |= 1 << player
            after = before if abs(everyone - before) < tolerance else v(mask)
            out[player] += (after - before) / len(orders)
            before = after
    return out


def gtg(
    rounds: Sequence[tuple[Sequence[int], Utility]], *, orders: int = 20, between: float = 1e-3, within: float = 1e-3,
    seed: int = 0,
) -> dict[int, float]:  # fmt: skip
    """GTG-Shapley (Liu et al., 2022): rounds whose global model gained at most `between` over the one that they began
    with count 0; within a round, `truncated` with guided orders: every client comes first equally often.
    """
    found = []
    for t, (players, v) in enumerate(rounds):
        everyone = v(coalition(players))
        values = dict.fromkeys(players, 0.0)
        if abs(everyone - v(0)) > between:
            values = _mean_gains(_guided(players, orders, seed + t), v, everyone, within)
        found.append(values)
    return total(found)


def _guided(players: Sequence[int], orders: int, seed: int) -> list[list[int]]:
    """At least so many orders, in which every client comes first equally often."""
    draw, found = generator(seed, "gtg"), []
    for _ in range(max(1, -(-orders // len(players)))):
        for first in players:
            rest = [p for p in players if p != first]
            found.append([first, *(rest[k] for k in torch.randperm(len(rest), generator=draw).tolist())])
    return found


def _orders(players: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    if math.factorial(len(players)) <= count:
        return list(permutations(players))
    draw = generator(seed, "orders")
    return [tuple(players[k] for k in torch.randperm(len(players), generator=draw).tolist()) for _ in range(count)]


# Sets of samples, and what SampleSkip (`algorithm.py`) may change. A set is an integer, bit k standing for sample k.


def error_bound(rounds: int, wrongly: float) -> float:
    """Lemma 6.4: what SampleSkip changes any client's value by at most, over so many rounds.

    Args:
        wrongly: the largest share of test samples that were skipped wrongly, over all aggregated models.

    A utility that skipping overstates is too large by at most `wrongly`, so a gain is off by no more either way, and a
    round's value is a weighted mean of gains.
    """
    return rounds * wrongly


def bits(indices: Iterable[int]) -> int:
    """A set of samples from their numbers."""
    indices = np.fromiter(indices, np.int64)
    flags = np.zeros(int(indices.max()) + 1 if len(indices) else 0, np.uint8)
    flags[indices] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def numbers(samples: int) -> list[int]:
    """The numbers of the samples in a set."""
    packed = np.frombuffer(samples.to_bytes(-(-samples.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()


@dataclass(frozen=True)
class TestSet:
    """The clients' test samples, numbered through: client i's are first[i] .. first[i] + len - 1.

    Those of clients who are not in this process are None, or have a shape only.
    """

    x: tuple[torch.Tensor | None, ...]
    labels: tuple[torch.Tensor | None, ...]

    def of_sizes(self, sizes: Sequence[int], shape: tuple[int, ...]) -> TestSet:
        """The same, with a shape for what is not in this process."""
        x = [torch.empty(n, *shape, device="meta") if x is None else x for x, n in zip(self.x, sizes, strict=True)]
        labels = [torch.empty(len(v), dtype=torch.int64, device="meta") if y is None else y
                  for y, v in zip(self.labels, x, strict=True)]  # fmt: skip
        return TestSet(tuple(x), tuple(labels))

    @cached_property
    def everywhere(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each client's samples and labels.

        Raises:
            FederationError: some are not in this process, and have no shape either.
        """
        found = [(x, y) for x, y in zip(self.x, self.labels, strict=True) if x is not None and y is not None]
        if len(found) < len(self.labels):
            raise FederationError(
                "the test samples of some clients are not in this process; `of_sizes` gives them a shape"
            )
        return found

    @cached_property
    def sizes(self) -> list[int]:
        return [len(labels) for _, labels in self.everywhere]

    @cached_property
    def first(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.labels))]

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def all(self) -> int:
        """The set of all samples."""
        return (1 << len(self)) - 1

    def of(self, owner: int, samples: int) -> list[int]:
        """Numbers, within an owner's samples, of those in a set."""
        return numbers(samples >> self.first[owner] & ((1 << self.sizes[owner]) - 1))

    def count(self, owners: Sequence[int], samples: int) -> int:
        """How many samples of a set are of these owners."""
        return sum(len(self.of(i, samples)) for i in owners)

    def bitmap(self, samples: int) -> torch.Tensor:
        """A set as bits, the first sample's lowest: uint8 [samples / 8]."""
        size = -(-len(self) // 8)
        return torch.frombuffer(bytearray(samples.to_bytes(size, "little")), dtype=torch.uint8)

    def places(self, owners: Sequence[int], chosen: Mapping[int, list[int]]) -> np.ndarray:
        """Numbers, within all samples, of those that were chosen of each owner."""
        return np.concatenate([self.first[i] + np.array(chosen[i], np.int64) for i in owners])
