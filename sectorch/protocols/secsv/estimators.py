"""Shapley values from fewer coalitions than all: permutation sampling, group testing, KernelSHAP.

Permutation sampling and KernelSHAP are shapiq's; group testing (Jia et al., 2019) is not in it and is written here.
All ask for lists of coalitions through one cached function, so that a coalition is tested once, and small ones of a
list first, which SampleSkip profits from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...extras import needed
from .errors import EstimatorMissingError, FederationError
from .values import coalition, coalitions, shapley

Ask = Callable[[list[int]], dict[int, float]]
"""Utilities of a list of coalitions; 0 is nobody."""


def estimate(name: str, players: Sequence[int], ask: Ask, *, budget: int | None = None, seed: int = 0) -> dict:
    """A value for each player.

    Args:
        name: one of `ESTIMATORS`.
        players: numbers of the clients of the round.
        ask: gives utilities.
        budget: coalitions to ask for; 2^n - 1 unless named. Repeated ones cost nothing.
        seed: of the sampling.

    Raises:
        EstimatorMissingError: the estimator's library is not installed.
        FederationError: an unknown estimator, or too small a budget.
    """
    if name not in ESTIMATORS:
        raise FederationError(f"there is no estimator {name!r}; there are {', '.join(ESTIMATORS)}")
    if len(players) == 1 and name != "exact":
        name = "exact"
    return ESTIMATORS[name](players, ask, budget or 2 ** len(players) - 1, seed)


def require(name: str) -> None:
    """Raises:
    EstimatorMissingError: before a run starts.
    """
    if name in ("permutation", "kernel"):
        _shapiq()


def _exact(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
    value = ask([0, *coalitions(players)])
    return shapley(players, lambda mask: value[mask])


def _shapiq() -> Any:
    way = "or use estimator 'exact' or 'group-testing'"
    with needed("permutation sampling or KernelSHAP", "shapiq", EstimatorMissingError, way):
        import shapiq
    return shapiq


def _with_shapiq(kind: str) -> Callable:
    def run(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
        shapiq = _shapiq()
        n = len(players)
        if budget < n + 1:
            raise FederationError(f"{kind} for {n} clients needs a budget of at least {n + 1} coalitions, got {budget}")

        def game(rows: np.ndarray) -> np.ndarray:
            masks = [
                coalition(p for p, there in zip(players, row, strict=True) if there) for row in np.atleast_2d(rows)
            ]
            value = ask(sorted(set(masks), key=lambda m: (m.bit_count(), m)))
            return np.array([value[m] for m in masks])

        approximator = getattr(shapiq, kind)(n=n, random_state=seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Not all budget is required", UserWarning)
            found = approximator.approximate(budget=budget, game=game).get_n_order_values(1)
        return {player: float(v) for player, v in zip(players, found, strict=True)}

    return run


def _group_testing(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
    """Jia et al. (2019), Algorithm 1: sizes k with probability ~ 1/k + 1/(n-k); u = Z/T sum of v (b_i - b_j).

    v is counted from v of nobody on, as there, where that is 0.

    The values are those with the right sum whose differences are nearest to u in least squares, which for a full matrix
    of differences is the mean difference plus the mean value.
    """
    n = len(players)
    sizes = np.arange(1, n)
    weights = 1 / sizes + 1 / (n - sizes)
    z = weights.sum()
    draw = np.random.default_rng(seed)
    rows = np.zeros((budget, n))
    for row, size in zip(rows, draw.choice(sizes, budget, p=weights / z), strict=True):
        row[draw.choice(n, size, replace=False)] = 1
    masks = [coalition(p for p, there in zip(players, row, strict=True) if there) for row in rows]
    whole = coalition(players)
    value = ask(sorted({0, *masks, whole}, key=lambda m: (m.bit_count(), m)))
    utilities = np.array([value[m] - value[0] for m in masks])
    weighted = z / budget * utilities @ rows
    differences = weighted - weighted.mean()
    return {p: float(d + (value[whole] - value[0]) / n) for p, d in zip(players, differences, strict=True)}


ESTIMATORS: dict[str, Callable] = {
    "exact": _exact,
    "permutation": _with_shapiq("PermutationSamplingSV"),
    "group-testing": _group_testing,
    "kernel": _with_shapiq("KernelSHAP"),
}
