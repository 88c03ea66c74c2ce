"""Discrete Gaussian and discrete Laplace noise: exact samples, their cost in Renyi differential privacy, and shares.

A Gaussian drawn in floating point is not a Gaussian: which numbers can come out depends on the value that the noise is
added to, and from its low bits the value can be read off (Mironov, "On significance of the least significant bits for
differential privacy", CCS 2012). Votes are whole numbers, so here the noise is one too, and it is drawn exactly, with
rational arithmetic (Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020), by
OpenDP. No floating-point number meets a vote on the way. OpenDP draws from its own cryptographic generator.

Probabilities are in floating point, as logarithms: they enter the bookkeeping and no sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from dp_accounting import rdp as accounting
from scipy.special import gammaln, logsumexp

from ..errors import FixedPointRangeError, NonFiniteError, PrivacyError, ShapeError
from ..ring import HEADROOM_BITS
from ..secure_sum import NoiseCarriers

LARGEST_SCALE = float(1 << 20)
_LARGEST_ON_GRID = 2.0**40
_WIDTH = 48
"""Sums over the integers stop this many scales out: what is left is below e^-48, and below e^-1000 for the Gaussian."""


@dataclass(frozen=True)
class Noise(ABC):
    """Whole numbers with mean zero, independent of each other. `scale` is sigma, or the b of a Laplace distribution.

    Raises:
        PrivacyError: a scale that is not above 0 and at most 2^20.
    """

    scale: float

    def __post_init__(self):
        if not 0 < self.scale <= LARGEST_SCALE:
            raise PrivacyError(f"the scale of noise must be above 0 and at most {LARGEST_SCALE:.0f}, got {self.scale}")

    def sample(self, *shape: int) -> torch.Tensor:
        """Fresh noise, int64 of this shape. Exact; drawn from cryptographic randomness, never seeded."""
        count = math.prod(shape)
        return torch.tensor(self._measurement()([0] * count) if count else [], dtype=torch.int64).view(shape)

    @abstractmethod
    def _measurement(self) -> Callable[[list[int]], Any]:
        """What draws: OpenDP's measurement, to be applied to zeros."""

    @abstractmethod
    def log_pmf(self, x: np.ndarray) -> np.ndarray:
        """ln Pr[noise = x]."""

    @abstractmethod
    def log_pmf_difference(self, d: np.ndarray) -> np.ndarray:
        """ln Pr[z - z' = d] of two independent draws, d >= 0."""

    @property
    def span(self) -> int:
        """Sums over the noise run from -span to span."""
        return math.ceil(_WIDTH * self.scale) + _WIDTH

    def log_beaten(self, gap: int) -> float:
        """ln Pr[z' - z >= gap]: a class that is `gap` votes behind catches up, at least to a tie."""
        return _log_beaten(self, int(gap))

    def log_above(self, threshold: int) -> float:
        """ln Pr[z >= threshold]."""
        return _log_above(self, int(threshold))


@dataclass(frozen=True)
class DiscreteGaussian(Noise):
    """Pr[x] proportional to exp(-x^2 / 2 sigma^2) on the integers.

    For whole-number changes it is as private as the Gaussian of the same sigma: order-lambda Renyi divergence at most
    lambda change^2 / 2 sigma^2 (Canonne, Kamath, Steinke, proposition 5). Its variance is at most sigma^2.
    """

    def _measurement(self) -> Callable[[list[int]], Any]:
        return _opendp("gaussian", self.scale)

    def log_pmf(self, x: np.ndarray) -> np.ndarray:
        return -(np.asarray(x, dtype=float) ** 2) / (2 * self.scale**2) - _log_theta(self.scale * math.sqrt(2), 0.0)

    def log_pmf_difference(self, d: np.ndarray) -> np.ndarray:
        # The sum over x of exp(-(x^2 + (x+d)^2) / 2s^2) is exp(-d^2 / 4s^2) times a sum around d/2, of width s.
        d = np.asarray(d)
        around = np.where(d % 2 == 0, _log_theta(self.scale, 0.0), _log_theta(self.scale, 0.5))
        return -(d.astype(float) ** 2) / (4 * self.scale**2) + around - 2 * _log_theta(self.scale * math.sqrt(2), 0.0)


