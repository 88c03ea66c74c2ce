"""Whether what was drawn is as frequent as it should be; for draws that are fresh in each run, as those of OpenDP."""

from __future__ import annotations

import numpy as np
from scipy.stats import binomtest, chisquare

P_VALUE = 1e-12
FEWEST = 100
"""A value that is expected so often adds to Pearson's statistic what its limit allows with probability 1e-12 with one
below 1e-11; one that is expected 5 times with 1e-9. So draws that are right fail one time in 10^10."""


def fits(observed: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts of values are of these probabilities: a chi-square test over the values that are expected often
    enough; the others are one, which has an exact test of its own."""
    count = int(observed.sum())
    large = probabilities * count >= FEWEST
    rest, seen = min(1.0, max(0.0, 1 - probabilities[large].sum())), int(observed[~large].sum())
    if binomtest(seen, count, rest).pvalue < P_VALUE:
        return False
    wanted = probabilities[large] * (count - seen) / probabilities[large].sum()
    return bool(large.sum() < 2 or chisquare(observed[large], wanted).pvalue > P_VALUE)
