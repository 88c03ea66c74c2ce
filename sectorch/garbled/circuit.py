"""Boolean circuits as data: a builder, compiled circuits, and the circuits of numbers that CaPC needs.

Wires carry one bit for each element of a batch. XOR and NOT cost nothing in a garbled circuit, so the builder counts
ANDs. NOT is an XOR with the constant one, which has its own wire (number 0).

A compiled circuit is a list of steps, each of which evaluates many gates on a batch. Gates are grouped by the number of
ANDs before them, and within that by the number of XORs since; the gates of a group do not depend on each other. Wires
share slots of a store: a slot is free again after its last use.

Source of the circuits: V. Kolesnikov, A.-R. Sadeghi, T. Schneider, "Improved garbled circuit building blocks and
applications to auctions and computing minima", CANS 2009.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError

ONE = 0
"""The wire that carries one."""

Wire = int
Operand = slice | torch.Tensor
"""Slots of a store: a slice if they are evenly spaced, else an index tensor."""


@dataclass(frozen=True)
class GateStep:
    """Gates of one kind that are evaluated together: store[out] = gate(store[left], store[right])."""

    nonlinear: bool
    left: Operand
    right: Operand
    out: slice
    first: int
    """The number of the first AND of this step among all ANDs of the circuit."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """A compiled circuit. Slot 0 is the constant one; the inputs follow, the garbler's before the evaluator's."""

    garbler: int
    evaluator: int
    outputs: torch.Tensor
    steps: tuple[GateStep, ...]
    slots: int
    ands: int
    depth: int
    """The number of ANDs on the longest path."""

    @property
    def inputs(self) -> int:
        return self.garbler + self.evaluator

    def __repr__(self) -> str:
        return (
            f"Circuit({self.garbler} + {self.evaluator} inputs, {len(self.outputs)} outputs, {self.ands} ANDs, "
            f"depth {self.depth})"
        )

    def run(self, store: torch.Tensor, gate: Callable[[GateStep, torch.Tensor, torch.Tensor, torch.Tensor], Any]):
        """Run all steps on a store [slots, ...] that holds the constant and the inputs.

        Args:
            gate: called for each step of ANDs with the step, both operands and the tensor for the result.

        Returns:
            The outputs [outputs, ...].
        """
        for step in self.steps:
            left, right, out = _at(store, step.left), _at(store, step.right), store[step.out]
            if step.nonlinear:
                gate(step, left, right, out)
            else:
                torch.bitwise_xor(left, right, out=out)
        return store.index_select(0, self.outputs)

    def plain(self, garbler: torch.Tensor, evaluator: torch.Tensor) -> torch.Tensor:
        """Evaluate the circuit in the clear: words [garbler, ...] and [evaluator, ...] of integers -> [outputs, ...].

        Each bit position of the words is a batch element: an int64 word has 64.
        """
        for name, bits, wanted in (("garbler", garbler, self.garbler), ("evaluator", evaluator, self.evaluator)):
            if bits.shape[0] != wanted:
                raise ArgumentError(f"the {name} has {wanted} input bits in this circuit, got {bits.shape[0]}")
        store = evaluator.new_zeros((self.slots, *evaluator.shape[1:]))
        store[ONE] = -1
        store[1 : 1 + self.garbler] = garbler
        store[1 + self.garbler : 1 + self.inputs] = evaluator
        return self.run(store, lambda step, left, right, out: torch.bitwise_and(left, right, out=out))


def _at(store: torch.Tensor, operand: Operand) -> torch.Tensor:
    return store[operand] if type(operand) is slice else store.index_select(0, operand)


class Builder:
    """Builds a circuit gate by gate. Equal gates are built once.

    Args:
        garbler, evaluator: input bits of the two parties; their wires are the lists of the same names.
    """

    def __init__(self, garbler: int, evaluator: int):
        self.garbler: list[Wire] = list(range(1, 1 + garbler))
        self.evaluator: list[Wire] = list(range(1 + garbler, 1 + garbler + evaluator))
        self._first = 1 + garbler + evaluator
        self._gates: list[tuple[bool, Wire, Wire]] = []
        self._known: dict[tuple[bool, Wire, Wire], Wire] = {}

    def _gate(self, nonlinear: bool, x: Wire, y: Wire) -> Wire:
        key = (nonlinear, min(x, y), max(x, y))
        if key not in self._known:
            self._known[key] = self._first + len(self._gates)
            self._gates.append(key)
        return self._known[key]

    def xor(self, x: Wire, y: Wire) -> Wire:
        """x xor y, of two different wires. Free."""
        if x == y:
            raise ArgumentError(f"a wire xor itself is the constant zero, which no circuit here needs: wire {x}")
        return self._gate(False, x, y)

    def land(self, x: Wire, y: Wire) -> Wire:
        """x and y: two ciphertexts."""
        if x == y or ONE in (x, y):
            return x if y == ONE else y
        return self._gate(True, x, y)

    def invert(self, x: Wire) -> Wire:
        """Not x. Free."""
        return self.xor(x, ONE)

    def compile(self, outputs: Sequence[Wire]) -> Circuit:
        """Group the gates that the outputs need into steps, and give wires their slots."""
        gates = {self._first + i: gate for i, gate in enumerate(self._gates)}
        needed = _needed(gates, outputs)
        place: dict[Wire, tuple[int, int]] = dict.fromkeys(range(self._first), (0, 0))
        groups: dict[tuple[int, int], list[Wire]] = {}
        for wire, (nonlinear, x, y) in gates.items():
            if wire in needed:
                # Gates of equal AND depth and equal XOR depth behind it do not depend on one another: they are one
                # step.
                ands, xors = max(place[x], place[y])
                place[wire] = (ands + 1, 0) if nonlinear else (ands, xors + 1)
                groups.setdefault(place[wire], []).append(wire)
        order = [groups[key] for key in sorted(groups)]
        # The step after which a wire's slot is free; outputs and the constant keep theirs to the end.
        last = dict.fromkeys(range(self._first), -1) | {wire: i for i, group in enumerate(order) for wire in group}
        for i, group in enumerate(order):
            for wire in group:
                last.update((operand, i) for operand in gates[wire][1:])
        last.update((wire, len(order)) for wire in (ONE, *outputs))

        slots = _Slots(self._first)
        steps, ands = [], 0
        slots.release(wire for wire in range(self._first) if last[wire] == -1)
        for i, group in enumerate(order):
            nonlinear = gates[group[0]][0]
            left, right = (_operand([slots.of[gates[wire][side]] for wire in group]) for side in (1, 2))
            steps.append(GateStep(nonlinear, left, right, slots.take(group), ands))
            ands += nonlinear * len(group)
            slots.release({operand for wire in group for operand in gates[wire][1:] if last[operand] == i})
        return Circuit(
            len(self.garbler), len(self.evaluator), torch.tensor([slots.of[wire] for wire in outputs]), tuple(steps),
            len(slots.used), ands, max((place[wire][0] for wire in outputs), default=0),
        )  # fmt: skip


def _needed(gates: dict[Wire, tuple[bool, Wire, Wire]], outputs: Iterable[Wire]) -> set[Wire]:
    """The wires that the outputs depend on."""
    needed, open_ends = set(), list(outputs)
    while open_ends:
        wire = open_ends.pop()
        if wire not in needed:
            needed.add(wire)
            open_ends += gates[wire][1:] if wire in gates else ()
    return needed


class _Slots:
    """Assigns slots to wires. The results of a step get consecutive slots."""

    def __init__(self, first: int):
        self.of: dict[Wire, int] = {wire: wire for wire in range(first)}
        self.used = bytearray(b"\1" * first)

    def take(self, wires: Sequence[Wire]) -> slice:
        start = self.used.find(bytes(len(wires)))
        if start < 0:
            start = len(self.used.rstrip(b"\0"))
        self.used[start : start + len(wires)] = b"\1" * len(wires)
        self.of.update(zip(wires, range(start, start + len(wires)), strict=True))
        return slice(start, start + len(wires))

    def release(self, wires: Iterable[Wire]) -> None:
        for wire in wires:
            self.used[self.of[wire]] = 0


def _operand(slots: list[int]) -> Operand:
    """A slice if the slots are evenly spaced and rise, since reading it copies nothing; else an index tensor."""
    strides = {after - before for before, after in itertools.pairwise(slots)} or {1}
    if len(strides) == 1 and (stride := strides.pop()) > 0:
        return slice(slots[0], slots[-1] + 1, stride)
    return torch.tensor(slots)


# Circuits of numbers: adders, comparators, choice, argmax.
#
# Numbers are lists of wires, least significant bit first. With L bits an adder or a subtractor mod 2^L costs L - 1
# ANDs, a comparison L, a choice between two numbers L.


Number = list[Wire]


def add(b: Builder, x: Number, y: Number) -> Number:
    """x + y mod 2^L. The next carry is c xor (x xor c)(y xor c)."""
    carry, total = b.land(x[0], y[0]), [b.xor(x[0], y[0])]
    for i in range(1, len(x)):
        toggled = b.xor(x[i], carry)
        total.append(b.xor(toggled, y[i]))
        if i + 1 < len(x):
            carry = b.xor(carry, b.land(toggled, b.xor(y[i], carry)))
    return total


def subtract(b: Builder, x: Number, y: Number) -> Number:
    """x - y mod 2^L. The borrow is [x < y] of the lower bits."""
    borrow, difference = b.land(b.invert(x[0]), y[0]), [b.xor(x[0], y[0])]
    for i in range(1, len(x)):
        toggled = b.xor(x[i], borrow)
        difference.append(b.xor(toggled, y[i]))
        if i + 1 < len(x):
            borrow = _less(b, x[i], y[i], borrow)
    return difference


def _less(b: Builder, x: Wire, y: Wire, less: Wire) -> Wire:
    """[x < y] after one more significant bit: y where x and y differ, else the former result."""
    return b.xor(y, b.land(b.xor(x, less), b.xor(y, less)))


def less_than(b: Builder, x: Number, y: Number, signed: bool = False) -> Wire:
    """[x < y], for unsigned numbers, or for numbers in two's complement, whose top bits are exchanged."""
    less = b.land(b.invert(x[0]), y[0]) if len(x) > 1 or not signed else b.land(b.invert(y[0]), x[0])
    for i in range(1, len(x)):
        low, high = (y[i], x[i]) if signed and i + 1 == len(x) else (x[i], y[i])
        less = _less(b, low, high, less)
    return less


