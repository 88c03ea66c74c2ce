"""All that a party knows together: sums of values and of bits, and correlations, that tell two secrets apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..ring.bitplanes import planes, rows
from .constants import numbers_of
from .lined import Row, plane_of, rows_of, whole
from .outcomes import Outcomes
from .played import Known, Played
from .said import Sentences
from .secrets import Values
from .spans import broken, differing_correlation, numbers
from .uniform import SIGMAS, told_apart

ALL_PLANES = 1500
"""Bits of a view up to which all planes are taken; of larger ones those in which carries do not hide relations, and
those at the numbers that the protocol's steps take."""
LIMIT = 3000
SPARE = 128
"""Elements beyond the bits of a view: of so many fewer random bits some sum is constant with probability 2^-128."""
MOST_SUMS = 200
"""Pairs of values whose sum and difference are looked at."""
MOST_PRODUCTS = 300
"""Products of two values that are looked at, each added to a message and taken off it."""
PRODUCTS = 40
"""Lowest bits up to which all their products are taken too; of more those of what was opened."""
OPENED = 64
LANES = (0, 63)
LANE_ROWS = 250


@dataclass(frozen=True)
class Told:
    """That secrets are told apart, and how often what tells them agrees with a sentence about random inputs."""

    text: str = ""
    share: float = 0.5

    def __bool__(self) -> bool:
        return bool(self.text)


