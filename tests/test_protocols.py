"""Every protocol against plain integers: random shapes, the whole range that its docstring promises, and its edges."""

from __future__ import annotations

import contextlib
import functools
from math import ceil, log2

import pytest
import torch
from cases import by_turns
from example_counts import fewer
from helpers import (
    CASES,
    HIGHEST,
    LOWEST,
    SHAPES,
    case_session,
    check_relu,
    open_bits,
    part,
    ring_values,
    rounded,
    run,
    session,
    weight_like,
)
from hypothesis import given
from hypothesis import strategies as st

from sectorch.choreography import Phase
from sectorch.errors import ArgumentError, MisplacedValueError
from sectorch.mpc.star import compare
from sectorch.mpc.star.and_layers import WIDEST, AndCircuit, and_layers
from sectorch.mpc.star.compare import (
    CODES,
    block_count,
    blocks_of,
    drelu,
    forest,
    group_blocks,
    levels_of,
    one_hot,
    pick_equal,
    pick_less,
    thermometer,
)
from sectorch.mpc.star.linear import linear
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.maximum import group_sizes, max_by_fours, max_of_four, max_tree
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.relu import maximum, ramps, relu
from sectorch.mpc.star.select import select
from sectorch.mpc.star.shares import Shares, reveal, share
from sectorch.mpc.star.truncate import truncate
from sectorch.ring import rounded_shift
from sectorch.ring.bitplanes import planes, spread, to_rows
from sectorch.ring.products import Conv2d, Linear, matmul
from sectorch.session import Session

SHAPE = st.sampled_from(SHAPES)
SEED = st.integers(0, 1 << 30)
SHIFT = st.integers(1, 32)


SIZE = st.sampled_from([1, 63, 64, 65, 100, 200])


@pytest.mark.parametrize("case", [case for case in CASES if not case.fss], ids=str)
@fewer(12)
@given(n=SIZE, seed=SEED)
def test_every_case(case, n: int, seed: int):
    right(case, n, seed)


@pytest.mark.parametrize("case", [case for case in CASES if case.fss], ids=str)
@fewer(5)
@given(n=SIZE, seed=SEED)
def test_every_case_of_long_keys(case, n: int, seed: int):
    """Their keys take 64 steps: `check_protocol` tries 16,000 elements of each (`test_own_protocols.py`)."""
    right(case, n, seed)


@pytest.mark.parametrize("case", [case for case in CASES if not case.fss], ids=str)
def test_every_case_by_trees_of_more_levels(case, monkeypatch):
    """As of large values, where bytes are worth more than a round."""
    monkeypatch.setattr(compare, "LAN_ROUND", 0)
    right(case, 200, 7)


def right(case, n: int, seed: int) -> None:
    inputs = case.inputs(n, seed)
    outputs = run(case.program, *inputs, session=case_session(case))
    case.check(inputs, outputs if isinstance(outputs, list) else [outputs])


ELEMENTWISE = [case for case in CASES if case.elementwise and case.answering == 1]


@by_turns(ids=str, case=ELEMENTWISE, shape=SHAPES)
def test_every_shape(case, shape):
    inputs = case.values([shape] * len(case.given))
    outputs = run(case.program, *inputs)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    case.check(inputs, outputs)
    assert all(o.shape == torch.Size(shape) for o in outputs)


def test_share_refuses_a_value_that_Q_lacks_and_its_way_out_works():
    with session().call(session().answering[0]) as net:
        x, a = ring_values((7,)), ring_values((7,), seed=1)
        at_Q, at_A = net.own(net.Q, x), net.own(net.A, a)
        with pytest.raises(MisplacedValueError, match=r"Q lacks this one; .* share\(x\) \+ a"):
            share(net, at_A)
        assert torch.equal(net.read(reveal(net, share(net, at_Q) + at_A), net.Q), x + a)


