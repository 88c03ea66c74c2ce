"""Maxima over windows: by a tree of pairs, by groups of four, and with ReLU and truncation from one opening.

- `max_tree` takes pairwise maxima: the fewest bytes. Source: PrivHFL, 3.3 (iii).
- `max_by_fours` compares all pairs of four values at once: half the levels, for some twice as many comparisons. Where
  rows are few, groups are larger.
- `ramp_of_largest` computes the ReLU of a window's largest value and its truncation from one opening: the fewest
  rounds, for slow networks.

All three compare pairs of masked values without opening their differences: the difference of two values that are open
under their masks is open under the difference of the masks, which D knows.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ...choreography import Net, leaf, protocol
from ...errors import ArgumentError
from ...ring import logical_shift
from ...ring.bitplanes import fast, signs_of, words_for
from .and_layers import AndCircuit, AndLayer, and_layers, pick
from .compare import (
    CODES,
    Blocks,
    Node,
    Polynomial,
    RoundBudget,
    bits_of_layers,
    block_count,
    blocks_between,
    check_planes,
    complement,
    deal_wide_codes,
    drelu,
    forest,
    join,
    levels_of,
    polynomial,
    product,
    tree,
    two_level_excess,
    wide_leaves,
)
from .guard import raise_flags
from .masking import ComputedCorrection, Masked, deal, open_masked, planes_of
from .relu import maximum
from .select import (
    BitMask,
    bits_less,
    choose_by_bits,
    deal_mask,
    mask_select,
    open_bit,
    per_element,
    random_bits,
    select,
)
from .shares import Shares, concatenate, each
from .truncate import check_shift, half, negative_less, shifted_less

# A tree of pairs


@protocol("max_tree", "PrivHFL, 3.3 (iii)")
def max_tree(net: Net, x: Shares, high: int = 63, fss: bool = False) -> Shares:
    """Compute the maximum along the first dimension by pairs. Exact.

    Args:
        x: [m, ...]; all values within 2^62 of zero.
        high, fss: as in `maximum`.

    ceil(log2 m) levels of `maximum`, each on half the values; m - 1 comparisons per result in all. Nobody learns
    anything.
    """
    while (count := x.shape[0]) > 1:
        half = count // 2
        top = maximum(net, x[:half], x[half : 2 * half], high, fss)
        x = each(concatenate, top, x[2 * half :]) if count % 2 else top
    return x[0]


# Groups of four and more
#
# All pairs of the values are compared at once. With b_ij = [x_i >= x_j] for i < j, the first largest value is x_i where
# w_i = 1, and the last one where none is. Of four:
#
#     w_0 = b_01 b_02 b_03,   w_1 = (1 - b_01) b_12 b_13,   w_2 = (1 - b_02) (1 - b_12) b_23.
#
# The maximum is x_3 + w_0 (x_0 - x_3) + w_1 (x_1 - x_3) + w_2 (x_2 - x_3).


LONG = 32
"""From so many values on, a maximum is computed by fours where bytes matter more than rounds."""
FOUR = 4
LARGEST_GROUP = 10
"""Values that are compared at once at most: an AND of nine operands has 2^9 products of masks dealt."""


@functools.cache
def pairs_of(size: int) -> tuple[tuple[int, int], ...]:
    """All pairs i < j of so many values."""
    return tuple(itertools.combinations(range(size), 2))


@functools.cache
def group_sizes(values: int, results: int, high: int, worth: int) -> tuple[int, ...]:
    """The groups of each level of a maximum of so many values, with the fewest bytes and rounds.

    Args:
        results: maxima that are computed side by side.
        high: planes of a comparison.
        worth: the bytes that a round is worth.
    """
    levels, _ = forest((block_count(0, high),), (False,))
    comparison, more = (CODES * block_count(0, high) + 1 + bits_of_layers(levels)) / 8, two_level_excess(high)

    @functools.cache
    def best(count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return 0.0, ()
        found = []
        for size in range(min(FOUR, count), min(LARGEST_GROUP, count) + 1):
            groups = -(-count // size)
            winners = 0.25 * (size - 1) if size < 3 else bits_of_layers(_winners(size)[0]) / 8
            level = groups * results * (16 * size + len(pairs_of(size)) * comparison + winners + 17 * (size - 1))
            cost, sizes = best(groups)
            saved = max(0.0, worth - groups * results * len(pairs_of(size)) * more)  # by `wide` comparisons
            found.append((level + (len(levels) + 3) * worth - saved + cost, (size, *sizes)))
        return min(found)

    return best(values)[1]


@protocol("max_by_fours", "docs/protocols.md")
def max_by_fours(net: Net, x: Shares, high: int = 63, sizes: tuple[int, ...] = (), worth: int = 0) -> Shares:
    """Compute the maximum along the first dimension by groups of four, or of other sizes. Exact.

    Args:
        x: [m, ...]; all values within 2^62 of zero.
        high: as in `maximum`.
        sizes: the sizes of the groups of the first levels, two or more and 10 at most (`group_sizes`).
        worth: the bytes that a round is worth.

    Levels of `max_of_four`, each on a quarter of the values, while there are four or more, and then `max_tree`. 128
    values take four levels; a tree of pairs takes seven. Nobody learns anything.
    """
    for size in sizes:
        filled = x[: -x.shape[0] % size]  # these values are in two groups
        x = each(concatenate, x, filled) if filled.shape[0] else x
        x = max_of_four(net, x, high, size, worth) if size > 2 else maximum(net, *x.moved(torch.Tensor.chunk, 2), high)
    while (count := x.shape[0]) >= FOUR:
        full = count // FOUR * FOUR
        top = max_of_four(net, x[:full], high)
        x = each(concatenate, top, x[full:]) if count > full else top
    return max_tree(net, x, high)


@protocol("max_of_four", "docs/protocols.md")
def max_of_four(net: Net, x: Shares, high: int = 63, size: int = FOUR, worth: int = 0) -> Shares:
    """Compute the largest of x[i], x[i + n], x[i + 2 n] and x[i + 3 n] for x [4 n, ...]: [n, ...]. Exact.

    Args:
        high: differences are known to lie in [-2^high, 2^high).
        size: compare so many values in place of four, 3 to 10, for x [size n, ...].
        worth: the bytes that a round is worth: few pairs are compared in a round less (`wide` of `drelu`).

    Rounds 1 (opening) + ceil(log4 ceil(high / 3)) (trees) + 1 (pairs) + 1 (bits). Per result six comparisons, 12 bits
    opened and 12 dealt for the pairs, and three times `select`; of m values m (m - 1) / 2 comparisons, some m 2^(m - 1)
    bits dealt for the pairs, and m - 1 times `select`. Nobody learns anything.
    """
    count, compared = x.shape[0] // size, pairs_of(size)
    group = each(by_words, x, size)
    masked = open_masked(net, group)
    pairs = Masked(*(differences(v, compared) for v in (masked.c, masked.r, masked.r_A, masked.r_S)))
    wide = two_level_excess(high) * pairs.shape.numel() <= worth
    bits = each(torch.Tensor.view, drelu(net, pairs, high, wide=wide), len(compared), -1)

    layers, places = _winners(size)
    wins = each(_rows_of_group, and_layers(net, bits, layers), places)
    last = tuple(compared.index((i, size - 1)) for i in range(size - 1))
    over = select(net, wins, Masked(*(_columns(v, last) for v in (pairs.c, pairs.r, pairs.r_A, pairs.r_S))))
    return each(_largest, over, group, torch.Size((count, *x.shape[1:])))


@functools.cache
def _winners(size: int) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
    """The layer that computes all w_i but the last from the rows b_ij, and their rows."""
    circuit, b = AndCircuit(len(pairs_of(size))), {pair: row for row, pair in enumerate(pairs_of(size))}
    wins = []
    for i in range(size - 1):
        above = tuple(b[i, j] for j in range(i + 1, size))
        # 1 - b is 1 xor b, so the products are multiplied out: (1 - b_01) b_12 b_13 = b_12 b_13 xor b_01 b_12 b_13.
        below = [b[j, i] for j in range(i)]
        ands = [tuple(sorted((*part, *above))) for k in range(i + 1) for part in itertools.combinations(below, k)]
        alone = [rows[0] for rows in ands if len(rows) == 1]
        wins.append(circuit.gate(*(rows for rows in ands if len(rows) > 1), onto=alone[0] if alone else None))
    return circuit.layers(tuple(wins))


@leaf
def by_words(x: torch.Tensor, m: int) -> torch.Tensor:
    """[m n, ...] -> [64, m, W]: value i of every result, in the order of packed bits, 64 results to a word."""
    flat = x.reshape(m, x.numel() // m)
    missing = -flat.shape[1] % 64
    wide = flat.shape[1] + missing
    return torch.nn.functional.pad(flat, (0, missing)).view(m, 64, wide // 64).transpose(0, 1).contiguous()


@leaf
def differences(x: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """[64, m, W] -> [64, pairs, W]."""
    return torch.stack([x[:, i] - x[:, j] for i, j in pairs], 1)


@leaf
def _columns(x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([x[:, i] for i in which], 1)


@leaf
def _rows_of_group(words: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
    return pick(words, which).reshape(-1)


@leaf
def _largest(over: torch.Tensor, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The sum of the last value and of how much the largest exceeds it, in the shape of the results."""
    return (over.sum(1) + x[:, -1]).view(-1)[: shape.numel()].view(shape)


