"""SecSV (Zheng, Cao and Yoshikawa, 2023), to be read beside the paper; numbers are steps, as its text cites them.

| paper | here |
| --- | --- |
| Section 3, the single-round Shapley value | `values.shapley`; `settings.ESTIMATORS` takes fewer coalitions |
| Algorithms 1 and 3, HESV and SecSV | `value_rounds`; step 3 in `secsv.py` and `hesv.py` |
| Algorithm 2, secure testing under HESV | `test_encrypted` |
| Algorithm 4, secure testing under SecSV | `test_shared` |
| Algorithm 5, Matrix Reducing | `sectorch.ckks.linalg` |
| Algorithm 6, SampleSkip | `Utilities`, in ascending sizes; `sample_skip` |
| Algorithm 7, skippable samples | `skippable` |

What the servers and a client send to each other in a step is a protocol of `secsv.py` or of `hesv.py`. All parties run
the same lines: in one process, or each in its own (`experiment.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import or_
from typing import Any

from ...choreography import Located
from ...federated.folder import forked
from .settings import Route, Settings, estimate
from .testers import Spent, Tester


def value_rounds(rounds: Sequence[Utilities], how: Settings) -> Iterator[dict[int, float]]:
    """Algorithms 1 and 3, steps 4 to 10: the clients' single-round values, round by round.

    Args:
        rounds: v of each round's coalitions, which are tested as they are asked for.

    The federated values are their sums (`values.total`).
    """
    for t, v in enumerate(rounds):  # 4 of Algorithm 1: each round
        yield estimate(how.estimator, v.players, v.ask, budget=how.budget, seed=how.seed + t)  # 5-9: all coalitions


class Utilities:
    """Algorithm 6: the utilities v of one round's coalitions, each tested once, small ones first.

    Args:
        players: numbers of the clients that attended.
        samples: |D|, how many test samples there are.
        tester: gives a tester that has begun this round; called only if something is left to test.
        records: what was tested before.
        keep: called with each new record, before it counts.
        nobody: gives v of nobody: the utility of the model that the round began with.
    """

    def __init__(
        self, players: Sequence[int], samples: int, tester: Callable[[], Tester], how: Settings,
        records: Sequence[dict] = (), keep: Callable[[dict], None] = lambda record: None,
        nobody: Callable[[], float] = lambda: 0.0,
    ):  # fmt: skip
        self.players, self._samples, self._tester, self._how, self._keep = list(players), samples, tester, how, keep
        self._nobody = nobody
        self.records: dict[int, dict] = {}
        self._correct: dict[int, int] = {}  # 1: S -> the samples that theta_S classifies correctly
        self.begun: list[dict] = []
        for record in records:
            self._take(record)

    def ask(self, coalitions: Sequence[int]) -> dict[int, float]:
        """Utilities of some coalitions; those of one size may go to several processes."""
        processes = self._how.processes if self._how.parallel == "subsets" else 1
        missing = sorted({c for c in coalitions if c and c not in self.records}, key=lambda c: (c.bit_count(), c))
        if len(missing) > 1 and processes > 1:
            tester = self._tester()
            with Spent() as spent:
                tester.prepare()
            if spent.products:
                self.began(spent)
        for _, wave in groupby(missing, key=int.bit_count):  # single models first, then ascending sizes
            tester = self._tester()
            forked(list(wave), lambda c: self._test(tester, c), processes, self._finished)
        return {c: self.value(c) for c in coalitions}

    def _test(self, tester: Tester, coalition: int) -> Iterator[dict]:
        with Spent() as spent:
            skipping = self._how.skipping if tester.skips else "never"
            found = sample_skip(tester, coalition, (1 << self._samples) - 1, self._correct, skipping)
        yield {"coalition": coalition, **found, **spent.record()}

    def value(self, coalition: int) -> float:
        """v of a coalition that was tested, or of nobody."""
        return self.records[coalition]["right"] / self._samples if coalition else self.nobody

    @cached_property
    def nobody(self) -> float:
        """The utility of the model that the round began with."""
        return self._nobody()

    def __call__(self, coalition: int) -> float:
        return self.ask([coalition])[coalition]

    def began(self, spent: Spent) -> None:
        """The round's models were encrypted: what that cost."""
        record = {"coalition": 0, **spent.record()}
        self._keep(record)
        self.begun.append(record)

    def _finished(self, record: dict) -> None:
        self._keep(record)
        self._take(record)

    def _take(self, record: dict) -> None:
        if record["coalition"] == 0:
            self.begun.append(record)
            return
        self.records[record["coalition"]] = record
        if record["samples"] is not None:
            self._correct[record["coalition"]] = int(record["samples"], 16)


