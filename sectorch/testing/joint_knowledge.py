"""Leaks in all values that a party knows together.

A single message may be uniform and several of them together show a secret. `JointView` looks for sums of values, sums
of bits and correlations that tell two secrets apart. `Views` runs it for each party, after the tests message by
message.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..choreography.net import Compute
from ..choreography.program.trace import OperandRef, Program
from ..ring.bitplanes import planes, to_rows
from .outcomes import (
    SIGMAS,
    Outcomes,
    Pair,
    Values,
    columns_differ,
    distinguishable,
    histogram,
    not_uniform,
    numbers_of,
    ones_of,
    pairs_of,
)
from .protocol_runs import LINEAR, KnownValue, Protocol, ProtocolRun, side_by_side

# The bits of values that a party knows, aligned by the elements that they belong to.

Row = tuple[np.ndarray, str, str]
"""A bit of each element as packed bytes, its name, and how its party came by it."""


def element_bits(value: torch.Tensor, n: int) -> torch.Tensor | None:
    """Align a value with n elements: [k, n], k numbers of each element; or, if it is packed bits, [k, words].

    Returns:
        None if the value is neither.
    """
    words = -(-n // 64)
    if value.dim() and value.shape[-1] == n:
        return value.reshape(-1, n)
    if value.dim() and value.shape[0] == n:
        return value.reshape(n, -1).T.contiguous()
    if value.numel() == n:
        return value.reshape(1, n)
    if value.numel() and value.dim() and value.shape[-1] % words == 0 and value.dtype == torch.int64:
        return value.reshape(-1, words)
    return None


def in_columns(value: torch.Tensor, n: int) -> np.ndarray | None:
    """A value of n experiments as [k, columns] whose columns are independent; None if it is not aligned with them."""
    lined = element_bits(value, n)
    if lined is None:
        return None
    found = lined.contiguous().numpy()
    return found if lined.shape[-1] == n else found.view(np.uint8)  # eight elements of packed bits


def tells_apart(one: torch.Tensor, other: torch.Tensor, n: int) -> str:
    """How a value of n experiments tells two secrets apart, in words; empty if it does not."""
    text = distinguishable(*(v.contiguous().numpy().reshape(-1) for v in (one, other)))
    return text if text and _columns_differ(in_columns(one, n), in_columns(other, n)) else ""


def _columns_differ(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is None or other is None or columns_differ(one, other)


def rows_of(known: KnownValue, n: int, places: Iterable[int]) -> Iterator[tuple[np.ndarray, str]]:
    """The bits of a value at some places of a word: for each place the bit of all elements, packed, and its name."""
    lined = element_bits(known.value, n)
    if lined is None:
        return
    several = len(lined) > 1
    for i, one in enumerate(lined):
        name = f"{known.name}{f' [{i}]' if several else ''}"
        if lined.shape[-1] != n:
            yield one.contiguous().numpy().view(np.uint8), f"the packed bits of {name}"
            continue
        width = 8 * one.dtype.itemsize
        packed = planes(to_rows(one.to(torch.int64))).numpy()
        for place in dict.fromkeys(min(p, width - 64 + p) if p >= 62 else p for p in places if p >= 62 or p < width):
            yield packed[place].view(np.uint8), f"bit {place} of {name}"


def plane_of(name: str) -> int:
    """The place in a word of a bit, from the name that `rows_of` gave it; 0 for packed bits."""
    return int(name.split()[1]) if name.startswith("bit ") else 0


def unpack_bits(row: np.ndarray, n: int) -> torch.Tensor:
    """The bit of each element, in order: bit t of word w is element t * W + w."""
    words = row.view(np.uint64)
    bits = (words[None, :] >> np.arange(64, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(bits.reshape(-1)[:n].astype(bool))


# The steps of a protocol that take two tensors. They are tried on the values of a party.

Form = tuple[torch.Size, torch.dtype]


def steps_of_two(program: Program) -> list[tuple[Callable, tuple[Form, ...]]]:
    """The steps that take two tensors, as functions, with the operands' shapes and types; each kind of step once.

    Checks are left out, since their only result is an error.
    """
    forms: dict[Any, Form] = {i.slot: (i.shape, i.dtype) for i in program.inputs}
    for node in program.nodes:
        made = zip(node.slots, node.results, strict=True)
        forms |= {slot: (y.shape, y.dtype) for slot, y in made if isinstance(y, torch.Tensor)}
    found: dict[tuple, tuple[Callable, tuple[Form, ...]]] = {}
    for node in program.nodes:
        step = node.step
        if not isinstance(step, Compute) or not step.pure or step.f in LINEAR:
            continue
        if len(node.operand_slots) == 2 and not node.many:
            taken = tuple(forms[slot] for slot in node.operand_slots)
            found.setdefault((repr(step.f), taken), (functools.partial(_apply, step.f, node.operands), taken))
    return list(found.values())


def _apply(f: Callable, operands: Sequence, *tensors: torch.Tensor) -> torch.Tensor:
    left = iter(tensors)
    return f(*(next(left) if isinstance(o, OperandRef) else o for o in operands))


def of_every_run(f: Callable, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Apply f to two tensors [..., runs] run by run; with `torch.vmap` unless f is a compiled loop."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs such an operator in a loop
            return torch.vmap(f, -1, -1)(a, b)
    except RuntimeError:
        return torch.stack([f(x, y) for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True)], -1)


# The predicate of the inputs that leaked bits agree with most, for the error text.

BITS = (*range(8), 19, 20, 21, 31, 32, 47, 61, 62)
"""Bits of an input that are tried as predicates; the sign is one of its own."""


def predicates(inputs: Sequence[torch.Tensor], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Predicates of the inputs in words, and for each element whether it holds."""
    for x, name in zip(inputs, names, strict=True):
        yield f"{name} < 0", x < 0
        yield f"{name} == 0", x == 0
        yield f"|{name}| is large", x.abs() > x.abs().double().median().long()
        for bit in BITS:
            yield f"bit {bit} of {name}", (x >> bit & 1).bool()
    for i in range(len(inputs)):
        for j in range(i + 1, len(inputs)):
            if inputs[i].shape == inputs[j].shape:
                yield f"{names[i]} < {names[j]}", inputs[i] < inputs[j]
                yield f"bit 0 of {names[i]} + {names[j]}", ((inputs[i] + inputs[j]) & 1).bool()
                yield f"bit 0 of {names[i]} * {names[j]}", ((inputs[i] * inputs[j]) & 1).bool()


