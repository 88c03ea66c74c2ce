"""Circuits of ANDs on XOR-shared words, layer by layer: every operand of a layer is opened once, however many ANDs
take it.

By Beaver, with alpha = alpha_A xor alpha_S from streams and d = x xor alpha open to A and S,

    x y = d_x d_y xor d_x alpha_y xor alpha_x d_y xor alpha_x alpha_y,

of which D deals only the last term. An AND of k operands is the product of as many such sums: D deals the products of
two and more of the masks, 2^k - k - 1 bits, and the AND takes one round as well. Products that several ANDs of a layer
take are dealt once.
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
"""Operands of an AND at most, where fewest bytes are wanted."""


@dataclass(frozen=True)
class Group:
    """The ANDs of one size in a layer, for functions that make all of them at once.

    Attributes:
        size: operands of each.
        operands: the opened rows that are the ANDs' first operands, then their second ones, ...
        single, several: sets of one operand and of more, as the bits of a number; and where the masks' products stand,
            of the first set for all ANDs, then of the second one, ...
        into: numbers of ANDs in this group, and the new rows that they are added to, in sets of different rows.
    """

    size: int
    operands: tuple[int, ...]
    single: tuple[tuple[int, ...], tuple[int, ...]]
    several: tuple[tuple[int, ...], tuple[int, ...]]
    into: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class AndLayer:
    """One round on a state of rows of words.

    The rows `opened` are masked and opened; AND number i takes the opened ones `ands[i]`, two of them or more, and is
    xor-ed into the new row `into[i]`; each new row has one. The first new rows are xor the rows of the old state that
    `onto` names. The new state is these rows, and the old rows `kept`.
    """

    opened: tuple[int, ...]
    ands: tuple[tuple[int, ...], ...]
    into: tuple[int, ...]
    onto: tuple[int, ...]
    kept: tuple[int, ...] = ()

    @property
    def made(self) -> int:
        """New rows that are not kept."""
        return 1 + max(self.into)

    @functools.cached_property
    def products(self) -> tuple[tuple[int, ...], ...]:
        """The sets of two and more opened rows of whose masks the product is dealt."""
        found = (part for rows in self.ands for size in range(2, len(rows) + 1) for part in _parts(rows, size))
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def shares(self) -> np.ndarray:
        """For AND number i and each set of its operands, by the bits of a number, where the masks' product stands: of
        one operand in the opened rows, of more in `products`; [ANDs, 16], or more where an AND has more operands."""
        place = {part: number for number, part in enumerate(self.products)}
        found = np.zeros((len(self.ands), 1 << max(WIDEST, *map(len, self.ands))), np.int64)
        for i, rows in enumerate(self.ands):
            for bits in range(1, 1 << len(rows)):
                part = sorted(row for j, row in enumerate(rows) if bits >> j & 1)
                found[i, bits] = place[tuple(part)] if len(part) > 1 else part[0]
        return found

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The ANDs of two operands, of three and of four."""
        sizes = sorted({len(rows) for rows in self.ands})
        return tuple(self._group([i for i, rows in enumerate(self.ands) if len(rows) == size]) for size in sizes)

    def _group(self, numbers: list[int]) -> Group:
        size = len(self.ands[numbers[0]])
        sets = tuple(1 << j for j in range(size)), tuple(b for b in range(1, 1 << size) if b & (b - 1))
        single, several = ((bits, tuple(self.shares[numbers][:, bits].T.reshape(-1).tolist())) for bits in sets)
        into, left = [], list(enumerate(self.into[i] for i in numbers))
        while left:  # each new row once at a time
            once = {row: place for place, row in reversed(left)}
            into.append((tuple(once.values()), tuple(once)))
            left = [(place, row) for place, row in left if once[row] != place]
        operands = tuple(self.ands[i][j] for j in range(size) for i in numbers)
        return Group(size, operands, single, several, tuple(into))

    @functools.cached_property
    def rows(self) -> tuple[np.ndarray, ...]:
        """These numbers for compiled loops."""
        single = (np.array(v, np.int64) for v in (self.opened, self.into, self.onto, self.kept))
        return *single, _padded(self.ands), self.shares


