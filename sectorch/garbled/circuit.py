"""Boolean circuits as data and their garbling: a builder, compiled circuits, circuits of numbers, half gates.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..choreography import Located, leaf
from ..choreography.streams import PairKey, random_secret
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


# Half gates: garbling with free XOR and two ciphertexts for an AND, and the hash of garbling.
#
# A wire has a label for zero, K, and a label for one, K xor Delta. The lowest bit of Delta is one, so the lowest bit of
# a label, its colour, distinguishes the two without showing which is which (point and permute). A step of a circuit is
# garbled for the whole batch at once, a part of the gates at a time so that the work stays in the cache.
#
# Wire labels are int64 [wires, n, 2] for a batch of n, tables [ands, 2, n, 2].
#
# Source: S. Zahur, M. Rosulek, D. Evans, "Two halves make a whole", EUROCRYPT 2015, Figure 2.


# The hash H(x, i) = E(i, sigma(x)) xor sigma(x), with AES-128 as the ideal cipher E.
#
# sigma(l | r) = (l xor r | l) is a linear orthomorphism. H is tweakable circular correlation robust for an ideal
# cipher. The advantage of an adversary after p evaluations of AES grows with mu p / 2^127, where mu is the number of
# uses of one tweak: C. Guo, J. Katz, X. Wang, C. Weng, Y. Yu, "Better concrete security for half-gates garbling (in the
# multi- instance setting)", CRYPTO 2020. The tweak i is the AES key: public, and one for each half gate. One key
# schedule serves a batch. With one fixed key, as in H(x, i) = pi(2x xor i) xor 2x xor i of the half-gates paper, mu is
# the number of all gates ever garbled; the paper of 2020 has the attack.
#
# A label, like any 128-bit block, is a pair of int64 words [..., 2].


WORDS = 2
"""int64 words in a label."""

LABEL_BYTES = 16

SLACK = 2
"""Words after an output buffer: ECB of the `cryptography` package requires them, and does not write them."""

_ZEROS = memoryview(bytes(1 << 16))


def sigma(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """(l | r) -> (l xor r | l), blocks [..., 2]."""
    out = torch.empty_like(x) if out is None else out
    torch.bitwise_xor(x[..., 0], x[..., 1], out=out[..., 0])
    out[..., 1] = x[..., 0]
    return out


def tweaks(nonce: torch.Tensor, first: int, count: int) -> list[bytes]:
    """The AES keys nonce + first ... nonce + first + count - 1 (mod 2^128), for a nonce of two words."""
    start = int.from_bytes(nonce.numpy().data.cast("B"), "little") + first
    return [((start + i) % (1 << 128)).to_bytes(LABEL_BYTES, "little") for i in range(count)]


def encrypt(keys: Iterable[bytes], blocks: torch.Tensor, out: torch.Tensor) -> None:
    """AES-128 of contiguous blocks [k, ..., 2] under k keys, into `out`, which is flat with `SLACK` more words."""
    source, target = (t.numpy().reshape(-1).data.cast("B") for t in (blocks, out))
    size = len(source) // max(1, blocks.shape[0])
    for i, key in enumerate(keys):
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        cipher.update_into(source[i * size : (i + 1) * size], target[i * size : (i + 1) * size + 8 * SLACK])


def hash_blocks(keys: list[bytes], x: torch.Tensor) -> torch.Tensor:
    """H of blocks x [k, ..., 2], the i-th of the first dimension under the i-th key."""
    prepared = sigma(x)
    out = torch.empty(x.numel() + SLACK, dtype=torch.int64)
    encrypt(keys, prepared, out)
    return out[: x.numel()].view(x.shape).bitwise_xor_(prepared)


def expand(seeds: torch.Tensor, nonce: torch.Tensor, words: int) -> torch.Tensor:
    """Streams [k, words] from seeds [k, 2]: AES-128 in counter mode, from the nonce (two words) on."""
    out = torch.empty(seeds.shape[0], words, dtype=torch.int64)
    start = bytes(nonce.numpy().data.cast("B"))
    for seed, row in zip(seeds.contiguous().numpy(), out.numpy(), strict=True):
        stream = Cipher(algorithms.AES(seed.tobytes()), modes.CTR(start)).encryptor()
        target = row.data.cast("B") if words else memoryview(b"")
        for at in range(0, len(target), len(_ZEROS)):
            part = target[at : at + len(_ZEROS)]
            stream.update_into(_ZEROS[: len(part)], part)
    return out


def private_words(*shape: int) -> torch.Tensor:
    """Uniform int64 words that only the caller knows, from a stream (`choreography/streams.py`) under a fresh
    secret."""
    count = torch.Size(shape).numel()
    return PairKey(random_secret(), b"").words("private", 0, 0, count).view(shape)


PART = 1 << 13
"""The labels of one operand that are processed at a time: 128 KiB."""


class _Scratch:
    """Buffers for a part of a step, reused for every part: 2 sides x `values` blocks for each gate and element."""

    def __init__(self, n: int, values: int):
        self.gates = max(1, PART // max(1, n))
        self._shape = (2, values, n, 2)
        size = self.gates * torch.Size(self._shape).numel()
        self._prepared = torch.empty(size, dtype=torch.int64)
        self._hashed = torch.empty(size + SLACK, dtype=torch.int64)
        self._masks = torch.empty(self.gates, 2, n, 2, dtype=torch.int64)

    def blocks(self, gates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cipher's input [gates, side, value, n, 2], and the flat buffer for its output."""
        size = gates * torch.Size(self._shape).numel()
        return self._prepared[:size].view(gates, *self._shape), self._hashed[: size + SLACK]

    def colours(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """All ones for labels of colour one, in both words: [gates, side, n, 2]."""
        masks = self._masks[: left.shape[0]]
        torch.bitwise_and(left[..., 0], 1, out=masks[:, 0, :, 0])
        torch.bitwise_and(right[..., 0], 1, out=masks[:, 1, :, 0])
        masks[..., 0].neg_()
        masks[..., 1] = masks[..., 0]
        return masks

    def hashed(self, nonce: torch.Tensor, first: int, gates: int) -> torch.Tensor:
        """H of the cipher's inputs under the tweaks 2 g and 2 g + 1 of gate g: [gates, side, value, n, 2]."""
        prepared, out = self.blocks(gates)
        encrypt(tweaks(nonce, 2 * first, 2 * gates), prepared.view(2 * gates, -1), out)
        return out[:-SLACK].view(prepared.shape).bitwise_xor_(prepared)

    def parts(self, step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Iterator[tuple]:
        """A step in parts: the number of a part's first AND, its operands x and y, its place for results, and the
        cipher's input with sigma of x and y at value 0."""
        count = step.out.stop - step.out.start
        for at in range(0, count, self.gates):
            x, y = left[at : at + self.gates], right[at : at + self.gates]
            prepared, _ = self.blocks(x.shape[0])
            sigma(x, prepared[:, 0, 0])
            sigma(y, prepared[:, 1, 0])
            yield step.first + at, x, y, out[at : at + self.gates], prepared


def _store(circuit: Circuit, one: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    store = inputs.new_empty((circuit.slots, *inputs.shape[1:]))
    store[ONE] = one
    store[1 : 1 + circuit.inputs] = inputs
    return store


def _garbled_shapes(
    circuit: Circuit, _delta: torch.Tensor, inputs: torch.Tensor, _nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n = inputs.shape[1]
    return inputs.new_empty((circuit.ands, 2, n, 2)), inputs.new_empty((len(circuit.outputs), n, 2))


@leaf(shapes=_garbled_shapes)
def garble(
    circuit: Circuit, delta: torch.Tensor, inputs: torch.Tensor, nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Garble a circuit: the garbler's part.

    Args:
        delta: [2], its lowest bit is one.
        inputs: zero labels of all inputs, [inputs, n, 2].
        nonce: [2], public, used for this garbling alone.

    Returns:
        The tables, [ands, 2, n, 2], and the zero labels of the outputs, [outputs, n, 2].
    """
    n = inputs.shape[1]
    tables = inputs.new_empty((circuit.ands, 2, n, 2))
    scratch = _Scratch(n, 2)
    wide, wide_sigma = delta.expand(n, 2).contiguous(), sigma(delta).expand(n, 2).contiguous()

    def gate(step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        for first, x, y, result, prepared in scratch.parts(step, left, right, out):
            torch.bitwise_xor(prepared[:, :, 0], wide_sigma, out=prepared[:, :, 1])
            hashed = scratch.hashed(nonce, first, x.shape[0])
            colours = scratch.colours(x, y)
            table, zero = tables[first : first + x.shape[0]], hashed[:, :, 0]
            both = hashed[:, :, 1].bitwise_xor_(zero)
            # T_G = H(A0) + H(A1) + p_b Delta, T_E = H(B0) + H(B1) + A0, and the zero label of the result is
            # H(A0) + p_a T_G + H(B0) + p_b (T_E + A0).
            torch.bitwise_and(colours[:, 1], wide, out=table[:, 0]).bitwise_xor_(both[:, 0])
            torch.bitwise_xor(both[:, 1], x, out=table[:, 1])
            colours[:, 0].bitwise_and_(table[:, 0])
            colours[:, 1].bitwise_and_(both[:, 1])
            colours.bitwise_xor_(zero)
            torch.bitwise_xor(colours[:, 0], colours[:, 1], out=result)

    return tables, circuit.run(_store(circuit, delta, inputs), gate)


@leaf(shapes=lambda circuit, inputs, *_: inputs.new_empty((len(circuit.outputs), *inputs.shape[1:])))
def evaluate(circuit: Circuit, inputs: torch.Tensor, tables: torch.Tensor, nonce: torch.Tensor) -> torch.Tensor:
    """Evaluate a garbled circuit: one label of each input, [inputs, n, 2], to one of each output, [outputs, n, 2]."""
    n = inputs.shape[1]
    scratch = _Scratch(n, 1)

    def gate(step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        for first, x, y, result, _ in scratch.parts(step, left, right, out):
            hashed = scratch.hashed(nonce, first, x.shape[0])[:, :, 0]
            colours = scratch.colours(x, y)
            table = tables[first : first + x.shape[0]]
            # The label of the result is H(A) + s_a T_G + H(B) + s_b (T_E + A).
            colours[:, 0].bitwise_and_(table[:, 0])
            colours[:, 1].bitwise_and_(torch.bitwise_xor(table[:, 1], x))
            colours.bitwise_xor_(hashed)
            torch.bitwise_xor(colours[:, 0], colours[:, 1], out=result)

    return circuit.run(_store(circuit, torch.zeros_like(inputs[:1, :, :]), inputs), gate)


Labels = TypeVar("Labels", torch.Tensor, Located)


def colours(labels: Labels) -> Labels:
    """The colour bits of labels [..., 2]. The colours of zero labels decode those of an evaluation."""
    return labels[..., 0] & 1


@leaf(shapes=lambda _circuit, _delta, zero, _nonce: (zero[..., 0], zero[..., 0]))
def share_outputs(
    circuit: Circuit, delta: torch.Tensor, zero: torch.Tensor, nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the garbler's additive share of each output bit, and the word from which the evaluator gets its own.

    A projection to Z_2^64 (Ball, Malkin, Rosulek, "Garbling gadgets for Boolean and arithmetic circuits", CCS 2016)
    with row reduction: the evaluator's share for the label of colour zero is that label's hash, and one word
    corrects the hash of the other. Both shares are pseudorandom.

    Args:
        zero: zero labels of the outputs, [outputs, n, 2].

    Returns:
        Shares [outputs, n] and words [outputs, n].
    """
    # The label of colour zero stands for the bit p, the colour of the zero label.
    p = colours(zero)
    plain = zero ^ (-p).unsqueeze(-1) & delta
    both = torch.stack((plain, plain ^ delta), 1)
    # The ANDs have used the tweaks before: a tweak must not hash a second label.
    hashed = hash_blocks(tweaks(nonce, 2 * circuit.ands, both.shape[0]), both)[..., 0]
    return p - hashed[:, 0], 1 - 2 * p + hashed[:, 0] - hashed[:, 1]


@leaf(shapes=lambda _circuit, _labels, words, _nonce: torch.empty_like(words))
def take_share(circuit: Circuit, labels: torch.Tensor, words: torch.Tensor, nonce: torch.Tensor) -> torch.Tensor:
    """The evaluator's additive share of each output bit, [outputs, n], from its labels and the garbler's words."""
    hashed = hash_blocks(tweaks(nonce, 2 * circuit.ands, labels.shape[0]), labels)[..., 0]
    return hashed + words * colours(labels)