def best(found: torch.Tensor, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[str, float, float]:
    """The predicate that a bit of each element agrees with most, beyond chance.

    Returns:
        The predicate, the share of elements in which the bit agrees, and the distance from chance in standard
        deviations. The predicate is empty if that is below 8 for all.
    """
    most = ("", 0.5, 0.0)
    n = found.numel()
    for said, truth in predicates(inputs, names):
        if truth.shape != found.shape:
            continue
        share = float(truth.double().mean())
        if not 0.02 < share < 0.98:
            continue
        # If the predicate holds in this share of elements, independent bits agree with it in a known share.
        ones = float(found.double().mean())
        chance = share * ones + (1 - share) * (1 - ones)
        spread = max((chance * (1 - chance) / n) ** 0.5, 1e-9)
        agree = float((found.bool() == truth).double().mean())
        sigmas = abs(agree - chance) / spread
        if sigmas > max(most[2], 8.0):
            most = (said, max(agree, 1 - agree), sigmas)
    return most


class Sentences:
    """Secrets and leaks in words, for reports."""

    def __init__(self, outcomes: Outcomes):
        self._outcomes = outcomes
        count = len(outcomes.protocol.given)
        self._names = ["x"] if count == 1 else [f"x{i}" for i in range(count)]

    def secret(self, values: Values) -> str:
        """The inputs' values."""
        return ", ".join(f"{name} = {value}" for name, value in zip(self._names, values, strict=True))

    def random_run(self) -> tuple[list, ProtocolRun]:
        """Inputs all over their range, and a run with them."""
        inputs = self._outcomes.spread()
        return inputs, self._outcomes.play(inputs, "sentence")

    def of_values(self, values: Sequence[KnownValue], inputs: Sequence) -> tuple[str, float]:
        """The predicate of random inputs that bits of some values agree with most, in words, and the share."""
        found = ("", 0.5, "")
        n = self._outcomes.protocol.n
        for known in values:
            for row, said in rows_of(known, n, range(64)):
                sentence, share, _ = best(unpack_bits(row, n), [x.reshape(-1) for x in inputs], self._names)
                if sentence and share > found[1]:
                    found = (sentence, share, said)
        return f"; {found[2]} says '{found[0]}' in {found[1]:.1%} of random inputs" if found[0] else "", found[1]

    def of_bits(self, row: np.ndarray, inputs: Sequence) -> tuple[str, float]:
        """The same for one bit of each element, as packed bytes."""
        bits = unpack_bits(row, self._outcomes.protocol.n)
        sentence, share, _ = best(bits, [x.reshape(-1) for x in inputs], self._names)
        return f"; it says '{sentence}' in {share:.1%} of random inputs" if sentence else "", share


# Sums mod 2 of known bits that tell two secrets apart.
#
# A mask that is used twice, a mask that its receiver can remove, a share without its mask: in each case every message
# is uniform, and a sum of a few known bits is the secret. Elimination over the two-element field finds such a sum,
# among all bits of all values, and among the lowest bits and their products, which show multiplications without a fresh
# mask.

RARE = 48
Bit = tuple[int, int]
"""The places of two rows in a list."""


def count_bits(bits: np.ndarray, count: int) -> int:
    """Of `count` packed bits, the number of ones or of zeros, whichever is smaller."""
    ones = int(np.unpackbits(bits, count=count).sum())
    return min(ones, count - ones)


def numbers(vectors: np.ndarray) -> list[int]:
    """Rows of packed bits as whole numbers."""
    return [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(vectors)]


def broken_sum(
    one: Sequence[int], other: Sequence[int], length: int, again: Callable[[list[int]], int] | None = None
) -> list[int] | None:
    """Find a sum of vectors, and of the constant one, that is zero in one run and not in another.

    A sum that follows from a party's own knowledge is zero in every run, for all secrets. A sum that is zero for one
    secret only tells two secrets apart. Of v vectors of m random bits some sum is zero with probability 2^(v - m). A
    sum that is rarely one may be zero in a whole run by chance. That it is one in `RARE` elements of the other run and
    in none of this one happens with probability 2^-RARE if both have the same distribution. Where many vectors are
    rarely one, such as the codes of wide blocks, some sum of them may be zero in one run and in no other. A second run
    (`again`) excludes that.

    Args:
        one, other: the vectors of the two runs, in the same order, of `length` bits each.
        again: for such a sum, the number of elements in which another run of the first differs from most.

    Returns:
        The numbers of the vectors, -1 for the constant one; None if there is no such sum.
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


def _correlations(vectors: np.ndarray) -> np.ndarray:
    signs = np.unpackbits(vectors.view(np.uint8), axis=1).astype(np.float32) * 2 - 1
    signs = np.concatenate([signs, np.ones((1, signs.shape[1]), np.float32)])
    return np.triu(signs @ signs.T, 1) / signs.shape[1] ** 0.5


def differing_correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, Bit]:
    """The largest difference of a correlation between two runs, in standard deviations, and its two rows."""
    apart = np.abs(_correlations(one) - _correlations(other)) / 2**0.5
    at = int(apart.argmax())
    return float(apart.flat[at]), (at // apart.shape[1], at % apart.shape[1])


ALL_PLANES = 1500
"""Bits of a view up to which all bit planes are taken. Of larger views those are taken in which carries do not hide
relations, and those at the numbers that the protocol's steps take."""
LIMIT = 3000
SPARE = 128
"""Elements in excess of the bits of a view: some sum of random bits is then constant with probability 2^-128."""
MOST_SUMS = 200
"""Pairs of values whose sum and difference are tested."""
MOST_PRODUCTS = 300
"""Products of two values that are tested, each added to a message and subtracted from it."""
PRODUCTS = 40
"""Lowest bits up to which all their products are taken too; of more bits only the products of opened ones."""
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
class LeakFinding:
    """That secrets are told apart, and how often what tells them agrees with a sentence about random inputs."""

    text: str = ""
    share: float = 0.5

    def __bool__(self) -> bool:
        return bool(self.text)


class JointView:
    """The search for a leak in all that each party knows together.

    Args:
        runs_of: gives at least so many runs whose elements all hold these values, of n experiments each.
    """

    def __init__(
        self, outcomes: Outcomes, sentences: Sentences, runs_of: Callable[[Values, int], list[ProtocolRun]], n: int
    ):
        self._outcomes, self._sentences, self._runs_of, self._n = outcomes, sentences, runs_of, n
        places = {v + d for v in numbers_of(outcomes.protocol.program) for d in (-1, 0) if 3 < v + d < 62}
        self._planes = (0, 1, 2, 3, *sorted(places)[:8], 62, 63)
        self._steps = steps_of_two(outcomes.protocol.program)
        self._lane_cache: dict[tuple[str, Values], np.ndarray] = {}
        self.tests = 0

    def find_leak(self, party: str, one: Values, other: Values) -> LeakFinding:
        """A leak that tells a party two secrets apart; an empty finding if there is none."""
        for look in (self._sums, self._products, self._relation, self._lanes):
            if found := look(party, one, other):
                return found
        return LeakFinding()

    def _tells_apart(self, party: str, one: Values, other: Values, by: str) -> str:
        return f"{party} tells {self._sentences.secret(one)} and {self._sentences.secret(other)} apart{by}"

    def _sums(self, party: str, one: Values, other: Values) -> LeakFinding:
        """Test each message plus or minus another value that its receiver knows."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        for (name, a), (_, b) in zip(_sums_of_two(first, party), _sums_of_two(second, party), strict=False):
            self.tests += 10
            if text := tells_apart(a, b, self._n):
                said, share = self._sentence_of_sum(party, name)
                return LeakFinding(self._tells_apart(party, one, other, f" by {name}: {text}{said}"), share)
        return LeakFinding()

    def _sentence_of_sum(self, party: str, name: str) -> tuple[str, float]:
        if not self._outcomes.elementwise:
            return "", 0.5
        inputs, run = self._sentences.random_run()
        value = next(v for said, v in _sums_of_two(run, party) if said == name)
        return self._sentences.of_values([KnownValue(name, "received", value)], inputs)

    def _products(self, party: str, one: Values, other: Values) -> LeakFinding:
        """Test each message plus or minus a product of two known values, or of these less the first secret."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        if not self._outcomes.elementwise:
            return self._step_products(party, one, other)
        every = _sums_with_products(first, party, one), _sums_with_products(second, party, one)
        for (name, a), (_, b) in zip(*every, strict=False):
            self.tests += 1
            shares = _ones(a), _ones(b)
            both = ((shares[0] + shares[1]) / 2).clip(1 / a.numel(), 1 - 1 / a.numel())
            sigmas = np.abs(shares[0] - shares[1]) / np.sqrt(2 * both * (1 - both) / a.numel())
            if sigmas.max() > SIGMAS + 1 and _columns_differ(in_columns(a, self._n), in_columns(b, self._n)):
                at = int(sigmas.argmax())
                said = f" by {name}: bit {at} of it is one in {shares[0][at]:.1%} and in {shares[1][at]:.1%}"
                return LeakFinding(self._tells_apart(party, one, other, said))
        return LeakFinding()

    def _step_products(self, party: str, one: Values, other: Values) -> LeakFinding:
        """The same with a step of the protocol, such as a matrix product, in place of the product."""
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        every = (_sums_with_steps(self._steps, run, party, one) for run in (first, second))
        for (name, a), (_, b) in itertools.islice(zip(*every, strict=False), MOST_STEPS):
            self.tests += 10
            if text := tells_apart(a, b, self._n):
                return LeakFinding(self._tells_apart(party, one, other, f" by {name}: {text}"))
        return LeakFinding()

    def _relation(self, party: str, one: Values, other: Values) -> LeakFinding:
        length = 64 * -(-self._n // 64)
        first, second = self._runs_of(one, 1)[0], self._runs_of(other, 1)[0]
        for look in ("sums", "products"):
            a, rows = self._vectors(first, party, look)
            b, _ = self._vectors(second, party, look)
            if len(a) != len(b) or not len(a):
                continue
            taken, where = _broken_sum_of_either(
                numbers(a), numbers(b), length, one, other, partial(self._exceptions, party, look)
            )
            if taken is not None:
                said = f": {_names(rows, taken)} is the same in every run of {self._sentences.secret(where)}"
                sentence, share = self._sentence_of_bits(party, look, taken)
                return LeakFinding(self._tells_apart(party, one, other, f"{said}{sentence}"), share)
        a, rows = self._vectors(first, party, "correlations")
        b, _ = self._vectors(second, party, "correlations")
        if len(a) and len(a) == len(b):
            sigmas, (i, j) = differing_correlation(a, b)
            self.tests += 1
            if sigmas > SIGMAS + 0.5:
                named = [*rows, "a constant"]
                said = f": {named[i]} and {named[j]} are correlated differently, by {sigmas:.0f} standard deviations"
                return LeakFinding(self._tells_apart(party, one, other, said))
        return LeakFinding()

    def _exceptions(self, party: str, look: str, values: Values, taken: list[int]) -> int:
        """The number of elements in which a sum of bits differs from most, in another run; 0 without one."""
        runs = self._runs_of(values, 2)[1:]
        if not runs:
            return 0
        vectors, _ = self._vectors(runs[0], party, look)
        return count_bits(np.bitwise_xor.reduce(vectors[taken], axis=0), self._n)

    def _sentence_of_bits(self, party: str, look: str, taken: list[int]) -> tuple[str, float]:
        if not self._outcomes.elementwise:
            return "", 0.5
        inputs, run = self._sentences.random_run()
        bits = np.bitwise_xor.reduce(self._vectors(run, party, look)[0][taken], axis=0)
        return self._sentences.of_bits(bits, inputs)

    def _lanes(self, party: str, one: Values, other: Values) -> LeakFinding:
        """The same among the first elements alone, and the last, which share a place in words of packed bits."""
        if self._n < 128 or not self._outcomes.elementwise:
            return LeakFinding()
        words = -(-self._n // 64)
        sides = [self._lanes_of(party, values) for values in (one, other)]
        if sides[0].shape != sides[1].shape or not sides[0].size:
            return LeakFinding()
        for lane, a, b in zip(LANES, *sides, strict=True):
            again = partial(self._lane_exceptions, lane, party)
            taken, where = _broken_sum_of_either(numbers(a), numbers(b), 8 * a.shape[1], one, other, again)
            if taken is not None:
                known = _known_for_lanes(self._runs_of(one, 1)[0], party)
                names = [name for k in known for _, name in rows_of(k, self._n, (0,))]
                which = f"elements {lane * words} to {min(self._n, (lane + 1) * words) - 1}"
                secret = self._sentences.secret(where)
                said = f": {_names(names, taken)} of {which} is the same in every run of {secret}"
                return LeakFinding(self._tells_apart(party, one, other, said))
        return LeakFinding()

    def _lane_exceptions(self, lane: int, party: str, values: Values, taken: list[int]) -> int:
        """`_exceptions` of the first elements, or of the last, in as many further runs."""
        words = -(-self._n // 64)
        side = LANES.index(lane)
        count = -(-8 * self._lanes_of(party, values).shape[-1] // words)
        runs = self._runs_of(values, 2 * count)[count : 2 * count]
        if not runs:
            return 0
        bits = np.concatenate([_lane_bits(run, party, self._n)[taken, side] for run in runs], axis=-1)
        return count_bits(np.packbits(np.bitwise_xor.reduce(bits, axis=0)), bits.shape[-1])

    def _lanes_of(self, party: str, values: Values) -> np.ndarray:
        """The lowest bits of a party's values, [lanes, rows, packed elements], of as many runs as are needed."""
        if (party, values) not in self._lane_cache:
            words, most = -(-self._n // 64), self._outcomes.case.runs
            few = LANE_ROWS if most is None else min(LANE_ROWS, max(0, most * words - SPARE))
            rows = len(first := _lane_bits(self._runs_of(values, 1)[0], party, self._n)[:few])
            count = -(-(rows + SPARE) // words)
            every = [_lane_bits(run, party, self._n)[:few] for run in self._runs_of(values, count)[:count]]
            alike = rows and all(bits.shape == first.shape for bits in every)
            found = np.concatenate(every, axis=-1) if alike else np.empty((0, 0, 0), np.uint8)
            self._lane_cache[party, values] = np.packbits(found, axis=-1).swapaxes(0, 1) if alike else found
        return self._lane_cache[party, values]

    def _vectors(self, run: ProtocolRun, party: str, look: str) -> tuple[np.ndarray, list[str]]:
        """Bits of a party's values, of all elements as packed bytes, and their names; `look` is a key of `LOOKS`."""
        most = min(LIMIT, max(0, self._n - SPARE))
        if not most:
            return np.empty((0, 0), np.uint8), []
        known = [k for k in run.known[party] if k.how in LOOKS[look]]
        aligned = {id(k): v for k in known if (v := element_bits(k.value, self._n)) is not None}
        every = look == "sums" and 64 * sum(map(len, aligned.values())) <= ALL_PLANES
        planes = range(64) if every else (0,) if look == "products" else self._planes
        each = None if self._outcomes.elementwise else most  # a limit on the rows of a large value
        rows = [
            (*row, k.how, i)
            for k in known if id(k) in aligned
            for i, row in enumerate(itertools.islice(rows_of(k, self._n, planes), each))
        ]  # fmt: skip
        rows.sort(key=lambda row: (row[2] == "computed", plane_of(row[1])))
        if len(rows) > most and not self._outcomes.elementwise:  # some rows of each value, before further ones
            rows.sort(key=lambda row: row[3])
        found: list[Row] = [row[:3] for row in rows[:most]]
        if look == "products":
            several = found if len(found) <= PRODUCTS else _first_of_each(found)
            if len(found) + len(several) * (len(several) - 1) // 2 > most:
                return np.empty((0, 0), np.uint8), []
            found += [(a[0] & b[0], f"{a[1]} * {b[1]}", "") for a, b in itertools.combinations(several, 2)]
        rows = [row[0] for row in found]
        return (np.stack(rows) if rows else np.empty((0, 0), np.uint8)), [row[1] for row in found]


def _known_for_lanes(run: ProtocolRun, party: str) -> list[KnownValue]:
    """A party's values, computed ones last."""
    return sorted((k for k in run.known[party] if k.how in LOOKS["lanes"]), key=lambda k: k.how == "computed")


def _lane_bits(run: ProtocolRun, party: str, n: int) -> np.ndarray:
    """The lowest bits of a party's values, for the first elements and the last: [rows, lanes, elements] of 0 and 1."""
    words, found = -(-n // 64), []
    for known in _known_for_lanes(run, party):
        lined = element_bits(known.value, n)
        if lined is None:
            continue
        if lined.shape[-1] == n:
            lined = torch.nn.functional.pad(lined, (0, 64 * words - n)).view(-1, 64, words)[:, LANES]
        else:
            lined = torch.stack([lined >> lane for lane in LANES], 1)
        found.append((lined & 1).to(torch.uint8))
    return torch.cat(found)[:LANE_ROWS].numpy() if found else np.empty((0, 0, 0), np.uint8)


def _first_of_each(rows: Sequence[Row]) -> list[Row]:
    """Rows of opened or shown values: first one row of each value, then a second of each, and so on."""
    places: dict[str, int] = {}
    found = []
    for row in rows:
        if row[2] in ("opened", "shown"):
            value = row[1].split(" [")[0]
            places[value] = places.get(value, -1) + 1
            found.append((places[value], row))
    return [row for _, row in sorted(found, key=lambda placed: placed[0])][:OPENED]


def _broken_sum_of_either(
    a: Sequence[int], b: Sequence[int], length: int, one: Values, other: Values,
    again: Callable[[Values, list[int]], int],
) -> tuple[list[int] | None, Values]:  # fmt: skip
    taken = broken_sum(a, b, length, partial(again, one))
    return (taken, one) if taken is not None else (broken_sum(b, a, length, partial(again, other)), other)


def _names(rows: Sequence[str], taken: Sequence[int]) -> str:
    parts = [rows[i] for i in taken]
    return " + ".join(parts[:6]) + (f" and {len(parts) - 6} more bits" if len(parts) > 6 else "")


def _words(run: ProtocolRun, party: str, *hows: str) -> list[KnownValue]:
    return [k for k in run.known[party] if k.how in hows and k.value.dtype in (torch.int64, torch.int32)]


def _sums_of_two(run: ProtocolRun, party: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Sums and differences of a message and another value of its receiver, element by element."""
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
            yield f"{k.name} {sign} {other.name}", value


def _sums_with_products(run: ProtocolRun, party: str, secret: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """A message plus or minus a product of two values that are opened, received or drawn, or of these less a guess."""
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


def _sums_with_steps(
    steps: Sequence, run: ProtocolRun, party: str, secret: Values
) -> Iterator[tuple[str, torch.Tensor]]:
    """A message plus or minus the result of a step on two values, or on these less a guess of an input."""
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
                        yield f"{message.name} {sign} a step of {one} and {other}", value


def _ones(value: torch.Tensor) -> np.ndarray:
    """For each bit of a word the share of elements in which it is one."""
    return ones_of(histogram(value.contiguous().numpy().reshape(-1))) / value.numel()


# All checks of a party's view: message by message, then together.

SAMPLES = 1 << 14
"""The least number of elements of each message, in all runs of one secret together."""
RUNS = 512
"""Runs of one secret where each run is one experiment; fewer if a step would have more than `VALUES` values in all."""
VALUES = 1 << 22


class Views:
    """The views of a protocol's parties, compared for pairs of secrets that a party may not tell apart.

    Where the elements of a run are not independent experiments, each run is one, and a view is that of all runs side
    by side.
    """

    def __init__(self, protocol: Protocol, outcomes: Outcomes):
        random = np.random.default_rng((outcomes.case.seed, 1))
        # Parties with the same inputs and results, as A and S without any, may not tell the same secrets apart. So the
        # runs for one of them serve the other too.
        pairs: dict[tuple, list[Pair]] = {}
        self._pairs = {}
        for party in (p.name for p in protocol.parties):
            own = tuple(i for i, g in enumerate(protocol.given) if g.party == party)
            learned = tuple(i for i, owners in enumerate(protocol.learners) if party in owners)
            if (own, learned) not in pairs:
                pairs[own, learned] = pairs_of(protocol, outcomes, random, party)
            self._pairs[party] = pairs[own, learned]
        self._begin(outcomes)

    def _begin(self, outcomes: Outcomes) -> None:
        n = outcomes.protocol.n
        self._outcomes, self._uniform, self._n = outcomes, outcomes.case.uniform, n
        usual = max(1, SAMPLES // n) if outcomes.elementwise else _runs_of(outcomes.protocol)
        self._runs = outcomes.case.runs or usual
        self._played: dict[Values, list[ProtocolRun]] = {}
        self._together: dict[Values, ProtocolRun] = {}
        self._sentences = Sentences(outcomes)
        self._joint = JointView(outcomes, self._sentences, self._experiments, n if outcomes.elementwise else self._runs)
        self._tests = 0

    @classmethod
    def with_outcomes(cls, other: Views, outcomes: Outcomes) -> Views:
        """The views of another protocol with the same parties, inputs and reference, for the same pairs of secrets."""
        found = cls.__new__(cls)
        found._pairs = other._pairs
        found._begin(outcomes)
        return found

    @property
    def tests(self) -> int:
        """The number of p-values computed."""
        return self._tests + self._joint.tests

    @property
    def elements(self) -> int:
        """Elements of each message in all runs of one secret."""
        return self._runs * self._n

    @property
    def seconds_needed(self) -> float:
        """An estimate of the seconds of `check`, from the runs so far."""
        secrets = {values for pairs in self._pairs.values() for pair in pairs for values in pair}
        return self._outcomes.shortest_seconds * self._runs * len(secrets) * 2

    @property
    def summary(self) -> tuple[str, str]:
        """The tests done, in words: of single messages, and of views."""
        pairs = ", ".join(f"{len(found)} for {party}" for party, found in sorted(self._pairs.items()))
        runs = f"{self._runs} runs of {self._n} elements for each secret; pairs of secrets: {pairs}"
        return f"uniform and alike: {runs}", "sums and products of bits, correlations: the same runs"

    def check(self, parties: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
        """The failures, as check and text: the first of each message, and of each view the strongest.

        Args:
            parties: the parties to check, taking turns by pairs of secrets. None checks all, one after the other.
        """
        if parties is None:
            for party, pairs in self._pairs.items():
                yield from self._of_party(party, pairs)
            return
        chosen = [[(party, *pair) for pair in pairs] for party, pairs in self._pairs.items() if party in parties]
        for places in itertools.zip_longest(*chosen):
            for party, one, other in filter(None, places):
                yield from (("messages", text) for _, text in self._messages(party, one, other))
                if leak := self._joint.find_leak(party, one, other):
                    yield "view", leak.text

    def _of_party(self, party: str, pairs: Sequence[Pair]) -> Iterator[tuple[str, str]]:
        said: set[str] = set()
        most = LeakFinding()
        for one, other in pairs:
            for name, text in self._messages(party, one, other):
                if name not in said:
                    said.add(name)
                    yield "messages", text
            most = max(most, self._joint.find_leak(party, one, other), key=lambda leak: (bool(leak), leak.share))
        if most:
            yield "view", most.text

    def _of(self, values: Values, count: int) -> list[ProtocolRun]:
        """At least `count` runs whose elements all hold these values."""
        runs = self._played.setdefault(values, [])
        if len(runs) < count:
            inputs = self._outcomes.fill_inputs(values)
            if self._outcomes.elementwise:
                runs += [self._outcomes.play(inputs, (values, i)) for i in range(len(runs), count)]
            else:
                runs += self._outcomes.play_often(inputs, values, self._runs)
        return runs

    def _experiments(self, values: Values, count: int) -> list[ProtocolRun]:
        """`count` runs whose elements, along the last dimension, are experiments."""
        if self._outcomes.elementwise:
            return self._of(values, count)
        if values not in self._together:
            self._together[values] = side_by_side(self._of(values, self._runs)[: self._runs])
        return [self._together[values]]

    def _messages(self, party: str, one: Values, other: Values) -> Iterator[tuple[str, str]]:
        n = self._n if self._outcomes.elementwise else 1
        views = [_received_values(self._of(values, self._runs)[: self._runs], party, n) for values in (one, other)]
        first, second = self._sentences.secret(one), self._sentences.secret(other)
        for name in sorted(views[0].keys() | views[1].keys()):
            if name not in views[0] or name not in views[1]:
                yield name, f"{party} is sent {name} for one of {first}, {second} only"
                continue
            (a, in_a, shows), (b, in_b, _) = views[0][name], views[1][name]
            self._tests += 2 * (a.dtype.itemsize * 9 + 2)
            text = distinguishable(a, b)
            if text and _columns_differ(in_a, in_b):
                said = f"{party} tells {first} and {second} apart by {name}: {text}"
                yield name, said + self._sentence(party, name)
            elif self._uniform and not shows:
                text = not_uniform(a) or not_uniform(b)
                if text:
                    yield name, f"{name} is not uniform to {party}: {text}{self._sentence(party, name)}"

    def _sentence(self, party: str, name: str) -> str:
        """The predicate of the inputs that a bit of a message agrees with, in words."""
        if not self._outcomes.elementwise:
            return ""
        inputs, run = self._sentences.random_run()
        values = [k for k in run.known[party] if k.how == "received" and k.name == name]
        return self._sentences.of_values(values, inputs)[0]


def _runs_of(protocol: Protocol) -> int:
    """Runs of one secret, where each run is one experiment."""
    sizes = [y.numel() for node in protocol.program.nodes for y in node.results if isinstance(y, torch.Tensor)]
    return min(RUNS, max(128, VALUES // max(sizes, default=1)))


def _received_values(
    runs: Sequence[ProtocolRun], party: str, n: int
) -> dict[str, tuple[np.ndarray, np.ndarray | None, str]]:
    """What a party receives by name, in runs of n experiments: all values, the same in columns, and what they show."""
    found: dict[str, list[list[torch.Tensor]]] = {}
    shows: dict[str, str] = {}
    for run in runs:
        here: dict[str, list[torch.Tensor]] = {}
        for k in run.known[party]:
            if k.how == "received" and k.value.numel():
                here.setdefault(k.name, []).append(k.value.contiguous())
                shows[k.name] = k.shows
        for name, values in here.items():
            found.setdefault(name, []).append(values)
    flat = {name: np.concatenate([v.numpy().reshape(-1) for values in parts for v in values])
            for name, parts in found.items()}  # fmt: skip
    return {name: (flat[name], _side_by_side(parts, n), shows[name]) for name, parts in found.items()}


def _side_by_side(runs: Sequence[Sequence[torch.Tensor]], n: int) -> np.ndarray | None:
    """The messages of one name in some runs as columns, those of a run above each other; None if they do not fit."""
    found = []
    for values in runs:
        parts = [v.numpy().reshape(-1, 1) if n == 1 else in_columns(v, n) for v in values]
        aligned = [v for v in parts if v is not None]
        if len(aligned) < len(parts) or len({(v.shape[1], v.dtype) for v in aligned}) > 1:
            return None
        found.append(np.concatenate(aligned))
    return np.concatenate(found, axis=1) if len({len(v) for v in found}) == 1 else None
