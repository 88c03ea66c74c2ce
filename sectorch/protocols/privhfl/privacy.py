"""What noise at the server costs and gives: (epsilon, delta) for an answering party's model and the data in it.

With `normalise`, a party's part of the sum that Q learns is a probability vector, and another model of it changes the
sum by at most sqrt(2) in the L2 norm. S adds discrete Gaussian noise on the ring's grid to each sum. Neighbouring runs
differ in everything that one party trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...dp.renyi import epsilon_of, gaussian_curve
from .settings import Settings


def change(classes: int) -> float:
    """How far one party's answer moves the sum: sqrt(2), and twice the error of softmax on shares (docs/ops.md)."""
    return math.sqrt(2) + 2 * math.sqrt(classes) * (1e-5 + 2e-6 * math.sqrt(classes))


def curve(how: Settings, classes: int, queries: int) -> np.ndarray:
    """The Renyi cost of so many sums with noise of `sigma` to a party that answered all of them."""
    return queries * gaussian_curve(how.sigma, change(classes))


def epsilon(how: Settings, classes: int, queries: int) -> float:
    """`curve` as an epsilon at the settings' delta."""
    return epsilon_of(curve(how, classes, queries), how.delta)


def spent(records: dict[str, list[dict]], how: Settings, classes: int) -> dict[str, float]:
    """Epsilon of the party that answered most, towards one querying party and towards all together.

    In a second round other models have learned from its answers, so what one party sees then comes from all of them:
    only the figure towards all holds.
    """
    rounds = [record for of_one in records.values() for record in of_one[1:]]
    names = {name for record in rounds for name in record["answering"]}
    answered = [sum(r["queries"] for r in rounds if name in r["answering"]) for name in names]
    found = {"all": epsilon(how, classes, max(answered))}
    if how.iterations == 1 and not how.sequential:
        found["one"] = epsilon(how, classes, max(r["queries"] for r in rounds))
    return found


def sentences(found: dict[str, float], how: Settings) -> Sequence[str]:
    """The guarantee in words."""
    one = f"epsilon {found['one']:.4g} towards one querying party and " if "one" in found else ""
    return [
        f"The server added discrete Gaussian noise of sigma {how.sigma:g} to every class of every sum. For everything "
        f"that a party trained on, its answers to all queries of the run are {one}epsilon {found['all']:.4g} towards "
        f"all others together, at delta {how.delta:g} (Renyi composition).",
        "The noise protects from who does not know it: the server does, and is trusted to add it. The bit whether a "
        "value left the number format's range is not noised.",
    ]
