"""Whether results are the reference's, and the same whatever anybody draws."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..choreography.steps import Draw
from ..errors import ArgumentError
from ..ring import signed
from .case import Case
from .constants import constants_of
from .draws import Draws, Flipped, ManyDraws, place_of
from .known import Known, Played, alike, is_tests, seen
from .played import Given, Protocol
from .uniform import P_VALUE, apart_in_size

SMALL = 8
"""All inputs of this magnitude are tried together, as far as they are no more than a run has elements."""
AGAIN = 64
"""Elements of one run that hold the same inputs."""
RUNS = 4
AGAINST = 4
"""Runs in which a draw has to change nothing before that is said."""
SINGLES = 200
"""Runs in which one element alone is at an edge, where elements are not independent."""


class Outcomes:
    """The results of a protocol under test, beside its reference's.

    Args:
        protocol: the case's, traced, or one with a fault.
    """

    def __init__(self, protocol: Protocol, case: Case):
        self.protocol, self.case, self.elementwise = protocol, case, case.elementwise
        self._random = np.random.default_rng(case.seed)
        self._edges = constants_of(protocol.program)
        self._plain: dict[int, tuple[list[torch.Tensor], dict]] = {}
        self.tests = 0
        self.took = float("inf")
        """Seconds of the shortest run so far."""
        self.looked = self.looked_draws = ""

    def reference(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What each result has to be.

        Raises:
            ArgumentError: the reference gives something else than as many int64 tensors as the protocol has results.
        """
        found = self.case.reference(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(y, torch.Tensor) for y in found):
            raise ArgumentError("the reference gives a tensor, or a tuple of them")
        return tuple(y.to(torch.int64) for y in found)

    def spread(self) -> list[torch.Tensor]:
        """Inputs all over their range: a third at its edges and the protocol's own numbers, the others of all sizes."""
        return [_spread(g, g.size(self.protocol.n), self._random, self._edges) for g in self.protocol.given]

    def filled(self, values: Sequence[int]) -> list[torch.Tensor]:
        """Inputs all of whose elements are these."""
        sizes = [g.size(self.protocol.n) for g in self.protocol.given]
        return [torch.full(size, value) for size, value in zip(sizes, values, strict=True)]

    def play(self, inputs: Sequence[torch.Tensor], place: object, twice: bool = False, extreme: bool = False) -> Played:
        """A run, under the draws of this place."""
        start = time.monotonic()
        found = self.protocol.play(inputs, Draws((self.case.seed, place), extreme), twice)
        self.took = min(self.took, time.monotonic() - start)
        return found

    def play_often(self, inputs: Sequence[torch.Tensor], place: object, count: int) -> list[Played]:
        """So many runs of the same inputs."""
        draws = ManyDraws((self.case.seed, place), count)
        return [self.protocol.play(inputs, draws.run(i)) for i in range(count)]

    def check(self) -> Iterator[tuple[str, str]]:
        """What does not hold, as check and text; one of each kind."""
        right = True
        cases = self._cases()
        kinds = dict.fromkeys(kind for kind, *_ in cases)
        for i, (_, inputs, extreme) in enumerate(cases):
            played = self.play(inputs, ("result", i), twice=i == 0, extreme=extreme)
            wrong = self.first_wrong(inputs, played)
            if wrong is not None and right:
                right = False
                yield "result", wrong[1]
        self.looked = f"{len(cases)} runs of {self.protocol.n} elements: {', '.join(kinds)}"
        self.looked_draws = (
            f"{RUNS} runs in which each input stands many times, and stands again; each draw with bits flipped"
        )
        inputs = self._repeated()
        runs = [self.play(inputs, ("draws", i)) for i in range(RUNS)]
        text = self._varying(inputs, runs)
        if text:
            yield "draws", text
        if self.case.uniform:
            yield from (("draws", text) for text in self._unused())

    def _cases(self) -> list[tuple[str, list[torch.Tensor], bool]]:
        """Inputs of all kinds, and whether draws are extreme with them."""
        extreme = self.case.exhaustive > 0
        cases = [("edges, all over the range", self.spread(), False) for _ in range(RUNS)]
        cases += [("the same with extreme draws", self.spread(), True) for _ in range(RUNS * extreme)]
        if self.elementwise:
            return [("small inputs", self._small(), False), *cases]
        count = max((len(_edges(g, self._edges)) for g in self.protocol.given), default=0)
        singles = [(self._single(i), bool(i % 2) and extreme) for i in range(min(count, SINGLES))]
        return cases + [("small ones but for one element", *single) for single in singles]

    def _single(self, i: int) -> list[torch.Tensor]:
        """Inputs of small numbers, of which one element is at an edge or at a number of the protocol's own: where a
        result depends on all elements, many at their edges hide what each does."""
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
        """Every combination of small inputs, over and over."""
        given = self.protocol.given
        most = SMALL
        while (2 * most + 1) ** len(given) > self.protocol.n and most > 1:
            most -= 1
        values = [[v for v in range(-most, most + 1) if g.low <= v <= g.high] or [g.low] for g in given]
        together = list(zip(*itertools.product(*values), strict=True))
        return [_cycled(column, g.size(self.protocol.n)) for column, g in zip(together, given, strict=True)]

    def _repeated(self) -> list[torch.Tensor]:
        inputs = self.spread()
        if not self.elementwise:
            return inputs
        distinct = max(1, self.protocol.n // AGAIN)
        return [x.reshape(-1)[:distinct].repeat_interleave(AGAIN + 1)[: x.numel()].view(x.shape).clone() if
                x.numel() <= distinct * (AGAIN + 1) else x for x in inputs]  # fmt: skip

    def _unused(self) -> Iterator[str]:
        """Draws of which nothing counts, or not the highest byte, or not the lowest bit."""
        program = self.protocol.program
        for at, node in enumerate(program.nodes):
            step = node.step
            if not isinstance(step, Draw) or is_tests(step.path):
                continue
            place = place_of(step, at < len(program.setup))
            width = 8 * step.dtype.itemsize
            sorts = step.name.rsplit("/", 1)[-1] in self.case.sorts
            for bits, said in ((0xFF << (width - 8), "highest byte"), (1, "lowest bit"))[: 1 if sorts else 2]:
                mask = signed(sum(bits << k for k in range(0, 64, width)))
                if not any(self._changed(i, place, mask) for i in range(AGAINST)):
                    owners = " and ".join(sorted(p.name for p in step.owners))
                    yield f"of {step.name}, which {owners} draw, the {said} changes nothing that is sent or learned"
                    break

    def _changed(self, i: int, place: tuple, mask: int) -> bool:
        """Whether these bits of a draw change anything in the i-th run; of small shapes what a draw meets may be 0."""
        draws = Draws((self.case.seed, "unused", i))
        if i not in self._plain:
            inputs = self.spread()
            self._plain[i] = inputs, seen(self.protocol.play(inputs, draws))
        inputs, plain = self._plain[i]
        return not alike(plain, seen(self.protocol.play(inputs, Flipped(draws, place, mask))))

    def first_wrong(self, inputs: Sequence[torch.Tensor], played: Played) -> tuple[int, str] | None:
        """The first element of a result that is not the reference's, and what it is; None where all are."""
        expected = self.reference(inputs)
        if len(expected) != len(played.results):
            raise ArgumentError(f"the protocol has {len(played.results)} results, and the reference {len(expected)}")
        for i, ((_, y), wanted) in enumerate(zip(played.results, expected, strict=True)):
            if y.shape != wanted.shape:
                return 0, f"result {i} is of shape {list(y.shape)}, and the reference of {list(wanted.shape)}"
            off = _beyond(y.to(torch.int64) - wanted, self.case.error)
            if bool(off.any()):
                at = int(off.reshape(-1).nonzero()[0])
                said = _element(inputs, at) if self.elementwise else "one of the inputs"
                share = float(off.double().mean())
                return at, (
                    f"result {i} for {said} is {int(y.reshape(-1)[at])}, and the reference's "
                    f"{int(wanted.reshape(-1)[at])} ({share:.1%} of the elements differ)"
                )
        return None

    def _varying(self, inputs: Sequence[torch.Tensor], runs: Sequence[Played]) -> str:
        for i in range(len(runs[0].results)):
            results = torch.stack([run.results[i][1].to(torch.int64) for run in runs])
            lowest, highest = results.min(0).values, results.max(0).values
            if self.elementwise and runs[0].results[i][1].numel() == inputs[0].numel():
                groups = _groups(inputs)
                lowest, highest = _over(groups, lowest, "amin"), _over(groups, highest, "amax")
            apart = _beyond(highest - lowest, self.case.varies).reshape(-1)
            if not bool(apart.any()):
                continue
            at = int(apart.nonzero()[0])
            said = _element(inputs, at) if self.elementwise else "the same inputs"
            ends = f"{int(lowest.reshape(-1)[at])} or {int(highest.reshape(-1)[at])}"
            text = f"result {i} for {said} is {ends}, as somebody draws"
            return text + self._whose(runs, results, lowest)
        return ""

    def _whose(self, runs: Sequence[Played], results: torch.Tensor, lowest: torch.Tensor) -> str:
        """Which draws decide it, and who knows them."""
        if not self.elementwise:
            return ""
        high = (results > lowest).reshape(-1).numpy()
        best: tuple[float, str, str] = (P_VALUE, "", "")
        for party in runs[0].known:
            columns = [_columns(run, party, lowest.numel()) for run in runs]
            names = [known.name for known in _aligned(runs[0], party, lowest.numel())]
            for name, value in _sums(names, [np.concatenate(c) for c in zip(*columns, strict=True)]):
                for bits in (64, 1, 2, 8, 16, 20, 21, 32, 40, 52):
                    low = value & np.uint64((1 << bits) - 1)
                    self.tests += 1
                    p = apart_in_size(low[high], low[~high]) if high.any() else 1.0
                    if p < best[0]:
                        which = f"the low {bits} bits of " if bits < 64 else ""
                        best = (float(p), f"{which}{name}", party)
        return f"; {best[1]}, which {best[2]} knows, decides it" if best[1] else ""


def _beyond(difference: torch.Tensor, most: int) -> torch.Tensor:
    return (difference > most) | (difference < -most)


def _aligned(run: Played, party: str, n: int) -> list[Known]:
    return [
        k
        for k in run.known[party]
        if k.how in ("drawn", "brought", "received") and not k.shows and k.value.numel() == n
    ]


def _columns(run: Played, party: str, n: int) -> list[np.ndarray]:
    return [k.value.to(torch.int64).reshape(-1).numpy().view(np.uint64) for k in _aligned(run, party, n)]


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


def _cycled(values: Sequence[int], size: torch.Size) -> torch.Tensor:
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
