"""Sums mod 2 of bits that a party knows: which of them tell two secrets apart, and which bits they are.

A mask that is used twice, a mask that its receiver can take off, a share without its mask: each message is uniform, and
a sum of a few known bits is the secret. Such a sum is found by elimination over the two-element field, among all bits
of all values, and among the lowest bits and their products, where multiplications without a fresh mask show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RARE = 48
Bit = tuple[int, int]
"""A value's place in a list, and the place of the bit in it; of a product two of them."""


class Span:
    """Sums mod 2 of vectors of bits, the constant one among them; each knows of which vectors it is the sum."""

    def __init__(self, length: int):
        self._basis: dict[int, tuple[int, int]] = {}
        self.rank = 0
        self._count = 0
        self.add((1 << length) - 1)
        self.rank = 0

    def reduced(self, vector: int) -> tuple[int, int]:
        """What is left of a vector, and which vectors were taken off it, as bits of a number."""
        taken = 0
        while vector and (top := vector.bit_length()) in self._basis:
            other, parts = self._basis[top]
            vector ^= other
            taken ^= parts
        return vector, taken

    def add(self, vector: int) -> bool:
        """Whether it is no sum of those before."""
        left, taken = self.reduced(vector)
        if left:
            self._basis[left.bit_length()] = left, taken ^ (1 << self._count)
            self.rank += 1
        self._count += 1
        return left != 0


def fewer(bits: np.ndarray, count: int) -> int:
    """Of so many packed bits, how many are as the fewer are."""
    ones = int(np.unpackbits(bits, count=count).sum())
    return min(ones, count - ones)


def numbers(vectors: np.ndarray) -> list[int]:
    """Rows of packed bits as whole numbers."""
    return [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(vectors)]


def broken(
    one: Sequence[int], other: Sequence[int], length: int, again: Callable[[list[int]], int] | None = None
) -> list[int] | None:
    """A sum of vectors, and of the constant one, that is zero in one run and not in another: which vectors, or None.

    What follows from what a party knows is a sum that is zero in every run, whatever the secrets are; one that is zero
    for one secret only tells them apart. Of v vectors of m random bits some sum is zero with probability 2^(v - m). A
    sum that is hardly ever one may be zero throughout a run by chance; that it is one in `RARE` elements of the other
    run and in none of this one happens with probability 2^-RARE where the two are alike. Where many vectors are hardly
    ever one, such as the codes of wide blocks, some sum of them may be zero in one run and no other: that is what
    another run is for.

    Args:
        one, other: the vectors of the two runs, in the same order, of so many bits each.
        again: of such a sum, the elements in which another run of the first is not as most are.
    """
    basis: dict[int, tuple[int, int]] = {}
    ones = (1 << length) - 1
    for i, (first, second) in enumerate(((ones, ones), *zip(one, other, strict=True))):
        vector, taken = first << length | second, 1 << i
        while vector > ones and (top := vector.bit_length()) in basis:
            reducing, parts = basis[top]
            vector ^= reducing
            taken ^= parts
        if vector <= ones:
            if vector.bit_count() >= RARE:
                found = [at - 1 for at in range(1, taken.bit_length()) if taken >> at & 1]
                if again is None or again(found) <= RARE // 4:
                    return found
        else:
            basis[vector.bit_length()] = vector, taken
    return None


def largest_correlation(vectors: np.ndarray) -> float:
    """Between any two rows of packed bits, or of any with a constant, in standard deviations."""
    return float(np.abs(_correlations(vectors)).max())


def _correlations(vectors: np.ndarray) -> np.ndarray:
    signs = np.unpackbits(vectors.view(np.uint8), axis=1).astype(np.float32) * 2 - 1
    signs = np.concatenate([signs, np.ones((1, signs.shape[1]), np.float32)])
    return np.triu(signs @ signs.T, 1) / signs.shape[1] ** 0.5


def differing_correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, Bit]:
    """Of which two rows the correlation differs most between two runs, in its standard deviations; the last is one."""
    apart = np.abs(_correlations(one) - _correlations(other)) / 2**0.5
    at = int(apart.argmax())
    return float(apart.flat[at]), (at // apart.shape[1], at % apart.shape[1])
