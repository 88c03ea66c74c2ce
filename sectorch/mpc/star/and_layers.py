"""Circuits of ANDs on XOR-shared words, evaluated layer by layer (Beaver).

Every operand of a layer is opened once under a mask, however many ANDs use it. With alpha = alpha_A xor alpha_S from
streams and d = x xor alpha open to A and S,

    x y = d_x d_y xor d_x alpha_y xor alpha_x d_y xor alpha_x alpha_y,

of which D deals only the last term. An AND of k operands is the product of k such sums: D deals the products of two and
more of the masks, 2^k - k - 1 bits, and the AND also takes one round. A product that several ANDs of a layer need is
dealt once.

An `AndCircuit` is built gate by gate and gives the layers; `and_layers` is the protocol that evaluates them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...choreography import Message, Net, leaf, protocol
from ...ring.bitplanes import fast
from . import dealing_constraints
from .dealing_proofs import DealerShares
from .masking import ComputedCorrection, deal_bits
from .shares import Shares, each

WIDEST = 4
"""Most operands of an AND in circuits that minimise bytes."""


@dataclass(frozen=True)
class Group:
    """The ANDs of one size in a layer, for kernels that compute all of them at once.

    Attributes:
        size: operands of each AND.
        operands: the opened rows that are the first operands of all ANDs, then the second operands, and so on.
        single, several: the sets of one operand and of more, each set as the bits of a number; and the rows of the
            masks' products, of the first set for all ANDs, then of the second set, and so on.
        into: ANDs of this group by number, and the new rows that they are added to. Each pair names different rows, so
            that one indexed operation can add all of its ANDs.
    """

    size: int
    operands: tuple[int, ...]
    single: tuple[tuple[int, ...], tuple[int, ...]]
    several: tuple[tuple[int, ...], tuple[int, ...]]
    into: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class AndLayer:
    """One round on a state of rows of words. The new state is the new rows, followed by old rows that stay.

    Attributes:
        opened_rows: rows of the old state that are masked and opened.
        ands: for each AND the opened rows that it multiplies, two or more, by their numbers in `opened_rows`.
        into: for each AND the new row that it is added to (xor); each new row has an AND.
        onto: rows of the old state that are added to the first new rows.
        old_rows: rows of the old state that stay.
    """

    opened_rows: tuple[int, ...]
    ands: tuple[tuple[int, ...], ...]
    into: tuple[int, ...]
    onto: tuple[int, ...]
    old_rows: tuple[int, ...] = ()

    @property
    def new_rows(self) -> int:
        """The number of new rows."""
        return 1 + max(self.into)

    @functools.cached_property
    def products(self) -> tuple[tuple[int, ...], ...]:
        """The sets of two and more opened rows whose masks' product is dealt."""
        found = (part for rows in self.ands for size in range(2, len(rows) + 1) for part in _parts(rows, size))
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def shares(self) -> np.ndarray:
        """The row of the masks' product, for every AND and every set of its operands (as the bits of a number).

        For a set of one operand it is a row of the opened rows, for a larger one a row of `products`. [ANDs, 16], or
        wider where an AND has more than four operands.
        """
        place = {part: number for number, part in enumerate(self.products)}
        found = np.zeros((len(self.ands), 1 << max(WIDEST, *map(len, self.ands))), np.int64)
        for i, rows in enumerate(self.ands):
            for bits in range(1, 1 << len(rows)):
                part = sorted(row for j, row in enumerate(rows) if bits >> j & 1)
                found[i, bits] = place[tuple(part)] if len(part) > 1 else part[0]
        return found

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The ANDs by their numbers of operands."""
        sizes = sorted({len(rows) for rows in self.ands})
        return tuple(self._group([i for i, rows in enumerate(self.ands) if len(rows) == size]) for size in sizes)

    def _group(self, numbers: list[int]) -> Group:
        size = len(self.ands[numbers[0]])
        sets = tuple(1 << j for j in range(size)), tuple(b for b in range(1, 1 << size) if b & (b - 1))
        single, several = ((bits, tuple(self.shares[numbers][:, bits].T.reshape(-1).tolist())) for bits in sets)
        into, left = [], list(enumerate(self.into[i] for i in numbers))
        while left:  # one AND for each new row at a time, since an indexed write adds to a row once only
            once = {row: place for place, row in reversed(left)}
            into.append((tuple(once.values()), tuple(once)))
            left = [(place, row) for place, row in left if once[row] != place]
        operands = tuple(self.ands[i][j] for j in range(size) for i in numbers)
        return Group(size, operands, single, several, tuple(into))

    @functools.cached_property
    def rows(self) -> tuple[np.ndarray, ...]:
        """The rows and ANDs as arrays, for compiled loops."""
        single = (np.array(v, np.int64) for v in (self.opened_rows, self.into, self.onto, self.old_rows))
        return *single, _padded(self.ands), self.shares


def _parts(rows: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [tuple(sorted(part)) for part in itertools.combinations(rows, size)]


def _padded(sets: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Sets of row numbers as an array [n, 4], or wider where a set has more; padded with -1."""
    widest = max(WIDEST, *map(len, sets)) if sets else WIDEST
    return np.array([(*rows, *(-1,) * (widest - len(rows))) for rows in sets], np.int64).reshape(-1, widest)


