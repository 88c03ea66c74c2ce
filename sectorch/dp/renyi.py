"""Renyi differential privacy (RDP) on a grid of orders: curves, the theorems of PATE, and the way to (epsilon, delta).

An RDP curve is an array over `ORDERS`. Curves of several queries add up, also where later queries are chosen by earlier
answers (adaptive composition; Mironov 2017), and also where querying stops when some order's sum reaches a limit that
was set before (privacy filters; Lecuyer, "Practical privacy filters and odometers with Renyi differential privacy",
2021).

Sources: Papernot et al., "Semi-supervised knowledge transfer ...", ICLR 2017 (PATE 2017), theorem 3; Papernot et al.,
"Scalable private learning with PATE", ICLR 2018 (PATE 2018), theorem 6 and proposition 10. Conversion: dp-accounting,
which has proposition 12 of Canonne, Kamath, Steinke 2020 (CaPC prints the weaker theorem 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import rdp as accounting
from scipy.special import gammaln

from .errors import PrivacyError
from .noise import log_sum

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
