"""What each party knows together: whether anything of it tells two secrets apart that it may not tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .lined import plane_of, rows_of, unpacked, whole
from .outcomes import Outcomes
from .played import Known, Played, Protocol
from .predicates import best
from .spans import broken, differing_correlation, numbers
from .uniform import SIGMAS, not_uniform, told_apart

SAMPLES = 1 << 14
"""Elements of each message, at least, in all runs of one secret together."""
MOST_RUNS = 128
"""Runs of one secret, where each run is one experiment."""
PAIRS = 4
ALL_PLANES = 1500
"""Bits of a view up to which all planes are taken; of larger ones those in which carries do not hide relations."""
LIMIT = 3000
SPARE = 128
"""Elements beyond the bits of a view: of so many fewer random bits some sum is constant with probability 2^-128."""
MOST_SUMS = 200
"""Pairs of values whose sum and difference are looked at."""
PRODUCTS = 40
"""Lowest bits up to which all their products are taken too."""

Values = tuple[int, ...]
"""What each input is, in all its elements."""


@dataclass(frozen=True)
class _Told:
    """That secrets are told apart, and how often what tells them agrees with a sentence about random inputs."""

    text: str = ""
    share: float = 0.5

    def __bool__(self) -> bool:
        return bool(self.text)


class Views:
    """The views of a protocol's parties.

    Args:
        uniform, seed: as of `check_protocol`.
    """

    def __init__(self, protocol: Protocol, outcomes: Outcomes, uniform: bool, seed: int):
        self._protocol, self._outcomes, self._uniform = protocol, outcomes, uniform
        self._random = np.random.default_rng((seed, 1))
        self._names = ["x"] if len(protocol.given) == 1 else [f"x{i}" for i in range(len(protocol.given))]
        self.tests = 0
        self._runs = (
            max(1, SAMPLES // protocol.n) if outcomes.elementwise else min(MOST_RUNS, 2 * SAMPLES // protocol.n + 1)
        )
        self._played: dict[Values, list[Played]] = {}
        self._pairs = {party.name: self._pairs_of(party.name) for party in protocol.parties}

    @property
    def elements(self) -> int:
        """Of each message, in all runs of one secret."""
        return self._runs * self._protocol.n

    @property
    def seconds_needed(self) -> float:
        """About so long `check` takes, by the runs that were made."""
        secrets = {values for pairs in self._pairs.values() for pair in pairs for values in pair}
        return self._outcomes.took * self._runs * len(secrets) * 2

    @property
    def looked(self) -> tuple[str, str]:
        """What was done, of messages and of views."""
        pairs = ", ".join(f"{len(found)} for {party}" for party, found in sorted(self._pairs.items()))
        runs = f"{self._runs} runs of {self._protocol.n} elements for each secret; pairs of secrets: {pairs}"
        return f"uniform and alike: {runs}", "sums and products of bits, correlations: the same runs"

    def check(self) -> Iterator[tuple[str, str]]:
        """What does not hold, as check and text: of each message the first, of each view what says most."""
        for party, pairs in self._pairs.items():
            said: set[str] = set()
            most = _Told()
            for one, other in pairs:
                runs = self._of(one), self._of(other)
                for name, text in self._messages(party, one, other, *runs):
                    if name not in said:
                        said.add(name)
                        yield "messages", text
                if self._outcomes.elementwise:
                    found = self._together(party, one, other, runs[0][0], runs[1][0])
                    most = max(most, found, key=lambda f: (bool(f.text), f.share))
            if most.text:
                yield "view", most.text

    def _of(self, values: Values) -> list[Played]:
        if values not in self._played:
            inputs = self._outcomes.filled(values)
            self._played[values] = [self._outcomes.play(inputs, (values, i)) for i in range(self._runs)]
        return self._played[values]

    # Which secrets a party may not tell apart.

    def _pairs_of(self, party: str) -> list[tuple[Values, Values]]:
        alike: dict[tuple, list[Values]] = {}
        own = [i for i, g in enumerate(self._protocol.given) if g.party == party]
        for values, learned in self._candidates(party):
            alike.setdefault((tuple(values[i] for i in own), learned), []).append(values)
        wanted = []
        for group in alike.values():
            few = group if len(group) <= 24 else [group[i] for i in self._random.permutation(len(group))[:24]]
            wanted += itertools.combinations(few, 2)
        if not wanted:
            return []
        found: list[tuple[Values, Values]] = []
        for weigh in (_low_bits, _signs, _sizes, _sums):
            pair = max((p for p in wanted if p not in found), key=lambda p: (weigh(*p), _sizes(*p)), default=None)
            if pair is not None:
                found.append(pair)
        return found[:PAIRS]

    def _candidates(self, party: str) -> list[tuple[Values, tuple]]:
        """Secrets, and what the party learns of each."""
        pools = []
        for g in self._protocol.given:
            near = [0, 1, -1, 2, 3, -7, (1 << 20) + 1, -(1 << 20), 1 << 40, g.low, g.high, g.high - 1]
            pools.append(sorted({v for v in near if g.low <= v <= g.high}))
        every = list(itertools.product(*pools))
        most = min(len(every), self._protocol.n if self._outcomes.elementwise else 64)
        chosen = [every[i] for i in self._random.permutation(len(every))[:most]]
        learns = [i for i, owners in enumerate(self._protocol.learners) if party in owners]
        if not learns:
            return [(values, ()) for values in chosen]
        if self._outcomes.elementwise:
            columns = [list(column) for column in zip(*chosen, strict=True)]
            sizes = [g.size(self._protocol.n) for g in self._protocol.given]
            inputs = [
                torch.tensor(column).repeat(-(-size.numel() // len(column)))[: size.numel()].view(size)
                for column, size in zip(columns, sizes, strict=True)
            ]
            results = [self._outcomes.reference(inputs)[i].reshape(-1) for i in learns]
            return [(values, tuple(int(y[at]) for y in results)) for at, values in enumerate(chosen)]
        found = []
        for values in chosen:
            results = self._outcomes.reference(self._outcomes.filled(values))
            found.append((values, tuple(tuple(results[i].reshape(-1).tolist()) for i in learns)))
        return found

    # Message by message.

    def _messages(
        self, party: str, one: Values, other: Values, first: list[Played], second: list[Played]
    ) -> Iterator[tuple[str, str]]:
        views = [_received(runs, party) for runs in (first, second)]
        for name in sorted(views[0].keys() | views[1].keys()):
            if name not in views[0] or name not in views[1]:
                yield name, f"{party} is sent {name} for one of {self._said(one)}, {self._said(other)} only"
                continue
            (a, shows), (b, _) = views[0][name], views[1][name]
            self.tests += 2 * (a.dtype.itemsize * 9 + 2)
            text = told_apart(a, b)
            if text:
                said = f"{party} tells {self._said(one)} and {self._said(other)} apart by {name}: {text}"
                yield name, said + self._sentence(party, name)
            elif self._uniform and not shows:
                text = not_uniform(a) or not_uniform(b)
                if text:
                    yield name, f"{name} is not uniform to {party}: {text}{self._sentence(party, name)}"

    def _sentence(self, party: str, name: str) -> str:
        """What of the inputs a bit of a message agrees with."""
        if not self._outcomes.elementwise:
            return ""
        inputs = self._outcomes.spread()
        run = self._outcomes.play(inputs, "sentence")
        return self._best([k for k in run.known[party] if k.how == "received" and k.name == name], inputs)[0]

    def _best(self, values: Sequence[Known], inputs: Sequence[torch.Tensor]) -> tuple[str, float]:
        """What of random inputs the bits of some values agree with, in words, and how often."""
        found = ("", 0.5, 0.0, "")
        for known in values:
            for row, said in rows_of(known, self._protocol.n, all_planes=True):
                bits = unpacked(row, self._protocol.n)
                sentence, share, sigmas = best(bits, [x.reshape(-1) for x in inputs], self._names)
                if sentence and share > found[1]:
                    found = (sentence, share, sigmas, said)
        return f"; {found[3]} says '{found[0]}' in {found[1]:.1%} of random inputs" if found[0] else "", found[1]

    # All of a view together.

    def _together(self, party: str, one: Values, other: Values, first: Played, second: Played) -> _Told:
        return self._sums(party, one, other, first, second) or self._relation(party, one, other, first, second)

    def _sums(self, party: str, one: Values, other: Values, first: Played, second: Played) -> _Told:
        """Whether a message tells the secrets apart once something that its receiver knows is taken off or added."""
        for (name, a), (_, b) in zip(_of_two(first, party), _of_two(second, party), strict=False):
            self.tests += 10
            text = told_apart(a, b)
            if text:
                sentence, share = self._of_sum(party, name)
                said = f"{party} tells {self._said(one)} and {self._said(other)} apart by {name}: {text}{sentence}"
                return _Told(said, share)
        return _Told()

    def _of_sum(self, party: str, name: str) -> tuple[str, float]:
        inputs = self._outcomes.spread()
        run = self._outcomes.play(inputs, "sentence")
        value = next(v for said, v in _of_two(run, party) if said == name)
        return self._best([Known(name, "received", torch.from_numpy(value))], inputs)

    def _relation(self, party: str, one: Values, other: Values, first: Played, second: Played) -> _Told:
        length = 64 * -(-self._protocol.n // 64)
        for products in (False, True):
            a, names = self._vectors(first, party, products)
            b, _ = self._vectors(second, party, products)
            if len(a) != len(b) or not len(a):
                continue
            taken, where = broken(numbers(a), numbers(b), length), one
            if taken is None:
                taken, where = broken(numbers(b), numbers(a), length), other
            if taken is not None:
                parts = [names[i] for i in taken]
                said = " + ".join(parts[:6]) + (f" and {len(parts) - 6} more bits" if len(parts) > 6 else "")
                sentence, share = self._sum(party, taken, products)
                return _Told(
                    f"{party} tells {self._said(one)} and {self._said(other)} apart: {said} is the same in every run "
                    f"of {self._said(where)}{sentence}",
                    share,
                )
        a, names = self._vectors(first, party, False, sent=False, few=True)
        b, _ = self._vectors(second, party, False, sent=False, few=True)
        if len(a) and len(a) == len(b):
            sigmas, (i, j) = differing_correlation(a, b)
            self.tests += 1
            if sigmas > SIGMAS + 0.5:
                names = [*names, "a constant"]
                return _Told(
                    f"{party} tells {self._said(one)} and {self._said(other)} apart: {names[i]} and {names[j]} are "
                    f"correlated differently, by {sigmas:.0f} standard deviations"
                )
        return _Told()

    def _sum(self, party: str, taken: Sequence[int], products: bool) -> tuple[str, float]:
        """What of the inputs a sum of bits agrees with."""
        inputs = self._outcomes.spread()
        vectors, _ = self._vectors(self._outcomes.play(inputs, "sentence"), party, products)
        bits = unpacked(np.bitwise_xor.reduce(vectors[list(taken)], axis=0), self._protocol.n)
        sentence, share, _ = best(bits, [x.reshape(-1) for x in inputs], self._names)
        return f"; it says '{sentence}' in {share:.1%} of random inputs" if sentence else "", share

    def _vectors(
        self, run: Played, party: str, products: bool, sent: bool = True, few: bool = False
    ) -> tuple[np.ndarray, list[str]]:
        known = [k for k in run.known[party] if sent or k.how != "sent"]
        aligned = [k for k in known if whole(k.value, self._protocol.n) is not None]
        every = not few and not products and 64 * len(aligned) <= ALL_PLANES
        found, names = [], []
        for k in aligned:
            for row, said in rows_of(k, self._protocol.n, every, lowest=products):
                found.append(row)
                names.append(said)
        order = sorted(range(len(found)), key=lambda i: plane_of(names[i]))
        most = min(LIMIT, max(0, self._protocol.n - SPARE))
        found, names = [found[i] for i in order][:most], [names[i] for i in order][:most]
        if products:
            if len(found) > PRODUCTS or len(found) * (len(found) + 1) // 2 > most:
                return np.empty((0, 0), np.uint8), []
            for i, j in itertools.combinations(range(len(names)), 2):
                found.append(found[i] & found[j])
                names.append(f"{names[i]} * {names[j]}")
        return (np.stack(found) if found else np.empty((0, 0), np.uint8)), names

    def _said(self, values: Values) -> str:
        return ", ".join(f"{name} = {value}" for name, value in zip(self._names, values, strict=True))


def _low_bits(one: Values, other: Values) -> int:
    return sum((a ^ b) & 1 for a, b in zip(one, other, strict=True))


def _signs(one: Values, other: Values) -> int:
    return sum((a < 0) != (b < 0) for a, b in zip(one, other, strict=True))


def _sizes(one: Values, other: Values) -> int:
    return sum((a - b).bit_length() for a, b in zip(one, other, strict=True))


def _sums(one: Values, other: Values) -> int:
    return ((sum(one) ^ sum(other)) & 1) + (one != other)


def _received(runs: Sequence[Played], party: str) -> dict[str, tuple[np.ndarray, str]]:
    found: dict[str, list[np.ndarray]] = {}
    shows: dict[str, str] = {}
    for run in runs:
        for k in run.known[party]:
            if k.how == "received" and k.value.numel():
                found.setdefault(k.name, []).append(k.value.contiguous().numpy().reshape(-1))
                shows[k.name] = k.shows
    return {name: (np.concatenate(parts), shows[name]) for name, parts in found.items()}


def _of_two(run: Played, party: str) -> Iterator[tuple[str, np.ndarray]]:
    """Sums and differences of a message and another value that its receiver has of each element."""
    known = [k for k in run.known[party] if k.how != "sent" and k.value.dtype in (torch.int64, torch.int32)]
    pairs = [
        (k, other)
        for i, k in enumerate(known)
        for j, other in enumerate(known)
        if k.how == "received" and i != j and (other.how != "received" or i < j)
        and (k.value.shape, k.value.dtype) == (other.value.shape, other.value.dtype)
    ]  # fmt: skip
    for k, other in pairs[:MOST_SUMS]:
        for sign, value in (("+", k.value + other.value), ("-", k.value - other.value)):
            yield f"{k.name} {sign} {other.name}", value.contiguous().numpy().reshape(-1)