def choose(b: Builder, which: Wire, x: Number, y: Number) -> Number:
    """y where `which` is one, else x."""
    return [b.xor(u, b.land(which, b.xor(u, v))) for u, v in zip(x, y, strict=True)]


def one_hot_argmax(b: Builder, values: list[Number]) -> list[Wire]:
    """The one-hot code of the largest of signed numbers; of equal ones the first, as `torch.argmax`.

    A tournament of neighbours: m - 1 comparisons and m - 2 choices. The winner's path is then followed from the final
    back to the leaves, one AND for each match but the final: with m numbers of L bits (2 m - 3) L + m - 2 ANDs.
    """
    # An entry is a number and the match that it won: the match's result and the two entries that met, or a position.
    entries: list[tuple[Number, Any]] = [(value, i) for i, value in enumerate(values)]
    while len(entries) > 1:
        rest = entries[len(entries) // 2 * 2 :]
        matches = []
        for (x, left), (y, right) in zip(entries[0::2], entries[1::2], strict=False):
            second = less_than(b, x, y, signed=True)
            matches.append((choose(b, second, x, y), (second, left, right)))
        entries = matches + rest
    hot: dict[int, Wire] = {}
    second, left, right = entries[0][1]
    paths = [(left, b.invert(second)), (right, second)]
    while paths:
        match, reached = paths.pop()
        if isinstance(match, int):
            hot[match] = reached
        else:
            second, left, right = match
            to_right = b.land(reached, second)
            paths += [(left, b.xor(reached, to_right)), (right, to_right)]
    return [hot[i] for i in range(len(values))]


def position(b: Builder, hot: list[Wire]) -> Number:
    """The position of the one in a one-hot code, as a number. Free."""
    bits = []
    for i in range((len(hot) - 1).bit_length()):
        bits.append(functools.reduce(b.xor, [wire for k, wire in enumerate(hot) if k >> i & 1]))
    return bits


def _split(wires: list[Wire], bits: int) -> list[Number]:
    """Wires as numbers of `bits` bits."""
    return [wires[i : i + bits] for i in range(0, len(wires), bits)]


@functools.lru_cache(maxsize=32)
def argmax_circuit(classes: int, bits: int, as_position: bool) -> Circuit:
    """Build the circuit of the argmax of sums of two numbers, one of each party, mod 2^bits and read as signed.

    Inputs of each party: `classes` numbers of `bits` bits, class by class, least significant first. Outputs: the
    one-hot code [classes], or the position in ceil(log2 classes) bits. With C classes and L bits the circuit has C (L -
    1) + (2 C - 3) L + C - 2 ANDs.

    Raises:
        ArgumentError: fewer than two classes, or a number of bits outside 2..64.
    """
    if classes < 2:
        raise ArgumentError(f"an argmax needs at least two classes, got {classes}")
    if not 2 <= bits <= 64:
        raise ArgumentError(f"an argmax compares 2 to 64 bits, got {bits}")
    b = Builder(classes * bits, classes * bits)
    numbers = zip(_split(b.garbler, bits), _split(b.evaluator, bits), strict=True)
    hot = one_hot_argmax(b, [add(b, x, y) for x, y in numbers])
    return b.compile(position(b, hot) if as_position else hot)


@functools.lru_cache(maxsize=32)
def confident_circuit(classes: int, bits: int, same: bool = True) -> Circuit:
    """Build the circuit of Confident-GNMax (PATE 2018): whether any sum is at least zero, and the argmax of other sums.

    Inputs: the garbler has 2 C numbers of `bits` bits, those of the check and those of the argmax, and the evaluator C,
    which belong to both sums, or, where they are not the same, 2 C as the garbler. Outputs: the bit, then the position
    in ceil(log2 C) bits, all zero where the bit is zero. With L bits the circuit has 2 C (L - 1) + (2 C - 3) L + 2 C -
    3 + ceil(log2 C) ANDs.

    Raises:
        ArgumentError: as `argmax_circuit`.
    """
    argmax_circuit(classes, bits, True)  # checks the sizes
    b = Builder(2 * classes * bits, (1 if same else 2) * classes * bits)
    garbler, evaluator = _split(b.garbler, bits), _split(b.evaluator, bits)
    checked = [add(b, x, y) for x, y in zip(garbler[:classes], evaluator[:classes], strict=True)]
    none_reaches = functools.reduce(b.land, [total[-1] for total in checked])
    reached = b.invert(none_reaches)
    hot = one_hot_argmax(b, [add(b, x, y) for x, y in zip(garbler[classes:], evaluator[-classes:], strict=True)])
    return b.compile([reached, *(b.land(reached, bit) for bit in position(b, hot))])