@dataclass(frozen=True)
class DiscreteLaplace(Noise):
    """Pr[x] proportional to exp(-|x| / b) on the integers; a change by k votes costs k / b (pure)."""

    def _measurement(self) -> Callable[[list[int]], Any]:
        return _opendp("laplace", self.scale)

    def log_pmf(self, x: np.ndarray) -> np.ndarray:
        return -np.abs(np.asarray(x, dtype=float)) / self.scale + math.log(math.tanh(0.5 / self.scale))

    def log_pmf_difference(self, d: np.ndarray) -> np.ndarray:
        d = np.asarray(d, dtype=float)
        # 2 a^2 / (1 - a^2) with a = exp(-1/b).
        outside = 2 / math.expm1(2 / self.scale)
        return np.log(d + 1 + outside) - d / self.scale + 2 * math.log(math.tanh(0.5 / self.scale))


def on_grid(sigma: float, shape: Sequence[int], frac_bits: int) -> torch.Tensor:
    """Discrete Gaussian noise on the multiples of 2^-frac_bits, as whole numbers of these: int64 of this shape.

    For what is on that grid and changes by d in the L2 norm, the order-lambda Renyi divergence is at most
    lambda d^2 / 2 sigma^2, as of `DiscreteGaussian`. Exact, fresh, never seeded.

    Raises:
        PrivacyError: sigma is not above 0 and at most 2^(40 - frac_bits).
    """
    scale = sigma * 2.0**frac_bits
    if not 0 < scale <= _LARGEST_ON_GRID:
        raise PrivacyError(
            f"with {frac_bits} fraction bits sigma must be above 0 and at most "
            f"{_LARGEST_ON_GRID / 2**frac_bits:g}, got {sigma}"
        )
    count = math.prod(shape)
    found = _opendp("gaussian", scale)([0] * count) if count else []
    return torch.tensor(found, dtype=torch.int64).view(tuple(shape))


@lru_cache(maxsize=64)
def _opendp(kind: str, scale: float):
    """OpenDP's exact additive noise on int64 vectors. Its whole noise interface is behind its `contrib` flag."""
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian, make_laplace
    from opendp.metrics import l1_distance, l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    domain = vector_domain(atom_domain(T="i64"))
    if kind == "gaussian":
        return make_gaussian(domain, l2_distance(T="f64"), scale=scale)
    return make_laplace(domain, l1_distance(T="i64"), scale=scale)


def log_sum(logs: np.ndarray | list[float]) -> float:
    """ln of the sum of exp(logs)."""
    return np.asarray(logsumexp(logs)).item()


@lru_cache(maxsize=256)
def _log_theta(width: float, shift: float) -> float:
    """ln of the sum over the integers of exp(-(x + shift)^2 / width^2)."""
    reach = math.ceil(_WIDTH * width) + _WIDTH
    return log_sum(-((np.arange(-reach, reach + 1) + shift) ** 2) / width**2)


@lru_cache(maxsize=1 << 14)
def _log_beaten(noise: Noise, gap: int) -> float:
    if gap <= 0:
        # By symmetry Pr[z' - z >= gap] = 1 - Pr[z' - z >= 1 - gap].
        return float(np.log1p(-np.exp(_log_beaten(noise, 1 - gap))))
    return min(0.0, log_sum(noise.log_pmf_difference(np.arange(gap, gap + 2 * noise.span))))


@lru_cache(maxsize=1 << 14)
def _log_above(noise: Noise, threshold: int) -> float:
    if threshold <= 0:
        return float(np.log1p(-np.exp(_log_above(noise, 1 - threshold))))
    return min(0.0, log_sum(noise.log_pmf(np.arange(threshold, threshold + noise.span))))


# Renyi differential privacy (RDP) on a grid of orders: curves, the theorems of PATE, and the way to (epsilon, delta).
#
# An RDP curve is an array over `ORDERS`. Curves of several queries add up, also where later queries are chosen by
# earlier answers (adaptive composition; Mironov 2017), and also where querying stops when some order's sum reaches a
# limit that was set before (privacy filters; Lecuyer, "Practical privacy filters and odometers with Renyi differential
# privacy", 2021).
#
# Sources: Papernot et al., "Semi-supervised knowledge transfer ...", ICLR 2017 (PATE 2017), theorem 3; Papernot et al.,
# "Scalable private learning with PATE", ICLR 2018 (PATE 2018), theorem 6 and proposition 10. Conversion: dp-accounting,
# which has proposition 12 of Canonne, Kamath, Steinke 2020 (CaPC prints the weaker theorem 2).


ORDERS: np.ndarray = 1 + 10 ** np.linspace(-1.3, 3, 216)
"""From 1.05 to 1001; alpha - 1 grows by 4.7 % from one to the next. Small orders serve large epsilons."""
ORDERS.setflags(write=False)


