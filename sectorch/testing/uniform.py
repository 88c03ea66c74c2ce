"""Whether what a party receives is uniform, and the same for two secrets: message by message.

Each p-value is compared with 10^-12. The count of ones in n bits of one place has a standard deviation of sqrt(n) / 2,
and 10^-12 on two sides is 7.13 of them; a bit that is 1 with probability 1/2 + e/2 is therefore found with probability
0.9999 (3.72 standard deviations more) from e = (7.13 + 3.72) / sqrt(n).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

P_VALUE = 1e-12
SIGMAS = 8.0
FOUND = 7.13 + 3.72
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


def histogram(values: np.ndarray) -> np.ndarray:
    """How often each byte stands in each place of a word: [bytes of a word, 256]."""
    words = values.view(np.uint8).reshape(len(values), -1)
    return np.stack([np.bincount(place, minlength=256) for place in words.T])


def most_biased_bit(counts: np.ndarray) -> tuple[float, int]:
    """The p-value of the bit of a word whose ones are furthest from a half, and which.

    The number of bits of a word stands for all of them together, as of packed bits they belong together.
    """
    ones = (counts @ _BITS[:, ::-1]).ravel()
    n = np.append(np.full(len(ones), counts[0].sum()), 8 * counts.sum())
    sigmas = np.abs(2 * np.append(ones, ones.sum()) - n) / np.sqrt(n)
    return float(2 * stats.norm.sf(sigmas.max())), int(sigmas.argmax())


def not_uniform(values: np.ndarray) -> str:
    """How values of one message differ from uniform ones; empty where they do not."""
    counts = histogram(values)
    p, bit = most_biased_bit(counts)
    if p < P_VALUE:
        return f"bit {bit} is biased" if bit < 8 * len(counts) else "bits are biased"
    bytes_ = counts.sum(axis=0)
    places = [
        int(i) for i, place in enumerate(counts) if place.sum() >= 2560 and stats.chisquare(place).pvalue < P_VALUE
    ]
    if places or stats.chisquare(bytes_).pvalue < P_VALUE:
        return f"byte {places[0]} is not uniform" if places else "its bytes are not uniform"
    return ""


def told_apart(first: np.ndarray, second: np.ndarray) -> str:
    """How values of one message tell two secrets apart; empty where they do not."""
    places = histogram(first), histogram(second)
    for i, (a, b) in enumerate(zip(*places, strict=True)):
        used = (a + b) > 0
        if used.sum() > 1 and _contingency(np.stack([a, b])[:, used]) < P_VALUE:
            return f"byte {i} tells them apart"
        if used.sum() == 1 and a.sum() and b.sum() and int(a.argmax()) != int(b.argmax()):
            return f"byte {i} is another constant"
    if apart_in_size(first[: 1 << 17].astype(np.float64), second[: 1 << 17].astype(np.float64)) < P_VALUE:
        return "its size tells them apart"
    return ""


def _contingency(counts: np.ndarray) -> float:
    return float(np.asarray(stats.chi2_contingency(counts)[1]))


def apart_in_size(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of a two-sample Kolmogorov-Smirnov test."""
    return float(np.asarray(stats.ks_2samp(first, second, method="asymp"))[1])
