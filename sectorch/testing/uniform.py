"""Whether what a party receives is uniform, and the same for two secrets: message by message.

Each p-value is compared with 10^-12. The count of ones in n bits of one place has a standard deviation of sqrt(n) / 2,
and 10^-12 on two sides is 7.13 of them; a bit that is 1 with probability 1/2 + e/2 is therefore found with probability
0.9999 (3.72 standard deviations more) from e = (7.13 + 3.72) / sqrt(n).
"""

from __future__ import annotations

import numpy as np
from scipy import special

from ..ring.loops import compiled

P_VALUE = 1e-12
SIGMAS = 8.0
FOUND = 7.13 + 3.72
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


def histogram(values: np.ndarray) -> np.ndarray:
    """How often each byte stands in each place of a word: [bytes of a word, 256]."""
    words = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    counts = np.zeros((words.shape[1], 256), np.int64)
    _count(words, counts)
    return counts


@compiled
def _count(words, counts):
    """counts[k, b] of the rows whose place k is the byte b."""
    for i in range(words.shape[0]):
        for k in range(words.shape[1]):
            counts[k, words[i, k]] += 1


def ones_of(counts: np.ndarray) -> np.ndarray:
    """Of a histogram how often each bit of a word is one, the lowest first."""
    return (counts @ _BITS[:, ::-1]).ravel()


def most_biased_bit(counts: np.ndarray) -> tuple[float, int]:
    """The p-value of the bit of a word whose ones are furthest from a half, and which.

    The number of bits of a word stands for all of them together, as of packed bits they belong together.
    """
    ones = ones_of(counts)
    n = np.append(np.full(len(ones), counts[0].sum()), 8 * counts.sum())
    sigmas = np.abs(2 * np.append(ones, ones.sum()) - n) / np.sqrt(n)
    return float(2 * special.ndtr(-sigmas.max())), int(sigmas.argmax())


def not_uniform(values: np.ndarray) -> str:
    """How values of one message differ from uniform ones; empty where they do not."""
    counts = histogram(values)
    p, bit = most_biased_bit(counts)
    if p < P_VALUE:
        return f"bit {bit} is biased" if bit < 8 * len(counts) else "bits are biased"
    enough = counts.sum(axis=1) >= 2560  # ten of each byte, so that the statistic is close to its limit
    places = np.flatnonzero(enough & (_from_even(counts) < P_VALUE))
    if len(places) or _from_even(counts.sum(axis=0, keepdims=True))[0] < P_VALUE:
        return f"byte {places[0]} is not uniform" if len(places) else "its bytes are not uniform"
    return ""


def told_apart(first: np.ndarray, second: np.ndarray) -> str:
    """How values of one message tell two secrets apart; empty where they do not."""
    places = np.flatnonzero(_alike(histogram(first), histogram(second)) < P_VALUE)
    if len(places):
        return f"byte {places[0]} tells them apart"
    if apart_in_size(first[: 1 << 17].astype(np.float64), second[: 1 << 17].astype(np.float64)) < P_VALUE:
        return "its size tells them apart"
    return ""


def _from_even(counts: np.ndarray) -> np.ndarray:
    """For each row the p-value of Pearson's statistic against equal counts."""
    expected = counts.mean(axis=1, keepdims=True)
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-300)).sum(axis=1)
    return special.chdtrc(counts.shape[1] - 1, statistic)


def _alike(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For each row the p-value of Pearson's statistic that two counts are of one distribution."""
    both = ours + theirs
    share = ours.sum(axis=1, keepdims=True) / np.maximum(1, both.sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = (ours - both * share) ** 2 / (both * share * (1 - share))
    statistic = np.where(both > 0, np.nan_to_num(parts), 0.0).sum(axis=1)
    return np.where((used := (both > 0).sum(axis=1)) > 1, special.chdtrc(np.maximum(1, used - 1), statistic), 1.0)


def apart_in_size(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of a two-sample Kolmogorov-Smirnov test, in the limit of many values."""
    first, second = np.sort(first), np.sort(second)
    places = np.concatenate([first, second])
    below = [np.searchsorted(values, places, side="right") / len(values) for values in (first, second)]
    size = len(first) * len(second) / (len(first) + len(second))
    return float(special.kolmogorov(size**0.5 * np.abs(below[0] - below[1]).max()))