def test_shares_are_halves_of_the_value():
    with session().call(session().answering[0]) as net:
        x = ring_values((7,))
        shares = share(net, net.own(net.Q, x))
        halves = net.read(shares.A, net.A), net.read(shares.S, net.S)
        assert torch.equal(halves[0] + halves[1], x)
        y = ring_values((7,), seed=1)
        other = share(net, net.own(net.Q, y))
        for result, expected in (
            (shares + other, x + y),
            (shares - other, x - y),
            (shares + y, x + y),
            (shares + net.own(net.A, y[:1], Phase.SETUP), x + y[:1]),
            (shares + y.view(7, 1), x + y.view(7, 1)),
        ):
            assert torch.equal(net.read(reveal(net, result), net.Q), expected)


# Products.


@given(n=st.integers(0, 9), k=st.integers(1, 9), m=st.integers(1, 9), seed=SEED)
def test_linear_by_a_secret_matrix(n: int, k: int, m: int, seed: int):
    def program(world, x):
        return linear(world.net, world.setup, lambda x, w, *_: matmul(x, w), x, world.weight(weight_like((k, m))))

    x = ring_values((n, k), 63, seed)
    assert torch.equal(run(program, x), x @ weight_like((k, m)))


@given(rows=st.sampled_from([1, 2, 5, 127, 128]), out=st.sampled_from([1, 127, 128, 200]), seed=SEED)
def test_linear_layers_with_and_without_prepared_weights(rows: int, out: int, seed: int):
    def program(world, x):
        return linear(world.net, world.setup, Linear(), x, world.weight(weight_like((out, 6))))

    x = ring_values((rows, 6), 63, seed)
    assert torch.equal(run(program, x), x @ weight_like((out, 6)).T)


@given(stride=st.integers(1, 2), padding=st.integers(0, 2), groups=st.sampled_from([1, 2, 4]), seed=SEED,
       out=st.sampled_from([4, 128]))  # fmt: skip