def epsilon_of(curve: np.ndarray, delta: float) -> float:
    """The smallest epsilon of (epsilon, delta)-DP that the curve gives.

    Raises:
        PrivacyError: delta is not between 0 and 1.
    """
    check_delta(delta)
    if not curve.any():
        return 0.0
    return float(accounting.compute_epsilon(ORDERS.tolist(), curve.tolist(), delta)[0])


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must be above 0 and below 1 (well below one in the number of records), got {delta}")


def check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise PrivacyError(f"epsilon must be above 0 and finite, got {epsilon}")


def gaussian_curve(sigma: float, change: float) -> np.ndarray:
    """Gaussian noise of this sigma on a vector that changes by `change` in the L2 norm: alpha change^2 / 2 sigma^2."""
    return ORDERS * change**2 / (2 * sigma**2)


def response_curve(epsilon: float) -> np.ndarray:
    """Randomised response with odds e^epsilon, the worst of all mechanisms that are epsilon-DP (Kairouz et al. 2015).

    It is also exactly discrete Laplace noise of scale 1 / epsilon on a count that changes by one.
    """
    half = lambda x: np.logaddexp(x, -x)
    return np.minimum((half((ORDERS - 0.5) * epsilon) - half(0.5 * epsilon)) / (ORDERS - 1), epsilon)


def dependent_gaussian(log_q: float, sigma: float) -> np.ndarray:
    """PATE 2018, theorem 6 with the orders of proposition 10: RDP of a mechanism that gives its likeliest answer but
    with probability q, and whose data-independent curve is alpha / sigma^2. Never above that curve.

    It depends on the votes by way of q and is therefore not private itself.

    Args:
        log_q: ln of an upper bound of q.
    """
    plain = ORDERS / sigma**2
    if log_q >= 0:
        return plain
    if log_q == -math.inf:
        return np.zeros_like(plain)
    mu2 = sigma * math.sqrt(-log_q)
    if mu2 <= 1:
        return plain
    mu1 = mu2 + 1
    eps1, eps2 = mu1 / sigma**2, mu2 / sigma**2
    # Within this range of q the bound grows with q, so that an upper bound of q gives an upper bound of the curve.
    limit = (mu2 - 1) * eps2 - mu2 * (math.log1p(1 / (mu1 - 1)) + math.log1p(1 / (mu2 - 1)))
    if log_q > limit or -log_q <= eps2:
        return plain
    log_rest = _log1mexp(log_q)
    log_a = log_rest - _log1mexp((log_q + eps2) * (1 - 1 / mu2))
    log_b = eps1 - log_q / (mu1 - 1)
    power = ORDERS - 1
    bound = np.logaddexp(log_rest + power * log_a, log_q + power * log_b) / power
    return np.where(mu1 > ORDERS, np.clip(bound, 0, plain), plain)


def dependent_pure(log_q: float, epsilon: float) -> np.ndarray:
    """PATE 2017, theorem 3: RDP of an epsilon-DP mechanism that gives its likeliest answer but with probability q.

    It depends on the votes by way of q and is therefore not private itself. Never above `response_curve(epsilon)`.
    """
    plain = response_curve(epsilon)
    if log_q >= -np.logaddexp(0, epsilon):
        return plain
    if log_q == -math.inf:
        return np.zeros_like(plain)
    log_rest = _log1mexp(log_q)
    power = ORDERS - 1
    bound = np.logaddexp(log_rest + power * (log_rest - _log1mexp(epsilon + log_q)), log_q + power * epsilon) / power
    return np.clip(bound, 0, plain)


def _log1mexp(x: float) -> float:
    """ln(1 - e^x) for x < 0."""
    return math.log1p(-math.exp(x)) if x < -1 else math.log(-math.expm1(x))