class JointView:
    """What each party of a protocol knows, all of it together.

    Args:
        runs_of: so many runs, at least, all of whose elements hold these values.
    """

    def __init__(self, outcomes: Outcomes, sentences: Sentences, runs_of: Callable[[Values, int], list[Played]]):
        self._outcomes, self._sentences, self._runs_of = outcomes, sentences, runs_of
        self._n = outcomes.protocol.n
        places = {v + d for v in numbers_of(outcomes.protocol.program) for d in (-1, 0) if 3 < v + d < 62}
        self._planes = (0, 1, 2, 3, *sorted(places)[:8], 62, 63)
        self.tests = 0

    def told(self, party: str, one: Values, other: Values) -> Told:
        """What tells a party two secrets apart."""
        for look in (self._sums, self._products, self._relation, self._lanes):
            if found := look(party, one, other):
                return found
        return Told()

    def _apart(self, party: str, one: Values, other: Values, by: str) -> str:
        return f"{party} tells {self._sentences.secret(one)} and {self._sentences.secret(other)} apart{by}"

    # Whole values.

    def _sums(self, party: str, one: Values, other: Values) -> Told:
        """Whether a message tells the secrets apart once something that its receiver knows is taken off or added."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        for (name, a), (_, b) in zip(_of_two(first, party), _of_two(second, party), strict=False):
            self.tests += 10
            if text := told_apart(a, b):
                inputs, run = self._sentences.random_run()
                value = next(v for said, v in _of_two(run, party) if said == name)
                said, share = self._sentences.of_values([Known(name, "received", torch.from_numpy(value))], inputs)
                return Told(self._apart(party, one, other, f" by {name}: {text}{said}"), share)
        return Told()

    def _products(self, party: str, one: Values, other: Values) -> Told:
        """Whether a message does so once a product of two values is, as it would be if the secret were the first."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        every = _with_products(first, party, one), _with_products(second, party, one)
        for (name, a), (_, b) in zip(*every, strict=False):
            self.tests += 1
            shares = _ones(a), _ones(b)
            both = ((shares[0] + shares[1]) / 2).clip(1 / a.numel(), 1 - 1 / a.numel())
            sigmas = np.abs(shares[0] - shares[1]) / np.sqrt(2 * both * (1 - both) / a.numel())
            if sigmas.max() > SIGMAS + 1:
                at = int(sigmas.argmax())
                said = f" by {name}: bit {at} of it is one in {shares[0][at]:.1%} and in {shares[1][at]:.1%}"
                return Told(self._apart(party, one, other, said))
        return Told()

    # Bits.

    def _relation(self, party: str, one: Values, other: Values) -> Told:
        length = 64 * -(-self._n // 64)
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        for products in (False, True):
            a, rows = self._vectors(first, party, products)
            b, _ = self._vectors(second, party, products)
            if len(a) != len(b) or not len(a):
                continue
            taken, where = _either(numbers(a), numbers(b), length, one, other)
            if taken is not None:
                said = f": {_names(rows, taken)} is the same in every run of {self._sentences.secret(where)}"
                inputs, run = self._sentences.random_run()
                bits = np.bitwise_xor.reduce(self._vectors(run, party, products)[0][taken], axis=0)
                sentence, share = self._sentences.of_bits(bits, inputs)
                return Told(self._apart(party, one, other, f"{said}{sentence}"), share)
        a, rows = self._vectors(first, party, False, sent=False, few=True)
        b, _ = self._vectors(second, party, False, sent=False, few=True)
        if len(a) and len(a) == len(b):
            sigmas, (i, j) = differing_correlation(a, b)
            self.tests += 1
            if sigmas > SIGMAS + 0.5:
                named = [*rows, "a constant"]
                said = f": {named[i]} and {named[j]} are correlated differently, by {sigmas:.0f} standard deviations"
                return Told(self._apart(party, one, other, said))
        return Told()

    def _lanes(self, party: str, one: Values, other: Values) -> Told:
        """The same among the first elements alone, and among the last: of packed bits they share a place in a word."""
        if self._n < 128:
            return Told()
        rows = self._vectors(self._runs_of(one, 1)[0], party, False)[1][:LANE_ROWS]
        words = -(-self._n // 64)
        count = -(-(len(rows) + SPARE) // words)
        sides = []
        for values in (one, other):
            found = [self._vectors(run, party, False)[0][:LANE_ROWS] for run in self._runs_of(values, count)[:count]]
            if any(len(f) != len(rows) for f in found) or not rows:
                return Told()
            sides.append(np.concatenate(found, axis=1).view(np.uint64))
        for lane in LANES:
            a, b = (np.packbits((side >> np.uint64(lane) & np.uint64(1)).astype(np.uint8), axis=1) for side in sides)
            taken, where = _either(numbers(a), numbers(b), 8 * a.shape[1], one, other)
            if taken is not None:
                which = f"elements {lane * words} to {min(self._n, (lane + 1) * words) - 1}"
                said = f": {_names(rows, taken)} of {which} is the same in every run of {self._sentences.secret(where)}"
                return Told(self._apart(party, one, other, said))
        return Told()

    def _vectors(
        self, run: Played, party: str, products: bool, sent: bool = True, few: bool = False
    ) -> tuple[np.ndarray, list[str]]:
        """Bits of what a party knows, each of all elements as packed bytes, and their names."""
        known = [k for k in run.known[party] if sent or k.how != "sent"]
        aligned = [k for k in known if whole(k.value, self._n) is not None]
        every = not few and not products and 64 * len(aligned) <= ALL_PLANES
        planes = range(64) if every else (0,) if products else self._planes
        found: list[Row] = [(*row, k.how) for k in aligned for row in rows_of(k, self._n, planes)]
        found.sort(key=lambda row: plane_of(row[1]))
        most = min(LIMIT, max(0, self._n - SPARE))
        found = found[:most]
        if products:
            several = found if len(found) <= PRODUCTS else [row for row in found if row[2] == "opened"][:OPENED]
            if len(found) + len(several) * (len(several) - 1) // 2 > most:
                return np.empty((0, 0), np.uint8), []
            found += [(a[0] & b[0], f"{a[1]} * {b[1]}", "") for a, b in itertools.combinations(several, 2)]
        rows = [row[0] for row in found]
        return (np.stack(rows) if rows else np.empty((0, 0), np.uint8)), [row[1] for row in found]


def _either(
    a: Sequence[int], b: Sequence[int], length: int, one: Values, other: Values
) -> tuple[list[int] | None, Values]:
    taken = broken(a, b, length)
    return (taken, one) if taken is not None else (broken(b, a, length), other)


def _names(rows: Sequence[str], taken: Sequence[int]) -> str:
    parts = [rows[i] for i in taken]
    return " + ".join(parts[:6]) + (f" and {len(parts) - 6} more bits" if len(parts) > 6 else "")


def _words(run: Played, party: str, *hows: str) -> list[Known]:
    return [k for k in run.known[party] if k.how in hows and k.value.dtype in (torch.int64, torch.int32)]


def _of_two(run: Played, party: str) -> Iterator[tuple[str, np.ndarray]]:
    """Sums and differences of a message and another value that its receiver has of each element."""
    known = _words(run, party, "drawn", "brought", "received", "opened")
    pairs = [
        (k, other)
        for i, k in enumerate(known)
        for j, other in enumerate(known)
        if k.how == "received" and i != j and (other.how != "received" or i < j)
        and (k.value.shape, k.value.dtype) == (other.value.shape, other.value.dtype)
    ]  # fmt: skip
    for k, other in pairs[:MOST_SUMS]:
        for sign, value in (("+", k.value + other.value), ("-", k.value - other.value)):
            yield f"{k.name} {sign} {other.name}", value.contiguous().numpy().reshape(-1)


def _with_products(run: Played, party: str, secret: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """A message with a product of two values that are open, received or drawn, less what an input is thought to be."""
    messages = [k for k in _words(run, party, "received") if k.value.dtype == torch.int64]
    opened = [(k.name, k.value) for k in _words(run, party, "opened", "received") if k.value.dtype == torch.int64]
    less = [(f"({name} - {v})", value - v) for name, value in opened for v in dict.fromkeys(secret) if v]
    drawn = [(k.name, k.value) for k in _words(run, party, "drawn") if k.value.dtype == torch.int64]
    pairs = itertools.combinations_with_replacement([*reversed(opened), *less, *drawn], 2)
    every = [
        (message, a, b) for (a, b), message in itertools.product(pairs, messages)
        if a[1].shape == b[1].shape == message.value.shape and message.value.numel()
    ]  # fmt: skip
    for message, (one, a), (other, b) in every[:MOST_PRODUCTS]:
        product = a * b
        yield f"{message.name} + {one} * {other}", message.value + product
        yield f"{message.name} - {one} * {other}", message.value - product


def _ones(value: torch.Tensor) -> np.ndarray:
    """For each bit of a word the share of elements in which it is one."""
    return np.unpackbits(planes(rows(value)).numpy().view(np.uint8), axis=1).sum(axis=1, dtype=np.int64) / value.numel()
