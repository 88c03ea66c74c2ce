"""Checks of a protocol's results: equal to the reference, for all draws, and on small domains in all combinations.

The statistical tests of single messages, and the pairs of secrets that a party must not tell apart, are here too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special

from ..choreography.net import Draw
from ..choreography.program.trace import Program
from ..errors import ArgumentError
from ..ring import as_signed
from ..ring.jit import compiled
from .protocol_runs import (
    SHARED,
    Case,
    Draws,
    FlippedDraws,
    Given,
    KnownValue,
    ManyDraws,
    Protocol,
    ProtocolRun,
    half_of,
    is_tests,
    observable_values,
    place_of,
    runs_agree,
)

# The public numbers in a protocol's steps, near which it compares, rounds and cuts.

WIDTH = 64
"""Numbers below it may be places in a word, and stand for powers of two."""


def numbers_of(program: Program) -> list[int]:
    """All whole numbers that the steps of a program take, in order."""
    return list(dict.fromkeys(v for node in program.nodes for operand in node.operands for v in _numbers(operand)))


def constants_of(program: Program) -> list[int]:
    """The ring elements for these numbers: large ones themselves, places in a word as powers of two."""
    found = numbers_of(program)
    large = [abs(v) for v in found if WIDTH < abs(v) < 1 << 62]
    return list(dict.fromkeys([*large, *(1 << v for v in found if 0 < v < 62)]))


def _numbers(operand: Any) -> Iterator[int]:
    if isinstance(operand, (tuple, list)):
        for part in operand:
            yield from _numbers(part)
    elif isinstance(operand, int) and not isinstance(operand, bool):
        yield operand


# Tests of single messages: whether they are uniform, and have the same distribution for two secrets.
#
# Each p-value is compared with 10^-12. The count of ones in n bits of one place has a standard deviation of sqrt(n) /
# 2, and 10^-12 on two sides is 7.13 of them; a bit that is 1 with probability 1/2 + e/2 is therefore found with
# probability 0.9999 (3.72 standard deviations more) from e = (7.13 + 3.72) / sqrt(n).

P_VALUE = 1e-12
SIGMAS = 8.0
FOUND = 7.13 + 3.72
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


def histogram(values: np.ndarray) -> np.ndarray:
    """Count each byte at each place of a word: [bytes of a word, 256]."""
    words = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    counts = np.zeros((words.shape[1], 256), np.int64)
    _count(words, counts)
    return counts


@compiled
def _count(words, counts):
    """Add to counts[k, b] the number of words with the byte b at place k."""
    for i in range(words.shape[0]):
        for k in range(words.shape[1]):
            counts[k, words[i, k]] += 1


def ones_of(counts: np.ndarray) -> np.ndarray:
    """The number of ones of each bit of a word, from a histogram, the lowest bit first."""
    return (counts @ _BITS[:, ::-1]).ravel()


def most_biased_bit(counts: np.ndarray) -> tuple[float, int]:
    """The p-value and the place of the bit of a word whose share of ones is furthest from a half.

    A place equal to the number of bits stands for all bits together, which matters for packed bits.
    """
    ones = ones_of(counts)
    n = np.append(np.full(len(ones), counts[0].sum()), 8 * counts.sum())
    sigmas = np.abs(2 * np.append(ones, ones.sum()) - n) / np.sqrt(n)
    return float(2 * special.ndtr(-sigmas.max())), int(sigmas.argmax())


def not_uniform(values: np.ndarray) -> str:
    """How the values of a message differ from uniform ones, in words; empty if they do not."""
    counts = histogram(values)
    p, bit = most_biased_bit(counts)
    if p < P_VALUE:
        return f"bit {bit} is biased" if bit < 8 * len(counts) else "bits are biased"
    enough = counts.sum(axis=1) >= 2560  # ten of each byte, so that the statistic is close to its limit
    places = np.flatnonzero(enough & (_from_even(counts) < P_VALUE))
    if len(places) or _from_even(counts.sum(axis=0, keepdims=True))[0] < P_VALUE:
        return f"byte {places[0]} is not uniform" if len(places) else "its bytes are not uniform"
    return ""


def distinguishable(first: np.ndarray, second: np.ndarray) -> str:
    """How the values of a message tell two secrets apart, in words; empty if they do not."""
    places = np.flatnonzero(_same_distribution(histogram(first), histogram(second)) < P_VALUE)
    if len(places):
        return f"byte {places[0]} tells them apart"
    if apart_in_size(first[: 1 << 17].astype(np.float64), second[: 1 << 17].astype(np.float64)) < P_VALUE:
        return "its size tells them apart"
    return ""


QUANTILES = 16
COLUMNS_APART = math.sqrt(2 * math.log(2 * (8 * 8 + 1 + 8 * 256 + QUANTILES) / P_VALUE))
"""How far sums over columns are apart, in root mean squares: each of the statistics below exceeds it by chance with
probability 10^-12 divided by their number. 8.5, so that 73 columns are the fewest that can show a difference."""


def columns_differ(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two samples [k, n] differ, where the values of a column may depend on each other, and columns do not.

    `distinguishable` takes all values for independent: 148 rows that are functions of one opened word are then 148
    experiments, and chance looks like a leak. Here each column is one experiment. A statistic of a column is the number
    of its values with a bit, or a byte, or above a quantile of both samples. Without a leak the two columns of a number
    may be exchanged, so the differences d of a statistic have random signs, and |sum d| >= t sqrt(sum d^2) happens with
    probability 2 exp(-t^2 / 2) at most (Hoeffding), whatever the distribution. Fewer columns than 73 are not judged:
    then True.
    """
    n = first.shape[1]
    if n < COLUMNS_APART**2:
        return True
    return any(
        ((d := (a - b).astype(np.float64)).sum(1) ** 2 > COLUMNS_APART**2 * (d**2).sum(1)).any()
        for a, b in zip(_of_columns(first, second), _of_columns(second, first), strict=True)
    )