def _parts(rows: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [tuple(sorted(part)) for part in itertools.combinations(rows, size)]


def _padded(sets: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Numbers of rows as [n, 4], or wider where a set has more; -1 where one has fewer."""
    widest = max(WIDEST, *map(len, sets)) if sets else WIDEST
    return np.array([(*rows, *(-1,) * (widest - len(rows))) for rows in sets], np.int64).reshape(-1, widest)


@functools.cache
def _index(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int64, device=device)


def pick(words: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Some rows of [n, W], in this order; a view where they follow each other."""
    first = rows[0] if rows else 0
    if rows == tuple(range(first, first + len(rows))):
        return words[first : first + len(rows)]
    return words.index_select(0, _index(rows, words.device))


def beaver(
    public: torch.Tensor, alpha: torch.Tensor, dealt: torch.Tensor, layer: AndLayer, first: bool
) -> torch.Tensor:
    """One party's half of the new rows, from the opened ones; `first` is the party that adds the public term.

    Each AND is the sum, over the sets of its operands, of its half of the product of these operands' masks, times the
    public values of the other operands: one operand after the other is taken out, of all ANDs of a size at once.
    """
    out, device = public.new_zeros(layer.made, public.shape[1]), public.device
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
    """The state after these layers.

    Args:
        state: words [rows, W], XOR-shared.

    Rounds: one a layer; two bits an element online for each row opened; dealt 2^k - k - 1 for each AND of k operands,
    less what ANDs have in common. Nobody learns anything.
    """
    if not layers:
        return state
    D, A, S = net.D, net.A, net.S
    width, opened = state.shape[1], sum(len(layer.opened) for layer in layers)
    alpha_A = net.common(D, A, (opened, width), "alpha_A")
    alpha_S = net.common(D, S, (opened, width), "alpha_S")
    count = sum(len(layer.products) for layer in layers)
    claim = dealing_constraints.ands(net, DealerShares(alpha_A, alpha_S), _operands(tuple(layers)))
    products = deal_bits(net, ComputedCorrection(_products, (count, width), (alpha_A, alpha_S, tuple(layers))), claim)

    sent = each(_masked, state, Shares(alpha_A, alpha_S), layers[0])
    at, made = 0, 0
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        sent_A, sent_S = sent.A.send(A, S, "masked_A"), sent.S.send(S, A, "masked_S")
        public, place = (sent_A, sent_S), (layer, following, at, made)
        at, made = at + len(layer.opened), made + len(layer.products)
        at_A = _joined(*public, state.A, alpha_A, products.A, *place, True)
        at_S = _joined(*public, state.S, alpha_S, products.S, *place, False)
        state, sent = Shares(at_A[0], at_S[0]), Shares(at_A[1], at_S[1])
    return state


@leaf(shapes=lambda state, alpha, layer: alpha[: len(layer.opened)])
def _masked(state: torch.Tensor, alpha: torch.Tensor, layer: AndLayer) -> torch.Tensor:
    """The rows that the first layer opens, under their masks."""
    if not (loops := fast(state, alpha)):
        return pick(state, layer.opened) ^ alpha[: len(layer.opened)]
    out = state.new_empty(len(layer.opened), state.shape[1])
    loops.run_on_words(state.shape[1], loops.mask_layer, state.numpy(), alpha.numpy(), layer.rows[0], 0, out.numpy())
    return out


def _shapes_of_joined(sent, _0, state, _1, _2, layer: AndLayer, following: AndLayer | None, *_):
    rows = layer.made + len(layer.kept), len(following.opened) if following else 0
    return tuple(state.new_empty(count, state.shape[1]) for count in rows)


@leaf(shapes=_shapes_of_joined)
def _joined(
    sent_A, sent_S, state, alpha, products, layer: AndLayer, following: AndLayer | None, at: int, made: int, first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's half of the state after a layer, and the rows that the next one opens, under their masks.

    Args:
        at, made: the rows of alpha and of the products that came before this layer's.
    """
    opened, beyond = following.opened if following else (), at + len(layer.opened)
    if not (loops := fast(sent_A, sent_S, state, alpha, products)):
        new = beaver(sent_A ^ sent_S, alpha[at:beyond], products[made:], layer, first)
        if layer.onto:
            new[: len(layer.onto)].bitwise_xor_(pick(state, layer.onto))
        new = torch.cat((new, pick(state, layer.kept))) if layer.kept else new
        return new, pick(new, opened) ^ alpha[beyond : beyond + len(opened)]
    new = state.new_empty(layer.made + len(layer.kept), state.shape[1])
    out = state.new_empty(len(opened), state.shape[1])
    arrays = (v.numpy() for v in (sent_A, sent_S, state, alpha, products))
    after = following.rows[0] if following else layer.rows[0][:0]
    place = at, made, -int(first), after, beyond, new.numpy(), out.numpy()
    loops.run_on_words(state.shape[1], loops.layer, *arrays, layer.made, *layer.rows[1:], *place)
    return new, out


@leaf(shapes=lambda alpha_A, alpha_S, layers, v_A: torch.empty_like(v_A))
def _products(alpha_A: torch.Tensor, alpha_S: torch.Tensor, layers: tuple[AndLayer, ...], v_A: torch.Tensor):
    """The products of masks that all layers take, under v_A."""
    sets = _operands(layers)
    if loops := fast(alpha_A, alpha_S, v_A):
        out = torch.empty_like(v_A)
        arrays = alpha_A.numpy(), alpha_S.numpy(), v_A.numpy(), sets, out.numpy()
        loops.run_on_words(v_A.shape[1], loops.products, *arrays)
        return out
    alpha = alpha_A ^ alpha_S
    alpha = torch.cat((alpha, torch.full_like(alpha[:1], -1)))  # the last row: no operand, in an AND of fewer
    places = (_index(tuple(column), alpha.device) for column in (sets.T % len(alpha)).tolist())
    return functools.reduce(torch.bitwise_and, [alpha[at] for at in places]) ^ v_A


@functools.lru_cache(maxsize=64)
def _operands(layers: tuple[AndLayer, ...]) -> np.ndarray:
    """The rows of all masks that the products of all layers take."""
    starts = itertools.accumulate((len(layer.opened) for layer in layers), initial=0)
    return _padded([tuple(i + at for i in part) for layer, at in zip(layers, starts, strict=False)
                    for part in layer.products])  # fmt: skip


# Layers of ANDs from a circuit of gates: each as early as its operands allow.


@dataclass(frozen=True)
class _Gate:
    """The xor of ANDs of two operands or more, and of onto where there is one; all by number."""

    ands: tuple[tuple[int, ...], ...]
    onto: int | None

    @property
    def operands(self) -> tuple[int, ...]:
        """Each once, in the order in which they come."""
        onto = () if self.onto is None else (self.onto,)
        return tuple(dict.fromkeys([number for operands in self.ands for number in operands] + list(onto)))

    @property
    def multiplied(self) -> tuple[int, ...]:
        return tuple(number for operands in self.ands for number in operands)


@dataclass
class AndCircuit:
    """A circuit on so many input rows, which have the numbers 0 .. rows - 1; every gate has the next number."""

    rows: int
    _gates: list[_Gate] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)
    _numbers: dict[_Gate, int] = field(default_factory=dict)

    def gate(self, *ands: tuple[int, ...], onto: int | None = None) -> int:
        """The xor of these ANDs, and of onto; its number, which is that of an equal gate where there is one."""
        made = _Gate(ands, onto)
        if made not in self._numbers:
            self._depths.append(1 + max(self.depth(x) for x in made.operands))
            self._gates.append(made)
            self._numbers[made] = self.rows + len(self._gates) - 1
        return self._numbers[made]

    def depth(self, number: int) -> int:
        """The layer that makes it; 0 for what is there."""
        return 0 if number < self.rows else self._depths[number - self.rows]

    def layers(self, results: tuple[int, ...]) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
        """The layers that compute these results, and the rows of the last state where they stand."""
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
            numbers = sorted(by_depth[depth], key=lambda n: self._of(n).onto is None)
            gates = [self._of(n) for n in numbers]
            later = set(results) | {x for d in by_depth if d > depth for n in by_depth[d] for x in self._of(n).operands}
            opened = tuple(dict.fromkeys(number for gate in gates for number in gate.multiplied))
            index = {number: i for i, number in enumerate(opened)}
            kept = [number for number in state if number in later]
            layers.append(
                AndLayer(
                    tuple(place[number] for number in opened),
                    tuple(tuple(index[x] for x in operands) for gate in gates for operands in gate.ands),
                    tuple(row for row, gate in enumerate(gates) for _ in gate.ands),
                    tuple(place[gate.onto] for gate in gates if gate.onto is not None),
                    tuple(place[number] for number in kept),
                )
            )
            state = [*numbers, *kept]
        place = {number: row for row, number in enumerate(state)}
        return tuple(layers), tuple(place[number] for number in results)

    def _of(self, number: int) -> _Gate:
        return self._gates[number - self.rows]