# ReLU of the largest, with the truncation that follows a linear layer: all from one opening
#
# All comparisons of a window run side by side on the same masked values. With D_i = (c_i >> f) - (r_i >> f), which is
# x_i >> f or one more, q_i = [D_i > 0], and P_ij = [x_i >= x_j] for i < j, the selecting bits are
#
#     s_i = q_i prod_{j > i} P_ij prod_{j < i} (1 - P_ji).
#
# One of them is set where the largest is 1 or more, at most one where it is 0, and none where it is negative. So with
# u_i as in `relu.py`
#
#     max(x_0', ..., 0) >> f = sum_i s_i (D_i + 2^(64-f) msb(r_i) (1 - msb(c_i))) - xor_i s_i u_i.
#
# `levels` trades rounds for bytes. With one level, a sign is one AND over wide blocks, and a pair stays in two halves
# P = lt' xor eq' lt, which the products multiply out. With three levels, both are trees of narrow blocks. A alone
# computes the linear layer before, so that its message is the later one: three levels take two messages more on the
# critical path than one, and a third of the bytes.


MOST = 4
"""Most values in a window of `ramp_of_largest`."""

PAIR_BLOCKS, SIGN_BLOCKS, TOP_BLOCKS, LOW_BLOCKS = 12, 5, 2, 5
"""Numbers of blocks with one level: of a pair, of a sign below the limit and above it, and of the dropped planes."""

