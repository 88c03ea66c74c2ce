"""Secrets and leaks in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .known import Known, Played
from .lined import rows_of, unpacked
from .outcomes import Outcomes
from .predicates import best
from .secrets import Values


class Sentences:
    """What is said of the inputs of a protocol under test."""

    def __init__(self, outcomes: Outcomes):
        self._outcomes = outcomes
        count = len(outcomes.protocol.given)
        self._names = ["x"] if count == 1 else [f"x{i}" for i in range(count)]

    def secret(self, values: Values) -> str:
        """What each input is."""
        return ", ".join(f"{name} = {value}" for name, value in zip(self._names, values, strict=True))

    def random_run(self) -> tuple[list, Played]:
        """Inputs all over their range, and a run of them."""
        inputs = self._outcomes.spread()
        return inputs, self._outcomes.play(inputs, "sentence")

    def of_values(self, values: Sequence[Known], inputs: Sequence) -> tuple[str, float]:
        """What of random inputs the bits of some values agree with most, in words, and how often."""
        found = ("", 0.5, "")
        n = self._outcomes.protocol.n
        for known in values:
            for row, said in rows_of(known, n, range(64)):
                sentence, share, _ = best(unpacked(row, n), [x.reshape(-1) for x in inputs], self._names)
                if sentence and share > found[1]:
                    found = (sentence, share, said)
        return f"; {found[2]} says '{found[0]}' in {found[1]:.1%} of random inputs" if found[0] else "", found[1]

    def of_bits(self, row: np.ndarray, inputs: Sequence) -> tuple[str, float]:
        """The same of one bit of each element, as packed bytes."""
        bits = unpacked(row, self._outcomes.protocol.n)
        sentence, share, _ = best(bits, [x.reshape(-1) for x in inputs], self._names)
        return f"; it says '{sentence}' in {share:.1%} of random inputs" if sentence else "", share