def sampled_curve(curve: Callable[[float], float], sample: int, rows: int) -> np.ndarray:
    """RDP over `ORDERS` of a mechanism that is given `sample` of `rows` rows, drawn in secret without replacement.

    A batch that is drawn in secret makes a step more private than its noise alone. Whoever knows the rows of a batch
    gets no such gain.

    For neighbours that differ in the content of one row (replace one). Whole orders by theorem 9 of Wang, Balle,
    Kasiviswanathan, "Subsampled Renyi differential privacy and analytical moments accountant", AISTATS 2019, without a
    bound at order infinity; between them (order - 1) times the curve is convex, and is interpolated.

    Args:
        curve: of the mechanism, for one replaced row of its sample.

    Raises:
        PrivacyError: not 1 <= sample <= rows.
    """
    if not 1 <= sample <= rows:
        raise PrivacyError(f"a sample is of 1 to all {rows} rows, got {sample}")
    if sample == rows:
        return np.array([curve(order) for order in ORDERS])
    whole = {1: 0.0}
    for order in sorted({int(f(a)) for a in ORDERS for f in (math.floor, math.ceil)} - {1}):
        whole[order] = _log_moment(curve, sample / rows, order)
    found = []
    for order in ORDERS:
        low, high = math.floor(order), math.ceil(order)
        part = order - low
        found.append(((1 - part) * whole[low] + part * whole[high]) / (order - 1))
    return np.minimum(found, [curve(order) for order in ORDERS])


def _log_moment(curve: Callable[[float], float], fraction: float, order: int) -> float:
    """(order - 1) times the curve at a whole order from 2 on."""
    j = np.arange(2, order + 1)
    second = curve(2.0)
    terms = math.log(2) + (j - 1) * np.array([curve(float(k)) for k in j])
    terms[0] = min(math.log(4) + second + math.log(-math.expm1(-second)), math.log(2) + second) if second else -np.inf
    choose = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    return log_sum(np.append(j * math.log(fraction) + choose + terms, 0.0))


MARGIN = 2.0**-16
"""A clipped tensor is shorter than the bound by this part of it. Rounding to the grid takes half of it at most, and the
rest is far above the errors of norms and sums in float64."""
_LEAST_ON_GRID = 8.0
_MOST = 2.0**HEADROOM_BITS