WIDEST_BLOCK = 8
"""Most bits of a block, for which 255 are dealt."""


@dataclass(frozen=True)
class Plan:
    """How the values of a window are cut into blocks and compared.

    Attributes:
        m: values in a window.
        pair: blocks of the differences.
        low, middle, top: blocks of a value: the dropped planes, the planes up to the limit, and those above it.
        limited: whether a flag is raised above the limit.
        levels: layers of ANDs before the last one.
    """

    m: int
    pair: Blocks
    low: Blocks
    middle: Blocks
    top: Blocks
    limited: bool
    levels: int

    @property
    def signs(self) -> tuple[Blocks, Blocks]:
        """The two spans of a value: the dropped planes, and all others."""
        return self.low, Blocks(self.middle.low, self.middle.widths + self.top.widths)

    @property
    def bits(self) -> int:
        """Bits that are dealt for the comparisons of a window."""
        codes = self.m * sum(span.codes for span in self.signs) + len(pairs_of(self.m)) * self.pair.codes
        return codes + sum(len(layer.products) for layer in _circuit(self)[0])


@functools.cache
def plan_blocks(m: int, shift: int, between: int, high: int, limit_bits: int | None, levels: int) -> Plan:
    """The plan of `ramp_of_largest` for its arguments."""
    limit = high if limit_bits is None else min(high, shift + limit_bits)
    limited = limit < high
    # Without a limit the border is any plane: eleven planes are two blocks of five and six bits.
    middle = limit if limited else max(shift + 1, high - 11)
    sizes = between, shift, middle - shift, high - middle
    if levels == 1:
        blocks = PAIR_BLOCKS, LOW_BLOCKS, SIGN_BLOCKS, TOP_BLOCKS
        counts = tuple(max(count, -(-n // WIDEST_BLOCK)) for count, n in zip(blocks, sizes, strict=True))
    else:
        counts = tuple(-(-n // 3) for n in sizes)
    spans = (0, between), (0, shift), (shift, middle), (middle, high)
    pair, low, mid, top = (blocks_between(a, b, max(1, min(n, b - a))) for (a, b), n in zip(spans, counts, strict=True))
    return Plan(m, pair, low, mid, top, limited, levels)


WORTH = 32_000_000
"""Bytes ahead that a call may spend on fewer rounds on the link "wan": 2.6 s of 100 Mbit/s, before the query comes."""


def levels_worth(net: Net, m: int, windows: int, shift: int, between: int, high: int, limit_bits: int | None) -> int:
    """The levels of comparisons for so many windows: 1, or 3 where 1 costs too much of this call's budget `WORTH`.

    One level is chosen, and its additional bytes are counted, where they are at most half of the rest of the budget. So
    a net of a few layers has one level in each, and a net of fifty layers has it where it costs least. Two messages
    less on the critical path save 50 ms where a round trip takes as long.
    """
    one, three = (plan_blocks(m, shift, between, high, limit_bits, levels).bits for levels in (1, 3))
    more = -(-(one - three) * windows // 8)
    budget = net.state(RoundBudget)
    if 2 * more > WORTH * budget.scale - budget.spent:
        return 3
    budget.spent += more
    return 1


@protocol("ramp_of_largest", "docs/protocols.md; PrivHFL, 3.3 (ii) and (iii)")
def ramp_of_largest(
    net: Net, x: Shares, shift: int, between: int = 63, high: int = 63, limit_bits: int | None = None, levels: int = 3
) -> Shares:
    """Compute max(x[0], x[1], ..., 0) / 2^shift, rounded half up. Exact.

    Args:
        x: [m, ...], one to four values a window, all within 2^62 - 2^(shift-1) of zero.
        shift: fraction bits to drop, 1..32.
        between: differences are known to lie in [-2^between, 2^between).
        high: values are known to lie in [-2^high, 2^high - 2^shift).
        limit_bits: raise a flag (`guard.py`) where the result is 2^limit_bits or more.
        levels: layers of ANDs for the comparisons, 1 or 3 (`levels_worth`).

    Returns:
        Shares [...].

    Raises:
        ArgumentError: another number of values, levels, or bits.

    Rounds: 1 (opening) + levels + 1 (products) + 1 (bits). For 20 bits and a limit of 32, a window of one takes 24
    bytes online and 148.125 dealt with one level, 32.25 and 73.25 with three; of four 131.25 and 1310.75, or 207.75 and
    433.75. Nobody learns anything.
    """
    m, shape = x.shape[0], x.shape[1:]
    if not 1 <= m <= MOST:
        raise ArgumentError(f"a window has one to {MOST} values, got {m}")
    if levels not in (1, 3) or (limit_bits is not None and limit_bits < 1):
        raise ArgumentError(f"levels is 1 or 3, and a limit 1 bit or more, got {levels} and {limit_bits}")
    check_shift(shift, least=1)
    check_planes(high, shift)
    check_planes(between)
    high = min(63, high + 1)  # D_i > 0 is computed as D_i >= 0 and not D_i = 0, which needs a plane more
    plan = plan_blocks(m, shift, between, high, limit_bits, levels)
    masked = open_masked(net, each(by_words, x, m))
    width = masked.shape[2]

    mask = random_bits(net, torch.Size((64, m + 1, width)))
    # The bits of the m values without the last copy, which masks the xor of all s_i u_i.
    own = BitMask(mask.b_A[: m * width], mask.b_S[: m * width], masked.shape, None)
    sign = _sign_words(masked.r)
    R = deal(net, ComputedCorrection(shifted_less, masked.shape, (masked.r, shift)))
    w = deal(net, ComputedCorrection(negative_less, masked.shape, (masked.r,)), torch.int32)
    bits = deal_mask(net, mask)
    chosen = deal(net, choose_by_bits(own, masked.r, shift))
    wraps = deal(
        net,
        ComputedCorrection(bits_less, masked.shape, (own.b_A & sign, own.b_S & sign, masked.shape, None, 0)),
        torch.int32,
    )

    bits_of_values = _selecting_bits(net, masked, plan, high)
    first, second = open_bit(net, bits_of_values, mask)
    c = masked.c + half(shift)
    at_A = _sum_chosen(first, second, c, R.A, bits.A, chosen.A, w.A, wraps.A, 1, shift)
    at_S = _sum_chosen(first, second, c, R.S, bits.S, chosen.S, w.S, wraps.S, 0, shift)
    return each(_unpadded, Shares(at_A, at_S), shape)


def _selecting_bits(net: Net, x: Masked, plan: Plan, high: int) -> Shares:
    """Compute s_0, ..., and the xor of all s_i u_i: words [(m + 1) W], XOR-shared. Raises the flags of a limit."""
    m, width = plan.m, x.shape[2]
    pairs, between = pairs_of(m), plan.pair.high
    layers, places = _circuit(plan)
    codes = deal_wide_codes(net, x, plan.signs, (high,))
    c = x.c + half(plan.low.high)
    public = planes_of(c), planes_of(c - (1 << plan.top.low)) if plan.limited else None
    dealt, pair_planes = (codes,), None
    if pairs:
        difference = Masked(*(differences(v, pairs) for v in (x.c, x.r, x.r_A, x.r_S)))
        dealt = codes, deal_wide_codes(net, difference, (plan.pair,), (between,))
        pair_planes = planes_of(difference.c)
    at_A = _state(*public, pair_planes, plan, width, True, *(v.A for v in dealt))
    at_S = _state(*public, pair_planes, plan, width, False, *(v.S for v in dealt))
    state = and_layers(net, Shares(at_A, at_S), layers)
    if plan.limited:
        raise_flags(net, each(_rows_of, state, places[m + 1 :]))
    return each(_rows_of, state, places[: m + 1])


@leaf(shapes=lambda v: v.new_empty(words_for(v.numel())))
def _sign_words(v: torch.Tensor) -> torch.Tensor:
    """The sign bits as words: plane 63."""
    return signs_of(v)


@leaf
def _unpadded(y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return y.reshape(-1)[: shape.numel()].view(shape)


@leaf
def _rows_of(state: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Some rows of the state, one after the other."""
    return pick(state, places).reshape(-1)


def _rows(plan: Plan) -> int:
    """The number of rows of the state that `_state` returns."""
    blocks = len(plan.low.widths) + len(plan.middle.widths) + (1 + plan.limited) * len(plan.top.widths)
    return (2 * blocks + 1) * plan.m + 2 * len(plan.pair.widths) * len(pairs_of(plan.m))


@leaf(shapes=lambda bits, far, differences, plan, width, first, *_: bits.new_empty(_rows(plan), width))
def _state(bits, far, differences, plan: Plan, width: int, first: bool, codes, pair_codes=None) -> torch.Tensor:
    """One party's half of lt and eq of all blocks of values and pairs, in the order of `_circuit`: [rows, W].

    The most significant lt of a value, of a value less the limit and of a pair is combined with the signs of c and r,
    so that a tree gives [x >= 0]. For the lowest block above the dropped planes there is lt xor eq, [c <= r], as well.

    Args:
        bits, far, differences: public planes of c, of c - 2^k for the limit 2^k, and of the pairs' differences.
        codes, pair_codes: its halves of the thermometer codes of values and of pairs.
    """
    signs = plan.signs
    own = wide_leaves(bits, codes, signs, first)
    place = 2 * len(plan.low.widths) + len(signs[1].widths) - 1
    own[place] ^= _sign_of(bits, codes, signs[1].high, first)
    lowest = 2 * len(plan.low.widths)
    parts = [own, own[lowest : lowest + 1] ^ own[lowest + len(signs[1].widths)]]
    if plan.limited:
        top = codes[plan.low.codes + plan.middle.codes :]
        beyond = wide_leaves(far, top, (plan.top,), first)
        beyond[len(plan.top.widths) - 1] ^= _sign_of(far, codes, plan.top.high, first)
        parts.append(beyond)
    if differences is not None and pair_codes is not None:
        less = wide_leaves(differences, pair_codes, (plan.pair,), first)
        less[len(plan.pair.widths) - 1] ^= _sign_of(differences, pair_codes, plan.pair.high, first)
        parts.append(less)
    counts = [*[plan.m] * (2 + plan.limited), len(pairs_of(plan.m))]
    return torch.cat([v.view(len(v) * count, width) for v, count in zip(parts, counts, strict=False)])


def _sign_of(bits: torch.Tensor, codes: torch.Tensor, high: int, first: bool) -> torch.Tensor:
    """One party's half of 1 xor c's plane `high` xor r's."""
    return ~(codes[-1] ^ bits[high]) if first else codes[-1]


@functools.cache
def _circuit(plan: Plan) -> tuple[tuple[AndLayer, ...], tuple[int, ...]]:
    """The layers of ANDs of a plan, and the rows of s_0, ..., of xor_i s_i u_i, and of the flags."""
    m, pairs = plan.m, pairs_of(plan.m)
    circuit, at = AndCircuit(_rows(plan)), 0

    def nodes(blocks: int, count: int) -> list[list[Node]]:
        """The nodes of the next so many blocks of `count` values, value by value."""
        nonlocal at
        found = [[(at + b * count + i, at + (blocks + b) * count + i) for b in range(blocks)] for i in range(count)]
        at += 2 * blocks * count
        return found

    low = nodes(len(plan.low.widths), m)
    upper = nodes(len(plan.middle.widths) + len(plan.top.widths), m)
    lowest, at = range(at, at + m), at + m
    far = nodes(len(plan.top.widths), m) if plan.limited else []
    differences = nodes(len(plan.pair.widths), len(pairs))

    middle = len(plan.middle.widths)
    u = [_below(circuit, blocks, plan.levels)[0] for blocks in low]
    # The lowest block counts equality as less, so that a tree gives [c >> f <= r >> f]; with the signs in its top block
    # that is not [D_i > 0], complemented already.
    q = [
        _above(circuit, [(at_most, blocks[0][1]), *blocks[1:]], middle, plan.levels)
        for at_most, blocks in zip(lowest, upper, strict=True)
    ]
    wins = {pair: _pair(circuit, blocks, plan.levels) for pair, blocks in zip(pairs, differences, strict=True)}
    s = [
        product(
            polynomial((q[i],)), *(wins[i, j] for j in range(i + 1, m)), *(complement(wins[j, i]) for j in range(i))
        )
        for i in range(m)
    ]
    borrowed = functools.reduce(
        frozenset.symmetric_difference, [product(p, polynomial((v,))) for p, v in zip(s, u, strict=True)]
    )
    results = [_gate(circuit, p) for p in (*s, borrowed)]
    if plan.limited:
        lower = [_below(circuit, blocks[:middle], plan.levels) for blocks in upper]
        beyond = [_below(circuit, blocks, plan.levels) for blocks in far]
        results += [
            circuit.gate((far_eq, lt), (far_eq, eq, v), onto=far_lt)
            for (lt, eq), (far_lt, far_eq), v in zip(lower, beyond, u, strict=True)
        ]
    return circuit.layers(tuple(results))


def _below(circuit: AndCircuit, blocks: list[Node], levels: int) -> Node:
    """Join all blocks to one node: at once with one level, else by a tree."""
    return join(circuit, blocks) if levels == 1 else tree(circuit, blocks, levels_of(len(blocks)))


def _above(circuit: AndCircuit, blocks: list[Node], middle: int, levels: int) -> int:
    """The row lt of all blocks; with more than one level the lower `middle` blocks are joined first."""
    if levels == 1:
        return join(circuit, blocks)[0]
    parts = [part for part in (blocks[:middle], blocks[middle:]) if part]
    return join(circuit, [_below(circuit, part, levels) for part in parts])[0]


def _pair(circuit: AndCircuit, blocks: list[Node], levels: int) -> Polynomial:
    """[x >= y] of a pair as a polynomial: in one row, or with one level in the rows of its two halves."""
    if levels > 1 or len(blocks) == 1:
        return polynomial((_below(circuit, blocks, levels)[0],))
    middle = len(blocks) // 2
    (lt, _), (above, eq) = join(circuit, blocks[:middle]), join(circuit, blocks[middle:])
    return polynomial((above,), (eq, lt))


def _gate(circuit: AndCircuit, p: Polynomial) -> int:
    """Add a gate for a polynomial without a constant, which has at most one row that is not in an AND."""
    # A gate xors one row at most beside its ANDs; the polynomials of a window have no constant, as q_i is a factor of
    # all.
    alone = [row for rows in p if len(rows) == 1 for row in rows]
    ands = sorted(tuple(sorted(rows)) for rows in p if len(rows) > 1)
    return circuit.gate(*ands, onto=alone[0] if alone else None) if ands else alone[0]


@leaf(shapes=lambda first, second, c, *_: c.new_empty(c.shape[0], c.shape[2]))
def _sum_chosen(first, second, c, R, bits, chosen, w, wraps, one: int, shift: int) -> torch.Tensor:
    """One party's half of sum_i s_i ((c_i >> f) - R_i + 2^(64-f) w_i (1 - msb(c_i))) - xor_i s_i u_i: [64, W].

    Args:
        first, second: public, the halves of e as words [(m + 1) W].
        c: [64, m, W], with the rounding half added.
    """
    if loops := fast(first, second, c, R, bits, chosen, w, wraps):
        out = torch.empty(c.shape[0], c.shape[2], dtype=torch.int64)
        arrays = (loops.array(v) for v in (first ^ second, c, R, bits, chosen, w, wraps))
        loops.run_on_words(c.shape[2], loops.winners, *arrays, one, shift, out.numpy())
        return out
    e = per_element(first, second, bits.shape, None)
    own, m = e[:, :-1], c.shape[1]
    total = mask_select(own, bits[:, :m], one).mul_(logical_shift(c, shift)).sub_(mask_select(own, chosen, R))
    wrap = mask_select(own, wraps.to(torch.int64), w.to(torch.int64)).bitwise_left_shift_(64 - shift)
    total += wrap.bitwise_and_((c >> 63).bitwise_not_())
    return total.sum(1) - mask_select(e[:, -1], bits[:, -1], one)
