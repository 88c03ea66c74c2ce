"""All that a party knows together: sums of values and of bits, and correlations, that tell two secrets apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .constants import numbers_of
from .known import Known, Played
from .lined import Row, plane_of, rows_of, whole
from .of_two import of_every_run, steps_of_two
from .outcomes import Outcomes
from .said import Sentences
from .secrets import Values
from .spans import broken, differing_correlation, fewer, numbers
from .uniform import SIGMAS, histogram, ones_of, told_apart

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
MOST_STEPS = 200
LANES = (0, 63)
LANE_ROWS = 1000
_HAS = ("drawn", "brought", "received", "opened")
LOOKS = {
    "sums": (*_HAS, "sent", "computed"), "lanes": (*_HAS, "sent", "computed"),
    "products": (*_HAS, "sent", "shown", "computed"), "correlations": (*_HAS, "shown", "joined"),
}  # fmt: skip
"""What of a view is looked at: which values, by how a party came by them."""


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
        runs_of: so many runs, at least, all of whose elements hold these values, of n experiments each.
    """

    def __init__(
        self, outcomes: Outcomes, sentences: Sentences, runs_of: Callable[[Values, int], list[Played]], n: int
    ):
        self._outcomes, self._sentences, self._runs_of, self._n = outcomes, sentences, runs_of, n
        places = {v + d for v in numbers_of(outcomes.protocol.program) for d in (-1, 0) if 3 < v + d < 62}
        self._planes = (0, 1, 2, 3, *sorted(places)[:8], 62, 63)
        self._steps = steps_of_two(outcomes.protocol.program)
        self._kept: dict[tuple[str, Values], np.ndarray] = {}
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
                said, share = self._said_of_sum(party, name)
                return Told(self._apart(party, one, other, f" by {name}: {text}{said}"), share)
        return Told()

    def _said_of_sum(self, party: str, name: str) -> tuple[str, float]:
        if not self._outcomes.elementwise:
            return "", 0.5
        inputs, run = self._sentences.random_run()
        value = next(v for said, v in _of_two(run, party) if said == name)
        return self._sentences.of_values([Known(name, "received", torch.from_numpy(value))], inputs)

    def _products(self, party: str, one: Values, other: Values) -> Told:
        """Whether a message does so once a product of two values is, as it would be if the secret were the first."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        if not self._outcomes.elementwise:
            return self._own_steps(party, one, other)
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

    def _own_steps(self, party: str, one: Values, other: Values) -> Told:
        """The same with a step of the protocol's own in the place of the product, as a matrix product is one."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        every = (_with_steps(self._steps, run, party, one) for run in (first, second))
        for (name, a), (_, b) in itertools.islice(zip(*every, strict=False), MOST_STEPS):
            self.tests += 10
            if text := told_apart(a, b):
                return Told(self._apart(party, one, other, f" by {name}: {text}"))
        return Told()

    # Bits.

    def _relation(self, party: str, one: Values, other: Values) -> Told:
        length = 64 * -(-self._n // 64)
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        for look in ("sums", "products"):
            a, rows = self._vectors(first, party, look)
            b, _ = self._vectors(second, party, look)
            if len(a) != len(b) or not len(a):
                continue
            taken, where = _either(numbers(a), numbers(b), length, one, other, partial(self._again, party, look))
            if taken is not None:
                said = f": {_names(rows, taken)} is the same in every run of {self._sentences.secret(where)}"
                sentence, share = self._said_of_bits(party, look, taken)
                return Told(self._apart(party, one, other, f"{said}{sentence}"), share)
        a, rows = self._vectors(first, party, "correlations")
        b, _ = self._vectors(second, party, "correlations")
        if len(a) and len(a) == len(b):
            sigmas, (i, j) = differing_correlation(a, b)
            self.tests += 1
            if sigmas > SIGMAS + 0.5:
                named = [*rows, "a constant"]
                said = f": {named[i]} and {named[j]} are correlated differently, by {sigmas:.0f} standard deviations"
                return Told(self._apart(party, one, other, said))
        return Told()

    def _again(self, party: str, look: str, values: Values, taken: list[int]) -> int:
        """In how many elements of another run of a secret, if there is one, a sum of bits is not what it is in most."""
        runs = self._runs_of(values, 2)[1:]
        if not runs:
            return 0
        vectors, _ = self._vectors(runs[0], party, look)
        return fewer(np.bitwise_xor.reduce(vectors[taken], axis=0), self._n)

    def _said_of_bits(self, party: str, look: str, taken: list[int]) -> tuple[str, float]:
        if not self._outcomes.elementwise:
            return "", 0.5
        inputs, run = self._sentences.random_run()
        bits = np.bitwise_xor.reduce(self._vectors(run, party, look)[0][taken], axis=0)
        return self._sentences.of_bits(bits, inputs)

    def _lanes(self, party: str, one: Values, other: Values) -> Told:
        """The same among the first elements alone, and among the last: of packed bits they share a place in a word."""
        if self._n < 128 or not self._outcomes.elementwise:
            return Told()
        words = -(-self._n // 64)
        sides = [self._lanes_of(party, values) for values in (one, other)]
        if sides[0].shape != sides[1].shape or not sides[0].size:
            return Told()
        for lane, a, b in zip(LANES, *sides, strict=True):
            again = partial(self._again_in, lane, party)
            taken, where = _either(numbers(a), numbers(b), 8 * a.shape[1], one, other, again)
            if taken is not None:
                known = _in_lanes(self._runs_of(one, 1)[0], party)
                names = [name for k in known for _, name in rows_of(k, self._n, (0,))]
                which = f"elements {lane * words} to {min(self._n, (lane + 1) * words) - 1}"
                secret = self._sentences.secret(where)
                said = f": {_names(names, taken)} of {which} is the same in every run of {secret}"
                return Told(self._apart(party, one, other, said))
        return Told()

    def _again_in(self, lane: int, party: str, values: Values, taken: list[int]) -> int:
        """The same of the first elements, or of the last, of as many further runs."""
        words = -(-self._n // 64)
        side = LANES.index(lane)
        count = -(-8 * self._lanes_of(party, values).shape[-1] // words)
        runs = self._runs_of(values, 2 * count)[count : 2 * count]
        if not runs:
            return 0
        bits = np.concatenate([_lane_bits(run, party, self._n)[taken, side] for run in runs], axis=-1)
        return fewer(np.packbits(np.bitwise_xor.reduce(bits, axis=0)), bits.shape[-1])

    def _lanes_of(self, party: str, values: Values) -> np.ndarray:
        """The lowest bits of what a party knows, [lanes, rows, packed elements] of so many runs as there must be."""
        if (party, values) not in self._kept:
            words, most = -(-self._n // 64), self._outcomes.case.runs
            few = LANE_ROWS if most is None else min(LANE_ROWS, max(0, most * words - SPARE))
            rows = len(first := _lane_bits(self._runs_of(values, 1)[0], party, self._n)[:few])
            count = -(-(rows + SPARE) // words)
            every = [_lane_bits(run, party, self._n)[:few] for run in self._runs_of(values, count)[:count]]
            alike = rows and all(bits.shape == first.shape for bits in every)
            found = np.concatenate(every, axis=-1) if alike else np.empty((0, 0, 0), np.uint8)
            self._kept[party, values] = np.packbits(found, axis=-1).swapaxes(0, 1) if alike else found
        return self._kept[party, values]

    def _vectors(self, run: Played, party: str, look: str) -> tuple[np.ndarray, list[str]]:
        """Bits of what a party knows, each of all elements as packed bytes, and their names; of `LOOKS`."""
        most = min(LIMIT, max(0, self._n - SPARE))
        if not most:
            return np.empty((0, 0), np.uint8), []
        known = [k for k in run.known[party] if k.how in LOOKS[look]]
        aligned = {id(k): v for k in known if (v := whole(k.value, self._n)) is not None}
        every = look == "sums" and 64 * sum(map(len, aligned.values())) <= ALL_PLANES
        planes = range(64) if every else (0,) if look == "products" else self._planes
        each = None if self._outcomes.elementwise else most  # of a large value no more are taken
        rows = [
            (*row, k.how, i)
            for k in known if id(k) in aligned
            for i, row in enumerate(itertools.islice(rows_of(k, self._n, planes), each))
        ]  # fmt: skip
        rows.sort(key=lambda row: (row[2] == "computed", plane_of(row[1])))
        if len(rows) > most and not self._outcomes.elementwise:  # of a large value some rows, rather than no others
            rows.sort(key=lambda row: row[3])
        found: list[Row] = [row[:3] for row in rows[:most]]
        if look == "products":
            several = found if len(found) <= PRODUCTS else _first_of_each(found)
            if len(found) + len(several) * (len(several) - 1) // 2 > most:
                return np.empty((0, 0), np.uint8), []
            found += [(a[0] & b[0], f"{a[1]} * {b[1]}", "") for a, b in itertools.combinations(several, 2)]
        rows = [row[0] for row in found]
        return (np.stack(rows) if rows else np.empty((0, 0), np.uint8)), [row[1] for row in found]


def _in_lanes(run: Played, party: str) -> list[Known]:
    """What a party knows, what it computes last."""
    return sorted((k for k in run.known[party] if k.how in LOOKS["lanes"]), key=lambda k: k.how == "computed")


def _lane_bits(run: Played, party: str, n: int) -> np.ndarray:
    """The lowest bits of what a party knows, of the first elements and of the last: [rows, lanes, elements] of 0, 1."""
    words, found = -(-n // 64), []
    for known in _in_lanes(run, party):
        lined = whole(known.value, n)
        if lined is None:
            continue
        if lined.shape[-1] == n:
            lined = torch.nn.functional.pad(lined, (0, 64 * words - n)).view(-1, 64, words)[:, LANES]
        else:
            lined = torch.stack([lined >> lane for lane in LANES], 1)
        found.append((lined & 1).to(torch.uint8))
    return torch.cat(found)[:LANE_ROWS].numpy() if found else np.empty((0, 0, 0), np.uint8)


def _first_of_each(rows: Sequence[Row]) -> list[Row]:
    """Of what was opened or shown first one row of each value, then another."""
    places: dict[str, int] = {}
    found = []
    for row in rows:
        if row[2] in ("opened", "shown"):
            value = row[1].split(" [")[0]
            places[value] = places.get(value, -1) + 1
            found.append((places[value], row))
    return [row for _, row in sorted(found, key=lambda placed: placed[0])][:OPENED]


def _either(
    a: Sequence[int], b: Sequence[int], length: int, one: Values, other: Values,
    again: Callable[[Values, list[int]], int],
) -> tuple[list[int] | None, Values]:  # fmt: skip
    taken = broken(a, b, length, partial(again, one))
    return (taken, one) if taken is not None else (broken(b, a, length, partial(again, other)), other)


def _names(rows: Sequence[str], taken: Sequence[int]) -> str:
    parts = [rows[i] for i in taken]
    return " + ".join(parts[:6]) + (f" and {len(parts) - 6} more bits" if len(parts) > 6 else "")


def _words(run: Played, party: str, *hows: str) -> list[Known]:
    return [k for k in run.known[party] if k.how in hows and k.value.dtype in (torch.int64, torch.int32)]


def _of_two(run: Played, party: str) -> Iterator[tuple[str, np.ndarray]]:
    """Sums and differences of a message and another value that its receiver has of each element."""
    known = _words(run, party, "drawn", "brought", "received", "opened")
    known += _words(run, party, "computed")
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


def _with_steps(steps: Sequence, run: Played, party: str, secret: Values) -> Iterator[tuple[str, np.ndarray]]:
    """A message with what a step makes of two values, or of these less what an input is thought to be."""
    opened = [(k.name, k.value) for k in _words(run, party, "opened", "received") if k.value.dtype == torch.int64]
    less = [(f"({name} - {v})", value - v) for name, value in opened for v in dict.fromkeys(secret) if v]
    values = [*opened, *less, *((k.name, k.value) for k in _words(run, party, "drawn"))]
    messages = [k for k in _words(run, party, "received") if k.value.dtype == torch.int64]
    for f, (first, second) in steps:
        sides = ([v for v in values if (v[1].shape[:-1], v[1].dtype) == form] for form in (first, second))
        for (one, a), (other, b) in itertools.product(*sides):
            made = of_every_run(f, a, b)
            for message in messages:
                if message.value.shape == made.shape:
                    for sign, value in (("+", message.value + made), ("-", message.value - made)):
                        yield (
                            f"{message.name} {sign} a step of {one} and {other}",
                            value.contiguous().numpy().reshape(-1),
                        )


def _ones(value: torch.Tensor) -> np.ndarray:
    """For each bit of a word the share of elements in which it is one."""
    return ones_of(histogram(value.contiguous().numpy().reshape(-1))) / value.numel()