def test_linear_by_a_secret_kernel(stride: int, padding: int, groups: int, seed: int, out: int):
    conv = Conv2d((stride, 1), (padding, 1), (1, 2), groups)
    weight = weight_like((out, 4 // groups, 3, 2))

    def program(world, x):
        return linear(world.net, world.setup, conv, x, world.weight(weight))

    x = ring_values((2, 4, 5, 6), 63, seed)
    expected = torch.conv2d(x, weight, None, (stride, 1), (padding, 1), (1, 2), groups)
    assert torch.equal(run(program, x), expected)


def test_one_weight_serves_many_calls():
    kept: dict = {}
    weight = weight_like((3, 4))

    def program(world, x):
        world.kept = kept
        return linear(world.net, world.setup, lambda x, w, *_: x @ w, x, world.weight(weight))

    for seed in range(5):
        x = ring_values((2, 3), 63, seed)
        assert torch.equal(run(program, x), x @ weight)
    assert len(kept) == 1


@given(shapes=st.sampled_from([((5,), (5,)), ((3, 1), (1, 4)), ((), (6,)), ((2, 3), (3,)), ((0,), (0,))]), seed=SEED)
def test_products_of_two_secrets_broadcast(shapes, seed: int):
    x, y = (ring_values(s, 63, seed + i) for i, s in enumerate(shapes))
    assert torch.equal(run(lambda w, x, y: multiply(w.net, torch.mul, x, y), x, y), x * y)


@given(n=st.integers(1, 7), k=st.integers(1, 9), m=st.integers(1, 7), seed=SEED)
def test_matrix_products_of_two_secrets(n: int, k: int, m: int, seed: int):
    x, y = ring_values((n, k), 63, seed), ring_values((k, m), 63, seed + 1)
    assert torch.equal(run(lambda w, x, y: multiply(w.net, matmul, x, y), x, y), x @ y)
    outer = functools.partial(torch.einsum, "ik,kj->kij")
    assert torch.equal(run(lambda w, x, y: multiply(w.net, outer, x, y), x, y), torch.einsum("ik,kj->kij", x, y))


@given(shape=SHAPE, seed=SEED)
def test_squares(shape, seed: int):
    x = ring_values(shape, 63, seed)
    assert torch.equal(run(lambda w, x: square(w.net, x), x), x * x)


# Truncation.


def last_places(shift: int, bits: int = 61) -> torch.Tensor:
    """Values around every kind of tie and edge of a truncation: half a unit, a whole one, zero, and the far ends."""
    unit = 1 << shift
    near = [m * unit + d for m in (0, 1, -1, 2, -2, 5, -7) for d in (-1, 0, 1, unit // 2 - 1, unit // 2, unit // 2 + 1)]
    ends = [s * ((1 << bits) - d) for s in (1, -1) for d in (0, 1, unit // 2, unit)]
    return torch.tensor(near + ends)


@given(shape=SHAPE, shift=SHIFT, seed=SEED, fss=st.booleans())
def test_truncation_rounds_half_up(shape, shift: int, seed: int, fss: bool):
    x = ring_values(shape, 61, seed)
    assert torch.equal(run(lambda w, x: truncate(w.net, x, shift, fss), x), rounded(x, shift))


@by_turns(shift=range(1, 33), fss=[False, True])
def test_ties_and_edges_of_truncation_and_relu(shift: int, fss: bool):
    x = last_places(shift)
    assert torch.equal(rounded(x, shift), torch.tensor([(v + (1 << shift - 1)) // (1 << shift) for v in x.tolist()]))
    for _ in range(3):  # other masks, the same result
        assert torch.equal(run(lambda w, x: truncate(w.net, x, shift, fss), x), rounded(x, shift))
        assert torch.equal(run(lambda w, x: relu(w.net, x, shift, fss=fss), x), rounded(x, shift).clamp(min=0))


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5])
def test_small_rings_exhaustively(shift: int):
    """All low parts of x against all low parts of the mask, many times over: every borrow, every carry into
    the sign."""
    x = torch.arange(-(1 << shift + 2), 1 << shift + 2).repeat(1 << shift)
    for fss in (False, True):
        for _ in range(4):
            assert torch.equal(run(lambda w, x: truncate(w.net, x, shift, fss), x), rounded(x, shift))
            assert torch.equal(
                run(lambda w, x: relu(w.net, x, shift, shift + 3, fss), x), rounded(x, shift).clamp(min=0)
            )


@pytest.mark.parametrize("protocol", [truncate, relu])
@pytest.mark.parametrize("shift", [-1, 33, 64])
def test_shifts_that_cannot_be_done(protocol, shift: int):
    with pytest.raises(ArgumentError, match=r"shifts by .* 32 bits, got"):
        run(lambda w, x: protocol(w.net, x, shift), ring_values((3,)))


def test_a_truncation_by_nothing_is_refused_or_does_nothing():
    x = ring_values((3,), 62)
    with contextlib.suppress(ArgumentError):
        assert torch.equal(run(lambda w, x: truncate(w.net, x, 0), x), x)


# Comparison. Blocks of three bits have 8 x 8 pairs: one word of 64 elements holds them all.

C8, R8 = torch.arange(64) // 8, torch.arange(64) % 8


def three_bits(values: torch.Tensor) -> torch.Tensor:
    """[64 W] small values -> [blocks, 3, W] planes of their low six bits (two blocks)."""
    return blocks_of(planes(to_rows(values)), 0, 6)


def bits_of(words: torch.Tensor) -> torch.Tensor:
    return spread(words).reshape(*words.shape[:-1], -1) != 0


def test_codes_of_a_block():
    low = three_bits(R8)[:1]
    assert [bits_of(u[0]).tolist() for u in thermometer(low)] == [(j < R8).tolist() for j in range(7)]
    assert [bits_of(h[0]).tolist() for h in one_hot(low)] == [(j == R8).tolist() for j in range(8)]


def test_picking_by_a_public_block_over_all_pairs():
    hot, codes = one_hot(three_bits(C8)[:1]), thermometer(three_bits(R8)[:1])
    assert torch.equal(bits_of(pick_less(hot, codes))[0], C8 < R8)
    # The term of c = 0 does not depend on r's code alone; A adds it.
    assert torch.equal(bits_of(pick_equal(hot, codes) ^ hot[0])[0], C8 == R8)
    mask = ring_values(codes.shape)
    for pick in (pick_less, pick_equal):
        assert torch.equal(pick(hot, mask) ^ pick(hot, codes ^ mask), pick(hot, codes)), "linear in the code"


@given(low=st.integers(0, 62), seed=SEED)
def test_blocks_cover_the_planes(low: int, seed: int):
    for high in {low + 1, 63, 64}:
        bit_planes = ring_values((64, 2), 63, seed)
        blocks = blocks_of(bit_planes, low, high)
        assert blocks.shape == (block_count(low, high), 3, 2)
        flat, start = blocks.flatten(0, 1), high - 3 * len(blocks)
        assert torch.equal(flat[max(0, -start) :], bit_planes[max(0, start) : high])
        assert flat[: max(0, -start)].count_nonzero() == 0


def test_levels_of_the_tree():
    for blocks in range(1, 70):
        layers, _ = forest((blocks,), (False,))
        assert len(layers) == levels_of(blocks) == ceil(log2(blocks) / 2)
        assert all(2 <= len(rows) <= WIDEST for layer in layers for rows in layer.ands)
        # What the search over trees counted is what the layers open and have dealt.
        bits = sum(2 * len(layer.opened_rows) + len(layer.products) for layer in layers)
        assert bits == group_blocks(blocks, len(layers))[0]


@pytest.mark.parametrize("operands", [2, 3, 4])
def test_an_and_of_several_operands(operands: int):
    """All values of all operands, and products that two ANDs have in common are dealt once."""
    circuit = AndCircuit(5)
    rows = tuple(range(operands))
    layers, places = circuit.layers((circuit.gate(rows, (0, 1), onto=4), circuit.gate(rows)))
    assert [len(layer.products) for layer in layers] == [2**operands - operands - 1]
    state = torch.stack([ring_values((8,), seed=i) for i in range(5)])
    every = functools.reduce(torch.bitwise_and, state[:operands])
    with session().call(session().answering[0]) as net:
        out = and_layers(net, xor_shared(net, state), layers)
        first, second = (net.read(out.A, net.A)[i] ^ net.read(out.S, net.S)[i] for i in places)
    assert torch.equal(first, every ^ (state[0] & state[1]) ^ state[4])
    assert torch.equal(second, every)


def xor_shared(net, words: torch.Tensor) -> Shares:
    mask = ring_values(words.shape, seed=5)
    return Shares(net.own(net.A, words ^ mask), net.own(net.S, mask))


@pytest.mark.parametrize("blocks", [2, 3, 5, 8])
def test_the_tree_of_blocks(blocks: int):
    if blocks == 2:
        c, r = torch.arange(4096) // 64, torch.arange(4096) % 64  # all pairs
    else:
        c, r = (torch.randint(0, 8**blocks, (4096,), generator=torch.Generator().manual_seed(i)) for i in (1, 2))
        r = torch.where(torch.arange(4096) % 4 == 0, c, r)
    hot, codes = (f(blocks_of(planes(to_rows(v)), 0, 3 * blocks)) for f, v in ((one_hot, c), (thermometer, r)))
    less, equal = pick_less(hot, codes), pick_equal(hot, codes) ^ hot[0]
    assert len(codes) == CODES
    with session().call(session().answering[0]) as net:
        layers, (lt,) = forest((blocks,), (False,))
        out = and_layers(net, xor_shared(net, torch.cat((less, equal))), layers)
        assert torch.equal(open_bits(net, out[lt], c.shape), c < r)


@pytest.mark.parametrize("counts", [(1, 1), (7, 15), (1, 5), (6, 2), (3, 3, 4), (11, 21)])
@given(seed=SEED)
def test_trees_side_by_side(counts, seed: int):
    """Several comparisons share their layers; each ends in its own [c < r] and, where asked for, [c = r]."""
    generator = torch.Generator().manual_seed(seed)
    whole = tuple(i % 2 == 1 for i in range(len(counts)))
    c, r = (torch.randint(0, 1 << 62, (len(counts), 128), generator=generator) for _ in range(2))
    c, r = (torch.stack([v & (1 << 3 * n) - 1 for v, n in zip(m, counts, strict=True)]) for m in (c, r))
    r = torch.where(torch.arange(128) % 4 == 0, c, r)
    state = []
    for one, other, count in zip(c, r, counts, strict=True):
        hot, codes = (f(blocks_of(planes(to_rows(v)), 0, 3 * count)) for f, v in ((one_hot, one), (thermometer, other)))
        state += [pick_less(hot, codes), pick_equal(hot, codes) ^ hot[0]]
    layers, places = forest(tuple(counts), whole)
    assert len(layers) == max(levels_of(count) for count in counts)
    with session().call(session().answering[0]) as net:
        out = and_layers(net, xor_shared(net, torch.cat(state)), layers)
        found = [open_bits(net, out[at], torch.Size((128,))) for at in places]
    for one, other, kept in zip(c, r, whole, strict=True):
        assert torch.equal(found.pop(0), one < other)
        assert not kept or torch.equal(found.pop(0), one == other)


def signs(x: torch.Tensor, **options) -> torch.Tensor:
    """DReLU with its bits put together locally: [thresholds, *x.shape]."""
    with session().call(session().answering[0]) as net:
        words = drelu(net, open_masked(net, share(net, net.own(net.Q, x))), **options)
        count = len(options.get("thresholds", (0,)))
        return torch.stack([open_bits(net, part(net, words, i, count), x.shape) for i in range(count)])


@given(shape=SHAPE, seed=SEED)
def test_signs_are_exact(shape, seed: int):
    x = ring_values(shape, 63, seed)
    assert torch.equal(signs(x)[0], x >= 0)


@given(shape=SHAPE, seed=SEED, high=st.integers(1, 63))
def test_a_known_bound_saves_planes(shape, seed: int, high: int):
    x = torch.cat([ring_values(shape, high, seed).view(-1), torch.tensor([-(1 << high), (1 << high) - 1])])
    assert torch.equal(signs(x, high=high)[0], x >= 0)


@given(seed=SEED, shift=st.integers(1, 30), span=st.integers(3, 30), fss=st.booleans())
def test_a_bound_with_a_shift(seed: int, shift: int, span: int, fss: bool):
    high = shift + span
    x = ring_values((65,), high, seed).clamp(max=(1 << high) - (1 << shift))
    assert torch.equal(run(lambda w, x: relu(w.net, x, shift, high, fss), x), rounded(x, shift).clamp(min=0))


@given(thresholds=st.lists(st.integers(-(1 << 61), 1 << 61), min_size=1, max_size=5), shape=SHAPE, seed=SEED)
def test_several_thresholds_at_once(thresholds, shape, seed: int):
    x = ring_values(shape, 62, seed)
    found = signs(x, thresholds=tuple(thresholds))
    for t, bits in zip(thresholds, found, strict=True):
        assert torch.equal(bits, x >= t)


# ReLU, ramps, maxima.


def test_a_relu_takes_few_steps():
    """Each is some microseconds of Python, of all parties, beside its work: docs/design.md names the number."""
    with Session().call() as net:
        x = Shares(net.own(net.A, ring_values((100_032,), 50)), net.own(net.S, ring_values((100_032,), 50, 1)))
        before = net._steps
        relu(net, x, 20)
        assert net._steps - before == 56


def test_a_threshold_is_a_ring_element_however_it_is_written():
    x = ring_values((65,), 62).abs() - (1 << 62)
    found = [run(lambda w, x, t=t: ramps(w.net, x, (t,))[0], x) for t in (1 << 63, -1 << 63)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], x - (-1 << 63))


@given(shape=SHAPE, shift=SHIFT, seed=SEED)
def test_relu_with_truncation(shape, shift: int, seed: int):
    x = ring_values(shape, 61, seed)
    check_relu(shift)([x], [run(lambda w, x: relu(w.net, x, shift), x)])


@given(bits=st.lists(st.booleans(), max_size=130), seed=SEED)
def test_selection_by_any_bits(bits, seed: int):
    s, x = torch.tensor(bits, dtype=torch.bool), ring_values((len(bits),), 63, seed)
    words = planes(to_rows(s.long()))[0]

    def program(world, x):
        return select(world.net, xor_shared(world.net, words), open_masked(world.net, x))

    assert torch.equal(run(program, x), torch.where(s, x, 0))
    assert torch.equal(run(lambda w, x: w.bits(xor_shared(w.net, words), x.shape), x), s.long())


@given(thresholds=st.lists(st.integers(-(1 << 61), 1 << 61), min_size=1, max_size=4), shift=st.integers(0, 32),
       shape=SHAPE, seed=SEED)  # fmt: skip
def test_ramps(thresholds, shift: int, shape, seed: int):
    # |x - t 2^shift| has to stay below 2^62 where the shift needs it.
    x = ring_values(shape, 60, seed)
    thresholds = tuple(t >> (shift + 1) for t in thresholds)
    parts = run(lambda w, x: tuple(ramps(w.net, x, thresholds, shift)), x)
    parts = parts if isinstance(parts, list) else [parts]
    for t, found in zip(thresholds, parts, strict=True):
        assert torch.equal(found, (rounded(x, shift) - t).clamp(min=0))


def test_maxima_up_to_the_largest_difference():
    x = torch.tensor([HIGHEST, 0, -1, LOWEST, HIGHEST, 5, LOWEST, LOWEST, 1 << 62, -(1 << 62)])
    y = torch.tensor([0, HIGHEST, LOWEST, -1, HIGHEST, 5, LOWEST, LOWEST + 1, 1 - (1 << 62), (1 << 62) - 1])
    assert torch.equal(run(lambda w, x, y: maximum(w.net, x, y), x, y), torch.maximum(x, y))


@given(count=st.integers(1, 9), shape=st.sampled_from([(), (0,), (1,), (65,), (3, 4)]), seed=SEED)
def test_the_maximum_of_any_number_of_values(count: int, shape, seed: int):
    x = ring_values((count, *shape), 62, seed)
    assert torch.equal(run(lambda w, x: max_tree(w.net, x), x), x.amax(0))


@given(count=st.integers(1, 40), shape=SHAPE, high=st.sampled_from([4, 63]), equal=st.booleans(), seed=SEED)
def test_a_maximum_by_fours(count: int, shape, high: int, equal: bool, seed: int):
    """Rows of any length, many of whose values are equal."""
    x = ring_values((count, *shape), high - 2, seed)
    x = x[torch.arange(count) // 3] if equal else x
    for sizes in ((), group_sizes(count, 1, high, 1 << 18)):
        assert torch.equal(run(lambda w, x, sizes=sizes: max_by_fours(w.net, x, high, sizes), x), x.amax(0))


@pytest.mark.parametrize("size", range(3, 11))
def test_the_largest_of_a_group_of_any_size(size: int):
    x = ring_values((2 * size, 3), 40, size)
    assert torch.equal(run(lambda w, x: max_of_four(w.net, x, 41, size), x), x.view(size, 2, 3).amax(0))


@pytest.mark.sectorch_long
def test_ten_million_truncations_and_comparisons():
    # Truncating shares locally, as most systems do, would be wrong with probability |x| / 2^64: an eighth at 2^61.
    count = wrong = off = 0
    while count < 10_000_000:
        shift = 1 + (count >> 18) % 32
        x = ring_values((1 << 18,), 61, seed=count)
        y = run(lambda w, x, shift=shift: truncate(w.net, x, shift), x)
        off += int((y != rounded_shift(x, shift)).sum())
        wrong += int((signs(x)[0] != (x >= 0)).sum())
        off += int(
            (run(lambda w, x, shift=shift: relu(w.net, x, shift), x) != rounded_shift(x, shift).clamp(min=0)).sum()
        )
        count += x.numel()
    print(f"{count} truncations and ReLUs, {off} not the rounded value; {count} comparisons, {wrong} wrong")
    assert off == wrong == 0