@functools.cache
def _index(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int64, device=device)


def pick(words: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Some rows of [n, W], in this order; a view where the rows are consecutive."""
    first = rows[0] if rows else 0
    if rows == tuple(range(first, first + len(rows))):
        return words[first : first + len(rows)]
    return words.index_select(0, _index(rows, words.device))


def beaver(
    public: torch.Tensor, alpha: torch.Tensor, dealt: torch.Tensor, layer: AndLayer, first: bool
) -> torch.Tensor:
    """One party's half of the new rows, from the opened ones; the `first` party adds the public term.

    An AND is a sum over all sets of its operands: the party's half of the product of these operands' masks, times the
    public values of the other operands. The sum is evaluated one operand at a time, for all ANDs of a size at once:
    each operand halves the number of terms.
    """
    out, device = public.new_zeros(layer.new_rows, public.shape[1]), public.device
    for group in layer.groups:
        opened = pick(public, group.operands).unflatten(0, (group.size, -1))
        halves = public.new_empty(1 << group.size, *opened.shape[1:])
        halves[0].fill_(-int(first))
        for source, (sets, rows) in ((alpha, group.single), (dealt, group.several)):
            halves.index_copy_(0, _index(sets, device), pick(source, rows).view(len(sets), *opened.shape[1:]))
        for operand in reversed(opened):
            unset, chosen = halves.chunk(2)
            halves = chosen ^ (operand & unset)
        for places, rows in group.into:
            out.index_copy_(0, _index(rows, device), pick(out, rows) ^ pick(halves[0], places))
    return out


@protocol("and_layers", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def and_layers(net: Net, state: Shares, layers: Sequence[AndLayer]) -> Shares:
    """Evaluate layers of ANDs on XOR-shared words.

    Args:
        state: words [rows, W], XOR-shared.
        layers: evaluated one after the other.

    Returns:
        The state after the last layer.

    Rounds: one a layer. Online two bits an element for each opened row; dealt 2^k - k - 1 bits an element for each AND
    of k operands, less the products that ANDs have in common. Nobody learns anything.
    """
    if not layers:
        return state
    D, A, S = net.D, net.A, net.S
    width, opened = state.shape[1], sum(len(layer.opened_rows) for layer in layers)
    alpha_A = net.common(D, A, (opened, width), "alpha_A")
    alpha_S = net.common(D, S, (opened, width), "alpha_S")
    count = sum(len(layer.products) for layer in layers)
    claim = dealing_constraints.ands(net, DealerShares(alpha_A, alpha_S), _operands(tuple(layers)))
    products = deal_bits(
        net, ComputedCorrection(mask_products, (count, width), (alpha_A, alpha_S, tuple(layers))), claim
    )

    sent = each(_masked, state, Shares(alpha_A, alpha_S), layers[0])
    at, dealt = 0, 0
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        sent_A, sent_S = sent.A.send(A, S, "masked_A"), sent.S.send(S, A, "masked_S")
        public, place = (sent_A, sent_S), (layer, following, at, dealt)
        at, dealt = at + len(layer.opened_rows), dealt + len(layer.products)
        at_A = next_state(*public, state.A, alpha_A, products.A, *place, True)
        at_S = next_state(*public, state.S, alpha_S, products.S, *place, False)
        state, sent = Shares(at_A[0], at_S[0]), Shares(at_A[1], at_S[1])
    return state


@leaf(shapes=lambda state, alpha, layer: alpha[: len(layer.opened_rows)])
def _masked(state: torch.Tensor, alpha: torch.Tensor, layer: AndLayer) -> torch.Tensor:
    """The rows that the first layer opens, masked."""
    if not (loops := fast(state, alpha)):
        return pick(state, layer.opened_rows) ^ alpha[: len(layer.opened_rows)]
    out = state.new_empty(len(layer.opened_rows), state.shape[1])
    loops.run_on_words(state.shape[1], loops.mask_layer, state.numpy(), alpha.numpy(), layer.rows[0], 0, out.numpy())
    return out


def _state_shapes(sent, _0, state, _1, _2, layer: AndLayer, following: AndLayer | None, *_):
    rows = layer.new_rows + len(layer.old_rows), len(following.opened_rows) if following else 0
    return tuple(state.new_empty(count, state.shape[1]) for count in rows)


@leaf(shapes=_state_shapes)
def next_state(
    sent_A, sent_S, state, alpha, products, layer: AndLayer, following: AndLayer | None, at: int, dealt: int,
    first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One party's half of the state after a layer, and the rows that the next layer opens, masked.

    Args:
        at, dealt: the numbers of rows of alpha and of the products that belong to earlier layers.
    """
    opened, beyond = following.opened_rows if following else (), at + len(layer.opened_rows)
    if not (loops := fast(sent_A, sent_S, state, alpha, products)):
        new = beaver(sent_A ^ sent_S, alpha[at:beyond], products[dealt:], layer, first)
        if layer.onto:
            new[: len(layer.onto)].bitwise_xor_(pick(state, layer.onto))
        new = torch.cat((new, pick(state, layer.old_rows))) if layer.old_rows else new
        return new, pick(new, opened) ^ alpha[beyond : beyond + len(opened)]
    new = state.new_empty(layer.new_rows + len(layer.old_rows), state.shape[1])
    out = state.new_empty(len(opened), state.shape[1])
    arrays = (v.numpy() for v in (sent_A, sent_S, state, alpha, products))
    after = following.rows[0] if following else layer.rows[0][:0]
    place = at, dealt, -int(first), after, beyond, new.numpy(), out.numpy()
    loops.run_on_words(state.shape[1], loops.layer, *arrays, layer.new_rows, *layer.rows[1:], *place)
    return new, out


@leaf(shapes=lambda alpha_A, alpha_S, layers, v_A: torch.empty_like(v_A))
def mask_products(alpha_A: torch.Tensor, alpha_S: torch.Tensor, layers: tuple[AndLayer, ...], v_A: torch.Tensor):
    """At D: the products of masks that all layers need, masked by v_A."""
    sets = _operands(layers)
    if loops := fast(alpha_A, alpha_S, v_A):
        out = torch.empty_like(v_A)
        arrays = alpha_A.numpy(), alpha_S.numpy(), v_A.numpy(), sets, out.numpy()
        loops.run_on_words(v_A.shape[1], loops.products, *arrays)
        return out
    alpha = alpha_A ^ alpha_S
    alpha = torch.cat(
        (alpha, torch.full_like(alpha[:1], -1))
    )  # the last row is ones: it stands for -1, an AND of fewer operands
    places = (_index(tuple(column), alpha.device) for column in (sets.T % len(alpha)).tolist())
    return functools.reduce(torch.bitwise_and, [alpha[at] for at in places]) ^ v_A


@functools.lru_cache(maxsize=64)
def _operands(layers: tuple[AndLayer, ...]) -> np.ndarray:
    """For each dealt product of all layers the rows of the masks that it multiplies."""
    starts = itertools.accumulate((len(layer.opened_rows) for layer in layers), initial=0)
    return _padded([tuple(i + at for i in part) for layer, at in zip(layers, starts, strict=False)
                    for part in layer.products])  # fmt: skip


# Circuits: each gate is in the first layer that its operands allow


@dataclass(frozen=True)
class _Gate:
    """The xor of ANDs of two or more operands, and of `onto` where there is one; operands by number."""

    ands: tuple[tuple[int, ...], ...]
    onto: int | None

    @property
    def operands(self) -> tuple[int, ...]:
        """All operands, each once, in order of first use."""
        onto = () if self.onto is None else (self.onto,)
        return tuple(dict.fromkeys([number for operands in self.ands for number in operands] + list(onto)))

    @property
    def factors(self) -> tuple[int, ...]:
        """The operands of the ANDs, without `onto`."""
        return tuple(number for operands in self.ands for number in operands)


@dataclass
class AndCircuit:
    """A circuit of gates on `rows` input rows. Inputs have the numbers 0 .. rows - 1, and gates the numbers after."""

    rows: int
    _gates: list[_Gate] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)
    _numbers: dict[_Gate, int] = field(default_factory=dict)

    def gate(self, *ands: tuple[int, ...], onto: int | None = None) -> int:
        """Add a gate, the xor of these ANDs and of `onto`, and return its number; an equal gate is added once."""
        gate = _Gate(ands, onto)
        if gate not in self._numbers:
            self._depths.append(1 + max(self.depth(x) for x in gate.operands))
            self._gates.append(gate)
            self._numbers[gate] = self.rows + len(self._gates) - 1
        return self._numbers[gate]

    def depth(self, number: int) -> int:
        """The layer that computes a row, from 1 on; 0 for an input."""
        return 0 if number < self.rows else self._depths[number - self.rows]

    def layers(self, results: tuple[int, ...]) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
        """Return the layers that compute these results, and the results' rows in the last state."""
        wanted = set(results)
        for number in reversed(range(self.rows, self.rows + len(self._gates))):
            if number in wanted:
                wanted.update(self._of(number).operands)
        by_depth: dict[int, list[int]] = {}
        for number in range(self.rows, self.rows + len(self._gates)):
            if number in wanted:
                by_depth.setdefault(self.depth(number), []).append(number)
        state = list(range(self.rows))
        layers = []
        for depth in sorted(by_depth):
            place = {number: row for row, number in enumerate(state)}
            # Gates that add to a row come first: `onto` lists the rows of the first new ones.
            numbers = sorted(by_depth[depth], key=lambda n: self._of(n).onto is None)
            gates = [self._of(n) for n in numbers]
            # A row stays in the state as long as a later layer, or the result, reads it.
            later = set(results) | {x for d in by_depth if d > depth for n in by_depth[d] for x in self._of(n).operands}
            opened = tuple(dict.fromkeys(number for gate in gates for number in gate.factors))
            index = {number: i for i, number in enumerate(opened)}
            old_rows = [number for number in state if number in later]
            layers.append(
                AndLayer(
                    tuple(place[number] for number in opened),
                    tuple(tuple(index[x] for x in operands) for gate in gates for operands in gate.ands),
                    tuple(row for row, gate in enumerate(gates) for _ in gate.ands),
                    tuple(place[gate.onto] for gate in gates if gate.onto is not None),
                    tuple(place[number] for number in old_rows),
                )
            )
            state = [*numbers, *old_rows]
        place = {number: row for row, number in enumerate(state)}
        return tuple(layers), tuple(place[number] for number in results)

    def _of(self, number: int) -> _Gate:
        return self._gates[number - self.rows]