def sample_skip(
    tester: Tester, coalition: int, everything: int, correct: Mapping[int, int], skipping: str
) -> dict[str, Any]:  # fmt: skip
    """Algorithm 6, for one coalition: the samples that its model classifies correctly, most of them untested.

    Args:
        everything: all samples.
        correct: as of `skippable`.
        skipping: one of `settings.SKIPPING`; "saving" tests everything where the rest takes as many ciphertexts.
    """
    known = skippable(coalition, correct) if skipping != "never" else 0  # 8: none of a single model
    rest = everything & ~known  # 9: the discriminative samples
    skips = not known or skipping == "always" or not rest or tester.saves(coalition, everything, rest)
    skipped, rest = (known, rest) if skips else (0, everything)
    samples, right = tester.test(coalition, rest)  # 3, 10: Algorithm 4, or 2
    samples = None if samples is None else samples + skipped  # 11: two sets without a sample in common
    return {
        "right": right + skipped.bit_count(), "samples": None if samples is None else hex(samples),
        "tested": rest.bit_count(), "skippable": known.bit_count(), "skipped": hex(skipped),
    }  # fmt: skip


def skippable(mask: int, correct: Mapping[int, int]) -> int:
    """Algorithm 7: the union over pairs (A, B), A + B = S, of the samples that both classify correctly.

    A set of samples is an integer, bit k standing for sample k. For linear classifiers the aggregated model classifies
    them correctly as well (Theorem 6.3): the score of every class is linear in the model, and so is its lead over each
    other class. For others it is a guess that is right for nearly all samples.

    Args:
        mask: the coalition S.
        correct: the samples that the model of each tested coalition classifies correctly.
    """
    found, part = 0, (mask - 1) & mask
    while part > mask ^ part:  # each pair of nonempty parts, once
        found = or_(found, correct.get(part, 0) & correct.get(mask ^ part, 0))
        part = (part - 1) & mask
    return found


@dataclass(frozen=True)
class Batch:
    """Test samples that share ciphertexts, under one coalition's model.

    Attributes:
        route: whose samples they are, and which client decrypts each layer's outputs (Proposition 6.8).
        count: how many.
        tested: at the servers, the bitmap of the samples that are tested; None: all of the route's owners'.
    """

    coalition: int
    route: Route
    count: int
    tested: Located | None


def test_shared(at: Any, batch: Batch) -> Located:
    """Algorithm 4: which samples of a batch theta_S classifies correctly, at P and X.

    Models are encrypted at both servers, features and labels in shares of them.

    Args:
        at: the `SecSVTester` of a round, which has what each party holds.
    """
    *hidden, (last, client) = zip(at.program.layers, batch.route.clients, strict=True)
    features, labels = at.features(batch), at.labels(batch)
    for layer, i in hidden:  # 1-3
        outputs = at.outputs(batch, layer, i, features)  # 4-7: decrypted by client i
        features = at.next_features(i, layer, outputs, features)  # 9: activated there, and shared
    outputs = at.outputs(batch, last, client, features)  # 4-7
    return at.matches(client, outputs, labels)  # 11-14


def test_encrypted(at: Any, model: dict, coalition: int, route: Route) -> Located:
    """Algorithm 2: how many samples of one owner theta_S classifies correctly, at P.

    Args:
        at: the `HESVTester` of a round.
        model: the layers of theta_S, encrypted at P (Algorithm 1, step 6).
    """
    *hidden, (last, client) = zip(at.program.layers, route.clients, strict=True)
    features, labels, state = at.features(route), at.labels(route), None
    for k, (layer, i) in enumerate(hidden):  # 1
        outputs = at.outputs(model, coalition, route, layer, i, features)  # 2, 3: decrypted by client i
        features, state = at.next_features(i, k, outputs, state, route)  # 5: activated there, and encrypted
    outputs = at.outputs(model, coalition, route, last, client, features)  # 2, 3
    prediction = at.predict(client, outputs)  # 7
    return at.count(client, route, prediction, labels)  # 8, 9: with the help of another client