def _of_columns(values: np.ndarray, other: np.ndarray) -> Iterator[np.ndarray]:
    """Statistics of each column [statistics, n], as `columns_differ` compares them."""
    k, n = values.shape
    data = np.ascontiguousarray(values).view(np.uint8).reshape(k, n, -1)
    ones = []
    for place in range(data.shape[2]):
        at = data[:, :, place].astype(np.int64) * n + np.arange(n)
        counts = np.bincount(at.reshape(-1), minlength=256 * n).reshape(256, n)
        yield counts
        bits = _BITS.T @ counts
        ones.append(bits.sum(0, keepdims=True))
        yield bits
    yield np.sum(ones, axis=0)
    both = np.sort(np.concatenate([values, other], axis=None))
    yield np.stack([(values > both[len(both) * q // QUANTILES]).sum(0) for q in range(QUANTILES)])


def _from_even(counts: np.ndarray) -> np.ndarray:
    """For each row the p-value of Pearson's statistic against equal counts."""
    expected = counts.mean(axis=1, keepdims=True)
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-300)).sum(axis=1)
    return special.chdtrc(counts.shape[1] - 1, statistic)


def _same_distribution(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For each row the p-value of Pearson's statistic that two counts are of one distribution."""
    both = ours + theirs
    share = ours.sum(axis=1, keepdims=True) / np.maximum(1, both.sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = (ours - both * share) ** 2 / (both * share * (1 - share))
    statistic = np.where(both > 0, np.nan_to_num(parts), 0.0).sum(axis=1)
    return np.where((used := (both > 0).sum(axis=1)) > 1, special.chdtrc(np.maximum(1, used - 1), statistic), 1.0)


def apart_in_size(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of a two-sample Kolmogorov-Smirnov test, in the limit of many values."""
    first, second = np.sort(first), np.sort(second)
    places = np.concatenate([first, second])
    below = [np.searchsorted(values, places, side="right") / len(values) for values in (first, second)]
    size = len(first) * len(second) / (len(first) + len(second))
    return float(special.kolmogorov(size**0.5 * np.abs(below[0] - below[1]).max()))


SMALL = 8
"""All combinations of inputs up to this magnitude are tried, as far as a run has elements for them."""
AGAIN = 64
"""Elements of one run with the same inputs."""
RUNS = 4
AGAINST = 4
"""Runs in which bits of a draw must change nothing before they are reported as unused."""
SINGLES = 200
"""Runs in which a single element is at an edge, for protocols whose elements are not independent."""


class Outcomes:
    """The results of a protocol under test, compared with its reference.

    Args:
        protocol: the case's traced protocol, or one with a planted fault.
    """

    def __init__(self, protocol: Protocol, case: Case):
        self.protocol, self.case, self.elementwise = protocol, case, case.elementwise
        self._random = np.random.default_rng(case.seed)
        self._edges = constants_of(protocol.program)
        self._plain: dict[int, tuple[list[torch.Tensor], dict]] = {}
        self.tests = 0
        self.shortest_seconds = float("inf")
        """Seconds of the shortest run so far."""
        self.summary = self.draws_summary = ""

    def reference(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The exact results.

        Raises:
            ArgumentError: the reference gives something else than as many int64 tensors as the protocol has results.
        """
        found = self.case.reference(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(y, torch.Tensor) for y in found):
            raise ArgumentError("the reference gives a tensor, or a tuple of them")
        return tuple(y.to(torch.int64) for y in found)

    def spread(self) -> list[torch.Tensor]:
        """Inputs all over their range: a third at its edges and at the protocol's numbers, the others of all sizes."""
        return [_spread(g, g.size(self.protocol.n), self._random, self._edges) for g in self.protocol.given]

    def fill_inputs(self, values: Sequence[int]) -> list[torch.Tensor]:
        """Inputs whose elements all have these values."""
        sizes = [g.size(self.protocol.n) for g in self.protocol.given]
        return [torch.full(size, value) for size, value in zip(sizes, values, strict=True)]

    def play(
        self, inputs: Sequence[torch.Tensor], place: object, twice: bool = False, extreme: bool = False
    ) -> ProtocolRun:
        """One run, with the draws of this place."""
        start = time.monotonic()
        found = self.protocol.play(inputs, Draws((self.case.seed, place), extreme), twice)
        self.shortest_seconds = min(self.shortest_seconds, time.monotonic() - start)
        return found

    def play_often(self, inputs: Sequence[torch.Tensor], place: object, count: int) -> list[ProtocolRun]:
        """`count` runs of the same inputs."""
        draws = ManyDraws((self.case.seed, place), count)
        return [self.protocol.play(inputs, draws.run(i)) for i in range(count)]

    def check(self) -> Iterator[tuple[str, str]]:
        """The failures, as check and text; at most one of each kind."""
        right = True
        cases = self._cases()
        kinds = dict.fromkeys(kind for kind, *_ in cases)
        for i, (_, inputs, extreme) in enumerate(cases):
            played = self.play(inputs, ("result", i), twice=i == 0, extreme=extreme)
            wrong = self.first_difference(inputs, played)
            if wrong is not None and right:
                right = False
                yield "result", wrong[1]
        self.summary = f"{len(cases)} runs of {self.protocol.n} elements: {', '.join(kinds)}"
        self.draws_summary = (
            f"{RUNS} runs in which each input stands many times, and stands again; each draw with bits flipped"
        )
        inputs = self._repeated_inputs()
        runs = [self.play(inputs, ("draws", i)) for i in range(RUNS)]
        text = self._varying_result(inputs, runs)
        if text:
            yield "draws", text
        if self.case.uniform:
            yield from (("draws", text) for text in self._unused_draws())

    def _cases(self) -> list[tuple[str, list[torch.Tensor], bool]]:
        """Kinds of inputs, the inputs, and whether their draws are extreme."""
        extreme = self.case.exhaustive > 0
        cases = [("edges, all over the range", self.spread(), False) for _ in range(RUNS)]
        cases += [("the same with extreme draws", self.spread(), True) for _ in range(RUNS * extreme)]
        if self.elementwise:
            return [("small inputs", self._small(), False), *cases]
        count = max((len(_edges(g, self._edges)) for g in self.protocol.given), default=0)
        singles = [(self._single(i), bool(i % 2) and extreme) for i in range(min(count, SINGLES))]
        return cases + [("small ones but for one element", *single) for single in singles]

    def _single(self, i: int) -> list[torch.Tensor]:
        """Small numbers as inputs, with one element at an edge or at one of the protocol's numbers.

        Where a result depends on all elements, several at an edge would hide each other's effect.
        """
        found = []
        for j, g in enumerate(self.protocol.given):
            edges, size = _edges(g, self._edges), g.size(self.protocol.n)
            low, high = max(g.low, -SMALL), min(g.high, SMALL)
            some = self._random.integers(*((low, high) if low <= high else (g.low, g.low)), size.numel(), endpoint=True)
            if len(some):
                some[self._random.integers(len(some))] = edges[(i + 7 * j) % len(edges)]
            found.append(torch.from_numpy(some).view(size))
        return found

    def _small(self) -> list[torch.Tensor]:
        """Every combination of small inputs, repeated to the number of elements."""
        given = self.protocol.given
        most = SMALL
        while (2 * most + 1) ** len(given) > self.protocol.n and most > 1:
            most -= 1
        values = [[v for v in range(-most, most + 1) if g.low <= v <= g.high] or [g.low] for g in given]
        together = list(zip(*itertools.product(*values), strict=True))
        return [_cycle(column, g.size(self.protocol.n)) for column, g in zip(together, given, strict=True)]

    def _repeated_inputs(self) -> list[torch.Tensor]:
        inputs = self.spread()
        if not self.elementwise:
            return inputs
        distinct = max(1, self.protocol.n // AGAIN)
        return [x.reshape(-1)[:distinct].repeat_interleave(AGAIN + 1)[: x.numel()].view(x.shape).clone() if
                x.numel() <= distinct * (AGAIN + 1) else x for x in inputs]  # fmt: skip

    def _unused_draws(self) -> Iterator[str]:
        """Draws whose highest byte or lowest bit has no effect, in words."""
        program = self.protocol.program
        for at, node in enumerate(program.nodes):
            step = node.step
            if not isinstance(step, Draw) or is_tests(step.path):
                continue
            place = place_of(step, at < len(program.setup))
            width = 8 * step.dtype.itemsize
            sorts = step.name.rsplit("/", 1)[-1] in self.case.sorts
            for bits, said in ((0xFF << (width - 8), "highest byte"), (1, "lowest bit"))[: 1 if sorts else 2]:
                mask = as_signed(sum(bits << k for k in range(0, 64, width)))
                if not any(self._has_effect(i, place, mask) for i in range(AGAINST)):
                    owners = " and ".join(sorted(p.name for p in step.owners))
                    yield f"of {step.name}, which {owners} draw, the {said} changes nothing that is sent or learned"
                    break

    def _has_effect(self, i: int, place: tuple, mask: int) -> bool:
        """Whether bits of a draw change anything in the i-th run. With small shapes a draw may meet a factor 0."""
        draws = Draws((self.case.seed, "unused", i))
        if i not in self._plain:
            inputs = self.spread()
            self._plain[i] = inputs, observable_values(self.protocol.play(inputs, draws))
        inputs, plain = self._plain[i]
        return not runs_agree(plain, observable_values(self.protocol.play(inputs, FlippedDraws(draws, place, mask))))

    def first_difference(self, inputs: Sequence[torch.Tensor], played: ProtocolRun) -> tuple[int, str] | None:
        """The first element of a result that differs from the reference, and a text about it; None if none does."""
        expected = self.reference(inputs)
        if len(expected) != len(played.results):
            raise ArgumentError(f"the protocol has {len(played.results)} results, and the reference {len(expected)}")
        for i, ((_, y), wanted) in enumerate(zip(played.results, expected, strict=True)):
            if y.shape != wanted.shape:
                return 0, f"result {i} is of shape {list(y.shape)}, and the reference of {list(wanted.shape)}"
            off = _exceeds(y.to(torch.int64) - wanted, self.case.error)
            if bool(off.any()):
                at = int(off.reshape(-1).nonzero()[0])
                said = _element(inputs, at) if self.elementwise else "one of the inputs"
                share = float(off.double().mean())
                return at, (
                    f"result {i} for {said} is {int(y.reshape(-1)[at])}, and the reference's "
                    f"{int(wanted.reshape(-1)[at])} ({share:.1%} of the elements differ)"
                )
        return None

    def _varying_result(self, inputs: Sequence[torch.Tensor], runs: Sequence[ProtocolRun]) -> str:
        for i in range(len(runs[0].results)):
            results = torch.stack([run.results[i][1].to(torch.int64) for run in runs])
            lowest, highest = results.min(0).values, results.max(0).values
            if self.elementwise and runs[0].results[i][1].numel() == inputs[0].numel():
                groups = _groups(inputs)
                lowest, highest = _over(groups, lowest, "amin"), _over(groups, highest, "amax")
            apart = _exceeds(highest - lowest, self.case.varies).reshape(-1)
            if not bool(apart.any()):
                continue
            at = int(apart.nonzero()[0])
            said = _element(inputs, at) if self.elementwise else "the same inputs"
            ends = f"{int(lowest.reshape(-1)[at])} or {int(highest.reshape(-1)[at])}"
            text = f"result {i} for {said} is {ends}, as somebody draws"
            return text + self._deciding_draw(runs, results, lowest)
        return ""

    def _deciding_draw(self, runs: Sequence[ProtocolRun], results: torch.Tensor, lowest: torch.Tensor) -> str:
        """The draws that decide a varying result, and who knows them, in words."""
        if not self.elementwise:
            return ""
        high = (results > lowest).reshape(-1).numpy()
        best: tuple[float, str, str] = (P_VALUE, "", "")
        for party in runs[0].known:
            columns = [_columns(run, party, lowest.numel()) for run in runs]
            names = [known.name for known in _values_per_element(runs[0], party, lowest.numel())]
            for name, value in _sums(names, [np.concatenate(c) for c in zip(*columns, strict=True)]):
                for bits in (64, 1, 2, 8, 16, 20, 21, 32, 40, 52):
                    low = value & np.uint64((1 << bits) - 1)
                    self.tests += 1
                    p = apart_in_size(low[high], low[~high]) if high.any() else 1.0
                    if p < best[0]:
                        which = f"the low {bits} bits of " if bits < 64 else ""
                        best = (float(p), f"{which}{name}", party)
        return f"; {best[1]}, which {best[2]} knows, decides it" if best[1] else ""


def _exceeds(difference: torch.Tensor, most: int) -> torch.Tensor:
    return (difference > most) | (difference < -most)


def _values_per_element(run: ProtocolRun, party: str, n: int) -> list[KnownValue]:
    return [
        k
        for k in run.known[party]
        if k.how in ("drawn", "brought", "received") and not k.shows and k.value.numel() == n
    ]


def _columns(run: ProtocolRun, party: str, n: int) -> list[np.ndarray]:
    return [k.value.to(torch.int64).reshape(-1).numpy().view(np.uint64) for k in _values_per_element(run, party, n)]


def _sums(names: list[str], values: list[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    yield from zip(names, values, strict=True)
    if len(values) <= 12:
        for (one, a), (other, b) in itertools.combinations(zip(names, values, strict=True), 2):
            yield f"{one} + {other}", a + b


def _groups(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each element the number of its combination of inputs."""
    return torch.unique(torch.stack([x.reshape(-1) for x in inputs], 1), dim=0, return_inverse=True)[1]


def _over(groups: torch.Tensor, values: torch.Tensor, reduce: str) -> torch.Tensor:
    """For each element the least or largest value of its group."""
    flat = values.reshape(-1)
    start = torch.full((int(groups.max()) + 1,), 0, dtype=flat.dtype)
    found = start.scatter_reduce(0, groups, flat, reduce, include_self=False)
    return found[groups].view(values.shape)


def _element(inputs: Sequence[torch.Tensor], at: int) -> str:
    values = [int(x.reshape(-1)[at]) for x in inputs if x.numel() > at]
    return (
        "inputs " + ", ".join(map(str, values)) if len(values) > 1 else f"input {values[0]}" if values else "no input"
    )


def _cycle(values: Sequence[int], size: torch.Size) -> torch.Tensor:
    return torch.tensor(values).repeat(-(-size.numel() // len(values)))[: size.numel()].view(size)


def _spread(given: Given, size: torch.Size, random: np.random.Generator, own: Sequence[int]) -> torch.Tensor:
    count = size.numel()
    anywhere = random.integers(given.low, given.high, count, np.int64, endpoint=True)
    scaled = (anywhere >> random.integers(0, 63, count)).clip(given.low, given.high)
    edges = _edges(given, own)
    kinds = random.integers(0, 3, count)
    found = np.select([kinds == 0, kinds == 1], [edges[random.integers(0, len(edges), count)], scaled], anywhere)
    return torch.from_numpy(found).view(size)


def _edges(given: Given, own: Sequence[int]) -> np.ndarray:
    """Ends of the range, small numbers, the protocol's own and some powers of two, and their neighbours."""
    near = [0, 1, -1, 2, given.low, given.high, given.low + 1, given.high - 1]
    near += [sign * (1 << e) + d for e in (20, 40, 61) for d in (-1, 0, 1) for sign in (1, -1)]
    near += [sign * v + d for v in own for d in (-1, 0, 1) for sign in (1, -1)]
    return np.array([v for v in near if given.low <= v <= given.high], np.int64)


# Exhaustive tests on small domains, for cases that random draws rarely meet.
#
# The inputs are those near zero, near the ends of their range and near the protocol's numbers. One draw at a time takes
# all numbers between which carries start and end. Among them are the multiples of 2^(64 - w): for additions and
# comparisons they are a ring of w bits. The steps are the protocol's own; only the draws are given.

FILLINGS = (0, -1, None)
"""The values of all other draws; None for uniform ones."""
ELEMENTS = 1 << 15
"""The most elements of one run."""
CASES = 1 << 21
"""The most cases in all; more would take minutes."""
OWN = 2
"""How many of the protocol's numbers inputs and draws are tried near."""
WHOLE = 8
"""An input range of at most so many bits is tried as a whole; of several inputs all combinations."""
NAMED = 12
"""The most draws that go through their numbers; further draws are filled."""


@dataclass(frozen=True)
class _Mask:
    """A draw, or a row of one, with one number for each element."""

    place: Any
    row: int
    width: int
    name: str


class Exhaustive:
    """The test of an elementwise protocol on small domains.

    Args:
        bits: 2^bits numbers are tried near each place.

    Raises:
        ArgumentError: bits out of range, or too many cases.
    """

    def __init__(self, outcomes: Outcomes, bits: int, seed: int):
        if not 1 <= bits <= 8:
            raise ArgumentError(f"exhaustive= takes the bits of small domains, 1 to 8, or 0 for none; got {bits}")
        traced = outcomes.protocol
        self._outcomes, self._seed = outcomes, seed
        own = constants_of(traced.program)[:OWN]
        self._values = list(itertools.product(*(_values(g, bits, len(traced.given), own) for g in traced.given)))
        self._numbers = {width: _numbers_of(width, bits, own) for width in (32, 64)}
        self._n = 64 * -(-min(ELEMENTS, len(self._values) * len(self._numbers[64]) * len(FILLINGS)) // 64)
        self._traced = traced.with_size(self._n)
        every = list(_masks_of(self._traced))
        self._draws = [list(rows) for _, rows in itertools.groupby(every, lambda mask: mask.place)]
        self._masks = every[:NAMED]
        self._sizes = (len(FILLINGS), max(1, len(self._masks)), len(self._values), len(self._numbers[64]))
        self._cases = int(np.prod(self._sizes))
        if self._cases > CASES:
            raise ArgumentError(
                f"with exhaustive={bits} there are {self._cases} cases, of which {CASES} can be run: pass fewer bits"
            )
        most = f"{len(self._masks)} of {len(every)}" if len(every) > NAMED else f"{len(every)}"
        self.summary = (
            f"{len(self._values)} inputs with each of {most} draws at {len(self._numbers[64])} numbers, "
            f"the others zero, -1 and uniform: {self._cases} cases"
        )

    def check(self) -> Iterator[tuple[str, str]]:
        """The first failure, as check and text."""
        for first in range(0, self._cases, self._n):
            case = np.arange(first, first + self._n) % self._cases
            filling, mask, value, number = (torch.from_numpy(at) for at in np.unravel_index(case, self._sizes))
            columns = torch.tensor(self._values).T
            sizes = [g.size(self._n) for g in self._traced.given]
            inputs = [column[value].view(size) for column, size in zip(columns, sizes, strict=True)]
            draws = _Steered((self._seed, "exhaustive", first))
            for rows in self._draws:
                draws.fixed[repr(rows[0].place)] = self._steered_words(draws, rows, filling, mask, number)
            wrong = self._outcomes.first_difference(inputs, self._traced.play(inputs, draws))
            if wrong is not None:
                at, text = wrong[0] % self._n, wrong[1]
                yield "exhaustive", text + self._draws_of(int(filling[at]), int(mask[at]), int(number[at]))
                return

    def _steered_words(
        self, draws: Draws, rows: Sequence[_Mask], filling: torch.Tensor, mask: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        width = rows[0].width
        dtype = torch.int64 if width == 64 else torch.int32
        count = len(rows) * self._n
        uniform = draws.words(rows[0].place, count).to(dtype).view(len(rows), self._n)
        found = torch.where(filling == 0, torch.zeros_like(uniform), torch.where(filling == 1, -1, uniform))
        numbers = torch.tensor(self._numbers[width], dtype=dtype)[number]
        for i, row in enumerate(rows):
            if row in self._masks:
                found[i] = torch.where(mask == self._masks.index(row), numbers, found[i])
        return found.to(dtype).contiguous().view(-1).view(torch.int64)

    def _draws_of(self, filling: int, mask: int, number: int) -> str:
        if not self._masks:
            return ""
        chosen, filled = self._masks[mask], FILLINGS[filling]
        others = "uniform" if filled is None else str(filled)
        return f", where {chosen.name} is {self._numbers[chosen.width][number]} and all other draws are {others}"


def in_elements(traced: Protocol) -> bool:
    """Whether every input has n elements, so that each case can have its own element."""
    return all(given.size(traced.n).numel() == traced.n and callable(given.shape) for given in traced.given)


class _Steered(Draws):
    """Draws of which some are given by their places."""

    def __init__(self, seed: tuple):
        super().__init__(seed)
        self.fixed: dict[str, torch.Tensor] = {}

    def words(self, place: Any, count: int) -> torch.Tensor:
        given = self.fixed.get(repr(place))
        return super().words(place, count) if given is None else given


def _masks_of(traced: Protocol) -> Iterator[_Mask]:
    """The draws with a number for each element: halves of inputs, and draws with the elements as last dimension."""
    for i, given in enumerate(traced.given):
        if given.party == SHARED:
            yield _Mask(half_of(i), 0, 64, f"A's half of x{i}")
    for at, node in enumerate(traced.program.nodes):
        step = node.step
        if not isinstance(step, Draw) or step.dtype not in (torch.int64, torch.int32):
            continue
        if len(step.size) and step.size[-1] == traced.n:
            rows, name = step.size.numel() // traced.n, " of ".join(reversed(step.name.rsplit("/", 1)))
            for row in range(rows):
                which = f"{name} [{row}]" if rows > 1 else name
                yield _Mask(place_of(step, at < len(traced.program.setup)), row, 8 * step.dtype.itemsize, which)


def _near(centres: Sequence[int], half: int) -> list[int]:
    return list(dict.fromkeys(centre + d for centre in centres for d in range(-half, half)))


def _values(given: Given, bits: int, inputs: int, own: Sequence[int]) -> list[int]:
    """The values of one input: a small range as a whole; else near zero, its ends and the protocol's numbers."""
    if given.high - given.low < 1 << WHOLE // inputs:
        return list(range(given.low, given.high + 1))
    half = max(1, (1 << bits) // 2 // inputs**2)
    ends = [given.low + half, given.high + 1 - half]
    own = [sign * v for v in own for sign in (1, -1)] if inputs == 1 else []
    return [v for v in _near([0, *ends, *own], half) if given.low <= v <= given.high]


def _numbers_of(width: int, bits: int, own: Sequence[int]) -> list[int]:
    """The numbers of a draw: near zero, the sign change and the protocol's numbers, and multiples of a high power."""
    near = _near([0, 1 << (width - 1), *own, *(-v for v in own)], 1 << (bits - 1))
    ring = [k << (width - bits) for k in range(1 << bits)]
    sign = 1 << (width - 1)
    return [((v + sign) & ((1 << width) - 1)) - sign for v in [*near, *ring]]


# Pairs of secrets that a party must not tell apart: its own inputs and its results are the same for both.

CONSTANTS = 2
"""Additional pairs, with secrets at the protocol's numbers, where steps decide."""
GROUP = 24

Values = tuple[int, ...]
"""The value of each input, in all its elements."""
Pair = tuple[Values, Values]


def pairs_of(protocol: Protocol, outcomes: Outcomes, random: np.random.Generator, party: str) -> list[Pair]:
    """Pairs of secrets that differ most in lowest bits, signs, sizes, sums and zeros.

    Some further pairs have a secret at which a step of the protocol decides.
    """
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
    for weigh in (_low_bits, _signs, _sizes, _sums_of_secrets, _zeros):
        pair = max((p for p in wanted if p not in found), key=lambda p: (weigh(*p), _sizes(*p)), default=None)
        if pair is not None:
            found.append(pair)
    known = {values for pair in found for values in pair}
    for value in special:  # with a secret of another pair if possible, which costs only one further run
        at = [p for p in wanted if any(value in v for v in p) and p not in found]
        pair = max(at, key=lambda p: (bool(known & set(p)), any(set(v) == {value} for v in p)), default=None)
        if pair is not None:
            found.append(pair)
    return found[: outcomes.case.pairs]


def _candidates(
    protocol: Protocol, outcomes: Outcomes, random: np.random.Generator, party: str, special: list[int]
) -> list[tuple[Values, tuple]]:
    """Secrets, with the results that the party learns for each."""
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
        results = outcomes.reference(outcomes.fill_inputs(values))
        found.append((values, tuple(tuple(results[i].reshape(-1).tolist()) for i in learns)))
    return found


def _places(random: np.random.Generator, count: int, most: int) -> list[int]:
    """`most` different numbers below the count."""
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


def _sums_of_secrets(one: Values, other: Values) -> int:
    return ((sum(one) ^ sum(other)) & 1) + (one != other)


def _zeros(one: Values, other: Values) -> int:
    return sum((a == 0) != (b == 0) for a, b in zip(one, other, strict=True))