@dataclass(frozen=True)
class GaussianShares:
    """Gaussian noise that the clients of a secure sum add in shares: nobody draws all of it.

    Example:
        shares = GaussianShares(sigma=4.0, clip=1.0, honest=80, colluding=10)  # of 100 clients; 10 may be lost
        masks = PairwiseMasks(session, clients, drop_outs=True, least=shares.least)
        total, came = masks.sum({c: shares.encode(updates[c]) for c in clients})
        mean = shares.decode(total) / len(came)

    Each client adds discrete Gaussian noise of deviation sigma / sqrt(honest), on the grid of the sum. So `honest`
    shares are the noise of a central mechanism of deviation sigma, and more shares are more noise. Noise and numbers
    meet as whole numbers: the sum of what the clients encoded is exact, and no low bits of a float tell them apart.

    **Who is protected, from whom.** One unit: a client with all its data, or each tensor that a client clips by
    itself, such as the gradient of one record. The server, and colluding clients with it, see the sum. They subtract
    what they added, noise too; what is left is the others' sum under the others' noise. Where h honest clients are in
    the sum, the Renyi cost is honest / h times `curve`, at most `curve` while h >= honest, and more below it
    (`curve_of`). A client that is lost takes its share of the noise along. A sum is therefore opened for `least`
    survivors or more, which each client checks before it opens (`secure_sum`): of those, `colluding` may be on the
    server's side. Masks are of all pairs; a graph of masks (`degree`) is refused, for by one colluding clients can cut
    off a part whose sum has the noise of few. A client that adds no noise counts as colluding.

    **Error.** The sum has the noise of every client in it: of K clients deviation sigma sqrt(K / honest). Clients that
    each add noise enough for themselves (local differential privacy) make it sigma sqrt(K).

    Source: Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation", ICML 2021: a sum of n discrete Gaussians of scale s on the integers costs at most
    alpha change^2 / 2 n s^2 + tau d at order alpha, tau = 10 sum_k exp(-2 pi^2 s^2 k / (k + 1)). Here s is 8 or more,
    so tau is below n 2^-900.

    Args:
        sigma: deviation of the noise of `honest` shares, in units of the sum.
        clip: L2 norm of what one unit adds to the sum, at most.
        honest: how many shares make the noise whole: clients that neither collude with the server nor are lost.
        colluding: how many clients the server may have on its side.
        frac_bits: f; the grid of the sum is the multiples of 2^-f.

    Raises:
        PrivacyError: a number out of range, or noise too small for the grid.
    """

    sigma: float
    clip: float
    honest: int
    colluding: int = 0
    frac_bits: int = 32

    def __post_init__(self):
        for name, value in (("sigma", self.sigma), ("clip", self.clip)):
            if not 0 < value < math.inf:
                raise PrivacyError(f"{name} must be above 0 and finite, got {value}")
        if not (isinstance(self.honest, int) and isinstance(self.colluding, int) and self.honest > 0 <= self.colluding):
            raise PrivacyError(
                f"the noise is of 1 honest client or more, beside 0 colluding ones or more, got {self.honest!r} and "
                f"{self.colluding!r}"
            )
        if not (isinstance(self.frac_bits, int) and 0 <= self.frac_bits <= 60):
            raise PrivacyError(f"frac_bits is a whole number from 0 to 60, got {self.frac_bits!r:.40}")
        if self.clip * 2.0**self.frac_bits >= _MOST:
            raise PrivacyError(
                f"a clip of {self.clip:g} leaves the 62 bits of a sum with {self.frac_bits} fraction bits; use fewer"
            )
        if self.share * 2.0**self.frac_bits < _LEAST_ON_GRID:
            raise PrivacyError(
                f"a share of the noise has deviation {self.share:.3g}, and a grid of {self.frac_bits} fraction bits "
                f"needs {_LEAST_ON_GRID / 2**self.frac_bits:.3g} or more; use more frac_bits"
            )

    @property
    def share(self) -> float:
        """The deviation of one client's noise."""
        return self.sigma / math.sqrt(self.honest)

    @cached_property
    def curve(self) -> np.ndarray:
        """RDP of one sum over `ORDERS`, with `honest` honest clients in it: one unit is replaced by another."""
        return self.curve_of(self.honest)

    def curve_of(self, present: int) -> np.ndarray:
        """RDP of one sum with so many honest clients in it; infinite for none, whose sum is the adversary's own."""
        if present < 1:
            return np.full_like(gaussian_curve(1.0, 1.0), np.inf)
        return gaussian_curve(self.share * math.sqrt(present), 2 * self.clip)

    @property
    def least(self) -> NoiseCarriers:
        """Fewest survivors for whom a sum may be opened, so that `curve` holds."""
        return NoiseCarriers(max(2, self.honest + self.colluding))

    def clipped(self, x: torch.Tensor) -> torch.Tensor:
        """x in float64, scaled down where its norm is above `clip` (1 - 2^-16).

        Raises:
            NonFiniteError: x holds NaN or infinity.
        """
        x = x.detach().double()
        norm, room = float(torch.linalg.vector_norm(x)), self.clip * (1 - MARGIN)
        if not math.isfinite(norm):
            raise NonFiniteError("what a client adds to a private sum holds NaN or infinity, or is too large to clip")
        return x if norm <= room else x * (room / norm)

    def encode(self, *units: torch.Tensor) -> torch.Tensor:
        """What a client adds to the sum: its units, each clipped, and its share of the noise, int64 on the grid.

        Args:
            units: tensors of one shape: the client's update, or of each of its records one.

        Exact: the sum of these over the clients is that of their rounded values and noises. Each number is rounded
        once, by at most 2^-(f+1). Fresh noise in each call, never seeded: two encodings of one update cost twice.

        Raises:
            NonFiniteError: a unit holds NaN or infinity. PrivacyError: so many numbers round by more than the margin.
            ShapeError: units of several shapes. FixedPointRangeError: their sum leaves the 62 bits of the grid.
        """
        if len(shapes := {tuple(unit.shape) for unit in units}) != 1:  # a unit that is repeated is longer than the clip
            raise ShapeError(f"the units of a client are tensors of one shape, got {sorted(shapes)}")
        return self.noisy(sum((self.clipped(unit) for unit in units[1:]), self.clipped(units[0])))

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        """`encode` of a sum of units that are clipped already."""
        if math.sqrt(x.numel()) * 2.0**-self.frac_bits > self.clip * MARGIN:
            raise PrivacyError(
                f"{x.numel()} numbers of {self.frac_bits} fraction bits round by more than 2^-17 of the clip "
                f"{self.clip:g}; use more frac_bits"
            )
        x = x.double() * 2.0**self.frac_bits
        if x.numel() and float(x.abs().max()) >= _MOST:
            raise FixedPointRangeError(
                f"a client's units together leave the 62 bits of a sum with {self.frac_bits} fraction bits; use fewer"
            )
        return x.round().long() + on_grid(self.share, x.shape, self.frac_bits)

    def decode(self, total: torch.Tensor) -> torch.Tensor:
        """A sum of encodings as float64; of shape alone where the sum is elsewhere."""
        return total.double() * 2.0**-self.frac_bits
