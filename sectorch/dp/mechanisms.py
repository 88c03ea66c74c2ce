"""Noisy maxima of a histogram of votes (GNMax, LNMax, Confident-GNMax), and their noise for a budget.

The privacy unit is one organisation with all its data: neighbouring inputs differ in everything that it trained on, so
that each of its models may vote for another class. One organisation with one model moves one vote: two counts change by
one. `moved` is the number of votes that one step moves:

- `moved = C` for C parties that collude with the querying party, as CaPC section 3.3 has it (the guarantee is then for
  a group of C organisations),
- `moved = m` for one organisation with m models (virtual parties), and the sum of the C largest m for both.

`curve` holds whatever the votes are. `curve_of(votes)` is smaller where the votes agree; it is a function of the votes
and not private: publish it, or stop by it, and something about the votes is published. In the secure protocol nobody
could compute it, since nobody sees the votes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from ..choreography import Party
from ..errors import PrivacyError
from ..tensor import SharedTensor
from ..tensor.holders import draw, one_hot_argmax, reveal_argmax
from .noise import (
    LARGEST_SCALE,
    DiscreteGaussian,
    DiscreteLaplace,
    Noise,
    check_delta,
    check_epsilon,
    dependent_gaussian,
    dependent_pure,
    epsilon_of,
    gaussian_curve,
    log_sum,
    response_curve,
)

Votes = Sequence[int] | np.ndarray | torch.Tensor
Drawn = tuple[torch.Tensor, ...]
"""Noise as a mechanism draws it, int64: [N, classes]; of Confident-GNMax that of the checks, [N], first."""


@dataclass(frozen=True)
class NoisyMax(ABC):
    """The class with the most votes after noise is added to each count; of equal counts the first.

    Args:
        scale: of the noise, in votes: sigma, or the b of a Laplace distribution.
        moved: votes that one step between neighbours moves; see the module.

    Raises:
        PrivacyError: a scale or `moved` out of range.
    """

    scale: float
    moved: int = 1

    def __post_init__(self):
        if self.moved < 1 or self.moved != int(self.moved):
            raise PrivacyError(f"the number of votes that a step moves must be a whole number from 1, got {self.moved}")
        _ = self.noise

    @cached_property
    def noise(self) -> Noise:
        """The distribution that the privacy guardian draws from."""
        return self._noise()

    @cached_property
    def curve(self) -> np.ndarray:
        """RDP of one query over `ORDERS`, for any votes."""
        return self._curve()

    @abstractmethod
    def _noise(self) -> Noise: ...

    @abstractmethod
    def _curve(self) -> np.ndarray: ...

    @abstractmethod
    def curve_of(self, votes: Votes) -> np.ndarray:
        """RDP of one query for these votes. Not private itself; never above `curve`."""

    def log_error(self, votes: Votes) -> float:
        """ln of an upper bound of Pr[another class than the one with the most votes is returned].

        A union bound (PATE 2018, proposition 7) over the exact distribution of the difference of two discrete noises;
        ties count as errors.
        """
        votes = _counts(votes)
        best = int(votes.argmax())
        logs = [self.noise.log_beaten(int(votes[best] - v)) for i, v in enumerate(votes) if i != best]
        return min(log_sum(logs), math.log1p(-1 / len(votes)))

    def distribution(self, votes: Votes) -> np.ndarray:
        """Pr[label = j] for each class, exactly up to rounding: the mechanism itself, for tests and for planning."""
        votes, noise = _counts(votes), self.noise
        # x is the winner's noisy count; the others lie below it, or, if they come later, at most at it.
        x = np.arange(int(votes.min()) - noise.span, int(votes.max()) + noise.span + 1)
        pmf = np.exp(noise.log_pmf(x[None] - votes[:, None]))
        cumulative = pmf.cumsum(1)
        below = cumulative - pmf
        out = np.empty(len(votes))
        for j in range(len(votes)):
            out[j] = (pmf[j] * below[:j].prod(0) * cumulative[j + 1 :].prod(0)).sum()
        return out

    def unanimous(self, voters: int, classes: int) -> float:
        """Pr[the class that all voters chose is returned]: how useful the mechanism can be at best."""
        return float(self.distribution([0] * (classes - 1) + [voters])[-1])

    def cost(self, asked: int, answered: int) -> np.ndarray:
        """RDP of `asked` queries, all of which are answered."""
        return asked * self.curve

    def draw(self, count: int, classes: int) -> Drawn:
        """The noise of `count` queries."""
        return (self.noise.sample(count, classes),)

    def noisy(self, votes: Any, noise: Any) -> Any:
        """The counts [N, classes] of which the largest wins, from votes and noise: tensor code that runs on plain
        tensors and on a histogram that Q and S hold in shares alike.

        This is the function to override for a mechanism of one's own. `curve` covers whatever is made of votes + noise,
        and a change of the votes before it if a vote that moves still changes two counts by one. Otherwise override
        `_curve` and `curve_of` as well.
        """
        return votes + noise

    def labels(self, votes: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """The mechanism in the clear: votes [N, classes] -> labels [N]. With `noise`, its own is not drawn."""
        return self.noisy(votes, self.noise.sample(*votes.shape) if noise is None else noise).argmax(1)

    def labelled(self, votes: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """`labels` with noise of `draw`."""
        return self.labels(votes, *drawn)

    def release(
        self, votes: SharedTensor, drawn: Drawn | None = None, *, engine: Literal["shares", "yao"] = "yao",
        party: Party | None = None, opened: bool = True,
    ) -> Any:  # fmt: skip
        """The mechanism on a histogram that Q and S hold (CaPC 3.2, steps 2 and 3): Q learns the labels and no votes.

        Args:
            votes: [N, classes], whole numbers, from `sectorch.collect`.
            drawn: the noise, where S has drawn it before (`draw`); S alone draws it unless given.
            engine, party: see `sectorch.reveal_argmax`, whose rounds and bytes it has.
            opened: whether Q learns the labels. If not, Q and S hold their one-hot codes in shares, as from
                `sectorch.one_hot_argmax`, and nobody learns anything.

        Returns:
            int64 [N] at Q; elsewhere a tensor without content. Not opened: [N, classes] in shares.
        """
        (noise,) = drawn or (None,)
        noisy = self.noisy(votes, _drawn_at_S(votes, self.noise, votes.shape, noise))
        if not opened:
            return one_hot_argmax(noisy, engine=engine)
        return reveal_argmax(noisy, engine=engine, party=party)


@dataclass(frozen=True)
class GNMax(NoisyMax):
    """Gaussian noise (PATE 2018, section 4.1). Two counts change by `moved`, so the L2 change is sqrt(2) moved."""

    def _noise(self) -> Noise:
        return DiscreteGaussian(self.scale)

    def _curve(self) -> np.ndarray:
        return gaussian_curve(self.scale, math.sqrt(2) * self.moved)

    def curve_of(self, votes: Votes) -> np.ndarray:
        return dependent_gaussian(self.log_error(votes), self.scale / self.moved)


@dataclass(frozen=True)
class LNMax(NoisyMax):
    """Laplace noise of scale b (PATE 2017). A query is (2 moved / b, 0)-DP.

    Two counts change, each by `moved` and under its own noise: twice the curve of one such change, which is below that
    of a mechanism that is only known to be 2 moved / b-DP.
    """

    def _noise(self) -> Noise:
        return DiscreteLaplace(self.scale)

    def _curve(self) -> np.ndarray:
        return 2 * response_curve(self.moved / self.scale)

    def curve_of(self, votes: Votes) -> np.ndarray:
        return np.minimum(dependent_pure(self.log_error(votes), 2 * self.moved / self.scale), self.curve)


def _drawn_at_S(votes: SharedTensor, noise: Noise, shape: Sequence[int], drawn: torch.Tensor | None) -> SharedTensor:
    """Noise that the server alone draws, or has drawn, as a summand of votes."""
    return draw(
        "S", lambda shape: noise.sample(*shape) if drawn is None else drawn, shape, session=votes.session,
        party=votes.party, scheme=votes.scheme, limit=noise.span + 1,
    )  # fmt: skip


MECHANISMS: dict[str, type[NoisyMax]] = {"gaussian": GNMax, "laplace": LNMax}


@dataclass(frozen=True)
class ConfidentGNMax:
    """GNMax that answers only where the largest count, with Gaussian noise of scale `sigma1`, reaches `threshold`.

    PATE 2018, algorithm 1. Each query costs the check, and an answered one GNMax as well. The largest count changes by
    at most `moved`.
    """

    threshold: int
    sigma1: float
    answer: GNMax

    def __post_init__(self):
        if self.threshold < 0:
            raise PrivacyError(f"the threshold is a number of votes and must not be negative, got {self.threshold}")
        _ = self.noise

    @cached_property
    def noise(self) -> Noise:
        """The noise of the check."""
        return DiscreteGaussian(self.sigma1)

    @cached_property
    def check_curve(self) -> np.ndarray:
        """RDP of the check of one query, for any votes."""
        return gaussian_curve(self.sigma1, self.answer.moved)

    @cached_property
    def curve(self) -> np.ndarray:
        """RDP of one query that is answered: the most that a query can cost."""
        return self.check_curve + self.answer.curve

    def cost(self, asked: int, answered: int) -> np.ndarray:
        """RDP of `asked` queries: a check each, and `answered` answers.

        Adaptive composition: whether the answer's mechanism runs is a function of the check's output.
        """
        return asked * self.check_curve + answered * self.answer.curve

    @property
    def scale(self) -> float:
        """The scale of the answer's noise."""
        return self.answer.scale

    @property
    def moved(self) -> int:
        """Votes that one step between neighbours moves."""
        return self.answer.moved

    def unanimous(self, voters: int, classes: int) -> float:
        """Pr[the query is answered, with the class that all voters chose]."""
        return math.exp(self.noise.log_above(self.threshold - voters)) * self.answer.unanimous(voters, classes)

    def labels(self, votes: torch.Tensor) -> torch.Tensor:
        """The mechanism in the clear: votes [N, classes] -> labels [N], -1 where the query is not answered."""
        return self.labelled(votes, self.draw(*votes.shape))

    def draw(self, count: int, classes: int) -> Drawn:
        """The noise of `count` queries: that of the checks, and that of the answers."""
        return self.noise.sample(count), self.answer.noise.sample(count, classes)

    def labelled(self, votes: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """`labels` with noise of `draw`."""
        check, answer = drawn
        return torch.where(self.answered(votes, check), self.answer.labels(votes, answer), -1)

    def release(
        self, votes: SharedTensor, drawn: Drawn | None = None, *, engine: Literal["shares", "yao"] = "yao",
        party: Party | None = None, opened: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """As `NoisyMax.release`, and -1 where the query is not answered, of which S learns nothing.

        Raises:
            PrivacyError: not opened: Q learns which queries are answered.
        """
        if not opened:
            raise PrivacyError(
                "which queries a threshold answers Q learns: take a mechanism without one, or open labels"
            )
        check, noise = drawn or (None, None)
        checked = votes + _drawn_at_S(votes, self.noise, votes.shape[:1], check).unsqueeze(1) - self.threshold
        noisy = self.answer.noisy(votes, _drawn_at_S(votes, self.answer.noise, votes.shape, noise))
        return reveal_argmax(noisy, where=checked, engine=engine, party=party)

    def curve_of(self, votes: Votes, answered: bool) -> np.ndarray:
        """RDP of one query for these votes, which was answered or not. Not private itself."""
        return self.check_curve_of(votes) + (self.answer.curve_of(votes) if answered else 0)

    def log_answered(self, votes: Votes) -> float:
        """ln Pr[the query is answered]."""
        return self.noise.log_above(self.threshold - int(_counts(votes).max()))

    def check_curve_of(self, votes: Votes) -> np.ndarray:
        """RDP of the check for these votes. Not private itself."""
        log_p = self.log_answered(votes)
        # The rarer of the two outcomes; 1 - p again by the noise's own tail, which keeps its digits.
        log_q = min(log_p, self.noise.log_above(int(_counts(votes).max()) - self.threshold + 1))
        return dependent_gaussian(log_q, math.sqrt(2) * self.sigma1 / self.answer.moved)

    def answered(self, votes: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """The check in the clear: votes [N, classes] -> bool [N]."""
        top = votes.amax(1)
        return top + (self.noise.sample(len(top)) if noise is None else noise) >= self.threshold


Mechanism = NoisyMax | ConfidentGNMax


def _counts(votes: Votes) -> np.ndarray:
    counts = np.asarray(votes)
    if counts.ndim != 1 or len(counts) < 2 or not np.issubdtype(counts.dtype, np.integer):
        raise PrivacyError(f"votes are whole numbers for at least two classes, got {counts.dtype} {counts.shape}")
    return counts


# From a budget to a scale of noise, and back. All figures hold for any votes.

_STEPS = 1 << 10
"""Scales are multiples of 2^-10, which the exact sampler takes and a report prints without rounding."""
MOST_QUERIES = 1 << 30


def epsilon_for(mechanism: Mechanism, queries: int, delta: float) -> float:
    """The epsilon of so many queries."""
    _check_count("queries", queries, 0)
    return epsilon_of(queries * mechanism.curve, delta)


def queries_for(mechanism: Mechanism, epsilon: float, delta: float) -> int:
    """The number of queries that a budget allows at this scale."""
    check_epsilon(epsilon)
    return _largest(lambda n: epsilon_for(mechanism, n, delta) <= epsilon, MOST_QUERIES)


def scale_for(noise: str, epsilon: float, delta: float, queries: int, moved: int = 1) -> float:
    """The least scale, up to 2^-10, at which so many queries stay within (epsilon, delta).

    Args:
        noise: "gaussian" (the scale is sigma) or "laplace" (b).
        moved: votes that one step between neighbours moves; see the module.

    Raises:
        PrivacyError: out of range, or no scale up to 2^20 is enough.
    """
    if noise not in MECHANISMS:
        raise PrivacyError(f"there is no noise {noise!r}; there are {', '.join(MECHANISMS)}")
    check_epsilon(epsilon)
    check_delta(delta)
    _check_count("queries", queries, 1)
    largest = int(LARGEST_SCALE) * _STEPS
    fits = lambda steps: epsilon_for(MECHANISMS[noise](steps / _STEPS, moved), queries, delta) <= epsilon
    if not fits(largest):
        raise PrivacyError(
            f"no {noise} noise up to scale {LARGEST_SCALE:.0f} keeps {queries} queries within epsilon {epsilon:g}, "
            f"delta {delta:g}; ask fewer, or allow more"
        )
    return (largest - _largest(lambda less: fits(largest - less), largest - 1)) / _STEPS


def reachable_epsilon(
    noise: str, voters: int, classes: int, delta: float, queries: int, *, moved: int = 1, reliability: float = 0.5
) -> float | None:
    """The smallest epsilon at which a class that all voters choose is returned with probability `reliability`.

    Returns:
        None if no noise above the smallest scale reaches it.
    """
    _check_count("voters", voters, 1)
    serves = lambda steps: MECHANISMS[noise](steps / _STEPS, moved).unanimous(voters, classes) >= reliability
    steps = _largest(serves, 64 * voters * _STEPS)
    return epsilon_for(MECHANISMS[noise](steps / _STEPS, moved), queries, delta) if steps else None


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] that `holds`, for a property of small n; holds(0) is assumed."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_count(what: str, value: int, least: int) -> None:
    if value != int(value) or value < least or not math.isfinite(value):
        raise PrivacyError(f"the number of {what} must be a whole number from {least}, got {value}")
