"""What each party knows together: whether anything of it tells two secrets apart that it may not tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from .joint import JointView, Told
from .known import Played, side_by_side
from .outcomes import Outcomes
from .played import Protocol
from .said import Sentences
from .secrets import Pair, Values, pairs_of
from .uniform import not_uniform, told_apart

SAMPLES = 1 << 14
"""Elements of each message, at least, in all runs of one secret together."""
RUNS = 512
"""Runs of one secret, where each run is one experiment; fewer where they would be more than `VALUES` of one step."""
VALUES = 1 << 22


class Views:
    """The views of a protocol's parties.

    Where elements are no experiments, runs are: then a view is that of all runs, side by side.
    """

    def __init__(self, protocol: Protocol, outcomes: Outcomes):
        random = np.random.default_rng((outcomes.case.seed, 1))
        # Parties that have the same inputs and learn the same, as A and S nothing, may not tell the same secrets apart:
        # those that are played for one are looked at for the other.
        pairs: dict[tuple, list[Pair]] = {}
        self._pairs = {}
        for party in (p.name for p in protocol.parties):
            own = tuple(i for i, g in enumerate(protocol.given) if g.party == party)
            learned = tuple(i for i, owners in enumerate(protocol.learners) if party in owners)
            if (own, learned) not in pairs:
                pairs[own, learned] = pairs_of(protocol, outcomes, random, party)
            self._pairs[party] = pairs[own, learned]
        self._begin(outcomes)

    def _begin(self, outcomes: Outcomes) -> None:
        n = outcomes.protocol.n
        self._outcomes, self._uniform, self._n = outcomes, outcomes.case.uniform, n
        usual = max(1, SAMPLES // n) if outcomes.elementwise else _runs_of(outcomes.protocol)
        self._runs = outcomes.case.runs or usual
        self._played: dict[Values, list[Played]] = {}
        self._together: dict[Values, Played] = {}
        self._sentences = Sentences(outcomes)
        self._joint = JointView(outcomes, self._sentences, self._experiments, n if outcomes.elementwise else self._runs)
        self._tests = 0

    @classmethod
    def like(cls, other: Views, outcomes: Outcomes) -> Views:
        """The views of another protocol of the same parties, inputs and reference, for the same pairs of secrets."""
        found = cls.__new__(cls)
        found._pairs = other._pairs
        found._begin(outcomes)
        return found

    @property
    def tests(self) -> int:
        """P-values that were computed."""
        return self._tests + self._joint.tests

    @property
    def elements(self) -> int:
        """Of each message, in all runs of one secret."""
        return self._runs * self._n

    @property
    def seconds_needed(self) -> float:
        """About so long `check` takes, by the runs that were made."""
        secrets = {values for pairs in self._pairs.values() for pair in pairs for values in pair}
        return self._outcomes.took * self._runs * len(secrets) * 2

    @property
    def looked(self) -> tuple[str, str]:
        """What was done, of messages and of views."""
        pairs = ", ".join(f"{len(found)} for {party}" for party, found in sorted(self._pairs.items()))
        runs = f"{self._runs} runs of {self._n} elements for each secret; pairs of secrets: {pairs}"
        return f"uniform and alike: {runs}", "sums and products of bits, correlations: the same runs"

    def check(self, parties: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
        """What does not hold, as check and text: of each message the first, of each view what says most.

        Args:
            parties: whose views, one pair of secrets of each after the other; if it is not given all.
        """
        if parties is None:
            for party, pairs in self._pairs.items():
                yield from self._of_party(party, pairs)
            return
        chosen = [[(party, *pair) for pair in pairs] for party, pairs in self._pairs.items() if party in parties]
        for places in itertools.zip_longest(*chosen):
            for party, one, other in filter(None, places):
                yield from (("messages", text) for _, text in self._messages(party, one, other))
                if told := self._joint.told(party, one, other):
                    yield "view", told.text

    def _of_party(self, party: str, pairs: Sequence[Pair]) -> Iterator[tuple[str, str]]:
        said: set[str] = set()
        most = Told()
        for one, other in pairs:
            for name, text in self._messages(party, one, other):
                if name not in said:
                    said.add(name)
                    yield "messages", text
            most = max(most, self._joint.told(party, one, other), key=lambda told: (bool(told), told.share))
        if most:
            yield "view", most.text

    def _of(self, values: Values, count: int) -> list[Played]:
        """So many runs, at least, all of whose elements hold these values."""
        runs = self._played.setdefault(values, [])
        if len(runs) < count:
            inputs = self._outcomes.filled(values)
            if self._outcomes.elementwise:
                runs += [self._outcomes.play(inputs, (values, i)) for i in range(len(runs), count)]
            else:
                runs += self._outcomes.play_often(inputs, values, self._runs)
        return runs

    def _experiments(self, values: Values, count: int) -> list[Played]:
        """So many runs whose elements, along the last dimension, are experiments."""
        if self._outcomes.elementwise:
            return self._of(values, count)
        if values not in self._together:
            self._together[values] = side_by_side(self._of(values, self._runs)[: self._runs])
        return [self._together[values]]

    # Message by message.

    def _messages(self, party: str, one: Values, other: Values) -> Iterator[tuple[str, str]]:
        views = [_received(self._of(values, self._runs)[: self._runs], party) for values in (one, other)]
        first, second = self._sentences.secret(one), self._sentences.secret(other)
        for name in sorted(views[0].keys() | views[1].keys()):
            if name not in views[0] or name not in views[1]:
                yield name, f"{party} is sent {name} for one of {first}, {second} only"
                continue
            (a, shows), (b, _) = views[0][name], views[1][name]
            self._tests += 2 * (a.dtype.itemsize * 9 + 2)
            text = told_apart(a, b)
            if text:
                said = f"{party} tells {first} and {second} apart by {name}: {text}"
                yield name, said + self._sentence(party, name)
            elif self._uniform and not shows:
                text = not_uniform(a) or not_uniform(b)
                if text:
                    yield name, f"{name} is not uniform to {party}: {text}{self._sentence(party, name)}"

    def _sentence(self, party: str, name: str) -> str:
        """What of the inputs a bit of a message agrees with."""
        if not self._outcomes.elementwise:
            return ""
        inputs, run = self._sentences.random_run()
        values = [k for k in run.known[party] if k.how == "received" and k.name == name]
        return self._sentences.of_values(values, inputs)[0]


def _runs_of(protocol: Protocol) -> int:
    """Runs of one secret, where each run is one experiment."""
    sizes = [y.numel() for node in protocol.program.nodes for y in node.results if isinstance(y, torch.Tensor)]
    return min(RUNS, max(128, VALUES // max(sizes, default=1)))


def _received(runs: Sequence[Played], party: str) -> dict[str, tuple[np.ndarray, str]]:
    found: dict[str, list[np.ndarray]] = {}
    shows: dict[str, str] = {}
    for run in runs:
        for k in run.known[party]:
            if k.how == "received" and k.value.numel():
                found.setdefault(k.name, []).append(k.value.contiguous().numpy().reshape(-1))
                shows[k.name] = k.shows
    return {name: (np.concatenate(parts), shows[name]) for name, parts in found.items()}
