"""Privacy of a mechanism on a secret sample of the rows.

A batch that is drawn without replacement, and that nobody knows, makes a step more private than its noise alone. Where
row numbers of a batch are public there is no such gain for anybody who sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import gammaln

from .errors import PrivacyError
from .noise import log_sum
from .renyi import ORDERS


def sampled_curve(curve: Callable[[float], float], sample: int, rows: int) -> np.ndarray:
    """RDP over `ORDERS` of a mechanism that is given `sample` of `rows` rows, drawn in secret without replacement.

    For neighbours that differ in the content of one row (replace one). Whole orders by theorem 9 of Wang, Balle,
    Kasiviswanathan, "Subsampled Renyi differential privacy and analytical moments accountant", AISTATS 2019, without a
    bound at order infinity; between them (order - 1) times the curve is convex, and is interpolated.

    Args:
        curve: the mechanism's own, for one replaced row of its sample.

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
